"""What a run prints: result lines, and on a terminal one updating line with the rate and the time left."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

import torch

from ringtile.analysis.units import duration_text

_CLEAR = "\r\x1b[K"


def threads_text() -> str:
    """How many threads torch computes with, as "1 thread" or "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'}"


class Progress:
    """Prints result lines to standard output and, where standard error is a terminal, how far a phase is.

    Result lines are held back when `quiet`: the caller prints one record at the end instead.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._phase, self._unit, self._total = "", "", 0.0
        self._began = time.monotonic()

    def say(self, line: str = "") -> None:
        """Print a result line."""
        self.clear()
        if not self._quiet:
            print(line, flush=True)

    def begin(self, phase: str, total: float, unit: str) -> None:
        """Start a phase of `total` units, 0 where nobody knows; rate and time left count from here."""
        self._phase, self._total, self._unit = phase, total, unit
        self._began = time.monotonic()
        self.update(0)

    def update(self, done: float, note: str = "", *, seconds_left: float | None = None) -> None:
        """Show that `done` units are done; `seconds_left` where the caller knows better than the rate."""
        if not self._live:
            return
        elapsed = time.monotonic() - self._began
        of_total = f"/{self._total:,.0f}" if self._total else ""
        parts = [self._phase, f"{done:,.0f}{of_total} {self._unit}"]
        if done > 0 and elapsed > 0:
            parts.append(f"{done / elapsed:.3g} {self._unit}/s")
            if seconds_left is None and self._total:
                seconds_left = elapsed / done * (self._total - done)
        if seconds_left is not None:
            parts.append(f"{duration_text(round(seconds_left))} left" if seconds_left >= 0.5 else "almost done")
        if note:
            parts.append(note)
        line = "  ".join(parts)
        self._stream.write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def clear(self) -> None:
        """Take the updating line away."""
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()
