"""Build the block index of a pattern, in time and memory proportional to the candidate tiles, and cache it."""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.covers import CANDIDATE_BYTES, MAX_BYTES, Budget, groups_of, shortened, strips
from ringtile.index.lists import Entries
from ringtile.index.schedule import is_capturing
from ringtile.index.tiles import BLOCKS as BLOCKS, EMPTY, FULL, TileCollector, chunks, evaluate_tiles, first_of
from ringtile.patterns import base
from ringtile.patterns.base import Dense, Pattern, TileGrid
from ringtile.patterns.blocks import reads_of
from ringtile.patterns.grammar import as_rule
from ringtile.patterns.private import outside_modes, outside_transforms
from ringtile.patterns.traced import outside_graphs

MAX_HEADS = 1 << 16
"""Largest number of heads of an index: heads are grouped one by one."""

_LENGTHS = 32
"""Number of lengths whose index is one object, for each index of whole tiles."""

_log = logging.getLogger("ringtile.index")


@contextmanager
def real_tensors() -> Iterator[None]:
    """Run outside inference, gradient, fake, tracing and functorch modes: an index outlives the call that built it."""
    with torch.inference_mode(False), torch.no_grad(), outside_transforms(), outside_modes():
        yield


def _tile_states(
    pattern: Pattern, head: int, number: Tensor, rows: Tensor, grid: TileGrid, collector: TileCollector
) -> Tensor:
    """Return `EMPTY`, `FULL` or a provisional tile number for each candidate of `strips`."""
    row, col = rows[number // grid.n_cols], number % grid.n_cols
    classes = pattern.tile_class(head, row, col, grid)
    state = torch.where(classes == 1, FULL, EMPTY)
    unsettled = classes > 1
    row, col, classes = row[unsettled], col[unsettled], classes[unsettled]
    if len(row) == 0:
        return state
    distinct, inverse = torch.unique(classes, return_inverse=True)
    end = grid.start + grid.n_queries
    sides = (grid.start, row == grid.first_row), (end, row == end // grid.block), (grid.n_keys, col == grid.n_cols - 1)
    # Tiles that the lengths cut in different ways differ.
    if ragged := [cut.long() << bit for bit, (edge, cut) in enumerate(sides) if edge % grid.block]:
        distinct, inverse = torch.unique(inverse * 8 + sum(ragged), return_inverse=True)
    first = first_of(inverse, len(distinct))
    head_number = row.new_full((), head)
    states = [
        collector.add(evaluate_tiles(pattern, head_number, row[part], col[part], grid))
        for part in chunks(first, grid.block)
    ]
    state[unsettled] = torch.cat(states)[inverse]
    return state


@real_tensors()
def _build(
    pattern: Pattern,
    lengths: TileGrid,
    heads: int,
    batch: int,
    max_bytes: int,
    device: torch.device,
    rows: Tensor | None = None,
    own: TileGrid | None = None,
) -> BlockIndex:
    """Build the index of all row tiles, or of ``rows``, whose own lengths are ``own``."""
    # A rule that is defined for all positions fills whole tiles.
    grid, own = (x.whole if pattern.unbounded else x for x in (lengths, own or lengths))
    pattern.validate(lengths)
    budget = Budget(max_bytes, lengths)
    # Even an index without tiles has a begin for each row and column.
    budget.check(pattern, (grid.n_rows if rows is None else len(rows)) + grid.n_cols, CANDIDATE_BYTES)
    if rows is None:
        rows = torch.arange(grid.first_row, grid.first_row + grid.n_rows, device=device)
    table, members = groups_of(pattern, heads, batch)
    collector = TileCollector(grid.block, rows.device, budget.max_bytes)
    numbers = [rows[:0]]
    states = [numbers[0]]
    for group, (member, head) in enumerate(members if len(rows) and grid.n_cols else ()):
        for number in strips(member, head, rows, grid, budget):
            state = _tile_states(member, head, number, rows, grid, collector)
            kept = state != EMPTY
            numbers.append(number[kept].add_(group * len(rows) * grid.n_cols))
            states.append(state[kept])
    bits, translate = collector.finish()
    state = torch.cat(states)
    partial = state >= 0
    state[partial] = translate[state[partial]]
    return BlockIndex.from_entries(
        torch.tensor(table, dtype=torch.int32, device=rows.device),
        Entries(torch.cat(numbers), state),
        bits,
        own,
        tuple(members[numbers_of_row[0]][0].envelope() for numbers_of_row in table),
    )


@real_tensors()
def build_rows(
    pattern: Pattern,
    rows: Tensor,
    n_tokens: int,
    *,
    num_heads: int = 1,
    batch: int = 1,
    block: int = 128,
    max_bytes: int = MAX_BYTES,
) -> BlockIndex:
    """Build the index of some row tiles of ``n_tokens`` tokens over all column tiles, without the other rows.

    ``rows`` are ascending numbers of tiles, int64. The queries of a call are the tokens of these tiles. The index is
    not cached. Raises ValueError as `build_index` does.

    >>> from ringtile.patterns import Causal
    >>> index = build_rows(Causal(), torch.tensor([0, 3]), 500)
    >>> print(index.draw())
    ▒···
    ███▒
    >>> index.n_queries, index.rows.at.tolist()
    (244, [0, 3])
    """
    lengths = TileGrid(block, 0, n_tokens, n_tokens)
    # 300 tokens in tiles of 128: rows 0 and 2 are 128 + 44 queries, because the last tile ends at token 300.
    cut = -n_tokens % block if rows[-1:].tolist() == [lengths.n_rows - 1] else 0
    own = TileGrid(block, 0, len(rows) * block - cut, n_tokens)
    index = _build(pattern, lengths, num_heads, batch, max_bytes, rows.device, rows, own)
    # The pairs that causal and document rules allow are not counted for rows apart.
    envelopes = (Dense(),) * len(index.envelopes)
    return replace(index, grid=own, envelopes=envelopes, rows=index.rows._replace(at=rows.int()))


class CacheInfo(NamedTuple):
    """Counts of the index cache, and sizes in bytes."""

    hits: int
    misses: int
    entries: int
    nbytes: int
    limit: int


class _IndexCache:
    """Least recently used indices, limited in bytes."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        # The same tensors with the last lengths, the oldest first.
        self._entries: OrderedDict[Hashable, dict[TileGrid, BlockIndex]] = OrderedDict()
        self._captured: dict[int, BlockIndex] = {}
        self._hits = self._misses = self._nbytes = 0
        self._limit = limit

    def get(self, key: Hashable, lengths: TileGrid, capturing: bool) -> BlockIndex | None:
        """Return the index of a key. ``capturing`` keeps it until `clear`: a CUDA graph will read its memory."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            index = self._at(entry, lengths)
            if capturing:
                self._captured[id(index.group)] = index
            return index

    def put(self, key: Hashable, lengths: TileGrid, index: BlockIndex) -> BlockIndex:
        """Store an index and return the one to use: another thread's, if that was first."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = {index.grid: index}
                self._nbytes += index.nbytes
                self._evict()
            return self._at(entry, lengths)

    def _at(self, entry: dict[TileGrid, BlockIndex], lengths: TileGrid) -> BlockIndex:
        """Return the index of an entry with some lengths, always the same object, so that callers can compare it."""
        found = entry.get(lengths)
        if found is None:
            found = next(iter(entry.values())).at(lengths)
            if len(entry) == _LENGTHS:
                del entry[next(iter(entry))]
            entry[lengths] = found
        return found

    def _evict(self) -> None:
        while self._nbytes > self._limit:
            self._nbytes -= next(iter(self._entries.popitem(last=False)[1].values())).nbytes

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self._nbytes, self._limit)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._captured.clear()
            self._hits = self._misses = self._nbytes = 0

    def resize(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._evict()


# Cache of indices. Key: the pattern, the data that its functions read, the grid of tiles, the heads, the batch and the
# device, which are all that an index depends on. Each entry has the last 32 lengths in its tiles. Bound: 256 MiB, least
# recently used first, except what a CUDA graph reads. Owner: the process, until `clear_cache`. A lock guards every
# access, and builds run outside.
_cache = _IndexCache(256 << 20)


def cache_info() -> CacheInfo:
    """Return hits, misses, entries, bytes and byte limit of the index cache.

    >>> from ringtile.patterns import Causal
    >>> before = cache_info().hits
    >>> build_index(Causal(), 64) is build_index(Causal(), 64), cache_info().hits > before
    (True, True)
    """
    return _cache.info()


def clear_cache() -> None:
    """Drop every cached index and reset the counts. Do not replay CUDA graphs that you captured before."""
    _cache.clear()


def _checked_count(name: str, value: object, minimum: int, maximum: float = math.inf) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        limits = f"of at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum:,}"
        raise ValueError(f"{name}: expected an integer {limits}, got {value!r}")


def set_cache_limit(limit: int) -> None:
    """Set the byte limit of all cached indices. 0 disables the cache. Raises ValueError if it is negative."""
    _checked_count("limit", limit, 0)
    _cache.resize(limit)


@outside_graphs
def build_index(
    pattern: Pattern,
    n_queries: int,
    n_keys: int | None = None,
    *,
    start: int | None = None,
    num_heads: int = 1,
    batch: int = 1,
    block: int | Literal["auto"] = 128,
    device: torch.device | str | None = None,
    max_bytes: int = MAX_BYTES,
) -> BlockIndex:
    """Build the block index of a pattern, or take it from the cache.

    Args:
        pattern: Which pairs to keep.
        n_queries: Number of queries. The first is at position ``start``.
        n_keys: Number of keys. Default: ``n_queries``.
        start: Position of the first query. Default: ``n_keys - n_queries``.
        num_heads: Number of query heads. A pattern defined per head must match.
        batch: Number of batch elements. A pattern defined per batch element must match.
        block: Tile side in tokens: 16, 32, 64 or 128. "auto" picks 64 if it computes over 1.3x less than 128.
        device: Device of the index. Default: the CPU.
        max_bytes: Memory limit of the build, checked before it allocates.

    Raises ValueError if an argument is out of range, the pattern does not support these lengths, heads or batch
    elements, or the build would exceed ``max_bytes``.

    >>> from ringtile.patterns import Causal, Window
    >>> index = build_index(Causal() & Window(4096, 0), 1_048_576)
    >>> index.kept_tiles, round(index.density, 4), index.nbytes < 4 * 2**20
    (269808, 0.0078, True)
    """
    pattern = as_rule(pattern)
    _checked_count("n_queries", n_queries, 0)
    if n_keys is None:
        n_keys = n_queries
    _checked_count("n_keys", n_keys, 0)
    if start is None:
        start = n_keys - n_queries
    elif type(start) is not int:
        raise ValueError(f"start: expected an integer, got {start!r}")
    _checked_count("num_heads", num_heads, 1, MAX_HEADS)
    _checked_count("batch", batch, 1)
    _checked_count("max_bytes", max_bytes, 1)
    check_counts(pattern, num_heads, batch)
    if block == "auto":
        build = partial(build_index, pattern, n_queries, n_keys, start=start, num_heads=num_heads, batch=batch)
        coarse, fine = (build(block=side, device=device, max_bytes=max_bytes) for side in (128, 64))
        ratio = 4 * coarse.kept_tiles / max(fine.kept_tiles, 1)
        chosen = fine if ratio > 1.3 else coarse
        _log.info("block %d for %s: 64 computes %.2fx fewer pairs than 128", chosen.block, shortened(pattern), ratio)
        return chosen
    if type(block) is not int or block not in BLOCKS:
        raise ValueError(f"block: expected one of {BLOCKS} or 'auto', got {block!r}")
    device = torch.device("cpu") if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    lengths = TileGrid(block, start, n_queries, n_keys)
    # A rule that is defined for all positions fills whole tiles. They serve all lengths that touch the same tiles.
    grid = lengths.whole if pattern.unbounded else lengths
    reads: Hashable = None
    # A pattern with a text has no function that reads data.
    if pattern.text is None:
        with real_tensors():
            reads = reads_of(pattern, device)
    key = (pattern, reads, grid, num_heads, batch, device)
    index = _cache.get(key, lengths, is_capturing(device))
    if index is None:
        index = _cache.put(key, lengths, _build(pattern, lengths, num_heads, batch, max_bytes, device))
    return index


# `Pattern.density` and its like are below indices, and build one through this hook.
base.index_builder = build_index


def check_counts(pattern: Pattern, num_heads: int, batch: int) -> None:
    """Raise ValueError if a pattern is written for other numbers of heads or batch elements."""
    for name, count, expected in (("num_heads", num_heads, pattern.num_heads), ("batch", batch, pattern.batch_size)):
        if expected is not None and count != expected:
            raise ValueError(f"{name}: {shortened(pattern)} is written for {expected}, got {name}={count}")
