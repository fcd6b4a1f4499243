"""Cut a call: heads into units, launches into chunks of bounded memory, lists of tiles into splits.

Shapes: ``n`` row tiles of a chunk, ``H`` query heads and ``G`` key heads (times batch elements), ``m`` queries of a
tile, ``l`` keys of a split, ``D`` the head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.tiles import FULL
from ringtile.kernels.blockwise.plan import Launch, Plan, plan_of
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


class Unit(NamedTuple):
    """Heads and batch elements that share one group of the index: slices of ``[B, H]`` and ``[B, Hkv]``."""

    group: int
    batch: slice
    heads: slice
    kv_heads: slice

    def q(self, x: Tensor) -> Tensor:
        return x[self.batch, self.heads].flatten(0, 1)

    def k(self, x: Tensor) -> Tensor:
        return x[self.batch, self.kv_heads].flatten(0, 1)


def _head_runs(heads: list[int], ratio: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Cut a list of query heads into slices that map onto a slice of the key heads."""
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
        yield slice(first, first + count), slice(kv_first, kv_first + -(-count // ratio))
        begin += count


def _units(index: BlockIndex, tensors: tuple[Tensor, ...], n_kv: int, key_masked: bool) -> list[Unit]:
    q, v = tensors[0], tensors[2]
    n_batch, num_heads = q.shape[:2]
    if n_batch == 0:
        return []
    ratio = num_heads // n_kv
    group = index.group.cpu().expand(n_batch, num_heads)
    limit = max(1, _HEADS_BYTES // (index.block * (q.shape[-1] + v.shape[-1]) * 4))
    mergeable = all(x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1] for x in tensors)
    one = bool((group == group[0, 0]).all())
    if one and not key_masked and mergeable and n_batch * n_kv <= limit:
        everything = slice(None)
        return [Unit(int(group[0, 0]), everything, everything, everything)]
    units = []
    for b, row in enumerate(group.tolist()):
        for g in sorted(set(row)):
            for heads, kv_heads in _head_runs([h for h in range(num_heads) if row[h] == g], ratio, limit):
                units.append(Unit(g, slice(b, b + 1), heads, kv_heads))
    return units


class Split(NamedTuple):
    """Tiles ``[begin, end)`` of a launch's lists, with a mask or all full."""

    begin: int
    end: int
    masked: bool


def _cut(begin: int, end: int, limit: int, masked: bool) -> Iterator[Split]:
    count = max(1, -(-(end - begin) // limit))
    for number in range(count):
        a, b = begin + (end - begin) * number // count, begin + (end - begin) * (number + 1) // count
        if b > a:
            yield Split(a, b, masked)


def _splits(launch: Launch, block: int, limit: int, key_masked: bool) -> list[Split]:
    """Cut a launch's lists into splits of bounded length. Split masked tiles from full ones if that is cheaper."""
    count, partial = launch.tiles.shape[1], launch.n_partial
    masked_limit = max(1, min(limit, _MASK_BYTES // (4 * block * block)))
    shared = len(launch.tiles) == 1
    if partial == 0:
        return list(_cut(0, count, limit, key_masked))
    if (shared and count <= _SHORT_LIST) or partial * 4 >= count * 3:
        return list(_cut(0, count, masked_limit, True))
    if launch.run is None:
        return [*_cut(0, partial, masked_limit, True), *_cut(partial, count, limit, key_masked)]
    masked = (launch.tiles[0] != FULL).tolist()
    splits: list[Split] = []
    begin = 0
    for end in range(1, count + 1):
        if end == count or masked[end] != masked[begin]:
            splits += _cut(begin, end, masked_limit if masked[begin] else limit, masked[begin] or key_masked)
            begin = end
    return splits


class Chunk(NamedTuple):
    """Rows ``[begin, end)`` of a launch."""

    launch: Launch
    begin: int
    end: int
    splits: list[Split]

    def columns(self, split: Split) -> Tensor:
        """Return the column tiles of a split, ``[n, K]``, or ``[1, K]`` of a tall launch."""
        launch = self.launch
        if launch.run is None:
            assert launch.cols is not None
            return launch.cols[self.begin : self.end, split.begin : split.end]
        first, step = launch.run
        row = torch.zeros(1, dtype=torch.long) if launch.tall else torch.arange(self.begin, self.end)
        return first + row.unsqueeze(1) * step + torch.arange(split.begin, split.end)

    def first_column(self, split: Split) -> int:
        """Return the first column tile of a split in a run."""
        assert self.launch.run is not None
        first, step = self.launch.run
        return first + (0 if self.launch.tall else self.begin * step) + split.begin


class RowTiles:
    """Row tiles of a ``[H, Nq, ...]`` tensor, read and written as views if they are neighbors."""

    def __init__(self, x: Tensor, index: BlockIndex) -> None:
        self.x, self.block = x, index.block
        self.offset = index.start - index.first_row * index.block
        self.skipped = 1 if self.offset else 0
        begin = self.skipped * index.block - self.offset
        count = max(0, (index.n_queries - begin) // index.block)
        inside = x.narrow(1, begin, count * index.block) if count else x[:, :0]
        self.tiles: Tensor = inside.unflatten(1, (count, index.block))

    def _ragged(self, launch: Launch) -> Tensor:
        assert launch.trim is not None
        at = int(launch.rows[0]) * self.block - self.offset
        return self.x[:, at + launch.trim[0] : at + launch.trim[1]]

    def read(self, chunk: Chunk) -> Tensor:
        """Return the rows of a chunk, ``[n, H, m, ...]``, or ``[1, H, n * m, ...]`` of a tall launch."""
        launch, begin, end, _ = chunk
        if launch.trim:
            return self._ragged(launch).unsqueeze(0)
        if launch.first_row is None:
            rows = launch.rows[begin:end].to(self.x.device) - self.skipped
            return self.tiles.index_select(1, rows).transpose(0, 1)
        first = launch.first_row - self.skipped
        found = self.tiles[:, first + begin : first + end]
        return found.flatten(1, 2).unsqueeze(0) if launch.tall else found.transpose(0, 1)

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """Write the rows that `read` returns."""
        launch, begin, end, _ = chunk
        if launch.trim:
            self._ragged(launch).copy_(values.squeeze(0))
        elif launch.first_row is None:
            rows = launch.rows[begin:end].to(self.x.device) - self.skipped
            self.tiles.index_copy_(1, rows, values.transpose(0, 1).to(self.x.dtype))
        else:
            first = launch.first_row - self.skipped
            target = self.tiles[:, first + begin : first + end]
            target.copy_(values.squeeze(0).unflatten(1, target.shape[1:3]) if launch.tall else values.transpose(0, 1))


class ColumnTiles:
    """Column tiles of a ``[G, Nk, D]`` tensor, read as views or gathered, in a dtype."""

    def __init__(self, x: Tensor, index: BlockIndex, dtype: torch.dtype) -> None:
        self.x, self.block, self.dtype = x, index.block, dtype
        self.count = x.shape[1] // index.block
        tail = x[:, self.count * index.block :]
        self.tail = F.pad(tail, (0, 0, 0, index.block - tail.shape[1])) if tail.shape[1] else None

    def read(self, chunk: Chunk, split: Split) -> Tensor:
        """Return the keys of a split, ``[n, G, l, D]``."""
        x, block, launch = self.x, self.block, chunk.launch
        if launch.run is None:
            return self._gather(chunk.columns(split))
        step = launch.run[1]
        n = 1 if launch.tall else chunk.end - chunk.begin
        at = chunk.first_column(split) * block
        length = min((split.end - split.begin) * block, x.shape[1] - at)
        keys = x[:, at : at + (n - 1) * step * block + length].to(self.dtype)
        return keys.as_strided(
            (n, x.shape[0], length, x.shape[2]),
            (step * block * keys.stride(1), keys.stride(0), keys.stride(1), keys.stride(2)),
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

    def add(self, chunk: Chunk, split: Split, grad: Tensor) -> None:
        """Add the gradient ``[n, G, l, D]`` of the keys that `ColumnTiles.read` returns."""
        count, cols = split.end - split.begin, chunk.columns(split)
        if grad.shape[2] < count * self.block:
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
    """One unit's share of a call."""

    unit: Unit
    index: BlockIndex
    plan: Plan
    call: Call
    key_keep: Tensor | None
    """``[B, Nk]`` bool, the keys that the call's own mask and lengths keep."""
    dtype: torch.dtype
    batch: range
    heads: range
    device: torch.device

    @property
    def on_flash(self) -> bool:
        """True if PyTorch's flash kernel computes the call."""
        return on_flash(self.device, self.call)

    @property
    def scale(self) -> tuple[float, float]:
        """The part of the scale that multiplies the queries, and the rest."""
        return split_scale(self.call.scale, self.dtype) if self.on_flash else (1.0, self.call.scale)

    def rows(self, *tensors: Tensor) -> list[RowTiles]:
        """Return the row tiles of some tensors ``[B, H, Nq, ...]``."""
        return [RowTiles(self.unit.q(x), self.index) for x in tensors]

    def columns(self, *tensors: Tensor) -> list[ColumnTiles]:
        """Return the column tiles of some tensors ``[B, Hkv, Nk, D]``, with zeros for keys that no row keeps."""
        dead = None if self.plan.dead_keys is None else self.plan.dead_keys[self.unit.group].unsqueeze(0)
        dead = None if dead is None else dead.to(self.device)
        if self.key_keep is not None:
            masked = ~self.key_keep[self.unit.batch]
            dead = masked if dead is None else dead | masked
        parts = (self.unit.k(x) for x in tensors)
        clean = (x if dead is None else x.masked_fill(dead.unsqueeze(-1), 0) for x in parts)
        return [ColumnTiles(x, self.index, self.dtype) for x in clean]

    def sums(self, *tensors: Tensor) -> list[ColumnSums]:
        """Return the sums of some gradients ``[B, Hkv, Nk, D]``."""
        return [ColumnSums(self.unit.k(x), self.index.block) for x in tensors]

    def chunks(self, tile_bytes: int, row_bytes: int, view_bytes: int) -> Iterator[Chunk]:
        """Cut the unit's launches so that no chunk needs more than `CHUNK_BYTES`.

        A gathered tile needs ``tile_bytes``, a tile read as a view ``view_bytes``, a row tile's output ``row_bytes``.
        """
        block = self.index.block
        for launch in self.plan.launches:
            if launch.group != self.unit.group:
                continue
            rows = len(launch.rows)
            per_tile = tile_bytes if launch.run is None else view_bytes
            limit = max(1, CHUNK_BYTES // per_tile) if per_tile else launch.tiles.shape[1]
            splits = _splits(launch, block, limit, self.key_keep is not None)
            widest = max(split.end - split.begin for split in splits)
            own_mask = max((split.end - split.begin for split in splits if split.masked), default=0)
            if len(launch.tiles) == 1:
                own_mask = 0
            budget = rows
            if not launch.tall:
                budget = min(budget, max(1, CHUNK_BYTES // max(1, per_tile * widest)))
            budget = min(budget, max(1, _OUT_BYTES // row_bytes))
            if own_mask:
                budget = min(budget, max(1, 2 * _MASK_BYTES // (4 * own_mask * block * block)))
            count = -(-rows // budget)
            for number in range(count):
                yield Chunk(launch, rows * number // count, rows * (number + 1) // count, splits)

    def keep(self, chunk: Chunk, split: Split) -> Tensor | None:
        """Return the kept pairs, ``[n or 1, 1, m, l]`` bool, or None if all are kept."""
        if not split.masked:
            return None
        launch = chunk.launch
        keep: Tensor | None = None
        tiles = launch.tiles if len(launch.tiles) == 1 else launch.tiles[chunk.begin : chunk.end]
        tiles = tiles[:, split.begin : split.end]
        if bool((tiles != FULL).any()):
            keep = self.plan.mask(tiles)
            if launch.trim:
                keep = keep[:, launch.trim[0] : launch.trim[1]]
            if launch.run is not None:
                # The last tile of a run can be ragged.
                keep = keep[..., : self.index.n_keys - chunk.first_column(split) * self.index.block]
            keep = keep.to(self.device).unsqueeze(1)
        if self.key_keep is not None:
            keys = ColumnTiles(self.key_keep[self.unit.batch].unsqueeze(-1), self.index, torch.bool)
            of_keys = keys.read(chunk, split).squeeze(-1).unsqueeze(-2)
            keep = of_keys if keep is None else keep & of_keys
        return keep

    def positions(self, chunk: Chunk, split: Split) -> tuple[Tensor, Tensor]:
        """Return query positions ``[n, m]`` and the first key positions of the split's tiles ``[n, t]``."""
        index, launch = self.index, chunk.launch
        rows = launch.rows[chunk.begin : chunk.end].to(self.device)
        inside = torch.arange(*(launch.trim or (0, index.block)), device=self.device)
        query = index.row_positions(rows).unsqueeze(1) * index.block + inside
        if launch.tall:
            query = query.flatten().unsqueeze(0)
        return query, index.col_positions(chunk.columns(split).to(self.device)) * index.block

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


def works(index: BlockIndex, tensors: tuple[Tensor, ...], call: Call) -> Iterator[Work]:
    """Cut a call into units. ``tensors`` starts with q, k and v and holds all that the units slice."""
    settle_exponentials()
    q, k = tensors[0], tensors[1]
    plan, keep = plan_of(index), key_keep(call, k.shape[2])
    for unit in _units(index, tensors, k.shape[1], keep is not None):
        batch, heads = range(q.shape[0])[unit.batch], range(q.shape[1])[unit.heads]
        yield Work(unit, index, plan, call, keep, accumulator(q), batch, heads, q.device)
