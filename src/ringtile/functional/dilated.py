"""LongNet's dilated attention, by permuting tokens into dense segments."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringtile.functional.attention import (
    Keywords,
    check_options,
    check_whole,
    checked_tensors,
    drawn_seed,
    sparse_attention,
    without_autocast,
)
from ringtile.functional.merge import merge_attention
from ringtile.functional.permute import Piece, add_compacted, compact, kept_rows, of_offset, pieces, query_view
from ringtile.index import build_index
from ringtile.kernels.contracts import ROW_NAMES, Call, accumulator, check_memory, merge_into, new_out, pack_keys
from ringtile.kernels.select import select
from ringtile.kernels.traced import constant
from ringtile.patterns import Causal, Dense, Pattern, Segments, parse
from ringtile.patterns.checks import checked_ints
from ringtile.patterns.wrapped import Compacted, InSegments, for_heads

_DENSE, _CAUSAL = Dense(), Causal()
_BLOCK = 128
_NEXT_SEED = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd and far from small numbers, so calls with neighboring seeds never share one."""
_NEXT_BATCH = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it modulo 2^32 stay far apart."""

_warned: set[tuple[tuple[tuple[int, int], ...], int]] = set()


class Branch(NamedTuple):
    """A segment length, a dilation, and the rule between places inside a segment."""

    length: int
    dilation: int
    rule: Pattern
    is_alike: bool = False
    """True if all heads are known to have the same rule."""


class Options(NamedTuple):
    """The arguments of a call that are not its tensors."""

    branches: tuple[Branch, ...]
    key_mask: Tensor | None
    dropout_p: float
    seed: Tensor | None
    scale: float
    backend: str | None


class Problem(NamedTuple):
    """The rule and the options of one dense problem of a branch. Its batch elements are segments."""

    rule: Pattern
    start: int
    """Place of the first query among the keys."""
    key_mask: Tensor | None
    seed: Tensor | None = None
    head_at: Tensor | None = None
    batch_at: Tensor | None = None


class _Part(NamedTuple):
    """One dense problem: a piece of a branch."""

    piece: Piece
    ratio: int
    problem: Problem


def branch_seed(seed: Tensor, branch: int) -> Tensor:
    """Return the dropout seed of a branch, one int64 element: each branch draws its own weights."""
    return seed + _signed(branch * _NEXT_SEED)


def segment_numbers(batch: Tensor, segments: Tensor) -> Tensor:
    """Number the segments ``[S]`` of batch elements ``[B]`` for dropout: int64 ``[B * S]``, ``batch_at`` of a branch.

    They do not depend on the number of segments, so a part of the tokens drops the weights that the whole drops. No two
    are equal if there are at most 2^30 of them.

    >>> segment_numbers(torch.arange(2), torch.arange(3)).tolist()
    [0, 1, 2, 2654435769, 2654435770, 2654435771]
    """
    return ((batch.unsqueeze(1) * _NEXT_BATCH + segments) % 2**32).flatten()


def _parts(branch: Branch, q: Tensor, k: Tensor, options: Options, number: int) -> Iterator[_Part]:
    """Yield the dense problems of a branch, which is number ``number``."""
    heads, mask = q.shape[1], options.key_mask
    cut = pieces(q.shape[2], k.shape[2], heads, branch.length, branch.dilation, by_offset=mask is not None)
    for piece in cut:
        kept = None
        if mask is not None:
            kept = kept_rows(mask.unsqueeze(1), piece, piece.offsets.start, keys=True).squeeze(1).flatten(0, 1)
        rule = branch.rule if branch.is_alike else for_heads(branch.rule, piece.heads, heads)
        problem = Problem(rule, piece.start, kept)
        segments = piece.key // piece.length + torch.arange(piece.segments, device=q.device)
        yield _Part(piece, heads // k.shape[1], numbered(problem, options, number, piece.heads, q.shape[0], segments))


def numbered(
    problem: Problem, options: Options, branch: int, heads: tuple[int, ...], batch: int, segments: Tensor
) -> Problem:
    """Return a problem with the dropout of these heads and segments of a branch, if there is dropout."""
    if options.seed is None:
        return problem
    return problem._replace(
        seed=branch_seed(options.seed, branch),
        head_at=torch.tensor(heads, device=segments.device),
        batch_at=segment_numbers(torch.arange(batch, device=segments.device), segments),
    )


def _signed(number: int) -> int:
    """Wrap a number into int64."""
    return (number + 2**63) % 2**64 - 2**63


def all_parts(q: Tensor, k: Tensor, options: Options) -> Iterator[tuple[int, _Part]]:
    """Yield every dense problem of a call with the number of its branch."""
    for number, branch in enumerate(options.branches):
        for part in _parts(branch, q, k, options, number):
            yield number, part


def call_of(q: Tensor, k: Tensor, v: Tensor, problem: Problem, options: Options) -> Call:
    """Build the operator call of a dense problem."""
    text, index = problem.rule.text or "", None
    if not text:
        lengths = {"n_queries": q.shape[2], "n_keys": k.shape[2], "start": problem.start}
        index = build_index(
            problem.rule, **lengths, num_heads=q.shape[1], batch=max(q.shape[0], 1), block=_BLOCK, device=q.device
        )
    call = Call(
        start=problem.start,
        block=_BLOCK,
        scale=options.scale,
        tiles=() if index is None else index.tensors(),
        pattern=text,
        key_bits=None if problem.key_mask is None else pack_keys(problem.key_mask),
        seed=problem.seed,
        head_at=problem.head_at,
        batch_at=problem.batch_at,
        dropout_p=options.dropout_p,
        backend=options.backend or "",
    )
    return call._replace(backend=select(q, k, v, call))


class _Merged(torch.autograd.Function):
    """Merge all branches one after another and save only the merged output and lse.

    The backward pass of a branch uses the merged output and lse, because its softmax is a part of the merged one. So
    the merge itself needs no derivative. `_composed` computes second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        dtype = accumulator(q)
        out = new_out(q.new_empty(q.shape, dtype=dtype), v.shape[-1]).zero_()
        lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
        for branch, part in all_parts(q, k, options):
            tensors = compact_part(q, k, v, part)
            call = call_of(*tensors, part.problem, options)
            found, found_lse = torch.ops.ringtile.forward(*tensors, *call)
            for offset in part.piece.offsets:
                mine = (query_view(out, part.piece, offset), query_view(lse, part.piece, offset))
                theirs = [of_offset(x, part.piece, q.shape[0], offset) for x in (found, found_lse)]
                if branch == 0:
                    mine[0].copy_(theirs[0])
                    mine[1].copy_(theirs[1])
                else:
                    merge_into(*mine, *theirs)
        out = out.to(q.dtype)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if out_grad is None and lse_grad is None:
            return (None,) * 4
        if torch.is_grad_enabled():
            results = _composed(q, k, v, ctx.options)
            return *differentiable_grads(results, (q, k, v), ctx.needs_input_grad, (out_grad, lse_grad)), None
        if out_grad is None:
            out_grad = torch.zeros_like(out)
        check_memory(ROW_NAMES, (out_grad, lse_grad, q, k, v, out, lse))
        totals = [torch.zeros(x.shape, dtype=accumulator(q), device=x.device) for x in (q, k, v)]
        for _, part in all_parts(q, k, ctx.options):
            piece = part.piece
            tensors = compact_part(q, k, v, part)
            rows = [None if x is None else compact(x, piece) for x in (out_grad, lse_grad, out, lse)]
            call = call_of(*tensors, part.problem, ctx.options)
            grads = torch.ops.ringtile.backward(rows[0], rows[1], *tensors, rows[2], rows[3], *call)
            add_compacted(totals[0], grads[0], piece)
            for total, grad in zip(totals[1:], grads[1:], strict=True):
                add_compacted(total, grad, piece, keys=True, ratio=part.ratio)
        return *(total.to(q.dtype) for total in totals), None


def compact_part(q: Tensor, k: Tensor, v: Tensor, part: _Part) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (compact(x, part.piece, keys=True, ratio=part.ratio) for x in (k, v))
    return compact(q, part.piece), keys, values


def _composed(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Compute the same with operations that differentiate to any order, vmap and compile, but use more memory."""
    numbers = torch.arange(q.shape[1] * q.shape[2], device=q.device).view(1, *q.shape[1:3])
    parts = (
        (branch, compact_part(q, k, v, part), part.problem, compact(numbers, part.piece).flatten())
        for branch, part in all_parts(q, k, options)
    )
    return compose(q, k, v, parts, options)


def compose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Iterable[tuple[int, tuple[Tensor, Tensor, Tensor], Problem, Tensor]],
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Merge dense problems of all branches into the output and lse of the queries ``[B, H, N, D]``.

    A part is the number of its branch, its tensors, its problem and the number ``head * N + token`` of each row.
    """
    batch, heads, n_queries = q.shape[:3]
    rows, value_dim = heads * n_queries, v.shape[3]
    # A zero with a derivative, so that there are gradients (zeros) if no query keeps a key.
    zero = sum((x[:, :, :0].sum() for x in (k, v)), q[:, :, :0].sum())
    outs = [zero.expand(batch, rows, value_dim) for _ in options.branches]
    lses = [(zero.to(accumulator(q)) - math.inf).expand(batch, rows) for _ in options.branches]
    for branch, tensors, problem, places in parts:
        found = sparse_attention(
            *tensors,
            problem.rule,
            key_mask=problem.key_mask,
            start=problem.start,
            dropout_p=options.dropout_p,
            seed=problem.seed,
            head_at=problem.head_at,
            batch_at=problem.batch_at,
            scale=options.scale,
            enable_gqa=True,
            return_lse=True,
            backend=options.backend,
        )
        out, lse = found
        outs[branch] = outs[branch].index_copy(1, places, out.reshape(batch, len(places), value_dim))
        lses[branch] = lses[branch].index_copy(1, places, lse.reshape(batch, len(places)))
    shape = (heads, n_queries)
    return merge_attention([x.unflatten(1, shape) for x in outs], [x.unflatten(1, shape) for x in lses])


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


def needs_composing(backend: str | None) -> bool:
    """Return True if an autograd Function does not compose: torch.func, forward mode, compile, the reference."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transformed or torch.compiler.is_compiling() or backend == "reference"


def _disjoint(branches: Sequence[Branch], pattern: Pattern | None) -> tuple[Branch, ...] | None:
    """Return branches that together keep each pair of the union once, or None if segments do not nest.

    A branch leaves out the pairs of shorter ones. If their segments divide its own, that is a rule between its places.
    """
    found: list[Branch] = []
    ascending = sorted({(branch.length, branch.dilation): branch for branch in branches}.items())
    for number, ((length, dilation), branch) in enumerate(ascending):
        earlier = [at for at, _ in ascending[:number]]
        if any(length % shorter for shorter, _ in earlier):
            return None
        taken: list[Pattern] = []
        for shorter, rate in reversed(earlier):
            if pattern is not None:
                taken.append(Compacted(InSegments(shorter, rate, pattern), dilation))
            elif dilation % rate or shorter % rate:
                taken.append(Compacted(Segments(shorter, rate), dilation))
            else:
                # The shorter branch contains every token of this one, so it keeps all pairs inside its segments.
                # That includes the pairs inside still shorter segments.
                whole = shorter % dilation == 0
                taken.append(Segments(shorter // dilation) if whole else Compacted(Segments(shorter), dilation))
                break
        rule = branch.rule
        if taken:
            fresh = ~reduce(or_, taken)
            rule = fresh if rule == _DENSE else rule & fresh
        if pattern is not None or not any(_covers(at, length, dilation) for at in earlier):
            found.append(Branch(length, dilation, rule))
    return tuple(found)


def _covers(other: tuple[int, int], length: int, dilation: int) -> bool:
    """Return True if the other branch has equal segments and keeps all pairs of this one."""
    return other[0] == length and dilation % other[1] == 0 and length % other[1] == 0


def checked_branches(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of segment length and dilation rate. Raise ValueError if they are invalid."""
    lengths = checked_ints("dilated_attention", "segment_lengths", segment_lengths, 1)
    rates = checked_ints("dilated_attention", "dilation_rates", dilation_rates, 1)
    if len(lengths) != len(rates):
        raise ValueError(
            f"dilation_rates: expected as many as segment_lengths, got {dilation_rates=} with {segment_lengths=}"
        )
    return list(zip(lengths, rates, strict=True))


def rules_of(
    at: Sequence[tuple[int, int]], pattern: Pattern | None, is_causal: bool, overlap: str, heads: int
) -> tuple[Branch, ...] | None:
    """Return the branches of a call with their rules, or None if only `union_of` keeps the pairs of a union."""
    _check_pattern(pattern, heads)
    if overlap not in ("mix", "union"):
        raise ValueError(f"overlap: expected 'mix' or 'union', got {overlap!r}")
    if overlap == "union" and pattern is None and torch.compiler.is_compiling():
        told = _told_rules(tuple(at), is_causal)
        if told is None:
            return None
        return tuple(Branch(length, rate, _told(text), is_alike=True) for length, rate, text in told)
    return _rules(at, pattern, is_causal, overlap)


def _rules(
    at: Sequence[tuple[int, int]], pattern: Pattern | None, is_causal: bool, overlap: str
) -> tuple[Branch, ...] | None:
    each = tuple(Branch(length, rate, pattern or _DENSE) for length, rate in at)
    found = _disjoint(each, pattern) if overlap == "union" else each
    if found is None or not is_causal:
        return found
    return tuple(part._replace(rule=_CAUSAL if part.rule == _DENSE else _CAUSAL & part.rule) for part in found)


# Dynamo does not trace the algebra of patterns.
@constant
def _told_rules(at: tuple[tuple[int, int], ...], is_causal: bool) -> tuple[tuple[int, int, str], ...] | None:
    """Return length, dilation and text of the branches of a union, or None if not all have a text.

    A rule with a text leaves out whole segments, the same for all heads.
    """
    found = _rules(at, None, is_causal, "union")
    if found is None or any(part.rule.text is None for part in found):
        return None
    return tuple((part.length, part.dilation, repr(part.rule)) for part in found)


@constant
def _told(text: str) -> Pattern:
    return parse(text)


def union_of(at: Sequence[tuple[int, int]], pattern: Pattern | None) -> Pattern:
    """Return the union of branches as one pattern over positions."""
    return reduce(or_, [Segments(*each) if pattern is None else InSegments(*each, pattern) for each in at])


def options_of(
    query: Tensor,
    branches: tuple[Branch, ...],
    key_mask: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    scale: float | None,
    backend: str | None,
) -> Options:
    """Return the options of a call, with a seed if there is dropout and with a scale."""
    drawn = drawn_seed(seed, query) if dropout_p else None
    return Options(branches, key_mask, dropout_p, drawn, query.shape[-1] ** -0.5 if scale is None else scale, backend)


def _check_pattern(pattern: Pattern | None, heads: int) -> None:
    if pattern is None:
        return
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern: expected a Pattern between places in a segment, got {type(pattern).__name__}")
    if pattern.num_heads not in (None, heads):
        raise ValueError(f"pattern: it is defined for {pattern.num_heads} heads, got {heads=}")
    if pattern.batch_size is not None:
        raise ValueError(f"pattern: expected one rule for all batch rows, got {pattern.batch_size=}")


def warn_of_uncovered(branches: list[tuple[int, int]], heads: int, start: int, n_queries: int) -> None:
    """Warn once per configuration about head offsets with tokens that no branch keeps."""
    if any(rate == 1 for _, rate in branches) or torch.compiler.is_compiling():
        return
    configuration = (tuple(branches), heads)
    if configuration in _warned:
        return
    tokens = torch.arange(max(start, 0), start + n_queries)
    uncovered = {}
    for head in range(min(heads, math.lcm(*(rate for _, rate in branches)))):
        kept = [tokens % length % rate == head % rate for length, rate in branches]
        share = 1 - reduce(or_, kept).double().mean().item() if len(tokens) else 0.0
        if share:
            uncovered[tuple(head % rate for _, rate in branches)] = share
    if uncovered:
        _warned.add(configuration)
        named = ", ".join(f"{list(offsets)} ({share:.0%})" for offsets, share in uncovered.items())
        warnings.warn(
            f"dilated_attention: no branch of dilation_rates={[rate for _, rate in branches]} keeps all tokens (a rate "
            f"of 1 would): queries without keys give 0 for heads of the offsets head % rate = {named}",
            stacklevel=3,
        )


class _Keywords(Keywords, total=False):
    pattern: Pattern | None
    overlap: Literal["mix", "union"]


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: bool,
    **keywords: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    pattern: Pattern | None = None,
    is_causal: bool = False,
    overlap: Literal["mix", "union"] = "mix",
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute LongNet's dilated attention, exactly (Ding et al. 2023, arXiv:2307.02486).

    Branch (w, r) cuts the tokens into segments of w. In each segment, head h attends among the tokens whose position
    modulo r is ``h % r``, by dense attention on w / r tokens. Each query costs as much as ``sum(w / r**2)`` keys, and
    memory is O(N). As in `sparse_attention`, the last query is aligned with the last key.

    Under `torch.compile`, one graph serves all lengths that are multiples of the longest segment. Where the last
    segment of a branch becomes ragged or whole, PyTorch compiles it again. A union with a ``pattern`` breaks the graph.

    Args:
        query: ``[B, H, Nq, D]`` in float64, float32, bfloat16 or float16, with any strides. Under autocast, all three
            tensors are cast first, except float64.
        key: ``[B, Hkv, Nk, D]`` in the same dtype. Hkv must equal H, or divide it if ``enable_gqa`` is set.
        value: ``[B, Hkv, Nk, Dv]`` in the same dtype.
        segment_lengths: Segment length w of each branch, in tokens. The last one can be ragged, and w can exceed Nk.
        dilation_rates: Dilation rate r of each branch. If no branch has r = 1, some queries may keep no keys. They
            return 0, an lse of -inf and zero gradients. A UserWarning, once per configuration, names the heads.
        pattern: Which pairs to keep inside a segment. It relates the kept tokens, counted 0, 1, ... Default: all pairs.
        is_causal: Keep only keys at or before the query's position.
        overlap: How to count a pair that several branches keep: "mix" counts it once per branch (the paper: branches
            are weighted by their softmax denominators), "union" counts it once, in one softmax over all kept pairs. If
            the segment lengths divide one another, the union is as fast as the mix. Otherwise it runs over tiles in
            token order, and inside a compiled graph also if neither of two rates divides the other.
        key_mask: ``[B, Nk]`` bool, True for keys that queries may attend to.
        dropout_p: Probability of dropping a weight after the softmax, separately per branch. The dropout mask depends
            only on the seed, the number of the branch, the segment, the two places in it, the head and the batch
            element. So a call with the first segments, or with the last queries, drops the same weights.
        seed: Dropout seed, as an int or a tensor with one int64 element. Default: drawn from PyTorch's generator.
        scale: Factor for the scores. Default: ``D ** -0.5``.
        enable_gqa: Let H / Hkv query heads share each key head.
        return_lse: Also return the log-sum-exp (natural log) over all counted pairs.
        backend: Backend of every dense problem, as in `sparse_attention`.

    Returns:
        The output ``[B, H, Nq, Dv]``. With ``return_lse``, also the lse ``[B, H, Nq]`` in float32 (float64 for float64
        inputs). Both are differentiable.

    Raises:
        ValueError: If shapes, dtypes, devices or values are invalid, or if the named backend does not support the call.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
        >>> dilated_attention(q, k, v, [128, 256, 512], [1, 2, 4], is_causal=True).shape
        torch.Size([1, 4, 1000, 64])
    """
    check_whole()
    query, key, value = checked_tensors(query, key, value, enable_gqa)
    check_options(query, key, key_mask=key_mask, dropout_p=dropout_p, seed=seed, scale=scale, backend=backend)
    at = checked_branches(segment_lengths, dilation_rates)
    branches = rules_of(at, pattern, is_causal, overlap, query.shape[1])
    warn_of_uncovered(at, query.shape[1], key.shape[2] - query.shape[2], query.shape[2])
    with without_autocast(query):
        if branches is None:
            # Segments that do not nest: one sparse pattern over positions.
            out, lse = sparse_attention(
                query,
                key,
                value,
                union_of(at, pattern),
                is_causal=is_causal,
                key_mask=key_mask,
                dropout_p=dropout_p,
                seed=seed,
                scale=scale,
                enable_gqa=enable_gqa,
                return_lse=True,
                backend=backend,
            )
        else:
            options = options_of(query, branches, key_mask, dropout_p, seed, scale, backend)
            if needs_composing(backend):
                out, lse = _composed(query, key, value, options)
            else:
                out, lse = _Merged.apply(query, key, value, options)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out
