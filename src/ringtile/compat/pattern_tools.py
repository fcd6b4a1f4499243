"""Look at a pattern of blocks: statistics, pictures, and how much of dense attention it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.analysis.plot import missing_matplotlib, picture, plot_pattern
from ringtile.layout import build_index
from ringtile.patterns import Blocks


def pattern_statistics(pattern: Tensor) -> dict[str, float]:
    """Counts and fractions of a pattern of blocks, bool ``[blocks, blocks]`` or ``[num_heads, blocks, blocks]``.

    ``density`` is active over all blocks; ``avg_row_density``, ``min_row_density`` and ``max_row_density`` are those of
    rows; ``diagonal_density`` is the fraction of the diagonal that is kept; ``total_blocks`` and ``active_blocks``
    count over all heads. Raises ValueError where ``pattern`` is no such tensor.

    >>> statistics = pattern_statistics(torch.eye(4, dtype=torch.bool))
    >>> statistics["avg_row_density"], statistics["diagonal_density"]
    (0.25, 1.0)
    """
    blocks = _checked("pattern", pattern).double()
    rows = blocks.mean(-1)
    return {
        "density": blocks.mean().item(),
        "avg_row_density": rows.mean().item(),
        "min_row_density": rows.min().item(),
        "max_row_density": rows.max().item(),
        "diagonal_density": blocks.diagonal(dim1=-2, dim2=-1).mean().item(),
        "total_blocks": blocks.numel(),
        "active_blocks": int(blocks.sum()),
    }


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

        With ``save_path`` (.png, .svg or .pdf) a picture is written too. Raises ValueError where ``pattern`` is no such
        tensor, ``head`` is not one of it, the path ends in something else, or there is no matplotlib for it.
        """
        blocks = _checked("pattern", pattern)
        if not 0 <= head < len(blocks):
            raise ValueError(f"head: expected one of {len(blocks)}, got {head}")
        rule = Blocks(blocks[head], block=128)
        n_queries, n_keys = (128 * size for size in blocks.shape[1:])
        if save_path is not None:
            if (reason := missing_matplotlib()) is not None:
                raise ValueError(f"save_path: {reason}")
            with picture(Path(save_path), 6.6, 6.2) as figure:
                axes = plot_pattern(build_index(rule, n_queries, n_keys, start=0), figure.add_subplot())
                if title is not None:
                    axes.set_title(title)
        small = Blocks(blocks[head], block=1)
        drawn = small.draw(*blocks.shape[1:], start=0)
        return drawn if title is None else f"{title}\n{drawn}"


class PatternMetrics(NamedTuple):
    """What `PatternQualityAnalyzer` finds; means over rows, heads and batch."""

    coverage_ratio: float
    """Weight of dense attention on the kept blocks."""
    locality_score: float
    """Kept blocks on the diagonal or next to it, over all kept ones."""
    efficiency_score: float
    """All blocks over the kept ones."""
    approximation_error: float
    """Relative L2 error of the weights, once those kept are made to sum to 1 again."""


class PatternQualityAnalyzer:
    """Compares a pattern of blocks with the weights of dense attention.

    >>> weights = torch.full((1, 2, 8, 8), 1 / 8)
    >>> metrics = PatternQualityAnalyzer().analyze_pattern_quality(torch.eye(4, dtype=torch.bool), weights)
    >>> metrics.coverage_ratio, metrics.efficiency_score
    (0.25, 4.0)
    """

    def analyze_pattern_quality(self, sparse_pattern: Tensor, reference_attention: Tensor) -> PatternMetrics:
        """Measure a pattern, bool ``[blocks, blocks]`` or ``[H, blocks, blocks]``, on weights ``[..., H, N, M]``.

        The blocks are ``ceil(N / rows)`` by ``ceil(M / columns)`` tokens. Raises ValueError where the shapes do not
        fit.
        """
        blocks = _checked("sparse_pattern", sparse_pattern)
        heads = reference_attention.shape[-3:-2]
        if len(blocks) not in (1, *heads) or reference_attention.dim() < 2:
            raise ValueError(
                f"reference_attention: expected [..., H, N, M] with the heads of {sparse_pattern.shape=}, "
                f"got {reference_attention.shape=}"
            )
        n_queries, n_keys = reference_attention.shape[-2:]
        sides = [-(-tokens // count) for tokens, count in zip((n_queries, n_keys), blocks.shape[1:], strict=True)]
        kept = blocks.repeat_interleave(sides[0], 1).repeat_interleave(sides[1], 2)[:, :n_queries, :n_keys]
        weights = reference_attention.double()
        of_kept = torch.where(kept, weights, 0.0)
        mass = of_kept.sum(-1, keepdim=True)
        renewed = of_kept / torch.where(mass == 0, 1.0, mass)
        rows, columns = torch.arange(blocks.shape[1])[:, None], torch.arange(blocks.shape[2])
        near = (rows - columns).abs() <= 1
        active = int(blocks.sum())
        return PatternMetrics(
            coverage_ratio=(mass.sum() / weights.sum()).item(),
            locality_score=int((blocks.cpu() & near).sum()) / max(active, 1),
            efficiency_score=blocks.numel() / active if active else float("inf"),
            approximation_error=((renewed - weights).norm() / weights.norm()).item(),
        )


def _checked(name: str, pattern: Tensor) -> Tensor:
    """The pattern as ``[heads, rows, columns]``."""
    if pattern.dtype != torch.bool or pattern.dim() not in (2, 3) or pattern.numel() == 0:
        raise ValueError(
            f"{name}: expected bool [blocks, blocks] or [num_heads, blocks, blocks], got {pattern.dtype=}, "
            f"{pattern.shape=}"
        )
    return pattern if pattern.dim() == 3 else pattern[None]
