"""The gradient of the backward pass.

Let P be the weights, dP = out_grad v^T and dS = P (dP - delta). The cotangents of q and k give dS the cotangent
X = scale (q_cot k^T + q k_cot^T). We read each part twice: first for sums over full rows, then for the gradients.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.backward import RowTiles, key_results
from ringtile.kernels.blockwise.chunks import Part, Work, add, queries_of, read, works, write
from ringtile.kernels.blockwise.scores import masked_scores, matmul, matmul_keys
from ringtile.kernels.contracts import Call, Rows, index_of
from ringtile.kernels.cpu_flash import without_empty_rows


class _Columns(NamedTuple):
    """The keys and values of a part with their cotangents: ``[n, G, l, ...]``."""

    k: Tensor
    v: Tensor
    k_cot: Tensor
    v_cot: Tensor


class _Terms:
    """The terms of one part that both passes use, ``[n, H, m, l]``."""

    def __init__(self, work: Work, part: Part, rows: RowTiles, q_cot: Tensor, columns: _Columns) -> None:
        found = masked_scores(work, part, rows.q, columns.k)
        self.scores, self.scale = found, work.call.scale
        self.weights = found.weights(rows.lse)
        self.weights_grad = found.dropped(matmul(rows.out_grad, columns.v.mT))
        self.raw_cot = (matmul(q_cot, columns.k.mT) + matmul(rows.q, columns.k_cot.mT)) * self.scale
        self.cot = found.through_softcap(self.raw_cot)
        self.value_cot = found.dropped(matmul(rows.out_grad, columns.v_cot.mT))

    def row_sums(self) -> Tensor:
        """Return ``[3, n, H, m]``, the weighted sums of X, X dP, and out_grad v_cot^T."""
        terms = self.cot, self.cot * self.weights_grad, self.value_cot
        return torch.stack([(self.weights * term).sum(-1) for term in terms])

    def score_grads(self, rows: RowTiles, sums: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
        """Return two scaled gradients: of the scores here, and dS of the backward pass."""
        delta, dout = rows.delta(), (rows.out_grad * rows.out).sum(-1)
        cot_sum = sums[0].unsqueeze(-1)
        weights_bar_sum = (sums[1] + sums[2] - sums[0] * (delta + dout)).unsqueeze(-1)
        beyond = self.weights_grad - delta.unsqueeze(-1)
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
    q_cot: Tensor, k_cot: Tensor, v_cot: Tensor, rows: Rows, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``<q_cot, dq> + <k_cot, dk> + <v_cot, dv>`` for out_grad, lse_grad, q, k and v."""
    rows = without_empty_rows(rows)
    q, k, v, dtype = rows.q, rows.k, rows.v, rows.lse.dtype
    index = index_of(call, q, k)
    size = *q.shape[:2], index.n_rows * index.block
    out_grad_bar, q_bar = q.new_zeros(*size, v.shape[3]), q.new_zeros(*size, q.shape[3])
    lse_grad_bar = q.new_zeros(size, dtype=dtype)
    k_bar, v_bar = key_results(index, dtype, k, v)
    for work in works(index, q, k, v, call):
        sources = [work.columns(x) for x in (k, v, k_cot, v_cot)]
        k_sum, v_sum = work.column_results(k_bar), work.column_results(v_bar)
        tiles, cots = RowTiles.of(work, rows), work.rows(q_cot)
        results = [work.rows(x) for x in (q_bar, out_grad_bar, lse_grad_bar)]
        for parts in work.chunks(8):
            numbers = parts[0].rows
            mine = tiles.read(numbers, dtype)
            q_cots = read(cots, numbers.unsqueeze(1)).masked_fill((mine.lse == math.inf).unsqueeze(-1), 0).to(dtype)
            # The first pass over the lists: a row's sums need all of its keys before any gradient is known.
            sums = mine.lse.new_zeros(3, *mine.lse.shape)
            for part in parts:
                columns = _Columns(*(read(x, part.cols).to(dtype) for x in sources))
                sums += _Terms(work, part, mine, q_cots, columns).row_sums()
            q_total, out_total = torch.zeros_like(mine.q), -sums[0].unsqueeze(-1) * mine.out
            for part in parts:
                columns = _Columns(*(read(x, part.cols).to(dtype) for x in sources))
                terms, heads = _Terms(work, part, mine, q_cots, columns), columns.k.shape[1]
                scores_bar, scores_grad = terms.score_grads(mine, sums, call.softcap)
                used, moved = terms.scores.dropped(terms.weights), terms.scores.dropped(terms.weights * terms.cot)
                q_total += matmul(scores_bar, columns.k) + matmul(scores_grad, columns.k_cot)
                out_total = out_total + matmul(moved, columns.v) + matmul(used, columns.v_cot)
                k_grad = matmul_keys(scores_bar, mine.q, heads) + matmul_keys(scores_grad, q_cots, heads)
                add(k_sum, part.cols, k_grad)
                value_grad = matmul_keys(moved - used * sums[0].unsqueeze(-1), mine.out_grad, heads)
                add(v_sum, part.cols, value_grad)
            for result, total in zip(results, (q_total, out_total, sums[0]), strict=True):
                write(result, numbers, total)
    bars = [queries_of(index, x) for x in (out_grad_bar, lse_grad_bar, q_bar)]
    bars += [x[:, :, : index.n_keys].to(q.dtype) for x in (k_bar, v_bar)]
    out_grad_bar, lse_grad_bar, q_bar, k_bar, v_bar = (x.contiguous() for x in bars)
    return out_grad_bar, lse_grad_bar, q_bar, k_bar, v_bar
