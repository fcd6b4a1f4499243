"""Dropped tiles through their means, so that rows lose less of attention that is spread evenly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.adaptive.view import View, tiles_at_once
from ringtile.functional import merge_attention
from ringtile.functional.attention import attend_scores
from ringtile.index import BlockIndex


def compensated(out: Tensor, lse: Tensor, view: View, value: Tensor, index: BlockIndex) -> tuple[Tensor, Tensor]:
    """Add dropped tiles to attention over an index, each as its mean key and mean value, counted once per key.

    Only tiles that all queries of the row tile would keep whole count: of a causal base, whole past tiles. Tiles whose
    means are not finite stay dropped. A row that drops no such tile keeps its bits. It is differentiable, and its cost
    is that of attention to one key per tile. With gradients, it saves ``H * Nq * Nk / block`` scores.

    Returns the output ``[B, H, Nq, Dv]`` and the lse ``[B, H, Nq]``, in the dtypes of ``out`` and ``lse``. Raises
    ValueError if the indices of the view and of the kept tiles do not match each other.
    """
    query, key, base, key_mask = view.query, view.key, view.base, view.key_mask
    if index.grid != base.grid or index.device != base.device:
        raise ValueError(f"base: expected the lengths, block and device of {index!r}, got {base!r}")
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, count = _means(key.to(wide), base.block, key_mask)
    values, _ = _means(value.to(wide), base.block, key_mask)
    finite = (keys.isfinite().all(3) & values.isfinite().all(3)).unsqueeze(3)
    keys, values = keys.masked_fill(~finite, 0), values.masked_fill(~finite, 0)
    heads = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(heads, 1) for x in (keys, values))
    usable = (finite.squeeze(3) & (count > 0).unsqueeze(1)).repeat_interleave(heads, 1)
    # In a tile that a row keeps in part, the mean would stand for later keys, too.
    dropped = base.full_tiles & ~index.tiles & usable.unsqueeze(2)
    # A mean of n keys counts n times: exp(s + log n) = n exp(s).
    logs = count.clamp(min=1).to(wide).log()[:, None, None]
    row = index.row_of(torch.arange(index.n_queries, device=query.device))
    parts = []
    at_once = tiles_at_once(query, base.n_cols)
    for some, rows in zip(query.split(at_once, 2), row.split(at_once), strict=True):
        scores = some.to(wide) @ keys.mT * view.factor + logs
        parts.append(attend_scores(scores, dropped[:, :, rows], values))
    more, more_lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    merged, total = merge_attention([out.to(wide), more], [lse, more_lse.to(lse.dtype)])
    return merged.to(out.dtype), total


def _means(x: Tensor, block: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean of each tile's tokens that count ``[B, Hkv, C, D]``, and their number ``[B, C]``."""
    batch, _, n_keys, _ = x.shape
    inside = torch.ones(batch, n_keys, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    rest = -n_keys % block
    count = F.pad(inside, (0, rest)).unflatten(1, (-1, block)).sum(2)
    x = F.pad(x.masked_fill(~inside[:, None, :, None], 0), (0, 0, 0, rest)).unflatten(2, (-1, block))
    return x.sum(3) / count.clamp(min=1)[:, None, :, None], count
