"""Indices that keep some tiles of others."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from strategies import grids, patterns
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ringtile import sparse_attention
from ringtile.index import BlockIndex, build_index, lists, restrict
from ringtile.index.schedule import schedule_of
from ringtile.kernels import contracts
from ringtile.patterns import Causal, Documents, Pattern, Segments, TileGrid, Window, per_head

HEADS = 2


@pytest.fixture(params=["library", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to copy lists."""
    if request.param == "torch":
        monkeypatch.setattr(restrict, "list_copier", None)


both = pytest.mark.usefixtures("by")


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


@settings(max_examples=70)
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
    with mock.patch.object(restrict, "list_copier", None):
        same = index.restricted_rows(keep) if rows else index.restricted(keep)
    assert all(map(torch.equal, found.tensors(), same.tensors()))
    expected = index.to_dense() & tokens_of(keep, index, rows=rows)
    assert torch.equal(found.to_dense().expand(expected.shape), expected)
    some = torch.randint(grid.n_queries, (5,))
    assert torch.equal(found.keys_of(some).expand(*expected.shape[:2], -1, -1), expected[:, :, some])
    assert found.kept_pairs == int(expected.sum()) * found.group.numel() // (expected.shape[0] * expected.shape[1])
    assert found.allowed_pairs == index.allowed_pairs // index.group.numel() * found.group.numel()
    if density == 1 and keep.shape[:2] == (1, 1):
        assert all(map(torch.equal, found.tensors(), index.tensors()))
    if not rows:
        longest, lists.LONGEST = lists.LONGEST, data.draw(st.sampled_from([1, 64]))
        try:
            check_room(
                index.restricted(keep), index.restricted(keep, count_tiles(found) + data.draw(st.integers(0, 9)))
            )
        finally:
            lists.LONGEST = longest


def count_tiles(index: BlockIndex) -> int:
    return len(index.rows.full) + len(index.rows.partial)


def check_room(plain: BlockIndex, roomy: BlockIndex) -> None:
    """An index with room has the tensors of the one without, and unused ends."""
    roomy.validate()
    fitted = roomy.fitted()
    assert all(map(torch.equal, fitted.tensors(), plain.tensors()))
    assert torch.equal(roomy.to_dense(), plain.to_dense())
    assert (roomy.kept_pairs, roomy.kept_tiles) == (plain.kept_pairs, plain.kept_tiles)


@both
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


# A fixed capacity.


class Methods(TorchFunctionMode):
    """Records the methods that copy a tensor to the host without an operator."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in ("tolist", "numpy", "cpu"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Records the operators and the calls of methods that wait for a device."""

    WAITS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.calls = 0
        self.methods = Methods(self.found)

    def __enter__(self) -> Any:
        self.methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.methods.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        lists_of_indices = [x for x in args[1:2] if name.startswith("index") and isinstance(x, Sequence)]
        if (
            any(word in name for word in self.WAITS)
            or any(x is not None and x.dtype in (torch.bool, torch.uint8) for each in lists_of_indices for x in each)
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self.found.append(name)
        return func(*args, **kwargs)


@both
@pytest.mark.parametrize("pattern", [Causal(), per_head([Causal() & Window(300), Segments(200)])], ids=repr)
def test_a_fixed_capacity_reads_nothing_back(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LONGEST", 2)
    index = build_index(pattern, 700, num_heads=2)
    keep = torch.rand(2, 2, index.n_rows, index.n_cols, generator=torch.Generator().manual_seed(0)) < 0.6
    q, k, v = torch.randn(3, 2, 2, 700, 16, requires_grad=True).unbind()
    index.restricted(keep, 200)
    with Reads() as reads:
        restricted = index.restricted(keep, 200)
        assert not reads.found
        assert reads.calls > 20
        out, lse = sparse_attention(q, k, v, restricted, return_lse=True)
        (out.sum() + lse.sum()).backward()
        schedule_of(restricted)
    assert not reads.found
    with Reads() as reads:
        index.restricted_rows(torch.ones(1, 1, 700, index.n_cols, dtype=torch.bool))
    assert reads.found, "nothing is seen"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_launches_over_a_fixed_capacity_read_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringtile.kernels.triton import launches

    monkeypatch.setattr(lists, "LONGEST", 2)
    base = build_index(Causal(), 700)
    keep = torch.rand(1, 2, base.n_rows, base.n_cols, generator=torch.Generator().manual_seed(0)) < 0.6
    q = torch.randn(1, 2, 700, 16)
    base.restricted(keep, 200)
    with Reads() as reads:
        index = base.restricted(keep, 200)
        call = contracts.Call(start=0, block=index.block, scale=1.0, tiles=index.tensors())
        job = launches.Job(q, q, q, call)
        lse = q.new_empty(1, 2, 700)
        made = [
            *launches.forward_launches(job, q, lse),
            *launches.backward_launches(job, q, None, q, lse, q.clone(), q.clone(), q.clone()),
        ]
    assert not reads.found
    assert len(made) == 7


@both
@pytest.mark.parametrize("backend", ["native", "blockwise", "reference"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_fixed_capacity_changes_no_bit(backend: str, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LONGEST", 3)
    base = build_index(Causal(), 500, 700, block=32)
    keep = torch.rand(2, 2, base.n_rows, base.n_cols, generator=torch.Generator().manual_seed(1)) < 0.5
    plain, roomy = base.restricted(keep), base.restricted(keep, 2000)
    assert min(plain.rows.work[:, 3].max(), plain.cols.work[:, 3].max()) > 0, "no list is split"
    assert len(roomy.rows.full) > len(plain.rows.full)
    assert len(roomy.rows.work) > len(plain.rows.work)
    q = torch.randn(2, 2, 500, 16, requires_grad=True)
    k, v = torch.randn(2, 2, key_heads, 700, 16, requires_grad=True).unbind()
    found = []
    for index in (plain, roomy):
        out, lse = sparse_attention(q, k, v, index, backend=backend, return_lse=True, enable_gqa=True)
        loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()
        found.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@both
def test_an_index_with_room_is_a_base_like_others() -> None:
    index = build_index(per_head([Causal(), Segments(200)]), 700, num_heads=2)
    first, second = torch.rand(2, 3, 2, index.n_rows, index.n_cols, generator=torch.Generator().manual_seed(2)) < 0.6
    plain, roomy = index.restricted(first), index.restricted(first, 999)
    check_room(plain.restricted(second), roomy.restricted(second))
    check_room(plain.restricted(second), roomy.restricted(second, 300))
    rows = torch.rand(3, 2, 700, index.n_cols, generator=torch.Generator().manual_seed(3)) < 0.6
    assert torch.equal(plain.restricted_rows(rows).to_dense(), roomy.restricted_rows(rows).to_dense())
    assert torch.equal(plain.keys_of(torch.tensor([5, 600])), roomy.keys_of(torch.tensor([5, 600])))
    assert plain.draw() == roomy.draw()


@both
def test_more_tiles_than_the_capacity_fail() -> None:
    index = build_index(Causal(), 700)
    keep = torch.ones(1, 2, 6, 6, dtype=torch.bool)
    assert count_tiles(index.restricted(keep, 42).fitted()) == 42
    with pytest.raises(RuntimeError, match="capacity: keep has more than 41 tiles of the index"):
        index.restricted(keep, 41)
    for capacity in (-1, 2.0, True):
        with pytest.raises(ValueError, match="capacity: expected a number of tiles or None"):
            index.restricted(keep, capacity)


@both
def test_the_plain_form_reads_back_once() -> None:
    index = build_index(Causal(), 700)
    keep = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    index.restricted(keep)
    with Reads() as reads:
        index.restricted(keep)
    assert reads.found == ["tolist"]


@both
def test_an_index_that_is_changed_is_checked_again() -> None:
    index = build_index(Causal(), 700).restricted(torch.ones(1, 1, 6, 6, dtype=torch.bool))
    keep = torch.ones(1, 2, 6, 6, dtype=torch.bool)
    restricted = index.restricted(keep)
    for changed in (restricted, index):
        changed.rows.full.fill_(10**8)
    with pytest.raises(ValueError, match=r"rows\.full"):
        index.restricted(keep)
    with pytest.raises(ValueError, match=r"rows\.full"):
        sparse_attention(*torch.randn(3, 1, 2, 700, 16), restricted)
