"""What is said once a process rather than at every call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping

_given: set[str] = set()
_lock = threading.Lock()

_ALLOCATOR = "torch's caching allocator already reuses freed memory"
NEEDLESS = {
    "enable_memory_pool": _ALLOCATOR,
    "use_memory_pool": _ALLOCATOR,
    "lightweight_pool": _ALLOCATOR,
    "memory_pool_size": _ALLOCATOR,
    "enable_error_recovery": "nothing is retried: an error says what was wrong, and state is never left half changed",
    "enable_batched_ops": "blocks of equal shape are always computed in batches",
    "mixed_precision": "the dtype of the tensors, or torch.autocast, decides",
    "use_tf32": "torch.set_float32_matmul_precision decides",
    "log_memory_usage": "performance_monitor.enable() measures it",
    "enable_profiling": "performance_monitor.enable() measures, and torch.profiler sees every operator",
}
"""Flags that have nothing left to switch, each with the reason."""


def warn_once(message: str, *, stacklevel: int = 2) -> None:
    """Give a `UserWarning` unless the same words were given before."""
    with _lock:
        if message in _given:
            return
        _given.add(message)
    warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)


def accept_needless(owner: str, flags: Mapping[str, object]) -> None:
    """Warn once of each flag that switches nothing any more; TypeError where one is not known."""
    for name in flags:
        if name not in NEEDLESS:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
        warn_once(f"{owner}: {name} changes nothing: {NEEDLESS[name]}", stacklevel=3)
