"""An index as the Triton kernels take it."""

from __future__ import annotations

from dataclasses import replace

from ringtile.index import BlockIndex
from ringtile.index.schedule import derived

BLOCKS = (64, 128)
"""The sides of tiles that the kernels take. Smaller ones are merged into tiles of 128."""


def _merged(index: BlockIndex) -> BlockIndex:
    # Tiles that become one need not follow each other in position space. Only dropout depends on it (`unsupported`).
    rows, cols = (side._replace(at=side.at[:0]) for side in (index.rows, index.cols))
    return replace(index, rows=rows, cols=cols).coarsen(128)


def in_blocks(index: BlockIndex) -> BlockIndex:
    """Return the index in tiles that the kernels take: itself, or merged at its first use."""
    if index.block in BLOCKS:
        return index
    merged = derived(index, _merged)
    return merged.at(replace(index.grid, block=merged.block))
