"""Generation with adaptive attention: each step reads the tiles that a call over all tokens would choose."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.adaptive.choice import Choice, forced_tiles
from ringtile.adaptive.control import Controller
from ringtile.adaptive.view import Summaries, View, summaries
from ringtile.functional import sparse_attention
from ringtile.functional.attention import checked_tensors
from ringtile.functional.cache import HeldKeys, LayerCache
from ringtile.index import BlockIndex
from ringtile.patterns import Pattern, TileGrid


class AdaptiveCache(LayerCache):
    """Keys and values of one layer with adaptive attention. It holds all tokens, and a step reads the chosen tiles.

    Each call returns the last rows of a call over all tokens so far, with the same choice up to rounding. If the scores
    have rows of tiles, the first token of a tile chooses for all of them: `Probe` then reads all keys once per
    ``block`` tokens. If each token chooses, it reads the summaries of the past tiles first. ``min_length`` counts the
    tokens so far.

    Args:
        choice: Scores and budget that decide by row, without later tokens.
        pattern: The pairs to choose from. It must not keep later keys.

    Raises ValueError if the scores are not causal-safe, the budget is a `Controller`, ``last_dense`` is
    set (each token is the last one once), or the pattern is bound to a length or keeps later keys.

    >>> from ringtile.adaptive import AdaptiveAttention, Density, Probe
    >>> from ringtile.patterns import Causal
    >>> cache = AdaptiveAttention(Probe("first"), Density(0.25), block=16, first=0, local=0).new_cache(Causal())
    >>> for tokens in (200, 1, 1):
    ...     out = cache.attend(*torch.randn(3, 1, 4, tokens, 16).unbind())
    >>> out.shape, cache.length, cache.index.kept_tiles
    (torch.Size([1, 4, 1, 16]), 202, 16)
    """

    def __init__(self, choice: Choice, pattern: Pattern) -> None:
        super().__init__(pattern)
        check_by_row(choice)
        if not self.pattern.unbounded:
            raise ValueError(f"pattern: a cache of tiles needs a rule for any length, got {self.pattern!r}")
        # A later token may choose any tile, so nothing is dropped, even if the pattern bounds how far it looks.
        self.capacity = None
        self.choice = choice
        self.index: BlockIndex | None = None
        """The tiles of the last call, its queries over all keys."""
        self._open: Tensor | None = None
        """Bool ``[B, H, 1, C]``, the choice for a row tile that further tokens belong to, if tiles choose."""
        self._pages: Summaries | None = None
        """The complete tiles of keys, and room for the one that is not, if tokens choose."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Compute attention of the next N tokens, as `LayerCache.attend` does, over the chosen tiles."""
        query, key, value = checked_tensors(query, key, value, enable_gqa=True)
        start, n_new = self.length, key.shape[2]
        seen, mask = self._extended(query, key, value, key_mask)
        with torch.no_grad():
            self.index = self._choose(query, seen, mask, TileGrid(self.choice.block, start, n_new, self.length))
        return sparse_attention(query, seen.key, seen.value, self.index, key_mask=mask, enable_gqa=True)

    def _choose(self, query: Tensor, seen: HeldKeys, mask: Tensor | None, grid: TileGrid) -> BlockIndex:
        """Return the index of the queries of a grid."""
        least = self.choice.min_length
        if self.choice.scores.per_token:
            view = replace(self._view(query, seen, mask), known=self._grown(seen, grid))
            keep = self._chosen(view, view.base.row_of(torch.arange(grid.n_queries, device=query.device)))
        else:
            last, follows = self.index, grid.start % grid.block != 0 and grid.start >= least
            if last is not None and follows and last.n_rows == grid.n_rows == 1:
                # The same tiles, for later tokens of the row tile.
                return last.at(grid)
            keep = self._keep_of_tiles(query, seen, mask, grid)
        base = self._view(query, seen, mask).base
        if self.length < least:
            return base
        return base.restricted(keep) if keep.shape[2] == base.n_rows else base.restricted_rows(keep)

    def _view(self, query: Tensor, seen: HeldKeys, mask: Tensor | None) -> View:
        return self.choice.view(query, seen.key, self.pattern, key_mask=mask)

    def _keep_of_tiles(self, query: Tensor, seen: HeldKeys, mask: Tensor | None, grid: TileGrid) -> Tensor:
        """Return the tiles of each row tile: of the first one, the choice of its first token, an earlier call's."""
        parts = []
        # A chunk from position 35 with block 16 begins in a row tile whose first token, 32, has chosen for 35 to 47.
        lead = -grid.start % grid.block
        if lead:
            assert self._open is not None
            parts.append(F.pad(self._open, (0, grid.n_cols - self._open.shape[3])))
        if lead < grid.n_queries:
            view = self._view(query[:, :, lead:], seen, mask)
            parts.append(self._chosen(view, torch.arange(view.base.n_rows, device=query.device)))
        keep = torch.cat(parts, 2)
        self._open = keep[:, :, -1:].clone()
        return keep

    def _chosen(self, view: View, row: Tensor) -> Tensor:
        """Return the tiles that the budget keeps in rows of the row tiles ``row``."""
        choice, base = self.choice, view.base
        forced = forced_tiles(base, choice.first, choice.local)[row]
        return choice.kept(view, choice.scores(view), base.tiles[:, :, row], forced)

    def _grown(self, seen: HeldKeys, grid: TileGrid) -> Summaries:
        """Return the summaries of all tiles of keys, after those that became complete have been added."""
        # All four summaries have their tiles in dimension 2. With block 16, 40 keys are 2 complete tiles, and the room
        # for the third, which no query reads before it is complete, counts no key.
        complete, had = grid.n_keys // grid.block, 0 if self._pages is None else self._pages.log_count.shape[2] - 1
        if self._pages is None or complete > had:
            first, last = had * grid.block, complete * grid.block
            pages = summaries(seen.key[:, :, first:last], grid.block, seen.mask[:, first:last])
            if self._pages is not None:
                pages = Summaries(*(torch.cat((x[:, :, :had], y), 2) for x, y in zip(self._pages, pages, strict=True)))
            mean, low, high = (F.pad(x, (0, 0, 0, 1)) for x in pages[:3])
            self._pages = Summaries(mean, low, high, F.pad(pages.log_count, (0, 1), value=-torch.inf))
        return Summaries(*(x[:, :, : grid.n_cols] for x in self._pages))


def check_by_row(choice: Choice) -> None:
    """Raise ValueError if a choice cannot decide about the next token without later ones."""
    scores, budget = choice.scores, choice.budget
    if not scores.causal_safe:
        raise ValueError(
            "scores: a cache needs scores without later tokens: Probe('first'), Blend(None), Box(None), "
            f"Means(None), Recent(), Shuffled() or a Sum of these, got {scores!r}"
        )
    if isinstance(budget, Controller):
        raise ValueError(
            "budget: a cache needs a Budget, which decides about each row by itself, such as "
            f"Density(0.25), got {budget!r}"
        )
    if choice.last_dense:
        raise ValueError(
            f"last_dense: a cache needs 0, because each new token is the last one, got {choice.last_dense}"
        )
