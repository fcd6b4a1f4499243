"""Models of transformers whose scores have a bias: tables, windows, dropout, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    TOKENS,
    assert_equal_models,
    both,
    built,
    inputs_of,
    model_of,
    padding,
    registered,
)
from oracle import assert_near, refused
from tiny import BIASED, WINDOWED, hf
from torch import nn

from ringtile.integrations.transformers import biases, registry, use_ringtile
from ringtile.integrations.transformers.attention import attend
from ringtile.patterns import Window

pytestmark = [
    # Of torch's own tracing of a Function, and of the eager attention of WavLM.
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
]
PAGE = (Path(__file__).parents[2] / "docs/biases.md").read_text(encoding="utf-8")
SLOPES = ["BLOOM", "MPT"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered():
        yield


def test_the_tables_of_swin_learn_and_its_windows_compile() -> None:
    inputs, _ = inputs_of("Swin", "no")
    # One layer of windows, and one that shifts them.
    model = built("Swin", depths=[2], num_heads=[2], num_layers=1, hidden_size=16)
    second = use_ringtile(copy.deepcopy(model))
    second(**inputs)[0].square().sum().backward()
    of_table = [weight.grad for key, weight in second.named_parameters() if "position_bias" in key]
    assert of_table
    assert all(grad.abs().max() > 0 for grad in of_table if grad is not None)
    with torch.no_grad():
        found = torch.compile(second, backend="eager")(**inputs)[0]
        assert_near(found, model(**inputs)[0], 1e-6)


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
    assert_near(found, expected, 1e-10)


def test_packed_rows_of_t5() -> None:
    model = model_of(hf.T5EncoderModel, BIASED["T5"]()[1], "use_ringtile", torch.float64)
    ids, lengths = torch.randint(3, 97, (1, 60)), [17, 1, 42]
    bounds = torch.tensor([0, 17, 18, 60]).int()
    packed = model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]
    apart = torch.cat([model(part)[0] for part in ids.split(lengths, 1)], 1)
    assert_near(packed, apart, 1e-12)
    assert (model(ids)[0] - apart).abs().max() > 0.1


def test_a_window_of_t5_is_that_of_a_mask() -> None:
    first = model_of(hf.T5EncoderModel, BIASED["T5"]()[1], "eager", torch.float64)
    second = use_ringtile(copy.deepcopy(first), "window(8)")
    ids, at = torch.randint(3, 97, (2, TOKENS)), torch.arange(TOKENS)
    far = (at[:, None] - at).abs() > 8
    mask = torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill(far, torch.finfo(torch.float64).min)
    assert_near(second(ids)[0], first(ids, attention_mask=mask)[0], 1e-10)
    with refused("pattern: expected a function of the attention module for a model with cross"):
        use_ringtile(built("T5"), Window(8))(ids, decoder_input_ids=ids)


@pytest.mark.parametrize(("name", "reach"), [("Parakeet", 24), ("w2v-BERT", 24), ("Granite Speech 5", 40)])
def test_a_window_of_a_conformer_reaches_no_farther(name: str, reach: int) -> None:
    # Two layers with windows of 8 and convolutions of 2 frames on each side, and those of the subsampling.
    inputs, _ = inputs_of(name, "no")
    far = {"input_features": inputs["input_features"].clone()}
    far["input_features"][:, 200:] += 1
    frames = 200 // {"w2v-BERT": 1, "Parakeet": 4}.get(name, 2) - reach
    with torch.no_grad():
        model = use_ringtile(built(name), "window(8)")
        assert torch.equal(*(model(**each)[0][:, :frames] for each in (inputs, far)))
        if name != "Granite Speech 5":
            assert not torch.equal(*(both(name)[1](**each)[0][:, :frames] for each in (inputs, far)))


@pytest.mark.parametrize(
    "name", ["T5", "w2v-BERT", "Parakeet", "Granite Speech 5", "WavLM", "MPNet", "DeBERTa-v2", *SLOPES, "Swin"]
)
def test_functions_of_yours_are_refused(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    model = both(name)[1]
    if name == "MPT":
        with refused("output_attentions: expected False for mpt in use_ringtile, got True"):
            model(**inputs, output_attentions=True)
    message = "attend: expected a model without cross attention|expected a layer without softcap, sinks and bias"
    with refused(message):
        use_ringtile(copy.deepcopy(model), attend=lambda query, key, value, **options: query)(**inputs)


@pytest.mark.parametrize(
    "name", ["w2v-BERT", "Parakeet", "Granite Speech 5", "WavLM", "MPNet", "Swin", "DeBERTa-v2", *SLOPES]
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
    assert_near(outs[1], outs[0], 1e-6)
    assert not torch.allclose(outs[1], both(name)[0](**inputs)[0])


@pytest.mark.parametrize(("name", "field", "value"), [("Swin v2", "logit_scale", 6.0), ("MPT", "clip_qkv", 0.3)])
def test_queries_have_a_bound(name: str, field: str, value: float) -> None:
    inputs, real = inputs_of(name, "right")
    models = [copy.deepcopy(model) for model in both(name)]
    for part in [part for model in models for part in model.modules() if hasattr(part, field)]:
        setattr(part, field, torch.nn.Parameter(torch.full_like(part.logit_scale, value)) if name != "MPT" else value)
    expected, found = (model(**inputs)[0][real] for model in models)
    assert_near(found, expected, 1e-6)
    assert not torch.allclose(found, both(name)[0](**inputs)[0][real])


def test_mpnet_has_32_buckets_of_distances() -> None:
    inputs, real = inputs_of("MPNet", "right")
    first = built("MPNet", relative_attention_num_buckets=48)
    assert_equal_models(first, use_ringtile(copy.deepcopy(first)), real, 1e-10, **inputs)


@pytest.mark.parametrize("name", SLOPES)
def test_padding_between_tokens(name: str) -> None:
    ids, mask = torch.randint(3, 97, (3, TOKENS)), padding("left").long()
    mask[1, [47, 48, 55]] = mask[2, 12] = 0
    assert_equal_models(*both(name), mask.bool(), 1e-10, input_ids=ids, attention_mask=mask)
    steps = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    first, second = (copy.deepcopy(model).float().generate(ids, **steps) for model in both(name))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["BLOOM", "DeBERTa-v2"])
def test_a_model_of_the_same_config_is_refused_until_its_own_choice(name: str) -> None:
    inputs, _ = inputs_of(name, "no")
    first, second = both(name)
    for model in (type(second)(second.config), copy.deepcopy(type(second)(second.config))):
        with refused("is new, or of a model that shares its config with one of use_ringtile"):
            model(**inputs)
        model.double().load_state_dict(first.state_dict())
        found = use_ringtile(model).eval()(**inputs)[0]
        assert torch.equal(found, second(**inputs)[0])


def test_what_a_bias_cannot_honor_is_refused() -> None:
    ids = torch.randint(3, 97, (1, 20))
    with refused("attention_mask: expected one of the tokens"):
        both("MPT")[1](ids, attention_mask=torch.ones(1, 1, 20, 20).tril().bool())
    with refused("max_seq_len: expected at least 129 keys, got 128"):
        both("MPT")[1](torch.randint(3, 97, (1, 129)))
    exact = built("BLOOM", pretraining_tp=2, slow_but_exact=True)
    with refused("slow_but_exact: expected False, got True"):
        use_ringtile(exact)(ids)
    with refused("query_states, relative_pos: expected None"):
        both("DeBERTa-v2")[1].deberta.encoder(torch.randn(1, 20, 64).double(), ids > 0, relative_pos=ids)
    parakeet = built("Parakeet")
    parakeet.config.encoder_config.dropout_positions = 0.1
    with refused(r"dropout_positions: expected 0 in training, got 0\.1"):
        use_ringtile(parakeet).train()(torch.randn(1, 80, 16).double())
    by_name = hf.T5EncoderModel._from_config(BIASED["T5"]()[1], attn_implementation="ringtile")
    with refused(r"position_bias: ringtile does not support a bias .* unless use_ringtile"):
        by_name(ids)
    with refused(r"BloomModel ignores it, .* and call use_ringtile\(model\)"):
        hf.BloomForCausalLM._from_config(BIASED["BLOOM"]()[1], attn_implementation="ringtile")


POSITIONS = re.compile("position_bias|relative_attention_bias|rel_pos|pos_bias|relative_position")
"""What files of transformers call a bias of scores."""


def page() -> dict[str, set[str]]:
    """The table of the files of transformers: what `use_ringtile` does with them, by its first word."""
    rows = re.findall(r"^\| (`.*`) \| (\w+)", PAGE.partition("## Models of transformers")[2], re.M)
    found: dict[str, set[str]] = {}
    for files, what in rows:
        found.setdefault(what, set()).update(re.findall(r"`(\w+)`", files))
    return found


def test_the_page_has_every_model_with_a_bias() -> None:
    # Other versions have other models.
    version = re.search(r"`transformers/models` \((.*)\)", PAGE)
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


def refusing_models() -> Iterator[tuple[str, Any, dict[str, Any]]]:
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
    for name, model, inputs in refusing_models():
        names.add(name)
        with refused(r"does not support a bias|a bias (on the scores|of all pairs)|that computes"):
            use_ringtile(model.eval())(**inputs)
    # Its bias of pairs is its mask.
    layer = torch.nn.Module()
    query = torch.randn(1, 2, 9, 16)
    with refused("a bias on the scores is not supported"):
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
    with refused(f"^{argument}: ringtile does not support"):
        model(tokens)
