"""Adaptive attention that is watched: the densities, exact scores and recall of its calls."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.adaptive import AdaptiveAttention, View, audit
from ringtile.patterns import Pattern


@dataclass(frozen=True, eq=False)
class _Counted(View):
    """A view that counts the pairs whose scores are computed exactly, per head."""

    pairs: list[float] = field(default_factory=list)

    def exact_masses(self, row: Tensor) -> Tensor:
        self.pairs.append(float(self._seen[row].sum()))
        return super().exact_masses(row)

    @property
    def _seen(self) -> Tensor:
        if self.base.leading is None:
            return torch.full((self.base.n_queries,), self.base.n_keys)
        return self.base.leading


class Watched(nn.Module):
    """Adaptive attention that keeps figures of its calls: tile density, exact scores, and recall if asked."""

    def __init__(self, attend: AdaptiveAttention, rows: int = 0) -> None:
        super().__init__()
        self.attend, self.rows = attend, rows
        self.density: list[float] = []
        self.probed: list[float] = []
        """The pairs that the choice computed exactly, as a part of those that dense attention computes."""
        self.recall: list[Tensor] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | None = None, **options: Any
    ) -> Tensor:
        choice = self.attend.choice
        how = {name: options.pop(name) for name in ("is_causal", "key_mask", "scale") if name in options}
        asked = choice.view(query, key, pattern, **how)
        view = _Counted(query, key, asked.base, asked.key_mask, asked.scale)
        index = choice.index(view)
        self.probed.append(sum(view.pairs) / float(view._seen.sum()))
        # The index is made here, not in the attention, so that its figures need no second choice.
        self.density.append(index.tile_density)
        if self.rows:
            found = audit(query, key, value, index, rows=self.rows, key_mask=view.key_mask, scale=view.scale)
            self.recall.append(found.of_heads)
        out: Tensor = self.attend.over(index, view, value, **options)
        return out
