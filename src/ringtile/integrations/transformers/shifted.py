"""A pattern whose position 0 is another position of each batch element."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns import Cover, Pattern, TileGrid
from ringtile.patterns.base import Wrapper, interval_cover


@dataclass(frozen=True, repr=False)
class Shifted(Wrapper):
    """Keep the pairs of another pattern that counts its positions from ``origins``, one per batch element.

    Pairs before the origin are not kept. It can be negative.
    """

    inner: Pattern
    origins: tuple[int, ...]

    unbounded = False

    @property
    def _origin(self) -> int:
        if len(self.origins) > 1:
            raise ValueError(f"pattern of {len(self.origins)} batch elements: ask batch_row(b), the pattern of one")
        return self.origins[0]

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query, key = query - self._origin, key - self._origin
        return self.inner.allowed(head, query, key) & (query >= 0) & (key >= 0)

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(rows), torch.full_like(rows, grid.n_cols)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover | None:
        # A row tile lies in two row tiles of the inner pattern, and their keys in the columns between shifted bounds.
        block, origin = grid.block, self._origin
        inner = TileGrid(block, grid.start - origin, grid.n_queries, max(grid.n_keys - origin, 1))
        first = (rows * block - origin) // block
        rows_of = torch.unique(torch.cat([first, first + 1]))
        cover = self.inner.cover(head, rows_of, inner)
        if cover is None:
            return None
        lo, hi = (cover.lo * block + origin) // block, (cover.hi * block + origin - 1) // block + 1
        parts = []
        for step in (0, 1):
            # The row tile r of the inner pattern begins in the row tile r + origin // block, and may end in the next.
            row = (cover.row * block + origin) // block + step
            inside = torch.isin(row, rows) & (hi > lo) & (cover.hi > cover.lo)
            parts.append(interval_cover(row[inside], lo[inside], hi[inside], grid))
        return Cover(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        cover = self.cover(head, rows, grid)
        return len(rows) * grid.n_cols if cover is None else cover.size()

    def head_class(self, head: int) -> Hashable:
        return self.inner.head_class(head)

    @property
    def batch_size(self) -> int | None:
        return len(self.origins) if len(self.origins) > 1 else None

    def batch_row(self, batch: int) -> Pattern:
        return self if len(self.origins) == 1 else Shifted(self.inner, self.origins[batch : batch + 1])

    def validate(self, grid: TileGrid) -> None:
        for origin in self.origins:
            self.inner.validate(TileGrid(grid.block, grid.start - origin, grid.n_queries, grid.n_keys - origin))
