"""How a call is cut: heads into units, launches into chunks of bounded memory, lists of tiles into parts.

Suffixes: ``n`` row tiles in a chunk, ``H`` query heads (times batch rows), ``G`` key heads (times batch rows), ``m``
queries in a tile, ``l`` keys in a part, ``D`` the head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.kernels.blockwise.plan import Launch, Plan, plan_of
from ringtile.kernels.contracts import Call, accumulator, key_keep
from ringtile.kernels.philox import dropout_scale, dropout_tile
from ringtile.layout.index import BlockIndex
from ringtile.layout.tiles import FULL

CHUNK_BYTES = 8 * 2**20
_MASK_BYTES = 4 * 2**20
_OUT_BYTES = 4 * 2**20
_HEADS_BYTES = 2**20
_SHORT_LIST = 16


@dataclass(frozen=True, eq=False)
class Options:
    """What a call asks for besides its tensors and its index."""

    scale: float
    dropout_p: float = 0.0
    seed: Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    key_keep: Tensor | None = None
    """``[B, Nk]`` bool: the keys that the call's own mask and lengths keep."""


def options_of(call: Call, k: Tensor) -> Options:
    return Options(call.scale, call.dropout_p, call.seed, call.softcap, call.alibi_slopes, key_keep(call, k.shape[2]))


def on_flash(device: torch.device, options: Options) -> bool:
    """Whether torch's flash kernel computes what these options ask for."""
    plain = options.dropout_p == 0.0 and options.softcap == 0.0 and options.alibi_slopes is None
    return plain and device.type == "cpu"


class Unit(NamedTuple):
    """Heads and batch rows that share one group of the index: slices of ``[B, H]`` and ``[B, Hkv]``."""

    group: int
    batch: slice
    heads: slice
    kv_heads: slice

    def q(self, x: Tensor) -> Tensor:
        return x[self.batch, self.heads].flatten(0, 1)

    def k(self, x: Tensor) -> Tensor:
        return x[self.batch, self.kv_heads].flatten(0, 1)


def _head_runs(heads: list[int], ratio: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Cut a list of query heads into slices that map onto a slice of the key heads."""
    begin = 0
    while begin < len(heads):
        first, end = heads[begin], begin + 1
        whole = first % ratio == 0
        while end < len(heads) and heads[end] == heads[end - 1] + 1:
            if heads[end] // ratio != first // ratio and not whole:
                break
            end += 1
        count = end - begin
        if count > ratio:
            count = min(count // ratio, most) * ratio
        kv_first = first // ratio
        yield slice(first, first + count), slice(kv_first, kv_first + -(-count // ratio))
        begin += count


def _units(index: BlockIndex, tensors: tuple[Tensor, ...], n_kv: int, options: Options) -> list[Unit]:
    q, v = tensors[0], tensors[2]
    n_batch, n_heads = q.shape[:2]
    if n_batch == 0:
        return []
    ratio = n_heads // n_kv
    group = index.group.cpu().expand(n_batch, n_heads)
    most = max(1, _HEADS_BYTES // (index.block * (q.shape[-1] + v.shape[-1]) * 4))
    mergeable = all(x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1] for x in tensors)
    one = bool((group == group[0, 0]).all())
    if one and options.key_keep is None and mergeable and n_batch * n_kv <= most:
        everything = slice(None)
        return [Unit(int(group[0, 0]), everything, everything, everything)]
    units = []
    for b, row in enumerate(group.tolist()):
        for g in sorted(set(row)):
            for heads, kv_heads in _head_runs([h for h in range(n_heads) if row[h] == g], ratio, most):
                units.append(Unit(g, slice(b, b + 1), heads, kv_heads))
    return units


class Part(NamedTuple):
    """Tiles ``[begin, end)`` of a launch's lists, with a mask or all full."""

    begin: int
    end: int
    masked: bool


def _segments(begin: int, end: int, most: int, masked: bool) -> Iterator[Part]:
    pieces = max(1, -(-(end - begin) // most))
    for piece in range(pieces):
        a, b = begin + (end - begin) * piece // pieces, begin + (end - begin) * (piece + 1) // pieces
        if b > a:
            yield Part(a, b, masked)


def _parts(launch: Launch, rows: int, most: int, key_masked: bool) -> list[Part]:
    """How a launch's lists are cut: masked apart from full where that is cheaper, and into bounded pieces."""
    count, partial = launch.tiles.shape[1], launch.n_partial
    most_masked = max(1, min(most, _MASK_BYTES // (4 * rows * rows)))
    shared = len(launch.tiles) == 1
    if partial == 0:
        return list(_segments(0, count, most, key_masked))
    if (shared and count <= _SHORT_LIST) or partial * 4 >= count * 3:
        return list(_segments(0, count, most_masked, True))
    if launch.run is None:
        return [*_segments(0, partial, most_masked, True), *_segments(partial, count, most, key_masked)]
    masked = (launch.tiles[0] != FULL).tolist()
    parts: list[Part] = []
    begin = 0
    for end in range(1, count + 1):
        if end == count or masked[end] != masked[begin]:
            limit = most_masked if masked[begin] else most
            parts += _segments(begin, end, limit, masked[begin] or key_masked)
            begin = end
    return parts


class RowTiles:
    """Row tiles of a ``[H, Nq, ...]`` tensor, read and written as views where they are neighbours."""

    def __init__(self, x: Tensor, index: BlockIndex) -> None:
        self.x, self.block = x, index.block
        self.offset = index.start - index.first_row * index.block
        self.skipped = 1 if self.offset else 0
        begin = self.skipped * index.block - self.offset
        count = max(0, (index.n_queries - begin) // index.block)
        whole = x.narrow(1, begin, count * index.block) if count else x[:, :0]
        self.whole: Tensor = whole.unflatten(1, (count, index.block))

    def _ragged(self, launch: Launch) -> Tensor:
        assert launch.trim is not None
        at = int(launch.rows[0]) * self.block - self.offset
        return self.x[:, at + launch.trim[0] : at + launch.trim[1]]

    def take(self, launch: Launch, begin: int, end: int) -> Tensor:
        """``[n, H, m, ...]`` of the launch's rows ``[begin, end)``; ``[1, H, n * m, ...]`` of a tall one."""
        if launch.trim:
            return self._ragged(launch).unsqueeze(0)
        if launch.first_row is None:
            rows = launch.rows[begin:end].to(self.x.device) - self.skipped
            return self.whole.index_select(1, rows).transpose(0, 1)
        first = launch.first_row - self.skipped
        found = self.whole[:, first + begin : first + end]
        return found.flatten(1, 2).unsqueeze(0) if launch.tall else found.transpose(0, 1)

    def put(self, launch: Launch, begin: int, end: int, piece: Tensor) -> None:
        """Write what `take` would read."""
        if launch.trim:
            self._ragged(launch).copy_(piece.squeeze(0))
        elif launch.first_row is None:
            rows = launch.rows[begin:end].to(self.x.device) - self.skipped
            self.whole.index_copy_(1, rows, piece.transpose(0, 1).to(self.x.dtype))
        else:
            first = launch.first_row - self.skipped
            place = self.whole[:, first + begin : first + end]
            place.copy_(piece.squeeze(0).unflatten(1, place.shape[1:3]) if launch.tall else piece.transpose(0, 1))


class ColumnTiles:
    """Column tiles of a ``[G, Nk, D]`` tensor, read as views or gathered; in float32 or better."""

    def __init__(self, x: Tensor, index: BlockIndex, dtype: torch.dtype) -> None:
        self.x, self.block, self.dtype = x, index.block, dtype
        whole = x.shape[1] // index.block
        self.whole = whole
        tail = x[:, whole * index.block :]
        self.tail = F.pad(tail, (0, 0, 0, index.block - tail.shape[1])) if tail.shape[1] else None

    def take(self, launch: Launch, begin: int, end: int, part: Part) -> Tensor:
        """``[n, G, l, D]``."""
        x, block = self.x, self.block
        count = part.end - part.begin
        if launch.run is None:
            return self._gather(launch, begin, end, part)
        first, step = launch.run
        n = 1 if launch.tall else end - begin
        at = (first + (0 if launch.tall else begin * step) + part.begin) * block
        length = min(count * block, x.shape[1] - at)
        span = x[:, at : at + (n - 1) * step * block + length].to(self.dtype)
        return span.as_strided(
            (n, x.shape[0], length, x.shape[2]),
            (step * block * span.stride(1), span.stride(0), span.stride(1), span.stride(2)),
        )

    def _gather(self, launch: Launch, begin: int, end: int, part: Part) -> Tensor:
        x, block = self.x, self.block
        assert launch.cols is not None
        cols = launch.cols[begin:end, part.begin : part.end]
        flat = cols.flatten()
        late = (flat >= self.whole).nonzero().squeeze(1) if self.tail is not None else flat[:0]
        flat = flat.to(x.device)
        if self.whole:
            tiles = x[:, : self.whole * block].unflatten(1, (self.whole, block))
            found = tiles.index_select(1, flat.clamp(max=self.whole - 1) if len(late) else flat).to(self.dtype)
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
        self.whole = x[:, : self.count * block].unflatten(1, (self.count, block))

    def add(self, launch: Launch, begin: int, end: int, part: Part, piece: Tensor) -> None:
        """Add the gradients ``[n, G, l, D]`` of the keys that `ColumnTiles.take` gave."""
        count = part.end - part.begin
        if launch.run is not None:
            first, step = launch.run
            rows = torch.zeros(1, dtype=torch.long) if launch.tall else torch.arange(begin, end)
            cols = first + rows.unsqueeze(1) * step + torch.arange(part.begin, part.end)
        else:
            assert launch.cols is not None
            cols = launch.cols[begin:end, part.begin : part.end]
        if piece.shape[2] < count * self.block:
            inside = (count - 1) * self.block
            self.x[:, self.count * self.block :] += piece[:, :, inside:].sum(0)
            if not inside:
                return
            piece, cols, count = piece[:, :, :inside], cols[:, :-1], count - 1
        pieces = piece.unflatten(2, (count, self.block)).transpose(0, 1).flatten(1, 2)
        cols = cols.flatten()
        late = cols >= self.count
        if bool(late.any()):
            tail = self.x[:, self.count * self.block :]
            tail += pieces[:, late.nonzero().squeeze(1).to(pieces.device), : tail.shape[1]].sum(1)
            kept = (~late).nonzero().squeeze(1)
            pieces, cols = pieces[:, kept.to(pieces.device)], cols[kept]
        if pieces.is_cpu:
            self.whole.index_add_(1, cols, pieces)
        else:
            heads = torch.arange(pieces.shape[0], device=pieces.device).unsqueeze(1)
            self.whole.index_put_((heads, cols.to(pieces.device)), pieces, True)


class Chunk(NamedTuple):
    launch: Launch
    begin: int
    end: int
    parts: list[Part]


@dataclass(frozen=True, eq=False)
class Work:
    """One unit's share of a call."""

    unit: Unit
    index: BlockIndex
    plan: Plan
    options: Options
    dtype: torch.dtype
    batch: range
    heads: range
    device: torch.device

    def chunks(self, tile_bytes: int, row_bytes: int, view_bytes: int) -> Iterator[Chunk]:
        """Cut the unit's launches so that no chunk holds more than `CHUNK_BYTES`.

        ``tile_bytes`` is what a gathered tile costs, ``view_bytes`` what one read as a view costs, ``row_bytes`` what
        a row tile's output costs.
        """
        block = self.index.block
        for launch in self.plan.launches:
            if launch.group != self.unit.group:
                continue
            rows = len(launch.rows)
            per_tile = tile_bytes if launch.run is None else view_bytes
            most = max(1, CHUNK_BYTES // per_tile) if per_tile else launch.tiles.shape[1]
            parts = _parts(launch, block, most, self.options.key_keep is not None)
            widest = max(part.end - part.begin for part in parts)
            own_mask = max((part.end - part.begin for part in parts if part.masked), default=0)
            if len(launch.tiles) == 1:
                own_mask = 0
            budget = rows
            if not launch.tall:
                budget = min(budget, max(1, CHUNK_BYTES // max(1, per_tile * widest)))
            budget = min(budget, max(1, _OUT_BYTES // row_bytes))
            if own_mask:
                budget = min(budget, max(1, 2 * _MASK_BYTES // (4 * own_mask * block * block)))
            pieces = -(-rows // budget)
            for piece in range(pieces):
                yield Chunk(launch, rows * piece // pieces, rows * (piece + 1) // pieces, parts)

    def keep(self, chunk: Chunk, part: Part) -> Tensor | None:
        """``[n or 1, 1, m, l]`` bool of the kept pairs, or None where all are kept."""
        if not part.masked:
            return None
        launch, key_keep = chunk.launch, self.options.key_keep
        keep: Tensor | None = None
        tiles = launch.tiles if len(launch.tiles) == 1 else launch.tiles[chunk.begin : chunk.end]
        tiles = tiles[:, part.begin : part.end]
        if bool((tiles != FULL).any()):
            keep = self.plan.mask(tiles)
            if launch.trim:
                keep = keep[:, launch.trim[0] : launch.trim[1]]
            first = self._first_key(chunk, part)
            if first is not None:
                keep = keep[..., : self.index.n_keys - first]
            keep = keep.to(self.device).unsqueeze(1)
        if key_keep is not None:
            keys = ColumnTiles(key_keep[self.unit.batch].unsqueeze(-1), self.index, torch.bool)
            theirs = keys.take(launch, chunk.begin, chunk.end, part).squeeze(-1).unsqueeze(-2)
            keep = theirs if keep is None else keep & theirs
        return keep

    def _first_key(self, chunk: Chunk, part: Part) -> int | None:
        """Position of the first key of a run whose last tile may be ragged."""
        if chunk.launch.run is None:
            return None
        first, step = chunk.launch.run
        return (first + (0 if chunk.launch.tall else chunk.begin * step) + part.begin) * self.index.block

    def positions(self, chunk: Chunk, part: Part) -> tuple[Tensor, Tensor]:
        """Query positions ``[n, m]`` and the first key positions of the part's tiles ``[n, t]``."""
        index, launch = self.index, chunk.launch
        rows = launch.rows[chunk.begin : chunk.end].unsqueeze(1)
        query = (index.first_row + rows) * index.block + torch.arange(*(launch.trim or (0, index.block)))
        if launch.run is None:
            assert launch.cols is not None
            cols = launch.cols[chunk.begin : chunk.end, part.begin : part.end]
        else:
            first, step = launch.run
            row = torch.zeros(1, dtype=torch.long) if launch.tall else torch.arange(chunk.begin, chunk.end)
            cols = first + row.unsqueeze(1) * step + torch.arange(part.begin, part.end)
        if launch.tall:
            query = query.flatten().unsqueeze(0)
        return query.to(self.device), (cols * index.block).to(self.device)

    def bias(self, query: Tensor, key: Tensor) -> Tensor:
        """ALiBi's ``-slope * |i - j|``: positions ``[n, m]`` and ``[n, l]`` to ``[n, H, m, l]``."""
        assert self.options.alibi_slopes is not None
        slopes = self.options.alibi_slopes[self.heads.start : self.heads.stop].to(self.dtype).repeat(len(self.batch))
        distance = (query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)
        return distance * -slopes.view(1, -1, 1, 1)

    def dropout(self, query: Tensor, tiles: Tensor) -> Tensor:
        """What dropout multiplies weights by, ``[n, H, m, t * block]``; tiles are their first key positions."""
        options = self.options
        assert options.seed is not None
        batch = torch.tensor(self.batch, device=self.device).repeat_interleave(len(self.heads))
        heads = torch.tensor(self.heads, device=self.device).repeat(len(self.batch))
        keep = dropout_tile(
            options.seed, batch, heads, query.unsqueeze(1), tiles.unsqueeze(1), self.index.block, options.dropout_p
        )
        return keep.to(self.dtype).mul_(dropout_scale(options.dropout_p))


def works(index: BlockIndex, tensors: tuple[Tensor, ...], options: Options) -> Iterator[Work]:
    q, k = tensors[0], tensors[1]
    plan = plan_of(index)
    for unit in _units(index, tensors, k.shape[1], options):
        batch, heads = range(q.shape[0])[unit.batch], range(q.shape[1])[unit.heads]
        yield Work(unit, index, plan, options, accumulator(q), batch, heads, q.device)


def dead_keys(work: Work) -> Tensor | None:
    """``[1, Nk]`` bool of the keys that no row keeps: their memory may hold anything."""
    dead = None if work.plan.dead_keys is None else work.plan.dead_keys[work.unit.group].unsqueeze(0).to(work.device)
    if work.options.key_keep is not None:
        masked = ~work.options.key_keep[work.unit.batch]
        dead = masked if dead is None else dead | masked
    return dead


def without(x: Tensor, dead: Tensor | None) -> Tensor:
    return x if dead is None else x.masked_fill(dead.unsqueeze(-1), 0)
