"""Ranks as threads of one process or as gloo processes, and the bytes that they give to collectives."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait as first_to_end
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed import multi_threaded_pg

from ringtile.distributed.stages import ALL_GATHER as _ALL_GATHER, REDUCE_SCATTER as _REDUCE_SCATTER

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
        # torch 2.11 ends a group by it, and its threads lack it.
        if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):
            patch.setattr(multi_threaded_pg.ThreadLocalWorld, "comms", [], raising=False)
        patch.setitem(_original, "batch_isend_irecv", batch_isend_irecv)
        if dist.batch_isend_irecv is _send:
            patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
        spawn_threads_and_init_comms(world_size=n_ranks)(run)(None)
    return [found[rank] for rank in range(n_ranks)]


@contextmanager
def one_rank() -> Iterator[None]:
    """A group of one rank, which needs no thread, and a compiler that remembers nothing."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Traffic:
    """Bytes that this thread's rank gave to collectives, and the calls."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.compared = 0
        """Bytes by which ranks find out that they are at the same exchange. Not among those that are sent."""
        self.calls: list[str] = []
        self.links: list[tuple[str, dict[int, int]]] = []
        """For each call its name and the bytes that go to each other rank, or by a broadcast or reduce at its root."""
        self.poisoned: list[bool] = []
        """True for each buffer that had only NaN when it was given to a collective to be filled."""

    @property
    def messages(self) -> int:
        """Messages that this rank sent, a broadcast counted once."""
        return sum(1 if name in ("broadcast", _ALL_GATHER) else len(sizes) for name, sizes in self.links if sizes)

    def to(self, other: int) -> int:
        """Bytes for another rank."""
        return sum(sizes.get(other, 0) for _, sizes in self.links)

    def between(self, me: int, per_node: int) -> int:
        """Bytes for other nodes. A broadcast crosses to each of them once, and a reduce from each."""
        total = 0
        for name, sizes in self.links:
            across = {rank: size for rank, size in sizes.items() if rank // per_node != me // per_node}
            if name in ("broadcast", "reduce", _ALL_GATHER, _REDUCE_SCATTER):
                across = {rank // per_node: size for rank, size in across.items()}
            total += sum(across.values())
        return total


_NAMES = ("all_to_all_single", "broadcast", "reduce", "batch_isend_irecv", _ALL_GATHER, _REDUCE_SCATTER)
_original = {name: getattr(dist, name) for name in _NAMES}


def _bytes_of(name: str, arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes that a rank sends and receives by a collective."""
    if name == "all_to_all_single":
        received, sent, _, sizes, group = arguments
        # What a rank sends to itself is copied.
        own = sizes[group.rank()] * sent.itemsize
        return sent.nbytes - own, received.nbytes - own
    if name == "batch_isend_irecv":
        sizes = [(operation.op is dist.isend, operation.tensor.nbytes) for operation in arguments[0]]
        return sum(n for sends, n in sizes if sends), sum(n for sends, n in sizes if not sends)
    if name in (_ALL_GATHER, _REDUCE_SCATTER):
        # As of a broadcast, or a reduce, of each rank.
        whole, part = sorted((x.nbytes for x in arguments[:2]), reverse=True)
        return (part, whole - part) if name == _ALL_GATHER else (whole - part, part)
    sends = (dist.get_rank() == arguments[1]) == (name == "broadcast")
    return (arguments[0].nbytes, 0) if sends else (0, arguments[0].nbytes)


def _links_of(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[int, int]:
    """Bytes that go from this rank to each other, or by a broadcast or reduce of this rank."""
    if name == "batch_isend_irecv":
        return {each.peer: each.tensor.nbytes for each in arguments[0] if each.op is dist.isend}
    group = keywords["group"] if "group" in keywords else arguments[-1]
    ranks = dist.get_process_group_ranks(group)
    if name == "all_to_all_single":
        sizes = [n * arguments[1].itemsize for n in arguments[3]]
    elif name in (_ALL_GATHER, _REDUCE_SCATTER):
        sizes = [min(x.nbytes for x in arguments[:2])] * len(ranks)
    else:
        sizes = [arguments[0].nbytes if arguments[1] == dist.get_rank() else 0] * len(ranks)
    return {rank: size for rank, size in zip(ranks, sizes, strict=True) if size and rank != dist.get_rank()}


def _filled_by(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of floats, with data, that a collective fills on this rank."""
    if name == "batch_isend_irecv":
        found = [operation.tensor for operation in arguments[0] if operation.op is dist.irecv]
    elif name == _ALL_GATHER:
        # A rank gives its own part where it belongs.
        parts = arguments[0].split(len(arguments[1]))
        found = [x for rank, x in enumerate(parts) if rank != dist.get_rank()]
    elif name == _REDUCE_SCATTER:
        found = [arguments[0]]
    else:
        fills = name == "all_to_all_single" or (name == "broadcast" and dist.get_rank() != arguments[1])
        found = [arguments[0]] if fills else []
    return [x for x in found if x.is_floating_point() and x.numel() and not isinstance(x, FakeTensor)]


@contextmanager
def counted_traffic() -> Iterator[Any]:
    """Count at the collectives themselves. Each thread finds its `Traffic` as ``.traffic``."""
    local = threading.local()

    def counting(name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("torch."):
                # FSDP gathers and scatters its weights by the same functions.
                return _original[name](*arguments, **keywords)
            traffic = local.__dict__.setdefault("traffic", Traffic())
            sent, received = _bytes_of(name, arguments)
            traffic.sent, traffic.received = traffic.sent + sent, traffic.received + received
            traffic.calls.append(name)
            traffic.links.append((name, _links_of(name, arguments, keywords)))
            traffic.poisoned += [bool(x.isnan().all()) for x in _filled_by(name, arguments)]
            return _original[name](*arguments, **keywords)

        return counted

    def compare(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        local.__dict__.setdefault("traffic", Traffic()).compared += tensor.nbytes
        return all_reduce(tensor, *arguments, **keywords)

    all_reduce = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        for name in _original:
            patch.setattr(dist, name, counting(name))
        patch.setattr(dist, "all_reduce", compare)
        yield local


@dataclass(frozen=True)
class Outcome:
    """How the processes of `run_processes` ended, by rank."""

    exit_codes: list[int | None]
    texts: list[str]
    """What each rank wrote to its standard error."""
    ends: list[float]
    """When each ended, by `time.monotonic`. Infinity for a rank that was killed here."""


def run_processes(
    n_ranks: int,
    function: Callable[..., None],
    *arguments: Any,
    timeout: float = 20.0,
    limit: float = 240.0,
    host: int = 0,
    spared: Collection[int] = (),
) -> Outcome:
    """Call ``function(rank, n_ranks, *arguments)`` in a gloo process per rank.

    Collectives time out after ``timeout`` seconds. Rank ``host`` has the store. After ``limit`` seconds, or when only
    ranks in ``spared`` are left, the rest is killed.
    """
    context = multiprocessing.get_context("forkserver")
    # Processes forked from one that has imported what their functions do start in milliseconds.
    context.set_forkserver_preload(
        [
            *("pytest", "torch._dynamo.testing", "torch._inductor.compile_fx", "torch.distributed.fsdp"),
            *("torch.testing._internal.common_distributed", "torch.testing._internal.distributed.multi_threaded_pg"),
            *("ringtile.distributed", "ringtile.modules"),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        options = function, arguments, n_ranks, Path(folder), timeout, host
        processes = [context.Process(target=_enter, args=(rank, *options)) for rank in range(n_ranks)]
        with _starting:
            for process in processes:
                process.start()
        running = {process.sentinel: rank for rank, process in enumerate(processes)}
        deadline, ends = time.monotonic() + limit, [float("inf")] * n_ranks
        try:
            while time.monotonic() < deadline and not set(spared).issuperset(running.values()):
                for sentinel in first_to_end(list(running), timeout=0.2):
                    ends[running.pop(sentinel)] = time.monotonic()
        finally:
            for process in processes:
                process.kill()
                process.join()
        written = [Path(folder, str(rank)) for rank in range(n_ranks)]
        texts = [path.read_text() if path.exists() else "never started" for path in written]
        return Outcome([process.exitcode for process in processes], texts, ends)


_starting = threading.Lock()
_joining: tuple[Any, ...] = ()
"""This process's store, rank, number of ranks and timeout."""


def _enter(
    rank: int,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    n_ranks: int,
    folder: Path,
    timeout: float,
    host: int,
) -> None:
    with (folder / str(rank)).open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    global _joining
    store = _shared_store(rank == host, n_ranks, folder / "port")
    # A busy machine takes longer to start a process than some groups give theirs.
    store.set(f"started/{rank}", "")
    store.wait([f"started/{each}" for each in range(n_ranks)])
    _joining = store, rank, n_ranks, timeout
    join_group()
    function(rank, n_ranks, *arguments)


def join_group(prefix: str = "") -> None:
    """Join the gloo group of this process's ranks, again over keys with another prefix."""
    store, rank, n_ranks, timeout = _joining
    limit = datetime.timedelta(seconds=timeout)
    store = dist.PrefixStore(prefix, store) if prefix else store
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=limit)


def _shared_store(is_host: bool, n_ranks: int, place: Path) -> dist.TCPStore:
    """Make the store, whose host tells its port in a file."""
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, n_ranks, True, wait_for_workers=False)
        new = place.with_suffix(".new")
        new.write_text(str(store.port))
        new.rename(place)
        return store
    while not place.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), n_ranks, False, wait_for_workers=False)
