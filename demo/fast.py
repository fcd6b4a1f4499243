"""Act two: the speed at each claimed density, and time and memory up to a million tokens."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites import CLAIMED, CLAIMED_HEADS, CURVE, CURVE_TOKENS, claimed_pattern
from demo.bars import grouped_bars
from ringtile.patterns import Causal, Pattern, parse
from ringtile.tools.bench import measure
from ringtile.tools.bench.exact import Exact
from ringtile.tools.bench.peers import Attention, Case, Ringtile, SdpaDense
from ringtile.tools.bench.rows import Row
from ringtile.tools.plot import BLUE, GREY, LIGHT_BLUE, NOTE, ORANGE, picture
from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.record import BOTH, DENSE, DIRECTIONS, FORWARD
from ringtile.tools.timing import seconds_of
from ringtile.tools.units import count_text, duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK = 128
TABLE_SECONDS = 5.0
"""Time for the rounds of each direction of the table."""
DENSE_SECONDS = 6.0
"""Along the curve, dense attention is measured if a pass is expected to take less than this, and else extrapolated."""
PASS_SECONDS = 60.0
"""The curve ends before a pass that is expected to take longer: a constant density is quadratic."""
CHECKED_ROWS = 16


@dataclass(frozen=True)
class Sparse(Ringtile):
    """`sparse_attention` over its own pattern instead of the case's."""

    pattern: Pattern = field(default_factory=Causal)

    def computes(self, case: Case) -> Pattern:
        return self.pattern

    def prepare(self, case: Case) -> Attention:
        return super().prepare(replace(case, pattern=self.pattern))


@dataclass(frozen=True)
class LengthRow:
    """Forward and backward at one length of the curve, and the time of dense attention, measured or extrapolated."""

    n_tokens: int
    exact: bool
    error: float
    both_seconds: float
    peak_bytes: int
    """The peak of the two passes beyond inputs, output and gradients."""
    dense_seconds: float
    dense_measured: bool

    @property
    def dense_text(self) -> str:
        """The time of dense attention, marked if it was not measured."""
        return duration_text(self.dense_seconds) + ("" if self.dense_measured else " (extrapolated)")


@dataclass
class Fast:
    """Measures the table at `context` tokens, and the curve from there up with `pattern` as the fixed pattern."""

    seed: int = 0
    context: int = CURVE_TOKENS[0]
    pattern: Pattern | None = None
    table: dict[float, dict[str, Row]] = field(default_factory=dict)
    """The rows of each tile density by direction."""
    dense: dict[str, Row] = field(default_factory=dict)
    curve: list[LengthRow] = field(default_factory=list)
    left_out: str | None = None
    """The length at which the curve ends early, and why."""

    name = "fast"

    @property
    def curve_rule(self) -> Pattern:
        return parse(CURVE) if self.pattern is None else Causal() & self.pattern

    @property
    def lengths(self) -> list[int]:
        """The lengths of the curve. The first is the length of the table."""
        scale = self.context / CURVE_TOKENS[0]
        return [n for n in (round(n * scale) for n in CURVE_TOKENS) if n <= max(CURVE_TOKENS[-1], self.context)]

    def run(self, progress: Progress) -> None:
        """Measure the table and then the curve, and print both."""
        progress.say(
            f"Fast: B1 H{CLAIMED_HEADS} D64 N {self.context:,}, causal, float32, {threads_text()}; "
            "dense: torch SDPA, is_causal, timed in the same rounds"
        )
        self._measure_table(progress)
        self._measure_curve(progress)

    def _measure_table(self, progress: Progress) -> None:
        n_tiles = -(-self.context // BLOCK)
        # Every query keeps the tile of its own position. With few tiles that alone is more than some densities.
        reachable = [density for density in CLAIMED if density * (n_tiles + 1) >= 2]
        if missing := [f"{density:.0%}" for density in CLAIMED if density not in reachable]:
            reason = f"out of reach with {n_tiles} x {n_tiles} tiles; use a longer --context"
            progress.say(f"  left out {', '.join(missing)}: {reason}")
        if not reachable:
            return
        case = Case("causal", Causal(), self.context, heads=CLAIMED_HEADS, block=BLOCK)
        patterns = {
            density: claimed_pattern(density, self.context, seed=self.seed, block=BLOCK) for density in reachable
        }
        peers = [Sparse(name=f"{density:g}", pattern=pattern) for density, pattern in patterns.items()]
        options: dict[str, Any] = {"seconds": TABLE_SECONDS, "rounds": 1, "slow_seconds": math.inf, "seed": self.seed}
        progress.show(f"fast: {len(peers)} densities and dense attention, forward")
        for direction, rows in zip(DIRECTIONS, measure(case, [*peers, SdpaDense()], **options), strict=True):
            found = {row.peer: row for row in rows}
            self.dense[direction] = found[DENSE]
            for density, pattern in patterns.items():
                tiles = replace(case, pattern=pattern).index.tile_density
                self.table.setdefault(density, {})[direction] = replace(found[f"{density:g}"], tile_density=tiles)
            progress.show(f"fast: {len(peers)} densities and dense attention, forward and backward")
        took = [duration_text((self.dense[direction].median_ms or 0) / 1e3) for direction in DIRECTIONS]
        progress.say(
            f"  dense forward {took[0]}, forward and backward {took[1]}; medians, rounds: {self.dense[BOTH].rounds}; "
            f"density of {BLOCK} x {BLOCK} tiles"
        )
        progress.say("  tile density  claimed  forward  forward+backward  error")
        for density, pair in self.table.items():
            speed = [f"{row.speedup:.1f}x" if row.speedup else "WRONG" for row in pair.values()]
            error = max(math.inf if row.error is None else row.error for row in pair.values())
            tiles, claim = pair[BOTH].tile_density, f"{CLAIMED[density]:.0f}x"
            progress.say(f"  {tiles:>12.1%}  {claim:>7}  {speed[0]:>7}  {speed[1]:>16}  {error:.1e}")

    def _measure_curve(self, progress: Progress) -> None:
        heads, seconds_per_tile = self.curve_rule.num_heads or 1, 0.0
        progress.say(f"  {self.curve_rule!r}, B1 H{heads}, forward and backward; memory: beyond inputs and results")
        progress.say("        N       time    memory  dense time                    error")
        for n_tokens in self.lengths:
            progress.show(f"fast: {n_tokens:,} tokens")
            case = Case("curve", self.curve_rule, n_tokens, heads=heads, block=BLOCK)
            try:
                tiles, reason = case.index.kept_tiles, ""
            except ValueError as error:
                tiles, reason = 0, str(error)
            if (expected := seconds_per_tile * tiles) > PASS_SECONDS:
                reason = f"a pass would take about {duration_text(expected)}"
            # Longer ones would take longer still.
            if reason:
                self.left_out = f"from {n_tokens:,} tokens up: {reason}"
                progress.say(f"  left out {self.left_out}")
                break
            row = self._measure_length(case)
            self.curve.append(row)
            seconds_per_tile = row.both_seconds / max(1, tiles)
            took = duration_text(row.both_seconds) if row.exact else "WRONG"
            memory, dense = f"{row.peak_bytes / 2**20:,.1f} MiB", row.dense_text
            progress.say(f"  {count_text(n_tokens):>7}  {took:>9}  {memory:>8}  {dense:<28}  {row.error:.1e}")

    def _measure_length(self, case: Case) -> LengthRow:
        exact, rule = Exact(case, self.seed, checked_rows=CHECKED_ROWS), case.pattern
        measured = [row for row in self.curve if row.dense_measured]
        dense = measured[-1].dense_seconds * (case.n_tokens / measured[-1].n_tokens) ** 2 if measured else 0.0
        affordable = not measured or dense < DENSE_SECONDS
        # Dense attention takes 16 times as long at four times the length, so a few lengths are enough.
        if affordable:
            dense = seconds_of(partial(exact.run, SdpaDense().prepare(case), BOTH, exact.rows_grad))
        attention, results = Ringtile().prepare(case), []
        # The call that is timed is the one that is checked: at a million tokens, another would take a minute.
        both = seconds_of(lambda: results.append(exact.run(attention, BOTH, exact.rows_grad)))
        error = max(exact.errors(rule, *results.pop()))
        peaks = exact.peaks(attention, BOTH)
        right, peak = error <= exact.bound(rule, BOTH), max(peaks.forward, peaks.backward or 0)
        return LengthRow(case.n_tokens, right, error, both, peak, dense, affordable)

    @property
    def has_figures(self) -> bool:
        return any(BOTH in pair for pair in self.table.values()) or bool(self.curve)

    @property
    def passed(self) -> bool:
        """True if every row agrees with float64."""
        rows = [row for pair in self.table.values() for row in pair.values()]
        return all(row.median_ms is not None for row in rows) and all(row.exact for row in self.curve)

    def record(self) -> dict[str, Any]:
        rows = [row for pair in (*self.table.values(), self.dense) for row in pair.values()]
        return {
            "table": [asdict(row) for row in rows],
            "curve_pattern": repr(self.curve_rule),
            "curve": [asdict(row) for row in self.curve],
            "curve_left_out": self.left_out,
        }

    def draw(self, path: Path) -> None:
        """Draw claimed and measured speedups, and time and memory against the length, of the rows that are right."""
        with picture(path, 13.5, 4.6) as figure:
            table, duration, memory = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
            if any(row.speedup for pair in self.table.values() for row in pair.values()):
                self._draw_table(table)
            if rows := [row for row in self.curve if row.exact]:
                self._draw_curve(rows, duration, memory)

    def _draw_table(self, axes: Axes) -> None:
        rows = {density: pair for density, pair in self.table.items() if BOTH in pair}
        series = {"claimed": [CLAIMED[density] for density in rows]}
        for name, direction in (("forward", FORWARD), ("forward + backward", BOTH)):
            series[name] = [round(pair[direction].speedup or 0.0, 1) for pair in rows.values()]
        labels = [f"{pair[BOTH].tile_density:.1%}" for pair in rows.values()]
        grouped_bars(axes, labels, series, (GREY, LIGHT_BLUE, BLUE), dict.fromkeys(series, "{:.3g}"))
        axes.set_yscale("log", base=2)
        axes.set_yticks(ticks := [1, 2, 4, 8, 16, 32, 64], [f"{tick}x" for tick in ticks])
        axes.set(
            ylim=(0.5, 100),
            xlabel="tile density (share of the causal tiles that is computed)",
            ylabel="speedup over dense attention (torch SDPA)",
            title=f"N {count_text(self.context)}, B1 H{CLAIMED_HEADS} D64, float32, {threads_text()}",
        )
        axes.legend(loc="upper left")

    def _draw_curve(self, rows: list[LengthRow], duration: Axes, memory: Axes) -> None:
        heads, measured = self.curve_rule.num_heads or 1, sum(row.dense_measured for row in rows)
        lengths = [row.n_tokens for row in rows]
        seconds, dense = [row.both_seconds for row in rows], [row.dense_seconds for row in rows]
        # A logarithmic axis has no place for a length that needed no memory.
        peaks = [max(row.peak_bytes, 1) / 2**20 for row in rows]
        held = [8 * n_tokens * heads * 64 * 4 / 2**20 for n_tokens in lengths]
        beyond = slice(max(0, measured - 1), None)
        duration.plot(lengths, seconds, "o-", color=BLUE, label="sparse")
        duration.plot(lengths[:measured], dense[:measured], "o-", color=ORANGE, label="dense, measured")
        duration.plot(lengths[beyond], dense[beyond], "--", color=ORANGE, label="dense, extrapolated")
        memory.plot(lengths, held, "o-", color=GREY, label="inputs, output, their gradients")
        memory.plot(lengths, peaks, "o-", color=BLUE, label="sparse, peak beyond these")
        # Each label stands on the side of its rising curve where the curve is not.
        below: dict[str, Any] = {"xytext": (5, -12), "textcoords": "offset points", "fontsize": 8, "color": BLUE}
        above = {**below, "xytext": (-5, 5), "ha": "right", "color": ORANGE}
        for n_tokens, ours, theirs, peak in zip(lengths, seconds, dense, peaks, strict=True):
            duration.annotate(duration_text(ours), (n_tokens, ours), **below)
            duration.annotate(duration_text(theirs), (n_tokens, theirs), **above)
            memory.annotate(f"{peak:,.1f}", (n_tokens, peak), **below)
        duration.set(title=f"Forward + backward, B1 H{heads} D64", ylabel="seconds")
        memory.set(title="Memory, forward + backward", ylabel="MiB")
        for axes in (duration, memory):
            axes.set_xscale("log", base=2)
            axes.set(xlabel="tokens N", yscale="log")
            axes.set_xticks(lengths, [count_text(length) for length in lengths])
            axes.minorticks_off()
            axes.margins(x=0.22, y=0.12)
            axes.grid(True)
            axes.legend(loc="upper left")
        memory.figure.supxlabel(f"middle and right: {self.curve_rule!r}", **NOTE, x=0.99, ha="right")
