"""Block-sparse and dilated attention under their old names: tensors are ``[B, N, H, D]`` here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.config import SparsePatternConfig
from dilated_attention_pytorch.generator import Problem, SparsePatternGenerator, count_tiles
from dilated_attention_pytorch.monitor import PerformanceMonitor
from ringtile.adaptive import AdaptiveAttention, Density
from ringtile.distributed import Layout, ring_attention, ring_dilated_attention
from ringtile.functional import sparse_attention
from ringtile.functional.attention import make_call
from ringtile.functional.dilated import (
    checked_branches,
    dilated_attention,
    parts_of,
    rules_of,
    warn_of_uncovered,
)
from ringtile.functional.parts import Parts, composed
from ringtile.functional.permute import pieces
from ringtile.index import BlockIndex
from ringtile.index.block_index import count_allowed
from ringtile.kernels.philox import dropout_threshold
from ringtile.modules.multihead import MAX_WEIGHTS
from ringtile.modules.recompute import recomputed
from ringtile.patterns import Blocks, Causal, Dense, Pattern
from ringtile.patterns.base import TileGrid

_ONE_PROCESS = "ring_size: expected 1, because tiles that follow the contents are chosen in one process, got {}"


class BlockSparseRingDilatedAttention(nn.Module):
    """Attention over the pairs that a pattern keeps, over the whole sequence or inside LongNet's dilated segments.

    Without ``segment_lengths`` the pattern covers the whole sequence. With them it applies inside each dilated segment,
    and the branches are mixed by their softmax denominators (`ringtile.dilated_attention`); the density is then
    measured over all segments. Any length works.

    Args:
        segment_lengths: Tokens per segment, for each branch. Default: None, no segments.
        dilation_rates: One rate for each branch, which keeps every rate-th token of its segments.
        sparse_config: Pattern, read at every call. Default: ``SparsePatternConfig()``.
        use_adaptive_sparsity: True to choose tiles by the contents of each call, see `enable_adaptive_sparsity`, or the
            `ringtile.adaptive.AdaptiveAttention` that chooses.
        ring_size: 1, or the number of ranks of the default process group. Each rank then passes its part of the
            sequence, in order of ranks and equally long, and gets its part of the output.
        dropout: Probability of dropping a weight after the softmax in training.
        attention_scale: Scale of the scores. Default: ``D ** -0.5``.
        use_gradient_checkpointing: True to save only the inputs for the backward pass and recompute the rest.
        cache_size: Number of solved patterns to remember.

    Raises:
        ValueError: If an argument is out of range, or ``use_adaptive_sparsity`` comes with several ranks.

    Example:
        >>> config = SparsePatternConfig("local_window", sparsity_ratio=0.25)
        >>> attention = BlockSparseRingDilatedAttention(sparse_config=config)
        >>> x = torch.randn(1, 4096, 4, 32)
        >>> attention(x, is_causal=True).shape
        torch.Size([1, 4096, 4, 32])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        sparse_config: SparsePatternConfig | None = None,
        *,
        use_adaptive_sparsity: bool | AdaptiveAttention = False,
        ring_size: int = 1,
        dropout: float = 0.0,
        attention_scale: float | None = None,
        use_gradient_checkpointing: bool = False,
        cache_size: int = 100,
    ) -> None:
        # One of the two alone is an error, which `checked_branches` names.
        without = segment_lengths is None and dilation_rates is None
        branches = [] if without else checked_branches(segment_lengths or (), dilation_rates or ())
        _check_ring_size(ring_size)
        # The number is not needed here: a probability out of range raises before anything is built.
        dropout_threshold(dropout)
        super().__init__()
        self.segment_lengths = tuple(length for length, _ in branches)
        self.dilation_rates = tuple(rate for _, rate in branches)
        self.ring_size = ring_size
        self.dropout = dropout
        self.attention_scale = attention_scale
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.pattern_generator = SparsePatternGenerator(sparse_config or SparsePatternConfig(), cache_size=cache_size)
        self.performance_monitor = PerformanceMonitor()
        self._last: tuple[Pattern, tuple[Problem, ...], Problem, bool] | AdaptiveCall | None = None
        self.adaptive: AdaptiveAttention | None = None
        self._is_adaptive = False
        if use_adaptive_sparsity is not False:
            self.enable_adaptive_sparsity(use_adaptive_sparsity)

    @property
    def sparse_config(self) -> SparsePatternConfig:
        """The configuration, the same object that `pattern_generator` reads."""
        return self.pattern_generator.config

    @sparse_config.setter
    def sparse_config(self, config: SparsePatternConfig) -> None:
        config.check()
        self.pattern_generator.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
        return_attention_weights: bool = False,
        *,
        key_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Any]]:
        """Compute attention ``[B, N, H, D]``; ``forward(x)`` alone is self-attention.

        If ranks share the sequence, N are the tokens of this rank, and they attend to those of all ranks.

        Args:
            query: ``[B, N, H, D]``, float64, float32, bfloat16 or float16.
            key: ``[B, M, H, D]``. Default: the query, if value is None too.
            value: ``[B, M, H, Dv]``.
            is_causal: True to keep only keys at or before the query's position, aligned to the lower right.
            return_attention_weights: True to return the output and its weights in blocks, see `with_weights`.
            key_mask: ``[B, M]`` bool, True for keys to attend to.

        Raises:
            ValueError: If shapes are invalid, as in `ringtile.sparse_attention`, or as `ringtile.distributed` raises,
                or if several ranks or a long sequence are to return weights.
        """
        how = {"is_causal": is_causal, "key_mask": key_mask, "dropout_p": self.dropout if self.training else 0.0}
        if return_attention_weights:
            block_size, ranks = self.sparse_config.block_size, self.ring_size
            return with_weights(self.attend, query, key, value, block_size=block_size, ranks=ranks, **how)
        return tokens_first(self.attend, query, key, value, **how)

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
        """Compute the same on ``[B, H, N, D]``, as ``attend=`` of `ringtile.SparseMultiheadAttention`.

        A ``pattern`` restricts the kept pairs further. Raises ValueError if there are segments or several ranks beside
        a ``pattern``: it relates positions, and tokens of a dilated segment or of a rank have others.
        """
        if pattern is not None and self.segment_lengths:
            raise ValueError(
                f"pattern: a mask of positions cannot be applied inside dilated segments, got {pattern!r} with "
                f"segment_lengths={self.segment_lengths}; is_causal and key masks can"
            )
        if pattern is not None and self.ring_size > 1:
            raise ValueError(
                f"pattern: expected none with ring_size={self.ring_size}, because positions are those of all ranks, "
                f"got {pattern!r}; is_causal and key masks can be used"
            )
        heads, n_queries, n_keys = query.shape[1], query.shape[2] * self.ring_size, key.shape[2] * self.ring_size
        whole = Problem(n_queries, n_keys, n_keys - n_queries)
        problems: tuple[Problem, ...] = (whole,)
        branches = list(zip(self.segment_lengths, self.dilation_rates, strict=True))
        if branches:
            # The density is measured over what is computed: of 1,024 tokens in segments of 512 with dilation 2, each
            # head computes two problems of 256 tokens.
            cut = (piece for at in branches for piece in pieces(n_queries, n_keys, heads, *at))
            problems = tuple(Problem(p.n_queries, p.n_keys, p.start, p.segments * len(p.heads) / heads) for p in cut)
        options: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask}
        options["scale"] = self.attention_scale if scale is None else scale
        attend: Any = sparse_attention
        attend_in_segments: Any = dilated_attention
        if self.ring_size > 1:
            layout = Layout.contiguous(n_keys, self.ring_size, unit=1)
            attend = partial(ring_attention, layout=layout)
            attend_in_segments = partial(ring_dilated_attention, layout=layout)
        # Each way is one callable of query, key and value, so that checkpoints and the monitor treat them alike.
        sparse: Callable[..., Tensor]
        chooser = self._chooser()
        if chooser is not None:
            choosing = partial(AdaptiveCall, chooser, branches, pattern, **options)
            sparse = self._last = choosing()
        else:
            rule = self.pattern_generator.inside(problems, is_causal=is_causal)
            self._last = rule, problems, whole, is_causal
            sparse = partial(attend, pattern=rule if pattern is None else rule & pattern, **options)
            if branches:
                where = {"segment_lengths": self.segment_lengths, "dilation_rates": self.dilation_rates}
                sparse = partial(attend_in_segments, **where, pattern=rule, **options)
        dropping = partial(sparse, dropout_p=dropout_p)
        saves_inputs = self.use_gradient_checkpointing and torch.is_grad_enabled()
        call = partial(recomputed, dropping) if saves_inputs else dropping
        call = partial(call, query, key, value)
        if not self.performance_monitor.enabled:
            return call()
        dense = partial(attend, query, key, value, pattern, **options)
        shape = (query.shape, key.shape, value.shape, query.dtype, query.device, is_causal, pattern)
        # A new call chooses again, so its memory includes what the choice needs.
        alone = partial(sparse if chooser is None else choosing(), query, key, value)
        return self.performance_monitor.measure(shape, call, alone, dense, density=self._tile_density)

    def _tile_density(self) -> float:
        """Return the tiles of the last call over those of dense attention on the whole sequence."""
        if self._last is None:
            return math.nan
        if isinstance(self._last, AdaptiveCall):
            return self._last.tile_density
        rule, problems, whole, is_causal = self._last
        kept, dense = (count_tiles(*of, is_causal=is_causal)[0] for of in ((rule, problems), (Dense(), (whole,))))
        return kept / dense if dense else math.nan

    def set_sparsity_ratio(self, sparsity_ratio: float) -> None:
        """Set the density of the pattern, the fraction of tiles computed, from the next call on.

        It decides over a ``local_window_size``, which a UserWarning says. Raises ValueError if it is not in (0, 1], or
        if an `AdaptiveAttention` of your own decides.
        """
        if self.adaptive is not None:
            raise ValueError(f"sparsity_ratio: changes nothing beside {self.adaptive!r}, got {sparsity_ratio}")
        if sparsity_ratio is None:
            raise ValueError("sparsity_ratio: expected a density in (0, 1], got None")
        config = self.sparse_config
        # A refused value must leave the configuration as it was.
        before, config.sparsity_ratio = config.sparsity_ratio, sparsity_ratio
        try:
            config.check()
        except ValueError:
            config.sparsity_ratio = before
            raise

    def enable_adaptive_sparsity(self, enabled: bool | AdaptiveAttention = True) -> None:
        """Choose tiles by the contents of each call, or follow the configuration's pattern again, from now on.

        True keeps the tiles to which `ringtile.adaptive.Rounded` attributes the most attention, as many as
        ``sparsity_ratio`` says (0.25 by default), of ``block_size`` tokens. The type and the shape of the pattern, and
        patterns of your own, wait until you disable it. An `AdaptiveAttention` brings its own scores, budget and block.
        Inside dilated segments, each segment chooses for itself.

        True looks at later tokens of a tile. Causal training with it raises ValueError in the call: pass
        ``AdaptiveAttention(Probe("first"), Density(0.25))``.

        Raises ValueError if there are several ranks, if ``enabled`` is neither or has a ``forward`` of its own, if
        it is False and ``pattern_type`` is "adaptive".
        """
        if not isinstance(enabled, bool | AdaptiveAttention):
            raise ValueError(f"enabled: expected True, False or an AdaptiveAttention, got {enabled!r}")
        if enabled is False and self.sparse_config.pattern_type == "adaptive":
            raise ValueError("enabled: expected True, because pattern_type='adaptive' has no other pattern, got False")
        if enabled is not False and self.ring_size > 1:
            raise ValueError(_ONE_PROCESS.format(self.ring_size))
        own = enabled if isinstance(enabled, AdaptiveAttention) else None
        # This module computes attention over an index itself: what an override adds to a choice would be lost.
        if own is not None and type(own).forward is not AdaptiveAttention.forward:
            raise ValueError(f"enabled: {own!r} attends in its own way: pass it as attend= of SparseMultiheadAttention")
        self.adaptive, self._is_adaptive = own, enabled is not False

    def _chooser(self) -> AdaptiveAttention | None:
        config = self.sparse_config
        if not (self._is_adaptive or config.pattern_type == "adaptive"):
            return None
        if self.ring_size > 1:
            raise ValueError(_ONE_PROCESS.format(self.ring_size))
        if self.adaptive is not None:
            return self.adaptive
        # Made anew at each call, because the fields of the configuration may have changed.
        config.check()
        density = config.bounded(0.25 if config.sparsity_ratio is None else config.sparsity_ratio)
        return AdaptiveAttention(budget=Density(density), block=min(config.block_size, 128))

    def get_memory_info(self) -> dict[str, float]:
        """Return what is cached, and the tiles of the last call beside dense attention; NaN before the first call.

        ``pattern_cache_size`` counts patterns, your own and solved. ``memory_reduction`` is the fraction of the score
        matrix, in tiles, that is never computed. ``theoretical_speedup`` is dense over computed tiles.
        """
        cache, tiles = self.pattern_generator.pattern_cache, self._tile_density()
        return {
            "pattern_cache_size": len(cache) + cache.solved.cache_info().currsize,
            "memory_reduction": 1 - tiles,
            "theoretical_speedup": 1 / tiles if tiles else math.inf,
        }

    def get_performance_stats(self) -> dict[str, float]:
        """Return the means over the calls since ``performance_monitor.enable()``; NaN until then.

        ``avg_forward_time_ms`` is the time of attention alone. ``avg_sparsity`` is a density like ``sparsity_ratio``:
        computed tiles over those of dense attention. ``avg_speedup`` is the time of dense attention, measured once per
        shape, over that of the calls. ``avg_memory_mb`` is the peak in MiB beyond inputs and output, measured once per
        shape. ``quality_score`` is the mean cosine similarity of the outputs to those of dense attention.
        """
        return self.performance_monitor.report()


@dataclass(eq=False)
class AdaptiveCall:
    """One call over the tiles that an `AdaptiveAttention` chooses once, also if it is computed again."""

    chooser: AdaptiveAttention
    branches: list[tuple[int, int]]
    pattern: Pattern | None
    is_causal: bool
    key_mask: Tensor | None
    scale: float | None
    _chosen: list[BlockIndex] = field(default_factory=list)
    _heads: list[int] = field(default_factory=list)
    """Heads of all batch elements, of the call and then of each index."""
    _grid: TileGrid | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float = 0.0) -> Tensor:
        """Compute the attention ``[B, H, N, D]``."""
        heads, n_queries, n_keys, mask = query.shape[1], query.shape[2], key.shape[2], self.key_mask
        self._grid = TileGrid(self.chooser.choice.block, n_keys - n_queries, n_queries, n_keys)
        self._heads[:1] = [len(query) * heads]
        # Empty in the first call. A recomputed one takes the same indices in the same order.
        indices = iter(self._chosen[:])
        if not self.branches:
            index = self._choose(query, key, mask, indices)
            return sparse_attention(query, key, value, index, key_mask=mask, scale=self.scale, dropout_p=dropout_p)
        rules = rules_of(self.branches, None, self.is_causal, "mix", heads)
        assert rules is not None, "branches that are mixed always have rules"
        warn_of_uncovered(self.branches, heads, n_keys - n_queries, n_queries)
        call, parts = make_call(query, dropout_p=dropout_p, scale=self.scale), []
        for part in parts_of(query, key, rules, call, is_masked=mask is not None):
            tensors, kept = part.read(query, key, value, mask)
            parts.append(part._replace(rule=self._choose(*tensors[:2], kept, indices)))
        return composed(query, key, value, Parts(lambda source: parts, mask))[0]

    def _choose(self, query: Tensor, key: Tensor, key_mask: Tensor | None, earlier: Iterator[BlockIndex]) -> BlockIndex:
        index = next(earlier, None)
        if index is None:
            options: dict[str, Any] = {"is_causal": self.is_causal, "key_mask": key_mask, "scale": self.scale}
            index = self.chooser.index(query, key, self.pattern, **options)
            self._chosen.append(index)
            self._heads.append(query.shape[0] * query.shape[1])
        return index

    @property
    def tile_density(self) -> float:
        """The tiles of the call over those of dense attention on the whole sequence."""
        if self._grid is None:
            return math.nan
        # The mean over the heads of each index, for each head of its call: one head of an index can stand for all.
        heads, *of_indices = self._heads
        parts = zip(self._chosen, of_indices, strict=True)
        kept = sum(index.kept_tiles * times / index.group.numel() for index, times in parts)
        allowed = count_allowed(Causal() if self.is_causal else Dense(), self._grid, torch.device("cpu"))[1]
        return kept / (allowed * heads) if allowed * heads else math.nan


BlockSparseOptimized = BlockSparseRingDilatedAttention
"""Alias of `BlockSparseRingDilatedAttention`, which always computes blocks in batches and remembers patterns."""

BlockSparseTorchSparse = BlockSparseRingDilatedAttention
"""Alias of `BlockSparseRingDilatedAttention`: `torch.sparse` gives the same result, more slowly."""


class RingDilatedAttentionV2(BlockSparseRingDilatedAttention):
    """LongNet's dilated attention: `BlockSparseRingDilatedAttention` that keeps all pairs inside a segment by default.

    The other arguments are those of `BlockSparseRingDilatedAttention`, and so are the errors.

    >>> attention = RingDilatedAttentionV2([128, 256], [1, 2])
    >>> attention(torch.randn(1, 500, 2, 16), is_causal=True).shape
    torch.Size([1, 500, 2, 16])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        ring_size: int = 1,
        **further: Any,
    ) -> None:
        further["sparse_config"] = further.get("sparse_config") or SparsePatternConfig(sparsity_ratio=1.0)
        super().__init__(segment_lengths, dilation_rates, dropout=dropout, ring_size=ring_size, **further)


ImprovedDilatedAttention = RingDilatedAttentionV2
"""Alias of `RingDilatedAttentionV2`, which attends over tokens and not over heads."""


@dataclass
class RingAttentionConfig:
    """Arguments of `RingDilatedAttentionProduction`, described in `BlockSparseRingDilatedAttention`.

    >>> RingAttentionConfig([128, 256], [1, 2]).use_gradient_checkpointing
    True
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    dropout: float = 0.0
    ring_size: int = 1
    use_gradient_checkpointing: bool = True
    attention_scale: float | None = None


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` built from a configuration, with gradient checkpointing by default.

    >>> attention = RingDilatedAttentionProduction(RingAttentionConfig([128, 256], [1, 2]))
    >>> attention(torch.randn(1, 500, 2, 16)).shape
    torch.Size([1, 500, 2, 16])
    """

    def __init__(self, config: RingAttentionConfig) -> None:
        super().__init__(**vars(config))
        self.config = config


def hierarchical_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor, *, is_causal: bool = False, block_size: int = 128
) -> Tensor:
    """Compute attention on the blocks that a pattern touches, refined inside them to the kept pairs: one softmax.

    ``q``, ``k`` and ``v`` are ``[B, N, H, D]``. ``pattern`` is a `ringtile.patterns.Pattern`, refined to pairs, or a
    bool matrix of whole blocks ``[rows, columns]`` or ``[H, rows, columns]``, of ``block_size`` tokens per side. Raises
    ValueError if shapes are invalid, or if ``block_size`` is given beside a Pattern.

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


def self_attention_if_alone(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return key and value, or the query for both if neither is given. Raises ValueError if only one is."""
    if key is not None and value is not None:
        return key, value
    if key is not value:
        missing = "key" if key is None else "value"
        raise ValueError(f"{missing}: expected key and value, or neither for self-attention, got None for {missing}")
    return query, query


def _checked_tokens(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    key, value = self_attention_if_alone(query, key, value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected four dimensions [B, N, H, D], got {x.shape=}")
    return key, value


def tokens_first(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor | None, value: Tensor | None, **options: Any
) -> Tensor:
    """Return an attention over ``[B, H, N, D]`` for ``[B, N, H, D]``. The query alone is self-attention."""
    key, value = _checked_tokens(query, key, value)
    return attend(*(x.transpose(1, 2) for x in (query, key, value)), **options).transpose(1, 2)


def with_weights(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    block_size: int,
    ranks: int,
    **options: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """Return `tokens_first`, and the weights of its softmax in blocks, as its gradients and dropout have them.

    ``block_indices`` lists the blocks (row, column) that have a weight other than 0, ``block_values`` their weights
    ``[B, H, rows, columns]``. The last block of a row or a column can be shorter than ``block_size``. ``shape`` is
    ``(B, H, N, M)``, and ``num_blocks`` the numbers of rows and columns of blocks.
    """
    if ranks > 1:
        raise ValueError(
            f"return_attention_weights: expected False with {ranks} ranks, because a rank has no columns for the keys "
            "of the others"
        )
    key, value = _checked_tokens(query, key, value)
    (batch, n_queries, heads), n_keys = query.shape[:3], value.shape[1]
    if batch * heads * n_queries * n_keys > MAX_WEIGHTS:
        raise ValueError(
            f"return_attention_weights: expected at most {MAX_WEIGHTS:,} weights, got {query.shape=}, {key.shape=}"
        )
    # Attention is linear in the value, so the identity matrix as value returns the weights.
    unit = torch.eye(n_keys, dtype=value.dtype, device=value.device)[:, None].expand(*value.shape[:3], -1)
    out, weights = tokens_first(attend, query, key, torch.cat([value, unit], -1), **options).tensor_split(
        [value.shape[-1]], -1
    )
    rows = weights.transpose(1, 2).split(block_size, 2)
    blocks = {
        (row, column): block
        for row, of_row in enumerate(rows)
        for column, block in enumerate(of_row.split(block_size, 3))
        if block.any()
    }
    return out, {
        "block_indices": list(blocks),
        "block_values": list(blocks.values()),
        "block_size": block_size,
        "shape": (batch, heads, n_queries, n_keys),
        "num_blocks": (len(rows), -(-n_keys // block_size)),
    }


def _check_ring_size(ring_size: int) -> None:
    # PyTorch can be built without torch.distributed.
    has_group = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if has_group else 1
    if isinstance(ring_size, bool) or ring_size not in (1, ranks):
        expected = f"the number of ranks, {ranks}" if has_group else "a process group, which init_process_group() makes"
        raise ValueError(f"ring_size: expected 1 or {expected}, got {ring_size!r}")
