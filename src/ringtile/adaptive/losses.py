"""What an indexer learns by: the divergence of its scores from the attention of its layer, query by query."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringtile.adaptive.indexer import checked, scored
from ringtile.functional.attention import check_plain, checked_tensors
from ringtile.kernels.contracts import scale_of
from ringtile.patterns import Pattern
from ringtile.patterns.checks import check_positive

_BYTES = 1 << 22
"""Most bytes of each of the tensors of a chunk of queries and a tile of keys."""


def index_loss(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    weights: Tensor | None = None,
    relu: bool = False,
    groups: int = 1,
    indices: Tensor | None = None,
    block: int = 1,
    pools: Tensor | None = None,
    rows: Tensor | None = None,
    pattern: Pattern | str | None = None,
    start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the loss that trains an indexer: a scalar, the mean of KL(p || softmax(index scores)) over the queries.

    p is the attention of the layer, the mean over the heads that choose together, and a constant. The index scores are
    those of `index_topk`. Both are over all allowed keys, as in the dense warm-up of DeepSeek-V3.2 (arXiv:2512.02556),
    or over the chosen ones, as in its sparse training. For an indexer that scores pools of keys, p is summed over the
    keys of a pool, and keys without one do not count. Gradients reach ``index_query``, ``index_key`` and ``weights``
    alone. A query without keys counts 0. At most 64 MiB are allocated beyond the inputs and their gradients.

    Args:
        index_query: ``[B, Hi, Nq, d]``, as the ``query`` of `index_topk`.
        index_key: ``[B, 1 or groups, Nk, d]``, as its ``key``, or ``[B, 1 or groups, n_pools, d]``.
        query: ``[B, H, Nq, D]``, the queries of the layer. H is a multiple of ``groups``.
        key: ``[B, Hkv, Nk, D]``, its keys.
        weights, relu, groups, pattern, start, key_mask: See `index_topk`.
        indices: int ``[B, groups, Nq, n]``, the keys, blocks or pools that each query attends to, -1 for none. None is
            all keys.
        block: Number of keys that an entry of ``indices`` stands for, as in `Chosen`, or of a pool.
        pools: int64 ``[B, n_pools]``, the first key of each pool of ``block`` keys, -1 for none. A pool counts for a
            query that may attend to all of its keys.
        rows: int64 ``[n]``, the queries that count, such as drawn ones: a call costs as much as their attention.
        scale: Factor of the layer's products. Default: ``D ** -0.5``.

    Raises ValueError if an argument does not match the others.

    >>> from ringtile.patterns import Causal
    >>> q, k = torch.randn(2, 1, 4, 100, 64).unbind()
    >>> small_q, small_k = torch.randn(1, 2, 100, 16, requires_grad=True), torch.randn(1, 1, 100, 16)
    >>> index_loss(small_q, small_k, q, k, relu=True, pattern=Causal()).backward()
    >>> small_q.grad.shape
    torch.Size([1, 2, 100, 16])
    """
    check_positive(block=block)
    query, key, _ = checked_tensors(query, key, key, enable_gqa=True)
    for name, x in (("index_key", index_key), ("indices", indices), ("pools", pools), ("rows", rows)):
        if x is not None:
            check_plain(name, x)
    (batch, n_heads, n_queries), n_keys, device = query.shape[:3], key.shape[2], query.device
    if pools is not None and (pools.dtype != torch.int64 or pools.shape != (batch, *index_key.shape[2:3])):
        raise ValueError(f"pools: expected int64 [B, n_pools], got {pools.dtype=}, {pools.shape=}, {index_key.shape=}")
    of_keys = (*index_key.shape[:2], n_keys, *index_key.shape[3:])
    by_key = index_key if pools is None else index_key.new_zeros(()).expand(of_keys)
    index_query, by_key, rule, first = checked(index_query, by_key, weights, groups, pattern, start, key_mask)
    sizes, expected = (batch, n_queries, n_keys), (len(index_query), index_query.shape[2], by_key.shape[2])
    if sizes != expected or n_heads % groups or device != index_query.device:
        raise ValueError(
            f"query, key: expected a multiple of {groups=} heads, and the batch, lengths and device of the index, got "
            f"{query.shape=}, {key.shape=} on {device} with {index_query.shape=}, {index_key.shape=}"
        )
    if indices is not None and (
        indices.shape[:3] != (batch, groups, n_queries) or indices.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"indices: expected integers {(batch, groups, n_queries)} and n, got {indices.dtype=}, {indices.shape=}"
        )
    index_key = by_key if pools is None else index_key
    if rows is not None and (rows.dim() != 1 or rows.dtype != torch.int64):
        raise ValueError(f"rows: expected int64 [n], got {rows.dtype=}, {rows.shape=}")
    if rows is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < n_queries:
        raise ValueError(f"rows: expected queries 0 to {n_queries - 1}, got {int(rows.min())} to {int(rows.max())}")
    no_lists = indices is not None and not indices.shape[3] * index_key.shape[2]
    every = torch.arange(n_queries, device=device)
    position = first if isinstance(first, Tensor) else (every + first).expand(batch, -1)
    layer = _Layer(
        query.detach(),
        key.detach(),
        scale_of(query, scale),
        rule,
        position,
        key_mask,
        indices,
        block,
        pools,
        every[:0] if no_lists else every if rows is None else rows.to(device),
        groups,
        relu,
        torch.promote_types(torch.float32, torch.promote_types(index_query.dtype, query.dtype)),
    )
    weights = torch.ones_like(index_query[..., 0]) if weights is None else weights
    with torch.autocast(device.type, enabled=False):
        loss: Tensor = _Loss.apply(layer, torch.is_grad_enabled(), index_query, index_key, weights)  # type: ignore[no-untyped-call]
    return loss


class _Layer(NamedTuple):
    """What a call of `index_loss` does not differentiate."""

    query: Tensor
    key: Tensor
    scale: float
    rule: Pattern
    position: Tensor
    key_mask: Tensor | None
    indices: Tensor | None
    block: int
    pools: Tensor | None
    rows: Tensor
    groups: int
    relu: bool
    dtype: torch.dtype

    @property
    def of_score(self) -> int:
        """The number of keys that a score of the index stands for."""
        return 1 if self.pools is None else self.block

    def kept(self, b: int, row: Tensor, entry: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the keys ``[..., n * size]`` of entries, the same for all rows or ``[rows, n]``, and which count."""
        first = entry * size if self.pools is None else self.pools[b, entry]
        j = (first.unsqueeze(-1) + torch.arange(size, device=row.device)).flatten(-2)
        inside = (j >= 0) & (j < self.key.shape[2])
        j = j.clamp(0, self.key.shape[2] - 1)
        keep = self.rule.batch_row(b).allowed(torch.zeros_like(row[:1]), self.position[b, row, None], j) & inside
        keep = keep if self.key_mask is None else keep & self.key_mask[b, j]
        if self.pools is not None:
            keep = keep.unflatten(-1, (-1, size)).all(-1).repeat_interleave(size, -1)
        return j, keep

    def queries(self, b: int, g: int, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scaled queries ``[heads, rows, D]`` of a group and their keys, by key head."""
        own, shared = self.query.shape[1] // self.groups, self.query.shape[1] // self.key.shape[1]
        for head in range(g * own // shared, -(-(g + 1) * own // shared)):
            heads = slice(max(g * own, head * shared), min((g + 1) * own, (head + 1) * shared))
            yield self.query[b, heads].index_select(1, row).to(self.dtype) * self.scale, self.key[b, head]

    def listed(self, b: int, g: int, row: Tensor, n_entries: int) -> tuple[Tensor, Tensor]:
        """Return the keys or pools ``[rows, n]`` that count, -1 for none, and the attention to them."""
        assert self.indices is not None
        found = self.indices[b, g, row].long().sort().values
        valid = (found >= 0) & (found < n_entries)
        valid[:, 1:] &= found[:, 1:] > found[:, :-1]
        j, keep = self.kept(b, row, found.where(valid, 0), self.block)
        keep &= valid.repeat_interleave(self.block, 1)
        total = torch.zeros_like(j, dtype=self.dtype)
        width = max(1, _BYTES // (self.dtype.itemsize * self.query.shape[3] * len(row)))
        for q, keys in self.queries(b, g, row):
            parts = [q.transpose(0, 1) @ keys[part].to(self.dtype).mT for part in j.split(width, 1)]
            logits = torch.cat(parts, 2).masked_fill_(~keep.unsqueeze(1), -torch.inf)
            total += _Sums.of(logits).softmax(logits).sum(1)
        if self.pools is not None:
            j, keep, total = found, keep[:, :: self.block], total.unflatten(1, (-1, self.block)).sum(2)
        return j.masked_fill(~keep, -1), total * (self.groups / self.query.shape[1])


class _Chunk(NamedTuple):
    """Some queries of a batch element and a group."""

    layer: _Layer
    b: int
    g: int
    row: Tensor
    query: Tensor
    """``[rows, heads, d]`` of the index."""
    key: Tensor
    """``[Nk or n_pools, d]`` of the index."""
    weights: Tensor
    listed: tuple[Tensor, Tensor] | None

    def tile(self, left: int, right: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return which scores count, the keys of the index, the scores, and the logits of the index and layer."""
        layer, b, g, row, dtype = self.layer, self.b, self.g, self.row, self.layer.dtype
        j, of_keys = layer.kept(b, row, torch.arange(left, right, device=row.device), layer.of_score)
        keep = of_keys[..., :: layer.of_score]
        if self.listed is not None:
            keep = keep & _spread(self.listed[0] >= 0, self.listed[0], left, right - left)
        # What no query keeps may hold NaN, which a gradient of 0 would keep.
        key = self.key[left:right].to(dtype).masked_fill(~keep.any(0).unsqueeze(1), 0).requires_grad_()
        with torch.set_grad_enabled(self.query.requires_grad):
            scores = scored(self.query, key, self.weights, layer.relu)
        logits = [scores.detach().masked_fill(~keep, -torch.inf)]
        if self.listed is None:
            of_part = slice(left, right) if layer.pools is None else j
            products = (q @ keys[of_part].to(dtype).mT for q, keys in layer.queries(b, g, row))
            logits += [x.masked_fill_(~of_keys, -torch.inf) for x in products]
        return keep, key, scores, logits


class _Sums(NamedTuple):
    """The largest logit of each row, and the sum of all exponentials relative to it."""

    top: Tensor
    total: Tensor

    @staticmethod
    def of(x: Tensor, before: _Sums | None = None) -> _Sums:
        """Return the sums of logits ``[..., keys]``, after those of earlier keys."""
        top = x.amax(-1) if before is None else torch.maximum(before.top, x.amax(-1))
        # A row without keys has weights of 0, not NaN.
        top = top.clamp(min=torch.finfo(x.dtype).min)
        total = (x - top.unsqueeze(-1)).exp_().sum(-1)
        return _Sums(top, total if before is None else total + before.total * (before.top - top).exp_())

    def softmax(self, x: Tensor) -> Tensor:
        """Return the weights of logits."""
        return (x - self.top.unsqueeze(-1)).exp_().div_(self.total.clamp(min=1).unsqueeze(-1))


def _spread(x: Tensor, at: Tensor, left: int, size: int) -> Tensor:
    """Return values ``[rows, n]`` at their places ``[rows, size]``. Places outside are dropped, and others are 0."""
    at = torch.where((at >= left) & (at < left + size), at - left, size)
    return x.new_zeros(len(x), size + 1).scatter_(1, at, x)[:, :size]


class _Loss(torch.autograd.Function):
    """The loss, whose gradients are computed with it: each chunk of scores exists once."""

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, learns: bool, index_query: Tensor, index_key: Tensor, weights: Tensor
    ) -> Tensor:
        (batch, n_heads), n_scores = index_query.shape[:2], index_key.shape[2]
        groups, dtype = layer.groups, layer.dtype
        heads, own = n_heads // groups, layer.query.shape[1] // groups
        # A row holds its products by head, or the keys of its list.
        of_row, of_list = max(heads, own * layer.of_score) * dtype.itemsize, 1
        if layer.indices is not None:
            of_list = layer.indices.shape[3] * layer.block * layer.query.shape[3] * dtype.itemsize
        size = max(1, min(256, max(16, _BYTES // max(1, of_row * n_scores)), _BYTES // max(1, of_list)))
        # A tile copies the keys of the layer, if they are in pools or in low precision.
        of_copy = layer.of_score * layer.query.shape[3] * dtype.itemsize
        tile = max(1, _BYTES // max(of_row * size, of_copy // 4))
        loss, mean = index_query.new_zeros((), dtype=dtype), max(1, batch * groups * len(layer.rows))
        of_query, of_key = torch.zeros_like(index_query), torch.zeros_like(index_key, dtype=dtype)
        of_weights = torch.zeros_like(weights)
        parts = layer.rows.split(size) if len(layer.rows) else ()
        for b, g, row in product(range(batch), range(groups), parts):
            of_group, of_index = slice(g * heads, (g + 1) * heads), g % index_key.shape[1]
            q = index_query[b, of_group].index_select(1, row).transpose(0, 1).to(dtype).requires_grad_(learns)
            w = weights[b, of_group].index_select(1, row).T.to(dtype).requires_grad_(learns)
            listed = None if layer.indices is None else layer.listed(b, g, row, n_scores)
            chunk = _Chunk(layer, b, g, row, q, index_key[b, of_index], w, listed)
            tiles = [(left, min(left + tile, n_scores)) for left in range(0, n_scores, tile)]
            known = chunk.tile(*tiles[0]) if len(tiles) == 1 else None
            sums: list[_Sums] = []
            for bounds in tiles:
                logits = (known or chunk.tile(*bounds))[3]
                sums = [_Sums.of(x, sums[number] if sums else None) for number, x in enumerate(logits)]
            for left, right in tiles:
                keep, k, scores, logits = known or chunk.tile(left, right)
                found, *weights_of = (each.softmax(x) for x, each in zip(logits, sums, strict=True))
                if listed is None:
                    p = torch.stack([x.sum(0) for x in weights_of]).sum(0) / own
                    p = p.unflatten(1, (-1, layer.of_score)).sum(2)
                else:
                    p = _spread(listed[1], listed[0], left, right - left)
                logs = logits[0] - (sums[0].top + sums[0].total.log()).unsqueeze(1)
                loss -= (torch.special.entr(p) + p * logs.masked_fill_(~keep, 0)).sum()
                if learns:
                    scores.backward(found.sub_(p).div_(mean))
                    assert k.grad is not None
                    of_key[b, of_index, left:right] += k.grad
            if q.grad is not None and w.grad is not None:
                of_query[b, of_group].index_add_(1, row, q.grad.transpose(0, 1).to(of_query.dtype))
                of_weights[b, of_group].index_add_(1, row, w.grad.T.to(of_weights.dtype))
        ctx.save_for_backward(of_query, of_key.to(index_key.dtype), of_weights)
        return loss / mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *(x * grad.to(x.dtype) for x in ctx.saved_tensors)
