"""Block-sparse attention in torch operations, on any device and in any floating dtype.

Row tiles whose lists have the same shape are computed together (see `plan`), neighbouring columns as views, in chunks
of bounded memory. On a CPU the products run in torch's own flash kernel; dropout, softcap, ALiBi, second derivatives and
other devices take plain matrix products. Half types are computed in float32.

Suffixes: ``n`` row tiles in a chunk, ``H`` query heads (times batch rows), ``G`` key heads (times batch rows), ``m``
queries in a tile, ``l`` keys in a part, ``D`` the head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.kernels.contracts import Call, index_of, key_keep
from ringtile.kernels.philox import dropout_scale, dropout_tile
from ringtile.kernels.plan import FULL, Launch, Plan, plan_of
from ringtile.layout.index import BlockIndex

CHUNK_BYTES = 16 * 2**20
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


def _options(call: Call, k: Tensor) -> Options:
    return Options(
        call.scale, call.dropout_p, call.seed, call.softcap, call.alibi_slopes, key_keep(call, k.shape[2])
    )


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Reasons why this backend cannot serve a call: none, it is the fallback everywhere."""
    return []


def _plain(options: Options) -> bool:
    """Whether torch's flash kernel computes what these options ask for."""
    return options.dropout_p == 0.0 and options.softcap == 0.0 and options.alibi_slopes is None


class _Unit(NamedTuple):
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


def _units(index: BlockIndex, tensors: tuple[Tensor, ...], n_kv: int, options: Options) -> list[_Unit]:
    q, k, v = tensors[:3]
    n_batch, n_heads = q.shape[:2]
    ratio = n_heads // n_kv
    group = index.group.cpu().expand(n_batch, n_heads)
    most = max(1, _HEADS_BYTES // (index.block * (q.shape[-1] + v.shape[-1]) * 4))
    mergeable = all(x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1] for x in tensors)
    one = bool((group == group[0, 0]).all())
    if one and options.key_keep is None and mergeable and n_batch * n_kv <= most:
        everything = slice(None)
        return [_Unit(int(group[0, 0]), everything, everything, everything)]
    units = []
    for b, row in enumerate(group.tolist()):
        for g in sorted(set(row)):
            for heads, kv_heads in _head_runs([h for h in range(n_heads) if row[h] == g], ratio, most):
                units.append(_Unit(g, slice(b, b + 1), heads, kv_heads))
    return units


class _Part(NamedTuple):
    """Tiles ``[begin, end)`` of a launch's lists, with a mask or all full."""

    begin: int
    end: int
    masked: bool


def _segments(begin: int, end: int, most: int, masked: bool) -> Iterator[_Part]:
    pieces = max(1, -(-(end - begin) // most))
    for piece in range(pieces):
        a, b = begin + (end - begin) * piece // pieces, begin + (end - begin) * (piece + 1) // pieces
        if b > a:
            yield _Part(a, b, masked)


def _parts(launch: Launch, rows: int, most: int, key_masked: bool) -> list[_Part]:
    """How a launch's lists are cut: masked apart from full where that is cheaper, and into bounded pieces."""
    count, partial = launch.tiles.shape[1], launch.n_partial
    most_masked = max(1, min(most, _MASK_BYTES // (4 * rows * rows)))
    shared = len(launch.tiles) == 1
    if partial == 0:
        return list(_segments(0, count, most, key_masked))
    if launch.tall or (shared and count <= _SHORT_LIST) or partial * 4 >= count * 3:
        return list(_segments(0, count, most_masked, True))
    if launch.run is None:
        return [*_segments(0, partial, most_masked, True), *_segments(partial, count, most, key_masked)]
    masked = (launch.tiles[0] != FULL).tolist()
    parts, begin = [], 0
    for end in range(1, count + 1):
        if end == count or masked[end] != masked[begin]:
            limit = most_masked if masked[begin] else most
            parts += _segments(begin, end, limit, masked[begin] or key_masked)
            begin = end
    return parts


class _Queries:
    """Row tiles of a ``[H, Nq, ...]`` tensor: ``[H, R, m, ...]``, padded with zeros where ragged."""

    def __init__(self, x: Tensor, index: BlockIndex) -> None:
        rows, block = index.n_rows, index.block
        offset = index.start - index.first_row * block
        if rows == 1:
            self.tiles = x.unsqueeze(1)
            return
        if offset or rows * block != index.n_queries:
            padding = (offset, rows * block - offset - index.n_queries)
            x = F.pad(x, (0, 0) * (x.dim() - 2) + padding)
        self.tiles = x.unflatten(1, (rows, block))

    def like(self, padded: Tensor) -> _Queries:
        """Row tiles of a tensor that has room for the padding already."""
        other = object.__new__(_Queries)
        other.tiles = padded.unsqueeze(1) if self.tiles.shape[1] == 1 else padded.unflatten(1, self.tiles.shape[1:3])
        return other

    def take(self, launch: Launch, begin: int, end: int) -> Tensor:
        """``[n, H, m, ...]`` of the launch's rows ``[begin, end)``; ``[1, H, n * m, ...]`` of a tall one."""
        if launch.first_row is None:
            return self.tiles.index_select(1, launch.rows[begin:end].to(self.tiles.device)).transpose(0, 1)
        found = self.tiles[:, launch.first_row + begin : launch.first_row + end]
        return found.flatten(1, 2).unsqueeze(0) if launch.tall else found.transpose(0, 1)

    def put(self, launch: Launch, begin: int, end: int, piece: Tensor) -> None:
        """Write what `take` would read."""
        if launch.first_row is None:
            rows = launch.rows[begin:end].to(self.tiles.device)
            self.tiles.index_copy_(1, rows, piece.transpose(0, 1).to(self.tiles.dtype))
            return
        place = self.tiles[:, launch.first_row + begin : launch.first_row + end]
        place.copy_(piece.squeeze(0).unflatten(1, place.shape[1:3]) if launch.tall else piece.transpose(0, 1))


class _Keys:
    """Column tiles of a ``[G, Nk, D]`` tensor, read as views or gathered; in float32 or better."""

    def __init__(self, x: Tensor, index: BlockIndex, dtype: torch.dtype) -> None:
        self.x, self.block, self.dtype = x, index.block, dtype
        whole = x.shape[1] // index.block
        self.whole = whole
        tail = x[:, whole * index.block :]
        self.tail = F.pad(tail, (0, 0, 0, index.block - tail.shape[1])) if tail.shape[1] else None

    def take(self, launch: Launch, begin: int, end: int, part: _Part) -> Tensor:
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

    def _gather(self, launch: Launch, begin: int, end: int, part: _Part) -> Tensor:
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
        return found.view(x.shape[0], len(cols), -1, x.shape[2]).transpose(0, 1)


class _KeyGradient:
    """The gradient of a ``[G, Nk, D]`` tensor, summed tile by tile in a fixed order."""

    def __init__(self, x: Tensor, block: int) -> None:
        self.tiles = x.unflatten(1, (-1, block))

    def add(self, launch: Launch, begin: int, end: int, part: _Part, piece: Tensor) -> None:
        n, heads, length, dim = piece.shape
        count, block = part.end - part.begin, self.tiles.shape[2]
        if length < count * block:
            piece = F.pad(piece, (0, 0, 0, count * block - length))
        if launch.run is not None:
            first, step = launch.run
            rows = torch.zeros(1, dtype=torch.long) if launch.tall else torch.arange(begin, end)
            cols = (first + rows.unsqueeze(1) * step + torch.arange(part.begin, part.end)).flatten()
        else:
            assert launch.cols is not None
            cols = launch.cols[begin:end, part.begin : part.end].flatten()
        pieces = piece.unflatten(2, (count, block)).transpose(0, 1).flatten(1, 2)
        if pieces.is_cpu:
            self.tiles.index_add_(1, cols, pieces)
        else:
            self.tiles.index_put_((torch.arange(heads, device=piece.device).unsqueeze(1), cols.to(piece.device)), pieces, True)


class _Chunk(NamedTuple):
    launch: Launch
    begin: int
    end: int
    parts: list[_Part]


@dataclass(frozen=True, eq=False)
class _Work:
    """One unit's share of a call."""

    unit: _Unit
    index: BlockIndex
    plan: Plan
    options: Options
    dtype: torch.dtype
    batch: range
    heads: range
    device: torch.device

    def chunks(self, tile_bytes: int, row_bytes: int, view_bytes: int) -> Iterator[_Chunk]:
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
            if len(launch.tiles) == 1 and not launch.tall:
                own_mask = 0
            budget = rows
            if not launch.tall:
                budget = min(budget, max(1, CHUNK_BYTES // max(1, per_tile * widest)))
            budget = min(budget, max(1, _OUT_BYTES // row_bytes))
            if own_mask:
                budget = min(budget, max(1, 2 * _MASK_BYTES // (4 * own_mask * block * block)))
            pieces = -(-rows // budget)
            for piece in range(pieces):
                yield _Chunk(launch, rows * piece // pieces, rows * (piece + 1) // pieces, parts)

    def keep(self, chunk: _Chunk, part: _Part) -> Tensor | None:
        """``[n or 1, 1, m, l]`` bool of the kept pairs, or None where all are kept."""
        if not part.masked:
            return None
        launch, key_keep = chunk.launch, self.options.key_keep
        keep: Tensor | None = None
        tiles = launch.tiles if len(launch.tiles) == 1 else launch.tiles[chunk.begin : chunk.end]
        tiles = tiles[:, part.begin : part.end]
        if bool((tiles != FULL).any()):
            keep = self.plan.mask(tiles)
            if self.index.n_rows == 1:
                offset = self.index.start - self.index.first_row * self.index.block
                keep = keep[:, offset : offset + self.index.n_queries]
            if launch.tall:
                keep = keep.flatten(0, 1).unsqueeze(0)
            first = self._first_key(chunk, part)
            if first is not None:
                keep = keep[..., : self.index.n_keys - first]
            keep = keep.to(self.device).unsqueeze(1)
        if key_keep is not None:
            keys = _Keys(key_keep[self.unit.batch].unsqueeze(-1), self.index, torch.bool)
            theirs = keys.take(launch, chunk.begin, chunk.end, part).squeeze(-1).unsqueeze(-2)
            keep = theirs if keep is None else keep & theirs
        return keep

    def _first_key(self, chunk: _Chunk, part: _Part) -> int | None:
        """Position of the first key of a run whose last tile may be ragged."""
        if chunk.launch.run is None:
            return None
        first, step = chunk.launch.run
        return (first + (0 if chunk.launch.tall else chunk.begin * step) + part.begin) * self.index.block

    def positions(self, chunk: _Chunk, part: _Part) -> tuple[Tensor, Tensor]:
        """Query positions ``[n, m]`` and the first key positions of the part's tiles ``[n, t]``."""
        index, launch = self.index, chunk.launch
        if index.n_rows == 1:
            query = index.start + torch.arange(index.n_queries).unsqueeze(0)
        else:
            rows = launch.rows[chunk.begin : chunk.end].unsqueeze(1)
            query = (index.first_row + rows) * index.block + torch.arange(index.block)
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


def _works(index: BlockIndex, tensors: tuple[Tensor, ...], options: Options) -> Iterator[_Work]:
    q, k = tensors[0], tensors[1]
    plan = plan_of(index)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for unit in _units(index, tensors, k.shape[1], options):
        batch, heads = range(q.shape[0])[unit.batch], range(q.shape[1])[unit.heads]
        yield _Work(unit, index, plan, options, dtype, batch, heads, q.device)


def _dead_keys(work: _Work) -> Tensor | None:
    """``[1, Nk]`` bool of the keys that no row keeps: their memory may hold anything."""
    dead = None if work.plan.dead_keys is None else work.plan.dead_keys[work.unit.group].unsqueeze(0).to(work.device)
    if work.options.key_keep is not None:
        masked = ~work.options.key_keep[work.unit.batch]
        dead = masked if dead is None else dead | masked
    return dead


def _without(x: Tensor, dead: Tensor | None) -> Tensor:
    return x if dead is None else x.masked_fill(dead.unsqueeze(-1), 0)


def _combine(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts of a softmax."""
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -math.inf, 0)
    return out * (lse - safe).exp().unsqueeze(-1) + more * (more_lse - safe).exp().unsqueeze(-1), total


def _additive(keep: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if keep is None:
        return None
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -math.inf)


class _Scores(NamedTuple):
    """Scores of one part, all ``[n, H, m, l]``."""

    scores: Tensor
    """Masked: -inf where the pair is not kept."""
    dropout: Tensor | None
    """What dropout multiplies the weights by."""
    capped: Tensor | None
    """``tanh(scores / softcap)`` before the mask."""

    def weights(self, lse: Tensor) -> Tensor:
        """The softmax; an empty row has lse 0 here and so weighs nothing."""
        return (self.scores - lse.unsqueeze(-1)).exp_()

    def dropped(self, weights: Tensor) -> Tensor:
        return weights if self.dropout is None else weights * self.dropout

    def through_softcap(self, grad: Tensor) -> Tensor:
        return grad if self.capped is None else grad * (1 - self.capped * self.capped)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """``[n, H, m, x] @ [n, G, x, y]``: every key head serves its query heads."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    return (a.unflatten(1, (b.shape[1], -1)).flatten(2, 3) @ b).unflatten(2, (-1, a.shape[2])).flatten(1, 2)


def _matmul_keys(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """``[n, H, m, l]^T @ [n, H, m, D]``, summed over the query heads of each key head: ``[n, G, l, D]``."""
    if a.shape[1] != heads:
        a, b = (x.unflatten(1, (heads, -1)).flatten(2, 3) for x in (a, b))
    return a.transpose(-1, -2) @ b


def _scores(work: _Work, chunk: _Chunk, part: _Part, q: Tensor, k: Tensor) -> _Scores:
    options, length = work.options, k.shape[2]
    scores = _matmul(q, k.transpose(-1, -2)) * options.scale
    capped = dropout = None
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        scores = capped * options.softcap
    if not _plain(options):
        query, tiles = work.positions(chunk, part)
        if options.alibi_slopes is not None:
            key = (tiles.unsqueeze(-1) + torch.arange(work.index.block, device=work.device)).flatten(1)
            scores = scores + work.bias(query, key[:, :length])
        if options.dropout_p:
            dropout = work.dropout(query, tiles)[..., :length]
    keep = work.keep(chunk, part)
    return _Scores(scores if keep is None else scores.masked_fill(~keep, -math.inf), dropout, capped)


def _uses_flash(work: _Work) -> bool:
    return work.device.type == "cpu" and _plain(work.options)


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _part_forward(work: _Work, chunk: _Chunk, part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[n, H, m, Dv]`` and lse ``[n, H, m]`` of one part of the softmax."""
    if not _uses_flash(work):
        found = _scores(work, chunk, part, q, k)
        lse = found.scores.logsumexp(-1)
        weights = found.weights(lse.masked_fill(lse == -math.inf, 0))
        return _matmul(found.dropped(weights), v), lse
    keep, width = work.keep(chunk, part), max(q.shape[-1], v.shape[-1])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _padded(q, width),
        _padded(k, width),
        _padded(v, width),
        attn_mask=_additive(keep, q.dtype),
        scale=work.options.scale,
    )
    if keep is not None:
        empty = ~keep.any(-1)
        if bool(empty.any()):
            lse, out = lse.masked_fill(empty, -math.inf), out.masked_fill(empty.unsqueeze(-1), 0)
    return out[..., : v.shape[-1]], lse


def _part_backward(
    work: _Work, chunk: _Chunk, part: _Part, grads: _Grads, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part, given the output and lse of the whole softmax."""
    heads = k.shape[1]
    if not _uses_flash(work):
        found = _scores(work, chunk, part, q, k)
        weights = found.weights(grads.lse)
        grad_v = _matmul_keys(found.dropped(weights), grads.out_grad, heads)
        grad_weights = found.dropped(_matmul(grads.out_grad, v.transpose(-1, -2)))
        grad_scores = found.through_softcap(weights * (grad_weights - grads.delta.unsqueeze(-1))) * work.options.scale
        return _matmul(grad_scores, k), _matmul_keys(grad_scores, q, heads), grad_v
    out, out_grad = grads.out, grads.out_grad
    width = max(q.shape[-1], v.shape[-1])
    if grads.lse_grad is not None:
        # One more column: the kernel's own rowsum(out_grad * out) then comes out as delta - lse_grad.
        out_grad = torch.cat([out_grad, torch.ones_like(out_grad[..., :1])], -1)
        out = torch.cat([out, -grads.lse_grad.unsqueeze(-1)], -1)
        width = max(width, out.shape[-1])
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _padded(out_grad, width),
        _padded(q, width),
        _padded(k, width),
        _padded(v, width),
        _padded(out, width),
        grads.lse,
        0.0,
        False,
        attn_mask=_additive(work.keep(chunk, part), q.dtype),
        scale=work.options.scale,
    )
    return grad_q[..., : q.shape[-1]], grad_k[..., : k.shape[-1]], grad_v[..., : v.shape[-1]]


class _Grads(NamedTuple):
    """What a chunk's backward needs of its rows; lse is 0 and everything else zero on empty rows."""

    out_grad: Tensor
    out: Tensor
    lse: Tensor
    lse_grad: Tensor | None
    delta: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` in q's dtype and lse ``[B, H, Nq]`` (float32, float64 for float64)."""
    index, options = index_of(call, q, k), _options(call, k)
    batch, heads, length = q.shape[:3]
    rows = index.n_rows * index.block if index.n_rows > 1 else length
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, heads, rows, v.shape[-1]))
    lse = q.new_empty((batch, heads, rows), dtype=dtype)
    for work in _works(index, (q, k, v), options):
        unit, dead = work.unit, _dead_keys(work)
        keys, values = (_Keys(_without(unit.k(x), dead), index, dtype) for x in (k, v))
        queries = _Queries(unit.q(q), index)
        out_rows, lse_rows = queries.like(unit.q(out)), queries.like(unit.q(lse))
        for group, idle in work.plan.idle_rows:
            if group == unit.group:
                out_rows.tiles[:, idle] = 0
                lse_rows.tiles[:, idle] = -math.inf
        for chunk in work.chunks(*_costs(work, k, v, dtype, backward=False)):
            at = (chunk.launch, chunk.begin, chunk.end)
            q_chunk = queries.take(*at).to(dtype)
            total: tuple[Tensor, Tensor] | None = None
            for part in chunk.parts:
                found = _part_forward(work, chunk, part, q_chunk, keys.take(*at, part), values.take(*at, part))
                total = found if total is None else _combine(*total, *found)
            assert total is not None
            out_rows.put(*at, total[0])
            lse_rows.put(*at, total[1])
    return _inside(out, index), _inside(lse, index)


def _inside(x: Tensor, index: BlockIndex) -> Tensor:
    """Cut what `_Queries` padded off again."""
    if x.shape[2] == index.n_queries:
        return x
    offset = index.start - index.first_row * index.block
    return x[:, :, offset : offset + index.n_queries].contiguous()


def _costs(work: _Work, k: Tensor, v: Tensor, dtype: torch.dtype, *, backward: bool) -> tuple[int, int, int]:
    """Bytes of a gathered tile, of a row tile's output, and of a tile that is read as a view."""
    block, size = work.index.block, dtype.itemsize
    kv_heads = len(range(k.shape[1])[work.unit.kv_heads]) * len(work.batch)
    heads = len(work.heads) * len(work.batch)
    tile = kv_heads * block * (k.shape[-1] + v.shape[-1]) * size
    scores = 0 if _uses_flash(work) else 4 * heads * block * block * size
    view = (tile if backward else 0) + scores
    return tile + view, heads * block * v.shape[-1] * size, view


def backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous and in their dtype."""
    index, options = index_of(call, q, k), _options(call, k)
    dtype, block = lse.dtype, index.block
    rows = index.n_rows * block if index.n_rows > 1 else q.shape[2]
    q_grad = q.new_zeros((*q.shape[:2], rows, q.shape[-1]))
    columns = index.n_cols * block
    k_grad, v_grad = (torch.zeros(*x.shape[:2], columns, x.shape[-1], dtype=dtype, device=x.device) for x in (k, v))
    for work in _works(index, (q, k, v, out_grad, out, lse), options):
        unit, dead = work.unit, _dead_keys(work)
        keys, values = (_Keys(_without(unit.k(x), dead), index, dtype) for x in (k, v))
        k_sum, v_sum = (_KeyGradient(unit.k(x), block) for x in (k_grad, v_grad))
        theirs = _RowInputs(work, q, out_grad, lse_grad, out, lse)
        q_rows = theirs.q.like(unit.q(q_grad))
        for chunk in work.chunks(*_costs(work, k, v, dtype, backward=True)):
            at = (chunk.launch, chunk.begin, chunk.end)
            q_chunk, grads = theirs.take(at)
            total: Tensor | None = None
            for part in chunk.parts:
                found = _part_backward(
                    work, chunk, part, grads, q_chunk, keys.take(*at, part), values.take(*at, part)
                )
                total = found[0] if total is None else total + found[0]
                k_sum.add(*at, part, found[1])
                v_sum.add(*at, part, found[2])
            assert total is not None
            q_rows.put(*at, total)
    cut = (x[:, :, : index.n_keys].to(q.dtype).contiguous() for x in (k_grad, v_grad))
    return (_inside(q_grad, index), *cut)


class _RowInputs:
    """The row side of a backward pass; whatever empty rows hold is replaced by zeros."""

    def __init__(
        self, work: _Work, q: Tensor, out_grad: Tensor, lse_grad: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        unit, index = work.unit, work.index
        lse = unit.q(lse)
        rows = [unit.q(x) for x in (q, out_grad, out)]
        slopes = None if lse_grad is None else unit.q(lse_grad)
        if work.plan.empty_rows or work.options.key_keep is not None:
            empty = lse == -math.inf
            lse = lse.masked_fill(empty, 0)
            rows = [x.masked_fill(empty.unsqueeze(-1), 0) for x in rows]
            slopes = None if slopes is None else slopes.masked_fill(empty, 0)
        self.dtype, self.flash = work.dtype, _uses_flash(work)
        self.q, self.out_grad, self.out = (_Queries(x, index) for x in rows)
        self.lse = _Queries(lse, index)
        self.lse_grad = None if slopes is None else _Queries(slopes, index)

    def take(self, at: tuple[Launch, int, int]) -> tuple[Tensor, _Grads]:
        q, out_grad, out, lse = (x.take(*at).to(self.dtype) for x in (self.q, self.out_grad, self.out, self.lse))
        lse_grad = None if self.lse_grad is None else self.lse_grad.take(*at)
        delta = lse if self.flash else (out_grad * out).sum(-1)
        if lse_grad is not None and not self.flash:
            delta = delta - lse_grad
        return q, _Grads(out_grad, out, lse, lse_grad, delta)


def double_backward(
    q_cot: Tensor,
    k_cot: Tensor,
    v_cot: Tensor,
    out_grad: Tensor,
    lse_grad: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``<q_cot, dq> + <k_cot, dk> + <v_cot, dv>`` for out_grad, lse_grad, q, k and v.

    With P the weights, dP = out_grad v^T, dS = P (dP - delta) and X = scale (q_cot k^T + q k_cot^T): a first pass sums
    over each row what the second needs of the whole row.
    """
    index, options = index_of(call, q, k), _options(call, k)
    dtype, block = lse.dtype, index.block
    rows = index.n_rows * block if index.n_rows > 1 else q.shape[2]
    columns = index.n_cols * block
    out_grad_bar = q.new_zeros((*q.shape[:2], rows, v.shape[-1]))
    q_bar = q.new_zeros((*q.shape[:2], rows, q.shape[-1]))
    lse_grad_bar = torch.zeros(*q.shape[:2], rows, dtype=dtype, device=q.device)
    k_bar, v_bar = (torch.zeros(*x.shape[:2], columns, x.shape[-1], dtype=dtype, device=x.device) for x in (k, v))
    for work in _works(index, (q, k, v, out_grad, out, lse, q_cot, k_cot, v_cot), options):
        unit, dead, scale = work.unit, _dead_keys(work), options.scale
        keys, values, key_cots, value_cots = (
            _Keys(_without(unit.k(x), dead), index, dtype) for x in (k, v, k_cot, v_cot)
        )
        k_sum, v_sum = (_KeyGradient(unit.k(x), block) for x in (k_bar, v_bar))
        theirs = _RowInputs(work, q, out_grad, lse_grad, out, lse)
        cots = _Queries(unit.q(q_cot), index)
        q_rows, out_grad_rows, lse_grad_rows = (
            theirs.q.like(unit.q(x)) for x in (q_bar, out_grad_bar, lse_grad_bar)
        )
        tile, row, view = _costs(work, k, v, dtype, backward=True)
        scores = 8 * len(work.heads) * len(work.batch) * block * block * dtype.itemsize
        for chunk in work.chunks(2 * tile + scores, 2 * row, 2 * view + scores):
            at = (chunk.launch, chunk.begin, chunk.end)
            q_chunk, grads = theirs.take(at)
            delta = (grads.out_grad * grads.out).sum(-1)
            dout = delta
            if grads.lse_grad is not None:
                delta = delta - grads.lse_grad
            cot = cots.take(*at).to(dtype)
            sums = torch.zeros(3, *delta.shape, dtype=dtype, device=delta.device)
            for second in (False, True):
                y, row_sum = sums[0], sums[1] + sums[2] - delta * sums[0] - sums[0] * dout
                for part in chunk.parts:
                    k_part, v_part = keys.take(*at, part), values.take(*at, part)
                    k_cot_part, v_cot_part = key_cots.take(*at, part), value_cots.take(*at, part)
                    heads = k_part.shape[1]
                    found = _scores(work, chunk, part, q_chunk, k_part)
                    weights = found.weights(grads.lse)
                    grad_weights = found.dropped(_matmul(grads.out_grad, v_part.transpose(-1, -2)))
                    raw = _matmul(cot, k_part.transpose(-1, -2)) + _matmul(q_chunk, k_cot_part.transpose(-1, -2))
                    raw = raw * scale
                    x = found.through_softcap(raw)
                    value_term = found.dropped(_matmul(grads.out_grad, v_cot_part.transpose(-1, -2)))
                    if not second:
                        px = weights * x
                        sums += torch.stack([px.sum(-1), (px * grad_weights).sum(-1), (weights * value_term).sum(-1)])
                        continue
                    grad_scores = weights * (grad_weights - delta.unsqueeze(-1))
                    weights_bar = x * (grad_weights - delta.unsqueeze(-1)) + value_term - y.unsqueeze(-1) * grad_weights
                    scores_bar = weights * (weights_bar - row_sum.unsqueeze(-1))
                    if found.capped is not None:
                        slope = 1 - found.capped * found.capped
                        bend = -2 / options.softcap * found.capped * slope
                        scores_bar = slope * scores_bar + grad_scores * raw * bend
                        grad_scores = grad_scores * slope
                    scores_bar, grad_scores = scores_bar * scale, grad_scores * scale
                    used, moved = found.dropped(weights), found.dropped(weights * x)
                    q_piece = _matmul(scores_bar, k_part) + _matmul(grad_scores, k_cot_part)
                    out_piece = _matmul(moved, v_part) + _matmul(used, v_cot_part)
                    total = (q_piece, out_piece) if part is chunk.parts[0] else (total[0] + q_piece, total[1] + out_piece)
                    k_sum.add(
                        *at, part, _matmul_keys(scores_bar, q_chunk, heads) + _matmul_keys(grad_scores, cot, heads)
                    )
                    v_sum.add(*at, part, _matmul_keys(moved - used * y.unsqueeze(-1), grads.out_grad, heads))
            q_rows.put(*at, total[0])
            out_grad_rows.put(*at, total[1] - sums[0].unsqueeze(-1) * grads.out)
            lse_grad_rows.put(*at, sums[0])
    k_out, v_out = (x[:, :, : index.n_keys].to(q.dtype).contiguous() for x in (k_bar, v_bar))
    return _inside(out_grad_bar, index), _inside(lse_grad_bar, index), _inside(q_bar, index), k_out, v_out
