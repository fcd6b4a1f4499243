"""Attention over lists of keys by Triton against the oracle, case by case, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/triton_list_cases.py     on the CPU, in the interpreter
    python tests/triton_list_cases.py                        on a GPU: bfloat16, too

Prints as `triton_cases` does.
"""

from __future__ import annotations

import math
import sys
from unittest.mock import patch

import torch
from list_problems import NAMES, Case, Inputs, draw_inputs, draw_lists, expected, kept_pairs, sdpa_errors
from oracle import SDPA_BUDGET, relative_error
from torch import Tensor
from triton_cases import DEVICE, HALVES, INTERPRETED, Check, main

from ringtile import sparse_attention
from ringtile.kernels.contracts import Lists, Rows
from ringtile.kernels.triton import chosen
from ringtile.patterns import Causal, Chosen

SINGLE = Case(1, 6, 2, 4, 70, 80, 40, length=40)
OF_HEADS = Case(2, 4, 2, 4, 50, 20, 24, groups=2)
BLOCKS_OF_4 = Case(1, 3, 1, 4, 69, 16, 16, block=4, length=9)
BLOCKS_OF_16 = Case(2, 4, 2, 4, 70, 7, 9, groups=2, block=16, length=3)
SMALL_BLOCKS = BLOCKS_OF_16._replace(batch=1)
BLOCKS_OF_64 = Case(1, 16, 1, 8, 300, 40, 16, block=64, length=3)
MANY_ROWS = Case(1, 16, 2, 4, 40, 40, 16, length=30)
LATENT = Case(1, 20, 1, 2, 50, 576, 512, length=40)

CASES: dict[str, Check] = {}


def case(function: Check) -> Check:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def computed(inputs: Inputs, lists: Lists, scale: float = 0.3) -> dict[str, Tensor]:
    """Outputs, lse and gradients of the kernels, computed on `DEVICE`. Values can share the memory of keys."""
    q, k, v, out_grad, lse_grad = (x.to(DEVICE) for x in inputs)
    if inputs.v.data_ptr() == inputs.k.data_ptr():
        v = k[..., : v.shape[3]]
    lists = Lists(lists.indices.to(DEVICE), lists.block, lists.limits.to(DEVICE))
    assert not chosen.unsupported(q, k, v, lists, 0.0)
    out, lse = chosen.forward(q, k, v, lists, scale)
    grads = chosen.backward(Rows(out_grad, lse_grad, q, k, v, out, lse), lists, scale)
    assert all(x.is_contiguous() for x in (lse, *grads))
    return {name: x.cpu() for name, x in zip(NAMES, (out, lse, *grads), strict=True)}


def share(problem: Case, dtype: torch.dtype = torch.float32, scale: float = 0.3, **options: bool) -> float:
    """The largest error over what it may be, from random lists."""
    return share_of(draw_inputs(problem, dtype), draw_lists(problem, **options), problem, scale)


def share_of(inputs: Inputs, lists: Lists, problem: Case, scale: float = 0.3) -> float:
    """The largest error over what PyTorch's own attention may have, or infinity if an empty row is not empty."""
    kept = kept_pairs(lists, problem)
    found, wanted = computed(inputs, lists, scale), expected(inputs, kept, scale)
    bounds = sdpa_errors(inputs, kept, scale)
    # Few rows leave a gradient to the luck of its roundings.
    bounds |= dict.fromkeys("qkv", max(bounds[name] for name in "qkv"))
    bounds = {name: max(bound * SDPA_BUDGET[inputs.q.dtype], 3e-7) for name, bound in bounds.items()} | {"lse": 2e-6}
    empty = ~kept.any(3)
    if found["out"][empty].any() or found["q"][empty].any():
        return math.inf
    return max(relative_error(found[name], wanted[name]) / bounds[name] for name in NAMES)


def differ(ours: dict[str, Tensor], theirs: dict[str, Tensor], names: tuple[str, ...] = NAMES) -> float:
    """0 where every bit is the same, else infinity."""
    return 0.0 if all(torch.equal(ours[name], theirs[name]) for name in names) else math.inf


CASES.update(
    {
        "one list for all heads": lambda: share(SINGLE),
        "lists of key heads": lambda: share(OF_HEADS),
        "lists that batch elements share, without limits": lambda: share(OF_HEADS, shared=True, causal=False),
        "blocks of 4": lambda: share(BLOCKS_OF_4),
        "blocks of 16": lambda: share(BLOCKS_OF_16),
        "blocks of 16 that batch elements share": lambda: share(BLOCKS_OF_16, shared=True, causal=False),
        "blocks of 64": lambda: share(BLOCKS_OF_64),
        "blocks of 128": lambda: share(Case(1, 16, 1, 4, 300, 16, 16, block=128, length=2)),
        "a block of all keys": lambda: share(Case(1, 4, 2, 5, 100, 16, 16, block=4096, length=1)),
        "one key": lambda: share(Case(1, 20, 2, 3, 1, 16, 16, length=1)),
        "one query": lambda: share(Case(2, 4, 2, 1, 90, 16, 16, groups=2, length=50)),
        "latent": lambda: share(LATENT),
        "half types": lambda: max(share(x, half) for x in (MANY_ROWS, BLOCKS_OF_64) for half in HALVES),
        "latent in half types": lambda: max(share(LATENT, half) for half in HALVES),
        "scales": lambda: max(
            share(x, scale=scale) for x, scale in ((BLOCKS_OF_4, 0.0), (BLOCKS_OF_4, -0.4), (SMALL_BLOCKS, -0.4))
        ),
    }
)


@case
def rows_whose_scores_are_all_minus_inf() -> float:
    """By products that overflow: some heads of a query, and all heads of another."""
    worst = 0.0
    for problem in (MANY_ROWS, BLOCKS_OF_64):
        inputs, lists = draw_inputs(problem, torch.float32), draw_lists(problem)
        kept, lone = kept_pairs(lists, problem), torch.zeros(inputs.q.shape[:3], dtype=torch.bool)
        lone[:, ::2, 0] = lone[:, :, 3] = True
        inputs.k[..., 0] = inputs.k[..., 0].abs() + 1
        inputs.q[lone] = 0
        wanted = expected(inputs, kept & ~lone[..., None], 0.3)
        inputs.q[..., 0][lone] = -math.inf
        found = computed(inputs, lists)
        if (
            found["out"][lone].any()
            or found["q"][lone].any()
            or not torch.equal(found["lse"].isinf(), wanted["lse"].isinf())
        ):
            return math.inf
        worst = max(worst, *(relative_error(found[name], wanted[name]) / 1e-5 for name in NAMES))
    return worst


@case
def long_lists() -> float:
    """Most of their entries are outside the limits, on both sides."""
    problem = Case(1, 1, 1, 1, 1100, 16, 16, length=1050)
    lists = draw_lists(problem, causal=False)
    lists.limits.copy_(torch.tensor([1020, 1080]).int())
    return share_of(draw_inputs(problem, torch.float32), lists, problem)


@case
def values_that_are_the_first_dims_of_keys() -> float:
    inputs, lists = draw_inputs(LATENT, torch.float32), draw_lists(LATENT)
    keys = inputs._replace(v=inputs.k[..., :512])
    # Others have as many numbers, of other dims.
    others = inputs._replace(v=inputs.k[..., 64:])
    return max(share_of(x, lists, LATENT, 0.1) for x in (keys, others))


@case
def windows_of_queries() -> float:
    from ringtile.kernels.triton import list_launches

    with patch.object(list_launches, "_PART_BYTES", 2 * 4 * 120 * 2 * 40):
        return share(SINGLE)


@case
def an_entry_that_all_queries_list_is_in_pieces() -> float:
    from ringtile.kernels.triton.list_launches import by_entry, split

    lists = draw_lists(BLOCKS_OF_64, causal=False)
    lists.indices.copy_(torch.tensor([0, 2, 4]).int())
    order, bounds = by_entry(lists.indices, 5)
    starts, owner = split(bounds, 5, 5 + order.shape[1] // 5)
    assert starts.tolist() == [[0, 2, 2, 4, 4, 6]]
    assert owner.tolist() == [[0, 0, 2, 2, 4, 4, 5, 5, 5]]
    return share_of(draw_inputs(BLOCKS_OF_64, torch.float32), lists, BLOCKS_OF_64)


@case
def what_nobody_keeps_is_not_read() -> float:
    """Nor do queries that keep nothing reach a gradient of keys."""
    worst = 0.0
    for problem in (SINGLE._replace(heads=3, kv_heads=1), SMALL_BLOCKS):
        inputs, lists = draw_inputs(problem, torch.float32), draw_lists(problem)
        lists.limits.clamp_(max=problem.n_keys - 3)
        kept = kept_pairs(lists, problem)
        used = kept.unflatten(1, (problem.kv_heads, -1)).any(2).any(2)
        clean = computed(inputs, lists)
        for x in (inputs.k, inputs.v):
            x[~used] = math.nan
        for x in (inputs.q, inputs.out_grad, inputs.lse_grad):
            x[~kept.any(3)] = math.nan
        found = computed(inputs, lists)
        assert not used.all()
        assert not kept.any(3).all()
        worst = max(worst, differ(found, clean), math.inf if found["k"][~used].any() else 0.0)
    return worst


@case
def the_rows_of_a_softmax_over_more_keys() -> float:
    """Two lists in turn, with the output and lse of both: their gradients add up."""
    inputs, both = draw_inputs(OF_HEADS, torch.float32), draw_lists(OF_HEADS, causal=False)
    whole = computed(inputs, both)
    q, k, v, out_grad, lse_grad, out, lse = (x.to(DEVICE) for x in (*inputs, whole["out"], whole["lse"]))
    rows, limits = Rows(out_grad, lse_grad, q, k, v, out, lse), both.limits.to(DEVICE)
    parts = [Lists(part.contiguous().to(DEVICE), 1, limits) for part in both.indices.split(10, 3)]
    grads = zip("qkv", *(chosen.backward(rows, part, 0.3) for part in parts), strict=True)
    return max(relative_error((x + y).cpu(), whole[name]) for name, x, y in grads) / 1e-6


@case
def entries_that_lead_nowhere_are_skipped() -> float:
    """Those behind the last key, and those of lists that do not ascend."""
    inputs, worst = draw_inputs(Case(1, 4, 1, 3, 20, 16, 16), torch.float32), 0.0

    def lists(numbers: list[int], block: int) -> Lists:
        limits = torch.tensor([-7, 2**31 - 1]).int().expand(1, 3, 2).contiguous()
        return Lists(torch.tensor(numbers).int().expand(1, 1, 3, -1).contiguous(), block, limits)

    for block in (1, 16):
        near, far = [0, 19 // block, -1, -1], [0, 19 // block, 20, 2**31 - 1]
        worst = max(worst, differ(*(computed(inputs, lists(x, block)) for x in (far, near))))
        computed(inputs, lists(far[::-1], block))
    return worst


@case
def offsets_beyond_32_bits() -> float:
    problem = Case(1, 1, 1, 5, 5, 16, 16, length=5)
    near, lists, apart = draw_inputs(problem, torch.float16), draw_lists(problem, causal=False), 2**31 // 3
    room = torch.empty(5 * apart, dtype=torch.float16, device=DEVICE)
    far = room.as_strided(near.k.shape, (0, 0, apart, 1))
    expected, worst = computed(near, lists), 0.0
    for name in ("q", "k", "v", "out_grad"):
        far.copy_(getattr(near, name))
        worst = max(worst, differ(computed(near._replace(**{name: far}), lists), expected))
    return worst


@case
def twice_the_same_bits() -> float:
    worst = 0.0
    # An interpreter computes one program after another.
    for problem in (BLOCKS_OF_4,) if INTERPRETED else (BLOCKS_OF_4, BLOCKS_OF_16):
        inputs, lists = draw_inputs(problem, torch.float32), draw_lists(problem)
        worst = max(worst, differ(computed(inputs, lists), computed(inputs, lists)))
    return worst


@case
def a_public_call() -> float:
    problem = Case(1, 4, 2, 6, 6, 16, 16, groups=2, length=3)
    inputs, indices = draw_inputs(problem, torch.float32), torch.randint(-1, 6, (1, 2, 6, 3))
    results = []
    for backend, device in (("triton", DEVICE), ("reference", "cpu")):
        leaves = [x.to(device).detach().requires_grad_() for x in inputs[:3]]
        pattern = Causal() & Chosen(indices.to(device))
        out = sparse_attention(*leaves, pattern, enable_gqa=True, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, inputs.out_grad.to(device))])
    return max(relative_error(x.cpu(), y) for x, y in zip(*results, strict=True)) / 2e-6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
