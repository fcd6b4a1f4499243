"""The peers of a benchmark: ringtile, and the other ways to compute the same attention in PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional import sparse_attention
from ringtile.index import BlockIndex, build_index
from ringtile.index.block_lists import to_block_mask
from ringtile.patterns import Causal, Dense, Pattern
from ringtile.patterns.facts import sees_no_future
from ringtile.tools.record import DENSE, DIRECTIONS, OURS

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of q, k and v ``[B, H, N, D]`` that returns an output of the same shape."""

MASK_PAIRS = 1 << 28
"""The largest dense mask. With PyTorch's float copy it takes 1.25 GiB in float32."""
FLEX_TOKENS = 2048
DENSE_PAIRS = 1 << 32
"""The most pairs for dense attention over all heads, about half a minute per call."""


@dataclass(frozen=True)
class Case:
    """One problem: a pattern at one length, and the sizes of the tensors."""

    asked: str
    """The pattern as requested."""
    pattern: Pattern
    n_tokens: int
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    block: int = 128
    kv_heads: int | None = None
    """Default: as many as heads."""
    n_queries: int | None = None
    """The number of queries, which are the last tokens. Default: all tokens."""
    threads: int | None = None
    """Default: as many as torch has."""

    @cached_property
    def index(self) -> BlockIndex:
        """The tiles of the pattern at this length."""
        sizes = {"num_heads": self.heads, "batch": self.batch, "block": self.block}
        return build_index(self.pattern, self.queries, self.n_tokens, **sizes, device=self.device)

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def shares_heads(self) -> bool:
        """True if several heads share one of keys and values. PyTorch wants to be told."""
        return self.key_heads != self.heads

    @property
    def queries(self) -> int:
        return self.n_tokens if self.n_queries is None else self.n_queries

    @property
    def dense_pattern(self) -> Pattern:
        """The dense attention to compare with: causal if the pattern is."""
        return Causal() if sees_no_future(self.pattern) else Dense()


class Peer:
    """One way to compute attention. By default it supports every case and keeps the pairs of the pattern."""

    name: str

    def unsupported(self, case: Case) -> list[str]:
        """Return the reasons why it does not support a case; none if it does."""
        return []

    def computes(self, case: Case) -> Pattern:
        """Return the pairs that it keeps."""
        return case.pattern

    def prepare(self, case: Case) -> Attention:
        """Build what depends only on the pattern and the lengths, and return the attention."""
        raise NotImplementedError


@dataclass(frozen=True)
class Task:
    """One case, the peers to measure on it, and the directions."""

    case: Case
    peers: tuple[Peer, ...]
    directions: tuple[str, ...] = DIRECTIONS


@dataclass(frozen=True)
class Ringtile(Peer):
    """`sparse_attention`."""

    backend: str | None = None
    name: str = OURS

    def prepare(self, case: Case) -> Attention:
        pattern = case.pattern if case.block == 128 else case.index
        return lambda q, k, v: sparse_attention(q, k, v, pattern, backend=self.backend, enable_gqa=True)


class SdpaDense(Peer):
    """PyTorch's dense attention, causal if the pattern is. It computes more pairs than the pattern keeps."""

    name = DENSE

    def unsupported(self, case: Case) -> list[str]:
        reasons = []
        pairs = case.batch * case.heads * case.queries * case.n_tokens
        if pairs > DENSE_PAIRS:
            reasons.append(f"computes {pairs:,} pairs, timed up to {DENSE_PAIRS:,}")
        if isinstance(case.dense_pattern, Causal) and case.queries not in (1, case.n_tokens):
            reasons.append("its causal mask needs as many queries as keys")
        return reasons

    def computes(self, case: Case) -> Pattern:
        return case.dense_pattern

    def prepare(self, case: Case) -> Attention:
        # PyTorch aligns its causal mask with the first key, so that a single query would see that key alone. A single
        # query is the last token here, and attends to all keys.
        causal = isinstance(case.dense_pattern, Causal) and case.queries > 1
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=case.shares_heads)


class SdpaMask(Peer):
    """PyTorch's dense attention with the pattern as a bool mask."""

    name = "sdpa-mask"

    def unsupported(self, case: Case) -> list[str]:
        pairs = case.index.n_groups * case.queries * case.n_tokens
        return [] if pairs <= MASK_PAIRS else [f"its mask has {pairs:,} pairs, timed up to {MASK_PAIRS:,}"]

    def prepare(self, case: Case) -> Attention:
        mask = case.index.to_dense()
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=case.shares_heads)


class FlexAttention(Peer):
    """FlexAttention, compiled separately for each pattern and length: with dynamic shapes it is slower, or fails."""

    name = "flex"

    def unsupported(self, case: Case) -> list[str]:
        long = f"takes seconds to compile for each length, timed from N {FLEX_TOKENS} up"
        reasons = [long] if case.n_tokens < FLEX_TOKENS else []
        is_double = case.dtype == torch.float64 and case.device.type == "cpu"
        return reasons + ["does not support float64 on a CPU"] * is_double

    def prepare(self, case: Case) -> Attention:
        return compiled_flex(case, to_block_mask(case.index))


def compiled_flex(case: Case, mask: Any) -> Attention:
    """Return FlexAttention compiled for one block mask."""
    from torch.nn.attention.flex_attention import flex_attention

    # Beyond its limit of compilations, torch would run it uncompiled, as a dense matmul.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    shares_heads = case.shares_heads
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=shares_heads)


def all_peers(backend: str | None = None) -> list[Peer]:
    """Return ringtile, with this backend, and all baselines."""
    return [Ringtile(backend), SdpaDense(), SdpaMask(), FlexAttention()]
