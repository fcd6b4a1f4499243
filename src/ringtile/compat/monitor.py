"""Measure attention while it is used: time and memory of its calls, and how far it is from dense attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.measure.memory import peak_memory

Attention = Callable[[], Tensor]
"""One call with its inputs bound: ``[B, H, N, D]``."""

KEYS = ("avg_forward_time_ms", "avg_sparsity", "avg_speedup", "avg_memory_mb", "quality_score")


class PerformanceMonitor:
    """Times the calls of an attention module while enabled; costs nothing while disabled.

    The first call of each shape is followed by one timed call of dense attention on the same inputs, with the time and
    memory that dense attention needs. While enabled, each call waits for its device.

    >>> monitor = PerformanceMonitor()
    >>> monitor.enable()
    >>> x = torch.randn(1, 2, 256, 16)
    >>> out = monitor.measure("shape", lambda: x, lambda: x, lambda: x, density=1.0)
    >>> monitor.report()["quality_score"] > 0.999
    True
    """

    def __init__(self) -> None:
        self.enabled = False
        self.reset()

    def enable(self) -> None:
        """Measure the calls from now on."""
        self.enabled = True

    def disable(self) -> None:
        """Stop measuring and keep the results."""
        self.enabled = False

    def reset(self) -> None:
        """Forget the results."""
        self._probes: dict[Hashable, tuple[float, float, float]] = {}
        self._calls: list[tuple[float, float, float, float, float]] = []

    def measure(
        self, shape: Hashable, call: Attention, sparse: Attention, dense: Attention, *, density: float
    ) -> Tensor:
        """Return the result of ``call``, timed; ``sparse`` and ``dense`` run once per shape, without dropout."""
        began = time.perf_counter()
        out = call()
        _wait_for(out.device)
        seconds = time.perf_counter() - began
        if shape not in self._probes:
            self._probes[shape] = _probe(sparse, dense, out.device)
        self._calls.append((seconds, density, *self._probes[shape]))
        return out

    def report(self) -> dict[str, float]:
        """Return the means over the calls since `enable` or `reset`, NaN if there are none."""
        if not self._calls:
            return dict.fromkeys(KEYS, math.nan)
        seconds, density, dense_seconds, memory, quality = (sum(x) / len(x) for x in zip(*self._calls, strict=True))
        means = (1e3 * seconds, density, dense_seconds / seconds, memory / 2**20, quality)
        return dict(zip(KEYS, means, strict=True))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _probe(sparse: Attention, dense: Attention, device: torch.device) -> tuple[float, float, float]:
    """Return seconds of dense attention, peak bytes of sparse attention, and the similarity of their outputs."""
    outs: list[Tensor] = []

    def kept() -> Tensor:
        outs.append(sparse())
        return outs[0]

    with torch.no_grad():
        memory = peak_memory(kept, None, device).forward
        _wait_for(device)
        began = time.perf_counter()
        exact = dense()
        _wait_for(device)
        seconds = time.perf_counter() - began
        quality = F.cosine_similarity(outs[0].double(), exact.double(), dim=-1).mean().item()
    return seconds, memory, quality
