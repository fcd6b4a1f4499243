"""The best keys of each query, chosen in chunks, against `torch.topk` on the scores of all pairs in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from native_sets import INSTRUCTION_SETS, native_or_composed, use_set
from oracle import assert_near, refused
from torch import Tensor
from torch.nn.functional import pad

from ringtile.adaptive import index_topk, indexer
from ringtile.kernels.native import ranks
from ringtile.patterns import Causal, Dense, Documents, Pattern, Window, per_head
from ringtile.testing.oracle import kept_pairs
from ringtile.tools.memory import peak_memory


@pytest.fixture(autouse=True, params=["native", "composed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test by the library, if there is one, and by PyTorch's own operations."""
    if (name := native_or_composed(request)) == "composed":
        monkeypatch.setattr(indexer, "reason_against", lambda: "not wanted")
    return name


def pairs_of(query: Tensor, key: Tensor, pattern: Pattern | None, start: int | Tensor | None, **masks: Any) -> Tensor:
    """The pairs of a call, bool ``[B, 1, Nq, Nk]``. Each batch element can begin at its own position."""
    (batch, _, n_queries, _), n_keys = query.shape, key.shape[2]
    first = n_keys - n_queries if start is None else start
    starts = first[:, 0].tolist() if isinstance(first, Tensor) else [first] * batch
    rule = Dense() if pattern is None else pattern
    rows = [kept_pairs(rule, batch, 1, n_queries, n_keys, start=n, **masks)[b] for b, n in enumerate(starts)]
    return torch.stack(rows)


def dense_topk(
    query: Tensor,
    key: Tensor,
    n: int,
    *,
    weights: Tensor | None = None,
    relu: bool = False,
    groups: int = 1,
    block: int = 1,
    local: int = 0,
    pattern: Pattern | None = None,
    start: int | Tensor | None = None,
    **masks: Any,
) -> tuple[Tensor, Tensor]:
    """The scores of all keys or blocks, and the numbers of the best."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    scores = scores.relu() if relu else scores
    scores = scores if weights is None else scores * weights.double().unsqueeze(-1)
    scores = scores.unflatten(1, (groups, -1)).sum(2)
    first = n_keys - n_queries if start is None else start
    at = first if isinstance(first, Tensor) else (torch.arange(n_queries) + first).expand(len(query), -1)
    keep = pairs_of(query, key, pattern, start, **masks)
    scores = scores.masked_fill(~keep, -math.inf)
    scores = pad(scores, (0, -n_keys % block), value=-math.inf).unflatten(3, (-1, block)).amax(4)
    lag = at[:, None, :, None] // block - torch.arange(scores.shape[3])
    scores = scores.masked_fill((lag >= 0) & (lag < local) & (scores > -math.inf), math.inf)
    values, where = scores.topk(min(n, scores.shape[3]))
    return scores, pad(where.masked_fill(values == -math.inf, -1), (0, n - where.shape[3]), value=-1)


def assert_same_choice(found: Tensor, expected: tuple[Tensor, Tensor], *, sets: bool = True) -> None:
    """The scores of a choice are the best, the best first, and no entry is twice. The sets are those of topk."""
    scores, best = expected
    torch.testing.assert_close(found == -1, best == -1)
    if scores.shape[3]:
        ours, theirs = (scores.gather(3, x.long().clamp(min=0)).masked_fill(x == -1, 0) for x in (found, best))
        assert_near(ours, theirs, 0)
    each = found.sort().values.long()
    assert bool(((each[..., 1:] > each[..., :-1]) | (each[..., 1:] == -1)).all())
    if sets:
        torch.testing.assert_close(each, best.sort().values)


def inputs(heads: int = 4, n_queries: int = 71, n_keys: int = 71, dtype: torch.dtype = torch.float64) -> Any:
    query = torch.randn(2, heads, n_queries, 8, dtype=dtype)
    return query, torch.randn(2, 1, n_keys, 8, dtype=dtype), torch.randn(2, heads, n_queries, dtype=dtype)


def whole_numbers(
    heads: int = 4, n_queries: int = 71, n_keys: int = 71, head_dim: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Vectors of whole numbers times powers of two, whose scores are exact, and others that are rounded to these."""
    shapes = (2, heads, n_queries, head_dim), (2, 1, n_keys, head_dim)
    exact, near = [], []
    for shape in shapes:
        # Few numbers make equal scores.
        x = torch.randint(-1, 2, shape) * torch.randint(0, 127, (*shape[:3], 1))
        x[..., 0] = 127
        unit = torch.exp2(torch.randint(-1, 2, (*shape[:3], 1)))
        noise = (torch.rand(shape) * 0.4 - 0.2) * (x.abs() < 127)
        exact.append((x * unit).to(dtype))
        near.append(((x + noise) * unit).to(dtype))
    weights = torch.randint(-3, 4, shapes[0][:3]).to(dtype)
    return (*exact, weights), (*near, weights)


POSITIONS = torch.tensor([[5], [0]]) + torch.arange(71)
CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "DeepSeek": {"relu": True, "weighted": True, "pattern": Causal()},
    "MiniMax": {"groups": 4, "block": 16, "local": 1, "n": 3, "pattern": Causal()},
    "later blocks": {"block": 8, "local": 1, "n": 3},
    "groups of heads": {"groups": 2, "weighted": True, "pattern": Causal()},
    "window": {"pattern": Causal() & Window(9), "n": 12},
    "documents": {"pattern": Causal() & Documents(ids=torch.arange(142).view(2, 71) // 20)},
    "padding": {"pattern": Causal(), "key_mask": torch.arange(71) >= torch.tensor([[30], [0]]), "relu": True},
    "lengths": {"key_lengths": torch.tensor([3, 60])},
    "no keys": {"key_lengths": torch.tensor([0, 0]), "block": 8, "local": 2},
    "positions": {"start": POSITIONS, "pattern": Causal(), "block": 4, "local": 2},
    "start": {"start": -20, "pattern": Causal()},
    "more than there are": {"n": 90, "pattern": Causal()},
    "one query": {"n_queries": 1, "pattern": Causal(), "relu": True, "weighted": True},
    "no query": {"n_queries": 0},
    "blocks that do not divide": {"block": 32, "n": 2},
}


@pytest.mark.parametrize(
    "limits", [{}, {"_BYTES": 3000}, {"_BYTES": 3000, "_SPAN": 16}], ids=["whole", "rows", "spans"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_choices_are_those_of_all_scores(
    case: dict[str, Any], limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(indexer, name, value)
    how = dict(case)
    n, weighted, n_queries = how.pop("n", 16), how.pop("weighted", False), how.pop("n_queries", 71)
    exact, near = whole_numbers(n_queries=n_queries)
    for rounded, query, key, weights in (
        (False, *exact),
        (True, *near),
        (False, *(x.double() for x in exact)),
        (True, *(x.double() for x in near)),
        (False, *inputs(n_queries=n_queries)),
    ):
        more = {"weights": weights} if weighted else {}
        found = index_topk(query, key, n, rounded=rounded, **how, **more)
        assert found.dtype == torch.int32
        exactly = exact[:2] if rounded else (query, key)
        # Spans join their best ones, whose equal scores are others than those of the row.
        assert_same_choice(found, dense_topk(*exactly, n, **how, **more), sets="_SPAN" not in limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 70, 4), (70, 1100, 33), (5, 9, 7)], ids=str)
def test_rounded_scores_are_those_of_rounded_queries_and_keys(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n_queries, n_keys, head_dim = shape
    for heads, relu in ((1, False), (3, True)):
        exact, near = whole_numbers(heads, n_queries, n_keys, head_dim, dtype)
        how: dict[str, Any] = {"relu": relu, "pattern": Causal()}
        for n in (n_keys, 1 + n_keys // 3):
            found = index_topk(*near[:2], n, weights=near[2], rounded=True, **how)
            assert_same_choice(found, dense_topk(*exact[:2], n, weights=exact[2], **how))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_rounded_scores_by_each_instruction_set(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path != "native":
        pytest.skip("PyTorch chooses its own")
    use_set(name, monkeypatch)
    for shape in ((33, 70, 4), (70, 1100, 33)):
        test_rounded_scores_are_those_of_rounded_queries_and_keys(shape, torch.float32)


def test_rounded_scores_are_near_the_exact_ones() -> None:
    query, key, weights = inputs(n_keys=700, dtype=torch.float32)
    scores, _ = dense_topk(query, key, 1, weights=weights, relu=True)
    best = [index_topk(query, key, 50, weights=weights, relu=True, rounded=rounded).long() for rounded in (False, True)]
    exact, rounded = (scores.gather(3, where).mean() for where in best)
    assert 0.99 * exact < rounded < exact


SPECIAL = torch.tensor(
    [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1 + 2**-23, -1.0, 1e-40, -1e-40, 3e38, -3e38]
)


def test_the_best_of_rows(path: str) -> None:
    for number in range(40):
        rows, entries = number % 4, 1 + number * number
        scores = SPECIAL[torch.randint(len(SPECIAL), (rows, entries))]
        if not number % 3:
            scores = 8 + torch.randn(rows, entries) / 2**18
        # What lies between rows is not read.
        scores = pad(scores, (0, number % 5), value=math.nan)[:, :entries]
        expected = scores.sort(dim=1, descending=True, stable=True)
        for n in {1, entries // 2 + 1, entries}:
            values, where = indexer._best(scores, n, path == "native")
            real = (values > -math.inf) | values.isnan()
            torch.testing.assert_close(values, expected.values[:, :n], rtol=0, atol=0, equal_nan=True)
            numbers = where.long().where(real, -1).sort(1).values
            again = scores.topk(n).indices.where(real, -1).sort(1).values
            torch.testing.assert_close(numbers, again)
            if path == "native":
                values, where = ranks.best(scores, n)
                torch.testing.assert_close(values, expected.values[:, :n], rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(where.long()[real], expected.indices[:, :n][real])


def test_a_row_that_is_too_short_ends_in_nothing(path: str) -> None:
    if path == "native":
        values, where = ranks.best(torch.tensor([[2.0, -math.inf, 3.0]]), 5)
        assert where.tolist() == [[2, 0, -1, -1, -1]]
        assert values.tolist() == [[3.0, 2.0] + 3 * [-math.inf]]


@pytest.mark.parametrize("rounded", [False, True])
def test_nans_come_first(rounded: bool) -> None:
    query, key, weights = inputs(n_keys=90, dtype=torch.float32)
    how: dict[str, Any] = {"weights": weights, "relu": True, "rounded": rounded}
    whole = index_topk(query, key, 90, **how)
    key[0, 0, 60, 3], key[0, 0, 7, 0], query[1, 2, 5, 1], weights[1, 0, 9] = (math.nan,) * 4
    found = index_topk(query, key, 90, **how)
    assert (found[0, ..., :2].sort().values == torch.tensor([7, 60])).all()
    assert (found[1, 0].sort().values == torch.arange(90)).all()
    others = [i for i in range(71) if i not in (5, 9)]
    torch.testing.assert_close(found[1, 0, others], whole[1, 0, others])


@pytest.mark.parametrize("rounded", [False, True])
def test_bits_depend_neither_on_threads_nor_on_strides(
    rounded: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path != "native":
        pytest.skip("PyTorch's products are its own")
    monkeypatch.setattr("ringtile.kernels.native._OPERATIONS_A_THREAD", 1)
    query, key, weights = inputs(n_queries=150, n_keys=1500, dtype=torch.float32)
    given = query, key, weights
    apart = query.transpose(1, 2).contiguous().transpose(1, 2), pad(key, (1, 2), value=math.nan)[..., 1:-2]
    before, found = torch.get_num_threads(), []
    turned = [x.mT.contiguous().mT for x in given]
    for threads, tensors in ((1, given), (2, turned), (3, (*apart, weights))):
        torch.set_num_threads(threads)
        monkeypatch.setattr("ringtile.kernels.native._OPERATIONS_A_CALL", 1e4 if threads == 2 else 2e10)
        q, k, w = tensors
        # Products in float32 are PyTorch's, whose bits may depend on threads: exact numbers have one result.
        q, k = (q, k) if rounded else (q.round(), k.round())
        found.append(index_topk(q, k, 700, weights=w if rounded else w.round(), relu=True, rounded=rounded))
    torch.set_num_threads(before)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.unpoisoned
def test_a_compiled_caller_chooses_the_same() -> None:
    query, key, weights = inputs(dtype=torch.float32)

    def call() -> Tensor:
        return index_topk(query, key, 9, weights=weights, relu=True, rounded=True, pattern=Causal()) + 1

    # Equal scores can come in another order.
    assert torch.equal(torch.compile(call, backend="eager")().sort().values, call().sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_ranked_in_float32(dtype: torch.dtype) -> None:
    query, key, weights = inputs(dtype=dtype)
    how = {"weights": weights, "pattern": Causal()}
    expected = dense_topk(query, key, 8, **how)[1]
    torch.testing.assert_close(index_topk(query, key, 8, **how).long(), expected)
    if dtype != torch.float32:
        with torch.autocast("cpu", dtype):
            torch.testing.assert_close(index_topk(query.float(), key.float(), 8, **how).long(), expected)


@pytest.mark.parametrize("rounded", [False, True])
def test_the_future_and_masked_memory_change_nothing(rounded: bool) -> None:
    query, key, weights = inputs(dtype=torch.float32)
    how: dict[str, Any] = {"weights": weights, "relu": True, "rounded": rounded, "pattern": Causal(), "block": 4}
    found = index_topk(query, key, 5, **how)
    key[:, :, 40:] = math.nan
    torch.testing.assert_close(index_topk(query, key, 5, **how)[:, :, :40], found[:, :, :40])
    masked = torch.arange(71) < 40
    how |= {"key_mask": masked.expand(2, -1)}
    assert int(index_topk(query, key, 5, **how).max()) == 9


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "n", "how"),
    [
        (64, 6, 65536, 2048, {"relu": True, "pattern": Causal()}),
        (4, 300, 16384, 16, {"groups": 4, "block": 128, "local": 1, "pattern": Causal() & Window(9000)}),
        (1, 2, 3 * 2**20, 2**18, {"start": 3 * 2**20, "key_lengths": torch.tensor([3 * 2**20])}),
        (128, 1, 2**20, 2048, {"pattern": Causal(), "key_mask": torch.ones(1, 2**20, dtype=torch.bool)}),
        (64, 20, 32768, 2048, {"relu": True, "pattern": Causal(), "rounded": True}),
        (4, 3, 2 * 2**20, 2048, {"rounded": True}),
    ],
    ids=["heads", "blocks", "spans", "one query", "rounded", "rounded spans"],
)
def test_at_most_64_mib(heads: int, queries: int, keys: int, n: int, how: dict[str, Any]) -> None:
    query = torch.randn(1, heads, queries, 8, dtype=torch.bfloat16)
    key = torch.randn(1, 1, keys, 8, dtype=torch.bfloat16)
    weights = torch.randn(1, heads, queries, dtype=torch.bfloat16)
    peak = peak_memory(lambda: index_topk(query, key, n, weights=weights, **how), None, torch.device("cpu"))
    assert peak.forward <= 64 * 2**20


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "n": ({"n": 0}, "n", "positive integer, got 0"),
    "block": ({"block": 1.5}, "block", "positive integer, got 1.5"),
    "groups": ({"groups": 3}, "groups", "groups=3"),
    "key heads": ({"key": torch.zeros(2, 2, 71, 8), "groups": 4}, "groups", "key.shape"),
    "head_dim": ({"key": torch.zeros(2, 1, 71, 9)}, "key", "head_dim"),
    "dtype": ({"key": torch.zeros(2, 1, 71, 8, dtype=torch.float16)}, "key", "float16"),
    "weights": ({"weights": torch.zeros(2, 1, 71)}, "weights", "(2, 4, 71)"),
    "integer weights": ({"weights": torch.zeros(2, 4, 71, dtype=torch.int64)}, "weights", "int64"),
    "local": ({"local": -1}, "local", "-1"),
    "pattern": ({"pattern": "causl"}, "pattern", "did you mean 'causal'"),
    "pattern of heads": ({"pattern": per_head([Causal(), Dense()] * 2)}, "pattern", "all heads"),
    "pattern of a batch": ({"pattern": Documents(ids=torch.zeros(3, 71, dtype=torch.int64))}, "pattern", "2 batch"),
    "start": ({"start": 1.0}, "start", "1.0"),
    "positions": ({"start": torch.zeros(71, dtype=torch.int64)}, "start", "(2, 71)"),
    "floating positions": ({"start": torch.zeros(2, 71)}, "start", "float32"),
    "key_mask": ({"key_mask": torch.ones(2, 70, dtype=torch.bool)}, "key_mask", "70"),
    "key_lengths": ({"key_lengths": torch.tensor([72, 0])}, "key_lengths", "72"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_refused(case: tuple[dict[str, Any], str, str]) -> None:
    change, name, text = case
    query, key, _ = inputs(dtype=torch.float32)
    given = {"query": query, "key": key, "n": 4} | change
    with refused(rf"^{name}: .*{re.escape(text)}"):
        index_topk(**given)
