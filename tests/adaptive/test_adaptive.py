"""Scores of tiles, budgets, and attention over the tiles that they choose."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from oracle import kept_pairs, make_inputs, refused, weights_of
from pairs import all_pairs
from torch import Tensor

from ringtile import SparseTransformer, sparse_attention
from ringtile.adaptive import (
    AdaptiveAttention,
    Antidiagonal,
    Blend,
    Box,
    Budget,
    Choice,
    Controller,
    Density,
    Gain,
    Means,
    Probe,
    Recent,
    Rounded,
    Scores,
    Shuffled,
    Sum,
    Threshold,
    TopK,
    TopP,
    View,
    budgets,
    select,
)
from ringtile.adaptive.budgets import gains_of
from ringtile.functional import Relative
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Dense, Documents, GlobalTokens, Pattern, Window, per_head
from ringtile.testing.oracle import attention

BLOCK = 16
drawn = partial(make_inputs, 2, 4, 177, 201, kv_heads=2, dtype=torch.float32)
ALL: list[Scores] = [
    Probe(),
    Probe(1),
    Probe("first"),
    Blend(),
    Blend("mean"),
    Blend(None),
    Box(),
    Box(None),
    Means(),
    Means(None),
    Antidiagonal(4),
    Recent(),
    Shuffled(3),
    Sum(Probe(), Blend()),
    Sum(Probe("first"), Recent()),
    Rounded(),
]
INFORMED = [scores for scores in ALL if not isinstance(scores, Recent | Shuffled)]
SAFE = [scores for scores in ALL if scores.causal_safe]
FULL: list[Budget] = [Density(1.0), TopK(99), TopP(1.0), Threshold(0.0), Gain(0.0)]
RULES: dict[str, Pattern] = {
    "all pairs": Dense(),
    "causal": Causal(),
    "window": Causal() & Window(70),
    "documents": Causal() & Documents([90, 60, 51]),
    "heads": per_head([Causal(), Causal() & Window(40)] * 2),
}


def base_of(rule: Pattern, n_queries: int, n_keys: int, batch: int = 2) -> BlockIndex:
    return build_index(rule, n_queries, n_keys, num_heads=4, batch=batch, block=BLOCK)


def row_of(base: BlockIndex) -> Tensor:
    """The row tile of each query."""
    return (base.start + torch.arange(base.n_queries)) // base.block - base.first_row


def by_tile(weights: Tensor) -> Tensor:
    """Sums over the keys of each tile."""
    n_keys = weights.shape[3]
    return F.pad(weights, (0, -n_keys % BLOCK)).unflatten(3, (-1, BLOCK)).sum(4)


def normalized(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=1e-30)


@pytest.mark.parametrize(("scores", "rule", "masked"), all_pairs(ALL, list(RULES), (False, True)), ids=str)
def test_scores_are_shares_of_the_tiles_of_the_base(scores: Scores, rule: str, masked: bool) -> None:
    q, k, _, _ = drawn()
    base = base_of(RULES[rule], 177, 201)
    key_mask = torch.rand(2, 201) < 0.8 if masked else None
    found = scores(View(q, k, base, key_mask, 0.4))
    assert found.shape == (2, 4, 177 if scores.per_token else base.n_rows, base.n_cols)
    assert found.dtype == torch.float32
    assert (found >= 0).all()
    outside = ~base.tiles if not scores.per_token else ~base.tiles[:, :, row_of(base)]
    assert not found[outside.expand_as(found)].any()
    total = found.sum(-1)
    assert (((total - 1).abs() < 1e-5) | (total == 0)).all()
    assert (total > 0).float().mean() > 0.8


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("rows", [3, "first"])
def test_a_probe_is_the_exact_attention_of_its_rows(rule: Pattern, rows: Any) -> None:
    q, k, _, _ = drawn(score_scale=2.0)
    base, key_mask = base_of(rule, 177, 201), torch.rand(2, 201) < 0.7
    masses = by_tile(weights_of(q, k, kept_pairs(base, q, k, key_mask=key_mask)))
    found = Probe(rows)(View(q, k, base, key_mask))
    of_tile = row_of(base)
    for tile in range(base.n_rows):
        inside = (of_tile == tile).nonzero().flatten()
        parts = [0] if rows == "first" else [(2 * part + 1) * len(inside) // 6 for part in range(3)]
        expected = normalized(masses[:, :, inside[parts]].sum(2))
        assert torch.allclose(found[:, :, tile].double(), expected, atol=1e-6), tile
    # Queries without keys have no part in a mean.
    key_mask = torch.arange(201) >= 60
    masses = by_tile(weights_of(q, k, kept_pairs(base, q, k, key_mask=key_mask.expand(2, -1))))
    some = torch.tensor([[20, 45, 50], [90, 100, 110]])
    live = (masses[:, :, some].sum(4, keepdim=True) > 0.5).sum(3).clamp(min=1)
    means = View(q, k, base, key_mask.expand(2, -1)).exact_masses(some).double()
    assert torch.allclose(means, masses[:, :, some].sum(3) / live, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "n_queries", "n_keys"),
    [*((rule, 177, 201) for rule in RULES.values()), (Causal(), 201, 150), (RULES["heads"], 201, 150)],
    ids=str,
)
def test_rounded_scores_are_the_root_mean_squares_of_all_rows_in_8_bits(
    rule: Pattern, n_queries: int, n_keys: int
) -> None:
    q, k, _, _ = make_inputs(2, 4, n_queries, n_keys, kv_heads=2, dtype=torch.float32, score_scale=2.0)
    base, key_mask = base_of(rule, n_queries, n_keys), torch.rand(2, n_keys) < 0.7
    found = Rounded()(View(q, k, base, key_mask))
    exact = base.leading is None
    steps = [x if exact else (x / (unit := x.abs().amax(3, keepdim=True) / 127)).round() * unit for x in (q, k)]
    rows = normalized(by_tile(weights_of(*steps, kept_pairs(base, q, k, key_mask=key_mask))))
    of_tile = row_of(base)
    for tile in range(base.n_rows):
        own = rows[:, :, of_tile == tile]
        counted = (own.sum(3) > 0).sum(2, keepdim=True).clamp(min=1)
        expected = normalized((own.square().sum(2) / counted).sqrt())
        assert torch.allclose(found[:, :, tile].double(), expected, atol=1e-6 if exact else 4e-3), tile


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule != Dense()], ids=str)
def test_the_default_knows_no_token_after_a_row_of_tiles(rule: Pattern) -> None:
    q, k, _, _ = drawn()
    base = base_of(rule, 177, 201)
    before = Choice().scores(View(q, k, base))
    for row in (0, 4, 9):
        edge = (base.first_row + row + 1) * BLOCK
        queries, keys = q.clone(), k.clone()
        queries[:, :, edge - base.start :], keys[:, :, edge:] = math.nan, math.nan
        after = Choice().scores(View(queries, keys, base))
        assert torch.equal(after[:, :, : row + 1], before[:, :, : row + 1]), row
        # It knows the last token of the row.
        queries[:, :, edge - base.start - 1] += 9
        after = Choice().scores(View(queries, keys, base))
        assert not torch.equal(after[:, :, row], before[:, :, row])


@pytest.mark.parametrize("scores", INFORMED, ids=repr)
def test_autocast_rounds_queries_and_keys_and_no_score(scores: Scores) -> None:
    q, k, v, _ = make_inputs(2, 4, 177, 201, kv_heads=2, dtype=torch.bfloat16)
    rule = RULES["window"]
    index = select(q, k, scores, Density(0.4), base=rule, block=BLOCK)
    attend = AdaptiveAttention(scores, Density(0.4), block=BLOCK)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q.float(), k.float(), v.float(), rule, enable_gqa=True)
    assert torch.equal(out, sparse_attention(q, k, v, index, enable_gqa=True))


def test_what_changes_scores_changes_no_choice() -> None:
    q, k, v, _ = make_inputs(2, 4, 177, 201, dtype=torch.float32)
    index = select(q, k, budget=Density(0.4), is_causal=True, block=BLOCK)
    bias = Relative(3 * torch.randn(4, 50), 20)
    for options in ({"alibi_slopes": torch.rand(4)}, {"softcap": 2.0}, {"sinks": torch.rand(4)}, {"bias": bias}):
        found = AdaptiveAttention(budget=Density(0.4), block=BLOCK)(q, k, v, is_causal=True, **options)
        assert torch.equal(found, sparse_attention(q, k, v, index, **options))


def summary_logits(scores: Blend | Box | Means, q: Tensor, k: Tensor, key_mask: Tensor) -> Tensor:
    """Score of each query with the summary of each tile, float64 ``[B, H, Nq, C]``."""
    pad = -k.shape[2] % BLOCK
    keys = F.pad(k.repeat_interleave(q.shape[1] // k.shape[1], 1).double(), (0, 0, 0, pad)).unflatten(2, (-1, BLOCK))
    real = F.pad(key_mask, (0, pad)).unflatten(1, (-1, BLOCK))[:, None, :, :, None]
    count, rows = real.sum((3, 4)), q.double()
    mean = rows @ (keys.where(real, 0).sum(3) / count.clamp(min=1).unsqueeze(3)).mT
    high, low = keys.where(real, -1e9).amax(3), keys.where(real, 1e9).amin(3)
    box = rows.relu() @ high.mT - (-rows).relu() @ low.mT
    score = {Blend: (mean + box) / 2, Box: box, Means: mean}[type(scores)]
    return score * q.shape[3] ** -0.5 + count.double().log().unsqueeze(2)


@pytest.mark.parametrize("scores", [Blend(), Blend("mean"), Blend(None), Box(), Box(None), Means(None)], ids=repr)
@pytest.mark.parametrize("rule", [RULES["all pairs"], RULES["documents"]], ids=["all pairs", "documents"])
def test_summaries_score_as_they_say(scores: Any, rule: Pattern) -> None:
    q, k, _, _ = drawn()
    base, key_mask = base_of(rule, 177, 201), torch.rand(2, 201) < 0.5
    inside = base.tiles[:, :, row_of(base)]
    if scores.pool is None and rule != Dense():
        # No summary knows a later key.
        position = (base.start + torch.arange(177)) // BLOCK
        inside = inside & (torch.arange(base.n_cols) < position.unsqueeze(1))
    logits = summary_logits(scores, q, k, key_mask).masked_fill(~inside, -math.inf)
    weights = logits.softmax(-1).nan_to_num(0)
    if scores.pool is not None:
        rows = [weights[:, :, row_of(base) == tile] for tile in range(base.n_rows)]
        weights = normalized(torch.stack([x.amax(2) if scores.pool == "max" else x.mean(2) for x in rows], 2))
    assert torch.allclose(scores(View(q, k, base, key_mask)).double(), weights, atol=1e-6)


def test_means_of_queries_score_means_of_keys() -> None:
    q, k, _, _ = make_inputs(1, 4, 201, kv_heads=2, dtype=torch.float32)
    base = base_of(Causal(), 201, 201, 1)
    mean = torch.stack([q[:, :, row_of(base) == tile].mean(2) for tile in range(base.n_rows)], 2)
    logits = summary_logits(Means(None), mean, k, torch.ones(1, 201) > 0).masked_fill(~base.tiles, -math.inf)
    assert torch.allclose(Means()(View(q, k, base)).double(), logits.softmax(-1), atol=1e-6)


def test_a_sum_is_a_weighted_mean() -> None:
    q, k, _, _ = make_inputs(1, 2, 100, dtype=torch.float32)
    view = View(q, k, base_of(Causal(), 100, 100, 1))
    one, two = Probe(4)(view), Blend()(view)
    assert torch.allclose(Sum(Probe(4), Blend(), weights=(3, 1))(view), 0.75 * one + 0.25 * two)
    assert torch.allclose(Sum(Probe(4), Blend())(view), (one + two) / 2)
    assert Sum(Probe(), Blend(), weights=(2, 1)) != Sum(Probe(), Blend())
    assert repr(Sum(Probe(), Blend(), weights=(2, 0.5))) == "Sum(Probe(rows=2), Blend(pool='max'), weights=(2, 0.5))"


def test_antidiagonals_are_summed() -> None:
    q, k, _, _ = make_inputs(1, 2, 64, dtype=torch.float32)
    base = build_index(Dense(), 64, num_heads=2, block=BLOCK)
    products = (q @ k.mT).double().unflatten(3, (-1, 4)).unflatten(2, (-1, 4))
    logits = sum(products[:, :, :, 3 - t, :, t] for t in range(4)) * (16**-0.5 / 4)
    assert isinstance(logits, Tensor)
    expected = logits.softmax(-1).unflatten(3, (-1, 4)).sum(4).unflatten(2, (-1, 4)).sum(3)
    assert torch.allclose(Antidiagonal(4)(View(q, k, base)).double(), normalized(expected), atol=1e-6)
    with refused("stride: expected a divisor of block=16, got 5"):
        Antidiagonal(5)(View(q, k, base))


@pytest.mark.parametrize("scores", INFORMED, ids=repr)
def test_scores_find_a_far_tile_that_all_rows_want(scores: Scores) -> None:
    q, k, _, _ = make_inputs(1, 2, 1024, head_dim=32, dtype=torch.float32)
    wanted = torch.randint(2, 20, (2,))
    for head, tile in enumerate(wanted.tolist()):
        inside = slice(tile * BLOCK, (tile + 1) * BLOCK)
        k[0, head, inside] = 3 + 0.2 * k[0, head, inside]
        q[0, head] = 0.2 * q[0, head] + 0.3
    index = select(q, k, scores, TopK(6), is_causal=True, block=BLOCK)
    kept = index.tiles[0].gather(2, wanted[:, None, None].expand(-1, index.n_rows, 1)).squeeze(2)
    assert kept[:, 24:].float().mean() > 0.95
    blind = select(q, k, Shuffled(), TopK(6), is_causal=True, block=BLOCK)
    by_chance = blind.tiles[0].gather(2, wanted[:, None, None].expand(-1, index.n_rows, 1)).squeeze(2)
    assert by_chance[:, 24:].float().mean() < 0.3


@pytest.mark.parametrize("budget", FULL, ids=str)
@pytest.mark.parametrize("scores", [Rounded(), Blend(None), Sum(Probe("first"), Recent())], ids=repr)
def test_a_full_budget_has_the_bits_of_the_base(scores: Scores, budget: Budget) -> None:
    q, k, v, _ = drawn()
    options: dict[str, Any] = {"key_mask": torch.rand(2, 201) < 0.8, "enable_gqa": True}
    base = base_of(RULES["heads"], 177, 201)
    attend = AdaptiveAttention(scores, budget, block=BLOCK, first=0, local=0)
    assert torch.equal(attend(q, k, v, base, **options), sparse_attention(q, k, v, base, **options))


@st.composite
def maps(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with ties, allowed and forced tiles."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    rows, cols = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    allowed = torch.rand(1, 2, rows, cols, generator=generator) < draw(st.sampled_from([0.3, 1.0]))
    raw = torch.randint(0, draw(st.sampled_from([2, 50])), (2, 2, rows, cols), generator=generator).float()
    return normalized(raw * allowed), allowed, torch.rand(rows, cols, generator=generator) < 0.2


@settings(max_examples=60)
@given(problem=maps(), data=st.data())
def test_budgets_keep_the_best_tiles_of_each_row(problem: tuple[Tensor, Tensor, Tensor], data: Any) -> None:
    scores, allowed, forced = problem
    each = (data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1)))
    share, count = data.draw(st.floats(0.01, 0.99)), data.draw(st.integers(1, 12))
    for budget in (Density(each), Density(each[0]), TopK(count), TopP(share), Threshold(share), Threshold(each)):
        keep = budget.keep(scores, allowed, forced)
        assert keep.shape == scores.shape
        must = (allowed & forced).expand_as(keep)
        free, left, total = keep & ~must, allowed & ~keep, allowed.sum(3).double()
        assert not (keep & ~allowed).any()
        assert not (must & ~keep).any()
        worst = scores.masked_fill(~free, math.inf).amin(3)
        assert (worst >= scores.masked_fill(~left, -math.inf).amax(3)).all()
        if isinstance(budget, Density):
            parts = budget.density if isinstance(budget.density, tuple) else (budget.density,) * 2
            counts = torch.stack([(part * total[0, h] - 1e-9).ceil() for h, part in enumerate(parts)])
            assert torch.equal(keep.sum(3).double(), torch.maximum(counts, must.sum(3)))
        elif isinstance(budget, TopK):
            assert torch.equal(keep.sum(3).double(), torch.maximum(total.clamp(max=count), must.sum(3)))
        elif isinstance(budget, Threshold):
            assert torch.equal(keep, allowed & (must | (scores >= torch.tensor(budget.least).view(-1, 1, 1))))
        else:
            mass, some = (scores * keep).sum(3), scores.sum(3) > 0
            assert (mass >= share - 1e-5)[some].all()
            # Without the tile that crosses, it would be too little.
            assert (mass - worst < share + 1e-5)[some].all()


@settings(max_examples=60)
@given(problem=maps(), least=st.floats(0.001, 0.7), other=st.floats(0.001, 0.7))
def test_a_gain_is_of_a_score_and_of_what_better_tiles_leave(
    problem: tuple[Tensor, Tensor, Tensor], least: float, other: float
) -> None:
    scores, allowed, forced = problem
    keep, gains = Gain((least, other)).keep(scores, allowed, forced), gains_of(scores, allowed, forced)
    for b, h, r in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(scores.shape[2])).tolist():
        row, must, number = scores[b, h, r].double(), allowed[0, h, r] & forced[r], (least, other)[h]
        free = allowed[0, h, r] & ~must
        left = float(row[free].sum())
        for col in sorted(free.nonzero().flatten().tolist(), key=lambda col: (-float(row[col]), col)):
            assert float(gains[b, h, r, col]) == pytest.approx(math.sqrt(float(row[col]) * max(left, 0)), abs=2e-4)
            left -= float(row[col])
        assert torch.equal(keep[b, h, r] & ~free, must)
        # Equal scores are kept together, if the first of them gains enough.
        whole = torch.stack([(row * row[free & (row <= each)].sum()).sqrt()[col] for col, each in enumerate(row)])
        assert not (keep[b, h, r] & free & (whole < number - 1e-6)).any()
        missed = free & ~keep[b, h, r] & (whole >= number + 1e-6)
        if missed.any():
            assert row[missed].max() < 1.03 * row[free & (whole >= number)].min()


def test_gains_of_many_tiles_are_found_without_a_sort() -> None:
    scores = (3 * torch.randn(1, 4, 200, 200)).exp().tril()
    scores = scores / scores.sum(3, keepdim=True)
    allowed, forced = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril(), torch.eye(200, dtype=torch.bool)
    wanted = allowed & (forced | (gains_of(scores, allowed, forced) >= 0.03))
    keep = Gain(0.03).keep(scores, allowed, forced)
    assert not (keep & ~wanted).any()
    assert (wanted & ~keep).sum() < 0.004 * wanted.sum()


def test_gains_are_of_a_row_however_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(Causal() & Window(90), 330, 400)
    scores = torch.rand(2, 3, base.n_rows, base.n_cols).pow(4).masked_fill(~base.tiles, 0)
    forced = torch.rand(base.n_rows, base.n_cols) < 0.1
    keep = Gain((0.05, 0.1, 0.3)).keep(scores, base.tiles, forced)
    monkeypatch.setattr(budgets, "_RUN", 4)
    assert torch.equal(Gain((0.05, 0.1, 0.3)).keep(scores, base.tiles, forced), keep)
    assert 0 < keep.float().mean() < base.tiles.float().mean()


def test_a_budget_by_head_and_forced_tiles_count() -> None:
    q, k, _, _ = make_inputs(1, 2, 320, dtype=torch.float32)
    index = select(q, k, Shuffled(), Density((0.1, 0.9)), base=Dense(), block=BLOCK, first=2, local=1)
    counts = index.tiles.sum(3)[0]
    assert counts[0].tolist() == [2, 3, 4, *[5] * 16, 4]
    assert set(counts[1].tolist()) == {18}
    row, col = torch.arange(20).unsqueeze(1), torch.arange(20)
    assert index.tiles[0][:, (col < 2) | ((row - col).abs() <= 1)].all()


@pytest.mark.parametrize("scores", [Probe(), Blend(None)], ids=repr)
def test_last_queries_and_short_inputs_are_dense(scores: Scores) -> None:
    q, k, _, _ = make_inputs(1, 4, 250, dtype=torch.float32)
    options: dict[str, Any] = {"is_causal": True, "scores": scores, "block": BLOCK}
    index = select(q, k, budget=Density(0.1), last_dense=20, **options)
    pairs = index.to_dense()[0]
    causal = torch.ones(250, 250, dtype=torch.bool).tril()
    assert torch.equal(pairs[:, 230:], causal[230:].expand(4, -1, -1))
    assert (pairs[:, 200:220].sum(2) < 150).all()
    # The same for the queries from position 103 on.
    pairs = select(q[:, :, 103:], k, budget=Density(0.1), last_dense=20, **options).to_dense()[0]
    assert torch.equal(pairs[:, 127:], causal[230:].expand(4, -1, -1))
    assert (pairs[:, 97:117].sum(2) < 150).all()
    assert select(q, k, min_length=251, **options) is build_index(Causal(), 250, num_heads=4, block=BLOCK)
    assert select(q, k, budget=Density(0.1), min_length=250, **options).tile_density < 0.5


def changed(scores: Scores, budget: Budget, start: int, **options: Any) -> int:
    """Count the future tokens, of 13 or more, whose change moves a bit of the output before them."""
    n = 201
    torch.manual_seed(0)
    q, k, v, _ = make_inputs(1, 2, n, dtype=torch.float32, score_scale=3.0)
    attend = AdaptiveAttention(scores, budget, block=BLOCK, first=0, local=0, **options)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q[:, :, start:], k, v, is_causal=True)
        return out

    before, count = run(q, k, v), 0
    # Among them are first and middle rows of tiles, which scores may single out.
    for place in sorted({*range(start + 5, n, 31), *range(56, n, 24)}):
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, :, place] = 4 * torch.randn(x[:, :, place].shape)
        count += not torch.equal(run(*other)[:, :, : place - start], before[:, :, : place - start])
    return count


@pytest.mark.parametrize(
    ("scores", "budget", "start", "last_dense"),
    all_pairs(SAFE, [Density(0.3), TopK(3), TopP(0.7), Threshold(0.2), Gain(0.1)], (0, 35), (0, 20)),
    ids=str,
)
def test_the_future_changes_nothing_where_scores_are_causal_safe(
    scores: Scores, budget: Budget, start: int, last_dense: int
) -> None:
    assert changed(scores, budget, start, last_dense=last_dense) == 0


def test_training_refuses_to_choose_by_the_future() -> None:
    q, k, v, _ = make_inputs(1, 2, 100, dtype=torch.float32)
    q.requires_grad_()
    with refused(r"scores, budget: Rounded\(\) chooses by later tokens, which training"):
        AdaptiveAttention(block=BLOCK)(q, k, v, is_causal=True)
    with refused(r"scores, budget: Controller\(0.9, .* chooses by later tokens"):
        AdaptiveAttention(Probe("first"), Controller(0.9), block=BLOCK)(q, k, v, is_causal=True)
    for options, how in (
        ({}, {"is_causal": False}),
        ({"allow_future": True}, {"is_causal": True}),
        ({"scores": Probe("first")}, {"is_causal": True}),
        ({"scores": Blend(None)}, {"is_causal": True}),
    ):
        AdaptiveAttention(block=BLOCK, **options)(q, k, v, **how).sum().backward()
    with torch.no_grad():
        AdaptiveAttention(block=BLOCK)(q, k, v, is_causal=True)


@pytest.mark.parametrize("scores", ALL, ids=repr)
def test_batch_elements_and_heads_are_alone_and_hidden_keys_may_be_nan(scores: Scores) -> None:
    q, k, v, _ = make_inputs(3, 4, 177, 201, kv_heads=2, dtype=torch.float32)
    key_mask = (torch.rand(3, 201) < 0.8) | (torch.arange(201) < 30)
    options: dict[str, Any] = {"is_causal": True, "key_mask": key_mask, "enable_gqa": True}
    attend = AdaptiveAttention(scores, Density(0.3), block=BLOCK)
    whole = attend(q, k, v, **options)
    for row in range(3):
        alone = attend(*(x[row : row + 1] for x in (q, k, v)), **{**options, "key_mask": key_mask[row : row + 1]})
        assert torch.equal(alone, whole[row : row + 1])
    if not isinstance(scores, Shuffled):
        one = attend(q[:, 2:], k[:, 1:], v[:, 1:], **options)
        assert torch.equal(one, whole[:, 2:])
    poisoned = [x.masked_fill(~key_mask[:, None, :, None], math.nan) for x in (k, v)]
    assert torch.equal(attend(q, *poisoned, **options), whole)
    early = build_index(Causal(), 170, 201, start=0, num_heads=4, batch=3, block=BLOCK)
    options = {"key_mask": key_mask, "enable_gqa": True}
    before = attend(q[:, :, :170], k, v, early, **options)
    # No query keeps the keys from 170 on.
    later = (torch.arange(201) >= 170)[:, None]
    for poison in (math.nan, math.inf):
        poisoned = [x.masked_fill(later, poison) for x in (k, v)]
        after = attend(q[:, :, :170], *poisoned, early, **options)
        if not scores.causal_safe:
            assert (scores(View(q[:, :, :170], poisoned[0], early)).sum(3) > 0.9).all()
        assert after.isfinite().all()
        if scores.causal_safe:
            assert torch.equal(after, before)


PADDED = torch.stack([torch.arange(109) >= 40, torch.arange(109) < 70, abs(torch.arange(109) - 50) < 20])
"""Texts with padding before them, after them and on both sides, whose ends are inside of tiles."""
PADDED_RULES: dict[str, Pattern] = {
    "causal": Causal(),
    "both sides": Window(20),
    "sinks": Causal() & (Window(30) | GlobalTokens(4)),
    "documents": Documents(ids=torch.arange(109) // torch.tensor([[30], [50], [35]]))
    & per_head([Causal(), Causal() & Window(40)] * 2),
}
TIGHT: list[Budget | Controller] = [Density(0.0), TopP(0.01), Gain(1.5), Controller(0.5, rows=16)]


@pytest.mark.parametrize(
    ("scores", "rule", "poison", "holes"),
    all_pairs(INFORMED, list(PADDED_RULES), (0.0, math.nan, math.inf), (False, True)),
    ids=str,
)
def test_padding_takes_no_key_from_a_token(scores: Scores, rule: str, poison: float, holes: bool) -> None:
    clean = make_inputs(3, 4, 109, 109, kv_heads=2, head_dim=8, dtype=torch.float32)[:3]
    key_mask = PADDED & (torch.rand(3, 109) < 0.7) if holes else PADDED
    padding = ~key_mask[:, None, :, None]
    q, k, v = (x.masked_fill(padding, poison) for x in clean)
    base = base_of(PADDED_RULES[rule], 109, 109, batch=3)
    assert torch.equal(*(scores(View(clean[0], x, base, key_mask)) for x in (clean[1], k)))
    found = scores(View(q, k, base, key_mask))
    assert found.isfinite().all()
    pairs = kept_pairs(base, q, k, key_mask=key_mask) & ~padding
    if isinstance(scores, Means | Antidiagonal | Rounded) and not scores.per_token:
        live = F.pad(pairs.any(3), (0, -109 % BLOCK)).unflatten(2, (-1, BLOCK)).any(3)
        assert found.sum(3)[live.expand(-1, 4, -1)].min() > 0.999
    exact, _ = attention(*clean, pairs)
    options: dict[str, Any] = {"key_mask": key_mask, "enable_gqa": True}
    out = AdaptiveAttention(scores, Density(1.0), block=BLOCK, first=0, local=0)(q, k, v, base, **options)
    assert (out.double() - exact).masked_fill(padding, 0).abs().max() < 1e-5
    tile = torch.arange(109) // BLOCK
    forced = base.to_dense() & ((tile < 1) | ((tile - tile[:, None]).abs() <= 1))
    for tight in TIGHT:
        kept = AdaptiveAttention(scores, tight, block=BLOCK).index(q, k, base, key_mask=key_mask)
        assert not (forced & ~kept.to_dense()).any(), tight


@settings(max_examples=20)
@given(problem=maps(), p=st.floats(0.05, 0.99))
def test_a_score_of_nan_is_the_lowest(problem: tuple[Tensor, Tensor, Tensor], p: float) -> None:
    """Scores of yours may make one. No forced tile falls to it."""
    scores, allowed, forced = problem
    spoilt = scores.masked_fill(scores == 0, math.nan)
    for budget in (*FULL, TopK(2), Density(p), TopP(p), Threshold(p / 4), Gain(p / 4)):
        assert torch.equal(budget.keep(spoilt, allowed, forced), budget.keep(scores, allowed, forced)), budget
    gains = gains_of(scores, allowed, forced)
    assert torch.equal(gains_of(spoilt, allowed, forced), gains)
    q, k, _, _ = make_inputs(2, 2, scores.shape[2] * BLOCK, scores.shape[3] * BLOCK, dtype=torch.float32)
    view = View(q, k, build_index(Dense(), *q.shape[2:3], *k.shape[2:3], start=0, num_heads=2, batch=2, block=BLOCK))
    kept = [Controller(0.5, rows=8).keep(view, x, allowed.expand_as(x), forced) for x in (spoilt, scores)]
    assert torch.equal(*kept)


def test_wrong_arguments_are_named() -> None:
    q, k, v, _ = make_inputs(2, 4, 100, kv_heads=2, dtype=torch.float32)
    for options, message in (
        ({"first": -1}, "first: expected an integer of at least 0, got -1"),
        (
            {"scores": Density(0.2)},
            r"scores: expected Scores, such as Probe\(\) or Blend\(\), got Density\(density=0.2\)",
        ),
        ({"budget": 0.2}, r"budget: expected a Budget, such as Density\(0.25\), or a Controller, got 0.2"),
        ({"min_length": 0.5}, "min_length: expected an integer of at least 0, got 0.5"),
        ({"key_mask": torch.ones(2, 99, dtype=torch.bool)}, r"key_mask: expected shape \(2, 100\) on cpu, got"),
        (
            {"base": build_index(Causal(), 99)},
            r"base: expected an index with n_queries=100, n_keys=100, got index.n_queries=99",
        ),
        ({"base": build_index(Causal(), 100), "is_causal": True}, "is_causal: not supported with a BlockIndex"),
        (
            {"base": build_index(Causal(), 100, num_heads=2).restricted(torch.ones(1, 2, 1, 1) > 0)},
            r"base: expected groups \[1 or 2, 1 or 4\]",
        ),
        ({"budget": Density((0.1, 0.2))}, "density: expected one number, or one for each of 4 heads"),
    ):
        with refused(message):
            select(q, k, **options)
    with refused("start: adaptive attention takes"):
        AdaptiveAttention()(q, k, v, enable_gqa=True, start=3)
    with refused("key: expected the query's heads"):
        AdaptiveAttention()(q, k, v)
    for make, message in (
        (lambda: Probe(0), "rows: expected a positive integer or 'first', got 0"),
        (lambda: Blend("sum"), "pool: expected 'max', 'mean' or None, got 'sum'"),
        (lambda: Box("sum"), "pool: expected"),
        (lambda: Means("max"), "pool: expected 'first' or None"),
        (lambda: Antidiagonal(0), "stride: expected a positive integer"),
        (lambda: Sum(), "parts: expected scores"),
        (lambda: Sum(Probe(), Blend(None)), "parts: expected scores that are all per token or all per tile"),
        (lambda: Sum(Probe(), weights=(1, 2)), "weights: expected a positive number for each of 1 parts, got"),
        (lambda: Sum(Probe(), weights=(0,)), "weights: expected a positive number"),
        (lambda: TopK(0), "k: expected a positive integer"),
        (lambda: Density(1.1), "density: expected numbers from 0 to 1, got 1.1"),
        (lambda: TopP(0), "p: expected a number above 0 and at most 1"),
        (lambda: Threshold(-1), "least: expected numbers of at least 0"),
        (lambda: Gain(-1), "least: expected numbers of at least 0"),
        (lambda: Controller(1.0), "quality: expected a number between 0 and 1"),
        (lambda: Controller(0.95, rows=18), "rows: expected at least 19 for quality=0.95, got 18"),
    ):
        with refused(message):
            make()


def test_each_layer_has_its_own_attention_and_nothing_learned_is_shared() -> None:
    sizes: dict[str, Any] = {"rotary": False, "is_causal": True}
    each = [AdaptiveAttention(Probe("first"), Density(0.2), block=BLOCK), sparse_attention]
    model = SparseTransformer(2, 16, 2, attend=each, **sizes)
    assert [layer.attend for layer in model.layers] == each
    assert model(torch.randn(1, 100, 16)).shape == (1, 100, 16)
    with refused("attend: expected one, or one for each of num_layers=3 layers, got 2"):
        SparseTransformer(3, 16, 2, attend=each, **sizes)
    counting = AdaptiveAttention()
    counting.stateful = True
    for attend in (torch.nn.Linear(2, 2), counting):
        with refused("would share what it learns"):
            SparseTransformer(2, 16, 2, attend=attend, **sizes)
        SparseTransformer(1, 16, 2, attend=attend, **sizes)
    SparseTransformer(2, 16, 2, attend=AdaptiveAttention(budget=Controller(0.9)), **sizes)
