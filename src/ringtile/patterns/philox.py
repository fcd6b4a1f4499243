"""Philox, a counter-based random generator with the same numbers on every machine."""

from __future__ import annotations

from torch import Tensor

WORD = 2**32 - 1

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[int | Tensor, int | Tensor], rounds: int) -> Words:
    """Compute Philox4x32 (Salmon et al., SC 2011): four 32-bit words per counter, as int64 tensors that broadcast.

    ``counter`` holds four int64 tensors and ``key`` two ints or tensors, all in ``[0, 2**32)``; ``rounds`` is 7 or 10.

    >>> import torch
    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (0, 0), 10)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit product does not fit int64, the product with the multiplier less 2**32 does.
        p0, p1 = c0 * (0xD2511F53 - 2**32), c2 * (0xCD9E8D57 - 2**32)
        high0, high1 = (p0 >> 32) + c0, (p1 >> 32) + c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & WORD, high0 ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3
