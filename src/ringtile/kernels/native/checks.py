"""Checks of everything that the library reads by address, so that no call makes it read outside a tensor."""

import torch
from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.kernels.contracts import Added, Call, accumulator

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""Numbers of the dtypes in native/ringtile.h."""


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if queries, keys and values do not match."""
    shapes = q.shape, k.shape, v.shape
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        dtypes = q.dtype, k.dtype, v.dtype
        raise ValueError(f"q, k, v: expected four dimensions and one dtype of {list(DTYPES)}, got {shapes}, {dtypes}")
    (batch, heads, _, head_dim), kv_heads = q.shape, k.shape[1]
    if (k.shape[0], k.shape[3]) != (batch, head_dim) or v.shape[:3] != k.shape[:3] or heads % max(kv_heads, 1):
        raise ValueError(f"q, k, v: expected [B, H, Nq, D], [B, Hkv, Nk, D] and [B, Hkv, Nk, Dv], got {shapes}")


def check_options(q: Tensor, k: Tensor, call: Call) -> None:
    """Raise ValueError if the optional tensors of a call do not match."""
    bits, lengths = call.key_bits, call.key_lengths
    if bits is not None and (bits.shape != (len(q), -(-k.shape[2] // 32)) or bits.dtype != torch.int32):
        raise ValueError(f"key_bits: expected int32 [{len(q)}, {-(-k.shape[2] // 32)}], got {bits.dtype} {bits.shape}")
    if lengths is not None and lengths.shape != (len(q),):
        raise ValueError(f"key_lengths: expected [{len(q)}], got {lengths.shape}")
    if (slopes := call.alibi_slopes) is not None and slopes.shape != q.shape[1:2]:
        raise ValueError(f"alibi_slopes: expected [{q.shape[1]}], got {slopes.shape}")
    for name, numbers, of in (("head_at", call.head_at, 1), ("batch_at", call.batch_at, 0)):
        if numbers is not None and (numbers.shape != (q.shape[of],) or numbers.dtype != torch.int64):
            raise ValueError(f"{name}: expected int64 [{q.shape[of]}], got {numbers.dtype} {numbers.shape}")


def check_added(q: Tensor, k: Tensor, added: Added) -> None:
    """Raise ValueError if the numbers that a call adds to its scores do not match."""
    values, query_at, key_at, grad = added
    rows, shape = values.shape[2:3], (*q.shape[:2], *values.shape[2:])
    if values.shape != shape or rows not in ((1,), q.shape[2:3]) or values.dtype != accumulator(q):
        raise ValueError(f"added: expected {accumulator(q)} [B, H, Nq or 1, R], got {values.dtype} {values.shape}")
    # The stride of a dimension of one place means nothing.
    wide = values.shape[3] > 1
    if (wide and values.stride(3) != 1) or rows[0] * max(values.stride(2), values.shape[3]) >= 2**31:
        raise ValueError(f"added: expected contiguous rows of fewer than 2^31 numbers, got {values.stride()=}")
    for at, x in ((query_at, q), (key_at, k)):
        if at.dtype != torch.int32 or at.shape != x.shape[2:3] or not at.is_contiguous():
            raise ValueError(f"added: expected contiguous int32 [{x.shape[2]}], got {at.dtype} {at.shape}")
    if grad is not None and (grad.shape != shape or grad.dtype != values.dtype or (wide and grad.stride(3) != 1)):
        raise ValueError(f"added: expected a gradient {shape} of contiguous rows, got {grad.dtype} {grad.shape}")


def check_rows(q: Tensor, v: Tensor, out: Tensor, out_grad: Tensor, lse: Tensor, lse_grad: Tensor | None) -> None:
    """Raise ValueError if the rows of a backward pass do not match q and v."""
    wide, rows = accumulator(q), q.shape[:3]
    for name, x, dtype, shape in (
        ("out", out, q.dtype, (*rows, v.shape[3])),
        ("out_grad", out_grad, q.dtype, (*rows, v.shape[3])),
        ("lse", lse, wide, rows),
        ("lse_grad", lse_grad, None, rows),
    ):
        if x is not None and ((dtype and x.dtype != dtype) or x.shape != shape):
            raise ValueError(f"{name}: expected {dtype or wide} {tuple(shape)}, got {x.dtype} {tuple(x.shape)}")


def check_groups(index: BlockIndex, q: Tensor) -> None:
    """Raise ValueError if the groups of an index do not match q."""
    batch, heads = index.group.shape
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[1]):
        raise ValueError(f"index: expected groups [1 or {q.shape[0]}, 1 or {q.shape[1]}], got {index.group.shape}")
