"""Self-attention of diffusers' models over a pattern. This module does not import diffusers."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringtile.functional import sparse_attention
from ringtile.patterns import Pattern, from_mask
from ringtile.patterns.checks import refuse_unknown
from ringtile.patterns.grammar import as_rule

_DROPPED = -10_000.0
"""What diffusers' models add to the scores of masked keys. It makes their weights 0 in every dtype."""


class SparseAttnProcessor:
    """An attention processor of diffusers that computes the pairs of a pattern only.

    It runs another processor, with `sparse_attention` in place of PyTorch's `scaled_dot_product_attention`. Everything
    else, such as projections, norms and rotary positions, stays that processor's own. The result is exact: the dense
    processor with the pattern as its mask.

    Masks intersect with the pattern. A bool mask per key becomes a key mask, and any other an exact pattern of pairs. A
    floating-point mask can contain 0, and -10,000 or less for dropped pairs. A query that keeps no keys returns zeros.

    Args:
        processor: Processor to run, without weights of its own, such as ``AttnProcessor2_0()``.
        pattern: Which pairs to keep, in the order in which the model joins its tokens.

    Raises ValueError if the processor is a module or a pattern is no `Pattern`. In a call: if the processor does not
    call ``scaled_dot_product_attention`` (as with another attention backend of diffusers), if there are not as many
    queries as keys, if a floating-point mask has other values, or under context parallelism.

    >>> from ringtile.patterns import Window
    >>> class Processor:
    ...     def __call__(self, attn, hidden_states):
    ...         x = hidden_states.unflatten(-1, (4, -1)).transpose(1, 2)
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)
    >>> SparseAttnProcessor(Processor(), Window(64))(None, torch.randn(1, 500, 32)).shape
    torch.Size([1, 500, 32])
    """

    _parallel_config: object = None

    def __init__(self, processor: Callable[..., Any], pattern: Pattern | str) -> None:
        if isinstance(processor, nn.Module):
            raise ValueError(f"processor: expected one without weights, got the module {type(processor).__name__}")
        self.processor, self.pattern = processor, as_rule(pattern)

    def __new__(cls, processor: object, pattern: Pattern | str) -> "SparseAttnProcessor":
        return super().__new__(_class_around(type(processor)))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[object, ...]:
        return SparseAttnProcessor, (self.processor, self.pattern)

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the processor over the kept pairs. Arguments and results are its own."""
        if self._parallel_config is not None:
            raise ValueError("context parallelism: not supported with a pattern, expected the whole sequence")
        attention = _SparseAttention(self.pattern)
        with attention:
            out = self.processor(attn, *args, **kwargs)
        if not attention.calls:
            raise ValueError(
                f"processor: {type(self.processor).__name__} did not call scaled_dot_product_attention: expected one "
                "that does, such as AttnProcessor2_0, with diffusers' native attention backend"
            )
        return out


# One class per class of processors, so that copies are of one type. A graph cannot call a `__call__` of the object.
@cache
def _class_around(inner: type) -> type[SparseAttnProcessor]:
    """Return the class around processors of a class, with the signature of their call, which diffusers reads."""

    @wraps(inner.__call__)
    def call(self: SparseAttnProcessor, attn: Any, *args: Any, **kwargs: Any) -> Any:
        return SparseAttnProcessor.__call__(self, attn, *args, **kwargs)

    return type(SparseAttnProcessor.__name__, (SparseAttnProcessor,), {"__call__": call})


class _SparseAttention(TorchFunctionMode):
    """Computes calls of `scaled_dot_product_attention` over a pattern, and counts them."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.pattern = pattern
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return _attend(self.pattern, *args, **(kwargs or {}))


def _attend(
    pattern: Pattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: object,
) -> Tensor:
    """Return `scaled_dot_product_attention` over the pairs that the pattern and its own mask keep."""
    # PyTorch's function has no signature to read defaults from.
    refuse_unknown(options, _attend, "a pattern")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"pattern: expected as many queries as keys, got {query.shape=}, {key.shape=}: "
            "leave cross-attention with its own processor"
        )
    key_mask = None
    if attn_mask is not None:
        kept = _kept_pairs(attn_mask)
        if kept.shape[1] == kept.shape[2] == 1:
            key_mask = kept[:, 0, 0].expand(key.shape[0], key.shape[2])
        else:
            pattern = pattern & from_mask(kept.expand(*kept.shape[:2], query.shape[2], key.shape[2]))
    return sparse_attention(
        query,
        key,
        value,
        pattern,
        key_mask=key_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _kept_pairs(mask: Tensor) -> Tensor:
    """Return a mask of `scaled_dot_product_attention` as bool ``[B or 1, H or 1, Nq or 1, Nk]``."""
    tracing, kept = torch.compiler.is_compiling(), mask
    if mask.is_floating_point():
        if tracing:
            raise ValueError(f"attn_mask: a traced graph cannot look at its values: expected bool, got {mask.dtype=}")
        # The comparison rounds as the mask does: -9,984 in bfloat16.
        kept = mask > _DROPPED
        if mask.requires_grad or bool((kept & (mask != 0)).any()):
            raise ValueError(
                f"attn_mask: expected bool, or 0 and values up to {_DROPPED:g} without a gradient, got {mask.shape=}, "
                f"{mask.requires_grad=} with other values"
            )
    kept = kept[(None,) * (4 - kept.dim())]
    if tracing and kept.shape[1:3] != (1, 1):
        raise ValueError(f"attn_mask: a traced graph accepts only a mask per key [B, 1, 1, Nk], got {mask.shape=}")
    if not tracing and kept.shape[1] > 1 and torch.equal(kept, kept[:, :1].expand_as(kept)):
        # diffusers repeats the mask for each head.
        kept = kept[:, :1]
    return kept


def use_ringtile(model: nn.Module, pattern: Pattern | str) -> list[str]:
    """Compute the self-attention of a diffusers model over the pairs of a pattern, in place.

    Each self-attention keeps its own processor, inside a `SparseAttnProcessor`. Cross-attention stays as it is. Joint
    attention over text and images is self-attention over both, in the order in which the model joins them. Call this
    again for another pattern. Call it after methods that set processors, such as ``fuse_qkv_projections``.

    Args:
        model: Model with ``attn_processors`` and ``set_attn_processor``, such as ``UNet2DConditionModel``.
        pattern: Which pairs to keep.

    Returns the names of the processors that compute over the pattern now. Raises ValueError if the model has no
    self-attention processors, or as `SparseAttnProcessor`.

    >>> from ringtile.patterns import GlobalTokens, Window
    >>> use_ringtile(unet, Window(512) | GlobalTokens(64))  # doctest: +SKIP
    ['down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor', ...]
    """
    processors = dict(getattr(model, "attn_processors", {}))
    switched = {}
    for name, processor in processors.items():
        if not getattr(model.get_submodule(name.removesuffix(".processor")), "is_cross_attention", False):
            inner = processor.processor if isinstance(processor, SparseAttnProcessor) else processor
            switched[name] = SparseAttnProcessor(inner, pattern)
    if not switched:
        raise ValueError(f"model: expected one of diffusers, with self-attention, got {type(model).__name__}")
    set_all: Any = model.set_attn_processor
    set_all(processors | switched)
    return list(switched)
