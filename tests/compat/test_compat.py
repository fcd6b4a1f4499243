"""`dilated_attention_pytorch`: the old names compute what they say, and every argument of theirs does something."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import pickle
import re
import sys
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import make_inputs, oracle, relative_error
from pairs import all_pairs
from torch import Tensor, nn

import dilated_attention_pytorch.attention
import ringtile.patterns
from dilated_attention_pytorch import (
    BlockSparseOptimized,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseTorchSparse,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    PatternConfig,
    PatternQualityAnalyzer,
    PatternType,
    PatternVisualizer,
    PersistentPatternCache,
    RingAttentionConfig,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    SparsePatternConfig,
    SparsePatternGenerator,
    create_adaptive_sparse_multihead_attention,
    create_block_sparse_multihead_attention,
    hierarchical_sparse_attention,
    pattern_statistics,
)
from dilated_attention_pytorch.generator import count_tiles
from ringtile import sparse_attention
from ringtile.functional.dilated import dilated_attention
from ringtile.index import build_index
from ringtile.patterns import BlockDilated, Blocks, Causal, Dense, GlobalTokens, Pattern, Window
from ringtile.tools import doctor

ROOT = Path(__file__).parents[2]
OLD_PATHS = {
    "dilated_attention_pytorch": (
        "BlockSparseRingDilatedAttention BlockSparseRingMultiheadDilatedAttention BlockSparseOptimized "
        "BlockSparseTorchSparse RingDilatedAttentionV2 RingDilatedAttentionProduction RingAttentionConfig "
        "ImprovedDilatedAttention ImprovedMultiheadDilatedAttention SparsePatternConfig PersistentPatternCache "
        "hierarchical_sparse_attention create_block_sparse_multihead_attention "
        "create_adaptive_sparse_multihead_attention"
    ),
    "dilated_attention_pytorch.sparse_pattern_utils": (
        "PatternConfig SparsePatternGenerator PatternVisualizer PatternQualityAnalyzer pattern_statistics PatternType "
        "PatternMetrics analyze_pattern_statistics"
    ),
}
TOO_SHORT = pytest.mark.filterwarnings("ignore:dilation_rates=", "ignore:sparsity_ratio=.* cannot be reached")
"""The lengths are small here, and the ratio and the rates have no room: warnings say so."""
SEGMENTS = {"segment_lengths": [128, 256], "dilation_rates": [1, 2]}


@pytest.mark.parametrize("path", OLD_PATHS)
def test_the_old_import_path_serves_the_same_names(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "compat"))
    module = importlib.import_module(path)
    for name in OLD_PATHS[path].split():
        assert getattr(module, name) is getattr(dilated_attention_pytorch, name)


# What is computed.

CONFIGS = {
    "window": SparsePatternConfig("local_window", local_window_size=90),
    "window of a density": SparsePatternConfig("local_window", 0.25),
    "global": SparsePatternConfig("global_local", local_window_size=60, global_tokens=5),
    "global of a density": SparsePatternConfig("global_local", 0.3, global_tokens=5),
    "dilated": SparsePatternConfig("dilated_sparse", dilation_rates=[1, 3], block_size=64),
    "dilated of a density": SparsePatternConfig("dilated_sparse", 0.4, dilation_rates=[1, 2]),
}
RULES = {"window": Window(45), "global": Window(30) | GlobalTokens(5)}


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def with_grads(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad_out: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.parametrize(("config", "is_causal", "n_tokens"), all_pairs(list(CONFIGS), [False, True], [7, 333]))
@TOO_SHORT
def test_attention_is_that_of_the_rule(config: str, is_causal: bool, n_tokens: int) -> None:
    q, k, v, grad_out = make_inputs(2, 2, n_tokens, head_dim=8)
    attention = BlockSparseRingDilatedAttention(sparse_config=CONFIGS[config])
    rule = attention.pattern_generator.rule(n_tokens, is_causal=is_causal)
    if config in RULES:
        assert rule == (Causal() & RULES[config] if is_causal else RULES[config])
    assert not isinstance(rule, Dense)
    inputs = tuple(map(heads_first, (q, k, v)))
    found = with_grads(lambda *x: attention(*x, is_causal=is_causal), inputs, heads_first(grad_out))
    expected = oracle(q, k, v, rule, grad_out=grad_out)
    for ours, theirs in zip(found, (expected.out, *expected.grads.values()), strict=True):
        assert relative_error(heads_first(ours), theirs) < 1e-12


def test_compiling_leaves_the_solver_out_of_the_graph() -> None:
    attention = BlockSparseRingDilatedAttention(sparse_config=SparsePatternConfig("local_window", 0.75))
    expected = attention(X)
    before = attention.pattern_generator.pattern_cache.solved.cache_info()
    found = torch.compile(attention, backend="eager")(X)
    after = attention.pattern_generator.pattern_cache.solved.cache_info()
    torch.compiler.reset()
    assert torch.equal(found, expected)
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_tokens", [100, 701])
def test_inside_segments_the_rule_applies_to_dilated_places(n_tokens: int, is_causal: bool) -> None:
    q, k, v, grad_out = make_inputs(1, 3, n_tokens, head_dim=8)
    attention = BlockSparseRingDilatedAttention(**SEGMENTS, sparse_config=CONFIGS["window"])
    inputs = tuple(map(heads_first, (q, k, v)))
    found = with_grads(lambda *x: attention(*x, is_causal=is_causal), inputs, heads_first(grad_out))
    expected = with_grads(
        lambda *x: dilated_attention(
            *x, [128, 256], [1, 2], pattern=Window(45), is_causal=is_causal, backend="reference"
        ),
        (q, k, v),
        grad_out,
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(heads_first(ours), theirs) < 1e-12


def test_the_longnet_class_keeps_all_pairs_of_a_segment() -> None:
    # The default pattern of the other classes leaves out three of seven tiles away from the diagonal.
    q, k, v, _ = make_inputs(1, 2, 900, head_dim=8)
    expected = dilated_attention(q, k, v, [128, 256], [1, 2])
    assert (
        relative_error(heads_first(RingDilatedAttentionV2(**SEGMENTS)(*map(heads_first, (q, k, v)))), expected) < 1e-12
    )
    # One segment of rate 1 is dense attention over the tokens, not over the heads.
    out = RingDilatedAttentionV2([900], [1])(*map(heads_first, (q, k, v)))
    assert relative_error(heads_first(out), oracle(q, k, v, Dense()).out) < 1e-12


def test_cross_attention_and_key_masks() -> None:
    q, k, v, _ = make_inputs(2, 2, 100, 633, head_dim=8)
    mask = torch.rand(2, 633) < 0.5
    attention = BlockSparseRingDilatedAttention(sparse_config=SparsePatternConfig("local_window", 0.6))
    rule = attention.pattern_generator.rule(100, 633, is_causal=True)
    # The queries lie in one row of five tiles.
    assert build_index(rule, 100, 633).kept_tiles == 3
    found = attention(*map(heads_first, (q, k, v)), is_causal=True, key_mask=mask)
    assert relative_error(heads_first(found), oracle(q, k, v, rule, key_mask=mask).out) < 1e-12


def test_hierarchical_attention_takes_blocks_and_rules() -> None:
    q, k, v, _ = make_inputs(1, 2, 200, head_dim=8)
    blocks = torch.rand(2, 4, 4) < 0.5
    tokens = tuple(map(heads_first, (q, k, v)))
    for given, block_size, rule in ((blocks, 50, Blocks(blocks, block=50)), (Window(20), 128, Window(20))):
        found = hierarchical_sparse_attention(*tokens, given, is_causal=True, block_size=block_size)
        assert relative_error(heads_first(found), oracle(q, k, v, Causal() & rule).out) < 1e-12
    with pytest.raises(ValueError, match="block_size"):
        hierarchical_sparse_attention(*tokens, Window(20), block_size=64)


def test_multihead_of_all_pairs_is_that_of_torch() -> None:
    torch_module = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    ours = create_block_sparse_multihead_attention(32, 4, 1.0, dtype=torch.float64)
    ours.load_state_dict(torch_module.state_dict())
    torch_module.load_state_dict(ours.state_dict())
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    padding = torch.arange(50) >= torch.tensor([[50], [33]])
    for average in (True, False):
        options = {"key_padding_mask": padding, "need_weights": True, "average_attn_weights": average}
        for found, expected in zip(ours(x, x, x, **options), torch_module(x, x, x, **options), strict=True):
            assert found.allclose(expected, rtol=1e-12, atol=1e-12)
    assert ours(x)[1] is None
    assert torch.equal(ours(x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("segments", [{}, SEGMENTS])
def test_multihead_weights_are_those_of_the_output(segments: dict[str, Any]) -> None:
    module = BlockSparseRingMultiheadDilatedAttention(
        32, 4, sparse_config=CONFIGS["window"], use_layer_norm=True, dtype=torch.float64, **segments
    )
    x = torch.randn(1, 300, 32, dtype=torch.float64)
    out, weights = module(x, need_weights=True, average_attn_weights=False, is_causal=True)
    assert torch.equal(weights.tril(), weights)
    assert weights.sum(-1).allclose(torch.ones((), dtype=torch.float64))
    value = nn.functional.linear(x, module.in_proj_weight[64:], module.in_proj_bias[64:])
    mixed = (weights @ value.unflatten(-1, (4, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)
    assert module.out_proj(module.layer_norm(mixed)).allclose(out, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("segments", [{}, SEGMENTS])
def test_attention_returns_its_weights_in_blocks(segments: dict[str, Any]) -> None:
    """Where the config keeps all pairs, the weights are those of a dense softmax, and always they give the output."""
    x = torch.randn(3, 1, 300, 2, 8, dtype=torch.float64).unbind()
    for config in (CONFIGS["window"], SparsePatternConfig(sparsity_ratio=1.0)):
        module = BlockSparseRingDilatedAttention(sparse_config=config, **segments)
        out, blocks = module(*x, True, True)
        assert torch.equal(out, module(*x, is_causal=True))
        weights = torch.zeros(blocks["shape"], dtype=torch.float64)
        for (row, column), values in zip(blocks["block_indices"], blocks["block_values"], strict=True):
            first, left = 128 * row, 128 * column
            weights[:, :, first : first + values.shape[2], left : left + values.shape[3]] = values
        assert (weights @ x[2].transpose(1, 2)).transpose(1, 2).allclose(out, rtol=1e-10, atol=1e-12)
    assert (blocks["block_size"], blocks["num_blocks"]) == (128, (3, 3))
    assert all(column <= row for row, column in blocks["block_indices"])
    if not segments:
        scores = torch.einsum("bnhd,bmhd->bhnm", *x[:2]) / 8**0.5
        scores.masked_fill_(torch.ones(300, 300).triu(1).bool(), -math.inf)
        assert weights.allclose(scores.softmax(-1), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=r"return_attention_weights: expected at most 16,777,216 weights, got"):
        module(torch.randn(1, 5000, 1, 8), return_attention_weights=True)
    with pytest.raises(ValueError, match=r"query: expected four dimensions"):
        module(x[0][0], return_attention_weights=True)


def test_an_attention_mask_joins_the_pattern_and_is_refused_in_segments() -> None:
    module = create_block_sparse_multihead_attention(32, 4, None, "local_window", local_window_size=90)
    mask = torch.rand(100, 100) < 0.3
    x = torch.randn(1, 100, 32)
    _, weights = module(x, attn_mask=mask, need_weights=True)
    kept = Window(45).allowed(torch.tensor(0), torch.arange(100)[:, None], torch.arange(100))
    assert torch.equal(weights[0] > 0, kept & ~mask)
    with pytest.raises(ValueError, match="segment_lengths"):
        BlockSparseRingMultiheadDilatedAttention(32, 4, **SEGMENTS)(x, attn_mask=mask)


def test_key_without_value_is_refused() -> None:
    x = torch.randn(1, 20, 32)
    for module, tokens in (
        (create_block_sparse_multihead_attention(32, 4), x),
        (BlockSparseRingDilatedAttention(), x.unflatten(-1, (4, 8))),
    ):
        for pair in ((tokens, None), (None, tokens)):
            with pytest.raises(ValueError, match="expected key and value, or neither"):
                module(tokens, *pair)
    with pytest.raises(ValueError, match=r"query: expected four dimensions \[B, N, H, D\]"):
        BlockSparseRingDilatedAttention()(x)


# Densities.


def generated(config: SparsePatternConfig, n_tokens: int, is_causal: bool) -> float:
    """The density of the tiles that the rule of a configuration computes."""
    return build_index(SparsePatternGenerator(config).rule(n_tokens, is_causal=is_causal), n_tokens).tile_density


KINDS = ["local_window", "dilated_sparse", "global_local"]


@TOO_SHORT
@pytest.mark.parametrize(
    ("kind", "ratio", "n_tokens", "is_causal"),
    all_pairs(KINDS, [0.5, 0.25, 0.1], [1024, 4096, 16384], [False, True]),
)
def test_the_ratio_is_the_density_of_tiles(kind: str, ratio: float, is_causal: bool, n_tokens: int) -> None:
    found = generated(SparsePatternConfig(kind, ratio), n_tokens, is_causal)
    # Every window of whole tiles, counted on a grid of them.
    rows = n_tokens // 128
    distance = (torch.arange(rows)[:, None] - torch.arange(rows)).abs()
    allowed = torch.ones(rows, rows).double()
    allowed = allowed.tril() if is_causal else allowed
    touched = torch.zeros(rows, rows, dtype=torch.bool)
    if kind == "global_local":
        touched[0] = touched[:, 0] = True
    reachable = [((((distance <= reach) | touched) * allowed).sum() / allowed.sum()).item() for reach in range(rows)]
    nearest = min(abs(density - ratio) for density in reachable)
    if kind == "dilated_sparse":
        # A further reach adds up to five diagonals, and the window beside them fills up what they leave.
        assert abs(found - ratio) <= max(nearest, 0.04)
    else:
        assert abs(found - ratio) == pytest.approx(nearest)
    assert abs(found - ratio) <= max(0.13 * ratio, 1 / rows, reachable[0] - ratio)


@TOO_SHORT
def test_a_tenth_is_what_the_promise_says() -> None:
    densities = {
        kind: [round(generated(SparsePatternConfig(kind, 0.1), n_tokens, False), 3) for n_tokens in (1024, 4096, 16384)]
        for kind in ("local_window", "dilated_sparse", "global_local")
    }
    assert densities == {
        "local_window": [0.125, 0.092, 0.099],
        "dilated_sparse": [0.125, 0.092, 0.094],
        "global_local": [0.344, 0.092, 0.099],
    }


@TOO_SHORT
def test_with_segments_the_ratio_is_the_density_over_all_of_them() -> None:
    segments = ([1024, 3520, 9000], [1, 2, 3])

    def density(rule: Pattern) -> float:
        kept = dense = 0
        for head, (length, rate) in product(range(2), zip(*segments, strict=True)):
            for begin in range(0, 8065, length):
                index = build_index(rule, len(range(begin + head % rate, min(begin + length, 8065), rate)))
                kept, dense = kept + index.kept_tiles, dense + index.allowed_tiles
        return kept / dense

    # The last 1,025 tokens are kept by the second branch as 513 by one head, five tiles, and 512 by the other.
    x = torch.randn(1, 8065, 2, 8)
    for kind, ratio in (("local_window", 0.3), ("dilated_sparse", 0.5)):
        attention = BlockSparseRingDilatedAttention(*segments, SparsePatternConfig(kind, ratio))
        attention(x)
        rule, problems, *_ = attention._last
        kept, dense = count_tiles(rule, problems, is_causal=False)
        assert kept / dense == pytest.approx(density(rule), rel=1e-12)
        near = [BlockDilated([1], reach) for reach in range(8)] if kind == "local_window" else [BlockDilated([1, 2], 1)]
        assert abs(density(rule) - ratio) <= min(abs(density(other) - ratio) for other in near)


@TOO_SHORT
def test_blocks_are_used_as_far_as_they_fit() -> None:
    def rule(ratio: float, n_tokens: int) -> str:
        return repr(SparsePatternGenerator(SparsePatternConfig(sparsity_ratio=ratio)).rule(n_tokens))

    assert rule(0.25, 16384) == "block_dilated([1], 7) | block_dilated([1, 2, 4, 8, 16], 6)"
    with pytest.warns(UserWarning, match=r"room for at most the rates \[1, 2, 4\]"):
        assert rule(0.25, 4096) == "block_dilated([1, 2, 4], 2)"
    with pytest.warns(UserWarning, match=r"room for at most the rates \[1\]"):
        assert rule(0.1, 4096) == "block_dilated([1], 1)"


def test_a_density_that_cannot_be_reached_is_said_with_the_nearest() -> None:
    attention = BlockSparseRingDilatedAttention(sparse_config=SparsePatternConfig("global_local", 0.05))
    x = torch.randn(1, 500, 1, 8)
    with pytest.warns(UserWarning, match="sparsity_ratio=0.05 cannot be reached by global_local over 500 .* 0.625"):
        attention(x)
    # The first row and column of four by four tiles, and the diagonal; solved once, and said once.
    attention(x)
    assert attention.get_memory_info()["memory_reduction"] == 1 - 10 / 16


def test_bounds_hold_the_density() -> None:
    def density(*ratio: float, **bounds: float) -> float:
        return generated(SparsePatternConfig("local_window", *ratio, **bounds), 8192, False)

    with pytest.warns(UserWarning, match="0.2 is used"):
        assert density(0.1, min_sparsity=0.2) == density(0.2) == pytest.approx(0.2, rel=0.1)
    with pytest.warns(UserWarning, match="0.3 is used"):
        assert density(0.9, max_sparsity=0.3) == density(0.3) == pytest.approx(0.3, rel=0.1)
    assert density(0.25, min_sparsity=0.2, max_sparsity=0.3) == density(0.25)
    # The default window alone touches two tiles on either side.
    plain = build_index(Window(256), 8192).tile_density
    assert density(min_sparsity=0.05) == density(max_sparsity=0.5) == plain
    assert density(min_sparsity=0.3) == density(0.3)
    assert density(max_sparsity=0.05) == density(0.05)
    with pytest.warns(UserWarning, match=r"local_window_size=64 changes nothing: min_sparsity=0\.3 decides over 8192"):
        assert density(local_window_size=64, min_sparsity=0.3) == density(0.3)
    with pytest.warns(UserWarning, match=r"local_window_size=4096 changes nothing: max_sparsity=0\.2 decides"):
        assert density(local_window_size=4096, max_sparsity=0.2) == density(0.2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pattern_type": "learned"}, "pattern_type"),
        ({"pattern_type": "adaptive", "block_size": 256}, "block_size"),
        ({"block_size": 32}, "block_size"),
        ({"sparsity_ratio": 0.0}, "sparsity_ratio"),
        ({"sparsity_ratio": 1.5}, "sparsity_ratio"),
        ({"sparsity_ratio": True}, "sparsity_ratio"),
        ({"min_sparsity": -0.1}, "min_sparsity"),
        ({"max_sparsity": 2}, "max_sparsity"),
        ({"min_sparsity": 0.5, "max_sparsity": 0.1}, "min_sparsity"),
        ({"dilation_rates": [0]}, "dilation_rates"),
        ({"dilation_rates": []}, "dilation_rates"),
        ({"pattern_type": "local_window", "local_window_size": 0}, "local_window_size"),
    ],
)
def test_a_config_refuses_what_is_out_of_range(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SparsePatternConfig(**arguments)
    # And so does the next call after a change.
    config = SparsePatternConfig()
    for name, value in arguments.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=named):
        BlockSparseRingDilatedAttention(sparse_config=config)(torch.randn(1, 20, 1, 8))


RATIO = r"sparsity_ratio=0\.3 decides"


@pytest.mark.parametrize(
    ("kind", "base", "field", "decides"),
    [
        ("local_window", {"sparsity_ratio": 0.3}, {"local_window_size": 512}, RATIO),
        ("dilated_sparse", {"sparsity_ratio": 0.3}, {"block_size": 64}, f"{RATIO}, and keeps .* tiles of 128 x 128"),
        ("local_window", {"max_sparsity": 0.3}, {"block_size": 64}, "local_window_size=512 decides"),
        ("global_local", {"local_window_size": 100}, {"block_size": 256}, "local_window_size=100 decides"),
        ("dilated_sparse", {}, {"local_window_size": 64}, "pattern_type='dilated_sparse' decides, .* dilation_rates"),
        ("local_window", {}, {"global_tokens": 64}, "'local_window' decides, which is shaped by local_window_size"),
        ("global_local", {}, {"dilation_rates": (1,)}, "decides, .* shaped by local_window_size and global_tokens"),
    ],
)
@TOO_SHORT
def test_a_field_that_another_overrides_is_said_and_changes_nothing(
    kind: str, base: dict[str, Any], field: dict[str, Any], decides: str
) -> None:
    base, ((name, value),) = {"pattern_type": kind, **base}, field.items()
    said = rf"{name}={re.escape(str(value))} (changes nothing|shapes no pattern): .*{decides}"
    with pytest.warns(UserWarning, match=said) as caught:
        config = SparsePatternConfig(**base, **field)
    assert [Path(each.filename).name for each in caught] == ["test_compat.py"]
    # Said once, not at each call.
    attention = BlockSparseRingDilatedAttention(sparse_config=config)
    attention(X)
    attention(X)
    plain = SparsePatternGenerator(SparsePatternConfig(**base))
    assert all(attention.pattern_generator.rule(n) == plain.rule(n) for n in (900, 4096))
    # And once after a change.
    changed = SparsePatternConfig(**base)
    setattr(changed, name, value)
    attention = BlockSparseRingDilatedAttention(sparse_config=changed)
    with pytest.warns(UserWarning, match=said):
        attention(X)
    attention(X)


def test_pattern_types_are_names_or_text() -> None:
    for name, text in (("LOCAL_WINDOW", "local_window"), ("CONTENT_ADAPTIVE", "adaptive")):
        config = SparsePatternConfig(PatternType[name])
        assert config == SparsePatternConfig(text)
        assert repr(config) == repr(SparsePatternConfig(text))
    for name, instead in (("RANDOM", "RandomBlocks"), ("STRIDED", "Strided"), ("HIERARCHICAL", "hierarchical")):
        with pytest.raises(ValueError, match=rf"pattern_type: .*'{name.lower()}'; use ringtile.patterns.{instead}$"):
            SparsePatternConfig(PatternType[name])
        assert hasattr(ringtile.patterns, instead)
    with pytest.raises(ValueError, match=r"pattern_type: expected one of .*, got 'learned'$"):
        SparsePatternConfig(PatternType.LEARNED)


@TOO_SHORT
@pytest.mark.parametrize(
    ("kind", "block_size", "lengths", "is_causal"),
    all_pairs(KINDS, [64, 128, 256], [(2048, 2048), (1000, 1000), (300, 1100)], [False, True]),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:block_size=64")
def test_a_ratio_keeps_all_pairs_of_the_tiles_that_it_pays_for(
    kind: str, block_size: int, lengths: tuple[int, int], is_causal: bool
) -> None:
    fields = {"global_tokens": 16} if kind == "global_local" else {}
    config, (n_queries, n_keys) = SparsePatternConfig(kind, 0.25, block_size, **fields), lengths
    rule = SparsePatternGenerator(config).rule(n_queries, n_keys, is_causal=is_causal)
    query, key = torch.arange(n_keys - n_queries, n_keys).unsqueeze(1), torch.arange(n_keys)
    kept = rule.allowed(torch.tensor(0), query, key)
    causal = query >= key if is_causal else torch.ones_like(kept)
    assert not (kept & ~causal).any()
    # Every tile of 128 x 128 positions with a kept pair keeps all that are allowed.
    number = query // 128 * (n_keys // 128 + 1) + key // 128
    computed = torch.isin(number, number[kept])
    assert torch.equal(kept, computed & causal)
    index = build_index(rule, n_queries, n_keys)
    assert index.kept_tiles == len(number[kept].unique())
    assert index.density == pytest.approx(kept.sum().item() / causal.sum().item(), rel=1e-12)
    if not is_causal and n_queries == 2048:
        assert index.density == index.tile_density


@TOO_SHORT
@pytest.mark.filterwarnings("ignore:block_size=64")
def test_a_quarter_in_small_blocks_is_as_much_as_in_tiles() -> None:
    # 2,048 tokens: 31 of 136 causal tiles, where windows in blocks of 64 kept half of their pairs.
    pairs = 16 * 128 * 129 // 2 + 15 * 128 * 128
    for kind in ("local_window", "global_local", "dilated_sparse"):
        rule = SparsePatternGenerator(SparsePatternConfig(kind, 0.25, 64)).rule(2048, is_causal=True)
        index = build_index(rule, 2048)
        assert (index.kept_tiles, index.allowed_tiles) == (31, 136)
        assert index.density == pytest.approx(pairs / (2048 * 2049 // 2), rel=1e-12)


def test_a_changed_config_takes_effect_at_the_next_call() -> None:
    config = SparsePatternConfig("local_window", local_window_size=90)
    module = BlockSparseRingMultiheadDilatedAttention(32, 4, sparse_config=config)
    x = torch.randn(1, 300, 32)
    outs = [module(x)[0]]
    config.local_window_size = 30
    outs.append(module(x)[0])
    module.sparse_config = SparsePatternConfig("local_window", local_window_size=10)
    outs.append(module(x)[0])
    module.sparse_config.local_window_size = None
    module.set_sparsity_ratio(0.75)
    outs.append(module(x)[0])
    assert module.get_memory_info()["memory_reduction"] == 1 - 7 / 9
    assert all(not a.allclose(b) for a, b in pairwise(outs))
    for wrong in (0, 1.1, None, "0.5"):
        with pytest.raises(ValueError, match="sparsity_ratio"):
            module.set_sparsity_ratio(wrong)
    assert module.sparse_config.sparsity_ratio == 0.75
    module.sparse_config = config
    with pytest.warns(UserWarning, match=r"local_window_size=30 changes nothing: sparsity_ratio=0\.75 decides"):
        module.set_sparsity_ratio(0.75)
    assert torch.equal(module(x)[0], outs[-1])


# Every argument does something.

X = torch.randn(1, 300, 4, 8, generator=torch.Generator().manual_seed(1))
TOKENS = X.flatten(2)
CORE = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
WHOLE = {"sparse_config": SparsePatternConfig("local_window", local_window_size=40)}

Effect = Callable[[Callable[..., Any], dict[str, Any]], None] | tuple[dict[str, Any], Any]
"""A check of a class and its other arguments, or such arguments and a value that changes the output."""


def _result(module: Any) -> Tensor:
    torch.manual_seed(0)
    out = module(TOKENS if isinstance(module, nn.MultiheadAttention) else X)
    return out[0] if isinstance(out, tuple) else out


def assert_differs(kind: Callable[..., Any], fixed: dict[str, Any], **other: Any) -> None:
    found = []
    for arguments in (fixed, fixed | other):
        torch.manual_seed(0)
        found.append(_result(kind(**arguments)))
    assert not torch.equal(*found)


def refuses_two_ranks(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ring_size"):
        kind(**fixed, ring_size=2)


def saved_bytes(module: nn.Module) -> int:
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(X.clone().requires_grad_())
    return sum(saved)


def saves_less_when_checkpointed(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    recomputed, kept = (kind(**fixed, use_gradient_checkpointing=given) for given in (True, False))
    assert saved_bytes(recomputed) < saved_bytes(kept)
    assert torch.equal(_result(recomputed), _result(kept))


def remembers_no_more(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    module = kind(**fixed, cache_size=2)
    for n_tokens in (10, 20, 30):
        module(X[:, :n_tokens])
    assert module.get_memory_info()["pattern_cache_size"] == 2


def turns_the_layout(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    modules = []
    for given in ({}, {"batch_first": False}):
        torch.manual_seed(0)
        modules.append(kind(**fixed, **given))
    assert modules[0].batch_first
    assert modules[0](TOKENS)[0].allclose(modules[1](TOKENS.transpose(0, 1))[0].transpose(0, 1), atol=1e-6)


def reaches_every_parameter(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    module = kind(**fixed, device="meta", dtype=torch.float16)
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.float16)}


def adds_a_norm(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    name = "layer_norm" if kind is ImprovedMultiheadDilatedAttention else "use_layer_norm"
    without, having = (dict(kind(**fixed, **{name: on}).named_parameters()) for on in (False, True))
    assert set(having) - set(without) == {"layer_norm.weight", "layer_norm.bias"}
    assert_differs(kind, fixed | {name: False}, **{name: True})


def shapes_the_module(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    for name, value in (("embed_dim", 64), ("num_heads", 2)):
        assert getattr(kind(**fixed | {name: value}), name) == value != getattr(kind(**fixed), name)


def passes_on(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    module = kind(**fixed, attention_scale=0.5)
    core = module.attention if isinstance(module, nn.MultiheadAttention) else module
    assert core.attention_scale == 0.5


def holds_a_quality(kind: Callable[..., Any], fixed: dict[str, Any]) -> None:
    attention = kind(**fixed, quality_threshold=0.9).attention
    _result(attention)
    assert attention.adaptive.choice.budget.quality == 0.9
    assert attention.adaptive.report is not None


_CORE: dict[str, Effect] = {
    "segment_lengths": (CORE, [50, 200]),
    "dilation_rates": (CORE, [1, 4]),
    "ring_size": refuses_two_ranks,
    "dropout": ({}, 0.3),
}
_ALONE: dict[str, Effect] = {
    "attention_scale": ({}, 1.0),
    "use_gradient_checkpointing": saves_less_when_checkpointed,
}
_CHOICE: dict[str, Effect] = {
    "sparse_config": ({}, SparsePatternConfig("local_window", local_window_size=8)),
    "use_adaptive_sparsity": ({}, True),
}
_SHAPE: dict[str, Effect] = {"embed_dim": shapes_the_module, "num_heads": shapes_the_module}
_MULTIHEAD: dict[str, Effect] = {
    **dict.fromkeys(("device", "dtype"), reaches_every_parameter),
    **dict(use_layer_norm=adds_a_norm, batch_first=turns_the_layout, attention=passes_on, bias=({}, False)),
}
_FACTORY: dict[str, Effect] = {**_SHAPE, **{name: _CORE[name] for name in ("segment_lengths", "dilation_rates")}}
_HEADS = {"embed_dim": 32, "num_heads": 4}


def ring_config(**arguments: Any) -> RingDilatedAttentionProduction:
    return RingDilatedAttentionProduction(RingAttentionConfig(**arguments))


EFFECTS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, Effect]]] = {
    BlockSparseRingDilatedAttention: (WHOLE, {**_CORE, **_ALONE, **_CHOICE, "cache_size": remembers_no_more}),
    RingDilatedAttentionV2: (CORE, {**_CORE, "further": passes_on}),
    BlockSparseRingMultiheadDilatedAttention: (_HEADS | WHOLE, {**_SHAPE, **_CORE, **_CHOICE, **_MULTIHEAD}),
    ImprovedMultiheadDilatedAttention: (
        _HEADS | CORE,
        {**_FACTORY, "dropout": ({}, 0.3), "bias": ({}, False), "layer_norm": adds_a_norm, "further": turns_the_layout},
    ),
    create_block_sparse_multihead_attention: (
        _HEADS | {"sparsity_ratio": 0.8, "pattern_type": "dilated_sparse"},
        {
            **_FACTORY,
            "arguments": passes_on,
            "sparsity_ratio": ({}, 0.3),
            "pattern_type": ({"sparsity_ratio": None}, "local_window"),
        },
    ),
    create_adaptive_sparse_multihead_attention: (
        _HEADS,
        {**_FACTORY, "arguments": passes_on, "quality_threshold": holds_a_quality},
    ),
    ring_config: (CORE, {**_CORE, **_ALONE}),
}
ARGUMENTS = [(kind, name) for kind, (_, effects) in EFFECTS.items() for name in effects]


@pytest.mark.parametrize(("kind", "name"), ARGUMENTS, ids=[f"{kind.__name__}-{name}" for kind, name in ARGUMENTS])
@TOO_SHORT
def test_every_argument_does_something(kind: Callable[..., Any], name: str) -> None:
    fixed, effects = EFFECTS[kind]
    effect = effects[name]
    if isinstance(effect, tuple):
        base, value = effect
        assert_differs(kind, fixed | base, **{name: value})
    else:
        effect(kind, fixed)


def _config_output(**arguments: Any) -> tuple[Any, ...]:
    config = SparsePatternConfig(**arguments)
    generator = SparsePatternGenerator(config)
    return (
        generator.rule(1000),
        generator.create_pattern(1000).shape,
        generator.pattern_cache.solved.cache_info().currsize,
    )


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ({}, {"pattern_type": "local_window"}),
        ({}, {"sparsity_ratio": 0.9}),
        ({}, {"block_size": 64}),
        ({"pattern_type": "local_window", "sparsity_ratio": 0.5}, {"block_size": 256}),
        ({"pattern_type": "local_window"}, {"local_window_size": 100}),
        ({"pattern_type": "global_local"}, {"global_tokens": 3}),
        ({}, {"dilation_rates": [1, 3]}),
        ({}, {"min_sparsity": 0.9}),
        ({}, {"max_sparsity": 0.5}),
        ({}, {"enable_caching": False}),
    ],
)
@TOO_SHORT
def test_every_field_of_a_config_does_something(base: dict[str, Any], other: dict[str, Any]) -> None:
    assert _config_output(**base) != _config_output(**base, **other)


def test_no_argument_goes_untested() -> None:
    assert BlockSparseOptimized is BlockSparseTorchSparse is BlockSparseRingDilatedAttention
    assert ImprovedDilatedAttention is RingDilatedAttentionV2
    for kind, (_, effects) in EFFECTS.items():
        taken = RingAttentionConfig if kind is ring_config else kind
        assert set(inspect.signature(taken).parameters) == set(effects), kind.__name__
    fields = set(inspect.signature(SparsePatternConfig).parameters)
    marks = test_every_field_of_a_config_does_something.pytestmark
    tested = {name for mark in marks if mark.name == "parametrize" for _, other in mark.args[1] for name in other}
    assert tested == fields == set(inspect.signature(PatternConfig).parameters)
    assert set(inspect.signature(RingDilatedAttentionProduction).parameters) == {"config"}
    assert set(inspect.signature(SparsePatternGenerator).parameters) == {"config", "cache_size"}
    assert set(inspect.signature(PersistentPatternCache).parameters) == {"max_size"}


@pytest.mark.parametrize("flag", ["use_memory_pool", "enable_error_recovery", "mixed_precision", "log_memory_usage"])
def test_flags_without_an_effect_are_refused(flag: str) -> None:
    for kind in (RingAttentionConfig, RingDilatedAttentionV2, BlockSparseOptimized):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'"):
            kind(**CORE, **{flag: True})


def test_a_ring_has_one_rank_or_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockSparseRingDilatedAttention(ring_size=1).ring_size == 1
    for wrong in (0, 2, True, None):
        with pytest.raises(
            ValueError, match=r"ring_size: expected 1 or a process group, which init_process_group\(\) makes, got"
        ):
            BlockSparseRingDilatedAttention(ring_size=wrong)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match="ring_size: expected 1 or the number of ranks, 4, got 2"):
        BlockSparseRingDilatedAttention(ring_size=2)
    assert BlockSparseRingDilatedAttention(ring_size=4).ring_size == 4


def test_segments_need_one_rate_each() -> None:
    for lengths, rates in (([4], None), (None, [1]), ([4, 8], [1]), ([0], [1]), ([4], [0])):
        with pytest.raises(ValueError, match=r"segment_lengths|dilation_rates"):
            BlockSparseRingDilatedAttention(lengths, rates)


@TOO_SHORT
def test_modules_copy_and_pickle() -> None:
    for make in (BlockSparseRingMultiheadDilatedAttention, ImprovedMultiheadDilatedAttention):
        module = make(**_HEADS, segment_lengths=[300], dilation_rates=[1])
        module.pattern_generator.pattern_cache[200] = torch.eye(2, dtype=torch.bool)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin(TOKENS)[0], module(TOKENS)[0])
            assert torch.equal(twin.pattern_generator.pattern_cache[200], torch.eye(2, dtype=torch.bool))
            twin.set_sparsity_ratio(0.2)
            assert not torch.equal(twin(TOKENS)[0], module(TOKENS)[0])
            with torch.no_grad():
                for x in twin.parameters():
                    x.zero_()
            assert not twin(TOKENS)[0].any()


# Caching.


def test_a_pattern_of_ones_own_serves_its_length_until_it_is_taken_out() -> None:
    config = SparsePatternConfig("local_window", local_window_size=40)
    attention = BlockSparseRingDilatedAttention(sparse_config=config)
    cache = attention.pattern_generator.pattern_cache
    matrix = torch.rand(4, 3, 3) < 0.6
    before = attention(X)
    cache[300] = matrix
    q = heads_first(X)
    for is_causal in (False, True):
        rule = Causal() & Blocks(matrix) if is_causal else Blocks(matrix)
        found = attention(X, is_causal=is_causal)
        assert relative_error(heads_first(found), oracle(q, q, q, rule).out) < 1e-6
    assert torch.equal(attention.pattern_generator.create_pattern(300), matrix)
    matrix.fill_(True)
    cache[300].fill_(True)
    assert torch.equal(attention(X, is_causal=True), found)
    cache[300] = matrix
    assert not torch.equal(attention(X, is_causal=True), found)
    config.pattern_type, config.local_window_size, config.block_size = "dilated_sparse", None, 64
    with pytest.raises(ValueError, match="columns"):
        attention(X)
    del cache[300]
    config.pattern_type, config.local_window_size, config.block_size = "local_window", 40, 128
    assert torch.equal(attention(X), before)


def test_in_segments_a_pattern_of_ones_own_serves_one_length() -> None:
    attention = BlockSparseRingDilatedAttention([150, 300], [1, 2], **WHOLE)
    cache = attention.pattern_generator.pattern_cache
    cache[150] = torch.eye(2, dtype=torch.bool)
    found = attention(X)
    q = heads_first(X)
    expected = dilated_attention(q, q, q, [150, 300], [1, 2], pattern=Blocks(cache[150]), backend="reference")
    assert relative_error(heads_first(found), expected) < 1e-6
    with pytest.raises(ValueError, match=r"dilated segments here have \[150, 100"):
        attention(X[:, :200])


def test_the_cache_refuses_what_is_no_pattern() -> None:
    eye = torch.eye(2, dtype=torch.bool)
    matrices = (torch.eye(2), torch.ones(2, 3, dtype=torch.bool), torch.ones(2, dtype=torch.bool), "diagonal")
    for key, matrix in ((0, eye), ("512", eye), *((256, matrix) for matrix in matrices)):
        with pytest.raises(ValueError, match="pattern_cache"):
            PersistentPatternCache()[key] = matrix


def test_the_cache_drops_what_was_used_least_recently() -> None:
    cache = PersistentPatternCache(max_size=2)
    cache[7] = torch.eye(1, dtype=torch.bool)
    generator = SparsePatternGenerator(SparsePatternConfig("local_window"))
    generator.pattern_cache = cache
    made: list[int] = []
    for n_tokens in (100, 200, 100, 300, 100, 200):
        before = cache.solved.cache_info().misses
        assert generator.rule(n_tokens) == Window(256)
        made += [n_tokens] * (cache.solved.cache_info().misses - before)
    assert made == [100, 200, 300, 200]
    assert (len(cache), cache.solved.cache_info()) == (1, (2, 4, 2, 2))
    cache.clear()
    assert (len(cache), cache.solved.cache_info()) == (0, (0, 0, 2, 0))
    assert 7 not in cache
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="max_size"):
            PersistentPatternCache(wrong)


def test_generated_patterns_are_the_blocks_of_the_rule() -> None:
    config = SparsePatternConfig("dilated_sparse", dilation_rates=[1, 3])
    for block_size, blocks in ((64, 16), (128, 8), (256, 4)):
        config.block_size = block_size
        pattern = SparsePatternGenerator(config).generate_pattern(1000, num_heads=3, is_causal=True)
        tokens = torch.arange(blocks * block_size)
        rule = Causal() & BlockDilated([1, 3], 1, block_size)
        kept = rule.allowed(torch.tensor(0), tokens[:, None], tokens)
        kept &= (tokens < 1000) & (tokens < 1000)[:, None]
        expected = kept.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1)).any(3).any(1)
        assert torch.equal(pattern, expected.expand(3, -1, -1))
    generator = SparsePatternGenerator(config)
    generator.pattern_cache[512] = torch.ones(2, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="num_heads"):
        generator.generate_pattern(512, num_heads=3)


# Measuring.

STATS = {"avg_forward_time_ms", "avg_sparsity", "avg_speedup", "avg_memory_mb", "quality_score"}


def test_nothing_is_known_before_it_is_measured() -> None:
    attention = BlockSparseRingDilatedAttention(**WHOLE)
    for _ in range(2):
        stats = attention.get_performance_stats()
        assert set(stats) == STATS
        assert all(math.isnan(value) for value in stats.values())
        attention(X)
    module = BlockSparseRingMultiheadDilatedAttention(**_HEADS, **WHOLE)
    assert math.isnan(module.get_memory_info()["theoretical_speedup"])
    module.performance_monitor.enable()
    module(TOKENS)
    assert not any(math.isnan(value) for value in module.get_performance_stats().values())
    before = module.get_performance_stats()
    module.performance_monitor.enabled = False
    module(TOKENS)
    assert module.get_performance_stats() == before
    module.performance_monitor.enable()
    assert all(math.isnan(value) for value in module.get_performance_stats().values())


def test_dense_attention_is_timed_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[Any] = []
    clock = 0.0

    def timed(*args: Any, pattern: Any = None, **options: Any) -> Tensor:
        nonlocal clock
        pattern = args[3] if len(args) > 3 else pattern
        patterns.append(pattern)
        clock += 5.0 if pattern is None else 2.0
        return sparse_attention(*args[:3], pattern, **options)

    monkeypatch.setattr(dilated_attention_pytorch.attention, "sparse_attention", timed)
    monkeypatch.setattr("dilated_attention_pytorch.monitor.time.perf_counter", lambda: clock)
    attention = BlockSparseRingDilatedAttention(**WHOLE, dropout=0.9)
    attention.performance_monitor.enable()
    with torch.no_grad():
        out = attention.eval()(X)
        for _ in range(2):
            attention.train()(X)
        attention(X[:, :100])
    # Three calls and one of another length; for each length the pair of the probe.
    assert patterns.count(None) == 2
    assert patterns.count(Window(20)) == 4 + 2
    stats = attention.get_performance_stats()
    assert stats["avg_forward_time_ms"] == pytest.approx(2000)
    assert stats["avg_speedup"] == pytest.approx(2.5)
    densities = [7 / 9, 1]
    assert stats["avg_sparsity"] == pytest.approx((3 * densities[0] + densities[1]) / 4)
    # Without dropout, whatever the mode.
    dense = sparse_attention(*[heads_first(X)] * 3)
    quality = nn.functional.cosine_similarity(heads_first(out), dense, dim=-1).mean()
    short = heads_first(X[:, :100])
    near = sparse_attention(short, short, short, Window(20))
    short_quality = nn.functional.cosine_similarity(near, sparse_attention(short, short, short), dim=-1).mean()
    assert stats["quality_score"] == pytest.approx((3 * quality + short_quality).item() / 4, rel=1e-5)


def test_memory_is_the_peak_beyond_inputs_and_output() -> None:
    n_tokens = 2048
    attention = RingDilatedAttentionV2([n_tokens], [1])
    sparse = BlockSparseRingDilatedAttention(**WHOLE)
    for module in (attention, sparse):
        module.performance_monitor.enable()
        module(torch.randn(1, n_tokens, 1, 8))
        assert 0 < module.get_performance_stats()["avg_memory_mb"] < n_tokens**2 * 4 / 2**20


def test_memory_info_counts_tiles() -> None:
    attention = BlockSparseRingDilatedAttention(**WHOLE)
    attention(torch.randn(1, 1024, 1, 8), is_causal=True)
    # 8 rows of tiles: 36 allowed, of which those on the diagonal and next to it are computed.
    assert attention.get_memory_info() == {
        "pattern_cache_size": 1,
        "memory_reduction": pytest.approx(1 - 15 / 36),
        "theoretical_speedup": pytest.approx(36 / 15),
    }
    # Segments of 512 and 1024 / 2 tokens: three problems of 4 x 4 tiles, of 8 x 8.
    attention = RingDilatedAttentionV2([512, 1024], [1, 2])
    attention(torch.randn(1, 1024, 1, 8))
    assert attention.get_memory_info()["theoretical_speedup"] == pytest.approx(64 / 48)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_error_inside_arrives_unchanged_and_leaves_later_gradients_right(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, calls = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 0

    def exhausted(*_: Any, **__: Any) -> Tensor:
        nonlocal calls
        calls += 1
        raise error

    monkeypatch.setattr(dilated_attention_pytorch.attention, "sparse_attention", exhausted)
    attention = BlockSparseRingDilatedAttention(**WHOLE, use_gradient_checkpointing=checkpointed)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        attention(X.clone().requires_grad_())
    assert raised.value is error
    assert calls == 1
    weight = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad((weight * weight).sum(), weight)[0], 2 * weight)


# Pattern tools.


def test_statistics_are_fractions() -> None:
    pattern = torch.zeros(2, 4, 4, dtype=torch.bool)
    pattern[0, 0] = True
    pattern[1, 1, 1] = True
    assert pattern_statistics(pattern) == {
        "density": 5 / 32,
        "avg_row_density": 5 / 32,
        "min_row_density": 0.0,
        "max_row_density": 1.0,
        "diagonal_density": 2 / 8,
        "total_blocks": 32,
        "active_blocks": 5,
        "sparsity_ratio": 5 / 32,
        "density_ratio": 27 / 32,
        "avg_col_density": 5 / 32,
        "total_elements": 32,
        "active_elements": 5,
    }


def test_quality_is_measured_on_renormalised_weights() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.0, 0.0, 0.0, 1.0]])
    metrics = PatternQualityAnalyzer().analyze_pattern_quality(torch.eye(2, dtype=torch.bool), weights[None])
    kept = torch.tensor([[0.5, 0.3, 0, 0], [0.1, 0.2, 0, 0], [0, 0, 0.25, 0.25], [0, 0, 0, 1]])
    error = (kept / kept.sum(1, keepdim=True) - weights).norm() / weights.norm()
    assert metrics == pytest.approx((kept.sum().item() / 4, 1.0, 2.0, error.item(), 0.5, 0.5))
    everything = PatternQualityAnalyzer().analyze_pattern_quality(torch.ones(4, 4, dtype=torch.bool), weights)
    assert everything == pytest.approx((1.0, 10 / 16, 1.0, 0.0, 1.0, 0.0), abs=1e-7)
    with pytest.raises(ValueError, match="reference_attention"):
        PatternQualityAnalyzer().analyze_pattern_quality(torch.ones(3, 4, 4, dtype=torch.bool), weights[None])
    with pytest.raises(ValueError, match=r"reference_attention: expected the weights of dense attention .* got None"):
        PatternQualityAnalyzer().analyze_pattern_quality(torch.ones(3, 4, 4, dtype=torch.bool))


def test_blocks_are_connected_by_chains_of_kept_blocks() -> None:
    def connectivity(*kept: tuple[int, int], size: int = 5) -> float:
        pattern = torch.zeros(size, size, dtype=torch.bool)
        for row, column in kept:
            pattern[row, column] = True
        weights = torch.full((1, size, size), 1 / size)
        return PatternQualityAnalyzer().analyze_pattern_quality(pattern, weights).global_connectivity

    # A path joins each block to all later ones, and a ring joins all.
    assert connectivity((0, 1), (1, 2), (2, 3), (3, 4)) == pytest.approx(10 / 25)
    assert connectivity((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)) == 1.0
    assert connectivity() == 0.0
    weights = torch.full((1, 4, 6), 1 / 6)
    tall = PatternQualityAnalyzer().analyze_pattern_quality(torch.ones(2, 3, dtype=torch.bool), weights)
    assert math.isnan(tall.global_connectivity)
    assert tall.compression_ratio == 0.0


def test_pictures_show_the_head_that_is_asked_for(tmp_path: Path) -> None:
    pattern = torch.stack([torch.eye(3), torch.ones(3, 3)]).bool()
    visualizer = PatternVisualizer()
    assert visualizer.visualize_pattern(pattern) == "█··\n·█·\n··█"
    assert visualizer.visualize_pattern(pattern, "all", tmp_path / "all.svg", head=1) == "all\n███\n███\n███"
    assert "all" in (tmp_path / "all.svg").read_text()
    for wrong in ({"head": 2}, {"save_path": tmp_path / "x.txt"}):
        with pytest.raises(ValueError, match=r"head|path"):
            visualizer.visualize_pattern(pattern, **wrong)


@pytest.mark.parametrize("pattern", [torch.eye(3), torch.ones(3, dtype=torch.bool), torch.ones(0, 0, dtype=torch.bool)])
def test_the_tools_refuse_what_is_no_pattern(pattern: Tensor) -> None:
    for tool in (pattern_statistics, PatternVisualizer().visualize_pattern):
        with pytest.raises(ValueError, match="pattern: expected bool"):
            tool(pattern)


# Who owns the old import path.


def test_doctor_reports_a_foreign_owner_of_the_old_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An editable install finds its own package before any path is looked at.
    finders = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
    monkeypatch.setattr("sys.meta_path", finders)
    monkeypatch.syspath_prepend(str(ROOT / "compat"))
    assert doctor.old_import_path() == "provided by ringtile"
    foreign = tmp_path / "dilated_attention_pytorch" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("raise SystemExit('found, not imported')\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(importlib.sys.modules, "dilated_attention_pytorch", raising=False)
    importlib.invalidate_caches()
    assert "another project" in doctor.old_import_path()
    assert str(foreign) in doctor.old_import_path()
    monkeypatch.setattr("sys.path", [])
    importlib.invalidate_caches()
    assert doctor.old_import_path() == "not installed"
