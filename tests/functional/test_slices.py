"""Attention in slices of batch rows and heads: the bits of one call, and a retry if memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import results, worst
from torch import Tensor

from ringtile import build_index, in_slices, sparse_attention
from ringtile.functional import slices
from ringtile.kernels import native
from ringtile.modules import SparseTransformer
from ringtile.patterns import Causal, Documents, Pattern, Segments, Window, from_mask, per_head

BATCH, HEADS, KEY_HEADS, TOKENS = 3, 8, 4, 200
TILES = torch.rand(HEADS, 2, 2, generator=torch.Generator().manual_seed(0)) < 0.7
PATTERNS: dict[str, Any] = {
    "all pairs": None,
    "window": Causal() & Window(30),
    "segments": Segments(64, 4),
    "per head": per_head([Window(n) for n in range(HEADS)]),
    "documents per row": Documents(ids=torch.arange(TOKENS) // torch.tensor([[30], [50], [300]])),
    "mask": from_mask(torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.4),
    "tiles": TILES,
    "index per head": build_index(per_head([Window(n) for n in range(HEADS)]), TOKENS, num_heads=HEADS),
    "index per row": build_index(
        Documents(ids=torch.arange(TOKENS) // torch.tensor([[30], [50], [300]])), TOKENS, num_heads=HEADS, batch=BATCH
    ),
}
OPTIONS: dict[str, Any] = {
    "key_mask": torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.8,
    "key_lengths": torch.tensor([200, 90, 0]),
    "sinks": torch.arange(HEADS) / 4,
    "scale": 0.3,
}
BACKENDS = ["blockwise"] if native.reason_against() else ["native", "blockwise"]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.randn(BATCH, count, TOKENS, 16).to(dtype).requires_grad_() for count in heads]


def run(attend: Any, leaves: list[Tensor], pattern: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return results(attend, leaves, pattern, enable_gqa=True, return_lse=True, **options)


def check_slices(dtype: torch.dtype, pattern: Any, *counts: int, backend: str, **options: Any) -> None:
    leaves = inputs(dtype)
    whole = run(sparse_attention, leaves, pattern, backend=backend, **options)
    for count in counts:
        found = run(in_slices(count), leaves, pattern, backend=backend, **options)
        # The chunks of blockwise depend on the size of a call.
        assert worst(found, whole) <= (0 if backend == "native" else 4 * torch.finfo(dtype).eps), count


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_slices_give_the_bits_of_one_call(name: str, backend: str) -> None:
    # Rows, single heads, rows and heads.
    check_slices(torch.float32, PATTERNS[name], *((3, 99) if backend == "native" else (99,)), backend=backend)
    check_slices(torch.bfloat16, PATTERNS[name], 5, backend=backend)


@pytest.mark.parametrize("option", [*OPTIONS, "alibi_slopes", "all"])
def test_options_are_cut_with_the_tensors(option: str) -> None:
    options = OPTIONS if option == "all" else {option: (OPTIONS | {"alibi_slopes": torch.rand(HEADS)})[option]}
    check_slices(torch.float32, None, 2, 12, backend=BACKENDS[0], is_causal=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["per head", "index per row"])
def test_slices_drop_the_weights_of_one_call(name: str, backend: str) -> None:
    numbers = {"head_at": torch.randperm(50)[:HEADS], "batch_at": torch.tensor([4, 4, 0])}
    for count, given in ((5, {}), (2, {"seed": 5}), (12, {"seed": torch.tensor([-3]), **numbers})):
        check_slices(torch.float32, PATTERNS[name], count, backend=backend, dropout_p=0.3, **given)


def test_a_retry_drops_the_weights_of_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(query: Tensor, *rest: Any, **options: Any) -> Any:
        if query.shape[0] > 1:
            raise MemoryError
        return sparse_attention(query, *rest, **options)

    leaves = inputs(torch.float32)
    whole = run(sparse_attention, leaves, Causal(), dropout_p=0.3)
    monkeypatch.setattr(slices, "sparse_attention", limited)
    assert all(map(torch.equal, run(in_slices(), leaves, Causal(), dropout_p=0.3), whole))


def test_a_slice_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []

    def recorded(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | None, **options: Any) -> Any:
        sizes.append((len(query), query.shape[1]))
        return sparse_attention(query, key, value, pattern, **options)

    monkeypatch.setattr(slices, "sparse_attention", recorded)
    expected = {1: [(3, 8)], 2: [(2, 8), (1, 8)], 3: [(1, 8)] * 3, 6: [(1, 4)] * 6, 12: [(1, 2)] * 12}
    for count, wanted in expected.items():
        sizes.clear()
        in_slices(count)(*inputs(torch.float32), enable_gqa=True)
        assert sizes == wanted


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("x can't allocate memory: y")]
)
def test_more_slices_each_time_memory_runs_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    most = 3

    def limited(query: Tensor, *rest: Any, **options: Any) -> Any:
        tried.append(len(query) * query.shape[1])
        if tried[-1] > most:
            raise error
        return sparse_attention(query, *rest, **options)

    leaves = inputs(torch.float32)
    whole = run(sparse_attention, leaves, Causal())
    monkeypatch.setattr(slices, "sparse_attention", limited)
    assert all(map(torch.equal, run(in_slices(), leaves, Causal()), whole))
    # Whole, 2 slices (of 2 rows and 1), 4 and 8 (of 4 heads), then 12 of 2 heads.
    assert tried == [24, 16, 4, 4, *[2] * 12]
    tried.clear()
    with pytest.raises(type(error)):
        in_slices(2)(*leaves, enable_gqa=True)
    assert tried == [16]
    most = 0
    with pytest.raises(type(error)):
        in_slices()(*leaves, enable_gqa=True)
    assert tried[-1] == 2


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal tried
        tried += 1
        raise RuntimeError("broken")

    monkeypatch.setattr(slices, "sparse_attention", broken)
    with pytest.raises(RuntimeError, match="broken"):
        in_slices()(*inputs(torch.float32), enable_gqa=True)
    assert tried == 1


def test_a_module_attends_in_slices() -> None:
    whole, sliced = (
        SparseTransformer(1, 64, 8, num_kv_heads=4, pattern=Window(9), attend=a)
        for a in (sparse_attention, in_slices(4))
    )
    for weight in whole.parameters():
        torch.nn.init.normal_(weight)
    sliced.load_state_dict(whole.state_dict())
    x, mask = torch.randn(2, 70, 64), torch.rand(2, 70) < 0.8
    assert torch.equal(sliced(x, mask), whole(x, mask))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dropout_p": 1.0}, "dropout_p: expected a probability"),
        ({"dropout_p": 0.1, "seed": True}, "seed: expected a 64-bit integer"),
        ({"dropout_p": 0.1, "head_at": torch.arange(4)}, "head_at: expected 8 entries"),
        ({"dropout_p": 0.1, "batch_at": torch.arange(8)}, "batch_at: expected 3 entries"),
        ({"key_mask": torch.ones(5, TOKENS).bool()}, "key_mask: expected 3 entries"),
        ({"key_lengths": torch.ones(4).int()}, "key_lengths: expected 3 entries"),
        ({"sinks": torch.ones(9)}, "sinks: expected 8 entries"),
        ({"alibi_slopes": torch.ones(16)}, "alibi_slopes: expected 8 entries"),
        ({"pattern": per_head([Window(1)] * 16)}, "num_heads: .*written for 16, got"),
        ({"pattern": Documents(ids=torch.zeros(4, TOKENS).int())}, "batch: .*written for 4, got"),
        (
            {"pattern": build_index(per_head([*map(Window, range(9))]), TOKENS, num_heads=9)},
            r"pattern: expected groups .* got index.group.shape=torch.Size\(\[1, 9\]\)",
        ),
        ({"enable_gqa": False}, "key: expected"),
    ],
)
def test_sizes_that_a_slice_would_hide(options: dict[str, Any], complaint: str) -> None:
    for count in (None, 6):
        with pytest.raises(ValueError, match=complaint):
            in_slices(count)(*inputs(torch.float32), **{"enable_gqa": True} | options)


def test_the_number_of_slices_is_positive() -> None:
    for count in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="slices: expected a positive integer"):
            in_slices(count)  # type: ignore[arg-type]
