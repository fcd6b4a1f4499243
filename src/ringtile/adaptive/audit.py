"""Exact attention of a few rows, drawn with a seed: how much of it an index keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.functional.attention import attend_scores, check_index, check_options, checked_tensors
from ringtile.index import BlockIndex
from ringtile.kernels.contracts import scale_of
from ringtile.patterns import Pattern
from ringtile.patterns.checks import check_positive
from ringtile.patterns.grammar import as_rule

_SCORES = 1 << 22
"""Most scores that exist at once, in each of a few tensors."""


class Share(NamedTuple):
    """A share of rows, and the bounds of its confidence interval. Float64 ``[B, H]``."""

    share: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class QualityReport:
    """Exact figures of audited rows. Each row is a query of one head and batch element; `audit` makes a report.

    Rows without a key in the reference are NaN, and no figure counts them.
    """

    rows: Tensor
    """int64 ``[R]``: the audited queries, counted from 0, ascending."""
    recall: Tensor
    """float64 ``[B, H, R]``: the part of the row's attention weights that the index keeps, from 0 to 1."""
    error: Tensor
    """float64 ``[B, H, R]``: the norm of the difference between the row's output and its exact output."""
    norm: Tensor
    """float64 ``[B, H, R]``: the norm of the exact output."""
    bound: Tensor
    """float64 ``[B, H, R]``: an upper bound of the error, ``2 (1 - recall)`` times the largest norm of a value."""

    @property
    def mean(self) -> float:
        """Mean recall of all rows."""
        return float(self.recall.nanmean())

    @property
    def p5(self) -> float:
        """Recall that 5% of the rows do not reach."""
        return float(self.recall.nanquantile(0.05))

    @property
    def of_heads(self) -> Tensor:
        """Mean recall of each head, ``[H]``."""
        return self.recall.nanmean((0, 2))

    @property
    def worst_head(self) -> float:
        """Mean recall of the head that has least."""
        return float(self.of_heads.nan_to_num(math.inf).min())

    @property
    def relative_error(self) -> float:
        """Root of the mean squared error, over that of the exact outputs."""
        return float((self.error.square().nanmean() / self.norm.square().nanmean()).sqrt())

    def below(self, recall: float) -> Share:
        """Return the share of each head's rows whose recall is lower, with its 95% interval for all its rows.

        The interval is exact (Clopper and Pearson, 1934): rows are drawn uniformly, without replacement. Raises
        ValueError if ``recall`` is out of range.
        """
        if not 0 < recall < 1:
            raise ValueError(f"recall: expected a number between 0 and 1, got {recall!r}")
        lower, count = (rows.sum(2).cpu().double() for rows in (self.recall < recall, self.recall.isfinite()))
        return Share(lower / count, *_interval(lower, count))

    def __repr__(self) -> str:
        return (
            f"QualityReport(recall {self.mean:.3f}, 5% of rows below {self.p5:.3f}, worst head {self.worst_head:.3f}, "
            f"output error {self.relative_error:.3f}; {self.recall.shape[2]} rows of {self.recall.shape[1]} heads)"
        )


def audit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex,
    *,
    reference: BlockIndex | Pattern | str | None = None,
    rows: int = 64,
    seed: int = 0,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> QualityReport:
    """Compute some rows of attention exactly, and return what an index keeps of them.

    It computes ``rows`` rows of scores per head, in chunks, so the cost is that of as many queries of dense attention.

    Args:
        query, key, value: ``[B, H, Nq, D]``, ``[B, Hkv, Nk, D]`` and ``[B, Hkv, Nk, Dv]``. Hkv must divide H.
        index: The kept pairs.
        reference: The pairs of exact attention, an index or a pattern. Default: the causal and document rules of
            the index.
        rows: Number of queries to draw, the same for all heads and batch elements.
        seed: Seed of the draw.
        key_mask: ``[B, Nk]`` bool, True for keys that queries may attend to.
        scale: Factor for the scores. Default: ``D ** -0.5``.

    Raises ValueError if shapes, dtypes or devices do not match, or ``rows`` is not positive.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal, Window
    >>> q, k, v = torch.randn(3, 1, 2, 1000, 32, generator=torch.Generator().manual_seed(0)).unbind()
    >>> report = audit(q, k, v, build_index(Causal() & Window(500), 1000, num_heads=2))
    >>> report.recall.shape, 0.8 < report.mean < 1
    (torch.Size([1, 2, 64]), True)
    """
    query, key, value = checked_tensors(query, key, value, enable_gqa=True)
    (batch, heads, n_queries), n_keys = query.shape[:3], key.shape[2]
    if not isinstance(index, BlockIndex):
        raise ValueError(f"index: expected a BlockIndex, got {type(index).__name__}")
    check_index("index", index, query, n_keys)
    check_positive(rows=rows)
    check_options(query, key, key_mask=key_mask, scale=scale)
    if not isinstance(reference, BlockIndex | None):
        reference = as_rule(reference)
    elif reference is not None and (reference.grid != index.grid or reference.device != index.device):
        raise ValueError(f"reference: expected the lengths, block and device of {index!r}, got {reference!r}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(n_queries, generator=generator, device="cpu")[:rows].sort().values.to(query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = scale_of(query, scale)
    # Rows that do not see such a value keep their figures, and those that do get NaN below.
    finite = value.isfinite().all(3)
    # A weight of 0 times infinity would be NaN.
    safe, norms = (x.repeat_interleave(heads // key.shape[1], 1) for x in (value.where(finite[..., None], 0), value))
    safe, norms = safe.to(wide), norms.to(wide).norm(dim=3)
    keys = key.to(wide).repeat_interleave(heads // key.shape[1], 1)
    found: list[tuple[Tensor, ...]] = []
    for some in drawn.split(max(1, _SCORES // max(1, batch * heads * n_keys))):
        # An index may hold pairs outside the reference. They are no part of exact attention.
        allowed = _pairs(index, reference, some)
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None]
        kept = index.keys_of(some) & allowed
        scores = query[:, :, some].to(wide) @ keys.mT * scale
        (exact, lse), (out, kept_lse) = (attend_scores(scores, pairs, safe) for pairs in (allowed, kept))
        recall = (kept_lse - lse).exp().double().clamp(max=1).masked_fill(lse == -math.inf, math.nan)
        largest = norms.unsqueeze(2).masked_fill(~allowed, 0).amax(3).double()
        error, norm = (x.norm(dim=3).double() for x in (exact - out, exact))
        # A row that sees a value without a number has no number either.
        spoilt = recall.isnan() | largest.isnan() | largest.isinf()
        figures = recall, error, norm, 2 * (1 - recall) * largest
        found.append(tuple(x.masked_fill(spoilt, math.nan) for x in figures))
    recall, error, norm, bound = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return QualityReport(drawn, recall, error, norm, bound)


def _pairs(index: BlockIndex, reference: BlockIndex | Pattern | None, queries: Tensor) -> Tensor:
    """Return the pairs of the reference in some rows, bool ``[B or 1, H or 1, R, Nk]``."""
    if isinstance(reference, BlockIndex):
        return reference.keys_of(queries)
    position, key = (index.start + queries).unsqueeze(1), torch.arange(index.n_keys, device=index.device)
    heads = index.group.shape[1] if reference is None or reference.num_heads is None else reference.num_heads
    head = torch.arange(heads, device=index.device)[:, None, None]
    rules = index.envelopes
    if reference is not None:
        rules = tuple(reference.batch_row(b) for b in range(reference.batch_size or 1))
    return torch.stack([rule.allowed(head, position, key).expand(heads, len(queries), -1) for rule in rules])


def _interval(count: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact 95% intervals of probabilities, from ``count`` of ``total`` draws, both float64."""
    most, draws = count.unsqueeze(-1), total.unsqueeze(-1)
    number = torch.arange(int(total.max()) + 1, dtype=torch.float64, device=total.device)
    # A head with fewer draws than another has no ways to more of them: the logarithm is minus infinity there.
    ways = (draws + 1).lgamma() - (number + 1).lgamma() - (draws - number + 1).lgamma()

    def solve(most: Tensor, goal: float) -> Tensor:
        """Bisect for the probabilities with which at most so many draws have the probability ``goal``."""
        low, high = torch.zeros_like(draws), torch.ones_like(draws)
        for _ in range(60):
            middle = (low + high) / 2
            terms = ways + number * middle.log() + (draws - number) * (-middle).log1p()
            above = terms.exp().masked_fill(number > most, 0).sum(-1, keepdim=True) > goal
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return ((low + high) / 2).squeeze(-1)

    tail = 0.025
    return solve(most - 1, 1 - tail).masked_fill(count == 0, 0), solve(most, tail).masked_fill(count == total, 1)
