"""Name the rank that fails: a handshake before data moves, and a watcher of heartbeats while it moves."""

import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from ringtile.distributed.failures.errors import (
    PlanMismatch as PlanMismatch,
    RankLost as RankLost,
    difference,
    first_line,
    named,
)
from ringtile.distributed.failures.watcher import Member, Watcher, aside, end_process
from ringtile.distributed.process_groups import STORES, base_of, is_alone, known, of_group, store_of, timeout_of

_PATIENCE = 0.5
"""Seconds that the store's host waits, after a timeout, for the others to read why a handshake failed."""
_SILENCE = 60.0
"""Seconds without a heartbeat that lose a rank: libraries that load and large garbage collections stall for many."""
_DIFFERS = 1 << 32
"""What a rank whose facts are not those of the first to come adds to the count of ranks that came."""

_lock = threading.Lock()
_handshakes = 0


def handshakes() -> int:
    """Return the number of handshakes that this process took part in."""
    return _handshakes


def agree(group: dist.ProcessGroup | None, name: str, facts: Mapping[str, str | int | float]) -> None:
    """Compare facts with all ranks of a group through its store, in the same order per name, without moving a tensor.

    Raises PlanMismatch at every rank if they differ, and RankLost if a rank does not come or is known to be lost.
    """
    global _handshakes
    group = _group(group)
    if bad := {key: fact for key, fact in facts.items() if not isinstance(fact, str | int | float)}:
        raise ValueError(f"facts: expected strings and numbers, got {bad}")
    if is_alone(group):
        return
    member, store = of_group(group, Member, group), store_of(group)
    with _lock:
        _handshakes += 1
    seconds = timeout_of(group)
    count = member.counts[name] = member.counts.get(name, 0) + 1
    watcher, place, size = member.watcher, f"{member.prefix}/{name}", len(member.ranks)
    keys = [f"{place}/{count}/{rank}" for rank in range(size)]
    text, came = json.dumps(dict(facts)), f"{place}/{count}/came"
    digest = blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=16).hexdigest()

    def gather() -> tuple[list[int], list[bytes]]:
        """Return the ranks that do not come or, if facts differ, the facts of all."""
        store.set(keys[member.me], text)
        # If all agree, no rank reads the others' facts: with 1,024 ranks that is a gigabyte from one store.
        differs = store.compare_set(f"{place}/{count}/digest", "", digest).decode() != digest
        store.add(came, 1 + differs * _DIFFERS)
        _until(lambda: int(store.get(came)) % _DIFFERS == size, seconds, size)
        number = int(store.get(came))
        missing = [] if number % _DIFFERS == size else [rank for rank in range(size) if not store.check([keys[rank]])]
        if count > 1 and not missing:
            # All ranks are here, so all have read the facts of the handshake before.
            for ours in (member.me, "digest", "came") if member.me == 0 else (member.me,):
                store.delete_key(f"{place}/{count - 1}/{ours}")
        elif watcher:
            member.find_host(store)
        return missing, [] if missing or number == size else store.multi_get(keys)

    try:
        missing, texts = aside(gather, watcher, seconds + 2 * _PATIENCE) if watcher else gather()
        if missing or texts:
            # The ranks will fail. The host of the store must not go before the others have read why.
            store.set(f"{keys[member.me]}/read", "")
            if member.hosts and not (missing and watcher):
                here = [f"{key}/read" for rank, key in enumerate(keys) if rank not in missing]
                _until(lambda: store.check(here), _PATIENCE if missing else seconds, size)
    except RankLost:
        raise
    except RuntimeError as error:
        raise _lost(watcher, name, error) from error
    if missing:
        line = f"{named(member.ranks[rank] for rank in missing)} did not come to {name!r} within {seconds:g} s"
        raise RankLost(watcher.publish(line) if watcher else line)
    if texts and (differing := difference(dict(zip(member.ranks, map(json.loads, texts), strict=True)))):
        raise PlanMismatch(f"{name}: {differing}")


def watch(
    group: dist.ProcessGroup | None = None,
    *,
    interval: float = 0.2,
    silence: float | None = None,
    exit_at_once: bool = False,
) -> None:
    """Watch the ranks of a group from a thread that keeps a heartbeat in the group's store.

    Call it on every rank. A failure is a heartbeat that stops, the death of the store's host or an uncaught exception.
    The first rank that notices one publishes one line, and every other rank prints it to stderr. `wait` then raises
    `RankLost` with this line, and `verdict` returns it. A rank that ends without an error says goodbye and is not lost.

    A rank can compute for minutes: its thread keeps the heartbeat. But a call in C++ that holds Python's global lock
    for longer than ``silence`` looks like a dead rank, as does a machine that stops for so long. Set it longer than
    your longest such call. If a connection breaks, a rank has ended, and one without a heartbeat for 2 seconds is lost.

    A second call for the same group changes nothing. A group of one rank, of threads or of PyTorch's "fake" backend
    needs no watcher.

    Args:
        group: The process group. Default: the default group.
        interval: Seconds between heartbeats.
        silence: Seconds without a heartbeat until a rank is lost, at least 2 intervals. Default: 60, or a quarter of
            the group's timeout if that is less.
        exit_at_once: End the process with status 1 after printing the line. Otherwise `wait` raises, and all other
            calls of `torch.distributed` end by the group's timeout.

    Raises ValueError if a number is out of range.
    """
    if not 0 < interval or (silence is not None and not 2 * interval <= silence):
        raise ValueError(f"silence: expected at least 2 intervals above 0, got {silence=}, {interval=}")
    group = _group(group)
    if is_alone(group) or isinstance(base_of(store_of(group)), STORES.HashStore):
        return
    member = of_group(group, Member, group)
    if silence is None:
        silence = max(2 * interval, min(_SILENCE, timeout_of(group) / 4))
    with _lock:
        if member.watcher is not None:
            return
        member.watcher = watcher = Watcher(group, member, interval, silence, exit_at_once)
    # The group can go first, and with it the last reference to the store: the thread says goodbye before.
    weakref.finalize(group, watcher.leave).atexit = False
    watcher.at_exit = Finalize(None, partial(_leave_at_exit, watcher), exitpriority=100)
    if not getattr(sys.excepthook, "publishes_failures", False):
        sys.excepthook = _publishing(sys.excepthook)
    watcher.start()


def verdict(group: dist.ProcessGroup | None = None) -> str | None:
    """Return the watcher's line about the rank that failed, or None if no failure is known."""
    watcher = _watcher(_group(group))
    return None if watcher is None else watcher.verdict


def wait(work: dist.Work | None, group: dist.ProcessGroup | None, what: str) -> None:
    """Wait for a collective, and raise RankLost within about a second if the watcher knows that a rank is lost.

    On gloo it waits in steps. Sends and receives wait in a thread of their own, since a timeout would close their
    connection. NCCL's ``wait`` does not block the host: a rank that waits for a device learns of a verdict in its next
    call, or `watch` with ``exit_at_once`` ends it. The watcher counts the waits, None included, to find who is late.
    """
    group = _group(group)
    watcher = _watcher(group)
    try:
        if watcher is not None:
            watcher.wait(work, what)
        elif work is not None:
            work.wait()
    except RankLost as error:
        error.add_note(f"while waiting for {what}")
        raise
    except RuntimeError as error:
        if "gloo" not in dist.get_backend_config(group):
            raise
        lost = _lost(watcher, what, error)
        lost.add_note(f"while waiting for {what}")
        raise lost from error


def _until(done: Callable[[], bool], seconds: float, n_ranks: int) -> None:
    """Wait until something is done, or for some seconds."""
    end, pause = time.monotonic() + seconds, 0.0
    # Not Store.wait: it logs each timeout, and Ctrl-C would wait for its end.
    while not done() and time.monotonic() <= end:
        # All ranks ask one store, so their pauses grow with their number.
        pause = min(pause + 0.0005, 0.02 + 2e-5 * n_ranks)
        time.sleep(pause)


def _lost(watcher: Watcher | None, what: str, error: RuntimeError) -> RankLost:
    line = watcher.blame(error) if watcher else None
    if line is None and watcher:
        # The rank at the other end can have left because of one that only another group watches.
        line = next((other.verdict for other in _watchers() if other.verdict), None)
    if line is None:
        hint = "" if watcher else "; watch() on every rank tells which"
        line = f"{what}: a rank is lost{hint}: {first_line(error)}"
    return RankLost(line)


def _publishing(previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return an exception hook that calls another and then tells the other ranks."""

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        watchers = _watchers()
        for watcher in watchers:
            watcher.fail(error)
            watcher.leave()
        if any(watcher.exit_at_once for watcher in watchers):
            end_process()

    hook.publishes_failures = True  # type: ignore[attr-defined]
    return hook


def _watchers() -> list[Watcher]:
    return [member.watcher for member in known(Member) if member.watcher]


def _leave_at_exit(watcher: Watcher) -> None:
    # multiprocessing calls no exception hook for its processes, but runs this while it handles the exception.
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = (error.__context__ or error) if error.code else None
    if error is not None:
        watcher.fail(error)
    watcher.leave()


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("group: expected a process group, got None; call torch.distributed.init_process_group first")
    return found


def _watcher(group: dist.ProcessGroup) -> Watcher | None:
    return next((member.watcher for member in known(Member, group)), None)
