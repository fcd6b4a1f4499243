"""The forward pass: parts of a softmax, merged row tile by row tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.kernels.blockwise.chunks import Part, Work, on_flash, works
from ringtile.kernels.blockwise.plan import plan_of
from ringtile.kernels.blockwise.scores import masked_scores, matmul
from ringtile.kernels.contracts import Call, accumulator, as_new_out, index_of, merge_into, new_out
from ringtile.kernels.cpu_flash import flash_forward, split_scale, times

_WORTH_A_LAUNCH = 2e7
"""Operations that each launch of a small problem must save to pay (about 0.15 ms on two cores)."""


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 for kept pairs and -inf for others."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -math.inf)


def dense_mask(index: BlockIndex, q: Tensor, v: Tensor, call: Call) -> Tensor | None:
    """Return a mask to add to all scores at once if launches would cost more than the tiles that they skip."""
    plan, has_key_mask = plan_of(index), call.key_bits is not None or call.key_lengths is not None
    if plan.kept is None or has_key_mask or not on_flash(q.device, call):
        return None
    pairs = plan.spared // index.n_groups * index.block**2 * q.shape[0] * q.shape[1]
    if pairs * 2 * (q.shape[-1] + v.shape[-1]) > _WORTH_A_LAUNCH * len(plan.launches):
        return None
    group = index.group.cpu()
    key = (q.dtype, group.shape, tuple(group.flatten().tolist()))
    if key not in plan.additive:
        plan.additive[key] = additive(plan.kept[group.long()], q.dtype)
    return plan.additive[key]


def _part_forward(work: Work, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output ``[n, H, m, Dv]`` and lse ``[n, H, m]`` of one part of the softmax."""
    if not work.on_flash:
        found = masked_scores(work, part, q, k)
        lse = found.scores.logsumexp(-1)
        weights = found.weights(lse.masked_fill(lse == -math.inf, 0))
        return matmul(found.dropped(weights), v), lse
    keep = work.keep(part)
    mask = None if keep is None else additive(keep, q.dtype)
    out, lse = flash_forward(q, k, v, scale=work.scale[1], mask=mask)
    if keep is not None:
        empty = ~keep.any(-1)
        if bool(empty.any()):
            lse, out = lse.masked_fill(empty, -math.inf), out.masked_fill(empty.unsqueeze(-1), 0)
    return out, lse


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, Nq, Dv]`` in q's dtype and the lse ``[B, H, Nq]`` (float32, float64 for float64)."""
    index = index_of(call, q, k)
    mask = dense_mask(index, q, v, call)
    if mask is not None:
        factor, scale = split_scale(call.scale, q.dtype)
        dense, dense_lse = flash_forward(times(q, factor), k, v, scale=scale, mask=mask)
        return as_new_out(dense), dense_lse.contiguous()
    out, lse = new_out(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulator(q))
    for work in works(index, (q, k, v, out), call):
        keys, values = work.columns(k, v)
        queries, out_rows, lse_rows = work.rows(q, out, lse)
        idle = work.plan.idle_rows[work.group]
        if idle is not None:
            idle = idle.to(q.device)
            work.q(out)[:, idle] = 0
            work.q(lse)[:, idle] = -math.inf
        for parts in work.chunks(*costs(work, k, v, backward=False)):
            q_chunk = times(queries.read(parts[0]).to(work.dtype), work.scale[0])
            total: tuple[Tensor, Tensor] | None = None
            for part in parts:
                found = _part_forward(work, part, q_chunk, keys.read(part), values.read(part))
                if total is None:
                    total = found
                else:
                    merge_into(*total, *found)
            assert total is not None
            out_rows.write(parts[0], total[0])
            lse_rows.write(parts[0], total[1])
    return out, lse


def costs(work: Work, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int, int]:
    """Return the bytes of a gathered tile, of a row tile's output, and of a tile that is read as a view."""
    block, size = work.index.block, work.dtype.itemsize
    kv_heads = len(work.kv_heads) * len(work.batch)
    heads = len(work.heads) * len(work.batch)
    tile = kv_heads * block * (k.shape[-1] + v.shape[-1]) * size
    scores = 0 if work.on_flash else 4 * heads * block * block * size
    view = (tile if backward else 0) + scores
    return tile + view, heads * block * v.shape[-1] * size, view
