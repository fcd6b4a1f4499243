"""LongNet's dilated attention over tokens that the ranks of a process group share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.agreement import compare, exchange_of, shapes_of
from ringtile.distributed.attention import ring_attention
from ringtile.distributed.branches import BranchPlan, Piece, Shape, make_branch_plan
from ringtile.distributed.exchange import Exchange, by_number, cast_finish, cast_start, tied
from ringtile.distributed.layout import Layout
from ringtile.distributed.process_groups import Ranks, real_group
from ringtile.distributed.shards import check_keys_finite, check_shard
from ringtile.distributed.transports import group_of
from ringtile.functional.attention import check_options, checked_tensors, without_autocast
from ringtile.functional.dilated import (
    Options,
    Problem,
    call_of,
    checked_branches,
    compose,
    differentiable_grads,
    needs_composing,
    numbered,
    options_of,
    rules_of,
    union_of,
    warn_of_uncovered,
)
from ringtile.kernels.contracts import accumulator, merge_into
from ringtile.kernels.traced import constant
from ringtile.patterns import Pattern
from ringtile.patterns.wrapped import for_heads


def ring_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    layout: Layout,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    pattern: Pattern | None = None,
    is_causal: bool = False,
    overlap: Literal["mix", "union"] = "mix",
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    check_finite: bool | str = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute `dilated_attention` over all tokens of a layout, each rank its own queries, exactly.

    A branch sends nothing if its segments lie inside the runs of the ranks. Otherwise ranks get the dilated tokens of
    the segments that their own tokens lie in, under ``is_causal`` none behind their last query. All branches share one
    all-to-all per pass, and a token that several branches need travels once. Segments inside a rank are computed
    meanwhile. All ranks make the same calls with the same branches, layout and options.

    Args:
        query: ``[B, H, n, D]``, the rank's n tokens in ascending order of position.
        key: ``[B, Hkv, n, D]``.
        value: ``[B, Hkv, n, Dv]``.
        segment_lengths: Segment length w of each branch, in tokens, as in `dilated_attention`.
        dilation_rates: Dilation rate r of each branch.
        layout: Which tokens each rank holds. Contiguous ranks whose shards are multiples of the segments send least.
        group: Process group with as many ranks as the layout, or a mesh with one dimension. Default: all ranks.
        pattern: Which pairs to keep inside a segment. It does not change what travels.
        is_causal: Keep only keys at or before the query's position.
        overlap: "mix" or "union", as in `dilated_attention`. A union of segment lengths that do not divide one another
            is `ring_attention` over one pattern, which sends whole tiles.
        key_mask: ``[B, n]`` bool, True for keys to attend to, of the rank's own keys.
        dropout_p: Probability of dropping a weight. All ranks together drop the weights that one process drops.
        seed: Dropout seed. Default: drawn from each rank's generator.
        scale: Factor for the scores. Default: ``D ** -0.5``.
        enable_gqa: Let H / Hkv query heads share each key head.
        check_finite: Look for NaN and infinity in the rank's keys and values before they travel, as in
            `ring_attention`.
        return_lse: Also return the log-sum-exp (natural log) ``[B, H, n]``.
        backend: Backend of every dense problem, as in `sparse_attention`.

    Returns:
        The output ``[B, H, n, Dv]``. With ``return_lse``, also the lse. Both differentiate twice, and compile.

    Raises:
        ValueError: If an argument is invalid, or a key or value is not finite and ``check_finite`` is set.
        PlanMismatch: At every rank, if ranks call with different branches, layouts, shapes or dtypes.
        RankLost: If a rank fails, dies or does not come. The message names it.

    Example:
        Pass it to a module of a rank as ``attend=``:

        >>> from functools import partial
        >>> from ringtile.modules import SparseTransformer
        >>> layout = Layout.contiguous(1 << 20, 64)
        >>> branches = {"segment_lengths": [2048, 16384, 32768], "dilation_rates": [1, 6, 12]}
        >>> attend = partial(ring_dilated_attention, layout=layout, **branches)
        >>> model = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
    """
    ranks = group_of(group)
    query, key, value = checked_tensors(query, key, value, enable_gqa)
    rank, _ = check_shard(query, key, layout, ranks)
    check_options(query, key, key_mask=key_mask, dropout_p=dropout_p, seed=seed, scale=scale, backend=backend)
    at = checked_branches(segment_lengths, dilation_rates)
    branches = rules_of(at, pattern, is_causal, overlap, query.shape[1])
    if branches is None:
        return ring_attention(
            query,
            key,
            value,
            union_of(at, pattern),
            layout=layout,
            group=group,
            is_causal=is_causal,
            key_mask=key_mask,
            dropout_p=dropout_p,
            seed=seed,
            scale=scale,
            enable_gqa=enable_gqa,
            check_finite=check_finite,
            return_lse=return_lse,
            backend=backend,
        )
    warn_of_uncovered(at, query.shape[1], 0, layout.n_tokens)
    if check_finite:
        check_keys_finite(key, value, layout, rank, check_finite)
    shapes = shapes_of(query, key, value)
    # Not the result of the call: Dynamo reads tensors only from places that it can find again.
    options = options_of(query, branches, None, dropout_p, seed, scale, backend)
    numbers = options.scale, dropout_p, key_mask is not None
    how = layout, ranks, shapes, str(key.dtype), key.device, numbers, torch.compiler.is_compiling()
    exchange = by_number[_prepared(tuple(at), pattern, is_causal, overlap, *how)]
    assert isinstance(exchange.plan, BranchPlan)
    plan = exchange.plan
    masks = _Masks(None, None)
    if key_mask is not None:
        every = key_mask.unsqueeze(1).expand(-1, key.shape[1], -1).flatten(1)
        masks = _Masks(every, torch.ops.ringtile.cast_bits(every, exchange.number))
    with without_autocast(query):
        if needs_composing(backend):
            out, lse = _composed(query, key, value, masks, plan, exchange, options)
        else:
            out, lse = _Merged.apply(query, key, value, masks, plan, exchange, options)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Masks(NamedTuple):
    """The key mask of the rank's own items and of its buffer, bool."""

    own: Tensor | None
    buffer: Tensor | None


@constant
def _prepared(
    at: tuple[tuple[int, int], ...],
    pattern: Pattern | None,
    is_causal: bool,
    overlap: str,
    layout: Layout,
    ranks: Ranks,
    shapes: tuple[int, ...],
    dtype: str,
    device: torch.device,
    numbers: tuple[float, ...],
    in_graph: bool,
) -> int:
    """Return the number of a call's exchange, after a comparison with the other ranks."""
    # Dynamo passes on no rules that it has made.
    branches = rules_of(at, pattern, is_causal, overlap, shapes[1])
    assert branches is not None
    group = real_group(ranks)
    # A rule for some lengths only does not fit a part of a segment.
    planned = tuple(Shape(each.length, each.dilation, is_causal and each.rule.unbounded) for each in branches)
    plan = make_branch_plan(planned, layout, group.rank(), shapes[1], shapes[2], bool(numbers[2]), device)
    agreed = compare(
        group,
        "ring_dilated_attention",
        layout,
        shapes,
        dtype,
        branches=", ".join(
            f"({branch.length}, {branch.dilation}): {branch.rule.text or type(branch.rule).__name__}"
            for branch in branches
        ),
        plan=plan.fingerprint,
        **dict(zip(("scale", "dropout_p", "key_mask"), numbers, strict=True)),
    )
    return exchange_of(plan, agreed, group, in_graph=in_graph).number


def _items(x: Tensor) -> Tensor:
    """Return ``[B, H, n, ...]`` as ``[B, H * n, ...]``."""
    return x.flatten(1, 2)


class _Part(NamedTuple):
    """A piece with its options and the numbers of its rows and keys."""

    piece: Piece
    problem: Problem
    rows: Tensor
    keys: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """Return the rows of ``[B, H * n, ...]`` as ``[B * S, heads, queries, ...]``."""
        shape = (len(self.piece.segments), len(self.piece.heads), self.piece.n_queries)
        rows: Tensor = x.index_select(1, self.rows).unflatten(1, shape).flatten(0, 1)
        return rows

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the problem, from all items of the rank or the buffer."""
        shape = (len(self.piece.segments), len(self.piece.key_heads), self.piece.n_keys)
        keys, values = (x.index_select(1, self.keys).unflatten(1, shape).flatten(0, 1) for x in (k, v))
        return self.queries(q), keys, values


def _parts(q: Tensor, plan: BranchPlan, masks: _Masks, options: Options, *, is_local: bool) -> Iterator[_Part]:
    """Yield the parts on the rank's own items, or those on the buffer."""
    heads, n_tokens = q.shape[1:3]
    for piece in plan.pieces:
        if piece.is_local != is_local:
            continue
        rows, keys = piece.rows(n_tokens), piece.keys(n_tokens, plan)
        mask = masks.own if is_local else masks.buffer
        if mask is not None:
            # All heads of the piece have the same tokens.
            shape = (len(piece.segments), len(piece.key_heads), piece.n_keys)
            mask = mask[:, keys.view(shape)[:, 0]].flatten(0, 1)
        rule = for_heads(options.branches[piece.branch].rule, piece.heads, heads)
        problem = Problem(rule, piece.first, mask)
        problem = numbered(problem, options, piece.branch, piece.heads, q.shape[0], piece.segments)
        yield _Part(piece, problem, rows, keys)


class _Merged(torch.autograd.Function):
    """Merge all branches, and save only the merged output and lse and the buffers, as on one process.

    `_composed` computes second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: _Masks,
        plan: BranchPlan,
        exchange: Exchange,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        batch, heads, n_tokens = q.shape[:3]
        queries, keys, values = (_items(x) for x in (q, k, v))
        wires = keys.unsqueeze(1), values.unsqueeze(1)
        out = q.new_zeros(batch, heads * n_tokens, v.shape[3], dtype=accumulator(q))
        lse = torch.full(out.shape[:2], -math.inf, dtype=out.dtype, device=q.device)

        def compute(sources: Sequence[Tensor], is_local: bool) -> None:
            for part in _parts(q, plan, masks, options, is_local=is_local):
                tensors = part.tensors(queries, *sources)
                found = torch.ops.ringtile.forward(*tensors, *call_of(*tensors, part.problem, options))
                merged = part.queries(out), part.queries(lse)
                merge_into(*merged, *found)
                for total, x in zip((out, lse), merged, strict=True):
                    total.index_copy_(1, part.rows, x.reshape(batch, len(part.rows), *x.shape[3:]))

        started = cast_start(*wires, exchange)
        compute((keys, values), True)
        buffers = cast_finish(*wires, started, exchange)
        compute([x.squeeze(1) for x in buffers], False)
        out, lse = out.to(q.dtype).unflatten(1, (heads, n_tokens)), lse.unflatten(1, (heads, n_tokens))
        ctx.masks, ctx.plan, ctx.exchange, ctx.options = masks, plan, exchange, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *buffers)
        return out, lse

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *buffers = ctx.saved_tensors
        if out_grad is None and lse_grad is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            results = _composed(q, k, v, ctx.masks, ctx.plan, ctx.exchange, ctx.options)
            return *differentiable_grads(results, (q, k, v), ctx.needs_input_grad, (out_grad, lse_grad)), *(None,) * 4
        if out_grad is None:
            out_grad = torch.zeros_like(out)
        queries, keys, values, out, lse, out_grad = (_items(x) for x in (q, k, v, out, lse, out_grad))
        lse_grad = None if lse_grad is None else _items(lse_grad)
        sources = {True: (keys, values), False: tuple(x.squeeze(1) for x in buffers)}
        totals = {local: [torch.zeros_like(x, dtype=accumulator(q)) for x in xs] for local, xs in sources.items()}
        q_total = torch.zeros_like(queries, dtype=accumulator(q))
        for is_local in (False, True):
            for part in _parts(q, ctx.plan, ctx.masks, ctx.options, is_local=is_local):
                tensors = part.tensors(queries, *sources[is_local])
                rows = [None if x is None else part.queries(x) for x in (out_grad, lse_grad, out, lse)]
                call = call_of(*tensors, part.problem, ctx.options)
                grads = torch.ops.ringtile.backward(rows[0], rows[1], *tensors, rows[2], rows[3], *call)
                places = part.rows, part.keys, part.keys
                for total, at, x in zip((q_total, *totals[is_local]), places, grads, strict=True):
                    # No number occurs twice in a part, so the sums do not depend on the order of threads.
                    total.index_add_(1, at, x.to(total.dtype).reshape(len(q), len(at), x.shape[3]))
        if any(ctx.needs_input_grad[1:3]):
            mine = (x.to(q.dtype).unsqueeze(1) for x in totals[False])
            for total, x in zip(totals[True], torch.ops.ringtile.group_reduce(*mine, ctx.exchange.number), strict=True):
                total += x.squeeze(1)
        found = zip((q_total, *totals[True]), (q, k, v), strict=True)
        return *(total.to(x.dtype).view(x.shape) for total, x in found), *(None,) * 4


def _composed(
    q: Tensor, k: Tensor, v: Tensor, masks: _Masks, plan: BranchPlan, exchange: Exchange, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute the same with operations that differentiate to any order and compile, but use more memory."""
    queries, keys, values = (_items(x) for x in (q, k, v))
    wires = keys.unsqueeze(1), values.unsqueeze(1)
    buffers = cast_finish(*wires, cast_start(*wires, exchange, masks.buffer), exchange)
    sources = {True: (keys, values), False: tuple(x.squeeze(1) for x in buffers)}
    parts = (
        (part.piece.branch, part.tensors(queries, *sources[is_local]), part.problem, part.rows)
        for is_local in (True, False)
        for part in _parts(q, plan, masks, options, is_local=is_local)
    )
    out, lse = compose(q, k, v, parts, options)
    if all(piece.is_local for piece in plan.pieces):
        # A rank without remote keys takes part in both passes all the same.
        out, lse = (tied(x, *buffers, masks.buffer) for x in (out, lse))
    return out, lse
