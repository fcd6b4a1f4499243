"""Rules on the difference of two block numbers: `Causal`, `Window`, `Dilated`, `BlockDilated` and `Strided`.

With ``D = query // unit - key // unit``, a term keeps the pairs for which D is a multiple of ``rate`` and
``-right <= D <= left``. A rule keeps the pairs of all its terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import Pattern, full_shape, same_for_heads
from ringtile.patterns.checks import LARGEST_BLOCK, checked_ints
from ringtile.patterns.grid import FAR, Cover, TileGrid, interval_cover, number_pairs, periodic_classes

ANY = FAR
"""A reach without a limit."""

_MANY = 32
"""A rule with this many terms or more looks up its pairs and tiles in a table of all offsets."""


class Term(NamedTuple):
    """Multiples of ``rate`` from ``-right`` to ``left``, both at least 0."""

    rate: int
    left: int
    right: int


# Cache of offset tables. Key: all that the table depends on. Bound: 4 tables, because the strips of one index share one
# and rules with many rates are rare. Owner: the process. A table is never written to.
@lru_cache(maxsize=4)
def _kept_before(terms: tuple[Term, ...], base: int, count: int, device: torch.device) -> Tensor:
    """Count the kept offsets among the first i, starting at ``base``: int64 ``[count + 1]``."""
    kept = torch.zeros(count, dtype=torch.int64, device=device)
    for rate, left, right in terms:
        # Kept are the multiples of the rate from here on: with base -5, right 7 and rate 3, from -3.
        first = -(-max(base, -right) // rate) * rate
        kept[max(0, first - base) : max(0, min(left - base + 1, count)) : rate] = 1
    return torch.cat([kept.new_zeros(1), kept.cumsum(0)])


def _count_kept(low: Tensor, high: Tensor, terms: tuple[Term, ...]) -> Tensor:
    """Count the kept offsets from ``low`` to ``high``, both included."""
    lowest, highest = int(low.min()), int(high.max())
    # Round, so that the chunks of one index share a table.
    size = 1 << (highest - lowest + 1).bit_length()
    base = lowest // size * size
    before = _kept_before(terms, base, 2 * size, low.device)
    # If the kept offsets are 0, 3 and 6 and base is 0, before is 0 1 1 1 2 2 2 3, so 2 ... 6 has 3 - 1 = 2.
    return before[high + 1 - base] - before[low - base]


class OffsetPattern(Pattern, rule=("terms", "unit")):
    """A pattern defined by its terms, on blocks of ``unit`` tokens."""

    unbounded = True
    head_class = same_for_heads

    @property
    def unit(self) -> int:
        """Tokens per block of the rule."""
        return 1

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the rule."""
        raise NotImplementedError

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset, terms = query // self.unit - key // self.unit, self.terms
        if len(terms) >= _MANY and offset.numel() > len(terms):
            return full_shape(_count_kept(offset, offset, terms) > 0, head, query, key)
        kept = torch.zeros_like(offset, dtype=torch.bool)
        for rate, left, right in terms:
            within = (offset >= -right) & (offset <= left)
            kept |= within if rate == 1 else within & (offset % rate == 0)
        return full_shape(kept, head, query, key)

    def _interval(self, rows: Tensor, grid: TileGrid, left: int, right: int) -> Cover:
        first, last = grid.units(rows, self.unit)
        return interval_cover(rows, *grid.tiles_of(first - left, last + right + 1, self.unit), grid)

    def _split(self, grid: TileGrid) -> tuple[int, int, list[Term]]:
        """Return the reach of the terms that skip no tile, and the terms whose multiples are listed one by one."""
        terms = self.terms
        # Multiples this far apart skip tiles between them: a rate of 300 tokens over tiles of 128, but not one of 200.
        sparse = [t for t in terms if t.rate * self.unit > 2 * (grid.block + self.unit)]
        # With more multiples than columns, use the whole reach instead.
        if len(terms) >= _MANY and sum(self._multiples(t, grid) for t in sparse) > grid.n_cols:
            sparse = []
        dense = [t for t in terms if t.rate * self.unit <= 2 * (grid.block + self.unit)] if sparse else terms
        return max((t.left for t in dense), default=0), max((t.right for t in dense), default=0), sparse

    def _multiples(self, term: Term, grid: TileGrid) -> int:
        """Return an upper bound of the multiples of a term's rate that one row tile meets."""
        # The keys and one tile of queries span this many multiples, and each end can cut one more.
        met = (grid.n_cols * grid.block + grid.block) // (term.rate * self.unit) + 3
        return min(met, term.left // term.rate + term.right // term.rate + 1)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        left, right, sparse = self._split(grid)
        covers = [self._interval(rows, grid, left, right)]
        first, last = grid.units(rows, self.unit)
        for term in sparse:
            # Start at the multiple that reaches the last key and go toward the first key.
            lowest = (first - grid.n_cols * grid.block // self.unit - 1) // term.rate
            # Beyond `right`, a term keeps no later keys, so its multiples begin at -(right // rate).
            lowest = lowest.clamp(min=-(term.right // term.rate))
            multiple = lowest.unsqueeze(1) + torch.arange(self._multiples(term, grid), device=rows.device)
            reached = multiple <= term.left // term.rate
            offset = multiple * term.rate
            lo, hi = grid.tiles_of(first.unsqueeze(1) - offset, last.unsqueeze(1) - offset + 1, self.unit)
            # Multiples past `left` are empty intervals: all rows list equally many, which needs no loop over rows.
            hi = torch.where(reached, hi, lo)
            covers.append(interval_cover(rows.unsqueeze(1).expand_as(lo).flatten(), lo.flatten(), hi.flatten(), grid))
        return Cover(*(torch.cat(parts) for parts in zip(*covers, strict=True)))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        left, right, sparse = self._split(grid)
        tiles = (grid.block + self.unit) // grid.block + 2
        listed = sum(tiles * self._multiples(term, grid) for term in sparse) * len(rows)
        return self._interval(rows, grid, left, right).size() + listed

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        reach = self._interval(rows, grid, max(t.left for t in self.terms), max(t.right for t in self.terms))
        return reach.lo, reach.hi

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        period = self.unit // gcd(self.unit, grid.block)
        return periodic_classes(row, col, period, lambda row, col: self._classes(row, col, grid))

    def _classes(self, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        (row_first, row_last), (col_first, col_last) = grid.units(row, self.unit), grid.units(col, self.unit)
        offset, lowest, highest = row_first - col_first, row_first - col_last, row_last - col_first
        # The place in the tile at which the block number changes, 0 if it does not.
        # Tiles with equal phases and an equal offset hold the same bits, because the rule only sees offsets.
        code = grid.phase(row, self.unit) * self.unit + grid.phase(col, self.unit)
        terms = self.terms
        if len(terms) >= _MANY and row.numel():
            kept = _count_kept(lowest, highest, terms)
            code = number_pairs(code, torch.where(offset < 0, -2 * offset - 1, 2 * offset))
            return torch.where(kept > highest - lowest, 1, torch.where(kept == 0, 0, code + 2))
        full = torch.zeros_like(row, dtype=torch.bool)
        empty = torch.ones_like(full)
        for rate, left, right in terms:
            inside = (lowest >= -right) & (highest <= left)
            outside = (lowest > left) | (highest < -right) | (highest // rate * rate < lowest)
            # Classes are not negative: offsets 0, 1, -1, 2, -2 become 0, 2, 1, 4, 3.
            signed = torch.where(offset < 0, -2 * offset - 1, 2 * offset)
            code = number_pairs(code, torch.where(outside, 0, 1 + torch.where(inside, offset % rate, rate + signed)))
            full |= inside & (offset % rate == 0) & ((highest == lowest) | (rate == 1))
            empty &= outside
        return torch.where(full, 1, torch.where(empty, 0, code + 2))


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
        self._set_int("dilated", "window")
        self._set_text(f"dilated({list(self.rates)}, {self.window})")

    @property
    def terms(self) -> tuple[Term, ...]:
        return _reaches(self.rates, self.window)


@dataclass(frozen=True, repr=False)
class BlockDilated(OffsetPattern):
    """Keep whole blocks, by the rule of `Dilated` on block numbers ``i // block`` and ``j // block``.

    Raises ValueError if a rate or the block is not positive, or the reach is negative.

    >>> print(BlockDilated([2], 1, block=2).draw(6))
    ██··██
    ██··██
    ··██··
    ··██··
    ██··██
    ██··██
    """

    rates: Sequence[int]
    reach: int
    block: int = 128
    _size = ("reach", 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", checked_ints("block_dilated", "rates", self.rates, 1))
        self._set_int("block_dilated", "reach")
        self._set_int("block_dilated", "block", 1, LARGEST_BLOCK)
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
