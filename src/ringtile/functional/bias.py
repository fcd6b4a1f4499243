"""Biases of attention scores: numbers for each pair that follow from distances, never a matrix of all pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ringtile.functional.tensors import check_plain
from ringtile.index import BlockIndex
from ringtile.kernels.bias import Term
from ringtile.kernels.contracts import Call


@dataclass(frozen=True, eq=False)
class Relative:
    """A number per head and distance: adds ``table[h, clamp(j - i + offset, 0, R - 1)]`` to the score of i and j.

    i and j are positions, as windows and ALiBi count them: query a is at ``start + a``, and key b at b. By default,
    ``start`` is ``Nk - Nq``. It is the bias of T5 (Raffel et al., 2020, arXiv:1910.10683).

    Args:
        table: ``[H, R]`` in a floating dtype, or ``[1, R]`` for all heads. It gets a gradient.
        offset: The place of distance 0. Distances before the table read its first place, and those behind it the last.

    `sparse_attention` raises ValueError if it does not match the call.

    Example:
        >>> from ringtile import sparse_attention
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
        >>> table = torch.zeros(4, 257, requires_grad=True)     # distances from -128 to 128
        >>> sparse_attention(q, k, v, bias=Relative(table, 128)).shape
        torch.Size([1, 4, 1000, 64])
    """

    table: Tensor
    offset: int

    @classmethod
    def t5(cls, weight: Tensor, n_queries: int, n_keys: int, *, bidirectional: bool, max_distance: int = 128) -> Self:
        """Return T5's bias for the last ``n_queries`` of ``n_keys`` positions, which shares numbers in buckets.

        ``weight`` is ``[buckets, H]``, as ``T5Attention.relative_attention_bias.weight``, and gets a gradient. Without
        ``bidirectional``, as in decoders, later keys are in the bucket of distance 0. Raises ValueError if an argument
        is invalid.

        >>> Relative.t5(torch.randn(32, 8), 512, 512, bidirectional=True).table.shape
        torch.Size([8, 1023])
        """
        check_plain("weight", weight)
        buckets = len(weight) // 2 if bidirectional else len(weight)
        exact = buckets // 2
        if weight.dim() != 2 or exact < 1 or max_distance <= exact:
            raise ValueError(
                f"weight: expected [buckets, H] with max_distance > {exact} >= 1, got {weight.shape=}, {max_distance=}"
            )
        if n_queries < 1 or n_keys < 1:
            raise ValueError(f"n_queries, n_keys: expected positive numbers, got {n_queries=}, {n_keys=}")
        distance = torch.arange(1 - n_keys, n_queries, device=weight.device)
        near = distance.abs() if bidirectional else (-distance).clamp(min=0)
        # The rounding of float32 decides some buckets, so we take the steps that T5 does.
        far = torch.log(near.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
        bucket = torch.where(near < exact, near, (exact + far.long()).clamp(max=buckets - 1))
        if bidirectional:
            bucket = bucket + (distance > 0) * buckets
        return cls(embedding(bucket, weight).mT, n_keys - 1)


@dataclass(frozen=True, eq=False)
class Grid:
    """A number per head and offset of coordinates: adds ``table[h, j's coordinates - i's + shape - 1]``.

    The tokens are those of a grid in row-major order, as in Swin (Liu et al., 2021, arXiv:2103.14030) and neighborhood
    attention (Hassani et al., 2023, arXiv:2204.07143).

    Args:
        table: ``[H, 2 a - 1, 2 b - 1]`` for a grid of ``(a, b)``, or one head for all. It gets a gradient.
        shape: The tokens of each axis, any number of axes. Their product is the number of keys.

    `sparse_attention` raises ValueError if it does not match the call.

    Example:
        >>> from ringtile import sparse_attention
        >>> q, k, v = torch.randn(3, 16, 4, 7 * 7, 32).unbind()     # 16 windows of Swin
        >>> sparse_attention(q, k, v, bias=Grid(torch.randn(4, 13, 13), (7, 7))).shape
        torch.Size([16, 4, 49, 32])
    """

    table: Tensor
    shape: Sequence[int]


@dataclass(frozen=True, eq=False)
class ByQuery:
    """A vector per distance, for queries: adds ``scale * (query[i] . table[h, clamp(j - i + offset, 0, R - 1)])``.

    ``scale`` is that of the call, and i and j are positions, see `Relative`. It is the bias of Shaw et al. (2018,
    arXiv:1803.02155), Transformer-XL (Dai et al., 2019, arXiv:1901.02860) and Conformer. These add a vector u to the
    query of the call and another, v, to this query. No more than 64 MiB of products exist at once.

    Args:
        query: ``[B, H, Nq, D']`` in a floating dtype.
        table: ``[H, R, D']``, or one head for all. Both get gradients.
        offset: The place of distance 0.

    `sparse_attention` raises ValueError if it does not match the call.

    Example:
        >>> from ringtile import sparse_attention
        >>> from ringtile.patterns import Window
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
        >>> bias = ByQuery(q, torch.randn(4, 257, 64), 128)
        >>> sparse_attention(q, k, v, Window(128), bias=bias).shape
        torch.Size([1, 4, 1000, 64])
    """

    query: Tensor
    table: Tensor
    offset: int


@dataclass(frozen=True, eq=False)
class ByKey:
    """A vector per distance, for keys: adds ``scale * (key[j] . table[h, clamp(j - i + offset, 0, R - 1)])``.

    With `ByQuery`, it is the bias of DeBERTa (He et al., 2021, arXiv:2006.03654).

    Args:
        key: ``[B, Hkv, Nk, D']`` in a floating dtype, with the heads of the call's keys or queries.
        table: ``[H, R, D']``, or one head for all. Both get gradients.
        offset: The place of distance 0.

    `sparse_attention` raises ValueError if it does not match the call.

    Example:
        >>> from ringtile import sparse_attention
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
        >>> table = torch.randn(4, 257, 64)
        >>> sparse_attention(q, k, v, bias=(ByQuery(q, table, 128), ByKey(k, table, 128))).shape
        torch.Size([1, 4, 1000, 64])
    """

    key: Tensor
    table: Tensor
    offset: int


Bias: TypeAlias = Relative | Grid | ByQuery | ByKey
"""One bias. `sparse_attention` adds up those of a tuple."""


def terms_of(
    bias: Bias | tuple[Bias, ...], query: Tensor, key: Tensor, call: Call, index: BlockIndex | None
) -> list[Term]:
    """Return the terms of a call's bias. Raise ValueError if they do not match it."""
    if call.softcap or call.alibi_slopes is not None:
        got = f"{call.softcap=}, alibi_slopes={'None' if call.alibi_slopes is None else 'a tensor'}"
        raise ValueError(f"bias: expected neither softcap nor alibi_slopes beside it, got {got}")
    found = [_term(each, query, key, call) for each in (bias if isinstance(bias, tuple) else (bias,))]
    if not found:
        raise ValueError("bias: expected at least one, got ()")
    if index is not None and len(index.rows.at) + len(index.cols.at):
        raise ValueError("bias: not supported with an index whose tiles are remapped")
    return found


def _term(bias: Bias, query: Tensor, key: Tensor, call: Call) -> Term:
    (batch, heads, n_queries), n_keys = query.shape[:3], key.shape[2]
    if isinstance(bias, Relative):
        _check("bias.table", bias.table, query, (1, heads), (-1,))
        return Term(bias.table, _checked_offset(bias.offset))
    if isinstance(bias, Grid):
        shape = tuple(bias.shape)
        if not shape or min(shape) < 1 or math.prod(shape) != n_keys:
            raise ValueError(f"bias.shape: expected positive sizes whose product is {n_keys} keys, got {shape}")
        if call.start < 0 or call.start + n_queries > n_keys:
            raise ValueError(f"start: expected queries inside the grid {shape}, got {call.start=}, {query.shape=}")
        _check("bias.table", bias.table, query, (1, heads), tuple(2 * size - 1 for size in shape))
        return Term(bias.table, 0, shape)
    if not isinstance(bias, ByQuery | ByKey):
        raise ValueError(f"bias: expected Relative, Grid, ByQuery, ByKey or a tuple of them, got {type(bias).__name__}")
    by_key = isinstance(bias, ByKey)
    name, of = ("bias.key", bias.key) if isinstance(bias, ByKey) else ("bias.query", bias.query)
    _check(name, of, query, (batch,), ((key.shape[1], heads) if by_key else heads, n_keys if by_key else n_queries, -1))
    _check("bias.table", bias.table, query, (1, heads), (-1, of.shape[3]))
    if of.shape[1] != heads:
        of = of.repeat_interleave(heads // of.shape[1], 1)
    return Term(bias.table, _checked_offset(bias.offset), (), of, by_key)


def _checked_offset(offset: int) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt):
        raise ValueError(f"bias.offset: expected an integer, got {offset!r}")
    return offset


def _check(
    name: str, x: Tensor, query: Tensor, first: tuple[int, ...], rest: tuple[int | tuple[int, ...], ...]
) -> None:
    """Raise ValueError for a tensor of another shape. -1 stands for any positive size, a tuple for one of its sizes."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.device != query.device:
        got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: expected a tensor of a floating dtype on {query.device}, got {got}")
    wanted: tuple[int | tuple[int, ...], ...] = (first, *rest)
    fits = x.dim() == len(wanted)
    for size, want in zip(x.shape, wanted, strict=False):
        fits = fits and (size in want if isinstance(want, tuple) else size > 0 if want == -1 else size == want)
    if not fits:
        text = ", ".join(" or ".join(map(str, want if isinstance(want, tuple) else (want,))) for want in wanted)
        raise ValueError(f"{name}: expected [{text}], with any size for -1, got {x.shape=} with {query.shape=}")
    check_plain(name, x)


def dense_bias(terms: Sequence[Term], n_queries: int, n_keys: int, start: int, scale: float) -> Tensor:
    """Return the numbers of all pairs in float64 ``[B or 1, H or 1, Nq, Nk]``, for the reference."""
    device = terms[0].table.device
    query, key = torch.arange(n_queries, device=device) + start, torch.arange(n_keys, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for term in terms:
        table = term.table.double()
        if term.shape:
            at = [(key // math.prod(term.shape[axis + 1 :]) % size) for axis, size in enumerate(term.shape)]
            places = [x[key] - x[query][:, None] + size - 1 for x, size in zip(at, term.shape, strict=True)]
            numbers = torch.stack([each[tuple(places)] for each in table]).unsqueeze(0)
        else:
            place = (key - query[:, None] + term.offset).clamp(0, table.shape[1] - 1)
            if term.of is None:
                numbers = table[:, place].unsqueeze(0)
            else:
                # A NaN of a token that takes no part must not reach the gradient of the table.
                of, lost = term.of.double(), term.of.isnan().any(-1, keepdim=True)
                products = (scale * (of.where(~lost, 0) @ table.mT)).where(~lost, math.nan)
                place = place.T if term.by_key else place
                numbers = products.gather(3, place.expand(*products.shape[:2], -1, -1))
                numbers = numbers.mT if term.by_key else numbers
        total = total + numbers
    return total
