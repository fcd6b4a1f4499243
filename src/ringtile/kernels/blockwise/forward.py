"""The forward pass: parts of a softmax, merged row tile by row tile."""

import math

from torch import Tensor

from ringtile.kernels.blockwise.chunks import Part, Work, additive, queries_of, read, whole_mask, works, write
from ringtile.kernels.blockwise.scores import masked_scores, matmul
from ringtile.kernels.contracts import Added, Attended, Call, accumulator, as_new_out, index_of, merge_into
from ringtile.kernels.cpu_flash import flash_forward, split_scale, times


def _part_forward(work: Work, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Return the output ``[n, H, m, Dv]`` and lse ``[n, H, m]`` of one part of the softmax."""
    if not work.on_flash:
        found = masked_scores(work, part, q, k)
        lse = found.scores.logsumexp(-1)
        empty = lse == -math.inf
        out = matmul(found.dropped(found.weights(lse.masked_fill(empty, 0))), v)
        return out.masked_fill(empty.unsqueeze(-1), 0), lse
    return flash_forward(q, k, v, scale=work.scale[1], mask=additive(work.keep(part), q.dtype))


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, added: Added | None = None) -> Attended:
    """Return the output ``[B, H, Nq, Dv]`` in q's dtype and the lse ``[B, H, Nq]`` (float32, float64 for float64)."""
    index = index_of(call, q, k)
    mask = None if added is not None else whole_mask(index, q, call)
    if mask is not None:
        factor, scale = split_scale(call.scale, q.dtype)
        whole, whole_lse = flash_forward(times(q, factor), k, v, scale=scale, mask=mask)
        return as_new_out(whole), whole_lse.contiguous()
    size = *q.shape[:2], index.n_rows * index.block
    # Rows without tiles stay as they are here.
    out, lse = q.new_zeros(*size, v.shape[-1]), q.new_full(size, -math.inf, dtype=accumulator(q))
    for work in works(index, q, k, v, call, added):
        queries, keys, values = work.rows(q), work.columns(k), work.columns(v)
        out_rows, lse_rows = work.rows(out), work.rows(lse)
        for parts in work.chunks(work.matrices):
            rows = parts[0].rows
            q_rows = times(read(queries, rows.unsqueeze(1)).to(work.dtype), work.scale[0])
            total: Attended | None = None
            for part in parts:
                k_part, v_part = (read(x, part.cols).to(work.dtype) for x in (keys, values))
                found = _part_forward(work, part, q_rows, k_part, v_part)
                if total is None:
                    total = found
                else:
                    merge_into(*total, *found)
            assert total is not None
            write(out_rows, rows, total[0])
            write(lse_rows, rows, total[1])
    return as_new_out(queries_of(index, out)), queries_of(index, lse).contiguous()
