"""Attention over lists of keys per query, by Triton. See `ringtile.kernels.contracts` for the lists."""

import math

import torch
from torch import Tensor

from ringtile.kernels import triton
from ringtile.kernels.contracts import Attended, Grads, Lists, Rows, new_out, with_contiguous_rows

_WIDEST, _WIDEST_VALUE = 576, 512


def unsupported(q: Tensor, k: Tensor, v: Tensor, lists: Lists, dropout_p: float) -> list[str]:
    """Return the reasons why the kernels do not support this call."""
    reasons = triton.device_reasons(q)
    if q.shape[3] > _WIDEST or v.shape[3] > _WIDEST_VALUE:
        reasons.append(f"knows head dims up to {_WIDEST} and {_WIDEST_VALUE}, got {q.shape=}, {v.shape=}")
    elif max(q.shape[3], v.shape[3]) > 256 and q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        reasons.append(f"head dims above 256 need compute capability 8.0, got {q.shape=}, {v.shape=}")
    if k.shape[2] >= 2**31:
        reasons.append(f"counts keys in 32 bits, got {k.shape=}")
    return reasons + ([f"does not support dropout_p, got {dropout_p}"] if dropout_p else [])


def _is_empty(k: Tensor, lists: Lists, lse: Tensor) -> bool:
    return not (lse.numel() and k.numel() and lists.indices.shape[3])


def forward(q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float) -> Attended:
    """Return the output ``[B, H, Nq, Dv]`` in q's dtype and the lse ``[B, H, Nq]``, float32."""
    out, lse = new_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    if _is_empty(k, lists, lse):
        return out.zero_(), lse.fill_(-math.inf)
    from ringtile.kernels.triton.list_launches import ListJob, forward_launches, run

    q, k, v = map(with_contiguous_rows, (q, k, v))
    job = ListJob(q, k, v, lists, scale)
    run(forward_launches(job, out, lse), q)
    return out, lse


def backward(rows: Rows, lists: Lists, scale: float) -> Grads:
    """Return the gradients of q, k and v, contiguous and in their dtype."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    if _is_empty(k, lists, lse):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    from ringtile.kernels.triton.list_launches import ListJob, backward_launches, run

    q_grad, width = q.new_empty(q.shape), k.shape[3]
    total = k.new_zeros((*k.shape[:3], width + v.shape[3]), dtype=torch.float32)
    q, k, v, out_grad, out = map(with_contiguous_rows, (q, k, v, out_grad, out))
    lse_grad = None if lse_grad is None else lse_grad.float().contiguous()
    job = ListJob(q, k, v, lists, scale)
    run(backward_launches(job, Rows(out_grad, lse_grad, q, k, v, out, lse.contiguous()), q_grad, total), q)
    return q_grad, total[..., :width].to(k.dtype).contiguous(), total[..., width:].to(v.dtype).contiguous()
