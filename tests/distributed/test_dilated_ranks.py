"""LongNet over ranks against one process: results, dropout, traffic, plans."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracle import Inputs, make_inputs, relative_error
from processes import counted_traffic, on_ranks
from torch import Tensor

from ringtile.distributed import Layout, ring_dilated_attention
from ringtile.distributed.branches import BranchPlan, Shape, make_branch_plan
from ringtile.distributed.layout import counts_of
from ringtile.functional import dilated_attention
from ringtile.patterns import Blocks, Causal, Pattern, Segments, Window, per_head

N_TOKENS = 261
NESTED, OTHERS, OFTEN_SHARED = ([32, 64, 512], [1, 2, 4]), ([30, 96, 480], [1, 3, 7]), ([50, 110], [3, 2])
LAYOUTS = {
    "contiguous": lambda n, ranks: Layout.contiguous(n, ranks, unit=64),
    "equal zigzag": lambda n, ranks: Layout.zigzag(n, ranks, unit=1),
    "striped": lambda n, ranks: Layout.striped(n, ranks, unit=40),
}


@pytest.fixture(autouse=True)
def _queries_without_keys_are_expected() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dilated_attention: no branch")
        yield


@cache
def problem(heads: int = 4, kv_heads: int = 4) -> tuple[Inputs, Tensor]:
    inputs = make_inputs(2, heads, N_TOKENS, head_dim=8, kv_heads=kv_heads, value_dim=4)
    return inputs, torch.randn(2, heads, N_TOKENS, dtype=torch.float64)


def results(attend: Any, inputs: Any, grad_lse: Tensor, *branches: Any, **options: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = attend(*leaves, *branches, enable_gqa=True, return_lse=True, **options)
    grads = torch.autograd.grad((out, torch.where(lse == -math.inf, 0, lse)), leaves, (inputs[3], grad_lse))
    return [out.detach(), lse.detach(), *grads]


def results_of_ranks(layout: Layout, inputs: Inputs, grad_lse: Tensor, *branches: Any, **options: Any) -> list[Tensor]:
    def run(rank: int) -> list[Tensor]:
        shards, mine = [layout.shard(x, rank) for x in (*inputs, grad_lse)], dict(options)
        if "key_mask" in options:
            mine["key_mask"] = layout.shard(options["key_mask"], rank, 1)
        return results(ring_dilated_attention, shards[:4], shards[4], *branches, layout=layout, **mine)

    return [layout.unshard(shards) for shards in zip(*on_ranks(layout.n_ranks, run), strict=True)]


def check(layout: Layout, branches: Any, *, heads: int = 4, kv_heads: int = 4, **options: Any) -> None:
    inputs, grad_lse = problem(heads, kv_heads)
    expected = results(dilated_attention, inputs, grad_lse, *branches, **options)
    found = results_of_ranks(layout, inputs, grad_lse, *branches, **options)
    for name, x, right in zip(("out", "lse", "q", "k", "v"), found, expected, strict=True):
        assert relative_error(x, right) < 1e-12, name


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (NESTED, {"is_causal": True, "kv_heads": 2}),
    "all": (OTHERS, {}),
    "union": (NESTED, {"is_causal": True, "overlap": "union", "dropout_p": 0.3, "seed": 3}),
}
CASES = [
    # Every pair of a kind, a layout and a number of ranks.
    f"{kind}-{list(LAYOUTS)[(row + column + 2) % 3]}-{n_ranks}"
    for row, n_ranks in enumerate((1, 2, 3, 4, 8))
    for column, kind in enumerate(KINDS)
]


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(case: str) -> None:
    kind, layout, n_ranks = case.split("-")
    branches, options = KINDS[kind]
    check(LAYOUTS[layout](N_TOKENS, int(n_ranks)), branches, **options)


@pytest.mark.parametrize(("layout", "is_causal"), [("contiguous", False), ("equal zigzag", True), ("striped", False)])
def test_options(layout: str, is_causal: bool) -> None:
    made, causal = LAYOUTS[layout](N_TOKENS, 3), {"is_causal": is_causal}
    mask = torch.rand(2, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.7
    check(made, NESTED, key_mask=mask, heads=6, kv_heads=2, scale=0.2, **causal)
    check(made, OTHERS, dropout_p=0.2, seed=torch.tensor([9]), key_mask=mask, **causal)
    # Three query heads share a key head, two of them at one offset.
    check(made, OFTEN_SHARED, heads=6, kv_heads=2, dropout_p=0.2, seed=1, **causal)
    check(made, OFTEN_SHARED, heads=6, kv_heads=1, overlap="union", **causal)
    check(made, NESTED, backend="reference", **causal)


@pytest.mark.parametrize("overlap", ["mix", "union"])
def test_patterns_inside_segments(overlap: str) -> None:
    layout = Layout.contiguous(N_TOKENS, 3, unit=1)
    heads = [Window(9), Causal(), Causal() & Window(20), ~Window(3)]
    check(layout, ([32, 96, 480], [2, 3, 1]), pattern=Window(11), overlap=overlap, is_causal=True)
    check(layout, ([32, 480], [2, 1]), pattern=per_head(heads), overlap=overlap, dropout_p=0.2, seed=2)
    # A rule for one length only needs whole segments.
    small = Layout.contiguous(384, 2, unit=1)
    inputs, grad_lse = make_inputs(1, 2, 384, head_dim=8), torch.randn(1, 2, 384, dtype=torch.float64)
    options = {"pattern": Blocks(torch.tensor([[True]])), "is_causal": True, "overlap": overlap}
    expected = results(dilated_attention, inputs, grad_lse, [128], [1], **options)
    found = results_of_ranks(small, inputs, grad_lse, [128], [1], **options)
    assert max(map(relative_error, found, expected)) < 1e-12


def test_a_few_tokens() -> None:
    """Ranks without tokens, segments longer than the sequence, rates longer than segments."""
    inputs, grad_lse = make_inputs(2, 3, 5, head_dim=4), torch.randn(2, 3, 5, dtype=torch.float64)
    for layout in (Layout.contiguous(5, 8), Layout.striped(5, 3, unit=1), Layout(5, ((), ((1, 3),), ((0, 1), (3, 5))))):
        for is_causal in (False, True):
            branches = [2, 100, 3], [1, 2, 7]
            expected = results(dilated_attention, inputs, grad_lse, *branches, is_causal=is_causal)
            found = results_of_ranks(layout, inputs, grad_lse, *branches, is_causal=is_causal)
            assert max(map(relative_error, found, expected)) < 1e-12


def test_half_precision_is_as_good_as_on_one_process() -> None:
    inputs, grad_lse = problem()
    exact = results(dilated_attention, inputs, grad_lse, *NESTED)
    half = Inputs(*(x.bfloat16() for x in inputs))
    alone = results(dilated_attention, half, grad_lse.float(), *NESTED)
    found = results_of_ranks(Layout.zigzag(N_TOKENS, 4, unit=1), half, grad_lse.float(), *NESTED)
    for x, one, right in zip(found, alone, exact, strict=True):
        assert x.dtype == one.dtype
        assert relative_error(x, right) < 1.2 * relative_error(one, right)


@pytest.mark.parametrize(("layout", "is_causal"), [("contiguous", True), ("equal zigzag", False), ("striped", True)])
def test_collectives_get_the_planned_bytes(layout: str, is_causal: bool) -> None:
    made = LAYOUTS[layout](N_TOKENS, 4)
    inputs, grad_lse = problem(4, 2)

    def run(rank: int) -> None:
        shards = [made.shard(x, rank) for x in (*inputs, grad_lse)]
        results(ring_dilated_attention, shards[:4], shards[4], *NESTED, layout=made, is_causal=is_causal)
        shapes = tuple(Shape(*at, is_causal) for at in zip(*NESTED, strict=True))
        plan = make_branch_plan(shapes, made, rank, 4, 2, False)
        items = sum(map(len, plan.sent)) + sum(counts_of(plan.received))
        assert local.traffic.sent == local.traffic.received == items * 2 * (8 + 4) * 8
        # One exchange for all branches in each pass.
        assert local.traffic.calls == ["all_to_all_single"] * 2

    with counted_traffic() as local:
        on_ranks(4, run)


def test_a_branch_inside_shards_sends_nothing() -> None:
    layout, (inputs, grad_lse) = Layout.contiguous(N_TOKENS, 5, unit=64), problem()

    def run(rank: int) -> None:
        shards = [layout.shard(x, rank) for x in (*inputs, grad_lse)]
        results(ring_dilated_attention, shards[:4], shards[4], [16, 32, 64], [1, 2, 4], layout=layout)
        assert (local.traffic.calls, local.traffic.compared) == ([], 16)

    with counted_traffic() as local:
        on_ranks(5, run)


def kept_by(shape: Shape, n_tokens: int, head: int) -> Tensor:
    """The pairs of a branch, by its definition."""
    rule: Pattern = Segments(shape.length, shape.dilation)
    query, key = torch.arange(n_tokens).unsqueeze(1), torch.arange(n_tokens)
    kept = rule.allowed(torch.tensor(head), query, key)
    return kept & (key <= query) if shape.is_trimmed else kept


@settings(max_examples=15)
@given(st.data())
def test_ranks_get_each_token_that_they_need_once_and_no_other(data: st.DataObject) -> None:
    n_tokens, n_ranks = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 5))
    make = data.draw(st.sampled_from([Layout.contiguous, Layout.zigzag, Layout.striped]))
    layout = make(n_tokens, n_ranks, unit=data.draw(st.sampled_from([1, 5, 16])))
    kv_heads, ratio = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    numbers = st.tuples(st.integers(1, 60), st.integers(1, 7), st.booleans())
    shapes = tuple(Shape(*at) for at in data.draw(st.lists(numbers, min_size=1, max_size=3)))
    by_offset = data.draw(st.booleans())
    plans = [make_branch_plan(shapes, layout, rank, kv_heads * ratio, kv_heads, by_offset) for rank in range(n_ranks)]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert len({plan.is_mixed for plan in plans}) == 1
    numbers_of = [
        (torch.arange(kv_heads).unsqueeze(1) * n_tokens + layout.positions(rank)).flatten() for rank in range(n_ranks)
    ]
    for plan in plans:
        mine = numbers_of[plan.rank]
        assert plan.n_tokens == len(mine)
        filled = torch.full((plan.n_buffer,), -1)
        filled[plan.own.target] = mine[plan.own.source]
        for other in plans:
            places = torch.cat([mine[:0], *(torch.arange(*run) for run in plan.received[other.rank])])
            assert (filled[places] == -1).all()
            filled[places] = numbers_of[other.rank][other.sent[plan.rank]]
        assert torch.equal(filled[plan.places], plan.items)
        check_needs(plan, shapes, ratio, filled, by_offset)


def check_needs(plan: BranchPlan, shapes: tuple[Shape, ...], ratio: int, filled: Tensor, by_offset: bool) -> None:
    """The rank gets the kept keys of other ranks, and its pieces are the kept pairs of its queries."""
    n_tokens, own = plan.layout.n_tokens, plan.layout.positions(plan.rank)
    heads = plan.n_tokens // max(len(own), 1) * ratio
    mine = (torch.arange(max(heads // ratio, 1)).unsqueeze(1) * n_tokens + own).flatten()
    wanted, computed = set(), [torch.zeros(heads, n_tokens, n_tokens) for _ in shapes]
    for number, shape in enumerate(shapes):
        for head in range(heads):
            keys = kept_by(shape, n_tokens, head)[own].any(0).nonzero().flatten()
            wanted |= {head // ratio * n_tokens + key for key in keys.tolist()}
        pieces = [piece for piece in plan.pieces if piece.branch == number]
        for piece in pieces:
            shared = len(piece.heads) // len(piece.key_heads)
            rows = piece.rows(len(own)).view(len(piece.segments), len(piece.heads), piece.n_queries)
            keys = (mine if piece.is_local else filled)[piece.keys(len(own), plan)]
            keys = keys.view(len(piece.segments), len(piece.key_heads), piece.n_keys).repeat_interleave(shared, 1)
            assert not by_offset or len({offset for _, offset in piece.key_heads}) == 1
            for segment in range(len(rows)):
                for place, head in enumerate(piece.heads):
                    assert (rows[segment, place] // len(own) == head).all()
                    assert (keys[segment, place] // n_tokens == head // ratio).all()
                    kept = torch.ones(piece.n_queries, piece.n_keys)
                    kept = kept.tril(piece.first) if shape.is_trimmed else kept
                    queries = own[rows[segment, place] % len(own)].unsqueeze(1)
                    computed[number][head].index_put_((queries, keys[segment, place] % n_tokens), kept, accumulate=True)
        for head in range(heads):
            assert torch.equal(computed[number][head][own], kept_by(shape, n_tokens, head)[own].float())
    remote = wanted - set(mine.tolist())
    assert sum(counts_of(plan.received)) == len(remote)
    assert remote <= set(filled.tolist())


def test_a_million_tokens_over_many_ranks() -> None:
    """The branches of the paper. Plans are as small as what travels."""
    lengths, rates, n_tokens = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), 1 << 20
    for n_ranks in (64, 1024):
        layout, n_own = Layout.contiguous(n_tokens, n_ranks), n_tokens // n_ranks
        for is_causal in (False, True):
            shapes = tuple(Shape(*at, is_causal) for at in zip(lengths, rates, strict=True))
            plan = make_branch_plan(shapes, layout, n_ranks // 2 + 1, 32, 8, False)
            # Of the segments that several ranks share, each of eight key heads needs the offsets of four query heads.
            needed, own = set(), range(plan.rank * n_own, (plan.rank + 1) * n_own)
            for length, rate in zip(lengths, rates, strict=True):
                origin = own.start // length * length
                end = own.stop if is_causal else max(own.stop, origin + length)
                for head in range(32):
                    tokens = range(origin + head % rate, end, rate)
                    needed |= {(head // 4, token) for token in tokens if token not in own}
            assert sum(counts_of(plan.received)) == len(needed)
            assert len(needed) < 0.02 * n_tokens * 8
            assert len(plan.pieces) <= 10
            tensors = [plan.items, plan.places, *plan.own, *plan.sent]
            assert sum(x.nbytes for x in tensors) <= 28 * plan.n_buffer + 4 * sum(map(len, plan.sent))


def test_plans_that_are_too_large_are_refused_before_they_allocate() -> None:
    layout = Layout(1 << 14, tuple(tuple((x, x + 1) for x in range(rank, 1 << 14, 2)) for rank in range(2)))
    with pytest.raises(ValueError, match=r"layout: expected at most 4,194,304 runs .* for the branch \(512, 512\)"):
        make_branch_plan((Shape(512, 512, False),), layout, 0, 512, 1, False)
    layout = Layout.contiguous(1 << 40, 2)
    for rank, is_causal in ((0, True), (1, True), (0, False)):
        with pytest.raises(ValueError, match=r"layout: a rank shares segments over .* tokens and 8 key heads, and the"):
            make_branch_plan((Shape(1 << 40, 1, is_causal),), layout, rank, 8, 8, False)
