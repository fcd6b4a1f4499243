"""What the tests compare with: float64 results and gradients, and torch's own error in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringtile.index import BlockIndex
from ringtile.kernels.reference import attention_reference
from ringtile.patterns import Pattern
from ringtile.patterns.base import TileGrid
from ringtile.testing.oracle import attention

SDPA_BUDGET = {torch.float32: 3.0, torch.bfloat16: 1.2, torch.float16: 1.2}
"""How many times torch's own error, from `sdpa_low_precision_error`, ours may be."""


class Inputs(NamedTuple):
    """``q`` ``[B, H, N, D]``, ``k`` ``[B, Hkv, M, D]``, ``v`` ``[B, Hkv, M, Dv]``, ``grad_out`` ``[B, H, N, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


def make_inputs(
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int | None = None,
    head_dim: int = 16,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    score_scale: float = 1.0,
) -> Inputs:
    """Random inputs whose scores have a standard deviation of ``score_scale``."""
    n_keys = n_queries if n_keys is None else n_keys
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    q = torch.randn(batch, heads, n_queries, head_dim, dtype=torch.float64) * score_scale
    k = torch.randn(batch, kv_heads, n_keys, head_dim, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, n_keys, value_dim, dtype=torch.float64)
    grad_out = torch.randn(batch, heads, n_queries, value_dim, dtype=torch.float64)
    return Inputs(*(x.to(dtype) for x in (q, k, v, grad_out)))


class Oracle(NamedTuple):
    """Results in float64; ``grads`` by name: q, k, v and, where given, sinks."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | BlockIndex,
    *,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    sinks: Tensor | None = None,
    **modifiers: Any,
) -> Oracle:
    """`attention_reference` on the inputs as they are, promoted to float64, with its gradients."""
    leaves = {"q": q, "k": k, "v": v}
    if sinks is not None:
        leaves["sinks"] = sinks
    leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    out, lse = attention_reference(
        leaves["q"], leaves["k"], leaves["v"], pattern, sinks=leaves.get("sinks"), **modifiers
    )
    given = [(y, g.double()) for y, g in ((out, grad_out), (lse, grad_lse)) if g is not None]
    if not given:
        return Oracle(out.detach(), lse.detach(), {})
    outputs, cotangents = zip(*given, strict=True)
    # lse alone does not depend on v, nor on the sinks.
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True)
    return Oracle(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error in float64; infinite where the infinities differ, absolute where ``expected`` is all zero."""
    assert actual.shape == expected.shape, f"{actual.shape=} {expected.shape=}"
    actual, expected = actual.detach().double(), expected.detach().double()
    infinite = expected.isinf()
    if not torch.equal(actual[infinite], expected[infinite]) or not actual[~infinite].isfinite().all():
        return float("inf")
    difference = (actual - expected)[~infinite].norm().item()
    return difference / (expected[~infinite].norm().item() or 1.0)


def results(attend: Callable[..., Any], leaves: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """Output and lse of ``attend``, and the gradients of both for all leaves, in which empty rows have no lse."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = attend(*leaves, *arguments, **options)
    draw = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    finite = torch.where(lse == -torch.inf, 0, lse)
    grads = torch.autograd.grad((out, finite), leaves, cotangents, allow_unused=True, materialize_grads=True)
    return [out.detach(), lse.detach(), *grads]


def worst(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of several tensors."""
    return max(map(relative_error, actual, expected))


def weights_of(q: Tensor, k: Tensor, pairs: Tensor, scale: float | None = None) -> Tensor:
    """The weights of dense attention over some pairs, float64 ``[B, H, Nq, Nk]``, 0 in rows without keys."""
    of_key = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    return attention(q, k, of_key, pairs, scale=scale)[0]


def assert_near(found: Any, expected: Any, atol: float) -> None:
    """The numbers of tensors differ by no more than ``atol``."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def refused(words: str) -> Any:
    """A context that expects a ValueError with these words, a regular expression."""
    return pytest.raises(ValueError, match=words)


def rule_everywhere(pattern: Pattern, grid: TileGrid, head: int = 0) -> Tensor:
    """The element rule of one head on a grid, bool ``[n_queries, n_keys]``."""
    query = torch.arange(grid.start, grid.start + grid.n_queries)[:, None]
    kept = pattern.allowed(torch.tensor(head), query, torch.arange(grid.n_keys)[None, :])
    return kept.expand(grid.n_queries, grid.n_keys)


def kept_pairs(
    pattern: Pattern | BlockIndex,
    q: Tensor,
    k: Tensor,
    *,
    start: int | None = None,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """The kept pairs as a dense bool mask ``[B, H, N, M]``, from the element rule evaluated everywhere."""
    (batch, heads, n_queries), n_keys = q.shape[:3], k.shape[2]
    if isinstance(pattern, BlockIndex):
        kept = pattern.to_dense().expand(batch, heads, -1, -1)
    else:
        first = n_keys - n_queries if start is None else start
        head, query, key = torch.arange(heads), torch.arange(first, first + n_queries), torch.arange(n_keys)
        rows = [pattern if pattern.batch_size is None else pattern.batch_row(b) for b in range(batch)]
        kept = torch.stack([row.allowed(head[:, None, None], query[:, None], key) for row in rows])
        kept = kept.expand(batch, heads, n_queries, n_keys)
    if key_mask is not None:
        kept = kept & key_mask[:, None, None]
    if key_lengths is not None:
        kept = kept & (torch.arange(n_keys) < key_lengths[:, None])[:, None, None]
    return kept


class _Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class SdpaError(NamedTuple):
    """Relative L2 errors of torch's default SDPA backend, and the operator that it took."""

    out: float
    grads: dict[str, float]
    operator: str


def sdpa_low_precision_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | BlockIndex,
    grad_out: Tensor,
    *,
    start: int | None = None,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    expected: Oracle | None = None,
) -> SdpaError:
    """The error of `F.scaled_dot_product_attention` in the dtype of ``q`` with the same pairs as a bool mask.

    It is measured against float64 on the same inputs, over rows that keep something, for the output and each gradient:
    the yardstick for what a kernel in this dtype may lose. ``expected`` has the results in float64, if they are known.
    """
    masks: dict[str, Any] = {"start": start, "key_mask": key_mask, "key_lengths": key_lengths}
    kept = kept_pairs(pattern, q, k, **masks)
    some = kept.any(-1, keepdim=True)
    grad_out = torch.where(some, grad_out, 0)
    expected = expected or oracle(q, k, v, pattern, grad_out=grad_out, scale=scale, **masks)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with _Operators() as operators:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=kept, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    grads = torch.autograd.grad(torch.where(some, out, 0), leaves, grad_out)
    return SdpaError(
        out=relative_error(torch.where(some, out, 0), expected.out),
        grads={name: relative_error(grad, expected.grads[name]) for name, grad in zip("qkv", grads, strict=True)},
        operator=next(name for name in operators.names if name.startswith("_scaled_dot_product")),
    )


@contextmanager
def filled_memory() -> Iterator[None]:
    """Memory that torch's own operators leave uninitialised is filled too, with NaN or the largest integer.

    The fixture in conftest.py poisons what ringtile asks for in Python; this reaches every allocation below.
    """
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
