"""The rows of the tables: each selector of tiles by its name, and the oracle and the controls around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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


def attention_of(row: str, density: float, block: int, *, seed: int = 0, layer: int = 0) -> AdaptiveAttention:
    """Return the attention of a row. Random scores differ by seed and layer.

    Only a query's own tile is always kept, so that all rows of a table spend the same number of tiles.
    """
    scores = Shuffled(1000 * seed + layer) if row == RANDOM else _BY_NAME[row]
    # Small models are judged by scores that look ahead, and learn with them: the page says so.
    return AdaptiveAttention(scores, Density(density), block=block, first=0, local=0, allow_future=True)
