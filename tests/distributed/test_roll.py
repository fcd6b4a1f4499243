"""`roll` over ranks against `torch.roll`: values, gradients, bytes and wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from processes import counted_traffic, on_ranks
from torch import Tensor

from ringtile.distributed import Layout, PlanMismatch, lockstep, roll
from ringtile.distributed.failures.faults import handshakes

MAKERS = [Layout.contiguous, Layout.zigzag, Layout.striped]


def rolled_whole(x: Tensor, shifts: int, dim: int, fill: float | None) -> Tensor:
    out = torch.roll(x, shifts, dim)
    if fill is None:
        return out
    position = torch.arange(x.shape[dim]) - shifts
    absent = ((position < 0) | (position >= len(position))).view([-1 if d == dim else 1 for d in range(x.dim())])
    return out.masked_fill(absent, fill)


@settings(max_examples=40)
@given(st.data())
def test_a_roll_is_that_of_one_process(data: st.DataObject) -> None:
    n_tokens, n_ranks = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 4))
    layout = data.draw(st.sampled_from(MAKERS))(n_tokens, n_ranks, unit=data.draw(st.sampled_from([1, 3, 16])))
    shifts, dim = data.draw(st.integers(-70, 70)), data.draw(st.integers(0, 2))
    fill = data.draw(st.sampled_from([None, -100.0]))
    x = torch.randn([n_tokens if place == dim else size for place, size in enumerate((2, 3, 4))], dtype=torch.float64)
    weight = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    wanted = rolled_whole(leaf, shifts, dim, fill)
    (grad,) = torch.autograd.grad(wanted, leaf, weight)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        mine = layout.shard(x, rank, dim).clone().requires_grad_()
        out = roll(mine, shifts, layout, dim=dim, fill=fill)
        return out.detach(), torch.autograd.grad(out, mine, layout.shard(weight, rank, dim))[0]

    outs, grads = zip(*on_ranks(n_ranks, run), strict=True)
    assert torch.equal(layout.unshard(outs, dim), wanted)
    assert torch.equal(layout.unshard(grads, dim), grad)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_labels_masks_and_half_precision_roll(dtype: torch.dtype) -> None:
    layout = Layout.zigzag(40, 2, unit=4)
    x = torch.randint(0, 2, (3, 40)).to(dtype)
    outs = on_ranks(2, lambda rank: roll(layout.shard(x, rank, 1), -1, layout, fill=1))
    assert torch.equal(layout.unshard(outs, 1), rolled_whole(x, -1, 1, 1))


@pytest.mark.parametrize(("layout", "tokens"), [(Layout.contiguous, [1, 1, 1, 0]), (Layout.zigzag, [1, 2, 2, 1])])
def test_only_the_tokens_that_change_their_rank_travel(layout: Any, tokens: list[int]) -> None:
    made = layout(1 << 20, 4)
    mine = [torch.zeros(2, made.size(rank), dtype=torch.int64) for rank in range(4)]

    def run(rank: int) -> tuple[int, int, list[str]]:
        roll(mine[rank], -1, made, fill=-100)
        return local.traffic.received, local.traffic.sent, local.traffic.calls

    with counted_traffic() as local:
        found = on_ranks(4, run)
    # One label per run and row, but the last run needs none.
    assert [received for received, _, _ in found] == [2 * 8 * count for count in tokens]
    assert sum(sent for _, sent, _ in found) == sum(received for received, _, _ in found)
    assert all(calls == ["all_to_all_single"] for _, _, calls in found)


def test_second_derivatives_roll_back() -> None:
    layout = Layout.contiguous(12, 3, unit=1)
    x = torch.randn(1, 12, dtype=torch.float64)

    def run(rank: int) -> Tensor:
        mine = layout.shard(x, rank, 1).clone().requires_grad_()
        (first,) = torch.autograd.grad(roll(mine, 5, layout).pow(3).sum(), mine, create_graph=True)
        return torch.autograd.grad(first.sum(), mine)[0]

    assert torch.allclose(layout.unshard(on_ranks(3, run), 1), 6 * x)


def test_ranks_that_shift_by_other_numbers_are_named() -> None:
    layout = Layout.contiguous(8, 2, unit=1)

    def run(rank: int) -> None:
        with pytest.raises(PlanMismatch, match="rank 0 has shifts=1, rank 1 has shifts=2"):
            roll(torch.ones(1, 4), 1 + rank, layout)
        with pytest.raises(PlanMismatch, match="rank 0 has gradient=False, rank 1 has gradient=True"):
            roll(torch.ones(1, 4, requires_grad=rank == 1), 1, layout)

    on_ranks(2, run)


def test_compared_calls_are_forgotten_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "AGREED", 2)
    layout = Layout.contiguous(8, 2, unit=1)

    def run(rank: int) -> int:
        before = handshakes()
        dist.barrier()
        for shifts in (1, 2, 1, 2, 3, 1, 3):
            roll(torch.ones(1, 4), shifts, layout)
        dist.barrier()
        return handshakes() - before

    # Two new ones, then a third that makes all forget, and 1 again. Both threads count.
    assert on_ranks(2, run)[0] == 2 * 4
