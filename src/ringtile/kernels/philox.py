"""Dropout masks: 16 random bits per (batch element, head, query, key), a pure function of seed and positions.

Positions refer to the whole problem, so tilings, backends and ranks all drop the same pairs. The generator is
Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the 64-bit seed, the
counter is ``(key // 32 * 4 + key // 2 % 4, query, head, batch)`` and key ``k`` reads the low (even k) or high (odd k)
half of word ``k // 8 % 4``. One call serves 8 keys, and 4 calls serve 32 neighbors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile.patterns.random import WORD, Words, philox4x32

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_SIGNS = 0x80008000 - (1 << 32)

_CHUNK_CALLS = 1 << 16
"""Philox calls computed at once on a CPU. Larger chunks leave the caches, smaller ones pay for the calls."""


def dropout_threshold(p: float) -> int:
    """Return ``round(65536 * p)``: a pair is kept iff its 16 bits are at least this.

    Raises ValueError unless ``0 <= p < 1`` and the threshold leaves some values to keep.

    >>> dropout_threshold(0.5)
    32768
    """
    threshold = round(65536 * p) if 0 <= p < 1 else 65536
    if threshold > 65535:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), at most 65535/65536, got {p!r}")
    return threshold


def dropout_scale(p: float) -> float:
    """Return the factor of kept weights: ``65536 / (65536 - threshold)``, the inverse of the exact keep rate.

    >>> dropout_scale(0.75)
    4.0
    """
    return 65536 / (65536 - dropout_threshold(p))


def _seed_words(seed: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    if isinstance(seed, Tensor):
        seed = seed.reshape(())
    return seed & WORD, (seed >> 32) & WORD


def dropout_keep(seed: int | Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, p: float) -> Tensor:
    """Return the pairs to keep as bool: int64 positions that broadcast together.

    ``seed`` is an int or an int64 tensor with one element. This makes one Philox call per pair, simple enough for the
    reference. Kernels use `dropout_tile`, which returns the same bits. Raises ValueError unless ``0 <= p < 1``.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> dropout_keep(1, zero, zero, zero, torch.arange(6), 0.5)
    tensor([ True,  True, False, False,  True,  True])
    """
    counter = (key // 32 * 4 + key // 2 % 4, query & WORD, head & WORD, batch & WORD)
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, _seed_words(seed), _ROUNDS)))
    # Key 45 is in window 1: call 1 * 4 + 45 // 2 % 4 = 6, word 45 // 8 % 4 = 1, and the high half, as 45 is odd.
    word = words.gather(0, (key // 8 % 4).expand(words.shape[1:]).unsqueeze(0)).squeeze(0)
    return (word >> (key % 2 * 16)) & 0xFFFF >= dropout_threshold(p)


def _remaining_rounds(counter: Words, key: tuple[int | Tensor, int | Tensor], rounds: int) -> Words:
    """Compute Philox rounds in place on the counter's memory. The upper 32 bits of words 1 and 3 stay dirty."""
    c0, c1, c2, c3 = counter
    spare0, spare1 = torch.empty_like(c0), torch.empty_like(c0)
    for number in range(rounds):
        product0 = torch.mul(c0, _MULTIPLIERS[0], out=spare0)
        product1 = torch.mul(c2, _MULTIPLIERS[1], out=spare1)
        # Each word stays in the low 32 bits of an int64, so a product of two words keeps both halves.
        for product, low, fresh, weyl, word in (
            (product1, c1, c2, _WEYL[0], key[0]),
            (product0, c3, c0, _WEYL[1], key[1]),
        ):
            torch.bitwise_right_shift(product, 32, out=fresh)
            fresh.bitwise_xor_(low).bitwise_xor_((word + number * weyl) & WORD).bitwise_and_(WORD)
        spare0, spare1 = c1, c3
        c0, c1, c2, c3 = c2, product1, c0, product0
    return c0, c1, c2, c3


def dropout_tile(
    seed: int | Tensor, batch: Tensor, head: Tensor, query: Tensor, first_key: Tensor, n_keys: int, p: float
) -> Tensor:
    """Return the pairs of full tiles to keep, bool ``[..., m, t * n_keys]``, with the bits of `dropout_keep`.

    ``query`` ``[..., m]`` contains query positions, ``first_key`` ``[..., t]`` the first key position of each of t runs
    of ``n_keys`` keys. They are int64, as are ``batch`` and ``head`` ``[...]``, and the leading dimensions broadcast.
    ``n_keys`` is a multiple of 32, or 16. ``first_key`` is a multiple of the smaller of ``n_keys`` and 32, which is not
    checked because it is on the device. One Philox call serves 8 keys. Raises ValueError unless ``0 <= p < 1``.

    The mask is random, so branches on it mispredict: multiply by it as a float instead of ``torch.where``.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> dropout_tile(7, zero, zero, torch.arange(2), torch.tensor([0, 96]), 32, 0.5).shape
    torch.Size([2, 64])
    """
    if n_keys != 16 and (n_keys <= 0 or n_keys % 32):
        raise ValueError(f"n_keys: expected 16 or a multiple of 32, got {n_keys}")
    threshold = dropout_threshold(p)
    lead = torch.broadcast_tensors(batch[..., None], head[..., None], query[..., :1], first_key[..., :1])[0].shape[:-1]
    m, t, windows = query.shape[-1], first_key.shape[-1], -(-n_keys // 32)
    count, columns = lead.numel(), t * 4 * windows
    calls = torch.arange(4 * windows, device=first_key.device)
    window_calls = (first_key // 32 * 4).unsqueeze(-1) + calls
    window_calls = window_calls.expand(*lead, t, 4 * windows).reshape(count, 1, columns)
    query = (query & WORD).expand(*lead, m).reshape(count, m, 1)
    head, batch = ((x & WORD).expand(lead).reshape(count, 1, 1) for x in (head, batch))
    key = _seed_words(seed)
    later = ((key[0] + 3 * _WEYL[0]) & WORD, (key[1] + 3 * _WEYL[1]) & WORD)

    keep = torch.empty(count, m, t * windows, 4, 4, 2, dtype=torch.int8, device=query.device)
    chunk = _CHUNK_CALLS if query.device.type == "cpu" else _CHUNK_CALLS << 6
    step = max(1, chunk // max(1, m * columns))
    for first in range(0, count, step):
        # For three rounds, most words depend on only the query or only the key. Broadcasting computes those once.
        part = slice(first, first + step)
        c0, c1, c2, c3 = philox4x32((window_calls[part], query[part], head[part], batch[part]), key, 3)
        words = _remaining_rounds((c0, c1, c2, c3.expand_as(c0).contiguous()), later, _ROUNDS - 3)
        packed = torch.empty(len(c0), m, t * windows, 4, 4, dtype=torch.int32, device=query.device)
        for number, word in enumerate(words):
            packed[..., number, :] = word.view(len(word), m, t * windows, 4)
        # With the sign flipped, halves compare as signed numbers like unsigned ones. A comparison that writes int8 is
        # vectorized. One that writes bool is not, and takes five times as long.
        halves = (packed ^ _SIGNS).view(torch.int16).view(*packed.shape, 2)
        torch.ge(halves, threshold - 32768, out=keep[part])
    bits = keep.view(torch.bool).view(count, m, t, windows * 32)
    if n_keys == 16:
        odd = (first_key // 16 % 2 == 1).expand(*lead, t).reshape(count, 1, t, 1)
        bits = torch.where(odd, bits[..., 16:], bits[..., :16])
    return bits.reshape(*lead, m, t * n_keys)
