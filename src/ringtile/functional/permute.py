"""LongNet's segments as dense problems on strided views of the tokens.

In each segment of ``length`` tokens, a branch (length, dilation) keeps the tokens whose place modulo ``dilation`` is
the *offset* ``head % dilation``. Heads of neighboring offsets that keep equally many tokens form one `Piece`, with all
whole segments. Shape letters: ``B`` batch, ``H`` heads, ``N`` tokens, ``S`` segments, ``L`` kept tokens of a segment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.functional.parts import Places


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
    """
    start = n_keys - n_queries
    first = max(start, 0)
    if n_queries <= 0 or n_keys <= 0:
        return
    # Whole segments are those from ``whole`` to before ``end``. 11 tokens in segments of 4 have the whole segments 0
    # and 1 and a ragged one of 3 tokens. If only the last 5 are queries, the first of them is inside segment 1.
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
        key = segment * length
        for offsets, skipped, kept in _equal_offsets(low, high, min(dilation, heads), dilation, by_offset):
            chosen = tuple(head for head in range(heads) if head % dilation in offsets)
            query = key - start + skipped * dilation
            yield Piece(dilation, offsets, chosen, count, length, query, key, kept - skipped, kept, skipped)


def _equal_offsets(
    low: int, high: int, n_offsets: int, dilation: int, by_offset: bool
) -> Iterator[tuple[range, int, int]]:
    """Yield runs of offsets with equal counts of kept places below ``low`` and ``high``, and these counts."""
    # 3 tokens with a dilation of 2: offset 0 keeps the places of tokens 0 and 2, offset 1 that of token 1.
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


@dataclass(frozen=True)
class Strided(Places):
    """The queries, or the keys, of a piece: views of every ``dilation``-th token, one view per offset.

    For 5 heads, a dilation of 2 and segments of 6 tokens, the view of offset 1 has the heads 1 and 3, and in each
    segment the tokens 1, 3 and 5.
    """

    piece: Piece
    keys: bool = False
    ratio: int = 1
    """Number of query heads that share a key head. Rows have 1."""

    def take(self, x: Tensor) -> Tensor:
        """Gather a batch of segments: ``[B, H, N, ...]`` to ``[B * S, H', L, ...]``. Heads keep their order."""
        piece, parts = self.piece, []
        for offset in piece.offsets:
            shared = self._shared_heads(offset)
            view = self._tokens(x, offset)
            chosen = view[:, offset :: piece.dilation] if shared is None else view.index_select(1, _on(shared, x))
            parts.append(chosen.transpose(1, 2))
        if len(parts) == 1:
            return parts[0].flatten(0, 1)
        if parts[0].shape[2] == parts[-1].shape[2]:
            # Offsets have equally many heads: stacked behind the heads, they alternate as the heads do.
            return torch.stack(parts, 3).flatten(2, 3).flatten(0, 1)
        # 5 heads at 2 offsets come as 0, 2, 4, 1, 3. Head 1 is then number 3, head 2 number 1.
        by_offset = sorted(piece.heads, key=lambda head: (head % piece.dilation, head))
        order = [by_offset.index(head) for head in piece.heads]
        return torch.cat(parts, 2).index_select(2, _on(order, x)).flatten(0, 1)

    def take_mask(self, mask: Tensor) -> Tensor:
        """Return the key mask ``[B * S, L]`` from ``[B, N]``. The piece has one offset."""
        return self._tokens(mask.unsqueeze(1), self.piece.offsets.start).squeeze(1).flatten(0, 1)

    def views(self, total: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the views of each offset as ``[B, H', S, L, ...]``."""
        for offset in self.piece.offsets:
            yield self._tokens(total[:, offset :: self.piece.dilation], offset), self._of_offset(part, offset)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a gradient. A repeated key head gets the sum of its copies."""
        for offset in self.piece.offsets:
            mine, shared = self._tokens(total, offset), self._shared_heads(offset)
            theirs = self._of_offset(part, offset)
            if shared is None:
                mine[:, offset :: self.piece.dilation].add_(theirs)
            else:
                mine.index_add_(1, _on(shared, total), theirs.to(total.dtype))

    def _tokens(self, x: Tensor, offset: int) -> Tensor:
        """Return the tokens of one offset, for all heads of ``x``: a view ``[B, H, S, L, ...]``."""
        piece = self.piece
        begin, count = (piece.key, piece.n_keys) if self.keys else (piece.query, piece.n_queries)
        if piece.segments == 1:
            # The only segment can be ragged, or queries can begin inside it.
            first = begin + offset
            return x[:, :, first : first + (count - 1) * piece.dilation + 1 : piece.dilation].unsqueeze(2)
        whole = x[:, :, begin : begin + piece.segments * piece.length].unflatten(2, (piece.segments, piece.length))
        rows: Tensor = whole[:, :, :, offset :: piece.dilation]
        return rows

    def _of_offset(self, part: Tensor, offset: int) -> Tensor:
        """Return the heads of one offset of a gathered tensor: a view ``[B, H', S, L, ...]``."""
        offsets = self.piece.offsets
        mine: Tensor = part.unflatten(0, (-1, self.piece.segments))[:, :, offset - offsets.start :: len(offsets)]
        return mine.transpose(1, 2)

    def _shared_heads(self, offset: int) -> list[int] | None:
        """Return the key head of each head of an offset, or None if key heads are strided as query heads are.

        With 2 query heads per key head and a dilation of 3, the heads 1 and 4 of offset 1 read the key heads 0 and 2.
        """
        if self.ratio == 1 or self.piece.dilation == 1:
            return None
        return [head // self.ratio for head in self.piece.heads if head % self.piece.dilation == offset]


def _on(numbers: list[int], x: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=x.device)
