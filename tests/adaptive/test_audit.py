"""The audit of an index: exact figures of some rows, against dense attention of all."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from oracle import kept_pairs, make_inputs, refused, weights_of

from ringtile.adaptive import audit
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Documents, Pattern, Window, per_head
from ringtile.testing.oracle import attention

N = 150


CASES: dict[str, tuple[Pattern, Pattern, dict[str, Any]]] = {
    "causal": (Causal(), Causal(), {}),
    "all pairs": (Causal() | Window(3), Window(400), {"scale": 0.3}),
    "documents": (Causal() & Documents([40, 110]), Causal() & Documents([40, 110]), {}),
    "heads": (per_head([Causal(), Causal() & Window(50)] * 2), Causal(), {}),
    "a window is the reference": (Causal() & Window(60), Causal() & Window(60), {"reference": Causal() & Window(60)}),
}


@pytest.mark.parametrize(("pattern", "envelope", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_figures_are_those_of_dense_attention(
    pattern: Pattern, envelope: Pattern, options: dict[str, Any], masked: bool
) -> None:
    q, k, v, _ = make_inputs(2, 4, N - 20, N, kv_heads=2, value_dim=8, score_scale=2.0)
    base = build_index(pattern, N - 20, N, num_heads=4, block=16)
    index = base.restricted(torch.rand(2, 4, base.n_rows, base.n_cols) < 0.6)
    key_mask = (torch.rand(2, N) < 0.7) & (torch.arange(N) > 30) if masked else None
    report = audit(q, k, v, index, rows=50, seed=3, key_mask=key_mask, **options)
    allowed = kept_pairs(envelope, q, k, key_mask=key_mask)
    kept = kept_pairs(index, q, k, key_mask=key_mask)
    scale = options.get("scale")
    out, whole = (attention(q, k, v, pairs, scale=scale)[0] for pairs in (kept, allowed))
    weights = weights_of(q, k, allowed, scale)
    rows = report.rows
    assert len(rows.unique()) == 50
    recall = (weights * kept).sum(-1)[:, :, rows]
    counted = allowed.any(-1)[:, :, rows]
    assert torch.equal(report.recall.isfinite(), counted.expand_as(recall))
    for found, wanted in (
        (report.recall, recall),
        (report.error, (out - whole).norm(dim=-1)[:, :, rows]),
        (report.norm, whole.norm(dim=-1)[:, :, rows]),
    ):
        assert torch.allclose(found[report.recall.isfinite()], wanted[report.recall.isfinite()], atol=1e-12)
    inside = report.recall.isfinite()
    assert (report.error[inside] <= report.bound[inside] + 1e-12).all()
    assert report.mean < 0.95
    assert abs(report.mean - float(report.recall[inside].mean())) < 1e-12
    means = [float(head[head.isfinite()].mean()) for head in report.recall.unbind(1)]
    assert report.worst_head == pytest.approx(min(means))


def test_all_pairs_of_the_reference_have_a_recall_of_one() -> None:
    q, k, v, _ = make_inputs(1, 2, N, dtype=torch.float32)
    index = build_index(Causal() & Window(40), N, num_heads=2)
    assert audit(q, k, v, index).mean < 0.9
    report = audit(q, k, v, index, reference=index)
    assert report.mean == report.p5 == report.worst_head == 1
    assert report.relative_error == 0


def test_the_seed_draws_the_rows_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = make_inputs(1, 2, N)
    index = build_index(Causal() & Window(40), N, num_heads=2)
    first, again, other = (audit(q, k, v, index, rows=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.rows, again.rows)
    assert not torch.equal(first.rows, other.rows)
    assert len(audit(q, k, v, index, rows=1000).rows) == N
    # The package's name for the function hides the module from a path in a text.
    monkeypatch.setattr(sys.modules[audit.__module__], "_SCORES", 2 * N * 3)
    assert torch.allclose(audit(q, k, v, index, rows=20, seed=1).error, first.error, atol=1e-14)


def test_what_a_row_does_not_see_may_be_nan() -> None:
    q, k, v, _ = make_inputs(2, 2, N, dtype=torch.float32)
    index = build_index(Causal() & Window(40), N, num_heads=2)
    key_mask = torch.ones(2, N, dtype=torch.bool)
    key_mask[0, 30] = False
    clean = audit(q, k, v, index, rows=N, key_mask=key_mask)
    k, v = k.clone(), v.clone()
    k[0, :, 30], v[0, :, 30], v[1, 0, 100], k[1, 1, 120] = torch.nan, torch.nan, torch.inf, torch.nan
    report = audit(q, k, v, index, rows=N, key_mask=key_mask)
    seen = torch.zeros(2, 2, N, dtype=torch.bool)
    seen[1, 0, 100:] = seen[1, 1, 120:] = True
    for name in ("recall", "error", "bound"):
        found, wanted = getattr(report, name), getattr(clean, name)
        assert torch.equal(found.isnan(), seen)
        assert torch.equal(found[~seen], wanted[~seen])


def test_the_interval_holds_what_it_says() -> None:
    q, k, v, _ = make_inputs(1, 40, 600, head_dim=8, dtype=torch.float32, score_scale=3.0)
    index = build_index(Causal() & Window(150), 600, num_heads=40)
    true = audit(q, k, v, index, rows=600).below(0.5)
    assert torch.equal(true.low <= true.share, torch.ones(1, 40, dtype=torch.bool))
    missed = 0
    for seed in range(10):
        found = audit(q, k, v, index, rows=60, seed=seed).below(0.5)
        missed += int(((true.share < found.low) | (true.share > found.high)).sum())
    # At most 5% of 400 miss, and some do: the interval is not the whole line.
    assert 0 < missed <= 20
    every = audit(q, k, v, index, reference=index, rows=59).below(0.9)
    assert every.share.max() == every.low.max() == 0
    assert float(every.high.max()) == pytest.approx(1 - 0.025 ** (1 / 59), rel=1e-9)


def test_invalid_calls_are_refused() -> None:
    q, k, v, _ = make_inputs(1, 2, N)
    index: BlockIndex = build_index(Causal(), N, num_heads=2)
    for options, message in (
        ({"rows": 0}, "rows: expected a positive integer, got 0"),
        ({"key_mask": torch.ones(N, dtype=torch.bool)}, r"key_mask: expected shape \(1, 150\)"),
        ({"reference": build_index(Causal(), N, block=16)}, "reference: expected the lengths"),
    ):
        with refused(message):
            audit(q, k, v, index, **options)
    with refused(r"index: expected an index with n_queries=149, n_keys=150"):
        audit(q[:, :, 1:], k, v, index)
    with refused("recall: expected a number between 0 and 1, got 95"):
        audit(q, k, v, index).below(95)
