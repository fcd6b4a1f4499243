"""Ranks are at the same exchange of the same call: they compare 16 bytes before its data moves.

The sizes of the data follow from the call, and gloo ends the process of a rank that gets more than it expects. So these
bytes are a message of their own, of one size whatever the call, and come first. The facts of a call are compared before
its first exchange.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

import ringtile
from ringtile.distributed.failures.faults import PlanMismatch, agree, wait, watch
from ringtile.distributed.layout import Layout
from ringtile.distributed.process_groups import alive, carries_cpu, is_alone, of_group
from ringtile.kernels.contracts import Call

AGREED = 1 << 16
"""When a group has compared so many calls, its ranks forget them, in the same call. Packed batches differ each time."""
FORWARD, BACKWARD = "keys and values, forward", "gradients of keys and values, backward"
_UNREAD = 64
"""Most comparisons on a device that the host has not read."""

_SIZES = ("batch", "heads", "key_heads", "head_dim", "value_dim")
NUMBERS = ("scale", "softcap", "dropout_p", "key_mask", "alibi_slopes", "sinks")


@dataclass(frozen=True)
class Facts:
    """What ranks compare of a call."""

    call: str
    fields: tuple[tuple[str, str | float], ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """Hash of all facts."""
        return blake2b(repr((self.call, self.fields)).encode(), digest_size=8).digest()


@dataclass(frozen=True)
class _Comparison:
    """The 16 bytes of all ranks: the largest digest, and the complement of the smallest."""

    extremes: Tensor
    ready: Any
    """Event after which the host can read them; None on the host."""
    begun: int
    facts: Facts
    data: str


@dataclass
class _State:
    """What a rank knows of a group."""

    begun: int = 0
    unread: deque[_Comparison] = field(default_factory=deque)
    agreed: dict[Facts, Facts] = field(default_factory=dict)
    """The calls that were compared, whether or not a rank has a cached plan."""


class Lockstep:
    """The exchanges of one call among all ranks of a group. If it is idle, no rank has data for another."""

    def __init__(self, group: dist.ProcessGroup, facts: Facts, *, is_idle: bool = False) -> None:
        # A group that was destroyed keeps its connections as long as it is referred to.
        self._every, self._facts, self._is_idle = ref(group), facts, is_idle

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks that take part."""
        return alive(self._every)

    def begin(self) -> None:
        """Count an exchange, before all that can fail: a rank that fails in it is ahead of the others from then on."""
        if not self._is_idle:
            of_group(self.group, _State).begun += 1

    def check(self, data: str, device: torch.device | str, *, is_new: bool = False) -> None:
        """Compare the exchange that was begun with those of all ranks, before its data moves.

        Nothing may fail between this and the data. On a device other than the CPU the host does not wait: a later call
        reads the result, and the data may have moved by then. If the call ``is_new``, compare only that it is new to
        all. If exchanges differ, PlanMismatch names the ranks and the field, at every rank.
        """
        if self._is_idle or is_alone(self.group):
            return
        group, facts, state = self.group, self._facts, of_group(self.group, _State)
        sealed = repr((state.begun, "new" if is_new else (facts.digest, data)))
        digest = int.from_bytes(blake2b(sealed.encode(), digest_size=8).digest(), signed=True)
        # The largest ~x is the complement of the smallest x, so one maximum tells whether all digests are equal.
        extremes = torch.tensor([digest, ~digest], dtype=torch.int64, device=device)
        wait(dist.all_reduce(extremes, dist.ReduceOp.MAX, group, async_op=True), group, data)
        ready = None
        if extremes.device.type != "cpu":
            on_host = torch.empty(2, dtype=torch.int64, pin_memory=True, device="cpu")
            extremes = on_host.copy_(extremes, non_blocking=True)
            ready = torch.Event(device)
            ready.record()
        unread = state.unread
        unread.append(_Comparison(extremes, ready, state.begun, facts, data))
        while unread and (len(unread) > _UNREAD or (first := unread[0].ready) is None or first.query()):
            _read(group, unread.popleft())

    def wait(self, works: Iterable[Any], what: str) -> None:
        """Wait for what travels. All ranks make the same waits in the same order."""
        for work in works:
            wait(work, self.group, what)


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


def shapes_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the sizes that `compare` compares, and for each tensor whether it needs a gradient."""
    # All ranks take part in a backward pass: one that needs none would keep the others waiting.
    needs = [int(torch.is_grad_enabled() and x.requires_grad) for x in (query, key, value)]
    return *query.shape[:2], key.shape[1], key.shape[3], value.shape[3], *needs


def numbers_of(call: Call, has_mask: bool, has_sinks: bool) -> tuple[float, ...]:
    """Return the options that `compare` compares, by `NUMBERS`: of tensors whether they are given."""
    return call.scale, call.softcap, call.dropout_p, has_mask, call.alibi_slopes is not None, has_sinks


def compare(
    ranks: dist.ProcessGroup, name: str, layout: Layout, shapes: tuple[int, ...], dtype: str, **more: str | float
) -> Facts:
    """Return the facts of a call, after a comparison with the other ranks, once. Raise PlanMismatch if they differ."""
    needing = (name for name, bit in zip(("query", "key", "value"), shapes[5:], strict=False) if bit)
    facts: dict[str, str | float] = {
        "tokens": layout.n_tokens,
        **dict(zip(_SIZES, shapes, strict=False)),
        **({"gradients": ", ".join(needing) or "none"} if shapes else {}),
        "dtype": dtype,
        "layout": layout.text,
        **more,
        # Versions are facts, too: another version can plan other messages for the same call.
        "ringtile": ringtile.__version__,
        "torch": torch.__version__,
    }
    mine = Facts(name, tuple(facts.items()))
    agreed = of_group(ranks, _State).agreed
    if mine not in agreed:
        watch(ranks)
        if carries_cpu(ranks):
            # Ranks that have compared theirs before are at the first exchange of their call, and do not shake hands.
            step = Lockstep(ranks, mine)
            step.begin()
            step.check(f"the facts of {name}", "cpu", is_new=True)
        agree(ranks, name, facts)
        # All ranks have compared the same calls, so all forget them in the same call.
        if len(agreed) >= AGREED:
            agreed.clear()
        agreed[mine] = mine
    return agreed[mine]
