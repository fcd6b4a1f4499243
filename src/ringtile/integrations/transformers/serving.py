"""Continuous batching of transformers: attention over its paged cache, request by request, without a mask of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from ringtile.functional import sparse_attention
from ringtile.integrations.transformers.attention import KEPT, check_arguments, limits_of, pattern_of_layer
from ringtile.integrations.transformers.registry import parts_of, register_pair
from ringtile.patterns import Causal, Window
from ringtile.patterns.facts import moves_along

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)

_NAME = "ringtile_flash"
"""transformers builds one mask over all requests, unless the name of an implementation contains "flash"."""


@contextmanager
def continuous_batching(model: Model) -> Iterator[Model]:
    """Have `generate_batch` and other continuous batching of a model use ringtile inside the context.

    transformers serves requests of any lengths together from a paged cache. With `sdpa`, each step holds a mask of all
    queries and all keys of all requests. Here each request attends to its own keys, and there is no mask. Outputs are
    those of `generate` for each request alone. Windows, sinks, softcaps and the ``pattern`` of `use_ringtile` are kept.
    ``attn_implementation="ringtile"`` is no name that transformers' continuous batching accepts, hence this context.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If the model has ``attend`` or ``decode`` of `use_ringtile`, or if it calls attention without the
            paged cache.

    Example:
        >>> from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
        >>> how = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
        >>> with continuous_batching(model):
        ...     found = model.generate_batch([[5, 6, 7], [8]], generation_config=how)
        >>> sum(len(each.generated_tokens) for each in found.values())
        4
    """
    for module in model.modules():
        chosen = getattr(module, KEPT, None)
        for name in ("attend", "decode"):
            if getattr(chosen, name, None) is not None:
                raise ValueError(f"{name}: expected None for continuous batching, got {getattr(chosen, name)!r}")
    register_pair(_NAME, _attend_paged, _no_mask)
    parts = parts_of(model)
    before = [part.config._attn_implementation for part in parts]
    try:
        # Not by set_attn_implementation, which would load FlashAttention for such a name.
        for part in parts:
            part.config._attn_implementation_internal = _NAME
        yield model
    finally:
        for part, was in zip(parts, before, strict=True):
            part.config._attn_implementation_internal = was


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: positions in the cache say which keys are whose."""


def _attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write the new keys ``[1, Hkv, Nq, D]`` of all requests, read those of each, and compute its attention."""
    if cache is None or attention_mask is not None or dropout:
        raise ValueError(
            f"cache: expected a call of continuous batching, without a mask and dropout, got {type(cache).__name__}; "
            "leave the context of continuous_batching for other calls"
        )
    check_arguments(options)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    rule = Causal() if sliding_window is None else Causal() & Window(sliding_window - 1)
    if (chosen := getattr(module, KEPT, None)) is not None:
        pattern = pattern_of_layer(chosen.pattern, module)
        if pattern is not None and sliding_window is not None and not moves_along(pattern):
            raise ValueError(f"pattern: expected one that moves along for layers with a window, got {pattern!r}")
        rule = rule if pattern is None else rule & pattern
    how = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1], **limits_of(softcap, s_aux)}
    bounds = [pairwise(options[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    begin_query = begin_key = 0
    # Requests beside each other that have as many queries and keys are one batch.
    for (n_queries, n_keys), alike in groupby((b - a, d - c) for (a, b), (c, d) in zip(*bounds, strict=True)):
        n = len(list(alike))
        rows, keys = slice(begin_query, begin_query + n * n_queries), slice(begin_key, begin_key + n * n_keys)
        begin_query, begin_key = rows.stop, keys.stop
        if n_queries:
            q, k, v = (
                x[0, :, part].unflatten(1, (n, -1)).transpose(0, 1)
                for x, part in ((query, rows), (key, keys), (value, keys))
            )
            found = sparse_attention(q, k, v, rule, **how)
            out[0, :, rows].unflatten(1, (n, -1)).copy_(found.transpose(0, 1))
    return out.transpose(1, 2), None
