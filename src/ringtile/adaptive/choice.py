"""Choose tiles by scores and a budget."""

import math
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from ringtile.adaptive.budgets import Budget, Counted, Density
from ringtile.adaptive.control import Controller
from ringtile.adaptive.scores import Rounded, Scores
from ringtile.adaptive.view import View, base_index, tile_positions
from ringtile.functional.attention import check_options, checked_tensors
from ringtile.index import BlockIndex
from ringtile.index.schedule import derived
from ringtile.patterns import Pattern

DEFAULT_SCORES = Rounded()


class ChoiceOptions(TypedDict, total=False):
    """The options of a choice, see `Choice`."""

    block: int
    first: int
    local: int
    last_dense: int
    min_length: int
    allow_future: bool


@dataclass(frozen=True)
class Choice:
    """How a call's tiles are chosen. Each row chooses by itself.

    Args:
        scores: Which tiles are best.
        budget: How many tiles a row keeps: `Density`, `TopK`, `TopP` or `Threshold`, or a `Controller` that finds it.
        block: Tile side in tokens, 16, 32, 64 or 128, if the pairs to choose from are no index.
        first: Number of first tiles that every row keeps.
        local: Number of tiles on each side of a row's own that it keeps, beside its own.
        last_dense: Number of last queries whose tiles of rows keep all pairs.
        min_length: Number of keys below which all rows keep all pairs.
        allow_future: Allow a causal choice that looks at later tokens while gradients are recorded.

    Raises ValueError if an argument is out of range.
    """

    scores: Scores = DEFAULT_SCORES
    budget: Budget | Controller = Density(0.25)  # noqa: RUF009
    block: int = 16
    first: int = 1
    local: int = 1
    last_dense: int = 0
    min_length: int = 0
    allow_future: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.scores, Scores):
            raise ValueError(f"scores: expected Scores, such as Probe() or Blend(), got {self.scores!r}")
        if not isinstance(self.budget, Budget | Controller):
            raise ValueError(f"budget: expected a Budget, such as Density(0.25), or a Controller, got {self.budget!r}")
        for name in ("first", "local", "last_dense", "min_length"):
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise ValueError(f"{name}: expected an integer of at least 0, got {count!r}")

    def view(
        self,
        query: Tensor,
        key: Tensor,
        base: BlockIndex | Pattern | str | None = None,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> View:
        """Return the view of a call, with the index of the pairs to choose from, see `select`."""
        check_options(query, key, key_mask=key_mask, scale=scale)
        return View(query, key, base_index(query, key, base, is_causal, self.block), key_mask, scale)

    def index(self, view: View) -> BlockIndex:
        """Return the index of the chosen tiles of a call."""
        base = view.base
        self._check_future(view)
        if view.key.shape[2] < self.min_length or not view.query.numel():
            return base
        # A choice has no gradient. Attention over it has, and to learn a choice takes an `IndexedAttention`.
        with torch.no_grad(), torch.autocast(view.key.device.type, enabled=False):
            view = replace(view, query=view.query.detach(), key=view.key.detach())
            found = self.scores(view)
            if self.scores.per_token:
                tokens = torch.arange(base.n_queries, device=base.device)
                late = (tokens >= base.n_queries - self.last_dense).unsqueeze(1)
                row = base.row_of(tokens)
                forced = forced_tiles(base, self.first, self.local)[row] | late
                return base.restricted_rows(self.kept(view, found, base.tiles[:, :, row], forced))
            always = self.first, self.local, self.last_dense
            keep = self.kept(view, found, base.tiles, forced_tiles(base, *always))
            most = None
            if isinstance(self.budget, Counted):
                # Base and budget decide the number, no score does. Reading it once spares later calls a wait.
                most = derived(base, _most_tiles, self.budget, *keep.shape[:2], *always, lengths=True)
            return base.restricted(keep, most)

    def kept(self, view: View, found: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        """Return the tiles that the budget keeps by scores, as `Budget.keep`."""
        if isinstance(self.budget, Controller):
            return self.budget.keep(view, found, allowed, forced)
        return self.budget.keep(found, allowed, forced)

    def _check_future(self, view: View) -> None:
        recorded = torch.is_grad_enabled() and (view.query.requires_grad or view.key.requires_grad)
        # Without gradients nothing is learned, so evaluation may look at later tokens of a prompt.
        unsafe: Scores | Controller | None = self.scores if not self.scores.causal_safe else None
        if isinstance(self.budget, Controller):
            unsafe = unsafe or self.budget
        if recorded and not self.allow_future and unsafe is not None and not view.base.looks_ahead:
            raise ValueError(
                f"scores, budget: {unsafe!r} chooses by later tokens, which training must not see; expected "
                "causal-safe scores, such as Probe('first'), or allow_future=True"
            )


def select(
    query: Tensor,
    key: Tensor,
    scores: Scores = DEFAULT_SCORES,
    budget: Budget | Controller = Density(0.25),  # noqa: B008
    *,
    base: BlockIndex | Pattern | str | None = None,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    **options: Unpack[ChoiceOptions],
) -> BlockIndex:
    """Choose tiles for each head and each row of tiles, and return their index.

    Nothing is learned, no gradient flows through the choice, and attention over the index is exact.

    Args:
        query, key: ``[B, H, Nq, D]`` and ``[B, Hkv, Nk, D]``. Hkv must divide H.
        scores, budget: See `Choice`. Default: `Rounded` and ``Density(0.25)``.
        base: The pairs to choose from, a pattern or an index. Default: all pairs.
        is_causal: Choose only from keys at or before the query's position. Not available with an index.
        key_mask: ``[B, Nk]`` bool, True for keys that queries may attend to.
        scale: Factor for the scores. Default: ``D ** -0.5``.
        **options: ``block``, ``first``, ``local``, ``last_dense``, ``min_length`` and ``allow_future``, see `Choice`.

    Raises ValueError if an argument is out of range or does not match, or if gradients are recorded, ``base`` is
    causal, and the scores of a query depend on later tokens: a model would learn from what it cannot see later.

    >>> q, k = torch.randn(2, 1, 4, 2048, 64, generator=torch.Generator().manual_seed(0)).unbind()
    >>> index = select(q, k, budget=Density(0.25), is_causal=True)
    >>> round(index.tile_density, 2)
    0.26
    """
    choice = Choice(scores, budget, **options)
    query, key, _ = checked_tensors(query, key, key, enable_gqa=True)
    return choice.index(choice.view(query, key, base, is_causal=is_causal, key_mask=key_mask, scale=scale))


def forced_tiles(base: BlockIndex, first: int, local: int, last_dense: int = 0) -> Tensor:
    """Return the first tiles, those near a row's own, and the rows of the last queries, bool ``[R, C]``."""
    row, col = tile_positions(base)
    # With 250 tokens, block 16 and 20 last queries, position 230 is in row tile 14: rows 14 and 15 are dense.
    first_late = (base.start + base.n_queries - last_dense) // base.block if last_dense else math.inf
    late = base.first_row + torch.arange(base.n_rows, device=base.device) >= first_late
    return (col < first) | ((col - row.unsqueeze(1)).abs() <= local) | late.unsqueeze(1)


def _most_tiles(
    base: BlockIndex, budget: Counted, batch: int, heads: int, first: int, local: int, last_dense: int
) -> int:
    """Return how many tiles a budget keeps."""
    allowed, forced = base.tiles, forced_tiles(base, first, local, last_dense)
    wanted = budget.wanted(allowed.sum(3), heads).maximum((allowed & forced).sum(3))
    return int(wanted.expand(batch, heads, -1).sum())
