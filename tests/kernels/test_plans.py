"""Launch plans, graphs and streams of the Triton backend, on a GPU that is not there."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index import BlockIndex, clear_cache, lists, schedule
from ringtile.index.schedule import derived, schedule_of
from ringtile.kernels.contracts import Call
from ringtile.kernels.operators import is_unseen
from ringtile.patterns import Causal, GlobalTokens, Window

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from mock_gpu import Launched, MockGpu, mock_gpu

from ringtile.kernels.triton import launches, plans
from ringtile.kernels.triton.tuning import VARIABLE

N = 300


@pytest.fixture
def gpu() -> Iterator[MockGpu]:
    with mock_gpu(90) as found:
        yield found


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockIndex]:
    """An index whose rows and columns are split, so that all kernels run."""
    monkeypatch.setattr(lists, "LONGEST", 1)
    clear_cache()
    yield build_index(Causal() & (Window(20) | GlobalTokens(3)), N, num_heads=4)
    clear_cache()


def call_of(index: BlockIndex, **options: Any) -> Call:
    return Call(index.start, index.block, **{"scale": 0.1, "tiles": index.tensors(), "backend": "triton", **options})


def shifted(x: Tensor, elements: int = 1) -> Tensor:
    """A copy that begins some elements into its storage."""
    room = x.new_empty(x.numel() + elements)[elements:]
    return room.view(x.shape).copy_(x)


def by_token(x: Tensor) -> Tensor:
    """A copy laid out ``[B, N, H, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


Both = tuple[list[Any], list[Any], Call]
"""The arguments of the forward launches, those of the backward launches, and the call."""


def problem(
    index: BlockIndex,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = 4,
    batch: int = 1,
    change: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    lse_grad: bool = False,
    **options: Any,
) -> Both:
    shapes = {"q": 4, "k": kv_heads, "v": kv_heads, "out": 4, "out_grad": 4, "dq": 4, "dk": kv_heads, "dv": kv_heads}
    made = {name: change(name, torch.zeros(batch, heads, N, 64, dtype=dtype)) for name, heads in shapes.items()}
    for name in ("lse", "lse_grad"):
        made[name] = change(name, torch.zeros(batch, 4, N))
    q, k, v, out, lse = (made[name] for name in ("q", "k", "v", "out", "lse"))
    rows = [q, k, v, made["out_grad"], made["lse_grad"] if lse_grad else None, out, lse]
    return [q, k, v, out, lse], [*rows, made["dq"], made["dk"], made["dv"]], call_of(index, **options)


def only(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda other, x: change(x) if other == name else x


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"{name} is not aligned": {"change": only(name, shifted)} for name in ("q", "k", "v", "out", "out_grad", "dq")},
    "lse is not aligned": {"change": only("lse", shifted)},
    "q is less aligned": {"change": only("q", lambda x: shifted(x, 4))},
    **{f"{name} by token": {"change": only(name, by_token)} for name in ("q", "k", "v", "out", "out_grad")},
    "another scale": {"scale": 0.2},
    "a negative scale": {"scale": -0.1},
    "float32": {"dtype": torch.float32},
    "grouped heads": {"kv_heads": 2},
    "a batch": {"batch": 2},
    "a gradient of the lse": {"lse_grad": True},
    "a gradient of the lse that is not aligned": {"lse_grad": True, "change": only("lse_grad", shifted)},
    "dropout": {"dropout_p": 0.1, "seed": torch.zeros(1, dtype=torch.int64)},
    "more dropout": {"dropout_p": 0.2, "seed": torch.zeros(1, dtype=torch.int64)},
    "a seed that is not aligned": {"dropout_p": 0.1, "seed": shifted(torch.zeros(1, dtype=torch.int64))},
    "key bits": {"key_bits": torch.zeros(1, 10, dtype=torch.int32)},
    "key lengths": {"key_lengths": torch.full((1,), 9)},
    "key lengths in 32 bits": {"key_lengths": torch.full((1,), 9, dtype=torch.int32)},
}
SCRATCH = ("SCRATCH", "STATS")


def launch(gpu: MockGpu, make: Any, tensors: list[Any], call: Call, planned: bool = True) -> list[Launched]:
    """What a call launches, by a plan if there is one, or through Triton."""
    before = len(gpu.launches)
    if planned:
        plans._launch(make, tuple(tensors), call)
    else:
        for each in make(launches.Job(*tensors[:3], call), *tensors[3:]):
            each.run()
    found = gpu.launches[before:]
    del gpu.launches[before:]
    return found


def by_plan(found: list[Launched]) -> bool:
    """Whether addresses were filled in. Triton gets tensors."""
    return not any(isinstance(value, Tensor) for each in found for value in each.values)


MAKES = [launches.forward_launches, launches.backward_launches]


def same(found: list[Launched], wanted: list[Launched]) -> None:
    """Assert that two lists of launches differ at most in the addresses of scratch."""
    assert [each.name for each in found] == [each.name for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        # The source says what the kernel was specialized on.
        assert one.source is other.source, one.name
        assert (one.grid, one.stream) == (other.grid, other.stream)
        for name, value in one.arguments.items():
            expected = other.arguments[name]
            if name in SCRATCH:
                assert (value == 0) == (expected == 0), name
                assert value % 16 == 0
            else:
                assert (type(value), value) == (type(expected), expected), (one.name, name)


def test_a_plan_launches_what_triton_would(gpu: MockGpu, index: BlockIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_PLANS", 2 * len(VARIANTS))
    problems = {name: problem(index, **options) for name, options in VARIANTS.items()}
    for known in (False, True):
        for name, (forward, backward, call) in problems.items():
            for make, tensors in zip(MAKES, (forward, backward), strict=True):
                found = launch(gpu, make, tensors, call)
                # `out` and the gradients belong to one pass each, so some variants share their plans.
                assert by_plan(found) or not known, name
                same(found, launch(gpu, make, tensors, call, planned=False))
    names = {each.function.__name__ for each in gpu.kernels}
    assert names == {
        *("forward_kernel", "merge_kernel", "stats_kernel", "dq_kernel", "sum_dq_kernel", "dkdv_kernel"),
        "sum_dkdv_kernel",
    }


def test_a_tensor_that_comes_twice_is_not_taken_for_another(gpu: MockGpu, index: BlockIndex) -> None:
    (q, k, v, out, lse), _, call = problem(index)
    launch(gpu, MAKES[0], [q, q, q, out, lse], call)
    found = launch(gpu, MAKES[0], [q, k, v, out, lse], call)
    assert by_plan(found)
    assert [found[0].arguments[name] for name in "QKV"] == [x.data_ptr() for x in (q, k, v)]


def test_scratch_is_large_enough_and_apart(gpu: MockGpu, index: BlockIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    _, backward, call = problem(index)
    job = launches.Job(*backward[:3], call)
    MAKES[1](job, *backward[3:])
    sizes = [4 * x.numel() for x in job.scratch]
    assert len(sizes) == 3
    assert all(sizes)
    launch(gpu, MAKES[1], backward, call)
    made: list[Tensor] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> Tensor:
        made.append(empty(*size, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", noted)
    stats, dq, sum_dq, dkdv, sum_dkdv = launch(gpu, MAKES[1], backward, call)
    (scratch,) = made
    assert stats.arguments["STATS"] == dq.arguments["STATS"] == dkdv.arguments["STATS"]
    assert dq.arguments["SCRATCH"] == sum_dq.arguments["SCRATCH"]
    assert dkdv.arguments["SCRATCH"] == sum_dkdv.arguments["SCRATCH"]
    begins = [stats.arguments["STATS"], dq.arguments["SCRATCH"], dkdv.arguments["SCRATCH"]]
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    assert begins[0] >= scratch.data_ptr()
    assert all(begin >= end for begin, end in zip(begins[1:], ends, strict=False))
    assert ends[-1] <= scratch.data_ptr() + scratch.nbytes


def test_switches_are_followed(gpu: MockGpu, index: BlockIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    forward, _, call = problem(index, torch.float32)
    launch(gpu, MAKES[0], forward, call)
    (plain,) = (each.source for each in launch(gpu, MAKES[0], forward, call) if each.name == "forward_kernel")
    with monkeypatch.context() as patched:
        patched.setattr(launches, "allows_tf32", lambda x: True)
        patched.setattr(plans, "allows_tf32", lambda x: True)
        assert launch(gpu, MAKES[0], forward, call)[0].arguments["PRECISION"] == "tf32"
    with monkeypatch.context() as patched:
        patched.setattr(knobs.runtime, "debug", True)
        assert launch(gpu, MAKES[0], forward, call)[0].source is not plain
    with monkeypatch.context() as patched:
        patched.setenv(VARIABLE, "tma")
        assert launch(gpu, MAKES[0], forward, call)[0].arguments["TMA"] is True
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "7.0")
        before = len(plans_of(index))
        launch(gpu, MAKES[0], forward, call)
        patched.setattr(plans, "_NEAR", 0)
        launch(gpu, MAKES[0], forward, call)
        assert len(plans_of(index)) == before + 2
    assert launch(gpu, MAKES[0], forward, call)[0].source is plain


def plans_of(index: BlockIndex) -> Any:
    return derived(index, plans._plans)


def test_a_sweep_launches_each_configuration(gpu: MockGpu, index: BlockIndex) -> None:
    from gpu_prepare import forced

    from ringtile.kernels.triton.tuning import Config

    forward, _, call = problem(index)
    plain = launch(gpu, MAKES[0], forward, call)[0].arguments["BN"]
    for keys in (32, 64):
        with forced("forward", Config(64, keys, 4, 2)):
            for _ in range(2):
                arguments = launch(gpu, MAKES[0], forward, call)[0].arguments
                assert (arguments["BM"], arguments["BN"]) == (64, keys)
    assert launch(gpu, MAKES[0], forward, call)[0].arguments["BN"] == plain


def test_each_stream_has_its_own_plan(gpu: MockGpu, index: BlockIndex) -> None:
    forward, _, call = problem(index)
    for stream in (0, 7, 7, 0):
        gpu.stream = stream
        assert {each.stream for each in launch(gpu, MAKES[0], forward, call)} == {stream}
    assert len(plans_of(index)) == 2


def test_profilers_see_the_launches_of_a_plan(gpu: MockGpu, index: BlockIndex) -> None:
    from triton import knobs

    forward, _, call = problem(index)
    launch(gpu, MAKES[0], forward, call)
    seen: list[str] = []
    hook = lambda about: seen.append(about.get()["name"])  # noqa: E731
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
    try:
        found = launch(gpu, MAKES[0], forward, call)
    finally:
        for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            chain.remove(hook)
    assert by_plan(found)
    assert seen == ["forward_kernel", "forward_kernel", "merge_kernel", "merge_kernel"]


@pytest.mark.parametrize("tiles", [True, False])
def test_a_call_like_one_before_compiles_and_binds_nothing(
    gpu: MockGpu, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Causal() & Window(40)
    index = build_index(pattern, N, num_heads=4)

    def step() -> None:
        leaves = [torch.zeros(1, 4, N, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        out = sparse_attention(*leaves, index if tiles else pattern, backend="triton")
        torch.autograd.grad(out, leaves, torch.zeros_like(out))

    step()
    known, count = len(gpu.kernels), len(gpu.launches)
    gpu.launches.clear()
    monkeypatch.setattr(plans, "Job", None)
    step()
    assert (len(gpu.kernels), len(gpu.launches)) == (known, count)
    assert by_plan(gpu.launches)


@pytest.mark.parametrize("strange", [None, object()])
def test_a_kernel_that_triton_does_not_launch_has_no_plan(
    gpu: MockGpu, index: BlockIndex, strange: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launches.Launch.run
    monkeypatch.setattr(launches.Launch, "run", lambda self: (run(self)[0], strange))
    forward, _, call = problem(index)
    for _ in range(2):
        found = launch(gpu, MAKES[0], forward, call)
        assert len(found) == 2
        assert not by_plan(found)


def test_numbers_of_the_whole_problem_are_made_anew(gpu: MockGpu, index: BlockIndex) -> None:
    forward, _, call = problem(index, **VARIANTS["dropout"], head_at=torch.arange(4, 8))
    for _ in range(2):
        assert launch(gpu, MAKES[0], forward, call)[0].arguments["PLACED"] is True
    assert len(plans_of(index)) == 0


def test_an_index_that_changes_has_no_plan(gpu: MockGpu, index: BlockIndex) -> None:
    forward, _, call = problem(index)
    launch(gpu, MAKES[0], forward, call)
    assert len(plans_of(index)) == 1
    index.rows.full.add_(0)
    assert len(plans_of(index)) == 0


def test_merged_tiles_are_planned_and_kept(gpu: MockGpu) -> None:
    index = build_index(Causal() & Window(40), N, num_heads=4, block=32)
    forward, _, call = problem(index)
    launch(gpu, MAKES[0], forward, call)
    found = launch(gpu, MAKES[0], forward, call)
    assert by_plan(found)
    same(found, launch(gpu, MAKES[0], forward, call, planned=False))
    (plan,) = plans_of(index).values()
    kept = {x.data_ptr() for x in plan.kept if x.numel()}
    assert kept >= {found[0].arguments[name] for name in ("full_ptr", "work")}


def test_plans_are_bounded_and_end_with_their_index(gpu: MockGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_PLANS", 3)
    index = build_index(Causal() & Window(40), N, num_heads=4)
    clear_cache()
    for scale in range(1, 6):
        forward, _, call = problem(index, scale=float(scale))
        launch(gpu, MAKES[0], forward, call)
    table = plans_of(index)
    assert len(table) == 3
    inputs = [ref(x) for x in forward]
    assert not any(isinstance(x, Tensor) for plan in table.values() for step in plan.steps for x in step.arguments)
    kept = [ref(x) for plan in table.values() for x in plan.kept]
    assert kept
    tiles = ref(index.rows.full_ptr)
    del forward, _, call, table, index
    gc.collect()
    assert not any(x() is not None for x in (*inputs, *kept, tiles))


def test_the_memory_of_a_plan_lives_as_long_as_the_plan(gpu: MockGpu, index: BlockIndex) -> None:
    """Other values of the index can push its schedule out of the table."""
    forward, _, call = problem(index)
    launch(gpu, MAKES[0], forward, call)
    order = ref(schedule_of(index).rows.work)
    for number in range(schedule._VALUES - 1):
        plans_of(index)
        derived(index, lambda index, number: number, number)
    gc.collect()
    assert order() is not None
    assert launch(gpu, MAKES[0], forward, call)[0].arguments["work"] == order().data_ptr()  # type: ignore[union-attr]


# Graphs and streams.


def test_nothing_that_a_graph_captured_is_kept(gpu: MockGpu, index: BlockIndex) -> None:
    forward, backward, call = problem(index)
    gpu.capturing = True
    first, again = (launch(gpu, MAKES[0], forward, call) for _ in range(2))
    assert launch(gpu, MAKES[1], backward, call)
    gpu.capturing = False
    assert not schedule._table
    eager = launch(gpu, MAKES[0], forward, call)
    assert len({found[0].arguments["work"] for found in (first, again, eager)}) == 3


@pytest.fixture
def on_cuda(gpu: MockGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an index say that it is on the GPU."""
    monkeypatch.setattr(BlockIndex, "device", property(lambda self: torch.device("cuda", 0)))


@pytest.mark.parametrize("stream", [0, 3])
@pytest.mark.usefixtures("on_cuda")
def test_a_replay_after_a_warm_up_reads_memory_that_lives(gpu: MockGpu, index: BlockIndex, stream: int) -> None:
    forward, _, call = problem(index)
    (warm, *_) = launch(gpu, MAKES[0], forward, call)
    gpu.stream, gpu.capturing = stream, True
    (captured, *_) = launch(gpu, MAKES[0], forward, call)
    gpu.stream, gpu.capturing = 0, False
    names = [name for name in warm.arguments if name != "SCRATCH"]
    assert [captured.arguments[name] for name in names] == [warm.arguments[name] for name in names]
    assert gpu.waits == []
    order = ref(schedule_of(index).rows.work)
    assert order().data_ptr() == captured.arguments["work"]  # type: ignore[union-attr]
    del warm, captured
    # Neither other plans nor other values of the index may free what the graph reads.
    plans_of(index).clear()
    for number in range(2 * schedule._VALUES):
        derived(index, lambda index, number: number, number)
    gc.collect()
    assert order() is not None


@pytest.mark.usefixtures("on_cuda")
def test_another_stream_waits_for_the_schedule(gpu: MockGpu, index: BlockIndex) -> None:
    forward, _, call = problem(index)
    launch(gpu, MAKES[0], forward, call)
    launch(gpu, MAKES[0], forward, call)
    assert gpu.waits == []
    gpu.stream = 7
    launch(gpu, MAKES[0], forward, call)
    assert gpu.waits
    assert set(gpu.waits) == {(7, 0)}


def test_gpus_need_no_dispatcher_either(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert not is_unseen(x)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert is_unseen(x)
