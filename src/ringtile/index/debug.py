"""An index as a matrix, as text and as an error: what you read to see that it is right."""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile.index.checks import check_lists
from ringtile.index.tile_index import TileIndex
from ringtile.index.tiles import BLOCKS, FULL, unpack_words

_DENSE_LIMIT = 1 << 28


def to_dense(index: TileIndex) -> Tensor:
    """Return the kept pairs as bool ``[B or 1, H or 1, n_queries, n_keys]``.

    Raises ValueError above 2^28 elements.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> build_index(Causal(), 3).to_dense()[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    block, rows, cols = index.block, index.n_rows, index.n_cols
    size = max(index.n_groups * rows * cols * block * block, index.group.numel() * index.n_queries * index.n_keys)
    if size > _DENSE_LIMIT:
        raise ValueError(f"to_dense expects at most {_DENSE_LIMIT:,} elements, got {size:,}")
    number, state = index.entries()
    dense = torch.zeros(index.n_groups * rows * cols, block, block, dtype=torch.bool, device=index.device)
    dense[number[state == FULL]] = True
    dense[number[state >= 0]] = unpack_words(index.table.bits, block)[state[state >= 0]]
    dense = dense.view(index.n_groups, rows, cols, block, block).transpose(2, 3)
    dense = dense.reshape(index.n_groups, rows * block, cols * block)
    skipped = index.start - index.first_row * block
    return dense[:, skipped : skipped + index.n_queries, : index.n_keys][index.group.long()]


def draw(index: TileIndex, group: int = 0, width: int = 64) -> str:
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
    if not 0 <= group < index.n_groups:
        raise ValueError(f"group: expected 0 <= group < {index.n_groups}, got {group}")
    if width < 1:
        raise ValueError(f"width: expected a positive number of columns, got {width}")
    number, state = index.entries()
    slot, col = index.slot_and_col(number)
    row = slot - group * index.n_rows
    inside = (row >= 0) & (row < index.n_rows)
    full = state[inside] == FULL
    return _draw_tiles(row[inside], col[inside], full, index.n_rows, index.n_cols, width)


def _draw_tiles(row: Tensor, col: Tensor, full: Tensor, n_rows: int, n_cols: int, width: int) -> str:
    """Draw tiles, a square of ``ceil(max(n_rows, n_cols) / width)`` of them as one character."""
    if not n_rows or not n_cols:
        return ""
    cell = -(-max(n_rows, n_cols) // width)
    high, wide = -(-n_rows // cell), -(-n_cols // cell)
    place = row // cell * wide + col // cell
    kept = torch.bincount(place, minlength=high * wide)
    whole = torch.bincount(place[full], minlength=high * wide)
    rows = torch.bincount(torch.arange(n_rows, device=row.device) // cell)
    cols = torch.bincount(torch.arange(n_cols, device=row.device) // cell)
    shade = (kept > 0).int() + (whole == torch.outer(rows, cols).flatten()).int()
    return "\n".join("".join("·▒█"[number] for number in line) for line in shade.view(high, wide).tolist())


def validate(index: TileIndex) -> None:
    """Check that all fields are consistent. Use it on an index that you did not get from `build_index`.

    Raises ValueError that names the first field out of range, out of order or in conflict with the others.
    """
    if index.block not in BLOCKS:
        raise ValueError(f"block: expected one of {BLOCKS}, got {index.block}")
    check_lists(index)
    group = index.group
    if group.dim() != 2 or not group.numel() or int(group.max()) + 1 != index.n_groups:
        raise ValueError(f"group: expected numbers up to {index.n_groups - 1} as [B or 1, H or 1], got {group}")
    index = index.fitted()
    for kind, slot in zip(("full", "partial"), index.rows.slots(), strict=True):
        begins, columns = getattr(index.rows, f"{kind}_ptr"), getattr(index.rows, kind)
        if int(begins[0]):
            raise ValueError(f"rows.{kind}_ptr: expected offsets from 0, got {begins}")
        if ((columns.diff() <= 0) & (slot.diff() == 0)).any():
            raise ValueError(f"rows.{kind}: expected columns that ascend within a row")
    entries = index.entries()
    if len(torch.unique(entries.number)) < len(entries.number):
        raise ValueError("rows.partial: a tile is in both lists")
    expected = index.from_entries(group, entries, index.table.bits, index.grid)
    for side in ("rows", "cols", "table"):
        mine, theirs = getattr(index, side), getattr(expected, side)
        for name, x, y in zip(mine._fields, mine, theirs, strict=True):
            if name != "at" and not torch.equal(x, y):
                raise ValueError(f"{side}.{name}: does not follow from the row lists and bits")


def describe(index: TileIndex) -> str:
    """Return the ``repr`` of an index, which reads no tensor."""
    return (
        f"BlockIndex({index.n_queries} queries from {index.start} x {index.n_keys} keys, block {index.block}, groups "
        f"{index.n_groups}, {len(index.rows.full)} full and {len(index.rows.partial)} partial tiles "
        f"({len(index.table.bits)} distinct), {index.nbytes} bytes on {index.device})"
    )
