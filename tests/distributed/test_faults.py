"""Failures of ranks: real gloo processes that stall, die or disagree, and the one line that names them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import Outcome, join_group, on_ranks, run_processes

from ringtile.distributed import process_groups
from ringtile.distributed.failures import faults, watcher
from ringtile.distributed.failures.errors import difference
from ringtile.distributed.failures.faults import (
    PlanMismatch,
    RankLost,
    agree,
    handshakes,
    verdict,
    wait,
    watch,
)
from ringtile.distributed.failures.watcher import Watcher
from ringtile.distributed.layout import first_nonfinite

# One worker runs all cases at once.
pytestmark = pytest.mark.xdist_group("faults")

TIMEOUT = 6.0
HARD_LIMIT = 120.0
WHAT = "keys and values, forward"
FACTS: dict[str, str | int | float] = {"n": 131072, "heads": 8, "pattern": "causal & window(4096)", "layout": "zigzag"}


# What the ranks do. Each function runs in a process per rank.


def payload(rank: int, size: int, kill: int | None = None) -> None:
    """A planned all-to-all, received into NaN, as the exchange makes it.

    A rank to kill has handed over its data, more than sockets hold, before the others begin to receive.
    """
    sent = torch.full((size, 1 << 16 if kill is None else 6 << 20), float(rank))
    received = torch.full_like(sent, torch.nan)
    if kill is not None and rank != kill:
        time.sleep(0.2)
    work = dist.all_to_all_single(received, sent, async_op=True)
    if rank == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(work, None, WHAT)
    assert torch.equal(received[:, 0], torch.arange(size, dtype=torch.float))


def fail(rank: int, size: int) -> None:
    raise ValueError("no tokens\nin this shard")


def handshake(rank: int, size: int) -> None:
    agree(None, "plan", FACTS)


def watch_another_group(rank: int, size: int) -> None:
    everyone = dist.new_group()
    watch(everyone)
    agree(everyone, "begin", {})


Act = Callable[[int, int], Any]


def disagree(rank: int, size: int) -> None:
    """Every kind of difference, in groups of 2, 3 and 4 ranks. Each rank prints the line that it got."""
    go()
    pair, three = dist.new_group([1, 3]), dist.new_group([0, 2, 3])

    def try_to_agree(group: dist.ProcessGroup | None, name: str, facts: dict[str, str | int | float]) -> None:
        try:
            agree(group, name, facts)
        except PlanMismatch as mismatch:
            print(f"line: {mismatch}", file=sys.stderr, flush=True)

    odd = rank == 3
    if rank in (1, 3):
        try_to_agree(pair, "pair", FACTS | {"n": 131200 if odd else 131072})
    if rank in (0, 2, 3):
        try_to_agree(three, "three", FACTS | {"layout": "contiguous" if odd else "zigzag"})
    try_to_agree(None, "four", FACTS | {"pattern": "causal & window(2048)" if odd else "causal & window(4096)"})
    try_to_agree(None, "tie", FACTS | {"n": rank % 2})
    try_to_agree(None, "extra", FACTS | ({"seed": 7} if odd else {}))
    agree(None, "four", FACTS)
    if rank == 2:
        # A slow reader: rank 0, which hosts the store, fails first.
        at_once = faults._until
        faults._until = lambda *arguments: (at_once(*arguments), time.sleep(0.7))[0]
    agree(None, "four", FACTS | {"heads": 4 if odd else 8})


def peace(rank: int, size: int) -> None:
    """All that is no failure: long computations, several lives of a group, subgroups, and ranks that end early."""
    before = handshakes()
    for count in range(3):
        agree(None, "plan", FACTS | {"count": count})
    assert handshakes() - before == 3
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    kept = [store.check([f"ringtile/1/plan/{count}/{rank}"]) for count in (1, 2, 3)]
    assert kept == [False, False, True]
    dist.barrier()
    kept = [store.check([f"ringtile/1/plan/{count}/{name}"]) for name in ("digest", "came") for count in (1, 2, 3)]
    assert kept == [False, False, True] * 2
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    watch(half[rank // 2])
    agree(half[rank // 2], "plan", FACTS | {"half": rank // 2})
    watch()
    x = torch.ones(1 << 16)
    if rank % 2 == 0:
        time.sleep(0.3)
    wait(dist.irecv(x, rank - 1) if rank % 2 else dist.isend(x, rank + 1), None, "a hop")
    threads = [thread for thread in threading.enumerate() if thread.name == "ringtile watcher"]
    assert len(threads) == 2
    time.sleep(2.5)
    payload(rank, size)
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(thread.is_alive() for thread in threads)
    join_group("again")
    watch()
    agree(None, "plan", FACTS | {"life": 2})
    payload(rank, size)
    assert verdict() is None
    go()
    # Rank 0 hosts the store and ends first.
    time.sleep(rank)


def threads_agree(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

    dist.destroy_process_group()
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, lines, n = dist.HashStore(), [], 64

    def run(number: int) -> None:
        # The second group has the store and the name of the first, whose facts must not be found.
        for life in range(2):
            dist.init_process_group("threaded", store=store, rank=number, world_size=n)
            watch()
            agree(None, "plan", FACTS | {"life": life})
            try:
                agree(None, "plan", FACTS | {"n": 131072 + (number == 40)})
            except PlanMismatch as mismatch:
                lines.append(str(mismatch))
            dist.destroy_process_group()

    before = handshakes()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handshakes() - before == 4 * n
    assert lines == ["plan: rank 40 has n=131073, the others n=131072"] * 2 * n


def fake_agrees(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    before = handshakes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    watch()
    agree(None, "plan", FACTS)
    assert handshakes() == before


# How they are run.


class Case(NamedTuple):
    how: Act
    """What rank 1 does."""
    then: Act | None = None
    """What the others do at the same time. None: the same."""
    before: tuple[Act, ...] = ()
    line: str = ""
    """What every other rank raises."""
    ranks: int = 3
    host: int = 0
    watched: bool = True
    exit_at_once: bool = False


def in_the_payload(rank: int, size: int) -> None:
    payload(rank, size, kill=1)


def kill(rank: int, size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(rank: int, size: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    payload(rank, size)


def stall(rank: int, size: int) -> None:
    time.sleep(60)


def leave(rank: int, size: int) -> None:
    """Return at once."""


def reduce_all(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1 << 20))


SILENT = "rank 1 is lost: no heartbeat for 1 s"
HOST_LOST = "rank 1 is lost, or it ended because another failed: it hosts the store, which .*"
TOO_LATE = "rank 1 did not come to 'plan' within 6 s"
FAILED, OTHERS = "rank 1 failed: ValueError: no tokens", (watch_another_group,)
CASES = {
    "killed in the payload": Case(in_the_payload, in_the_payload, (payload,), SILENT),
    "killed with the store": Case(in_the_payload, in_the_payload, (payload,), HOST_LOST, host=1),
    "killed in the handshake": Case(kill, handshake, (handshake,), SILENT),
    "killed in a collective of others": Case(kill, reduce_all),
    "killed while others compute": Case(kill, stall, exit_at_once=True),
    "stalled in the handshake": Case(stall, handshake, (payload,), TOO_LATE),
    "stalled before the payload": Case(
        stall, payload, (handshake, payload), f"rank 1 did not come to '{WHAT}' within the timeout"
    ),
    "stopped": Case(stop, payload, (), SILENT),
    "raises with the store": Case(fail, payload, OTHERS, FAILED, host=1),
    "leaves": Case(leave, payload, (), "rank 1 left while other ranks waited for data"),
    "disagree": Case(disagree, ranks=4, watched=False),
    "peace": Case(peace, ranks=4, watched=False),
    "threads": Case(threads_agree, ranks=1, watched=False),
    "fake": Case(fake_agrees, ranks=1, watched=False),
}


def go() -> None:
    """Wait for all ranks, and note the time: the failure comes now."""
    dist.barrier()
    print(f"go {time.monotonic()}", file=sys.stderr, flush=True)


def run_rank(rank: int, size: int, name: str) -> None:
    case = CASES[name]
    if case.watched:
        watch(silence=1.0, exit_at_once=case.exit_at_once)
        watch()
        agree(None, "begin", {"case": name})
    dist.barrier()
    try:
        for step in case.before:
            step(rank, size)
        if case.then is not None:
            go()
        (case.how if rank == 1 or case.then is None else case.then)(rank, size)
    except RuntimeError:
        # A busy machine takes seconds to end a process: what is promised is when the call raises.
        sys.stderr.write(f"raised {time.monotonic()}\n")
        raise


def run_case(name: str) -> Outcome:
    # A victim that sleeps or is stopped ends once the others have ended.
    spared = [1] if name.startswith(("stalled", "stopped")) else []
    case = CASES[name]
    return run_processes(case.ranks, run_rank, name, timeout=TIMEOUT, limit=HARD_LIMIT, host=case.host, spared=spared)


def seconds_of(outcome: Outcome, rank: int) -> float:
    """Time from `go` to the exception at a rank, or to the rank's end if there is none."""
    text = outcome.texts[rank]
    begin, end = (re.search(rf"^{what} ([\d.]+)$", text, re.M) for what in ("go", "raised"))
    assert begin is not None, text
    return (float(end[1]) if end else outcome.ends[rank]) - float(begin[1])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome]]:
    """Run the cases of all chosen tests, four at a time: most of them wait."""
    # Other files have parameters of this name, too, and not all of them can be keys.
    given = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    chosen = {name for name in given if isinstance(name, str)}
    # Those that wait for the timeout first.
    names = sorted(CASES.keys() & chosen, key=lambda name: (not name.startswith("stalled"), name))
    with ThreadPoolExecutor(4) as pool:
        yield dict(zip(names, pool.map(run_case, names), strict=True))


def survivors(outcome: Outcome) -> list[int]:
    return [rank for rank in range(len(outcome.texts)) if rank != 1]


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.line])
def test_each_survivor_fails_within_the_timeout_with_one_line_that_names_the_rank(
    outcomes: dict[str, Outcome], case: str
) -> None:
    outcome = outcomes[case]
    for rank in survivors(outcome):
        assert outcome.exit_codes[rank] == 1, outcome.texts[rank]
        assert seconds_of(outcome, rank) < TIMEOUT + 1
        raised = re.findall(r"^ringtile\.distributed\.failures\.errors\.RankLost: (.*)$", outcome.texts[rank], re.M)
        assert len(raised) == 1, outcome.texts[rank]
        assert re.fullmatch(CASES[case].line, raised[0])
        printed = re.findall(r"^ringtile: (.*)$", outcome.texts[rank], re.M)
        assert printed in ([], raised)
        if case in ("raises with the store", "killed in the payload"):
            # It is known long before the timeout.
            assert f"while waiting for {WHAT}" in outcome.texts[rank]
            assert printed == raised


@pytest.mark.parametrize("case", ["killed while others compute"])
def test_exit_at_once_ends_ranks_that_wait_for_nothing(outcomes: dict[str, Outcome], case: str) -> None:
    outcome = outcomes[case]
    for rank in survivors(outcome):
        assert outcome.exit_codes[rank] == 1
        assert seconds_of(outcome, rank) < TIMEOUT
        assert re.findall(r"^ringtile: (rank 1 is lost)", outcome.texts[rank], re.M) == ["rank 1 is lost"]


@pytest.mark.parametrize("case", ["killed in a collective of others"])
def test_a_broken_connection_is_not_blamed_on_the_rank_that_reports_it(outcomes: dict[str, Outcome], case: str) -> None:
    outcome = outcomes[case]
    for rank in survivors(outcome):
        assert outcome.exit_codes[rank] == 1
        assert "ringtile: rank 1 is lost: no heartbeat for 1 s" in outcome.texts[rank]
        assert " failed: " not in outcome.texts[rank]


@pytest.mark.parametrize("case", ["disagree"])
def test_a_mismatch_is_the_same_line_at_every_rank(outcomes: dict[str, Outcome], case: str) -> None:
    outcome = outcomes[case]
    lines = {
        "pair": "rank 1 has n=131072, rank 3 has n=131200",
        "three": "rank 3 has layout='contiguous', the others layout='zigzag'",
        "four": "rank 3 has pattern='causal & window(2048)', the others pattern='causal & window(4096)'",
        "tie": "ranks 0, 2 have n=0, ranks 1, 3 have n=1",
        "extra": "rank 3 has seed=7, the others no seed",
    }
    for rank, text in enumerate(outcome.texts):
        absent = {0: ["pair"], 1: ["three"], 2: ["pair"], 3: []}[rank]
        names = [name for name in lines if name not in absent]
        assert re.findall(r"^line: (.*)$", text, re.M) == [f"{name}: {lines[name]}" for name in names]
        assert text.rstrip().endswith("PlanMismatch: four: rank 3 has heads=4, the others heads=8")
        assert outcome.exit_codes[rank] == 1
        assert seconds_of(outcome, rank) < TIMEOUT + 1


@pytest.mark.parametrize("case", ["peace", "threads", "fake"])
def test_what_is_no_failure_ends_well_and_prints_nothing(outcomes: dict[str, Outcome], case: str) -> None:
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    if case == "threads" and not hasattr(ThreadLocalWorld, "comms"):
        pytest.skip("this torch fails as it destroys groups of threads")
    outcome = outcomes[case]
    assert outcome.exit_codes == [0] * len(outcome.texts), outcome.texts
    assert not any("ringtile" in text for text in outcome.texts), outcome.texts


SCRIPT = """
import datetime, sys, torch, torch.distributed as dist
from ringtile.distributed.failures.faults import wait, watch
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=6))
watch()
dist.barrier()
assert rank == 0, "this shard is empty"
wait(dist.all_reduce(torch.ones(4), async_op=True), None, "gradients")
"""


def test_an_uncaught_exception_of_a_program_is_published_over_any_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    programs = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        texts = [program.communicate(timeout=HARD_LIMIT)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [1, 1]
    assert "RankLost: rank 1 failed: AssertionError: this shard is empty" in texts[0]
    assert texts[1].rstrip().endswith("AssertionError: this shard is empty")
    assert "ringtile: " not in texts[1]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([{"n": 1}, {"n": 1}], None),
        ([{"n": 1}, {"n": "1"}], "rank 0 has n=1, rank 1 has n='1'"),
        ([{"n": 1}, {}], "rank 0 has n=1, rank 1 has no n"),
        ([{}, {"n": 1}, {}], "rank 1 has n=1, the others no n"),
        ([{"n": n} for n in (5, 1, 6, 1)], "rank 0 has n=5, rank 2 has n=6, the others n=1"),
        ([{"n": n} for n in range(5)], "rank 0 has n=0, rank 1 has n=1, rank 2 has n=2, 2 more values at other ranks"),
        (
            [{"n": 1 if rank < 12 else 2} for rank in range(64)],
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (12 in all) have n=1, the others n=2",
        ),
        (
            [dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)],
            "rank 0 has a=1, rank 1 has a=2; rank 0 has b=1, rank 1 has b=2; rank 0 has c=1, rank 1 has c=2; "
            "2 more fields differ",
        ),
    ],
)
def test_a_difference_is_told_in_one_short_line(given: list[dict[str, Any]], line: str | None) -> None:
    assert difference(dict(enumerate(given))) == line


def test_long_values_are_cut_to_the_part_that_differs() -> None:
    texts = ["window(4) | " * 40 + f"window({width})" + " | dense" * 40 for width in (5, 6)]
    line = difference({rank: {"pattern": text} for rank, text in enumerate(texts)})
    assert line is not None
    assert len(line) < 220
    assert "window(5)" in line
    assert "window(6)" in line


@pytest.fixture
def single(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single")
def test_one_rank_has_nobody_to_agree_with() -> None:
    before = handshakes()
    agree(None, "plan", FACTS)
    watch()
    x = torch.ones(3)
    wait(dist.all_reduce(x, async_op=True), None, "x")
    assert handshakes() == before
    assert verdict() is None


def test_bad_input_is_refused(request: pytest.FixtureRequest) -> None:
    with pytest.raises(ValueError, match="group: expected a process group, got None"):
        agree(None, "plan", FACTS)
    request.getfixturevalue("single")
    with pytest.raises(ValueError, match=r"facts: expected strings and numbers, got \{'n': None\}"):
        agree(None, "plan", {"n": None})
    for interval, silence in ((0.0, 1.0), (0.6, 1.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="silence: expected at least 2 intervals"):
            watch(interval=interval, silence=silence)


@pytest.mark.usefixtures("single")
def test_another_pytorch_without_its_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.group.WORLD
    assert process_groups.timeout_of(group) == 1800
    monkeypatch.delattr(dist.ProcessGroup, "_get_backend")
    assert process_groups.timeout_of(group) > 0
    monkeypatch.delattr(dist.distributed_c10d, "_get_process_group_store")
    with pytest.raises(RuntimeError, match=r"has no torch.* as ringtile needs it for the store of a process group"):
        process_groups.store_of(group)
    # A thread of its own waits for what can be a receive.
    assert process_groups.is_point_to_point(object())


class Counting:
    """A store that counts the bytes that are read from it."""

    def __init__(self, store: Any, read: list[int]) -> None:
        self._store, self._read = store, read

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            found = call(*arguments)
            if isinstance(found, bytes | list):
                self._read.append(sum(map(len, [found] if isinstance(found, bytes) else found)))
            return found

        return counted


def test_ranks_that_agree_do_not_read_the_facts_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(faults, "store_of", lambda group: Counting(process_groups.store_of(group), read))
    facts, n = FACTS | {"pattern": "window(4) | " * 100}, 64

    def run(rank: int) -> int:
        agree(None, "plan", facts)
        dist.barrier()
        bytes_read = sum(read)
        dist.barrier()
        with pytest.raises(PlanMismatch, match="plan: rank 40 has n=131073, the others n=131072"):
            agree(None, "plan", facts | {"n": 131072 + (rank == 40)})
        # All came, but it takes the facts to say what differs.
        return bytes_read

    (bytes_read,) = set(on_ranks(n, run))
    # Each looks for the others a few times, and reads a number of two digits. All facts would be 5 million bytes.
    assert bytes_read < n * 1000
    assert sum(read) - bytes_read > n * n * 1000


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Ranks:
    """Rank 2 of three, whose watcher a test moves by hand. Rank 0 hosts the store."""

    def __init__(self, clock: Clock, silence: float) -> None:
        self.clock, group = clock, dist.group.WORLD
        member = faults.Member(group)
        member.ranks, member.me, member.host = [0, 1, 2], 2, 0
        self.watcher = Watcher(group, member, 0.25, silence, False)
        self.store = self.watcher._store
        self.store.compare_set(self.watcher._key("verdict"), "", "-")

    def live(self, seconds: float, *beating: int) -> str | None:
        """Let time pass in which some of the other ranks are alive. Return the verdict."""
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            for rank in beating:
                self.store.set(self.watcher._key(rank), f"on|{self.clock.now}|0|")
            if self.watcher.verdict is None:
                self.watcher._tick()
        return self.watcher.verdict

    def lose_the_store(self) -> str | None:
        """Break the connection to the store. Return the verdict."""
        self.watcher._store = Gone()
        self.watcher.run()
        return self.watcher.verdict


class Gone:
    """A store that does not answer. A beat expects no answer, as with a TCPStore."""

    def set(self, *arguments: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


@pytest.fixture
def clock(single: None, monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watcher, "time", found)
    return found


def test_a_stall_is_no_death_until_the_silence_or_a_broken_connection(clock: Clock) -> None:
    ranks = Ranks(clock, 60.0)
    assert ranks.live(5, 0, 1) is None
    assert ranks.live(55, 0) is None
    assert ranks.live(5, 0, 1) is None
    assert ranks.live(61, 0) == "rank 1 is lost: no heartbeat for 60 s"
    ranks = Ranks(clock, 60.0)
    assert ranks.live(5, 0, 1) is None
    # As `blame` does it at any rank.
    ranks.store.compare_set(ranks.watcher._key("verdict"), "-", watcher._BROKEN)
    assert ranks.live(1.75, 0) is None
    assert ranks.live(1, 0) == "rank 1 is lost: no heartbeat for 2 s"
    assert ranks.store.get(ranks.watcher._key("verdict")).decode() == ranks.watcher.verdict


def test_a_store_that_vanishes_is_not_blamed_on_its_host_if_another_rank_was_overdue(clock: Clock) -> None:
    """The host can have ended because of that rank, before this one read the verdict."""
    ranks = Ranks(clock, 5.0)
    ranks.live(2, 0, 1)
    ranks.live(4.75, 0)
    assert ranks.lose_the_store() == "rank 1 is lost: no heartbeat for 5 s"
    ranks = Ranks(clock, 60.0)
    ranks.store.compare_set(ranks.watcher._key("verdict"), "-", watcher._BROKEN)
    ranks.live(2, 0, 1)
    ranks.live(1.75, 0)
    assert ranks.lose_the_store() == "rank 1 is lost: no heartbeat for 2 s"


def test_a_store_that_vanishes_while_all_are_alive_leaves_it_open_why(clock: Clock) -> None:
    ranks = Ranks(clock, 5.0)
    ranks.live(10, 0, 1)
    line = "rank 0 is lost, or it ended because another failed: it hosts the store, which does not answer"
    assert ranks.lose_the_store() == line
    ranks = Ranks(clock, 5.0)
    ranks.live(10, 0, 1)
    ranks.watcher.member.host = None
    assert (
        ranks.lose_the_store()
        == "the host of the store is lost, or it ended because another failed: the store does not answer"
    )


def test_a_rank_that_stood_still_until_the_others_had_gone_names_itself(clock: Clock) -> None:
    ranks = Ranks(clock, 5.0)
    ranks.live(10, 0, 1)
    ranks.watcher._store = Gone()
    clock.now += 7
    with pytest.raises(RuntimeError, match="Connection reset"):
        ranks.watcher._tick()
    assert ranks.lose_the_store() == "rank 2 is lost: no heartbeat for 5 s"


def test_a_store_that_hangs_is_no_stall_of_this_rank(clock: Clock) -> None:
    ranks = Ranks(clock, 5.0)
    ranks.live(10, 0, 1)

    class Hangs:
        def __getattr__(self, name: str) -> Any:
            clock.now += 300
            raise RuntimeError("wait timeout")

    ranks.watcher._store = Hangs()
    ranks.watcher.run()
    assert str(ranks.watcher.verdict).startswith("rank 0 is lost, or it ended")


def test_only_connections_of_pytorch_are_those_to_other_ranks() -> None:
    assert watcher.is_broken_connection(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:2318"))
    assert watcher.is_broken_connection(dist.DistNetworkError("failed to recv"))
    assert not watcher.is_broken_connection(BrokenPipeError(32, "Broken pipe"))
    assert not watcher.is_broken_connection(ConnectionResetError(104, "Connection reset by peer"))


@pytest.mark.parametrize(("timeout", "silence"), [(1800.0, 60.0), (20.0, 5.0), (0.5, 0.4)])
@pytest.mark.usefixtures("single")
def test_the_default_silence(timeout: float, silence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Watcher] = []
    monkeypatch.setattr(faults, "is_alone", lambda group: False)
    monkeypatch.setattr(faults, "timeout_of", lambda group: timeout)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(Watcher, "start", lambda self: made.append(self))
    watch()
    assert [found.silence for found in made] == [silence]
    made[0].at_exit.cancel()


class Work:
    """A work of NCCL, whose wait does not block."""

    waits = 0

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self._during = during

    def wait(self) -> None:
        self.waits += 1
        self._during()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_looks_at_the_verdict_before_and_after_a_wait(
    backend: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a work that only looks like one of NCCL."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)

    def aborted() -> None:
        found.verdict = "rank 1 failed: ValueError"
        raise RuntimeError("NCCL communicator was aborted")

    found = Ranks(clock, 5.0).watcher
    monkeypatch.setattr(faults, "_watcher", lambda group: found)
    fine = Work()
    wait(fine, None, WHAT)
    assert fine.waits == 1
    with pytest.raises(RankLost, match="rank 1 failed: ValueError") as raised:
        wait(Work(aborted), None, WHAT)
    assert "communicator was aborted" in str(raised.value.__context__)
    assert raised.value.__notes__ == [f"while waiting for {WHAT}"]
    late = Work()
    for work in (late, None):
        with pytest.raises(RankLost, match="rank 1 failed: ValueError"):
            wait(work, None, WHAT)
    assert late.waits == 0
    found.verdict = None
    with pytest.raises(RankLost, match="rank 0 left"):
        wait(Work(lambda: setattr(found, "verdict", "rank 0 left")), None, WHAT)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, torch.nan), (torch.float32, torch.inf), (torch.bfloat16, -torch.inf), (torch.float16, torch.nan)],
)
def test_the_first_tile_that_is_not_finite(dtype: torch.dtype, value: float) -> None:
    x = torch.full((2, 3, 300, 8), torch.finfo(dtype).max, dtype=dtype)
    x[:, :, ::2] *= -1
    assert first_nonfinite(x, 64) is None
    for element, head, token in ((1, 2, 299), (0, 1, 130), (1, 0, 191)):
        x[element, head, token, 5] = value
        assert first_nonfinite(x, 64) == {299: (1, 2, 4), 130: (0, 1, 2), 191: (0, 1, 2)}[token]
    assert first_nonfinite(x.transpose(1, 2).contiguous().transpose(1, 2), 64) == (0, 1, 2)
    assert first_nonfinite(x[:, :, :0], 64) is None
    assert x.isnan().sum() == (3 if value != value else 0)
    with pytest.raises(ValueError, match=r"x, tile: expected \[B, H, N, D\]"):
        first_nonfinite(x[0], 64)


def test_a_rank_that_left_because_of_another_groups_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = SimpleNamespace(verdict=None, blame=lambda error: None), SimpleNamespace(verdict="rank 3 is lost")
    monkeypatch.setattr(faults, "_watchers", lambda: [here, there])
    error = RuntimeError("Connection closed by peer")
    assert str(faults._lost(here, "keys", error)) == "rank 3 is lost"
    # Without a watcher of its own, a group learns nothing from others.
    assert str(faults._lost(None, "keys", error)).startswith("keys: a rank is lost; watch() on every rank tells which")
