"""The view that scores have of a call: queries, keys, the pairs to choose from, and summaries made once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional.attention import check_index, rule_of
from ringtile.index import BlockIndex, build_index
from ringtile.kernels.contracts import scale_of
from ringtile.kernels.masses import pooled_masses
from ringtile.patterns import Pattern

_SCORES = 1 << 20
"""Most scores that exist at once, in each of a few tensors."""


class Summaries(NamedTuple):
    """Coordinates of the keys of each tile that count, float32 ``[B, Hkv, C, D]``, 0 if there are none."""

    mean: Tensor
    low: Tensor
    high: Tensor
    log_count: Tensor
    """``[B, 1, C]``: logarithm of their number."""


@dataclass(frozen=True, eq=False)
class View:
    """The queries and keys of a call, and the index of the pairs that its tiles are chosen from.

    Args:
        query, key: ``[B, H, Nq, D]`` and ``[B, Hkv, Nk, D]``. Hkv must divide H.
        base: Index of the pairs to choose from, with R row tiles and C column tiles.
        key_mask: ``[B, Nk]`` bool, True for keys that count.
        scale: Factor for the products. Default: ``D ** -0.5``.
        known: The `summaries` of these keys, if they were computed before.

    >>> from ringtile.adaptive import Blend
    >>> from ringtile.patterns import Causal
    >>> q, k = torch.randn(2, 1, 4, 256, 16)
    >>> Blend()(View(q, k, build_index(Causal(), 256, block=32))).shape
    torch.Size([1, 4, 8, 8])
    """

    query: Tensor
    key: Tensor
    base: BlockIndex
    key_mask: Tensor | None = None
    scale: float | None = None
    known: Summaries | None = None

    @property
    def factor(self) -> float:
        """The factor for the products."""
        return scale_of(self.query, self.scale)

    @cached_property
    def summaries(self) -> Summaries:
        """The mean, the smallest and the largest of the keys of each tile."""
        return summaries(self.key, self.base.block, self.key_mask) if self.known is None else self.known

    @property
    def rows_of_tiles(self) -> tuple[Tensor, Tensor]:
        """The first query of each row tile, counted from 0, and the query after its last."""
        base = self.base
        edges = (base.first_row + torch.arange(base.n_rows + 1, device=base.device)) * base.block - base.start
        edges = edges.clamp(0, base.n_queries)
        return edges[:-1], edges[1:]

    @property
    def padded_queries(self) -> Tensor:
        """The queries of each tile, float32 ``[B, H, R, block, D]``, 0 outside the lengths and for NaN or infinity."""
        # Queries from position 35 with block 16 begin in row tile 2, after 3 positions that are no query.
        base = self.base
        lead = base.start - base.first_row * base.block
        rest = base.n_rows * base.block - lead - base.n_queries
        query = self.query.float().nan_to_num(0, 0, 0)
        padded: Tensor = F.pad(query, (0, 0, lead, rest)).unflatten(2, (base.n_rows, base.block))
        return padded

    def normalized(self, found: Tensor, inside: Tensor | None = None) -> Tensor:
        """Return scores that sum to 1 over the tiles of each row."""
        # On a CPU a product with bools that are expanded takes a tenth of the time that `masked_fill` takes.
        found = found * (self.base.tiles if inside is None else inside)
        return found.div_(found.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny))

    def exact_masses(self, row: Tensor) -> Tensor:
        """Return the exact attention that queries give to each tile: ``[B, H, R, C]``, means over ``row`` ``[R, m]``.

        Queries without keys do not count.
        """
        query, key, base = self.query, self.key, self.base
        if base.leading is not None:
            rows, hidden = row.flatten(), self._hidden
            groups = torch.arange(0, len(rows) + 1, row.shape[1], dtype=torch.int32, device=key.device)
            seen = base.leading[rows]
            some = query.index_select(2, rows)
            return pooled_masses(some, key, segment=base.block, seen=seen, groups=groups, bias=hidden, scale=self.scale)
        # Without a leading bound, such as a window's, the kernel of masses cannot sum: chunks of exact rows do.
        found = []
        for some in row.split(tiles_at_once(query, key.shape[2], row.shape[1])):
            weights = self.exact_weights(some.flatten()).sum(4).unflatten(2, some.shape)
            found.append(weights.sum(3) / (weights.sum(4) > 0).sum(3, keepdim=True).clamp(min=1))
        return torch.cat(found, 2)

    def rounded_masses(self) -> Tensor:
        """Return the root mean squares of the weights that the queries of a row tile give to each tile of the index.

        They have a factor for each row tile. The weights of a query sum to 1. Queries and keys are rounded to 8 bits,
        if the pairs of the index lead.
        """
        base = self.base
        first, last = self.rows_of_tiles
        if base.leading is not None:
            groups = torch.cat((first, last[-1:])).int()
            return pooled_masses(
                self.query,
                self.key,
                segment=base.block,
                seen=base.leading,
                groups=groups,
                pool="rms",
                bias=self._hidden,
                scale=self.scale,
            )
        found, tiles = [], base.tiles.flatten(0, 1).any(0).int()
        # A row tile reads its columns from the first to the last one: few, if the pairs are a window's or a document's.
        ends = first, last, tiles.argmax(1), base.n_cols - tiles.flip(1).argmax(1)
        for begin, end, low, high in torch.stack(ends, 1).tolist():
            rows = torch.arange(begin, end, device=base.device)
            parts = rows.split(tiles_at_once(self.query, (high - low) * base.block))
            weights = torch.cat([self.exact_weights(some, low, high).sum(4) for some in parts], 2)
            found.append(F.pad(weights.square().sum(2).sqrt(), (low, base.n_cols - high)))
        return torch.stack(found, 2)

    @property
    def _hidden(self) -> Tensor | None:
        """The key mask as a bias, float32 ``[B, 1, Nk]``."""
        if self.key_mask is None:
            return None
        zeros = torch.zeros_like(self.key_mask, dtype=torch.float32)
        return zeros.masked_fill(~self.key_mask, -math.inf).unsqueeze(1)

    def exact_weights(self, rows: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """Return the exact weights that queries give to the keys of each tile, float32 ``[B, H, R, C, block]``.

        Other tiles than those from ``low`` to before ``high`` have none of these queries' keys.
        """
        base = self.base
        high = base.n_cols if high is None else high
        keys = slice(low * base.block, high * base.block)
        inside = base.keys_of(rows)[..., keys]
        if self.key_mask is not None:
            inside = inside & self.key_mask[:, None, None, keys]
        logits = grouped_products(self.query[:, :, rows].float(), self.key[:, :, keys].float()) * self.factor
        padding = (high - low) * base.block - logits.shape[3]
        weights: Tensor = F.pad(softmax(logits, inside), (0, padding)).unflatten(3, (high - low, base.block))
        return weights


def base_index(
    query: Tensor, key: Tensor, base: BlockIndex | Pattern | str | None, is_causal: bool, block: int
) -> BlockIndex:
    """Return the index of the pairs to choose from, see `select`."""
    (batch, heads, n_queries), n_keys = query.shape[:3], key.shape[2]
    if isinstance(base, BlockIndex):
        check_index("base", base, query, n_keys, is_causal)
        return base
    # An empty batch has an index, too: of one row.
    rule = rule_of(base, is_causal, None)
    return build_index(rule, n_queries, n_keys, num_heads=heads, batch=max(batch, 1), block=block, device=query.device)


def summaries(key: Tensor, block: int, key_mask: Tensor | None = None) -> Summaries:
    """Return the mean, the smallest and the largest of the keys ``[B, Hkv, Nk, D]`` of each tile."""
    batch, _, n_keys, _ = key.shape
    cols = -(-n_keys // block)
    if key_mask is None:
        # The keys need no padded copy: the full tiles are a view of them, and the last tile is shorter. 300 keys of
        # block 128 are 2 full tiles and one of 44.
        full = n_keys // block
        parts = [key[:, :, : full * block].unflatten(2, (full, block)), key[:, :, full * block :].unsqueeze(2)]
        parts = parts[: 1 + cols - full]
        mean = torch.cat([part.sum(3, dtype=torch.float32) / part.shape[3] for part in parts], 2)
        low, high = (torch.cat([best(part, 3) for part in parts], 2).float() for best in (torch.amin, torch.amax))
        counts = mean.new_full((batch, cols), block)
        counts[:, full:] = n_keys - full * block
        return Summaries(mean, low, high, counts.log().unsqueeze(1))
    whole = F.pad(key_mask, (0, cols * block - n_keys)).view(batch, 1, cols, block, 1)
    tiles = F.pad(key, (0, 0, 0, cols * block - n_keys)).unflatten(2, (cols, block))
    count = whole.sum(3)
    mean = tiles.masked_fill(~whole, 0).sum(3, dtype=torch.float32) / count.clamp(min=1)
    low, high = tiles.masked_fill(~whole, math.inf).amin(3), tiles.masked_fill(~whole, -math.inf).amax(3)
    low, high = (x.float().masked_fill(count == 0, 0) for x in (low, high))
    return Summaries(mean, low, high, count.view(batch, 1, cols).float().log())


def tile_positions(base: BlockIndex) -> tuple[Tensor, Tensor]:
    """Return the numbers of the row tiles and of the column tiles in position space."""
    row, col = (torch.arange(count, device=base.device) for count in (base.n_rows, base.n_cols))
    return base.row_positions(row), base.col_positions(col)


def grouped_products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries ``[B, H, n, D]`` with what their key head has, ``[B, Hkv, m, D]``."""
    products: Tensor = query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).mT
    return products.flatten(1, 2)


def softmax(logits: Tensor, inside: Tensor) -> Tensor:
    """Return the softmax over the last dimension of what is inside, 0 elsewhere."""
    # Later keys and padding can hold NaN or infinity. A row without other logits has weights of 0.
    hidden = ~((logits.abs() < math.inf) & inside)
    return logits.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)


def tiles_at_once(query: Tensor, columns: int, rows: int = 1) -> int:
    """Return the number of tiles, of so many rows each, whose scores exist at once."""
    return max(1, _SCORES // max(1, math.prod(query.shape[:2]) * columns * rows))
