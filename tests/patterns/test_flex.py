"""FlexAttention's masks in and out: the same pairs, and the same attention eager and compiled."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st
from strategies import grids, patterns
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from ringtile.index import build_index, cache_info, clear_cache, from_block_mask, to_block_mask
from ringtile.patterns import Blocks, Causal, Dense, Documents, RandomBlocks, Segments, Window, per_head

eager_is_slow = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    clear_cache()


def softmax_over(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
    """The float64 definition; rows that keep nothing give 0."""
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0.0) @ value.double()


def inputs(batch: int, heads: int, n_queries: int, n_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, heads, n_queries, 32), *torch.randn(2, batch, heads, n_keys, 32)


IDS = torch.arange(2)[:, None] * 150 < torch.arange(300)


@eager_is_slow
@settings(max_examples=15)
@given(st.data())
def test_masks_going_out_mean_the_same_eager(data: st.DataObject) -> None:
    grid = data.draw(grids())
    pattern = data.draw(patterns(grid, operators=2, heads=True))
    heads = pattern.num_heads or 2
    lengths = {"n_queries": grid.n_queries, "n_keys": grid.n_keys, "start": grid.start}
    index = build_index(pattern, **lengths, num_heads=heads, block=grid.block)
    mask = to_block_mask(index)
    kept = index.to_dense().expand(2, heads, -1, -1)
    assert torch.equal(create_mask(mask.mask_mod, 2, heads, grid.n_queries, grid.n_keys, device="cpu"), kept)
    assert mask.seq_lengths == (grid.n_queries, grid.n_keys)
    # Compiled, blocks that are in no list are skipped and full ones are not masked.
    listed = mask.to_dense().bool().repeat_interleave(grid.block, 2).repeat_interleave(grid.block, 3)
    assert not (kept & ~listed[:, :, : grid.n_queries, : grid.n_keys]).any()
    only_full = BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=grid.block)
    full = only_full.to_dense().bool().repeat_interleave(grid.block, 2).repeat_interleave(grid.block, 3)
    assert full[:, :, grid.n_queries :].sum() == full[..., grid.n_keys :].sum() == 0
    assert (kept | ~full[:, :, : grid.n_queries, : grid.n_keys]).all()
    back = build_index(from_block_mask(mask, start=grid.start), **lengths, num_heads=heads, block=64)
    assert torch.equal(back.to_dense().expand(2, heads, -1, -1), kept)


def test_every_block_is_in_the_list_it_belongs_to() -> None:
    mask = to_block_mask(build_index(Causal(), 512))
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]
    assert mask.kv_indices.shape == mask.full_kv_indices.shape == (1, 1, 4, 4)
    ragged = to_block_mask(build_index(Dense(), 300, 200))
    assert ragged.full_kv_num_blocks.tolist() == [[[1, 1, 0]]]
    assert ragged.kv_num_blocks.tolist() == [[[1, 1, 2]]]


@eager_is_slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_over_an_exported_mask(compiled: bool) -> None:
    # Ragged, queries not at a tile's beginning, two heads and rows that keep nothing.
    pattern = per_head([Causal() & (Window(70) | RandomBlocks(1)), Causal() & Segments(40, 3)])
    index = build_index(pattern, 200, 333, num_heads=2)
    query, key, value = inputs(2, 2, 200, 333)
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    out = attend(query, key, value, block_mask=to_block_mask(index))
    expected = softmax_over(query, key, value, index.to_dense())
    assert not index.to_dense().any(-1).all()
    assert (out - expected).norm() <= 1e-6 * expected.norm()


def test_lists_without_a_rule_keep_their_blocks() -> None:
    """FlexAttention itself is dense over such a mask when eager."""
    columns = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    lists = BlockMask.from_kv_blocks(torch.ones(1, 1, 3, dtype=torch.int32), columns)
    expected = build_index(Blocks(torch.eye(3, dtype=torch.bool)), 384).to_dense()
    assert torch.equal(build_index(from_block_mask(lists), 384).to_dense(), expected)


def test_batch_rows_and_heads_going_out_and_in() -> None:
    ids = IDS.long()
    index = build_index(Documents(ids=ids) & per_head([Window(20), Causal()]), 300, num_heads=2, batch=2)
    mask = to_block_mask(index)
    assert mask.shape == (2, 2, 300, 300)
    assert torch.equal(create_mask(mask.mask_mod, 2, 2, 300, 300, device="cpu"), index.to_dense())
    back = from_block_mask(mask)
    assert (back.batch_size, back.num_heads) == (2, 2)
    assert torch.equal(build_index(back, 300, num_heads=2, batch=2).to_dense(), index.to_dense())
    only_rows = to_block_mask(build_index(Documents(ids=ids), 300, num_heads=2, batch=2))
    assert only_rows.shape == (2, 1, 300, 300)
    with pytest.raises(ValueError, match=r"batch: .* written for 2, got batch=3"):
        build_index(from_block_mask(only_rows), 300, batch=3)


def any_of_three(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A rule that looks up a row per query and reduces it, as only one pair at a time can."""
    table = torch.stack((torch.arange(300), torch.arange(300) // 2, torch.arange(300) * 7 % 300), 1)
    return (table[query] == key).any() | (key <= head * 5 + batch)


@pytest.mark.parametrize("sizes", [128, 64, (128, 256)])
@pytest.mark.parametrize("block", [32, 128])
def test_masks_coming_in_keep_their_rule(sizes: int | tuple[int, int], block: int) -> None:
    mask = create_block_mask(any_of_three, 2, 3, 300, 290, device="cpu", BLOCK_SIZE=sizes)
    index = build_index(from_block_mask(mask), 300, 290, num_heads=3, batch=2, block=block)
    assert torch.equal(index.to_dense(), create_mask(any_of_three, 2, 3, 300, 290, device="cpu"))
    index.validate()


def test_masks_coming_in_keep_no_more_than_their_lists() -> None:
    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    # Row 0: block 0 partial. Row 1: block 0 full, block 2 partial (causal keeps nothing there). Row 2: nothing.
    # Behind the counts, and in lists narrower than the matrix, numbers mean nothing.
    mask = BlockMask(
        seq_lengths=(300, 300),
        kv_num_blocks=torch.tensor([[[1, 1, 0]]], dtype=torch.int32),
        kv_indices=torch.tensor([[[[0, 99], [2, 1], [-7, 1]]]], dtype=torch.int32),
        full_kv_num_blocks=torch.tensor([[[0, 1, 0]]], dtype=torch.int32),
        full_kv_indices=torch.tensor([[[[5], [0], [1]]]], dtype=torch.int32),
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(128, 128),
        mask_mod=causal,
    )
    expected = torch.zeros(300, 300, dtype=torch.bool)
    expected[:128, :128] = torch.ones(128, 128).tril().bool()
    expected[128:256, :128] = True
    index = build_index(from_block_mask(mask), 300)
    assert torch.equal(index.to_dense()[0, 0], expected)
    assert index.rows.full.tolist() == [0]
    moved = build_index(from_block_mask(mask, start=37), 300, start=37, block=16)
    assert torch.equal(moved.to_dense()[0, 0], expected)
    moved.validate()
    both = build_index(Causal() & from_block_mask(mask, start=-20), 300, start=-20)
    assert torch.equal(both.to_dense()[0, 0], expected & (torch.arange(300)[:, None] - 20 >= torch.arange(300)))


def test_one_mask_is_one_pattern_and_one_index() -> None:
    mask = create_block_mask(lambda batch, head, query, key: query >= key, None, None, 256, 256, device="cpu")
    pattern = from_block_mask(mask)
    assert from_block_mask(mask) is pattern
    assert from_block_mask(mask, start=5) != pattern
    assert build_index(from_block_mask(mask), 256, num_heads=4) is build_index(from_block_mask(mask), 256, num_heads=4)
    assert cache_info()[:2] == (1, 1)
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_wrong_masks_and_lengths_are_named() -> None:
    mask = to_block_mask(build_index(Causal(), 300, 400))
    for lengths in ({"n_queries": 300, "n_keys": 401}, {"n_queries": 300, "n_keys": 400, "start": 0}):
        with pytest.raises(ValueError, match="block mask of 300 queries from position 100 and 400 keys"):
            build_index(from_block_mask(mask), **lengths)
    flat = BlockMask.from_kv_blocks(torch.ones(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"block_mask: expected \[B, H, rows, columns\]"):
        from_block_mask(flat)
