"""Indices made of other indices: other tiles, another order, larger tiles, tiles cut to the lengths, rows of keys."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.index.lists import Entries
from ringtile.index.restrict import check_keep, envelopes_of, restricted
from ringtile.index.tile_index import AnIndex, TileIndex
from ringtile.index.tiles import BLOCKS, EMPTY, FULL, chunks, collect, full_word, pack_words, unpack_words, with_both
from ringtile.patterns.base import Dense, TileGrid
from ringtile.patterns.grid import counted

_ROWS = 1 << 16
"""Token rows of tiles whose bits are cut at once."""


@torch.inference_mode(False)
def trimmed(index: AnIndex) -> AnIndex:
    """Return the same pairs without the bits outside the lengths, and without tiles that keep no pairs inside.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Window
    >>> last = build_index(Window(30, 0), 1, 200)
    >>> last.rows.partial.tolist(), last.trimmed().rows.partial.tolist()
    ([0, 1], [1])
    """
    block = index.block
    if not (index.start % block or index.n_queries % block or index.n_keys % block):
        return index.fitted()
    entries = index.entries()
    slot, col = index.slot_and_col(entries.number)
    ragged = (entries.state >= 0) & (index.pairs_inside(slot, col) < block * block)
    entries, bits = _cut_to_lengths(index, entries, ragged.nonzero().flatten())
    return _with(index, index.group, entries, bits)


def _with(index: AnIndex, group: Tensor, entries: Entries, bits: Tensor) -> AnIndex:
    """Return the index of these entries, without the empty ones, with the tiles of an index at the same positions."""
    kept = entries.state != EMPTY
    entries, envelopes = Entries(entries.number[kept], entries.state[kept]), envelopes_of(index, group)
    return index.from_entries(group, entries, bits, index.grid, envelopes, index.rows.at, index.cols.at)


def _cut_to_lengths(index: TileIndex, entries: Entries, chosen: Tensor) -> tuple[Entries, Tensor]:
    """Cut the bits of the chosen entries to the lengths. Return all entries and the tile table, with new tiles."""
    (number, state), bits = entries, index.table.bits
    state, (slot, col) = state.clone(), index.slot_and_col(number)
    inside = torch.arange(index.block, device=index.device)
    # FULL is -1, so a full tile reads the last row of this table.
    table = pad(bits, (0, 0, 0, 0, 0, 1), value=-1)

    def inner(part: Tensor) -> Tensor:
        top, bottom = index.rows_inside(slot[part, None])
        rows = (inside >= top) & (inside < bottom)
        keys = inside < index.keys_inside(col[part, None])
        return pack_words(unpack_words(table[state[part]], index.block) & rows[:, :, None] & keys[:, None])

    found, cut = collect(map(inner, chunks(chosen, index.block)), index.block, index.device)
    state[chosen] = torch.where(found >= 0, found + len(bits), found)
    return Entries(number, state), torch.cat((bits, cut))


@torch.inference_mode(False)
def remapped(index: AnIndex, rows: Tensor, cols: Tensor) -> AnIndex:
    """Return the index of some row tiles over a buffer of some column tiles, both in any order.

    ``rows`` and ``cols`` are distinct tile numbers, int64, counted from 0. The queries and keys of a call lie in this
    order. Each tile takes ``block`` tokens, but the first and last row and the last column stay as ragged as they are,
    if they stay first and last. Density is then measured against all pairs. Raises ValueError if a number is out of
    range or occurs twice, or if a row keeps a column that is not in ``cols``.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> moved = build_index(Causal(), 512).remapped(torch.tensor([2, 0]), torch.tensor([0, 2, 1]))
    >>> print(moved.draw())
    █▒█
    ▒··
    >>> moved.rows.at.tolist(), moved.cols.at.tolist()
    ([2, 0], [0, 2, 1])
    """
    new_row, new_col = _new_numbers("rows", rows, index.n_rows), _new_numbers("cols", cols, index.n_cols)
    block = index.block
    # 300 queries from position 100 in tiles of 128: 100 places of the first tile come before, 112 of the last after.
    lead, row_tail, col_tail = index.start % block, -(index.start + index.n_queries) % block, -index.n_keys % block
    keeps_lead, keeps_row_tail = rows[:1].tolist() == [0], rows[-1:].tolist() == [index.n_rows - 1]
    keeps_col_tail = cols[-1:].tolist() == [index.n_cols - 1]
    # A ragged tile that does not stay at its end becomes a whole one, whose other bits count: clear them.
    row_cut, col_cut = (torch.zeros_like(new, dtype=torch.bool) for new in (new_row, new_col))
    row_cut[:1] |= lead > 0 and not keeps_lead
    row_cut[-1:] |= row_tail > 0 and not keeps_row_tail
    col_cut[-1:] |= col_tail > 0 and not keeps_col_tail
    lead, row_tail, col_tail = lead * keeps_lead, row_tail * keeps_row_tail, col_tail * keeps_col_tail
    grid = TileGrid(block, lead, len(rows) * block - lead - row_tail, len(cols) * block - col_tail)

    index = trimmed(index)
    slot, col = index.slot_and_col(index.entries().number)
    row = slot % max(index.n_rows, 1)
    chosen = new_row[row] >= 0
    missing = chosen & (new_col[col] < 0)
    if missing.any():
        raise ValueError(f"cols: expected all columns that the rows keep, column tile {col[missing][0]} is missing")
    cut = (chosen & (row_cut[row] | col_cut[col])).nonzero().flatten()
    entries, bits = _cut_to_lengths(index, index.entries(), cut)
    chosen &= entries.state != EMPTY
    slot = slot // max(index.n_rows, 1) * len(rows) + new_row[row]
    number = (slot * len(cols) + new_col[col])[chosen]
    # There can be millions of tiles, and the sort needs the memory of these.
    del slot, col, row, missing
    number, order = number.sort()
    state = entries.state[chosen][order]
    used, state[state >= 0] = torch.unique(state[state >= 0], return_inverse=True)
    at, envelopes = (index.row_positions(rows), index.col_positions(cols)), (Dense(),) * len(index.envelopes)
    return index.from_entries(index.group, Entries(number, state), bits[used], grid, envelopes, *at)


def _new_numbers(name: str, tiles: Tensor, count: int) -> Tensor:
    """Return the place in ``tiles`` of each of ``count`` tiles, -1 if it is not there."""
    if tiles.dim() != 1 or tiles.dtype != torch.int64 or ((tiles < 0) | (tiles >= count)).any():
        raise ValueError(f"{name}: expected int64 [any] of tile numbers below {count}, got {tiles!r}")
    numbers = tiles.new_full((count,), -1)
    numbers[tiles] = torch.arange(len(tiles), device=tiles.device)
    if int((numbers >= 0).sum()) < len(tiles):
        raise ValueError(f"{name}: expected distinct tile numbers, got {tiles!r}")
    return numbers


@torch.inference_mode(False)
def coarsen(index: AnIndex, block: int = 128) -> AnIndex:
    """Return the same pairs in larger tiles. ``block`` must be a multiple of the current one.

    Raises ValueError for other blocks, and if tiles that become one do not follow each other in position space.
    """
    if block not in BLOCKS or block < index.block:
        raise ValueError(f"block: expected one of {[b for b in BLOCKS if b >= index.block]}, got {block!r}")
    factor, grid = block // index.block, replace(index.grid, block=block)
    row_at = _coarse_positions("rows.at", index.rows.at, index.first_row, factor)
    col_at = _coarse_positions("cols.at", index.cols.at, 0, factor)
    number, state = index.entries()
    slot, col = index.slot_and_col(number)
    group, row = slot // max(index.n_rows, 1), slot % max(index.n_rows, 1) + index.first_row
    # Cells of a large tile: with factor 2, tile (row 5, column 3) is cell 3, the last, of large tile (2, 1).
    cell = row % factor * factor + col % factor
    number = (group * grid.n_rows + row // factor - grid.first_row) * grid.n_cols + col // factor
    number, inverse = torch.unique(number, return_inverse=True)
    cells = number.new_full((len(number), factor * factor), EMPTY)
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
    table = with_both(index.table.bits)

    def joined(part: Tensor) -> Tensor:
        mask = unpack_words(table[part - EMPTY], index.block).view(-1, factor, factor, index.block, index.block)
        return pack_words(mask.transpose(2, 3).reshape(-1, block, block))

    found, bits = collect(map(joined, chunks(distinct, block)), block, index.device)
    merged[~full] = found[inverse]
    return index.from_entries(index.group, Entries(number, merged), bits, grid, index.envelopes, row_at, col_at)


def merged(index: AnIndex, block: int = 128) -> AnIndex:
    """Return the same pairs in larger tiles, which need not follow each other in position space."""
    rows, cols = (side._replace(at=side.at[:0]) for side in (index.rows, index.cols))
    return coarsen(replace(index, rows=rows, cols=cols), block)


def _coarse_positions(name: str, at: Tensor, first: int, factor: int) -> Tensor:
    """Return the positions of tiles ``factor`` times as large. The first of the tiles is number ``first``."""
    if not len(at):
        return at
    # Positions 6, 7, 4, 5 with factor 2 and first 2 become 3, 2. From first 3 on, 6 would have to end a large tile.
    skipped = first % factor
    coarse, place = at // factor, torch.arange(len(at), device=at.device) + skipped
    heads = coarse[(place % factor == 0) | (place == skipped)]
    if (at != heads.long()[place // factor] * factor + place % factor).any():
        raise ValueError(f"{name}: coarsen expects runs of {factor} tiles from a multiple of {factor}, got {at!r}")
    return heads


@torch.inference_mode(False)
def restricted_rows(index: AnIndex, keep: Tensor) -> AnIndex:
    """Return the index of the tiles that each query also keeps, bool ``[B or 1, H or 1, n_queries, n_cols]``.

    A tile that only some of its queries keep has their bits, so its cost is that of the whole tile. Raises ValueError
    if ``keep`` does not match.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> keep = torch.ones(1, 1, 256, 2, dtype=torch.bool)
    >>> keep[0, 0, 200, 0] = False
    >>> restricted = build_index(Causal(), 256).restricted_rows(keep)
    >>> restricted.kept_pairs - build_index(Causal(), 256).kept_pairs
    -128
    """
    check_keep(index, keep, (index.n_queries, index.n_cols))
    block, rows, lead = index.block, index.n_rows, index.start - index.first_row * index.block
    padding = (0, 0, lead, rows * block - lead - index.n_queries)
    # Rows outside the lengths neither keep a tile nor hinder it from being the base's.
    some, every = (pad(keep, padding, value=value).unflatten(2, (rows, block)) for value in (False, True))
    tiles = restricted(index, some.any(3))
    (number, state), bits = tiles.entries(), index.table.bits
    number, order = number.sort()
    state = state[order]
    # Groups share one mask, or each has its own.
    shape, place = tiles.group.shape, number
    if keep.shape[:2] == (1, 1):
        shape, place = keep.shape[:2], number % max(rows * index.n_cols, 1)
    columns = every.transpose(3, 4).expand(*shape, -1, -1, -1).reshape(-1, block)
    cut = (~columns.all(1)[place]).nonzero().flatten()
    # FULL is -1, so a full tile reads the last row of this table.
    words = pad(bits, (0, 0, 0, 0, 0, 1), value=full_word(block))
    # A bool is 0 or 1, and -1 has all bits.
    parts = (words[state[part]] & -columns[place[part]].unsqueeze(2).int() for part in cut.split(_ROWS // block))
    found, more = collect(parts, block, index.device)
    state[cut] = torch.where(found >= 0, found + len(bits), found)
    return _with(index, tiles.group, Entries(number, state), torch.cat((bits, more)))


def keys_of(index: TileIndex, queries: Tensor) -> Tensor:
    """Return the keys that some queries keep, bool ``[B or 1, H or 1, len(queries), n_keys]``.

    ``queries`` are numbers counted from 0, int64, in any order. Raises ValueError if one is out of range.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Window
    >>> build_index(Window(1, 0), 4).keys_of(torch.tensor([2]))[0, 0].int().tolist()
    [[0, 1, 1, 0]]
    """
    inside = queries.dim() == 1 and queries.dtype == torch.int64
    if not inside or ((queries < 0) | (queries >= index.n_queries)).any():
        raise ValueError(f"queries: expected int64 [any] of numbers below {index.n_queries}, got {queries!r}")
    block, groups, cols, lists = index.block, index.n_groups, index.n_cols, index.rows
    row, place = index.row_of(queries), (index.start + queries) % block
    slot = (torch.arange(groups, device=index.device).unsqueeze(1) * index.n_rows + row).flatten()
    found = torch.zeros(len(slot) * cols, block, dtype=torch.bool, device=index.device)
    for begins, column, tile in ((lists.full_ptr, lists.full, None), (lists.partial_ptr, lists.partial, lists.tile)):
        first, count = begins.long()[slot], begins.diff().long()[slot]
        # Slots with 2 and 3 entries, from entries 7 and 0 on: numbers 0 0 1 1 1, entries 7 8 0 1 2.
        number, step = counted(count)
        entry = first[number] + step
        target = number * cols + column.long()[entry]
        if tile is None:
            found[target] = True
        else:
            words = index.table.bits[tile[entry].long(), place.repeat(groups)[number]]
            found[target] = unpack_words(words, block)
    kept = found.view(groups, len(queries), cols * block)[..., : index.n_keys]
    return kept[index.group.long()]
