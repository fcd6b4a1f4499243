"""Cut a call: heads by group (`Work`), then row tiles and lists of a launch into parts of bounded memory (`Part`).

Shapes: ``H`` query heads and ``G`` key heads (times batch elements), ``m`` queries of a block, ``l`` keys of a part,
``D`` the head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.tiles import FULL
from ringtile.kernels.blockwise.plan import Launch, Plan, offset_of, plan_of, queries_of
from ringtile.kernels.contracts import Call, accumulator, key_keep, settle_exponentials
from ringtile.kernels.cpu_flash import split_scale
from ringtile.kernels.philox import dropout_scale, dropout_tile

CHUNK_BYTES = 8 * 2**20
_MASK_BYTES = 4 * 2**20
_OUT_BYTES = 4 * 2**20
_HEADS_BYTES = 2**20
_SHORT_LIST = 16


def on_flash(device: torch.device, call: Call) -> bool:
    """Return True if PyTorch's flash kernel computes a call."""
    plain = call.dropout_p == 0.0 and call.softcap == 0.0 and call.alibi_slopes is None
    return plain and device.type == "cpu"


class Part(NamedTuple):
    """Row tiles ``[first, last)`` of a launch and tiles ``[begin, end)`` of their lists, with a mask or all full."""

    launch: Launch
    first: int
    last: int
    begin: int
    end: int
    masked: bool

    @property
    def blocks(self) -> int:
        """The number of blocks of queries that are computed side by side: row tiles, or all of a tall launch as one."""
        return 1 if self.launch.tall else self.last - self.first

    @property
    def first_column(self) -> int:
        """The first column tile of a run."""
        assert self.launch.run is not None
        return self.launch.run[0] + self.first * self.launch.run[1] + self.begin

    def columns(self) -> Tensor:
        """Return the column tiles, ``[blocks, K]``."""
        launch = self.launch
        if launch.run is None:
            assert launch.cols is not None
            return launch.cols[self.first : self.last, self.begin : self.end]
        # With (first, step) = (3, 2), row 4 reads columns 11, 12 and so on: 3 + 4 * 2 is the first one.
        row = torch.arange(self.blocks).unsqueeze(1)
        return self.first_column + row * launch.run[1] + torch.arange(self.end - self.begin)

    def tiles(self) -> Tensor:
        """Return the tiles as rows of the plan's bits, ``[rows or 1, K]``."""
        tiles = self.launch.tiles
        return (tiles if len(tiles) == 1 else tiles[self.first : self.last])[:, self.begin : self.end]


def _cut(begin: int, end: int, limit: int, masked: bool) -> Iterator[tuple[int, int, bool]]:
    # 10 tiles in parts of at most 4 are [0, 3), [3, 6) and [6, 10): as equal as they can be.
    count = max(1, -(-(end - begin) // limit))
    for number in range(count):
        a, b = begin + (end - begin) * number // count, begin + (end - begin) * (number + 1) // count
        if b > a:
            yield a, b, masked


def _cuts(launch: Launch, block: int, limit: int, key_masked: bool) -> list[tuple[int, int, bool]]:
    """Cut a launch's lists where they are long. Cut masked tiles from full ones if that is cheaper."""
    count, partial = launch.tiles.shape[1], launch.n_partial
    masked_limit = max(1, min(limit, _MASK_BYTES // (4 * block * block)))
    shared = len(launch.tiles) == 1
    if partial == 0:
        return list(_cut(0, count, limit, key_masked))
    if (shared and count <= _SHORT_LIST) or partial * 4 >= count * 3:
        return list(_cut(0, count, masked_limit, True))
    if launch.run is None:
        return [*_cut(0, partial, masked_limit, True), *_cut(partial, count, limit, key_masked)]
    cuts: list[tuple[int, int, bool]] = []
    begin = 0
    for masked, same in groupby((launch.tiles[0] != FULL).tolist()):
        end = begin + len(list(same))
        cuts += _cut(begin, end, masked_limit if masked else limit, masked or key_masked)
        begin = end
    return cuts


class RowTiles:
    """Row tiles of a ``[H, Nq, ...]`` tensor, read and written as views if they are neighbors."""

    def __init__(self, x: Tensor, index: BlockIndex) -> None:
        self.x, self.index = x, index

    def _blocks(self, begin: int, count: int, size: int) -> Tensor:
        """Return ``[count, H, size, ...]``, the queries from ``begin`` on in blocks."""
        # One view in place of a slice, a split and a transpose: each costs as much as a small tile.
        x, (by_head, by_query, *rest) = self.x, self.x.stride()
        shape, strides = (count, x.shape[0], size, *x.shape[2:]), (size * by_query, by_head, by_query, *rest)
        return x.as_strided(shape, strides, x.storage_offset() + begin * by_query)

    def _view(self, part: Part) -> Tensor | None:
        """Return ``[blocks, H, m, ...]``, or None if the row tiles are no neighbors."""
        if part.launch.first_row is None:
            return None
        # A first or last tile can have fewer queries. It is the only one of its launch, so all blocks are equal.
        first = part.launch.first_row
        begin, end = queries_of(self.index, first + part.first, first + part.last)
        return self._blocks(begin, part.blocks, (end - begin) // part.blocks)

    def _tiles(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return all whole tiles, ``[H, tiles, block, ...]``, and the numbers of a part's tiles among them."""
        # A start of 100 in blocks of 64 leaves 28 queries in row tile 0, so whole tiles begin at query 28 with tile 1.
        skipped = int(self.index.start % self.index.block > 0)
        begin, _ = queries_of(self.index, skipped, skipped)
        block = self.index.block
        tiles = self._blocks(begin, (self.index.n_queries - begin) // block, block).transpose(0, 1)
        return tiles, part.launch.rows[part.first : part.last].to(self.x.device) - skipped

    def read(self, part: Part) -> Tensor:
        """Return the rows of a part, ``[blocks, H, m, ...]``."""
        view = self._view(part)
        if view is None:
            tiles, rows = self._tiles(part)
            view = tiles.index_select(1, rows).transpose(0, 1)
        return view

    def write(self, part: Part, values: Tensor) -> None:
        """Write the rows that `read` returns."""
        view = self._view(part)
        if view is None:
            tiles, rows = self._tiles(part)
            tiles.index_copy_(1, rows, values.transpose(0, 1).to(tiles.dtype))
        else:
            view.copy_(values)


class ColumnTiles:
    """Column tiles of a ``[G, Nk, D]`` tensor, read as views or gathered, in a dtype."""

    def __init__(self, x: Tensor, index: BlockIndex, dtype: torch.dtype) -> None:
        self.x, self.block, self.dtype = x, index.block, dtype
        self.count = x.shape[1] // index.block
        tail = x[:, self.count * index.block :]
        self.tail = F.pad(tail, (0, 0, 0, index.block - tail.shape[1])) if tail.shape[1] else None

    def read(self, part: Part) -> Tensor:
        """Return the keys of a part, ``[blocks, G, l, D]``."""
        x, block = self.x, self.block
        if part.launch.run is None:
            return self._gather(part.columns())
        # Blocks overlap: with a step of 1 and 3 tiles a row, rows 0 and 1 read tiles 0 to 2 and 1 to 3.
        step, at = part.launch.run[1] * block, part.first_column * block
        length = min((part.end - part.begin) * block, x.shape[1] - at)
        keys = x[:, at : at + (part.blocks - 1) * step + length].to(self.dtype)
        return keys.as_strided(
            (part.blocks, x.shape[0], length, x.shape[2]),
            (step * keys.stride(1), keys.stride(0), keys.stride(1), keys.stride(2)),
        )

    def _gather(self, cols: Tensor) -> Tensor:
        x, block = self.x, self.block
        flat = cols.flatten()
        late = (flat >= self.count).nonzero().squeeze(1) if self.tail is not None else flat[:0]
        flat = flat.to(x.device)
        if self.count:
            tiles = x[:, : self.count * block].unflatten(1, (self.count, block))
            found = tiles.index_select(1, flat.clamp(max=self.count - 1) if len(late) else flat).to(self.dtype)
        else:
            found = x.new_empty((x.shape[0], len(flat), block, x.shape[2]), dtype=self.dtype)
        if len(late):
            assert self.tail is not None
            found.index_copy_(1, late.to(x.device), self.tail.to(self.dtype).unsqueeze(1).expand(-1, len(late), -1, -1))
        gathered: Tensor = found.unflatten(1, cols.shape).flatten(2, 3).transpose(0, 1)
        return gathered


class ColumnSums:
    """The gradient of a ``[G, Nk, D]`` tensor, summed tile by tile in a fixed order into the tensor itself."""

    def __init__(self, x: Tensor, block: int) -> None:
        self.x, self.block = x, block
        self.count = x.shape[1] // block
        self.tiles = x[:, : self.count * block].unflatten(1, (self.count, block))

    def add(self, part: Part, grad: Tensor) -> None:
        """Add the gradient ``[blocks, G, l, D]`` of the keys that `ColumnTiles.read` returns."""
        count, cols = part.end - part.begin, part.columns()
        if grad.shape[2] < count * self.block:
            # The last tile of a run has fewer keys, so it is no tile of `tiles`.
            inside = (count - 1) * self.block
            self.x[:, self.count * self.block :] += grad[:, :, inside:].sum(0)
            if not inside:
                return
            grad, cols, count = grad[:, :, :inside], cols[:, :-1], count - 1
        grads = grad.unflatten(2, (count, self.block)).transpose(0, 1).flatten(1, 2)
        cols = cols.flatten()
        late = cols >= self.count
        if bool(late.any()):
            tail = self.x[:, self.count * self.block :]
            tail += grads[:, late.nonzero().squeeze(1).to(grads.device), : tail.shape[1]].sum(1)
            kept = (~late).nonzero().squeeze(1)
            grads, cols = grads[:, kept.to(grads.device)], cols[kept]
        if grads.is_cpu:
            self.tiles.index_add_(1, cols, grads)
        else:
            heads = torch.arange(grads.shape[0], device=grads.device).unsqueeze(1)
            self.tiles.index_put_((heads, cols.to(grads.device)), grads, True)


@dataclass(frozen=True, eq=False)
class Work:
    """The share of a call of heads and batch elements that have one group: slices of ``[B, H]`` and ``[B, Hkv]``."""

    index: BlockIndex
    plan: Plan
    call: Call
    key_keep: Tensor | None
    """``[B, Nk]`` bool, the keys that the call's own mask and lengths keep."""
    dtype: torch.dtype
    device: torch.device
    group: int
    batch: range
    heads: range
    kv_heads: range

    @property
    def on_flash(self) -> bool:
        """True if PyTorch's flash kernel computes the call."""
        return on_flash(self.device, self.call)

    @property
    def scale(self) -> tuple[float, float]:
        """The part of the scale that multiplies the queries, and the rest."""
        return split_scale(self.call.scale, self.dtype) if self.on_flash else (1.0, self.call.scale)

    def q(self, x: Tensor) -> Tensor:
        """Return the share of ``[B, H, ...]`` as ``[H, ...]``, a view."""
        return x[self.batch.start : self.batch.stop, self.heads.start : self.heads.stop].flatten(0, 1)

    def k(self, x: Tensor) -> Tensor:
        """Return the share of ``[B, Hkv, ...]`` as ``[G, ...]``, a view."""
        return x[self.batch.start : self.batch.stop, self.kv_heads.start : self.kv_heads.stop].flatten(0, 1)

    def rows(self, *tensors: Tensor) -> list[RowTiles]:
        """Return the row tiles of some tensors ``[B, H, Nq, ...]``."""
        return [RowTiles(self.q(x), self.index) for x in tensors]

    def columns(self, *tensors: Tensor) -> list[ColumnTiles]:
        """Return the column tiles of some tensors ``[B, Hkv, Nk, D]``, with zeros for keys that no row keeps."""
        dead = None if self.plan.dead_keys is None else self.plan.dead_keys[self.group].unsqueeze(0)
        dead = None if dead is None else dead.to(self.device)
        if self.key_keep is not None:
            masked = ~self.key_keep[self.batch.start : self.batch.stop]
            dead = masked if dead is None else dead | masked
        parts = (self.k(x) for x in tensors)
        clean = (x if dead is None else x.masked_fill(dead.unsqueeze(-1), 0) for x in parts)
        return [ColumnTiles(x, self.index, self.dtype) for x in clean]

    def sums(self, *tensors: Tensor) -> list[ColumnSums]:
        """Return the sums of some gradients ``[B, Hkv, Nk, D]``."""
        return [ColumnSums(self.k(x), self.index.block) for x in tensors]

    def chunks(self, tile_bytes: int, row_bytes: int, view_bytes: int) -> Iterator[list[Part]]:
        """Cut the launches so that no part needs more than `CHUNK_BYTES`. Parts of a chunk have the same rows.

        A gathered tile needs ``tile_bytes``, a tile read as a view ``view_bytes``, a row tile's output ``row_bytes``.
        """
        block = self.index.block
        for launch in self.plan.launches:
            if launch.group != self.group:
                continue
            rows = len(launch.rows)
            per_tile = tile_bytes if launch.run is None else view_bytes
            limit = max(1, CHUNK_BYTES // per_tile) if per_tile else launch.tiles.shape[1]
            cuts = _cuts(launch, block, limit, self.key_keep is not None)
            budget = min(rows, max(1, _OUT_BYTES // row_bytes))
            if not launch.tall:
                widest = max(end - begin for begin, end, _ in cuts)
                budget = min(budget, max(1, CHUNK_BYTES // max(1, per_tile * widest)))
            if len(launch.tiles) > 1:
                # Rows with partial tiles of their own have masks of their own.
                own_mask = max((end - begin for begin, end, masked in cuts if masked), default=0)
                budget = min(budget, max(1, 2 * _MASK_BYTES // (4 * max(own_mask, 1) * block * block)))
            for first, last, _ in _cut(0, rows, budget, False):
                yield [Part(launch, first, last, *cut) for cut in cuts]

    def keep(self, part: Part) -> Tensor | None:
        """Return the kept pairs, ``[blocks or 1, 1, m, l]`` bool, or None if all are kept."""
        if not part.masked:
            return None
        keep: Tensor | None = None
        tiles = part.tiles()
        if bool((tiles != FULL).any()):
            keep = self.plan.mask(tiles)
            lo, hi = self._inside(part)
            if hi - lo < self.index.block:
                keep = keep[:, lo:hi]
            if part.launch.run is not None:
                # The last tile of a run can be ragged.
                keep = keep[..., : self.index.n_keys - part.first_column * self.index.block]
            keep = keep.to(self.device).unsqueeze(1)
        if self.key_keep is not None:
            own = self.key_keep[self.batch.start : self.batch.stop].unsqueeze(-1)
            of_keys = ColumnTiles(own, self.index, torch.bool).read(part).squeeze(-1).unsqueeze(-2)
            keep = of_keys if keep is None else keep & of_keys
        return keep

    def _inside(self, part: Part) -> tuple[int, int]:
        """Return the rows ``[lo, hi)`` of the part's row tiles that exist. Only a launch of one tile has fewer."""
        row = int(part.launch.rows[part.first])
        begin, end = queries_of(self.index, row, row + 1)
        lo = begin - (row * self.index.block - offset_of(self.index))
        return lo, lo + end - begin

    def positions(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return query positions ``[blocks, m]`` and the first key positions of the part's tiles ``[blocks, t]``."""
        index = self.index
        rows = part.launch.rows[part.first : part.last].to(self.device)
        inside = torch.arange(*self._inside(part), device=self.device)
        query = (index.row_positions(rows).unsqueeze(1) * index.block + inside).view(part.blocks, -1)
        return query, index.col_positions(part.columns().to(self.device)) * index.block

    def bias(self, query: Tensor, key: Tensor) -> Tensor:
        """Return ALiBi's ``-slope * |i - j|``: positions ``[n, m]`` and ``[n, l]`` to ``[n, H, m, l]``."""
        assert self.call.alibi_slopes is not None
        slopes = self.call.alibi_slopes[self.heads.start : self.heads.stop].to(self.dtype).repeat(len(self.batch))
        distance = (query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)
        return distance * -slopes.view(1, -1, 1, 1)

    def dropout(self, query: Tensor, tiles: Tensor) -> Tensor:
        """Return dropout's factors of the weights ``[n, H, m, t * block]``. ``tiles`` are first key positions."""
        call = self.call
        assert call.seed is not None
        batch, heads = (torch.tensor(numbers, device=self.device) for numbers in (self.batch, self.heads))
        batch = (batch if call.batch_at is None else call.batch_at[batch]).repeat_interleave(len(self.heads))
        heads = (heads if call.head_at is None else call.head_at[heads]).repeat(len(self.batch))
        keep = dropout_tile(
            call.seed, batch, heads, query.unsqueeze(1), tiles.unsqueeze(1), self.index.block, call.dropout_p
        )
        return keep.to(self.dtype).mul_(dropout_scale(call.dropout_p))


def _head_runs(heads: list[int], ratio: int, limit: int) -> Iterator[tuple[range, range]]:
    """Cut a list of query heads into ranges that map onto a range of the key heads.

    With a ratio of 2, heads 0, 1, 2, 3, 5 are ranges 0 to 3, of key heads 0 and 1, and 5, of key head 2.
    """
    begin = 0
    while begin < len(heads):
        first, end = heads[begin], begin + 1
        is_aligned = first % ratio == 0
        while end < len(heads) and heads[end] == heads[end - 1] + 1:
            if heads[end] // ratio != first // ratio and not is_aligned:
                break
            end += 1
        count = end - begin
        if count > ratio:
            count = min(count // ratio, limit) * ratio
        kv_first = first // ratio
        yield range(first, first + count), range(kv_first, kv_first + -(-count // ratio))
        begin += count


def works(index: BlockIndex, tensors: tuple[Tensor, ...], call: Call) -> Iterator[Work]:
    """Cut a call by group. ``tensors`` starts with q, k and v and holds all whose heads are taken apart."""
    settle_exponentials()
    q, k, v = tensors[:3]
    n_batch, num_heads, n_kv = *q.shape[:2], k.shape[1]
    if n_batch == 0:
        return
    shared = index, plan_of(index), call, key_keep(call, k.shape[2]), accumulator(q), q.device
    ratio = num_heads // n_kv
    group = index.group.cpu().expand(n_batch, num_heads)
    limit = max(1, _HEADS_BYTES // (index.block * (q.shape[-1] + v.shape[-1]) * 4))
    # Batch elements are computed together if that copies nothing: heads and batch elements must merge into one stride.
    mergeable = all(x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1] for x in tensors)
    one = bool((group == group[0, 0]).all())
    if one and shared[3] is None and mergeable and n_batch * n_kv <= limit:
        yield Work(*shared, int(group[0, 0]), range(n_batch), range(num_heads), range(n_kv))
        return
    for b, row in enumerate(group.tolist()):
        for g in sorted(set(row)):
            for heads, kv_heads in _head_runs([h for h in range(num_heads) if row[h] == g], ratio, limit):
                yield Work(*shared, g, range(b, b + 1), heads, kv_heads)
