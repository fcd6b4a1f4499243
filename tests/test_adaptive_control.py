"""The controller, which holds a quality, and the calibration of a model's heads."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import make_inputs
from torch import Tensor

from ringtile.adaptive import (
    GRID,
    AdaptiveAttention,
    Antidiagonal,
    Blend,
    Calibration,
    Controller,
    Density,
    LossCurves,
    Means,
    Probe,
    Scores,
    Shuffled,
    Sum,
    View,
    allocate,
    audit,
    loss_curves,
    select,
)
from ringtile.adaptive.choice import forced_tiles
from ringtile.adaptive.control import LEVELS
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Pattern, Window

BLOCK, N = 16, 512


def heads_of_many_kinds(batch: int, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of heads from diffuse to sharp, some local, some with a few keys that all want."""
    q, k, _, _ = make_inputs(batch, heads, N, head_dim=16, dtype=torch.float32)
    q = q + 2 * torch.randn(batch, heads, N // BLOCK, 16).repeat_interleave(BLOCK, 2)
    sharp = torch.linspace(0.2, 5, heads).view(1, heads, 1, 1)
    place = torch.arange(N).float() / N * math.tau
    wave = 4 * torch.stack([f(place * turn) for turn in (1, 3, 9, 20) for f in (torch.sin, torch.cos)], 1)
    local = (torch.arange(batch) % 2).view(batch, 1, 1, 1)
    q[..., :8] += local * wave
    k[..., :8] += local * wave
    k[:, ::3, ::61] *= 3
    return q * sharp, k


def parts_of(
    controller: Controller, q: Tensor, k: Tensor, base: BlockIndex, found: Tensor
) -> tuple[tuple[Tensor, Tensor], Any]:
    arguments = View(q, k, base), found, base.tiles, forced_tiles(base, 1, 1)
    return controller._audit(*arguments), arguments


@pytest.mark.parametrize(
    ("scores", "quality"), [(Sum(Probe(), Blend()), 0.95), (Probe(), 0.9), (Means(), 0.9), (Shuffled(), 0.95)], ids=repr
)
def test_the_target_is_held_on_rows_that_were_not_audited(scores: Scores, quality: float) -> None:
    batch, heads, draws = 8, 16, 40
    q, k = heads_of_many_kinds(batch, heads)
    base = build_index(Causal(), N, num_heads=heads, block=BLOCK)
    found = scores(View(q, k, base))
    (lost, count), _ = parts_of(Controller(quality, rows=N), q, k, base, found)
    assert (count == N).all()
    realized, density = torch.zeros(batch, heads, dtype=torch.float64), torch.zeros(batch, heads, dtype=torch.float64)
    for seed in range(draws):
        controller = Controller(quality, rows=64, seed=seed)
        (used, some), arguments = parts_of(controller, q, k, base, found)
        assert (some == 64).all()
        chosen = controller.budget(*arguments).density
        level = torch.searchsorted(torch.tensor(LEVELS, dtype=torch.float64), chosen)
        rest = (lost - used).gather(2, level.unsqueeze(2)).squeeze(2) / (N - 64)
        realized += (1 - rest) / draws
        density += chosen / draws
    assert realized.min() > quality - 0.005
    smallest = torch.tensor(LEVELS, dtype=torch.float64)[(lost / N <= 1 - quality).int().argmax(2)]
    assert (density - smallest).mean() < (0.10 if quality == 0.95 else 0.06)
    assert smallest.min() < 0.3 < 0.6 < smallest.max() or isinstance(scores, Shuffled | Means)


def test_a_call_reports_what_it_chose_and_the_audit_agrees() -> None:
    q, k = heads_of_many_kinds(2, 4)
    attend = AdaptiveAttention(budget=Controller(0.9, rows=N), block=BLOCK)
    assert attend.report is None
    attend(q, k, k, is_causal=True)
    assert attend.report is not None
    assert attend.report.density.shape == (2, 4)
    some = Controller(0.9)
    first, again = (select(q, k, budget=some, is_causal=True, block=BLOCK).tiles for _ in range(2))
    assert torch.equal(first, again)
    index = select(q, k, budget=Controller(0.9, rows=N), is_causal=True, block=BLOCK)
    recall = audit(q, k, k, index, rows=N).recall.mean(2)
    assert torch.allclose(recall, attend.report.recall, atol=1e-6)
    assert (recall > 0.9).all()
    assert "heads dense" in repr(attend.report)


def test_a_head_that_nothing_serves_is_dense_and_named() -> None:
    q, k = heads_of_many_kinds(1, 4)
    q[:, 1] = 0
    controller = Controller(0.99, rows=99)
    index = select(q, k, budget=controller, is_causal=True, block=BLOCK)
    assert controller.report is not None
    assert bool(controller.report.dense[0, 1])
    assert torch.equal(index.tiles[0, 1], torch.ones(32, 32, dtype=torch.bool).tril())
    short = Controller(0.95)
    select(q[:, :, :15], k[:, :, :15], budget=short, is_causal=True, block=BLOCK)
    assert short.report is not None
    # 15 rows cannot prove a dropped mass of 0.05.
    assert short.report.dense.all()


def test_batch_elements_have_densities_of_their_own() -> None:
    q, k = heads_of_many_kinds(3, 4)
    controller = Controller(0.9)
    select(q, k, budget=controller, is_causal=True, block=BLOCK)
    whole = controller.report
    alone = Controller(0.9)
    select(q[1:2], k[1:2], budget=alone, is_causal=True, block=BLOCK)
    assert whole is not None
    assert alone.report is not None
    assert torch.equal(alone.report.density, whole.density[1:2])


def test_offline_densities_come_from_the_calls_before_and_stay() -> None:
    q, k = heads_of_many_kinds(1, 4)
    controller = Controller(0.9, "offline", rows=128)
    with pytest.raises(ValueError, match="mode: expected calls with fitting=True"):
        select(q, k, budget=controller, is_causal=True, block=BLOCK)
    controller.fitting = True
    for _ in range(2):
        index = select(q, k, budget=controller, is_causal=True, block=BLOCK)
        assert index.tile_density == 1
    controller.fitting = False
    other, keys = heads_of_many_kinds(2, 4)
    select(other, keys, budget=controller, is_causal=True, block=BLOCK)
    first = controller.report
    select(q, k, budget=controller, is_causal=True, block=BLOCK)
    assert first is not None
    assert controller.report is not None
    assert torch.equal(first.density, controller.report.density)
    assert first.density.shape == (1, 4)
    assert (first.density < 1).any()
    q.requires_grad_()
    select(q, k, Probe("first"), controller, is_causal=True, block=BLOCK)


def test_running_densities_come_from_earlier_calls_and_warn() -> None:
    q, k = heads_of_many_kinds(1, 4)
    controller = Controller(0.9, "running")
    assert select(q, k, budget=controller, is_causal=True, block=BLOCK).tile_density == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(q, k, budget=controller, is_causal=True, block=BLOCK).tile_density < 1
    with pytest.warns(UserWarning, match=r"heads \[.*3.*\] keep less than 0.9 of their attention in this call"):
        select(0.05 * q, k, budget=controller, is_causal=True, block=BLOCK)


def dense_curves(
    q: Tensor, k: Tensor, v: Tensor, base: BlockIndex, scores: Scores, rows: Tensor, weights: Tensor, output: Tensor
) -> LossCurves:
    """The same by one index per density, in float64."""
    heads = q.shape[1]
    pairs = base.to_dense()
    keys, values = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    logits = (q.double() @ keys.mT * q.shape[3] ** -0.5).masked_fill(~pairs, -math.inf)
    exact = logits.softmax(-1)
    outs = exact @ values
    parts = output.double().unflatten(1, (heads, -1))
    whole = torch.einsum("bhnd,ehd->bne", outs, parts).square().sum(2)[:, rows]
    share = weights.double() / weights.double().sum()
    missed, error, tiles = [], [], []
    for density in GRID:
        index = select(q, k, scores, Density(density), base=base)
        kept = index.to_dense() & pairs
        missed.append(((exact * ~kept).sum(-1)[:, :, rows] * share).sum(2).mean(0))
        sparse = logits.masked_fill(~kept, -math.inf).softmax(-1) @ values
        wrong = torch.einsum("bhnd,ehd->bhne", sparse - outs, parts).square().sum(3)[:, :, rows]
        error.append((wrong * share).sum(2).mean(0) / (whole * share).sum(1).mean())
        tiles.append(int(index.tiles.sum()) / int(base.tiles.expand_as(index.tiles).sum()))
    return LossCurves(torch.tensor(tiles).double(), torch.stack(missed, 1), torch.stack(error, 1))


@pytest.mark.parametrize("scores", [Sum(Probe(), Blend()), Blend(None)], ids=repr)
@pytest.mark.parametrize("rule", [Causal(), Causal() & Window(150)], ids=repr)
def test_curves_are_those_of_dense_attention(scores: Scores, rule: Pattern) -> None:
    q, k, v, _ = make_inputs(2, 4, 230, kv_heads=2, value_dim=8, dtype=torch.float32, score_scale=2.0)
    base = build_index(rule, 230, num_heads=4, batch=2, block=BLOCK)
    rows, weights, output = torch.randperm(230)[:40].sort().values, torch.rand(40), torch.randn(20, 32)
    found = loss_curves(View(q, k, base), v, scores, rows, weights=weights, output=output)
    expected = dense_curves(q, k, v, base, scores, rows, weights, output)
    assert torch.allclose(found.missed, expected.missed, atol=1e-6)
    assert torch.allclose(found.error, expected.error, rtol=1e-4, atol=1e-6)
    if not scores.per_token:
        assert torch.allclose(found.tiles, expected.tiles, atol=1e-6)
    assert (found.missed.diff() <= 1e-6).all()
    assert found.missed[:, 0].min() > 0.05
    with pytest.raises(ValueError, match="rows: expected numbers of queries below 230"):
        loss_curves(View(q, k, base), v, scores, torch.tensor([230]))


def test_hidden_keys_count_for_no_curve() -> None:
    q, k, v, _ = make_inputs(1, 2, 200, dtype=torch.float32)
    base, key_mask = build_index(Causal(), 200, num_heads=2, block=BLOCK), torch.arange(200)[None] >= 30
    rows = torch.arange(0, 200, 9)
    found = loss_curves(View(q, k, base, key_mask), v, Probe(), rows)
    keys, values = (x.masked_fill(~key_mask[:, None, :, None], math.nan) for x in (k, v))
    again = loss_curves(View(q, keys, base, key_mask), values, Probe(), rows)
    for x, y in zip(found, again, strict=True):
        assert torch.equal(x, y)
        assert x.isfinite().all()


def test_allocation_is_the_best_of_all_choices() -> None:
    tiles = torch.tensor(GRID, dtype=torch.float64)
    steep = torch.tensor([[1.0], [0.3], [2.0]])
    missed = steep * (1 - tiles) ** torch.tensor([[2.0], [4.0], [1.5]])
    curves = [LossCurves(tiles, missed[:2], missed[:2]), LossCurves(tiles, missed[2:], missed[2:])]
    for density in (0.1, 0.5):
        found = [x for layer in allocate(curves, density) for x in layer]
        assert sum(found) / 3 == pytest.approx(density, abs=1e-6)

        def loss(densities: tuple[float, ...]) -> float:
            where = [torch.searchsorted(tiles, torch.tensor(x, dtype=torch.float64)).clamp(1, 17) for x in densities]
            parts = []
            for head, (x, right) in enumerate(zip(densities, where, strict=True)):
                a, b = tiles[right - 1], tiles[right]
                parts.append(torch.lerp(missed[head, right - 1], missed[head, right], (x - a) / (b - a)))
            return float(sum(parts))

        best = min(loss(choice) for choice in itertools.product(GRID, repeat=3) if sum(choice) / 3 <= density + 1e-9)
        assert loss(tuple(found)) <= best + 1e-9


def test_heads_that_need_more_get_more_and_the_mean_is_kept() -> None:
    q, k = heads_of_many_kinds(1, 8)
    v = torch.randn(1, 8, N, 16)
    base, rows = build_index(Causal(), N, num_heads=8, block=BLOCK), torch.randperm(N)[:128].sort().values
    curves = loss_curves(View(q, k, base), v, Probe(), rows)
    for density in (0.25, 0.5):
        even = select(q, k, Probe(), Density(density), is_causal=True, block=BLOCK)
        (found,) = allocate([curves], even.tile_density, "recall")
        assert max(found) - min(found) > 0.2
        index = select(q, k, Probe(), Density(found), is_causal=True, block=BLOCK)
        assert index.tile_density == pytest.approx(even.tile_density, abs=0.01)
        kept = [audit(q, k, v, x, rows=N).mean for x in (index, even)]
        assert kept[0] > kept[1] + 0.01
    recall = allocate([curves], 0.25, "recall")
    assert recall != allocate([curves], 0.25, "error")
    for arguments, message in (
        (([curves], 1.5), "density, curves: expected a number from 0 to 1"),
        (([], 0.5), "density, curves"),
        (([curves], 0.5, "loss"), "objective: expected 'recall\\+error', 'recall' or 'error'"),
    ):
        with pytest.raises(ValueError, match=message):
            allocate(*arguments)


def test_a_calibration_is_stored_and_refuses_another_model(tmp_path: Path) -> None:
    tiles = torch.tensor(GRID, dtype=torch.float64)
    curve = LossCurves(tiles, torch.rand(2, 18).double(), torch.rand(2, 18).double())
    scores = Sum(Probe(3), Antidiagonal(4))
    facts = {"name": "tiny", "layers": 1, "heads": 2}
    before = Calibration(facts, scores, 32, 2, 1, (curve,), {"tokens": 4096})
    path = tmp_path / "budgets.json"
    before.save(path)
    assert [child.name for child in tmp_path.iterdir()] == ["budgets.json"]
    after = Calibration.load(path)
    assert (after.model, after.scores, after.block, after.first, after.local) == (facts, scores, 32, 2, 1)
    assert after.text == {"tokens": 4096}
    assert all(torch.equal(x, y) for x, y in zip(after.curves[0], curve, strict=True))
    (attend,) = after.attention(0.3, min_length=512)
    choice = attend.choice
    assert (choice.scores, choice.block, choice.first, choice.min_length) == (scores, 32, 2, 512)
    assert choice.budget == Density(allocate([curve], 0.3)[0])
    after.check(facts)
    with pytest.raises(ValueError, match="calibration: it is of a model with heads=2, got 9"):
        after.check({**facts, "heads": 9})
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match=r"calibration: expected a file of Calibration.save in '.*': format 7"):
        Calibration.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="calibration: expected a file"):
        Calibration.load(path)

    class Own(Scores):
        def __call__(self, *arguments: Any, **options: Any) -> Tensor:
            return F.pad(torch.zeros(1), (0, 1))

    with pytest.raises(ValueError, match=r"scores: expected those of ringtile\.adaptive"):
        Calibration(facts, Own(), 32, 1, 1, (curve,)).save(path)
