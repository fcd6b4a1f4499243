"""Train a transformers model with windows on long rows that several processes share, by the Trainer.

    torchrun --nproc-per-node 4 examples/train_context_parallel.py my.txt --model path/to/model --context 65536

Without --model, it makes a small Gemma 3 with random weights that reads bytes. Without a file, the model learns the
manual that comes with Python. Without torchrun, it is a single process, and logs the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, TrainingArguments

from ringtile.integrations.transformers import CPTrainer, context_parallel


def new_model(path: str | None, context: int, window: int) -> Any:
    if path:
        return AutoModelForCausalLM.from_pretrained(path)
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        sliding_window=window,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    return AutoModelForCausalLM.from_config(config)


def rows_of(file: Path | None, path: str | None, context: int) -> Tensor:
    """Return the tokens ``[rows, context]`` of a text: those of the model's tokenizer, or bytes."""
    text = file.read_text(encoding="utf-8") if file else "\n".join(topics.values())
    if path:
        tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"][0]
    else:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    if len(tokens) < context:
        raise SystemExit(f"the text has {len(tokens):,} tokens: too few for --context {context}")
    return tokens[: len(tokens) // context * context].view(-1, context)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--model", help="name or folder of a causal language model")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layout", choices=["zigzag", "contiguous", "striped"], default="zigzag")
    folder = Path(tempfile.gettempdir(), "ringtile-context-parallel")
    parser.add_argument("--save", type=Path, default=folder, help="folder of the model (%(default)s)")
    args = parser.parse_args(argv)
    if args.file and not args.file.is_file():
        parser.error(f"file: expected a text file, got {str(args.file)!r}")
    training = TrainingArguments(
        output_dir=str(args.save),
        max_steps=args.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    # Under torchrun, this joins the process group.
    print(f"rank {training.process_index} computes on {training.device}", flush=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = new_model(args.model, args.context, args.window)
    cp = context_parallel(model, layout=args.layout)
    rows = rows_of(args.file, args.model, args.context)
    # Each row is dealt to all ranks, and each rank computes its part of it.
    trainer = CPTrainer(model, training, train_dataset=[{"input_ids": row, "labels": row} for row in rows], cp=cp)
    trainer.train()
    trainer.save_model()
    if cp.rank == 0:
        for layer in cp.report():
            print(f"{layer.kind}: receives {layer.received:,} bytes per layer, an all-gather {layer.gathered:,}")
    dist.destroy_process_group()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
