"""Ranks as threads of one process, and the bytes that they give to collectives."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed import multi_threaded_pg

T = TypeVar("T")


def _reduce(self: Any, tensors: list[Tensor], options: Any) -> Any:
    """Threads have no reduce of their own."""
    everywhere = dist.AllreduceOptions()
    everywhere.reduceOp = options.reduceOp
    mine = tensors[0].clone()
    work = self.allreduce([mine], everywhere)
    if self.rank() == options.rootRank:
        tensors[0].copy_(mine)
    return work


class _Arrival(NamedTuple):
    """The work of a receive: a tensor to fill from a mailbox."""

    mailbox: queue.Queue[Tensor] | None
    tensor: Tensor

    def wait(self) -> None:
        if self.mailbox is not None:
            self.tensor.copy_(self.mailbox.get(timeout=60))


_send = dist.batch_isend_irecv


def on_ranks(n_ranks: int, function: Callable[[int], T]) -> list[T]:
    """Call ``function(rank)`` on a thread per rank, in a process group of their own. Return the results in order."""
    found: dict[int, T] = {}
    mail: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
    lock = threading.Lock()

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[_Arrival]:
        """Threads pass nothing from one to one."""
        me, works = dist.get_rank(), []
        for operation in operations:
            sends = operation.op is dist.isend
            with lock:
                mailbox = mail[(me, operation.peer) if sends else (operation.peer, me)]
            if sends:
                mailbox.put(operation.tensor.clone())
            works.append(_Arrival(None if sends else mailbox, operation.tensor))
        return works

    def run(self: None) -> None:
        rank = dist.get_rank()
        found[rank] = function(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_threaded_pg.ProcessLocalGroup, "reduce", _reduce, raising=False)
        patch.setitem(_original, "batch_isend_irecv", batch_isend_irecv)
        if dist.batch_isend_irecv is _send:
            patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
        spawn_threads_and_init_comms(world_size=n_ranks)(run)(None)
    return [found[rank] for rank in range(n_ranks)]


class Traffic:
    """Bytes that this thread's rank gave to collectives, and the calls."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.calls: list[str] = []


_original = {name: getattr(dist, name) for name in ("all_to_all_single", "broadcast", "reduce", "batch_isend_irecv")}


def _bytes_of(name: str, arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes that a rank sends and receives by a collective."""
    if name == "all_to_all_single":
        return arguments[1].nbytes, arguments[0].nbytes
    if name == "batch_isend_irecv":
        sizes = [(operation.op is dist.isend, operation.tensor.nbytes) for operation in arguments[0]]
        return sum(n for sends, n in sizes if sends), sum(n for sends, n in sizes if not sends)
    sends = (dist.get_rank() == arguments[1]) == (name == "broadcast")
    return (arguments[0].nbytes, 0) if sends else (0, arguments[0].nbytes)


@contextmanager
def counted_traffic() -> Iterator[Any]:
    """Count at the collectives themselves. Each thread finds its `Traffic` as ``.traffic``."""
    local = threading.local()

    def counting(name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            traffic = local.__dict__.setdefault("traffic", Traffic())
            sent, received = _bytes_of(name, arguments)
            traffic.sent, traffic.received = traffic.sent + sent, traffic.received + received
            traffic.calls.append(name)
            return _original[name](*arguments, **keywords)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in _original:
            patch.setattr(dist, name, counting(name))
        yield local
