"""Attention over a list of parts: the one executor of LongNet and of attention over ranks.

A *part* is one call of the operator: some rows of the queries against some keys of a *source*. A source is a pair of
keys and values that can arrive later and whose gradients can travel home. Parts either have rows of their own, and
their results are placed there, or they share rows, and their results are merged by lse.

| caller | parts | sources | results |
|---|---|---|---|
| `dilated_attention` | strided views of segments | the keys | merged |
| `ring_attention`, exchange | runs of rows | own keys, two parts of the buffer | placed |
| `ring_attention`, ring | runs of rows and keys | the keys of each rank | merged |
| `ring_dilated_attention` | numbered rows and keys | own keys, the buffer | merged |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ringtile.functional.attention import sparse_attention, without_autocast
from ringtile.functional.merge import merge_attention
from ringtile.index import BlockIndex, build_index
from ringtile.kernels.contracts import ROW_NAMES, Call, accumulator, check_memory, merge_into, new_out, pack_keys
from ringtile.kernels.select import select
from ringtile.patterns import Pattern


class Places(Protocol):
    """Where the rows or the keys of a part lie in tensors ``[B, H, N, ...]``."""

    def take(self, x: Tensor) -> Tensor:
        """Return them as ``[B', H', n, ...]``, differentiable."""

    def take_mask(self, mask: Tensor) -> Tensor:
        """Return the key mask ``[B', n]`` of these keys from that of all, ``[B, N]``."""

    def put(self, total: Tensor, part: Tensor) -> None:
        """Write ``[B', H', n, ...]`` to its places."""

    def merge(self, totals: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor]) -> None:
        """Merge an output and an lse into those at their places."""

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a gradient at its places."""


class Viewed:
    """Places that are views of the whole, so that results reach them without a copy."""

    def views(self, total: Tensor, part: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield views of the whole, each with the same elements of the part."""
        raise NotImplementedError

    def put(self, total: Tensor, part: Tensor) -> None:
        """Write a part to its places."""
        for mine, theirs in self.views(total, part):
            mine.copy_(theirs)

    def merge(self, totals: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor]) -> None:
        """Merge an output and an lse into those at their places."""
        outs, lses = (self.views(*pair) for pair in zip(totals, parts, strict=True))
        for (out, more), (lse, more_lse) in zip(outs, lses, strict=True):
            merge_into(out, lse, more, more_lse)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a gradient at its places."""
        for mine, theirs in self.views(total, part):
            mine.add_(theirs)


@dataclass(frozen=True)
class Slice(Viewed):
    """Consecutive tokens of all heads."""

    begin: int
    end: int

    def take(self, x: Tensor) -> Tensor:
        """Return a view of the tokens."""
        return x[:, :, self.begin : self.end]

    def take_mask(self, mask: Tensor) -> Tensor:
        """Return a view of the tokens of a mask."""
        return mask[:, self.begin : self.end]

    def views(self, total: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the only pair."""
        yield self.take(total), part


class Part(NamedTuple):
    """One call of the operator."""

    rows: Places
    keys: Places | None
    """None for all keys of the source."""
    rule: Pattern | BlockIndex
    """The kept pairs, by their places in the part."""
    call: Call
    """The options of the softmax, and ``start`` if the rule is a pattern."""
    branch: int = 0
    """Parts of one branch have no row in common."""
    merges: bool = False
    """True if an earlier part can have had results for these rows."""

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the part's queries, keys and values."""
        keys, values = (x if self.keys is None else self.keys.take(x) for x in (k, v))
        return self.rows.take(q), keys, values

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the part's key mask from that of the source."""
        return mask if mask is None or self.keys is None else self.keys.take_mask(mask)

    def call_of(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Call:
        """Return the call of the operator on the part's own tensors."""
        rule, call = self.rule, self.call
        if isinstance(rule, Pattern):
            call, index = call._replace(pattern=rule.text or ""), None
            if not call.pattern:
                sizes = {"start": call.start, "num_heads": q.shape[1], "batch": max(q.shape[0], 1), "block": call.block}
                index = build_index(rule, q.shape[2], k.shape[2], **sizes, device=q.device)
        else:
            index = rule
        if index is not None:
            call = call._replace(start=index.start, block=index.block, tiles=index.tensors())
        call = call._replace(key_bits=None if mask is None else pack_keys(mask))
        return call._replace(backend=select(q, k, v, call))


Compute = Callable[[Any, Tensor, Tensor, Tensor | None], Any]
"""Computes the parts of a source from its name, its keys, its values and its key mask."""


class Sources(Protocol):
    """The keys and values that parts read, in the order in which they are ready, and the ways of their gradients.

    Each pass calls ``compute`` once per source. Between these calls, tensors travel.
    """

    composes: bool
    """False if there are no second derivatives and no compiled graphs."""

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute all parts. Return the tensors that `backward` needs beside the keys and values."""

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Return the gradients of the keys and values. ``compute`` returns the two of a source."""

    def composed(self, k: Tensor, v: Tensor, compute: Compute) -> Callable[[Tensor], Tensor]:
        """Compute all parts from operators with derivatives. Return the last step of both results.

        ``compute`` returns the number of parts of a source.
        """


@dataclass(frozen=True, eq=False)
class Here:
    """Keys and values that lie where they are: the source "own"."""

    key_mask: Tensor | None
    composes = True

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute all parts at once."""
        compute("own", k, v, self.key_mask)
        return ()

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Return the sums over all parts."""
        found: Iterable[Tensor] = compute("own", k, v, self.key_mask)
        return found

    def composed(self, k: Tensor, v: Tensor, compute: Compute) -> Callable[[Tensor], Tensor]:
        """Compute all parts at once."""
        compute("own", k, v, self.key_mask)
        return lambda x: x


class Job(NamedTuple):
    """What `attend_parts` computes, but for its tensors."""

    parts: Callable[[Any], Iterable[Part]]
    """Returns the parts of a source. Every pass calls it anew, so that no pass keeps the places of the others."""
    sources: Sources
    write: Literal["place", "merge"]
    """"place" if the parts are slices that have each row once. Their results need no room in a wider dtype."""


def attend_parts(q: Tensor, k: Tensor, v: Tensor, job: Job, backend: str | None) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, N, Dv]`` and the lse of a list of parts, differentiable twice if the sources are."""
    function: Any = _Attended if job.sources.composes else _AttendedOnce
    with without_autocast(q):
        if job.sources.composes and needs_composing(backend):
            return composed(q, k, v, job)
        out, lse = function.apply(q, k, v, job)
    return out, lse


def needs_composing(backend: str | None) -> bool:
    """Return True if an autograd Function does not compose: torch.func, forward mode, compile, the reference."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transformed or torch.compiler.is_compiling() or backend == "reference"


class _Attended(torch.autograd.Function):
    """All parts one after another. It saves only the whole output and lse.

    The softmax of a part is a share of that of its rows: exp(score - lse) with the lse of the rows gives the weights of
    the whole. So the backward pass of a part reads the merged output and lse, and the merge needs no derivative.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
        if job.write == "place":
            out, lse = new_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulator(q))
        else:
            # Rows that no part has keep these values. Each merge rounds, so the sums are wider than the result.
            shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
            out = q.new_zeros(shape, dtype=accumulator(q)).transpose(1, 2)
            lse = torch.full(q.shape[:3], -math.inf, dtype=out.dtype, device=q.device)

        def compute(source: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
            for part in job.parts(source):
                tensors = part.tensors(q, keys, values)
                found = torch.ops.ringtile.forward(*tensors, *part.call_of(*tensors, part.mask(mask)))
                if part.merges:
                    part.rows.merge((out, lse), found)
                else:
                    part.rows.put(out, found[0])
                    part.rows.put(lse, found[1])

        saved = job.sources.forward(k, v, compute)
        out = out.to(q.dtype)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse, *saved), job = ctx.saved_tensors, ctx.job
        # Even without gradients of its results a rank takes part in the collectives.
        out_grad = torch.zeros_like(out) if out_grad is None else out_grad
        if torch.is_grad_enabled():
            results = composed(q, k, v, job)
            return *differentiable_grads(results, (q, k, v), ctx.needs_input_grad, (out_grad, lse_grad)), None
        check_memory(ROW_NAMES, (out_grad, lse_grad, q, k, v, out, lse))
        wide, is_placed = accumulator(q), job.write == "place"
        new = torch.empty if is_placed else torch.zeros
        q_total = new(q.shape, dtype=q.dtype if is_placed else wide, device=q.device)

        def differentiate(source: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> list[Tensor]:
            """Return the gradients of a source's keys and values, summed in the order of its parts."""
            totals: list[Tensor] = []
            for part in job.parts(source):
                tensors = part.tensors(q, keys, values)
                call = part.call_of(*tensors, part.mask(mask))
                grads = [None if x is None else part.rows.take(x) for x in (out_grad, lse_grad)]
                results = part.rows.take(out), part.rows.take(lse).contiguous()
                q_grad, *found = torch.ops.ringtile.backward(*grads, *tensors, *results, *call)
                (part.rows.put if is_placed else part.rows.add)(q_total, q_grad)
                if part.keys is None:
                    # The gradients of the first part are the room for the sums of all.
                    totals = [x.add_(more) for x, more in zip(totals, found, strict=True)] if totals else found
                    continue
                totals = totals or [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (keys, values)]
                for total, grad in zip(totals, found, strict=True):
                    part.keys.add(total, grad)
            return totals or [torch.zeros_like(keys), torch.zeros_like(values)]

        k_grad, v_grad = job.sources.backward(k, v, saved, differentiate)
        return *(x.to(q.dtype) for x in (q_total, k_grad, v_grad)), None


class _AttendedOnce(_Attended):
    """`_Attended` with an error in place of a second derivative."""

    backward = staticmethod(once_differentiable(_Attended.backward))  # type: ignore[assignment]


def differentiable_grads(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    result_grads: Sequence[Tensor | None],
) -> Iterator[Tensor | None]:
    """Return the gradients of the needed inputs with a graph, so that they differentiate again."""
    given = [(y, grad) for y, grad in zip(results, result_grads, strict=True) if grad is not None]
    wanted = [x for x, need in zip(inputs, needed, strict=False) if need]
    ys, ys_grads = zip(*given, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, ys_grads, create_graph=True, allow_unused=True))
    return (next(found) if need else None for _, need in zip(inputs, needed, strict=False))


def composed(q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Compute the same with operations that differentiate to any order, vmap and compile, but use more memory."""
    found: list[tuple[Part, Tensor, Tensor]] = []

    def compute(source: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> int:
        before = len(found)
        for part in job.parts(source):
            call = part.call
            out, lse = sparse_attention(
                *part.tensors(q, keys, values),
                part.rule,
                key_mask=part.mask(mask),
                start=call.start if isinstance(part.rule, Pattern) else None,
                **{name: getattr(call, name) for name in _OPTIONS},
                backend=call.backend or None,
                enable_gqa=True,
                return_lse=True,
            )
            found.append((part, out, lse))
        return len(found) - before

    finish = job.sources.composed(k, v, compute)
    # A zero with a derivative, so that there are gradients (zeros) if no query keeps a key.
    zero = sum((x[:, :, :0].sum() for x in (k, v)), q[:, :, :0].sum())
    out, lse = _placed(found) if job.write == "place" and found else _merged(q, v.shape[3], zero, found)
    return finish(out), finish(lse)


_OPTIONS = ("dropout_p", "seed", "scale", "softcap", "alibi_slopes", "head_at", "batch_at")
"""The fields of a call that are arguments of `sparse_attention` under the same names."""


def _placed(found: list[tuple[Part, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join the results of slices that have each row once."""
    if len(found) == 1:
        return found[0][1:]
    ordered = sorted(found, key=lambda each: each[0].rows.begin)  # type: ignore[attr-defined]
    out, lse = (torch.cat(results, 2) for results in list(zip(*ordered, strict=True))[1:])
    return out, lse


def _merged(q: Tensor, value_dim: int, zero: Tensor, found: list[tuple[Part, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put the results of each branch at its rows, then merge the branches."""
    batch, heads, n_queries = q.shape[:3]
    rows = heads * n_queries
    # Rows are numbered head * n_queries + token: with 2 heads of 3 tokens, token 1 of head 1 is row 4.
    numbers = torch.arange(rows, device=q.device).view(1, heads, n_queries)
    n_branches = 1 + max([part.branch for part, _, _ in found], default=0)
    outs = [zero.expand(batch, rows, value_dim)] * n_branches
    lses = [(zero.to(accumulator(q)) - math.inf).expand(batch, rows)] * n_branches
    for part, out, lse in found:
        at, branch = part.rows.take(numbers).flatten(), part.branch
        outs[branch] = outs[branch].index_copy(1, at, out.reshape(batch, len(at), value_dim))
        lses[branch] = lses[branch].index_copy(1, at, lse.reshape(batch, len(at)))
    shape = heads, n_queries
    return merge_attention([x.unflatten(1, shape) for x in outs], [x.unflatten(1, shape) for x in lses])
