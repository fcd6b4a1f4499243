"""What calls of equal structure share, made once: their checks, their backend and what it prepared.

Tensors of equal shapes, strides and dtypes that attend by one rule differ in their addresses alone. Of a call of a few
tokens, checks and the search for an index would take as long as its scores.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.kernels.contracts import BACKENDS, Call, index_of

Structure = tuple[Hashable, ...]
"""All that the plan of a call depends on."""


class Plan(NamedTuple):
    """A checked call without tensors, and what its backend prepared for it."""

    call: Call
    prepared: Any
    """What ``prepare(q, k, v, index)`` of the call's backend returned, the last argument of its ``forward`` and
    ``backward``, or None: `select` names a backend at each call. It refers to no tensor of the caller nor the index."""
    owner: ref[BlockIndex] | None
    """The index that the structure names or the prepared part points into. The plan leaves the cache when it dies."""


_MOST_PLANS = 256
_plans: OrderedDict[Hashable, Plan] = OrderedDict()
# Key: the structure of a call, by the arguments of `sparse_attention` or by those of an operator: each call looks once.
# Bound: _MOST_PLANS entries, the oldest leaves first. Owner: the index, with which its plans leave, because their
# prepared parts keep its tensors. So the number of a dead index never finds a plan, either.
_lock = threading.Lock()


def structure_of(name: Hashable, q: Tensor, k: Tensor, v: Tensor, *rest: Hashable) -> Structure:
    """Return the structure of a call: the name of its kept pairs, the form of its tensors, and all else that counts."""
    return (
        *(name, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, *rest),
    )


def found_plan(structure: Structure) -> Plan | None:
    """Return the plan of a structure, or None if it has not been made yet."""
    return _plans.get(structure)


def prepared_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Any, ...]:
    """Return what the backend of an operator's call prepared, as further arguments of its functions.

    Only calls with the text of a pattern have plans: the tensors of an index do not tell when that index dies.
    """
    if not call.pattern or not hasattr(BACKENDS[call.backend], "prepare"):
        return ()
    structure = structure_of(call.pattern, q, k, v, call.start, call.block, call.backend)
    plan = found_plan(structure) or make_plan(structure, q, k, v, call, None, call.backend)
    return () if plan.prepared is None else (plan.prepared,)


def make_plan(
    structure: Structure, q: Tensor, k: Tensor, v: Tensor, call: Call, index: BlockIndex | None, named: str
) -> Plan:
    """Return the plan of a checked call with its backend. ``index`` is None if the call has the text of a pattern."""
    prepared = None
    if prepare := getattr(BACKENDS[call.backend], "prepare", None):
        index = index_of(call, q, k) if index is None else index
        prepared = prepare(q, k, v, index)
    owner = None if index is None else ref(index, lambda _: _plans.pop(structure, None))
    name = named if prepared is None else call.backend
    plain = Call(call.start, call.block, call.scale, pattern=call.pattern, softcap=call.softcap, backend=name)
    plan = Plan(plain, prepared, owner)
    with _lock:
        _plans[structure] = plan
        if len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)
    return plan
