"""What is asked of a tensor before any work: whether it has plain memory of its own."""

import torch
from torch import Tensor
from torch.nn import Parameter

from ringtile.kernels.contracts import check_memory
from ringtile.patterns.private import is_traced, is_transformed, is_zero


def is_real(x: Tensor) -> bool:
    """Return True if a tensor has memory of its own, or had: it is not traced, transformed or a subclass."""
    if torch.compiler.is_compiling() or is_transformed() or is_traced():
        return False
    return type(x) in (Tensor, Parameter) and not is_zero(x) and not x.is_meta


def check_plain(name: str, x: object) -> None:
    """Raise ValueError unless this is a tensor with memory: no sparse or nested one, and no list or array."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name}: expected torch.strided, got {'a nested tensor' if x.is_nested else f'{x.layout=}'}")
    if is_real(x):
        check_memory((name,), (x,))
