"""FlexAttention's score_mod as a bias or a softcap: its results and gradients, or a refusal."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from oracle import relative_error
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ringtile import sparse_attention
from ringtile.functional import from_score_mod
from ringtile.patterns import Causal

HEADS, QUERIES, KEYS = 4, 60, 75
TABLE = torch.randn(HEADS, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
FACTOR = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
PLACES = torch.randn(KEYS)


def buckets(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    near = (j - i).abs()
    far = 8 + (torch.log(near.clamp(min=1).float() / 8) / math.log(16) * 8).long()
    return score + TABLE[h, torch.where(near < 8, near, far.clamp(max=15)) + torch.where(j > i, 16, 0)]


READ: dict[str, Callable[..., Tensor]] = {
    "alibi": lambda score, b, h, i, j: score - 2.0 ** (-2 * (h + 1)) * (i - j).abs(),
    "a table": lambda score, b, h, i, j: score + TABLE[h, i - j + 100],
    "a table from elsewhere": lambda score, b, h, i, j: score + TABLE[h, (i + 3) - (j - 2) + 90],
    "buckets": buckets,
    "a factor": lambda score, b, h, i, j: (j - i.double()) * FACTOR + score,
    "a comparison": lambda score, b, h, i, j: score + torch.where(i >= j, 0.0, 1.5),
    "a half": lambda score, b, h, i, j: score + torch.exp(-((i + 0.5) - (j - 2.0)).abs().double()) * (i + 1.5 > j),
    "two": lambda score, b, h, i, j: (score + 0.1 * (i - j)) - TABLE[h, (j - i).abs()],
}
LEARNED = {
    **{name: [TABLE] for name in ("a table", "a table from elsewhere", "buckets", "two")},
    "a factor": [FACTOR],
}
REFUSED: dict[str, Callable[..., Tensor]] = {
    "a mask": lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf),
    "an infinite number": lambda score, b, h, i, j: score + torch.where(i >= j, 0.0, -torch.inf),
    "the batch": lambda score, b, h, i, j: score + 0.1 * b,
    "the batch as an integer": lambda score, b, h, i, j: score + b,
    "the query": lambda score, b, h, i, j: score + i,
    "the key": lambda score, b, h, i, j: score + PLACES[j],
    "a sum of positions": lambda score, b, h, i, j: score + (i + j),
    "twice the query": lambda score, b, h, i, j: score + (i + i - j),
    "a factor of the query": lambda score, b, h, i, j: score + (2 * i - j),
    "alpha": lambda score, b, h, i, j: score + torch.sub(i, j, alpha=2),
    "a larger position": lambda score, b, h, i, j: score + torch.maximum(i, j),
    "coordinates": lambda score, b, h, i, j: score + (i // 8 - j // 8),
    "positions in half precision": lambda score, b, h, i, j: score + (i.half() - j.half()),
    "a fraction of a position": lambda score, b, h, i, j: (
        score + TABLE[h, ((i.float() + 0.3) - (j.float() + 0.3)).long() + 100]
    ),
    "a number of the head and a position": lambda score, b, h, i, j: score + ((i - 0.1 * h) - j),
    "a number as large as positions lose": lambda score, b, h, i, j: score + ((i + 1e9) - (j + 1e9)),
    "a scale": lambda score, b, h, i, j: 2 * score,
    "the score twice": lambda score, b, h, i, j: score + score,
    "a score that is subtracted": lambda score, b, h, i, j: (i - j) - score,
    "no score": lambda score, b, h, i, j: 1.0 * (i - j),
    "another softcap": lambda score, b, h, i, j: 20 * torch.tanh(score / 10),
    "a softcap and more": lambda score, b, h, i, j: 20 * torch.tanh(score / 20) + (i - j),
    "a softcap of two": lambda score, b, h, i, j: 20 * torch.tanh((score + (i - j)) / 20),
    "a sum of all": lambda score, b, h, i, j: score + (i - j).sum(),
    "a running sum": lambda score, b, h, i, j: score + (i - j).cumsum(0),
    "a part of a table": lambda score, b, h, i, j: score + TABLE[h][0, 5],
    "an element of distances": lambda score, b, h, i, j: score + (i - j)[h],
    "a table without its distances": lambda score, b, h, i, j: score + TABLE[h],
    "the batch and a distance": lambda score, b, h, i, j: score + (b + (i - j)),
    "a random number": lambda score, b, h, i, j: score + torch.rand_like(score),
    "a random number of distances": lambda score, b, h, i, j: score + torch.rand_like((i - j).float()),
    "control flow": lambda score, b, h, i, j: score + 1 if (i - j).item() > 3 else score,
    "places outside": lambda score, b, h, i, j: score + TABLE[h, 5 * (i - j)],
}


@pytest.mark.parametrize("name", READ)
def test_a_sum_has_the_results_and_gradients_of_flex_attention(name: str) -> None:
    q = torch.randn(2, HEADS, QUERIES, 16, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, HEADS, KEYS, 16, dtype=torch.float64, requires_grad=True).unbind()
    options = from_score_mod(READ[name], HEADS, QUERIES, KEYS)
    assert sorted(options) == ["bias", "start"]
    head, i, j = torch.arange(HEADS)[:, None, None], torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    scores = READ[name](q @ k.mT / 4, torch.zeros((), dtype=torch.int64), head, i, j)
    expected = scores.softmax(3) @ v
    with torch.no_grad(), warnings.catch_warnings():
        # It asks for compilation, which computes the same.
        warnings.simplefilter("ignore")
        assert (
            relative_error(flex_attention(q.detach(), k.detach(), v.detach(), score_mod=READ[name]), expected) < 1e-12
        )
    found = sparse_attention(q, k, v, **options)
    learned = LEARNED.get(name, [])
    assert options["bias"].table.requires_grad == bool(learned)
    cotangent = torch.randn_like(found)
    for mine, theirs in zip(
        (found, *torch.autograd.grad(found, (q, k, v, *learned), cotangent)),
        (expected, *torch.autograd.grad(expected, (q, k, v, *learned), cotangent)),
        strict=True,
    ):
        assert relative_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="score_mod: expected"):
        from_score_mod(REFUSED[name], HEADS, QUERIES, KEYS)


def test_softcaps_and_no_functions() -> None:
    assert from_score_mod(lambda score, b, h, i, j: 20 * torch.tanh(score / 20), 4, 9, 9) == {"softcap": 20.0}
    assert from_score_mod(lambda score, b, h, i, j: torch.tanh(score * 0.02) * 50, 4, 9, 9) == {"softcap": 50.0}
    with pytest.raises(ValueError, match="score_mod: expected a function, got 3"):
        from_score_mod(3, 4, 9, 9)  # type: ignore[arg-type]


def test_one_distance_of_a_causal_call() -> None:
    q, k, v = torch.randn(3, 1, HEADS, 9, 16).unbind()
    options = from_score_mod(lambda score, b, h, i, j: score - 0.5 * (i - j), HEADS, 9, 9)
    found = sparse_attention(q, k, v, Causal(), **options)
    slopes = torch.full((HEADS,), 0.5)
    torch.testing.assert_close(found, sparse_attention(q, k, v, Causal(), alibi_slopes=slopes))
