"""Attention over ranks against one process: bits of the output and of the query's gradient, traffic, plans."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from oracle import Inputs, make_inputs, oracle, relative_error
from ranks import on_ranks
from torch import Tensor

from ringtile.distributed import Layout, ring_attention
from ringtile.functional import sparse_attention
from ringtile.patterns import (
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Segments,
    Strided,
    Window,
    per_head,
)

N_TOKENS = 700
CAUSAL = Causal()
PATTERNS = {
    "window": CAUSAL & Window(200),
    "both sides": Window(100, 170),
    "global tokens": Window(60) | GlobalTokens(40),
    "causal": CAUSAL,
    "dense": Dense(),
    "dilated": CAUSAL & Dilated([1, 4, 16], 20),
    "random": CAUSAL & (Window(50) | RandomBlocks(2)),
    "strided": CAUSAL & Strided(64),
    "documents": CAUSAL & Documents([300, 3, 200, 197]),
    "segments": CAUSAL & (Segments(256, 2) | Segments(512, 4)),
    "per head": per_head([CAUSAL & Window(100), CAUSAL, CAUSAL & GlobalTokens(5), Window(50)]),
    "empty rows": CAUSAL & ~Window(250),
    "a rule": Elements(lambda head, query, key: (query * 7 + key * 3) % 5 < 2),
    "blocks": Blocks(torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.4),
}
LAYOUTS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "equal": lambda n, ranks: Layout.contiguous(n, ranks, unit=1),
    "equal zigzag": lambda n, ranks: Layout.zigzag(n, ranks, unit=1),
}


def split_results(layout: Layout, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: layout.unshard([results[name] for results in found]) for name in found[0]}


def attend_apart(
    problem: Inputs, grad_lse: Tensor, pattern: Pattern, layout: Layout, rank: int, **options: Any
) -> dict[str, Tensor]:
    """One rank's output, lse and gradients."""
    q, k, v, grad_out = (layout.shard(x, rank).clone() for x in problem)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for name in ("key_mask",):
        if name in options:
            options[name] = layout.shard(options[name], rank, 1)
    out, lse = ring_attention(*leaves, pattern, layout=layout, enable_gqa=True, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out, layout.shard(grad_lse, rank)))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip("qkv", grads, strict=True))}


def attend_whole(problem: Inputs, grad_lse: Tensor, pattern: Pattern, **options: Any) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    out, lse = sparse_attention(*leaves, pattern, start=0, enable_gqa=True, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), leaves, (problem.grad_out, grad_lse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip("qkv", grads, strict=True))}


class Expected(NamedTuple):
    problem: Inputs
    grad_lse: Tensor
    whole: dict[str, Tensor]
    """Results of one process."""
    exact: dict[str, Tensor]
    """Results in float64."""


def expected_of(pattern: Pattern, problem: Inputs, **options: Any) -> Expected:
    grad_lse = torch.randn(problem.q.shape[:3], dtype=torch.float64)
    whole = attend_whole(problem, grad_lse, pattern, **options)
    exact = oracle(*problem[:3], pattern, grad_out=problem.grad_out, grad_lse=grad_lse, start=0, **options)
    return Expected(problem, grad_lse, whole, {"out": exact.out, "lse": exact.lse, **exact.grads})


@cache
def expected_of_named(name: str) -> Expected:
    return expected_of(PATTERNS[name], make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=2, value_dim=4))


def check_ranks(pattern: Pattern, layout: Layout, expected: Expected, **options: Any) -> None:
    """All results against float64 and against one process, with and without overlap."""
    problem, grad_lse, whole, exact = expected
    found = on_ranks(layout.n_ranks, lambda rank: attend_apart(problem, grad_lse, pattern, layout, rank, **options))
    results = split_results(layout, found)
    # A part of a tile can have so few queries that another kernel computes it.
    whole_tiles = all(begin % 128 == 0 and end % 128 in (0, layout.n_tokens % 128) for begin, end in layout.runs[0])
    for name in ("out", "lse", "q") if whole_tiles else ():
        assert torch.equal(results[name], whole[name]), name
    for name, x in results.items():
        assert relative_error(x, exact[name]) < 1e-12, name
    again = on_ranks(
        layout.n_ranks, lambda rank: attend_apart(problem, grad_lse, pattern, layout, rank, overlap=False, **options)
    )
    for name, x in split_results(layout, again).items():
        assert torch.equal(x, results[name]), name


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_give_the_bits_of_one_process(name: str, layout: str, n_ranks: int) -> None:
    check_ranks(PATTERNS[name], LAYOUTS[layout](N_TOKENS, n_ranks), expected_of_named(name))


@pytest.mark.parametrize("layout", ["zigzag", "equal"])
@pytest.mark.parametrize("n_tokens", [1, 100, 300, 513])
def test_more_ranks_than_tiles(n_tokens: int, layout: str) -> None:
    pattern = CAUSAL & (Window(90) | GlobalTokens(3))
    expected = expected_of(pattern, make_inputs(2, 2, n_tokens, head_dim=8))
    check_ranks(pattern, LAYOUTS[layout](n_tokens, 8), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_lengths_reach_the_ranks_that_need_them(layout: str) -> None:
    pattern, lengths = CAUSAL & (Window(150) | GlobalTokens(40)), torch.tensor([N_TOKENS, 0, 450])
    mask = torch.rand(3, N_TOKENS) < 0.8
    problem = make_inputs(3, 2, N_TOKENS, head_dim=8)
    for options in ({"key_mask": mask}, {"key_lengths": lengths}, {"key_mask": mask, "key_lengths": lengths}):
        expected = expected_of(pattern, problem, **options)
        check_ranks(pattern, LAYOUTS[layout](N_TOKENS, 5), expected, **options)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"scale": 0.3}], ids=str)
def test_options_that_need_no_exchange(options: dict[str, Any]) -> None:
    pattern = CAUSAL & Window(150)
    expected = expected_of(pattern, make_inputs(1, 2, 300, head_dim=8), **options)
    check_ranks(pattern, Layout.zigzag(300, 2), expected, **options)
