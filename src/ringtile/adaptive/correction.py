"""Dropped tiles through a few exact rows: rows get what the exact row before them lost."""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile.adaptive.view import View
from ringtile.index import BlockIndex


def corrected(out: Tensor, view: View, index: BlockIndex, heads: Tensor | None = None) -> Tensor:
    """Add to rows of sparse attention what the last exact row at or before them lost (arXiv:2505.11254).

    The exact rows are those that the choice computed for its scores, and they become exact. Only rows that drop a tile
    change, so others keep their bits. No row gets anything from a later one.

    Args:
        out: ``[B, H, Nq, Dv]``, the attention over the index.
        view: The view of the call with its `View.probes`.
        index: The tiles that were kept.
        heads: Bool ``[H]``, the heads whose other rows are corrected. Default: all.
    """
    if not view.probes:
        return out
    rows, exact = (torch.cat(parts, dim) for parts, dim in zip(zip(*view.probes, strict=True), (0, 2), strict=True))
    rows, order = rows.sort()
    exact = exact.index_select(2, order)
    tokens = torch.arange(index.n_queries, device=out.device)
    row = index.row_of(tokens)
    change = (view.base.tiles & ~index.tiles).any(3)[:, :, row].unsqueeze(3)
    # With exact rows 4 and 12, rows 0 to 3 have none before them, 4 to 11 read the first one, and the rest the second.
    at = torch.searchsorted(rows, tokens, right=True) - 1
    lost = exact.float() - out.index_select(2, rows).float()
    more = lost.index_select(2, at.clamp(min=0)).masked_fill((at < 0).view(-1, 1), 0)
    if heads is not None:
        more = more.masked_fill(~heads.to(out.device).view(-1, 1, 1), 0)
    found = torch.where(change, (out.float() + more).to(out.dtype), out)
    # Adding what was lost would round, and an exact row need not.
    return found.index_copy(2, rows, torch.where(change.index_select(2, rows), exact, found.index_select(2, rows)))
