"""Messages on two levels, between nodes and inside them: pure functions on the host, without communication."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.layout import Layout, Run, count_tokens
from ringtile.distributed.plan import PLANS, RingPlan, count_cold, make_plan
from ringtile.distributed.runs import Copy, copies, intervals, overlaps, placed, with_starts
from ringtile.patterns import Pattern
from ringtile.patterns.base import TileGrid


@dataclass(eq=False)
class Relays:
    """The messages of one rank, if a token crosses to a node once and is handed on inside it.

    Rank r is number ``r % per_node`` of node ``r // per_node``. A token crosses to the rank with the same number as its
    owner. Tokens for ranks of the owner's node go straight to them, as in the plan. A broadcast passes the ranks with
    the owner's number first, and then each of them broadcasts it inside its node.
    """

    plan: RingPlan
    per_node: int
    crossing: tuple[tuple[Run, ...], ...]
    """For each node the runs of own tokens that it gets. None for the own node."""
    arriving: tuple[int, ...]
    """For each node the number of tokens that arrive from its rank with this rank's number."""
    handed: tuple[tuple[tuple[Copy, ...], ...], ...]
    """For each rank of this node, itself included, and each node: the tokens that arrived from there and are copied
    into the rank's message."""
    is_crossing: bool
    """True if any token crosses between nodes that is not broadcast."""
    is_direct: bool
    """True if any rank needs tokens of another in its node that are not broadcast."""

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
        owners = ((x for x in range(g, n_ranks, self.per_node) if x not in self.mates) for g in self._numbers)
        return tuple(tuple(run for owner in same for run in received[owner]) for same in owners)

    @property
    def _numbers(self) -> range:
        return range(self.per_node)

    @cached_property
    def tokens_crossing(self) -> tuple[int, ...]:
        """Number of tokens that each node gets from this rank."""
        return tuple(map(count_tokens, self.crossing))

    @cached_property
    def tokens_handed(self) -> tuple[int, ...]:
        """Number of tokens that this rank hands to each rank of its node."""
        return tuple(sum(copy.length for part in parts for copy in part) for parts in self.handed)

    @cached_property
    def tokens_relayed(self) -> tuple[int, ...]:
        """Number of tokens that each rank of the node hands to this one."""
        return tuple(map(count_tokens, self.relayed))

    @cached_property
    def most_broadcasts(self) -> int:
        """The most broadcasts between ranks with one number."""
        hot = self.plan.tokens_hot
        return max(sum(tokens > 0 for tokens in hot[number :: self.per_node]) for number in self._numbers)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the plan and of the messages of all ranks on both levels: equal at all ranks."""
        plan, per_node = self.plan, self.per_node
        digest = hashlib.sha256(f"{plan.fingerprint}, {per_node}".encode())
        counts = count_levels(plan.layout, plan.needs, plan.is_hot, plan.block, per_node)
        # This rank's messages as it would send and receive them.
        counts.crossing[plan.rank] = torch.tensor(self.tokens_crossing)
        counts.crossing[self.number :: per_node, self.node] = torch.tensor(self.arriving)
        counts.handed[plan.rank] = torch.tensor(self.tokens_handed)
        counts.handed[list(self.mates), self.number] = torch.tensor(self.tokens_relayed)
        for x in (counts.crossing, counts.handed):
            digest.update(ctypes.string_at(x.data_ptr(), x.nbytes))
        return digest.hexdigest()[:16]


@lru_cache(maxsize=PLANS)
def make_relays(plan: RingPlan, per_node: int) -> Relays:
    """Return the messages of a plan's rank on two levels, with ``per_node`` ranks per node. They are cached.

    Raises ValueError if nodes do not have equally many ranks.

    >>> from ringtile.patterns import Causal, Window
    >>> plan = make_plan(Causal() & Window(4096), Layout.contiguous(8192, 8), 3)
    >>> relays = make_relays(plan, 4)
    >>> plan.tokens_sent, relays.tokens_crossing
    ((0, 0, 0, 0, 1024, 1024, 1024, 1024), (0, 1024))
    """
    layout = plan.layout
    if per_node < 1 or layout.n_ranks % per_node:
        raise ValueError(f"per_node: expected a divisor of {layout.n_ranks} ranks, got {per_node}")
    n_nodes, (node, number) = layout.n_ranks // per_node, divmod(plan.rank, per_node)
    grid = TileGrid(plan.block, 0, layout.n_tokens, layout.n_tokens)
    needs = plan.needs & ~plan.is_hot
    of_node = needs.unflatten(0, (n_nodes, per_node)).any(1)
    places = with_starts(layout.runs[plan.rank])
    crossing = [placed(intervals(of_node[x], grid) if x != node else [], places) for x in range(n_nodes)]
    mates = [intervals(needs[node * per_node + x], grid) for x in range(per_node)]
    arriving: list[int] = []
    handed: list[list[tuple[Copy, ...]]] = [[] for _ in mates]
    starts = [0] * per_node
    for other in range(n_nodes):
        held = layout.runs[other * per_node + number] if other != node else ()
        arrived = overlaps(intervals(of_node[node], grid), held)
        arriving.append(count_tokens(arrived))
        for mate, wanted in enumerate(mates):
            mine = overlaps(wanted, held)
            target = [(run, starts[mate] + place) for run, place in with_starts(mine)]
            handed[mate].append(copies(with_starts(arrived), target))
            starts[mate] += count_tokens(mine)
    tiles, ranks, _ = layout.tiles(plan.block)
    holds = torch.zeros_like(needs)
    holds[ranks, tiles] = True
    in_node = holds.unflatten(0, (n_nodes, per_node)).sum(1)
    others = (in_node > 1).unsqueeze(1) | ((in_node > 0).unsqueeze(1) & ~holds.unflatten(0, (n_nodes, per_node)))
    return Relays(
        plan,
        per_node,
        tuple(crossing),
        tuple(arriving),
        tuple(map(tuple, handed)),
        bool((of_node & (in_node.sum(0) > in_node)).any()),
        bool((needs & others.flatten(0, 1)).any()),
    )


def routes_of(
    pattern: Pattern,
    layout: Layout,
    rank: int,
    transport: str,
    num_heads: int,
    batch: int,
    ranks_per_node: int | None,
) -> RingPlan | Relays:
    """Return the plan of an exchange, a gather or a hierarchy, from the caches if it was made before."""
    gather = None if transport == "auto" else transport == "gather"
    plan = make_plan(pattern, layout, rank, num_heads=num_heads, batch=batch, gather=gather)
    if transport != "hierarchy":
        return plan
    if ranks_per_node is None:
        raise ValueError("ranks_per_node: expected the number of ranks per node for the transport 'hierarchy'")
    return make_relays(plan, ranks_per_node)


class Levels(NamedTuple):
    """Tokens in the messages of all P ranks, G per node, that are not broadcast."""

    crossing: Tensor
    """int64 ``[P, P / G]``: from each rank to each other node."""
    direct: Tensor
    """int64 ``[P, G]``: own tokens, from each rank to each other of its node."""
    handed: Tensor
    """int64 ``[P, G]``: tokens of other nodes, from each rank to each of its node. It keeps those for itself."""


def count_levels(layout: Layout, needs: Tensor, is_hot: Tensor, block: int, per_node: int) -> Levels:
    """Return the messages of all ranks on two levels."""
    shape = (layout.n_ranks // per_node, per_node)
    of_node = needs.unflatten(0, shape).any(1)
    crossing = count_cold(layout, of_node, is_hot, block)
    crossing.unflatten(0, shape).diagonal(dim1=0, dim2=2).zero_()
    # From node, from number, to node, to number.
    sent = count_cold(layout, needs, is_hot, block).fill_diagonal_(0).unflatten(1, shape).unflatten(0, shape)
    direct = sent.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    handed = sent.sum(0).transpose(0, 1) - direct
    return Levels(crossing, direct.flatten(0, 1), handed.flatten(0, 1))
