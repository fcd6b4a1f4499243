"""What ringtile needs of transformers is checked when a model is handed over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import built
from oracle import refused
from tiny import hf
from torch import nn

from ringtile.integrations.transformers import continuous_batching, door, use_ringtile
from ringtile.integrations.transformers.attention import attend
from ringtile.integrations.transformers.indexers import _Streamed
from ringtile.integrations.transformers.masks import pattern_mask, read_rule
from ringtile.integrations.transformers.parallel import attend_shard
from ringtile.integrations.transformers.serving import _attend_paged
from ringtile.patterns import Window

BODY = """
def helper(x):
    return x + 1

class Attention:
    def forward(self, x, past_key_values=None, scale=2.0):
        if scale < 0:
            raise ValueError("scale")
        return self.merge(helper(x) * scale)

    def merge(self, x):
        return x.flatten(2)

    def unused(self, x):
        return x
"""
SAME = {
    "a docstring": ("def helper(x):", 'def helper(x):\n    """Add one."""'),
    "types": ("scale=2.0):", "scale: float = 2.0) -> Tensor:"),
    "a decorator": ("    def merge", "    @no_type_check\n    def merge"),
    "the name of a cache": ("past_key_values", "cache"),
    "an error": ('ValueError("scale")', 'RuntimeError("a scale")'),
    "another method": ("        return x\n", "        return -x\n"),
}
OTHER = {
    "an operator": ("* scale", "/ scale"),
    "a default": ("scale=2.0", "scale=3.0"),
    "an argument": ("scale=2.0", "scale=2.0, bias=None"),
    "the bound of an error": ("scale < 0", "scale < 1"),
    "a function that it calls": ("x + 1", "x + 2"),
    "a method that it calls": ("flatten(2)", "flatten(1)"),
    "its name": ("def forward", "def attend"),
}


@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_a_digest_is_that_of_what_a_function_computes(change: str) -> None:
    old, new = (SAME | OTHER)[change]
    before, after = (door.digest(x, "Attention.forward") for x in (BODY, BODY.replace(old, new)))
    assert before is not None
    assert (before == after) == (change in SAME)


def changed(monkeypatch: pytest.MonkeyPatch, module: Any, path: Path, old: str, new: str) -> None:
    source = Path(module.__file__).read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    monkeypatch.setattr(module, "__file__", str(path))
    door.is_known.cache_clear()


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    yield
    door.is_known.cache_clear()


@pytest.mark.parametrize(
    ("name", "method", "old", "new"),
    [
        ("MPT", "MptAttention.forward", "* self.softmax_scale", "/ self.softmax_scale"),
        ("T5", "T5Attention.compute_bias", "max_distance / max_exact", "max_distance * max_exact"),
        ("BLOOM", "BloomAttention.forward", "beta=self.beta", "beta=-self.beta"),
    ],
)
def test_a_model_with_another_attention_is_refused(
    name: str, method: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = built(name)
    kind = method.partition(".")[0]
    module = sys.modules[next(type(part) for part in model.modules() if type(part).__name__ == kind).__module__]
    changed(monkeypatch, module, tmp_path / "changed.py", old, new)
    with refused(rf"^model: expected a {method} that ringtile can replace, .*transformers \d"):
        use_ringtile(model)


def test_a_class_without_a_file_is_refused() -> None:
    kind = type("T5Attention", (), {"compute_bias": None, "__module__": "builtins"})
    with refused(r"^model: expected a T5Attention\.compute_bias that ringtile can replace"):
        door.check_method(kind, "compute_bias")


def test_a_rule_that_is_not_known_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    masking = sys.modules["transformers.masking_utils"]
    function = masking.sliding_window_overlay(4)
    assert isinstance(read_rule(function, 0, 9), Window)
    changed(monkeypatch, masking, tmp_path / "masks.py", "kv_idx > q_idx - sliding_window", "kv_idx < q_idx")
    assert read_rule(function, 0, 9) is None


@pytest.mark.parametrize(
    ("owner", "name", "feature"),
    [
        ("transformers.masking_utils", "prepare_padding_mask", "attention"),
        ("transformers.cache_utils", "DynamicLayer", "decode="),
        ("transformers.generation.continuous_batching.cache", "PagedAttentionCache", "continuous batching"),
    ],
)
def test_a_part_that_is_missing_is_named(owner: str, name: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    door.check_parts(feature)
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(ImportError, match=rf"^transformers {transformers.__version__}.*{name}.* for {feature}, got"):
        door.check_parts(feature)


def test_an_argument_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, keys: Any, values: Any, layer_idx: int, kwargs: Any) -> None: ...

    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    monkeypatch.setattr("transformers.generation.continuous_batching.cache.PagedAttentionCache.update", update)
    with (
        pytest.raises(ImportError, match=r"expected an argument key_states of .*PagedAttentionCache\.update"),
        continuous_batching(model),
    ):
        pass


def test_a_cache_by_another_name_is_refused() -> None:
    class Attention(nn.Module):
        layer_idx = 0

        def forward(self, x: Any, kv_cache: Any = None) -> None: ...

    with pytest.raises(ImportError, match="expected cache or past_key_values among the arguments of Attention for x"):
        door.check_cache(nn.Sequential(Attention()), "x")
    assert door.cache_of({"cache": None, "past_key_values": 1}) == 1
    assert door.cache_of({"cache": 2}) == 2


def test_every_attention_function_refuses_what_it_does_not_know() -> None:
    x = torch.ones(1, 1, 3, 8)
    for attention in (lambda *given, **named: attend(None, *given, **named), attend_shard):
        with refused(r"^more_keys: ringtile does not support this argument here, got Tensor"):
            attention(nn.Module(), x, x, x, None, more_keys=x)
    with refused(r"^more_keys: ringtile does not support"):
        _attend_paged(nn.Module(), x, x, x, None, cache=object(), more_keys=x)
    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 3}
    with refused(r"^more_keys: ringtile does not support"):
        pattern_mask(**sizes, more_keys=x)


def test_a_mask_of_a_step_needs_its_position() -> None:
    with refused("q_offset: expected the position of the first query, got None"):
        pattern_mask(batch_size=1, q_length=1, kv_length=5)


@pytest.mark.parametrize("order", ["relu last", "weighted twice", "another value", "smallest", "another dimension"])
def test_an_indexer_with_other_steps_is_refused(order: str) -> None:
    mask = pattern_mask(batch_size=1, q_length=4, kv_length=4)
    query, key, weights = torch.randn(1, 4, 2, 8), torch.randn(1, 1, 8, 4), torch.randn(1, 4, 2, 1)

    def choose() -> None:
        scores = query @ key
        scores = scores * weights if order == "relu last" else scores.relu() * weights
        if order == "weighted twice":
            scores = scores * weights
        elif order == "relu last":
            scores = scores.relu()
        scores = scores.sum(dim=2).masked_fill(~mask[:, 0], 0.0 if order == "another value" else -torch.inf)
        largest = {"largest": False} if order == "smallest" else {}
        scores.topk(2, dim=1 if order == "another dimension" else -1, **largest)

    with _Streamed(), refused(r"^indexer: expected the scores of DeepSeek-V3\.2's"):
        choose()


def test_a_layer_that_hands_over_less_than_eager_attention_reads_is_refused() -> None:
    class Sinks(nn.Module):
        sinks = torch.zeros(2)

    x, made = torch.randn(1, 2, 5, 8), pattern_mask(batch_size=1, q_length=5, kv_length=5)
    with pytest.raises(ValueError, match="s_aux: expected the sinks of the layer, got None"):
        attend(None, Sinks(), x, x, x, made)
    longer = torch.cat([x, x[:, :, :2]], 2)
    with pytest.raises(ValueError, match="attention_mask: expected one of 7 keys, got "):
        attend(None, nn.Module(), x, longer, longer, made)
    # A cache that is not handed on leaves one key for a mask of six tokens.
    with pytest.raises(ValueError, match="attention_mask: expected at most 1 tokens, as many as keys, got "):
        pattern_mask(batch_size=1, q_length=1, kv_length=1, attention_mask=torch.ones(1, 6))
