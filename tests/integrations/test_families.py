"""Every family of transformers on ringtile: outputs, gradients, tokens and copies are those of eager attention."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from families import (
    ALL,
    SPEECH,
    T5_FAMILY,
    TOKENS,
    WAVES,
    WITHOUT_A_MASK,
    Doubled,
    Largest,
    assert_equal_models,
    both,
    built,
    error_of,
    graph_counter,
    inputs_of,
    outcome,
    padding,
    registered,
)
from oracle import assert_near
from tiny import BIASED, JOINED, MODELS, SPARSE, WINDOWED, hf

from ringtile.integrations.transformers import indexers, use_ringtile

pytestmark = [
    pytest.mark.usefixtures("_registered"),
    # Of torch's own tracing of a Function, and of the eager attention of WavLM.
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]
DECODERS = ["Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3", "Mixtral", "GPT-2"]
DECODERS += ["Llama 4", "gpt-oss"]
SLOPES = ["BLOOM", "MPT"]
CHOOSING = ["deepseek_v32", "dots3_note", "minimax_m3_vl", "deepseek_v4", "glm5_next", "qwen4_exp"]
"""Families that were trained sparse, one for each way to choose. `SPARSE` has more of the first."""


@pytest.fixture(scope="module")
def _registered() -> Any:
    with registered():
        yield


def kinds_of(name: str, number: int) -> tuple[str, ...]:
    """Which batches a family gets: with padding on a side, without, or of packed documents."""
    if name in (*WITHOUT_A_MASK, *WINDOWED, "ViT", "Whisper"):
        return ("no",)
    if name in T5_FAMILY[1:]:
        return ("left",)
    if name in DECODERS[:7]:
        return "left", "packed"
    if name in ("T5", "w2v-BERT", "DeBERTa-v2", "BLOOM"):
        return "left", "right", "no"
    kinds = ("left", "right") if name in BIASED else ("left", ("right", "no")[number % 2])
    # Blocks of MiniMax-M3 are made of padding on the left.
    return (*kinds, "packed") if name in SPARSE and name != "minimax_m3_vl" else kinds[name == "minimax_m3_vl" :]


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for number, name in enumerate(ALL) for kind in kinds_of(name, number)]
)
def test_a_model_computes_what_it_does_with_eager(name: str, kind: str) -> None:
    inputs, real = inputs_of(name, kind)
    assert_equal_models(*both(name), real, 1e-10, **inputs)


@pytest.mark.parametrize("name", CHOOSING)
def test_a_name_without_use_ringtile(name: str) -> None:
    inputs, real = inputs_of(name, "right" if name in ("dots3_note", "minimax_m3_vl") else "left")
    assert_equal_models(*both(name, how="ringtile"), real, 1e-10, **inputs)


FLOAT32 = ["Llama", "gpt-oss", "Gemma 4", "Whisper", "T5", "wav2vec2-conformer", "w2v-BERT", "SeamlessM4T v2", "WavLM"]
FLOAT32 += ["Granite Speech 5", "Granite Speech", "MPNet", "DeBERTa-v2", *SLOPES, "Swin", "Swin v2", "CLAP"]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_is_as_close_as_eager(name: str) -> None:
    inputs, real = inputs_of(name, "right")
    with Doubled():
        truth = outcome(both(name)[0], real, inputs)
    inputs = {field: x.float() if x.is_floating_point() else x for field, x in inputs.items()}
    errors = [error_of(outcome(copy.deepcopy(model).float(), real, inputs), truth) for model in both(name)]
    assert errors[1] <= max(1e-5, 2 * errors[0])


STEPS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, ("static", "dynamic")[number % 2]) for number, name in enumerate(DECODERS)),
        *(("Mistral", "static"), ("Gemma3", "dynamic"), ("Gemma 4", "dynamic"), ("Gemma 4", "static")),
        *((name, how) for name in ("T5", *SLOPES) for how in STEPS),
        *((name, how) for name in ("BART", *JOINED) for how in ("dynamic", "beams")),
        ("UMT5", "static"),
        *((name, "dynamic") for name in SPARSE),
        *((name, "static") for name in CHOOSING if name != "deepseek_v4"),
    ],
)
def test_generation_is_that_of_eager(name: str, how: str) -> None:
    inputs, _ = inputs_of(name, "no" if name == "minimax_m3_vl" else "left")
    prompt = {field: x for field, x in inputs.items() if field in ("input_ids", "attention_mask")}
    steps = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad(), Doubled():
        first, second = (model.generate(**prompt, **steps, **STEPS[how]) for model in both(name))
    assert torch.equal(first.sequences, second.sequences)
    assert_near(torch.stack(second.scores), torch.stack(first.scores), 1e-8)


@pytest.mark.parametrize("name", [*DECODERS, *SLOPES, "Pix2Struct"])
def test_a_prompt_in_chunks(name: str) -> None:
    inputs, real = inputs_of(name, "left")
    first, second = both(name)
    with torch.no_grad(), Doubled():
        whole, found, cache = first(**inputs).logits, [], hf.DynamicCache(config=second.config)
        for begin, end in ((0, 25), (25, 26), (26, 55), (55, TOKENS)):
            part = {"input_ids": inputs["input_ids"][:, begin:end], "attention_mask": inputs["attention_mask"][:, :end]}
            found.append(second(**part, past_key_values=cache, use_cache=True).logits)
    assert_near(torch.cat(found, 1)[real], whole[real], 1e-10)


@pytest.mark.parametrize("name", ["T5", *SLOPES, "Pix2Struct", *JOINED, *CHOOSING])
def test_the_future_changes_nothing(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    field = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = {**inputs, field: torch.cat([inputs[field][:, :20], inputs[field][:, 20:] * 5 % 90], 1)}
    with torch.no_grad(), Doubled():
        first, second = (both(name)[1](**each)[0] for each in (inputs, changed))
    # Experts multiply all tokens that chose them, whose number decides the rounding.
    assert_near(second[:, :20], first[:, :20], 1e-12 if name in SPARSE else 0)
    assert not torch.equal(first[:, 20], second[:, 20])


LONG = {key: {"max_source_positions": 700} for key in ("wav2vec2-conformer", "w2v-BERT, relative")}
LONG |= {"MPT": {"max_seq_len": 600}, "MPNet": {"max_position_embeddings": 610}}
LONG["DeBERTa-v2"] = {"max_position_embeddings": 600}
LONG |= {name: {"max_position_embeddings": 4096} for name in SPARSE}
# Linear attention has larger tensors than these, in proportion to the tokens.
LONG["glm5_next"] |= {"layer_types": ["indexed_attention"] * 3}


@pytest.mark.parametrize(
    "name", ["T5", "UMT5", *WAVES, *SPEECH[:2], "Parakeet", "MPNet", "DeBERTa-v2", *SLOPES, *CHOOSING]
)
def test_no_tensor_has_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Products with vectors of distances are computed in pieces of so many bytes.
    monkeypatch.setattr("ringtile.kernels.bias._BYTES", 1 << 20)
    most, sizes = [], (2200, 600) if name in SPARSE else (600, 300)
    # Of eager attention, which takes seconds where it is long, it is enough to see that such a tensor is found.
    for how, n in zip(("use_ringtile", "eager"), sizes, strict=True):
        ids = torch.randint(3, 90, (1, n))
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(n) < n - 100).long()[None]}
        if name in SPARSE:
            inputs = {"input_ids": ids}
        elif name in T5_FAMILY:
            inputs["decoder_input_ids"] = ids
        elif name in WAVES:
            inputs = {"input_values": torch.randn(1, 4 * n + 6)}
        elif name in SPEECH:
            frames = torch.randn(1, n * (4 if name == "Parakeet" else 1), 16)
            real = torch.arange(frames.shape[1]) < frames.shape[1] - n // 4
            inputs = {"input_features": frames, "attention_mask": real.long()[None]}
        model, learns = built(name, how, torch.float32, **LONG.get(name, {})), name not in SPARSE and not most
        with torch.set_grad_enabled(learns), Largest() as largest:
            out = model(**inputs)[0]
            if learns:
                out.sum().backward()
        most.append(largest.most)
    assert most[0] < sizes[0] ** 2
    assert most[1] >= (2 if name in SPARSE else 4) * sizes[1] ** 2


@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    [("BERT", True), ("gpt-oss", False), ("T5", False), ("T5", True), ("glm_moe_dsa", True), ("minimax_m3_vl", False)],
)
def test_checkpoints_give_the_same_gradients(name: str, use_reentrant: bool) -> None:
    # Layers of T5 share a table, whose gradients may be added in another order.
    dtype, tolerance = (torch.float64, 1e-10) if name == "T5" else (torch.float32, 0)
    inputs, real = inputs_of(name, "right")
    inputs |= {} if name == "BERT" else {"use_cache": False}
    found = []
    for checkpoints in (False, True):
        model = copy.deepcopy(both(name, dtype)[1]).train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        found.append(outcome(model, real, inputs))
    assert error_of(*found) <= tolerance


@pytest.mark.parametrize("name", ["T5", "w2v-BERT", "Parakeet", "DeBERTa-v2", "BLOOM", "MPNet", "Swin", *CHOOSING])
def test_copies_and_switches(name: str) -> None:
    inputs, _ = inputs_of(name, "right")
    first, second = both(name)
    with torch.no_grad(), Doubled():
        expected = second(**inputs)[0]
        for other in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
            assert torch.equal(other(**inputs)[0], expected)
            for module in other.modules():
                # What stands for a method is bound to the copy.
                methods = indexers.INDEXERS.get(type(module).__name__, ())
                assert all(module.__dict__[method].args[-1] is module for method in methods)
        if name not in ("DeBERTa-v2", "BLOOM", "MPNet"):
            # transformers changes no name of a model whose attention is written by hand.
            back = copy.deepcopy(second)
            back.set_attn_implementation("eager")
            assert torch.equal(back(**inputs)[0], first(**inputs)[0])
            assert torch.equal(use_ringtile(back)(**inputs)[0], expected)
        for key, weight in first.state_dict().items():
            assert torch.equal(second.state_dict()[key], weight)


@pytest.mark.parametrize(
    "name", ["UMT5", "w2v-BERT", "Parakeet", "Granite Speech 5", "DeBERTa-v2", "BLOOM", "MPT", "MPNet"]
)
def test_a_model_is_one_graph(name: str) -> None:
    inputs, real = inputs_of(name, "right")
    model, counter = built(name, "use_ringtile", num_hidden_layers=1), graph_counter()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend=counter)(**inputs)[0]
        assert_near(found[real], model(**inputs)[0][real], 1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "name",
    (
        "Gemma2; Gemma3; gpt-oss; Mistral; BERT; BART; T5; w2v-BERT; Parakeet; BLOOM; DeBERTa-v2; WavLM; MPNet; Swin; "
        "Swin v2"
    ).split("; "),
)
def test_weights_are_those_of_eager(name: str) -> None:
    inputs, real = inputs_of(name, "right" if name in MODELS else "no")
    with torch.no_grad(), Doubled():
        first, second = (model(**inputs, output_attentions=True) for model in both(name))
    assert_near(second[0][real], first[0][real], 1e-7)
    names = [key for key in first if key.endswith("attentions")]
    assert names
    assert [key for key in second if key.endswith("attentions")] == names
    for key in names:
        for expected, weights in zip(first[key], second[key], strict=True):
            rows = padding("right")[:, None, :, None] if name in MODELS and weights.shape[2] == TOKENS else 1
            assert_near(weights * rows, expected * rows, 1e-7)
