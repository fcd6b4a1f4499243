"""The tiles of an index as lists of equal width, as FlexAttention and FlashAttention 4 read them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.tiles import EMPTY, FULL, unpack_words

BLOCK = 128
"""The side of a tile in `Tiles`."""


class Lists(NamedTuple):
    """The tiles of each row or column, ascending: counts ``[B or 1, H or 1, R]`` and numbers ``[.., R, longest]``."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor


class Tiles(NamedTuple):
    """An index as the kernels read it."""

    rows: Lists
    """On sm_100, one list for two row tiles."""
    cols: Lists
    has_partial: bool
    first: Tensor
    """``[B or 1, H or 1]`` int32: where the tiles of each batch element and head begin in ``tile_at``."""
    n_cols: Tensor
    """``[1]`` int32."""
    tile_at: Tensor
    """``[G * R * C]`` int32: the number of each tile in ``bits``."""
    bits: Tensor
    """``[(2 + T) * 128 * 4]`` int32: an empty tile, a full one, and the tiles of the index."""
    queries: Tensor | None
    """Bool ``[B or 1, H or 1, Nq]``: the queries that keep a key, or None if all do."""
    keys: Tensor | None
    """Bool ``[B or 1, H or 1, Nk]``: the keys that a query keeps, or None if all are kept."""


def dense_states(index: BlockIndex) -> Tensor:
    """Return the state of each tile, `EMPTY`, `FULL` or a row of the tile table, int32 ``[G, R, C]``."""
    size = index.n_groups * index.n_rows * index.n_cols
    table = torch.full((size,), EMPTY, dtype=torch.int32, device=index.device)
    number, state = index.entries()
    table[number] = state.int()
    return table.view(index.n_groups, index.n_rows, index.n_cols)


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen columns, ``[G, R]``, and all columns ``[G, R, C]``, the chosen ones first."""
    counts = chosen.sum(-1, dtype=torch.int32)
    return counts, torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()


@torch.inference_mode(False)
def make_tiles(index: BlockIndex, row_tiles: int) -> Tiles:
    """Return the lists and the bits of an index, with lists for ``row_tiles`` row tiles at a time.

    This synchronizes with the device.
    """
    if index.block < BLOCK:
        # Nothing here depends on positions, so tiles that become one need not follow each other there.
        rows, cols = (side._replace(at=side.at[:0]) for side in (index.rows, index.cols))
        index = replace(index, rows=rows, cols=cols).coarsen(BLOCK)
    # Without the bits outside the lengths: a key that only these keep is kept by no query.
    index = index.trimmed()
    states = dense_states(index)
    # A last row tile without a second one is full if it is full itself.
    single, joined = (
        F.pad(states, (0, 0, 0, -index.n_rows % row_tiles), value=value).unflatten(1, (-1, row_tiles))
        for value in (EMPTY, FULL)
    )
    full = (joined == FULL).all(2)
    part = (single != EMPTY).any(2) & ~full
    return Tiles(
        _lists(part, full, index.group),
        _lists(part.mT, full.mT, index.group),
        bool(part.any()),
        index.group * single[0].numel(),
        index.group.new_full((1,), index.n_cols),
        single.flatten() - EMPTY,
        _with_both(index.table.bits).flatten(),
        _kept(states, index.table.rows_any, index.group, index.n_queries),
        _kept(states.mT, index.table.cols_any, index.group, index.n_keys),
    )


def _lists(part: Tensor, full: Tensor, group: Tensor) -> Lists:
    """Return the lists of the tiles that are chosen, bool ``[G, R, C]``."""
    found = []
    for counts, numbers in (listed(part), listed(full)):
        numbers = numbers[..., : max(int(counts.max()), 1)]
        # Kernels expect a last stride of 1, which `contiguous` does not give a last dimension of 1.
        found += [x[group.long()].clone(memory_format=torch.contiguous_format) for x in (counts, numbers)]
    return Lists(*found)


def _with_both(words: Tensor) -> Tensor:
    """Prepend an empty and a full tile to a table, so that a state less `EMPTY` is a row of it."""
    table = torch.cat((words.new_zeros(2, *words.shape[1:]), words))
    table[FULL - EMPTY] = -1
    return table


def _kept(states: Tensor, words: Tensor, group: Tensor, length: int) -> Tensor | None:
    """Return which rows of the tiles ``[G, R, C]`` keep anything, by the words of each tile, or None if all do."""
    anything = unpack_words(_with_both(words), BLOCK)
    kept = torch.zeros(*states.shape[:2], BLOCK, dtype=torch.bool, device=states.device)
    for col in states.unbind(2):
        kept |= anything[col.long() - EMPTY]
    kept = kept.flatten(1)[:, :length]
    return None if kept.all() else kept[group.long()]
