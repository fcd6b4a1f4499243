"""Bytes, work and memory of each rank, and a model of the time: pure functions on the host, without communication.

Bytes, messages and peers are exact. Work and memory come from the covers of the pattern, like plans. Times are a model:
the slowest rank's copies, then its exchange beside the rows that do not wait for it, then its other rows. Nothing runs
beside an exchange of heads. A message costs alpha plus its bytes / beta (Hockney, 1994). Ranks of a node share its
processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.heads import HeadPlan
from ringtile.distributed.layout import LAYOUTS, Layout
from ringtile.distributed.plan import RING_PATTERNS, TRANSPORTS, Demand, Transport, count_hot, count_sent, find_demand
from ringtile.distributed.relays import count_levels
from ringtile.index.covers import check_candidates
from ringtile.patterns import Causal, Pattern
from ringtile.tools.predict.hardware import HARDWARE, Hardware, Sizes, flops_per_pair
from ringtile.tools.predict.work import Tiles, Work, split, survey


class Cost(NamedTuple):
    """Traffic, work and predicted time of each rank, for one transport.

    Bytes are those of keys and values and their gradients. A key mask adds a bit per key.
    """

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


def estimate(work: Work, transport: Transport, hardware: Hardware) -> Cost:
    """Return the cost of one transport. A hierarchy has the nodes of the hardware.

    Raises ValueError if the transport does not support the pattern or the number of ranks, or ranks cannot build their
    indices.

    >>> from ringtile.patterns import Causal, Window
    >>> work = survey(Causal() & Window(4096), Layout.contiguous(1 << 20, 64), Sizes())
    >>> cost = estimate(work, "exchange", HARDWARE["h100"])
    >>> int(cost.received.max()) / 2**20, int(cost.peers.max())
    (16.0, 2)
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {TRANSPORTS}, got {transport!r}")
    if transport == "ring":
        return _ring(work, hardware)
    if transport == "ulysses":
        return _ulysses(work, hardware)
    if work.reason:
        raise ValueError(work.reason)
    return _hierarchy(work, hardware) if transport == "hierarchy" else _exchange(work, transport, hardware)


"""Layouts by name."""


class ModelCost(NamedTuple):
    """A layout for all layers of a model, and a transport for each pattern."""

    layout: Layout
    transports: dict[Pattern, Transport]
    costs: dict[Pattern, Cost]
    """Cost of one layer of each pattern."""
    seconds: float
    """Predicted seconds of the forward and the backward pass of all layers, by the model of time."""


def cheapest_layout(
    pattern: Pattern | Mapping[Pattern, int],
    n_tokens: int,
    n_ranks: int,
    sizes: Sizes | None = None,
    hardware: Hardware = HARDWARE["h100"],
) -> Layout:
    """Return the layout with the least predicted time of both passes: contiguous, zigzag or striped.

    It weighs work, balance and bytes with the transport that `ring_attention` takes by default. The same arguments
    give the same layout, so ranks need not agree on it. For a model whose layers differ, pass the number of layers of
    each pattern. ``sizes`` are those of `Sizes` by default. Raises ValueError if no layout supports the patterns, with
    the reason.

    >>> from ringtile.patterns import Causal, Window
    >>> cheapest_layout(Causal() & Window(4096), 1 << 20, 8) == Layout.contiguous(1 << 20, 8)
    True
    >>> cheapest_layout({Causal() & Window(4096): 20, Causal(): 4}, 1 << 20, 8) == Layout.zigzag(1 << 20, 8)
    True
    """
    layers = {pattern: 1} if isinstance(pattern, Pattern) else pattern
    return _cheapest(layers, n_tokens, n_ranks, sizes, hardware, None).layout


def cheapest_for_model(
    layers: Mapping[Pattern, int],
    n_tokens: int,
    n_ranks: int,
    sizes: Sizes | None = None,
    hardware: Hardware = HARDWARE["h100"],
    transports: Sequence[Transport] = TRANSPORTS,
) -> ModelCost:
    """Return one layout for all layers of a model, and a transport for each pattern, with the least predicted time.

    ``layers`` has the number of layers of each pattern. Pass the result's ``transports`` to `ring_attend`. The choice
    is among ``transports``: leave out "ring" if you use dropout or compile, and "hierarchy" if you have no mesh of
    nodes. It is only considered if the ranks span nodes. Raises ValueError if a number of layers is not positive, or a
    pattern has no possible transport, with the reason.

    >>> from ringtile.patterns import Causal, Window
    >>> found = cheapest_for_model({Causal() & Window(1024): 20, Causal(): 4}, 1 << 18, 8)
    >>> found.layout == Layout.zigzag(1 << 18, 8)
    True
    >>> found.transports
    {causal & window(1024): 'exchange', causal: 'ring'}
    """
    return _cheapest(layers, n_tokens, n_ranks, sizes, hardware, transports)


def _cheapest(
    layers: Mapping[Pattern, int],
    n_tokens: int,
    n_ranks: int,
    sizes: Sizes | None,
    hardware: Hardware,
    transports: Sequence[Transport] | None,
) -> ModelCost:
    if not layers or not all(type(count) is int and count > 0 for count in layers.values()):
        raise ValueError(f"layers: expected a positive number of layers of each pattern, got {dict(layers)}")
    heads = next((pattern.num_heads for pattern in layers if pattern.num_heads is not None), 32)
    found, reason = [], None
    sizes = sizes or Sizes(heads=heads)
    listed: dict[Pattern, Tiles] = {}
    for make in LAYOUTS.values():
        try:
            layout = make(n_tokens, n_ranks)
            found.append(cost_of_model(layers, layout, sizes, hardware, transports, listed))
        except ValueError as error:
            reason = reason or error
    if not found:
        assert reason is not None
        raise reason
    return min(found, key=lambda cost: cost.seconds)


def cost_of_model(
    layers: Mapping[Pattern, int],
    layout: Layout,
    sizes: Sizes,
    hardware: Hardware,
    transports: Sequence[Transport] | None = TRANSPORTS,
    listed: dict[Pattern, Tiles] | None = None,
) -> ModelCost:
    """Return the cost of a model's layers in one layout, each pattern with its cheapest of these transports.

    None: the transport that `ring_attention` takes by default. If you compare layouts, pass the same dict ``listed``
    for all. Raises ValueError as `cheapest_for_model`.
    """
    costs = {}
    listed = {} if listed is None else listed
    for pattern in layers:
        if pattern not in listed:
            listed[pattern] = Tiles(pattern, layout.n_tokens, sizes)
        work = survey(pattern, layout, sizes, listed=listed[pattern])
        found, reason = [], None
        for transport in (work.automatic,) if transports is None else transports:
            if transport == "hierarchy" and layout.n_ranks <= hardware.ranks_per_node:
                continue
            try:
                found.append(estimate(work, transport, hardware))
            except ValueError as error:
                reason = reason or error
        if not found:
            raise reason or ValueError(f"transports: expected one for {pattern!r}, got {list(transports or ())}")
        costs[pattern] = min(found, key=lambda cost: cost.seconds)
    chosen = {pattern: cost.transport for pattern, cost in costs.items()}
    return ModelCost(layout, chosen, costs, sum(count * costs[pattern].seconds for pattern, count in layers.items()))


class _Rows(NamedTuple):
    """Seconds of each rank for its rows, float64 ``[P]``, and the tokens of its buffer."""

    own: Tensor
    """Rows that read the rank's own keys only."""
    hot: Tensor
    """Rows that also read broadcast keys."""
    rest: Tensor
    n_buffer: Tensor
    n_copied: Tensor
    """Own tokens among them."""
    calls: Tensor

    @classmethod
    def of(cls, work: Work, demand: Demand, hardware: Hardware, *, gather: bool) -> tuple[_Rows, _Rows]:
        """Return those of the forward and of the backward pass."""
        grid, parts = work.grid, split(work, gather=gather)
        arrives = demand.needs & ((~demand.holds & ~demand.is_hot) | work.is_cut.unsqueeze(1))
        n_buffer, n_copied = torch.zeros(2, work.layout.n_ranks, dtype=torch.int64)
        tiles, ranks, tokens = work.layout.tiles(grid.block)
        for part in (parts.needs_all | arrives, parts.needs_hot):
            n_buffer += part.sum(1, dtype=torch.int32) * grid.block - part[:, -1] * (-grid.n_keys % grid.block)
            n_copied.index_add_(0, ranks, tokens * part[ranks, tiles])
        # Seconds per multiplication or addition of ranks that share processors.
        turn = shared_time(work.pairs, hardware) / work.pairs.clamp(min=1) / hardware.flops
        pairs = parts.own_pairs, parts.hot_pairs, work.pairs - parts.own_pairs - parts.hot_pairs

        def rows(per_pair: int) -> _Rows:
            own, hot, rest = (n * per_pair * turn for n in pairs)
            return cls(own, hot, rest, n_buffer, n_copied, parts.calls)

        forward, backward = flops_per_pair(work.sizes)
        return rows(forward), rows(backward)

    def around(self, moved: Tensor, token: int, hardware: Hardware) -> Tensor:
        """Return the seconds of copies and calls, float64 ``[P]``."""
        return shared_time(2 * moved * token / hardware.memory + self.calls * hardware.call, hardware)


def _exchange(work: Work, transport: Transport, hardware: Hardware) -> Cost:
    layout, sizes, grid, demand = work.layout, work.sizes, work.grid, work.demand
    n_ranks, is_gather = layout.n_ranks, transport == "gather"
    if is_gather:
        demand = find_demand(work.pattern, layout, grid, gather=True)
    hot, cold = count_sent(layout, demand.needs, demand.is_hot, grid.block)
    others_hot = hot.sum() - hot
    token = sizes.width * sizes.dtype.itemsize
    wide = sizes.width * sizes.accumulator.itemsize
    sent, received = cold.sum(1), cold.sum(0)
    rows, back = _Rows.of(work, demand, hardware, gather=is_gather)
    linked = (cold > 0) | (cold.T > 0) | (hot > 0) | (hot > 0).unsqueeze(1)
    peers = linked.fill_diagonal_(False).sum(1)
    traffic = (cold + hot.unsqueeze(1)).fill_diagonal_(0) * token
    node = nodes_of(n_ranks, hardware)
    is_inside = node.unsqueeze(1) == node
    n_mates = is_inside.sum(1)
    # A broadcast crosses every kind of link. They run one after another.
    link, n_broadcasts = _slowest(n_ranks, hardware), int((hot > 0).sum())
    hot_wire, hot_wire_back = _broadcasts(n_ranks, n_broadcasts, int(hot.sum()), token, wide, link, hardware)
    cold_wire = all_to_all_time(cold * token, hardware)
    moved = sent + received + hot.sum() + rows.n_buffer
    around = rows.around(moved, token, hardware)
    # Own rows run beside the broadcasts, and rows with broadcast keys beside the other exchange.
    forward = torch.maximum(rows.own.clamp(min=hot_wire) + rows.hot, hot_wire + cold_wire) + rows.rest
    # Backward the other way around.
    backward = torch.maximum(back.hot, cold_wire)
    backward = torch.maximum(back.hot + back.own, backward + hot_wire_back)
    return Cost(
        transport,
        (sent + hot) * token,
        (received + others_hot) * token,
        received * token + others_hot * wide,
        sent * token + hot * wide,
        ((cold * is_inside).sum(1) + hot * (n_mates > 1)) * token,
        ((cold * ~is_inside).sum(1) + hot * int(node.max())) * token,
        (cold > 0).sum(1) + (hot > 0),
        peers,
        work.tiles,
        work.pairs.double() * flops_per_pair(sizes)[0],
        moved * token,
        around + forward,
        around + back.rest + backward,
        traffic,
        rows.n_copied * token,
    )


def _hierarchy(work: Work, hardware: Hardware) -> Cost:
    layout, sizes, demand = work.layout, work.sizes, work.demand
    n_ranks, per_node = layout.n_ranks, min(hardware.ranks_per_node, layout.n_ranks)
    if n_ranks % per_node:
        raise ValueError(f"transport 'hierarchy': expected nodes of {per_node} ranks, got {n_ranks} ranks")
    n_nodes = n_ranks // per_node
    token = sizes.width * sizes.dtype.itemsize
    wide = sizes.width * sizes.accumulator.itemsize
    hot = count_hot(layout, demand.is_hot, work.grid.block)
    crossing, direct, kept_or_handed = count_levels(layout, demand.needs, demand.is_hot, work.grid.block, per_node)
    # From node, from number, to node or number. What a rank hands to itself does not travel.
    shape = (n_nodes, per_node)
    n_kept = kept_or_handed.unflatten(0, shape).diagonal(dim1=1, dim2=2).flatten()
    handed = kept_or_handed.clone()
    handed.unflatten(0, shape).diagonal(dim1=1, dim2=2).zero_()
    arriving = crossing.unflatten(0, shape).permute(2, 1, 0).flatten(0, 1)
    direct_in, handed_in = (x.unflatten(0, shape).transpose(1, 2).flatten(0, 1) for x in (direct, handed))
    # The broadcasts of all ranks with one number, for each rank.
    of_number = hot.view(shape).sum(0).repeat(n_nodes)
    sent = crossing.sum(1) + direct.sum(1) + handed.sum(1)
    received = arriving.sum(1) + direct_in.sum(1) + handed_in.sum(1)
    others_hot = hot.sum() - hot
    net, node = (hardware.net_alpha, hardware.net_beta), (hardware.node_alpha, hardware.node_beta)
    across = _wires(crossing, arriving, token, net)
    straight, inside = (_wires(*way, token, node) for way in ((direct, direct_in), (handed, handed_in)))
    n_outer, n_inner = int((hot.view(shape) > 0).sum(0).max()), int((of_number[:per_node] > 0).sum())
    outer, outer_back = _broadcasts(n_nodes, n_outer, int(of_number.max()), token, wide, net, hardware)
    inner, inner_back = _broadcasts(per_node, n_inner, int(hot.sum()), token, wide, node, hardware)
    rows, back = _Rows.of(work, demand, hardware, gather=False)
    moved = sent + received + 2 * n_kept + hot.sum() + rows.n_buffer
    around = rows.around(moved, token, hardware)
    # Own rows run beside all that leaves at once, and rows with broadcast keys beside all but the broadcasts.
    forward = torch.maximum(rows.own.clamp(min=outer) + inner + rows.hot, outer + across)
    forward = torch.maximum(forward, straight) + inside + rows.rest
    # Backward the other way around.
    backward = torch.maximum(back.hot, inside) + inner_back
    backward = torch.maximum(backward + torch.maximum(back.own, across + outer_back), straight)
    traffic = torch.zeros(n_ranks, n_ranks, dtype=torch.int64)
    by_level = traffic.view(*shape, *shape)
    # From node, from number, to node, to number.
    to_nodes = (crossing + hot.unsqueeze(1)).unflatten(0, shape)
    to_mates = (direct + handed + of_number.unsqueeze(1)).unflatten(0, shape)
    by_level.diagonal(dim1=1, dim2=3).add_(to_nodes.transpose(1, 2))
    by_level.diagonal(dim1=0, dim2=2).add_(to_mates.permute(1, 2, 0))
    traffic.fill_diagonal_(0)
    return Cost(
        "hierarchy",
        (sent + hot + of_number) * token,
        (received + others_hot) * token,
        received * token + others_hot * wide,
        sent * token + (hot + of_number) * wide,
        (direct.sum(1) + handed.sum(1) + of_number * (per_node > 1)) * token,
        (crossing.sum(1) + hot * (n_nodes - 1)) * token,
        sum((x > 0).sum(1) for x in (crossing, direct, handed)) + (hot > 0) + (of_number > 0),
        ((traffic > 0) | (traffic.T > 0)).sum(1),
        work.tiles,
        work.pairs.double() * flops_per_pair(sizes)[0],
        moved * token,
        around + forward,
        around + back.rest + backward,
        traffic * token,
        rows.n_copied * token,
        (n_nodes, per_node),
    )


def _ring(work: Work, hardware: Hardware) -> Cost:
    layout, sizes = work.layout, work.sizes
    n_ranks = layout.n_ranks
    if not isinstance(work.pattern, RING_PATTERNS):
        raise ValueError(f"transport 'ring': expected the pattern dense or causal, got {work.pattern!r}")
    longest = max(layout.size(rank) for rank in range(n_ranks))
    token = sizes.width * sizes.dtype.itemsize
    wide = sizes.width * sizes.accumulator.itemsize
    hops = n_ranks - 1
    alpha, beta = _slowest(n_ranks, hardware)
    per_pair, per_pair_backward = flops_per_pair(sizes)
    # A run of queries meets each run of keys, or each before it and itself, in a call of its own.
    every = sorted((begin, rank) for rank, runs in enumerate(layout.runs) for begin, _ in runs)
    met = torch.arange(1, len(every) + 1) if isinstance(work.pattern, Causal) else len(every)
    of_run = torch.tensor([rank for _, rank in every])
    calls = torch.zeros(n_ranks, dtype=torch.int64).index_add_(0, of_run, torch.zeros_like(of_run) + met)
    ones = torch.ones(n_ranks, dtype=torch.int64)
    keys = alpha + longest * token / beta
    gradients = alpha + longest * wide / beta
    step, step_backward = (
        shared_time(work.pairs * each / hardware.flops + calls * hardware.call, hardware) / n_ranks
        for each in (per_pair, per_pair_backward)
    )
    copies = 2 * longest * token / hardware.memory
    home = n_ranks if n_ranks > 1 else 0
    # While a rank computes, the next keys and the gradients of the hop before travel. The last gradients follow.
    backward = step_backward.clamp(min=keys) + step_backward.clamp(min=gradients) + gradients
    backward += max(0, n_ranks - 2) * step_backward.clamp(min=keys + gradients)
    rank = torch.arange(n_ranks)
    traffic = torch.zeros(n_ranks, n_ranks, dtype=torch.int64)
    traffic[rank, (rank + 1) % n_ranks] = hops * longest * token
    node = nodes_of(n_ranks, hardware)
    stays = node == node.roll(-1)
    return Cost(
        "ring",
        ones * hops * longest * token,
        ones * hops * longest * token,
        ones * longest * (hops * token + home * wide),
        ones * longest * (hops * token + home * wide),
        stays * hops * longest * token,
        ~stays * hops * longest * token,
        ones * hops,
        ones * min(hops, 2),
        work.tiles,
        work.pairs.double() * per_pair,
        ones * longest * token * (2 if n_ranks > 1 else 1),
        copies + step + hops * step.clamp(min=keys),
        copies + (backward if n_ranks > 1 else step_backward),
        traffic,
        ones * 0,
    )


def _ulysses(work: Work, hardware: Hardware) -> Cost:
    layout, sizes = work.layout, work.sizes
    n_ranks, value_dim = layout.n_ranks, sizes.value_dim
    assert value_dim is not None
    plan = HeadPlan(work.pattern, layout, 0, n_ranks, sizes.batch, sizes.heads, sizes.kv_heads)
    tokens = torch.tensor(plan.tokens)
    heads, key_heads = (torch.tensor([end - begin for begin, end in plan.heads[kind]]) for kind in "qk")
    tiles, pairs = _of_heads(work, plan)
    # Bytes of a token's queries, keys and values that each rank gets, and of its outputs that it returns.
    into = (heads * sizes.head_dim + key_heads * (sizes.head_dim + value_dim)) * sizes.batch * sizes.dtype.itemsize
    home = heads * value_dim * sizes.batch * sizes.dtype.itemsize
    inputs, outputs = (tokens.unsqueeze(1) * into).fill_diagonal_(0), (tokens * home.unsqueeze(1)).fill_diagonal_(0)
    traffic = inputs + outputs
    sent, received = traffic.sum(1), traffic.sum(0)
    buffer = inputs.sum(1) + inputs.sum(0) + layout.n_tokens * into
    moved = buffer + outputs.sum(1) + outputs.sum(0) + tokens * home.sum()
    around = shared_time(2 * moved / hardware.memory + hardware.call, hardware)
    around += all_to_all_time(inputs, hardware) + all_to_all_time(outputs, hardware)
    forward, backward = (
        around + shared_time(pairs * per_pair / hardware.flops, hardware) for per_pair in flops_per_pair(sizes)
    )
    node = nodes_of(n_ranks, hardware)
    is_inside = node.unsqueeze(1) == node
    return Cost(
        "ulysses",
        sent,
        received,
        received,
        sent,
        (traffic * is_inside).sum(1),
        (traffic * ~is_inside).sum(1),
        (inputs > 0).sum(1) + (outputs > 0).sum(1),
        ((traffic > 0) | (traffic.T > 0)).sum(1),
        tiles,
        pairs.double() * flops_per_pair(sizes)[0],
        buffer,
        forward,
        backward,
        traffic,
        torch.zeros_like(buffer),
    )


def _of_heads(work: Work, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """Return the tiles and the pairs of each rank's heads, int64 ``[P]``."""
    grid, n_ranks = work.grid, plan.n_ranks
    found: list[Tensor] = []
    tokens = (grid.n_keys - grid.block * torch.arange(grid.n_rows)).clamp(max=grid.block)
    for rank in range(n_ranks):
        rule = replace(plan, rank=rank).rule
        if rank and rule == work.pattern:
            # All ranks have the same.
            found.append(found[0])
            continue
        begin, end = plan.heads["q"][rank]
        lengths = work.listed.lengths
        groups = list(work.listed.groups(begin, end - begin))
        if not isinstance(rule, RING_PATTERNS):
            check_candidates(rule, grid, max(int(lengths[group].sum()) for group, _ in groups))
        tiles = sum((copies * lengths[group] for group, copies in groups), torch.zeros_like(work.listed.row_tiles))
        found.append(torch.stack([tiles.sum(), (tiles * tokens).sum() * grid.block]))
    every = torch.stack(found)
    return every[:, 0], every[:, 1]


def shared_time(seconds: Tensor, hardware: Hardware) -> Tensor:
    """Return when each rank ends, float64 ``[P]``, if the ranks of a node share its processors evenly."""
    node = nodes_of(len(seconds), hardware)
    ranks = torch.bincount(node)[node]
    work = torch.zeros(len(seconds), dtype=torch.float64).index_add_(0, node, seconds.double())[node]
    # All take turns until the work is done, or until the longest has a processor of its own.
    turns = (ranks / hardware.processors_per_node).clamp(min=1)
    return torch.minimum(seconds * turns, torch.maximum(seconds, work / hardware.processors_per_node))


def nodes_of(n_ranks: int, hardware: Hardware) -> Tensor:
    """Return the node of each rank, int64 ``[P]``."""
    return torch.arange(n_ranks) // hardware.ranks_per_node


def _wires(sent: Tensor, received: Tensor, token: int, link: tuple[float, float]) -> Tensor:
    """Return the seconds of each rank for the tokens that it sends to others and receives, float64 ``[P]``."""
    messages = torch.maximum((sent > 0).sum(1), (received > 0).sum(1))
    alpha, beta = link
    return messages.double() * alpha + torch.maximum(sent.sum(1), received.sum(1)) * token / beta


def _broadcasts(
    n_ranks: int, count: int, tokens: int, token: int, wide: int, link: tuple[float, float], hardware: Hardware
) -> tuple[float, float]:
    """Return the seconds of broadcasts one after another, and of the sums on the ways back."""
    if n_ranks == 1:
        return 0.0, 0.0
    times, times_back = _broadcast_times(n_ranks, hardware)
    (alpha, beta), steps = link, count * ceil(log2(n_ranks))
    return steps * alpha + times * tokens * token / beta, steps * alpha + times_back * tokens * wide / beta


def _broadcast_times(n_ranks: int, hardware: Hardware) -> tuple[float, float]:
    """Return how often a link carries the whole message of a broadcast and of a reduce to one rank."""
    if not hardware.has_trees:
        return 1, 1
    # A tree of sends, and a ring that leaves each rank a part of the sum, which it sends on.
    return ceil(log2(n_ranks)), 2 * (n_ranks - 1) / n_ranks


def _slowest(n_ranks: int, hardware: Hardware) -> tuple[float, float]:
    """Return alpha and beta of the slowest link that a collective of all ranks crosses."""
    if n_ranks > hardware.ranks_per_node:
        return hardware.net_alpha, hardware.net_beta
    return hardware.node_alpha, hardware.node_beta


def all_to_all_time(traffic: Tensor, hardware: Hardware) -> Tensor:
    """Return the seconds of each rank, float64 ``[P]``, for bytes ``[P, P]`` from rank to rank, or for their way back.

    Links carry as much in both directions at once, so both take the same time.
    """
    node = nodes_of(len(traffic), hardware)
    inside = node.unsqueeze(1) == node
    seconds = []
    for part, alpha, beta in (
        (traffic * inside, hardware.node_alpha, hardware.node_beta),
        (traffic * ~inside, hardware.net_alpha, hardware.net_beta),
    ):
        messages = torch.maximum((part > 0).sum(0), (part > 0).sum(1))
        seconds.append(messages * alpha + torch.maximum(part.sum(0), part.sum(1)) / beta)
    return torch.maximum(*seconds).double()
