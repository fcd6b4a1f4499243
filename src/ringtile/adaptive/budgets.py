"""Budgets: how many of the best tiles each row keeps. No row decides about another."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns.checks import check_positive

_TINY = 2.0**-126
"""The least normal number of float32, which scores have."""
_RUN = 128
"""Rows whose least scores are found together on a CPU."""


def rank_of(scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
    """Return numbers that put forced columns before the others that are allowed, and these before the rest."""
    # Scores are at most 1, so a forced tile, which gets 2 more, ranks before all other tiles.
    return scores.nan_to_num(0).add(forced, alpha=2).masked_fill(~allowed, -1)


def _ranked(scores: Tensor, allowed: Tensor, forced: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of each row by `rank_of`, best first, and their scores, 0 if they are not allowed."""
    order = rank_of(scores, allowed, forced).sort(dim=3, descending=True, stable=True).indices
    return order, scores.nan_to_num(0).masked_fill(~allowed, 0).gather(3, order)


def _tuple_of(numbers: float | tuple[float, ...]) -> tuple[float, ...]:
    return numbers if isinstance(numbers, tuple) else (numbers,)


def _set_numbers(budget: "Budget", name: str, said: str, most: float) -> None:
    """Make a sequence of numbers a tuple. Raise ValueError if a number is out of range."""
    numbers = getattr(budget, name)
    if isinstance(numbers, Sequence | Tensor):
        numbers = tuple(float(x) for x in numbers)
        object.__setattr__(budget, name, numbers)
    if numbers == () or not all(0 <= x <= most for x in _tuple_of(numbers)):
        raise ValueError(f"{name}: expected numbers {said}, got {numbers!r}")


def _by_head(name: str, numbers: float | tuple[float, ...], heads: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one number for all heads, or one per head, ``[1 or H, 1]``. Raise ValueError if they do not match."""
    if isinstance(numbers, tuple) and len(numbers) != heads:
        raise ValueError(f"{name}: expected one number, or one for each of {heads} heads, got {numbers}")
    return torch.tensor(_tuple_of(numbers), dtype=dtype, device=like.device).unsqueeze(1)


class Budget(ABC):
    """Base class: ``budget.keep(scores, allowed, forced)`` chooses tiles for each row by itself."""

    @abstractmethod
    def keep(self, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        """Return the kept tiles of each row, bool in the shape of ``scores``.

        Args:
            scores: float32 ``[B, H, R, C]`` that sum to 1 over the allowed tiles of a row. NaN counts as 0.
            allowed: Bool ``[B or 1, H or 1, R, C]``, the tiles to choose from.
            forced: Bool ``[R, C]``, tiles that are kept if they are allowed. They count.
        """


class Counted(Budget):
    """A budget whose number of tiles follows from how many are allowed and forced."""

    @abstractmethod
    def wanted(self, allowed: Tensor, heads: int) -> Tensor:
        """Return the number of tiles ``[B or 1, H or 1, R]`` of rows with so many allowed tiles."""

    def keep(self, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        forced = allowed & forced
        if not scores.numel():
            return allowed.expand_as(scores)
        wanted = self.wanted(allowed.sum(3), scores.shape[1]).maximum(forced.sum(3)).unsqueeze(3)
        ranks = rank_of(scores, allowed, forced)
        # Finding the best takes a tenth of a sort. Their number is on a GPU, where reading it would wait.
        most = max(1, int(wanted.max())) if scores.device.type == "cpu" else scores.shape[3]
        last = ranks.topk(most, dim=3).values.gather(3, (wanted - 1).clamp(min=0).expand(*scores.shape[:3], 1))
        # Of equal scores, the earlier columns are kept: no row keeps more than its number.
        better, equal = ranks > last, ranks == last
        return (better | (equal & (equal.cumsum(3) <= wanted - better.sum(3, keepdim=True)))) & allowed


@dataclass(frozen=True)
class TopK(Counted):
    """Keep ``k`` tiles of each row, fewer only if fewer are allowed.

    Args:
        k: Number of tiles, with the forced ones.
    """

    k: int

    def __post_init__(self) -> None:
        check_positive(k=self.k)

    def wanted(self, allowed: Tensor, heads: int) -> Tensor:
        return allowed.clamp(max=self.k)


@dataclass(frozen=True)
class Density(Counted):
    """Keep a fraction of the allowed tiles of each row, rounded up.

    Args:
        density: A number from 0 to 1, or one per head.
    """

    density: float | tuple[float, ...]

    def __post_init__(self) -> None:
        _set_numbers(self, "density", "from 0 to 1", 1)

    def wanted(self, allowed: Tensor, heads: int) -> Tensor:
        density = _by_head("density", self.density, heads, allowed, torch.float64)
        # 0.1 * 30 is 3.0000000000000004 in float64: without the epsilon it would round up to 4 tiles.
        return (density * allowed - 1e-9).ceil().clamp(min=0).long()


@dataclass(frozen=True)
class TopP(Budget):
    """Keep the best tiles of each row until their scores sum to ``p``, with the tile that crosses it.

    Args:
        p: Part of the row's score, above 0 and at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"p: expected a number above 0 and at most 1, got {self.p!r}")

    def keep(self, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        # Rounding could leave out tiles with tiny scores.
        if self.p == 1:
            return allowed.expand_as(scores)
        forced = allowed & forced
        order, inside = _ranked(scores, allowed, forced)
        # The sum before a tile, so that the tile that crosses p stays: of (0.5, 0.3, 0.2) at 0.7, the first two.
        first = inside.cumsum(3) - inside < self.p
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(3, order, first & (inside > 0)) & allowed | forced


@dataclass(frozen=True)
class Threshold(Budget):
    """Keep the tiles whose score is at least a number. No row and no head needs to be counted.

    Args:
        least: Part of the row's score, at least 0, or one per head. More than 1 keeps only the forced tiles.
    """

    least: float | tuple[float, ...]

    def __post_init__(self) -> None:
        _set_numbers(self, "least", "of at least 0", math.inf)

    def keep(self, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        scores = scores.nan_to_num(0)
        return kept_above(self._lowest(scores, allowed, forced), scores, allowed, forced)

    def _lowest(self, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        return _by_head("least", self.least, scores.shape[1], scores, torch.float32)


@dataclass(frozen=True)
class Gain(Threshold):
    """Keep the tiles whose gain is at least a number: the root of the score times the part that better tiles leave.

    A row that spreads its attention loses the sum of what it drops, so it keeps tiles that a peaked row drops. Forced
    tiles rank before all other tiles. A tile whose score is within 3 % of the lowest kept one can be missed.

    Args:
        least: Gain, at least 0, or one number per head. More than 1 keeps only the forced tiles.
    """

    def _lowest(self, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        least, rows = super()._lowest(scores, allowed, forced).unsqueeze(2), scores.shape[2]
        if scores.device.type != "cpu" or not scores.numel():
            return self._of_rows(least, scores, allowed, forced)
        # Runs of rows have the columns up to the last one that they may keep: half of a causal index.
        columns = torch.arange(1, scores.shape[3] + 1, device="cpu")
        runs = [slice(first, first + _RUN) for first in range(0, rows, _RUN)]
        ends = [max(1, int((allowed[:, :, run].flatten(0, 2).any(0) * columns).max())) for run in runs]
        parts = ((x[..., run, :end] for x in (scores, allowed, forced)) for run, end in zip(runs, ends, strict=True))
        return torch.cat([self._of_rows(least, *part) for part in parts], 2)

    def _of_rows(self, least: Tensor, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        free = scores.masked_fill(allowed & forced | ~allowed, 0)

        def wanted(above: Tensor) -> Tensor:
            # The score that gains enough after all tiles above another score.
            left = torch.where(free <= above, free, 0).sum(3, keepdim=True)
            return (least / left.clamp(min=_TINY).sqrt()).square().clamp(min=_TINY)

        # A tile's gain falls with its score. So the lowest score of a row is bracketed, which is faster than a sort. If
        # some score is enough, what lies above it leaves at least as much as the lowest one, and the other way round.
        high = free.amax(3, keepdim=True)
        low = wanted(high)
        high = high.masked_fill(high < low, torch.inf)
        # From 1 down to the square of the number, by factors of 1.03.
        steps = math.log2(max(2.0, -2 * math.log(max(min(_tuple_of(self.least)), _TINY**0.5)) / math.log(1.03)))
        for _ in range(math.ceil(steps)):
            middle = low.sqrt() * high.sqrt()
            found = wanted(middle)
            enough = middle >= found
            low = torch.where(enough, found, middle).maximum(low)
            high = torch.where(enough, middle, found).minimum(high)
        # Just below its own score, a tile counts itself as a better one, so the last one is tried by itself.
        last = torch.where(free <= high, free, 0).amax(3, keepdim=True)
        return torch.where(last >= wanted(high), last, high).masked_fill(least == 0, 0).squeeze(3)


def gains_of(scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
    """Return the gain of each tile, see `Gain`, for arguments as in `Budget.keep`."""
    order, inside = _ranked(scores, allowed, allowed & forced)
    # Added up from below, what is left of a row is as exact as its scores.
    left = inside.flip(3).cumsum(3).flip(3)
    return torch.zeros_like(scores).scatter_(3, order, inside.sqrt() * left.sqrt())


def kept_above(least: Tensor, scores: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
    """Return the tiles whose score is at least that of their row, ``least`` ``[..., H or 1, R or 1]``, or forced."""
    return allowed & (forced | (scores >= least.unsqueeze(-1)))
