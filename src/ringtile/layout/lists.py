"""Compressed lists and their division into pieces of work."""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST, PIECES = 64, 512
"""No list of at most ``LONGEST`` entries is cut, and none below the share of one of ``PIECES`` workers: there are no
more than a few hundred, and a piece costs a scratch buffer."""


def pointer(slots: Tensor, count: int) -> Tensor:
    """Where each slot's entries begin in a list sorted by slot: int32 ``[count + 1]``."""
    begins = torch.zeros(count + 1, dtype=torch.int32, device=slots.device)
    torch.cumsum(torch.bincount(slots, minlength=count), 0, dtype=torch.int32, out=begins[1:])
    return begins


def slot_of_entries(begins: Tensor, n_entries: int) -> Tensor:
    """The slot (int64) of each entry; the inverse of `pointer`."""
    slots = torch.arange(begins.numel() - 1, device=begins.device)
    return torch.repeat_interleave(slots, begins.diff(), output_size=n_entries)


def work_list(full_ptr: Tensor, part_ptr: Tensor) -> Tensor:
    """Cut each slot's list into pieces ``[W, 4]`` (slot, first, last, scratch slot or -1), longest first.

    A list longer than ``max(64, ceil(entries / 512))`` is cut into nearly equal pieces. A slot without
    entries has one empty piece, so that every row of the output has an owner.
    """
    begins = full_ptr + part_ptr
    length = begins.diff()
    limit = max(LONGEST, -(-int(begins[-1]) // PIECES))
    slot = torch.arange(len(length), dtype=torch.int32, device=length.device)
    first, last, scratch = torch.zeros_like(length), length, torch.full_like(length, -1)
    if len(length) and int(length.max()) > limit:
        pieces = ((length + limit - 1) // limit).clamp_(min=1)
        slot = torch.repeat_interleave(slot, pieces)
        piece = torch.arange(len(slot), device=length.device) - (pieces.cumsum(0) - pieces)[slot]
        length, pieces = length[slot].long(), pieces[slot]
        first, last = length * piece // pieces, length * (piece + 1) // pieces
        cut = pieces > 1
        scratch = torch.where(cut, cut.cumsum(0) - 1, -1)
    order = torch.argsort(first - last, stable=True)
    return torch.stack([column.int() for column in (slot, first, last, scratch)], 1)[order]
