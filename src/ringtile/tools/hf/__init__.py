"""`ringtile hf`: whether ringtile helps a model of Hugging Face transformers, correctness first, then time and loss."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ringtile.patterns import parse
from ringtile.tools.hf.check import NAMES
from ringtile.tools.hf.models import load
from ringtile.tools.hf.study import Study, draw
from ringtile.tools.machine import origin
from ringtile.tools.plot import FORMATS, check_out
from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.record import DTYPES
from ringtile.tools.units import count

PASSES = ("prefill", "training")
DEFAULT_PEERS = ("sdpa", "flex")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder of save_pretrained, a GGUF file, or a name on the hub")
    config = "a config.json or its folder, instead of MODEL: random weights, and one token per byte"
    add("--random-weights", type=Path, metavar="CONFIG", help=config)
    add("--tokens", type=count, default=4096, metavar="N", help="sequence length, or frames of sound (default: 4096)")
    add("--pattern", help="also measure the model with the pairs that this pattern and its own mask keep")
    add("--text", type=Path, metavar="FILE", help="text for the loss (default: Python's own documentation)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of weights and activations (default: float32)")
    peers = f"baselines among {', '.join(NAMES)} (default: {' '.join(DEFAULT_PEERS)})"
    add("--peers", nargs="*", default=DEFAULT_PEERS, choices=tuple(NAMES), metavar="NAME", help=peers)
    add("--passes", nargs="+", default=PASSES, choices=PASSES, help="passes to measure (default: both)")
    add("--rounds", type=count, default=3, metavar="R", help="timed rounds of each pass (default: 3)")
    add("--seed", type=int, default=0, help="seed of random weights (default: 0)")
    add("--out", type=Path, metavar="PICTURE", help=f"also draw time and memory into this file ({', '.join(FORMATS)})")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the check, the losses and the times of a model; return 0, or 1 if a result is wrong."""
    check_out(args.out)
    pattern = None if args.pattern is None else parse(args.pattern)
    progress = Progress(quiet=args.json)
    progress.show("load the model")
    # This imports transformers, which takes seconds, so bad arguments are refused before.
    loaded = load(args.model, args.random_weights, args.tokens, args.text, args.seed)
    study = Study(loaded, pattern, getattr(torch, args.dtype), args.peers, args.passes, args.rounds)
    progress.say(f"{study.title}, {args.dtype}, {threads_text()}")
    progress.say(f"{args.tokens:,} tokens of {loaded.text}")
    study.run(progress)
    if args.out is not None and not study.complaints:
        draw(study, args.out)
        progress.say(f"picture: {args.out}")
    if args.json:
        record = {
            **origin(args.command),
            "model": study.title,
            "text": loaded.text,
            "tokens": args.tokens,
            "dtype": args.dtype,
            "pattern": None if pattern is None else repr(pattern),
            "checked_tokens": study.checked_tokens,
            "entrants": [asdict(entrant) for entrant in study.entrants],
        }
        print(json.dumps(record, indent=1))
    for complaint in study.complaints:
        print(f"ringtile hf: {complaint}", file=sys.stderr)
    return 1 if study.complaints else 0
