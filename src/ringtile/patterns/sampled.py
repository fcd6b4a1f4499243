"""Blocks of keys that all queries of a segment share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns.blocks import BlockPattern, max_met
from ringtile.patterns.checks import LARGEST_BLOCK, checked_int
from ringtile.patterns.grid import Cover, TileGrid, interval_cover


@dataclass(frozen=True, repr=False)
class SampledBlocks(BlockPattern):
    """Keep ``keep`` of every ``of`` blocks of the other segments, the same ones for all queries of a segment.

    A segment has ``segment`` tokens. Its queries keep block b of another segment iff ``(s - b) mod of < keep``, with s
    the number of their segment. So the kept blocks move by one from segment to segment, and a rank whose tokens lie in
    one segment needs only the fraction ``keep / of`` of the others' keys. With ``within``, only segments in the same
    ``within`` tokens count. Raises ValueError if ``keep`` is not in ``[1, of]``, ``segment`` is no multiple of
    ``block`` or ``within`` is no multiple of ``segment``.

    >>> print(SampledBlocks(1, 2, 4, block=2).draw(12))
    ····██··██··
    ····██··██··
    ····██··██··
    ····██··██··
    ··██······██
    ··██······██
    ··██······██
    ··██······██
    ██··██······
    ██··██······
    ██··██······
    ██··██······
    """

    keep: int
    of: int
    segment: int
    within: int = 0
    block: int = 128
    unbounded = True

    def __post_init__(self) -> None:
        name = "sampled_blocks"
        object.__setattr__(self, "of", checked_int(name, "of", self.of, 1, LARGEST_BLOCK))
        object.__setattr__(self, "keep", checked_int(name, "keep", self.keep, 1, self.of))
        object.__setattr__(self, "block", checked_int(name, "block", self.block, 1, LARGEST_BLOCK))
        object.__setattr__(self, "segment", checked_int(name, "segment", self.segment, 1))
        object.__setattr__(self, "within", checked_int(name, "within", self.within))
        if self.segment % self.block:
            raise ValueError(f"{name} expects a multiple of block={self.block}, got segment={self.segment}")
        if self.within % self.segment:
            raise ValueError(f"{name} expects a multiple of segment={self.segment}, got within={self.within}")
        within = f", {self.within}" if self.within else ""
        block = f", block={self.block}" if self.block != 128 else ""
        self._set_text(f"{name}({self.keep}, {self.of}, {self.segment}{within}{block})")

    def kept(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        size, whole = self.segment // self.block, self.within // self.block
        number = row // size
        kept = (number != col // size) & ((number - col) % self.of < self.keep)
        if whole:
            kept = kept & (row // whole == col // whole)
        return kept.expand(torch.broadcast_tensors(head, row, col)[0].shape)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        size, whole = self.segment // self.block, self.within // self.block
        first, last = grid.units(rows, self.block)
        row = first + torch.arange(max_met(grid.block, self.block), device=rows.device).unsqueeze(1)
        is_met = row <= last
        tile, row = rows.expand_as(row)[is_met], row[is_met]
        number, n_blocks = row // size, -(-grid.n_keys // self.block)
        begin = row // whole * whole if whole else torch.zeros_like(row)
        end = (begin + whole).clamp(max=n_blocks) if whole else begin + n_blocks
        sides = (begin.clamp(min=0), (number * size).clamp(max=n_blocks)), ((number + 1) * size, end)
        parts = [self._runs(tile, number, low.clamp(min=0), high) for low, high in sides]
        tile, low, high = (torch.cat(part) for part in zip(*parts, strict=True))
        return interval_cover(tile, *grid.tiles_of(low, high, self.block), grid)

    def _runs(self, tile: Tensor, number: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the runs of kept blocks in ``[low, high)``, each with its row tile."""
        if self.keep == self.of:
            kept = high > low
            return tile[kept], low[kept], high[kept]
        # Run k ends behind block number - k * of.
        # With keep 1 of 3, segment 4 keeps blocks 4, 1 (k = 0, 1), and 7 (k = -1). In [2, 8), k runs from -1 to 0.
        least = -((high - 2 + self.keep - number) // self.of)
        count = (1 + (number - low) // self.of - least).clamp(min=0).where(high > low, 0)
        which = torch.arange(len(count), device=count.device).repeat_interleave(count)
        k = least[which] + torch.arange(len(which), device=count.device) - (count.cumsum(0) - count)[which]
        end = number[which] - k * self.of + 1
        return tile[which], torch.maximum(end - self.keep, low[which]), torch.minimum(end, high[which])

    def head_class(self, head: int) -> Hashable:
        return None

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        n_blocks = -(-min(self.within or grid.n_keys, grid.n_keys) // self.block) + 1
        length = self.keep if self.keep < self.of else n_blocks
        runs = 2 * (n_blocks // self.of + 2) if self.keep < self.of else 2
        tiles = min(runs * max_met(length * self.block, grid.block), 2 * grid.n_cols)
        return len(rows) * max_met(grid.block, self.block) * tiles
