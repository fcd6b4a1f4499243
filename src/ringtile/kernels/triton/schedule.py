"""The order in which a GPU takes the rows and columns of an index, made on its device without reading anything back."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringtile.layout import BlockIndex

BLOCKS = (64, 128)
"""The sides of tiles that the kernels take; smaller ones are merged into tiles of 128."""


class Order(NamedTuple):
    """The pieces of work of one direction, those of a group together and longest first."""

    work: Tensor
    """``[W, 4]`` int32: slot, first and last entry, scratch slot or -1."""
    begin: Tensor
    """``[G + 1]`` int32: where each group's pieces begin."""
    pieces: Tensor
    """``[slots, 2]`` int32: first scratch slot and number of pieces of each slot, 0 of a slot in one piece."""
    longest: int
    """At least the number of pieces of any group."""
    n_scratch: int
    """At least the number of scratch slots of all groups together."""


class Schedule(NamedTuple):
    """An index as the kernels take it."""

    made_of: tuple[int, ...]
    """What tells the index from another that shares its key: its numbers and the identities of its tensors."""
    kept: tuple[Tensor, ...]
    """The tensors that ``made_of`` identifies, so that no other gets their place; without the key itself."""
    merged: BlockIndex | None
    """The index merged into tiles that the kernels take; None where they take it as it is."""
    rows: Order
    cols: Order


def order_of(work: Tensor, n_groups: int, per_group: int) -> Order:
    """Sort a work list by group; every size follows from shapes, so a list made on the device stays there."""
    slots = n_groups * per_group
    extra = len(work) - slots
    slot, scratch = work[:, 0].long(), work[:, 3]
    unused = slot < 0
    group = torch.where(unused, n_groups, slot // max(per_group, 1))
    members = torch.zeros(n_groups + 2, dtype=torch.int64, device=work.device)
    members.scatter_add_(0, group + 1, torch.ones_like(group))
    begin = members[: n_groups + 1].cumsum(0).int()
    ordered = work[torch.argsort(group, stable=True)].contiguous()
    # Slot by slot the first of its pieces and their number; a last row takes what belongs nowhere.
    pieces = torch.zeros(slots + 1, 2, dtype=torch.int32, device=work.device)
    if extra:
        cut = torch.where(unused | (scratch < 0), slots, slot)
        pieces[:, 1].scatter_add_(0, cut, torch.ones_like(scratch))
        pieces[:, 0].scatter_(0, torch.where(work[:, 1] == 0, cut, slots), scratch)
    return Order(ordered, begin, pieces[:slots], per_group + extra, 2 * extra)


_schedules: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def schedule_of(index: BlockIndex) -> Schedule:
    """The schedule of an index, made at its first use."""
    made_of = (index.block, index.start, index.n_queries, index.n_keys, *(id(x) for x in index.tensors()))
    with _lock:
        found: Schedule | None = _schedules.get(index.full_row_ptr)
    if found is None or found.made_of != made_of:
        taken = index if index.block in BLOCKS else index.coarsen(128)
        kept = tuple(x for x in index.tensors() if x is not index.full_row_ptr)
        rows = order_of(taken.row_work, taken.n_groups, taken.n_rows)
        cols = order_of(taken.col_work, taken.n_groups, taken.n_cols)
        found = Schedule(made_of, kept, None if taken is index else taken, rows, cols)
        with _lock:
            _schedules[index.full_row_ptr] = found
    return found
