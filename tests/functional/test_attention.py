"""Attention on every path against the float64 oracle: exact over the kept pairs, blind to all others."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from oracle import (
    SDPA_BUDGET,
    Inputs,
    Oracle,
    filled_memory,
    kept_pairs,
    make_inputs,
    oracle,
    relative_error,
    sdpa_low_precision_error,
)
from strategies import LENGTHS, checkerboard, grids, patterns
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index import BlockIndex, clear_cache, to_block_mask
from ringtile.kernels import native
from ringtile.kernels.blockwise import chunks
from ringtile.kernels.native.precision import arithmetic_of
from ringtile.kernels.philox import dropout_keep, dropout_scale
from ringtile.kernels.plans import _plans
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Segments,
    Strided,
    Window,
    bigbird,
    longformer,
    longnet_union,
    per_head,
    streaming,
)

TOLERANCE = 1e-12

HOLES = Causal() & Window(40) & ~Window(2)
"""The first three queries keep nothing, and the last three keys serve nobody."""

TILED = Causal() & (Window(50) | GlobalTokens(5) | RandomBlocks(1, block=32))

KINDS: dict[str, Pattern] = {
    "dense": Dense(),
    "causal": Causal(),
    "window": Window(60),
    "one-sided window": Window(10, 90),
    "causal window": Causal() & Window(70),
    "dilated": Dilated([1, 3, 50], 9),
    "block dilated": BlockDilated([1, 3], 2, block=32),
    "strided": Strided(37),
    "global": GlobalTokens(20),
    "random blocks": RandomBlocks(2, seed=3, block=32),
    "segments": Segments(100, 3, 1),
    "documents": Documents([130, 0, 71, 99]),
    "blocks": Blocks(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)),
    "backward blocks": Blocks(torch.eye(19, dtype=torch.bool).flip(1), block=16),
    "elements": Elements(checkerboard),
    "complement": ~Window(60),
    "composition": TILED,
    "holes": HOLES,
    "nothing": ~Dense(),
    "longformer": longformer(40, 8),
    "bigbird": bigbird(1, 32, 16, block=32),
    "longnet": longnet_union((64, 300), (1, 4)),
    "streaming": streaming(4, 100),
    "per head": per_head([Causal(), Window(5), Dense(), ~Window(30)]),
    "a head without keys": per_head([Window(5), ~Dense(), Causal(), Window(5)]),
}

MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.7},
    "no scale": {"scale": 0.0},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 0.9])},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([-7])},
    "key_mask": {"key_mask": torch.arange(300).expand(2, 300) % torch.tensor([[3], [400]]) == 0},
    "key_lengths": {"key_lengths": torch.tensor([170, 0])},
}
MODIFIERS["everything"] = {name: value for options in MODIFIERS.values() for name, value in options.items()}
MODIFIERS["everything"]["scale"] = 0.7


@pytest.fixture(scope="module", autouse=True, params=["without the native kernel", "with it"])
def is_native(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Every test here runs on the native kernel, and on those that serve where it was not built."""
    _plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "without the native kernel":
            patch.setattr(native, "reason_against", lambda: "not built")
        elif native.reason_against():
            pytest.skip(native.reason_against())
        yield request.param == "with it"


def attend(
    inputs: Inputs, served: Any, grad_lse: Tensor | None = None, *, sinks: Tensor | None = None, **options: Any
) -> Oracle:
    """What `oracle` gives, from `sparse_attention`; a gradient of lse is taken where ``grad_lse`` is given."""
    leaves = {name: x.detach().requires_grad_() for name, x in zip("qkv", inputs, strict=False)}
    if sinks is not None:
        leaves["sinks"] = sinks.detach().requires_grad_()
    options |= {"sinks": leaves.get("sinks"), "enable_gqa": True, "return_lse": True}
    out, lse = sparse_attention(*(leaves[name] for name in "qkv"), served, **options)
    outputs, cotangents = [out], [inputs.grad_out]
    if grad_lse is not None:
        outputs.append(lse)
        cotangents.append(grad_lse.to(lse.dtype))
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    return Oracle(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def error_of(actual: Tensor, expected: Tensor) -> float:
    """`relative_error`, but a result that cancels to nothing is measured against 1 % of what its terms are."""
    scale = 0.01 * math.sqrt(expected.numel())
    if not expected.isfinite().all() or expected.norm() > scale:
        return relative_error(actual, expected)
    return (actual.double() - expected).norm().item() / (scale or 1.0)


def assert_same(actual: Oracle, expected: Oracle, tolerance: float = TOLERANCE) -> None:
    assert actual.grads.keys() == expected.grads.keys()
    errors = {"out": error_of(actual.out, expected.out), "lse": error_of(actual.lse, expected.lse)}
    errors |= {f"grad of {name}": error_of(actual.grads[name], grad) for name, grad in expected.grads.items()}
    assert all(error <= tolerance for error in errors.values()), errors


def assert_bits(actual: Oracle, expected: Oracle) -> None:
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.lse, expected.lse)
    for name, grad in expected.grads.items():
        assert torch.equal(actual.grads[name], grad), name


@contextmanager
def small_chunks() -> Iterator[None]:
    """Everything that is cut only where it is large is cut here, and small problems are not computed in one call."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHUNK_BYTES", "_MASK_BYTES", "_OUT_BYTES"):
            patch.setattr(chunks, name, 20_000)
        for name in ("_SHORT_LIST", "_HEADS"):
            patch.setattr(chunks, name, 1)
        patch.setattr(chunks, "_FEW_TILES", 0)
        clear_cache()
        yield
    clear_cache()


# Against the oracle.


@pytest.mark.parametrize("pattern", KINDS.values(), ids=KINDS)
def test_every_kind_of_pattern(pattern: Pattern, is_native: bool) -> None:
    inputs = make_inputs(1, 4, 300, kv_heads=2, value_dim=24)
    grad_lse = torch.randn(1, 4, 300, dtype=torch.float64)
    expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out, grad_lse=grad_lse)
    assert_same(attend(inputs, pattern, grad_lse), expected)
    assert_same(attend(inputs, build_index(pattern, 300, num_heads=4, block=16), grad_lse), expected)
    if is_native:
        return
    with small_chunks():
        assert_same(attend(inputs, build_index(pattern, 300, num_heads=4, block=64), grad_lse), expected)


class Problem(NamedTuple):
    """A call in all its variety."""

    inputs: Inputs
    pattern: Pattern
    index: BlockIndex
    start: int
    options: dict[str, Any]


def modifiers(heads: int, batch: int, n_keys: int) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "key_mask": st.integers(0, 99).map(lambda seed: seeded(seed, batch, n_keys) < 0.7),
        "key_lengths": st.lists(st.integers(0, n_keys), min_size=batch, max_size=batch).map(torch.tensor),
        "softcap": st.sampled_from([0.5, 20.0]),
        "alibi_slopes": st.integers(0, 99).map(lambda seed: seeded(seed, heads)),
        "sinks": st.integers(0, 99).map(lambda seed: seeded(seed, heads).double()),
        "scale": st.sampled_from([-1.0, 0.0, 0.9]),
        "dropout": st.tuples(st.sampled_from([0.1, 0.9]), st.integers(-(2**63), 2**63 - 1)),
    }


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def calls(draw: st.DrawFn) -> Problem:
    grid = draw(grids())
    pattern = draw(patterns(grid, heads=True))
    ratio, batch = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    heads = pattern.num_heads or ratio * draw(st.sampled_from([1, 3]))
    ratio = ratio if heads % ratio == 0 else 1
    head_dim, value_dim = draw(st.sampled_from([(8, 8), (16, 16), (3, 5), (5, 3), (8, 24), (1, 1)]))
    inputs = make_inputs(
        batch, heads, grid.n_queries, grid.n_keys, head_dim, kv_heads=heads // ratio, value_dim=value_dim
    )
    inputs = Inputs(*(draw(st.sampled_from(list(LAYOUTS.values())))(x) for x in inputs))
    index = build_index(pattern, grid.n_queries, grid.n_keys, start=grid.start, num_heads=heads, block=grid.block)
    choices = modifiers(heads, batch, grid.n_keys)
    names = draw(st.lists(st.sampled_from(sorted(choices)), unique=True, max_size=3))
    options = {name: draw(choices[name]) for name in names}
    if "dropout" in options:
        options["dropout_p"], options["seed"] = options.pop("dropout")
    return Problem(inputs, pattern, index, grid.start, options)


def by_column(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def scattered(x: Tensor) -> Tensor:
    room = torch.full([2 * size + 1 for size in x.shape], math.nan, dtype=x.dtype)
    room[1::2, 1::2, 1::2, 1::2] = x
    return room[1::2, 1::2, 1::2, 1::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "[B, N, H, D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "[B, H, D, N]": by_column,
    "[N, D, H, B]": lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1),
    "every second of each": scattered,
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one row for all": lambda x: x[:1, :, :1].expand_as(x),
}


@settings(max_examples=25)
@given(problem=calls(), served=st.sampled_from(["pattern", "index"]))
def test_any_call(is_native: bool, problem: Problem, served: str) -> None:
    inputs, pattern, index, start, options = problem
    grad_lse = torch.randn(inputs.q.shape[:3], dtype=torch.float64)
    expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out, grad_lse=grad_lse, start=start, **options)
    with nullcontext() if is_native or served == "pattern" else small_chunks():
        actual = attend(inputs, index if served == "index" else pattern, grad_lse, start=start, **options)
    assert_same(actual, expected)


SOME_KINDS: dict[str, Pattern] = {
    "dense": Dense(),
    "causal": Causal(),
    "holes": HOLES,
    "per head": per_head([Causal(), Window(5), ~Dense(), HOLES]),
    "tiled": TILED,
}


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (kind, option)
        for column, option in enumerate(MODIFIERS)
        for row, kind in enumerate(SOME_KINDS)
        if kind == "tiled" or (row + column) % 4 == 0
    ],
)
def test_options(kind: str, option: str) -> None:
    pattern, length, given_options = SOME_KINDS[kind], 300 if kind == "causal" else 210, MODIFIERS[option]
    inputs = make_inputs(2, 4, length, 300, kv_heads=2, value_dim=8)
    grad_lse = torch.randn(2, 4, length, dtype=torch.float64)
    expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out, grad_lse=grad_lse, **given_options)
    assert_same(attend(inputs, pattern, grad_lse, **given_options), expected)
    with small_chunks():
        index = build_index(pattern, length, 300, num_heads=4, block=32)
        assert_same(attend(inputs, index, grad_lse, **given_options), expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("pattern", [Dense(), TILED], ids=["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_strides_give_the_bits_of_contiguous_ones(
    pattern: Pattern, layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    inputs = Inputs(*(layout(x) for x in make_inputs(2, 4, 300, kv_heads=2, dtype=dtype)))
    plain = Inputs(*(x.clone(memory_format=torch.contiguous_format) for x in inputs))
    grad_lse = torch.randn(300, 4, 2).permute(2, 1, 0)
    actual, expected = (attend(x, pattern, grad_lse) for x in (inputs, plain))
    assert_same(actual, expected, 1e-12 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pattern", [Causal(), TILED], ids=["causal", "tiled"])
def test_any_length(pattern: Pattern, length: int) -> None:
    for n_queries, n_keys, block in ((length, length, 128), (length, 200, 16), (150, length, 64)):
        inputs = make_inputs(1, 2, n_queries, n_keys, 8)
        index = build_index(pattern, n_queries, n_keys, num_heads=2, block=block)
        expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
        assert_same(attend(inputs, index), expected)
        assert_same(attend(inputs, pattern), expected)


@pytest.mark.parametrize("pattern", [Causal(), TILED, Strided(30)], ids=["causal", "tiled", "strided"])
def test_decoding_and_chunked_prefill_give_the_whole(pattern: Pattern) -> None:
    inputs = make_inputs(2, 4, 300, kv_heads=2)
    whole = attend(inputs, Causal() & pattern)
    for cuts in ([0, 100, 101, 230, 300], [0, 298, 299, 300]):
        for first, end in pairwise(cuts):
            part = inputs._replace(q=inputs.q[:, :, first:end], grad_out=inputs.grad_out[:, :, first:end])
            everything = attend(part, Causal() & pattern, start=first)
            until_now = attend(part._replace(k=part.k[:, :, :end], v=part.v[:, :, :end]), Causal() & pattern)
            for step in (everything, until_now):
                assert relative_error(step.out, whole.out[:, :, first:end]) < TOLERANCE
                assert relative_error(step.lse, whole.lse[:, :, first:end]) < TOLERANCE
                assert relative_error(step.grads["q"], whole.grads["q"][:, :, first:end]) < TOLERANCE


@pytest.mark.parametrize(("batch", "n_queries", "n_keys"), [(1, 0, 4), (1, 4, 0), (2, 0, 0)])
@pytest.mark.parametrize("pattern", [Dense(), Causal(), HOLES, Elements(checkerboard)], ids=repr)
def test_no_queries_or_no_keys(pattern: Pattern, batch: int, n_queries: int, n_keys: int) -> None:
    inputs = make_inputs(batch, 2, n_queries, n_keys)
    # A slice of a longer mask keeps its strides.
    attend(inputs, pattern, key_mask=torch.ones(batch, n_keys + 1, dtype=torch.bool)[:, :n_keys])
    actual = attend(inputs, pattern)
    assert actual.out.shape == inputs.grad_out.shape
    assert not actual.out.any()
    assert (actual.lse == -math.inf).all()
    assert [grad.shape for grad in actual.grads.values()] == [x.shape for x in inputs[:3]]
    assert not any(grad.any() for grad in actual.grads.values())


def test_forms_of_a_pattern() -> None:
    matrix = torch.rand(4, 3, 3) < 0.6
    inputs = make_inputs(1, 4, 300)
    expected = oracle(*inputs[:3], Blocks(matrix), grad_out=inputs.grad_out)
    block_mask = to_block_mask(build_index(Blocks(matrix), 300, num_heads=4))
    for served in (matrix, Blocks(matrix), build_index(Blocks(matrix), 300, num_heads=4), block_mask):
        assert_same(attend(inputs, served), expected)
    causal = oracle(*inputs[:3], Causal() & Blocks(matrix), grad_out=inputs.grad_out)
    for form in (matrix, Blocks(matrix), block_mask):
        assert_same(attend(inputs, form, is_causal=True), causal)
    assert_same(attend(inputs, None), oracle(*inputs[:3], Dense(), grad_out=inputs.grad_out))
    assert_same(attend(inputs, None, is_causal=True), oracle(*inputs[:3], Causal(), grad_out=inputs.grad_out))


def test_batch_rows_have_their_own_pattern() -> None:
    ids = torch.stack([torch.arange(300) // 70, torch.arange(300) // 119, torch.zeros(300, dtype=torch.int64)])
    inputs = make_inputs(3, 4, 300, kv_heads=2)
    for pattern in (Documents(ids=ids), per_head([Dense(), Causal(), Window(9), Dense()]) & Documents(ids=ids)):
        expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
        assert_same(attend(inputs, pattern), expected)
        assert_same(attend(inputs, build_index(pattern, 300, num_heads=4, batch=3, block=32)), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_heads_of_one_key_head_may_have_different_patterns(kv_heads: int) -> None:
    a, b = Causal() & Window(90), GlobalTokens(7)
    inputs = make_inputs(2, 6, 200, kv_heads=kv_heads)
    for choice in ((a, b, a, a, b, b), (a, a, a, a, a, b), (b, a, a, a, b, b)):
        pattern = per_head(choice)
        assert_same(attend(inputs, pattern), oracle(*inputs[:3], pattern, grad_out=inputs.grad_out))


@pytest.mark.parametrize("backend", [None, "blockwise", "dense", "reference"])
def test_lazily_negated_and_zero_tensors_count_as_their_values(backend: str | None) -> None:
    plain = [torch.randn(1, 2, 6, 4) for _ in range(4)]
    negated = [torch._neg_view((-x).contiguous()) for x in plain]
    assert all(x.is_neg() and torch.equal(x, y) for x, y in zip(negated, plain, strict=True))
    nothing = torch.zeros(1, 2, 6, 4)

    def results(q: Tensor, k: Tensor, v: Tensor, out_grad: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = sparse_attention(*leaves, Causal(), backend=backend)
        with torch.no_grad():
            assert torch.equal(sparse_attention(*leaves, Causal(), backend=backend), out)
        return [out, *torch.autograd.grad(out, leaves, out_grad)]

    for which in range(4):
        for others, lazy in ((plain[which], negated[which]), (nothing, torch._efficientzerotensor((1, 2, 6, 4)))):
            expected, found = (results(*plain[:which], x, *plain[which + 1 :]) for x in (others, lazy))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_lazily_zero_options_count_as_zeros() -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 4).unbind()
    for options in ({"key_lengths": [2]}, {"head_at": [2], "dropout_p": 0.5, "seed": 3}):
        name, shape = next(iter(options.items()))
        for lazy, zeros in ((torch._efficientzerotensor(shape, dtype=torch.int64), torch.zeros(shape).long()),):
            a, b = (sparse_attention(q, k, v, Causal(), **options | {name: x}) for x in (lazy, zeros))
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", [None, "blockwise", "dense"])
def test_freed_memory_is_refused_in_both_passes(backend: str | None) -> None:
    def tensors() -> list[Tensor]:
        return [torch.randn(1, 2, 6, 4)[:, 1:] for _ in range(4)]

    def freed(x: Tensor) -> None:
        x.untyped_storage().resize_(0)

    for _ in range(3):
        sparse_attention(*tensors()[:3], Causal(), backend=backend)
    for which, name in enumerate(("query", "key", "value", "out_grad")):
        inputs = tensors()
        leaves = [x.requires_grad_() for x in inputs[:3]]
        out = sparse_attention(*leaves, Causal(), backend=backend)
        freed(inputs[which])
        with pytest.raises(ValueError, match=f"{name}: expected a tensor with memory, got a freed storage"):
            torch.autograd.grad(out, leaves, inputs[3])
        if which < 3:
            with pytest.raises(ValueError, match=f"{name}: expected a tensor with memory, got a freed storage"):
                sparse_attention(*leaves, Causal(), backend=backend)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    inputs = make_inputs(1, 2, 150)
    expected = oracle(*inputs[:3], TILED, grad_out=inputs.grad_out)
    for chosen in ("q", "k", "v", "qv", "kv"):
        q, k, v = (x.detach().requires_grad_(name in chosen) for name, x in zip("qkv", inputs, strict=False))
        sparse_attention(q, k, v, TILED).backward(inputs.grad_out)
        for name, x in zip("qkv", (q, k, v), strict=True):
            assert (x.grad is None) == (name not in chosen)
            assert x.grad is None or relative_error(x.grad, expected.grads[name]) < TOLERANCE


def test_a_gradient_through_lse_alone() -> None:
    inputs, grad_lse = make_inputs(1, 2, 150), torch.randn(1, 2, 150, dtype=torch.float64)
    for pattern, options in product((Dense(), TILED), ({}, {"softcap": 1.5})):
        expected = oracle(*inputs[:3], pattern, grad_lse=grad_lse, **options)
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        _, lse = sparse_attention(q, k, v, pattern, return_lse=True, **options)
        lse.backward(grad_lse)
        assert relative_error(q.grad, expected.grads["q"]) < TOLERANCE
        assert relative_error(k.grad, expected.grads["k"]) < TOLERANCE
        assert v.grad is None or not v.grad.any()


def test_results_are_in_the_dtypes_of_the_contract() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        lse_dtype = torch.promote_types(dtype, torch.float32)
        inputs = make_inputs(1, 2, 40, dtype=dtype)
        for pattern, backend in product((Dense(), TILED), (None, "reference")):
            actual = attend(inputs, pattern, backend=backend)
            assert actual.out.dtype == dtype
            assert actual.lse.dtype == lse_dtype
            assert {grad.dtype for grad in actual.grads.values()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("backend", "most"), [("native", 1e-5), ("dense", 1e-4), ("blockwise", 1e-4)])
def test_the_lse_of_half_types_is_as_close_as_documented(backend: str, most: float, dtype: torch.dtype) -> None:
    if backend == "native" and native.reason_against():
        pytest.skip(native.reason_against())
    if backend == "native" and arithmetic_of(dtype).tile_products > 1:
        # The products of the low parts are left out.
        most = 1e-4
    q, k, v = (torch.randn(1, 4, 256, 64, generator=torch.Generator().manual_seed(3)).to(dtype) for _ in range(3))
    scores = q.double() @ k.double().mT / 8
    expected = scores.masked_fill(torch.ones(256, 256).triu(1) > 0, -math.inf).logsumexp(3)
    lse = sparse_attention(q, k, v, Causal(), backend=backend, return_lse=True)[1]
    assert (lse - expected).abs().max() < most


# Dropout.


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", [5, -(2**63), torch.tensor([123456789012345])])
def test_dropout_drops_the_pairs_of_the_specification(block: int, seed: int | Tensor) -> None:
    start, n_queries, n_keys, p = -11, 150, 170, 0.37
    q, k, _, _ = make_inputs(2, 4, n_queries, n_keys, kv_heads=2)
    v = torch.eye(n_keys, dtype=torch.float64).expand(2, 2, -1, -1)
    index = build_index(TILED | Window(200), n_queries, n_keys, start=start, num_heads=4, block=block)
    plain, dropped = (
        sparse_attention(q, k, v, index, enable_gqa=True, **options) for options in ({}, {"dropout_p": p, "seed": seed})
    )
    shapes = torch.meshgrid(
        *(torch.arange(size) for size in (2, 4)), torch.arange(n_queries) + start, torch.arange(n_keys), indexing="ij"
    )
    keep = dropout_keep(seed, *shapes, p)
    assert torch.equal(dropped != 0, (plain != 0) & keep)
    assert relative_error(dropped, plain * keep * dropout_scale(p)) < TOLERANCE


def test_dropout_draws_its_seed_from_torch() -> None:
    inputs = make_inputs(1, 2, 150)
    torch.manual_seed(3)
    first, second = (attend(inputs, TILED, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert_bits(attend(inputs, TILED, dropout_p=0.5), first)
    assert not torch.equal(first.out, second.out)


def test_the_seed_means_nothing_without_dropout() -> None:
    inputs = make_inputs(1, 2, 150)
    state = torch.get_rng_state()
    assert_bits(attend(inputs, TILED, seed=1), attend(inputs, TILED))
    assert torch.equal(torch.get_rng_state(), state)


# What is not kept changes nothing.


@pytest.mark.parametrize(
    ("text", "dtype", "when"),
    [
        (text, (torch.float64, torch.float32, torch.bfloat16)[(row + column) % 3], when)
        for row, text in enumerate(["causal", "causal & window(60)", "tiled"])
        for column, when in enumerate([1, 100, 128, 299])
    ],
    ids=str,
)
def test_the_future_does_not_change_the_past(text: str, dtype: torch.dtype, when: int) -> None:
    pattern = {"causal": Causal(), "causal & window(60)": Causal() & Window(60), "tiled": TILED}[text]
    inputs = make_inputs(1, 2, 300, dtype=dtype)
    inputs.grad_out[:, :, when:] = 0
    other = Inputs(*(x.clone() for x in inputs))
    for x in other[:3]:
        x[:, :, when:] = torch.randn_like(x[:, :, when:]) * 30
    grad_lse = torch.randn(1, 2, 300)
    grad_lse[:, :, when:] = 0
    a, b = (attend(x, pattern, grad_lse) for x in (inputs, other))
    assert torch.equal(a.out[:, :, :when], b.out[:, :, :when])
    assert torch.equal(a.lse[:, :, :when], b.lse[:, :, :when])
    for name, grad in a.grads.items():
        assert torch.equal(grad[:, :, :when], b.grads[name][:, :, :when]), name
        assert not b.grads[name][:, :, when:].any()


def idle(pattern: Pattern, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """``[B, H, N]`` queries that keep nothing and ``[B, Hkv, M]`` keys that nobody keeps."""
    masks = {name: options[name] for name in ("start", "key_mask", "key_lengths") if name in options}
    kept = kept_pairs(pattern, inputs.q, inputs.k, **masks)
    return ~kept.any(-1), ~kept.unflatten(1, (inputs.k.shape[1], -1)).any(3).any(2)


BLIND: dict[str, Pattern] = {
    "holes": HOLES,
    "unused columns": TILED & ~Elements(lambda head, query, key: key % 5 == 3),
    "unused tiles": Causal() & ~GlobalTokens(140),
    "keys beyond the window": Window(40),
    "only some heads keep": per_head([Window(30), ~Dense(), GlobalTokens(3), Window(7) & ~GlobalTokens(200)]),
    "one tile": Causal() & ~GlobalTokens(260),
    "nothing": ~Dense(),
}
BLIND_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "start": {"start": 90},
    "before the keys": {"start": -150},
    "key_mask": {"key_mask": torch.arange(300).expand(2, 300) % torch.tensor([[3], [1]]) == 0},
    "key_lengths": {"key_lengths": torch.tensor([130, 0])},
    "softcap": {"softcap": 2.0},
    "dropout, alibi, sinks": {
        "dropout_p": 0.3,
        "seed": 3,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "sinks": torch.tensor([0.1, 3.0, -math.inf, 1.0]),
    },
}


@pytest.mark.parametrize(
    ("kind", "given_options", "kv_heads"),
    [
        (kind, options, (4, 2)[(row + column) % 2])
        for row, kind in enumerate(BLIND)
        for column, options in enumerate(BLIND_OPTIONS)
        # Each kind with four options, and each option with four kinds.
        if (row + column) % 7 in (0, 3, 4, 5)
    ],
)
def test_what_nobody_keeps_changes_nothing(kind: str, given_options: str, kv_heads: int) -> None:
    pattern, options = BLIND[kind], BLIND_OPTIONS[given_options]
    inputs = make_inputs(2, 4, 170, 300, 8, kv_heads=kv_heads)
    grad_lse = torch.randn(2, 4, 170, dtype=torch.float64)
    rows, keys = idle(pattern, inputs, **options)
    assert rows.any() or keys.any()

    def with_value(value: float, served: Pattern | BlockIndex) -> Oracle:
        unused = [x.unsqueeze(-1) for x in (rows, keys, keys, rows)]
        q, k, v, grad_out = (x.masked_fill(mask, value) for x, mask in zip(inputs, unused, strict=True))
        return attend(Inputs(q, k, v, grad_out), served, grad_lse.masked_fill(rows, value), **options)

    index = build_index(pattern, 170, 300, start=options.get("start"), num_heads=4, block=32)
    for served, values in ((pattern, (math.nan, -math.inf)), (index, (math.inf,))):
        clean = with_value(0.5, served)
        assert all(x.isfinite().all() for x in (clean.out, *clean.grads.values()))
        for value in values:
            with filled_memory():
                assert_bits(with_value(value, served), clean)
        assert not clean.out[rows].any()
        assert (clean.lse[rows] == -math.inf).all()
        assert (clean.lse[~rows] > -math.inf).all()
        assert not clean.grads["q"][rows].any()
        assert not clean.grads["k"][keys].any()
        assert not clean.grads["v"][keys].any()


def test_second_derivatives_do_not_see_what_nobody_keeps() -> None:
    inputs = make_inputs(1, 2, 170, 200, 8)
    rows, keys = idle(HOLES, inputs)

    def with_value(value: float) -> list[Tensor]:
        unused = [x.unsqueeze(-1) for x in (rows, keys, keys, rows)]
        q, k, v, grad_out = (
            x.masked_fill(mask, value).requires_grad_() for x, mask in zip(inputs, unused, strict=True)
        )
        out = sparse_attention(q, k, v, HOLES)
        first = torch.autograd.grad(out, (q, k, v), grad_out, create_graph=True)
        cotangents = [x.detach().sin().masked_fill(mask, value) for x, mask in zip(inputs, unused[:3], strict=False)]
        return list(torch.autograd.grad(first, (q, k, v, grad_out), cotangents))

    for clean, dirty in zip(with_value(0.5), with_value(math.nan), strict=True):
        assert torch.equal(clean, dirty)
        assert clean.any()


def test_uninitialised_memory_is_never_read() -> None:
    for pattern, options in product((Dense(), TILED, HOLES), ({}, {"softcap": 1.0}, {"dropout_p": 0.2, "seed": 3})):
        inputs = make_inputs(2, 4, 170, 300, kv_heads=2)
        expected = attend(inputs, pattern, **options)
        with filled_memory():
            assert_bits(attend(inputs, pattern, **options), expected)


def test_inputs_are_left_alone() -> None:
    for pattern in (Dense(), TILED, HOLES):
        inputs = make_inputs(2, 2, 300)
        before = [x.clone() for x in inputs]
        attend(inputs, pattern, torch.ones(2, 2, 300))
        assert all(map(torch.equal, inputs, before))


# Rounding: torch's own error is the yardstick.

ROUNDED: dict[str, Pattern] = {
    "dense": Dense(),
    "causal": Causal(),
    "causal window": Causal() & Window(100),
    "tiled": TILED,
    "random": RandomBlocks(2, seed=1),
    "strided": Strided(20),
}


def assert_within_budget(pattern: Pattern, inputs: Inputs) -> None:
    expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
    theirs = sdpa_low_precision_error(*inputs[:3], pattern, inputs.grad_out, expected=expected)
    assert theirs.operator == "_scaled_dot_product_flash_attention_for_cpu"
    ours = attend(inputs, pattern)
    budget = SDPA_BUDGET[inputs.q.dtype]
    assert relative_error(ours.out, expected.out) <= budget * theirs.out
    for name, error in theirs.grads.items():
        assert relative_error(ours.grads[name], expected.grads[name]) <= budget * error, name


@pytest.mark.parametrize(
    ("pattern", "dtype", "score_scale", "kv_heads"),
    [
        (pattern, dtype, scale, (4, 2)[(row + column) % 2])
        for row, pattern in enumerate(ROUNDED.values())
        for column, (dtype, scale) in enumerate(
            [*((torch.float32, scale) for scale in (1, 4, 16)), (torch.bfloat16, 1), (torch.float16, 1)]
        )
    ],
    ids=str,
)
def test_errors_within_the_budget_of_torchs(
    pattern: Pattern, dtype: torch.dtype, score_scale: float, kv_heads: int
) -> None:
    """Three times PyTorch's error in float32, a fifth of it in half precision."""
    inputs = make_inputs(1, 4, 320, head_dim=64, kv_heads=kv_heads, dtype=dtype, score_scale=score_scale)
    assert_within_budget(pattern, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(33, 65), (96, 64), (3, 7)], ids=str)
def test_errors_of_another_value_width_within_the_budget_of_one_width(
    dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """PyTorch's flash kernel knows one width. On others, PyTorch rounds less."""
    inputs, pattern = make_inputs(1, 2, 200, head_dim=dims[0], value_dim=dims[1], dtype=dtype), Causal() & Window(50)
    padded = Inputs(*(F.pad(x, (0, max(dims) - x.shape[3])) for x in inputs))
    scale, expected = dims[0] ** -0.5, oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
    theirs = sdpa_low_precision_error(*padded[:3], pattern, padded.grad_out, scale=scale)
    assert theirs.operator == "_scaled_dot_product_flash_attention_for_cpu"
    ours = attend(inputs, pattern)
    assert relative_error(ours.out, expected.out) <= SDPA_BUDGET[dtype] * theirs.out
    for name, error in theirs.grads.items():
        assert relative_error(ours.grads[name], expected.grads[name]) <= SDPA_BUDGET[dtype] * error, name


@pytest.mark.parametrize("level", [-20, -8, 0, 8, 20])
def test_sinks_keep_their_digits_at_any_level(level: float) -> None:
    # A gradient that multiplies a share by its distance from 1 has no digits left where either is small.
    inputs = make_inputs(1, 4, 320, head_dim=64, dtype=torch.float32)
    sinks = torch.randn(4) + level
    expected = oracle(*inputs[:3], HOLES, grad_out=inputs.grad_out, sinks=sinks)
    actual = attend(inputs, HOLES, sinks=sinks)
    assert relative_error(actual.out, expected.out) < 3e-6
    for name, grad in expected.grads.items():
        assert relative_error(actual.grads[name], grad) < 5e-6, name


@pytest.mark.parametrize("pattern", [Dense(), TILED], ids=["dense", "tiled"])
def test_large_scores_do_not_overflow(pattern: Pattern) -> None:
    for dtype, score_scale in ((torch.float32, 1000.0), (torch.bfloat16, 1000.0), (torch.float16, 300.0)):
        inputs = make_inputs(1, 2, 200, dtype=dtype, score_scale=score_scale)
        actual = attend(inputs, pattern, torch.ones(1, 2, 200))
        expected = oracle(*inputs[:3], pattern)
        assert all(x.isfinite().all() for x in (actual.out, actual.lse, *actual.grads.values()))
        assert relative_error(actual.out, expected.out) < 20 * torch.finfo(dtype).eps
        assert relative_error(actual.lse, expected.lse) < 20 * torch.finfo(torch.float32).eps


# The same bits.


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {}), (torch.float32, {"dropout_p": 0.3, "seed": 1}), (torch.bfloat16, {"softcap": 2.0})],
    ids=str,
)
def test_two_runs_give_the_same_bits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    inputs = make_inputs(2, 4, 300, kv_heads=2, dtype=dtype)
    for pattern in (Dense(), TILED, per_head([TILED, Causal(), Window(30), TILED])):
        first = attend(inputs, pattern, torch.ones(2, 4, 300), **options)
        clear_cache()
        assert_bits(attend(inputs, pattern, torch.ones(2, 4, 300), **options), first)


def test_eight_threads_on_one_cache_give_the_bits_of_one() -> None:
    problems = [
        (make_inputs(1, 2, length, dtype=torch.float32), pattern)
        for length, pattern in ((150, TILED), (300, Window(70)), (300, HOLES), (150, Strided(40)))
    ]
    alone = [attend(inputs, pattern) for inputs, pattern in problems]
    clear_cache()
    barrier = threading.Barrier(8)

    def work(_: int) -> list[Oracle]:
        barrier.wait()
        return [attend(inputs, pattern) for inputs, pattern in problems]

    with ThreadPoolExecutor(8) as pool:
        for own in pool.map(work, range(8)):
            for result, expected in zip(own, alone, strict=True):
                assert_bits(result, expected)


def test_an_index_is_checked_though_one_like_it_was() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64).unbind()
    for pattern in (Causal(), Window(3), Causal()):
        index = build_index(pattern, 64)
        for _ in range(2):
            out = sparse_attention(q, k, v, index)
            torch.testing.assert_close(out, sparse_attention(q, k, v, pattern, backend="reference"))
            out = sparse_attention(q, k, v, build_index(pattern, 64, start=9))
            wanted = sparse_attention(q, k, v, pattern, start=9, backend="reference")
            torch.testing.assert_close(out, wanted)
    wrong: list[tuple[BlockIndex, dict[str, Any], str]] = [
        (build_index(Causal(), 63, 64, start=0), {}, "pattern: expected an index with"),
        (build_index(Causal(), 64), {"start": 1}, "pattern: expected an index with"),
        (build_index(Causal(), 64), {"is_causal": True}, "is_causal: not supported"),
        (build_index(per_head([Causal(), Window(3), Window(5)]), 64, num_heads=3), {}, "pattern: expected groups"),
    ]
    for index, options, words in wrong:
        with pytest.raises(ValueError, match=words):
            sparse_attention(q, k, v, index, **options)
