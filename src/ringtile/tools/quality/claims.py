"""What is claimed for sparse attention, by density, and whether a measured quality holds it."""

from __future__ import annotations

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


def floor_of(tokens: int, block: int, forced: int = 1) -> float:
    """Return the tile density of causal attention that keeps nothing but each query's own tile, or so many.

    >>> floor_of(1024, 16) == 64 / (64 * 65 / 2)
    True
    """
    rows = -(-tokens // block)
    return sum(min(row, forced) for row in range(1, rows + 1)) / (rows * (rows + 1) / 2)
