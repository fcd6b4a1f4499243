"""Keys that cross between nodes once: results of one process, messages of both levels, and bytes between nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import relative_error
from ranks import on_ranks
from test_distributed import LAYOUTS, N_TOKENS, PATTERNS, attend_apart, expected_of_named, split_results
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

NODES = ((2, 2), (2, 4), (4, 2), (3, 1), (1, 3))


@pytest.mark.parametrize(
    ("name", "layout", "nodes"),
    [
        (name, layout, NODES[(row + column) % 5])
        for row, name in enumerate(PATTERNS)
        for column, layout in enumerate(["contiguous", "striped", "equal zigzag"])
    ],
)
def test_nodes_give_the_bits_of_one_process(name: str, layout: str, nodes: tuple[int, int]) -> None:
    problem, grad_lse, whole, exact = expected_of_named(name)
    made = LAYOUTS[layout](N_TOKENS, nodes[0] * nodes[1])

    def run(rank: int) -> list[dict[str, Tensor]]:
        options: dict[str, Any] = {"transport": "hierarchy", "group": init_device_mesh("cpu", nodes)}
        hows = ({**options, "overlap": overlap} for overlap in (True, False, True))
        return [attend_apart(problem, grad_lse, PATTERNS[name], made, rank, **how) for how in hows]

    results, *others = (split_results(made, list(found)) for found in zip(*on_ranks(made.n_ranks, run), strict=True))
    for name in ("out", "lse", "q") if layout != "equal zigzag" else ():
        assert torch.equal(results[name], whole[name]), name
    for name, x in results.items():
        assert relative_error(x, exact[name]) < 1e-12, name
        assert all(torch.equal(x, found[name]) for found in others), name
