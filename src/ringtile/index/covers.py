"""The tiles that a pattern may keep, from its cover: candidates for an index, counts and needs without one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import Cover, Pattern, TileGrid

MAX_BYTES = 2 << 30
"""Default budget of one build."""

CANDIDATE_BYTES = 128
"""Peak bytes per candidate tile while building: about sixteen int64 vectors exist at once."""

_COVER_BYTES = 16
"""Bytes per tile of a cover, by the pattern's own upper bound, which can be far too high."""

_STRIP = 1 << 18
"""Candidate tiles classified at once, unless one row has more."""

_FEW = 512
"""Up to this many tiles of a single row, as for a decoded token, are classified sooner than a cover is computed."""


def shortened(pattern: Pattern) -> str:
    """Return the pattern's text for a message, at most 120 letters."""
    text = repr(pattern)
    return text if len(text) <= 120 else f"{text[:117]}..."


class Budget(NamedTuple):
    """The byte limit of a build, and its pattern and lengths."""

    max_bytes: int
    lengths: TileGrid

    def check(self, pattern: Pattern, tiles: int, bytes_each: int) -> None:
        """Raise ValueError if so many tiles of a pattern would exceed the limit."""
        if tiles * bytes_each > self.max_bytes:
            raise ValueError(
                f"{shortened(pattern)} with {self.lengths.n_queries} queries and {self.lengths.n_keys} keys has up to "
                f"{tiles:,} tiles of {self.lengths.block}: building needs {tiles * bytes_each:,} bytes, over "
                f"max_bytes={self.max_bytes:,}"
            )


def groups_of(pattern: Pattern, heads: int, batch: int) -> tuple[list[list[int]], list[tuple[Pattern, int]]]:
    """Return the group of each batch element and head, and one pattern and head per group."""
    seen: dict[Hashable, int] = {}
    members: list[tuple[Pattern, int]] = []
    table = []
    for row in range(1 if pattern.batch_size is None else batch):
        of_row = pattern.batch_row(row)
        numbers = []
        for head in range(heads):
            group = seen.setdefault((of_row, of_row.head_class(head)), len(members))
            if group == len(members):
                members.append((of_row, head))
            numbers.append(group)
        table.append(numbers if len(set(numbers)) > 1 else numbers[:1])
    widest = max(map(len, table))
    table = [numbers * (widest // len(numbers)) for numbers in table]
    return (table if any(numbers != table[0] for numbers in table) else table[:1]), members


def strips(pattern: Pattern, head: int, rows: Tensor, grid: TileGrid, budget: Budget) -> Iterator[Tensor]:
    """Yield numbers ``r * n_cols + c`` of the candidate tiles, ascending and distinct, in chunks of rows.

    Row tile ``rows[r]`` has number r. The numbers in ``rows`` ascend.
    """
    if len(rows) * grid.n_cols * CANDIDATE_BYTES > budget.max_bytes:
        budget.check(pattern, pattern.cover_size(head, rows, grid), _COVER_BYTES)
    few = len(rows) == 1 and grid.n_cols <= _FEW
    cover = None if few else pattern.cover(head, rows, grid)
    size = len(rows) * grid.n_cols if cover is None else cover.size()
    budget.check(pattern, size, CANDIDATE_BYTES)
    if cover is None:
        step = max(1, _STRIP // grid.n_cols) * grid.n_cols
        for first in range(0, size, step):
            yield torch.arange(first, min(first + step, size), device=rows.device)
        return
    cover = cover._replace(row=torch.searchsorted(rows, cover.row))
    if size <= _STRIP:
        yield _expand(cover, size, grid.n_cols)
        return
    length = (cover.hi - cover.lo).clamp_(min=0)
    per_row = torch.zeros(len(rows), dtype=torch.int64, device=rows.device).scatter_add_(0, cover.row, length)
    strip_of_row = (per_row.cumsum(0) - per_row) // _STRIP
    strip = strip_of_row[cover.row]
    order = torch.argsort(strip, stable=True)
    count = torch.bincount(strip).tolist()
    for part in zip(*(vector[order].split_with_sizes(count) for vector in cover), strict=True):
        piece = Cover(*part)
        yield _expand(piece, piece.size(), grid.n_cols)


def _expand(cover: Cover, size: int, n_cols: int) -> Tensor:
    length = (cover.hi - cover.lo).clamp_(min=0)
    offset = cover.row * n_cols + cover.lo - (length.cumsum(0) - length)
    number = torch.repeat_interleave(offset, length, output_size=size)
    number += torch.arange(size, device=number.device)
    ascending = bool((number[1:] > number[:-1]).all())
    return number if ascending else torch.unique(number)


def needed(
    pattern: Pattern,
    rows: Tensor,
    parts: Tensor,
    n_parts: int,
    grid: TileGrid,
    *,
    num_heads: int = 1,
    batch: int = 1,
    max_bytes: int = MAX_BYTES,
) -> Tensor:
    """Return the column tiles that parts of the rows may touch: bool ``[n_parts, n_cols]``.

    Row tile ``rows[m]`` belongs to part ``parts[m]``, and may belong to several. The answer comes from the covers of
    the pattern, without an index: it takes no time per tile, but can hold a few columns that no row keeps. Raises
    ValueError if it would exceed ``max_bytes``.

    >>> from ringtile.patterns import Causal, Window
    >>> rows = torch.arange(4)
    >>> needed(Causal() & Window(100), rows, rows // 2, 2, TileGrid(128, 0, 512, 512)).int().tolist()
    [[1, 1, 0, 0], [0, 1, 1, 1]]
    """
    budget = Budget(max_bytes, grid)
    budget.check(pattern, n_parts * (grid.n_cols + 1), 8)
    touched, distinct = Touched(rows, parts, n_parts, grid), torch.unique(rows)
    for member, head in groups_of(pattern, num_heads, batch)[1]:
        cover = member.cover(head, distinct, grid) if grid.n_cols else None
        if cover is None:
            has_rows = torch.bincount(parts, minlength=n_parts) > 0
            return has_rows.unsqueeze(1).expand(n_parts, grid.n_cols)
        budget.check(pattern, touched.count(cover), _COVER_BYTES)
        touched.add(cover)
    return touched.columns()


class Touched:
    """Collects the column tiles that covers name for parts of their rows. Rows of no part do not count."""

    def __init__(self, rows: Tensor, parts: Tensor, n_parts: int, grid: TileGrid) -> None:
        # Rows of no part go to one more, at the end.
        self._first, self._width, self._n_parts = grid.first_row, grid.n_cols + 1, n_parts
        # Each interval adds one to the columns from its begin and takes one away from its end.
        self._change = torch.zeros((n_parts + 1) * self._width, dtype=torch.int32, device=rows.device)
        self._copies = torch.bincount(rows - self._first, minlength=grid.n_rows)
        order = torch.argsort(rows)
        self._parts = parts[order] * self._width
        self._begin = self._copies.cumsum(0) - self._copies
        self._of_row: Tensor | None = None
        if len(rows) == 0 or int(self._copies.max()) == 1:
            # A row has one part at most.
            last = torch.full_like(self._copies, n_parts * self._width)
            self._of_row = last.index_put_((rows - self._first,), parts * self._width)

    def count(self, cover: Cover) -> int:
        """Return the number of intervals that `add` adds at most, one for each part of a row."""
        return len(cover.row) if self._of_row is not None else int(self._copies[cover.row - self._first].sum())

    def add(self, cover: Cover) -> None:
        """Add a cover, whose intervals may overlap."""
        row, lo, hi = cover.row - self._first if self._first else cover.row, cover.lo, cover.hi
        if self._of_row is not None:
            begin = self._of_row[row]
        else:
            copies = self._copies[row]
            part = torch.arange(int(copies.sum()), device=row.device)
            part += torch.repeat_interleave(self._begin[row] - (copies.cumsum(0) - copies), copies)
            lo, hi = (torch.repeat_interleave(x, copies) for x in (lo, hi))
            begin = self._parts[part]
        one = (hi > lo).int()
        self._change.index_add_(0, begin + lo, one).index_add_(0, begin + hi, one, alpha=-1)

    def columns(self) -> Tensor:
        """Return the columns of each part, bool ``[n_parts, n_cols]``."""
        change = self._change.view(-1, self._width)[: self._n_parts]
        return change.cumsum(1, dtype=torch.int32)[:, :-1] > 0


def candidates(
    pattern: Pattern, grid: TileGrid, *, num_heads: int = 1, batch: int = 1, max_bytes: int = MAX_BYTES
) -> Iterator[tuple[int, Cover]]:
    """Yield the candidate tiles of each group of equal heads and batch elements, and their number.

    The intervals do not overlap. They ascend, and none is empty. Raises ValueError if they would exceed ``max_bytes``.

    >>> from ringtile.patterns import GlobalTokens, Window
    >>> ((copies, cover),) = candidates(Window(100) | GlobalTokens(5), TileGrid(128, 0, 384, 384), num_heads=2)
    >>> copies, list(zip(*map(torch.Tensor.tolist, cover), strict=True))
    (2, [(0, 0, 2), (0, 2, 3), (1, 0, 3), (2, 0, 1), (2, 1, 3)])
    """
    budget, rows = Budget(max_bytes, grid), torch.arange(grid.n_rows)
    table, members = groups_of(pattern, num_heads, batch)
    copies = torch.bincount(torch.tensor(table).flatten()) * (num_heads // len(table[0])) * (batch // len(table))
    for number, (member, head) in zip(copies.tolist(), members, strict=True):
        cover = member.cover(head, rows, grid)
        if cover is None:
            cover = Cover(rows, torch.zeros_like(rows), torch.full_like(rows, grid.n_cols))
        budget.check(pattern, len(cover.row), CANDIDATE_BYTES)
        yield number, cover.disjoint(grid.n_cols)


def check_candidates(pattern: Pattern, grid: TileGrid, tiles: int, max_bytes: int = MAX_BYTES) -> None:
    """Raise ValueError if an index with so many candidate tiles would exceed ``max_bytes``."""
    Budget(max_bytes, grid).check(pattern, tiles, CANDIDATE_BYTES)
