"""Functions that Dynamo does not trace."""

from collections.abc import Callable
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_F = TypeVar("_F", bound=Callable[..., object])


def constant(function: _F) -> _F:
    """Let Dynamo take what a function returns for a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same attribute, but loads Dynamo first, for seconds in every rank.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(reason: str) -> Callable[[_F], _F]:
    """Let Dynamo end a graph before a function, and compile neither it nor the functions that it calls.

    With ``fullgraph=True``, its error has the reason. `torch.compiler.disable` does this too, but loads Dynamo first.
    """

    def mark(function: _F) -> _F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, skip)  # type: ignore[attr-defined]
        return function

    return mark
