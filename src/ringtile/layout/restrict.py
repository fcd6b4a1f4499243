"""Some tiles of an index, as another index, and some rows of it: without patterns, hashing or loops over tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringtile.layout.lists import Entries
from ringtile.layout.tiles import EMPTY, TileTable, merge_equal, unpack_words

if TYPE_CHECKING:
    from ringtile.layout.index import BlockIndex

_ROWS = 1 << 16
"""Token rows of tiles whose bits are cut at once."""


def restrict(index: BlockIndex, keep: Tensor) -> BlockIndex:
    """Return the index of `BlockIndex.restricted`."""
    _check(index, keep, (index.n_rows, index.n_cols))
    keep, group, base = _of_groups(index, keep)
    return _with(index, group, _kept(index, keep.flatten(1), base), index.table)


def restrict_rows(index: BlockIndex, keep: Tensor) -> BlockIndex:
    """Return the index of `BlockIndex.restricted_rows`."""
    _check(index, keep, (index.n_queries, index.n_cols))
    block, rows, cols = index.block, index.n_rows, index.n_cols
    keep, group, base = _of_groups(index, keep)
    lead = index.start - index.first_row * block
    padding = (0, 0, lead, rows * block - lead - index.n_queries)
    # Rows outside the lengths neither keep a tile nor hinder it from being the base's.
    some, every = (torch.nn.functional.pad(keep, padding, value=value) for value in (False, True))
    some, every = (x.view(-1, rows, block, cols) for x in (some, every))
    number, state = _kept(index, some.any(2).flatten(1), base)
    cut = (~every.all(2).flatten()[number]).nonzero().flatten()
    # The last row stands for a full tile.
    words = torch.nn.functional.pad(index.bits, (0, 0, 0, 0, 0, 1), value=-1 if block >= 32 else (1 << block) - 1)
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
    position = index.start + queries
    row, place = position // block - index.first_row, position % block
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


def _with(index: BlockIndex, group: Tensor, entries: Entries, table: Tensor | TileTable) -> BlockIndex:
    envelopes = index.envelopes * (len(group) // len(index.envelopes))
    return index.from_entries(group, entries, table, index.grid, envelopes, index.row_at, index.col_at)


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
