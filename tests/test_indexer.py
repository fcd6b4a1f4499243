"""The best keys of each query, chosen in chunks, against `torch.topk` on the scores of all pairs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.adaptive import index_topk, indexer
from ringtile.patterns import Causal, Dense, Documents, Pattern, Window, per_head
from ringtile.tools.memory import peak_memory


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
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scores of all keys or blocks, and the numbers of the best."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    scores = scores.relu() if relu else scores
    scores = scores if weights is None else scores * weights.double().unsqueeze(-1)
    scores = scores.unflatten(1, (groups, -1)).sum(2)
    first = n_keys - n_queries if start is None else start
    at = first if isinstance(first, Tensor) else (torch.arange(n_queries) + first).expand(len(query), -1)
    rule = Dense() if pattern is None else pattern
    zero, j = torch.zeros((), dtype=torch.int64), torch.arange(n_keys)
    keep = torch.stack([rule.batch_row(b).allowed(zero, at[b, :, None], j) for b in range(len(query))])[:, None]
    keep = keep if key_mask is None else keep & key_mask[:, None, None]
    keep = keep if key_lengths is None else keep & (j < key_lengths[:, None, None, None])
    scores = scores.masked_fill(~keep, -math.inf)
    scores = pad(scores, (0, -n_keys % block), value=-math.inf).unflatten(3, (-1, block)).amax(4)
    lag = at[:, None, :, None] // block - torch.arange(scores.shape[3])
    scores = scores.masked_fill((lag >= 0) & (lag < local) & (scores > -math.inf), math.inf)
    values, where = scores.topk(min(n, scores.shape[3]))
    return scores, pad(where.masked_fill(values == -math.inf, -1), (0, n - where.shape[3]), value=-1)


def inputs(heads: int = 4, n_queries: int = 71, n_keys: int = 71, dtype: torch.dtype = torch.float64) -> Any:
    query = torch.randn(2, heads, n_queries, 8, dtype=dtype)
    return query, torch.randn(2, 1, n_keys, 8, dtype=dtype), torch.randn(2, heads, n_queries, dtype=dtype)


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
    n, weighted = how.pop("n", 16), how.pop("weighted", False)
    query, key, weights = inputs(n_queries=how.pop("n_queries", 71))
    how |= {"weights": weights} if weighted else {}
    found = index_topk(query, key, n, **how)
    assert found.dtype == torch.int32
    scores, expected = dense_topk(query, key, n, **how)
    if how.get("local", 0) > 1:
        # Blocks that always come first are ties.
        torch.testing.assert_close(found.sort().values.long(), expected.sort().values)
    elif not how.get("relu"):
        torch.testing.assert_close(found.long(), expected)
    else:
        # Products that are all negative are ties at 0.
        torch.testing.assert_close(found == -1, expected == -1)
        best, ours = (scores.gather(3, where.long().clamp(min=0)) for where in (expected, found))
        torch.testing.assert_close(ours.masked_fill(found == -1, 0), best.masked_fill(found == -1, 0))
        each = found.sort().values
        assert bool(((each[..., 1:] > each[..., :-1]) | (each[..., 1:] == -1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_ranked_in_float32(dtype: torch.dtype) -> None:
    query, key, weights = inputs(dtype=dtype)
    how = {"weights": weights, "pattern": Causal()}
    expected = dense_topk(query, key, 8, **how)[1]
    torch.testing.assert_close(index_topk(query, key, 8, **how).long(), expected)
    if dtype != torch.float32:
        with torch.autocast("cpu", dtype):
            torch.testing.assert_close(index_topk(query.float(), key.float(), 8, **how).long(), expected)


def test_ties_are_those_of_topk_on_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, _ = inputs()
    query, key = query.round(), key.round()
    monkeypatch.setattr(indexer, "_BYTES", 3000)
    how: dict[str, Any] = {"pattern": Causal(), "relu": True}
    torch.testing.assert_close(index_topk(query, key, 16, **how).long(), dense_topk(query, key, 16, **how)[1])


def test_the_future_and_masked_memory_change_nothing() -> None:
    query, key, weights = inputs()
    how: dict[str, Any] = {"weights": weights, "relu": True, "pattern": Causal(), "block": 4}
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
        (4, 600, 16384, 16, {"groups": 4, "block": 128, "local": 1, "pattern": Causal() & Window(9000)}),
        (1, 2, 3 * 2**20, 2**18, {"start": 3 * 2**20, "key_lengths": torch.tensor([3 * 2**20])}),
        (128, 1, 2**20, 2048, {"pattern": Causal(), "key_mask": torch.ones(1, 2**20, dtype=torch.bool)}),
    ],
    ids=["heads", "blocks", "spans", "one query"],
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
    "pattern": ({"pattern": "causal"}, "pattern", "'causal'"),
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
    with pytest.raises(ValueError, match=rf"^{name}: .*{re.escape(text)}"):
        index_topk(**given)
