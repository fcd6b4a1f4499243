"""Measure attention while it is used: time and memory of its calls, and how far it is from dense attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.tools.memory import peak_memory

Attention = Callable[[], Tensor]
"""One call with its inputs bound: ``[B, H, N, D]``."""

KEYS = ("avg_forward_time_ms", "avg_sparsity", "avg_speedup", "avg_memory_mb", "quality_score")


class PerformanceMonitor:
    """Times the calls of an attention module while enabled, and costs nothing while disabled.

    The first call of each shape is followed by one timed call of dense attention on the same inputs, with the time and
    memory that dense attention needs. While enabled, each call waits for its device.
    """

    def __init__(self) -> None:
        self.enabled = False
        """Set it to False to stop measuring and keep the results."""
        self._probes: dict[Hashable, tuple[float, float, float]] = {}
        self._calls: list[tuple[float, ...]] = []

    def enable(self) -> None:
        """Measure the calls from now on, and forget those before."""
        self._probes, self._calls, self.enabled = {}, [], True

    def measure(
        self, shape: Hashable, call: Attention, sparse: Attention, dense: Attention, *, density: Callable[[], float]
    ) -> Tensor:
        """Return the result of ``call``, timed. ``sparse`` and ``dense`` run once per shape, without dropout."""
        out, seconds = _timed(call)
        # Dense attention on each call would double the cost of what is measured.
        if shape not in self._probes:
            self._probes[shape] = _probe(sparse, dense, out.device)
        self._calls.append((1e3 * seconds, density(), *self._probes[shape]))
        return out

    def report(self) -> dict[str, float]:
        """Return the means over the calls since `enable`, NaN if there are none."""
        if not self._calls:
            return dict.fromkeys(KEYS, math.nan)
        means = dict(zip(KEYS, (sum(x) / len(x) for x in zip(*self._calls, strict=True)), strict=True))
        # Until here the column holds the time of dense attention: a quotient of means, not a mean of quotients.
        return means | {"avg_speedup": means["avg_speedup"] / means["avg_forward_time_ms"]}


def _timed(call: Attention) -> tuple[Tensor, float]:
    began = time.perf_counter()
    out = call()
    if out.is_cuda:
        # A kernel returns before it ends, so the clock waits for the device.
        torch.cuda.synchronize(out.device)
    return out, time.perf_counter() - began


def _probe(sparse: Attention, dense: Attention, device: torch.device) -> tuple[float, float, float]:
    """Return milliseconds of dense attention, peak MiB of sparse attention, and the similarity of their outputs."""
    outs: list[Tensor] = []

    def kept() -> Tensor:
        outs.append(sparse())
        return outs[0]

    with torch.no_grad():
        memory = peak_memory(kept, None, device).forward
        exact, seconds = _timed(dense)
        quality = F.cosine_similarity(outs[0].double(), exact.double(), dim=-1).mean().item()
    return 1e3 * seconds, memory / 2**20, quality
