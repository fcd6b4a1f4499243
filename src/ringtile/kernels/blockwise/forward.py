"""The forward pass: parts of a softmax, merged row tile by row tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringtile.kernels.blockwise.chunks import (
    Chunk,
    ColumnTiles,
    Options,
    Part,
    RowTiles,
    Work,
    dead_keys,
    on_flash,
    options_of,
    without,
    works,
)
from ringtile.kernels.blockwise.plan import plan_of
from ringtile.kernels.blockwise.scores import masked_scores, matmul
from ringtile.kernels.contracts import Call, accumulator, as_new_out, index_of, merge_into, new_out
from ringtile.kernels.cpu_flash import flash_forward
from ringtile.layout.index import BlockIndex

_WORTH_A_LAUNCH = 2e7
"""Operations that each launch of a small problem must spare to pay (about 0.15 ms on two cores)."""


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -math.inf)


def whole_mask(index: BlockIndex, q: Tensor, v: Tensor, options: Options) -> Tensor | None:
    """A mask to add to all scores at once, where the launches would cost more than the tiles they spare."""
    plan = plan_of(index)
    if plan.whole is None or options.key_keep is not None or not on_flash(q.device, options):
        return None
    pairs = plan.spared // index.n_groups * index.block**2 * q.shape[0] * q.shape[1]
    if pairs * 2 * (q.shape[-1] + v.shape[-1]) > _WORTH_A_LAUNCH * len(plan.launches):
        return None
    group = index.group.cpu()
    key = (q.dtype, group.shape, tuple(group.flatten().tolist()))
    if key not in plan.additive:
        plan.additive[key] = additive(plan.whole[group.long()], q.dtype)
    return plan.additive[key]


def _part_forward(work: Work, chunk: Chunk, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[n, H, m, Dv]`` and lse ``[n, H, m]`` of one part of the softmax."""
    if not on_flash(work.device, work.options):
        found = masked_scores(work, chunk, part, q, k)
        lse = found.scores.logsumexp(-1)
        weights = found.weights(lse.masked_fill(lse == -math.inf, 0))
        return matmul(found.dropped(weights), v), lse
    keep = work.keep(chunk, part)
    mask = None if keep is None else additive(keep, q.dtype)
    out, lse = flash_forward(q, k, v, scale=work.options.scale, mask=mask)
    if keep is not None:
        empty = ~keep.any(-1)
        if bool(empty.any()):
            lse, out = lse.masked_fill(empty, -math.inf), out.masked_fill(empty.unsqueeze(-1), 0)
    return out, lse


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` in q's dtype and lse ``[B, H, Nq]`` (float32, float64 for float64)."""
    index, options = index_of(call, q, k), options_of(call, k)
    mask = whole_mask(index, q, v, options)
    if mask is not None:
        whole, whole_lse = flash_forward(q, k, v, scale=call.scale, mask=mask)
        return as_new_out(whole), whole_lse.contiguous()
    dtype = accumulator(q)
    out, lse = new_out(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=dtype)
    for work in works(index, (q, k, v, out), options):
        unit, dead = work.unit, dead_keys(work)
        keys, values = (ColumnTiles(without(unit.k(x), dead), index, dtype) for x in (k, v))
        queries, out_rows, lse_rows = (RowTiles(unit.q(x), index) for x in (q, out, lse))
        idle = work.plan.idle_rows[unit.group]
        if idle is not None:
            idle = idle.to(q.device)
            unit.q(out)[:, idle] = 0
            unit.q(lse)[:, idle] = -math.inf
        for chunk in work.chunks(*costs(work, k, v, dtype, backward=False)):
            at = (chunk.launch, chunk.begin, chunk.end)
            q_chunk = queries.take(*at).to(dtype)
            total: tuple[Tensor, Tensor] | None = None
            for part in chunk.parts:
                found = _part_forward(work, chunk, part, q_chunk, keys.take(*at, part), values.take(*at, part))
                if total is None:
                    total = found
                else:
                    merge_into(*total, *found)
            assert total is not None
            out_rows.put(*at, total[0])
            lse_rows.put(*at, total[1])
    return out, lse


def costs(work: Work, k: Tensor, v: Tensor, dtype: torch.dtype, *, backward: bool) -> tuple[int, int, int]:
    """Bytes of a gathered tile, of a row tile's output, and of a tile that is read as a view."""
    block, size = work.index.block, dtype.itemsize
    kv_heads = len(range(k.shape[1])[work.unit.kv_heads]) * len(work.batch)
    heads = len(work.heads) * len(work.batch)
    tile = kv_heads * block * (k.shape[-1] + v.shape[-1]) * size
    scores = 0 if on_flash(work.device, work.options) else 4 * heads * block * block * size
    view = (tile if backward else 0) + scores
    return tile + view, heads * block * v.shape[-1] * size, view
