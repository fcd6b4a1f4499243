"""Tensors that compare and hash by value, so that patterns made of tensors can be cache keys."""

import ctypes
import hashlib
from dataclasses import fields, is_dataclass

from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. The tensor must outlive them."""
    # numpy would do this too, but PyTorch works without it.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def digest_of(tensor: Tensor) -> bytes:
    """Hash the dtype, shape and values of a tensor, equal on any device and for any strides."""
    held = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{held.dtype} {tuple(held.shape)}".encode(), digest_size=16)
    if held.numel():
        digest.update(memory_of(held))
    return digest.digest()


class Content:
    """A contiguous tensor that must not change, equal to any with its dtype, shape and values, on any device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.digest = digest_of(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def described(x: object) -> str:
    """Return the text of a pattern, or one of its fields: equal in all processes for equal patterns.

    Functions have their names only.
    """
    text = getattr(x, "text", None)
    if isinstance(text, str):
        return text
    if isinstance(x, Content):
        return x.digest.hex()
    if isinstance(x, tuple):
        return f"({', '.join(map(described, x))})"
    if is_dataclass(x):
        values = (described(getattr(x, field.name)) for field in fields(x) if field.compare)
        return f"{type(x).__name__}({', '.join(values)})"
    # Other objects can have their addresses in their text.
    return repr(x) if isinstance(x, int | float | str | None) else getattr(x, "__qualname__", type(x).__name__)
