"""Attention over a list of parts: the one executor of LongNet and of attention over ranks.

A *part* is one call of the operator: some rows of the queries against some keys of a *source*, a pair of keys and
values that can arrive later and whose gradients can travel home.

| caller | rows and keys of a part | sources | results |
|---|---|---|---|
| `dilated_attention` | strided tokens of segments | own keys | merged by lse |
| `ring_attention`, exchange | a slice of rows, all keys | own keys, two parts of the buffer | placed |
| `ring_attention`, ring | slices of rows and keys | the keys of each rank | merged by lse |
| `ring_dilated_attention` | numbered rows and keys | own keys, the buffer | merged by lse |
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringtile.functional.attention import sparse_attention, without_autocast
from ringtile.functional.merge import merge_attention
from ringtile.index import BlockIndex, build_index
from ringtile.kernels.contracts import (
    ROW_NAMES,
    Call,
    accumulator,
    check_memory,
    is_batched,
    merge_into,
    new_out,
    pack_keys,
)
from ringtile.kernels.select import select
from ringtile.patterns import Pattern
from ringtile.patterns.private import in_forward_mode, is_transformed


class Places:
    """Places of the rows or the keys of a part in tensors ``[B, H, N, ...]``."""

    def take(self, x: Tensor) -> Tensor:
        """Return them as ``[B', H', n, ...]``, differentiable."""
        raise NotImplementedError

    def take_mask(self, mask: Tensor) -> Tensor:
        """Return the key mask ``[B', n]`` of the part from ``[B, N]``."""
        raise NotImplementedError

    def views(self, total: Tensor, part: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield views of the whole, each with the same elements of the part."""
        raise NotImplementedError

    def put(self, total: Tensor, part: Tensor) -> None:
        """Write a part to its places."""
        for mine, theirs in self.views(total, part):
            mine.copy_(theirs)

    def merge(self, out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        """Merge an output and an lse into those at their places."""
        for outs, lses in zip(self.views(out, more), self.views(lse, more_lse), strict=True):
            merge_into(outs[0], lses[0], outs[1], lses[1])

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a gradient at its places."""
        for mine, theirs in self.views(total, part):
            mine.add_(theirs)


@dataclass(frozen=True)
class Slice(Places):
    """Consecutive tokens of all heads."""

    begin: int
    end: int

    def take(self, x: Tensor) -> Tensor:
        return x[:, :, self.begin : self.end]

    def take_mask(self, mask: Tensor) -> Tensor:
        return mask[:, self.begin : self.end]

    def views(self, total: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
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

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Return the part's tensors and its key mask, from the queries and a source."""
        if self.keys is None:
            return (self.rows.take(q), k, v), mask
        tensors = self.rows.take(q), self.keys.take(k), self.keys.take(v)
        return tensors, None if mask is None else self.keys.take_mask(mask)

    def call_of(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Call:
        """Return the call of the operator on the part's own tensors."""
        rule, call, index = self.rule, self.call, None
        if isinstance(rule, BlockIndex):
            index, call = rule, call._replace(start=rule.start, block=rule.block)
        elif not rule.text:
            sizes = {"start": call.start, "num_heads": q.shape[1], "batch": max(q.shape[0], 1), "block": call.block}
            index = build_index(rule, q.shape[2], k.shape[2], **sizes, device=q.device)
        call = call._replace(
            pattern="" if isinstance(rule, BlockIndex) else rule.text or "",
            tiles=() if index is None else index.tensors(),
            key_bits=None if mask is None else pack_keys(mask),
        )
        return call._replace(backend=select(q, k, v, call))


Compute = Callable[[Any, Tensor, Tensor, Tensor | None], Any]
"""Computes the parts of a source from its name, its keys, its values and its key mask."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a call and their only source, "own": keys and values that lie where they are.

    Subclasses have more sources. Each method calls ``compute`` once per source, when its keys have arrived, and sends
    tensors between these calls.
    """

    parts: Callable[[Any], Iterable[Part]]
    """Returns the parts of a source. Each pass calls it anew, so that their places live no longer than a pass."""
    own_mask: Tensor | None
    is_merged = True
    """False if the parts are slices that have each row once, so that no sum needs room in a wider dtype."""
    composes = True
    """False if there are no second derivatives and no compiled graphs."""

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute all parts. Return the tensors that `backward` needs beside the keys and values."""
        compute("own", k, v, self.own_mask)
        return ()

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Return the gradients of the keys and values. ``compute`` returns the two of a source."""
        grads: Iterable[Tensor] = compute("own", k, v, self.own_mask)
        return grads

    def composed(self, k: Tensor, v: Tensor, compute: Compute) -> Callable[[Tensor], Tensor]:
        """Compute all parts with derivatives, by counts from ``compute``. Return the last step of both results."""
        compute("own", k, v, self.own_mask)
        return lambda x: x


def attend_parts(q: Tensor, k: Tensor, v: Tensor, parts: Parts, backend: str | None) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, N, Dv]`` and the lse of a list of parts, differentiable twice if it composes."""
    # An autograd Function does not compose with torch.func, forward mode or compilers. The reference is no operator.
    transformed = is_transformed() or in_forward_mode()
    with without_autocast(q):
        if parts.composes and (transformed or torch.compiler.is_compiling() or backend == "reference"):
            return composed(q, k, v, parts)
        function: Any = _Attended if parts.composes else _AttendedOnce
        out, lse = function.apply(q, k, v, parts)
    return out, lse


class _Attended(torch.autograd.Function):
    """All parts one after another. It saves only the whole output and lse.

    The weights of a part are exp(score - lse) with the lse of whole rows. So its backward pass reads the whole output
    and lse, and the merge itself needs no derivative.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        if parts.is_merged:
            # Rows that no part has keep these values. Each merge rounds, so the sums are wider than the result.
            shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
            out = q.new_zeros(shape, dtype=accumulator(q)).transpose(1, 2)
            lse = torch.full(q.shape[:3], -math.inf, dtype=out.dtype, device=q.device)
        else:
            out, lse = new_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulator(q))

        def compute(source: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
            for part in parts.parts(source):
                tensors, kept = part.read(q, keys, values, mask)
                found = torch.ops.ringtile.forward(*tensors, *part.call_of(*tensors, kept))
                if part.merges:
                    part.rows.merge(out, lse, *found)
                else:
                    part.rows.put(out, found[0])
                    part.rows.put(lse, found[1])

        saved = parts.forward(k, v, compute)
        # If results were merged, the output was wider so far.
        out = out.to(q.dtype)
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse, *saved), parts = ctx.saved_tensors, ctx.parts
        # Even without gradients of its results, a rank takes part in the collectives.
        out_grad = torch.zeros_like(out) if out_grad is None else out_grad
        again = torch.is_grad_enabled()
        if again or (parts.composes and any(map(is_batched, (out_grad, lse_grad)))):
            # By operations that vmap, and with a graph, if the gradients differentiate again.
            wanted = [x for x, need in zip((q, k, v), ctx.needs_input_grad, strict=False) if need]
            grads, n = (out_grad, lse_grad), 1 if lse_grad is None else 2
            with torch.enable_grad():
                results = composed(q, k, v, parts)
            found = iter(torch.autograd.grad(results[:n], wanted, grads[:n], create_graph=again, allow_unused=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None
        check_memory(ROW_NAMES, (out_grad, lse_grad, q, k, v, out, lse))
        wide = accumulator(q)
        new, dtype = (torch.zeros, wide) if parts.is_merged else (torch.empty, q.dtype)
        q_total = new(q.shape, dtype=dtype, device=q.device)

        def differentiate(source: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> list[Tensor]:
            """Return the gradients of a source's keys and values, summed in the order of its parts."""
            totals: list[Tensor] = []
            for part in parts.parts(source):
                tensors, kept = part.read(q, keys, values, mask)
                grads = [None if x is None else part.rows.take(x) for x in (out_grad, lse_grad)]
                results = part.rows.take(out), part.rows.take(lse).contiguous()
                call = part.call_of(*tensors, kept)
                q_grad, *found = torch.ops.ringtile.backward(*grads, *tensors, *results, *call)
                (part.rows.add if parts.is_merged else part.rows.put)(q_total, q_grad)
                if part.keys is None:
                    # The gradients of the first part are the room for the sums of all.
                    totals = [x.add_(more) for x, more in zip(totals, found, strict=True)] if totals else found
                    continue
                totals = totals or [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (keys, values)]
                for total, grad in zip(totals, found, strict=True):
                    part.keys.add(total, grad)
            return totals or [torch.zeros_like(keys), torch.zeros_like(values)]

        k_grad, v_grad = parts.backward(k, v, saved, differentiate)
        return *(x.to(q.dtype) for x in (q_total, k_grad, v_grad)), None


class _AttendedOnce(_Attended):
    """`_Attended` with an error in place of a second derivative."""

    backward = staticmethod(once_differentiable(_Attended.backward))  # type: ignore[assignment]


_OPTIONS = ("dropout_p", "seed", "scale", "softcap", "alibi_slopes", "head_at", "batch_at")
"""The fields of a call that are arguments of `sparse_attention` under the same names."""


def composed(q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """Compute the same with operations that differentiate to any order, vmap and compile, but use more memory."""
    found: list[tuple[Part, Tensor, Tensor]] = []

    def compute(source: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> int:
        before = len(found)
        for part in parts.parts(source):
            tensors, kept = part.read(q, keys, values, mask)
            options: dict[str, Any] = {name: getattr(part.call, name) for name in _OPTIONS}
            start = None if isinstance(part.rule, BlockIndex) else part.call.start
            options |= {"key_mask": kept, "start": start, "backend": part.call.backend or None}
            out, lse = sparse_attention(*tensors, part.rule, enable_gqa=True, return_lse=True, **options)
            found.append((part, out, lse))
        return len(found) - before

    finish = parts.composed(k, v, compute)
    if parts.is_merged or not found:
        # A zero with a derivative, so that there are gradients (zeros) if no query keeps a key.
        zero = sum((x[:, :, :0].sum() for x in (k, v)), q[:, :, :0].sum())
        out, lse = _merged(q, v.shape[3], zero, found)
    else:
        ordered = sorted(found, key=lambda each: each[0].rows.begin)  # type: ignore[attr-defined]
        out, lse = torch.cat([each[1] for each in ordered], 2), torch.cat([each[2] for each in ordered], 2)
    return finish(out), finish(lse)


def _merged(
    q: Tensor, value_dim: int, zero: Tensor, found: Sequence[tuple[Part, Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
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
