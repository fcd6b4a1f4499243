"""Problems of attention over lists of keys: random lists, and a dense masked softmax in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import Tensor

from ringtile.kernels.contracts import Lists
from ringtile.testing.oracle import attention

NAMES = ("out", "lse", "q", "k", "v")


class Case(NamedTuple):
    """Shapes: B, H, Hkv, Nq, Nk, D, Dv, then groups of lists, tokens of an entry, entries of a list."""

    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    value_dim: int
    groups: int = 1
    block: int = 1
    length: int = 20


class Inputs(NamedTuple):
    """Queries, keys, values and the gradients of both results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out_grad: Tensor
    lse_grad: Tensor


def draw_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw queries with a gap between rows, laid out [B, N, H, D]."""
    q = torch.randn(case.batch, case.n_queries, case.heads, case.head_dim + 3).to(dtype)[..., :-3].transpose(1, 2)
    k = torch.randn(case.batch, case.kv_heads, case.n_keys, case.head_dim).to(dtype)
    v = torch.randn(case.batch, case.n_keys, case.kv_heads, case.value_dim).to(dtype).transpose(1, 2)
    out_grad = torch.randn(case.batch, case.heads, case.n_queries, case.value_dim).to(dtype)
    return Inputs(q, k, v, out_grad, torch.randn(out_grad.shape[:3]))


def draw_lists(case: Case, *, causal: bool = True, shared: bool = False, near: bool = False) -> Lists:
    """Draw lists with tails of -1, some of them empty, and limits that cut entries at both ends.

    ``near``: those of all queries but the last 16 agree nearly.
    """
    blocks = -(-case.n_keys // case.block)
    order = torch.rand(1 if shared else case.batch, case.groups, case.n_queries, max(blocks, case.length))
    if near:
        order[:, :, :-16] = order[:, :, :1] + 0.003 * order[:, :, :-16]
    order = order.argsort(3)
    entries = order[..., : case.length]
    entries = torch.where(
        (entries < blocks) & (torch.rand(entries.shape) < (0.98 if near else 0.9)), entries, 2**31 - 1
    )
    entries[:, :, 1 :: 13 if near else 7] = 2**31 - 1
    entries = entries.sort(3).values
    low, high = torch.zeros(case.n_queries), torch.full((case.n_queries,), case.n_keys)
    if causal:
        high = torch.arange(case.n_queries) + case.n_keys - case.n_queries + 1
        low = high - case.n_keys * 3 // 4
        low[2 :: 13 if near else 9] = high[2 :: 13 if near else 9]
    limits = torch.stack([low, high], 1).clamp(0, case.n_keys).int().repeat(1 if shared else case.batch, 1, 1)
    # Each batch element has limits of its own.
    limits[1:, :, 1] = (limits[1:, :, 1] - 3).clamp(min=0)
    return Lists(torch.where(entries == 2**31 - 1, -1, entries).int(), case.block, limits)


def kept_pairs(lists: Lists, case: Case) -> Tensor:
    """The kept pairs as bool [B, H, Nq, Nk], entry by entry."""
    key, limits = torch.arange(case.n_keys), lists.limits.long().expand(case.batch, -1, -1)
    kept = torch.zeros(case.batch, case.groups, case.n_queries, case.n_keys, dtype=torch.bool)
    for entry in lists.indices.long().expand(case.batch, -1, -1, -1).unbind(3):
        kept |= (key // lists.block) == entry[..., None]
    kept &= ((key >= limits[..., :1]) & (key < limits[..., 1:]))[:, None]
    return kept.repeat_interleave(case.heads // case.groups, 1)


def expected(inputs: Inputs, kept: Tensor, scale: float) -> dict[str, Tensor]:
    """Outputs, lse and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, kept, scale=scale)
    total = (out * inputs.out_grad.double()).sum() + (torch.where(kept.any(3), lse, 0) * inputs.lse_grad.double()).sum()
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)), strict=True))


def sdpa_errors(inputs: Inputs, kept: Tensor, scale: float) -> dict[str, float]:
    """The errors of PyTorch's attention on the same pairs, without those of lse."""
    inputs = inputs._replace(lse_grad=torch.zeros_like(inputs.lse_grad))
    some = kept.any(3, keepdim=True)
    inputs = inputs._replace(out_grad=torch.where(some, inputs.out_grad, 0))
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    # Of one width, so that its flash kernel runs, whose gradients use the rounded output as well.
    width, ratio, value_dim = max(x.shape[3] for x in leaves), inputs.q.shape[1] // inputs.k.shape[1], inputs.v.shape[3]
    q, k, v = (F.pad(x, (0, width - x.shape[3])) for x in leaves)
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=kept, scale=scale)[..., :value_dim]
    grads = torch.autograd.grad(torch.where(some, out, 0), leaves, inputs.out_grad)
    found = dict(zip(("out", "q", "k", "v"), (torch.where(some, out, 0), *grads), strict=True))
    wanted = expected(inputs, kept, scale)
    return {name: relative_error(x, wanted[name]) for name, x in found.items()}
