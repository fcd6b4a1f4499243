"""The backward pass: one part at a time, from the output and lse of the full softmax."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.kernels.blockwise.chunks import Part, Work, add, additive, queries_of, read, whole_mask, works, write
from ringtile.kernels.blockwise.scores import masked_scores, matmul, matmul_keys
from ringtile.kernels.contracts import Added, Call, Grads, Rows, index_of
from ringtile.kernels.cpu_flash import flash_backward, split_scale, times, without_empty_rows


class RowTiles(NamedTuple):
    """The rows of a pass as tiles, or those of a part, ``[n, H, m, ...]``."""

    q: Tensor
    out_grad: Tensor
    out: Tensor
    lse: Tensor
    lse_grad: Tensor | None

    @classmethod
    def of(cls, work: Work, rows: Rows) -> Self:
        """Return the share of `without_empty_rows`. Queries that do not exist are empty."""
        q, out_grad, out = (work.rows(x) for x in (rows.q, rows.out_grad, rows.out))
        lse_grad = None if rows.lse_grad is None else work.rows(rows.lse_grad)
        return cls(q, out_grad, out, work.rows(rows.lse, math.inf), lse_grad)

    def read(self, numbers: Tensor, dtype: torch.dtype) -> "RowTiles":
        """Return the rows of a part."""
        return RowTiles._make(None if x is None else read(x, numbers.unsqueeze(1)).to(dtype) for x in self)

    def delta(self) -> Tensor:
        """Return ``rowsum(out_grad * out)``, less the gradient of the lse."""
        delta = (self.out_grad * self.out).sum(-1)
        return delta if self.lse_grad is None else delta - self.lse_grad


def key_results(index: BlockIndex, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return zeros for gradients of ``[B, Hkv, Nk, D]``, of whole column tiles."""
    # Keys of many rows are summed in the dtype of the accumulator, and rounded once at the end.
    return [x.new_zeros(*x.shape[:2], index.n_cols * index.block, x.shape[3], dtype=dtype) for x in tensors]


def _part_backward(work: Work, part: Part, rows: RowTiles, k: Tensor, v: Tensor) -> Grads:
    """Return the gradients of one part from the output and lse of the full softmax."""
    q, out_grad, out, lse, lse_grad = rows
    heads, scale = k.shape[1], work.scale[1]
    if not work.on_flash:
        found = masked_scores(work, part, q, k)
        weights = found.weights(lse)
        grad_v = matmul_keys(found.dropped(weights), out_grad, heads)
        grad_weights = found.dropped(matmul(out_grad, v.mT))
        grad_scores = weights * (grad_weights - rows.delta().unsqueeze(-1))
        work.add_grads(part, grad_scores)
        grad_scores = found.through_softcap(grad_scores) * scale
        return matmul(grad_scores, k), matmul_keys(grad_scores, q, heads), grad_v
    mask = additive(work.keep(part), q.dtype)
    return flash_backward(Rows(out_grad, lse_grad, q, k, v, out, lse), scale=scale, mask=mask)


def backward(rows: Rows, call: Call, added: Added | None = None) -> Grads:
    """Return the gradients of q, k and v, contiguous and in their dtype."""
    rows = without_empty_rows(rows)
    q, k, v = rows.q, rows.k, rows.v
    index = index_of(call, q, k)
    mask = None if added is not None else whole_mask(index, q, call)
    if mask is not None:
        factor, scale = split_scale(call.scale, q.dtype)
        whole = rows._replace(q=times(q, factor))
        q_grad, k_grad, v_grad = flash_backward(whole, scale=scale, mask=mask)
        return times(q_grad, factor).contiguous(), k_grad.contiguous(), v_grad.contiguous()
    q_grad = q.new_zeros(*q.shape[:2], index.n_rows * index.block, q.shape[3])
    k_grad, v_grad = key_results(index, rows.lse.dtype, k, v)
    for work in works(index, q, k, v, call, added):
        tiles, keys, values = RowTiles.of(work, rows), work.columns(k), work.columns(v)
        q_rows, k_sum, v_sum = work.rows(q_grad), work.column_results(k_grad), work.column_results(v_grad)
        for parts in work.chunks(work.matrices):
            mine = tiles.read(parts[0].rows, work.dtype)
            mine = mine._replace(q=times(mine.q, work.scale[0]))
            total = torch.zeros_like(mine.q)
            for part in parts:
                k_part, v_part = (read(x, part.cols).to(work.dtype) for x in (keys, values))
                found = _part_backward(work, part, mine, k_part, v_part)
                total += found[0]
                add(k_sum, part.cols, found[1])
                add(v_sum, part.cols, found[2])
            write(q_rows, parts[0].rows, times(total, work.scale[0]))
    grads = queries_of(index, q_grad), *(x[:, :, : index.n_keys] for x in (k_grad, v_grad))
    q_grad, k_grad, v_grad = (x.to(q.dtype).contiguous() for x in grads)
    return q_grad, k_grad, v_grad
