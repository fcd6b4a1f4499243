"""Ragged batches as documents of one row (`use_ringtile(model, pack=True)`) beside the padded call."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from families import TOKENS, assert_equal_models, padding, randomized
from oracle import refused
from tiny import DECODER, ENCODER, MIXED, hf
from torch import Tensor

from ringtile.adaptive import AdaptiveAttention, Blend, Choice, Density
from ringtile.integrations.transformers import packing, use_ringtile
from ringtile.patterns import GlobalTokens, Pattern, Segments, Window

# Of torch's own tracing of a Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
TOLERANCE = 1e-10
NO_HEAD_DIM = {name: value for name, value in DECODER.items() if name != "head_dim"}

SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "llama", "qwen3"), DECODER),
    "distilbert": dict(vocab_size=97, dim=64, hidden_dim=96, n_layers=2, n_heads=4),
    "electra": dict(ENCODER, embedding_size=32),
    "eurobert": dict(DECODER, mask_token_id=3),
    "gemma2": dict(MIXED, query_pre_attn_scalar=16),
    "gemma3_text": MIXED,
    "gemma3_text, bidirectional": dict(MIXED, use_bidirectional_attention=True),
    "granite": NO_HEAD_DIM,
    "mistral": dict(DECODER, sliding_window=20),
    "modernbert": dict(ENCODER, num_hidden_layers=4, local_attention=16, global_attn_every_n_layers=2, cls_token_id=1),
    "phi3": dict(DECODER, sliding_window=20),
    "qwen2": dict(NO_HEAD_DIM, use_sliding_window=True, sliding_window=20, max_window_layers=1),
}
"""Sizes of models by type. The others have those of `ENCODER`."""
POOLERS = ["bert", "camembert", "ernie", "jina_embeddings_v3", *sorted(packing._ROBERTA - {"camembert"})]


def model_of(name: str, made: str = "AutoModel") -> Any:
    """A model in float64 on PyTorch's own attention."""
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(name.partition(",")[0], **SIZES.get(name, ENCODER))
    # PyTorch has no softcap, and transformers' eager attention no softmax in float64.
    model = getattr(hf, made).from_config(config, attn_implementation="eager" if name == "gemma2" else "sdpa")
    model = randomized(model).double()
    return use_ringtile(model) if name == "gemma2" else model


def packed(model: Any, **options: Any) -> Any:
    return use_ringtile(copy.deepcopy(model), pack=True, **options)


@cache
def both(name: str, made: str = "AutoModel") -> tuple[Any, Any]:
    """A model and the same with packed rows, shared by the tests that change neither."""
    model = model_of(name, made)
    return model, packed(model)


def batch_of(real: Tensor) -> dict[str, Tensor]:
    tokens = torch.randint(3, 97, real.shape)
    # A real token can have the number of padding.
    tokens[-1, 5] = 0
    return {"input_ids": tokens.masked_fill(~real, 0), "attention_mask": real.long()}


def seen_rows(model: Any, **inputs: Any) -> tuple[int, ...]:
    """The sizes of the largest hidden states that a linear map gets, without the last."""
    shapes: list[torch.Size] = []
    hooks = [
        part.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape[:-1]))
        for part in model.base_model.modules()
        if isinstance(part, torch.nn.Linear)
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return max((tuple(shape) for shape in shapes), key=math.prod)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in [*sorted(packing._PACKED), "gemma3_text, bidirectional"]
        for kind in ("right", "left")[: 2 - (name in POOLERS)]
    ],
)
def test_real_tokens_have_the_outputs_of_the_padded_call(name: str, kind: str) -> None:
    first, second = both(name)
    real = padding(kind, 4)
    # A document of one token.
    real[2] = torch.arange(TOKENS) == (TOKENS - 1 if kind == "left" else 0)
    inputs = batch_of(real)
    with torch.no_grad():
        expected, found = (model(**inputs, output_hidden_states=True) for model in (first, second))
    for theirs, ours in zip((expected[0], *expected.hidden_states), (found[0], *found.hidden_states), strict=True):
        assert (ours - theirs)[real].abs().max() <= TOLERANCE
        assert not ours[~real].any()
    if name in POOLERS:
        assert (found.pooler_output - expected.pooler_output).abs().max() <= TOLERANCE
    # Documents that see each other, and padding that is computed, would be found.
    assert seen_rows(second, **inputs) == (1, int(real.sum()))
    moved = {**inputs, "input_ids": inputs["input_ids"].clone()}
    moved["input_ids"][0] = torch.where(real[0], 96 - inputs["input_ids"][0], 0)
    with torch.no_grad():
        assert torch.equal(second(**moved)[0][1:], found[0][1:])
        assert (second(**moved)[0][0] - found[0][0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["xlm-roberta", "modernbert", "qwen3"])
def test_gradients_are_those_of_the_padded_call(name: str) -> None:
    real = padding("right")
    assert_equal_models(*map(copy.deepcopy, both(name)), real, TOLERANCE, **batch_of(real))


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "gemma2"])
def test_heads_see_padded_rows(name: str) -> None:
    first, second = both(name, "AutoModelForSequenceClassification")
    inputs = batch_of(padding("right"))
    assert (second(**inputs).logits - first(**inputs).logits).abs().max() <= TOLERANCE
    assert seen_rows(second, **inputs)[0] == 1


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "qwen3"])
def test_embeddings_positions_and_kinds_of_tokens_may_be_given(name: str) -> None:
    first, second = both(name)
    real = padding("right")
    inputs: dict[str, Tensor] = {"inputs_embeds": torch.randn(3, TOKENS, 64).double(), "attention_mask": real.long()}
    if name != "roberta":
        # RoBERTa counts them itself.
        inputs["position_ids"] = torch.randint(200, (1, TOKENS)).sort()[0]
    if name == "bert":
        inputs["token_type_ids"] = torch.randint(2, (3, TOKENS))
    assert ((second(**inputs)[0] - first(**inputs)[0])[real]).abs().max() <= TOLERANCE
    if name == "bert":
        arguments = [inputs.get(each) for each in ("input_ids", "attention_mask", "token_type_ids", "position_ids")]
        assert torch.equal(second(*arguments, inputs["inputs_embeds"])[0], second(**inputs)[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_one_mask_and_positions_may_be_for_all_rows(rows: int) -> None:
    first, second = both("qwen3")
    row = torch.arange(TOKENS) < 40
    ids, place = torch.randint(3, 97, (rows, TOKENS)), torch.arange(5, TOKENS + 5).unsqueeze(0)
    expected = first(ids, attention_mask=row.long().expand(rows, -1), position_ids=place)[0]
    inputs = {"attention_mask": row.long().unsqueeze(0), "position_ids": place}
    found = second(ids, **inputs)[0]
    assert (found - expected)[:, row].abs().max() <= TOLERANCE
    assert not found[:, ~row].any()
    assert seen_rows(second, input_ids=ids, **inputs) == (1, 40 * rows)


@pytest.mark.parametrize(("name", "mask"), [("bert", None), ("qwen3", torch.ones(3, TOKENS).long())])
def test_rows_without_padding_stay_as_they_are(name: str, mask: Tensor | None) -> None:
    first, second = both(name)
    inputs = {"input_ids": torch.randint(3, 97, (3, TOKENS)), "attention_mask": mask}
    found = second(**inputs)
    assert (found[0] - first(**inputs)[0]).abs().max() <= TOLERANCE
    assert found.get("past_key_values") is None
    assert seen_rows(second, **inputs) == (3, TOKENS)


@pytest.mark.parametrize(
    ("pattern", "kind"), [(Window(7) | GlobalTokens([0, 9]), "no"), (Segments(8), "left"), (Window(7), "right")]
)
def test_a_pattern_is_kept_in_each_row(pattern: Pattern, kind: str) -> None:
    model = model_of("llama")
    inputs = batch_of(real := padding(kind))
    expected = use_ringtile(copy.deepcopy(model), pattern)(**inputs, use_cache=False)[0]
    found = packed(model, pattern=pattern)(**inputs)[0]
    assert ((found - expected)[real]).abs().max() <= TOLERANCE
    assert ((found - both("llama")[0](**inputs)[0])[real]).abs().max() > 1e-3


def test_a_trainer_gives_the_number_of_its_tokens() -> None:
    first, second = both("modernbert", "AutoModelForMaskedLM")
    inputs = batch_of(real := padding("right"))
    inputs["labels"] = inputs["input_ids"].masked_fill(~real, -100)
    losses = [model(**inputs, num_items_in_batch=torch.tensor(50)).loss for model in (first, second)]
    assert (losses[1] - losses[0]).abs() <= TOLERANCE


def test_packing_ends_with_the_switch() -> None:
    model = model_of("modernbert")
    inputs = batch_of(padding("right"))
    expected = model(**inputs)[0]
    for _ in range(2):
        use_ringtile(model, pack=True)
    assert seen_rows(model, **inputs)[0] == 1
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(**inputs)[0], model(**inputs)[0])
        assert seen_rows(again, **inputs)[0] == 1
    assert seen_rows(use_ringtile(model), **inputs)[0] == 3
    use_ringtile(model, pack=True).set_attn_implementation("sdpa")
    assert torch.equal(model(**inputs)[0], expected)


def test_a_compiled_model_packs_outside_graphs() -> None:
    # A window of another model makes the window of this one an unknown number, which no graph of packed rows takes.
    torch._dynamo.reset()
    first, second = both("gemma3_text")
    compiled = torch.compile(copy.deepcopy(second), backend="eager")
    for kind in ("right", "left"):
        inputs = batch_of(real := padding(kind))
        with torch.no_grad():
            assert ((compiled(**inputs)[0] - first(**inputs)[0])[real]).abs().max() <= TOLERANCE


def test_models_that_cannot_pack_are_refused() -> None:
    gpt = hf.GPT2Model(hf.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    with refused(r"^pack: expected a model among bert, .*, got gpt2$"):
        use_ringtile(gpt, pack=True)
    assert gpt.config._attn_implementation == "sdpa"
    longformer = hf.LongformerModel(hf.LongformerConfig(**ENCODER, attention_window=8))
    with refused(r"^pack: longformer has its own, got True$"):
        use_ringtile(longformer, pack=True)
    for argument in ({"attend": AdaptiveAttention()}, {"decode": Choice(Blend(None), Density(0.5))}):
        with refused(r"^pack: expected False with attend= or decode=, which choose by row"):
            use_ringtile(model_of("llama"), pack=True, **argument)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_cache": True}, "use_cache: expected False for packed rows"),
        ({"past_key_values": []}, "use_cache: expected False for packed rows"),
        ({"cache": []}, "use_cache: expected False for packed rows"),
        ({"attention_mask": torch.ones(3, 1, TOKENS, TOKENS)}, "attention_mask: expected .3, 61. of the tokens"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask: expected .3, 61. of the tokens .* got dict"),
        ({"position_ids": torch.zeros(3, 3, TOKENS)}, "position_ids: expected .3, 61. of the tokens"),
        ({"position_ids": torch.zeros(2, TOKENS)}, "position_ids: expected .3, 61. of the tokens"),
        ({"pixel_values": torch.zeros(3, TOKENS)}, "pixel_values: expected None, beside input_ids, "),
        ({"attention_mask": torch.arange(3 * TOKENS).view(3, TOKENS) % 7 != 4}, "one run of tokens .* got .9, 9, 10."),
        ({"attention_mask": torch.arange(3)[:, None].expand(3, TOKENS)}, "one run of tokens .* got .0, 1, 1. runs"),
        ({"num_items": torch.ones(2)}, r"num_items: expected None, beside input_ids, .* got Tensor .2,."),
        ({"input_ids": None}, r"input_ids: expected tokens \[B, N\], or inputs_embeds, got None"),
        ({"return_dict": False}, "return_dict: expected True to pack rows, got False"),
    ],
)
def test_arguments_that_cannot_be_packed_are_refused(change: dict[str, Any], message: str) -> None:
    inputs = {**batch_of(padding("right")), **change}
    with refused(message):
        both("qwen3")[1](**inputs)


def test_a_model_that_generates_is_refused() -> None:
    with refused(r"^use_cache: expected False for packed rows, .*; leave pack= out to generate"):
        packed(model_of("qwen3", "AutoModelForCausalLM")).generate(**batch_of(padding("left")), max_new_tokens=2)


def test_padding_before_pooled_tokens_is_refused() -> None:
    with refused("attention_mask: expected padding on the right to pack rows, whose first"):
        both("bert")[1](**batch_of(padding("left")))


def test_outputs_that_are_not_of_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(model_of("bert"))
    forward = type(model).forward

    def with_more(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        output["odd"] = output[0]
        return output

    monkeypatch.setattr(type(model), "forward", with_more)
    with refused("odd: expected no such output to pack rows, got Tensor"):
        model(**batch_of(padding("right")))


def test_a_model_whose_forward_is_replaced_is_refused() -> None:
    model = model_of("bert")
    model.forward = lambda **inputs: None
    with refused("pack: expected a model with its own forward, got <function"):
        use_ringtile(model, pack=True)


def test_the_arguments_of_a_model_are_still_known() -> None:
    first, second = both("qwen3")
    assert inspect.signature(second.forward) == inspect.signature(first.forward)
    assert "attention_mask" in inspect.signature(second.forward).parameters


def test_a_layer_that_is_called_alone_is_refused() -> None:
    model = packed(model_of("bert"))
    with refused("pack: expected a call of the whole model, got one of BertSelfAttention"):
        model.encoder.layer[0](torch.randn(1, 5, 64).double())
