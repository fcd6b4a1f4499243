"""Masses of segments of keys, pooled over rows, against a plain softmax in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from native_sets import INSTRUCTION_SETS, native_or_composed, use_set
from torch import Tensor

from ringtile.kernels import native
from ringtile.kernels.masses import pooled_masses
from ringtile.kernels.native.library import library

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ERRORS = {torch.float32: 2e-6, torch.float64: 1e-7, torch.bfloat16: 2e-6, torch.float16: 2e-6}
"""Inputs of half types are exact in float64, and sums are float32 for all."""


@pytest.fixture(autouse=True, params=["native", "composed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test by the native kernel, if there is one, and by PyTorch's own operations."""
    if (name := native_or_composed(request)) == "composed":
        monkeypatch.setattr("ringtile.kernels.masses.native_masses", lambda *_: None)
    return name


class Case(NamedTuple):
    """One problem."""

    query: Tensor
    key: Tensor
    options: dict[str, Any]


def draw(number: int, dtype: torch.dtype) -> Case:
    """Draw ragged segments, odd lengths, shared key heads, hidden keys and empty groups."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    batch, key_heads, ratio = rng.choice((1, 1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    rows, n_keys = rng.choice((1, 5, 64, 129, 300)), rng.choice((1, 17, 128, 200, 700))
    head_dim, by_sign = rng.choice((1, 8, 15, 33, 64)), rng.random() < 0.4
    query = torch.randn(batch, rows, key_heads * ratio, head_dim + number % 3, generator=generator)
    query = query.to(dtype)[..., :head_dim].transpose(1, 2)
    key = torch.randn(batch, key_heads, n_keys, head_dim * (1 + by_sign), generator=generator).to(dtype)
    if number % 2:
        seen = (torch.arange(rows) * n_keys // rows + 1).clamp(max=n_keys)
    else:
        seen = torch.randint(-2, n_keys + 3, (rows,), generator=generator)
    size = rng.choice((1, 2, 7, 128, 400))
    ends = [0, 0, *range(size, rows, size), rows] if number % 3 else sorted(rng.choices(range(rows + 1), k=6))
    bias = None
    if rng.random() < 0.6:
        bias = torch.randn(batch, rng.choice((1, key_heads)), n_keys, generator=generator)
        bias[torch.rand(bias.shape, generator=generator) < 0.3] = -math.inf
    pool, segment = rng.choice(("mean", "max")), rng.choice((1, 3, 16, 64, 128, 200))
    return Case(
        query,
        key,
        {
            "segment": segment,
            "seen": seen,
            "groups": torch.tensor(ends, dtype=torch.int32),
            "pool": pool,
            "bias": bias,
            "by_sign": by_sign,
            "scale": rng.choice((None, 0.7, -0.3, 0.0)),
        },
    )


def plain(
    query: Tensor,
    key: Tensor,
    *,
    segment: int,
    seen: Tensor,
    groups: Tensor,
    pool: str = "mean",
    bias: Tensor | None = None,
    by_sign: bool = False,
    scale: float | None = None,
    exp2: Callable[[Tensor], Tensor] = torch.exp2,
) -> Tensor:
    """The definition, row by row and segment by segment."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    ratio = query.shape[1] // key.shape[1]
    query, key = query.double(), key.double().repeat_interleave(ratio, 1)
    if by_sign:
        query = torch.cat([query.clamp(min=0), (-query).clamp(min=0)], 3)
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias.double().repeat_interleave(query.shape[1] // bias.shape[1], 1).unsqueeze(2)
    scores = scores.masked_fill(torch.arange(key.shape[2]) >= seen[:, None], -math.inf)
    scores = scores * math.log2(math.e)
    weights = exp2(scores - scores.amax(3, keepdim=True).clamp(min=-1e300).ceil())
    weights = (weights / weights.sum(3, keepdim=True)).masked_fill((scores == -math.inf).all(3, keepdim=True), 0)
    masses = torch.stack([part.sum(3) for part in weights.split(segment, 3)], 3)
    out = []
    for first, last in zip(groups.tolist(), groups.tolist()[1:], strict=False):
        some = masses[:, :, first:last]
        if first == last:
            out.append(torch.zeros_like(masses[:, :, 0]))
        elif pool == "max":
            out.append(some.amax(2))
        else:
            counted = (some.sum(3) > 0).sum(2).clamp(min=1)[..., None]
            out.append(some.sum(2) / counted if pool == "mean" else (some.square().sum(2) / counted).sqrt())
    return torch.stack(out, 2)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_rows_whose_scores_are_all_minus_inf_have_no_mass(isa: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of which they see all keys, and in others. A mean counts them as little as rows that see no key."""
    if path == "native":
        use_set(isa, monkeypatch)
    query, key = torch.rand(1, 2, 300, 32), torch.randn(1, 1, 300, 32)
    key[:, :, :200] = -math.inf
    groups, seen = torch.arange(0, 301, 20).int(), torch.arange(1, 301)
    for dtype, segment, pool in product((torch.float32, torch.bfloat16), (16, 128), ("mean", "max")):
        options: dict[str, Any] = {"segment": segment, "seen": seen, "groups": groups, "pool": pool}
        found = pooled_masses(query.to(dtype), key.to(dtype), **options)
        expected = plain(query.to(dtype), key.to(dtype), **options)
        assert not found[:, :, :10].any()
        assert (found.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masses_are_those_of_the_definition(dtype: torch.dtype) -> None:
    for number in range(24):
        query, key, options = draw(number, dtype)
        found = pooled_masses(query, key, **options)
        assert found.dtype == torch.float32
        expected = plain(query, key, **options)
        assert found.shape == expected.shape
        assert (found.double() - expected).abs().max() < ERRORS[dtype], (number, query.shape, key.shape, options)


def test_many_keys_and_few_rows() -> None:
    """Chunks of rows, and scores whose maximum comes late."""
    query, key = torch.randn(1, 2, 96, 16), torch.randn(1, 1, 60_000, 16) * torch.linspace(0.1, 3, 60_000)[:, None]
    options: dict[str, Any] = {
        "segment": 128,
        "seen": torch.linspace(1, 60_000, 96).long(),
        "groups": torch.arange(0, 97, 3, dtype=torch.int32),
    }
    found = pooled_masses(query, key, **options)
    assert (found - plain(query, key, **options)).abs().max() < 5e-6
    assert (found.sum(3) - 1).abs().max() < 1e-5


def draw_rounded(number: int, dtype: torch.dtype) -> Case:
    """Draw a problem of rounded queries and keys, with hidden keys."""
    query, key, options = draw(number, dtype)
    bias = options["bias"]
    bias = None if bias is None else torch.zeros_like(bias).masked_fill(bias == -math.inf, -math.inf)
    # Some rows and keys are far larger than others, so that units of their own matter.
    generator = torch.Generator().manual_seed(number)
    orders = (torch.randperm(x.shape[2], generator=generator) for x in (query, key))
    query, key = (
        x * torch.logspace(-2, 0.5, x.shape[2])[order, None].to(dtype)
        for x, order in zip((query, key), orders, strict=True)
    )
    return Case(query, key[..., : query.shape[3]], options | {"bias": bias, "pool": "rms", "by_sign": False})


def linear_exp2(x: Tensor) -> Tensor:
    """2^x of which the mantissa grows linearly, as the kernel computes it."""
    bits = (x - 361024 / 2**23).clamp(min=-1000)
    return (1 + bits - bits.floor()) * torch.exp2(bits.floor())


def in_units(x: Tensor) -> Tensor:
    """Round each vector to 127 steps of its largest number."""
    unit = x.float().abs().amax(3, keepdim=True) / 127
    return (x.float() / unit.clamp(min=1e-37)).round().double() * unit.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_masses_are_those_of_rounded_queries_and_keys(dtype: torch.dtype, path: str) -> None:
    rough = path == "native" and dtype != torch.float64
    for number in range(24):
        query, key, options = draw_rounded(number, dtype)
        found = pooled_masses(query, key, **options)
        exp2 = linear_exp2 if rough else torch.exp2
        expected = plain(in_units(query), in_units(key), exp2=exp2, **options)
        assert (found.double() - expected).abs().max() < 2e-5, (number, query.shape, key.shape, options)
        assert not found[expected == 0].any()


def test_rounded_masses_of_scores_of_any_size(path: str) -> None:
    for number, size in product(range(4), (1e2, 1e4, 1e8, 1e16, 1e30)):
        query, key, options = draw_rounded(number, torch.float32)
        query = query * size
        # The highest score of a row leaves the others behind, or two are as near as their own errors.
        expected = plain(in_units(query), in_units(key), **options)
        found = pooled_masses(query, key, **options)
        assert ((found - expected).abs() > 0.05).float().mean() < 1e-3, (number, size)
        assert found.isfinite().all()
        assert torch.equal(found.sum(3) > 0, expected.sum(3) > 0)


@pytest.mark.parametrize("path", ["native"], indirect=True)
def test_bits_depend_neither_on_threads_nor_on_strides(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how rows are cut into calls."""
    monkeypatch.setattr(native, "_OPERATIONS_A_THREAD", 1)
    before = torch.get_num_threads()
    for number in range(12):
        query, key, options = draw(number, DTYPES[number % 4])
        found = {}
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            monkeypatch.setattr(native, "_OPERATIONS_A_CALL", 1e4 if threads == 2 else 2e10)
            strided = torch.nn.functional.pad(key, (3, 2), value=math.nan)[..., 3:-2] if threads == 3 else key
            found[threads] = pooled_masses(query.clone() if threads == 3 else query, strided, **options)
            q, k, more = draw_rounded(number, DTYPES[number % 4])
            found[-threads] = pooled_masses(q, k, **more)
        torch.set_num_threads(before)
        for threads in (2, 3):
            assert torch.equal(found[threads], found[1]), (path, number, threads)
            assert torch.equal(found[-threads], found[-1]), (path, number, threads)


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_instruction_sets_that_are_not_chosen(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in {isa.name for isa in library().choice.by_dtype.values()}:
        pytest.skip(f"{name} is chosen, so that other tests run it")
    use_set(name, monkeypatch)
    for dtype in DTYPES:
        test_masses_are_those_of_the_definition(dtype)
        test_rounded_masses_are_those_of_rounded_queries_and_keys(dtype, path)


HIDE: dict[str, Any] = {"segment": 4, "groups": torch.arange(0, 21, 4, dtype=torch.int32)}


@pytest.mark.parametrize("pool", ["mean", "max", "rms"])
def test_a_nan_that_a_row_does_not_see_never_reaches_it(pool: str) -> None:
    query, key = torch.randn(1, 2, 20, 16), torch.randn(1, 1, 40, 16)
    bias = torch.zeros(1, 1, 40)
    bias[..., 3::5] = -math.inf
    options = {**HIDE, "seen": torch.arange(1, 21), "pool": pool}
    hidden = pooled_masses(query, key, bias=bias, **options)
    poisoned = key.clone()
    poisoned[:, :, 3::5] = math.nan
    poisoned[:, :, 20:] = math.nan
    torch.testing.assert_close(pooled_masses(query, poisoned, bias=bias, **options), hidden, rtol=0, atol=0)


@pytest.mark.parametrize("pool", ["mean", "max", "rms"])
def test_a_row_that_sees_a_nan_does_not_count(pool: str) -> None:
    query, key = torch.randn(1, 2, 20, 16), torch.randn(1, 1, 40, 16)
    seen = torch.arange(1, 21)
    poisoned = key.clone()
    poisoned[0, 0, 9, 3] = math.nan
    found = pooled_masses(query, poisoned, **HIDE, seen=seen, pool=pool)
    blind = pooled_masses(query, key, **HIDE, seen=seen.where(seen < 10, 0), pool=pool)
    torch.testing.assert_close(found, blind, rtol=0, atol=0)
    assert found[:, :, :3].any(3).all()
    assert not found[:, :, 3:].any()
    query[0, 1, 4] = math.nan
    found = pooled_masses(query, key, **HIDE, seen=seen, pool=pool)
    blind = pooled_masses(query, key, **HIDE, seen=seen.where(seen != 5, 0), pool=pool)
    torch.testing.assert_close(found[:, 1], blind[:, 1], rtol=0, atol=0)
    assert found.isfinite().all()


@pytest.mark.parametrize(("batch", "rows", "n_keys"), [(0, 4, 10), (1, 0, 10), (1, 4, 0)])
def test_nothing_to_pool(batch: int, rows: int, n_keys: int) -> None:
    query, key = torch.randn(batch, 2, rows, 8), torch.randn(batch, 1, n_keys, 8)
    groups, seen = torch.tensor([0, rows], dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    found = pooled_masses(query, key, segment=4, seen=seen, groups=groups)
    assert found.shape == (batch, 2, 1, -(-n_keys // 4))
    assert not found.any()


def test_one_operator_in_a_graph() -> None:
    query, key, options = draw(7, torch.float32)

    def call(query: Tensor, key: Tensor) -> Tensor:
        return pooled_masses(query, key, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key), call(query, key), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(query, key), pooled_masses(query, key, **options), rtol=0, atol=0)
    assert not call(query.requires_grad_(), key).requires_grad


Q, K = torch.zeros(2, 4, 10, 16), torch.zeros(2, 2, 30, 16)
FINE: dict[str, Any] = {
    "segment": 4,
    "seen": torch.ones(10, dtype=torch.int64),
    "groups": torch.tensor([0, 4, 10]).int(),
}


@pytest.mark.parametrize(
    ("query", "key", "changes", "message"),
    [
        (Q[0], K, {}, "four dimensions"),
        (Q, K.half(), {}, "one floating-point dtype"),
        (Q.int(), K.int(), {}, "one floating-point dtype"),
        (Q, K[..., :8], {}, r"^key: expected \[2, a divisor of 4, K, 16\]"),
        (Q[:, :3], K, {}, "^key: "),
        (Q, K, {"by_sign": True}, "K, 32"),
        (Q, K, {"segment": 0}, "^segment: "),
        (Q, K, {"pool": "sum"}, "^pool: "),
        (Q, torch.zeros(2, 2, 30, 32), {"pool": "rms", "by_sign": True}, "^by_sign: "),
        (Q, K, {"seen": torch.ones(9, dtype=torch.int64)}, "^seen: "),
        (Q, K, {"seen": torch.ones(10)}, "^seen: "),
        (Q, K, {"groups": torch.tensor([0, 4, 10])}, "^groups: "),
        (Q, K, {"groups": torch.tensor([0, 4, 11]).int()}, "^groups: "),
        (Q, K, {"groups": torch.tensor([-1, 4]).int()}, "^groups: "),
        (Q, K, {"groups": torch.tensor([0, 5, 4]).int()}, "^groups: "),
        (Q, K, {"groups": torch.tensor([]).int()}, "^groups: "),
        (Q, K, {"bias": torch.zeros(2, 4, 30)}, "^bias: "),
        (Q, K, {"bias": torch.zeros(2, 1, 30).double()}, "^bias: "),
        (Q, K, {"pool": "rms", "bias": torch.full((2, 1, 30), 0.5)}, "^bias: expected 0 or -inf with"),
    ],
)
def test_what_does_not_fit_is_refused(query: Tensor, key: Tensor, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pooled_masses(query, key, **{**FINE, **changes})


def test_linear_exponentials_are_within_three_percent() -> None:
    x = torch.linspace(-3, 3, 60001, dtype=torch.float64)
    assert (linear_exp2(x) / torch.exp2(x) - 1).abs().max() < 0.031
