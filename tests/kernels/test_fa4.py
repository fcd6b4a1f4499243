"""FlashAttention 4's block-sparse kernels as a backend. A stand-in reads the same lists and computes in float64."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from indices import edited
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.cli import main
from ringtile.index import BlockIndex
from ringtile.kernels import fa4
from ringtile.kernels.select import backend_report
from ringtile.patterns import (
    BlockDilated,
    Causal,
    Dense,
    Documents,
    GlobalTokens,
    Pattern,
    Segments,
    Window,
)

ROOT = Path(__file__).parents[2]
CLOSE = 2**-9
"""Relative to the largest value, in float16: the stand-in computes in float64, so only the rounding of inputs to the
backward pass and of its results is left."""


class Tensors(NamedTuple):
    """`BlockSparseTensorsTorch`, of which only these are set."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def kept_by(
    lists: Tensors, mask_mod: Any, aux_tensors: Any, shape: tuple[int, int, int, int], by_key: bool, generation: int
) -> Tensor:
    """The pairs ``[B, H, Nq, Nk]`` of lists per query block, or per key block, checked as the package checks them."""
    batch, heads, n_queries, n_keys = shape
    assert lists.block_size == ((256, 128) if generation == 10 else (128, 128))
    high, wide = lists.block_size
    rows, cols = -(-n_queries // high), -(-n_keys // wide)
    owners, others = (cols, rows) if by_key else (rows, cols)
    kept = torch.zeros(batch, heads, rows * high, cols * wide, dtype=torch.bool)
    seen = torch.zeros(batch, heads, rows, cols, dtype=torch.int32)
    for is_full in (False, True):
        counts, numbers = lists[2:4] if is_full else lists[:2]
        assert counts.dtype == numbers.dtype == torch.int32
        assert counts.stride(-1) == numbers.stride(-1) == 1
        assert counts.shape[2:] == (owners,)
        assert numbers.shape[2] == owners
        assert 0 < numbers.shape[3] <= others
        assert all(x.shape[0] in (1, batch) and x.shape[1] in (1, heads) for x in (counts, numbers))
        counts, numbers = counts.expand(batch, heads, -1), numbers.expand(batch, heads, -1, -1)
        for b, h, owner in torch.cartesian_prod(*map(torch.arange, (batch, heads, owners))).tolist():
            chosen = numbers[b, h, owner, : counts[b, h, owner]].tolist()
            # The kernels cut keys beyond the lengths only in the last tile of each list.
            assert chosen == sorted(set(chosen))
            for other in chosen:
                row, col = (other, owner) if by_key else (owner, other)
                seen[b, h, row, col] += 1
                tile = slice(row * high, (row + 1) * high), slice(col * wide, (col + 1) * wide)
                if not is_full:
                    i = torch.arange(row * high, (row + 1) * high).unsqueeze(1)
                    j = torch.arange(col * wide, (col + 1) * wide)
                    place = ((torch.tensor(b),), (torch.tensor(h),), (i,), (j,))
                    (kept[b, h][tile],) = mask_mod(*place, None, aux_tensors)
                    assert kept[b, h, :n_queries, :n_keys][tile].any(), "a tile without pairs is in a list"
                else:
                    kept[b, h][tile] = True
    assert seen.max() <= 1
    return kept[:, :, :n_queries, :n_keys]


class StandIn:
    """`flash_attn.cute.interface`, in float64. Attributes make it wrong."""

    BlockSparseTensorsTorch = Tensors

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.calls: list[str] = []
        self.wrong: dict[str, Callable[[Tensor], Tensor]] = {}

    def right(self, name: str, x: Tensor) -> Tensor:
        return self.wrong.get(name, lambda x: x)(x)

    def scores(self, q: Tensor, k: Tensor, scale: float, by_key: bool, **options: Any) -> Tensor:
        for x in (q, k):
            assert x.dtype in (torch.float16, torch.bfloat16)
            assert x.stride(-1) == 1
            assert x.shape[-1] % 8 == 0
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        lists = options.pop("block_sparse_tensors")
        self.calls.append(f"{'backward' if by_key else 'forward'}{' with bits' if options else ''}")
        kept = kept_by(lists, *map(options.get, ("mask_mod", "aux_tensors")), shape, by_key, self.generation)
        kept = self.right("kept", kept)
        return (self.wide(q, q) @ self.wide(k, q).mT * self.right("scale", scale)).masked_fill(~kept, -math.inf)

    @staticmethod
    def wide(x: Tensor, q: Tensor) -> Tensor:
        return x.double().transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1)

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, return_lse, pack_gqa, **options):
        assert return_lse
        assert pack_gqa is False
        scores = self.scores(q, k, softmax_scale, False, **options)
        out = (scores.softmax(-1).nan_to_num() @ self.wide(v, q)).to(q.dtype).transpose(1, 2).contiguous()
        return self.right("out", out), self.right("lse", scores.logsumexp(-1).float()), None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, softmax_scale, dlse, **options):
        assert lse.is_contiguous()
        assert dlse.is_contiguous()
        assert lse.dtype == dlse.dtype == torch.float32
        assert dout.stride(-1) == out.stride(-1) == 1
        lse, dlse = self.right("given lse", lse), self.right("lse_grad", dlse)
        scores = self.scores(q, k, softmax_scale, True, **options)
        lse = scores.logsumexp(-1) if lse is None else lse
        p = (scores - lse.double().nan_to_num(neginf=0).unsqueeze(-1)).exp()
        grad = self.wide(dout, q)
        delta = (grad * self.wide(out, q)).sum(-1) - dlse
        ds = p * (grad @ self.wide(v, q).mT - delta.unsqueeze(-1)) * softmax_scale
        sums = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (ds.mT @ self.wide(q, q), p.mT @ grad))
        grads = zip(("q_grad", "k_grad", "v_grad"), (ds @ self.wide(k, q), *sums), strict=True)
        return tuple(self.right(name, x.transpose(1, 2).to(q.dtype)) for name, x in grads)


@pytest.fixture(params=[9, 10])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The CPU in place of a GPU of either generation, and the stand-in in place of the package."""
    module = StandIn(request.param)
    monkeypatch.setattr(fa4, "DEVICE", "cpu")
    monkeypatch.setattr(fa4, "_generation", lambda device: module.generation)
    monkeypatch.setattr(fa4, "_package_reason", lambda: "")
    monkeypatch.setattr(fa4, "kernels", lambda: (module, fa4.keeps))
    proof = fa4.proof
    proof.cache_clear()
    yield module
    proof.cache_clear()


def tensors(
    n: int, m: int, heads: int = 4, key_heads: int = 2, dims: tuple[int, int] = (20, 12), dtype: Any = torch.float16
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads, n, dims[0]), (2, key_heads, m, dims[0]), (2, key_heads, m, dims[1])
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    x, y = found.double(), expected.double()
    off = (x - y).masked_fill(x == y, 0).abs().max()
    assert off <= CLOSE * y.masked_fill(y.isinf(), 0).abs().max(), (name, off)


def results(backend: str, inputs: list[Tensor], pattern: Any, **options: Any) -> list[Tensor]:
    out, lse = sparse_attention(*inputs, pattern, enable_gqa=True, return_lse=True, backend=backend, **options)
    loss = (out.double() * torch.linspace(-1, 1, out.shape[-1])).sum()
    loss = loss + (lse.double().masked_fill(lse.isinf(), 0) * torch.linspace(0, 1, lse.shape[-1])).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


def assert_same(inputs: list[Tensor], pattern: Any, **options: Any) -> None:
    pairs = zip(*(results(backend, inputs, pattern, **options) for backend in ("fa4", "reference")), strict=True)
    for name, (found, expected) in zip(("out", "lse", "q_grad", "k_grad", "v_grad"), pairs, strict=True):
        assert_close(found, expected, name)


IDS = torch.rand(2, 384, generator=torch.Generator().manual_seed(1)).mul(3).int().sort(1).values
PER_HEAD = torch.rand(2, 4, 2, 3, generator=torch.Generator().manual_seed(1)) < 0.5

PATTERNS: dict[str, tuple[int, int, Pattern]] = {
    "dense": (300, 333, Dense()),
    "causal": (300, 300, Causal()),
    "window": (257, 385, Window(140, 9)),
    "one query": (1, 129, Causal()),
    "one key": (140, 1, Dense()),
    "whole tiles": (256, 512, BlockDilated((2,), 2)),
    "per head": (384, 384, Segments(100, 3)),
    "rows of a batch": (384, 384, Documents(ids=IDS) & Segments(150, 2)),
    "empty rows": (300, 300, Causal() & Window(40) & ~Window(2)),
    "keys of queries that are not there": (300, 333, Causal()),
    "later queries": (200, 456, Causal() & (Window(90) | GlobalTokens(5))),
}


def start_of(n: int, m: int) -> int:
    return 0 if (m - n) % 128 else m - n


@pytest.mark.parametrize(("n", "m", "pattern"), PATTERNS.values(), ids=PATTERNS)
def test_lists_of_both_directions_are_the_index(n: int, m: int, pattern: Pattern, stand_in: StandIn) -> None:
    for block in (128, 32):
        index = build_index(pattern, n, m, start=start_of(n, m), num_heads=4, batch=2, block=block)
        assert_lists_are(index, stand_in)


def assert_lists_are(index: BlockIndex, stand_in: StandIn) -> None:
    tiles = fa4.tiles_of(index)
    shape = 2, 4, index.n_queries, index.n_keys
    expected = index.to_dense().expand(shape)
    for lists, by_key in ((tiles.rows, False), (tiles.cols, True)):
        options = fa4._options(tiles, lists, torch.empty(shape[:3]), 1.0)
        how = options["block_sparse_tensors"], options.get("mask_mod"), options.get("aux_tensors")
        assert torch.equal(kept_by(*how, shape, by_key, stand_in.generation), expected)
    for found, dim in ((tiles.queries, 3), (tiles.keys, 2)):
        some = expected.any(dim)
        assert some.all() if found is None else torch.equal(found.expand_as(some), some)


def test_lists_of_indices_made_of_others(stand_in: StandIn) -> None:
    base = build_index(Causal() & Window(200), 500, num_heads=4)
    keep = torch.rand(1, 4, base.n_rows, base.n_cols, generator=torch.Generator().manual_seed(0)) < 0.5
    roomy = base.restricted(keep, capacity=60)
    assert len(roomy.rows.partial) > int(roomy.rows.partial_ptr[-1])
    small = build_index(Causal(), 512, block=64).remapped(torch.tensor([6, 2, 1]), torch.arange(8).flip(0))
    moved = build_index(Causal(), 512).remapped(torch.tensor([2, 0]), torch.tensor([3, 0, 2, 1]))
    none = base.restricted(torch.zeros_like(keep))
    for index in (base.restricted(keep), roomy, moved, none):
        assert_lists_are(index, stand_in)
    # Rows [384, 448), [128, 192) and [64, 128): the first begins at a multiple of 128, and so do all of its places.
    assert small.start % 128 == 0
    assert_lists_are(small, stand_in)


def test_lists_follow_a_change_in_place(stand_in: StandIn) -> None:
    index = build_index(Window(9), 300)
    index = edited(index, torch.clone, "table.bits")
    assert_lists_are(index, stand_in)
    index.table.bits[:, 3] = 0
    assert_lists_are(index, stand_in)


@pytest.mark.parametrize("name", PATTERNS)
def test_output_lse_and_gradients_are_those_of_float64(
    name: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4, "proof", lambda *kind: "")
    n, m, pattern = PATTERNS[name]
    # Lists of both generations are compared above. Here each meets half of the patterns with each of the shapes.
    if (stand_in.generation == 9) == (list(PATTERNS).index(name) % 2 == 0):
        assert_same(tensors(n, m), pattern, start=start_of(n, m))
    else:
        assert_same(tensors(n, m, key_heads=4, dims=(16, 32)), pattern, start=start_of(n, m), scale=0.7)


def test_what_nobody_keeps_changes_nothing(stand_in: StandIn) -> None:
    pattern = Causal() & Window(40) & ~Window(2)
    inputs = tensors(300, 300)
    expected = results("fa4", inputs, pattern)
    kept = build_index(pattern, 300).to_dense()[0, 0]
    queries, keys = ~kept.any(1), ~kept.any(0)
    assert queries.any()
    assert keys.any()
    with torch.no_grad():
        inputs[0][:, :, queries] = math.nan
        for x in inputs[1:]:
            x[:, :, keys] = math.nan
    out, lse = sparse_attention(*inputs, pattern, enable_gqa=True, return_lse=True, backend="fa4")
    rows = queries.unsqueeze(1).expand_as(out[0, 0])
    out_grad = torch.linspace(-1, 1, out.shape[-1]).expand_as(out).masked_fill(rows, math.nan).to(out.dtype)
    lse_grad = torch.linspace(0, 1, 300).masked_fill(queries, math.nan).expand_as(lse)
    found = [out, lse, *torch.autograd.grad((out, lse), inputs, (out_grad, lse_grad))]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_full_tiles_need_no_bits(stand_in: StandIn) -> None:
    pattern = BlockDilated((2,), 2)
    results("fa4", tensors(256, 512), pattern)
    # On sm_100 a program computes two row tiles over one list, and here they keep different tiles.
    assert any("bits" in call for call in stand_in.calls) == (stand_in.generation == 10)
    stand_in.calls.clear()
    results("fa4", tensors(300, 333), Dense(), start=0)
    assert {*stand_in.calls} == {"forward", "backward"}


# Reasons.


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ({}, {"start": 5}, "a start at a multiple of 128, got call.start=5"),
        ({}, {"dropout_p": 0.1}, "dropout_p"),
        ({}, {"softcap": 2.0}, "softcap"),
        ({}, {"scale": -1.0}, "scale > 0"),
        ({}, {"key_mask": torch.ones(2, 168, dtype=torch.bool)}, "key_bits"),
        ({}, {"key_lengths": torch.tensor([3, 4])}, "key_lengths"),
        ({}, {"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        ({"dtype": torch.float32}, {}, "supports torch.bfloat16, torch.float16, got q.dtype=torch.float32"),
        ({"dims": (136, 16)}, {}, "head dims up to 128"),
        ({"dims": (16, 136)}, {}, "head dims up to 128"),
        ({"n": 0}, {}, "needs queries and keys"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_know_is_a_reason(
    shape: dict[str, Any], options: dict[str, Any], reason: str, stand_in: StandIn
) -> None:
    inputs = tensors(**{"n": 40, "m": 168, **shape})
    with pytest.raises(ValueError, match=f"backend 'fa4' does not support this call.*{reason}"):
        sparse_attention(*inputs, Causal(), enable_gqa=True, backend="fa4", **{"start": 128, **options})
    assert not stand_in.calls


def test_other_gpus_are_a_reason(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for generation in (8, 12):
        stand_in.generation = generation
        with pytest.raises(ValueError, match=f"needs compute capability 9 or 10, got {generation}"):
            sparse_attention(*tensors(9, 9), enable_gqa=True, backend="fa4")
    monkeypatch.setattr(fa4, "DEVICE", "cuda")
    with pytest.raises(ValueError, match="needs a GPU, got cpu"):
        sparse_attention(*tensors(9, 9), enable_gqa=True, backend="fa4")


def test_too_many_pairs_of_tiles_or_bits_are_a_reason(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "_PLACES_AT_MOST", 4 * 9 - 1)
    results("fa4", tensors(300, 300), Dense())
    for pattern, got in ((Segments(100, 2), "got 36 and "), (Causal(), "got 9 and 512")):
        with pytest.raises(ValueError, match=f"supports 35 pairs of tiles and words of bits, {got}"):
            sparse_attention(*tensors(300, 300), pattern, enable_gqa=True, backend="fa4")


def test_an_index_of_all_pairs_of_long_sequences_is_not_built(stand_in: StandIn) -> None:
    long = torch.zeros(1, 1, 1, 16, dtype=torch.float16).expand(1, 1, 1 << 20, 16)
    with pytest.raises(ValueError, match="would need an index of 67125249 tiles"):
        sparse_attention(long, long, long, Causal(), backend="fa4")


def test_gradients_that_must_be_deterministic_are_refused(stand_in: StandIn) -> None:
    inputs = tensors(9, 9)
    out = sparse_attention(*inputs, enable_gqa=True, backend="fa4")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="adds up gradients in any order"):
            sparse_attention(*inputs, enable_gqa=True, backend="fa4")
        with pytest.raises(ValueError, match="adds up gradients in any order"):
            out.sum().backward()
        assert sparse_attention(*(x.detach() for x in inputs), enable_gqa=True, backend="fa4").isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_it_runs_only_if_it_is_named(stand_in: StandIn) -> None:
    assert sparse_attention(*tensors(9, 9), enable_gqa=True).isfinite().all()
    assert not stand_in.calls


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "needs the package flash-attn-4"),
        ("4.0.0b33", "knows flash-attn-4 4.0.0b34 to 4.0.0b36, found 4.0.0b33"),
        ("4.0.0", "knows flash-attn-4 4.0.0b34 to 4.0.0b36, found 4.0.0"),
        ("4.0.0b36", "needs a GPU"),
    ],
)
def test_doctor_says_why_it_cannot_run(
    version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = metadata.version

    def found(name: str) -> str:
        if name != "flash-attn-4":
            return installed(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fa4._package_reason.cache_clear()
    try:
        assert dict(backend_report())["fa4"] == [reason]
        main(["doctor"])
        lines = dict(
            re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " "
        )
        assert lines["backend fa4"] == f"not available: {reason}"
        main(["doctor", "--self-test"])
        assert f"nothing to test: {reason}" in capsys.readouterr().out
    finally:
        fa4._package_reason.cache_clear()


# The comparison before the first call.


def test_a_kind_is_compared_once_and_a_pass_when_it_is_needed(stand_in: StandIn) -> None:
    inputs = tensors(256, 256)
    with torch.no_grad():
        sparse_attention(*inputs, Causal(), enable_gqa=True, backend="fa4")
    assert stand_in.calls == ["forward with bits"] * 2
    out = sparse_attention(*inputs, Causal(), enable_gqa=True, backend="fa4")
    assert stand_in.calls[2:] == ["backward with bits", "forward with bits"]
    out.sum().backward()
    assert stand_in.calls[4:] == ["backward with bits"]
    for dims, heads, dtype, pattern in (
        ((24, 12), 2, torch.float16, Causal()),
        ((20, 12), 4, torch.float16, Causal()),
        ((20, 12), 2, torch.bfloat16, Causal()),
        ((20, 12), 2, torch.float16, Dense()),
        ((20, 12), 2, torch.float16, Segments(64, 2)),
    ):
        stand_in.calls.clear()
        with torch.no_grad():
            others = tensors(256, 256, dims=dims, key_heads=heads, dtype=dtype)
            sparse_attention(*others, pattern, enable_gqa=True, backend="fa4")
        assert len(stand_in.calls) == 2


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("out", lambda x: x * 1.1, "is wrong: out by"),
        ("out", lambda x: torch.where(x == 0, math.nan, x), "is wrong: out by nan"),
        ("lse", lambda x: x + 0.05, "is wrong: lse by"),
        ("lse", lambda x: x.nan_to_num(neginf=0), "is wrong: lse by inf"),
        ("scale", lambda x: x * 1.2, "is wrong: out by"),
        ("kept", lambda x: x.roll(1, 1), "is wrong: out by"),
    ],
)
@pytest.mark.parametrize("stand_in", [9], indirect=True)
def test_a_wrong_forward_pass_is_refused(name: str, wrong: Any, said: str, stand_in: StandIn) -> None:
    stand_in.wrong[name] = wrong
    inputs = tensors(256, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="backend 'fa4' does not support this call") as refused, torch.no_grad():
        sparse_attention(*inputs, Segments(100, 2), enable_gqa=True, backend="fa4")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("q_grad", lambda x: x * 1.1, "q_grad by"),
        ("k_grad", lambda x: x.roll(1, 2), "k_grad by"),
        ("v_grad", lambda x: x.index_fill(1, torch.tensor([300]), math.nan), "v_grad by nan"),
        ("lse_grad", lambda x: torch.zeros_like(x), "q_grad by"),
        ("given lse", lambda x: None, "q_grad by"),
        ("kept", lambda x: x & x.roll(1, 2), "q_grad by"),
    ],
)
@pytest.mark.parametrize("stand_in", [9], indirect=True)
def test_wrong_gradients_are_refused_before_the_forward_pass(
    name: str, wrong: Any, said: str, stand_in: StandIn
) -> None:
    inputs = tensors(256, 384)
    pattern = build_index(Dense(), 256, 384).restricted(PER_HEAD)
    forward_is_right = name != "kept"
    if forward_is_right:
        with torch.no_grad():
            sparse_attention(*inputs, pattern, enable_gqa=True, backend="fa4")
    stand_in.wrong[name] = wrong
    with pytest.raises(ValueError, match=r"backend 'fa4' does not support this call: .*is wrong") as refused:
        sparse_attention(*inputs, pattern, enable_gqa=True, backend="fa4")
    assert said in str(refused.value)


def test_a_compiled_call_is_compared_when_it_runs(stand_in: StandIn) -> None:
    inputs = [x.detach() for x in tensors(40, 40)]
    compiled = torch.compile(
        lambda q, k, v: sparse_attention(q, k, v, Window(9), enable_gqa=True, backend="fa4"),
        backend="eager",
        fullgraph=True,
    )
    expected = sparse_attention(*inputs, Window(9), enable_gqa=True, backend="reference")
    assert_close(compiled(*inputs), expected, "out")
    fa4.proof.cache_clear()
    stand_in.wrong["out"] = lambda x: x * 1.1
    with pytest.raises(ValueError, match="is wrong: out by"):
        compiled(*inputs)


class CuteError(Exception):
    """As the compiler raises it: none of the built-in errors."""

    __module__ = "cutlass.base_dsl.common"


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "said"),
    [(CuteError("cannot compile\nhere is why"), "fails: cannot compile"), (ImportError(), "fails: ImportError")],
)
def test_a_package_that_fails_is_a_reason(error: Exception, said: str, stand_in: StandIn) -> None:
    stand_in._flash_attn_fwd = failing(error)
    with pytest.raises(ValueError, match="backend 'fa4' does not support this call") as refused, torch.no_grad():
        sparse_attention(*tensors(9, 9), enable_gqa=True, backend="fa4")
    assert str(refused.value).endswith(said)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), ZeroDivisionError()], ids=repr)
def test_errors_that_say_nothing_about_the_package_are_raised(error: Exception, stand_in: StandIn) -> None:
    stand_in._flash_attn_fwd = failing(error)
    with pytest.raises(type(error)):
        sparse_attention(*tensors(9, 9), enable_gqa=True, backend="fa4")
    del stand_in._flash_attn_fwd
    assert sparse_attention(*tensors(9, 9), enable_gqa=True, backend="fa4").isfinite().all()


def test_self_test_compares_both_passes_with_and_without_bits(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["doctor", "--self-test"]) == 0
    assert re.search("self-test fa4 +matches float64", capsys.readouterr().out)
    assert {*stand_in.calls} >= {"forward", "backward", "forward with bits", "backward with bits"}
    fa4.proof.cache_clear()
    stand_in.wrong["k_grad"] = lambda x: x * 1.1
    assert main(["doctor", "--self-test", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["self_test_fa4"].startswith("is wrong: k_grad by")


# The package itself.


def test_the_extra_installs_the_versions_that_are_known() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["fa4"]
    assert extra[0] == f"flash-attn-4>={fa4.VERSIONS[0]},<={fa4.VERSIONS[-1]}"


def test_nothing_is_loaded_before_a_call_that_it_can_run() -> None:
    script = """
import sys, torch
from ringtile import sparse_attention
from ringtile.kernels.select import backend_report
q = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
backend_report()
sparse_attention(q, q, q)
try:
    sparse_attention(q, q, q, backend="fa4")
except ValueError as error:
    print(error)
print([name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "cutlass", "quack", "tvm_ffi")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said, loaded = done.stdout.splitlines()
    assert "needs a GPU, got cpu" in said
    assert loaded == "[]"


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_both_passes_compile_with_and_without_bits(architecture: str) -> None:
    """Ahead of time, for GPUs that are not present. It takes a minute or two."""
    try:
        installed = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed: pip install '.[fa4]'")
    assert installed in fa4.VERSIONS
    script = ROOT / "tests" / "compiled_fa4.py"
    done = subprocess.run([sys.executable, script, architecture], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"^(\w+ of [\w ]+): [\d.]+ s, ([\d,]+) bytes$", done.stdout, re.M)
    names = ["forward of full tiles", "backward of full tiles", "forward of bits", "backward of bits"]
    assert [name for name, _ in found] == names, done.stdout
    sizes = [int(size.replace(",", "")) for _, size in found]
    assert sizes[2] > sizes[0]
    assert sizes[3] > sizes[1]
