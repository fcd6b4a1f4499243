"""The targets of the native kernel, and the results of a record of `benchmarks/suites.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from suites import CURVE, HALF, LONG, LONG_RANDOM, RANDOM, SPARSE, WINDOWS

from ringtile.tools.bench.rows import Record, Row
from ringtile.tools.record import BOTH, DENSE, FORWARD, OURS

RATIO, SHARE, MS, MIB, MICROSECONDS = "{:.2f}x", "{:.0%}", "{:.3g} ms", "{:.3g} MiB", "{:.0f} microseconds"


class Bar(NamedTuple):
    """One target and its result, as text."""

    what: str
    wanted: str
    measured: str
    met: bool | None
    """None if there is no target, only a figure to state."""
    limit: str = ""
    """The figure at the limit of the processor (`Row.limit_ms`); empty if that is not known."""
    possible: bool = True
    """True if the target can be met at that limit."""


def row_of(record: Record, direction: str = FORWARD, peer: str = OURS, **facts: Any) -> Row:
    """Return the row of a record with these facts. Default: D64 and float32; ``at`` is the requested density.

    Raises ValueError if it has no time.
    """
    wanted = {"head_dim": 64, "dtype": "float32", "kv_heads": None, "n_queries": None, "threads": None, **facts}
    density = wanted.pop("at", None)
    for row in record.rows:
        same = all(getattr(row, name) == fact for name, fact in wanted.items())
        same &= density is None or row.asked.endswith(f" at {density:g}")
        if same and (row.peer, row.direction) == (peer, direction) and row.median_ms is not None:
            return row
    raise ValueError(f"the record has no time of {peer} for {facts}, {direction}")


def _time(row: Row) -> float:
    assert row.median_ms is not None
    return row.median_ms


def _settled(row: Row) -> float:
    """Return the time at the clock of the run, to compare rows of different rounds."""
    return _time(row) * (row.clock or 1.0)


def _speed(row: Row) -> float:
    """Return the operations per second, at the clock of the run."""
    assert row.operations is not None
    return 1e3 * row.operations / _settled(row)


def _bar(what: str, sign: str, bar: float, value: float, shape: str = RATIO, limit: float | None = None) -> Bar:
    """Compare a value, and its limit if that is known, with a bar: ``sign`` is ">=" or "<="."""

    def meets(number: float) -> bool:
        return number >= bar if sign == ">=" else number <= bar

    told = "" if limit is None else shape.format(limit)
    return Bar(
        what, f"{sign} {shape.format(bar)}", shape.format(value), meets(value), told, limit is None or meets(limit)
    )


def _over_dense(what: str, bar: float, row: Row) -> Bar:
    ratio = row.speedup or 0.0
    return _bar(
        f"{what} over torch's dense attention", ">=", bar, ratio, RATIO, ratio / row.of_limit if row.of_limit else None
    )


def _whole(record: Record) -> Iterator[Bar]:
    """Yield the targets at a density of 100%, with nothing to skip."""
    rates = (record.peaks or {}).get(str(record.machine["threads"]), {})
    for head_dim, bar in ((64, 2.0), (128, 1.7)):
        row = row_of(record, asked="dense", n_tokens=4096, head_dim=head_dim, heads=8)
        yield _over_dense(f"dense, N 4,096, D{head_dim}, forward:", bar, row)
        share = _speed(row) / rates["fma_float32"] if rates else 0.0
        limit = share / row.of_limit if row.of_limit else 1.0
        what = f"dense, N 4,096, D{head_dim}, forward: of the FMA peak of the same run"
        yield _bar(what, ">=", 0.75, share, SHARE, limit)
    row = row_of(record, BOTH, asked="dense", n_tokens=4096, heads=8)
    yield _over_dense("dense, N 4,096, D64, forward+backward:", 2.0, row)
    usual = _speed(row_of(record, asked="dense", n_tokens=4096, heads=8))
    for what, facts in (
        ("D80", {"asked": "dense", "n_tokens": 4096, "head_dim": 80}),
        ("D96", {"asked": "dense", "n_tokens": 4096, "head_dim": 96}),
        ("tiles half full", {"asked": HALF, "n_tokens": 4096}),
        ("N 4,097", {"asked": "dense", "n_tokens": 4097}),
        ("8 heads on 2", {"asked": "dense", "n_tokens": 4096, "kv_heads": 2}),
    ):
        share = _speed(row_of(record, heads=8, **facts)) / usual
        yield _bar(f"{what}, forward: operations per second over D64, N 4,096", ">=", 0.85, share, SHARE)


def _sparse(record: Record) -> Iterator[Bar]:
    for direction, factors in ((FORWARD, (0.85, 0.85, 0.75)), (BOTH, (0.8, 0.8))):
        for factor, *pair in zip(factors, RANDOM, WINDOWS, strict=False):
            for asked in pair:
                row = row_of(record, direction, asked=asked, n_tokens=16384)
                what = f"`{row.pattern}`, N 16,384, {row.tile_density:.1%} of tiles, {direction}"
                yield _over_dense(f"{what}: {factor} x 2 / density", factor * 2 / row.tile_density, row)
    for (asked, block), bar in zip(SPARSE, (20, 15, 12), strict=True):
        row = row_of(record, asked=asked, n_tokens=4096, heads=8, block=block)
        what = f"`{row.pattern}`, N 4,096, H8, {1 - row.density:.0%} sparse, block {block}: time"
        yield _bar(what, "<=", bar, _time(row), MS, row.limit_ms)


def _others(record: Record) -> Iterator[Bar]:
    ours = {row.problem[:-1]: row for row in record.rows if row.peer == OURS}
    for dtype, bar in (("float32", 4.0), ("bfloat16", 6.0)):
        rows = [row for row in record.rows if (row.peer, row.dtype) == ("flex", dtype) and row.median_ms is not None]
        ratios = [(_time(row) / _time(ours[row.problem[:-1]]), f"`{row.pattern}`, N {row.n_tokens:,}") for row in rows]
        worst = min(ratios, default=(0.0, "no time"))
        yield _bar(f"over compiled FlexAttention, {dtype}, forward; the worst: {worst[1]}", ">=", bar, worst[0])
    has_pairs = any("dot_bfloat16" in rates for rates in (record.peaks or {}).values())
    for head_dim, bar in ((64, 1.3), (128, 1.5)):
        facts = {"asked": "dense", "n_tokens": 4096, "heads": 8, "head_dim": head_dim}
        single, half = (_settled(row_of(record, dtype=dtype, **facts)) for dtype in ("float32", "bfloat16"))
        what = f"bfloat16 over float32, dense, N 4,096, D{head_dim}, forward"
        what += "" if has_pairs else " (a processor without AVX512-BF16)"
        yield _bar(what, ">=", bar if has_pairs else 1.0, single / half)


def _long(record: Record) -> Iterator[Bar]:
    threads = record.machine["threads"]
    for direction in (FORWARD, BOTH):
        facts = {"n_tokens": 131072, "heads": 2}
        many, one = (row_of(record, direction, asked=LONG, threads=count, **facts) for count in (None, 1))
        random = row_of(record, direction, asked=LONG_RANDOM, **facts)
        what = f"`{LONG}`, N 131,072, {direction}"
        efficiency = _settled(one) / _settled(many) / threads
        yield _bar(f"{what}: efficiency on {threads} threads", ">=", 0.9, efficiency, SHARE)
        yield _bar(f"{what}: time per tile over random blocks", "<=", 1.15, _speed(random) / _speed(many), "{:.3g}x")
    for n_tokens, bar in ((131072, 144), (262144, 288)):
        row = row_of(record, asked=LONG, n_tokens=n_tokens, heads=8)
        what = f"`{LONG}`, N {n_tokens:,}, H8: memory beyond inputs and output; finite and non-zero everywhere"
        yield _bar(what, "<=", bar, (row.peak_forward_bytes or 0) / 2**20, MIB)


def _beyond_dense(record: Record, direction: str, **facts: Any) -> float:
    """Return the microseconds of a call beyond PyTorch's dense attention."""
    ours, dense = (_time(row_of(record, direction, peer, **facts)) for peer in (OURS, DENSE))
    return 1e3 * (ours - dense)


def call_costs(record: Record, asked: str, lengths: Sequence[int]) -> dict[tuple[int, str], float]:
    """Return the microseconds of a short call beyond PyTorch's dense attention, by length and direction."""
    keys = [(n_tokens, direction) for n_tokens in lengths for direction in (FORWARD, BOTH)]
    return {(n, direction): _beyond_dense(record, direction, asked=asked, n_tokens=n) for n, direction in keys}


def _small(record: Record) -> Iterator[Bar]:
    costs = call_costs(record, "dense", (26, 128))
    for (n_tokens, direction), cost in costs.items():
        what = f"dense, N {n_tokens}, {direction}: beyond torch's dense attention"
        yield Bar(what, "stated", MICROSECONDS.format(cost), None)
    for asked, n_tokens in (("dense", 4096), ("dense", 32768), (CURVE, 32768)):
        cost = _beyond_dense(record, FORWARD, asked=asked, n_tokens=n_tokens, n_queries=1)
        what = f"one query, `{asked}`, N {n_tokens:,}: beyond torch's dense attention, up to the cost of a call"
        yield _bar(what, "<=", max(costs[26, FORWARD], 0.0), cost, MICROSECONDS)


def bars(record: Record) -> list[Bar]:
    """Return all targets, in order. Raises ValueError if the record lacks a row."""
    return [bar for part in (_whole, _sparse, _others, _long, _small) for bar in part(record)]
