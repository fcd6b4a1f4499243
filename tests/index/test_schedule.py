"""What kernels derive from an index is made once, and anew for other content."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from indices import NAMES, edited, tensor
from oracle import make_inputs, relative_error

from ringtile import build_index, sparse_attention
from ringtile.index import BlockIndex, cache_info, clear_cache, schedule
from ringtile.index.schedule import derived, schedule_of
from ringtile.index.tiles import derive_tables
from ringtile.patterns import Causal, Dilated, GlobalTokens, Pattern, TileGrid, Window

BACKENDS = ["native", "blockwise"]


def own_index(n_tokens: int = 500) -> BlockIndex:
    """An index that no cache holds, so that a test may change it."""
    index = build_index(Causal() & Window(300), n_tokens)
    return edited(index, torch.clone)


class Counted:
    """A function to derive with, and the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, index: BlockIndex, *args: object) -> int:
        self.calls += 1
        return self.calls


def test_a_schedule_is_made_once_for_an_index() -> None:
    index = build_index(Causal(), 300)
    assert schedule_of(index) is schedule_of(replace(index))
    assert schedule_of(index) is schedule_of(index.at(TileGrid(128, 1, 290, 290)))
    assert schedule_of(index) is not schedule_of(index.at(TileGrid(128, 128, 300, 300)))
    assert schedule_of(index) is not schedule_of(replace(index, group=index.group.clone()))


def test_a_key_tells_values_apart() -> None:
    index, make = own_index(), Counted()
    assert [derived(index, make, *key) for key in ((), (7,), (8,), (7,))] == [1, 2, 3, 2]
    assert derived(index, Counted()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_changes_makes_values_anew(name: str) -> None:
    index, make = own_index(), Counted()
    assert [derived(index, make), derived(index, make)] == [1, 1]
    tensor(index, name).add_(0)
    assert [derived(index, make), derived(index, make)] == [2, 2]


def test_nothing_is_kept_of_tensors_that_count_no_changes() -> None:
    index, make = own_index(), Counted()
    with torch.inference_mode():
        index = edited(index, torch.clone, "rows.partial")
    assert [derived(index, make), derived(index, make)] == [1, 2]


def test_an_index_that_is_cut_in_inference_mode_counts_its_changes() -> None:
    index = own_index()
    with torch.inference_mode():
        parts = [index.remapped(torch.arange(2), torch.arange(4)), index.coarsen(128), index.to("meta")]
    assert not any(x.is_inference() for part in parts for x in part.tensors())


def test_only_the_newest_values_are_kept() -> None:
    index, make = own_index(), Counted()
    for key in range(2 * schedule._VALUES):
        derived(index, make, key)
        derived(index, make, "often")
    assert make.calls == 2 * schedule._VALUES + 1
    assert len(schedule._table[index.rows.full_ptr].made) == schedule._VALUES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["rows.full", "rows.partial", "rows.partial_ptr", "group"])
def test_an_index_that_is_changed_after_its_first_use_is_checked_again(name: str, backend: str) -> None:
    index = own_index()
    q, k, v, _ = make_inputs(1, 1, 500)
    q.requires_grad_()
    sparse_attention(q, k, v, index, backend=backend).sum().backward()
    tensor(index, name).fill_(10**8)
    with pytest.raises(ValueError, match=name):
        sparse_attention(q, k, v, index, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_that_is_changed_between_the_passes_is_checked_again(backend: str) -> None:
    index = own_index()
    q, k, v, _ = make_inputs(1, 1, 500)
    q.requires_grad_()
    out = sparse_attention(q, k, v, index, backend=backend)
    index.cols.partial.fill_(10**8)
    with pytest.raises((ValueError, RuntimeError), match=r"cols.partial|modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_that_is_changed_for_good_serves_its_new_pairs(backend: str) -> None:
    index = own_index()
    q, k, v, _ = make_inputs(1, 1, 500)

    def error() -> float:
        out, exact = (sparse_attention(q, k, v, index, backend=name) for name in (backend, "reference"))
        return float((out - exact).abs().max())

    assert error() < 1e-12
    for name, table in derive_tables(index.table.bits & 0x0F0F0F0F)._asdict().items():
        getattr(index.table, name).copy_(table)
    assert error() < 1e-12


# One index of whole tiles serves all lengths that touch the same tiles.


@pytest.mark.parametrize("pattern", [Causal() & Window(300), Causal() & (Window(64) | GlobalTokens(4))], ids=repr)
def test_a_thousand_decoded_tokens_build_few_indices(pattern: Pattern) -> None:
    q, k, v, _ = make_inputs(1, 1, 1, 2000, 16, dtype=torch.float32)
    clear_cache()
    for n_keys in range(1000, 2000):
        sparse_attention(q, k[:, :, :n_keys], v[:, :, :n_keys], pattern, backend="native")
    info = cache_info()
    assert info.misses <= 10
    assert info.hits + info.misses == 1000
    for n_keys in (1000, 1023, 1024, 1025, 1999):
        out, exact = (
            sparse_attention(q, k[:, :, :n_keys], v[:, :, :n_keys], pattern, backend=name)
            for name in ("native", "reference")
        )
        assert relative_error(out, exact) < 2e-6


def test_queries_whose_keys_do_not_exist_change_no_gradient_of_other_keys() -> None:
    q, k, v, grad = make_inputs(1, 1, 64, 100)
    found = []
    for garbage in (0.0, math.nan):
        leaves = [x.clone() for x in (q, k, v)]
        leaves[0][:, :, 40:] = garbage
        leaves = [x.requires_grad_() for x in leaves]
        out = sparse_attention(*leaves, Dilated([60], 1), start=0, backend="native")
        found.append(torch.autograd.grad(out, leaves, grad))
    for clean, poisoned in zip(*(grads[1:] for grads in found), strict=True):
        assert torch.equal(clean[:, :, 64:], poisoned[:, :, 64:])
