"""Patterns of nearby keys, of keys at a fixed stride, of the first keys and of segments."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ringtile.patterns.base import Pattern, full_shape, same_for_heads
from ringtile.patterns.checks import checked_ints
from ringtile.patterns.grid import FAR, Cover, TileGrid, interval_cover, number_pairs, periodic_classes
from ringtile.patterns.offsets import ANY, OffsetPattern, Term


@dataclass(frozen=True, repr=False)
class Causal(OffsetPattern):
    """Keep keys at or before the query's position.

    >>> print(Causal().draw(3, 5))
    ███··
    ████·
    █████
    """

    def __post_init__(self) -> None:
        self._set_text("causal")

    @property
    def terms(self) -> tuple[Term, ...]:
        return (Term(1, ANY, 0),)

    def envelope(self) -> Pattern:
        return self


@dataclass(frozen=True, repr=False)
class Window(OffsetPattern):
    """Keep ``i - left <= j <= i + right`` (inclusive, in tokens, as flash-attention); ``right=None`` means ``left``.

    Raises ValueError if a side is negative.

    >>> print(Window(1, 0).draw(4))
    █···
    ██··
    ·██·
    ··██
    """

    left: int
    right: int | None = None
    _size = ("left", 0)

    def __post_init__(self) -> None:
        if self.right is None:
            object.__setattr__(self, "right", self.left)
        self._set_int("window", "left")
        self._set_int("window", "right")
        self._set_text(f"window({self.left})" if self.left == self.right else f"window({self.left}, {self.right})")

    @property
    def terms(self) -> tuple[Term, ...]:
        assert self.right is not None
        return (Term(1, self.left, self.right),)

    def resized(self, size: int) -> Pattern | None:
        return Window(size) if self.left == self.right else Window(size, self.right)


@dataclass(frozen=True, repr=False)
class Strided(OffsetPattern):
    """Keep pairs less than ``stride`` tokens apart, and pairs a multiple of ``stride`` apart.

    The strided pattern of Sparse Transformers (Child et al. 2019, arXiv:1904.10509). Raises ValueError if
    the stride is not positive.

    >>> print((Causal() & Strided(3)).draw(6))
    █·····
    ██····
    ███···
    ████··
    ·████·
    ··████
    """

    stride: int

    def __post_init__(self) -> None:
        self._set_int("strided", "stride", 1)
        self._set_text(f"strided({self.stride})")

    @property
    def terms(self) -> tuple[Term, ...]:
        return (Term(1, self.stride - 1, self.stride - 1), Term(self.stride, ANY, ANY))


@dataclass(frozen=True, repr=False)
class GlobalTokens(Pattern):
    """Let the first ``tokens`` positions attend to all keys, and all queries attend to them.

    A list has the positions themselves, in any order. Global attention as in Longformer (Beltagy et al. 2020,
    arXiv:2004.05150). Raises ValueError if ``tokens`` or a position is negative, or the list is empty.

    >>> print(GlobalTokens(1).draw(3))
    ███
    █··
    █··
    >>> print(GlobalTokens([1]).draw(3))
    ·█·
    ███
    ·█·
    """

    tokens: int | Sequence[int]
    _size = ("tokens", 2)
    unbounded = True
    head_class = same_for_heads

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Sequence):
            tokens = sorted(set(checked_ints("global_tokens", "tokens", self.tokens)))
            object.__setattr__(self, "tokens", tuple(tokens))
            object.__setattr__(self, "_size", None)
            self._set_text(f"global_tokens({tokens})")
        else:
            self._set_int("global_tokens", "tokens")
            self._set_text(f"global_tokens({self.tokens})")

    def _edges(self, device: torch.device) -> Tensor:
        """Return where runs of global tokens begin, and where they end: 3, 4, 4, 5 for the tokens 3 and 4."""
        first = [-FAR, self.tokens] if isinstance(self.tokens, int) else [at + i for at in self.tokens for i in (0, 1)]
        return torch.tensor(first, dtype=torch.int64, device=device)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        edges = self._edges(query.device)
        # Positions after an odd number of edges are inside a run.
        of_query, of_key = (torch.searchsorted(edges, x.contiguous(), right=True) % 2 == 1 for x in (query, key))
        return full_shape(of_query | of_key, head, query, key)

    def _numbers(self, tile: Tensor, block: int) -> Tensor:
        """Return 0 for tiles without global tokens, 1 if all are the first ones, and otherwise a number per tile."""
        edges, first = self._edges(tile.device), (tile * block).contiguous()
        before, within = (torch.searchsorted(edges, at, right=True) for at in (first, first + block - 1))
        return torch.where(before == within, before % 2, 2 + before)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        begin, end = self._edges(rows.device).view(-1, 2).unbind(1)
        # Runs in the same tile are one interval.
        one = interval_cover(0 * begin, *grid.tiles_of(begin, end, 1), grid).disjoint(grid.n_cols)
        is_global = self._numbers(rows, grid.block) > 0
        row, more = rows[is_global], rows[~is_global]
        of_runs = Cover(more.repeat_interleave(len(one.lo)), one.lo.repeat(len(more)), one.hi.repeat(len(more)))
        return Cover(*map(torch.cat, zip(interval_cover(row, 0, grid.n_cols, grid), of_runs, strict=True)))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.cover(head, rows, grid).size()

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        last = self._edges(rows.device)[-1:] - 1
        columns = torch.where(self._numbers(rows, grid.block) > 0, grid.n_cols, last // grid.block + 1)
        return interval_cover(rows, 0, columns, grid)[1:]

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        sides = [self._numbers(tile, grid.block) for tile in (row, col)]
        full = (sides[0] == 1) | (sides[1] == 1)
        numbers = number_pairs(*sides)
        return torch.where(full, 1, torch.where(sides[0] + sides[1] == 0, 0, numbers))


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
        self._set_int("segments", "length", 1)
        self._set_int("segments", "dilation", 1)
        self._set_int("segments", "shift")
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
