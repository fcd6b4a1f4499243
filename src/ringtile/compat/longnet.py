"""Dense attention inside dilated segments, under the names that the ring and LongNet classes had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ringtile.compat.attention import BlockSparseRingDilatedAttention
from ringtile.compat.once import NEEDLESS


class RingDilatedAttentionV2(BlockSparseRingDilatedAttention):
    """LongNet's dilated attention: `BlockSparseRingDilatedAttention` with all pairs inside a segment for a default.

    Args:
        segment_lengths: Tokens of a segment, for each branch.
        dilation_rates: One for each branch: every rate-th token of its segments is kept.
        dropout: Probability with which a weight is dropped after the softmax in training.
        ring_size: 1, or the number of ranks, over which attention is not yet divided.
        attention_scale: Of the scores; None means ``D ** -0.5``.
        use_gradient_checkpointing: Save the inputs alone for the backward pass.
        **further: Arguments of `BlockSparseRingDilatedAttention`, needless flags among them.

    Raises:
        ValueError: Where an argument is out of range.

    Example:
        >>> import torch
        >>> attention = RingDilatedAttentionV2([128, 256], [1, 2])
        >>> attention(torch.randn(1, 500, 2, 16), is_causal=True).shape
        torch.Size([1, 500, 2, 16])
    """

    _default_ratio = 1.0

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        ring_size: int = 1,
        *,
        attention_scale: float | None = None,
        use_gradient_checkpointing: bool = False,
        **further: Any,
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            ring_size=ring_size,
            dropout=dropout,
            attention_scale=attention_scale,
            use_gradient_checkpointing=use_gradient_checkpointing,
            **further,
        )


class ImprovedDilatedAttention(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` itself, which attends over tokens and not over heads.

    >>> import torch
    >>> ImprovedDilatedAttention([128, 256], [1, 2])(torch.randn(1, 500, 2, 16)).shape
    torch.Size([1, 500, 2, 16])
    """


@dataclass
class RingAttentionConfig:
    """What `RingDilatedAttentionProduction` is made from; of the last five, none switches anything any more.

    Args:
        segment_lengths: Tokens of a segment, for each branch.
        dilation_rates: One for each branch.
        dropout: Probability with which a weight is dropped after the softmax in training.
        ring_size: 1, or the number of ranks.
        use_gradient_checkpointing: Save the inputs alone for the backward pass.
        attention_scale: Of the scores; None means ``D ** -0.5``.
        use_memory_pool: Needless: a value warns once, and says why.
        memory_pool_size: Needless too.
        enable_error_recovery: Needless too.
        mixed_precision: Needless too.
        log_memory_usage: Needless too.

    Example:
        >>> RingAttentionConfig([128, 256], [1, 2]).use_gradient_checkpointing
        True
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    dropout: float = 0.0
    ring_size: int = 1
    use_gradient_checkpointing: bool = True
    attention_scale: float | None = None
    use_memory_pool: bool | None = None
    memory_pool_size: int | None = None
    enable_error_recovery: bool | None = None
    mixed_precision: bool | None = None
    log_memory_usage: bool | None = None


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` made from a configuration, and checkpointed by default.

    >>> import torch
    >>> attention = RingDilatedAttentionProduction(RingAttentionConfig([128, 256], [1, 2]))
    >>> attention(torch.randn(1, 500, 2, 16)).shape
    torch.Size([1, 500, 2, 16])
    """

    def __init__(self, config: RingAttentionConfig) -> None:
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        super().__init__(**{name: value for name, value in given.items() if name not in NEEDLESS or value is not None})
        self.config = config
