"""Runs of positions, and the copies between places that hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from ringtile.distributed.layout import Run, starts_of
from ringtile.patterns.base import TileGrid

Places = Sequence[Run] | Tensor
"""Runs of tokens, or the number of each token, int64."""


class Copies(NamedTuple):
    """Tokens that are copied from places to others: pairs of runs of equal length, or pairs of numbers."""

    source: Places
    target: Places


def intervals(tiles: Tensor, grid: TileGrid) -> list[Run]:
    """Return the runs of positions in these tiles, a bool vector."""
    # For example, tiles [F, T, T, F, T] of 128 tokens begin or end a run at the edges [1, 3, 4, 5]: (128, 384) and
    # (512, 640), or (512, 600) if there are 600 keys.
    edges = pad(tiles.int(), (1, 1)).diff().nonzero().flatten() * grid.block
    bounds = edges.clamp(max=grid.n_keys).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def with_starts(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Return runs that follow each other, each with its place."""
    return list(zip(runs, starts_of(runs), strict=True))


def consecutive(runs: Sequence[Run]) -> list[Run]:
    """Return the places of runs if they follow each other.

    >>> consecutive([(3, 5), (9, 10)])
    [(0, 2), (2, 3)]
    """
    return [(at, at + end - begin) for (begin, end), at in with_starts(runs)]


def overlaps(wanted: Sequence[Run], held: Sequence[Run]) -> list[Run]:
    """Return the positions that both have. Both ascend."""
    found: list[Run] = []
    number = 0
    for begin, end in wanted:
        while number < len(held) and held[number][1] <= begin:
            number += 1
        for low, high in held[number:]:
            if low >= end:
                break
            found.append((max(begin, low), min(end, high)))
    return found


def _place(run: Run, held: Sequence[tuple[Run, int]]) -> Run:
    """Return the places of a run that is held."""
    # The run (130, 140) in held runs [((0, 10), 0), ((128, 256), 10)] lies 2 tokens into the second: (12, 22).
    (low, _), place = held[bisect_right(held, run[0], key=lambda pair: pair[0][0]) - 1]
    return place + run[0] - low, place + run[1] - low


def copies(source: Sequence[tuple[Run, int]], target: Sequence[tuple[Run, int]]) -> Copies:
    """Return the copies of all positions that both have.

    >>> copies(with_starts([(0, 4), (10, 12)]), with_starts([(2, 11)]))
    Copies(source=((2, 4), (4, 5)), target=((0, 2), (8, 9)))
    """
    # Pairs of equal runs, also if a run on one side spans two of the other.
    common = overlaps([run for run, _ in source], [run for run, _ in target])
    return Copies(*(tuple(_place(run, held) for run in common) for held in (source, target)))


def placed(wanted: Sequence[Run], held: Sequence[tuple[Run, int]]) -> tuple[Run, ...]:
    """Return the places of the positions in ``wanted`` that are held, in ascending order of position.

    >>> placed([(3, 12)], with_starts([(0, 4), (10, 20)]))
    ((3, 6),)
    """
    found: list[Run] = []
    for run in overlaps(wanted, [run for run, _ in held]):
        begin, end = _place(run, held)
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)
