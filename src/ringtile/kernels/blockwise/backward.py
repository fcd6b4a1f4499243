"""The backward pass: one part at a time, from the output and lse of the full softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.chunks import Part, RowTiles, Work, on_flash, works
from ringtile.kernels.blockwise.forward import additive, costs, dense_mask
from ringtile.kernels.blockwise.scores import masked_scores, matmul, matmul_keys
from ringtile.kernels.contracts import Call, Rows, index_of
from ringtile.kernels.cpu_flash import flash_backward, split_scale, times


class RowGrads(NamedTuple):
    """The rows of a part, for its backward pass. Empty rows have an lse of 0 and zeros elsewhere."""

    out_grad: Tensor
    out: Tensor
    lse: Tensor
    lse_grad: Tensor | None
    delta: Tensor


def _part_backward(
    work: Work, part: Part, grads: RowGrads, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one part from the output and lse of the full softmax."""
    heads, scale = k.shape[1], work.scale[1]
    if not work.on_flash:
        found = masked_scores(work, part, q, k)
        weights = found.weights(grads.lse)
        grad_v = matmul_keys(found.dropped(weights), grads.out_grad, heads)
        grad_weights = found.dropped(matmul(grads.out_grad, v.mT))
        grad_scores = found.through_softcap(weights * (grad_weights - grads.delta.unsqueeze(-1))) * scale
        return matmul(grad_scores, k), matmul_keys(grad_scores, q, heads), grad_v
    keep = work.keep(part)
    mask = None if keep is None else additive(keep, q.dtype)
    return flash_backward(grads.out_grad, grads.lse_grad, q, k, v, grads.out, grads.lse, scale=scale, mask=mask)


class RowInputs:
    """The row side of a backward pass, with zeros in empty rows."""

    def __init__(
        self, work: Work, q: Tensor, out_grad: Tensor, lse_grad: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        lse = work.q(lse)
        rows = [work.q(x) for x in (q, out_grad, out)]
        slopes = None if lse_grad is None else work.q(lse_grad)
        if work.plan.empty_rows or work.key_keep is not None:
            empty = lse == -math.inf
            lse = lse.masked_fill(empty, 0)
            rows = [x.masked_fill(empty.unsqueeze(-1), 0) for x in rows]
            slopes = None if slopes is None else slopes.masked_fill(empty, 0)
        self.dtype, self.on_flash = work.dtype, work.on_flash
        self.rows = [RowTiles(x, work.index) for x in (*rows, lse)]
        self.lse_grad = None if slopes is None else RowTiles(slopes, work.index)

    def read(self, part: Part) -> tuple[Tensor, RowGrads]:
        """Return the queries of a part and the rest of its rows."""
        q, out_grad, out, lse = (x.read(part).to(self.dtype) for x in self.rows)
        lse_grad = None if self.lse_grad is None else self.lse_grad.read(part)
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
        factor, scale = split_scale(call.scale, q.dtype)
        dense = flash_backward(out_grad, lse_grad, times(q, factor), k, v, out, lse, scale=scale, mask=mask)
        return times(dense[0], factor).contiguous(), dense[1].contiguous(), dense[2].contiguous()
    # Keys of many rows are summed in the dtype of the accumulator, and rounded once at the end.
    q_grad = q.new_zeros(q.shape)
    k_grad, v_grad = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for work in works(index, (q, k, v, out_grad, out, lse), call):
        (keys, values), (k_sum, v_sum), (q_rows,) = work.columns(k, v), work.sums(k_grad, v_grad), work.rows(q_grad)
        inputs = RowInputs(work, q, out_grad, lse_grad, out, lse)
        for parts in work.chunks(*costs(work, k, v, backward=True)):
            q_chunk, grads = inputs.read(parts[0])
            q_chunk = times(q_chunk, work.scale[0])
            total: Tensor | None = None
            for part in parts:
                k_part, v_part = keys.read(part), values.read(part)
                found = _part_backward(work, part, grads, q_chunk, k_part, v_part)
                total = found[0] if total is None else total + found[0]
                k_sum.add(part, found[1])
                v_sum.add(part, found[2])
            assert total is not None
            # One product for all chunks, where it rounds nothing that the sums do not.
            q_rows.write(parts[0], total if q.dtype == work.dtype else times(total, work.scale[0]))
    if q.dtype == lse.dtype and on_flash(q.device, call):
        q_grad.mul_(split_scale(call.scale, q.dtype)[0])
    return q_grad, k_grad.to(q.dtype), v_grad.to(q.dtype)
