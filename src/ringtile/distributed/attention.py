"""Attention over tokens that the ranks of a process group share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any, Literal, Unpack
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringtile
from ringtile.distributed.exchange import Exchange, Routes
from ringtile.distributed.failures.faults import agree, first_nonfinite, watch
from ringtile.distributed.heads import HeadPlan
from ringtile.distributed.hierarchy import Hierarchy
from ringtile.distributed.layout import Layout, Run, positions_of
from ringtile.distributed.lockstep import Facts, begin, check
from ringtile.distributed.pieces import attend_pieces
from ringtile.distributed.plan import RING_PATTERNS, TRANSPORTS, RingPlan
from ringtile.distributed.process_groups import Axes, axes_of, carries_cpu
from ringtile.distributed.relays import Relays, routes_of
from ringtile.distributed.ring import Ring, ring
from ringtile.distributed.ulysses import HeadTrade
from ringtile.distributed.wires import from_octets, to_octets
from ringtile.functional import sparse_attention
from ringtile.functional.attention import (
    Keywords,
    check_options,
    check_rows,
    checked_tensors,
    make_call,
    rule_of,
    with_sinks,
    without_autocast,
)
from ringtile.index.build import check_counts
from ringtile.kernels.contracts import Call, lacking
from ringtile.kernels.traced import constant
from ringtile.patterns import Causal, Pattern, parse
from ringtile.patterns.base import TileGrid
from ringtile.patterns.content import described

CHOICES = ("auto", *TRANSPORTS)


class Options(Keywords, total=False):
    """Options of `sparse_attention` that a group of ranks supports, for type checkers."""

    key_lengths: Tensor | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    head_at: Tensor | None
    batch_at: Tensor | None


_exchanges: OrderedDict[tuple[Any, ...], Exchange | HeadTrade] = OrderedDict()
_in_graphs: dict[tuple[Any, ...], Exchange | HeadTrade] = {}
"""Exchanges of compiled graphs. Without its exchange a graph would be compiled again."""


class _ByNumber:
    """Exchanges as attributes. Dynamo sees the ones that were added while it traces, which in a dict it does not."""

    def __getitem__(self, number: int) -> Any:
        return getattr(self, f"_{number}")

    def __setitem__(self, number: int, exchange: Any) -> None:
        setattr(self, f"_{number}", exchange)

    def __delitem__(self, number: int) -> None:
        delattr(self, f"_{number}")


by_number = _ByNumber()
_lock = Lock()
_EXCHANGES = 256


def exchange_of(
    plan: Routes | Relays | HeadPlan, facts: Facts, *groups: dist.ProcessGroup, in_graph: bool
) -> Exchange | HeadTrade:
    """Return the exchange of a plan and of what ranks compare of its calls, in its groups, made once.

    If a compiled graph has it (``in_graph``), it stays as long as its groups.
    """
    place = plan, facts, *map(ref, groups)
    with _lock:
        found = _in_graphs.get(place) or _exchanges.get(place)
        if found is None:
            if isinstance(plan, HeadPlan):
                found = HeadTrade(plan, facts, *groups)
            elif isinstance(plan, Relays):
                found = Hierarchy(plan, Axes(*groups), facts)
            else:
                found = Exchange(plan, groups[0], facts)
            by_number[found.number] = found
        if in_graph or place in _in_graphs:
            _exchanges.pop(place, None)
            _in_graphs[place] = found
            for old in [each for each in _in_graphs if any(group() is None for group in each[2:])]:
                del by_number[_in_graphs.pop(old).number]
        else:
            _exchanges[place] = found
            _exchanges.move_to_end(place)
            if len(_exchanges) > _EXCHANGES:
                del by_number[_exchanges.popitem(last=False)[1].number]
        return found


_MESH_TRANSPORTS = ("ulysses", "hierarchy")
"""Transports for a mesh with two dimensions."""

Ranks = dist.ProcessGroup | DeviceMesh
"""Process group, or a mesh with two dimensions, whose ranks count row by row."""


def group_of(group: dist.ProcessGroup | DeviceMesh | None, transport: str = "") -> Ranks:
    """Return the ranks that share a sequence: the default group if None, the group of a mesh with one dimension."""
    if transport == "hierarchy" and not (isinstance(group, DeviceMesh) and group.ndim == 2):
        raise ValueError(
            "group: expected a mesh of nodes and their ranks for the transport 'hierarchy', for example "
            f"init_device_mesh('cuda', (nodes, ranks_per_node)), got {group!r}"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim == 2 and transport in _MESH_TRANSPORTS:
            return group
        if group.ndim != 1:
            more = f", or with two for the transports {_MESH_TRANSPORTS}" if transport else ""
            raise ValueError(f"group: expected a mesh with one dimension, mesh['cp'] for example{more}, got {group!r}")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialized, call init_process_group first")
    found = group or dist.group.WORLD
    assert found is not None
    return found


def place_of(ranks: Ranks) -> tuple[int, int]:
    """Return the number of this rank and the number of ranks."""
    found: tuple[int, int] = _place_in_mesh(ranks) if isinstance(ranks, DeviceMesh) else (ranks.rank(), ranks.size())
    return found


@constant
def _place_in_mesh(mesh: DeviceMesh) -> tuple[int, int]:
    group = real_group(mesh)
    return group.rank(), group.size()


def real_mesh(ranks: Any) -> Any:
    """Return the group or mesh that Dynamo has a stand-in for."""
    return getattr(ranks, "real_obj", ranks)


def real_group(ranks: Any) -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    found: Ranks = real_mesh(ranks)
    return axes_of(found).every if isinstance(found, DeviceMesh) else found


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | None = None,
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
        key: ``[B, Hkv, n, D]``.
        value: ``[B, Hkv, n, Dv]``.
        pattern: Which pairs to keep, by position. Default: all.
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
            tokens than there are: then "gather".
        overlap: While keys travel, compute the rows that do not need them. The results are the same bits. A ring always
            overlaps.
        check_finite: Look for NaN and infinity in the rank's keys and values before they travel. A string names the
            layer in the error. It reads both once, and synchronizes with a GPU.
        return_lse: Also return the log-sum-exp (natural log) ``[B, H, n]``.
        options: As in `sparse_attention`. ``key_mask`` is ``[B, n]``, of the rank's own keys. ``key_lengths`` count
            the tokens of all ranks.

    Returns:
        The output ``[B, H, n, Dv]``. With ``return_lse``, also the lse.

    Raises:
        ValueError: If an argument is invalid, the ranks that exchange heads do not divide them, or a key or value is
            not finite and ``check_finite`` is set.
        PlanMismatch: At every rank, if ranks call with different patterns, layouts, shapes, dtypes, transports or
            options. Seeds, and the values of tensors, are not compared.
        RankLost: If a rank fails, dies or does not come. The message names it.
    """
    ranks = group_of(group, transport)
    if transport not in CHOICES:
        raise ValueError(f"transport: expected one of {CHOICES}, got {transport!r}")
    rest: dict[str, Any] = {**options}
    key_mask, lengths, sinks = (rest.pop(name, None) for name in ("key_mask", "key_lengths", "sinks"))
    query, key, value = checked_tensors(query, key, value, rest.pop("enable_gqa", False))
    rank, n_ranks = check_shard(query, key, layout, ranks)
    rule = rule_of(pattern, rest.pop("is_causal", False), None)
    check_options(
        query,
        key,
        key_mask=key_mask,
        dropout_p=options.get("dropout_p", 0.0),
        seed=options.get("seed"),
        scale=options.get("scale"),
        backend=options.get("backend"),
    )
    check_rows(query, layout.n_tokens, lengths, options.get("softcap", 0.0), options.get("alibi_slopes"), sinks)
    call = make_call(query, **rest)
    against = _reasons_against_ring(rule, call)
    if transport == "ring" and against:
        raise ValueError(f"transport 'ring' does not support this call: {'; '.join(against)}")
    if check_finite:
        check_keys_finite(key, value, layout, rank, check_finite)
    shapes = shapes_of(query, key, value)
    if transport == "ulysses":
        rows = key_mask, lengths, sinks
        return _by_heads((query, key, value), rule, layout, ranks, rows, call, overlap, return_lse)
    mode = "ring" if transport == "auto" and not against and n_ranks > 1 else transport
    # Dynamo passes on no pattern that it has made, but its text.
    planned = rule.text if torch.compiler.is_compiling() and rule.text else rule
    in_graph = torch.compiler.is_compiling()
    numbers = numbers_of(call, key_mask is not None, sinks is not None)
    number = _prepared(planned, layout, ranks, mode, shapes, str(key.dtype), numbers, in_graph)
    own_mask = _with_lengths(key_mask, lengths, layout.runs[rank], key)
    if isinstance(number, Ring):
        with without_autocast(query):
            out, lse = ring(query, key, value, own_mask, number, call)
    else:
        # Not the result of the call: Dynamo reads tensors only from places that it can find again.
        exchange = by_number[number]
        plan = exchange.plan
        assert isinstance(plan, RingPlan)
        buffer_mask = None if key_mask is None else torch.ops.ringtile.cast_bits(key_mask, number)
        buffer_mask = _with_lengths(buffer_mask, lengths, sum(plan.buffer, ()), key)
        out, lse = attend_pieces(query, key, value, plan, exchange, own_mask, buffer_mask, call, overlap)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _by_heads(
    tensors: tuple[Tensor, Tensor, Tensor],
    rule: Pattern,
    layout: Layout,
    ranks: Ranks,
    rows: tuple[Tensor | None, Tensor | None, Tensor | None],
    call: Call,
    overlap: bool,
    return_lse: bool,
) -> Any:
    """Attend with heads exchanged for tokens. ``rows`` are the key mask, the key lengths and the sinks."""
    operators, shapes = torch.ops.ringtile, shapes_of(*tensors)
    key_mask, lengths, sinks = rows
    planned = rule.text if torch.compiler.is_compiling() and rule.text else rule
    facts = shapes, str(tensors[0].dtype), numbers_of(call, key_mask is not None, sinks is not None), return_lse
    compiled_on = tensors[0].device if torch.compiler.is_compiling() else None
    trade = by_number[_dealt(planned, layout, ranks, *facts, compiled_on)]
    masks = () if key_mask is None else (to_octets(key_mask),)
    query, key, value, *octets = operators.to_heads([*tensors, *masks], "qkk" + "m" * len(masks), trade.number)
    if trade.key_at is not None:
        key, value = (x[:, trade.key_at] for x in (key, value))
    if key_mask is not None:
        key_mask = from_octets(octets[0], len(key_mask))
    begin, end = trade.heads
    head_at = torch.arange(shapes[1], device=query.device) if call.head_at is None else call.head_at
    options: dict[str, Any] = {
        "key_mask": key_mask,
        "key_lengths": lengths,
        "sinks": None if sinks is None else sinks[begin:end],
        "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes[begin:end],
        "head_at": head_at[begin:end],
        **{name: getattr(call, name) for name in ("dropout_p", "seed", "scale", "softcap", "batch_at")},
        "backend": call.backend or None,
        "enable_gqa": True,
        "return_lse": True,
    }
    if isinstance(ranks, DeviceMesh):
        # Not a ring, whose merges by lse round: the bits are those of one process.
        place: dict[str, Any] = {"layout": trade.rows, "group": ranks.get_group(0), "transport": "exchange"}
        out, lse = ring_attention(query, key, value, trade.rule, overlap=overlap, **place, **options)
    else:
        out, lse = sparse_attention(query, key, value, trade.index or trade.rule, start=0, **options)
    if not return_lse:
        return operators.to_tokens([out], "q", trade.number)[0]
    out, lse = operators.to_tokens([out, lse.unsqueeze(-1)], "qq", trade.number)
    return out, lse.squeeze(-1)


@constant
def _dealt(
    pattern: Pattern | str,
    layout: Layout,
    ranks: Ranks,
    shapes: tuple[int, ...],
    dtype: str,
    numbers: tuple[float, ...],
    returns_lse: bool,
    compiled_on: torch.device | None,
) -> int:
    """Return the number of a call's exchange of heads, after a comparison with the other ranks."""
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    found, every = real_mesh(ranks), real_group(ranks)
    row = axes_of(found).inner if isinstance(found, DeviceMesh) else every
    check_counts(pattern, shapes[1], shapes[0])
    pattern.validate(TileGrid(128, 0, layout.n_tokens, layout.n_tokens))
    plan = HeadPlan(pattern, layout, every.rank(), row.size(), *shapes[:3])
    agreed = compare(
        every,
        "ring_attention",
        layout,
        shapes,
        dtype,
        pattern=described(pattern),
        transport="ulysses",
        ranks_per_row=row.size(),
        return_lse=returns_lse,
        **dict(zip(NUMBERS, numbers, strict=True)),
    )
    trade = exchange_of(plan, agreed, row, every, in_graph=compiled_on is not None)
    assert isinstance(trade, HeadTrade)
    if compiled_on is not None and row is every:
        trade.build(compiled_on)
    return trade.number


def check_layout(layout: Layout, n_ranks: int) -> None:
    """Raise ValueError if the layout does not fit the number of ranks."""
    if not isinstance(layout, Layout) or layout.n_ranks != n_ranks:
        raise ValueError(f"layout: expected a Layout for {n_ranks} ranks, got {layout!r}")


def check_shard(query: Tensor, key: Tensor, layout: Layout, ranks: Ranks) -> tuple[int, int]:
    """Return the number of this rank and the number of ranks.

    Raises ValueError if the layout does not fit the ranks, or the tensors do not have the rank's tokens.
    """
    rank, n_ranks = place_of(ranks)
    check_layout(layout, n_ranks)
    for name, x in (("query", query), ("key", key)):
        if x.shape[2] != layout.size(rank):
            raise ValueError(f"{name}: expected the {layout.size(rank)} tokens of rank {rank}, got {x.shape=}")
    return rank, n_ranks


_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Facts, Facts]] = WeakKeyDictionary()
"""What each group has compared, whether or not a rank has a cached plan."""

_AGREED = 1 << 16
"""When a group has compared so many calls, its ranks forget them, in the same call. Packed batches differ each time."""


@constant
def _prepared(
    pattern: Pattern | str,
    layout: Layout,
    ranks: Ranks,
    transport: str,
    shapes: tuple[int, ...],
    dtype: str,
    numbers: tuple[float, ...],
    in_graph: bool,
) -> int | Ring:
    """Return the number of a call's exchange, or its ring, after a comparison with the other ranks."""
    group = real_group(ranks)
    groups: tuple[dist.ProcessGroup, ...] = (group,)
    routes: RingPlan | Relays | None = None
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    if transport != "ring":
        per_node = None
        if transport == "hierarchy":
            groups = axes = axes_of(real_mesh(ranks))
            per_node = axes.inner.size()
        routes = routes_of(pattern, layout, group.rank(), transport, shapes[1], shapes[0], per_node)
        if isinstance(routes, RingPlan):
            transport = "gather" if routes.is_gathered else "exchange"
    agreed = compare(
        group,
        "ring_attention",
        layout,
        shapes,
        dtype,
        pattern=described(pattern),
        transport=transport,
        plan="" if routes is None else routes.fingerprint,
        **dict(zip(NUMBERS, numbers, strict=True)),
    )
    if routes is None:
        return Ring(layout, group.rank(), group, isinstance(pattern, Causal), agreed)
    return exchange_of(routes, agreed, *groups, in_graph=in_graph).number


def shapes_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the sizes that `compare` compares, and for each tensor whether it needs a gradient."""
    # All ranks take part in a backward pass: one that needs none would keep the others waiting.
    needs = [int(torch.is_grad_enabled() and x.requires_grad) for x in (query, key, value)]
    return *query.shape[:2], key.shape[1], key.shape[3], value.shape[3], *needs


NUMBERS = ("scale", "softcap", "dropout_p", "key_mask", "alibi_slopes", "sinks")


def numbers_of(call: Call, has_mask: bool, has_sinks: bool) -> tuple[float, ...]:
    """Return the options that `compare` compares, by `NUMBERS`: of tensors whether they are given."""
    return call.scale, call.softcap, call.dropout_p, has_mask, call.alibi_slopes is not None, has_sinks


def compare(
    ranks: dist.ProcessGroup, name: str, layout: Layout, shapes: tuple[int, ...], dtype: str, **more: str | float
) -> Facts:
    """Return the facts of a call, after a comparison with the other ranks, once. Raise PlanMismatch if they differ.

    Later calls compare a digest of them in every exchange.
    """
    facts: dict[str, str | float] = {
        "tokens": layout.n_tokens,
        **dict(zip(("batch", "heads", "key_heads", "head_dim", "value_dim"), shapes, strict=False)),
        **({"gradients": _needing(shapes[5:])} if shapes else {}),
        "dtype": dtype,
        "layout": layout.text,
        **more,
        "ringtile": ringtile.__version__,
        "torch": torch.__version__,
    }
    mine = Facts(name, tuple(facts.items()))
    with _lock:
        agreed = _agreed.setdefault(ranks, {})
    found = agreed.get(mine)
    if found is None:
        watch(ranks)
        if carries_cpu(ranks):
            # Ranks that have compared theirs before are at the first exchange of their call, and do not shake hands.
            begin(ranks)
            check(ranks, mine, f"the facts of {name}", is_new=True)
        agree(ranks, name, facts)
        if len(agreed) >= _AGREED:
            agreed.clear()
        found = agreed[mine] = mine
    return found


def _needing(bits: tuple[int, ...]) -> str:
    names = (name for name, bit in zip(("query", "key", "value"), bits, strict=True) if bit)
    return ", ".join(names) or "none"


def check_keys_finite(key: Tensor, value: Tensor, layout: Layout, rank: int, layer: bool | str) -> None:
    """Raise ValueError with the place of the first NaN or infinity."""
    for name, x in (("key", key), ("value", value)):
        found = first_nonfinite(x, 128)
        if found is not None:
            batch, head, tile = found
            position = int(layout.positions(rank)[tile * 128])
            where = f" of {layer}" if isinstance(layer, str) else ""
            raise ValueError(
                f"{name}: expected finite numbers, got NaN or infinity at rank {dist.get_rank()}{where}, batch element "
                f"{batch}, head {head}, in the 128 tokens from position {position}"
            )


def _reasons_against_ring(pattern: Pattern, call: Call) -> list[str]:
    """Return the reasons why keys cannot pass around a ring."""
    reasons = lacking(call, "alibi_slopes", "dropout_p")
    if not isinstance(pattern, RING_PATTERNS):
        reasons.append(f"supports the patterns dense and causal, got {pattern!r}")
    if call.backend == "reference":
        reasons.append("does not support backend='reference'")
    if torch.compiler.is_compiling():
        reasons.append("does not support torch.compile")
    return reasons


def _with_lengths(key_mask: Tensor | None, lengths: Tensor | None, runs: Iterable[Run], key: Tensor) -> Tensor | None:
    """Return a mask of the keys at these positions that are kept and lie inside the lengths."""
    if lengths is None:
        return key_mask
    inside = positions_of(runs, key.device) < lengths[:, None]
    return inside if key_mask is None else key_mask & inside
