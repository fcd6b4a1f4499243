"""Checks of the numbers that a pattern is made of."""

import operator
from collections.abc import Sequence

LARGEST = 2**31 - 1
"""Largest window, rate or length: a product of two fits into int64."""

LARGEST_BLOCK = 2**20
"""Largest block of tokens of a rule on blocks."""


def checked_int(owner: str, name: str, value: int, minimum: int = 0, maximum: int = LARGEST) -> int:
    """Return ``value`` as an int within ``[minimum, maximum]``, or raise a ValueError that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or not minimum <= number <= maximum:
        raise ValueError(f"{owner} expects a whole number {minimum} <= {name} <= {maximum}, got {name}={value!r}")
    return number


def checked_ints(owner: str, name: str, values: Sequence[int], minimum: int = 0) -> tuple[int, ...]:
    """Return ``values`` as a non-empty tuple of ints >= ``minimum``, or raise a ValueError that names the argument."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{owner} expects {name} to be a non-empty sequence of whole numbers, got {name}={values!r}")
    return tuple(checked_int(owner, name, value, minimum) for value in values)


def check_positive(**sizes: object) -> None:
    """Raise ValueError that names the first argument which is no positive int."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}: expected a positive integer, got {size!r}")
