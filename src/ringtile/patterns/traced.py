"""Functions that Dynamo does not trace."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., object])


def constant(function: _F) -> _F:
    """Let Dynamo take what a function returns for a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same attribute, but loads Dynamo first, for seconds in every rank.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


REASON = "a traced graph cannot look at values: expected a pattern with a text, a mask of keys or a BlockIndex"
"""Why `outside_graphs` breaks a graph: an error of ``fullgraph=True``."""


def outside_graphs(function: _F) -> _F:
    """Let Dynamo break a graph at a function that reads values, and compile neither it nor the functions it calls.

    `torch.compiler.disable` does this too, but loads Dynamo first.
    """
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    # Private names of PyTorch: without them, only compiled calls that read values fail.
    with suppress(AttributeError):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
