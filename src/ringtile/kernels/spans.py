"""Named spans of time for torch.profiler. They cost almost no time unless you profile."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.profiler import record_function

from ringtile.patterns.private import is_profiled

INDEX = "ringtile::index"
KERNEL = "ringtile::kernel"

_NOTHING: AbstractContextManager[Any] = nullcontext()


class KernelTime(NamedTuple):
    """Thread time of one call of the native library, summed over its threads, in nanoseconds."""

    backward: bool
    packing: int
    """Copying, widening and transposing tiles, and zeroing unused keys."""
    working: int
    """All work, with packing."""


listeners: list[list[KernelTime]] = []
"""Lists that get the times of every call, empty unless you profile."""


@contextmanager
def kernel_times() -> Iterator[list[KernelTime]]:
    """Return a list to which each call of the native kernel adds its times, in any thread of Python."""
    mine: list[KernelTime] = []
    listeners.append(mine)
    try:
        yield mine
    finally:
        # By identity: two lists without times are equal.
        listeners[:] = [other for other in listeners if other is not mine]


def span(name: str) -> AbstractContextManager[Any]:
    """Return a span with this name if a profiler is active."""
    return record_function(name) if is_profiled() else _NOTHING
