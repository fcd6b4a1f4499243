"""Correction: exact rows of the choice, and the rows after them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import make_inputs
from torch import Tensor

from ringtile.adaptive import AdaptiveAttention, Blend, Density, Probe, Sum

BLOCK = 16


def expected(
    q: Tensor, k: Tensor, v: Tensor, attend: AdaptiveAttention, at: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The definition in float64, row by row, and the rows that drop a tile."""
    index = attend.index(q, k, key_mask=mask, **options)
    heads, n = q.shape[1], q.shape[2]
    keys, values = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    logits = q.double() @ keys.mT * q.shape[3] ** -0.5
    allowed = torch.ones(n, k.shape[2], dtype=torch.bool)
    if options.get("is_causal"):
        allowed = allowed.tril()
    allowed = allowed.expand_as(logits) if mask is None else allowed & mask[:, None, None]
    exact, sparse = (
        logits.masked_fill(~keep, -math.inf).softmax(3).nan_to_num() @ values
        for keep in (allowed, allowed & index.to_dense())
    )
    drops = (attend.choice.view(q, k, **options).base.tiles & ~index.tiles).any(3).repeat_interleave(BLOCK, 2)[:, :, :n]
    found = sparse.clone()
    for row in range(n):
        before = at[at <= row]
        if len(before):
            lost = (exact - sparse)[:, :, before[-1]]
            found[:, :, row] = torch.where(drops[:, :, row, None], sparse[:, :, row] + lost, sparse[:, :, row])
    return found, drops


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_what_the_exact_row_before_them_lost(dtype: torch.dtype, is_causal: bool) -> None:
    n = 203
    q, k, v, _ = make_inputs(2, 4, n, kv_heads=2, value_dim=8, dtype=dtype, score_scale=2.0)
    attend = AdaptiveAttention(Sum(Probe(2), Blend()), Density(0.2), correct=True)
    # The last tile has 11 rows, so its middles are others.
    at = torch.cat([*(torch.tensor([4, 12]) + BLOCK * tile for tile in range(12)), torch.tensor([194, 200])])
    mask = torch.rand(2, n) < 0.9
    for key_mask in (None, mask):
        found = attend(q, k, v, is_causal=is_causal, key_mask=key_mask, enable_gqa=True)
        wanted, drops = expected(q, k, v, attend, at, key_mask, is_causal=is_causal)
        assert drops.any()
        assert (~drops).any() or not is_causal
        assert (found.double() - wanted).abs().max() < (3e-6 if dtype == torch.float32 else 0.05)
        plain = AdaptiveAttention(Sum(Probe(2), Blend()), Density(0.2))(
            q, k, v, is_causal=is_causal, key_mask=key_mask, enable_gqa=True
        )
        assert torch.equal(found[~drops], plain[~drops])
        assert (found - plain).abs().max() > 0.05


def test_some_heads_keep_their_rows_but_for_the_exact_ones() -> None:
    q, k, v, _ = make_inputs(1, 2, 160, dtype=torch.float32, score_scale=2.0)
    options: dict[str, Any] = {"is_causal": True, "return_lse": True}
    plain, lse = AdaptiveAttention(Probe(2), Density(0.2))(q, k, v, **options)
    whole, _ = AdaptiveAttention(Probe(2), Density(0.2), correct=True)(q, k, v, **options)
    some, again = AdaptiveAttention(Probe(2), Density(0.2), correct=(True, False))(q, k, v, **options)
    assert torch.equal(lse, again)
    assert torch.equal(some[:, 0], whole[:, 0])
    rows = torch.zeros(160, dtype=torch.bool)
    rows[4::8] = True
    assert torch.equal(some[:, 1, rows], whole[:, 1, rows])
    assert torch.equal(some[:, 1, ~rows], plain[:, 1, ~rows])
    assert not torch.equal(whole[:, 1, ~rows], plain[:, 1, ~rows])


def test_no_row_gets_anything_from_a_later_one() -> None:
    """With a choice that does not change, a later token changes no earlier row."""
    q, k, v, _ = make_inputs(1, 2, 160, dtype=torch.float32)
    attend = AdaptiveAttention(Probe("first"), Density(0.2), correct=True)
    before = attend(q, k, v, is_causal=True)
    for place in (70, 96, 159):
        others = [x.clone() for x in (q, k, v)]
        for x in others:
            x[:, :, place] = 3 * torch.randn(x[:, :, place].shape)
        after = attend(*others, is_causal=True)
        assert torch.equal(after[:, :, :place], before[:, :, :place])
        assert not torch.equal(after[:, :, place:], before[:, :, place:])


def test_what_it_cannot_correct_is_refused() -> None:
    q, k, v, _ = make_inputs(1, 2, 160, dtype=torch.float32)
    attend = AdaptiveAttention(Probe("first"), Density(0.2), correct=True)
    with pytest.raises(ValueError, match="correct: a correction has no gradient"):
        attend(q.requires_grad_(), k, v, is_causal=True)
    q = q.detach()
    from ringtile.patterns import Causal, Window

    with pytest.raises(ValueError, match="pattern: correct=True needs all or causal pairs"):
        attend(q, k, v, Window(50) & Causal())
    with pytest.raises(ValueError, match="softcap: not supported with correct=True, got 3"):
        attend(q, k, v, is_causal=True, softcap=3.0)
    with pytest.raises(ValueError, match="correct: expected one bool for each of 2 heads"):
        AdaptiveAttention(correct=(True,))(q, k, v, is_causal=True)
    with pytest.raises(
        ValueError, match=r"correct: expected scores that compute exact rows, such as Probe\(4\), got Bl"
    ):
        AdaptiveAttention(Blend(), Density(0.2), correct=True)(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="correct: a cache needs False"):
        attend.new_cache(Causal())
