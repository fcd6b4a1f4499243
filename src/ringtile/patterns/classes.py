"""Numbers for the classes of tiles: equal numbers mean equal bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
    """Return classes of tiles whose bits do not change if row and column both move by ``period``.

    If there are fewer distinct (row mod period, row - col) than tiles, it classifies each of them once.
    """
    if row.numel() == 0:
        return row
    offset = row - col
    low, high = int(offset.min()), int(offset.max())
    count = high - low + 1
    if period * count > row.numel():
        return classes(row, col)
    number = torch.arange(period * count, device=row.device)
    # Of period 2 and offsets -1 ... 1, number 4 is phase 1 and offset 0: row 1, column 1.
    phase = number // count
    return classes(phase, phase - number % count - low)[(row % period) * count + offset - low]
