"""Launches: the row tiles of a block index that `blockwise` computes together.

Rows whose tile lists have the same shape go into one batched call. A list of neighboring columns is read as a view (a
*run*), and any other list is gathered. If all rows of a launch share their partial tiles, they share one mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.debug import check_lists
from ringtile.index.schedule import derived
from ringtile.index.tiles import FULL, pack_words, unpack_words
from ringtile.kernels.spans import INDEX, span

_MIN_SHARED_ROWS = 4
_MIN_RUN_ROWS = 4
_MASK_CACHE_TILES = 16
_MASK_CACHE_BYTES = 4 * 2**20
_WHOLE_TILES = 128
_RAGGED_CHUNK = 64


@dataclass(frozen=True, eq=False)
class Launch:
    """Rows of one group that are computed by the same calls.

    ``rows`` ``[n]`` counts row tiles from 0. ``tiles`` ``[n or 1, K]`` contains each tile's row in the plan's bits, or
    `FULL`. In a run, tile j of row i is column ``first + i * step + j``. Otherwise ``cols`` ``[n, K]`` lists the
    columns, partial tiles first.
    """

    group: int
    rows: Tensor
    tiles: Tensor
    n_partial: int
    cols: Tensor | None = None
    run: tuple[int, int] | None = None
    """``(first, step)`` of a run."""
    tall: bool = False
    """True if the rows of a run with step 0 are computed as one tall block of queries."""

    @cached_property
    def first_row(self) -> int | None:
        """The first row if the rows are neighbors, otherwise None."""
        first, n = int(self.rows[0]), len(self.rows)
        return first if n == 1 or bool((self.rows == torch.arange(first, first + n)).all()) else None


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of a block index, and masks that are the same in all calls."""

    launches: tuple[Launch, ...]
    bits: Tensor
    """``[T, block, words]`` int32 on the CPU: the index's tiles, cut off at the last key."""
    dead_keys: Tensor | None
    """``[G, C * block]`` bool, the keys that no row keeps, or None if every key is kept."""
    empty_rows: bool
    """True if some rows keep no keys."""
    idle_rows: tuple[Tensor | None, ...]
    """By group, the queries whose row has no tiles, or None if there are none."""
    kept: Tensor | None
    """``[G, Nq, Nk]`` bool, all kept pairs, if the problem is small and every row and key is kept."""
    spared: int
    """Tiles of all groups that are not kept."""
    masks: dict[tuple[int, ...], Tensor]
    """Unpacked shared masks, up to `_MASK_CACHE_BYTES`."""
    additive: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], Tensor]
    """``kept`` as a mask to add to scores, by dtype and the groups of an index."""

    def mask(self, tiles: Tensor) -> Tensor:
        """Return the kept pairs of tiles: ``[..., K]`` tile numbers to ``[..., block, K * block]`` bool."""
        key = tuple(tiles.shape) + tuple(tiles.flatten().tolist()) if tiles.numel() <= _MASK_CACHE_TILES else ()
        known = self.masks.get(key) if key else None
        if known is None:
            words = self.bits[tiles.clamp(min=0)]
            words = words.masked_fill((tiles == FULL)[..., None, None], -1)
            known = unpack_words(words, words.shape[-2]).movedim(-3, -2).flatten(-2)
            used = sum(mask.nbytes for mask in list(self.masks.values()))
            if key and used + known.nbytes <= _MASK_CACHE_BYTES:
                self.masks[key] = known
        return known


def _entries(index: BlockIndex) -> tuple[Tensor, Tensor, Tensor]:
    """Return all kept tiles as (row slot, column, tile), columns ascending within a slot."""
    slots, cols, tiles = [], [], []
    for ptr, col, tile in (
        (index.rows.full_ptr, index.rows.full, None),
        (index.rows.partial_ptr, index.rows.partial, index.rows.tile),
    ):
        ptr, col = ptr.cpu().long(), col.cpu().long()
        count = int(ptr[-1])
        slots.append(torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff(), output_size=count))
        cols.append(col[:count])
        tiles.append(torch.full((count,), FULL) if tile is None else tile.cpu().long()[:count])
    slot, col, tile = torch.cat(slots), torch.cat(cols), torch.cat(tiles)
    # Slot 2, column 3 of 10 columns sorts as 23: by slot, then by column.
    order = torch.argsort(slot * index.n_cols + col)
    return slot[order], col[order], tile[order]


def _cut_last_column(index: BlockIndex, col: Tensor, tile: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tile bits that end at the last key, the keys that any row of a tile keeps, and the entries' new tiles."""
    bits, keys_any = index.table.bits.cpu(), (index.table.bits_t.cpu() != 0).any(-1)
    tail = index.n_keys % index.block
    last = (col == index.n_cols - 1).nonzero().squeeze(1)
    if not tail or not len(last):
        return bits, keys_any, tile
    # Row 0 of these tables stands for `FULL`, which is -1. So a full tile of the last column becomes a partial one.
    used, number = torch.unique(tile[last], return_inverse=True)
    inside = torch.arange(index.block) < tail
    everything = torch.full((1, *bits.shape[1:]), -1, dtype=torch.int32)
    cut = torch.cat([everything, bits])[used + 1] & pack_words(inside)
    tile = tile.clone()
    tile[last] = len(bits) + number
    kept = torch.cat([torch.ones(1, index.block, dtype=torch.bool), keys_any])[used + 1] & inside
    return torch.cat([bits, cut]), torch.cat([keys_any, kept]), tile


def offset_of(index: BlockIndex) -> int:
    """Return how many rows of the first row tile come before the first query."""
    return index.start - index.first_row * index.block


def queries_of(index: BlockIndex, first: int, last: int) -> tuple[int, int]:
    """Return the queries ``[begin, end)`` of row tiles ``[first, last)``.

    A start of 100 in blocks of 64: row tile 0 has positions 64 to 127, so it has queries 0 to 27.
    """
    begin, end = (row * index.block - offset_of(index) for row in (first, last))
    return max(0, begin), min(index.n_queries, end)


def _ragged_rows(index: BlockIndex) -> list[int]:
    """Return the row tiles with fewer queries than the others: the first, the last, or none."""
    sizes = {row: queries_of(index, row, row + 1) for row in {0, index.n_rows - 1}}
    return [row for row, (begin, end) in sizes.items() if end - begin < index.block]


def _kept_by_ragged_rows(
    index: BlockIndex, bits: Tensor, keys_any: Tensor, slot: Tensor, tile: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``keys_any`` with entries for the tiles of ragged rows, and new tiles of the entries."""
    row, number = slot % max(index.n_rows, 1), tile.clone()
    for ragged in _ragged_rows(index):
        lo, hi = (query - ragged * index.block + offset_of(index) for query in queries_of(index, ragged, ragged + 1))
        mine = ((row == ragged) & (tile != FULL)).nonzero().squeeze(1)
        # Bits take 8 times their size as bool, and a row of all pairs can have thousands of tiles.
        for part in mine.split(_RAGGED_CHUNK):
            number[part] = len(keys_any) + torch.arange(len(part))
            keys_any = torch.cat([keys_any, unpack_words(bits[tile[part]], index.block)[:, lo:hi].any(1)])
    return keys_any, number


def _union(place: Tensor, tile: Tensor, table: Tensor, n_places: int) -> Tensor:
    """Return the union of ``table[tile]`` over the entries at each place, ``[n_places, block]`` bool."""
    table = torch.cat([torch.ones(1, table.shape[1], dtype=torch.bool), table])
    # Many rows have the same tile in a column. With a table of 5, tile 2 at place 7 is pair 7 * 5 + 2 + 1 = 38.
    pairs = torch.unique(place * len(table) + tile + 1)
    found = torch.zeros(n_places, table.shape[1], dtype=torch.int32)
    found.index_add_(0, pairs // len(table), table[pairs % len(table)].int())
    return found > 0


def _segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    total = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return total[ptr[1:]] - total[ptr[:-1]]


def _gathered(ptr: Tensor, rows: Tensor, count: int) -> Tensor:
    return ptr[rows].unsqueeze(1) + torch.arange(count)


def _same_lists(key: Tensor, lists: Tensor, length: Tensor, ptr: Tensor) -> Tensor:
    """Number rows so that equal numbers mean equal ``key`` and equal lists of tiles (checked, not only hashed)."""
    place = torch.arange(len(lists)) - torch.repeat_interleave(ptr[:-1], length, output_size=len(lists))
    # The digest of a list is the sum of its mixed entries. Each is mixed with its place, so order counts.
    mixed = (lists + 2) * (place * 2 + 1) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 29)) * 0x14057B7EF767814F
    digest = _segment_sum(mixed ^ (mixed >> 32), ptr)
    _, number = torch.unique(torch.stack([key, length, digest], 1), dim=0, return_inverse=True)
    # One row of each number is its leader. A row whose list is not the leader's, after all, gets a number of its own.
    leader = torch.zeros(int(number.max()) + 1 if len(number) else 0, dtype=torch.long)
    leader[number] = torch.arange(len(number))
    theirs = lists[torch.repeat_interleave(ptr[:-1][leader[number]], length, output_size=len(lists)) + place]
    collided = _segment_sum((theirs != lists).long(), ptr) > 0
    return torch.where(collided, len(leader) + torch.arange(len(number)), number)


def _launches(index: BlockIndex, slot: Tensor, col: Tensor, tile: Tensor) -> list[Launch]:
    n_rows = index.n_rows
    n_slots = len(index.rows.full_ptr) - 1
    length = torch.bincount(slot, minlength=n_slots)
    ptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
    filled = length > 0
    first = torch.where(filled, col[ptr[:-1].clamp(max=max(len(col) - 1, 0))], 0)
    last = torch.where(filled, col[(ptr[1:] - 1).clamp(min=0)], -1)
    group = torch.arange(n_slots) // n_rows
    edge = _edges(index, n_slots)
    number = _same_lists((group * 3 + edge) * 2 + (last - first + 1 == length), tile, length, ptr)
    run_row = filled & (last - first + 1 == length)

    # A run is a stretch of neighboring rows with equal lists whose first columns step evenly, and never back, because
    # a view cannot. First columns 0, 0, 1, 2, 3, 4, 4 are runs of rows 0 and 1 (step 0), 2 to 5 (step 1), and 6.
    launches: list[Launch] = []
    step = first[1:] - first[:-1]
    equal = (number[1:] == number[:-1]) & run_row[1:] & (group[1:] == group[:-1]) & (step >= 0)
    slots = torch.arange(n_slots)
    rest = torch.ones(n_slots, dtype=torch.bool) & filled
    joins = equal & torch.cat([equal.new_ones(1), (step[1:] == step[:-1]) | ~equal[:-1]])
    starts = torch.cat([slots[:1], slots[1:][~joins]])
    ends = torch.cat([starts[1:], slots.new_tensor([n_slots])])
    long_enough = ((ends - starts >= _MIN_RUN_ROWS) | (length[starts] >= 2)) & run_row[starts]
    for begin, end in zip(starts[long_enough].tolist(), ends[long_enough].tolist(), strict=True):
        count, at = int(length[begin]), int(ptr[begin])
        tiles = tile[at : at + count]
        stride = int(step[begin]) if end - begin > 1 else 0
        n_partial = int((tiles != FULL).sum())
        launches.append(
            Launch(
                group=int(group[begin]),
                rows=slots[begin:end] % n_rows,
                tiles=tiles.unsqueeze(0),
                n_partial=n_partial,
                run=(int(first[begin]), stride),
                tall=stride == 0 and n_partial == 0,
            )
        )
        rest[begin:end] = False

    if bool(rest.any()):
        launches += _gathers(index, slot, col, tile, rest)
    return launches


def _edges(index: BlockIndex, n_slots: int) -> Tensor:
    """Return 0 for full row tiles and another number for each ragged one, which needs a launch of its own."""
    edge = torch.zeros(n_slots // max(index.n_rows, 1), max(index.n_rows, 1), dtype=torch.long)
    for number, row in enumerate(_ragged_rows(index)):
        edge[:, row] = number + 1
    return edge.flatten()


def _gathers(index: BlockIndex, slot: Tensor, col: Tensor, tile: Tensor, rest: Tensor) -> list[Launch]:
    """Return launches of the rows in ``rest``, partial tiles first."""
    mine = rest[slot]
    slot, col, tile = slot[mine], col[mine], tile[mine]
    order = torch.argsort(slot * 2 + (tile == FULL), stable=True)
    slot, col, tile = slot[order], col[order], tile[order]
    n_slots = len(rest)
    length = torch.bincount(slot, minlength=n_slots)
    ptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
    partial = _segment_sum((tile != FULL).long(), ptr)
    group = torch.arange(n_slots) // index.n_rows
    # Rows of one shape fit into one batch even if their tiles differ. Both counts are digits in base n_cols + 1.
    shape = ((group * 3 + _edges(index, n_slots)) * (index.n_cols + 1) + partial) * (index.n_cols + 1) + length
    number = _same_lists(shape, tile, length, ptr)
    sizes = torch.bincount(number[rest], minlength=int(number.max()) + 1)
    shared = rest & ((sizes[number] >= _MIN_SHARED_ROWS) | (partial == 0))
    launches = []
    for chosen, key in ((shared, number), (rest & ~shared, shape)):
        rows = chosen.nonzero().squeeze(1)
        order = torch.argsort(key[rows], stable=True)
        rows = rows[order]
        for same in torch.split(rows, torch.unique_consecutive(key[rows], return_counts=True)[1].tolist()):
            at = _gathered(ptr, same, int(length[same[0]]))
            tiles = tile[at]
            launches.append(
                Launch(
                    group=int(group[same[0]]),
                    rows=same % index.n_rows,
                    cols=col[at],
                    tiles=tiles[:1] if chosen is shared else tiles,
                    n_partial=int(partial[same[0]]),
                )
            )
    return launches


def _make_plan(index: BlockIndex) -> Plan:
    derived(index, check_lists)
    slot, col, tile = _entries(index)
    bits, keys_any, tile = _cut_last_column(index, col, tile)
    n_rows, n_cols, block = index.n_rows, index.n_cols, index.block
    n_slots = len(index.rows.full_ptr) - 1
    n_groups = n_slots // n_rows if n_rows else int(index.group.max()) + 1
    any_keys, number = _kept_by_ragged_rows(index, bits, keys_any, slot, tile)
    keys = _union(slot // max(n_rows, 1) * n_cols + col, number, any_keys, n_groups * n_cols)
    keys = keys.view(n_groups, n_cols * block)[:, : index.n_keys]
    rows = _union(slot, tile, (bits != 0).any(-1), n_slots).view(n_groups, n_rows * block)
    offset = offset_of(index)
    rows = rows[:, offset : offset + index.n_queries]
    idle = torch.repeat_interleave(torch.bincount(slot, minlength=n_slots) == 0, block).view(n_groups, n_rows * block)
    idle = idle[:, offset : offset + index.n_queries]
    every_key, every_row = bool(keys.all()), bool(rows.all())
    n_tiles = n_slots * n_cols
    kept = None
    if 0 < n_tiles <= _WHOLE_TILES and every_key and every_row:
        # By group, because indices that share their lists share the plan but not their groups.
        kept = replace(index, group=torch.arange(n_groups).unsqueeze(0)).to_dense()[0].cpu()
    return Plan(
        launches=tuple(_launches(index, slot, col, tile)) if len(slot) else (),
        bits=bits,
        dead_keys=None if every_key else ~keys,
        empty_rows=not every_row,
        idle_rows=tuple(queries.nonzero().squeeze(1) if bool(queries.any()) else None for queries in idle),
        kept=kept,
        spared=n_tiles - len(tile),
        masks={},
        additive={},
    )


def plan_of(index: BlockIndex) -> Plan:
    """Return the launches of an index, made once for its lengths."""
    with span(INDEX):
        return derived(index, _make_plan, lengths=True)
