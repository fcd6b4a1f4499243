"""LongNet's dilated attention against its definition, whose branches `ringtile.testing.oracle` computes."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from oracle import SDPA_BUDGET, make_inputs, relative_error, results, sdpa_low_precision_error, worst
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ringtile.functional import dilated, dilated_attention, sparse_attention
from ringtile.functional.dilated import segment_numbers
from ringtile.index import build_index
from ringtile.patterns import Causal, Pattern, Segments, Window, longnet_union, per_head
from ringtile.patterns.wrapped import Compacted, InSegments, OfHeads
from ringtile.testing.oracle import attention, kept_pairs
from ringtile.tools.memory import peak_memory

POWERS = ([64, 128, 256, 512], [1, 2, 4, 8])
OTHERS = ([30, 96, 480], [1, 3, 7])
PAPER = ([32, 64, 128, 256, 512], [1, 2, 4, 6, 12])
COPRIME = ([50, 110], [1, 3])


@pytest.fixture(autouse=True)
def _each_warning_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dilated, "_warned", set())


def defined(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rates: Sequence[int], overlap: str = "mix", **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and lse by the definition: branches mixed by their denominators, or a softmax over the union of pairs."""
    rules: list[Pattern] = [*map(Segments, lengths, rates)]
    rules = [reduce(or_, rules)] if overlap == "union" else rules
    outs, lses = map(torch.stack, zip(*(attention(q, k, v, rule, **options) for rule in rules), strict=True))
    empty = (lses == -math.inf).all(0)
    lse = torch.where(empty, 0, lses).logsumexp(0)
    weights = torch.where(empty, 0, (torch.where(empty, 0, lses) - lse).exp())
    return (weights.unsqueeze(4) * outs).sum(0), torch.where(empty, -math.inf, lse)


def counted(n: int, lengths: Sequence[int], rates: Sequence[int]) -> Tensor:
    """How many branches keep each pair of head 0, ``[n, n]``."""
    branches = [kept_pairs(Segments(*branch), 1, 1, n, n, start=0) for branch in zip(lengths, rates, strict=True)]
    return torch.cat(branches).sum((0, 1))


def attend(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out, lse = dilated_attention(*args, return_lse=True, **options)
    return out, lse


def compare(inputs: Sequence[Tensor], *branches: Sequence[int], **options: Any) -> float:
    """The worst relative error of the output, the lse and every gradient, also through the lse."""
    gqa = {"enable_gqa": inputs[0].shape[1] != inputs[1].shape[1]}
    found = results(attend, inputs, *branches, **options, **gqa)
    return worst(found, results(defined, inputs, *branches, **options))


BRANCHES = {"powers": POWERS, "others": OTHERS, "paper": PAPER, "long": ([600, 300], [1, 3])}
CASES = """
    False-mix-powers-64 False-mix-others-64 False-mix-paper-600 False-mix-paper-7 False-mix-long-700
    False-union-powers-64 False-union-others-64 False-union-paper-600
    True-mix-others-1 True-mix-paper-64 True-union-others-600 True-union-long-700
""".split()
"""Is it causal, overlap, branches, tokens."""


@pytest.mark.parametrize("case", CASES)
def test_the_definition(case: str) -> None:
    is_causal, overlap, branches, n_tokens = case.split("-")
    inputs = make_inputs(1, 3 if int(n_tokens) >= 600 else 9, int(n_tokens), head_dim=4)[:3]
    assert compare(inputs, *BRANCHES[branches], overlap=overlap, is_causal=is_causal == "True") < 1e-12


@settings(max_examples=20)
@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    draw, few = data.draw, st.integers(1, 3)
    n_branches, kv_heads = draw(few), draw(few)
    heads = kv_heads * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 90), min_size=n_branches, max_size=n_branches))
    if draw(st.booleans()):
        # Segments that nest take another route to the union.
        lengths = [lengths[0] * 2**number for number in range(n_branches)]
    rates = draw(st.lists(st.integers(1, 7), min_size=n_branches, max_size=n_branches))
    options: dict[str, Any] = {
        "overlap": draw(st.sampled_from(["mix", "union"])),
        "is_causal": draw(st.booleans()),
    }
    sizes = draw(st.integers(1, 2)), heads, draw(st.integers(1, 150)), draw(st.none() | st.integers(1, 150))
    inputs = make_inputs(*sizes, head_dim=3, kv_heads=kv_heads, value_dim=2)[:3]
    if draw(st.booleans()):
        options["key_mask"] = torch.rand(sizes[0], inputs[1].shape[2]) < 0.6
    assert compare(inputs, lengths, rates, **options) < 1e-12


@pytest.mark.parametrize(
    ("branches", "is_causal"),
    [(([64, 128, 256], [1, 2, 4]), True), (PAPER, False), (COPRIME, True)],
    ids=["nested", "paper", "coprime"],
)
def test_union_is_sparse_attention_with_the_union_pattern(branches: Any, is_causal: bool) -> None:
    inputs = make_inputs(2, 4, 300)[:3]
    found = results(attend, inputs, *branches, overlap="union", is_causal=is_causal)
    by_rule = partial(sparse_attention, return_lse=True, is_causal=is_causal)
    assert worst(found, results(by_rule, inputs, longnet_union(*branches))) < 1e-12


@pytest.mark.parametrize("inner", [Window(2, 1), per_head([Window(0), Window(1), Causal()]), Segments(3, 2)], ids=str)
def test_a_pattern_counts_places_of_a_segment(inner: Pattern) -> None:
    inputs = make_inputs(1, 3, 100, head_dim=3)[:3]
    rule = InSegments(30, 1, inner) | InSegments(90, 3, inner)
    i, j = torch.arange(100)[:, None], torch.arange(100)
    places = [
        ((i // n == j // n) & (i % n % r == h % r) & (j % n % r == h % r))
        & inner.allowed(torch.tensor(h), i % n // r, j % n // r)
        for n, r in ((30, 1), (90, 3))
        for h in range(3)
    ]
    pairs = torch.stack(places).unflatten(0, (2, 3)).any(0)
    assert torch.equal(rule.allowed(torch.arange(3)[:, None, None], i, j), pairs)
    found = results(attend, inputs, [30, 90], [1, 3], pattern=inner, overlap="union")
    assert worst(found, results(attention, inputs, pairs)) < 1e-12


def test_queries_that_come_later_see_what_they_see_in_the_whole() -> None:
    q, k, v, _ = make_inputs(1, 4, 300)
    whole, _ = attend(q, k, v, *OTHERS, is_causal=True)
    parts = [
        attend(q[:, :, a:b], k[:, :, :b], v[:, :, :b], *OTHERS, is_causal=True)[0] for a, b in [(0, 77), (77, 300)]
    ]
    assert relative_error(torch.cat(parts, 2), whole) < 1e-14
    last, _ = attend(q[:, :, -1:], k, v, *OTHERS, is_causal=True)
    assert relative_error(last, whole[:, :, -1:]) < 1e-14


def test_what_no_branch_keeps_is_an_empty_row() -> None:
    idle = torch.stack([(torch.arange(100) % 40 % 2 != head % 2) for head in range(3)]).unsqueeze(2)
    inputs = [x.masked_fill(idle, math.nan) for x in make_inputs(1, 3, 100)[:3]]
    assert compare(inputs, [40, 80], [2, 4]) < 1e-12


def test_masked_keys_may_hold_anything() -> None:
    inputs, keep = make_inputs(2, 4, 90)[:3], torch.rand(2, 90) < 0.5
    keep[1] = False
    dirty = [inputs[0], *(x.masked_fill(~keep[:, None, :, None], math.nan) for x in inputs[1:])]
    found, expected = (results(attend, x, *OTHERS, key_mask=keep) for x in (dirty, inputs))
    assert all(map(torch.equal, found, expected))
    assert not any(x[1].any() for x in (found[0], *found[2:]))
    assert (found[1][1] == -math.inf).all()


def test_a_warning_names_the_offsets_that_leave_tokens_out() -> None:
    q, k, v, _ = make_inputs(1, 3, 64)
    with pytest.warns(UserWarning, match=r"head % rate = \[0, 0\] \(50%\), \[1, 1\] \(50%\), \[0, 2\] \(50%\)"):
        dilated_attention(q, k, v, [16, 32], [2, 4])
    dilated_attention(q, k, v, [16, 32], [2, 4])
    dilated_attention(q, k, v, [16, 32], [2, 1])
    # Segments of three tokens shift the parity: between them the two branches keep every token but a few.
    with pytest.warns(UserWarning, match=r"\[0, 0\] \(17%\), \[1, 1\] \(33%\)"):
        dilated_attention(q[:, :, :12], k[:, :, :12], v[:, :, :12], [3, 12], [2, 2])


def dropped_weights(n_tokens: int, heads: int, *args: Any, **options: Any) -> Tensor:
    """The weights that values are summed with, ``[H, N, N]``."""
    q, k, _, _ = make_inputs(1, heads, n_tokens, head_dim=8)
    values = torch.eye(n_tokens, dtype=torch.float64).expand(1, heads, n_tokens, n_tokens)
    torch.manual_seed(1)
    return attend(q, k, values, *args, **options)[0][0]


@pytest.mark.parametrize("overlap", ["mix", "union"])
def test_dropout_keeps_or_scales_weights(overlap: str) -> None:
    args = (256, 4, [64, 128], [1, 2])
    torch.manual_seed(0)
    whole = dropped_weights(*args, overlap=overlap)
    torch.manual_seed(0)
    dropped = dropped_weights(*args, overlap=overlap, dropout_p=0.25, seed=3)
    some = whole > 0
    assert not dropped[~some].any()
    times = counted(256, [64, 128], [1, 2])
    once = times == 1 if overlap == "mix" else some[0]
    ratio = (dropped[0] / whole[0])[once]
    assert ((ratio == 0) | ((ratio - 4 / 3).abs() < 1e-12)).all()
    assert 0.2 < (ratio == 0).double().mean() < 0.3
    # A pair that two branches keep loses one of its halves at a time.
    expected = [0, 2 / 3, 4 / 3] if overlap == "mix" else [0, 4 / 3]
    shares = (dropped[0] / whole[0])[times == 2]
    assert all(((shares - share).abs() < 1e-12).any() for share in expected)
    kept = [(dropped[head, a : a + 64, a : a + 64] > 0) for head in range(4) for a in range(0, 256, 64)]
    assert all(not torch.equal(a, b) for number, a in enumerate(kept) for b in kept[:number])


def test_a_seed_is_drawn_from_torch() -> None:
    inputs, state = make_inputs(1, 2, 100)[:3], torch.get_rng_state()
    options: dict[str, Any] = {"segment_lengths": [20, 40], "dilation_rates": [1, 2], "dropout_p": 0.5}
    first, second = (attend(*inputs, **options)[0] for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(first, attend(*inputs, **options)[0])
    assert not torch.equal(first, second)
    of_seeds = [attend(*inputs, **options, seed=seed)[0] for seed in (5, torch.tensor([5]), 2**63 - 1)]
    assert torch.equal(*of_seeds[:2])
    assert not torch.equal(*of_seeds[1:])


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"overlap": "union"}, {"key_mask": True}, {"backend": "reference"}],
    ids=["mix", "causal", "union", "key mask", "reference"],
)
def test_a_cut_between_segments_drops_the_weights_of_the_whole(options: dict[str, Any]) -> None:
    n_tokens, cut = 150, 96  # the last segments are ragged, and of 32 tokens, heads at other offsets keep more
    q, k, v, grad_out = make_inputs(2, 3, n_tokens, head_dim=8, kv_heads=1)
    branches = [16, 32, 48], [1, 3, 2]
    if options.get("overlap"):
        branches = [16, 48], [1, 2]
    mask = torch.rand(2, n_tokens) < 0.9 if options.get("key_mask") else None
    options = {**options, "enable_gqa": True, "dropout_p": 0.4, "seed": 3}

    def part(queries: slice, n_keys: int, **more: Any) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q[:, :, queries], k[:, :, :n_keys], v[:, :, :n_keys])]
        given = {**options, **more, "key_mask": None if mask is None else mask[:, :n_keys]}
        out, lse = attend(*leaves, *branches, **given)
        return [out, lse, *torch.autograd.grad(out, leaves, grad_out[:, :, queries])]

    whole = part(slice(n_tokens), n_tokens)
    prefix, suffix = part(slice(cut), cut), part(slice(cut, n_tokens), n_tokens)
    assert worst([torch.cat(x, 2) for x in zip(prefix[:3], suffix[:3], strict=True)], whole[:3]) < 1e-12
    for number in (3, 4):
        suffix[number][:, :, :cut] += prefix[number]
    assert worst(suffix[3:], whole[3:]) < 1e-12
    # Inside a segment, too.
    late = part(slice(103, n_tokens), n_tokens)
    assert worst(late[:3], [x[:, :, 103:] for x in whole[:3]]) < 1e-12
    assert not torch.equal(part(slice(n_tokens), n_tokens, seed=4)[0], whole[0])


def test_segments_and_batch_elements_have_different_numbers() -> None:
    numbers = segment_numbers(torch.arange(300), torch.arange(5000))
    assert len(torch.unique(numbers)) == 300 * 5000
    assert (numbers >= 0).all()
    assert (numbers < 2**32).all()
    part = segment_numbers(torch.tensor([7]), torch.arange(40, 50))
    assert torch.equal(part, numbers.view(300, 5000)[7, 40:50])


def test_branches_draw_for_themselves() -> None:
    # Two equal branches: were their masks the same, every weight would be 0 or doubled.
    whole, dropped = (
        (torch.manual_seed(0), dropped_weights(64, 1, [64, 64], [1, 1], dropout_p=p, seed=0))[1] for p in (0.0, 0.5)
    )
    assert 0.4 < ((dropped / whole - 1).abs() < 1e-12).double().mean() < 0.6


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "key_mask": torch.arange(13).unsqueeze(0) % 5 != 1},
        {"overlap": "union"},
        {"dropout_p": 0.3, "seed": 1},
    ],
    ids=["masked", "union", "dropout"],
)
def test_first_and_second_derivatives(options: dict[str, Any]) -> None:
    q, k, v, _ = make_inputs(1, 2, 13, head_dim=2, kv_heads=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def function(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(*x, [6, 12], [1, 2], enable_gqa=True, **options)
        return out, torch.where(lse == -math.inf, 0, lse)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_second_derivatives_are_those_of_the_definition() -> None:
    inputs = make_inputs(1, 3, 150, head_dim=4)[:3]

    def twice(attention: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse = attention(*leaves, [30, 60], [1, 2])
        grads = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))

    assert worst(twice(attend), twice(defined)) < 1e-12


def test_vmap_and_grad_compose() -> None:
    inputs = [torch.randn(3, 1, 2, 30, 4, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(3, 1, 30) < 0.7

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, lse = attend(q, k, v, [8, 16], [1, 3], key_mask=mask)
        return out.sin().sum() + torch.where(lse == -math.inf, 0, lse).sum()

    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*inputs, mask)
    for number in range(3):
        leaves = [x[number].requires_grad_() for x in inputs]
        expected = torch.autograd.grad(loss(*leaves, mask[number]), leaves)
        assert worst([grad[number] for grad in mapped], expected) < 1e-14


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:dilated_attention:UserWarning")
@pytest.mark.parametrize(
    ("branches", "options", "lengths", "most_graphs"),
    [
        (([32], [2]), {"is_causal": True}, (100, 164, 260), 2),
        (COPRIME, {"overlap": "union", "is_causal": True}, (64, 128, 70), 2),
    ],
    ids=["mix", "coprime"],
)
def test_a_graph_serves_lengths_of_one_kind(branches: Any, options: Any, lengths: Any, most_graphs: int) -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(
        lambda *x: dilated_attention(*x, *branches, return_lse=True, **options),
        fullgraph=True,
        dynamic=True,
        backend=graphs,
    )
    for n_tokens in lengths:
        inputs = make_inputs(1, 3, n_tokens, head_dim=4)[:3]
        assert worst(results(compiled, inputs), results(attend, inputs, *branches, **options)) < 1e-13
    assert graphs.frame_count <= most_graphs


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_queries_without_keys_have_gradients_of_zero_composed() -> None:
    torch._dynamo.reset()
    q, k = torch.randn(1, 1, 2, 4, requires_grad=True), torch.randn(1, 1, 4, 4, requires_grad=True)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return dilated_attention(q, k, k, [5], [4])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in (attend, torch.compile(attend, backend="aot_eager")):
            out = function(q[:, :, :1], k)
            assert out.requires_grad
            assert not out.any()
            grads = torch.autograd.grad(out.sum(), (q, k), create_graph=function is attend)
            assert not any(grad.any() for grad in grads)
        assert not torch.func.grad(lambda q: attend(q[:, :, :1], k).sum())(q).any()


@pytest.mark.parametrize(
    ("dtype", "is_causal"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_low_precision_loses_no_more_than_torch(dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v, grad_out = make_inputs(1, 4, 700, head_dim=32, dtype=dtype)
    branches, budget = ([128, 256, 512], [1, 2, 4]), SDPA_BUDGET[dtype]
    pattern = longnet_union(*branches)
    torchs = sdpa_low_precision_error(q, k, v, Causal() & pattern if is_causal else pattern, grad_out)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    for overlap in ("mix", "union"):
        options = {"overlap": overlap, "is_causal": is_causal}
        (out, lse), (true, _) = attend(*leaves, *branches, **options), defined(*exact, *branches, **options)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert relative_error(out, true) <= budget * torchs.out
        both = torch.autograd.grad(out, leaves, grad_out), torch.autograd.grad(true, exact, grad_out.double())
        for most, mine, theirs in zip(torchs.grads.values(), *both, strict=True):
            assert relative_error(mine, theirs) <= budget * most


def test_autocast_is_a_cast_before() -> None:
    q, k, v, _ = make_inputs(1, 2, 100, dtype=torch.float32)
    expected = attend(*(x.bfloat16() for x in (q, k, v)), [32, 64], [1, 2])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(*leaves, [32, 64], [1, 2])
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), leaves))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = attend(q, k, v.bfloat16(), [32, 64], [1, 2])
    assert torch.equal(mixed, expected[0])


def test_any_strides() -> None:
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "tokens first": lambda x: x.transpose(1, 2),
        "wide": lambda x: torch.cat([x, x], -1).transpose(1, 2)[..., 3:9],
        "head_dim first": lambda x: x.permute(0, 2, 3, 1).contiguous().mT,
        "expanded": lambda x: x[:1].expand(2, -1, -1, -1).transpose(1, 2),
    }
    for name, layout in layouts.items():
        inputs = [layout(torch.randn(2, 100, 4, 6, dtype=torch.float64)) for _ in range(3)]
        both = (results(attend, x, [16, 48], [1, 3]) for x in (inputs, [x.contiguous() for x in inputs]))
        assert worst(*both) < 1e-14, name


def test_the_output_is_laid_out_for_joining_heads() -> None:
    q, k, v, _ = make_inputs(2, 4, 50)
    assert attend(q, k, v, [8, 16], [1, 2])[0].transpose(1, 2).is_contiguous()


class _Calls(TorchDispatchMode):
    """How often each of ringtile's operators runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ringtile":
            self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("n_tokens", "options", "calls"),
    [
        (256, {}, 3),
        (256, {"overlap": "union"}, 3),
        (251, {}, 2 + 3 + 2),
        (101, {"overlap": "union"}, 2 + 2 + 2),
        (256, {"key_mask": torch.ones(1, 256, dtype=torch.bool)}, 1 + 2 + 4),
    ],
)
def test_a_branch_is_one_call_and_what_is_ragged_few_more(n_tokens: int, options: dict[str, Any], calls: int) -> None:
    leaves = [x.requires_grad_() for x in make_inputs(1, 8, n_tokens)[:3]]
    with _Calls() as counter:
        out, _ = attend(*leaves, [64, 128, 256], [1, 2, 4], **options)
        torch.autograd.grad(out.sum(), leaves)
    assert counter.count == {"forward": calls, "backward": calls}


def test_flops_are_those_of_the_dense_segments() -> None:
    n_tokens, heads, head_dim = 2048, 4, 8
    leaves = [x.requires_grad_() for x in make_inputs(1, heads, n_tokens, head_dim=head_dim)[:3]]
    pairs = {"mix": n_tokens * heads * (256 + 512 // 4 + 1024 // 16)}
    pairs["union"] = n_tokens * heads * (256 + 256 // 4 + 512 // 16)
    for overlap, count in pairs.items():
        with FlopCounterMode(display=False) as counter:
            out, _ = attend(*leaves, [256, 512, 1024], [1, 2, 4], overlap=overlap, backend="blockwise")
            torch.autograd.grad(out.sum(), leaves)
        assert counter.get_total_flops() == count * 2 * head_dim * (2 + 5), overlap


@pytest.mark.unpoisoned
@pytest.mark.parametrize("overlap", ["mix", "union"])
def test_memory_grows_with_the_length_alone(overlap: str) -> None:
    peaks = []
    for n_tokens in (2048, 8192):
        leaves = [x.float().requires_grad_() for x in make_inputs(1, 4, n_tokens, head_dim=8)[:3]]
        grad = torch.randn(1, 4, n_tokens, 8)
        found = peak_memory(
            lambda leaves=leaves: dilated_attention(*leaves, [512, 1024, 2048], [1, 2, 4], overlap=overlap),
            lambda out, leaves=leaves, grad=grad: torch.autograd.grad(out, leaves, grad),
            torch.device("cpu"),
        )
        peaks.append(found)
        per_tensor = max(found.forward, found.backward or 0) / grad.nbytes
        assert per_tensor < 16
    assert peaks[1].forward < 4.2 * peaks[0].forward
    assert (peaks[1].backward or 0) < 4.2 * (peaks[0].backward or 0)


COMPACTED: list[Pattern] = [
    InSegments(48, 3, Window(2, 1)),
    InSegments(20, 1, per_head([Window(1), Causal(), Window(3)])),
    ~Compacted(Segments(60, 2), 3),
    ~(Compacted(Segments(60), 7) | Compacted(InSegments(30, 2, Causal()), 5)),
    OfHeads(per_head([Window(1), Causal(), Window(5), ~Window(2)]), (0, 2, 3)),
    OfHeads(Causal() & Segments(40, 3), (1, 2, 5)),
]


@pytest.mark.parametrize("pattern", COMPACTED, ids=lambda pattern: type(pattern).__name__)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(150, 150), (33, 200)])
def test_an_index_of_a_compacted_pattern_is_its_rule(pattern: Pattern, n_queries: int, n_keys: int) -> None:
    index = build_index(pattern, n_queries, n_keys, num_heads=3, block=16)
    query, key = torch.arange(n_keys - n_queries, n_keys).unsqueeze(1), torch.arange(n_keys)
    expected = pattern.allowed(torch.arange(3)[:, None, None], query, key).expand(3, n_queries, n_keys)
    assert torch.equal(index.to_dense()[0].expand(3, -1, -1), expected)


GOOD = make_inputs(2, 4, 20, head_dim=8, dtype=torch.float32)[:3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_lengths": [8, 16, 32]}, r"dilation_rates: expected as many as segment_lengths, got .*\[1, 2\]"),
        ({"segment_lengths": []}, "segment_lengths to be a non-empty sequence"),
        ({"segment_lengths": [8, 0]}, "1 <= segment_lengths"),
        ({"dilation_rates": [1, -2]}, "1 <= dilation_rates"),
        ({"dilation_rates": [1, 2.5]}, "1 <= dilation_rates"),
        ({"segment_lengths": 8}, "segment_lengths to be a non-empty sequence"),
        ({"overlap": "sum"}, "overlap: expected 'mix' or 'union', got 'sum'"),
        ({"pattern": "windw(3)"}, "pattern: unknown pattern 'windw'"),
        ({"pattern": build_index(Causal(), 20)}, "pattern: expected a Pattern .* got BlockIndex"),
        ({"pattern": per_head([Window(1)] * 3)}, "pattern: it is defined for 3 heads, got heads=4"),
        ({"key_mask": torch.ones(2, 19, dtype=torch.bool)}, r"key_mask: expected shape \(2, 20\)"),
        ({"key_mask": torch.ones(2, 20)}, "key_mask: expected bool"),
        ({"dropout_p": 1.0}, "dropout_p: expected a probability"),
        ({"scale": math.inf}, "scale: expected a finite number"),
        ({"seed": 1.5}, "seed: expected a 64-bit integer"),
        ({"backend": "cudnn"}, "backend: expected one of"),
        ({"query": GOOD[0][0]}, "query: expected four dimensions"),
        ({"key": GOOD[1][:, :2], "value": GOOD[2][:, :2]}, "key: expected the query's heads"),
        ({"value": GOOD[2].double()}, "value: expected one of"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = dict(zip(("query", "key", "value"), GOOD, strict=True))
    arguments |= {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
    with pytest.raises(ValueError, match=message):
        dilated_attention(**{**arguments, **changes})
