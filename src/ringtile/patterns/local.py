"""Patterns of nearby keys, of keys at a fixed stride and of the first keys."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns.base import Pattern, full_shape
from ringtile.patterns.checks import checked_int
from ringtile.patterns.grid import TileGrid, interval_cover
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
        left = checked_int("window", "left", self.left)
        right = left if self.right is None else checked_int("window", "right", self.right)
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "right", right)
        self._set_text(f"window({left})" if left == right else f"window({left}, {right})")

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
        object.__setattr__(self, "stride", checked_int("strided", "stride", self.stride, 1))
        self._set_text(f"strided({self.stride})")

    @property
    def terms(self) -> tuple[Term, ...]:
        return (Term(1, self.stride - 1, self.stride - 1), Term(self.stride, ANY, ANY))


@dataclass(frozen=True, repr=False)
class GlobalTokens(Pattern):
    """Let the first ``tokens`` positions attend to all keys, and all queries attend to them.

    Global attention as in Longformer (Beltagy et al. 2020, arXiv:2004.05150). Raises ValueError if
    ``tokens`` is negative.

    >>> print(GlobalTokens(1).draw(3))
    ███
    █··
    █··
    """

    tokens: int
    _size = ("tokens", 2)
    unbounded = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", checked_int("global_tokens", "tokens", self.tokens))
        self._set_text(f"global_tokens({self.tokens})")

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return full_shape((query < self.tokens) | (key < self.tokens), head, query, key)

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        columns = torch.where(rows * grid.block < self.tokens, grid.n_cols, -(-self.tokens // grid.block))
        return interval_cover(rows, 0, columns, grid)[1:]

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        # Per side: 0 if no position of the tile is global, 1 if all are, 2 if some are.
        sides = [
            torch.where(tile * grid.block >= self.tokens, 0, 1 + ((tile + 1) * grid.block > self.tokens).long())
            for tile in (row, col)
        ]
        full = (sides[0] == 1) | (sides[1] == 1)
        return torch.where(full, 1, torch.where(sides[0] + sides[1] == 0, 0, 2 + 3 * sides[0] + sides[1]))

    def head_class(self, head: int) -> Hashable:
        return None
