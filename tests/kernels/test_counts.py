"""Costs that are counted, not timed: operator calls, pairs computed, bytes, index builds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import make_inputs, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringtile import BlockIndex, Pattern, build_index, sparse_attention
from ringtile.index import cache_info, clear_cache, schedule
from ringtile.kernels import blockwise
from ringtile.kernels.blockwise import plan
from ringtile.kernels.contracts import Call, Rows
from ringtile.patterns import (
    Causal,
    Dense,
    Documents,
    Elements,
    GlobalTokens,
    RandomBlocks,
    TileGrid,
    Window,
    per_head,
)
from ringtile.tools.memory import peak_memory

pytestmark = pytest.mark.unpoisoned

WINDOW = Causal() & Window(500)
WITH_GLOBAL = Causal() & (Window(500) | GlobalTokens(64))
RANDOM = Causal() & RandomBlocks(4)


class Recorder(TorchDispatchMode):
    """The operators that run, and the (query, key) pairs of torch's attention kernel, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if "flash_attention" in name:
            q, k = args[1:3] if name.endswith("backward") else args[:2]
            self.pairs += q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        return sum(count for name, count in self.calls.items() if "flash_attention" in name)


def forward_and_backward(index: BlockIndex, heads: int = 2, head_dim: int = 8, **options: Any) -> list[Recorder]:
    """What `blockwise` runs for one call, once it has seen the index."""
    q, k, v, out_grad = make_inputs(1, heads, index.n_queries, index.n_keys, head_dim, dtype=torch.float32)
    call = Call(index.start, index.block, 0.3, tiles=index.tensors(), backend="blockwise", **options)
    recorders = []
    for _ in range(2):
        with Recorder() as forward:
            out, lse = blockwise.forward(q, k, v, call)
        with Recorder() as backward:
            blockwise.backward(Rows(out_grad, None, q, k, v, out, lse), call)
        recorders = [forward, backward]
    return recorders


# Calls.


@pytest.mark.parametrize(
    ("pattern", "kernels", "calls"),
    [(WINDOW, 6, 550), (WITH_GLOBAL, 9, 800), (RANDOM, 15, 1300), (Window(500), 12, 900)],
    ids=repr,
)
def test_calls_are_few(pattern: Pattern, kernels: int, calls: int) -> None:
    index = build_index(pattern, 16384, num_heads=2)
    for recorder in forward_and_backward(index):
        assert 0 < recorder.kernels <= kernels
        assert sum(recorder.calls.values()) <= calls


@pytest.mark.parametrize("pattern", [WINDOW, Window(500)], ids=repr)
def test_calls_do_not_grow_with_the_rows(pattern: Pattern) -> None:
    short, long = (forward_and_backward(build_index(pattern, length), heads=1) for length in (2048, 8192))
    for few, many in zip(short, long, strict=True):
        assert few.calls == many.calls


@pytest.mark.parametrize("options", [{"dropout_p": 0.1, "seed": torch.tensor([3])}, {"softcap": 3.0}], ids=str)
def test_calls_with_options_do_not_grow_with_the_rows(options: dict[str, Any]) -> None:
    pattern = Causal() & Window(130)
    short, long = (
        forward_and_backward(build_index(pattern, length, block=64), heads=1, head_dim=4, **options)
        for length in (512, 1024)
    )
    for few, many in zip(short, long, strict=True):
        assert few.kernels == 0
        assert few.calls["bmm"] == many.calls["bmm"]
        assert sum(many.calls.values()) <= 1.3 * sum(few.calls.values())


# Work.


@pytest.mark.parametrize(
    "pattern", [WINDOW, WITH_GLOBAL, RANDOM, Window(500), Causal() & Documents([2000, 2096, 4096])], ids=repr
)
def test_only_kept_tiles_are_computed(pattern: Pattern) -> None:
    index = build_index(pattern, 8192, num_heads=2)
    kept = index.kept_tiles * 128 * 128 * 2 // index.group.numel()
    for recorder in forward_and_backward(index):
        assert recorder.pairs == kept
    assert kept < 0.5 * 2 * 8192 * 8192


def test_heads_pay_for_their_own_tiles() -> None:
    index = build_index(per_head([Causal() & Window(100), ~Dense(), Causal(), Window(100)]), 4096, num_heads=4)
    forward, backward = forward_and_backward(index, heads=4)
    assert forward.pairs == backward.pairs == index.kept_tiles * 128 * 128


def test_ragged_lengths_pay_for_their_tiles_alone() -> None:
    index = build_index(WINDOW, 5000, 8100)
    assert index.start % 128
    for recorder in forward_and_backward(index, heads=1):
        assert 0.9 * index.kept_tiles * 128 * 128 < recorder.pairs <= index.kept_tiles * 128 * 128


# Memory.

MIB = 1 << 20


def peaks_of(
    pattern: Pattern, length: int, head_dim: int = 64, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[int, int]:
    """The peak bytes of the forward and of the backward pass."""
    q, k, v, out_grad = make_inputs(1, 1, length, head_dim=head_dim, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    build_index(pattern, length)

    def forward() -> Tensor:
        return sparse_attention(*leaves, pattern, **options)

    def backward(out: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(out, leaves, out_grad)

    peaks = peak_memory(forward, backward, torch.device("cpu"))
    assert peaks.backward is not None
    return peaks.forward, peaks.backward


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [(Window(1024), "native"), pytest.param(Causal() & Window(1024), "blockwise", marks=pytest.mark.slow)],
    ids=str,
)
def test_a_window_over_131072_tokens_needs_64_mib(pattern: Pattern, backend: str) -> None:
    for peak in peaks_of(pattern, 131072, backend=backend):
        assert 0 < peak <= 64 * MIB


@pytest.mark.parametrize(
    ("dtype", "threads", "wide_gradients"), [(torch.bfloat16, 1, 1), (torch.float16, 2, 0)], ids=str
)
def test_half_types_have_wide_gradients_where_they_grow(dtype: torch.dtype, threads: int, wide_gradients: int) -> None:
    torch.set_num_threads(threads)
    _, backward = peaks_of(WITH_GLOBAL, 65536, dtype=dtype, backend="native")
    wide = wide_gradients * 65536 * 64 * 4
    assert wide < backward <= wide + 4 * MIB


@pytest.mark.parametrize("pattern", [WITH_GLOBAL, RANDOM, Window(200)], ids=repr)
def test_memory_follows_the_tokens_not_the_tiles(pattern: Pattern) -> None:
    short, long = (peaks_of(pattern, length, head_dim=8, backend="blockwise") for length in (16384, 32768))
    assert all(many <= 2.2 * few + MIB for few, many in zip(short, long, strict=True))
    # All scores at once would take 1 GiB.
    assert long[1] <= 64 * MIB


def test_dense_scores_are_never_held() -> None:
    for pattern, options in ((Elements(lambda h, i, j: (i * 7 + j) % 3 > 0), {}), (Causal(), {"softcap": 2.0})):
        forward, backward = peaks_of(pattern, 4096, head_dim=8, backend="blockwise", **options)
        assert forward < 4096 * 4096 * 4
        assert backward < 2 * 4096 * 4096 * 4


# Builds.


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[BlockIndex]:
    made: list[BlockIndex] = []
    make: Callable[[BlockIndex], plan.Plan] = plan._make_plan

    def counted(index: BlockIndex) -> plan.Plan:
        made.append(index)
        return make(index)

    monkeypatch.setattr(plan, "_make_plan", counted)
    clear_cache()
    return made


@pytest.mark.parametrize("pattern", [WITH_GLOBAL, Elements(lambda h, i, j: (i + j) % 3 > 0)], ids=["text", "no text"])
def test_one_build_serves_many_calls(pattern: Pattern, plans_made: list[BlockIndex]) -> None:
    q, k, v, _ = make_inputs(1, 2, 200)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(5):
        out = sparse_attention(*leaves, pattern)
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        torch.autograd.grad(first[0].sum(), leaves)
        with torch.no_grad():
            sparse_attention(*leaves, pattern, key_mask=torch.rand(1, 200) < 0.5)
            sparse_attention(*(x.float() for x in leaves), pattern)
    index = build_index(pattern, 200, num_heads=2)
    sparse_attention(*leaves, index, backend="blockwise").sum().backward()
    assert cache_info().misses == 1
    assert len(plans_made) == 1


@pytest.mark.parametrize("backend", ["blockwise", "native"])
def test_lists_that_serve_another_start_are_planned_anew(backend: str) -> None:
    q, k, v, _ = make_inputs(1, 1, 200)
    index = build_index(Window(30), 200)
    moved = BlockIndex.from_tensors(index.tensors(), TileGrid(128, 28, 200, 200))
    for served in (index, moved, index):
        out = sparse_attention(q, k, v, served, backend=backend)
        assert relative_error(out, sparse_attention(q, k, v, served, backend="reference")) < 1e-12


def live_bytes() -> int:
    gc.collect()
    # Refused tensors of other tests can still be alive.
    dense = [x for x in gc.get_objects() if type(x) is Tensor and x.layout == torch.strided]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in dense}
    return sum(storages.values())


def test_many_steps_leave_memory_and_cache_flat(plans_made: list[BlockIndex]) -> None:
    weights = torch.randn(3, 8, 8, requires_grad=True)
    pattern = Elements(lambda h, i, j: i - j < 50)
    gc.collect()
    # Indices of other tests can still be alive.
    others = len(schedule._table)

    def train(steps: int) -> tuple[int, ...]:
        for step in range(steps):
            x = torch.randn(1, 2, 300 + step % 20, 8)
            weights.grad = None
            for served in (WITH_GLOBAL, pattern):
                for backend in ("blockwise", "native"):
                    out = sparse_attention(*(x @ weight for weight in weights), served, backend=backend)
                    out.square().sum().backward()
        return live_bytes(), cache_info().nbytes, cache_info().misses, len(schedule._table) - others, len(plans_made)

    first = train(20)
    # The lengths touch the same tile: one index serves them all, unless its rule is bound to them.
    assert first[2:] == (21, 21, 40)
    assert train(60) == first
    assert train(60) == first


def test_a_dropped_index_takes_its_plan_along() -> None:
    clear_cache()
    gc.collect()
    before, bytes_before = len(schedule._table), live_bytes()
    q, k, v, _ = make_inputs(1, 2, 150)
    for number in range(50):
        index = build_index(Window(number), 150)
        sparse_attention(q, k, v, index)
        sparse_attention(q, k, v, index, backend="blockwise")
        clear_cache()
    del index
    gc.collect()
    assert len(schedule._table) == before
    assert live_bytes() - bytes_before < 5 * q.nbytes
