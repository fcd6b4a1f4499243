"""The operators under everything torch does to an operator: transforms, compilers, modes, copies."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import _Operators, make_inputs, relative_error
from strategies import checkerboard
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ringtile import BlockIndex, Pattern, build_index, dilated_attention, merge_attention, sparse_attention
from ringtile.functional.bias import Relative
from ringtile.index import cache_info, clear_cache
from ringtile.kernels import blockwise
from ringtile.kernels.contracts import Call, pack_keys
from ringtile.patterns import (
    Causal,
    Chosen,
    Dense,
    Documents,
    Elements,
    GlobalTokens,
    RandomBlocks,
    Segments,
    Window,
    from_mask,
    parse,
    per_head,
)
from ringtile.testing.oracle import attention

PATTERN = Causal() & (Window(20) | GlobalTokens(3) | RandomBlocks(1, block=16))
HOLES = Causal() & Window(9) & ~Window(1)
MIXED = per_head([PATTERN, Dense(), HOLES, PATTERN])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 0.9])},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([-7])},
    "numbers": {
        "dropout_p": 0.4,
        "seed": torch.tensor([-7]),
        "head_at": torch.tensor([9, 2, 5, 0]),
        "batch_at": torch.tensor([6, 3]),
    },
    "key_mask": {"key_mask": torch.arange(70).expand(2, 70) % torch.tensor([[3], [400]]) == 0},
    "key_lengths": {"key_lengths": torch.tensor([50, 0])},
}
OPTIONS["everything"] = {name: value for given in OPTIONS.values() for name, value in given.items()}


def worst(actual: Any, expected: Any) -> float:
    return max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))


# The operators themselves.


def call_of(served: Pattern | BlockIndex, n_queries: int, n_keys: int, backend: str, **options: Any) -> Call:
    key_mask = options.pop("key_mask", None)
    kept = {"tiles": served.tensors()} if isinstance(served, BlockIndex) else {"pattern": served.text}
    if key_mask is not None:
        options["key_bits"] = pack_keys(key_mask)
    block = served.block if isinstance(served, BlockIndex) else 128
    return Call(start=n_keys - n_queries, block=block, scale=0.3, **kept, **options, backend=backend)


@pytest.mark.parametrize(
    ("form", "options"),
    [("text", "plain"), ("index", "everything"), ("dense", "plain")],
)
def test_opcheck(form: str, options: str) -> None:
    q, k, v, out_grad = make_inputs(2, 4, 70, 70, 8, kv_heads=2, value_dim=5)
    served = (
        build_index(MIXED, 70, num_heads=4, block=16) if form == "index" else Causal() if form == "dense" else MIXED
    )
    call = call_of(served, 70, 70, "dense" if form == "dense" else "blockwise", **OPTIONS[options])
    names = ("forward", "backward", "double_backward")
    forward, backward, double_backward = (getattr(torch.ops.ringtile, name).default for name in names)
    out, lse = forward(q, k, v, *call)
    rows = (out_grad, torch.randn_like(lse), q, k, v, out, lse)
    without_lse = (rows[0], None, *rows[2:])
    cotangents = tuple(map(torch.randn_like, (q, k, v)))
    for operator, tensors in (
        (forward, rows[2:5]),
        (backward, rows),
        (backward, without_lse),
        (double_backward, cotangents + (rows if form == "index" else without_lse)),
    ):
        results = torch.library.opcheck(operator, (*tensors, *call))
        assert len(results) == 4
        assert results == dict.fromkeys(results, "SUCCESS")


# Derivatives.


def leaves_of(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def second_order(
    backend: str, pattern: Pattern, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(1)
    q, k, v, out_grad = make_inputs(2, 4, 150, 220, 8, kv_heads=2, value_dim=5)
    lse_grad = torch.randn(2, 4, 150, dtype=torch.float64)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, out_grad, lse_grad)]
    results = sparse_attention(*leaves[:3], pattern, enable_gqa=True, return_lse=True, backend=backend, **options)
    first = torch.autograd.grad(results, leaves[:3], leaves[3:], create_graph=True)
    cotangents = [torch.randn_like(x, dtype=torch.float64).to(dtype) for x in first]
    return [*first, *torch.autograd.grad(first, leaves, cotangents)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivatives_over_many_tiles(options: dict[str, Any]) -> None:
    if "key_mask" in options:
        options = options | {"key_mask": torch.rand(2, 220) < 0.6}
    for pattern in (MIXED, Dense()):
        expected = second_order("reference", pattern, options)
        assert worst(second_order("blockwise", pattern, options), expected) < 1e-12
        if not options:
            assert worst(second_order("blockwise", pattern, options, torch.float32), expected) < 1e-5
        if pattern == Dense() and not options:
            assert worst(second_order("dense", pattern, options), expected) < 1e-12


def test_the_third_derivative_is_refused() -> None:
    x = torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    attend = lambda x: sparse_attention(x, x, x, PATTERN).sin().sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="no third derivative"):
        grad(lambda x: grad(lambda y: grad(attend)(y).sum())(x).sum())(x.detach())
    first = torch.autograd.grad(attend(x), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sin().sum(), x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no third derivative"):
        second.sum().backward()


# Transforms.


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("key_mask", torch.arange(420).view(3, 2, 70) % 5 < 2),
        ("key_lengths", torch.tensor([[3, 70], [0, 50], [66, 1]])),
        ("alibi_slopes", torch.arange(12.0).view(3, 4) / 12),
        ("sinks", torch.arange(12.0).view(3, 4) / 12),
        ("seed", torch.tensor([[3], [4], [5]])),
        ("head_at", torch.tensor([[3, 4, 5, 6], [1, 0, 3, 2], [7, 7, 8, 8]])),
        ("batch_at", torch.tensor([[3, 4], [1, 0], [7, 7]])),
    ],
)
def test_vmap_over_the_options(name: str, values: Tensor) -> None:
    q, k, v, _ = make_inputs(2, 4, 70, head_dim=4)
    options = {"dropout_p": 0.5, "seed": 3} if name in ("seed", "head_at", "batch_at") else {}

    def attend(x: Tensor) -> Tensor:
        return sparse_attention(q, k, v, MIXED, **{**options, name: x})

    assert relative_error(vmap(attend)(values), torch.stack([attend(x) for x in values])) < 1e-14


def test_vmap_folds_dropout_with_the_weights_of_each_example(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 2, 4, 70, 4, dtype=torch.float64)
    batches: list[int] = []
    forward = blockwise.forward

    def counted(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        batches.append(q.shape[0])
        return forward(q, *rest)

    def attend(x: Tensor, batch_at: Tensor | None = None) -> Tensor:
        return sparse_attention(x, x, x, PATTERN, dropout_p=0.5, seed=3, batch_at=batch_at, backend="blockwise")

    monkeypatch.setattr(blockwise, "forward", counted)
    numbers = torch.tensor([[5, 3], [0, 1], [9, 9]])
    for function, inputs in ((attend, (x,)), (attend, (x, numbers)), (grad(lambda x: attend(x).sin().sum()), (x,))):
        batches.clear()
        together = vmap(function)(*inputs)
        assert batches == [6]
        assert relative_error(together, torch.stack([*map(function, *inputs)])) < 1e-14


def test_vmap_draws_dropout_as_it_is_told() -> None:
    x = torch.randn(1, 4, 70, 4).expand(3, 1, 4, 70, 4)

    def attend(x: Tensor) -> Tensor:
        return sparse_attention(x, x, x, PATTERN, dropout_p=0.5)

    same, different = (vmap(attend, randomness=how)(x) for how in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="random"):
        vmap(attend)(x)


def test_a_gradient_sees_through_vmap() -> None:
    q, k, v = torch.randn(3, 3, 2, 4, 70, 4, dtype=torch.float64).unbind()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, PATTERN).sin().sum()

    # One key for all examples, and values whose examples are in their second dimension.
    mapped = vmap(attend, in_dims=(0, None, 1))
    found = grad(lambda *x: mapped(*x).sum(), (0, 1, 2))(q, k[0], v.transpose(0, 1))
    grads = [grad(attend, (0, 1, 2))(q[i], k[0], v[i]) for i in range(3)]
    q_grad, k_grad, v_grad = (torch.stack(x) for x in zip(*grads, strict=True))
    assert worst(found, (q_grad, k_grad.sum(0), v_grad.transpose(0, 1))) < 1e-14


FEW = 6
LISTS = torch.tensor([[0, 3], [1, 0], [-1, -1], [2, 5], [0, 4], [1, 1]])[None, None]
Attention = Callable[..., Tensor]


def pair(rule: Pattern, options: Callable[..., dict[str, Any]] = dict) -> tuple[Attention, Attention]:
    """Attention over a rule, and its definition."""
    return (
        lambda q, k, v, *rest: sparse_attention(q, k, v, rule, **options(*rest)),
        lambda q, k, v, *rest: attention(q, k, v, rule, **options(*rest))[0],
    )


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LongNet's segments of 3, and of 6 with dilation 2."""
    parts = [attention(q, k, v, Causal() & Segments(*branch)) for branch in ((3, 1), (6, 2))]
    outs, lses = (torch.stack(results) for results in zip(*parts, strict=True))
    return (lses.softmax(0).unsqueeze(-1) * outs).sum(0)


INDEX = build_index(Causal() & Window(2), FEW, block=16)
KINDS: dict[str, tuple[Attention, Attention, list[tuple[int, ...]]]] = {
    "text": (*pair(Causal() & Window(2)), []),
    "index": (lambda q, k, v: sparse_attention(q, k, v, INDEX), pair(Causal() & Window(2))[1], []),
    "lists": (*pair(Chosen(LISTS) & Causal() | Window(0)), []),
    "bias": (*pair(Causal(), lambda table: {"bias": Relative(table, 3)}), [(2, 5)]),
    "sinks": (*pair(Causal() & Window(2), lambda sinks: {"sinks": sinks}), [(2,)]),
    "dilated": (lambda q, k, v: dilated_attention(q, k, v, [3, 6], [1, 2], is_causal=True), merged, []),
}
"""Functions of queries, keys, values and maybe one more tensor, their definition, and the shape of the tensor."""


def batched_gradients(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    leaves = [y.clone().requires_grad_() for y in x]
    out = f(*leaves)
    cotangents = torch.linspace(-1, 1, 3 * out.numel(), dtype=out.dtype).view(3, *out.shape)
    return torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True)


def dual(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(y.clone().requires_grad_(), y.cos()) for y in x))
        primal, tangent = forward_ad.unpack_dual(out)
        return [primal.detach(), tangent.detach()]


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "vmap": lambda f, x: vmap(f)(*(torch.stack([y, 2 * y, y.sin()]) for y in x)),
    "vmap of gradients": lambda f, x: vmap(grad(lambda *y: f(*y).sin().sum(), tuple(range(len(x)))))(
        *(torch.stack([y, 2 * y, y.sin()]) for y in x)
    ),
    "jacrev": lambda f, x: jacrev(f, tuple(range(len(x))))(*x),
    "batched gradients": batched_gradients,
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, tuple(x), vectorize=True),
}
OF_TILES: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "jvp": lambda f, x: jvp(f, tuple(x), tuple(y.cos() for y in x)),
    "dual": dual,
    "jacfwd": lambda f, x: jacfwd(f, len(x) - 1)(*x),
    "vmap of jvp": lambda f, x: vmap(lambda *y: jvp(f, y, y))(*(torch.stack([y, y.sin()]) for y in x)),
    "jvp of vmap": lambda f, x: jvp(vmap(f), *[tuple(torch.stack([y, y.sin()]) for y in x)] * 2),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y, *x[1:]).sin().sum())(x[0]),
    "batched hessian": lambda f, x: torch.autograd.functional.hessian(
        lambda y: f(y, *x[1:]).sin().sum(), x[0], vectorize=True
    ),
}
"""Forward mode and second derivatives, which lists and biases refuse."""


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("transform", [*TRANSFORMS, *OF_TILES])
@pytest.mark.parametrize("kind", KINDS)
def test_transforms_of_attention_are_those_of_its_definition(kind: str, transform: str) -> None:
    attend, definition, shapes = KINDS[kind]
    size = (1, 2, FEW, 2) if transform.endswith(("hessian", "jacfwd")) else (2, 2, FEW, 4)
    x = [torch.randn(shape, dtype=torch.float64) for shape in [size] * 3 + shapes]
    if transform in OF_TILES and kind in ("lists", "bias"):
        with pytest.raises((NotImplementedError, ValueError), match=r"derivative, and none in forward mode|treespec"):
            OF_TILES[transform](attend, x)
        return
    apply = {**TRANSFORMS, **OF_TILES}[transform]
    found, expected = tree_leaves(apply(attend, x)), tree_leaves(apply(definition, x))
    assert worst(found, expected) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_of_every_kind(kind: str) -> None:
    attend, definition, shapes = KINDS[kind]
    x = [torch.randn(shape, requires_grad=True) for shape in [(2, 2, FEW, 4)] * 3 + shapes]
    wide = [y.detach().double().requires_grad_() for y in x]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*x)
    assert out.dtype == torch.bfloat16
    expected = definition(*wide)
    grads = torch.autograd.grad(out.float().sum(), x), torch.autograd.grad(expected.sum(), wide)
    assert relative_error(out, expected) < 1e-2
    assert worst(*grads) < 3e-2


@pytest.mark.parametrize(
    ("backend", "options"),
    [("dense", {}), ("blockwise", {"start": 1, "softcap": 1.5, "dropout_p": 0.4, "seed": 3})],
    ids=str,
)
def test_forward_mode_and_batched_gradients(backend: str | None, options: dict[str, Any]) -> None:
    pattern = Dense() if backend == "dense" else HOLES
    leaves = [x.requires_grad_() for x in make_inputs(1, 2, 5, 6, 3, value_dim=2)[:3]]

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(*x, pattern, backend=backend, return_lse=True, **options)
        return out, lse.exp()

    checks = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True, **checks)
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True, check_fwd_over_rev=True)


# Compilers.


# Dynamo's own way to trace an autograd function.
compiles = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")


@pytest.fixture
def graphs() -> Callable[[], int]:
    """How many graphs were compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


def compile_whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


LENGTHS = (100, 130, 257, 77, 512, 301)


def gradients(attend: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@compiles
@pytest.mark.parametrize("pattern", [PATTERN, Causal(), MIXED], ids=repr)
def test_one_graph_serves_all_lengths(pattern: Pattern, graphs: Callable[[], int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q * 1.5, k, v, pattern) + 1

    compiled = compile_whole(attend, dynamic=True)
    for length in LENGTHS:
        leaves = leaves_of(1, 4, length, 8)
        assert worst(gradients(compiled, leaves), gradients(attend, leaves)) < 1e-14
    assert graphs() == 1


@compiles
def test_one_graph_takes_the_same_tensor_as_query_key_and_value() -> None:
    for attend in (
        lambda x, y: sparse_attention(x, x, x, PATTERN),
        lambda x, y: sparse_attention(x, y, x, PATTERN),
        lambda x, y: sparse_attention(x, y, y, PATTERN),
    ):
        leaves = leaves_of(1, 4, 100, 8)[:2]
        with_y = lambda x, y, attend=attend: attend(x, y) + y  # noqa: E731
        assert worst(gradients(compile_whole(with_y), leaves), gradients(with_y, leaves)) < 1e-14


@compiles
def test_one_graph_serves_decoding(graphs: Callable[[], int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor) -> Tensor:
        return sparse_attention(q, k, v, PATTERN, key_lengths=key_lengths, start=k.shape[2] - 3)

    compiled = compile_whole(attend, dynamic=True)
    q = torch.randn(2, 2, 3, 8)
    for length in LENGTHS:
        k, v = (torch.randn(2, 2, length, 8) for _ in range(2))
        inputs = (q, k, v, torch.tensor([length, length // 2]))
        assert torch.equal(compiled(*inputs), attend(*inputs))
    assert graphs() == 1


@compiles
def test_dropout_draws_anew_in_a_compiled_function(graphs: Callable[[], int]) -> None:
    compiled = compile_whole(lambda x: sparse_attention(x, x, x, PATTERN, dropout_p=0.5))
    x = torch.randn(1, 2, 70, 8)
    assert not torch.equal(compiled(x), compiled(x))
    assert graphs() == 1


@compiles
def test_one_graph_serves_all_patterns_as_indices(graphs: Callable[[], int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, index: BlockIndex) -> Tensor:
        return sparse_attention(q, k, v, index)

    compiled = compile_whole(attend, dynamic=True)
    leaves = leaves_of(1, 1, 300, 8)
    for pattern in (PATTERN, Segments(70, shift=3), Documents([77, 100, 123]), Window(30), Window(65)):
        index = build_index(pattern, 300, block=16)
        # Dynamo compiles sizes of 0 and 1 apart. The positions of tiles, which come last, are empty in all of them.
        assert all(len(x) > 1 for x in index.tensors()[1:-2]), pattern
        assert not len(index.rows.at) + len(index.cols.at)
        actual = gradients(lambda *x, index=index: compiled(*x, index), leaves)
        expected = gradients(lambda *x, pattern=pattern: sparse_attention(*x, pattern, backend="reference"), leaves)
        assert worst(actual, expected) < 1e-12
    assert graphs() == 1


SIDE = 70
HELD = torch.rand(SIDE, SIDE) < 0.5


class Held(torch.nn.Module):
    """A module with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(SIDE, SIDE) < 0.5)

    def forward(self, mask: Tensor) -> Pattern:
        self.mask.copy_(mask)
        return from_mask(self.mask)


def of_closure(mask: Tensor) -> Pattern:
    HELD.copy_(mask)
    return from_mask(HELD)


def numbers_of(mask: Tensor) -> Tensor:
    return (mask[0] & mask[1]).cumsum(0)


def begins_of(mask: Tensor) -> Tensor:
    return F.pad(mask[0, :40].sum()[None], (1, 1)) + torch.tensor([0, 0, SIDE])


def equal(numbers: Tensor) -> Tensor:
    return numbers[:, None] == numbers


OF_VALUES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "mask": (from_mask, lambda mask: mask),
    "buffer": (Held(), lambda mask: mask),
    "closure": (of_closure, lambda mask: mask),
    "ids": (lambda mask: Documents(ids=numbers_of(mask)), lambda mask: equal(numbers_of(mask))),
    "cu_seqlens": (
        lambda mask: Causal() & Documents(cu_seqlens=begins_of(mask)),
        lambda mask: equal(torch.arange(SIDE) < begins_of(mask)[1]).tril(),
    ),
    "tiles": (lambda mask: mask[:1, :1], lambda mask: mask[:1, :1].expand(SIDE, SIDE)),
}
"""Patterns that are read from values, and their pairs."""


# Of torch's own reading of the tensors after a break.
breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")


@breaks
@pytest.mark.parametrize(("pattern", "pairs"), OF_VALUES.values(), ids=OF_VALUES)
def test_a_pattern_of_values_breaks_the_graph_and_is_read_in_each_call(
    pattern: Callable[[Tensor], Any], pairs: Callable[[Tensor], Tensor], graphs: Callable[[], int]
) -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return sparse_attention(x * 2, x, x, pattern(mask)) + 1

    compiled = torch.compile(attend, backend="eager")
    x = torch.randn(1, 2, SIDE, 8, dtype=torch.float64, requires_grad=True)
    counts = []
    for density in (0.3, 0.9, 0.5):
        mask = torch.rand(SIDE, SIDE) < density
        expected = attention(x * 2, x, x, pairs(mask))[0] + 1
        found = compiled(x, mask.clone())
        assert relative_error(found, expected) < 1e-12
        (given, exact) = (torch.autograd.grad(out.sin().sum(), x)[0] for out in (found, expected))
        assert relative_error(given, exact) < 1e-12
        counts.append(graphs())
    # One before attention and one after it, where a buffer is written in one more.
    assert counts[-1] == counts[0] <= 3


def test_a_pattern_without_a_text_breaks_the_graph_once(graphs: Callable[[], int]) -> None:
    keep = torch.rand(SIDE, SIDE) < 0.5
    x = torch.randn(1, 2, SIDE, 8, dtype=torch.float64)
    pattern, sinks = from_mask(keep) | Elements(lambda head, query, key: query == key), torch.randn(2)
    attend = lambda x: sparse_attention(x * 2, x, x, pattern, sinks=sinks) + 1  # noqa: E731
    for _ in range(2):
        found = torch.compile(attend, backend="eager")(x)
        assert torch.equal(found, attend(x))
    # Before, for the sinks and after.
    assert graphs() == 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot look at values: expected a pattern with"):
        torch.compile(attend, backend="eager", fullgraph=True)(x)


def test_a_compiled_start_that_changes(graphs: Callable[[], int]) -> None:
    compiled = torch.compile(lambda *x, start: sparse_attention(*x, Causal(), start=start), backend="eager")
    q, k, v = torch.randn(3, 2, 2, SIDE, 8, dtype=torch.float64).unbind()
    for start in (3, 4, 0, SIDE - 1):
        expected, _ = attention(q[:, :, :1], k, v, Causal(), start=start)
        assert relative_error(compiled(q[:, :, :1], k, v, start=start), expected) < 1e-12
    # The first number, and any number.
    assert graphs() == 2


@compiles
def test_inductor(graphs: Callable[[], int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q * 1.5, k, v + 1, PATTERN).transpose(1, 2).flatten(2) * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for length in (100, 300):
        leaves = leaves_of(1, 2, length, 8, dtype=torch.float32)
        assert worst(gradients(compiled, leaves), gradients(attend, leaves)) < 1e-6
    assert graphs() == 1


class Attend(torch.nn.Module):
    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return sparse_attention(q, k, v, self.pattern, return_lse=True)


REPLAY = """
import sys, torch, ringtile
for program, cases in torch.load(sys.argv[1]):
    attend = torch.export.load(program).module()
    for inputs, expected in cases:
        for a, b in zip(attend(*inputs), expected, strict=True):
            assert torch.equal(a, b), (a - b).abs().max()
        print(tuple(inputs[0].shape))
"""


def test_an_exported_program_runs_in_another_process_at_other_lengths(tmp_path: Path) -> None:
    length = torch.export.Dim("length", min=2, max=4096)
    programs = []
    for number, pattern in enumerate((PATTERN, Causal())):
        inputs = torch.randn(3, 1, 2, 64, 8).unbind()
        exported = torch.export.export(Attend(pattern), inputs, dynamic_shapes=[{2: length}] * 3)
        program = str(tmp_path / f"attend{number}.pt2")
        torch.export.save(exported, program)
        others = [torch.randn(3, 1, 2, n_tokens, 8).unbind() for n_tokens in (333, 1000)]
        programs.append((program, [(other, Attend(pattern)(*other)) for other in others]))
    torch.save(programs, tmp_path / "programs.pt")
    command = [sys.executable, "-c", REPLAY, str(tmp_path / "programs.pt")]
    replayed = subprocess.run(command, capture_output=True, text=True)
    assert replayed.stdout == "(1, 2, 333, 8)\n(1, 2, 1000, 8)\n" * 2, replayed.stderr


# Modes.


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtypes", ["float32", "float32 float32 bfloat16", "float16 float32 bfloat16"])
def test_autocast_is_a_cast_of_the_inputs(dtypes: str, backend: str | None) -> None:
    """Rotary positions leave query and key wider than value."""
    wanted = [getattr(torch, name) for name in dtypes.split()] * 3
    leaves = [x.detach().to(wanted[at]).requires_grad_() for at, x in enumerate(leaves_of(1, 2, 200, 16))]
    out_grad = torch.randn(1, 2, 200, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = sparse_attention(*leaves, PATTERN, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, out_grad)
    assert [x.dtype for x in (out, lse, *grads)] == [torch.bfloat16, torch.float32, *wanted[:3]]
    cast = [x.detach().bfloat16().requires_grad_() for x in leaves]
    expected = sparse_attention(*cast, PATTERN, return_lse=True, backend=backend)
    assert all(map(torch.equal, (out, lse), expected))
    for ours, theirs in zip(grads, torch.autograd.grad(expected[0], cast, out_grad), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_mixed_dtypes_are_refused_if_autocast_does_not_make_them_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    with pytest.raises(ValueError, match=r"value: expected .*the same for all, got x.dtype=torch.bfloat16"):
        sparse_attention(q, k, v.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"value: expected .*got x.dtype=torch.float64"):
            sparse_attention(q, k, v.double())
        with pytest.raises(ValueError, match=r"key: expected .*got x.dtype=torch.int64"):
            sparse_attention(q, k.long(), v)


def test_merging_under_autocast_takes_mixed_dtypes() -> None:
    (one, two), lses = torch.randn(2, 1, 2, 20, 8).unbind(), torch.randn(2, 1, 2, 20).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = merge_attention([one, two.bfloat16()], lses)
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, merge_attention([one, two.bfloat16().float()], lses)))


@pytest.mark.parametrize("pattern", [Dense(), PATTERN, Elements(checkerboard)], ids=repr)
def test_first_used_without_gradients(pattern: Pattern) -> None:
    leaves = leaves_of(1, 2, 150, 8)
    expected = sparse_attention(*leaves, pattern)
    for mode in (torch.no_grad, torch.inference_mode):
        clear_cache()
        with mode():
            out = sparse_attention(*leaves, pattern)
        assert not out.requires_grad
        assert torch.equal(out, expected)
        again = sparse_attention(*leaves, pattern)
        assert all(x.any() for x in torch.autograd.grad(again.sum(), leaves))
        assert cache_info().misses == 1


def test_another_default_device_changes_nothing() -> None:
    leaves = leaves_of(1, 2, 150, 8)
    options = {"dropout_p": 0.3, "seed": 3, "key_mask": torch.rand(1, 150) < 0.7}
    results = []
    for device in ("meta", "cpu"):
        clear_cache()
        with torch.device(device):
            out, lse = sparse_attention(*leaves, PATTERN, return_lse=True, **options)
            grads = torch.autograd.grad([out, lse], leaves, [out.detach(), lse.detach()])
        results.append((out, lse, *grads))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_gives_the_same_gradients(use_reentrant: bool) -> None:
    leaves = leaves_of(1, 2, 150, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q.sin(), k, v, PATTERN, dropout_p=0.4)

    torch.manual_seed(3)
    expected = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
    torch.manual_seed(3)
    checkpoint(attend, *leaves, use_reentrant=use_reentrant).sin().sum().backward()
    assert all(torch.equal(x.grad, grad_) for x, grad_ in zip(leaves, expected, strict=True))


def test_saved_tensors_may_be_moved_away() -> None:
    leaves = leaves_of(1, 2, 150, 8)
    for pattern in (PATTERN, Elements(checkerboard)):
        expected = torch.autograd.grad(sparse_attention(*leaves, pattern).sum(), leaves)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy().copy(), torch.from_numpy):
            out = sparse_attention(*leaves, pattern)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), expected))


# What it costs, as torch counts it.


def computed_pairs(pattern: Pattern, n_queries: int, n_keys: int, heads: int, batch: int) -> int:
    """Pairs inside the lengths in tiles of 128 (by position) that keep any pair, from the element rule."""
    start, block = n_keys - n_queries, 128
    query, key = torch.arange(start, start + n_queries)[:, None], torch.arange(n_keys)
    tile = (query // block - start // block) * (n_keys // block + 1) + key // block
    total = 0
    for head in range(heads):
        kept = pattern.allowed(torch.tensor(head), query, key).expand(n_queries, n_keys)
        total += int(torch.isin(tile, tile[kept]).sum())
    return total * batch


@pytest.mark.parametrize("lengths", [(300, 517), (517, 300), (1, 700)])
@pytest.mark.parametrize("as_index", [False, True])
@pytest.mark.parametrize("pattern", [Causal() & Window(100), MIXED, ~Dense()], ids=str)
def test_flops_are_those_of_the_kept_tiles(pattern: Pattern, as_index: bool, lengths: tuple[int, int]) -> None:
    q, k, v, _ = make_inputs(2, 4, *lengths, 8, kv_heads=2, value_dim=24, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    served = build_index(pattern, *lengths, num_heads=4) if as_index else pattern
    with FlopCounterMode(display=False) as counter:
        sparse_attention(*leaves, served, enable_gqa=True).sum().backward()
    pairs = computed_pairs(pattern, *lengths, heads=4, batch=2)
    flops = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    assert flops == {"ringtile.forward": 2 * pairs * (8 + 24), "ringtile.backward": 2 * pairs * (3 * 8 + 2 * 24)}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_an_index_mean_the_same(copied: Callable[[Any], Any]) -> None:
    leaves = leaves_of(2, 4, 150, 8)
    index = build_index(per_head([PATTERN, Elements(checkerboard)] * 2), 150, num_heads=4)
    found, expected = (gradients(lambda *x, i=i: sparse_attention(*x, i), leaves) for i in (copied(index), index))
    assert all(map(torch.equal, found, expected))


class Functions(TorchFunctionMode):
    """The names of functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).replace(".", "::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_who_looks_at_operators_sees_them_and_others_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = torch.randn(1, 2, 40, 8).requires_grad_()

    def step() -> None:
        torch.autograd.grad(sparse_attention(leaf, leaf, leaf, PATTERN).sum(), leaf)

    step()
    with _Operators() as operators:
        step()
    with Functions() as functions:
        step()
    with profile() as profiled:
        step()
    assert {"forward", "backward"} <= set(operators.names)
    assert {"ringtile::forward", "ringtile::backward"} <= {event.key for event in profiled.key_averages()}
    # PyTorch shows these modes no backward pass.
    assert "ringtile::forward" in functions.names
    for pattern in (PATTERN, Chosen(torch.randint(40, (1, 1, 40, 4)))):
        traced = torch.jit.trace(lambda x, p=pattern: sparse_attention(x, x, x, p), leaf.detach(), check_trace=False)
        assert "ringtile::forward" in str(traced.graph)
        assert torch.equal(traced(leaf.detach() * 2), sparse_attention(*[leaf.detach() * 2] * 3, pattern))
        with pytest.raises(NotImplementedError, match=r"torch.jit.trace: expected torch.no_grad\(\)"):
            torch.jit.trace(lambda x, p=pattern: sparse_attention(x, x, x, p), leaf)
    # Nobody looks: an operator that cannot be called is not.
    monkeypatch.setattr(torch.ops, "ringtile", None)
    step()


def test_a_pattern_and_its_text_share_one_index() -> None:
    q, k, v = torch.randn(3, 1, 2, 150, 8).unbind()
    clear_cache()
    expected = sparse_attention(q, k, v, PATTERN)
    assert torch.equal(sparse_attention(q, k, v, parse(str(PATTERN))), expected)
    assert cache_info().misses == 1


@pytest.mark.gpu
def test_a_side_stream_gives_the_same_bits() -> None:
    leaves = [x.detach().cuda().requires_grad_() for x in leaves_of(1, 2, 700, 16, dtype=torch.float32)]
    expected = gradients(lambda *x: sparse_attention(*x, PATTERN), leaves)
    torch.cuda.synchronize()
    clear_cache()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        built_aside = gradients(lambda *x: sparse_attention(*x, PATTERN), leaves)
    reused = gradients(lambda *x: sparse_attention(*x, PATTERN), leaves)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert all(map(torch.equal, built_aside, expected))
    assert all(map(torch.equal, reused, expected))
