"""Attention over lists of keys per query: the keys of a few queries are gathered, then multiplied by plain matmuls."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.blockwise.scores import Scores
from ringtile.kernels.contracts import Call, Grads, Lists, Rows, accumulator, merge_into
from ringtile.kernels.philox import dropout_keep, dropout_scale

_BYTES = 1 << 23
"""Most bytes of the gathered keys of a piece, unless those of one key are more."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, lists: Lists, dropout_p: float) -> list[str]:
    """Return no reasons: this backend is the fallback everywhere."""
    return []


class _Piece(NamedTuple):
    """Some queries of the heads of a key head, and some places of their lists."""

    batch: int
    key_head: int
    heads: slice
    rows: slice
    tokens: Tensor
    """``[c, w]`` int64, the number of keys where there is none."""
    keep: Tensor
    """``[c, w]`` bool."""

    def of(self, x: Tensor) -> Tensor:
        """Return the rows of this piece ``[r, c, ...]``, a view of ``[B, H, Nq, ...]``."""
        return x[self.batch, self.heads, self.rows]

    def mine(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of this piece ``[c, r, ...]``."""
        return self.of(x).to(dtype).transpose(0, 1)

    def gathered(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keys or values of this piece ``[c, w, D]``, zeros where there is none, so that no NaN counts."""
        at = self.tokens.clamp(max=x.shape[2] - 1).flatten()
        read = x[self.batch, self.key_head].index_select(0, at).to(dtype)
        read.index_fill_(0, (~self.keep).flatten().nonzero().squeeze(1), 0)
        return read.view(*self.tokens.shape, -1)

    def scores(self, q: Tensor, k: Tensor, scale: float, call: Call | None) -> Scores:
        """Return the scores ``[c, r, w]`` of gathered tensors."""
        scores = q @ k.mT * scale
        capped = dropout = None
        if call is not None:
            query = call.start + torch.arange(self.rows.start, self.rows.stop, device=q.device)[:, None, None]
            heads, key = torch.arange(self.heads.start, self.heads.stop, device=q.device)[:, None], self.tokens[:, None]
            if call.softcap:
                capped = torch.tanh(scores / call.softcap)
                scores = capped * call.softcap
            if call.alibi_slopes is not None:
                scores = scores - call.alibi_slopes.to(q.dtype)[heads] * (query - key).abs()
            if call.dropout_p:
                batch = (
                    torch.tensor(self.batch, dtype=torch.int64, device=q.device)
                    if call.batch_at is None
                    else call.batch_at[self.batch]
                )
                heads = heads if call.head_at is None else call.head_at[heads]
                assert call.seed is not None
                kept = dropout_keep(call.seed, batch, heads, query, key, call.dropout_p)
                dropout = kept.to(q.dtype) * dropout_scale(call.dropout_p)
        return Scores(scores.masked_fill_(~self.keep.unsqueeze(1), -math.inf), dropout, capped)


def _pieces(q: Tensor, k: Tensor, v: Tensor, lists: Lists) -> Iterator[_Piece]:
    """Yield pieces in an order that depends on shapes alone. Those of equal rows follow each other."""
    indices, block, limits = lists
    (batch, heads, n_queries), (key_heads, n_keys) = q.shape[:3], k.shape[1:3]
    of_head, places = heads // key_heads, indices.shape[3] * block
    room = max(1, _BYTES // (accumulator(q).itemsize * max(k.shape[3], v.shape[3])))
    width = min(places, room)
    count = max(1, room // max(width, 1))
    if not n_keys:
        return
    for b, begin, left in product(range(batch), range(0, n_queries, count), range(0, places, max(width, 1))):
        rows = slice(begin, min(begin + count, n_queries))
        place = torch.arange(left, min(left + width, places), device=k.device)
        limit = limits[b % len(limits), rows]
        pieces: list[tuple[Tensor, Tensor]] = []
        for group in indices[b % len(indices), :, rows]:
            entry = group[:, place // block].long()
            token = entry * block + place % block
            keep = (entry >= 0) & (token >= limit[:, :1]) & (token < limit[:, 1:].clamp(max=n_keys))
            pieces.append((token.masked_fill(~keep, n_keys), keep))
        for h in range(key_heads):
            token, keep = pieces[h * len(pieces) // key_heads]
            yield _Piece(b, h, slice(h * of_head, (h + 1) * of_head), rows, token, keep)


def forward(
    q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float, call: Call | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, Nq, Dv]``, laid out as `new_out`, and the lse ``[B, H, Nq]``."""
    dtype = accumulator(q)
    out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), dtype=dtype).transpose(1, 2)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    for piece in _pieces(q, k, v, lists):
        found = piece.scores(piece.mine(q, dtype), piece.gathered(k, dtype), scale, call)
        top = found.scores.amax(2, keepdim=True)
        # A row without keys: -inf - -inf would be NaN.
        top = top.masked_fill(top == -math.inf, 0)
        weights = (found.scores - top).exp()
        total = weights.sum(2, keepdim=True)
        mixed = found.dropped(weights) @ piece.gathered(v, dtype) / total
        mixed.masked_fill_(total == 0, 0)
        more = (total.log() + top).squeeze(2)
        merge_into(piece.of(out), piece.of(lse), mixed.transpose(0, 1), more.T)
    return out.to(q.dtype), lse


def backward(rows: Rows, lists: Lists, scale: float, call: Call | None = None) -> Grads:
    """Return the gradients of q, k and v, contiguous and in their dtype."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    dtype = accumulator(q)
    q_total = q.new_zeros(q.shape, dtype=dtype)
    # The row behind the keys takes what belongs to none.
    k_total, v_total = (x.new_zeros((*x.shape[:2], x.shape[2] + 1, x.shape[3]), dtype=dtype) for x in (k, v))
    for piece in _pieces(q, k, v, lists):
        mine, grad = piece.mine(q, dtype), piece.mine(out_grad, dtype)
        keys, of_rows = piece.gathered(k, dtype), piece.mine(lse, dtype)
        found = piece.scores(mine, keys, scale, call)
        lone = (of_rows == -math.inf).unsqueeze(2)
        weights = found.weights(of_rows.masked_fill(lone.squeeze(2), 0))
        mine, grad = mine.masked_fill(lone, 0), grad.masked_fill(lone, 0)
        delta = (grad * piece.mine(out, dtype)).sum(2)
        if lse_grad is not None:
            delta -= piece.mine(lse_grad, dtype)
        grad_weights = found.dropped(grad @ piece.gathered(v, dtype).mT)
        grad_scores = found.through_softcap(weights * (grad_weights - delta.unsqueeze(2))) * scale
        # Scores of rows without keys may be NaN, and 0 times a key of -inf is.
        grad_scores = grad_scores.masked_fill(lone | ~piece.keep.unsqueeze(1), 0)
        piece.of(q_total).add_((grad_scores @ keys).masked_fill_(lone, 0).transpose(0, 1))
        at = piece.batch, piece.key_head
        order = piece.tokens.flatten().sort(stable=True)
        bags = torch.bincount(order.values, minlength=k_total.shape[2]).cumsum(0).roll(1)
        bags[0] = 0
        for total, terms in ((k_total, grad_scores.mT @ mine), (v_total, found.dropped(weights).mT @ grad)):
            # The terms of a key in the order of the queries, so that no bit depends on the number of threads.
            total[at] += torch.nn.functional.embedding_bag(order.indices, terms.flatten(0, 1), bags, mode="sum")
    grads = q_total, k_total[:, :, :-1], v_total[:, :, :-1]
    q_grad, k_grad, v_grad = (x.to(q.dtype).contiguous() for x in grads)
    return q_grad, k_grad, v_grad
