"""Dropout masks: the specification in plain integers, the two forms against each other, and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from ringtile.kernels import philox
from ringtile.kernels.philox import dropout_keep, dropout_scale, dropout_threshold, dropout_tile
from ringtile.testing import oracle


def specified_bits(seed: int, batch: int, head: int, query: int, key: int) -> int:
    """The 16 bits of one pair, as the design states them."""
    counter = positions((key // 32) * 4 + (key // 2) % 4, query, head, batch)
    words = oracle._philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), 7)
    return int(words[(key // 8) % 4]) >> 16 * (key % 2) & 0xFFFF


def positions(*values: int) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    batch=st.integers(0, 1000),
    head=st.integers(0, 1000),
    query=st.integers(-(2**20), 2**31),
    key=st.integers(0, 2**31),
    p=st.floats(0, 0.99),
)
def test_keep_follows_the_specification(seed, batch, head, query, key, p):
    keys = torch.arange(key, key + 40)
    for form in (seed, torch.tensor([seed])):
        kept = dropout_keep(form, *positions(batch, head, query), keys, p)
        bits = [specified_bits(seed, batch, head, query, k) for k in keys.tolist()]
        assert kept.tolist() == [b >= round(65536 * p) for b in bits]


def test_a_pair_is_kept_up_to_its_own_bits_and_no_further():
    for key in range(32):
        bits = specified_bits(5, 0, 0, 3, key)
        for p, expected in ((bits / 65536, True), ((bits + 1) / 65536, False)):
            assert bool(dropout_keep(5, *positions(0, 0, 3, key), p)) is expected
            tile = dropout_tile(5, *positions(0, 0), torch.tensor([3]), torch.tensor([0]), 32, p)
            assert bool(tile[0, key]) is expected


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    lead=st.sampled_from([(), (1,), (3,), (2, 3)]),
    m=st.integers(0, 5),
    t=st.integers(0, 3),
    n_keys=st.sampled_from([16, 32, 64, 128]),
    p=st.floats(0, 0.99),
)
def test_tile_gives_the_bits_of_keep(seed, lead, m, t, n_keys, p):
    query = torch.randint(-(2**31), 2**31, (*lead, m))
    first = torch.randint(0, 2**20, (*lead[1:], t)) * min(n_keys, 32)
    batch, head = torch.randint(0, 9, lead), torch.randint(0, 9, lead[:1] + (1,) * (len(lead) - 1))
    tile = dropout_tile(torch.tensor([seed]), batch, head, query, first, n_keys, p)
    key = (first[..., None] + torch.arange(n_keys)).flatten(-2)
    expected = dropout_keep(seed, batch[..., None, None], head[..., None, None], query[..., None], key[..., None, :], p)
    assert tile.dtype == torch.bool
    assert torch.equal(tile, expected.expand(*lead, m, t * n_keys))


def test_tile_calls_philox_once_for_eight_keys(monkeypatch):
    calls = []

    def counted(counter, key, rounds):
        calls.append(torch.broadcast_shapes(*(c.shape for c in counter)).numel())
        return original(counter, key, rounds)

    original = philox.philox4x32
    monkeypatch.setattr(philox, "philox4x32", counted)
    keep = dropout_tile(1, *positions(0, 0), torch.arange(128), torch.tensor([0, 128]), 128, 0.1)
    assert sum(calls) * 8 == keep.numel()


def grid(seed: int, p: float, batches: int = 1, heads: int = 1, queries: int = 512, keys: int = 512) -> Tensor:
    lead = torch.zeros(batches, heads, dtype=torch.int64)
    batch, head = lead + torch.arange(batches)[:, None], lead + torch.arange(heads)
    return dropout_tile(seed, batch, head, torch.arange(queries), torch.arange(0, keys, 64), 64, p)


@pytest.mark.parametrize("p", [0.003, 0.1, 0.5, 0.9])
def test_rate(p):
    kept = grid(11, p)
    rate = 1 - dropout_threshold(p) / 65536
    sigma = math.sqrt(rate * (1 - rate) / kept.numel())
    assert abs(kept.double().mean().item() - rate) < 4 * sigma
    # Rows, and keys taken modulo 32, exercise every word and half apart.
    by_place = kept.view(512, 16, 32).double().mean((0, 1))
    assert (by_place - rate).abs().max() < 5 * sigma * math.sqrt(32)
    assert (kept.double().mean(-1) - rate).abs().max() < 5 * sigma * math.sqrt(512)


@pytest.mark.parametrize("p", [0.1, 0.25, 1 / 3, 0.9])
def test_scale_restores_the_mean_exactly(p):
    kept = 65536 - dropout_threshold(p)
    assert dropout_scale(p) * kept == pytest.approx(65536, rel=1e-15)
    assert kept == 65536 - round(65536 * p)


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan, 1 - 2**-18])
def test_impossible_probabilities_are_refused(p):
    with pytest.raises(ValueError, match=r"dropout_p: expected a probability"):
        dropout_tile(0, *positions(0, 0), torch.arange(2), torch.tensor([0]), 32, p)


@pytest.mark.parametrize("n_keys", [0, -32, 8, 24, 48])
def test_ragged_tiles_are_refused(n_keys):
    with pytest.raises(ValueError, match=rf"n_keys: expected .* got {n_keys}"):
        dropout_tile(0, *positions(0, 0), torch.arange(2), torch.tensor([0]), n_keys, 0.5)
