"""Attention of yours inside models of Hugging Face transformers: the pairs it gets, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from families import sharp
from oracle import refused
from tiny import ENCODER, config_of, hf
from torch import Tensor, nn

from ringtile import sparse_attention
from ringtile.adaptive import AdaptiveAttention, Density
from ringtile.index import build_index
from ringtile.integrations.transformers import register, use_ringtile
from ringtile.patterns import Causal, Dense, Documents, GlobalTokens, Window
from ringtile.patterns.facts import sees_no_future
from ringtile.testing.oracle import attention, kept_pairs

TOKENS = 150
BLOCK = 16


made = partial(sharp, sliding_window=40)


def tokens(batch: int = 2, n_tokens: int = TOKENS) -> Tensor:
    return torch.randint(2, 97, (batch, n_tokens), generator=torch.Generator().manual_seed(2))


def padding(side: str, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, slice(0, 37) if side == "left" else slice(-37, None)] = 0
    return mask


@torch.no_grad()
def hidden(model: Any, ids: Tensor, **options: Any) -> Tensor:
    found: Tensor = model(ids, output_hidden_states=True, **options).hidden_states[-1]
    return found


class Random(nn.Module):
    """Keeps a random half of the tiles of its pairs, and remembers what it was given and what it kept."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed, self.calls = seed, []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        rule = Dense() if options["pattern"] is None else options["pattern"]
        rule = Causal() & rule if options["is_causal"] else rule
        (batch, heads, n_queries), n_keys = query.shape[:3], key.shape[2]
        index = build_index(rule, n_queries, n_keys, num_heads=heads, batch=batch, block=BLOCK)
        drawn = torch.Generator().manual_seed(self.seed)
        keep = torch.rand(batch, heads, index.n_rows, index.n_cols, generator=drawn) < 0.5
        keep |= torch.eye(index.n_rows, index.n_cols, dtype=torch.bool)
        index = index.restricted(keep)
        self.calls.append((options, index.to_dense().expand(batch, heads, -1, -1)))
        given = {name: value for name, value in options.items() if name not in ("pattern", "is_causal")}
        out: Tensor = sparse_attention(query, key, value, index, **given)
        return out


def eager_over(monkeypatch: pytest.MonkeyPatch, kept: list[Tensor]) -> None:
    """Make eager attention keep only these pairs, one matrix of all heads per layer."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def dense(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        rule = kept[module.layer_idx] if mask is None else kept[module.layer_idx] & (mask == 0)
        out, _ = attention(query, key, value, rule, scale=options["scaling"])
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("oracle", dense)
    AttentionMaskInterface.register("oracle", eager_mask)


@pytest.mark.parametrize(
    ("name", "side"),
    [("Llama", "none"), *((name, side) for name in ("Mistral", "Gemma3", "BERT") for side in ("left", "right"))],
)
def test_tiles_inside_the_models_own_mask(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(name), tokens()
    mask = torch.ones_like(ids) if side == "none" else padding(side, ids)
    each = [Random(0), Random(1)]
    found = hidden(use_ringtile(model, attend=each), ids, attention_mask=mask)
    assert all(len(attend.calls) == 1 for attend in each)
    assert (each[0].calls[0][0]["key_mask"] is None) == (side == "none")
    eager_over(monkeypatch, [attend.calls[0][1] for attend in each])
    model.set_attn_implementation("oracle")
    expected = hidden(model, ids, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=2e-4, rtol=2e-4)
    model.set_attn_implementation("eager")
    assert (hidden(model, ids, attention_mask=mask) - expected)[real].abs().max() > 0.01


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "BERT"])
def test_sparse_attention_as_attend_changes_no_bit(name: str) -> None:
    ids = tokens()
    mask = padding("left", ids)
    expected = hidden(use_ringtile(made(name)), ids, attention_mask=mask)
    assert torch.equal(hidden(use_ringtile(made(name), attend=sparse_attention), ids, attention_mask=mask), expected)


@pytest.mark.parametrize("name", ["Gemma3", "BERT"])
def test_a_full_budget_is_eager_attention_and_a_small_one_is_not(name: str) -> None:
    model, ids = made(name), tokens()
    mask = padding("left", ids)
    real = mask.bool()
    model.set_attn_implementation("eager")
    expected = hidden(model, ids, attention_mask=mask)[real]
    for density, near in ((1.0, True), (0.1, False)):
        attend = AdaptiveAttention(budget=Density(density), block=BLOCK, first=0, local=0)
        found = hidden(use_ringtile(model, attend=attend), ids, attention_mask=mask)[real]
        assert torch.allclose(found, expected, atol=2e-4, rtol=2e-4) is near


def test_a_pattern_of_yours_and_none_for_a_layer() -> None:
    model, ids, attend = made("Llama"), tokens(1), Random()
    pattern = Window(50) | GlobalTokens(3)
    use_ringtile(model, pattern, attend=[attend, None])
    hidden(model, ids)
    ((options, kept),) = attend.calls
    assert options["pattern"] == Causal() & pattern
    allowed = kept_pairs(Causal() & pattern, 1, 1, TOKENS, TOKENS, start=0)[0]
    assert not (kept & ~allowed).any()
    assert 0.3 < kept.sum() / (4 * allowed.sum()) < 0.8


def test_packed_rows_stay_apart() -> None:
    model, ids, attend = made("Llama"), tokens(1), Random()
    places = torch.cat([torch.arange(60), torch.arange(TOKENS - 60)])[None]
    hidden(use_ringtile(model, attend=attend), ids, position_ids=places, use_cache=False)
    assert len(attend.calls) == 2
    assert not attend.calls[0][1][..., 60:, :60].any()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prompt_in_chunks_and_exact_decoding(cache: str) -> None:
    model, ids = made("Llama"), tokens(1)
    attend = Random()
    use_ringtile(model, attend=attend)
    past = hf.DynamicCache() if cache == "dynamic" else hf.StaticCache(model.config, max_cache_len=TOKENS + 20)
    with torch.no_grad():
        model(ids[:, :70], past_key_values=past)
        model(ids[:, 70:-1], past_key_values=past)
    assert [kept.shape[2:] for _, kept in attend.calls] == [(70, 70)] * 2 + [(TOKENS - 71, TOKENS - 1)] * 2
    # One query computes all kept pairs of the cached keys.
    before = copy.deepcopy(past)
    found = model(ids[:, -1:], past_key_values=past).logits
    assert len(attend.calls) == 4
    assert torch.equal(found, use_ringtile(model)(ids[:, -1:], past_key_values=before).logits)


def test_queries_before_the_last_key() -> None:
    """All pairs of an encoder's static cache would let queries see its room."""
    from ringtile.integrations.transformers.attention import _adapted, softmax_of
    from ringtile.integrations.transformers.masks import KeptPairs

    q, k = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 30, 16)
    kept = KeptPairs(Window(5), 0, None, 0)
    with refused("attend: expected queries that end with the keys"):
        _adapted(sparse_attention, q, k, k, kept, {}, softmax_of(nn.Module(), q, k, {}))
    kept = kept._replace(pattern=Causal() & Window(5))
    causal = _adapted(sparse_attention, q, k, k, kept, {}, softmax_of(nn.Module(), q, k, {}))
    expected = sparse_attention(q, k[:, :, :20], k[:, :, :20], Causal() & Window(5))
    assert torch.equal(causal, expected)


def test_dropout_scale_and_gradients_reach_it() -> None:
    kind, config = config_of("Llama", attention_dropout=0.25)
    model, attend = kind(config).train(), Random()
    use_ringtile(model, attend=attend)
    model(tokens(1), labels=tokens(1), use_cache=False).loss.backward()
    options = attend.calls[0][0]
    assert (options["dropout_p"], options["scale"], options["enable_gqa"]) == (0.25, 0.25, True)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Gemma2", "softcap: expected a layer without softcap, sinks and bias"),
        ("gpt-oss", "s_aux: expected a layer without softcap, sinks and bias"),
        ("BART", "attend: expected a model without cross attention"),
    ],
)
def test_layers_that_it_cannot_compute(model: str, words: str) -> None:
    ids = tokens(1, 100)
    more = {"decoder_input_ids": ids} if model == "BART" else {}
    with refused(words):
        use_ringtile(made(model), attend=Random())(ids, **more)


def test_arguments() -> None:
    model = made("Llama")
    with refused("attend: expected one function per layer for 2 layers, got 3"):
        use_ringtile(model, attend=[None] * 3)
    with refused(r"attend: expected a function of .*, or one or None per layer, got 1"):
        register("ringtile-own", attend=[1])
    with refused(r"attend: expected a function of .*, or one or None per layer, got 1"):
        use_ringtile(model, attend=1)
    counting = Random()
    counting.stateful = True
    with refused("attend: expected one per layer, since a call changes later ones"):
        use_ringtile(model, attend=counting)
    register("ringtile-own", attend=[Random()])
    model.set_attn_implementation("ringtile-own")
    with refused("attend: expected one function per layer, got 1 for layer=1"):
        model(tokens(1))
    bird = hf.BigBirdModel(hf.BigBirdConfig(**ENCODER))
    with refused("big_bird has its own"):
        use_ringtile(bird, attend=Random())


def test_models_keep_their_own_attention() -> None:
    """Two models with others do not share them, and a copy has its own."""
    first, second, calls = made("Llama"), made("Llama"), []

    def record(name: str) -> Any:
        return lambda *args, **options: calls.append(name) or sparse_attention(*args, **options)

    use_ringtile(first, attend=record("first"))
    use_ringtile(second, Window(9), attend=record("second"))
    for model in (first, second, copy.deepcopy(first)):
        model(tokens(1))
    assert calls == ["first"] * 2 + ["second"] * 2 + ["first"] * 2


def test_which_patterns_see_no_future() -> None:
    assert all(map(sees_no_future, (Causal(), Causal() & Window(3), Documents(lengths=(3, 4)) & Causal())))
    assert not any(map(sees_no_future, (Window(3), Causal() | Window(3))))
