"""Rotary position embeddings for queries and keys."""

import math

import torch
from torch import Tensor


def rotary_angles(
    n_tokens: int,
    head_dim: int,
    *,
    start: int = 0,
    positions: Tensor | None = None,
    base: float = 10000.0,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary position embeddings (Su et al., arXiv:2104.09864), ``[N, head_dim / 2]``.

    Tokens follow ``start``, or have int64 ``positions`` ``[N]`` or ``[B, N]`` in any order; then the result has a
    leading B, too. Angles are computed in float64, so they stay exact at a million tokens. ``like`` has the device and
    dtype of the results, which are float32 if it is half precision. Raises ValueError if head_dim is odd, both
    ``start`` and ``positions`` are given, or positions have another dtype, shape or device.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number for rotary positions, got {head_dim=}")
    half = head_dim // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=like.device) / half)
    if positions is None:
        positions = torch.arange(start, start + n_tokens, device=like.device)
    elif start:
        raise ValueError(f"positions: expected none beside a start, got {start=}")
    elif positions.dtype != torch.int64 or positions.dim() not in (1, 2) or positions.shape[-1] != n_tokens:
        raise ValueError(
            f"positions: expected int64 [N] or [B, N] of {n_tokens} tokens, got {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    elif positions.device != like.device:
        raise ValueError(f"positions: expected a tensor on {like.device}, got {positions.device}")
    # A position of 1e6 at a rate of 1 is 1e6 radians, of which float32 keeps 1/16. The remainder is taken in float64.
    angles = (positions.unsqueeze(-1) * rates).remainder(2 * math.pi)
    angles = angles.to(torch.promote_types(like.dtype, torch.float32))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(d, d + D / 2)`` of ``x`` ``[..., N, D]`` by angles ``[..., N, D / 2]``; keep the dtype."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
