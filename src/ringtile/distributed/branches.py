"""Who needs which dilated tokens of whom in LongNet, and the dense problems of each rank: pure functions on the host.

Tokens are counted per key head: an *item* is the key and the value of one head and one token, number
``head * tokens + token``. A rank needs the items of a branch at its head's offset, in the segments that its tokens lie
in, and under a causal rule none behind its last query. If all of them lie in one run of its own tokens, a problem reads
them there. Otherwise it reads a buffer, which has each item once, whatever number of branches need it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.layout import Copies, Layout, Run, with_starts
from ringtile.distributed.plan import Source
from ringtile.index.covers import MAX_BYTES

_CELLS = 1 << 22
"""Largest number of runs of tokens inside a segment, over all ranks, times offsets."""
_BYTES_PER_ITEM = 32
"""Memory of a plan per token and key head of the segments that ranks share."""


class Shape(NamedTuple):
    """A branch as the plan sees it."""

    length: int
    dilation: int
    is_trimmed: bool
    """True if no query keeps keys behind it."""


@dataclass(eq=False)
class Piece:
    """Segments and heads of a branch that form dense problems of ``n_queries`` by ``n_keys`` tokens."""

    branch: int
    length: int
    dilation: int
    heads: tuple[int, ...]
    key_heads: tuple[tuple[int, int], ...]
    """Key head and offset of each head of keys."""
    segments: Tensor
    """Number of each segment, int64 ``[S]``."""
    bases: Tensor
    """Number that the first token of each segment has or would have among the rank's own, int64 ``[S]``."""
    first: int
    """Place of the first query in its segment."""
    n_queries: int
    n_keys: int
    is_local: bool
    """True if the keys are read where they lie, False if they are read from the buffer."""

    def rows(self, n_tokens: int) -> Tensor:
        """Return the number ``head * n_tokens + token`` of each query, one segment after another, int64."""
        heads = self.bases.new_tensor(self.heads)
        first = self.first * self.dilation
        return _numbers(self.bases, heads * n_tokens, heads % self.dilation + first, self.n_queries, self.dilation)

    def keys(self, n_tokens: int, plan: "BranchPlan") -> Tensor:
        """Return the number of each key among the rank's own items, of ``n_tokens`` per head, or its buffer's place."""
        head, offset = self.bases.new_tensor(self.key_heads).unbind(1)
        if self.is_local:
            return _numbers(self.bases, head * n_tokens, offset, self.n_keys, self.dilation)
        head = head * plan.layout.n_tokens
        wanted = _numbers(self.segments * self.length, head, offset, self.n_keys, self.dilation)
        return plan.places[torch.searchsorted(plan.items, wanted)]


def _numbers(segments: Tensor, heads: Tensor, offsets: Tensor, count: int, dilation: int) -> Tensor:
    places = torch.arange(count, device=segments.device) * dilation
    return (segments[:, None, None] + (heads + offsets)[:, None] + places).flatten()


@dataclass(eq=False)
class BranchPlan:
    """The exchange and the dense problems of one rank. It counts items as `RingPlan` counts tokens.

    Items for one rank travel in ascending order, and follow the own ones in the buffer, rank by rank. They are never
    broadcast: ranks that share a segment send about equally many.
    """

    layout: Layout
    rank: int
    n_tokens: int
    """Number of items of this rank."""
    fingerprint: str
    """Hash of everything that the needs follow from: equal at all ranks."""
    pieces: tuple[Piece, ...]
    """The dense problems, those on the rank's own keys first."""
    items: Tensor
    """The number ``head * layout.n_tokens + position`` of each item of the buffer, ascending."""
    places: Tensor
    """The place of each of these items in the buffer."""
    own: Copies
    sent: tuple[Tensor, ...]
    received: tuple[tuple[Run, ...], ...]
    is_mixed: bool
    """True if any rank reads keys outside one run of its own tokens."""

    @property
    def n_buffer(self) -> int:
        """Number of items of the buffer."""
        return len(self.items)

    def part(self, source: Source) -> slice:
        """Return the places of a part of the buffer. The part "hot" is empty."""
        return slice(self.n_buffer) if source == "all" else slice(self.n_buffer, None)

    # No item is broadcast.
    hot = hot_copies = tokens_hot = ()


class _Runs(NamedTuple):
    """All runs of a layout, in the order of positions."""

    begin: Tensor
    end: Tensor
    rank: Tensor
    place: Tensor
    """Number of the first token among its rank's own."""


class _Cells(NamedTuple):
    """Runs cut by the segments of a branch: the tokens of a run in a segment. Tensors ``[C]`` and ``[C, offsets]``."""

    rank: Tensor
    segment: Tensor
    base: Tensor
    """Number that the segment's first token has or would have among the rank's own."""
    first: Tensor
    """Place of the first query of an offset."""
    n_queries: Tensor
    n_keys: Tensor
    is_far: Tensor
    """True if the keys do not all lie in the run."""

    def where(self, chosen: Tensor) -> "_Cells":
        return _Cells(*(x[chosen] for x in self))


def _cells(runs: _Runs, shape: Shape, n_tokens: int, n_offsets: int, rank: int) -> _Cells:
    """Return the cells of a rank, and those of the others in segments that ranks share.

    Two ranks share 12 tokens, 0 to 4 and 5 to 11, and the segments of 8 tokens are dilated by 3. For rank 1 the cells
    are (rank 0, tokens 0 to 4), (rank 1, 5 to 7) and (rank 1, 8 to 11). Offset 1 of segment 0 has the tokens 1, 4, 7.
    Rank 0 holds two of them, so the second cell has ``first`` 2 and ``n_queries`` 1. Its 3 keys begin at token 1,
    before its run, so they are far.
    """
    length, dilation, is_trimmed = shape
    # Run i meets count[i] segments: repeat it so often, and number its segments from the one that it begins in.
    count = (runs.end - 1) // length - runs.begin // length + 1
    if (cells := int(count.sum()) * n_offsets) > _CELLS:
        raise ValueError(
            f"layout: expected at most {_CELLS:,} runs of tokens in segments and offsets, got {cells:,} for the "
            f"branch ({length}, {dilation}). Use longer runs or segments"
        )
    run = torch.repeat_interleave(count)
    begin, end, owner, place = (x[run] for x in runs)
    segment = begin // length + torch.arange(len(run), device="cpu") - (count.cumsum(0) - count)[run]
    origin = segment * length
    # A segment that lies inside a run of another rank is of no interest to this one.
    kept = (owner == rank) | (begin > origin) | (end < (origin + length).clamp(max=n_tokens))
    begin, end, owner, place, segment, origin = (x[kept] for x in (begin, end, owner, place, segment, origin))
    offsets = torch.arange(n_offsets, device="cpu")

    def places_before(position: Tensor) -> Tensor:
        # Tokens origin + offset + dilation * place below the position: with offset 1 and dilation 3, below 5 there are
        # (5 - 0 - 1 + 2) // 3 = 2 of them, 1 and 4.
        return ((position - origin).unsqueeze(1) - offsets + dilation - 1) // dilation

    first = places_before(torch.maximum(begin, origin))
    last = places_before(torch.minimum(end, origin + length))
    n_keys = last if is_trimmed else places_before((origin + length).clamp(max=n_tokens))
    lowest = origin.unsqueeze(1) + offsets
    is_far = (begin.unsqueeze(1) > lowest) | (lowest + (n_keys - 1) * dilation >= end.unsqueeze(1))
    n_queries = last - first
    return _Cells(owner, segment, place + origin - begin, first, n_queries, n_keys, is_far & (n_queries > 0))


@lru_cache(64)
def make_branch_plan(
    shapes: tuple[Shape, ...],
    layout: Layout,
    rank: int,
    num_heads: int,
    num_kv_heads: int,
    by_offset: bool,
    device: torch.device | str = "cpu",
) -> BranchPlan:
    """Plan one rank's part of LongNet, cached. ``by_offset``: problems have heads of one offset, as key masks need."""
    every = sorted((*run, owner, place) for owner, held in enumerate(layout.runs) for run, place in with_starts(held))
    runs, n_tokens, size = (
        _Runs(*torch.tensor(every, dtype=torch.int64, device="cpu").T.contiguous()),
        layout.n_tokens,
        layout.size(rank),
    )
    n_offsets = [min(shape.dilation, shape.length, num_heads) for shape in shapes]
    readers = [_readers(*each, num_heads, num_kv_heads) for each in zip(shapes, n_offsets, strict=True)]
    # Key heads that query heads of the same offsets share need the same tokens: find these once per kind.
    kinds, kind_of = torch.cat(readers, 1).unique(dim=0, return_inverse=True)
    pieces: list[Piece] = []
    needed: list[tuple[slice, Tensor]] = []
    needed_there: dict[int, Tensor] = {}
    is_mixed = False
    for number, (shape, offsets, reads) in enumerate(zip(shapes, n_offsets, kinds.split(n_offsets, 1), strict=True)):
        cells_of_all = _cells(runs, shape, n_tokens, offsets, rank)
        is_mixed |= bool(cells_of_all.is_far.any())
        is_own = cells_of_all.rank == rank
        mine, others = cells_of_all.where(is_own), cells_of_all.where(~is_own & cells_of_all.is_far.any(1))
        pieces += _pieces(number, shape, mine, num_heads, num_kv_heads, size, by_offset, device)
        needed += _needs(mine, shape, reads)
        _add_needs_of_others(needed_there, mine, others, shape, reads, size, num_kv_heads)
    items = _of_heads(_needed_tokens(needed, len(kinds), num_kv_heads), kind_of, n_tokens)
    places, bounds = _in_buffer(items, runs, rank, layout.n_ranks, num_kv_heads, n_tokens)
    is_own = places < bounds[0][1]
    head, position = items[is_own] // n_tokens, items[is_own] % n_tokens
    run = torch.searchsorted(runs.begin, position, right=True) - 1
    own = head * size + runs.place[run] + position - runs.begin[run]
    nothing = places.new_empty(0)
    sent = [nothing] * layout.n_ranks
    for other, marked in needed_there.items():
        sent[other] = _of_heads([kept.nonzero().flatten() for kept in marked.T], kind_of, size).to(places.dtype)
    fingerprint = hashlib.sha256(repr((shapes, layout, num_heads, num_kv_heads)).encode()).hexdigest()[:16]
    calls = tuple(sorted(pieces, key=lambda piece: not piece.is_local))
    buffer = items.to(device), places.to(device), Copies(own.to(device), places[is_own].long().to(device))
    received = tuple((each,) if each[0] < each[1] else () for each in bounds[1:])
    messages = tuple(x.to(device) for x in sent), received
    return BranchPlan(layout, rank, num_kv_heads * size, fingerprint, calls, *buffer, *messages, is_mixed)


def _in_buffer(
    items: Tensor, runs: _Runs, rank: int, n_ranks: int, num_kv_heads: int, n_tokens: int
) -> tuple[Tensor, list[Run]]:
    """Return the place of each item in the buffer, and the places of the own ones and those of each rank.

    Items ascend by head and position, so those of a head and a run follow each other. With two heads of 10 tokens, the
    own tokens 5 to 9 and the items [3, 7, 13, 17], the own items 7 and 17 come first: the places are [2, 0, 3, 1].
    """
    begins = torch.searchsorted(
        items, (torch.arange(num_kv_heads, device="cpu").unsqueeze(1) * n_tokens + runs.begin).flatten()
    )
    counts = begins.diff(append=begins.new_tensor([len(items)]))
    owner = torch.where(runs.rank == rank, -1, runs.rank).repeat(num_kv_heads)
    order = owner.argsort(stable=True)
    starts = torch.empty_like(begins)
    starts[order] = counts[order].cumsum(0) - counts[order]
    # A plan has a place per item that travels: half of its memory if they fit into 32 bits.
    short = torch.int32 if num_kv_heads * n_tokens < 2**31 else torch.int64
    places = torch.arange(len(items), dtype=short, device="cpu") + (starts - begins).to(short).repeat_interleave(counts)
    tokens = counts.new_zeros(n_ranks + 1).index_add_(0, owner + 1, counts)
    return places, list(pairwise([0, *tokens.cumsum(0).tolist()]))


def _readers(shape: Shape, n_offsets: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return which key heads have query heads of which offset, bool ``[Hkv, offsets]``."""
    head = torch.arange(num_heads, device="cpu")
    found = head.new_zeros(num_kv_heads, shape.dilation, dtype=torch.bool)
    found[head // (num_heads // num_kv_heads), head % shape.dilation] = True
    return found[:, :n_offsets]


def _check_bytes(tokens: int, num_kv_heads: int) -> None:
    """Raise ValueError if a plan for segments that ranks share takes too much memory."""
    if (expected := tokens * num_kv_heads * _BYTES_PER_ITEM) > MAX_BYTES:
        raise ValueError(
            f"layout: a rank shares segments over {tokens:,} tokens and {num_kv_heads} key heads, and the plan could "
            f"take {expected:,} bytes, more than {MAX_BYTES:,}. Use shorter segments or more ranks"
        )


def _needs(mine: _Cells, shape: Shape, reads: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the positions that a rank's problems of a branch read from the buffer, and the kinds of heads that do."""
    cell, offset = mine.is_far.nonzero().T
    begins = mine.segment[cell] * shape.length + offset
    ends = begins + (mine.n_keys[cell, offset] - 1) * shape.dilation + 1
    for begin, end, kinds in zip(begins.tolist(), ends.tolist(), reads.T[offset].unbind(), strict=True):
        yield slice(begin, end, shape.dilation), kinds


def _needed_tokens(needed: Sequence[tuple[slice, Tensor]], n_kinds: int, num_kv_heads: int) -> list[Tensor]:
    """Return the tokens that each kind of key heads needs, ascending. Raise ValueError if they lie too far apart."""
    if not needed:
        return [torch.empty(0, dtype=torch.int64, device="cpu")] * n_kinds
    first = min(positions.start for positions, _ in needed)
    width = max(positions.stop for positions, _ in needed) - first
    _check_bytes(width, num_kv_heads)
    # A mark per token, because branches need many tokens twice.
    found = torch.zeros(n_kinds, width, dtype=torch.bool, device="cpu")
    for positions, kinds in needed:
        found[:, positions.start - first : positions.stop - first : positions.step] |= kinds.unsqueeze(1)
    return [kept.nonzero().flatten().add_(first) for kept in found]


def _of_heads(tokens: Sequence[Tensor], kind_of: Tensor, n_tokens: int) -> Tensor:
    """Return the items of all key heads, ascending, from the tokens of each kind."""
    return torch.cat([tokens[kind] + head * n_tokens for head, kind in enumerate(kind_of.tolist())])


def _add_needs_of_others(
    needed: dict[int, Tensor], mine: _Cells, others: _Cells, shape: Shape, reads: Tensor, size: int, num_kv_heads: int
) -> None:
    """Mark this rank's tokens ``[n, kinds]`` that the problems of each other rank read."""
    # Only segments that both have. In the others, this rank has no token to send, or nobody asks for it.
    segments = mine.segment.unique()
    others = others.where(torch.isin(others.segment, segments))
    mine = mine.where(torch.isin(mine.segment, others.segment))
    if not len(others.rank):
        return
    cell, offset = (mine.n_queries > 0).nonzero().T
    count, first = mine.n_queries[cell, offset], mine.first[cell, offset]
    _check_bytes(int(count.sum()), num_kv_heads)
    # The places of all tokens of the shared segments at the offsets that heads have.
    which = torch.repeat_interleave(count)
    place = first[which] + torch.arange(len(which), device="cpu") - (count.cumsum(0) - count)[which]
    token = mine.base[cell][which] + offset[which] + place * shape.dilation
    of_segment = torch.searchsorted(segments, mine.segment[cell])[which]
    offset, kinds = offset[which], reads.T.contiguous()
    # A slot per shared segment and offset. Another rank reads the places below a bound there, 0 if it reads none.
    slot = of_segment * len(kinds) + offset
    others = others.where(others.rank.argsort(stable=True))
    ranks, counts = others.rank.unique_consecutive(return_counts=True)
    far = others.n_keys.where(others.is_far, 0).split(counts.tolist())
    at = torch.searchsorted(segments, others.segment).unsqueeze(1).expand(-1, far[0].shape[1]).split(counts.tolist())
    for other, keys, theirs in zip(ranks.tolist(), far, at, strict=True):
        # Several runs of a rank can lie in one segment. The last one reads furthest.
        bound = keys.new_zeros(len(segments), reads.shape[1])
        bound.scatter_reduce_(0, theirs, keys, "amax")
        read = (place < bound.flatten()[slot]).nonzero().flatten()
        if len(read):
            marked = needed.setdefault(other, kinds.new_zeros(size, len(kinds.T)))
            marked[token[read]] |= kinds[offset[read]]


def _pieces(
    branch: int,
    shape: Shape,
    mine: _Cells,
    num_heads: int,
    num_kv_heads: int,
    size: int,
    by_offset: bool,
    device: torch.device | str,
) -> Iterator[Piece]:
    """Yield a rank's problems of one branch: segments whose queries and keys have equal places form one."""
    if not len(mine.segment):
        return
    # A row per cell, with four numbers per offset. Cells with equal rows have equal problems.
    table = torch.stack([mine.first, mine.n_queries, mine.n_keys, mine.is_far.long()], 2)
    kinds, kind = table.flatten(1).unique(dim=0, return_inverse=True)
    order = kind.argsort(stable=True).split(torch.bincount(kind).tolist())
    for cells, row in zip(order, kinds.unflatten(1, (-1, 4)).tolist(), strict=True):
        alike: dict[tuple[int, ...], list[int]] = {}
        for offset, (first, n_queries, n_keys, is_far) in enumerate(row):
            if n_queries:
                alike.setdefault((first, n_queries, n_keys, is_far, offset * by_offset), []).append(offset)
        for (first, n_queries, n_keys, is_far, _), offsets in alike.items():
            # The keys of a problem are copied, so it gets about as many as the rank holds.
            for chunk in cells.split(max(size // n_keys, 1)):
                for heads, key_heads in _shared_heads(offsets, shape.dilation, num_heads, num_kv_heads):
                    segment, base = mine.segment[chunk].to(device), mine.base[chunk].to(device)
                    sizes = first, n_queries, n_keys, not is_far
                    yield Piece(branch, shape.length, shape.dilation, heads, key_heads, segment, base, *sizes)


def _shared_heads(
    offsets: Sequence[int], dilation: int, num_heads: int, num_kv_heads: int
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Yield query heads of these offsets, with their key heads and offsets, so that equally many share each.

    >>> list(_shared_heads([0, 1], 2, 6, 2))
    [((0, 2, 3, 5), ((0, 0), (1, 1))), ((1, 4), ((0, 1), (1, 0)))]
    """
    sharing: dict[tuple[int, int], list[int]] = {}
    for head in range(num_heads):
        if head % dilation in offsets:
            sharing.setdefault((head // (num_heads // num_kv_heads), head % dilation), []).append(head)
    for count in sorted({len(heads) for heads in sharing.values()}, reverse=True):
        chosen = [key_head for key_head, heads in sorted(sharing.items()) if len(heads) == count]
        yield tuple(head for key_head in chosen for head in sharing[key_head]), tuple(chosen)
