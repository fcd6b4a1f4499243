"""Train a transformers model on packed documents in bfloat16, by Accelerate.

    python examples/train_accelerate.py --tokens 16384 --window 512 --save run
    accelerate launch examples/train_accelerate.py --tokens 16384

Documents are paragraphs of the manual that comes with Python. Tokens attend to their own document. The program first
compares the loss of a packed row with that of each document alone. Run it again with more --steps and it goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import MistralConfig, MistralForCausalLM

from ringtile.integrations.transformers import use_ringtile

Row = dict[str, Tensor]


def new_model(window: int) -> Any:
    config = MistralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        use_cache=False,
    )
    return use_ringtile(MistralForCausalLM(config))


def pack(documents: Sequence[bytes], n_tokens: int) -> list[Row]:
    """Put documents after one another into rows of ``n_tokens``. Positions that begin again separate them."""
    rows: list[Row] = []
    held: list[Tensor] = []
    for document in documents:
        tokens = torch.frombuffer(bytearray(document[:n_tokens]), dtype=torch.uint8).long()
        if sum(map(len, held)) + len(tokens) > n_tokens:
            rows.append(row_of(held, n_tokens))
            held = []
        held.append(tokens)
    return [*rows, row_of(held, n_tokens)] if held else rows


def row_of(documents: Sequence[Tensor], n_tokens: int) -> Row:
    # The rest of a row is a document without labels.
    rest = torch.zeros(n_tokens - sum(map(len, documents)), dtype=torch.int64)
    labels = [x.index_fill(0, torch.tensor([0]), -100) for x in documents]
    return {
        "input_ids": torch.cat([*documents, rest]),
        "labels": torch.cat([*labels, rest - 100]),
        "position_ids": torch.cat([torch.arange(len(x)) for x in (*documents, rest)]),
    }


@torch.no_grad()
def difference(model: Any, row: Row) -> float:
    """Return the loss of a row minus that of each document alone."""
    packed = model(**{name: x[None] for name, x in row.items()}).loss.item()
    ends = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["position_ids"])]
    total, count = 0.0, 0
    for begin, end in pairwise(ends):
        labels = row["labels"][begin:end]
        if (kept := int((labels != -100).sum())) > 0:
            tokens = row["input_ids"][None, begin:end]
            total += kept * model(input_ids=tokens, labels=labels[None]).loss.item()
            count += kept
    return packed - total / count


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a row")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    folder = Path(tempfile.gettempdir(), "ringtile-accelerate")
    parser.add_argument("--save", type=Path, default=folder, help="folder of model and state (%(default)s)")
    args = parser.parse_args(argv)
    accelerator = Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    documents = [part.encode() for text in topics.values() for part in text.split("\n\n") if part.strip()]
    rows, model = pack(documents, args.tokens), new_model(args.window)
    found = difference(model, rows[0])
    accelerator.print(f"{len(documents):,} documents in {len(rows)} rows; packed loss minus that of each: {found:.1e}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))
    state, done = args.save / "state", 0
    if state.exists():
        accelerator.load_state(str(state))
        done = int((args.save / "steps").read_text())
    batches = [batch for _ in range(args.steps // len(loader) + 1) for batch in loader]
    for step, batch in enumerate(batches[done : args.steps], done + 1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
    accelerator.save_state(str(state))
    accelerator.unwrap_model(model).save_pretrained(args.save)
    (args.save / "steps").write_text(str(args.steps))
    return found


if __name__ == "__main__":
    main()
