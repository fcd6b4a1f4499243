"""The block index: the tiles that a pattern keeps, as tensors, with all functions of an index as methods."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ringtile.index import counts, debug, derive
from ringtile.index.restrict import restricted
from ringtile.index.tile_index import TileIndex
from ringtile.index.tiles import FULL
from ringtile.patterns.base import Dense
from ringtile.patterns.local import Causal


class BlockIndex(TileIndex):
    """The tiles that a pattern keeps, for fixed lengths, start, block size and device.

    Row slot ``g * n_rows + r`` is row tile ``first_row + r`` of group ``g``. Column slot ``g * n_cols + c`` is column
    tile ``c``. Columns ascend within a row, and rows ascend within a column. The first and last tiles can be ragged:
    ignore bits outside the lengths.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> index = build_index(Causal(), 256)
    >>> index.rows.full_ptr.tolist(), index.rows.partial.tolist()
    ([0, 0, 1], [0, 1])
    """

    @property
    def kept_pairs(self) -> int:
        """Number of kept pairs inside the lengths, over the entries of ``group``. Synchronizes with the device."""
        return int(self._kept[0][self.group.long()].sum())

    @property
    def kept_tiles(self) -> int:
        """Number of tiles that keep a pair inside the lengths, over the entries of ``group``. Synchronizes."""
        return int(self._kept[1][self.group.long()].sum())

    @property
    def allowed_pairs(self) -> int:
        """Number of pairs that the causal and document rules allow, over the entries of ``group``."""
        return self._allowed[0]

    @property
    def allowed_tiles(self) -> int:
        """Number of tiles that the causal and document rules touch, over the entries of ``group``."""
        return self._allowed[1]

    @property
    def density(self) -> float:
        """Fraction of the allowed pairs that the pattern keeps, or 0 if no pairs are allowed."""
        return self.kept_pairs / self.allowed_pairs if self.allowed_pairs else 0.0

    @property
    def tile_density(self) -> float:
        """Fraction of the allowed tiles that are computed. Run time follows this. Synchronizes with the device."""
        return self.kept_tiles / self.allowed_tiles if self.allowed_tiles else 0.0

    def tile_pairs(self, batch: int, heads: int) -> int:
        """Count the pairs in the kept tiles, over all batch elements and heads. Kernels compute this many.

        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> build_index(Causal(), 200).tile_pairs(1, 2) == 2 * (128 * 128 + 72 * 200)
        True
        """
        return int(self._kept[2][self.group.long()].expand(batch, heads).sum())

    @cached_property
    @torch.inference_mode(False)
    def tiles(self) -> Tensor:
        """Bool ``[B or 1, H or 1, n_rows, n_cols]``: the tiles in the lists, with those that keep only bits outside."""
        return self._mask_of(self.entries().number)

    @cached_property
    @torch.inference_mode(False)
    def full_tiles(self) -> Tensor:
        """Bool ``[B or 1, H or 1, n_rows, n_cols]``: the tiles that keep all pairs."""
        number, state = self.entries()
        return self._mask_of(number[state == FULL])

    def _mask_of(self, number: Tensor) -> Tensor:
        """Return the tiles of some entries in a mask for each batch element and head."""
        mask = torch.zeros(self.n_groups * self.n_rows * self.n_cols, dtype=torch.bool, device=self.device)
        mask.index_fill_(0, number, True)
        return mask.view(self.n_groups, self.n_rows, self.n_cols)[self.group.long()]

    @cached_property
    @torch.inference_mode(False)
    def leading(self) -> Tensor | None:
        """Return how many keys each query keeps, int64 ``[n_queries]``, if the index has all or causal pairs, or None.

        Synchronizes with the device.
        """
        rules = set(self.envelopes)
        moved = len(self.rows.at) or len(self.cols.at)
        if moved or rules not in ({Dense()}, {Causal()}) or self.kept_pairs != self.allowed_pairs:
            return None
        if rules == {Dense()}:
            return torch.full((self.n_queries,), self.n_keys, device=self.device)
        return (self.start + 1 + torch.arange(self.n_queries, device=self.device)).clamp(0, self.n_keys)

    # Functions of an index that count, compare, edit or show it live beside this class, by subject.
    _kept = cached_property(counts.count_kept)
    _allowed = cached_property(counts.count_all_allowed)
    looks_ahead = cached_property(counts.looks_ahead)
    trimmed = derive.trimmed
    restricted = restricted
    restricted_rows = derive.restricted_rows
    remapped = derive.remapped
    coarsen = derive.coarsen
    keys_of = derive.keys_of
    to_dense = debug.to_dense
    draw = debug.draw
    validate = debug.validate
    __repr__ = debug.describe
