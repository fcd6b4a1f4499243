"""Heads exchanged for tokens, alone and with the sequence shared too: bits of one process, bytes, refusals."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from hypothesis import given, strategies as st
from oracle import Inputs, make_inputs, oracle, relative_error
from processes import counted_traffic, on_ranks, run_processes
from test_distributed import (
    CAUSAL,
    LAYOUTS,
    N_TOKENS,
    PATTERNS,
    Expected,
    attend_apart,
    attend_whole,
    check_calls,
    expected_of,
    expected_of_named,
    group_for,
    has_whole_tiles,
    split_results,
)
from test_ring_processes import check_checkpoints, check_compiled, check_second_derivatives, gradients
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringtile.distributed import Layout, RankLost, ring_attention
from ringtile.distributed.process_groups import axes_of, place_of, real_group
from ringtile.distributed.transports import MODES, group_of
from ringtile.distributed.ulysses import HeadPlan
from ringtile.functional import sparse_attention
from ringtile.patterns import Documents, Pattern, RandomBlocks, Window, per_head
from ringtile.tools.predict import Sizes
from ringtile.tools.predict.cost import estimate, ranks_per_row
from ringtile.tools.predict.hardware import HARDWARE
from ringtile.tools.predict.work import survey

SHAPES: list[tuple[int, ...]] = [(2,), (4,), (2, 2), (3, 2), (1, 4), (2, 1), (2, 4)]
"""Ranks that exchange heads, or a mesh: ranks along the sequence and ranks that exchange heads."""


def check_ranks(pattern: Pattern, layout: Layout, shape: tuple[int, ...], expected: Expected, **options: Any) -> None:
    """All results against float64, and the bits of one process."""
    along = 1 if len(shape) == 1 else shape[0]
    # A part of a tile can be another kernel's.
    same = ["out", "lse", "q"] if along == 1 or has_whole_tiles(layout) else []
    # If each key head is at one rank, its gradient is no sum over ranks.
    same += ["k", "v"] if along == 1 and expected.problem.k.shape[1] % shape[-1] == 0 else []
    check_calls(pattern, layout, expected, {"transport": "ulysses", **options}, same=same, shape=shape)


@pytest.mark.parametrize(
    ("name", "layout", "shape"),
    [
        (name, list(LAYOUTS)[(row + row // 7) % 5], SHAPES[(row + 3 * (row // 7)) % 7])
        for row, name in enumerate(PATTERNS)
    ],
)
def test_heads_exchanged_for_tokens_give_the_bits_of_one_process(
    name: str, layout: str, shape: tuple[int, ...]
) -> None:
    """Every pattern, every layout and every shape of the ranks."""
    made = LAYOUTS[layout](N_TOKENS, torch.Size(shape).numel())
    check_ranks(PATTERNS[name], made, shape, expected_of_named(name))


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.3, "seed": 7},
        {"dropout_p": 0.3, "seed": 7, "head_at": torch.tensor([9, 2, 5, 30]), "batch_at": torch.tensor([4, 1])},
        {"alibi_slopes": torch.tensor([0.02, 0.3, 1, 4], dtype=torch.float64)},
    ],
    ids=["dropout", "numbers", "alibi"],
)
def test_options_are_cut_with_the_heads(options: dict[str, Any]) -> None:
    pattern = CAUSAL & (Window(150) | RandomBlocks(1))
    # The oracle numbers heads from 0.
    exact = {name: x for name, x in options.items() if not name.endswith("_at")}
    expected = expected_of(pattern, make_inputs(2, 4, N_TOKENS, head_dim=8), **exact)
    if len(exact) < len(options):
        whole = attend_whole(expected.problem, expected.grad_lse, pattern, **options)
        expected = expected._replace(whole=whole, exact=whole)
    for shape in ((2,), (2, 2)):
        check_ranks(pattern, Layout.zigzag(N_TOKENS, torch.Size(shape).numel()), shape, expected, **options)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_packed_documents_and_patterns_per_batch_element(shape: tuple[int, ...]) -> None:
    ids = torch.stack([torch.arange(N_TOKENS) // 300, torch.arange(N_TOKENS) // 77])
    for pattern in (CAUSAL & Documents(ids=ids), per_head([Documents(ids=ids), Documents(ids=ids) & Window(40)] * 2)):
        expected = expected_of(pattern, make_inputs(2, 4, N_TOKENS, head_dim=8, kv_heads=2))
        check_ranks(pattern, Layout.contiguous(N_TOKENS, 4), shape, expected)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
def test_ragged_and_empty_ranks(shape: tuple[int, ...]) -> None:
    name = "global tokens"
    for runs in (
        (((0, 5),), (), ((5, 699),), ((699, 700),)),
        ((), (), ((0, 77), (300, 700)), ((77, 300),)),
        (((0, 700),), (), (), ()),
    ):
        check_ranks(PATTERNS[name], Layout(N_TOKENS, runs), shape, expected_of_named(name))


@pytest.mark.parametrize(("heads", "kv_heads", "n_ranks"), [(12, 6, 4), (12, 4, 6), (8, 1, 4)])
def test_key_heads_go_to_the_ranks_of_their_query_heads(heads: int, kv_heads: int, n_ranks: int) -> None:
    pattern = CAUSAL & Window(90)
    expected = expected_of(pattern, make_inputs(1, heads, N_TOKENS, head_dim=8, kv_heads=kv_heads))
    layout = Layout.contiguous(N_TOKENS, n_ranks)
    check_ranks(pattern, layout, (n_ranks,), expected)
    plan = HeadPlan(pattern, layout, 0, n_ranks, 1, heads, kv_heads)
    for (begin, end), (first, last) in zip(plan.heads["q"], plan.heads["k"], strict=True):
        assert set(range(first, last)) == {head * kv_heads // heads for head in range(begin, end)}


@pytest.mark.parametrize("transport", ["ulysses", "exchange"])
def test_sinks_get_the_sum_of_the_ranks_gradients(transport: str) -> None:
    pattern, layout = CAUSAL & Window(150), Layout.zigzag(N_TOKENS, 4)
    problem, sinks = make_inputs(1, 4, N_TOKENS, head_dim=8), torch.randn(4, dtype=torch.float64)
    exact = oracle(*problem[:3], pattern, grad_out=problem.grad_out, start=0, sinks=sinks)
    for shape in ((4,), (2, 2)) if transport == "ulysses" else ((4,),):

        def run(rank: int, shape: tuple[int, ...] = shape) -> dict[str, Tensor]:
            q, k, v, grad_out = (layout.shard(x, rank) for x in problem)
            leaf = sinks.clone().requires_grad_()
            how: dict[str, Any] = {"layout": layout, "transport": transport, "group": group_for(shape)}
            out = ring_attention(q, k, v, pattern, sinks=leaf, **how)
            return {"out": out.detach(), "sinks": torch.autograd.grad(out, leaf, grad_out)[0]}

        found = on_ranks(4, run)
        assert relative_error(layout.unshard([results["out"] for results in found]), exact.out) < 1e-12
        assert relative_error(sum(results["sinks"] for results in found), exact.grads["sinks"]) < 1e-12


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("kv_heads", "value_dim", "dtype"), [(4, 8, torch.float32), (8, 24, torch.bfloat16)])
def test_bytes_are_those_of_the_formula(kv_heads: int, value_dim: int, dtype: torch.dtype, return_lse: bool) -> None:
    """Queries and keys have head_dim, values and outputs value_dim, and each token's own part stays."""
    heads, head_dim, n_ranks, batch = 8, 8, 4, 2
    problem = make_inputs(
        batch, heads, N_TOKENS, head_dim=head_dim, kv_heads=kv_heads, value_dim=value_dim, dtype=dtype
    )
    layout = LAYOUTS["equal zigzag"](N_TOKENS, n_ranks)

    def run(rank: int) -> tuple[int, int, list[str]]:
        leaves = [layout.shard(x, rank).clone().requires_grad_() for x in problem[:3]]
        how: dict[str, Any] = {"layout": layout, "transport": "ulysses", "return_lse": return_lse}
        found = ring_attention(*leaves, CAUSAL, enable_gqa=True, **how)
        forward = local.traffic.sent
        torch.autograd.grad(found[0].sum() + found[1].sum() if return_lse else found.sum(), leaves)
        assert all(local.traffic.poisoned)
        return forward, local.traffic.sent, local.traffic.calls

    with counted_traffic() as local:
        forward, both, calls = zip(*on_ranks(n_ranks, run), strict=True)
    elements = heads * (head_dim + value_dim) + kv_heads * (head_dim + value_dim)
    bytes_of_pass = batch * N_TOKENS * elements * dtype.itemsize
    bytes_of_lse = batch * N_TOKENS * heads * 4 * return_lse
    # If all have one dim: (2 Hq + 2 Hkv) D b L (P - 1) / P.
    assert value_dim != head_dim or elements == (2 * heads + 2 * kv_heads) * head_dim
    assert sum(forward) == (bytes_of_pass + bytes_of_lse) * (n_ranks - 1) // n_ranks
    assert sum(both) == 2 * sum(forward)
    # Queries, keys and values are one message; the lse is one more if it has another dtype.
    assert set(map(tuple, calls)) == {("all_to_all_single",) * (6 if return_lse and dtype == torch.bfloat16 else 4)}


def test_rows_of_a_mesh_lie_inside_a_node_and_share_the_heads() -> None:
    h100 = HARDWARE["h100"]
    found = {
        ranks: ranks_per_row(ranks, heads, h100) for ranks, heads in ((64, 32), (8, 32), (300, 32), (24, 6), (9, 4))
    }
    assert found == {64: 8, 8: None, 300: 4, 24: 2, 9: None}
    work = survey(CAUSAL & Window(300), Layout.contiguous(4096, 16), Sizes(8, 4, 16))
    cost = estimate(work, "ulysses", h100, 8)
    # All heads of all tokens are computed once.
    assert int(cost.tiles.sum()) == int(work.tiles.sum())
    # Slow links inside the nodes take as long as the heads, slow ones between them as long as the keys.
    # Two ranks share a key head, and each gets it.
    heads = (2 * 8 + 2 * 8) * 16 * 2 * 256 * 7 // 8
    inside, between = (estimate(work, "ulysses", replace(h100, **{name: 1e3}), 8) for name in ("node_beta", "net_beta"))
    assert float(inside.forward.max()) == pytest.approx(heads / 1e3, rel=1e-2)
    # A window of 300 needs three tiles of the row before, of the one key head that a rank then has.
    assert float(between.forward.max()) == pytest.approx(3 * 128 * 2 * 16 * 2 / 1e3, rel=1e-2)


def test_gradients_of_a_shared_key_head_are_summed_in_float32() -> None:
    """In bfloat16, as far from float64 as one process."""
    problem = make_inputs(1, 8, N_TOKENS, head_dim=16, kv_heads=1, dtype=torch.bfloat16)
    layout, wide = Layout.contiguous(N_TOKENS, 8), Inputs(*(x.double() for x in problem))
    exact = oracle(*wide[:3], CAUSAL, grad_out=wide.grad_out, start=0)

    def grads(tensors: tuple[Tensor, ...], grad_out: Tensor, **how: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        attend: Any = ring_attention if how else sparse_attention
        return torch.autograd.grad(attend(*leaves, CAUSAL, enable_gqa=True, **how), leaves, grad_out)

    def run(rank: int) -> dict[str, Tensor]:
        *tensors, grad_out = (layout.shard(x, rank) for x in problem)
        found = grads(tuple(tensors), grad_out, layout=layout, transport="ulysses")
        return dict(zip("qkv", found, strict=True))

    results = split_results(layout, on_ranks(8, run))
    for name, alone in zip("qkv", grads(problem[:3], problem.grad_out), strict=True):
        error = relative_error(results[name], exact.grads[name])
        assert results[name].dtype == torch.bfloat16
        assert error < 2.1 * relative_error(alone, exact.grads[name]), name


@given(st.data())
def test_merged_layouts_hold_the_tokens_of_their_ranks(data: st.DataObject) -> None:
    n_tokens, n_rows, size = (data.draw(st.integers(1, most)) for most in (200, 3, 4))
    make = data.draw(st.sampled_from([Layout.contiguous, Layout.zigzag, Layout.striped]))
    layout = make(n_tokens, n_rows * size, unit=data.draw(st.integers(1, 20)))
    merged = layout.merged(size)
    for row in range(n_rows):
        ranks = range(row * size, row * size + size)
        tokens = torch.cat([layout.positions(rank) for rank in ranks]).sort().values
        assert torch.equal(merged.positions(row), tokens)
        for rank in ranks:
            plan = HeadPlan(CAUSAL, layout, rank, size, 1, size, size)
            places = torch.cat([tokens[:0], *(tokens[begin:end] for begin, end in plan.places[rank % size])])
            assert torch.equal(places, layout.positions(rank))
    with pytest.raises(ValueError, match=f"size: expected a divisor of {n_rows * size} ranks"):
        layout.merged(n_rows * size + 1)


def processes(rank: int, size: int) -> None:
    """Compiled, differentiated twice and with checkpoints, on ranks of one dimension and on a mesh."""
    problem = make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=2)
    layout, pattern = Layout.zigzag(N_TOKENS, size), per_head([CAUSAL & Window(50 + 10 * head) for head in range(4)])
    mask = torch.rand(1, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.8
    mine = layout.shard(mask, rank, 1)

    def alone(*x: Tensor) -> Tensor:
        return sparse_attention(*x, pattern, start=0, enable_gqa=True, key_mask=mask)

    whole = gradients(alone, problem)
    # Heads, key mask and outputs, or keys and their mask between rows of one rank. Each but the masks has a way back.
    for group, forward, backward in ((None, 3, 2), (init_device_mesh("cpu", (size, 1)), 2, 1)):

        def attend(*x: Tensor, group: Any = group) -> Any:
            how: dict[str, Any] = {"layout": layout, "transport": "ulysses", "group": group}
            return ring_attention(*x, pattern, key_mask=mine, enable_gqa=True, **how)

        check_second_derivatives(attend, alone, problem, layout)
        with counted_traffic() as local:
            check_compiled(attend, problem, whole, layout)
        assert local.traffic.calls == ["all_to_all_single"] * 2 * (forward + backward)
        # Nothing reads the outputs of a function that ends with them, so a checkpoint would not repeat their exchange.
        sines = gradients(lambda *x: alone(*x).sin(), problem)
        check_checkpoints(lambda *x, f=attend: f(*x).sin(), problem, sines, layout, forward, backward)


def test_processes_compute_what_one_does() -> None:
    outcome = run_processes(2, processes, timeout=60.0, limit=120.0)
    assert outcome.exit_codes == [0, 0], outcome.texts


def dies(rank: int, size: int) -> None:
    """A rank is killed. Another of its row leaves, and then the one of the other row that shares heads with it."""
    layout, mesh = Layout.contiguous(N_TOKENS, size), init_device_mesh("cpu", (2, 2))
    x = torch.randn(1, 2, layout.size(rank), 8)
    how: dict[str, Any] = {"layout": layout, "transport": "ulysses", "group": mesh}
    ring_attention(x, x, x, PATTERNS["window"], **how)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 is lost"):
        ring_attention(x, x, x, PATTERNS["window"], **how)


def test_a_rank_that_dies_is_named_in_all_rows() -> None:
    outcome = run_processes(4, dies)
    assert outcome.exit_codes == [0, -signal.SIGKILL, 0, 0], outcome.texts


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 2)])
def test_a_mesh_counts_its_ranks_row_by_row(shape: tuple[int, ...]) -> None:
    def run(rank: int) -> list[list[int]]:
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "rows", "columns")[-len(shape) :])
        # Slices are made anew, and have one group.
        axes = [axes_of(whole["rows", "columns"]) for _ in range(2)]
        assert axes[0] == axes[1]
        mesh = whole["rows", "columns"]
        assert group_of(mesh, MODES["ulysses"]) is mesh
        assert place_of(mesh) == (axes[0].every.rank(), axes[0].every.size())
        assert real_group(mesh) is axes[0].every
        assert (axes[0].every is dist.group.WORLD) == (len(shape) == 2)
        return [dist.get_process_group_ranks(group) for group in axes[0]]

    n_ranks, (rows, columns) = torch.Size(shape).numel(), shape[-2:]
    for rank, (every, outer, inner) in enumerate(on_ranks(n_ranks, run)):
        row, column = divmod(rank % (rows * columns), columns)
        first = rank - rank % (rows * columns)
        assert every == list(range(first, first + rows * columns))
        assert outer == every[column::columns]
        assert inner == every[row * columns :][:columns]


def test_a_replica_of_a_mesh_of_three_dimensions_computes_all() -> None:
    """Two replicas, each with heads and sequence shared. A mesh whose ranks do not ascend is refused."""
    name, layout = "global tokens", Layout.zigzag(N_TOKENS, 4)
    problem, grad_lse, whole, _ = expected_of_named(name)

    def run(rank: int) -> dict[str, Tensor]:
        turned = DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]])
        with pytest.raises(ValueError, match="expected a mesh whose ranks ascend row by row"):
            axes_of(turned)
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "sequence", "heads"))
        how: dict[str, Any] = {"transport": "ulysses", "group": mesh["sequence", "heads"]}
        return attend_apart(problem, grad_lse, PATTERNS[name], layout, rank % 4, **how)

    results = on_ranks(8, run)
    for replica in (results[:4], results[4:]):
        found = split_results(layout, replica)
        assert all(torch.equal(found[part], whole[part]) for part in ("out", "lse", "q"))
