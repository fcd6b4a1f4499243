"""Gradient checkpointing."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function and save only its arguments. The backward pass calls it again.

    In torch 2.11, an exception inside `checkpoint` leaves it in recording mode and corrupts every later backward pass.
    So we hold the exception until the checkpoint ends.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = checkpoint(function, *arguments, use_reentrant=False)
        return compiled
    held: list[BaseException] = []
    has_ended = False

    # In the forward pass it must return normally whatever happens inside. In the backward pass errors are plain.
    def hold(kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or has_ended:
            return False
        held.append(error)
        return True

    def guarded(*given: Any) -> Tensor:
        with ExitStack() as stack:
            stack.push(hold)
            return function(*given)
        return torch.empty(0, dtype=torch.float32, device="cpu")

    out: Tensor = checkpoint(guarded, *arguments, use_reentrant=False)
    has_ended = True
    if held:
        # Taken out of the list, so that the error and this frame do not keep each other alive.
        raise held.pop()
    return out
