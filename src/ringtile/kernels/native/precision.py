"""How a call is computed: float32 by products of bfloat16 parts only if the caller allows it."""

from functools import cache
from typing import Any, NamedTuple

import torch

from ringtile.kernels.native.checks import DTYPES
from ringtile.kernels.native.instruction_sets import PART_PRODUCTS, InstructionSet
from ringtile.kernels.native.library import library

_FLOAT32_PARTS = 4
"""``RINGTILE_FLOAT32_PARTS`` of native/ringtile.h."""


class Arithmetic(NamedTuple):
    """How the library computes a dtype."""

    isa: InstructionSet
    code: int
    """The dtype's number in native/ringtile.h."""
    tile_products: int
    """Products of bfloat16 tiles for each product of numbers, 0 if it does not multiply in tiles."""


def arithmetic_of(dtype: torch.dtype) -> Arithmetic:
    """Return how calls compute a dtype now."""
    choice = library().choice
    if dtype == torch.float32 and choice.parts and allows_less_than_float32():
        return Arithmetic(choice.parts, _FLOAT32_PARTS, PART_PRODUCTS)
    return _usual(choice.by_dtype[dtype], dtype)


@cache
def _usual(isa: InstructionSet, dtype: torch.dtype) -> Arithmetic:
    in_tiles = {torch.bfloat16: 1, torch.float16: PART_PRODUCTS} if isa.has_tiles else {}
    return Arithmetic(isa, DTYPES[dtype], in_tiles.get(dtype, 0))


def allows_less_than_float32() -> bool:
    """Return True if PyTorch may multiply float32 matrices on a CPU in less than their own precision, and so may we.

    The setting follows ``torch.set_float32_matmul_precision``. Its counterpart ``torch.get_float32_matmul_precision``
    raises where a program has used this setting.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return matmul.fp32_precision in ("tf32", "bf16")
