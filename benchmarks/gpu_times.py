"""The time of a GPU apart from the host's, for benchmarks/gpu.py. It takes the ringtile that is first on the path."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ringtile.tools.bench.exact import Exact
from ringtile.tools.bench.peers import Attention
from ringtile.tools.memory import quiet_profiler
from ringtile.tools.record import BOTH, FORWARD
from ringtile.tools.timing import interleaved, seconds_of

MOCK = "RINGTILE_MOCK_GPU"
CLOCK = "wall" if os.environ.get("TRITON_INTERPRET") == "1" else "mock" if os.environ.get(MOCK) else "events"
"""What times are of: the events of a GPU, a mock of one, or the host in Triton's interpreter."""
DEVICE = torch.device("cuda" if CLOCK == "events" else "cpu")
LEAST_ROUNDS, MOST_ROUNDS, MOST_REPEATS = 3, 100, 20
SAMPLE_SECONDS = 1e-3
"""Shorter calls are repeated until a sample takes this long, unless the queue of launches could fill up."""
CYCLES = 3e9
"""More cycles per second than a GPU has."""

Call = Callable[[], object]
Sample = tuple[float, float, bool]
"""Seconds on the GPU, seconds until the host has sent the launches, and whether the GPU never waited for the host."""


def _sample(call: Call, repeats: int, host: float, wall: bool) -> Sample:
    if wall or CLOCK == "wall":
        took = seconds_of(call, repeats, DEVICE)
        return took, took, True
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # The GPU sleeps until it has all launches, and then runs them back to back.
    torch.cuda._sleep(round((2 * host * repeats + 1e-4) * CYCLES))
    start.record()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    host = (time.perf_counter() - began) / repeats
    apart = not start.query()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats, host, apart


def times_of(calls: Mapping[str, Call], seconds: float, *, wall: bool = False) -> dict[str, dict[str, Any]]:
    """Time calls in turn, round after round, for so many seconds each, or once for no seconds.

    ``ms`` is the median on the GPU. It contains the host's time if ``wall`` is set, or if not ``apart``.
    """
    repeats, hosts, firsts = {}, {}, {}
    for name, call in calls.items():
        if seconds:
            call()
        firsts[name] = first = _sample(call, 1, 0.0, wall)
        repeats[name] = 1 if wall else max(1, min(MOST_REPEATS, round(SAMPLE_SECONDS / max(first[0], 1e-9))))
        hosts[name] = [first[1]]

    def sample(name: str) -> Sample:
        found = _sample(calls[name], repeats[name], statistics.median(hosts[name]), wall)
        hosts[name].append(found[1])
        return found

    # A smoke test has no other round.
    found = {name: [first] for name, first in firsts.items()}
    if seconds:
        samples = {name: partial(sample, name) for name in calls}
        found = interleaved(samples, LEAST_ROUNDS, seconds=seconds * len(calls), most=MOST_ROUNDS)
    return {name: _summary(samples) for name, samples in found.items()}


def _summary(samples: list[Sample]) -> dict[str, Any]:
    apart = any(alone for *_, alone in samples)
    times = [1e3 * seconds for seconds, _, alone in samples if alone or not apart]
    low, *_, high = statistics.quantiles(times * 2, n=5, method="inclusive")
    host = 1e6 * statistics.median(host for _, host, _ in samples)
    named = {"ms": statistics.median(times), "low_ms": low, "high_ms": high, "rounds": len(times)}
    return {**named, "host_us": host, "apart": apart}


def share_of(exact: Exact, attention: Attention, direction: str = BOTH) -> float:
    """Return the worst error of a call over the error that is allowed. Raise ValueError if it is more than 1."""
    out, grads = exact.run(attention, direction, exact.rows_grad)
    pattern = exact.case.pattern
    share = max(exact.errors(pattern, out, grads)) / exact.bound(pattern, direction)
    if not share <= 1 or exact.holes(out):
        raise ValueError(f"wrong: {share:.3g} of the error that is allowed; {exact.holes(out)}")
    return share


def passes_of(exact: Exact, attention: Attention, seconds: float, *, by_kernel: bool = False) -> dict[str, Any]:
    """Return the times of both passes, apart, after a check of the results. Raise ValueError if they are wrong.

    ``by_kernel`` adds the times of each kernel. After that, launches of this process can take longer.
    """
    share = share_of(exact, attention)
    leaves = [x.detach().requires_grad_() for x in exact.inputs]
    out = attention(*leaves)
    calls: dict[str, Call] = {
        "forward": partial(exact.run, attention, FORWARD, exact.grad),
        "backward": partial(torch.autograd.grad, out, leaves, exact.grad, retain_graph=True),
    }
    found = {"share": share, **times_of(calls, seconds)}
    if by_kernel:
        found["kernels_us"] = {name: us for call in calls.values() for name, us in _kernels_of(call).items()}
    return found


def _kernels_of(call: Call, repeats: int = 5) -> dict[str, float]:
    """Return the microseconds of each kernel of a call by the profiler, if there is a GPU to profile."""
    if CLOCK != "events":
        return {}
    with quiet_profiler(), profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {row.key: row.device_time_total / repeats for row in found.key_averages() if row.device_time_total}
