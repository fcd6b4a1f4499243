"""Attention of a rank's rows, while keys travel to it and gradients travel home."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringtile.distributed.exchange import Exchange, Works, cast_finish, cast_start, tied
from ringtile.distributed.plan import RingPlan, Source
from ringtile.functional import sparse_attention
from ringtile.functional.attention import without_autocast
from ringtile.functional.dilated import differentiable_grads
from ringtile.kernels.contracts import Call, accumulator, new_out, pack_keys
from ringtile.kernels.select import select


def attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RingPlan,
    exchange: Exchange,
    own_mask: Tensor | None,
    buffer_mask: Tensor | None,
    call: Call,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of a rank's rows, differentiable twice.

    ``own_mask`` and ``buffer_mask`` ``[B, n]`` are the key masks of the rank's own keys and of its buffer. ``call`` has
    the options.
    """
    compute: Any = _Pieces.apply
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or call.backend == "reference":
        compute = _composed
    with without_autocast(query):
        out, lse = compute(query, key, value, plan, exchange, own_mask, buffer_mask, call, overlap)
    return out, lse


_OPTIONS = ("dropout_p", "seed", "scale", "softcap", "alibi_slopes", "head_at", "batch_at")


def _composed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RingPlan,
    exchange: Exchange,
    own_mask: Tensor | None,
    buffer_mask: Tensor | None,
    call: Call,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the pieces by operators that have derivatives, for compilers and second derivatives."""
    options: dict[str, Any] = {name: getattr(call, name) for name in _OPTIONS}
    options.update(backend=call.backend or None, enable_gqa=True, return_lse=True)
    compute: Any = sparse_attention
    pieces = plan.pieces_on(query.device)
    queries = query.split([piece.end - piece.begin for piece in pieces], 2) if pieces else ()
    found: list[Any] = [None] * len(pieces)

    def compute_pieces(source: Source, keys: Tensor, values: Tensor, key_mask: Tensor | None) -> None:
        if source != "own":
            keys, values, key_mask = _part(plan, source, keys, values, key_mask)
        for place, piece in enumerate(pieces):
            if piece.source == source:
                found[place] = compute(queries[place], keys, values, piece.index, key_mask=key_mask, **options)

    started = cast_start(key, value, exchange, buffer_mask)
    if overlap:
        compute_pieces("own", key, value, own_mask)
    buffers = cast_finish(key, value, started, exchange)
    if not overlap:
        compute_pieces("own", key, value, own_mask)
    compute_pieces("hot", *buffers, buffer_mask)
    compute_pieces("all", *buffers, buffer_mask)
    if not found:
        # A rank without tokens has empty results that depend on its tensors.
        found.append(compute(query, key, value, key_mask=own_mask, **options))
    out, lse = found[0] if len(found) == 1 else (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    if all(piece.source == "own" for piece in pieces):
        out, lse = (tied(x, *buffers, buffer_mask) for x in (out, lse))
    return out, lse


def _part(
    plan: RingPlan, source: Source, keys: Tensor, values: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the part of the buffers that calls with a source read."""
    part = plan.part(source)
    return keys[:, :, part], values[:, :, part], None if key_mask is None else key_mask[:, part]


class _Pieces(torch.autograd.Function):
    """`_composed` with results that are written to their places, and rows that are computed while gradients travel.

    It saves what was received, and not the buffers, which also hold own keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: RingPlan,
        exchange: Exchange,
        own_mask: Tensor | None,
        buffer_mask: Tensor | None,
        call: Call,
        overlap: bool,
    ) -> tuple[Tensor, Tensor]:
        pieces = plan.pieces_on(q.device)
        calls = [call] * len(pieces)
        out, lse = new_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulator(q))

        def compute(source: Source, keys: Tensor, values: Tensor, key_mask: Tensor | None) -> None:
            if source != "own":
                keys, values, key_mask = _part(plan, source, keys, values, key_mask)
            bits = None if key_mask is None else pack_keys(key_mask)
            for place, piece in enumerate(pieces):
                if piece.source == source:
                    rows, index = slice(piece.begin, piece.end), piece.index
                    tensors = q[:, :, rows], keys, values
                    mine = call._replace(start=index.start, block=index.block, tiles=index.tensors(), key_bits=bits)
                    calls[place] = mine = mine._replace(backend=select(*tensors, mine))
                    out[:, :, rows], lse[:, :, rows] = torch.ops.ringtile.forward(*tensors, *mine)

        started = cast_start(k, v, exchange)
        if overlap:
            compute("own", k, v, own_mask)
        buffers: tuple[Tensor, Tensor] = torch.ops.ringtile.cast_hot(k, v, *started, exchange.number)
        if overlap:
            compute("hot", *buffers, buffer_mask)
        torch.ops.ringtile.cast_cold(*buffers, *started, exchange.number)
        if not overlap:
            compute("own", k, v, own_mask)
            compute("hot", *buffers, buffer_mask)
        compute("all", *buffers, buffer_mask)
        ctx.calls, ctx.inputs = calls, (plan, exchange, own_mask, buffer_mask, call, overlap)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, started[0])
        return out, lse

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, received = ctx.saved_tensors
        plan, exchange, *_, overlap = ctx.inputs
        out_grad = torch.zeros_like(out) if out_grad is None else out_grad
        rest = (None,) * len(ctx.inputs)
        if torch.is_grad_enabled():
            results = _composed(q, k, v, *ctx.inputs)
            return *differentiable_grads(results, (q, k, v), ctx.needs_input_grad, (out_grad, lse_grad)), *rest
        q_grad = torch.empty(q.shape, dtype=q.dtype, device=q.device)

        def differentiate(source: Source, keys: Tensor, values: Tensor) -> list[Tensor]:
            """Return the gradients of keys and values."""
            if source != "own":
                keys, values, _ = _part(plan, source, keys, values, None)
            sums: list[Tensor] = []
            for piece, call in zip(plan.pieces, ctx.calls, strict=True):
                if piece.source == source:
                    rows = slice(piece.begin, piece.end)
                    mine = out_grad[:, :, rows], None if lse_grad is None else lse_grad[:, :, rows]
                    results = out[:, :, rows], lse[:, :, rows].contiguous()
                    q_grad[:, :, rows], *found = torch.ops.ringtile.backward(
                        *mine, q[:, :, rows], keys, values, *results, *call
                    )
                    sums = [x.add_(more) for x, more in zip(sums, found, strict=True)] if sums else found
            return sums or [torch.zeros_like(keys), torch.zeros_like(values)]

        buffers = exchange.finish((k, v), received, Works())
        local = [] if overlap else differentiate("own", k, v)
        hot = [] if overlap else differentiate("hot", *buffers)
        grads = differentiate("all", *buffers)
        cold_started = exchange.start_cold_back(grads)
        hot = hot or differentiate("hot", *buffers)
        cold_started = exchange.hand_on_back(grads, cold_started)
        del buffers
        if not grads[0].shape[2]:
            grads = hot
        elif hot[0].shape[2]:
            # One after the other, so that only one of them exists twice.
            grads = [torch.cat([grads.pop(0), hot.pop(0)], 2) for _ in range(2)]
        hot_started = exchange.start_hot_back(grads)
        local = local or differentiate("own", k, v)
        return q_grad, *exchange.finish_back(grads, cold_started, hot_started, local), *rest
