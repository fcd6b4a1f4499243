"""Neighborhoods against `ringtile.testing.oracle`: the rule, orders of tokens, indices and attention."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import relative_error, results, worst
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index import build
from ringtile.patterns import Causal, Neighborhood, TileGrid, parse
from ringtile.testing.oracle import attention, kept_pairs

CASES: list[tuple[Any, ...]] = [
    ([23], [5], [2], [1], [0]),
    ([23], [6], [1], [3], [1]),
    ([9, 14], [3, 5], [1, 2], [1, 1], [0, 0]),
    ([9, 14], [4, 5], [2, 2], [2, 3], [0, 1]),
    ([4, 5, 7], [3, 3, 3], [1, 1, 2], [2, 1, 1], [1, 0, 0]),
    ([20, 17], [7, 7], [1, 1], [1, 1], [0, 0]),
    ([16, 16], [8, 8], [1, 1], [4, 4], [0, 0]),
]

MOVED: tuple[Any, ...] = ([24, 24], [5, 5], [3, 3], [1, 1], [0, 0])
"""A grid whose tokens move to the order of tiles."""


def listed(*case: Any) -> Tensor:
    n = prod(case[0])
    return kept_pairs(Neighborhood(*case), 1, 1, n, n, start=0)[0, 0]


def kept_of(pattern: Neighborhood) -> Tensor:
    token = torch.arange(prod(pattern.size))
    return pattern.allowed(torch.tensor(0), token[:, None], token)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rule_is_the_list_in_any_order_and_any_tiles(case: tuple[Any, ...]) -> None:
    pattern, expected = Neighborhood(*case), listed(*case)
    assert torch.equal(kept_of(pattern), expected)
    assert parse(repr(pattern)) == pattern
    for tile in ([1] * len(case[0]), [2] * len(case[0]), [3, *[1] * (len(case[0]) - 1)], None):
        moved = pattern.in_tiles if tile is None else Neighborhood(*case, tile=tile)
        order = moved.order() if moved.tile else torch.arange(len(expected))
        assert torch.equal(order.sort().values, torch.arange(len(expected)))
        assert torch.equal(kept_of(moved), expected[order][:, order])
        assert parse(repr(moved)) == moved
        for block in (16, 128):
            index = build_index(moved, len(expected), block=block)
            index.validate()
            assert torch.equal(index.to_dense()[0, 0], expected[order][:, order])
            some = build_index(moved, 9, len(expected), start=len(expected) // 2, block=block)
            first = len(expected) // 2
            assert torch.equal(some.to_dense()[0, 0], expected[order[first : first + 9]][:, order])


def test_each_token_keeps_a_full_window() -> None:
    assert (kept_of(Neighborhood([12, 30], [5, 7], [2, 1])).sum(1) == 35).all()
    assert kept_of(Neighborhood([12, 30], 3, causal=1))[0].sum() == 1


def test_tiles_in_the_middle_of_a_grid_share_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = 0
    evaluate = build.evaluate_tiles

    def counted(*arguments: Any) -> Tensor:
        nonlocal evaluated
        evaluated += len(arguments[2])
        return evaluate(*arguments)

    monkeypatch.setattr(build, "evaluate_tiles", counted)
    kept = {}
    for side in (64, 128):
        evaluated = 0
        index = build_index(Neighborhood([side, side], 9, tile=[8, 1]), side * side)
        kept[side] = evaluated, index.kept_tiles
    # Four times as many tiles have as many kinds.
    assert kept[128][1] > 4 * kept[64][1]
    assert kept[128][0] <= kept[64][0] + 8


def test_an_order_of_tiles_needs_fewer_of_them() -> None:
    square = Neighborhood([32, 128], 13)
    assert square.in_tiles.tile_density(4096) < 0.8 * square.tile_density(4096)
    dilated = Neighborhood([64, 64], 5, 8)
    assert dilated.in_tiles.tile_density(4096) <= 0.2 * dilated.tile_density(4096)
    # An order that is no better leaves the tokens where they are.
    assert Neighborhood([300], 7).in_tiles == Neighborhood([300], 7)
    assert Neighborhood([32, 32], 13).in_tiles == Neighborhood([32, 32], 13)


@pytest.mark.parametrize("backend", ["native", "blockwise", "reference"])
@pytest.mark.parametrize("case", [CASES[4], MOVED], ids=str)
def test_attention_is_the_dense_softmax_with_all_gradients(case: tuple[Any, ...], backend: str) -> None:
    pattern, n = Neighborhood(*case), prod(case[0])
    q = torch.randn(2, 4, n, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, n, 8, dtype=torch.float64).unbind()
    ours = partial(sparse_attention, enable_gqa=True, return_lse=True, backend=backend)
    masks = {"key_mask": torch.rand(2, n) < 0.9, "key_lengths": torch.tensor([n // 2, n - 3])}
    for options in (masks, {"dropout_p": 0.3, "seed": 5}):
        found, expected = (results(by, (q, k, v), pattern, **options) for by in (ours, attention))
        assert worst(found, expected) < 1e-12


def test_a_compiled_call_and_tokens_in_tiles_are_the_same_attention() -> None:
    pattern = Neighborhood(*MOVED)
    assert pattern.in_tiles != pattern
    q, k, v = torch.randn(3, 1, 2, 576, 16).unbind()
    out = sparse_attention(q, k, v, pattern)
    # docs/troubleshooting.md says what a graph needs.
    if torch.__version__ >= "2.13":
        attend = torch.compile(lambda *x: sparse_attention(*x, pattern), fullgraph=True, backend="aot_eager")
        assert torch.equal(attend(q, k, v), out)
    order = pattern.order()
    moved = sparse_attention(*(x[:, :, order] for x in (q, k, v)), pattern.in_tiles)
    assert torch.equal(moved, out[:, :, order])


def test_positions_that_matter_stay_those_of_rows() -> None:
    pattern = Neighborhood(*MOVED)
    q, k, v = torch.randn(3, 1, 2, 576, 16, dtype=torch.float64).unbind()
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64)
    for rows, rule, options in (
        (q, pattern, {"alibi_slopes": slopes}),
        (q, pattern, {"is_causal": True}),
        (q, Causal() & pattern, {}),
        (q[:, :, -7:], pattern, {}),
    ):
        expected = attention(rows, k, v, rule, **options)[0]
        assert relative_error(sparse_attention(rows, k, v, rule, **options), expected) < 1e-12


def test_a_grid_and_text_tokens_are_merged() -> None:
    page = (Path(__file__).parents[2] / "docs/patterns/neighborhood.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0].partition("\n\nq, k, v")[0], names)
    kept = torch.ones(581, 581, dtype=torch.bool)
    kept[:576, :576] = listed(*MOVED)
    leaves = torch.randn(3, 1, 2, 581, 8, dtype=torch.float64).unbind()
    for x in leaves:
        x.requires_grad_()
    found, expected = names["attend"](*leaves, Neighborhood(*MOVED), 576), attention(*leaves, kept)[0]
    assert relative_error(found, expected) < 1e-12
    cotangent = torch.randn_like(expected)
    assert worst(*(torch.autograd.grad(x, leaves, cotangent) for x in (found, expected))) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4, 4, 4, 4], 3), "one to three axes"),
        (([8, 8], [3]), "expects a number for each axis of size=.*got window="),
        (([8, 8], 9), "window \\* dilation <= size"),
        (([8, 8], 3, 3), "window \\* dilation <= size"),
        (([8, 8], 3, 1, 4), "stride <= window"),
        (([8, 8], 3, 1, 1, 2), "expects 0 or 1 for each axis"),
        (([8, 8], 3.5), "window"),
        (([8, 8], 3, 1, 1, 0, [8]), "tile"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Neighborhood(*arguments)


def test_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="expects the 64 tokens"):
        Neighborhood([8, 8], 3).validate(TileGrid(128, 0, 64, 65))
    q = torch.randn(1, 1, 60, 8)
    with pytest.raises(ValueError, match="expects the 64 tokens"):
        sparse_attention(q, q, q, Neighborhood([8, 8], 3))
