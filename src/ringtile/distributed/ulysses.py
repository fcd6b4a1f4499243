"""Exchange heads for tokens (DeepSpeed Ulysses): ranks that hold other tokens come to hold other heads of all these.

On a mesh with two dimensions the ranks of a row exchange heads, and then hold the tokens of the whole row.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.distributed.exchange import by_number
from ringtile.distributed.layout import Layout, Run, placed, with_starts
from ringtile.distributed.lockstep import Facts, Lockstep
from ringtile.distributed.stages import Stage, Tensors, gather, scatter
from ringtile.index import BlockIndex, build_index
from ringtile.kernels.contracts import accumulator
from ringtile.kernels.operators import library, register
from ringtile.patterns import Pattern
from ringtile.patterns.wrapped import for_heads

# `kinds` has a letter per tensor: "q" if its heads are those of the queries, "k" for those of the keys. The last can be
# "m", for one head that all ranks get, as of a key mask.
library.define("to_heads(Tensor[] xs, str kinds, int exchange) -> Tensor[]")
library.define("to_tokens(Tensor[] xs, str kinds, int exchange) -> Tensor[]")
_WHAT = "an exchange of heads for tokens"


@dataclass(frozen=True)
class HeadPlan:
    """Which heads and tokens a rank exchanges with the others of its row."""

    pattern: Pattern
    """Pattern of all heads."""
    layout: Layout
    """Tokens of the ranks of all rows."""
    rank: int
    """This rank, counted in the layout."""
    n_ranks: int
    """Number of ranks of a row."""
    batch: int
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        if self.num_heads % self.n_ranks:
            degrees = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ValueError(
                f"query: expected a number of heads that {self.n_ranks} ranks can share equally, got {self.num_heads}; "
                f"degrees that divide it: {degrees}"
            )

    @property
    def me(self) -> int:
        """This rank, counted in its row."""
        return self.rank % self.n_ranks

    @cached_property
    def rows(self) -> Layout:
        """Tokens of each row."""
        return self.layout.merged(self.n_ranks)

    @cached_property
    def places(self) -> tuple[tuple[Run, ...], ...]:
        """The places of each rank's tokens in those of the row."""
        row = self.rank // self.n_ranks
        held = with_starts(self.rows.runs[row])
        return tuple(placed(runs, held) for runs in self.layout.runs[row * self.n_ranks :][: self.n_ranks])

    @property
    def n_tokens(self) -> int:
        """Number of tokens of this rank."""
        return self.layout.size(self.rank)

    @property
    def n_row(self) -> int:
        """Number of tokens of this rank's row."""
        return self.rows.size(self.rank // self.n_ranks)

    @cached_property
    def heads(self) -> dict[str, tuple[Run, ...]]:
        """For each kind the heads that each rank gets."""
        count, shared = self.num_heads // self.n_ranks, self.num_heads // self.num_kv_heads
        # With 12 query heads, 4 key heads and 6 ranks, rank 1 gets the query heads 2 and 3. Each key head serves 3 of
        # them, so rank 1 gets the key heads 0 and 1, and both are at other ranks, too.
        queries = tuple((rank * count, rank * count + count) for rank in range(self.n_ranks))
        keys = tuple((begin // shared, (end - 1) // shared + 1) for begin, end in queries)
        return {"q": queries, "k": keys, "m": ((0, 1),) * self.n_ranks}

    @cached_property
    def key_at(self) -> list[int] | None:
        """The own key head of each group of query heads, if not equally many query heads share each; otherwise None.

        >>> from ringtile.patterns import Dense
        >>> HeadPlan(Dense(), Layout.contiguous(1024, 4), 1, 4, 1, 12, 6).key_at
        [0, 1, 1]
        """
        (begin, end), (first, last) = (self.heads[kind][self.me] for kind in "qk")
        shared = self.num_heads // self.num_kv_heads
        # Query heads in groups of this size have the same key head: of the heads 3, 4 and 5 above, 2 share each, so the
        # groups are single heads, and the own key heads 0, 1 and 1.
        alike = gcd(end - begin, shared)
        found = [head // shared - first for head in range(begin, end, alike)]
        return None if found == list(range(last - first)) else found

    @cached_property
    def rule(self) -> Pattern:
        """The pattern of this rank's heads."""
        return for_heads(self.pattern, tuple(range(*self.heads["q"][self.me])), self.num_heads)


class HeadExchange(Lockstep):
    """The stage of one `HeadPlan` among the ranks of a row. Operators know it by its number."""

    def __init__(
        self, plan: HeadPlan, facts: Facts, every: dist.ProcessGroup, outer: dist.ProcessGroup, row: dist.ProcessGroup
    ) -> None:
        super().__init__(every, facts, is_idle=plan.n_ranks == 1)
        self.plan = plan
        # Computed here: Dynamo reads them.
        self.heads, self.key_at = plan.heads["q"][plan.me], plan.key_at
        self.rows, self.rule = plan.rows, plan.rule
        self.index: BlockIndex | None = None
        # All tokens of this rank go to each other, which gets other heads of them. Own ones do not travel.
        own = [() if rank == plan.me else ((0, plan.n_tokens),) for rank in range(plan.n_ranks)]
        arriving = [() if rank == plan.me else places for rank, places in enumerate(plan.places)]
        self._stage = Stage(own, arriving, ref(row), is_idle=plan.n_ranks == 1)
        self.number = by_number.add(self)

    def build(self, device: torch.device) -> None:
        """Build the index of a pattern without text: Dynamo can read an index, and cannot build one."""
        if self.rule.text is None and self.index is None:
            heads, n_tokens = self.heads[1] - self.heads[0], self.plan.layout.n_tokens
            batch = max(self.plan.batch, 1)
            self.index = build_index(self.rule, n_tokens, start=0, num_heads=heads, batch=batch, device=device)

    def to_heads(self, xs: Tensors, kinds: str) -> list[Tensor]:
        """Return this rank's heads of the row's tokens, from all heads of its own tokens."""
        self.begin()
        plan, stage, parts = self.plan, self._stage, self._of_ranks(xs, kinds)
        found = [x.new_empty(*x.shape[:2], plan.n_row, x.shape[3]) for x in parts[plan.me]]
        sent, received = stage.pack(*parts), stage.room(found)
        self.check(f"heads of {kinds}, {sent.dtype}", sent.device)
        works = stage.start(received, sent, parts, [found])
        scatter(found, parts[plan.me], plan.places[plan.me])
        self.wait(works, _WHAT)
        stage.unpack(received, found)
        return found

    def to_tokens(self, xs: Tensors, kinds: str) -> list[Tensor]:
        """Return all heads of this rank's tokens, from its heads of the row's tokens.

        If ranks share a key head, these are sums over the ranks, in float32 or better and in their order.
        """
        self.begin()
        plan, stage = self.plan, self._stage.back
        # True if several ranks have the same key head.
        is_sum = "k" in kinds and plan.num_kv_heads % plan.n_ranks > 0
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
        self.check(f"tokens of {kinds}, {sent.dtype}", sent.device)
        works = stage.start(received, sent, [xs], parts)
        gather(parts[plan.me], xs, plan.places[plan.me])
        self.wait(works, _WHAT)
        stage.unpack(received, *parts, add=is_sum)
        return [total.to(x.dtype) for total, x in zip(found, xs, strict=True)]

    def _of_ranks(self, xs: Tensors, kinds: str) -> list[list[Tensor]]:
        """Return the heads of each rank of the row, of tensors with all heads."""
        heads = [self.plan.heads[kind] for kind in kinds]
        return [[x[:, slice(*of[rank])] for x, of in zip(xs, heads, strict=True)] for rank in range(self.plan.n_ranks)]


def _by_dtype(name: str, xs: Tensors, kinds: str, number: int) -> list[Tensor]:
    """Send a message for each dtype. In one operator, so that compilers keep the same order at all ranks."""
    move, found = getattr(by_number[number], name), dict[int, Tensor]()
    for dtype in dict.fromkeys(x.dtype for x in xs):
        places = [place for place, x in enumerate(xs) if x.dtype == dtype]
        moved = move([xs[place] for place in places], "".join(kinds[place] for place in places))
        found.update(zip(places, moved, strict=True))
    return [found[place] for place in range(len(xs))]


def _fake(to_heads: bool, xs: Tensors, kinds: str, number: int) -> list[Tensor]:
    plan = by_number[number].plan
    counts, n = {"q": plan.num_heads, "k": plan.num_kv_heads}, plan.n_tokens
    if to_heads:
        counts, n = {kind: runs[plan.me][1] - runs[plan.me][0] for kind, runs in plan.heads.items()}, plan.n_row
    return [x.new_empty(x.shape[0], counts[kind], n, x.shape[3]) for x, kind in zip(xs, kinds, strict=True)]


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # A plan can leave its cache before the backward pass.
    ctx.kinds, ctx.exchange = inputs[1], by_number[inputs[2]]


def _to_heads_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None, None]:
    kinds = ctx.kinds.rstrip("m")
    found = torch.ops.ringtile.to_tokens(grads[: len(kinds)], kinds, ctx.exchange.number)
    return [*found, *[None] * (len(grads) - len(kinds))], None, None


def _to_tokens_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return torch.ops.ringtile.to_heads(grads, ctx.kinds, ctx.exchange.number), None, None


register("to_heads", partial(_by_dtype, "to_heads"), partial(_fake, True))
register("to_tokens", partial(_by_dtype, "to_tokens"), partial(_fake, False))
for _name, _backward in (("to_heads", _to_heads_backward), ("to_tokens", _to_tokens_backward)):
    torch.library.register_autograd(f"ringtile::{_name}", _backward, setup_context=_keep_exchange, lib=library)
