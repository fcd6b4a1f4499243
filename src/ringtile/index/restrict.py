"""Some tiles of an index, as another index, and some rows of it: without patterns, hashing or loops over tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.index.lists import Entries, check_lists, extra_splits, most_splits, slot_of_entries, work_list
from ringtile.index.tiles import EMPTY, TileTable, merge_equal, unpack_words

if TYPE_CHECKING:
    from ringtile.index.block_index import BlockIndex
    from ringtile.patterns import Pattern

_ROWS = 1 << 16
"""Token rows of tiles whose bits are cut at once."""


LISTS = {
    "full_row": ("full_col",),
    "part_row": ("part_col", "part_tile"),
    "full_col": ("full_row",),
    "part_col": ("part_row", "part_tile_t"),
}
"""The fields of an index that hold the tiles of each list."""


class _List(NamedTuple):
    """The full or the partial tiles of a base, along its rows or its columns, in the groups of the result."""

    number: Tensor
    """int64 ``[E]``: the place of each tile in a mask. The list repeats for each of several masks."""
    begins: Tensor
    """int64, the begin of each slot in the list of all masks, then its length."""
    fields: tuple[Tensor, ...]
    """int32 ``[E]`` each: the column or row of each tile, and the row in the tile table if the tiles are partial."""


compiled: dict[str, Callable[[BlockIndex, Tensor, torch.Size | None, int | None], dict[str, Tensor] | None]] = {}
"""``"kept_lists"``: the lists of `_kept_lists` by compiled code, or None for a call that it does not support.

`ringtile.kernels.native` fills it in.
"""


def restrict(index: BlockIndex, keep: Tensor, capacity: int | None) -> BlockIndex:
    """Return the index of `BlockIndex.restricted`."""
    # The module above this one.
    from ringtile.index.schedule import derived, remember

    _check(index, keep, (index.n_rows, index.n_cols))
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise ValueError(f"capacity: expected a number of tiles or None, got {capacity!r}")
    shape, group = None, index.group
    if keep.shape[:2] != (1, 1):
        shape = torch.broadcast_shapes(index.group.shape, keep.shape[:2])
        group = torch.arange(shape.numel(), dtype=torch.int32, device=index.device).view(shape)
    # Checked and read once per base, so that no result needs it.
    derived(index, check_lists)
    rooms: list[int] = []
    lists = compiled["kept_lists"](index, keep, shape, capacity) if compiled else None
    if lists is None:
        lists, rooms = _kept_lists(index, keep, shape, capacity)
    sides = [(lists[f"full_{side}_ptr"], lists[f"part_{side}_ptr"]) for side in ("row", "col")]
    if capacity is not None:
        longest = (index.n_cols, index.n_rows)
        rooms = [most_splits(capacity, len(side[0]) - 1, most) for side, most in zip(sides, longest, strict=True)]
    elif not rooms:
        rooms = torch.stack([extra_splits(*side) for side in sides]).tolist()
    restricted = type(index)(
        group=group,
        **lists,
        **index.table._asdict(),
        row_work=work_list(*sides[0], rooms[0]),
        col_work=work_list(*sides[1], rooms[1]),
        row_at=index.row_at,
        col_at=index.col_at,
        block=index.block,
        start=index.start,
        n_queries=index.n_queries,
        n_keys=index.n_keys,
        envelopes=_envelopes(index, group),
    )
    remember(restricted, check_lists, None)
    return restricted


def _kept_lists(
    index: BlockIndex, keep: Tensor, shape: torch.Size | None, capacity: int | None
) -> tuple[dict[str, Tensor], list[int]]:
    """Return the lists of kept tiles, in the groups of ``shape``, or of the base if it is None.

    With a capacity, tiles behind the last one are any. Without one, also return `extra_splits` of rows and columns: the
    lengths are read back together with it.
    """
    from ringtile.index.schedule import derived

    masks = keep.reshape(1, -1)
    if shape is not None:
        masks = keep.expand(*shape, -1, -1).reshape(1 if index.n_groups > 1 else shape.numel(), -1)
    parts = derived(index, _lists_of, shape)
    keeps = {name: _flags(masks, each) for name, each in parts.items()}
    begins = {name: keeps[name].cumsum(0).index_select(0, each.begins).int() for name, each in parts.items()}
    kept = {kind: begins[f"{kind}_row"][-1] for kind in ("full", "part")}
    rooms: list[int] = []
    if capacity is None:
        splits = (extra_splits(begins[f"full_{side}"], begins[f"part_{side}"]) for side in ("row", "col"))
        full, part, *rooms = torch.stack([*kept.values(), *splits]).tolist()
        sizes = {"full": full, "part": part}
    else:
        torch._assert_async(kept["full"] + kept["part"] <= capacity, too_many(capacity))
        sizes = {kind: min(capacity, len(keeps[f"{kind}_row"]) - 2) for kind in kept}
    lists = {f"{name}_ptr": each for name, each in begins.items()}
    for name, each in parts.items():
        # The tile that each entry comes from. Behind the last one, any tile will do.
        size, times = sizes[name[:4]], keeps[name]
        times[-1] = size - begins[name][-1]
        place = torch.repeat_interleave(times, output_size=size).sub_(1).clamp_(max=max(len(times) - 3, 0))
        if len(masks) > 1:
            place.remainder_(max(len(each.number), 1))
        lists |= {field: x.index_select(0, place) for field, x in zip(LISTS[name], each.fields, strict=True)}
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


def _lists_of(index: BlockIndex, shape: torch.Size | None) -> dict[str, _List]:
    """Return the lists of a base, in its own groups if all share a mask, or in those of ``shape``."""
    rows, cols = index.n_rows, index.n_cols
    masks = 1 if shape is None or index.n_groups > 1 else shape.numel()
    base = torch.arange(index.n_groups, device=index.device)
    if shape is not None and index.n_groups > 1:
        base = index.group.expand(shape).flatten().long()
    found = {}
    for kind in ("full", "part"):
        for side, slots, others in (("row", rows, "col"), ("col", cols, "row")):
            pointer = getattr(index, f"{kind}_{side}_ptr").long()
            length = pointer.diff().view(-1, slots)[base] if slots else pointer.new_zeros(len(base), 0)
            begins = pad(length.flatten().cumsum(0), (1, 0))
            slot = slot_of_entries(begins, int(begins[-1]))
            group, place = slot // max(slots, 1), slot % max(slots, 1)
            # The entry of each tile in the base, whose groups can be in another order.
            entry = torch.arange(len(slot), device=index.device) - begins[slot] + pointer[base[group] * slots + place]
            other = getattr(index, f"{kind}_{others}")[entry]
            row, col = (place, other) if side == "row" else (other, place)
            number = (group * rows + row) * cols + col
            tiles = () if kind == "full" else (index.part_tile if side == "row" else index.part_tile_t,)
            offsets = torch.arange(masks, device=index.device) * len(slot)
            every = pad((begins[:-1] + offsets[:, None]).flatten(), (0, 1), value=masks * len(slot))
            # All groups share one mask of tiles, or have their own.
            number = number % max(rows * cols, 1) if shape is None else number
            found[f"{kind}_{side}"] = _List(number, every, (other, *(x[entry] for x in tiles)))
    return found


def restrict_rows(index: BlockIndex, keep: Tensor) -> BlockIndex:
    """Return the index of `BlockIndex.restricted_rows`."""
    _check(index, keep, (index.n_queries, index.n_cols))
    block, rows, cols = index.block, index.n_rows, index.n_cols
    keep, group, base = _of_groups(index, keep)
    lead = index.start - index.first_row * block
    padding = (0, 0, lead, rows * block - lead - index.n_queries)
    # Rows outside the lengths neither keep a tile nor hinder it from being the base's.
    some, every = (pad(keep, padding, value=value) for value in (False, True))
    some, every = (x.view(-1, rows, block, cols) for x in (some, every))
    number, state = _kept(index, some.any(2).flatten(1), base)
    cut = (~every.all(2).flatten()[number]).nonzero().flatten()
    # The last row stands for a full tile.
    words = pad(index.bits, (0, 0, 0, 0, 0, 1), value=-1 if block >= 32 else (1 << block) - 1)
    columns = every.permute(0, 1, 3, 2).reshape(-1, block)
    # A bool is 0 or 1, and -1 has all bits.
    parts = (words[state[part]] & -columns[number[part]].unsqueeze(2).int() for part in cut.split(_ROWS // block))
    found, place = merge_equal(torch.cat([words[:0], *parts]))
    empty = ~(found != 0).flatten(1).any(1)
    state[cut] = torch.where(empty[place], EMPTY, place + len(index.bits))
    kept = state != EMPTY
    return _with(index, group, Entries(number[kept], state[kept]), torch.cat([index.bits, found]))


def keys_of(index: BlockIndex, queries: Tensor) -> Tensor:
    """Return the keys of `BlockIndex.keys_of`."""
    inside = queries.dim() == 1 and queries.dtype == torch.int64
    if not inside or ((queries < 0) | (queries >= index.n_queries)).any():
        raise ValueError(f"queries: expected int64 [any] of numbers below {index.n_queries}, got {queries!r}")
    block, groups, cols = index.block, index.n_groups, index.n_cols
    row, place = index.row_of(queries), (index.start + queries) % block
    slot = (torch.arange(groups, device=index.device).unsqueeze(1) * index.n_rows + row).flatten()
    found = torch.zeros(len(slot) * cols, block, dtype=torch.bool, device=index.device)
    for kind in ("full", "part"):
        begins, column = getattr(index, f"{kind}_row_ptr").long(), getattr(index, f"{kind}_col").long()
        count = begins[slot + 1] - begins[slot]
        number = torch.arange(len(slot), device=index.device).repeat_interleave(count)
        entry = (
            begins[slot][number] + torch.arange(len(number), device=index.device) - (count.cumsum(0) - count)[number]
        )
        target = number * cols + column[entry]
        if kind == "full":
            found[target] = True
        else:
            words = index.bits[index.part_tile[entry].long(), place.repeat(groups)[number]]
            found[target] = unpack_words(words, block)
    kept = found.view(groups, len(queries), cols * block)[..., : index.n_keys]
    return kept[index.group.long()]


def _check(index: BlockIndex, keep: Tensor, shape: tuple[int, int]) -> None:
    sizes = index.group.shape
    fits = keep.dim() == 4 and all(a == b or 1 in (a, b) for a, b in zip(keep.shape[:2], sizes, strict=True))
    if keep.dtype != torch.bool or not fits or keep.shape[2:] != shape or keep.device != index.device:
        raise ValueError(
            f"keep: expected bool [B or 1, H or 1, {shape[0]}, {shape[1]}] on {index.device} for {tuple(sizes)} batch "
            f"elements and heads, got {keep.shape=}, {keep.dtype=} on {keep.device}"
        )


def _of_groups(index: BlockIndex, keep: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the mask of each group, the group of each batch element and head, and the base's group of each new one.

    The last is None if the groups are those of the base.
    """
    if keep.shape[:2] == (1, 1):
        return keep[0].expand(index.n_groups, -1, -1), index.group, None
    shape = torch.broadcast_shapes(index.group.shape, keep.shape[:2])
    base = index.group.expand(shape).flatten()
    group = torch.arange(len(base), dtype=torch.int32, device=index.device).view(shape)
    return keep.expand(*shape, -1, -1).flatten(0, 1), group, base.long()


def _envelopes(index: BlockIndex, group: Tensor) -> tuple[Pattern, ...]:
    return index.envelopes * (len(group) // len(index.envelopes))


def _with(index: BlockIndex, group: Tensor, entries: Entries, table: Tensor | TileTable) -> BlockIndex:
    return index.from_entries(group, entries, table, index.grid, _envelopes(index, group), index.row_at, index.col_at)


def _kept(index: BlockIndex, keep: Tensor, base: Tensor | None) -> Entries:
    """Return the entries of a base that are kept, by a mask of tiles ``[groups, R * C]``."""
    number, state = index.entries()
    states = torch.full((index.n_groups * keep.shape[1],), EMPTY, dtype=torch.int32, device=index.device)
    states[number] = state.int()
    states = states.view(index.n_groups, -1)
    if base is not None:
        states = states[base]
    found = (keep & (states != EMPTY)).flatten().nonzero().flatten()
    return Entries(found, states.flatten()[found].long())
