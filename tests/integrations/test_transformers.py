"""Models of Hugging Face transformers on ringtile: masks, patterns, graphs, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import PLACES, TOKENS, assert_equal_models, both, graph_counter, model_of, padding, registered
from oracle import assert_near, refused
from pairs import all_pairs
from tiny import BIASED, DECODER, ENCODER, JOINED, MODELS, SPARSE, VISION, WINDOWED, config_of, hf, masking_utils
from torch import Tensor, nn

from ringtile import sparse_attention
from ringtile.index import cache_info
from ringtile.integrations.transformers import biases, by_hand, register, registry, use_ringtile
from ringtile.integrations.transformers.attention import attend
from ringtile.integrations.transformers.masks import PatternMask, pairs
from ringtile.integrations.transformers.registry import OLDEST
from ringtile.modules import replace_attention
from ringtile.patterns import (
    Causal,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    Segments,
    Window,
    per_document,
    per_head,
)
from ringtile.testing.oracle import attention, kept_pairs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
# Of torch's own tracing of a Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
TOLERANCE = 5e-6


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


def test_layers_that_share_keys_drop_queries_and_keep_their_places() -> None:
    first, second = (copy.deepcopy(model) for model in both("Gemma 4"))
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding("left")
    for count in (1, 7, 45):
        found, expected = (
            model(tokens, attention_mask=mask.long(), logits_to_keep=count)[0] for model in (second, first)
        )
        assert found.shape[1] == count
        assert ((found - expected) * mask[:, -count:, None]).abs().max() <= TOLERANCE
    model = use_ringtile(second, GlobalTokens(2) | Segments(11))
    whole = model(tokens, attention_mask=mask.long()).logits
    last = model(tokens, attention_mask=mask.long(), logits_to_keep=9).logits
    assert ((whole[:, -9:] - last) * mask[:, -9:, None]).abs().max() <= TOLERANCE


# Masks: every kind that transformers can make.

QUERIES, KEYS = 150, 150
GROUPS = torch.full((2, KEYS), -1)
GROUPS[0, 5:25], GROUPS[0, 60:140], GROUPS[1, 0:9], GROUPS[1, 30:40] = 0, 1, 0, 3
APART = torch.where(torch.arange(KEYS) % 7 == 0, 0, -1).expand(2, -1)
"""One group whose tokens are apart."""
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([40, 1, 109], [131, 19])])


def odd_keys(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key % 2 == 1) & (query > batch * 50)


def mask_config(implementation: str) -> Any:
    config = hf.MistralConfig(**DECODER, sliding_window=20)
    config.attention_chunk_size = 48
    config._attn_implementation = implementation
    return config


def filled_cache(kind: str, config: Any, seen: int) -> Any:
    cache = hf.DynamicCache(config=config) if kind == "dynamic" else hf.StaticCache(config=config, max_cache_len=KEYS)
    cache.update(*torch.zeros(2, 2, 2, seen, 16), 0)
    return cache


OPTIONS: dict[str, dict[str, Any]] = {
    "or": {"or_mask_function": odd_keys},
    "and": {"and_mask_function": odd_keys},
    "packed": {"position_ids": POSITIONS},
    "groups": {"block_sequence_ids": GROUPS},
    "groups apart": {"block_sequence_ids": APART},
    "other tokens": {"encoder_hidden_states": torch.empty(2, 90, 64)},
}
KINDS = (
    "causal; causal, or; causal, and; causal, packed; causal, groups; causal, groups apart; sliding; sliding, or; "
    "sliding, packed; sliding, groups; sliding, dynamic cache 70; sliding, static cache 11; chunked; chunked, and; "
    "chunked, packed; bidirectional; bidirectional, and; bidirectional, other tokens; bidirectional sliding; "
    "bidirectional sliding, or"
).split("; ")
"""A rule of transformers, and an option or a cache that has seen some tokens."""
MAKERS = {
    "causal": "create_causal_mask",
    "sliding": "create_sliding_window_causal_mask",
    "chunked": "create_chunked_causal_mask",
    "bidirectional": "create_bidirectional_mask",
    "bidirectional sliding": "create_bidirectional_sliding_window_mask",
}


def mask_of(kind: str, implementation: str, queries: int, padded: str) -> Tensor:
    """The mask of a kind, made by transformers for an implementation."""
    if "groups" in kind and "block_sequence_ids" not in inspect.signature(masking_utils.create_causal_mask).parameters:
        pytest.skip("this transformers has no groups")
    config = mask_config(implementation)
    words, _, option = kind.partition(", ")
    options, seen = OPTIONS.get(option, {}), 0
    if "cache" in option:
        seen = int(option.split()[-1])
        options = {"past_key_values": filled_cache(option.split()[0], config, seen)}
    other = options.get("encoder_hidden_states")
    tokens = seen + queries if other is None else other.shape[1]
    attention_mask = None if padded == "no" else padding(padded, 2, tokens).long()
    if words in ("causal", "sliding", "chunked"):
        options = {"past_key_values": None, **options}
    make = getattr(masking_utils, MAKERS[words])
    return make(config=config, inputs_embeds=torch.empty(2, queries, 64), attention_mask=attention_mask, **options)


def bits_of(mask: PatternMask) -> Tensor:
    found = pairs(mask.kept.pattern, mask.kept.start, *mask.shape[2:], mask.device)
    return (found if mask.kept.key_mask is None else found & mask.kept.key_mask[:, None, None]).expand(mask.shape)


def attended(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None = None) -> Tensor:
    return attend(pattern, nn.Identity(), q, k, v, mask)[0].transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "padded"),
    [(kind, padded) for number, kind in enumerate(KINDS) for padded in ("left", ("no", "right")[number % 2])],
)
def test_no_bit_of_a_mask_is_lost(kind: str, padded: str) -> None:
    queries = 150 if "cache" not in kind else 30
    mask = mask_of(kind, "ringtile", queries, padded)
    assert isinstance(mask, PatternMask)
    kept = mask_of(kind, "eager", queries, padded)
    # None means that all pairs are kept.
    kept = torch.ones(mask.shape, dtype=torch.bool) if kept is None else kept == 0
    assert mask.shape == kept.shape
    assert torch.equal(bits_of(mask), kept)
    q = torch.randn(2, 2, queries, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, kept.shape[3], 16, dtype=torch.float64)
    found = attended(mask, q, k, v)
    assert_near(found, attention(q, k, v, kept)[0], 1e-12)
    # The same mask with one bit flipped, as bools and as floats, changes the output of its row and of no other.
    flipped = kept.clone()
    row, column = int(torch.randint(40, queries, ()) if queries > 40 else 17), int(torch.randint(kept.shape[3], ()))
    flipped[1, 0, row, column] ^= True
    for given in (flipped, torch.zeros(flipped.shape).masked_fill(~flipped, torch.finfo(torch.float32).min)):
        other = attended(given, q, k, v)
        changed = (other - found).abs().amax(-1) > 1e-7
        assert changed[1, :, row].all()
        assert changed.sum() == 2
        assert_near(other, attention(q, k, v, flipped)[0], 1e-12)


@pytest.mark.parametrize(
    ("kind", "pattern", "padded"),
    all_pairs(
        ["causal", "sliding", "chunked", "causal, or"],
        [GlobalTokens(2) | Window(5), Segments(16), Segments(16, 2), Causal() & Window(9)],
        ["left", "no"],
    ),
    ids=str,
)
def test_a_pattern_counts_from_the_first_real_token(kind: str, padded: str, pattern: Pattern) -> None:
    mask, kept = mask_of(kind, "ringtile", 150, padded), mask_of(kind, "eager", 150, padded) == 0
    place = torch.arange(150)
    origins = padding(padded, 2, 150).long().argmax(1)
    of_row = [pattern.allowed(torch.arange(2)[:, None, None], (place - n)[:, None], place - n) for n in origins]
    real = (place >= origins[:, None])[:, None, :, None]
    q, k, v = torch.randn(3, 2, 2, 150, 16, dtype=torch.float64)
    expected = attention(q, k, v, kept & torch.stack(of_row))[0]
    found = attended(mask, q, k, v, pattern)
    assert_near(found * real, expected * real, 1e-12)


def eager_and_sparse(name: str, pattern: Any) -> tuple[Any, Any]:
    made, config = (MODELS | JOINED)[name]()
    return model_of(made, config, "eager"), use_ringtile(model_of(made, config, "eager"), pattern)


@pytest.mark.parametrize("by", ["", "position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("pattern", [Window(5) | GlobalTokens([0, 6]), per_head([Segments(8), GlobalTokens(2)] * 2)])
def test_a_pattern_begins_anew_in_each_packed_document(pattern: Pattern, by: str) -> None:
    model, sparse = eager_and_sparse("Llama", pattern)
    rows = [[20, 1, 33, 7], [40, 21]][: 2 if by == "position_ids" else 1] if by else [[TOKENS]]
    tokens = torch.randint(3, 97, (len(rows), TOKENS))
    rules = [per_document(Causal() & pattern, Documents(row)) for row in rows]
    kept = torch.cat([kept_pairs(rule, 1, 4, TOKENS, TOKENS, start=0) for rule in rules])
    given: dict[str, Any] = {"use_cache": False}
    if by:
        given["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    masked = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)
    expected = model(tokens, attention_mask=masked, **given).logits
    if by in ("cu_seq_lens", "both"):
        bounds = torch.tensor([0, 20, 21, 54, 61])
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 33, "max_length_k": 33}
    if by == "cu_seq_lens":
        given["attention_mask"] = torch.ones(1, TOKENS, dtype=torch.long)
    assert_near(sparse(tokens, **given).logits, expected, TOLERANCE)
    if not by:
        # The mask of all pairs means the same to ringtile, as bools and as floats.
        for mask in (masked, kept):
            plain = model_of(*MODELS["Llama"](), "ringtile")(tokens, attention_mask=mask).logits
            assert_near(plain, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("pattern", "name", "cache"),
    all_pairs(
        [GlobalTokens(2) | Segments(11), Segments(16, 2) | Window(3)],
        ["Llama", "Gemma3", "gpt-oss"],
        ["dynamic", "static"],
    ),
    ids=str,
)
def test_a_sparse_model_generates_what_it_computes_without_a_cache(pattern: Pattern, name: str, cache: str) -> None:
    _, model = eager_and_sparse(name, pattern)
    tokens, mask = torch.randint(3, 97, (3, 40)), padding("left", tokens=40)
    found = model.generate(
        tokens, attention_mask=mask.long(), max_new_tokens=12, do_sample=False, cache_implementation=cache
    )
    whole = model(found, attention_mask=F.pad(mask.long(), (0, 12), value=1)).logits
    assert torch.equal(whole[:, 39:-1].argmax(-1), found[:, 40:])


@pytest.mark.parametrize(
    ("pattern", "cache", "padded"),
    [(None, "dynamic", "no"), (GlobalTokens(2) | Window(20), "static", "left"), (Segments(64, 2), "dynamic", "left")],
    ids=str,
)
def test_a_generated_token_builds_no_index(pattern: Pattern | None, cache: str, padded: str) -> None:
    made, config = MODELS["Gemma3"]()
    model = use_ringtile(model_of(made, config, "eager"), pattern)
    tokens, mask = torch.randint(3, 97, (3, 40)), padding(padded, tokens=40)
    builds: list[int] = []

    class Count(hf.StoppingCriteria):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            builds.append(cache_info().misses)
            return torch.zeros(3, dtype=torch.bool)

    options = {"max_new_tokens": 30, "do_sample": False, "cache_implementation": cache}
    model.generate(tokens, attention_mask=mask.long(), stopping_criteria=[Count()], **options)
    assert len(builds) == 30
    # The second call finds the indices of the first, which serve 128 tokens each and kind of layer.
    assert builds[-1] - builds[0] <= 2


def only_odd(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return ((query + key) % 2 == 1) | (query == key)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "pattern", "given", "backend"),
    [
        pytest.param("Llama", "window(8) | global_tokens(4)", "right", "inductor", marks=pytest.mark.slow),
        ("Llama", None, "no", "one graph"),
        ("Mistral", None, "left", "one dynamic graph"),
        ("Mistral", per_head([Window(3), GlobalTokens(2), Segments(16), Window(9)]), "no", "one graph"),
        ("Mistral", Elements(only_odd), "left", "eager"),
        ("Llama", "window(8) | global_tokens(4)", "bool", "eager"),
        # Packed rows and chunks are read outside graphs.
        ("Mistral", None, "packed", "eager"),
        ("Llama 4", None, "left", "eager"),
    ],
)
def test_a_compiled_model(name: str, pattern: Any, given: str, backend: str) -> None:
    # The model of Llama 4 makes the masks of both kinds of layers.
    kinds = {"layer_types": ["chunked_attention"]} if name == "Llama 4" else {}
    model = use_ringtile(model_of(*config_of(name, num_hidden_layers=1, **kinds), "eager"), pattern)
    mask, counter = padding(given), graph_counter()
    of_pairs = mask[:, None, None] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    inputs = {"input_ids": torch.randint(3, 97, (3, TOKENS))}
    if given == "packed":
        inputs |= {"position_ids": PLACES, "use_cache": False}
    elif given != "no":
        inputs["attention_mask"] = of_pairs if given == "bool" else mask.long()
    torch._dynamo.reset()
    compiled = torch.compile(
        model,
        fullgraph=backend != "eager",
        backend="inductor" if backend == "inductor" else counter,
        options={"compile_threads": 1} if backend == "inductor" else None,
        dynamic="dynamic" in backend or None,
    )
    expected, found = model(**inputs).logits[mask], compiled(**inputs).logits[mask]
    tolerance = TOLERANCE if backend == "inductor" else 0
    assert_near(found, expected, tolerance)
    grads = [torch.autograd.grad(output.sum(), list(model.parameters())) for output in (expected, found)]
    assert_near(grads[1], grads[0], tolerance)
    assert "graph" not in backend or counter.frame_count == 1


def test_a_compiled_step_of_a_sliding_cache_counts_from_the_first_token() -> None:
    made, config = config_of("Mistral", num_hidden_layers=1)
    model = use_ringtile(model_of(made, config, "eager"), "window(8) | global_tokens(4)")
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding("left").long()
    torch._dynamo.reset()
    outs = []
    for forward in (model, torch.compile(model, backend="eager")):
        cache = hf.DynamicCache(config=config)
        with torch.no_grad():
            model(tokens[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            outs.append(forward(tokens[:, -1:], attention_mask=mask, past_key_values=cache).logits)
    assert_near(outs[1], outs[0], 0)


def test_a_model_without_sdpa_attends_to_all_keys_without_a_mask() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1}
    text = dict(sizes, vocab_size=99, num_attention_heads=4, intermediate_size=32, max_position_embeddings=64)
    parts = {"text_config": text, "vision_config": dict(sizes, image_size=32, patch_size=8)}
    config = hf.BridgeTowerConfig(**sizes, num_attention_heads=4, **parts)
    first, second = (model_of(hf.BridgeTowerModel, config, name) for name in ("eager", "ringtile"))
    inputs = {"input_ids": torch.randint(5, 99, (1, 6)), "pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        expected, found = (model(**inputs, attention_mask=torch.ones(1, 6)) for model in (first, second))
    assert_near(found.image_features, expected.image_features, TOLERANCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:While compiling, we found")
@pytest.mark.parametrize(
    ("name", "pattern", "strict"),
    [("Mistral", None, True), ("BERT", GlobalTokens(2) | Window(9), False)],
)
def test_an_exported_model(pattern: Pattern | None, name: str, strict: bool) -> None:
    model = use_ringtile(model_of(*config_of(name, num_hidden_layers=1), "eager"), pattern)
    options = {"use_cache": False} if name == "Mistral" else {}
    size = torch.export.Dim("size", min=33, max=512)
    shapes = {"input_ids": {1: size}, "attention_mask": {1: size}, **dict.fromkeys(options)}
    calls = []
    for tokens in (TOKENS, 150, 40):
        mask = padding("right", tokens=tokens)
        calls.append({"input_ids": torch.randint(3, 97, (3, tokens)), "attention_mask": mask.long(), **options})
    with torch.no_grad():
        program = torch.export.export(model, (), calls[0], strict=strict, dynamic_shapes=shapes).module()
        for call in calls:
            expected, found = model(**call)[0], program(**call)[0]
            assert_near(found, expected, TOLERANCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_model_needs_a_mask_of_its_tokens() -> None:
    call = {"input_ids": torch.randint(3, 97, (1, TOKENS)), "use_cache": False}
    with refused(r"torch.export support causal .*; if it is that of packed rows, pass att"):
        torch.export.export(model_of(*MODELS["Mistral"](), "ringtile"), (), call, strict=False)


KNOWN = [kind for kind in KINDS if not kind.endswith((" or", " and", " apart", "chunked, packed"))]


@pytest.mark.parametrize("kind", KNOWN)
def test_a_known_rule_is_not_evaluated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    assert isinstance(mask_of(kind, "ringtile", 150 if "cache" not in kind else 30, "left"), PatternMask)


def test_a_graph_does_not_read_packed_rows() -> None:
    model = model_of(*MODELS["Mistral"](), "ringtile")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="packed rows are read outside graphs"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randint(3, 97, (1, TOKENS)), use_cache=False)


def test_a_compiled_step_serves_all_tokens() -> None:
    model = model_of(*MODELS["Gemma3"](), "ringtile")
    tokens, mask = torch.randint(3, 97, (3, 30)), padding("left", tokens=30)
    mask[1, 29] = True
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(tokens, attention_mask=mask.long(), **options)
    counter = graph_counter()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    assert torch.equal(model.generate(tokens, attention_mask=mask.long(), **options), expected)
    # The prompt, and a token.
    assert counter.frame_count == 2


LONGFORMER = dict(ENCODER, attention_window=[16, 8], max_position_embeddings=258)


@pytest.mark.parametrize(
    ("kind", "tokens_at"), [("no", (0, 3, 40)), ("no", ()), ("left", (0, 3, 40)), ("right", (0,)), ("right", ())]
)
def test_a_longformer_keeps_its_weights_and_its_results(kind: str, tokens_at: tuple[int, ...]) -> None:
    made, config = hf.LongformerForMaskedLM, hf.LongformerConfig(**LONGFORMER)
    models = [model_of(made, config, "eager", torch.float64) for _ in range(2)]
    assert use_ringtile(models[1]) is models[1]
    assert all("forward" in vars(layer.attention.self) for layer in models[1].longformer.encoder.layer)
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding(kind)
    at_global = torch.zeros(3, TOKENS, dtype=torch.long)
    at_global[:2, list(tokens_at)] = 1
    at_global &= mask
    inputs = {"attention_mask": mask.long(), "global_attention_mask": at_global}
    # Rows of padding, too: their attention is 0.
    assert_equal_models(*models, torch.ones_like(mask), 1e-10, input_ids=tokens, **inputs)
    model_of(made, config, "eager").load_state_dict(models[1].state_dict())


def test_a_longformer_drops_weights_of_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def seeing(*args: Any, dropout_p: float, **options: Any) -> Any:
        seen.append(dropout_p)
        return sparse_attention(*args, dropout_p=dropout_p, **options)

    monkeypatch.setattr(by_hand, "sparse_attention", seeing)
    model = use_ringtile(hf.LongformerModel(hf.LongformerConfig(**LONGFORMER | {"attention_probs_dropout_prob": 0.25})))
    ids = torch.randint(3, 97, (1, 32))
    layers = len(model.encoder.layer)
    model.train()(ids, global_attention_mask=torch.arange(32).unsqueeze(0) == 0)
    model.eval()(ids)
    assert seen == [0.25] * 3 * layers + [0.0] * layers


def test_a_longformer_refuses_what_it_cannot_compute() -> None:
    model = hf.LongformerModel(hf.LongformerConfig(**LONGFORMER))
    with refused("pattern: longformer has its own"):
        use_ringtile(model, Window(3))
    with refused("output_attentions: expected False for longformer"):
        use_ringtile(model)(torch.randint(3, 97, (1, 20)), output_attentions=True)
    with refused(r"is_index_masked, .* got None"):
        model.encoder.layer[0].attention.self(torch.randn(1, 16, 64))


BIG_BIRD = dict(ENCODER, block_size=16, num_random_blocks=2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)


@pytest.mark.parametrize(
    ("tokens", "block", "is_training"), [(192, 16, False), (187, 16, True), (400, 16, True), (1024, 64, False)]
)
def test_a_big_bird_keeps_its_weights_and_its_results(tokens: int, block: int, is_training: bool) -> None:
    config = hf.BigBirdConfig(**dict(BIG_BIRD, block_size=block, max_position_embeddings=1024))
    models = [model_of(hf.BigBirdForMaskedLM, config, "eager", torch.float64).train(is_training) for _ in range(2)]
    assert use_ringtile(models[1]) is models[1]
    names = [list(model.state_dict()) for model in models]
    assert names[0] == names[1]
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0, tokens - 50 :] = False
    inputs = {"input_ids": torch.randint(3, 97, (2, tokens)), "attention_mask": mask.long()}
    assert_equal_models(*models, torch.ones_like(mask), 1e-10, **inputs)
    assert models[1].bert.attention_type == "block_sparse"


def test_a_big_bird_refuses_what_it_cannot_compute() -> None:
    model = hf.BigBirdModel(hf.BigBirdConfig(**BIG_BIRD))
    with refused("pattern: big_bird has its own"):
        use_ringtile(model, Window(3))
    with refused("output_attentions: ringtile does not support"):
        use_ringtile(model)(torch.randint(3, 97, (1, 400)), output_attentions=True)
    with refused("hidden_states: expected a multiple of 16 tokens with masks"):
        model.encoder.layer[0].attention.self(torch.randn(1, 25, 64))


# Refusals.

T5 = dict(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)


def test_a_model_that_computes_with_its_mask_is_refused() -> None:
    made, config = BY_HAND["GPT-Neo"]()
    model = made(config)
    model.config._attn_implementation = "ringtile"
    with refused("attention_mask: expected a model that hands its mask"):
        model(torch.randint(3, 97, (2, 20)))


BY_HAND: dict[str, Callable[[], tuple[type, Any]]] = {
    "DeBERTa": lambda: (hf.DebertaModel, hf.DebertaConfig(**ENCODER)),
    "XLNet": lambda: (hf.XLNetLMHeadModel, hf.XLNetConfig(vocab_size=97, d_model=64, n_layer=2, n_head=4)),
    "CPM-Ant": lambda: (hf.CpmAntModel, hf.CpmAntConfig(vocab_size=97, hidden_size=64, num_hidden_layers=1)),
    "Falcon": lambda: (hf.FalconForCausalLM, hf.FalconConfig(**VISION)),
    "GPT-Neo": lambda: (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig(hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    ),
    # Some parts use the interface, others look a class up.
    "GIT": lambda: (hf.GitModel, hf.GitConfig(**ENCODER)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_model_that_ignores_the_name_is_not_built(name: str) -> None:
    made, config = BY_HAND[name]()
    register("ringtile-4", Window(4))
    part = made.__name__.partition("For")[0].partition("LM")[0]
    message = rf"^attn_implementation='ringtile-4': {part}\w* ignores it, because .* by hand; leave the name out$"
    with refused(message):
        made._from_config(copy.deepcopy(config), attn_implementation="ringtile-4")
    model = made._from_config(config, attn_implementation="eager")
    with refused(rf"model: expected parts that use .* got .*{part}"):
        use_ringtile(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["OpenAIGPT", "FSMT"])
def test_a_class_called_attention_is_written_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.5 takes its name for that of no attention.
    made = getattr(hf, f"{name}Model")
    monkeypatch.setattr(made, "_can_set_attn_implementation", classmethod(lambda _: True))
    registry._is_by_hand.cache_clear()
    assert registry._is_by_hand(made)


def test_a_part_that_ignores_the_name_is_not_built() -> None:
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(
        hf.RobertaConfig(**ENCODER), hf.XLMConfig(emb_dim=64, n_layers=2, n_heads=4, vocab_size=97)
    )
    with refused("XLMModel ignores it"):
        hf.EncoderDecoderModel._from_config(config, attn_implementation="ringtile")
    with refused(r"LongformerModel ignores it, .*, and call use_ringtile\(model\)"):
        hf.LongformerModel._from_config(hf.LongformerConfig(**LONGFORMER), attn_implementation="ringtile")


def test_a_model_whose_source_is_not_known_is_built(tmp_path: Path) -> None:
    source = """
class OwnAttention(hf.models.bert.modeling_bert.nn.Module):
    pass
class OwnModel(hf.BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention()
"""
    names: dict[str, Any] = {"hf": hf, "__name__": "no_module"}
    exec(source, names)
    made = names["OwnModel"]._from_config(hf.BertConfig(**ENCODER), attn_implementation="ringtile")
    assert made.config._attn_implementation == "ringtile"


@pytest.mark.parametrize(
    "compute",
    (
        "mask + 1.0; 1.0 - mask; mask[:, :, :, :3]; mask[:1]; mask[:, :, 3]; mask[:, :, ::2]; mask[:, :, :0]; "
        "torch.where(mask, 0.0, -1.0); torch.zeros(2, 2, 150, 150).masked_fill(~mask, 0); mask.to(torch.float32); "
        "mask.float(); mask.to(torch.zeros(2)); bool(mask); mask.tolist(); mask.clone(); mask.__setitem__(0, True)"
    ).split("; "),
)
def test_a_mask_has_no_values_to_compute_with(compute: str) -> None:
    mask = mask_of("sliding", "ringtile", 150, "left")
    with refused("got one that computes with it"):
        eval(compute, {"torch": torch, "mask": mask})


@pytest.mark.parametrize(
    "keep",
    (
        "mask; mask.contiguous(); mask.detach(); mask.bool(); mask.to(torch.bool); mask[:, :, :, :150]; "
        "mask.to('cpu'); mask.to(device='cpu', dtype=torch.bool)"
    ).split("; "),
)
def test_a_mask_keeps_its_pairs(keep: str) -> None:
    mask = mask_of("sliding", "ringtile", 150, "left")
    kept = eval(keep, {"torch": torch, "mask": mask})
    assert kept.kept is mask.kept
    moved = mask.to("meta", non_blocking=True)
    assert (moved.device.type, moved.kept.key_mask.device.type, moved.shape) == ("meta", "meta", mask.shape)
    assert (kept.shape, kept.dtype, kept.dim(), kept.ndim) == ((2, 1, 150, 150), torch.bool, 4, 4)


def test_weights_are_given_where_a_config_asks_and_drop_what_the_output_drops() -> None:
    config = hf.LlamaConfig(**DECODER, output_attentions=True, attention_dropout=0.4)
    model = use_ringtile(model_of(hf.LlamaModel, config, "eager")).train()
    ids, seen = torch.randint(3, 97, (1, 40)), []
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, given, out: seen.append(out))
    weights = model(ids).attentions[0]
    value, out = seen
    heads = config.num_attention_heads
    values = value.unflatten(2, (config.num_key_value_heads, -1)).transpose(1, 2)
    values = values.repeat_interleave(heads // config.num_key_value_heads, 1)
    assert_near((weights @ values).transpose(1, 2).flatten(2), out, TOLERANCE)
    assert 0.3 < (weights[0, :, 30:, :30] == 0).float().mean() < 0.5
    weights.square().sum().backward()
    assert model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0
    assert model(ids, output_attentions=False).attentions is None
    with refused("output_attentions: expected False for a layer with attend= or decode="):
        use_ringtile(model, attend=lambda query, key, value, **options: query)(ids)


_TWO_SIDES = dict(
    **dict(vocab_size=97, d_model=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
)
_SOUND = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
COMPUTE_WITH_THEIR_MASK: dict[str, Callable[[], tuple[type, Any]]] = {
    "BigBirdPegasus": lambda: (
        hf.BigBirdPegasusModel,
        hf.BigBirdPegasusConfig(**_TWO_SIDES, max_position_embeddings=512, block_size=16, num_random_blocks=1),
    ),
    "NLLB-MoE": lambda: (
        hf.NllbMoeModel,
        hf.NllbMoeConfig(**_TWO_SIDES, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=3),
    ),
    "Siglip2": lambda: (
        hf.Siglip2VisionModel,
        hf.Siglip2VisionConfig(**_SOUND, num_patches=16, patch_size=4),
    ),
    "Gemma 4 audio": lambda: (
        hf.Gemma4AudioModel,
        hf.Gemma4AudioConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, output_proj_dims=32, attention_chunk_size=4
        ),
    ),
    "LASR": lambda: (
        hf.LasrEncoder,
        hf.LasrEncoderConfig(**_SOUND, num_mel_bins=16, subsampling_conv_channels=16, conv_kernel_size=7),
    ),
}


@pytest.mark.parametrize("name", COMPUTE_WITH_THEIR_MASK)
def test_a_model_that_computes_with_its_mask(name: str) -> None:
    first = model_of(*COMPUTE_WITH_THEIR_MASK[name](), "eager")
    real = padding("right", 2, 96)
    inputs: dict[str, Any] = {"input_features": torch.randn(2, 96, 16), "attention_mask": real}
    if name == "Gemma 4 audio":
        inputs["input_features"] = torch.randn(2, 96, 128)
    if name == "Siglip2":
        inputs = {"pixel_values": torch.randn(2, 16, 48), "spatial_shapes": torch.tensor([[4, 4], [3, 4]])}
        inputs["pixel_attention_mask"] = torch.arange(16) < torch.tensor([[16], [12]])
    if isinstance(first, hf.BigBirdPegasusModel | hf.NllbMoeModel):
        tokens = torch.randint(3, 97, (2, 96))
        inputs = {"input_ids": tokens, "attention_mask": real.long(), "decoder_input_ids": tokens[:, :9]}
    with torch.no_grad():
        expected, found = (model(**inputs) for model in (first, use_ringtile(copy.deepcopy(first))))
    rows = slice(None)
    if name in ("Siglip2", "LASR"):
        rows = inputs["pixel_attention_mask"] if name == "Siglip2" else real[:, 3::4][:, : expected[0].shape[1]]
    assert_near(found[0][rows], expected[0][rows], TOLERANCE)
    if name == "Siglip2":
        assert_near(found.pooler_output, expected.pooler_output, TOLERANCE)


def test_models_that_cannot_run_are_refused_before_their_first_call() -> None:
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    series = dict(prediction_length=2, d_model=16, encoder_layers=1, decoder_layers=1)
    for made, config, part in (
        (hf.DogeModel, hf.DogeConfig(**sizes, vocab_size=97), "DogeAttention"),
        (hf.UdopEncoderModel, hf.UdopConfig(d_model=32, d_ff=32, num_layers=1, num_heads=4, d_kv=8), "UdopAttention"),
        (hf.InformerModel, hf.InformerConfig(**series), "InformerProbSparseAttention"),
    ):
        model = made(config)
        before = model.config._attn_implementation
        message = f"model: expected parts that use transformers' .* got {part}, whose attention .* a bias of all pairs"
        with refused(message):
            use_ringtile(model)
        assert model.config._attn_implementation == before
    use_ringtile(hf.InformerModel(hf.InformerConfig(**series, attention_type="full")))


def test_a_model_with_two_texts() -> None:
    codec = hf.EncodecConfig(hidden_size=32, codebook_size=64, codebook_dim=32, num_filters=2, upsampling_ratios=[8, 4])
    sizes = dict(hidden_size=32, num_hidden_layers=1, ffn_dim=37, num_attention_heads=4)
    decoder = hf.MusicgenDecoderConfig(**sizes, vocab_size=64, num_codebooks=2, pad_token_id=64, bos_token_id=64)
    parts = {"text_encoder": hf.T5Config(**T5), "audio_encoder": codec, "decoder": decoder}
    config = hf.MusicgenConfig(**{name: part.to_dict() for name, part in parts.items()})
    first = model_of(hf.MusicgenForConditionalGeneration, config, "eager")
    inputs = {"input_ids": torch.randint(3, 97, (2, 20)), "decoder_input_ids": torch.randint(0, 64, (4, 9))}
    with torch.no_grad():
        expected, found = (model(**inputs)[0] for model in (first, use_ringtile(copy.deepcopy(first))))
    assert_near(found, expected, TOLERANCE)


def test_a_number_that_the_kept_pairs_of_a_row_share_changes_nothing() -> None:
    query, keep = torch.randn(3, 2, 4, 30, 8), torch.rand(2, 4, 30, 30) < 0.3
    keep[..., 0] = True
    module = nn.Module()
    expected = attend(None, module, *query, keep)[0]
    numbers = torch.randn(2, 4, 30, 1)
    for low in (-1e4, -1e9, -torch.inf):
        found = attend(None, module, *query, torch.where(keep, numbers, low))[0]
        assert torch.equal(found, expected)
    for wrong in (torch.nan, torch.inf):
        with refused(r"a float mask of one number per row, .* a bias on the scores is not"):
            attend(None, module, *query, torch.where(keep, numbers, -1e9).index_fill(2, torch.tensor([7]), wrong))
    with refused("a float mask of one number per row"):
        attend(None, module, *query, torch.where(keep, numbers + (torch.arange(30) == 0), -1e9))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 20, dtype=torch.bool), r"got mask.shape=torch.Size\(\[2, 20\]\)"),
        (torch.ones(2, 1, 20, 19, dtype=torch.bool), "expected .* 20, 20"),
        (torch.ones(3, 1, 20, 20, dtype=torch.bool), r"expected \[2, 1 or 2, 20, 20\]"),
        (torch.ones(2, 3, 20, 20, dtype=torch.bool), r"expected \[2, 1 or 2, 20, 20\]"),
        (torch.ones(2, 1, 20, 20, dtype=torch.long), "expected bool, or a float mask"),
        (torch.ones(2, 1, 20, 20).tril(), "expected bool, or a float mask"),
    ],
)
def test_other_masks_are_refused(mask: Tensor, message: str) -> None:
    with refused(message):
        attended(mask, *torch.randn(3, 2, 2, 20, 16))


@pytest.mark.parametrize("shape", [(20,), (2, 20, 20)])
def test_masks_of_other_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    model = both("Llama", torch.float32, "ringtile")[1]
    with refused(r"attention_mask: expected \[2, N\] of the tokens, or .* of all pairs"):
        model(torch.ones(2, 20).long(), attention_mask=torch.ones(shape).bool())


def test_a_mask_that_changes_in_place_is_read_again() -> None:
    q = torch.randn(1, 2, 20, 16, dtype=torch.float64)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    before = attended(mask, q, q, q)
    assert torch.equal(attended(mask, q, q, q), before)
    mask[0, 0, 12, 5] = False
    assert_near(attended(mask, q, q, q), attention(q, q, q, mask)[0], 1e-12)


@pytest.mark.parametrize("name", ["position_bias", "topk_indices", "sinks", "cache", "head_mask"])
def test_arguments_that_change_the_result_are_refused(name: str) -> None:
    q = torch.randn(1, 2, 20, 16)
    attend(None, nn.Identity(), q, q, q, None, **{name: None})
    with refused(f"{name}: ringtile does not support"):
        attend(None, nn.Identity(), q, q, q, None, **{name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (3, "expected a Pattern, its text, None, a dict of layer kinds or a function"),
        (Causal, "expected a Pattern, its text, None, .*, got the class Causal: write Causal\\(\\)"),
        ({"full_attention": 3}, "expected a Pattern, its text, None, for each kind of layer, got int"),
        ("windw(4)", r"^pattern: unknown pattern 'windw', did you mean 'window'\?"),
        ({"full_attention": "windw(4)"}, "^pattern: unknown pattern 'windw'"),
        (Documents(ids=torch.tensor([[0, 1], [0, 0]])), "expected one for all batch elements"),
    ],
)
def test_a_pattern_that_is_none_is_refused(pattern: Any, message: str) -> None:
    with refused(message):
        register(pattern=pattern)


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A lazy module, which replaces the one that this file imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.4.0")
    with pytest.raises(ImportError, match=r"transformers: expected 5\.5 or newer, got 5\.4\.0"):
        register()


def test_the_oldest_version_is_told_once() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["transformers"] == [f"transformers>={'.'.join(map(str, OLDEST))},<6"]
    assert f"transformers {'.'.join(map(str, OLDEST))} " in PAGE


def test_the_page_lists_the_models_that_are_written_by_hand() -> None:
    section = re.search(r"^### .* transformers (\S+)\n(.*?)^#", PAGE, re.M | re.S)
    assert section is not None
    if hf.__version__.rpartition(".")[0] != section[1]:
        pytest.skip(f"the page is of transformers {section[1]}")
    own = set()
    for file in Path(hf.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        has_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\)", text, re.M)
        if (has_attention and "ALL_ATTENTION_FUNCTIONS" not in text) or "_CLASSES[config._attn_impl" in text:
            own.add(file.parent.name)
    listed = set(re.findall(r"`(\w+)`", section[2])) - {"use_ringtile"}
    assert len(listed) > 50
    assert listed == own - set(by_hand.CONVERTED) - biases._BY_HAND


def test_the_page_lists_the_models_that_are_tested() -> None:
    table = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", PAGE, re.M)
    listed = [name for row in table[1:] for name in row.strip().split(", ")]
    biased = {name.partition(", ")[0] for name in BIASED | WINDOWED | JOINED}
    assert set(listed) >= set(MODELS) | biased
    assert len(MODELS) + len(SPARSE) + len(biased) + len(COMPUTE_WITH_THEIR_MASK) == len(listed)


@pytest.mark.parametrize("name", ["", Window(4), "flash_ringtile", "my/ringtile", "ringtile|paged", "use_ringtile"])
def test_a_name_with_a_meaning_in_transformers_is_refused(name: Any) -> None:
    with refused("name: expected"):
        register(name)
    with refused(r"name: .* write register\(pattern='window\(64\)'\)"):
        register("window(64)")


def test_a_pattern_for_kinds_of_layers_and_as_text() -> None:
    tokens = torch.randint(3, 97, (2, TOKENS))

    def of_full_attention(layer: Any) -> Pattern | None:
        return Window(5) if layer.layer_idx == 1 else None

    patterns = ({"full_attention": Window(5)}, {"full_attention": "window(5)"}, of_full_attention)
    outs = [eager_and_sparse("Gemma3", pattern)[1](tokens).logits for pattern in patterns]
    outs += [eager_and_sparse("Gemma3", pattern)[1](tokens).logits for pattern in ("window(3)", lambda _: "window(3)")]
    register("ringtile-text", "window(3)")
    outs.append(model_of(*MODELS["Gemma3"](), "ringtile-text")(tokens).logits)
    plain = both("Gemma3", torch.float32)[1](tokens).logits
    for out, same in zip(outs, (outs[0],) * 3 + (outs[3],) * 3, strict=True):
        assert torch.equal(out, same)
        assert (out - plain).abs().max() > 1e-2
    assert not torch.equal(outs[0], outs[3])
    with refused(r"expected kinds of layers among .*, got \['all'\]"):
        eager_and_sparse("Gemma3", {"all": Window(5)})[1](tokens)
    with refused("GPT2Attention has no kind of layer"):
        eager_and_sparse("GPT-2", {"full_attention": Window(5)})[1](tokens)


@pytest.mark.parametrize("name", ["BART", *JOINED])
def test_a_pattern_for_a_model_with_cross_attention_is_a_function(name: str) -> None:
    tokens = torch.randint(3, 90, (2, 40))
    with refused("expected a function of the attention module for a model with cross att"):
        eager_and_sparse(name, Window(5))[1](tokens, decoder_input_ids=tokens)
    if name == "BART":
        model, in_encoder = eager_and_sparse(name, lambda layer: None if layer.is_decoder else Window(5))
        outs = [each(tokens, decoder_input_ids=tokens)[0] for each in (model, in_encoder)]
        assert (outs[1] - outs[0]).abs().max() > 1e-3


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with refused(r"got BertModel without one; for a model of .* call .*use_ringtile$"):
        replace_attention(hf.BertModel(hf.BertConfig(**ENCODER)), pattern=Window(3))
    with refused(r"^model: expected a model of transformers, got Linear\(in_features=2"):
        use_ringtile(nn.Linear(2, 2))
    with refused(r"^model: expected .*, got Sequential; pass the BertModel in it"):
        use_ringtile(nn.Sequential(hf.BertModel(hf.BertConfig(**ENCODER))))
    with refused(r"^model: expected a model of transformers, got <class"):
        use_ringtile(hf.BertModel)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_keeps_its_pattern(copied: Callable[[Any], Any]) -> None:
    tokens = torch.randint(3, 97, (2, TOKENS))
    models = [eager_and_sparse("Mistral", pattern)[1] for pattern in (Window(3), Window(5))]
    outs, again = ([model(tokens).logits for model in each] for each in (models, map(copied, models)))
    assert torch.equal(torch.stack(again), torch.stack(outs))
    assert (outs[0] - outs[1]).abs().max() > 1e-2


def test_a_model_loads_in_another_process_and_no_sooner_does_transformers(tmp_path: Path) -> None:
    tokens = torch.randint(3, 97, (2, TOKENS))
    model = eager_and_sparse("Mistral", Window(3))[1]
    torch.save((model, tokens, model(tokens).logits), tmp_path / "model.pt")
    probe = (
        "import sys, torch; torch.set_num_threads(1); "
        "import ringtile.integrations.transformers as it; it.register; assert 'transformers' not in sys.modules; "
        "model, tokens, logits = torch.load(sys.argv[1], weights_only=False); "
        "assert (model(tokens).logits - logits).abs().max() < 1e-6"
    )
    subprocess.run([sys.executable, "-c", probe, str(tmp_path / "model.pt")], check=True)


def test_a_model_without_a_pattern_of_its_own_does_not_take_that_of_another(tmp_path: Path) -> None:
    made, config = MODELS["Mistral"]()
    tokens = torch.randint(3, 97, (2, TOKENS))
    first, second = made(config), made(config)
    use_ringtile(first, Window(3))
    with refused(r"pattern: MistralAttention is new, or .* call use_ringtile\(model, ...\)"):
        second(tokens)
    # A saved model has no implementation.
    first.save_pretrained(tmp_path)
    loaded = made.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(use_ringtile(loaded, Window(3))(tokens).logits, first(tokens).logits)


def test_a_model_that_is_gone_leaves_nothing() -> None:
    def compute(*args: Any, **options: Any) -> Tensor:
        return torch.zeros(0)

    model = use_ringtile(model_of(*MODELS["Llama"](), "eager"), attend=compute)
    gone = weakref.ref(compute)
    del model, compute
    gc.collect()
    assert gone() is None
    names = [name for name in hf.AttentionInterface._global_mapping if "ringtile" in name]
    assert names == ["ringtile", "use_ringtile"]


def test_bounds_of_other_rows_are_refused() -> None:
    q, bounds = torch.randn(1, 2, 61, 16), torch.tensor([0, 7, 40, 61])
    with refused("cu_seq_lens_q: expected bounds of one row of 61 tokens"):
        attend(None, nn.Identity(), q, q, q, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds + 1)


@pytest.mark.parametrize("n_queries", [1, 6])
def test_masks_are_read_in_inference_mode_and_not_kept(n_queries: int) -> None:
    tensors = [torch.randn(1, 2, n, 8) for n in (n_queries, 6, 6)]
    with torch.inference_mode():
        mask = torch.rand(1, 1, n_queries, 6) < 0.5
        for _ in range(2):
            found, _ = attend(None, nn.Module(), *tensors, mask)
            keep = mask | ~mask.any(-1, keepdim=True)
            expected = F.scaled_dot_product_attention(*tensors, attn_mask=keep) * mask.any(-1, keepdim=True)
            assert (found.transpose(1, 2) - expected).abs().max() < 1e-6
            mask[..., 0].logical_not_()
    mask = torch.rand(1, 1, n_queries, 6) < 0.5
    attend(None, nn.Module(), *tensors, mask)
    gone = weakref.ref(mask)
    del mask
    assert gone() is None
