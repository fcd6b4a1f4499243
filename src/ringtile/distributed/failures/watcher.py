"""A thread that keeps a rank's heartbeat in the store of its group, reads the others', and publishes who is lost."""

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch.distributed as dist

from ringtile.distributed.failures.errors import PlanMismatch, RankLost, first_line, named
from ringtile.distributed.process_groups import STORES, base_of, is_point_to_point, is_registered, store_of

T = TypeVar("T")

_STEP = timedelta(seconds=0.1)
"""Time between two looks at the watcher while a thread waits."""
_WATCHED = 8
"""A rank watches the heartbeats of the next 8 ranks of its group, so the store's load grows with the ranks only."""
_SHORT = 2.0
"""Seconds without a heartbeat that are enough once a connection has broken: then a rank has ended, and the question is
which. A busy machine stands still for a second."""
_OPEN, _BROKEN, _GONE = "-", "?", "+"
"""The verdict's key before there is a verdict, after a connection broke, and after the store's host has left."""

_printed: set[str] = set()
"""Lines on stderr: several groups can have the same verdict."""


class Member:
    """A rank's view of one process group: its ranks, the prefix of its keys, and the watcher."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.me = group.rank()
        # A group that is made again gets the name and the store of the one before, with its keys.
        store = store_of(group)
        self.prefix = f"ringtile/{store.add(f'ringtile/lives/{self.me}', 1)}"
        self.counts: dict[str, int] = {}
        self.watcher: Watcher | None = None
        self.host: int | None = None
        self.hosts = "server=TCPServer" in repr(base_of(store))
        if self.hosts:
            store.set(f"{self.prefix}/host", str(self.ranks[self.me]))

    def find_host(self, store: Any) -> None:
        """Look for the rank that hosts the store. After a handshake it is there, if a rank does."""
        if self.host is None and store.check([f"{self.prefix}/host"]):
            self.host = int(store.get(f"{self.prefix}/host"))


class Watcher(threading.Thread):
    """The thread behind `watch`. It alone uses its connection to the store; other threads post calls to it."""

    def __init__(
        self, group: dist.ProcessGroup, member: Member, interval: float, silence: float, exit_at_once: bool
    ) -> None:
        super().__init__(name="ringtile watcher", daemon=True)
        self.member, self.interval, self.silence, self.exit_at_once = member, interval, silence, exit_at_once
        self.verdict: str | None = None
        self.concluded = threading.Event()
        self._patience = max(1.0, 3 * interval)
        self._short = min(silence, max(_SHORT, 5 * interval))
        self.ticks = 0
        self.at_exit: Finalize | None = None
        self._group = weakref.ref(group)
        backends = dist.get_backend_config(group)
        self._gloo = "gloo" in backends and "nccl" not in backends
        # The server of a TCPStore belongs to this object of its host: keep it until the others know that it leaves.
        self._kept = store_of(group)
        shared = not isinstance(base_of(self._kept), STORES.TCPStore)
        self._store = self._kept if shared else self._kept.clone()
        self._state, self._waits, self._what = "on", 0, ""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._leaving, self._stuck = threading.Event(), False, False
        size = len(member.ranks)
        self._others = [rank for rank in range(size) if rank != member.me]
        self._next = [(member.me + step) % size for step in range(1, min(size, _WATCHED + 1))]
        self._there: set[int] = set()
        self._beats: dict[int, str] = {}
        self._quiet: dict[int, float] = {}
        self._before, self._doubt = time.monotonic(), False
        self._open, self._asked, self._answered = _OPEN, self._before, self._before

    @property
    def _limit(self) -> float:
        """Seconds without a heartbeat after which a rank is lost."""
        return self.silence if self._open == _OPEN else self._short

    def wait(self, work: dist.Work | None, what: str) -> None:
        """Wait for a collective. Raise RankLost if there is a verdict before its end."""
        # The others read how far this rank has come.
        self._waits, self._what = self._waits + 1, what
        self.look()
        if work is None:
            return
        if not self._gloo:
            # Not polled: the host runs ahead of NCCL, and to wait for the end of a work would stop it.
            try:
                work.wait()
            finally:
                self.look()
        elif is_point_to_point(work):
            aside(work.wait, self)
        else:
            _wait_in_steps(work, self)

    def publish(self, line: str) -> str:
        """Make a line the verdict unless there is one, and return the verdict."""
        return self.verdict or self._ask(lambda: self._publish(line, own=True)) or self.verdict or line

    def look(self) -> None:
        """Raise RankLost if there is a verdict."""
        if self.verdict:
            raise RankLost(self.verdict)

    def blame(self, error: BaseException) -> str | None:
        """Return the verdict about a broken connection, after the time that it takes to miss heartbeats."""
        if self.is_alive() and "timed out" in str(error).lower():
            # A dead rank would be known by now. A store can stall for seconds: it looks up the names of new clients.
            if time.monotonic() - self._before > max(2 * self.silence, 3.0):
                return self.stuck()
        elif self.is_alive():
            # All ranks look for the one that ended.
            self._ask(lambda: self._store.compare_set(self._key("verdict"), _OPEN, _BROKEN))
            self.concluded.wait(self._short + max(4 * self.interval, 1.0))
        return self.verdict or self._ask(self._accuse) or self.verdict

    def fail(self, error: BaseException) -> None:
        """Publish the exception of this rank, or the rank to blame for it."""
        if isinstance(error, RankLost):
            self.publish(str(error))
        elif not isinstance(error, PlanMismatch) and not (is_broken_connection(error) and self.blame(error)):
            message = f": {first_line(error)}" if str(error).strip() else ""
            self.publish(f"rank {self.member.ranks[self.member.me]} failed: {type(error).__name__}{message}")

    def leave(self) -> None:
        """Say goodbye to the other ranks and end the thread."""
        self._leaving = True
        self._wake.set()
        if self.is_alive() and not self._stuck and threading.current_thread() is not self:
            self.join(2 * self._patience)

    def stuck(self) -> str:
        """Conclude that the store does not answer, from another thread."""
        self._stuck = True
        self.verdict = self.verdict or self._host_is_lost()
        return self.verdict

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call in the watcher's thread; None if it has ended or the store does not answer."""
        result: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._calls.put(lambda: result.put(call()))
        self._wake.set()
        try:
            return result.get(timeout=self._patience) if self.is_alive() and not self._stuck else None
        except queue.Empty:
            return None

    def run(self) -> None:
        try:
            self._store.compare_set(self._key("verdict"), "", _OPEN)
            while self._state == "on":
                self._tick()
                if self._state == "on":
                    self._wake.wait(self.interval)
                    self._wake.clear()
                self._leaving |= not is_registered(self._group())
                if self._leaving and self._state == "on":
                    if self.member.hosts:
                        settle(self._store, self._key("verdict"), _GONE)
                    self._state = "bye"
                    self._beat()
            self._linger()
        except RuntimeError:
            # The class of all exceptions of a store. A host that leaves waits until the others know, so this one died.
            if not self._leaving:
                # The verdict stands, and there is nowhere left to say that it was read.
                with suppress(RuntimeError):
                    self._conclude(self._store_is_lost(), own=False)
        finally:
            self._kept = None
            if self.at_exit is not None:
                self.at_exit.cancel()

    def _tick(self) -> None:
        self._beat()
        while self._state == "on" and not self._calls.empty():
            self._calls.get()()
        if self._state != "on":
            return
        line, beats = self._read(self._next)
        if line not in (_OPEN, _BROKEN):
            self._obey(line, own=False)
            return
        self._open = line
        self.member.find_host(self._store)
        now = time.monotonic()
        # A process that stood still has missed the heartbeats of the others: only two of its intervals count.
        passed, self._before = min(now - self._before, 2 * self.interval), now
        for rank, beat in beats.items():
            still = beat == self._beats.get(rank) and _fields(beat)[0] == "on"
            self._quiet[rank] = self._quiet.get(rank, 0.0) + passed if still else 0.0
        self._beats = beats
        lost = [rank for rank in beats if self._quiet[rank] >= self._limit - self._doubt * self.interval]
        if lost and self._doubt:
            self._publish(self._silent(lost), own=False)
        # Ranks that died together fall silent up to an interval apart, so look twice.
        self._doubt = bool(lost)

    def _silent(self, lost: Iterable[int]) -> str:
        """Return the line about ranks whose heartbeats have stopped."""
        ranks = sorted(self.member.ranks[rank] for rank in lost)
        return f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} lost: no heartbeat for {self._limit:g} s"

    def _beat(self) -> None:
        self.ticks += 1
        self._asked = time.monotonic()
        self._store.set(self._key(self.member.me), f"{self._state}|{self.ticks}|{self._waits}|{self._what}")

    def _read(self, ranks: Iterable[int]) -> tuple[str, dict[int, str]]:
        """Return the verdict's key, and the heartbeats of those ranks that have begun."""
        self._asked = time.monotonic()
        self._there |= {rank for rank in ranks if rank not in self._there and self._store.check([self._key(rank)])}
        present = [rank for rank in ranks if rank in self._there]
        texts = self._store.multi_get([self._key("verdict"), *map(self._key, present)])
        self._answered = self._asked
        line, *beats = (text.decode() for text in texts)
        return line, dict(zip(present, beats, strict=True))

    def _publish(self, line: str, own: bool) -> str:
        return self._obey(settle(self._store, self._key("verdict"), line), own) or line

    def _accuse(self) -> str | None:
        """Blame the ranks that have left or, if there are none, those that have come to fewer waits than this one."""
        found, beats = self._read(self._others)
        if found not in (_OPEN, _BROKEN):
            return self._obey(found, own=True)
        states = {self.member.ranks[rank]: _fields(beat) for rank, beat in beats.items()}
        if left := [rank for rank, (state, _) in states.items() if state == "bye"]:
            return self._publish(f"{named(left)} left while other ranks waited for data", own=True)
        fewest = min((waits for _, waits in states.values()), default=self._waits)
        if fewest >= self._waits:
            return None
        late = named(rank for rank, (_, waits) in states.items() if waits == fewest)
        return self._publish(f"{late} did not come to {self._what!r} within the timeout", own=True)

    def _obey(self, found: str, own: bool) -> str | None:
        """End with the verdict in the store, and return it; None if the store's host has left."""
        if found == _GONE:
            self._state = "seen"
            self._beat()
            return None
        self._conclude(found, own)
        return found

    def _conclude(self, line: str, own: bool) -> None:
        self.verdict, self._state = line, "seen"
        self.concluded.set()
        if not own and line not in _printed:
            _printed.add(line)
            # One write: this is a thread beside the program, whose own lines must not come between.
            sys.stderr.write(f"ringtile: {line}\n")
            sys.stderr.flush()
        end = self.exit_at_once and not own
        try:
            self._beat()
            if end:
                self._linger()
        finally:
            if end:
                end_process()

    def _linger(self) -> None:
        """Keep the store's server up until the other ranks have read why it goes down."""
        end = time.monotonic() + self._patience
        while self.member.hosts and time.monotonic() < end:
            if all(_fields(beat)[0] != "on" for beat in self._read(self._others)[1].values()):
                return
            time.sleep(self.interval / 4)

    def _store_is_lost(self) -> str:
        """Return whom to blame for a broken connection to the store: its host can have ended because of another."""
        if self._asked - self._answered > self._limit:
            # This process stood still, and the others have gone.
            return self._silent([self.member.me])
        near = self._limit - 2 * self.interval
        overdue = [rank for rank, quiet in self._quiet.items() if quiet >= near and rank != self.member.host]
        return self._silent(overdue) if overdue else self._host_is_lost(", or it ended because another failed")

    def _host_is_lost(self, other: str = "") -> str:
        if self.member.host is None:
            return f"the host of the store is lost{other}: the store does not answer"
        return f"rank {self.member.host} is lost{other}: it hosts the store, which does not answer"

    def _key(self, name: str | int) -> str:
        return f"{self.member.prefix}/watch/{name}"


def settle(store: Any, key: str, line: str) -> str:
    """Write the verdict unless there is one, and return the verdict."""
    found = _BROKEN
    for before in (_OPEN, _BROKEN):
        if found == _BROKEN:
            found = store.compare_set(key, before, line).decode()
    return found


def _fields(beat: str) -> tuple[str, int]:
    """Return the state and the number of waits in a heartbeat."""
    state, _, waits, _ = beat.split("|", 3)
    return state, int(waits)


def _wait_in_steps(work: dist.Work, watcher: Watcher) -> None:
    while True:
        try:
            work.wait(_STEP)
            return
        except RuntimeError:
            # PyTorch raises the same class at the end of the step and for a failure.
            if work.is_completed():
                break
        watcher.look()
    work.wait()


def aside(call: Callable[[], T], watcher: Watcher, limit: float = float("inf")) -> T:
    """Return the result of a call that blocks, made in a thread of its own while this one looks at the watcher."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except RuntimeError as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    end = time.monotonic() + limit
    while True:
        try:
            return result.result(_STEP.total_seconds())
        except TimeoutError:
            watcher.look()
            if time.monotonic() > end:
                raise RankLost(watcher.stuck()) from None


def is_broken_connection(error: BaseException) -> bool:
    """Return True if another rank can be to blame."""
    if not isinstance(error, RuntimeError):
        # Programs have connections and pipes of their own.
        return False
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "Application timeout")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def end_process() -> None:
    """End at once with status 1: other threads can be stuck in collectives."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
