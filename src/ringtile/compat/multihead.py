"""Multi-head attention under its old names, and the factories that make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ringtile.compat.attention import BlockSparseRingDilatedAttention, self_attention_where_alone
from ringtile.compat.config import SparsePatternConfig
from ringtile.compat.generator import SparsePatternGenerator
from ringtile.compat.monitor import PerformanceMonitor
from ringtile.modules.multihead import SparseMultiheadAttention


class BlockSparseRingMultiheadDilatedAttention(SparseMultiheadAttention):
    """`ringtile.SparseMultiheadAttention` with `BlockSparseRingDilatedAttention` for its attention.

    It loads and makes checkpoints of `torch.nn.MultiheadAttention` (``use_layer_norm`` adds two tensors) and returns a
    tuple always: the output ``[B, N, E]``, and the weights where ``need_weights`` asks for them, else None.

    Args:
        embed_dim: Width of the model, a multiple of ``num_heads``.
        num_heads: H.
        segment_lengths: Tokens of a segment, for each branch; None lets the pattern cover the whole sequence.
        dilation_rates: One for each branch.
        sparse_config: The pattern, read at every call; None means ``SparsePatternConfig()``.
        dropout: Probability with which a weight is dropped after the softmax in training.
        bias: Add a bias in the projections.
        use_layer_norm: Normalise the joined heads before the last projection.
        batch_first: Tensors are ``[B, N, E]``, else ``[N, B, E]``.
        use_adaptive_sparsity: Only False.
        ring_size: 1, or the number of ranks.
        device: Of every parameter.
        dtype: Of every parameter.
        **attention: Further arguments of `BlockSparseRingDilatedAttention`.

    Raises:
        ValueError: Where an argument is out of range.

    Example:
        >>> config = SparsePatternConfig("global_local", global_tokens=16, local_window_size=64)
        >>> attention = BlockSparseRingMultiheadDilatedAttention(64, 4, sparse_config=config)
        >>> out, weights = attention(torch.randn(2, 300, 64), is_causal=True)
        >>> out.shape, weights
        (torch.Size([2, 300, 64]), None)
    """

    _core: type[BlockSparseRingDilatedAttention] = BlockSparseRingDilatedAttention

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
        use_adaptive_sparsity: bool = False,
        ring_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        if sparse_config is not None:
            attention["sparse_config"] = sparse_config
        if use_adaptive_sparsity:
            attention["use_adaptive_sparsity"] = use_adaptive_sparsity
        core = self._core(segment_lengths, dilation_rates, ring_size=ring_size, **attention)
        norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype) if use_layer_norm else None
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
            attend=core.attend if norm is None else partial(_attend_and_normalise, core, norm),
        )
        self.attention, self.layer_norm = core, norm

    @property
    def sparse_config(self) -> SparsePatternConfig:
        """The configuration; a changed field, or another configuration, takes effect at the next call."""
        return self.attention.sparse_config

    @sparse_config.setter
    def sparse_config(self, config: SparsePatternConfig) -> None:
        self.attention.sparse_config = config

    @property
    def pattern_generator(self) -> SparsePatternGenerator:
        """What makes the patterns, with its ``pattern_cache``."""
        return self.attention.pattern_generator

    @property
    def performance_monitor(self) -> PerformanceMonitor:
        """What measures the calls once it is enabled."""
        return self.attention.performance_monitor

    def set_sparsity_ratio(self, sparsity_ratio: float) -> None:
        """As `BlockSparseRingDilatedAttention.set_sparsity_ratio`."""
        self.attention.set_sparsity_ratio(sparsity_ratio)

    def get_memory_info(self) -> dict[str, float]:
        """As `BlockSparseRingDilatedAttention.get_memory_info`."""
        return self.attention.get_memory_info()

    def get_performance_stats(self) -> dict[str, float]:
        """As `BlockSparseRingDilatedAttention.get_performance_stats`: of attention, without the projections."""
        return self.attention.get_performance_stats()

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
    ) -> tuple[Tensor, Tensor | None]:
        """As `torch.nn.MultiheadAttention.forward`; ``forward(x)`` alone is self-attention, and weights are on request.

        Returns the output ``[B, N, E]`` and the weights ``[B, N, M]`` (``[B, H, N, M]`` unless averaged) or None.
        Raises ValueError as `ringtile.SparseMultiheadAttention` does, and where an ``attn_mask`` that is not the
        causal one meets ``segment_lengths``.
        """
        key, value = self_attention_where_alone(query, key, value)
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )


class ImprovedMultiheadDilatedAttention(BlockSparseRingMultiheadDilatedAttention):
    """`BlockSparseRingMultiheadDilatedAttention` with all pairs inside a segment, and a layer norm, for defaults.

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
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            SparsePatternConfig(sparsity_ratio=1.0),
            dropout,
            bias,
            layer_norm,
            batch_first,
            device=device,
            dtype=dtype,
            **attention,
        )


def create_block_sparse_multihead_attention(
    embed_dim: int,
    num_heads: int,
    sparsity_ratio: float | None = 0.1,
    pattern_type: str = "dilated_sparse",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    **arguments: Any,
) -> BlockSparseRingMultiheadDilatedAttention:
    """A `BlockSparseRingMultiheadDilatedAttention` with a configuration of its own.

    Args:
        embed_dim: Width of the model, a multiple of ``num_heads``.
        num_heads: H.
        sparsity_ratio: Density: the fraction of pairs kept, or None for what the geometry gives.
        pattern_type: As `SparsePatternConfig` has it.
        segment_lengths: Tokens of a segment, for each branch; None lets the pattern cover the whole sequence.
        dilation_rates: Those of the segments, or without segments those of the pattern.
        **arguments: Further fields of `SparsePatternConfig`, or arguments of the module.

    Raises:
        ValueError: Where an argument is out of range.

    Example:
        >>> attention = create_block_sparse_multihead_attention(64, 4, 0.25, "local_window", dropout=0.1)
        >>> attention.sparse_config.sparsity_ratio
        0.25
    """
    shape = {field.name: arguments.pop(field.name) for field in fields(SparsePatternConfig) if field.name in arguments}
    if segment_lengths is None:
        shape["dilation_rates"], dilation_rates = dilation_rates, None
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
    """`create_block_sparse_multihead_attention` with segments: the form of this factory that is not adaptive.

    Raises ValueError where a ``quality_threshold`` is given: nothing here chooses pairs by what the tokens hold.

    >>> create_adaptive_sparse_multihead_attention(64, 4, [128, 256], [1, 2]).attention.segment_lengths
    (128, 256)
    """
    if quality_threshold is not None:
        raise ValueError(
            "quality_threshold: expected None: patterns follow positions here, and no threshold on what they leave out "
            f"can be kept, got {quality_threshold=}"
        )
    return create_block_sparse_multihead_attention(
        embed_dim, num_heads, segment_lengths=segment_lengths, dilation_rates=dilation_rates, **arguments
    )


def _attend_and_normalise(
    core: BlockSparseRingDilatedAttention, norm: nn.LayerNorm, query: Tensor, key: Tensor, value: Tensor, **how: Any
) -> Tensor:
    """Attention, of which the joined heads ``[B, N, E]`` are normalised."""
    heads = query.shape[1]
    # Where weights are asked for, they are the columns after those of the value.
    out, weights = core.attend(query, key, value, **how).tensor_split([norm.normalized_shape[0] // heads], -1)
    out = norm(out.transpose(1, 2).flatten(2)).unflatten(-1, (heads, -1)).transpose(1, 2)
    return torch.cat([out, weights], -1) if weights.shape[-1] else out
