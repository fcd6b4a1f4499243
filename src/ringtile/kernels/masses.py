"""The attention that rows pay to segments of keys: the forward pass without values, pooled over groups of rows."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringtile.kernels.contracts import Masses, check_memory, in_bytes, scale_of
from ringtile.kernels.operators import library, register, schema
from ringtile.kernels.select import native_masses

POOLS = ("mean", "max", "rms")
_SCORES = 1 << 22
"""Most scores that exist at once without the native kernel, unless a single group of rows has more."""

library.define(f"pooled_masses({schema(Masses)}) -> Tensor")


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
) -> Tensor:
    """Return the softmax weights of rows, summed per segment of keys and pooled over groups of rows, in float32.

    Memory grows with the result and with one group of rows per thread, not with M times K. It has no gradient. Sums are
    float32, float64 for float64. The result has the same bits for any number of threads.

    Args:
        query: ``[B, H, M, D]``, the rows.
        key: ``[B, Hkv, K, D]``. Hkv must divide H. A NaN in a key that a row does not see never reaches that row.
        segment: Number of consecutive keys that are summed.
        seen: int64 ``[M]``: row m sees the keys before ``seen[m]``. A row that sees no key, or a NaN, is 0, and no mean
            counts it.
        groups: int32 ``[R + 1]``, ascending: output row r pools the rows from ``groups[r]`` to ``groups[r + 1] - 1``.
            An empty group is 0.
        pool: ``"mean"`` or ``"max"`` over the rows of a group, or ``"rms"``, the root mean square, of queries and keys
            that are rounded to whole numbers up to 127, in units of their own. Weights are within 3%.
        bias: float32 ``[B, Hkv or 1, K]``, added to the scaled scores. -inf hides a key. With "rms", all others are 0.
        by_sign: True if the keys have width 2 D: the halves are multiplied with ``relu(query)`` and ``relu(-query)``.
        scale: Factor for the scores. Default: ``D ** -0.5``.

    Returns:
        float32 ``[B, H, R, ceil(K / segment)]``.
    """
    masses = Masses(query.detach(), key.detach(), seen, groups, bias, segment, pool, by_sign, scale_of(query, scale))
    _check(masses)
    with torch.no_grad():
        found: Tensor = torch.ops.ringtile.pooled_masses(*masses)
    return found


def _check(masses: Masses) -> None:
    query, key, seen, groups, bias, segment, pool, by_sign, _ = masses
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
    if pool == "rms" and by_sign:
        raise ValueError(f'by_sign: expected False with pool="rms", got {by_sign}')
    for name, x in (("key", key), ("seen", seen), ("groups", groups), ("bias", bias)):
        if x is not None and x.device != query.device:
            raise ValueError(f"{name}: expected {query.device} as for query, got {x.device}")


def _fake(*arguments: Any) -> Tensor:
    query, key, _, groups, _, segment, *_ = arguments
    shape = *query.shape[:2], len(groups) - 1, -(-key.shape[2] // segment)
    pooled: Tensor = query.new_empty(shape, dtype=torch.float32)
    return pooled


def _pooled_masses(*arguments: Any) -> Tensor:
    masses = Masses(*arguments)
    check_memory(masses._fields[:5], masses[:5])
    rows, ends = masses.query.shape[2], masses.groups.tolist()
    if not 0 <= ends[0] <= ends[-1] <= rows or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"groups: expected ascending numbers from 0 to {rows}, got {masses.groups!r}")
    bias = masses.bias
    if masses.pool == "rms" and bias is not None and ((bias != 0) & (bias != -math.inf)).any():
        raise ValueError(f'bias: expected 0 or -inf with pool="rms", got {bias!r}')
    found = native_masses(masses)
    if found is not None:
        return found
    with torch.autocast(masses.query.device.type, enabled=False):
        return _composed(masses)


register("pooled_masses", _pooled_masses, _fake)


def _composed(masses: Masses) -> Tensor:
    """Return the masses by PyTorch's own operations, for any device and dtype."""
    query, key, seen, groups, bias, segment, pool, by_sign, scale = masses
    if pool == "rms":
        query, key = (x * unit for x, unit in (in_bytes(query), in_bytes(key)))
    wide = torch.promote_types(query.dtype, torch.float32)
    (batch, heads, _, _), (_, key_heads, n_keys, _) = query.shape, key.shape
    tiles, ends = -(-n_keys // segment), groups.tolist()
    out = query.new_zeros((batch, heads, len(ends) - 1, tiles), dtype=torch.float32)
    key, numbers = key.to(wide), torch.arange(n_keys, device=key.device)
    first = 0
    # As many groups of rows at a time as have room for their scores, at least one.
    while first < len(ends) - 1 and out.numel():
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
        lengths = groups[first : last + 1].diff().long()
        # A row that sees no key has a maximum of -inf. It counts as 0, so that no difference is NaN.
        top = scores.masked_fill_(~visible, -math.inf).amax(4, keepdim=True)
        weights = (scores - top.masked_fill(top == -math.inf, 0)).exp_()
        weights = torch.nn.functional.pad(weights, (0, tiles * segment - n_keys)).unflatten(4, (tiles, segment)).sum(5)
        total = weights.sum(4, keepdim=True)
        # No key is seen, or a NaN.
        counted = total > 0
        shares = torch.where(counted, weights / total, 0).flatten(1, 2)
        counted = counted.expand(-1, -1, shares.shape[1] // key_heads, -1, -1).flatten(1, 2)
        pooled = _pool(shares.square() if pool == "rms" else shares, lengths, pool)
        if pool != "max":
            pooled = pooled / _pool(counted.to(wide), lengths, pool).clamp(min=1)
        out[:, :, first:last] = pooled.sqrt() if pool == "rms" else pooled
        first = last
    return out


def _pool(x: Tensor, lengths: Tensor, pool: str) -> Tensor:
    """Return the sums or maxima of runs of rows, ``[B, H, M, ...]`` to ``[B, H, R, ...]``."""
    reduced = torch.segment_reduce(
        x.movedim(2, 0).contiguous(), "max" if pool == "max" else "sum", lengths=lengths, axis=0, initial=0, unsafe=True
    )
    return reduced.movedim(0, 2)
