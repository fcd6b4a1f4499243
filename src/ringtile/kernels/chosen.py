"""The operators of attention over lists of keys per query: schema, fake tensors, vmap, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringtile.kernels import contracts, operators
from ringtile.kernels.contracts import OPTIONAL, Attended, Call, Grads, Lists, Rows, check_memory, options_of

_LISTS = f"Tensor indices, Tensor limits, {operators.schema(Call)}"

operators.library.define(f"forward_lists(Tensor q, Tensor k, Tensor v, {_LISTS}) -> (Tensor, Tensor)")
operators.library.define(f"backward_lists({operators.schema(Rows)}, {_LISTS}) -> (Tensor, Tensor, Tensor)")
FORWARD_LISTS: Callable[..., Attended] = torch.ops.ringtile.forward_lists
BACKWARD_LISTS: Callable[..., Grads] = torch.ops.ringtile.backward_lists


def _options(call: Call) -> tuple[Call, ...]:
    """Return the call, if it has options that plain softmax lacks."""
    return (call,) if call.dropout_p or call.softcap or call.alibi_slopes is not None else ()


def _forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, limits: Tensor, *rest: Any) -> Any:
    call = Call(*rest)
    check_memory(("query", "key", "value", "indices", *OPTIONAL), (q, k, v, indices, *options_of(call)))
    # Lists that vmap repeats are views.
    lists = Lists(indices.contiguous(), call.block, limits.contiguous())
    return contracts.OF_LISTS[call.backend].forward(q, k, v, lists, call.scale, *_options(call))


def _backward(*arguments: Any) -> Any:
    rows, call = Rows(*arguments[:7]), Call(*arguments[9:])
    check_memory((*contracts.ROW_NAMES, "indices", *OPTIONAL), (*rows, arguments[7], *options_of(call)))
    lists = Lists(arguments[7].contiguous(), call.block, arguments[8].contiguous())
    return contracts.OF_LISTS[call.backend].backward(rows, lists, call.scale, *_options(call))


operators.register("forward_lists", _forward, operators.fake_forward, 5)
operators.register("backward_lists", _backward, operators.fake_backward, 9)


def _compute(q: Tensor, k: Tensor, v: Tensor, call: Call, *tensors: Tensor) -> Attended:
    return FORWARD_LISTS(q, k, v, *tensors[:2], *operators.with_tensors(call, *tensors[2:]))


def _differentiate(*arguments: Any) -> Grads:
    rows, call, tensors = arguments[:7], arguments[7], arguments[8:]
    return BACKWARD_LISTS(*rows, *tensors[:2], *operators.with_tensors(call, *tensors[2:]))


_again = operators.without_derivative(
    _differentiate,
    "attention over Chosen lists has no second derivative, and none in forward mode; with backend='reference' it has",
)
_Attention = operators.differentiable(_compute, _differentiate, _again, 1)


def attend_lists(q: Tensor, k: Tensor, v: Tensor, lists: Lists, call: Call) -> Attended:
    """Return the output and lse of a call over lists, differentiable in q, k and v. The call names its backend."""
    indices, limits = lists.indices, lists.limits
    call = call._replace(block=lists.block)
    if not operators.is_differentiated(q, k, v):
        return FORWARD_LISTS(q, k, v, indices, limits, *call)
    plain, *tensors = operators.apart(call)
    out, lse = operators.applied(_Attention).apply(q, k, v, plain, indices, limits, *tensors)
    return out, lse
