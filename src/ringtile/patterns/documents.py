"""Packed documents: attention stays inside each document."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ringtile.patterns.base import Pattern, full_shape, same_for_heads
from ringtile.patterns.checks import as_tensor, checked_ints
from ringtile.patterns.content import Content
from ringtile.patterns.grid import FAR, TileGrid, interval_cover
from ringtile.patterns.traced import outside_graphs

_Integers = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, repr=False, init=False)
class Documents(Pattern):
    """A query attends to the keys of its own document.

    Pass one of three forms. ``lengths`` is a list of tokens per document, and the only form with a text. ``cu_seqlens``
    ``[D + 1]`` rises from 0 to the number of tokens, as in flash-attention. ``ids`` ``[N]`` or ``[B, N]`` numbers the
    document of each token, and each document is one contiguous run; ``[B, N]`` makes a pattern for B batch rows. Both
    are integers, as tensors, lists or arrays. They are copied, tensors stay on their device, and equal documents make
    equal patterns. Raises
    ValueError if a length is negative, a shape or dtype is invalid, or an id appears again after its run.

    >>> print(Documents([1, 2]).draw(3))
    █··
    ·██
    ·██
    """

    bounds: Content
    """``[B or 1, D + 1]`` int64: the begin of each document, then the number of tokens, repeated as padding."""
    batched: bool
    head_class = same_for_heads

    @outside_graphs
    def __init__(
        self, lengths: Sequence[int] | None = None, *, cu_seqlens: _Integers | None = None, ids: _Integers | None = None
    ) -> None:
        if (lengths is not None) + (cu_seqlens is not None) + (ids is not None) != 1:
            raise ValueError("documents expects exactly one of lengths, cu_seqlens and ids")
        text, batched = None, False
        if lengths is not None:
            lengths = checked_ints("documents", "lengths", lengths)
            text = f"documents({list(lengths)})"
            bounds = torch.tensor((0, *lengths), dtype=torch.int64, device="cpu").cumsum(0).unsqueeze(0)
        elif cu_seqlens is not None:
            bounds = _integer("cu_seqlens", as_tensor("documents", "cu_seqlens", cu_seqlens), (1,)).unsqueeze(0)
            if int(bounds[0, 0]) != 0 or bool((bounds.diff() < 0).any()):
                raise ValueError(f"documents expects cu_seqlens to rise from 0, got cu_seqlens={bounds[0].tolist()}")
        else:
            rows = as_tensor("documents", "ids", ids)
            bounds, batched = _bounds_of_ids(rows), rows.dim() == 2
        self._fill(bounds, batched=batched, text=text)

    def _fill(self, bounds: Tensor, *, batched: bool, text: str | None = None) -> None:
        if not batched:
            # Empty documents keep no pairs. Without them, equal rules are equal patterns.
            bounds = torch.unique_consecutive(bounds[0]).unsqueeze(0)
        if bounds.shape[1] < 2:
            raise ValueError("documents expects at least one token, got none")
        object.__setattr__(self, "bounds", Content(bounds))
        object.__setattr__(self, "batched", batched)
        self._set_text(text)

    def starts(self, like: Tensor) -> Tensor:
        """Return the begin of each document, then the number of tokens, on the device of ``like``."""
        if self.batched:
            raise ValueError(f"documents of {self.batch_size} batch rows: ask batch_row(b), the pattern of one row")
        return self.bounds.tensor[0].to(like.device)

    def document(self, position: Tensor) -> Tensor:
        """Return the document of each position. The first and last have no end, so ragged tiles are full."""
        inner = self.starts(position)[1:-1]
        return torch.searchsorted(inner, position.contiguous(), right=True)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return full_shape(self.document(query) == self.document(key), head, query, key)

    def _extent(self, document: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first position of a document, and the first position after it."""
        starts = self.starts(document).clone()
        # The first and the last document fill their ragged tiles, whose bits outside the lengths mean nothing.
        starts[0], starts[-1] = -FAR, FAR
        return starts[document], starts[document + 1]

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        first, last = self.document(rows * grid.block), self.document(rows * grid.block + grid.block - 1)
        lo, hi = self._extent(first)[0] // grid.block, (self._extent(last)[1] - 1) // grid.block + 1
        return interval_cover(rows, lo, hi, grid)[1:]

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        firsts = [self.document(tile * grid.block) for tile in (row, col)]
        lasts = [self.document(tile * grid.block + grid.block - 1) for tile in (row, col)]
        common, last_common = torch.maximum(*firsts), torch.minimum(*lasts)
        # With one document in common, the kept pairs form a rectangle. Its four sides are the class.
        start, end = self._extent(common)
        # A side is at 0 ... block of the tile, after clamping, so base block + 1 keeps the four apart.
        base = grid.block + 1
        code = torch.zeros_like(row)
        for tile in (row, col):
            for side in (start, end):
                code = code * base + (side - tile * grid.block).clamp(0, grid.block)
        # Behind these come tiles with several documents in common, each its own class: only a few lie on the diagonal.
        several = base**4 + super().tile_class(head, row, col, grid)
        whole = (firsts[0] == lasts[0]) & (firsts[1] == lasts[1]) & (firsts[0] == firsts[1])
        numbers = torch.where(last_common > common, several, code + 2)
        return torch.where(whole, 1, torch.where(last_common < common, 0, numbers))

    @property
    def batch_size(self) -> int | None:
        return len(self.bounds.tensor) if self.batched else None

    def batch_row(self, batch: int) -> Pattern:
        if not self.batched:
            return self
        return of_bounds(self.bounds.tensor[batch : batch + 1])

    def envelope(self) -> Pattern:
        return self

    def validate(self, grid: TileGrid) -> None:
        tokens = int(self.bounds.tensor[0, -1])
        if grid.n_keys != tokens:
            raise ValueError(f"documents of {tokens} tokens expects n_keys={tokens}, got n_keys={grid.n_keys}")
        if grid.start < 0 or grid.start + grid.n_queries > tokens:
            raise ValueError(
                f"documents expects query positions in [0, {tokens}), "
                f"got start={grid.start}, n_queries={grid.n_queries}"
            )


def of_bounds(bounds: Tensor) -> Documents:
    """Return the documents of bounds ``[B, D + 1]``, as `Documents` has them. The first can begin before position 0."""
    made = object.__new__(Documents)
    made._fill(bounds, batched=len(bounds) > 1)
    return made


def counted_from(origins: Sequence[int], n_keys: int, documents: Documents | None = None) -> Documents:
    """Return documents with one more begin per batch row, such as the first token after padding. It can be negative."""
    begins = [(min(origin, 0), origin, n_keys) for origin in origins]
    bounds = torch.tensor(begins, dtype=torch.int64, device="cpu")
    if documents is not None:
        more = documents.bounds.tensor
        rows = max(len(bounds), len(more))
        bounds = torch.cat([x.expand(rows, -1) for x in (bounds.to(more.device), more)], 1).sort(1).values
    return of_bounds(bounds)


def _integer(name: str, tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    wrong_dtype = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool
    if wrong_dtype or tensor.dim() not in dims or tensor.numel() == 0:
        shapes = " or ".join(("", "[N]", "[B, N]")[dim] for dim in dims)
        raise ValueError(
            f"documents expects {name} to be a non-empty integer tensor {shapes}, "
            f"got {name}.dtype={tensor.dtype}, {name}.shape={tuple(tensor.shape)}"
        )
    return tensor.long()


def _bounds_of_ids(ids: Tensor) -> Tensor:
    rows = _integer("ids", ids, (1, 2))
    if rows.dim() == 1:
        rows = rows.unsqueeze(0)
    begins = torch.ones_like(rows, dtype=torch.bool)
    # Of ids 7 7 2 2 2 9, documents begin at 0, 2 and 5.
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    n_tokens = rows.shape[1]
    bounds = []
    for row, begin in zip(rows, begins, strict=True):
        starts = begin.nonzero().squeeze(1)
        distinct, times = torch.unique(row[starts], return_counts=True)
        if len(distinct) != len(starts):
            again = int(distinct[times > 1][0])
            raise ValueError(f"documents expects each id to be one contiguous run, got id {again} again after its run")
        bounds.append(starts)
    return F.pad(pad_sequence(bounds, batch_first=True, padding_value=n_tokens), (0, 1), value=n_tokens)
