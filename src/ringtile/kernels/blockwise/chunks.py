"""Cut a call: heads by group (`Work`), then row tiles and lists of a launch into parts of bounded memory (`Part`).

Shapes: ``H`` query heads and ``G`` key heads (times batch elements), ``n`` row tiles of ``m`` queries, ``l`` keys of a
part, ``D`` the head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.schedule import derived
from ringtile.index.tiles import FULL
from ringtile.kernels.blockwise.plan import Launch, Plan, plan_of
from ringtile.kernels.contracts import Added, Call, accumulator, key_keep, settle_exponentials
from ringtile.kernels.cpu_flash import flash_reason, split_scale
from ringtile.kernels.philox import dropout_scale, dropout_tile

CHUNK_BYTES = 8 * 2**20
_MASK_BYTES = 4 * 2**20
_OUT_BYTES = 4 * 2**20
_HEADS = 16
"""Batch elements are computed together up to about this many key heads, so that a chunk has several row tiles."""
_SHORT_LIST = 4
_FEW_TILES = 4
"""An index of no more tiles is computed as one dense call: launches would cost more than the tiles that they skip."""


def on_flash(device: torch.device, call: Call) -> bool:
    """Return True if PyTorch's flash kernel computes a call."""
    plain = call.dropout_p == 0.0 and call.softcap == 0.0 and call.alibi_slopes is None
    return plain and device.type == "cpu" and not flash_reason()


class Part(NamedTuple):
    """Some tiles of the lists of some row tiles."""

    rows: Tensor
    """``[n]``."""
    cols: Tensor
    """``[n, K]``."""
    tiles: Tensor
    """``[n or 1, K]``, as in `Launch`."""


def _cuts(launch: Launch, block: int, limit: int) -> list[tuple[int, int]]:
    """Cut a launch's lists where they are long, and masked tiles from full ones if that is cheaper."""
    count, partial = launch.cols.shape[1], launch.n_partial
    if count <= _SHORT_LIST or partial * 4 >= count * 3:
        partial = count
    masked_limit = max(1, min(limit, _MASK_BYTES // (4 * block**2)))
    stretches = (0, partial, masked_limit), (partial, count, limit)
    return [(at, min(at + most, end)) for begin, end, most in stretches for at in range(begin, end, most)]


def tiled(x: Tensor, lead: int, count: int, block: int, value: float = 0.0) -> Tensor:
    """Return ``[H, N, ...]`` as ``[H, count, block, ...]``, with ``lead`` tokens of a value before the first one."""
    tail = count * block - lead - x.shape[1]
    padded = F.pad(x, (*(0, 0) * (x.ndim - 2), lead, tail), value=value) if lead or tail else x
    tiles: Tensor = padded.unflatten(1, (count, block))
    return tiles


def read(tiles: Tensor, numbers: Tensor) -> Tensor:
    """Return tiles of ``[H, count, block, ...]`` by their numbers ``[n, K]``: ``[n, H, K * block, ...]``."""
    found = tiles.index_select(1, numbers.flatten().to(tiles.device))
    joined: Tensor = found.unflatten(1, numbers.shape).flatten(2, 3).transpose(0, 1)
    return joined


def write(tiles: Tensor, numbers: Tensor, values: Tensor) -> None:
    """Write the tiles ``[n]`` that `read` returns, one after the other."""
    tiles.index_copy_(1, numbers.to(tiles.device), values.transpose(0, 1).to(tiles.dtype))


def add(tiles: Tensor, numbers: Tensor, grad: Tensor) -> None:
    """Add a gradient of the tiles that `read` returns, in a fixed order."""
    grads = grad.unflatten(2, (numbers.shape[1], -1)).transpose(0, 1).flatten(1, 2)
    numbers = numbers.flatten().to(grads.device)
    if grads.is_cpu:
        tiles.index_add_(1, numbers, grads)
    else:
        heads = torch.arange(len(grads), device=grads.device).unsqueeze(1)
        tiles.index_put_((heads, numbers), grads, True)


@dataclass(frozen=True, eq=False)
class Work:
    """The share of a call of heads and batch elements that have one group."""

    index: BlockIndex
    plan: Plan
    call: Call
    key_keep: Tensor | None
    """``[B, C * block]`` bool, the keys that the call's own mask and lengths keep."""
    dtype: torch.dtype
    device: torch.device
    width: int
    """The head dims of keys and values together."""
    group: int
    batch: range
    heads: range
    kv_heads: range
    added: Added | None

    @property
    def on_flash(self) -> bool:
        """True if PyTorch's flash kernel computes the call."""
        return self.added is None and on_flash(self.device, self.call)

    @property
    def matrices(self) -> int:
        """The matrices of scores that a part of a pass needs at once."""
        return 0 if self.on_flash else 4 if self.added is None else 10

    @property
    def scale(self) -> tuple[float, float]:
        """The part of the scale that multiplies the queries, and the rest."""
        return split_scale(self.call.scale, self.dtype) if self.on_flash else (1.0, self.call.scale)

    def _share(self, x: Tensor, heads: range) -> Tensor:
        return x[self.batch.start : self.batch.stop, heads.start : heads.stop].flatten(0, 1)

    def rows(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Return the share of ``[B, H, Nq, ...]`` as row tiles. Queries that do not exist have a value."""
        index, count = self.index, self.index.n_rows
        lead = 0 if x.shape[2] == count * index.block else index.start % index.block
        return tiled(self._share(x, self.heads), lead, count, index.block, value)

    def columns(self, x: Tensor) -> Tensor:
        """Return the share of ``[B, Hkv, Nk, D]`` as column tiles, with zeros for keys that no row keeps."""
        dead = None if self.plan.dead_keys is None else self.plan.dead_keys[self.group].unsqueeze(0).to(self.device)
        tiles = tiled(self._share(x, self.kv_heads), 0, self.index.n_cols, self.index.block)
        if self.key_keep is not None:
            masked = ~self.key_keep[self.batch.start].unsqueeze(0)
            dead = masked if dead is None else dead | masked
        return tiles if dead is None else tiles.masked_fill(dead.view(1, *tiles.shape[1:3], 1), 0)

    def column_results(self, x: Tensor) -> Tensor:
        """Return the share of results ``[B, Hkv, C * block, D]`` as column tiles, a view."""
        return tiled(self._share(x, self.kv_heads), 0, self.index.n_cols, self.index.block)

    def chunks(self, n_scores: int) -> Iterator[list[Part]]:
        """Cut the launches so that no part needs more than `CHUNK_BYTES`. Parts of a chunk have the same rows."""
        block, size = self.index.block, self.dtype.itemsize
        keys, queries = (len(heads) * len(self.batch) * block * size for heads in (self.kv_heads, self.heads))
        for launch in self.plan.launches[self.group]:
            # Rows with tiles of their own have masks of their own.
            own_mask = 4 * block**2 if len(launch.tiles) > 1 else 0
            tile = keys * self.width + n_scores * queries * block + own_mask
            cuts = _cuts(launch, block, max(1, CHUNK_BYTES // tile))
            widest = max(end - begin for begin, end in cuts)
            rows = max(1, min(CHUNK_BYTES // (tile * widest), _OUT_BYTES // (queries * self.width)))
            for first in range(0, len(launch.rows), rows):
                part = slice(first, first + rows)
                tiles = launch.tiles[part] if own_mask else launch.tiles
                yield [Part(launch.rows[part], launch.cols[part, a:b], tiles[:, a:b]) for a, b in cuts]

    def keep(self, part: Part) -> Tensor | None:
        """Return the kept pairs, ``[n or 1, 1, m or 1, l]`` bool, or None if all are kept."""
        keep: Tensor | None = None
        if bool((part.tiles != FULL).any()):
            keep = self.plan.mask(part.tiles).to(self.device).unsqueeze(1)
        if self.key_keep is not None:
            own = read(self.key_keep[self.batch.start].view(1, -1, self.index.block), part.cols).unsqueeze(-2)
            keep = own if keep is None else keep & own
        return keep

    def positions(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return query positions ``[n, m]`` and the first key positions of the part's tiles ``[n, K]``."""
        index, rows = self.index, part.rows.to(self.device)
        inside = torch.arange(index.block, device=self.device)
        query = index.row_positions(rows).unsqueeze(1) * index.block + inside
        return query, index.col_positions(part.cols.to(self.device)) * index.block

    def bias(self, query: Tensor, tiles: Tensor) -> Tensor:
        """Return ALiBi's ``-slope * |i - j|``, ``[n, H, m, K * block]``. ``tiles`` are first key positions."""
        assert self.call.alibi_slopes is not None
        key = (tiles.unsqueeze(-1) + torch.arange(self.index.block, device=self.device)).flatten(1)
        slopes = self.call.alibi_slopes[self.heads.start : self.heads.stop].to(self.dtype).repeat(len(self.batch))
        distance = (query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)
        return distance * -slopes.view(1, -1, 1, 1)

    def _added_at(self, part: Part) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the places of added numbers, which broadcast to ``[n, H, m, l]``, and which queries exist."""
        assert self.added is not None
        values, query_at, key_at, _ = self.added
        index, inside = self.index, torch.arange(self.index.block, device=self.device)
        row = (part.rows.to(self.device).unsqueeze(1) + index.first_row) * index.block + inside - index.start
        # Places outside the lengths are those of any token.
        query = row.clamp(0, index.n_queries - 1)
        key = part.cols.to(self.device).unsqueeze(2) * index.block + inside
        key = key.clamp_(max=index.n_keys - 1).flatten(1)
        at = (
            (key_at[key].unsqueeze(1) - query_at[query].unsqueeze(2)).clamp_(0, values.shape[3] - 1).long().unsqueeze(1)
        )
        batch, heads = (torch.tensor(x, dtype=torch.int64, device=self.device) for x in (self.batch, self.heads))
        batch, heads = batch.repeat_interleave(len(self.heads)), heads.repeat(len(self.batch))
        exists = (query == row)[:, None, :, None]
        query = query[:, None, :, None] if values.shape[2] > 1 else query.new_zeros(())
        return (batch.view(1, -1, 1, 1), heads.view(1, -1, 1, 1), query, at), exists

    def added_numbers(self, part: Part) -> Tensor:
        """Return what is added to the scores of a part, 0 for queries that do not exist."""
        assert self.added is not None
        places, exists = self._added_at(part)
        return self.added.values[places].masked_fill_(~exists, 0)

    def add_grads(self, part: Part, grads: Tensor) -> None:
        """Add the gradients of a part's scores to those of the added numbers."""
        if self.added is None or self.added.grad is None:
            return
        to = self.added.grad
        places = sum(at * step for at, step in zip(self._added_at(part)[0], to.stride(), strict=True))
        assert isinstance(places, Tensor)
        # In one dimension, sums have an order.
        end = 1 + sum((size - 1) * step for size, step in zip(to.shape, to.stride(), strict=True))
        places, flat = places.expand(grads.shape).flatten(), to.as_strided((end,), (1,))
        if flat.is_cpu:
            flat.index_add_(0, places, grads.flatten())
        else:
            flat.index_put_((places,), grads.flatten(), True)

    def dropout(self, query: Tensor, tiles: Tensor) -> Tensor:
        """Return dropout's factors of the weights ``[n, H, m, K * block]``. ``tiles`` are first key positions."""
        call = self.call
        assert call.seed is not None
        batch, heads = (torch.tensor(x, dtype=torch.int64, device=self.device) for x in (self.batch, self.heads))
        batch = (batch if call.batch_at is None else call.batch_at[batch]).repeat_interleave(len(self.heads))
        heads = (heads if call.head_at is None else call.head_at[heads]).repeat(len(self.batch))
        keep = dropout_tile(
            call.seed, batch, heads, query.unsqueeze(1), tiles.unsqueeze(1), self.index.block, call.dropout_p
        )
        return keep.to(self.dtype).mul_(dropout_scale(call.dropout_p))


def queries_of(index: BlockIndex, x: Tensor) -> Tensor:
    """Return the queries that exist of results ``[B, H, R * block, ...]``."""
    # A start of 100 in blocks of 64: row tile 0 has positions 64 to 127, so the first query is its row 36.
    lead = index.start % index.block
    return x[:, :, lead : lead + index.n_queries]


def works(index: BlockIndex, q: Tensor, k: Tensor, v: Tensor, call: Call, added: Added | None = None) -> Iterator[Work]:
    """Cut a call by group: batch elements together if all heads have one group, otherwise head by head."""
    settle_exponentials()
    n_batch, n_heads, n_kv = *q.shape[:2], k.shape[1]
    kept, width = key_keep(call, k.shape[2]), max(k.shape[-1] + v.shape[-1], 1)
    if kept is not None:
        kept = F.pad(kept, (0, index.n_cols * index.block - k.shape[2]))
    shared = index, plan_of(index), call, kept, accumulator(q), q.device, width
    group = index.group.cpu().expand(n_batch, n_heads)
    if not q.shape[:3].numel():
        return
    if bool((group == group[0, 0]).all()):
        step = max(1, _HEADS // n_kv) if kept is None else 1
        for b in range(0, n_batch, step):
            batch = range(b, min(b + step, n_batch))
            yield Work(*shared, int(group[0, 0]), batch, range(n_heads), range(n_kv), added)
        return
    for b, row in enumerate(group.tolist()):
        for h, number in enumerate(row):
            kv = h * n_kv // n_heads
            yield Work(*shared, number, range(b, b + 1), range(h, h + 1), range(kv, kv + 1), added)


def additive(keep: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 for kept pairs and -inf for others, or None if all are kept."""
    if keep is None:
        return None
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -math.inf)


def _whole_mask(index: BlockIndex, dtype: torch.dtype) -> Tensor | None:
    """Return the mask of all pairs, or None if a query or key is in none of them."""
    kept = index.to_dense()
    return additive(kept, dtype) if bool(kept.any(-1).all() and kept.any(-2).all()) else None


def whole_mask(index: BlockIndex, q: Tensor, call: Call) -> Tensor | None:
    """Return a mask to add to all scores at once if the call is so small."""
    is_masked = call.key_bits is not None or call.key_lengths is not None
    if is_masked or not on_flash(q.device, call) or not 0 < index.n_rows * index.n_cols <= _FEW_TILES:
        return None
    return derived(index, _whole_mask, q.dtype, lengths=True)
