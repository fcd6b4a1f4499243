"""LongNet's segments as dense problems on strided views of the tokens.

In each segment of ``length`` tokens, a branch (length, dilation) keeps the tokens whose place modulo ``dilation`` is
the *offset* ``head % dilation``. Heads of neighboring offsets that keep equally many tokens form one `Piece`, with all
whole segments. Shape letters: ``B`` batch, ``H`` heads, ``N`` tokens, ``S`` segments, ``L`` kept tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Segments and heads of one branch that form dense problems of ``n_queries`` by ``n_keys`` tokens."""

    dilation: int
    offsets: range
    """Offsets ``head % dilation`` of the heads."""
    heads: tuple[int, ...]
    segments: int
    length: int
    """Tokens from one segment to the next."""
    query: int
    """Index of the first kept query of the first segment, minus the offset."""
    key: int
    """Index of the first kept key of the first segment, minus the offset."""
    n_queries: int
    n_keys: int
    start: int
    """Place of the first query among the keys, 0 unless queries begin inside a segment."""


def pieces(
    n_queries: int, n_keys: int, heads: int, length: int, dilation: int, *, by_offset: bool = False
) -> Iterator[Piece]:
    """Cut one branch into dense problems. With ``by_offset``, each has heads of one offset.

    The last query is at the position of the last key. Queries before the first key have no keys in their segment.

    >>> [(p.segments, p.n_keys, p.heads) for p in pieces(11, 11, 3, length=4, dilation=2)]
    [(2, 2, (0, 1, 2)), (1, 2, (0, 2)), (1, 1, (1,))]
    """
    start = n_keys - n_queries
    first = max(start, 0)
    if n_queries <= 0 or n_keys <= 0:
        return
    whole, end = -(-first // length), n_keys // length
    spans: list[tuple[int, int, int, int]] = []
    if whole > end:
        spans.append((end, 1, first - end * length, n_keys - end * length))
    else:
        if whole * length > first:
            spans.append((whole - 1, 1, first - (whole - 1) * length, length))
        if end > whole:
            spans.append((whole, end - whole, 0, length))
        if n_keys > end * length:
            spans.append((end, 1, 0, n_keys - end * length))
    for segment, count, low, high in spans:
        begin = segment * length
        for offsets, skipped, kept in _equal_offsets(low, high, min(dilation, heads), dilation, by_offset):
            chosen = tuple(head for head in range(heads) if head % dilation in offsets)
            yield Piece(
                dilation,
                offsets,
                chosen,
                count,
                length,
                begin - start + skipped * dilation,
                begin,
                kept - skipped,
                kept,
                skipped,
            )


def _equal_offsets(
    low: int, high: int, n_offsets: int, dilation: int, by_offset: bool
) -> Iterator[tuple[range, int, int]]:
    """Yield runs of offsets with equal counts of kept places below ``low`` and ``high``, and these counts."""
    counts = [
        (-(-(low - min(offset, low)) // dilation), -(-(high - min(offset, high)) // dilation))
        for offset in range(n_offsets)
    ]
    begin = 0
    for end in range(1, n_offsets + 1):
        if end == n_offsets or by_offset or counts[end] != counts[begin]:
            skipped, kept = counts[begin]
            if kept > skipped:
                yield range(begin, end), skipped, kept
            begin = end


def kept_rows(x: Tensor, piece: Piece, offset: int, *, keys: bool = False) -> Tensor:
    """Return the tokens of one offset, for all heads: ``[B, H, N, ...]`` to a view ``[B, H, S, L, ...]``."""
    begin, count = (piece.key, piece.n_keys) if keys else (piece.query, piece.n_queries)
    if piece.segments == 1:
        first = begin + offset
        return x[:, :, first : first + (count - 1) * piece.dilation + 1 : piece.dilation].unsqueeze(2)
    whole = x[:, :, begin : begin + piece.segments * piece.length].unflatten(2, (piece.segments, piece.length))
    rows: Tensor = whole[:, :, :, offset :: piece.dilation]
    return rows


def key_heads(piece: Piece, offset: int, ratio: int) -> list[int] | None:
    """Return the key head of each head of an offset if ``ratio`` heads share one, or None to use all key heads."""
    if ratio == 1 or piece.dilation == 1:
        return None
    return [head // ratio for head in piece.heads if head % piece.dilation == offset]


def query_view(x: Tensor, piece: Piece, offset: int) -> Tensor:
    """Return the queries of the heads of one offset as a view ``[B, H', S, L, ...]``."""
    return kept_rows(x[:, offset :: piece.dilation], piece, offset)


def compact(x: Tensor, piece: Piece, *, keys: bool = False, ratio: int = 1) -> Tensor:
    """Gather the queries (or keys) of a piece as a batch of segments: ``[B, H, N, ...]`` to ``[B * S, H', L, ...]``.

    Heads keep their order. A key head that query heads at several offsets share is repeated.
    """
    parts = []
    for offset in piece.offsets:
        chosen = key_heads(piece, offset, ratio) if keys else None
        if chosen is not None:
            part = kept_rows(x, piece, offset, keys=True).index_select(1, torch.tensor(chosen, device=x.device))
        else:
            part = kept_rows(x[:, offset :: piece.dilation], piece, offset, keys=keys)
        parts.append(part.transpose(1, 2))
    if len(parts) == 1:
        return parts[0].flatten(0, 1)
    if parts[0].shape[2] == parts[-1].shape[2]:
        return torch.stack(parts, 3).flatten(2, 3).flatten(0, 1)
    by_offset = sorted(piece.heads, key=lambda head: (head % piece.dilation, head))
    order = [by_offset.index(head) for head in piece.heads]
    return torch.cat(parts, 2).index_select(2, torch.tensor(order, device=x.device)).flatten(0, 1)


def of_offset(x: Tensor, piece: Piece, batch: int, offset: int) -> Tensor:
    """Return the heads of one offset of a compacted tensor, as a view ``[B, H', S, L, ...]``."""
    mine: Tensor = x.unflatten(0, (batch, piece.segments))[:, :, offset - piece.offsets.start :: len(piece.offsets)]
    return mine.transpose(1, 2)


def add_compacted(total: Tensor, part: Tensor, piece: Piece, *, keys: bool = False, ratio: int = 1) -> None:
    """Add the gradient of a compacted tensor to the gradient ``[B, H, N, ...]`` of the tokens, in place."""
    for offset in piece.offsets:
        theirs = of_offset(part, piece, total.shape[0], offset)
        chosen = key_heads(piece, offset, ratio) if keys else None
        if chosen is not None:
            place = kept_rows(total, piece, offset, keys=True)
            place.index_add_(1, torch.tensor(chosen, device=total.device), theirs.to(total.dtype))
        else:
            kept_rows(total[:, offset :: piece.dilation], piece, offset, keys=keys).add_(theirs)
