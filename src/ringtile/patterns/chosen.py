"""Lists of keys per query, which a call brings along: models that were trained sparse choose them with an indexer."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import And, Composed, Dense, Not, Or, Pattern, TileGrid
from ringtile.patterns.blocks import among
from ringtile.patterns.checks import LARGEST_BLOCK

_ROW = 1 << 32
"""Numbers of keys or blocks are smaller, so that a row times this, plus a number, names an entry."""


@dataclass(frozen=True, eq=False, repr=False)
class Chosen(Pattern):
    """Each query attends to the keys, or the blocks of keys, in a list of its own.

    ``indices`` are integers ``[B or 1, G, Nq, n]`` in any order. -1 stands for none, and what is listed twice counts
    once. G is 1, or the number of key-value heads, whose query heads share a list. Entry e stands for the keys ``e *
    block`` to ``e * block + block - 1``, so for key e by default. ``block`` is a power of two. The tensor is kept, not
    copied.

    Such lists come from an indexer, as `ringtile.adaptive.index_topk` (DeepSeek-V3.2, arXiv:2512.02556). A `Chosen`
    joins other patterns by ``&`` and ``|``, once in a rule. It has no text and no index of tiles: only
    `sparse_attention` computes it. Raises ValueError if a shape, a dtype or the block is invalid.

    >>> print(Chosen(torch.tensor([[[[0, -1], [1, 0], [2, 0]]]])).draw(3))
    █··
    ██·
    █·█
    """

    indices: Tensor
    block: int = 1
    start: int = field(init=False, default=0)
    """Position of the first list's query. `sparse_attention` sets it and ``heads``."""
    heads: int | None = field(init=False, default=None)
    """Number of query heads. None is G."""

    def __post_init__(self) -> None:
        if not isinstance(self.indices, Tensor) or self.indices.dim() != 4 or self.indices.shape[1] == 0:
            got = self.indices.shape if isinstance(self.indices, Tensor) else type(self.indices).__name__
            raise ValueError(f"indices: expected four dimensions [B, G, Nq, n] with G > 0, got {got}")
        if self.indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"indices: expected int32 or int64, got {self.indices.dtype}")
        block = self.block
        if type(block) is not int or not 1 <= block <= LARGEST_BLOCK or block & (block - 1):
            raise ValueError(f"block: expected a power of two up to {LARGEST_BLOCK}, got {block!r}")

    def placed(self, start: int, heads: int) -> "Chosen":
        """Return the pattern whose first list is that of the query at ``start``, for a number of query heads."""
        return self._with(self.indices, start, heads)

    def _with(self, indices: Tensor, start: int, heads: int | None) -> "Chosen":
        found = Chosen(indices, self.block)
        object.__setattr__(found, "start", start)
        object.__setattr__(found, "heads", heads)
        return found

    @cached_property
    def _codes(self) -> Tensor:
        """Return all entries as ascending numbers ``(list * 2**32) + entry``."""
        entries = self.indices[0].flatten(0, 1).long()
        codes = entries + _ROW * torch.arange(len(entries), device=entries.device).unsqueeze(1)
        return codes[entries >= 0].sort().values

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.batch_size is not None:
            raise ValueError(f"lists of {self.batch_size} batch elements: ask batch_row(b), the pattern of one")
        groups, rows = self.indices.shape[1:3]
        row, group = query - self.start, head * groups // (self.heads or groups)
        code = _ROW * (group * rows + row) + key // self.block
        return (row >= 0) & (row < rows) & among(self._codes.to(code.device), code)

    @property
    def batch_size(self) -> int | None:
        return len(self.indices) if len(self.indices) > 1 else None

    def batch_row(self, batch: int) -> Pattern:
        return self if len(self.indices) == 1 else self._with(self.indices[batch : batch + 1], self.start, self.heads)

    def validate(self, grid: TileGrid) -> None:
        if self.heads is None and grid.block > 1:
            self._refuse()
        if (grid.n_queries, grid.start) != (self.indices.shape[2], self.start):
            raise ValueError(
                f"indices: expected lists of {grid.n_queries} queries from position {grid.start}, "
                f"got {self.indices.shape[2]} from position {self.start}"
            )

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(
            "pattern: expected one with an index of tiles, got Chosen: only sparse_attention, and ring_attention with "
            "transport='gather', compute lists"
        )

    head_class = cover = cover_size = col_range = tile_class = _refuse  # type: ignore[assignment]


class Split(NamedTuple):
    """A rule with lists as ``chosen & within | rest``."""

    chosen: Chosen
    within: Pattern
    rest: Pattern | None

    @property
    def listed(self) -> Pattern:
        """The pairs that count in the lists: those that ``rest`` does not keep."""
        return self.within if self.rest is None else self.within & Not(self.rest)

    @property
    def beside(self) -> Pattern:
        """The rule without its lists."""
        return self.within if self.rest is None else self.within | self.rest

    def rule(self, start: int, heads: int) -> Pattern:
        """Return the rule of a call."""
        lists = self.chosen.placed(start, heads) & self.within
        return lists if self.rest is None else lists | self.rest


def split(rule: Pattern) -> Split | None:
    """Return the lists of a rule and the pairs beside them, or None if it has no lists.

    Raises ValueError if it has them twice, or elsewhere than under ``&`` and ``|``.
    """
    if isinstance(rule, Chosen):
        return Split(rule, Dense(), None)
    if not isinstance(rule, Composed):
        return None
    found = [split(each) for each in rule.parts]
    held = [each for each in found if each is not None]
    if not held:
        return None
    if len(held) > 1 or not isinstance(rule, And | Or):
        raise ValueError(
            "pattern: expected Chosen once in a rule, joined by & and |, got it elsewhere or more than once"
        )
    chosen, within, rest = held[0]
    other = rule.second if found[0] is not None else rule.first
    if isinstance(rule, Or):
        return Split(chosen, within, other if rest is None else rest | other)
    return Split(chosen, other if isinstance(within, Dense) else within & other, None if rest is None else rest & other)
