"""Measure attention while it is used: time and memory of its calls, and how far it is from dense attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.measure.memory import peak_memory

Attention = Callable[[], Tensor]
"""One call with its inputs bound: ``[B, H, N, D]``."""


class Probe(NamedTuple):
    """What is measured once a shape, without dropout and gradients."""

    dense_seconds: float
    """One call of dense attention under the same causal and padding rules."""
    memory_bytes: int
    """Peak of the sparse forward pass beyond inputs and output."""
    quality: float
    """Mean cosine similarity of the outputs of sparse and dense attention, by token and head."""


class PerformanceReport(NamedTuple):
    """Means over the measured calls; NaN where there are none."""

    forward_ms: float
    density: float
    """Kept pairs over those of dense attention under the same causal rule."""
    speedup: float
    """Time of dense attention over the time of the calls."""
    memory_mib: float
    quality: float


class PerformanceMonitor:
    """Times the calls of an attention module while it is enabled; costs nothing while it is not.

    The first call of each shape is followed by one timed call of dense attention on the same inputs, which takes
    the time and memory that dense attention takes. Enabled, each call waits for its device.

    >>> monitor = PerformanceMonitor()
    >>> monitor.enable()
    >>> x = torch.randn(1, 2, 256, 16)
    >>> out = monitor.measure("shape", lambda: x, lambda: x, lambda: x, density=1.0)
    >>> monitor.report().quality > 0.999
    True
    """

    def __init__(self) -> None:
        self.enabled = False
        self._probes: dict[Hashable, Probe] = {}
        self.reset()

    def enable(self) -> None:
        """Measure the calls from now on."""
        self.enabled = True

    def disable(self) -> None:
        """Stop measuring; what was measured stays."""
        self.enabled = False

    def reset(self) -> None:
        """Forget what was measured."""
        self._probes.clear()
        self._calls = 0
        self._seconds = self._density = self._dense_seconds = self._memory = self._quality = 0.0

    def measure(
        self, shape: Hashable, call: Attention, sparse: Attention, dense: Attention, *, density: float
    ) -> Tensor:
        """The result of ``call``, timed; ``sparse`` and ``dense`` are the same without dropout, run once a shape."""
        began = time.perf_counter()
        out = call()
        _wait_for(out.device)
        seconds = time.perf_counter() - began
        probe = self._probes.get(shape)
        if probe is None:
            probe = self._probes[shape] = _probe(sparse, dense, out.device)
        self._calls += 1
        self._seconds += seconds
        self._density += density
        self._dense_seconds += probe.dense_seconds
        self._memory += probe.memory_bytes
        self._quality += probe.quality
        return out

    def report(self) -> PerformanceReport:
        """Means over the calls since `enable` or `reset`."""
        if not self._calls:
            return PerformanceReport(*[math.nan] * 5)
        return PerformanceReport(
            forward_ms=1e3 * self._seconds / self._calls,
            density=self._density / self._calls,
            speedup=self._dense_seconds / self._seconds,
            memory_mib=self._memory / self._calls / 2**20,
            quality=self._quality / self._calls,
        )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _probe(sparse: Attention, dense: Attention, device: torch.device) -> Probe:
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
    return Probe(seconds, memory, quality)
