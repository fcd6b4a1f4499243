"""Block-sparse and dilated attention under their old names: tensors are ``[B, N, H, D]`` here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringtile.compat.config import SparsePatternConfig, check_density
from ringtile.compat.counting import Pairs, Problem, count_pairs, dilated_problems
from ringtile.compat.generator import SparsePatternGenerator
from ringtile.compat.monitor import PerformanceMonitor
from ringtile.compat.once import accept_needless
from ringtile.functional import sparse_attention
from ringtile.functional.dilated import dilated_attention
from ringtile.kernels.philox import dropout_threshold
from ringtile.modules.recompute import recomputed
from ringtile.patterns import Blocks, Dense, Pattern
from ringtile.patterns.base import wholes


class _LastCall(NamedTuple):
    rule: Pattern
    problems: tuple[Problem, ...]
    whole: Problem
    is_causal: bool

    def pairs(self) -> tuple[Pairs, Pairs]:
        """What the rule keeps over all segments, and what dense attention would."""
        kept = count_pairs(self.rule, self.problems, is_causal=self.is_causal)
        return kept, count_pairs(Dense(), (self.whole,), is_causal=self.is_causal)


class BlockSparseRingDilatedAttention(nn.Module):
    """Attention over the pairs that a pattern keeps, over the whole sequence or inside LongNet's dilated segments.

    Without ``segment_lengths`` the pattern covers the whole sequence. With them it applies inside each dilated segment,
    and the branches are mixed by their softmax denominators (`ringtile.dilated_attention`); the density is then
    measured over all segments. Any length works.

    Args:
        segment_lengths: Tokens of a segment, for each branch; None for no segments.
        dilation_rates: One for each branch: every rate-th token of its segments is kept.
        sparse_config: The pattern, read at every call; None means ``SparsePatternConfig()``.
        use_adaptive_sparsity: Only False: patterns here follow positions, not contents.
        ring_size: 1, or the number of ranks, over which attention is not yet divided.
        dropout: Probability with which a weight is dropped after the softmax in training.
        attention_scale: Of the scores; None means ``D ** -0.5``.
        use_gradient_checkpointing: Save the inputs alone for the backward pass, and compute again what it needs.
        cache_size: How many solved patterns are remembered.
        **needless: Flags that switch nothing any more: accepted, and a warning says why once.

    Raises:
        ValueError: Where an argument is out of range.
        NotImplementedError: Where ``ring_size`` is the number of several ranks.

    Example:
        >>> config = SparsePatternConfig("local_window", sparsity_ratio=0.25)
        >>> attention = BlockSparseRingDilatedAttention(sparse_config=config)
        >>> x = torch.randn(1, 1000, 4, 32)
        >>> attention(x, is_causal=True).shape
        torch.Size([1, 1000, 4, 32])
    """

    _default_ratio: float | None = None

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        sparse_config: SparsePatternConfig | None = None,
        *,
        use_adaptive_sparsity: bool = False,
        ring_size: int = 1,
        dropout: float = 0.0,
        attention_scale: float | None = None,
        use_gradient_checkpointing: bool = False,
        cache_size: int = 100,
        **needless: object,
    ) -> None:
        accept_needless(type(self).__name__, needless)
        segments = _checked_segments(segment_lengths, dilation_rates)
        _check_ring_size(ring_size)
        if use_adaptive_sparsity:
            raise ValueError(
                "use_adaptive_sparsity: expected False: patterns follow positions here, not contents, "
                f"got {use_adaptive_sparsity=}"
            )
        if dropout:
            dropout_threshold(dropout)
        if sparse_config is None:
            sparse_config = SparsePatternConfig(sparsity_ratio=self._default_ratio)
        super().__init__()
        self.segment_lengths, self.dilation_rates = segments
        self.ring_size = ring_size
        self.dropout = dropout
        self.attention_scale = attention_scale
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.pattern_generator = SparsePatternGenerator(sparse_config, cache_size=cache_size)
        self.performance_monitor = PerformanceMonitor()
        self._last: _LastCall | None = None

    @property
    def sparse_config(self) -> SparsePatternConfig:
        """The configuration, the same object that `pattern_generator` reads."""
        return self.pattern_generator.config

    @sparse_config.setter
    def sparse_config(self, config: SparsePatternConfig) -> None:
        config.check()
        self.pattern_generator.config = config

    def extra_repr(self) -> str:
        """The arguments that differ from one module to another."""
        return f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}, {self.sparse_config}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
        *,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention ``[B, N, H, D]``; ``forward(x)`` alone is self-attention.

        Args:
            query: ``[B, N, H, D]``, float64, float32, bfloat16 or float16.
            key: ``[B, M, H, D]``; None for the query, with value.
            value: ``[B, M, H, Dv]``.
            is_causal: Keep only keys at or before the query's position, aligned to the lower right.
            key_mask: ``[B, M]`` bool, True where a key may be attended to.

        Raises:
            ValueError: Where shapes do not fit, as `ringtile.sparse_attention` says.
            torch.OutOfMemoryError: Names the bytes and what lowers them; nothing is tried again.
        """
        key, value = self_attention_where_alone(query, key, value)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 4:
                raise ValueError(f"{name}: expected four dimensions [B, N, H, D], got {x.shape=}")
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        return self.attend(query, key, value, is_causal=is_causal, key_mask=key_mask, dropout_p=dropout_p).transpose(
            1, 2
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pattern: Pattern | None = None,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """The same on ``[B, H, N, D]``; what ``attend=`` of `ringtile.SparseMultiheadAttention` calls.

        Pairs that ``pattern`` does not keep are left out too. Raises ValueError where there are segments: their places
        are not the positions that it speaks of.
        """
        if pattern is not None and self.segment_lengths:
            raise ValueError(
                f"pattern: a mask of positions cannot be applied inside dilated segments, got {pattern!r} with "
                f"segment_lengths={self.segment_lengths}; is_causal and key masks can"
            )
        whole = Problem(query.shape[2], key.shape[2], 1)
        problems: tuple[Problem, ...] = (whole,)
        if self.segment_lengths:
            problems = dilated_problems(whole.n_keys, self.segment_lengths, self.dilation_rates)
        rule = self.pattern_generator.inside(problems, is_causal=is_causal)
        self._last = _LastCall(rule, problems, whole, is_causal)
        options: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask}
        options["scale"] = self.attention_scale if scale is None else scale
        attention: Callable[..., Tensor]
        if self.segment_lengths:
            attention = partial(
                dilated_attention,
                segment_lengths=self.segment_lengths,
                dilation_rates=self.dilation_rates,
                pattern=rule,
                **options,
            )
        else:
            attention = partial(sparse_attention, pattern=rule if pattern is None else rule & pattern, **options)

        def sparse(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
            return attention(query, key, value, dropout_p=dropout_p)

        def call() -> Tensor:
            try:
                if self.use_gradient_checkpointing and torch.is_grad_enabled():
                    return recomputed(sparse, query, key, value, dropout_p)
                return sparse(query, key, value, dropout_p)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                raise torch.OutOfMemoryError(self._too_large(query, key, value, error)) from error

        if not self.performance_monitor.enabled:
            return call()
        dense = partial(sparse_attention, query, key, value, pattern, **options)
        shape = (query.shape, key.shape, value.shape, query.dtype, query.device, is_causal, pattern)
        found, of_dense = self._last.pairs()
        return self.performance_monitor.measure(
            shape,
            call,
            partial(sparse, query, key, value),
            dense,
            density=found.kept / of_dense.allowed if of_dense.allowed else 0.0,
        )

    def _too_large(self, query: Tensor, key: Tensor, value: Tensor, error: RuntimeError) -> str:
        needed = 2 * query.nbytes + key.nbytes + value.nbytes
        config = self.sparse_config
        return (
            f"attention of {query.shape=} over {key.shape=} ran out of memory: query, key, value and output alone take "
            f"{needed:,} bytes. use_gradient_checkpointing=True, a shorter sequence or a smaller batch take less, and "
            f"so does a smaller sparsity_ratio (now {config.sparsity_ratio}). The allocator said: {error}"
        )

    def set_sparsity_ratio(self, sparsity_ratio: float) -> None:
        """Set the density of the pattern, the fraction of pairs kept, from the next call on.

        Raises ValueError outside of (0, 1].
        """
        if sparsity_ratio is None:
            raise ValueError("sparsity_ratio: expected a density in (0, 1], got None")
        check_density("sparsity_ratio", sparsity_ratio)
        self.sparse_config.sparsity_ratio = sparsity_ratio

    def get_memory_info(self) -> dict[str, float]:
        """What is cached, and what the last call computed beside dense attention; NaN before the first call.

        ``pattern_cache_size`` counts patterns, your own and solved; ``memory_reduction`` is the fraction of the score
        matrix, in tiles, that is never computed; ``theoretical_speedup`` is dense over computed tiles.
        """
        stats = self.pattern_generator.pattern_cache.get_stats()
        tiles = math.nan
        if self._last is not None:
            found, of_dense = self._last.pairs()
            tiles = found.tiles / of_dense.allowed_tiles if of_dense.allowed_tiles else math.nan
        return {
            "pattern_cache_size": stats.given + stats.solved,
            "memory_reduction": 1 - tiles,
            "theoretical_speedup": 1 / tiles if tiles else math.inf,
        }

    def get_performance_stats(self) -> dict[str, float]:
        """Means over the calls since ``performance_monitor.enable()``; NaN until something was measured.

        ``avg_forward_time_ms`` is of attention itself; ``avg_sparsity`` is, as ``sparsity_ratio``, a density: kept
        pairs over those of dense attention; ``avg_speedup`` is the time of dense attention, measured once a shape, over
        that of the calls; ``avg_memory_mb`` is the peak in MiB beyond inputs and output, measured once a shape;
        ``quality_score`` is the mean cosine similarity of the outputs to those of dense attention.
        """
        report = self.performance_monitor.report()
        return {
            "avg_forward_time_ms": report.forward_ms,
            "avg_sparsity": report.density,
            "avg_speedup": report.speedup,
            "avg_memory_mb": report.memory_mib,
            "quality_score": report.quality,
        }


class BlockSparseOptimized(BlockSparseRingDilatedAttention):
    """`BlockSparseRingDilatedAttention` itself: blocks are always computed in batches and patterns always remembered.

    >>> BlockSparseOptimized([128, 256], [1, 2])(torch.randn(1, 300, 2, 16)).shape
    torch.Size([1, 300, 2, 16])
    """


class BlockSparseTorchSparse(BlockSparseRingDilatedAttention):
    """`BlockSparseRingDilatedAttention` itself: tensors of `torch.sparse` were slower than tiles and gave the same.

    >>> BlockSparseTorchSparse([128, 256], [1, 2])(torch.randn(1, 300, 2, 16)).shape
    torch.Size([1, 300, 2, 16])
    """


def hierarchical_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor, *, is_causal: bool = False, block_size: int = 128
) -> Tensor:
    """Attention on the blocks that a pattern touches, refined inside them to the pairs that it keeps: one softmax.

    The two levels are what `ringtile.sparse_attention` does with every pattern, full tiles and tiles of bits.

    Args:
        q: ``[B, N, H, D]``.
        k: ``[B, M, H, D]``.
        v: ``[B, M, H, Dv]``.
        pattern: A `ringtile.patterns.Pattern`, refined to pairs, or a bool matrix of whole blocks ``[rows, columns]``
            or ``[H, rows, columns]``.
        is_causal: Keep only keys at or before the query's position.
        block_size: Tokens a side of the blocks of a matrix.

    Raises:
        ValueError: Where shapes do not fit, or ``block_size`` is given beside a pattern that has no use for it.

    Example:
        >>> x = torch.randn(1, 512, 2, 16)
        >>> hierarchical_sparse_attention(x, x, x, torch.eye(4, dtype=torch.bool)).shape
        torch.Size([1, 512, 2, 16])
    """
    if isinstance(pattern, Tensor):
        pattern = Blocks(pattern, block=block_size)
    elif block_size != 128:
        raise ValueError(f"block_size: changes nothing for a Pattern, got {block_size=} with {pattern!r}")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sparse_attention(q, k, v, pattern, is_causal=is_causal).transpose(1, 2)


def self_attention_where_alone(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Key and value, which are the query where neither is given; ValueError where one is."""
    if key is None and value is None:
        return query, query
    if key is None or value is None:
        missing = "key" if key is None else "value"
        raise ValueError(f"{missing}: expected key and value, or neither for self-attention, got None for {missing}")
    return key, value


def _checked_segments(
    segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if segment_lengths is None and dilation_rates is None:
        return (), ()
    if segment_lengths is None or dilation_rates is None:
        raise ValueError(
            "segment_lengths, dilation_rates: expected both, or neither for no segments, "
            f"got {segment_lengths=}, {dilation_rates=}"
        )
    lengths, rates = (
        wholes("dilated_attention", name, values, 1)
        for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates))
    )
    if len(lengths) != len(rates):
        raise ValueError(f"dilation_rates: expected one for each of {segment_lengths=}, got {dilation_rates=}")
    return lengths, rates


def _check_ring_size(ring_size: int) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if isinstance(ring_size, bool) or ring_size not in (1, ranks):
        raise ValueError(f"ring_size: expected 1 or the number of ranks, {ranks}, got {ring_size!r}")
    if ring_size > 1:
        raise NotImplementedError(
            f"ring_size={ring_size}: attention is not divided over ranks here; ring_size=1 computes it on each rank"
        )


def _is_out_of_memory(error: RuntimeError) -> bool:
    # Torch's allocator for the CPU has no error class of its own.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
