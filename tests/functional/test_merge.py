"""Merged softmaxes over parts of the keys are the softmax over all of them, and sinks are one more part."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import make_inputs, relative_error, results, worst
from torch import Tensor

from ringtile import merge_attention, sparse_attention
from ringtile.functional.attention import with_sinks
from ringtile.patterns import Causal, Dense, Pattern, Window
from ringtile.testing.oracle import attention

HOLES = Causal() & Window(40) & ~Window(2)
"""The first three queries keep nothing."""

SPLIT = (Window(20), Causal() & ~Window(20), ~Causal() & ~Window(20))
"""Three patterns that keep every pair once between them."""


def test_merged_parts_are_the_whole() -> None:
    def merged(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        parts = [sparse_attention(*leaves, part, enable_gqa=True, return_lse=True) for part in SPLIT]
        return merge_attention(*zip(*parts, strict=True))

    leaves = make_inputs(2, 4, 300, kv_heads=2)[:3]
    assert worst(results(merged, leaves), results(attention, leaves, Dense())) < 1e-12


def parts_of(*shape: int, dtype: torch.dtype = torch.float64, count: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    lse_dtype = torch.promote_types(dtype, torch.float32)
    outs = [torch.randn(*shape, 5, dtype=torch.float64).to(dtype) for _ in range(count)]
    return outs, [3 * torch.randn(shape, dtype=torch.float64).to(lse_dtype) for _ in range(count)]


def test_merging_is_associative() -> None:
    outs, lses = parts_of(2, 3, 7)
    lses[1][0, 0], lses[2][0], lses[3][0, :2] = -math.inf, -math.inf, -math.inf
    outs[2][0] = 0
    whole = merge_attention(outs, lses)
    left = merge_attention(outs[:2], lses[:2])
    right = merge_attention(outs[2:], lses[2:])
    backwards = merge_attention(outs[::-1], lses[::-1])
    one_by_one = (outs[0], lses[0])
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        one_by_one = merge_attention(*zip(one_by_one, (out, lse), strict=True))
    for other in (merge_attention(*zip(left, right, strict=True)), one_by_one, backwards):
        assert worst(other, whole) < 1e-14


def test_merging_one_part_returns_it() -> None:
    outs, lses = parts_of(1, 2, 5, count=1)
    assert worst(merge_attention(outs, lses), (outs[0], lses[0])) < 1e-15


def test_merging_tensors_without_data_gives_their_shape() -> None:
    outs = [torch.empty(1, 2, 3, 4, device="meta") for _ in range(2)]
    out, lse = merge_attention(outs, [out[..., 0] for out in outs])
    assert (out.shape, lse.shape, out.is_meta) == ((1, 2, 3, 4), (1, 2, 3), True)


def test_merging_compiles_to_one_graph_under_autocast_and_without() -> None:
    outs, lses = list(torch.randn(2, 1, 2, 30, 4)), list(torch.randn(2, 1, 2, 30))
    compiled = torch.compile(merge_attention, fullgraph=True, backend="eager")
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            torch.testing.assert_close(compiled(outs, lses), merge_attention(outs, lses))


@pytest.mark.parametrize("parts", [(HOLES, ~Dense()), (~Dense(), HOLES, ~Dense()), (~Dense(), ~Dense())], ids=str)
def test_merging_empty_parts(parts: tuple[Pattern, ...]) -> None:
    def merged(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        found = [sparse_attention(*leaves, part, return_lse=True) for part in parts]
        return merge_attention(*zip(*found, strict=True))

    leaves = make_inputs(1, 2, 150)[:3]
    assert worst(results(merged, leaves), results(attention, leaves, HOLES if HOLES in parts else ~Dense())) < 1e-12


def test_merging_has_derivatives() -> None:
    outs, lses = parts_of(1, 2, 3, count=3)
    inputs = [x.requires_grad_() for x in (*outs, *lses)]

    def merge(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return merge_attention(tensors[:3], tensors[3:])

    assert torch.autograd.gradcheck(merge, inputs)
    assert torch.autograd.gradgradcheck(merge, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merging_in_low_precision_rounds_once(dtype: torch.dtype) -> None:
    outs, lses = parts_of(1, 2, 50, dtype=dtype, count=6)
    out, lse = merge_attention(outs, lses)
    exact, exact_lse = merge_attention([x.double() for x in outs], [x.double() for x in lses])
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert relative_error(out, exact.to(dtype)) < 0.2 * torch.finfo(dtype).eps + 1e-6
    assert relative_error(lse, exact_lse) < 1e-6


def test_merging_widens_a_narrow_lse() -> None:
    outs, lses = parts_of(1, 2, 50, dtype=torch.float32, count=6)
    narrow = [x.bfloat16() for x in lses]
    out, lse = merge_attention(outs, narrow)
    expected = merge_attention(outs, [x.float() for x in narrow])
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_merging_far_apart_does_not_overflow(shift: float) -> None:
    outs, lses = parts_of(1, 1, 4, count=2)
    out, lse = merge_attention(outs, [x + shift for x in lses])
    expected = merge_attention(outs, lses)
    assert relative_error(out, expected[0]) < 1e-10
    assert relative_error(lse, expected[1] + shift) < 1e-14


@pytest.mark.parametrize("level", [-30, 30])
def test_the_gradient_of_a_far_sink_has_all_digits_of_float64(level: float) -> None:
    sink = torch.tensor([level], dtype=torch.float64, requires_grad=True)
    out, lse = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    with_sinks(out, lse, sink).sum().backward()
    less = math.exp(-abs(level))
    assert sink.grad is not None
    assert sink.grad.item() == pytest.approx(-less / (1 + less) ** 2, rel=1e-14, abs=0)
