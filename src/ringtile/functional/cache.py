"""Key and value caches for generation, which drop the keys that a pattern cannot keep any more."""

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional.attention import check_options, check_plain, sparse_attention
from ringtile.patterns import Pattern, TileGrid
from ringtile.patterns.facts import pattern_reach
from ringtile.patterns.grammar import as_rule

_PIECE = 128
"""Queries that share one mask over the held keys. Longer chunks are cut, or computed with a block index."""


class HeldKeys(NamedTuple):
    """K keys and values with their positions and mask, or uninitialized room for K."""

    key: Tensor
    """``[B, Hkv, K, D]``."""
    value: Tensor
    """``[B, Hkv, K, Dv]``."""
    position: Tensor
    """``[K]`` int64."""
    mask: Tensor
    """``[B, K]`` bool, True for keys to attend to."""

    def narrowed(self, first: int, count: int) -> "HeldKeys":
        """Return consecutive keys, as views."""
        return HeldKeys(*(x.narrow(axis, first, count) for x, axis in zip(self, _TOKEN_AXES, strict=True)))

    def chosen(self, index: Tensor) -> "HeldKeys":
        """Return a copy of some keys."""
        return HeldKeys(*(x.index_select(axis, index) for x, axis in zip(self, _TOKEN_AXES, strict=True)))

    def joined(self, other: "HeldKeys") -> "HeldKeys":
        """Return these keys, then the others."""
        return HeldKeys(*(torch.cat(pair, axis) for *pair, axis in zip(self, other, _TOKEN_AXES, strict=True)))

    def room(self, count: int) -> "HeldKeys":
        """Return uninitialized room for ``count`` keys, also usable after inference mode."""
        with torch.inference_mode(False):
            sizes = ((*x.shape[:axis], count, *x.shape[axis + 1 :]) for x, axis in zip(self, _TOKEN_AXES, strict=True))
            return HeldKeys(*(x.new_empty(size) for x, size in zip(self, sizes, strict=True)))


_TOKEN_AXES = (2, 2, 0, 1)


class LayerCache:
    """Keys and values of one attention layer under a causal pattern.

    If the pattern bounds how far back a query looks (`bounded`), the cache holds only the first tokens that every query
    keeps and the last tokens within reach. Otherwise it holds all tokens.

    Args:
        pattern: Which pairs to keep. It must not keep later keys.
        more: Further patterns. A pair counts once per pattern that keeps it, as LongNet mixes its branches.
        attend: Function that computes a long chunk before the cache has dropped a key:
            ``attend(query, key, value, *, key_mask, enable_gqa)``. Default: `sparse_attention` with the pattern. With
            ``more`` patterns and no function, long chunks are cut.

    Raises ValueError if a pattern keeps keys after the query, or differs between batch rows.

    >>> from ringtile.patterns import streaming
    >>> cache = LayerCache(streaming(sinks=2, window=8))
    >>> for _ in range(5):
    ...     out = cache.attend(*torch.randn(3, 1, 4, 10, 16).unbind())
    >>> out.shape, cache.length, cache.held, cache.capacity
    (torch.Size([1, 4, 10, 16]), 50, 11, 11)
    """

    def __init__(self, pattern: Pattern | str, *more: Pattern | str, attend: Callable[..., Any] | None = None) -> None:
        self.patterns = tuple(map(as_rule, (pattern, *more)))
        self.pattern = pattern = reduce(or_, self.patterns)
        """Union of all patterns."""
        if not more and attend is None:
            attend = partial(sparse_attention, pattern=pattern)
        self._attend = attend
        reach = pattern_reach(pattern)
        if reach.ahead:
            raise ValueError(f"pattern: a cache needs one that keeps no later keys, causal & ..., got {pattern!r}")
        if pattern.batch_size is not None:
            raise ValueError(f"pattern: a cache needs one for all batch rows, got {pattern.batch_size=}")
        self.length = 0
        """Number of tokens seen so far, the position of the next one."""
        self.capacity = None if math.isinf(reach.size) else int(reach.size)
        """Largest number of keys held between calls, or None if the pattern sets no bound."""
        self._first = reach.first
        self._held: HeldKeys | None = None
        self._masked = False

    @property
    def bounded(self) -> bool:
        """True if the pattern bounds the memory."""
        return self.capacity is not None

    @property
    def held(self) -> int:
        """Number of keys held now."""
        return self.length if self.capacity is None else min(self.length, self.capacity)

    @property
    def positions(self) -> Tensor | None:
        """Positions of the next tokens if they do not follow `length`: those of a prompt that ranks share."""
        return None

    def drawn(self, draw: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return the next tokens ``[B, 1]``, like ``like``, from a function that draws them."""
        return draw().to(like.dtype)

    @property
    def nbytes(self) -> int:
        """Size in bytes: room for up to twice the held keys, but at most `capacity`."""
        return 0 if self._held is None else sum(x.nbytes for x in self._held)

    def __repr__(self) -> str:
        bound = "unbounded" if self.capacity is None else f"at most {self.capacity}"
        return f"LayerCache({self.pattern!r}, {self.length} tokens seen, {self.held} held, {bound})"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Compute attention of the next N tokens, with the same result as attention over all tokens so far.

        One token costs O(`held`). A long chunk, before the cache has dropped a key, costs as much as the pattern keeps.
        The scale is ``D ** -0.5``.

        Args:
            query: ``[B, H, N, D]``, at positions starting at `length`.
            key: ``[B, Hkv, N, D]``, after rotary positions if you use them. Hkv must divide H.
            value: ``[B, Hkv, N, Dv]``.
            key_mask: ``[B, N]`` bool, True for keys to attend to, now and later.

        Returns ``[B, H, N, Dv]``. Raises ValueError if shapes, dtypes or devices do not match, if the pattern does not
        support them, or if autograd records gradients: the cache overwrites keys in place.
        """
        self._check(query, key, value, key_mask)
        n_new = key.shape[2]
        position = torch.arange(self.length, self.length + n_new, device=key.device)
        new = self._new(key, value, position, key_mask)
        if n_new > _PIECE and self.held == self.length and self._attend is not None:
            seen = self._with(new)
            mask, enable_gqa = seen.mask if self._masked else None, query.shape[1] != key.shape[1]
            out: Tensor = self._attend(query, seen.key, seen.value, key_mask=mask, enable_gqa=enable_gqa)
            self._store(new)
            return out
        pieces = [
            self._attend_mask(query[:, :, first : first + _PIECE], new.narrowed(first, min(_PIECE, n_new - first)))
            for first in range(0, n_new, _PIECE)
        ]
        return torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0]

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_plain(name, x)
            if x.dim() != 4 or x.shape[2] != query.shape[2] or x.shape[0] != query.shape[0] or not x.shape[2]:
                raise ValueError(f"{name}: expected [B, H, N, D] of at least one token, all alike, got {x.shape=}")
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(f"{name}: expected torch.no_grad(), a cache has no gradients, got {x.requires_grad=}")
        heads, n_new, kv_heads = *query.shape[1:3], key.shape[1]
        if not kv_heads or heads % kv_heads or value.shape[1] != kv_heads or key.shape[3] != query.shape[3]:
            raise ValueError(
                f"key, value: expected heads that divide the query's, and its head_dim, "
                f"got {key.shape=}, {value.shape=} with {query.shape=}"
            )
        if self.pattern.num_heads not in (None, heads):
            raise ValueError(f"query: the pattern is written for {self.pattern.num_heads} heads, got {query.shape=}")
        if key_mask is not None:
            check_options(query, key, key_mask=key_mask)
        if self._held is not None:
            for name, x, held in (("key", key, self._held.key), ("value", value, self._held.value)):
                like, got = ((*y.shape[:2], y.shape[3], y.dtype, y.device) for y in (held, x))
                if like != got:
                    raise ValueError(f"{name}: expected (B, Hkv, D, dtype, device) as before, {like}, got {got}")
        self.pattern.validate(TileGrid(1, self.length, n_new, self.length + n_new))

    def _new(self, key: Tensor, value: Tensor, position: Tensor, key_mask: Tensor | None) -> HeldKeys:
        if key_mask is None:
            key_mask = torch.ones(1, 1, dtype=torch.bool, device=key.device).expand(key.shape[0], key.shape[2])
        else:
            self._masked = True
            # Otherwise an infinite value times a weight of 0 would be NaN.
            key, value = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (key, value))
        return HeldKeys(key, value, position, key_mask)

    def _extended(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[HeldKeys, Tensor | None]:
        """Store the next keys of a cache that drops none. Return all keys, and their mask unless all count."""
        self._check(query, key, value, key_mask)
        position = torch.arange(self.length, self.length + key.shape[2], device=key.device)
        self._store(self._new(key, value, position, key_mask))
        seen = self._present()
        return seen, seen.mask if self._masked else None

    def _present(self) -> HeldKeys:
        assert self._held is not None
        return self._held.narrowed(0, self.held)

    def _with(self, new: HeldKeys) -> HeldKeys:
        return new if self._held is None else self._present().joined(new)

    def _attend_mask(self, query: Tensor, new: HeldKeys) -> Tensor:
        """Compute few queries: evaluate the rule at the true positions, then run dense attention over the kept keys."""
        if len(new.position) == 1:
            # The overwritten key is out of reach of the only query.
            self._store(new)
            seen = self._present()
        else:
            seen = self._with(new)
            self._store(new)
        num_heads = query.shape[1]
        seen, kept = self._kept(seen, new.position, num_heads)
        enable_gqa = num_heads != seen.key.shape[1]
        if len(kept) > 1:
            # A weight of 0 times a NaN in a key that other heads keep would be NaN.
            read = kept.any(1).view(seen.key.shape[1], -1, len(seen.position)).any(1)[None, :, :, None]
            seen = seen._replace(key=seen.key.where(read, 0), value=seen.value.where(read, 0))
        if len(kept) == len(new.position) == 1 and not self._masked:
            return F.scaled_dot_product_attention(query, seen.key, seen.value, enable_gqa=enable_gqa)
        if self._masked:
            kept = kept & seen.mask[:, None, None]
        out = F.scaled_dot_product_attention(query, seen.key, seen.value, attn_mask=kept, enable_gqa=enable_gqa)
        # Not every kernel of PyTorch returns 0 for a query without keys.
        return out.masked_fill(~kept.any(-1, keepdim=True), 0)

    def _kept(self, seen: HeldKeys, position: Tensor, num_heads: int) -> tuple[HeldKeys, Tensor]:
        """Return the keys that any query at these positions keeps, and the kept pairs ``[1 or H, N, K]``."""
        # Heads of one class keep the same pairs, and their mask broadcasts.
        alike = len({self.pattern.head_class(head) for head in range(num_heads)}) == 1
        heads = torch.arange(1 if alike else num_heads, device=position.device)
        places = (heads[:, None, None], position[:, None], seen.position)
        # Repeat a key for each pattern that keeps it.
        kept = torch.cat([pattern.allowed(*places) for pattern in self.patterns], -1)
        used = kept.flatten(0, 1).any(0)
        if len(self.patterns) > 1 or not bool(used.all()):
            index = used.nonzero().squeeze(1)
            seen, kept = seen.chosen(index % len(seen.position)), kept.index_select(2, index)
        return seen, kept

    def _store(self, new: HeldKeys) -> None:
        """Store the new keys: the first ones for good, the others in a ring."""
        before, n_new = self.length, len(new.position)
        self.length += n_new
        self._make_room(new)
        assert self._held is not None
        ring = None if self.capacity is None else self.capacity - self._first
        if ring is None or self.length <= self._first + ring:
            places = self._held.narrowed(before, n_new)
        elif n_new == 1:
            # With 2 first keys and a ring of 8, token 10 replaces token 2 at 2 + (10 - 2) % 8 = 2.
            places = self._held.narrowed(self._first + (before - self._first) % ring, 1)
        else:
            # Of more new keys than the ring has room for, the last ones stay, so that no place is written twice.
            stays = (new.position < self._first) | (new.position >= self.length - ring)
            new = new.chosen(stays.nonzero().squeeze(1))
            turn = self._first + (new.position - self._first) % ring
            place = torch.where(new.position < self._first, new.position, turn)
            for held, x, axis in zip(self._held, new, _TOKEN_AXES, strict=True):
                held.index_copy_(axis, place, x)
            return
        for held, x in zip(places, new, strict=True):
            held.copy_(x)

    def _make_room(self, new: HeldKeys) -> None:
        """Grow the buffers. They double, so each token moves at most twice on average."""
        size = 0 if self._held is None else len(self._held.position)
        if size >= self.held:
            return
        # Room for one more token at a time would copy all tokens for each.
        wanted = max(self.held, 2 * size)
        room = new.room(wanted if self.capacity is None else min(wanted, self.capacity))
        if self._held is not None:
            for part, x in zip(room.narrowed(0, size), self._held, strict=True):
                part.copy_(x)
        self._held = room


def with_room(x: Tensor, used: int, needed: int) -> Tensor:
    """Return ``[B, H, N, ...]`` if it has room for ``needed`` tokens, or a larger copy of the first ``used`` ones."""
    if needed <= x.shape[2]:
        return x
    # A sixteenth more, so that each token moves a bounded number of times. Room for one token would copy all for each.
    with torch.inference_mode(False):
        room = x.new_empty((*x.shape[:2], needed + max(needed // 16, 64), *x.shape[3:]))
    room[:, :, :used] = x[:, :, :used]
    return room
