"""Name the rank that fails: a handshake before data moves, and a watcher of heartbeats while it moves."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_STORES: Any = dist
"""Where PyTorch documents its stores; its annotations leave them out."""

_STEP = timedelta(seconds=0.1)
"""Time between two looks at the watcher while a thread waits."""
_PATIENCE = 0.5
"""Seconds that the store's host waits, after a timeout, for the others to read why a handshake failed."""
_WATCHED = 8
"""A rank watches the heartbeats of the next 8 ranks of its group, so the store's load grows with the ranks only."""
_OPEN, _GONE = "-", "+"
"""The verdict's key before there is a verdict, and after the store's host has left."""
_POINT_TO_POINT = (12, 13, 14)
"""`OpType` of send, receive and receive from any rank."""


class PlanMismatch(RuntimeError):
    """Ranks came to a handshake with different facts. The message is one line, the same at every rank."""


class RankLost(RuntimeError):
    """A rank failed, died or did not come. The message is one line that names it."""


class _Member:
    """A rank's view of one process group: its ranks, the prefix of its keys, and the watcher."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.me = group.rank()
        # A group that is made again gets the name and the store of the one before, with its keys.
        store = _store_of(group)
        self.prefix = f"ringtile/{store.add(f'ringtile/lives/{self.me}', 1)}"
        self.counts: dict[str, int] = {}
        self.watcher: _Watcher | None = None
        self.host: int | None = None
        self.hosts = "server=TCPServer" in repr(_base(store))
        if self.hosts:
            store.set(f"{self.prefix}/host", str(self.ranks[self.me]))

    def find_host(self, store: Any) -> None:
        """Look for the rank that hosts the store. After a handshake it is there, if a rank does."""
        if self.host is None and store.check([f"{self.prefix}/host"]):
            self.host = int(store.get(f"{self.prefix}/host"))


_members: weakref.WeakKeyDictionary[dist.ProcessGroup, _Member] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_handshakes = 0
_printed: set[str] = set()
"""Lines on stderr: several groups can have the same verdict."""


def handshakes() -> int:
    """Return the number of handshakes that this process took part in.

    >>> before = handshakes()
    >>> handshakes() - before
    0
    """
    return _handshakes


def agree(
    group: dist.ProcessGroup | None,
    name: str,
    facts: Mapping[str, str | int | float],
    timeout: float | None = None,
) -> None:
    """Compare facts with all ranks of a group through its store, without moving a tensor.

    Every rank of the group makes the same calls, in the same order per name. A single rank and PyTorch's "fake" backend
    return at once.

    Args:
        group: The process group. None: the default group.
        name: Name of the handshake, for the message.
        facts: The fields to compare, strings and numbers.
        timeout: Seconds to wait for the other ranks. Default: the group's timeout.

    Raises:
        PlanMismatch: If facts differ, at every rank and with the same line: the ranks, the field and its values.
        RankLost: If a rank does not come within the timeout, or the watcher knows that one is lost.
        ValueError: If a fact is neither a string nor a number.
    """
    global _handshakes
    group = _group(group)
    if bad := {key: fact for key, fact in facts.items() if not isinstance(fact, str | int | float)}:
        raise ValueError(f"facts: expected strings and numbers, got {bad}")
    if _is_alone(group):
        return
    member, store = _member(group), _store_of(group)
    with _lock:
        _handshakes += 1
    seconds = _timeout_of(group) if timeout is None else timeout
    count = member.counts[name] = member.counts.get(name, 0) + 1
    watcher, place = member.watcher, f"{member.prefix}/{name}"
    keys = [f"{place}/{count}/{rank}" for rank in range(len(member.ranks))]

    def gather() -> tuple[list[int], list[bytes]]:
        store.set(keys[member.me], json.dumps(dict(facts)))
        missing = _missing(store, keys, seconds)
        texts: list[bytes] = [] if missing else store.multi_get(keys)
        if count > 1 and texts:
            # All ranks are here, so all have read the facts of the handshake before.
            store.delete_key(f"{place}/{count - 1}/{member.me}")
        elif watcher:
            member.find_host(store)
        return missing, texts

    try:
        missing, texts = _aside(gather, watcher, seconds + 2 * _PATIENCE) if watcher else gather()
        if missing or any(text != texts[0] for text in texts):
            # The ranks will fail. The host of the store must not go before the others have read why.
            store.set(f"{keys[member.me]}/read", "")
            if member.hosts and not (missing and watcher):
                here = [f"{key}/read" for rank, key in enumerate(keys) if rank not in missing]
                _missing(store, here, _PATIENCE if missing else seconds)
    except RankLost:
        raise
    except RuntimeError as error:
        raise _lost(watcher, name, error) from error
    if missing:
        line = f"{_named(member.ranks[rank] for rank in missing)} did not come to {name!r} within {seconds:g} s"
        raise RankLost(watcher.publish(line) if watcher else line)
    if all(text == texts[0] for text in texts):
        return
    if difference := _difference({rank: json.loads(text) for rank, text in zip(member.ranks, texts, strict=True)}):
        raise PlanMismatch(f"{name}: {difference}")


def watch(
    group: dist.ProcessGroup | None = None,
    *,
    interval: float = 0.2,
    silence: float = 1.0,
    exit_at_once: bool = False,
) -> None:
    """Watch the ranks of a group from a thread that keeps a heartbeat in the group's store.

    Call it on every rank. A failure is a heartbeat that stops, the death of the store's host or an uncaught exception.
    The first rank that notices one publishes one line, and every other rank prints it to stderr. `wait` then raises
    `RankLost` with this line, and `verdict` returns it. A rank that ends without an error says goodbye and is not lost.

    A rank can compute for minutes: its thread keeps the heartbeat. But a call in C++ that holds Python's global lock
    for longer than ``silence`` looks like a dead rank, as does a machine that stops for so long. Set it longer than
    your longest such call.

    A second call for the same group changes nothing. A group of one rank, of threads or of PyTorch's "fake" backend
    needs no watcher.

    Args:
        group: The process group. Default: the default group.
        interval: Seconds between heartbeats.
        silence: Seconds without a heartbeat until a rank is lost, at least 2 intervals.
        exit_at_once: End the process with status 1 after printing the line. Otherwise `wait` raises, and all other
            calls of `torch.distributed` end by the group's timeout.

    Raises:
        ValueError: If a number is out of range.
    """
    if not 0 < interval or not 2 * interval <= silence:
        raise ValueError(f"silence: expected at least 2 intervals above 0, got {silence=}, {interval=}")
    group = _group(group)
    if _is_alone(group) or isinstance(_base(_store_of(group)), _STORES.HashStore):
        return
    member = _member(group)
    with _lock:
        if member.watcher is not None:
            return
        member.watcher = watcher = _Watcher(group, member, interval, silence, exit_at_once)
    # The group can go first, and with it the last reference to the store: the thread says goodbye before.
    weakref.finalize(group, watcher.leave).atexit = False
    watcher.at_exit = Finalize(None, partial(_leave_at_exit, watcher), exitpriority=100)
    if not getattr(sys.excepthook, "publishes_failures", False):
        sys.excepthook = _publishing(sys.excepthook)
    watcher.start()


def verdict(group: dist.ProcessGroup | None = None) -> str | None:
    """Return the watcher's line about the rank that failed, or None if no failure is known.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ...     print(verdict())
    ...     dist.destroy_process_group()
    None
    """
    watcher = _watcher(_group(group))
    return None if watcher is None else watcher.verdict


def publish_failure(group: dist.ProcessGroup | None, error: BaseException) -> None:
    """Tell the other ranks of a group that this rank fails with an exception.

    `watch` calls it for uncaught exceptions. Call it yourself if you catch an exception and give up. If a broken
    connection caused the exception, the rank at the other end is to blame, and the call waits for the watcher to name
    it.
    """
    group = _group(group)
    watcher = _watcher(group)
    if watcher is not None:
        watcher.fail(error)
    elif not _is_alone(group) and not isinstance(error, PlanMismatch):
        member, store = _member(group), _store_of(group)
        key = f"{member.prefix}/watch/verdict"
        store.compare_set(key, "", _OPEN)
        store.compare_set(key, _OPEN, _failure(member, error))


def wait(work: dist.Work, group: dist.ProcessGroup | None, what: str) -> None:
    """Wait for a collective, and raise within about a second if the watcher knows that a rank is lost.

    On gloo it waits in steps and looks at the watcher in between. Sends and receives wait in a thread of their own,
    since a timeout would close their connection. NCCL's ``wait`` does not block the host and is called unchanged. If a
    group has several backends, ``wait`` blocks until PyTorch returns or raises. All ranks make the same waits in the
    same order: the watcher counts them to find the rank that is late.

    Args:
        work: Result of a call with ``async_op=True``.
        group: Its process group. None: the default group.
        what: Name of the data, for the message: "keys and values, forward".

    Raises:
        RankLost: If the work fails or a rank is lost, from PyTorch's exception.
    """
    group = _group(group)
    watcher = _watcher(group)
    try:
        if watcher is None:
            work.wait()
        else:
            watcher.wait(work, what)
    except RuntimeError as error:
        if not isinstance(error, RankLost):
            if "gloo" not in dist.get_backend_config(group):
                raise
            named = _lost(watcher, what, error)
            named.add_note(f"while waiting for {what}")
            raise named from error
        error.add_note(f"while waiting for {what}")
        raise


def first_nonfinite(x: Tensor, tile: int) -> tuple[int, int, int] | None:
    """Return (batch element, head, tile) of the first tile of ``x`` ``[B, H, N, D]`` with a NaN or infinity, or None.

    "First" is the lowest tile, then batch element, then head. ``tile`` is the number of tokens per tile. The call reads
    ``x`` once, allocates nothing of its size, and synchronizes with a GPU.

    >>> x = torch.zeros(2, 4, 300, 16)
    >>> x[1, 2, 150, 3] = torch.nan
    >>> first_nonfinite(x, 64)
    (1, 2, 2)
    """
    if x.dim() != 4 or tile < 1:
        raise ValueError(f"x, tile: expected [B, H, N, D] and a positive number of tokens, got {x.shape=}, {tile=}")
    if not x.numel():
        return None
    low, high = x.detach().aminmax()
    if bool(low.isfinite() & high.isfinite()):
        return None
    low, high = x.detach().aminmax(dim=-1)
    bad = ~(low.isfinite() & high.isfinite())
    first = int(bad.any(0).any(0).nonzero()[0, 0]) // tile
    element, head = bad[:, :, first * tile : (first + 1) * tile].any(-1).nonzero()[0].tolist()
    return element, head, first


class _Watcher(threading.Thread):
    """The thread behind `watch`. It alone uses its connection to the store; other threads post calls to it."""

    def __init__(
        self, group: dist.ProcessGroup, member: _Member, interval: float, silence: float, exit_at_once: bool
    ) -> None:
        super().__init__(name="ringtile watcher", daemon=True)
        self.member, self.interval, self.silence, self.exit_at_once = member, interval, silence, exit_at_once
        self.verdict: str | None = None
        self.concluded = threading.Event()
        self._patience = max(1.0, 3 * interval)
        self.ticks = 0
        self.at_exit: Finalize | None = None
        self._group = weakref.ref(group)
        backends = dist.get_backend_config(group)
        self._gloo = "gloo" in backends and "nccl" not in backends
        # The server of a TCPStore belongs to this object of its host: keep it until the others know that it leaves.
        self._kept = _store_of(group)
        shared = not isinstance(_base(self._kept), _STORES.TCPStore)
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

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a collective. Raise RankLost if there is a verdict before its end."""
        # The others read how far this rank has come.
        self._waits, self._what = self._waits + 1, what
        if not self._gloo:
            work.wait()
        elif _operation(work) in _POINT_TO_POINT:
            _aside(work.wait, self)
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
        """Return the verdict about a broken connection, after the time that it takes to miss a heartbeat."""
        if self.is_alive() and "timed out" in str(error).lower():
            # A dead rank would be known by now. A store can stall for seconds: it looks up the names of new clients.
            if time.monotonic() - self._before > max(2 * self.silence, 3.0):
                return self.stuck()
        elif self.is_alive():
            self.concluded.wait(self.silence + 4 * self.interval)
        return self.verdict or self._ask(self._accuse) or self.verdict

    def fail(self, error: BaseException) -> None:
        """Publish the exception of this rank, or the rank to blame for it."""
        if isinstance(error, RankLost):
            self.publish(str(error))
        elif not isinstance(error, PlanMismatch) and not (_is_broken_connection(error) and self.blame(error)):
            self.publish(_failure(self.member, error))

    def leave(self) -> None:
        """Say goodbye to the other ranks and end the thread."""
        self._leaving = True
        self._wake.set()
        if self.is_alive() and not self._stuck and threading.current_thread() is not self:
            self.join(2 * self._patience)

    def stuck(self) -> str:
        """Conclude that the store does not answer, from another thread."""
        self._stuck = True
        self.verdict = self.verdict or self._store_is_lost()
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
                self._leaving |= not _is_registered(self._group())
                if self._leaving and self._state == "on":
                    self._goodbye()
            self._linger()
        except RuntimeError:
            # The class of all exceptions of a store. A host that leaves waits until the others know, so this one died.
            if not self._leaving:
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
        if line != _OPEN:
            self._obey(line, own=False)
            return
        self.member.find_host(self._store)
        now = time.monotonic()
        # A process that stood still has missed the heartbeats of the others: only two of its intervals count.
        passed, self._before = min(now - self._before, 2 * self.interval), now
        for rank, beat in beats.items():
            still = beat == self._beats.get(rank) and _fields(beat)[0] == "on"
            self._quiet[rank] = self._quiet.get(rank, 0.0) + passed if still else 0.0
        self._beats = beats
        lost = [rank for rank in beats if self._quiet[rank] >= self.silence - self._doubt * self.interval]
        if lost and self._doubt:
            names = _named(self.member.ranks[rank] for rank in sorted(lost))
            verb = "is" if len(lost) == 1 else "are"
            self._publish(f"{names} {verb} lost: no heartbeat for {self.silence:g} s", own=False)
        # Ranks that died together fall silent up to an interval apart, so look twice.
        self._doubt = bool(lost)

    def _beat(self) -> None:
        self.ticks += 1
        self._store.set(self._key(self.member.me), f"{self._state}|{self.ticks}|{self._waits}|{self._what}")

    def _read(self, ranks: Iterable[int]) -> tuple[str, dict[int, str]]:
        """Return the verdict's key, and the heartbeats of those ranks that have begun."""
        self._there |= {rank for rank in ranks if rank not in self._there and self._store.check([self._key(rank)])}
        present = [rank for rank in ranks if rank in self._there]
        texts = self._store.multi_get([self._key("verdict"), *map(self._key, present)])
        line, *beats = (text.decode() for text in texts)
        return line, dict(zip(present, beats, strict=True))

    def _publish(self, line: str, own: bool) -> str:
        found: str = self._store.compare_set(self._key("verdict"), _OPEN, line).decode()
        return self._obey(found, own) or line

    def _accuse(self) -> str | None:
        """Blame the ranks that have left or, if there are none, those that have come to fewer waits than this one."""
        found, beats = self._read(self._others)
        if found != _OPEN:
            return self._obey(found, own=True)
        states = {self.member.ranks[rank]: _fields(beat) for rank, beat in beats.items()}
        if left := [rank for rank, (state, _) in states.items() if state == "bye"]:
            return self._publish(f"{_named(left)} left while other ranks waited for data", own=True)
        fewest = min((waits for _, waits in states.values()), default=self._waits)
        if fewest >= self._waits:
            return None
        late = _named(rank for rank, (_, waits) in states.items() if waits == fewest)
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
            print(f"ringtile: {line}", file=sys.stderr, flush=True)
        end = self.exit_at_once and not own
        try:
            self._beat()
            if end:
                self._linger()
        finally:
            if end:
                _end_process()

    def _goodbye(self) -> None:
        if self.member.hosts:
            self._store.compare_set(self._key("verdict"), _OPEN, _GONE)
        self._state = "bye"
        self._beat()

    def _linger(self) -> None:
        """Keep the store's server up until the other ranks have read why it goes down."""
        end = time.monotonic() + self._patience
        while self.member.hosts and time.monotonic() < end:
            if all(_fields(beat)[0] != "on" for beat in self._read(self._others)[1].values()):
                return
            time.sleep(self.interval / 4)

    def _store_is_lost(self) -> str:
        if self.member.host is None:
            return "the host of the store is lost: the store does not answer"
        return f"rank {self.member.host} is lost: it hosts the store, which does not answer"

    def _key(self, name: str | int) -> str:
        return f"{self.member.prefix}/watch/{name}"


def _fields(beat: str) -> tuple[str, int]:
    """Return the state and the number of waits in a heartbeat."""
    state, _, waits, _ = beat.split("|", 3)
    return state, int(waits)


def _wait_in_steps(work: dist.Work, watcher: _Watcher) -> None:
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


def _aside(call: Callable[[], T], watcher: _Watcher, limit: float = float("inf")) -> T:
    """Return the result of a call that blocks, made in a thread of its own while this one looks at the watcher."""
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, RuntimeError]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except RuntimeError as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    end = time.monotonic() + limit
    while True:
        try:
            result, error = results.get(timeout=_STEP.total_seconds())
        except queue.Empty:
            watcher.look()
            if time.monotonic() > end:
                raise RankLost(watcher.stuck()) from None
            continue
        if error is not None:
            raise error
        return cast(T, result)


def _missing(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """Return the places of the keys that do not come within some seconds."""
    end, pause = time.monotonic() + seconds, 0.0
    # Not Store.wait: it logs each timeout, and Ctrl-C would wait for its end.
    while not store.check(keys):
        if time.monotonic() > end:
            return [place for place, key in enumerate(keys) if not store.check([key])]
        # All ranks read all keys, so their pauses grow with their number.
        pause = min(pause + 0.0005, 0.02 + 1e-6 * len(keys) ** 2)
        time.sleep(pause)
    return []


def _lost(watcher: _Watcher | None, what: str, error: RuntimeError) -> RankLost:
    line = watcher.blame(error) if watcher else None
    if line is None:
        hint = "" if watcher else "; watch() on every rank tells which"
        line = f"{what}: a rank is lost{hint}: {_first_line(error)}"
    return RankLost(line)


def _difference(given: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return one line on the fields that differ between ranks; None if none does."""
    lines = []
    for field in dict.fromkeys(field for facts in given.values() for field in facts):
        sides: dict[str | None, list[int]] = {}
        for rank, facts in given.items():
            sides.setdefault(repr(facts[field]) if field in facts else None, []).append(rank)
        if len(sides) > 1:
            lines.append(_sides(field, sides))
    more = f"; {len(lines) - 3} more fields differ" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more if lines else None


def _sides(field: str, sides: Mapping[str | None, list[int]]) -> str:
    """Return "rank 1 has n=2, the others n=1". A side without the field is None."""
    values = [value for value in sides if value is not None]
    texts = dict(zip(values, _shortened(values), strict=True))
    label = {side: f"no {field}" if side is None else f"{field}={texts[side]}" for side in sides}
    # sorted keeps sides of one size in the order of their ranks.
    ordered = sorted(sides, key=lambda side: -len(sides[side]))
    largest = ordered[0]
    last = []
    if len(sides[largest]) > len(sides[ordered[1]]):
        ordered.remove(largest)
        last = [f"the others {label[largest]}"]
    if len(ordered) > 3:
        last.insert(0, f"{len(ordered) - 3} more values at other ranks")
    verbs = {side: "has" if len(sides[side]) == 1 else "have" for side in ordered}
    return ", ".join([f"{_named(sides[side])} {verbs[side]} {label[side]}" for side in ordered[:3]] + last)


def _shortened(texts: Sequence[str]) -> list[str]:
    """Cut long texts to the part at which they begin to differ."""
    if all(len(text) <= 80 for text in texts):
        return list(texts)
    differ = (place for place, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    begin = max(0, next(differ, 0) - 20)
    dots = "..." if begin else ""
    return [dots + text[begin : begin + 60] + ("..." if len(text) > begin + 60 else "") for text in texts]


def _named(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 1, 2" or, for many, the first eight and their number."""
    found = list(ranks)
    names = ", ".join(map(str, found[:8])) + (f", ... ({len(found)} in all)" if len(found) > 8 else "")
    return f"rank{'s' if len(found) > 1 else ''} {names}"


def _failure(member: _Member, error: BaseException) -> str:
    message = f": {_first_line(error)}" if str(error).strip() else ""
    return f"rank {member.ranks[member.me]} failed: {type(error).__name__}{message}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _is_broken_connection(error: BaseException) -> bool:
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "Application timeout")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def _publishing(previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return an exception hook that calls another and then tells the other ranks."""

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        watchers = [member.watcher for member in list(_members.values()) if member.watcher]
        for watcher in watchers:
            watcher.fail(error)
            watcher.leave()
        if any(watcher.exit_at_once for watcher in watchers):
            _end_process()

    hook.publishes_failures = True  # type: ignore[attr-defined]
    return hook


def _leave_at_exit(watcher: _Watcher) -> None:
    # multiprocessing calls no exception hook for its processes, but runs this while it handles the exception.
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = (error.__context__ or error) if error.code else None
    if error is not None:
        watcher.fail(error)
    watcher.leave()


def _end_process() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("group: expected a process group, got None; call torch.distributed.init_process_group first")
    return found


def _member(group: dist.ProcessGroup) -> _Member:
    with _lock:
        found = _members.get(group)
        if found is None:
            found = _members[group] = _Member(group)
    return found


def _watcher(group: dist.ProcessGroup) -> _Watcher | None:
    with _lock:
        member = _members.get(group)
    return None if member is None else member.watcher


def _is_alone(group: dist.ProcessGroup) -> bool:
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


def _is_registered(group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return False
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def _operation(work: Any) -> int:
    kind: int = work._get_op_type()
    return kind


def _store_of(group: dist.ProcessGroup) -> Any:
    # Private, but the same for every backend and for threads; ProcessGroup.get_group_store is neither.
    return dist.distributed_c10d._get_process_group_store(group)


def _timeout_of(group: dist.ProcessGroup) -> float:
    try:
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        limit = _store_of(group).timeout
    return limit.total_seconds()


def _base(store: Any) -> Any:
    while isinstance(store, _STORES.PrefixStore):
        store = store.underlying_store
    return store
