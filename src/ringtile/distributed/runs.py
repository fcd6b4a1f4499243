"""Runs of positions, and the copies between places that hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from ringtile.distributed.layout import Run, starts_of
from ringtile.patterns.base import TileGrid


class Copy(NamedTuple):
    """A run of tokens that is copied from one place to another."""

    source: int
    target: int
    length: int


def intervals(tiles: Tensor, grid: TileGrid) -> list[Run]:
    """Return the runs of positions in these tiles, a bool vector."""
    edges = pad(tiles.int(), (1, 1)).diff().nonzero().flatten() * grid.block
    bounds = edges.clamp(max=grid.n_keys).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def with_starts(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Return runs that follow each other, each with its place."""
    return list(zip(runs, starts_of(runs), strict=True))


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


def _place(run: Run, held: Sequence[tuple[Run, int]]) -> int:
    """Return the place of a run's first position, which is held."""
    (low, _), place = held[bisect_right(held, run[0], key=lambda pair: pair[0][0]) - 1]
    return place + run[0] - low


def copies(source: Sequence[tuple[Run, int]], target: Sequence[tuple[Run, int]]) -> tuple[Copy, ...]:
    """Return the copies of all positions that both have."""
    common = overlaps([run for run, _ in source], [run for run, _ in target])
    return tuple(Copy(_place(run, source), _place(run, target), run[1] - run[0]) for run in common)


def placed(wanted: Sequence[Run], held: Sequence[tuple[Run, int]]) -> tuple[Run, ...]:
    """Return the places of the positions in ``wanted`` that are held, in ascending order of position."""
    found: list[Run] = []
    for run in overlaps(wanted, [run for run, _ in held]):
        begin = _place(run, held)
        end = begin + run[1] - run[0]
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)
