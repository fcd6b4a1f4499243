"""Functions that Dynamo does not trace, by its private names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pkgutil import resolve_name
from typing import TypeVar

from ringtile.patterns.private import call

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
    # Without these names, only compiled calls that read values fail.
    with suppress(ImportError, AttributeError, TypeError):
        eval_frame = resolve_name("torch._C._dynamo:eval_frame")
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def items_as_indices() -> AbstractContextManager[object]:
    """Return a context in which ``x[i]`` takes a number that vmap has, as rules of FlexAttention do."""
    name = "torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex"
    context: AbstractContextManager[object] = call(name, "rules of FlexAttention", AbstractContextManager)
    return context
