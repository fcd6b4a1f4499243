"""Parts of a problem: remapped tiles, some of the heads, some of the batch elements. They drop the whole's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import relative_error
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index import BlockIndex
from ringtile.kernels import native
from ringtile.patterns import Causal, GlobalTokens, Pattern, Window, per_head

needs_native = pytest.mark.skipif(bool(native.reason_against()), reason=native.reason_against())
BACKENDS = [pytest.param("native", marks=needs_native), "blockwise", "reference"]

TILED = Causal() & (Window(50) | GlobalTokens(20))
PATTERNS: dict[str, Pattern] = {
    "tiled": TILED,
    "per head": per_head([TILED, Window(30), TILED, Causal()]),
}
DROPOUT: dict[str, Any] = {"dropout_p": 0.4, "seed": 7}
ALIBI: dict[str, Any] = {"alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 0.2])}
TOLERANCE = 1e-12

Tensors = dict[str, Tensor]


def problem(n_queries: int, n_keys: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Return the tensors of a problem by name, with cotangents of both results."""
    shapes = {"q": (4, n_queries, 8), "k": (2, n_keys, 8), "v": (2, n_keys, 5), "do": (4, n_queries, 5)}
    made = {name: torch.randn(2, *shape, dtype=dtype) for name, shape in shapes.items()}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {**made, "dlse": torch.randn(2, 4, n_queries, dtype=wide)}


def results(x: Tensors, served: Pattern | BlockIndex, **options: Any) -> Tensors:
    """Return output, lse and all gradients."""
    leaves = [x[name].detach().clone().requires_grad_() for name in "qkv"]
    out, lse = sparse_attention(*leaves, served, enable_gqa=True, return_lse=True, **options)
    # A query without keys has an lse of -inf.
    grads = torch.autograd.grad([out, torch.where(lse.isinf(), 0, lse)], leaves, [x["do"], x["dlse"]])
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": g for name, g in zip("qkv", grads, strict=True)}}


def tokens(at: Tensor, block: int, first: int, count: int) -> Tensor:
    """Return the positions of a side's tokens. The first of them has place ``first`` in its tile."""
    place = first + torch.arange(count)
    return at[place // block] * block + place % block


def taken(x: Tensor, at: Tensor) -> Tensor:
    """Return the tokens at some places of a tensor ``[B, H, N, ...]``, and NaN where there are none."""
    inside = (at >= 0) & (at < x.shape[2])
    found = x[:, :, at.clamp(0, x.shape[2] - 1)]
    found[:, :, ~inside] = torch.nan
    return found


def part_of(x: Tensors, index: BlockIndex, moved: BlockIndex) -> tuple[Tensors, Tensor, Tensor]:
    """Return the tensors of a remapped index, and the numbers of its queries and keys in the whole."""
    queries = tokens(moved.rows.at, moved.block, moved.start, moved.n_queries) - index.start
    keys = tokens(moved.cols.at, moved.block, 0, moved.n_keys)
    part = {name: taken(x[name], keys if name in "kv" else queries) for name in x}
    # Ghosts keep no keys, so that they have no lse either.
    return {**part, "dlse": part["dlse"].nan_to_num()}, queries, keys


def put(total: Tensor, at: Tensor, values: Tensor) -> None:
    """Add the rows of a part to the whole. Rows outside it must be zero."""
    inside = (at >= 0) & (at < total.shape[2])
    assert not values[:, :, ~inside].any()
    total.index_add_(2, at[inside], values[:, :, inside])


def halves(index: BlockIndex, *, ascending: bool) -> list[BlockIndex]:
    """Return two parts of an index: some rows each, in random order, over the columns that they need and some more."""
    rows = torch.randperm(index.n_rows)
    parts = []
    for chosen in rows.chunk(2):
        needed = index.entries().number
        row = needed // index.n_cols % index.n_rows
        cols = torch.unique(torch.cat([needed[torch.isin(row, chosen)] % index.n_cols, torch.tensor([0])]))
        parts.append(index.remapped(chosen, cols if ascending else cols[torch.randperm(len(cols))]))
    return parts


LENGTHS = [(190, 333, 143), (3, 300, 250), (140, 150, -9)]


@pytest.mark.parametrize(("block", "name"), [(16, "tiled"), (128, "per head")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_remapped_tiles_keep_their_positions(backend: str, block: int, name: str) -> None:
    options = DROPOUT | ALIBI
    for n_queries, n_keys, start in LENGTHS:
        x = problem(n_queries, n_keys)
        index = build_index(PATTERNS[name], n_queries, n_keys, start=start, num_heads=4, block=block)
        whole = results(x, index, backend=backend, **options)
        totals = {name: torch.zeros_like(whole[name]) for name in whole}
        for moved in halves(index, ascending=False):
            part, queries, keys = part_of(x, index, moved)
            found = results(part, moved, backend=backend, **options)
            inside = (queries >= 0) & (queries < n_queries)
            assert (found["lse"][:, :, ~inside] == -torch.inf).all()
            found["lse"] = torch.where(inside[None, None], found["lse"], 0)
            for key, values in found.items():
                put(totals[key], keys if key in ("dk", "dv") else queries, values)
        for key in whole:
            assert relative_error(totals[key], whole[key]) < TOLERANCE, (key, n_queries, n_keys)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 128])
def test_the_native_kernel_gives_the_bits_of_the_whole(block: int, dtype: torch.dtype) -> None:
    n_queries, n_keys, start = LENGTHS[0]
    x = problem(n_queries, n_keys, dtype)
    index = build_index(TILED, n_queries, n_keys, start=start, block=block)
    whole = results(x, index, backend="native", **DROPOUT)
    for moved in halves(index, ascending=True):
        part, queries, _ = part_of(x, index, moved)
        found = results(part, moved, backend="native", **DROPOUT)
        inside = (queries >= 0) & (queries < n_queries)
        for key in ("out", "lse", "dq"):
            assert torch.equal(found[key][:, :, inside], whole[key][:, :, queries[inside]]), key
    # All rows in their order over all columns, at other positions of the buffer: the same gradients of the keys.
    everything = torch.arange(index.n_rows), torch.arange(index.n_cols)
    found = results(x, index.remapped(*everything), backend="native", **DROPOUT)
    assert all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("served", ["text", "index"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_some_heads_and_batch_elements_drop_their_weights(backend: str, served: str) -> None:
    x = problem(200, 230)
    index = TILED if served == "text" else build_index(TILED, 200, 230, block=16)
    whole = results(x, index, backend=backend, **DROPOUT)
    numbers = {"head_at": torch.tensor([2, 3], dtype=torch.int32), "batch_at": torch.tensor([1])}
    share = {"q": slice(2, 4), "k": slice(1, 2), "v": slice(1, 2), "do": slice(2, 4), "dlse": slice(2, 4)}
    for names, batch in ((("head_at",), slice(None)), (("batch_at",), slice(1, 2)), (tuple(numbers), slice(1, 2))):
        heads = share if "head_at" in names else dict.fromkeys(share, slice(None))
        part = {name: tensor[batch, heads[name]] for name, tensor in x.items()}
        given = {name: numbers[name] for name in names}
        found = results(part, index, backend=backend, **DROPOUT, **given)
        for key in whole:
            wanted = whole[key][batch, heads[{"out": "do", "lse": "dlse"}.get(key, key[1:])]]
            if backend == "native":
                assert torch.equal(found[key], wanted), (key, names)
            assert relative_error(found[key], wanted) < TOLERANCE, (key, names)
        without = sparse_attention(*(part[name] for name in "qkv"), index, enable_gqa=True, backend=backend, **DROPOUT)
        assert not torch.equal(without, found["out"])


@pytest.mark.parametrize("options", [DROPOUT, ALIBI], ids=["dropout", "alibi"])
def test_second_derivatives_of_a_part(options: dict[str, Any]) -> None:
    index = build_index(TILED, 150, block=16)
    moved = index.remapped(torch.tensor([8, 2, 5]), torch.tensor([5, 0, 8, 7, 1, 6, 2, 4, 3]))
    x, _, _ = part_of(problem(150, 150), index, moved)
    numbers = {"head_at": torch.tensor([6, 1, 9, 3]), "batch_at": torch.tensor([4, 0])}

    def second(backend: str | None, served: BlockIndex, **given: Any) -> list[Tensor]:
        leaves = [x[name].detach().clone().requires_grad_() for name in "qkv"]
        out = sparse_attention(*leaves, served, enable_gqa=True, backend=backend, **options, **given)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves))

    for served, given in ((moved, {}), (moved, numbers)):
        found, wanted = second(None, served, **given), second("reference", served, **given)
        assert max(map(relative_error, found, wanted)) < TOLERANCE


def test_numbers_are_words() -> None:
    """The counter has 32 bits for each of them: every backend takes the lowest ones."""
    x = problem(70, 70)
    near = {"head_at": torch.tensor([6, 1, 9, 2**31]), "batch_at": torch.tensor([2**32 - 4, 0])}
    far = {"head_at": near["head_at"] + 2**32, "batch_at": torch.tensor([-4, 2**40])}
    expected = results(x, TILED, backend="reference", **DROPOUT, **near)
    for backend in ("native", "blockwise", "reference"):
        if backend == "native" and native.reason_against():
            continue
        for numbers in (near, far):
            found = results(x, TILED, backend=backend, **DROPOUT, **numbers)
            assert max(relative_error(found[key], expected[key]) for key in found) < TOLERANCE


def test_numbers_that_do_not_match() -> None:
    x = problem(70, 70)
    for numbers, words in (
        ({"head_at": torch.arange(2)}, r"head_at: expected shape \(4,\)"),
        ({"batch_at": torch.arange(4)}, r"batch_at: expected shape \(2,\)"),
        ({"head_at": torch.ones(4)}, "head_at: expected int32 or int64, got numbers.dtype=torch.float32"),
        ({"batch_at": torch.ones(2, dtype=torch.bool)}, "batch_at: expected int32 or int64"),
    ):
        with pytest.raises(ValueError, match=words):
            sparse_attention(x["q"], x["k"], x["v"], enable_gqa=True, **DROPOUT, **numbers)
