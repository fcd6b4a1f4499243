"""Counts of the pairs and tiles of an index, and of those that its causal and document rules allow."""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile.index.derive import trimmed
from ringtile.index.tile_index import TileIndex
from ringtile.index.tiles import popcount, unpack_words
from ringtile.patterns.base import Dense, Pattern, TileGrid
from ringtile.patterns.facts import key_bounds
from ringtile.patterns.local import Causal

_QUERIES_AT_ONCE = 1 << 17


def count_kept(index: TileIndex) -> Tensor:
    """Count the kept pairs, the kept tiles and the pairs in these tiles, inside the lengths: int64 ``[3, G]``."""
    index = trimmed(index)
    counts = torch.zeros(3, index.n_groups, dtype=torch.long, device=index.device)
    full, partial = index.rows.slots()
    areas = index.pairs_inside(full, index.rows.full), index.pairs_inside(partial, index.rows.partial)
    pairs = areas[0], popcount(index.table.bits).sum((1, 2))[index.rows.tile]
    for slot, kept, area in zip((full, partial), pairs, areas, strict=True):
        counts.index_add_(1, slot // max(index.n_rows, 1), torch.stack((kept, torch.ones_like(area), area)))
    return counts


def looks_ahead(index: TileIndex) -> bool:
    """Return True if a query keeps a later key. Synchronizes with the device."""
    inside = trimmed(index)
    number, state = inside.entries()
    slot, col = inside.slot_and_col(number)
    ahead = inside.col_positions(col) - inside.row_positions(slot % max(inside.n_rows, 1))
    # Inside a tile on the diagonal, key k of query q is later if k > q. The row behind the table is that of full tiles.
    later = unpack_words(inside.table.bits, inside.block).triu(1).flatten(1).any(1)
    later = torch.cat((later, later.new_ones(1)))
    return bool(((ahead > 0) | ((ahead == 0) & later[state])).any())


def count_all_allowed(index: TileIndex) -> tuple[int, int]:
    """Count the pairs and the tiles that the envelopes of an index allow, over the entries of ``group``."""
    counts = [count_allowed(envelope, index.grid, index.device) for envelope in index.envelopes]
    pairs, tiles = (sum(column) * index.group.shape[1] for column in zip(*counts, strict=True))
    return pairs, tiles


def count_allowed(envelope: Pattern, grid: TileGrid, device: torch.device) -> tuple[int, int]:
    """Count the pairs and the tiles that an envelope allows, in time proportional to the number of queries."""
    if grid.n_queries == 0 or grid.n_keys == 0:
        return 0, 0
    if isinstance(envelope, Dense):
        return grid.n_queries * grid.n_keys, grid.n_rows * grid.n_cols
    if isinstance(envelope, Causal):
        return _count_causal(grid)
    pairs = tiles = 0
    end = grid.start + grid.n_queries
    step = _QUERIES_AT_ONCE // grid.block * grid.block
    for first in range(grid.first_row * grid.block, end, step):
        query = torch.arange(max(first, grid.start), min(first + step, end), device=device)
        lo, hi = key_bounds(envelope, query, grid.n_keys)
        pairs += int((hi - lo).clamp(min=0).sum())
        # The intervals of consecutive queries leave no gap, so the queries of a row tile cover one run of tiles.
        # Rows of this step count from 0. Queries without a key touch no tile.
        row = query[hi > lo] // grid.block - first // grid.block
        lowest = torch.full((step // grid.block,), grid.n_keys, device=device)
        lowest.scatter_reduce_(0, row, lo[hi > lo], "amin")
        highest = torch.zeros_like(lowest).scatter_reduce_(0, row, hi[hi > lo], "amax")
        tiles += int(((highest + grid.block - 1) // grid.block - lowest // grid.block).clamp(min=0).sum())
    return pairs, tiles


def _count_causal(grid: TileGrid) -> tuple[int, int]:
    """Count in closed form: query position p keeps min(p + 1, n_keys) keys, a row tile those of its last query."""
    last_query = grid.start + grid.n_queries - 1
    pairs = _ramp(last_query, grid.n_keys) - _ramp(grid.start - 1, grid.n_keys)
    last_row = grid.first_row + grid.n_rows - 1
    return pairs, _ramp(last_row, grid.n_cols) - _ramp(grid.first_row - 1, grid.n_cols)


def _ramp(last: int, top: int) -> int:
    """Return the sum of min(p + 1, top) over p = 0 ... last."""
    count = max(0, last + 1)
    rising = min(count, top)
    return rising * (rising + 1) // 2 + (count - rising) * top
