"""Random blocks, drawn by a counter-based generator, so that they depend only on their own numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.patterns.base import Cover, TileGrid
from ringtile.patterns.blocks import BlockPattern, among, max_met
from ringtile.patterns.checks import LARGEST_BLOCK

WORD = 2**32 - 1

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[int | Tensor, int | Tensor], rounds: int) -> Words:
    """Compute Philox4x32 (Salmon et al., SC 2011): four 32-bit words per counter, as int64 tensors that broadcast.

    ``counter`` holds four int64 tensors and ``key`` two ints or tensors, all in ``[0, 2**32)``; ``rounds`` is 7 or 10.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit product does not fit int64, the product with the multiplier less 2**32 does.
        p0, p1 = c0 * (0xD2511F53 - 2**32), c2 * (0xCD9E8D57 - 2**32)
        high0, high1 = (p0 >> 32) + c0, (p1 >> 32) + c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & WORD, high0 ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def _standing(place: Tensor, swapped: Tensor, moved: Tensor) -> Tensor:
    """Return the number at a place of the shuffle: the one that the last swap put there, initially its own."""
    times = torch.arange(1, swapped.shape[-1] + 1, device=place.device)
    last = ((swapped == place.unsqueeze(-1)) * times).amax(-1, keepdim=True)
    return torch.where(last > 0, moved.gather(-1, (last - 1).clamp(min=0)), place.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, repr=False)
class RandomBlocks(BlockPattern):
    """Keep random pairs of blocks of ``block`` tokens, different in each head.

    Block m draws ``per_row`` distinct numbers (all, if there are fewer) in ``[0, m]`` from a Philox hash of (seed,
    head, m). The pair (a, b) is kept iff ``min(a, b)`` is among the draws of ``max(a, b)``. So under `Causal` each row
    of blocks keeps exactly its ``per_row`` draws. Without it, the pattern is symmetric and a row keeps about twice as
    many. A larger ``per_row`` keeps the same blocks and more. The draws do not depend on the lengths or the version of
    torch (after BigBird, Zaheer et al. 2020, arXiv:2007.14062). Raises ValueError if ``per_row`` is negative,
    ``seed`` is not in ``[0, 2**64)`` or ``block`` is not positive.

    >>> from ringtile.patterns import Causal
    >>> print((Causal() & RandomBlocks(1, block=1)).draw(6))
    █·····
    █·····
    ·█····
    ···█··
    ·█····
    ··█···
    """

    per_row: int
    seed: int = 0
    block: int = 128
    _size = ("per_row", 1)
    unbounded = True

    def __post_init__(self) -> None:
        self._set_int("random_blocks", "per_row")
        self._set_int("random_blocks", "seed", 0, 2**64 - 1)
        self._set_int("random_blocks", "block", 1, LARGEST_BLOCK)
        seed = f", seed={self.seed}" if self.seed else ""
        block = f", block={self.block}" if self.block != 128 else ""
        self._set_text(f"random_blocks({self.per_row}{seed}{block})")

    def draws(self, head: Tensor, row: Tensor) -> Tensor:
        """Draw the blocks of each row, for head and row that broadcast: ``[..., draws]``, -1 once none are left."""
        shape = torch.broadcast_tensors(head, row)[0].shape
        # Row m can draw at most the m + 1 blocks from 0 to m.
        per_row = min(self.per_row, max(0, int(row.max()) + 1)) if row.numel() else 0
        # Shuffle [0, row] and store only the swaps: step s swaps places s and swapped[s], so the first draws do not
        # depend on how many follow. The number that step s moves away from place s is moved[s].
        drawn = torch.full((*shape, per_row), -1, dtype=torch.int64, device=row.device)
        swapped, moved = drawn.clone(), drawn.clone()
        key = (self.seed & WORD, self.seed >> 32)
        for step in range(per_row):
            if step % 4 == 0:
                call = torch.full_like(row, step // 4)
                words = philox4x32((call, row & WORD, head, (row >> 32) & WORD), key, 10)
            # Step s draws from the places s ... row, which are bound + 1 numbers.
            bound = row - step
            # A 32-bit word w maps to w * (bound + 1) / 2**32: uniform in 0 ... bound, without a division.
            place = step + ((words[step % 4] * (bound + 1).clamp(min=0)) >> 32)
            drawn[..., step] = torch.where(bound < 0, -1, _standing(place, swapped, moved))
            moved[..., step] = _standing(torch.full_like(place, step), swapped, moved)
            swapped[..., step] = place
        return drawn

    def kept(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        shape = torch.broadcast_tensors(head, row, col)[0].shape
        kept = torch.zeros(shape, dtype=torch.bool, device=row.device)
        heads, which_head = torch.unique(head, return_inverse=True)
        for larger, smaller in ((row, col), (col, row)):
            numbers, which = torch.unique(larger, return_inverse=True)
            # One number per (head, larger, draw), with the draw counted from 1 and 0 for none: all are below size, so
            # slot * size + number orders the draws of all rows.
            size = int(numbers.max()) + 2 if len(numbers) else 0
            slots = torch.arange(len(heads) * len(numbers), device=row.device).view(len(heads), len(numbers), 1)
            codes = slots * size + self.draws(heads.unsqueeze(1), numbers) + 1
            code = (which_head * len(numbers) + which) * size + smaller + 1
            possible = (smaller >= 0) & (smaller <= larger)
            kept |= among(codes.flatten().sort().values, torch.where(possible, code, -1))
        return kept

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        if rows.numel() == 0:
            return Cover(rows, rows, rows)
        first, last = grid.units(rows, self.block)
        # The pattern is symmetric, so keys of later blocks than the rows draw these rows, too.
        lowest, highest = max(int(first.min()), 0), max(int(last.max()), -(-grid.n_keys // self.block) - 1)
        larger = torch.arange(lowest, highest + 1, device=rows.device)
        smaller = self.draws(rows.new_tensor(head), larger)
        larger = larger.unsqueeze(1).expand_as(smaller)
        larger, smaller = larger[smaller >= 0], smaller[smaller >= 0]
        row, col = torch.cat([larger, smaller]), torch.cat([smaller, larger])
        return self._tiles(row, col, rows, grid)

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        wide, tall = max_met(self.block, grid.block), max_met(grid.block, self.block)
        columns = -(-grid.n_cols * grid.block // self.block)
        return min(self.per_row, columns) * wide * (len(rows) * tall + columns * wide)
