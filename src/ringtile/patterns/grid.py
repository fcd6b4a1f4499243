"""The tiles that queries and keys touch, candidates among them, and numbers for those with equal bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FAR = 2**40
"""A distance larger than that of any two positions. Rules without a limit reach so far."""


@dataclass(frozen=True)
class TileGrid:
    """The tiles that ``n_queries`` queries, from position ``start``, and ``n_keys`` keys touch."""

    block: int
    start: int
    n_queries: int
    n_keys: int

    def __post_init__(self) -> None:
        if self.start + self.n_queries > FAR or self.n_keys - self.start > FAR:
            raise ValueError(
                f"start: expected positions less than 2**40 from 0 and from each other, got start={self.start}, "
                f"n_queries={self.n_queries}, n_keys={self.n_keys}"
            )

    @property
    def first_row(self) -> int:
        """Number of the first row tile, in position space."""
        return self.start // self.block

    @property
    def whole(self) -> "TileGrid":
        """The same tiles, all of them whole."""
        block = self.block
        return TileGrid(block, self.first_row * block, self.n_rows * block, self.n_cols * block)

    @property
    def n_rows(self) -> int:
        """Number of row tiles."""
        if self.n_queries == 0:
            return 0
        return (self.start + self.n_queries - 1) // self.block - self.first_row + 1

    @property
    def n_cols(self) -> int:
        """Number of column tiles. The first is number 0."""
        return -(-self.n_keys // self.block)

    def units(self, tile: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the first and the last block of ``unit`` tokens in each tile."""
        # Tile 1 of 128 tokens begins at token 128, in block 2 of 50 tokens, and ends at 255, in block 5.
        return tile * self.block // unit, (tile * self.block + self.block - 1) // unit

    def phase(self, tile: Tensor, unit: int) -> Tensor:
        """Return how far into a block of ``unit`` tokens each tile begins, or 0 if it has only one block."""
        first, last = self.units(tile, unit)
        return torch.where(first == last, 0, tile * self.block - first * unit)

    def tiles_of(self, lo: Tensor, hi: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        """Return the tiles ``[first, end)`` that the blocks ``[lo, hi)`` of ``unit`` tokens touch."""
        # Blocks 2, 3 of 50 tokens are tokens 100 ... 199, in tiles 0 and 1 of 128: [0, 2).
        return lo * unit // self.block, (hi * unit - 1) // self.block + 1


class Cover(NamedTuple):
    """Candidate tiles as intervals: row tile ``row[m]`` may touch column tiles ``lo[m] <= c < hi[m]``.

    Three int64 vectors of equal length. Together the intervals contain every non-empty tile. They can overlap or be
    empty, and a row can occur many times. They are clipped to ``[0, n_cols)``.
    """

    row: Tensor
    lo: Tensor
    hi: Tensor

    def size(self) -> int:
        """Return an upper bound of the number of candidate tiles."""
        return int((self.hi - self.lo).clamp(min=0).sum())

    def disjoint(self, n_cols: int) -> "Cover":
        """Return the same tiles as intervals that ascend and neither overlap nor are empty."""
        # In one line, row after row: each interval begins after all before it.
        begin, order = (self.row * n_cols + self.lo).sort()
        row, end = self.row[order], (self.row * n_cols + self.hi)[order].cummax(0).values
        # [0, 4), [2, 3) and [3, 6) become [0, 4), [4, 4) and [4, 6): the second was inside the first, and is empty.
        begin[1:] = torch.maximum(begin[1:], end[:-1])
        kept = end > begin
        row, begin, end = row[kept], begin[kept], end[kept]
        return Cover(row, begin - row * n_cols, end - row * n_cols)

    def meet(self, other: "Cover", n_cols: int) -> "Cover":
        """Return the tiles that both covers contain."""
        first, second = self.disjoint(n_cols), other.disjoint(n_cols)
        (begin, end), (low, high) = ((x.row * n_cols + x.lo, x.row * n_cols + x.hi) for x in (first, second))
        # Each interval meets those that end after it begins and begin before it ends. Their numbers are consecutive.
        met = torch.searchsorted(high, begin, right=True)
        count = torch.searchsorted(low, end) - met
        # [0, 4) and [6, 9) meet [1, 2), [3, 7) as counts 2 and 1: mine is 0 0 1 and theirs 0 1 1.
        mine, step = counted(count)
        theirs = met[mine] + step
        return Cover(
            first.row[mine],
            torch.maximum(first.lo[mine], second.lo[theirs]),
            torch.minimum(first.hi[mine], second.hi[theirs]),
        )


def counted(count: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number per item, and its place among the equal ones: of counts 2 and 1, (0, 0, 1) and (0, 1, 0)."""
    which = torch.repeat_interleave(count)
    return which, torch.arange(len(which), device=count.device) - (count.cumsum(0) - count)[which]


def interval_cover(rows: Tensor, lo: Tensor | int, hi: Tensor | int, grid: TileGrid) -> Cover:
    """Return one interval of column tiles ``[lo, hi)`` per row, clipped to the grid."""
    zero = torch.zeros_like(rows)
    return Cover(rows, (zero + lo).clamp(0, grid.n_cols), (zero + hi).clamp(0, grid.n_cols))


def _renumber(numbers: Tensor) -> tuple[Tensor, int]:
    """Number the distinct values 0, 1, ... in ascending order, and count them."""
    if numbers.numel() == 0:
        return numbers, 0
    low, high = int(numbers.min()), int(numbers.max())
    if high - low > 4 * numbers.numel() + 1024:
        distinct, inverse = torch.unique(numbers, return_inverse=True)
        return inverse, len(distinct)
    # Numbers are usually small: a table is many times faster than a sort.
    present = torch.zeros(high - low + 1, dtype=torch.int64, device=numbers.device)
    present[numbers - low] = 1
    return (present.cumsum(0) - 1)[numbers - low], int(present.sum())


def number_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Number the distinct pairs of two int64 vectors, starting at 2."""
    # Values far apart become 0, 1, ... first, so that the product below stays small and fits an int64.
    numbers, count = _renumber(second)
    return _renumber(_renumber(first)[0] * count + numbers)[0] + 2


def periodic_classes(row: Tensor, col: Tensor, period: int, classes: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return classes of tiles whose bits do not change if row and column both move by ``period``."""
    if row.numel() == 0:
        return row
    offset = row - col
    low, high = int(offset.min()), int(offset.max())
    count = high - low + 1
    # If there are fewer distinct (row mod period, row - col) than tiles, classify each of them once.
    if period * count > row.numel():
        return classes(row, col)
    number = torch.arange(period * count, device=row.device)
    # Of period 2 and offsets -1 ... 1, number 4 is phase 1 and offset 0: row 1, column 1.
    phase = number // count
    return classes(phase, phase - number % count - low)[(row % period) * count + offset - low]
