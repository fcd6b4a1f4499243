"""Act one: outputs and gradients against float64, next to a softmax per tile."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from demo.bars import grouped_bars
from ringtile.patterns import Causal, Dilated, Pattern, Window, bigbird, longformer
from ringtile.tools.bench.exact import Exact
from ringtile.tools.bench.peers import Case, Ringtile
from ringtile.tools.plot import BLUE, GREY, RED, picture, plot_pattern
from ringtile.tools.progress import Progress
from ringtile.tools.record import BOTH

BLOCK = 64
HEADS = 2
TENSORS = ("output", "dq", "dk", "dv")
RINGTILE, TORCH, PER_TILE = "ringtile", "torch SDPA with a bool mask", "softmax per tile, summed"


def softmax_per_tile(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, block: int) -> Tensor:
    """Compute the attention of dilated-attention-pytorch: a softmax per tile, and the sum of their outputs."""
    n_keys = key.shape[2]
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~kept, -math.inf)
    tiles = F.pad(scores, (0, -n_keys % block), value=-math.inf).unflatten(-1, (-1, block))
    weights = tiles.softmax(-1).nan_to_num(0.0)  # a row without keys in a tile is 0 / 0
    out: Tensor = weights.flatten(-2)[..., :n_keys] @ value
    return out


@dataclass(frozen=True)
class PatternErrors:
    """Relative L2 errors of one pattern: by method, then in the order of `TENSORS`."""

    name: str
    pattern: str
    causal: bool
    density: float
    errors: dict[str, list[float]]


@dataclass
class Right:
    """Measures the errors of four patterns, causal and not, and of ``pattern`` if there is one."""

    seed: int = 0
    pattern: Pattern | None = None
    n_tokens: int = 1000
    rows: list[PatternErrors] = field(default_factory=list)

    name = "right"

    @property
    def lengths(self) -> list[int]:
        return [self.n_tokens]

    def cases(self) -> list[Case]:
        """Return the patterns by name, each unchanged and then causal."""
        chosen: dict[str, Pattern | None] = {
            "window": Window(96),
            "dilated": Dilated([1, 2, 4], 32),
            "longformer": longformer(64, global_tokens=32),
            "bigbird": bigbird(random=2, window=64, global_tokens=32),
            "--pattern": self.pattern,
        }
        return [
            Case(name, pattern, self.n_tokens, heads=rule.num_heads or HEADS, block=BLOCK)
            for name, rule in chosen.items()
            if rule is not None
            for pattern in (rule, Causal() & rule)
        ]

    def run(self, progress: Progress) -> None:
        """Measure, and print a line per pattern."""
        names = "".join(f"{name:>9}" for name in TENSORS)
        progress.say(f"Right: relative L2 error against float64 (N {self.n_tokens:,}, B1 H{HEADS} D64, float32)")
        progress.say(f"  {'':<19}{RINGTILE:^36}  {PER_TILE:^36}".rstrip())
        progress.say(f"  {'pattern':<11}{'causal':<8}{names}  {names}")
        for number, case in enumerate(self.cases()):
            progress.show(f"right: {case.asked}")
            row = self._measure(case, bool(number % 2))
            self.rows.append(row)
            ours = "".join(f"{error:>9.1e}" for error in row.errors[RINGTILE])
            theirs = "".join(f"{error:>9.2f}" for error in row.errors[PER_TILE])
            progress.say(f"  {row.name:<11}{'yes' if row.causal else 'no':<8}{ours}  {theirs}")
        worst = {method: max(max(row.errors[method]) for row in self.rows) for method in (RINGTILE, TORCH)}
        progress.say(f"  worst error {worst[RINGTILE]:.1e}; of torch's own dense attention {worst[TORCH]:.1e}")

    def _measure(self, case: Case, causal: bool) -> PatternErrors:
        # All rows are sampled: the problem is small, and its errors are shown.
        exact, kept, rule = Exact(case, self.seed, checked_rows=self.n_tokens), case.index.to_dense(), case.pattern
        errors = {TORCH: exact.references(rule)[1]}
        for method, attention in (
            (RINGTILE, Ringtile().prepare(case)),
            (PER_TILE, lambda q, k, v: softmax_per_tile(q, k, v, kept, BLOCK)),
        ):
            errors[method] = exact.errors(rule, *exact.run(attention, BOTH, exact.rows_grad))
        return PatternErrors(case.asked, repr(rule), causal, case.index.density, errors)

    def record(self) -> dict[str, Any]:
        return {"n_tokens": self.n_tokens, "tensors": TENSORS, "rows": [asdict(row) for row in self.rows]}

    @property
    def has_figures(self) -> bool:
        return bool(self.rows)

    @property
    def passed(self) -> bool:
        """True if every error is at most three times the error of torch's own dense attention."""
        pairs = (zip(row.errors[RINGTILE], row.errors[TORCH], strict=True) for row in self.rows)
        # Errors of a few float32 roundings differ by more than three times by chance.
        return all(ours <= 3 * theirs + 1e-7 for row in pairs for ours, theirs in row)

    def draw(self, path: Path) -> None:
        """Draw the patterns, and the worst error of each method on a logarithmic scale."""
        drawn = self.cases()[::2]
        with picture(path, 11, 6.6) as figure:
            grid = figure.add_gridspec(2, len(drawn), height_ratios=[1.0, 1.15])
            for column, case in enumerate(drawn):
                axes = plot_pattern(case.index, figure.add_subplot(grid[0, column]))
                title = f"{case.asked}  ({case.index.density:.0%} of pairs)"
                axes.set(title=title, ylabel="" if column else "query position")
            axes = figure.add_subplot(grid[1, :])
            texts = {RINGTILE: "{:.1e}", TORCH: "", PER_TILE: "{:.1f}"}
            worst = {method: [max(row.errors[method]) for row in self.rows] for method in texts}
            labels = [f"{row.name}\n{'causal' if row.causal else 'not causal'}" for row in self.rows]
            grouped_bars(axes, labels, worst, (BLUE, GREY, RED), texts)
            axes.set(yscale="log", ylim=(1e-8, 100), ylabel="relative L2 error against float64")
            axes.set_title(f"Worst of output, dq, dk and dv  (N {self.n_tokens:,}, B1 H{HEADS} D64, float32)", pad=26)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, handlelength=1.2)
