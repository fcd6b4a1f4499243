"""Time attention by matrix units beside PyTorch's own and FlexAttention, and compare their errors.

    python benchmarks/amx.py                                       all sections, a few minutes
    python benchmarks/amx.py --out benchmarks/records/amx.json     and write the record
    RINGTILE_CPU=avx512 python benchmarks/amx.py                   another instruction set, beside the same bars

Made for an Intel server with AMX. Elsewhere it says which instruction sets run, and runs all the same. Every result is
compared with float64 before it is timed. Calls take turns, and times are medians of wall time. A bar is the least ratio
to PyTorch, or to FlexAttention, that this kernel should reach in bfloat16, with two threads on a quiet machine.

float16, and float32 of the precision "high", are computed in two bfloat16 parts. They have no bars, but PyTorch beside
them, under the same precision.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile import sparse_attention
from ringtile.kernels.native.library import library, reason_against
from ringtile.kernels.native.precision import arithmetic_of
from ringtile.patterns import Causal
from ringtile.tools.bench import case_of, run_bench
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.bench.peers import Attention, FlexAttention, Ringtile, SdpaDense, Task
from ringtile.tools.bench.rows import Record, Row
from ringtile.tools.record import BOTH, DENSE, FORWARD, OURS, write_whole

WINDOW = "causal & window(1024)"


class Bar(NamedTuple):
    """The least ratio of a peer's time to ringtile's on one problem."""

    pattern: str
    n_tokens: int
    heads: int
    head_dim: int
    direction: str
    peer: str
    least: float


BARS = (
    Bar("dense", 4096, 8, 64, FORWARD, DENSE, 2.0),
    Bar("dense", 4096, 8, 128, FORWARD, DENSE, 1.6),
    Bar("dense", 4096, 8, 64, BOTH, DENSE, 3.2),
    Bar("dense", 4096, 8, 128, BOTH, DENSE, 2.5),
    *(
        Bar(f"random tiles at {density}", 16384, 2, 64, direction, DENSE, least)
        for density, *both in ((0.12, 11, 18), (0.05, 17, 32), (0.02, 28, 50))
        for direction, least in zip((FORWARD, BOTH), both, strict=True)
    ),
    Bar(WINDOW, 16384, 2, 64, FORWARD, DENSE, 11),
    Bar(WINDOW, 16384, 2, 64, FORWARD, "flex", 6),
)
PARTS = {torch.float16: "highest", torch.float32: "high"}
"""Dtypes that are multiplied in parts, and the precision that allows it."""
ERROR_BARS = {"out": 1.05, "dq": 1.0, "dk": 1.0, "dv": 1.0}
SCALES, SEEDS = (1, 2, 4), 3


def tasks() -> list[Task]:
    """Return one task per problem, with all directions and peers of its bars."""
    found: dict[tuple[Any, ...], list[Bar]] = {}
    for bar in BARS:
        found.setdefault(bar[:4], []).append(bar)
    peers = {DENSE: SdpaDense(), "flex": FlexAttention()}
    return [
        Task(
            case_of(pattern, n_tokens, heads=heads, head_dim=head_dim, dtype=torch.bfloat16),
            (Ringtile(), *(peers[name] for name in dict.fromkeys(bar.peer for bar in bars))),
            tuple(dict.fromkeys(bar.direction for bar in bars)),
        )
        for (pattern, n_tokens, heads, head_dim), bars in found.items()
    ]


def parts_tasks(dtype: torch.dtype) -> list[Task]:
    """Return dense attention of the first problems, in a dtype that is multiplied in parts."""
    sizes = dict.fromkeys(bar[1:4] for bar in BARS if bar.pattern == "dense")
    return [
        Task(
            case_of("dense", n_tokens, heads=heads, head_dim=head_dim, dtype=dtype),
            # By name: where PyTorch multiplies float16 in tiles, its kernel comes first.
            (Ringtile("native"), SdpaDense()),
            (FORWARD, BOTH),
        )
        for n_tokens, heads, head_dim in sizes
    ]


@contextmanager
def precision_of(name: str) -> Iterator[None]:
    """Allow a precision of float32 products for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sparse_attention(q, k, v, Causal())


def _results(attention: Attention, given: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    *inputs, grad = (x.to(dtype).requires_grad_() for x in given)
    out = attention(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def error_ratios() -> list[dict[str, Any]]:
    """Return ringtile's relative errors over PyTorch's, both in bfloat16 against float64, over some seeds."""
    rows = []
    for scale in SCALES:
        ratios: dict[str, list[float]] = {name: [] for name in ERROR_BARS}
        for seed in range(SEEDS):
            generator = torch.Generator().manual_seed(seed)
            q, k, v, grad = (torch.randn(1, 4, 1024, 64, generator=generator).bfloat16() for _ in range(4))
            given = (q * scale, k, v, grad)
            exact = _results(_dense, given, torch.float64)
            theirs = _results(_dense, given, torch.bfloat16)
            ours = _results(_sparse, given, torch.bfloat16)
            for name, right, their, our in zip(ERROR_BARS, exact, theirs, ours, strict=True):
                ratios[name].append(relative_error(our, right) / relative_error(their, right))
        rows.append({"scale": scale, **{name: sum(each) / SEEDS for name, each in ratios.items()}})
    return rows


def ratio_of(bar: Bar, record: Record) -> float | None:
    """Return the ratio of a bar, or None if one of the two was not timed."""
    sizes = (bar.pattern, bar.n_tokens, bar.heads, bar.head_dim, bar.direction)
    times = {
        row.peer: row.median_ms
        for row in record.rows
        if (row.asked, row.n_tokens, row.heads, row.head_dim, row.direction) == sizes
    }
    ours, theirs = times.get(OURS), times.get(bar.peer)
    return None if ours is None or theirs is None else theirs / ours


def lines_of(record: Record, errors: list[dict[str, Any]]) -> list[str]:
    """Return two Markdown tables: ratios of time, and of errors."""
    found = [
        "| bfloat16 | N | H | D | direction | against | ratio | bar | |",
        "|---|---:|---:|---:|---|---|---:|---:|---|",
    ]
    for bar in BARS:
        ratio = ratio_of(bar, record)
        verdict = "not timed" if ratio is None else "held" if ratio >= bar.least else "missed"
        figure = "" if ratio is None else f"{ratio:.2f}x"
        sizes = f"{bar.n_tokens:,} | {bar.heads} | {bar.head_dim} | {bar.direction}"
        found.append(f"| `{bar.pattern}` | {sizes} | {bar.peer} | {figure} | {bar.least:g}x | {verdict} |")
    found += ["", f"| error over PyTorch's | {' | '.join(ERROR_BARS)} |", "|---|" + "---:|" * len(ERROR_BARS)]
    for row in errors:
        figures = (f"{row[name]:.3f}{'' if row[name] <= most else ' (missed)'}" for name, most in ERROR_BARS.items())
        found.append(f"| scores x {row['scale']} | {' | '.join(figures)} |")
    return found


def parts_lines(records: dict[torch.dtype, Record]) -> list[str]:
    """Return a Markdown table of dense attention in parts: ratios of time, and the errors of both."""
    found = [
        "| dense in parts | N | H | D | direction | ratio to PyTorch | error | PyTorch's error |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for dtype, record in records.items():
        name = f"{str(dtype).removeprefix('torch.')}, {PARTS[dtype]}"
        pairs: dict[tuple[int, int, int, str], dict[str, Row]] = {}
        for row in record.rows:
            pairs.setdefault((row.n_tokens, row.heads, row.head_dim, row.direction), {})[row.peer] = row
        for (n_tokens, heads, head_dim, direction), rows in pairs.items():
            sizes = f"{n_tokens:,} | {heads} | {head_dim} | {direction}"
            ours, theirs = rows[OURS], rows[DENSE]
            if ours.median_ms is None or theirs.median_ms is None:
                found.append(f"| {name} | {sizes} | not timed: {ours.reason or theirs.reason} | | |")
                continue
            ratio = f"{theirs.median_ms / ours.median_ms:.2f}x"
            found.append(f"| {name} | {sizes} | {ratio} | {ours.error:.1e} | {theirs.error:.1e} |")
    return found


def main() -> None:
    """Print the tables, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="time to measure each problem (default: 3)")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    if reason_against():
        raise SystemExit(f"no native kernel: {reason_against()}")
    name = library().choice.by_dtype[torch.bfloat16].name
    print(f"bfloat16 by {name}" + ("" if name == "amx" else ", which is not AMX: the bars are not for it"), flush=True)
    for dtype, precision in PARTS.items():
        with precision_of(precision):
            isa, _, tile_products = arithmetic_of(dtype)
        in_parts = "in parts" if tile_products else "not in parts"
        print(f"{str(dtype).removeprefix('torch.')}, {precision}: by {isa.name}, {in_parts}", flush=True)
    errors = error_ratios()
    record = run_bench(tasks(), seconds=args.seconds, command="python benchmarks/amx.py")
    print("\n".join(lines_of(record, errors)), flush=True)
    parts = {}
    for dtype, precision in PARTS.items():
        with precision_of(precision):
            parts[dtype] = run_bench(parts_tasks(dtype), seconds=args.seconds, command="python benchmarks/amx.py")
    print("\n".join(["", *parts_lines(parts)]))
    if args.out is not None and not any(each.interrupted for each in (record, *parts.values())):
        rows = [asdict(row) for each in parts.values() for row in each.rows]
        bars = [{**bar._asdict(), "ratio": ratio_of(bar, record)} for bar in BARS]
        found = {"instruction_set": name, "bars": bars, "errors": errors, "parts": rows, **asdict(record)}
        write_whole(args.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
