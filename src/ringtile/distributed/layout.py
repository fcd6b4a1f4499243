"""Which tokens each rank holds, runs of positions, and the copies between places that hold them."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ringtile.distributed.process_groups import Ranks, place_of
from ringtile.patterns.base import TileGrid
from ringtile.patterns.checks import check_positive

Run = tuple[int, int]
"""Positions from the first to before the second."""


@dataclass(frozen=True)
class Layout:
    """The tokens of each rank, as ascending runs of positions. Together the ranks hold every token once.

    Ranks can hold different numbers of tokens, or none. Tokens of a rank lie in ascending order. Raises ValueError if
    the runs overlap, leave out a token or do not ascend.

    >>> Layout.zigzag(1000, 2, unit=100)
    Layout(n_tokens=1000, runs=(((0, 200), (700, 1000)), ((200, 700),)))
    """

    n_tokens: int
    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        check_positive(n_tokens=self.n_tokens)
        if not self.runs:
            raise ValueError(f"runs: expected the runs of at least one rank, got {self.runs!r}")
        object.__setattr__(self, "runs", tuple(tuple(_joined(runs)) for runs in self.runs))
        # Each run begins where the one before ends, so no token is missing and none is held twice.
        every = sorted(run for runs in self.runs for run in runs)
        if [0, *(end for _, end in every)] != [*(begin for begin, _ in every), self.n_tokens]:
            raise ValueError(f"runs: expected each of {self.n_tokens} tokens at exactly one rank, got {self.runs!r}")

    @classmethod
    def _filled(cls, make: Callable[..., Self], n_tokens: int, n_ranks: int) -> Self:
        """Cut the tokens into units of 128, or into smaller units if a rank would be empty."""
        layout = make(n_tokens, n_ranks, unit=128)
        return layout if all(layout.runs) else make(n_tokens, n_ranks, unit=max(1, n_tokens // (2 * n_ranks)))

    @classmethod
    def contiguous(cls, n_tokens: int, n_ranks: int, *, unit: int | None = None) -> Self:
        """Give each rank one run.

        ``unit`` tokens stay together: by default 128, or fewer if a rank would be empty. All layouts have this default.
        Windows and documents need the least traffic. Under a causal rule the last rank has the most work. Tiles stay
        whole if ``unit`` is a multiple of 128. With ``unit=1`` ranks hold equally many tokens.

        >>> Layout.contiguous(1000, 3).runs
        (((0, 256),), ((256, 640),), ((640, 1000),))
        """
        if unit is None:
            return cls._filled(cls.contiguous, n_tokens, n_ranks)
        bounds = _bounds(n_tokens, n_ranks, unit)
        return cls(n_tokens, tuple((run,) for run in pairwise(bounds)))

    @classmethod
    def zigzag(cls, n_tokens: int, n_ranks: int, *, unit: int | None = None) -> Self:
        """Cut the tokens into 2 P chunks, and give rank r the chunks r and 2 P - 1 - r.

        Under a causal rule all ranks have the same work. PyTorch calls it head-tail.

        >>> Layout.zigzag(100, 2).runs
        (((0, 25), (75, 100)), ((25, 75),))
        """
        if unit is None:
            return cls._filled(cls.zigzag, n_tokens, n_ranks)
        chunks = list(pairwise(_bounds(n_tokens, 2 * n_ranks, unit)))
        return cls(n_tokens, tuple((chunks[rank], chunks[-1 - rank]) for rank in range(n_ranks)))

    @classmethod
    def striped(cls, n_tokens: int, n_ranks: int, *, unit: int | None = None) -> Self:
        """Give rank r every P-th unit of tokens, from unit r on.

        >>> Layout.striped(10, 2, unit=2).runs
        (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8)))
        """
        if unit is None:
            return cls._filled(cls.striped, n_tokens, n_ranks)
        _bounds(n_tokens, n_ranks, unit)
        runs = list(pairwise([*range(0, n_tokens, unit), n_tokens]))
        return cls(n_tokens, tuple(tuple(runs[rank::n_ranks]) for rank in range(n_ranks)))

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.runs)

    def merged(self, size: int) -> "Layout":
        """Return the layout in which ``size`` ranks that follow each other are one, with the tokens of all of them.

        Raises ValueError if ``size`` does not divide the number of ranks.

        >>> Layout.striped(8, 4, unit=1).merged(2).runs
        (((0, 2), (4, 6)), ((2, 4), (6, 8)))
        """
        if type(size) is not int or size < 1 or self.n_ranks % size:
            raise ValueError(f"size: expected a divisor of {self.n_ranks} ranks, got {size!r}")
        rows = (self.runs[first : first + size] for first in range(0, self.n_ranks, size))
        return Layout(self.n_tokens, tuple(tuple(sorted(sum(runs, ()))) for runs in rows))

    def size(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return count_tokens(self.runs[rank])

    @cached_property
    def text(self) -> str:
        """The runs as text, cut and with a hash if there are many: other text for other runs."""
        text = str(self.runs)
        return text if len(text) <= 200 else f"{text[:160]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the position of each token of a rank, int64 ``[n]``, for example for rotary angles.

        >>> Layout.zigzag(8, 2, unit=2).positions(0).tolist()
        [0, 1, 6, 7]
        """
        return positions_of(self.runs[rank], device)

    def shard(self, x: Tensor, rank: int, dim: int = 2) -> Tensor:
        """Return a rank's tokens of a tensor that has all of them in dimension ``dim``. It is a view if it can be.

        Raises ValueError if the dimension has another size.

        >>> Layout.zigzag(8, 2, unit=2).shard(torch.arange(8), 1, dim=0).tolist()
        [2, 3, 4, 5]
        """
        if x.shape[dim] != self.n_tokens:
            raise ValueError(f"x: expected {self.n_tokens} tokens in dimension {dim}, got {x.shape=}")
        parts = [x.narrow(dim, begin, end - begin) for begin, end in self.runs[rank]]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(self, shards: Sequence[Tensor], dim: int = 2) -> Tensor:
        """Return all tokens in order, from the tensors of all ranks. This is the inverse of `shard`.

        Raises ValueError if there are not as many tensors as ranks, or a tensor has another number of tokens.

        >>> layout = Layout.striped(10, 2, unit=2)
        >>> layout.unshard([layout.shard(torch.arange(10), rank, dim=0) for rank in range(2)], dim=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        """
        sizes = [self.size(rank) for rank in range(self.n_ranks)]
        if [x.shape[dim] for x in shards] != sizes:
            found = [tuple(x.shape) for x in shards]
            raise ValueError(f"shards: expected {sizes} tokens in dimension {dim}, got {found}")
        placed: list[tuple[int, Tensor]] = []
        for runs, x in zip(self.runs, shards, strict=True):
            placed += [(begin, x.narrow(dim, at, end - begin)) for (begin, end), at in with_starts(runs)]
        return torch.cat([x for _, x in sorted(placed, key=lambda pair: pair[0])], dim)

    def tiles(self, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
        """Return the position tiles that ranks hold tokens of: tile numbers, their ranks and the numbers of tokens.

        Three int64 vectors. A tile that several runs share occurs once per run.

        >>> tiles, ranks, tokens = Layout(300, (((0, 100),), ((100, 300),))).tiles(128)
        >>> tuple(tiles.tolist()), tuple(ranks.tolist()), tuple(tokens.tolist())
        ((0, 0, 1, 2), (0, 1, 1, 1), (100, 28, 128, 44))
        """
        every = [(rank, begin, end) for rank, runs in enumerate(self.runs) for begin, end in runs]
        rank, begin, end = torch.tensor(every, dtype=torch.int64, device="cpu").T
        count = (end - 1) // block - begin // block + 1
        rank, begin, end, first = (
            x.repeat_interleave(count) for x in (rank, begin, end, begin // block - (count.cumsum(0) - count))
        )
        # Run (300, 700) has the tiles 2 to 5. If 3 tiles came before, `first` is 2 - 3, and its entries are 3 to 6.
        tile = first + torch.arange(len(first), device="cpu")
        tokens = torch.minimum(end, (tile + 1) * block) - torch.maximum(begin, tile * block)
        return tile, rank, tokens


PassedOn = Layout | tuple[int, tuple[tuple[Run, ...], ...]]
"""A layout, or its numbers."""


def passed_on(layout: Layout) -> PassedOn:
    """Return a layout, or its numbers in a graph: before torch 2.13, Dynamo passes on no dataclass."""
    return (layout.n_tokens, layout.runs) if torch.compiler.is_compiling() else layout


def as_layout(layout: PassedOn) -> Layout:
    """Return the layout that was passed on."""
    return Layout(*layout) if isinstance(layout, tuple) else layout


def positions_of(runs: Iterable[Run], device: torch.device | str | None = None) -> Tensor:
    """Return the positions of runs one after another, int64."""
    parts = [torch.arange(begin, end, device=device) for begin, end in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])


def count_tokens(runs: Iterable[Run]) -> int:
    """Return the number of tokens of runs."""
    return sum(end - begin for begin, end in runs)


def counts_of(parts: Iterable[Iterable[Run]]) -> list[int]:
    """Return the number of tokens of each of several lists of runs."""
    return list(map(count_tokens, parts))


def _joined(runs: Iterable[Run]) -> Iterable[Run]:
    """Check that runs ascend, leave out empty ones and join neighbors."""
    found: list[Run] = []
    for begin, end in runs:
        if not (type(begin) is int and type(end) is int and (found[-1][1] if found else 0) <= begin <= end):
            raise ValueError(f"runs: expected runs (begin, end) that ascend, got {(begin, end)} after {found}")
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif begin < end:
            found.append((begin, end))
    return found


def _bounds(n_tokens: int, n_parts: int, unit: int) -> list[int]:
    """Cut tokens into parts of nearly equally many units. The last unit can be shorter."""
    check_positive(n_tokens=n_tokens, n_ranks=n_parts, unit=unit)
    units = -(-n_tokens // unit)
    return [min(units * part // n_parts * unit, n_tokens) for part in range(n_parts + 1)]


LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}


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
    return list(zip(runs, accumulate((end - begin for begin, end in runs), initial=0), strict=False))


def consecutive(runs: Sequence[Run]) -> list[Run]:
    """Return the places of runs if they follow each other."""
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


def joined(parts: Sequence[Copies]) -> Copies:
    """Return the copies of several, one after another."""
    return Copies(*(tuple(run for part in parts for run in part[side]) for side in (0, 1)))


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


def check_layout(layout: Layout, n_ranks: int) -> None:
    """Raise ValueError if the layout does not fit the number of ranks."""
    if not isinstance(layout, Layout) or layout.n_ranks != n_ranks:
        raise ValueError(f"layout: expected a Layout for {n_ranks} ranks, got {layout!r}")


def check_shard(query: Tensor, key: Tensor, layout: Layout, ranks: Ranks) -> tuple[int, int]:
    """Return the numbers of this rank and of ranks. Raise ValueError if the layout or the tensors do not fit them."""
    rank, n_ranks = place_of(ranks)
    check_layout(layout, n_ranks)
    for name, x in (("query", query), ("key", key)):
        if x.shape[2] != layout.size(rank):
            raise ValueError(f"{name}: expected the {layout.size(rank)} tokens of rank {rank}, got {x.shape=}")
    return rank, n_ranks


def check_keys_finite(key: Tensor, value: Tensor, layout: Layout, rank: int, layer: bool | str) -> None:
    """Raise ValueError with the place of the first NaN or infinity."""
    for name, x in (("key", key), ("value", value)):
        found = first_nonfinite(x, 128)
        if found is not None:
            batch, head, tile = found
            position = int(layout.positions(rank)[tile * 128])
            where = f" of {layer}" if isinstance(layer, str) else ""
            raise ValueError(
                f"{name}: expected finite numbers, got NaN or infinity at rank {dist.get_rank()}{where}, batch element "
                f"{batch}, head {head}, in the 128 tokens from position {position}"
            )


def first_nonfinite(x: Tensor, tile: int) -> tuple[int, int, int] | None:
    """Return (batch element, head, tile) of the lowest tile of ``x`` with a NaN or infinity, or None."""
    if x.dim() != 4 or tile < 1:
        raise ValueError(f"x, tile: expected [B, H, N, D] and a positive number of tokens, got {x.shape=}, {tile=}")
    if not x.numel():
        return None
    low, high = x.detach().aminmax()
    if bool(low.isfinite() & high.isfinite()):
        return None
    low, high = x.detach().aminmax(dim=-1)
    bad = ~(low.isfinite() & high.isfinite())
    first = int(bad.any(0).any(0).nonzero()[0, 0]) // tile
    element, head = bad[:, :, first * tile : (first + 1) * tile].any(-1).nonzero()[0].tolist()
    return element, head, first
