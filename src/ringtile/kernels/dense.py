"""PyTorch's own dense attention, for all pairs and causal. It runs only on a CPU.

Elsewhere, `blockwise` computes such calls.
"""

import torch
from torch import Tensor

from ringtile.kernels.contracts import Attended, Call, Grads, Rows, as_new_out, lacking
from ringtile.kernels.cpu_flash import flash_backward, flash_forward, flash_reason, split_scale, times
from ringtile.patterns.private import state

_AMX = {torch.bfloat16: "torch:cpu._is_amx_tile_supported", torch.float16: "torch:cpu._is_amx_fp16_supported"}
MATRIX_ROWS = 16
"""Rows of an AMX tile. Fewer queries waste it."""

MATRIX_DTYPES = tuple(dtype for dtype, name in _AMX.items() if state(name, False)())
"""Dtypes that PyTorch multiplies with this processor's AMX tiles, several times faster than vector instructions do."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return the reasons why PyTorch's dense kernel does not support this call."""
    reasons = [reason] if (reason := flash_reason()) else []
    if call.pattern not in ("dense", "causal"):
        reasons.append(f"supports the patterns dense and causal, got {call.pattern or 'a block index'}")
    if call.pattern == "causal" and (call.start != 0 or q.shape[2] != k.shape[2]):
        reasons.append(
            f"causal needs as many queries as keys, from position 0: got {q.shape=}, {k.shape=}, {call.start=}"
        )
    # Its mask is -inf before the scale. A scale of 0 makes it NaN, and a negative one keeps what it should mask.
    if call.pattern == "causal" and call.scale <= 0:
        reasons.append(f"masks before it scales, so causal needs a scale > 0, got {call.scale=}")
    reasons += lacking(call, "key_bits", "key_lengths", "alibi_slopes", "dropout_p", "softcap")
    if q.device.type != "cpu":
        reasons.append(f"needs a CPU, got {q.device}")
    if 0 in (*q.shape, *k.shape):
        reasons.append(f"needs queries and keys, got {q.shape=}, {k.shape=}")
    return reasons


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """Return the output ``[B, H, N, Dv]`` and the lse ``[B, H, N]``."""
    part, scale = split_scale(call.scale, q.dtype)
    out, lse = flash_forward(times(q, part), k, v, scale=scale, is_causal=call.pattern == "causal")
    return as_new_out(out), lse.contiguous()


def backward(rows: Rows, call: Call) -> Grads:
    """Return the gradients of q, k and v."""
    part, scale = split_scale(call.scale, rows.q.dtype)
    scaled = rows._replace(q=times(rows.q, part))
    grads = flash_backward(scaled, scale=scale, is_causal=call.pattern == "causal")
    return times(grads[0], part).contiguous(), grads[1].contiguous(), grads[2].contiguous()
