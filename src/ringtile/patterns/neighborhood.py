"""Neighborhoods on a grid of one, two or three axes, with the tokens in the order of rows or of compact tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import Pattern, full_shape, same_for_heads
from ringtile.patterns.checks import checked_ints
from ringtile.patterns.grid import Cover, TileGrid, number_pairs
from ringtile.patterns.traced import constant

_BLOCK = 128
"""Tokens of the tiles that attention computes whole."""
_PAIRS = 1 << 22
"""Pairs of tiles whose boxes are compared at once."""
_SAMPLE = 256
"""Tiles of queries whose neighbors are counted, to choose an order."""


@dataclass(frozen=True, repr=False)
class Neighborhood(Pattern):
    """Each token of a grid attends to the ``window`` nearest tokens of each axis, and at a border to as many.

    Neighborhood attention (Hassani et al. 2023, arXiv:2204.07143) with the borders of NATTEN: the window of a token
    near a border moves inward and stays full. Token ``(y, x)`` of a grid ``(h, w)`` is number ``y * w + x``.

    ``sparse_attention`` of all tokens of a grid computes it in the order of compact tiles, which needs fewer products:
    it moves tokens there and back. With dropout, a bias or ALiBi, which count positions, tokens stay in rows. Pass
    ``tile=`` if your tokens are in this order already, see `order`.

    Args:
        size: Tokens of each axis, one to three axes.
        window: Tokens of each axis to attend to, or one number for all.
        dilation: Distance of two neighbors (arXiv:2209.15001). ``window * dilation`` must fit into the axis.
        stride: So many tokens of an axis share the window of their middle one (arXiv:2504.16922). Sliding tile
            attention (arXiv:2502.04507) is a stride, a window and a ``tile`` of whole tiles.
        causal: 1 for axes on which a token attends to those up to its own, or 0.
        tile: Tokens of a compact tile per axis, if tokens come in the order of tiles.

    Raises ValueError if a number is out of range, or a window does not fit.

    >>> Neighborhood([8, 8], 3)
    neighborhood([8, 8], [3, 3])
    >>> print(Neighborhood([6], 3).draw(6))
    ███···
    ███···
    ·███··
    ··███·
    ···███
    ···███
    """

    size: Sequence[int]
    window: Sequence[int] | int
    dilation: Sequence[int] | int = 1
    stride: Sequence[int] | int = 1
    causal: Sequence[int] | int = 0
    tile: Sequence[int] | None = None
    head_class = same_for_heads

    def __post_init__(self) -> None:
        size = checked_ints("neighborhood", "size", self.size, 1)
        if len(size) > 3:
            raise ValueError(f"neighborhood expects one to three axes, got size={size}")
        object.__setattr__(self, "size", size)
        words = [str(list(size))]
        for name, least in (("window", 1), ("dilation", 1), ("stride", 1), ("causal", 0), ("tile", 1)):
            if (given := getattr(self, name)) is None:
                continue
            one = not isinstance(given, Sequence)
            values = checked_ints("neighborhood", name, [given] * len(size) if one else given, least)
            if len(values) != len(size) or (name == "causal" and max(values) > 1):
                wanted = "0 or 1" if name == "causal" else "a number"
                raise ValueError(f"neighborhood expects {wanted} for each axis of size={size}, got {name}={given!r}")
            object.__setattr__(self, name, values)
            if name in ("window", "tile") or set(values) != {least}:
                words.append(f"{'' if name == 'window' else name + '='}{list(values)}")
        for axis in self.axes:
            if axis.window * axis.dilation > axis.length or axis.stride > axis.window:
                raise ValueError(
                    "neighborhood expects window * dilation <= size and stride <= window, got "
                    f"window={axis.window}, dilation={axis.dilation}, stride={axis.stride}, size={axis.length}"
                )
        self._set_text(f"neighborhood({', '.join(words)})")

    @property
    def axes(self) -> list["Axis"]:
        """The numbers of each axis."""
        return list(map(Axis, self.size, self.window, self.dilation, self.stride, self.causal))  # type: ignore[arg-type]

    @property
    def in_tiles(self) -> "Neighborhood":
        """The same pairs of tokens in the order of compact tiles, or this pattern if no order is a tenth better."""
        if self.tile is not None:
            return self
        return in_tiles(self.size, self.window, self.dilation, self.stride, self.causal)

    def order(self, device: torch.device | None = None) -> Tensor:
        """Return the number ``y * w + x`` of each token in the order of tiles, int64 ``[h * w]``.

        >>> Neighborhood([4, 4], 3, tile=[2, 2]).order()[:8].tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
        """
        found = self.in_tiles
        return token_order(found.size, found.dilation, found.tile).to(device)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kept = torch.ones((), dtype=torch.bool, device=query.device)
        for axis, i, j in zip(self.axes, self._places(query), self._places(key), strict=True):
            first, last = axis.window_of(i)
            place = j // axis.dilation
            kept = kept & (i % axis.dilation == j % axis.dilation) & (first <= place) & (place <= last)
        return full_shape(kept, head, query, key)

    def _places(self, token: Tensor) -> list[Tensor]:
        """Return the place of tokens on each axis. Tokens beyond the last one count as the last one."""
        number = token.clamp(0, prod(self.size) - 1)
        if self.tile is not None:
            number = self.order(token.device)[number]
        return list(torch.unravel_index(number, tuple(self.size)))

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        boxes, found = _boxes(self, grid.block, rows.device), []
        for part in rows.split(max(1, _PAIRS // max(grid.n_cols, 1))):
            row, col = boxes.meet(part.unsqueeze(1), torch.arange(grid.n_cols, device=rows.device)).nonzero(
                as_tuple=True
            )
            found.append(Cover(part[row], col, col + 1))
        return Cover(*(torch.cat(x) for x in zip(*found, strict=True))) if found else Cover(rows, rows, rows)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.cover(head, rows, grid).size()

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        boxes, kinds = _boxes(self, grid.block, row.device), _kinds(self, grid.block, row.device)
        number = number_pairs(kinds.of_query[row], kinds.of_key[col])
        # Tiles with equal windows and places, each relative to its first token, differ by the way between these.
        for way in (kinds.first[col] - kinds.first[row]).unbind(1):
            number = number_pairs(number, way)
        number[boxes.inside(row, col)] = 1
        number[~boxes.meet(row, col)] = 0
        return number

    def validate(self, grid: TileGrid) -> None:
        """Raise ValueError unless the keys are all tokens, and the queries are some of them."""
        tokens = prod(self.size)
        if grid.n_keys != tokens or grid.start < 0 or grid.start + grid.n_queries > tokens:
            raise ValueError(
                f"neighborhood expects the {tokens} tokens of size={list(self.size)} as keys, and some of them as "
                f"queries, got {grid.n_queries} queries from {grid.start} and {grid.n_keys} keys"
            )


class Axis(NamedTuple):
    """The numbers of one axis of a `Neighborhood`."""

    length: int
    window: int
    dilation: int
    stride: int
    causal: int

    def window_of(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last neighbor of places, counted in steps of the dilation."""
        step, phase = place // self.dilation, place % self.dilation
        count = (self.length - phase + self.dilation - 1) // self.dilation
        middle = self.stride - 1 if self.causal else self.stride // 2
        leader = torch.minimum(step // self.stride * self.stride + middle, count - 1)
        if self.causal:
            return (leader - self.window + 1).clamp(min=0), step
        first = torch.minimum((leader - self.window // 2).clamp(min=0), count - self.window)
        return first, first + self.window - 1


@constant
def in_tiles(*numbers: object) -> Neighborhood:
    """Return `Neighborhood.in_tiles` of a pattern without a tile, of its attributes."""
    return _compact(*numbers)


@constant
def token_order(size: Sequence[int], dilation: Any, tile: Sequence[int] | None) -> Tensor:
    """Return the order of the tokens of a `Neighborhood`, of its attributes. See `Neighborhood.order`."""
    return _order(tuple(size), dilation, tuple(tile or dilation))


# Cache of the tiles of grids. Key: the arguments. Bound: 16. Owner: the process. A layer asks in each call.
@lru_cache(maxsize=16)
def _compact(*numbers: tuple[int, ...]) -> Neighborhood:
    """Return a pattern in the order with the fewest tiles of neighbors, if they are a tenth fewer than in rows."""
    pattern = Neighborhood(*numbers)
    leading = [-(-axis.length // axis.dilation) for axis in pattern.axes[:-1]]
    sides = ([1 << bit for bit in range(_BLOCK.bit_length()) if bit == 0 or 1 << bit <= count] for count in leading)
    # Columns of a strip follow each other: a tile has one place on the last axis, and 128 tokens are many columns.
    orders = [replace(pattern, tile=(*tile, 1)) for tile in product(*sides) if prod(tile) <= _BLOCK]

    def neighbors(order: Neighborhood) -> int:
        boxes = _boxes(order, _BLOCK, torch.device("cpu"))
        row = torch.arange(0, len(boxes.low), -(-len(boxes.low) // _SAMPLE), device="cpu")
        return int(boxes.meet(row.unsqueeze(1), torch.arange(len(boxes.low), device="cpu")).sum())

    best = min(orders, key=neighbors)
    return best if neighbors(best) < 0.9 * neighbors(pattern) else pattern


# Cache of the orders of tokens. Key: the arguments. Bound: 16. Owner: the process. A layer asks in each call.
@lru_cache(maxsize=16)
def _order(size: tuple[int, ...], dilation: tuple[int, ...], tile: tuple[int, ...]) -> Tensor:
    number = torch.arange(prod(size), device="cpu")
    places = list(zip(torch.unravel_index(number, size), dilation, tile, strict=True))
    phases = [place % rate for place, rate, _ in places]
    tiles = [place // rate // side for place, rate, side in places]
    inner = [place // rate % side for place, rate, side in places]
    rank = torch.zeros_like(number)
    # Tokens of one phase are neighbors of each other alone, so they come together.
    for digit in (*phases, *tiles, *inner):
        rank = rank * (int(digit.max()) + 1) + digit
    return rank.argsort()


class _Boxes(NamedTuple):
    """The boxes of each tile of tokens, ``[tiles, 2 * axes]``: steps and phases, from the least to the greatest."""

    low: Tensor
    """Of its places, to `high`."""
    high: Tensor
    least: Tensor
    """Of its windows, to `most`. All windows share `begin` to `end`."""
    most: Tensor
    begin: Tensor
    end: Tensor

    def meet(self, row: Tensor, col: Tensor) -> Tensor:
        """Return whether any window of a row tile meets a column tile."""
        return ((self.least[row] <= self.high[col]) & (self.low[col] <= self.most[row])).all(-1)

    def inside(self, row: Tensor, col: Tensor) -> Tensor:
        """Return whether all windows of a row tile contain a column tile."""
        return ((self.begin[row] <= self.low[col]) & (self.high[col] <= self.end[row])).all(-1)


class _Kinds(NamedTuple):
    """What the bits of a tile depend on."""

    first: Tensor
    """``[tiles, axes]``: the step of the first token."""
    of_query: Tensor
    """``[tiles]``: equal numbers have equal windows, relative to the first token."""
    of_key: Tensor
    """``[tiles]``: equal numbers have equal places, relative to the first token."""


def _of_tiles(pattern: Neighborhood, block: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return steps, phases, and first and last neighbors of the tokens of each tile, ``[tiles, block, axes]``."""
    token = torch.arange(-(-prod(pattern.size) // block) * block, device=device)
    places = list(zip(pattern.axes, pattern._places(token), strict=True))
    sides = zip(*(axis.window_of(place) for axis, place in places), strict=True)
    steps, phases = (
        [place // axis.dilation for axis, place in places],
        [place % axis.dilation for axis, place in places],
    )
    return tuple(torch.stack(list(each), 1).unflatten(0, (-1, block)) for each in (steps, phases, *sides))


# Caches of the boxes and of the kinds of tiles. Key: the pattern, the block, the device. Bound: 16 and 8. Owner: the
# process. Building an index asks for them once per strip of rows.
@lru_cache(maxsize=16)
def _boxes(pattern: Neighborhood, block: int, device: torch.device) -> _Boxes:
    step, phase, begin, end = _of_tiles(pattern, block, device)
    at, begins, ends = (torch.cat((each, phase), 2) for each in (step, begin, end))
    return _Boxes(at.amin(1), at.amax(1), begins.amin(1), ends.amax(1), begins.amax(1), ends.amin(1))


@lru_cache(maxsize=8)
def _kinds(pattern: Neighborhood, block: int, device: torch.device) -> _Kinds:
    step, phase, begin, end = _of_tiles(pattern, block, device)
    first = step[:, :1]
    sides = (begin - first, end - first, phase), (step - first, phase)
    numbers = (torch.unique(torch.cat(side, 2).flatten(1), dim=0, return_inverse=True)[1] for side in sides)
    return _Kinds(first.squeeze(1), *numbers)
