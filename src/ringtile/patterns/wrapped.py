"""Patterns of other patterns' heads or positions: one per head, some heads, places in segments, another origin."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns.base import Composed, Dense, Pattern, Wrapper, sized
from ringtile.patterns.grid import Cover, TileGrid, interval_cover
from ringtile.patterns.local import Segments


class _ByHead(Composed, rule=("allowed",)):
    """A pattern whose heads are heads of its parts: every question about a head goes to `of_head`."""

    def of_head(self, head: int) -> tuple[Pattern, int]:
        """Return the part that a head comes from, and its head there."""
        raise NotImplementedError

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        part, head = self.of_head(head)
        return part.cover(head, rows, grid)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        part, head = self.of_head(head)
        return part.cover_size(head, rows, grid)

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        part, head = self.of_head(head)
        return part.col_range(head, rows, grid)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        part, head = self.of_head(head)
        return part.tile_class(head, row, col, grid)

    def head_class(self, head: int) -> Hashable:
        part, head = self.of_head(head)
        return part, part.head_class(head)

    def envelope(self) -> Pattern:
        envelopes = {part.envelope() for part in self.parts}
        return envelopes.pop() if len(envelopes) == 1 else Dense()


@dataclass(frozen=True, repr=False)
class PerHead(_ByHead):
    """Keep a separate pattern per head, written ``per_head([a, b, ...])``."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if not self.patterns or not all(isinstance(p, Pattern) for p in self.patterns):
            raise ValueError(f"per_head expects a non-empty sequence of patterns, got {self.patterns!r}")
        if any(p.num_heads is not None for p in self.patterns):
            raise ValueError("per_head expects patterns for any head, got one that is itself written per head")
        if len({p.batch_size for p in self.patterns} - {None}) > 1:
            raise ValueError(f"per_head expects one batch_size, got {[p.batch_size for p in self.patterns]}")
        texts = [p.text for p in self.patterns]
        self._set_text(None if None in texts else f"per_head([{', '.join(map(str, texts))}])")

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shape = torch.broadcast_tensors(head, query, key)[0].shape
        kept = torch.zeros(shape, dtype=torch.bool, device=query.device)
        for number, pattern in enumerate(self.patterns):
            kept |= (head == number) & pattern.allowed(head, query, key)
        return kept

    def of_head(self, head: int) -> tuple[Pattern, int]:
        return self.patterns[head], head

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.patterns

    def rebuilt(self, parts: Sequence[Pattern]) -> Pattern:
        return PerHead(tuple(parts))

    @property
    def num_heads(self) -> int | None:
        return len(self.patterns)

    def resized(self, size: int) -> Pattern | None:
        """Resize every head that has a free parameter."""
        return None if self.free_rank is None else PerHead(tuple(sized(p, size) for p in self.patterns))


@dataclass(frozen=True, repr=False)
class InSegments(Wrapper):
    """One branch of LongNet with a pattern inside. The pattern relates the kept tokens of a segment, counted from 0."""

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
class OfHeads(_ByHead, Wrapper):
    """A pattern for a call with some of the heads: head h of the call is ``heads[h]`` of the pattern."""

    inner: Pattern
    heads: tuple[int, ...]

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.inner.allowed(torch.tensor(self.heads, dtype=torch.int64, device=head.device)[head], query, key)

    def of_head(self, head: int) -> tuple[Pattern, int]:
        return self.inner, self.heads[head]

    @property
    def num_heads(self) -> int | None:
        return len(self.heads)


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

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        # A row tile lies in two row tiles of the inner pattern, and their keys in the columns between shifted bounds.
        block, origin = grid.block, self._origin
        inner = TileGrid(block, grid.start - origin, grid.n_queries, max(grid.n_keys - origin, 1))
        # With origin 100 and block 128, row 1 (128 ... 255) is 28 ... 155 of the inner pattern: its rows 0 and 1.
        first = (rows * block - origin) // block
        rows_of = torch.unique(torch.cat([first, first + 1]))
        cover = self.inner.cover(head, rows_of, inner)
        lo, hi = (cover.lo * block + origin) // block, (cover.hi * block + origin - 1) // block + 1
        parts = []
        for step in (0, 1):
            # The row tile r of the inner pattern begins in the row tile r + origin // block, and may end in the next.
            row = (cover.row * block + origin) // block + step
            inside = torch.isin(row, rows) & (hi > lo) & (cover.hi > cover.lo)
            parts.append(interval_cover(row[inside], lo[inside], hi[inside], grid))
        return Cover(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.cover(head, rows, grid).size()

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
