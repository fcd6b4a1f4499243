"""Continuous batching of transformers: attention over its paged cache, request by request, without a mask of all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ringtile.functional import sparse_attention
from ringtile.integrations.transformers.attention import KEPT, SOFTMAX, pattern_of_layer, softmax_of
from ringtile.integrations.transformers.door import check_attributes, check_cache, check_parts, refuse_arguments
from ringtile.integrations.transformers.registry import parts_of, register_pair, switch_back_of
from ringtile.integrations.transformers.rounded_pages import Rounding, register_roundings, restored, rounded
from ringtile.patterns import Causal, Window
from ringtile.patterns.facts import moves_along

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    from ringtile.integrations.transformers.registry import Model

_NAME = "ringtile_flash"
"""transformers builds one mask over all requests, unless the name of an implementation contains "flash"."""
_OF_STEPS = "cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "logits_indices", "logits_processor_args"
"""The arguments of a step that say which tokens belong to which request, and where the pages hold their keys."""
_OF_PAGES = "block_physical_stride get_cache_for_block_table index layer_type supports_block_table tokens_per_page"
"""The attributes of transformers' record of the pages of a layer that say where its keys lie."""
_ROUNDINGS: dict[str, Rounding] = {f"{_NAME}_bfloat16": "bfloat16", f"{_NAME}_int8": "int8"}


class _Pages(NamedTuple):
    """The pages of a step in which each request has one query, and pages of its own."""

    span: slice
    """Of the pages of a layer: those of the step, and perhaps some between them."""
    request: Tensor
    """``[pages]``: the request of each page. One between them has any, and no keys."""
    key_lengths: Tensor
    """``[pages]``: the keys in each page."""
    table: Tensor
    """``[requests, most]``: the pages of each request, and then its first one again."""
    absent: Tensor
    """Bool ``[requests, most, 1]``: True for these."""


# Bound: one step per kind of layers and cache. Owner: transformers' record of the pages, weakly. Key: the step's list
# of read indices, which transformers makes anew for each step.
_steps: WeakKeyDictionary[Any, tuple[Any, _Pages | None]] = WeakKeyDictionary()


@contextmanager
def continuous_batching(model: Model, *, cache: Rounding | None = None) -> Iterator[Model]:
    """Have `generate_batch` and other continuous batching of a model use ringtile inside the context.

    transformers serves requests of any lengths together from a paged cache. With `sdpa`, each step holds a mask of all
    queries and all keys of all requests. Here each request attends to its own keys, and there is no mask. Outputs are
    those of `generate` for each request alone. Windows, sinks, softcaps and the ``pattern`` of `use_ringtile` are kept.
    ``attn_implementation="ringtile"`` is no name that transformers' continuous batching accepts, hence this context.

    Args:
        model: A model whose layers have full or sliding attention.
        cache: What the pages hold: keys and values in the model's dtype, in ``"bfloat16"``, or in ``"int8"`` with a
            scale for each token and head, which rounds by at most 1/254 of the largest number there. The softmax over
            the rounded keys is exact, in the model's dtype. ``num_blocks`` still counts pages of the model's dtype, so
            in float32 with a head_dim of 64, the same memory holds 2 or 3.76 times as many tokens.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If ``cache`` has another value, if the model has ``attend`` or ``decode`` of `use_ringtile`, or if
            it calls attention without the paged cache.

    Example:
        >>> from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
        >>> how = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
        >>> with continuous_batching(model):
        ...     found = model.generate_batch([[5, 6, 7], [8]], how, ContinuousBatchingConfig(num_blocks=8))
        >>> sum(len(each.generated_tokens) for each in found.values())
        4
    """
    for module in model.modules():
        chosen = getattr(module, KEPT, None)
        for name in ("attend", "decode"):
            if getattr(chosen, name, None) is not None:
                raise ValueError(f"{name}: expected None for continuous batching, got {getattr(chosen, name)!r}")
    names = {rounding: name for name, rounding in _ROUNDINGS.items()}
    if cache is not None and cache not in names:
        raise ValueError(f"cache: expected one of {tuple(names)} or None, got {cache!r}")
    name = _NAME if cache is None else names[cache]
    check_parts("continuous batching")
    check_cache(model, "continuous batching")
    # Positions in the cache say which keys are whose, so there is no mask.
    register_pair(name, _attend_paged, lambda *_, **__: None)
    if cache is not None:
        check_parts("rounded pages")
        register_roundings(_ROUNDINGS)
    parts = parts_of(model)
    switch_back = switch_back_of(parts)
    hooks = [
        module.register_forward_pre_hook(_hand_on, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx") and "cache" in inspect.signature(module.forward).parameters
    ]
    try:
        # Not by set_attn_implementation, which would load FlashAttention for such a name.
        for part in parts:
            part.config._attn_implementation_internal = name
        yield model
    finally:
        switch_back()
        for hook in hooks:
            hook.remove()


class _HandedOn:
    """A paged cache that leaves the keys and values of a layer to its attention function."""

    def __init__(self, cache: PagedAttentionCache) -> None:
        self.held = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, _: int, kwargs: Any = None, **unknown: Any
    ) -> tuple[Tensor, Tensor]:
        refuse_arguments(unknown)
        if kwargs is None:
            raise ValueError("kwargs: expected those of attention in a call of the paged cache")
        self.key, kwargs["cache"] = key_states, self
        return key_states, value_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


def _hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have an attention module of transformers 5.24 or newer give its paged cache to its attention function."""
    cache = kwargs.get("cache")
    if not isinstance(cache, _HandedOn) and hasattr(cache, "layer_to_allocator"):
        kwargs["cache"] = _HandedOn(cache)


def _attend_paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Write the new keys ``[1, Hkv, Nq, D]`` of all requests, read those of each, and compute its attention."""
    cache, sliding_window = options.pop("cache", None), options.pop("sliding_window", None)
    if cache is None or attention_mask is not None or options.get("dropout"):
        raise ValueError(
            f"cache: expected a call of continuous batching, without a mask and dropout, got {type(cache).__name__}; "
            "leave the context of continuous_batching for other calls"
        )
    if isinstance(cache, _HandedOn):
        if cache.key is not key:
            raise ValueError("cache: expected the keys that attention gets, got others")
        cache = cache.held
    refuse_arguments(options, *SOFTMAX, *_OF_STEPS)
    if missing := [name for name in _OF_STEPS[:4] if name not in options]:
        raise ValueError(f"{missing[0]}: expected one in a step of continuous batching, got none")
    rule = Causal() if sliding_window is None else Causal() & Window(sliding_window - 1)
    if (chosen := getattr(module, KEPT, None)) is not None:
        pattern = pattern_of_layer(chosen.pattern, module)
        if pattern is not None and sliding_window is not None and not moves_along(pattern):
            raise ValueError(f"pattern: expected one that moves along for layers with a window, got {pattern!r}")
        rule = rule if pattern is None else rule & pattern
    how = softmax_of(module, query, key, options)
    # Transformers' record of the pages of a layer. Older versions have none.
    layer: Any = module.layer_idx
    allocator = getattr(cache, "layer_to_allocator", {}).get(layer)
    dtype, head_dim = getattr(allocator, "rounded_to", None), value.shape[3]
    # A page's output is rounded, and in half types that would be as much again as attention's own error.
    if dtype is None and allocator is not None and rule == Causal() and query.dtype.itemsize > 2:
        pages = _pages_of_step(allocator, options)
        if pages is not None:
            held, at = allocator.get_cache_for_block_table(layer), options["write_index"][allocator.index]
            return _attend_pages(query, key, value, held, at, pages, how), None
    elif dtype is not None:
        key, value = rounded(key, dtype), rounded(value, dtype)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=options)
    bounds = [pairwise(options[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    sizes = [(b - a, d - c) for (a, b), (c, d) in zip(*bounds, strict=True)]
    # Requests beside each other that have as many queries and keys are one batch, but rounded keys are restored alone.
    batches = [list(alike) for _, alike in groupby(sizes)] if dtype is None else [[size] for size in sizes]
    found, begin_query, begin_key = [], 0, 0
    for alike in batches:
        n, (n_queries, n_keys) = len(alike), alike[0]
        rows, keys = slice(begin_query, begin_query + n * n_queries), slice(begin_key, begin_key + n * n_keys)
        begin_query, begin_key = rows.stop, keys.stop
        if n_queries:
            q, k, v = (
                x[0, :, part].unflatten(1, (n, -1)).transpose(0, 1)
                for x, part in ((query, rows), (key, keys), (value, keys))
            )
            k, v = (x if dtype is None else restored(x, query.dtype) for x in (k, v))
            if n_queries == 1 and rule == Causal() and how["sinks"] is None:
                out = sparse_attention(_by_key_head(q[:, :, 0], k), k, v, **how).flatten(1, 2)
            else:
                out = sparse_attention(q, k, v, rule, **how).transpose(1, 2).flatten(0, 1)
            found.append(out)
    if begin_query < query.shape[2]:
        # Places of a graph that no request has.
        found.append(query.new_zeros(query.shape[2] - begin_query, query.shape[1], head_dim))
    return (found[0] if len(found) == 1 else torch.cat(found)).unsqueeze(0), None


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """Return one query ``[B, H, D]`` as ``[B, Hkv, H / Hkv, D]``: each key is read once for the heads that share it."""
    return query.reshape(len(query), key.shape[1], -1, query.shape[2])


def _pages_of_step(allocator: Any, options: dict[str, Any]) -> _Pages | None:
    """Return where the keys of a layer lie in this step, or None if they must be gathered."""
    read, known = options["read_index"], _steps.get(allocator)
    if known is None:
        check_attributes(allocator, "continuous batching", _OF_PAGES)
    if known is None or known[0] is not read:
        keys = options["cu_seq_lens_k"][allocator.layer_type]
        known = _steps[allocator] = read, _found_pages(allocator, read[allocator.index], options["cu_seq_lens_q"], keys)
    return known[1]


def _found_pages(allocator: Any, read: Tensor, begin_query: Tensor, begin_key: Tensor) -> _Pages | None:
    """Find the pages of a step from the places that it reads, request by request."""
    size, stride = allocator.tokens_per_page, allocator.block_physical_stride
    if not allocator.supports_block_table or not len(read) or bool((begin_query.diff() != 1).any()):
        return None
    lengths = begin_key.diff()
    counts = (lengths + size - 1) // size
    first = counts.cumsum(0) - counts
    request = torch.arange(len(counts), device=read.device).repeat_interleave(counts)
    number = torch.arange(len(request), device=read.device) - first[request]
    page = read[begin_key[request] + number * size] // stride
    low, high = (int(x) for x in page.aminmax())
    # Requests can share the pages of a common beginning. Pages far apart would have too many others between them.
    if len(page.unique()) < len(page) or high - low >= 2 * len(page):
        return None
    place, step = page - low, stride // size
    of_page, key_lengths = lengths.new_zeros(2, high - low + 1, dtype=torch.int64)
    of_page[place], key_lengths[place] = request, (lengths[request] - number * size).clamp(max=size).long()
    table = place[first].unsqueeze(1).repeat(1, int(counts.max()))
    table[request, number] = place
    absent = torch.arange(table.shape[1], device=read.device) >= counts.unsqueeze(1)
    return _Pages(slice(low * step, high * step + 1, step), of_page, key_lengths, table, absent.unsqueeze(2))


def _attend_pages(
    query: Tensor, key: Tensor, value: Tensor, held: Sequence[Tensor], at: Tensor, pages: _Pages, how: dict[str, Any]
) -> Tensor:
    """Write the new keys, and attend to each page where it lies. The pages of a request are merged by their lse."""
    for x, new in zip(held, (key, value), strict=True):
        x.view(-1, *x.shape[2:]).index_copy_(0, at, new[0].transpose(0, 1))
    k, v = (x[pages.span].transpose(1, 2) for x in held)
    q = _by_key_head(query[0].transpose(0, 1)[pages.request], k)
    sinks = how.pop("sinks")
    found = sparse_attention(q, k, v, key_lengths=pages.key_lengths, return_lse=True, **how)
    out, lse = (x.flatten(1, 2) for x in found)
    weights = lse[pages.table].masked_fill(pages.absent, -math.inf)
    if sinks is not None:
        weights = torch.cat((weights, sinks.to(weights.dtype).expand(len(weights), 1, -1)), 1)
    # All pages of a row can have an lse of -inf, which softmax makes a NaN.
    weights = weights.softmax(1).masked_fill(weights == -math.inf, 0)[:, : pages.table.shape[1]].unsqueeze(3)
    merged: Tensor = (weights * out[pages.table]).sum(1).to(query.dtype).unsqueeze(0)
    return merged
