"""Torch's flash kernel for CPUs, with what it and those for GPUs lack: Dv != D, and a gradient through lse.

Suffixes as elsewhere in the kernels: ``[.., H, m, D]`` queries, ``[.., G, l, D]`` keys. An empty row comes out
as 0 with lse 0: the caller knows which rows are empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded(x: Tensor, width: int) -> Tensor:
    """The last dimension padded to a width, and contiguous: a flash kernel reads it so whatever its stride is."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def with_lse_column(out_grad: Tensor, lse_grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """out_grad and out with one more column: a flash kernel's own rowsum(out_grad * out) then comes out less lse_grad,
    as it should."""
    grads = torch.cat([out_grad, torch.ones_like(out_grad[..., :1])], -1)
    return grads, torch.cat([out, -lse_grad.unsqueeze(-1).to(out.dtype)], -1)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and natural-log lse; ``mask`` is added to the scores and broadcasts; causal is upper-left."""
    width = max(q.shape[-1], v.shape[-1])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        padded(q, width),
        padded(k, width),
        padded(v, width),
        is_causal=is_causal,
        attn_mask=mask,
        scale=scale,
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
    """Gradients of q, k and v; ``out`` and ``lse`` may be those of a softmax of which these keys are a part."""
    width = max(q.shape[-1], v.shape[-1])
    if lse_grad is not None:
        out_grad, out = with_lse_column(out_grad, lse_grad, out)
        width = max(width, out.shape[-1])
    q_grad, k_grad, v_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        padded(out_grad, width),
        padded(q, width),
        padded(k, width),
        padded(v, width),
        padded(out, width),
        lse,
        0.0,
        is_causal,
        attn_mask=mask,
        scale=scale,
    )
    return q_grad[..., : q.shape[-1]], k_grad[..., : k.shape[-1]], v_grad[..., : v.shape[-1]]
