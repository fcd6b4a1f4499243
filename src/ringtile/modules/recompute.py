"""Gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class _Delayed:
    """Holds an exception raised inside, until `arrive` raises it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self._error = error
        return True

    def arrive(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function and save only its arguments. The backward pass calls it again.

    In torch 2.11, an exception inside `checkpoint` leaves it in recording mode and corrupts every later backward pass.
    So we hold the exception until the checkpoint ends.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = checkpoint(function, *arguments, use_reentrant=False)
        return compiled
    delayed, has_ended = _Delayed(), False

    # In the forward pass it must return normally whatever happens inside. In the backward pass errors are plain.
    def guarded(*given: Any) -> Tensor:
        if has_ended:
            return function(*given)
        with delayed:
            return function(*given)
        return torch.empty(0)

    out: Tensor = checkpoint(guarded, *arguments, use_reentrant=False)
    has_ended = True
    delayed.arrive()
    return out
