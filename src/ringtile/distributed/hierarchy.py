"""Exchange on two levels: tokens cross between nodes once, and gradients are summed inside the node before they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import Tensor

from ringtile.distributed.exchange import BACKWARD, FORWARD, Exchange, Works, there
from ringtile.distributed.lockstep import Facts
from ringtile.distributed.process_groups import Axes
from ringtile.distributed.relays import Relays
from ringtile.distributed.wires import (
    Places,
    Tensors,
    all_to_all,
    back,
    copy,
    cut,
    gather,
    gathered,
    of_ranks,
    scatter,
    width_of,
)
from ringtile.kernels.contracts import accumulator


class Hierarchy(Exchange):
    """The collectives of one plan on nodes of several ranks. `Relays` explains the ways of the tokens.

    Tokens for the own node and tokens that cross travel at the same time. Those that have crossed follow, by one
    all-to-all inside the node. Gradients take the same ways back.
    """

    def __init__(self, relays: Relays, axes: Axes, facts: Facts) -> None:
        super().__init__(relays.plan, axes.every, facts)
        self._relays = relays
        self._outer, self._inner = ref(axes.outer), ref(axes.inner)
        plan, mates, per_node = relays.plan, relays.mates, relays.per_node
        # Tokens of this node, by the number in it.
        self._to, self._from = ([way[rank] for rank in mates] for way in (plan.sent, plan.received))
        self._n_to, self._n_from = ([way[rank] for rank in mates] for way in (plan.tokens_sent, plan.tokens_received))
        # The broadcasts that one rank of a node hands on lie together.
        n_ranks = plan.layout.n_ranks
        self._owners = [owner for number in range(per_node) for owner in range(number, n_ranks, per_node)]
        self._n_hot = [plan.tokens_hot[owner] for owner in self._owners]

    def size_received(self, xs: Tensors) -> int:
        """Return the elements that this rank receives, its own broadcast and what it hands to itself included."""
        return sum(self._sizes(width_of(xs)))

    def start(self, xs: Tensors, data: str = FORWARD) -> tuple[Tensor, Works]:
        """Begin to send. Return what will be received and the work to wait for."""
        self.begin()
        relays, width = self._relays, width_of(xs)
        received = xs[0].new_empty(self.size_received(xs))
        hot, direct, _ = received.split(self._sizes(width))
        wires = list(self._of_number(hot, width))
        for owner, wire in wires:
            if owner == self.plan.rank:
                gather(cut(wire, xs), xs, self.plan.hot[owner])
        crossing = gathered(xs, relays.crossing, relays.tokens_crossing)
        straight = gathered(xs, self._to, self._n_to)
        arrived = crossing.new_empty(sum(relays.arriving) * width)
        self.check(data, crossing)
        broadcasts = [
            dist.broadcast(wire, self._global(owner), there(self._outer), async_op=True) for owner, wire in wires
        ]
        across = self._across(arrived, crossing, relays.arriving, relays.tokens_crossing, width)
        works = self._inside(direct, straight, self._n_from, self._n_to, width, direct=True)
        return received, Works(self._counted(broadcasts), works, [crossing, straight], (arrived, across))

    def _broadcast(self, received: Tensor, width: int, works: Works) -> Iterator[tuple[int, Tensor]]:
        """Hand on the broadcasts if they have just crossed, and yield them with their owners."""
        hot = received.split(self._sizes(width))[0]
        if works.next is not None:
            inside = (
                dist.broadcast(wire, self._global(rank), there(self._inner), async_op=True)
                for rank, wire in self._of_mates(hot, width)
            )
            self._wait(list(inside), FORWARD)
        return ((self._owners[place], wire) for place, wire in of_ranks(hot, width, self._n_hot))

    def finish_cold(self, buffers: Tensors, received: Tensor, works: Works) -> None:
        """Hand on the tokens that have crossed, and write all others into the buffers."""
        relays, width = self._relays, width_of(buffers)
        _, direct, relayed = received.split(self._sizes(width))
        if works.next is not None:
            arrived, across = works.next
            self._wait(across, FORWARD)
            sent = arrived.new_empty(sum(relays.tokens_handed) * width)
            for mate, wire in of_ranks(sent, width, relays.tokens_handed):
                for node, part in of_ranks(arrived, width, relays.arriving):
                    copy(cut(wire, buffers), cut(part, buffers), relays.handed[mate][node])
            inside = self._inside(relayed, sent, relays.tokens_relayed, relays.tokens_handed, width, direct=False)
            self._wait([*works.cold, *inside], FORWARD)
        for mate, wire in of_ranks(direct, width, self._n_from):
            scatter(buffers, cut(wire, buffers), self._from[mate])
        for mate, wire in of_ranks(relayed, width, relays.tokens_relayed):
            scatter(buffers, cut(wire, buffers), relays.relayed[mate])

    def start_cold_back(self, grads: Tensors) -> tuple[Tensor, Works]:
        """Begin to send gradients home inside the node, and to the ranks that handed on the tokens of other nodes."""
        self.begin()
        relays, width = self._relays, width_of(grads)
        straight = gathered(grads, self._from, self._n_from)
        relayed = gathered(grads, relays.relayed, relays.tokens_relayed)
        received = straight.new_empty(sum(self._n_to) * width)
        handed = straight.new_empty(sum(relays.tokens_handed) * width)
        self.check(BACKWARD, straight)
        works = self._inside(received, straight, self._n_to, self._n_from, width, direct=True)
        inside = self._inside(handed, relayed, relays.tokens_handed, relays.tokens_relayed, width, direct=False)
        return received, Works(cold=works, sent=[straight, relayed], next=(handed, inside))

    def hand_on_back(self, grads: Tensors, started: tuple[Tensor, Works]) -> tuple[Tensor, Works]:
        """Begin to send home the gradients of other nodes' tokens, summed over the ranks of this node."""
        relays, width = self._relays, width_of(grads)
        received, works = started
        assert works.next is not None
        handed, inside = works.next
        self._wait(inside, BACKWARD)
        total = handed.new_zeros(sum(relays.arriving) * width, dtype=accumulator(handed))
        # In the order of the ranks, so that every run adds alike.
        for mate, wire in of_ranks(handed, width, relays.tokens_handed):
            for node, part in of_ranks(total, width, relays.arriving):
                copy(cut(part, grads), cut(wire, grads), back(relays.handed[mate][node]), add=True)
        sent = total.to(handed.dtype)
        home = sent.new_empty(sum(relays.tokens_crossing) * width)
        across = self._across(home, sent, relays.tokens_crossing, relays.arriving, width)
        return received, Works(cold=works.cold, sent=[*works.sent, sent], next=(home, across))

    def start_hot_back(self, grads: Tensors) -> tuple[Tensor, Works]:
        """Add up the gradients of broadcast tokens inside the node, and begin to add them up at their owners."""
        width = width_of(grads)
        hot = grads[0].new_zeros(sum(self._n_hot) * width, dtype=accumulator(grads[0]))
        for place, wire in of_ranks(hot, width, self._n_hot):
            copy(cut(wire, grads), grads, back(self.plan.hot_copies[self._owners[place]]), add=True)
        inside = (
            dist.reduce(wire, self._global(rank), group=there(self._inner), async_op=True)
            for rank, wire in self._of_mates(hot, width)
        )
        self._wait(list(inside), BACKWARD)
        works = (
            dist.reduce(wire, self._global(owner), group=there(self._outer), async_op=True)
            for owner, wire in self._of_number(hot, width)
        )
        return hot, Works(hot=self._counted(works))

    def _arrived_back(
        self, cold_started: tuple[Tensor, Works], hot_started: tuple[Tensor, Works], width: int
    ) -> list[tuple[Tensor, Places]]:
        (received, cold_works), (hot, hot_works) = cold_started, hot_started
        assert cold_works.next is not None
        home, across = cold_works.next
        self._wait([*cold_works.cold, *across, *hot_works.hot], BACKWARD)
        crossing, rank = self._relays.crossing, self.plan.rank
        return [
            *((wire, self._to[mate]) for mate, wire in of_ranks(received, width, self._n_to)),
            *((wire, crossing[node]) for node, wire in of_ranks(home, width, self._relays.tokens_crossing)),
            *((wire, self.plan.hot[rank]) for owner, wire in self._of_number(hot, width) if owner == rank),
        ]

    def _sizes(self, width: int) -> list[int]:
        """Return the elements that are received: broadcasts, tokens of this node, and tokens that have crossed."""
        return [sum(tokens) * width for tokens in (self._n_hot, self._n_from, self._relays.tokens_relayed)]

    def _of_mates(self, hot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank of the node that hands on broadcasts, and its part."""
        n_nodes = len(self._relays.arriving)
        tokens = [sum(self._n_hot[at : at + n_nodes]) for at in range(0, len(self._n_hot), n_nodes)]
        return ((self._relays.mates[number], wire) for number, wire in of_ranks(hot, width, tokens))

    def _of_number(self, hot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank with this rank's number that broadcasts, and its part."""
        owners = ((self._owners[place], wire) for place, wire in of_ranks(hot, width, self._n_hot))
        return ((owner, wire) for owner, wire in owners if owner % self._relays.per_node == self._relays.number)

    def _counted(self, works: Iterator[Any] | Sequence[Any]) -> list[Any]:
        """Return the works of this rank's broadcasts, as many as any rank has: all ranks make the same waits."""
        found = list(works)
        return [*found, *[None] * (self._relays.most_broadcasts - len(found))]

    def _across(
        self, received: Tensor, sent: Tensor, n_in: Sequence[int], n_out: Sequence[int], width: int
    ) -> list[Any]:
        """Begin to exchange tokens between nodes, if any rank has some."""
        if not self._relays.is_crossing:
            return []
        return [all_to_all(received, sent, n_in, n_out, width, there(self._outer))]

    def _inside(
        self, received: Tensor, sent: Tensor, n_in: Sequence[int], n_out: Sequence[int], width: int, *, direct: bool
    ) -> list[Any]:
        """Begin to exchange tokens inside the node, its own (``direct``) or those of others, if any rank has some."""
        is_any = self._relays.is_direct if direct else self._relays.is_crossing
        return [all_to_all(received, sent, n_in, n_out, width, there(self._inner))] if is_any else []

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)
