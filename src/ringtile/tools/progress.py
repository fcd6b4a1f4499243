"""The output of a run: result lines, and on a terminal one line that is updated in place."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ringtile.tools.units import duration_text

_CLEAR = "\r\x1b[K"

T = TypeVar("T")


def threads_text() -> str:
    """Return the number of torch's threads as "1 thread" or "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'}"


class Progress:
    """Prints result lines to standard output and, if standard error is a terminal, a live line to it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._stream = quiet, sys.stderr
        self._live = self._stream.isatty()

    def say(self, line: str = "") -> None:
        self.clear()
        if not self._quiet:
            print(line, flush=True)

    def show(self, text: str, seconds_left: float | None = None) -> None:
        """Replace the live line."""
        if self._live:
            # A line that wraps could not be replaced, so cut it to the width of the terminal.
            left = "" if seconds_left is None else f"  {duration_text(max(1, round(seconds_left)))} left"
            self._stream.write(_CLEAR + (text + left)[: shutil.get_terminal_size().columns - 1])
            self._stream.flush()

    def clear(self) -> None:
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def through(
        self, jobs: Sequence[T], name: Callable[[T], str], cost: Callable[[T], float], *, done: int = 0
    ) -> Iterator[T]:
        """Yield jobs, and show the number, the name and the time left of each. ``done`` jobs have ended before."""
        left, ended, began = sum(map(cost, jobs)), 0.0, time.monotonic()
        try:
            for number, job in enumerate(jobs, done + 1):
                # Before a job has ended, its expected seconds are all that is known.
                pace = (time.monotonic() - began) / ended if ended else 1.0
                self.show(f"{number}/{done + len(jobs)} {name(job)}", left * pace)
                yield job
                ended, left = ended + cost(job), left - cost(job)
        finally:
            self.clear()
