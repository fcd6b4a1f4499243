"""One query per head over tiles of keys, by the library: a step of generation, whose tiles nobody asks for again.

An index has lists of columns, splits and checks, which serve many calls. To make them takes longer than a step.
"""

import torch
from torch import Tensor

from ringtile.kernels.contracts import accumulator, pack_keys, with_contiguous_rows
from ringtile.kernels.native import threads_of
from ringtile.kernels.native.checks import check_tensors
from ringtile.kernels.native.library import ForwardPhase, library
from ringtile.kernels.native.precision import arithmetic_of


def step(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor, block: int, key_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the attention of the last query over the tiles that ``keep`` names, bool ``[B, H, 1, C]``."""
    check_tensors(query, key, value)
    (batch, heads, n_queries, head_dim), (n_keys, value_dim) = query.shape, value.shape[2:]
    groups, cols = batch * heads, -(-n_keys // block)
    if n_queries != 1 or keep.shape != (batch, heads, 1, cols) or keep.dtype != torch.bool:
        raise ValueError(
            f"keep: expected bool [{batch}, {heads}, 1, {cols}] for one query, got {keep.dtype} "
            f"{tuple(keep.shape)} for {query.shape=}"
        )
    c = library().structure()
    (c.batch, c.heads, c.n_queries, c.head_dim), (c.kv_heads, c.n_keys, c.value_dim) = query.shape, value.shape[1:]
    c.block, c.start = block, n_keys - 1

    # The lists of an index in which each head is a group with one row. No key follows the query, so all tiles are full.
    keep = keep.reshape(groups, cols)
    columns, counts, number = (
        keep.nonzero()[:, 1].int(),
        keep.sum(1, dtype=torch.int32),
        torch.arange(groups + 1, device="cpu"),
    )
    begins, none = counts.new_zeros(2, groups + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=begins[1:])
    work = counts.new_zeros(groups, 5)
    work[:, 0], work[:, 2], work[:, 3], work[:, 4] = number[:-1], counts, -1, 1
    c.n_rows, c.n_cols, c.n_groups = 1, cols, groups
    c.group_stride[0], c.group_stride[1] = c.heads, 1
    arithmetic = arithmetic_of(query.dtype)
    c.dtype, c.isa, c.scale = arithmetic.code, arithmetic.isa.number, head_dim**-0.5 if scale is None else scale
    c.point(group=number.int(), full_row_ptr=begins, full_col=columns)
    c.point(part_row_ptr=none, part_col=none, part_tile=none)
    c.point(work=work, work_begin=number, item_begin=number)
    out = query.new_empty(batch, heads, 1, value_dim)
    c.place(q=with_contiguous_rows(query), k=with_contiguous_rows(key), v=with_contiguous_rows(value), out=out)
    c.point(lse=query.new_empty(query.shape[:3], dtype=accumulator(query)))
    if key_mask is not None:
        c.point(key_bits=pack_keys(key_mask).contiguous())
        c.key_words = -(-n_keys // 32)
    c.threads = threads_of(2.0 * len(columns) * block * (head_dim + value_dim))
    c.phase, c.first_item, c.last_item = ForwardPhase.ATTEND, 0, groups
    library().run(library().handle.ringtile_forward, c)
    return out
