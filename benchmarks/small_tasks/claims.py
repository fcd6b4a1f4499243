"""What is claimed for sparse attention, by density, and whether a measured quality holds it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ringtile.tools.quality.cells import Cell
from ringtile.tools.quality.leg import FORCED, floor_of

CLAIMS = {0.5: ("99+", 99.0), 0.25: ("98-99", 98.0), 0.1: ("95-98", 95.0), 0.05: ("93-97", 93.0), 0.02: ("90-95", 90.0)}
"""By density: the quality, in percent, that is often claimed for it, and the least that holds the claim."""

HOLDS = "holds"
REFUTED = "refuted"
BELOW = "below the floor"


def verdict(density: float, kept: float, floor: float) -> str:
    """Return whether a claim holds for the percentage that was kept, or cannot be judged.

    >>> verdict(0.25, 98.2, 0.03), verdict(0.25, 97.9, 0.03), verdict(0.02, 95.0, 0.03)
    ('holds', 'refuted', 'below the floor')

    Raises ValueError if nothing is claimed for the density.
    """
    if density not in CLAIMS:
        raise ValueError(f"density: expected one of {', '.join(map(str, CLAIMS))}, got {density}")
    # If the own tiles alone are more than the density, no selector could choose.
    if floor > density:
        return BELOW
    return HOLDS if kept >= CLAIMS[density][1] else REFUTED


_CLAIMED = (("text", "perplexity of text"), ("copy", "benefit of a far copy"), ("needles", "digits of far needles"))


def verdicts(cells: Iterable[Cell]) -> dict[str, dict[float, str]]:
    """Return, by figure and density, whether the claims hold for the calibrated default."""
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for cell in cells:
        at = cell.setting
        if (at.task, at.scores, at.budget) == ("far copy", "default", "calibrated") and at.asked in CLAIMS:
            for figure, words in _CLAIMED:
                name = f"{at.sizes['model']}, {words}"
                if (value := cell.figure(figure)) is not None:
                    floor = floor_of(int(at.sizes["tokens"]), int(at.sizes["block"]), FORCED)
                    found.setdefault(name, {}).setdefault(at.asked, []).append((100 * value, floor))
    return {
        name: {asked: verdict(asked, statistics.mean(x for x, _ in each), each[0][1]) for asked, each in row.items()}
        for name, row in found.items()
    }
