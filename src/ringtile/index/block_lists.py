"""The tiles of an index as lists of equal width, as FlexAttention and FlashAttention 4 read them.

Compiled FlexAttention reads the lists, and ``mask_mod`` only in partial blocks. Eager FlexAttention reads only
``mask_mod``. So an exported mask has a ``mask_mod`` of all pairs, and an imported mask means the same as compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.build import real_tensors
from ringtile.index.derive import merged
from ringtile.index.tiles import EMPTY, FULL, unpack_words, with_both
from ringtile.patterns.base import Pattern, TileGrid
from ringtile.patterns.content import Content
from ringtile.patterns.functions import MaskMod, one_by_one
from ringtile.patterns.mask import OfMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_PARTIAL = 0
"""The state of a partial tile in `FlexPattern`, whose bits are not known."""

BLOCK = 128
"""The side of a tile in `Tiles`."""


class Lists(NamedTuple):
    """The tiles of each row or column, ascending: counts ``[B or 1, H or 1, R]`` and numbers ``[.., R, longest]``."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor


class Tiles(NamedTuple):
    """An index as the kernels read it."""

    rows: Lists
    """On sm_100, one list for two row tiles."""
    cols: Lists
    has_partial: bool
    first: Tensor
    """``[B or 1, H or 1]`` int32: where the tiles of each batch element and head begin in ``tile_at``."""
    n_cols: Tensor
    """``[1]`` int32."""
    tile_at: Tensor
    """``[G * R * C]`` int32: the number of each tile in ``bits``."""
    bits: Tensor
    """``[(2 + T) * 128 * 4]`` int32: an empty tile, a full one, and the tiles of the index."""
    queries: Tensor | None
    """Bool ``[B or 1, H or 1, Nq]``: the queries that keep a key, or None if all do."""
    keys: Tensor | None
    """Bool ``[B or 1, H or 1, Nk]``: the keys that a query keeps, or None if all are kept."""


def dense_states(index: BlockIndex) -> Tensor:
    """Return the state of each tile, `EMPTY`, `FULL` or a row of the tile table, int32 ``[G, R, C]``."""
    size = index.n_groups * index.n_rows * index.n_cols
    table = torch.full((size,), EMPTY, dtype=torch.int32, device=index.device)
    number, state = index.entries()
    table[number] = state.int()
    return table.view(index.n_groups, index.n_rows, index.n_cols)


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen columns, ``[G, R]``, and all columns ``[G, R, C]``, the chosen ones first."""
    counts = chosen.sum(-1, dtype=torch.int32)
    return counts, torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()


@torch.inference_mode(False)
def make_tiles(index: BlockIndex, row_tiles: int) -> Tiles:
    """Return the lists and bits of an index, for ``row_tiles`` row tiles at a time. Synchronizes with the device."""
    if index.block < BLOCK:
        # Nothing here depends on positions, so tiles that become one need not follow each other there.
        index = merged(index, BLOCK)
    # Without the bits outside the lengths: a key that only these keep is kept by no query.
    index = index.trimmed()
    states = dense_states(index)
    # A last row tile without a second one is full if it is full itself.
    single, joined = (
        F.pad(states, (0, 0, 0, -index.n_rows % row_tiles), value=value).unflatten(1, (-1, row_tiles))
        for value in (EMPTY, FULL)
    )
    full = (joined == FULL).all(2)
    part = (single != EMPTY).any(2) & ~full
    return Tiles(
        _lists(part, full, index.group),
        _lists(part.mT, full.mT, index.group),
        bool(part.any()),
        index.group * single[0].numel(),
        index.group.new_full((1,), index.n_cols),
        single.flatten() - EMPTY,
        with_both(index.table.bits).flatten(),
        _kept(states, index.table.rows_any, index.group, index.n_queries),
        _kept(states.mT, index.table.cols_any, index.group, index.n_keys),
    )


def _lists(part: Tensor, full: Tensor, group: Tensor) -> Lists:
    """Return the lists of the tiles that are chosen, bool ``[G, R, C]``."""
    found = []
    for counts, numbers in (listed(part), listed(full)):
        numbers = numbers[..., : max(int(counts.max()), 1)]
        # Kernels expect a last stride of 1, which `contiguous` does not give a last dimension of 1.
        found += [x[group.long()].clone(memory_format=torch.contiguous_format) for x in (counts, numbers)]
    return Lists(*found)


def _kept(states: Tensor, words: Tensor, group: Tensor, length: int) -> Tensor | None:
    """Return which rows of the tiles ``[G, R, C]`` keep anything, by the words of each tile, or None if all do."""
    anything = unpack_words(with_both(words), BLOCK)
    kept = torch.zeros(*states.shape[:2], BLOCK, dtype=torch.bool, device=states.device)
    for col in states.unbind(2):
        kept |= anything[col.long() - EMPTY]
    kept = kept.flatten(1)[:, :length]
    return None if kept.all() else kept[group.long()]


@real_tensors()
def to_block_mask(index: BlockIndex) -> BlockMask:
    """Return FlexAttention's mask of the same pairs, for eager and compiled FlexAttention.

    Query a of the mask is the index's query at position ``start + a``. FlexAttention needs four lists of full width,
    int32 ``[B or 1, H or 1, rows, columns]``.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> to_block_mask(build_index(Causal(), 256)).sparsity()
    25.0
    """
    from torch.nn.attention.flex_attention import BlockMask

    table = dense_states(index)
    kept, full = _query_blocks(index, table)
    group = index.group.long()
    # Counts and columns of the blocks that keep some pairs, then of those that keep all.
    lists: list[Any] = [found[group] for chosen in (kept & ~full, full) for found in listed(chosen)]
    lengths = index.n_queries, index.n_keys
    options: Any = {"BLOCK_SIZE": index.block, "mask_mod": _mask_of(index, table), "seq_lengths": lengths}
    return BlockMask.from_kv_blocks(*lists, **options)


def _query_blocks(index: BlockIndex, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks, counted from the first query, that keep any pairs or all pairs: bool ``[G, rows, C]``."""
    rows = -(-index.n_queries // index.block)
    kept, full = table != EMPTY, table == FULL
    if index.start % index.block:
        # Such a block overlaps two of our row tiles. The last one may be in only one.
        pad = (0, 0, 0, rows + 1 - index.n_rows)
        kept = F.pad(kept, pad)
        full = F.pad(full, pad, value=True)
        kept, full = kept[:, :-1] | kept[:, 1:], full[:, :-1] & full[:, 1:]
    # No pairs beyond the lengths are kept, so ragged blocks are not full.
    full = full.clone()
    if index.n_queries % index.block:
        full[:, -1] = False
    if index.n_keys % index.block:
        full[:, :, -1] = False
    return kept, full


def _mask_of(index: BlockIndex, table: Tensor) -> MaskMod:
    block, group, bits = index.block, index.group, with_both(index.table.bits)
    shift = index.start - index.first_row * block
    last_query, last_key = index.n_queries - 1, index.n_keys - 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query, key = q_idx.clamp(max=last_query) + shift, kv_idx.clamp(max=last_key)
        by_head = group[b] if group.shape[0] > 1 else group[0]
        of_group = by_head[h] if group.shape[1] > 1 else by_head[0]
        state = table[of_group, query // block, key // block]
        word = bits[state - EMPTY, query % block, key % block // 32]
        return (word >> (key % block % 32)) & 1 == 1

    return mask_mod


@dataclass(frozen=True, repr=False, eq=False)
class FlexPattern(OfMask):
    """The pairs that compiled FlexAttention keeps. It equals only itself, because you cannot compare a ``mask_mod``."""

    mask_mod: MaskMod
    sides: tuple[int, int]
    """Number of queries and keys per tile, counted from the first query."""
    row: int = 0
    name = "block mask"

    def _states(self, like: Tensor) -> Tensor:
        return self.states.tensor[0].to(like.device)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shape = (head + query + key).shape
        head, query, key = (part.expand(shape).flatten() for part in (head, query - self.lengths[2], key))
        of_head = head if self.num_heads is not None else torch.zeros_like(head)
        state = self._states(query)[of_head, query // self.sides[0], key // self.sides[1]]
        marked = one_by_one(self.mask_mod, self.row, head, query, key)
        return ((state == FULL) | ((state == _PARTIAL) & marked)).view(shape)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        (high, wide), start = self.sides, self.lengths[2]
        first = (row * grid.block - start).clamp(min=0)
        last = ((row + 1) * grid.block - start).clamp(max=grid.n_queries) - 1
        top, bottom = first // high, last // high + 1
        left, right = col * grid.block // wide, (((col + 1) * grid.block).clamp(max=grid.n_keys) - 1) // wide + 1
        state = self._states(row)[0 if self.num_heads is None else head]
        count = []
        for value in (EMPTY, FULL):
            # Sums over all blocks above and to the left, so that a rectangle takes four look-ups.
            above = F.pad((state == value).long().cumsum(0).cumsum(1), (1, 0, 1, 0))
            count.append(above[bottom, right] - above[top, right] - above[bottom, left] + above[top, left])
        area = (bottom - top) * (right - left)
        classes = super().tile_class(head, row, col, grid)
        return torch.where(count[0] == area, 0, torch.where(count[1] == area, 1, classes))

    def head_class(self, head: int) -> Hashable:
        return None if self.num_heads is None else head

    def batch_row(self, batch: int) -> Pattern:
        if self.batch_size is None:
            return self
        return replace(self, states=Content(self.states.tensor[batch : batch + 1]), row=batch)


# Cache of imported masks. Key: the mask, and within it the start. Bound: one pattern per mask and start. Owner: the
# mask, by a weak reference. Patterns of a `mask_mod` equal only themselves, so the index cache needs the same one.
_imported: WeakKeyDictionary[BlockMask, dict[int, FlexPattern]] = WeakKeyDictionary()
_imported_lock = threading.Lock()


def from_block_mask(block_mask: BlockMask, *, start: int | None = None) -> Pattern:
    """Return the pattern of the pairs that compiled FlexAttention keeps under a mask.

    Full blocks keep every pair, partial blocks the pairs of ``mask_mod``, and other blocks no pairs. Query a of the
    mask is at position ``start + a``, by default ``n_keys - n_queries``. A batch or head dimension of 1 means any
    number. The same mask returns the same pattern, so the cache finds its index. The first build evaluates ``mask_mod``
    in partial blocks, as slowly as `Elements`. ringtile reads the lists and the rule once: a change in place, or of a
    tensor that the rule reads, needs a new mask.
    Raises ValueError if the mask's lists are not four-dimensional.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> index = build_index(Causal(), 300)
    >>> build_index(from_block_mask(to_block_mask(index)), 300).kept_pairs == index.kept_pairs
    True
    """
    if block_mask.kv_indices.dim() != 4:
        raise ValueError(f"block_mask: expected [B, H, rows, columns], got {block_mask.kv_indices.shape=}")
    n_queries, n_keys = block_mask.seq_lengths
    if start is None:
        start = n_keys - n_queries
    with _imported_lock:
        patterns = _imported.setdefault(block_mask, {})
        if start not in patterns:
            states, lengths = Content(_read_states(block_mask)), (n_queries, n_keys, start)
            patterns[start] = FlexPattern(states, lengths, block_mask.mask_mod, block_mask.BLOCK_SIZE)
        return patterns[start]


@real_tensors()
def _read_states(block_mask: BlockMask) -> Tensor:
    """Return the lists, of any width, as int8 ``[B, H, rows, columns]``."""
    n_cols = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    states = torch.full(
        (*block_mask.kv_num_blocks.shape, n_cols), EMPTY, dtype=torch.int8, device=block_mask.kv_indices.device
    )
    for value, count, indices in (
        (_PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices),
        (FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if count is None or indices is None:
            continue
        # Entries beyond the count are undefined.
        there = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
        batch, head, row, _ = place = there.nonzero(as_tuple=True)
        states[batch, head, row, indices[place].long()] = value
    return states
