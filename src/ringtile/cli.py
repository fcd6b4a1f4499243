"""The `ringtile` command: parse a command line and run its verb."""

import argparse
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import ringtile

VERBS = {
    "show": ("ringtile.tools.show", "draw a pattern and print its density, memory and work"),
    "plan": ("ringtile.tools.predict.plan", "predict traffic, balance, memory and time of attention over many ranks"),
    "bench": ("ringtile.tools.bench", "time sparse attention against baselines, correctness first"),
    "hf": ("ringtile.tools.hf", "check and time a model of Hugging Face transformers, and print its loss"),
    "quality": ("ringtile.tools.quality", "measure how much of your model's quality sparse attention keeps"),
    "profile": ("ringtile.tools.profile", "show where the time of one call goes, from index to gradients"),
    "doctor": ("ringtile.tools.doctor", "print versions, devices and backends, and why a backend is not available"),
}
"""Each verb with its module and its help."""


class _Parser(argparse.ArgumentParser):
    """Ends with one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, without the leading ``ringtile``. ``run`` of the result is the verb's function."""
    parser = _Parser(
        prog="ringtile", description="Exact block-sparse attention for long sequences.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ringtile {ringtile.__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for verb, (name, summary) in VERBS.items():
        subparser = verbs.add_parser(
            verb, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
        )
        if verb == chosen:
            # Import this module only, so that the others cost nothing.
            module = import_module(name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, command=shlex.join(["ringtile", *argv]))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
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
    except RuntimeError as error:
        # PyTorch has no exception class of its own for a CPU that is out of memory, or for a size beyond 64 bits.
        if not re.search("can't allocate memory|Storage size calculation overflowed", str(error)):
            raise
        print(f"ringtile: error: {str(error).partition('DefaultCPUAllocator: ')[2] or error}", file=sys.stderr)
        return 2
    return status
