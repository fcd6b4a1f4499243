"""The backward pass: one part at a time, from the output and lse of the whole softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.chunks import (
    Chunk,
    ColumnSums,
    ColumnTiles,
    Part,
    RowTiles,
    Work,
    dead_keys,
    on_flash,
    options_of,
    without,
    works,
)
from ringtile.kernels.blockwise.forward import additive, costs, whole_mask
from ringtile.kernels.blockwise.plan import Launch
from ringtile.kernels.blockwise.scores import masked_scores, matmul, matmul_keys
from ringtile.kernels.contracts import Call, index_of
from ringtile.kernels.cpu_flash import flash_backward


class RowGrads(NamedTuple):
    """What a chunk's backward needs of its rows; lse is 0 and everything else zero on empty rows."""

    out_grad: Tensor
    out: Tensor
    lse: Tensor
    lse_grad: Tensor | None
    delta: Tensor


def _part_backward(
    work: Work, chunk: Chunk, part: Part, grads: RowGrads, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part, given the output and lse of the whole softmax."""
    heads = k.shape[1]
    if not on_flash(work.device, work.options):
        found = masked_scores(work, chunk, part, q, k)
        weights = found.weights(grads.lse)
        grad_v = matmul_keys(found.dropped(weights), grads.out_grad, heads)
        grad_weights = found.dropped(matmul(grads.out_grad, v.mT))
        grad_scores = found.through_softcap(weights * (grad_weights - grads.delta.unsqueeze(-1))) * work.options.scale
        return matmul(grad_scores, k), matmul_keys(grad_scores, q, heads), grad_v
    keep = work.keep(chunk, part)
    mask = None if keep is None else additive(keep, q.dtype)
    return flash_backward(
        grads.out_grad, grads.lse_grad, q, k, v, grads.out, grads.lse, scale=work.options.scale, mask=mask
    )


class RowInputs:
    """The row side of a backward pass; whatever empty rows hold is replaced by zeros."""

    def __init__(
        self, work: Work, q: Tensor, out_grad: Tensor, lse_grad: Tensor | None, out: Tensor, lse: Tensor
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
        self.dtype, self.flash = work.dtype, on_flash(work.device, work.options)
        self.q, self.out_grad, self.out = (RowTiles(x, index) for x in rows)
        self.lse = RowTiles(lse, index)
        self.lse_grad = None if slopes is None else RowTiles(slopes, index)

    def take(self, at: tuple[Launch, int, int]) -> tuple[Tensor, RowGrads]:
        q, out_grad, out, lse = (x.take(*at).to(self.dtype) for x in (self.q, self.out_grad, self.out, self.lse))
        lse_grad = None if self.lse_grad is None else self.lse_grad.take(*at)
        delta = lse if self.flash else (out_grad * out).sum(-1)
        if lse_grad is not None and not self.flash:
            delta = delta - lse_grad
        return q, RowGrads(out_grad, out, lse, lse_grad, delta)


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
    index, options = index_of(call, q, k), options_of(call, k)
    mask = whole_mask(index, q, v, options)
    if mask is not None:
        whole = flash_backward(out_grad, lse_grad, q, k, v, out, lse, scale=call.scale, mask=mask)
        return whole[0].contiguous(), whole[1].contiguous(), whole[2].contiguous()
    dtype, block = lse.dtype, index.block
    q_grad = q.new_zeros(q.shape)
    k_grad, v_grad = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    for work in works(index, (q, k, v, out_grad, out, lse), options):
        unit, dead = work.unit, dead_keys(work)
        keys, values = (ColumnTiles(without(unit.k(x), dead), index, dtype) for x in (k, v))
        k_sum, v_sum = (ColumnSums(unit.k(x), block) for x in (k_grad, v_grad))
        theirs = RowInputs(work, q, out_grad, lse_grad, out, lse)
        q_rows = RowTiles(unit.q(q_grad), index)
        for chunk in work.chunks(*costs(work, k, v, dtype, backward=True)):
            at = (chunk.launch, chunk.begin, chunk.end)
            q_chunk, grads = theirs.take(at)
            total: Tensor | None = None
            for part in chunk.parts:
                found = _part_backward(work, chunk, part, grads, q_chunk, keys.take(*at, part), values.take(*at, part))
                total = found[0] if total is None else total + found[0]
                k_sum.add(*at, part, found[1])
                v_sum.add(*at, part, found[2])
            assert total is not None
            q_rows.put(*at, total)
    return q_grad, k_grad.to(q.dtype), v_grad.to(q.dtype)
