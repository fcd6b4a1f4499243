"""Sets as bits in int32 words."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(mask: Tensor) -> Tensor:
    """Pack bool ``[..., b]`` into int32 ``[..., ceil(b / 32)]``, bit ``i % 32`` of word ``i // 32``.

    b is a multiple of 8.
    """
    *shape, size = mask.shape
    # Eight bools read as one little-endian int64: the product gathers their low bits, in order, in the top byte.
    eights = mask.reshape(-1).view(torch.int64).view(*shape, size // 8)
    octets = ((eights * 0x0102040810204080) >> 56).to(torch.uint8)
    if size % 32:
        octets = torch.nn.functional.pad(octets, (0, 4 - size // 8 % 4))
    return octets.reshape(-1).view(torch.int32).view(*shape, -(-size // 32))


def unpack_words(words: Tensor, size: int) -> Tensor:
    """Unpack int32 words ``[..., w]`` into bool ``[..., size]``."""
    # Flat, because a last dimension of one word may have any stride.
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=words.device)
    return ((octets[..., None] & places) != 0).flatten(-2)[..., :size]
