"""Dense attention inside dilated segments, under the names that the ring and LongNet classes had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtile.compat.attention import BlockSparseRingDilatedAttention


class RingDilatedAttentionV2(BlockSparseRingDilatedAttention):
    """LongNet's dilated attention: `BlockSparseRingDilatedAttention` that keeps all pairs inside a segment by default.

    Args:
        segment_lengths: Tokens per segment, for each branch.
        dilation_rates: One rate for each branch, which keeps every rate-th token of its segments.
        dropout: Probability of dropping a weight after the softmax in training.
        ring_size: 1, or the number of ranks, over which attention is not divided yet.
        **further: Arguments of `BlockSparseRingDilatedAttention`.

    Raises:
        ValueError: If an argument is out of range.

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
        **further: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout=dropout, ring_size=ring_size, **further)


class ImprovedDilatedAttention(RingDilatedAttentionV2):
    """Alias of `RingDilatedAttentionV2`, which attends over tokens and not over heads.

    >>> import torch
    >>> ImprovedDilatedAttention([128, 256], [1, 2])(torch.randn(1, 500, 2, 16)).shape
    torch.Size([1, 500, 2, 16])
    """


@dataclass
class RingAttentionConfig:
    """Arguments of `RingDilatedAttentionProduction`.

    Args:
        segment_lengths: Tokens per segment, for each branch.
        dilation_rates: One rate for each branch.
        dropout: Probability of dropping a weight after the softmax in training.
        ring_size: 1, or the number of ranks, over which attention is not divided yet.
        use_gradient_checkpointing: True to save only the inputs for the backward pass.
        attention_scale: Scale of the scores. Default: ``D ** -0.5``.

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


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` built from a configuration, with gradient checkpointing by default.

    >>> import torch
    >>> attention = RingDilatedAttentionProduction(RingAttentionConfig([128, 256], [1, 2]))
    >>> attention(torch.randn(1, 500, 2, 16)).shape
    torch.Size([1, 500, 2, 16])
    """

    def __init__(self, config: RingAttentionConfig) -> None:
        super().__init__(**vars(config))
        self.config = config
