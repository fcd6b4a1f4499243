"""The `ringtile` command: parses, and calls the function in the room that a verb belongs to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import ringtile

VERBS = {
    "demo": "see the point in two minutes: exact, fast, and training on text",
    "show": "draw a pattern and print its density, memory and work",
    "bench": "time sparse attention against its peers, correctness first",
    "profile": "see where the time of a call goes, index to gradients",
    "doctor": "print versions, devices and backends, and why a backend is not available",
}


class Room(Protocol):
    """What a verb's module provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def _room(verb: str) -> Room:
    """Import the module of one verb, so that the others cost nothing."""
    if verb == "demo":
        from ringtile import demo

        return demo
    if verb == "show":
        from ringtile.analysis import show

        return show
    if verb == "bench":
        from ringtile.measure import bench

        return bench
    if verb == "profile":
        from ringtile.measure import profile

        return profile
    from ringtile.measure import doctor

    return doctor


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, without the leading ``ringtile``; ``run`` of the result is the verb's function.

    >>> parse(["doctor", "--json"]).json
    True
    """
    parser = argparse.ArgumentParser(
        prog="ringtile", description="Exact block-sparse attention for long sequences.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ringtile {ringtile.__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        subparser = verbs.add_parser(
            verb, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
        )
        if verb == chosen:
            room = _room(verb)
            room.add_arguments(subparser)
            subparser.set_defaults(run=room.run)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit status.

    0 is success, 1 what the verb calls a failure, 2 bad input, 130 an interrupt, 141 a closed pipe.
    """
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has gone; without this, the interpreter complains once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("ringtile: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"ringtile: error: {error}", file=sys.stderr)
        return 2
    return status
