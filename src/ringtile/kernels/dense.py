"""Torch's own dense attention, for the two patterns that are dense: everything, and causal.

On a CPU only: elsewhere `blockwise` computes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.kernels.contracts import Call


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Reasons why torch's dense kernel cannot serve this call."""
    reasons = []
    if call.pattern not in ("dense", "causal"):
        reasons.append(f"serves the patterns dense and causal, got {call.pattern or 'a block index'}")
    if call.pattern == "causal" and (call.start != 0 or q.shape[2] != k.shape[2]):
        reasons.append(f"causal needs as many queries as keys, from position 0: got {q.shape=}, {k.shape=}, {call.start=}")
    for name in ("key_bits", "key_lengths", "alibi_slopes"):
        if getattr(call, name) is not None:
            reasons.append(f"knows no {name}")
    for name in ("dropout_p", "softcap"):
        if getattr(call, name):
            reasons.append(f"knows no {name}, got {getattr(call, name)}")
    if q.device.type != "cpu":
        reasons.append(f"needs a CPU, got {q.device}")
    if 0 in (*q.shape, *k.shape):
        reasons.append(f"needs queries and keys, got {q.shape=}, {k.shape=}")
    return reasons


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, N, Dv]`` and lse ``[B, H, N]``."""
    width = max(q.shape[-1], v.shape[-1])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _padded(q, width), _padded(k, width), _padded(v, width), is_causal=call.pattern == "causal", scale=call.scale
    )
    return out[..., : v.shape[-1]].contiguous(), lse.contiguous()


def backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    width = max(q.shape[-1], v.shape[-1])
    if lse_grad is not None:
        # One more column: the kernel's own rowsum(out_grad * out) then comes out as it should less lse_grad.
        out_grad = torch.cat([out_grad, torch.ones_like(out_grad[..., :1])], -1)
        out = torch.cat([out, -lse_grad.unsqueeze(-1).to(out.dtype)], -1)
        width = max(width, out.shape[-1])
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_padded(x, width) for x in (out_grad, q, k, v, out)), lse, 0.0, call.pattern == "causal", scale=call.scale
    )
    q_grad, k_grad, v_grad = (grad[..., : x.shape[-1]].contiguous() for grad, x in zip(grads, (q, k, v), strict=True))
    return q_grad, k_grad, v_grad
