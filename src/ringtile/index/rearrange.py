"""Indices made of other indices: other tiles, another order, larger tiles, tiles cut to the lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringtile.index.lists import Entries
from ringtile.index.tiles import BLOCKS, EMPTY, FULL, TileCollector, chunks, unpack_words
from ringtile.patterns.base import Dense, TileGrid

if TYPE_CHECKING:
    from ringtile.index.block_index import BlockIndex


def cut_to_lengths(index: BlockIndex, entries: Entries, chosen: Tensor) -> tuple[Entries, Tensor]:
    """Cut the bits of the chosen entries to the lengths. Return all entries and the tile table, with new tiles."""
    number, state = entries.number, entries.state.clone()
    slot, col = index.slot_and_col(number)
    collector = TileCollector(index.block, index.device)
    inside = torch.arange(index.block, device=index.device)
    # The last row stands for a full tile.
    table = torch.nn.functional.pad(index.bits, (0, 0, 0, 0, 0, 1), value=-1)
    states = [chosen[:0]]
    for part in chunks(chosen, index.block):
        top, bottom = index.rows_inside(slot[part, None])
        rows = (inside >= top) & (inside < bottom)
        keys = inside < index.keys_inside(col[part, None])
        kept = unpack_words(table[state[part]], index.block)
        states.append(collector.add(kept & rows[:, :, None] & keys[:, None]))
    bits, translate = collector.finish()
    found = torch.cat(states)
    found[found >= 0] = translate[found[found >= 0]] + len(index.bits)
    state[chosen] = found
    return Entries(number, state), torch.cat((index.bits, bits))


def remap(index: BlockIndex, rows: Tensor, cols: Tensor) -> BlockIndex:
    """Return the index of `BlockIndex.remapped`."""
    row_place, col_place = _places("rows", rows, index.n_rows), _places("cols", cols, index.n_cols)
    block = index.block
    lead, row_tail, col_tail = index.start % block, -(index.start + index.n_queries) % block, -index.n_keys % block
    keeps_lead, keeps_row_tail = rows[:1].tolist() == [0], rows[-1:].tolist() == [index.n_rows - 1]
    keeps_col_tail = cols[-1:].tolist() == [index.n_cols - 1]
    row_cut, col_cut = (torch.zeros_like(place, dtype=torch.bool) for place in (row_place, col_place))
    row_cut[:1] |= lead > 0 and not keeps_lead
    row_cut[-1:] |= row_tail > 0 and not keeps_row_tail
    col_cut[-1:] |= col_tail > 0 and not keeps_col_tail

    index = index.trimmed()
    entries, bits = _moved(index, (row_place, row_cut, len(rows)), (col_place, col_cut, len(cols)))
    return index.from_entries(
        index.group,
        entries,
        bits,
        TileGrid(
            block,
            lead * keeps_lead,
            len(rows) * block - lead * keeps_lead - row_tail * keeps_row_tail,
            len(cols) * block - col_tail * keeps_col_tail,
        ),
        (Dense(),) * len(index.envelopes),
        index.row_positions(rows),
        index.col_positions(cols),
    )


def _moved(
    index: BlockIndex, rows: tuple[Tensor, Tensor, int], cols: tuple[Tensor, Tensor, int]
) -> tuple[Entries, Tensor]:
    """Return the entries and the tile table from new places of tiles, which tiles to cut, and how many there are."""
    (row_place, row_cut, n_rows), (col_place, col_cut, n_cols) = rows, cols
    entries = index.entries()
    slot, col = index.slot_and_col(entries.number)
    group, row = slot // max(index.n_rows, 1), slot % max(index.n_rows, 1)
    chosen = row_place[row] >= 0
    missing = chosen & (col_place[col] < 0)
    if missing.any():
        raise ValueError(f"cols: expected all columns that the rows keep, column tile {col[missing][0]} is missing")
    entries, bits = cut_to_lengths(index, entries, (chosen & (row_cut[row] | col_cut[col])).nonzero().flatten())
    chosen &= entries.state != EMPTY
    number = ((group * n_rows + row_place[row]) * n_cols + col_place[col])[chosen]
    # Millions of tiles: the sort needs the memory.
    del slot, col, group, row, missing
    number, order = number.sort()
    state = entries.state[chosen][order]
    used, state[state >= 0] = torch.unique(state[state >= 0], return_inverse=True)
    return Entries(number, state), bits[used]


def coarsen(index: BlockIndex, block: int) -> BlockIndex:
    """Return the index of `BlockIndex.coarsen`."""
    if block not in BLOCKS or block < index.block:
        raise ValueError(f"block: expected one of {[b for b in BLOCKS if b >= index.block]}, got {block!r}")
    factor = block // index.block
    row_at, col_at = (
        _coarse_positions(name, getattr(index, name), first, factor)
        for name, first in (("row_at", index.first_row), ("col_at", 0))
    )
    grid = TileGrid(block, index.start, index.n_queries, index.n_keys)
    number, state = index.entries()
    slot, col = index.slot_and_col(number)
    group, row = slot // max(index.n_rows, 1), slot % max(index.n_rows, 1) + index.first_row
    cell = row % factor * factor + col % factor
    number = (group * grid.n_rows + row // factor - grid.first_row) * grid.n_cols + col // factor
    number, inverse = torch.unique(number, return_inverse=True)
    cells = torch.full((len(number), factor * factor), EMPTY, device=index.device)
    cells[inverse, cell] = state
    # Small tiles beyond the lengths are in no list. They count as full if the other tiles are.
    row = (number // max(grid.n_cols, 1) % max(grid.n_rows, 1) + grid.first_row)[:, None] * factor
    col = (number % max(grid.n_cols, 1))[:, None] * factor
    place = torch.arange(factor * factor, device=index.device)
    row, col = row + place // factor - index.first_row, col + place % factor
    beyond = (row < 0) | (row >= index.n_rows) | (col >= index.n_cols)
    full = ((cells == FULL) | beyond).all(1)
    merged = torch.full_like(number, FULL)
    distinct, inverse = torch.unique(cells[~full], dim=0, return_inverse=True)
    # Two rows before the table: EMPTY is row 0 and FULL is row 1.
    table = torch.nn.functional.pad(index.bits, (0, 0, 0, 0, -EMPTY, 0))
    table[FULL - EMPTY] = -1
    collector = TileCollector(block, index.device)
    states = [torch.empty_like(number[:0])]
    for part in chunks(distinct, block):
        mask = unpack_words(table[part - EMPTY], index.block).view(-1, factor, factor, index.block, index.block)
        states.append(collector.add(mask.transpose(2, 3).reshape(-1, block, block)))
    bits, translate = collector.finish()
    merged[~full] = translate[torch.cat(states)][inverse]
    return index.from_entries(index.group, Entries(number, merged), bits, grid, index.envelopes, row_at, col_at)


def _places(name: str, tiles: Tensor, count: int) -> Tensor:
    """Return the place of each of ``count`` tiles in ``tiles``, -1 if it is not there."""
    if tiles.dim() != 1 or tiles.dtype != torch.int64 or ((tiles < 0) | (tiles >= count)).any():
        raise ValueError(f"{name}: expected int64 [any] of tile numbers below {count}, got {tiles!r}")
    place = torch.full((count,), -1, device=tiles.device)
    place[tiles] = torch.arange(len(tiles), device=tiles.device)
    if int((place >= 0).sum()) < len(tiles):
        raise ValueError(f"{name}: expected distinct tile numbers, got {tiles!r}")
    return place


def _coarse_positions(name: str, at: Tensor, first: int, factor: int) -> Tensor:
    """Return the positions of tiles ``factor`` times as large. The first of the tiles is number ``first``."""
    if not len(at):
        return at
    skipped = first % factor
    coarse, place = at // factor, torch.arange(len(at), device=at.device) + skipped
    heads = coarse[(place % factor == 0) | (place == skipped)]
    if (at != heads.long()[place // factor] * factor + place % factor).any():
        raise ValueError(f"{name}: coarsen expects runs of {factor} tiles from a multiple of {factor}, got {at!r}")
    return heads
