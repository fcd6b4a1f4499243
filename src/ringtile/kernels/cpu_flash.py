"""PyTorch's flash kernel for CPUs, extended to Dv != D and to a gradient through lse.

Queries are ``[.., H, m, D]``, keys ``[.., G, l, D]``. A row without a score above -inf returns 0 with an lse of -inf.
"""

import functools
import math
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.index.build import real_tensors
from ringtile.kernels.contracts import Grads, Rows
from ringtile.kernels.proof import ERRORS
from ringtile.patterns.traced import constant


def padded(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension to a width and make it contiguous: flash kernels ignore its stride."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def with_lse_column(out_grad: Tensor, lse_grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Append a column to out_grad and out, so that a flash kernel's rowsum(out_grad * out) subtracts lse_grad."""
    # The kernel computes delta = rowsum(out_grad * out). A gradient g of the lse makes it delta - g: a column of ones
    # meets one of -g.
    grads = torch.cat([out_grad, torch.ones_like(out_grad[..., :1])], -1)
    return grads, torch.cat([out, -lse_grad.unsqueeze(-1).to(out.dtype)], -1)


def without_empty_rows(rows: Rows) -> Rows:
    """Return the rows with zeros and an lse of inf where it is -inf, so that weights and gradients are 0 there."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    empty = lse == -math.inf
    if not empty.any():
        return rows
    lse, lse_grad = lse.masked_fill(empty, math.inf), None if lse_grad is None else lse_grad.masked_fill(empty, 0)
    out_grad, q, out = (x.masked_fill(empty.unsqueeze(-1), 0) for x in (out_grad, q, out))
    # Zero times infinity is NaN.
    k, v = (x.nan_to_num(math.nan) for x in (k, v))
    return Rows(out_grad, lse_grad, q, k, v, out, lse)


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the part of a scale that multiplies the queries, or 1, and the rest for PyTorch's kernel.

    Its backward pass fuses score * scale - lse, of which the forward pass rounds the product. The difference grows with
    the score, unless the rest is a power of two. Queries of half precision would lose more than that.
    """
    if not scale or dtype not in (torch.float32, torch.float64):
        return 1.0, scale
    # 0.3 is 0.6 * 2**-1: queries are multiplied by 0.6, and the kernel by 0.5, which rounds nothing.
    part, exponent = math.frexp(scale)
    return (1.0, scale) if part == 0.5 else (part, math.ldexp(1, exponent))


def times(x: Tensor, part: float) -> Tensor:
    """Return the product, without a copy if the part is 1."""
    return x if part == 1 else x * part


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output and natural-log lse. ``mask`` is added to the scores and broadcasts. Causal is upper left."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    width, value_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (padded(x, width) for x in (q, k, v))
    out, lse = flash(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale)
    # PyTorch gives an lse of 0 to a row without a score above -inf.
    empty, suspect = None, lse == 0
    if mask is not None:
        empty = (mask == -math.inf).all(-1)
        suspect &= ~empty
    if suspect.any():
        # With one more key, of score 0, the lse of any other row becomes log(2). The first key is causal for all rows.
        q, k, v = (F.pad(x, (0, 0, count, 0)) for x, count in ((q, int(is_causal)), (k, 1), (v, 1)))
        mask = None if mask is None else F.pad(mask, (1, 0))
        again = flash(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale)[1]
        lone = suspect & ~(again[..., int(is_causal) :] > 0.5)
        empty = lone if empty is None else lone | empty
    if empty is not None:
        lse, out = lse.masked_fill(empty, -math.inf), out.masked_fill(empty.unsqueeze(-1), 0)
    return out[..., :value_dim], lse


def flash_backward(rows: Rows, *, scale: float, mask: Tensor | None = None, is_causal: bool = False) -> Grads:
    """Return the gradients of q, k and v. ``out`` and ``lse`` can be those of a softmax over more keys."""
    out_grad, lse_grad, q, k, v, out, lse = without_empty_rows(rows)
    width = max(q.shape[-1], v.shape[-1])
    if lse_grad is not None:
        out_grad, out = with_lse_column(out_grad, lse_grad, out)
        width = max(width, out.shape[-1])
    wide = (padded(x, width) for x in (out_grad, q, k, v, out))
    q_grad, k_grad, v_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *wide, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return q_grad[..., : q.shape[-1]], k_grad[..., : k.shape[-1]], v_grad[..., : v.shape[-1]]


@constant
def flash_reason() -> str:
    """Return why PyTorch's kernel, a private name, does not compute a small problem, or an empty string."""
    return _reason()


@functools.cache
@real_tensors()
def _reason() -> str:
    x = torch.ones(1, 1, 2, 2, dtype=torch.float32, device="cpu")
    with suppress(*ERRORS):
        out, lse = flash_forward(x, x, 3 * x, scale=1.0, mask=x)
        *_, v_grad = flash_backward(Rows(x, None, x, x, 3 * x, out, lse), scale=1.0, mask=x)
        # With the mask, each score is 3.
        if [round(float(y.sum()), 3) for y in (out, lse, v_grad)] == [12, 7.386, 4]:
            return ""
    return f"torch {torch.__version__} has no flash kernel for CPUs as ringtile needs it"
