"""Attention over the tiles that scores and a budget choose."""

from typing import Any, Unpack

from torch import Tensor, nn

from ringtile.adaptive.budgets import Budget, Density
from ringtile.adaptive.cache import AdaptiveCache
from ringtile.adaptive.choice import DEFAULT_SCORES, Choice, ChoiceOptions
from ringtile.adaptive.control import Controller, ControlReport
from ringtile.adaptive.scores import Scores
from ringtile.adaptive.view import View
from ringtile.functional import sparse_attention
from ringtile.functional.attention import checked_tensors
from ringtile.index import BlockIndex
from ringtile.patterns import Pattern


class AdaptiveAttention(nn.Module):
    """Attention over the tiles that scores and a budget choose, as ``attend=`` of a module.

    Args:
        scores: See `Choice`.
        budget: See `Choice`. A `Controller` holds a quality: ``budget=Controller(0.95)``.
        **options: ``block``, ``first``, ``local``, ``last_dense``, ``min_length`` and ``allow_future``, see `Choice`.

    Raises ValueError if an argument is out of range, or as `select`, when called.

    >>> import torch
    >>> from ringtile import SparseTransformer
    >>> attend = AdaptiveAttention(budget=Density(0.1), block=32)
    >>> model = SparseTransformer(2, 64, 4, is_causal=True, attend=attend).eval()
    >>> with torch.no_grad():
    ...     model(torch.randn(1, 1000, 64)).shape
    torch.Size([1, 1000, 64])
    """

    def __init__(
        self,
        scores: Scores = DEFAULT_SCORES,
        budget: Budget | Controller = Density(0.25),  # noqa: B008
        **options: Unpack[ChoiceOptions],
    ) -> None:
        super().__init__()
        self.choice = Choice(scores, budget, **options)

    @property
    def report(self) -> ControlReport | None:
        """What the `Controller` chose and saw in the last call, or None."""
        return self.choice.budget.report if isinstance(self.choice.budget, Controller) else None

    def extra_repr(self) -> str:
        return f"{self.choice.scores!r}, {self.choice.budget!r}, block={self.choice.block}"

    def new_cache(self, rule: Pattern) -> AdaptiveCache:
        """Return an empty cache for generation over the pairs of a rule, see `AdaptiveCache`."""
        return AdaptiveCache(self.choice, rule)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | str | BlockIndex | None = None,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Any:
        """Compute the attention as `sparse_attention` does, over the chosen tiles of the pattern.

        ``options`` are those of `sparse_attention` that do not change which pairs are kept.
        """
        if taken := {"key_lengths", "start"} & options.keys():
            raise ValueError(f"{sorted(taken)[0]}: adaptive attention takes a key_mask and queries at the end instead")
        query, key, value = checked_tensors(query, key, value, enable_gqa)
        if key.shape[2] < self.choice.min_length and not isinstance(pattern, BlockIndex):
            # The index of a pattern is cached, and PyTorch's own kernel may be the fastest for it.
            options |= {"is_causal": is_causal, "key_mask": key_mask, "scale": scale, "enable_gqa": enable_gqa}
            return sparse_attention(query, key, value, pattern, **options)
        view = self.choice.view(query, key, pattern, is_causal=is_causal, key_mask=key_mask, scale=scale)
        return self.over(self.choice.index(view), view, value, enable_gqa=enable_gqa, **options)

    def over(self, index: BlockIndex, view: View, value: Tensor, **options: Any) -> Any:
        """Compute the attention of a view's queries and keys over an index of its tiles."""
        options |= {"key_mask": view.key_mask, "scale": view.scale}
        return sparse_attention(view.query, view.key, value, index, **options)

    def index(
        self, query: Tensor, key: Tensor, pattern: Pattern | str | BlockIndex | None = None, **options: Any
    ) -> BlockIndex:
        """Return the index of the tiles that a call keeps. ``options`` are those of `Choice.view`."""
        return self.choice.index(self.choice.view(query, key, pattern, **options))
