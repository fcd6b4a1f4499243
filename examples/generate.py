"""Continue a prompt with a model that examples/train_window.py has saved.

    python examples/train_window.py --save model.pt
    python examples/generate.py model.pt --prompt "The with statement" --bytes 400
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from train_window import new_model


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> bytes:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="The with statement")
    parser.add_argument("--bytes", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args(argv)
    if not args.model.is_file():
        parser.error(f"model: expected a file that examples/train_window.py has saved, got {str(args.model)!r}")
    if not args.prompt:
        parser.error("--prompt: expected at least one byte, got ''")
    saved = torch.load(args.model)
    model = new_model(saved["window"]).eval()
    model.load_state_dict(saved["weights"])
    torch.manual_seed(0)

    # The cache keeps the keys that the window and the global tokens still reach, and drops all others.
    cache = model.transformer.new_cache()
    new = torch.tensor([list(args.prompt.encode())])
    made = bytearray()
    for _ in range(args.bytes):
        logits = model(new, cache=cache)[:, -1]
        new = torch.multinomial((logits / args.temperature).softmax(-1), 1)
        made.append(int(new))
        sys.stdout.write(chr(made[-1]) if made[-1] < 128 else "?")
        sys.stdout.flush()
    print(f"\n{cache.length:,} tokens seen, {cache.layers[0].held} keys per layer kept, {cache.nbytes:,} bytes")
    return bytes(made)


if __name__ == "__main__":
    main()
