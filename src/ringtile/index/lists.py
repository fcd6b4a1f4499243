"""The compressed lists of an index, their splits and their checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.index.tiles import FULL

LONGEST, WORKERS = 64, 512
"""A list is split if it has more than ``LONGEST`` entries and more than one share of ``WORKERS``. There are at most a
few hundred workers, and each split costs a scratch buffer."""


class Entries(NamedTuple):
    """Kept tiles: ``number = (group * n_rows + r) * n_cols + c`` and the state, `FULL` or a row of the tile table.

    Two int64 vectors. The numbers of the full tiles ascend, and so do the numbers of the partial tiles.
    """

    number: Tensor
    state: Tensor


class TileLists(NamedTuple):
    """The kept tiles of all row slots of an index, or of all column slots, as two compressed lists."""

    full_ptr: Tensor
    """``[slots + 1]`` int32: the full tiles of slot s are ``full[full_ptr[s]:full_ptr[s + 1]]``."""
    full: Tensor
    """int32, ascending within a slot: the column of each full tile, or its row if the slots are columns."""
    partial_ptr: Tensor
    """The same for partial tiles."""
    partial: Tensor
    tile: Tensor
    """int32: the row of each partial tile in the tile table."""
    work: Tensor
    """``[W, 4]`` int32 (slot, first, last, scratch): a split of a slot's list (full tiles, then partial ones), longest
    first. ``scratch`` is -1 if the slot is not split, otherwise the scratch slot of the split. The scratch slots of a
    slot are consecutive and in order."""
    at: Tensor
    """int32: the tile in position space that each row or column tile holds, or empty if it is ``first_row + r`` or
    ``c``. Dropout and ALiBi depend on positions."""

    def slots(self) -> tuple[Tensor, Tensor]:
        """Return the slot (int64) of each full and of each partial tile."""
        return slot_of_entries(self.full_ptr, len(self.full)), slot_of_entries(self.partial_ptr, len(self.partial))

    def fitted(self, full: int, partial: int) -> "TileLists":
        """Return the lists with so many full and partial tiles, without the unused splits."""
        work = self.work[self.work[:, 0] >= 0]
        return self._replace(full=self.full[:full], partial=self.partial[:partial], tile=self.tile[:partial], work=work)


def list_tiles(slot: Tensor, other: Tensor, state: Tensor, n_slots: int, at: Tensor) -> TileLists:
    """List tiles by slot, from the slot, the other number and the state of each. Tiles of one kind ascend by both."""
    full, partial = state == FULL, state >= 0
    full_ptr, partial_ptr = pointer(slot[full], n_slots), pointer(slot[partial], n_slots)
    other, work = other.int(), work_list(full_ptr, partial_ptr)
    return TileLists(full_ptr, other[full], partial_ptr, other[partial], state[partial].int(), work, at)


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
    # 700 of 330,634 entries in one list, with 512 workers, are two splits of at most 646.
    limit = ((begins[-1] + WORKERS - 1) // WORKERS).clamp(min=LONGEST)
    return ((begins.diff() + limit - 1) // limit).clamp(min=1)


def extra_splits(full_ptr: Tensor, part_ptr: Tensor) -> Tensor:
    """Return the number of all splits beyond one per slot, as a tensor."""
    return (_splits(full_ptr, part_ptr) - 1).sum()


def most_splits(entries: int, slots: int, longest: int) -> int:
    """Return an upper bound of `extra_splits`, from the largest number of entries in all lists and in one."""
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
        # Splits 1, 3, 1 end at 1, 4, 5: their numbers are 0, 0 1 2 and 0.
        number = number - (ends - splits).index_select(0, owner)
        length, splits = length.index_select(0, owner), splits.index_select(0, owner)
        # Three splits of 10 entries are [0, 3), [3, 6) and [6, 10).
        first, last = (torch.where(used, length * end // splits, 0) for end in (number, number + 1))
        cut = used & (splits > 1)
        scratch = torch.where(cut, cut.cumsum(0, dtype=torch.int32) - 1, -1)
        slot = torch.where(used, slot, -1)
    order = torch.argsort(first - last, stable=True)
    return torch.stack((slot, first, last, scratch), 1).index_select(0, order)
