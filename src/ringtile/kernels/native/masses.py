"""Masses of segments of keys, by the library: the call of `ringtile.kernels.masses`."""

import math

import torch
from torch import Tensor

from ringtile.kernels.contracts import Masses, in_bytes, with_contiguous_rows
from ringtile.kernels.native import run_items, threads_of
from ringtile.kernels.native.checks import DTYPES
from ringtile.kernels.native.library import INT8, library, reason_against

_STRIP = 128
"""Rows that a thread computes together."""
_ITEMS_A_THREAD = 8


def native_masses(masses: Masses) -> Tensor | None:
    """Return the masses, or None if the library does not compute them. It counts keys in 32 bits."""
    query, key, seen, groups, bias, segment, pool, by_sign, scale = masses
    if reason_against() or not query.is_cpu or query.dtype == torch.float64 or key.shape[2] >= 2**31:
        return None
    operations = 2.0 * query.shape[:3].numel() * key.shape[2] * key.shape[3]
    threads = threads_of(operations)
    dtype, number, c = query.dtype, DTYPES[query.dtype], library().structure()
    if pool == "rms":
        (query, of_query), (key, of_key) = in_bytes(query, scale * math.log2(math.e)), in_bytes(key)
        # The kernel reads four dims at once.
        query, key = (torch.nn.functional.pad(x, (0, -x.shape[3] % 4)) for x in (query, key))
        sums = key.sum(3, dtype=torch.int32)
        c.point(query_scale=of_query.contiguous(), key_scale=of_key.contiguous(), key_sum=sums.contiguous())
        # The set for bfloat16 has products of bytes, too.
        dtype, number = torch.bfloat16, INT8
    query, key = with_contiguous_rows(query), with_contiguous_rows(key)
    (batch, heads, rows, _), pooled = query.shape, len(groups) - 1
    segment = min(segment, max(key.shape[2], 1))
    out = query.new_empty((batch, heads, pooled, -(-key.shape[2] // segment)), dtype=torch.float32)
    if not out.numel():
        return out
    c.dtype, c.isa, c.threads = number, library().choice.by_dtype[dtype].number, threads
    c.batch, c.heads, c.n_queries, c.kv_heads, c.n_keys, c.head_dim = batch, heads, rows, *key.shape[1:]
    c.place(q=query, k=key, v=key)
    c.point(
        sums=out, group=groups.new_zeros(1, dtype=torch.int32), seen=seen.contiguous(), pool_begin=groups.contiguous()
    )
    if bias is not None:
        bias = bias.contiguous()
        c.point(bias=bias)
        c.bias_stride[0] = bias.stride(0)
        c.bias_stride[1] = bias.stride(1) if bias.shape[1] > 1 else 0
    c.scale, c.segment, c.pool_max, c.by_sign = scale, segment, pool == "max", by_sign
    # Whole groups, about a strip of rows, and enough items for all threads. No bit depends on it.
    of_strip, of_threads = _STRIP * pooled // max(rows, 1), -(-batch * heads * pooled // (_ITEMS_A_THREAD * threads))
    c.n_pooled, c.pooled_step = pooled, max(1, min(of_strip, of_threads, pooled))
    items = batch * heads * -(-pooled // c.pooled_step)
    run_items(c, "ringtile_masses", items, operations)
    return out
