"""Patterns of other patterns' heads or positions: one per head, some heads, places in segments, each document alone."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ringtile.patterns.base import Composed, Dense, Pattern, Wrapper, sized
from ringtile.patterns.documents import Documents
from ringtile.patterns.grid import Cover, TileGrid, counted, interval_cover, number_pairs
from ringtile.patterns.local import Causal, Segments


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
class PerDocument(Composed, rule=("allowed",)):
    """Keep the pairs of a pattern that begins anew in each document. `per_document` makes it."""

    inner: Pattern
    documents: Documents
    free_rank = None

    def __post_init__(self) -> None:
        sizes = {part.batch_size for part in self.parts} - {None}
        if len(sizes) > 1:
            raise ValueError(f"per_document expects one batch_size, got {sorted(map(str, sizes))}")
        inner, lengths = self.inner.text, self.documents.text
        has_text = inner is not None and lengths is not None
        self._set_text(f"per_document({inner}, {lengths[len('documents(') : -1]})" if has_text else None)  # type: ignore[index]

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.inner, self.documents

    def rebuilt(self, parts: Sequence[Pattern]) -> Pattern:
        inner, documents = parts
        assert isinstance(documents, Documents)
        return PerDocument(inner, documents)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        starts = self.documents.starts(query)
        # Tiles reach past the last token, for which the other pattern may have no rule.
        tokens = [x.clamp(min=starts[0], max=starts[-1] - 1) for x in (query, key)]
        of_query, of_key = map(self.documents.document, tokens)
        inner = self.inner.allowed(head, tokens[0] - starts[of_query], tokens[1] - starts[of_key])
        return inner & (of_query == of_key)

    def _grid(self, starts: Tensor, block: int) -> TileGrid:
        """Return the tiles of the longest document alone."""
        longest = int(starts.diff().max())
        return TileGrid(block, 0, longest, longest)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        block, starts = grid.block, self.documents.starts(rows)
        first, last = (self.documents.document(at) for at in (rows * block, rows * block + block - 1))
        which, step = counted(last - first + 1)
        row, begin, end = rows[which], starts[first[which] + step], starts[first[which] + step + 1]
        low, high = torch.maximum(row * block, begin) - begin, torch.minimum(row * block + block, end) - begin - 1
        # With a document from 100 on, row 1 of 128 (128 ... 255) is 28 ... 155 there: rows 0 and 1 of it alone.
        tiles = torch.stack([low // block, high // block], 1)
        both = torch.stack([high >= low, tiles[:, 1] > tiles[:, 0]], 1)
        which, tile = both.nonzero()[:, 0], tiles[both]
        alone = self.inner.cover(head, tile.unique(), self._grid(starts, block))
        row_of, order = alone.row.sort(stable=True)
        at = torch.searchsorted(row_of, tile)
        of_tile, step = counted(torch.searchsorted(row_of, tile, right=True) - at)
        which, entry = which[of_tile], order[at[of_tile] + step]
        lo, hi = alone.lo[entry] * block, torch.minimum(alone.hi[entry] * block, end[which] - begin[which])
        kept = hi > lo
        lo, hi = (x[kept] + begin[which][kept] for x in (lo, hi))
        return interval_cover(row[which][kept], lo // block, (hi - 1) // block + 1, grid)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.cover(head, rows, grid).size()

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        return self.documents.col_range(head, rows, grid)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        block, starts = grid.block, self.documents.starts(row)
        begin, alone = starts[self.documents.document(torch.maximum(row, col) * block)], self._grid(starts, block)
        # A tile with one document in common is cut from two by two tiles of it alone, at the same place of each.
        outer, phase = self.documents.tile_class(head, row, col, grid), -begin % block
        # Documents fill the last tile, in which `allowed` repeats the last token.
        ends = [(starts[-1] - x * block).clamp(max=block) for x in (row, col)]
        number, is_all = number_pairs(number_pairs(outer, phase), number_pairs(*ends)), outer == 1
        for down, right in product((0, 1), repeat=2):
            row_of, col_of = (
                ((x * block - begin) // block + (phase > 0) * step).clamp(0, alone.n_cols - 1)
                for x, step in ((row, down), (col, right))
            )
            classes = self.inner.tile_class(head, row_of, col_of, alone)
            is_all &= classes == 1
            number = number_pairs(number, classes)
        return torch.where(is_all, 1, torch.where(outer == 0, 0, number))

    def envelope(self) -> Pattern:
        inner = self.inner.envelope()
        return inner & self.documents if isinstance(inner, Causal) else self.documents

    def validate(self, grid: TileGrid) -> None:
        self.documents.validate(grid)
        for length in self.documents.bounds.tensor.diff().unique().tolist():
            if length:
                self.inner.validate(TileGrid(grid.block, 0, length, length))


def for_heads(pattern: Pattern, heads: tuple[int, ...], num_heads: int) -> Pattern:
    """Return the pattern for a call with some of ``num_heads`` heads, unchanged if it treats all heads alike."""
    everyone = heads == tuple(range(num_heads))
    alike = pattern.num_heads is None and len({pattern.head_class(head) for head in range(num_heads)}) == 1
    return pattern if everyone or alike else OfHeads(pattern, heads)
