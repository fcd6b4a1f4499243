"""Rotary positions: queries and keys are turned by angles that grow with their position."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotary_angles(
    n_tokens: int, head_dim: int, *, start: int = 0, base: float = 10000.0, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[n_tokens, head_dim / 2]`` for the positions from ``start`` on (Su et al., arXiv:2104.09864).

    Angles are reduced in float64, so that they are right a million tokens on; the results are on the device of ``like``
    in its dtype, in float32 where that is a half type. Raises ValueError where head_dim is odd.

    >>> cos, sin = rotary_angles(3, 4, like=torch.empty(0))
    >>> cos.shape, sin[0].tolist()
    (torch.Size([3, 2]), [0.0, 0.0])
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: rotary positions turn pairs, expected an even number, got {head_dim=}")
    half = head_dim // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=like.device) / half)
    positions = torch.arange(start, start + n_tokens, dtype=torch.float64, device=like.device)
    angles = (positions.unsqueeze(1) * rates).remainder(2 * math.pi)
    angles = angles.to(torch.promote_types(like.dtype, torch.float32))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(d, d + D / 2)`` of ``x`` ``[..., N, D]`` by the angles ``[N, D / 2]``; the dtype stays.

    >>> x = torch.randn(2, 5, 8)
    >>> turned = rotate(x, *rotary_angles(5, 8, like=x))
    >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    True
    """
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
