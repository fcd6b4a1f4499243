"""The protocol of ``attend=``: what computes the attention of a module, and what a module asks of it."""

from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ringtile.functional.attention import as_pattern, sparse_attention
from ringtile.functional.cache import LayerCache
from ringtile.patterns import Causal, Dense, Pattern


class Attend(Protocol):
    """A function that computes attention: ``attend(query, key, value, *, pattern, is_causal, key_mask, dropout_p)``.

    It returns ``[B, H, Nq, Dv]`` and must be linear in ``value``. Arguments are named as in `sparse_attention`:

    * ``query`` is ``[B, H, Nq, D]``, ``key`` ``[B, H, Nk, D]`` and ``value`` ``[B, H, Nk, Dv]``. Dv differs from D if
      the caller wants weights. With ``enable_gqa=True``, key and value have fewer heads.
    * ``pattern`` can be None. ``key_mask`` is ``[B, Nk]`` bool, True for keys to attend to, or None.
    * With ``add_bias_kv`` or ``add_zero_attn``, `SparseMultiheadAttention` also passes ``return_lse=True`` and expects
      the lse ``[B, H, Nq]`` as a second result. It scores the added keys with ``D ** -0.5``.
    * With a floating-point padding mask, ``query`` and ``key`` can have one extra feature that carries the mask. The
      module then passes ``scale=D ** -0.5``, with D counted without that feature.

    An object with more methods says more: `MakesCache` and `KeepsRules`. If a call changes later ones, it has an
    attribute ``stateful`` that is True. If it computes steps of a transformers model, too, ``steps`` is True.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, *arguments: Any, **options: Any) -> Any: ...


@runtime_checkable
class MakesCache(Protocol):
    """An `Attend` with a cache of its own for generation, such as `ring_attend` makes."""

    def new_cache(self, pattern: Pattern, /) -> LayerCache:
        """Return an empty cache over the pairs of a pattern."""


@runtime_checkable
class KeepsRules(Protocol):
    """An `Attend` that keeps other pairs than its pattern: `longnet_attend` makes one."""

    def rules(self, pattern: Pattern | None, is_causal: bool, /) -> tuple[Pattern, ...]:
        """Return patterns over positions. A pair counts once per pattern that keeps it."""


def checked_rule(pattern: Any, attend: Attend, num_heads: int) -> Pattern | None:
    """Return the pattern of a module, None for all pairs. Raise ValueError if it or the function is not for it."""
    rule = None if pattern is None else as_pattern(pattern)
    if rule is not None and rule.num_heads not in (None, num_heads):
        raise ValueError(f"pattern: {rule!r} is defined for {rule.num_heads} heads, got {num_heads=}")
    if not callable(attend):
        raise ValueError(f"attend: expected a function of query, key and value, got {attend!r}")
    return rule


def rules_of(attend: Attend, pattern: Pattern | None, is_causal: bool) -> tuple[Pattern, ...]:
    """Return the patterns whose pairs a call computes, one unless ``attend`` mixes several."""
    if isinstance(attend, KeepsRules):
        return attend.rules(pattern, is_causal)
    if pattern is None:
        return (Causal() if is_causal else Dense(),)
    return (Causal() & pattern if is_causal else pattern,)


def cache_of(attend: Attend, pattern: Pattern | None, is_causal: bool) -> LayerCache:
    """Return an empty cache for generation. Raises ValueError if ``attend`` computes no cached tokens."""
    rules = rules_of(attend, pattern, is_causal)
    if isinstance(attend, KeepsRules):
        # Before the cache drops a key, a long chunk is a plain call, which mixes the rules by itself.
        return LayerCache(*rules, attend=partial(attend, pattern=pattern, is_causal=is_causal))
    if isinstance(attend, MakesCache):
        return attend.new_cache(*rules)
    if attend is not sparse_attention:
        raise ValueError(
            "attend: a cache needs sparse_attention, longnet_attend(...), ring_attend(...), AdaptiveAttention(...) or "
            f"IndexedAttention(...), got {attend!r}"
        )
    return LayerCache(*rules)


def is_stateful(attend: object) -> bool:
    """Return True if a call of ``attend`` changes later ones, so that layers must not share it."""
    return bool(getattr(attend, "stateful", False))


def holds_state(attend: object) -> bool:
    """Return True if ``attend`` learns or remembers, so that each layer that trains needs one of its own."""
    learns = isinstance(attend, nn.Module) and next(attend.parameters(), None) is not None
    return learns or is_stateful(attend)
