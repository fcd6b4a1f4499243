"""Dropped tiles through their means."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ringtile import sparse_attention
from ringtile.adaptive import AdaptiveAttention, Density, Probe, Recent, TopK, View
from ringtile.adaptive.compensation import compensated
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Window

BLOCK = 16


def inputs(n_tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, n_tokens, 4, generator=generator, dtype=dtype) for heads in (4, 2, 2)]


def some_tiles(base: BlockIndex, share: float = 0.4) -> BlockIndex:
    generator = torch.Generator().manual_seed(1)
    return base.restricted(torch.rand(2, 4, base.n_rows, base.n_cols, generator=generator) < share)


def run(x: list[Tensor], index: BlockIndex, base: BlockIndex, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    plain = sparse_attention(*x, index, key_mask=mask, enable_gqa=True, return_lse=True)
    return compensated(*plain, View(*x[:2], base, mask), x[2], index)


def one_row(x: list[Tensor], index: BlockIndex, base: BlockIndex, mask: Tensor, place: tuple[int, int, int]) -> Tensor:
    """The softmax over the kept keys and the means of dropped tiles that the row tile keeps whole, by definition."""
    b, h, i = place
    query, (key, value) = x[0][b, h, i] / 2, (t[b, h // 2] for t in x[1:])
    whole, kept = (each.to_dense().expand(2, 4, -1, -1)[b, h] for each in (base, index))
    logits, values = [key[j] @ query for j in range(len(key)) if kept[i, j] and mask[b, j]], []
    values = [value[j] for j in range(len(key)) if kept[i, j] and mask[b, j]]
    first = i // BLOCK * BLOCK
    rows = slice(first, first + BLOCK)
    for begin in range(0, len(key), BLOCK):
        keys = [j for j in range(begin, min(begin + BLOCK, len(key))) if mask[b, j]]
        if keys and bool(whole[rows, begin : begin + BLOCK].all()) and not kept[rows, begin : begin + BLOCK].any():
            logits.append(key[keys].mean(0) @ query + math.log(len(keys)))
            values.append(value[keys].mean(0))
    return torch.stack(logits).softmax(0) @ torch.stack(values) if logits else torch.zeros(4, dtype=torch.float64)


@pytest.mark.parametrize("masked", [False, True])
def test_dropped_tiles_are_single_keys(masked: bool) -> None:
    x, base = inputs(100), build_index(Causal(), 100, num_heads=4, block=BLOCK)
    mask = torch.rand(2, 100, generator=torch.Generator().manual_seed(2)) < 0.6 if masked else None
    if mask is not None:
        mask[0, :32] = False
    index = some_tiles(base)
    out, lse = run(x, index, base, mask)
    every = torch.ones(2, 100, dtype=torch.bool) if mask is None else mask
    for place in ((0, 0, 99), (0, 3, 50), (1, 1, 17), (1, 2, 80), (0, 2, 33), (1, 0, 3)):
        torch.testing.assert_close(out[place], one_row(x, index, base, every, place), rtol=0, atol=1e-12)
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_over_a_full_budget_no_bit_differs(dtype: torch.dtype) -> None:
    x = inputs(100, dtype=dtype)
    for pattern in (Causal(), Causal() & Window(40)):
        base = build_index(pattern, 100, num_heads=4, block=BLOCK)
        plain = sparse_attention(*x, base, enable_gqa=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(run(x, base, base), plain, strict=True))
    attend = AdaptiveAttention(Recent(), Density(1.0), block=BLOCK, compensate=True)
    expected = sparse_attention(*x, build_index(Causal(), 100, num_heads=4, block=BLOCK), enable_gqa=True)
    assert torch.equal(attend(*x, is_causal=True, enable_gqa=True), expected)


def test_gradients() -> None:
    x, base = inputs(40), build_index(Causal(), 40, num_heads=4, block=BLOCK)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, :20] = False
    index = some_tiles(base)
    assert not torch.equal(run(x, index, base, mask)[0], sparse_attention(*x, index, key_mask=mask, enable_gqa=True))
    for t in x:
        t.requires_grad_()

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run(list(args), index, base, mask)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(call, x, fast_mode=True)


def test_what_no_row_may_see_changes_nothing() -> None:
    """Later tokens, masked keys, and tiles whose means are no numbers, forward and backward."""
    x, base = inputs(100), build_index(Causal(), 100, num_heads=4, block=BLOCK)
    mask = torch.rand(2, 100, generator=torch.Generator().manual_seed(2)) < 0.6
    index = some_tiles(base)
    out, _ = run(x, index, base, mask)
    for place in (3, 15, 16, 40, 47, 48, 49, 63, 64, 65, 80, 96, 98):
        later = [t.clone() for t in x]
        for t in later:
            t[:, :, place:] = torch.randn(t[:, :, place:].shape, dtype=t.dtype)
        found, _ = run(later, index, base, mask)
        assert torch.equal(found[:, :, :place], out[:, :, :place])
    spoilt = [
        x[0].requires_grad_(),
        *(t.masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_() for t in x[1:]),
    ]
    found, _ = run(spoilt, index, base, mask)
    assert torch.equal(found, out)
    found.sum().backward()
    assert all(bool(t.grad is not None and t.grad.isfinite().all()) for t in spoilt)


def test_a_batch_element_is_by_itself() -> None:
    x, base = inputs(100), build_index(Causal(), 100, num_heads=4, block=BLOCK)
    index = some_tiles(base)
    out, _ = run(x, index, base)
    other = [t.clone() for t in x]
    for t in other:
        t[1] = torch.nan
    assert torch.equal(run(other, index, base)[0][0], out[0])


def test_spread_attention_loses_less() -> None:
    x = inputs(400)
    x[0] = x[0] / 8
    exact = sparse_attention(*x, is_causal=True, enable_gqa=True)
    errors = [
        (
            AdaptiveAttention(Probe("first"), Density(0.25), block=BLOCK, compensate=on)(
                *x, is_causal=True, enable_gqa=True
            )
            - exact
        ).norm()
        for on in (False, True)
    ]
    assert errors[1] < 0.3 * errors[0]


def test_options_that_it_cannot_follow() -> None:
    x = inputs(100)
    attend = AdaptiveAttention(Recent(), TopK(2), block=BLOCK, compensate=True)
    for options in ({"softcap": 2.0}, {"alibi_slopes": torch.ones(4)}, {"sinks": torch.zeros(4)}, {"dropout_p": 0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: not supported with compensate=True"):
            attend(*x, is_causal=True, enable_gqa=True, **options)
    with pytest.raises(ValueError, match="compensate: a cache needs False"):
        attend.new_cache(Causal())
    out, lse = attend(*x, is_causal=True, enable_gqa=True, return_lse=True)
    assert torch.equal(out, attend(*x, is_causal=True, enable_gqa=True))
    assert lse.shape == (2, 4, 100)
    base = build_index(Causal(), 100, block=BLOCK)
    with pytest.raises(ValueError, match="base: expected the lengths, block and device of"):
        compensated(out, lse, View(*x[:2], build_index(Causal(), 100, block=32)), x[2], base)
