"""Attention in slices of batch rows and heads, for calls that do not fit into memory whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringtile.functional.attention import (
    as_pattern,
    check_index,
    check_plain,
    checked_tensors,
    drawn_seed,
    sparse_attention,
)
from ringtile.index import BlockIndex
from ringtile.index.build import check_counts
from ringtile.patterns import Pattern
from ringtile.patterns.wrapped import for_heads

_OF_ROWS = ("key_mask", "key_lengths", "batch_at")
_OF_HEADS = ("alibi_slopes", "sinks", "head_at")
"""Options that are cut with the batch rows, and with the heads."""


def in_slices(slices: int | None = None) -> Callable[..., Any]:
    """Return `sparse_attention` that computes batch rows and heads one slice after another.

    Use it in place of `sparse_attention`, or as ``attend=`` of a module. Each slice needs only its share of a call's
    temporary memory. The backward pass runs in the same slices, but does not retry. Outputs and the gradients of
    queries, keys and values have the same bits as one call. With ``backend="blockwise"``, whose chunks depend on the
    size of a call, the last bits can differ. So can the gradient of sinks, which is a sum over slices.

    Args:
        slices: Number of slices, cut along the batch first, then along the key heads. Default: one, and twice as many
            each time memory runs out.

    Returns a function with the arguments of `sparse_attention`. Dropout drops the weights that one call would drop.
    Raises ValueError if ``slices`` is not positive.

    >>> from ringtile.patterns import Causal, Window
    >>> q, k, v = torch.randn(3, 2, 4, 300, 64).unbind()
    >>> out = in_slices(8)(q, k, v, Causal() & Window(64))
    >>> torch.equal(out, sparse_attention(q, k, v, Causal() & Window(64)))
    True
    """
    if slices is not None and (type(slices) is not int or slices < 1):
        raise ValueError(f"slices: expected a positive integer or None, got {slices!r}")

    def attend(query: Tensor, key: Tensor, value: Tensor, pattern: Any = None, **options: Any) -> Any:
        _check(query, key, value, pattern, options)
        if options.get("dropout_p"):
            # One seed for all slices, and numbers in the whole call: each slice would count its own from 0.
            seed = drawn_seed(None, query) if options.get("seed") is None else options["seed"]
            batch_at, head_at = (torch.arange(size, device=query.device) for size in query.shape[:2])
            given = {name: x for name, x in options.items() if x is not None}
            options = {"batch_at": batch_at, "head_at": head_at, **given, "seed": seed}
        limit = max(query.shape[0], 1) * max(key.shape[1], 1)
        count = 1 if slices is None else slices
        while True:
            try:
                return _computed(min(count, limit), query, key, value, pattern, options)
            except (MemoryError, RuntimeError) as error:
                no_room = isinstance(error, (MemoryError, torch.OutOfMemoryError))
                no_room = no_room or "can't allocate memory" in str(error)
                if slices is not None or count >= limit or not no_room:
                    raise
            # Retry outside the except block: the exception holds the memory of the failed attempt.
            count *= 2

    return attend


def _check(query: Tensor, key: Tensor, value: Tensor, pattern: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for sizes that slicing would hide."""
    checked_tensors(query, key, value, options.get("enable_gqa", False))
    if options.get("bias") is not None:
        raise ValueError("bias: not supported with in_slices")
    batch, heads = query.shape[:2]
    for name, size in (*((name, batch) for name in _OF_ROWS), *((name, heads) for name in _OF_HEADS)):
        given = options.get(name)
        if given is not None:
            check_plain(name, given)
        if given is not None and given.shape[:1] != (size,):
            raise ValueError(f"{name}: expected {size} entries in the first dimension, got {given.shape=}")
    if isinstance(pattern, BlockIndex):
        check_index("pattern", pattern, query, key.shape[2])
    elif pattern is not None:
        check_counts(as_pattern(pattern, options.get("start")), heads, batch)


def _computed(count: int, query: Tensor, key: Tensor, value: Tensor, pattern: Any, options: dict[str, Any]) -> Any:
    """Compute attention in ``count`` slices or a few more."""
    if count == 1 or not query.numel():
        return sparse_attention(query, key, value, pattern, **options)
    if pattern is not None and not isinstance(pattern, BlockIndex):
        pattern = as_pattern(pattern, options.get("start"))
        if pattern.batch_size is not None:
            # A slice of several rows would need a pattern of these rows, and patterns give only single ones.
            count = max(count, len(query))
    batch, heads, key_heads = len(query), query.shape[1], key.shape[1]
    # Rows of a slice, then key heads of one: 6 slices of 3 rows and 4 key heads have 1 row and 2 key heads each.
    rows = -(-batch // count)
    groups = -(-key_heads // -(-count // batch))
    ratio = heads // key_heads
    found = []
    # Splits, because the gradient of a split is one concatenation, not a sum.
    of_slices = zip(*(x.split(rows) for x in (query, key, value)), strict=True)
    for row, (q_rows, k_rows, v_rows) in zip(range(0, batch, rows), of_slices, strict=True):
        of_rows = []
        parts = zip(q_rows.split(groups * ratio, 1), k_rows.split(groups, 1), v_rows.split(groups, 1), strict=True)
        for number, (q, k, v) in enumerate(parts):
            first = number * groups * ratio
            chosen = range(first, first + q.shape[1])
            given = {name: _share(name, x, row, len(q), chosen) for name, x in options.items()}
            of_rows.append(sparse_attention(q, k, v, _rule(pattern, row, len(q), chosen, heads), **given))
        found.append(_joined(of_rows, 1))
    return _joined(found, 0)


def _share(name: str, value: Any, row: int, n_rows: int, heads: range) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name in _OF_ROWS:
        return value[row : row + n_rows]
    return value[heads.start : heads.stop] if name in _OF_HEADS else value


def _rule(pattern: Any, row: int, n_rows: int, heads: range, num_heads: int) -> Any:
    """Return the pattern or index of some batch rows and heads."""
    if isinstance(pattern, Pattern):
        return for_heads(pattern if pattern.batch_size is None else pattern.batch_row(row), tuple(heads), num_heads)
    if not isinstance(pattern, BlockIndex):
        return pattern
    group = pattern.group[row : row + n_rows] if len(pattern.group) > 1 else pattern.group
    return replace(pattern, group=group[:, heads.start : heads.stop] if group.shape[1] > 1 else group)


def _joined(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    return tuple(torch.cat(each, dim) for each in zip(*parts, strict=True))
