"""Tables of cases in which every two options meet, in place of the product of all options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, in which every two values of different axes meet: about the fewest.

    >>> all_pairs("ab", (1, 2), (True, False))
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    counts = [range(len(axis)) for axis in axes]
    missing = {
        ((one, i), (other, j)): None
        for one, other in combinations(range(len(axes)), 2)
        for i, j in product(counts[one], counts[other])
    }
    rows = []
    while missing:
        # The row begins with the first pair that is missing, and each further value adds as many pairs as it can.
        chosen = dict(next(iter(missing)))
        for axis in range(len(axes)):
            if axis not in chosen:
                chosen[axis] = max(
                    counts[axis], key=lambda value: sum(at in missing for at in _with(chosen, axis, value))
                )
        rows.append(tuple(values[chosen[axis]] for axis, values in enumerate(axes)))
        for pair in combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
    return rows


def _with(chosen: dict[int, int], axis: int, value: int) -> list[tuple[tuple[int, int], ...]]:
    """The pairs that a value makes with those that are chosen."""
    return [tuple(sorted((at, (axis, value)))) for at in chosen.items()]
