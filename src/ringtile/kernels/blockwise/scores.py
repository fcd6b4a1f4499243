"""Masked scores of one part by plain matmuls: for dropout, softcap, ALiBi, second derivatives and other devices."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.chunks import Part, Work


class Scores(NamedTuple):
    """Scores of one part, all ``[n, H, m, l]``."""

    scores: Tensor
    """Masked: -inf for a pair that is not kept."""
    dropout: Tensor | None
    """Factors of the weights."""
    capped: Tensor | None
    """``tanh(scores / softcap)`` before the mask."""

    def weights(self, lse: Tensor) -> Tensor:
        """Return the softmax. An empty row has a finite lse or inf here, so its weights are 0."""
        return torch.exp(self.scores - lse.unsqueeze(-1))

    def dropped(self, weights: Tensor) -> Tensor:
        return weights if self.dropout is None else weights * self.dropout

    def through_softcap(self, grad: Tensor) -> Tensor:
        return grad if self.capped is None else grad * (1 - self.capped * self.capped)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``[n, H, m, x] @ [n, G, x, y]``, with each key head for its query heads."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    # With 8 query heads and 2 key heads, 4 heads of m rows are one matrix of 4 m rows: no key is read twice.
    grouped = a.unflatten(1, (b.shape[1], -1)).flatten(2, 3) @ b
    product: Tensor = grouped.unflatten(2, (-1, a.shape[2])).flatten(1, 2)
    return product


def matmul_keys(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Return ``[n, H, m, l]^T @ [n, H, m, D]``, summed over the query heads of each key head: ``[n, G, l, D]``."""
    if a.shape[1] != heads:
        a, b = (x.unflatten(1, (heads, -1)).flatten(2, 3) for x in (a, b))
    return a.mT @ b


def masked_scores(work: Work, part: Part, q: Tensor, k: Tensor) -> Scores:
    call = work.call
    scores = matmul(q, k.mT) * call.scale
    capped = dropout = None
    if call.softcap:
        capped = torch.tanh(scores / call.softcap)
        scores = capped * call.softcap
    if call.alibi_slopes is not None:
        scores = scores + work.bias(*work.positions(part))
    if work.added is not None:
        scores = scores + work.added_numbers(part)
    if call.dropout_p:
        dropout = work.dropout(*work.positions(part))
    keep = work.keep(part)
    return Scores(scores if keep is None else scores.masked_fill(~keep, -math.inf), dropout, capped)
