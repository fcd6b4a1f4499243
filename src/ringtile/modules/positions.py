"""Rotary position embeddings for queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotary_angles(
    n_tokens: int, head_dim: int, *, start: int = 0, base: float = 10000.0, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[n_tokens, head_dim / 2]`` for positions from ``start`` (Su et al., arXiv:2104.09864).

    Angles are computed in float64, so they stay exact at a million tokens. The results have the device and dtype of
    ``like``, or float32 if that is half precision. Raises ValueError if head_dim is odd.

    >>> cos, sin = rotary_angles(3, 4, like=torch.empty(0))
    >>> cos.shape, sin[0].tolist()
    (torch.Size([3, 2]), [0.0, 0.0])
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number for rotary positions, got {head_dim=}")
    half = head_dim // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=like.device) / half)
    positions = torch.arange(start, start + n_tokens, dtype=torch.float64, device=like.device)
    angles = (positions.unsqueeze(1) * rates).remainder(2 * math.pi)
    angles = angles.to(torch.promote_types(like.dtype, torch.float32))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(d, d + D / 2)`` of ``x`` ``[..., N, D]`` by the angles ``[N, D / 2]``; keep the dtype.

    >>> x = torch.randn(2, 5, 8)
    >>> turned = rotate(x, *rotary_angles(5, 8, like=x))
    >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    True
    """
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
