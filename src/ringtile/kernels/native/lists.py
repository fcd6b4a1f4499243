"""The tiles of an index's lists that a mask keeps, and lists of keys in order, by the library."""

import ctypes
from functools import partial

import torch
from torch import Tensor

from ringtile.index.restrict import KeptLists, too_many
from ringtile.index.tile_index import TileIndex
from ringtile.kernels.contracts import check_memory
from ringtile.kernels.native.library import address, library, reason_against
from ringtile.patterns.private import is_zero


def kept_lists(index: TileIndex, keep: Tensor, shape: torch.Size | None, capacity: int | None) -> KeptLists | None:
    """Return what `ringtile.index.restrict` makes of PyTorch's operations, or None if the library does not serve it."""
    # A graph has operators only, and the tensors of a trace have no memory.
    plain = type(keep) is Tensor and keep.device.type == "cpu" and not torch.compiler.is_compiling()
    if reason_against() or not plain or is_zero(keep):
        return None
    check_memory(("keep",), (keep,))
    if shape is None:
        base, heads = torch.arange(index.n_groups, dtype=torch.int32, device="cpu"), max(index.n_groups, 1)
        keep = keep.expand(1, heads, -1, -1)
    else:
        base, heads = index.group.expand(shape).flatten().contiguous(), shape[1]
        keep = keep.expand(*shape, -1, -1)
    batch, head, row, col = keep.stride()
    lists: KeptLists = ([], [])
    sides = (index.rows, index.n_rows, row, col), (index.cols, index.n_cols, col, row)
    for found, (side, slots, *strides) in zip(lists, sides, strict=True):
        n_kept = 0
        for begins, *tables in ((side.full_ptr, side.full), (side.partial_ptr, side.partial, side.tile)):
            pointer = base.new_empty(len(base) * slots + 1)
            begins, *tables = [x.contiguous() for x in (begins, *tables)]
            places = [*(address("lists", x, torch.int32) for x in (base, begins, *tables)), None][:4]
            strided = (address("keep", keep, torch.bool), (ctypes.c_int64 * 4)(batch, head, *strides))
            copy = partial(library().handle.ringtile_kept, len(base), heads, slots, *places, *strided)
            # A list has at most the base's tiles once per group.
            most = len(base) * len(tables[0])
            size = copy(0, pointer.data_ptr(), None, None) if capacity is None else min(capacity, most)
            copies = [base.new_empty(size) for _ in tables]
            n_kept += copy(size, pointer.data_ptr(), *[*map(Tensor.data_ptr, copies), None][:2])
            found.extend((pointer, *copies))
        if capacity is not None and n_kept > capacity:
            raise RuntimeError(too_many(capacity))
    return lists


def ascending(entries: Tensor, count: int) -> Tensor:
    """Return the numbers in [0, count) of each row, on a CPU, as int32, ascending and each once, then -1."""
    entries, bits = entries.int().contiguous(), entries.new_zeros(count // 64 + 1, dtype=torch.int64)
    found, length = torch.empty_like(entries), entries.shape[-1]
    x, y = (address("entries", each, torch.int32) for each in (entries, found))
    marks = address("bits", bits, torch.int64)
    library().handle.ringtile_ascending(entries.numel() // max(length, 1), length, count, x, marks, y)
    return found
