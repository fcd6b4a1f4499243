"""Patterns of another pattern's positions or heads: places in segments, some of the heads, another first position."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns.base import Cover, Pattern, TileGrid, Wrapper, interval_cover
from ringtile.patterns.dilated import Segments


@dataclass(frozen=True, repr=False)
class InSegments(Wrapper):
    """One branch of LongNet with a pattern inside. The pattern relates the kept tokens of a segment, counted from 0.

    >>> from ringtile.patterns import Causal
    >>> print(InSegments(4, 2, Causal()).draw(6))
    █·····
    ······
    █·█···
    ······
    ····█·
    ······
    """

    length: int
    dilation: int
    inner: Pattern

    @property
    def segments(self) -> Segments:
        """The branch without the pattern."""
        return Segments(self.length, self.dilation)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        places = (query % self.length // self.dilation, key % self.length // self.dilation)
        return self.segments.allowed(head, query, key) & self.inner.allowed(head, *places)

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        return self.segments.col_range(head, rows, grid)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover | None:
        return self.segments.cover(head, rows, grid)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.segments.cover_size(head, rows, grid)

    def head_class(self, head: int) -> Hashable:
        return (head % self.dilation, self.inner.head_class(head))

    def validate(self, grid: TileGrid) -> None:
        n_places = -(-min(self.length, grid.n_keys) // self.dilation)
        self.inner.validate(TileGrid(grid.block, 0, n_places, n_places))


@dataclass(frozen=True, repr=False)
class Compacted(Wrapper):
    """A rule on positions, evaluated by place: place p is position ``p * dilation + head % dilation``."""

    inner: Pattern
    dilation: int

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset = head % self.dilation
        return self.inner.allowed(head, query * self.dilation + offset, key * self.dilation + offset)

    def head_class(self, head: int) -> Hashable:
        return (head % self.dilation, self.inner.head_class(head))

    def validate(self, grid: TileGrid) -> None:
        """Accept all lengths: they count places, and the rule counts positions."""


@dataclass(frozen=True, repr=False)
class OfHeads(Wrapper):
    """A pattern for a call with some of the heads: head h of the call is ``heads[h]`` of the pattern."""

    inner: Pattern
    heads: tuple[int, ...]

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.inner.allowed(torch.tensor(self.heads, device=head.device)[head], query, key)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover | None:
        return self.inner.cover(self.heads[head], rows, grid)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.inner.cover_size(self.heads[head], rows, grid)

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        return self.inner.col_range(self.heads[head], rows, grid)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        return self.inner.tile_class(self.heads[head], row, col, grid)

    def head_class(self, head: int) -> Hashable:
        return self.inner.head_class(self.heads[head])

    @property
    def num_heads(self) -> int | None:
        return len(self.heads)

    def envelope(self) -> Pattern:
        return self.inner.envelope()


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


def for_heads(pattern: Pattern, heads: tuple[int, ...], num_heads: int) -> Pattern:
    """Return the pattern for a call with some of ``num_heads`` heads, unchanged if it treats all heads alike."""
    everyone = heads == tuple(range(num_heads))
    alike = pattern.num_heads is None and len({pattern.head_class(head) for head in range(num_heads)}) == 1
    return pattern if everyone or alike else OfHeads(pattern, heads)
