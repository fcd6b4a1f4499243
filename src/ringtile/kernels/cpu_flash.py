"""PyTorch's flash kernel for CPUs, extended to Dv != D and to a gradient through lse.

Queries are ``[.., H, m, D]``, keys ``[.., G, l, D]``. An empty row returns 0 with an lse of 0. The caller knows which
rows are empty.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def padded(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension to a width and make it contiguous: flash kernels ignore its stride."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def with_lse_column(out_grad: Tensor, lse_grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Append a column to out_grad and out, so that a flash kernel's rowsum(out_grad * out) subtracts lse_grad."""
    grads = torch.cat([out_grad, torch.ones_like(out_grad[..., :1])], -1)
    return grads, torch.cat([out, -lse_grad.unsqueeze(-1).to(out.dtype)], -1)


def _part_of_scale(q: Tensor, scale: float) -> float:
    """Return the part of a scale that multiplies the queries. What is left is a power of two.

    PyTorch's backward pass fuses the product of a score and the scale with the difference from the lse, and its forward
    pass rounds the product. The difference grows with the score. A power of two rounds nothing. Queries of half
    precision would lose more than that.
    """
    return math.frexp(scale)[0] if q.dtype in (torch.float32, torch.float64) and scale else 0.5


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output and natural-log lse. ``mask`` is added to the scores and broadcasts. Causal is upper left."""
    width = max(q.shape[-1], v.shape[-1])
    part = _part_of_scale(q, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        padded(q if part == 0.5 else q * part, width),
        padded(k, width),
        padded(v, width),
        is_causal=is_causal,
        attn_mask=mask,
        scale=scale if part == 0.5 else scale / part,
    )
    return out[..., : v.shape[-1]], lse


def flash_backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. ``out`` and ``lse`` can be those of a softmax over more keys."""
    width = max(q.shape[-1], v.shape[-1])
    if lse_grad is not None:
        out_grad, out = with_lse_column(out_grad, lse_grad, out)
        width = max(width, out.shape[-1])
    part = _part_of_scale(q, scale)
    q_grad, k_grad, v_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        padded(out_grad, width),
        padded(q if part == 0.5 else q * part, width),
        padded(k, width),
        padded(v, width),
        padded(out, width),
        lse,
        0.0,
        is_causal,
        attn_mask=mask,
        scale=scale if part == 0.5 else scale / part,
    )
    q_grad = q_grad[..., : q.shape[-1]]
    return q_grad if part == 0.5 else q_grad * part, k_grad[..., : k.shape[-1]], v_grad[..., : v.shape[-1]]
