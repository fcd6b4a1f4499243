"""Keys that cross between nodes once: results of one process, messages of both levels, and bytes between nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings, strategies as st
from oracle import make_inputs
from processes import Traffic, counted_traffic, on_ranks, one_rank, run_processes
from strategies import patterns
from test_cost import hardware, seconds
from test_distributed import (
    CAUSAL,
    LAYOUTS,
    N_TOKENS,
    PATTERNS,
    check_calls,
    check_transport,
    expected_of,
    expected_of_named,
    group_for,
)
from test_ring_processes import check_checkpoints, check_compiled, check_equal, check_second_derivatives, gradients
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringtile.distributed import Layout, PlanMismatch, make_plan, ring_attend, ring_attention, transports
from ringtile.distributed.layout import count_tokens, counts_of, positions_of
from ringtile.distributed.relays import count_levels, make_relays
from ringtile.functional import sparse_attention
from ringtile.modules import SparseTransformer
from ringtile.patterns import GlobalTokens, Pattern, Window, hierarchical
from ringtile.patterns.base import TileGrid
from ringtile.tools.predict import Sizes
from ringtile.tools.predict.cost import estimate
from ringtile.tools.predict.work import survey

NODES = ((2, 2), (2, 4), (4, 2), (3, 1), (1, 3))


@pytest.mark.parametrize(
    ("name", "layout", "nodes"),
    [(name, ("striped", "equal zigzag")[row % 2], NODES[row % 5]) for row, name in enumerate(PATTERNS)]
    + [("global tokens", layout, (2, 2)) for layout in ("contiguous", "equal zigzag")],
)
def test_nodes_give_the_bits_of_one_process(name: str, layout: str, nodes: tuple[int, int]) -> None:
    made = LAYOUTS[layout](N_TOKENS, nodes[0] * nodes[1])
    calls = [{"transport": "hierarchy", "overlap": overlap} for overlap in (True, False)]
    same = ("out", "lse", "q") if layout != "equal zigzag" else ()
    check_calls(PATTERNS[name], made, expected_of_named(name), *calls, same=same, shape=nodes)


def traffic_of(pattern: Pattern, layout: Layout, nodes: tuple[int, int], transport: Any) -> list[list[int]]:
    """Bytes that each rank sends to other nodes, forward and in both passes."""

    def run(rank: int) -> list[int]:
        x = torch.ones(1, 1, layout.size(rank), 2, dtype=torch.bfloat16).requires_grad_()
        group = init_device_mesh("cpu", nodes) if transport == "hierarchy" else None
        out = ring_attention(x, x, x, pattern, layout=layout, group=group, transport=transport)
        traffic = local.__dict__.setdefault("traffic", Traffic())
        forward = traffic.between(rank, nodes[1])
        out.sum().backward()
        return [forward, traffic.between(rank, nodes[1])]

    with counted_traffic() as local:
        return on_ranks(layout.n_ranks, run)


@pytest.mark.parametrize("nodes", [(2, 4), (2, 8)])
def test_a_window_over_four_ranks_crosses_between_nodes_once(nodes: tuple[int, int]) -> None:
    layout = Layout.contiguous(1024 * nodes[0] * nodes[1], nodes[0] * nodes[1])
    token = 2 * 2 * 2
    flat, hierarchy = (traffic_of(CAUSAL & Window(4096), layout, nodes, how) for how in ("exchange", "hierarchy"))
    # Ranks 4 to 1 before the second node send to 1 to 4 ranks of it, or to one.
    assert [sum(found) for found in zip(*flat, strict=True)] == [10 * 1024 * token, 20 * 1024 * token]
    assert [sum(found) for found in zip(*hierarchy, strict=True)] == [4 * 1024 * token, 8 * 1024 * token]


@pytest.mark.parametrize(
    ("name", "transport", "layout", "kv_heads"),
    [
        (name, transport, ("contiguous", "striped", "equal zigzag")[(row + column) % 3], 2)
        for row, name in enumerate(["window", "global tokens", "documents", "a rule"])
        for column, transport in enumerate(["hierarchy", "exchange", "gather"])
    ]
    + [("causal", "ring", "zigzag", 2), ("global tokens", "hierarchy", "contiguous", 2)]
    + [("window", "ulysses", "contiguous", 4), ("window", "ulysses", "equal zigzag", 1)]
    + [("global tokens", "ulysses", "striped", 2), ("per head", "ulysses", "contiguous", 2)]
    + [("documents", "ulysses", "equal", 4), ("causal", "ulysses", "zigzag", 1)],
)
def test_bytes_inside_and_between_nodes_are_predicted(name: str, transport: Any, layout: str, kv_heads: int) -> None:
    made, on_mesh = LAYOUTS[layout](N_TOKENS, 6), transport in ("hierarchy", "ulysses")
    problem = [x.bfloat16() for x in make_inputs(2, 4, N_TOKENS, head_dim=8, kv_heads=kv_heads, value_dim=4)]
    work = survey(PATTERNS[name], made, Sizes(4, kv_heads, 8, 4, batch=2))
    cost = estimate(work, transport, hardware(ranks_per_node=2), *[2] * (transport == "ulysses"))

    def run(rank: int) -> dict[str, Any]:
        *leaves, grad_out = (made.shard(x, rank).clone().requires_grad_() for x in problem)
        how: dict[str, Any] = {"layout": made, "transport": transport, "group": group_for((3, 2) if on_mesh else ())}
        out = ring_attention(*leaves, PATTERNS[name], enable_gqa=True, **how)
        traffic = local.__dict__.setdefault("traffic", Traffic())
        found = {"between": traffic.between(rank, 2), "traffic": [traffic.to(other) for other in range(6)]}
        found |= {"sent": traffic.sent, "received": traffic.received, "messages": traffic.messages}
        out.backward(grad_out.detach())
        return found | {"both": [traffic.sent, traffic.received]}

    with counted_traffic() as local:
        ranks = on_ranks(6, run)
    for key in ("between", "traffic", "sent", "received", "messages"):
        assert getattr(cost, key).tolist() == [found[key] for found in ranks], key
    both = torch.stack([cost.sent + cost.sent_backward, cost.received + cost.received_backward], 1)
    assert both.tolist() == [found["both"] for found in ranks]
    if transport == "ulysses":
        assert torch.equal(cost.inside + cost.between, cost.traffic.sum(1)) or name == "global tokens"
        assert cost.mesh == (3, 2)
    else:
        # A node has two ranks, so a broadcast goes to one other of them.
        node = torch.arange(6) // 2
        assert torch.equal(cost.inside, cost.traffic.where(node.unsqueeze(1) == node, 0).sum(1))


def test_tokens_cross_first_and_are_handed_on_afterwards() -> None:
    # Nodes of two ranks: rank 3 gets the tokens of rank 1, and hands them to rank 2, which also needs those of rank 0.
    layout, window, shard = Layout.contiguous(8192, 8), CAUSAL & Window(2048), 1024 * 2 * 8 * 128 * 2
    assert seconds(window, layout, "exchange", net_beta=1e9)[0] == pytest.approx(2 * shard / 1e9, rel=1e-3)
    for passed in seconds(window, layout, "hierarchy", net_beta=1e9):
        assert passed == pytest.approx(shard / 1e9, rel=1e-3)
    # Inside the node its own tokens travel first. Backward both travel at once.
    assert seconds(window, layout, "hierarchy", node_beta=1e9) == pytest.approx(
        (2 * shard / 1e9, shard / 1e9), rel=1e-3
    )
    slow = seconds(window, layout, "hierarchy", node_beta=1e9, net_beta=1e8)
    assert slow == pytest.approx((11 * shard / 1e9, 11 * shard / 1e9), rel=1e-3)
    assert seconds(window, layout, "hierarchy", net_alpha=2.0, node_alpha=1.0) == pytest.approx((3, 3), rel=1e-3)


@settings(max_examples=20)
@given(st.data())
def test_relays_of_all_ranks_fit_together(data: st.DataObject) -> None:
    n_tokens, n_nodes, per_node = (data.draw(st.integers(1, most)) for most in (300, 3, 3))
    n_ranks, grid = n_nodes * per_node, TileGrid(16, 0, n_tokens, n_tokens)
    pattern = data.draw(patterns(grid, operators=1))
    layout = data.draw(st.sampled_from([Layout.contiguous, Layout.zigzag, Layout.striped]))(
        n_tokens, n_ranks, unit=data.draw(st.sampled_from([1, 5, 16, 32]))
    )
    plans = [make_plan(pattern, layout, rank, block=16) for rank in range(n_ranks)]
    relays = [make_relays(plan, per_node) for plan in plans]
    assert len({each.fingerprint for each in relays}) == 1
    levels = count_levels(layout, plans[0].needs, plans[0].is_hot, 16, per_node)
    assert levels.crossing.tolist() == [counts_of(each.crossing) for each in relays]
    assert levels.handed.tolist() == [counts_of(each.handed) for each in relays]
    assert levels.direct.tolist() == [[each.plan.tokens_sent[mate] for mate in each.mates] for each in relays]
    for each in relays:
        node, number = divmod(each.plan.rank, per_node)
        # The positions of the tokens that arrive from each node are those that its rank sends, and the tokens that
        # this rank hands on are those that its mates expect from their owners.
        owners = [relays[other * per_node + number] for other in range(n_nodes)]
        arrived = [
            torch.cat([x[:0], *(x[a:b] for a, b in owner.crossing[node])])
            for owner, x in ((owner, layout.positions(owner.plan.rank)) for owner in owners)
        ]
        assert counts_of(each.arriving) == list(map(len, arrived))
        assert not each.arriving[node]
        crossed = torch.cat(arrived)
        for mate, runs in zip(each.mates, each.handed, strict=True):
            message = torch.cat([crossed[:0], *(crossed[a:b] for a, b in runs)])
            assert len(message) == count_tokens(relays[mate].relayed[number])
            buffer = positions_of(plans[mate].buffer[0])
            expected = torch.cat([buffer[:0], *(buffer[a:b] for a, b in relays[mate].relayed[number])])
            assert torch.equal(message, expected)


def test_ranks_that_would_send_other_messages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.contiguous(1024, 4)

    def forged(plan: Any, per_node: int) -> Any:
        found = make_relays(plan, per_node)
        return replace(found, crossing=((), ((0, 128),))) if plan.rank == 1 else found

    monkeypatch.setattr(transports, "make_relays", forged)

    def run(rank: int) -> None:
        x, mesh = torch.randn(1, 1, 256, 4), init_device_mesh("cpu", (2, 2))
        with pytest.raises(PlanMismatch, match="ring_attention: rank 1 has plan="):
            ring_attention(x, x, x, CAUSAL & Window(600), layout=layout, group=mesh, transport="hierarchy")

    on_ranks(4, run)


@pytest.mark.parametrize("layout", ["contiguous", "equal"])
def test_masks_lengths_and_dropout_cross_between_nodes(layout: str) -> None:
    problem, mask = make_inputs(3, 2, N_TOKENS, head_dim=8), torch.rand(3, N_TOKENS) < 0.8
    lengths, made = torch.tensor([N_TOKENS, 0, 450]), LAYOUTS[layout](N_TOKENS, 6)
    pattern = CAUSAL & (Window(150) | GlobalTokens(40))
    for options in ({"key_mask": mask, "key_lengths": lengths}, {"dropout_p": 0.3, "seed": 7, "softcap": 2.0}):
        check_transport("hierarchy", pattern, made, expected_of(pattern, problem, **options), nodes=(3, 2), **options)


def check_model(rules: Any, layout: Layout, attend_of: Callable[[], Any]) -> list[Any]:
    """A transformer over ranks has the outputs and gradients of one process. Return the collectives of each rank."""
    torch.manual_seed(0)
    model = SparseTransformer(2, 16, 2, pattern=rules).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, layout.n_tokens, 16, dtype=torch.float64)
    expected = model(x)
    expected.sum().backward()

    def run(rank: int) -> tuple[Tensor, list[Tensor], set[str]]:
        apart = SparseTransformer(2, 16, 2, pattern=rules, attend=attend_of()).double()
        apart.load_state_dict(model.state_dict())
        found = apart(layout.shard(x, rank, 1), positions=layout.positions(rank))
        found.sum().backward()
        return found.detach(), [parameter.grad for parameter in apart.parameters()], set(local.traffic.calls)

    with counted_traffic() as local:
        outs, grads, calls = zip(*on_ranks(layout.n_ranks, run), strict=True)
    assert (layout.unshard(outs, 1) - expected).abs().max() < 1e-12
    for parameter, parts in zip(model.parameters(), zip(*grads, strict=True), strict=True):
        assert (sum(parts) - parameter.grad).abs().max() < 1e-10 * (1 + parameter.grad.abs().max())
    return list(calls)


def test_the_number_of_ranks_does_not_change_the_model() -> None:
    pattern, n_tokens = CAUSAL & hierarchical(256, 512, block=64), 1500
    for layout, shape in (
        (Layout.contiguous(n_tokens, 2), ()),
        (Layout.zigzag(n_tokens, 3), ()),
        (Layout.contiguous(n_tokens, 4), (2, 2)),
    ):

        def attend_of(layout: Layout = layout, shape: tuple[int, ...] = shape) -> Any:
            return ring_attend(group_for(shape), layout, transport="hierarchy" if shape else "auto")

        check_model(pattern, layout, attend_of)


def test_each_layer_has_its_transport() -> None:
    window, layout = CAUSAL & Window(300), Layout.zigzag(1500, 4)

    def attend_of() -> Any:
        attend = ring_attend(group_for((2, 2)), layout, transport={window: "hierarchy", CAUSAL: "ring"})
        q = torch.randn(1, 2, 1, 8)
        with pytest.raises(ValueError, match=r"transport: expected one for the pattern window\(5\), got"):
            attend(q, q, q, pattern=Window(5))
        return attend

    calls = check_model([window, CAUSAL], layout, attend_of)
    assert all(names >= {"all_to_all_single", "batch_isend_irecv"} for names in calls)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_graph_has_layers_with_several_plans() -> None:
    layout, first, second = Layout.contiguous(300, 1), CAUSAL & Window(37), CAUSAL & Window(73)
    with one_rank():
        attend = ring_attend(None, layout, transport={first: "exchange", second: "gather"})
        model = SparseTransformer(2, 16, 2, pattern=[first, second], attend=attend)
        x = torch.randn(1, 300, 16)
        # No call before: tracing makes both exchanges.
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        assert torch.allclose(found, model(x))


def test_the_density_between_nodes_is_the_fraction_of_keys_that_cross() -> None:
    pattern, token = hierarchical(2560, 10240, 0.5, 0.2, 0.05), 2 * 8 * 2
    work = survey(pattern, Layout.contiguous(20480, 8), Sizes(1, 1, 8))
    costs = {how: estimate(work, how, hardware(ranks_per_node=4)) for how in ("exchange", "hierarchy")}
    assert int(costs["hierarchy"].between.sum()) == 0.05 * 20480 * token
    # All ranks of a node need the same keys of others.
    assert 4 * int(costs["hierarchy"].between.sum()) >= int(costs["exchange"].between.sum())
    assert int(costs["hierarchy"].received.max()) <= (0.05 * 10240 + 0.2 * 3 * 2560) * token + 2560 * token


def nodes(rank: int, size: int) -> None:
    """Between processes: bits from run to run, one graph, checkpoints and second derivatives."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("node", "gpu"))
    problem, layout = make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=2), Layout.contiguous(N_TOKENS, size)
    mask = torch.rand(1, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.8
    mine = layout.shard(mask, rank, 1)
    how: dict[str, Any] = {"layout": layout, "group": mesh["node", "gpu"], "transport": "hierarchy", "enable_gqa": True}
    pattern = CAUSAL & (Window(200) | GlobalTokens(20))

    def attend(*x: Tensor) -> Tensor:
        return ring_attention(*x, pattern, key_mask=mine, **how)  # type: ignore[no-any-return]

    def alone(*x: Tensor) -> Tensor:
        return sparse_attention(*x, pattern, start=0, key_mask=mask, enable_gqa=True)

    whole = gradients(alone, problem)
    check_compiled(attend, problem, whole, layout)
    found = []
    for n_threads in (1, 2, 1):
        torch.set_num_threads(n_threads)
        found.append(gradients(attend, problem, layout))
    check_equal(found[0], whole, layout)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(others, found[0], strict=True))
    check_second_derivatives(attend, alone, problem, layout)
    window = CAUSAL & Window(150)
    whole = gradients(lambda *x: sparse_attention(*x, window, start=0, enable_gqa=True), problem)
    # Three collectives a pass: between nodes, inside, and inside once more.
    check_checkpoints(lambda *x: ring_attention(*x, window, **how), problem, whole, layout, 3, 3)


@pytest.mark.slow
def test_nodes_of_processes() -> None:
    outcome = run_processes(4, nodes, timeout=90.0)
    assert outcome.exit_codes == [0] * 4, "\n".join(outcome.texts)
