"""Dilated patterns: multiples of a rate, of tokens, of blocks, or inside segments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ringtile.patterns.base import Pattern
from ringtile.patterns.checks import LARGEST_BLOCK, checked_int, checked_ints
from ringtile.patterns.grid import TileGrid, interval_cover, periodic_classes
from ringtile.patterns.offsets import ANY, OffsetPattern, Term


@dataclass(frozen=True, repr=False)
class Dilated(OffsetPattern):
    """Keep (i, j) iff for some rate r, ``i - j`` is a multiple of r and ``|i - j| <= window * r`` (tokens).

    Raises ValueError if a rate is not positive or the window is negative.

    >>> print(Dilated([2], 1).draw(5))
    █·█··
    ·█·█·
    █·█·█
    ·█·█·
    ··█·█
    """

    rates: Sequence[int]
    window: int
    _size = ("window", 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", checked_ints("dilated", "rates", self.rates, 1))
        object.__setattr__(self, "window", checked_int("dilated", "window", self.window))
        self._set_text(f"dilated({list(self.rates)}, {self.window})")

    @property
    def terms(self) -> tuple[Term, ...]:
        return _reaches(self.rates, self.window)


@dataclass(frozen=True, repr=False)
class BlockDilated(OffsetPattern):
    """Keep whole blocks, by the rule of `Dilated` on block numbers ``i // block`` and ``j // block``.

    Raises ValueError if a rate or the block is not positive, or the reach is negative.

    >>> print(BlockDilated([2], 1, block=2).draw(8))
    ██··██··
    ██··██··
    ··██··██
    ··██··██
    ██··██··
    ██··██··
    ··██··██
    ··██··██
    """

    rates: Sequence[int]
    reach: int
    block: int = 128
    _size = ("reach", 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", checked_ints("block_dilated", "rates", self.rates, 1))
        object.__setattr__(self, "reach", checked_int("block_dilated", "reach", self.reach))
        object.__setattr__(self, "block", checked_int("block_dilated", "block", self.block, 1, LARGEST_BLOCK))
        block = "" if self.block == 128 else f", block={self.block}"
        self._set_text(f"block_dilated({list(self.rates)}, {self.reach}{block})")

    @property
    def unit(self) -> int:
        return self.block

    @property
    def terms(self) -> tuple[Term, ...]:
        return _reaches(self.rates, self.reach)


def _reaches(rates: Sequence[int], window: int) -> tuple[Term, ...]:
    return tuple(Term(rate, min(window * rate, ANY), min(window * rate, ANY)) for rate in rates)


@dataclass(frozen=True, repr=False)
class Segments(Pattern):
    """Keep one branch of LongNet: within each segment, every ``dilation``-th token attends to the others on its grid.

    A segment has ``length`` tokens. With positions counted inside the segment, (i, j) is kept iff both are in one
    segment and both equal ``(shift + head) mod dilation`` modulo ``dilation``, so heads attend to different tokens
    (Ding et al. 2023, LongNet, arXiv:2307.02486). Raises ValueError if length or dilation is not positive or shift is
    negative.

    >>> print(Segments(4, 2).draw(8))
    █·█·····
    ········
    █·█·····
    ········
    ····█·█·
    ········
    ····█·█·
    ········
    """

    length: int
    dilation: int = 1
    shift: int = 0
    _size = ("length", 0)
    unbounded = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", checked_int("segments", "length", self.length, 1))
        object.__setattr__(self, "dilation", checked_int("segments", "dilation", self.dilation, 1))
        object.__setattr__(self, "shift", checked_int("segments", "shift", self.shift))
        dilation = f", {self.dilation}" if self.dilation > 1 or self.shift else ""
        shift = f", {self.shift}" if self.shift else ""
        self._set_text(f"segments({self.length}{dilation}{shift})")

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        phase = (self.shift + head) % self.dilation
        chosen_query = query % self.length % self.dilation == phase
        chosen_key = key % self.length % self.dilation == phase
        return (query // self.length == key // self.length) & chosen_query & chosen_key

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        first, last = grid.units(rows, self.length)
        return interval_cover(rows, *grid.tiles_of(first, last + 1, self.length), grid)[1:]

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        period = self.length // gcd(self.length, grid.block)
        return periodic_classes(row, col, period, lambda row, col: self._classes(head, row, col, grid.block))

    def _classes(self, head: int, row: Tensor, col: Tensor, block: int) -> Tensor:
        phase = (self.shift + head) % self.dilation
        firsts = [tile * block // self.length for tile in (row, col)]
        lasts = [(tile * block + block - 1) // self.length for tile in (row, col)]
        common, last_common = torch.maximum(*firsts), torch.minimum(*lasts)
        # With one segment in common, the first and last chosen token on each side are the class.
        code = torch.zeros_like(row)
        empty, full = last_common < common, torch.full_like(row, self.dilation == 1, dtype=torch.bool)
        for tile in (row, col):
            # The common segment begins at this place of the tile, which is negative if it began in an earlier one.
            begin = common * self.length - tile * block
            inside = begin.clamp(0, block)
            # The first chosen place from `inside` on. If the segment begins at -3, with phase 1 and dilation 4, the
            # chosen places are -2, 2 and 6, and the first inside is 2.
            first = inside + (begin + phase - inside) % self.dilation
            end = (begin + self.length).clamp(0, block) - 1
            last = first + (end - first) // self.dilation * self.dilation
            empty |= (last < first) & (last_common == common)
            full &= (first == 0) & (last == block - 1)
            # A place is 0 ... block, so base block + 1 keeps the four numbers of both sides apart.
            code = (code * (block + 1) + first) * (block + 1) + last
        # Only tiles on the diagonal have several. Their class is the offset at which the tile cuts the first.
        cut = (block + 1) ** 4 + row * block - firsts[0] * self.length
        code = 2 + torch.where(last_common > common, cut, code)
        return torch.where(empty, 0, torch.where(full & (last_common == common), 1, code))

    def head_class(self, head: int) -> Hashable:
        return (self.shift + head) % self.dilation
