"""Adaptive attention that is watched: the densities, exact scores and recall of its calls."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ringtile.adaptive import AdaptiveAttention, View, audit
from ringtile.patterns import Pattern


@dataclass(frozen=True, eq=False)
class _Counted(View):
    """A view that counts the pairs whose scores are computed, per head, as pairs of full products."""

    pairs: list[float] = field(default_factory=list)

    def exact_masses(self, row: Tensor) -> Tensor:
        if self.base.leading is not None:
            self.pairs.append(float(self.base.leading[row].sum()))
        return super().exact_masses(row)

    def rounded_masses(self) -> Tensor:
        if self.base.leading is not None:
            # An instruction multiplies four times as many numbers of 8 bits as of 32.
            self.pairs.append(float(self.base.leading.sum()) / 4)
        return super().rounded_masses()

    def exact_weights(self, rows: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        found = super().exact_weights(rows, low, high)
        self.pairs.append(len(rows) * min(found.shape[3] * found.shape[4], self.base.n_keys - low * self.base.block))
        return found


class Watched(nn.Module):
    """Adaptive attention that keeps figures of its calls: tile density, exact scores, and recall if asked."""

    def __init__(self, attend: AdaptiveAttention, rows: int = 0) -> None:
        super().__init__()
        self.attend, self.rows = attend, rows
        self.density: list[float] = []
        self.probed: list[float] = []
        """The pairs whose scores the choice computed, as a part of those that dense attention computes."""
        self.recall: list[Tensor] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | None = None, **options: Any
    ) -> Tensor:
        choice = self.attend.choice
        how = {name: options.pop(name) for name in ("is_causal", "key_mask", "scale") if name in options}
        asked = choice.view(query, key, pattern, **how)
        view = _Counted(query, key, asked.base, asked.key_mask, asked.scale)
        index = choice.index(view)
        leading = view.base.leading
        dense = view.base.n_queries * view.base.n_keys if leading is None else int(leading.sum())
        self.probed.append(sum(view.pairs) / dense)
        # The index is made here, not in the attention, so that its figures need no second choice.
        self.density.append(index.tile_density)
        if self.rows:
            found = audit(query, key, value, index, rows=self.rows, key_mask=view.key_mask, scale=view.scale)
            self.recall.append(found.of_heads)
        out: Tensor = self.attend.over(index, view, value, **options)
        return out
