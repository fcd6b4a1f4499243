"""Some tiles of an index, as another index: without patterns, hashing or loops over tiles."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.index.debug import check_lists
from ringtile.index.lists import TileLists, extra_splits, most_splits, slot_of_entries, work_list
from ringtile.index.schedule import derived, remember
from ringtile.index.tile_index import AnIndex, TileIndex
from ringtile.patterns import Pattern
from ringtile.patterns.private import assert_async

KeptLists = tuple[list[Tensor], list[Tensor]]
"""The first five fields of the `TileLists` of rows and of columns."""


list_copier: Callable[[TileIndex, Tensor, torch.Size | None, int | None], KeptLists | None] | None = None
"""A hook that the room above fills: `ringtile.kernels.native` sets it to its library's function, because compiled code
is above this room. It makes the numbers that `_copied_lists` makes, or returns None if it does not support a call."""


@torch.inference_mode(False)
def restricted(index: AnIndex, keep: Tensor, capacity: int | None = None) -> AnIndex:
    """Return the index of the tiles that ``keep`` also keeps, bool ``[B or 1, H or 1, n_rows, n_cols]``.

    Batch elements and heads of ``keep`` each have their own group, unless it has only one of both.

    ``capacity`` bounds the number of kept tiles over all groups, for example from a budget. The lists then have room
    for this many tiles, and their unused ends mean nothing. Attention over the index is the same, bit for bit, but no
    value goes back from the device to the host, after the first call for a base. Default: lists that fit, for which the
    call synchronizes with the device once. Raises ValueError if ``keep`` does not match, or ``capacity`` is negative.
    If ``keep`` has more tiles than ``capacity``, the device raises RuntimeError.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> every_other = torch.arange(4) % 2 == torch.arange(4)[:, None] % 2
    >>> print(build_index(Causal(), 512).restricted(every_other[None, None]).draw())
    ▒···
    ·▒··
    █·▒·
    ·█·▒
    """
    check_keep(index, keep, (index.n_rows, index.n_cols))
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise ValueError(f"capacity: expected a number of tiles or None, got {capacity!r}")
    shape, group = None, index.group
    if keep.shape[:2] != (1, 1):
        shape = torch.broadcast_shapes(index.group.shape, keep.shape[:2])
        group = torch.arange(shape.numel(), dtype=torch.int32, device=index.device).view(shape)
    # Checked and read once per base, so that no result needs it.
    derived(index, check_lists)
    lists, rooms = None if list_copier is None else list_copier(index, keep, shape, capacity), list[int]()
    if lists is None:
        lists, rooms = _copied_lists(index, keep, shape, capacity)
    if capacity is not None:
        longest = (index.n_cols, index.n_rows)
        rooms = [most_splits(capacity, len(side[0]) - 1, most) for side, most in zip(lists, longest, strict=True)]
    elif not rooms:
        rooms = torch.stack([extra_splits(side[0], side[2]) for side in lists]).tolist()
    rows, cols = (
        TileLists._make((*side, work_list(side[0], side[2], room), base.at))
        for side, room, base in zip(lists, rooms, (index.rows, index.cols), strict=True)
    )
    found = replace(index, group=group, rows=rows, cols=cols, envelopes=envelopes_of(index, group))
    remember(found, check_lists, None)
    return found


class _List(NamedTuple):
    """The full or the partial tiles of a base, along its rows or its columns, in the groups of the result."""

    number: Tensor
    """int64 ``[E]``: the place of each tile in a mask. The list repeats for each of several masks."""
    begins: Tensor
    """int64, the begin of each slot in the list of all masks, then its length."""
    fields: tuple[Tensor, ...]
    """int32 ``[E]`` each: the column or row of each tile, and the row in the tile table if the tiles are partial."""


def _copied_lists(
    index: TileIndex, keep: Tensor, shape: torch.Size | None, capacity: int | None
) -> tuple[KeptLists, list[int]]:
    """Return the lists of kept tiles, in the groups of ``shape`` if not None, and without a capacity `extra_splits`."""
    masks = keep.reshape(1, -1)
    if shape is not None:
        masks = keep.expand(*shape, -1, -1).reshape(1 if index.n_groups > 1 else shape.numel(), -1)
    # The full and the partial tiles of the rows, then those of the columns.
    parts = derived(index, _lists_of, shape)
    keeps = [_flags(masks, each) for each in parts]
    # The kept tiles before each slot. Of flags 1 0 1 | 1 1, slots begin at 0 and 2, and 4 tiles are kept.
    begins = [flags.cumsum(0).index_select(0, each.begins).int() for flags, each in zip(keeps, parts, strict=True)]
    kept, rooms = [begins[0][-1], begins[1][-1]], list[int]()
    if capacity is None:
        splits = (extra_splits(begins[0], begins[1]), extra_splits(begins[2], begins[3]))
        full, partial, *rooms = torch.stack([*kept, *splits]).tolist()
        sizes = [full, partial]
    else:
        assert_async(kept[0] + kept[1] <= capacity, too_many(capacity))
        sizes = [min(capacity, len(flags) - 2) for flags in keeps[:2]]
    lists: KeptLists = ([], [])
    for number, (each, times, begin) in enumerate(zip(parts, keeps, begins, strict=True)):
        # The tile that each entry comes from. Behind the last one, any tile will do.
        size = sizes[number % 2]
        times[-1] = size - begin[-1]
        place = torch.repeat_interleave(times, output_size=size).sub_(1).clamp_(max=max(len(times) - 3, 0))
        if len(masks) > 1:
            place.remainder_(max(len(each.number), 1))
        lists[number // 2].extend((begin, *(x.index_select(0, place) for x in each.fields)))
    return lists, rooms


def _flags(masks: Tensor, each: _List) -> Tensor:
    """Return 1 for each kept tile of a list and 0 for the others, between a zero and a place for later: int64."""
    offsets = torch.arange(len(masks), device=masks.device).unsqueeze(1) * masks.shape[1]
    found = torch.empty(len(masks) * len(each.number) + 2, dtype=torch.int64, device=masks.device)
    found[0] = 0
    found[1:-1] = masks.reshape(-1).index_select(0, (each.number + offsets).flatten())
    return found


def too_many(capacity: int) -> str:
    """Return the message of the error if a mask keeps more tiles than a capacity."""
    return f"capacity: keep has more than {capacity} tiles of the index"


def _lists_of(index: TileIndex, shape: torch.Size | None) -> list[_List]:
    """Return the lists of a base, in its own groups if all share a mask, or in those of ``shape``."""
    n_rows, n_cols = index.n_rows, index.n_cols
    masks = 1 if shape is None or index.n_groups > 1 else shape.numel()
    base = torch.arange(index.n_groups, device=index.device)
    if shape is not None and index.n_groups > 1:
        base = index.group.expand(shape).flatten().long()
    found = []
    for side, slots in ((index.rows, n_rows), (index.cols, n_cols)):
        for pointer, *fields in ((side.full_ptr, side.full), (side.partial_ptr, side.partial, side.tile)):
            pointer = pointer.long()
            length = pointer.diff().view(-1, slots)[base] if slots else pointer.new_zeros(len(base), 0)
            begins = pad(length.flatten().cumsum(0), (1, 0))
            slot = slot_of_entries(begins, int(begins[-1]))
            group, place = slot // max(slots, 1), slot % max(slots, 1)
            # The entry of each tile in the base, whose groups can be in another order. If groups of 2 and 3 tiles swap,
            # begins are 0 and 3, the base's are 2 and 0, and the entries are 2 3 4 0 1.
            entry = torch.arange(len(slot), device=index.device) - begins[slot] + pointer[base[group] * slots + place]
            fields = [x[entry] for x in fields]
            row, col = (place, fields[0]) if side is index.rows else (fields[0], place)
            number = (group * n_rows + row) * n_cols + col
            # All groups share one mask of tiles, or have their own.
            number = number % max(n_rows * n_cols, 1) if shape is None else number
            offsets = torch.arange(masks, device=index.device) * len(slot)
            every = pad((begins[:-1] + offsets[:, None]).flatten(), (0, 1), value=masks * len(slot))
            found.append(_List(number, every, tuple(fields)))
    return found


def check_keep(index: TileIndex, keep: Tensor, shape: tuple[int, int]) -> None:
    """Raise ValueError if a mask does not match the batch elements, the heads and ``shape``."""
    sizes = index.group.shape
    fits = keep.dim() == 4 and all(a == b or 1 in (a, b) for a, b in zip(keep.shape[:2], sizes, strict=True))
    if keep.dtype != torch.bool or not fits or keep.shape[2:] != shape or keep.device != index.device:
        raise ValueError(
            f"keep: expected bool [B or 1, H or 1, {shape[0]}, {shape[1]}] on {index.device} for {tuple(sizes)} batch "
            f"elements and heads, got {keep.shape=}, {keep.dtype=} on {keep.device}"
        )


def envelopes_of(index: TileIndex, group: Tensor) -> tuple[Pattern, ...]:
    """Return the envelopes of an index for the rows of another ``group``."""
    return index.envelopes * (len(group) // len(index.envelopes))
