"""The attention that rows pay to segments of keys: the forward pass without values, pooled over groups of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor

from ringtile.kernels.contracts import Masses, check_memory, new_results
from ringtile.kernels.operators import library, schema
from ringtile.kernels.select import native_masses

POOLS = ("mean", "max")
_SCORES = 1 << 22
"""Most scores that exist at once without the native kernel, unless a single group of rows has more."""

library.define(f"pooled_masses({schema(Masses)}) -> (Tensor, Tensor, Tensor)")


@overload
def pooled_masses(
    query: Tensor,
    key: Tensor,
    *,
    segment: int,
    seen: Tensor,
    groups: Tensor,
    pool: str = "mean",
    bias: Tensor | None = None,
    by_sign: bool = False,
    scale: float | None = None,
    value: None = None,
) -> Tensor: ...


@overload
def pooled_masses(
    query: Tensor,
    key: Tensor,
    *,
    segment: int,
    seen: Tensor,
    groups: Tensor,
    pool: str = "mean",
    bias: Tensor | None = None,
    by_sign: bool = False,
    scale: float | None = None,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]: ...


def pooled_masses(
    query: Tensor,
    key: Tensor,
    *,
    segment: int,
    seen: Tensor,
    groups: Tensor,
    pool: str = "mean",
    bias: Tensor | None = None,
    by_sign: bool = False,
    scale: float | None = None,
    value: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Return the softmax weights of rows, summed per segment of keys and pooled over groups of rows, in float32.

    Memory grows with the results and with one group of rows per thread, not with M times K. They have no gradient. Sums
    are float32, float64 for float64. The results have the same bits for any number of threads.

    Args:
        query: ``[B, H, M, D]``, the rows.
        key: ``[B, Hkv, K, D]``. Hkv must divide H. A NaN in a key that a row does not see never reaches that row.
        segment: Number of consecutive keys that are summed.
        seen: int64 ``[M]``: row m sees the keys before ``seen[m]``. A row that sees no key, or a NaN, is 0, and no mean
            counts it.
        groups: int32 ``[R + 1]``, ascending: output row r pools the rows from ``groups[r]`` to ``groups[r + 1] - 1``.
            An empty group is 0.
        pool: ``"mean"`` or ``"max"``, over the rows of a group.
        bias: float32 ``[B, Hkv or 1, K]``, added to the scaled scores. -inf hides a key.
        by_sign: True if the keys have width 2 D: the halves are multiplied with ``relu(query)`` and ``relu(-query)``.
        scale: Factor for the scores. Default: ``D ** -0.5``.
        value: ``[B, Hkv, K, Dv]``, to compute the exact output of each row in the same pass over the keys. Each row is
            in a group then. A NaN in a value that a row does not see never reaches that row.

    Returns:
        float32 ``[B, H, R, ceil(K / segment)]``. With ``value``, a tuple: these masses, the outputs ``[B, H, M, Dv]``
        in the query's dtype, and the lse ``[B, H, M]``, float32 or for float64 float64. A row that sees no key has
        output 0 and lse -inf.

    Raises:
        ValueError: If shapes, dtypes, devices or values are invalid.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).unbind()
        >>> seen, groups = torch.arange(1, 5), torch.tensor([0, 2, 4], dtype=torch.int32)
        >>> masses = pooled_masses(q, k, segment=2, seen=seen, groups=groups)
        >>> masses.shape, bool((masses[:, :, 0, 0] == 1).all())
        (torch.Size([1, 2, 2, 2]), True)
        >>> masses, out, lse = pooled_masses(q, k, segment=2, seen=seen, groups=groups, value=v)
        >>> out.shape, bool((out[:, :, 0] == v[:, :, 0]).all())
        (torch.Size([1, 2, 4, 8]), True)
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    values = None if value is None else value.detach()
    masses = Masses(query.detach(), key.detach(), seen, groups, bias, values, segment, pool, by_sign, scale)
    _check(masses)
    with torch.no_grad():
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.ringtile.pooled_masses(*masses)
    return found[0] if value is None else found


def _check(masses: Masses) -> None:
    query, key, seen, groups, bias, value, segment, pool, by_sign, _ = masses
    if query.dim() != 4 or key.dim() != 4 or query.dtype != key.dtype or not query.dtype.is_floating_point:
        raise ValueError(
            f"query, key: expected four dimensions and one floating-point dtype, got {query.shape=}, {query.dtype=}, "
            f"{key.shape=}, {key.dtype=}"
        )
    (batch, heads, rows, head_dim), (_, key_heads, n_keys, _) = query.shape, key.shape
    width = head_dim * (1 + by_sign)
    if (key.shape[0], key.shape[3]) != (batch, width) or heads % max(key_heads, 1):
        raise ValueError(f"key: expected [{batch}, a divisor of {heads}, K, {width}], got {key.shape=}")
    if segment < 1:
        raise ValueError(f"segment: expected a positive integer, got {segment!r}")
    if pool not in POOLS:
        raise ValueError(f"pool: expected one of {POOLS}, got {pool!r}")
    if seen.shape != (rows,) or seen.dtype != torch.int64:
        raise ValueError(f"seen: expected int64 [{rows}], got {seen.dtype=}, {seen.shape=}")
    if groups.dim() != 1 or not len(groups) or groups.dtype != torch.int32:
        raise ValueError(f"groups: expected int32 [R + 1], got {groups.dtype=}, {groups.shape=}")
    if bias is not None and not (
        bias.dtype == torch.float32 and bias.shape in ((batch, 1, n_keys), (batch, key_heads, n_keys))
    ):
        raise ValueError(
            f"bias: expected float32 [{batch}, {key_heads} or 1, {n_keys}], got {bias.dtype=}, {bias.shape=}"
        )
    if value is not None and (value.dim() != 4 or value.shape[:3] != key.shape[:3] or value.dtype != key.dtype):
        raise ValueError(
            f"value: expected {key.dtype} [{batch}, {key_heads}, {n_keys}, Dv], got {value.dtype=}, {value.shape=}"
        )
    for name, x in (("key", key), ("seen", seen), ("groups", groups), ("bias", bias), ("value", value)):
        if x is not None and x.device != query.device:
            raise ValueError(f"{name}: expected {query.device} as for query, got {x.device}")


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return new_results(Masses(*arguments))


def _pooled_masses(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    masses = Masses(*arguments)
    check_memory(masses._fields[:6], masses[:6])
    rows, ends = masses.query.shape[2], masses.groups.tolist()
    if not 0 <= ends[0] <= ends[-1] <= rows or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"groups: expected ascending numbers from 0 to {rows}, got {masses.groups!r}")
    if masses.value is not None and (ends[0], ends[-1]) != (0, rows):
        raise ValueError(f"groups: expected all {rows} rows in a group because of value, got {masses.groups!r}")
    found = native_masses(masses)
    if found is not None:
        return found
    with torch.autocast(masses.query.device.type, enabled=False):
        return _composed(masses)


library.impl("pooled_masses", _pooled_masses, "CompositeExplicitAutograd")
torch.library.register_fake("ringtile::pooled_masses", _fake, lib=library)


def _composed(masses: Masses) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results by PyTorch's own operations, for any device and dtype."""
    query, key, seen, groups, bias, value, segment, pool, by_sign, scale = masses
    wide = torch.promote_types(query.dtype, torch.float32)
    (batch, heads, _, _), (_, key_heads, n_keys, _) = query.shape, key.shape
    tiles, ends = -(-n_keys // segment), groups.tolist()
    found, out, lse = new_results(masses)
    found.zero_()
    out.zero_()
    lse.fill_(-math.inf)
    key, numbers = key.to(wide), torch.arange(n_keys, device=key.device)
    weighted = None if value is None else _weighted(value.to(wide).unsqueeze(2))
    first = 0
    # As many groups of rows at a time as have room for their scores, at least one.
    while first < len(ends) - 1 and found.numel():
        last = first + 1
        while last < len(ends) - 1 and (ends[last + 1] - ends[first]) * n_keys * batch * heads <= _SCORES:
            last += 1
        rows = slice(ends[first], ends[last])
        some = query[:, :, rows].to(wide)
        if by_sign:
            some = torch.cat([some.relu(), (-some).relu()], 3)
        visible = numbers < seen[rows].unsqueeze(1)
        scores = some.unflatten(1, (key_heads, -1)) @ key.unsqueeze(2).mT * scale
        if bias is not None:
            scores += bias[:, :, None, None].to(wide)
            visible = visible & (bias != -math.inf)[:, :, None, None]
        # A row that sees no key has a maximum of -inf. It counts as 0, so that no difference is NaN.
        top = scores.masked_fill_(~visible, -math.inf).amax(4, keepdim=True)
        weights = (scores - top.masked_fill(top == -math.inf, 0)).exp_()
        if weighted is not None:
            total = weights.sum(4, keepdim=True)
            lse[:, :, rows] = (top + total.log()).squeeze(4).flatten(1, 2)
            out[:, :, rows] = weighted(weights / total.masked_fill(total == 0, 1), visible).flatten(1, 2)
        weights = torch.nn.functional.pad(weights, (0, tiles * segment - n_keys)).unflatten(4, (tiles, segment)).sum(5)
        total = weights.sum(4, keepdim=True)
        # No key is seen, or a NaN.
        counted = total > 0
        shares = torch.where(counted, weights / total, 0).flatten(1, 2)
        counted = counted.expand(-1, -1, shares.shape[1] // key_heads, -1, -1).flatten(1, 2)
        lengths = groups[first : last + 1].diff().long()
        pooled = _pool(shares, lengths, pool)
        if pool == "mean":
            pooled = pooled / _pool(counted.to(wide), lengths, pool).clamp(min=1)
        found[:, :, first:last] = pooled
        first = last
    return found, out, lse


def _weighted(value: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of weights ``[B, Hkv, G, M, K]`` and of the keys that rows see, which sums the values."""
    finite = value.isfinite()
    clean = value.where(finite, 0)
    # A weight of 0 times NaN is NaN, also in a row that does not see it. So each kind is counted by the rows that do.
    kinds = (
        {} if finite.all() else {math.inf: value == math.inf, -math.inf: value == -math.inf, math.nan: value.isnan()}
    )

    def summed(weights: Tensor, visible: Tensor) -> Tensor:
        out = weights @ clean
        for number, where in kinds.items():
            count = visible.to(out.dtype).expand_as(weights) @ where.to(out.dtype)
            out = out + torch.where(count > 0, number, 0)
        return out

    return summed


def _pool(x: Tensor, lengths: Tensor, pool: str) -> Tensor:
    """Return the sums or maxima of runs of rows, ``[B, H, M, ...]`` to ``[B, H, R, ...]``."""
    reduced = torch.segment_reduce(
        x.movedim(2, 0).contiguous(),
        "sum" if pool == "mean" else "max",
        lengths=lengths,
        axis=0,
        initial=0,
        unsafe=True,
    )
    return reduced.movedim(0, 2)
