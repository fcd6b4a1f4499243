"""Named spans of time that torch.profiler shows, and that cost next to nothing while nobody profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

INDEX = "ringtile::index"
KERNEL = "ringtile::kernel"

_NOTHING: AbstractContextManager[Any] = nullcontext()


class KernelTime(NamedTuple):
    """What the threads of one call of the native library did, in nanoseconds, all together."""

    backward: bool
    packing: int
    """Laying tiles out, widening them, and zeros in place of what nobody keeps."""
    working: int
    """Packing and all the rest."""


listeners: list[list[KernelTime]] = []
"""Who wants to know; empty while nobody does."""


@contextmanager
def kernel_times() -> Iterator[list[KernelTime]]:
    """The native kernel's own clocks: a list to which each of its calls adds an entry, in any thread of Python.

    >>> with kernel_times() as times:
    ...     pass
    >>> times
    []
    """
    mine: list[KernelTime] = []
    listeners.append(mine)
    try:
        yield mine
    finally:
        listeners[:] = [other for other in listeners if other is not mine]


def span(name: str) -> AbstractContextManager[Any]:
    """A span of this name where a profiler listens.

    >>> with span("ringtile::index"):
    ...     pass
    """
    return record_function(name) if torch._C._autograd._profiler_enabled() else _NOTHING
