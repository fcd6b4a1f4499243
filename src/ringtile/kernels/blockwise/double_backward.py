"""The gradient of the backward pass.

Let P be the weights, dP = out_grad v^T and dS = P (dP - delta). The cotangents of q and k give dS the cotangent
X = scale (q_cot k^T + q k_cot^T). We read each part twice: first for sums over full rows, then for the gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.backward import RowGrads, RowInputs
from ringtile.kernels.blockwise.chunks import Part, RowTiles, Work, works
from ringtile.kernels.blockwise.forward import costs
from ringtile.kernels.blockwise.scores import masked_scores, matmul, matmul_keys
from ringtile.kernels.contracts import Call, index_of


class _Rows(NamedTuple):
    """The rows of a part: ``[n, H, m, ...]``."""

    q: Tensor
    q_cot: Tensor
    grads: RowGrads
    dout: Tensor
    """``rowsum(out_grad * out)``."""
    delta: Tensor
    """``dout - lse_grad``."""


class _Columns(NamedTuple):
    """The keys and values of a part with their cotangents: ``[n, G, l, ...]``."""

    k: Tensor
    v: Tensor
    k_cot: Tensor
    v_cot: Tensor


class _Terms:
    """The terms of one part that both passes use, ``[n, H, m, l]``."""

    def __init__(self, work: Work, part: Part, rows: _Rows, columns: _Columns) -> None:
        found = masked_scores(work, part, rows.q, columns.k)
        self.scores, self.scale = found, work.call.scale
        self.weights = found.weights(rows.grads.lse)
        self.weights_grad = found.dropped(matmul(rows.grads.out_grad, columns.v.mT))
        self.raw_cot = (matmul(rows.q_cot, columns.k.mT) + matmul(rows.q, columns.k_cot.mT)) * self.scale
        self.cot = found.through_softcap(self.raw_cot)
        self.value_cot = found.dropped(matmul(rows.grads.out_grad, columns.v_cot.mT))

    def row_sums(self) -> Tensor:
        """Return ``[3, n, H, m]``, the weighted sums of X, X dP, and out_grad v_cot^T."""
        weighted = self.weights * self.cot
        return torch.stack(
            [weighted.sum(-1), (weighted * self.weights_grad).sum(-1), (self.weights * self.value_cot).sum(-1)]
        )

    def score_grads(self, rows: _Rows, sums: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
        """Return two scaled gradients: of the scores here, and dS of the backward pass."""
        cot_sum = sums[0].unsqueeze(-1)
        weights_bar_sum = (sums[1] + sums[2] - sums[0] * (rows.delta + rows.dout)).unsqueeze(-1)
        beyond = self.weights_grad - rows.delta.unsqueeze(-1)
        weights_bar = self.cot * beyond + self.value_cot - cot_sum * self.weights_grad
        scores_bar, scores_grad = self.weights * (weights_bar - weights_bar_sum), self.weights * beyond
        capped = self.scores.capped
        if capped is not None:
            # d/ds tanh(s / softcap) * softcap is slope, and its own derivative is -2 / softcap * capped * slope.
            slope = 1 - capped * capped
            scores_bar = slope * (scores_bar - 2 / softcap * capped * scores_grad * self.raw_cot)
            scores_grad = scores_grad * slope
        return scores_bar * self.scale, scores_grad * self.scale


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
    """Return the gradients of ``<q_cot, dq> + <k_cot, dk> + <v_cot, dv>`` for out_grad, lse_grad, q, k and v."""
    index = index_of(call, q, k)
    dtype, block = lse.dtype, index.block
    out_grad_bar, q_bar = q.new_zeros(out.shape), q.new_zeros(q.shape)
    lse_grad_bar = torch.zeros(lse.shape, dtype=dtype, device=q.device)
    k_bar, v_bar = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    for work in works(index, (q, k, v, out_grad, out, lse, q_cot, k_cot, v_cot), call):
        sources, (k_sum, v_sum) = work.columns(k, v, k_cot, v_cot), work.sums(k_bar, v_bar)
        inputs = RowInputs(work, q, out_grad, lse_grad, out, lse)
        empty = (work.q(lse) == -math.inf).unsqueeze(-1)
        cots = RowTiles(work.q(q_cot).masked_fill(empty, 0), index)
        q_rows, out_grad_rows, lse_grad_rows = work.rows(q_bar, out_grad_bar, lse_grad_bar)
        tile, row, view = costs(work, k, v, backward=True)
        scores = 8 * len(work.heads) * len(work.batch) * block * block * dtype.itemsize
        for parts in work.chunks(2 * tile + scores, 2 * row, 2 * view + scores):
            q_chunk, grads = inputs.read(parts[0])
            dout = (grads.out_grad * grads.out).sum(-1)
            delta = dout if grads.lse_grad is None else dout - grads.lse_grad
            rows = _Rows(q_chunk, cots.read(parts[0]).to(dtype), grads, dout, delta)
            # The first pass over the lists: a row's sums need all of its keys before any gradient is known.
            sums = torch.zeros(3, *delta.shape, dtype=dtype, device=delta.device)
            for part in parts:
                columns = _Columns(*(x.read(part) for x in sources))
                sums += _Terms(work, part, rows, columns).row_sums()
            q_total, out_total = torch.zeros_like(q_chunk), -sums[0].unsqueeze(-1) * grads.out
            for part in parts:
                columns = _Columns(*(x.read(part) for x in sources))
                terms, heads = _Terms(work, part, rows, columns), columns.k.shape[1]
                scores_bar, scores_grad = terms.score_grads(rows, sums, call.softcap)
                used, moved = terms.scores.dropped(terms.weights), terms.scores.dropped(terms.weights * terms.cot)
                q_total += matmul(scores_bar, columns.k) + matmul(scores_grad, columns.k_cot)
                out_total = out_total + matmul(moved, columns.v) + matmul(used, columns.v_cot)
                k_grad = matmul_keys(scores_bar, q_chunk, heads) + matmul_keys(scores_grad, rows.q_cot, heads)
                k_sum.add(part, k_grad)
                v_sum.add(part, matmul_keys(moved - used * sums[0].unsqueeze(-1), grads.out_grad, heads))
            q_rows.write(parts[0], q_total)
            out_grad_rows.write(parts[0], out_total)
            lse_grad_rows.write(parts[0], sums[0])
    return out_grad_bar, lse_grad_bar, q_bar, k_bar.to(q.dtype), v_bar.to(q.dtype)
