"""Solving a pattern's free parameter for a density."""

from __future__ import annotations

import pytest
import torch

from ringtile.index import Solution, build_index, cache_info, clear_cache, with_density
from ringtile.patterns import (
    Causal,
    Dense,
    Dilated,
    Documents,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Segments,
    Window,
    bigbird,
    longformer,
    streaming,
)


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    clear_cache()


# Every pattern with every target, and with both densities.
@pytest.mark.parametrize(("target", "tiles"), [(0.1, True), (0.25, False), (0.5, True), (0.9, False), (1, True)])
@pytest.mark.parametrize(
    "pattern",
    [
        Causal() & Window(1, 0),
        Causal() & Dilated([1, 2, 4], 1),
        streaming(),
        bigbird(),
        longformer(global_tokens=16),
        Causal() & Documents([3000, 1096, 4096]) & Window(5),
    ],
    ids=repr,
)
def test_density_is_within_two_percent_or_no_size_is_nearer(pattern: Pattern, target: float, tiles: bool) -> None:
    solution = with_density(pattern, target, 8192, tiles=tiles)
    assert cache_info().misses <= 20
    index = build_index(solution.pattern, 8192)
    assert solution.density == (index.tile_density if tiles else index.density)
    error = abs(solution.density - target)
    assert solution.reached == (error <= 0.02 * target)
    assert solution.lowest <= solution.density <= solution.highest
    if not solution.reached:
        # Tiles come a diagonal of 64 at a time, two where keys ahead count; a nearer size would be one more or less.
        diagonals = 64 if pattern.envelope() != Dense() else 128
        assert solution.lowest > target or error <= diagonals / index.allowed_tiles / 2


@pytest.mark.parametrize("n_tokens", [1024, 8192])
def test_no_window_goes_below_one_tile_a_row(n_tokens: int) -> None:
    floor = 2 / (n_tokens // 128 + 1)
    solution = with_density(Causal() & Window(9, 0), floor / 10, n_tokens, tiles=True)
    assert solution == Solution(Causal() & Window(0, 0), floor, False, floor, floor)
    pairs = with_density(Causal() & Window(9, 0), 1e-9, n_tokens)
    assert pairs.density == pairs.lowest == 2 / (n_tokens + 1)


def test_nearest_of_few_reachable_densities() -> None:
    densities = [build_index(Causal() & RandomBlocks(n), 2048).density for n in range(17)]
    for target in (0.05, 0.1, 0.18, 0.3, 0.77, 1.0):
        solution = with_density(Causal() & RandomBlocks(1), target, 2048)
        nearest = min(densities, key=lambda density: abs(density - target))
        assert solution.density == nearest
        assert solution.reached == (abs(nearest - target) <= 0.02 * target)


def test_a_density_out_of_reach_gives_the_densest() -> None:
    solution = with_density(Causal() & Window(3) & Segments(256), 0.5, 2048)
    assert not solution.reached
    assert solution.density == solution.highest == build_index(Causal() & Segments(256), 2048).density
    solution = with_density(RandomBlocks(1) & GlobalTokens(40), 0.5, 2048)
    assert not solution.reached
    assert solution.density == build_index(GlobalTokens(40), 2048).density


def test_lengths_heads_batch_rows_and_block_are_those_asked_for() -> None:
    ids = torch.zeros(2, 3000, dtype=torch.int64)
    ids[1, 700:] = 1
    pattern = Causal() & Documents(ids=ids) & (Window(1) | RandomBlocks(1))
    solution = with_density(pattern, 0.4, 1000, 3000, start=2000, num_heads=3, batch=2, block=64)
    index = build_index(solution.pattern, 1000, 3000, start=2000, num_heads=3, batch=2, block=64)
    assert index.density == solution.density
    assert solution.reached


def test_smallest_size_need_not_be_zero() -> None:
    solution = with_density(Causal() & Segments(64), 0.3, 2000, block=16)
    assert solution.reached
    assert solution.lowest == 2 / 2001


@pytest.mark.parametrize("target", [0, -0.1, 1.01, float("nan"), "0.5", True, None])
def test_densities_outside_0_to_1_are_refused(target: object) -> None:
    with pytest.raises(ValueError, match=r"target: expected a density in \(0, 1\]"):
        with_density(Causal() & Window(1), target, 1024)


def test_patterns_without_a_free_parameter_are_refused() -> None:
    with pytest.raises(ValueError, match="pattern: causal has no free parameter"):
        with_density(Causal(), 0.5, 1024)
    with pytest.raises(ValueError, match="pattern: expected a Pattern or its text, got int"):
        with_density(3, 0.5, 1024)
    assert with_density("causal & window(3)", 0.1, 1024) == with_density(Causal() & Window(3), 0.1, 1024)
    with pytest.raises(ValueError, match="n_queries"):
        with_density(Window(3), 0.5, -1)
