"""Scores of any size: outputs, lse and gradients against torch's own error on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_sets import INSTRUCTION_SETS, precision_of, use_products, use_set
from oracle import relative_error
from torch import Tensor

from ringtile import dilated_attention, sparse_attention
from ringtile.index import clear_cache, lists
from ringtile.kernels.native.library import reason_against
from ringtile.patterns import Causal, Dense, Documents, Pattern, Window
from ringtile.testing import oracle

needs_library = pytest.mark.skipif(bool(reason_against()), reason=f"no native kernel here: {reason_against()}")
NAMES = ("out", "lse", "dq", "dk", "dv")
SIZES = [10.0**power for power in range(1, 13)]
SHAPES = ((64, 130, 200), (16, 3, 150), (33, 70, 70))
"""Head dim, queries, keys: two row tiles, a few queries, which take a path of their own, and ragged vectors."""
WEIGHT_FLOOR = 2.0**-126
"""The least weight of the native kernel: smaller ones count as this."""

Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def results(attend: Attention, inputs: list[Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    found = out, lse, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
    return {name: x.detach().double() for name, x in zip(NAMES, found, strict=True)}


def draw_inputs(size: float, dtype: torch.dtype, shape: tuple[int, int, int], seed: int) -> tuple[list[Tensor], Tensor]:
    """Queries and keys whose scores are about ``size``, values, and the gradient of the output."""
    head_dim, n_queries, n_keys = shape
    draws = torch.Generator().manual_seed(seed)
    factor = math.sqrt(size / math.sqrt(head_dim))

    def tensor(tokens: int, factor: float = 1.0) -> Tensor:
        x = torch.randn(1, 2, tokens, head_dim, generator=draws, dtype=torch.float64)
        return (x * factor).to(dtype)

    return [tensor(n_queries, factor), tensor(n_keys, factor), tensor(n_keys)], tensor(n_queries)


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(q, k, v, Causal())


def torchs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=added)[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), lse


def check(
    attend: Attention,
    size: float,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    rounding: float = 0.0,
) -> None:
    """The error of each result is at most three times torch's and a unit in the last place.

    ``rounding`` is that of sums, if a row's sum of out times its gradient has another order than its product.
    """
    for shape in shapes:
        errors = {name: [0.0, 0.0, 0.0] for name in NAMES}
        for seed in range(3):
            inputs, grad_out = draw_inputs(size, dtype, shape, seed)
            true = results(exact, [x.double() for x in inputs], grad_out)
            mine, theirs = results(attend, inputs, grad_out), results(torchs, inputs, grad_out)
            slopes = inputs[1].double().norm().item() * grad_out.double().norm().item()
            floor = WEIGHT_FLOOR * slopes * shape[2] + rounding * slopes / math.sqrt(shape[0] * shape[2])
            for name, sums in errors.items():
                last_place = torch.finfo(torch.float32 if name == "lse" else dtype).eps * true[name].norm().item()
                # Torch's own gradients of a head dim that is no multiple of a vector can be NaN here.
                bound = (theirs[name] - true[name]).nan_to_num().norm().item()
                for i, x in enumerate(((mine[name] - true[name]).norm().item(), bound, last_place + floor)):
                    sums[i] += x * x
        for name, sums in errors.items():
            error, bound, last_place = (math.sqrt(x) for x in sums)
            assert error <= 3 * bound + last_place, (name, shape, error, bound, last_place)


def served_by(backend: str) -> Attention:
    return lambda q, k, v: sparse_attention(q, k, v, Causal(), return_lse=True, backend=backend)


@needs_library
@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        (name, dtype, size)
        for row, name in enumerate(INSTRUCTION_SETS)
        for column, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
        # Every third size: three sets or dtypes meet all of them.
        for size in SIZES[(row + column) % 3 :: 3]
        if dtype != torch.float16 or (size <= 1e8 and not name.startswith("amx"))
    ],
    ids=str,
)
def test_the_native_kernel_is_as_exact_as_torch(
    name: str, dtype: torch.dtype, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Larger scores have infinite queries in float16, and tiles leave out the products of its low parts.
    use_set(name, monkeypatch)
    tiles = name.startswith("amx") and dtype != torch.float32
    for products in (5, 7):
        use_products(products, monkeypatch)
        check(served_by("native"), size, dtype, rounding=torch.finfo(torch.float32).eps if tiles else 0.0)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_capped_score_has_all_digits_at_any_size(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lse of a query with one key is its score, and the gradient of the lse is the score's."""
    use_set(name, monkeypatch)
    sizes = torch.logspace(-8, 30, 300, dtype=torch.float64).unsqueeze(1)
    x = (sizes * torch.linspace(-1, 1, 9, dtype=torch.float64)).flatten().to(dtype)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    for cap, scale in ((1.0, 1.0), (50.0, -0.3)):
        q = x.view(1, 1, -1, 1).clone().requires_grad_()
        _, lse = sparse_attention(q, one, one, softcap=cap, scale=scale, return_lse=True, backend="native")
        (grad,) = torch.autograd.grad(lse.sum(), q)
        tanh = torch.tanh(x.double() * scale / cap)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(lse[0, 0].double(), cap * tanh, rtol=5 * unit, atol=0)
        torch.testing.assert_close(grad.flatten().double(), scale * (1 - tanh**2), rtol=0, atol=8 * unit * abs(scale))


@needs_library
@pytest.mark.parametrize("start", [0, 2**24 + 201, 2**30 - 200, 2**33 + 5])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_distances_are_those_of_integers(name: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_set(name, monkeypatch)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for n_queries in (1, 150):
            q, k = torch.zeros(1, 1, n_queries, 64, dtype=dtype), torch.ones(1, 1, 2, 64, dtype=dtype)
            # Of the second key: the first of a tile is a round number of tokens from the lanes.
            options: dict[str, Any] = {"key_mask": torch.tensor([[False, True]]), "alibi_slopes": torch.ones(1)}
            _, lse = sparse_attention(q, k, k, start=start, return_lse=True, backend="native", **options)
            # Floats round once. Those that 32 bits do not hold round twice.
            rtol = 2 * torch.finfo(lse.dtype).eps if start > 2**32 else 0
            distances = (start + torch.arange(n_queries) - 1).abs().to(lse.dtype)
            torch.testing.assert_close(lse[0, 0], -distances, rtol=rtol, atol=0)


@pytest.mark.parametrize("size", SIZES[::3])
def test_blockwise_is_as_exact_as_torch(size: float) -> None:
    # Torch's own backward pass, which it calls, gives NaN for a head dim of 33.
    check(served_by("blockwise"), size, torch.float32, SHAPES[:2])
    # In parts, as calls with a key mask are. The scale is no power of two.
    check(
        lambda q, k, v: sparse_attention(
            q, k, v, Causal(), key_mask=torch.ones(1, 200).bool(), return_lse=True, backend="blockwise"
        ),
        size,
        torch.float32,
        [(32, 130, 200)],
    )


def check_winners(size: float, dtype: torch.dtype, pattern: Pattern, scale: float, rtol: float, **options: Any) -> None:
    """Each query has one key whose score is about ``size``, and all its other scores are far below.

    Its output is the value of this key, and the gradient of the value the output's.
    """
    draws = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (1, 2, 150, 64), generator=draws, dtype=torch.float64) * 2 - 1
    winners = torch.arange(150) if pattern == Window(0) else torch.randperm(150, generator=draws)
    v, grad_out = (torch.randn(1, 2, 150, 64, generator=draws).to(dtype) for _ in range(2))
    q, k = ((x * math.sqrt(size / 8)).to(dtype) for x in (signs[:, :, winners], signs))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sparse_attention(*leaves, pattern, scale=scale, **options)
    value_grad = torch.autograd.grad(out, leaves, grad_out)[2]
    torch.testing.assert_close(out, v[:, :, winners], rtol=rtol, atol=0)
    torch.testing.assert_close(value_grad[:, :, winners], grad_out, rtol=rtol, atol=1e-30)


@needs_library
@pytest.mark.parametrize(
    ("name", "precision", "dtype", "size"),
    [
        (name, precision, dtype, size)
        for row, name in enumerate(INSTRUCTION_SETS)
        for column, (precision, dtype) in enumerate(
            [
                ("highest", torch.float32),
                ("high", torch.float32),
                ("highest", torch.bfloat16),
                ("highest", torch.float16),
            ]
        )
        for size in ([1e6, 1e10], [1e3, 1e8], [1e8, 1e12])[(row + column) % 3]
        # Queries and keys of larger scores are infinite in float16.
        if dtype != torch.float16 or size <= 1e10
    ],
    ids=str,
)
def test_a_single_winner_has_a_weight_of_one(
    name: str, precision: str, dtype: torch.dtype, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in parts to their last."""
    use_set(name, monkeypatch)
    rtol = 2.0**-15 if dtype == torch.float32 and precision == "high" and name.startswith("amx") else 0
    with precision_of(precision) if dtype == torch.float32 else nullcontext():
        # No scale is a power of two: each rounds the product of a score.
        for pattern, products, scale in product((Dense(), Window(0)), (5, 7), (0.1, 0.3, 0.7)):
            use_products(products, monkeypatch)
            check_winners(size, dtype, pattern, scale, rtol, backend="native")


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["blockwise", "dense"])
def test_scales_of_torchs_kernel_are_powers_of_two(backend: str, dtype: torch.dtype, size: float) -> None:
    """With others, the gradient of the value is infinite, as that of PyTorch's own attention is."""
    # Calls with a key mask are computed in parts.
    masks = (None, torch.ones(1, 150).bool()) if backend == "blockwise" else (None,)
    patterns = (Dense(), Window(0)) if backend == "blockwise" else (Dense(),)
    for pattern, scale, mask in product(patterns, (0.1, 0.3, 0.7), masks):
        check_winners(size, dtype, pattern, scale, 0, key_mask=mask, backend=backend)


# Rows whose scores are all -inf: an output of 0, an lse of -inf, and gradients of exactly 0.

KEYS = 300
WHY = {"keys of -inf": 128, "products that overflow": 140}
"""Why the scores of a first document are all -inf, and its length. Infinite keys fill a tile: 0 times -inf is NaN."""
SERVERS = (*(f"native {name}" for name in INSTRUCTION_SETS), "blockwise", "reference")


def serve(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of a name of `SERVERS`, whose calls go to its instruction set."""
    backend, _, isa = name.partition(" ")
    if backend == "native":
        if reason := reason_against():
            pytest.skip(f"no native kernel here: {reason}")
        use_set(isa, monkeypatch)
    return backend


def lone_inputs(why: str, dtype: torch.dtype, first: int = 0, last: int = KEYS, kv_heads: int = 1) -> list[Tensor]:
    """Queries [first, last), keys and values of two heads. Those of the first document have no score above -inf."""
    draws = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, KEYS, 32, generator=draws, dtype=torch.float64) for heads in (2, kv_heads, kv_heads)
    )
    size = math.inf if why == "keys of -inf" else 1e200 if dtype == torch.float64 else 1e30
    k[:, :, : WHY[why]] = -size
    q[:, :, : WHY[why]] = 1 if size == math.inf else size
    return [q[:, :, first:last].to(dtype), k.to(dtype), v.to(dtype)]


def of_the_rest(inputs: list[Tensor], lone: int, first: int, grad_out: Tensor) -> list[Tensor]:
    """Output, lse and gradients of the other document, by a dense softmax in float64, behind zeros and -inf."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    at, heads = max(lone - first, 0), inputs[0].shape[1] // inputs[1].shape[1]
    q, (k, v) = leaves[0][:, :, at:], (x[:, :, lone:].repeat_interleave(heads, 1) for x in leaves[1:])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out[:, :, at:].double(), torch.ones_like(lse)))
    return [F.pad(out, (0, 0, at, 0)).detach(), F.pad(lse, (at, 0), value=-math.inf).detach(), *grads]


def check_lone(found: Sequence[Tensor], expected: Sequence[Tensor], error: float) -> None:
    for name, actual, wanted in zip(NAMES, found, expected, strict=False):
        assert torch.equal(actual.double()[wanted == 0], wanted[wanted == 0]), name
        assert relative_error(actual, wanted) < error, name


@pytest.mark.parametrize("why", WHY)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in SERVERS for dtype in (torch.float64, torch.float32, torch.bfloat16)],
    ids=str,
)
def test_a_row_whose_scores_are_all_minus_inf_counts_as_empty(
    name: str, dtype: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "reference" and why == "products that overflow":
        dtype = torch.float64  # where products overflow in float64, too
    lone, backend = WHY[why], serve(name, monkeypatch)
    error = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
    options: list[dict[str, Any]] = [{}, {"key_mask": torch.ones(1, KEYS).bool()}]
    ways: list[tuple[int, int, int]] = [(0, KEYS, 5), (0, KEYS, 7), (lone - 2, lone + 1, 7), (lone - 2, lone + 1, 5)]
    for (first, last, products), given, kv_heads in zip(ways, cycle(options), (1, 2, 2, 1), strict=False):
        if backend == "native":
            use_products(products, monkeypatch)
        inputs = lone_inputs(why, dtype, first, last, kv_heads)
        grad_out = torch.randn(1, 2, last - first, 32).to(dtype)
        leaves = [x.requires_grad_() for x in inputs]
        attend = partial(sparse_attention, enable_gqa=True, return_lse=True, start=first, backend=backend)
        out, lse = attend(*leaves, Documents([lone, KEYS - lone]), **given)
        grads = torch.autograd.grad((out, lse), leaves, (grad_out, torch.ones_like(lse)))
        check_lone((out, lse, *grads), of_the_rest(inputs, lone, first, grad_out), error)


@pytest.mark.parametrize("name", [*SERVERS[:-1], "dense"])
def test_all_rows_without_a_score_above_minus_inf(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split lists, dropout, ALiBi, softcap, values of infinity, causal calls, and second derivatives."""
    backend = serve(name, monkeypatch)
    monkeypatch.setattr(lists, "LONGEST", 1)
    clear_cache()
    calls: list[tuple[Pattern, dict[str, Any]]] = [(Dense(), {}), (Causal(), {})]
    if backend != "dense":
        calls += [(Causal(), {"dropout_p": 0.3, "seed": 5}), (Window(150), {"alibi_slopes": torch.ones(2)})]
    for (pattern, options), value, dtype in product(calls, (1.0, math.inf), (torch.float32, torch.bfloat16)):
        q, k = torch.ones(1, 2, KEYS, 32, dtype=dtype), torch.full((1, 2, KEYS, 32), -math.inf, dtype=dtype)
        leaves = [x.requires_grad_() for x in (q, k, torch.full_like(k, value))]
        out, lse = sparse_attention(*leaves, pattern, return_lse=True, backend=backend, **options)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert (lse == -math.inf).all()
        assert not any(x.any() for x in (out, *grads))
    clear_cache()


@pytest.mark.parametrize("name", [*SERVERS, "dense"])
def test_a_row_with_some_scores_of_minus_inf_is_a_softmax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more keys than PyTorch's kernel takes at once. A NaN or a score of inf makes a NaN, as in PyTorch."""
    backend = serve(name, monkeypatch)
    q, k, v = torch.randn(3, 1, 2, 700, 32, dtype=torch.float64).to(torch.float32).unbind()
    q, k[:, :, :600] = q.abs(), -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = sparse_attention(*leaves, Causal(), return_lse=True, backend=backend)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted, wanted_lse = oracle.attention(*exact, Causal())
    check_lone((out, lse), (wanted, wanted_lse), 1e-5)
    value_grad, key_grad = torch.autograd.grad(out.sum(), (leaves[2], leaves[1]))
    assert relative_error(value_grad, torch.autograd.grad(wanted.sum(), exact[2])[0]) < 1e-5
    assert key_grad.isfinite().all()
    for bad in (math.nan, math.inf):
        with torch.no_grad():
            spoilt = k.clone()
            spoilt[:, :, 5] = bad
            out, lse = sparse_attention(q, spoilt, v, Causal(), return_lse=True, backend=backend)
        assert out[:, :, 5].isnan().all()
        assert out[:, :, 699].isnan().all()


@pytest.mark.parametrize("name", SERVERS)
def test_slopes_of_alibi_that_overflow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second head is an ordinary one."""
    backend = serve(name, monkeypatch)
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, KEYS, 32, dtype=torch.float64).unbind()]
    slopes, rule = torch.tensor([1e308, 0.5], dtype=torch.float64), Causal() & ~Window(3)
    found, wanted = (
        (*x, *torch.autograd.grad(x[0].sum(), leaves))
        for x in (
            sparse_attention(*leaves, rule, alibi_slopes=slopes, return_lse=True, backend=backend),
            oracle.attention(*leaves, rule, alibi_slopes=slopes),
        )
    )
    assert not wanted[0][:, 0].any()
    check_lone(found, wanted, 1e-12)


@pytest.mark.parametrize("why", WHY)
def test_second_derivatives_of_rows_without_scores(why: str) -> None:
    lone, inputs = WHY[why], [x.requires_grad_() for x in lone_inputs(why, torch.float64)]
    grad_out, seconds = torch.randn(1, 2, KEYS, 32, dtype=torch.float64), []
    for backend in ("blockwise", "reference"):
        out = sparse_attention(*inputs, Documents([lone, KEYS - lone]), enable_gqa=True, backend=backend)
        grads = torch.autograd.grad(out, inputs, grad_out, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), inputs))
    for mine, theirs in zip(*seconds, strict=True):
        assert not mine[:, :, :lone].any()
        assert relative_error(mine, theirs) < 1e-10


def test_parts_without_scores_are_merged_as_empty_ones() -> None:
    q, k, v = lone_inputs("keys of -inf", torch.float32)
    sinks = torch.zeros(2, requires_grad=True)
    out = sparse_attention(q, k, v, Documents([128, KEYS - 128]), enable_gqa=True, sinks=sinks)
    assert not out[:, :, :128].any()
    assert not torch.autograd.grad(out[:, :, :128].sum(), sinks)[0].any()
    # Two segments, of which one has no scores, at two scales: the branches are merged by their lse.
    k = torch.randn(1, 2, 64, 32).index_fill(2, torch.arange(32), -math.inf)
    q, v = torch.ones(1, 2, 64, 32), torch.randn(1, 2, 64, 32)
    assert dilated_attention(q, k, v, [32, 64], [1, 2]).isfinite().all()
    assert not dilated_attention(q, k, v, [32], [1])[:, :, :32].any()
