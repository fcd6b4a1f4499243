"""The native kernel: every feature, layout and instruction set against the oracle; its bits, threads and binary.

``RINGTILE_FUZZ`` is the number of random cases, 64 by default.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as Case
from typing import Any

import pytest
import torch
from indices import NAMES, edited
from native_sets import INSTRUCTION_SETS, precision_of, set_number, use_products, use_set
from oracle import kept_pairs, make_inputs, oracle, relative_error
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.cli import main
from ringtile.index import BlockIndex, cache_info, clear_cache, schedule
from ringtile.kernels import native, plans
from ringtile.kernels.contracts import Call
from ringtile.kernels.masses import pooled_masses
from ringtile.kernels.native.instruction_sets import BFLOAT16_SETS, EMULATED_SETS, RATES, InstructionSet
from ringtile.kernels.native.library import VARIABLE, library, peak_rates, reason_against
from ringtile.kernels.native.precision import arithmetic_of
from ringtile.kernels.native.self_test import check_tiles
from ringtile.kernels.spans import kernel_times
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Dense,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Strided,
    TileGrid,
    Window,
    per_head,
)
from ringtile.tools import doctor

CASES = int(os.environ.get("RINGTILE_FUZZ", "64"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(
    bool(reason_against()), reason=f"the native kernel cannot be used here: {reason_against()}"
)


# The fuzz: a case is drawn from its number, and features take turns so that few cases meet them all.


KINDS = (
    *("window", "mixed", "causal", "checkers", "empty rows", "documents", "heads", "dense", "long rows", "blocks"),
    "cut",
)
LAYOUTS = ("plain", "heads last", "sliced", "expanded", "last dimension", "offset")
LENGTHS = (1, 2, 7, 16, 17, 31, 64, 100, 129, 150, 200, 257, 300)
HEAD_DIMS = (1, 2, 3, 8, 15, 16, 17, 32, 33, 48, 64, 65, 80, 96, 127, 128, 129, 130)


def draw(number: int) -> Case:
    rng = random.Random(number)
    turn = iter(range(1, 1000))

    def every(n: int) -> bool:
        """True for one in n cases, at another phase for each feature."""
        return (number * 7 + next(turn) * 3) % n == 0

    kind = KINDS[number % len(KINDS)]
    block = 16 if kind == "long rows" else (16, 32, 64, 128)[number // 4 % 4]
    n_queries, n_keys = rng.choice(LENGTHS), rng.choice(LENGTHS)
    if kind == "long rows":
        n_queries, n_keys = rng.choice((1, 5, 20, 40)), rng.choice((1040, 1100, 1500))
    if kind == "documents":
        n_queries = n_keys
    if kind == "cut":
        n_keys += 1
    heads = rng.choice((1, 2, 3, 4, 6))
    kv_heads = rng.choice([h for h in (1, 2, 3) if heads % h == 0]) if every(2) else heads
    starts = [max(n_keys - n_queries, 0) if kind == "blocks" else n_keys - n_queries, 0, rng.randrange(400)]
    if kind not in ("blocks", "documents"):
        starts += [-rng.randrange(1, 200), -40]
    start = 0 if kind == "documents" else rng.choice(starts)
    if kind == "cut":
        start, n_queries = block + rng.randrange(block), block + 1 + rng.randrange(block)
    head_dim = rng.choice(HEAD_DIMS)
    layouts = tuple(LAYOUTS[(number + place * 5 + number // 6 * place) % len(LAYOUTS)] for place in range(4))
    return Case(
        number=number,
        dtype=DTYPES[number * 3 // 2 % 4],
        block=block,
        batch=rng.choice((1, 1, 2, 3)) if kind != "documents" else rng.choice((2, 3)),
        heads=heads,
        kv_heads=kv_heads,
        n_queries=n_queries,
        n_keys=n_keys,
        head_dim=head_dim,
        value_dim=rng.choice(HEAD_DIMS) if every(2) else head_dim,
        start=start,
        kind=kind,
        layouts=layouts,
        threads=number % 3 + 1,
        scale=0.0 if every(16) else -0.3 if every(10) else 0.7 if every(5) else None,
        dropout_p=rng.choice((0.001, 0.3, 0.9)) if every(4) else 0.0,
        lse_grad=every(3),
        key_mask=every(4),
        key_lengths=every(3),
        poisoned=every(3),
        chunked=every(4),
        softcap=1.5 if every(5) else 0.0,
        alibi=every(3),
    )


def checkers(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Bits of every tile differ, and head 1 keeps few."""
    return (query * query + 3 * key + head) % 7 < 3 - head % 2


def holes(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Some queries keep nothing, some keys are kept by nobody, some tiles are one pair."""
    return (query % 5 != 2) & (key % 3 != 1) & ((query - key).abs() < 40) & (query // 16 % 3 != 1)


def cut(case: Case, pattern: Pattern) -> BlockIndex:
    """Tiles whose bits speak of tokens before the first query and past the last, and past the last key."""
    block, end = case.block, case.start + case.n_queries
    rows, n_keys = -(-end // block) * block - block, -(-case.n_keys // block) * block
    tensors = build_index(pattern, rows, n_keys, start=block, num_heads=case.heads, block=block).tensors()
    return BlockIndex.from_tensors(tensors, TileGrid(block, case.start, case.n_queries, case.n_keys))


def index_of(case: Case) -> BlockIndex:
    rng = random.Random(case.number)
    pattern: Pattern
    if case.kind == "cut":
        return cut(case, Window(rng.randrange(2, 20), rng.randrange(20)))
    if case.kind == "window":
        pattern = Window(rng.randrange(60), rng.randrange(60))
    elif case.kind == "mixed":
        pattern = Causal() & (Window(40) | GlobalTokens(3) | RandomBlocks(1, seed=case.number, block=16))
    elif case.kind == "causal":
        pattern = Causal()
    elif case.kind == "checkers":
        pattern = Elements(checkers)
    elif case.kind == "empty rows":
        pattern = Elements(holes)
    elif case.kind == "documents":
        ids = torch.randint(0, 3, (case.batch, case.n_keys)).sort(-1).values
        pattern = Documents(ids=ids) & (Window(50) if case.number % 2 else Causal())
    elif case.kind == "heads":
        options = [Window(9), BlockDilated([1, 3], 1, block=16), Causal(), Strided(13)]
        pattern = per_head([options[h % 4] for h in range(case.heads)])
    elif case.kind == "blocks":
        shape = (-(-(case.start + case.n_queries) // 50), -(-case.n_keys // 50))
        pattern = Blocks(torch.rand(shape) < 0.5, block=50)
    else:
        pattern = Dense() if case.kind == "dense" else GlobalTokens(20) | Window(600)
    return build_index(
        pattern,
        case.n_queries,
        case.n_keys,
        start=case.start,
        num_heads=case.heads,
        batch=case.batch,
        block=case.block,
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other strides; what lies between them is NaN."""
    around = x.new_full((x.shape[0], x.shape[1], 2 * x.shape[2] + 1, x.shape[3] + 3), math.nan)
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        inside = around[:, :, 1::2, 2:-1]
    elif layout == "offset":
        inside = around[:, :, 1 : x.shape[2] + 1, 1:-2]
    elif layout == "last dimension":
        inside = around.mT.contiguous().mT[:, :, 1::2, 2:-1]
    else:
        return x
    inside.copy_(x)
    return inside


Bits = dict[str, Tensor]
"""Results of a call: out, lse, and the gradients of q, k and v."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: BlockIndex | Pattern,
    out_grad: Tensor,
    lse_grad: Tensor | None = None,
    **options: Any,
) -> Bits:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = sparse_attention(*leaves, rule, enable_gqa=True, return_lse=True, backend="native", **options)
    outputs, cotangents = ([out], [out_grad]) if lse_grad is None else ([out, lse], [out_grad, lse_grad])
    grads = torch.autograd.grad(outputs, leaves, cotangents)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip("qkv", grads, strict=True))}


@dataclass
class Problem:
    """The tensors of a case: clean ones for the oracle, and those of the kernel with its strides and poison."""

    clean: Sequence[Tensor]
    index: BlockIndex
    lse_grad: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    laid: Sequence[Tensor] = ()

    def exact(self) -> Bits:
        *inputs, out_grad = self.clean
        lse_grad = None if self.lse_grad is None else self.lse_grad.nan_to_num()
        expected = oracle(*inputs, self.index, grad_out=out_grad, grad_lse=lse_grad, **self.options)
        return {"out": expected.out, "lse": expected.lse, **expected.grads}


def poison(x: Tensor, unused: Tensor) -> Tensor:
    """NaN and infinities where nobody looks."""
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype)
    places = torch.arange(x.numel()).view(x.shape) % 3
    return torch.where(unused.unsqueeze(-1), bad[places], x)


def make(case: Case) -> Problem:
    torch.manual_seed(case.number)
    index = index_of(case)
    shape = (case.batch, case.heads, case.n_queries, case.n_keys, case.head_dim)
    tensors = list(make_inputs(*shape, kv_heads=case.kv_heads, value_dim=case.value_dim, dtype=case.dtype))
    for place, layout in enumerate(case.layouts):
        if layout == "expanded":
            x = tensors[place]
            # An expanded last dimension is what the gradient of a sum has.
            tensors[place] = (x[..., :1] if place == 3 else x[:1, :1]).expand(x.shape)
    options: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap}
    if case.key_mask:
        options["key_mask"] = torch.rand(case.batch, case.n_keys) < 0.7
    if case.key_lengths:
        options["key_lengths"] = torch.randint(0, case.n_keys + 1, (case.batch,))
    masks = {name: options[name] for name in ("key_mask", "key_lengths") if name in options}
    kept = kept_pairs(index, tensors[0], tensors[1], **masks)
    if case.dropout_p:
        options.update(dropout_p=case.dropout_p, seed=case.number * 0x9E3779B97F4A7C15 % 2**64 - 2**63)
    if case.alibi:
        options["alibi_slopes"] = torch.linspace(-0.01, 0.05, case.heads)
    lse_grad = None
    if case.lse_grad:
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        # The gradient of the lse of an empty row, -inf, means nothing.
        lse_grad = torch.randn(shape[:3], dtype=wide)
    clean = tuple(tensors)
    if case.poisoned:
        empty = ~kept.any(-1)
        lone = ~kept.any(-2).unflatten(1, (case.kv_heads, -1)).any(2)
        for place, unused in enumerate((empty, lone, lone, empty)):
            if case.layouts[place] != "expanded":
                tensors[place] = poison(tensors[place], unused)
        if lse_grad is not None:
            lse_grad = lse_grad.masked_fill(empty, math.nan)
    laid = tuple(laid_out(x, layout) for x, layout in zip(tensors, case.layouts, strict=True))
    return Problem(clean, index, lse_grad, options, laid)


PARTS = "float32 in parts"
RELATIVE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3, PARTS: 2e-5}
"""Relative errors where scores are about 1: some ten units of a float, three of a half, whose sums are floats, and
one of two bfloat16 parts."""
NOISE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3, PARTS: 2e-5}
"""Root mean square errors that pass where numbers of size 1 cancel, as in the gradients of a row with one key."""


def rounding_of(dtype: torch.dtype) -> torch.dtype | str:
    """The key of a dtype's errors, as calls compute it now."""
    return PARTS if dtype == torch.float32 and arithmetic_of(dtype).tile_products else dtype


def check(case: Case, problem: Problem, actual: Bits) -> None:
    wanted = problem.exact()
    # What is rounded: scores in proportion to their size; and sums over values and queries, before they cancel.
    scores = 1.0 if case.scale is None else max(1.0, abs(case.scale) * case.head_dim**0.5)
    if case.alibi:
        scores = max(scores, 0.05 * (abs(case.start) + case.n_queries + case.n_keys))
    terms = max(1.0, case.value_dim / 16) * max(1.0, case.n_queries * case.heads / (case.n_keys * case.kv_heads))
    wrong = {}
    for name, x in actual.items():
        error = relative_error(x, wanted[name])
        rounding = rounding_of(case.dtype) if x.dtype == case.dtype else x.dtype
        finite = wanted[name].isfinite()
        noise = NOISE[rounding] * scores * terms**0.5 / (1 - case.dropout_p) * math.sqrt(finite.sum().item())
        quiet = error < math.inf and (x.double() - wanted[name])[finite].norm().item() <= noise
        if error > RELATIVE[rounding] * scores and not quiet:
            wrong[name] = error
    assert not wrong, case


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems take all threads too."""
    monkeypatch.setattr(native, "_OPERATIONS_A_THREAD", 1)


def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case; ``many_threads`` holds."""
    problem = make(case)
    if case.chunked:
        monkeypatch.setattr(native, "_OPERATIONS_A_CALL", 1e5)
    actual = bits_of(problem, case.threads)
    torch.set_num_threads(1)
    check(case, problem, actual)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("number", range(CASES))
def test_fuzz_against_the_oracle(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(draw(number), monkeypatch)


# Bits: the same from run to run, for any number of threads, by both routes of the backward pass.

TRANSFORMS: dict[str, Any] = {"softcap": 1.5, "alibi_slopes": torch.tensor([0.02, 0.0, -0.01, 0.05])}


def bits_of(problem: Problem, threads: int) -> Bits:
    torch.set_num_threads(threads)
    q, k, v, out_grad = problem.laid or problem.clean
    return attend(q, k, v, problem.index, out_grad, problem.lse_grad, **problem.options)


def assert_same_bits(actual: Bits, expected: Bits) -> None:
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize(("kv_heads", "dtype"), [*zip((1, 2, 4), DTYPES, strict=False)])
def test_any_number_of_threads_gives_the_same_bits(
    kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes: list[str] = []
    for name in ("run_columns", "run"):
        real = getattr(native._Job, name)

        def spy(job: Any, *arguments: Any, name: str = name, real: Callable[..., None] = real) -> None:
            routes.append(name if name == "run_columns" else f"run {arguments[0], int(arguments[1])}")
            real(job, *arguments)

        monkeypatch.setattr(native._Job, name, spy)
    index = build_index(Window(600) | GlobalTokens(20), 90, 1100, start=500, num_heads=4, block=16)
    assert int(index.rows.work[:, 3].max()) > 0
    inputs = make_inputs(1, 4, 90, 1100, head_dim=8, kv_heads=kv_heads, value_dim=12, dtype=dtype)
    options = {"dropout_p": 0.2, "seed": 5, "key_mask": torch.rand(1, 1100) < 0.9, **TRANSFORMS}
    problem = Problem(inputs, index, torch.randn(1, 4, 90), options)
    expected = bits_of(problem, 1)
    assert "run_columns" in routes
    assert "run (False, 2)" not in routes
    taken = {}
    for threads in (1, 2, 3):
        routes.clear()
        assert_same_bits(bits_of(problem, threads), expected)
        assert "run (True, 1)" in routes
        taken[threads] = "whole heads" if "run_columns" in routes else "rows and columns"
        assert ("run (False, 2)" in routes) == ("run (False, 3)" in routes) == (taken[threads] == "rows and columns")
    apart = {1: (2, 3), 2: (3,), 4: (3,)}[kv_heads]
    assert taken == {n: "rows and columns" if n in apart else "whole heads" for n in (1, 2, 3)}
    # Other lengths of a call cut the work elsewhere.
    monkeypatch.setattr(native, "_OPERATIONS_A_CALL", 1e4)
    for threads in (1, 2):
        assert_same_bits(bits_of(problem, threads), expected)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_query_that_keeps_nothing_is_zero_whatever_others_of_its_tile_keep(threads: int) -> None:
    """Queries from 90 on have no key."""
    q, k, v, out_grad = make_inputs(1, 2, 150, head_dim=16, dtype=torch.float32)
    q[:, :, 90:] = v[:, :, 80] = math.nan
    torch.set_num_threads(threads)
    out = attend(q, k, v, Window(5), out_grad, key_mask=torch.arange(150).expand(1, 150) < 85)["out"]
    assert out[:, :, 75:86].isnan().all()
    assert not out[:, :, 90:].any()


LONG = Window(20) | GlobalTokens(5)
"""The first row tile and the first column tile are met by all others: the layout cuts both lists."""


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize(
    ("pattern", "heads", "kv_heads", "batch"),
    [(LONG, 1, 1, 1), (LONG, 4, 1, 2), (per_head([LONG, Window(30), Dense(), GlobalTokens(40)]), 4, 2, 1)],
    ids=["one head", "one key head", "a pattern a head"],
)
def test_long_rows_and_columns_are_divided_and_give_the_same_bits(
    pattern: Pattern, heads: int, kv_heads: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[tuple[bool, int]] = []
    real = native._Job.run

    def spy(job: Any, forward: bool, phase: int, items: int, operations: float) -> None:
        phases.append((forward, phase))
        real(job, forward, phase, items, operations)

    monkeypatch.setattr(native._Job, "run", spy)
    n_tokens = 70 * 16 - 3
    index = build_index(pattern, n_tokens, num_heads=heads, block=16)
    assert int(index.rows.work[:, 3].max()) > 0
    assert int(index.cols.work[:, 3].max()) > 0
    inputs = make_inputs(batch, heads, n_tokens, head_dim=17, kv_heads=kv_heads, value_dim=8, dtype=torch.float32)
    options = {"key_mask": torch.rand(batch, n_tokens) < 0.9}
    problem = Problem(inputs, index, torch.randn(batch, heads, n_tokens), options)
    found = {}
    for threads in (1, 2, 4):
        for piece in (16, 4096):
            # Nearly all long lists apart, or none that is not longer than a thread's share of everything.
            monkeypatch.setattr(native, "_SHARES_A_THREAD", piece)
            schedule._table.clear()
            plans._plans.clear()
            phases.clear()
            found[threads, piece] = bits_of(problem, threads)
            apart = (False, 2) in phases
            assert apart == (native.backward_products(batch * kv_heads, threads) == 7)
            folded = {phase for forward, phase in phases if not forward and phase > 3}
            if piece == 4096:
                assert folded == ({4, 5} if apart else set())
    for bits in found.values():
        assert_same_bits(bits, found[1, 16])
    monkeypatch.setattr(native, "_OPERATIONS_A_CALL", 1e5)
    for threads in (1, 4):
        assert_same_bits(bits_of(problem, threads), found[1, 16])
    for name, exact in problem.exact().items():
        assert relative_error(found[1, 16][name], exact) < 2e-6, name


@pytest.mark.parametrize("value_dim", [64, 19])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_as_torch_rounds(dtype: torch.dtype, value_dim: int) -> None:
    # Two keys of equal weight, whose values are neighbours: the mean is exact in float32 and halfway between the two.
    value = torch.randn(1, 1, 2, value_dim).to(dtype)
    value[:, :, 1] = (value[:, :, 0].view(torch.int16) + 1).view(dtype)
    q, k = torch.zeros(1, 1, 150, 8, dtype=dtype), torch.zeros(1, 1, 2, 8, dtype=dtype)
    expected = value.float().mean(2, keepdim=True).to(dtype).expand(-1, -1, 150, -1)
    assert torch.equal(sparse_attention(q, k, value, backend="native"), expected)


def torchs(q: Tensor, k: Tensor, v: Tensor, out_grad: Tensor) -> Bits:
    """Output and gradients of PyTorch's own dense attention."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    return {"out": out.detach(), **dict(zip("qkv", torch.autograd.grad(out, leaves, out_grad), strict=True))}


def dense(inputs: Sequence[Tensor]) -> Bits:
    return Problem(inputs, build_index(Dense(), inputs[0].shape[2], inputs[1].shape[2])).exact()


def test_sums_over_thousands_of_keys_round_as_torchs_do() -> None:
    """A chain of additions one key after another would be three times as far off."""
    inputs = make_inputs(1, 1, 4096, head_dim=16, dtype=torch.float32)
    q, k, v, out_grad = inputs
    mine, exact = attend(q, k, v, Dense(), out_grad), dense(inputs)
    for name, theirs in torchs(*inputs).items():
        assert relative_error(mine[name], exact[name]) < 1.5 * relative_error(theirs, exact[name]), name


@pytest.mark.parametrize(
    ("head_dim", "size", "route"),
    [(64, 1, "rows and columns"), (64, 4, "columns"), (64, 8, "rows and columns"), (128, 8, "columns")],
)
def test_gradients_of_a_few_queries_are_as_exact_as_torchs(
    head_dim: int, size: int, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the backward pass added scores up in another order, exp(score - lse) would be off by |score| roundings."""
    use_products(5 if route == "columns" else 7, monkeypatch)
    for n_queries in range(1, 6):
        inputs = make_inputs(1, 32, n_queries, 150, head_dim=head_dim, dtype=torch.float32)
        inputs = inputs._replace(q=inputs.q * size)
        mine, exact, theirs = attend(*inputs[:3], Dense(), inputs.grad_out), dense(inputs), torchs(*inputs)
        for name in "qkv":
            bound = 3 * relative_error(theirs[name], exact[name])
            assert relative_error(mine[name], exact[name]) < bound, (name, n_queries)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_routes_give_the_same_bits_for_a_few_queries(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries on both sides of a tile border, in lanes of two groups, with keys that a mask or the pattern drops."""
    for n_queries, start in ((1, 77), (3, 77), (4, 15), (5, 126)):
        inputs = make_inputs(2, 2, n_queries, 200, head_dim=32, kv_heads=1, dtype=dtype)
        index = build_index(Causal() & Window(90), n_queries, 200, start=start, num_heads=2)
        options = {"key_mask": torch.rand(2, 200) < 0.8, "scale": -0.3}
        for more in ({}, {"softcap": 1.5}, {"alibi_slopes": torch.tensor([0.02, 0.05])}):
            problem = Problem(inputs, index, options=options | more)
            found = {}
            for products in (5, 7):
                use_products(products, monkeypatch)
                found[products] = bits_of(problem, 1)
            assert_same_bits(found[7], found[5])
            exact = problem.exact()
            for name in "qkv":
                assert relative_error(found[5][name], exact[name]) < 3 * RELATIVE[dtype], (name, more)


# The clocks of the library: that they count, and whose; what they say, no test asks.


@pytest.mark.usefixtures("many_threads")
def test_the_library_says_what_packing_is_when_it_is_asked() -> None:
    q, k, v, out_grad = make_inputs(1, 2, 300, head_dim=16, dtype=torch.bfloat16)
    torch.set_num_threads(2)
    with kernel_times() as outer:
        attend(q, k, v, Causal(), out_grad)
        with kernel_times() as inner:
            sparse_attention(q, k, v, Causal(), backend="native")
    attend(q, k, v, Causal(), out_grad)
    assert outer[-len(inner) :] == inner
    assert [time.backward for time in inner] == [False] * len(inner)
    assert {time.backward for time in outer} == {False, True}
    for time in outer:
        assert 0 <= time.packing <= time.working
    for backward in (False, True):
        assert sum(time.packing for time in outer if time.backward == backward) > 0
        assert sum(time.working - time.packing for time in outer if time.backward == backward) > 0


def test_an_interrupt_is_heard_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = native._Job._call

    def counted(job: Any, function: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            signal.raise_signal(signal.SIGINT)
        real(job, function)

    monkeypatch.setattr(native._Job, "_call", counted)
    monkeypatch.setattr(native, "_OPERATIONS_A_CALL", 1e6)
    q, k, v, out_grad = make_inputs(1, 2, 600, head_dim=16, dtype=torch.float32)
    stop_at = 0
    attend(q, k, v, Causal(), out_grad)
    whole = calls
    assert whole > 12
    for stop_at in (3, whole - 4):
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            attend(q, k, v, Causal(), out_grad)
        assert calls == stop_at


def test_a_call_is_bounded() -> None:
    """About a quarter of a second at the rate of one thread, whatever the size of the problem."""
    assert native._OPERATIONS_A_CALL <= 4e10
    index = build_index(Causal(), 1024)
    q = torch.empty(4, 8, 1024, 64)
    job = native._Job(q, q, q, Call(0, 128, 1.0, tiles=index.tensors(), backend="native"))
    spans: list[int] = []
    job._call = lambda function: spans.append(job.c.last_item - job.c.first_item)  # type: ignore[method-assign]
    job.run(True, 0, 256, 64.5 * native._OPERATIONS_A_CALL * job.c.threads)
    assert len(spans) == 65
    assert sum(spans) == 256
    assert max(spans) == 4


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7F800001, -0x3FFFFD], ids=hex)
def test_a_nan_that_is_kept_shows(bits: int) -> None:
    """Whatever its payload; and only in the row that it belongs to, or in all rows that keep its key."""
    for place, last in ((0, 71), (1, 150)):
        inputs = make_inputs(1, 2, 150, head_dim=16, dtype=torch.float32)
        inputs[place].view(torch.int32)[0, 1, 70, 3] = bits
        rows = attend(*inputs[:3], Causal(), inputs.grad_out)["out"].isnan()
        assert rows[0, 1, 70:last].all()
        assert rows.sum() == (last - 70) * 16


def far_apart(x: Tensor, dim: int, file: Path) -> Tensor:
    """The same numbers, more than 2^31 elements apart along a dimension, in a file that is holes between them."""
    step = 2**31 + 5
    strides = list(x.stride())
    strides[dim] = step
    room = torch.from_file(str(file), shared=True, size=step * (x.shape[dim] - 1) + x.numel(), dtype=x.dtype)
    file.unlink()
    return room.as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize(("length", "expands"), [(1000, False), (1000, True), (896, False)])
def test_rows_that_are_read_many_times_lie_side_by_side(
    length: int, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 8 tiles of each row, or 7. Keys and values have two heads, or one that is expanded to two.
    heads = torch.randn(1, length, 8, 16, dtype=torch.float64).transpose(1, 2)
    k, v = (x[:, :1].expand(-1, 2, -1, -1) if expands else x for x in heads[:, 2:6].chunk(2, 1))
    tensors = heads[:, :2], k, v, heads[:, 6:]
    real, strides = native._Job._call, []

    def spy(job: Any, function: Any) -> None:
        strides.append([getattr(job.c, f"{name}_stride")[2] for name in ("q", "k", "v", "out_grad")])
        real(job, function)

    monkeypatch.setattr(native._Job, "_call", spy)
    found = attend(*tensors[:3], Dense(), tensors[3])
    far, many = 8 * 16, length == 1000
    keys, queries = 16 if many and not expands else far, 16 if many else far
    assert strides[0] == [far, keys, keys, 0]
    assert [*map(list, {*map(tuple, strides[1:])})] == [[queries, keys, keys, queries]]
    for name, x in dense(tensors).items():
        assert relative_error(found[name], x) < 1e-13, name
    q, k, v, out_grad = (x.contiguous() for x in tensors)
    assert_same_bits(found, attend(q, k, v, Dense(), out_grad))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_beyond_32_bits(dim: int, tmp_path: Path) -> None:
    shape = [2, 2, 40, 16]
    shape[dim] = 2
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, out_grad = (far_apart(x, dim, tmp_path / str(number)) for number, x in enumerate(tensors))
    assert_same_bits(attend(q, k, v, Causal(), out_grad), attend(*tensors[:3], Causal(), tensors[3]))


# What the library would read beside its tensors is refused.


def call_of(made: BlockIndex, **changes: Any) -> Call:
    return Call(made.start, made.block, 0.25, **{"tiles": made.tensors(), "backend": "native", **changes})


Q, K = torch.zeros(2, 4, 100, 16), torch.zeros(2, 2, 150, 16)
MISFITS: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = {
    "another dtype": ((Q, K.half(), K), {}, "one dtype"),
    "three dimensions": ((Q, K[0], K), {}, "four dimensions"),
    "another head_dim": ((Q, K[..., :8], K), {}, r"\[B, H, Nq, D\]"),
    "fewer values": ((Q, K, K[:, :, 1:]), {}, r"\[B, H, Nq, D\]"),
    "no divisor": ((Q[:, :3], K, K), {}, r"\[B, H, Nq, D\]"),
    "few key bits": ((Q, K, K), {"key_bits": torch.zeros(2, 4, dtype=torch.int32)}, "key_bits"),
    "wide key bits": ((Q, K, K), {"key_bits": torch.zeros(2, 5, dtype=torch.int64)}, "key_bits"),
    "few key lengths": ((Q, K, K), {"key_lengths": torch.zeros(1, dtype=torch.int64)}, "key_lengths"),
}


@pytest.mark.parametrize(("tensors", "changes", "message"), MISFITS.values(), ids=MISFITS)
def test_the_operator_refuses_what_does_not_fit(
    tensors: tuple[Tensor, Tensor, Tensor], changes: dict[str, Any], message: str
) -> None:
    # A plan of a good call serves no bad one.
    for call in (call_of(build_index(Causal(), 100, 150)), Call(50, 128, 0.25, pattern="causal", backend="native")):
        torch.ops.ringtile.forward(Q, K, K, *call)
        with pytest.raises(ValueError, match=message):
            torch.ops.ringtile.forward(*tensors, *call._replace(**changes))


def test_the_backward_operator_refuses_what_does_not_fit() -> None:
    index = build_index(Causal(), 100, 150)
    out, lse = torch.ops.ringtile.forward(Q, K, K, *call_of(index))
    rows = {"out_grad": out, "lse_grad": lse, "q": Q, "k": K, "v": K, "out": out, "lse": lse}
    torch.ops.ringtile.backward(*rows.values(), *call_of(index))
    for name in ("out_grad", "out", "lse_grad", "lse"):
        with pytest.raises(ValueError, match=name):
            torch.ops.ringtile.backward(*{**rows, name: rows[name][:, :3]}.values(), *call_of(index))
    for name in ("out_grad", "out", "lse"):
        with pytest.raises(ValueError, match=name):
            torch.ops.ringtile.backward(*{**rows, name: rows[name].half()}.values(), *call_of(index))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("group", lambda x: torch.ones_like(x)),
        ("group", lambda x: x.expand(3, 1)),
        ("rows.full_ptr", lambda x: x + 1),
        ("cols.full_ptr", lambda x: x[:-1]),
        ("rows.full", lambda x: x + 9),
        ("cols.full", lambda x: x + 9),
        ("cols.partial", lambda x: x + 9),
        ("rows.tile", lambda x: x + 9),
        ("table.bits", lambda x: x[..., :2]),
        ("table.bits_t", lambda x: x.long()),
        ("table.rows_any", lambda x: x[:0]),
        ("table.cols_any", lambda x: x[:, :1]),
        ("rows.work", lambda x: x + 1),
        ("cols.work", lambda x: x.flip(0)),
    ],
)
def test_an_index_that_leads_beside_its_tensors_is_refused(name: str, damage: Callable[[Tensor], Tensor]) -> None:
    index = build_index(Window(200), 500)
    tensors = dict(zip(NAMES, (x.clone() for x in index.tensors()), strict=True))
    q = torch.zeros(2, 1, 500, 8)
    torch.ops.ringtile.forward(q, q, q, *call_of(index, tiles=list(tensors.values())))
    tensors[name] = damage(tensors[name])
    with pytest.raises(ValueError, match="index" if tensors["group"].shape[0] == 3 else name):
        torch.ops.ringtile.forward(q, q, q, *call_of(index, tiles=list(tensors.values())))


# Templates: calls of equal layout share everything but the addresses, the scale, the start and the options.


def small_calls() -> dict[str, Callable[[], Bits]]:
    """Calls that differ from the first in one thing that a template must not hold, or must be told by."""
    torch.manual_seed(0)
    tensors = make_inputs(2, 4, 26, head_dim=16, dtype=torch.float32)
    wide = [torch.randn(2, 26, 4, 40)[..., 3:19].transpose(1, 2) for _ in range(4)]
    gaps = [torch.randn(2, 4, 26, 32)[..., ::2] for _ in range(4)]

    def call(q: Tensor, k: Tensor, v: Tensor, out_grad: Tensor, rule: Any = None, **options: Any) -> Callable[[], Bits]:
        return lambda: attend(q, k, v, Causal() if rule is None else rule, out_grad, **options)

    q, k, v, out_grad = tensors
    dropout = {"dropout_p": 0.3, "seed": 1}
    return {
        "plain": call(*tensors),
        "other addresses": call(*make_inputs(2, 4, 26, head_dim=16, dtype=torch.float32)),
        "other strides": call(*wide),
        "one tensor of other strides": call(q, k, wide[2], out_grad),
        "rows with gaps": call(*gaps),
        "rows without gaps": call(*(x.contiguous() for x in gaps)),
        "another dtype": call(*(x.double() for x in tensors)),
        "another scale": call(*tensors, scale=0.7),
        "another start": call(*tensors, start=3),
        "no keys for the first": call(*tensors, start=-5),
        "fewer keys": call(q, k[:, :, :20], v[:, :, :20], out_grad),
        "key heads": call(q, k[:, :2], v[:, :2], out_grad),
        "one batch element": call(*(x[:1] for x in tensors)),
        "another pattern": call(*tensors, Dense()),
        "a pattern without a text": call(*tensors, Blocks(torch.eye(2, dtype=torch.bool), block=16)),
        "another one": call(*tensors, Blocks(torch.ones(2, 2, dtype=torch.bool).tril(), block=16)),
        "an index": call(*tensors, build_index(Causal() & Window(9, 0), 26)),
        "an index of equal lists": call(*tensors, build_index(Causal(), 26)),
        "a key mask": call(*tensors, key_mask=torch.rand(2, 26) < 0.5),
        "key lengths": call(*tensors, key_lengths=torch.tensor([26, 4])),
        "dropout": call(*tensors, **dropout),
        "another seed": call(*tensors, **{**dropout, "seed": 2}),
        "other heads": call(*tensors, **dropout, head_at=torch.tensor([3, 1, 2, 0])),
    }


def test_a_plan_serves_only_calls_of_its_structure() -> None:
    calls, expected = small_calls(), {}
    for name, call in calls.items():
        plans._plans.clear()
        expected[name] = call()
    plans._plans.clear()
    assert sum(torch.equal(x["out"], expected["plain"]["out"]) for x in expected.values()) == 2
    assert_same_bits(expected["rows with gaps"], expected["rows without gaps"])
    order = [*calls, *calls, *reversed(calls), *random.Random(0).sample([*calls], len(calls))]
    for name in order:
        assert_same_bits(calls[name](), expected[name])
    assert len(plans._plans) > 15


def test_a_cached_index_that_changes_is_checked_again() -> None:
    clear_cache()
    q, k, v, out_grad = make_inputs(1, 2, 26, head_dim=16, dtype=torch.float32)
    index = build_index(Causal(), 26, num_heads=2)
    expected = attend(q, k, v, Causal(), out_grad)
    attend(q, k, v, Causal(), out_grad)
    assert plans._plans
    index.rows.partial.add_(9)
    with pytest.raises(ValueError, match=r"rows\.partial"):
        attend(q, k, v, Causal(), out_grad)
    index.rows.partial.sub_(9)
    # Between the passes of a call, too.
    leaf = q.clone().requires_grad_()
    out = sparse_attention(leaf, k, v, Causal(), backend="native")
    index.rows.partial.add_(9)
    with pytest.raises(ValueError, match=r"rows\.partial"):
        torch.autograd.grad(out, leaf, out_grad)
    index.rows.partial.sub_(9)
    assert_same_bits(attend(q, k, v, Causal(), out_grad), expected)
    clear_cache()


def test_bad_arguments_are_refused_after_good_ones() -> None:
    q, k, v, _ = make_inputs(1, 4, 26, head_dim=16, kv_heads=2, dtype=torch.float32)
    good: dict[str, Any] = {"query": q, "key": k, "value": v, "start": 1, "enable_gqa": True, "is_causal": True}
    bad: dict[str, Any] = {
        "enable_gqa": False,
        "start": True,
        "scale": math.inf,
        "softcap": -1.0,
        "backend": "nobody",
        "seed": 0.5,
        "key_mask": torch.ones(1, 25, dtype=torch.bool),
        "sinks": torch.ones(3),
        "value": v.double(),
        "key": k[..., :8],
        "head_at": torch.ones(4),
    }
    for _ in range(3):
        out = sparse_attention(**good)
        for name, x in bad.items():
            with pytest.raises(ValueError, match="value" if name == "value" else f"{name}|numbers"):
                sparse_attention(**{**good, name: x})
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse_attention(**good).dtype == torch.bfloat16
    assert torch.equal(sparse_attention(**good), out)
    assert not torch.equal(sparse_attention(**{**good, "is_causal": False}), out)


@pytest.mark.usefixtures("many_threads")
def test_python_threads_share_a_template() -> None:
    """Calls of one layout at once: a structure that two of them filled in would mix up their tensors."""
    problems = [
        Problem(make_inputs(1, 8, 100, head_dim=64, dtype=torch.float32), build_index(Causal(), 100)) for _ in range(4)
    ]
    expected = [bits_of(problem, 1) for problem in problems]
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        gate.wait(30)
        for _ in range(40):
            q, k, v, out_grad = problems[number].clean
            assert_same_bits(attend(q, k, v, Causal(), out_grad), expected[number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=120))


def test_plans_are_few_and_keep_no_tensor_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_cache()
    # Plans of other tests can still be alive.
    monkeypatch.setattr(plans, "_plans", OrderedDict())
    monkeypatch.setattr(plans, "_MOST_PLANS", 5)
    for batch in range(1, 9):
        q = torch.randn(batch, 1, 5, 4)
        sparse_attention(q, q, q, is_causal=True, backend="native")
        assert len(plans._plans) == min(batch, 5)
    cached = build_index(Causal(), 5)
    own = edited(cached, torch.clone)
    mask = torch.ones(len(q), 5, dtype=torch.bool)
    sparse_attention(q, q, q, own, backend="native", key_mask=mask)
    alive = [weakref.ref(x) for x in (q, mask, cached, *own.tensors(), cached.table.bits, cached.rows.full_ptr)]
    del q, mask, cached
    assert len(plans._plans) == 5
    del own
    assert len(plans._plans) == 4
    clear_cache()
    gc.collect()
    assert not any(x() is not None for x in alive)
    assert not plans._plans


def test_a_large_call_asks_the_cache_for_its_index() -> None:
    """Otherwise an index that is in use would seem the least recently used one."""
    q = torch.zeros(1, 4, 1024, 64)
    for _ in range(2):
        sparse_attention(q, q, q, is_causal=True, backend="native")
    hits = cache_info().hits
    sparse_attention(q, q, q, is_causal=True, backend="native")
    assert cache_info().hits == hits + 1


def test_a_small_call_stays_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    if library().runtime:
        assert [native.threads_of(operations) for operations in (0, 2.9e6, 7e6, 1e12)] == [1, 1, 2, 64]


# Processes of their own: instruction sets, no library, forks, one OpenMP runtime.


NOT_INSTALLED = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""
"""An editable install finds its own package before any path is looked at."""


def printed(code: str | Path) -> list[str]:
    """The words that a fresh interpreter prints."""
    variables = {**os.environ, VARIABLE: "", "PYTHONPATH": str(Path(native.__file__).parents[3])}
    command = [sys.executable, code] if isinstance(code, Path) else [sys.executable, "-c", NOT_INSTALLED + code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def run_reduced(numbers: list[int]) -> str:
    """Some cases, in a process of an instruction set; its name."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(native, "_OPERATIONS_A_THREAD", 1)
        for number in numbers:
            run(draw(number), monkeypatch)
        for number in numbers[:6]:
            problem = make(draw(number))
            expected = bits_of(problem, 1)
            for threads in (2, 3):
                assert_same_bits(bits_of(problem, threads), expected)
    assert len(library().sets) == 1
    return library().sets[0].name


TILE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DRAWN = {dtype: [number for number in range(200, 400) if draw(number).dtype == dtype] for dtype in TILE_DTYPES}


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_instruction_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_number(name)
    monkeypatch.setenv(VARIABLE, name)
    find_library(monkeypatch)
    tiles = [*DRAWN[torch.bfloat16][:4], *DRAWN[torch.float16][:4]]
    assert run_reduced(tiles if name.startswith("amx") else list(range(100, 108))) == name


def find_library(monkeypatch: pytest.MonkeyPatch, file: Path | None = None) -> None:
    """The library is looked for again, with the variables of now, beside other modules if a file is given."""
    module = importlib.import_module("ringtile.kernels.native.library")
    if file is not None:
        monkeypatch.setattr(module, "__file__", str(file / "kernels" / "native" / "library.py"))
    plans._plans.clear()
    monkeypatch.setattr(module, "_FOUND", module._find())


def reason_without() -> str:
    """The reason of doctor against the library, after `blockwise` has computed in its place."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 300, 16).unbind())
    out = sparse_attention(q, k, v, Window(40))
    expected = sparse_attention(q, k, v, Window(40), backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)
    (reason,) = doctor.diagnosis()["backends"]["native"]
    with pytest.raises(ValueError, match=re.escape(reason)):
        sparse_attention(q, k, v, backend="native")
    return reason


def test_switched_off_blockwise_serves_and_doctor_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    find_library(monkeypatch)
    assert reason_without() == f"switched off by {VARIABLE}=none"


def test_without_the_library_blockwise_serves_and_doctor_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_library(monkeypatch, tmp_path)
    said = "libringtile.so was not built: install a wheel for this platform, or build with gcc or clang"
    assert reason_without() == said


def test_what_the_environment_and_the_file_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sse9")
    find_library(monkeypatch)
    q = torch.randn(1, 1, 4, 8)
    for backend in (None, "native"):
        with pytest.raises(ValueError, match=r"RINGTILE_CPU: expected one of \[.*'none'\], got 'sse9'"):
            sparse_attention(q, q, q, Causal(), backend=backend)
    monkeypatch.setenv(VARIABLE, "")
    find_library(monkeypatch)
    assert not reason_against()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libringtile.so").write_bytes(b"no library")
    find_library(monkeypatch, tmp_path)
    assert reason_against().startswith("libringtile.so does not load: ")


FORKS = """
import multiprocessing, os, signal, torch
from torch.utils.data import DataLoader
from ringtile import sparse_attention
from ringtile.kernels import native
from ringtile.patterns import Causal

native._OPERATIONS_A_THREAD = 1

def compute(seed):
    signal.alarm(60)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 3, 150, 16, generator=generator).requires_grad_() for _ in range(3))
    out = sparse_attention(q, k, v, Causal(), backend="native")
    return torch.stack([out, *torch.autograd.grad(out.square().sum(), (q, k, v))]).detach()

def send(seed, pipe):
    pipe.send((torch.get_num_threads(), compute(seed).numpy().tobytes()))

if __name__ == "__main__":
    torch.set_num_threads(2)
    expected = [compute(seed) for seed in range(3)]
    assert len(os.listdir("/proc/self/task")) > 1, "no OpenMP thread runs"
    child = os.fork()
    if child == 0:
        same = all(torch.equal(compute(seed), expected[seed]) for seed in range(3))
        os._exit(0 if same else 1)
    print("fork", os.waitpid(child, 0)[1])
    loader = DataLoader([0, 1, 2], batch_size=None, num_workers=1, collate_fn=compute, multiprocessing_context="fork")
    print("loader", *(int(torch.equal(x, y)) for x, y in zip(loader, expected)))
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=send, args=(1, its))
    process.start()
    threads, found = mine.recv()
    process.join()
    print("spawn", process.exitcode, int(found == expected[1].numpy().tobytes()))
    assert torch.equal(compute(2), expected[2])
    for _ in range(20):
        torch.mm(torch.ones(500, 500), torch.ones(500, 500))
        compute(0)
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}
    print("runtimes", len(runtimes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_forked_and_spawned_processes_and_one_openmp_runtime(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    assert " ".join(printed(script)) == "fork 0 loader 1 1 1 spawn 0 1 runtimes 1"


# What a roofline is drawn from: that there are such rates, and which; how high they are, no test asks.


def test_every_rate_of_the_processor_is_measured() -> None:
    for threads in (1, 2):
        found = peak_rates(threads=threads, seconds=1e-4, samples=2)
        assert set(RATES) - set(found) <= {"dot_bfloat16"}
        assert ("dot_bfloat16" in found) == (library().sets[-1].name in (*BFLOAT16_SETS, *EMULATED_SETS))
        assert all(0 < rate < math.inf for rate in found.values())
    assert list(peak_rates(seconds=1e-4, samples=1, names=["exp_float32"])) == ["exp_float32"]


@pytest.mark.parametrize("options", [{"threads": 0}, {"seconds": 0.0}, {"seconds": math.nan}, {"samples": 0}], ids=str)
def test_no_rate_is_measured_in_no_time(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected more than none"):
        peak_rates(**options)


def test_a_library_that_is_not_there_has_no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_library(monkeypatch, tmp_path)
    assert peak_rates() == {}


# The tiles of AMX: the emulation is tested where there are none, and the processor where there are.


@pytest.fixture(
    params=[(name, dtype) for name in ("amx_emulated", "amx") for dtype in TILE_DTYPES],
    ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}",
)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """Calls go to tiles, of float32 to those of parts: the dtype to call with."""
    name, dtype = request.param
    use_set(name, monkeypatch)
    with precision_of("high" if dtype == torch.float32 else "highest"):
        yield dtype


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tiles_against_the_oracle(part: int, tiles: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in DRAWN[tiles][part::4]:
        # Drawn by turns, cases of bfloat16 never meet dropout.
        case = draw(number)
        case.dropout_p = 0.3 if number % 3 == 0 else 0.0
        run(case, monkeypatch)


PARTS_ERROR = 1e-5
"""Relative errors of float32 in parts, of the output and of each gradient, where scores are about 1. They grow with
scores. docs/reference/environment.md states them."""


@pytest.mark.parametrize(("head_dim", "size"), [(40, 1), (64, 1), (64, 4), (128, 2), (250, 2)])
def test_tiles_are_as_exact_as_torchs(
    head_dim: int, size: int, tiles: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights are rounded to bfloat16, as torch's are: an old maximum would let the largest be other than 1."""
    inputs = make_inputs(1, 1, 600, head_dim=head_dim, dtype=torch.float32)
    q, k, v, out_grad = tensors = [x.to(tiles) for x in (inputs.q * size, *inputs[1:])]
    theirs, exact = torchs(q, k, v, out_grad), dense(tensors)
    # The products of low parts are missing, up to 2^-16 of each product and with either sign.
    products = (q.abs().float() @ k.abs().float().mT).max() * head_dim**-0.5
    missing = 0.0 if tiles == torch.bfloat16 else products * 2**-17
    for route in (5, 7):
        use_products(route, monkeypatch)
        mine = attend(q, k, v, Dense(), out_grad)
        for name, factor in {"out": 1.05, "q": 1, "k": 1, "v": 1}.items():
            bound = PARTS_ERROR * size if tiles == torch.float32 else factor * relative_error(theirs[name], exact[name])
            assert relative_error(mine[name], exact[name]) < bound, name
        assert (mine["lse"].double() - exact["lse"]).abs().max() < 4e-6 * size + missing


def squares(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Every other square of 32 x 32, which ones depends on the tile."""
    return (query // 32 + key // 32 + query // 128) % 2 == 0


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize(
    ("pattern", "block", "n_tokens", "head_dim", "kv_heads"),
    [
        (Window(100, 3), 128, 450, 64, 2),
        (Elements(squares), 128, 300, 32, 2),
        (Dense(), 64, 230, 24, 1),
        (LONG, 16, 1083, 17, 1),
        (LONG, 32, 700, 32, 2),
    ],
    ids=["window", "squares", "full tiles", "long lists", "wider tiles"],
)
def test_both_routes_by_tiles_give_the_same_bits(
    pattern: Pattern,
    block: int,
    n_tokens: int,
    head_dim: int,
    kv_heads: int,
    tiles: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Squares that a tile skips, rows that stay packed and rows that do not, and lists that threads share."""
    monkeypatch.setattr(native, "_SHARES_A_THREAD", 4096)
    index = build_index(pattern, n_tokens, start=19, num_heads=2, block=block)
    inputs = make_inputs(1, 2, n_tokens, head_dim=head_dim, kv_heads=kv_heads, value_dim=40, dtype=tiles)
    options = {"key_mask": torch.rand(1, n_tokens) < 0.9, "dropout_p": 0.2, "seed": 3} if pattern is LONG else {}
    if kv_heads == 2:
        options |= {"softcap": 1.5, "alibi_slopes": torch.tensor([0.02, 0.05])}
    problem = Problem(inputs, index, torch.randn(1, 2, n_tokens), options)
    found = {}
    for products, threads in ((5, 1), (7, 1), (7, 3)):
        use_products(products, monkeypatch)
        found[products, threads] = bits_of(problem, threads)
        assert_same_bits(found[products, threads], found[5, 1])
    exact = problem.exact()
    for name in "qkv":
        assert relative_error(found[5, 1][name], exact[name]) < RELATIVE[rounding_of(tiles)], name


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.4e38], ids=str)
@pytest.mark.parametrize("products", [5, 7], ids=["columns", "rows and columns"])
def test_a_nan_reaches_no_gradient_of_a_tile_that_keeps_it_nowhere(
    products: int, bad: float, tiles: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query 5 keeps nothing of the first column of tiles, key 5 nothing of the first row, and others there do."""
    use_products(products, monkeypatch)

    def apart(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((query != 5) | (key >= 32)) & ((key != 5) | (query >= 32))

    q, k, v, out_grad = make_inputs(1, 1, 96, head_dim=32, dtype=tiles)
    index = build_index(Elements(apart), 96, block=32)
    for place in range(4):
        inputs = [q, k, v, out_grad]
        inputs[place] = inputs[place].clone()
        inputs[place][0, 0, 5, 7] = bad
        grads = attend(*inputs[:3], index, inputs[3])
        if place == 0:
            assert grads["out"][0, 0, 6:].isfinite().all()
        for name in "kv" if place in (0, 3) else "q":
            assert grads[name][0, 0, :32].isfinite().all(), (place, name)
            assert not grads[name][0, 0, 32:].isfinite().all(), (place, name)


def test_the_largest_weight_is_one(tiles: torch.dtype) -> None:
    """Weights that no rounding touches: the sum, which is exact, must agree with those that multiply values."""
    q, k, v, _ = make_inputs(1, 1, 90, 90, head_dim=32, dtype=tiles)
    # Numbers of float16 are the sums of their parts, those of float32 are not.
    v = v.half().to(tiles) if tiles == torch.float32 else v
    out, lse = sparse_attention(q, k, v, Window(0), backend="native", return_lse=True)
    # In float32 the rounding of a score shows, in the weight and its sum alike.
    torch.testing.assert_close(out, v, rtol=3e-7 if tiles == torch.float32 else 0, atol=0)
    missing = 0.0 if tiles == torch.bfloat16 else 2**-17 * (q.abs() * k.abs()).sum(-1).max().item() * 32**-0.5
    torch.testing.assert_close(lse, (q.float() * k.float()).sum(-1) * 32**-0.5, rtol=3e-7, atol=3e-7 + missing)


def test_tiles_leave_the_modes_of_the_thread_alone(tiles: torch.dtype) -> None:
    """They flush denormal numbers, and other libraries must neither see that nor lose tiles of their own."""
    q, k, v, _ = make_inputs(1, 1, 200, head_dim=64, dtype=tiles)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    first = sparse_attention(q, k, v, Dense(), backend="native")
    assert (torch.full((100,), 1e-40) * 1).min() > 0
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v), theirs)
    assert torch.equal(sparse_attention(q, k, v, Dense(), backend="native"), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sets_of_tiles_compute_wide_dtypes_as_avx512_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(make_inputs(1, 2, 200, head_dim=32, dtype=dtype), build_index(Causal() & Window(90), 200))
    found = {}
    for name in ("avx512", "amx_emulated"):
        use_set(name, monkeypatch)
        found[name] = bits_of(problem, 1)
    same = torch.equal(found["avx512"]["out"], found["amx_emulated"]["out"])
    assert same == (dtype in (torch.float32, torch.float64))
    if same:
        assert_same_bits(found["amx_emulated"], found["avx512"])


def test_float32_is_computed_in_parts_only_where_the_caller_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that share their templates, each has the precision of its moment, backward as forward."""
    inputs = make_inputs(1, 2, 200, head_dim=32, dtype=torch.float32)
    problem = Problem(inputs, build_index(Causal() & Window(90), 200))
    use_set("amx_emulated", monkeypatch)
    exact = bits_of(problem, 1)
    found = []
    for name in ("high", "medium"):
        with precision_of(name):
            found.append(bits_of(problem, 1))
        assert_same_bits(bits_of(problem, 1), exact)
    # The setting of one kind of products, beside which torch refuses to tell the other.
    with precision_of("highest"):
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        found.append(bits_of(problem, 1))
    for each in found:
        assert_same_bits(each, found[0])
        for name, x in each.items():
            assert not torch.equal(x, exact[name]), name
            assert relative_error(x, exact[name]) < PARTS_ERROR, name
    # A backward pass has the precision of its own moment.
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = sparse_attention(*leaves, problem.index, backend="native")
    assert torch.equal(out, exact["out"])
    with precision_of("high"):
        grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    assert not any(torch.equal(grad, exact[name]) for name, grad in zip("qkv", grads, strict=True))


def test_masses_of_float32_are_exact_whatever_the_caller_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, *_ = make_inputs(1, 2, 200, head_dim=32, dtype=torch.float32)
    seen, groups = torch.arange(1, 201), torch.tensor([0, 50, 200], dtype=torch.int32)
    found = []
    for name in ("avx512", "amx_emulated"):
        use_set(name, monkeypatch)
        with precision_of("high"):
            found.append(pooled_masses(query, key, segment=64, seen=seen, groups=groups))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_kept_infinity_is_a_nan_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity less infinity has no low part. It stays with the queries that keep it."""
    use_set("amx_emulated", monkeypatch)
    index = build_index(Window(9), 100, block=16)
    q, k, v, _ = make_inputs(1, 1, 100, head_dim=32, dtype=dtype)
    v[0, 0, 70, 3] = math.inf
    with precision_of("high"):
        out = sparse_attention(q, k, v, index, backend="native")
        masked = sparse_attention(q, k, v, index, backend="native", key_mask=torch.arange(100)[None] != 70)
    assert out[0, 0, 70, 3].isnan()
    # Rows of tiles that do not keep the key at all.
    assert out[0, 0, :48].isfinite().all()
    assert out[0, 0, 96:].isfinite().all()
    assert masked.isfinite().all()


def exact_tile_products(a: Any, b: Any, c: Any) -> Any:
    """C[16, 16] + A[16, 32] * B[16, 32] as the manual says: a sum each of even and odd halves of pairs, then both to C.

    Denormal numbers are zero, and each addition is rounded once: products of bfloat16 are exact in float64, and adding
    there rounds to odd if it is not exact, so that rounding to float32 afterwards is as good as rounding once.
    """
    np = pytest.importorskip("numpy")

    def flushed(x: Any) -> Any:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)

    def fused(x: Any, y: Any, sum_: Any) -> Any:
        product, addend = x.astype(np.float64) * y, sum_.astype(np.float64)
        total = product + addend
        # What rounding lost, by Knuth.
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        bits = total.view(np.int64)
        inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
        towards = np.where((lost > 0) == (total > 0), 1, -1)
        return flushed((bits + np.where(inexact, towards, 0)).view(np.float64).astype(np.float32))

    a, b = (flushed((x.astype(np.uint32) << 16).view(np.float32)) for x in (a, b))
    even = odd = np.zeros((16, 16), np.float32)
    for k in range(16):
        even = fused(a[:, 2 * k, None], b[None, k, 0::2], even)
        odd = fused(a[:, 2 * k + 1, None], b[None, k, 1::2], odd)
    return flushed(flushed(c) + flushed(even + odd))


@pytest.mark.parametrize("kind", ["usual", "any size", "tiny", "not finite"])
@pytest.mark.parametrize("name", ["amx_emulated", "amx"])
def test_products_of_tiles_are_exact(name: str, kind: str) -> None:
    np, number = pytest.importorskip("numpy"), set_number(name)
    rng = np.random.default_rng(5)
    low, high = {"usual": (119, 136), "any size": (0, 191), "tiny": (50, 71), "not finite": (119, 136)}[kind]

    def drawn(*shape: int) -> Any:
        numbers = rng.integers(2, size=shape) << 15 | rng.integers(low, high, size=shape) << 7
        return (numbers | rng.integers(128, size=shape)).astype(np.uint16)

    for _ in range(40):
        a, b = drawn(16, 32), drawn(16, 32)
        c = rng.integers(-1000, 1000, size=(16, 16)).astype(np.float32) * np.float32(1e-39 if kind == "tiny" else 0.01)
        if kind == "not finite":
            a[rng.random(a.shape) < 0.02] = rng.choice([0x7F80, 0xFF80, 0x7FC1])
        with np.errstate(all="ignore"):
            expected = exact_tile_products(a, b, c)
        library().handle.ringtile_multiply_tiles(number, a.ctypes.data, b.ctypes.data, c.ctypes.data, 1)
        nan = np.isnan(expected)
        assert (np.isnan(c) == nan).all()
        assert (c.view(np.int32)[~nan] == expected.view(np.int32)[~nan]).all()


def test_the_self_test_finds_lost_tiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, found = importlib.import_module("ringtile.kernels.native.library"), library()
    isa = InstructionSet(set_number("amx_emulated"), "amx_emulated", 16)

    def use(handle: Any) -> None:
        monkeypatch.setattr(module, "_FOUND", module._Found(found._replace(handle=handle, sets=(isa,)), ""))

    use(found.handle)
    report = check_tiles(seconds=0.01, products=3)
    assert (report.reason, report.wrong) == ("", 0)
    assert report.sums > 0
    assert report.threads == 2 * (os.cpu_count() or 1)
    # Tiles that are gone leave the sum as it was.
    use(Case(ringtile_multiply_tiles=lambda *arguments: 0))
    report = check_tiles(seconds=0.01, products=3)
    assert report.wrong == report.sums > 0
    monkeypatch.setattr(doctor, "check_tiles", lambda: report)
    monkeypatch.setattr(module, "_FOUND", module._Found(found, ""))
    assert main(["doctor", "--self-test"]) == 1
    assert re.search(r"self-test +(\d+) of \1 sums in tiles are wrong.*RINGTILE_CPU=avx512\n", capsys.readouterr().out)
    assert main(["doctor", "--self-test", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["self_test"] == report._asdict()


# The binary.


def listing(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    path = library().handle._name
    return subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout


def test_the_library_is_small_and_needs_libc_alone() -> None:
    handle = library().handle
    names = [handle.ringtile_isa_name(number).decode() for number in range(handle.ringtile_isa_count())]
    # The emulation, which is for tests only, has 1.2 million bytes of them.
    most = 3_500_000 if set(names) & set(EMULATED_SETS) else 2_300_000
    assert Path(handle._name).stat().st_size <= most
    needed = re.findall(r"NEEDED.*\[(.*)\]", listing("readelf", "-d"))
    assert {name.split(".")[0] for name in needed} <= {"libc", "libm"}


def test_the_library_shows_only_its_own_names() -> None:
    shown = [line.split()[-2:] for line in listing("nm", "-D", "--defined-only").splitlines()]
    assert {name for _, name in shown} == {
        f"ringtile_{name}"
        for name in (
            *("abi_version", "call_field", "use_runtime", "isa_count", "isa_name", "isa_reason", "lanes"),
            *("forward", "backward", "masses", "lists", "scores", "ascending", "best", "kept"),
            *("multiply_tiles", "peak"),
        )
    }
    assert {kind for kind, _ in shown} == {"T"}
    # Python passes in OpenMP's entry points: with them undefined, a build of another compiler would not load.
    missing = {line.split()[-1].split("@")[0] for line in listing("nm", "-D", "--undefined-only").splitlines()}
    assert not [name for name in missing if re.match("GOMP_|__kmpc_|omp_", name)]
    # A template that two instruction sets instantiate would be linked once, for either.
    assert not [line for line in listing("nm", "--defined-only").splitlines() if line.split()[-2] in "VWu"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86-64")
def test_no_instruction_of_another_set() -> None:
    sets = ("amx_emulated", "amx", "avx512_bf16", "avx512", "avx2")
    registers: dict[str, set[str]] = {name: set() for name in (*sets, "baseline")}
    owner = ""
    for line in listing("objdump", "-d", "--no-show-raw-insn", "--section=.text").splitlines():
        if found := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            owner = next((name for name in sets if name in found[1]), "baseline")
        elif owner:
            registers[owner].update(re.findall(r"%([xyzt]mm|k(?=[0-7]))|(vdpbf16ps)", line))
    used = {name: {a or b for a, b in found} for name, found in registers.items()}
    if not used["avx2"]:
        pytest.skip("the library is stripped")
    assert not used["baseline"] & {"ymm", "zmm", "k", "vdpbf16ps", "tmm"}
    assert "ymm" in used["avx2"]
    assert not used["avx2"] & {"zmm", "k", "vdpbf16ps", "tmm"}
    assert "zmm" in used["avx512"]
    assert not used["avx512"] & {"vdpbf16ps", "tmm"}
    assert used["avx512_bf16"] >= {"zmm", "vdpbf16ps"}
    assert "tmm" not in used["avx512_bf16"]
    assert ("tmm" in used["amx"]) == (sys.platform == "linux")
    assert "vdpbf16ps" not in used["amx"]
    # Empty in a library for users.
    assert not used["amx_emulated"] & {"vdpbf16ps", "tmm"}
