"""Train LongNet, dilated attention over segments of three lengths, on a text file.

    python examples/longnet.py my.txt --context 16384

Only the attention differs from examples/train_window.py. Without a file, the model learns the manual of Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from train_window import read_bytes, train

from ringtile import SparseLanguageModel, SparseTransformer, longnet_attend


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--context", type=int, default=4096, help="a multiple of 16")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args(argv)
    if args.file and not args.file.is_file():
        parser.error(f"file: expected a text file, got {str(args.file)!r}")
    torch.manual_seed(0)
    # Each branch attends within segments of one length, to every r-th token. Rate 1 covers every query.
    segments = [args.context // 16, args.context // 4, args.context]
    attend = longnet_attend(segments, dilation_rates=[1, 4, 16])
    model = SparseLanguageModel(256, SparseTransformer(2, 128, 4, is_causal=True, attend=attend))
    return train(model, read_bytes(args.file), args.context, args.steps)


if __name__ == "__main__":
    main()
