"""Values that kernels derive from an index once: the order of its rows and columns, and their own."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringtile.index.tile_index import TileIndex
from ringtile.patterns.private import version_of

T = TypeVar("T")

_VALUES = 32
"""Largest number of values per index, for example one plan per length."""


class Order(NamedTuple):
    """The splits of the lists of rows or columns, sorted by group, then longest first."""

    work: Tensor
    """``[W, 4]`` int32: slot, first and last entry, scratch slot or -1."""
    begin: Tensor
    """``[G + 1]`` int32. The first split of each group, then the number of splits."""
    splits: Tensor
    """``[slots, 2]`` int32. First scratch slot and number of splits of each slot, 0 if the slot is not split."""
    longest: int
    """Upper bound of the number of splits of a group."""
    n_scratch: int
    """Upper bound of the number of scratch slots of all groups together."""


class Schedule(NamedTuple):
    """The order of both directions."""

    rows: Order
    cols: Order


def order_of(work: Tensor, n_groups: int, per_group: int) -> Order:
    """Sort a work list by group. All sizes follow from shapes, so this does not synchronize with the device."""
    slots = n_groups * per_group
    extra = len(work) - slots
    slot, scratch = work[:, 0].long(), work[:, 3]
    unused = slot < 0
    group = torch.where(unused, n_groups, slot // max(per_group, 1))
    # Splits per group, one place later, and those that are not used at the end: their sums are the begins.
    members = torch.zeros(n_groups + 2, dtype=torch.int64, device=work.device)
    members.scatter_add_(0, group + 1, torch.ones_like(group))
    begin = members[: n_groups + 1].cumsum(0).int()
    ordered = work[torch.argsort(group, stable=True)].contiguous()
    # The last row takes the splits that belong to no slot.
    splits = torch.zeros(slots + 1, 2, dtype=torch.int32, device=work.device)
    if extra:
        cut = torch.where(unused | (scratch < 0), slots, slot)
        splits[:, 1].scatter_add_(0, cut, torch.ones_like(scratch))
        splits[:, 0].scatter_(0, torch.where(work[:, 1] == 0, cut, slots), scratch)
    return Order(ordered, begin, splits[:slots], per_group + extra, 2 * extra)


def schedule_of(index: TileIndex) -> Schedule:
    """Return the order in which a kernel computes the rows and the columns of an index."""
    return derived(index, _make_schedule)


def _make_schedule(index: TileIndex) -> Schedule:
    sides = (index.rows, index.n_rows), (index.cols, index.n_cols)
    return Schedule(*(order_of(lists.work, index.n_groups, per_group) for lists, per_group in sides))


def is_capturing(device: torch.device) -> bool:
    """Return True if a CUDA graph captures what is queued now: it is computed at each replay, not before."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Made(NamedTuple):
    """A value, and when the kernels that make it are done."""

    value: Any
    stream: int = 0
    """The stream of these kernels."""
    done: torch.cuda.Event | None = None
    """An event behind them. None on a CPU."""


class _Values(NamedTuple):
    """Values made of one index."""

    content: tuple[Any, ...]
    """The identities and versions of the index's tensors."""
    tensors: tuple[Tensor, ...]
    """These tensors, except the key of the table below. They stay alive, so no other tensor gets their identity."""
    made: OrderedDict[Hashable, _Made]
    captured: dict[Hashable, Any]
    """Values whose memory a CUDA graph reads. They live as long as the index."""


# Cache of derived values. Key: an index's `rows.full_ptr`, and all its tensors and versions must be those of the entry.
# Within it: the function, the grid of tiles and the arguments. Bound: 32 values per index. Owner: that tensor, by a
# weak reference, so a value must not refer to it. The lock guards the table, and values are made outside it.
_table: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def derived(index: TileIndex, make: Callable[..., T], *args: Any, lengths: bool = False) -> T:
    """Return ``make(index, *args)``, made once for the tensors of an index, its grid of tiles and ``args``.

    Indices that share their tensors share the value, even if their lengths differ inside the first and last tiles. A
    value that depends on the lengths needs ``lengths=True``. If you change a tensor in place, all values are made
    again. Inference tensors do not count their changes, so their values are not kept. Nor are values that a CUDA graph
    captures: they have no content before the first replay. The value must not refer to ``index.rows.full_ptr``, because
    it lives as long as that tensor.
    """
    address = _address(index, make, (*args, *((index.start, index.n_queries, index.n_keys) if lengths else ())))
    if address is None:
        return make(index, *args)
    content, place = address
    with _lock:
        values: _Values | None = _table.get(index.rows.full_ptr)
        if values is not None and values.content == content and place in values.made:
            values.made.move_to_end(place)
            found: T = _ready(values, place, index.device)
            return found
    return _stored(index, content, place, make(index, *args))


def remember(index: TileIndex, make: Callable[..., T], value: T) -> None:
    """Let `derived` return a value that is known without a call of ``make``."""
    address = _address(index, make, ())
    if address is not None:
        _stored(index, *address, value)


def _address(
    index: TileIndex, make: Callable[..., T], key: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Hashable, ...]] | None:
    """Return the content of an index and the name of a value, or None if the values of an index are not kept."""
    tensors, grid = index.tensors(), index.grid
    try:
        content = (*map(id, tensors), *map(version_of, tensors))
    except RuntimeError:
        return None
    return content, (make, grid.block, grid.first_row, grid.n_rows, grid.n_cols, *key)


def _stored(index: TileIndex, content: tuple[Any, ...], place: tuple[Hashable, ...], value: T) -> T:
    device, made = index.device, _Made(value)
    if is_capturing(device):
        return value
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        made = _Made(value, stream.cuda_stream, stream.record_event())
    with _lock:
        values = _table.get(index.rows.full_ptr)
        if values is None or values.content != content:
            others = tuple(x for x in index.tensors() if x is not index.rows.full_ptr)
            _table[index.rows.full_ptr] = values = _Values(content, others, OrderedDict(), {})
        # If another thread was first, all use its value.
        values.made.setdefault(place, made)
        if len(values.made) > _VALUES:
            values.made.popitem(last=False)
        found: T = _ready(values, place, device)
    return found


def _ready(values: _Values, place: Hashable, device: torch.device) -> Any:
    """Return a value. On another stream than its own, what is queued from now on waits for it."""
    value, stream, done = values.made[place]
    if done is None:
        return value
    if is_capturing(device):
        # No wait: a graph may not depend on what came before its capture, and begins after that is done.
        return values.captured.setdefault(place, value)
    current = torch.cuda.current_stream(device)
    if stream != current.cuda_stream:
        current.wait_event(done)
    return value
