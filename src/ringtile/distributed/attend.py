"""Attention over ranks as the ``attend=`` of the modules, and the cache whose keys stay at the ranks that hold them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.attention import ring_attention
from ringtile.distributed.layout import Layout
from ringtile.distributed.lockstep import Facts, Lockstep, compare, shapes_of
from ringtile.distributed.process_groups import real_group
from ringtile.distributed.transports import group_of, mode_of
from ringtile.functional import merge_attention, sparse_attention
from ringtile.functional.attention import attend_scores, rule_of
from ringtile.functional.cache import HeldKeys, LayerCache
from ringtile.kernels.contracts import accumulator
from ringtile.patterns import Pattern

_BLOCK = 128
"""New tokens that follow each other at one rank, if ranks share them."""

_SCORES = 1 << 24
"""Most scores that exist at once."""


@dataclass(frozen=True, eq=False)
class RingAttend:
    """`ring_attention` in a group with a layout; `ring_attend` creates it."""

    group: dist.ProcessGroup | DeviceMesh | None
    layout: Layout
    options: Mapping[str, Any]

    transports: Mapping[str | Pattern, str] | None = None
    """Transport of each pattern, by its text if it has one: in compiled code, Dynamo makes the patterns."""
    every: dist.ProcessGroup | DeviceMesh | None = None
    """Group for the transports that do not know nodes."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute attention."""
        rule = None
        if self.transports is not None:
            rule = rule_of(options.get("pattern"), options.get("is_causal", False), None)
        return ring_attention(query, key, value, layout=self.layout, **self._how(rule), **options)

    def new_cache(self, pattern: Pattern) -> "RingCache":
        """Return an empty cache whose prompt has the layout."""
        return RingCache(pattern, layout=self.layout, **self._how(pattern))

    def _how(self, rule: Pattern | None) -> dict[str, Any]:
        """Return the group, the transport and the other options of a layer with this pattern."""
        if self.transports is None or rule is None:
            return {"group": self.group, **self.options}
        transport = self.transports.get(rule.text or rule)
        if transport is None:
            raise ValueError(f"transport: expected one for the pattern {rule!r}, got {list(self.transports)}")
        group = self.group if 1 not in mode_of(transport).dims else self.every
        return {"group": group, "transport": transport, **self.options}


def ring_attend(
    group: dist.ProcessGroup | DeviceMesh | None,
    layout: Layout,
    *,
    transport: str | Mapping[Pattern, str] = "auto",
    **options: Any,
) -> RingAttend:
    """Return `ring_attention` in a group with a layout, as the ``attend=`` of the modules.

    ``options`` are more arguments of `ring_attention`. Give the module the rank's tokens and their positions,
    ``layout.positions(rank)``. To generate, give `SparseLanguageModel.generate` the rank's tokens of the prompt: the
    cached keys stay at their ranks.

    ``transport`` can be a transport of each pattern of the model, as `cheapest_for_model` returns. On a mesh of nodes
    and their ranks, only the layers with "hierarchy" use the nodes. A layer with another pattern raises ValueError.

    >>> from ringtile.modules import SparseTransformer
    >>> from ringtile.patterns import Causal, Window
    >>> layout = Layout.zigzag(1024, 2)
    >>> model = SparseTransformer(64, 4, 2, pattern=Causal() & Window(256), attend=ring_attend(None, layout))
    """
    if isinstance(transport, str):
        return RingAttend(group, layout, {"transport": transport, **options})
    is_nodes = isinstance(group, DeviceMesh) and group.ndim == 2
    by_text = {rule.text or rule: name for rule, name in transport.items()}
    return RingAttend(group, layout, options, by_text, real_group(group) if is_nodes else group)


class RingCache(LayerCache):
    """Keys and values of one attention layer under a causal pattern, each at one rank of a group.

    The first call is the prompt: each rank gives the tokens that it has in the layout. In all later calls, every rank
    gives the same tokens and gets the same output. Each rank attends to its own keys, and the parts are merged by lse.
    If the pattern bounds the reach, new keys stay at the rank with the end of the prompt, and each rank drops the keys
    out of reach. Otherwise ranks take turns of 128 tokens.

    Args:
        pattern: Which pairs to keep. It must not keep later keys.
        layout: Which tokens of the prompt each rank holds.
        group: Process group with as many ranks as the layout, or a mesh with one dimension. Default: all ranks.
        options: More arguments of `ring_attention`, for the prompt.

    Raises ValueError if the pattern keeps keys after the query, or differs between batch rows.

    >>> import torch.distributed as dist
    >>> from ringtile.patterns import streaming
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cache = RingCache(streaming(sinks=2, window=8), layout=Layout.contiguous(300, 1))
    >>> for tokens in (300, 1, 1):
    ...     out = cache.attend(*torch.randn(3, 1, 4, tokens, 16).unbind())
    >>> out.shape, cache.length
    (torch.Size([1, 4, 1, 16]), 302)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self, pattern: Pattern, *, layout: Layout, group: dist.ProcessGroup | DeviceMesh | None = None, **options: Any
    ) -> None:
        super().__init__(pattern)
        self.layout, self.group, self._options = layout, group, options
        self._count = 0
        ends = [runs[-1][1] if runs else 0 for runs in layout.runs]
        self._home = ends.index(layout.n_tokens)
        """The rank with the end of the prompt."""

    @property
    def _ranks(self) -> dist.ProcessGroup:
        return real_group(group_of(self.group, mode_of(self._options.get("transport", "auto"))))

    @property
    def held(self) -> int:
        """Number of keys that this rank holds now."""
        return self._count

    @property
    def positions(self) -> Tensor | None:
        """Positions of this rank's tokens of the prompt, before the first call."""
        return None if self.length else self.layout.positions(self._ranks.rank())

    def drawn(self, draw: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return the next tokens ``[B, 1]`` that the rank with the end of the prompt draws, at every rank."""
        ranks = self._ranks
        facts = Facts("RingCache", (("batch", len(like)), ("dtype", str(like.dtype))))
        steps = Lockstep(ranks, facts)
        steps.begin()
        new = draw().to(like.dtype) if ranks.rank() == self._home else like.new_empty(len(like), 1)
        steps.check("new tokens", like.device)
        steps.wait([dist.broadcast(new, dist.get_global_rank(ranks, self._home), ranks, async_op=True)], "new tokens")
        return new

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Compute attention of the prompt, or of the tokens after it, as `LayerCache.attend`.

        Each rank gives its own tokens of the prompt. Later all ranks give the same tokens and get the same output.

        Raises:
            ValueError: As `LayerCache.attend` and `ring_attention`.
            PlanMismatch: At every rank, if ranks give different shapes.
            RankLost: If a rank fails, dies or does not come.
        """
        ranks = self._ranks
        if not self.length:
            return self._attend_prompt(query, key, value, key_mask, ranks)
        self._check(query, key, value, key_mask)
        n_new, shapes = key.shape[2], shapes_of(query, key, value)
        facts = compare(
            ranks, "RingCache", self.layout, shapes, str(key.dtype), new=n_new, key_mask=key_mask is not None
        )
        steps = Lockstep(ranks, facts)
        steps.begin()
        position = torch.arange(self.length, self.length + n_new, device=key.device)
        # Ranks take turns of 128 tokens: of 3 ranks, rank 1 stores the positions 128 to 255, 512 to 639, ...
        turns = torch.full_like(position, self._home) if self.bounded else position // _BLOCK % ranks.size()
        self._add(self._new(key, value, position, key_mask).chosen((turns == ranks.rank()).nonzero().squeeze(1)))
        self.length += n_new
        mine = self._part(query, position)
        parts = [torch.empty_like(mine) for _ in range(ranks.size())]
        steps.check("attention to cached keys", mine.device)
        steps.wait([dist.all_gather(parts, mine, ranks, async_op=True)], "attention to cached keys")
        out, _ = merge_attention([x[..., :-1] for x in parts], [x[..., -1] for x in parts])
        return out.to(query.dtype)

    def _attend_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, ranks: dist.ProcessGroup
    ) -> Tensor:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise ValueError("query, key, value: expected torch.no_grad(), a cache has no gradients")
        how: dict[str, Any] = {"layout": self.layout, "group": self.group, "enable_gqa": True, **self._options}
        out: Tensor = ring_attention(query, key, value, self.pattern, key_mask=key_mask, **how)
        position = self.layout.positions(ranks.rank(), key.device)
        self.length = self.layout.n_tokens
        self._add(self._in_reach(self._new(key, value, position, key_mask)))
        return out

    def _add(self, new: HeldKeys) -> None:
        """Store keys. If there is no room, drop those out of reach and make room for twice the others."""
        if self._held is None:
            self._held = new.room(len(new.position))
        elif self._count + len(new.position) > len(self._held.position):
            kept = self._in_reach(self._present())
            self._count = len(kept.position)
            self._held = new.room(2 * (self._count + len(new.position)))
            self._write(0, kept)
        self._write(self._count, new)
        self._count += len(new.position)

    def _in_reach(self, keys: HeldKeys) -> HeldKeys:
        """Return the keys that a query from position `length` on can keep."""
        if self.capacity is None:
            return keys
        left = self.capacity - self._first - 1
        reached = (keys.position < self._first) | (keys.position >= self.length - left)
        return keys.chosen(reached.nonzero().squeeze(1))

    def _write(self, first: int, keys: HeldKeys) -> None:
        assert self._held is not None
        for held, x in zip(self._held.narrowed(first, len(keys.position)), keys, strict=True):
            held.copy_(x)

    def _part(self, query: Tensor, position: Tensor) -> Tensor:
        """Return the output and the lse ``[B, H, N, Dv + 1]`` of attention to this rank's keys."""
        wide, heads = accumulator(query), query.shape[1]
        seen, kept = self._kept(self._present(), position, heads)
        found = query.new_zeros(*query.shape[:3], seen.value.shape[3] + 1, dtype=wide)
        found[..., -1] = -torch.inf
        if not len(seen.position):
            return found
        mask = (kept & seen.mask[:, None, None]) if self._masked else kept.expand(len(query), -1, -1, -1)
        if mask.shape[1:3] == (1, 1):
            key_mask = mask[:, 0, 0].contiguous()
            found[..., :-1], found[..., -1] = sparse_attention(
                query, seen.key, seen.value, key_mask=key_mask, return_lse=True, enable_gqa=True
            )
            return found
        key, value = (x.to(wide).repeat_interleave(heads // x.shape[1], 1) for x in (seen.key, seen.value))
        rows = max(1, _SCORES // (len(query) * heads * len(seen.position)))
        for part, q, pairs in zip(found.split(rows, 2), query.split(rows, 2), mask.split(rows, 2), strict=True):
            scores = (q.to(wide) * q.shape[3] ** -0.5) @ key.mT
            part[..., :-1], part[..., -1] = attend_scores(scores, pairs, value)
        return found
