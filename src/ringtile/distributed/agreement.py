"""What ranks compare of a call before its first exchange, and the exchange that its later calls find again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

import ringtile
from ringtile.distributed.exchange import Exchange, Plan
from ringtile.distributed.failures import agree, watch
from ringtile.distributed.heads import HeadPlan
from ringtile.distributed.layout import Layout
from ringtile.distributed.lockstep import Facts, begin, check
from ringtile.distributed.process_groups import carries_cpu, of_group
from ringtile.distributed.relays import Relays
from ringtile.distributed.ulysses import HeadExchange
from ringtile.kernels.contracts import Call

AGREED = 1 << 16
"""When a group has compared so many calls, its ranks forget them, in the same call. Packed batches differ each time."""
EXCHANGES = 256
"""Exchanges that a group keeps for calls that are not compiled."""
_lock = Lock()

SIZES = ("batch", "heads", "key_heads", "head_dim", "value_dim")
NUMBERS = ("scale", "softcap", "dropout_p", "key_mask", "alibi_slopes", "sinks")


@dataclass
class Calls:
    """The calls of a group. It lives as long as the group."""

    agreed: dict[Facts, Facts] = field(default_factory=dict)
    """What was compared, whether or not a rank has a cached plan."""
    exchanges: OrderedDict[tuple[Any, ...], Exchange | HeadExchange] = field(default_factory=OrderedDict)
    """By plan, facts and groups. The last that were used."""
    in_graphs: dict[tuple[Any, ...], Exchange | HeadExchange] = field(default_factory=dict)
    """Exchanges of compiled graphs. Without its exchange a graph would be compiled again."""


def exchange_of(
    plan: Plan | Relays | HeadPlan, facts: Facts, *groups: dist.ProcessGroup, in_graph: bool
) -> Exchange | HeadExchange:
    """Return the exchange of a plan and of what ranks compare of its calls, in its groups, made once.

    If a compiled graph has it (``in_graph``), it stays as long as its first group.
    """
    call = plan, facts, *map(ref, groups)
    calls = of_group(groups[0], Calls)
    # Threads that share a group must not make two exchanges of one call: each would count its own.
    with _lock:
        found = calls.in_graphs.get(call)
        if found is not None:
            return found
        found = calls.exchanges.pop(call, None)
        if found is None:
            make: Any = HeadExchange if isinstance(plan, HeadPlan) else Exchange
            found = make(plan, facts, *groups)
        kept: dict[Any, Any] = calls.in_graphs if in_graph else calls.exchanges
        kept[call] = found
        if len(calls.exchanges) > EXCHANGES:
            calls.exchanges.popitem(last=False)
        return found


def shapes_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the sizes that `compare` compares, and for each tensor whether it needs a gradient."""
    # All ranks take part in a backward pass: one that needs none would keep the others waiting.
    needs = [int(torch.is_grad_enabled() and x.requires_grad) for x in (query, key, value)]
    return *query.shape[:2], key.shape[1], key.shape[3], value.shape[3], *needs


def numbers_of(call: Call, has_mask: bool, has_sinks: bool) -> tuple[float, ...]:
    """Return the options that `compare` compares, by `NUMBERS`: of tensors whether they are given."""
    return call.scale, call.softcap, call.dropout_p, has_mask, call.alibi_slopes is not None, has_sinks


def compare(
    ranks: dist.ProcessGroup, name: str, layout: Layout, shapes: tuple[int, ...], dtype: str, **more: str | float
) -> Facts:
    """Return the facts of a call, after a comparison with the other ranks, once. Raise PlanMismatch if they differ.

    Later calls compare a digest of them in every exchange.
    """
    needing = (name for name, bit in zip(("query", "key", "value"), shapes[5:], strict=False) if bit)
    facts: dict[str, str | float] = {
        "tokens": layout.n_tokens,
        **dict(zip(SIZES, shapes, strict=False)),
        **({"gradients": ", ".join(needing) or "none"} if shapes else {}),
        "dtype": dtype,
        "layout": layout.text,
        **more,
        "ringtile": ringtile.__version__,
        "torch": torch.__version__,
    }
    # Versions are facts, too: another version can plan other messages for the same call.
    mine = Facts(name, tuple(facts.items()))
    agreed = of_group(ranks, Calls).agreed
    found = agreed.get(mine)
    if found is None:
        watch(ranks)
        if carries_cpu(ranks):
            # Ranks that have compared theirs before are at the first exchange of their call, and do not shake hands.
            begin(ranks)
            check(ranks, mine, f"the facts of {name}", is_new=True)
        agree(ranks, name, facts)
        # All ranks have compared the same calls, so all forget them in the same call.
        if len(agreed) >= AGREED:
            agreed.clear()
        found = agreed[mine] = mine
    return found
