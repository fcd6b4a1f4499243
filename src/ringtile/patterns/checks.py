"""Checks of the numbers that a pattern is made of."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from numbers import Real
from typing import Any

import torch
from torch import SymFloat, Tensor

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


def check_number(name: str, value: Any, wanted: str, least: float = -math.inf, below: float = math.inf) -> None:
    """Raise ValueError unless a value is a finite number in ``[least, below)``. A tensor would lose its gradient."""
    is_number = isinstance(value, Real | SymFloat) and not isinstance(value, bool)
    if not is_number or not -math.inf < value < below or value < least:
        got = f"a {type(value).__name__}, which would get no gradient" if isinstance(value, Tensor) else repr(value)
        instead = ": write query * scale, with scale=1.0" if isinstance(value, Tensor) and name == "scale" else ""
        raise ValueError(f"{name}: expected {wanted}, got {got}{instead}")


def refuse_unknown(options: Mapping[str, object], function: Callable[..., object], owner: str) -> None:
    """Raise ValueError that names an argument of another library's function that a stand-in would drop.

    None and the default of ``function`` ask for nothing.
    """
    if options:
        parameters = signature(function).parameters
        for name, x in options.items():
            default = parameters[name].default if name in parameters else None
            if x is not None and (type(x) is not type(default) or x != default):
                raise ValueError(f"{name}: expected None, or its default, which {owner} may drop, got {x!r:.60}")


def as_tensor(owner: str, name: str, x: object) -> Tensor:
    """Return a tensor that a pattern is made from, made of numbers if it is a list or an array."""
    try:
        return x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=None, device="cpu")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{owner} expects {name} to be a tensor or a list of numbers, got {x!r}: {error}") from None


def check_positive(**sizes: object) -> None:
    """Raise ValueError that names the first argument which is no positive int."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}: expected a positive integer, got {size!r}")
