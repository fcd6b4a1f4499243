"""Attention of a rank's rows, while keys travel to it and gradients travel home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.distributed.branches import BranchPlan
from ringtile.distributed.exchange import Exchange, Started, Works, cast_start
from ringtile.distributed.plan import RingPlan, Source
from ringtile.functional.parts import Compute, Parts

_BUFFER: tuple[Source, ...] = ("hot", "all")


@dataclass(frozen=True, eq=False)
class ExchangedKeys(Parts):
    """Three sources: "own" keys where they lie, and the parts "hot" and "all" of the buffer that others fill.

    With ``overlap``, parts on own keys are computed while keys travel, and while gradients travel home. The buffer also
    holds own keys, so the backward pass saves what was received and makes the buffer again.
    """

    plan: RingPlan | BranchPlan
    exchange: Exchange
    buffer_mask: Tensor | None
    overlap: bool
    is_merged = False
    _waits_composed = False

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute each source when its keys have come. Return what was received."""
        started = cast_start(k, v, self.exchange)
        if self.overlap:
            compute("own", k, v, self.own_mask)
        # Broadcasts were sent first, so rows that need no other keys can begin before the rest has come.
        buffers: tuple[Tensor, Tensor] = torch.ops.ringtile.cast_hot(k, v, *started, self.exchange.number)
        if self.overlap:
            compute(*self._part("hot", *buffers))
        torch.ops.ringtile.cast_cold(*buffers, *started, self.exchange.number)
        if not self.overlap:
            compute("own", k, v, self.own_mask)
            compute(*self._part("hot", *buffers))
        compute(*self._part("all", *buffers))
        return started[:1]

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Send each gradient home as soon as it is known. Return the sums of the rank's own keys and values."""
        exchange = self.exchange

        def on_buffer(source: Source) -> list[Tensor]:
            # Gradients travel in the dtype of the keys.
            return [x.to(k.dtype) for x in compute(*self._part(source, *buffers))]

        buffers: Sequence[Tensor] = exchange.finish((k, v), saved[0], Works())
        own = [] if self.overlap else compute("own", k, v, self.own_mask)
        hot = [] if self.overlap else on_buffer("hot")
        grads = on_buffer("all")
        cold_started = exchange.start_cold_back(grads)
        hot = hot or on_buffer("hot")
        cold_started = exchange.hand_on_back(grads, cold_started)
        buffers = ()
        if not grads[0].shape[2]:
            grads = hot
        elif hot[0].shape[2]:
            # One after the other, so that only one of them exists twice.
            grads = [torch.cat([grads.pop(0), hot.pop(0)], 2) for _ in range(2)]
        hot_started = exchange.start_hot_back(grads)
        own = own or compute("own", k, v, self.own_mask)
        return self._sums(grads, cold_started, hot_started, own)

    def _sums(self, grads: Sequence[Tensor], cold: Started, hot: Started, own: list[Tensor]) -> Sequence[Tensor]:
        """Return the sums of the gradients of own keys that are here and those that arrive."""
        return self.exchange.finish_back(grads, cold, hot, own)

    def composed(self, k: Tensor, v: Tensor, compute: Compute) -> Callable[[Tensor], Tensor]:
        """Compute each source when its keys have come."""
        started = cast_start(k, v, self.exchange, self.buffer_mask)
        if early := self.overlap and not self._waits_composed:
            compute("own", k, v, self.own_mask)
        buffers = torch.ops.ringtile.group_cast(k, v, *started, self.exchange.number)
        if not early:
            compute("own", k, v, self.own_mask)
        n_parts = [compute(*self._part(source, *buffers)) for source in _BUFFER]
        if any(n_parts):
            return lambda x: x
        # This rank reads no key of another, but takes part in the collectives of both passes all the same. Compilers
        # drop operators whose results are not used, so its results depend on the buffers by an operator of its own.
        return lambda x: torch.ops.ringtile.tied(x, buffers)

    def _part(self, source: Source, keys: Tensor, values: Tensor) -> tuple[Source, Tensor, Tensor, Tensor | None]:
        """Return a part of the buffer with its name and its key mask."""
        part = self.plan.part(source)
        mask = None if self.buffer_mask is None else self.buffer_mask[:, part]
        return source, keys[:, :, part], values[:, :, part], mask
