"""The Triton kernels against the oracle, case by case, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/triton_cases.py          on the CPU, in the interpreter
    python tests/triton_cases.py                             on a GPU: more dtypes, larger problems

Prints the errors of each case and exits with status 1 where one is too large. It needs no pytest.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from indices import edited
from oracle import SDPA_BUDGET, Inputs, make_inputs, oracle, relative_error, sdpa_low_precision_error
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index import BlockIndex, clear_cache, lists
from ringtile.patterns import (
    BlockDilated,
    Causal,
    Dense,
    Dilated,
    Documents,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Segments,
    Window,
    per_head,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
FLOAT32_TOLERANCE = 2e-6

HOLES = Causal() & Window(40) & ~Window(2)
"""The first three queries keep nothing, and the last three keys serve nobody."""
TILED = Causal() & (Window(50) | GlobalTokens(5) | RandomBlocks(1, block=64))
SPLIT = Window(20) | GlobalTokens(3)

Results = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Output, lse and gradients by name."""

Check = Callable[[], float]
"""Runs one case and returns the largest of its errors over what each may be: at most 1 is right."""

CASES: dict[str, Check] = {}


def case(function: Check) -> Check:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def on(x: Inputs, device: torch.device) -> Inputs:
    return Inputs(*(tensor.to(device) for tensor in x))


def run(x: Inputs, served: Pattern | BlockIndex, grad_lse: Tensor | None = None, **options: Any) -> Results:
    """Output, lse and gradients of the kernels, computed on `DEVICE`."""
    leaves = [tensor.detach().requires_grad_() for tensor in x[:3]]
    out, lse = sparse_attention(*leaves, served, enable_gqa=True, return_lse=True, backend="triton", **options)
    outs, cotangents = [out], [x.grad_out]
    if grad_lse is not None:
        outs, cotangents = [out, lse], [x.grad_out, grad_lse]
    grads = torch.autograd.grad(outs, leaves, cotangents)
    return out.detach(), lse.detach(), dict(zip("qkv", grads, strict=True))


def errors_of(
    pattern: Pattern,
    x: Inputs,
    *,
    block: int = 64,
    start: int | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
    **options: Any,
) -> float:
    """The largest error of output, lse and gradients over the tolerance, against the oracle."""
    grad_lse = torch.randn(x.q.shape[:3])
    expected = oracle(*x[:3], pattern, grad_out=x.grad_out, grad_lse=grad_lse, start=start, **options)
    lengths = x.q.shape[2], x.k.shape[2]
    index = build_index(pattern, *lengths, start=start, num_heads=x.q.shape[1], block=block, device=DEVICE)
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    out, lse, grads = run(on(x, DEVICE), index, grad_lse.to(DEVICE), **moved)
    assert torch.equal(lse.isfinite().cpu(), expected.lse.isfinite()), "other rows are empty"
    found = [(out, expected.out), (lse, expected.lse), *((grads[name], expected.grads[name]) for name in "qkv")]
    return max(distance(actual.cpu(), wanted) for actual, wanted in found) / tolerance


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative error over what is finite; what the oracle has as nothing has to be nothing."""
    finite = expected.isfinite()
    if not expected[finite].any():
        return math.inf if actual[finite].any() else 0.0
    return relative_error(actual[finite], expected[finite])


def budget_of(pattern: Pattern, x: Inputs, **options: Any) -> float:
    """The largest error over what torch's own attention in the same dtype may have, against float64."""
    expected = oracle(*x[:3], pattern, grad_out=x.grad_out)
    theirs = sdpa_low_precision_error(*x[:3], pattern, x.grad_out, expected=expected)
    index = build_index(pattern, x.q.shape[2], x.k.shape[2], num_heads=x.q.shape[1], block=64, device=DEVICE)
    out, _, grads = run(on(x, DEVICE), index, **options)
    budget = SDPA_BUDGET[x.q.dtype]
    shares = [distance(out.cpu(), expected.out) / (budget * theirs.out)]
    shares += [distance(grads[name].cpu(), expected.grads[name]) / (budget * theirs.grads[name]) for name in "qkv"]
    return max(shares)


def differ(ours: Results, theirs: Results) -> float:
    """0 where every bit is the same, else infinity."""
    same = torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    return 0.0 if same and all(torch.equal(ours[2][name], theirs[2][name]) for name in "qkv") else math.inf


def make(heads: int, n_queries: int, n_keys: int | None = None, head_dim: int = 16, **options: Any) -> Inputs:
    options = {"batch": 1, "dtype": torch.float32, **options}
    return make_inputs(options.pop("batch"), heads, n_queries, n_keys, head_dim, **options)


def poisoned(x: Inputs, queries: list[slice], keys: list[slice]) -> Inputs:
    """The inputs with NaN and infinity in some queries, and in some keys."""
    found = Inputs(*(tensor.clone() for tensor in x))
    for places, tensors in ((queries, (found.q, found.grad_out)), (keys, (found.k, found.v))):
        for place in places:
            tensors[0][:, :, place] = math.nan
            tensors[1][:, :, place] = math.inf
    return found


CASES.update(
    {
        "dense and ragged": lambda: errors_of(Dense(), make(1, 200, 270)),
        "causal over sub tiles": lambda: max(
            errors_of(Causal(), make(1, 200), block=128), errors_of(Window(70), make(1, 300), block=128)
        ),
        "empty rows and unused keys": lambda: errors_of(HOLES, make(1, 130, batch=2)),
        "grouped heads and another value dim": lambda: errors_of(
            TILED, make(4, 130, 170, 24, kv_heads=2, value_dim=40)
        ),
        "three heads share a key head": lambda: errors_of(Causal(), make(3, 70, kv_heads=1)),
        "heads with patterns of their own": lambda: errors_of(
            per_head([Causal(), Window(5), ~Dense(), HOLES]), make(4, 100, kv_heads=2)
        ),
        "dilated and blocks merged into larger ones": lambda: max(
            errors_of(Dilated([1, 3], 9), make(1, 100)),
            errors_of(BlockDilated([1, 2], 1, block=32), make(1, 150), block=32),
            errors_of(Segments(60, 3, 1), make(1, 130)),
        ),
        "a start inside a tile": lambda: max(
            errors_of(TILED, make(1, 90, 150), start=start) for start in (-11, 37, 150)
        ),
        "one query decodes": lambda: max(
            errors_of(Causal(), make(4, 1, 150, kv_heads=2)),
            errors_of(Causal() & Window(70), make(4, 3, 130, kv_heads=4)),
            errors_of(Causal(), make(6, 2, 70, kv_heads=2, batch=2), start=40),
        ),
        "key lengths": lambda: errors_of(Causal(), make(2, 100, batch=2), key_lengths=torch.tensor([70, 0])),
        "scales": lambda: max(errors_of(TILED, make(1, 70), scale=scale) for scale in (-0.7, 0.0, 2.0)),
        "half types within the budget": lambda: max(
            budget_of(pattern, make(2, 130, 130, head_dim, dtype=dtype))
            for dtype in HALVES
            for pattern, head_dim in ((TILED, 64), (Dense(), 80))
        ),
        "float32 within the budget": lambda: max(
            budget_of(TILED, make(1, 130, 130, 64, score_scale=scale))
            for scale in ((16,) if INTERPRETED else (1, 4, 16))
        ),
    }
)


@case
def everything_at_once() -> float:
    x = make(2, 100, 150, 24, kv_heads=1, value_dim=8, batch=2)
    return errors_of(
        TILED,
        # Strides in another order, none of them of a size that a kernel could take for granted.
        Inputs(*(t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for t in x)),
        key_lengths=torch.tensor([120, 60]),
        key_mask=torch.arange(150).expand(2, 150) % 5 != 0,
        dropout_p=0.3,
        seed=torch.tensor([9]),
        scale=0.3,
    )


@case
def rows_whose_scores_are_all_minus_inf() -> float:
    """Documents of which the first has products that overflow, and keys of -inf, whole and in pieces."""
    clear_cache()
    worst = 0.0
    for longest, lone in ((64, 70), (1, 64)):
        x = make(2, 170, kv_heads=1)
        rule = Documents([lone, 170 - lone])
        x.k[:, :, :lone] = -1e30 if lone == 70 else -math.inf
        x.q[:, :, :lone] = 1e30 if lone == 70 else 1
        rest = Inputs(*(t[:, :, lone:] for t in x))
        wanted = oracle(*rest[:3], Dense(), grad_out=rest.grad_out)
        with patch.object(lists, "LONGEST", longest):
            out, lse, grads = run(on(x, DEVICE), build_index(rule, 170, block=64, device=DEVICE))
        assert (lse[:, :, :lone] == -math.inf).all()
        for found, expected in ((out, wanted.out), *((grads[name], wanted.grads[name]) for name in "qkv")):
            assert not found[:, :, :lone].any()
            worst = max(worst, distance(found[:, :, lone:].cpu(), expected))
        worst = max(worst, distance(lse[:, :, lone:].cpu(), wanted.lse))
    clear_cache()
    return worst / FLOAT32_TOLERANCE


@case
def the_query_heads_of_many_columns_in_one_program() -> float:
    from ringtile.kernels.triton import launches

    with patch.object(launches, "_FEW_PROGRAMS", 1):
        return errors_of(TILED, make(2, 130, kv_heads=1))


@case
def long_rows_and_columns_in_pieces() -> float:
    # As over 64 tiles and more, but in a problem that an interpreter can compute.
    clear_cache()
    with patch.object(lists, "LONGEST", 1):
        index = build_index(SPLIT, 100, block=64)
        assert min(index.rows.work[:, 3].max(), index.cols.work[:, 3].max()) > 0, "nothing is cut"
        errors = [errors_of(SPLIT, make(2, 100, kv_heads=1)), errors_of(per_head([SPLIT, Causal()]), make(2, 100))]
        errors.append(errors_of(Causal(), make(4, 1, 200, kv_heads=2)))
    clear_cache()
    return max(errors)


@case
def an_index_with_unused_room() -> float:
    """As one made on the device, whose size nobody knows: what lies behind the lists means nothing."""
    x = make(4, 100, batch=1)
    pattern = per_head([TILED, Causal(), HOLES, Window(30)])
    expected = oracle(*x[:3], pattern, grad_out=x.grad_out)
    index = build_index(pattern, 100, num_heads=4, block=64, device=DEVICE)
    names = [f"{side}.{name}" for side in ("rows", "cols") for name in ("full", "partial", "tile", "work")]
    index = edited(index, lambda x: torch.cat([x, x.new_full((7, *x.shape[1:]), -1)]), *names)
    out, _, grads = run(on(x, DEVICE), index)
    found = [(out, expected.out), *((grads[name], expected.grads[name]) for name in "qkv")]
    return max(distance(actual.cpu(), wanted) for actual, wanted in found) / FLOAT32_TOLERANCE


@case
def a_fixed_capacity_changes_no_bit() -> float:
    with patch.object(lists, "LONGEST", 1):
        base = build_index(Causal(), 200, block=64, device=DEVICE)
        keep = torch.tensor([[i % 3 != j % 2 for j in range(4)] for i in range(4)], device=DEVICE).expand(1, 2, 4, 4)
        plain, roomy = base.restricted(keep), base.restricted(keep, 40)
        assert len(roomy.rows.work) > len(plain.rows.work)
        x = on(make(2, 200, batch=1), DEVICE)
        return differ(run(x, plain), run(x, roomy))


@case
def key_mask() -> float:
    mask = torch.arange(100).expand(2, 100) % torch.tensor([[3], [400]]) == 0
    return errors_of(TILED, make(2, 100, batch=2), key_mask=mask)


@case
def dropout() -> float:
    seed = torch.tensor([-123456789012345])
    return max(
        errors_of(TILED, make(1, 100, batch=2), dropout_p=0.4, seed=seed),
        errors_of(TILED, make(2, 150, kv_heads=1), dropout_p=0.1, seed=seed, block=128, start=-5),
    )


def moved_error(x: Inputs, index: BlockIndex, rows: Tensor, cols: Tensor, **options: Any) -> float:
    """The largest distance between a call and the same one over tiles in another order, NaN where no token is."""

    def positions(at: Tensor, first: int, count: int) -> Tensor:
        place = first + torch.arange(count, device=at.device)
        return at[place // index.block] * index.block + place % index.block

    def taken(x: Tensor, at: Tensor) -> Tensor:
        found = x[:, :, at.clamp(0, x.shape[2] - 1)]
        return torch.where(((at >= 0) & (at < x.shape[2]))[:, None], found, math.nan)

    moved = index.remapped(rows, cols)
    queries = positions(moved.rows.at, moved.start, moved.n_queries) - index.start
    keys = positions(moved.cols.at, 0, moved.n_keys)
    part = Inputs(*(taken(t, at) for t, at in zip(x, (queries, keys, keys, queries), strict=True)))
    (out, lse, grads), found, worst = run(x, index, **options), run(part, moved, **options), 0.0
    for actual, at, wanted in (
        (found[0], queries, out),
        (found[1], queries, lse),
        *((found[2][name], queries if name == "q" else keys, grads[name]) for name in "qkv"),
    ):
        inside = (at >= 0) & (at < wanted.shape[2])
        assert inside.sum() == wanted.shape[2]
        worst = max(worst, distance(actual[:, :, inside], wanted[:, :, at[inside]]))
    return worst


@case
def remapped_tiles_drop_the_weights_of_the_whole() -> float:
    index = build_index(TILED, 150, 200, block=128, device=DEVICE)
    rows, cols = (torch.arange(count, device=DEVICE).roll(1) for count in (index.n_rows, index.n_cols))
    return moved_error(on(make(1, 150, 200), DEVICE), index, rows, cols, dropout_p=0.4, seed=5) / FLOAT32_TOLERANCE


@case
def heads_and_batch_elements_drop_the_weights_of_the_whole() -> float:
    """In another order, with the query heads of a key head in one tile, in one program and in several."""
    from ringtile.kernels.triton import launches

    options = {"dropout_p": 0.4, "seed": torch.tensor([-5], device=DEVICE)}
    worst = 0.0
    order, batch = (torch.tensor(numbers, device=DEVICE) for numbers in ([2, 3, 0, 1], [1, 0]))
    for n_queries, programs in ((3, launches._FEW_PROGRAMS), (40, 1)):
        x = on(make(4, n_queries, 40, kv_heads=2, batch=2), DEVICE)
        index = build_index(Causal(), n_queries, 40, block=64, device=DEVICE)
        turned = Inputs(*(t.flip(0)[:, order] if t.shape[1] == 4 else t.flip(0, 1) for t in x))
        out, _, grads = run(x, index, **options)
        with patch.object(launches, "_FEW_PROGRAMS", programs):
            found, _, found_grads = run(turned, index, head_at=order, batch_at=batch, **options)
        worst = max(worst, distance(found, out.flip(0)[:, order]), distance(found_grads["k"], grads["k"].flip(0, 1)))
        worst = max(worst, distance(found_grads["q"], grads["q"].flip(0)[:, order]))
    return worst / FLOAT32_TOLERANCE


@case
def small_remapped_tiles() -> float:
    """Without dropout the kernels merge them in any order. With it, they say that they cannot."""
    index = build_index(TILED, 150, block=32, device=DEVICE)
    rows = torch.arange(index.n_rows, device=DEVICE)
    problem = on(make(1, 150), DEVICE), index, rows.roll(1), rows.roll(2)
    try:
        moved_error(*problem, dropout_p=0.5, seed=1)
    except ValueError as error:
        if "knows dropout of a remapped index in blocks from 64 up" in str(error):
            return moved_error(*problem) / FLOAT32_TOLERANCE
    return math.inf


@case
def what_nobody_keeps_is_not_read() -> float:
    """NaN in keys and values that no row keeps, and in queries that keep nothing, changes no bit of the rest."""
    x = on(make(2, 130, batch=1), DEVICE)
    index = build_index(HOLES, 130, num_heads=2, block=64, device=DEVICE)
    return differ(run(x, index), run(poisoned(x, [slice(3)], [slice(-3, None)]), index))


@case
def rows_beyond_the_lengths_keep_nothing() -> float:
    """The bits of a tile are those of all its rows: keys that only rows outside the lengths keep are not read."""
    x = on(make(2, 8, 100), DEVICE)
    index = build_index(Window(20), 8, 100, start=40, num_heads=2, block=64, device=DEVICE)
    return differ(run(x, index), run(poisoned(x, [], [slice(20), slice(68, None)]), index))


@case
def keys_beyond_the_lengths_are_kept_by_nobody() -> float:
    """Queries whose keys in the last tile do not exist change no gradient of those that do."""
    x = on(make(1, 64, 100), DEVICE)
    index = build_index(Dilated([60], 1), 64, 100, start=0, num_heads=1, block=64, device=DEVICE)
    other = poisoned(x, [slice(40, None)], [])._replace(grad_out=x.grad_out)
    (_, _, grads), (_, _, others) = run(x, index), run(other, index)
    return 0.0 if all(torch.equal(grads[name][:, :, 64:], others[name][:, :, 64:]) for name in "kv") else math.inf


@case
def masked_keys_are_not_read() -> float:
    """So the last queries keep nothing at all."""
    x = on(make(2, 130), DEVICE)
    mask = torch.arange(130, device=DEVICE)[None] < 100
    index = build_index(Causal() & Window(10), 130, num_heads=2, block=64, device=DEVICE)
    other = poisoned(x, [slice(112, None)], [slice(100, None)])
    return differ(run(x, index, key_mask=mask), run(other, index, key_mask=mask))


@case
def any_strides() -> float:
    """Transposed, expanded and by columns."""
    plain = on(make(2, 70, batch=2), DEVICE)
    index = build_index(TILED, 70, num_heads=2, block=64, device=DEVICE)
    one = Inputs(*(tensor[:, :1].expand_as(tensor) for tensor in plain))
    laid = Inputs(*(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in plain))
    columns = Inputs(*(tensor.mT.contiguous().mT for tensor in plain))
    expected = run(plain, index)
    worst = max(differ(run(x, index), expected) for x in (laid, columns))
    return max(worst, differ(run(one, index), run(Inputs(*(tensor.contiguous() for tensor in one)), index)))


@case
def offsets_beyond_32_bits() -> float:
    near = on(make(1, 70, dtype=torch.float16), DEVICE)
    apart = 2**31 // 60
    room = torch.empty(70 * apart, dtype=torch.float16, device=DEVICE)
    far = room.as_strided(near.q.shape, (0, 0, apart, 1))
    index = build_index(Causal(), 70, num_heads=1, block=128, device=DEVICE)
    expected, worst = run(near, index), 0.0
    for number in range(4):
        far.copy_(near[number])
        x = Inputs(*(far if number == other else tensor for other, tensor in enumerate(near)))
        worst = max(worst, differ(run(x, index), expected))
    return worst


@case
def scores_of_any_size() -> float:
    """One key wins each row, by exact products: it has a weight of 1, so the results are its value and gradient."""
    draws, n = torch.Generator().manual_seed(0), 70 if INTERPRETED else 130
    signs = torch.randint(0, 2, (1, 2, n, 64), generator=draws) * 2.0 - 1
    winners = torch.randperm(n, generator=draws)
    index = build_index(Dense(), n, num_heads=2, block=64, device=DEVICE)
    sizes = [(torch.float32, 2.0**20), (torch.float32, 2.0**5), *((half, 2.0**15) for half in HALVES)]
    # All sizes and all scales, but not each with each.
    for (dtype, size), scale in zip(sizes * 2, (0.1, 0.3, 0.7, -0.9, 0.7, 0.3, -0.9, 0.1), strict=False):
        v, grad_out = (torch.randn(1, 2, n, 64, generator=draws).to(dtype) for _ in range(2))
        # A negative scale lets the same keys win queries of the opposite sign.
        q, k = (signs[:, :, winners] * size * math.copysign(1, scale)).to(dtype), (signs * size).to(dtype)
        x = on(Inputs(q, k, v, grad_out), DEVICE)
        out, _, grads = run(x, index, scale=scale)
        if not torch.equal(out, x.v[:, :, winners]) or not torch.equal(grads["v"][:, :, winners], x.grad_out):
            return math.inf
    return 0.0


@case
def twice_the_same_bits() -> float:
    n = 70 if INTERPRETED else 130
    x = on(make(4, n, kv_heads=2), DEVICE)
    index = build_index(TILED, n, num_heads=4, block=64, device=DEVICE)
    return differ(run(x, index), run(x, index))


def results(names: list[str], cases: dict[str, Check]) -> Iterator[tuple[str, float, float]]:
    """Name, share of the error that is allowed, and seconds of each case."""
    for name in names or cases:
        began = time.perf_counter()
        torch.manual_seed(0)
        yield name, cases[name](), time.perf_counter() - began


def main(names: list[str], cases: dict[str, Check]) -> int:
    wrong = 0
    for name, share, seconds in results(names, cases):
        wrong += not share <= 1
        verdict = "right" if share <= 1 else "WRONG"
        print(f"{verdict}  {share:8.3f} of what is allowed  {seconds:6.1f} s  {name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
