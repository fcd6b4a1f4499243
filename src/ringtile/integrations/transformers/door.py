"""The names, arguments and functions of transformers that ringtile needs, checked before a model computes."""

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from torch import nn

from ringtile.patterns.tested import TESTED

_CACHES = ("cache", "past_key_values")
"""The argument of a module for its cache, in 5.24 and before it."""

_PAGED = "generation.continuous_batching.cache"
_PARTS = {
    "attention": {
        "modeling_utils:AttentionInterface.register": "key value",
        "modeling_utils:PreTrainedModel.set_attn_implementation": "",
        "modeling_utils:ALL_ATTENTION_FUNCTIONS": "",
        "configuration_utils:PreTrainedConfig()._attn_implementation": "",
        "configuration_utils:PreTrainedConfig()._attn_implementation_internal": "",
        "configuration_utils:PreTrainedConfig.get_text_config": "",
        "configuration_utils:PreTrainedConfig.model_type": "",
        "masking_utils:AttentionMaskInterface.register": "key value",
        "masking_utils:causal_mask_function": "",
        "masking_utils:bidirectional_mask_function": "",
        "masking_utils:eager_mask": "attention_mask",
        "masking_utils:prepare_padding_mask": "attention_mask kv_length kv_offset",
        "masking_utils:sdpa_mask": "batch_size q_length kv_length q_offset kv_offset mask_function device",
    },
    "decode=": {
        "cache_utils:DynamicLayer.update": "key_states value_states",
        "cache_utils:DynamicLayer.lazy_initialization": "key_states value_states",
        "cache_utils:DynamicLayer.get_seq_length": "",
        "cache_utils:DynamicLayer().is_initialized": "",
        "cache_utils:DynamicLayer().keys": "",
        "cache_utils:DynamicLayer().values": "",
        "cache_utils:DynamicCache().layers": "",
        "cache_utils:DynamicCache().layer_class_to_replicate": "",
        "cache_utils:DynamicCache().offloading": "",
    },
    "continuous batching": {f"{_PAGED}:PagedAttentionCache.update": "key_states value_states layer_idx kwargs"},
    "rounded pages": {
        f"{_PAGED}:ATTN_TYPE_TO_ALLOCATOR": "",
        f"{_PAGED}:FullAttentionCacheAllocator.get_bytes_per_page": "",
    },
}
"""The parts of transformers that each feature needs, and the arguments that ringtile passes to them."""

_TEXTS = """
T5Attention.compute_bias 5081d2f6
MT5Attention.compute_bias 5081d2f6
UMT5Attention.compute_bias 5beec337
LongT5Attention.compute_bias 5081d2f6
SwitchTransformersAttention.compute_bias 5081d2f6
Pop2PianoAttention.compute_bias 5081d2f6
Pix2StructTextAttention.compute_bias 0913381c
Wav2Vec2ConformerSelfAttention.forward 95bd152c 8e8be70c
Wav2Vec2BertSelfAttention.forward 7bb60246 ea03af75
SeamlessM4TConformerSelfAttention.forward 95bd152c 8e8be70c
SeamlessM4Tv2ConformerSelfAttention.forward 7d155048 3582058c
ParakeetEncoderAttention.forward 8a7e1310 5a43e071
GraniteSpeech5EncoderAttention.forward a9de156a
GraniteSpeechConformerAttention.forward c714103b a97be510
GraniteSpeechPlusConformerAttention.forward c714103b a97be510
WavLMAttention.forward d77eadea ec3c43fc b87788d9
MPNetEncoder.compute_position_bias 4fc31447 1dd63b47
MPNetSelfAttention.forward 17ad502f 6343ccc1
SwinAttention.forward 5c1ddd23 2e0b2746
Swinv2SelfAttention.forward 0c567e7a
Swin2SRSelfAttention.forward 0c567e7a
DonutSwinSelfAttention.forward 4a9f943c
ClapAudioSelfAttention.forward 4a9f943c
BloomAttention.forward 749be255
MptAttention.forward fd31928a ce2627dd
DebertaV2Encoder.get_attention_mask 3440d274
DebertaV2Encoder.get_rel_pos dbddf6c2
DisentangledSelfAttention.forward 5c3b00b3
LongformerSelfAttention.forward 898b0dc1 bd3ed987
BigBirdBlockSparseAttention.forward 4eed46fb 08527e5d eea3bba9
MiniMaxM3VLIndexer.forward e09b24c1 98b17cd6
Qwen4ExpTextQSAIndexer.forward 933ab3ba 907e05f6
Glm5NextTextAttention.build_attention_mask_from_topk a90f1e5c
DeepseekV4HCACompressor.forward b1d8db62 eb9507bd
causal_mask_function e2e55985
bidirectional_mask_function 26f72b7d
_bidirectional_window_overlay 3a2ffa2a
and_masks ca526be2
or_masks 4f25c006
sliding_window_overlay fece7291
sliding_window_bidirectional_overlay 2cc222b2
chunked_overlay b6434694
packed_sequence_mask_function d65ed91b
remap_positions_for_packed_sequence c73add81
blockwise_overlay 5a9535c2
"""
_BODIES = {name: digests for name, *digests in map(str.split, _TEXTS.strip().splitlines())}
"""The functions that ringtile computes in another way, each with digests of all texts that it has had."""

_WITHOUT_EFFECT = set(
    "cache_position deterministic encoder_hidden_states grid_thw image_sizes index input_ids "
    "inputs_embeds is_causal labels logits_to_keep max_length_k max_length_q num_items_in_batch "
    "output_hidden_states output_router_logits pixel_values_videos position_ids return_dict "
    "shift_labels sliding_window token_type_ids use_cache user_cache video_grid_thw".split()
)
"""Arguments that change no attention: the keys and their mask say the same."""

_NO_WEIGHTS = "output_attentions", False
_MEANINGS = {
    "position_bias": "a bias on the scores, unless use_ringtile knows the model,",
    "indices": "keys chosen by an indexer",
    "block_indices": "blocks chosen by an indexer",
    "sinks": "learned keys and values",
    "cache": "a paged cache",
}

_PARSES = Lock()
_SILENT = {"annotation", "returns", "decorator_list", "type_comment", "type_params", "kind", "ctx"}
"""Fields of syntax trees that change no result, or that Python versions fill differently."""


def _tested() -> str:
    import transformers

    versions = TESTED["transformers"]
    ends = f"; tested with {versions[0]} to {versions[-1]}" if versions else ""
    return f"transformers {transformers.__version__}{ends}"


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, or None."""
    return next((arguments[name] for name in _CACHES if arguments.get(name) is not None), None)


def check_cache(model: nn.Module, feature: str) -> None:
    """Raise ImportError if no attention module of a model takes a cache by a name that ringtile knows."""
    layers = [type(module) for module in model.modules() if hasattr(module, "layer_idx")]
    if layers and not any(name in inspect.signature(x.forward).parameters for x in layers for name in _CACHES):
        raise ImportError(
            f"{_tested()}: expected {' or '.join(_CACHES)} among the arguments of {layers[0].__name__} for {feature}"
        )


def refuse_arguments(arguments: Mapping[str, Any], *known: str) -> None:
    """Raise ValueError that names an argument which a function in place of transformers' own would drop."""
    for name, x in arguments.items():
        if x is not None and name not in known and name not in _WITHOUT_EFFECT and (name, x) != _NO_WEIGHTS:
            raise ValueError(
                f"{name}: ringtile does not support {_MEANINGS.get(name, 'this argument')} here, got "
                f"{type(x).__name__}; use attn_implementation='eager' ({_tested()})"
            )


def part_of(path: str, feature: str) -> Any:
    """Return a part of transformers, ``"module:Class.name"``. Raise ImportError if this version has none."""
    module, _, names = path.partition(":")
    try:
        part: Any = import_module(f"transformers.{module}")
        for name in names.split("."):
            part = getattr(part, name.removesuffix("()"))
            part = part() if name.endswith("()") else part
    except (ImportError, AttributeError):
        raise ImportError(f"{_tested()}: expected {names} for {feature}, got none") from None
    return part


def check_parts(feature: str) -> None:
    """Raise ImportError if this transformers lacks a part that a feature needs."""
    for path, arguments in _PARTS[feature].items():
        part = part_of(path, feature)
        known = inspect.signature(part).parameters if arguments else ()
        for argument in arguments.split():
            if argument not in known:
                raise ImportError(f"{_tested()}: expected an argument {argument} of {path} for {feature}, got none")


def refuse_other(error: AttributeError, module: nn.Module) -> None:
    """Raise ValueError in place of an error that says that a module lacks an attribute."""
    if str(error).startswith(f"'{type(module).__name__}' object has no"):
        raise ValueError(
            f"model: {error} that ringtile needs in {_tested()}; use attn_implementation='eager'"
        ) from error


def check_attributes(owner: Any, feature: str, names: str) -> None:
    """Raise ImportError if an object of transformers lacks an attribute that a feature needs."""
    for name in names.split():
        if not hasattr(owner, name):
            raise ImportError(f"{_tested()}: expected {type(owner).__name__}.{name} for {feature}, got none")


def _words(node: ast.AST) -> Iterator[str]:
    """Yield a syntax tree in words. Errors, docstrings and types are left out, and a cache has one name."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or isinstance(node, ast.Raise | ast.JoinedStr):
        return
    yield f"({type(node).__name__}"
    for name, value in ast.iter_fields(node):
        for x in value if isinstance(value, list) else [value]:
            if isinstance(x, ast.AST) and name not in _SILENT:
                yield from _words(x)
            elif x is not None and name not in _SILENT:
                yield _CACHES[0] if x in _CACHES else repr(x)
    yield ")"


def digest(source: str, name: str) -> str | None:
    """Return a digest of a function of a file, ``"Class.method"``, and of those in the file that it calls.

    None if the file has no such function.
    """
    functions: dict[str, ast.AST] = {}
    for node in ast.parse(source).body:
        functions[getattr(node, "name", "")] = node
        if isinstance(node, ast.ClassDef):
            functions |= {f"{node.name}.{getattr(part, 'name', '')}": part for part in node.body}
    if name not in functions:
        return None
    owner, waiting, reached = name.partition(".")[0], [name], dict[str, str]()
    while waiting:
        one = waiting.pop()
        function = functions.get(one)
        if one in reached or not isinstance(function, ast.FunctionDef):
            continue
        reached[one] = "".join(_words(function))
        waiting += [x.id for x in ast.walk(function) if isinstance(x, ast.Name)]
        waiting += [f"{owner}.{x.attr}" for x in ast.walk(function) if isinstance(x, ast.Attribute)]
    return hashlib.sha256("".join(reached[x] for x in sorted(reached)).encode()).hexdigest()[:8]


@cache
def is_known(module: str, name: str) -> bool:
    """Return True if a function of a loaded module of transformers computes what ringtile computes in its place."""
    # A class of a notebook has no file.
    file = getattr(sys.modules[module], "__file__", None)
    # Python 3.11 fails if two threads parse at once.
    with _PARSES:
        return file is not None and digest(Path(file).read_text("utf-8"), name) in _BODIES.get(name, ())


def check_method(kind: type, name: str) -> None:
    """Raise ValueError if a class has no such method, or one that is not known to compute what replaces it."""
    method = f"{kind.__name__}.{name}"
    if not hasattr(kind, name) or (method in _BODIES and not is_known(kind.__module__, method)):
        raise ValueError(
            f"model: expected a {method} that ringtile can replace, got another one in {_tested()}; use "
            "attn_implementation='eager'"
        )
