"""The two stages of a hierarchy, between nodes and inside them: pure functions on the host, without communication."""

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from torch import Tensor

from ringtile.distributed.layout import Layout, Run, count_tokens, counts_of, intervals, overlaps, placed, with_starts
from ringtile.distributed.plan import RingPlan, count_cold
from ringtile.patterns.base import TileGrid


class StageCounts(NamedTuple):
    """Tokens in the messages of all P ranks, G per node, that are not broadcast."""

    crossing: Tensor
    """int64 ``[P, P / G]``: from each rank to each other node."""
    direct: Tensor
    """int64 ``[P, G]``: own tokens, from each rank to each other of its node."""
    handed: Tensor
    """int64 ``[P, G]``: tokens of other nodes, from each rank to each of its node. It keeps those for itself."""


@dataclass(eq=False)
class Relays:
    """The two stages of one rank, if a token crosses to a node once and is handed on inside it.

    Rank r is number ``r % per_node`` of node ``r // per_node``. A token crosses to the rank with the same number as its
    owner. Tokens for ranks of the owner's node go straight to them, as in the plan. A broadcast passes the ranks with
    the owner's number first, and then each of them broadcasts it inside its node.
    """

    plan: RingPlan
    per_node: int
    crossing: tuple[tuple[Run, ...], ...]
    """For each node the runs of own tokens that it gets. None for the own node."""
    arriving: tuple[tuple[Run, ...], ...]
    """For each node the places, among all tokens that cross to this rank, of those from its rank with this number."""
    handed: tuple[tuple[Run, ...], ...]
    """For each rank of this node, itself included, the places of the tokens that it gets among those that crossed."""
    counts: StageCounts
    """Tokens in the messages of all ranks."""

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.plan.rank // self.per_node

    @property
    def number(self) -> int:
        """Number of this rank in its node."""
        return self.plan.rank % self.per_node

    @property
    def mates(self) -> range:
        """The ranks of this node."""
        return range(self.node * self.per_node, (self.node + 1) * self.per_node)

    @cached_property
    def relayed(self) -> tuple[tuple[Run, ...], ...]:
        """For each rank of this node the runs of the buffer that its message fills, in the order of the nodes."""
        received, n_ranks = self.plan.received, self.plan.layout.n_ranks
        # Mate 1 of nodes of 4 hands on what ranks 1, 5, 9, ... of other nodes sent, in this order.
        owners = ((x for x in range(g, n_ranks, self.per_node) if x not in self.mates) for g in range(self.per_node))
        return tuple(tuple(run for owner in same for run in received[owner]) for same in owners)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the plan and of the messages of all ranks on both levels: equal at all ranks."""
        plan, per_node = self.plan, self.per_node
        digest = hashlib.sha256(f"{plan.fingerprint}, {per_node}".encode())
        crossing, handed = self.counts.crossing.clone(), self.counts.handed.clone()
        # This rank's messages as it would send and receive them: a rank that expects others than come would differ.
        crossing[plan.rank] = crossing.new_tensor(counts_of(self.crossing))
        crossing[self.number :: per_node, self.node] = crossing.new_tensor(counts_of(self.arriving))
        handed[plan.rank] = handed.new_tensor(counts_of(self.handed))
        handed[list(self.mates), self.number] = handed.new_tensor(counts_of(self.relayed))
        for x in (crossing, handed):
            digest.update(ctypes.string_at(x.data_ptr(), x.nbytes))
        return digest.hexdigest()[:16]


def make_relays(plan: RingPlan, per_node: int) -> Relays:
    """Return the two stages of a plan's rank, with ``per_node`` ranks per node. The plan keeps them."""
    layout, found = plan.layout, cast(dict[int, Relays], plan.relays)
    if per_node < 1 or layout.n_ranks % per_node:
        raise ValueError(f"per_node: expected a divisor of {layout.n_ranks} ranks, got {per_node}")
    if per_node in found:
        return found[per_node]
    n_nodes, (node, number) = layout.n_ranks // per_node, divmod(plan.rank, per_node)
    grid = TileGrid(plan.block, 0, layout.n_tokens, layout.n_tokens)
    # [P, C] becomes [node, number, C]. For example, if ranks 4 and 6 of nodes of 4 need tile 2, it crosses to node 1.
    needs = (plan.needs & ~plan.is_hot).unflatten(0, (n_nodes, per_node))
    of_node = needs.any(1)
    places = with_starts(layout.runs[plan.rank])
    crossing = [placed(intervals(of_node[x], grid) if x != node else [], places) for x in range(n_nodes)]
    mates = [intervals(tiles, grid) for tiles in needs[node]]
    arriving: list[tuple[Run, ...]] = []
    handed: list[list[Run]] = [[] for _ in mates]
    at = 0
    for other in range(n_nodes):
        held = layout.runs[other * per_node + number] if other != node else ()
        arrived = overlaps(intervals(of_node[node], grid), held)
        # The tokens from one node follow those from the node before: 256 tokens of node 0 are places 0 to 256, and 128
        # of node 2 then 256 to 384.
        starts = [(run, at + place) for run, place in with_starts(arrived)]
        for runs, wanted in zip(handed, mates, strict=True):
            runs += placed(wanted, starts)
        n_tokens = count_tokens(arrived)
        arriving.append(((at, at + n_tokens),) if n_tokens else ())
        at += n_tokens
    counts = count_levels(layout, plan.needs, plan.is_hot, plan.block, per_node)
    found[per_node] = Relays(plan, per_node, tuple(crossing), tuple(arriving), tuple(map(tuple, handed)), counts)
    return found[per_node]


def count_levels(layout: Layout, needs: Tensor, is_hot: Tensor, block: int, per_node: int) -> StageCounts:
    """Return the tokens in the messages of all ranks, by stage."""
    shape = (layout.n_ranks // per_node, per_node)
    of_node = needs.unflatten(0, shape).any(1)
    crossing = count_cold(layout, of_node, is_hot, block)
    crossing.unflatten(0, shape).diagonal(dim1=0, dim2=2).zero_()
    # The dimensions are [source node, number in it, target node, number in it]: tokens from rank 5 to rank 2, with 4
    # ranks per node, stand at [1, 1, 0, 2].
    sent = count_cold(layout, needs, is_hot, block).fill_diagonal_(0).unflatten(1, shape).unflatten(0, shape)
    direct = sent.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    # A rank with the owner's number hands the tokens on: what all nodes send to a mate, less what goes straight.
    handed = sent.sum(0).transpose(0, 1) - direct
    return StageCounts(crossing, direct.flatten(0, 1), handed.flatten(0, 1))
