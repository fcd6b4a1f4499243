"""Attention weights as a sparse tensor of the kept tiles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.index.tiles import FULL, unpack_words


def tile_weights(
    query: Tensor, key: Tensor, lse: Tensor, index: BlockIndex, *, key_mask: Tensor | None, scale: float, average: bool
) -> Tensor:
    """Return the softmax weights of the kept tiles, differentiable in query, key and the lse of the same pairs.

    The result is a coalesced sparse COO tensor ``[B, H, rows, columns, b, b]`` with four sparse and two dense
    dimensions. Its values are ``[T, b, b]``, one per kept tile. Rows are cut at multiples of b in positions, so the
    first query is row ``index.start % b`` of the first tile. The mean over the heads has no H.
    """
    (batch, heads, n_queries, _), n_keys = query.shape, key.shape[2]
    block, rows, cols = index.block, index.n_rows, index.n_cols
    front = index.start % block
    # Tile number 7 of 2 rows x 3 columns is row 0, column 1 of group 1.
    number, state = index.entries()
    group = number // max(rows * cols, 1)
    of_head = index.group.long().expand(batch, heads)
    b, h, entry = (of_head.unsqueeze(-1) == group).nonzero().unbind(1)
    row, col = number[entry] // max(cols, 1) % max(rows, 1), number[entry] % max(cols, 1)
    # Coalesced tensors have their entries in order of their coordinates.
    order = torch.argsort(((b * heads + h) * rows + row) * cols + col)
    b, h, entry, row, col = (x[order] for x in (b, h, entry, row, col))

    def in_rows(x: Tensor) -> Tensor:
        back = rows * block - front - n_queries
        tiles: Tensor = F.pad(x, (0, 0) * (x.dim() - 3) + (front, back)).unflatten(2, (rows, block))[b, h, row]
        return tiles

    padded_key = F.pad(key, (0, 0, 0, cols * block - n_keys)).unflatten(2, (cols, block))
    scores = in_rows(query) @ padded_key[b, h, col].mT * scale
    place = torch.arange(block, device=query.device)
    query_place, key_place = row[:, None] * block + place - front, col[:, None] * block + place
    inside = ((query_place >= 0) & (query_place < n_queries)).unsqueeze(2) & (key_place < n_keys).unsqueeze(1)
    partial = state[entry] != FULL
    kept = inside.clone()
    kept[partial] &= unpack_words(index.table.bits, block)[state[entry][partial]]
    if key_mask is not None:
        usable = F.pad(key_mask, (0, cols * block - n_keys)).unflatten(1, (cols, block))
        kept &= usable[b, col].unsqueeze(1)
    # A query without keys has an lse of -inf. It keeps no pair, so any finite number stands for it.
    exponent = scores.to(lse.dtype) - in_rows(lse.masked_fill(lse == -math.inf, 0)).unsqueeze(-1)
    # Mask before exp: an overflow in a dropped pair would get a NaN gradient.
    weights = exponent.masked_fill(~kept, -math.inf).exp().to(query.dtype)
    at, size = torch.stack([b, h, row, col]), (batch, heads, rows, cols, block, block)
    if not average:
        return torch.sparse_coo_tensor(at, weights, size, check_invariants=False, is_coalesced=True)
    mean = torch.sparse_coo_tensor(at[[0, 2, 3]], weights / heads, (batch, *size[2:]), check_invariants=False)
    return mean.coalesce()
