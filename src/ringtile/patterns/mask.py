"""The pattern of a dense mask, stored as its distinct tiles."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.patterns.base import Pattern, TileGrid
from ringtile.patterns.bits import pack_words
from ringtile.patterns.content import Content, digest_of, memory_of

_SIDE = 128
_EMPTY, _FULL, _PARTIAL = 0, 1, 2
"""The state of a tile. Distinct partial tiles are numbered from 2."""


@dataclass(frozen=True, repr=False)
class Mask(Pattern):
    """The pairs that a dense mask keeps; `from_mask` makes it. Equal masks make equal patterns."""

    states: Content
    """int64 ``[B or 1, H or 1, rows, columns]``, cut at multiples of 128 in positions."""
    bits: Content
    """int32 ``[T, 128, 4]``, the distinct partial tiles."""
    lengths: tuple[int, int]
    """The number of queries and of keys."""

    @property
    def _start(self) -> int:
        return self.lengths[1] - self.lengths[0]

    def _state(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if self.batch_size is not None:
            raise ValueError(f"mask of {self.batch_size} batch rows: ask batch_row(b), the pattern of one row")
        head = torch.zeros_like(head) if self.num_heads is None else head
        return self.states.tensor[0].to(row.device)[head, row - self._start // _SIDE, col]

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        state = self._state(head, query // _SIDE, key // _SIDE)
        # Two rows before the table, for empty and full tiles, so that a state is a row of it.
        bits = F.pad(self.bits.tensor, (0, 0, 0, 0, _PARTIAL, 0)).to(query.device)
        word = bits[state, query % _SIDE, key % _SIDE // 32]
        return (state == _FULL) | ((word >> (key % 32)) & 1 == 1)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        parts = _SIDE // grid.block
        state = self._state(torch.tensor(head, device=row.device), row // parts, col // parts)
        # A tile of 32 is one of 4 x 4 parts of a stored tile: its class is the stored tile and its place there.
        place = row % parts * parts + col % parts
        return torch.where(state < _PARTIAL, state, _PARTIAL + (state - _PARTIAL) * parts**2 + place)

    def head_class(self, head: int) -> Hashable:
        return None if self.num_heads is None else digest_of(self.states.tensor[:, head])

    @property
    def num_heads(self) -> int | None:
        return self.states.tensor.shape[1] if self.states.tensor.shape[1] > 1 else None

    @property
    def batch_size(self) -> int | None:
        return len(self.states.tensor) if len(self.states.tensor) > 1 else None

    def batch_row(self, batch: int) -> Pattern:
        return self if self.batch_size is None else replace(self, states=Content(self.states.tensor[batch : batch + 1]))

    def validate(self, grid: TileGrid) -> None:
        if (grid.n_queries, grid.n_keys, grid.start) != (*self.lengths, self._start):
            raise ValueError(
                f"mask of {self.lengths[0]} queries and {self.lengths[1]} keys, aligned to the last key: "
                f"got {grid.n_queries=}, {grid.start=}, {grid.n_keys=}"
            )


def one_of_equals(mask: Tensor) -> Tensor:
    """Return a mask ``[B, H, Nq, Nk]`` with a B or H of 1 if all are equal."""
    for dim in (0, 1):
        first = mask.narrow(dim, 0, 1)
        if mask.stride(dim) == 0 or torch.equal(mask, first.expand_as(mask)):
            mask = first
    return mask


def from_mask(mask: Tensor) -> Pattern:
    """Return the pattern of the pairs that a dense mask keeps.

    The mask is copied, as bits of its distinct tiles of 128 x 128. The last query sits at the last key. A pattern made
    of rules works at every length and needs no N x N mask. This one has the lengths of the mask and no text form.

    Args:
        mask: bool ``[Nq, Nk]``, ``[H, Nq, Nk]`` or ``[B, H, Nq, Nk]``, True for pairs to keep. H and B can be 1, for
            any number.

    Raises:
        ValueError: If the mask is not bool, is empty, or has another number of dimensions.

    >>> mask = torch.tensor([[True, False, True], [True, True, False]])
    >>> print(from_mask(mask).draw(2, 3))
    █·█
    ██·
    """
    if mask.layout is not torch.strided:
        raise ValueError(f"from_mask expects torch.strided, got {mask.layout=}")
    if mask.dtype != torch.bool or mask.dim() not in (2, 3, 4) or mask.numel() == 0:
        raise ValueError(
            "from_mask expects a non-empty bool mask [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], "
            f"got {mask.dtype=}, {mask.shape=}"
        )
    mask = one_of_equals(mask[(None,) * (4 - mask.dim())]).cpu()
    n_queries, n_keys = mask.shape[2:]
    ragged = (n_keys - n_queries) % _SIDE
    columns = -(-n_keys // _SIDE)
    known: dict[bytes, int] = {}
    bits, states = [torch.empty(0, _SIDE, _SIDE // 32, dtype=torch.int32)], []
    for of_head in mask.flatten(0, 1):
        for first_row in range(-ragged, n_queries, _SIDE):
            strip = of_head[max(first_row, 0) : first_row + _SIDE]
            above = max(-first_row, 0)
            padding = (0, columns * _SIDE - n_keys, above, _SIDE - len(strip) - above)
            words, inside = (
                pack_words(F.pad(kept, padding).unflatten(1, (columns, _SIDE)).transpose(0, 1))
                for kept in (strip, torch.ones_like(strip))
            )
            full, partial = (words == inside).flatten(1).all(1), (words != 0).flatten(1).any(1)
            state = torch.where(full, _FULL, _EMPTY)
            memory, size = memory_of(words), words.nbytes // columns
            for col in (partial & ~full).nonzero().flatten().tolist():
                content = bytes(memory[col * size : (col + 1) * size])
                if content not in known:
                    known[content] = len(known)
                    bits.append(words[col : col + 1])
                state[col] = _PARTIAL + known[content]
            states.append(state)
    shape = (*mask.shape[:2], -1, columns)
    return Mask(Content(torch.stack(states).view(shape)), Content(torch.cat(bits)), (n_queries, n_keys))
