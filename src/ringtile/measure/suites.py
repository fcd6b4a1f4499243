"""The cases of the records in docs/benchmarks.md: slices through the grid, and the rows that acceptance is read from.

A whole product of lengths, densities, head dimensions, dtypes and peers would take days. A slice varies one of them
and holds the others; each value meets every peer that can compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ringtile.layout.density import with_density
from ringtile.measure.peers import Case
from ringtile.measure.record import BOTH, DENSE, DIRECTIONS, FORWARD
from ringtile.patterns import parse

PEERS = (DENSE, "sdpa-mask", "flex", "torch.sparse", "block loop")
"""All that ringtile is measured against."""

DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)
HEAD_DIMS = (64, 80, 96, 128)
LENGTHS = (26, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

HALF = "dilated([2], 4096)"
"""Every other key: each tile is a bitmap of which half is kept."""
LONG = "window(512) | global_tokens(64)"
LONG_RANDOM = "random_blocks(1) at 0.01"
"""About as many tiles a row as `LONG`, without its long rows and columns."""
RANDOM = tuple(f"random_blocks(1) at {density:g}" for density in (0.1, 0.05, 0.02))
WINDOWS = ("window(768)", "window(384)", "window(128)")
"""At 16,384 tokens about 10, 5 and 2 % of the tiles."""
SPARSE = (("window(1) at 0.1", 128), ("window(1) at 0.05", 128), ("window(1) at 0.02", 64))
"""At 4,096 tokens 90, 95 and 98 % sparse in pairs, with the block."""
DECODING = "causal & (window(1024) | global_tokens(64))"


class Cell(NamedTuple):
    """One case, who beside ringtile is measured on it, and in which directions."""

    case: Case
    peers: tuple[str, ...] = (DENSE,)
    directions: tuple[str, ...] = DIRECTIONS


def _case(text: str, n_tokens: int, *, heads: int, **sizes: Any) -> Case:
    """A case from the pattern's text, which may end in " at P": a density to solve its free parameter for."""
    asked, _, density = text.partition(" at ")
    pattern = parse(asked)
    if density:
        block = sizes.get("block", 128)
        pattern = with_density(pattern, float(density), n_tokens, heads=heads, block=block).pattern
    return Case(text, pattern, n_tokens, heads=heads, **sizes)


def _at(text: str, density: float) -> str:
    return "dense" if density == 1 else f"{text} at {density:g}"


def _acceptance() -> Iterator[Cell]:
    low = torch.bfloat16
    # Nothing to skip: the rate of the kernel itself.
    for head_dim in HEAD_DIMS:
        peers = (DENSE, "flex") if head_dim == 64 else (DENSE,)
        yield Cell(_case("dense", 4096, heads=8, head_dim=head_dim), peers)
    for head_dim, peers in ((64, (DENSE, "flex")), (128, (DENSE,))):
        yield Cell(_case("dense", 4096, heads=8, head_dim=head_dim, dtype=low), peers)
    yield Cell(_case(HALF, 4096, heads=8))
    yield Cell(_case("dense", 4097, heads=8))
    yield Cell(_case("dense", 4096, heads=8, kv_heads=2))
    # Time follows the tiles.
    for number, texts in enumerate(zip(RANDOM, WINDOWS, strict=True)):
        for text in texts:
            yield Cell(_case(text, 16384, heads=2), (DENSE, "flex") if number == 0 else (DENSE,))
            if number == 0:
                yield Cell(_case(text, 16384, heads=2, dtype=low), ("flex",), (FORWARD,))
    for text, block in SPARSE:
        yield Cell(_case(text, 4096, heads=8, block=block), (DENSE,), (FORWARD,))
    # Long rows and columns, and memory.
    for text, threads in ((LONG, None), (LONG, 1), (LONG_RANDOM, None)):
        yield Cell(_case(text, 131072, heads=2, threads=threads), ())
    for n_tokens in (131072, 262144):
        yield Cell(_case(LONG, n_tokens, heads=8), (), (FORWARD,))
    # Small problems, and one query at a time.
    for n_tokens in (26, 128):
        yield Cell(_case("dense", n_tokens, heads=4))
    for text, n_tokens in (("dense", 4096), ("dense", 32768), (DECODING, 32768)):
        yield Cell(_case(text, n_tokens, heads=8, n_queries=1), (DENSE, "sdpa-mask"), (FORWARD,))


def _grid() -> Iterator[Cell]:
    for density in DENSITIES:
        yield Cell(_case(_at("window(1)", density), 4096, heads=2), PEERS)
    # torch.sparse can keep so many pairs at a shorter length only.
    for density in DENSITIES:
        yield Cell(_case(_at("window(1)", density), 1024, heads=1), PEERS)
    for n_tokens in LENGTHS:
        directions = DIRECTIONS if n_tokens <= 32768 else (FORWARD,)
        yield Cell(_case("causal & window(255, 0)", n_tokens, heads=1), PEERS, directions)
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in HEAD_DIMS:
            if (dtype, head_dim) != (torch.float32, 64):
                yield Cell(_case("window(1) at 0.1", 4096, heads=2, head_dim=head_dim, dtype=dtype), PEERS)


def _smoke() -> Iterator[Cell]:
    """Every kind of cell in seconds: that the suites run, not how fast."""
    yield Cell(_case("window(1) at 0.5", 256, heads=2), PEERS)
    yield Cell(_case(HALF, 200, heads=4, kv_heads=2, head_dim=80, dtype=torch.bfloat16), (DENSE,), (BOTH,))
    yield Cell(_case("window(20) | global_tokens(4)", 500, heads=1, threads=1, block=64), ())
    yield Cell(_case("causal & window(30)", 300, heads=4, kv_heads=2, n_queries=1), (DENSE, "sdpa-mask"), (FORWARD,))


_SUITES = {"acceptance": _acceptance, "grid": _grid, "smoke": _smoke}
SUITES = tuple(_SUITES)
"""What ``ringtile bench --suite`` knows."""


def suite(name: str) -> list[Cell]:
    """The cells of one of `SUITES`, in the order in which they are measured.

    >>> [cell.case.asked for cell in suite("smoke")][:2]
    ['window(1) at 0.5', 'dilated([2], 4096)']
    """
    return list(_SUITES[name]())
