"""Solve a pattern's free parameter for a density."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ringtile.index.build import build_index
from ringtile.patterns import Pattern
from ringtile.patterns.grammar import as_rule

_TOLERANCE = 0.02
_GOOD_ENOUGH = 0.005
"""The search stops within this error. Between it and the tolerance, the search continues while sizes are left."""


@dataclass(frozen=True)
class Solution:
    """A pattern with the target density, or the nearest that its free parameter reaches."""

    pattern: Pattern
    density: float
    """Measured density, of pairs or of tiles."""
    reached: bool
    """True if the density is within 2% of the target."""
    lowest: float
    """Density at the smallest size. No size has a lower one."""
    highest: float
    """Density at the largest size tried. If it is below the target, no size has a higher one."""


def with_density(
    pattern: Pattern,
    target: float,
    n_queries: int,
    n_keys: int | None = None,
    *,
    start: int | None = None,
    num_heads: int = 1,
    batch: int = 1,
    block: int | Literal["auto"] = 128,
    tiles: bool = False,
    device: torch.device | str | None = None,
) -> Solution:
    """Set a pattern's free parameter (`Pattern.resized`) so that its measured density is ``target``.

    Density is the fraction of the allowed pairs that the pattern keeps. With ``tiles``, it is the fraction of the
    allowed tiles, which run time follows. If no size comes within 2% of the target, this returns the nearest. Under
    `Causal`, one tile per row is ``2 / (rows + 1)`` of the tiles, and no window has fewer. Raises ValueError if the
    target is outside (0, 1] or the pattern has no free parameter, and as `build_index`.

    >>> from ringtile.patterns import Causal, Window
    >>> solution = with_density(Causal() & Window(1, 0), 0.1, 8192)
    >>> solution.pattern, round(solution.density, 3), solution.reached
    (causal & window(420, 0), 0.1, True)
    """

    def measured(sized: Pattern) -> float:
        index = build_index(
            sized, n_queries, n_keys, start=start, num_heads=num_heads, batch=batch, block=block, device=device
        )
        return index.tile_density if tiles else index.density

    return solve(as_rule(pattern), target, measured, n_queries, n_keys or 0, start or 0)


def solve(pattern: Pattern, target: float, measured: Callable[[Pattern], float], *lengths: int) -> Solution:
    """Set a pattern's free parameter, up to the sum of ``lengths``, so that ``measured`` returns ``target``."""
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target <= 1:
        raise ValueError(f"target: expected a density in (0, 1], got {target!r}")

    def measure(size: int) -> _Point:
        sized = pattern.resized(size)
        if sized is None:
            raise ValueError(f"pattern: {pattern!r} has no free parameter to solve for")
        return _Point(size, measured(sized), sized)

    def error(point: _Point) -> float:
        return abs(point.density - target)

    smallest = 1
    with suppress(ValueError):
        pattern.resized(0)
        smallest = 0
    points = [measure(smallest)]
    low = high = points[0]
    largest = sum(map(abs, lengths))
    while high.density < target and high.size < largest:
        low, high = high, measure(min(_grown(low, high, target), largest))
        points.append(high)
        # Random blocks beyond all blocks change no pairs, and cost time to draw.
        if pattern.free_rank == 1 and low.size and high.density == low.density:
            break
    highest = high.density
    bracketed = low.density < target <= high.density
    while bracketed and high.size - low.size > 1 and min(map(error, points)) > _GOOD_ENOUGH * target:
        # The interpolated size, at least a tenth of the interval away from its ends.
        share, width = (target - low.density) / (high.density - low.density), high.size - low.size
        middle = measure(low.size + min(max(round(width * min(max(share, 0.1), 0.9)), 1), width - 1))
        points.append(middle)
        low, high = (middle, high) if middle.density < target else (low, middle)
    best = min(points, key=error)
    reached = error(best) <= _TOLERANCE * target
    return Solution(best.pattern, best.density, reached, points[0].density, highest)


class _Point(NamedTuple):
    size: int
    density: float
    pattern: Pattern


def _grown(low: _Point, high: _Point, target: float) -> int:
    """Return a larger size, a little more than the last two extrapolate to, from twice to 16 times the last."""
    rise = high.density - low.density
    ahead = (target - high.density) / rise * (high.size - low.size) if rise > 0 else math.inf
    return max(1, round(min(max(1.05 * ahead + high.size, 2 * high.size), 16 * high.size)))
