"""Act one: outputs and gradients against float64, beside a softmax per tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional import sparse_attention
from ringtile.kernels.reference import attention_reference
from ringtile.layout import BlockIndex, build_index
from ringtile.measure.progress import Progress
from ringtile.patterns import Causal, Dilated, Pattern, Window, bigbird, longformer

BLOCK = 64
HEADS, HEAD_DIM = 2, 64
TENSORS = ("output", "dq", "dk", "dv")
RINGTILE, TORCH, PER_TILE = "ringtile", "torch SDPA with a bool mask", "softmax per tile, summed"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def softmax_per_tile(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, block: int) -> Tensor:
    """What ringtile's predecessor computed: each tile takes a softmax of its own and the results are added up.

    A row that keeps tiles in m column blocks gets weights that sum to m instead of 1.
    """
    n_keys = key.shape[2]
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~kept, -math.inf)
    tiles = F.pad(scores, (0, -n_keys % block), value=-math.inf).unflatten(-1, (-1, block))
    weights = tiles.softmax(-1).nan_to_num(0.0)  # a row without keys in a tile is 0 / 0
    out: Tensor = weights.flatten(-2)[..., :n_keys] @ value
    return out


def attention_over(pattern: Pattern | BlockIndex) -> Attention:
    """`sparse_attention` with its pattern filled in."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sparse_attention(query, key, value, pattern)

    return attend


def relative_error(got: Tensor, exact: Tensor) -> float:
    """``||got - exact|| / ||exact||`` in float64; 0 where both are zero."""
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300))


def _output_and_gradients(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


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
    """Measures the errors of four patterns, causal and not, and of one more where `pattern` is given."""

    seed: int = 0
    pattern: Pattern | None = None
    n_tokens: int = 1000
    rows: list[PatternErrors] = field(default_factory=list)

    name = "right"

    @property
    def lengths(self) -> list[int]:
        """The one length."""
        return [self.n_tokens]

    def patterns(self) -> dict[str, Pattern]:
        """The patterns by the name under which they are shown."""
        chosen: dict[str, Pattern] = {
            "window": Window(96),
            "dilated": Dilated([1, 2, 4], 32),
            "longformer": longformer(64, global_tokens=32),
            "bigbird": bigbird(random=2, window=64, global_tokens=32),
        }
        if self.pattern is not None:
            chosen["--pattern"] = self.pattern
        return chosen

    def run(self, progress: Progress) -> None:
        """Measure, printing a line for each pattern."""
        chosen = [(name, rule, causal) for name, rule in self.patterns().items() for causal in (False, True)]
        progress.say(
            f"Right: relative L2 error against float64 (N {self.n_tokens:,}, B1 H{HEADS} D{HEAD_DIM}, float32)"
        )
        progress.say(f"  {'':<19}{'ringtile':^36}  {PER_TILE:^31}")
        names = "".join(f"{name:>9}" for name in TENSORS)
        progress.say(f"  {'pattern':<11}{'causal':<8}{names}  {names.replace('  ', ' ', 1)}")
        progress.begin("right", len(chosen), "patterns")
        for done, (name, rule, causal) in enumerate(chosen, 1):
            row = self._measure(name, Causal() & rule if causal else rule, causal)
            self.rows.append(row)
            ours = "".join(f"{error:>9.1e}" for error in row.errors[RINGTILE])
            theirs = "".join(f"{error:>9.2f}" for error in row.errors[PER_TILE])
            progress.say(f"  {name:<11}{'yes' if causal else 'no':<8}{ours}  {theirs}")
            progress.update(done, name)

    def _measure(self, name: str, rule: Pattern, causal: bool) -> PatternErrors:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (1, rule.n_heads or HEADS, self.n_tokens, HEAD_DIM)
        *inputs, grad = (torch.randn(shape, generator=generator) for _ in range(4))
        index = build_index(rule, self.n_tokens, heads=shape[1], block=BLOCK)
        kept = index.to_dense()
        exact = _output_and_gradients(
            lambda q, k, v: attention_reference(q, k, v, rule)[0], [tensor.double() for tensor in inputs], grad.double()
        )
        methods: dict[str, Attention] = {
            RINGTILE: attention_over(index),
            TORCH: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=kept),
            PER_TILE: lambda q, k, v: softmax_per_tile(q, k, v, kept, BLOCK),
        }
        errors = {}
        for method, attention in methods.items():
            got = _output_and_gradients(attention, inputs, grad)
            errors[method] = [relative_error(a, b) for a, b in zip(got, exact, strict=True)]
        return PatternErrors(name, repr(rule), causal, index.density, errors)

    def worst(self, method: str) -> float:
        """The worst error of a method over patterns and tensors."""
        return max(max(row.errors[method]) for row in self.rows)

    def summary(self) -> list[str]:
        """One line of what was measured so far."""
        if not self.rows:
            return []
        lowest = min(min(row.errors[PER_TILE]) for row in self.rows)
        return [
            f"Right   worst error of outputs and gradients: {self.worst(RINGTILE):.1e} over {len(self.rows)} patterns "
            f"(torch's own dense attention: {self.worst(TORCH):.1e}); "
            f"{PER_TILE}: {lowest:.1f} to {self.worst(PER_TILE):.1f}"
        ]

    def record(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "n_tokens": self.n_tokens,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "dtype": "float32",
            "block": BLOCK,
            "tensors": list(TENSORS),
            "rows": [asdict(row) for row in self.rows],
        }

    @property
    def passed(self) -> bool:
        """Whether every error stayed within what float32 can give: three times that of torch's own dense attention."""
        return all(
            ours <= 3 * theirs + 1e-7
            for row in self.rows
            for ours, theirs in zip(row.errors[RINGTILE], row.errors[TORCH], strict=True)
        )

    def draw(self, path: Path) -> None:
        """The patterns, and the worst error of each method on a logarithmic scale."""
        from ringtile.analysis.plot import BLUE, GREY, RED, picture, plot_pattern

        drawn = self.patterns()
        with picture(path, 11, 6.6) as figure:
            grid = figure.add_gridspec(2, len(drawn), height_ratios=[1.0, 1.15])
            for column, (name, rule) in enumerate(drawn.items()):
                axes = figure.add_subplot(grid[0, column])
                index = build_index(rule, self.n_tokens, heads=rule.n_heads or HEADS, block=BLOCK)
                plot_pattern(index, axes)
                axes.set_title(f"{name}  ({index.density:.0%} of pairs)")
                if column:
                    axes.set_ylabel("")
            axes = figure.add_subplot(grid[1, :])
            series = {RINGTILE: BLUE, TORCH: GREY, PER_TILE: RED}
            for offset, (method, color) in zip((-0.27, 0.0, 0.27), series.items(), strict=True):
                worst = [max(row.errors[method]) for row in self.rows]
                places = [place + offset for place in range(len(worst))]
                bars = axes.bar(places, worst, width=0.25, color=color, label=method)
                if method != TORCH:
                    style = "{:.1f}" if method == PER_TILE else "{:.1e}"
                    axes.bar_label(bars, [style.format(value) for value in worst], fontsize=8, padding=2)
            axes.set_yscale("log")
            axes.set_ylim(1e-8, 100)
            labels = [f"{row.name}\n{'causal' if row.causal else 'not causal'}" for row in self.rows]
            axes.set_xticks(range(len(labels)), labels)
            axes.tick_params(axis="x", length=0)
            axes.set_ylabel("relative L2 error against float64")
            axes.set_title(
                f"Worst of output, dq, dk and dv  (N {self.n_tokens:,}, B1 H{HEADS} D{HEAD_DIM}, float32)", pad=26
            )
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, handlelength=1.2)
            axes.grid(True, axis="y")
