"""Choose tiles by scores and a budget, and attend over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ringtile.adaptive.budgets import Budget, Counted, Density
from ringtile.adaptive.compensation import compensated
from ringtile.adaptive.control import Controller, ControlReport, Held
from ringtile.adaptive.scores import Blend, Probe, Scores, Sum, tile_positions
from ringtile.functional import sparse_attention
from ringtile.functional.attention import checked_tensors, rule_of
from ringtile.layout import BlockIndex, build_index
from ringtile.layout.schedule import derived
from ringtile.patterns import Pattern

if TYPE_CHECKING:
    from ringtile.adaptive.cache import AdaptiveCache

DEFAULT_SCORES = Sum(Probe(), Blend())


def select(
    query: Tensor,
    key: Tensor,
    scores: Scores = DEFAULT_SCORES,
    budget: Budget | Controller = Density(0.25),  # noqa: B008
    *,
    base: BlockIndex | Pattern | None = None,
    is_causal: bool = False,
    block: int = 128,
    first: int = 1,
    local: int = 1,
    last_dense: int = 0,
    min_length: int = 0,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    allow_future: bool = False,
) -> BlockIndex:
    """Choose tiles for each head and each row of tiles, and return their index.

    Nothing is learned, no gradient flows through the choice, and attention over the index is exact. Each row chooses by
    itself.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, Nk, D]``. Hkv must divide H.
        scores: Which tiles are best. Default: ``Sum(Probe(), Blend())``.
        budget: How many tiles a row keeps: `Density`, `TopK`, `TopP` or `Threshold`, or a `Controller` that finds it.
        base: The pairs to choose from, a pattern or an index. Default: all pairs.
        is_causal: Choose only from keys at or before the query's position, as in `sparse_attention`. Not available with
            an index.
        block: Tile side in tokens, 16, 32, 64 or 128, if ``base`` is no index.
        first: Number of first tiles that every row keeps.
        local: Number of tiles on each side of a row's own that it keeps, beside its own.
        last_dense: Number of last queries whose tiles of rows keep all of ``base``.
        min_length: Number of keys below which all rows keep all of ``base``.
        key_mask: ``[B, Nk]`` bool, True for keys that queries may attend to.
        scale: Factor for the scores. Default: ``D ** -0.5``.
        allow_future: Allow a causal choice that looks at later tokens while gradients are recorded.

    Raises:
        ValueError: If an argument is out of range or does not match, or if gradients are recorded, ``base`` is causal,
            and the scores of a query depend on later tokens: a model would learn from what it cannot see later.

    Example:
        >>> q, k = torch.randn(2, 1, 4, 2048, 64, generator=torch.Generator().manual_seed(0)).unbind()
        >>> index = select(q, k, budget=Density(0.25), is_causal=True)
        >>> round(index.tile_density, 2)
        0.36
    """
    check_choice(scores, budget)
    query, key, _ = checked_tensors(query, key, key, enable_gqa=True)
    for name, count in (("first", first), ("local", local), ("last_dense", last_dense), ("min_length", min_length)):
        if type(count) is not int or count < 0:
            raise ValueError(f"{name}: expected an integer of at least 0, got {count!r}")
    batch, n_queries, n_keys = query.shape[0], query.shape[2], key.shape[2]
    if key_mask is not None and (key_mask.shape != (batch, n_keys) or key_mask.dtype != torch.bool):
        raise ValueError(f"key_mask: expected bool {(batch, n_keys)}, got {key_mask.dtype=}, {key_mask.shape=}")
    index = base_index(query, key, base, is_causal, block)
    recorded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    unsafe: Scores | Controller | None = scores if not scores.causal_safe else None
    if isinstance(budget, Controller) and not budget.causal_safe:
        unsafe = unsafe or budget
    if recorded and not allow_future and unsafe is not None and not index.looks_ahead:
        raise ValueError(
            f"scores, budget: {unsafe!r} chooses by later tokens, which training must not see; expected causal-safe "
            "scores, such as Probe('first'), or allow_future=True"
        )
    if n_keys < min_length or not query.numel():
        return index
    with torch.no_grad():
        found = scores(query.detach(), key.detach(), index, key_mask=key_mask, scale=scale)
        allowed = index.tiles
        if scores.per_token:
            tokens = torch.arange(n_queries, device=query.device)
            of_token = index.row_of(tokens)
            late = (tokens >= n_queries - last_dense).unsqueeze(1)
            allowed, forced = allowed[:, :, of_token], forced_tiles(index, first, local)[of_token] | late
        else:
            forced = forced_tiles(index, first, local, last_dense)
        if isinstance(budget, Controller):
            budget = budget.budget(query, key, index, found, allowed, forced, key_mask=key_mask, scale=scale)
        keep = budget.keep(found, allowed, forced)
        if scores.per_token:
            return index.restricted_rows(keep)
        most = None
        if isinstance(budget, Counted) and not isinstance(budget, Held):
            # No score decides it. It is read once per base and budget.
            most = derived(index, _most_tiles, budget, *keep.shape[:2], first, local, last_dense, lengths=True)
        return index.restricted(keep, most)


def check_choice(scores: Scores, budget: Budget | Controller) -> None:
    """Raise ValueError if one of them is something else, such as the other."""
    if not isinstance(scores, Scores):
        raise ValueError(f"scores: expected Scores, such as Probe() or Blend(), got {scores!r}")
    if not isinstance(budget, Budget | Controller):
        raise ValueError(f"budget: expected a Budget, such as Density(0.25), or a Controller, got {budget!r}")


def base_index(
    query: Tensor, key: Tensor, base: BlockIndex | Pattern | None, is_causal: bool, block: int
) -> BlockIndex:
    """Return the index of the pairs to choose from, see `select`."""
    (batch, heads, n_queries), n_keys = query.shape[:3], key.shape[2]
    if isinstance(base, BlockIndex):
        if is_causal:
            raise ValueError("is_causal: not supported with a BlockIndex; build it from Causal() & pattern instead")
        if (base.n_queries, base.n_keys) != (n_queries, n_keys) or base.device != query.device:
            raise ValueError(f"base: {base!r} does not match {query.shape=}, {key.shape=} on {query.device}")
        sizes = zip(base.group.shape, (batch, heads), strict=True)
        if not all(size in (1, wanted) for size, wanted in sizes):
            raise ValueError(f"base: its groups {base.group.shape=} do not match {query.shape=}")
        return base
    rule = rule_of(base, is_causal, None)
    return build_index(rule, n_queries, n_keys, num_heads=heads, batch=max(batch, 1), block=block, device=query.device)


def forced_tiles(base: BlockIndex, first: int, local: int, last_dense: int = 0) -> Tensor:
    """Return the first tiles, those near a row's own, and the rows of the last queries, bool ``[R, C]``."""
    row, col = tile_positions(base)
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


class AdaptiveAttention(nn.Module):
    """Attention over the tiles that scores and a budget choose, as ``attend=`` of a module.

    Args:
        scores: See `select`.
        budget: See `select`. A `Controller` holds a quality: ``budget=Controller(0.95)``.
        block, first, local, last_dense, min_length, allow_future: See `select`.
        compensate: Let each dropped tile count as its mean key and mean value. It lowers the error of attention that is
            spread evenly, and can raise the loss of a model: measure it on yours.

    Raises:
        ValueError: If ``scores`` or ``budget`` is something else, or as `select`, when called.

    Example:
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
        *,
        block: int = 128,
        first: int = 1,
        local: int = 1,
        last_dense: int = 0,
        min_length: int = 0,
        allow_future: bool = False,
        compensate: bool = False,
    ) -> None:
        check_choice(scores, budget)
        super().__init__()
        self.scores, self.budget, self.block = scores, budget, block
        self.first, self.local, self.last_dense, self.min_length = first, local, last_dense, min_length
        self.allow_future, self.compensate = allow_future, compensate
        # A sum is no module, but its gates learn.
        self.learned = nn.ModuleList(part for part in getattr(scores, "parts", ()) if isinstance(part, nn.Module))

    @property
    def stateful(self) -> bool:
        """True if a call changes later ones, so that each layer needs a module of its own."""
        return isinstance(self.budget, Controller) and self.budget.mode != "call"

    @property
    def report(self) -> ControlReport | None:
        """What the `Controller` chose and saw in the last call, or None."""
        return self.budget.report if isinstance(self.budget, Controller) else None

    def extra_repr(self) -> str:
        return f"{self.scores!r}, {self.budget!r}, block={self.block}"

    def new_cache(self, rule: Pattern) -> AdaptiveCache:
        """Return an empty cache for generation over the pairs of a rule, see `AdaptiveCache`."""
        from ringtile.adaptive.cache import AdaptiveCache

        if self.compensate:
            raise ValueError("compensate: a cache needs False, it does not keep the means of dropped tiles")
        return AdaptiveCache(self, rule)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | BlockIndex | None = None,
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
        if key.shape[2] < self.min_length and not isinstance(pattern, BlockIndex):
            # The index of a pattern is cached, and PyTorch's own kernel may be the fastest for it.
            options |= {"is_causal": is_causal, "key_mask": key_mask, "scale": scale, "enable_gqa": enable_gqa}
            return sparse_attention(query, key, value, pattern, **options)
        index = self.index(query, key, pattern, is_causal=is_causal, key_mask=key_mask, scale=scale)
        options |= {"key_mask": key_mask, "scale": scale, "enable_gqa": enable_gqa}
        return self.over(index, query, key, value, pattern, is_causal=is_causal, **options)

    def over(
        self,
        index: BlockIndex,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | BlockIndex | None = None,
        *,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """Compute the attention over an index that `index` returned for the same pattern."""
        if not self.compensate:
            return sparse_attention(query, key, value, index, **options)
        for name in ("softcap", "alibi_slopes", "sinks", "dropout_p"):
            given = options.get(name)
            if isinstance(given, Tensor) or given:
                raise ValueError(f"{name}: not supported with compensate=True, got {given!r}")
        return_lse = options.pop("return_lse", False)
        out, lse = sparse_attention(query, key, value, index, return_lse=True, **options)
        base = base_index(query, key, pattern, is_causal, self.block)
        shared = {name: options.get(name) for name in ("key_mask", "scale")}
        found = compensated(out, lse, query, key, value, index, base, **shared)
        return found if return_lse else found[0]

    def index(
        self,
        query: Tensor,
        key: Tensor,
        pattern: Pattern | BlockIndex | None = None,
        *,
        is_causal: bool = False,
        scores: Scores | None = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> BlockIndex:
        """Return the index of the tiles that a call keeps, see `select`. ``scores`` replace those of the module."""
        return select(
            query,
            key,
            self.scores if scores is None else scores,
            self.budget,
            base=pattern,
            is_causal=is_causal,
            block=self.block,
            first=self.first,
            local=self.local,
            last_dense=self.last_dense,
            min_length=self.min_length,
            key_mask=key_mask,
            scale=scale,
            allow_future=self.allow_future,
        )
