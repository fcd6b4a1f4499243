"""A tensor that compares and hashes by what it holds, so that patterns made of tensors can be cache keys."""

from __future__ import annotations

import hashlib

from torch import Tensor


class Content:
    """A contiguous tensor that nobody writes to; equal to any other of its dtype, shape and values, on any device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        digest.update(self.tensor.cpu().numpy().data)
        self.digest = digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
