"""Attention over lists of keys by the native kernel, against a dense masked softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from list_problems import NAMES, Case, Inputs, draw_inputs, draw_lists, expected, kept_pairs, sdpa_errors
from native_sets import INSTRUCTION_SETS, use_set
from oracle import SDPA_BUDGET, relative_error
from torch import Tensor

from ringtile import sparse_attention
from ringtile.kernels import native
from ringtile.kernels.blockwise import lists as composed
from ringtile.kernels.contracts import Lists, Rows
from ringtile.kernels.native import chosen
from ringtile.kernels.native.library import library, reason_against
from ringtile.kernels.triton import chosen as triton
from ringtile.patterns import Causal, Chosen

pytestmark = pytest.mark.skipif(bool(reason_against()), reason="the native kernel cannot be used here")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


CASES = {
    "one key head per query head": Case(2, 4, 4, 33, 70, 17, 33),
    "lists of key heads": Case(2, 4, 4, 33, 70, 17, 33, groups=4),
    "grouped": Case(1, 6, 3, 17, 90, 20, 24, groups=3),
    "grouped, one list": Case(1, 40, 2, 9, 300, 31, 8, length=170),
    "one key head, 16 heads": Case(1, 16, 1, 20, 200, 64, 64, length=100),
    "latent": Case(1, 16, 1, 6, 300, 576, 512, length=150),
    "latent, many heads": Case(1, 128, 1, 3, 200, 576, 512, length=90),
    "more heads than an item": Case(1, 130, 1, 3, 150, 33, 5, length=100),
    "one query": Case(2, 2, 2, 1, 900, 64, 64, length=300),
    "one query, 16 heads": Case(2, 32, 2, 1, 900, 64, 64, groups=2, length=300),
    "blocks of 16": Case(1, 3, 1, 50, 70, 7, 9, block=16, length=2),
    "blocks of 64": Case(2, 8, 2, 21, 500, 32, 16, groups=2, block=64, length=3),
    "blocks of 128": Case(1, 16, 2, 10, 700, 40, 128, groups=2, block=128, length=4),
    "a block of all keys": Case(1, 4, 2, 5, 100, 16, 16, block=4096, length=1),
    "one key": Case(1, 20, 2, 5, 1, 16, 16, length=1),
}
NEIGHBOURS = {
    "1 head": Case(2, 3, 3, 50, 300, 33, 40, length=80),
    "1 head, lists of key heads": Case(1, 2, 2, 37, 300, 64, 16, groups=2, length=70),
    "3 heads": Case(1, 6, 2, 23, 300, 24, 80, length=80),
    "5 heads": Case(2, 5, 1, 22, 200, 16, 16, length=90),
    "blocks of 4": Case(1, 4, 2, 45, 300, 16, 16, block=4, length=30),
    "blocks of 128": Case(1, 2, 1, 30, 900, 16, 16, groups=1, block=128, length=3),
}
"""Few heads, so that queries share the lanes if their lists agree."""


def computed(inputs: Inputs, lists: Any, scale: float) -> dict[str, Tensor]:
    """Outputs, lse and gradients by the kernel."""
    q, k, v, out_grad, lse_grad = inputs
    assert not chosen.unsupported(q, k, v, lists, 0.0)
    out, lse = chosen.forward(q, k, v, lists, scale)
    grads = chosen.backward(Rows(out_grad, lse_grad, q, k, v, out, lse), lists, scale)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def check(case: Case, dtype: torch.dtype, scale: float = 0.3, **lists_options: bool) -> None:
    """Compare one problem, within what PyTorch's own attention loses."""
    lists = draw_lists(case, **lists_options)
    assert case.n_queries < 2 or not kept_pairs(lists, case).any(3).all()
    check_these(draw_inputs(case, dtype), lists, case, scale)


def check_these(inputs: Inputs, lists: Lists, case: Case, scale: float = 0.3) -> None:
    """The same, of given tensors."""
    kept, dtype = kept_pairs(lists, case), inputs.q.dtype
    found, wanted, errors = computed(inputs, lists, scale), expected(inputs, kept, scale), {}
    for name in NAMES:
        assert found[name].dtype == (torch.float32 if name == "lse" else dtype)
        errors[name] = relative_error(found[name], wanted[name])
    bounds = {"lse": 2e-6, **sdpa_errors(inputs, kept, scale)}
    # Few rows leave a gradient of float32 to the luck of their roundings.
    if dtype == torch.float32:
        bounds |= dict.fromkeys("qkv", max(bounds[name] for name in "qkv"))
    for name, error in errors.items():
        assert error <= max(bounds[name] * SDPA_BUDGET[dtype], 2e-7), (name, errors, bounds)
    empty = ~kept.any(3)
    assert (found["lse"][empty] == -math.inf).all()
    assert not found["out"][empty].any()
    assert not found["q"][empty].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_dense_softmax(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


def union_lengths(inputs: Inputs, lists: Lists) -> Tensor:
    """The length of the union of each run, 0 if its queries are computed one by one."""
    return next(x for x in chosen._Job(*inputs[:3], lists, 0.3).c.tensors if x.dtype == torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_queries_that_share_a_union(name: str, dtype: torch.dtype) -> None:
    case = NEIGHBOURS[name]
    lengths = union_lengths(draw_inputs(case, dtype), draw_lists(case, near=True))
    assert lengths.any()
    assert not lengths.all() or case.block == 128
    for causal in (True, False):
        check(case, dtype, causal=causal, near=True)


@pytest.mark.parametrize(
    ("heads", "queries", "steps"), [(1, 16, (2, 3)), (2, 8, (4, 5)), (4, 4, (6, 7)), (5, 3, (5, 6)), (8, 2, (0, 1))]
)
def test_a_union_pays_if_it_is_faster_than_its_lists(heads: int, queries: int, steps: tuple[int, int]) -> None:
    """Its entries are a sixth of those of its lists, or more if heads share them."""
    case = Case(1, heads, 1, queries, 200, 8, 8, length=40)
    inputs, limits = draw_inputs(case, torch.float32), torch.tensor([0, 200]).int().expand(1, queries, 2).contiguous()
    for step, shared in zip(steps, (True, False), strict=True):
        entries = (torch.arange(20) + step * torch.arange(queries)[:, None]).int()[None, None]
        lists = Lists(F.pad(entries, (0, 20), value=-1), 1, limits)
        assert union_lengths(inputs, lists).tolist() == [(20 + step * (queries - 1)) * shared]
        check_these(inputs, lists, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 300, 2000, 64, 128, length=150),
        Case(1, 4, 1, 150, 1500, 192, 64, length=100),
        Case(2, 3, 3, 40, 700, 64, 33, length=90),
        Case(1, 5, 1, 60, 900, 64, 64, length=100),
        Case(1, 2, 2, 150, 3001, 64, 64, block=16, length=30),
    ],
    ids=lambda x: f"{x.heads} heads, {x.kv_heads}",
)
@pytest.mark.parametrize("near", [True, False])
def test_runs_that_go_through_segments_of_keys(case: Case, near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole vectors of dims are read in place, others are not, and windows of queries wait."""
    monkeypatch.setattr(chosen, "_WEIGHTS", 1)
    for dtype in DTYPES[:2]:
        check(case, dtype, near=near)


@pytest.mark.parametrize("heads", [1, 4])
def test_keys_of_unions_and_of_single_queries(heads: int) -> None:
    """Both add to the gradients of the same keys."""
    case = Case(1, heads, 1, 48, 200, 64, 48, length=60)
    near, far = draw_lists(case, near=True), draw_lists(case)
    mixed = near._replace(indices=torch.cat([near.indices[:, :, :20], far.indices[:, :, 20:]], 2).contiguous())
    lengths = union_lengths(inputs := draw_inputs(case, torch.float32), mixed)
    assert lengths.unique().tolist()[0] == 0 < int(lengths.max())
    check_these(inputs, mixed, case)


@pytest.mark.parametrize(("heads", "same"), [(1, True), (1, False), (8, True), (16, True)])
def test_a_key_of_many_queries_rounds_like_pytorch(heads: int, same: bool) -> None:
    """16,384 queries keep it, and terms of one sign are the worst case of a chain of sums."""
    n_queries, n_keys, width = 16384, 16, 8
    entries = torch.arange(2).expand(1, 1, n_queries, -1).clone()
    if not same:
        entries[..., 1] = torch.randint(1, n_keys, (n_queries,))
    limits = torch.tensor([0, n_keys]).int().expand(1, n_queries, 2).contiguous()
    lists = Lists(entries.int().contiguous(), 1, limits)
    case = Case(1, heads, 1, n_queries, n_keys, width, width)
    inputs = Inputs(*(x.abs() if at in (0, 3) else x for at, x in enumerate(draw_inputs(case, torch.float32))))
    inputs = inputs._replace(lse_grad=torch.zeros_like(inputs.lse_grad))
    kept = kept_pairs(lists, case)
    assert union_lengths(inputs, lists).any() == same if heads < 16 else True
    found, wanted, bounds = (f(inputs, x, 0.3) for f, x in ((computed, lists), (expected, kept), (sdpa_errors, kept)))
    for name in "kv":
        assert relative_error(found[name], wanted[name]) <= max(2.5 * bounds[name], 4e-7), (name, bounds)


def test_a_block_that_its_only_query_keeps_in_part() -> None:
    """The rest of the block is in the union, and no query of the run keeps it."""
    case = Case(1, 4, 1, 4, 40, 16, 16, block=4, length=9)
    inputs, entries = draw_inputs(case, torch.float32), torch.arange(9).int().expand(1, 1, 4, 9).clone()
    entries[:, :, 1:, 8] = -1
    limits = torch.tensor([[0, 34], [0, 40], [0, 40], [0, 40]]).int()[None]
    lists = Lists(entries, 4, limits)
    assert union_lengths(inputs, lists).tolist() == [9]
    check_these(inputs, lists, case)
    clean = computed(inputs, lists, 0.3)
    for x in (inputs.k, inputs.v):
        x[:, :, 34:] = math.nan
    found = computed(inputs, lists, 0.3)
    assert all(torch.equal(found[x], clean[x]) for x in NAMES)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_instruction_sets_that_are_not_chosen(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if instruction_set in {isa.name for isa in library().choice.by_dtype.values()}:
        pytest.skip(f"{instruction_set} is chosen, so that other tests run it")
    use_set(instruction_set, monkeypatch)
    for dtype in DTYPES:
        for name in ("one key head per query head", "latent", "more heads than an item", "blocks of 64", "one query"):
            check(CASES[name], dtype)
        check(NEIGHBOURS["3 heads"], dtype, near=True)


def test_bits_depend_neither_on_threads_nor_on_how_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_OPERATIONS_A_THREAD", 1)
    # Few queries whose weights wait.
    monkeypatch.setattr(chosen, "_WEIGHTS", 1)
    before = torch.get_num_threads()
    for name, dtype in (
        ("grouped, one list", DTYPES[0]),
        ("one key head per query head", DTYPES[0]),
        ("latent, many heads", DTYPES[1]),
        ("blocks of 64", DTYPES[2]),
    ):
        case, found = CASES[name], {}
        inputs, lists = draw_inputs(case, dtype), draw_lists(case)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            # Many calls.
            monkeypatch.setattr(native, "_OPERATIONS_A_CALL", 1e5 if threads == 2 else 2e10)
            found[threads] = computed(inputs, lists, 0.3)
        torch.set_num_threads(before)
        for threads in (2, 3):
            assert all(torch.equal(found[threads][x], found[1][x]) for x in NAMES), (case, threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_the_first_dims_of_keys(dtype: torch.dtype) -> None:
    """Latent attention: they are gathered once."""
    case = CASES["latent"]
    inputs, lists = draw_inputs(case, dtype), draw_lists(case)
    whole = computed(inputs._replace(v=inputs.k[..., :512].clone()), lists, 0.1)
    shared = computed(inputs._replace(v=inputs.k[..., :512]), lists, 0.1)
    assert all(torch.equal(whole[x], shared[x]) for x in NAMES)
    # As many numbers, of other dims.
    shifted = computed(inputs._replace(v=inputs.k[..., 64:]), lists, 0.1)
    assert torch.equal(shifted["out"], computed(inputs._replace(v=inputs.k[..., 64:].clone()), lists, 0.1)["out"])


@pytest.mark.parametrize("name", ["one key head, 16 heads", "grouped", "blocks of 16", "1 head", "blocks of 4"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_no_query_keeps_never_reach_one(name: str, poison: float) -> None:
    """Nor do queries that keep nothing reach a gradient of keys."""
    case = {**CASES, **NEIGHBOURS}[name]
    inputs, lists = draw_inputs(case, torch.float32), draw_lists(case, near=name in NEIGHBOURS)
    kept = kept_pairs(lists, case)
    used = kept.unflatten(1, (case.kv_heads, -1)).any(2).any(2)
    used[:, :, -3:] = False
    lists.limits.clamp_(max=case.n_keys - 3)
    clean = computed(inputs, lists, 0.3)
    for x in (inputs.k, inputs.v):
        x[~used] = poison
    empty = ~kept_pairs(lists, case).any(3)
    for x in (inputs.q, inputs.out_grad, inputs.lse_grad):
        x[empty] = poison
    found = computed(inputs, lists, 0.3)
    assert all(torch.equal(found[x], clean[x]) for x in NAMES)
    assert not found["k"][~used].any()


@pytest.mark.parametrize("name", ["one key head, 16 heads", "grouped", "blocks of 16", "1 head", "3 heads"])
@pytest.mark.parametrize("server", [*INSTRUCTION_SETS, "blockwise"])
def test_a_row_whose_scores_are_all_minus_inf_counts_as_empty(
    server: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By queries, keys and values of infinity: some heads of a query, and all heads of another."""
    if server != "blockwise":
        use_set(server, monkeypatch)
    module: Any = composed if server == "blockwise" else chosen
    case = {**CASES, **NEIGHBOURS}[name]._replace(batch=1)
    inputs, lists = draw_inputs(case, torch.float32), draw_lists(case, near=name in NEIGHBOURS)
    kept, lone = kept_pairs(lists, case), torch.zeros(1, case.heads, case.n_queries, dtype=torch.bool)
    lone[:, ::2, 4] = lone[:, :, 6] = True
    assert kept.any(3)[lone].all()
    inputs.k[..., 0] = inputs.k[..., 0].abs() + 1
    clean = inputs._replace(q=inputs.q.masked_fill(lone[..., None], 0))
    inputs.q[lone] = 0
    inputs.q[..., 0][lone] = -math.inf
    wanted = expected(clean, kept & ~lone[..., None], 0.3)
    for value in (
        inputs.v,
        inputs.v.where(kept[:, :: case.heads // case.kv_heads, 6, :, None].logical_not(), math.inf),
    ):
        out, lse = module.forward(*inputs[:2], value, lists, 0.3)
        grads = module.backward(Rows(*inputs[3:], *inputs[:2], value, out, lse), lists, 0.3)
        assert torch.equal(lse == -math.inf, wanted["lse"] == -math.inf)
        assert not out[lone].any()
        assert not grads[0][lone].any()
        if value is inputs.v:
            for result, x in zip((out, lse, *grads), wanted.values(), strict=True):
                assert relative_error(result, x) < 1e-5
    q, k = torch.ones_like(inputs.q), torch.full_like(inputs.k, -math.inf)
    out, lse = module.forward(q, k, inputs.v, lists, 0.3)
    grads = module.backward(Rows(*inputs[3:], q, k, inputs.v, out, lse), lists, 0.3)
    assert (lse == -math.inf).all()
    assert not any(x.any() for x in (out, *grads))


def test_examples_of_vmap_share_the_limits_of_a_rule() -> None:
    q, k, v = torch.randn(3, 3, 2, 2, 20, 8).unbind()
    indices = torch.randint(0, 20, (3, 1, 1, 20, 6))

    def attended(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return sparse_attention(q, k, v, Causal() & Chosen(indices), backend="native")

    each = [attended(*x) for x in zip(q, k, v, indices, strict=True)]
    assert torch.equal(torch.vmap(attended)(q, k, v, indices), torch.stack(each))


def test_the_rows_of_a_softmax_over_more_keys() -> None:
    """Two lists in turn, with the output and lse of both: their gradients add up."""
    case = CASES["one key head, 16 heads"]._replace(length=60)
    inputs, both = draw_inputs(case, torch.float32), draw_lists(case, causal=False)
    whole = computed(inputs, both, 0.3)
    rows = Rows(*inputs[3:], *inputs[:3], whole["out"], whole["lse"])
    parts = [both._replace(indices=part.contiguous()) for part in both.indices.split(30, 3)]
    grads = [chosen.backward(rows, part, 0.3) for part in parts]
    for name, first, second in zip("qkv", *grads, strict=True):
        assert relative_error(first + second, whole[name]) < 1e-6


def test_a_query_with_one_key_has_its_value_and_no_slope() -> None:
    """To the last bit, whatever the score."""
    case = Case(1, 16, 1, 40, 50, 24, 40, length=1)
    inputs = draw_inputs(case, torch.float32)
    inputs = inputs._replace(q=inputs.q * 100, lse_grad=torch.zeros_like(inputs.lse_grad))
    lists = Lists(torch.randint(50, (1, 1, 40, 1)).int(), 1, torch.tensor([0, 50]).int().expand(1, 40, 2).contiguous())
    found = computed(inputs, lists, 1.0)
    assert torch.equal(found["out"], inputs.v[:, :, lists.indices[0, 0, :, 0].long()].expand(1, 16, 40, 40))
    assert not found["q"].any()
    assert not found["k"].any()


def test_no_lse_gradient_is_one_of_zeros() -> None:
    case = CASES["grouped"]
    inputs, lists = draw_inputs(case, torch.float32), draw_lists(case)
    inputs = inputs._replace(lse_grad=torch.zeros_like(inputs.lse_grad))
    zeros = computed(inputs, lists, 0.3)
    rows = Rows(inputs.out_grad, None, *inputs[:3], zeros["out"], zeros["lse"])
    assert all(map(torch.equal, chosen.backward(rows, lists, 0.3), (zeros[name] for name in "qkv")))


@pytest.mark.parametrize("module", [chosen, triton], ids=["native", "triton"])
@pytest.mark.parametrize("change", [{"n_queries": 0}, {"n_keys": 0}, {"length": 0}, {"batch": 0}], ids=str)
def test_nothing_to_compute(module: Any, change: dict[str, int]) -> None:
    case = Case(2, 4, 2, 3, 5, 16, 16)._replace(**change)
    indices = torch.zeros(case.batch or 1, 1, case.n_queries, case.length, dtype=torch.int32)
    lists = Lists(indices, 1, torch.zeros(1, case.n_queries, 2, dtype=torch.int32))
    q, k, v, *gradients = draw_inputs(case, torch.float32)
    out, lse = module.forward(q, k, v, lists, 0.3)
    grads = module.backward(Rows(*gradients, q, k, v, out, lse), lists, 0.3)
    assert out.shape == q.shape
    assert (lse == -math.inf).all()
    assert not any(x.any() for x in (out, *grads))


def test_entries_behind_the_last_key_are_skipped() -> None:
    case = Case(1, 16, 1, 4, 20, 8, 8)
    inputs, limits = draw_inputs(case, torch.float32), torch.tensor([0, 2**31 - 1]).int().expand(1, 4, 2).contiguous()
    far = torch.tensor([3, 19, 20, 2**31 - 1]).int().expand(1, 1, 4, 4).contiguous()
    near = torch.tensor([3, 19, -1, -1]).int().expand(1, 1, 4, 4).contiguous()
    found, wanted = (computed(inputs, Lists(x, 1, limits), 0.3) for x in (far, near))
    assert all(torch.equal(found[x], wanted[x]) for x in NAMES)


def test_what_it_does_not_support() -> None:
    case = CASES["grouped"]
    q, k, v, *_ = draw_inputs(case, torch.float64)
    assert chosen.unsupported(q, k, v, draw_lists(case), 0.0) == ["has no lists in float64"]
    assert chosen.unsupported(q.float(), k, v, draw_lists(case), 0.1) == ["does not support dropout_p, got 0.1"]
    assert "needs a CPU" in chosen.unsupported(q.to("meta"), k, v, draw_lists(case), 0.0)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x._replace(indices=x.indices.long()), "^indices: expected contiguous torch.int32"),
        (lambda x: x._replace(indices=x.indices[:, :2]), "^indices: "),
        (lambda x: x._replace(indices=x.indices[..., :5]), "^indices: expected contiguous"),
        (lambda x: x._replace(limits=x.limits[:, 1:]), "^limits: "),
        (lambda x: x._replace(limits=x.limits.long()), "^limits: "),
        (lambda x: x._replace(block=3), "^block: "),
        (lambda x: x._replace(block=0), "^block: "),
    ],
)
def test_lists_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    case = CASES["grouped"]
    inputs, lists = draw_inputs(case, torch.float32), change(draw_lists(case))
    with pytest.raises(ValueError, match=message):
        chosen.forward(inputs.q, inputs.k, inputs.v, lists, 0.3)


def test_lists_that_do_not_ascend_read_nothing_else() -> None:
    """Kernels trust the order, but no entry leads out of a tensor."""
    case = CASES["one key head, 16 heads"]
    inputs = draw_inputs(case, torch.float32)
    indices = torch.randint(-(2**31), 2**31 - 1, (1, 1, case.n_queries, 40)).int()
    for block in (1, 64):
        computed(inputs, Lists(indices, block, draw_lists(case).limits), 0.3)
    case = NEIGHBOURS["1 head"]
    indices = indices[:, :, :1].expand(1, 1, case.n_queries, 40).contiguous()
    computed(draw_inputs(case, torch.float32), Lists(indices, 1, draw_lists(case).limits), 0.3)


def test_calls_over_lists_run_here() -> None:
    """By default, where blockwise would give other bits."""
    q, k, v = draw_inputs(CASES["grouped"], torch.float32)[:3]
    pattern = Causal() & Chosen(torch.randint(90, (1, 3, 17, 20)))
    found, named, other = (
        sparse_attention(q, k, v, pattern, enable_gqa=True, backend=backend)
        for backend in (None, "native", "blockwise")
    )
    assert torch.equal(found, named)
    assert not torch.equal(found, other)
