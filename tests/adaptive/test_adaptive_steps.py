"""A step of generation over the tiles that a call over all tokens would choose, from boxes that grow with the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from oracle import assert_near, refused
from torch import Tensor

from ringtile.adaptive import (
    AdaptiveAttention,
    Blend,
    Box,
    Choice,
    Controller,
    Density,
    Gain,
    Means,
    Probe,
    Recent,
    Sum,
    Threshold,
    TopK,
    TopP,
    steps,
)
from ringtile.adaptive.steps import Pages, attend_step, check_steps, kept_tiles
from ringtile.kernels import select
from ringtile.kernels.native.library import reason_against
from ringtile.patterns import Causal
from ringtile.testing.oracle import attention

BLOCK, N = 16, 150
SCORES = [Blend(None), Box(None), Means(None), Sum(Blend(None), Sum(Means(None), Box(None)), weights=(3, 1))]
BUDGETS = [Density(0.3), Density((0.2, 0.5, 0.3, 0.9)), TopK(2), TopP(0.7), Threshold(0.15), Gain(0.1), Density(0.0)]
CHOICE = Choice(Blend(None), Density(0.3), first=0, local=0)


def inputs(seed: int = 0, n: int = N, dtype: torch.dtype = torch.float64, dims: int = 8) -> list[Tensor]:
    """Query, key and value of all tokens, 4 heads over 2 key heads, and values of another width."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 4, n, dims), (2, 2, n, dims), (2, 2, n, 2 * dims)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5).to(dtype) for shape in shapes]


def drawn_mask(seed: int, n: int = N) -> Tensor:
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[1, :37] = False
    return mask


def oracle(x: list[Tensor], keep: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Dense masked softmax in float64 of the last query over kept tiles ``[B, H, 1, C]``."""
    query, key, value = x
    kept = keep.repeat_interleave(BLOCK, 3)[..., : key.shape[2]]
    kept = kept if mask is None else kept & mask[:, None, None]
    return attention(query[:, :, -1:], key, value, kept, scale=scale)[0]


@settings(max_examples=40)
@given(
    scores=st.sampled_from(SCORES),
    budget=st.sampled_from(BUDGETS),
    length=st.integers(1, N),
    masked=st.booleans(),
    forced=st.sampled_from([(1, 1), (0, 0), (2, 3)]),
    scale=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 9),
)
@example(Blend(None), Density(0.3), N, True, (0, 0), None, 0)
@example(Blend(None), Density(0.3), 144, False, (0, 0), 0.5, 1)
@example(Blend(None), Density(0.3), 16, False, (0, 0), None, 1)
@example(Blend(None), Density(0.3), 17, True, (0, 0), None, 1)
def test_a_step_is_the_last_row_of_a_call(
    scores: Any, budget: Any, length: int, masked: bool, forced: tuple[int, int], scale: float | None, seed: int
) -> None:
    choice = Choice(scores, budget, first=forced[0], local=forced[1])
    x = [t[:, :, :length] for t in inputs(seed)]
    mask = drawn_mask(seed)[:, :length] if masked else None
    index = choice.index(choice.view(x[0], x[1], Causal(), key_mask=mask, scale=scale))
    expected = index.to_dense().expand(2, 4, -1, -1)[:, :, -1:]
    keep = kept_tiles(choice, Pages(choice), x[0][:, :, -1:], x[1], mask, scale)
    assert torch.equal(keep.repeat_interleave(BLOCK, 3)[..., :length], expected)
    out = attend_step(choice, Pages(choice), x[0][:, :, -1:], *x[1:], key_mask=mask, scale=scale)
    attend = AdaptiveAttention(scores, budget, first=forced[0], local=forced[1])
    whole = attend(*x, is_causal=True, key_mask=mask, scale=scale, enable_gqa=True)
    assert_near(out, whole[:, :, -1:], 1e-12)
    assert_near(out, oracle(x, keep, mask, scale or 8**-0.5), 1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_pages_that_grow_are_those_of_all_keys(masked: bool) -> None:
    """By steps, by chunks, and with rooms that are filled and left."""
    choice = Choice(Sum(Blend(None), Box(None)), Density(0.3), first=0, local=0)
    x, mask, pages, few = inputs(3, 1500), drawn_mask(3, 1500), Pages(choice), 0
    for length in (5, *range(15, 35), 47, 48, 49, 300, 1103, *range(1400, 1500, 7)):
        q, k, v = (t[:, :, :length] for t in x)
        shown = mask[:, :length] if masked else None
        out = attend_step(choice, pages, q[:, :, -1:], k, v, key_mask=shown)
        assert torch.equal(out, attend_step(choice, Pages(choice), q[:, :, -1:], k, v, key_mask=shown))
        few += int(not kept_tiles(choice, pages, q[:, :, -1:], k, shown, None).all())
    assert few > 30


@pytest.mark.parametrize("path", ["native", "index"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_over_chosen_tiles_alone(dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "index":
        monkeypatch.setattr(steps, "native_step", lambda *arguments: None)
    elif reason_against():
        pytest.skip("needs the native library")
    # Heads of 64 are read in place, and heads of 10 are not whole vectors.
    for dims in (64, 10):
        x, mask, pages = inputs(5, dtype=dtype, dims=dims), drawn_mask(5), Pages(CHOICE)
        q, k, v = x[0][:, :, -1:], x[1], x[2]
        keep = kept_tiles(CHOICE, pages, q, k, mask, None)
        shared = keep.unflatten(1, (2, 2)).any(2).squeeze(2).repeat_interleave(BLOCK, 2)[..., :N].unsqueeze(3)
        unread = ~(shared & mask[:, None, :, None])
        assert unread.float().mean() > 0.4
        k, v = (t.masked_fill(unread, torch.nan) for t in (k, v))
        out = attend_step(CHOICE, pages, q, k, v, key_mask=mask)
        bound = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
        expected = oracle([x[0], k, v], keep, mask, dims**-0.5)
        assert out.dtype == dtype
        assert out.shape == (2, 4, 1, 2 * dims)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)


def test_the_native_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, on a CPU, and only then."""
    if reason_against():
        pytest.skip("needs the native library")
    ran: list[Any] = []
    step = select.step
    monkeypatch.setattr(select, "step", lambda *a: ran.append(1) or step(*a))
    x = [t.requires_grad_() for t in inputs(6, dtype=torch.float32, dims=16)]
    last = [x[0][:, :, -1:], *x[1:]]
    with torch.no_grad():
        expected = attend_step(CHOICE, Pages(CHOICE), *last)
    assert len(ran) == 1
    found = attend_step(CHOICE, Pages(CHOICE), *last)
    assert len(ran) == 1
    torch.testing.assert_close(found, expected)
    keep = kept_tiles(CHOICE, Pages(CHOICE), last[0], x[1], None, None)
    with refused(r"keep: expected bool \[2, 4, 1, 10\] for one query, got torch.bool \(2, 4"):
        select.native_step(*(t.detach() for t in last), keep[..., 1:], BLOCK, None, None)
    with refused(r"keep: expected .* for one query"):
        select.native_step(x[0].detach()[:, :, -2:], *(t.detach() for t in x[1:]), keep, BLOCK, None, None)


def test_gradients_are_those_of_the_kept_pairs() -> None:
    x = inputs(7)
    keep = kept_tiles(CHOICE, Pages(CHOICE), x[0][:, :, -1:], x[1], None, None)
    leaves = [t.requires_grad_() for t in x]
    found = attend_step(CHOICE, Pages(CHOICE), x[0][:, :, -1:], *x[1:]), oracle(x, keep, None, 8**-0.5)
    for ours, theirs in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in found), strict=True):
        assert_near(ours, theirs, 1e-10)


def test_a_nan_in_a_tile_hides_it_as_in_a_call() -> None:
    q, k, _ = inputs(8)
    k[0, 1, 70, 3] = torch.nan
    index = CHOICE.index(CHOICE.view(q, k, Causal()))
    keep = kept_tiles(CHOICE, Pages(CHOICE), q[:, :, -1:], k, None, None)
    assert torch.equal(keep.repeat_interleave(BLOCK, 3)[..., :N], index.to_dense()[:, :, -1:])
    assert not keep[0, 2:, 0, 70 // BLOCK].any()
    assert keep[1].any()


def test_no_later_token_and_no_tile_beyond_it() -> None:
    """Pages that know more keys, as after a crop that nobody reported, give the step of fewer keys the same tiles."""
    q, k, v = inputs(9)
    pages = Pages(CHOICE)
    attend_step(CHOICE, pages, q[:, :, -1:], k, v)
    for length in (100, 96, 97, 16, 3):
        part = q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length]
        assert torch.equal(attend_step(CHOICE, pages, *part), attend_step(CHOICE, Pages(CHOICE), *part))


def test_short_contexts_are_dense() -> None:
    x = inputs(10)
    for length, dense in ((99, True), (100, False)):
        choice = Choice(Blend(None), TopK(1), first=0, local=0, min_length=100)
        part = [t[:, :, :length] for t in x]
        keep = kept_tiles(choice, Pages(choice), part[0][:, :, -1:], part[1], None, None)
        assert bool(keep.all()) is dense


def test_a_mask_that_changes_is_refused() -> None:
    q, k, v = inputs(11)
    mask = drawn_mask(11)

    def step(pages: Pages, length: int, mask: Tensor | None) -> None:
        key_mask = None if mask is None else mask[:, :length]
        attend_step(CHOICE, pages, q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length], key_mask=key_mask)

    for first, then in ((mask, ~mask), (None, mask), (mask, None)):
        pages = Pages(CHOICE)
        step(pages, 100, first)
        with pytest.raises(RuntimeError, match="attention_mask: expected the padding that earlier steps had"):
            step(pages, 101, then)
    # Of tokens that are in no box yet, the mask is still open.
    pages = Pages(CHOICE)
    step(pages, 100, mask)
    step(pages, 101, torch.cat((mask[:, :96], ~mask[:, 96:101]), 1))


def test_choices_that_cannot_decide_about_a_step() -> None:
    for scores in (Probe("first"), Recent(), Sum(Probe("first"), Recent())):
        with refused("scores: steps need those of each query by summaries of tiles"):
            check_steps(Choice(scores))
    with refused("scores: a cache needs scores without later tokens"):
        check_steps(Choice())
    with refused("budget: a cache needs a Budget"):
        check_steps(Choice(Blend(None), Controller(0.9)))
    with refused("last_dense: a cache needs 0"):
        check_steps(Choice(Blend(None), last_dense=1))
    for scores in SCORES:
        check_steps(Choice(scores))
