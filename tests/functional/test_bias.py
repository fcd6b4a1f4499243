"""Biases of scores: results and all gradients against a dense float64 softmax, in pieces, and in low precision."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_sets import INSTRUCTION_SETS, use_set
from oracle import SDPA_BUDGET, relative_error
from torch import Tensor

from ringtile import ByKey, ByQuery, Grid, Relative, build_index, in_slices, sparse_attention
from ringtile.distributed import Layout, ring_attention
from ringtile.kernels import bias as biases
from ringtile.kernels.select import BIASED
from ringtile.patterns import Causal, Chosen, Dense, Documents, GlobalTokens, Pattern, Window, per_head

B, H, HKV, N, M, D, DV = 2, 4, 2, 150, 180, 8, 5
SHAPE = (12, 15)
"""A grid of the M keys. Query a is at position M - N + a."""


@cache
def at_distance(offset: int, places: int) -> Tensor:
    """Each pair's place in a table, one by one."""
    return torch.tensor([[min(max(j - i + offset, 0), places - 1) for j in range(M)] for i in range(M - N, M)])


@cache
def in_grid(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The places of each pair in the axes of a table, one pair at a time."""
    tokens = list(itertools.product(*map(range, shape)))
    return tuple(
        torch.tensor([[tokens[j][axis] - tokens[i][axis] + size - 1 for j in range(M)] for i in range(M - N, M)])
        for axis, size in enumerate(shape)
    )


def by_table(offset: int, table: Tensor) -> Tensor:
    return table[:, at_distance(offset, table.shape[1])]


def by_grid(shape: tuple[int, ...], table: Tensor) -> Tensor:
    return table[(slice(None), *in_grid(shape))]


def by_query(offset: int, query: Tensor, table: Tensor) -> Tensor:
    vectors = table[:, at_distance(offset, table.shape[1])]
    return D**-0.5 * torch.einsum("bhid,hijd->bhij", query, vectors.expand(H, -1, -1, -1))


def by_key(offset: int, key: Tensor, table: Tensor) -> Tensor:
    vectors, key = table[:, at_distance(offset, table.shape[1])], key.repeat_interleave(H // key.shape[1], 1)
    return D**-0.5 * torch.einsum("bhjd,hijd->bhij", key, vectors.expand(H, -1, -1, -1))


Case = tuple[list[tuple[int, ...]], Callable[..., Any], Callable[..., Tensor]]

CASES: dict[str, Case] = {
    "a table that ends inside": ([(H, 41)], lambda x: Relative(x, 17), partial(by_table, 17)),
    "a table for all heads and distances": ([(1, 400)], lambda x: Relative(x, 200), partial(by_table, 200)),
    "a table behind all distances": ([(H, 3)], lambda x: Relative(x, 500), partial(by_table, 500)),
    "a grid": ([(H, 23, 29)], lambda x: Grid(x, SHAPE), partial(by_grid, SHAPE)),
    "a grid of three axes": ([(1, 7, 5, 29)], lambda x: Grid(x, (4, 3, 15)), partial(by_grid, (4, 3, 15))),
    "queries": ([(B, H, N, 6), (H, 41, 6)], lambda q, x: ByQuery(q, x, 20), partial(by_query, 20)),
    "queries, one table": ([(B, H, N, 3), (1, 400, 3)], lambda q, x: ByQuery(q, x, 190), partial(by_query, 190)),
    "keys": ([(B, HKV, M, 6), (H, 41, 6)], lambda k, x: ByKey(k, x, 33), partial(by_key, 33)),
    "keys of all heads, one table": ([(B, H, M, 6), (1, 400, 6)], lambda k, x: ByKey(k, x, 170), partial(by_key, 170)),
    "a sum": (
        [(H, 9), (1, 23, 29), (B, H, N, 6), (H, 41, 6), (B, HKV, M, 6), (H, 300, 6)],
        lambda a, b, q, c, k, d: (Relative(a, 4), Grid(b, SHAPE), ByQuery(q, c, 20), ByKey(k, d, 140)),
        lambda a, b, q, c, k, d: by_table(4, a) + by_grid(SHAPE, b) + by_query(20, q, c) + by_key(140, k, d),
    ),
}

PATTERNS: dict[str, Pattern | None] = {
    "all": None,
    "window": Window(30) & Causal(),
    "global": Window(9) | GlobalTokens(3),
    "per head": per_head([Window(9), Causal(), Dense(), Window(70, 0)]),
    "per row": Documents(ids=(torch.arange(M) >= torch.tensor([[60], [M]])).long()),
}


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64, value_dim: int = DV) -> list[Tensor]:
    own = [(B, H, N, D), (B, HKV, M, D), (B, HKV, M, value_dim), *shapes]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in own]


def kept_pairs(pattern: Pattern | None, **options: Any) -> Tensor:
    kept = (
        build_index(Dense() if pattern is None else pattern, N, M, num_heads=H, batch=B).to_dense().expand(B, H, -1, -1)
    )
    if (mask := options.get("key_mask")) is not None:
        kept = kept & mask[:, None, None]
    if (lengths := options.get("key_lengths")) is not None:
        kept = kept & (torch.arange(M) < lengths[:, None])[:, None, None]
    return kept


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    scores = (q @ k.mT * D**-0.5 + bias).masked_fill(~kept, -torch.inf)
    return torch.softmax(scores, 3).masked_fill(~kept, 0) @ v, scores.logsumexp(3)


def with_grads(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Results, zeros for the lse of empty rows, and the gradients of a fixed loss."""
    out, lse = results[0], results[1].masked_fill(results[1] == -torch.inf, 0)
    draw = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, cotangents)]


def attend(case: Case, leaves: list[Tensor], pattern: Pattern | None, backend: str | None, **options: Any) -> Any:
    call = partial(sparse_attention, enable_gqa=True, return_lse=True, bias=case[1](*leaves[3:]), backend=backend)
    return call(*leaves[:3], pattern, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [*BIASED, "reference"])
def test_a_bias_is_the_dense_softmax_with_all_gradients(name: str, backend: str) -> None:
    case = CASES[name]
    options: list[dict[str, Any]] = [{}, {"key_mask": torch.rand(B, M) < 0.9, "key_lengths": torch.tensor([120, 180])}]
    # The reference is as dense as what it is compared with.
    patterns = list(PATTERNS.values())[3 if backend == "reference" else 0 :]
    for pattern, given in zip(patterns, itertools.cycle(options), strict=False):
        leaves = inputs(case[0])
        expected = with_grads(dense(*leaves[:3], case[2](*leaves[3:]), kept_pairs(pattern, **given)), leaves)
        found = with_grads(attend(case, leaves, pattern, backend, **given), leaves)
        for mine, theirs in zip(found, expected, strict=True):
            assert relative_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("pattern", ["window", "per head"])
@pytest.mark.parametrize("backend", BIASED)
def test_pieces_of_any_size_drop_the_same_weights(pattern: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = CASES["a sum"], list[int]()
    leaves, options = inputs(case[0]), {"dropout_p": 0.3, "seed": 5}
    expected = with_grads(attend(case, leaves, PATTERNS[pattern], "reference", **options), leaves)
    add = biases._added

    def counted(*arguments: Any) -> Any:
        found = add(*arguments)
        sizes.append(found.values.numel())
        return found

    monkeypatch.setattr(biases, "_added", counted)
    for room in (1 << 25, 8 * H * 128 * 300, 8 * 128 * 300, 1):
        sizes.clear()
        monkeypatch.setattr(biases, "_BYTES", room)
        found = with_grads(attend(case, leaves, PATTERNS[pattern], backend, **options), leaves)
        assert max(sizes) * 8 <= max(room, 8 * H // HKV * 128 * M)
        for mine, theirs in zip(found, expected, strict=True):
            assert relative_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["a table that ends inside", "a grid", "a sum"])
@pytest.mark.parametrize("backend", BIASED)
def test_low_precision_is_as_close_as_pytorch(backend: str, name: str, dtype: torch.dtype) -> None:
    case, pattern = CASES[name], PATTERNS["window"]
    leaves = inputs(case[0], dtype, D)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    kept = kept_pairs(pattern)
    out = attend(case, leaves, pattern, backend)[0]
    # PyTorch's flash kernel, the yardstick for rows, gives no gradient of a mask.
    mask = case[2](*leaves[3:]).masked_fill(~kept, -torch.inf).to(dtype)
    k, v = (x.repeat_interleave(H // HKV, 1) for x in leaves[1:3])
    rows = F.scaled_dot_product_attention(leaves[0], k, v, mask.detach())
    whole = F.scaled_dot_product_attention(*leaves[:3], mask, enable_gqa=True)
    true = dense(*exact[:3], case[2](*exact[3:]), kept)[0]
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    mine, trues = torch.autograd.grad(out, leaves, cotangent), torch.autograd.grad(true, exact, cotangent.double())
    torchs = *torch.autograd.grad(rows, leaves[:3], cotangent), *torch.autograd.grad(whole, leaves[3:], cotangent)
    for ours, theirs, best in zip((out, *mine), (rows, *torchs), (true, *trues), strict=True):
        assert relative_error(ours, best) <= SDPA_BUDGET[dtype] * relative_error(theirs, best)


@pytest.mark.parametrize("pattern", [Window(30), Causal() & Window(150)], ids=str)
@pytest.mark.parametrize("backend", BIASED)
def test_pieces_cut_the_mask_and_the_lengths_of_keys(
    backend: str, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biases, "_BYTES", 1)
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 2, 400, 6, dtype=torch.float64).unbind()]
    leaves += [torch.randn(2, 61, 6, dtype=torch.float64, requires_grad=True)]
    draw = torch.Generator().manual_seed(1)
    for options in (
        {"key_lengths": torch.tensor([150, 390])},
        {"key_mask": torch.rand(2, 400, generator=draw) < 0.5},
        {"key_mask": torch.rand(2, 400, generator=draw) < 0.8, "key_lengths": torch.tensor([390, 150])},
    ):
        found, expected = (
            with_grads(
                sparse_attention(
                    *leaves[:3],
                    pattern,
                    bias=ByQuery(leaves[0], leaves[3], 30),
                    return_lse=True,
                    backend=name,
                    **options,
                ),
                leaves,
            )
            for name in (backend, "reference")
        )
        for mine, theirs in zip(found, expected, strict=True):
            assert relative_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("backend", BIASED)
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "pattern", "start"),
    [(400, 400, GlobalTokens(0), None), (1, 200, Window(10), 5000), (100, 200, Causal(), -150)],
    ids=str,
)
def test_a_rule_that_keeps_no_tile(
    backend: str, n_queries: int, n_keys: int, pattern: Pattern, start: int | None
) -> None:
    leaves = [torch.randn(1, 1, n, 8, requires_grad=True) for n in (n_queries, n_keys, n_keys)]
    leaves.append(torch.randn(1, 9, 8, requires_grad=True))
    bias = ByQuery(leaves[0], leaves[3], 4)
    out = sparse_attention(*leaves[:3], pattern, start=start, bias=bias, backend=backend)
    assert not any(x.any() for x in (out, *torch.autograd.grad(out.sum(), leaves)))


MINUS_INF: dict[str, Case] = {
    # Rows before position 100 have no score above -inf, the rows after them some.
    "a table": ([(H, 300)], lambda x: Relative(x, 200), partial(by_table, 200)),
    "a sum": (
        [(H, 300), (B, H, N, 6), (H, 41, 6)],
        lambda x, q, c: (Relative(x, 200), ByQuery(q, c, 20)),
        lambda x, q, c: by_table(200, x) + by_query(20, q, c),
    ),
}


@pytest.mark.parametrize("name", MINUS_INF)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("server", [*INSTRUCTION_SETS, *BIASED, "reference"])
def test_a_bias_of_minus_inf(server: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a score above -inf are 0, with gradients of exactly 0, and the keys behind -inf change nothing."""
    case, backend = MINUS_INF[name], "native" if server in INSTRUCTION_SETS else server
    if server in INSTRUCTION_SETS:
        use_set(server, monkeypatch)
    for pattern in (None, Causal() & Window(120)):
        leaves = inputs(case[0], dtype)
        with torch.no_grad():
            leaves[3][:, 101:] = -torch.inf  # keys nearer than 100 positions before the query
            leaves[3][1] = -torch.inf
        found = attend(case, leaves, pattern, backend)
        exact, kept = [x.detach().double().requires_grad_() for x in leaves], kept_pairs(pattern)
        bias = case[2](*exact[3:]).expand(B, -1, -1, -1)
        lone = ((bias == -torch.inf) | ~kept).all(3)
        assert lone.any()
        assert lone.logical_not().any()
        expected = with_grads(dense(*exact[:3], bias, kept & ~lone.unsqueeze(3)), exact)
        assert not found[0][lone].any()
        assert torch.equal(found[1] == -torch.inf, lone)
        results = with_grads(found, leaves)
        assert not results[2][lone].any()
        assert not results[5][:, 101:].any()
        for mine, theirs in zip(results, expected, strict=True):
            assert relative_error(mine, theirs) < {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.03)
        # The last query, at position 179, reads -inf from key 80 on.
        assert not results[4][:, :, 80:].any()
        with torch.no_grad():
            leaves[2][:, :, 80:] = 1e30
            leaves[1][:, :, 80:] *= -2
            again = attend(case, leaves, pattern, backend)
        assert torch.equal(again[0], found[0])
        assert torch.equal(again[1], found[1])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_instruction_set_adds_a_bias(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case, most = CASES["a table that ends inside"], {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}
    leaves = inputs(case[0], dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    with monkeypatch.context() as patch:
        use_set(isa, patch)
        found = with_grads(attend(case, leaves, PATTERNS["global"], "native"), leaves)
        # A few queries are computed another way.
        few = [x.detach().requires_grad_() for x in (leaves[0][:, :, -3:], *leaves[1:])]
        last = with_grads(attend(case, few, PATTERNS["window"], "native"), few)
    expected = with_grads(dense(*exact[:3], case[2](*exact[3:]), kept_pairs(PATTERNS["global"])), exact)
    exact_few = [x.detach().double().requires_grad_() for x in few]
    expected_few = with_grads(attend(case, exact_few, PATTERNS["window"], "reference"), exact_few)
    for mine, theirs in zip((*found, *last), (*expected, *expected_few), strict=True):
        assert relative_error(mine, theirs) < most[dtype]


@pytest.mark.parametrize("name", ["a table that ends inside", "a sum"])
@pytest.mark.parametrize("backend", BIASED)
def test_threads_do_not_change_a_bit(name: str, backend: str, threads: Iterator[int]) -> None:
    leaves = inputs(CASES[name][0], torch.float32)
    each = [with_grads(attend(CASES[name], leaves, None, backend), leaves) for _ in threads]
    assert all(torch.equal(x, y) for x, y in zip(*each, strict=True))


def test_threads_do_not_share_the_table_of_a_head(threads: Iterator[int]) -> None:
    leaves = [x.requires_grad_() for x in (*torch.randn(3, 1, 1, 4000, 8).unbind(), torch.randn(1, 65))]
    call = partial(sparse_attention, return_lse=True, backend="native")
    each = [with_grads(call(*leaves[:3], bias=Relative(leaves[3], 32)), leaves) for _ in threads]
    assert all(torch.equal(x, y) for x, y in zip(*each, strict=True))


@pytest.fixture
def threads() -> Iterator[Iterator[int]]:
    before = torch.get_num_threads()

    def both() -> Iterator[int]:
        for number in (1, 2):
            torch.set_num_threads(number)
            yield number

    yield both()
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BIASED)
def test_what_no_pair_reads_can_be_nan(backend: str) -> None:
    case, pattern = CASES["a sum"], Causal() & Window(30)
    clean = inputs(case[0])
    dirty = [x.detach().clone() for x in clean]
    key_mask = torch.ones(B, M, dtype=torch.bool)
    key_mask[:, 100:140] = False
    # Query 99 is at position 129 and keeps keys 99 to 129, and so on up to 139 with 109 to 139.
    for x in (dirty[1], dirty[2], dirty[7]):
        x[:, :, 100:140] = torch.nan
    for x in (dirty[0], dirty[5]):
        x[:, :, 100:110] = torch.nan
    dirty[8][:, 141:] = torch.nan  # later keys
    dirty[8][:, :80] = torch.nan  # keys of a distance that the window cuts
    dirty = [x.requires_grad_() for x in dirty]
    found = with_grads(attend(case, dirty, pattern, backend, key_mask=key_mask), dirty)
    expected = with_grads(attend(case, clean, pattern, backend, key_mask=key_mask), clean)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_has_the_buckets_of_transformers(bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(is_decoder=not bidirectional, num_heads=3, relative_attention_max_distance=100)
    layer = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    weight = layer.relative_attention_bias.weight
    for n_queries, n_keys in ((300, 300), (1, 70), (40, 300)):
        expected = layer.compute_bias(n_keys, n_keys)[:, :, n_keys - n_queries :]
        bias = Relative.t5(weight, n_queries, n_keys, bidirectional=bidirectional, max_distance=100)
        place = torch.arange(n_keys) - torch.arange(n_keys - n_queries, n_keys)[:, None] + bias.offset
        assert place.min() >= 0
        assert place.max() < bias.table.shape[1]
        assert torch.equal(bias.table[:, place], expected[0])
    (grad,) = torch.autograd.grad(bias.table[:, place].sum(), weight)
    assert torch.equal(grad, torch.autograd.grad(expected.sum(), weight)[0])


def test_a_table_of_swin_comes_in_reverse() -> None:
    # As Swin counts: the coordinates of a query less those of a key.
    table, places = torch.randn(81, 2), torch.stack(torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij"))
    away = places.flatten(1)[:, :, None] - places.flatten(1)[:, None] + 4
    expected = table[away[0] * 9 + away[1]].permute(2, 0, 1)
    q, k, v = torch.randn(3, 3, 2, 25, 4).unbind()
    out = sparse_attention(q, k, v, bias=Grid(table.flip(0).T.reshape(2, 9, 9), (5, 5)))
    assert relative_error(out, F.scaled_dot_product_attention(q, k, v, expected)) < 1e-5


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiled_calls_and_transforms() -> None:
    # One by inductor: the graph of the other is as large as seconds of its compiler.
    for name, backend in (("a grid", "inductor"), ("a sum", "aot_eager")):
        case = CASES[name]
        leaves = inputs(case[0], torch.float32)

        def attended(*leaves: Tensor, case: Case = case) -> Any:
            return attend(case, list(leaves), PATTERNS["window"], None)

        expected = with_grads(attended(*leaves), leaves)
        compiled = with_grads(torch.compile(attended, fullgraph=True, backend=backend)(*leaves), leaves)
        assert all(torch.equal(x, y) for x, y in zip(compiled, expected, strict=True))
        loss = lambda *leaves: attended(*leaves)[0].square().sum()  # noqa: E731
        found = torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)
        grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, grads, strict=True))
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(grads[0].sum(), leaves[0])


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_one_tensor_can_be_in_several_places() -> None:
    q = torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    call = lambda: sparse_attention(q, q, q, bias=(ByQuery(q, table, 4), ByKey(q, table, 4)))  # noqa: E731
    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found in (call(), whole()):
        expected = sparse_attention(q, q, q, bias=(ByQuery(q, table, 4), ByKey(q, table, 4)), backend="reference")
        for mine, theirs in zip(
            torch.autograd.grad(found.sum(), (q, table)), torch.autograd.grad(expected.sum(), (q, table)), strict=True
        ):
            assert relative_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("backend", ["native", "blockwise"])
@pytest.mark.parametrize("offset", [2**31 - 1, 2**31 + 4, 2**32 + 4, 2**40, -(2**31), -(2**31) - 3, -(2**32)])
def test_a_far_offset_reads_an_end_of_the_table(offset: int, backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64).unbind()
    table = torch.randn(2, 9, dtype=torch.float64)
    scores = q @ k.mT * 8**-0.5 + table[:, -1 if offset > 0 else 0, None, None]
    found = sparse_attention(q, k, v, bias=Relative(table, offset), backend=backend)
    assert relative_error(found, scores.softmax(3) @ v) < 1e-12


def test_autocast_leaves_tables_alone() -> None:
    case = CASES["a sum"]
    leaves = inputs(case[0], torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in leaves[:3]] + leaves[3:]
    with torch.autocast("cpu", torch.bfloat16):
        found = with_grads(attend(case, leaves, None, None), leaves)
    for mine, theirs in zip(found, with_grads(attend(case, half, None, None), half), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))


@pytest.mark.parametrize("backend", BIASED)
def test_one_query_and_few_keys(backend: str) -> None:
    for n_keys in (1, 2, 40):
        q, k, v = torch.randn(1, 4, 1, 8), *torch.randn(2, 1, 4, n_keys, 8).unbind()
        weight = torch.randn(32, 4)
        for bias in (
            Relative.t5(weight, 1, n_keys, bidirectional=False),
            ByQuery(q, torch.randn(4, 9, 8), 8),
            (Relative(torch.randn(4, 1), 0), ByKey(k, torch.randn(1, 9, 8), 8)),
        ):
            found, expected = (sparse_attention(q, k, v, bias=bias, backend=name) for name in (backend, "reference"))
            assert relative_error(found, expected) < 1e-6


X = torch.zeros(1, 2, 6, 8)
TABLE = torch.zeros(2, 5)
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no bias": (3.0, {}, "bias: expected Relative, Grid, ByQuery, ByKey or a tuple of them, got float"),
    "empty": ((), {}, "bias: expected at least one, got ()"),
    "heads": (Relative(torch.zeros(3, 5), 0), {}, "bias.table: expected [1 or 2, -1]"),
    "no places": (Relative(torch.zeros(2, 0), 0), {}, "bias.table: expected [1 or 2, -1]"),
    "dtype": (
        Relative(TABLE.int(), 0),
        {},
        "bias.table: expected a tensor of a floating dtype on cpu, got torch.int32",
    ),
    "no tensor": (Relative([1.0], 0), {}, "bias.table: expected a tensor of a floating dtype on cpu, got list"),  # type: ignore[arg-type]
    "device": (Relative(TABLE.to("meta"), 0), {}, "bias.table: expected a tensor of a floating dtype on cpu, got"),
    "offset": (Relative(TABLE, 1.5), {}, "bias.offset: expected an integer, got 1.5"),  # type: ignore[arg-type]
    "shape": (Grid(torch.zeros(2, 3, 3), (2, 2)), {}, "bias.shape: expected positive sizes whose product is 6 keys"),
    "axes": (Grid(torch.zeros(2, 3, 4), (2, 3)), {}, "bias.table: expected [1 or 2, 3, 5]"),
    "outside": (Grid(torch.zeros(2, 3, 5), (2, 3)), {"start": 1}, "start: expected queries inside the grid (2, 3)"),
    "queries": (ByQuery(X[:, :, :5], torch.zeros(2, 5, 8), 0), {}, "bias.query: expected [1, 2, 6, -1]"),
    "dims": (ByQuery(X, torch.zeros(2, 5, 7), 0), {}, "bias.table: expected [1 or 2, -1, 8]"),
    "keys": (ByKey(X[:, :, :5], torch.zeros(2, 5, 8), 0), {}, "bias.key: expected [1, 2 or 2, 6, -1]"),
    "softcap": (Relative(TABLE, 0), {"softcap": 3.0}, "bias: expected neither softcap nor alibi_slopes beside it"),
    "ALiBi": (Relative(TABLE, 0), {"alibi_slopes": torch.ones(2)}, "bias: expected neither softcap nor alibi_slopes"),
    "backend": (Relative(TABLE, 0), {"backend": "flash"}, "backend 'flash' does not support this call: does not supp"),
    "lists": (
        Relative(TABLE, 0),
        {"pattern": Chosen(torch.zeros(1, 1, 6, 1, dtype=torch.int64))},
        "bias: not supported with Chosen lists",
    ),
    "moved tiles": (
        Relative(TABLE, 0),
        {"pattern": build_index(Dense(), 6, block=16).remapped(torch.tensor([0]), torch.tensor([0]))},
        "bias: not supported with an index whose tiles are remapped",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_match_is_refused(name: str) -> None:
    bias, options, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        sparse_attention(X, X, X, bias=bias, **options)


def test_others_refuse_a_bias() -> None:
    with pytest.raises(ValueError, match="bias: not supported with in_slices"):
        in_slices(2)(X, X, X, bias=Relative(TABLE, 0))
    with pytest.raises(TypeError, match="unexpected keyword arguments \\['bias'\\]"):
        ring_attention(X, X, X, layout=Layout.contiguous(6, 1), bias=Relative(TABLE, 0))
    with pytest.raises(ValueError, match="weight: expected"):
        Relative.t5(torch.zeros(1, 2), 3, 3, bidirectional=True)
    with pytest.raises(ValueError, match="n_queries, n_keys: expected positive numbers, got n_queries=0"):
        Relative.t5(torch.zeros(32, 2), 0, 3, bidirectional=True)
