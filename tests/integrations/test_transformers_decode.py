"""`generate` of models of transformers over chosen tiles of the cache: the tokens of calls without a cache."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from families import sharp
from oracle import assert_near, refused
from tiny import hf
from torch import Tensor, nn

from ringtile.adaptive import AdaptiveAttention, Blend, Choice, Density, Probe, Sum, TopK, steps
from ringtile.integrations.transformers import attention, registry, use_ringtile
from ringtile.integrations.transformers.attention import PAGES
from ringtile.patterns import Window

TOKENS, NEW = 150, 16
BUDGET = Density(0.3)
CHOICE = Choice(Blend(None), BUDGET, first=0, local=0)
ATTEND = AdaptiveAttention(Blend(None), BUDGET, first=0, local=0)
"""The choice of `CHOICE` in calls with several queries."""


def tokens(batch: int = 2, n_tokens: int = TOKENS, seed: int = 2) -> Tensor:
    return torch.randint(2, 97, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def padded(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    return mask


made = partial(sharp, dtype=torch.float64)


@torch.no_grad()
def whole(model: Any, ids: Tensor, mask: Tensor | None = None, new: int = NEW) -> Tensor:
    """Generate by calls over all tokens, without a cache."""
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(new):
        place = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(2)), 1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    return ids


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    found: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return found


@pytest.fixture
def model() -> Any:
    return use_ringtile(made(), attend=ATTEND, decode=CHOICE)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tiles that each step keeps."""
    found: list[Tensor] = []
    keep = steps.kept_tiles
    monkeypatch.setattr(steps, "kept_tiles", lambda *a: found.append(keep(*a)) or found[-1])
    return found


def step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, past_key_values=cache).logits[:, -1]
    return found


def prefilled(model: Any, ids: Tensor) -> Any:
    with torch.no_grad():
        return model(ids, past_key_values=hf.DynamicCache(config=model.config)).past_key_values


def last(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, use_cache=False).logits[:, -1]
    return found


# Tokens of whole calls.


@pytest.mark.parametrize(("name", "side"), [("Llama", "left"), ("Qwen3", "none"), ("GPT-2", "left")])
def test_generate_gives_the_tokens_of_calls_without_a_cache(name: str, side: str, kept: list[Tensor]) -> None:
    model, ids = use_ringtile(made(name), attend=ATTEND, decode=CHOICE), tokens()
    mask = None if side == "none" else padded(ids)
    found = generated(model, ids, mask)
    assert torch.equal(found, whole(model, ids, mask))
    layers = model.config.num_hidden_layers
    assert len(kept) == layers * (NEW - 1)
    assert all(0.2 < keep.float().mean() < 0.5 for keep in kept)
    # The check would be void if tiles did not matter.
    assert not torch.equal(found, generated(use_ringtile(model, attend=ATTEND), ids, mask))
    assert len(kept) == layers * (NEW - 1)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 40}],
    ids=lambda x: next(iter(x)),
)
def test_beams_lookup_and_chunks(options: dict[str, Any], model: Any, kept: list[Tensor]) -> None:
    """A cache whose rows change places, that is cropped, or filled in parts."""
    ids = tokens(1)
    # Repeats give the lookup something to find, right and wrong.
    ids = torch.cat((ids[:, :60], ids[:, :60], ids[:, :31]), 1)
    found = generated(model, ids, **options)
    few = sum(int(not keep.all()) for keep in kept)
    assert few > (3 if "prompt_lookup_num_tokens" in options else 20)
    slow = {} if "num_beams" not in options else options
    assert torch.equal(found, generated(model, ids, use_cache=False, **slow))
    if "num_beams" not in options:
        assert torch.equal(found, whole(model, ids))


def test_an_assistant_whose_guesses_are_taken_back(model: Any) -> None:
    ids = tokens(1)
    expected = generated(model, ids)
    helper = made(num_hidden_layers=1)
    assert torch.equal(generated(model, ids, assistant_model=use_ringtile(helper, decode=CHOICE)), expected)


def test_dense_prefill_and_a_choice_that_looks_ahead() -> None:
    """Steps choose by themselves, whatever computed the prompt."""
    ids, outs = tokens(1), []
    for attend in (None, AdaptiveAttention(Sum(Probe(4), Blend()), Density(0.5))):
        model = use_ringtile(made(), attend=attend, decode=CHOICE)
        cache = prefilled(model, ids)
        outs.append(step(model, ids[:, :1], cache))
        use_ringtile(model, attend=attend)
        assert not torch.allclose(outs[-1], step(model, ids[:, :1], prefilled(model, ids)), atol=1e-4)
    full = use_ringtile(made(), decode=Choice(Blend(None), Density(1.0)))
    found = step(full, ids[:, :1], prefilled(full, ids))
    expected = last(use_ringtile(made()), torch.cat((ids, ids[:, :1]), 1))
    assert_near(found, expected, 1e-5)
    assert not torch.allclose(outs[0], expected, atol=1e-4)


def test_one_choice_per_layer() -> None:
    """Layers with a window have lost keys, and keep all that they have."""
    ids = tokens(1)
    with refused(r"decode: expected a causal layer, a DynamicCache .*, got .* give this layer None"):
        generated(use_ringtile(made("Gemma3"), decode=CHOICE), ids)
    model = use_ringtile(made("Gemma3"), attend=[None, ATTEND], decode=[None, CHOICE])
    found = generated(model, ids)
    assert torch.equal(found, whole(model, ids))
    assert not torch.equal(found, generated(use_ringtile(model, attend=[None, ATTEND]), ids))


# What a cache remembers, and when it begins anew.


def test_a_step_copies_and_summarizes_new_tokens_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    summaries = steps.summaries
    monkeypatch.setattr(steps, "summaries", lambda key, *a: seen.append(key.shape[2]) or summaries(key, *a))
    ids = tokens(1)
    cache = prefilled(model, ids)
    places = {layer.keys.data_ptr() for layer in cache.layers}
    for at in range(40):
        step(model, ids[:, at : at + 1], cache)
        assert places == {layer.keys.data_ptr() for layer in cache.layers}
    # In each of two layers: 144 keys at once, then 16 for each tile that becomes complete.
    assert seen == [144, 144, *[16] * 4]


def test_every_change_of_earlier_keys_begins_anew(model: Any) -> None:
    ids, more = tokens(2), tokens(2, 20, seed=3)

    def run(change: Any, rows: Tensor) -> None:
        cache = prefilled(model, ids)
        step(model, more[:, :1], cache)
        cache = change(cache) or cache
        assert cache.get_seq_length() == rows.shape[1]
        # Ten steps, so that tiles become complete after the change.
        for at in range(10, 20):
            token = more[: len(rows), at : at + 1]
            rows, found = torch.cat((rows, token), 1), step(model, token, cache)
            if at in (10, 19):
                assert_near(found, last(model, rows), 1e-5)

    rows = torch.cat((ids, more[:, :1]), 1)
    run(lambda cache: cache.crop(-30), rows[:, :-30])
    run(lambda cache: cache.reorder_cache(torch.tensor([1, 0])), rows.flip(0))
    run(lambda cache: cache.reorder_cache(torch.tensor([1, 1])), rows[[1, 1]])
    run(lambda cache: cache.batch_select_indices(torch.tensor([1])), rows[1:])
    run(copy.deepcopy, rows)

    def swapped(cache: Any) -> None:
        for layer in cache.layers:
            for x in (layer.keys, layer.values):
                x.copy_(x.flip(0))

    run(swapped, rows.flip(0))

    def anew(cache: Any) -> None:
        cache.reset()
        with torch.no_grad():
            model(rows.flip(0), past_key_values=cache)

    run(anew, rows.flip(0))


def test_copies_that_share_memory_do_not_mix(model: Any) -> None:
    ids, more = tokens(1), (tokens(1, 20, seed=3), tokens(1, 20, seed=4))
    cache = prefilled(model, ids)
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    rows = [ids, ids]
    for at in range(20):
        for number, each in enumerate((cache, other)):
            token = more[number][:, at : at + 1]
            rows[number], found = torch.cat((rows[number], token), 1), step(model, token, each)
            if at in (0, 1, 19):
                assert_near(found, last(model, rows[number]), 1e-5)


def test_inference_mode_and_caches_of_any_origin(model: Any) -> None:
    ids = tokens(1)
    expected = last(model, torch.cat((ids, ids[:, :1]), 1))
    with torch.inference_mode():
        cache = model(ids).past_key_values
        within = model(ids[:, :1], past_key_values=cache).logits[:, -1].clone()
    after = step(model, ids[:, :1], cache)
    assert_near(within, expected, 1e-5)
    longer = last(model, torch.cat((ids, ids[:, :1], ids[:, :1]), 1))
    assert_near(after, longer, 1e-5)
    # Without a config the layers come one by one, and a dense prompt leaves layers of transformers' own.
    plain = use_ringtile(made(), attend=ATTEND)
    for past in (hf.DynamicCache(), None):
        with torch.no_grad():
            cache = plain(ids, past_key_values=past).past_key_values
        assert_near(step(model, ids[:, :1], cache), expected, 1e-5)


def test_shapes_that_do_not_follow_are_refused_as_by_transformers(model: Any) -> None:
    ids = tokens(2)
    cache = prefilled(model, ids)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        step(model, ids[:1, :1], cache)


# What is refused.


def test_caches_without_all_keys() -> None:
    model, ids = use_ringtile(made(), decode=CHOICE), tokens(1)
    past = hf.StaticCache(model.config, max_cache_len=TOKENS + 9)
    with torch.no_grad():
        model(ids, past_key_values=past)
    with refused("decode: expected a causal layer, a DynamicCache with all its keys"):
        step(model, ids[:, :1], past)
    window = use_ringtile(made("Mistral", sliding_window=40), decode=CHOICE)
    with refused("decode: expected a causal layer"):
        generated(window, ids)


def test_keys_that_are_not_those_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = use_ringtile(made(), decode=CHOICE), tokens(1)
    attend = attention.attend

    def changed(pattern: Any, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        return attend(pattern, module, query, key.clone(), *rest, **options)

    cache = prefilled(model, ids)
    monkeypatch.setattr(registry, "attend_layer", changed)
    with refused("decode: expected a model of use_ringtile, and keys of a DynamicCache"):
        step(model, ids[:, :1], cache)


def test_patterns_and_other_masks() -> None:
    ids = tokens(1)
    model = use_ringtile(made(), Window(50), decode=CHOICE)
    with refused(r"decode: expected a causal layer, .* no pattern="):
        step(model, ids[:, :1], prefilled(model, ids))
    model = use_ringtile(made(), decode=CHOICE)
    cache = prefilled(model, ids)
    mask = torch.ones(1, 1, 1, TOKENS + 1, dtype=torch.bool)
    with refused("decode: expected a causal layer"), torch.no_grad():
        model(ids[:, :1], past_key_values=cache, attention_mask=mask)
    mask = torch.ones(1, TOKENS + 2, dtype=torch.long)
    cache = prefilled(model, ids)
    step(model, ids[:, :1], cache)
    mask[:, 5] = 0
    with pytest.raises(RuntimeError, match="attention_mask: expected the padding"), torch.no_grad():
        model(ids[:, :1], past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize(("name", "option"), [("Gemma2", "softcap"), ("gpt-oss", "s_aux")])
def test_layers_that_it_cannot_compute(name: str, option: str) -> None:
    with refused(f"{option}: expected a layer without softcap, sinks and bias for decode="):
        generated(use_ringtile(made(name), decode=CHOICE), tokens(1))


def test_arguments() -> None:
    model = made()
    with refused("decode: expected one choice per layer for 2 layers, got 3"):
        use_ringtile(model, decode=[CHOICE] * 3)
    for wrong in (ATTEND, [0.1, None], Density(0.1)):
        with refused("decode: expected a Choice, or one or None per layer, got"):
            use_ringtile(model, decode=wrong)
    with refused("scores: steps need those of each query"):
        use_ringtile(model, decode=Choice(Probe("first")))
    with refused("scores: a cache needs scores without later tokens"):
        use_ringtile(model, decode=[None, Choice()])
    with refused("decode: expected a model without cross attention"):
        use_ringtile(made("BART"), decode=CHOICE)(tokens(1, 9), decoder_input_ids=tokens(1, 9))


def test_prompts_shorter_than_a_tile() -> None:
    few: Any = (Blend(None), TopK(1))
    attend, decode = (kind(*few, first=0, local=0) for kind in (AdaptiveAttention, Choice))
    model, ids = use_ringtile(made(), attend=attend, decode=decode), tokens(1, 1)
    assert torch.equal(generated(model, ids), whole(model, ids))
    assert last(model, ids).isfinite().all()


def test_copies_and_pickles_decode_alike_and_a_model_can_be_switched_back(model: Any) -> None:
    ids = tokens(1)
    found = generated(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generated(other, ids), found)
    use_ringtile(model, attend=ATTEND)
    assert not torch.equal(generated(model, ids), found)
    assert not hasattr(prefilled(model, ids).layers[0].keys, PAGES)
