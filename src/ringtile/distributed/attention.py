"""Attention over tokens that the ranks of a process group share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.branches import BranchPlan
from ringtile.distributed.exchange import Exchange, Started, Works, by_number, cast_start, exchange_of
from ringtile.distributed.layout import (
    Layout,
    PassedOn,
    Run,
    as_layout,
    check_keys_finite,
    check_shard,
    passed_on,
    positions_of,
)
from ringtile.distributed.lists import attend_gathered, values_in_keys
from ringtile.distributed.lockstep import NUMBERS, Facts, Lockstep, compare, numbers_of, shapes_of
from ringtile.distributed.plan import RingPlan, Source
from ringtile.distributed.process_groups import Ranks, axes_of, real_group, real_mesh
from ringtile.distributed.relays import Relays
from ringtile.distributed.ring import PassedKeys, ring_parts
from ringtile.distributed.stages import from_bytes, to_bytes
from ringtile.distributed.transports import MODES, chosen, group_of, mode_of, plan_of
from ringtile.distributed.ulysses import HeadExchange, HeadPlan
from ringtile.functional import sparse_attention
from ringtile.functional.attention import Keywords, check_options, checked_tensors, make_call, rule_of, with_sinks
from ringtile.functional.chosen import check_lists
from ringtile.functional.parts import Compute, Part, Parts, Slice, attend_parts
from ringtile.index.build import check_counts
from ringtile.kernels.contracts import RowOptions
from ringtile.patterns import Causal, Pattern
from ringtile.patterns.base import TileGrid
from ringtile.patterns.chosen import split
from ringtile.patterns.content import described
from ringtile.patterns.grammar import as_rule
from ringtile.patterns.traced import constant


class Options(Keywords, RowOptions, total=False):
    """Options of `sparse_attention` that a group of ranks supports, for type checkers."""


_NAMES = frozenset(Options.__annotations__)


def check_names(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an argument that a function does not have."""
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"unexpected keyword arguments {unknown}, expected some of {sorted(known)}")


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str | None = None,
    *,
    layout: Layout,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    transport: Literal["auto", "exchange", "gather", "ring", "hierarchy", "ulysses"] = "auto",
    overlap: bool = True,
    check_finite: bool | str = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Compute attention over all tokens of a layout, each rank its own queries, exactly, forward and backward.

    Each rank holds the queries, keys and values of its own tokens. It gets the keys that its rows need and no others,
    and computes each row in one softmax. So the output and the query's gradient are those of one process. All ranks
    make the same calls with the same pattern, layout and options.

    Args:
        query: ``[B, H, n, D]``, the rank's n tokens in ascending order of position.
        key, value: ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]``.
        pattern: Which pairs to keep, by position. Default: all. A `Chosen` has the lists of the rank's queries, which
            name keys by their positions.
        layout: Which tokens each rank holds.
        group: Process group with as many ranks as the layout, or a mesh with one dimension. Default: all ranks. A
            "hierarchy" needs a mesh with two, ``init_device_mesh(device, (nodes, ranks_per_node))``, and "ulysses"
            accepts one. The layout counts its ranks row by row.
        transport: How keys travel. "exchange": each rank sends to each other what that one needs, all at once.
            "gather": every rank gets all keys. "ring": keys pass from rank to rank, in memory for two ranks' keys, and
            parts are merged by lse. It is for all pairs and causal, without dropout, ALiBi, second derivatives and
            ``torch.compile``. "hierarchy": an exchange on a mesh of nodes and their ranks. A token crosses to a node
            once, and is handed on inside it. "ulysses": ranks exchange heads for tokens, and each computes H / P heads
            of all tokens. On a mesh with two dimensions the ranks of a row do, and keys travel between rows by an
            exchange. Default: "ring" if it supports the call, otherwise "exchange", unless a rank would send more
            tokens than there are: then "gather", which alone supports `Chosen`.
        overlap: While keys travel, compute the rows that do not need them. The results are the same bits. A ring always
            overlaps.
        check_finite: Look for NaN and infinity in the rank's keys and values before they travel. A string names the
            layer in the error. It reads both once, and synchronizes with a GPU.
        return_lse: Also return the log-sum-exp (natural log) ``[B, H, n]``.
        options: As in `sparse_attention`. ``key_mask`` is ``[B, n]``, of the rank's own keys. ``key_lengths`` count
            the tokens of all ranks.

    Returns the output ``[B, H, n, Dv]``. With ``return_lse``, also the lse.

    Raises:
        ValueError: If an argument is invalid, the ranks that exchange heads do not divide them, or a key or value is
            not finite and ``check_finite`` is set.
        PlanMismatch: At every rank, if ranks call with different patterns, layouts, shapes, dtypes, transports or
            options. Seeds, and the values of tensors, are not compared.
        RankLost: If a rank fails, dies or does not come. The message names it.
    """
    check_names(options, _NAMES)
    mode = mode_of(transport)
    ranks = group_of(group, mode)
    rest: dict[str, Any] = {**options}
    key_mask, lengths, sinks = (rest.pop(name, None) for name in ("key_mask", "key_lengths", "sinks"))
    query, key, value = checked_tensors(query, key, value, rest.pop("enable_gqa", False))
    rank, n_ranks = check_shard(query, key, layout, ranks)
    rule = rule_of(pattern, rest.pop("is_causal", False), None)
    check_options(query, key, n_keys=layout.n_tokens, key_mask=key_mask, key_lengths=lengths, sinks=sinks, **rest)
    call = make_call(query, **rest)
    mode = chosen(mode, rule, call, n_ranks)
    lists, named = split(rule), ""
    if lists is not None:
        check_lists(lists, query, key, None, layout.n_tokens)
        rule = lists.beside
        named = f"lists of blocks of {lists.chosen.block}" + (", values in keys" * values_in_keys(key, value))
    if check_finite:
        check_keys_finite(key, value, layout, rank, check_finite)
    in_graph = torch.compiler.is_compiling()
    # Dynamo passes on no pattern that it has made, but its text.
    planned = rule.text if in_graph and rule.text else rule
    facts = shapes_of(query, key, value), str(key.dtype), numbers_of(call, key_mask is not None, sinks is not None)
    device = query.device if in_graph else None
    found = _prepared(planned, passed_on(layout), ranks, mode.name, *facts, return_lse, device, named)
    if mode is MODES["ulysses"]:
        rest = {**rest, "seed": call.seed, "key_mask": key_mask, "key_lengths": lengths, "sinks": sinks}
        return _attend_by_heads((query, key, value), by_number[found], ranks, overlap, return_lse, rest)
    own_mask = _with_lengths(key_mask, lengths, layout.runs[rank], key)
    if isinstance(found, Facts):
        ring_keys = partial(ring_parts, layout, rank, isinstance(rule, Causal), call)
        keys: Parts = PassedKeys(ring_keys, own_mask, layout, rank, Lockstep(real_group(ranks), found))
    else:
        # Not the result of the call: Dynamo reads tensors only from places that it can find again.
        exchange = by_number[found]
        plan = exchange.plan
        assert isinstance(plan, RingPlan)
        buffer_mask = None if key_mask is None else torch.ops.ringtile.cast_bits(key_mask, found)
        buffer_mask = _with_lengths(buffer_mask, lengths, sum(plan.buffer, ()), key)
        if lists is not None:
            rest = {**rest, "seed": call.seed, "key_mask": buffer_mask}
            out, lse = attend_gathered(query, key, value, lists, exchange, call, rest)
            return _results(out, lse, sinks, return_lse)
        pieces = plan.pieces_on(query.device)

        def parts(source: Source) -> list[Part]:
            return [Part(Slice(x.begin, x.end), None, x.index, call) for x in pieces if x.source == source]

        keys = ExchangedKeys(parts, own_mask, plan, exchange, buffer_mask, overlap)
    return _results(*attend_parts(query, key, value, keys, call.backend), sinks, return_lse)


def _results(out: Tensor, lse: Tensor, sinks: Tensor | None, return_lse: bool) -> Any:
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _attend_by_heads(
    tensors: tuple[Tensor, Tensor, Tensor],
    exchange: HeadExchange,
    ranks: Ranks,
    overlap: bool,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    """Attend with heads exchanged for tokens. ``options`` are those of `sparse_attention`, of all heads."""
    operators, key_mask = torch.ops.ringtile, options["key_mask"]
    masks = () if key_mask is None else (to_bytes(key_mask),)
    query, key, value, *packed = operators.to_heads([*tensors, *masks], "qkk" + "m" * len(masks), exchange.number)
    if exchange.key_at is not None:
        key, value = (x[:, exchange.key_at] for x in (key, value))
    if key_mask is not None:
        options["key_mask"] = from_bytes(packed[0], len(key_mask))
    begin, end = exchange.heads
    if options.get("head_at") is None:
        # Dropout draws by the number of a head among all.
        options["head_at"] = torch.arange(tensors[0].shape[1], device=query.device)
    for name in ("head_at", "sinks", "alibi_slopes"):
        options[name] = None if options.get(name) is None else options[name][begin:end]
    options.update(enable_gqa=True, return_lse=True)
    if isinstance(ranks, DeviceMesh):
        # Not a ring, whose merges by lse round: the bits are those of one process.
        rule, rows, group = exchange.rule, exchange.rows, ranks.get_group(0)
        out, lse = ring_attention(
            query, key, value, rule, layout=rows, group=group, transport="exchange", overlap=overlap, **options
        )
    else:
        out, lse = sparse_attention(query, key, value, exchange.index or exchange.rule, start=0, **options)
    if not return_lse:
        return operators.to_tokens([out], "q", exchange.number)[0]
    out, lse = operators.to_tokens([out, lse.unsqueeze(-1)], "qq", exchange.number)
    return out, lse.squeeze(-1)


@constant
def _prepared(
    pattern: Pattern | str,
    layout: PassedOn,
    ranks: Ranks,
    transport: str,
    shapes: tuple[int, ...],
    dtype: str,
    numbers: tuple[float, ...],
    return_lse: bool,
    compiled_on: torch.device | None,
    lists: str,
) -> Any:
    """Return the number of a call's exchange, or the facts of a ring, after a comparison with the other ranks."""
    pattern = as_rule(pattern)
    layout = as_layout(layout)
    mode, every, mesh = MODES[transport], real_group(ranks), real_mesh(ranks)
    groups: tuple[dist.ProcessGroup, ...] = axes_of(mesh) if isinstance(mesh, DeviceMesh) else (every, every, every)
    batch, heads, key_heads = shapes[:3]
    text = f"{lists} & {described(pattern)}" if lists else described(pattern)
    facts: dict[str, str | float] = {"pattern": text, "transport": transport, "plan": ""}
    plan: RingPlan | Relays | HeadPlan | None = None
    if mode.is_planned:
        planned = None if lists else pattern
        plan = plan_of(mode, planned, layout, every.rank(), groups[2].size(), num_heads=heads, batch=batch)
        if isinstance(plan, RingPlan):
            facts["transport"] = "gather" if plan.is_gathered else "exchange"
        facts["plan"] = plan.fingerprint
    elif mode is MODES["ulysses"]:
        check_counts(pattern, heads, batch)
        pattern.validate(TileGrid(128, 0, layout.n_tokens, layout.n_tokens))
        plan = HeadPlan(pattern, layout, every.rank(), groups[2].size(), batch, heads, key_heads)
        facts.update(ranks_per_row=groups[2].size(), return_lse=return_lse)
    agreed = compare(
        every, "ring_attention", layout, shapes, dtype, **facts, **dict(zip(NUMBERS, numbers, strict=True))
    )
    if plan is None:
        return agreed
    make: Any = HeadExchange if isinstance(plan, HeadPlan) else Exchange
    exchange = exchange_of(make, plan, agreed, *groups, in_graph=compiled_on is not None)
    if isinstance(exchange, HeadExchange) and compiled_on is not None and groups[2] is every:
        exchange.build(compiled_on)
    return exchange.number


def _with_lengths(key_mask: Tensor | None, lengths: Tensor | None, runs: Iterable[Run], key: Tensor) -> Tensor | None:
    """Return a mask of the keys at these positions that are kept and lie inside the lengths."""
    if lengths is None:
        return key_mask
    inside = positions_of(runs, key.device) < lengths[:, None]
    return inside if key_mask is None else key_mask & inside


_BUFFER: tuple[Source, ...] = ("hot", "all")


@dataclass(frozen=True, eq=False)
class ExchangedKeys(Parts):
    """Three sources: "own" keys where they lie, and the parts "hot" and "all" of the buffer that others fill.

    With ``overlap``, parts on own keys are computed while keys travel, and while gradients travel home. The buffer also
    holds own keys, so the backward pass saves what was received and makes the buffer again.
    """

    plan: RingPlan | BranchPlan
    exchange: Exchange
    buffer_mask: Tensor | None
    overlap: bool
    is_merged = False
    _waits_composed = False

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute each source when its keys have come. Return what was received."""
        started = cast_start(k, v, self.exchange)
        if self.overlap:
            compute("own", k, v, self.own_mask)
        # Broadcasts were sent first, so rows that need no other keys can begin before the rest has come.
        buffers: tuple[Tensor, Tensor] = torch.ops.ringtile.cast_hot(k, v, *started, self.exchange.number)
        if self.overlap:
            compute(*self._part("hot", *buffers))
        torch.ops.ringtile.cast_cold(*buffers, *started, self.exchange.number)
        if not self.overlap:
            compute("own", k, v, self.own_mask)
            compute(*self._part("hot", *buffers))
        compute(*self._part("all", *buffers))
        return started[:1]

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Send each gradient home as soon as it is known. Return the sums of the rank's own keys and values."""
        exchange = self.exchange

        def on_buffer(source: Source) -> list[Tensor]:
            # Gradients travel in the dtype of the keys.
            return [x.to(k.dtype) for x in compute(*self._part(source, *buffers))]

        buffers: Sequence[Tensor] = exchange.finish((k, v), saved[0], Works())
        own = [] if self.overlap else compute("own", k, v, self.own_mask)
        hot = [] if self.overlap else on_buffer("hot")
        grads = on_buffer("all")
        cold_started = exchange.start_cold_back(grads)
        hot = hot or on_buffer("hot")
        cold_started = exchange.hand_on_back(grads, cold_started)
        buffers = ()
        if not grads[0].shape[2]:
            grads = hot
        elif hot[0].shape[2]:
            # One after the other, so that only one of them exists twice.
            grads = [torch.cat([grads.pop(0), hot.pop(0)], 2) for _ in range(2)]
        hot_started = exchange.start_hot_back(grads)
        own = own or compute("own", k, v, self.own_mask)
        return self._sums(grads, cold_started, hot_started, own)

    def _sums(self, grads: Sequence[Tensor], cold: Started, hot: Started, own: list[Tensor]) -> Sequence[Tensor]:
        """Return the sums of the gradients of own keys that are here and those that arrive."""
        return self.exchange.finish_back(grads, cold, hot, own)

    def composed(self, k: Tensor, v: Tensor, compute: Compute) -> Callable[[Tensor], Tensor]:
        """Compute each source when its keys have come."""
        started = cast_start(k, v, self.exchange, self.buffer_mask)
        if early := self.overlap and not self._waits_composed:
            compute("own", k, v, self.own_mask)
        buffers = torch.ops.ringtile.group_cast(k, v, *started, self.exchange.number)
        if not early:
            compute("own", k, v, self.own_mask)
        n_parts = [compute(*self._part(source, *buffers)) for source in _BUFFER]
        if any(n_parts):
            return lambda x: x
        # This rank reads no key of another, but takes part in the collectives of both passes all the same. Compilers
        # drop operators whose results are not used, so its results depend on the buffers by an operator of its own.
        return lambda x: torch.ops.ringtile.tied(x, buffers)

    def _part(self, source: Source, keys: Tensor, values: Tensor) -> tuple[Source, Tensor, Tensor, Tensor | None]:
        """Return a part of the buffer with its name and its key mask."""
        part = self.plan.part(source)
        mask = None if self.buffer_mask is None else self.buffer_mask[:, part]
        return source, keys[:, :, part], values[:, :, part], mask
