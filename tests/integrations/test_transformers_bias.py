"""Models of transformers whose scores have a bias: the results of eager attention, without numbers of all pairs."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_hf_sparse import Doubled, Largest
from test_transformers import ROOT, assert_equal_models, graph_counter, padding, randomized, registered
from tiny import BIASED, WINDOWED, hf
from torch import Tensor, nn

from ringtile.integrations.transformers import biases, registry, use_ringtile
from ringtile.integrations.transformers.attention import attend
from ringtile.patterns import Window

pytestmark = [
    # Of torch's own tracing of a Function, and of the eager attention of WavLM.
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
]
TOKENS = 61
T5_FAMILY = ["T5", "mT5", "UMT5", "LongT5", "Switch", "Pop2Piano"]
SPEECH = ["w2v-BERT", "w2v-BERT, relative", "SeamlessM4T", "SeamlessM4T v2", "Parakeet"]
SPEECH += ["Granite Speech 5", "Granite Speech", "Granite Speech Plus"]
WITHOUT_A_MASK = ("Granite Speech", "Granite Speech Plus")
WAVES = ["wav2vec2-conformer", "WavLM"]
DECODERS = ["BLOOM", "MPT"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered():
        yield


def built(name: str, dtype: torch.dtype = torch.float64, **change: Any) -> Any:
    made, config = (BIASED | WINDOWED)[name]()
    for field, value in change.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    # In eager attention, SeamlessM4T v2 adds its bool mask to the scores: 1 for each pair that it keeps.
    how = "sdpa" if name == "SeamlessM4T v2" else "eager"
    # Granite Speech 5 makes a part in float32.
    return randomized(made._from_config(config, attn_implementation=how, dtype=dtype).to(dtype))


@cache
def both(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A model with eager attention and the same on ringtile, shared by the tests that change neither."""
    model = built(name, dtype)
    return model, use_ringtile(copy.deepcopy(model))


def inputs_of(name: str, kind: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], Tensor]:
    """A ragged batch, and the outputs that are real: those of no padding."""
    generator = torch.Generator().manual_seed(1)
    mask, ids = padding(kind), torch.randint(3, 97, (3, TOKENS), generator=generator)
    masks: dict[str, Any] = {} if kind == "no" else {"attention_mask": mask.long()}
    if name in T5_FAMILY:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :23], **masks}, mask.new_ones(3, 23)
    if name in WINDOWED:
        height, width = {"CLAP": (64, 16), "Swin2SR": (12, 12)}.get(name, (22, 22))
        field = "input_features" if name == "CLAP" else "pixel_values"
        channels = 1 if name == "CLAP" else 3
        return {field: torch.randn(2, channels, height, width, dtype=dtype, generator=generator)}, mask.new_ones(2)
    if name in WAVES:
        samples = torch.randn(3, 250, dtype=dtype, generator=generator)
        # It drops padding on the left by the number of samples, and mixes padding by its convolutions.
        return {"input_values": samples, **({"attention_mask": padding(kind, 3, 250).long()} if masks else {})}, (
            mask.new_ones(3, TOKENS)
        )
    if name in SPEECH:
        frames = torch.randn(3, 4 * TOKENS, 16, dtype=dtype, generator=generator)
        if name in WITHOUT_A_MASK:
            return {"hidden_states": frames}, mask.new_ones(3, 4 * TOKENS)
        # They count the samples that are real, and take as many from the left.
        of_left = name in ("Parakeet", "SeamlessM4T v2") and masks
        real = padding("right" if of_left else kind, 3, 4 * TOKENS)
        found = {"input_features": frames, **({"attention_mask": real.long()} if masks else {})}
        halves = real[:, ::2] & real[:, 1::2]
        kept = {"Granite Speech 5": halves, "SeamlessM4T": halves.new_ones(3, 2 * TOKENS + 1), "Parakeet": real[:, ::4]}
        kept["SeamlessM4T v2"] = F.pad(real[:, ::2], (0, 1))
        return found, kept.get(name, real)
    return {"input_ids": ids, **masks}, mask


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in BIASED for kind in ("no", "left", "right")[: 1 if name in WITHOUT_A_MASK else 3]],
)
def test_a_model_computes_what_it_does_with_eager(name: str, kind: str) -> None:
    inputs, real = inputs_of(name, kind)
    with Doubled():
        assert_equal_models(*both(name), real, 1e-10, **inputs)


def found_by(model: Any, real: Tensor, inputs: dict[str, Any]) -> list[Tensor]:
    """The outputs that are real, and all gradients, in parts of the largest gradient."""
    model.zero_grad()
    output = model(**inputs)[0][real]
    output.square().sum().backward()
    grads = [weight.grad.double() for weight in model.parameters() if weight.grad is not None]
    largest = max(grad.abs().max() for grad in grads)
    return [output.double() / output.abs().max(), *(grad / largest for grad in grads)]


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_pictures_are_those_of_eager(name: str) -> None:
    inputs, real = inputs_of(name, "no")
    with Doubled():
        first, second = (found_by(model, real, inputs) for model in both(name))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-10)
    of_table = [weight for key, weight in both(name)[1].named_parameters() if "position_bias" in key]
    assert of_table
    assert all(weight.grad.abs().max() > 0 for weight in of_table if weight.grad is not None)
    if name == "Swin":
        # One layer of windows, and one that shifts them.
        model = built(name, depths=[2], num_heads=[2], num_layers=1, hidden_size=16)
        compiled = torch.compile(use_ringtile(copy.deepcopy(model)), backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*BIASED, *WINDOWED])
def test_float32_is_as_close_as_eager(name: str) -> None:
    inputs, real = inputs_of(name, "right")
    with Doubled():
        truth = found_by(both(name)[0], real, inputs)
    inputs = {field: x.float() if x.is_floating_point() else x for field, x in inputs.items()}
    errors = []
    for model in both(name):
        found = found_by(copy.deepcopy(model).float(), real, inputs)
        errors.append(max(float((a - b).detach().abs().max()) for a, b in zip(found, truth, strict=True)))
    assert errors[1] <= max(1e-5, 2 * errors[0])


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
@pytest.mark.parametrize("name", [*T5_FAMILY[:-1], *DECODERS])
def test_generation_is_that_of_eager(name: str, how: dict[str, Any]) -> None:
    inputs, _ = inputs_of(name, "left")
    prompt = {field: inputs[field] for field in ("input_ids", "attention_mask")}
    steps = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        first, second = (copy.deepcopy(model).float().generate(**prompt, **steps, **how) for model in both(name))
    assert torch.equal(first.sequences, second.sequences)
    scores = torch.stack(first.scores)
    torch.testing.assert_close(torch.stack(second.scores), scores, rtol=0, atol=1e-5 * float(scores.abs().max()))


@pytest.mark.parametrize("name", [*DECODERS, "Pix2Struct"])
def test_a_prompt_in_chunks_is_the_whole(name: str) -> None:
    inputs, real = inputs_of(name, "left", torch.float32)
    model = copy.deepcopy(both(name)[1]).float()
    with torch.no_grad():
        whole, cache = model(**inputs).logits, None
        for first, end in ((0, 20), (20, 45), (45, 46), (46, TOKENS)):
            part = {"input_ids": inputs["input_ids"][:, first:end], "attention_mask": inputs["attention_mask"][:, :end]}
            out = model(**part, past_key_values=cache, use_cache=True)
            cache, rows = out.past_key_values, real[:, first:end]
            torch.testing.assert_close(out.logits[rows], whole[:, first:end][rows], rtol=0, atol=1e-5)


def test_a_table_counts_from_the_first_token_of_a_static_cache() -> None:
    ids, decoded = torch.randint(3, 97, (2, 30)), torch.randint(3, 97, (2, 15))
    # The mask of all pairs counts from its last key, and the cache has room for 25 more.
    far = torch.arange(40) > torch.arange(10, 15)[:, None]
    mask = torch.zeros(2, 1, 5, 40, dtype=torch.float64).masked_fill(far, torch.finfo(torch.float64).min)
    first, model = both("T5")
    with torch.no_grad():
        expected = first(input_ids=ids, decoder_input_ids=decoded)[0][:, 10:]
        caches = hf.StaticCache(config=model.decoder.config, max_cache_len=40), hf.DynamicCache()
        given = {"encoder_outputs": model.encoder(ids), "past_key_values": hf.EncoderDecoderCache(*caches)}
        model(decoder_input_ids=decoded[:, :10], **given)
        found = model(decoder_input_ids=decoded[:, 10:], decoder_attention_mask=mask, **given)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [*T5_FAMILY, *DECODERS, "Pix2Struct"])
def test_the_future_changes_nothing(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    field = "decoder_input_ids" if name in T5_FAMILY else "input_ids"
    changed = {**inputs, field: torch.cat([inputs[field][:, :15], inputs[field][:, 15:] * 5 % 97], 1)}
    with torch.no_grad():
        outs = [both(name)[1](**each)[0] for each in (inputs, changed)]
    # Experts multiply all tokens that chose them, and how many these are decides the rounding.
    torch.testing.assert_close(outs[1][:, :15], outs[0][:, :15], rtol=0, atol=1e-12 if name == "Switch" else 0)
    assert not torch.equal(outs[0][:, 15], outs[1][:, 15])


LONG = {key: {"max_source_positions": 700} for key in ("SeamlessM4T", "wav2vec2-conformer", "w2v-BERT, relative")}
LONG["MPT"] = {"max_seq_len": 600}
LONG["MPNet"] = {"max_position_embeddings": 610}
LONG |= {name: {"max_position_embeddings": 600} for name in BIASED if name.startswith("DeBERTa")}


@pytest.mark.parametrize(
    "name", [name for name in BIASED if not name.startswith("Granite") and name != "SeamlessM4T v2"]
)
def test_no_tensor_has_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Products with vectors of distances are computed in pieces of so many bytes.
    monkeypatch.setattr("ringtile.kernels.bias._BYTES", 1 << 20)
    # Of eager attention, it is enough to see that such a tensor is found.
    for how, n in (("ringtile", 600), ("eager", 300)):
        ids = torch.randint(3, 97, (1, n))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.arange(n - 100, n), 0)}
        if name in T5_FAMILY:
            inputs["decoder_input_ids"] = ids
        elif name in WAVES:
            inputs = {"input_values": torch.randn(1, 4 * n + 6)}
        elif name in SPEECH:
            frames = torch.randn(1, n * (4 if name == "Parakeet" else 1), 16)
            real = torch.ones(frames.shape[:2]).long()
            real[:, -n // 4 :] = 0
            inputs = {"input_features": frames, "attention_mask": real}
        model = built(name, torch.float32, **LONG.get(name, {}))
        model = use_ringtile(model) if how == "ringtile" else model
        with torch.set_grad_enabled(how == "ringtile"), Largest() as largest:
            out = model(**inputs)[0]
            if how == "ringtile":
                out.sum().backward()
        assert largest.most < n * n if how == "ringtile" else largest.most >= 4 * n * n


def test_packed_rows_of_t5() -> None:
    config = BIASED["T5"]()[1]
    torch.manual_seed(0)
    model = use_ringtile(randomized(hf.T5EncoderModel._from_config(config, dtype=torch.float64)))
    ids, lengths = torch.randint(3, 97, (1, 60)), [17, 1, 42]
    bounds = torch.tensor([0, 17, 18, 60]).int()
    packed = model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]
    apart = torch.cat([model(part)[0] for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-12)
    assert (model(ids)[0] - apart).abs().max() > 0.1


def test_a_window_of_t5_is_that_of_a_mask() -> None:
    config = BIASED["T5"]()[1]
    torch.manual_seed(0)
    first = randomized(hf.T5EncoderModel._from_config(config, attn_implementation="eager", dtype=torch.float64))
    second = use_ringtile(copy.deepcopy(first), "window(8)")
    ids, at = torch.randint(3, 97, (2, TOKENS)), torch.arange(TOKENS)
    far = (at[:, None] - at).abs() > 8
    mask = torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill(far, torch.finfo(torch.float64).min)
    torch.testing.assert_close(second(ids)[0], first(ids, attention_mask=mask)[0], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="pattern: expected a function of the attention module for a model with cross"):
        use_ringtile(built("T5"), Window(8))(ids, decoder_input_ids=ids)


@pytest.mark.parametrize(("name", "reach"), [("Parakeet", 24), ("w2v-BERT", 24), ("Granite Speech 5", 40)])
def test_a_window_of_a_conformer_reaches_no_farther(name: str, reach: int) -> None:
    # Two layers with windows of 8 and convolutions of 2 frames on each side, and those of the subsampling.
    inputs, _ = inputs_of(name, "no")
    far = {"input_features": inputs["input_features"].clone()}
    far["input_features"][:, 200:] += 1
    frames = 200 // {"w2v-BERT": 1, "Parakeet": 4}.get(name, 2) - reach
    for pattern, same in (("window(8)", True), (None, False)):
        model = use_ringtile(built(name), pattern)
        if name == "Granite Speech 5" and pattern is None:
            continue
        with torch.no_grad():
            outs = [model(**each)[0][:, :frames] for each in (inputs, far)]
        assert torch.equal(*outs) == same


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_give_the_table_its_gradient(use_reentrant: bool) -> None:
    inputs, grads = inputs_of("T5", "right")[0], []
    for checkpoints in (False, True):
        model = copy.deepcopy(both("T5")[1]).train()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(**inputs, use_cache=False)[0].square().sum().backward()
        grads.append({key: w.grad for key, w in model.named_parameters() if w.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, rtol=0, atol=1e-10 * grad.abs().max())


@pytest.mark.parametrize("name", ["T5", "UMT5", "w2v-BERT", "Parakeet", "DeBERTa-v2", "BLOOM", "MPNet", "Swin"])
def test_copies_and_switches(name: str) -> None:
    inputs, _ = inputs_of(name, "right")
    first, second = both(name)
    copies = copy.deepcopy(second), pickle.loads(pickle.dumps(second))
    with torch.no_grad(), Doubled():
        expected = second(**inputs)[0]
        for other in copies:
            assert torch.equal(other(**inputs)[0], expected)
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
    model, counter = both(name)[1], graph_counter()
    with torch.no_grad():
        found = torch.compile(copy.deepcopy(model), fullgraph=True, backend=counter)(**inputs)[0]
        torch.testing.assert_close(found[real], model(**inputs)[0][real], rtol=0, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "name", ["T5", "w2v-BERT", "Parakeet", "BLOOM", "DeBERTa-v2", "WavLM", "MPNet", "Swin", "Swin v2"]
)
def test_weights_are_those_of_eager(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    with torch.no_grad():
        first, second = (model(**inputs, output_attentions=True) for model in both(name))
    torch.testing.assert_close(second[0], first[0], rtol=0, atol=1e-6 * float(first[0].abs().max()))
    names = [key for key in first if key.endswith("attentions")]
    assert names
    assert [key for key in second if key.endswith("attentions")] == names
    for key in names:
        for expected, weights in zip(first[key], second[key], strict=True):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in [*BIASED, *WINDOWED] if name not in WITHOUT_A_MASK])
def test_functions_of_yours_are_refused(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    model = both(name)[1]
    if name == "MPT":
        with pytest.raises(ValueError, match="output_attentions: expected False for mpt in use_ringtile, got True"):
            model(**inputs, output_attentions=True)
    message = "attend: expected a model without cross attention|expected a layer without softcap, sinks and bias"
    with pytest.raises(ValueError, match=message):
        use_ringtile(copy.deepcopy(model), attend=lambda query, key, value, **options: query)(**inputs)


@pytest.mark.parametrize(
    "name", ["w2v-BERT", "Parakeet", "Granite Speech 5", "WavLM", "MPNet", "Swin", "DeBERTa-v2", *DECODERS]
)
def test_attention_drops_what_the_config_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, config = (BIASED | WINDOWED)[name]()
    for part in (config, *vars(config).values()):
        fields = vars(part) if isinstance(part, hf.PreTrainedConfig) else {}
        # Not by setattr: the probability of MPT is an int there.
        fields.update({field: 0.25 for field in fields if re.search("(attention|attn).*drop", field)})
    model, seen = use_ringtile(made(config)), set()

    def seeing(*args: Any, dropout: float, **options: Any) -> Any:
        seen.add(dropout)
        return registry._attend_chosen(*args, dropout=dropout, **options)

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "use_ringtile", seeing)
    inputs, _ = inputs_of(name, "no", torch.float32)
    for is_training, expected in ((True, 0.25), (False, 0.0)):
        seen.clear()
        model.train(is_training)(**inputs)
        assert seen == {expected}


@pytest.mark.parametrize("name", ["DeBERTa-v2", "BLOOM", "MPNet", "Granite Speech"])
def test_other_dropout_is_that_of_eager(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    first, second = (copy.deepcopy(model).train() for model in both(name))
    for model in (first, second):
        for key, part in model.named_modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0 if re.search(r"attention_dropout|attention\.(attn|self)\.dropout", key) else 0.3
            elif hasattr(part, "hidden_dropout"):
                part.hidden_dropout = 0.3
    outs = []
    for model in (first, second):
        torch.manual_seed(0)
        outs.append(model(**inputs)[0])
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-6)
    assert not torch.allclose(outs[1], both(name)[0](**inputs)[0])


def test_swin_bounds_the_length_of_queries() -> None:
    inputs, _ = inputs_of("Swin v2", "no")
    models = [copy.deepcopy(model) for model in both("Swin v2")]
    for part in [part for model in models for part in model.modules() if hasattr(part, "logit_scale")]:
        part.logit_scale.data.fill_(6.0)
    expected, found = (model(**inputs)[0] for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_mpnet_has_32_buckets_of_distances() -> None:
    inputs, real = inputs_of("MPNet", "right")
    first = built("MPNet", relative_attention_num_buckets=48)
    with Doubled():
        assert_equal_models(first, use_ringtile(copy.deepcopy(first)), real, 1e-10, **inputs)


def test_mpt_bounds_queries_keys_and_values() -> None:
    inputs, real = inputs_of("MPT", "right")
    models = [copy.deepcopy(model) for model in both("MPT")]
    for part in [part for model in models for part in model.modules() if hasattr(part, "clip_qkv")]:
        part.clip_qkv = 0.3
    expected, found = (model(**inputs)[0][real] for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(found, both("MPT")[0](**inputs)[0][real])


@pytest.mark.parametrize("name", DECODERS)
def test_padding_between_tokens(name: str) -> None:
    ids, mask = torch.randint(3, 97, (3, TOKENS)), padding("left").long()
    mask[1, [47, 48, 55]] = mask[2, 12] = 0
    with Doubled():
        assert_equal_models(*both(name), mask.bool(), 1e-10, input_ids=ids, attention_mask=mask)
    steps = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    first, second = (copy.deepcopy(model).float().generate(ids, **steps) for model in both(name))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["BLOOM", "DeBERTa-v2"])
def test_a_model_of_the_same_config_is_refused_until_its_own_choice(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    first, second = both(name)
    for model in (type(second)(second.config), copy.deepcopy(type(second)(second.config))):
        with pytest.raises(ValueError, match="is new, or of a model that shares its config with one of use_ringtile"):
            model(**inputs)
        model.double().load_state_dict(first.state_dict())
        found = use_ringtile(model).eval()(**inputs)[0]
        assert torch.equal(found, second(**inputs)[0])


def test_what_a_bias_cannot_honor_is_refused() -> None:
    ids = torch.randint(3, 97, (1, 20))
    with pytest.raises(ValueError, match="attention_mask: expected one of the tokens"):
        both("MPT")[1](ids, attention_mask=torch.ones(1, 1, 20, 20).tril().bool())
    with pytest.raises(ValueError, match="max_seq_len: expected at least 129 keys, got 128"):
        both("MPT")[1](torch.randint(3, 97, (1, 129)))
    exact = built("BLOOM", pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(ValueError, match="slow_but_exact: expected False, got True"):
        use_ringtile(exact)(ids)
    with pytest.raises(ValueError, match="query_states, relative_pos: expected None"):
        both("DeBERTa-v2")[1].deberta.encoder(torch.randn(1, 20, 64).double(), ids > 0, relative_pos=ids)
    parakeet = built("Parakeet")
    parakeet.config.encoder_config.dropout_positions = 0.1
    with pytest.raises(ValueError, match=r"dropout_positions: expected 0 in training, got 0\.1"):
        use_ringtile(parakeet).train()(torch.randn(1, 80, 16).double())
    by_name = hf.T5EncoderModel._from_config(BIASED["T5"]()[1], attn_implementation="ringtile")
    with pytest.raises(ValueError, match=r"position_bias: ringtile does not support a bias .* unless use_ringtile"):
        by_name(ids)
    with pytest.raises(ValueError, match=r"BloomModel ignores it, .* and call use_ringtile\(model\)"):
        hf.BloomForCausalLM._from_config(BIASED["BLOOM"]()[1], attn_implementation="ringtile")


POSITIONS = re.compile("position_bias|relative_attention_bias|rel_pos|pos_bias|relative_position")
"""What files of transformers call a bias of scores."""


def page() -> dict[str, set[str]]:
    """The table of the files of transformers: what `use_ringtile` does with them, by its first word."""
    text = (ROOT / "docs/biases.md").read_text(encoding="utf-8").partition("## Models of transformers")[2]
    rows = re.findall(r"^\| (`.*`) \| (\w+)", text, re.M)
    found: dict[str, set[str]] = {}
    for files, what in rows:
        found.setdefault(what, set()).update(re.findall(r"`(\w+)`", files))
    return found


def test_the_page_has_every_model_with_a_bias() -> None:
    # Other versions have other models.
    version = re.search(r"`transformers/models` \((.*)\)", (ROOT / "docs/biases.md").read_text(encoding="utf-8"))
    assert version is not None
    if hf.__version__.rpartition(".")[0] != version[1]:
        pytest.skip(f"the page is of transformers {version[1]}")
    files = Path(hf.__file__).parent.glob("models/*/modeling_*.py")
    matching = {file.parent.name for file in files if POSITIONS.search(file.read_text(encoding="utf-8"))}
    named = [name for names in page().values() for name in names]
    assert sorted(named) == sorted({*matching, "bloom"})
    running = {type(make()[1]).__module__.split(".")[2] for make in (BIASED | WINDOWED).values()}
    assert page()["runs"] == running


@pytest.mark.parametrize("name", sorted(page()["raises"]))
def test_models_of_the_page_raise_by_themselves(name: str) -> None:
    folder = Path(hf.__file__).parent / "models" / name
    for file in folder.glob("modeling_*.py"):
        if not POSITIONS.search(file.read_text(encoding="utf-8")):
            continue
        module = importlib.import_module(f"transformers.models.{name}.{file.stem}")
        kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
        models = [kind for kind in kinds if issubclass(kind, hf.PreTrainedModel)]
        assert models
        assert all(registry._is_by_hand(kind) and not biases.is_replaced(kind) for kind in models)


def is_installed(name: str) -> bool:
    """Whether this transformers has a folder of models."""
    return (Path(hf.__file__).parent / "models" / name).is_dir()


def refused() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A model of each file that the page says to raise in its first call, and its inputs."""

    def of(name: str, kind: str) -> Any:
        return getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), kind)

    ids, pixels, frames = torch.randint(3, 97, (1, 9)), torch.randn(1, 3, 32, 32), torch.randn(1, 80, 16)
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    layers = dict(sizes, intermediate_size=96, num_hidden_layers=2)
    beit = hf.BeitConfig(**layers, image_size=32, patch_size=8, use_relative_position_bias=True)
    yield "beit", hf.BeitModel(beit), {"pixel_values": pixels}
    udop = hf.UdopConfig(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, image_size=32)
    yield "udop", hf.UdopEncoderModel(udop), {"input_ids": ids, "bbox": torch.rand(1, 9, 4), "pixel_values": pixels}
    boxes = dict(coordinate_size=10, shape_size=12, visual_embed=False, input_size=32)
    yield "layoutlmv3", hf.LayoutLMv3Model(hf.LayoutLMv3Config(vocab_size=97, **layers, **boxes)), {"input_ids": ids}
    if is_installed("nemotron_asr_streaming"):
        nemotron = hf.NemotronAsrStreamingEncoderConfig(**layers, num_mel_bins=16, subsampling_conv_channels=8)
        encoder = of("nemotron_asr_streaming", "NemotronAsrStreamingEncoder")
        yield "nemotron_asr_streaming", encoder(nemotron), {"input_features": frames, "num_lookahead_tokens": 3}
    of_audio = dict(nemo_conv_channels=64, ext_pw_out_channel=64, depthwise_separable_out_channel=64, input_size=16)
    phi = hf.Phi4MultimodalAudioConfig(**sizes, **of_audio, intermediate_size=96, num_blocks=1)
    audio = of("phi4_multimodal", "Phi4MultimodalAudioModel")
    yield "phi4_multimodal", audio(phi), {"hidden_states": frames, "mask": None}
    of_layer = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {f"{kind}{field}": size for kind in ("", "swa_") for field, size in of_layer.items()}
    inkling = dict(heads, vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, eos_token_id=None)
    for name, kind in (("inkling", "Inkling"), ("inkling2", "Inkling2"), ("inkling2_loop", "Inkling2Loop")):
        if is_installed(name):
            config = getattr(hf, f"{kind}TextConfig")(**inkling)
            yield name, of(name, f"{kind}TextModel")(config), {"input_ids": ids}


def test_models_of_the_page_raise_in_their_first_call() -> None:
    names = {"esmfold2"}
    for name, model, inputs in refused():
        names.add(name)
        with pytest.raises(
            ValueError, match=r"does not support a bias|a bias (on the scores|of all pairs)|that computes"
        ):
            use_ringtile(model.eval())(**inputs)
    # Its bias of pairs is its mask.
    layer = torch.nn.Module()
    query = torch.randn(1, 2, 9, 16)
    with pytest.raises(ValueError, match="a bias on the scores is not supported"):
        attend(None, layer, query, query, query, torch.randn(1, 2, 9, 9))
    assert names == {name for name in page()["refuses"] if is_installed(name) or name == "esmfold2"}


@pytest.mark.parametrize(
    ("name", "kind", "argument"),
    [
        ("BLOOM", "BloomAttention", "cache"),
        ("MPT", "MptAttention", "kv_cache"),
        ("DeBERTa-v2", "Disentangled", "query_states"),
    ],
)
def test_an_argument_that_attention_does_not_know_is_refused(name: str, kind: str, argument: str) -> None:
    model = use_ringtile(built(name))
    layer = next(part for part in model.modules() if type(part).__name__.startswith(kind))
    tokens, forward, more = torch.randint(3, 97, (1, 9)), layer.forward, {argument: None}
    layer.__dict__["forward"] = lambda *given, **named: forward(*given, **named | more)
    model(tokens)
    more[argument] = torch.ones(1)
    with pytest.raises(ValueError, match=f"^{argument}: ringtile does not support"):
        model(tokens)
