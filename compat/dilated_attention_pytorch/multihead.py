"""Multi-head attention under its old names, and the factories that make it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.attention import BlockSparseRingDilatedAttention, self_attention_if_alone
from dilated_attention_pytorch.config import SparsePatternConfig
from ringtile.adaptive import AdaptiveAttention, Controller
from ringtile.modules.multihead import SparseMultiheadAttention

_DENSITIES = ("sparsity_ratio", "min_sparsity", "max_sparsity")


def _of_core(name: str) -> Any:
    """Return a property that reads and sets a name of the core attention module."""
    return property(
        lambda self: getattr(self.attention, name),
        lambda self, value: setattr(self.attention, name, value),
        doc=f"See `BlockSparseRingDilatedAttention.{name}`.",
    )


class BlockSparseRingMultiheadDilatedAttention(SparseMultiheadAttention):
    """`ringtile.SparseMultiheadAttention` that computes attention with `BlockSparseRingDilatedAttention`.

    It loads and saves checkpoints of `torch.nn.MultiheadAttention` (``use_layer_norm`` adds two tensors). It always
    returns a tuple: the output ``[B, N, E]``, and the weights if ``need_weights`` requests them, otherwise None.

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: As in `torch.nn.MultiheadAttention`, with
            ``batch_first=True`` by default.
        segment_lengths, dilation_rates, sparse_config, use_adaptive_sparsity, ring_size, **attention: As in
            `BlockSparseRingDilatedAttention`.
        use_layer_norm: True to normalize the joined heads before the last projection.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> config = SparsePatternConfig("global_local", global_tokens=16, local_window_size=64)
        >>> attention = BlockSparseRingMultiheadDilatedAttention(64, 4, sparse_config=config)
        >>> out, weights = attention(torch.randn(2, 300, 64), is_causal=True)
        >>> out.shape, weights
        (torch.Size([2, 300, 64]), None)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        sparse_config: SparsePatternConfig | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        use_layer_norm: bool = False,
        batch_first: bool = True,
        use_adaptive_sparsity: bool | AdaptiveAttention = False,
        ring_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        attention |= {"use_adaptive_sparsity": use_adaptive_sparsity, "ring_size": ring_size}
        core = BlockSparseRingDilatedAttention(segment_lengths, dilation_rates, sparse_config, **attention)
        norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype) if use_layer_norm else None
        attend = core.attend if norm is None else partial(_attend_and_normalize, core, norm)
        # The module drops weights itself, by `dropout_p`, so the core keeps a dropout of 0.
        shared: dict[str, Any] = {"batch_first": batch_first, "device": device, "dtype": dtype, "attend": attend}
        super().__init__(embed_dim, num_heads, dropout, bias, **shared)
        self.attention, self.layer_norm = core, norm

    sparse_config = _of_core("sparse_config")
    pattern_generator = _of_core("pattern_generator")
    performance_monitor = _of_core("performance_monitor")
    set_sparsity_ratio = _of_core("set_sparsity_ratio")
    enable_adaptive_sparsity = _of_core("enable_adaptive_sparsity")
    get_memory_info = _of_core("get_memory_info")
    get_performance_stats = _of_core("get_performance_stats")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | Literal["block_sparse"] = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `torch.nn.MultiheadAttention.forward`. ``forward(x)`` alone is self-attention, without weights.

        Returns the output ``[B, N, E]`` and the weights ``[B, N, M]`` (``[B, H, N, M]`` unless averaged) or None.
        With a ``ring_size`` of several ranks, N are the tokens of this rank.

        Raises ValueError as `ringtile.SparseMultiheadAttention` does, if an ``attn_mask`` other than the causal one is
        given beside ``segment_lengths`` or several ranks, or if several ranks need weights.
        """
        if need_weights and self.attention.ring_size > 1:
            raise ValueError(
                f"need_weights: expected False with ring_size={self.attention.ring_size}, because a rank has no "
                f"columns for the keys of the others, got {need_weights!r}"
            )
        key, value = self_attention_if_alone(query, key, value)
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal, **options
        )


class ImprovedMultiheadDilatedAttention(BlockSparseRingMultiheadDilatedAttention):
    """`BlockSparseRingMultiheadDilatedAttention` with all pairs inside a segment, and a layer norm, by default.

    >>> attention = ImprovedMultiheadDilatedAttention(64, 4, dilation_rates=[1, 2], segment_lengths=[128, 256])
    >>> attention(torch.randn(2, 300, 64))[0].shape
    torch.Size([2, 300, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        **further: Any,
    ) -> None:
        config = SparsePatternConfig(sparsity_ratio=1.0)
        shared = (embed_dim, num_heads, segment_lengths, dilation_rates, config, dropout, bias, layer_norm)
        super().__init__(*shared, **further)


def _split(
    arguments: dict[str, Any], segment_lengths: Sequence[int] | None, rates: Sequence[int] | None
) -> tuple[dict[str, Any], Sequence[int] | None]:
    """Take the fields of a configuration out of the arguments of a module. Return them, and the module's rates."""
    shape = {field.name: arguments.pop(field.name) for field in fields(SparsePatternConfig) if field.name in arguments}
    # One argument has two meanings: rates of segments, or of the pattern if there are no segments.
    return (shape, rates) if segment_lengths is not None else (shape | {"dilation_rates": rates}, None)


def create_block_sparse_multihead_attention(
    embed_dim: int,
    num_heads: int,
    sparsity_ratio: float | None = 0.1,
    pattern_type: str = "dilated_sparse",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    **arguments: Any,
) -> BlockSparseRingMultiheadDilatedAttention:
    """Build a `BlockSparseRingMultiheadDilatedAttention` and its configuration.

    Without ``segment_lengths``, ``dilation_rates`` are the rates of the pattern. ``arguments`` are further fields of
    `SparsePatternConfig`, or arguments of the module. Raises ValueError if an argument is out of range.

    >>> attention = create_block_sparse_multihead_attention(64, 4, 0.25, "local_window", dropout=0.1)
    >>> attention.sparse_config.sparsity_ratio
    0.25
    """
    shape, dilation_rates = _split(arguments, segment_lengths, dilation_rates)
    config = SparsePatternConfig(pattern_type, sparsity_ratio, **shape)
    return BlockSparseRingMultiheadDilatedAttention(
        embed_dim, num_heads, segment_lengths, dilation_rates, config, **arguments
    )


def create_adaptive_sparse_multihead_attention(
    embed_dim: int,
    num_heads: int,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    quality_threshold: float | None = None,
    **arguments: Any,
) -> BlockSparseRingMultiheadDilatedAttention:
    """Build a `BlockSparseRingMultiheadDilatedAttention` that chooses its tiles by the contents of each call.

    ``quality_threshold`` is the mean part of the attention that each head keeps, in expectation: a
    `ringtile.adaptive.Controller` finds the smallest density that holds it, by the exact attention of 64 rows of each
    call. It bounds no output and no loss. Without it, ``sparsity_ratio`` is the density of each head (0.25 by default).
    Inside dilated segments, each segment chooses for itself. Training moves the queries and keys, and the tiles follow.

    ``arguments`` are ``sparsity_ratio``, ``block_size`` and the bounds of `SparsePatternConfig`, or arguments of the
    module. ``use_adaptive_sparsity`` can be an `AdaptiveAttention` of your own, as causal training needs.

    A UserWarning names a field that the threshold, or your `AdaptiveAttention`, overrides. Raises ValueError if an
    argument is out of range or contradicts the threshold.

    >>> attention = create_adaptive_sparse_multihead_attention(64, 4, [256, 512], [1, 2], quality_threshold=0.95)
    >>> attention.attention.adaptive.choice.budget
    Controller(0.95, rows=64, seed=0)
    """
    shape, dilation_rates = _split(arguments, segment_lengths, dilation_rates)
    if shape.pop("pattern_type", "adaptive") != "adaptive":
        raise ValueError("pattern_type: expected 'adaptive' or none, because the contents choose the tiles")
    config = SparsePatternConfig("adaptive", **shape)
    adaptive = arguments.pop("use_adaptive_sparsity", True)
    decides = f"{quality_threshold=} decides, and finds the densities"
    overridden = list(_DENSITIES) if quality_threshold is not None else []
    if isinstance(adaptive, AdaptiveAttention):
        decides, overridden = "the AdaptiveAttention of use_adaptive_sparsity decides", [*_DENSITIES, "block_size"]
    for name in overridden:
        if shape.get(name) is not None:
            warnings.warn(f"{name}={shape[name]} changes nothing: {decides}", stacklevel=2)
    if quality_threshold is not None:
        if adaptive is not True:
            raise ValueError(f"use_adaptive_sparsity: expected True beside {quality_threshold=}, got {adaptive!r}")
        adaptive = AdaptiveAttention(budget=Controller(quality_threshold), block=config.block_size)
    return BlockSparseRingMultiheadDilatedAttention(
        embed_dim, num_heads, segment_lengths, dilation_rates, config, use_adaptive_sparsity=adaptive, **arguments
    )


def _attend_and_normalize(
    core: BlockSparseRingDilatedAttention, norm: nn.LayerNorm, query: Tensor, key: Tensor, value: Tensor, **how: Any
) -> Tensor:
    """Compute attention and normalize the joined heads ``[B, N, E]``."""
    heads = query.shape[1]
    # Weights, if requested, are the columns after those of the value.
    out, weights = core.attend(query, key, value, **how).tensor_split([norm.normalized_shape[0] // heads], -1)
    out = norm(out.transpose(1, 2).flatten(2)).unflatten(-1, (heads, -1)).transpose(1, 2)
    return torch.cat([out, weights], -1) if weights.shape[-1] else out
