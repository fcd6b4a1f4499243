"""Register ringtile with transformers, switch models to it, and tell models apart."""

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import getsource
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ringtile.functional.attend import is_stateful
from ringtile.integrations.transformers.attention import (
    KEPT,
    ROWS,
    GivenPattern,
    LayerAttend,
    LayerDecode,
    LayerPattern,
    attend as attend_layer,
    check_layers,
    read_pattern,
)
from ringtile.integrations.transformers.biases import is_replaced, replace_biases
from ringtile.integrations.transformers.by_hand import CONVERTED, convert, replace_methods
from ringtile.integrations.transformers.door import check_attributes, check_cache, check_parts
from ringtile.integrations.transformers.indexers import INDEXERS
from ringtile.integrations.transformers.masks import CHOSEN, is_streamed, pattern_mask
from ringtile.integrations.transformers.packing import pack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)

OLDEST = (5, 5)
"""The oldest version of transformers whose mask interface is the one that `pattern_mask` implements."""

_TAKEN = ("flash", "sdpa", "flex", "paged", "eager", "/", "|", "(", ")", CHOSEN)
_OWN_CLASSES = re.compile(r"_CLASSES\[(self\.)?config\._attn_implementation\]")
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(.*nn\.Module", re.MULTILINE)
_OWN_SCORES = set(
    "DogeAttention EsmFold2DiffusionAttention InformerProbSparseAttention InklingAttention Inkling2FullAttention "
    "Inkling2LoopFullAttention Inkling2LoopSlidingAttention Inkling2SlidingAttention "
    "NemotronAsrStreamingEncoderAttention PPDocLayoutV2ReadingOrder Sam3DetrDecoder Sam3LiteTextDetrDecoder "
    "UdopAttention".split()
)
"""Parts that look up an attention function, or are in the file of one that does, and cannot use this one."""
_SAMPLE = 1024
"""Values of each parameter that the hash of a model covers."""

_registered: set[str] = set()


def register(name: str = "ringtile", pattern: GivenPattern = None, attend: LayerAttend = None) -> None:
    """Register ringtile as an attention implementation of transformers, together with its masks.

    Afterwards ``attn_implementation="ringtile"`` selects it in ``from_pretrained``, and
    ``model.set_attn_implementation("ringtile")`` in a model. Outputs and gradients are those of eager attention over
    the pairs of the model's own mask: causal, sliding, chunked, packed, with padding, or given by you.

    Args:
        name: Name of the implementation. Names that contain "flash", "sdpa", "flex", "paged", "eager", "/" or "|" have
            a meaning in transformers.
        pattern: A `Pattern`, or its text, that makes the model sparse: attention keeps the pairs that it and the
            model's mask keep. A dict gives one per kind of layer, as in ``config.layer_types``. A function gets the
            attention module and returns one, or None for the model's own mask. Positions count from the first real
            token, so global tokens are the first of the text and not of its padding.
        attend: A function in place of `sparse_attention`, with the same arguments, for all layers. A list has one per
            layer, or None. It gets the kept pairs as ``pattern`` and ``is_causal``, and padding as ``key_mask``. Calls
            with one query, as in decoding, ignore it, unless its attribute ``steps`` is True: they compute all kept
            pairs.

    A model whose attention is written by hand ignores the name. Its constructor raises a ValueError instead, so
    ``from_pretrained`` does. For that, the first call adds a hook to PyTorch, which sees the parts of new modules.

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
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: expected a text that is not empty, got {name!r}; write register(pattern=...)")
    if taken := [word for word in _TAKEN if word in name]:
        hint = f"; for a pattern, write register(pattern={name!r})" if "(" in taken else ""
        raise ValueError(f"name: expected one without {', '.join(map(repr, taken))}, got {name!r}{hint}")
    pattern = read_pattern(pattern)
    check_layers("attend", attend)
    register_pair(name, partial(attend_layer, pattern, by=attend), pattern_mask)


def register_pair(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register an attention function and its masks. Raises ImportError if transformers is missing or too old."""
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"transformers: expected {oldest} or newer, got {transformers.__version__}")
    check_parts("attention")
    from transformers import AttentionInterface, AttentionMaskInterface

    # Without the second, transformers drops every mask and says nothing.
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    if not _registered:
        # transformers has no hook that sees a model and its implementation.
        register_module_module_registration_hook(_refuse_by_hand)
    _registered.add(name)


def _refuse_by_hand(module: nn.Module, name: str, part: nn.Module | None) -> None:
    """Raise ValueError if a new model is to use ringtile, and computes attention by itself."""
    implementation = getattr(module.__dict__.get("config"), "_attn_implementation", None)
    if implementation is None or implementation not in _registered:
        return
    from transformers import PreTrainedModel

    if implementation == CHOSEN and is_replaced(type(module)):
        # It shares its config with a model that `use_ringtile` changed.
        if _refuse_new not in getattr(module, "_forward_pre_hooks", {}).values():
            module.register_forward_pre_hook(_refuse_new)
    elif isinstance(module, PreTrainedModel) and _is_by_hand(cast(Any, type(module))):
        advice = "leave the name out"
        if module.config.model_type in CONVERTED or is_replaced(type(module)):
            advice += ", and call use_ringtile(model)"
        raise ValueError(
            f"attn_implementation={implementation!r}: {type(module).__name__} ignores it, because its attention is "
            f"written by hand; {advice}"
        )


def _refuse_new(module: Any, _: Any) -> None:
    """Raise ValueError for a call of a module with the config of a model of `use_ringtile`, and without its choice."""
    if not hasattr(module, KEPT) and is_streamed(module.config):
        raise ValueError(
            f"pattern: {type(module).__name__} is new, or of a model that shares its config with one of use_ringtile; "
            "call use_ringtile(model, ...) with this model"
        )


# The source of a class does not change, and reading it takes longer than building a small model.
@cache
def _is_by_hand(kind: Any) -> bool:
    """Return True if it is certain that a class of models, or a part of it, has attention of its own."""
    try:
        source = getsource(sys.modules[kind.__module__])
        # Code for an older transformers looks the function up in this dict, and a notebook has no source. A model that
        # looks up a class instead raises a KeyError when it is built, or ignores a later choice.
        by_name = "ALL_ATTENTION_FUNCTIONS" in source or not _OWN_ATTENTION.search(source)
        return not by_name or bool(_OWN_CLASSES.search(source))
    except (KeyError, OSError, TypeError):
        return False


def use_ringtile(
    model: "Model",
    pattern: GivenPattern = None,
    attend: LayerAttend = None,
    decode: LayerDecode = None,
    *,
    pack: bool = False,
) -> "Model":
    """Switch a model of transformers to ringtile, in place, and return it.

    Attention that Longformer, BigBird, BLOOM, MPT, DeBERTa-v2, WavLM, MPNet, Swin and Granite Speech write by hand is
    replaced, and their weights are kept. Copies and pickles of the model have its pattern, ``attend`` and ``decode``,
    too. `save_pretrained` saves none: call this again.

    Args:
        model: The model, with or without a head.
        pattern: Makes the model sparse, see `register`.
        attend: Computes the attention, one function or one per layer, see `register`. Layers with a softcap, sinks or
            cross attention raise a ValueError in their first call.
        decode: A `ringtile.adaptive.Choice` of the tiles that a call with one query reads from a ``DynamicCache``, the
            default of ``generate``. A list has one per layer, or None for all keys. Its scores see the query and
            earlier keys: ``Choice(Blend(None), Density(0.1))``. Layers without all keys raise in their first step.
        pack: True computes the real tokens of a padded batch as documents of one row, so padding costs nothing.
            Outputs are those of the padded call, and 0 at padding. For embeddings and rerankers: there is no cache.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If this is no model of transformers, if a part of it computes attention by itself, if the pattern,
            ``attend`` or ``decode`` is invalid, or if rows of the model cannot be packed.

    Example:
        >>> from ringtile.patterns import GlobalTokens, Window
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=1))
        >>> model = use_ringtile(model, Window(256) | GlobalTokens(1))
        >>> model = use_ringtile(model, "window(256) | global_tokens(1)")
    """
    given: Any = model
    if not isinstance(given, nn.Module) or not hasattr(given, "set_attn_implementation"):
        inside = sorted({type(part).__name__ for part in parts_of(model)}) if isinstance(given, nn.Module) else []
        got = f"{type(model).__name__}; pass the {' or '.join(inside)} in it" if inside else repr(model)
        raise ValueError(f"model: expected a model of transformers, got {got}")
    check_layers("attend", attend, model)
    check_layers("decode", decode, model)
    if is_stateful(attend):
        raise ValueError(f"attend: expected one per layer, since a call changes later ones, got {attend!r}")
    pattern = read_pattern(pattern)
    register_pair(CHOSEN, _attend_chosen, pattern_mask)
    kind = model.config.model_type
    if kind in CONVERTED:
        for argument, given in (("pattern", pattern), ("attend", attend), ("decode", decode), ("pack", pack or None)):
            if given is not None:
                raise ValueError(f"{argument}: {kind} has its own, got {given!r}")
        # Modules of these kinds do not look up an attention function, so no name is set.
        convert(model, kind)
        return model
    if pack and (attend is not None or decode is not None):
        raise ValueError(f"pack: expected False with attend= or decode=, which choose by row, got {pack=}")
    if pack:
        pack_rows(model)
    switch(model, CHOSEN)
    # On the modules, not in a table of models: a model that is dropped takes its choice along, and a copy has it.
    chosen = _Chosen(pattern, attend, decode, pack)
    for module in model.modules():
        setattr(module, KEPT, chosen)
    replace_methods(model, INDEXERS)
    replace_biases(model)
    if decode is not None:
        check_parts("decode=")
        check_cache(model, "decode=")
        from ringtile.integrations.transformers.decode import make_room

        for module in model.modules():
            if hasattr(module, "layer_idx") and make_room not in getattr(module, "_forward_pre_hooks", {}).values():
                module.register_forward_pre_hook(make_room, with_kwargs=True)
    return model


class _Chosen:
    """What `use_ringtile` chose for a model."""

    def __init__(self, pattern: LayerPattern, attend: LayerAttend, decode: LayerDecode, pack: bool) -> None:
        self.pattern, self.attend, self.decode, self.pack = pattern, attend, decode, pack

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The process that loads a model may not know the name.
        self.__dict__.update(state)
        register_pair(CHOSEN, _attend_chosen, pattern_mask)


def _attend_chosen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    _refuse_new(module, None)
    chosen: _Chosen = getattr(module, KEPT)
    if chosen.pack and options.get(ROWS) is None:
        raise ValueError(f"pack: expected a call of the whole model, got one of {type(module).__name__} without rows")
    given = module, query, key, value, attention_mask
    return attend_layer(chosen.pattern, *given, by=chosen.attend, decode=chosen.decode, **options)


def switch(model: Any, name: str) -> Callable[[], None]:
    """Switch all parts of a model to an attention implementation. Return a function that switches back."""
    # transformers switches the parts that it can and keeps quiet about the others.
    parts = parts_of(model)
    switch_back = switch_back_of(parts)
    for part in parts:
        if name == CHOSEN and is_replaced(type(part)):
            part.config._attn_implementation_internal = name
    if any(part.config._attn_implementation != name for part in parts):
        model.set_attn_implementation(name)
    ours = [x for x in parts if x.config._attn_implementation == name]
    by_hand = [x for x in ours if _is_by_hand(cast(Any, type(x))) and not (name == CHOSEN and is_replaced(type(x)))]
    stayed = {type(x).__name__ for x in parts if x not in ours or x in by_hand}
    stayed |= _OWN_SCORES & {type(module).__name__ for module in model.modules()}
    if stayed:
        switch_back()
        raise ValueError(
            f"model: expected parts that use transformers' attention interface, got {', '.join(sorted(stayed))}, whose "
            "attention is written by hand or has a bias of all pairs"
        )
    return switch_back


def switch_back_of(parts: Sequence[Any]) -> Callable[[], None]:
    """Return a function that switches model parts back to the implementations that they have now."""
    before = [part.config._attn_implementation for part in parts]

    def switch_back() -> None:
        for part, was in zip(parts, before, strict=True):
            part.config._attn_implementation_internal = was

    return switch_back


def parts_of(model: Any) -> list[Any]:
    from transformers import PreTrainedModel

    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return the class of a model of transformers, its sizes, and a hash of values from each of its weights.

    The facts do not depend on the dtype of the weights. `ringtile.adaptive.Calibration` keeps them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        >>> facts = model_facts(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)))
        >>> facts["name"], facts["layers"], facts["heads"], len(facts["weights_sha256"])
        ('LlamaForCausalLM', 2, 4, 64)
    """
    config: Any = model.config
    config = config.get_text_config()
    check_attributes(config, "calibration", "num_attention_heads num_hidden_layers")
    heads = config.num_attention_heads
    known = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _SAMPLE)].to(torch.bfloat16).cpu().view(torch.int16)
        known.update(f"{name}{tuple(parameter.shape)}{some.tolist()}".encode())
    return {
        "name": type(model).__name__,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "key_heads": getattr(config, "num_key_value_heads", None) or heads,
        "weights_sha256": known.hexdigest(),
    }
