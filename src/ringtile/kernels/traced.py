"""What Dynamo does not trace."""

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])


def constant(function: _F) -> _F:
    """Let Dynamo take what a function returns for a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same attribute, but loads Dynamo first, for seconds in every rank.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
