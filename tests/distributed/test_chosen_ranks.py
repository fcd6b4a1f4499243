"""Lists of keys per query over ranks: results of one process, bytes, refusals, and an indexer whose keys are shared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import SDPA_BUDGET, make_inputs, oracle, relative_error, sdpa_low_precision_error
from processes import counted_traffic, on_ranks, run_processes
from test_distributed import LAYOUTS, attend_apart, attend_whole, split_results
from test_ring_processes import check_compiled, check_equal, gradients
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ringtile import sparse_attention
from ringtile.adaptive import index_topk
from ringtile.distributed import Layout, PlanMismatch, make_plan, prepare, ring_attention, ring_dilated_attention
from ringtile.patterns import Causal, Chosen, Documents, Pattern, Window
from ringtile.patterns.chosen import split

N_TOKENS, CAUSAL = 331, Causal()
Rule = Callable[[Tensor], Pattern]


def lists(groups: int = 2, block: int = 1, batch: int = 2, width: int = 20, n_tokens: int = N_TOKENS) -> Tensor:
    """Lists over the whole sequence, in any order, with -1 anywhere and rows without any."""
    indices = torch.randint(-1, -(-n_tokens // block), (batch, groups, n_tokens, width))
    indices[:, :, 5::60] = -1
    return indices


def check(rule: Rule, layout: Layout, indices: Tensor, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Outputs, lse and all gradients of the ranks are those of one process."""
    problem = make_inputs(2, 4, N_TOKENS, head_dim=8, kv_heads=2, value_dim=4, dtype=dtype)
    grad_lse = torch.randn(problem.q.shape[:3], dtype=dtype)
    whole = attend_whole(problem, grad_lse, rule(indices), **options)

    def run(rank: int) -> dict[str, Tensor]:
        return attend_apart(problem, grad_lse, rule(layout.shard(indices, rank)), layout, rank, **options)

    found = split_results(layout, on_ranks(layout.n_ranks, run))
    for name, x in found.items():
        assert relative_error(x, whole[name]) < (1e-13 if dtype == torch.float64 else 1e-6), name
    assert all(bool(whole[name].any()) for name in "qkv")


def causal(indices: Tensor) -> Pattern:
    return CAUSAL & Chosen(indices)


DOCUMENTS = Documents([100, 3, 200, 28])
BY_ROW = Documents(ids=torch.stack([torch.arange(N_TOKENS) // length for length in (90, 150)]))
RULES: dict[str, Rule] = {
    "lists": Chosen,
    "causal": causal,
    "window": lambda indices: Chosen(indices) & Window(50),
    "documents": lambda indices: CAUSAL & Chosen(indices) & DOCUMENTS,
    "documents by row": lambda indices: CAUSAL & BY_ROW & Chosen(indices),
    "outside a window": lambda indices: CAUSAL & Chosen(indices) & ~Window(20),
    "or a window": lambda indices: CAUSAL & (Chosen(indices) | Window(20)),
}


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_compute_what_one_process_does(layout: str, n_ranks: int) -> None:
    check(causal, LAYOUTS[layout](N_TOKENS, n_ranks), lists())


@pytest.mark.parametrize("name", RULES)
def test_rules_count_positions(name: str) -> None:
    check(RULES[name], Layout.zigzag(N_TOKENS, 2, unit=1), lists())


def test_a_rank_without_tokens_takes_part() -> None:
    check(causal, Layout(N_TOKENS, (((0, 40), (90, N_TOKENS)), (), ((40, 90),))), lists())
    check(RULES["or a window"], Layout(N_TOKENS, ((), ((0, N_TOKENS),))), lists())


@pytest.mark.parametrize("name", ["causal", "or a window"])
def test_half_precision_is_as_close_as_pytorch(name: str) -> None:
    """A window beside the lists is computed run by run, and the gradients of its keys are summed in float32."""
    indices = lists(batch=1, width=60)
    problem = make_inputs(1, 4, N_TOKENS, head_dim=16, kv_heads=2, dtype=torch.bfloat16)
    found = split(RULES[name](indices))
    assert found is not None
    theirs = sdpa_low_precision_error(*problem[:3], found.rule(0, 4), problem.grad_out, start=0)
    expected = oracle(*problem[:3], found.rule(0, 4), grad_out=problem.grad_out, start=0)
    grad_lse = torch.zeros(problem.q.shape[:3])

    def errors(layout: Layout) -> dict[str, float]:
        def run(rank: int) -> dict[str, Tensor]:
            return attend_apart(problem, grad_lse, RULES[name](layout.shard(indices, rank)), layout, rank)

        results = split_results(layout, on_ranks(2, run))
        assert relative_error(results["out"], expected.out) <= SDPA_BUDGET[torch.bfloat16] * theirs.out
        return {x: relative_error(results[x], grad) for x, grad in expected.grads.items()}

    in_runs, in_one = errors(Layout.striped(N_TOKENS, 2, unit=8)), errors(Layout.contiguous(N_TOKENS, 2, unit=1))
    for x in "qkv":
        assert in_runs[x] <= SDPA_BUDGET[torch.bfloat16] * theirs.grads[x], x
        # Each of two ranks rounds a key's gradient. In one run a key can be that of one rank alone.
        assert in_runs[x] <= 2**0.5 * in_one[x], x


@pytest.mark.parametrize(("is_latent", "layout"), [(True, "contiguous"), (False, "zigzag"), (True, "equal")])
def test_collectives_get_the_planned_bytes(is_latent: bool, layout: str) -> None:
    """One key head of 576, whose first 512 are the values: in memory too if it is latent, and then they travel once."""
    made = LAYOUTS[layout](1100, 4)
    q, k, v = torch.randn(1, 4, 1100, 576), torch.randn(1, 1, 1100, 576), torch.randn(1, 1, 1100, 512)
    v = k[..., :512] if is_latent else v
    indices, grad_out = lists(1, 1, 1, n_tokens=1100), torch.randn(1, 4, 1100, 512)

    def attended(at: Callable[[Tensor], Tensor], attend: Callable[..., Tensor]) -> dict[str, Tensor]:
        query, key = at(q).clone().requires_grad_(), at(k).clone().requires_grad_()
        value = key[..., :512] if is_latent else at(v).clone().requires_grad_()
        out = attend(query, key, value, causal(at(indices)), enable_gqa=True)
        grads = torch.autograd.grad(out, (query, key, value), at(grad_out))
        return {"out": out.detach(), **dict(zip("qkv", grads, strict=True))}

    def run(rank: int) -> dict[str, Tensor]:
        found = attended(lambda x: made.shard(x, rank), partial(ring_attention, layout=made, transport="gather"))
        plan = make_plan(None, made, rank, gather=True)
        assert plan.n_buffer == 1100
        hot, cold = plan.tokens_hot[rank], sum(plan.tokens_sent)
        others = sum(plan.tokens_hot) - hot + sum(plan.tokens_received)
        # Keys, or keys and values, leave once and arrive once. The gradients of both go the opposite way.
        there, back = (576 if is_latent else 576 + 512) * 4, (576 + 512) * 4
        assert hot + cold > 0
        assert local.traffic.sent == (hot + cold) * there + others * back
        assert local.traffic.received == others * there + (hot + cold) * back
        return found

    with counted_traffic() as local:
        found = split_results(made, on_ranks(4, run))
    whole = attended(lambda x: x, sparse_attention)
    for name, x in found.items():
        assert relative_error(x, whole[name]) < 1e-6, name


def test_other_transports_name_gather() -> None:
    layout, x = Layout.contiguous(N_TOKENS, 1), torch.randn(1, 2, N_TOKENS, 8)
    rule = causal(lists(1, batch=1))

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1))
        for transport in ("exchange", "ring", "hierarchy", "ulysses"):
            how: dict[str, Any] = {"transport": transport, "group": mesh if transport == "hierarchy" else None}
            with pytest.raises(ValueError, match=f"^transport '{transport}' does not support Chosen: .* use 'gather'$"):
                ring_attention(x, x, x, rule, layout=layout, **how)
        only = r"^pattern: .* got Chosen: only sparse_attention, .*='gather'"
        short, high = Chosen(lists(1, batch=1)[:, :, 1:]), Chosen(lists(1, batch=1).clamp(min=0) + 1)
        for call, words in (
            (lambda: ring_dilated_attention(x, x, x, [64], [1], pattern=rule, layout=layout), only),
            (lambda: prepare(rule, layout, 0, num_heads=2), only),
            (lambda: make_plan(rule, layout, 0), only),
            (lambda: ring_attention(x, x, x, short, layout=layout), r"indices: expected \[1 or 1, 1 or 2, 331, n\]"),
            (lambda: ring_attention(x, x, x, high, layout=layout), "indices: expected -1 or numbers below 331"),
        ):
            with pytest.raises(ValueError, match=words):
                call()

    on_ranks(1, run)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda x, indices: (x[..., :4], Chosen(indices, 2)), "lists of blocks of 2"),
        (lambda x, indices: (x[..., :4], causal(indices)), "& causal"),
        (lambda x, indices: (x[..., :4].clone(), Chosen(indices)), "lists of blocks of 1 & dense"),
    ],
)
def test_ranks_that_disagree_are_told(other: Callable[[Tensor, Tensor], tuple[Tensor, Pattern]], words: str) -> None:
    layout, x, indices = Layout.contiguous(60, 2, unit=1), torch.randn(1, 1, 30, 8), lists(1, 2, 1, 5, 60)[:, :, :30]

    def run(rank: int) -> None:
        value, rule = other(x, indices) if rank else (x[..., :4], Chosen(indices))
        with pytest.raises(PlanMismatch, match=f"rank 1 has pattern='.*{words}"):
            ring_attention(x, x, value, rule, layout=layout)

    on_ranks(2, run)


def chooses_by_shared_keys(rank: int, size: int) -> None:
    """The page's ten lines choose as one process, and attend, learn and compile as one, twice with the same bits."""
    layout = Layout.zigzag(N_TOKENS, size, unit=3)
    problem = make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=1)
    query, key, weights = torch.randn(1, 2, N_TOKENS, 16), torch.randn(1, 1, N_TOKENS, 16), torch.rand(1, 2, N_TOKENS)
    small_q, small_k = layout.shard(query, rank), layout.shard(key, rank)
    shards = [torch.empty(1, 1, layout.size(other), 16) for other in range(size)]
    shards[rank] = small_k.contiguous()
    for other, shard in enumerate(shards):
        dist.broadcast(shard, other)
    every_k, at = layout.unshard(shards), layout.positions(rank).unsqueeze(0)
    how: dict[str, Any] = {"relu": True, "pattern": CAUSAL}
    indices = index_topk(small_q, every_k, 24, weights=layout.shard(weights, rank), start=at, **how)
    of_all = index_topk(query, key, 24, weights=weights, **how)
    assert torch.equal(indices, layout.shard(of_all, rank))
    whole = gradients(lambda *x: sparse_attention(*x, causal(of_all), enable_gqa=True), problem)

    def attend(*x: Tensor) -> Tensor:
        # Dynamo makes the pattern.
        return ring_attention(*x, CAUSAL & Chosen(indices), layout=layout, transport="gather", enable_gqa=True)

    found = gradients(attend, problem, layout)
    check_equal(found, whole, layout)
    assert all(torch.equal(x, y) for x, y in zip(gradients(attend, problem, layout), found, strict=True))
    check_equal(gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), problem, layout), whole, layout)
    check_compiled(attend, problem, whole, layout)
    print("passed", file=sys.stderr, flush=True)


def test_processes_choose_and_attend_as_one() -> None:
    outcome = run_processes(3, chooses_by_shared_keys, timeout=90.0)
    assert all("passed\n" in text for text in outcome.texts), outcome.texts
