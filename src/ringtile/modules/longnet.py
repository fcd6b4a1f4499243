"""LongNet as the attention of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from ringtile.functional.dilated import dilated_attention


def longnet_attend(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], overlap: Literal["mix", "union"] = "mix"
) -> Callable[..., Any]:
    """`dilated_attention` with its branches filled in, for ``attend=`` of the modules (LongNet, arXiv:2307.02486).

    ``SparseTransformer(..., attend=longnet_attend(...))`` is LongNet's encoder, and with ``is_causal=True`` its
    decoder; a ``pattern`` applies inside each dilated segment. Branches are checked where they are used.

    >>> import torch
    >>> from ringtile.modules.transformer import SparseTransformer
    >>> attend = longnet_attend([128, 512], [1, 4])
    >>> decoder = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
    >>> decoder(torch.randn(1, 700, 64)).shape
    torch.Size([1, 700, 64])
    """
    return partial(
        dilated_attention,
        segment_lengths=tuple(segment_lengths),
        dilation_rates=tuple(dilation_rates),
        overlap=overlap,
    )
