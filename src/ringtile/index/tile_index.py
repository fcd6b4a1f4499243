"""The tensors of an index, which the functions of this room read.

Shapes: ``G`` groups of equal (batch element, head), ``R`` row tiles, ``C`` column tiles, ``T`` distinct partial tiles,
``b`` the block, ``w = ceil(b / 32)`` words per tile row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from ringtile.index.lists import Entries, TileLists, list_tiles
from ringtile.index.tiles import FULL, TileTable, derive_tables
from ringtile.patterns.base import Dense, Pattern, TileGrid

_N_TENSORS = 1 + 2 * len(TileLists._fields) + len(TileTable._fields)


@dataclass(frozen=True, eq=False, repr=False)
class TileIndex:
    """The tensors of a `BlockIndex`, and all that can be read off them without another function of an index."""

    group: Tensor
    """``[B or 1, H or 1]`` int32. The group of each batch element and head."""
    rows: TileLists
    """The column tiles of each row slot."""
    cols: TileLists
    """The transpose: the row tiles, counted from 0, of each column slot."""
    table: TileTable
    """The distinct partial tiles."""
    grid: TileGrid
    """The lengths, start and block size."""
    envelopes: tuple[Pattern, ...] = (Dense(),)
    """The causal and document rules of each row of ``group``."""

    @classmethod
    def from_entries(
        cls,
        group: Tensor,
        entries: Entries,
        bits: Tensor | TileTable,
        grid: TileGrid,
        envelopes: tuple[Pattern, ...] = (Dense(),),
        row_at: Tensor | None = None,
        col_at: Tensor | None = None,
    ) -> Self:
        """Lay out entries and tiles ``[T, b, w]`` on a grid. Groups count up to the last one in use or with a tile."""
        # Two tensors, because torch.compile does not trace one that comes twice.
        row_at, col_at = (group.new_empty(0) if at is None else at.int() for at in (row_at, col_at))
        number, state = entries
        # Some heads of an index have the lists of all.
        last = int(number.max()) // max(grid.n_rows * grid.n_cols, 1) if len(number) else 0
        n_groups = max(int(group.max()), last) + 1
        # With 3 rows and 4 columns, number 17 is slot 4 and column 1, so row 1 of group 1 and column slot 5.
        slot = torch.floor_divide(number, max(grid.n_cols, 1))
        col = number - slot * grid.n_cols
        of_group = torch.floor_divide(slot, max(grid.n_rows, 1))
        row, col_slot = slot - of_group * grid.n_rows, of_group * grid.n_cols + col
        # The entries come row by row, so a stable sort by column keeps the rows of each column in order.
        order = torch.argsort(col_slot.int(), stable=True)
        rows = list_tiles(slot, col, state, n_groups * grid.n_rows, row_at)
        cols = list_tiles(col_slot[order], row[order], state[order], n_groups * grid.n_cols, col_at)
        return cls(group, rows, cols, bits if isinstance(bits, TileTable) else derive_tables(bits), grid, envelopes)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which operators take them and `from_tensors` expects them."""
        rows, cols = self.rows, self.cols
        return [self.group, *rows[:5], *cols[:5], *self.table, rows.work, cols.work, rows.at, cols.at]

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor], grid: TileGrid, envelopes: tuple[Pattern, ...] = (Dense(),)
    ) -> Self:
        """Rebuild an index from its `tensors`. Raises ValueError if their number is wrong."""
        if len(tensors) != _N_TENSORS:
            raise ValueError(f"tensors: expected {_N_TENSORS} of them, got {len(tensors)}")
        rows = TileLists._make((*tensors[1:6], tensors[15], tensors[17]))
        cols = TileLists._make((*tensors[6:11], tensors[16], tensors[18]))
        return cls(tensors[0], rows, cols, TileTable(*tensors[11:15]), grid, envelopes)

    def at(self, lengths: TileGrid) -> Self:
        """Return the same tiles for other lengths that touch them. The bits must be those of whole tiles."""
        return self if lengths == self.grid else replace(self, grid=lengths)

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> Self:
        """Return the index on a device."""
        if self.device == torch.device(device):
            return self
        return self.from_tensors([x.to(device) for x in self.tensors()], self.grid, self.envelopes)

    @torch.inference_mode(False)
    def fitted(self) -> Self:
        """Return the index with lists that end at their last tile. Synchronizes with the device."""
        full, partial = torch.stack((self.rows.full_ptr[-1], self.rows.partial_ptr[-1])).tolist()
        rows, cols = self.rows.fitted(full, partial), self.cols.fitted(full, partial)
        fits = all(len(a) == len(b) for a, b in zip((*rows, *cols), (*self.rows, *self.cols), strict=True))
        return self if fits else replace(self, rows=rows, cols=cols)

    @property
    def block(self) -> int:
        """Tile side in tokens."""
        return self.grid.block

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.grid.start

    @property
    def n_queries(self) -> int:
        """Number of queries."""
        return self.grid.n_queries

    @property
    def n_keys(self) -> int:
        """Number of keys."""
        return self.grid.n_keys

    @property
    def first_row(self) -> int:
        """Number of the first row tile in position space."""
        return self.grid.first_row

    @property
    def n_rows(self) -> int:
        """Number of row tiles in a group."""
        return self.grid.n_rows

    @property
    def n_cols(self) -> int:
        """Number of column tiles in a group."""
        return self.grid.n_cols

    @property
    def n_groups(self) -> int:
        """Number of groups of equal heads and batch elements."""
        for lists, per_group in ((self.rows, self.n_rows), (self.cols, self.n_cols)):
            if per_group:
                return (lists.full_ptr.numel() - 1) // per_group
        return int(self.group.max()) + 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.group.device

    @property
    def nbytes(self) -> int:
        """Total size in bytes, with the transpose and the tile table."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def entries(self) -> Entries:
        """Return the kept tiles, full ones first. Synchronizes with the device."""
        rows = self.fitted().rows
        full_slot, partial_slot = rows.slots()
        number = torch.cat((full_slot * self.n_cols + rows.full, partial_slot * self.n_cols + rows.partial))
        return Entries(number, torch.cat((torch.full_like(full_slot, FULL), rows.tile.long())))

    def slot_and_col(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row slot and the column tile of each number of `Entries`."""
        return number // max(self.n_cols, 1), number % max(self.n_cols, 1)

    def row_of(self, queries: Tensor) -> Tensor:
        """Return the row tile of each query, both counted from 0."""
        return (self.start + queries) // self.block - self.first_row

    def row_positions(self, row: Tensor) -> Tensor:
        """Return the tile in position space that each row tile (counted from 0) holds."""
        return self.rows.at[row].long() if len(self.rows.at) else self.first_row + row

    def col_positions(self, col: Tensor) -> Tensor:
        """Return the tile in position space that each column tile holds."""
        return self.cols.at[col].long() if len(self.cols.at) else col

    def rows_inside(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first row inside the lengths of each row slot's tile, and the row after the last."""
        # 100 queries from position 200 in tiles of 128: row tile 0 begins at query -72, so its rows 72 ... 127 exist.
        first = (slot % max(self.n_rows, 1) + self.first_row) * self.block - self.start
        return first.neg().clamp(min=0), (self.n_queries - first).clamp(max=self.block)

    def keys_inside(self, col: Tensor) -> Tensor:
        """Count the keys inside the lengths of each column tile."""
        return (self.n_keys - col * self.block).clamp(max=self.block)

    def pairs_inside(self, slot: Tensor, col: Tensor) -> Tensor:
        """Count the pairs inside the lengths of each tile."""
        top, bottom = self.rows_inside(slot)
        return (bottom - top) * self.keys_inside(col)


AnIndex = TypeVar("AnIndex", bound=TileIndex)
"""The class of an index that a function returns for one of the same class."""
