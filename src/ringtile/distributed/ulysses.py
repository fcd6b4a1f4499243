"""Exchange heads for tokens (DeepSpeed Ulysses): ranks that hold other tokens come to hold other heads of all these.

On a mesh with two dimensions the ranks of a row exchange heads, and then hold the tokens of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.distributed import lockstep
from ringtile.distributed.exchange import by_number, library
from ringtile.distributed.failures import wait
from ringtile.distributed.heads import HeadPlan
from ringtile.distributed.lockstep import Facts
from ringtile.distributed.stages import Stage, Tensors, alive, gather, scatter, whole
from ringtile.index import BlockIndex, build_index
from ringtile.kernels.contracts import accumulator

# `kinds` has a letter per tensor: "q" if its heads are those of the queries, "k" for those of the keys. The last can be
# "m", for one head that all ranks get, as of a key mask.
library.define("to_heads(Tensor[] xs, str kinds, int exchange) -> Tensor[]")
library.define("to_tokens(Tensor[] xs, str kinds, int exchange) -> Tensor[]")


class HeadExchange:
    """The stage of one `HeadPlan` among the ranks of a row. Operators know it by its number."""

    def __init__(
        self, plan: HeadPlan, facts: Facts, every: dist.ProcessGroup, outer: dist.ProcessGroup, row: dist.ProcessGroup
    ) -> None:
        self.plan, self._facts = plan, facts
        # Computed here: Dynamo reads them.
        self.heads, self.key_at = plan.heads["q"][plan.me], plan.key_at
        self.rows, self.rule = plan.rows, plan.rule
        self.index: BlockIndex | None = None
        # A group that was destroyed keeps its connections as long as it is referred to.
        self._every = ref(every)
        # All tokens of this rank go to each other, which gets other heads of them. Own ones do not travel.
        others = [rank != plan.me for rank in range(plan.n_ranks)]
        own = [whole(plan.n_tokens * other) for other in others]
        arriving = [places if other else () for places, other in zip(plan.places, others, strict=True)]
        self._stage = Stage(own, arriving, ref(row), is_idle=plan.n_ranks == 1)
        self.number = by_number.add(self)

    def build(self, device: torch.device) -> None:
        """Build the index of a pattern without text: Dynamo can read an index, and cannot build one."""
        if self.rule.text is None and self.index is None:
            heads, n_tokens = self.heads[1] - self.heads[0], self.plan.layout.n_tokens
            sizes: dict[str, int] = {"num_heads": heads, "batch": max(self.plan.batch, 1)}
            self.index = build_index(self.rule, n_tokens, start=0, device=device, **sizes)

    def to_heads(self, xs: Tensors, kinds: str) -> list[Tensor]:
        """Return this rank's heads of the row's tokens, from all heads of its own tokens."""
        self._begin()
        plan, stage, parts = self.plan, self._stage, self._of_ranks(xs, kinds)
        found = [x.new_empty(*x.shape[:2], plan.n_row, x.shape[3]) for x in parts[plan.me]]
        sent, received = stage.pack(*parts), stage.room(found)
        self._check(f"heads of {kinds}", sent)
        works = stage.start(received, sent, parts, [found])
        scatter(found, parts[plan.me], plan.places[plan.me])
        self._wait(works)
        stage.unpack(received, found)
        return found

    def to_tokens(self, xs: Tensors, kinds: str) -> list[Tensor]:
        """Return all heads of this rank's tokens, from its heads of the row's tokens.

        If ranks share a key head, these are sums over the ranks, in float32 or better and in their order.
        """
        self._begin()
        plan, stage = self.plan, self._stage.back
        is_sum = "k" in kinds and plan.is_shared
        counts = {"q": plan.num_heads, "k": plan.num_kv_heads}
        # With 12 query heads, 4 key heads and 6 ranks, two ranks send gradients of key head 0, and they add up here.
        found = [
            (x.new_zeros if is_sum else x.new_empty)(
                x.shape[0], counts[kind], plan.n_tokens, x.shape[3], dtype=accumulator(x) if is_sum else x.dtype
            )
            for x, kind in zip(xs, kinds, strict=True)
        ]
        parts = self._of_ranks(found, kinds)
        sent, received = stage.pack(xs), stage.room(*parts, dtype=xs[0].dtype)
        self._check(f"tokens of {kinds}", sent)
        works = stage.start(received, sent, [xs], parts)
        gather(parts[plan.me], xs, plan.places[plan.me])
        self._wait(works)
        stage.unpack(received, *parts, add=is_sum)
        return [total.to(x.dtype) for total, x in zip(found, xs, strict=True)]

    def _of_ranks(self, xs: Tensors, kinds: str) -> list[list[Tensor]]:
        """Return the heads of each rank of the row, of tensors with all heads."""
        heads = [self.plan.heads[kind] for kind in kinds]
        return [[x[:, slice(*of[rank])] for x, of in zip(xs, heads, strict=True)] for rank in range(self.plan.n_ranks)]

    def _begin(self) -> None:
        if not self._stage.is_idle:
            lockstep.begin(alive(self._every))

    def _check(self, data: str, sent: Tensor) -> None:
        if not self._stage.is_idle:
            lockstep.check(alive(self._every), self._facts, f"{data}, {sent.dtype}", sent.device)

    def _wait(self, works: list[Any]) -> None:
        # All ranks, not only those of a row, make the same waits in the same order.
        for work in works:
            wait(work, alive(self._every), "an exchange of heads for tokens")


def _to_heads(xs: Tensors, kinds: str, number: int) -> list[Tensor]:
    return _by_dtype(by_number[number].to_heads, xs, kinds)


def _to_tokens(xs: Tensors, kinds: str, number: int) -> list[Tensor]:
    return _by_dtype(by_number[number].to_tokens, xs, kinds)


def _by_dtype(move: Callable[[Tensors, str], list[Tensor]], xs: Tensors, kinds: str) -> list[Tensor]:
    """Send a message for each dtype. In one operator, so that compilers keep the same order at all ranks."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):
        places = [place for place, x in enumerate(xs) if x.dtype == dtype]
        moved = move([xs[place] for place in places], "".join(kinds[place] for place in places))
        found.update(zip(places, moved, strict=True))
    return [found[place] for place in range(len(xs))]


def _fake_to_heads(xs: Tensors, kinds: str, number: int) -> list[Tensor]:
    plan = by_number[number].plan
    counts = {kind: runs[plan.me][1] - runs[plan.me][0] for kind, runs in plan.heads.items()}
    return [x.new_empty(x.shape[0], counts[kind], plan.n_row, x.shape[3]) for x, kind in zip(xs, kinds, strict=True)]


def _fake_to_tokens(xs: Tensors, kinds: str, number: int) -> list[Tensor]:
    plan = by_number[number].plan
    counts = {"q": plan.num_heads, "k": plan.num_kv_heads}
    return [x.new_empty(x.shape[0], counts[kind], plan.n_tokens, x.shape[3]) for x, kind in zip(xs, kinds, strict=True)]


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # A plan can leave its cache before the backward pass.
    ctx.kinds, ctx.exchange = inputs[1], by_number[inputs[2]]


def _to_heads_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None, None]:
    kinds = ctx.kinds.rstrip("m")
    found = torch.ops.ringtile.to_tokens(grads[: len(kinds)], kinds, ctx.exchange.number)
    return [*found, *[None] * (len(grads) - len(kinds))], None, None


def _to_tokens_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return torch.ops.ringtile.to_heads(grads, ctx.kinds, ctx.exchange.number), None, None


for _name, _implementation, _fake, _backward in (
    ("to_heads", _to_heads, _fake_to_heads, _to_heads_backward),
    ("to_tokens", _to_tokens, _fake_to_tokens, _to_tokens_backward),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringtile::{_name}", _fake, lib=library)
    torch.library.register_autograd(f"ringtile::{_name}", _backward, setup_context=_keep_exchange, lib=library)
