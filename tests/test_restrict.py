"""Indices that keep some tiles of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import grids, patterns
from torch import Tensor

from ringtile.layout import BlockIndex, build_index
from ringtile.layout.index import TENSOR_FIELDS
from ringtile.patterns import Causal, Documents, Pattern, Segments, TileGrid, Window, per_head

HEADS = 2


def tokens_of(keep: Tensor, index: BlockIndex, *, rows: bool) -> Tensor:
    """The kept tiles as bool ``[.., .., n_queries, n_keys]``."""
    grid = index.grid
    keys = torch.arange(grid.n_keys) // grid.block
    queries = torch.arange(grid.start, grid.start + grid.n_queries) // grid.block - grid.first_row
    by_key = keep[..., keys]
    return by_key if rows else by_key[:, :, queries]


@st.composite
def bases(draw: st.DrawFn) -> tuple[Pattern, TileGrid]:
    grid = draw(grids())
    return draw(patterns(grid, heads=True)), grid


@settings(max_examples=200)
@given(base=bases(), rows=st.booleans(), data=st.data())
def test_a_restricted_index_keeps_the_pairs_of_both(base: tuple[Pattern, TileGrid], rows: bool, data: Any) -> None:
    pattern, grid = base
    sizes = {"num_heads": HEADS, "batch": pattern.batch_size or 1, "block": grid.block}
    index = build_index(pattern, grid.n_queries, grid.n_keys, start=grid.start, **sizes)
    batch = data.draw(st.sampled_from([1, 3])) if index.group.shape[0] == 1 else index.group.shape[0]
    shape = (batch, data.draw(st.sampled_from([1, HEADS])), grid.n_queries if rows else grid.n_rows, grid.n_cols)
    density, seed = data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), data.draw(st.integers(0, 99))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    found = index.restricted_rows(keep) if rows else index.restricted(keep)
    found.validate()
    expected = index.to_dense() & tokens_of(keep, index, rows=rows)
    assert torch.equal(found.to_dense().expand(expected.shape), expected)
    some = torch.randint(grid.n_queries, (5,))
    assert torch.equal(found.keys_of(some).expand(*expected.shape[:2], -1, -1), expected[:, :, some])
    assert found.kept_pairs == int(expected.sum()) * found.group.numel() // (expected.shape[0] * expected.shape[1])
    assert found.allowed_pairs == index.allowed_pairs // index.group.numel() * found.group.numel()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("pattern", [Causal() & Window(300), per_head([Causal(), Segments(100)])], ids=repr)
def test_all_tiles_give_the_tensors_of_the_base(pattern: Pattern, rows: bool) -> None:
    index = build_index(pattern, 700, num_heads=2)
    keep = torch.ones(1, 1, 700 if rows else index.n_rows, index.n_cols, dtype=torch.bool)
    found = index.restricted_rows(keep) if rows else index.restricted(keep)
    for name in TENSOR_FIELDS:
        assert torch.equal(getattr(found, name), getattr(index, name))


def test_documents_of_batch_elements_stay_theirs() -> None:
    ids = torch.tensor([[0] * 150 + [1] * 150, [0] * 20 + [1] * 280])
    index = build_index(Causal() & Documents(ids=ids), 300, batch=2)
    keep = torch.rand(2, 4, 3, 3) < 0.5
    found = index.restricted(keep)
    assert torch.equal(found.to_dense(), index.to_dense() & tokens_of(keep, index, rows=False))
    assert found.density <= index.density
    assert found.allowed_pairs == 4 * index.allowed_pairs


def test_masks_that_do_not_match_are_refused() -> None:
    index = build_index(Causal(), 300, num_heads=2)
    for keep in (torch.ones(1, 1, 3, 4, dtype=torch.bool), torch.ones(1, 1, 3, 3), torch.ones(3, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"keep: expected bool \[B or 1, H or 1, 3, 3\]"):
            index.restricted(keep)
    with pytest.raises(ValueError, match=r"keep: expected bool \[B or 1, H or 1, 300, 3\]"):
        index.restricted_rows(torch.ones(1, 1, 3, 3, dtype=torch.bool))
    per_head_index = build_index(per_head([Causal(), Window(3)]), 300, num_heads=2)
    with pytest.raises(ValueError, match=r"for \(1, 2\) batch elements and heads"):
        per_head_index.restricted(torch.ones(1, 3, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="queries: expected int64"):
        index.keys_of(torch.tensor([300]))
