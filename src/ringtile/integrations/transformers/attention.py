"""The attention function that transformers calls, on `ringtile.sparse_attention`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor, nn

from ringtile.adaptive import Choice
from ringtile.adaptive.steps import Pages, attend_step, check_steps
from ringtile.functional import sparse_attention
from ringtile.functional.attend import Attend
from ringtile.integrations.transformers.door import refuse_arguments
from ringtile.integrations.transformers.indexers import learned
from ringtile.integrations.transformers.masks import KeptPairs, PatternMask, kept_by_mask, pairs
from ringtile.patterns import Causal, Chosen, Dense, Documents, Pattern, from_mask, per_document
from ringtile.patterns.documents import counted_from
from ringtile.patterns.facts import moves_along, sees_no_future
from ringtile.patterns.grammar import as_rule
from ringtile.patterns.private import assert_async
from ringtile.patterns.traced import constant, outside_graphs

LayerPattern = Union[Pattern, Mapping[str, Pattern | None], Callable[[nn.Module], Any], None]  # noqa: UP007
"""A pattern for all layers, one per kind of layer (``config.layer_types``), or a function of the attention module."""

GivenPattern = Union[LayerPattern, str, Mapping[str, Pattern | str | None]]  # noqa: UP007
"""A `LayerPattern` whose patterns may be texts, as `ringtile.patterns.parse` reads them."""

LayerAttend = Union[Attend, Sequence[Attend | None], nn.ModuleList, None]  # noqa: UP007
"""A function that computes the attention of all layers, or one per layer, or None for `sparse_attention`."""

LayerDecode = Union[Choice, Sequence[Choice | None], None]  # noqa: UP007
"""How steps of one query choose tiles of the cache in all layers, or one per layer, or None for all keys."""

KEPT = "_ringtile"
"""The attribute of modules that has what `use_ringtile` chose."""
PAGES = "_ringtile_pages"
"""The attribute of keys of a cache that holds what choices know about them."""
ROWS = "packed_rows"
"""The argument of attention that has the `Documents` of a packed row, or `Dense()` for rows without padding."""

SOFTMAX = "dropout", "scaling", "softcap", "s_aux"
"""The arguments that `softmax_of` reads."""


def read_pattern(pattern: GivenPattern) -> LayerPattern:
    """Return the patterns of the layers of a model, with texts parsed. Raise ValueError if they are none."""
    if isinstance(pattern, Mapping):
        return {kind: _pattern(one, "for each kind of layer") for kind, one in pattern.items()}
    if callable(pattern) and not isinstance(pattern, Pattern | type):
        return pattern
    return _pattern(pattern, "a dict of layer kinds or a function of a layer")


def _pattern(given: Any, others: str) -> Pattern | None:
    if given is None:
        return None
    found = as_rule(given, f"a Pattern, its text, None, {others}")
    if found.batch_size is not None:
        raise ValueError(f"pattern: expected one for all batch elements, got {found.batch_size=}")
    return found


def pattern_of_layer(pattern: LayerPattern, module: nn.Module) -> Pattern | None:
    """Return the pattern of one attention module, or None for its own mask. Raise ValueError if it is not for it."""
    if pattern is None:
        return None
    if callable(pattern) and not isinstance(pattern, Pattern):
        return _pattern(pattern(module), "of a layer")
    if _has_cross_attention(module):
        raise ValueError(
            "pattern: expected a function of the attention module for a model with cross attention, which returns None "
            f"for these layers, got {pattern!r}"
        )
    if isinstance(pattern, Pattern):
        return pattern
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is None or layer is None:
        raise ValueError(f"pattern: expected one Pattern or a function, {type(module).__name__} has no kind of layer")
    if unknown := set(pattern) - set(kinds):
        raise ValueError(f"pattern: expected kinds of layers among {sorted(set(kinds))}, got {sorted(unknown)}")
    return pattern.get(kinds[layer])


def _has_cross_attention(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    named = any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))
    # The configs of T5Gemma and T5Gemma2 do not say so.
    return named or any(word in type(module).__name__ for word in ("CrossAttention", "MergedAttention"))


_OF_LAYERS = {"attend": ("function", "a function of query, key and value"), "decode": ("choice", "a Choice")}
"""The arguments that one value for all layers, or one or None per layer, can have, and their kinds of values."""


def check_layers(name: str, given: Any, model: Any = None) -> None:
    """Raise ValueError if ``attend`` or ``decode`` has another type or number, or if a choice has no steps."""
    kind, wanted = _OF_LAYERS[name]
    several = isinstance(given, Sequence | nn.ModuleList)
    if several and model is not None:
        # Some models have several texts, and so no number.
        n_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        if len(given) != n_layers:
            raise ValueError(f"{name}: expected one {kind} per layer for {n_layers} layers, got {len(given)}")
    for one in given if several else (given,):
        if one is not None and not (callable(one) if name == "attend" else isinstance(one, Choice)):
            raise ValueError(f"{name}: expected {wanted}, or one or None per layer, got {one!r}")
        if name == "decode" and one is not None:
            check_steps(one)


def for_layer(name: str, given: Any, module: nn.Module) -> Any:
    """Return what ``attend`` or ``decode`` is for one module, or None. Raise ValueError if it is not for it."""
    if given is None:
        return None
    if _has_cross_attention(module):
        raise ValueError(f"{name}: expected a model without cross attention, got {type(module).__name__}")
    if not isinstance(given, Sequence | nn.ModuleList):
        return given
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(given):
        raise ValueError(
            f"{name}: expected one {_OF_LAYERS[name][0]} per layer, got {len(given)} for {layer=} of {type(module)}"
        )
    return given[layer]


def from_first(
    pattern: Pattern, origins: tuple[int, ...], n_tokens: int, documents: Documents | None = None
) -> Pattern:
    """Count positions from the first real token of each batch element, or of each document."""
    if (documents is None and not any(origins)) or moves_along(pattern):
        return pattern
    # One origin serves all batch elements if it is the same for each.
    origins = origins[:1] if len(set(origins)) == 1 else origins
    return per_document(pattern, counted_from(origins, n_tokens, documents))


def intersected(kept: KeptPairs, pattern: Pattern, query: Tensor, n_keys: int) -> KeptPairs:
    """Return the pairs that a pattern keeps too. It begins anew in each document, after its padding."""
    origins: tuple[int, ...] = (0,)
    documents = None
    if not moves_along(pattern):
        documents = kept.documents
        real, leading = kept.real, kept.leading or (0,)
        if real is not None and torch.compiler.is_compiling():
            message = "pattern counts tokens from the first real one: torch.compile needs padding on the right"
            assert_async(real[:, 0].all(), message)
        elif real is not None:
            leading = tuple(real.long().argmax(1).tolist())
        origins = tuple(lead - kept.first for lead in leading)
    mine = from_first(pattern, origins, n_keys, documents)
    # Positions of the mask's rule and of the pattern agree, unless the mask was given as values with room after it.
    heads, n_queries = query.shape[1:3]
    both: Pattern | None = None
    if isinstance(kept.pattern, Dense):
        both = mine
    elif kept.start == int(kept.offset):
        both = _joined(kept.pattern.text, mine.text) if torch.compiler.is_compiling() else kept.pattern & mine
    if n_queries == 1 and both is not None and (isinstance(kept.offset, Tensor) or both.text is None):
        # One query has a mask of keys, and needs no index.
        alike = pattern.num_heads is None and len({pattern.head_class(head) for head in range(heads)}) == 1
        row = pairs(both, kept.offset, 1, n_keys, query.device, 1 if alike else heads)[:, :, 0]
        row = row if kept.key_mask is None else row & kept.key_mask[:, None]
        return kept._replace(pattern=Dense(), key_mask=row.expand(len(query), -1, n_keys))
    offset = int(kept.offset)
    if both is None:
        # The mask was evaluated, aligned to the last key, and the cache has room after it.
        more = pairs(mine, offset, n_queries, n_keys, query.device, heads)
        mask = pairs(kept.pattern, kept.start, n_queries, n_keys, query.device, kept.pattern.num_heads or 1)
        return kept._replace(pattern=from_mask(mask & more))
    return kept._replace(pattern=both, start=offset)


_intersected_outside_graphs = torch.compiler.disable(
    intersected, reason="patterns without a text form need an index that is built outside graphs"
)


@constant
def _joined(first: str | None, second: str | None) -> Pattern:
    """Return the pairs of two patterns in a graph, in which no method of a rule that was read can be called."""
    return as_rule(first) & as_rule(second)


def _kept(module: nn.Module, mask: Tensor | None, query: Tensor, n_keys: int, is_causal: bool | None) -> KeptPairs:
    """Return the kept pairs of a call from its mask, or from the module's causality if there is no mask."""
    if isinstance(mask, PatternMask):
        if mask.shape[3] != n_keys and not torch.compiler.is_compiling():
            raise ValueError(f"attention_mask: expected one of {n_keys} keys, got {mask.shape=}")
        return mask.kept
    if mask is not None:
        return kept_by_mask(mask, query, n_keys)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Eager attention has its mask only, and models without another are written for it.
    causal = causal and _has_sdpa(type(module))
    # Without a mask, the first query is at the first key, and a single query is the last one.
    start = 0 if query.shape[2] > 1 else n_keys - 1
    return KeptPairs(Causal() if causal else Dense(), start, None, start)


@constant
def _has_sdpa(kind: type) -> bool:
    """Return False if the models in the file of a class have no `sdpa` attention, which alone reads ``is_causal``."""
    file = sys.modules[kind.__module__].__dict__
    has = [getattr(x, "_supports_sdpa", None) for x in file.values() if getattr(x, "__module__", "") == kind.__module__]
    return True in has or False not in has


def attend(
    pattern: LayerPattern,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    by: LayerAttend = None,
    decode: LayerDecode = None,
    packed_rows: Pattern | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one layer of a model, as transformers' interface asks for it.

    ``pattern`` says which of the pairs of the model's mask to keep: the mask that `pattern_mask` made, a bool or float
    mask of all pairs, or None. ``by`` computes the attention in place of `sparse_attention`, unless there is only one
    query and ``by`` has no ``steps``. ``decode`` chooses the tiles of one query. With ``packed_rows``, each document
    keeps the pairs that it keeps alone. Returns the output ``[B, Nq, H, Dv]``, and the weights ``[B, H, Nq, Nk]`` with
    ``output_attentions``, otherwise None. Raises ValueError if the model passes an argument or a mask that ringtile
    does not support.
    """
    indices, blocks = options.pop("indices", None), options.pop("block_indices", None)
    bias_of = options.pop("position_bias") if callable(options.get("position_bias")) else None
    weighs = options.pop("output_attentions", None)
    if weighs is None:
        weighs = getattr(getattr(module, "config", None), "output_attentions", False)
    refuse_arguments(options, *SOFTMAX, "cu_seq_lens_q", "cu_seq_lens_k")
    n_keys, width = key.shape[2], value.shape[3]
    if query.shape[0] == 1 < key.shape[0]:
        # Eager attention broadcasts one row of queries, such as learned ones, to the batch.
        query = query.expand(key.shape[0], -1, -1, -1)
    kept = _kept(module, attention_mask, query, n_keys, is_causal)
    if options.get("cu_seq_lens_q") is not None:
        # Bounds (0, 7, 40) are sequences of 7 and 33 tokens, in one row, as for flash attention.
        bounds, of_keys = options["cu_seq_lens_q"], options.get("cu_seq_lens_k")
        if len(query) != 1 or query.shape[2] != n_keys or (of_keys is not None and not torch.equal(bounds, of_keys)):
            raise ValueError(f"cu_seq_lens_q: expected bounds of one row of {n_keys} tokens, got {query.shape=}")
        kept = _in_documents(kept, Documents(cu_seqlens=bounds))
    if isinstance(packed_rows, Documents):
        kept = _in_documents(kept, packed_rows)
    if (of_layer := pattern_of_layer(pattern, module)) is not None:
        if getattr(module, "compressor", None) is not None:
            raise ValueError(f"pattern: expected None for a layer with compressed keys, got {of_layer!r}")
        # A graph knows a pattern by its text, which has no padding and no keys that a sliding cache has dropped.
        is_first = moves_along(of_layer) or (kept.first == 0 and kept.leading is None)
        has_text = is_first and None not in (kept.pattern.text, of_layer.text)
        in_graph = has_text or not torch.compiler.is_compiling()
        kept = (intersected if in_graph else _intersected_outside_graphs)(kept, of_layer, query, n_keys)
    chosen = None if indices is None else Chosen(indices.unsqueeze(1))
    if blocks is not None:
        chosen = Chosen(blocks, module.indexer.block_size)  # type: ignore[union-attr, arg-type]
    if (chosen := learned(module, query, key, kept, chosen, options.get("scaling"))) is not None:
        kept = kept._replace(pattern=kept.pattern & chosen)
    softmax = softmax_of(module, query, key, options)
    if query.shape[2] == 1 and isinstance(kept.pattern, Dense):
        # Its place matters to ALiBi alone: no key is after it.
        kept = kept._replace(start=n_keys - 1)
    scores: dict[str, Any] = {} if bias_of is None else bias_of(query, key, kept.start)
    by_layer, choice = for_layer("attend", by, module), for_layer("decode", decode, module)
    if weighs:
        if by_layer is not None or choice is not None:
            raise ValueError("output_attentions: expected False for a layer with attend= or decode=, got True")
        # Attention is linear in the values, so an identity matrix returns the weights.
        unit = torch.eye(n_keys, dtype=value.dtype, device=value.device).expand(*value.shape[:2], -1, -1)
        value = torch.cat([value, unit], 3)
    if by_layer is not None and (query.shape[2] > 1 or getattr(by_layer, "steps", False)):
        out = _adapted(by_layer, query, key, value, kept, scores, softmax)
    elif query.shape[2] == 1 and choice is not None:
        out = _step(choice, query, key, value, kept, scores, softmax)
    elif kept.key_mask is not None and kept.key_mask.dim() == 3:
        out = _by_head(query, key, value, kept.key_mask, softmax | scores)
    else:
        out = sparse_attention(
            query, key, value, kept.pattern, start=kept.start, key_mask=kept.key_mask, **softmax, **scores
        )
    return out[..., :width].transpose(1, 2).contiguous(), out[..., width:] if weighs else None


def softmax_of(module: nn.Module, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `sparse_attention` for the arguments of a layer."""
    sinks = options.get("s_aux")
    if sinks is None and getattr(module, "sinks", None) is not None:
        raise ValueError("s_aux: expected the sinks of the layer, got None")
    return {
        "dropout_p": options.get("dropout", 0.0),
        "scale": options.get("scaling"),
        "enable_gqa": query.shape[1] != key.shape[1],
        "softcap": options.get("softcap") or 0.0,
        "sinks": None if sinks is None else sinks.flatten(),
    }


@outside_graphs
def _adapted(
    compute: Attend, query: Tensor, key: Tensor, value: Tensor, kept: KeptPairs, scores: Any, softmax: Any
) -> Tensor:
    """Compute the attention of a layer by a function of yours, inside the pairs of the model's mask."""
    _check_limits(softmax, scores, "attend")
    pattern, key_mask, end = kept.pattern, kept.key_mask, kept.start + query.shape[2]
    if end < key.shape[2] and sees_no_future(pattern):
        # A static cache has room after the last query: of 512 keys, a prompt of 100 tokens has filled 100.
        key, value = key[:, :, :end], value[:, :, :end]
        key_mask = None if key_mask is None else key_mask[:, :end]
    if end != key.shape[2]:
        raise ValueError(
            f"attend: expected queries that end with the keys, got {query.shape=} at {kept.start}, {key.shape=}"
        )
    rule = None if pattern in (Dense(), Causal()) else pattern
    out: Tensor = compute(query, key, value, pattern=rule, is_causal=pattern == Causal(), key_mask=key_mask, **softmax)
    return out


def _check_limits(softmax: dict[str, Any], scores: dict[str, Any], argument: str) -> None:
    """Take softcap and sinks out of the options. Raise ValueError if a layer has them or a bias."""
    limits = {"softcap": softmax.pop("softcap") or None, "s_aux": softmax.pop("sinks"), **scores}
    if refused := [name for name, limit in limits.items() if limit is not None]:
        raise ValueError(f"{refused[0]}: expected a layer without softcap, sinks and bias for {argument}=, got one")


@outside_graphs
def _step(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, kept: KeptPairs, scores: Any, softmax: Any
) -> Tensor:
    """Compute the attention of one query over the tiles of the cache that a choice keeps."""
    _check_limits(softmax, scores, "decode")
    pages, n_keys = getattr(key, PAGES, None), key.shape[2]
    if kept.pattern != Causal() or kept.start != n_keys - 1 or softmax["dropout_p"]:
        raise ValueError(
            "decode: expected a causal layer, a DynamicCache with all its keys, no pattern= and no dropout, got "
            f"{kept.pattern!r}; give this layer None"
        )
    if pages is None and n_keys > choice.block:
        raise ValueError(
            "decode: expected a model of use_ringtile, and keys of a DynamicCache whose layer keeps all of them, got "
            f"{key.shape=} from elsewhere; give this layer None, or leave decode= out"
        )
    # Of fewer keys than a tile there is nothing to choose, and nothing to remember.
    known = Pages(choice) if pages is None else pages.setdefault(choice, Pages(choice))
    return attend_step(choice, known, query, key, value, key_mask=kept.key_mask, scale=softmax["scale"])


def _by_head(query: Tensor, key: Tensor, value: Tensor, masks: Tensor, options: dict[str, Any]) -> Tensor:
    """Compute the attention of one query, with a mask of keys per head, or one for all heads: ``[B, 1 or H, Nk]``."""
    if masks.shape[1] == 1:
        out: Tensor = sparse_attention(query, key, value, key_mask=masks[:, 0], **options)
        return out
    # A mask of keys is one for all heads of a call. With 8 query heads on 2 key heads, head 5 reads key head 5 // 4.
    sinks, shared = options.pop("sinks"), query.shape[1] // key.shape[1]
    outs = []
    for head, of_query in enumerate(query.split(1, 1)):
        keys, values = (x.narrow(1, head // shared, 1) for x in (key, value))
        of_head = None if sinks is None else sinks[head : head + 1]
        outs.append(sparse_attention(of_query, keys, values, key_mask=masks[:, head], sinks=of_head, **options))
    return torch.cat(outs, 1)


@outside_graphs
def _in_documents(kept: KeptPairs, documents: Documents) -> KeptPairs:
    """Return the kept pairs inside the documents of packed rows."""
    return kept._replace(pattern=kept.pattern & documents, documents=documents)
