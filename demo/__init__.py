"""`make demo`, or `python -m demo`: exact, fast, training on text, an encoder, in about three minutes on two cores."""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demo.encodes import Encodes
from demo.fast import Fast
from demo.right import Right
from demo.trains import Trains
from ringtile.patterns import TileGrid, parse
from ringtile.tools.machine import busy_warning, commit, machine_facts, versions
from ringtile.tools.plot import missing_matplotlib
from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.units import count, duration_text

ACTS = ("right", "fast", "trains", "encodes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the acts. Return 0, 1 if a check failed, or 130 after Ctrl-C, which keeps the figures so far."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__, allow_abbrev=False)
    add, folder = parser.add_argument, Path("ringtile-demo")
    add("--only", action="append", choices=ACTS, help="run only this act (repeatable)")
    add("--seconds", type=float, default=60.0, help="sparse training time; dense gets a third of it (default: 60)")
    context = "tokens of the speed table and of training (default: 16K)"
    add("--context", type=count, default=16384, metavar="N", help=context)
    add("--pattern", metavar="TEXT", help='for training and the curve, made causal: "window(512)"; checked, too')
    add("--text", type=Path, metavar="FILE", help="train on this file (default: Python's own sources)")
    add("--out", type=Path, default=folder, metavar="DIR", help=f"picture folder (default: {folder})")
    add("--seed", type=int, default=0, help="seed of inputs, weights and text windows (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args(argv)
    try:
        acts = _acts(args)
    except ValueError as error:
        parser.error(str(error))
    progress, began = Progress(quiet=args.json), time.monotonic()
    facts, found, warning, no_pictures = machine_facts(), versions(), busy_warning(), missing_matplotlib()
    progress.say(
        f"ringtile {found['ringtile']}, torch {found['torch']}, Python {platform.python_version()}, "
        f"{threads_text()} on {facts['cpu']} ({facts['instruction_set']}), {facts['system']}"
    )
    if warning is not None:
        progress.say(warning)
    started: list[Right | Fast | Trains | Encodes] = []
    pictures: dict[str, Path] = {}
    interrupted = False
    for act in acts:
        progress.say()
        started.append(act)
        try:
            act.run(progress)
        except KeyboardInterrupt:
            interrupted = True
        # Figures stay in the act, so that an interrupted act can still report them.
        if no_pictures is None and act.has_figures:
            pictures[act.name] = args.out / f"{act.name}.png"
            act.draw(pictures[act.name])
        if interrupted:
            break
    progress.clear()
    passed, took = all(act.passed for act in started), time.monotonic() - began
    if args.json:
        record = {"commit": commit(), "versions": found, "machine": facts, "warning": warning, "seed": args.seed}
        record |= {act.name: act.record() for act in started}
        record["pictures"] = {name: str(path) for name, path in pictures.items()}
        record |= {"no_pictures_because": no_pictures, "seconds": took, "passed": passed, "interrupted": interrupted}
        print(json.dumps(_finite(record), indent=1, allow_nan=False))
    else:
        print(f"\n{'Interrupted' if interrupted else 'Done'} after {duration_text(took)}")
        for path in pictures.values():
            print(f"  picture {path}")
        if no_pictures is not None:
            print(f"  pictures left out: {no_pictures}")
        if not passed:
            print("  A CHECK FAILED: see the rows above")
    return 130 if interrupted else 0 if passed else 1


def _finite(value: Any) -> Any:
    """Return the same data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _acts(args: argparse.Namespace) -> list[Right | Fast | Trains | Encodes]:
    """Return the chosen acts, in order, after all checks of the arguments."""
    chosen = args.only or ACTS
    if args.context < 64:
        raise ValueError(f"--context: expected at least 64 tokens, got {args.context}")
    if not args.seconds > 0:
        raise ValueError(f"--seconds: expected a positive number, got {args.seconds}")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out: expected a folder, got the file {str(args.out)!r}")
    if args.text is not None and "trains" not in chosen:
        raise ValueError("--text: used only by the training act, which --only leaves out")
    if args.pattern is not None and set(chosen) == {"encodes"}:
        raise ValueError("--pattern: not used by the encoder, the only act that --only names")
    pattern = None if args.pattern is None else parse(args.pattern)
    makers: dict[str, Callable[[], Right | Fast | Trains | Encodes]] = {
        "right": lambda: Right(args.seed, pattern),
        "fast": lambda: Fast(args.seed, args.context, pattern),
        "trains": lambda: Trains(args.seed, args.context, args.seconds, pattern, args.text),
        "encodes": lambda: Encodes(args.seed),
    }
    acts = [make() for name, make in makers.items() if name in chosen]
    # An act can run for a minute before it meets the length at which a pattern is invalid.
    if pattern is not None:
        for n_tokens in sorted({n_tokens for act in acts for n_tokens in act.lengths}):
            pattern.validate(TileGrid(128, 0, n_tokens, n_tokens))
    return acts
