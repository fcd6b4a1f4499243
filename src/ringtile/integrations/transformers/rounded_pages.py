"""Pages of transformers' continuous batching that hold rounded keys and values, whatever the model's dtype is."""

from typing import Any, Literal

import torch
from torch import Tensor

from ringtile.integrations.transformers.door import check_attributes
from ringtile.kernels.contracts import in_bytes

Rounding = Literal["bfloat16", "int8"]
_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
_SCALE_BYTES = torch.float32.itemsize
"""Behind the numbers of each token and head in pages of int8."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values ``[..., D]`` as pages hold them. Int8 has a scale for each token and head behind it."""
    if dtype != torch.int8:
        return x.to(dtype)
    numbers, scale = in_bytes(x)
    return torch.cat((numbers, scale.view(dtype)), -1)


def restored(held: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values that pages hold, in the dtype of a model."""
    if held.dtype != torch.int8:
        return held.to(dtype)
    scale = held[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (held[..., :-_SCALE_BYTES] * scale).to(dtype)


def register_roundings(names: dict[str, Rounding]) -> None:
    """Have transformers make rounded pages for models whose attention has one of these names."""
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR as RECORDS

    for kind, plain in RECORDS.items():
        if not hasattr(plain, "rounded_to"):
            RECORDS[kind] = _with_rounding(plain, names)


def _with_rounding(plain: Any, names: dict[str, Rounding]) -> Any:
    """Return a class of transformers' records of the pages of some layers, which rounds if the model asks for it."""

    class Rounding(plain):  # type: ignore[misc]
        rounded_to: torch.dtype | None = None
        room = 0

        def __init__(self, *, config: Any, cache_dtype: torch.dtype, **given: Any) -> None:
            dtype = _DTYPES.get(names.get(config._attn_implementation, ""), cache_dtype)
            if dtype != cache_dtype:
                self.rounded_to, self.room = dtype, _SCALE_BYTES if dtype == torch.int8 else 0
            super().__init__(config=config, cache_dtype=dtype, **given)
            check_attributes(self, "rounded pages", "head_dim")
            self.head_dim += self.room

        def get_bytes_per_page(self, heads: int, head_dim: int, dtype: torch.dtype, size: int) -> int:
            found: int = super().get_bytes_per_page(heads, head_dim + self.room, dtype, size)
            return found

    return Rounding
