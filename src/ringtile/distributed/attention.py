"""Attention over tokens that the ranks of a process group share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.exchange import Exchange, cast_finish, cast_start
from ringtile.distributed.layout import Layout, Run, positions_of
from ringtile.distributed.plan import RingPlan, make_plan
from ringtile.distributed.ring import Ring, Settings, ring
from ringtile.functional import sparse_attention
from ringtile.functional.attention import (
    Keywords,
    as_pattern,
    check_options,
    check_rows,
    checked_tensors,
    with_sinks,
    without_autocast,
)
from ringtile.patterns import Causal, Dense, Pattern

TRANSPORTS = ("auto", "exchange", "gather", "ring")


class Options(Keywords, total=False):
    """Options of `sparse_attention` that a group of ranks supports, for type checkers."""

    key_lengths: Tensor | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    head_at: Tensor | None
    batch_at: Tensor | None


class _Tied(torch.autograd.Function):
    """Return the output. Its backward pass also reaches the buffers of a rank that no row reads."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(keys, values)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = ctx.saved_tensors
        return out_grad, torch.zeros_like(keys), torch.zeros_like(values)


_exchanges: OrderedDict[tuple[RingPlan, dist.ProcessGroup], Exchange] = OrderedDict()
_lock = Lock()
_EXCHANGES = 64


def exchange_of(plan: RingPlan, group: dist.ProcessGroup) -> Exchange:
    """Return the exchange of a plan in a process group, made once."""
    with _lock:
        found = _exchanges.get((plan, group))
        if found is None:
            found = _exchanges[plan, group] = Exchange(plan, group)
            if len(_exchanges) > _EXCHANGES:
                _exchanges.popitem(last=False)
        else:
            _exchanges.move_to_end((plan, group))
        return found


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the process group of a mesh with one dimension, or the default group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh with one dimension, mesh['cp'] for example, got {group!r}")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialized, call init_process_group first")
    found = group or dist.group.WORLD
    assert found is not None
    return found


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | None = None,
    *,
    layout: Layout,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    transport: Literal["auto", "exchange", "gather", "ring"] = "auto",
    overlap: bool = True,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Compute attention over all tokens of a layout, each rank its own queries, exactly, forward and backward.

    Each rank holds the queries, keys and values of its own tokens. It gets the keys that its rows need and no others,
    and computes each row in one softmax. So the output and the query's gradient are those of one process. All ranks
    make the same calls with the same pattern, layout and options.

    Args:
        query: ``[B, H, n, D]``, the rank's n tokens in ascending order of position.
        key: ``[B, Hkv, n, D]``.
        value: ``[B, Hkv, n, Dv]``.
        pattern: Which pairs to keep, by position. Default: all.
        layout: Which tokens each rank holds.
        group: Process group with as many ranks as the layout, or a mesh with one dimension. Default: all ranks.
        transport: How keys travel. "exchange": each rank sends to each other what that one needs, all at once.
            "gather": every rank gets all keys. "ring": keys pass from rank to rank, in memory for two ranks' keys, and
            parts are merged by lse. It is for all pairs and causal, without dropout, ALiBi, second derivatives and
            ``torch.compile``. Default: "ring" if it supports the call, otherwise "exchange", unless a rank would send
            more tokens than there are: then "gather".
        overlap: Compute rows that need no other rank's keys while keys travel. The results are the same bits.
        return_lse: Also return the log-sum-exp (natural log) ``[B, H, n]``.
        options: As in `sparse_attention`. ``key_mask`` is ``[B, n]``, of the rank's own keys. ``key_lengths`` count
            the tokens of all ranks.

    Returns:
        The output ``[B, H, n, Dv]``. With ``return_lse``, also the lse.

    Raises:
        ValueError: If an argument is invalid, the same way at every rank or not.
    """
    ranks = group_of(group)
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {TRANSPORTS}, got {transport!r}")
    query, key, value = checked_tensors(query, key, value, options.get("enable_gqa", False))
    rank = ranks.rank()
    if not isinstance(layout, Layout) or layout.n_ranks != ranks.size():
        raise ValueError(f"layout: expected a Layout for {ranks.size()} ranks, got {layout!r}")
    for name, x in (("query", query), ("key", key)):
        if x.shape[2] != layout.size(rank):
            raise ValueError(f"{name}: expected the {layout.size(rank)} tokens of rank {rank}, got {x.shape=}")
    rule = Dense() if pattern is None else as_pattern(pattern)
    if options.pop("is_causal", False):
        rule = Causal() if pattern is None else Causal() & rule
    check_options(
        query,
        key,
        key_mask=options.get("key_mask"),
        dropout_p=options.get("dropout_p", 0.0),
        seed=options.get("seed"),
        scale=options.get("scale"),
        backend=options.get("backend"),
    )
    lengths, slopes = options.get("key_lengths"), options.get("alibi_slopes")
    check_rows(query, layout.n_tokens, lengths, options.get("softcap", 0.0), slopes, options.get("sinks"))
    against = _reasons_against_ring(rule, options)
    if transport == "ring" and against:
        raise ValueError(f"transport 'ring' does not support this call: {'; '.join(against)}")
    if transport == "ring" or (transport == "auto" and not against and ranks.size() > 1):
        return _pass_around(query, key, value, rule, layout, ranks, options, return_lse)
    plan = make_plan(rule, layout, rank, num_heads=query.shape[1], batch=query.shape[0], gather=transport == "gather")
    if transport == "auto" and plan.most_sent > layout.n_tokens:
        plan = make_plan(rule, layout, rank, num_heads=query.shape[1], batch=query.shape[0], gather=True)
    exchange = exchange_of(plan, ranks)

    own_mask, buffer_mask = _masks(key, options, exchange)
    started = cast_start(key, value, exchange)
    buffers = None if overlap else cast_finish(key, value, started, exchange)
    found: list[Any] = [None] * len(plan.pieces)
    compute: Any = sparse_attention
    queries = query.split([piece.end - piece.begin for piece in plan.pieces], 2) if plan.pieces else ()
    # Rows that read their rank's own keys first.
    for number in sorted(range(len(plan.pieces)), key=lambda number: not plan.pieces[number].is_local):
        piece = plan.pieces[number]
        if piece.is_local:
            keys, values, mask = key, value, own_mask
        else:
            if buffers is None:
                buffers = cast_finish(key, value, started, exchange)
            (keys, values), mask = buffers, buffer_mask
        found[number] = compute(queries[number], keys, values, piece.index, key_mask=mask, return_lse=True, **options)
    if not found:
        # A rank without tokens has empty results that depend on its tensors.
        found = [compute(query, key, value, key_mask=own_mask, return_lse=True, **options)]
    out, lse = found[0] if len(found) == 1 else (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    if buffers is None or all(piece.is_local for piece in plan.pieces):
        keys, values = buffers or cast_finish(key, value, started, exchange)
        out = _Tied.apply(out, keys, values)  # type: ignore[no-untyped-call]
        lse = _Tied.apply(lse, keys, values)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def _reasons_against_ring(pattern: Pattern, options: Options) -> list[str]:
    """Return the reasons why keys cannot pass around a ring."""
    reasons = []
    if not isinstance(pattern, Causal | Dense):
        reasons.append(f"supports the patterns dense and causal, got {pattern!r}")
    if options.get("alibi_slopes") is not None:
        reasons.append("does not support alibi_slopes")
    if options.get("dropout_p"):
        reasons.append("does not support dropout_p")
    if options.get("backend") == "reference":
        reasons.append("does not support backend='reference'")
    if torch.compiler.is_compiling():
        reasons.append("does not support torch.compile")
    return reasons


def _pass_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    layout: Layout,
    ranks: dist.ProcessGroup,
    options: Options,
    return_lse: bool,
) -> Any:
    place = Ring(layout, ranks.rank(), ranks, isinstance(pattern, Causal))
    mask = _with_lengths(options.get("key_mask"), options.get("key_lengths"), layout.runs[place.rank], key)
    scale = options.get("scale")
    settings = Settings(
        query.shape[3] ** -0.5 if scale is None else scale, options.get("softcap", 0.0), options.get("backend") or ""
    )
    with without_autocast(query):
        out, lse = ring(query, key, value, mask, place, settings)
    sinks = options.get("sinks")
    out = out if sinks is None else with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _with_lengths(key_mask: Tensor | None, lengths: Tensor | None, runs: Iterable[Run], key: Tensor) -> Tensor | None:
    """Return a mask of the keys at these positions that are kept and lie inside the lengths."""
    if lengths is None:
        return key_mask
    inside = positions_of(runs, key.device) < lengths[:, None]
    return inside if key_mask is None else key_mask & inside


def _masks(key: Tensor, options: Options, exchange: Exchange) -> tuple[Tensor | None, Tensor | None]:
    """Return the masks of the rank's own keys and of its buffer, from ``key_mask`` and ``key_lengths``."""
    key_mask, lengths = options.pop("key_mask", None), options.pop("key_lengths", None)
    plan, buffer = exchange.plan, None
    if key_mask is not None:
        buffer = torch.ops.ringtile.cast_bits(key_mask, exchange.number)
    own = _with_lengths(key_mask, lengths, plan.layout.runs[plan.rank], key)
    return own, _with_lengths(buffer, lengths, plan.buffer, key)
