"""The block index: the tiles that a pattern keeps, as tensors.

Shapes: ``G`` groups of equal (batch element, head), ``R`` row tiles, ``C`` column tiles, ``T`` distinct partial tiles,
``b`` the block, ``w = ceil(b / 32)`` words per tile row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ringtile.index.allowed import count_allowed
from ringtile.index.drawing import draw_tiles
from ringtile.index.lists import Entries, check_lists, pointer, slot_of_entries, work_list
from ringtile.index.rearrange import coarsen, cut_to_lengths, remap
from ringtile.index.restrict import keys_of, restrict, restrict_rows
from ringtile.index.tiles import BLOCKS, EMPTY, FULL, TileTable, derive_tables, popcount, unpack_words
from ringtile.patterns.base import Dense, Pattern, TileGrid
from ringtile.patterns.local import Causal

_DENSE_LIMIT = 1 << 28


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """The tiles that a pattern keeps, for fixed lengths, start, block size and device.

    Row slot ``g * n_rows + r`` is row tile ``first_row + r`` of group ``g``. Column slot ``g * n_cols + c`` is column
    tile ``c``. Columns ascend within a row, and rows ascend within a column. The first and last tiles can be ragged:
    ignore bits outside the lengths.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> build_index(Causal(), 256).full_row_ptr.tolist(), build_index(Causal(), 256).part_col.tolist()
    ([0, 0, 1], [0, 1])
    """

    group: Tensor
    """``[B or 1, H or 1]`` int32. The group of each batch element and head."""
    full_row_ptr: Tensor
    """``[G * R + 1]`` int32: the full tiles of row slot s are ``full_col[full_row_ptr[s]:full_row_ptr[s + 1]]``."""
    full_col: Tensor
    part_row_ptr: Tensor
    """The same for partial tiles."""
    part_col: Tensor
    part_tile: Tensor
    """int32, for each partial tile its row in ``bits``."""
    full_col_ptr: Tensor
    """``[G * C + 1]`` int32, the transpose: row tiles (r, counted from 0) of each column slot."""
    full_row: Tensor
    part_col_ptr: Tensor
    part_row: Tensor
    part_tile_t: Tensor
    bits: Tensor
    """``[T, b, w]`` int32, row-major: bit ``k % 32`` of word ``bits[t, q, k // 32]`` keeps (q, k)."""
    bits_t: Tensor
    """``[T, b, w]`` int32, the transposed tiles: bit ``q % 32`` of ``bits_t[t, k, q // 32]``."""
    rows_any: Tensor
    """``[T, w]`` int32 bitmasks: the rows of a tile that keep any key."""
    cols_any: Tensor
    """``[T, w]`` int32 bitmasks: the keys of a tile that any row keeps."""
    row_work: Tensor
    """``[W, 4]`` int32 (row slot, first, last, scratch): a split of a row's list (full tiles, then partial ones),
    longest first. ``scratch`` is -1 if the row is not split, otherwise the scratch slot of the split. The scratch slots
    of a row are consecutive and in order."""
    col_work: Tensor
    """The same for column slots."""
    row_at: Tensor
    """``[R]`` int32: the tile in position space that each row tile holds, or empty if it is ``first_row + r``. Dropout
    and ALiBi depend on positions."""
    col_at: Tensor
    """``[C]`` int32: the same for column tiles, or empty if it is ``c``."""

    block: int
    start: int
    n_queries: int
    n_keys: int

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
    ) -> BlockIndex:
        """Lay out entries and tiles ``[T, b, w]`` on a grid. The largest number in ``group`` counts the groups."""
        # Two tensors, because torch.compile does not trace one that comes twice.
        row_at, col_at = (group.new_empty(0) if at is None else at.int() for at in (row_at, col_at))
        n_groups = int(group.max()) + 1
        rows, cols = max(grid.n_rows, 1), max(grid.n_cols, 1)
        lists: dict[str, Tensor] = {}
        for name, chosen in (("full", entries.state == FULL), ("part", entries.state >= 0)):
            number, tile = entries.number[chosen], entries.state[chosen].int()
            slot = torch.floor_divide(number, cols)
            col = number - slot * cols
            of_group = torch.floor_divide(slot, rows)
            row = (slot - of_group * rows).int()
            col_slot = of_group * grid.n_cols + col
            order = torch.argsort(col_slot.int(), stable=True)
            lists[f"{name}_row_ptr"] = pointer(slot, n_groups * grid.n_rows)
            lists[f"{name}_col"] = col.int()
            lists[f"{name}_col_ptr"] = pointer(col_slot, n_groups * grid.n_cols)
            lists[f"{name}_row"] = row[order]
            if name == "part":
                lists["part_tile"], lists["part_tile_t"] = tile, tile[order]
        return cls(
            group=group,
            **lists,
            **(bits if isinstance(bits, TileTable) else derive_tables(bits))._asdict(),
            row_work=work_list(lists["full_row_ptr"], lists["part_row_ptr"]),
            col_work=work_list(lists["full_col_ptr"], lists["part_col_ptr"]),
            row_at=row_at,
            col_at=col_at,
            block=grid.block,
            start=grid.start,
            n_queries=grid.n_queries,
            n_keys=grid.n_keys,
            envelopes=envelopes,
        )

    def at(self, lengths: TileGrid) -> BlockIndex:
        """Return the same tiles for other lengths that touch the same tiles.

        Use it only if the bits are of whole tiles, not cut to the lengths.
        """
        if lengths == self.grid:
            return self
        # Not `replace`: a decoded token would wait longer for it than for its scores.
        other = object.__new__(BlockIndex)
        vars(other).update({name: vars(self)[name] for name in _FIELDS}, grid=lengths)
        vars(other).update(start=lengths.start, n_queries=lengths.n_queries, n_keys=lengths.n_keys)
        return other

    @cached_property
    def grid(self) -> TileGrid:
        """The lengths, start and block size as a `TileGrid`."""
        return TileGrid(self.block, self.start, self.n_queries, self.n_keys)

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
        for begins, per_group in ((self.full_row_ptr, self.n_rows), (self.full_col_ptr, self.n_cols)):
            if per_group:
                return (begins.numel() - 1) // per_group
        return int(self.group.max()) + 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.full_col.device

    @property
    def nbytes(self) -> int:
        """Total size in bytes, with the transpose and the tile table."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def kept_pairs(self) -> int:
        """Number of kept pairs inside the lengths, over the entries of ``group``. Synchronizes with the device."""
        return int(self._counts[0][self.group.long()].sum())

    @property
    def kept_tiles(self) -> int:
        """Number of tiles that keep a pair inside the lengths, over the entries of ``group``. Synchronizes."""
        return int(self._counts[1][self.group.long()].sum())

    @cached_property
    def _counts(self) -> Tensor:
        """``[3, G]`` int64, inside the lengths: the kept pairs, the kept tiles, and the pairs in these tiles."""
        index = self.trimmed()
        counts = torch.zeros(3, self.n_groups, dtype=torch.long, device=self.device)
        full, part = index.row_of_entries()
        areas = index.pairs_inside(full, index.full_col), index.pairs_inside(part, index.part_col)
        pairs = areas[0], popcount(index.bits).sum((1, 2))[index.part_tile]
        for slot, kept, area in zip((full, part), pairs, areas, strict=True):
            counts.index_add_(1, slot // max(self.n_rows, 1), torch.stack((kept, torch.ones_like(area), area)))
        return counts

    @property
    def allowed_pairs(self) -> int:
        """Number of pairs that the causal and document rules allow, over the entries of ``group``."""
        return self._allowed[0]

    @property
    def allowed_tiles(self) -> int:
        """Number of tiles that the causal and document rules touch, over the entries of ``group``."""
        return self._allowed[1]

    @cached_property
    def _allowed(self) -> tuple[int, int]:
        counts = [count_allowed(envelope, self.grid, self.device) for envelope in self.envelopes]
        pairs, tiles = (sum(column) * self.group.shape[1] for column in zip(*counts, strict=True))
        return pairs, tiles

    @property
    def density(self) -> float:
        """Fraction of the allowed pairs that the pattern keeps, or 0 if no pairs are allowed."""
        return self.kept_pairs / self.allowed_pairs if self.allowed_pairs else 0.0

    @property
    def tile_density(self) -> float:
        """Fraction of the allowed tiles that are computed. Run time follows this. Synchronizes with the device."""
        return self.kept_tiles / self.allowed_tiles if self.allowed_tiles else 0.0

    def tile_pairs(self, batch: int, heads: int) -> int:
        """Count the pairs in the kept tiles, over all batch elements and heads. Kernels compute this many.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> build_index(Causal(), 200).tile_pairs(1, 2) == 2 * (128 * 128 + 72 * 200)
        True
        """
        return int(self._counts[2][self.group.long()].expand(batch, heads).sum())

    @cached_property
    @torch.inference_mode(False)
    def tiles(self) -> Tensor:
        """Bool ``[B or 1, H or 1, n_rows, n_cols]``: the tiles in the lists, with those that keep only bits outside."""
        return self._mask_of(self.entries().number)

    @cached_property
    @torch.inference_mode(False)
    def full_tiles(self) -> Tensor:
        """Bool ``[B or 1, H or 1, n_rows, n_cols]``: the tiles that keep all pairs."""
        number, state = self.entries()
        return self._mask_of(number[state == FULL])

    def _mask_of(self, number: Tensor) -> Tensor:
        """Return the tiles of some entries in a mask for each batch element and head."""
        mask = torch.zeros(self.n_groups * self.n_rows * self.n_cols, dtype=torch.bool, device=self.device)
        mask.index_fill_(0, number, True)
        return mask.view(self.n_groups, self.n_rows, self.n_cols)[self.group.long()]

    def row_of(self, queries: Tensor) -> Tensor:
        """Return the row tile of each query, both counted from 0."""
        return (self.start + queries) // self.block - self.first_row

    @cached_property
    def looks_ahead(self) -> bool:
        """True if a query keeps a later key. Synchronizes with the device, once."""
        inside = self.trimmed()
        number, state = inside.entries()
        slot, col = self.slot_and_col(number)
        ahead = self.col_positions(col) - self.row_positions(slot % max(self.n_rows, 1))
        # Inside a tile on the diagonal, key k of query q is later if k > q.
        later = unpack_words(inside.bits, self.block).triu(1).flatten(1).any(1)
        later = torch.cat((later, later.new_ones(1)))
        return bool(((ahead > 0) | ((ahead == 0) & later[state])).any())

    @cached_property
    @torch.inference_mode(False)
    def leading(self) -> Tensor | None:
        """Int64 ``[n_queries]``: the number of keys that each query keeps, if the index is that of all or causal pairs.

        None for other indices. Synchronizes with the device, once.
        """
        rules = set(self.envelopes)
        moved = len(self.row_at) or len(self.col_at)
        if moved or rules not in ({Dense()}, {Causal()}) or self.kept_pairs != self.allowed_pairs:
            return None
        if rules == {Dense()}:
            return torch.full((self.n_queries,), self.n_keys, device=self.device)
        return (self.start + 1 + torch.arange(self.n_queries, device=self.device)).clamp(0, self.n_keys)

    def slot_and_col(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row slot and the column tile of each number of `Entries`."""
        return number // max(self.n_cols, 1), number % max(self.n_cols, 1)

    def row_positions(self, row: Tensor) -> Tensor:
        """Return the tile in position space that each row tile (counted from 0) holds."""
        return self.row_at[row].long() if len(self.row_at) else self.first_row + row

    def col_positions(self, col: Tensor) -> Tensor:
        """Return the tile in position space that each column tile holds."""
        return self.col_at[col].long() if len(self.col_at) else col

    def rows_inside(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first row inside the lengths of each row slot's tile, and the row after the last."""
        first = (slot % max(self.n_rows, 1) + self.first_row) * self.block - self.start
        return first.neg().clamp(min=0), (self.n_queries - first).clamp(max=self.block)

    def keys_inside(self, col: Tensor) -> Tensor:
        """Count the keys inside the lengths of each column tile."""
        return (self.n_keys - col * self.block).clamp(max=self.block)

    def pairs_inside(self, slot: Tensor, col: Tensor) -> Tensor:
        """Count the pairs inside the lengths of each tile."""
        top, bottom = self.rows_inside(slot)
        return (bottom - top) * self.keys_inside(col)

    @torch.inference_mode(False)
    def trimmed(self) -> BlockIndex:
        """Return the same pairs without the bits outside the lengths, and without tiles that keep no pairs inside.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Window
        >>> last = build_index(Window(30, 0), 1, 200)
        >>> last.part_col.tolist(), last.trimmed().part_col.tolist()
        ([0, 1], [1])
        """
        block = self.block
        if not (self.start % block or self.n_queries % block or self.n_keys % block):
            return self.fitted()
        entries = self.entries()
        slot, col = self.slot_and_col(entries.number)
        ragged = (entries.state >= 0) & (self.pairs_inside(slot, col) < block * block)
        entries, bits = cut_to_lengths(self, entries, ragged.nonzero().flatten())
        kept = entries.state != EMPTY
        return self._with(Entries(entries.number[kept], entries.state[kept]), bits, self.grid)

    def _with(self, entries: Entries, bits: Tensor, grid: TileGrid) -> BlockIndex:
        """Return the index of these entries, with the tiles of this index at the same positions."""
        return self.from_entries(self.group, entries, bits, grid, self.envelopes, self.row_at, self.col_at)

    def __repr__(self) -> str:
        return (
            f"BlockIndex({self.n_queries} queries from {self.start} x {self.n_keys} keys, block {self.block}, "
            f"groups {self.n_groups}, {self.full_col.numel()} full and {self.part_col.numel()} partial tiles "
            f"({self.bits.shape[0]} distinct), {self.nbytes} bytes on {self.device})"
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors in field order, as operators take them."""
        return [getattr(self, name) for name in TENSOR_FIELDS]

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Tensor],
        *,
        block: int,
        start: int,
        n_queries: int,
        n_keys: int,
        envelopes: tuple[Pattern, ...] = (Dense(),),
    ) -> BlockIndex:
        """Rebuild an index from its `tensors`."""
        if len(tensors) != len(TENSOR_FIELDS):
            raise ValueError(f"tensors: expected {len(TENSOR_FIELDS)} of them, got {len(tensors)}")
        # Not the constructor of a frozen class: each call of an operator would wait for it.
        index = object.__new__(cls)
        vars(index).update(zip(TENSOR_FIELDS, tensors, strict=True))
        vars(index).update(block=block, start=start, n_queries=n_queries, n_keys=n_keys, envelopes=envelopes)
        return index

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> BlockIndex:
        """Return the index on a device."""
        if self.device == torch.device(device):
            return self
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in TENSOR_FIELDS}
        return replace(self, **moved)

    def row_of_entries(self) -> tuple[Tensor, Tensor]:
        """Return the row slots (int64) of the full and of the partial tiles."""
        return (
            slot_of_entries(self.full_row_ptr, self.full_col.numel()),
            slot_of_entries(self.part_row_ptr, self.part_col.numel()),
        )

    @property
    def table(self) -> TileTable:
        """The distinct partial tiles."""
        return TileTable(self.bits, self.bits_t, self.rows_any, self.cols_any)

    def entries(self) -> Entries:
        """Return the kept tiles, full ones first. Synchronizes with the device."""
        index = self.fitted()
        full_slot, part_slot = index.row_of_entries()
        number = torch.cat((full_slot * self.n_cols + index.full_col, part_slot * self.n_cols + index.part_col))
        return Entries(number, torch.cat((torch.full_like(full_slot, FULL), index.part_tile.long())))

    @torch.inference_mode(False)
    def fitted(self) -> BlockIndex:
        """Return the index with lists that end at their last tile. Synchronizes with the device.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> roomy = build_index(Causal(), 512).restricted(torch.eye(4, dtype=torch.bool)[None, None], capacity=9)
        >>> len(roomy.part_col), len(roomy.full_col), len(roomy.fitted().part_col), len(roomy.fitted().full_col)
        (4, 6, 4, 0)
        """
        full, part = torch.stack((self.full_row_ptr[-1], self.part_row_ptr[-1])).tolist()
        sizes = dict.fromkeys(("full_col", "full_row"), full)
        sizes |= dict.fromkeys(("part_col", "part_row", "part_tile", "part_tile_t"), part)
        lists = {name: getattr(self, name)[:size] for name, size in sizes.items()}
        lists |= {name: work[work[:, 0] >= 0] for name in ("row_work", "col_work") for work in (getattr(self, name),)}
        if all(len(x) == len(getattr(self, name)) for name, x in lists.items()):
            return self
        return replace(self, **lists)

    def to_dense(self) -> Tensor:
        """Return the kept pairs as bool ``[B or 1, H or 1, n_queries, n_keys]``.

        Raises ValueError above 2^28 elements.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> build_index(Causal(), 3).to_dense()[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        block, rows, cols = self.block, self.n_rows, self.n_cols
        size = max(self.n_groups * rows * cols * block * block, self.group.numel() * self.n_queries * self.n_keys)
        if size > _DENSE_LIMIT:
            raise ValueError(f"to_dense expects at most {_DENSE_LIMIT:,} elements, got {size:,}")
        number, state = self.entries()
        dense = torch.zeros(self.n_groups * rows * cols, block, block, dtype=torch.bool, device=self.device)
        dense[number[state == FULL]] = True
        dense[number[state >= 0]] = unpack_words(self.bits, block)[state[state >= 0]]
        dense = dense.view(self.n_groups, rows, cols, block, block).transpose(2, 3)
        dense = dense.reshape(self.n_groups, rows * block, cols * block)
        skipped = self.start - self.first_row * block
        return dense[:, skipped : skipped + self.n_queries, : self.n_keys][self.group.long()]

    @torch.inference_mode(False)
    def restricted(self, keep: Tensor, capacity: int | None = None) -> BlockIndex:
        """Return the index of the tiles that ``keep`` also keeps, bool ``[B or 1, H or 1, n_rows, n_cols]``.

        Batch elements and heads of ``keep`` each have their own group, unless it has only one of both.

        ``capacity`` bounds the number of kept tiles over all groups, for example from a budget. The lists then have
        room for this many tiles, and their unused ends mean nothing. Attention over the index is the same, bit for bit,
        but no value goes back from the device to the host, after the first call for a base. Default: lists that fit,
        for which the call synchronizes with the device once.

        Raises ValueError if ``keep`` does not match, or ``capacity`` is negative. If ``keep`` has more tiles than
        ``capacity``, the device raises RuntimeError.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> every_other = torch.arange(4) % 2 == torch.arange(4)[:, None] % 2
        >>> print(build_index(Causal(), 512).restricted(every_other[None, None]).draw())
        ▒···
        ·▒··
        █·▒·
        ·█·▒
        """
        return restrict(self, keep, capacity)

    @torch.inference_mode(False)
    def restricted_rows(self, keep: Tensor) -> BlockIndex:
        """Return the index of the tiles that each query also keeps, bool ``[B or 1, H or 1, n_queries, n_cols]``.

        A tile that only some of its queries keep has their bits, so its cost is that of the whole tile.

        Raises ValueError if ``keep`` does not match.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> keep = torch.ones(1, 1, 256, 2, dtype=torch.bool)
        >>> keep[0, 0, 200, 0] = False
        >>> restricted = build_index(Causal(), 256).restricted_rows(keep)
        >>> restricted.kept_pairs - build_index(Causal(), 256).kept_pairs
        -128
        """
        return restrict_rows(self, keep)

    def keys_of(self, queries: Tensor) -> Tensor:
        """Return the keys that some queries keep, bool ``[B or 1, H or 1, len(queries), n_keys]``.

        ``queries`` are numbers counted from 0, int64, in any order. Raises ValueError if one is out of range.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Window
        >>> build_index(Window(1, 0), 4).keys_of(torch.tensor([2]))[0, 0].int().tolist()
        [[0, 1, 1, 0]]
        """
        return keys_of(self, queries)

    @torch.inference_mode(False)
    def slice(self, rows: slice | range) -> BlockIndex:
        """Return the index of consecutive row tiles, counted from 0, with a new start and number of queries.

        Raises ValueError if the rows are not consecutive or out of range.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> tail = build_index(Causal(), 1024).slice(range(6, 8))
        >>> tail.start, tail.n_queries, tail.n_keys
        (768, 256, 1024)
        """
        chosen = range(self.n_rows)[rows] if isinstance(rows, slice) else rows
        if chosen.step != 1 or len(chosen) == 0 or chosen.start < 0 or chosen.stop > self.n_rows:
            raise ValueError(f"rows: expected a run of consecutive row tiles within 0 ... {self.n_rows}, got {rows}")
        start = max(self.start, (self.first_row + chosen.start) * self.block)
        end = min(self.start + self.n_queries, (self.first_row + chosen.stop) * self.block)
        grid = TileGrid(self.block, start, end - start, self.n_keys)
        number, state = self.entries()
        slot, col = self.slot_and_col(number)
        group, row = slot // self.n_rows, slot % self.n_rows - chosen.start
        inside = (row >= 0) & (row < grid.n_rows)
        number = ((group * grid.n_rows + row) * self.n_cols + col)[inside]
        row_at = self.row_at[chosen.start : chosen.stop]
        entries = Entries(number, state[inside])
        return self.from_entries(self.group, entries, self.bits, grid, self.envelopes, row_at, self.col_at)

    @torch.inference_mode(False)
    def remapped(self, rows: Tensor, cols: Tensor) -> BlockIndex:
        """Return the index of some row tiles over a buffer of some column tiles, both in any order.

        ``rows`` and ``cols`` are distinct tile numbers, int64, counted from 0. The queries and keys of a call lie in
        this order. Each tile takes ``block`` tokens, but the first and last row and the last column stay as ragged as
        they are, if they stay first and last. Density is then measured against all pairs.

        Raises ValueError if a number is out of range or occurs twice, or if a row keeps a column that is not in
        ``cols``.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> moved = build_index(Causal(), 512).remapped(torch.tensor([2, 0]), torch.tensor([0, 2, 1]))
        >>> print(moved.draw())
        █▒█
        ▒··
        >>> moved.row_at.tolist(), moved.col_at.tolist()
        ([2, 0], [0, 2, 1])
        """
        return remap(self, rows, cols)

    @torch.inference_mode(False)
    def coarsen(self, block: int = 128) -> BlockIndex:
        """Return the same pairs in larger tiles. ``block`` must be a multiple of the current one.

        Raises ValueError for other blocks, and if tiles that become one do not follow each other in position space.
        """
        return coarsen(self, block)

    def draw(self, group: int = 0, width: int = 64) -> str:
        """Draw the tiles of one group as text, at most ``width`` columns wide: ``█`` full, ``▒`` mixed, ``·`` empty.

        Raises ValueError for a group or a width out of range.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal, Window
        >>> print(build_index(Causal() & Window(300, 0), 512).draw())
        ▒···
        █▒··
        ▒█▒·
        ▒▒█▒
        """
        if not 0 <= group < self.n_groups:
            raise ValueError(f"group: expected 0 <= group < {self.n_groups}, got {group}")
        if width < 1:
            raise ValueError(f"width: expected a positive number of columns, got {width}")
        number, state = self.entries()
        slot, col = self.slot_and_col(number)
        row = slot - group * self.n_rows
        inside = (row >= 0) & (row < self.n_rows)
        full = state[inside] == FULL
        return draw_tiles(row[inside], col[inside], full, self.n_rows, self.n_cols, width)

    def validate(self) -> None:
        """Check that all fields are consistent. Use it on an index that you did not get from `build_index`.

        Raises ValueError that names the first field out of range, out of order or in conflict with the others.
        """
        if self.block not in BLOCKS:
            raise ValueError(f"block: expected one of {BLOCKS}, got {self.block}")
        check_lists(self)
        if self.group.dim() != 2 or not self.group.numel() or int(self.group.max()) + 1 != self.n_groups:
            raise ValueError(f"group: expected numbers up to {self.n_groups - 1} as [B or 1, H or 1], got {self.group}")
        index = self.fitted()
        for kind, slot in zip(("full", "part"), index.row_of_entries(), strict=True):
            begins, columns = getattr(index, f"{kind}_row_ptr"), getattr(index, f"{kind}_col")
            if int(begins[0]):
                raise ValueError(f"{kind}_row_ptr: expected offsets from 0, got {begins}")
            if ((columns.diff() <= 0) & (slot.diff() == 0)).any():
                raise ValueError(f"{kind}_col: expected columns that ascend within a row")
        entries = index.entries()
        if len(torch.unique(entries.number)) < len(entries.number):
            raise ValueError("part_col: a tile is in both lists")
        expected = self._with(entries, self.bits, self.grid)
        for name, tensor in zip(TENSOR_FIELDS, expected.tensors(), strict=True):
            if not torch.equal(tensor, getattr(index, name)):
                raise ValueError(f"{name}: does not follow from the row lists and bits")


_FIELDS = tuple(f.name for f in fields(BlockIndex))
TENSOR_FIELDS = tuple(f.name for f in fields(BlockIndex) if f.type == "Tensor")
"""Names of the tensors of an index, in the order of the fields."""
