"""Attention with and without the native kernel: layouts, lazy tensors, rounding, and keys that count for nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index import BlockIndex, clear_cache, to_block_mask
from ringtile.kernels import native
from ringtile.kernels.native.precision import arithmetic_of
from ringtile.kernels.plans import _plans
from ringtile.patterns import Blocks, Causal, Dense, GlobalTokens, Pattern, RandomBlocks, Strided, Window, per_head

HOLES = Causal() & Window(40) & ~Window(2)
"""The first three queries keep nothing, and the last three keys serve nobody."""

TILED = Causal() & (Window(50) | GlobalTokens(5) | RandomBlocks(1, block=32))


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


def assert_same(actual: Oracle, expected: Oracle, most: float = 1e-12) -> None:
    assert relative_error(actual.out, expected.out) <= most
    assert relative_error(actual.lse, expected.lse) <= most
    for name, grad in expected.grads.items():
        assert relative_error(actual.grads[name], grad) <= most, name


def assert_bits(actual: Oracle, expected: Oracle) -> None:
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.lse, expected.lse)
    for name, grad in expected.grads.items():
        assert torch.equal(actual.grads[name], grad), name


def scattered(x: Tensor) -> Tensor:
    room = torch.full([2 * size + 1 for size in x.shape], math.nan, dtype=x.dtype)
    room[1::2, 1::2, 1::2, 1::2] = x
    return room[1::2, 1::2, 1::2, 1::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, N, H, D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "[N, D, H, B]": lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1),
    "every second": scattered,
    "one row for all": lambda x: x[:1, :, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_any_strides(layout: Callable[[Tensor], Tensor], dtype: torch.dtype, most: float) -> None:
    inputs = Inputs(*(layout(x) for x in make_inputs(2, 4, 300, kv_heads=2, dtype=dtype)))
    plain = Inputs(*(x.clone(memory_format=torch.contiguous_format) for x in inputs))
    grad_lse = torch.randn(300, 4, 2).permute(2, 1, 0)
    assert_same(*(attend(x, TILED, grad_lse) for x in (inputs, plain)), most)


def test_a_slice_of_a_mask_keeps_its_strides() -> None:
    q, k, v, _ = make_inputs(1, 2, 4, 0)
    assert not sparse_attention(q, k, v, HOLES, key_mask=torch.ones(1, 1, dtype=torch.bool)[:, :0]).any()


def test_forms_of_a_pattern() -> None:
    matrix = torch.rand(4, 3, 3) < 0.6
    inputs = make_inputs(1, 4, 300)
    block_mask = to_block_mask(build_index(Blocks(matrix), 300, num_heads=4))
    for is_causal in (False, True):
        rule = Causal() & Blocks(matrix) if is_causal else Blocks(matrix)
        for form, pattern in ((matrix, rule), (block_mask, rule), (None, Causal() if is_causal else Dense())):
            expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
            assert_same(attend(inputs, form, is_causal=is_causal), expected)


@pytest.mark.parametrize("backend", [None, "blockwise", "dense", "reference"])
def test_lazily_negated_and_zero_tensors_count_as_their_values(backend: str | None) -> None:
    plain = [torch.randn(1, 2, 6, 4) for _ in range(4)]

    def results(*tensors: Tensor) -> list[Tensor]:
        *leaves, out_grad = (x.detach().requires_grad_() for x in tensors)
        out = sparse_attention(*leaves, Causal(), backend=backend)
        with torch.no_grad():
            assert torch.equal(sparse_attention(*leaves, Causal(), backend=backend), out)
        return [out, *torch.autograd.grad(out, leaves, out_grad)]

    for which, x in enumerate(plain):
        zeros = torch.zeros_like(x), torch._efficientzerotensor(x.shape)
        for pair in ((x, torch._neg_view(-x)), zeros):
            both = (results(*plain[:which], y, *plain[which + 1 :]) for y in pair)
            torch.testing.assert_close(*both, atol=1e-6, rtol=1e-6)


def test_lazily_zero_options_count_as_zeros() -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 4).unbind()
    for options in ({"key_lengths": [2]}, {"head_at": [2], "dropout_p": 0.5, "seed": 3}):
        name, shape = next(iter(options.items()))
        zeros = torch._efficientzerotensor(shape, dtype=torch.int64), torch.zeros(shape).long()
        assert torch.equal(*(sparse_attention(q, k, v, Causal(), **options | {name: x}) for x in zeros))


@pytest.mark.parametrize("backend", [None, "blockwise", "dense"])
def test_freed_memory_is_refused_in_both_passes(backend: str | None) -> None:
    for which, name in enumerate(("query", "key", "value", "out_grad")):
        tensors = [torch.randn(1, 2, 6, 4)[:, 1:] for _ in range(4)]
        leaves = [x.requires_grad_() for x in tensors[:3]]
        for _ in range(3):
            out = sparse_attention(*leaves, Causal(), backend=backend)
        tensors[which].untyped_storage().resize_(0)
        message = f"{name}: expected a tensor with memory, got a freed storage"
        with pytest.raises(ValueError, match=message):
            torch.autograd.grad(out, leaves, tensors[3])
        if which < 3:
            with pytest.raises(ValueError, match=message):
                sparse_attention(*leaves, Causal(), backend=backend)


@pytest.mark.parametrize(("pattern", "softcap"), [(Dense(), 0.0), (TILED, 1.5)], ids=["dense", "tiled"])
def test_a_gradient_through_lse_alone(pattern: Pattern, softcap: float) -> None:
    inputs, grad_lse = make_inputs(1, 2, 150), torch.randn(1, 2, 150, dtype=torch.float64)
    expected = oracle(*inputs[:3], pattern, grad_lse=grad_lse, softcap=softcap)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    _, lse = sparse_attention(*leaves, pattern, return_lse=True, softcap=softcap)
    for name, grad in zip("qk", torch.autograd.grad(lse, leaves[:2], grad_lse), strict=True):
        assert relative_error(grad, expected.grads[name]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("backend", "most"), [("native", 1e-5), ("dense", 1e-4), ("blockwise", 1e-4)])
def test_the_lse_of_half_types_is_as_close_as_documented(backend: str, most: float, dtype: torch.dtype) -> None:
    if backend == "native" and (reason := native.reason_against()):
        pytest.skip(reason)
    if backend == "native" and arithmetic_of(dtype).tile_products > 1:
        # The products of the low parts are left out.
        most = 1e-4
    x = torch.randn(1, 4, 256, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    lse = sparse_attention(x, x, x, Causal(), backend=backend, return_lse=True)[1]
    assert (lse - oracle(x, x, x, Causal()).lse).abs().max() < most


# Dropout.


def test_dropout_draws_its_seed_from_torch() -> None:
    inputs, state = make_inputs(1, 2, 150), torch.get_rng_state()
    assert_bits(attend(inputs, TILED, seed=1), attend(inputs, TILED))
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (attend(inputs, TILED, dropout_p=0.5) for _ in range(2))
    torch.set_rng_state(state)
    assert_bits(attend(inputs, TILED, dropout_p=0.5), first)
    assert not torch.equal(first.out, second.out)


# What is not kept changes nothing.


@pytest.mark.parametrize(("dtype", "when"), [(torch.float64, 1), (torch.bfloat16, 128), (torch.float32, 299)])
def test_the_future_does_not_change_the_past(dtype: torch.dtype, when: int) -> None:
    inputs = make_inputs(1, 2, 300, dtype=dtype)
    inputs.grad_out[:, :, when:] = 0
    other = Inputs(*(x.clone() for x in inputs))
    for x in other[:3]:
        x[:, :, when:] = torch.randn_like(x[:, :, when:]) * 30
    for pattern in (Causal(), TILED):
        a, b = (attend(x, pattern) for x in (inputs, other))
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


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (HOLES, {"key_mask": torch.arange(300).expand(2, 300) % torch.tensor([[3], [1]]) == 0}),
        (Causal() & ~GlobalTokens(260), {"dropout_p": 0.3, "seed": 3, "sinks": torch.tensor([0.1, 3, -math.inf, 1])}),
        (per_head([Window(30), ~Dense(), GlobalTokens(3), Window(7) & ~GlobalTokens(200)]), {}),
        (Window(40), {"key_lengths": torch.tensor([130, 0])}),
        (TILED, {"start": -150, "softcap": 2.0}),
    ],
    ids=["holes", "one tile", "per head", "lengths", "before the keys"],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_nobody_keeps_changes_nothing(pattern: Pattern, options: dict[str, Any], value: float) -> None:
    inputs = make_inputs(2, 4, 170, 300, 8, kv_heads=2)
    rows, keys = idle(pattern, inputs, **options)
    assert rows.any() or keys.any()

    def with_value(value: float) -> Oracle:
        unused = [x.unsqueeze(-1) for x in (rows, keys, keys, rows)]
        changed = (x.masked_fill(mask, value) for x, mask in zip(inputs, unused, strict=True))
        return attend(Inputs(*changed), pattern, torch.zeros(rows.shape).masked_fill(rows, value), **options)

    clean = with_value(0.5)
    with filled_memory():
        assert_bits(with_value(value), clean)
    assert not clean.out[rows].any()
    assert not clean.grads["q"][rows].any()
    assert not any(clean.grads[name][keys].any() for name in "kv")


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


@pytest.mark.parametrize("options", [{"softcap": 1.0}, {"dropout_p": 0.2, "seed": 3}])
def test_uninitialised_memory_is_never_read(options: dict[str, Any]) -> None:
    for pattern in (Dense(), TILED):
        inputs = make_inputs(1, 4, 170, 300, kv_heads=2)
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


def assert_within_budget(pattern: Pattern, inputs: Inputs) -> None:
    """Three times PyTorch's error in float32, a fifth of it more in half precision."""
    expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
    # PyTorch's flash kernel has one width for keys and values. On others, PyTorch rounds less.
    dims = inputs.q.shape[3], inputs.v.shape[3]
    padded = Inputs(*(F.pad(x, (0, max(dims) - x.shape[3])) for x in inputs))
    theirs = sdpa_low_precision_error(*padded[:3], pattern, padded.grad_out, scale=dims[0] ** -0.5)
    assert theirs.operator == "_scaled_dot_product_flash_attention_for_cpu"
    ours = attend(inputs, pattern)
    budget = SDPA_BUDGET[inputs.q.dtype]
    assert relative_error(ours.out, expected.out) <= budget * theirs.out
    for name, error in theirs.grads.items():
        assert relative_error(ours.grads[name], expected.grads[name]) <= budget * error, name


@pytest.mark.parametrize("pattern", [Causal(), TILED, RandomBlocks(2, seed=1)], ids=["causal", "tiled", "random"])
@pytest.mark.parametrize(
    ("dtype", "score_scale"),
    [*((torch.float32, scale) for scale in (1, 4, 16)), (torch.bfloat16, 1), (torch.float16, 1)],
)
def test_errors_within_the_budget_of_torchs(pattern: Pattern, dtype: torch.dtype, score_scale: float) -> None:
    inputs = make_inputs(1, 4, 320, head_dim=64, kv_heads=2, dtype=dtype, score_scale=score_scale)
    assert_within_budget(pattern, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(33, 65), (96, 64), (3, 7)], ids=str)
def test_errors_of_another_value_width(dims: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_inputs(1, 2, 200, head_dim=dims[0], value_dim=dims[1], dtype=dtype)
    assert_within_budget(Causal() & Window(50), inputs)


@pytest.mark.parametrize("level", [-20, 0, 8])
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
