"""From a pattern's configuration to the rule that serves a length: solved for its density, and remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.compat.config import SparsePatternConfig
from ringtile.compat.counting import Problem, count_pairs
from ringtile.compat.once import warn_once
from ringtile.layout import build_index, with_density
from ringtile.patterns import BlockDilated, Blocks, Causal, Dense, Dilated, GlobalTokens, Pattern, Window
from ringtile.patterns.base import And

_RATES = (1, 2, 4, 8, 16)
_WINDOW = 512
_GLOBAL = 64

_TOLERANCE = 0.02
"""How far from the ratio a density may be, relatively, and count as reached."""


class CacheStats(NamedTuple):
    """What `PersistentPatternCache.get_stats` reports."""

    hits: int
    misses: int
    solved: int
    """Rules remembered, at most ``max_size``."""
    given: int
    """Matrices that the user stored."""


class PersistentPatternCache(MutableMapping[int, Tensor]):
    """Patterns of your own by sequence length, and the rules that were solved for a density.

    ``cache[seq_len] = matrix`` (bool ``[blocks, blocks]`` or ``[num_heads, blocks, blocks]``, blocks of the
    configuration's ``block_size``) makes attention of that length, or of dilated segments of that length, keep these
    blocks; it stays until it is deleted or `clear` is called. Solved rules are kept beside them, at most ``max_size``,
    least recently used out first. Rules hold no device memory (what they need on a device is cached, and limited in
    bytes, by `ringtile.layout`). Safe to use from several threads.

    Raises ValueError where a key is not a positive length or a value not such a matrix, and where ``max_size`` is not
    positive.

    >>> cache = PersistentPatternCache()
    >>> cache[256] = torch.eye(2, dtype=torch.bool)
    >>> len(cache), cache.get_stats().given
    (1, 1)
    """

    def __init__(self, max_size: int = 100) -> None:
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise ValueError(f"max_size: expected a positive number of patterns, got {max_size!r}")
        self.max_size = max_size
        self._lock = threading.RLock()
        self._given: dict[int, Tensor] = {}
        self._solved: OrderedDict[Hashable, Pattern] = OrderedDict()
        self._hits = self._misses = 0

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def __getitem__(self, seq_len: int) -> Tensor:
        with self._lock:
            return self._given[seq_len].clone()

    def __setitem__(self, seq_len: int, matrix: Tensor) -> None:
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
            raise ValueError(f"pattern_cache: expected a sequence length for a key, got {seq_len!r}")
        if not isinstance(matrix, Tensor):
            raise ValueError(f"pattern_cache: expected a bool tensor, got {type(matrix).__name__}")
        if matrix.dtype != torch.bool or matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(
                "pattern_cache: expected a bool matrix [blocks, blocks] or [num_heads, blocks, blocks], "
                f"got {matrix.dtype=}, {matrix.shape=}"
            )
        with self._lock:
            self._given[seq_len] = matrix.clone()
            self._solved.clear()

    def __delitem__(self, seq_len: int) -> None:
        with self._lock:
            del self._given[seq_len]
            self._solved.clear()

    def __iter__(self) -> Iterator[int]:
        with self._lock:
            return iter(list(self._given))

    def __len__(self) -> int:
        return len(self._given)

    def clear(self) -> None:
        """Forget everything: your own matrices, the solved rules and the counts."""
        with self._lock:
            self._given.clear()
            self._solved.clear()
            self._hits = self._misses = 0

    def get_stats(self) -> CacheStats:
        """Hits, misses and sizes since the last `clear`."""
        with self._lock:
            return CacheStats(self._hits, self._misses, len(self._solved), len(self._given))

    def solved(self, key: Hashable, solve: Callable[[], Pattern]) -> Pattern:
        """The rule of a key, from ``solve`` where it is not known yet."""
        with self._lock:
            rule = self._solved.get(key)
            if rule is not None:
                self._hits += 1
                self._solved.move_to_end(key)
                return rule
            self._misses += 1
        rule = solve()
        with self._lock:
            self._solved[key] = rule
            while len(self._solved) > self.max_size:
                self._solved.popitem(last=False)
        return rule


class SparsePatternGenerator:
    """Makes the pattern of a configuration for a length: always the same one, of the density asked for.

    Args:
        config: Its fields are read at every call.
        cache_size: How many solved rules are remembered.

    Example:
        >>> generator = SparsePatternGenerator(SparsePatternConfig("dilated_sparse", sparsity_ratio=0.25))
        >>> generator.generate_pattern(seq_len=8192, num_heads=8).shape
        torch.Size([8, 64, 64])
    """

    def __init__(self, config: SparsePatternConfig, *, cache_size: int = 100) -> None:
        self.config = config
        self.pattern_cache = PersistentPatternCache(cache_size)

    def rule(self, n_queries: int, n_keys: int | None = None, *, is_causal: bool = False) -> Pattern:
        """The rule for these lengths, causal where asked: one of your own, or the configuration's.

        Raises ValueError where a field of the configuration is out of range.
        """
        n_keys = n_queries if n_keys is None else n_keys
        rule = self.inside((Problem(n_queries, n_keys, 1),), is_causal=is_causal)
        return Causal() & rule if is_causal else rule

    def inside(self, problems: tuple[Problem, ...], *, is_causal: bool) -> Pattern:
        """One rule for several lengths, of the density asked for over all of them; causality is left to the caller.

        Raises ValueError where a field of the configuration is out of range, or one of your own patterns serves some
        of the lengths only.
        """
        config = self.config
        config.check()
        rates = None if config.dilation_rates is None else tuple(config.dilation_rates)
        geometry = (config.pattern_type, config.block_size, config.local_window_size, config.global_tokens, rates)
        densities = (config.sparsity_ratio, config.min_sparsity, config.max_sparsity)
        if not config.enable_caching:
            return self._make(problems, is_causal)
        key = (problems, is_causal, geometry, densities)
        return self.pattern_cache.solved(key, lambda: self._make(problems, is_causal))

    def _make(self, problems: tuple[Problem, ...], is_causal: bool) -> Pattern:
        lengths = [problem.n_keys for problem in problems]
        given = [length for length in lengths if length in self.pattern_cache]
        if not given:
            return _Solver(self.config, problems, is_causal).rule()
        if len(lengths) > 1:
            raise ValueError(
                f"pattern_cache: has a pattern for {given} tokens, and a pattern of your own serves one length, but "
                f"the dilated segments here have {lengths} tokens"
            )
        return Blocks(self.pattern_cache[lengths[0]], block=self.config.block_size)

    def create_pattern(self, seq_len: int, is_causal: bool = False) -> Tensor:
        """The blocks that hold a kept pair, bool ``[blocks, blocks]``, and remember the rule for the calls to come.

        A pattern of your own that differs between heads has a leading ``[num_heads]``.
        """
        rule = self.rule(seq_len, is_causal=is_causal)
        return kept_blocks(rule, seq_len, self.config.block_size)

    def generate_pattern(self, seq_len: int, num_heads: int = 1, is_causal: bool = False) -> Tensor:
        """The blocks that hold a kept pair in each head, bool ``[num_heads, blocks, blocks]``.

        Raises ValueError where a pattern of your own is written for another number of heads.
        """
        rule = self.rule(seq_len, is_causal=is_causal)
        if rule.n_heads not in (None, num_heads):
            raise ValueError(f"num_heads: the pattern of {seq_len} tokens is for {rule.n_heads}, got {num_heads=}")
        blocks = kept_blocks(rule, seq_len, self.config.block_size)
        return blocks.expand(num_heads, *blocks.shape[-2:])


def kept_blocks(rule: Pattern, seq_len: int, block_size: int) -> Tensor:
    """The blocks of a rule that hold a kept pair: bool ``[R, C]``, or ``[H, R, C]`` where it is written per head."""
    index = build_index(rule, seq_len, heads=rule.n_heads or 1, block=min(block_size, 128))
    blocks = torch.zeros(index.n_groups, index.n_rows, index.n_cols, dtype=torch.bool)
    blocks.view(-1)[index.entries().number] = True
    blocks = blocks[index.group[0].long()]
    if block_size > index.block:
        pairs = F.max_pool2d(blocks.float(), block_size // index.block, ceil_mode=True)
        blocks = pairs.bool()
    return blocks if rule.n_heads else blocks[0]


class _Found(NamedTuple):
    """A rule and its density over all problems."""

    pattern: Pattern
    density: float

    def meets(self, target: float) -> bool:
        return abs(self.density - target) <= _TOLERANCE * target


class _Solver:
    """The rule of one configuration for some problems."""

    def __init__(self, config: SparsePatternConfig, problems: tuple[Problem, ...], is_causal: bool) -> None:
        self.config, self.problems, self.is_causal = config, problems, is_causal
        self.longest = max(problems, key=lambda problem: problem.n_keys)

    def rule(self) -> Pattern:
        config = self.config
        wanted = config.sparsity_ratio
        bound = self._bounded(self._density(self._geometry()) if wanted is None else wanted)
        if wanted is None and bound is None:
            return self._geometry()
        if wanted is not None and bound is not None:
            warn_once(
                f"sparsity_ratio={wanted:g} is outside of min_sparsity={config.min_sparsity} and "
                f"max_sparsity={config.max_sparsity} (all are densities): {bound:g} is used"
            )
        if wanted is not None and config.local_window_size is not None:
            warn_once(
                f"local_window_size={config.local_window_size} is not used: sparsity_ratio={wanted:g} sets the width "
                "of the window; leave out one of them"
            )
        target = bound if bound is not None else wanted
        assert target is not None
        if target == 1:
            return Dense()
        solution = self._dilated(target) if config.pattern_type == "dilated_sparse" else self._windowed(target)
        if not solution.meets(target):
            warn_once(
                f"sparsity_ratio={target:g} cannot be reached by {config.pattern_type} over {self.longest.n_keys} "
                f"keys: the nearest density is {solution.density:.4g}"
            )
        return solution.pattern

    def _in_force(self, pattern: Pattern) -> Pattern:
        return Causal() & pattern if self.is_causal else pattern

    def _density(self, pattern: Pattern) -> float:
        return count_pairs(pattern, self.problems, is_causal=self.is_causal).density

    def _solve(self, pattern: Pattern, target: float) -> _Found:
        """The pattern resized to the nearest density over all problems."""
        if len(self.problems) == 1:
            found = with_density(self._in_force(pattern), target, self.longest.n_queries, self.longest.n_keys)
            rule = found.pattern.second if self.is_causal and isinstance(found.pattern, And) else found.pattern
            return _Found(rule, found.density)
        low, high = self._sized(pattern, 0), self._sized(pattern, self.longest.n_keys)
        sizes = [0, self.longest.n_keys]
        while sizes[1] - sizes[0] > 1 and not low.meets(target) and not high.meets(target):
            middle = sum(sizes) // 2
            found_there = self._sized(pattern, middle)
            if found_there.density < target:
                sizes[0], low = middle, found_there
            else:
                sizes[1], high = middle, found_there
        return min(low, high, key=lambda found: abs(found.density - target))

    def _sized(self, pattern: Pattern, size: int) -> _Found:
        sized = pattern.resized(size)
        assert sized is not None, f"{pattern!r} has a free parameter"
        return _Found(sized, self._density(sized))

    def _bounded(self, density: float) -> float | None:
        """The bound that a density is beyond, or None."""
        low, high = self.config.min_sparsity, self.config.max_sparsity
        if low is not None and density < low:
            return low
        return high if high is not None and density > high else None

    def _geometry(self) -> Pattern:
        config = self.config
        if config.pattern_type == "dilated_sparse":
            return BlockDilated(config.dilation_rates or _RATES, 1, config.block_size)
        window = Window((config.local_window_size or _WINDOW) // 2)
        if config.pattern_type == "local_window":
            return window
        return window | GlobalTokens(config.global_tokens or _GLOBAL)

    def _windowed(self, target: float) -> _Found:
        if self.config.pattern_type == "local_window":
            return self._solve(Window(1), target)
        return self._solve(Window(1) | GlobalTokens(self.config.global_tokens or _GLOBAL), target)

    def _dilated(self, target: float) -> _Found:
        """Whole blocks as far as they fit into the density, and a window that fills up the rest token by token."""
        rates, block = tuple(self.config.dilation_rates or _RATES), self.config.block_size
        for count in range(len(rates), min(1, len(rates) - 1), -1):
            near = self._solve(BlockDilated(rates[:count], 1, block), target)
            assert isinstance(near.pattern, BlockDilated)
            reach = near.pattern.reach
            if not near.meets(target):
                # A further reach may add nothing, where the rates already give those blocks.
                while reach and self._density(BlockDilated(rates[:count], reach, block)) > target:
                    reach -= 1
            if reach:
                if count < len(rates):
                    self._no_room(target, f"for the rates {list(rates[:count])} only")
                filled = Window(1) | BlockDilated(rates[:count], reach, block)
                return near if near.meets(target) else self._solve(filled, target)
        self._no_room(target, "for fewer than two rates: they count tokens instead, which computes more tiles")
        return self._solve(Dilated(rates, 1), target)

    def _no_room(self, target: float, consequence: str) -> None:
        config = self.config
        warn_once(
            f"dilation_rates={list(config.dilation_rates or _RATES)}: in blocks of {config.block_size}, "
            f"{self.longest.n_keys} keys at a density of {target:g} have room {consequence}"
        )
