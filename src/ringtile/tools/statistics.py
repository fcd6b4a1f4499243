"""The cost of a block index: densities, bytes, floating-point operations, longest lists."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.index import BlockIndex

FORWARD_FLOPS = 4
"""Floating-point operations per pair and element of the head: two matmuls (scores, output)."""
BACKWARD_FLOPS = 10
"""The same for the backward pass: five matmuls (scores again, dP, dV, dQ, dK), as torch counts them."""


class LongestList(NamedTuple):
    """The longest list of computed tiles along one axis."""

    tile: int
    """The number of the row or column tile, in position space."""
    tiles: int
    """The number of tiles in its list."""
    mean: float
    """The mean over all lists of this axis."""


@dataclass(frozen=True)
class PatternStatistics:
    """The figures of one pattern at one length. Pairs and tiles are summed over heads and batch rows."""

    n_queries: int
    n_keys: int
    block: int
    num_heads: int
    """The number of heads, times batch rows, in the sums."""
    head_dim: int
    kept_pairs: int
    allowed_pairs: int
    """Pairs that the causal and document rules allow."""
    density: float
    """Kept over allowed pairs."""
    full_tiles: int
    partial_tiles: int
    distinct_partial_tiles: int
    """The rows of the tile table, which stores equal tiles once."""
    tile_density: float
    """Computed tiles over the tiles that these rules touch. Time follows it."""
    index_bytes: int
    dense_mask_bytes: int
    """The size of one bool mask ``[n_queries, n_keys]`` for all heads, which is not built."""
    forward_flops: int
    """Operations over all pairs of the computed tiles."""
    backward_flops: int
    dense_forward_flops: int
    """Operations over the allowed pairs, which dense attention computes."""
    dense_backward_flops: int
    longest_row: LongestList
    longest_column: LongestList


def pattern_statistics(index: BlockIndex, *, num_heads: int | None = None, head_dim: int = 64) -> PatternStatistics:
    """Count the kept pairs of an index, and the cost of attention over it. It waits for the device of the index.

    An index that all heads share counts once, unless you pass `num_heads`. Values are as wide as keys. Raises
    ValueError if `head_dim` is not positive, or `num_heads` does not match the index.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal, Window
    >>> statistics = pattern_statistics(build_index(Causal() & Window(1024), 16384))
    >>> statistics.longest_row.tiles, statistics.partial_tiles, statistics.distinct_partial_tiles
    (9, 248, 2)
    """
    if head_dim < 1:
        raise ValueError(f"head_dim: expected a positive number, got {head_dim=}")
    in_index = index.group.shape[1]
    if num_heads is not None and (num_heads < 1 or in_index not in (1, num_heads)):
        raise ValueError(f"num_heads: expected {'a positive number' if in_index == 1 else in_index}, got {num_heads}")
    # One list of tiles stands for all heads, if no head has its own.
    copies = (num_heads or in_index) // in_index
    kept = index.trimmed()
    pairs = index.tile_pairs(len(index.group), in_index * copies)
    # Groups stand for different numbers of (batch row, head) entries.
    entries = torch.bincount(index.group.flatten(), minlength=index.n_groups) * copies
    full_tiles = int(entries[kept.rows.slots()[0] // max(kept.n_rows, 1)].sum())
    names = "n_queries", "n_keys", "block", "density", "tile_density"
    same: dict[str, Any] = {name: getattr(index, name) for name in names}
    return PatternStatistics(
        **same,
        num_heads=index.group.numel() * copies,
        head_dim=head_dim,
        kept_pairs=index.kept_pairs * copies,
        allowed_pairs=index.allowed_pairs * copies,
        full_tiles=full_tiles,
        partial_tiles=index.kept_tiles * copies - full_tiles,
        distinct_partial_tiles=len(index.table.bits),
        index_bytes=index.nbytes,
        dense_mask_bytes=index.n_queries * index.n_keys,
        forward_flops=FORWARD_FLOPS * head_dim * pairs,
        backward_flops=BACKWARD_FLOPS * head_dim * pairs,
        dense_forward_flops=FORWARD_FLOPS * head_dim * index.allowed_pairs * copies,
        dense_backward_flops=BACKWARD_FLOPS * head_dim * index.allowed_pairs * copies,
        longest_row=_longest(kept.rows.full_ptr, kept.rows.partial_ptr, index.n_rows, index.first_row),
        longest_column=_longest(kept.cols.full_ptr, kept.cols.partial_ptr, index.n_cols, 0),
    )


def _longest(full: Tensor, part: Tensor, per_group: int, first: int) -> LongestList:
    lengths = (full + part).diff()
    if not lengths.numel():
        return LongestList(first, 0, 0.0)
    # Lists of all groups lie one after the other: with 8 rows per group, list 11 is row 3 of group 1.
    slot = int(lengths.argmax())
    return LongestList(first + slot % per_group, int(lengths[slot]), float(lengths.double().mean()))
