"""Train a byte-level language model with sliding-window attention on a text file.

    python examples/train_window.py my.txt --context 8192 --window 256 --save model.pt

Without a file, the model learns the manual that comes with Python.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile import SparseLanguageModel, SparseTransformer
from ringtile.patterns import GlobalTokens, Window


def read_bytes(file: Path | None) -> bytes:
    """Read a file, or the manual that comes with Python."""
    return file.read_bytes() if file else "\n".join(topics.values()).encode()


def new_model(window: int) -> SparseLanguageModel:
    # is_causal adds the causal rule. All tokens also attend to the first 4.
    pattern = Window(window) | GlobalTokens(4)
    return SparseLanguageModel(256, SparseTransformer(2, 128, 4, is_causal=True, pattern=pattern))


def bits_per_byte(model: SparseLanguageModel, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[None, :-1])[0], text[1:]) / math.log(2)


def train(model: SparseLanguageModel, data: bytes, context: int, steps: int) -> float:
    """Train on random windows of the first 90% of the text, and return bits per byte on the rest of it."""
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    last = int(0.9 * len(text)) - context - 1
    if last < 0:
        raise SystemExit(f"the text has {len(text):,} bytes: too few for --context {context}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        first = int(torch.randint(last + 1, ()))
        loss = bits_per_byte(model, text[first : first + context + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps:
            print(f"step {step}: {loss:.2f} bits per byte, {time.perf_counter() - began:.1f} s", flush=True)
    with torch.no_grad():
        held_out = bits_per_byte(model.eval(), text[-len(text) // 10 :][: context + 1]).item()
    print(f"held-out text: {held_out:.2f} bits per byte")
    return held_out


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, help="write the weights to this file, for examples/generate.py")
    args = parser.parse_args(argv)
    if args.file and not args.file.is_file():
        parser.error(f"file: expected a text file, got {str(args.file)!r}")
    torch.manual_seed(0)
    model = new_model(args.window)
    held_out = train(model, read_bytes(args.file), args.context, args.steps)
    if args.save:
        torch.save({"window": args.window, "weights": model.state_dict()}, args.save)
    return held_out


if __name__ == "__main__":
    main()
