"""Launches: the row tiles of a block index that `blockwise` computes together.

Rows whose lists have as many partial and as many full tiles go into one batched call, which gathers their columns. Rows
with equal tiles share one mask.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.debug import check_lists
from ringtile.index.schedule import derived
from ringtile.index.tiles import FULL, pack_words, unpack_words
from ringtile.kernels.spans import INDEX, span

_MIN_SHARED_ROWS = 4


class Launch(NamedTuple):
    """Rows of one group that are computed by the same calls. The partial tiles of a row come first."""

    rows: Tensor
    """``[n]``, counted from 0."""
    cols: Tensor
    """``[n, K]``."""
    tiles: Tensor
    """``[n or 1, K]``: each tile's row in the plan's bits, or `FULL`. One row if they are the same for all rows."""
    n_partial: int


class Plan(NamedTuple):
    """The launches of a block index, on the CPU."""

    launches: list[list[Launch]]
    """By group."""
    bits: Tensor
    """``[T, block, words]`` int32: the index's tiles, cut off at the last key. The last one has all bits."""
    dead_keys: Tensor | None
    """``[G, C * block]`` bool, the keys that no row keeps, or None if every key is kept."""

    def mask(self, tiles: Tensor) -> Tensor:
        """Return the kept pairs of tiles: ``[..., K]`` tile numbers to ``[..., block, K * block]`` bool."""
        # `FULL` is -1, so a full tile reads the last row.
        words = self.bits[tiles]
        return unpack_words(words, words.shape[-2]).movedim(-3, -2).flatten(-2)


def _equal(numbers: Tensor) -> Iterator[Tensor]:
    """Yield the places of each number: those of 7 5 7 are 1, then 0 and 2."""
    order = torch.argsort(numbers, stable=True)
    yield from order.split(torch.unique_consecutive(numbers[order], return_counts=True)[1].tolist())


def _kept_keys(index: BlockIndex, slot: Tensor, col: Tensor, tile: Tensor) -> Tensor:
    """Return the keys that a row of each group keeps, bool ``[G, C * block]``."""
    # Row 0 of the table stands for `FULL`, which is -1.
    table = torch.nn.functional.pad(unpack_words(index.table.cols_any, index.block), (0, 0, 1, 0), value=True)
    # Many rows have the same tile in a column. With a table of 5, tile 2 at place 7 is pair 7 * 5 + 2 + 1 = 38.
    place = slot // max(index.n_rows, 1) * index.n_cols + col
    pairs = torch.unique(place * len(table) + tile + 1)
    found = tile.new_zeros(index.n_groups * index.n_cols, index.block, dtype=torch.int32)
    found.index_add_(0, pairs // len(table), table[pairs % len(table)].int())
    return (found > 0).view(index.n_groups, -1)


def _launches(index: BlockIndex, slot: Tensor, col: Tensor, tile: Tensor) -> list[list[Launch]]:
    order = torch.argsort(slot * 2 + (tile == FULL), stable=True)
    slot, col, tile = slot[order], col[order], tile[order]
    n_slots, base = index.n_groups * index.n_rows, index.n_cols + 1
    length, partial = (torch.bincount(x, minlength=n_slots) for x in (slot, slot[tile != FULL]))
    begin = length.cumsum(0) - length
    # Both counts are digits in base n_cols + 1.
    shape = (torch.arange(n_slots, device="cpu") // max(index.n_rows, 1) * base + partial) * base + length
    launches: list[list[Launch]] = [[] for _ in range(index.n_groups)]
    for rows in _equal(shape):
        first = int(rows[0])
        at = begin[rows].unsqueeze(1) + torch.arange(int(length[first]), device="cpu")
        if not at.numel():
            continue
        cols, tiles = col[at], tile[at]
        _, number, counts = torch.unique(tiles, dim=0, return_inverse=True, return_counts=True)
        number[counts[number] < _MIN_SHARED_ROWS] = -1
        for same in _equal(number):
            shared = tiles[same] if number[same[0]] < 0 else tiles[same[:1]]
            group, row = rows[same] // index.n_rows, rows[same] % index.n_rows
            launches[int(group[0])].append(Launch(row, cols[same], shared, int(partial[first])))
    return launches


def _make_plan(index: BlockIndex) -> Plan:
    derived(index, check_lists)
    # Without the bits outside the lengths: a key that only these keep is kept by no row.
    index = index.to("cpu").trimmed()
    number, tile = index.entries()
    slot, col = index.slot_and_col(number)
    keys, bits = _kept_keys(index, slot, col, tile), index.table.bits
    # A full tile of a ragged last column becomes a partial one, the first behind those of the index.
    tile[(tile == FULL) & ((col + 1) * index.block > index.n_keys)] = len(bits)
    inside = pack_words(torch.arange(index.block, device="cpu") < index.n_keys % index.block).expand(1, *bits.shape[1:])
    return Plan(
        _launches(index, slot, col, tile),
        torch.cat([bits, inside, torch.full_like(inside, -1)]),
        None if keys[:, : index.n_keys].all() else ~keys,
    )


def plan_of(index: BlockIndex) -> Plan:
    """Return the launches of an index, made once for its lengths."""
    with span(INDEX):
        return derived(index, _make_plan, lengths=True)
