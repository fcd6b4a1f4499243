"""Work of all ranks, from the covers of a pattern: pure functions on the host, without an index."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.hardware import Sizes
from ringtile.distributed.layout import Layout
from ringtile.distributed.plan import (
    MAX_PIECES,
    RING_PATTERNS,
    Demand,
    Transport,
    find_demand,
    is_better_gathered,
    is_cut,
)
from ringtile.layout import candidates, needed
from ringtile.layout.covers import MAX_BYTES, check_candidates
from ringtile.patterns import Pattern
from ringtile.patterns.base import TileGrid

MAX_RANKS = 4096
"""Traffic is a matrix of all pairs of ranks."""


class Split(NamedTuple):
    """A rank's rows, cut as a plan cuts them."""

    calls: Tensor
    """int64 ``[P]``: attention calls."""
    own_pairs: Tensor
    """int64 ``[P]``: pairs of rows that read only their rank's own keys."""
    hot_pairs: Tensor
    """int64 ``[P]``: pairs of rows that also read broadcast keys, and no others."""
    needs_hot: Tensor
    """bool ``[P, C]``: column tiles that these rows need."""
    needs_all: Tensor
    """bool ``[P, C]``: column tiles that the other rows need."""


class Work(NamedTuple):
    """Tiles that each rank computes, and tokens that it buffers, from the covers: upper bounds of a plan's."""

    pattern: Pattern
    layout: Layout
    sizes: Sizes
    grid: TileGrid
    demand: Demand
    row_tiles: Tensor
    """int64 ``[R]``: tiles of each row tile, for all heads and batch elements."""
    tiles: Tensor
    """int64 ``[P]``: the same of each rank."""
    pairs: Tensor
    """int64 ``[P]``: pairs in these tiles."""
    sources: Tensor
    """int64 ``[R]``: 0 for row tiles that read only their rank's own keys, 1 if also broadcast ones, otherwise 2."""
    is_cut: Tensor
    """bool ``[P]``: the ranks whose runs begin or end inside a tile."""
    reason: str
    """Why ranks cannot build their indices, or an empty text."""

    @property
    def automatic(self) -> Transport:
        """The transport that `ring_attention` takes by default."""
        if isinstance(self.pattern, RING_PATTERNS) and self.layout.n_ranks > 1:
            return "ring"
        return "gather" if is_better_gathered(self.demand.most_sent, self.layout) else "exchange"


def survey(pattern: Pattern, layout: Layout, sizes: Sizes, *, block: int = 128, max_bytes: int = MAX_BYTES) -> Work:
    """Return the work of all ranks, without an index.

    Raises ValueError if the pattern does not support the tokens or the heads, or its covers exceed ``max_bytes``.

    >>> from ringtile.patterns import Causal, Window
    >>> work = survey(Causal() & Window(4096), Layout.contiguous(1 << 20, 8), Sizes(heads=1, kv_heads=1))
    >>> work.tiles.tolist()
    [33264, 33792, 33792, 33792, 33792, 33792, 33792, 33792]
    """
    for name, count, expected in (
        ("heads", sizes.heads, pattern.num_heads),
        ("batch", sizes.batch, pattern.batch_size),
    ):
        if expected is not None and count != expected:
            raise ValueError(f"{name}: the pattern is defined for {expected}, got {count}")
    n_ranks, n_tokens = layout.n_ranks, layout.n_tokens
    if n_ranks > MAX_RANKS:
        raise ValueError(f"layout: expected at most {MAX_RANKS:,} ranks, got {n_ranks:,}")
    grid = TileGrid(block, 0, n_tokens, n_tokens)
    pattern.validate(grid)
    rows, ranks, tokens = layout.tiles(block)
    heads: dict[str, Any] = {"num_heads": sizes.heads, "batch": sizes.batch, "max_bytes": max_bytes}
    demand = find_demand(pattern, layout, grid, **heads)
    rank_of_row = torch.empty(grid.n_rows, dtype=torch.int64).index_put_((rows,), ranks)
    is_hot = demand.is_hot
    own, own_cold = ((ranks * (grid.n_cols + 1) + rows)[chosen].sort().values for chosen in (rows >= 0, ~is_hot[rows]))
    hot_before = torch.nn.functional.pad(is_hot.cumsum(0), (1, 0))
    is_remote, is_cold = torch.zeros(2, grid.n_rows, dtype=torch.bool)
    tiles = torch.zeros(grid.n_rows, dtype=torch.int64)
    listed = torch.zeros(n_ranks, dtype=torch.int64)
    for copies, cover in candidates(pattern, grid, **heads):
        length = cover.hi - cover.lo
        tiles.index_add_(0, cover.row, copies * length)
        first = rank_of_row[cover.row] * (grid.n_cols + 1)
        # How many tiles of the interval the row's rank holds, and how many it holds or gets by a broadcast.
        held, held_cold = (
            torch.searchsorted(mine, first + cover.hi) - torch.searchsorted(mine, first + cover.lo)
            for mine in (own, own_cold)
        )
        is_remote[cover.row[held < length]] = True
        is_cold[cover.row[held_cold + hot_before[cover.hi] - hot_before[cover.lo] < length]] = True
        of_rank = torch.zeros(n_ranks, dtype=torch.int64).index_add_(0, rank_of_row[cover.row], length)
        listed = torch.maximum(listed, of_rank)
    reason = ""
    try:
        check_candidates(pattern, grid, int(listed.max()), max_bytes)
        cut = torch.tensor([is_cut(layout, rank, block) for rank in range(n_ranks)])
    except ValueError as error:
        reason, cut = str(error), torch.ones(n_ranks, dtype=torch.bool)
    of_rank = torch.zeros(n_ranks, dtype=torch.int64)
    return Work(
        pattern,
        layout,
        sizes,
        grid,
        demand,
        tiles,
        of_rank.index_add(0, ranks, tiles[rows]),
        of_rank.index_add(0, ranks, tiles[rows] * tokens * block),
        is_remote.long() + is_cold,
        cut,
        reason,
    )


def split(work: Work, *, gather: bool = False) -> Split:
    """Return the calls of an exchange, or of a gather, in which all remote keys are broadcast."""
    layout, sizes, grid = work.layout, work.sizes, work.grid
    n_ranks = layout.n_ranks
    rows, ranks, tokens = layout.tiles(grid.block)
    order = (ranks * grid.n_rows + rows).argsort()
    rows, ranks, tokens = rows[order], ranks[order], tokens[order]
    source = (work.sources.clamp(max=1) if gather else work.sources)[rows].where(~work.is_cut[ranks], 2)
    for merged in (1, 0, None):
        changes = (source[1:] != source[:-1]) & (ranks[1:] == ranks[:-1])
        calls = 1 + torch.bincount(ranks[1:][changes], minlength=n_ranks)
        if merged is not None:
            source = source.where((calls <= MAX_PIECES)[ranks] | (source < merged), 2)
    runs = torch.tensor([len(held) for held in layout.runs])
    pairs, of_rank = work.row_tiles[rows] * tokens * grid.block, torch.zeros(n_ranks, dtype=torch.int64)
    columns = (
        needed(work.pattern, rows[chosen], ranks[chosen], n_ranks, grid, num_heads=sizes.heads, batch=sizes.batch)
        for chosen in (source == 1, source == 2)
    )
    return Split(
        torch.where(work.is_cut, runs, calls).where(runs > 0, 0),
        *(of_rank.index_add(0, ranks, pairs * (source == number)) for number in (0, 1)),
        *columns,
    )
