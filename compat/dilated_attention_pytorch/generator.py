"""From a pattern's configuration to the rule for a length: solved for its density, and remembered."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.config import TILE, SparsePatternConfig
from ringtile.index import build_index
from ringtile.index.block_index import count_allowed
from ringtile.index.build import real_tensors
from ringtile.index.density import solve
from ringtile.patterns import BlockDilated, Blocks, Causal, Dense, GlobalTokens, Pattern, Window
from ringtile.patterns.base import TileGrid
from ringtile.patterns.checks import checked_int

_TOLERANCE = 0.1
"""Relative distance of a density from the ratio beyond which a warning names it."""


class Problem(NamedTuple):
    """Attention of some lengths, and how often a call computes it per head."""

    n_queries: int
    n_keys: int
    start: int
    times: float = 1


def count_tiles(rule: Pattern, problems: Sequence[Problem], *, is_causal: bool) -> tuple[float, float]:
    """Count the 128 x 128 tiles that a rule and dense attention compute over all problems, the mean of all heads."""
    kept = dense = 0.0
    for n_queries, n_keys, start, times in problems:
        grid = TileGrid(TILE, start, n_queries, n_keys)
        allowed = count_allowed(Causal() if is_causal else Dense(), grid, torch.device("cpu"))[1]
        # A dense rule computes what is allowed: nothing needs an index.
        tiles: float = allowed
        if not isinstance(rule, Dense):
            in_force = Causal() & rule if is_causal else rule
            index = build_index(in_force, n_queries, n_keys, start=start, num_heads=rule.num_heads or 1, block=TILE)
            # A caller may be traced with fake tensors, and a fake index has no counts.
            with real_tensors():
                tiles = index.kept_tiles / index.group.numel()
        kept, dense = kept + times * tiles, dense + times * allowed
    return kept, dense


def _solve(values: tuple[Any, ...], problems: tuple[Problem, ...], is_causal: bool) -> Pattern:
    """Return the pattern of a configuration whose tile density over all problems is nearest to the ratio."""
    config = SparsePatternConfig()
    # The caller has checked these values and was warned: setting the fields checks nothing and warns of nothing.
    vars(config).update(zip((field.name for field in fields(config)), values, strict=True))
    ratio, low, high = config.sparsity_ratio, config.min_sparsity, config.max_sparsity
    # A density pays for whole tiles, so all pairs of a tile are kept. Blocks of 64 tokens count as 128.
    block = max(config.block_size, TILE)
    rates, near = tuple(config.dilation_rates or (1, 2, 4, 8, 16)), BlockDilated([1], 1, block)
    window, first = Window((config.local_window_size or 512) // 2), config.global_tokens or 64
    # Each type has a rule by its fields, and one whose reach is free: a density sets it.
    plain, free = {
        "local_window": (window, near),
        "global_local": (window | GlobalTokens(first), near | GlobalTokens(-(-first // block) * block)),
        "dilated_sparse": (BlockDilated(rates, 1, config.block_size), near),
    }[config.pattern_type]

    def density(rule: Pattern) -> float:
        kept, dense = count_tiles(rule, problems, is_causal=is_causal)
        return kept / dense if dense else 0.0

    if ratio is None and low is None and high is None:
        return plain
    wanted = density(plain) if ratio is None else ratio
    target = config.bounded(wanted)
    n_keys = max((problem.n_keys for problem in problems), default=0)
    # The geometry lies inside the bounds already.
    if ratio is None and target == wanted:
        return plain
    if ratio is None and config.local_window_size is not None and config.pattern_type != "dilated_sparse":
        bound = f"min_sparsity={low}" if target == low else f"max_sparsity={high}"
        warnings.warn(
            f"local_window_size={config.local_window_size} changes nothing: {bound} decides over {n_keys} keys",
            stacklevel=2,
        )
    if target == 1:
        return Dense()
    # With a reach of 1, each rate adds two diagonals of blocks: the last rates are dropped until the rest has room.
    count = len(rates) if config.pattern_type == "dilated_sparse" else 0
    while count > 1 and density(BlockDilated(rates[:count], 1, block)) > target:
        count -= 1
    if count:
        free = BlockDilated(rates[:count], 1, block)
    if 0 < count < len(rates):
        warnings.warn(
            f"dilation_rates={list(rates)}: {n_keys} keys at a density of {target:g} have room for at most the rates "
            f"{list(rates[:count])}",
            stacklevel=2,
        )
    found = solve(free, target, density, n_keys)
    if count > 1 and not found.reached:
        # A further reach adds diagonals for all rates at once, which is coarse. So the reach goes as far as it fits,
        # and the blocks next to the diagonal fill up what is left.
        reach = found.pattern.reach - (found.density > target)  # type: ignore[attr-defined]
        filled = solve(near | BlockDilated(rates[:count], max(reach, 1), block), target, density, n_keys)
        found = min(found, filled, key=lambda each: abs(each.density - target))
    if abs(found.density - target) > _TOLERANCE * target:
        warnings.warn(
            f"sparsity_ratio={target:g} cannot be reached by {config.pattern_type} over {n_keys} keys: the nearest "
            f"density of tiles is {found.density:.4g}",
            stacklevel=2,
        )
    return found.pattern


class PersistentPatternCache(UserDict[int, Tensor]):
    """Patterns of your own by sequence length, and the rules that were solved for a density.

    ``cache[seq_len] = matrix`` (bool ``[blocks, blocks]`` or ``[num_heads, blocks, blocks]``, blocks of the
    configuration's ``block_size``) makes attention of that length, or of dilated segments of that length, keep these
    blocks until you delete it or call `clear`. At most ``max_size`` solved rules are kept, the most recently used.

    Raises ValueError if a key is not a positive length, if a value is not such a matrix, or if ``max_size`` is not
    positive.

    >>> cache = PersistentPatternCache()
    >>> cache[256] = torch.eye(2, dtype=torch.bool)
    >>> len(cache), cache.solved.cache_info().currsize
    (1, 0)
    """

    def __init__(self, max_size: int = 100) -> None:
        super().__init__()
        self.max_size = checked_int("pattern_cache", "max_size", max_size, 1)

    # To solve takes dozens of indices. The key is all fields of the configuration, the lengths and causality, so a
    # changed field is a new key. Copies and pickles begin with an empty one.
    @cached_property
    def solved(self) -> Any:
        """The solver, which remembers its results."""
        return lru_cache(self.max_size)(_solve)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "max_size": self.max_size}

    def __getitem__(self, seq_len: int) -> Tensor:
        # A copy, as in __setitem__: a change of the matrix in place would not reach indices that are cached.
        return self.data[seq_len].clone()

    def __setitem__(self, seq_len: int, matrix: Tensor) -> None:
        length = checked_int("pattern_cache", "seq_len", seq_len, 1)
        is_bool = isinstance(matrix, Tensor) and matrix.dtype == torch.bool
        if not is_bool or matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
            got = (matrix.dtype, matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(
                f"pattern_cache: expected a bool matrix [blocks, blocks] or [num_heads, blocks, blocks], got {got}"
            )
        self.data[length] = matrix.clone()

    def clear(self) -> None:
        """Forget your own matrices, the solved rules and the counts."""
        self.data.clear()
        self.solved.cache_clear()


class SparsePatternGenerator:
    """Makes the pattern of a configuration for a length: always the same pattern, of the requested density.

    Args:
        config: Its fields are read at every call.
        cache_size: Number of solved rules to remember.

    Example:
        >>> generator = SparsePatternGenerator(SparsePatternConfig("dilated_sparse", sparsity_ratio=0.25))
        >>> generator.generate_pattern(seq_len=8192, num_heads=8).shape
        torch.Size([8, 64, 64])
    """

    def __init__(self, config: SparsePatternConfig, *, cache_size: int = 100) -> None:
        self.config = config
        self.pattern_cache = PersistentPatternCache(cache_size)

    def rule(self, n_queries: int, n_keys: int | None = None, *, is_causal: bool = False) -> Pattern:
        """Return the rule for these lengths, causal if requested: one of your own, or the configuration's."""
        n_keys = n_queries if n_keys is None else n_keys
        rule: Pattern = self.inside((Problem(n_queries, n_keys, n_keys - n_queries),), is_causal=is_causal)
        return Causal() & rule if is_causal else rule

    # A graph would trace the solver, build its indices as part of the graph and ignore the cache.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def inside(self, problems: tuple[Problem, ...], *, is_causal: bool) -> Pattern:
        """Return one rule for several problems. Causality is left to the caller.

        Raises ValueError if a field of the configuration is out of range, or if one of your own patterns fits only some
        of the lengths.
        """
        self.config.check()
        if self.config.pattern_type == "adaptive":
            raise ValueError("pattern_type: 'adaptive' chooses tiles by queries and keys, and lengths have no pattern")
        # Dilated segments of 150 and 300 / 2 tokens are one length, and a pattern of your own can serve it.
        lengths = sorted({problem.n_keys for problem in problems}, reverse=True)
        given = [length for length in lengths if length in self.pattern_cache]
        if given and len(lengths) > 1:
            raise ValueError(
                f"pattern_cache: has a pattern for {given} tokens, and a pattern of your own fits one length, but "
                f"the dilated segments here have {lengths} tokens"
            )
        if given:
            return Blocks(self.pattern_cache[lengths[0]], block=self.config.block_size)
        solved = self.pattern_cache.solved if self.config.enable_caching else _solve
        rule: Pattern = solved(astuple(self.config), problems, is_causal)
        return rule

    def create_pattern(self, seq_len: int, is_causal: bool = False) -> Tensor:
        """Return the blocks with a kept pair, bool ``[blocks, blocks]``, and remember the rule for later calls.

        A pattern of your own that differs between heads has a leading ``[num_heads]``.
        """
        rule, block_size = self.rule(seq_len, is_causal=is_causal), self.config.block_size
        index = build_index(rule, seq_len, num_heads=rule.num_heads or 1, block=min(block_size, TILE))
        # A copy, because the index keeps its own.
        blocks = index.tiles[0].clone()
        if block_size > TILE:
            blocks = F.max_pool2d(blocks.float(), block_size // TILE, ceil_mode=True).bool()
        return blocks if rule.num_heads else blocks[0]

    def generate_pattern(self, seq_len: int, num_heads: int = 1, is_causal: bool = False) -> Tensor:
        """Return the blocks with a kept pair in each head, bool ``[num_heads, blocks, blocks]``.

        Raises ValueError if a pattern of your own is defined for another number of heads.
        """
        blocks = self.create_pattern(seq_len, is_causal)
        if blocks.dim() == 3 and len(blocks) != num_heads:
            raise ValueError(f"num_heads: the pattern of {seq_len} tokens is for {len(blocks)}, got {num_heads=}")
        return blocks.expand(num_heads, *blocks.shape[-2:])
