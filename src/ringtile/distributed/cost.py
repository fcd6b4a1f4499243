"""Bytes, work and memory of each rank, and a model of the time: pure functions on the host, without communication.

Bytes, messages and peers are exact. Work and memory come from the covers of the pattern, like plans. Times are a model:
the slowest rank's copies, then its exchange beside the rows that do not wait for it, then its other rows. A message
costs alpha plus its bytes / beta (Hockney, 1994). Ranks of a node share its processors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.layout import Layout
from ringtile.distributed.plan import (
    MAX_PIECES,
    RING_PATTERNS,
    TRANSPORTS,
    Demand,
    Transport,
    count_sent,
    find_demand,
    is_better_gathered,
    is_cut,
)
from ringtile.layout import candidates, needed
from ringtile.layout.covers import MAX_BYTES, check_candidates
from ringtile.patterns import Causal, Pattern
from ringtile.patterns.base import TileGrid

MAX_RANKS = 4096
"""Traffic is a matrix of all pairs of ranks."""


@dataclass(frozen=True)
class Hardware:
    """Figures of a cluster that predictions use. Links inside a node and between nodes work at the same time.

    Raises ValueError if a figure is not a positive number.
    """

    name: str
    assumption: str
    """Source of the figures, in one line."""
    ranks_per_node: int
    node_alpha: float
    """Seconds per message inside a node."""
    node_beta: float
    """Bytes per second, rank and direction inside a node."""
    net_alpha: float
    """Seconds per message between nodes."""
    net_beta: float
    """Bytes per second, rank and direction between nodes."""
    processors_per_node: int
    """Accelerators of a node, or cores with one thread per rank. More ranks than that share them."""
    has_trees: bool
    """True if a rank of a broadcast sends the whole message to several, one after another, as gloo does. False if the
    message passes through all ranks in pieces, as in NCCL."""
    flops: float
    """Matrix operations per second and processor that attention reaches."""
    memory: float
    """Bytes per second and processor that copies read or write."""
    call: float
    """Seconds per attention call, before it computes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                is_valid, expected = isinstance(value, str), "a string"
            elif field.type == "bool":
                is_valid, expected = isinstance(value, bool), "true or false"
            elif field.type == "int":
                is_valid, expected = type(value) is int and value > 0, "a positive integer"
            else:
                is_valid = type(value) in (int, float) and 0 < value < float("inf")
                expected = "a positive number"
            if not is_valid:
                raise ValueError(f"{field.name}: expected {expected}, got {value!r}")

    @classmethod
    def read(cls, path: Path) -> Hardware:
        """Read a JSON object with all fields. Raises ValueError if the file has other content."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected a JSON object, got {error}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            got = ", ".join(found) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"{path}: expected an object with {', '.join(names)}, got {got}")
        return cls(**found)


def _accelerator(name: str, link: float, network: float, flops: float, memory: float) -> Hardware:
    """Return a cluster of eight accelerators per node, from figures of the vendor in units of 10^9."""
    return Hardware(
        name,
        f"8 per node, {link:g} GB/s per direction inside and {network:g} GB/s between nodes, {flops / 1e3:g} TFLOP/s "
        f"dense bfloat16, {memory / 1e3:g} TB/s memory (vendor's figures); 80% of each link and of memory and 40% of "
        "the matrix rate reached, 12 and 14 us per message, 10 us per call (assumed)",
        ranks_per_node=8,
        node_alpha=12e-6,
        node_beta=0.8e9 * link,
        net_alpha=14e-6,
        net_beta=0.8e9 * network,
        processors_per_node=8,
        has_trees=False,
        flops=0.4e9 * flops,
        memory=0.8e9 * memory,
        call=10e-6,
    )


HARDWARE = {
    "a100": _accelerator("a100", 300, 25, 312e3, 2.0e3),
    "h100": _accelerator("h100", 450, 50, 989e3, 3.35e3),
    "b200": _accelerator("b200", 900, 50, 2250e3, 8.0e3),
}
"""Clusters by name, from data sheets: NVLink 3, 4 and 5, with a HDR or NDR InfiniBand port per accelerator."""


@dataclass(frozen=True)
class Sizes:
    """Shapes and dtype of a call. ``value_dim`` is ``head_dim`` by default.

    Raises ValueError if a size is not a positive integer, or query heads are no multiple of key heads.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("heads", "kv_heads", "head_dim", "value_dim", "batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {self.dtype}")

    @property
    def width(self) -> int:
        """Elements of a token's keys and values."""
        assert self.value_dim is not None
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of sums over ranks."""
        return torch.promote_types(self.dtype, torch.float32)


class Split(NamedTuple):
    """A rank's rows, cut as a plan cuts them."""

    calls: Tensor
    """int64 ``[P]``: attention calls."""
    own_pairs: Tensor
    """int64 ``[P]``: pairs of rows that read only their rank's own keys."""
    hot_pairs: Tensor
    """int64 ``[P]``: pairs of rows that also read broadcast keys, and no others."""
    needs_hot: Tensor
    """bool ``[P, C]``: column tiles that these rows need."""
    needs_all: Tensor
    """bool ``[P, C]``: column tiles that the other rows need."""


class Work(NamedTuple):
    """Tiles that each rank computes, and tokens that it buffers, from the covers: upper bounds of a plan's."""

    pattern: Pattern
    layout: Layout
    sizes: Sizes
    grid: TileGrid
    demand: Demand
    row_tiles: Tensor
    """int64 ``[R]``: tiles of each row tile, for all heads and batch elements."""
    tiles: Tensor
    """int64 ``[P]``: the same of each rank."""
    pairs: Tensor
    """int64 ``[P]``: pairs in these tiles."""
    sources: Tensor
    """int64 ``[R]``: 0 for row tiles that read only their rank's own keys, 1 if also broadcast ones, otherwise 2."""
    is_cut: Tensor
    """bool ``[P]``: the ranks whose runs begin or end inside a tile."""
    reason: str
    """Why ranks cannot build their indices, or an empty text."""

    @property
    def automatic(self) -> Transport:
        """The transport that `ring_attention` takes by default."""
        if isinstance(self.pattern, RING_PATTERNS) and self.layout.n_ranks > 1:
            return "ring"
        return "gather" if is_better_gathered(self.demand.most_sent, self.layout) else "exchange"


def survey(pattern: Pattern, layout: Layout, sizes: Sizes, *, block: int = 128, max_bytes: int = MAX_BYTES) -> Work:
    """Return the work of all ranks, without an index.

    Raises ValueError if the pattern does not support the tokens or the heads, or its covers exceed ``max_bytes``.

    >>> from ringtile.patterns import Causal, Window
    >>> work = survey(Causal() & Window(4096), Layout.contiguous(1 << 20, 8), Sizes(heads=1, kv_heads=1))
    >>> work.tiles.tolist()
    [33264, 33792, 33792, 33792, 33792, 33792, 33792, 33792]
    """
    for name, count, expected in (
        ("heads", sizes.heads, pattern.num_heads),
        ("batch", sizes.batch, pattern.batch_size),
    ):
        if expected is not None and count != expected:
            raise ValueError(f"{name}: the pattern is defined for {expected}, got {count}")
    n_ranks, n_tokens = layout.n_ranks, layout.n_tokens
    if n_ranks > MAX_RANKS:
        raise ValueError(f"layout: expected at most {MAX_RANKS:,} ranks, got {n_ranks:,}")
    grid = TileGrid(block, 0, n_tokens, n_tokens)
    pattern.validate(grid)
    rows, ranks, tokens = layout.tiles(block)
    heads: dict[str, Any] = {"num_heads": sizes.heads, "batch": sizes.batch, "max_bytes": max_bytes}
    demand = find_demand(pattern, layout, grid, **heads)
    rank_of_row = torch.empty(grid.n_rows, dtype=torch.int64).index_put_((rows,), ranks)
    is_hot = demand.is_hot
    own, own_cold = ((ranks * (grid.n_cols + 1) + rows)[chosen].sort().values for chosen in (rows >= 0, ~is_hot[rows]))
    hot_before = torch.nn.functional.pad(is_hot.cumsum(0), (1, 0))
    is_remote, is_cold = torch.zeros(2, grid.n_rows, dtype=torch.bool)
    tiles = torch.zeros(grid.n_rows, dtype=torch.int64)
    listed = torch.zeros(n_ranks, dtype=torch.int64)
    for copies, cover in candidates(pattern, grid, **heads):
        length = cover.hi - cover.lo
        tiles.index_add_(0, cover.row, copies * length)
        first = rank_of_row[cover.row] * (grid.n_cols + 1)
        # How many tiles of the interval the row's rank holds, and how many it holds or gets by a broadcast.
        held, held_cold = (
            torch.searchsorted(mine, first + cover.hi) - torch.searchsorted(mine, first + cover.lo)
            for mine in (own, own_cold)
        )
        is_remote[cover.row[held < length]] = True
        is_cold[cover.row[held_cold + hot_before[cover.hi] - hot_before[cover.lo] < length]] = True
        of_rank = torch.zeros(n_ranks, dtype=torch.int64).index_add_(0, rank_of_row[cover.row], length)
        listed = torch.maximum(listed, of_rank)
    reason = ""
    try:
        check_candidates(pattern, grid, int(listed.max()), max_bytes)
        cut = torch.tensor([is_cut(layout, rank, block) for rank in range(n_ranks)])
    except ValueError as error:
        reason, cut = str(error), torch.ones(n_ranks, dtype=torch.bool)
    of_rank = torch.zeros(n_ranks, dtype=torch.int64)
    return Work(
        pattern,
        layout,
        sizes,
        grid,
        demand,
        tiles,
        of_rank.index_add(0, ranks, tiles[rows]),
        of_rank.index_add(0, ranks, tiles[rows] * tokens * block),
        is_remote.long() + is_cold,
        cut,
        reason,
    )


def split(work: Work, *, gather: bool = False) -> Split:
    """Return the calls of an exchange, or of a gather, in which all remote keys are broadcast."""
    layout, sizes, grid = work.layout, work.sizes, work.grid
    n_ranks = layout.n_ranks
    rows, ranks, tokens = layout.tiles(grid.block)
    order = (ranks * grid.n_rows + rows).argsort()
    rows, ranks, tokens = rows[order], ranks[order], tokens[order]
    source = (work.sources.clamp(max=1) if gather else work.sources)[rows].where(~work.is_cut[ranks], 2)
    for merged in (1, 0, None):
        changes = (source[1:] != source[:-1]) & (ranks[1:] == ranks[:-1])
        calls = 1 + torch.bincount(ranks[1:][changes], minlength=n_ranks)
        if merged is not None:
            source = source.where((calls <= MAX_PIECES)[ranks] | (source < merged), 2)
    runs = torch.tensor([len(held) for held in layout.runs])
    pairs, of_rank = work.row_tiles[rows] * tokens * grid.block, torch.zeros(n_ranks, dtype=torch.int64)
    columns = (
        needed(work.pattern, rows[chosen], ranks[chosen], n_ranks, grid, num_heads=sizes.heads, batch=sizes.batch)
        for chosen in (source == 1, source == 2)
    )
    return Split(
        torch.where(work.is_cut, runs, calls).where(runs > 0, 0),
        *(of_rank.index_add(0, ranks, pairs * (source == number)) for number in (0, 1)),
        *columns,
    )


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


def flops_per_pair(sizes: Sizes) -> tuple[int, int]:
    """Return the multiplications and additions per pair, forward (two matmuls) and backward (five)."""
    assert sizes.value_dim is not None
    return 2 * (sizes.head_dim + sizes.value_dim), 2 * (3 * sizes.head_dim + 2 * sizes.value_dim)


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
