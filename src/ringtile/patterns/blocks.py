"""Patterns of whole blocks, and patterns of any rule."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Self

import torch
from torch import Tensor

from ringtile.patterns.base import Composed, Pattern, same_for_heads
from ringtile.patterns.checks import LARGEST_BLOCK, as_tensor, checked_int
from ringtile.patterns.content import Content
from ringtile.patterns.functions import FlexRule, MaskMod, Reads
from ringtile.patterns.grid import Cover, TileGrid, counted, interval_cover, number_pairs
from ringtile.patterns.traced import outside_graphs

_MAX_PAIRS = 64
"""A tile with more pairs of blocks is classified by its bits: evaluating the pairs would cost as much."""


class BlockPattern(Pattern, rule=("kept", "draws")):
    """A pattern of whole blocks of ``block`` by ``block`` tokens."""

    block: int

    def kept(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        """Return which pairs of block numbers are kept: int64 tensors in, bool of the broadcast shape out."""
        raise NotImplementedError

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shape = torch.broadcast_tensors(head, query, key)[0].shape
        parts = [head.to(query.device), query // self.block, key // self.block]
        # 128 x 128 positions in blocks of 64 are only 2 x 2 pairs of blocks.
        distinct, inverse = zip(*(torch.unique(part, return_inverse=True) for part in parts), strict=True)
        heads, rows, cols = distinct
        if len(heads) * len(rows) * len(cols) > shape.numel():
            return self.kept(*parts).expand(shape)
        # Positions share blocks, so evaluate each pair of blocks once.
        table = self.kept(heads[:, None, None], rows[:, None], cols).expand(len(heads), len(rows), len(cols))
        which_head, which_row, which_col = inverse
        return table.flatten()[(which_head * len(rows) + which_row) * len(cols) + which_col]

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        per_tile = max_met(grid.block, self.block)
        if per_tile**2 > _MAX_PAIRS:
            return super().tile_class(head, row, col, grid)
        number = row.new_tensor(head)
        (row_first, row_last), (col_first, col_last) = grid.units(row, self.block), grid.units(col, self.block)
        # The place in the tile at which the block changes (0 if it does not), then the kept pairs of blocks.
        code = number_pairs(grid.phase(row, self.block), grid.phase(col, self.block))
        some, every = torch.zeros_like(row, dtype=torch.bool), torch.ones_like(row, dtype=torch.bool)
        for down, right in product(range(per_tile), repeat=2):
            a, b = row_first + down, col_first + right
            # A tile of 128 meets two or three blocks of 50, so the last steps can lie beyond it.
            met = (a <= row_last) & (b <= col_last)
            kept = self.kept(number, a, b) & met
            some |= kept
            every &= kept | ~met
            if per_tile > 1:
                code = number_pairs(code, kept.long())
        return torch.where(every, 1, torch.where(some, code, 0))

    def _tiles(self, row: Tensor, col: Tensor, rows: Tensor, grid: TileGrid) -> Cover:
        """Return the tiles in the row tiles ``rows`` that the given blocks touch."""
        (lo, hi), (first, end) = (grid.tiles_of(block, block + 1, self.block) for block in (col, row))
        tile = first + torch.arange(max_met(self.block, grid.block), device=rows.device).unsqueeze(1)
        touched = tile < end
        if len(rows) and len(rows) > int(rows[-1] - rows[0]):
            touched &= (tile >= rows[0]) & (tile <= rows[-1])
        else:
            touched &= torch.isin(tile, rows)
        return interval_cover(tile[touched], lo.expand_as(tile)[touched], hi.expand_as(tile)[touched], grid)


def among(ascending: Tensor, numbers: Tensor) -> Tensor:
    """Return which numbers occur in an ascending vector."""
    if len(ascending) == 0:
        return torch.zeros_like(numbers, dtype=torch.bool)
    return ascending[torch.searchsorted(ascending, numbers.contiguous()).clamp(max=len(ascending) - 1)] == numbers


def max_met(length: int, unit: int) -> int:
    """Return the largest number of units that an interval ``[n * length, (n + 1) * length)`` touches."""
    if length % unit == 0 or unit % length == 0:
        return max(length // unit, 1)
    return (length + unit - 2) // unit + 1


@dataclass(frozen=True, repr=False, init=False)
class Blocks(BlockPattern):
    """Keep the blocks marked in a bool matrix ``[R, C]`` or ``[H, R, C]``, or listed as CSR.

    Row r covers the query *positions* ``[r * block, (r + 1) * block)`` and column c the same key positions, so a matrix
    for ``n_keys`` keys has ``ceil(n_keys / block)`` columns. ``row_ptr`` is ``[R + 1]`` and ``col`` ``[row_ptr[-1]]``,
    both of an integer dtype. The tensors are copied, and equal contents make equal patterns. Blocks have no text form.
    Raises ValueError if shapes, dtypes or CSR contents are invalid.

    >>> print(Blocks(torch.eye(2, dtype=torch.bool), block=2).draw(4))
    ██··
    ██··
    ··██
    ··██
    """

    # Numbers, not pairs, because one sorted vector answers "is it kept" by a binary search.
    codes: Content
    """Kept blocks as ascending int64 numbers ``(head * R + row) * C + col``."""
    shape: tuple[int, int, int | None]
    """Rows, columns (an upper bound when listed as CSR), heads or None."""
    block: int
    given_columns: bool

    @outside_graphs
    def __init__(
        self,
        matrix: Tensor | None = None,
        *,
        row_ptr: Tensor | None = None,
        col: Tensor | None = None,
        block: int = 128,
    ) -> None:
        if matrix is not None and row_ptr is None and col is None:
            codes, shape = _from_matrix(as_tensor("blocks", "matrix", matrix))
        elif matrix is None and row_ptr is not None and col is not None:
            codes, shape = _from_csr(*(as_tensor("blocks", "row_ptr and col", x) for x in (row_ptr, col)))
        else:
            raise ValueError("blocks expects either a matrix or both row_ptr and col")
        object.__setattr__(self, "codes", Content(codes))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "block", checked_int("blocks", "block", block, 1, LARGEST_BLOCK))
        object.__setattr__(self, "given_columns", matrix is not None)

    def kept(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        n_rows, n_cols, heads = self.shape
        codes = self.codes.tensor.to(row.device)
        inside = (row >= 0) & (row < n_rows) & (col >= 0) & (col < n_cols)
        if heads is not None:
            row = row + head * n_rows
        code = torch.where(inside, row * n_cols + col, -1)
        return among(codes, code)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        codes, n_cols = self._of_head(head).to(rows.device), self.shape[1]
        return self._tiles(codes // n_cols, codes % n_cols, rows, grid)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return len(self._of_head(head)) * max_met(self.block, grid.block) ** 2

    def _of_head(self, head: int) -> Tensor:
        """Return the numbers ``row * C + col`` of the blocks that a head keeps."""
        n_rows, n_cols, heads = self.shape
        codes = self.codes.tensor
        if heads is None:
            return codes
        size = n_rows * n_cols
        first, last = torch.searchsorted(codes, codes.new_tensor([head, head + 1]) * size).tolist()
        return codes[first:last] - head * size

    def head_class(self, head: int) -> Hashable:
        return None if self.shape[2] is None else head

    @property
    def num_heads(self) -> int | None:
        return self.shape[2]

    def validate(self, grid: TileGrid) -> None:
        n_rows, n_cols, _ = self.shape
        cols = -(-grid.n_keys // self.block)
        if n_cols != cols if self.given_columns else n_cols > cols:
            is_mask = (n_rows, n_cols) == (grid.n_queries, grid.n_keys)
            raise ValueError(
                f"blocks of {self.block} tokens expects {cols} columns for n_keys={grid.n_keys}, got {n_cols}"
                + ("; for a mask of pairs use ringtile.patterns.from_mask(mask)" if is_mask else "")
            )
        if grid.start < 0 or grid.start + grid.n_queries > n_rows * self.block:
            raise ValueError(
                f"blocks expects query positions in [0, {n_rows * self.block}), {n_rows} rows of {self.block}, "
                f"got start={grid.start}, n_queries={grid.n_queries}"
            )


def _from_matrix(matrix: Tensor) -> tuple[Tensor, tuple[int, int, int | None]]:
    if matrix.layout is not torch.strided:
        raise ValueError(f"blocks expects torch.strided, got {matrix.layout=}")
    if matrix.dtype != torch.bool or matrix.dim() not in (2, 3) or matrix.numel() == 0:
        raise ValueError(
            f"blocks expects a non-empty bool matrix [R, C] or [H, R, C], got {matrix.dtype=}, {matrix.shape=}; "
            "for a mask of pairs use ringtile.patterns.from_mask(mask)"
        )
    n_rows, n_cols = matrix.shape[-2:]
    heads = matrix.shape[0] if matrix.dim() == 3 else None
    return matrix.flatten().nonzero().squeeze(1), (n_rows, n_cols, heads)


def _from_csr(row_ptr: Tensor, col: Tensor) -> tuple[Tensor, tuple[int, int, int | None]]:
    for name, tensor, shortest in (("row_ptr", row_ptr, 2), ("col", col, 0)):
        if tensor.dim() != 1 or len(tensor) < shortest or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
            raise ValueError(
                f"blocks expects {name} to be an integer vector of at least {shortest} entries, "
                f"got {name}.dtype={tensor.dtype}, {name}.shape={tuple(tensor.shape)}"
            )
    pointers, columns = row_ptr.long(), col.to(row_ptr.device).long()
    counts = pointers.diff()
    if int(pointers[0]) != 0 or int(counts.min()) < 0 or int(pointers[-1]) != len(columns):
        raise ValueError(
            f"blocks expects row_ptr to rise from 0 to len(col) = {len(columns)}, "
            f"got row_ptr[0]={int(pointers[0])}, row_ptr[-1]={int(pointers[-1])}, smallest step {int(counts.min())}"
        )
    if len(columns) and int(columns.min()) < 0:
        raise ValueError(f"blocks expects col >= 0, got col.min()={int(columns.min())}")
    n_cols = int(columns.max()) + 1 if len(columns) else 1
    row = torch.repeat_interleave(counts)
    return torch.unique(row * n_cols + columns), (len(counts), n_cols, None)


@dataclass(frozen=True, repr=False)
class SampledBlocks(BlockPattern):
    """Keep ``keep`` of every ``of`` blocks of the other segments, the same ones for all queries of a segment.

    A segment has ``segment`` tokens. Its queries keep block b of another segment iff ``(s - b) mod of < keep``, with s
    the number of their segment. So the kept blocks move by one from segment to segment, and a rank whose tokens lie in
    one segment needs only the fraction ``keep / of`` of the others' keys. With ``within``, only segments in the same
    ``within`` tokens count. Raises ValueError if ``keep`` is not in ``[1, of]``, ``segment`` is no multiple of
    ``block`` or ``within`` is no multiple of ``segment``.

    >>> print(SampledBlocks(1, 2, 2, block=1).draw(6))
    ··█·█·
    ··█·█·
    ·█···█
    ·█···█
    █·█···
    █·█···
    """

    keep: int
    of: int
    segment: int
    within: int = 0
    block: int = 128
    unbounded = True
    head_class = same_for_heads

    def __post_init__(self) -> None:
        name = "sampled_blocks"
        self._set_int(name, "of", 1, LARGEST_BLOCK)
        self._set_int(name, "keep", 1, self.of)
        self._set_int(name, "block", 1, LARGEST_BLOCK)
        self._set_int(name, "segment", 1)
        self._set_int(name, "within")
        if self.segment % self.block:
            raise ValueError(f"{name} expects a multiple of block={self.block}, got segment={self.segment}")
        if self.within % self.segment:
            raise ValueError(f"{name} expects a multiple of segment={self.segment}, got within={self.within}")
        within = f", {self.within}" if self.within else ""
        block = f", block={self.block}" if self.block != 128 else ""
        self._set_text(f"{name}({self.keep}, {self.of}, {self.segment}{within}{block})")

    def kept(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        size, whole = self.segment // self.block, self.within // self.block
        number = row // size
        kept = (number != col // size) & ((number - col) % self.of < self.keep)
        if whole:
            kept = kept & (row // whole == col // whole)
        return kept.expand(torch.broadcast_tensors(head, row, col)[0].shape)

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        size, whole = self.segment // self.block, self.within // self.block
        first, last = grid.units(rows, self.block)
        row = first + torch.arange(max_met(grid.block, self.block), device=rows.device).unsqueeze(1)
        is_met = row <= last
        tile, row = rows.expand_as(row)[is_met], row[is_met]
        number, n_blocks = row // size, -(-grid.n_keys // self.block)
        begin = row // whole * whole if whole else torch.zeros_like(row)
        end = (begin + whole).clamp(max=n_blocks) if whole else begin + n_blocks
        sides = (begin.clamp(min=0), (number * size).clamp(max=n_blocks)), ((number + 1) * size, end)
        parts = [self._runs(tile, number, low.clamp(min=0), high) for low, high in sides]
        tile, low, high = (torch.cat(part) for part in zip(*parts, strict=True))
        return interval_cover(tile, *grid.tiles_of(low, high, self.block), grid)

    def _runs(self, tile: Tensor, number: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the runs of kept blocks in ``[low, high)``, each with its row tile."""
        if self.keep == self.of:
            kept = high > low
            return tile[kept], low[kept], high[kept]
        # Run k ends behind block number - k * of.
        # With keep 1 of 3, segment 4 keeps blocks 4, 1 (k = 0, 1), and 7 (k = -1). In [2, 8), k runs from -1 to 0.
        least = -((high - 2 + self.keep - number) // self.of)
        count = (1 + (number - low) // self.of - least).clamp(min=0).where(high > low, 0)
        which, step = counted(count)
        end = number[which] - (least[which] + step) * self.of + 1
        return tile[which], torch.maximum(end - self.keep, low[which]), torch.minimum(end, high[which])

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        n_blocks = -(-min(self.within or grid.n_keys, grid.n_keys) // self.block) + 1
        length = self.keep if self.keep < self.of else n_blocks
        runs = 2 * (n_blocks // self.of + 2) if self.keep < self.of else 2
        # A run begins at a block: of 150 tokens in blocks of 50, at most 126 places into a tile of 128, so in 3 tiles.
        tiles = (length * self.block - gcd(self.block, grid.block) - 1) // grid.block + 2
        return len(rows) * max_met(grid.block, self.block) * runs * tiles


@dataclass(frozen=True, repr=False)
class Elements(Pattern):
    """Keep the pairs for which a function ``fn(head, query, key)`` of three int64 tensors returns True.

    The tensors broadcast against each other. Building an index evaluates every pair of every head, which is quadratic
    in the length. If you intersect it with a small pattern (``Window(512) & Elements(fn)``), only the pairs of that
    pattern are evaluated. Two patterns are equal if their functions are equal. An index is built anew if the data
    changes that a function reads. Elements have no text form. Raises ValueError if ``fn`` is not callable or does not
    return bool of the broadcast shape.

    >>> print(Elements(lambda head, query, key: (query + key) % 2 == 0).draw(2))
    █·
    ·█
    """

    fn: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"elements expects fn to be callable, got fn={self.fn!r}")

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        try:
            kept = self.fn(head, query, key)
        except (RuntimeError, TypeError) as error:
            if "memory" in str(error):
                raise
            wanted = "fn to compute on three tensors, mask_mod on four, with & and torch.where in place of and and if"
            raise ValueError(f"elements expects {wanted}, got {type(error).__name__}: {error}") from error
        shape = torch.broadcast_tensors(head, query, key)[0].shape
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
            raise ValueError(f"elements expects fn to return a bool tensor, got {getattr(kept, 'dtype', type(kept))}")
        try:
            return kept.expand(shape)
        except RuntimeError as error:
            raise ValueError(f"elements expects fn to return shape {tuple(shape)}, got {tuple(kept.shape)}") from error

    @property
    def batch_size(self) -> int | None:
        return self.fn.batch if isinstance(self.fn, FlexRule) else None

    def batch_row(self, batch: int) -> Pattern:
        fn = self.fn
        return Elements(FlexRule(fn.mask_mod, None, batch)) if isinstance(fn, FlexRule) and fn.batch else self

    @classmethod
    def from_mask_mod(cls, mask_mod: MaskMod, batch: int | None = None) -> Self:
        """Return the pattern of a FlexAttention rule ``mask_mod(b, h, q_idx, kv_idx)``, whose indices are positions.

        A rule that reads b needs ``batch``, the number of batch elements. Without it, reading b raises ValueError.
        Patterns of the same function are equal.

        >>> print(Elements.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx == h).draw(3, head=1))
        ···
        █··
        ·█·
        """
        if not callable(mask_mod):
            raise ValueError(f"elements expects mask_mod to be callable, got mask_mod={mask_mod!r}")
        if batch is not None:
            checked_int("elements", "batch", batch, 1)
        return cls(FlexRule(mask_mod, batch))


def reads_of(pattern: Pattern, device: torch.device | None = None) -> Hashable:
    """Return the data that the functions in a pattern read, which joins the keys of caches."""
    if isinstance(pattern, Composed):
        return tuple(reads_of(part, device) for part in pattern.parts)
    return Reads(pattern.fn, device) if isinstance(pattern, Elements) else None
