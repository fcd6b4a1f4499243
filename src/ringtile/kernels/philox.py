"""Dropout masks: 16 random bits per (batch element, head, query, key), a pure function of seed and positions.

Positions refer to the whole problem, so tilings, backends and ranks all drop the same pairs. The generator is
Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the 64-bit seed, the
counter is ``(key // 32 * 4 + key // 2 % 4, query, head, batch)`` and key ``k`` reads the low (even k) or high (odd k)
half of word ``k // 8 % 4``. One call serves 8 keys, and 4 calls serve 32 neighbors.
"""

import torch
from torch import Tensor

from ringtile.patterns.checks import check_number
from ringtile.patterns.random import WORD, philox4x32

_ROUNDS = 7
_SIGNS = 0x80008000 - (1 << 32)


def dropout_threshold(p: float) -> int:
    """Return ``round(65536 * p)``: a pair is kept iff its 16 bits are at least this.

    Raises ValueError unless ``0 <= p < 1`` and the threshold leaves some values to keep.

    >>> dropout_threshold(0.5)
    32768
    """
    check_number("dropout_p", p, "a probability in [0, 1), at most 65535/65536", 0, 1 - 2**-17)
    return round(65536 * p)


def dropout_scale(p: float) -> float:
    """Return the factor of kept weights: ``65536 / (65536 - threshold)``, the inverse of the exact keep rate."""
    return 65536 / (65536 - dropout_threshold(p))


def _seed_words(seed: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    if isinstance(seed, Tensor):
        seed = seed.reshape(())
    return seed & WORD, (seed >> 32) & WORD


def dropout_keep(seed: int | Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, p: float) -> Tensor:
    """Return the pairs to keep as bool: int64 positions that broadcast together.

    ``seed`` is an int or an int64 tensor with one element. This makes one Philox call per pair, simple enough for the
    reference. Kernels use `dropout_tile`, which returns the same bits. Raises ValueError unless ``0 <= p < 1``.
    """
    counter = (key // 32 * 4 + key // 2 % 4, query & WORD, head & WORD, batch & WORD)
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, _seed_words(seed), _ROUNDS)))
    # Key 45 is in window 1: call 1 * 4 + 45 // 2 % 4 = 6, word 45 // 8 % 4 = 1, and the high half, as 45 is odd.
    word = words.gather(0, (key // 8 % 4).expand(words.shape[1:]).unsqueeze(0)).squeeze(0)
    return (word >> (key % 2 * 16)) & 0xFFFF >= dropout_threshold(p)


def dropout_tile(
    seed: int | Tensor, batch: Tensor, head: Tensor, query: Tensor, first_key: Tensor, n_keys: int, p: float
) -> Tensor:
    """Return the pairs of full tiles to keep, bool ``[..., m, t * n_keys]``, with the bits of `dropout_keep`.

    ``query`` ``[..., m]`` contains query positions, ``first_key`` ``[..., t]`` the first key position of each of t runs
    of ``n_keys`` keys. They are int64, as are ``batch`` and ``head`` ``[...]``, and the leading dimensions broadcast.
    ``n_keys`` is a multiple of 32, or 16. ``first_key`` is a multiple of the smaller of ``n_keys`` and 32, which is not
    checked because it is on the device. One Philox call serves 8 keys. Raises ValueError unless ``0 <= p < 1``.

    The mask is random, so branches on it mispredict: multiply by it as a float instead of ``torch.where``.
    """
    if n_keys != 16 and (n_keys <= 0 or n_keys % 32):
        raise ValueError(f"n_keys: expected 16 or a multiple of 32, got {n_keys}")
    threshold = dropout_threshold(p)
    t, windows = first_key.shape[-1], -(-n_keys // 32)
    calls = (first_key // 32 * 4).unsqueeze(-1) + torch.arange(4 * windows, device=first_key.device)
    calls = calls.reshape(*first_key.shape[:-1], 1, t * windows, 4)
    head, batch = ((x & WORD)[..., None, None, None] for x in (head, batch))
    counter = calls, (query & WORD)[..., None, None], head, batch
    words = torch.broadcast_tensors(*philox4x32(counter, _seed_words(seed), _ROUNDS))
    # Key 45 reads word 45 // 8 % 4 = 1 of call 45 // 2 % 4 = 2: by word, then call, then half, keys are in order. With
    # the sign flipped, halves compare as signed numbers like unsigned ones.
    halves = (torch.stack(words, -2).int() ^ _SIGNS).view(torch.int16)
    bits: Tensor = (halves >= threshold - 32768).flatten(-3)
    if n_keys == 16:
        odd = (first_key // 16 % 2 == 1)[..., None, :, None]
        low, high = bits.unflatten(-1, (t, 2, 16)).unbind(-2)
        bits = torch.where(odd, high, low).flatten(-2)
    return bits
