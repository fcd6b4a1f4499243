"""The output of a run: result lines, and on a terminal one line that is updated in place."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

import torch

from ringtile.tools.units import duration_text

_CLEAR = "\r\x1b[K"


def threads_text() -> str:
    """Return the number of torch's threads as "1 thread" or "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'}"


class Progress:
    """Prints result lines to standard output and, if standard error is a terminal, a live line to it.

    With ``quiet``, the caller prints one record at the end instead of result lines.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._quiet, self._stream = quiet, sys.stderr if stream is None else stream
        self._live = self._stream.isatty()

    def say(self, line: str = "") -> None:
        """Print a result line."""
        self.clear()
        if not self._quiet:
            print(line, flush=True)

    def show(self, text: str, seconds_left: float | None = None) -> None:
        """Replace the live line."""
        if self._live:
            left = "" if seconds_left is None else f"  {duration_text(max(1, round(seconds_left)))} left"
            self._stream.write(_CLEAR + (text + left)[: shutil.get_terminal_size().columns - 1])
            self._stream.flush()

    def clear(self) -> None:
        """Remove the live line."""
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()
