"""The tensors of an index, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.index.lists import TileLists

_LISTS, _TABLE = TileLists._fields[:5], ("bits", "bits_t", "rows_any", "cols_any")
NAMES = (
    "group",
    *(f"{side}.{name}" for side in ("rows", "cols") for name in _LISTS),
    *(f"table.{name}" for name in _TABLE),
    *(f"{side}.{name}" for name in ("work", "at") for side in ("rows", "cols")),
)
"""In the order of `BlockIndex.tensors`, which is a contract: operators and saved programs take them so."""


def edited(index: BlockIndex, change: Callable[[Tensor], Tensor], *names: str) -> BlockIndex:
    """The index with some tensors changed, or all."""
    tensors = zip(NAMES, index.tensors(), strict=True)
    found = [change(x) if name in names or not names else x for name, x in tensors]
    return BlockIndex.from_tensors(found, index.grid, index.envelopes)


def tensor(index: BlockIndex, name: str) -> Tensor:
    return dict(zip(NAMES, index.tensors(), strict=True))[name]
