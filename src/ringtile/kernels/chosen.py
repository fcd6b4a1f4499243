"""The operators of attention over lists of keys per query: schema, fake tensors, vmap, autograd."""

from typing import Any

import torch
from torch import Tensor

from ringtile.kernels import operators
from ringtile.kernels.contracts import (
    OPTIONAL,
    ROW_NAMES,
    Call,
    Lists,
    Rows,
    check_memory,
    lists_backend_of,
    options_of,
)

_LISTS = f"Tensor indices, Tensor limits, {operators.schema(Call)}"

operators.library.define(f"forward_lists(Tensor q, Tensor k, Tensor v, {_LISTS}) -> (Tensor, Tensor)")
operators.library.define(f"backward_lists({operators.schema(Rows)}, {_LISTS}) -> (Tensor, Tensor, Tensor)")
FORWARD_LISTS, BACKWARD_LISTS = torch.ops.ringtile.forward_lists, torch.ops.ringtile.backward_lists


def _options(call: Call) -> tuple[Call, ...]:
    """Return the call, if it has options that plain softmax lacks."""
    return (call,) if call.dropout_p or call.softcap or call.alibi_slopes is not None else ()


def _forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, limits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = Call(*rest)
    check_memory(("query", "key", "value", "indices", *OPTIONAL), (q, k, v, indices, *options_of(call)))
    # Lists that vmap repeats are views.
    lists = Lists(indices.contiguous(), call.block, limits.contiguous())
    return lists_backend_of(call.backend).forward(q, k, v, lists, call.scale, *_options(call))


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, call = Rows(*arguments[:7]), Call(*arguments[9:])
    check_memory((*ROW_NAMES, "indices", *OPTIONAL), (*rows, arguments[7], *options_of(call)))
    lists = Lists(arguments[7].contiguous(), call.block, arguments[8].contiguous())
    return lists_backend_of(call.backend).backward(rows, lists, call.scale, *_options(call))


operators.register("forward_lists", _forward, operators.fake_forward, 5)
operators.register("backward_lists", _backward, operators.fake_backward, 9)


def _differentiate(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = BACKWARD_LISTS(*arguments[:9], *operators.with_tensors(*arguments[9:]))
    return grads


_Backward = operators.without_derivative(
    _differentiate, "attention over Chosen lists has no second derivative; with backend='reference' it has"
)


class _Attention(torch.autograd.Function):
    """The forward operator with its gradients. It composes with vmap, grad and compile."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = FORWARD_LISTS(*arguments[:5], *operators.with_tensors(*arguments[5:]))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call = inputs[5]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5], *inputs[6:])

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, indices, limits, *rest = ctx.saved_tensors
        if out_grad is None:
            if lse_grad is None:
                return (None,) * (6 + len(rest))
            out_grad = torch.zeros_like(out)
        rows = Rows(out_grad, lse_grad, q, k, v, out, lse)
        if torch.compiler.is_compiling() or not operators.is_differentiated(*rows):
            # Dynamo traces no Function inside another.
            grads = BACKWARD_LISTS(*rows, indices, limits, *operators.with_tensors(ctx.call, *rest))
        else:
            grads = _Backward.apply(*rows, indices, limits, ctx.call, *rest)
        return *grads, None, None, None, *(None for _ in rest)


def attend_lists(q: Tensor, k: Tensor, v: Tensor, lists: Lists, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and lse of a call over lists, differentiable in q, k and v. The call names its backend."""
    indices, limits = lists.indices, lists.limits
    if torch._C._are_functorch_transforms_active():
        # Examples become batch elements, each with its own lists.
        indices, limits = (x.expand(q.shape[0], *x.shape[1:]) for x in (indices, limits))
    tensors = q, k, v, indices, limits
    call = call._replace(block=lists.block)
    if not operators.is_differentiated(q, k, v):
        found: tuple[Tensor, Tensor] = FORWARD_LISTS(*tensors, *call)
        return found
    out, lse = _Attention.apply(*tensors, *operators.apart(call))  # type: ignore[no-untyped-call]
    return out, lse
