"""The block index: the tiles that a pattern keeps, as tensors, with counts and all functions of an index as methods."""

from functools import cached_property

import torch
from torch import Tensor

from ringtile.index import debug, derive
from ringtile.index.restrict import restricted
from ringtile.index.tile_index import TileIndex
from ringtile.index.tiles import popcount, unpack_words
from ringtile.patterns.base import Dense, Pattern, TileGrid
from ringtile.patterns.facts import key_bounds
from ringtile.patterns.local import Causal

_QUERIES_AT_ONCE = 1 << 17


class BlockIndex(TileIndex):
    """The tiles that a pattern keeps, for fixed lengths, start, block size and device.

    Row slot ``g * n_rows + r`` is row tile ``first_row + r`` of group ``g``. Column slot ``g * n_cols + c`` is column
    tile ``c``. Columns ascend within a row, and rows ascend within a column. The first and last tiles can be ragged:
    ignore bits outside the lengths.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> index = build_index(Causal(), 256)
    >>> index.rows.full_ptr.tolist(), index.rows.partial.tolist()
    ([0, 0, 1], [0, 1])
    """

    @property
    def kept_pairs(self) -> int:
        """Number of kept pairs inside the lengths, over the entries of ``group``. Synchronizes with the device."""
        return int(self._kept[0][self.group.long()].sum())

    @property
    def kept_tiles(self) -> int:
        """Number of tiles that keep a pair inside the lengths, over the entries of ``group``. Synchronizes."""
        return int(self._kept[1][self.group.long()].sum())

    @property
    def allowed_pairs(self) -> int:
        """Number of pairs that the causal and document rules allow, over the entries of ``group``."""
        return self._allowed[0]

    @property
    def allowed_tiles(self) -> int:
        """Number of tiles that the causal and document rules touch, over the entries of ``group``."""
        return self._allowed[1]

    @property
    def density(self) -> float:
        """Fraction of the allowed pairs that the pattern keeps, or 0 if no pairs are allowed."""
        return self.kept_pairs / self.allowed_pairs if self.allowed_pairs else 0.0

    @property
    def tile_density(self) -> float:
        """Fraction of the allowed tiles that are computed. Run time follows this. Synchronizes with the device."""
        return self.kept_tiles / self.allowed_tiles if self.allowed_tiles else 0.0

    @cached_property
    def _kept(self) -> Tensor:
        """Count the kept pairs, the kept tiles and the pairs in these tiles, inside the lengths: int64 ``[3, G]``."""
        index = derive.trimmed(self)
        counts = torch.zeros(3, index.n_groups, dtype=torch.long, device=index.device)
        full, partial = index.rows.slots()
        areas = index.pairs_inside(full, index.rows.full), index.pairs_inside(partial, index.rows.partial)
        pairs = areas[0], popcount(index.table.bits).sum((1, 2))[index.rows.tile]
        for slot, kept, area in zip((full, partial), pairs, areas, strict=True):
            counts.index_add_(1, slot // max(index.n_rows, 1), torch.stack((kept, torch.ones_like(area), area)))
        return counts

    @cached_property
    def _allowed(self) -> tuple[int, int]:
        """Count the pairs and the tiles that the causal and document rules allow, over the entries of ``group``."""
        counts = [count_allowed(envelope, self.grid, self.device) for envelope in self.envelopes]
        pairs, tiles = (sum(column) * self.group.shape[1] for column in zip(*counts, strict=True))
        return pairs, tiles

    def tile_pairs(self, batch: int, heads: int) -> int:
        """Count the pairs in the kept tiles, over all batch elements and heads. Kernels compute this many.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> build_index(Causal(), 200).tile_pairs(1, 2) == 2 * (128 * 128 + 72 * 200)
        True
        """
        return int(self._kept[2][self.group.long()].expand(batch, heads).sum())

    @cached_property
    @torch.inference_mode(False)
    def tiles(self) -> Tensor:
        """Bool ``[B or 1, H or 1, n_rows, n_cols]``: the tiles in the lists, with those that keep only bits outside."""
        mask = torch.zeros(self.n_groups * self.n_rows * self.n_cols, dtype=torch.bool, device=self.device)
        mask.index_fill_(0, self.entries().number, True)
        return mask.view(self.n_groups, self.n_rows, self.n_cols)[self.group.long()]

    @cached_property
    def looks_ahead(self) -> bool:
        """Return True if a query keeps a later key. Synchronizes with the device."""
        inside = derive.trimmed(self)
        number, state = inside.entries()
        slot, col = inside.slot_and_col(number)
        ahead = inside.col_positions(col) - inside.row_positions(slot % max(inside.n_rows, 1))
        # Inside a tile on the diagonal, key k of query q is later if k > q. Full tiles read the row behind the table.
        later = unpack_words(inside.table.bits, inside.block).triu(1).flatten(1).any(1)
        later = torch.cat((later, later.new_ones(1)))
        return bool(((ahead > 0) | ((ahead == 0) & later[state])).any())

    @cached_property
    @torch.inference_mode(False)
    def leading(self) -> Tensor | None:
        """Return how many keys each query keeps, int64 ``[n_queries]``, if the index has all or causal pairs, or None.

        Synchronizes with the device.
        """
        rules = set(self.envelopes)
        moved = len(self.rows.at) or len(self.cols.at)
        if moved or rules not in ({Dense()}, {Causal()}) or self.kept_pairs != self.allowed_pairs:
            return None
        if rules == {Dense()}:
            return torch.full((self.n_queries,), self.n_keys, dtype=torch.int64, device=self.device)
        return (self.start + 1 + torch.arange(self.n_queries, device=self.device)).clamp(0, self.n_keys)

    # Functions of an index that edit or show it live beside this class, by subject.
    trimmed = derive.trimmed
    restricted = restricted
    restricted_rows = derive.restricted_rows
    remapped = derive.remapped
    coarsen = derive.coarsen
    keys_of = derive.keys_of
    to_dense = debug.to_dense
    draw = debug.draw
    validate = debug.validate
    __repr__ = debug.describe


def count_allowed(envelope: Pattern, grid: TileGrid, device: torch.device) -> tuple[int, int]:
    """Count the pairs and the tiles that an envelope allows, in time proportional to the number of queries."""
    if grid.n_queries == 0 or grid.n_keys == 0:
        return 0, 0
    if isinstance(envelope, Dense):
        return grid.n_queries * grid.n_keys, grid.n_rows * grid.n_cols
    if isinstance(envelope, Causal):
        # In closed form: query position p keeps min(p + 1, n_keys) keys, a row tile those of its last query.
        rows = (grid.start, grid.n_queries, grid.n_keys), (grid.first_row, grid.n_rows, grid.n_cols)
        pairs, tiles = (_ramp(first + count - 1, top) - _ramp(first - 1, top) for first, count, top in rows)
        return pairs, tiles
    pairs = tiles = 0
    end = grid.start + grid.n_queries
    step = _QUERIES_AT_ONCE // grid.block * grid.block
    for first in range(grid.first_row * grid.block, end, step):
        query = torch.arange(max(first, grid.start), min(first + step, end), device=device)
        bounds = key_bounds(envelope, query, grid.n_keys)
        assert bounds is not None, f"no envelope: {envelope!r}"
        lo, hi = bounds
        pairs += int((hi - lo).clamp(min=0).sum())
        # The intervals of consecutive queries leave no gap, so the queries of a row tile cover one run of tiles.
        # Rows of this step count from 0. Queries without a key touch no tile.
        row = query[hi > lo] // grid.block - first // grid.block
        lowest = lo.new_full((step // grid.block,), grid.n_keys)
        lowest.scatter_reduce_(0, row, lo[hi > lo], "amin")
        highest = torch.zeros_like(lowest).scatter_reduce_(0, row, hi[hi > lo], "amax")
        tiles += int(((highest + grid.block - 1) // grid.block - lowest // grid.block).clamp(min=0).sum())
    return pairs, tiles


def _ramp(last: int, top: int) -> int:
    """Return the sum of min(p + 1, top) over p = 0 ... last."""
    count = max(0, last + 1)
    rising = min(count, top)
    return rising * (rising + 1) // 2 + (count - rising) * top
