"""The Triton backend: its kernels in the interpreter, compiled for GPUs that are not here, and its schedule."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_cases import CASES

from ringtile import build_index, sparse_attention
from ringtile.cli import main
from ringtile.index import clear_cache, lists
from ringtile.index.schedule import order_of, schedule_of
from ringtile.kernels import triton as backend
from ringtile.kernels.contracts import Call
from ringtile.kernels.triton.tuning import VARIABLE, wants_descriptors
from ringtile.patterns import Causal, GlobalTokens, Pattern, Window, per_head
from ringtile.tools.doctor import _lines, diagnosis

HERE = Path(__file__).parents[1]
# At the end: both folders have a module of ranks.
sys.path.append(str(HERE.parent / "benchmarks"))
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def call_of(pattern: Pattern, n_queries: int, n_keys: int, heads: int, **options: object) -> Call:
    index = build_index(pattern, n_queries, n_keys, num_heads=heads)
    return Call(index.start, index.block, 0.1, tiles=index.tensors(), **{"backend": "triton", **options})


# In the interpreter.


BY_DESCRIPTOR = (
    "dense and ragged",
    "grouped heads and another value dim",
    "masked keys are not read",
)
"""Cases that have full tiles in both passes, padded head dims among them."""


COVERED = (
    "empty rows and unused keys",
    "grouped heads and another value dim",
    "heads with patterns of their own",
    "the query heads of many columns in one program",
    "dilated and blocks merged into larger ones",
    "a start inside a tile",
    "one query decodes",
    "a fixed capacity changes no bit",
    "key mask",
    "key lengths",
    "half types within the budget",
    "what nobody keeps is not read",
    "any strides",
    "scores of any size",
    "twice the same bits",
)
"""Cases whose lines the others run, too."""


BATCHES = [
    (tuple(name for name in CASES if name not in COVERED), "", []),
    (("half types within the budget",), "tma", []),
    (COVERED, "", [pytest.mark.slow]),
    (BY_DESCRIPTOR, "tma", [pytest.mark.slow]),
]
"""Cases that share a process, and so the seconds that it takes to start."""


@cache
def interpreted(script: str, names: tuple[str, ...], switch: str) -> str:
    """What a process prints that runs some cases: whether Triton interprets is settled when it is first imported."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent / "src"), VARIABLE: switch}
    command = [sys.executable, HERE / script, *names]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    return done.stdout + done.stderr


def check_case(name: str, script: str, names: tuple[str, ...], switch: str = "") -> None:
    """Assert that a case is right, in a process that runs all ``names``."""
    printed = interpreted(script, names, switch)
    assert re.search(rf"^right  .*  {re.escape(name)}$", printed, re.M), printed


@needs_triton
@pytest.mark.parametrize(
    ("name", "switch"),
    [
        pytest.param(name, switch, marks=[pytest.mark.xdist_group(f"interpreted {number}"), *marks])
        for number, (names, switch, marks) in enumerate(BATCHES)
        for name in names
    ],
)
def test_a_case_is_right_in_the_interpreter(name: str, switch: str, request: pytest.FixtureRequest) -> None:
    (batch,) = (names for names, of_switch, _ in BATCHES if name in names and switch == of_switch)
    items = [item for item in request.session.items if getattr(item, "function", None) is request.function]
    chosen = {tuple(item.callspec.params[word] for word in ("name", "switch")) for item in items}
    check_case(name, "triton_cases.py", tuple(other for other in batch if (other, switch) in chosen), switch)


# Compiled ahead of time.


def launches_of(
    head_dim: int, dtype: torch.dtype, dropout_p: float, *, placed: bool = False
) -> list[tuple[str, object]]:
    from ringtile.kernels.triton.launches import Job, backward_launches, forward_launches

    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    pattern = Causal() & (Window(512) | GlobalTokens(64))
    head_at = torch.arange(4, 8) if placed else None
    call = call_of(pattern, 8192, 8192, 4, dropout_p=dropout_p, seed=seed, head_at=head_at)
    q, k, v = (torch.empty(1, 4, 8192, head_dim, dtype=dtype) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    job = Job(q, k, v, call)
    found = forward_launches(job, out, lse) + backward_launches(job, out, None, out, lse, q, k, v)
    return [(launch.kernel.__name__, launch) for launch in found]


LOOPING = ("forward_kernel", "dq_kernel", "dkdv_kernel")


PRODUCTS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}


@needs_triton
@pytest.mark.parametrize(
    ("target", "head_dim", "dtype", "dropout_p", "placed"),
    [
        ("sm_90", 128, torch.bfloat16, 0.0, False),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("sm_90", 128, torch.float16, 0.1, True),
                ("sm_80", 128, torch.bfloat16, 0.0, False),
                ("sm_100", 128, torch.bfloat16, 0.0, False),
                ("sm_120", 64, torch.float16, 0.0, False),
                ("sm_90", 64, torch.bfloat16, 0.0, False),
                ("sm_90", 64, torch.float16, 0.1, False),
                ("sm_90", 128, torch.float16, 0.1, False),
                ("sm_80", 64, torch.float16, 0.0, False),
                ("sm_100", 64, torch.float16, 0.0, False),
                ("sm_120", 128, torch.bfloat16, 0.0, False),
            )
        ),
    ],
)
def test_loops_use_the_tensor_cores_and_no_local_memory(
    target: str, head_dim: int, dtype: torch.dtype, dropout_p: float, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compiled import SHARED_BYTES, TRITON, compile_choice

    from ringtile.kernels.triton import launches

    monkeypatch.setattr(launches, "architecture", lambda device: int(target[3:]))
    for name, launch in launches_of(head_dim, dtype, dropout_p, placed=placed):
        if name in LOOPING:
            choice = launch.choices[0]
            assert choice.constants.PLACED == placed
            made = compile_choice(launch, choice, target)
            assert made.shared <= SHARED_BYTES[target], name
            loops = [loop for loop in made.loops() if any(PRODUCTS[target] in instruction for instruction in loop)]
            assert len(loops) == 2, f"{name}: full and partial tiles have a loop each"
            for loop in loops:
                text = "\n".join(loop)
                assert "LDGSTS" in text, f"{name}: nothing is copied ahead"
                spilled = sum("LDL" in instruction or "STL" in instruction for instruction in loop)
                # Triton 3.7 and 3.8 keep two or three numbers of this kernel in local memory on sm_90.
                spare = 4 if TRITON >= (3, 7) and (name, target, head_dim) == ("dkdv_kernel", "sm_90", 128) else 0
                assert spilled <= spare, f"{name}: registers are spilled"
                # The number of groups of copies that may still be on their way when a step begins.
                flying = [int(number, 16) for number in re.findall(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", text)]
                assert flying, f"{name}: nothing waits for the copies"
                assert choice.config.stages < 3 or min(flying) > 0, f"{name}: a step waits for all copies"
            if not dropout_p:
                full, partial = (sum("FSEL" in instruction for instruction in loop) for loop in loops)
                assert full == 0, f"{name}: full tiles are masked"
                assert partial > 0, f"{name}: the loops are in another order"


@needs_triton
@pytest.mark.parametrize("head_dim", [128, pytest.param(80, marks=pytest.mark.slow)])
def test_descriptors_serve_where_they_are_asked_for(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled import compile_choice

    from ringtile.kernels.triton import launches

    monkeypatch.setenv(VARIABLE, "tma")
    monkeypatch.setattr(launches, "architecture", lambda device: 80)
    narrow = launches_of(head_dim, torch.bfloat16, 0.0)
    assert not any(choice.constants.TMA for name, launch in narrow if name in LOOPING for choice in launch.choices)
    monkeypatch.setattr(launches, "architecture", lambda device: 90)
    for name, launch in launches_of(head_dim, torch.bfloat16, 0.0):
        if name in ("forward_kernel", "dq_kernel"):
            made = compile_choice(launch, launch.choices[0], "sm_90")
            # Keys and values in the loop over full tiles, and before it those of all stages but one.
            copies = 2 * launch.choices[0].config.stages
            assert sum("UTMALDG" in line for line in made.sass) == copies, name
            assert not any("LDL" in line for loop in made.loops() for line in loop), name


@needs_triton
def test_the_page_of_static_figures_is_that_of_the_record() -> None:
    import gpu_static

    record = json.loads(gpu_static.RECORD.read_text(encoding="utf-8"))
    assert gpu_static.PAGE.read_text(encoding="utf-8") == gpu_static.page(record), "run gpu_static.py --page"
    ours = [row for row in record["rows"] if row["who"] == "ringtile"]
    assert len(ours) == 4 * 2 * 3
    assert all(row[loop]["flying"] > 0 and not row[loop]["spills"] for row in ours for loop in ("full", "partial"))
    assert len(record["lists"]) == len(gpu_static.LAYERS) * len(gpu_static.LIST_TARGETS) * 3
    # AMD's compiler spills registers for the widest heads.
    assert not any(row["spills"] for row in record["lists"] if row["target"] != "gfx942")


@needs_triton
def test_a_model_of_a_loop_waits_for_copies_unless_they_are_ahead() -> None:
    from sass_model import Instruction, cycles, facts

    def loop(flying: int) -> list[Instruction]:
        texts = [f"DEPBAR.LE SB0, {flying:#x}", "HMMA.16816.F32 R4, R8, R12, R4", "LDGSTS.E.BYPASS.128 [R2], [R6]"]
        return [Instruction(16 * n, text, 2, 7, 7, 0) for n, text in enumerate([*texts, "LDGDEPBAR", "BRA 0x0"])]

    assert facts(loop(2))[:4] == (5, 1, 1, 0)
    assert facts(loop(2)).flying == 2
    waiting, half, ahead = (cycles(loop(flying), 1, 1, 600) for flying in (0, 1, 20))
    assert waiting > 600
    assert 2 * ahead < half < 0.6 * waiting


@needs_triton
@pytest.mark.parametrize(
    ("setting", "expected"), [("tf32", "tf32"), ("ieee", "ieee"), ("high", "tf32"), ("highest", "ieee")]
)
def test_products_of_float32_follow_either_setting_of_torch(
    setting: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringtile.kernels.triton.launches import Job

    q, matmul = torch.zeros(1, 1, 8, 16), torch.backends.cuda.matmul
    before = matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    try:
        if setting.startswith("high"):
            torch.set_float32_matmul_precision(setting)
        else:
            matmul.fp32_precision = setting
        monkeypatch.setattr(Tensor, "is_cuda", True)
        assert Job(q, q, q, call_of(Causal(), 8, 8, 1)).constants.PRECISION == expected
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before


def test_a_switch_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "tma,")
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected 'tma' or nothing, got 'tma,'"):
        wants_descriptors()


@needs_triton
@pytest.mark.parametrize(
    ("target", "head_dim", "dtype"),
    [
        ("sm_80", 16, torch.float32),
        ("gfx942", 128, torch.bfloat16),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("sm_90", 256, torch.bfloat16),
                ("sm_90", 80, torch.bfloat16),
                ("sm_70", 64, torch.float16),
                # These have the tiles of sm_70 or sm_80, and less shared memory.
                ("sm_75", 64, torch.float16),
                ("sm_86", 64, torch.float16),
                ("sm_89", 64, torch.bfloat16),
            )
        ),
    ],
)
def test_compiles(target: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled import SHARED_BYTES, compile_choice

    from ringtile.kernels.triton import launches

    monkeypatch.setattr(launches, "architecture", lambda device: int(target[3:]) if target.startswith("sm") else 0)
    for name, launch in launches_of(head_dim, dtype, 0.0):
        # As at a launch, the first that fits.
        sizes = (compile_choice(launch, choice, target).shared for choice in launch.choices)
        assert any(size <= SHARED_BYTES[target] for size in sizes), name


# The schedule.


def splits_of(order: object, group: int) -> list[list[int]]:
    first, last = order.begin[group : group + 2].tolist()
    return order.work[first:last].tolist()


def test_each_group_has_its_own_splits_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LONGEST", 1)
    clear_cache()
    index = build_index(per_head([Window(20) | GlobalTokens(3), Causal()]), 300, num_heads=2, block=64)
    for order, per_group, full, part in (
        (schedule_of(index).rows, index.n_rows, index.rows.full_ptr, index.rows.partial_ptr),
        (schedule_of(index).cols, index.n_cols, index.cols.full_ptr, index.cols.partial_ptr),
    ):
        lengths = (full + part).diff().tolist()
        assert order.n_scratch > 0
        assert order.longest >= max(len(splits_of(order, group)) for group in range(2))
        for group in range(2):
            splits = splits_of(order, group)
            assert {slot // per_group for slot, *_ in splits} == {group}
            sizes = [last - first for _, first, last, _ in splits]
            assert sizes == sorted(sizes, reverse=True)
            for slot in range(group * per_group, (group + 1) * per_group):
                own = sorted((first, last, scratch) for owner, first, last, scratch in splits if owner == slot)
                assert [first for first, *_ in own] == [0, *(last for _, last, _ in own[:-1])]
                assert own[-1][1] == lengths[slot]
                start, count = order.splits[slot].tolist()
                scratches = [scratch for *_, scratch in own]
                assert scratches == (list(range(start, start + count)) if count else [-1])
                assert max(scratches) < order.n_scratch
    clear_cache()


def test_a_schedule_reads_nothing_back_from_the_device() -> None:
    """Fake tensors have no values to read."""
    with FakeTensorMode():
        order = order_of(torch.empty(50, 4, dtype=torch.int32), 3, 10)
    assert (order.longest, order.n_scratch) == (30, 40)
    assert order.splits.shape == (30, 2)


def test_unused_splits_of_a_dynamic_index_belong_to_no_group() -> None:
    index = build_index(per_head([Causal(), Window(20)]), 300, num_heads=2)
    padded = torch.cat([index.rows.work, torch.full((5, 4), -1, dtype=torch.int32)])
    order, plain = (order_of(work, index.n_groups, index.n_rows) for work in (padded, index.rows.work))
    assert [splits_of(order, group) for group in range(2)] == [splits_of(plain, group) for group in range(2)]


# Launches.


@needs_triton
def test_the_first_configuration_that_fits_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from ringtile.kernels.triton import launches
    from ringtile.kernels.triton.tiles import Constants
    from ringtile.kernels.triton.tuning import Config

    tried: list[int] = []

    class Kernel:
        room = 2

        def __getitem__(self, grid: tuple[int]) -> object:
            def run(num_warps: int, num_stages: int, enable_fp_fusion: bool, C: Constants, x: int) -> None:
                assert (grid, x, C.BM) == ((10 * num_stages,), 7, num_stages)
                tried.append(num_stages)
                if num_stages > self.room:
                    raise OutOfResources(300_000, 232_448, "shared memory")

            return run

    choices = [launches.Choice(Config(64, 64, 4, n), Constants(BM=n), 10 * n) for n in (3, 2, 1)]
    launch = launches.Launch(Kernel(), {"x": 7}, choices)
    assert launch.run()[0] is choices[1]
    assert tried == [3, 2]
    monkeypatch.setattr(Kernel, "room", 0)
    with pytest.raises(OutOfResources):
        launch.run()


# Choice and errors.


def test_the_interpreter_computes_only_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(backend, "_FOUND", True)
    q = torch.empty(1, 1, 10, 16)
    call = call_of(Causal(), 10, 10, 1)
    assert backend.unsupported(q, q, q, call) == []
    assert backend.unsupported(q, q, q, call._replace(backend="")) == [
        "computes on the CPU only where it is asked for by name"
    ]


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "reason"),
    [
        ((1, 1, 10, 16), torch.float64, {}, "got q.dtype=torch.float64"),
        ((1, 1, 10, 16), torch.bfloat16, {}, "interpreter multiplies no bfloat16"),
        ((1, 1, 10, 257), torch.float32, {}, "knows head dims up to 256, got q.shape="),
        ((1, 1, 10, 16), torch.float32, {"softcap": 2.0}, "does not support softcap, got 2.0"),
        ((1, 1, 10, 16), torch.float32, {"alibi_slopes": torch.ones(1)}, "does not support alibi_slopes"),
    ],
)
def test_reasons(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(backend, "_FOUND", True)
    q = torch.empty(shape, dtype=dtype)
    (found,) = backend.unsupported(q, q, q, call_of(Causal(), 10, 10, 1, **options))
    assert reason in found


def test_named_without_a_gpu_it_says_what_it_needs() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    q = torch.randn(1, 1, 10, 16)
    with pytest.raises(ValueError, match=r"backend 'triton' does not support this call: needs .*GPU"):
        sparse_attention(q, q, q, Causal(), backend="triton")


def test_doctor_says_what_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    record = HERE.parent / "benchmarks" / "records" / "gpu.json"
    assert bool(backend.MEASURED_ON) == record.exists()
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["triton_measured_on"] == (backend.MEASURED_ON or None)
    lines = dict(_lines({**diagnosis(), "backends": {"triton": []}, "triton_measured_on": None}))
    assert lines["backend triton"] == "available, not measured on a GPU yet"


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["triton_cases.py", "triton_list_cases.py"])
def test_every_case_is_right_on_the_gpu(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run([sys.executable, HERE / script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_a_call_waits_for_nothing_and_is_captured() -> None:
    index = build_index(Causal() & (Window(300) | GlobalTokens(9)), 3000, num_heads=4, device="cuda")
    leaves = [torch.randn(1, 4, 3000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def step() -> list[Tensor]:
        out = sparse_attention(*leaves, index)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    wanted = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
