"""Counts of the pairs and tiles that causal and document rules allow. Density is measured against them."""

from __future__ import annotations

import torch

from ringtile.patterns.base import Dense, Pattern, TileGrid
from ringtile.patterns.facts import key_bounds
from ringtile.patterns.local import Causal

_QUERIES_AT_ONCE = 1 << 17


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
