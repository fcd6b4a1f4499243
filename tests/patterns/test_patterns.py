"""Patterns: each rule against `ringtile.testing.oracle`, and cover, classes and algebra against the rule."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from strategies import BLOCKS, checkerboard, compositions, grids, patterns, primitives, problems
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from ringtile import sparse_attention
from ringtile.index import build, build_index
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    SampledBlocks,
    Segments,
    Strided,
    TileGrid,
    Window,
    bigbird,
    from_mask,
    hierarchical,
    longformer,
    longnet_union,
    offsets,
    parse,
    per_document,
    per_head,
    streaming,
)
from ringtile.patterns.random import philox4x32
from ringtile.testing.oracle import kept_pairs
from ringtile.tools import plot


def kept_of(pattern: Pattern, n_queries: int, n_keys: int | None = None, *, start: int = 0, head: int = 0) -> Tensor:
    """The rule evaluated everywhere, bool ``[n_queries, n_keys]``."""
    query = torch.arange(start, start + n_queries).unsqueeze(1)
    key = torch.arange(n_queries if n_keys is None else n_keys).unsqueeze(0)
    return pattern.allowed(torch.tensor(head), query, key)


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (300, 300), (5, 400), (2, 3, 130, 260), (2, 1, 90, 140)],
    ids=str,
)
def test_a_mask_keeps_its_pairs(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.3
    mask[..., : shape[-2] // 2, : shape[-1] // 2] = True
    mask[..., shape[-2] // 2 :, shape[-1] // 2 :] = False
    batch, heads, n_queries, n_keys = (1,) * (4 - len(shape)) + shape
    pattern = from_mask(mask)
    assert (pattern.num_heads or 1, pattern.batch_size or 1) == (heads, batch)
    copied = mask.clone()
    mask.logical_not_()
    for block in (16, 32, 64, 128):
        index = build_index(pattern, n_queries, n_keys, num_heads=heads, batch=batch, block=block)
        assert torch.equal(index.to_dense().expand(batch, heads, -1, -1), copied.view(batch, heads, n_queries, n_keys))
        inverse = build_index(~pattern & Causal(), n_queries, n_keys, num_heads=heads, batch=batch, block=block)
        expected = mask.view(batch, heads, n_queries, n_keys).tril(n_keys - n_queries)
        assert torch.equal(inverse.to_dense().expand(batch, heads, -1, -1), expected)


def test_masks_are_equal_by_what_they_keep() -> None:
    mask = torch.rand(2, 3, 140, 150) < 0.5
    assert from_mask(mask) == from_mask(mask.clone()) != from_mask(~mask)
    assert hash(from_mask(mask)) == hash(from_mask(mask.clone()))
    assert from_mask(mask[0]).batch_size is None
    # A mask of equal heads is a mask for any heads, and equal heads share a group.
    assert from_mask(mask[:, :1].expand(-1, 5, -1, -1)) == from_mask(mask[:, :1])
    repeated = from_mask(mask[0, [0, 1, 0, 1]])
    assert repeated.head_class(0) == repeated.head_class(2) != repeated.head_class(1)
    assert build_index(repeated, 140, 150, num_heads=4).n_groups == 2
    rows = from_mask(torch.stack([mask[0], mask[1], mask[0]]))
    assert rows.batch_row(0) == rows.batch_row(2) != rows.batch_row(1)
    assert build_index(rows, 140, 150, num_heads=3, batch=3).n_groups == 6


def test_a_mask_is_held_as_its_distinct_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    position = torch.arange(1280)
    pattern = from_mask((position[:, None] - position).abs() < 200)
    assert pattern.bits.tensor.shape == (4, 128, 4)
    evaluated = 0
    evaluate = build.evaluate_tiles

    def counted(rule: Pattern, head: Tensor, row: Tensor, *rest: Any) -> Tensor:
        nonlocal evaluated
        evaluated += len(row)
        return evaluate(rule, head, row, *rest)

    monkeypatch.setattr(build, "evaluate_tiles", counted)
    assert build_index(pattern, 1280).kept_tiles == 10 + 2 * 9 + 2 * 8
    assert evaluated == 4


def flex_rules() -> dict[str, Any]:
    documents = torch.arange(300) // 70
    return {
        "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        "documents": lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx],
        "by head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0,
        "all": lambda b, h, q_idx, kv_idx: q_idx.new_ones((), dtype=torch.bool),
    }


@pytest.mark.parametrize("name", flex_rules())
def test_a_rule_of_flex_attention(name: str) -> None:
    rule = flex_rules()[name]
    mask = create_mask(rule, 1, 3, 300, 300, device="cpu")
    pattern = Elements.from_mask_mod(rule)
    index = build_index(pattern, 300, num_heads=3)
    assert torch.equal(index.to_dense().expand_as(mask), mask)
    assert torch.equal(build_index(from_mask(mask), 300, num_heads=3).to_dense().expand_as(mask), mask)
    # Another pattern of the same function finds the index in the cache.
    assert pattern == Elements.from_mask_mod(rule) != Elements.from_mask_mod(lambda *numbers: rule(*numbers))
    assert build_index(Elements.from_mask_mod(rule), 300, num_heads=3) is index


def test_densities_are_those_of_the_index() -> None:
    pattern = Causal() & Window(300)
    index = build_index(pattern, 2048)
    assert (pattern.density(2048), pattern.tile_density(2048)) == (index.density, index.tile_density)
    assert pattern.tile_density(2048) != pattern.density(2048) < 0.3
    assert pattern.density(100, 2048) == build_index(pattern, 100, 2048).density
    heads = per_head([Window(10), Dense()])
    assert heads.density(500) == build_index(heads, 500, num_heads=2).density
    blocks = RandomBlocks(1)
    assert blocks.density(2048, num_heads=3) == build_index(blocks, 2048, num_heads=3).density
    documents = Documents(ids=torch.arange(80).view(2, 40) // 7)
    assert documents.density(40) == build_index(documents, 40, batch=2).density == 1
    with pytest.raises(ValueError, match=r"num_heads: .*written for 2, got num_heads=3"):
        heads.density(500, num_heads=3)


def test_a_pattern_plots_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := plot.missing_matplotlib():
        pytest.skip(reason)
    heads = per_head([~Dense(), Causal()])
    shares = [torch.as_tensor(heads.plot(64, head=head).images[0].get_array().data) for head in (0, 1)]
    assert torch.equal(shares[0], torch.zeros(64, 64))
    assert torch.equal(shares[1], torch.ones(64, 64).tril())
    assert RandomBlocks(1).plot(2048, head=5).get_xlabel() == "key position"
    axes = Causal().plot(64, 80)
    assert Window(3).plot(64, ax=axes) is axes
    monkeypatch.setattr(plot, "missing_matplotlib", lambda: "there is none")
    with pytest.raises(ImportError, match="there is none"):
        Causal().plot(64)


def tile_bits(pattern: Pattern, grid: TileGrid, head: int) -> Tensor:
    """The rule on whole tiles, bool ``[rows, cols, block, block]``."""
    bits = kept_of(
        pattern, grid.n_rows * grid.block, grid.n_cols * grid.block, start=grid.first_row * grid.block, head=head
    )
    return bits.unflatten(0, (grid.n_rows, grid.block)).unflatten(2, (grid.n_cols, grid.block)).transpose(1, 2)


def cut_to_lengths(bits: Tensor, grid: TileGrid) -> Tensor:
    """Drop what lies outside the lengths."""
    query = torch.arange(grid.n_rows * grid.block) + grid.first_row * grid.block
    key = torch.arange(grid.n_cols * grid.block)
    row_inside = ((query >= grid.start) & (query < grid.start + grid.n_queries)).view(grid.n_rows, 1, grid.block, 1)
    return bits & row_inside & (key < grid.n_keys).view(1, grid.n_cols, 1, grid.block)


def check_tiles(pattern: Pattern, grid: TileGrid, head: int) -> None:
    """What `Pattern` promises the layout, for every tile of a grid."""
    pattern.validate(grid)
    bits = tile_bits(pattern, grid, head).flatten(2).flatten(0, 1)
    rows = torch.arange(grid.first_row, grid.first_row + grid.n_rows)
    row, col = (part.flatten() for part in torch.meshgrid(rows, torch.arange(grid.n_cols), indexing="ij"))
    classes = pattern.tile_class(head, row, col, grid)
    assert classes.dtype == torch.int64
    assert classes.shape == row.shape
    assert not bits[classes == 0].any(), "an empty tile keeps something"
    assert bits[classes == 1].all(), "a full tile leaves something out"
    for number in classes[classes > 1].unique():
        assert bool((bits[classes == number] == bits[classes == number][0]).all()), "a class holds different bits"
    assert int(classes.min()) >= 0

    some = cut_to_lengths(tile_bits(pattern, grid, head), grid).flatten(2).any(2)
    lo, hi = pattern.col_range(head, rows, grid)
    columns = torch.arange(grid.n_cols)
    assert not some[(columns < lo.unsqueeze(1)) | (columns >= hi.unsqueeze(1))].any(), "the range misses a tile"
    cover = pattern.cover(head, rows, grid)
    assert pattern.cover_size(head, rows, grid) >= cover.size()
    assert bool((cover.lo >= 0).all())
    assert bool((cover.hi <= grid.n_cols).all())
    covered = torch.zeros_like(some)
    for tile, first, end in zip(*(part.tolist() for part in cover), strict=True):
        covered[tile - grid.first_row, first:end] = True
    assert not (some & ~covered).any(), "the cover misses a tile"


# The rules, each against its definition.

TEXTS = """
dense
causal
window(3)
window(5, 1)
dilated([2, 5], 3)
dilated([3, 4, 5, 6, 7, 8, 9, 10, 11], 2)
block_dilated([2, 3], 1, block=4)
strided(5)
global_tokens(2)
global_tokens([3, 4, 17])
random_blocks(2, block=8)
random_blocks(5, seed=18446744073709551615, block=1)
sampled_blocks(1, 3, 8, block=4)
sampled_blocks(2, 5, 4, 12, block=2)
segments(7, 2)
segments(7, 3, 2)
~(causal & window(4)) | strided(9)
per_head([causal, window(2), dense, random_blocks(1, block=4)])
""".strip().splitlines()


def assert_rule(pattern: Pattern, n_queries: int, n_keys: int, start: int, heads: int = 4) -> Tensor:
    """Return the pairs of a pattern, which are those of the oracle for each head and for all at once."""
    expected = kept_pairs(pattern, 1, heads, n_queries, n_keys, start=start)[0]
    kept = [kept_of(pattern, n_queries, n_keys, start=start, head=head) for head in range(heads)]
    assert torch.equal(torch.stack(kept), expected)
    query = torch.arange(start, start + n_queries).unsqueeze(1)
    together = pattern.allowed(torch.arange(heads).view(-1, 1, 1), query, torch.arange(n_keys))
    assert torch.equal(together, expected)
    return expected


@pytest.mark.parametrize("text", TEXTS)
def test_rule_is_its_definition(text: str) -> None:
    assert_rule(parse(text), 45, 40, -15)


def test_documents_rule() -> None:
    assert assert_rule(Documents([3, 4, 1]), 8, 8, 0).sum() == 4 * (9 + 16 + 1)


BEGINS_ANEW = {
    "global tokens": GlobalTokens([0, 5]),
    "segments by head": Segments(7, 2),
    "all signs": Causal() & (Window(2) | GlobalTokens(1)) & ~BlockDilated([2], 1, block=3),
    "heads": per_head([GlobalTokens(2), Segments(4)]),
}


@pytest.mark.parametrize("name", BEGINS_ANEW)
def test_a_pattern_begins_anew_in_each_document(name: str) -> None:
    inner, rows = BEGINS_ANEW[name], ([5, 1, 23, 11], [16, 24], [40])
    ids = torch.stack([torch.repeat_interleave(torch.tensor(lengths)) for lengths in rows])
    pattern = per_document(inner, Documents(ids=ids))
    index = build_index(pattern, 31, 40, start=9, num_heads=2, batch=3).to_dense().expand(3, 2, -1, -1)
    assert torch.equal(index, kept_pairs(pattern, 3, 2, 31, 40, start=9))
    for batch, lengths in enumerate(rows):
        row = pattern.batch_row(batch)
        assert row == per_document(inner, Documents(cu_seqlens=torch.tensor((0, *accumulate(lengths)))))
        assert torch.equal(assert_rule(row, 31, 40, 9, heads=2), index[batch])
        for head in (0, 1):
            check_tiles(row, TileGrid(16, 9, 31, 40), head)


def test_a_pattern_per_document_of_a_long_row_has_few_tiles_and_classes() -> None:
    lengths = [100_000, 300, 7, 900_000, 48_269]
    pattern = per_document(Causal() & (Window(512) | GlobalTokens([0, 17])), lengths)
    rows, grid = torch.arange(LONG.n_rows), LONG
    cover = pattern.cover(0, rows, grid).disjoint(grid.n_cols)
    assert cover.size() <= 9 * grid.n_rows
    row = torch.repeat_interleave(cover.row, cover.hi - cover.lo)
    col = torch.cat([torch.arange(lo, hi) for lo, hi in zip(cover.lo.tolist(), cover.hi.tolist(), strict=True)])
    assert len(pattern.tile_class(0, row, col, grid).unique()) < 100


def test_presets() -> None:
    assert longformer(100, 2) == Window(100) | GlobalTokens(2)
    assert bigbird(2, 5, 6, 16) == Window(5) | GlobalTokens(6) | RandomBlocks(2, block=16)
    assert longnet_union([8, 16], [1, 2]) == Segments(8) | Segments(16, 2)
    assert streaming(3, 7) == Causal() & (Window(7) | GlobalTokens(3))
    parts = Segments(4), SampledBlocks(3, 4, 4, 16, 4), SampledBlocks(2, 5, 16, 32, 4)
    assert hierarchical(16, 32, 0.75, 0.4, 0, 4) == (parts[0] | parts[1]) | parts[2]
    assert parse("hierarchical(16, 32, 0.75, 0.4, 0, 4)") == hierarchical(16, 32, 0.75, 0.4, 0, 4)
    assert parse("hierarchical(inter_node_density=0.1)") == hierarchical(inter_node_density=0.1)


def densities(pattern: Pattern, local: int, node: int, n_tokens: int) -> list[float]:
    """The fractions of pairs that are kept inside ``local`` tokens, inside ``node`` tokens, and beyond."""
    kept, place = kept_of(pattern, n_tokens), torch.arange(n_tokens)
    same = [place.unsqueeze(1) // length == place // length for length in (local, node)]
    return [float(kept[chosen].float().mean()) for chosen in (same[0], same[1] & ~same[0], ~same[1])]


@pytest.mark.parametrize("wanted", [(0.5, 0.2, 0.05), (0.4, 0.1, 0.05), (1, 0.25, 0), (0.25, 1, 0.2), (0.75, 0, 0.1)])
def test_hierarchical_densities_are_exact(wanted: tuple[float, float, float]) -> None:
    local, node = 40, 160
    pattern = hierarchical(local, node, *wanted, block=1)
    assert densities(pattern, local, node, 480) == pytest.approx(wanted, abs=1e-6)
    # Queries of a segment share the keys of other segments, so they are the keys that travel.
    kept = kept_of(pattern, 480).unflatten(0, (-1, local)).any(1)
    place, first = torch.arange(480), torch.arange(0, 480, local).unsqueeze(1)
    inside, beyond = place // node == first // node, place // node != first // node
    assert kept[inside & (place // local != first // local)].float().mean() == pytest.approx(wanted[1], abs=1e-6)
    assert kept[beyond].float().mean() == pytest.approx(wanted[2], abs=1e-6)


# Philox and what is drawn with it.


@pytest.mark.parametrize(
    ("rounds", "numbers", "expected"),
    [
        (7, (0,) * 6, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (10, (0,) * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (7, (2**32 - 1,) * 6, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (10, (2**32 - 1,) * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        # The first words of pi.
        (
            10,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(rounds: int, numbers: tuple[int, ...], expected: str) -> None:
    *counter, low, high = numbers
    for key in ((low, high), (torch.tensor(low), torch.tensor(high))):
        words = philox4x32(tuple(torch.tensor([word, 0]) for word in counter), key, rounds)
        assert " ".join(f"{int(word[0]):08x}" for word in words) == expected


def test_random_blocks_stay_what_they_were() -> None:
    draws = RandomBlocks(6, seed=7).draws(torch.tensor(2), torch.tensor([0, 3, 100, 10**6]))
    assert draws.tolist() == [
        [0, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, -1, -1],
        [21, 48, 31, 46, 32, 68],
        [408408, 279589, 845732, 764870, 933600, 756891],
    ]


def test_random_blocks_are_uniform() -> None:
    rows = torch.full((4000,), 9)
    drawn = RandomBlocks(3).draws(torch.arange(4000), rows)
    counts = torch.bincount(drawn.flatten(), minlength=10)
    # Each of ten numbers is drawn with probability 0.3: 1200 +- 5 standard deviations.
    assert bool(((counts - 1200).abs() < 145).all()), counts
    assert len(RandomBlocks(3).draws(torch.tensor(0), torch.arange(5, 500)).unique()) > 250


# Cover, range and classes: for every tile of random grids.


EVERY_SIZE = {
    "window": lambda size: Window(size),
    "window to the left": lambda size: Window(size, 3),
    "window to the right": lambda size: Window(0, size),
    "dilated": lambda size: Dilated([3], size),
    "block_dilated": lambda size: BlockDilated([2], 1, block=size + 1),
    "strided": lambda size: Strided(size + 1),
    "global_tokens": lambda size: GlobalTokens(size),
    "random_blocks": lambda size: RandomBlocks(2, block=size + 1),
    "sampled_blocks": lambda size: SampledBlocks(2, 3, size + 1, block=1),
    "segments": lambda size: Segments(size + 1),
    "dilated segments": lambda size: Segments(size + 1, 3),
    "documents": lambda size: Documents([5, size, 75 - size]),
    "global tokens anywhere": lambda size: GlobalTokens([size, size + 1, 2 * size, 60]),
    "per document": lambda size: per_document(Window(3) | GlobalTokens([20]), [5, size, 75 - size]),
}


@pytest.mark.parametrize("name", EVERY_SIZE)
def test_tiles_of_every_size(name: str) -> None:
    for size in range(50):
        check_tiles(EVERY_SIZE[name](size), TileGrid(16, 7, 70, 80), 1)


@settings(max_examples=120)
@given(st.data(), st.booleans(), st.integers(0, 4))
def test_tiles_of_compositions(data: st.DataObject, composed: bool, head: int) -> None:
    grid = data.draw(grids(blocks=BLOCKS if composed else (*BLOCKS, 256)))
    check_tiles(data.draw(patterns(grid, data.draw(st.integers(3, 6)) if composed else 0)), grid, head)


@settings(max_examples=20)
@given(st.data())
def test_tiles_of_per_head_and_batched_patterns(data: st.DataObject) -> None:
    grid = data.draw(grids())
    pattern = per_head([data.draw(patterns(grid, 1)), data.draw(patterns(grid, 1))])
    assert pattern.num_heads == 2
    for head in (0, 1):
        check_tiles(pattern, grid, head)
    heads = Blocks(torch.rand(3, 2, 3) < 0.5, block=50)
    for head in range(3):
        for blocks in (heads, heads & Window(70)):
            check_tiles(blocks, TileGrid(data.draw(st.sampled_from(BLOCKS)), 20, 61, 130), head)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize(
    "text",
    [
        "strided(1000)",
        "dilated([700], 5)",
        "block_dilated([9], 3, block=100)",
        "segments(900, 400)",
        "sampled_blocks(2, 7, 300, 900, block=100)",
        "sampled_blocks(3, 5, 96, block=32)",
        "sampled_blocks(4, 4, 100, 700, block=50)",
        "random_blocks(2)",
        "causal & (dilated([1, 600], 40) | strided(512))",
    ],
)
def test_tiles_of_sparse_rules_over_many_blocks(text: str, block: int) -> None:
    for start, n_queries, n_keys in ((0, 2048, 2048), (1501, 300, 2048), (-600, 900, 1100), (5000, 200, 2048)):
        check_tiles(parse(text), TileGrid(block, start, n_queries, n_keys), 3)


MANY = [
    Dilated(range(1, 60), 3),
    Dilated(range(40, 3000, 7), 30),
    Causal() & ~Dilated(range(2, 200), 1),
    BlockDilated(range(1, 40), 2, block=24),
    BlockDilated(range(3, 90), 5, block=5),
]


@pytest.mark.parametrize("pattern", MANY, ids=lambda pattern: repr(pattern)[:40])
@pytest.mark.parametrize("block", [16, 128])
def test_tiles_of_many_rates(pattern: Pattern, block: int) -> None:
    for start, n_queries, n_keys in ((0, 1000, 1000), (1501, 300, 700), (-600, 900, 300), (2**38, 200, 300)):
        check_tiles(pattern, TileGrid(block, start, n_queries, n_keys), 0)


def test_a_thousand_rates_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renumbered, real = [], offsets.number_pairs
    monkeypatch.setattr(offsets, "number_pairs", lambda *pair: renumbered.append(len(pair[0])) or real(*pair))
    offsets._kept_before.cache_clear()
    index = build_index(Dilated(range(1, 1001), 8), 16384)
    # A class per distance of two tiles, each numbered once a strip of tiles.
    assert len(renumbered) <= 4
    assert offsets._kept_before.cache_info().misses <= 4
    offset = torch.arange(16384)
    near = offset == 0
    for rate in range(1, 1001):
        near |= (offset % rate == 0) & (offset <= 8 * rate)
    assert index.kept_pairs == 2 * int(((16384 - offset) * near).sum()) - 16384


def test_more_random_blocks_than_there_are_are_all_of_them() -> None:
    grid = TileGrid(128, 0, 1000, 1000)
    assert RandomBlocks(2**31 - 1).cover_size(0, torch.arange(8), grid) == RandomBlocks(8).cover_size(
        0, torch.arange(8), grid
    )
    assert build_index(Causal() & RandomBlocks(2**31 - 1), 1000).kept_pairs == 1000 * 1001 // 2


def test_tiles_of_documents_with_one_and_with_several_in_common_differ() -> None:
    # Row tile 10 ends the third document after one token, tile 5 holds the second: their numbers lie close.
    check_tiles(Documents([84, 6, 71, 799]), TileGrid(16, 0, 960, 960), 0)


@pytest.mark.parametrize(
    "text",
    [
        "causal",
        "window(20, 3)",
        "strided(1)",
        "global_tokens(20)",
        "segments(40)",
        "documents([30, 5, 45])",
        "dilated([1], 20)",
        "block_dilated([1], 1, block=20)",
        "random_blocks(2, block=8)",
        "random_blocks(2, block=10)",
        "random_blocks(2, block=40)",
        "sampled_blocks(1, 2, 16, block=8)",
        "sampled_blocks(2, 3, 40, block=20)",
        "~(causal & window(20))",
        "segments(40) | global_tokens(20)",
    ],
)
def test_full_and_empty_tiles_are_known_without_looking(text: str) -> None:
    grid = TileGrid(16, 0, 80, 80)
    bits = tile_bits(parse(text), grid, 0).flatten(2)
    row, col = (part.flatten() for part in torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij"))
    classes = parse(text).tile_class(0, row, col, grid).view(5, 5)
    assert torch.equal(classes == 0, ~bits.any(2))
    assert torch.equal(classes == 1, bits.all(2))


LONG = TileGrid(128, 0, 1 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("text", "most_tiles", "most_classes"),
    [
        ("causal & window(4096)", 33 * 8192, 2),
        ("window(512) | global_tokens(64)", 90_091, 6),
        ("causal & (window(512) | global_tokens(64) | random_blocks(3))", (5 + 1 + 3) * 8192 + 300, 6),
        ("dilated([1, 2, 4, 8], 512)", 65 * 8192, 11),
        ("block_dilated([1, 2], 8, block=100)", 28 * 8192, 506),
        ("sampled_blocks(1, 5, 4096, 32768)", 46 * 8192, 2),
        ("causal & segments(8191, 2)", 34 * 8192, 509),
        ("strided(65536) & window(1024)", 17 * 8192, 2),
        ("bigbird", 140_000, 45),
    ],
)
def test_a_million_tokens_need_few_candidates_and_classes(text: str, most_tiles: int, most_classes: int) -> None:
    pattern = parse(text)
    rows = torch.arange(LONG.n_rows)
    cover = pattern.cover(0, rows, LONG)
    assert cover.size() <= most_tiles
    assert pattern.cover_size(0, rows, LONG) < 4 * most_tiles
    length = (cover.hi - cover.lo).clamp(min=0)
    row = torch.repeat_interleave(cover.row, length)
    col = torch.arange(len(row)) - torch.repeat_interleave(length.cumsum(0) - length - cover.lo, length)
    classes = pattern.tile_class(0, row, col, LONG)
    assert len(classes[classes > 1].unique()) <= most_classes


@pytest.mark.parametrize(
    "text", ["causal", "strided(3)", "window(2147483647)", "strided(2147483647)", "dilated([2147483647], 7)"]
)
@pytest.mark.parametrize("start", [2**38, -(2**38), 2**40 - 256, 384 - 2**40])
def test_far_positions_do_not_overflow(text: str, start: int) -> None:
    grid = TileGrid(128, start, 256, 300)
    check_tiles(parse(text), grid, 0)
    if text in ("causal", "strided(3)"):
        offset = grid.start + torch.arange(256).unsqueeze(1) - torch.arange(300)
        expected = offset >= 0 if text == "causal" else (offset.abs() < 3) | (offset % 3 == 0)
        assert torch.equal(kept_of(parse(text), 256, 300, start=start), expected)


# Equivalences.


def test_documents_have_three_forms() -> None:
    ids = torch.tensor([7, 7, 7, 2, 2, 9])
    forms = [
        Documents([3, 2, 1]),
        Documents([3, 0, 2, 1]),
        Documents(cu_seqlens=torch.tensor([0, 3, 5, 6], dtype=torch.int32)),
        Documents(ids=ids),
        Documents(ids=ids.unsqueeze(0)).batch_row(0),
    ]
    assert len(set(forms)) == 1
    assert [form.text is None for form in forms] == [False, False, True, True, True]
    assert torch.equal(kept_of(forms[3], 6), ids.unsqueeze(1) == ids)
    assert forms[0] != Documents([3, 1, 2])


def test_batched_documents() -> None:
    ids = torch.tensor([[1, 1, 2, 2], [1, 1, 1, 1], [5, 5, 0, 0]])
    pattern = Causal() & Documents(ids=ids)
    assert pattern.batch_size == 3
    for row in range(3):
        expected = (ids[row].unsqueeze(1) == ids[row]).tril()
        assert torch.equal(kept_of(pattern.batch_row(row), 4), expected)
    assert pattern.batch_row(0) == pattern.batch_row(2) != pattern.batch_row(1)
    assert pattern.batch_row(0).batch_size is None
    with pytest.raises(ValueError, match=r"batch_row\(b\)"):
        kept_of(pattern, 4)
    assert per_head([pattern, Dense()]).batch_row(1) == per_head([pattern.batch_row(1), Dense()])


def test_blocks_have_two_forms() -> None:
    matrix = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    listed = Blocks(row_ptr=torch.tensor([0, 2, 2, 5]), col=torch.tensor([2, 0, 0, 1, 2]), block=4)
    expected = matrix.repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(kept_of(Blocks(matrix, block=4), 12), expected)
    assert torch.equal(kept_of(listed, 12), expected)
    assert not kept_of(Blocks(matrix, block=4), 8, start=-8).any()
    assert not kept_of(Blocks(matrix, block=4), 8, start=12).any()
    assert not kept_of(Blocks(matrix, block=4), 12, 20)[:, 12:].any()


# What a description is: immutable, hashable, equal by content.


@settings(max_examples=25)
@given(st.data())
def test_equal_patterns_hash_alike(data: st.DataObject) -> None:
    grid = data.draw(grids())
    pattern = data.draw(patterns(grid, heads=True))
    for twin in (copy.deepcopy(pattern), copy.copy(pattern)):
        assert twin == pattern
        assert hash(twin) == hash(pattern)
        assert twin.text == pattern.text
    if "Elements" not in repr(pattern):
        assert pickle.loads(pickle.dumps(pattern)) == pattern


def test_patterns_do_not_change() -> None:
    matrix, ids = torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    blocks, documents = Blocks(matrix, block=2), Documents(ids=ids)
    before = blocks, documents, hash(blocks), hash(documents)
    matrix.zero_()
    ids.zero_()
    assert kept_of(blocks, 4).all()
    assert int(kept_of(documents, 4).sum()) == 8
    assert before == (blocks, documents, hash(blocks), hash(documents))
    assert blocks != Blocks(matrix, block=2)
    assert documents != Documents(ids=ids)
    with pytest.raises(FrozenInstanceError):
        Window(3).left = 4  # type: ignore[misc]


def no_pairs(pattern: Pattern, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (head + query + key) < 0


class NoPairs:
    """A rule without a pattern, to inherit from first."""

    allowed = no_pairs


@pytest.mark.parametrize(
    ("bases", "name", "owner"),
    [
        *(((base,), "allowed", base) for base in (Dense, Causal, Window, GlobalTokens, Segments, RandomBlocks)),
        *(((base,), "allowed", base) for base in (Documents, Blocks, type(Causal() & Causal()), type(~Causal()))),
        ((offsets.OffsetPattern,), "allowed", offsets.OffsetPattern),
        ((Window,), "terms", Window),
        ((BlockDilated,), "unit", BlockDilated),
        ((SampledBlocks,), "kept", SampledBlocks),
        ((RandomBlocks,), "draws", RandomBlocks),
        ((NoPairs, Window), "allowed", Window),
        ((Causal, Window), "terms", Window),
    ],
)
def test_a_rule_that_others_follow_from_is_not_overridden(
    bases: tuple[type, ...], name: str, owner: type[Pattern]
) -> None:
    members = {name: no_pairs} if len(bases) == 1 else {}
    with pytest.raises(TypeError) as raised:
        type("Mine", bases, members)
    assert str(raised.value).startswith(f"Mine overrides {name} of {owner.__name__}, ")
    assert str(raised.value).endswith(
        f"derive from Pattern and define allowed, or combine patterns, for example {owner.__name__}(...) & Elements(fn)"
    )
    assert "\n" not in str(raised.value)


@dataclass(frozen=True, repr=False)
class EveryOther(Pattern):
    """Keys that are as even as their head, by the rule alone."""

    of: int

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key + head) % self.of == 0 * query


class Shorter(EveryOther):
    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return super().allowed(head, query, key) & (key < 40)


@pytest.mark.parametrize("backend", [None, "native", "blockwise", "dense", "reference"])
def test_rules_of_ones_own_are_kept_by_every_backend(backend: str | None) -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64).unbind()
    rules = [
        EveryOther(2),
        Shorter(2),
        Causal() & (Shorter(3) | Window(2)),
        ~Shorter(2),
        per_head([Causal(), Shorter(2)]),
    ]
    for rule in rules:
        assert rule.text is None
        kept = torch.stack([kept_of(rule, 64, head=head) for head in (0, 1)])
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
        if backend == "dense":
            with pytest.raises(ValueError, match="backend 'dense' does not support this call"):
                sparse_attention(q, k, v, rule, backend=backend)
            continue
        torch.testing.assert_close(sparse_attention(q, k, v, rule, backend=backend), expected)


def test_a_subclass_has_the_text_of_its_base_only_if_it_says_no_more() -> None:
    class Near(Window):
        def __init__(self) -> None:
            super().__init__(2)

    class Short(Window):
        def validate(self, grid: TileGrid) -> None:
            if grid.n_keys > 8:
                raise ValueError("too long")

    assert repr(Near()) == "window(2)"
    assert torch.equal(kept_of(Near(), 9), kept_of(Window(2), 9))
    assert repr(Causal() & Short(2)) == "<And without a text form>"
    q = torch.zeros(1, 1, 9, 4)
    with pytest.raises(ValueError, match="too long"):
        sparse_attention(q, q, q, Short(2))


def test_head_classes() -> None:
    assert Window(3).head_class(0) == Window(3).head_class(5)
    assert RandomBlocks(3).head_class(0) != RandomBlocks(3).head_class(1)
    assert (Causal() & ~RandomBlocks(3)).head_class(0) != (Causal() & ~RandomBlocks(3)).head_class(1)
    heads = per_head([Window(3), Causal(), Window(3)])
    assert heads.head_class(0) == heads.head_class(2) != heads.head_class(1)
    assert Blocks(torch.ones(2, 1, 1, dtype=torch.bool)).head_class(0) is not None
    assert Elements(checkerboard).head_class(0) != Elements(checkerboard).head_class(1)
    # An index has the tiles of a class of heads once.
    for pattern in map(parse, TEXTS):
        alike = torch.equal(kept_of(pattern, 40, head=0), kept_of(pattern, 40, head=1))
        assert (pattern.head_class(0) == pattern.head_class(1)) == alike, pattern


def test_envelope_is_the_causal_and_document_rules() -> None:
    documents = Documents([4, 4])
    assert (Causal() & documents & (Window(2) | GlobalTokens(1))).envelope() == Causal() & documents
    assert (Window(2) & Causal()).envelope() == Causal()
    assert (Causal() & Causal()).envelope() == Causal()
    assert ((Causal() & Window(3)) | (Causal() & Strided(4))).envelope() == Causal()
    assert (Causal() | Window(3)).envelope() == Dense()
    assert (~Causal()).envelope() == Dense()
    assert per_head([Causal() & Window(2), Causal()]).envelope() == Causal()
    assert per_head([Causal() & Window(2), Window(2)]).envelope() == Dense()
    assert bigbird().envelope() == Dense()


@pytest.mark.parametrize(
    ("text", "resized"),
    [
        ("window(3)", "window(9)"),
        ("window(3, 1)", "window(9, 1)"),
        ("dilated([1, 2], 3)", "dilated([1, 2], 9)"),
        ("block_dilated([1, 2], 3, block=16)", "block_dilated([1, 2], 9, block=16)"),
        ("random_blocks(3, seed=5, block=16)", "random_blocks(9, seed=5, block=16)"),
        ("global_tokens(3)", "global_tokens(9)"),
        ("segments(3, 2, 1)", "segments(9, 2, 1)"),
        ("causal & (global_tokens(1) | window(3))", "causal & (global_tokens(1) | window(9))"),
        ("global_tokens(1) | random_blocks(2)", "global_tokens(1) | random_blocks(9)"),
        ("window(1) | segments(2)", "window(9) | segments(2)"),
        ("~window(2) & global_tokens(3)", "~window(2) & global_tokens(9)"),
        ("per_head([window(1), causal, dense & window(2)])", "per_head([window(9), causal, dense & window(9)])"),
    ],
)
def test_resized(text: str, resized: str) -> None:
    assert repr(parse(text).resized(9)) == resized


@pytest.mark.parametrize("text", ["dense", "causal", "strided(4)", "~window(3)", "causal & documents([9])"])
def test_nothing_to_resize(text: str) -> None:
    assert parse(text).resized(9) is None


@settings(max_examples=25)
@given(st.data(), st.integers(1, 200), st.integers(1, 200))
def test_a_larger_size_keeps_the_same_and_more(data: st.DataObject, first: int, second: int) -> None:
    grid = data.draw(grids())
    leaves = primitives(grid).filter(lambda pattern: not isinstance(pattern, Segments))
    pattern = data.draw(compositions(leaves, data.draw(st.integers(0, 4))))
    small, large = pattern.resized(min(first, second)), pattern.resized(max(first, second))
    if small is None or large is None:
        assert small is large is pattern.free_rank
        return
    kept = [kept_of(p, grid.n_queries, grid.n_keys, start=grid.start) for p in (small, large)]
    assert bool((kept[0] <= kept[1]).all())


# Drawing.


def test_drawing_shows_full_mixed_and_empty_cells() -> None:
    assert Causal().draw(8, width=4) == "▒···\n█▒··\n██▒·\n███▒"
    assert Window(0).draw(3) == "█··\n·█·\n··█"
    assert Causal().draw(2, 5) == "████·\n█████"
    assert Causal().draw(2, 5, start=0) == "█····\n██···"
    assert Dense().draw(5, width=2) == "██\n██"
    assert per_head([Dense(), ~Dense()]).draw(1, head=1) == "·"


@settings(max_examples=40)
@given(problems(2), st.integers(1, 40))
def test_drawing_is_exact(problem: tuple[Pattern, TileGrid], width: int) -> None:
    pattern, grid = problem
    drawn = pattern.draw(grid.n_queries, grid.n_keys, start=grid.start, width=width).splitlines()
    cell = -(-max(grid.n_queries, grid.n_keys) // width)
    kept = kept_of(pattern, grid.n_queries, grid.n_keys, start=grid.start)
    for line, rows in zip(drawn, kept.split(cell), strict=True):
        for character, cells in zip(line, rows.split(cell, dim=1), strict=True):
            assert character == ("█" if cells.all() else "▒" if cells.any() else "·")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: Dense().draw(4097), r"at most 4096 tokens.*build_index"),
        (lambda: Dense().draw(0), "positive n_queries"),
        (lambda: Dense().draw(4, head=-1), "head=-1"),
        (lambda: Dense().draw(4, width=0), "width=0"),
        (lambda: per_head([Dense()]).draw(4, head=1), "head=1"),
        (lambda: Documents(ids=torch.zeros(2, 4, dtype=torch.int64)).draw(4), "batch_row"),
        (lambda: Documents([3]).draw(4), "n_keys=3"),
    ],
)
def test_drawing_refuses(draw: Callable[[], str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()


# What is refused.


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a and b,
        lambda a, b: a or b,
        lambda a, b: not a,
        lambda a, b: b if a & b else a,
        lambda a, b: bool(per_head([a, b])),
        lambda a, b: all([a, b]),
    ],
)
def test_a_pattern_has_no_truth_value(combine: Callable[[Pattern, Pattern], object]) -> None:
    with pytest.raises(
        TypeError, match="combine patterns with &, | and ~, not with and, or and not".replace("|", r"\|")
    ):
        combine(Causal(), Window(64))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Window(1.5), r"left=1\.5"),  # type: ignore[arg-type]
        (lambda: Window(True), "left=True"),
        (lambda: Window(2**31), "left=2147483648"),
        (lambda: Dilated(2, 3), "rates=2"),  # type: ignore[arg-type]
        (lambda: GlobalTokens([]), r"tokens=\[\]"),
        (lambda: per_document(Window(3), 4), "lengths=4"),  # type: ignore[arg-type]
        (lambda: per_document(Causal, [4]), "pattern: expected a Pattern or its text"),  # type: ignore[arg-type]
        (lambda: RandomBlocks(1, seed=2**64), "seed=18446744073709551616"),
        (lambda: Documents(), "exactly one"),
        (lambda: Documents([]), r"lengths=\[\]"),
        (lambda: Documents(cu_seqlens=torch.tensor([1, 3])), r"cu_seqlens=\[1, 3\]"),
        (lambda: Documents(cu_seqlens=torch.tensor([0, 3, 2])), r"cu_seqlens=\[0, 3, 2\]"),
        (lambda: Documents(cu_seqlens=torch.tensor([0.0, 3.0])), "cu_seqlens.dtype=torch.float32"),
        (lambda: Documents(cu_seqlens=torch.zeros(1, 2, dtype=torch.int64)), r"cu_seqlens.shape=\(1, 2\)"),
        (lambda: Documents(ids=torch.zeros(1, 1, 2, dtype=torch.int64)), r"ids.shape=\(1, 1, 2\)"),
        (lambda: Documents(ids=torch.tensor([[1, 1, 1], [1, 2, 1]])), "id 1 again"),
        (lambda: Blocks(), "either a matrix or both"),
        (lambda: Blocks(torch.ones(2, 2)), r"matrix.dtype=torch.float32"),
        (lambda: Blocks(torch.ones(2, dtype=torch.bool)), r"matrix.shape=torch.Size\(\[2\]\)"),
        (lambda: Blocks(torch.ones(0, 2, dtype=torch.bool)), "non-empty"),
        (lambda: Blocks(torch.ones(1, 1, dtype=torch.bool), block=0), "block=0"),
        (lambda: Blocks(row_ptr=torch.tensor([0, 2]), col=torch.tensor([1])), r"row_ptr\[-1\]=2"),
        (lambda: Blocks(row_ptr=torch.tensor([0, 2, 1]), col=torch.tensor([1])), "smallest step -1"),
        (lambda: Blocks(row_ptr=torch.tensor([0, 1]), col=torch.tensor([-1])), r"col.min\(\)=-1"),
        (lambda: Blocks(row_ptr=torch.tensor([0.0, 1]), col=torch.tensor([1])), "row_ptr.dtype"),
        (lambda: Elements(3), "fn=3"),  # type: ignore[arg-type]
        (lambda: kept_of(Elements(lambda h, q, k: q + k), 4), "bool tensor, got torch.int64"),
        (lambda: kept_of(Elements(lambda h, q, k: torch.ones(3, dtype=torch.bool)), 4), r"shape \(4, 4\), got \(3,\)"),
        (lambda: per_head([]), "non-empty sequence"),
        (lambda: per_head([per_head([Causal()])]), "any head"),
        (lambda: per_head([Causal()]) & per_head([Causal(), Dense()]), "same num_heads, got 1 and 2"),
        (
            lambda: Documents(ids=torch.zeros(2, 4, dtype=torch.int64)) | Documents(ids=torch.zeros(3, 4).long()),
            "same batch_size, got 2 and 3",
        ),
        (
            lambda: per_head([Documents(ids=torch.zeros(n, 4, dtype=torch.int64)) for n in (2, 3)]),
            r"one batch_size, got \[2, 3\]",
        ),
        (lambda: longnet_union([4, 8], [1]), "dilation_rates"),
        (lambda: hierarchical(100, 400), "expects a multiple of block=128, got local=100"),
        (lambda: hierarchical(128, 200), "expects a multiple of local=128, got node=200"),
        (lambda: hierarchical(128, 256, 1.5), "expects 0 <= local_density <= 1, got local_density=1.5"),
        (lambda: hierarchical(128, 256, 0.5, math.nan), "expects 0 <= node_density <= 1, got node_density=nan"),
    ],
)
def test_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("window(-1)", "left=-1"),
        ("window(1, -2)", "right=-2"),
        ("dilated([], 3)", r"rates=\[\]"),
        ("dilated([0], 3)", "rates=0"),
        ("dilated([1], -3)", "window=-3"),
        ("block_dilated([1], 3, 0)", "block=0"),
        ("block_dilated([1], -1)", "reach=-1"),
        ("strided(0)", "stride=0"),
        ("global_tokens(-1)", "tokens=-1"),
        ("global_tokens([3, -1])", "tokens=-1"),
        ("random_blocks(-1)", "per_row=-1"),
        ("random_blocks(1, seed=-1)", "seed=-1"),
        ("random_blocks(1, block=0)", "block=0"),
        ("segments(0)", "length=0"),
        ("segments(4, 0)", "dilation=0"),
        ("segments(4, 2, -1)", "shift=-1"),
        ("documents([-3])", "lengths=-3"),
    ],
)
def test_refused_texts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_wrong_operands_are_type_errors() -> None:
    for operation in (lambda: Causal() & 3, lambda: Causal() | None):  # type: ignore[operator]
        with pytest.raises(TypeError):
            operation()


@pytest.mark.parametrize(
    ("pattern", "grid", "message"),
    [
        (Documents([3, 4]), TileGrid(16, 0, 8, 8), "n_keys=7, got n_keys=8"),
        (Documents([3, 4]), TileGrid(16, -1, 8, 7), "start=-1"),
        (Documents([3, 4]), TileGrid(16, 1, 7, 7), "start=1, n_queries=7"),
        (Blocks(torch.ones(2, 2, dtype=torch.bool), block=16), TileGrid(16, 0, 32, 33), "3 columns .* got 2"),
        (Blocks(torch.ones(2, 2, dtype=torch.bool), block=16), TileGrid(16, 0, 33, 32), "n_queries=33"),
        (Blocks(torch.ones(2, 2, dtype=torch.bool), block=16), TileGrid(16, -8, 32, 24), "start=-8"),
        (Blocks(row_ptr=torch.tensor([0, 1]), col=torch.tensor([2]), block=16), TileGrid(16, 0, 9, 32), "got 3"),
    ],
)
def test_wrong_lengths_are_refused_in_any_composition(pattern: Pattern, grid: TileGrid, message: str) -> None:
    for composition in (pattern, Causal() & pattern, ~pattern | Dense(), per_head([Dense(), pattern])):
        with pytest.raises(ValueError, match=message):
            composition.validate(grid)
