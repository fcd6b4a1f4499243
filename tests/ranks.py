"""Ranks as threads of one process, and the bytes that they give to collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed import multi_threaded_pg

T = TypeVar("T")

COLLECTIVES = {"all_to_all_single": (1, 0), "broadcast": (0, 0), "reduce": (0, 0)}
"""The collectives that the exchange uses, and the places of the tensors that they send and receive."""


def _reduce(self: Any, tensors: list[Any], options: Any) -> Any:
    """Threads have no reduce of their own. All of them get the sum, which only the root may read."""
    everywhere = dist.AllreduceOptions()
    everywhere.reduceOp = options.reduceOp
    mine = tensors[0].clone()
    work = self.allreduce([mine], everywhere)
    if self.rank() == options.rootRank:
        tensors[0].copy_(mine)
    return work


def on_ranks(n_ranks: int, function: Callable[[int], T]) -> list[T]:
    """Call ``function(rank)`` on a thread per rank, in a process group of their own. Return the results in order."""
    found: dict[int, T] = {}

    def run(self: None) -> None:
        rank = dist.get_rank()
        found[rank] = function(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_threaded_pg.ProcessLocalGroup, "reduce", _reduce, raising=False)
        spawn_threads_and_init_comms(world_size=n_ranks)(run)(None)
    return [found[rank] for rank in range(n_ranks)]


class Traffic:
    """Bytes that this thread's rank gave to collectives, and the calls."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.calls: list[str] = []


@contextmanager
def counted_traffic() -> Iterator[threading.local]:
    """Count at the collectives themselves. Each thread finds its `Traffic` as ``.traffic``."""
    local = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        for name, places in COLLECTIVES.items():

            def counted(*arguments: Any, _name: str = name, _places: Any = places, **keywords: Any) -> Any:
                traffic = local.__dict__.setdefault("traffic", Traffic())
                sent, received = (arguments[place].nbytes for place in _places)
                root = {"broadcast": "src", "reduce": "dst"}.get(_name)
                if root is not None:
                    is_root = dist.get_rank() == (arguments[1] if len(arguments) > 1 else keywords[root])
                    sent, received = (sent, 0) if is_root == (root == "src") else (0, received)
                traffic.sent, traffic.received = traffic.sent + sent, traffic.received + received
                traffic.calls.append(_name)
                return _original[_name](*arguments, **keywords)

            patch.setattr(dist, name, counted)
        yield local


_original = {name: getattr(dist, name) for name in COLLECTIVES}
