"""The backward pass: one split at a time, from the output and lse of the full softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.chunks import Chunk, RowTiles, Split, Work, on_flash, works
from ringtile.kernels.blockwise.forward import additive, costs, dense_mask
from ringtile.kernels.blockwise.scores import masked_scores, matmul, matmul_keys
from ringtile.kernels.contracts import Call, Rows, index_of
from ringtile.kernels.cpu_flash import flash_backward, split_scale, times


class RowGrads(NamedTuple):
    """The rows of a chunk, for its backward pass. Empty rows have an lse of 0 and zeros elsewhere."""

    out_grad: Tensor
    out: Tensor
    lse: Tensor
    lse_grad: Tensor | None
    delta: Tensor


def _split_backward(
    work: Work, chunk: Chunk, split: Split, grads: RowGrads, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one split from the output and lse of the full softmax."""
    heads, scale = k.shape[1], work.scale[1]
    if not work.on_flash:
        found = masked_scores(work, chunk, split, q, k)
        weights = found.weights(grads.lse)
        grad_v = matmul_keys(found.dropped(weights), grads.out_grad, heads)
        grad_weights = found.dropped(matmul(grads.out_grad, v.mT))
        grad_scores = found.through_softcap(weights * (grad_weights - grads.delta.unsqueeze(-1))) * scale
        return matmul(grad_scores, k), matmul_keys(grad_scores, q, heads), grad_v
    keep = work.keep(chunk, split)
    mask = None if keep is None else additive(keep, q.dtype)
    return flash_backward(grads.out_grad, grads.lse_grad, q, k, v, grads.out, grads.lse, scale=scale, mask=mask)


class RowInputs:
    """The row side of a backward pass, with zeros in empty rows."""

    def __init__(
        self, work: Work, q: Tensor, out_grad: Tensor, lse_grad: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        unit, index = work.unit, work.index
        lse = unit.q(lse)
        rows = [unit.q(x) for x in (q, out_grad, out)]
        slopes = None if lse_grad is None else unit.q(lse_grad)
        if work.plan.empty_rows or work.key_keep is not None:
            empty = lse == -math.inf
            lse = lse.masked_fill(empty, 0)
            rows = [x.masked_fill(empty.unsqueeze(-1), 0) for x in rows]
            slopes = None if slopes is None else slopes.masked_fill(empty, 0)
        self.dtype, self.on_flash = work.dtype, work.on_flash
        self.rows = [RowTiles(x, index) for x in (*rows, lse)]
        self.lse_grad = None if slopes is None else RowTiles(slopes, index)

    def read(self, chunk: Chunk) -> tuple[Tensor, RowGrads]:
        """Return the queries of a chunk and the rest of its rows."""
        q, out_grad, out, lse = (x.read(chunk).to(self.dtype) for x in self.rows)
        lse_grad = None if self.lse_grad is None else self.lse_grad.read(chunk)
        delta = lse if self.on_flash else (out_grad * out).sum(-1)
        if lse_grad is not None and not self.on_flash:
            delta = delta - lse_grad
        return q, RowGrads(out_grad, out, lse, lse_grad, delta)


def backward(rows: Rows, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous and in their dtype."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    index = index_of(call, q, k)
    mask = dense_mask(index, q, v, call)
    if mask is not None:
        part, scale = split_scale(call.scale, q.dtype)
        dense = flash_backward(out_grad, lse_grad, times(q, part), k, v, out, lse, scale=scale, mask=mask)
        return times(dense[0], part).contiguous(), dense[1].contiguous(), dense[2].contiguous()
    q_grad = q.new_zeros(q.shape)
    k_grad, v_grad = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for work in works(index, (q, k, v, out_grad, out, lse), call):
        (keys, values), (k_sum, v_sum), (q_rows,) = work.columns(k, v), work.sums(k_grad, v_grad), work.rows(q_grad)
        inputs = RowInputs(work, q, out_grad, lse_grad, out, lse)
        for chunk in work.chunks(*costs(work, k, v, backward=True)):
            q_chunk, grads = inputs.read(chunk)
            q_chunk = times(q_chunk, work.scale[0])
            total: Tensor | None = None
            for split in chunk.splits:
                k_split, v_split = keys.read(chunk, split), values.read(chunk, split)
                found = _split_backward(work, chunk, split, grads, q_chunk, k_split, v_split)
                total = found[0] if total is None else total + found[0]
                k_sum.add(chunk, split, found[1])
                v_sum.add(chunk, split, found[2])
            assert total is not None
            # One product for all chunks, where it rounds nothing that the sums do not.
            q_rows.write(chunk, total if q.dtype == work.dtype else times(total, work.scale[0]))
    if q.dtype == lse.dtype and on_flash(q.device, call):
        q_grad.mul_(split_scale(call.scale, q.dtype)[0])
    return q_grad, k_grad.to(q.dtype), v_grad.to(q.dtype)
