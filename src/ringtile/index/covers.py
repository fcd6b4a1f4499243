"""The tiles that a pattern may keep, from its cover: candidates for an index, counts and needs without one."""

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import Cover, Dense, Pattern, TileGrid
from ringtile.patterns.grid import counted

MAX_BYTES = 2 << 30
"""Default budget of one build."""

CANDIDATE_BYTES = 128
"""Peak bytes per candidate tile while building: about sixteen int64 vectors exist at once."""

_COVER_BYTES = 16
"""Bytes per tile of a cover, by the pattern's own upper bound, which can be far too high."""

_STRIP = 1 << 18
"""Candidate tiles classified at once, unless one interval of a cover has more."""

_FEW = 512
"""Tiles of a single row that are classified without a cover."""


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
    """Yield numbers ``r * n_cols + c`` of the candidate tiles in ``rows[r]``, ascending, a strip at a time."""
    if len(rows) * grid.n_cols * CANDIDATE_BYTES > budget.max_bytes:
        budget.check(pattern, pattern.cover_size(head, rows, grid), _COVER_BYTES)
    # All tiles of the row of a decoded token are classified sooner than a cover is computed.
    chosen = Dense() if len(rows) == 1 and grid.n_cols <= _FEW else pattern
    cover = chosen.cover(head, rows, grid)
    cover = cover._replace(row=torch.searchsorted(rows, cover.row)).disjoint(grid.n_cols)
    budget.check(pattern, cover.size(), CANDIDATE_BYTES)
    length = cover.hi - cover.lo
    count = torch.bincount((length.cumsum(0) - length) // _STRIP).tolist()
    for row, lo, hi in zip(*(vector.split_with_sizes(count) for vector in cover), strict=True):
        # Of 10 columns, row 2 from 3 to 5 and row 4 from 0 to 3 are 23 24 40 41 42: 0 1 2 3 4 plus 23 and 38.
        length = hi - lo
        number = torch.repeat_interleave(row * grid.n_cols + lo - (length.cumsum(0) - length), length)
        yield number.add_(torch.arange(len(number), device=number.device))


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
    distinct, members = torch.unique(rows), groups_of(pattern, num_heads, batch)[1] if grid.n_cols else ()
    covers = (member.cover(head, distinct, grid) for member, head in members)
    return touched(covers, pattern, rows, parts, n_parts, grid, max_bytes)


def touched(
    covers: Iterable[Cover], pattern: Pattern, rows: Tensor, parts: Tensor, n_parts: int, grid: TileGrid,
    max_bytes: int = MAX_BYTES,
) -> Tensor:  # fmt: skip
    """Return the column tiles that a pattern's covers, which may overlap, name for parts of the rows, as `needed`."""
    budget, width = Budget(max_bytes, grid), grid.n_cols + 1
    budget.check(pattern, n_parts * width, 8)
    # An interval adds one at its first column and takes one away behind its last, so sums along the columns of a part
    # are the intervals that touch each. With 5 columns, [1, 3) and [2, 4) are changes 0 1 1 -1 -1 and sums 0 1 2 1 0.
    change = torch.zeros(n_parts * width, dtype=torch.int32, device=rows.device)
    # The parts of row r are `of_rows[begin[r]:][:copies[r]]`. Rows of no part do not count.
    copies = torch.bincount(rows - grid.first_row, minlength=grid.n_rows)
    begin, of_rows = copies.cumsum(0) - copies, parts[torch.argsort(rows)] * width
    for cover in covers:
        row = cover.row - grid.first_row
        count = copies[row]
        budget.check(pattern, int(count.sum()), _COVER_BYTES)
        which, step = counted(count)
        first, lo, hi = of_rows[begin[row[which]] + step], cover.lo[which], cover.hi[which]
        one = (hi > lo).int()
        change.index_add_(0, first + lo, one).index_add_(0, first + hi, one, alpha=-1)
    return change.view(n_parts, width).cumsum(1, dtype=torch.int32)[:, :-1] > 0


def candidates(pattern: Pattern, grid: TileGrid, *, num_heads: int = 1, batch: int = 1) -> Iterator[tuple[int, Cover]]:
    """Yield the candidate tiles of each group of equal heads and batch elements, and their number.

    The intervals do not overlap. They ascend, and none is empty. Raises ValueError if they would exceed 2 GiB.

    >>> from ringtile.patterns import GlobalTokens, Window
    >>> ((copies, cover),) = candidates(Window(100) | GlobalTokens(5), TileGrid(128, 0, 384, 384), num_heads=2)
    >>> copies, list(zip(*map(torch.Tensor.tolist, cover), strict=True))
    (2, [(0, 0, 2), (0, 2, 3), (1, 0, 3), (2, 0, 1), (2, 1, 3)])
    """
    budget, rows = Budget(MAX_BYTES, grid), torch.arange(grid.n_rows, device="cpu")
    table, members = groups_of(pattern, num_heads, batch)
    copies = torch.bincount(rows.new_tensor(table).flatten()) * (num_heads // len(table[0])) * (batch // len(table))
    for number, (member, head) in zip(copies.tolist(), members, strict=True):
        cover = member.cover(head, rows, grid)
        budget.check(pattern, len(cover.row), CANDIDATE_BYTES)
        yield number, cover.disjoint(grid.n_cols)


def check_candidates(pattern: Pattern, grid: TileGrid, tiles: int) -> None:
    """Raise ValueError if an index with so many candidate tiles would exceed 2 GiB."""
    Budget(MAX_BYTES, grid).check(pattern, tiles, CANDIDATE_BYTES)
