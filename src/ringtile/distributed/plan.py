"""Who needs which keys of whom, and what each rank computes: pure functions on the host, without communication."""

import ctypes
import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.layout import (
    Copies,
    Layout,
    Run,
    copies,
    count_tokens,
    intervals,
    joined,
    overlaps,
    placed,
    with_starts,
)
from ringtile.index import BlockIndex, build_index, build_rows, needed
from ringtile.index.covers import MAX_BYTES
from ringtile.index.tiles import pack_words
from ringtile.patterns import Causal, Dense, Pattern
from ringtile.patterns.base import TileGrid
from ringtile.patterns.blocks import reads_of
from ringtile.patterns.grammar import as_rule

Transport = Literal["exchange", "gather", "ring", "hierarchy", "ulysses"]
TRANSPORTS: tuple[Transport, ...] = ("exchange", "gather", "ring", "hierarchy", "ulysses")


def fits_ring(pattern: Pattern) -> bool:
    """Return True if the keys of a pattern can pass around a ring."""
    return isinstance(pattern, Causal | Dense)


MAX_PIECES = 8
"""If rows with and without remote keys alternate more often than this, all rows read the buffer."""

Source = Literal["own", "hot", "all"]
"""Where a call reads keys: the rank's own where they lie, or a part of the buffer. The part "hot" has own and broadcast
keys, so its rows need not wait for others."""

_SOURCES: tuple[Source, ...] = ("own", "hot", "all")

_HOT_RANKS = 3
"""Tiles that at least so many other ranks need, and more than half of all ranks, are broadcast."""

_ELEMENTS = 1 << 20
"""Elements of a temporary tensor while messages are counted."""

_RUNS = 256
"""Largest number of runs of a rank that begin or end inside a tile. Each is a call of its own."""


@dataclass(eq=False)
class Piece:
    """Consecutive tokens of a rank that one call computes."""

    begin: int
    """First token, counted in the rank's own tokens."""
    end: int
    source: Source
    index: BlockIndex


@dataclass(eq=False)
class RingPlan:
    """The exchange and the calls of one rank. Every rank makes the plan of the same pattern, layout and heads.

    Keys travel in ascending order of their positions. The buffer of a rank has two parts. The first holds the keys of
    other ranks that its rows need, and the own ones that the same rows need. The second holds the broadcast keys, and
    the own ones of rows that need no others.
    """

    pattern: Pattern
    layout: Layout
    rank: int
    block: int
    needs: Tensor
    """bool ``[P, C]``: the column tiles that each rank needs, its own included."""
    is_hot: Tensor
    """bool ``[C]``: the column tiles that are broadcast."""
    pieces: tuple[Piece, ...]
    """The calls, in the order of the tokens."""
    own: Copies
    """Own tokens that are copied into the buffer."""
    hot: tuple[tuple[Run, ...], ...]
    """For each rank the runs of its own tokens that it broadcasts, because most ranks need them."""
    hot_copies: tuple[Copies, ...]
    """For each other rank the tokens of its broadcast that are copied into the buffer."""
    sent: tuple[tuple[Run, ...], ...]
    """For each rank the runs of own tokens that it gets."""
    received: tuple[tuple[Run, ...], ...]
    """For each rank the runs of the buffer that it fills."""
    buffer: tuple[tuple[Run, ...], tuple[Run, ...]]
    """The runs of positions that each part of the buffer holds, one after another."""
    most_sent: int
    """The most tokens that a rank sends to others, broadcasts counted once."""
    is_gathered: bool
    """True if every rank gets all keys."""
    is_mixed: bool
    """True if any rank sends tokens to another that are not broadcast."""
    relays: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    """The stages of a hierarchy, by the number of ranks per node: `make_relays` fills it."""
    _moved: dict[torch.device, tuple[Piece, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of this rank."""
        return self.layout.size(self.rank)

    def pieces_on(self, device: torch.device) -> tuple[Piece, ...]:
        """Return the pieces with their indices on a device. They are moved once."""
        if device.type == "cpu":
            return self.pieces
        if device not in self._moved:
            self._moved[device] = tuple(replace(piece, index=piece.index.to(device)) for piece in self.pieces)
        return self._moved[device]

    @cached_property
    def n_buffer(self) -> int:
        """Number of tokens of the buffer."""
        return sum(map(count_tokens, self.buffer))

    def part(self, source: Source) -> slice:
        """Return the places of a part of the buffer."""
        first = count_tokens(self.buffer[0])
        return slice(first) if source == "all" else slice(first, None)

    @cached_property
    def tokens_hot(self) -> tuple[int, ...]:
        """Number of tokens that each rank broadcasts."""
        return tuple(map(count_tokens, self.hot))

    @cached_property
    def tokens_sent(self) -> tuple[int, ...]:
        """Number of tokens that each rank gets from this one."""
        return tuple(map(count_tokens, self.sent))

    @cached_property
    def tokens_received(self) -> tuple[int, ...]:
        """Number of tokens that this rank gets from each other."""
        return tuple(map(count_tokens, self.received))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the pattern's text, the layout, the needs and the messages of all ranks: equal at all ranks."""
        digest = hashlib.sha256(repr((self.pattern.text, self.layout, self.block)).encode())
        words = pack_words(torch.nn.functional.pad(self.needs, (0, -self.needs.shape[1] % 32))).contiguous()
        _, sent = count_sent(self.layout, self.needs, self.is_hot, self.block)
        # This rank's messages as it would send and receive them: a rank that expects other tokens than come reads
        # memory that no rank has written.
        sent[self.rank], sent[:, self.rank] = sent.new_tensor(self.tokens_sent), sent.new_tensor(self.tokens_received)
        for x in (words, torch.cat([sent, sent.new_tensor(self.tokens_hot).unsqueeze(0)])):
            digest.update(ctypes.string_at(x.data_ptr(), x.nbytes))
        return digest.hexdigest()[:16]


def make_plan(
    pattern: Pattern | None,
    layout: Layout,
    rank: int,
    *,
    num_heads: int = 1,
    batch: int = 1,
    block: int = 128,
    gather: bool | None = False,
    max_bytes: int = MAX_BYTES,
) -> RingPlan:
    """Plan one rank's part of attention over all tokens of a layout. Plans are cached.

    Args:
        pattern: Which pairs to keep, by position. None, for a ``gather``, plans no calls: the buffer holds all keys in
            order.
        layout: Which tokens each rank holds.
        rank: The rank, counted in the layout.
        num_heads: Number of query heads.
        batch: Number of batch elements. A pattern defined per batch element must match.
        block: Tile side in tokens.
        gather: Give every rank all keys, each rank's in one broadcast. None: if a rank would otherwise send more tokens
            than there are.
        max_bytes: Memory limit of each index, checked before it allocates.

    Raises ValueError if an argument is out of range, the pattern does not support these tokens, heads or batch
    elements, or the plan would exceed ``max_bytes``.

    >>> from ringtile.patterns import Causal, Window
    >>> plan = make_plan(Causal() & Window(300, 0), Layout.contiguous(2048, 4), 1)
    >>> plan.received, plan.sent
    ((((0, 384),), (), (), ()), ((), (), ((128, 512),), ()))
    >>> tuple((piece.begin, piece.end, piece.source) for piece in plan.pieces)
    ((0, 384, 'all'), (384, 512, 'own'))
    """
    if pattern is not None or not gather:
        pattern = as_rule(pattern)
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: expected a Layout, got {type(layout).__name__}")
    if type(rank) is not int or not 0 <= rank < layout.n_ranks:
        raise ValueError(f"rank: expected an integer from 0 to {layout.n_ranks - 1}, got {rank!r}")
    grid = TileGrid(block, 0, layout.n_tokens, layout.n_tokens)
    reads = None if pattern is None else reads_of(pattern)
    sizes = {"num_heads": num_heads, "batch": batch, "max_bytes": max_bytes}
    return _make_plan(pattern, reads, layout, grid, rank, gather, **sizes)


# Cache. Key: the pattern by its content, the data that its functions read, the layout, the rank and the sizes. Bound:
# 64 plans, the last that were used. Owner: this module.
@lru_cache(64)
def _make_plan(
    pattern: Pattern | None,
    reads: Hashable,
    layout: Layout,
    grid: TileGrid,
    rank: int,
    gather: bool | None,
    **sizes: Any,
) -> RingPlan:
    rule, block = Dense() if pattern is None else pattern, grid.block
    rule.validate(grid)
    demand = demand_of(None, layout, grid) if gather else find_demand(rule, layout, grid, **sizes)
    if gather is None and (gather := is_better_gathered(demand.most_sent, layout)):
        demand = demand_of(None, layout, grid)
    needs, holds, is_hot, most_sent, is_mixed = demand
    pieces, cols = list[Piece](), [needs[rank], torch.zeros_like(is_hot)]
    if pattern is not None and is_cut(layout, rank, block):
        # Each run is a piece, and the second part of the buffer is empty.
        for (begin, end), at in with_starts(layout.runs[rank]):
            index = build_index(pattern, end - begin, layout.n_tokens, start=begin, block=block, **sizes)
            index = index.remapped(torch.arange(index.n_rows, device="cpu"), needs[rank].nonzero().flatten())
            pieces.append(Piece(at, at + end - begin, "all", index))
    elif pattern is not None:
        index = build_rows(pattern, holds[rank].nonzero().flatten(), layout.n_tokens, block=block, **sizes)
        pieces, cols = _pieces(index, needs[rank], is_hot)
    places = [with_starts(held) for held in layout.runs]
    buffer = [intervals(part, grid) for part in cols]
    # Both parts of the buffer can hold a position. The second follows the first: after 384 tokens, it begins at 384.
    first = with_starts(buffer[0])
    second = [(run, place + count_tokens(buffer[0])) for run, place in with_starts(buffer[1])]

    def into_buffer(source: list[tuple[Run, int]]) -> Copies:
        return joined([copies(source, first), copies(source, second)])

    hot_runs, cold_runs = intervals(is_hot, grid), intervals(~is_hot, grid)
    hot = tuple(placed(hot_runs, held) for held in places)
    # Own tokens do not travel: the copies, and the messages to and from this rank, are empty.
    others = [() if other == rank else held for other, held in enumerate(layout.runs)]
    hot_copies = tuple(into_buffer(with_starts(overlaps(hot_runs, held))) for held in others)
    received = tuple(placed(overlaps(cold_runs, held), first) for held in others)
    cold_needs = [intervals(needed & ~is_hot, grid) for needed in needs]
    sent = tuple(placed(runs if other != rank else (), places[rank]) for other, runs in enumerate(cold_needs))
    calls = rule, layout, rank, block, needs, is_hot, tuple(pieces)
    messages = into_buffer(places[rank]), hot, hot_copies, sent, received
    parts = tuple(buffer[0]), tuple(buffer[1])
    return RingPlan(*calls, *messages, parts, most_sent, bool(gather), is_mixed)


def is_better_gathered(most_sent: int, layout: Layout) -> bool:
    """Return True if a rank would send more tokens than there are, so that a gather is the better exchange."""
    return most_sent > layout.n_tokens


class Demand(NamedTuple):
    """The column tiles that ranks need of others."""

    needs: Tensor
    """bool ``[P, C]``: the column tiles that each rank needs, its own included."""
    holds: Tensor
    """bool ``[P, C]``: the column tiles that each rank holds tokens of."""
    is_hot: Tensor
    """bool ``[C]``: the column tiles to broadcast."""
    most_sent: int
    """The most tokens that a rank sends to others, broadcasts counted once."""
    is_mixed: bool
    """True if any rank sends tokens to another that are not broadcast."""


def find_demand(pattern: Pattern, layout: Layout, grid: TileGrid, **sizes: int) -> Demand:
    """Return the column tiles that each rank needs and sends, from the covers of the pattern, as `needed` does."""
    rows, parts, _ = layout.tiles(grid.block)
    return demand_of(needed(pattern, rows, parts, layout.n_ranks, grid, **sizes), layout, grid)


def demand_of(needs: Tensor | None, layout: Layout, grid: TileGrid) -> Demand:
    """Return the demand of ranks that need these column tiles, bool ``[P, C]``, or all of them."""
    rows, parts, tokens = layout.tiles(grid.block)
    holds = torch.zeros(layout.n_ranks, grid.n_cols, dtype=torch.bool, device="cpu")
    holds[parts, rows] = True
    # The matrices can have millions of elements, and the list of holders is short.
    holder, held = parts, rows
    if len(rows) > grid.n_rows:
        # One number per pair, so that a tile of several runs counts once: of 16 tiles, tile 3 of rank 2 is 35.
        pairs = torch.unique(parts * grid.n_cols + rows)
        holder, held = pairs // grid.n_cols, pairs % grid.n_cols
    n_holders = torch.bincount(held, minlength=grid.n_cols)
    if needs is None:
        needs, asked = torch.ones_like(holds), layout.n_ranks - n_holders
        is_hot = asked > 0
    else:
        asked = (needs & ~holds).sum(0, dtype=torch.int32).long()
        # No more tiles than one rank holds on average: a broadcast also reaches ranks that do not need its tile.
        order = torch.argsort(asked, descending=True, stable=True)[: len(asked) // layout.n_ranks]
        is_hot = torch.zeros_like(asked, dtype=torch.bool)
        is_hot[order] = (asked[order] >= _HOT_RANKS) & (2 * asked[order] > layout.n_ranks)
    # For example, ranks 0 and 1 hold parts of a tile, and all four ranks need it: 2 ask for all of it, and 2 use it and
    # have a part. Each holder sends its tokens to 3 = 2 + 2 - 1 others, itself not counted.
    used = torch.bincount(held[needs[holder, held]], minlength=grid.n_cols)
    # A broadcast counts once, whatever number of ranks it reaches.
    times = ((asked + used)[rows] - needs[parts, rows].long()).where(~is_hot[rows], 1)
    sent = tokens.new_zeros(layout.n_ranks).index_add_(0, parts, times * tokens)
    # A tile that a rank holds a part of can lack the tokens of others.
    lacks = (asked > 0) | ((used > 0) & (n_holders > 1))
    return Demand(needs, holds, is_hot, int(sent.max()), bool((lacks & ~is_hot).any()))


def count_sent(layout: Layout, needs: Tensor, is_hot: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that each rank broadcasts, int64 ``[P]``, and sends to each other rank, int64 ``[P, P]``."""
    return count_hot(layout, is_hot, block), count_cold(layout, needs, is_hot, block).fill_diagonal_(0)


def count_hot(layout: Layout, is_hot: Tensor, block: int) -> Tensor:
    """Return the tokens that each rank broadcasts, int64 ``[P]``."""
    tiles, ranks, tokens = layout.tiles(block)
    return tokens.new_zeros(layout.n_ranks).index_add_(0, ranks, tokens * is_hot[tiles])


def count_cold(layout: Layout, needs: Tensor, is_hot: Tensor, block: int) -> Tensor:
    """Return the tokens of each rank that each row of ``needs`` ``[K, C]`` needs without broadcast, ``[P, K]``."""
    tiles, ranks, tokens = layout.tiles(block)
    found = tokens.new_zeros(layout.n_ranks, len(needs))
    # In chunks: the matrix of all held tiles and all rows has too many elements.
    for some in (~is_hot[tiles]).nonzero().flatten().split(max(1, _ELEMENTS // len(needs))):
        found.index_add_(0, ranks[some], needs.T[tiles[some]] * tokens[some].unsqueeze(1))
    return found


def is_cut(layout: Layout, rank: int, block: int) -> bool:
    """Return True if a run of a rank begins or ends inside a tile. Raise ValueError if too many of them do."""
    runs, n_tokens = layout.runs[rank], layout.n_tokens
    # A run of 700 tokens that ends at 700 of 700 cuts no tile: the last one is shorter.
    inside = sum(begin % block > 0 or (end % block > 0 and end != n_tokens) for begin, end in runs)
    if inside > _RUNS:
        raise ValueError(
            f"layout: expected at most {_RUNS} runs that begin or end inside a tile of {block}, got {inside} at rank "
            f"{rank}. Each is a call of its own"
        )
    return inside > 0


def _pieces(index: BlockIndex, needs: Tensor, is_hot: Tensor) -> tuple[list[Piece], list[Tensor]]:
    """Cut a rank's row tiles into runs with one source. Return them and the columns of the buffer's parts, bool."""
    # There can be a million tiles, so the integers are short. A slot is a head and a row: with 6 rows, row 2 of head 1
    # is slot 8.
    slot, col = (x.int() for x in index.slot_and_col(index.entries().number))
    row = slot.remainder_(max(index.n_rows, 1))
    is_remote = torch.ones_like(is_hot)
    is_remote[index.rows.at.long()] = False
    # 0 for rows that need own keys only, 1 if some are broadcast, 2 if others travel, too.
    source = torch.zeros(index.n_rows, dtype=torch.uint8, device="cpu")
    source[row[is_remote[col]]] = 1
    source[row[(is_remote & ~is_hot)[col]]] = 2
    # Sources [0, 0, 1, 2, 2] are three pieces, between the bounds [0, 2, 3, 5]. If they are too many, rows with
    # broadcast keys wait for all keys, and if they are still too many, all rows do.
    for merged in (1, 0):
        bounds = [0, *(source.diff().nonzero().flatten() + 1).tolist(), index.n_rows]
        if len(bounds) - 1 <= MAX_PIECES:
            break
        source[source >= merged] = 2
    else:
        bounds = [0, index.n_rows]
    in_parts = [needs & is_remote & ~is_hot, torch.zeros_like(is_hot)]
    for part, number in zip(in_parts, (2, 1), strict=True):
        part[col[(source == number)[row]]] = True
    columns = index.rows.at.long(), in_parts[1].nonzero().flatten(), in_parts[0].nonzero().flatten()
    pieces: list[Piece] = []
    for first, last in pairwise(bounds):
        if first == last:
            continue
        number = int(source[first])
        mine = index.remapped(torch.arange(first, last, device="cpu"), columns[number])
        begin = first * index.block
        pieces.append(Piece(begin, begin + mine.n_queries, _SOURCES[number], mine))
    return pieces, in_parts
