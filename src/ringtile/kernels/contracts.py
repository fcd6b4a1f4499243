"""The options of a softmax, and the operators that every backend implements: schema, fake tensors, vmap, autograd.

Shapes: ``B`` batch, ``H`` query heads, ``Hkv`` key heads, ``Nq`` queries, ``Nk`` keys, ``D`` and ``Dv`` head dims. The
kept pairs come either as the tensors of a `BlockIndex` or as pattern text, which means the same in another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypedDict, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringtile.index import BlockIndex, build_index
from ringtile.index.block_index import TENSOR_FIELDS
from ringtile.index.tiles import pack_words, unpack_words
from ringtile.kernels.spans import INDEX, span
from ringtile.patterns import parse

_TILES_AT_MOST = 1 << 22
"""A dense pattern with more tiles than this goes to a kernel without an index."""


class SoftmaxOptions(TypedDict, total=False):
    """Options of every attention function, for type checkers. All other lists of options derive from these two."""

    key_mask: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    scale: float | None


class RowOptions(SoftmaxOptions, total=False):
    """Options of attention in one softmax per row, too."""

    key_lengths: Tensor | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    head_at: Tensor | None
    batch_at: Tensor | None


class Call(NamedTuple):
    """The arguments that the three operators share, after their own tensors, in schema order."""

    start: int
    block: int
    scale: float
    tiles: Sequence[Tensor] = ()
    """The tensors of a `BlockIndex`, or none if ``pattern`` defines the kept pairs."""
    pattern: str = ""
    key_bits: Tensor | None = None
    """``[B, ceil(Nk / 32)]`` int32 bitmask of the keys to attend to."""
    key_lengths: Tensor | None = None
    """``[B]`` integers: keys from this position on do not exist."""
    seed: Tensor | None = None
    """One int64 element."""
    alibi_slopes: Tensor | None = None
    """``[H]``."""
    head_at: Tensor | None = None
    """``[H]`` int64: the number of each head in the whole problem, for dropout."""
    batch_at: Tensor | None = None
    """``[B]`` int64: the number of each batch element in the whole problem, for dropout."""
    dropout_p: float = 0.0
    softcap: float = 0.0
    backend: str = ""


class Rows(NamedTuple):
    """The tensors of a backward pass. ``out`` and ``lse`` can be those of a softmax over more keys."""

    out_grad: Tensor
    lse_grad: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Masses(NamedTuple):
    """The arguments of `ringtile.kernels.masses.pooled_masses`, with queries and keys that record no gradient."""

    query: Tensor
    key: Tensor
    seen: Tensor
    groups: Tensor
    bias: Tensor | None
    segment: int
    pool: str
    by_sign: bool
    scale: float


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

_OPTIONAL = tuple(name for name, kind in get_type_hints(Call).items() if kind == Tensor | None)
"""The fields of a call that are tensors or None."""

_PLACES = slice(Call._fields.index(_OPTIONAL[0]), Call._fields.index(_OPTIONAL[-1]) + 1)


def options_of(call: Call) -> tuple[Any, ...]:
    """Return the fields of a call that are tensors or None."""
    return call[_PLACES]


library = torch.library.Library("ringtile", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)")
library.define(f"backward({_ROWS}, {_CALL}) -> (Tensor, Tensor, Tensor)")
library.define(
    f"double_backward(Tensor q_cot, Tensor k_cot, Tensor v_cot, {_ROWS}, {_CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Backend(Protocol):
    """The functions of a backend module."""

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
        """Return the reasons why this backend does not support a call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, H, Nq, Dv]``, laid out as `new_out`, and a contiguous lse, float32 or better."""

    def backward(self, rows: Rows, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, contiguous, in their dtypes."""


class PreparingBackend(Backend, Protocol):
    """A backend that does the part of a call that calls of equal structure share only once. Others lack these."""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, index: BlockIndex) -> Any:
        """Return what calls over these shapes, strides, dtypes and pairs share, or None.

        It is the last argument of ``forward`` and ``backward``, which trust it unless the index has changed in place.
        It refers to no tensor of the caller and not to the `BlockIndex`, so that both can die before it.
        """

    def pooled_masses(self, masses: Masses) -> Tensor | None:
        """Return the result of the operator of this name, or None if the backend does not support the call."""


_backends: dict[str, Backend] = {}


def install(backends: Mapping[str, Backend]) -> None:
    """Set the backends of the operators, by name. Backends import this module, so `select`, which knows all, calls it.

    Whatever calls an operator imports `select` first, because it needs the name of a backend.
    """
    _backends.update(backends)


def pack_keys(keep: Tensor) -> Tensor:
    """Pack ``[B, Nk]`` bool into ``[B, ceil(Nk / 32)]`` int32 words, key j in bit ``j % 32`` of word ``j // 32``."""
    # As a number of words, so that a graph with any number of keys can tell that the bits fill them.
    words = (keep.shape[1] + 31) // 32
    return pack_words(torch.nn.functional.pad(keep, (0, 32 * words - keep.shape[1])))


def key_keep(call: Call, n_keys: int) -> Tensor | None:
    """Return ``[B, Nk]`` bool, the keys that the call's own mask and lengths keep, or None if it has neither."""
    keep = None
    if call.key_bits is not None:
        keep = unpack_words(call.key_bits, n_keys)
    if call.key_lengths is not None:
        inside = torch.arange(n_keys, device=call.key_lengths.device) < call.key_lengths.unsqueeze(1)
        keep = inside if keep is None else keep & inside
    return keep


def index_of(call: Call, q: Tensor, k: Tensor) -> BlockIndex:
    """Return the block index of a call, from its own tensors or from its pattern text."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if call.pattern:
        with span(INDEX):
            rule = parse(call.pattern)
            return build_index(
                rule, n_queries, n_keys, start=call.start, num_heads=q.shape[1], block=call.block, device=q.device
            )
    return BlockIndex.from_tensors(call.tiles, block=call.block, start=call.start, n_queries=n_queries, n_keys=n_keys)


def is_remapped(call: Call) -> bool:
    """Return True if the tiles of a call lie at other positions than their numbers say."""
    named = dict(zip(TENSOR_FIELDS, call.tiles, strict=False))
    return any(name in named and named[name].numel() > 0 for name in ("row_at", "col_at"))


def dense_tiles_reason(q: Tensor, k: Tensor, call: Call) -> list[str]:
    """Return the reason why a dense or causal call is too large for an index, or no reasons."""
    if call.pattern in ("dense", "causal"):
        tiles = (q.shape[2] // call.block + 1) * (k.shape[2] // call.block + 1)
        if tiles > _TILES_AT_MOST:
            return [f"would need an index of {tiles} tiles, got {q.shape=}, {k.shape=}"]
    return []


def lacking(call: Call, *names: str) -> list[str]:
    """Return a reason for each of these arguments that a call has, because the kernel does not support them."""
    reasons = []
    for name in names:
        value = getattr(call, name)
        if isinstance(value, Tensor):
            reasons.append(f"does not support {name}")
        elif value:
            reasons.append(f"does not support {name}, got {value}")
    return reasons


def merge_into(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge attention over more keys into ``out`` and ``lse``, in place. Parts can be empty (lse -inf)."""
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -math.inf, 0)
    out.mul_((lse - safe).exp_().unsqueeze(-1)).addcmul_(more.to(out.dtype), (more_lse - safe).exp_().unsqueeze(-1))
    lse.copy_(total)


@cache
def settle_exponentials() -> None:
    """Compute an exponential with one thread before several do.

    If two threads at once compute the first exponentials of a process, MKL can give one of them too few digits (torch
    2.13 with AVX-512: an lse with a relative error of 4e-6 in float32 and 1e-9 in float64, in one process of ten).
    """
    for dtype in (torch.float32, torch.float64):
        torch.zeros(8, dtype=dtype, device="cpu").exp()


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension. Compiled kernels read any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def has_memory(x: Tensor) -> bool:
    """Return False if the storage of a tensor was freed."""
    # The address of a freed storage is 0. No tensor begins a tebibyte into it, so most calls look no further.
    at = x.data_ptr()
    return at >> 40 != 0 or x.numel() == 0 or at != x.storage_offset() * x.element_size()


def check_memory(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise ValueError if a tensor has no strides, or if its storage was freed: kernels would read address 0."""
    for name, x in zip(names, tensors, strict=True):
        if x is None:
            continue
        try:
            held = has_memory(x)
        except RuntimeError:
            # To ask each tensor for its layout would take longer.
            if x.layout is torch.strided:
                raise
            raise ValueError(f"{name}: expected torch.strided, got {x.layout=}") from None
        if not held:
            raise ValueError(f"{name}: expected a tensor with memory, got a freed storage with {x.shape=}")


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and of the lse: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


ROW_NAMES = ("out_grad", "lse_grad", "query", "key", "value", "out", "lse")
"""The tensors of `Rows`, as errors name them."""


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    call = Call(*rest)
    check_memory(("query", "key", "value", *_OPTIONAL), (q, k, v, *options_of(call)))
    return _backends[call.backend].forward(q, k, v, call)


def _backward(*arguments: Any) -> Any:
    rows, call = Rows(*arguments[:7]), Call(*arguments[7:])
    check_memory((*ROW_NAMES, *_OPTIONAL), (*rows, *options_of(call)))
    return _backends[call.backend].backward(rows, call)


def _double_backward(*arguments: Any) -> Any:
    check_memory(ROW_NAMES, arguments[3:10])
    blockwise: Any = _backends["blockwise"]
    return blockwise.double_backward(*arguments[:10], Call(*arguments[10:]))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    return new_out(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulator(q))


def new_out(q: Tensor, head_dim: int) -> Tensor:
    """Return uninitialized ``[B, H, Nq, head_dim]``, laid out ``[B, Nq, H, head_dim]``: joining heads is free."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], head_dim)).transpose(1, 2)


def as_new_out(out: Tensor) -> Tensor:
    """Return an output in the layout of `new_out`, without a copy if it has that layout."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
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


def _example(arguments: Sequence[Any], in_dims: Sequence[Any], number: int) -> list[Any]:
    """Return the arguments of one example of a vmapped call."""
    pairs = zip(arguments, in_dims, strict=True)
    return [x.select(dim, number) if isinstance(dim, int) else x for x, dim in pairs]


def _vmap_rule(n_tensors: int, op: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        call, dims = Call(*arguments[n_tensors:]), dict(zip(Call._fields, in_dims[n_tensors:], strict=True))
        if any(dims[name] is not None for name in ("seed", "alibi_slopes", "head_at")):
            each = [op(*_example(arguments, in_dims, number)) for number in range(size)]
            return tuple(torch.stack(outs) for outs in zip(*each, strict=True)), (0,) * len(each[0])
        tensors = [_folded(size, x, dim) for x, dim in zip(arguments[:n_tensors], in_dims, strict=False)]
        tiles = list(call.tiles)
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


for _name, _implementation, _fake, _n_tensors in (
    ("forward", _forward, _fake_forward, 3),
    ("backward", _backward, _fake_backward, 7),
    ("double_backward", _double_backward, _fake_double_backward, 10),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringtile::{_name}", _fake, lib=library)
    _op = getattr(torch.ops.ringtile, _name).default
    torch.library.register_vmap(f"ringtile::{_name}", _vmap_rule(_n_tensors, _op), lib=library)


def _apart(call: Call) -> tuple[Any, ...]:
    """Return the call without tensors, then its tensors: autograd and torch.func must see each as an argument."""
    if not call.tiles and all(x is None for x in options_of(call)):
        return (call,)
    absent: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    return call._replace(tiles=(), **absent), *options_of(call), *call.tiles


def _with_tensors(call: Call, *tensors: Tensor | None) -> Call:
    """Return the call from the results of `_apart`."""
    if not tensors:
        return call
    count = len(_OPTIONAL)
    optional: dict[str, Any] = dict(zip(_OPTIONAL, tensors[:count], strict=True))
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


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Any) -> tuple[Tensor, Tensor]:
    """Return the output and lse, without a derivative. See `attention` for ``prepared``."""
    backend: Any = _backends[call.backend]
    if prepared is not None:
        results: tuple[Tensor, Tensor] = backend.forward(q, k, v, call, prepared)
    elif is_unseen(q, k, v, *options_of(call)):
        results = backend.forward(q, k, v, call)
    else:
        results = torch.ops.ringtile.forward(q, k, v, *call)
    return results


def run_backward(rows: Rows, call: Call, prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, without a derivative."""
    backend: Any = _backends[call.backend]
    # The gradients of the results are new, and whoever sees operators can have come since the forward pass.
    if not is_unseen(*rows, *options_of(call)):
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.ringtile.backward(*rows, *call)
    elif prepared is not None:
        grads = backend.backward(rows, call, prepared)
    else:
        grads = backend.backward(rows, call)
    return grads


class _DoubleBackward(torch.autograd.Function):
    """The double backward operator, which has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        call = _with_tensors(*arguments[10:])
        found: tuple[Tensor, ...] = torch.ops.ringtile.double_backward(*arguments[:10], *call)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise NotImplementedError("sparse_attention has no third derivative; with backend='reference' it has")


class _Backward(torch.autograd.Function):
    """The backward operator, itself differentiable once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = _with_tensors(*arguments[7:])
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.ringtile.backward(*arguments[:7], *call)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[7]
        ctx.save_for_backward(*inputs[:7], *inputs[8:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, rest = saved[:7], saved[7:]
        found = _DoubleBackward.apply(*cotangents, *rows, ctx.call, *rest)  # type: ignore[no-untyped-call]
        out_grad, lse_grad, q, k, v = found
        lse_grad = None if rows[1] is None else lse_grad
        return out_grad, lse_grad, q, k, v, None, None, None, *(None for _ in rest)


class Attention(torch.autograd.Function):
    """The forward operator with its gradients. It composes with vmap, grad and compile."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, prepared, *rest = arguments
        return run_forward(q, k, v, _with_tensors(*rest), prepared)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.prepared, ctx.call = inputs[3:5]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output, *inputs[5:])

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if out_grad is None:
            if lse_grad is None:
                return (None,) * (5 + len(rest))
            out_grad = torch.zeros_like(out)
        rows = Rows(out_grad, lse_grad, q, k, v, out, lse)
        compiling = torch.compiler.is_compiling()
        if not compiling and not out_grad.layout is (lse if lse_grad is None else lse_grad).layout is _STRIDED:
            check_memory(("out_grad", "lse_grad"), (out_grad, lse_grad))
        if compiling or not _differentiated(*rows):
            # Without a second derivative, a Function would only cost time, and Dynamo traces none inside another.
            grads = run_backward(rows, _with_tensors(ctx.call, *rest), ctx.prepared)
        else:
            grads = _Backward.apply(*rows, ctx.call, *rest)  # type: ignore[no-untyped-call]
        return *grads, None, None, *(None for _ in rest)


class _Direct(torch.autograd.Function):
    """`Attention` without transforms of torch.func. Without setup_context, PyTorch does not bind a signature."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output = Attention.forward(*arguments)
        Attention.setup_context(ctx, arguments, output)
        return output

    backward = Attention.backward


def _differentiated(*tensors: Tensor | None) -> bool:
    """Return True if a derivative may follow. A tensor does not show if an outer transform of torch.func tracks it."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, prepared: Any = None) -> tuple[Tensor, Tensor]:
    """Return the output and lse of one call, differentiable in q, k and v.

    ``prepared`` is what the call's backend has prepared, for tensors of which `is_unseen` is true, or None.
    """
    if not _differentiated(q, k, v):
        return run_forward(q, k, v, call, prepared)
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    function: Any = Attention if transformed else _Direct
    out, lse = function.apply(q, k, v, prepared, *_apart(call))
    return out, lse
