"""What kernels expect of the tensors of an index."""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile.index.lists import work_list
from ringtile.index.tile_index import TileIndex


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
