"""The old names of adaptive attention: exact over the tiles that the contents choose, and no choice that would leak."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import make_inputs, oracle, relative_error
from test_compat import heads_first
from torch import Tensor

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    PatternQualityAnalyzer,
    SparsePatternConfig,
    SparsePatternGenerator,
    create_adaptive_sparse_multihead_attention,
    create_block_sparse_multihead_attention,
)
from ringtile.adaptive import AdaptiveAttention, Controller, Density, Probe, audit
from ringtile.functional.dilated import dilated_attention
from ringtile.patterns import Blocks, Causal, Dense, Elements, Pattern

SMALL = SparsePatternConfig("adaptive", 0.25, block_size=64)
FIRST = AdaptiveAttention(Probe("first"), Density(0.3), block=32)


def chosen(attention: BlockSparseRingDilatedAttention, number: int = 0) -> Any:
    return attention._last._chosen[number]  # type: ignore[union-attr]


def rule_of(kept: Tensor) -> Pattern:
    """The pairs of a dense mask ``[H, N, M]``, queries aligned to the last key."""
    start = kept.shape[2] - kept.shape[1]
    return Elements(lambda head, query, key: kept[head.expand(torch.broadcast_shapes(head.shape, query.shape)),
                                                  (query - start).clamp(0), key])  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_exact_over_the_tiles_that_the_call_chooses(is_causal: bool) -> None:
    q, k, v, grad_out = make_inputs(1, 2, 700, head_dim=8)
    attention = BlockSparseRingDilatedAttention(sparse_config=SMALL)
    if is_causal:
        attention.enable_adaptive_sparsity(FIRST)
    leaves = [heads_first(x).clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, is_causal=is_causal)
    grads = torch.autograd.grad(out, leaves, heads_first(grad_out))
    index = chosen(attention)
    assert index.block == (32 if is_causal else 64)
    assert 0.2 < index.tile_density < 0.7
    kept = index.to_dense()[0]
    assert not torch.equal(kept[0], kept[1])
    expected = oracle(q, k, v, rule_of(kept), grad_out=grad_out)
    for ours, theirs in zip((out, *grads), (expected.out, *expected.grads.values()), strict=True):
        assert relative_error(heads_first(ours), theirs) < 1e-12
    assert attention.get_memory_info()["memory_reduction"] == pytest.approx(1 - index.tile_density)


@pytest.mark.parametrize("is_causal", [False, True])
def test_all_tiles_of_segments_are_dilated_attention(is_causal: bool) -> None:
    q, k, v, _ = make_inputs(2, 3, 333, 600, head_dim=8)
    mask = torch.rand(2, 600) < 0.7
    config = SparsePatternConfig("adaptive", 1.0, block_size=64)
    attention = BlockSparseRingDilatedAttention([150, 400], [1, 3], config)
    found = attention(*map(heads_first, (q, k, v)), is_causal=is_causal, key_mask=mask)
    expected = dilated_attention(q, k, v, [150, 400], [1, 3], is_causal=is_causal, key_mask=mask)
    assert relative_error(heads_first(found), expected) < 1e-12


def test_each_segment_chooses_for_itself() -> None:
    x = torch.randn(1, 1300, 2, 16)
    attention = BlockSparseRingDilatedAttention([512], [1], SMALL)
    found = attention(x)
    alone = BlockSparseRingDilatedAttention(sparse_config=SMALL)
    parts = [alone(part) for part in x.split(512, 1)]
    assert torch.allclose(found, torch.cat(parts, 1), atol=1e-6)
    whole = [chosen(attention, number).kept_tiles for number in range(2)]
    assert attention.get_memory_info()["theoretical_speedup"] == pytest.approx(2 * 21 * 21 / sum(whole))


def test_a_backward_pass_that_computes_again_attends_over_the_same_tiles() -> None:
    # Another call of this controller would audit other rows, and choose other tiles.
    inputs = [torch.randn(1, 1024, 2, 16) for _ in range(3)]
    found = []
    for checkpointed in (False, True):
        adaptive = AdaptiveAttention(budget=Controller(0.8), block=32)
        attention = BlockSparseRingDilatedAttention(
            use_adaptive_sparsity=adaptive, use_gradient_checkpointing=checkpointed
        )
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert len(attention._last._chosen) == 1  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Causality.


@pytest.mark.parametrize("segments", [{}, {"segment_lengths": [256, 512], "dilation_rates": [1, 2]}])
@pytest.mark.parametrize("adaptive", [True, AdaptiveAttention(Probe("first"), Controller(0.9))])
def test_causal_training_refuses_a_choice_that_sees_the_future(segments: dict[str, Any], adaptive: Any) -> None:
    x = torch.randn(1, 600, 2, 8, requires_grad=True)
    attention = BlockSparseRingDilatedAttention(**segments, use_adaptive_sparsity=adaptive)
    with pytest.raises(ValueError, match=r"scores, budget: .* which training must not see"):
        attention(x, is_causal=True)
    assert attention(x).isfinite().all()
    with torch.no_grad():
        assert attention(x, is_causal=True).isfinite().all()


@pytest.mark.parametrize("segments", [{}, {"segment_lengths": [256, 512], "dilation_rates": [1, 2]}])
def test_what_may_train_sees_no_future(segments: dict[str, Any]) -> None:
    attention = BlockSparseRingDilatedAttention(**segments, use_adaptive_sparsity=FIRST)
    x = torch.randn(1, 700, 2, 8)
    before = attention(x.clone().requires_grad_(), is_causal=True)
    for place in (1, 31, 32, 33, 255, 256, 300, 450, 511, 512, 600, 641, 699):
        later = x.clone()
        later[:, place] += 5
        assert torch.equal(attention(later, is_causal=True)[:, :place], before[:, :place]), place


# Switches.


def test_adaptive_attention_is_switched_on_and_off() -> None:
    attention = create_block_sparse_multihead_attention(32, 4, 0.34, "local_window")
    x = torch.randn(1, 900, 32)
    before = attention(x)[0]
    attention.enable_adaptive_sparsity()
    densities = []
    for ratio in (0.2, 0.6):
        attention.set_sparsity_ratio(ratio)
        assert not attention(x)[0].allclose(before)
        densities.append(1 - attention.get_memory_info()["memory_reduction"])
    assert densities[0] < densities[1] == pytest.approx(0.6, abs=0.1)
    assert copy.deepcopy(attention)(x)[0].equal(attention(x)[0])
    attention.enable_adaptive_sparsity(False)
    attention.set_sparsity_ratio(0.34)
    assert torch.equal(attention(x)[0], before)
    attention.enable_adaptive_sparsity(FIRST)
    assert attention(x)[0].isfinite().all()
    assert chosen(attention.attention).block == 32
    with pytest.raises(ValueError, match="sparsity_ratio: changes nothing beside AdaptiveAttention"):
        attention.set_sparsity_ratio(0.5)


def test_bounds_hold_the_density_of_chosen_tiles() -> None:
    config = SparsePatternConfig("adaptive", 0.1, max_sparsity=0.9, min_sparsity=0.5)
    attention = BlockSparseRingDilatedAttention(sparse_config=config)
    with pytest.warns(UserWarning, match=r"sparsity_ratio=0\.1 is outside of min_sparsity=0\.5"):
        attention(torch.randn(1, 1024, 1, 8))
    assert chosen(attention).tile_density == pytest.approx(0.5)


def test_what_contradicts_is_refused() -> None:
    core, create = BlockSparseRingDilatedAttention, create_adaptive_sparse_multihead_attention
    both: dict[str, Any] = {"quality_threshold": 0.9, "use_adaptive_sparsity": FIRST}
    calls: list[tuple[Any, str]] = [
        (lambda: core(use_adaptive_sparsity="yes"), "enabled: "),  # type: ignore[arg-type]
        (lambda: core(sparse_config=SMALL).enable_adaptive_sparsity(False), "enabled: "),
        (lambda: SparsePatternGenerator(SMALL).generate_pattern(500), "pattern_type: 'adaptive'"),
        (lambda: create(8, 2, quality_threshold=1.0), "quality: "),
        (lambda: create(8, 2, **both), "use_adaptive_sparsity: expected True beside quality_threshold=0.9"),
        (lambda: create(8, 2, pattern_type="local_window"), "pattern_type: "),
    ]
    for call, named in calls:
        with pytest.raises(ValueError, match=f"^{named}"):
            call()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"use_adaptive_sparsity": FIRST, "sparsity_ratio": 0.1},
            r"sparsity_ratio=0\.1 changes nothing: the AdaptiveAttention of use_adaptive_sparsity decides",
        ),
        (
            {"quality_threshold": 0.9, "sparsity_ratio": 0.1},
            r"sparsity_ratio=0\.1 changes nothing: quality_threshold=0\.9 decides",
        ),
        ({"dilation_rates": [1, 2]}, r"dilation_rates=\(1, 2\) changes nothing: pattern_type='adaptive' decides"),
    ],
)
def test_what_another_argument_overrides_is_said(arguments: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        module = create_adaptive_sparse_multihead_attention(8, 2, **arguments)
    assert isinstance(module.attention.adaptive, AdaptiveAttention) == ("dilation_rates" not in arguments)
    assert module(torch.randn(1, 300, 8))[0].isfinite().all()


# Quality.


def test_a_threshold_is_the_attention_that_each_head_keeps() -> None:
    torch.manual_seed(3)
    module = create_adaptive_sparse_multihead_attention(64, 4, quality_threshold=0.9, block_size=64)
    with torch.no_grad():
        module.in_proj_weight.mul_(5)
        kept = []
        for _ in range(6):
            x = torch.randn(1, 1024, 64)
            module(x)
            index = chosen(module.attention)
            assert index.tile_density < 0.95
            q, k, v = (heads_first(y.unflatten(2, (4, 16))) for y in (x @ module.in_proj_weight.T).chunk(3, 2))
            kept.append(audit(q, k, v, index, reference=Dense(), rows=200, seed=77).of_heads)
    assert torch.stack(kept).mean(0).min() >= 0.9 - 0.005
    assert module.attention.adaptive is not None
    assert module.attention.adaptive.report is not None


def test_true_rows_say_what_a_pattern_keeps() -> None:
    q, k, v, _ = make_inputs(1, 2, 300, head_dim=8)
    blocks = torch.rand(2, 5, 5) < 0.6
    blocks |= torch.eye(5, dtype=torch.bool)
    inputs = tuple(heads_first(x).float() for x in (q, k, v))
    for is_causal in (False, True):
        logits = q @ k.mT * 8**-0.5
        allowed = torch.ones(300, 300, dtype=torch.bool)
        allowed = allowed.tril() if is_causal else allowed
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        analyzer = PatternQualityAnalyzer()
        found = analyzer.analyze_pattern_quality(blocks, inputs=inputs, is_causal=is_causal, rows=300)  # type: ignore[arg-type]
        expected = analyzer.analyze_pattern_quality(blocks, weights)
        assert found[:3] == pytest.approx(expected[:3], abs=1e-6)
        rule = Causal() & Blocks(blocks, block=60) if is_causal else Blocks(blocks, block=60)
        exact = weights @ v
        error = (oracle(q, k, v, rule).out - exact).norm() / exact.norm()
        assert found.approximation_error == pytest.approx(error.item(), rel=1e-5)
    few = [analyzer.analyze_pattern_quality(blocks, inputs=inputs, rows=20, seed=seed) for seed in (0, 1)]  # type: ignore[arg-type]
    assert few[0].coverage_ratio != few[1].coverage_ratio
    assert all(0.2 < each.coverage_ratio < 0.9 for each in few)


def test_quality_has_one_reference() -> None:
    x = torch.randn(1, 300, 2, 8)
    pattern, weights = torch.ones(5, 5, dtype=torch.bool), torch.ones(2, 300, 300) / 300
    analyze = PatternQualityAnalyzer().analyze_pattern_quality
    for named, given in (
        ("reference_attention: ", {}),
        ("reference_attention, inputs: ", {"reference_attention": weights, "inputs": (x, x, x)}),
        ("is_causal: ", {"reference_attention": weights, "is_causal": True}),
        ("inputs: ", {"inputs": (x, x[:, :100], x[:, :100])}),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            analyze(pattern, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^inputs: "):
        analyze(pattern.expand(3, 5, 5), inputs=(x, x, x))
