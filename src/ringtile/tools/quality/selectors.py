"""The rows of the table: each selector of tiles by its name, and the oracle and the controls around them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ringtile.adaptive import (
    AdaptiveAttention,
    Antidiagonal,
    Blend,
    Box,
    Density,
    Means,
    Probe,
    Recent,
    Scores,
    Shuffled,
    View,
    audit,
)
from ringtile.adaptive.choice import DEFAULT_SCORES
from ringtile.kernels.masses import pooled_masses
from ringtile.patterns import Pattern


@dataclass(frozen=True)
class Oracle(Scores):
    """Exact attention of all rows of a tile: the best that scores of this kind can know. It costs dense attention.

    Args:
        pool: How the rows become one: "max" for what any row wants, "mean" for the mass of all.
    """

    pool: Literal["max", "mean"] = "max"

    def __call__(self, view: View) -> Tensor:
        seen = view.base.leading
        if seen is None or view.key_mask is not None:
            raise ValueError(f"base: the oracle needs all or causal pairs and no key mask, got {view!r}")
        first, last = view.rows_of_tiles
        # Row tiles that begin at the rows 0, 16 and 32 and end at 40 are the groups 0, 16, 32, 40.
        groups = torch.cat((first, last[-1:])).int()
        found = pooled_masses(
            view.query, view.key, segment=view.base.block, seen=seen, groups=groups, pool=self.pool, scale=view.scale
        )
        return view.normalized(found)


DEFAULT = "default"
ORACLE = "oracle"
WINDOW = "window"
RANDOM = "random"

_BY_NAME: dict[str, Scores] = {
    DEFAULT: DEFAULT_SCORES,
    "probe": Probe(),
    "blend": Blend(),
    "first row": Probe("first"),
    "token blend": Blend(None),
    "blend, averaged": Blend("mean"),
    "box": Box(),
    "means": Means(),
    "antidiagonal": Antidiagonal(),
    WINDOW: Recent(),
    RANDOM: Shuffled(),
    "oracle, averaged": Oracle("mean"),
    ORACLE: Oracle(),
}
ROWS = tuple(_BY_NAME)
"""The names of all rows, in the order of the table."""
QUICK_ROWS = (DEFAULT, "probe", "blend", WINDOW, RANDOM, ORACLE)


@dataclass(frozen=True, eq=False)
class _Counted(View):
    """A view that counts the pairs whose scores are computed exactly, per head."""

    pairs: list[float] = field(default_factory=list)

    def exact_masses(self, row: Tensor) -> Tensor:
        self.pairs.append(float(self._seen[row].sum()))
        return super().exact_masses(row)

    def root_mean_squares(self, keep: Tensor) -> Tensor:
        base = self.base
        # The keys of each tile that a query sees, summed over the queries of a row tile.
        seen = (self._seen.unsqueeze(1) - torch.arange(base.n_cols) * base.block).clamp(0, base.block).float()
        sums = torch.zeros(base.n_rows, base.n_cols).index_add_(0, base.row_of(torch.arange(base.n_queries)), seen)
        self.pairs.append(float((keep * sums).sum()) / math.prod(keep.shape[:2]))
        return super().root_mean_squares(keep)

    @property
    def _seen(self) -> Tensor:
        if self.base.leading is None:
            return torch.full((self.base.n_queries,), self.base.n_keys)
        return self.base.leading


class Watched(nn.Module):
    """Adaptive attention that keeps the figures of its calls: tile density, exact scores, and recall of heads if asked.

    Args:
        attend: The attention.
        rows: Number of rows to audit in each call.
    """

    def __init__(self, attend: AdaptiveAttention, rows: int = 0) -> None:
        super().__init__()
        self.attend, self.rows = attend, rows
        self.density: list[float] = []
        self.probed: list[float] = []
        """The pairs that the choice computed exactly, as a part of those that dense attention computes."""
        self.recall: list[Tensor] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | None = None,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        choice = self.attend.choice
        asked = choice.view(query, key, pattern, is_causal=is_causal, key_mask=key_mask, scale=scale)
        view = _Counted(query, key, asked.base, key_mask, scale)
        index = choice.index(view)
        self.probed.append(sum(view.pairs) / float(view._seen.sum()))
        # The index is made here, not in the attention, so that its figures need no second choice.
        self.density.append(index.tile_density)
        if self.rows:
            found = audit(query, key, value, index, rows=self.rows, key_mask=key_mask, scale=scale)
            self.recall.append(found.of_heads)
        out: Tensor = self.attend.over(index, view, value, **options)
        return out


def attention_of(row: str, density: float, block: int, *, seed: int = 0, layer: int = 0) -> AdaptiveAttention:
    """Return the attention of a row. Random scores differ by seed and layer.

    Only a query's own tile is always kept, so that all rows of a table spend the same number of tiles.
    """
    scores = Shuffled(1000 * seed + layer) if row == RANDOM else _BY_NAME[row]
    # Small models are judged by scores that look ahead, and learn with them: the page says so.
    return AdaptiveAttention(scores, Density(density), block=block, first=0, local=0, allow_future=True)


def floor_of(tokens: int, block: int, forced: int = 1) -> float:
    """Return the tile density of causal attention that keeps nothing but each query's own tile, or so many.

    >>> floor_of(1024, 16) == 64 / (64 * 65 / 2)
    True
    """
    rows = -(-tokens // block)
    return sum(min(row, forced) for row in range(1, rows + 1)) / (rows * (rows + 1) / 2)
