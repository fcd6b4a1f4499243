"""What a rule keeps and costs over a sequence, or over all the dilated segments of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringtile.layout import build_index
from ringtile.layout.allowed import count_allowed
from ringtile.patterns import Causal, Dense, Pattern
from ringtile.patterns.base import TileGrid

_BLOCK = 128


class Problem(NamedTuple):
    """Attention that a rule is to serve: a whole sequence, or the dilated segments of one length."""

    n_queries: int
    n_keys: int
    times: int
    """How many there are."""


def dilated_problems(
    n_tokens: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int]
) -> tuple[Problem, ...]:
    """The dilated segments of a sequence, of the heads of offset 0, longest first.

    >>> dilated_problems(5000, [2048, 4096], [1, 2])
    (Problem(n_queries=2048, n_keys=2048, times=3), Problem(n_queries=904, n_keys=904, times=1), ...)
    """
    counts: Counter[int] = Counter()
    for length, rate in zip(segment_lengths, dilation_rates, strict=True):
        whole, rest = divmod(n_tokens, length)
        counts[math.ceil(length / rate)] += whole
        counts[math.ceil(rest / rate)] += 1
    lengths = sorted((length for length, count in counts.items() if length and count), reverse=True)
    return tuple(Problem(length, length, counts[length]) for length in lengths)


class Pairs(NamedTuple):
    """Sums over problems, for one head (the mean where heads differ)."""

    kept: float
    allowed: float
    """Pairs that causality allows."""
    tiles: float
    """Computed tiles of 128 x 128 tokens."""
    allowed_tiles: float

    @property
    def density(self) -> float:
        """Kept over allowed pairs."""
        return self.kept / self.allowed if self.allowed else 0.0


def count_pairs(rule: Pattern, problems: Sequence[Problem], *, is_causal: bool) -> Pairs:
    """Count the pairs and tiles that a rule keeps of all problems, causal where asked."""
    total = Pairs(0.0, 0.0, 0.0, 0.0)
    for problem in problems:
        found = _count(rule, problem, is_causal)
        total = Pairs(*(so_far + problem.times * count for so_far, count in zip(total, found, strict=True)))
    return total


def _count(rule: Pattern, problem: Problem, is_causal: bool) -> Pairs:
    if isinstance(rule, Dense):
        n_queries, n_keys = problem.n_queries, problem.n_keys
        grid = TileGrid(block=_BLOCK, start=n_keys - n_queries, n_queries=n_queries, n_keys=n_keys)
        pairs, tiles = count_allowed(Causal() if is_causal else Dense(), grid, torch.device("cpu"))
        return Pairs(pairs, pairs, tiles, tiles)
    in_force = Causal() & rule if is_causal else rule
    index = build_index(in_force, problem.n_queries, problem.n_keys, heads=rule.n_heads or 1, block=_BLOCK)
    counts = (index.kept_pairs, index.allowed_pairs, index.kept_tiles, index.allowed_tiles)
    return Pairs(*(count / index.group.numel() for count in counts))
