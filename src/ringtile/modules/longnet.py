"""LongNet as the attention of a transformer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ringtile.functional.dilated import checked_branches, dilated_attention, over_positions
from ringtile.patterns import Causal, Pattern


@dataclass(frozen=True)
class LongNet:
    """`dilated_attention` with fixed branches; `longnet_attend` creates it."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    overlap: Literal["mix", "union"]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute attention."""
        branches = (self.segment_lengths, self.dilation_rates)
        return dilated_attention(query, key, value, *branches, overlap=self.overlap, **options)

    def rules(self, pattern: Pattern | None, is_causal: bool) -> tuple[Pattern, ...]:
        """Return patterns over positions. A pair counts once per pattern that keeps it."""
        branches = list(zip(self.segment_lengths, self.dilation_rates, strict=True))
        kept = over_positions(branches, pattern, self.overlap)
        return tuple(Causal() & rule for rule in kept) if is_causal else tuple(kept)


def longnet_attend(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], overlap: Literal["mix", "union"] = "mix"
) -> LongNet:
    """Return `dilated_attention` with fixed branches, for ``attend=`` of the modules (arXiv:2307.02486).

    ``SparseTransformer(..., attend=longnet_attend(...))`` is LongNet's encoder. With ``is_causal=True`` it is the
    decoder, which can generate with a cache. A ``pattern`` applies inside each dilated segment. Raises ValueError if
    the sequences differ in length or contain anything but positive integers.

    >>> import torch
    >>> from ringtile.modules.transformer import SparseTransformer
    >>> attend = longnet_attend([128, 512], [1, 4])
    >>> decoder = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
    >>> decoder(torch.randn(1, 700, 64)).shape
    torch.Size([1, 700, 64])
    """
    lengths, rates = zip(*checked_branches(segment_lengths, dilation_rates), strict=True)
    return LongNet(lengths, rates, overlap)
