"""Act two: the speed that was promised for each density, measured, and time and memory up to a million tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.analysis.units import count_text, duration_text
from ringtile.demo.right import Attention, attention_over, relative_error
from ringtile.kernels.reference import attention_rows
from ringtile.layout import build_index
from ringtile.measure.memory import peak_memory
from ringtile.measure.progress import Progress, threads_text
from ringtile.patterns import Blocks, Causal, GlobalTokens, Pattern, Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK = 128
HEADS, HEAD_DIM = 4, 64
PROMISED = {0.50: 2.0, 0.25: 4.0, 0.10: 10.0, 0.05: 20.0, 0.02: 50.0}
"""Speed-up that the documents behind this project promised for each share of blocks computed."""
ERROR_LIMIT = 3e-5
"""Relative L2 error above which a row is called wrong and gets no time; float32 gives up to 4e-6 at 16K tokens."""
CHECKED_ROWS = 16
TABLE_SECONDS = 16.0
"""Rounds of the table go on until this many seconds have passed."""
MAX_ROUNDS = 5
DENSE_SECONDS = 6.0
"""Against N, dense attention is measured while a pass is expected to take less than this, and extrapolated beyond."""
GROWTH, LENGTHS, LONGEST = 4, 4, 2**20
"""The curve has at most so many lengths, each so many times the one before, and ends here."""
PASS_SECONDS = 60.0
"""The curve also ends before a pass that is expected to take longer: a constant density is quadratic."""

CURVE_PATTERN = Causal() & (Window(1024) | GlobalTokens(64))


def random_tiles(n_tiles: int, density: float, seed: int) -> Tensor:
    """A causal tile matrix, bool ``[n_tiles, n_tiles]``: the diagonal and random tiles below it.

    It keeps `density` of the tiles on and below the diagonal, to the nearest tile, but never less than the diagonal.
    """
    kept = torch.eye(n_tiles, dtype=torch.bool)
    below = torch.tril_indices(n_tiles, n_tiles, -1)
    wanted = max(0, round(density * n_tiles * (n_tiles + 1) / 2) - n_tiles)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(below.shape[1], generator=generator)[:wanted]
    kept[below[0, chosen], below[1, chosen]] = True
    return kept


class _Problem:
    """Inputs at one length, and an output gradient that is zero but in the rows that are checked."""

    def __init__(self, heads: int, n_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (1, heads, n_tokens, HEAD_DIM)
        *leaves, self.grad = (torch.randn(shape, generator=generator) for _ in range(4))
        query, key, value = (leaf.requires_grad_() for leaf in leaves)
        self.leaves = (query, key, value)
        self.rows = torch.linspace(0, n_tokens - 1, CHECKED_ROWS).long().unique()
        self.rows_grad = torch.zeros(shape)
        self.rows_grad[:, :, self.rows] = self.grad[:, :, self.rows]

    def timed(self, attention: Attention, grad: Tensor) -> tuple[float, float, list[Tensor]]:
        """Seconds of the forward pass and of forward and backward together; output and gradients."""
        began = time.perf_counter()
        out = attention(*self.leaves)
        forward = time.perf_counter() - began
        grads = torch.autograd.grad(out, self.leaves, grad)
        return forward, time.perf_counter() - began, [out.detach(), *grads]

    def traced(self, attention: Attention) -> tuple[float, int, list[Tensor]]:
        """Seconds of forward and backward, peak bytes beyond inputs and results, and the results, in one pass."""
        results: list[Tensor] = []
        seconds = 0.0

        def forward() -> Tensor:
            nonlocal seconds
            began = time.perf_counter()
            out = attention(*self.leaves)
            seconds += time.perf_counter() - began
            results.append(out.detach())
            return out

        def backward(out: Tensor) -> tuple[Tensor, ...]:
            nonlocal seconds
            began = time.perf_counter()
            grads = torch.autograd.grad(out, self.leaves, self.rows_grad)
            seconds += time.perf_counter() - began
            results.extend(grads)
            return grads

        peaks = peak_memory(forward, backward, torch.device("cpu"))
        return seconds, max(peaks.forward, peaks.backward or 0), results

    def error(self, got: list[Tensor], rule: Pattern) -> float:
        """The worst relative L2 error of the checked rows and of the gradients of a loss on them, against float64."""
        out, _ = attention_rows(*self.leaves, rule, self.rows)
        grads = torch.autograd.grad(out, self.leaves, self.rows_grad[:, :, self.rows].double())
        pairs = zip([got[0][:, :, self.rows], *got[1:]], [out.detach(), *grads], strict=True)
        return max(relative_error(mine, exact) for mine, exact in pairs)


@dataclass
class DensityRow:
    """One density of the table; seconds of every round."""

    density: float
    tile_density: float
    promised: float
    error: float
    forward_seconds: list[float] = field(default_factory=list)
    both_seconds: list[float] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the checked rows agree with float64."""
        return self.error <= ERROR_LIMIT


@dataclass(frozen=True)
class LengthRow:
    """One length at the fixed window: forward and backward once, and what dense attention took or would take."""

    n_tokens: int
    error: float
    both_seconds: float
    peak_bytes: int
    """The worst moment of the two passes, beyond inputs, output and gradients."""
    dense_seconds: float
    dense_measured: bool

    @property
    def exact(self) -> bool:
        """Whether the checked rows agree with float64."""
        return self.error <= ERROR_LIMIT


@dataclass
class Fast:
    """Measures the table at `context` tokens and the curve from there on, with `pattern` as the fixed window."""

    seed: int = 0
    context: int = 16384
    pattern: Pattern | None = None
    table: list[DensityRow] = field(default_factory=list)
    dense_forward: list[float] = field(default_factory=list)
    dense_both: list[float] = field(default_factory=list)
    curve: list[LengthRow] = field(default_factory=list)
    left_out: str | None = None
    """Where the curve ends early, and why."""

    name = "fast"

    def run(self, progress: Progress) -> None:
        """Measure the table and then the curve, printing both."""
        progress.say(
            f"Fast: B1 H{HEADS} D{HEAD_DIM} N {self.context:,}, causal, float32, {threads_text()}; "
            "dense: torch SDPA, is_causal, timed in the same rounds"
        )
        self._measure_table(progress)
        self._measure_curve(progress)

    @property
    def curve_rule(self) -> Pattern:
        """The fixed pattern of the curve against N."""
        return CURVE_PATTERN if self.pattern is None else Causal() & self.pattern

    def _measure_table(self, progress: Progress) -> None:
        n_tiles = -(-self.context // BLOCK)
        # Every query keeps the tile of its own position: with few tiles that alone is more than some densities.
        reachable = {density: promised for density, promised in PROMISED.items() if density * (n_tiles + 1) >= 2}
        if len(reachable) < len(PROMISED):
            missing = ", ".join(f"{density:.0%}" for density in PROMISED if density not in reachable)
            progress.say(f"  left out {missing}: out of reach with {n_tiles} x {n_tiles} tiles; use a longer --context")
        if not reachable:
            return
        problem = _Problem(HEADS, self.context, self.seed)
        exact: list[tuple[DensityRow, Attention]] = []
        progress.begin("fast · exact?", len(reachable), "densities")
        for done, (density, promised) in enumerate(reachable.items(), 1):
            rule = Causal() & Blocks(random_tiles(n_tiles, density, self.seed), block=BLOCK)
            index = build_index(rule, self.context, heads=HEADS, block=BLOCK)
            attention = attention_over(index)
            error = problem.error(problem.timed(attention, problem.rows_grad)[2], rule)
            self.table.append(DensityRow(density, index.tile_density, promised, error))
            if self.table[-1].exact:
                exact.append((self.table[-1], attention))
            progress.update(done, f"{density:.0%}: error {error:.1e}")
        began = time.monotonic()
        total = MAX_ROUNDS * (1 + len(exact))
        progress.begin("fast · table", 0, "passes")
        for number in range(MAX_ROUNDS):
            if number and time.monotonic() - began > TABLE_SECONDS:
                break
            forward, both, _ = problem.timed(_dense, problem.grad)
            self.dense_forward.append(forward)
            self.dense_both.append(both)
            for done, (row, attention) in enumerate(exact, number * (1 + len(exact)) + 2):
                forward, both, _ = problem.timed(attention, problem.grad)
                row.forward_seconds.append(forward)
                row.both_seconds.append(both)
                elapsed = time.monotonic() - began
                left = min(TABLE_SECONDS - elapsed, elapsed * (total - done) / done)
                progress.update(done, f"round {number + 1}", seconds_left=max(left, 0.0))
        rounds = "one round" if len(self.dense_both) == 1 else f"medians of {len(self.dense_both)} rounds"
        progress.say(
            f"  dense forward {duration_text(statistics.median(self.dense_forward))}, forward and backward "
            f"{duration_text(statistics.median(self.dense_both))}; {rounds}; "
            f"density of {BLOCK} x {BLOCK} tiles"
        )
        progress.say("  tile density  promised  forward  forward+backward  error")
        for row in self.table:
            speed = [f"{value:.1f}x" if value else "WRONG" for value in self.speedups(row)]
            promise = f"{row.promised:.0f}x"
            progress.say(f"  {row.tile_density:>12.1%}  {promise:>8}  {speed[0]:>7}  {speed[1]:>16}  {row.error:.1e}")

    def speedups(self, row: DensityRow) -> tuple[float, float] | tuple[None, None]:
        """Dense time over sparse time, forward and forward+backward; None where the row is wrong or not timed yet."""
        if not row.both_seconds:
            return None, None
        return (
            statistics.median(self.dense_forward) / statistics.median(row.forward_seconds),
            statistics.median(self.dense_both) / statistics.median(row.both_seconds),
        )

    @property
    def lengths(self) -> list[int]:
        """The lengths of the curve, the first of which is that of the table."""
        grown = [self.context * GROWTH**power for power in range(LENGTHS)]
        return [length for length in grown if length <= max(LONGEST, self.context)]

    def _measure_curve(self, progress: Progress) -> None:
        rule, lengths = self.curve_rule, self.lengths
        heads = rule.n_heads or 1
        progress.say(f"  {rule!r}, B1 H{heads}, forward and backward; memory: peak beyond inputs and results")
        progress.say("        N       time    memory  dense time                    error")
        progress.begin("fast · length", sum(lengths) / 2**10, "K tokens")
        seconds_per_tile = 0.0
        for number, n_tokens in enumerate(lengths, 1):
            try:
                index = build_index(rule, n_tokens, heads=heads, block=BLOCK)
            except ValueError as error:
                self.left_out = f"from {n_tokens:,} tokens on: {error}"
                break
            if (expected := seconds_per_tile * index.kept_tiles) > PASS_SECONDS:
                self.left_out = f"from {n_tokens:,} tokens on: a pass would take about {duration_text(expected)}"
                break
            problem = _Problem(heads, n_tokens, self.seed)
            measured = [row for row in self.curve if row.dense_measured]
            dense = measured[-1].dense_seconds * (n_tokens / measured[-1].n_tokens) ** 2 if measured else 0.0
            affordable = not measured or dense < DENSE_SECONDS
            if affordable:
                dense = problem.timed(_dense, problem.rows_grad)[1]
            # At a million tokens a second pass is long, so the one that is timed is also traced and checked.
            both, peak, results = problem.traced(attention_over(index))
            row = LengthRow(n_tokens, problem.error(results, rule), both, peak, dense, affordable)
            del results
            self.curve.append(row)
            seconds_per_tile = both / max(1, index.kept_tiles)
            progress.say(_curve_line(row))
            progress.update(sum(lengths[:number]) / 2**10)
        if self.left_out is not None:
            progress.say(f"  left out {self.left_out}")

    def summary(self) -> list[str]:
        """What was measured so far, in one or two lines."""
        lines = []
        timed = [(row, *self.speedups(row)) for row in self.table if row.both_seconds]
        if timed:
            parts = [f"{row.tile_density:.0%} {forward:.1f}x / {both:.1f}x" for row, forward, both in timed]
            lines.append(f"N {self.context:,}, speed-up forward / forward+backward at tile density {', '.join(parts)}")
        if self.curve:
            row = self.curve[-1]
            how = "measured" if row.dense_measured else "extrapolated"
            lines.append(
                f"{row.n_tokens:,} tokens forward and backward in {duration_text(row.both_seconds)} with "
                f"{row.peak_bytes / 2**20:,.0f} MiB beyond inputs and results; "
                f"dense {duration_text(row.dense_seconds)} ({how})"
            )
        return [f"{'' if number else 'Fast':<8}{line}" for number, line in enumerate(lines)]

    @property
    def passed(self) -> bool:
        """Whether every row agreed with float64."""
        return all(row.exact for row in self.table) and all(row.exact for row in self.curve)

    def record(self) -> dict[str, Any]:
        """The figures as plain data."""
        table = []
        for row in self.table:
            forward, both = self.speedups(row)
            table.append({**asdict(row), "exact": row.exact, "forward_speedup": forward, "both_speedup": both})
        return {
            "batch": 1,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "n_tokens": self.context,
            "block": BLOCK,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "causal": True,
            "dense_forward_seconds": self.dense_forward,
            "dense_both_seconds": self.dense_both,
            "table": table,
            "curve_pattern": repr(self.curve_rule),
            "curve_heads": self.curve_rule.n_heads or 1,
            "curve": [{**asdict(row), "exact": row.exact} for row in self.curve],
            "curve_left_out": self.left_out,
        }

    def draw(self, path: Path) -> None:
        """The promised and the measured speed-ups, and time and memory against N, of the rows that were right."""
        from ringtile.analysis.plot import picture

        with picture(path, 13.5, 4.6) as figure:
            table, duration, memory = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
            if any(row.both_seconds for row in self.table):
                self._draw_table(table)
            if any(row.exact for row in self.curve):
                self._draw_curve(duration, memory)

    def _draw_table(self, axes: Axes) -> None:
        from ringtile.analysis.plot import BLUE, GREY, LIGHT_BLUE

        rows = [row for row in self.table if row.both_seconds]
        series = [("promised", GREY, [row.promised for row in rows])]
        for name, color, which in (("forward", LIGHT_BLUE, 0), ("forward + backward", BLUE, 1)):
            series.append((name, color, [self.speedups(row)[which] or 0.0 for row in rows]))
        for offset, (name, color, heights) in zip((-0.28, 0.0, 0.28), series, strict=True):
            places = [place + offset for place in range(len(rows))]
            bars = axes.bar(places, heights, width=0.26, color=color, label=name)
            axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=8, padding=2)
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.5, 100)
        ticks = [1, 2, 4, 8, 16, 32, 64]
        axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
        axes.set_xticks(range(len(rows)), [f"{row.tile_density:.1%}" for row in rows])
        axes.set_xlabel("tile density (share of the causal tiles that is computed)")
        axes.set_ylabel("speed-up over dense attention (torch SDPA)")
        axes.set_title(f"N {count_text(self.context)}, B1 H{HEADS} D{HEAD_DIM}, float32, {threads_text()}")
        axes.grid(True, axis="y")
        axes.legend(loc="upper left")

    def _draw_curve(self, duration: Axes, memory: Axes) -> None:
        from ringtile.analysis.plot import BLUE, GREY, ORANGE, Curve, plot_curves

        rows = [row for row in self.curve if row.exact]
        lengths = [row.n_tokens for row in rows]
        measured = [row for row in rows if row.dense_measured]
        beyond = [row for row in rows if not row.dense_measured]
        guessed = measured[-1:] + beyond
        plot_curves(
            [
                Curve("sparse", lengths, [row.both_seconds for row in rows], BLUE, marker="o"),
                Curve("dense, measured", *_dense_curve(measured), ORANGE, marker="o"),
                Curve("dense, extrapolated", *_dense_curve(guessed), ORANGE, "--"),
            ],
            duration,
            x_label="tokens N",
            y_label="seconds",
        )
        # A logarithmic axis has no place for a length that needed nothing.
        peaks = [max(row.peak_bytes, 1) / 2**20 for row in rows]
        held = [8 * row.n_tokens * (self.curve_rule.n_heads or 1) * HEAD_DIM * 4 / 2**20 for row in rows]
        plot_curves(
            [
                Curve("inputs, output, their gradients", lengths, held, GREY, marker="o"),
                Curve("sparse, peak beyond these", lengths, peaks, BLUE, marker="o"),
            ],
            memory,
            x_label="tokens N",
            y_label="MiB",
        )
        for row, peak in zip(rows, peaks, strict=True):
            _label_point(duration, row.n_tokens, row.both_seconds, duration_text(row.both_seconds), BLUE, below=True)
            _label_point(duration, row.n_tokens, row.dense_seconds, duration_text(row.dense_seconds), ORANGE)
            _label_point(memory, row.n_tokens, peak, f"{peak:,.0f}", BLUE, below=True)
        for axes in (duration, memory):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [count_text(length) for length in lengths])
            axes.minorticks_off()
            axes.margins(x=0.22, y=0.12)
        duration.set_title(f"Forward + backward, B1 H{self.curve_rule.n_heads or 1} D{HEAD_DIM}")
        memory.set_title("Memory, forward + backward")
        memory.figure.supxlabel(
            f"middle and right: {self.curve_rule!r}", fontsize=8, color="#4a5059", x=0.99, ha="right"
        )


def _label_point(axes: Axes, x: float, y: float, text: str, color: str, *, below: bool = False) -> None:
    """Name a point of a rising curve on the side where the curve is not."""
    offset, side = ((5, -12), "left") if below else ((-5, 5), "right")
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", ha=side, fontsize=8, color=color)


def _dense_curve(rows: list[LengthRow]) -> tuple[list[float], list[float]]:
    return [row.n_tokens for row in rows], [row.dense_seconds for row in rows]


def _curve_line(row: LengthRow) -> str:
    memory = f"{row.peak_bytes / 2**20:,.0f} MiB"
    dense = duration_text(row.dense_seconds) + ("" if row.dense_measured else " (extrapolated)")
    took = duration_text(row.both_seconds) if row.exact else "WRONG"
    return f"  {count_text(row.n_tokens):>7}  {took:>9}  {memory:>8}  {dense:<28}  {row.error:.1e}"


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
