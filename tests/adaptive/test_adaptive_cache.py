"""Generation with adaptive attention is the call over all tokens, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from oracle import assert_near, refused
from torch import Tensor

from ringtile import SparseLanguageModel, SparseTransformer, sparse_attention
from ringtile.adaptive import (
    AdaptiveAttention,
    AdaptiveCache,
    Antidiagonal,
    Blend,
    Box,
    Controller,
    Density,
    Gain,
    Means,
    Probe,
    Recent,
    Rounded,
    Shuffled,
    Sum,
    Threshold,
    TopK,
    TopP,
    View,
)
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Blocks, Causal, Dense, Documents, GlobalTokens, Pattern, Window, per_head

TILE_SCORES = [Probe("first"), Recent(), Shuffled(3), Sum(Probe("first"), Recent())]
TOKEN_SCORES = [Blend(None), Box(None), Means(None), Sum(Blend(None), Means(None))]
SCORES = [*TILE_SCORES, *TOKEN_SCORES]
BUDGETS = [Density(0.4), Density((0.2, 0.5, 0.3, 0.9)), TopK(2), TopP(0.7), Threshold(0.2), Gain(0.1)]
RULES = [Causal(), Causal() & (Window(40) | GlobalTokens(10)), Causal() & per_head([Dense(), Window(60)] * 2)]
N, BLOCK = 150, 16


def inputs(seed: int = 0, *, tokens: int = N, heads: int = 4, key_heads: int = 2, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, count, tokens, 8) for count in (heads, key_heads, key_heads))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5 for shape in shapes]


def steps(cache: AdaptiveCache, x: list[Tensor], cuts: list[int], mask: Tensor | None = None) -> list[Tensor]:
    """The outputs of the calls between cuts. Checks that each call's choice is of the queries that it computes."""
    outs = []
    for first, last in zip([0, *cuts], [*cuts, x[0].shape[2]], strict=True):
        outs.append(
            cache.attend(*(t[:, :, first:last] for t in x), key_mask=None if mask is None else mask[:, first:last])
        )
        assert cache.index is not None
        assert (cache.index.start, cache.index.n_queries, cache.length) == (first, last - first, last)
    return outs


def kept(index: BlockIndex | None, like: Tensor, n_keys: int) -> Tensor:
    assert index is not None
    dense = index.to_dense().expand(*like.shape[:2], -1, -1)
    return torch.nn.functional.pad(dense, (0, n_keys - dense.shape[3]))


@settings(max_examples=25)
@given(
    scores=st.sampled_from(SCORES),
    budget=st.sampled_from(BUDGETS),
    rule=st.sampled_from(RULES),
    cuts=st.lists(st.integers(1, N - 1), min_size=1, max_size=6, unique=True).map(sorted),
    masked=st.booleans(),
    forced=st.sampled_from([(1, 1), (0, 0)]),
    seed=st.integers(0, 9),
)
@example(Probe("first"), Density(0.4), Causal(), [70], False, (0, 0), 0)
def test_chunks_of_any_length_are_the_call(
    scores: Any, budget: Any, rule: Pattern, cuts: list[int], masked: bool, forced: tuple[int, int], seed: int
) -> None:
    x = inputs(seed)
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(seed)) < 0.7 if masked else None
    attend = AdaptiveAttention(scores, budget, block=BLOCK, first=forced[0], local=forced[1])
    expected = attend(*x, rule, key_mask=mask, enable_gqa=True)
    index = attend.index(*x[:2], rule, key_mask=mask)
    cache = attend.new_cache(rule)
    rows, first = [], 0
    for last in [*cuts, N]:
        part = None if mask is None else mask[:, first:last]
        out = cache.attend(*(t[:, :, first:last] for t in x), key_mask=part)
        assert_near(out, expected[:, :, first:last], 1e-12)
        rows.append(kept(cache.index, x[0], N))
        first = last
    assert torch.equal(torch.cat(rows, 2), kept(index, x[0], N))


@pytest.mark.parametrize("scores", SCORES, ids=repr)
def test_a_window_of_padding_takes_no_key_from_a_token(scores: Any) -> None:
    x, rule = inputs(2, tokens=90), Causal() & Window(20)
    mask = torch.arange(90) >= torch.tensor([[45], [7]])
    exact = sparse_attention(*x, rule, key_mask=mask, enable_gqa=True)
    cache = AdaptiveAttention(scores, TopP(1.0), block=BLOCK, first=0, local=0).new_cache(rule)
    outs = torch.cat(steps(cache, x, [20, 60, 61, 62, 63, 64, 65], mask), 2)
    assert_near(outs, exact, 1e-12)


def test_short_contexts_are_dense() -> None:
    """A call with fewer tokens in all than `min_length` keeps all pairs, a longer one the choice, in each row."""
    x = inputs(1, tokens=100)
    for scores in (Probe("first"), Blend(None)):
        attend = AdaptiveAttention(scores, TopK(1), block=BLOCK, first=0, local=0, min_length=53)
        cache = attend.new_cache(Causal())
        for last, out in zip([10, 40, *range(41, 60), 100], steps(cache, x, [10, 40, *range(41, 60)]), strict=True):
            expected = attend(*(t[:, :, :last] for t in x), is_causal=True, enable_gqa=True)
            assert_near(out, expected[:, :, -out.shape[2] :], 1e-12)


def test_what_depends_on_other_tokens_is_refused() -> None:
    for scores in (Probe(), Blend(), Means(), Antidiagonal(), Sum(Probe("first"), Probe(2)), Rounded()):
        with refused(r"scores: a cache needs .* Probe\('first'\), Blend\(None\)"):
            AdaptiveAttention(scores).new_cache(Causal())
    with refused("budget: a cache needs a Budget, which decides about each row by itself"):
        AdaptiveAttention(Recent(), Controller(0.9)).new_cache(Causal())
    with refused("last_dense: a cache needs 0"):
        AdaptiveAttention(Recent(), last_dense=1).new_cache(Causal())
    for pattern in (Causal() & Documents([10, 20]), Causal() & Blocks(torch.ones(2, 2, dtype=torch.bool))):
        with refused("pattern: a cache of tiles needs a rule for any length"):
            AdaptiveAttention(Recent()).new_cache(pattern)
    with refused("pattern: a cache needs one that keeps no later keys"):
        AdaptiveAttention(Recent()).new_cache(Dense())


def test_a_random_order_is_the_same_at_every_length() -> None:
    query = torch.randn(1, 2, 160, 8)
    orders = [
        Shuffled(3)(View(x, x, build_index(Causal(), x.shape[2], block=BLOCK))) for x in (query, query[:, :, :100])
    ]
    short, long = (order[:, :, :6, :6].argsort(3) for order in orders)
    assert torch.equal(short, long)


# What a step reads.


@pytest.mark.parametrize("scores", [Probe("first"), Blend(None)], ids=repr)
def test_a_step_reads_the_chosen_tiles_only(scores: Any) -> None:
    x = inputs(4, tokens=200)
    attend = AdaptiveAttention(scores, TopK(3), block=BLOCK, first=0, local=0)
    caches = [attend.new_cache(Causal()) for _ in range(2)]
    for cache in caches:
        steps(cache, [t[:, :, :195] for t in x], [])
    for n in range(195, 200):
        plain, spoilt = caches
        step = [t[:, :, n : n + 1] for t in x]
        expected = plain.attend(*step)
        assert plain.index is not None
        # Each key head has the tiles of its two query heads. The step's own tile is written.
        needed = plain.index.tiles.expand(2, 4, -1, -1)[:, :, 0].unflatten(1, (2, 2)).any(2)
        needed[..., n // BLOCK] = True
        read = needed.repeat_interleave(BLOCK, 2)[..., :195]
        held = spoilt._held
        assert held is not None
        whole = held.key[:, :, :195].clone(), held.value[:, :, :195].clone()
        for buffer in (held.key, held.value):
            buffer[:, :, :195].masked_fill_(~read.unsqueeze(3), torch.nan)
        assert torch.equal(spoilt.attend(*step), expected)
        # The cache can have got larger buffers.
        held = spoilt._held
        for buffer, before in zip((held.key, held.value), whole, strict=True):
            buffer[:, :, :195] = before
        # Bytes of keys and values: at most three tiles for each of two query heads, and the own one.
        row = 2 * 8 * x[1].element_size()
        assert row * int(read.sum()) <= row * 2 * 2 * (2 * 3 + 1) * BLOCK < 0.6 * row * 2 * 2 * 195


def test_a_choice_serves_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `Probe`, 3 of 40 steps choose and build an index, and the others do neither."""
    probed, built = [], []
    restricted, call = BlockIndex.restricted, Probe.__call__
    monkeypatch.setattr(BlockIndex, "restricted", lambda *a: built.append(1) or restricted(*a))
    monkeypatch.setattr(Probe, "__call__", lambda *a, **k: probed.append(1) or call(*a, **k))
    x = inputs(5, tokens=120)
    cache = AdaptiveAttention(Probe("first"), block=BLOCK).new_cache(Causal())
    steps(cache, [t[:, :, :80] for t in x], [])
    probed.clear()
    built.clear()
    for n in range(80, 120):
        cache.attend(*(t[:, :, n : n + 1] for t in x))
    assert (len(probed), len(built)) == (3, 3)


def test_summaries_grow_by_one_tile() -> None:
    x = inputs(6, tokens=64)
    cache = AdaptiveAttention(Blend(None), block=BLOCK).new_cache(Causal())
    seen = []
    for n in range(64):
        cache.attend(*(t[:, :, n : n + 1] for t in x))
        pages = cache._pages
        assert pages is not None
        assert pages.mean.shape[2] == pages.log_count.shape[2] == (n + 1) // BLOCK + 1
        seen.append(pages)
    assert len({id(pages) for pages in seen}) == 5
    for pages in seen:
        complete = pages.mean.shape[2] - 1
        for a, b in zip(pages[:3], seen[-1][:3], strict=True):
            assert torch.equal(a[:, :, :complete], b[:, :, :complete])
    mean = x[1].float().unflatten(2, (4, BLOCK)).mean(3)
    torch.testing.assert_close(seen[-1].mean[:, :, :4], mean)


@pytest.fixture
def model() -> SparseLanguageModel:
    torch.manual_seed(0)
    attend = AdaptiveAttention(Probe("first"), Density(0.3), block=BLOCK, first=0, local=0)
    transformer = SparseTransformer(2, 32, 4, num_kv_heads=2, is_causal=True, attend=attend, dtype=torch.float64)
    model = SparseLanguageModel(64, transformer).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
    return model


def test_a_language_model_generates_as_without_a_cache(model: SparseLanguageModel) -> None:
    tokens = torch.randint(64, (2, 45), generator=torch.Generator().manual_seed(0))
    found, expected = model.generate(tokens, 30), tokens
    with torch.no_grad():
        for _ in range(30):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, expected)
    mask = torch.ones(2, 45, dtype=torch.bool)
    mask[1, :20] = False
    padded = model.generate(tokens, 30, key_mask=mask)
    assert not torch.equal(padded[1], found[1])
    assert torch.equal(padded[0], found[0])
