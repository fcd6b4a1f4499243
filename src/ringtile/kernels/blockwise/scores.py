"""Masked scores of one part in plain matrix products: for dropout, softcap, ALiBi and what torch's kernel lacks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.chunks import Chunk, Part, Work


class Scores(NamedTuple):
    """Scores of one part, all ``[n, H, m, l]``."""

    scores: Tensor
    """Masked: -inf where the pair is not kept."""
    dropout: Tensor | None
    """What dropout multiplies the weights by."""
    capped: Tensor | None
    """``tanh(scores / softcap)`` before the mask."""

    def weights(self, lse: Tensor) -> Tensor:
        """The softmax; an empty row has lse 0 here and so weighs nothing."""
        return torch.exp(self.scores - lse.unsqueeze(-1))

    def dropped(self, weights: Tensor) -> Tensor:
        return weights if self.dropout is None else weights * self.dropout

    def through_softcap(self, grad: Tensor) -> Tensor:
        return grad if self.capped is None else grad * (1 - self.capped * self.capped)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``[n, H, m, x] @ [n, G, x, y]``: every key head serves its query heads."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    grouped = a.unflatten(1, (b.shape[1], -1)).flatten(2, 3) @ b
    product: Tensor = grouped.unflatten(2, (-1, a.shape[2])).flatten(1, 2)
    return product


def matmul_keys(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """``[n, H, m, l]^T @ [n, H, m, D]``, summed over the query heads of each key head: ``[n, G, l, D]``."""
    if a.shape[1] != heads:
        a, b = (x.unflatten(1, (heads, -1)).flatten(2, 3) for x in (a, b))
    return a.mT @ b


def masked_scores(work: Work, chunk: Chunk, part: Part, q: Tensor, k: Tensor) -> Scores:
    options, length = work.options, k.shape[2]
    scores = matmul(q, k.mT) * options.scale
    capped = dropout = None
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        scores = capped * options.softcap
    if options.alibi_slopes is not None or options.dropout_p:
        query, tiles = work.positions(chunk, part)
        if options.alibi_slopes is not None:
            key = (tiles.unsqueeze(-1) + torch.arange(work.index.block, device=work.device)).flatten(1)
            scores = scores + work.bias(query, key[:, :length])
        if options.dropout_p:
            dropout = work.dropout(query, tiles)[..., :length]
    keep = work.keep(chunk, part)
    return Scores(scores if keep is None else scores.masked_fill(~keep, -math.inf), dropout, capped)
