"""Compressed lists, their splits and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ringtile.index.block_index import BlockIndex

LONGEST, WORKERS = 64, 512
"""A list is split if it has more than ``LONGEST`` entries and more than one share of ``WORKERS``. There are at most a
few hundred workers, and each split costs a scratch buffer."""


class Entries(NamedTuple):
    """Kept tiles: ``number = (group * n_rows + r) * n_cols + c`` and the state, `FULL` or a row of the tile table.

    Two int64 vectors. The numbers of the full tiles ascend, and so do the numbers of the partial tiles.
    """

    number: Tensor
    state: Tensor


def pointer(slots: Tensor, count: int) -> Tensor:
    """Return the begin of each slot's entries in a list sorted by slot: int32 ``[count + 1]``."""
    begins = torch.zeros(count + 1, dtype=torch.int32, device=slots.device)
    torch.cumsum(torch.bincount(slots, minlength=count), 0, dtype=torch.int32, out=begins[1:])
    return begins


def slot_of_entries(begins: Tensor, n_entries: int) -> Tensor:
    """Return the slot (int64) of each entry. This is the inverse of `pointer`."""
    slots = torch.arange(begins.numel() - 1, device=begins.device)
    return torch.repeat_interleave(slots, begins.diff(), output_size=n_entries)


def _splits(full_ptr: Tensor, part_ptr: Tensor) -> Tensor:
    """Return the number of splits of each slot's list."""
    begins = full_ptr + part_ptr
    limit = ((begins[-1] + WORKERS - 1) // WORKERS).clamp(min=LONGEST)
    return ((begins.diff() + limit - 1) // limit).clamp(min=1)


def extra_splits(full_ptr: Tensor, part_ptr: Tensor) -> Tensor:
    """Return the number of all splits beyond one per slot, as a tensor."""
    return (_splits(full_ptr, part_ptr) - 1).sum()


def most_splits(entries: int, slots: int, longest: int) -> int:
    """Return an upper bound of `extra_splits`, from the largest number of entries in all lists and in one.

    >>> most_splits(1000, 20, 64), most_splits(1000, 20, 65), most_splits(10**6, 1000, 1000)
    (0, 15, 512)
    """
    return min(WORKERS, slots * (max(longest - 1, 0) // LONGEST), max(entries - 1, 0) // LONGEST)


def work_list(full_ptr: Tensor, part_ptr: Tensor, room: int | None = None) -> Tensor:
    """Return the splits of each slot's list ``[W, 4]`` (slot, first, last, scratch slot or -1), longest first.

    A list longer than ``max(64, ceil(entries / 512))`` is cut into nearly equal splits. A slot without entries has one
    empty split, so that every row of the output has an owner. ``room`` is the number of splits beyond one per slot, or
    a bound of it: unused splits come last and have slot -1. Default: their number, for which it synchronizes.
    """
    length = (full_ptr + part_ptr).diff()
    slots, room = len(length), int(extra_splits(full_ptr, part_ptr)) if room is None else room
    slot, first, last = torch.arange(slots, dtype=torch.int32, device=length.device), torch.zeros_like(length), length
    scratch = torch.full_like(length, -1)
    if room:
        splits = _splits(full_ptr, part_ptr)
        ends = splits.cumsum(0, dtype=torch.int32)
        number = torch.arange(slots + room, dtype=torch.int32, device=length.device)
        unused = slots + room - ends[-1:]
        slot = torch.repeat_interleave(torch.cat((splits, unused)), output_size=slots + room)
        used = slot < slots
        owner = slot.clamp(max=slots - 1)
        number = number - (ends - splits).index_select(0, owner)
        length, splits = length.index_select(0, owner), splits.index_select(0, owner)
        first, last = (torch.where(used, length * end // splits, 0) for end in (number, number + 1))
        cut = used & (splits > 1)
        scratch = torch.where(cut, cut.cumsum(0, dtype=torch.int32) - 1, -1)
        slot = torch.where(used, slot, -1)
    order = torch.argsort(first - last, stable=True)
    return torch.stack((slot, first, last, scratch), 1).index_select(0, order)


def check_lists(index: BlockIndex) -> None:
    """Raise ValueError if a kernel that follows the lists of an index would read outside its tensors."""
    slots, words, table = index.n_groups, -(-index.block // 32), len(index.bits)
    rows, cols = slots * index.n_rows, slots * index.n_cols
    fulls, parts = len(index.full_col), len(index.part_col)
    for name, shape, limit in (
        ("full_row_ptr", (rows + 1,), fulls + 1),
        ("part_row_ptr", (rows + 1,), parts + 1),
        ("full_col_ptr", (cols + 1,), fulls + 1),
        ("part_col_ptr", (cols + 1,), parts + 1),
        ("group", index.group.shape, slots),
        ("full_col", (fulls,), index.n_cols),
        ("part_col", (parts,), index.n_cols),
        ("full_row", (fulls,), index.n_rows),
        ("part_row", (parts,), index.n_rows),
        ("part_tile", (parts,), table),
        ("part_tile_t", (parts,), table),
        ("bits", (table, index.block, words), None),
        ("bits_t", (table, index.block, words), None),
        ("rows_any", (table, words), None),
        ("cols_any", (table, words), None),
    ):
        x = getattr(index, name)
        if x.dtype != torch.int32 or x.device != index.device or x.shape != shape:
            raise ValueError(f"{name}: expected int32 {tuple(shape)}, got {x.dtype} {tuple(x.shape)} on {x.device}")
        low, high = map(int, x.aminmax()) if limit is not None and x.numel() else (0, -1)
        if low < 0 or (limit is not None and high >= limit):
            raise ValueError(f"{name}: expected numbers of at least 0 and below {limit}, got {low} ... {high}")
        if name.endswith("_ptr") and (x.diff() < 0).any():
            raise ValueError(f"{name}: expected numbers that rise, got {x}")
    for name, count in (("row_at", index.n_rows), ("col_at", index.n_cols)):
        x = getattr(index, name)
        if x.dtype != torch.int32 or x.device != index.device or x.shape not in ((0,), (count,)):
            raise ValueError(f"{name}: expected int32 (0,) or ({count},), got {x.dtype} {tuple(x.shape)} on {x.device}")
    for side in ("row", "col"):
        lists, work = (
            (getattr(index, f"full_{side}_ptr"), getattr(index, f"part_{side}_ptr")),
            getattr(index, f"{side}_work"),
        )
        if not torch.equal(work[work[:, 0] >= 0], work_list(*lists)):
            raise ValueError(f"{side}_work: expected the splits of the {side} lists")
