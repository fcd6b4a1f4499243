"""Biases of scores against `ringtile.testing.oracle`: in pieces, of -inf, on threads, and in low precision."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_sets import INSTRUCTION_SETS, use_set
from oracle import SDPA_BUDGET, relative_error, results, worst
from torch import Tensor

from ringtile import ByKey, ByQuery, Grid, Relative, build_index, in_slices, sparse_attention
from ringtile.distributed import Layout, ring_attention
from ringtile.index import BlockIndex
from ringtile.kernels import bias as biases
from ringtile.kernels.select import BIASED
from ringtile.patterns import Causal, Chosen, Dense, GlobalTokens, Pattern, Window, per_head
from ringtile.testing.oracle import attention

B, H, HKV, N, M, D, DV = 2, 4, 2, 150, 180, 8, 5
SHAPE = (12, 15)
"""A grid of the M keys. Query a is at position M - N + a."""

Case = tuple[list[tuple[int, ...]], Callable[..., Any]]

CASES: dict[str, Case] = {
    "a table that ends inside": ([(H, 41)], lambda x: Relative(x, 17)),
    "a table for all heads and distances": ([(1, 400)], lambda x: Relative(x, 200)),
    "a table behind all distances": ([(H, 3)], lambda x: Relative(x, 500)),
    "a grid": ([(H, 23, 29)], lambda x: Grid(x, SHAPE)),
    "a grid of three axes": ([(1, 7, 5, 29)], lambda x: Grid(x, (4, 3, 15))),
    "queries": ([(B, H, N, 6), (H, 41, 6)], lambda q, x: ByQuery(q, x, 20)),
    "keys of all heads, one table": ([(B, H, M, 6), (1, 400, 6)], lambda k, x: ByKey(k, x, 170)),
    "a sum": (
        [(H, 9), (1, 23, 29), (B, H, N, 6), (H, 41, 6), (B, HKV, M, 6), (H, 300, 6)],
        lambda a, b, q, c, k, d: (Relative(a, 4), Grid(b, SHAPE), ByQuery(q, c, 20), ByKey(k, d, 140)),
    ),
}
PER_HEAD = per_head([Window(9), Causal(), Dense(), Window(70, 0)])
WINDOW = Window(30) & Causal()


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64, value_dim: int = DV) -> list[Tensor]:
    own = [(B, H, N, D), (B, HKV, M, D), (B, HKV, M, value_dim), *shapes]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in own]


def attend(case: Case, pattern: Pattern | BlockIndex, backend: str | None, **options: Any) -> Callable[..., Any]:
    """Our attention, as a function of tensors."""
    call = partial(sparse_attention, pattern=pattern, enable_gqa=True, return_lse=True, backend=backend, **options)
    return lambda q, k, v, *x: call(q, k, v, bias=case[1](*x))


def true(case: Case, pattern: Pattern, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v, *x: attention(q, k, v, pattern, bias=case[1](*x), **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BIASED)
def test_a_bias_is_the_dense_softmax_with_all_gradients(name: str, backend: str) -> None:
    case, leaves = CASES[name], inputs(CASES[name][0])
    masks = {"key_mask": torch.rand(B, M) < 0.9, "key_lengths": torch.tensor([120, 180])}
    for pattern, options in ((Dense(), {}), (PER_HEAD, masks)):
        found = results(attend(case, pattern, backend, **options), leaves)
        assert worst(found, results(true(case, pattern, **options), leaves)) < 1e-12


@pytest.mark.parametrize("backend", BIASED)
def test_pieces_of_any_size_drop_the_same_weights(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes, add = CASES["a sum"], list[int](), biases._added
    leaves, options = inputs(case[0]), {"dropout_p": 0.3, "seed": 5}
    expected = results(true(case, PER_HEAD, **options), leaves)

    def counted(*arguments: Any) -> Any:
        found = add(*arguments)
        sizes.append(found.values.numel())
        return found

    monkeypatch.setattr(biases, "_added", counted)
    for room in (1 << 25, 8 * H * 128 * 300, 8 * 128 * 300, 1):
        sizes.clear()
        monkeypatch.setattr(biases, "_BYTES", room)
        assert worst(results(attend(case, PER_HEAD, backend, **options), leaves), expected) < 1e-12
        assert max(sizes) * 8 <= max(room, 8 * H // HKV * 128 * M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["a table that ends inside", "queries"])
@pytest.mark.parametrize("backend", BIASED)
def test_low_precision_is_as_close_as_pytorch(backend: str, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    leaves = inputs(case[0], dtype, D)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, true_out = attend(case, WINDOW, backend)(*leaves)[0], true(case, WINDOW)(*exact)[0]
    # PyTorch's flash kernel, the yardstick for rows, gives no gradient of a mask.
    i, j, bias = torch.arange(M - N, M)[:, None], torch.arange(M), case[1](*leaves[3:])
    mask = bias.table[:, (j - i + bias.offset).clamp(0, bias.table.shape[1] - 1)]
    if isinstance(bias, ByQuery):
        mask = D**-0.5 * torch.einsum("bhid,hijd->bhij", bias.query, mask)
    mask = mask.expand(B, -1, -1, -1).masked_fill(~WINDOW.allowed(torch.tensor(0), i, j), -torch.inf)
    k, v = (x.repeat_interleave(H // HKV, 1) for x in leaves[1:3])
    rows = F.scaled_dot_product_attention(leaves[0], k, v, mask.detach())
    whole = F.scaled_dot_product_attention(*leaves[:3], mask, enable_gqa=True)
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    mine = torch.autograd.grad(out, leaves, cotangent)
    trues = torch.autograd.grad(true_out, exact, cotangent.double())
    torchs = *torch.autograd.grad(rows, leaves[:3], cotangent), *torch.autograd.grad(whole, leaves[3:], cotangent)
    for ours, theirs, best in zip((out, *mine), (rows, *torchs), (true_out, *trues), strict=True):
        assert relative_error(ours, best) <= SDPA_BUDGET[dtype] * relative_error(theirs, best)


@pytest.mark.parametrize(
    ("pattern", "block"), [(Window(30), 128), (Window(30), 16), (Causal() & Window(150), 128)], ids=str
)
@pytest.mark.parametrize("backend", BIASED)
def test_pieces_cut_the_mask_and_the_lengths_of_keys(
    backend: str, pattern: Pattern, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biases, "_BYTES", 1)
    leaves = [*torch.randn(3, 2, 2, 400, 6, dtype=torch.float64).unbind(), torch.randn(2, 61, 6, dtype=torch.float64)]
    case: Case = ([], lambda q, table: ByQuery(q, table, 30))
    draw = torch.Generator().manual_seed(1)
    for options in (
        {"key_lengths": torch.tensor([150, 390])},
        {"key_mask": torch.rand(2, 400, generator=draw) < 0.5},
        {"key_mask": torch.rand(2, 400, generator=draw) < 0.8, "key_lengths": torch.tensor([390, 150])},
    ):
        index = build_index(pattern, 400, block=block)
        both = attend(case, index, backend, **options), true(case, pattern, **options)
        found, expected = (results(lambda q, k, v, x, by=by: by(q, k, v, q, x), leaves) for by in both)
        assert worst(found, expected) < 1e-12


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
    "a table": ([(H, 300)], lambda x: Relative(x, 200)),
    "a sum": ([(H, 300), (B, H, N, 6), (H, 41, 6)], lambda x, q, c: (Relative(x, 200), ByQuery(q, c, 20))),
}
MOST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize("name", MINUS_INF)
@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("server", [*INSTRUCTION_SETS, "blockwise", "reference"])
def test_a_bias_of_minus_inf(server: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a score above -inf are 0, with gradients of exactly 0, and the keys behind -inf change nothing."""
    case, backend = MINUS_INF[name], "native" if server in INSTRUCTION_SETS else server
    if server in INSTRUCTION_SETS:
        use_set(server, monkeypatch)
    pattern, leaves = Causal() & Window(120), [x.detach() for x in inputs(case[0], dtype)]
    leaves[3][:, 101:] = -torch.inf  # keys nearer than 100 positions before the query
    leaves[3][1] = -torch.inf
    found = results(attend(case, pattern, backend), leaves)
    out, lse, q_grad, _, v_grad, table_grad, *_ = found
    assert worst(found, results(true(case, pattern), [x.double() for x in leaves])) < MOST[dtype]
    lone = lse == -torch.inf
    assert 0 < lone.sum() < lone.numel()
    # The last query, at position 179, reads -inf from key 80 on.
    assert not any(x.any() for x in (out[lone], q_grad[lone], table_grad[:, 101:], v_grad[:, :, 80:]))
    leaves[2][:, :, 80:] = 1e30
    leaves[1][:, :, 80:] *= -2
    assert all(map(torch.equal, attend(case, pattern, backend)(*leaves), (out, lse)))


@pytest.mark.parametrize(("name", "backend"), [("a table that ends inside", "native"), ("a sum", "blockwise")])
def test_threads_do_not_change_a_bit(name: str, backend: str, threads: Iterator[int]) -> None:
    leaves = inputs(CASES[name][0], torch.float32)
    one, two = (results(attend(CASES[name], Dense(), backend), leaves) for _ in threads)
    assert all(map(torch.equal, one, two))


def test_threads_do_not_share_the_table_of_a_head(threads: Iterator[int]) -> None:
    leaves = [*torch.randn(3, 1, 1, 4000, 8).unbind(), torch.randn(1, 65)]
    one, two = (results(attend(([], lambda x: Relative(x, 32)), Dense(), "native"), leaves) for _ in threads)
    assert all(map(torch.equal, one, two))


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
    case = CASES["a sum"]
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
    found, expected = (results(attend(case, WINDOW, backend, key_mask=key_mask), x) for x in (dirty, clean))
    assert all(map(torch.equal, found, expected))


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


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiled_calls_and_transforms() -> None:
    # One by inductor: the graph of the other is as large as seconds of its compiler.
    for name, backend in (("a grid", "inductor"), ("a sum", "aot_eager")):
        leaves, attended = inputs(CASES[name][0], torch.float32), attend(CASES[name], WINDOW, None)
        compiled = torch.compile(attended, fullgraph=True, backend=backend)
        assert all(map(torch.equal, results(compiled, leaves), results(attended, leaves)))
        loss = lambda *leaves, by=attended: by(*leaves)[0].square().sum()  # noqa: E731
        found = torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)
        grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        assert all(map(torch.equal, found, grads))
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(grads[0].sum(), leaves[0])


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_one_tensor_can_be_in_several_places() -> None:
    leaves = torch.randn(1, 2, 40, 8, dtype=torch.float64), torch.randn(2, 9, 8, dtype=torch.float64)

    def call(by: Callable[..., Any], q: Tensor, table: Tensor) -> Any:
        return by(q, q, q, Dense(), bias=(ByQuery(q, table, 4), ByKey(q, table, 4)))

    ours, expected = (
        partial(call, partial(sparse_attention, return_lse=True)),
        results(partial(call, attention), leaves),
    )
    for by in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        assert worst(results(by, leaves), expected) < 1e-12


@pytest.mark.parametrize("backend", ["native", "blockwise"])
@pytest.mark.parametrize("offset", [2**31 - 1, 2**31 + 4, 2**32 + 4, 2**40, -(2**31), -(2**31) - 3, -(2**32)])
def test_a_far_offset_reads_an_end_of_the_table(offset: int, backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64).unbind()
    table = torch.randn(2, 9, dtype=torch.float64)
    scores = q @ k.mT * 8**-0.5 + table[:, -1 if offset > 0 else 0, None, None]
    found = sparse_attention(q, k, v, bias=Relative(table, offset), backend=backend)
    assert relative_error(found, scores.softmax(3) @ v) < 1e-12


def test_autocast_leaves_tables_alone() -> None:
    attended = attend(CASES["a sum"], Dense(), None)
    leaves = inputs(CASES["a sum"][0], torch.float32)
    half = [*(x.bfloat16() for x in leaves[:3]), *leaves[3:]]
    with torch.autocast("cpu", torch.bfloat16):
        found = results(attended, leaves)
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(found, results(attended, half), strict=True))


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
