"""Ranks are at the same exchange of the same call: they compare 16 bytes before its data moves.

The sizes of the data follow from the call, and gloo ends the process of a rank that gets more than it expects. So these
bytes are a message of their own, of one size whatever the call, and come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.distributed.failures import PlanMismatch, agree, wait
from ringtile.distributed.process_groups import is_alone, of_group

_UNREAD = 64
"""Most comparisons on a device that the host has not read."""


@dataclass(frozen=True)
class Facts:
    """What ranks compare of a call."""

    call: str
    fields: tuple[tuple[str, str | float], ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """Hash of all facts."""
        return blake2b(repr((self.call, self.fields)).encode(), digest_size=8).digest()


@dataclass
class _State:
    """What a rank knows of a group."""

    begun: int = 0
    unread: deque[_Comparison] = field(default_factory=deque)


@dataclass(frozen=True)
class _Comparison:
    """The 16 bytes of all ranks: the largest digest, and the complement of the smallest."""

    extremes: Tensor
    ready: Any
    """Event after which the host can read them; None on the host."""
    begun: int
    facts: Facts
    data: str


def begin(group: dist.ProcessGroup) -> None:
    """Count an exchange, before anything that can fail: a rank that fails in it is ahead of the others from then on."""
    of_group(group, _State).begun += 1


def check(
    group: dist.ProcessGroup, facts: Facts, data: str, device: torch.device | str = "cpu", *, is_new: bool = False
) -> None:
    """Compare the exchange that was begun with those of all ranks, before its data moves.

    Nothing may fail between this and the data. On a device other than the CPU the host does not wait: a later call
    reads the result, and the data may have moved by then.

    Args:
        group: All ranks that take part.
        facts: The call's.
        data: What will move.
        device: Device of the data.
        is_new: Compare nothing but that this call is new to all ranks.

    Raises:
        PlanMismatch: At every rank, if they differ. It names the ranks and the field.
    """
    if is_alone(group):
        return
    state = of_group(group, _State)
    sealed = repr((state.begun, "new" if is_new else (facts.digest, data)))
    digest = int.from_bytes(blake2b(sealed.encode(), digest_size=8).digest(), signed=True)
    # The largest ~x is the complement of the smallest x, so one maximum tells whether all digests are equal.
    extremes = torch.tensor([digest, ~digest], device=device)
    wait(dist.all_reduce(extremes, dist.ReduceOp.MAX, group, async_op=True), group, data)
    ready = None
    if extremes.device.type != "cpu":
        on_host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        extremes = on_host.copy_(extremes, non_blocking=True)
        ready = torch.Event(device)
        ready.record()
    state.unread.append(_Comparison(extremes, ready, state.begun, facts, data))
    while state.unread and (len(state.unread) > _UNREAD or (first := state.unread[0].ready) is None or first.query()):
        _read(group, state.unread.popleft())


def _read(group: dist.ProcessGroup, comparison: _Comparison) -> None:
    extremes, ready, begun, facts, data = vars(comparison).values()
    # Most comparisons are ready by now: the host waits only if too many are unread.
    if ready is not None:
        ready.synchronize()
    largest, complement = extremes.tolist()
    if largest == ~complement:
        return
    # All ranks have read the same bytes, so all come here.
    agree(group, "a rank is a step ahead", {"exchanges": begun})
    given: Mapping[str, str | float] = {"call": facts.call, **dict(facts.fields)}
    agree(group, "exchange", given)
    agree(group, "exchange", {"data": data})
    raise PlanMismatch("exchange: a rank calls for the first time what the others have called before")
