"""Scores of tiles: how much of its attention each row of tiles would give to each tile, estimated or computed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.kernels.masses import pooled_masses
from ringtile.layout import BlockIndex
from ringtile.patterns.philox import WORD, philox4x32

_SCORES = 1 << 20
"""Most scores that exist at once, in each of a few tensors."""


class Scores(ABC):
    """Base class: ``scores(query, key, base)`` ranks the tiles of an index for each row of tiles, or for each query.

    Higher is better. The scores of a row are not negative, and sum to 1 over the tiles of the index, or to 0 if no key
    counts.
    """

    causal_safe = False
    """True if the scores of a query depend only on tokens at its position or before, if ``base`` is causal."""
    per_token = False
    """True if each query has scores of its own. The rows are tiles otherwise."""

    @abstractmethod
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return float32 ``[B, H, R, C]``, or ``[B, H, Nq, C]`` if `per_token`, 0 outside the tiles of ``base``.

        Args:
            query: ``[B, H, Nq, D]``.
            key: ``[B, Hkv, Nk, D]``. Hkv must divide H.
            base: Index of the pairs to choose from, with R row tiles and C column tiles.
            key_mask: ``[B, Nk]`` bool, True for keys that count.
            scale: Factor for the products. Default: ``D ** -0.5``.
        """

    def of_summaries(
        self, query: Tensor, tiles: Summaries, base: BlockIndex, scale: float | None = None
    ) -> Tensor | None:
        """Return the same from the summaries of the keys, or None if the scores need more of the keys."""
        return None


@dataclass(frozen=True)
class Probe(Scores):
    """Exact attention of a few rows of each tile, averaged: what `Blend` estimates.

    With four rows of 32, it finds as much attention mass as the true mass of all rows, within 0.003. It misses keys
    that only other rows want.

    Args:
        rows: Number of rows per tile, spread evenly, or "first" for the first row of each tile, which is causal-safe.
            Default: 4 for tiles of at most 32 tokens, otherwise 2.
    """

    rows: int | Literal["first"] | None = None

    def __post_init__(self) -> None:
        if self.rows not in (None, "first") and (type(self.rows) is not int or self.rows < 1):
            raise ValueError(f"rows: expected a positive integer, 'first' or None, got {self.rows!r}")

    @property
    def causal_safe(self) -> bool:  # type: ignore[override]
        return self.rows == "first"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        count = (4 if base.block <= 32 else 2) if self.rows is None else 1 if self.rows == "first" else self.rows
        first, last = rows_of_tiles(base)
        # The middles of equal parts of the rows that exist.
        part = 0 if self.rows == "first" else 2 * torch.arange(count, device=query.device) + 1
        row = first.unsqueeze(1) + (last - first).unsqueeze(1) * part // (2 * count)
        found = exact_masses(query, key, base, row, key_mask, scale)
        return _normalized(found, base)


class Pooled(Scores):
    """Scores of each query, whose maps of tiles are pooled: with ``pool`` None each query has its own tiles."""

    pool: str | None

    @property
    def per_token(self) -> bool:  # type: ignore[override]
        return self.pool is None

    @property
    def causal_safe(self) -> bool:  # type: ignore[override]
        return self.pool is None


def check_pool(pool: str | None, *known: str) -> None:
    """Raise ValueError if ``pool`` is neither None nor one of the known ones."""
    if pool not in (*known, None):
        raise ValueError(f"pool: expected {', '.join(map(repr, known))} or None, got {pool!r}")


class _OfSummaries(Pooled):
    """Scores that need nothing of the keys but their summaries."""

    @abstractmethod
    def of_summaries(self, query: Tensor, tiles: Summaries, base: BlockIndex, scale: float | None = None) -> Tensor:
        """Return the scores from the summaries of the keys."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        return self.of_summaries(query, summaries(key, base.block, key_mask), base, scale)


@dataclass(frozen=True)
class Blend(_OfSummaries):
    """Score of a query with a tile: halfway between that of the mean key and the largest that the box of keys allows.

    The box is the smallest and largest value of each coordinate (Quest, Tang et al., arXiv:2406.10774). The logarithm
    of the number of keys is added, and a softmax over the row's tiles follows.

    Args:
        pool: How the rows of a tile become one: "max", "mean", or None: each query has its own tiles (causal-safe).
    """

    pool: Literal["max", "mean"] | None = "max"

    def __post_init__(self) -> None:
        check_pool(self.pool, "max", "mean")

    def of_summaries(self, query: Tensor, tiles: Summaries, base: BlockIndex, scale: float | None = None) -> Tensor:
        return summarized(
            query, (tiles.mean + tiles.high) / 2, (tiles.mean + tiles.low) / 2, tiles, base, self.pool, scale
        )


@dataclass(frozen=True)
class Box(_OfSummaries):
    """Largest score that the box of a tile's keys allows, as Quest ranks pages (Tang et al., arXiv:2406.10774).

    Args:
        pool: As in `Blend`.
    """

    pool: Literal["max", "mean"] | None = "max"

    def __post_init__(self) -> None:
        check_pool(self.pool, "max", "mean")

    def of_summaries(self, query: Tensor, tiles: Summaries, base: BlockIndex, scale: float | None = None) -> Tensor:
        return summarized(query, tiles.high, tiles.low, tiles, base, self.pool, scale)


@dataclass(frozen=True)
class Means(_OfSummaries):
    """Score of the mean query of a tile with the mean key of another, as MoBA ranks blocks (arXiv:2502.13189).

    Args:
        pool: "first" averages the queries of a tile before the product. None: each query has its own tiles
            (causal-safe, and what MoBA does).
    """

    pool: Literal["first"] | None = "first"

    def __post_init__(self) -> None:
        check_pool(self.pool, "first")

    def of_summaries(self, query: Tensor, tiles: Summaries, base: BlockIndex, scale: float | None = None) -> Tensor:
        if self.pool is None:
            return summarized(query, tiles.mean, tiles.mean, tiles, base, None, scale)
        first, last = rows_of_tiles(base)
        mean = _padded_rows(query.float(), base).sum(3) / (last - first).unsqueeze(1)
        logits = grouped_products(mean, tiles.mean) * _scale(query, scale)
        logits = logits + tiles.log_count.unsqueeze(1).unsqueeze(1)
        return _softmax(logits, base.tiles)


@dataclass(frozen=True)
class Antidiagonal(Scores):
    """Sums of scores along antidiagonals of small squares, as XAttention ranks blocks (Xu et al., arXiv:2503.16428).

    Args:
        stride: Side of the squares, a divisor of the block.
    """

    stride: int = 8

    def __post_init__(self) -> None:
        if type(self.stride) is not int or self.stride < 1:
            raise ValueError(f"stride: expected a positive integer, got {self.stride!r}")

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        block, side = base.block, self.stride
        if block % side:
            raise ValueError(f"stride: expected a divisor of {block=}, got {side}")
        counts = torch.ones(len(key), key.shape[2], device=key.device) if key_mask is None else key_mask.float()
        key = key.float().masked_fill(counts[:, None, :, None] == 0, 0)
        padding = base.n_cols * block - key.shape[2]
        keys = F.pad(key, (0, 0, 0, padding)).unflatten(2, (-1, side)).flatten(3)
        count = F.pad(counts, (0, padding)).unflatten(1, (-1, side)).sum(2)
        queries = _padded_rows(query.float(), base).flatten(2, 3).unflatten(2, (-1, side)).flip(3).flatten(3)
        each = block // side
        row = base.first_row * each + torch.arange(queries.shape[2], device=key.device)
        causal = not base.looks_ahead
        found = []
        some = _chunk(queries.shape, keys.shape[2], each)
        for tiles, part, at in zip(
            base.tiles.split(some, 2), queries.split(each * some, 2), row.split(each * some), strict=True
        ):
            logits = grouped_products(part, keys) * (_scale(query, scale) / side)
            hidden = (count == 0)[:, None, None]
            if causal:
                hidden = hidden | (torch.arange(keys.shape[2], device=key.device) > at.unsqueeze(1))
            inside = tiles.repeat_interleave(each, 2).repeat_interleave(each, 3)
            weights = _softmax(logits.masked_fill(hidden, -math.inf), inside)
            found.append(weights.unflatten(3, (-1, each)).sum(4).unflatten(2, (-1, each)).sum(3))
        return _normalized(torch.cat(found, 2), base)


@dataclass(frozen=True)
class Recent(Scores):
    """Near tiles first, whatever they hold: a window, to compare others with."""

    causal_safe = True

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        row, col = tile_positions(base)
        near = 1 / (1 + (row.unsqueeze(1) - col).abs()).float()
        return _normalized(near.expand(*query.shape[:2], -1, -1), base)


@dataclass(frozen=True)
class Shuffled(Scores):
    """Tiles in an order drawn from a seed, whatever they hold, to compare others with."""

    seed: int = 0
    causal_safe = True

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        row, col = tile_positions(base)
        head = torch.arange(query.shape[1], device=query.device)[:, None, None]
        # A function of the place alone, so that a tile has its rank at every length.
        counter = (row.unsqueeze(1).expand(len(row), len(col)), col, head, torch.zeros_like(head))
        drawn = philox4x32(counter, (self.seed & WORD, self.seed >> 32 & WORD), 7)[0].float() + 1
        return _normalized(drawn.expand(len(query), -1, -1, -1), base)


class Sum(Scores):
    """Mean of several scores. Each part finds keys that the others miss.

    Args:
        parts: Scores, all per token or none.
    """

    def __init__(self, *parts: Scores) -> None:
        if not parts or len({part.per_token for part in parts}) > 1:
            raise ValueError(f"parts: expected scores that are all per token or all per tile, got {parts}")
        self.parts = parts
        self.causal_safe = all(part.causal_safe for part in parts)
        self.per_token = parts[0].per_token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"Sum({', '.join(map(repr, self.parts))})"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        found = (part(query, key, base, key_mask=key_mask, scale=scale) for part in self.parts)
        return reduce(torch.add, found) / len(self.parts)

    def of_summaries(
        self, query: Tensor, tiles: Summaries, base: BlockIndex, scale: float | None = None
    ) -> Tensor | None:
        found = [part.of_summaries(query, tiles, base, scale) for part in self.parts]
        each = [x for x in found if x is not None]
        return reduce(torch.add, each) / len(each) if len(each) == len(found) else None


class Summaries(NamedTuple):
    """Coordinates of the keys of each tile that count, float32 ``[B, Hkv, C, D]``, 0 if there are none."""

    mean: Tensor
    low: Tensor
    high: Tensor
    log_count: Tensor
    """``[B, C]``: logarithm of their number."""


def summaries(key: Tensor, block: int, key_mask: Tensor | None = None) -> Summaries:
    """Return the mean, the smallest and the largest of the keys ``[B, Hkv, Nk, D]`` of each tile."""
    batch, _, n_keys, _ = key.shape
    cols = -(-n_keys // block)
    if key_mask is None:
        full = n_keys // block
        parts = [key[:, :, : full * block].unflatten(2, (full, block)), key[:, :, full * block :].unsqueeze(2)]
        parts = parts[: 1 + cols - full]
        mean = torch.cat([part.sum(3, dtype=torch.float32) / part.shape[3] for part in parts], 2)
        low, high = (torch.cat([best(part, 3) for part in parts], 2).float() for best in (torch.amin, torch.amax))
        counts = torch.full((batch, cols), float(block), device=key.device)
        counts[:, full:] = n_keys - full * block
        return Summaries(mean, low, high, counts.log())
    whole = F.pad(key_mask, (0, cols * block - n_keys)).view(batch, 1, cols, block, 1)
    tiles = F.pad(key, (0, 0, 0, cols * block - n_keys)).unflatten(2, (cols, block))
    count = whole.sum(3)
    mean = tiles.masked_fill(~whole, 0).sum(3, dtype=torch.float32) / count.clamp(min=1)
    low, high = tiles.masked_fill(~whole, math.inf).amin(3), tiles.masked_fill(~whole, -math.inf).amax(3)
    low, high = (x.float().masked_fill(count == 0, 0) for x in (low, high))
    return Summaries(mean, low, high, count.view(batch, cols).float().log())


def summarized(
    query: Tensor,
    high: Tensor,
    low: Tensor,
    tiles: Summaries,
    base: BlockIndex,
    pool: str | None,
    scale: float | None,
) -> Tensor:
    """Return the softmax over tiles of the largest score in a box, pooled over the rows of each tile."""
    block = base.block
    if base.leading is not None:
        return _summarized_at_once(query, high, low, tiles, base, base.leading, pool, scale)
    # relu(q) @ high - relu(-q) @ low
    middle, half = (high + low) / 2, (high - low) / 2
    factor = _scale(query, scale)
    count = tiles.log_count.unsqueeze(1).unsqueeze(1)
    rows = _chunk(query.shape, base.n_cols, block)
    allowed = base.tiles
    if pool is None and not base.looks_ahead:
        # The summary of a tile knows keys after the query until the tile ends.
        row, col = tile_positions(base)
        allowed = allowed & (col < row.unsqueeze(1))
    found = []
    lead = base.start - base.first_row * block
    for number in range(0, base.n_rows, rows):
        first, last = max(number * block - lead, 0), min((number + rows) * block - lead, base.n_queries)
        part = query[:, :, first:last].float()
        logits = (grouped_products(part, middle) + grouped_products(part.abs(), half)) * factor + count
        row = (torch.arange(first, last, device=query.device) + lead) // block
        weights = _softmax(logits, allowed[:, :, row])
        if pool is None:
            found.append(weights)
            continue
        some = range(number, min(number + rows, base.n_rows))
        before, after = number * block - lead, some.stop * block - lead
        weights = F.pad(weights, (0, 0, first - before, after - last)).unflatten(2, (len(some), block))
        found.append(weights.amax(3) if pool == "max" else weights.sum(3))
    joined = torch.cat(found, 2)
    return joined if pool is None else _normalized(joined, base, allowed)


def _summarized_at_once(
    query: Tensor,
    high: Tensor,
    low: Tensor,
    tiles: Summaries,
    base: BlockIndex,
    leading: Tensor,
    pool: str | None,
    scale: float | None,
) -> Tensor:
    own = (leading - 1) // base.block
    edges = torch.arange(base.n_queries + 1, device=base.device)
    if pool is not None:
        first, last = rows_of_tiles(base)
        edges = torch.cat((first, last[-1:]))
    sides = torch.cat((high, -low), 3).to(query.dtype)
    # A later key of a query's own tile can hold NaN, and the tile's summary with it.
    count = tiles.log_count.unsqueeze(1).masked_fill(sides.isnan().any(3), -math.inf)
    found = pooled_masses(
        query,
        sides,
        segment=1,
        # The summary of a tile knows keys after the query until the tile ends.
        seen=own if pool is None and not base.looks_ahead else own + 1,
        groups=edges.int(),
        pool=pool or "max",
        bias=count,
        by_sign=True,
        scale=scale,
    )
    return found if pool is None else _normalized(found, base)


def exact_masses(
    query: Tensor, key: Tensor, base: BlockIndex, row: Tensor, key_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the exact attention that queries give to each tile: ``[B, H, R, C]``, means over ``row`` ``[R, m]``.

    Queries without keys do not count.
    """
    if base.leading is not None:
        rows = row.flatten()
        hidden = None
        if key_mask is not None:
            hidden = torch.zeros(key_mask.shape, device=key.device).masked_fill(~key_mask, -math.inf).unsqueeze(1)
        groups = torch.arange(0, len(rows) + 1, row.shape[1], dtype=torch.int32, device=key.device)
        seen = base.leading[rows]
        return pooled_masses(
            query[:, :, rows], key, segment=base.block, seen=seen, groups=groups, bias=hidden, scale=scale
        )
    found = []
    for some in row.split(_chunk(query.shape, key.shape[2], row.shape[1])):
        weights = exact_weights(query, key, base, some.flatten(), key_mask, scale).sum(4).unflatten(2, some.shape)
        found.append(weights.sum(3) / (weights.sum(4) > 0).sum(3, keepdim=True).clamp(min=1))
    return torch.cat(found, 2)


def exact_weights(
    query: Tensor, key: Tensor, base: BlockIndex, rows: Tensor, key_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the exact weights that some queries give to the keys of each tile, float32 ``[B, H, R, C, block]``."""
    inside = base.keys_of(rows)
    if key_mask is not None:
        inside = inside & key_mask[:, None, None]
    logits = grouped_products(query[:, :, rows].float(), key.float()) * _scale(query, scale)
    padding = base.n_cols * base.block - key.shape[2]
    weights: Tensor = F.pad(_softmax(logits, inside), (0, padding)).unflatten(3, (base.n_cols, base.block))
    return weights


def grouped_products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries ``[B, H, n, D]`` with what their key head has, ``[B, Hkv, m, D]``."""
    products: Tensor = query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).mT
    return products.flatten(1, 2)


def _softmax(logits: Tensor, inside: Tensor) -> Tensor:
    """Return the softmax over the last dimension of what is inside, 0 elsewhere."""
    # Keys after a query can hold NaN, and a tile's summary with them.
    hidden = logits.isnan() | ~inside
    return logits.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)


def _normalized(found: Tensor, base: BlockIndex, inside: Tensor | None = None) -> Tensor:
    """Return scores that sum to 1 over the tiles of each row."""
    inside = base.tiles if inside is None else inside
    found = found.masked_fill(~inside, 0)
    return found / found.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[3] ** -0.5) if scale is None else scale


def rows_at_once(query: Tensor, n_keys: int) -> int:
    """Return the number of queries whose scores exist at once."""
    return _chunk(query.shape, n_keys, 1)


def _chunk(shape: torch.Size, columns: int, rows: int) -> int:
    """Return the number of tiles whose rows of scores exist at once."""
    return max(1, _SCORES // max(1, math.prod(shape[:2]) * columns * rows))


def _padded_rows(query: Tensor, base: BlockIndex) -> Tensor:
    """Return the queries ``[B, H, R, block, D]`` of each tile, 0 outside the lengths."""
    lead = base.start - base.first_row * base.block
    rest = base.n_rows * base.block - lead - base.n_queries
    padded: Tensor = F.pad(query, (0, 0, lead, rest)).unflatten(2, (base.n_rows, base.block))
    return padded


def rows_of_tiles(base: BlockIndex) -> tuple[Tensor, Tensor]:
    """Return the first query of each row tile, counted from 0, and the query after its last."""
    edges = (base.first_row + torch.arange(base.n_rows + 1, device=base.device)) * base.block - base.start
    edges = edges.clamp(0, base.n_queries)
    return edges[:-1], edges[1:]


def tile_positions(base: BlockIndex) -> tuple[Tensor, Tensor]:
    """Return the numbers of the row tiles and of the column tiles in position space."""
    row, col = (torch.arange(count, device=base.device) for count in (base.n_rows, base.n_cols))
    return base.row_positions(row), base.col_positions(col)
