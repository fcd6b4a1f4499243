"""Attention over lists of keys per query, `Chosen`, after a gather: the buffer of a rank holds all keys in order."""

from typing import Any

import torch
from torch import Tensor

from ringtile.distributed.exchange import Exchange, cast_start
from ringtile.distributed.layout import positions_of, with_starts
from ringtile.functional import sparse_attention
from ringtile.functional.attention import without_autocast
from ringtile.functional.chosen import lists_of
from ringtile.functional.tensors import is_real
from ringtile.kernels.chosen import attend_lists
from ringtile.kernels.contracts import Call, accumulator
from ringtile.kernels.select import select_lists
from ringtile.patterns import Chosen
from ringtile.patterns.chosen import Split


def values_in_keys(key: Tensor, value: Tensor) -> bool:
    """Return True if the values are the first dims of the keys in memory, as in latent attention."""
    if not (is_real(key) and is_real(value)) or key.shape[:3] != value.shape[:3] or value.shape[3] > key.shape[3]:
        return False
    # Tensors without elements are all at address 0, but a rank without tokens must say what the others say.
    is_alike = key.data_ptr() == value.data_ptr() and key.stride() == value.stride()
    return is_alike and (key.numel() > 0 or key.untyped_storage() is value.untyped_storage())


class _Latents(torch.autograd.Function):
    """A gather of keys whose first dims are the values. The gradients of both travel home."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        keys, _ = _cast(key, value[..., :0], exchange)
        return keys, keys[..., : value.shape[3]]

    @staticmethod
    def backward(ctx: Any, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.ringtile.group_reduce(key_grad, value_grad, ctx.exchange.number), None


def _cast(key: Tensor, value: Tensor, exchange: Exchange, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.ringtile.group_cast(
        key, value, *cast_start(key, value, exchange, after), exchange.number
    )
    return found


def attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, found: Split, exchange: Exchange, call: Call, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the output and lse of a rank's queries. ``options`` are those of `sparse_attention` over all keys."""
    key_mask, plan = options["key_mask"], exchange.plan
    runs, latents = plan.layout.runs[plan.rank], _Latents.apply
    if values_in_keys(key, value):
        keys, values = latents(key, value, exchange)  # type: ignore[no-untyped-call]
    else:
        keys, values = _cast(key, value, exchange, key_mask)
    plain = not call.dropout_p and call.alibi_slopes is None and call.backend != "reference"
    if found.rest is None and plain:
        with without_autocast(query):
            lists = lists_of(found, query, keys, positions_of(runs, query.device), key_mask, None)
            call = call._replace(backend=select_lists(query, keys, values, lists, call))
            return attend_lists(query, keys, values, lists, call)
    # What depends on positions beside the lists is computed run by run, and the gradients of keys are summed over runs.
    dtype, wide, results = query.dtype, accumulator(query), []
    if len(runs) > 1:
        query, keys, values = (x.to(wide) for x in (query, keys, values))
    for (begin, end), at in with_starts(runs or ((0, 0),)):
        rows = slice(at, at + end - begin)
        mine = found._replace(chosen=Chosen(found.chosen.indices[:, :, rows], found.chosen.block))
        q, rule = query[:, :, rows], mine.rule(begin, query.shape[1])
        part = sparse_attention(q, keys, values, rule, start=begin, enable_gqa=True, return_lse=True, **options)
        results.append(part)
    out, lse = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return out.to(dtype), lse
