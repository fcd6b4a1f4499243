"""Train a transformers model with windows, by Lightning.

    python examples/train_lightning.py my.txt --context 8192 --window 256 --save run

Without a file, the model learns the manual that comes with Python. Run it again with more --steps and it goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import MistralConfig, MistralForCausalLM

from ringtile.integrations.transformers import use_ringtile


class ByteModel(pl.LightningModule):
    """A small Mistral that reads bytes."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = MistralConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=window,
        )
        self.model = use_ringtile(MistralForCausalLM(config))

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        print(f"step {self.global_step + 1}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    folder = Path(tempfile.gettempdir(), "ringtile-lightning")
    parser.add_argument("--save", type=Path, default=folder, help="folder of the checkpoint (%(default)s)")
    args = parser.parse_args(argv)
    if args.file and not args.file.is_file():
        parser.error(f"file: expected a text file, got {str(args.file)!r}")
    pl.seed_everything(0, verbose=False)
    data = args.file.read_bytes() if args.file else "\n".join(topics.values()).encode()
    if len(data) < args.context:
        raise SystemExit(f"the text has {len(data):,} bytes: too few for --context {args.context}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    rows = text[: len(text) // args.context * args.context].view(-1, args.context)
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, last = ByteModel(args.window), args.save / "last.ckpt"
    trainer.fit(model, DataLoader(list(rows), batch_size=1), ckpt_path=str(last) if last.exists() else None)
    trainer.save_checkpoint(last)
    with torch.no_grad():
        loss: float = model.model(rows[:1], labels=rows[:1]).loss.item()
    print(f"loss of the first row: {loss:.3f}; checkpoint in {last}")
    return loss


if __name__ == "__main__":
    main()
