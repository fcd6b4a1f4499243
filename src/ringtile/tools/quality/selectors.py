"""The rows of the table: each selector of tiles by its name, and the oracle and the controls around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ringtile import sparse_attention
from ringtile.adaptive import (
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
    select,
)
from ringtile.adaptive.choice import DEFAULT_SCORES
from ringtile.kernels.masses import pooled_masses


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
        groups = torch.cat((first, last[-1:])).int()
        found = pooled_masses(
            view.query, view.key, segment=view.base.block, seen=seen, groups=groups, pool=self.pool, scale=view.scale
        )
        return view.normalized(found)


DEFAULT = "default"
ORACLE = "oracle"
WINDOW = "window"
RANDOM = "random"
CONTROLS = (WINDOW, RANDOM)

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


def scores_of(row: str, seed: int, layer: int) -> Scores:
    """Return the scores of a row. Random scores differ by seed and layer."""
    return Shuffled(1000 * seed + layer) if row == RANDOM else _BY_NAME[row]


@dataclass
class Selected:
    """One layer's attention over the tiles that scores and a density choose, which notes what it kept.

    Only a query's own tile is always kept, so that all rows of a table spend the same number of tiles.
    """

    scores: Scores
    density: float
    block: int
    audited: int = 0
    """Rows to audit in each call."""
    densities: list[float] = field(default_factory=list)
    recalls: list[float] = field(default_factory=list)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **options: Any) -> Tensor:
        options.pop("pattern", None)
        key_mask = options.get("key_mask")
        index = select(
            query,
            key,
            self.scores,
            Density(self.density),
            is_causal=is_causal,
            block=self.block,
            first=0,
            local=0,
            key_mask=key_mask,
            allow_future=True,
        )
        if not torch.is_grad_enabled():
            self.densities.append(index.tile_density)
            if self.audited:
                self.recalls.append(audit(query, key, value, index, rows=self.audited, key_mask=key_mask).mean)
        out: Tensor = sparse_attention(query, key, value, index, **options)
        return out


def floor_of(tokens: int, block: int, forced: int = 1) -> float:
    """Return the tile density of causal attention that keeps nothing but each query's own tile, or so many.

    >>> floor_of(1024, 16) == 64 / (64 * 65 / 2)
    True
    """
    rows = -(-tokens // block)
    return sum(min(row, forced) for row in range(1, rows + 1)) / (rows * (rows + 1) / 2)
