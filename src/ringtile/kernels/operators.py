"""The operators that every backend implements: schema, fake tensors, vmap, autograd."""

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringtile.kernels.contracts import (
    BACKENDS,
    OPTIONAL,
    ROW_NAMES,
    Call,
    Rows,
    accumulator,
    check_memory,
    has_memory,
    new_out,
    options_of,
)
from ringtile.kernels.plans import prepared_of

_KINDS: dict[Any, str] = {
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
}
"""Types of arguments in the schema of an operator. Sizes can be symbolic in a graph."""


def schema(fields: Any) -> str:
    """Return the arguments of an operator that a NamedTuple declares."""
    return ", ".join(f"{_KINDS[kind]} {name}" for name, kind in get_type_hints(fields).items())


_CALL, _ROWS = schema(Call), schema(Rows)

library = torch.library.Library("ringtile", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)")
library.define(f"backward({_ROWS}, {_CALL}) -> (Tensor, Tensor, Tensor)")
library.define(
    f"double_backward(Tensor q_cot, Tensor k_cot, Tensor v_cot, {_ROWS}, {_CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    call = Call(*rest)
    check_memory(("query", "key", "value", *OPTIONAL), (q, k, v, *options_of(call)))
    return BACKENDS[call.backend].forward(q, k, v, call, *prepared_of(q, k, v, call))


def _backward(*arguments: Any) -> Any:
    rows, call = Rows(*arguments[:7]), Call(*arguments[7:])
    check_memory((*ROW_NAMES, *OPTIONAL), (*rows, *options_of(call)))
    return BACKENDS[call.backend].backward(rows, call, *prepared_of(rows.q, rows.k, rows.v, call))


def _double_backward(*arguments: Any) -> Any:
    check_memory(ROW_NAMES, arguments[3:10])
    return BACKENDS["blockwise"].double_backward(*arguments[:3], Rows(*arguments[3:10]), Call(*arguments[10:]))


def fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return a new output and lse. ``rest`` is the call."""
    return new_out(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulator(q))


def fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return new gradients of q, k and v."""
    return tuple(x.new_empty(x.shape) for x in arguments[2:5])


def _fake_double_backward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, out, lse = arguments[5:10]
    return tuple(x.new_empty(x.shape) for x in (out, lse, q, k, v))


def _folded(size: int, x: Any, dim: int | None) -> Any:
    """Fold a vmapped dimension into the batch. Tensors that are not vmapped are repeated."""
    if not isinstance(x, Tensor):
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap_rule(n_tensors: int, op: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # Examples become batch elements: [V, B, H, N, D] with V examples is one call of [V * B, H, N, D].
        size = info.batch_size
        call, dims = Call(*arguments[n_tensors:]), dict(zip(Call._fields, in_dims[n_tensors:], strict=True))
        if any(dims[name] is not None for name in ("seed", "alibi_slopes", "head_at")):
            # The kernels have one seed, and one slope and number per head, for the whole batch.
            pairs = list(zip(arguments, in_dims, strict=True))
            examples = ([x.select(dim, n) if isinstance(dim, int) else x for x, dim in pairs] for n in range(size))
            each = [op(*example) for example in examples]
            return tuple(torch.stack(outs) for outs in zip(*each, strict=True)), (0,) * len(each[0])
        tensors = [_folded(size, x, dim) for x, dim in zip(arguments[:n_tensors], in_dims, strict=False)]
        tiles = list(call.tiles)
        # The first tensor of an index is its groups: one row per batch element, or one row for all.
        if tiles and tiles[0].shape[0] > 1:
            tiles[0] = tiles[0].repeat(size, 1)
        batch_at = call.batch_at
        if call.dropout_p and batch_at is None:
            # Each example numbers its batch elements from 0.
            batch_at = torch.arange(tensors[0].shape[0] // size, device=tensors[0].device)
        call = call._replace(
            tiles=tiles,
            batch_at=_folded(size, batch_at, dims["batch_at"]),
            key_bits=_folded(size, call.key_bits, dims["key_bits"]),
            key_lengths=_folded(size, call.key_lengths, dims["key_lengths"]),
        )
        outs = op(*tensors, *call)
        return tuple(out.unflatten(0, (size, -1)) for out in outs), (0,) * len(outs)

    return rule


def register(name: str, implementation: Any, fake: Any, n_tensors: int = 0) -> None:
    """Give an operator of the library what it computes, its fake tensors and, with tensors before its call, vmap."""
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringtile::{name}", fake, lib=library)
    if n_tensors:
        rule = _vmap_rule(n_tensors, getattr(torch.ops.ringtile, name).default)
        torch.library.register_vmap(f"ringtile::{name}", rule, lib=library)


register("forward", _forward, fake_forward, 3)
register("backward", _backward, fake_backward, 7)
register("double_backward", _double_backward, _fake_double_backward, 10)
FORWARD: Callable[..., tuple[Tensor, Tensor]] = torch.ops.ringtile.forward
BACKWARD: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.ringtile.backward


def apart(call: Call) -> tuple[Any, ...]:
    """Return the call without tensors, then its tensors: autograd and torch.func must see each as an argument."""
    if not call.tiles and all(x is None for x in options_of(call)):
        return (call,)
    absent: dict[str, Any] = dict.fromkeys(OPTIONAL)
    return call._replace(tiles=(), **absent), *options_of(call), *call.tiles


def with_tensors(call: Call, *tensors: Tensor | None) -> Call:
    """Return the call from the results of `apart`."""
    if not tensors:
        return call
    count = len(OPTIONAL)
    optional: dict[str, Any] = dict(zip(OPTIONAL, tensors[:count], strict=True))
    return call._replace(tiles=[x for x in tensors[count:] if x is not None], **optional)


_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def is_unseen(*tensors: Tensor | None) -> bool:
    """Return True if nobody sees whether the operator is called through PyTorch's dispatcher.

    A call of a few tokens is a tenth faster without it. Compilers, modes, tracers, profilers, transforms, devices other
    than CPUs and GPUs, subclasses of tensors, and tensors without plain memory (sparse, nested, lazily negated, zero,
    freed) need it.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()
        and torch._C._get_tracing_state() is None
        # Written out: each function called here would cost more than what it asks.
        and all(
            [
                type(x) in _PLAIN
                and (x.is_cpu or x.is_cuda)
                and x.layout is _STRIDED
                and not x.is_nested
                and not x.is_neg()
                and (x.data_ptr() >> 40 != 0 or has_memory(x))
                for x in tensors
                if x is not None
            ]
        )
    )


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Any = None) -> tuple[Tensor, Tensor]:
    """Return the output and lse, without a derivative. See `attention` for ``prepared``."""
    if prepared is None and not is_unseen(q, k, v, *options_of(call)):
        return FORWARD(q, k, v, *call)
    extra = prepared_of(q, k, v, call) if prepared is None else (prepared,)
    found: tuple[Tensor, Tensor] = BACKENDS[call.backend].forward(q, k, v, call, *extra)
    return found


def run_backward(rows: Rows, call: Call, prepared: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, without a derivative."""
    # The gradients of the results are new, and whoever sees operators can have come since the forward pass.
    if not is_unseen(*rows, *options_of(call)):
        return BACKWARD(*rows, *call)
    extra = prepared_of(rows.q, rows.k, rows.v, call) if prepared is None else (prepared,)
    grads: tuple[Tensor, Tensor, Tensor] = BACKENDS[call.backend].backward(rows, call, *extra)
    return grads


def without_derivative(compute: Callable[..., Any], message: str) -> type[torch.autograd.Function]:
    """Return a function of tensors that raises this NotImplementedError if it is differentiated."""

    class Last(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(compute)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> None:
            raise NotImplementedError(message)

    return Last


def _differentiate_twice(*arguments: Any) -> tuple[Tensor, ...]:
    call = with_tensors(*arguments[10:])
    found: tuple[Tensor, ...] = torch.ops.ringtile.double_backward(*arguments[:10], *call)
    return found


_DoubleBackward = without_derivative(
    _differentiate_twice, "sparse_attention has no third derivative; with backend='reference' it has"
)


class _Backward(torch.autograd.Function):
    """The backward operator, itself differentiable once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return BACKWARD(*arguments[:7], *with_tensors(*arguments[8:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[8]
        ctx.save_for_backward(*inputs[:7], *inputs[9:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, rest = saved[:7], saved[7:]
        found = _DoubleBackward.apply(*cotangents, *rows, ctx.call, *rest)
        out_grad, lse_grad, q, k, v = found
        lse_grad = None if rows[1] is None else lse_grad
        return out_grad, lse_grad, q, k, v, None, None, None, None, *(None for _ in rest)


def _compute(q: Tensor, k: Tensor, v: Tensor, prepared: Any, *call: Any) -> tuple[Tensor, Tensor]:
    return run_forward(q, k, v, with_tensors(*call), prepared)


def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    return run_backward(Rows(*arguments[:7]), with_tensors(*arguments[8:]), arguments[7])


def differentiable(
    compute: Callable[..., Any], differentiate: Callable[..., Any], again: Any, n_plain: int, *, vmaps: bool = True
) -> type[torch.autograd.Function]:
    """Return ``compute`` with gradients: a function of q, k, v, ``n_plain`` other values and tensors.

    It composes with grad and compile, and with vmap if ``vmaps``. ``differentiate`` takes `Rows`, the values and the
    tensors, and returns the gradients of q, k, v and of the first of the tensors. ``again`` does too, for derivatives.
    """

    class Attention(torch.autograd.Function):
        generate_vmap_rule = vmaps
        forward = staticmethod(compute)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            ctx.plain = inputs[3 : 3 + n_plain]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:3], *output, *inputs[3 + n_plain :])

        @staticmethod
        def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
            q, k, v, out, lse, *tensors = ctx.saved_tensors
            if out_grad is None:
                if lse_grad is None:
                    return (None,) * (3 + n_plain + len(tensors))
                out_grad = torch.zeros_like(out)
            rows = Rows(out_grad, lse_grad, q, k, v, out, lse)
            compiling = torch.compiler.is_compiling()
            # Without a second derivative, a Function would only cost time, and Dynamo traces none inside another.
            plain = compiling or not is_differentiated(*rows)
            grads = (differentiate if plain else again.apply)(*rows, *ctx.plain, *tensors)
            missing = len(tensors) + 3 - len(grads)
            return *grads[:3], *(None,) * n_plain, *grads[3:], *(None,) * missing

    return Attention


Attention = differentiable(_compute, _differentiate, _Backward, 2)


class _Direct(torch.autograd.Function):
    """`Attention` without transforms of torch.func. Without setup_context, PyTorch does not bind a signature."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = Attention.forward(*arguments)
        Attention.setup_context(ctx, arguments, output)
        return output

    backward = Attention.backward


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Return True if a derivative may follow. A tensor does not show if an outer transform of torch.func tracks it."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Any = None) -> tuple[Tensor, Tensor]:
    """Return the output and lse of one call, differentiable in q, k and v."""
    if not is_differentiated(q, k, v):
        return run_forward(q, k, v, call, prepared)
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    function: Any = Attention if transformed else _Direct
    out, lse = function.apply(q, k, v, prepared, *apart(call))
    return out, lse
