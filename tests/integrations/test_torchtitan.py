"""torchtitan's models on our attention, on one rank and over its context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import kept_pairs, refused, relative_error
from processes import on_ranks
from torch import Tensor

from ringtile import sparse_attention
from ringtile.distributed import Layout
from ringtile.integrations.torchtitan import documents_of
from ringtile.patterns import Causal, Documents, Window

N = 256


@pytest.fixture(scope="module")
def titan() -> Any:
    return pytest.importorskip("torchtitan", reason="torchtitan is not installed")


def model_of(make: Callable[..., Any] | None = None, **options: Any) -> Any:
    from torchtitan.models.llama3 import _debugmodel

    from ringtile.integrations import torchtitan

    config = _debugmodel("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = (make or torchtitan.SparseAttention.Config)(**options)
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def gradients(model: Any, tokens: Tensor, grad: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(tokens, **inputs)
    out.backward(grad)
    return out.detach(), {name: x.grad for name, x in model.named_parameters()}


def packed_rows() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    positions = torch.cat([torch.arange(100), torch.arange(N - 100)]).expand(2, -1).clone()
    positions[1] = torch.arange(N)
    return torch.randint(2048, (2, N)), positions, torch.randn(2, N, 2048)


def test_a_model_computes_what_it_computes_with_a_mask(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    tokens, positions, grad = packed_rows()
    documents = documents_of(positions)
    mask = kept_pairs(Causal() & Window(50) & documents, *torch.empty(2, 2, 1, N, 1).unbind())

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)

    monkeypatch.setattr(ScaledDotProductAttention, "forward", attend)
    stock = model_of(ScaledDotProductAttention.Config)
    expected, wanted = gradients(stock, tokens, grad, positions=positions)
    ours = model_of(pattern="causal & window(50)")
    found, grads = gradients(ours, tokens, grad, positions=positions, attention_masks=documents)
    assert relative_error(found, expected) < 1e-5
    for name, x in wanted.items():
        assert relative_error(grads[name], x) < 1e-5


def test_sinks_get_the_lse_and_what_would_be_dropped_is_refused(titan: Any) -> None:
    from ringtile.integrations import torchtitan

    attention = torchtitan.SparseAttention.Config(pattern="window(20)").build()
    q, k, v = torch.randn(3, 1, 60, 4, 16).unbind()
    sinks = torch.randn(4)
    out = attention(q, k, v, out_transform=lambda out, lse: out * torch.sigmoid(lse - sinks).unsqueeze(-1))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = sparse_attention(*heads, Causal() & Window(20), sinks=sinks).transpose(1, 2)
    assert relative_error(out, expected) < 1e-6
    narrow = sparse_attention(*heads, Causal() & Window(5)).transpose(1, 2)
    assert torch.equal(attention(q, k, v, attention_masks="window(5)"), narrow)
    with refused("attention_masks: expected a Pattern, its text or None, got Tensor"):
        attention(q, k, v, attention_masks=torch.ones(60, 60, dtype=torch.bool))
    with refused("score_mod: expected None, or its default"):
        attention(q, k, v, score_mod=lambda score, *at: score)
    with refused("balancer: expected 'headtail' or None, got 'ptrr'"):
        torchtitan.SparseAttention.Config(balancer="ptrr").build()


@pytest.mark.parametrize("balancer", ["headtail", None])
def test_context_parallelism_computes_what_one_rank_computes(titan: Any, balancer: str | None) -> None:
    from torchtitan.distributed.context_parallel import apply_cp_to_forward, prepare_context_parallel_input

    tokens, positions, grad = packed_rows()
    options = {"pattern": "causal & window(50)", "balancer": balancer}
    documents = documents_of(positions)
    whole = model_of(**options)
    expected, wanted = gradients(whole, tokens, grad, positions=positions, attention_masks=documents)

    models = [model_of(**options) for _ in range(2)]

    def on_a_rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        mesh, model = dist.init_device_mesh("cpu", (2,)), models[rank]
        apply_cp_to_forward([layer.attention.inner_attention for layer in model.layers.values()], mesh)
        mine, _, more = prepare_context_parallel_input(
            tokens, tokens, {"positions": positions}, mesh, torch.device("cpu"), balancer
        )
        shard = layout.shard(grad, rank, dim=1)
        return gradients(model, mine, shard, **more, attention_masks=documents)

    layout = Layout.contiguous(N, 2) if balancer is None else Layout.zigzag(N, 2, unit=N // 4)
    found = on_ranks(2, on_a_rank)
    assert relative_error(layout.unshard([out for out, _ in found], dim=1), expected) < 1e-5
    for name, x in wanted.items():
        assert relative_error(sum(grads[name] for _, grads in found), x) < 1e-5


def test_documents_begin_where_positions_do() -> None:
    found = documents_of(torch.tensor([[0, 1, 2, 0, 1], [4, 5, 0, 1, 2]]))
    assert found == Documents(ids=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]))
