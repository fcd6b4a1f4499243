"""The cache of keys and values: what it computes, what it holds, and what it refuses."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from oracle import make_inputs, oracle, relative_error
from strategies import compositions, primitives
from torch import Tensor

from ringtile.functional import merge_attention, sparse_attention
from ringtile.functional.cache import LayerCache
from ringtile.index import cache_info
from ringtile.modules.language_model import SparseLanguageModel
from ringtile.modules.longnet import longnet_attend
from ringtile.modules.transformer import KVCache, SparseTransformer
from ringtile.patterns import (
    BlockDilated,
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
    TileGrid,
    Window,
    per_head,
    streaming,
)
from ringtile.patterns.facts import Reach, pattern_reach

GLOBAL = Causal() & (Window(20) | GlobalTokens(5))
ROLLING: dict[str, Pattern] = {
    "window": Causal() & Window(13),
    "streaming": streaming(sinks=4, window=16),
    "window or global": GLOBAL,
    "no sinks": Window(7, 0),
    "global alone": Causal() & GlobalTokens(6),
    "dilated": Causal() & Dilated([1, 3], 8),
    "block dilated": Causal() & BlockDilated([1, 2], 1, block=8),
    "segments": Causal() & Segments(24, 3),
    "per head": Causal() & per_head([Window(5) | GlobalTokens(2), Window(30), Dilated([4], 4), GlobalTokens(9)]),
}
GROWING: dict[str, Pattern] = {
    "causal": Causal(),
    "strided": Causal() & Strided(9),
    "far": Causal() & ~Window(10),
    "random": Causal() & (Window(4) | RandomBlocks(1, block=16)),
    "rule": Causal() & Elements(lambda head, query, key: (query + key + head) % 3 == 0),
}
ALL = ROLLING | GROWING


def chunks_of(total: int, *sizes: int) -> list[int]:
    """The sizes over and over until they sum to the total."""
    chunks: list[int] = []
    while sum(chunks) < total:
        chunks.append(min(sizes[len(chunks) % len(sizes)], total - sum(chunks)))
    return chunks


def attended(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, chunks: list[int], **masks: Tensor) -> Tensor:
    parts = zip(*(x.split(chunks, 2) for x in (q, k, v)), strict=True)
    masked = [{name: mask.split(chunks, 1)[n] for name, mask in masks.items()} for n in range(len(chunks))]
    return torch.cat([cache.attend(*part, **mask) for part, mask in zip(parts, masked, strict=True)], 2)


# How far a pattern reaches


@pytest.mark.parametrize(
    ("pattern", "reach"),
    [
        (Causal() & Window(13), Reach(0, 13, ahead=False)),
        (streaming(4, 16), Reach(4, 16, ahead=False)),
        (Window(7, 0), Reach(0, 7, ahead=False)),
        (Window(3), Reach(0, 3, ahead=True)),
        (Causal() & GlobalTokens(6), Reach(6, 0, ahead=False)),
        (Causal() & Dilated([1, 3], 8), Reach(0, 24, ahead=False)),
        (Causal() & BlockDilated([1, 2], 1, block=8), Reach(0, 23, ahead=False)),
        (BlockDilated([2], 0, block=8), Reach(0, 7, ahead=True)),
        (Causal() & Segments(24, 3), Reach(0, 23, ahead=False)),
        (Causal() & Window(9) & (Window(4) | GlobalTokens(100)), Reach(0, 9, ahead=False)),
        (Causal() & per_head([GlobalTokens(9), Window(30)]), Reach(9, 30, ahead=False)),
        (Causal() & Strided(4), Reach(0, math.inf, ahead=False)),
        (Causal() & RandomBlocks(2), Reach(0, math.inf, ahead=False)),
        (Causal() & ~Window(4), Reach(0, math.inf, ahead=False)),
        (Causal() & Documents([5, 5]), Reach(0, math.inf, ahead=False)),
        (Causal() & Window(50) & Strided(4), Reach(0, 50, ahead=False)),
        (Causal() | Window(4), Reach(0, math.inf, ahead=True)),
        (Dense(), Reach(0, math.inf, ahead=True)),
    ],
)
def test_the_reach_of_known_patterns(pattern: Pattern, reach: Reach) -> None:
    assert pattern_reach(pattern) == reach
    if not reach.ahead:
        cache = LayerCache(pattern)
        assert cache.bounded == math.isfinite(reach.left)
        assert cache.capacity == (reach.first + reach.left + 1 if cache.bounded else None)


@settings(max_examples=30)
@given(st.data())
def test_no_pattern_keeps_what_is_out_of_its_reach(data: st.DataObject) -> None:
    grid = TileGrid(16, 0, 150, 150)
    pattern = data.draw(compositions(primitives(grid), data.draw(st.integers(0, 4))))
    reach = pattern_reach(pattern)
    query, key = torch.arange(150)[:, None], torch.arange(150)
    for head in range(2):
        kept = pattern.allowed(torch.tensor(head), query, key)
        within = (key < reach.first) | (query - key <= reach.left)
        assert not bool((kept & (key <= query) & ~within).any())
        assert reach.ahead or not bool((kept & (key > query)).any())


# What it computes


@pytest.mark.parametrize("sizes", [(3, 1, 50, 1, 1, 7), (150, 1, 200, 9)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_any_chunks_equal_one_call(name: str, sizes: tuple[int, ...]) -> None:
    q, k, v, _ = make_inputs(2, 4, 420, kv_heads=2, value_dim=8)
    cache = LayerCache(ALL[name])
    out = attended(cache, q, k, v, chunks_of(420, *sizes))
    assert relative_error(out, oracle(q, k, v, ALL[name]).out) < 1e-14
    assert cache.length == 420


@pytest.mark.parametrize("name", ["streaming", "per head", "strided"])
def test_masked_keys_stay_masked(name: str) -> None:
    q, k, v, _ = make_inputs(3, 4, 300)
    key_mask = torch.rand(3, 300) < 0.7
    key_mask[1, :40] = False
    chunks = chunks_of(300, 1, 5, 140, 1, 1)
    expected = oracle(q, k, v, ALL[name], key_mask=key_mask)
    k, v = (x.masked_fill(~key_mask[:, None, :, None], math.nan) for x in (k, v))
    out = attended(LayerCache(ALL[name]), q, k, v, chunks, key_mask=key_mask)
    assert relative_error(out, expected.out) < 1e-14
    assert bool((expected.lse == -math.inf).any())


def test_a_query_without_keys_gives_zero_whatever_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **_: Any) -> Tensor:
        return (q @ k.mT).masked_fill(~attn_mask, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", plain)
    q, k, v, _ = make_inputs(2, 2, 9)
    out = LayerCache(GLOBAL).attend(q, k, v, key_mask=torch.arange(9) >= torch.tensor([[0], [4]]))
    assert bool((out[1, :, :4] == 0).all())
    assert bool(out.isfinite().all())


def test_a_mask_may_come_late_or_once() -> None:
    q, k, v, _ = make_inputs(2, 2, 80)
    for first, last in ((0, 30), (30, 60)):
        key_mask = torch.ones(2, 80, dtype=torch.bool)
        key_mask[:, first:last] = torch.rand(2, last - first) < 0.5
        cache = LayerCache(GLOBAL)
        parts = zip(*(x.split([30, 30, 20], 2) for x in (q, k, v)), key_mask.split([30, 30, 20], 1), strict=True)
        out = [cache.attend(*part, key_mask=None if bool(mask.all()) else mask) for *part, mask in parts]
        assert relative_error(torch.cat(out, 2), oracle(q, k, v, GLOBAL, key_mask=key_mask).out) < 1e-14


def test_what_was_dropped_or_is_not_kept_changes_nothing() -> None:
    q, k, v, _ = make_inputs(1, 2, 90)
    near, far = Causal() & (Window(10) | GlobalTokens(2)) & ~Window(3), Causal() & ~Window(3)
    for rule, unread, chunks in ((near, slice(20, 30), [7] * 8 + [1] * 34), (far, slice(89, 90), [89, 1])):
        dirty = [x.clone() for x in (k, v)]
        for x in dirty:
            x[:, :, unread] = math.nan
        out, clean = (attended(LayerCache(rule), q, *pair, chunks) for pair in (dirty, (k, v)))
        assert torch.equal(out[:, :, 60:], clean[:, :, 60:])


# What it holds


@pytest.mark.parametrize("name", ROLLING)
def test_memory_stays_at_the_bound_of_the_pattern(name: str) -> None:
    rule = ROLLING[name]
    reach, cache = pattern_reach(rule), LayerCache(rule)
    q, k, v, _ = make_inputs(2, 4, 300, kv_heads=2, head_dim=8, value_dim=4)
    bound = reach.first + int(reach.left) + 1
    for chunk in chunks_of(300, 1, 1, 17, 1, 3):
        start = cache.length
        cache.attend(*(x[:, :, start : start + chunk] for x in (q, k, v)))
        assert cache.held == min(cache.length, bound)
        assert cache.nbytes <= bound * (2 * 2 * 12 * 8 + 8 + 2)
        held = cache._held
        assert held is not None
        positions = held.position[: cache.held]
        recent = range(max(0, cache.length - 1 - int(reach.left)), cache.length)
        assert {*range(min(reach.first, cache.length)), *recent} <= set(positions.tolist())
        assert len(positions) == len(positions.unique())
        assert torch.equal(held.key[:, :, : cache.held], k[:, :, positions])


def test_an_unbounded_cache_holds_all_and_little_more() -> None:
    cache = LayerCache(Causal() & Strided(5))
    assert not cache.bounded
    assert cache.capacity is None
    assert cache.nbytes == 0
    long = LayerCache(streaming(4, 2**30))
    long.attend(*torch.randn(3, 1, 1, 10, 4).unbind())
    assert long.nbytes == 10 * (2 * 4 * 4 + 8 + 1)
    x = torch.randn(1, 1, 300, 4)
    for position in range(300):
        cache.attend(*[x[:, :, position : position + 1]] * 3)
        assert cache.held == position + 1
        assert cache.nbytes <= 2 * (position + 1) * (2 * 4 * 4 + 8 + 1)


@pytest.mark.parametrize("name", ["streaming", "causal"])
def test_a_step_builds_no_index_and_sees_the_kept_keys_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = make_inputs(1, 2, 400)
    cache = LayerCache(ALL[name])
    cache.attend(q[:, :, :300], k[:, :, :300], v[:, :, :300])
    seen = []
    attend = F.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append(key.shape[2])
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    before = cache_info()
    for position in range(300, 400):
        cache.attend(*(x[:, :, position : position + 1] for x in (q, k, v)))
    assert cache_info() == before
    assert seen == ([21] * 100 if name == "streaming" else list(range(301, 401)))


def test_keys_that_a_step_does_not_keep_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = make_inputs(1, 2, 200)
    cache = LayerCache(Causal() & Strided(20))
    cache.attend(q[:, :, :199], k[:, :, :199], v[:, :, :199])
    seen = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: seen.append(k.shape[2]) or q)
    cache.attend(q[:, :, 199:], k[:, :, 199:], v[:, :, 199:])
    assert seen == [20 + 199 // 20]


def test_a_long_prompt_goes_through_the_index() -> None:
    q, k, v, _ = make_inputs(1, 2, 2000, head_dim=4)
    cache = LayerCache(streaming(2, 31))
    before = cache_info().misses
    cache.attend(q, k, v)
    assert cache_info().misses == before + 1
    assert cache.nbytes == 34 * (2 * 2 * 4 * 8 + 8 + 1)


def test_a_copy_is_a_fork() -> None:
    q, k, v, _ = make_inputs(1, 2, 60)
    cache = LayerCache(GLOBAL)
    cache.attend(q[:, :, :50], k[:, :, :50], v[:, :, :50])
    fork = copy.deepcopy(cache)
    fork.attend(*torch.randn(3, 1, 2, 30, 16, dtype=torch.float64).unbind())
    out = cache.attend(q[:, :, 50:], k[:, :, 50:], v[:, :, 50:])
    assert relative_error(out, oracle(q, k, v, GLOBAL).out[:, :, 50:]) < 1e-14


def test_inference_mode_may_end_between_two_calls() -> None:
    q, k, v, _ = make_inputs(1, 2, 60)
    cache = LayerCache(GLOBAL)
    with torch.inference_mode():
        first = cache.attend(q[:, :, :50], k[:, :, :50], v[:, :, :50])
    rest = [cache.attend(*(x[:, :, n : n + 1] for x in (q, k, v))) for n in range(50, 60)]
    assert relative_error(torch.cat([first, *rest], 2), oracle(q, k, v, GLOBAL).out) < 1e-14


# Generation


def model_of(pattern: Pattern | list[Pattern] | None, **options: Any) -> SparseLanguageModel:
    """A model that does not repeat one token, as one with a head of zeros does."""
    options = {"is_causal": True, "num_kv_heads": 2, "qk_norm": True, "dtype": torch.float64} | options
    model = SparseLanguageModel(61, SparseTransformer(2, 32, 4, pattern=pattern, **options)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.dim() == 2 else 1.0)
    with torch.no_grad():
        model.head.weight.sub_(0.5 * model.embedding.weight)
    return model


@pytest.mark.parametrize(
    "pattern",
    [[Window(9) | GlobalTokens(5), Window(30)], [Window(16), Strided(7)]],
    ids=repr,
)
def test_two_hundred_tokens_equal_full_recomputation(pattern: Pattern | list[Pattern]) -> None:
    model = model_of(pattern)
    prompt = torch.randint(61, (2, 37))
    tokens = model.generate(prompt, 200)
    assert tokens.shape == (2, 237)
    assert torch.equal(tokens[:, :37], prompt)
    assert len(tokens[0, 37:].unique()) > 4
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, 36:-1].argmax(-1), tokens[:, 37:])


@pytest.mark.parametrize("overlap", ["mix", "union"])
@pytest.mark.parametrize("pattern", [None, Window(3) | GlobalTokens(2)], ids=["", "inside"])
def test_longnet_generates_what_full_recomputation_gives(pattern: Pattern | None, overlap: Any) -> None:
    model = model_of(pattern, attend=longnet_attend([16, 64, 150], [1, 2, 5], overlap))
    cache = model.transformer.new_cache()
    assert [layer.capacity for layer in cache.layers] == [150, 150]
    tokens = model.generate(torch.randint(61, (2, 31)), 30)
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, 30:-1].argmax(-1), tokens[:, 31:])
        # One by one, few at once, and more than are computed by one mask: before and after keys were dropped.
        tokens = torch.randint(61, (2, 600))
        sizes = [20, 1, 1, 130, 30, 1, 140, *[1] * 20, 3, 254]
        assert sum(sizes) == 600
        steps = [model(chunk, cache=cache) for chunk in tokens.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=0, atol=1e-10)
    assert cache.bounded


def test_a_long_prompt_of_longnet_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = longnet_attend([64, 128], [1, 2])
    model = model_of(None, attend=attend)
    calls = []
    monkeypatch.setattr(type(attend), "__call__", lambda self, q, k, v, **how: calls.append(how) or torch.zeros_like(q))
    with torch.no_grad():
        model(torch.randint(61, (1, 300)), key_mask=torch.ones(1, 300).bool(), cache=model.transformer.new_cache())
    assert len(calls) == 2
    assert all(call["is_causal"] and call["enable_gqa"] and call["key_mask"].all() for call in calls)


def test_a_key_counts_once_for_each_pattern() -> None:
    q, k, v = torch.randn(3, 2, 3, 40, 8, dtype=torch.float64).unbind()
    patterns = (Causal(), Window(5, 0), Causal() & GlobalTokens(2), Causal() & Segments(8, 2))
    parts = [sparse_attention(q, k, v, pattern, return_lse=True) for pattern in patterns]
    expected, _ = merge_attention(*zip(*parts, strict=True))
    for sizes in ([40], [1] * 40, [7, 30, 3]):
        cache = LayerCache(*patterns)
        found = [cache.attend(*part) for part in zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)]
        torch.testing.assert_close(torch.cat(found, 2), expected, rtol=0, atol=1e-12)


def test_prompts_padded_on_the_left_are_generated_together() -> None:
    model = model_of(Window(20))
    prompts = [torch.randint(61, (1, n)) for n in (30, 18)]
    padded = torch.stack([F.pad(prompt[0], (30 - prompt.shape[1], 0)) for prompt in prompts])
    key_mask = torch.arange(30) >= torch.tensor([[0], [12]])
    together = model.generate(padded, 40, key_mask=key_mask)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[-40:], model.generate(prompt, 40)[0, -40:])


def test_drawn_tokens_follow_the_logits() -> None:
    model = model_of(Window(20))
    prompt = torch.randint(61, (1, 12)).expand(1500, -1)
    drawn = model.generate(prompt, 1, temperature=2.0, generator=torch.Generator().manual_seed(1))[:, -1]
    with torch.no_grad():
        expected = (model(prompt[:1])[0, -1] / 2.0).softmax(-1)
    assert float((torch.bincount(drawn, minlength=61) / 1500 - expected).abs().max()) < 0.05
    again = model.generate(prompt, 1, temperature=2.0, generator=torch.Generator().manual_seed(1))[:, -1]
    assert torch.equal(drawn, again)
    assert len(drawn.unique()) > 3


# What is refused


def test_patterns_that_do_not_fit() -> None:
    for pattern in (Window(4), Dense()):
        with pytest.raises(ValueError, match=f"pattern: .*no later keys.*{re.escape(repr(pattern))}"):
            LayerCache(pattern)
    with pytest.raises(ValueError, match=r"pattern: .*all batch rows"):
        LayerCache(Causal() & Documents(ids=torch.zeros(2, 9, dtype=torch.int64)))
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="documents of 10 tokens"):
        LayerCache(Causal() & Documents([5, 5])).attend(x, x, x)
    with pytest.raises(ValueError, match=r"query: .*4 heads"):
        LayerCache(ROLLING["per head"]).attend(x, x, x)
    assert not model_of([Window(9), Strided(3)]).transformer.new_cache().bounded


def _changed(change: Callable[[Tensor], Tensor], which: int) -> tuple[Tensor, ...]:
    tensors = list(torch.randn(3, 2, 4, 1, 8).unbind())
    tensors[which] = change(tensors[which])
    return tuple(tensors)


@pytest.mark.parametrize(
    ("tensors", "options", "complaint"),
    [
        (_changed(lambda x: x[0], 0), {}, r"query: expected \[B, H, N, D\]"),
        (_changed(lambda x: x.expand(-1, -1, 2, -1), 1), {}, r"key: expected \[B, H, N, D\]"),
        (_changed(lambda x: x[:, :, :0], 0), {}, r"query: .*at least one token"),
        (_changed(lambda x: x[:, :3], 1), {}, r"key, value: .*divide"),
        (_changed(lambda x: x[:, :2], 2), {}, r"key, value: .*divide"),
        (_changed(lambda x: x[..., :4], 1), {}, r"key, value: .*head_dim"),
        (_changed(lambda x: x[..., :4], 2), {}, r"value: expected .* as before"),
        (_changed(lambda x: x.double(), 1), {}, r"key: expected .* as before.*float64"),
        (_changed(lambda x: x.requires_grad_(), 1), {}, r"key: expected torch\.no_grad"),
        (_changed(lambda x: x, 0), {"key_mask": torch.ones(2, 3, dtype=torch.bool)}, r"key_mask: .*\[2, 3\]"),
        (_changed(lambda x: x, 0), {"key_mask": torch.ones(2, 1)}, r"key_mask: .*float32"),
    ],
)
def test_tensors_that_do_not_fit(tensors: tuple[Tensor, ...], options: dict[str, Tensor], complaint: str) -> None:
    cache = LayerCache(GLOBAL)
    cache.attend(*torch.randn(3, 2, 4, 3, 8).unbind())
    with pytest.raises(ValueError, match=complaint):
        cache.attend(*tensors, **options)
    assert cache.length == 3


def test_caches_of_other_models() -> None:
    model = model_of(Window(20))
    tokens = torch.randint(61, (1, 4))
    with torch.no_grad():
        with pytest.raises(ValueError, match="cache: expected one of the pattern"):
            model(tokens, cache=model_of(Window(21)).transformer.new_cache())
        with pytest.raises(ValueError, match="cache: expected 2 layers, got 1"):
            model(tokens, cache=KVCache([LayerCache(Causal() & Window(20))]))
        cache = model.transformer.new_cache()
        cache.layers[0].attend(*torch.randn(3, 1, 4, 2, 8).unbind())
        with pytest.raises(ValueError, match=r"cache: .*same tokens, got \[2, 0\]"):
            model(tokens, cache=cache)
    with pytest.raises(ValueError, match="layers: expected at least one"):
        KVCache([])
    with pytest.raises(ValueError, match="no_grad"):
        model(tokens, cache=model.transformer.new_cache())


def test_layers_without_a_cache() -> None:
    with pytest.raises(ValueError, match=r"pattern: .*no later keys"):
        SparseTransformer(1, 16, 2, pattern=Window(3)).new_cache()
    longnet = {"is_causal": True, "attend": longnet_attend([8, 16], [1, 2])}
    mixed, plain = (SparseTransformer(1, 16, 2, **options) for options in (longnet, {"is_causal": True}))
    with torch.no_grad(), pytest.raises(ValueError, match=r"cache: expected one of the pattern"):
        mixed(torch.zeros(1, 3, 16), cache=plain.new_cache())
    with pytest.raises(ValueError, match=r"pattern: .*no later keys"):
        SparseTransformer(1, 16, 2, attend=longnet["attend"]).new_cache()
    with pytest.raises(ValueError, match=r"attend: .*sparse_attention"):
        SparseTransformer(1, 16, 2, is_causal=True, attend=lambda query, *_, **__: query).new_cache()
    model = model_of(Window(20), dropout=0.1).train()
    with torch.no_grad(), pytest.raises(ValueError, match=r"cache: .*eval mode"):
        model(torch.randint(61, (1, 4)), cache=model.transformer.new_cache())


@pytest.mark.parametrize(
    ("shape", "n_new", "complaint"),
    [((1, 0), 3, "tokens: .*at least one"), ((4,), 3, "tokens: "), ((1, 4), -1, "n_new: .*-1")],
)
def test_generation_refuses(shape: tuple[int, ...], n_new: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        model_of(Window(20)).generate(torch.zeros(shape, dtype=torch.int64), n_new)


def test_generation_refuses_training_and_strange_temperatures() -> None:
    model, prompt = model_of(Window(20)), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"temperature: .*-1"):
        model.generate(prompt, 3, temperature=-1.0)
    with pytest.raises(ValueError, match="eval mode"):
        model.train().generate(prompt, 3)
    with pytest.raises(ValueError, match=r"transformer: .*causal"):
        SparseLanguageModel(5, SparseTransformer(1, 16, 2))
    with pytest.raises(ValueError, match=r"vocab_size: .*0"):
        SparseLanguageModel(0, SparseTransformer(1, 16, 2, is_causal=True))
