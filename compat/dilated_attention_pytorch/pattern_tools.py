"""Look at a pattern of blocks: statistics, pictures, and how much of dense attention it keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.adaptive import audit
from ringtile.index import build_index
from ringtile.patterns import Blocks, Causal, Dense
from ringtile.tools.plot import missing_matplotlib, picture, plot_pattern


def pattern_statistics(pattern: Tensor) -> dict[str, float]:
    """Count the blocks of a pattern, bool ``[blocks, blocks]`` or ``[num_heads, blocks, blocks]``.

    ``density`` is active over all blocks, ``avg_row_density``, ``min_row_density`` and ``max_row_density`` are the
    densities of rows, ``diagonal_density`` is the fraction of the diagonal that is kept. ``total_blocks`` and
    ``active_blocks`` count over all heads. ``sparsity_ratio``, ``total_elements`` and ``active_elements`` are the
    density and the counts by their older names, and ``density_ratio`` is ``1 - sparsity_ratio``. Raises ValueError if
    ``pattern`` is no such tensor.

    >>> statistics = pattern_statistics(torch.eye(4, dtype=torch.bool))
    >>> statistics["avg_row_density"], statistics["diagonal_density"]
    (0.25, 1.0)
    """
    blocks = _checked("pattern", pattern).double()
    rows, density = blocks.mean(-1), blocks.mean().item()
    total, active = blocks.numel(), int(blocks.sum())
    return {
        "density": density,
        "sparsity_ratio": density,
        "density_ratio": 1 - density,
        "avg_row_density": rows.mean().item(),
        "min_row_density": rows.min().item(),
        "max_row_density": rows.max().item(),
        "diagonal_density": blocks.diagonal(dim1=-2, dim2=-1).mean().item(),
        "avg_col_density": blocks.mean(-2).mean().item(),
        "total_blocks": total,
        "total_elements": total,
        "active_blocks": active,
        "active_elements": active,
    }


analyze_pattern_statistics = pattern_statistics
"""`pattern_statistics` under its other old name."""


class PatternVisualizer:
    """Draws patterns of blocks.

    >>> print(PatternVisualizer().visualize_pattern(torch.eye(3, dtype=torch.bool), title="diagonal"))
    diagonal
    █··
    ·█·
    ··█
    """

    def visualize_pattern(
        self, pattern: Tensor, title: str | None = None, save_path: str | Path | None = None, *, head: int = 0
    ) -> str:
        """Draw one head of a pattern, bool ``[blocks, blocks]`` or ``[num_heads, blocks, blocks]``, as text.

        With ``save_path`` (.png, .svg or .pdf) a picture is written too. Raises ValueError if ``pattern`` is no such
        tensor, if ``head`` or the ending of the path is invalid, or if matplotlib is missing for a picture.
        """
        blocks = _checked("pattern", pattern)
        if not 0 <= head < len(blocks):
            raise ValueError(f"head: expected one of {len(blocks)}, got {head}")
        if save_path is not None:
            if (reason := missing_matplotlib()) is not None:
                raise ValueError(f"save_path: {reason}")
            n_queries, n_keys = (128 * size for size in blocks.shape[1:])
            index = build_index(Blocks(blocks[head]), n_queries, n_keys, start=0)
            with picture(Path(save_path), 6.6, 6.2) as figure:
                plot_pattern(index, figure.add_subplot()).set_title(title or "")
        # One token per block, so that a character is a block.
        drawn = Blocks(blocks[head], block=1).draw(*blocks.shape[1:], start=0)
        return drawn if title is None else f"{title}\n{drawn}"


class PatternMetrics(NamedTuple):
    """The result of `PatternQualityAnalyzer`: means over rows, heads and batch."""

    coverage_ratio: float
    """Weight of dense attention on the kept blocks."""
    locality_score: float
    """Kept blocks on the diagonal or next to it, over all kept blocks."""
    efficiency_score: float
    """All blocks over the kept blocks."""
    approximation_error: float
    """Relative L2 error of the weights after the kept weights of each row are scaled to sum to 1, or of the output."""
    global_connectivity: float
    """Pairs of blocks that a chain of kept blocks joins, over all pairs; NaN unless there are as many rows as columns.

    If block row 3 keeps column 1 and block row 1 keeps column 0, then a chain joins 3 and 0.
    """
    compression_ratio: float
    """Fraction of the blocks that is left out."""


class PatternQualityAnalyzer:
    """Compares a pattern of blocks with dense attention.

    >>> weights = torch.full((1, 2, 8, 8), 1 / 8)
    >>> metrics = PatternQualityAnalyzer().analyze_pattern_quality(torch.eye(4, dtype=torch.bool), weights)
    >>> metrics.coverage_ratio, metrics.efficiency_score
    (0.25, 4.0)
    """

    def analyze_pattern_quality(
        self,
        sparse_pattern: Tensor,
        reference_attention: Tensor | None = None,
        *,
        inputs: tuple[Tensor, Tensor, Tensor] | None = None,
        is_causal: bool = False,
        rows: int = 64,
        seed: int = 0,
    ) -> PatternMetrics:
        """Measure a pattern, bool ``[blocks, blocks]`` or ``[H, blocks, blocks]``, against exact attention.

        The reference is either weights ``[..., H, N, M]`` or the ``inputs``: query, key and value ``[B, N, H, D]``.
        Of the inputs, ``rows`` queries are drawn with the ``seed`` and computed exactly (`ringtile.adaptive.audit`), so
        no matrix of weights is needed at any length. ``approximation_error`` is then that of the output.

        The blocks are ``ceil(N / rows)`` by ``ceil(M / columns)`` tokens. Raises ValueError if there is no reference or
        more than one, if ``is_causal`` comes with weights, which have their own mask, or if the shapes do not match.

        >>> q, k, v = torch.randn(3, 1, 1000, 2, 16).unbind()
        >>> pattern = torch.ones(8, 8, dtype=torch.bool).tril()
        >>> PatternQualityAnalyzer().analyze_pattern_quality(pattern, inputs=(q, k, v), is_causal=True).coverage_ratio
        1.0
        """
        if inputs is not None:
            if reference_attention is not None:
                raise ValueError("reference_attention, inputs: expected one of them, got both")
            return _audited(_checked("sparse_pattern", sparse_pattern), inputs, is_causal, rows, seed)
        if is_causal:
            raise ValueError("is_causal: weights have their own mask; expected it beside inputs alone")
        blocks = _checked("sparse_pattern", sparse_pattern)
        weights = reference_attention
        if weights is None or weights.dim() < 2 or len(blocks) not in (1, *weights.shape[-3:-2]):
            raise ValueError(
                "reference_attention: expected the weights of dense attention [..., H, N, M] with the heads of "
                f"{sparse_pattern.shape=}, got {None if weights is None else tuple(weights.shape)}; pass inputs="
                "(query, key, value) instead, or use pattern_statistics without a reference"
            )
        kept = blocks
        # 10 tokens in 4 blocks are blocks of 3, 3, 3 and 1: each block is repeated 3 times and the rest is cut.
        for dim, tokens in ((1, weights.shape[-2]), (2, weights.shape[-1])):
            side = -(-tokens // blocks.shape[dim])
            kept = kept.repeat_interleave(side, dim).narrow(dim, 0, tokens)
        weights = weights.double()
        of_kept = torch.where(kept, weights, 0.0)
        mass = of_kept.sum(-1, keepdim=True)
        # A row whose kept weights are all 0 stays 0 instead of NaN.
        renewed = of_kept / torch.where(mass == 0, 1.0, mass)
        error = ((renewed - weights).norm() / weights.norm()).item()
        return _metrics(blocks, (mass.sum() / weights.sum()).item(), error)


def _audited(
    blocks: Tensor, inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool, rows: int, seed: int
) -> PatternMetrics:
    query, key, value = (x.transpose(1, 2) for x in inputs)
    n_queries, n_keys = query.shape[2], key.shape[2]
    side, of_keys = -(-n_queries // blocks.shape[1]), -(-n_keys // blocks.shape[2])
    if side != of_keys or len(blocks) not in (1, query.shape[1]) or key.shape[1] != query.shape[1]:
        raise ValueError(
            f"inputs: expected [B, N, H, D] with the heads and square blocks of {tuple(blocks.shape)}, got "
            f"{inputs[0].shape}, {inputs[1].shape}"
        )
    reference = Causal() if is_causal else Dense()
    rule = reference & Blocks(blocks if len(blocks) > 1 else blocks[0], block=side)
    index = build_index(rule, n_queries, n_keys, num_heads=query.shape[1], device=query.device)
    report = audit(query, key, value, index, reference=reference, rows=rows, seed=seed)
    return _metrics(blocks, report.mean, report.relative_error)


def _metrics(blocks: Tensor, coverage: float, error: float) -> PatternMetrics:
    # The three middle diagonals: a block and its two neighbors.
    near, active = blocks.tril(1).triu(-1), int(blocks.sum())
    return PatternMetrics(
        coverage_ratio=coverage,
        locality_score=int(near.sum()) / max(active, 1),
        efficiency_score=blocks.numel() / active if active else float("inf"),
        approximation_error=error,
        global_connectivity=_connectivity(blocks),
        compression_ratio=1 - active / blocks.numel(),
    )


def _connectivity(blocks: Tensor) -> float:
    rows, columns = blocks.shape[1:]
    if rows != columns:
        return math.nan
    chains = blocks.float()
    # Chains of at most 1, 2, 4, ... blocks: two that meet are one of at most twice the length.
    for _ in range(rows.bit_length()):
        chains = (chains + chains @ chains).clamp(max=1)
    return chains.mean().item()


def _checked(name: str, pattern: Tensor) -> Tensor:
    """Return the pattern as ``[heads, rows, columns]``."""
    if pattern.dtype != torch.bool or pattern.dim() not in (2, 3) or pattern.numel() == 0:
        raise ValueError(
            f"{name}: expected bool [blocks, blocks] or [num_heads, blocks, blocks], got {pattern.dtype=}, "
            f"{pattern.shape=}"
        )
    return pattern if pattern.dim() == 3 else pattern[None]
