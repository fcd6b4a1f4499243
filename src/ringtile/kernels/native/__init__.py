"""The C++ kernel for CPUs: SIMD and threads, forward and backward, over any index."""

import ctypes
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.index.debug import check_lists
from ringtile.index.schedule import Order, derived, schedule_of
from ringtile.kernels.contracts import (
    Added,
    Attended,
    Call,
    Grads,
    Rows,
    accumulator,
    dense_tiles_reason,
    index_of,
    new_out,
    with_contiguous_rows,
)
from ringtile.kernels.native.checks import check_added, check_groups, check_options, check_rows, check_tensors
from ringtile.kernels.native.library import BackwardPhase, CallStructure, ForwardPhase, Library, library, reason_against
from ringtile.kernels.native.precision import arithmetic_of
from ringtile.kernels.philox import dropout_threshold
from ringtile.kernels.spans import INDEX, KernelTime, listeners, span
from ringtile.patterns.private import version_of

_OPERATIONS_A_CALL = 2e10
"""Operations per thread and call, about a quarter of a second. Ctrl-C works between calls."""
_OPERATIONS_A_THREAD = 3e6
"""A thread with less work, about 20 microseconds, does not pay for its start and its end."""
_INDEX_FIELDS = (
    *("group", "full_row_ptr", "full_col", "part_row_ptr", "part_col", "part_tile", "full_col_ptr", "full_row"),
    *("part_col_ptr", "part_row", "part_tile_t", "bits", "bits_t", "rows_any", "cols_any"),
)
_ROW_BLOCK = 128
_SMALL = 1e8
"""Operations of a call that would notice the search for its index. A larger one keeps its index in the cache longer."""
_TEMPLATES = 32
_READS = 8
"""Rows that a head reads as often are copied side by side first: far apart, they share few sets of the first cache."""
_SHARES_A_THREAD = 16
"""Threads share a row or column of more than 1 / 16 of one thread's work in the backward pass."""


def threads_of(operations: float) -> int:
    """Return how many of PyTorch's threads a forward pass of this many floating-point operations is worth."""
    available = torch.get_num_threads() if library().runtime else 1
    return max(1, min(available, int(operations / _OPERATIONS_A_THREAD)))


def _whole_tiles(dims: int) -> int:
    return math.ceil(dims / 16) * 16


def ranges(count: int, operations: float, threads: int) -> Iterator[tuple[int, int]]:
    """Cut ``count`` items into calls of bounded length."""
    calls = max(1, min(count, math.ceil(operations / (_OPERATIONS_A_CALL * threads))))
    for number in range(calls):
        yield count * number // calls, count * (number + 1) // calls


def run_items(c: CallStructure, name: str, items: int, operations: float) -> None:
    """Let a function of the library compute all items of a call, in calls of bounded length."""
    for first, last in ranges(items, operations, c.threads):
        c.first_item, c.last_item = first, last
        library().run(getattr(library().handle, name), c)


def backward_products(key_heads: int, threads: int) -> int:
    """Return the matmuls per tile in the backward pass: 5 if threads handle whole heads, 7 for rows, then columns."""
    return 5 if 5 * math.ceil(key_heads / threads) * threads <= 7 * key_heads else 7


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return the reasons why the native kernel does not support this call."""
    reasons = []
    if q.device.type != "cpu":
        reasons.append(f"needs a CPU, got {q.device}")
    elif reason := reason_against():
        reasons.append(reason)
    return reasons + dense_tiles_reason(q, k, call)


class _Side(NamedTuple):
    """The lists of rows or of columns: ``[groups, slots]``."""

    length: Tensor
    splits: Tensor
    """int32, the number of splits of each list."""
    is_split: bool
    """True if any list has more than one split."""


class _Template(NamedTuple):
    """What calls over one index have in common if their tensors have equal shapes, strides and dtypes."""

    structure: CallStructure
    """A call without its addresses and options. Calls run at once in several threads, so each fills in a copy."""
    item_begin: Tensor
    n_items: int
    operations: float
    dtype: torch.dtype
    accumulator: torch.dtype
    in_place: bool
    """True if the kernel reads the tensors where they are."""
    rereads: bool
    """True if it reads each row many times, so that `_readable` copies those that are far apart."""
    out_stride: tuple[int, ...]
    """The layout of `new_out`."""
    n_rows: int
    n_cols: int


class _Lists(NamedTuple):
    """Values that the kernel derives from an index."""

    structure: CallStructure
    """A call with the fields of the index."""
    kept: tuple[Tensor, ...]
    """The tensors whose memory the structure points to, but ``full_row_ptr``: these values live as long as it does."""
    group: Tensor
    work_begin: Tensor
    tiles: int
    """Kept tiles of a group, on average."""
    rows: _Side
    cols: _Side
    shared_splits: dict[tuple[int, ...], Tensor]
    # Key: the arguments of `_shared_splits`. Bound: one entry per batch, number of heads and of threads, and direction.
    # Owner: these values, which leave with their index.
    templates: OrderedDict[Hashable, _Template]
    # Key: the form of the tensors. Bound: _TEMPLATES entries, the oldest leaves first. Owner: these values. A call over
    # the tensors of an index, as in a compiled graph, has no plan, and a structure takes as long as 26 tokens.


def _lists_of(index: BlockIndex) -> _Lists:
    derived(index, check_lists)
    if index.device.type != "cpu":
        raise ValueError(f"index: expected tensors on the CPU, got {index.device}")
    structure, rows, groups = library().structure(), schedule_of(index).rows, index.n_groups
    row_side = _side(index.rows.full_ptr + index.rows.partial_ptr, rows, groups)
    col_side = _side(index.cols.full_ptr + index.cols.partial_ptr, schedule_of(index).cols, groups)
    is_split = row_side.splits > 1
    tensors = {
        **{name: x.contiguous() for name, x in zip(_INDEX_FIELDS, index.tensors(), strict=False)},
        "work": torch.cat([rows.work, row_side.splits.flatten()[rows.work[:, :1].long()]], 1),
        "work_begin": rows.begin.long(),
        "row_splits": row_side.splits,
        "col_splits": col_side.splits,
        "row_buffer": torch.where(is_split, is_split.cumsum(1) - 1, 0).int(),
        **{name: at.contiguous() for name, at in (("row_at", index.rows.at), ("col_at", index.cols.at)) if len(at)},
    }
    structure.borrow(tensors)
    # A stride of 0 reads one group for all batch elements or heads.
    structure.group_stride[0] = index.group.shape[1] if index.group.shape[0] > 1 else 0
    structure.group_stride[1] = 1 if index.group.shape[1] > 1 else 0
    structure.block = index.block
    structure.n_rows, structure.n_cols, structure.n_groups = index.n_rows, index.n_cols, groups
    structure.n_splits = int(rows.work[:, 3].max()) + 1 if len(rows.work) else 0
    structure.n_row_buffers = max(is_split.sum(1).tolist())
    tiles = (len(index.rows.full) + len(index.rows.partial)) // groups
    kept = tuple(tensor for tensor in tensors.values() if tensor is not index.rows.full_ptr)
    return _Lists(structure, kept, index.group, tensors["work_begin"], tiles, row_side, col_side, {}, OrderedDict())


def _side(begins: Tensor, order: Order, groups: int) -> _Side:
    splits = order.splits[:, 1].clamp(min=1)
    shape = groups, len(splits) // groups
    return _Side(begins.diff().long().view(shape), splits.view(shape), bool((splits > 1).any()))


def _shared_splits(lists: _Lists, batch: int, heads: int, items: int, threads: int, columns: bool) -> Tensor:
    """Return the splits of rows or columns that are long for one thread: item, head over the batch, first, last."""
    key = batch, heads, items, threads, columns
    if (found := lists.shared_splits.get(key)) is not None:
        return found
    side = lists.cols if columns else lists.rows
    entries: list[tuple[int, int, int, int]] = []
    if side.is_split and threads > 1:
        group = lists.group.long().expand(batch, heads)
        slots, ratio = side.length.shape[1], batch * heads // items
        length, splits = (x[group].view(items, ratio, slots) for x in (side.length, side.splits))
        work = length.sum(1)
        shared = (splits > 1).any(1) & (work * threads * _SHARES_A_THREAD > work.sum())
        # With 2 heads per key head, column 5 of key head 1 and 3 splits has 6 entries: 3 of head 2, then 3 of head 3.
        for item, slot in shared.nonzero().tolist():
            for head in range(ratio):
                tiles, count = int(length[item, head, slot]), int(splits[item, head, slot])
                for split in range(count):
                    ends = tiles * split // count, tiles * (split + 1) // count
                    entries.append((item * slots + slot, item * ratio + head, *ends))
    found = lists.shared_splits[key] = torch.tensor(entries, dtype=torch.int64, device="cpu").view(-1, 4)
    return found


class Prepared(NamedTuple):
    """What calls of one structure share. It keeps the tensors of the index alive, but not the `BlockIndex`."""

    lists: _Lists
    template: _Template
    start: int
    """Not in the template: indices of other starts in the same tile share their lists."""
    tensors: tuple[Tensor, ...]
    """The tensors of the index."""
    versions: list[int] | None
    """Counts of their changes, or None if an inference tensor among them does not count."""

    def is_current(self) -> bool:
        """Return True if the index has not changed in place."""
        return self.versions is not None and self.versions == [*map(version_of, self.tensors)]


def prepare(q: Tensor, k: Tensor, v: Tensor, index: BlockIndex) -> Prepared | None:
    """Return what calls over these shapes, strides, dtypes and pairs share, or None if there are no queries."""
    if not q.shape[:3].numel():
        return None
    check_tensors(q, k, v)
    with span(INDEX):
        # Indices of one pattern whose lengths end in the same tiles share their lists.
        lists = derived(index, _lists_of)
        layout = *(x.shape for x in (q, k, v)), *(x.stride() for x in (q, k, v)), q.dtype
        template = lists.templates.get(layout)
        if template is None:
            template = lists.templates[layout] = _make_template(q, k, v, index, lists)
            if len(lists.templates) > _TEMPLATES:
                lists.templates.popitem(last=False)
    # Versions are read after the lists are checked: a change from now on shows.
    tensors = tuple(index.tensors())
    versions = None
    # Inference tensors do not count their changes.
    with suppress(RuntimeError):
        versions = [*map(version_of, tensors)]
    return Prepared(lists, template, index.start, tensors, versions)


def _current(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Prepared | None) -> Prepared:
    """Return what is prepared for a call with queries. Raise ValueError if its tensors do not match."""
    if prepared is not None and prepared.is_current() and q.dtype is k.dtype is v.dtype is prepared.template.dtype:
        if call.pattern and prepared.template.operations >= _SMALL:
            # Otherwise an index in use would become the least recently used one of its cache.
            index_of(call, q, k)
        return prepared
    check_tensors(q, k, v)
    prepared = prepare(q, k, v, index_of(call, q, k))
    assert prepared is not None
    return prepared


def _readable(x: Tensor, rereads: bool) -> Tensor:
    """Return a tensor that the kernel can read fast. What is expanded stays as small as it is."""
    far = rereads and x.stride(2) > x.shape[3] and 0 not in x.stride()
    return x.contiguous() if far else with_contiguous_rows(x)


def _make_template(q: Tensor, k: Tensor, v: Tensor, index: BlockIndex, lists: _Lists) -> _Template:
    check_groups(index, q)
    (batch, heads, n_queries, head_dim), (n_keys, value_dim) = q.shape, v.shape[2:]
    area = lists.tiles * min(index.block, n_queries) * min(index.block, n_keys) * batch * heads
    rereads = lists.tiles >= _READS * max(index.n_rows, index.n_cols)
    readable = with_contiguous_rows(q), _readable(k, rereads), _readable(v, rereads)
    in_place = readable[0] is q and readable[1] is k and readable[2] is v
    width = max(value_dim, 1)
    out_stride = n_queries * heads * width, width, heads * width, 1
    # The first work item of each batch element and head, then the number of all items.
    counts = lists.work_begin.diff()[index.group.long()].expand(batch, heads).flatten()
    items = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    c = lists.structure.copy()
    (c.batch, c.heads, c.n_queries, c.head_dim), (c.kv_heads, c.n_keys, c.value_dim) = q.shape, v.shape[1:]
    c.q_stride, c.k_stride, c.v_stride = (x.stride()[:3] for x in readable)
    c.out_stride = out_stride[:3]
    c.borrow({"item_begin": items})
    operations = 2.0 * area * (head_dim + value_dim)
    sizes = index.n_rows, index.n_cols
    return _Template(
        c, items, int(items[-1]), operations, q.dtype, accumulator(q), in_place, rereads, out_stride, *sizes
    )


class _Job:
    """One call's structure."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Prepared | None = None, added: Added | None = None
    ) -> None:
        # Kept whole: the structure points into its tensors.
        self.prepared = _current(q, k, v, call, prepared)
        template = self.template = self.prepared.template
        check_options(q, k, call)
        self.library: Library = library()
        if not template.in_place:
            q, k, v = with_contiguous_rows(q), *(_readable(x, template.rereads) for x in (k, v))
        c = self.c = template.structure.copy()
        # Not in the template: the precision that a caller allows can change from call to call.
        arithmetic = arithmetic_of(q.dtype)
        c.isa, c.dtype, c.start, c.scale = arithmetic.isa.number, arithmetic.code, self.prepared.start, call.scale
        # Written out: a short call would notice `point`.
        c.tensors += q, k, v
        c.q, c.k, c.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if call.key_bits is not None:
            c.point(key_bits=call.key_bits.contiguous())
            c.key_words = call.key_bits.shape[1]
        if call.key_lengths is not None:
            c.point(key_lengths=call.key_lengths.long().contiguous())
        if call.seed is not None:
            c.seed, c.dropout_threshold = int(call.seed), dropout_threshold(call.dropout_p)
            for name, numbers in (("head_at", call.head_at), ("batch_at", call.batch_at)):
                if numbers is not None:
                    c.point(**{name: numbers.contiguous()})
        if call.softcap or call.alibi_slopes is not None or added is not None:
            c.scale, c.true_scale, c.softcap = 1, call.scale, call.softcap
        if call.alibi_slopes is not None:
            c.point(slopes=call.alibi_slopes.double().contiguous())
        if added is not None:
            check_added(q, k, added)
            values, query_at, key_at, _ = added
            c.point(added=values, added_queries=query_at, added_keys=key_at)
            # One row of numbers is that of all queries.
            several, c.added_places = values.shape[2] > 1, values.shape[3]
            c.added_stride = *values.stride()[:2], values.stride(2) * several
            if added.grad is not None:
                c.point(added_grad=added.grad)
                c.added_grad_stride = *added.grad.stride()[:2], added.grad.stride(2) * several
        c.threads = threads_of(template.operations)

    def run(self, forward: bool, phase: int, items: int, operations: float) -> None:
        """Run one phase over all its items."""
        function = self.library.handle.ringtile_forward if forward else self.library.handle.ringtile_backward
        self.c.phase = phase
        for first, last in ranges(items, operations, self.c.threads):
            self.c.first_item, self.c.last_item = first, last
            self._call(function)

    def run_columns(self, heads: int, operations: float) -> None:
        """Run the columns of each head on one thread, some columns at a time."""
        self.c.phase, self.c.first_item, self.c.last_item = BackwardPhase.HEADS, 0, heads
        for first, last in ranges(self.template.n_cols, operations, self.c.threads):
            self.c.first_col, self.c.last_col = first, last
            self._call(self.library.handle.ringtile_backward)

    def run_lists(self, phase: int, items: int, places: int, operations: float) -> None:
        """Run the rows or columns of ``items`` heads. Threads share long ones, in a fixed order."""
        c, columns = self.c, phase == BackwardPhase.COLUMNS
        splits = _shared_splits(self.prepared.lists, c.batch, c.heads, items, c.threads, columns)
        c.point(shared_splits=splits)
        c.n_shared_splits = len(splits)
        if len(splits):
            width = _whole_tiles(c.head_dim) + (_whole_tiles(c.value_dim) if columns else 0)
            c.point(scratch=splits.new_empty(len(splits) * width * _ROW_BLOCK, dtype=self.template.accumulator))
        self.run(False, phase, len(splits) + items * places, operations)
        if len(splits):
            self.run(False, phase + (BackwardPhase.FOLD_ROWS - BackwardPhase.ROWS), len(splits), 0)

    def _call(self, function: Any) -> None:
        # A copy, because a listener can leave in another thread during the call.
        listening = list(listeners)
        times = (ctypes.c_int64 * 2)() if listening else None
        self.c.times = None if times is None else ctypes.addressof(times)
        self.library.run(function, self.c)
        if times is not None:
            for listener in listening:
                listener.append(KernelTime(self.c.out_grad is not None, times[0], times[1]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Prepared | None = None, added: Added | None = None
) -> Attended:
    """Return the output ``[B, H, Nq, Dv]`` in q's dtype and the lse ``[B, H, Nq]`` (float32, float64 for float64)."""
    rows = q.shape[:3]
    if not rows.numel():
        index_of(call, q, k)  # raises the same errors as a call with queries
        return new_out(q, v.shape[-1]), q.new_empty(rows, dtype=accumulator(q))
    job = _Job(q, k, v, call, prepared, added)
    template = job.template
    out = q.new_empty_strided((*rows, v.shape[3]), template.out_stride)
    lse = q.new_empty(rows, dtype=template.accumulator)
    job.c.out, job.c.lse = out.data_ptr(), lse.data_ptr()
    if job.c.n_splits:
        size = q.shape[0] * q.shape[1] * job.c.n_splits * (v.shape[3] + 2) * _ROW_BLOCK
        job.c.point(scratch=lse.new_empty(size))
    job.run(True, ForwardPhase.ATTEND, template.n_items, template.operations)
    if job.c.n_splits:
        job.run(True, ForwardPhase.COMBINE, template.n_items, 0)
    return out, lse


def backward(rows: Rows, call: Call, prepared: Prepared | None = None, added: Added | None = None) -> Grads:
    """Return the gradients of q, k and v, contiguous and in their dtype."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    check_rows(q, v, out, out_grad, lse, lse_grad)
    if not lse.numel() or not k.shape[2]:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    job = _Job(q, k, v, call, prepared, added)
    c, rereads = job.c, job.template.rereads
    heads, kv_heads = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    # All queries of a head add to the gradient of its table, in an order that one thread keeps.
    by_columns = backward_products(kv_heads, c.threads) == 5 or (added is not None and added.values.shape[2] == 1)
    # Columns add to the gradients of queries, tile by tile. Everything else is written once.
    k_grad, v_grad = k.new_empty(k.shape), v.new_empty(v.shape)
    c.place(out=with_contiguous_rows(out), q=_readable(q, rereads), out_grad=_readable(out_grad, rereads))
    c.point(lse=lse.contiguous(), delta=lse.new_empty(2 * lse.numel()), k_grad=k_grad, v_grad=v_grad)
    if lse_grad is not None:
        c.point(lse_grad=lse_grad.to(lse.dtype).contiguous())
    if by_columns:
        q_grad = lse.new_zeros(q.shape)
        c.point(q_sums=q_grad)
        if c.n_row_buffers:
            c.point(row_buffers=lse.new_empty(heads * c.n_row_buffers * q.shape[3] * _ROW_BLOCK))
        job.run_columns(kv_heads, 2.5 * job.template.operations)
    else:
        q_grad = q.new_empty(q.shape)
        c.point(q_grad=q_grad)
        job.run(False, BackwardPhase.DELTA, heads, 0)
        job.run_lists(BackwardPhase.ROWS, heads, job.template.n_rows, 1.5 * job.template.operations)
        job.run_lists(BackwardPhase.COLUMNS, kv_heads, job.template.n_cols, 2 * job.template.operations)
    return q_grad.to(q.dtype), k_grad, v_grad
