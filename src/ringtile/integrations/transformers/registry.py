"""Register ringtile with transformers, and switch models to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ringtile.integrations.transformers.attention import (
    LayerAttend,
    LayerPattern,
    check_attend,
    check_pattern,
)
from ringtile.integrations.transformers.attention import attend as attend_layer
from ringtile.integrations.transformers.big_bird import convert_big_bird
from ringtile.integrations.transformers.longformer import convert_longformer
from ringtile.integrations.transformers.masks import pattern_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)

OLDEST = (5, 5)
"""The oldest version of transformers whose mask interface is the one that `pattern_mask` implements."""

_names: list[tuple[LayerPattern, LayerAttend, str]] = []
"""The arguments of `use_ringtile`, and the name that each pair is registered under."""


def register(name: str = "ringtile", pattern: LayerPattern = None, attend: LayerAttend = None) -> None:
    """Register ringtile as an attention implementation of transformers, together with its masks.

    Afterwards ``attn_implementation="ringtile"`` selects it in ``from_pretrained``, and
    ``model.set_attn_implementation("ringtile")`` in a model. Outputs and gradients are those of eager attention over
    the pairs of the model's own mask: causal, sliding, chunked, packed, with padding, or given by you.

    Args:
        name: Name of the implementation. Names that contain "flash", "sdpa", "flex", "paged", "eager", "/" or "|" have
            a meaning in transformers.
        pattern: A `Pattern` that makes the model sparse: attention keeps the pairs that it and the model's mask keep. A
            dict gives one per kind of layer, as in ``config.layer_types``. A function gets the attention module and
            returns one, or None for the model's own mask. Positions count from the first real token, so global tokens
            are the first of the text and not of its padding.
        attend: A function in place of `sparse_attention`, with the same arguments, for all layers. A list has one per
            layer, or None. It gets the kept pairs as ``pattern`` and ``is_causal``, and padding as ``key_mask``. Calls
            with one query, as in decoding, ignore it: they compute all kept pairs.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If the name has another meaning, or if the pattern or ``attend`` is invalid.

    Example:
        >>> from transformers import AutoModelForCausalLM, MistralConfig
        >>> register()
        >>> sizes = dict(vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        >>> config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=1024)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="ringtile")
    """
    check_pattern(pattern)
    check_attend(attend)
    taken = [word for word in ("flash", "sdpa", "flex", "paged", "eager", "/", "|") if word in name]
    if taken or not name:
        raise ValueError(f"name: expected one without {', '.join(map(repr, taken)) or 'being empty'}, got {name!r}")
    register_pair(name, partial(attend_layer, pattern, by=attend), pattern_mask)


def register_pair(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register an attention function and its masks. Raises ImportError if transformers is missing or too old."""
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"transformers: expected {oldest} or newer, got {transformers.__version__}")
    # Without the second, transformers drops every mask and says nothing.
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def use_ringtile(model: Model, pattern: LayerPattern = None, attend: LayerAttend = None) -> Model:
    """Switch a model of transformers to ringtile, in place, and return it.

    Longformer and BigBird write their attention by hand. It is replaced, and their weights are kept.

    Args:
        model: The model, with or without a head.
        pattern: Makes the model sparse, see `register`.
        attend: Computes the attention, one function or one per layer, see `register`. Layers with a softcap, sinks or
            cross attention raise a ValueError in their first call.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If a part of the model computes attention by itself, or if the pattern or ``attend`` is invalid.

    Example:
        >>> from ringtile.patterns import GlobalTokens, Window
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=1))
        >>> model = use_ringtile(model, Window(256) | GlobalTokens(1))
    """
    kind = model.config.model_type
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    check_attend(attend)
    if isinstance(attend, Sequence | nn.ModuleList) and len(attend) != layers:
        raise ValueError(f"attend: expected one function per layer for {layers} layers, got {len(attend)}")
    if getattr(attend, "stateful", False):
        raise ValueError(f"attend: expected one per layer, since a call changes later ones, got {attend!r}")
    name = _name_of(pattern, attend)
    register(name, pattern, attend)
    if kind in ("longformer", "big_bird"):
        for argument, given in (("pattern", pattern), ("attend", attend)):
            if given is not None:
                raise ValueError(f"{argument}: {kind} has its own, got {given!r}")
        (convert_longformer if kind == "longformer" else convert_big_bird)(model)
        return model
    switch(model, name)
    return model


def switch(model: Any, name: str) -> Callable[[], None]:
    """Switch all parts of a model to an attention implementation. Return a function that switches back.

    Raises ValueError if a part computes attention by itself.
    """
    parts = _parts(model)
    before = [part.config._attn_implementation for part in parts]

    def switch_back() -> None:
        for part, was in zip(parts, before, strict=True):
            part.config._attn_implementation_internal = was

    model.set_attn_implementation(name)
    stayed = sorted({type(part).__name__ for part in parts if part.config._attn_implementation != name})
    if stayed:
        switch_back()
        raise ValueError(
            f"model: expected parts that use transformers' attention interface, got {', '.join(stayed)}, whose "
            "attention is written by hand"
        )
    return switch_back


def _parts(model: Any) -> list[Any]:
    from transformers import PreTrainedModel

    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _name_of(pattern: LayerPattern, attend: LayerAttend) -> str:
    if pattern is None and attend is None:
        return "ringtile"
    for known, known_attend, name in _names:
        if (known is pattern or known == pattern) and (known_attend is attend or known_attend == attend):
            return name
    _names.append((pattern, attend, f"ringtile-{len(_names) + 1}"))
    return _names[-1][2]
