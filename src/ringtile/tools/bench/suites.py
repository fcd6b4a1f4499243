"""The cases of the records behind docs/benchmarks.md.

The full product of lengths, densities, head dims, dtypes and baselines would take days. A suite is a set of slices: it
varies one of them and keeps the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringtile.index.density import with_density
from ringtile.patterns import Blocks, Causal, Pattern, parse
from ringtile.tools.bench.peers import Case, Peer, all_peers
from ringtile.tools.record import BOTH, DENSE, DIRECTIONS, FORWARD, OURS

PEERS = (DENSE, "sdpa-mask", "flex", "torch.sparse")
"""All baselines."""

PATTERNS = ("causal & window(256, 0)", "longformer(128, 16)", "bigbird")
TOKENS = (26, 64, 128, 200, 256, 512, 1024, 4096)
"""What ``ringtile bench`` measures by default."""

CLAIMED = {0.5: 2.0, 0.25: 4.0, 0.1: 10.0, 0.05: 20.0, 0.02: 50.0}
"""The speedups that the block-sparse guide claims, by tile density."""
CLAIMED_TOKENS, CLAIMED_HEADS = 16384, 4
"""The length and heads of README, docs/benchmarks.md and docs/promises.md for these claims."""

SHORT = "causal & window(256)"
SHORT_TOKENS = (26, 64, 128, 256, 512, 1024, 2048)
"""The pattern and lengths that tell from which length README says that sparse attention is faster."""

CURVE = "causal & (window(1024) | global_tokens(64))"
CURVE_TOKENS = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
"""The pattern and lengths of the table of time and memory against the length."""

DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)
HEAD_DIMS = (64, 80, 96, 128)
LENGTHS = (26, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

HALF = "dilated([2], 4096)"
"""Every other key: each tile is a bitmask of which half is kept."""
LONG = "window(512) | global_tokens(64)"
LONG_RANDOM = "random_blocks(1) at 0.01"
"""About as many tiles per row as `LONG`, without its long rows and columns."""
RANDOM = tuple(f"random_blocks(1) at {density:g}" for density in (0.1, 0.05, 0.02))
WINDOWS = ("window(768)", "window(384)", "window(128)")
"""About 10, 5 and 2% of the tiles at 16,384 tokens."""
SPARSE = (("window(1) at 0.1", 128), ("window(1) at 0.05", 128), ("window(1) at 0.02", 64))
"""90, 95 and 98% sparse in pairs at 4,096 tokens, with the block."""

TILES = "random tiles at "


@dataclass(frozen=True)
class Task:
    """One case, the peers to measure on it, and the directions."""

    case: Case
    peers: tuple[Peer, ...]
    directions: tuple[str, ...] = DIRECTIONS


_Cell = tuple[Case, tuple[str, ...], tuple[str, ...]]


def random_tiles(n_tiles: int, density: float, seed: int = 0) -> Tensor:
    """Draw a causal tile matrix, bool ``[n_tiles, n_tiles]``: the diagonal and random tiles below it.

    It keeps `density` of the tiles on and below the diagonal, to the nearest tile, and never less than the diagonal.
    """
    kept = torch.eye(n_tiles, dtype=torch.bool)
    below = torch.tril_indices(n_tiles, n_tiles, -1)
    wanted = max(0, round(density * n_tiles * (n_tiles + 1) / 2) - n_tiles)
    chosen = torch.randperm(below.shape[1], generator=torch.Generator().manual_seed(seed))[:wanted]
    kept[below[0, chosen], below[1, chosen]] = True
    return kept


def claimed_pattern(density: float, n_tokens: int, *, seed: int = 0, block: int = 128) -> Pattern:
    """Return random causal tiles of a tile density, as `CLAIMED` speaks of them."""
    return Causal() & Blocks(random_tiles(-(-n_tokens // block), density, seed), block=block)


def case_of(text: str, n_tokens: int, *, heads: int, **sizes: Any) -> Case:
    """Build a case from a pattern's text. " at P" at its end solves the free parameter for a density of pairs.

    ``random tiles at P`` is `claimed_pattern`, whose P is a density of tiles.
    """
    asked, _, density = text.partition(" at ")
    if text.startswith(TILES):
        return Case(text, claimed_pattern(float(density), n_tokens), n_tokens, heads=heads, **sizes)
    pattern = parse(asked)
    if density:
        block = sizes.get("block", 128)
        pattern = with_density(pattern, float(density), n_tokens, num_heads=heads, block=block).pattern
    return Case(text, pattern, n_tokens, heads=heads, **sizes)


def _cell(
    text: str, n_tokens: int, peers: tuple[str, ...] = (DENSE,), directions: tuple[str, ...] = DIRECTIONS, **sizes: Any
) -> _Cell:
    return case_of(text, n_tokens, **sizes), peers, directions


def _default() -> Iterator[_Cell]:
    for text in PATTERNS:
        for n_tokens in TOKENS:
            yield _cell(text, n_tokens, PEERS, heads=4)


def _density() -> Iterator[_Cell]:
    for density in CLAIMED:
        yield _cell(f"{TILES}{density:g}", CLAIMED_TOKENS, heads=CLAIMED_HEADS)


def _long() -> Iterator[_Cell]:
    for n_tokens in CURVE_TOKENS:
        yield _cell(CURVE, n_tokens, directions=(BOTH,), heads=1)


def _short() -> Iterator[_Cell]:
    for n_tokens in SHORT_TOKENS:
        yield _cell(SHORT, n_tokens, heads=4)


def _acceptance() -> Iterator[_Cell]:
    low = torch.bfloat16
    # Nothing to skip: the rate of the kernel itself.
    for head_dim in HEAD_DIMS:
        yield _cell("dense", 4096, (DENSE, "flex") if head_dim == 64 else (DENSE,), heads=8, head_dim=head_dim)
    yield _cell("dense", 4096, (DENSE, "flex"), heads=8, dtype=low)
    yield _cell("dense", 4096, directions=(FORWARD,), heads=8, head_dim=128, dtype=low)
    yield _cell(HALF, 4096, directions=(FORWARD,), heads=8)
    yield _cell("dense", 4097, directions=(FORWARD,), heads=8)
    yield _cell("dense", 4096, directions=(FORWARD,), heads=8, kv_heads=2)
    # Time follows the tiles.
    for number, texts in enumerate(zip(RANDOM, WINDOWS, strict=True)):
        for text in texts:
            directions = DIRECTIONS if number < 2 else (FORWARD,)
            yield _cell(text, 16384, (DENSE, "flex") if number == 0 else (DENSE,), directions, heads=2)
            if number == 0:
                yield _cell(text, 16384, ("flex",), (FORWARD,), heads=2, dtype=low)
    for text, block in SPARSE:
        yield _cell(text, 4096, directions=(FORWARD,), heads=8, block=block)
    # Long rows and columns, and memory.
    for text, threads in ((LONG, None), (LONG, 1), (LONG_RANDOM, None)):
        yield _cell(text, 131072, (), heads=2, threads=threads)
    for n_tokens in (131072, 262144):
        yield _cell(LONG, n_tokens, (), (FORWARD,), heads=8)
    # Small problems, and one query at a time.
    for n_tokens in (26, 128):
        yield _cell("dense", n_tokens, heads=4)
    for text, n_tokens in (("dense", 4096), ("dense", 32768), (CURVE, 32768)):
        yield _cell(text, n_tokens, (DENSE, "sdpa-mask"), (FORWARD,), heads=8, n_queries=1)


def _grid() -> Iterator[_Cell]:
    # torch.sparse can keep this many pairs at the shorter length only.
    for n_tokens, heads in ((4096, 2), (1024, 1)):
        for density in DENSITIES:
            yield _cell("dense" if density == 1 else f"window(1) at {density:g}", n_tokens, PEERS, heads=heads)
    for n_tokens in LENGTHS:
        directions = DIRECTIONS if n_tokens <= 32768 else (FORWARD,)
        yield _cell("causal & window(255, 0)", n_tokens, PEERS, directions, heads=1)
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in HEAD_DIMS:
            if (dtype, head_dim) != (torch.float32, 64):
                yield _cell("window(1) at 0.1", 4096, PEERS, heads=2, head_dim=head_dim, dtype=dtype)


def _smoke() -> Iterator[_Cell]:
    # Every kind of cell in seconds, to see that the suites run.
    yield _cell("window(1) at 0.5", 256, PEERS, heads=2)
    yield _cell(HALF, 200, (DENSE,), (BOTH,), heads=4, kv_heads=2, head_dim=80, dtype=torch.bfloat16)
    yield _cell("random tiles at 0.5", 500, (), heads=1, threads=1)
    yield _cell("window(20) | global_tokens(4)", 500, (), heads=1, threads=1, block=64)
    yield _cell("causal & window(30)", 300, (DENSE, "sdpa-mask"), (FORWARD,), heads=4, kv_heads=2, n_queries=1)


_SUITES = {
    "default": _default,
    "density": _density,
    "long": _long,
    "short": _short,
    "acceptance": _acceptance,
    "grid": _grid,
    "smoke": _smoke,
}
SUITES = tuple(_SUITES)
"""The names of ``ringtile bench --suite``."""


def suite(name: str, backend: str | None = None) -> list[Task]:
    """Return the tasks of one of `SUITES`, in the order in which they are measured.

    >>> [task.case.asked for task in suite("smoke")][:2]
    ['window(1) at 0.5', 'dilated([2], 4096)']
    """
    peers = {peer.name: peer for peer in all_peers(backend)}
    return [
        Task(case, tuple(peers[name] for name in (OURS, *names)), directions)
        for case, names, directions in _SUITES[name]()
    ]
