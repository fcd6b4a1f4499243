"""Planned exchange of keys and values, as operators: `group_cast` and `group_reduce` are each other's derivative.

Buffers are ``[B, Hkv, tokens, D]``. Tokens that few ranks need go by a stage, and those that most ranks need by a
broadcast. A hierarchy has two stages and two broadcasts, between nodes and inside them. Gradients take the same ways
back.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringtile.distributed import stages
from ringtile.distributed.branches import BranchPlan
from ringtile.distributed.lockstep import BACKWARD, FORWARD, Facts, Lockstep
from ringtile.distributed.plan import RingPlan
from ringtile.distributed.process_groups import of_group
from ringtile.distributed.relays import Relays
from ringtile.distributed.stages import Tensors
from ringtile.kernels.contracts import accumulator
from ringtile.kernels.operators import library, register

EXCHANGES = 256
"""Exchanges that a group keeps for calls that are not compiled."""
_MASKS = "key masks, forward"
T = TypeVar("T")
_lock = Lock()

# It reads nothing of `after`, which keeps compilers from another order of masks and keys at some ranks.
library.define("cast_start(Tensor k, Tensor v, int exchange, Tensor? after=None) -> (Tensor, Tensor)")
library.define("group_cast(Tensor k, Tensor v, Tensor received, Tensor ticket, int exchange) -> (Tensor, Tensor)")
library.define("cast_hot(Tensor k, Tensor v, Tensor received, Tensor ticket, int exchange) -> (Tensor, Tensor)")
library.define("cast_cold(Tensor(a!) keys, Tensor(b!) values, Tensor received, Tensor ticket, int exchange) -> ()")
library.define("group_reduce(Tensor k_grad, Tensor v_grad, int exchange) -> (Tensor, Tensor)")
library.define("cast_bits(Tensor keep, int exchange) -> Tensor")
library.define("tied(Tensor x, Tensor[] others) -> Tensor")


class _ByNumber:
    """The exchanges that exist, as attributes: operators get a number, and Dynamo reads the exchange of a number.

    Dynamo sees attributes that were added while it traces, which in a dict it does not.
    """

    # Cache. Key: the number of an exchange, never used again. Bound: the exchanges that a group's calls, a graph or a
    # backward pass still refer to. Owner: this module; the references are weak.

    def __getitem__(self, number: int) -> Any:
        return getattr(self, f"_{number}")()

    def add(self, exchange: Any) -> int:
        """Return the number of a new exchange."""
        number = next(_numbers)
        setattr(self, f"_{number}", ref(exchange, lambda _: delattr(self, f"_{number}")))
        return number


_numbers = itertools.count()
by_number = _ByNumber()


class Works(NamedTuple):
    """What to wait for."""

    hot: Sequence[Any] = ()
    """Broadcasts or reduces."""
    cold: Sequence[Any] = ()
    sent: Sequence[Tensor] = ()
    """What travels. The works do not keep it."""
    next: tuple[Tensor, Sequence[Any]] | None = None
    """What this rank will hand on, and the work to wait for before it can."""


Started = tuple[Tensor, Works]
"""What will be received, and the works to wait for."""
Plan = RingPlan | BranchPlan
"""The tokens that travel to and from one rank, and their places. `RingPlan` explains the fields."""

# Cache. Key: the number in a ticket. Bound: calls between start and finish; a call that fails leaves its entry until
# the next start, which finds the ticket's storage gone. Owner: this module.
_in_flight: dict[int, tuple[StorageWeakRef, Works]] = {}


class Exchange(Lockstep):
    """The collectives of one plan in one process group, or of `Relays` in the groups of a mesh of nodes."""

    def __init__(self, plan: Plan | Relays, facts: Facts, group: dist.ProcessGroup, *axes: dist.ProcessGroup) -> None:
        self.plan: Plan = plan.plan if isinstance(plan, Relays) else plan
        super().__init__(group, facts, is_idle=not self.plan.is_mixed and not any(self.plan.tokens_hot))
        # The owner of each broadcast, in their order in a vector: rank by rank if there are no nodes.
        self._owners = list(range(len(self.plan.tokens_hot)))
        self._direct = stages.Stage(self.plan.sent, self.plan.received, self._every, not self.plan.is_mixed)
        self._crossing, self._handed = (stages.Stage((), (), self._every, is_idle=True) for _ in range(2))
        self._outer = stages.Broadcast(self.plan.tokens_hot, self.plan.rank, self._every, is_single=True)
        self._inner: stages.Broadcast | None = None
        if isinstance(plan, Relays):
            self._build_levels(plan, *map(ref, axes))
        self._n_hot = [self.plan.tokens_hot[owner] for owner in self._owners]
        # Broadcasts, direct tokens, and tokens that others hand on.
        self._counts = sum(self._n_hot), sum(self._direct.n_received), sum(self._handed.n_received)
        self.number = by_number.add(self)

    def _build_levels(self, relays: Relays, outer: ref[dist.ProcessGroup], inner: ref[dist.ProcessGroup]) -> None:
        plan, mates, per_node = relays.plan, relays.mates, relays.per_node
        sent, received = ([places[rank] for rank in mates] for places in (plan.sent, plan.received))
        stays, is_direct = not relays.counts.crossing.any(), bool(relays.counts.direct.any())
        self._direct = stages.Stage(sent, received, inner, not is_direct)
        self._crossing = stages.Stage(relays.crossing, relays.arriving, outer, stays)
        self._handed = stages.Stage(relays.handed, relays.relayed, inner, stays)
        # The broadcasts that one rank of a node hands on lie together: with 2 nodes of 2 ranks, those of ranks 0, 2, 1
        # and 3. Rank 2 gets the first of them from rank 0, and hands both to rank 3.
        n_ranks = plan.layout.n_ranks
        self._owners = [owner for number in range(per_node) for owner in range(number, n_ranks, per_node)]
        by_rank = [plan.tokens_hot[number::per_node] for number in range(per_node)]
        most = max(sum(tokens > 0 for tokens in of_number) for of_number in by_rank)
        self._outer = stages.Broadcast(by_rank[relays.number], relays.node, outer, n_waits=most)
        self._inner = stages.Broadcast(list(map(sum, by_rank)), relays.number, inner)

    def sizes(self, xs: Tensors) -> list[int]:
        """Return the elements that this rank receives, its own broadcast and what it hands to itself included."""
        width = stages.width_of(xs)
        return [n * width for n in self._counts]

    def start(self, xs: Tensors, data: str = FORWARD) -> Started:
        """Begin to send."""
        self.begin()
        width, sides, sizes = stages.width_of(xs), ([xs], [xs]), self.sizes(xs)
        received = xs[0].new_empty(sum(sizes))
        hot, direct, _ = received.split(sizes)
        mine = self._of_number(hot, width)
        own = self._outer.mine(mine, width)
        if len(own):
            stages.gather(stages.views(own, xs), xs, self.plan.hot[self.plan.rank])
        sent, crossing = self._direct.pack(xs), self._crossing.pack(xs)
        arrived = self._crossing.room(xs)
        # From here on nothing is allocated that can be before: a rank that fails now leaves the others waiting.
        self.check(data, sent.device)
        broadcasts = self._outer.start(mine, width)
        across = self._crossing.start(arrived, crossing, *sides)
        works = self._direct.start(direct, sent, *sides)
        return received, Works(broadcasts, works, [sent, crossing], (arrived, across))

    def finish(self, xs: Tensors, received: Tensor, works: Works) -> list[Tensor]:
        """Return the buffers ``[.., .., n_buffer, dim]``."""
        buffers = self.finish_hot(xs, received, works)
        self.finish_cold(buffers, received, works)
        return buffers

    def finish_hot(self, xs: Tensors, received: Tensor, works: Works) -> list[Tensor]:
        """Return the buffers with the own and the broadcast tokens."""
        plan, width = self.plan, stages.width_of(xs)
        buffers = [x.new_empty(*x.shape[:2], plan.n_buffer, x.shape[3]) for x in xs]
        stages.copy(buffers, xs, plan.own)
        self.wait(works.hot, FORWARD)
        # Broadcasts that were received before, as in a checkpoint, were handed on inside the node, too.
        hot = received[: self.sizes(xs)[0]]
        if self._inner is not None and works.next is not None:
            self.wait(self._inner.start(hot, width), FORWARD)
        for owner, message in self._broadcast(hot, width):
            stages.copy(buffers, stages.views(message, xs), plan.hot_copies[owner])
        return buffers

    def finish_cold(self, buffers: Tensors, received: Tensor, works: Works) -> None:
        """Hand on the tokens that have crossed, and write all others into the buffers."""
        _, direct, handed = received.split(self.sizes(buffers))
        inside: list[Any] = []
        # If they were received before, as in a checkpoint, they were handed on, too.
        if works.next is not None and not self._crossing.is_idle:
            arrived, across = works.next
            self.wait(across, FORWARD)
            crossed = [x.new_empty(*x.shape[:2], sum(self._crossing.n_received), x.shape[3]) for x in buffers]
            self._crossing.unpack(arrived, crossed)
            sent = self._handed.pack(crossed)
            inside = self._handed.start(handed, sent, [buffers], [buffers])
        self.wait([*works.cold, *inside], FORWARD)
        self._direct.unpack(direct, buffers)
        self._handed.unpack(handed, buffers)

    def start_cold_back(self, grads: Tensors) -> Started:
        """Begin to send gradients home, or to the ranks that handed on their tokens, but not those of broadcasts."""
        self.begin()
        direct, relayed, sides = self._direct.back, self._handed.back, ([grads], [grads])
        sent, handed = direct.pack(grads), relayed.pack(grads)
        received, arrived = direct.room(grads), relayed.room(grads)
        self.check(BACKWARD, sent.device)
        works = direct.start(received, sent, *sides)
        inside = relayed.start(arrived, handed, *sides)
        return received, Works(cold=works, sent=[sent, handed], next=(arrived, inside))

    def hand_on_back(self, grads: Tensors, started: Started) -> Started:
        """Begin to send home the gradients of other nodes' tokens, summed over the ranks of this node."""
        received, works = started
        if works.next is None or self._crossing.is_idle:
            return started
        (arrived, inside), home = works.next, self._crossing.back
        self.wait(inside, BACKWARD)
        # A sum over ranks, so in the accumulation type.
        n_crossed = sum(self._crossing.n_received)
        totals = [x.new_zeros(*x.shape[:2], n_crossed, x.shape[3], dtype=accumulator(x)) for x in grads]
        self._handed.back.unpack(arrived, totals, add=True)
        sent, at_home = home.pack([total.to(grads[0].dtype) for total in totals]), home.room(grads)
        across = home.start(at_home, sent, [grads], [grads])
        return received, Works(cold=works.cold, sent=[*works.sent, sent], next=(at_home, across))

    def start_hot_back(self, grads: Tensors) -> Started:
        """Begin to add up the gradients of broadcast tokens at their owners, from those of the buffers."""
        width = stages.width_of(grads)
        # A sum over ranks, so in the accumulation type. A token in both parts of the buffer has two gradients to add.
        hot = grads[0].new_zeros(self._counts[0] * width, dtype=accumulator(grads[0]))
        for owner, message in self._broadcast(hot, width):
            stages.copy(stages.views(message, grads), grads, self.plan.hot_copies[owner][::-1], add=True)
        if self._inner is not None:
            self.wait(self._inner.start_back(hot, width)[1], BACKWARD)
        mine, works = self._outer.start_back(self._of_number(hot, width), width)
        return mine, Works(hot=works, sent=[hot])

    def finish_back(self, grads: Tensors, cold: Started, hot: Started, own: Tensors | None = None) -> list[Tensor]:
        """Return the gradients of this rank's tokens: ``own``, added to in place if wide, and all buffers'."""
        (received, cold_works), (mine, hot_works) = cold, hot
        assert cold_works.next is not None
        home, across = cold_works.next
        self.wait([*cold_works.cold, *across, *hot_works.hot], BACKWARD)
        # In the order of the ranks, so that every run adds alike.
        arrived = [*self._direct.back.arrived(received, grads), *self._crossing.back.arrived(home, grads)]
        if len(mine):
            arrived.append((stages.views(mine, grads), self.plan.hot[self.plan.rank]))
        sums = []
        # One tensor after the other, so that only one of them has a sum in the accumulation type.
        for number, x in enumerate(grads):
            if own is None:
                total = x.new_zeros(*x.shape[:2], self.plan.n_tokens, x.shape[3], dtype=accumulator(x))
            else:
                total = own[number].to(accumulator(x))
            stages.copy([total], [x], self.plan.own[::-1], add=True)
            for message, places in arrived:
                stages.scatter([total], [message[number]], places, add=True)
            sums.append(total.to(x.dtype))
        return sums

    def _broadcast(self, hot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the owner of each broadcast, and its part of the vector."""
        parts = stages.messages(hot, [n * width for n in self._n_hot])
        return ((self._owners[number], message) for number, message in parts)

    def _of_number(self, hot: Tensor, width: int) -> Tensor:
        """Return the part of the vector that travels between ranks with this rank's number in their nodes."""
        return hot if self._inner is None else self._inner.mine(hot, width)


@dataclass
class Calls:
    """The exchanges of a group's calls, by plan, facts and groups. It lives as long as the group."""

    exchanges: OrderedDict[tuple[Any, ...], Any] = field(default_factory=OrderedDict)
    """The last that were used."""
    in_graphs: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Those of compiled graphs. Without its exchange a graph would be compiled again."""


def exchange_of(make: Callable[..., T], plan: Any, facts: Facts, *groups: dist.ProcessGroup, in_graph: bool) -> T:
    """Return the exchange of a plan and of what ranks compare of its calls, in its groups, made once."""
    call = plan, facts, *map(ref, groups)
    calls = of_group(groups[0], Calls)
    # Threads that share a group must not make two exchanges of one call: each would count its own.
    with _lock:
        found: T | None = calls.in_graphs.get(call) or calls.exchanges.pop(call, None)
        if found is None:
            found = make(plan, facts, *groups)
        if in_graph or call in calls.in_graphs:
            calls.in_graphs[call] = found
        else:
            calls.exchanges[call] = found
        if len(calls.exchanges) > EXCHANGES:
            calls.exchanges.popitem(last=False)
        return found


def _start(k: Tensor, v: Tensor, number: int, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    # A call that failed between start and finish has dropped its ticket, and nobody waits for its works.
    for left in [left for left, (held, _) in list(_in_flight.items()) if held.expired()]:
        _in_flight.pop(left, None)
    received, works = by_number[number].start((k, v))
    ticket = torch.tensor([next(_numbers)], dtype=torch.int64, device="cpu")
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
    keys, values = by_number[number].finish_hot((k, v), received, _works_of(ticket))
    return keys, values


def _cast_cold(keys: Tensor, values: Tensor, received: Tensor, ticket: Tensor, number: int) -> None:
    by_number[number].finish_cold((keys, values), received, _works_of(ticket))
    _in_flight.pop(int(ticket), None)


def _reduce(k_grad: Tensor, v_grad: Tensor, number: int) -> tuple[Tensor, Tensor]:
    exchange, grads = by_number[number], (k_grad, v_grad)
    cold_started = exchange.hand_on_back(grads, exchange.start_cold_back(grads))
    k, v = exchange.finish_back(grads, cold_started, exchange.start_hot_back(grads))
    return k, v


def _cast_bits(keep: Tensor, number: int) -> Tensor:
    """Exchange bool ``[B, n]``."""
    exchange, words = by_number[number], (stages.to_bytes(keep),)
    (buffer,) = exchange.finish(words, *exchange.start(words, _MASKS))
    return stages.from_bytes(buffer, len(keep))


def _fake_start(k: Tensor, v: Tensor, number: int, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return k.new_empty(sum(by_number[number].sizes((k, v)))), torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_moved(k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return empty buffers, or gradients of own tokens if there is nothing but the number behind the tensors."""
    plan = by_number[others[-1]].plan
    count = plan.n_tokens if len(others) == 1 else plan.n_buffer
    return tuple(x.new_empty(*x.shape[:2], count, x.shape[3]) for x in (k, v))


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # An exchange can leave its group's calls before the backward pass.
    ctx.exchange = by_number[inputs[-1]]


def _cast_backward(ctx: Any, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
    k, v = torch.ops.ringtile.group_reduce(k_grad, v_grad, ctx.exchange.number)
    return k, v, None, None, None


def _reduce_backward(ctx: Any, k_cot: Tensor, v_cot: Tensor) -> tuple[Tensor | None, ...]:
    started = cast_start(k_cot, v_cot, ctx.exchange)
    return *torch.ops.ringtile.group_cast(k_cot, v_cot, *started, ctx.exchange.number), None


register("cast_start", _start, _fake_start)
register("group_cast", _cast, _fake_moved)
register("cast_hot", _cast_hot, _fake_moved)
register("cast_cold", _cast_cold, lambda *tensors_and_number: None)
register("group_reduce", _reduce, _fake_moved)
register("cast_bits", _cast_bits, lambda keep, number: keep.new_empty(len(keep), by_number[number].plan.n_buffer))
torch.library.register_autograd("ringtile::group_cast", _cast_backward, setup_context=_keep_exchange, lib=library)
torch.library.register_autograd("ringtile::group_reduce", _reduce_backward, setup_context=_keep_exchange, lib=library)


def _keep_others(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1])


def _tied_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    # Zeros that depend on the gradient and on the buffers. Compilers move what does not depend on a gradient to the
    # forward pass, and do not recompute what no operator reads: then ranks would differ in the order of collectives.
    others = ctx.saved_tensors
    return grad, [torch.ops.ringtile.tied(torch.zeros_like(x), [grad, *others]) for x in others]


register("tied", lambda x, others: x.clone(), lambda x, others: x.clone())
torch.library.register_autograd("ringtile::tied", _tied_backward, setup_context=_keep_others, lib=library)


def cast_start(k: Tensor, v: Tensor, exchange: Exchange, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Begin to send keys and values, also in graphs after the exchange of ``after``. `group_cast` takes the results."""
    with torch.no_grad():
        received, ticket = torch.ops.ringtile.cast_start(k, v, exchange.number, after)
    return received, ticket
