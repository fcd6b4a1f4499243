"""The reference: dense masked softmax in float64, from the element rule of a pattern."""

import itertools
import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ringtile.index.block_index import BlockIndex
from ringtile.index.build import check_counts
from ringtile.kernels.contracts import RowOptions, scale_of, settle_exponentials
from ringtile.kernels.philox import dropout_keep, dropout_scale
from ringtile.patterns import Pattern, TileGrid
from ringtile.patterns.checks import check_number
from ringtile.patterns.grammar import as_rule

_CHUNK_PAIRS = 1 << 22
"""Pairs whose element rule is evaluated at once: rules create several int64 temporaries of this length."""


class Options(RowOptions, total=False):
    """Keyword arguments of the reference, for type checkers."""

    start: int | None
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class _Problem:
    """The arguments of one call, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern | BlockIndex
    start: int | None = None
    key_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    head_at: Tensor | None = None
    batch_at: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
        if not q.ndim == k.ndim == v.ndim == 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(
                f"q, k, v: expected [B, H, Nq, D], [B, Hkv, Nk, D], got {q.shape=}, {k.shape=}, {v.shape=}"
            )
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"v: expected the batch, heads and length of k, got {v.shape=} with {k.shape=}")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ValueError(f"k: expected a divisor of the heads of q, got {k.shape=} with {q.shape=}")
        if not isinstance(self.pattern, BlockIndex):
            object.__setattr__(self, "pattern", as_rule(self.pattern, "a Pattern or a BlockIndex"))
        self._check_pattern()
        batch, heads, n_keys = q.shape[0], q.shape[1], k.shape[2]
        for name, value, shape in (
            ("key_mask", self.key_mask, (batch, n_keys)),
            ("key_lengths", self.key_lengths, (batch,)),
            ("alibi_slopes", self.alibi_slopes, (heads,)),
            ("sinks", self.sinks, (heads,)),
            ("head_at", self.head_at, (heads,)),
            ("batch_at", self.batch_at, (batch,)),
        ):
            if value is not None and (got := getattr(value, "shape", value)) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {got} with {q.shape=}, {k.shape=}")
        if self.key_mask is not None and self.key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask: expected bool, True = attend, got {self.key_mask.dtype}")
        check_number("softcap", self.softcap, "a finite number >= 0", 0)
        scale_of(q, self.scale)
        dropout_scale(self.dropout_p)
        if self.dropout_p and self.seed is None:
            raise ValueError(f"seed: expected an int or one int64 element with dropout_p={self.dropout_p}, got None")
        if self.bias is not None and torch.broadcast_shapes(self.bias.shape, shape := (*q.shape[:3], n_keys)) != shape:
            raise ValueError(f"bias: expected a shape that broadcasts to {shape}, got {self.bias.shape}")

    def _check_pattern(self) -> None:
        batch, heads, n_queries, n_keys = *self.q.shape[:3], self.k.shape[2]
        if isinstance(self.pattern, BlockIndex):
            built = (self.pattern.start, self.pattern.n_queries, self.pattern.n_keys)
            if built != (self.first_position, n_queries, n_keys) or any(
                size not in (1, wanted) for size, wanted in zip(self.pattern.group.shape, (batch, heads), strict=True)
            ):
                raise ValueError(
                    f"pattern: {self.pattern!r} does not match {self.start=}, {self.q.shape=}, {self.k.shape=}"
                )
        else:
            check_counts(self.pattern, heads, batch)
            self.pattern.validate(TileGrid(128, self.first_position, n_queries, n_keys))

    @property
    def first_position(self) -> int:
        """Position of query 0."""
        if self.start is not None:
            return self.start
        return self.pattern.start if isinstance(self.pattern, BlockIndex) else self.k.shape[2] - self.q.shape[2]

    def positions(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of queries ``rows`` and of ``keys`` (numbers) in the whole problem."""
        queries, index = self.first_position + rows, self.pattern
        if not isinstance(index, BlockIndex):
            return queries, keys
        # Tiles of an index can lie elsewhere than their numbers say: with block 16 and row_at [0, 3], query 20 is the
        # fifth of the tile at 3, at position 3 * 16 + 4 = 52.
        row_tile = index.row_positions(queries // index.block - index.first_row)
        col_tile = index.col_positions(keys // index.block)
        return row_tile * index.block + queries % index.block, col_tile * index.block + keys % index.block

    @property
    def heads_per_key_head(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def kept(self, batch: int, head: int, rows: Tensor) -> Tensor:
        """Return the keys that some queries of one batch element and head keep: bool ``[R, Nk]``."""
        n_keys = self.k.shape[2]
        keys = torch.arange(n_keys, device=rows.device)
        if isinstance(self.pattern, BlockIndex):
            of_groups = self.pattern.keys_of(rows)
            kept = of_groups[batch % len(of_groups), head % of_groups.shape[1]]
        else:
            pattern = self.pattern if self.pattern.batch_size is None else self.pattern.batch_row(batch)
            head_ = rows.new_tensor(head)
            parts = (self.first_position + rows)[:, None].split(max(1, _CHUNK_PAIRS // max(1, n_keys)))
            kept = torch.cat([pattern.allowed(head_, part, keys).expand(len(part), n_keys) for part in parts])
        if self.key_mask is not None:
            kept = kept & self.key_mask[batch]
        if self.key_lengths is not None:
            kept = kept & (keys < self.key_lengths[batch])
        return kept

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, batch: Tensor, head: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse of queries ``rows`` and ``keys`` (numbers), in float64.

        Leading dimensions broadcast. Queries and keys that no pair keeps are replaced before use, and results are
        selected, never multiplied by a mask. So a NaN there reaches neither results nor gradients. A row whose scores
        are all -inf keeps no pair.
        """
        if not torch.compiler.is_compiling():
            settle_exponentials()
        # Dropout and ALiBi depend on positions, not on places in this call.
        query_at, key_at = self.positions(rows, keys)
        query_at = query_at[:, None]

        def scores_of(q: Tensor, k: Tensor) -> Tensor:
            scores = scale_of(self.q, self.scale) * (q @ k.mT)
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if self.alibi_slopes is not None:
                scores = scores - self.alibi_slopes.double()[head] * (query_at - key_at).abs()
            if self.bias is not None:
                bias = self.bias.double().expand(len(self.q), self.q.shape[1], -1, -1)
                scores = scores + bias[batch, head, rows[:, None], keys]
            return torch.where(kept, scores, -math.inf)

        with torch.no_grad():
            kept = kept & (scores_of(q.double(), k.double()) != -math.inf).any(-1, keepdim=True)
        row_kept, key_kept = kept.any(-1, keepdim=True), kept.any(-2).unsqueeze(-1)
        q, k, v = (torch.where(used, x.double(), 0.0) for used, x in ((row_kept, q), (key_kept, k), (key_kept, v)))
        # A row that keeps no keys gets finite scores, so its gradient is zero instead of NaN.
        scores = torch.where(row_kept, scores_of(q, k), 0.0)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = torch.where(kept, (scores - lse).exp(), 0.0)
        if self.sinks is not None:
            weights = weights * torch.sigmoid(lse - self.sinks.double()[head])
        if self.dropout_p:
            assert self.seed is not None
            batch = batch if self.batch_at is None else self.batch_at[batch]
            head = head if self.head_at is None else self.head_at[head]
            keep = dropout_keep(self.seed, batch, head, query_at, key_at, self.dropout_p)
            weights = torch.where(keep, weights * dropout_scale(self.dropout_p), 0.0)
        out = torch.where(row_kept, weights @ v, 0.0)
        return out, torch.where(row_kept, lse, -math.inf).squeeze(-1)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | BlockIndex,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Compute attention over the pairs that a pattern keeps, dense and in float64.

    Memory is O(B H Nq Nk). Results are differentiable, also twice. A query that keeps no keys returns 0, an lse of -inf
    and zero gradients. Keys that no query of a head keeps are never used, so they can be NaN.

    Args:
        q: ``[B, H, Nq, D]`` of any dtype.
        k: ``[B, Hkv, Nk, D]``. H is a multiple of Hkv.
        v: ``[B, Hkv, Nk, Dv]``.
        pattern: The pairs to keep.
        options: As in `sparse_attention`. Query ``a`` is at position ``start + a``. ``start`` defaults to ``Nk - Nq``.
            Scores are ``scale * q @ k``, then ``softcap * tanh(scores / softcap)``, then less ``alibi_slopes[h] * |i -
            j|``, plus ``bias``, a tensor that broadcasts to ``[B, H, Nq, Nk]``. ``sinks`` scale weights and output by
            ``sigmoid(lse - sink)``. The lse does not include them.

    Returns:
        The output ``[B, H, Nq, Dv]`` and the natural-log lse ``[B, H, Nq]``, both in float64.
    """
    problem = _Problem(q, k, v, pattern, **options)
    (batch, heads, n_queries), n_keys = q.shape[:3], k.shape[2]
    rows, keys = torch.arange(n_queries, device=q.device), torch.arange(n_keys, device=q.device)
    kept = torch.empty(batch, heads, n_queries, n_keys, dtype=torch.bool, device=q.device)
    for b, h in itertools.product(range(batch), range(heads)):
        kept[b, h] = problem.kept(b, h, rows)
    return problem.attend(
        q,
        k.repeat_interleave(problem.heads_per_key_head, 1),
        v.repeat_interleave(problem.heads_per_key_head, 1),
        kept,
        torch.arange(batch, device=q.device).view(-1, 1, 1, 1),
        torch.arange(heads, device=q.device).view(-1, 1, 1),
        rows,
        keys,
    )


def attention_rows(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | BlockIndex, rows: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Compute some rows of `attention_reference`: output ``[B, H, R, Dv]`` and lse ``[B, H, R]``, in float64.

    ``rows`` ``[R]`` int64 are query numbers in ``[0, Nq)``. The element rule takes O(B H R Nk) and the rest O(kept), so
    you can check a million tokens. Results are differentiable: with a loss on these rows alone, the gradients are
    those of the full attention. Raises ValueError if an argument is invalid.
    """
    problem = _Problem(q, k, v, pattern, **options)
    if rows.ndim != 1 or rows.dtype != torch.int64 or bool(((rows < 0) | (rows >= q.shape[2])).any()):
        raise ValueError(f"rows: expected int64 [R] in [0, {q.shape[2]}), got {rows.dtype} {rows.shape}")
    results = [_rows_of_head(problem, b, h, rows) for b in range(q.shape[0]) for h in range(q.shape[1])]
    out, lse = (torch.stack(parts).unflatten(0, q.shape[:2]) for parts in zip(*results, strict=True))
    return out, lse


def _rows_of_head(problem: _Problem, batch: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    k, v = (x[batch, head // problem.heads_per_key_head] for x in (problem.k, problem.v))
    for part in rows.split(max(1, _CHUNK_PAIRS // max(1, k.shape[0]))):
        kept = problem.kept(batch, head, part)
        keys = kept.any(0).nonzero().squeeze(1)
        out, lse = problem.attend(
            problem.q[batch, head, part],
            k[keys],
            v[keys],
            kept[:, keys],
            rows.new_tensor(batch),
            rows.new_tensor([[head]]),
            part,
            keys,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
