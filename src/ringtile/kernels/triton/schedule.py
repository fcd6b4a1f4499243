"""An index as the Triton kernels take it."""

from __future__ import annotations

from dataclasses import replace

from ringtile.index import BlockIndex
from ringtile.index.schedule import derived

BLOCKS = (64, 128)
"""The sides of tiles that the kernels take. Smaller ones are merged into tiles of 128."""


def _merged(index: BlockIndex) -> BlockIndex:
    # Tiles that become one need not follow each other in position space. Only dropout depends on it (`unsupported`).
    return replace(index, row_at=index.row_at[:0], col_at=index.col_at[:0]).coarsen(128)


def in_blocks(index: BlockIndex) -> BlockIndex:
    """Return the index in tiles that the kernels take: itself, or merged at its first use."""
    if index.block in BLOCKS:
        return index
    merged = derived(index, _merged)
    return replace(merged, start=index.start, n_queries=index.n_queries, n_keys=index.n_keys)
