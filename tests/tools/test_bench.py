"""The benchmark harness: what is timed and what is not, what is compared, what is written. No test looks at a time."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_inputs, oracle
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import suites
from suites import TorchSparse, suite

from ringtile import cli
from ringtile.kernels.native.instruction_sets import InstructionSet, choose
from ringtile.kernels.native.library import reason_against
from ringtile.kernels.native.precision import Arithmetic
from ringtile.kernels.reference import attention_reference
from ringtile.patterns import Causal, Dense, Documents, GlobalTokens, Pattern, RandomBlocks, Window, per_head
from ringtile.tools import bench, machine, memory
from ringtile.tools.bench import exact, measure, roofline, run_bench
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.bench.peers import Attention, Case, Ringtile, SdpaDense, Task, all_peers
from ringtile.tools.bench.roofline import Work, limit_ms
from ringtile.tools.bench.rows import Record, Row, break_even, slower_rows
from ringtile.tools.memory import Peaks, peak_memory
from ringtile.tools.record import BOTH, DENSE, DIRECTIONS, FORWARD, write_whole

CPU = torch.device("cpu")
ALL_PEERS = [*all_peers(), TorchSparse()]
RATES = {"fma_float32": 1e9, "fma_float64": 5e8, "exp_float32": 1e8, "exp_float64": 1e7, "read": 1e8}


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """The rates of the processor are known, and grow with its threads: to measure them takes longer than most tests."""
    monkeypatch.setattr(
        bench, "peak_rates", lambda threads=1, **_: {name: threads * rate for name, rate in RATES.items()}
    )


def right(case: Case) -> Attention:
    return lambda q, k, v: attention_reference(q, k, v, case.pattern)[0].to(q.dtype)


def one_percent_off(case: Case) -> Attention:
    return lambda q, k, v: 1.01 * right(case)(q, k, v)


def gradient_off(case: Case) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(case)(q, k, v)
        return 1.01 * out - 0.01 * out.detach()

    return attention


def not_a_number(case: Case) -> Attention:
    return lambda q, k, v: right(case)(q, k, v) * torch.nan


def forward_only(case: Case) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad:
            raise NotImplementedError("no backward here\nat all")
        return right(case)(q, k, v)

    return attention


def raising(error: BaseException) -> Callable[..., Attention]:
    def fail(*args: object, **options: object) -> Attention:
        raise error

    return fail


@dataclass
class Fake:
    """A peer that computes as told; by default the reference, which is right."""

    name: str = "ringtile"
    make: Callable[[Case], Attention] = right
    reasons: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)

    def unsupported(self, case: Case) -> list[str]:
        return list(self.reasons)

    def computes(self, case: Case) -> Pattern:
        return case.pattern

    def prepare(self, case: Case) -> Attention:
        attention = self.make(case)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.calls.append(self.name)
            return attention(q, k, v)

        return run


def small_case(pattern: Pattern | None = None, **sizes: object) -> Case:
    pattern = Causal() & Window(9) if pattern is None else pattern
    return Case(repr(pattern), pattern, **{"n_tokens": 40, "heads": 2, "head_dim": 8, **sizes})


def rows_of(
    case: Case, *entrants: Fake | SdpaDense, directions: Sequence[str] = DIRECTIONS, **options: Any
) -> dict[str, list[Row]]:
    found = list(measure(case, entrants, directions=directions, seconds=0.0, **options))
    assert all([row.peer for row in rows] == [entrant.name for entrant in entrants] for rows in found)
    return {rows[0].direction: rows for rows in found}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_right_peer_is_timed_against_dense(direction):
    case = small_case()
    ours, dense = rows_of(case, Fake(), SdpaDense())[direction]
    assert ours.reason == dense.reason == ""
    assert ours.speedup == pytest.approx(dense.median_ms / ours.median_ms)
    assert dense.speedup == 1
    assert 0 < ours.low_ms <= ours.median_ms <= ours.high_ms
    assert ours.rounds == dense.rounds == bench.MIN_ROUNDS
    assert 0 < ours.error < ours.error_bound < 2e-6
    assert 0 < dense.error < dense.error_bound < 2e-6
    assert (ours.density, ours.tile_density, ours.ideal) == (case.index.density, 1.0, 1 / case.index.density)
    assert (ours.peak_backward_bytes is None) == (direction == FORWARD)
    assert ours.peak_forward_bytes > 8 * 40 * 40 * 2


def hole(value: float, row: int) -> Callable[[Case], Attention]:
    """Right but for one row, which no sample of rows may meet."""

    def make(case: Case) -> Attention:
        return lambda q, k, v: right(case)(q, k, v).index_fill(2, torch.tensor([row]), value)

    return make


@pytest.mark.parametrize(
    ("value", "reason"), [(0.0, "wrong: zeros in rows that keep keys"), (torch.inf, "wrong: its output is not finite")]
)
def test_a_hole_in_our_output_is_found_wherever_it_is(value, reason):
    whole = exact.Exact(small_case(n_tokens=200), 0)
    row = next(row for row in range(200) if row not in whole.rows)
    for pattern in (Causal() & Window(9), Causal() & Window(9) & ~GlobalTokens(1)):
        ours, _ = rows_of(small_case(pattern, n_tokens=200), Fake(make=hole(value, row)), SdpaDense())[FORWARD]
        assert ours.reason == reason
    # The first token may keep nothing.
    assert rows_of(small_case(Causal() & ~Window(0)), Fake(make=hole(0.0, 0)))[FORWARD][0].reason == ""


@pytest.mark.parametrize("make", [one_percent_off, not_a_number])
def test_nobody_is_timed_where_ours_is_wrong(make):
    calls = []
    for rows in rows_of(small_case(), Fake(make=make), SdpaDense(), Fake("other", calls=calls)).values():
        ours, dense, other = rows
        assert ours.reason.startswith("wrong: error ")
        assert "ringtile is not right here: wrong" in dense.reason
        assert "ringtile is not right here: wrong" in other.reason
        assert {row.median_ms for row in rows} == {row.speedup for row in rows} == {None}
    # Compared once in each direction, never timed.
    assert len(calls) == 2


def test_a_wrong_gradient_is_found_and_leaves_the_forward_pass_alone():
    found = rows_of(small_case(), Fake(make=gradient_off), SdpaDense())
    assert found[FORWARD][0].median_ms is not None
    assert found[BOTH][0].reason.startswith("wrong: error 1.0e-02, over ")
    assert found[BOTH][0].median_ms is None


@pytest.mark.parametrize(
    ("peer", "reasons"),
    [
        (Fake("other", one_percent_off), ["wrong: error 1.0e-02", "wrong: error 1.0e-02"]),
        (Fake("other", reasons=("too small", "too blue")), ["too small; too blue"] * 2),
        (Fake("other", raising(RuntimeError("no compiler\n..."))), ["cannot be prepared: no compiler"] * 2),
        (Fake("other", raising(RuntimeError())), ["cannot be prepared: RuntimeError"] * 2),
        (Fake("other", forward_only), ["", "cannot train on a CPU: no backward here"]),
    ],
)
def test_a_peer_that_cannot_is_left_out_with_its_reason(peer, reasons):
    found = rows_of(small_case(), Fake(), SdpaDense(), peer)
    for direction, reason in zip(DIRECTIONS, reasons, strict=True):
        *rights, other = found[direction]
        assert all(row.median_ms is not None for row in rights)
        assert other.reason.startswith(reason)
        assert (other.median_ms is None) == bool(reason)


def test_a_slow_peer_is_left_out_but_not_dense(monkeypatch):
    ours, dense, other = rows_of(small_case(), Fake(), SdpaDense(), Fake("other"), slow_seconds=0.0, rounds=1)[FORWARD]
    assert ours.rounds == dense.rounds == 1
    assert ours.low_ms == pytest.approx(ours.median_ms)
    assert ours.high_ms == pytest.approx(ours.median_ms)
    assert other.reason.startswith("one call took ")
    # The memory of a baseline costs one more call, so it is measured if that is short.
    monkeypatch.setattr(bench, "MEMORY_SECONDS", 0.0)
    ours, dense = rows_of(small_case(), Fake(), SdpaDense())[BOTH]
    assert ours.peak_forward_bytes is not None
    assert dense.median_ms is not None
    assert dense.peak_forward_bytes is dense.peak_backward_bytes is None


def test_calls_are_interleaved_and_take_turns_at_being_first(monkeypatch):
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 0.0)
    calls = []
    rows_of(small_case(), Fake(calls=calls), Fake("dense", calls=calls), directions=[FORWARD])
    compared = ["ringtile", "dense"]
    timed_once_and_measured = ["ringtile", "ringtile", "dense", "dense"]
    rounds = ["ringtile", "dense", "dense", "ringtile", "ringtile", "dense"]
    assert calls == [*compared, *timed_once_and_measured, *rounds]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_is_that_of_the_dtype(dtype):
    found = rows_of(small_case(dtype=dtype), Fake(), SdpaDense())
    # Gradients lose more than outputs; in float64 and float32 the floor is above both.
    assert (found[BOTH][0].error_bound > found[FORWARD][0].error_bound) == (dtype in (torch.bfloat16, torch.float16))
    for ours, dense in found.values():
        assert ours.reason == dense.reason == ""
        assert max(torch.finfo(dtype).eps / 4, 1e-12) <= ours.error_bound < max(20 * torch.finfo(dtype).eps, 2e-12)


def test_rows_that_keep_nothing_and_batches_are_compared_too():
    ids = torch.tensor([[0] * 20 + [1] * 20, [0] * 30 + [1] * 10])
    for pattern in (Causal() & ~Window(0), Documents(ids=ids), per_head([Causal(), Window(2)])):
        case = small_case(pattern, batch=2)
        assert all(row.reason == "" for rows in rows_of(case, Fake()).values() for row in rows)
        assert all(row.reason for rows in rows_of(case, Fake(make=one_percent_off)).values() for row in rows)


def test_a_failure_of_torch_does_not_open_the_gate(monkeypatch):
    def broken(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, enable_gqa: bool) -> Tensor:
        return q * torch.nan + (k + v).sum()

    monkeypatch.setattr(exact.F, "scaled_dot_product_attention", broken)
    (right_row,), (wrong_row,) = (rows_of(small_case(), Fake(make=make))[FORWARD] for make in (right, one_percent_off))
    assert right_row.error_bound == wrong_row.error_bound == exact.ERROR_FLOOR
    assert right_row.reason == ""
    assert wrong_row.reason.startswith("wrong")


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        (Causal() & Window(3), Causal()),
        (Documents(lengths=[20, 20]) & (Causal() & Window(3)), Causal()),
        (Window(3) | GlobalTokens(2), Dense()),
        (Causal() | GlobalTokens(2), Dense()),
    ],
)
def test_dense_is_causal_where_the_pattern_is(pattern, dense):
    assert small_case(pattern).dense_pattern == dense
    assert all(row.reason == "" for rows in rows_of(small_case(pattern), SdpaDense()).values() for row in rows)


# Uncompiled, FlexAttention warns that it is slow and its own code meets deprecations of torch.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [peer.name for peer in ALL_PEERS])
@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        (Causal() & Window(30), {"n_queries": 1, "kv_heads": 2, "block": 64}),
        (Causal() & Window(30), {"n_queries": 150, "kv_heads": 4, "block": 64}),
        (Causal() & Window(30), {"n_queries": 130, "kv_heads": 1}),
        (Window(20) & ~Window(0) & ~GlobalTokens(1), {"kv_heads": 2}),
        (per_head([Causal(), Window(40) | RandomBlocks(1, block=16)]), {"heads": 2}),
        (Documents(ids=torch.tensor([[0] * 100 + [1] * 100, [0] * 50 + [1] * 150])), {"batch": 2}),
    ],
)
def test_real_peers_compute_the_same_attention(name, pattern, sizes, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    (peer,) = (peer for peer in ALL_PEERS if peer.name == name)
    case = small_case(pattern, **{"n_tokens": 200, "heads": 4, **sizes})
    if name == DENSE and case.queries not in (1, 200):
        assert peer.unsupported(case) == ["its causal mask needs as many queries as keys"]
        return
    shape = (case.batch, case.heads, case.queries, 200)
    inputs = make_inputs(*shape, head_dim=8, kv_heads=case.key_heads, dtype=torch.float32)
    expected = oracle(*inputs[:3], peer.computes(case), grad_out=inputs.grad_out)
    # FlexAttention has no backward pass on a CPU.
    leaves = [x.requires_grad_(name != "flex") for x in inputs[:3]]
    out = peer.prepare(case)(*leaves)
    assert relative_error(out, expected.out) < 1e-6
    if name != "flex":
        grads = torch.autograd.grad(out, leaves, inputs.grad_out)
        assert max(relative_error(g, expected.grads[x]) for x, g in zip("qkv", grads, strict=True)) < 2e-6
    found = next(measure(case, [peer], directions=[FORWARD], seconds=0.0))[0]
    asked = (case.kv_heads, case.n_queries, case.block, case.batch)
    assert (found.kv_heads, found.n_queries, found.block, found.batch) == asked
    assert found.median_ms is not None or name == "flex"


def test_peak_memory_counts_what_a_pass_allocates_saves_and_frees():
    q, k, v = (torch.randn(256, 32, requires_grad=True) for _ in range(3))
    square = 256 * 256 * 4
    peaks = peak_memory(lambda: (q @ k.mT).softmax(-1) @ v, lambda out: torch.autograd.grad(out.sum(), (q, k, v)), CPU)
    assert peaks.forward == 2 * square
    # The weights were saved; their gradient and that of the scores are alive together.
    assert 3 * square <= peaks.backward < 3 * square + 2048
    x = torch.randn(1000, requires_grad=True)
    assert peak_memory(lambda: x.exp().sin(), lambda out: (), CPU) == Peaks(4000, 4000)

    def forward() -> Tensor:
        for _ in range(5):
            x.detach().clone()
        return torch.cat([x.detach(), x.detach()])[:10]

    assert peak_memory(forward, None, CPU) == Peaks(8000 - 40, None)


def test_peak_memory_tells_a_result_from_what_was_at_its_address_before():
    def event(name: str, ts: float, size: int = 0) -> dict[str, Any]:
        return {"name": name, "ts": ts, "args": {"Addr": out.untyped_storage().data_ptr(), "Bytes": size}}

    out = torch.ones(10)
    events = [event("[memory]", 1, 4000), event("[memory]", 2, -4000), event("[memory]", 3, 40)]
    boundary = event(memory._BACKWARD, 4)
    assert memory._peaks_of_trace([boundary, *events], [out]) == Peaks(4000, 0)
    assert memory._peaks_of_trace([boundary, *events, event("aten::add", 0)], []) == Peaks(4000, 40)


def made_row(**changes: object) -> Row:
    sizes = {"batch": 1, "heads": 1, "head_dim": 8, "dtype": "float32", "device": "cpu", "block": 128}
    figures = {"density": 0.5, "tile_density": 0.6, "ideal": 2.0}
    row = Row("window(9)", "window(9)", 64, direction=FORWARD, peer="ringtile", **sizes, **figures)
    return replace(row, **changes)


def made_record(*rows: Row) -> Record:
    facts: Any = {"commit": "abc", "versions": {"torch": "2", "triton": None}, "seed": 0, "seconds": 0.5}
    return Record(**facts, machine={"cpu": "x, y", "devices": ["cpu", "gpu"]}, rows=rows)


def timed(n_tokens: int, ours: float, dense: float, **changes: object) -> list[Row]:
    spread = {"n_tokens": n_tokens, **changes}
    return [
        made_row(median_ms=ours, low_ms=ours, high_ms=ours, speedup=dense / ours, **spread),
        made_row(median_ms=dense, low_ms=dense, high_ms=dense, speedup=1.0, peer="dense", **spread),
    ]


@pytest.mark.parametrize(
    ("ours", "first"), [({64: 2, 128: 1, 256: 0.5}, 128), ({64: 0.5, 128: 2, 256: 0.5}, 256), ({64: 0.5, 128: 2}, None)]
)
def test_break_even_is_where_the_median_of_ours_stays_not_slower(ours, first):
    rows = tuple(row for n_tokens, ms in ours.items() for row in timed(n_tokens, ms, 1.0))
    rows += (*timed(32, 5.0, 1.0, direction=BOTH), made_row(n_tokens=1024, reason="left out"))
    forward, both = break_even(rows[::-1])[::-1]
    assert (forward.direction, forward.n_tokens, forward.measured) == (FORWARD, first, tuple(ours))
    assert (both.direction, both.n_tokens) == (BOTH, None)


def test_slower_rows_compares_ratios():
    before = made_record(*timed(64, 1.0, 2.0), *timed(128, 1.0, 4.0), *timed(256, 1.0, 1.0))
    # A machine of half the speed; 64 is within the bound, 128 is not, 256 was not asked for.
    now = made_record(*timed(64, 2.2, 4.0), *timed(128, 3.0, 8.0))
    assert slower_rows(now, before, 1.15) == [
        "window(9), N 128, float32, forward: 1.50 times slower against dense, 4.00x before and 2.67x now"
    ]
    assert slower_rows(now, before, 1.6) == []
    assert len(slower_rows(now, before, 1.05)) == 2
    assert slower_rows(made_record(made_row(reason="wrong: error 1")), before, 1.15) == [
        "window(9), N 64, float32, forward: was 2.00x dense, now left out: wrong: error 1"
    ]
    for change in ({"n_tokens": 65}, {"heads": 2}, {"dtype": "float64"}, {"pattern": "window(8)"}):
        other = made_record(*(replace(row, **change) for row in timed(64, 1.0, 2.0)))
        with pytest.raises(ValueError, match="shares no timed row"):
            slower_rows(other, made_record(*timed(64, 1.0, 2.0)), 1.15)


def test_a_record_survives_its_json():
    record = replace(made_record(*timed(64, 1.0, 2.0), made_row(reason="no")), interrupted=True)
    assert Record.from_json(record.to_json()) == record


def test_files_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"

    def interrupted(self: Path, text: str, encoding: str) -> int:
        with open(self, "w", encoding=encoding) as file:
            file.write(text[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raising(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            write_whole(path, "newest")
    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "newest")
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
    assert path.read_text() == "new"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_our_own_files(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.commit() is None
    git("init")
    git("commit", "--allow-empty", "-m", "somebody's project")
    (tmp_path / "machine.py").write_text("1")
    assert machine.commit() is None
    git("add", ".")
    git("commit", "-m", "first")
    first = git("rev-parse", "HEAD").strip()
    assert machine.commit() == first
    (tmp_path / "machine.py").write_text("2")
    assert machine.commit() == f"{first}+changes"


def work_of(case: Case, direction: str, peer: object) -> list[Work]:
    return roofline.passes_of(case, direction, peer)


@pytest.mark.skipif(bool(reason_against()), reason="no native kernel here")
def test_the_work_of_ours_is_what_its_lanes_reach(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(roofline, "arithmetic_of", lambda dtype: Arithmetic(InstructionSet(1, "avx512", 64), 0, 0))
    case = small_case(Causal() & Window(9), n_tokens=256, heads=4, kv_heads=2, head_dim=16)
    # Of a tile on the diagonal, queries 0-63 keep keys 0-63 and queries 64-127 keys 55-127; of the tile before it, of
    # which queries 0-8 keep something, keys 119-127. By columns, keys 0-63 and 64-127 have 73 and 64 queries.
    pairs = 4 * (2 * 64 * (64 + 73) + 64 * 9)
    (forward,) = work_of(case, FORWARD, Ringtile())
    assert forward == Work(4.0 * pairs * 16, pairs, 4 * 16 * (2 * 4 * 256 + 2 * 2 * 256), "fma_float32", "exp_float32")
    first, back = work_of(case, BOTH, Ringtile("native"))
    assert first == forward
    # One thread has whole heads; of three that share two heads, none has.
    assert (back.operations, back.exponentials) == (5 * 2.0 * pairs * 16, pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "threads_of", lambda operations: 3)
        back = work_of(case, BOTH, Ringtile())[1]
    assert (back.operations, back.exponentials) == (7 * 2.0 * pairs * 16, 2 * pairs)
    assert back.traffic == 4 * 16 * (4 * 4 * 256 + 4 * 2 * 256)


@pytest.mark.skipif(bool(reason_against()), reason="no native kernel here")
def test_numbers_in_parts_may_have_the_error_of_parts(monkeypatch):
    for isa, setting, floor in (
        ("amx", "tf32", exact.PARTS_FLOOR),
        ("amx", "ieee", exact.ERROR_FLOOR),
        ("avx512", "tf32", exact.ERROR_FLOOR),
    ):
        use_set(isa, monkeypatch)
        monkeypatch.setattr(torch.backends.mkldnn.matmul, "fp32_precision", setting)
        case = small_case(Window(0), n_tokens=8)
        assert exact.Exact(case, 0, trains=False).bound(case.pattern, FORWARD) == floor


def use_set(name, monkeypatch):
    """Calls would go to an instruction set."""
    module = importlib.import_module("ringtile.kernels.native.library")
    choice = choose([InstructionSet(2, name, 64)], lambda wanted: [])
    monkeypatch.setattr(module, "_FOUND", module._Found(module.library()._replace(choice=choice), ""))


@pytest.mark.skipif(bool(reason_against()), reason="no native kernel here")
@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "rates", "times"),
    [
        ("avx512_bf16", torch.bfloat16, 16, ["dot_bfloat16", "fma_float32"], 1),
        ("avx512_bf16", torch.bfloat16, 15, ["fma_float32", "fma_float32"], 1),
        ("amx", torch.bfloat16, 15, ["dot_bfloat16", "dot_bfloat16"], 1),
        ("amx", torch.float16, 16, ["dot_bfloat16", "dot_bfloat16"], 3),
        ("amx", torch.float32, 16, ["dot_bfloat16", "dot_bfloat16"], 3),
        ("avx2", torch.float16, 16, ["fma_float32", "fma_float32"], 1),
        ("avx2", torch.float64, 16, ["fma_float64", "fma_float64"], 1),
    ],
)
def test_the_rates_are_those_of_the_dtype(isa, dtype, head_dim, rates, times, monkeypatch):
    use_set(isa, monkeypatch)
    monkeypatch.setattr(torch.backends.mkldnn.matmul, "fp32_precision", "tf32")
    case = small_case(Dense(), n_tokens=256, dtype=dtype, head_dim=head_dim)
    works = work_of(case, BOTH, Ringtile())
    assert [work.products for work in works] == rates
    # Two heads of all pairs. A product of numbers in parts is three of bfloat16.
    assert works[0].operations == times * 4.0 * 2 * 256 * 256 * head_dim
    softmax = {torch.float64: "exp_float64"}.get(dtype, "exp_float32")
    assert {work.softmax for work in works} == {softmax}


def test_a_limit_adds_products_and_exponentials_and_hides_the_memory_behind_them():
    computing = Work(3e6, 1e5, 1e5, "fma_float32", "exp_float32")
    reading = Work(1e6, 0, 1e6, "fma_float32", "exp_float32")
    assert limit_ms([computing], RATES) == pytest.approx(4)
    assert limit_ms([reading], RATES) == pytest.approx(10)
    assert limit_ms([computing, reading], RATES) == pytest.approx(14)
    assert limit_ms([], RATES) is None
    assert limit_ms([computing], {"read": 1.0}) is None


@pytest.mark.skipif(bool(reason_against()), reason="no native kernel here")
def test_a_record_says_the_rates_and_how_far_from_the_limit_a_row_is():
    torch.set_num_threads(1)
    case = small_case(n_tokens=200)
    record = run_bench(
        [Task(case, (Ringtile(), SdpaDense())), Task(replace(case, threads=2), (Fake(),), (FORWARD,))], seconds=0.0
    )
    assert record.peaks == {str(n): {name: n * rate for name, rate in RATES.items()} for n in (1, 2)}
    for row in record.rows[:4]:
        assert row.operations == sum(work.operations for work in work_of(case, row.direction, row_peer(row)))
        paced = {name: rate * (1 if name == "read" else row.clock) for name, rate in record.peaks["1"].items()}
        assert row.limit_ms == limit_ms(work_of(case, row.direction, row_peer(row)), paced)
        assert row.of_limit == pytest.approx(row.limit_ms / row.median_ms)
    assert {row.threads for row in record.rows[4:]} == {2}
    assert {row.limit_ms for row in record.rows[4:]} == {row.of_limit for row in record.rows[4:]} == {None}
    assert Record.from_json(record.to_json()) == record


def test_the_clock_is_the_middle_of_what_was_measured_between_the_rounds(monkeypatch):
    ticks = iter([3e9, 1e9, 2e9])
    monkeypatch.setattr(bench, "peak_rates", lambda **options: {"fma_float32": next(ticks)})
    case = small_case(n_tokens=20)
    rates = {"fma_float32": 4e9, "exp_float32": 1e9, "read": 1e9}
    (rows,) = bench.measure(case, (Ringtile("blockwise"), Fake()), directions=(FORWARD,), seconds=0.0, rates=rates)
    assert {row.clock for row in rows} == {0.5}
    (rows,) = bench.measure(case, (Fake(),), directions=(FORWARD,), seconds=0.0)
    assert [row.clock for row in rows] == [None]


def row_peer(row: Row) -> Ringtile | SdpaDense:
    return Ringtile() if row.peer == "ringtile" else SdpaDense()


# The suites: what they contain, and that they run; what is in them takes minutes.


def test_a_suite_runs_and_is_resumed(tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ("--suite", "smoke", "--seconds", "0", "--json", str(path))
    assert suites.main(words) == 0
    whole = Record.from_json(path.read_text())
    assert not whole.interrupted
    assert whole.command == f"python benchmarks/suites.py --suite smoke --seconds 0 --json {path}"
    assert all(row.median_ms is not None for row in whole.rows if row.peer == "ringtile")
    assert len(whole.rows) == sum(len(task.directions) * len(task.peers) for task in suite("smoke"))
    assert capsys.readouterr().out.count("of tiles") == len(suite("smoke"))
    # Without the second case and half of the last it measures these two, and leaves the others as they are.
    second = [row for row in whole.rows if row.asked == "dilated([2], 4096)"]
    rows = [row for row in whole.rows if row not in second][:-1]
    path.write_text(replace(whole, rows=tuple(rows), interrupted=True).to_json())
    assert suites.main([*words, "--resume"]) == 0
    again = Record.from_json(path.read_text())
    assert not again.interrupted
    assert [row.problem for row in again.rows] == [row.problem for row in whole.rows]
    assert [row for row in again.rows if row in whole.rows] == rows[:-2]
    assert capsys.readouterr().out.count("of tiles") == 2


def test_what_was_measured_otherwise_is_not_resumed(fakes, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ("window(5)", "--tokens", "26", "--direction", "forward", "--json", str(path), "--resume")
    assert run(*words) == 0
    kept = path.read_text()
    for change in ({"commit": "other"}, {"seed": 3}, {"machine": {}}):
        path.write_text(replace(Record.from_json(kept), **change).to_json())
        assert run(*words) == 2
        (name,) = change
        assert f"has {name} " in capsys.readouterr().err
    assert run(*words[:5], "--resume") == 2
    assert "expected --json PATH, too" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        suites.main(["--suite", "smoke", "--resume"])
    assert ": error: --resume: expected --json PATH, too\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--resume", "--against"])
def test_a_foreign_record_is_refused_by_name(fakes, monkeypatch, tmp_path, capsys, option):
    monkeypatch.setattr(bench, "run_bench", raising(AssertionError("measured")))
    path = tmp_path / "r.json"
    words = ("--json", str(path), "--resume") if option == "--resume" else ("--against", str(path))
    formats = (b'{"format": 0, "rows": []}', b'{"format": 1, "rows": []}', b'{"format": 1, "rows": [3]}')
    for content in (b"\x80\x04\x95 no text", b"", b"[1, 2]", b"{}", b"{", *formats):
        path.write_bytes(content)
        assert run("window(5)", "--tokens", "26", *words) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"ringtile: error: {option}: {str(path)!r}: ")
        assert said.count("\n") == 1
        assert path.read_bytes() == content


@pytest.fixture
def fakes(monkeypatch):
    """Stand in for all peers of the command."""
    found = [Fake(), SdpaDense(), Fake("other")]
    monkeypatch.setattr(bench, "all_peers", lambda backend=None: found)
    return found


def run(*words: str) -> int:
    return cli.main(["bench", "--heads", "2", "--head-dim", "8", "--seconds", "0", *words])


def test_the_command_prints_a_table_and_writes_a_record_after_each_case(fakes, tmp_path, capsys):
    path, seen = tmp_path / "r.json", []

    def looking(case: Case) -> Attention:
        if path.exists():
            seen.append(Record.from_json(path.read_text()))
        return right(case)

    fakes[2].make = looking
    assert run("causal & window(9)", "window(5)", "--tokens", "50", "26", "--json", str(path)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("causal & window(9)  N 26  B1 H2 D8 float32  density ") == 1
    assert out.count("  ringtile     forward+backward ") == out.count("  other        forward ") == 4
    assert "Break-even" in out
    assert [(record.interrupted, len(record.rows)) for record in seen] == [(True, 6), (True, 12), (True, 18)]
    record = Record.from_json(path.read_text())
    assert not record.interrupted
    assert len(record.rows) == 2 * 2 * 2 * 3
    assert [row.n_tokens for row in record.rows[:12:6]] == [26, 50]
    assert record.versions["torch"] == torch.__version__
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_rows_to_measure_again_are_marked(fakes, monkeypatch, capsys):
    right_row = made_row(median_ms=2.0, low_ms=1.9, high_ms=2.8, limit_ms=2.0, clock=0.9)
    assert right_row.doubts == []
    assert made_row().doubts == []
    wrong = replace(right_row, low_ms=1.0, limit_ms=3.0, clock=0.5)
    assert wrong.doubts == [
        "faster than the limit, whose rates were measured too low",
        "times vary 2.8x",
        "had 50% of the processor",
    ]

    def measured(case: Case, peers: Sequence[Fake], **options: Any) -> Any:
        yield [replace(right_row, error=1e-7), replace(wrong, error=1e-7, peer=DENSE)]

    monkeypatch.setattr(bench, "measure", measured)
    assert run("window(5)", "--tokens", "26") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if " ! times vary 2.8x" in line] == [DENSE]
    assert out.endswith("1 of 2 rows are doubtful (!). Measure again on a machine that is idle.\n")


def test_the_command_fails_where_ours_is_wrong(fakes, tmp_path, capsys):
    fakes[0].make = one_percent_off
    assert run("window(5)", "--tokens", "26", "--json", str(tmp_path / "r.json")) == 1
    out, err = capsys.readouterr()
    assert err.count("ringtile bench: window(5), N 26, forward") == 2
    assert " ms " not in out
    record = Record.from_json((tmp_path / "r.json").read_text())
    assert [row.peer for row in record.rows if row.median_ms is None].count("ringtile") == 2


def test_the_command_fails_where_ours_became_slower(fakes, tmp_path, capsys):
    path = tmp_path / "before.json"
    words = ("window(5)", "--tokens", "26", "--direction", "forward", "--peers", "--against", str(path))
    (rows,) = measure(small_case(Window(5), n_tokens=26), fakes[:2], directions=[FORWARD], seconds=0.0)
    for changes, status, said in (
        ({"speedup": 1e-9}, 0, ""),
        ({"speedup": 1e9}, 1, "times slower against dense"),
        ({"n_tokens": 27}, 2, "shares no timed row"),
    ):
        path.write_text(made_record(replace(rows[0], **changes)).to_json())
        assert run(*words) == status
        err = capsys.readouterr().err
        assert said in err if said else not err


def test_an_interrupt_keeps_what_was_measured(fakes, tmp_path, capsys):
    def interrupted_backward_at_50(case: Case) -> Attention:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if case.n_tokens == 50 and q.requires_grad:
                raise KeyboardInterrupt
            return right(case)(q, k, v)

        return attention

    fakes[2].make = interrupted_backward_at_50
    path = tmp_path / "r.json"
    assert run("window(5)", "--tokens", "26", "50", "60", "--json", str(path)) == 130
    record = Record.from_json(path.read_text())
    assert record.interrupted
    assert [row.n_tokens for row in record.rows] == [26] * 6 + [50] * 3
    assert {row.direction for row in record.rows[6:]} == {FORWARD}
    assert "N 50" in capsys.readouterr().out


def test_bad_arguments_end_before_anything_is_measured(fakes, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_bench", raising(AssertionError("measured")))
    for words, message in (
        (["windw(5)"], "unknown pattern 'windw'"),
        (["--seconds", "-1"], "expected --seconds >= 0"),
        (["--max-slowdown", "0.5"], "--max-slowdown >= 1"),
        (["--density", "1.5"], "1.5"),
        (["--device", "abacus"], "--device: "),
        (["--json", "/no/such/folder/r.json"], "expected a file in an existing folder"),
        (["--against", "/no/such/record.json"], "No such file"),
    ):
        assert run(*words) == 2
        assert message in capsys.readouterr().err
