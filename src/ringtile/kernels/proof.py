"""Attention in float64, written out, to compare kernels of other packages with before they run.

Tensors are ``[B, H, N, D]``. ``kept`` is bool and broadcasts to ``[B, H, Nq, Nk]``. An empty row has weights of zero.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringtile.kernels.contracts import Attended, Call, Grads, lacking

ALLOWED = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Allowed error, relative to the largest value: a wrong mask, scale or head is off by as much as the values."""
_ALLOWED_LSE = 2.0**-9
"""Kernels add up its exponentials in float32, whatever the dtype."""

ERRORS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What a package raises that is compiled for other GPUs, or has other arguments."""


def reasons_against(q: Tensor, k: Tensor, v: Tensor, call: Call, device: str, widest: int) -> list[str]:
    """Return the reasons why such kernels do not support a call, on a type of device and up to a head dim."""
    reasons = [] if q.device.type == device else [f"needs a GPU, got {q.device}"]
    if q.dtype not in ALLOWED:
        reasons.append(f"supports {', '.join(map(str, ALLOWED))}, got {q.dtype=}")
    if max(q.shape[-1], v.shape[-1]) > widest:
        reasons.append(f"supports head dims up to {widest}, got {q.shape=}, {v.shape=}")
    if not call.scale > 0:
        reasons.append(f"supports a scale > 0, got {call.scale=}")
    if 0 in (*q.shape, *k.shape, v.shape[-1]):
        reasons.append(f"needs queries and keys, got {q.shape=}, {k.shape=}, {v.shape=}")
    return reasons + lacking(call, "key_bits", "key_lengths", "alibi_slopes", "dropout_p", "softcap")


def drawing(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape, from a generator with a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    return drawn


def attend(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float) -> Attended:
    """Return the output and the lse."""
    scores = _scores(q, k, kept, scale)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ _wide(v, q), lse


def gradients(
    out_grad: Tensor, lse_grad: Tensor | float, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    kept: Tensor, scale: float,
) -> Grads:  # fmt: skip
    """Return the gradients of q, k and v. ``out`` and ``lse`` can be those of a softmax over more keys."""
    # Written out, because autograd does not record inside an operator.
    weights, grad = _weights(_scores(q, k, kept, scale), lse.double()), out_grad.double()
    delta = (grad * out.double()).sum(-1) - lse_grad
    score_grad = weights * (grad @ _wide(v, q).mT - delta.unsqueeze(-1)) * scale
    sums = (score_grad.mT @ q.double(), weights.mT @ grad)
    k_grad, v_grad = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in sums)
    return score_grad @ _wide(k, q), k_grad, v_grad


def told(error: BaseException) -> str:
    """Return that a kernel fails, and how, in one line."""
    return f"fails: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def difference(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> str:
    """Return the results that are off, and by how much, or an empty string."""
    off = []
    for name, x, y in zip(names, found, expected, strict=True):
        # An lse is -inf in both if a query keeps no keys.
        distance = (x.double() - y).masked_fill(x == y, 0).abs().max()
        # Written so that NaN, which compares as false, is an error.
        error = float(distance / y.abs().masked_fill(y.isinf(), 0).max())
        if not error <= (_ALLOWED_LSE if name == "lse" else ALLOWED[dtype]):
            off.append(f"{name} by {error:.2g}")
    return f"is wrong: {', '.join(off)}" if off else ""


def _wide(x: Tensor, q: Tensor) -> Tensor:
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, kept: Tensor, scale: float) -> Tensor:
    return (q.double() @ _wide(k, q).mT * scale).masked_fill(~kept, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0)
