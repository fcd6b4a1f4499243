"""LongNet's dilated attention, by permuting tokens into dense segments."""

import math
import warnings
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from ringtile.functional import attention
from ringtile.functional.parts import Part, Parts, attend_parts
from ringtile.functional.permute import Strided, pieces
from ringtile.kernels.contracts import Call
from ringtile.patterns import Causal, Dense, Pattern, Segments, parse
from ringtile.patterns.checks import checked_ints
from ringtile.patterns.grammar import as_rule
from ringtile.patterns.traced import constant
from ringtile.patterns.wrapped import Compacted, InSegments, for_heads

_DENSE, _CAUSAL = Dense(), Causal()
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


def segment_numbers(batch: Tensor, segments: Tensor) -> Tensor:
    """Number the segments ``[S]`` of batch elements ``[B]`` for dropout: int64 ``[B * S]``, ``batch_at`` of a branch.

    They do not depend on the number of segments, so a part of the tokens drops the weights that the whole drops. No two
    are equal if there are at most 2^30 of them.
    """
    return ((batch.unsqueeze(1) * _NEXT_BATCH + segments) % 2**32).flatten()


def parts_of(q: Tensor, k: Tensor, branches: Sequence[Branch], call: Call, *, is_masked: bool) -> list[Part]:
    """Return the dense problems of all branches."""
    (batch, heads, n_queries), (key_heads, n_keys) = q.shape[:3], k.shape[1:3]
    found = []
    for number, (length, dilation, rule, is_alike) in enumerate(branches):
        # Heads at other offsets keep other keys, so a key mask needs a problem per offset.
        for piece in pieces(n_queries, n_keys, heads, length, dilation, by_offset=is_masked):
            segments = piece.key // piece.length + torch.arange(piece.segments, device=q.device)
            options = numbered(call, number, piece.heads, batch, segments)._replace(start=piece.start)
            kept = rule if is_alike else for_heads(rule, piece.heads, heads)
            rows, keys = Strided(piece), Strided(piece, keys=True, ratio=heads // key_heads)
            # The first branch has each row at most once, and nothing to merge it with.
            found.append(Part(rows, keys, kept, options, branch=number, merges=number > 0))
    return found


def numbered(call: Call, branch: int, heads: tuple[int, ...], batch: int, segments: Tensor) -> Call:
    """Return a call that draws the dropout of these heads and segments of a branch, if there is dropout."""
    if call.seed is None:
        return call
    # Each branch draws its own weights. A multiple of `_NEXT_SEED` wraps around as int64 does: 2^63 becomes -2^63.
    step = (branch * _NEXT_SEED + 2**63) % 2**64 - 2**63
    return call._replace(
        seed=call.seed + step,
        head_at=torch.tensor(heads, dtype=torch.int64, device=segments.device),
        batch_at=segment_numbers(torch.arange(batch, device=segments.device), segments),
    )


def _disjoint(branches: Sequence[Branch], pattern: Pattern | None) -> tuple[Branch, ...] | None:
    """Return branches that together keep each pair of the union once, or None if segments do not nest."""
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
        # Without a pattern, a branch of equal segments can keep all pairs of this one: then nothing is left.
        rates = [rate for of, rate in earlier if of == length]
        if pattern is not None or not any(dilation % rate == length % rate == 0 for rate in rates):
            found.append(Branch(length, dilation, rule))
    return tuple(found)


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
    """Return the branches of a call with their rules, or None if only `over_positions` keeps the pairs of a union."""
    if pattern is not None and pattern.num_heads not in (None, heads):
        raise ValueError(f"pattern: it is defined for {pattern.num_heads} heads, got {heads=}")
    if pattern is not None and pattern.batch_size is not None:
        raise ValueError(f"pattern: expected one rule for all batch rows, got {pattern.batch_size=}")
    if overlap not in ("mix", "union"):
        raise ValueError(f"overlap: expected 'mix' or 'union', got {overlap!r}")
    if overlap == "union" and pattern is None and torch.compiler.is_compiling():
        told = _told_rules(tuple(at), is_causal)
        if told is None:
            return None
        return tuple(Branch(length, rate, parse(text), is_alike=True) for length, rate, text in told)
    return _rules(at, pattern, is_causal, overlap)


def _rules(
    at: Sequence[tuple[int, int]], pattern: Pattern | None, is_causal: bool, overlap: str
) -> tuple[Branch, ...] | None:
    each = tuple(Branch(length, rate, _DENSE if pattern is None else pattern) for length, rate in at)
    found = _disjoint(each, pattern) if overlap == "union" else each
    if found is None or not is_causal:
        return found
    return tuple(part._replace(rule=_CAUSAL if part.rule == _DENSE else _CAUSAL & part.rule) for part in found)


# Dynamo does not trace the algebra of patterns.
@constant
def _told_rules(at: tuple[tuple[int, int], ...], is_causal: bool) -> tuple[tuple[int, int, str], ...] | None:
    """Return length, dilation and text of the branches of a union, or None if one has no text for all heads."""
    found = _rules(at, None, is_causal, "union")
    if found is None or any(part.rule.text is None for part in found):
        return None
    return tuple((part.length, part.dilation, repr(part.rule)) for part in found)


def over_positions(at: Sequence[tuple[int, int]], pattern: Pattern | None, overlap: str) -> list[Pattern]:
    """Return branches as patterns over positions, or their union. A pair counts once per pattern that keeps it."""
    # Dilation is by token inside a segment: a pattern relates the tokens that a branch keeps, counted from 0. Graphs of
    # torch 2.11 make no pattern whose defaults are given by place.
    found: list[Pattern] = [Segments(n, dilation=r) if pattern is None else InSegments(n, r, pattern) for n, r in at]
    return [reduce(or_, found)] if overlap == "union" else found


def warn_of_uncovered(branches: list[tuple[int, int]], heads: int, start: int, n_queries: int) -> None:
    """Warn once per configuration about head offsets with tokens that no branch keeps."""
    # A branch without dilation keeps every token. A compiled graph cannot warn.
    if any(rate == 1 for _, rate in branches) or torch.compiler.is_compiling():
        return
    if (tuple(branches), heads) in _warned:
        return
    tokens = torch.arange(max(start, 0), start + n_queries, device="cpu")
    uncovered = {}
    for head in range(min(heads, math.lcm(*(rate for _, rate in branches)))):
        kept = [tokens % length % rate == head % rate for length, rate in branches]
        share = 1 - reduce(or_, kept).double().mean().item() if len(tokens) else 0.0
        if share:
            uncovered[tuple(head % rate for _, rate in branches)] = share
    if uncovered:
        _warned.add((tuple(branches), heads))
        named = ", ".join(f"{list(offsets)} ({share:.0%})" for offsets, share in uncovered.items())
        warnings.warn(
            f"dilated_attention: no branch of dilation_rates={[rate for _, rate in branches]} keeps all tokens (a rate "
            f"of 1 would): queries without keys give 0 for heads of the offsets head % rate = {named}",
            stacklevel=3,
        )


class _Keywords(attention.Keywords, total=False):
    pattern: Pattern | str | None
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
    pattern: Pattern | str | None = None,
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
        query, key, value, is_causal, key_mask, scale, enable_gqa, return_lse: As in `sparse_attention`. The lse is over
            all counted pairs.
        segment_lengths: Segment length w of each branch, in tokens. The last one can be ragged, and w can exceed Nk.
        dilation_rates: Dilation rate r of each branch. If no branch has r = 1, some queries may keep no keys. They
            return 0, an lse of -inf and zero gradients. A UserWarning, once per configuration, names the heads.
        pattern: Which pairs to keep inside a segment. It relates the kept tokens, counted 0, 1, ... Default: all pairs.
        overlap: How to count a pair that several branches keep: "mix" counts it once per branch (the paper: branches
            are weighted by their softmax denominators), "union" counts it once, in one softmax over all kept pairs. If
            the segment lengths divide one another, the union is as fast as the mix. Otherwise it runs over tiles in
            token order, and inside a compiled graph also if neither of two rates divides the other.
        dropout_p: Probability of dropping a weight after the softmax, separately per branch. The dropout mask depends
            only on the seed, the number of the branch, the segment, the two places in it, the head and the batch
            element. So a call with the first segments, or with the last queries, drops the same weights.
        seed: Dropout seed, as an int or a tensor with one int64 element. Default: drawn from PyTorch's generator.
        backend: Backend of every dense problem, as in `sparse_attention`.

    Returns the output ``[B, H, Nq, Dv]``. With ``return_lse``, also the lse ``[B, H, Nq]`` in float32 (float64 for
    float64 inputs). Both are differentiable. Raises ValueError if shapes, dtypes, devices or values are invalid, or if
    the named backend does not support the call.

    >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
    >>> dilated_attention(q, k, v, [128, 256, 512], [1, 2, 4], is_causal=True).shape
    torch.Size([1, 4, 1000, 64])
    """
    attention.check_whole()
    query, key, value = attention.checked_tensors(query, key, value, enable_gqa)
    options: dict[str, Any] = {"dropout_p": dropout_p, "seed": seed, "scale": scale, "backend": backend}
    attention.check_options(query, key, key_mask=key_mask, **options)
    at = checked_branches(segment_lengths, dilation_rates)
    pattern = None if pattern is None else as_rule(pattern, "a Pattern between places in a segment")
    branches = rules_of(at, pattern, is_causal, overlap, query.shape[1])
    warn_of_uncovered(at, query.shape[1], key.shape[2] - query.shape[2], query.shape[2])
    if branches is None:
        # Segments that do not nest: one sparse pattern over positions.
        more: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "enable_gqa": enable_gqa, **options}
        union = over_positions(at, pattern, overlap)[0]
        return attention.sparse_attention(query, key, value, union, return_lse=return_lse, **more)
    call = attention.make_call(query, **options)
    parts = parts_of(query, key, branches, call, is_masked=key_mask is not None)
    out, lse = attend_parts(query, key, value, Parts(lambda source: parts, key_mask), backend)
    return (out, lse) if return_lse else out
