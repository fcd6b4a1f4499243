"""Work of all ranks, from the covers of a pattern: pure functions on the host, without an index."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.layout import Layout
from ringtile.distributed.plan import MAX_PIECES, Demand, Transport, demand_of, fits_ring, is_better_gathered, is_cut
from ringtile.index import candidates
from ringtile.index.covers import check_candidates, groups_of, touched
from ringtile.patterns import Pattern
from ringtile.patterns.base import Cover, TileGrid
from ringtile.tools.predict.hardware import Sizes

MAX_RANKS = 4096
"""Traffic is a matrix of all pairs of ranks."""

_KEPT = 1 << 24
"""Covers of so many intervals are kept, in 24 bytes each. With more, every pass lists them again."""

_COLD = 1 << 32
"""Above the numbers of broadcast columns that a row misses."""

_BLOCK = 128


class Tiles:
    """The candidate tiles of a pattern, which are the same for all layouts and numbers of ranks.

    If ``pattern`` and ``sizes`` are those of some heads, pass the tiles of all heads and the first of these heads as
    ``of``. Raises ValueError if the pattern does not support the tokens or the heads, or its covers are too many bytes.
    """

    def __init__(self, pattern: Pattern, n_tokens: int, sizes: Sizes, of: tuple["Tiles", int] | None = None) -> None:
        for name, count, expected in (
            ("heads", sizes.heads, pattern.num_heads),
            ("batch", sizes.batch, pattern.batch_size),
        ):
            if expected is not None and count != expected:
                raise ValueError(f"{name}: the pattern is defined for {expected}, got {count}")
        self.pattern, self.sizes = pattern, sizes
        self.grid = TileGrid(_BLOCK, 0, n_tokens, n_tokens)
        pattern.validate(self.grid)
        self.row_tiles = torch.zeros(self.grid.n_rows, dtype=torch.int64, device="cpu")
        """int64 ``[R]``: tiles of each row tile, for all heads and batch elements."""
        self.lengths: list[Tensor] = []
        """int64 ``[R]``: tiles of each row tile, for each group of equal heads and batch elements."""
        self.parts: dict[tuple[Pattern, Sizes], Tiles] = {}
        """Tiles of some of the heads, that others have listed."""
        # Heads with equal patterns form a group, whose tiles are listed once.
        self._group = self.row_tiles.new_tensor(groups_of(pattern, sizes.heads, sizes.batch)[0])
        self._of = of
        self._covers: list[Cover] | None = []
        self._cover_of: list[int] = []
        n_kept = 0
        for copies, cover in self._listed():
            length = torch.zeros_like(self.row_tiles).index_add_(0, cover.row, cover.hi - cover.lo)
            self.lengths.append(length)
            self.row_tiles += copies * length
            if self._covers is None:
                continue
            # Heads that differ inside tiles only have equal covers.
            if not (self._covers and all(map(torch.equal, self._covers[-1], cover))):
                n_kept += len(cover.row)
                self._covers.append(cover)
            self._cover_of.append(len(self._covers) - 1)
            if n_kept > _KEPT:
                self._covers = None

    def groups(self, first: int, heads: int) -> Iterator[tuple[int, int]]:
        """Yield the groups of equal heads and batch elements among some heads, and their number of these."""
        some = self._group[:, first : first + heads] if self._group.shape[1] > 1 else self._group
        copies = heads * self.sizes.batch // some.numel()
        for group, count in zip(*(x.tolist() for x in some.unique(return_counts=True)), strict=True):
            yield group, copies * count

    def _listed(self) -> Iterator[tuple[int, Cover]]:
        heads, batch = self.sizes.heads, self.sizes.batch
        if self._of is not None and self._of[0]._covers is not None:
            (whole, first), covers = self._of, self._of[0]._covers
            yield from ((copies, covers[whole._cover_of[group]]) for group, copies in whole.groups(first, heads))
            return
        for copies, cover in candidates(self.pattern, self.grid, num_heads=heads, batch=batch):
            wide = cover.hi - cover.lo > 1
            yield copies, Cover(*(torch.cat([x[~wide], x[wide]]) for x in cover))

    def covers(self) -> Iterator[Cover]:
        """Yield the distinct covers, intervals of one tile first."""
        if self._covers is None:
            yield from (cover for _, cover in self._listed())
        else:
            yield from self._covers

    def needed(self, rows: Tensor, ranks: Tensor, n_ranks: int) -> Tensor:
        """Return the column tiles that ranks need for these of their rows, bool ``[P, C]``."""
        return touched(self.covers() if len(rows) else (), self.pattern, rows, ranks, n_ranks, self.grid)


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
    listed: Tiles
    demand: Demand
    tiles: Tensor
    """int64 ``[P]``: tiles of each rank, for all heads and batch elements."""
    pairs: Tensor
    """int64 ``[P]``: pairs in these tiles."""
    sources: Tensor
    """int64 ``[R]``: 0 for row tiles that read only their rank's own keys, 1 if also broadcast ones, otherwise 2."""
    is_cut: Tensor
    """bool ``[P]``: the ranks whose runs begin or end inside a tile."""
    reason: str
    """Why ranks cannot build their indices, or an empty text."""
    splits: dict[bool, Split]
    """What `split` has found."""

    @property
    def automatic(self) -> Transport:
        """The transport that `ring_attention` takes by default."""
        if fits_ring(self.pattern) and self.layout.n_ranks > 1:
            return "ring"
        return "gather" if is_better_gathered(self.demand.most_sent, self.layout) else "exchange"


def survey(pattern: Pattern, layout: Layout, sizes: Sizes, *, listed: Tiles | None = None) -> Work:
    """Return the work of all ranks, without an index. Layouts of the same tokens can share ``listed`` tiles."""
    n_ranks = layout.n_ranks
    if n_ranks > MAX_RANKS:
        raise ValueError(f"layout: expected at most {MAX_RANKS:,} ranks, got {n_ranks:,}")
    listed = listed or Tiles(pattern, layout.n_tokens, sizes)
    grid, of_row = listed.grid, listed.row_tiles
    rows, ranks, tokens = layout.tiles(grid.block)
    demand = demand_of(listed.needed(rows, ranks, n_ranks), layout, grid)
    # A row tile that several ranks share belongs to the last of them here.
    rank_of_row = ranks.new_empty(grid.n_rows).index_put_((rows,), ranks)
    none = ranks.new_zeros(n_ranks)
    # Ranks build an index for each group of heads, so the largest one must fit.
    most = max(int(none.index_add(0, rank_of_row, length).max()) for length in listed.lengths)
    reason, cut = "", demand.needs.new_ones(n_ranks)
    try:
        check_candidates(pattern, grid, most)
        cut = cut.new_tensor([is_cut(layout, rank, grid.block) for rank in range(n_ranks)])
    except ValueError as error:
        reason = str(error)
    tiles, pairs = (none.index_add(0, ranks, x) for x in (of_row[rows], of_row[rows] * tokens * grid.block))
    sources = _sources(listed, demand, rank_of_row)
    return Work(pattern, layout, sizes, grid, listed, demand, tiles, pairs, sources, cut, reason, {})


def _sources(listed: Tiles, demand: Demand, rank_of_row: Tensor) -> Tensor:
    """Return what each row tile reads, see `Work.sources`."""
    grid, n_ranks = listed.grid, len(demand.needs)
    # Columns that a rank does not hold: broadcast ones count 1, the others also in the upper half. A row that misses 3
    # broadcast columns and 2 others has 2 * _COLD + 5.
    remote = torch.zeros(n_ranks, grid.n_cols + 1, dtype=torch.uint8, device="cpu")
    remote[:, :-1] = torch.where(demand.is_hot, 1, 2).masked_fill(demand.holds, 0)
    counts = rank_of_row.new_tensor([0, 1, _COLD + 1])
    # Sums over the columns before, so that an interval [lo, hi) misses before[hi] - before[lo].
    before = counts.new_zeros(n_ranks, grid.n_cols + 1)
    before[:, 1:] = counts[remote[:, :-1].int()].cumsum_(1)
    remote, before = remote.flatten(), before.flatten()
    first_of_row = rank_of_row * (grid.n_cols + 1)
    missed = torch.zeros_like(listed.row_tiles)
    for row, lo, hi in listed.covers():
        lo, hi = first_of_row[row] + lo, first_of_row[row] + hi
        # The table of single columns is a byte each, and stays in a cache.
        one = int((hi == lo + 1).sum())
        missed.index_add_(0, row[:one], counts[remote[lo[:one]].int()])
        missed.index_add_(0, row[one:], before[hi[one:]] - before[lo[one:]])
    return (missed > 0).long() + (missed >= _COLD)


def split(work: Work, *, gather: bool = False) -> Split:
    """Return the calls of an exchange, or of a gather, in which all remote keys are broadcast."""
    if gather in work.splits:
        return work.splits[gather]
    layout, grid = work.layout, work.grid
    n_ranks = layout.n_ranks
    rows, ranks, tokens = layout.tiles(grid.block)
    order = (ranks * grid.n_rows + rows).argsort()
    rows, ranks, tokens = rows[order], ranks[order], tokens[order]
    source = (work.sources.clamp(max=1) if gather else work.sources)[rows].where(~work.is_cut[ranks], 2)
    # With too many calls, the rows of a source join the rest: first those that read broadcast keys, then the own ones.
    for merged in (1, 0, None):
        changes = (source[1:] != source[:-1]) & (ranks[1:] == ranks[:-1])
        calls = 1 + torch.bincount(ranks[1:][changes], minlength=n_ranks)
        if merged is not None:
            source = source.where((calls <= MAX_PIECES)[ranks] | (source < merged), 2)
    runs = rows.new_tensor([len(held) for held in layout.runs])
    pairs, of_rank = work.listed.row_tiles[rows] * tokens * grid.block, rows.new_zeros(n_ranks)
    columns = (
        work.demand.needs if chosen.all() else work.listed.needed(rows[chosen], ranks[chosen], n_ranks)
        for chosen in (source == 1, source == 2)
    )
    found = work.splits[gather] = Split(
        torch.where(work.is_cut, runs, calls).where(runs > 0, 0),
        *(of_rank.index_add(0, ranks, pairs * (source == number)) for number in (0, 1)),
        *columns,
    )
    return found
