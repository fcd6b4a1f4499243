"""PyTorch's own context parallelism: its shards are our layouts, and ours its load balancers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import make_inputs, refused, relative_error
from processes import on_ranks, run_processes
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer

from ringtile import dilated_attention, sparse_attention
from ringtile.distributed import Layout, ring_attend, ring_attention
from ringtile.integrations.torch_shards import balancer_of, shards_of
from ringtile.modules import SparseTransformer
from ringtile.patterns import Causal, GlobalTokens, Window

PER_DOCUMENT = _load_balancer._PerDocumentHeadTailLoadBalancer
N, RULE = 520, Causal() & (Window(40) | GlobalTokens(3))


def mesh_of(n_ranks: int) -> Any:
    return dist.init_device_mesh("cpu", (n_ranks,))


def _inside_context_parallel(rank: int, n_ranks: int) -> None:
    torch.manual_seed(3)
    q, k, v, grad = make_inputs(2, 4, N, kv_heads=2)
    mesh = mesh_of(n_ranks)
    layout = shards_of(N, mesh)
    assert layout == Layout.zigzag(N, n_ranks, unit=N // (2 * n_ranks))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = sparse_attention(*leaves, RULE, enable_gqa=True)
    expected.backward(grad)
    mine = [q.clone(), k.clone(), v.clone(), grad.clone()]
    model = SparseTransformer(1, 32, 4, pattern=RULE).double()
    before = torch.nn.functional.scaled_dot_product_attention
    with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 4):
        shards = [x.clone().requires_grad_() for x in mine[:3]]
        for name, attend in (
            ("query", lambda: sparse_attention(*shards, RULE, enable_gqa=True)),
            ("query", lambda: dilated_attention(*shards, [64], [1], enable_gqa=True)),
            ("query", lambda: model(torch.randn(1, 8, 32, dtype=torch.float64))),
            ("query", lambda: torch.compile(lambda x: sparse_attention(x, x, x), backend="eager")(shards[0])),
        ):
            with refused(f"{name}: expected all tokens, got those of one rank"):
                attend()
        out = ring_attention(*shards, RULE, layout=layout, group=mesh, enable_gqa=True)
        out.backward(mine[3])
        assert relative_error(out, layout.shard(expected.detach(), rank)) < 1e-14
        for x, whole in zip(shards, leaves, strict=True):
            assert x.grad is not None
            assert whole.grad is not None
            assert relative_error(x.grad, layout.shard(whole.grad, rank)) < 1e-14
        model.layers[0].attend = ring_attend(mesh, layout)
        assert model(torch.randn(1, layout.size(rank), 32, dtype=torch.float64)).isfinite().all()
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert sparse_attention(q, k, v, RULE, enable_gqa=True).isfinite().all()

    striped = Layout.striped(N, n_ranks, unit=10)
    balancer = balancer_of(striped)
    (shard,) = _attention._context_parallel_shard(mesh, [q], [2], balancer)
    assert isinstance(shard, Tensor)
    assert torch.equal(shard, striped.shard(q, rank))
    (whole,) = _attention.context_parallel_unshard(mesh, [shard], [2], balancer)
    assert torch.equal(whole, q)


def test_our_attention_in_their_context_and_our_layout_in_their_shards() -> None:
    outcome = run_processes(2, _inside_context_parallel)
    assert outcome.exit_codes == [0, 0], "\n".join(outcome.texts)


@pytest.mark.parametrize(
    "balancer",
    [
        None,
        _load_balancer._HeadTailLoadBalancer(48, 3, "cpu"),
        balancer_of(Layout.striped(48, 3, unit=4)),
    ],
    ids=["equal runs", "head-tail", "ours"],
)
def test_shards_are_those_that_pytorch_deals_out(balancer: Any) -> None:
    def dealt(rank: int) -> tuple[Layout, Tensor]:
        mesh = mesh_of(3)
        (shard,) = _attention._context_parallel_shard(mesh, [torch.arange(48)], [0], balancer)
        assert isinstance(shard, Tensor)
        return shards_of(48, mesh, balancer), shard

    for rank, (layout, shard) in enumerate(on_ranks(3, dealt)):
        assert torch.equal(layout.positions(rank), shard)


class _Indices(_load_balancer._LoadBalancer):
    def __init__(self, *rows: list[int]) -> None:
        self.indices = torch.tensor(rows)

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self.indices


def test_shards_of_documents_are_those_that_pytorch_deals_out_if_they_ascend() -> None:
    # Before 2.14, a rank gets the tokens of one part after those of another.
    balancer = PER_DOCUMENT([[4, 12]], 2, "cpu")
    ascending = bool((balancer._generate_indices().view(2, 8).diff() > 0).all())
    assert ascending == (torch.__version__ >= (2, 14))

    def dealt(rank: int) -> None:
        mesh = mesh_of(2)
        (shard,) = _attention._context_parallel_shard(mesh, [torch.arange(16)], [0], balancer)
        if ascending:
            assert torch.equal(shards_of(16, mesh, balancer).positions(rank), shard)
        else:
            with refused("tokens of a rank in ascending order"):
                shards_of(16, mesh, balancer)

    on_ranks(2, dealt)


def test_shards_that_no_layout_has_are_refused() -> None:
    def refusals(rank: int) -> None:
        mesh = mesh_of(2)
        for n_tokens, balancer, message in (
            (5, None, "n_tokens: expected a multiple of 2"),
            (4, _Indices([0, 2, 1, 3], [0, 1, 2, 3]), "all batch elements alike"),
            (4, _Indices([2, 0, 1, 3]), "tokens of a rank in ascending order"),
            (6, _Indices([0, 1, 2, 3]), "balancer: expected one that shards 6 tokens"),
        ):
            with refused(message):
                shards_of(n_tokens, mesh, balancer)

    on_ranks(2, refusals)
    with refused(r"equally many tokens at each rank, got \[44, 128\]"):
        balancer_of(Layout(172, (((0, 128),), ((128, 172),))))
