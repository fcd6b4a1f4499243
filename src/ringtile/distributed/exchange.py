"""Planned all-to-all of keys and values, as operators: `group_cast` and `group_reduce` are each other's derivative.

Buffers are ``[B, Hkv, tokens, D]``. On the wire, the keys and then the values for one rank lie together in that order,
so every copy moves whole runs of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringtile.distributed import lockstep
from ringtile.distributed.failures.faults import wait
from ringtile.distributed.lockstep import Facts
from ringtile.distributed.wires import (
    Copies,
    Places,
    Tensors,
    all_to_all,
    back,
    copy,
    cut,
    from_octets,
    gather,
    gathered,
    of_ranks,
    scatter,
    to_octets,
    width_of,
)
from ringtile.kernels.contracts import accumulator

# The names since torch 2.13, where the older ones warn.
_ALL_GATHER, _REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)

FORWARD, BACKWARD = "keys and values, forward", "gradients of keys and values, backward"
_MASKS = "key masks, forward"

numbers = itertools.count()
_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
_in_flight: dict[int, tuple[StorageWeakRef, Works]] = {}
"""What to wait for, by ticket, and a weak reference to the ticket: a call that fails leaves it behind."""

library = torch.library.Library("ringtile", "FRAGMENT")
# It reads nothing of `after`, which keeps compilers from another order of masks and keys at some ranks.
library.define("cast_start(Tensor k, Tensor v, int exchange, Tensor? after=None) -> (Tensor, Tensor)")
library.define("group_cast(Tensor k, Tensor v, Tensor received, Tensor ticket, int exchange) -> (Tensor, Tensor)")
library.define("cast_hot(Tensor k, Tensor v, Tensor received, Tensor ticket, int exchange) -> (Tensor, Tensor)")
library.define("cast_cold(Tensor(a!) keys, Tensor(b!) values, Tensor received, Tensor ticket, int exchange) -> ()")
library.define("group_reduce(Tensor k_grad, Tensor v_grad, int exchange) -> (Tensor, Tensor)")
library.define("cast_bits(Tensor keep, int exchange) -> Tensor")
library.define("tied(Tensor x, Tensor keys, Tensor values) -> Tensor")
library.define("tied_grads(Tensor grad, Tensor keys, Tensor values) -> (Tensor, Tensor)")


_NO_FACTS = Facts("exchange")


class Works(NamedTuple):
    """What to wait for."""

    hot: Sequence[Any] = ()
    """Broadcasts or reduces."""
    cold: Sequence[Any] = ()
    sent: Sequence[Tensor] = ()
    """What travels. The works do not keep it."""
    next: tuple[Tensor, Sequence[Any]] | None = None
    """What this rank will hand on, and the work to wait for before it can."""


class Routes(Protocol):
    """The tokens that travel to and from one rank, and their places. `RingPlan` explains the fields."""

    @property
    def rank(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_buffer(self) -> int: ...
    @property
    def own(self) -> Copies: ...
    @property
    def hot(self) -> Sequence[Places]: ...
    @property
    def hot_copies(self) -> Sequence[Copies]: ...
    @property
    def sent(self) -> Sequence[Places]: ...
    @property
    def received(self) -> Sequence[Places]: ...
    @property
    def is_mixed(self) -> bool: ...
    @property
    def tokens_hot(self) -> Sequence[int]: ...
    @property
    def tokens_sent(self) -> Sequence[int]: ...
    @property
    def tokens_received(self) -> Sequence[int]: ...


class Exchange:
    """The collectives of one plan in one process group. Operators know it by its number.

    Tiles that most ranks need are broadcast, the others go by one all-to-all. Gradients take the same ways back.
    """

    def __init__(self, plan: Routes, group: dist.ProcessGroup, facts: Facts = _NO_FACTS) -> None:
        self.plan, self._facts = plan, facts
        # A group that was destroyed keeps its connections as long as it is referred to.
        self._group = ref(group)
        self.number = next(numbers)
        _exchanges[self.number] = self

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return there(self._group)

    def size_received(self, xs: Tensors) -> int:
        """Return the elements that this rank receives, its own broadcast included."""
        return (sum(self.plan.tokens_hot) + sum(self.plan.tokens_received)) * width_of(xs)

    def begin(self) -> None:
        """Begin an exchange, before its memory is allocated. If no rank has data for another, there is none."""
        if self._moves:
            lockstep.begin(self.group)

    def check(self, data: str, x: Tensor) -> None:
        """Compare the exchange with those of the other ranks, after its memory is allocated."""
        if self._moves:
            lockstep.check(self.group, self._facts, data, x.device)

    @property
    def _moves(self) -> bool:
        return self.plan.is_mixed or sum(self.plan.tokens_hot) > 0

    @property
    def _is_even(self) -> bool:
        """True if all ranks broadcast equally many tokens: one collective serves all."""
        return len(set(self.plan.tokens_hot)) == 1

    def start(self, xs: Tensors, data: str = FORWARD) -> tuple[Tensor, Works]:
        """Begin to send. Return what will be received and the work to wait for."""
        self.begin()
        plan, width = self.plan, width_of(xs)
        received = xs[0].new_empty(self.size_received(xs))
        hot, cold = self._hot_and_cold(received, width)
        wires = list(of_ranks(hot, width, plan.tokens_hot))
        for owner, wire in wires:
            if owner == plan.rank:
                gather(cut(wire, xs), xs, plan.hot[owner])
        sent = gathered(xs, plan.sent, plan.tokens_sent)
        self.check(data, sent)
        if self._is_even and wires:
            mine = wires[plan.rank][1]
            broadcasts = [getattr(dist, _ALL_GATHER)(hot, mine, group=self.group, async_op=True)]
        else:
            broadcasts = [
                dist.broadcast(wire, dist.get_global_rank(self.group, owner), self.group, async_op=True)
                for owner, wire in wires
            ]
        works = self._all_to_all(cold, sent, plan.tokens_received, plan.tokens_sent, width)
        return received, Works(broadcasts, works, [sent])

    def finish(self, xs: Tensors, received: Tensor, works: Works) -> list[Tensor]:
        """Return the buffers ``[.., .., n_buffer, dim]``."""
        buffers = self.finish_hot(xs, received, works)
        self.finish_cold(buffers, received, works)
        return buffers

    def finish_hot(self, xs: Tensors, received: Tensor, works: Works) -> list[Tensor]:
        """Return the buffers with the own and the broadcast tokens."""
        plan, width = self.plan, width_of(xs)
        buffers = [x.new_empty(*x.shape[:2], plan.n_buffer, x.shape[3]) for x in xs]
        copy(buffers, xs, plan.own)
        self._wait(works.hot, FORWARD)
        for owner, wire in self._broadcast(received, width, works):
            copy(buffers, cut(wire, xs), plan.hot_copies[owner])
        return buffers

    def _broadcast(self, received: Tensor, width: int, works: Works) -> Iterator[tuple[int, Tensor]]:
        """Yield the broadcasts, each with its owner."""
        return of_ranks(self._hot_and_cold(received, width)[0], width, self.plan.tokens_hot)

    def finish_cold(self, buffers: Tensors, received: Tensor, works: Works) -> None:
        """Write the other tokens into the buffers."""
        plan, width = self.plan, width_of(buffers)
        self._wait(works.cold, FORWARD)
        for rank, wire in of_ranks(self._hot_and_cold(received, width)[1], width, plan.tokens_received):
            scatter(buffers, cut(wire, buffers), plan.received[rank])

    def start_cold_back(self, grads: Tensors) -> tuple[Tensor, Works]:
        """Begin to send home the gradients of tokens that were not broadcast.

        ``grads`` are those of the buffers, or of a beginning that has these tokens.
        """
        self.begin()
        plan, width = self.plan, width_of(grads)
        sent = gathered(grads, plan.received, plan.tokens_received)
        received = sent.new_empty(sum(plan.tokens_sent) * width)
        self.check(BACKWARD, sent)
        works = self._all_to_all(received, sent, plan.tokens_sent, plan.tokens_received, width)
        return received, Works(cold=works, sent=[sent])

    def hand_on_back(self, grads: Tensors, started: tuple[Tensor, Works]) -> tuple[Tensor, Works]:
        """Hand on what `start_cold_back` sent to this rank for others. Return the new state. Here all go straight."""
        return started

    def start_hot_back(self, grads: Tensors) -> tuple[Tensor, Works]:
        """Begin to add up the gradients of broadcast tokens at their owners, from those of the buffers."""
        plan, width, works = self.plan, width_of(grads), []
        # A sum over ranks, so in the accumulation type.
        hot = grads[0].new_zeros(sum(plan.tokens_hot) * width, dtype=accumulator(grads[0]))
        for owner, wire in of_ranks(hot, width, plan.tokens_hot):
            copy(cut(wire, grads), grads, back(plan.hot_copies[owner]), add=True)
            if not self._is_even:
                goal = dist.get_global_rank(self.group, owner)
                works.append(dist.reduce(wire, goal, group=self.group, async_op=True))
        if self._is_even and len(hot):
            mine = hot.new_empty(len(hot) // len(plan.tokens_hot))
            works.append(getattr(dist, _REDUCE_SCATTER)(mine, hot, group=self.group, async_op=True))
            return mine, Works(hot=works, sent=[hot])
        return hot, Works(hot=works)

    def finish_back(
        self,
        grads: Tensors,
        cold_started: tuple[Tensor, Works],
        hot_started: tuple[Tensor, Works],
        own: Tensors | None = None,
    ) -> list[Tensor]:
        """Return the gradients ``[.., .., n, dim]`` of this rank's tokens: ``own`` and those of all ranks' buffers.

        It adds to ``own`` in place if its dtype is that of sums.
        """
        arrived = self._arrived_back(cold_started, hot_started, width_of(grads))
        sums = []
        for place, x in enumerate(grads):
            wide = accumulator(x)
            if own is None:
                total = x.new_zeros(*x.shape[:2], self.plan.n_tokens, x.shape[3], dtype=wide)
            else:
                total = own[place].to(wide)
            copy([total], [x], back(self.plan.own), add=True)
            # In the order of the ranks, so that every run adds alike.
            for wire, places in arrived:
                scatter([total], [cut(wire, grads)[place]], places, add=True)
            sums.append(total.to(x.dtype))
        return sums

    def _arrived_back(
        self, cold_started: tuple[Tensor, Works], hot_started: tuple[Tensor, Works], width: int
    ) -> list[tuple[Tensor, Places]]:
        """Wait for the gradients of other ranks, and return them with the places of their tokens."""
        plan = self.plan
        (received, cold_works), (hot, hot_works) = cold_started, hot_started
        self._wait([*cold_works.cold, *hot_works.hot], BACKWARD)
        cold = [(wire, plan.sent[rank]) for rank, wire in of_ranks(received, width, plan.tokens_sent)]
        # One collective leaves each rank its own part.
        tokens = [n if not self._is_even or rank == plan.rank else 0 for rank, n in enumerate(plan.tokens_hot)]
        mine = (wire for owner, wire in of_ranks(hot, width, tokens) if owner == plan.rank)
        return [*cold, *((wire, plan.hot[plan.rank]) for wire in mine)]

    def _hot_and_cold(self, received: Tensor, width: int) -> list[Tensor]:
        return list(received.split([sum(self.plan.tokens_hot) * width, sum(self.plan.tokens_received) * width]))

    def _wait(self, works: Iterable[Any], what: str) -> None:
        for work in works:
            wait(work, self.group, what)

    def _all_to_all(
        self, received: Tensor, sent: Tensor, received_tokens: Sequence[int], sent_tokens: Sequence[int], width: int
    ) -> list[Any]:
        if not self.plan.is_mixed:
            return []
        return [all_to_all(received, sent, received_tokens, sent_tokens, width, self.group)]


def there(group: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return a process group, or raise RuntimeError if it was destroyed."""
    found = group()
    if found is None:
        raise RuntimeError("the process group of this attention was destroyed")
    return found


def _start(k: Tensor, v: Tensor, number: int, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    for left in [left for left, (held, _) in list(_in_flight.items()) if held.expired()]:
        _in_flight.pop(left, None)
    received, works = _exchanges[number].start((k, v))
    ticket = torch.tensor([next(numbers)])
    _in_flight[int(ticket)] = StorageWeakRef(ticket.untyped_storage()), works
    return received, ticket


def _works_of(ticket: Tensor) -> Works:
    # If they were received before, as in a checkpoint, there is nothing to wait for.
    return _in_flight[number][1] if (number := int(ticket)) in _in_flight else Works()


def _cast(k: Tensor, v: Tensor, received: Tensor, ticket: Tensor, number: int) -> tuple[Tensor, Tensor]:
    keys, values = _cast_hot(k, v, received, ticket, number)
    _cast_cold(keys, values, received, ticket, number)
    return keys, values


def _cast_hot(k: Tensor, v: Tensor, received: Tensor, ticket: Tensor, number: int) -> tuple[Tensor, Tensor]:
    keys, values = _exchanges[number].finish_hot((k, v), received, _works_of(ticket))
    return keys, values


def _cast_cold(keys: Tensor, values: Tensor, received: Tensor, ticket: Tensor, number: int) -> None:
    _exchanges[number].finish_cold((keys, values), received, _works_of(ticket))
    _in_flight.pop(int(ticket), None)


def _reduce(k_grad: Tensor, v_grad: Tensor, number: int) -> tuple[Tensor, Tensor]:
    exchange, grads = _exchanges[number], (k_grad, v_grad)
    cold_started = exchange.hand_on_back(grads, exchange.start_cold_back(grads))
    k, v = exchange.finish_back(grads, cold_started, exchange.start_hot_back(grads))
    return k, v


def _cast_bits(keep: Tensor, number: int) -> Tensor:
    """Exchange bool ``[B, n]``."""
    exchange, words = _exchanges[number], (to_octets(keep),)
    (buffer,) = exchange.finish(words, *exchange.start(words, _MASKS))
    return from_octets(buffer, len(keep))


def _fake_start(k: Tensor, v: Tensor, number: int, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return k.new_empty(_exchanges[number].size_received((k, v))), torch.empty(1, dtype=torch.int64)


def _fake_cast(k: Tensor, v: Tensor, received: Tensor, ticket: Tensor, number: int) -> tuple[Tensor, Tensor]:
    size = _exchanges[number].plan.n_buffer
    return k.new_empty(*k.shape[:2], size, k.shape[3]), v.new_empty(*v.shape[:2], size, v.shape[3])


def _fake_reduce(k_grad: Tensor, v_grad: Tensor, number: int) -> tuple[Tensor, Tensor]:
    size = _exchanges[number].plan.n_tokens
    return (
        k_grad.new_empty(*k_grad.shape[:2], size, k_grad.shape[3]),
        v_grad.new_empty(*v_grad.shape[:2], size, v_grad.shape[3]),
    )


def _fake_cast_bits(keep: Tensor, number: int) -> Tensor:
    return keep.new_empty(keep.shape[0], _exchanges[number].plan.n_buffer)


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # A plan can leave its cache before the backward pass.
    ctx.exchange = _exchanges[inputs[-1]]


def _cast_backward(ctx: Any, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
    k, v = torch.ops.ringtile.group_reduce(k_grad, v_grad, ctx.exchange.number)
    return k, v, None, None, None


def _reduce_backward(ctx: Any, k_cot: Tensor, v_cot: Tensor) -> tuple[Tensor | None, ...]:
    return *cast(k_cot, v_cot, ctx.exchange), None


for _name, _implementation, _fake in (
    ("cast_start", _start, _fake_start),
    ("group_cast", _cast, _fake_cast),
    ("cast_hot", _cast_hot, _fake_cast),
    ("cast_cold", _cast_cold, lambda *tensors_and_number: None),
    ("group_reduce", _reduce, _fake_reduce),
    ("cast_bits", _cast_bits, _fake_cast_bits),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringtile::{_name}", _fake, lib=library)
torch.library.register_autograd("ringtile::group_cast", _cast_backward, setup_context=_keep_exchange, lib=library)
torch.library.register_autograd("ringtile::group_reduce", _reduce_backward, setup_context=_keep_exchange, lib=library)


class _Tied(torch.autograd.Function):
    """`tied` without a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Tensor) -> Tensor:
        ctx.save_for_backward(*rest)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return _tied_backward(ctx, grad)


def _tied_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    rest = ctx.saved_tensors
    zeros = [torch.zeros_like(x) for x in rest]
    if grad.requires_grad:
        # Second derivatives pass through the same collectives at every rank.
        zeros = [_Tied.apply(x, grad, *rest) for x in zeros]  # type: ignore[no-untyped-call]
    return grad, *zeros


def _keep_buffers(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _compiled_tied_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    # Zeros that depend on the gradient and on the buffers. Compilers move what does not depend on a gradient to the
    # forward pass, and do not recompute what no operator reads: then ranks would differ in the order of collectives.
    return grad, *torch.ops.ringtile.tied_grads(grad, *ctx.saved_tensors)


for _name, _same in (
    ("tied", lambda x, keys, values: x.clone()),
    ("tied_grads", lambda grad, keys, values: (torch.zeros_like(keys), torch.zeros_like(values))),
):
    library.impl(_name, _same, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringtile::{_name}", _same, lib=library)
torch.library.register_autograd("ringtile::tied", _compiled_tied_backward, setup_context=_keep_buffers, lib=library)


def tied(x: Tensor, keys: Tensor, values: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return ``x``, so that it depends on buffers that no row reads: both passes then take part in the collectives.

    Compilers drop operators whose results are not used, so they get an operator of its own.
    """
    if torch.compiler.is_compiling():
        keys = keys if key_mask is None else keys * key_mask[:, None, :, None]
        return torch.ops.ringtile.tied(x, keys, values)  # type: ignore[no-any-return]
    return _Tied.apply(x, keys, values)  # type: ignore[no-untyped-call, no-any-return]


def cast_start(k: Tensor, v: Tensor, exchange: Exchange, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Begin to send keys and values to the ranks that need them. Give both results to `cast_finish`.

    It follows the exchange that ``after`` comes from, in compiled graphs too.
    """
    with torch.no_grad():
        received, ticket = torch.ops.ringtile.cast_start(k, v, exchange.number, after)
    return received, ticket


def cast_finish(k: Tensor, v: Tensor, started: tuple[Tensor, Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Return the buffers of keys and values ``[B, Hkv, n_buffer, D]``, differentiable in this rank's own."""
    keys, values = torch.ops.ringtile.group_cast(k, v, *started, exchange.number)
    return keys, values


def cast(k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Return the buffers of keys and values, without computing anything meanwhile."""
    return cast_finish(k, v, cast_start(k, v, exchange), exchange)
