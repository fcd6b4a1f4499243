"""Attention over lists of keys per query, by the library. Sums are float32, for all dtypes.

See `ringtile.kernels.contracts` for the lists. ``native/chosen.h`` has the kernel.
"""

import math

import torch
from torch import Tensor

from ringtile.kernels.contracts import Attended, Grads, Lists, Rows, new_out, with_contiguous_rows
from ringtile.kernels.native import run_items, threads_of
from ringtile.kernels.native.checks import DTYPES, check_rows, check_tensors
from ringtile.kernels.native.library import ListsPhase, library, reason_against

_ROWS = 128
"""Heads of a query that a thread computes together, at most."""
_LANES = 16
"""Rows that fill a vector. If there are fewer heads, neighbouring queries fill it."""
_ITEMS_A_THREAD = 4
_ITEM_ROWS = 128
"""Rows of runs that go through the keys together, so that they share them in a cache."""
_DIRECT = 4
"""Heads of a key head whose queries are computed one by one with their dims in the lanes, at most."""
_UNION_COST = 6
"""A row of a union with all lanes takes as long as this many pairs of such queries."""
_WINDOW = 1024
"""Queries whose weights wait for the gradients of keys, at most."""
_WEIGHTS = 1 << 22
"""Float32 numbers of weights that wait, or an eighth of the tensors' own, unless one run has more."""
_KEYS_OF_A_QUERY = 64
"""Of the list of a query, in a range of keys whose gradients a thread adds up."""
_SUMS = 1 << 19
"""Float32 numbers of these gradients, at most."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, lists: Lists, dropout_p: float) -> list[str]:
    """Return the reasons why the native kernel does not support this call."""
    if q.device.type != "cpu":
        return [f"needs a CPU, got {q.device}"]
    reasons = [reason] if (reason := reason_against()) else []
    if q.dtype == torch.float64:
        reasons.append("has no lists in float64")
    if k.shape[2] >= 2**31:
        reasons.append(f"counts keys in 32 bits, got {k.shape=}")
    return reasons + ([f"does not support dropout_p, got {dropout_p}"] if dropout_p else [])


def _check_lists(q: Tensor, k: Tensor, lists: Lists) -> None:
    """Raise ValueError if the lists do not match."""
    (batch, _, rows, _), heads = q.shape, k.shape[1]
    indices, limits, block = lists.indices, lists.limits, lists.block
    groups = indices.shape[1] if indices.dim() == 4 else 0
    if not groups or heads % groups or indices.shape[0] not in (1, batch) or indices.shape[2] != rows:
        raise ValueError(f"indices: expected [1 or {batch}, 1 or {heads}, {rows}, n], got {indices.shape}")
    if limits.dim() != 3 or limits.shape[0] not in (1, batch) or limits.shape[1:] != (rows, 2):
        raise ValueError(f"limits: expected [1 or {batch}, {rows}, 2], got {limits.shape}")
    for name, x in (("indices", indices), ("limits", limits)):
        if x.dtype != torch.int32 or x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"{name}: expected contiguous torch.int32 on the CPU, got {x.dtype} on {x.device}")
    if block < 1 or block & (block - 1) or block >= 2**30:
        raise ValueError(f"block: expected a power of two below 2**30, got {block=}")


class _Job:
    """One call's structure."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float) -> None:
        check_tensors(q, k, v)
        _check_lists(q, k, lists)
        c = self.c = library().structure()
        (c.batch, c.heads, c.n_queries, c.head_dim), (c.kv_heads, c.n_keys, c.value_dim) = q.shape, v.shape[1:]
        c.dtype, c.isa, c.scale = DTYPES[q.dtype], library().choice.by_dtype[q.dtype].number, scale
        # Weights have room for whole entries, and the first holds every key if the block is longer.
        c.block = min(lists.block, 1 << max(c.n_keys - 1, 0).bit_length())
        c.place(q=with_contiguous_rows(q), k=with_contiguous_rows(k), v=with_contiguous_rows(v))
        c.point(indices=lists.indices, limits=lists.limits)
        c.list_groups, rows, c.list_length = lists.indices.shape[1:]
        c.indices_stride = c.list_groups * rows * c.list_length if len(lists.indices) > 1 else 0
        c.limits_stride = 2 * rows if len(lists.limits) > 1 else 0
        self.places = min(c.list_length * c.block, c.n_keys)
        """Keys of a query, at most."""
        self.operations = 2.0 * c.batch * c.heads * rows * self.places * (c.head_dim + c.value_dim)
        c.threads = threads_of(self.operations)
        self.ratio, items = c.heads // max(c.kv_heads, 1), max(c.batch * c.kv_heads * rows, 1)
        # Few queries, as in decoding, have fewer heads an item. No bit depends on it.
        parts = -(-_ITEMS_A_THREAD * c.threads // items) if c.threads > 1 else 1
        c.list_rows = min(_ROWS, max(1, -(-self.ratio // (parts * _LANES))) * _LANES)
        c.run = max(1, min(rows, _LANES // max(self.ratio, 1)))
        rows_of_run = c.run * (self.ratio if self.ratio <= _DIRECT else _LANES)
        c.item_runs = _ITEM_ROWS // (-(-rows_of_run // _LANES) * _LANES) if c.run > 1 else 1
        self.runs = -(-rows // c.run)
        c.union_cost = max(2, _UNION_COST // self.ratio) if 0 < self.ratio <= _DIRECT else 2
        c.union_room = max(1, min(c.run * c.list_length // c.union_cost, -(-c.n_keys // c.block)))
        if c.run > 1 and self.places:
            lists_of_runs = c.batch * c.list_groups * self.runs
            c.point(union_entries=lists.indices.new_empty(lists_of_runs * c.union_room))
            c.point(union_bits=lists.indices.new_empty(lists_of_runs * c.union_room, dtype=torch.int16))
            c.point(union_length=lists.indices.new_empty(lists_of_runs, dtype=torch.int64))
            self.run(ListsPhase.UNIONS, lists_of_runs, 0)

    def run(self, phase: ListsPhase, items: int, operations: float) -> None:
        """Run the items of a phase, for the runs of the window."""
        self.c.phase = phase
        run_items(self.c, "ringtile_lists", items, operations)

    def run_queries(self, phase: ListsPhase, heads: int, first: int, last: int, operations: float) -> None:
        """Run a phase whose items are runs of some key heads, from ``first`` to ``last`` - 1."""
        c = self.c
        c.first_run, c.last_run = first, last
        items = heads * -(-self.ratio // c.list_rows) * -(-(last - first) // c.item_runs)
        self.run(phase, items, operations)


def forward(q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float) -> Attended:
    """Return the output ``[B, H, Nq, Dv]`` in q's dtype and the lse ``[B, H, Nq]``, float32."""
    job = _Job(q, k, v, lists, scale)
    out, lse = new_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    if not lse.numel() or not job.places:
        return out.zero_(), lse.fill_(-math.inf)
    job.c.place(out=out)
    job.c.point(lse=lse)
    job.run_queries(ListsPhase.FORWARD, len(k) * k.shape[1], 0, job.runs, job.operations)
    return out, lse


def backward(rows: Rows, lists: Lists, scale: float) -> Grads:
    """Return the gradients of q, k and v, contiguous and in their dtype.

    Queries leave weights, from which ranges of keys then add up theirs in the order of the queries. How many queries
    wait follows from the shapes, so no bit depends on the number of threads.
    """
    out_grad, lse_grad, q, k, v, out, lse = rows
    job = _Job(q, k, v, lists, scale)
    check_rows(q, v, out, out_grad, lse, lse_grad)
    c = job.c
    q_grad = q.new_empty(q.shape)
    k_grad, v_grad = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    if not lse.numel() or not job.places:
        return q_grad.zero_(), k_grad.to(k.dtype), v_grad.to(v.dtype)
    c.place(out=with_contiguous_rows(out), out_grad=with_contiguous_rows(out_grad))
    c.point(lse=lse.contiguous(), q_grad=q_grad, key_sums=k_grad, value_sums=v_grad)
    if lse_grad is not None:
        c.point(lse_grad=lse_grad.float().contiguous())
    chunks = min(c.n_keys, max(-(-job.places // _KEYS_OF_A_QUERY), c.n_keys * (c.head_dim + c.value_dim) // _SUMS))
    c.chunk_keys = -(-c.n_keys // max(chunks, 1))
    chunks = -(-c.n_keys // c.chunk_keys)
    entries = max(c.run * c.list_length, c.run * c.union_room if c.run > 1 else 0)
    c.weights_room = 2 * entries * c.block * job.ratio
    heads = c.batch * c.kv_heads
    room = max(_WEIGHTS, sum(x.numel() for x in (q, k, v)) // 8)
    # Many queries of some heads before the others: each window reads and writes the gradients of all its keys.
    window = min(job.runs, -(-_WINDOW // c.run), max(1, room // c.weights_room))
    together = min(heads, max(1, room // (window * c.weights_room)))
    c.point(weights=lse.new_empty(window * together * c.weights_room))
    for c.first_head in range(0, heads, together):
        some = min(together, heads - c.first_head)
        for first in range(0, job.runs, window):
            last = min(first + window, job.runs)
            operations = job.operations * some / heads * (last - first) / job.runs
            job.run_queries(ListsPhase.QUERY_GRADS, some, first, last, 1.5 * operations)
            job.run(ListsPhase.KEY_GRADS, some * chunks, operations)
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)
