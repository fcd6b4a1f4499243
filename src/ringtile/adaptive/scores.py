"""Scores of tiles: how much of its attention each row of tiles would give to each tile, estimated or computed."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.adaptive.view import Summaries, View, grouped_products, softmax, tile_positions, tiles_at_once
from ringtile.kernels.masses import pooled_masses
from ringtile.patterns.checks import check_positive
from ringtile.patterns.random import WORD, philox4x32


class Scores(ABC):
    """Base class: ``scores(view)`` ranks the tiles of a call's index for each row of tiles, or for each query.

    Higher is better. The scores of a row are not negative, and sum to 1 over the tiles of the index, or to 0 if no key
    counts.
    """

    causal_safe = False
    """True if the scores of a query depend only on tokens at its position or before, if ``base`` is causal."""
    per_token = False
    """True if each query has scores of its own. The rows are tiles otherwise."""

    @abstractmethod
    def __call__(self, view: View) -> Tensor:
        """Return float32 ``[B, H, R, C]``, or ``[B, H, Nq, C]`` if `per_token`, 0 outside the tiles of the index."""


@dataclass(frozen=True)
class Probe(Scores):
    """Exact attention of a few rows of each tile, averaged: what `Blend` estimates.

    It misses keys that only other rows want. Two rows of 16 cost an eighth of dense attention.

    Args:
        rows: Number of rows per tile, spread evenly, or "first" for the first row of each tile, which is causal-safe.
    """

    rows: int | Literal["first"] = 2

    def __post_init__(self) -> None:
        if self.rows != "first" and (type(self.rows) is not int or self.rows < 1):
            raise ValueError(f"rows: expected a positive integer or 'first', got {self.rows!r}")

    @property
    def causal_safe(self) -> bool:  # type: ignore[override]
        return self.rows == "first"

    def __call__(self, view: View) -> Tensor:
        count = 1 if self.rows == "first" else self.rows
        first, last = view.rows_of_tiles
        # The middles of equal parts of the rows that exist: of 16 rows and 4 probes, rows 2, 6, 10 and 14.
        part = 0 if self.rows == "first" else 2 * torch.arange(count, device=first.device) + 1
        row = first.unsqueeze(1) + (last - first).unsqueeze(1) * part // (2 * count)
        return view.normalized(view.exact_masses(row))


class Boxes(NamedTuple):
    """A box of keys for each tile, whose best key for a query gives its score."""

    sides: Tensor
    """``[B, Hkv, C, 2 D]`` in the query's dtype: the highest coordinates, and the lowest ones, negated."""
    bias: Tensor
    """float32 ``[B, Hkv, C]``: logarithm of the number of keys, -inf if a box has none, or a NaN or infinity."""


class Pooled(Scores):
    """Scores of each query, whose maps of tiles are pooled: with ``pool`` None each query has its own tiles."""

    pool: str | None
    pools: ClassVar[tuple[str, ...]] = ("max", "mean")

    def __post_init__(self) -> None:
        if self.pool not in (*self.pools, None):
            raise ValueError(f"pool: expected {', '.join(map(repr, self.pools))} or None, got {self.pool!r}")

    @property
    def per_token(self) -> bool:  # type: ignore[override]
        return self.pool is None

    @property
    def causal_safe(self) -> bool:  # type: ignore[override]
        return self.pool is None

    def box(self, tiles: Summaries) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest coordinates of the keys of each tile, as the scores count them."""
        raise NotImplementedError

    def __call__(self, view: View) -> Tensor:
        return summarized(view, *self.box(view.summaries), self.pool)


@dataclass(frozen=True)
class Blend(Pooled):
    """Score of a query with a tile: halfway between that of the mean key and the largest that the box of keys allows.

    The box is the smallest and largest value of each coordinate (Quest, Tang et al., arXiv:2406.10774). The logarithm
    of the number of keys is added, and a softmax over the row's tiles follows.

    Args:
        pool: How the rows of a tile become one: "max", "mean", or None: each query has its own tiles (causal-safe).
    """

    pool: Literal["max", "mean"] | None = "max"

    def box(self, tiles: Summaries) -> tuple[Tensor, Tensor]:
        return (tiles.mean + tiles.high) / 2, (tiles.mean + tiles.low) / 2


@dataclass(frozen=True)
class Box(Pooled):
    """Largest score that the box of a tile's keys allows, as Quest ranks pages (Tang et al., arXiv:2406.10774).

    Args:
        pool: As in `Blend`.
    """

    pool: Literal["max", "mean"] | None = "max"

    def box(self, tiles: Summaries) -> tuple[Tensor, Tensor]:
        return tiles.high, tiles.low


@dataclass(frozen=True)
class Means(Pooled):
    """Score of the mean query of a tile with the mean key of another, as MoBA ranks blocks (arXiv:2502.13189).

    Args:
        pool: "first" averages the queries of a tile before the product. None: each query has its own tiles
            (causal-safe, and what MoBA does).
    """

    pool: Literal["first"] | None = "first"
    pools = ("first",)

    def box(self, tiles: Summaries) -> tuple[Tensor, Tensor]:
        return tiles.mean, tiles.mean

    def __call__(self, view: View) -> Tensor:
        if self.pool is None:
            return super().__call__(view)
        tiles = view.summaries
        first, last = view.rows_of_tiles
        mean = view.padded_queries.sum(3) / (last - first).unsqueeze(1)
        logits = grouped_products(mean, tiles.mean) * view.factor + tiles.log_count.unsqueeze(2)
        return softmax(logits, view.base.tiles)


@dataclass(frozen=True)
class Antidiagonal(Scores):
    """Sums of scores along antidiagonals of small squares, as XAttention ranks blocks (Xu et al., arXiv:2503.16428).

    Args:
        stride: Side of the squares, a divisor of the block.
    """

    stride: int = 8

    def __post_init__(self) -> None:
        check_positive(stride=self.stride)

    def __call__(self, view: View) -> Tensor:
        base, key, key_mask = view.base, view.key, view.key_mask
        block, side = base.block, self.stride
        if block % side:
            raise ValueError(f"stride: expected a divisor of {block=}, got {side}")
        counts = key.new_ones(len(key), key.shape[2], dtype=torch.float32) if key_mask is None else key_mask.float()
        key = key.float().masked_fill(counts[:, None, :, None] == 0, 0)
        padding = base.n_cols * block - key.shape[2]
        # A square of side 4 sums q[0] k[3] + q[1] k[2] + q[2] k[1] + q[3] k[0]: one product of 4 D coordinates, with
        # the queries in reverse order.
        keys = F.pad(key, (0, 0, 0, padding)).unflatten(2, (-1, side)).flatten(3)
        count = F.pad(counts, (0, padding)).unflatten(1, (-1, side)).sum(2)
        queries = view.padded_queries.flatten(2, 3).unflatten(2, (-1, side)).flip(3).flatten(3)
        each = block // side
        row = base.first_row * each + torch.arange(queries.shape[2], device=key.device)
        causal = not base.looks_ahead
        found = []
        some = tiles_at_once(queries, keys.shape[2], each)
        for tiles, part, at in zip(
            base.tiles.split(some, 2), queries.split(each * some, 2), row.split(each * some), strict=True
        ):
            logits = grouped_products(part, keys) * (view.factor / side)
            hidden = (count == 0)[:, None, None]
            if causal:
                hidden = hidden | (torch.arange(keys.shape[2], device=key.device) > at.unsqueeze(1))
            inside = tiles.repeat_interleave(each, 2).repeat_interleave(each, 3)
            weights = softmax(logits.masked_fill(hidden, -math.inf), inside)
            found.append(weights.unflatten(3, (-1, each)).sum(4).unflatten(2, (-1, each)).sum(3))
        return view.normalized(torch.cat(found, 2))


@dataclass(frozen=True)
class Recent(Scores):
    """Near tiles first, whatever they hold: a window, to compare others with."""

    causal_safe = True

    def __call__(self, view: View) -> Tensor:
        row, col = tile_positions(view.base)
        near = 1 / (1 + (row.unsqueeze(1) - col).abs()).float()
        return view.normalized(near.expand(*view.query.shape[:2], -1, -1))


@dataclass(frozen=True)
class Shuffled(Scores):
    """Tiles in an order drawn from a seed, whatever they hold, to compare others with."""

    seed: int = 0
    causal_safe = True

    def __call__(self, view: View) -> Tensor:
        row, col = tile_positions(view.base)
        head = torch.arange(view.query.shape[1], device=row.device)[:, None, None]
        # A function of the position only, so that a tile has its rank at every length.
        counter = (row.unsqueeze(1).expand(len(row), len(col)), col, head, torch.zeros_like(head))
        drawn = philox4x32(counter, (self.seed & WORD, self.seed >> 32 & WORD), 7)[0].float() + 1
        return view.normalized(drawn.expand(len(view.query), -1, -1, -1))


class Sum(Scores):
    """Mean of several scores. Each part finds keys that the others miss.

    Args:
        parts: Scores, all per token or none.
        weights: A positive number for each part. Default: equal ones.
    """

    def __init__(self, *parts: Scores, weights: Sequence[float] | None = None) -> None:
        if not parts or len({part.per_token for part in parts}) > 1:
            raise ValueError(f"parts: expected scores that are all per token or all per tile, got {parts}")
        self.weights = (1.0,) * len(parts) if weights is None else tuple(map(float, weights))
        if len(self.weights) != len(parts) or not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"weights: expected a positive number for each of {len(parts)} parts, got {weights}")
        self.parts = parts
        self.causal_safe = all(part.causal_safe for part in parts)
        self.per_token = parts[0].per_token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and (self.parts, self.weights) == (other.parts, other.weights)

    def __hash__(self) -> int:
        return hash((self.parts, self.weights))

    def __repr__(self) -> str:
        weights = (
            "" if len(set(self.weights)) == 1 else ", weights=({})".format(", ".join(f"{x:g}" for x in self.weights))
        )
        return f"Sum({', '.join(map(repr, self.parts))}{weights})"

    def __call__(self, view: View) -> Tensor:
        weights = [weight / sum(self.weights) for weight in self.weights]
        found = self.parts[0](view) * weights[0]
        for part, weight in zip(self.parts[1:], weights[1:], strict=True):
            found.add_(part(view), alpha=weight)
        return found


@dataclass(frozen=True)
class Rounded(Scores):
    """Attention of all rows, of queries and keys that are rounded to 8 bits, as the root mean square of a tile's rows.

    It finds a key that one row wants, which a mean over the rows hides. On processors with products of bytes
    (AVX512-VNNI) it takes a fifth of the time of dense attention in float32 and less than half of it in bfloat16,
    elsewhere about half. Over pairs that do not lead, such as those of a window, it is exact.
    """

    def __call__(self, view: View) -> Tensor:
        return view.normalized(view.rounded_masses())


def summarized(view: View, high: Tensor, low: Tensor, pool: str | None) -> Tensor:
    """Return the softmax over tiles of the largest score in a box, pooled over the rows of each tile."""
    query, base = view.query, view.base
    if base.leading is not None:
        return _summarized_at_once(view, high, low, base.leading, pool)
    block = base.block
    # The largest score in a box takes high where q is positive and low elsewhere: relu(q) @ high - relu(-q) @ low. With
    # q = relu(q) - relu(-q) and |q| = relu(q) + relu(-q), that is q @ middle + |q| @ half.
    middle, half = (high + low) / 2, (high - low) / 2
    count = view.summaries.log_count.unsqueeze(2)
    rows = tiles_at_once(query, base.n_cols, block)
    allowed = base.tiles
    if pool is None and not base.looks_ahead:
        # The tile summary includes keys after the query until the tile ends.
        row, col = tile_positions(base)
        allowed = allowed & (col < row.unsqueeze(1))
    found = []
    lead = base.start - base.first_row * block
    for number in range(0, base.n_rows, rows):
        first, last = max(number * block - lead, 0), min((number + rows) * block - lead, base.n_queries)
        part = query[:, :, first:last].float()
        logits = (grouped_products(part, middle) + grouped_products(part.abs(), half)) * view.factor + count
        row = (torch.arange(first, last, device=query.device) + lead) // block
        weights = softmax(logits, allowed[:, :, row])
        if pool is None:
            found.append(weights)
            continue
        some = range(number, min(number + rows, base.n_rows))
        before, after = number * block - lead, some.stop * block - lead
        weights = F.pad(weights, (0, 0, first - before, after - last)).unflatten(2, (len(some), block))
        found.append(weights.amax(3) if pool == "max" else weights.sum(3))
    joined = torch.cat(found, 2)
    return joined if pool is None else view.normalized(joined, allowed)


def _summarized_at_once(view: View, high: Tensor, low: Tensor, leading: Tensor, pool: str | None) -> Tensor:
    base = view.base
    own = (leading - 1) // base.block
    edges = torch.arange(base.n_queries + 1, device=base.device)
    if pool is not None:
        first, last = view.rows_of_tiles
        edges = torch.cat((first, last[-1:]))
    sides, bias = boxes_of(high, low, view.summaries.log_count, view.query.dtype)
    found = pooled_masses(
        view.query,
        sides,
        segment=1,
        # The tile summary includes keys after the query until the tile ends.
        seen=own if pool is None and not base.looks_ahead else own + 1,
        groups=edges.int(),
        pool=pool or "max",
        bias=bias,
        by_sign=True,
        scale=view.scale,
    )
    return found if pool is None else view.normalized(found)


def boxes_of(high: Tensor, low: Tensor, log_count: Tensor, dtype: torch.dtype) -> Boxes:
    """Return the boxes of tiles for queries of a dtype."""
    sides = torch.cat((high, -low), 3).to(dtype)
    # A later key of a query's own tile can hold NaN or infinity, and the tile's summary with it.
    return Boxes(sides, log_count.masked_fill(~sides.isfinite().all(3), -math.inf))
