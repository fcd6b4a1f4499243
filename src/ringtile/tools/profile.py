"""`ringtile profile`: the time of each phase of a call, for a first and for a second call."""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from ringtile.functional import sparse_attention
from ringtile.index.build import clear_cache
from ringtile.kernels.select import NAMES
from ringtile.kernels.spans import INDEX, KERNEL, KernelTime, kernel_times
from ringtile.patterns import Causal, Pattern, parse
from ringtile.tools.memory import quiet_profiler
from ringtile.tools.record import DTYPES
from ringtile.tools.units import count

PHASES = {
    "index": "look up or build the block index",
    "packing": "lay out tiles for the native kernel, by its own clocks",
    "kernel forward": "scores, softmax and values",
    "kernel backward": "gradients of queries, keys and values",
    "copies": "gather tiles, change layouts and dtypes",
    "allocation": "create tensors and fill them with zeros",
    "other": "checks, views, autograd, and the rest of Python and torch",
    "gaps": "time outside all operators",
}
"""The phases of a call, and what happens in each."""

_ALLOCATION = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros", "aten::fill_", "aten::zero_")
_COPIES = ("aten::copy_", "aten::index", "aten::cat", "aten::clone", "aten::contiguous", "aten::_to_copy")
_VIEWS = ("aten::view", "aten::slice", "aten::transpose", "aten::as_strided", "aten::unflatten", "aten::select")
_MATMULS = ("aten::bmm", "aten::mm", "aten::baddbmm", "aten::_scaled_dot_product", "aten::_flash", KERNEL)


@dataclass(frozen=True)
class CallProfile:
    """Milliseconds of one forward and backward pass, in total and per phase. The phases add up to the total."""

    total: float
    phases: dict[str, float]


def _ancestors(event: FunctionEvent) -> list[FunctionEvent]:
    """Return an event and the events around it, from the inside out."""
    found = [event]
    while found[-1].cpu_parent is not None:
        found.append(found[-1].cpu_parent)
    return found


def _phase(event: FunctionEvent) -> str:
    """Return the phase that an event's own time belongs to."""
    inside = [around.name for around in _ancestors(event)]
    # A build runs operators of its own, which are neither copies nor kernels of the call.
    if INDEX in inside:
        return "index"
    direction = "backward" if "ringtile::backward" in inside else "forward"
    if event.name.startswith(_MATMULS):
        return f"kernel {direction}"
    if event.name.startswith(_ALLOCATION):
        return "allocation"
    if event.name.startswith(_COPIES):
        return "copies"
    # Operators inside the backend that are no copies compute: softmax, masks and sums of the fallback.
    arithmetic = event.name.startswith("aten::") and f"ringtile::{direction}" in inside[1:]
    return f"kernel {direction}" if arithmetic and not event.name.startswith(_VIEWS) else "other"


def _packing_share(times: list[KernelTime]) -> float:
    """Return the share of packing in the time of all threads, which work side by side: also its share of the call."""
    working = sum(entry.working for entry in times)
    return sum(entry.packing for entry in times) / working if working else 0.0


def profile_attention(
    pattern: Pattern,
    tokens: int,
    *,
    num_heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    calls: int = 2,
    trace: Path | None = None,
) -> list[CallProfile]:
    """Profile passes on the CPU, the first with an empty index cache. ``trace`` is a file for a Chrome trace."""
    if calls < 1 or tokens < 1:
        raise ValueError(f"calls, tokens: expected at least one, got {calls=}, {tokens=}")
    query, key, value, out_grad = (
        torch.randn(1, num_heads, tokens, head_dim, dtype=dtype, requires_grad=True, device="cpu") for _ in range(4)
    )

    def step() -> None:
        out = sparse_attention(query, key, value, pattern, backend=backend)
        torch.autograd.grad(out, (query, key, value), out_grad.detach())

    # The first call of a process allocates memory and starts threads, so it is not counted.
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
    found = [dict.fromkeys(PHASES, 0.0) for _ in totals]
    for event in profiler.events() or ():
        outermost = _ancestors(event)[-1]
        if outermost.name.startswith("call ") and event is not outermost:
            # The own time of an event leaves out the events inside it, so no time counts twice.
            found[int(outermost.name.removeprefix("call ")) - 1][_phase(event)] += event.self_cpu_time_total / 1e3
    profiles = []
    for total, phases, times in zip(totals, found, clocks, strict=True):
        # The native kernel packs inside its one operator, so its own clocks split the operator's time.
        for direction in ("forward", "backward"):
            share = _packing_share([entry for entry in times if entry.backward == (direction == "backward")])
            phases["packing"] += share * phases[f"kernel {direction}"]
            phases[f"kernel {direction}"] *= 1 - share
        phases["gaps"] = max(0.0, total - sum(phases.values()))
        profiles.append(CallProfile(sum(phases.values()), phases))
    return profiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help='such as "window(1024) | global_tokens(64)" or longformer')
    add("--tokens", type=count, required=True, metavar="N", help="number of tokens, such as 16K")
    add("--causal", action="store_true", help="keep only keys at or before each query")
    add("--heads", type=count, metavar="H", help="number of heads (default: 8, or the heads of the pattern)")
    add("--head-dim", type=count, default=64, metavar="D", help="head dim (default: 64)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype (default: float32)")
    add("--backend", choices=NAMES, help="backend (default: automatic)")
    add("--trace", type=Path, metavar="FILE", help="also write a Chrome trace (JSON) into this file")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the phases of a first and a second call; return 0."""
    pattern = parse(args.pattern)
    if args.causal:
        pattern = Causal() & pattern
    sizes = {"num_heads": args.heads or pattern.num_heads or 8, "head_dim": args.head_dim}
    options = {"dtype": getattr(torch, args.dtype), "backend": args.backend, "trace": args.trace}
    first, second = profiles = profile_attention(pattern, args.tokens, **sizes, **options)
    if args.json:
        calls = [asdict(found) for found in profiles]
        print(json.dumps({"pattern": repr(pattern), "tokens": args.tokens, "calls": calls}, indent=2))
        return 0
    print(f"{pattern!r}, {args.tokens:,} tokens, forward and backward, milliseconds\n")
    print(f"{'':16} {'first call':>12} {'second call':>12} {'share':>7}")
    for phase, meaning in PHASES.items():
        times = f"{first.phases[phase]:12.2f} {second.phases[phase]:12.2f} {second.phases[phase] / second.total:7.1%}"
        print(f"{phase:16} {times}   {meaning}")
    print(f"{'total':16} {first.total:12.2f} {second.total:12.2f}")
    if args.trace is not None:
        print(f"\ntrace: {args.trace} (open it in Perfetto or chrome://tracing)")
    return 0
