"""Tile bitmaps: the element rule of a pattern, evaluated once per distinct tile and packed into words."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import Pattern, TileGrid
from ringtile.patterns.mask import odd_numbers, pack_words as pack_words, unpack_words as unpack_words

BLOCKS = (16, 32, 64, 128)
"""Tile sides, in tokens."""

EMPTY, FULL = -2, -1
"""States of a tile without bits. Other states are rows of the tile table."""

_CHUNK_ELEMENTS = 1 << 19
"""Elements evaluated at once: rules create several int64 temporaries of this size, 4 MiB each."""


class TileTable(NamedTuple):
    """Distinct partial tiles, as the fields of `BlockIndex` with the same names."""

    bits: Tensor
    bits_t: Tensor
    rows_any: Tensor
    cols_any: Tensor


def full_word(block: int) -> int:
    """Return a word of a tile whose bits are all set: a tile of 16 uses the lower half."""
    return (1 << block) - 1 if block < 32 else -1


def popcount(words: Tensor) -> Tensor:
    """Count the set bits of each int32 word."""
    # Sums of neighbours: pairs of bits, then nibbles, then bytes, which the product adds up in its top byte.
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


def chunks(tiles: Tensor, block: int) -> Sequence[Tensor]:
    """Cut a tensor with one row per tile into chunks to unpack at once, at least one."""
    return torch.split(tiles, max(1, _CHUNK_ELEMENTS // (block * block)))


def evaluate_tiles(pattern: Pattern, head: Tensor, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
    """Evaluate the element rule over full tiles: int64 ``[K]`` tile numbers in, words ``[K, b, w]`` out."""
    block = grid.block
    inside = torch.arange(block, device=row.device)
    # Positions outside the lengths get the value of the nearest position inside. So a rule never sees a query or key
    # that does not exist, and a ragged tile counts as full or empty by the part inside.
    query = (row[:, None] * block + inside).clamp(grid.start, grid.start + grid.n_queries - 1)
    key = (col[:, None] * block + inside).clamp(0, grid.n_keys - 1)
    kept = pattern.allowed(head, query[:, :, None], key[:, None, :])
    return pack_words(kept.expand(len(row), block, block))


def derive_tables(bits: Tensor) -> TileTable:
    """Return the transposed words and the row and column sets of tiles ``[T, b, w]``."""
    block = bits.shape[1]
    transposed = torch.cat([pack_words(unpack_words(part, block).mT) for part in chunks(bits, block)])
    return TileTable(bits, transposed, pack_words((bits != 0).any(-1)), pack_words((transposed != 0).any(-1)))


def with_both(words: Tensor) -> Tensor:
    """Prepend an empty and a full tile to a table, so that a state less `EMPTY` is a row of it."""
    table = torch.cat((words.new_zeros(2, *words.shape[1:]), words))
    table[FULL - EMPTY] = -1
    return table


def first_of(inverse: Tensor, count: int) -> Tensor:
    """Return the first place of each of ``count`` numbers: those of 1 0 1 2 are 1, 0 and 3."""
    places = torch.arange(len(inverse), device=inverse.device)
    return inverse.new_full((count,), len(inverse)).scatter_reduce_(0, inverse, places, "amin")


def distinct_tiles(bits: Tensor, digests: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first occurrences, ascending, of the distinct tiles, and for each tile the number of its one."""
    values, inverse = torch.unique(digests, return_inverse=True)
    order = torch.arange(len(digests), device=bits.device)
    first, by_first = first_of(inverse, len(values)).sort()
    rank = torch.empty_like(by_first).scatter_(0, by_first, order[: len(first)])
    inverse = rank[inverse]
    # If two different tiles share a digest, no tiles are merged.
    if len(first) < len(bits) and not torch.equal(bits[first[inverse]], bits):
        return order, order
    return first, inverse


class TileCollector:
    """Collects partial tiles and merges equal ones. `add` returns provisional numbers, and `finish` translates them."""

    def __init__(self, block: int, device: torch.device, max_bytes: int | None = None) -> None:
        self._bits = torch.empty(0, block, -(-block // 32), dtype=torch.int32, device=device)
        self._digests = torch.empty(0, dtype=torch.int64, device=device)
        self._translate = torch.empty(0, dtype=torch.int64, device=device)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._multipliers = odd_numbers(block * self._bits.shape[2]).to(device)
        self._given = 0
        self._next_merge = 1 << 12
        self._max_bytes = max_bytes

    def add(self, words: Tensor) -> Tensor:
        """Add tiles as words ``[K, b, w]``. Return their states: `EMPTY`, `FULL` or a provisional number."""
        words = words.flatten(1)
        partial = (words != full_word(self._bits.shape[1])).any(1)
        state = torch.where(partial, EMPTY, FULL)
        partial &= (words != 0).any(1)
        words = words[partial]
        digests = (words * self._multipliers).sum(1)
        state[partial] = torch.arange(self._given, self._given + len(words), device=words.device)
        self._given += len(words)
        self._pending.append((words.view(-1, *self._bits.shape[1:]), digests))
        if self._given >= self._next_merge:
            self._merge()
            self._next_merge = self._given + max(1 << 12, len(self._bits))
        return state

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the distinct tiles ``[T, b, w]``, and the row of each provisional number."""
        self._merge()
        return self._bits, self._translate

    def _merge(self) -> None:
        if not self._pending:
            return
        stored = len(self._bits)
        bits = torch.cat([self._bits, *(bits for bits, _ in self._pending)])
        digests = torch.cat([self._digests, *(digests for _, digests in self._pending)])
        self._pending.clear()
        first, inverse = distinct_tiles(bits, digests)
        self._bits, self._digests = bits[first], digests[first]
        self._translate = torch.cat([self._translate, inverse[stored:]])
        needed = 2 * self._bits.nbytes
        if self._max_bytes is not None and needed > self._max_bytes:
            raise ValueError(f"the distinct tiles need at least {needed:,} bytes, over max_bytes={self._max_bytes:,}")


def collect(tiles: Iterable[Tensor], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the state of each tile and the distinct ones, from parts in words ``[K, b, w]``."""
    collector = TileCollector(block, device)
    state = torch.cat(list(map(collector.add, tiles)))
    bits, translate = collector.finish()
    state[state >= 0] = translate[state[state >= 0]]
    return state, bits
