"""Random problems: grids of tiles and patterns that serve them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    SampledBlocks,
    Segments,
    Strided,
    TileGrid,
    Window,
    per_document,
    per_head,
)

BLOCKS = (16, 32, 64, 128)
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 64, 100, 127, 129, 200, 257)


@st.composite
def grids(draw: DrawFn, blocks: tuple[int, ...] = BLOCKS) -> TileGrid:
    """Lengths of 1, odd, shorter than a block or of several blocks, and any place of the queries among the keys."""
    n_queries, n_keys = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    equal, inside = draw(st.tuples(st.booleans(), st.booleans()))
    n_queries = n_keys if equal else n_queries
    starts = [n_keys - n_queries, 0]
    if inside and n_queries <= n_keys:
        start = draw(st.integers(0, n_keys - n_queries))
    else:
        start = draw(st.sampled_from([*starts, -40, 33]))
    return TileGrid(draw(st.sampled_from(blocks)), start, n_queries, n_keys)


def checkerboard(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A rule that depends on the head and that no primitive can express."""
    return (query * query + 3 * key + head) % 7 < 3


@st.composite
def document_lengths(draw: DrawFn, n_tokens: int) -> list[int]:
    """Lengths, some of them 0, that sum to ``n_tokens``."""
    cuts = sorted(draw(st.lists(st.integers(0, n_tokens), max_size=6)))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, n_tokens], strict=True)]


def worded_patterns(grid: TileGrid | None = None) -> SearchStrategy[Pattern]:
    """Primitives that have a text; documents only where the queries of ``grid`` lie among its keys."""
    sizes = st.integers(0, 150)
    units = st.sampled_from([1, 3, 16, 50, 64, 100, 128, 200])
    rates = st.lists(st.sampled_from([1, 2, 3, 5, 8, 40, 300]), min_size=1, max_size=3)
    options = [
        st.just(Dense()),
        st.just(Causal()),
        st.builds(Window, sizes),
        st.builds(Window, sizes, sizes),
        st.builds(Dilated, rates, st.integers(0, 40)),
        st.builds(BlockDilated, rates, st.integers(0, 4), units),
        st.builds(Strided, st.integers(1, 300)),
        st.builds(GlobalTokens, sizes),
        st.builds(GlobalTokens, st.lists(sizes, min_size=1, max_size=4)),
        st.builds(RandomBlocks, st.integers(0, 6), st.integers(0, 2**64 - 1), units.filter(lambda unit: unit > 1)),
        sampled_blocks(units),
        st.builds(Segments, st.integers(1, 300), st.sampled_from([1, 1, 2, 3, 17, 150]), st.integers(0, 5)),
    ]
    if grid is not None and 0 <= grid.start <= grid.n_keys - grid.n_queries:
        lengths = document_lengths(grid.n_keys)
        options += [st.builds(per_document, st.one_of(options), lengths), st.builds(Documents, lengths)]
    return st.one_of(options)


@st.composite
def sampled_blocks(draw: DrawFn, units: SearchStrategy[int]) -> Pattern:
    """Some of the blocks of other segments, with or without a bound."""
    keep, more = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    block, blocks, segments = draw(units), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    return SampledBlocks(keep, keep + more, block * blocks, block * blocks * segments, block)


@st.composite
def block_patterns(draw: DrawFn, grid: TileGrid) -> Pattern:
    """Blocks as a matrix, a matrix per head of three, or CSR; the queries' positions must not be negative."""
    block = draw(st.sampled_from([16, 50, 64, 128, 200]))
    shape = (-(-(grid.start + grid.n_queries) // block), -(-grid.n_keys // block))
    seed, density = draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    matrix = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    if draw(st.booleans()):
        return Blocks(matrix, block=block)
    row_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), matrix.sum(1).cumsum(0)])
    return Blocks(row_ptr=row_ptr, col=matrix.nonzero()[:, 1], block=block)


def primitives(grid: TileGrid) -> SearchStrategy[Pattern]:
    """Any primitive that serves the grid."""
    others = [st.just(Elements(checkerboard))]
    if grid.start >= 0:
        others.append(block_patterns(grid))
    return st.one_of(worded_patterns(grid), worded_patterns(grid), worded_patterns(grid), *others)


@st.composite
def compositions(draw: DrawFn, leaves: SearchStrategy[Pattern], operators: int) -> Pattern:
    """A random tree with exactly that many operators."""
    if operators == 0:
        return draw(leaves)
    sign = draw(st.sampled_from("&&||~"))
    if sign == "~":
        return ~draw(compositions(leaves, operators - 1))
    left = draw(st.integers(0, operators - 1))
    first, second = draw(compositions(leaves, left)), draw(compositions(leaves, operators - 1 - left))
    return first & second if sign == "&" else first | second


@st.composite
def patterns(draw: DrawFn, grid: TileGrid, operators: int | None = None, *, heads: bool = False) -> Pattern:
    """A pattern of so many operators (0 to 5 unless told) that serves the grid; ``heads`` lets it be per head."""
    if operators is None:
        operators = draw(st.integers(0, 5))
    leaves = primitives(grid)
    if heads and draw(st.booleans()):
        return per_head(draw(st.lists(compositions(leaves, operators), min_size=2, max_size=2)))
    return draw(compositions(leaves, operators))


@st.composite
def problems(draw: DrawFn, operators: int | None = None) -> tuple[Pattern, TileGrid]:
    """A grid and a pattern for any head that serves it."""
    grid = draw(grids())
    return draw(patterns(grid, operators)), grid


@st.composite
def texts(draw: DrawFn) -> Pattern:
    """Any pattern that has a text."""
    grid = TileGrid(16, 0, 100, 100)
    operators = draw(st.integers(0, 6))
    tree = compositions(worded_patterns(grid), operators)
    return per_head(draw(st.lists(tree, min_size=1, max_size=3))) if draw(st.booleans()) else draw(tree)
