"""`ringtile profile`: where the time of a call goes, for a first call and for those that follow."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from ringtile.analysis.units import count
from ringtile.functional import sparse_attention
from ringtile.kernels.select import NAMES
from ringtile.kernels.spans import INDEX, KERNEL, KernelTime, kernel_times
from ringtile.layout.build import clear_cache
from ringtile.measure.memory import quiet_profiler
from ringtile.measure.record import write_whole
from ringtile.patterns import Causal, Pattern, parse

PHASES = {
    "index": "looking the block index up, or building it",
    "packing": "laying tiles out for the native kernel, by its own clocks",
    "kernel forward": "scores, softmax and values",
    "kernel backward": "gradients of queries, keys and values",
    "copies": "gathering tiles, changing layouts and dtypes",
    "allocation": "new tensors, and zeros in them",
    "other": "checks, views, autograd and what else runs in Python or torch",
    "gaps": "time in no operator",
}
"""The phases of a call, and what each holds."""

_ALLOCATION = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros", "aten::fill_", "aten::zero_")
_COPIES = ("aten::copy_", "aten::index", "aten::cat", "aten::clone", "aten::contiguous", "aten::_to_copy")
_PRODUCTS = ("aten::bmm", "aten::mm", "aten::baddbmm", "aten::_scaled_dot_product", "aten::_flash", KERNEL)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class CallProfile:
    """Milliseconds of one forward and backward pass, in all and by phase; the phases add up to the whole."""

    total: float
    phases: dict[str, float]

    def share(self, phase: str) -> float:
        """The fraction of the call that a phase takes."""
        return self.phases[phase] / self.total


def _phase(event: FunctionEvent) -> str:
    """The phase that an event's own time belongs to."""
    inside = [event.name]
    parent = event.cpu_parent
    while parent is not None:
        inside.append(parent.name)
        parent = parent.cpu_parent
    if INDEX in inside:
        return "index"
    direction = "backward" if "ringtile::backward" in inside else "forward"
    if event.name.startswith(_PRODUCTS):
        return f"kernel {direction}"
    if event.name.startswith(_ALLOCATION):
        return "allocation"
    if event.name.startswith(_COPIES):
        return "copies"
    arithmetic = event.name.startswith("aten::") and f"ringtile::{direction}" in inside[1:]
    views = ("aten::view", "aten::slice", "aten::transpose", "aten::as_strided", "aten::unflatten", "aten::select")
    return f"kernel {direction}" if arithmetic and not event.name.startswith(views) else "other"


def _packing_share(times: list[KernelTime]) -> float:
    """How much of what the threads did was packing: they work side by side, so it is that share of the time too."""
    working = sum(entry.working for entry in times)
    return sum(entry.packing for entry in times) / working if working else 0.0


def _say_packing(trace: Path, times: list[KernelTime]) -> None:
    """Write the clocks of each call of the library into its event of a Chrome trace."""
    found = json.loads(trace.read_text(encoding="utf-8"))
    spans = [event for event in found["traceEvents"] if event.get("name") == KERNEL and event.get("ph") == "X"]
    spans.sort(key=lambda event: event["ts"])
    for event, entry in zip(spans, times, strict=True):
        facts = {"packing ms of all threads": entry.packing / 1e6, "working ms of all threads": entry.working / 1e6}
        event.setdefault("args", {}).update(facts)
    write_whole(trace, json.dumps(found))


def profile_attention(
    pattern: Pattern,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    calls: int = 2,
    trace: Path | None = None,
) -> list[CallProfile]:
    """Profile some forward and backward passes, the first with an empty index cache, on the CPU.

    ``trace`` names a file for a Chrome trace (chrome://tracing or Perfetto). Raises ValueError for fewer than one call.

    >>> from ringtile.patterns import Causal
    >>> first, second = profile_attention(Causal(), 256, heads=1)
    >>> sorted(second.phases) == sorted(PHASES) and second.total > 0
    True
    """
    if calls < 1 or tokens < 1:
        raise ValueError(f"calls, tokens: expected at least one, got {calls=}, {tokens=}")
    query, key, value, out_grad = (
        torch.randn(batch, heads, tokens, head_dim, dtype=dtype, requires_grad=True) for _ in range(4)
    )

    def step() -> None:
        out = sparse_attention(query, key, value, pattern, backend=backend)
        torch.autograd.grad(out, (query, key, value), out_grad.detach())

    # Memory, threads and torch's own first use: a call that is not counted.
    step()
    clear_cache()
    totals, clocks = [], []
    with quiet_profiler(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(calls):
            began = time.perf_counter()
            with record_function(f"call {number + 1}"), kernel_times() as times:
                step()
            totals.append(1e3 * (time.perf_counter() - began))
            clocks.append(times)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
        _say_packing(trace, [entry for times in clocks for entry in times])
    found = [dict.fromkeys(PHASES, 0.0) for _ in totals]
    for event in profiler.events() or ():
        outermost = event
        while outermost.cpu_parent is not None:
            outermost = outermost.cpu_parent
        if outermost.name.startswith("call ") and event is not outermost:
            found[int(outermost.name.removeprefix("call ")) - 1][_phase(event)] += event.self_cpu_time_total / 1e3
    profiles = []
    for total, phases, times in zip(totals, found, clocks, strict=True):
        for direction in ("forward", "backward"):
            share = _packing_share([entry for entry in times if entry.backward == (direction == "backward")])
            phases["packing"] += share * phases[f"kernel {direction}"]
            phases[f"kernel {direction}"] *= 1 - share
        phases["gaps"] = max(0.0, total - sum(phases.values()))
        profiles.append(CallProfile(sum(phases.values()), phases))
    return profiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` needs."""
    parser.add_argument("pattern", metavar="PATTERN", help='such as "window(1024) | global_tokens(64)" or longformer')
    parser.add_argument("--tokens", type=count, required=True, metavar="N", help="number of tokens, such as 16K")
    parser.add_argument("--causal", action="store_true", help="keep only keys at or before each query")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="default 1")
    parser.add_argument("--heads", type=int, metavar="H", help="default 8, or as the pattern is written")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="default 64")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float32", help="default float32")
    parser.add_argument("--backend", choices=NAMES, help="default: the one that a call would take")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (JSON) into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the phases of a first and a second call; 0. Raises ValueError for what cannot be."""
    pattern = parse(args.pattern)
    if args.causal:
        pattern = Causal() & pattern
    profiles = profile_attention(
        pattern,
        args.tokens,
        batch=args.batch,
        heads=args.heads or pattern.n_heads or 8,
        head_dim=args.head_dim,
        dtype=_DTYPES[args.dtype],
        backend=args.backend,
        trace=args.trace,
    )
    if args.json:
        facts: dict[str, Any] = {"pattern": repr(pattern), "tokens": args.tokens}
        print(json.dumps(facts | {"calls": [asdict(found) for found in profiles]}, indent=2))
        return 0
    first, second = profiles
    print(f"{pattern!r}, {args.tokens:,} tokens, forward and backward, milliseconds\n")
    print(f"{'':16} {'first call':>12} {'second call':>12} {'share':>8}")
    for phase, meaning in PHASES.items():
        times = f"{first.phases[phase]:12.2f} {second.phases[phase]:12.2f} {100 * second.share(phase):6.1f} %"
        print(f"{phase:16} {times}   {meaning}")
    print(f"{'in all':16} {first.total:12.2f} {second.total:12.2f}")
    if args.trace is not None:
        print(f"\ntrace: {args.trace} (open it in Perfetto or chrome://tracing)")
    return 0
