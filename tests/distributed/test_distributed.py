"""Attention over ranks against one process: bits of the output and of the query's gradient, traffic, plans."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from oracle import Inputs, make_inputs, oracle, relative_error, rule_everywhere
from pairs import all_pairs
from processes import Traffic, counted_traffic, on_ranks, one_rank
from strategies import patterns
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringtile.distributed import (
    Layout,
    PlanMismatch,
    RingPlan,
    exchange,
    make_plan,
    plan as plan_module,
    ring_attention,
    ring_dilated_attention,
    roll,
    transports,
)
from ringtile.distributed.exchange import Exchange
from ringtile.distributed.layout import positions_of
from ringtile.distributed.lockstep import Facts
from ringtile.distributed.process_groups import of_group
from ringtile.distributed.transports import group_of
from ringtile.functional import parts, sparse_attention
from ringtile.kernels.contracts import Call
from ringtile.kernels.native.library import reason_against
from ringtile.kernels.select import select
from ringtile.patterns import (
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Segments,
    Strided,
    Window,
    per_head,
)
from ringtile.patterns.base import TileGrid

N_TOKENS = 700
CAUSAL = Causal()
PATTERNS = {
    "window": CAUSAL & Window(200),
    "both sides": Window(100, 170),
    "global tokens": Window(60) | GlobalTokens(40),
    "causal": CAUSAL,
    "dense": Dense(),
    "dilated": CAUSAL & Dilated([1, 4, 16], 20),
    "random": CAUSAL & (Window(50) | RandomBlocks(2)),
    "strided": CAUSAL & Strided(64),
    "documents": CAUSAL & Documents([300, 3, 200, 197]),
    "segments": CAUSAL & (Segments(256, 2) | Segments(512, 4)),
    "per head": per_head([CAUSAL & Window(100), CAUSAL, CAUSAL & GlobalTokens(5), Window(50)]),
    "empty rows": CAUSAL & ~Window(250),
    "a rule": Elements(lambda head, query, key: (query * 7 + key * 3) % 5 < 2),
    "blocks": Blocks(torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.4),
}
LAYOUTS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "equal": lambda n, ranks: Layout.contiguous(n, ranks, unit=1),
    "equal zigzag": lambda n, ranks: Layout.zigzag(n, ranks, unit=1),
}
RANKS = (2, 3, 4, 8, 1)


def split_results(layout: Layout, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: layout.unshard([results[name] for results in found]) for name in found[0]}


def attend_apart(
    problem: Inputs, grad_lse: Tensor, pattern: Pattern, layout: Layout, rank: int, **options: Any
) -> dict[str, Tensor]:
    """One rank's output, lse and gradients."""
    q, k, v, grad_out = (layout.shard(x, rank).clone() for x in problem)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "key_mask" in options:
        options["key_mask"] = layout.shard(options["key_mask"], rank, 1)
    out, lse = ring_attention(*leaves, pattern, layout=layout, enable_gqa=True, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out, layout.shard(grad_lse, rank)))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip("qkv", grads, strict=True))}


def attend_whole(problem: Inputs, grad_lse: Tensor, pattern: Pattern, **options: Any) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    out, lse = sparse_attention(*leaves, pattern, start=0, enable_gqa=True, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), leaves, (problem.grad_out, grad_lse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip("qkv", grads, strict=True))}


class Expected(NamedTuple):
    problem: Inputs
    grad_lse: Tensor
    whole: dict[str, Tensor]
    """Results of one process."""
    exact: dict[str, Tensor]
    """Results in float64."""


def expected_of(pattern: Pattern, problem: Inputs, **options: Any) -> Expected:
    grad_lse = torch.randn(problem.q.shape[:3], dtype=torch.float64)
    whole = attend_whole(problem, grad_lse, pattern, **options)
    exact = oracle(*problem[:3], pattern, grad_out=problem.grad_out, grad_lse=grad_lse, start=0, **options)
    return Expected(problem, grad_lse, whole, {"out": exact.out, "lse": exact.lse, **exact.grads})


@cache
def expected_of_named(name: str) -> Expected:
    return expected_of(PATTERNS[name], make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=2, value_dim=4))


def group_for(shape: tuple[int, ...]) -> DeviceMesh | None:
    """A mesh with two dimensions or more, or the default group."""
    return None if len(shape) < 2 else init_device_mesh("cpu", shape)


def check_calls(
    pattern: Pattern,
    layout: Layout,
    expected: Expected,
    *calls: dict[str, Any],
    same: Iterable[str] = (),
    shape: tuple[int, ...] = (),
) -> None:
    """All results of float64, those in ``same`` with the bits of one process. All calls have the bits of the first."""
    problem, grad_lse, whole, exact = expected

    def run(rank: int) -> list[dict[str, Tensor]]:
        group = group_for(shape)
        return [attend_apart(problem, grad_lse, pattern, layout, rank, group=group, **how) for how in calls]

    results, *others = (
        split_results(layout, list(found)) for found in zip(*on_ranks(layout.n_ranks, run), strict=True)
    )
    for name in same:
        assert torch.equal(results[name], whole[name]), name
    for name, x in results.items():
        assert relative_error(x, exact[name]) < 1e-12, name
        assert all(torch.equal(x, found[name]) for found in others), name


def has_whole_tiles(layout: Layout) -> bool:
    return all(begin % 128 == 0 and end % 128 in (0, layout.n_tokens % 128) for begin, end in layout.runs[0])


def check_ranks(pattern: Pattern, layout: Layout, expected: Expected, **options: Any) -> None:
    """All results of exchange, with and without overlap."""
    # A part of a tile can have so few queries that another kernel computes it. Without the native kernel, softcap and
    # ALiBi take PyTorch's matrix products, whose sums depend on their sizes and on the processor.
    own_sums = not reason_against() or not options.keys() & {"softcap", "alibi_slopes"}
    exact_bits = has_whole_tiles(layout) and own_sums
    calls = [{"transport": "exchange", **options, "overlap": overlap} for overlap in (True, False)]
    check_calls(pattern, layout, expected, *calls, same=("out", "lse", "q") if exact_bits else ())


@pytest.mark.parametrize(
    ("name", "layout", "n_ranks"),
    [
        (name, layout, RANKS[(row + column) % 5])
        for row, name in enumerate(PATTERNS)
        for column, layout in enumerate(LAYOUTS)
        if (3 * row + column) % 5 in (1, 2)
    ],
)
def test_ranks_give_the_bits_of_one_process(name: str, layout: str, n_ranks: int) -> None:
    """Every pattern in two layouts, and every layout with every number of ranks."""
    check_ranks(PATTERNS[name], LAYOUTS[layout](N_TOKENS, n_ranks), expected_of_named(name))


@pytest.mark.parametrize(
    ("name", "layout", "n_ranks"),
    [
        (("causal", "dense")[(row + column) % 2], layout, n_ranks)
        for row, layout in enumerate(LAYOUTS)
        for column, n_ranks in enumerate(RANKS)
        if (row + column) % 5 in (2, 3)
    ],
)
def test_keys_pass_around_a_ring(name: str, layout: str, n_ranks: int) -> None:
    """Every layout with two numbers of ranks, and both with either pattern."""
    expected, made = expected_of_named(name), LAYOUTS[layout](N_TOKENS, n_ranks)
    check_transport("ring", PATTERNS[name], made, expected)


@pytest.mark.parametrize(
    ("name", "layout", "n_ranks"),
    [(name, ("zigzag", "equal")[row % 2], RANKS[row % 5]) for row, name in enumerate(list(PATTERNS)[::2])],
)
def test_every_rank_gets_all_keys(name: str, layout: str, n_ranks: int) -> None:
    check_transport("gather", PATTERNS[name], LAYOUTS[layout](N_TOKENS, n_ranks), expected_of_named(name))


def check_transport(transport: str, pattern: Pattern, layout: Layout, expected: Expected, **options: Any) -> None:
    """All results of a transport, twice."""
    shape, how = options.pop("nodes", ()), {"transport": transport, **options}
    check_calls(pattern, layout, expected, how, how, shape=shape)


@pytest.mark.parametrize("transport", ["exchange", "gather", "ring", "ulysses", "hierarchy"])
def test_a_batch_can_be_empty(transport: str) -> None:
    layout = Layout.contiguous(N_TOKENS, 4)

    def run(rank: int) -> None:
        leaves = [torch.randn(0, 4, layout.size(rank), 8, requires_grad=True) for _ in range(3)]
        pattern = CAUSAL if transport == "ring" else CAUSAL & (Window(60) | GlobalTokens(3))
        mask = torch.ones(0, layout.size(rank), dtype=torch.bool)
        group = init_device_mesh("cpu", (2, 2)) if transport == "hierarchy" else None
        out = ring_attention(*leaves, pattern, layout=layout, transport=transport, key_mask=mask, group=group)
        assert out.shape == leaves[0].shape
        for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
            assert grad.shape == leaf.shape

    on_ranks(4, run)


def test_the_default_transport() -> None:
    def calls(pattern: Pattern, n_ranks: int, **options: Any) -> list[str]:
        layout = Layout.contiguous(N_TOKENS, n_ranks)

        def run(rank: int) -> list[str]:
            x = torch.randn(1, 2, layout.size(rank), 8)
            ring_attention(x, x, x, pattern, layout=layout, **options)
            return getattr(local, "traffic", Traffic()).calls

        with counted_traffic() as local:
            return on_ranks(n_ranks, run)[0]

    assert calls(CAUSAL & Window(100), 3) == ["all_to_all_single"]
    assert calls(CAUSAL, 3) == ["batch_isend_irecv"] * 2
    assert calls(CAUSAL, 1) == []
    assert calls(CAUSAL, 3, dropout_p=0.1) == ["all_to_all_single"]
    assert calls(~CAUSAL, 5) == ["broadcast"] * 5
    assert calls(Segments(128), 3) == []


@pytest.mark.parametrize(("n_tokens", "layout"), [(1, "zigzag"), (100, "equal"), (300, "zigzag"), (513, "equal")])
def test_more_ranks_than_tiles(n_tokens: int, layout: str) -> None:
    pattern = CAUSAL & (Window(90) | GlobalTokens(3))
    expected = expected_of(pattern, make_inputs(2, 2, n_tokens, head_dim=8))
    check_ranks(pattern, LAYOUTS[layout](n_tokens, 8), expected)


@pytest.mark.parametrize("layout", ["contiguous", "equal zigzag"])
def test_masks_and_lengths_reach_the_ranks_that_need_them(layout: str) -> None:
    lengths, mask = torch.tensor([N_TOKENS, 0, 450]), torch.rand(3, N_TOKENS) < 0.8
    problem, both = make_inputs(3, 2, N_TOKENS, head_dim=8), {"key_mask": mask, "key_lengths": lengths}
    for pattern, options in (
        (CAUSAL & Window(60), {"key_mask": mask}),
        (CAUSAL & Window(60), {"key_lengths": lengths}),
        (CAUSAL & (Window(60) | GlobalTokens(40)), both),
    ):
        expected = expected_of(pattern, problem, **options)
        check_ranks(pattern, LAYOUTS[layout](N_TOKENS, 5), expected, **options)


@settings(max_examples=15)
@given(st.data())
def test_plans_of_all_ranks_fit_together(data: st.DataObject) -> None:
    n_tokens, n_ranks = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 5))
    grid = TileGrid(16, 0, n_tokens, n_tokens)
    pattern = data.draw(patterns(grid, operators=1))
    layout = data.draw(st.sampled_from([Layout.contiguous, Layout.zigzag, Layout.striped]))(
        n_tokens, n_ranks, unit=data.draw(st.sampled_from([1, 5, 16, 32]))
    )
    plans = [make_plan(pattern, layout, rank, block=16) for rank in range(n_ranks)]
    assert len({plan.fingerprint for plan in plans}) == 1
    kept = rule_everywhere(pattern, grid)
    for plan in plans:
        mine, parts = layout.positions(plan.rank), [positions_of(part) for part in plan.buffer]
        buffer = torch.cat(parts)
        assert plan.n_tokens == len(mine)
        # What arrives is what was sent, in the same order, and fills the buffer once.
        filled = torch.full((plan.n_buffer,), -1)
        for source, target in zip(*plan.own, strict=True):
            filled[slice(*target)] = mine[slice(*source)]
        for other in plans:
            theirs = layout.positions(other.rank)
            wire = torch.cat([theirs[:0], *(theirs[a:b] for a, b in other.sent[plan.rank])])
            places = torch.cat([theirs[:0], *(torch.arange(a, b) for a, b in plan.received[other.rank])])
            assert (filled[places] == -1).all()
            filled[places] = wire
            broadcast = torch.cat([theirs[:0], *(theirs[a:b] for a, b in other.hot[other.rank])])
            for source, target in zip(*plan.hot_copies[other.rank], strict=True):
                assert (filled[slice(*target)] == -1).all()
                filled[slice(*target)] = broadcast[slice(*source)]
            assert plan.hot == other.hot
        assert torch.equal(filled, buffer)
        # Every row's keys are there.
        assert [piece.begin for piece in plan.pieces] + [len(mine)] == [0, *(piece.end for piece in plan.pieces)]
        for piece in plan.pieces:
            keys = mine if piece.source == "own" else buffer[plan.part(piece.source)]
            rows = mine[piece.begin : piece.end]
            assert torch.equal(piece.index.to_dense()[0, 0], kept[rows][:, keys])
            absent = torch.ones(n_tokens, dtype=torch.bool)
            absent[keys] = False
            assert not kept[rows][:, absent].any()


def traffic_of(
    pattern: Pattern, layout: Layout, rank: int, heads: int, head_dim: int, dtype: torch.dtype
) -> list[tuple[int, int]]:
    """Bytes that a rank sends and receives in the forward pass, then in both passes, without data."""
    dist.init_process_group("fake", rank=rank, world_size=layout.n_ranks, store=FakeStore())
    try:
        plan = make_plan(pattern, layout, rank)
        made = Exchange(plan, Facts("exchange"), group_of(None))
        found = []
        with FakeTensorMode(), counted_traffic() as local:
            k, v = (torch.empty(1, heads, plan.n_tokens, head_dim, dtype=dtype) for _ in range(2))
            buffers = made.finish((k, v), *made.start((k, v)))
            found.append((local.traffic.sent, local.traffic.received))
            made.finish_back(buffers, made.start_cold_back(buffers), made.start_hot_back(buffers))
            found.append((local.traffic.sent, local.traffic.received))
        return found
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask once what all ranks need, not once per rank: it is the most of a plan of many ranks."""
    monkeypatch.setattr(plan_module, "find_demand", cache(plan_module.find_demand))


MILLION, MIB = 1 << 20, 1 << 20
WINDOW = CAUSAL & Window(4096)


@pytest.mark.usefixtures("one_demand")
@pytest.mark.parametrize(("n_ranks", "stride"), [(64, 9), (1024, 341)])
def test_a_window_of_a_million_tokens_sends_only_its_halo(n_ranks: int, stride: int) -> None:
    """Keys of 16 MiB travel from rank to rank, and their gradients back."""
    layout = Layout.contiguous(MILLION, n_ranks)
    # 9 divides 63, and 341 divides 1,023, so that the first and the last rank are among them.
    for rank in {*range(0, n_ranks, stride), 1, 3, 4, n_ranks - 5, n_ranks - 4, n_ranks - 2}:
        (sent, received), (sent_twice, received_twice) = traffic_of(WINDOW, layout, rank, 8, 128, torch.bfloat16)
        # At 1,024 ranks a window reaches over the four ranks before.
        assert received == min(16, rank * 4096 / n_ranks) * MIB
        assert sent == min(16, (n_ranks - 1 - rank) * 4096 / n_ranks) * MIB
        assert sent_twice == received_twice == sent + received


@pytest.mark.usefixtures("one_demand")
def test_sinks_and_two_runs_of_a_million_tokens_send_little_more() -> None:
    n_ranks = 1024
    ranks = {0, 1, n_ranks // 2, n_ranks - 1}
    for pattern, make, most in (
        (WINDOW | CAUSAL & GlobalTokens(128), Layout.contiguous, 17),
        (WINDOW, Layout.zigzag, 32),
    ):
        layout = make(MILLION, n_ranks)
        for rank in ranks:
            (sent, received), _ = traffic_of(pattern, layout, rank, 8, 128, torch.bfloat16)
            assert max(sent, received) <= most * MIB


@pytest.mark.parametrize(
    ("transport", "layout", "name"),
    all_pairs(["exchange", "gather"], ["contiguous", "equal zigzag"], ["window", "global tokens", "documents"]),
)
def test_collectives_get_the_planned_bytes(transport: str, layout: str, name: str) -> None:
    expected, made = expected_of_named(name), LAYOUTS[layout](N_TOKENS, 4)

    def run(rank: int) -> None:
        how = {"transport": transport}
        with_grad = attend_apart(expected.problem, expected.grad_lse, PATTERNS[name], made, rank, **how)
        assert with_grad["out"].shape[2] == made.size(rank)
        plan = make_plan(PATTERNS[name], made, rank, num_heads=4, gather=transport == "gather")
        width = 2 * (8 + 4) * 8
        hot, all_hot = plan.tokens_hot[rank], sum(plan.tokens_hot)
        sent, received = sum(plan.tokens_sent) + hot, sum(plan.tokens_received) + all_hot - hot
        assert local.traffic.sent == local.traffic.received == (sent + received) * width
        broadcasts = sum(tokens > 0 for tokens in plan.tokens_hot)
        mixed = [] if transport == "gather" else ["all_to_all_single"]
        first, last = ["broadcast"] * broadcasts, ["reduce"] * broadcasts
        if transport == "gather" and layout == "equal zigzag":
            # 175 tokens for each rank.
            first, last = ["all_gather_single"], ["reduce_scatter_single"]
        calls = [name.replace("into_tensor", "single").replace("tensor", "single") for name in local.traffic.calls]
        assert calls == first + mixed + mixed + last
        # As the call is new to all ranks, and in both passes.
        assert local.traffic.compared == 3 * 16

    with counted_traffic() as local:
        on_ranks(4, run)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_of_broadcast_tokens_wait_for_no_others(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, made = CAUSAL & (Window(60) | GlobalTokens(40)), LAYOUTS[layout](2048, 4)
    problem, mask = make_inputs(1, 2, 2048, head_dim=8, kv_heads=1, value_dim=4), torch.rand(1, 2048) < 0.9
    expected = expected_of(pattern, problem, key_mask=mask)
    check_ranks(pattern, made, expected, key_mask=mask)
    check_transport("gather", pattern, made, expected, key_mask=mask)
    events = threading.local()
    finish_cold = Exchange.finish_cold

    def selected(query: Tensor, key: Tensor, value: Tensor, call: Call) -> str:
        events.found.append(query.shape[2])
        return select(query, key, value, call)

    def finished(*arguments: Any) -> None:
        events.found.append("arrived")
        finish_cold(*arguments)

    monkeypatch.setattr(parts, "select", selected)
    monkeypatch.setattr(Exchange, "finish_cold", finished)

    def run(rank: int) -> list[int | str]:
        events.found = []
        q, k, v = (made.shard(x, rank) for x in problem[:3])
        ring_attention(q, k, v, pattern, layout=made, enable_gqa=True, transport="exchange")
        return list(events.found)

    # Zigzag ranks have the first half of their rows in one chunk, and a row tile with a halo in each.
    assert on_ranks(4, run)[2] == ([384, "arrived", 128] if layout == "contiguous" else [128, 128, "arrived", 128, 128])


def test_a_call_that_fails_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, layout = CAUSAL & Window(60), Layout.contiguous(512, 2)
    has_room, gate = threading.Event(), threading.Barrier(2)

    def selected(*arguments: Any) -> str:
        # While keys travel.
        if not has_room.is_set():
            raise torch.OutOfMemoryError("no room")
        return select(*arguments)

    def attend(rank: int) -> None:
        x = torch.randn(1, 2, layout.size(rank), 8)
        ring_attention(x, x, x, pattern, layout=layout)

    def run(rank: int) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            attend(rank)
        gate.wait()
        has_room.set()
        gc.collect()
        attend(rank)

    monkeypatch.setattr(parts, "select", selected)
    on_ranks(2, run)
    assert not exchange._in_flight


def test_what_was_received_is_saved_and_no_buffer() -> None:
    pattern, layout = CAUSAL & (Window(60) | GlobalTokens(40)), Layout.contiguous(3072, 4)

    def run(rank: int) -> int:
        q, k, v = torch.randn(3, 1, 2, layout.size(rank), 8, requires_grad=True).unbind()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            out, lse = ring_attention(q, k, v, pattern, layout=layout, return_lse=True)
        return sum(x.numel() for x in saved) - sum(x.numel() for x in (q, k, v, out, lse))

    # A tile of global tokens at all ranks, the owner's too, and a halo of one tile.
    assert on_ranks(4, run) == [128 * 2 * 16] + [2 * 128 * 2 * 16] * 3


def test_gradients_in_bfloat16_keep_their_digits_with_more_ranks() -> None:
    n_tokens = 8192
    problem = make_inputs(1, 1, n_tokens, head_dim=16, dtype=torch.bfloat16)
    exact = attend_whole(Inputs(*(x.double() for x in problem)), torch.zeros(1, 1, n_tokens).double(), CAUSAL)

    def errors(n_ranks: int) -> tuple[float, float]:
        layout = Layout.zigzag(n_tokens, n_ranks)

        def run(rank: int) -> dict[str, Tensor]:
            return attend_apart(problem, torch.zeros(1, 1, n_tokens), CAUSAL, layout, rank, transport="exchange")

        results = split_results(layout, on_ranks(n_ranks, run))
        return relative_error(results["k"], exact["k"]), relative_error(results["v"], exact["v"])

    for few, many in zip(errors(2), errors(32), strict=True):
        assert many < 1.1 * few


def test_autocast_casts_before_the_exchange() -> None:
    layout = Layout.contiguous(N_TOKENS, 2)
    problem = make_inputs(1, 2, N_TOKENS, head_dim=8, dtype=torch.float32)

    def run(rank: int) -> int:
        q, k, v = (layout.shard(x, rank) for x in problem[:3])
        with torch.autocast("cpu", torch.bfloat16):
            out = ring_attention(q, k, v, CAUSAL & Window(60), layout=layout)
        assert out.dtype == torch.bfloat16
        return local.traffic.sent

    with counted_traffic() as local:
        # One tile of keys and values of two heads.
        assert on_ranks(2, run) == [128 * 2 * (8 + 8) * 2, 0]


DEFAULTS: dict[Any, dict[str, Any]] = {
    ring_attention: {"pattern": CAUSAL & Window(50)},
    ring_dilated_attention: {"segment_lengths": [64, 512], "dilation_rates": [1, 2]},
    roll: {"shifts": 1, "dim": 2},
}
NOT_FINITE = "key: expected finite numbers, got NaN or infinity at rank 0 of layer 2"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (ring_attention, {"layout": Layout.contiguous(300, 3)}, "layout: expected a Layout for 1 ranks"),
    (ring_attention, {"layout": Layout.contiguous(301, 1)}, "query: expected the 301 tokens of rank 0"),
    (ring_attention, {"transport": "carrier pigeon"}, "transport: expected one of"),
    (ring_attention, {"transport": "ring"}, "transport 'ring' does not support this call: supports the patterns dense"),
    (ring_attention, {"dropout_p": 2.0}, "dropout_p"),
    (ring_attention, {"dropout": 0.1}, r"unexpected keyword arguments \['dropout'\], expected some of"),
    (ring_attention, {"key_mask": torch.ones(1, 5, dtype=torch.bool)}, "key_mask: expected shape"),
    (ring_attention, {"key_lengths": torch.tensor([301])}, r"key_lengths: expected values in \[0, 300\]"),
    (ring_attention, {"sinks": torch.ones(1)}, "sinks: expected shape"),
    (ring_attention, {"group": "all"}, "group: expected a ProcessGroup, a DeviceMesh or None, got str"),
    (ring_attention, {"pattern": 7}, "pattern: expected a Pattern"),
    (ring_attention, {"pattern": Documents([100, 100])}, "documents of 200 tokens expects n_keys=200"),
    (ring_attention, {"check_finite": "layer 2", "nan": True}, NOT_FINITE),
    (
        ring_attention,
        {"mesh": (2, 2), "transport": "exchange"},
        r"with two for the transports \('hierarchy', 'ulysses'\)",
    ),
    (ring_attention, {"mesh": (2, 2, 1), "transport": "ulysses"}, "group: expected a mesh with one dimension"),
    *[
        (ring_attention, {"transport": "hierarchy", **mesh}, "group: expected a mesh of nodes and their ranks for the")
        for mesh in ({"n_ranks": 4}, {"mesh": (4,)})
    ],
    *[
        (ring_attention, {"transport": "ulysses", "n_ranks": 4, **change}, words)
        for change, words in (
            ({"heads": 6}, "of heads that 4 ranks can share equally, got 6; degrees that divide it: 1, 2, 3, 6"),
            ({"heads": 6, "mesh": (1, 4)}, "that 4 ranks can share equally, got 6"),
            ({"pattern": per_head([CAUSAL] * 8)}, "num_heads: .* is written for 8, got num_heads=4"),
            ({"layout": Layout.contiguous(256, 2)}, "layout: expected a Layout for 4 ranks"),
        )
    ],
    (ring_dilated_attention, {"layout": Layout.contiguous(300, 3)}, "layout: expected a Layout for 1 ranks"),
    (ring_dilated_attention, {"layout": Layout.contiguous(301, 1)}, "query: expected the 301 tokens of rank 0"),
    (ring_dilated_attention, {"dilation_rates": [1]}, "dilation_rates: expected as many as segment_lengths"),
    (ring_dilated_attention, {"overlap": True}, "overlap: expected 'mix' or 'union', got True"),
    (ring_dilated_attention, {"pattern": 7}, "pattern: expected a Pattern between places in a segment"),
    (ring_dilated_attention, {"key_mask": torch.ones(1, 5, dtype=torch.bool)}, "key_mask: expected shape"),
    (ring_dilated_attention, {"dropout_p": 2.0}, "dropout_p"),
    (ring_dilated_attention, {"softcap": 2.0}, r"unexpected keyword arguments \['softcap'\]"),
    (ring_dilated_attention, {"check_finite": "layer 2", "nan": True}, NOT_FINITE),
    (roll, {"shifts": 1.0}, "shifts: expected an integer, got 1.0"),
    (roll, {"layout": Layout.contiguous(8, 2)}, "layout: expected a Layout for 1 ranks"),
    (roll, {"dim": 4}, "x: expected the 300 tokens of rank 0 in dimension 4"),
    (roll, {"group": "all"}, "group: expected a ProcessGroup, a DeviceMesh or None, got str"),
]


@pytest.mark.parametrize(("attend", "change", "words"), REFUSED)
def test_wrong_calls_are_named_before_data_moves(attend: Any, change: dict[str, Any], words: str) -> None:
    change = dict(change)
    heads, mesh, nan = change.pop("heads", 4), change.pop("mesh", ()), change.pop("nan", False)
    n_ranks = change.pop("n_ranks", torch.Size(mesh).numel())

    def run(rank: int) -> None:
        options = {"layout": Layout.contiguous(300 * n_ranks, n_ranks, unit=300), **DEFAULTS[attend], **change}
        if mesh:
            options["group"] = init_device_mesh("cpu", mesh)
        x = torch.randn(1, heads, 300, 8)
        if nan:
            x[0, 1, 150, 3] = torch.nan
        with pytest.raises((ValueError, TypeError), match=words):
            attend(*[x] * (1 if attend is roll else 3), **options)
        assert not hasattr(local, "traffic")

    with counted_traffic() as local:
        on_ranks(n_ranks, run)


def forged(plan: RingPlan, tokens: int) -> RingPlan:
    """The plan of a rank that expects other tokens from rank 0 than come."""
    (begin, end), *rest = plan.received[0]
    return replace(plan, received=(((begin, end + tokens), *rest), *plan.received[1:]))


DIFFERENCES = ["tokens", "batch", "heads", "dtype", "gradients", "pattern", "layout", "more rows", "fewer rows"]


@pytest.mark.parametrize("what", [*DIFFERENCES, "branches", "transport", "ids"])
def test_ranks_that_differ_are_told_before_data_moves(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 calls with other facts: no data moves, and all raise the same line."""

    def planned(pattern: Pattern, layout: Layout, rank: int, **how: Any) -> RingPlan:
        plan = make_plan(pattern, layout, rank, **how)
        return forged(plan, 64 if what == "more rows" else -64) if rank == 1 and "rows" in what else plan

    monkeypatch.setattr(transports, "make_plan", planned)

    def run(rank: int) -> str:
        odd = what if rank == 1 else ""
        n_tokens = 600 if odd == "tokens" else N_TOKENS
        layout = (Layout.zigzag if odd == "layout" else Layout.contiguous)(n_tokens, 4)
        x = torch.randn(2 if odd == "batch" else 1, 8 if odd == "heads" else 4, layout.size(rank), 8)
        x = (x.double() if odd == "dtype" else x).requires_grad_(what == "gradients" != odd)
        # Documents of ids have no text form.
        ids = CAUSAL & Documents(ids=torch.arange(N_TOKENS) // (101 if odd else 100))
        how: dict[str, Any] = {"pattern": CAUSAL & Window(99 if odd == "pattern" else 150), "transport": "exchange"}
        if what in ("transport", "ids"):
            transport = "hierarchy" if odd == "transport" else "ulysses"
            how = {"pattern": ids, "transport": transport, "group": group_for((2, 2))}
        attend: Any = ring_attention
        if what == "branches":
            attend, how = ring_dilated_attention, {"segment_lengths": [64, 512], "dilation_rates": [1, 4 if odd else 2]}
        with pytest.raises(PlanMismatch) as raised:
            attend(x, x, x, layout=layout, **how)
        # No data, only that the call is new to all.
        assert (local.traffic.calls, local.traffic.compared) == ([], 16)
        return str(raised.value)

    with counted_traffic() as local:
        (line,) = set(on_ranks(4, run))
    field = "plan" if "rows" in what else {"ids": "pattern"}.get(what, what)
    assert re.search(rf"rank 1 has (.*, )?{field}=.*, the others", line), line
    assert "rows" not in what or line.count("rank 1 has") == 1
    if what == "branches":
        assert line.startswith(
            "ring_dilated_attention: rank 1 has branches='(64, 1): dense, (512, 4): dense', the others"
        )


@pytest.mark.parametrize("transport", ["exchange", "gather", "ring", "ulysses", "longnet"])
def test_ranks_that_need_other_gradients_are_named_before_data_moves(transport: str) -> None:
    """Else a rank without a backward pass keeps the others waiting until the timeout."""
    layout = Layout.contiguous(256, 3)

    def attend(rank: int, needs: str) -> Tensor:
        q, k, v = (
            torch.randn(1, 3, layout.size(rank), 8).requires_grad_(rank != 1 or name in needs)
            for name in ("q", "k", "v")
        )
        if transport == "longnet":
            return ring_dilated_attention(q, k, v, layout=layout, segment_lengths=[128, 256], dilation_rates=[1, 2])
        return ring_attention(q, k, v, Causal(), layout=layout, transport=transport)

    def run(rank: int) -> list[str]:
        lines = []
        for needs, enabled in (("", True), ("qv", True), ("qkv", False)):
            with torch.set_grad_enabled(enabled or rank != 1), pytest.raises(PlanMismatch) as raised:
                attend(rank, needs)
            lines.append(str(raised.value).partition(": ")[2])
        assert local.traffic.calls == []
        with torch.no_grad():
            attend(rank, "")
        attend(rank, "qkv")
        return lines

    with counted_traffic() as local:
        found = on_ranks(3, run)
    sides = [
        f"rank 1 has gradients='{own}', the others gradients='query, key, value'"
        for own in ("none", "query, value", "none")
    ]
    assert found == [sides] * 3


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_no_rank_is_empty_unless_you_set_the_unit(name: str) -> None:
    """Zigzag gives each rank two chunks. Units of 128 tokens stay where they leave a token for each rank."""
    make = getattr(Layout, name)
    for n_ranks in (1, 3, 4, 5):
        for n_tokens in (10, 11, 100, 128, 129, 300, 600, 768, 1024, 5000):
            whole, layout = make(n_tokens, n_ranks, unit=128), make(n_tokens, n_ranks)
            assert all(layout.runs)
            assert layout == whole or not all(whole.runs)
    assert not all(make(100, 4, unit=128).runs)
    assert [make(1, 2).size(rank) for rank in range(2)] in ([0, 1], [1, 0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(10, (((0, 5),), ((6, 10),))), "runs: expected each of 10 tokens at exactly one rank"),
        (lambda: Layout(10, (((0, 6),), ((5, 10),))), "runs: expected each of 10 tokens at exactly one rank"),
        (lambda: Layout(10, (((5, 10), (0, 5)),)), r"runs: expected runs \(begin, end\) that ascend"),
        (lambda: Layout(0, ((),)), "n_tokens: expected a positive integer, got 0"),
        (lambda: Layout(10, ()), "runs: expected the runs of at least one rank"),
        (lambda: Layout.zigzag(10, 0), "n_ranks: expected a positive integer, got 0"),
        (lambda: Layout.striped(10, 2, unit=0), "unit: expected a positive integer, got 0"),
        (lambda: Layout.contiguous(10, 2).shard(torch.ones(1, 1, 9), 0), "x: expected 10 tokens in dimension 2"),
        (lambda: Layout.contiguous(10, 2).unshard([torch.ones(1, 1, 9)]), "shards: expected"),
        (
            lambda: make_plan(CAUSAL, Layout.striped(2000, 2, unit=1), 0),
            "layout: expected at most 256 runs that begin or end",
        ),
        (lambda: make_plan(CAUSAL, Layout.contiguous(10, 2), 2), "rank: expected an integer from 0 to 1, got 2"),
    ],
)
def test_wrong_layouts_and_plans_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_compiled_graph_keeps_its_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other plans, as of packed documents, come and go."""
    monkeypatch.setattr(exchange, "EXCHANGES", 2)
    x, layout = torch.randn(1, 2, 256, 8), Layout.contiguous(256, 1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with one_rank():
        attend = torch.compile(
            lambda x: ring_attention(x, x, x, CAUSAL & Window(60), layout=layout), fullgraph=True, backend=counter
        )
        first = attend(x)
        for length in range(1, 6):
            ring_attention(x, x, x, CAUSAL & Documents([length, 256 - length]), layout=layout)
        assert torch.equal(attend(x), first)
        assert counter.frame_count == 1
        calls = of_group(group_of(None), exchange.Calls)
        assert (len(calls.exchanges), len(calls.in_graphs)) == (2, 1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_longnet", [False, True])
def test_compiled_graphs_exchange_masks_before_keys(is_longnet: bool) -> None:
    layout, mask = Layout.contiguous(300, 1), torch.ones(1, 300, dtype=torch.bool)
    found: list[list[torch.fx.Node]] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(list(module.graph.nodes))
        return make_boxed_func(module.forward)

    def attend(x: Tensor) -> Tensor:
        if is_longnet:
            return ring_dilated_attention(x, x, x, [64], [1], layout=layout, key_mask=mask)
        return ring_attention(x, x, x, CAUSAL & Window(60), layout=layout, key_mask=mask)

    with one_rank():
        torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(torch.randn(1, 2, 300, 8))
    ((masks, keys),) = (
        [node for node in nodes if str(node.target).split(".")[-2:-1] in (["cast_bits"], ["cast_start"])]
        for nodes in found
    )
    assert "cast_bits" in str(masks.target)
    before, new = set(), {keys}
    while new:
        before |= new
        new = {node for each in new for node in each.all_input_nodes} - before
    assert masks in before
