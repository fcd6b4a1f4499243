"""The operators that every backend implements: schema, fake tensors, vmap, autograd."""

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ringtile.kernels.contracts import (
    BACKENDS,
    OPTIONAL,
    ROW_NAMES,
    Attended,
    Call,
    Grads,
    Rows,
    accumulator,
    check_memory,
    has_memory,
    is_batched,
    new_out,
    options_of,
)
from ringtile.kernels.plans import prepared_of
from ringtile.patterns.private import (
    add_batch,
    in_forward_mode,
    is_profiled,
    is_traced,
    is_transformed,
    n_dispatch_modes,
    n_function_modes,
    outside_vmap_mode,
    remove_batch,
    tree_map,
)

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


def fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Attended:
    """Return a new output and lse. ``rest`` is the call."""
    return new_out(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulator(q))


def fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return new gradients of q, k and v."""
    return tuple(x.new_empty(x.shape) for x in arguments[2:5])


def _fake_double_backward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, out, lse = arguments[5:10]
    return tuple(x.new_empty(x.shape) for x in (out, lse, q, k, v))


def _folded(size: int, x: Any, dim: Any, batch: int = -1) -> Any:
    """Fold a vmapped dimension into the batch. Tensors that are not vmapped, or have a batch of 1, are repeated."""
    if not isinstance(x, Tensor):
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)


def _one_by_one(op: Any, size: int, in_dims: Any, arguments: Any) -> Any:
    """Return the stacked results of an operator for each example."""

    def example(number: int) -> Any:
        return op(*tree_map(lambda x, dim: x if dim is None else x.select(dim, number), arguments, in_dims))

    return tree_map(lambda *found: torch.stack(found), *map(example, range(size)))


def _vmap_rule(n_tensors: int, op: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        size, places = info.batch_size, slice(-len(Call._fields), None)
        call, dims = Call(*arguments[places]), Call(*in_dims[places])
        # The kernels have one seed, and one slope and number per head, for the whole batch.
        if not n_tensors or {dims.seed, dims.alibi_slopes, dims.head_at} != {None}:
            found = _one_by_one(op, size, in_dims, arguments)
            return found, tree_map(lambda _: 0, found)
        # Examples become batch elements: [V, B, H, N, D] with V examples is one call of [V * B, H, N, D].
        first = arguments[0]
        batch = first.shape[0] if in_dims[0] is None else first.movedim(in_dims[0], 0).shape[1]
        tensors = [_folded(size, x, dim, batch) for x, dim in zip(arguments[:n_tensors], in_dims, strict=False)]
        tiles = list(call.tiles)
        # The first tensor of an index is its groups: one row per batch element, or one row for all.
        if tiles and tiles[0].shape[0] > 1:
            tiles[0] = tiles[0].repeat(size, 1)
        batch_at = call.batch_at
        if call.dropout_p and batch_at is None:
            # Each example numbers its batch elements from 0.
            batch_at = torch.arange(batch, device=first.device)
        call = call._replace(
            tiles=tiles,
            batch_at=_folded(size, batch_at, dims.batch_at),
            key_bits=_folded(size, call.key_bits, dims.key_bits),
            key_lengths=_folded(size, call.key_lengths, dims.key_lengths),
        )
        outs = op(*tensors, *call)
        return tuple(out.unflatten(0, (size, -1)) for out in outs), (0,) * len(outs)

    return rule


def _of_batches(op: Any) -> Any:
    """Return an operator for ``is_grads_batched=True``, whose tensors belong to an older vmap, at level 1."""

    def compute(*arguments: Any) -> Any:
        dims = tree_map(lambda x: 0 if is_batched(x) else None, arguments)
        whole = tree_map(lambda x: remove_batch(x, 1, 1, 0) if is_batched(x) else x, arguments)
        with outside_vmap_mode():
            found = torch.vmap(op, dims)(*whole)
        return tree_map(lambda x: add_batch(x, 0, 1), found)

    return compute


def register(name: str, implementation: Any, fake: Any, n_tensors: int | None = None) -> None:
    """Give an operator of the library what it computes, its fake tensors and, with a number of tensors, vmap.

    That number have a batch and stand before a call, and all examples are one call. With 0, each is a call.
    """
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringtile::{name}", fake, lib=library)
    if n_tensors is not None:
        op = getattr(torch.ops.ringtile, name).default
        torch.library.register_vmap(f"ringtile::{name}", _vmap_rule(n_tensors, op), lib=library)
        library.impl(name, _of_batches(op), "Batched")


register("forward", _forward, fake_forward, 3)
register("backward", _backward, fake_backward, 7)
register("double_backward", _double_backward, _fake_double_backward, 10)
FORWARD: Callable[..., Attended] = torch.ops.ringtile.forward
BACKWARD: Callable[..., Grads] = torch.ops.ringtile.backward


def apart(call: Call) -> tuple[Any, ...]:
    """Return the call without tensors, then its tensors: autograd and torch.func must see each as an argument."""
    tensors = (*options_of(call), *call.tiles) if call.tiles or any(x is not None for x in options_of(call)) else ()
    absent: dict[str, Any] = dict.fromkeys(OPTIONAL)
    plain = call._replace(tiles=(), **absent)
    # In forward mode, vmap of torch.func would take a tuple for several arguments.
    return (lambda: plain) if is_transformed() else plain, *tensors


def with_tensors(call: Any, *tensors: Tensor | None) -> Call:
    """Return the call from the results of `apart`."""
    plain: Call = call() if callable(call) else call
    if not tensors:
        return plain
    count = len(OPTIONAL)
    optional: dict[str, Any] = dict(zip(OPTIONAL, tensors[:count], strict=True))
    return plain._replace(tiles=[x for x in tensors[count:] if x is not None], **optional)


_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def is_unseen(*tensors: Tensor | None) -> bool:
    """Return True if nobody sees whether the operator is called through PyTorch's dispatcher.

    A call of a few tokens is a tenth faster without it. Compilers, modes, tracers, profilers, transforms, devices other
    than CPUs and GPUs, subclasses of tensors, and tensors without plain memory (sparse, nested, lazily negated, zero,
    freed) need it.
    """
    try:
        return (
            not torch.compiler.is_compiling()
            and not n_dispatch_modes()
            and not n_function_modes()
            and not is_transformed()
            and not is_profiled()
            and not is_traced()
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
    except RuntimeError:
        # The tensors of ``is_grads_batched=True`` have no address.
        return False


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Any = None) -> Attended:
    """Return the output and lse, without a derivative. See `attention` for ``prepared``."""
    if prepared is None and not is_unseen(q, k, v, *options_of(call)):
        return FORWARD(q, k, v, *call)
    extra = prepared_of(q, k, v, call) if prepared is None else (prepared,)
    found: Attended = BACKENDS[call.backend].forward(q, k, v, call, *extra)
    return found


def run_backward(rows: Rows, call: Call, prepared: Any = None) -> Grads:
    """Return the gradients of q, k and v, without a derivative."""
    # The gradients of the results are new, and whoever sees operators can have come since the forward pass.
    if not is_unseen(*rows, *options_of(call)):
        return BACKWARD(*rows, *call)
    extra = prepared_of(rows.q, rows.k, rows.v, call) if prepared is None else (prepared,)
    grads: Grads = BACKENDS[call.backend].backward(rows, call, *extra)
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

        jvp = backward

    return Last


def _differentiate_twice(*arguments: Any) -> tuple[Tensor, ...]:
    call = with_tensors(*arguments[10:])
    found: tuple[Tensor, ...] = torch.ops.ringtile.double_backward(*arguments[:10], *call)
    return found


_DoubleBackward = without_derivative(
    _differentiate_twice,
    "sparse_attention has no third derivative, and none of one in forward mode; with backend='reference' it has",
)


class _Backward(torch.autograd.Function):
    """The backward operator, itself differentiable once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Grads:
        return BACKWARD(*arguments[:7], *with_tensors(*arguments[8:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[8]
        ctx.save_for_backward(*inputs[:7], *inputs[9:])
        ctx.save_for_forward(*inputs[:7], *inputs[9:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, rest = saved[:7], saved[7:]
        found = _DoubleBackward.apply(*cotangents, *rows, ctx.call, *rest)
        out_grad, lse_grad, q, k, v = found
        lse_grad = None if rows[1] is None else lse_grad
        return out_grad, lse_grad, q, k, v, None, None, None, None, *(None for _ in rest)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        rows, rest = Rows(*ctx.saved_tensors[:7]), ctx.saved_tensors[7:]
        # Gradients are linear in out_grad and lse_grad. Along q, k and v, their matrix is symmetric: it is a hessian.
        moved = rows._replace(out_grad=_or_zero(tangents[0], rows.out_grad), lse_grad=tangents[1])
        once: Any = _Backward
        first = once.apply(*moved, None, ctx.call, *rest)
        along = map(_or_zero, tangents[2:5], rows[2:5])
        second = _DoubleBackward.apply(*along, *rows, ctx.call, *rest)[2:]
        return tuple(x + y for x, y in zip(first, second, strict=True))


def _or_zero(tangent: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if tangent is None else tangent


def _push(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
    """Return the derivatives of the output and the lse along tangents of q, k and v."""
    q, k, v, out, lse, *rest = ctx.saved_tensors
    # Gradients are linear in out_grad. So their product with the tangents has the derivative of the output as its own.
    rows = torch.zeros_like(out), None, q, k, v, out, lse
    along = map(_or_zero, tangents, (q, k, v))
    found: tuple[Tensor, ...] = _DoubleBackward.apply(*along, *rows, ctx.plain[1], *rest)[:2]
    return found


def _compute(q: Tensor, k: Tensor, v: Tensor, prepared: Any, *call: Any) -> Attended:
    found = run_forward(q, k, v, with_tensors(*call), prepared)
    # A result that is a view cannot have a tangent.
    return (found[0].clone(), found[1].clone()) if in_forward_mode() else found


def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    return run_backward(Rows(*arguments[:7]), with_tensors(*arguments[8:]), arguments[7])


def differentiable(
    compute: Callable[..., Any],
    differentiate: Callable[..., Any],
    again: Any,
    n_plain: int,
    push: Callable[..., Any] | None = None,
) -> Any:
    """Return ``compute`` with gradients: a function of q, k, v, ``n_plain`` other values and tensors.

    It composes with grad, vmap and compile, and with forward mode by ``push``, or else it raises as ``again`` there.
    ``differentiate`` takes `Rows`, the values and the tensors, and returns the gradients of q, k, v and of the first of
    the tensors. ``again`` does too, for derivatives.
    """

    class Attention(torch.autograd.Function):
        generate_vmap_rule = True
        pushed: Any = None
        forward = staticmethod(compute)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Attended) -> None:
            ctx.plain = inputs[3 : 3 + n_plain]
            ctx.set_materialize_grads(False)
            saved = *inputs[:3], *output, *inputs[3 + n_plain :]
            ctx.save_for_backward(*saved)
            if in_forward_mode():
                ctx.save_for_forward(*saved)

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

    # Dynamo traces no function with a jvp.
    Attention.pushed = type(Attention.__name__, (Attention,), {"jvp": staticmethod(push or again.jvp)})
    return Attention


Attention = differentiable(_compute, _differentiate, _Backward, 2, _push)


class _Direct(torch.autograd.Function):
    """`Attention` without transforms of torch.func. Without setup_context, PyTorch does not bind a signature."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Attended:
        output: Attended = Attention.forward(*arguments)
        Attention.setup_context(ctx, arguments, output)
        return output

    backward, jvp = Attention.backward, Attention.pushed.jvp


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Return True if a derivative may follow. A tensor does not show if an outer transform of torch.func tracks it."""
    if is_transformed() or in_forward_mode():
        return True
    found = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if found and is_traced():
        raise NotImplementedError("torch.jit.trace: expected torch.no_grad(), traced attention has no gradient")
    return found


def applied(function: Any, plain: Any = None) -> Any:
    """Return what `differentiable` made for a compiler, or else ``plain``, by default with forward mode."""
    return function if torch.compiler.is_compiling() else plain or function.pushed


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Any = None) -> Attended:
    """Return the output and lse of one call, differentiable in q, k and v."""
    if not is_differentiated(q, k, v):
        return run_forward(q, k, v, call, prepared)
    function = applied(Attention, None if is_transformed() else _Direct)
    out, lse = function.apply(q, k, v, prepared, *apart(call))
    return out, lse
