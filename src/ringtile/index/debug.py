"""An index as a matrix, as text and as an error: what you read, and kernels expect, to see that it is right."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.index.lists import work_list
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
    # FULL is -1, so a full tile reads the last row of this table.
    dense[number] = unpack_words(pad(index.table.bits, (0, 0, 0, 0, 0, 1), value=-1), block)[state]
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
    n_rows, n_cols = index.n_rows, index.n_cols
    if not n_rows or not n_cols:
        return ""
    number, state = index.entries()
    slot, col = index.slot_and_col(number)
    inside = slot // n_rows == group
    # A square of so many tiles is one character.
    cell = -(-max(n_rows, n_cols) // width)
    high, wide = -(-n_rows // cell), -(-n_cols // cell)
    place = slot % n_rows // cell * wide + col // cell
    kept, whole = (torch.bincount(place[x], minlength=high * wide) for x in (inside, inside & (state == FULL)))
    rows, cols = (torch.bincount(torch.arange(count, device=index.device) // cell) for count in (n_rows, n_cols))
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


def check_lists(index: TileIndex) -> None:
    """Raise ValueError if a kernel that follows the lists of an index would read outside its tensors."""
    slots, words, n_tiles = index.n_groups, -(-index.block // 32), len(index.table.bits)
    sides = (("rows", index.rows, index.n_rows, index.n_cols), ("cols", index.cols, index.n_cols, index.n_rows))
    for side, lists, per_group, others in sides:
        # Both sides list the same tiles.
        fulls, partials = len(index.rows.full), len(index.rows.partial)
        for name, length, limit in (
            ("full_ptr", slots * per_group + 1, fulls + 1),
            ("partial_ptr", slots * per_group + 1, partials + 1),
            ("full", fulls, others),
            ("partial", partials, others),
            ("tile", partials, n_tiles),
        ):
            x = getattr(lists, name)
            _check(f"{side}.{name}", x, (length,), index.device, limit)
            if name.endswith("_ptr") and (x.diff() < 0).any():
                raise ValueError(f"{side}.{name}: expected numbers that rise, got {x}")
        _check(f"{side}.at", lists.at, (per_group if len(lists.at) else 0,), index.device)
        if not torch.equal(lists.work[lists.work[:, 0] >= 0], work_list(lists.full_ptr, lists.partial_ptr)):
            raise ValueError(f"{side}.work: expected the splits of the lists")
    _check("group", index.group, index.group.shape, index.device, slots)
    bits, any_words = (n_tiles, index.block, words), (n_tiles, words)
    for name, x, shape in zip(index.table._fields, index.table, (bits, bits, any_words, any_words), strict=True):
        _check(f"table.{name}", x, shape, index.device)


def _check(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device, limit: int | None = None) -> None:
    """Raise ValueError if a tensor is not int32 of a shape, or holds numbers below 0 or from ``limit`` on."""
    if x.dtype != torch.int32 or x.device != device or x.shape != shape:
        raise ValueError(f"{name}: expected int32 {tuple(shape)}, got {x.dtype} {tuple(x.shape)} on {x.device}")
    low, high = map(int, x.aminmax()) if limit is not None and x.numel() else (0, -1)
    if low < 0 or (limit is not None and high >= limit):
        raise ValueError(f"{name}: expected numbers of at least 0 and below {limit}, got {low} ... {high}")


def describe(index: TileIndex) -> str:
    """Return the ``repr`` of an index, which reads no tensor."""
    return (
        f"BlockIndex({index.n_queries} queries from {index.start} x {index.n_keys} keys, block {index.block}, groups "
        f"{index.n_groups}, {len(index.rows.full)} full and {len(index.rows.partial)} partial tiles "
        f"({len(index.table.bits)} distinct), {index.nbytes} bytes on {index.device})"
    )
