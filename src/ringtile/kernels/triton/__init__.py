"""Kernels for GPUs in Triton's language: forward, dQ and dK/dV over any index.

With TRITON_INTERPRET=1 in the environment, Triton computes them on the CPU with NumPy: a proof, not for use.
"""

import importlib.util

import torch
from torch import Tensor

from ringtile.kernels import contracts
from ringtile.kernels.contracts import Attended, Call, Grads, Rows
from ringtile.kernels.triton.tuning import INTERPRETED

MEASURED_ON = ""
"""GPU of benchmarks/records/gpu.json, or empty until there is a record."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
_SMALLEST_BLOCK = 64

_FOUND = importlib.util.find_spec("triton") is not None


def reason_against() -> str:
    """Return why Triton cannot be used here, or an empty string."""
    if not _FOUND:
        return "needs the package triton"
    if not INTERPRETED and not torch.cuda.is_available():
        return "needs a GPU (TRITON_INTERPRET=1 computes on the CPU, slowly)"
    return ""


def device_reasons(q: Tensor) -> list[str]:
    """Return the reasons why the kernels do not support a device and dtype."""
    reasons = []
    if not _FOUND:
        reasons.append("needs the package triton")
    if q.device.type != ("cpu" if INTERPRETED else "cuda"):
        reasons.append(f"needs a {'CPU under TRITON_INTERPRET=1' if INTERPRETED else 'GPU'}, got {q.device}")
    if q.dtype not in _DTYPES:
        reasons.append(f"knows {', '.join(map(str, _DTYPES))}, got {q.dtype=}")
    elif q.dtype == torch.bfloat16 and INTERPRETED:
        reasons.append("Triton's interpreter multiplies no bfloat16 matrices")
    elif q.dtype == torch.bfloat16 and q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        reasons.append(f"bfloat16 needs compute capability 8.0, got {torch.cuda.get_device_capability(q.device)}")
    return reasons


def only_by_name(call: Call) -> list[str]:
    """Return a reason if Triton interprets a call that does not name it."""
    by_name = not INTERPRETED or call.backend
    return [] if by_name else ["computes on the CPU only where it is asked for by name"]


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return the reasons why the kernels do not support this call."""
    reasons = device_reasons(q) + only_by_name(call)
    if max(q.shape[-1], v.shape[-1]) > _WIDEST:
        reasons.append(f"knows head dims up to {_WIDEST}, got {q.shape=}, {v.shape=}")
    if call.dropout_p and call.block < _SMALLEST_BLOCK and contracts.is_remapped(call):
        reasons.append(f"knows dropout of a remapped index in blocks from {_SMALLEST_BLOCK} up, got block={call.block}")
    return reasons + contracts.lacking(call, "softcap", "alibi_slopes") + contracts.dense_tiles_reason(q, k, call)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """Return the output ``[B, H, Nq, Dv]`` in q's dtype and the lse ``[B, H, Nq]`` in float32."""
    if not q.shape[:3].numel():
        contracts.index_of(call, q, k)  # raises the same errors as a call with queries
        return contracts.new_out(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    from ringtile.kernels.triton.plans import run_forward

    batch, heads, n_queries, _ = q.shape
    width = max(v.shape[-1], 1)
    # As `new_out`, which takes as long as the rest of the call's tensors.
    layout = (n_queries * heads * width, width, heads * width, 1)
    out = q.new_empty_strided((batch, heads, n_queries, v.shape[-1]), layout)
    lse = torch.empty((batch, heads, n_queries), dtype=torch.float32, device=q.device)
    run_forward(call, *map(contracts.with_contiguous_rows, (q, k, v)), out, lse)
    return out, lse


def backward(rows: Rows, call: Call) -> Grads:
    """Return the gradients of q, k and v, contiguous and in their dtype."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    if not lse.numel() or not k.numel():
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    from ringtile.kernels.triton.plans import run_backward

    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    q, k, v, out_grad, out = map(contracts.with_contiguous_rows, (q, k, v, out_grad, out))
    lse, lse_grad = lse.contiguous(), None if lse_grad is None else lse_grad.float().contiguous()
    run_backward(call, q, k, v, out_grad, lse_grad, out, lse, *grads)
    return grads
