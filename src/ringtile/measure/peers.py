"""What sparse attention is measured against: the other ways to compute, or to avoid, the same attention in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional import sparse_attention
from ringtile.layout import BlockIndex, build_index
from ringtile.layout.flex import to_block_mask
from ringtile.measure.record import DENSE, OURS
from ringtile.patterns import Causal, Dense, Pattern
from ringtile.patterns.base import And

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v ``[B, H, N, D]`` to an output of the same shape."""

MASK_PAIRS = 1 << 28
"""The largest dense mask: with torch's own float copy of it, 1.25 GiB in float32."""

SPARSE_PAIRS = 1 << 20
"""torch.sparse takes about 3 microseconds a kept pair forward and backward, so a second and more of each call."""

FLEX_TOKENS = 2048

DENSE_PAIRS = 1 << 32
"""Dense attention over more pairs, all heads counted, takes half a minute a call."""


@dataclass(frozen=True)
class Case:
    """One problem: a pattern at one length, and the tensors' sizes."""

    asked: str
    """The pattern as asked for."""
    pattern: Pattern
    n_tokens: int
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    block: int = 128
    kv_heads: int | None = None
    """None: as many as heads."""
    n_queries: int | None = None
    """The last so many tokens; None: all."""
    threads: int | None = None
    """None: as many as torch has."""

    @cached_property
    def index(self) -> BlockIndex:
        """The tiles of the pattern at this length."""
        sizes = {"heads": self.heads, "batch": self.batch, "block": self.block}
        return build_index(self.pattern, self.queries, self.n_tokens, **sizes, device=self.device)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def queries(self) -> int:
        """Queries, the last of the tokens."""
        return self.n_tokens if self.n_queries is None else self.n_queries

    @property
    def dense_pattern(self) -> Pattern:
        """The attention that one would run instead: causal where the pattern is."""
        return Causal() if _is_causal(self.pattern.envelope()) else Dense()


def _is_causal(envelope: Pattern) -> bool:
    if isinstance(envelope, And):
        return _is_causal(envelope.first) or _is_causal(envelope.second)
    return isinstance(envelope, Causal)


class Peer(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """What its rows are called."""
        ...

    def unsupported(self, case: Case) -> list[str]:
        """Reasons why it cannot serve a case; none where it can."""
        ...

    def computes(self, case: Case) -> Pattern:
        """The pairs that it keeps."""
        ...

    def prepare(self, case: Case) -> Attention:
        """What is made once for a pattern and a length, apart from the time of a call."""
        ...


class _SamePairs:
    def computes(self, case: Case) -> Pattern:
        return case.pattern


@dataclass(frozen=True)
class Ringtile(_SamePairs):
    """`sparse_attention`."""

    backend: str | None = None
    name: str = OURS

    def unsupported(self, case: Case) -> list[str]:
        return []

    def prepare(self, case: Case) -> Attention:
        pattern = case.pattern if case.block == 128 else case.index

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sparse_attention(q, k, v, pattern, backend=self.backend, enable_gqa=True)

        return run


@dataclass(frozen=True)
class SdpaDense:
    """Torch's dense attention, causal where the pattern is: it computes more pairs, not the same ones."""

    name: str = DENSE

    def unsupported(self, case: Case) -> list[str]:
        reasons = []
        pairs = case.batch * case.heads * case.queries * case.n_tokens
        if pairs > DENSE_PAIRS:
            reasons.append(f"computes {pairs:,} pairs, timed up to {DENSE_PAIRS:,}")
        if isinstance(case.dense_pattern, Causal) and case.queries not in (1, case.n_tokens):
            reasons.append("its causal mask is that of as many queries as keys")
        return reasons

    def computes(self, case: Case) -> Pattern:
        return case.dense_pattern

    def prepare(self, case: Case) -> Attention:
        # One query is the last token: it sees all keys.
        causal = isinstance(case.dense_pattern, Causal) and case.queries > 1
        gqa = case.key_heads != case.heads
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


@dataclass(frozen=True)
class SdpaMask(_SamePairs):
    """Torch's dense attention with the pattern as a bool mask."""

    name: str = "sdpa-mask"

    def unsupported(self, case: Case) -> list[str]:
        pairs = case.index.n_groups * case.queries * case.n_tokens
        return [] if pairs <= MASK_PAIRS else [f"its mask has {pairs:,} pairs, timed up to {MASK_PAIRS:,}"]

    def prepare(self, case: Case) -> Attention:
        mask, gqa = case.index.to_dense(), case.key_heads != case.heads
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


@dataclass(frozen=True)
class FlexAttention(_SamePairs):
    """FlexAttention, compiled for each pattern and length by itself: with dynamic shapes it is slower, or fails."""

    name: str = "flex"

    def unsupported(self, case: Case) -> list[str]:
        reasons = []
        if case.n_tokens < FLEX_TOKENS:
            reasons.append(f"takes seconds to compile for each length, timed from N {FLEX_TOKENS} on")
        if case.dtype == torch.float64 and case.device.type == "cpu":
            reasons.append("knows no float64 on a CPU")
        return reasons

    def prepare(self, case: Case) -> Attention:
        from torch._dynamo import config, reset
        from torch.nn.attention.flex_attention import flex_attention

        # Past its limit of compilations torch would go on uncompiled, with a dense product.
        reset()
        config.fail_on_recompile_limit_hit = True
        mask = to_block_mask(case.index)
        compiled = torch.compile(flex_attention, dynamic=False)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=case.key_heads != case.heads)
            return out

        return run


@dataclass(frozen=True)
class TorchSparse(_SamePairs):
    """`torch.sparse` in CSR form, one head at a time: sampled product, softmax over each row's entries, product."""

    name: str = "torch.sparse"

    def unsupported(self, case: Case) -> list[str]:
        reasons = []
        if case.index.kept_pairs * _batch_factor(case) > SPARSE_PAIRS:
            pairs = case.index.kept_pairs * _batch_factor(case)
            reasons.append(f"keeps {pairs:,} pairs over all heads, timed up to {SPARSE_PAIRS:,}")
        if case.index.n_groups * case.queries * case.n_tokens > MASK_PAIRS:
            reasons.append(f"its entries are read from a dense mask of up to {MASK_PAIRS:,} pairs")
        if case.dtype not in (torch.float32, torch.float64):
            reasons.append(f"its sampled product knows float32 and float64, got {case.dtype}")
        return reasons

    def prepare(self, case: Case) -> Attention:
        kept = case.index.to_dense().expand(case.batch, case.heads, -1, -1).flatten(0, 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            entries = [mask.to(case.dtype).to_sparse_csr() for mask in kept]
        rows = [_row_of_entry(csr) for csr in entries]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = zip(entries, rows, *(_for_each_head(x, case).flatten(0, 1) for x in (q, k, v)), strict=True)
            with torch.sparse.check_sparse_tensor_invariants(False):
                return torch.stack([_csr_attention(*head) for head in heads]).view_as(q)

        return run


def _for_each_head(x: Tensor, case: Case) -> Tensor:
    """Keys or values with a head for each of the queries'."""
    return x if x.shape[1] == case.heads else x.repeat_interleave(case.heads // case.key_heads, 1)


def _batch_factor(case: Case) -> int:
    """How many (batch row, head) pairs one entry of the index's groups stands for."""
    return case.batch * case.heads // case.index.group.numel()


def _row_of_entry(csr: Tensor) -> Tensor:
    counts = csr.crow_indices().diff()
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def _csr_attention(csr: Tensor, row: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sampled = torch.sparse.sampled_addmm(csr, q, k.mT, beta=0.0, alpha=q.shape[-1] ** -0.5)
    scores = sampled.values()
    highest = scores.new_full((len(q),), -torch.inf).scatter_reduce(0, row, scores.detach(), "amax")
    weights = (scores - highest[row]).exp()
    total = weights.new_zeros(len(q)).index_add(0, row, weights)
    share = torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), weights / total[row], csr.shape)
    return share @ v


@dataclass(frozen=True)
class BlockLoop(_SamePairs):
    """A Python loop over row tiles, with one softmax over all the keys that a row keeps."""

    name: str = "block loop"

    def unsupported(self, case: Case) -> list[str]:
        return []

    def prepare(self, case: Case) -> Attention:
        index, groups = case.index, case.index.group.expand(case.batch, case.heads)
        tiles = [_row_tiles(case, group) for group in range(index.n_groups)]
        members = [(groups == group).nonzero(as_tuple=True) for group in range(index.n_groups)]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = _for_each_head(k, case), _for_each_head(v, case)
            if index.n_groups == 1:
                return _loop(tiles[0], q, k, v)
            out = torch.empty_like(q)
            for rows, member in zip(tiles, members, strict=True):
                out = out.index_put(member, _loop(rows, q[member], k[member], v[member]))
            return out

        return run


class _RowTile(NamedTuple):
    queries: slice
    keys: Tensor
    dropped: Tensor | None
    """Pairs outside the pattern, in rows that keep something; None where there are none."""
    empty: Tensor | None
    """Queries that keep nothing, ``[m, 1]``; None where there are none."""


def _row_tiles(case: Case, group: int) -> list[_RowTile]:
    index, n_tokens, block = case.index, case.n_tokens, case.block
    skipped = index.start - index.first_row * block
    batch, head = (index.group == group).nonzero()[0].tolist()
    pattern = case.pattern if case.pattern.batch_size is None else case.pattern.batch_row(batch)
    inside, token = torch.arange(block, device=case.device), torch.arange(n_tokens, device=case.device)
    lists = ((index.full_col, index.full_row_ptr), (index.part_col, index.part_row_ptr))
    rows = []
    for row in range(index.n_rows):
        slot = group * index.n_rows + row
        columns = torch.cat([col[ptr[slot] : ptr[slot + 1]] for col, ptr in lists]).long().sort().values
        queries = slice(max(row * block - skipped, 0), min((row + 1) * block - skipped, case.queries))
        keys = (columns[:, None] * block + inside).flatten()
        keys = keys[keys < n_tokens]
        query = token[queries, None] + index.start
        kept = pattern.allowed(torch.tensor(head, device=case.device), query, keys).expand(len(query), len(keys))
        some = kept.any(-1, keepdim=True)
        rows.append(_RowTile(queries, keys, None if kept.all() else ~kept & some, None if some.all() else ~some))
    return rows


def _loop(rows: Sequence[_RowTile], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for row in rows:
        scores = q[..., row.queries, :] @ k[..., row.keys, :].mT * q.shape[-1] ** -0.5
        if row.dropped is not None:
            scores = scores.masked_fill(row.dropped, -torch.inf)
        out = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v[..., row.keys, :]
        outs.append(out if row.empty is None else out.masked_fill(row.empty, 0.0))
    return torch.cat(outs, -2)


def all_peers(backend: str | None = None) -> list[Peer]:
    """Ours, with the given backend, and all the others.

    >>> [peer.name for peer in all_peers()]
    ['ringtile', 'dense', 'sdpa-mask', 'flex', 'torch.sparse', 'block loop']
    """
    return [Ringtile(backend), SdpaDense(), SdpaMask(), FlexAttention(), TorchSparse(), BlockLoop()]
