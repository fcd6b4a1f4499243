"""The block index: the right pairs, each list in order, within its budgets, and cached."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter

import pytest
import torch
from hypothesis import given, settings, strategies as st
from indices import NAMES, edited
from oracle import rule_everywhere
from strategies import checkerboard, grids, patterns, problems
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ringtile.index import (
    BlockIndex,
    build as build_module,
    build_index,
    build_rows,
    cache_info,
    clear_cache,
    covers,
    needed,
    set_cache_limit,
    tiles as tiles_module,
)
from ringtile.index.lists import Entries, work_list
from ringtile.index.tiles import EMPTY, FULL, TileCollector, pack_words, unpack_words
from ringtile.patterns import (
    Blocks,
    Causal,
    Dense,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    TileGrid,
    Window,
    parse,
    per_head,
    streaming,
)

MILLION = 1 << 20


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    clear_cache()


def built(pattern: Pattern, grid: TileGrid, **options: int) -> BlockIndex:
    return build_index(pattern, grid.n_queries, grid.n_keys, start=grid.start, block=grid.block, **options)


def in_tiles(dense: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
    """Kept and existing pairs of every tile of a matrix ``[n_queries, n_keys]``."""
    row = torch.arange(grid.start, grid.start + grid.n_queries) // grid.block - grid.first_row
    col = torch.arange(grid.n_keys) // grid.block
    rows, cols = torch.nn.functional.one_hot(row, grid.n_rows).T, torch.nn.functional.one_hot(col, grid.n_cols)
    return rows @ dense.long() @ cols, rows @ torch.ones_like(dense).long() @ cols


def check_lists(index: BlockIndex) -> None:
    """Everything that kernels take for granted, checked entry by entry."""
    tables = []
    for lists, slots, others in ((index.rows, index.n_rows, index.n_cols), (index.cols, index.n_cols, index.n_rows)):
        table, lengths = torch.full((index.n_groups * slots, others), EMPTY), torch.zeros(index.n_groups * slots).long()
        for begins, other, tile in ((lists.full_ptr, lists.full, None), (lists.partial_ptr, lists.partial, lists.tile)):
            assert (len(begins), int(begins[0]), int(begins[-1])) == (len(lengths) + 1, 0, len(other))
            lengths += begins.diff()
            for slot, (first, last) in enumerate(pairwise(begins.tolist())):
                assert (other[first:last].diff() > 0).all()
                assert (table[slot, other[first:last].long()] == EMPTY).all()
                table[slot, other[first:last].long()] = FULL if tile is None else tile[first:last].long()
        check_work(lists.work, lengths.tolist())
        tables.append(table.view(index.n_groups, slots, others))
    assert torch.equal(tables[0], tables[1].mT)


def same_lists(one: BlockIndex, other: BlockIndex) -> bool:
    """Equal lists in both directions, whatever the numbers of the tiles."""
    lists = ((*index.rows[:4], *index.cols[:4], index.rows.work) for index in (one, other))
    return all(map(torch.equal, *lists))


def check_work(work: Tensor, lengths: list[int]) -> None:
    limit = max(64, math.ceil(sum(lengths) / 512))
    pieces: dict[int, list[tuple[int, int, int]]] = {slot: [] for slot in range(len(lengths))}
    sizes = []
    for slot, first, last, split in work.tolist():
        pieces[slot].append((split, first, last))
        sizes.append(last - first)
    assert sizes == sorted(sizes, reverse=True)
    scratch = 0
    for slot, length in enumerate(lengths):
        own = sorted(pieces[slot])
        assert [first for _, first, _ in own] == [0, *(last for _, _, last in own)][:-1]
        assert own[-1][2] == length
        if length <= limit:
            assert own == [(-1, 0, length)]
        else:
            assert [split for split, _, _ in own] == list(range(scratch, scratch + len(own)))
            scratch += len(own)
            widths = [last - first for _, first, last in own]
            assert len(own) == math.ceil(length / limit)
            assert max(widths) <= min(widths) + 1


def covered(pattern: Pattern, grid: TileGrid) -> TileGrid:
    """The lengths that an index is built for: whole tiles, if the rule is defined beyond the lengths."""
    return grid.whole if pattern.unbounded else grid


def check_tiles(index: BlockIndex, dense: Tensor, grid: TileGrid) -> None:
    """The tile table against a matrix ``[G, n_queries, n_keys]`` of a grid: no tile is empty, full or there twice."""
    block = index.block
    mask = unpack_words(index.table.bits, block)
    assert torch.equal(unpack_words(index.table.bits_t, block), mask.mT)
    assert torch.equal(unpack_words(index.table.rows_any, block), mask.any(2))
    assert torch.equal(unpack_words(index.table.cols_any, block), mask.any(1))
    assert len(index.table.bits.unique(dim=0)) == len(index.table.bits)
    assert set(index.rows.tile.tolist()) == set(range(len(index.table.bits)))
    number, state = index.entries()
    for group, matrix in enumerate(dense):
        kept, existing = in_tiles(matrix, grid)
        of_group = (number // (index.n_rows * index.n_cols) == group) & (index.n_rows > 0)
        place = number[of_group] % (index.n_rows * index.n_cols)
        stored = torch.zeros(index.n_rows * index.n_cols, dtype=torch.int64)
        stored[place] = torch.where(state[of_group] == FULL, 2, 1)
        expected = torch.where(kept == existing, 2, (kept > 0).long())
        assert torch.equal(stored, expected.flatten())


@settings(max_examples=60)
@given(st.data())
def test_index_is_the_element_rule(data: st.DataObject) -> None:
    grid = data.draw(grids())
    pattern = data.draw(patterns(grid, operators=data.draw(st.integers(0, 5)), heads=True))
    heads = pattern.num_heads or data.draw(st.integers(1, 3))
    index = built(pattern, grid, num_heads=heads)
    expected = torch.stack([rule_everywhere(pattern, grid, head) for head in range(heads)])
    assert torch.equal(index.to_dense().expand(1, heads, -1, -1)[0], expected)
    width = index.group.shape[1]
    assert width in (1, heads)
    assert index.kept_pairs * heads == int(expected.sum()) * width
    envelope = rule_everywhere(pattern.envelope(), grid)
    assert index.allowed_pairs == int(envelope.sum()) * width
    assert index.allowed_tiles == int((in_tiles(envelope, grid)[0] > 0).sum()) * width
    tiles = covered(pattern, grid)
    everywhere = torch.stack([rule_everywhere(pattern, tiles, head) for head in range(heads)])
    touched = sum(int((in_tiles(of_head, grid)[0] > 0).sum()) for of_head in expected)
    assert index.kept_tiles * heads == touched * width
    assert torch.equal(index.trimmed().to_dense(), index.to_dense())
    assert index.density == (index.kept_pairs / index.allowed_pairs if index.allowed_pairs else 0)
    assert index.tile_density == (index.kept_tiles / index.allowed_tiles if index.allowed_tiles else 0)
    first_head = [int((index.group[0] == group).int().argmax()) for group in range(index.n_groups)]
    check_tiles(index, everywhere[first_head], tiles)
    check_lists(index)
    index.validate()


@settings(max_examples=40)
@given(problems(), st.data())
def test_remapped_tiles_lie_in_a_buffer(problem: tuple[Pattern, TileGrid], data: st.DataObject) -> None:
    pattern, grid = problem
    index, block = built(pattern, grid), grid.block
    everything = torch.zeros(grid.n_rows * block, grid.n_cols * block, dtype=torch.bool)
    lead = grid.start % block
    everything[lead : lead + grid.n_queries, : grid.n_keys] = rule_everywhere(pattern, grid)
    tiles = everything.view(grid.n_rows, block, grid.n_cols, block)
    rows = torch.tensor(data.draw(st.permutations(range(grid.n_rows))))
    rows = rows[: data.draw(st.integers(1, grid.n_rows))]
    needed = tiles[rows].any(3).any(1).any(0)
    spare = torch.rand(grid.n_cols, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9)))) < 0.5
    cols = torch.tensor(data.draw(st.permutations((needed | spare).nonzero().flatten().tolist())), dtype=torch.int64)
    moved = index.remapped(rows, cols)
    expected = tiles[rows][:, :, cols].reshape(len(rows) * block, len(cols) * block)
    first, last = int(rows[0]) == 0, int(rows[-1]) == grid.n_rows - 1
    top = lead if first else 0
    bottom = len(expected) - (-(grid.start + grid.n_queries) % block if last else 0)
    width = expected.shape[1] - (-grid.n_keys % block if cols[-1:].tolist() == [grid.n_cols - 1] else 0)
    assert (moved.start, moved.n_queries, moved.n_keys) == (top, bottom - top, width)
    assert torch.equal(moved.to_dense()[0, 0], expected[top:bottom, :width])
    assert torch.equal(moved.rows.at.long(), rows + grid.first_row)
    assert torch.equal(moved.cols.at.long(), cols)
    moved.validate()
    check_lists(moved)
    if needed.any():
        with pytest.raises(
            ValueError, match=f"cols: expected all columns that the rows keep, .* {int(needed.int().argmax())}"
        ):
            index.remapped(rows, cols[cols != int(needed.int().argmax())])


@settings(max_examples=30)
@given(st.data())
def test_chosen_rows_are_those_of_the_whole(data: st.DataObject) -> None:
    drawn = data.draw(grids())
    grid = TileGrid(drawn.block, 0, drawn.n_keys, drawn.n_keys)
    pattern = data.draw(patterns(grid, heads=True))
    heads = pattern.num_heads or data.draw(st.integers(1, 3))
    chosen = data.draw(st.sets(st.integers(0, grid.n_rows - 1), min_size=1)) if grid.n_rows else set()
    rows = torch.tensor(sorted(chosen), dtype=torch.int64)
    index = build_rows(pattern, rows, grid.n_keys, num_heads=heads, block=grid.block)
    expected = torch.stack([rule_everywhere(pattern, grid, head) for head in range(heads)])
    query = torch.arange(grid.n_queries)
    mine = torch.isin(query // grid.block, rows)
    assert torch.equal(index.to_dense().expand(1, heads, -1, -1)[0], expected[:, mine])
    assert index.rows.at.tolist() == rows.tolist()
    index.validate()
    parts = torch.tensor([data.draw(st.integers(0, 2)) for _ in chosen], dtype=torch.int64)
    touched = needed(pattern, rows, parts, 3, grid, num_heads=heads)
    assert touched.shape == (3, grid.n_cols)
    for part in range(3):
        for row in rows[parts == part].tolist():
            kept = expected[:, query // grid.block == row].any(0).any(0)
            cols = torch.arange(grid.n_keys)[kept] // grid.block
            assert touched[part, cols].all()


def test_needed_columns_are_exact_for_windows() -> None:
    n_tokens, ranks = 1 << 20, 64
    grid = TileGrid(128, 0, n_tokens, n_tokens)
    rows = torch.arange(grid.n_rows)
    touched = needed(Causal() & (Window(4096) | GlobalTokens(128)), rows, rows * ranks // len(rows), ranks, grid)
    per_rank = grid.n_rows // ranks
    assert touched.sum(1).tolist() == [per_rank, *[per_rank + 33] * (ranks - 1)]
    shared = torch.tensor([1, 1, 2])
    assert needed(Causal(), shared, torch.arange(3), 3, TileGrid(128, 0, 512, 512)).sum(1).tolist() == [2, 2, 3]
    assert needed(Elements(checkerboard), shared, torch.arange(3), 3, TileGrid(128, 0, 512, 512)).all()
    with pytest.raises(ValueError, match="over max_bytes=1,000"):
        needed(Causal(), rows, rows, len(rows), grid, max_bytes=1000)


@pytest.mark.parametrize(
    ("text", "per_row"),
    [("random_blocks(2)", 2), ("strided(512)", 19), ("block_dilated([8], 20)", 9), ("window(100) & ~window(50)", 2)],
)
def test_causal_takes_no_tiles_beyond_those_of_the_other_rule(text: str, per_row: int) -> None:
    pattern, grid = parse(text), TileGrid(128, 0, 8192, 8192)
    rows = torch.arange(grid.n_rows)
    found = [needed(rule, rows, rows, len(rows), grid) for rule in (Causal() & pattern, pattern & Causal())]
    assert torch.equal(*found)
    assert int(found[0].sum(1).max()) <= per_row


def test_only_runs_of_remapped_tiles_are_coarsened() -> None:
    index = build_index(Causal() & Window(300), 512, block=32)
    runs = torch.cat([torch.arange(8, 16), torch.arange(4, 8)])
    moved = index.remapped(runs, torch.arange(16)).coarsen(128)
    assert moved.rows.at.tolist() == [2, 3, 1]
    assert moved.cols.at.tolist() == [0, 1, 2, 3]
    direct = build_index(Causal() & Window(300), 512).remapped(torch.tensor([2, 3, 1]), torch.arange(4))
    assert torch.equal(moved.to_dense(), direct.to_dense())
    moved.validate()
    with pytest.raises(ValueError, match=r"rows\.at: coarsen expects runs of 4 tiles"):
        index.remapped(runs.flip(0), torch.arange(16)).coarsen(128)


@settings(max_examples=30)
@given(problems(), st.sampled_from([32, 64, 128]))
def test_coarsening_is_building_with_the_larger_block(problem: tuple[Pattern, TileGrid], block: int) -> None:
    pattern, grid = problem
    if grid.block > block:
        grid = replace(grid, block=16)
    coarse, direct = built(pattern, grid).coarsen(block), built(pattern, replace(grid, block=block))
    assert torch.equal(coarse.to_dense(), direct.to_dense())
    assert coarse.kept_pairs == direct.kept_pairs
    # Beyond the smaller tiles nothing is known, so the lists are the same only if the larger ones end with them.
    grid = replace(covered(pattern, replace(grid, block=block)), block=grid.block)
    coarse, direct = built(pattern, grid).coarsen(block), built(pattern, replace(grid, block=block))
    assert same_lists(coarse, direct)
    for name in ("kept_pairs", "allowed_pairs", "allowed_tiles", "grid"):
        assert getattr(coarse, name) == getattr(direct, name), name
    check_lists(coarse)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 0), (0, 300), (300, 0)])
def test_empty_lengths_give_an_empty_index(n_queries: int, n_keys: int) -> None:
    index = build_index(Causal() & per_head([Window(3), Dense()]), n_queries, n_keys, num_heads=2)
    assert (index.kept_pairs, index.allowed_pairs, index.kept_tiles, index.density) == (0, 0, 0, 0.0)
    assert index.to_dense().shape == (1, 2, n_queries, n_keys)
    assert index.rows.full_ptr.tolist() == [0] * (2 * index.n_rows + 1)
    assert index.n_groups == 2
    assert index.draw() == ""
    check_lists(index)


def test_heads_and_batch_rows_share_groups() -> None:
    near, far = Window(3), Window(90)
    index = build_index(per_head([near, far, near]), 200, num_heads=3)
    assert index.group.tolist() == [[0, 1, 0]]
    assert index.kept_pairs == int(index.to_dense().sum())
    assert build_index(near, 200, num_heads=7, batch=5).group.tolist() == [[0]]
    ids = torch.zeros(3, 200, dtype=torch.int64)
    ids[1, 130:] = 1
    index = build_index(Documents(ids=ids) & near, 200, num_heads=4, batch=3)
    assert index.group.tolist() == [[0], [1], [0]]
    both = build_index(Documents(ids=ids) & per_head([near, far]), 200, num_heads=2, batch=3)
    assert both.group.tolist() == [[0, 1], [2, 3], [0, 1]]
    assert both.allowed_pairs == 2 * (2 * 200**2 + 130**2 + 70**2)
    assert both.kept_pairs == int(both.to_dense().sum())
    assert both.allowed_tiles == 2 * (4 + 4 + 4)
    assert torch.equal(both.to_dense()[1, 1], rule_everywhere(Documents([130, 70]) & far, both.grid))


def test_tiles_are_shared_between_groups_and_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = per_head([Causal(), ~Window(130, 0) & Causal()])
    whole = build_index(pattern, 1000, num_heads=2)
    clear_cache()
    monkeypatch.setattr(covers, "_STRIP", 3)
    strips = build_index(pattern, 1000, num_heads=2)
    assert torch.equal(strips.to_dense(), whole.to_dense())
    assert same_lists(strips, whole)
    assert len(strips.table.bits) == len(whole.table.bits) == len(whole.table.bits.unique(dim=0))


def test_tiles_that_share_a_digest_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, grid = Causal() & Elements(checkerboard), TileGrid(32, 0, 200, 200)
    monkeypatch.setattr(tiles_module, "odd_numbers", lambda count: torch.zeros(count, dtype=torch.int64))
    assert torch.equal(built(pattern, grid).to_dense()[0, 0], rule_everywhere(pattern, grid))


def test_collector_merges_while_it_collects() -> None:
    collector = TileCollector(16, torch.device("cpu"))
    distinct = torch.rand(700, 16, 16) < 0.5
    order = [torch.randint(0, 700, (1000,)) for _ in range(12)]
    states = torch.cat([collector.add(pack_words(distinct[numbers])) for numbers in order])
    assert len(collector._bits) == 700
    bits, translate = collector.finish()
    assert torch.equal(unpack_words(bits[translate[states]], 16), distinct[torch.cat(order)])


def test_long_rows_and_columns_are_cut_into_equal_pieces() -> None:
    index = build_index(Window(512) | GlobalTokens(64), 1 << 15)
    check_lists(index)
    row = index.rows.work[index.rows.work[:, 0] == 0]
    col = index.cols.work[index.cols.work[:, 0] == 0]
    assert sorted(row[:, 1:].tolist()) == [[64 * n, 64 * n + 64, n] for n in range(4)]
    assert len(col) == 4
    assert bool((index.rows.work[index.rows.work[:, 0] != 0][:, 3] == -1).all())


@given(st.lists(st.integers(0, 400), max_size=30), st.lists(st.integers(0, 400), max_size=30))
def test_work_list_covers_every_entry_once(full: list[int], part: list[int]) -> None:
    count = min(len(full), len(part))
    pointers = [
        torch.tensor([0, *sizes[:count]], dtype=torch.int32).cumsum(0, dtype=torch.int32) for sizes in (full, part)
    ]
    check_work(work_list(*pointers), [a + b for a, b in zip(full[:count], part[:count], strict=True)])


def test_work_pieces_grow_with_the_number_of_entries() -> None:
    sizes = torch.full((5000,), 66)
    sizes[7] = 700
    begins = torch.cat((torch.zeros(1), sizes.cumsum(0))).int()
    assert int(begins[-1]) / 512 > 66
    check_work(work_list(torch.zeros_like(begins), begins), sizes.tolist())


# Budgets.


def test_element_rule_is_evaluated_once_per_class_of_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    rule = Window.allowed

    def counted(window: Window, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kept = rule(window, head, query, key)
        asked.append(kept.numel())
        return kept

    monkeypatch.setattr(Window, "allowed", counted)
    clear_cache()
    index = build_index(Causal() & Window(2048, 0), MILLION)
    assert index.kept_tiles == sum(min(row + 1, 17) for row in range(8192))
    assert sum(asked) == 2 * 128 * 128


def profiled(pattern: Pattern, n_tokens: int, **options: int) -> tuple[BlockIndex | None, int, int]:
    """The index, the peak bytes of its build and the number of aten calls."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        try:
            index = build_index(pattern, n_tokens, **options)
        except ValueError:
            index = None
    events = profile.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return index, peak, sum(event.name().startswith("aten::") for event in events)


@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_million_tokens_within_the_budgets() -> None:
    for pattern in (Causal() & Window(4096, 0), Window(512) | GlobalTokens(64) | RandomBlocks(3)):
        index, peak, _ = profiled(pattern, MILLION)
        assert index is not None
        assert index.nbytes <= 4 << 20
        assert index.nbytes < peak <= 64 << 20


@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operator_calls_do_not_grow_with_the_length() -> None:
    pattern = Causal() & (Window(1000) | GlobalTokens(64))
    _, _, short = profiled(pattern, 1 << 15)
    _, _, long = profiled(pattern, 1 << 18)
    assert 100 < long <= short + 50


@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_too_many_candidates_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ValueError, match=r"~window\(5\) .* 67,108,864 tiles .* 8,589,934,592 bytes, .*2,147,483,648"):
        build_index(~Window(5), MILLION)
    index, peak, _ = profiled(~Window(5), MILLION)
    assert index is None
    assert peak < 1 << 20
    assert cache_info().entries == 0
    with pytest.raises(ValueError, match="over max_bytes=100,000"):
        build_index(Dense(), 4096, max_bytes=100_000)
    assert build_index(~Window(5), 1 << 14).kept_pairs == (1 << 28) - 11 * (1 << 14) + 30


def test_too_many_distinct_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct tiles need"):
        build_index(
            Elements(checkerboard) & Elements(lambda h, i, j: i * j % 1009 < 500), 1024, block=32, max_bytes=200_000
        )


# The cache.


def test_equal_requests_share_one_index() -> None:
    first = build_index(Causal() & Window(5), 300)
    assert build_index(Causal() & Window(5), 300, 300, start=0, device="cpu") is first
    assert cache_info()[:3] == (1, 1, 1)
    assert cache_info().nbytes == first.nbytes
    for other in (
        build_index(Causal() & Window(6), 300),
        build_index(Causal() & Window(5), 301),
        build_index(Causal() & Window(5), 300, 301),
        build_index(Causal() & Window(5), 300, start=1),
        build_index(Causal() & Window(5), 300, start=128),
        build_index(Causal() & Window(5), 300, block=64),
    ):
        assert other is not first
    # 301 tokens, or a start of 1, touch the same tiles.
    assert cache_info()[:3] == (4, 4, 4)
    assert build_index(Elements(checkerboard), 50) is build_index(Elements(checkerboard), 50)
    clear_cache()
    assert cache_info()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "pattern",
    [
        Causal(),
        ~Window(40),
        Causal() & (Window(100) | RandomBlocks(2) | GlobalTokens(3)),
        parse("segments(90, 3) | strided(50)"),
        parse("per_head([causal & dilated([1, 7], 9), block_dilated([1, 3], 1, block=40)])"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("block", [16, 128])
def test_lengths_that_touch_the_same_tiles_share_one_index(pattern: Pattern, block: int) -> None:
    heads = pattern.num_heads or 1
    whole = TileGrid(block, 2 * block, 2 * block, 4 * block)
    first = built(pattern, whole, num_heads=heads)
    for start, end, n_keys in ((0, 0, 0), (5, 0, 3), (0, 7, 0), (block - 1, block - 1, block - 1), (3, 9, 1)):
        grid = TileGrid(block, whole.start + start, whole.n_queries - start - end, whole.n_keys - n_keys)
        index = built(pattern, grid, num_heads=heads)
        assert all(x is y for x, y in zip(index.tensors(), first.tensors(), strict=True))
        expected = torch.stack([rule_everywhere(pattern, grid, head) for head in range(heads)])
        assert torch.equal(index.to_dense().expand(1, heads, -1, -1)[0], expected)
        assert index.kept_pairs * heads == int(expected.sum()) * index.group.shape[1]
        assert index.allowed_pairs == int(rule_everywhere(pattern.envelope(), grid).sum()) * index.group.shape[1]
        assert built(pattern, grid, num_heads=heads) is index
        index.validate()
    assert cache_info().misses == 1
    assert cache_info().nbytes == first.nbytes


def test_a_rule_that_is_bound_to_lengths_is_never_asked_beyond_them() -> None:
    """Its index is built anew for other lengths, also inside a composition."""
    kept = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.5

    def rule(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return kept[query] & kept[key]

    for pattern in (Elements(rule), Causal() & Elements(rule), per_head([~Elements(rule)]), Documents([100, 200])):
        assert not pattern.unbounded
        index = build_index(pattern, 300)
        assert torch.equal(index.to_dense()[0, 0], rule_everywhere(pattern, index.grid))
    clear_cache()
    assert [build_index(Causal() & Elements(rule), length).n_keys for length in (299, 300, 299)] == [299, 300, 299]
    assert cache_info()[:2] == (1, 2)


def test_only_the_last_lengths_of_an_index_are_remembered() -> None:
    first = build_index(Causal(), 500)
    for n_tokens in range(400, 512):
        build_index(Causal(), n_tokens)
    (entry,) = build_module._cache._entries.values()
    assert len(entry) == build_module._LENGTHS
    assert build_index(Causal(), 500).n_queries == first.n_queries
    assert cache_info().misses == 1


@pytest.fixture
def _cache_limit_restored() -> None:
    yield
    set_cache_limit(256 << 20)


@pytest.mark.usefixtures("_cache_limit_restored")
def test_least_recently_used_indices_are_dropped() -> None:
    indices = [build_index(Window(size), 1000) for size in range(3)]
    assert build_index(Window(0), 1000) is indices[0]
    set_cache_limit(indices[0].nbytes + indices[2].nbytes)
    assert cache_info().entries == 2
    assert build_index(Window(0), 1000) is indices[0]
    assert build_index(Window(2), 1000) is indices[2]
    assert build_index(Window(1), 1000) is not indices[1]
    set_cache_limit(0)
    assert cache_info()[2:] == (0, 0, 0)
    assert build_index(Window(0), 1000) is not build_index(Window(0), 1000)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="limit"):
            set_cache_limit(wrong)


def test_an_index_that_a_cuda_graph_reads_is_not_freed() -> None:
    index = build_index(Window(1), 100)
    key = ("anything",)
    cache = build_module._IndexCache(index.nbytes)
    cache.put(key, index.grid, index)
    assert cache.get(key, index.grid, True) is index
    cache.resize(0)
    assert cache.get(key, index.grid, False) is None
    assert list(cache._captured.values()) == [index]
    cache.clear()
    assert not cache._captured


def test_threads_get_the_bits_of_a_single_thread() -> None:
    pattern = Causal() & (Window(100) | RandomBlocks(2))
    lengths = [200, 333, 512, 1000]
    alone = {length: build_index(pattern, length, num_heads=3).tensors() for length in lengths}
    clear_cache()
    results: list[list[BlockIndex]] = [[] for _ in range(8)]
    barrier = threading.Barrier(8)

    def work(own: list[BlockIndex]) -> None:
        barrier.wait()
        for _ in range(5):
            own.extend(build_index(pattern, length, num_heads=3) for length in lengths)

    threads = [threading.Thread(target=work, args=(own,)) for own in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in results:
        assert len(own) == 20
        for number, index in enumerate(own):
            assert index is results[0][number]
            assert all(map(torch.equal, index.tensors(), alone[index.n_queries]))
    info = cache_info()
    assert info.hits + info.misses == 160
    assert info.entries == 4


# Where it is built.


def assert_real(index: BlockIndex) -> None:
    for tensor in index.tensors():
        assert type(tensor) is Tensor
        assert not isinstance(tensor, FakeTensor)
        assert tensor.device == torch.device("cpu")
        assert not tensor.is_inference()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    assert index.to_dense().any()


def test_built_outside_the_modes_of_the_caller() -> None:
    pattern = Causal() & (Window(20) | RandomBlocks(1) | parse("segments(30, 2)"))
    indices: list[BlockIndex] = []

    def attend(x: Tensor) -> Tensor:
        indices.append(build_index(pattern, 200 + len(indices)))
        return x.sum()

    with FakeTensorMode():
        attend(torch.ones(3))
    torch.vmap(attend)(torch.ones(2, 3))
    torch.func.grad(attend)(torch.ones(3))
    torch.func.grad(lambda x: torch.vmap(attend)(x).sum())(torch.ones(2, 3))
    torch.func.jvp(attend, (torch.ones(3),), (torch.ones(3),))
    with torch.inference_mode():
        attend(torch.ones(3))
    with torch.device("meta"):
        attend(torch.ones(3))
    assert len(indices) == 7
    for index in indices:
        assert_real(index)
        plain = replace(index)
        clear_cache()
        again = build_index(pattern, plain.n_queries)
        assert all(map(torch.equal, index.tensors(), again.tensors()))


def test_repr_reads_no_tensor() -> None:
    index = build_index(Causal(), 300)
    with FakeTensorMode() as mode:
        assert repr(edited(index, mode.from_tensor)) == repr(index)


def test_counts_are_summed_over_heads_that_share_a_group() -> None:
    index = build_index(Causal() & Window(40), 384)
    shared = replace(index, group=torch.zeros(2, 3, dtype=torch.int32), envelopes=(Causal(), Causal()))
    for name in ("kept_pairs", "kept_tiles", "allowed_pairs", "allowed_tiles"):
        assert getattr(shared, name) == 6 * getattr(index, name)
    assert shared.density == index.density


def test_tensors_and_back() -> None:
    index = build_index(Causal() & Window(30), 200, 260)
    assert all(x is attrgetter(name)(index) for name, x in zip(NAMES, index.tensors(), strict=True))
    again = BlockIndex.from_tensors(index.tensors(), index.grid, index.envelopes)
    assert torch.equal(again.to_dense(), index.to_dense())
    assert again.density == index.density
    with pytest.raises(ValueError, match="expected 19 of them, got 18"):
        BlockIndex.from_tensors(index.tensors()[:-1], index.grid)
    assert index.to("cpu") is index
    assert index.to("meta").rows.partial.device.type == "meta"


@pytest.mark.gpu
def test_built_on_the_device() -> None:
    for pattern in (Causal() & Window(700, 0), Window(512) | GlobalTokens(64) | RandomBlocks(3)):
        here, there = build_index(pattern, 5000, num_heads=2), build_index(pattern, 5000, num_heads=2, device="cuda")
        assert there.device.type == "cuda"
        assert torch.equal(there.to_dense().cpu(), here.to_dense())
        assert there.kept_pairs == here.kept_pairs
        there.validate()


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": 3}, "pattern: expected a Pattern or its text, got int"),
        ({"n_queries": -1}, "n_queries: expected an integer of at least 0, got -1"),
        ({"n_queries": True}, "n_queries"),
        ({"n_keys": -5}, "n_keys"),
        ({"start": 1.5}, "start: expected an integer, got 1.5"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 10**20}, "num_heads: expected an integer from 1 to 65,536, got 10+$"),
        ({"batch": 0}, "batch"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"block": 100}, r"block: expected one of \(16, 32, 64, 128\) or 'auto', got 100"),
        ({"block": "big"}, "block"),
        ({"pattern": per_head([Causal(), Dense()]), "num_heads": 3}, "num_heads: .* written for 2, got num_heads=3"),
        ({"pattern": Documents(ids=torch.zeros(2, 100, dtype=torch.int64))}, "batch: .* written for 2, got batch=1"),
        ({"pattern": Documents([40, 40])}, "n_keys"),
        ({"pattern": Blocks(torch.ones(3, 3, dtype=torch.bool))}, "columns"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], words: str) -> None:
    arguments = {"pattern": Causal(), "n_queries": 100, **options}
    with pytest.raises(ValueError, match=words):
        build_index(**arguments)
    assert cache_info().entries == 0


def test_wrong_uses_of_an_index_are_named() -> None:
    index = build_index(Causal(), 1000, block=64)
    for block in (32, 256, 100):
        with pytest.raises(ValueError, match=r"block: expected one of \[64, 128\]"):
            index.coarsen(block)
    tiles = torch.arange(16)
    for rows in (tiles.int(), tiles[None], tiles + 1, tiles - 1):
        with pytest.raises(ValueError, match=r"rows: expected int64 \[any\] of tile numbers below 16"):
            index.remapped(rows, tiles)
    with pytest.raises(ValueError, match="cols: expected distinct tile numbers"):
        index.remapped(tiles, tiles // 2)
    with pytest.raises(ValueError, match="group: expected 0 <= group < 1, got 1"):
        index.draw(1)
    with pytest.raises(ValueError, match="width"):
        index.draw(width=0)
    with pytest.raises(ValueError, match="to_dense expects at most 268,435,456 elements"):
        build_index(Causal() & Window(10), 1 << 15).to_dense()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("rows.full", lambda t: t.long(), "rows.full: expected int32"),
        ("table.bits", lambda t: t[:, :, :1], r"bits: expected int32 \(.*, 64, 2\)"),
        ("group", lambda t: t - 1, "group"),
        ("rows.full_ptr", lambda t: t[:-1], "rows.full_ptr"),
        ("rows.full_ptr", lambda t: t.flip(0), "rows.full_ptr"),
        ("rows.partial_ptr", lambda t: t + 1, "rows.partial_ptr"),
        ("rows.full", lambda t: t.flip(0), "rows.full: expected columns that ascend"),
        ("rows.partial", lambda t: t - 1, "rows.partial"),
        ("rows.tile", lambda t: t + 1, "rows.tile"),
        ("rows.full", lambda t: t.clone().fill_(0), "rows.full"),
        ("cols.full", lambda t: t.flip(0), "cols.full: does not follow"),
        ("cols.tile", lambda t: t.flip(0), "cols.tile: does not follow"),
        ("table.bits_t", lambda t: t.flip(0), "bits_t: does not follow"),
        ("table.rows_any", lambda t: t - 1, "rows_any: does not follow"),
        ("table.cols_any", lambda t: t - 1, "cols_any: does not follow"),
        ("rows.work", lambda t: t[1:], "rows.work: expected the splits"),
        ("cols.work", lambda t: t.flip(0), "cols.work: expected the splits"),
        ("rows.at", lambda t: t.new_zeros(7), r"rows.at: expected int32 \(8,\)"),
        ("cols.at", lambda t: torch.arange(8), "cols.at: expected int32"),
    ],
)
def test_validate_names_the_wrong_field(name: str, change: object, words: str) -> None:
    index = build_index(Causal() & Window(250), 500, block=64)
    index.validate()
    with pytest.raises(ValueError, match=words):
        edited(index, change, name).validate()


def test_validate_sees_a_tile_in_both_lists() -> None:
    index = build_index(Causal(), 128, block=64)
    number, state = index.entries()
    both = Entries(torch.cat([number[-2:-1], number]), torch.cat([torch.tensor([FULL]), state]))
    twice = BlockIndex.from_entries(index.group, both, index.table.bits, index.grid, index.envelopes)
    with pytest.raises(ValueError, match="a tile is in both lists"):
        twice.validate()


# Choices and drawings.


def test_block_auto_takes_64_where_it_computes_much_less(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ringtile.index")
    fine = build_index(Blocks(torch.eye(32, dtype=torch.bool), block=64), 2048, block="auto")
    assert fine.block == 64
    assert "block 64" in caplog.text
    assert "2.00x fewer pairs" in caplog.text
    assert build_index(Causal() & Window(1024), 4096, block="auto").block == 128
    assert "block 128 for causal & window(1024)" in caplog.text


def test_drawing_shows_tiles() -> None:
    index = build_index(per_head([Dense(), streaming(4, 128)]), 1024, num_heads=2)
    assert index.draw(1).splitlines()[:4] == ["▒·······", "▒▒······", "▒▒▒·····", "▒·▒▒····"]
    assert index.draw(0, width=3) == "███\n███\n███"
    assert index.draw(1, width=3) == "▒··\n▒▒·\n▒▒▒"
    assert build_index(Causal(), 128, 512).draw() == "███▒"
    assert build_index(Dense(), 640, 512).draw(width=2) == "██\n██"


@pytest.mark.parametrize("block", [64, 128])
def test_causal_documents_allow_a_triangle_each(block: int) -> None:
    lengths = [1, 70_000, 130, 2, 69_867, 120_000, 50]
    index = build_index(Causal() & Documents(lengths) & Window(100), sum(lengths), block=block)
    assert index.envelopes == (Causal() & Documents(lengths),)
    assert index.allowed_pairs == sum(length * (length + 1) // 2 for length in lengths)
    ends = list(accumulate(lengths))
    tiles = 0
    for row in range(index.n_rows):
        first_document = next(n for n, end in enumerate(ends) if end > row * block)
        tiles += row + 1 - (ends[first_document] - lengths[first_document]) // block
    assert index.allowed_tiles == tiles
    tail = build_index(Causal() & Documents(lengths), 1000, sum(lengths))
    assert tail.kept_pairs == tail.allowed_pairs
    assert tail.kept_tiles == tail.allowed_tiles
