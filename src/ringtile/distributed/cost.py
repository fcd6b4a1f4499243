"""Bytes, work and memory of each rank, and a model of the time: pure functions on the host, without communication.

Bytes, messages and peers are exact. Work and memory come from the covers of the pattern, like plans. Times are a model:
the slowest rank's copies, then its exchange beside the rows that do not wait for it, then its other rows. A message
costs alpha plus its bytes / beta (Hockney, 1994). Ranks of a node share its processors.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.hardware import HARDWARE, Hardware, Sizes, flops_per_pair
from ringtile.distributed.layout import Layout
from ringtile.distributed.plan import RING_PATTERNS, TRANSPORTS, Transport, count_sent, find_demand
from ringtile.distributed.work import Work, split, survey
from ringtile.patterns import Causal, Pattern


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

    @property
    def balance(self) -> float:
        """Most work of a rank over the mean."""
        return float(self.flops.max() / self.flops.mean()) if self.flops.any() else 1.0

    @property
    def seconds(self) -> float:
        """Predicted seconds of the forward and the backward pass, by the model."""
        return float(self.forward.max() + self.backward.max())


def estimate(work: Work, transport: Transport, hardware: Hardware) -> Cost:
    """Return the cost of one transport.

    Raises ValueError if the transport does not support the pattern, or ranks cannot build their indices.

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
    if work.reason:
        raise ValueError(work.reason)
    return _exchange(work, transport, hardware)


LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
"""Layouts by name."""


def cheapest_layout(
    pattern: Pattern, n_tokens: int, n_ranks: int, sizes: Sizes | None = None, hardware: Hardware = HARDWARE["h100"]
) -> Layout:
    """Return the layout with the least predicted time of both passes: contiguous, zigzag or striped.

    It weighs work, balance and bytes with the transport that `ring_attention` takes by default. The same arguments
    give the same layout, so ranks need not agree on it. ``sizes`` are those of `Sizes` by default. Raises ValueError
    if no layout supports the pattern, with the reason.

    >>> from ringtile.patterns import Causal, Window
    >>> cheapest_layout(Causal() & Window(4096), 1 << 20, 8) == Layout.contiguous(1 << 20, 8)
    True
    >>> cheapest_layout(Causal(), 1 << 20, 8) == Layout.zigzag(1 << 20, 8)
    True
    """
    found, reason = [], None
    for name, make in LAYOUTS.items():
        work = survey(pattern, make(n_tokens, n_ranks), sizes or Sizes(heads=pattern.num_heads or 32))
        try:
            found.append((estimate(work, work.automatic, hardware).seconds, name))
        except ValueError as error:
            reason = reason or error
    if not found:
        assert reason is not None
        raise reason
    return LAYOUTS[min(found, key=lambda pair: pair[0])[1]](n_tokens, n_ranks)


def _exchange(work: Work, transport: Transport, hardware: Hardware) -> Cost:
    layout, sizes, grid, demand = work.layout, work.sizes, work.grid, work.demand
    n_ranks, block = layout.n_ranks, grid.block
    if transport == "gather":
        demand = find_demand(work.pattern, layout, grid, gather=True)
    hot, cold = count_sent(layout, demand.needs, demand.is_hot, block)
    others_hot = hot.sum() - hot
    token = sizes.width * sizes.dtype.itemsize
    wide = sizes.width * sizes.accumulator.itemsize
    sent, received = cold.sum(1), cold.sum(0)
    parts = split(work, gather=transport == "gather")
    arrives = demand.needs & ((~demand.holds & ~demand.is_hot) | work.is_cut.unsqueeze(1))
    n_buffer = torch.zeros(n_ranks, dtype=torch.int64)
    for part in (parts.needs_all | arrives, parts.needs_hot):
        n_buffer += part.sum(1) * block - part[:, -1] * (-grid.n_keys % block)
    n_broadcasts = int((hot > 0).sum())
    linked = (cold > 0) | (cold.T > 0) | (hot > 0) | (hot > 0).unsqueeze(1)
    peers = linked.fill_diagonal_(False).sum(1)
    traffic = (cold + hot.unsqueeze(1)).fill_diagonal_(0) * token
    # A broadcast crosses every kind of link. They run one after another.
    alpha, beta = _slowest(n_ranks, hardware)
    steps = n_broadcasts * ceil(log2(n_ranks)) if n_ranks > 1 else 0
    times, times_back = _broadcast_times(n_ranks, hardware)
    cold_wire, cold_wire_back = (_all_to_all(traffic * token, hardware) for traffic in (cold, cold.T))
    hot_wire = steps * alpha + times * int(hot.sum()) * token / beta
    hot_wire_back = steps * alpha + times_back * int(hot.sum()) * wide / beta
    moved = sent + received + hot.sum() + n_buffer
    around = _shared(2 * moved * token / hardware.memory + parts.calls * hardware.call, hardware)
    # Seconds per multiplication or addition of ranks that share processors.
    turn = _shared(work.pairs, hardware) / work.pairs.clamp(min=1) / hardware.flops
    pairs = parts.own_pairs, parts.hot_pairs, work.pairs - parts.own_pairs - parts.hot_pairs
    times_of = ([n * each * turn for n in pairs] for each in flops_per_pair(sizes))
    (own, with_hot, rest), (own_back, with_hot_back, rest_back) = times_of
    # Own rows run beside the broadcasts, and rows with broadcast keys beside the other exchange.
    forward = torch.maximum(own.clamp(min=hot_wire) + with_hot, hot_wire + cold_wire) + rest
    # Backward the other way around.
    backward = torch.maximum(with_hot_back, cold_wire_back)
    backward = torch.maximum(with_hot_back + own_back, backward + hot_wire_back)
    return Cost(
        transport,
        (sent + hot) * token,
        (received + others_hot) * token,
        received * token + others_hot * wide,
        sent * token + hot * wide,
        (cold > 0).sum(1) + (hot > 0),
        peers,
        work.tiles,
        work.pairs.double() * flops_per_pair(sizes)[0],
        (sent + received + hot.sum() + n_buffer) * token,
        around + forward,
        around + rest_back + backward,
        traffic,
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
        _shared(work.pairs * each / hardware.flops + calls * hardware.call, hardware) / n_ranks
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
    return Cost(
        "ring",
        ones * hops * longest * token,
        ones * hops * longest * token,
        ones * longest * (hops * token + home * wide),
        ones * longest * (hops * token + home * wide),
        ones * hops,
        ones * min(hops, 2),
        work.tiles,
        work.pairs.double() * per_pair,
        ones * longest * token * (2 if n_ranks > 1 else 1),
        copies + step + hops * step.clamp(min=keys),
        copies + (backward if n_ranks > 1 else step_backward),
        traffic,
    )


def _shared(seconds: Tensor, hardware: Hardware) -> Tensor:
    """Return when each rank ends, float64 ``[P]``, if the ranks of a node share its processors evenly."""
    node = torch.arange(len(seconds)) // hardware.ranks_per_node
    ranks = torch.bincount(node)[node]
    work = torch.zeros(len(seconds), dtype=torch.float64).index_add_(0, node, seconds.double())[node]
    # All take turns until the work is done, or until the longest has a processor of its own.
    turns = (ranks / hardware.processors_per_node).clamp(min=1)
    return torch.minimum(seconds * turns, torch.maximum(seconds, work / hardware.processors_per_node))


def _broadcast_times(n_ranks: int, hardware: Hardware) -> tuple[float, float]:
    """Return how often a link carries the whole message of a broadcast and of a reduce to one rank."""
    if not hardware.has_trees or n_ranks == 1:
        return 1, 1
    # A tree of sends, and a ring that leaves each rank a part of the sum, which it sends on.
    return ceil(log2(n_ranks)), 2 * (n_ranks - 1) / n_ranks


def _slowest(n_ranks: int, hardware: Hardware) -> tuple[float, float]:
    """Return alpha and beta of the slowest link that a collective of all ranks crosses."""
    if n_ranks > hardware.ranks_per_node:
        return hardware.net_alpha, hardware.net_beta
    return hardware.node_alpha, hardware.node_beta


def _all_to_all(traffic: Tensor, hardware: Hardware) -> Tensor:
    """Return the seconds of each rank, float64 ``[P]``, for bytes ``[P, P]`` from rank to rank."""
    node = torch.arange(len(traffic)) // hardware.ranks_per_node
    inside = node.unsqueeze(1) == node
    seconds = []
    for part, alpha, beta in (
        (traffic * inside, hardware.node_alpha, hardware.node_beta),
        (traffic * ~inside, hardware.net_alpha, hardware.net_beta),
    ):
        messages = torch.maximum((part > 0).sum(0), (part > 0).sum(1))
        seconds.append(messages * alpha + torch.maximum(part.sum(0), part.sum(1)) / beta)
    return torch.maximum(*seconds).double()
