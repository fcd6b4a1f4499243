"""Merge attention over parts of the keys."""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ringtile.functional.tensors import check_plain


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    The merge is exact up to rounding, associative and differentiable. Parts can be empty (lse -inf). It computes in
    float32 or better.

    Args:
        outs: Tensors ``[B, H, N, Dv]`` of one dtype. Under autocast, dtypes can differ, and the widest is used.
        lses: Their natural-log lse ``[B, H, N]``.

    Returns the merged output, in the dtype of ``outs``, and the merged lse. Raises ValueError if the lists are empty or
    of unequal length, or if shapes, dtypes, devices or layouts do not match.

    >>> from ringtile import sparse_attention
    >>> from ringtile.patterns import Window
    >>> q, k, v = torch.randn(3, 1, 2, 300, 32, dtype=torch.float64).unbind()
    >>> near = sparse_attention(q, k, v, Window(20), return_lse=True)
    >>> far = sparse_attention(q, k, v, ~Window(20), return_lse=True)
    >>> out, _ = merge_attention(*zip(near, far))
    >>> torch.allclose(out, sparse_attention(q, k, v))
    True
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected equally many, at least one, got {len(outs)=}, {len(lses)=}")
    for out, lse in zip(outs, lses, strict=True):
        check_plain("outs", out)
        check_plain("lses", lse)
    if not outs[0].is_meta and torch.is_autocast_enabled(outs[0].device.type):
        widest = reduce(torch.promote_types, (out.dtype for out in outs))
        outs = [out.to(widest) for out in outs]
    for out, lse in zip(outs, lses, strict=True):
        alike = (out.shape, out.dtype, out.device) == (outs[0].shape, outs[0].dtype, outs[0].device)
        fits = lse.shape == out.shape[:-1] and lse.device == out.device
        if not (alike and fits and out.is_floating_point() and lse.is_floating_point()):
            found = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in (out, lse, outs[0]))
            raise ValueError(f"outs, lses: expected floating [B, H, N, Dv] and [B, H, N], all alike, got {found}")
    stacked = torch.stack([lse.to(torch.promote_types(lse.dtype, torch.float32)) for lse in lses])
    highest = stacked.detach().amax(0)
    # Rows without keys: -inf - -inf would be NaN.
    highest = torch.where(highest == -math.inf, 0, highest)
    # Each part's share of the softmax denominator. Two parts of lse 0 and log 3 have the shares 1/4 and 3/4.
    weights = (stacked - highest).exp()
    total = weights.sum(0)
    empty = total == 0
    share = weights / torch.where(empty, 1, total)
    merged = sum((w[..., None] * out for w, out in zip(share.unbind(), outs, strict=True)), torch.zeros_like(outs[0]))
    lse = torch.where(empty, -math.inf, torch.where(empty, 1, total).log() + highest)
    return merged.to(outs[0].dtype), lse
