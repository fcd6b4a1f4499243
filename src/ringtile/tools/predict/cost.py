"""Bytes, work and memory of each rank, and a model of the time: pure functions on the host, without communication.

Bytes, messages and peers are exact. Work and memory come from the covers of the pattern, like plans. Times are a model:
the slowest rank's copies, then its exchange beside the rows that do not wait for it, then its other rows. A message
costs alpha plus its bytes / beta (Hockney, 1994). Ranks of a node share its processors.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, gcd, log2
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ringtile.distributed.plan import TRANSPORTS, Demand, Transport, count_hot, count_sent, demand_of, fits_ring
from ringtile.distributed.relays import count_levels
from ringtile.distributed.ulysses import HeadPlan
from ringtile.index.covers import check_candidates
from ringtile.patterns import Causal
from ringtile.tools.predict.hardware import Hardware, flops_per_pair
from ringtile.tools.predict.work import Tiles, Work, split, survey

_Spent = dict[str, Any]
"""The fields of a cost that depend on the transport's own course."""


class Cost(NamedTuple):
    """Traffic, work and predicted time of each rank, for one transport."""

    transport: Transport
    sent: Tensor
    """int64 ``[P]``: bytes that each rank gives to collectives in the forward pass, a broadcast counted once."""
    received: Tensor
    sent_backward: Tensor
    received_backward: Tensor
    inside: Tensor
    """int64 ``[P]``: bytes that each rank sends to ranks of its node in the forward pass, a broadcast counted once."""
    between: Tensor
    """int64 ``[P]``: bytes that each rank sends to other nodes in the forward pass, a broadcast once per node."""
    messages: Tensor
    """int64 ``[P]``: messages that each rank sends in the forward pass, a broadcast counted once."""
    peers: Tensor
    """int64 ``[P]``: other ranks that each rank sends to or receives from."""
    tiles: Tensor
    """int64 ``[P]``: tiles that each rank computes, at most, for all heads."""
    flops: Tensor
    """float64 ``[P]``: multiplications and additions of the matmuls in these tiles, forward."""
    buffer: Tensor
    """int64 ``[P]``: bytes of other keys and values, and of their messages, that exist at once, forward."""
    forward: Tensor
    """float64 ``[P]``: predicted seconds, by the model."""
    backward: Tensor
    """float64 ``[P]``: predicted seconds, by the model."""
    traffic: Tensor
    """int64 ``[P, P]``: forward bytes from each rank (row) to each other, broadcasts to all."""
    copied: Tensor
    """int64 ``[P]``: bytes of the buffer that copy the rank's own keys and values, beside those of others."""
    mesh: tuple[int, int] | None = None
    """The mesh that the transport needs: number of rows, ranks of a row."""

    @property
    def balance(self) -> float:
        """Most work of a rank over the mean."""
        return float(self.flops.max() / self.flops.mean()) if self.flops.any() else 1.0

    @property
    def seconds(self) -> float:
        """Predicted seconds of the forward and the backward pass, by the model."""
        return float(self.forward.max() + self.backward.max())


def estimate(work: Work, transport: Transport, hardware: Hardware, per_row: int | None = None) -> Cost:
    """Return the cost of one transport. A hierarchy has the nodes of the hardware.

    With ``per_row``, the transport "ulysses" has a mesh: its rows of so many ranks lie inside a node and exchange
    heads, and keys travel between rows. Raises ValueError if the transport is not possible, with the reason.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {TRANSPORTS}, got {transport!r}")
    if work.reason and transport not in ("ring", "ulysses"):
        raise ValueError(work.reason)
    model = _MODELS[transport] if per_row is None else partial(_mesh, per_row=per_row)
    traffic = _Traffic(work.layout.n_ranks, hardware)
    flops = work.pairs.double() * flops_per_pair(work.sizes)[0]
    figures: _Spent = {"tiles": work.tiles, "flops": flops, "copied": torch.zeros_like(work.tiles)}
    figures |= model(work, hardware, traffic)
    peers = ((traffic.bytes > 0) | (traffic.bytes.T > 0)).sum(1)
    return Cost(transport, peers=peers, traffic=traffic.bytes, **(figures | traffic.totals))


def ranks_per_row(n_ranks: int, heads: int, hardware: Hardware) -> int | None:
    """Return the longest row, with fast links, whose ranks can share the heads. None if one node has all ranks."""
    longest = gcd(n_ranks, heads, hardware.ranks_per_node)
    return longest if longest > 1 and n_ranks > hardware.ranks_per_node else None


class _Traffic:
    """The bytes and messages of a call, added up from its collectives."""

    def __init__(self, n_ranks: int, hardware: Hardware) -> None:
        self.node = nodes_of(n_ranks, hardware)
        self.is_inside = self.node.unsqueeze(1) == self.node
        self.bytes = self.node.new_zeros(n_ranks, n_ranks)
        names = ("sent", "received", "sent_backward", "received_backward", "inside", "between", "messages")
        self.totals = {name: torch.zeros_like(self.node) for name in names}

    def add(self, **figures: Tensor | int) -> None:
        """Add to the totals of each rank."""
        for name, figure in figures.items():
            self.totals[name] += figure

    def move(self, moved: Tensor, messages: int = 1) -> None:
        """Add bytes ``[P, P]`` from rank to rank, each in so many messages. As many return backward."""
        sent, received = moved.sum(1), moved.sum(0)
        self.bytes += moved
        self.add(sent=sent, received=received, sent_backward=received, received_backward=sent)
        inside = (moved * self.is_inside).sum(1)
        self.add(inside=inside, between=sent - inside, messages=(moved > 0).sum(1) * messages)

    def broadcast(self, tokens: Tensor, group: Tensor, token: int, wide: int) -> None:
        """Add a broadcast of ``tokens`` ``[P]`` to all ranks that have the same number in ``group`` ``[P]``."""
        others = torch.zeros_like(tokens).index_add_(0, group, tokens)[group] - tokens
        self.add(sent=tokens * token, received=others * token)
        self.add(sent_backward=others * wide, received_backward=tokens * wide)
        # With nodes (0, 1) and (2, 3), the groups 0, 1, 0, 1 have the cells 0, 2, 1, 3: each rank is alone in its cell,
        # and each group is in two nodes.
        n_nodes = int(self.node.max()) + 1
        cell = group * n_nodes + self.node
        has_mates = torch.bincount(cell)[cell] > 1
        other_nodes = torch.bincount(cell.unique() // n_nodes)[group] - 1
        self.add(inside=tokens * token * has_mates, between=tokens * token * other_nodes, messages=tokens > 0)
        to_others = (group.unsqueeze(1) == group) * (tokens * token).unsqueeze(1)
        self.bytes += to_others.fill_diagonal_(0)


class _Rows(NamedTuple):
    """Seconds of each rank for its rows, float64 ``[P]``, and the tokens of its buffer."""

    forward: tuple[Tensor, Tensor, Tensor]
    """Of the rows that read the rank's own keys only, those that also read broadcast keys, and the rest."""
    backward: tuple[Tensor, Tensor, Tensor]
    n_buffer: Tensor
    n_copied: Tensor
    """Own tokens among them."""
    calls: Tensor

    @classmethod
    def of(cls, work: Work, demand: Demand, hardware: Hardware, *, gather: bool) -> Self:
        grid, parts = work.grid, split(work, gather=gather)
        arrives = demand.needs & ((~demand.holds & ~demand.is_hot) | work.is_cut.unsqueeze(1))
        tiles, ranks, tokens = work.layout.tiles(grid.block)
        n_buffer, n_copied = tokens.new_zeros(2, work.layout.n_ranks)
        for part in (parts.needs_all | arrives, parts.needs_hot):
            # The last column tile is ragged: of 700 keys in tiles of 128, it has 60, so take 68 off.
            n_buffer += part.sum(1, dtype=torch.int32) * grid.block - part[:, -1] * (-grid.n_keys % grid.block)
            n_copied.index_add_(0, ranks, tokens * part[ranks, tiles])
        # Seconds per multiplication or addition of ranks that share processors.
        turn = shared_time(work.pairs, hardware) / work.pairs.clamp(min=1) / hardware.flops
        rest = work.pairs - parts.own_pairs - parts.hot_pairs
        forward, backward = (
            (parts.own_pairs * each * turn, parts.hot_pairs * each * turn, rest * each * turn)
            for each in flops_per_pair(work.sizes)
        )
        return cls(forward, backward, n_buffer, n_copied, parts.calls)

    def spent(self, forward: Tensor, backward: Tensor, moved: Tensor, token: int, hardware: Hardware) -> _Spent:
        """Add copies and calls to both passes, and to the backward pass the rows that come first."""
        around = 2 * token * moved.double() / hardware.memory + self.calls.double() * hardware.call
        around = shared_time(around, hardware)
        times = {"forward": around + forward, "backward": around + self.backward[2] + backward}
        return {**times, "buffer": moved * token, "copied": self.n_copied * token}


def _exchange(work: Work, hardware: Hardware, traffic: _Traffic, *, gather: bool = False) -> _Spent:
    layout, grid, demand, (token, wide) = work.layout, work.grid, work.demand, work.sizes.token_bytes
    n_ranks = layout.n_ranks
    if gather:
        demand = demand_of(None, layout, grid)
    hot, cold = count_sent(layout, demand.needs, demand.is_hot, grid.block)
    traffic.move(cold * token)
    traffic.broadcast(hot, torch.zeros_like(hot), token, wide)
    # A broadcast crosses every kind of link. They run one after another.
    link, n_broadcasts = hardware.slowest(n_ranks), int((hot > 0).sum())
    hot_wire, hot_wire_back = _broadcasts(n_ranks, n_broadcasts, int(hot.sum()), token, wide, link, hardware)
    cold_wire = all_to_all_time(cold * token, hardware)
    rows = _Rows.of(work, demand, hardware, gather=gather)
    moved = cold.sum(1) + cold.sum(0) + hot.sum() + rows.n_buffer
    # Own rows run beside the broadcasts, and rows with broadcast keys beside the other exchange.
    of_own, of_hot, rest = rows.forward
    forward = torch.maximum(of_own.clamp(min=hot_wire) + of_hot, hot_wire + cold_wire) + rest
    # Backward the other way around.
    of_own, of_hot, _ = rows.backward
    backward = torch.maximum(of_hot, cold_wire)
    backward = torch.maximum(of_hot + of_own, backward + hot_wire_back)
    return rows.spent(forward, backward, moved, token, hardware)


def _hierarchy(work: Work, hardware: Hardware, traffic: _Traffic) -> _Spent:
    layout, demand, (token, wide) = work.layout, work.demand, work.sizes.token_bytes
    n_ranks, per_node = layout.n_ranks, min(hardware.ranks_per_node, layout.n_ranks)
    if n_ranks % per_node:
        raise ValueError(f"transport 'hierarchy': expected nodes of {per_node} ranks, got {n_ranks} ranks")
    n_nodes, number = n_ranks // per_node, torch.arange(n_ranks, device="cpu") % per_node
    hot = count_hot(layout, demand.is_hot, work.grid.block)
    levels = count_levels(layout, demand.needs, demand.is_hot, work.grid.block, per_node)
    crossing, (direct, handed) = _between_rows(levels[0]), (_inside_rows(level) for level in levels[1:])
    # What a rank hands to itself does not travel.
    n_kept = handed.diagonal().clone()
    handed.fill_diagonal_(0)
    # First the ranks with one number tell each other, one per node, then each tells its mates what it has heard.
    of_number = hot.view(n_nodes, per_node).sum(0).repeat(n_nodes)
    for moved in (crossing, direct, handed):
        traffic.move(moved * token)
    traffic.broadcast(hot, number, token, wide)
    traffic.broadcast(of_number, traffic.node, token, wide)
    net, node = hardware.between, hardware.in_node
    across, straight, inside = (
        _link_time(moved * token, link) for moved, link in ((crossing, net), (direct, node), (handed, node))
    )
    n_outer, n_inner = int((hot.view(n_nodes, per_node) > 0).sum(0).max()), int((of_number[:per_node] > 0).sum())
    outer, outer_back = _broadcasts(n_nodes, n_outer, int(of_number.max()), token, wide, net, hardware)
    inner, inner_back = _broadcasts(per_node, n_inner, int(hot.sum()), token, wide, node, hardware)
    rows = _Rows.of(work, demand, hardware, gather=False)
    moved = sum(x.sum(0) + x.sum(1) for x in (crossing, direct, handed)) + 2 * n_kept + hot.sum() + rows.n_buffer
    # Own rows run beside all that leaves at once, and rows with broadcast keys beside all but the broadcasts.
    of_own, of_hot, rest = rows.forward
    forward = torch.maximum(of_own.clamp(min=outer) + inner + of_hot, outer + across)
    forward = torch.maximum(forward, straight) + inside + rest
    # Backward the other way around.
    of_own, of_hot, _ = rows.backward
    backward = torch.maximum(of_hot, inside) + inner_back
    backward = torch.maximum(backward + torch.maximum(of_own, across + outer_back), straight)
    return {**rows.spent(forward, backward, moved, token, hardware), "mesh": (n_nodes, per_node)}


def _ring(work: Work, hardware: Hardware, traffic: _Traffic) -> _Spent:
    layout, n_ranks, (token, wide) = work.layout, work.layout.n_ranks, work.sizes.token_bytes
    if not fits_ring(work.pattern):
        raise ValueError(f"transport 'ring': expected the pattern dense or causal, got {work.pattern!r}")
    # Ranks pass buffers of one size, that of the rank with the most tokens.
    longest, hops = max(layout.size(rank) for rank in range(n_ranks)), n_ranks - 1
    # All hops of a rank go to the next one. Gradients make one hop more, which brings them home.
    rank = torch.arange(n_ranks, device="cpu")
    moved = rank.new_zeros(n_ranks, n_ranks)
    moved[rank, (rank + 1) % n_ranks] = hops * longest * token
    traffic.move(moved, hops)
    home = longest * wide * n_ranks if n_ranks > 1 else 0
    traffic.add(sent_backward=home, received_backward=home)
    alpha, beta = hardware.slowest(n_ranks)
    # A run of queries meets each run of keys, or each before it and itself, in a call of its own.
    every = sorted((begin, rank) for rank, runs in enumerate(layout.runs) for begin, _ in runs)
    met = torch.arange(1, len(every) + 1, device="cpu") if isinstance(work.pattern, Causal) else len(every)
    of_run = rank.new_tensor([rank for _, rank in every])
    calls = torch.zeros_like(rank).index_add_(0, of_run, torch.zeros_like(of_run) + met)
    keys, gradients = alpha + longest * token / beta, alpha + longest * wide / beta
    step, step_backward = (
        shared_time(work.pairs.double() * each / hardware.flops + calls.double() * hardware.call, hardware) / n_ranks
        for each in flops_per_pair(work.sizes)
    )
    copies = 2 * longest * token / hardware.memory
    backward = step_backward
    if n_ranks > 1:
        # While a rank computes, the next keys and the gradients of the hop before travel. The last gradients follow.
        backward = step_backward.clamp(min=keys) + step_backward.clamp(min=gradients) + gradients
        backward += (n_ranks - 2) * step_backward.clamp(min=keys + gradients)
    buffer = torch.full_like(calls, longest * token * (2 if n_ranks > 1 else 1))
    return {"forward": copies + step + hops * step.clamp(min=keys), "backward": copies + backward, "buffer": buffer}


def _exchange_heads(
    work: Work, hardware: Hardware, traffic: _Traffic, per_row: int
) -> tuple[HeadPlan, Tensor, Tensor, Tensor]:
    """Return who has which heads, the bytes that each rank gets, those of messages, and the seconds, ``[P]`` each."""
    layout, sizes = work.layout, work.sizes
    plan = HeadPlan(work.pattern, layout, 0, per_row, sizes.batch, sizes.heads, sizes.kv_heads)
    heads, key_heads = (traffic.node.new_tensor([end - begin for begin, end in plan.heads[kind]]) for kind in "qk")
    # Bytes of a token's queries, keys and values that each rank gets, and of its outputs that it returns.
    size = sizes.batch * sizes.dtype.itemsize
    into = (heads * sizes.head_dim + key_heads * sizes.width_of_head) * size
    home = heads * (sizes.width_of_head - sizes.head_dim) * size
    tokens = heads.new_tensor([layout.size(rank) for rank in range(layout.n_ranks)]).view(-1, per_row)
    # From rank to rank of each row. Tokens leave by their rank, and outputs by the rank of their heads.
    inputs, outputs = tokens.unsqueeze(2) * into, tokens.unsqueeze(1) * home.unsqueeze(1)
    for x in (inputs, outputs):
        x.diagonal(dim1=1, dim2=2).zero_()
    there, here = _inside_rows(inputs.flatten(0, 1)), _inside_rows(outputs.flatten(0, 1))
    for moved in (there, here):
        traffic.move(moved)
    wires, back = (x.sum(2) + x.sum(1) for x in (inputs, outputs))
    arriving = tokens.sum(1, keepdim=True) * into
    copied = wires + arriving + back + tokens * home.sum()
    around = shared_time(2 * copied.flatten().double() / hardware.memory + hardware.call, hardware)
    around += all_to_all_time(there, hardware) + all_to_all_time(here, hardware)
    return plan, arriving.flatten(), wires.flatten(), around


def _ulysses(work: Work, hardware: Hardware, traffic: _Traffic) -> _Spent:
    plan, arriving, wires, around = _exchange_heads(work, hardware, traffic, work.layout.n_ranks)
    tiles, pairs = _of_heads(work, plan)
    forward, backward = (
        around + shared_time(pairs.double() * each / hardware.flops, hardware) for each in flops_per_pair(work.sizes)
    )
    flops = pairs.double() * flops_per_pair(work.sizes)[0]
    times = {"forward": forward, "backward": backward}
    return {**times, "buffer": wires + arriving, "tiles": tiles, "flops": flops}


def _mesh(work: Work, hardware: Hardware, traffic: _Traffic, *, per_row: int) -> _Spent:
    plan, arriving, wires, around = _exchange_heads(work, hardware, traffic, per_row)
    columns = _columns(work, plan, hardware)
    for number, cost in enumerate(columns):
        # With two ranks per row, the ranks of column 1 are 1, 3, 5.
        traffic.bytes[number::per_row, number::per_row] += cost.traffic
        for name, total in traffic.totals.items():
            total[number::per_row] += getattr(cost, name)

    # The figures of the exchange between rows, for each rank.
    names = ("forward", "backward", "buffer", "copied", "tiles", "flops")
    spent: _Spent = {name: torch.stack([getattr(cost, name) for cost in columns], 1).flatten() for name in names}
    for name in ("forward", "backward"):
        spent[name] += around
    spent["buffer"] = arriving + torch.maximum(wires, spent["buffer"])
    return {**spent, "mesh": (work.layout.n_ranks // per_row, per_row)}


_MODELS: dict[Transport, Callable[[Work, Hardware, _Traffic], _Spent]] = {
    "exchange": _exchange,
    "gather": partial(_exchange, gather=True),
    "ring": _ring,
    "hierarchy": _hierarchy,
    "ulysses": _ulysses,
}
"""The course of a call by transport: each adds its traffic, and returns what it spends."""


def _of_heads(work: Work, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """Return the tiles and the pairs of each rank's heads, int64 ``[P]``."""
    grid = work.grid
    found: list[Tensor] = []
    tokens = (grid.n_keys - grid.block * torch.arange(grid.n_rows, device="cpu")).clamp(max=grid.block)
    for rank in range(plan.n_ranks):
        rule = replace(plan, rank=rank).rule
        if rank and rule == work.pattern:
            # No head has a pattern of its own, so each rank computes as many tiles as the first one.
            found.append(found[0])
            continue
        begin, end = plan.heads["q"][rank]
        lengths = work.listed.lengths
        groups = list(work.listed.groups(begin, end - begin))
        if not fits_ring(rule):
            check_candidates(rule, grid, max(int(lengths[group].sum()) for group, _ in groups))
        tiles = sum((copies * lengths[group] for group, copies in groups), torch.zeros_like(work.listed.row_tiles))
        found.append(torch.stack([tiles.sum(), (tiles * tokens).sum() * grid.block]))
    every = torch.stack(found)
    return every[:, 0], every[:, 1]


def _columns(work: Work, plan: HeadPlan, hardware: Hardware) -> list[Cost]:
    """Return the cost of the exchange between rows, for the ranks with each number in their row."""
    sizes, found = work.sizes, dict[tuple[object, ...], Cost]()
    # Of a node of 8 ranks in rows of 4, a column has 2 ranks: these share the node with no other of the column.
    beside = {
        name: max(1, getattr(hardware, name) // plan.n_ranks) for name in ("ranks_per_node", "processors_per_node")
    }
    costs = []
    for number in range(plan.n_ranks):
        mine = replace(plan, rank=number)
        begin, end = mine.heads["k"][number]
        kv_heads = end - begin if mine.key_at is None else len(mine.key_at)
        rule = mine.rule
        if (rule, kv_heads) not in found:
            own = replace(sizes, heads=sizes.heads // plan.n_ranks, kv_heads=kv_heads)
            listed = work.listed.parts.get((rule, own))
            if listed is None:
                of = work.listed, mine.heads["q"][number][0]
                listed = Tiles(rule, plan.layout.n_tokens, own, of)
                work.listed.parts[rule, own] = listed
            surveyed = survey(rule, plan.rows, own, listed=listed)
            found[rule, kv_heads] = estimate(surveyed, "exchange", replace(hardware, **beside))
        costs.append(found[rule, kv_heads])
    return costs


def _inside_rows(x: Tensor) -> Tensor:
    """Return what ranks send to each number of their own row, ``[P, G]``, as ``[P, P]``.

    >>> _inside_rows(torch.tensor([[0, 1], [2, 0], [0, 3], [4, 0]]))[:, 2:].tolist()
    [[0, 0], [0, 0], [0, 3], [4, 0]]
    """
    n_ranks, per_row = x.shape
    found = x.new_zeros(n_ranks // per_row, per_row, n_ranks // per_row, per_row)
    found.diagonal(dim1=0, dim2=2).copy_(x.view(-1, per_row, per_row).permute(1, 2, 0))
    return found.view(n_ranks, n_ranks)


def _between_rows(x: Tensor) -> Tensor:
    """Return what ranks send to the rank of each row that has their number, ``[P, R]``, as ``[P, P]``.

    >>> _between_rows(torch.tensor([[0, 1], [0, 2], [3, 0], [4, 0]]))[:2].tolist()
    [[0, 0, 1, 0], [0, 0, 0, 2]]
    """
    n_ranks, n_rows = x.shape
    found = x.new_zeros(n_rows, n_ranks // n_rows, n_rows, n_ranks // n_rows)
    found.diagonal(dim1=1, dim2=3).copy_(x.view(n_rows, -1, n_rows).transpose(1, 2))
    return found.view(n_ranks, n_ranks)


def shared_time(seconds: Tensor, hardware: Hardware) -> Tensor:
    """Return when each rank ends, float64 ``[P]``, if the ranks of a node share its processors evenly."""
    node = nodes_of(len(seconds), hardware)
    ranks = torch.bincount(node)[node]
    work = torch.zeros_like(seconds, dtype=torch.float64).index_add_(0, node, seconds.double())[node]
    # All take turns until the work is done, or until the longest has a processor of its own.
    turns = (ranks.double() / hardware.processors_per_node).clamp(min=1)
    return torch.minimum(seconds * turns, torch.maximum(seconds, work / hardware.processors_per_node))


def nodes_of(n_ranks: int, hardware: Hardware) -> Tensor:
    """Return the node of each rank, int64 ``[P]``."""
    return torch.arange(n_ranks, device="cpu") // hardware.ranks_per_node


def _link_time(moved: Tensor, link: tuple[float, float]) -> Tensor:
    """Return the seconds of each rank for the bytes ``[P, P]`` that it sends and receives over one kind of link."""
    alpha, beta = link
    messages = torch.maximum((moved > 0).sum(1), (moved > 0).sum(0))
    return messages.double() * alpha + torch.maximum(moved.sum(1), moved.sum(0)).double() / beta


def all_to_all_time(moved: Tensor, hardware: Hardware) -> Tensor:
    """Return the seconds of each rank, float64 ``[P]``, for bytes ``[P, P]`` from rank to rank, or their way back."""
    node = nodes_of(len(moved), hardware)
    inside = node.unsqueeze(1) == node
    return torch.maximum(_link_time(moved * inside, hardware.in_node), _link_time(moved * ~inside, hardware.between))


def _broadcasts(
    n_ranks: int, count: int, tokens: int, token: int, wide: int, link: tuple[float, float], hardware: Hardware
) -> tuple[float, float]:
    """Return the seconds of broadcasts one after another, and of the sums on the ways back."""
    if n_ranks == 1:
        return 0.0, 0.0
    # A tree of sends, and a ring that leaves each rank a part of the sum, which it sends on.
    trees = ceil(log2(n_ranks)), 2 * (n_ranks - 1) / n_ranks
    times, times_back = trees if hardware.has_trees else (1, 1)
    (alpha, beta), steps = link, count * ceil(log2(n_ranks))
    return steps * alpha + times * tokens * token / beta, steps * alpha + times_back * tokens * wide / beta
