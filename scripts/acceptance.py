"""What the native kernel was asked to reach, and what a record of ``ringtile bench --suite acceptance`` says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ringtile.measure.record import BOTH, DENSE, FORWARD, OURS, Record, Row
from ringtile.measure.suites import CURVE, HALF, LONG, LONG_RANDOM, RANDOM, SPARSE, WINDOWS


class Bar(NamedTuple):
    """One thing asked for, in words; what it had to be and what it is."""

    what: str
    wanted: str
    measured: str
    met: bool | None
    """None where nothing was asked for but to say it."""
    limit: str = ""
    """What it would be at the limit of the processor (`Row.limit_ms`); empty where that is not known."""
    possible: bool = True
    """Whether it could be met at that limit."""


def row_of(record: Record, direction: str = FORWARD, peer: str = OURS, **facts: Any) -> Row:
    """Return the row of a record with these facts. Default: D64 and float32; ``at`` is the density that was asked for.

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
    """The time at the clock of the run: for comparisons of rows that were not measured in the same rounds."""
    assert row.settled_ms is not None
    return row.settled_ms


def _speed(row: Row) -> float:
    """Operations a second, at the clock of the run."""
    assert row.operations is not None
    return 1e3 * row.operations / _settled(row)


def _least(what: str, bar: float, value: float, unit: str = "x") -> Bar:
    return Bar(what, f">= {bar:.2f}{unit}", f"{value:.2f}{unit}", value >= bar)


def _over_dense(what: str, bar: float, row: Row) -> Bar:
    """A ratio to dense attention, which at the limit of the processor would be larger, but not by any factor."""
    found = _least(what, bar, row.speedup or 0.0)
    if not row.of_limit or row.speedup is None:
        return found
    limit = row.speedup / row.of_limit
    return found._replace(limit=f"{limit:.2f}x", possible=limit >= bar)


def _most(what: str, bar: float, value: float, unit: str) -> Bar:
    return Bar(what, f"<= {bar:g}{unit}", f"{value:.3g}{unit}", value <= bar)


def _within(what: str, bar: float, row: Row) -> Bar:
    """A time in milliseconds, which cannot be below the limit of the processor."""
    found = _most(what, bar, _time(row), " ms")
    return (
        found if row.limit_ms is None else found._replace(limit=f"{row.limit_ms:.3g} ms", possible=row.limit_ms <= bar)
    )


def _share(what: str, bar: float, value: float) -> Bar:
    return Bar(what, f">= {bar:.0%}", f"{value:.0%}", value >= bar)


def _whole(record: Record) -> Iterator[Bar]:
    """Density 100 %: nothing to skip."""
    rates = (record.peaks or {}).get(str(record.machine["threads"]), {})
    for head_dim, bar in ((64, 2.0), (128, 1.7)):
        row = row_of(record, asked="dense", n_tokens=4096, head_dim=head_dim, heads=8)
        yield _over_dense(f"dense, N 4,096, D{head_dim}, forward: over torch's dense attention", bar, row)
        share = _speed(row) / rates["fma_float32"] if rates else 0.0
        found = _share(f"dense, N 4,096, D{head_dim}, forward: of the FMA peak of the same run", 0.75, share)
        limit = share / row.of_limit if row.of_limit else 1.0
        yield found._replace(limit=f"{limit:.0%}", possible=limit >= 0.75)
    yield _over_dense(
        "dense, N 4,096, D64, forward+backward: over torch's dense attention",
        2.0,
        row_of(record, BOTH, asked="dense", n_tokens=4096, heads=8),
    )
    usual = _speed(row_of(record, asked="dense", n_tokens=4096, heads=8))
    for what, facts in (
        ("D80", {"asked": "dense", "n_tokens": 4096, "head_dim": 80}),
        ("D96", {"asked": "dense", "n_tokens": 4096, "head_dim": 96}),
        ("tiles half full", {"asked": HALF, "n_tokens": 4096}),
        ("N 4,097", {"asked": "dense", "n_tokens": 4097}),
        ("8 heads on 2", {"asked": "dense", "n_tokens": 4096, "kv_heads": 2}),
    ):
        share = _speed(row_of(record, heads=8, **facts)) / usual
        yield _share(f"{what}, forward: operations a second over those of D64, N 4,096", 0.85, share)


def _sparse(record: Record) -> Iterator[Bar]:
    for direction, factors in ((FORWARD, (0.85, 0.85, 0.75)), (BOTH, (0.8, 0.8))):
        for factor, *pair in zip(factors, RANDOM, WINDOWS, strict=False):
            for asked in pair:
                row = row_of(record, direction, asked=asked, n_tokens=16384)
                what = f"`{row.pattern}`, N 16,384, {row.tile_density:.1%} of tiles, {direction}"
                bar = factor * 2 / row.tile_density
                yield _over_dense(f"{what}: {factor} x 2 / density over torch's dense attention", bar, row)
    for (asked, block), bar in zip(SPARSE, (20, 15, 12), strict=True):
        row = row_of(record, asked=asked, n_tokens=4096, heads=8, block=block)
        sparse = f"{1 - row.density:.0%} sparse"
        yield _within(f"`{row.pattern}`, N 4,096, H8, {sparse}, block {block}: time", bar, row)


def _others(record: Record) -> Iterator[Bar]:
    for dtype, bar in (("float32", 4.0), ("bfloat16", 6.0)):
        ratios = []
        for row in record.rows:
            if (row.peer, row.dtype) == ("flex", dtype) and row.median_ms is not None:
                ours = next(r for r in record.rows if r.problem[:-1] == row.problem[:-1] and r.peer == OURS)
                ratios.append((row.median_ms / _time(ours), f"`{row.pattern}`, N {row.n_tokens:,}"))
        worst = min(ratios, default=(0.0, "no time"))
        yield _least(f"over compiled FlexAttention, {dtype}, forward; the worst: {worst[1]}", bar, worst[0])
    has_pairs = any("dot_bfloat16" in rates for rates in (record.peaks or {}).values())
    for head_dim, bar in ((64, 1.3), (128, 1.5)):
        rows = [
            row_of(record, asked="dense", n_tokens=4096, heads=8, head_dim=head_dim, dtype=dtype)
            for dtype in ("float32", "bfloat16")
        ]
        what = f"bfloat16 over float32, dense, N 4,096, D{head_dim}, forward"
        what += "" if has_pairs else " (a processor without AVX512-BF16)"
        yield _least(what, bar if has_pairs else 1.0, _settled(rows[0]) / _settled(rows[1]))


def _long(record: Record) -> Iterator[Bar]:
    threads = record.machine["threads"]
    for direction in (FORWARD, BOTH):
        many, one = (
            row_of(record, direction, asked=LONG, n_tokens=131072, heads=2, threads=count) for count in (None, 1)
        )
        random = row_of(record, direction, asked=LONG_RANDOM, n_tokens=131072, heads=2)
        what = f"`{LONG}`, N 131,072, {direction}"
        yield _share(f"{what}: efficiency on {threads} threads", 0.9, _settled(one) / _settled(many) / threads)
        yield _most(f"{what}: time a tile over random blocks'", 1.15, _speed(random) / _speed(many), "x")
    for n_tokens, bar in ((131072, 144), (262144, 288)):
        row = row_of(record, asked=LONG, n_tokens=n_tokens, heads=8)
        what = f"`{LONG}`, N {n_tokens:,}, H8: memory beyond inputs and output; finite and non-zero everywhere"
        yield _most(what, bar, (row.peak_forward_bytes or 0) / 2**20, " MiB")


def call_costs(record: Record) -> dict[tuple[int, str], float]:
    """Return the microseconds of a short call beyond PyTorch's dense attention, by length and direction."""
    costs = {}
    for n_tokens in (26, 128):
        for direction in (FORWARD, BOTH):
            facts = {"asked": "dense", "n_tokens": n_tokens}
            ours, dense = (_time(row_of(record, direction, peer, **facts)) for peer in (OURS, DENSE))
            costs[n_tokens, direction] = 1e3 * (ours - dense)
    return costs


def _small(record: Record) -> Iterator[Bar]:
    costs = call_costs(record)
    for (n_tokens, direction), cost in costs.items():
        what = f"dense, N {n_tokens}, {direction}: beyond torch's dense attention"
        yield Bar(what, "stated", f"{cost:+.0f} microseconds", None)
    for asked, n_tokens in (("dense", 4096), ("dense", 32768), (CURVE, 32768)):
        facts = {"asked": asked, "n_tokens": n_tokens, "n_queries": 1}
        ours, dense = (_time(row_of(record, FORWARD, peer, **facts)) for peer in (OURS, DENSE))
        bar = max(costs[26, FORWARD], 0.0)
        what = f"one query, `{asked}`, N {n_tokens:,}: beyond torch's dense attention, up to the cost of a call"
        yield Bar(
            what, f"<= {bar:.0f} microseconds", f"{1e3 * (ours - dense):+.0f} microseconds", 1e3 * (ours - dense) <= bar
        )


def bars(record: Record) -> list[Bar]:
    """All that was asked for, in order; ValueError where the record lacks a row."""
    return [bar for part in (_whole, _sparse, _others, _long, _small) for bar in part(record)]
