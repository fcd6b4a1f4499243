"""Stages of an exchange: each rank of a group sends the others tokens, which are packed and unpacked in one place.

Tensors are ``[.., .., tokens, dim]``. A message has the tokens of each tensor after those of the one before, so every
copy moves whole runs of tokens. The messages to or from all ranks of a group lie one after another in a vector.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.distributed.layout import Copies, Places, consecutive, count_tokens
from ringtile.distributed.process_groups import alive

# The names since torch 2.13, where the older ones warn.
ALL_GATHER, REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)

Tensors = Sequence[Tensor]
"""Tensors of one dtype that travel together."""


@dataclass(frozen=True, eq=False)
class Stage:
    """An all-to-all among the ranks of a group."""

    sent: Sequence[Places]
    """For each rank the places of the tokens that it gets."""
    received: Sequence[Places]
    """For each rank the places that its tokens fill."""
    group: ref[dist.ProcessGroup]
    is_idle: bool = False
    """True if no rank of the group has tokens for another: then there is no collective."""

    @cached_property
    def n_sent(self) -> list[int]:
        """Number of tokens that each rank gets."""
        return list(map(count_places, self.sent))

    @cached_property
    def n_received(self) -> list[int]:
        """Number of tokens that come from each rank."""
        return list(map(count_places, self.received))

    @cached_property
    def back(self) -> "Stage":
        """The stage by which gradients go home."""
        return Stage(self.received, self.sent, self.group, self.is_idle)

    def pack(self, *xs: Tensors) -> Tensor:
        """Return the vector of all messages to others."""
        vector = xs[0][0].new_empty(sum(_sizes(self.n_sent, xs)))
        for rank, message in messages(vector, _sizes(self.n_sent, xs)):
            mine = _of(rank, xs)
            gather(views(message, mine), mine, self.sent[rank])
        return vector

    def room(self, *xs: Tensors, dtype: torch.dtype | None = None) -> Tensor:
        """Return a vector for the messages from others."""
        return xs[0][0].new_empty(sum(_sizes(self.n_received, xs)), dtype=dtype)

    def start(self, received: Tensor, sent: Tensor, xs: Sequence[Tensors], ys: Sequence[Tensors]) -> list[Any]:
        """Begin to exchange messages with tokens of ``xs`` for messages with tokens of ``ys``. Return the works."""
        if self.is_idle:
            return []
        # A rank without messages takes part, too.
        n_in, n_out = (_sizes(n, of) or [0] * len(n) for n, of in ((self.n_received, ys), (self.n_sent, xs)))
        return [dist.all_to_all_single(received, sent, n_in, n_out, alive(self.group), async_op=True)]

    def arrived(self, received: Tensor, xs: Tensors) -> Iterator[tuple[list[Tensor], Places]]:
        """Yield the tokens that each rank has sent, in the order of the ranks, and the places that they fill."""
        for rank, message in messages(received, _sizes(self.n_received, [xs])):
            yield views(message, xs), self.received[rank]

    def unpack(self, received: Tensor, *xs: Tensors, add: bool = False) -> None:
        """Write the tokens that have arrived to their places in ``xs``, or add them there."""
        # In the order of the ranks, so that every run adds alike.
        for rank, message in messages(received, _sizes(self.n_received, xs)):
            scatter(_of(rank, xs), views(message, _of(rank, xs)), self.received[rank], add=add)


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Collectives by which every rank of a group gets the tokens of each, and gradients are summed at their owners."""

    tokens: Sequence[int]
    """Number of tokens of each rank of the group."""
    me: int
    """This rank, counted in the group."""
    group: ref[dist.ProcessGroup]
    is_single: bool = False
    """True if one collective serves ranks with equally many tokens."""
    n_waits: int = 0
    """The most collectives that any rank takes part in: all ranks make the same waits."""

    @property
    def _is_even(self) -> bool:
        return self.is_single and len(set(self.tokens)) == 1

    def start(self, vector: Tensor, width: int) -> list[Any]:
        """Begin to fill the parts of the others in the vector, which has this rank's own."""
        parts = list(messages(vector, [n * width for n in self.tokens]))
        # One collective is less to launch and to wait for than a broadcast per rank, and moves the same bytes.
        if self._is_even and parts:
            gather_all = getattr(dist, ALL_GATHER)
            return [gather_all(vector, parts[self.me][1], group=alive(self.group), async_op=True)]
        return self._padded(
            [dist.broadcast(part, self._global(rank), alive(self.group), async_op=True) for rank, part in parts]
        )

    def start_back(self, vector: Tensor, width: int) -> tuple[Tensor, list[Any]]:
        """Begin to add up the vectors of all ranks. Return this rank's part, and the works."""
        sizes = [n * width for n in self.tokens]
        if self._is_even and len(vector):
            mine = vector.new_empty(sizes[self.me])
            reduce_all = getattr(dist, REDUCE_SCATTER)
            return mine, [reduce_all(mine, vector, group=alive(self.group), async_op=True)]
        works = [
            dist.reduce(part, self._global(rank), group=alive(self.group), async_op=True)
            for rank, part in messages(vector, sizes)
        ]
        return self.mine(vector, width), self._padded(works)

    def mine(self, vector: Tensor, width: int) -> Tensor:
        """Return this rank's part of the vector."""
        # Of ranks with 128, 0 and 256 tokens, rank 2 has the elements from 128 * width on.
        first = sum(self.tokens[: self.me]) * width
        return vector[first : first + sum(self.tokens[self.me : self.me + 1]) * width]

    def _padded(self, works: list[Any]) -> list[Any]:
        return [*works, *[None] * (self.n_waits - len(works))]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(alive(self.group), rank)


def _of(rank: int, xs: Sequence[Tensors]) -> Tensors:
    """Return the tensors of the messages to or from a rank."""
    return xs[0] if len(xs) == 1 else xs[rank]


def _sizes(tokens: Sequence[int], xs: Sequence[Tensors]) -> list[int]:
    """Return the elements of the message with so many tokens, for each rank that has a message."""
    if not any(tokens):
        return []
    if len(xs) == 1:
        # Among 1,024 ranks, a width for each would take milliseconds.
        width = width_of(xs[0])
        return [n * width for n in tokens]
    return [n * width_of(x) for n, x in zip(tokens, xs, strict=True)]


def width_of(xs: Tensors) -> int:
    """Return the elements per token in a message."""
    return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in xs)


def messages(vector: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank that has elements in a vector, and its message. Without a batch no rank has any."""
    at = 0
    for rank, size in enumerate(sizes):
        if size:
            yield rank, vector[at : at + size]
            at += size


def views(message: Tensor, xs: Tensors) -> list[Tensor]:
    """Return the tokens of each tensor in a message, ``[.., .., tokens, dim]``."""
    # For example, 1,536 elements of keys [1, 2, n, 8] and values [1, 2, n, 4] are 64 tokens: 1,024 elements of keys
    # come first, then 512 of values.
    shapes = [(*x.shape[:2], len(message) // width_of(xs), x.shape[3]) for x in xs]
    return [part.view(shape) for part, shape in zip(message.split([prod(s) for s in shapes]), shapes, strict=True)]


def count_places(places: Places) -> int:
    """Return the number of tokens."""
    return len(places) if isinstance(places, Tensor) else count_tokens(places)


def copy(targets: Tensors, sources: Tensors, copies: tuple[Places, Places], *, add: bool = False) -> None:
    """Copy tokens to other places, or add them."""
    source, target = copies
    if isinstance(source, Tensor) and isinstance(target, Tensor):
        for there, here in zip(targets, sources, strict=True):
            _put_at(there, target, here.index_select(2, source), add)
        return
    for (begin, end), (low, high) in zip(source, target, strict=True):
        for there, here in zip(targets, sources, strict=True):
            tokens = there[:, :, low:high]
            (tokens.add_ if add else tokens.copy_)(here[:, :, begin:end])


def gather(targets: Tensors, sources: Tensors, places: Places) -> None:
    """Copy tokens one after another into ``targets``."""
    if isinstance(places, Tensor):
        for target, source in zip(targets, sources, strict=True):
            torch.index_select(source, 2, places, out=target)
    else:
        # Runs (0, 4) and (8, 10) go to (0, 4) and (4, 6) of the message.
        copy(targets, sources, Copies(places, consecutive(places)))


def scatter(targets: Tensors, sources: Tensors, places: Places, *, add: bool = False) -> None:
    """Copy tokens that lie one after another in ``sources`` to their places in ``targets``, or add them."""
    if isinstance(places, Tensor):
        for target, source in zip(targets, sources, strict=True):
            _put_at(target, places, source, add)
    else:
        copy(targets, sources, Copies(consecutive(places), places), add=add)


def _put_at(target: Tensor, places: Tensor, source: Tensor, add: bool) -> None:
    # No place occurs twice, so the sums do not depend on the order of threads.
    (target.index_add_ if add else target.index_copy_)(2, places, source.to(target.dtype))


def to_bytes(keep: Tensor) -> Tensor:
    """Return bool ``[B, n]`` as bytes ``[1, 1, n, ceil(B / 8)]``, eight batch elements to each."""
    # Not every backend sends bool, and a byte per key would be eight times as much.
    bits: Tensor = torch.nn.functional.pad(keep.T, (0, -len(keep) % 8)).unflatten(1, (-1, 8))
    return (bits * _powers(keep)).sum(2).to(torch.uint8)[None, None]


def from_bytes(packed: Tensor, batch: int) -> Tensor:
    """Return what `to_bytes` was given."""
    bits = packed[0, 0].unsqueeze(2).long() // _powers(packed) % 2
    return bits.flatten(1)[:, :batch].T.bool()


def _powers(x: Tensor) -> Tensor:
    return torch.pow(2, torch.arange(8, device=x.device))
