"""Hold a quality: choose each head's threshold by the exact attention of a few rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.adaptive.budgets import kept_above
from ringtile.adaptive.view import View

LEVELS = (*(2.0 ** (-step / 4) for step in range(80)), 0.0)
"""Thresholds to choose from. The last one keeps all tiles."""


@dataclass(frozen=True, eq=False)
class ControlReport:
    """What a controller chose and saw in a call."""

    density: Tensor
    """float64 ``[B, H]``: the tile density of each head."""
    recall: Tensor
    """float64 ``[B, H]``: the mean part of the attention of the audited rows that is kept."""
    dense: Tensor
    """Bool ``[B, H]``: heads that keep all tiles, because nothing less serves them."""

    def __repr__(self) -> str:
        return (
            f"ControlReport(density {float(self.density.mean()):.3f}, recall {float(self.recall.nanmean()):.3f}, "
            f"{int(self.dense.sum())} of {self.dense.numel()} heads dense)"
        )


class Controller:
    """Choose densities so that the mean attention mass that heads keep reaches a target.

    Conformal risk control (Angelopoulos et al., arXiv:2208.02814): if n audited rows of a call drop a mean mass m, the
    expected mass that another row of the call drops is at most ``(n m + 1) / (n + 1)``, whatever the data and the
    scores. The smallest density that holds this below ``1 - quality`` is chosen, for each batch element and head. One
    draw of the rows can miss the target, and no number here bounds the loss of a model.

    Args:
        quality: Mean part of the attention to keep, between 0 and 1.
        rows: Number of audited rows. Fewer than ``quality / (1 - quality)`` can prove nothing.
        seed: Seed of the rows, which are the same in each call.
    """

    def __init__(self, quality: float, *, rows: int = 64, seed: int = 0) -> None:
        if not 0 < quality < 1:
            raise ValueError(f"quality: expected a number between 0 and 1, got {quality!r}")
        if type(rows) is not int or rows * (1 - quality) < quality - 1e-9:
            raise ValueError(f"rows: expected at least {quality / (1 - quality):.0f} for {quality=}, got {rows!r}")
        self.quality, self.rows, self.seed = quality, rows, seed
        self.report: ControlReport | None = None
        """What the last call chose and saw."""

    def __repr__(self) -> str:
        return f"Controller({self.quality}, rows={self.rows}, seed={self.seed})"

    def keep(self, view: View, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        """Return the tiles that a call keeps, and report, from arguments as in `Budget.keep`."""
        scores = scores.nan_to_num(0)
        lost, count = self._audit(view, scores, allowed, forced)
        level = self._lowest(lost, count)
        recall = 1 - lost.gather(2, level.unsqueeze(2)).squeeze(2) / count
        kept = kept_above(_levels(scores)[level].unsqueeze(-1), scores, allowed, forced)
        density = kept.sum((2, 3)).double() / allowed.sum((2, 3)).clamp(min=1)
        self.report = ControlReport(density, recall, level == len(LEVELS) - 1)
        return kept

    def _lowest(self, lost: Tensor, count: Tensor) -> Tensor:
        """Return the first level whose risk is below the target, the last one if there is none."""
        # The +1 stands for a row that is not audited and drops everything: the worst that it can do.
        risk = (lost + 1) / (count.unsqueeze(2) + 1)
        enough = risk <= 1 - self.quality + 1e-12
        return torch.where(enough.any(2), enough.int().argmax(2), len(LEVELS) - 1)

    def _audit(self, view: View, scores: Tensor, allowed: Tensor, forced: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mass that audited rows drop at each level, added up ``[B, H, L]``, and their number ``[B, H]``."""
        base, generator = view.base, torch.Generator().manual_seed(self.seed)
        # The rows are uniform and without replacement, which the bound of the target assumes.
        row = (
            torch.randperm(base.n_queries, generator=generator, device="cpu")[: self.rows].sort().values.to(base.device)
        )
        masses = view.exact_masses(row.unsqueeze(1)).double()
        of_map = row if scores.shape[2] == base.n_queries else base.row_of(row)
        allowed, forced = allowed[:, :, of_map], forced[of_map]
        masses = masses.masked_fill(~allowed, 0)
        # The level at which a tile is kept first. A score of 0.3 is kept from the threshold 0.297 on, level 7.
        first = torch.searchsorted(-_levels(scores), -scores[:, :, of_map].contiguous())
        first = first.clamp(max=len(LEVELS) - 1).masked_fill(forced, 0)
        kept = masses.new_zeros(*masses.shape[:3], len(LEVELS)).scatter_add_(3, first, masses).cumsum(3)
        lost = (1 - kept).clamp(min=0)
        # The last level keeps all, and rounding must not say otherwise.
        lost[..., -1] = 0
        counts = masses.sum(3) > 0
        return (lost * counts.unsqueeze(3)).sum(2), counts.sum(2)


def _levels(like: Tensor) -> Tensor:
    # Scores are float32, so thresholds are too: a score must not pass in one place and fail in another.
    return torch.tensor(LEVELS, dtype=torch.float32, device=like.device)
