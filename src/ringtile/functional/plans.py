"""What calls of equal structure share, made once: their checks, their backend and what it prepared.

Tensors of equal shapes, strides and dtypes that attend by one rule differ in their addresses alone. Of a call of a few
tokens, checks and the search for an index would take as long as its scores.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from types import NoneType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.kernels.contracts import Call, index_of, is_unseen, options_of
from ringtile.kernels.select import is_logged, prepare_of, select

Structure = tuple[Hashable, ...]
"""All that the plan of a call depends on."""


class Plan(NamedTuple):
    """A checked call without tensors, and what its backend prepared for it."""

    call: Call
    prepared: Any
    """What the backend of the call prepared, or None if there is none that prepares: `select` names it at each call."""
    owner: ref[BlockIndex] | None
    """The index that the structure names or the prepared part points into. The plan leaves the cache when it dies."""


_MOST_PLANS = 256
_plans: OrderedDict[Hashable, Plan] = OrderedDict()
# Key: `structure_of`. Bound: _MOST_PLANS entries, of which the oldest leaves first. Owner: the index, with which its
# plans leave, because their prepared parts keep its tensors. So the number of a dead index never finds a plan, either.
_lock = threading.Lock()


def structure_of(
    name: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int | None,
    scale: float | None,
    softcap: float,
    enable_gqa: bool,
    backend: str | None,
    has: tuple[bool, ...],
) -> Structure | None:
    """Return all that the plan of a call depends on, or None if every check must run.

    ``name`` is the text of the pattern or the number of the index, None if the pattern has no text. ``has`` is true for
    each other option on which the checks and the backend depend. `is_unseen` is true for the three tensors.
    """
    # Values of other types can be equal to valid ones: True == 1. So are two zeros, but -0.0 has other gradients.
    types = type(start) in (int, NoneType), type(scale) in (float, int, NoneType), type(backend) in (str, NoneType)
    if not all(types) or type(softcap) not in (float, int) or scale == 0 or is_logged():
        return None
    return (
        *(name, query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()),
        *(query.dtype, key.dtype, value.dtype, query.device, key.device, value.device),
        *(start, scale, softcap, bool(enable_gqa), backend, has),
    )


def found_plan(structure: Structure | None) -> Plan | None:
    """Return the plan of a structure, or None if it has not been made yet."""
    return None if structure is None else _plans.get(structure)


def planned(
    structure: Structure | None, q: Tensor, k: Tensor, v: Tensor, call: Call, index: BlockIndex | None
) -> tuple[Call, Any]:
    """Return a checked call with its backend, and what that has prepared for it, or None.

    ``index`` is None if the call has a pattern text. Raise ValueError if the backend that the call names does not
    support it.
    """
    plan = None
    if structure is not None:
        structure = structure if index is None else (id(index), *structure[1:])
        plan = found_plan(structure) or _make_plan(structure, q, k, v, call, index)
    if plan is None or plan.prepared is None:
        return call._replace(backend=select(q, k, v, call)), None
    # Options can be tensors that only PyTorch's dispatcher reads, as lazily zero ones.
    return call._replace(backend=plan.call.backend), plan.prepared if is_unseen(*options_of(call)) else None


def _make_plan(structure: Structure, q: Tensor, k: Tensor, v: Tensor, call: Call, index: BlockIndex | None) -> Plan:
    backend = select(q, k, v, call)
    prepared = None
    if (prepare := prepare_of(backend)) is not None:
        index = index_of(call, q, k) if index is None else index
        prepared = prepare(q, k, v, index)
    owner = None if index is None else ref(index, lambda _: _plans.pop(structure, None))
    name = call.backend if prepared is None else backend
    plain = Call(call.start, call.block, call.scale, pattern=call.pattern, softcap=call.softcap, backend=name)
    plan = Plan(plain, prepared, owner)
    with _lock:
        _plans[structure] = plan
        if len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)
    return plan


def forget_plans() -> None:
    """Forget all plans, for tests that change what they depend on, as the backends that are available."""
    _plans.clear()
