"""FlashAttention, if it is installed, or PyTorch's copy of it. It runs only if you name it.

It supports all pairs, causal and sliding windows. Before a version runs, its outputs, lse and gradients of a small
problem of the same kind must match float64, once per process.
"""

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringtile.kernels.contracts import Attended, Call, Grads, Rows, as_new_out
from ringtile.kernels.cpu_flash import padded, with_lse_column
from ringtile.kernels.proof import ERRORS, attend, difference, drawing, gradients, reasons_against, told
from ringtile.kernels.spans import KERNEL, span
from ringtile.patterns import parse
from ringtile.patterns.facts import Band, band_of

DEVICE = "cuda"

# A gradient of the lse needs one more column.
_WIDEST, _MULTIPLE = 255, 8


def _sides(band: Band) -> dict[str, int]:
    return {f"window_size_{side}": -1 if size is None else size for side, size in band._asdict().items()}


@dataclass(frozen=True)
class _Package:
    """An installed version and the module of its functions. Tensors are ``[B, N, H, D]``, the lse is ``[B, H, N]``."""

    module: Any


class _Cute(_Package):
    """FlashAttention 4, written in CuTe: ``flash_attn.cute``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Attended:
        out, lse, *_ = self.module._flash_attn_fwd(q, k, v, return_lse=True, **self._options(band, scale))
        return out, lse

    def backward(self, rows: Rows, band: Band, scale: float) -> tuple[Tensor, ...]:
        out_grad, _, q, k, v, out, lse = rows
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads: tuple[Tensor, ...] = self.module._flash_attn_bwd(
            q, k, v, out, out_grad, lse, deterministic=deterministic, **self._options(band, scale)
        )
        return grads[:3]

    @staticmethod
    def _options(band: Band, scale: float) -> dict[str, Any]:
        # It refuses a window beside ``causal``, even the window that causal means.
        left, right = (None, None) if band.is_causal else band
        return {"softmax_scale": scale, "causal": band.is_causal, "window_size_left": left, "window_size_right": right}


class _Ampere(_Package):
    """FlashAttention 2."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Attended:
        out, lse, *_ = self.module._flash_attn_forward(q, k, v, **self._options(band, scale, is_backward=False))
        return out, lse

    def backward(self, rows: Rows, band: Band, scale: float) -> tuple[Tensor, ...]:
        grads = {f"d{name}": torch.empty_like(getattr(rows, name)) for name in "qkv"}
        options = self._options(band, scale, is_backward=True)
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        self.module._flash_attn_backward(rows.out_grad, *rows[2:], **grads, **options)
        return tuple(grads.values())

    @staticmethod
    def _options(band: Band, scale: float, *, is_backward: bool) -> dict[str, Any]:
        # Versions before 2.7 have no defaults for most of these.
        options = {"softmax_scale": scale, "causal": band.is_causal, **_sides(band), "dropout_p": 0.0, "softcap": 0.0}
        return {**options, "alibi_slopes": None, **({} if is_backward else {"return_softmax": False})}


class _Hopper(_Ampere):
    """FlashAttention 3."""

    @staticmethod
    def _options(band: Band, scale: float, *, is_backward: bool) -> dict[str, Any]:
        return {"softmax_scale": scale, "is_causal" if is_backward else "causal": band.is_causal, **_sides(band)}


class Torch:
    """PyTorch's copy of FlashAttention 2."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Attended:
        """Return the output and the lse."""
        lengths = q.shape[1], k.shape[1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, band.is_causal, False, scale=scale, **_sides(band)
        )
        return out, lse

    def backward(self, rows: Rows, band: Band, scale: float) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v."""
        lengths, device = (rows.q.shape[1], rows.k.shape[1]), rows.q.device
        # The state of the dropout generator, unused without dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros(0, dtype=torch.uint64, device=device)
        options = {"scale": scale, **_sides(band)}
        grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            rows.out_grad, *rows[2:], None, None, *lengths, 0.0, band.is_causal, *state, **options
        )
        return grads


Source = _Cute | _Ampere | Torch
"""Kernels from one package."""
MODULES: tuple[tuple[str, Any], ...] = (
    ("flash_attn.cute.interface", _Cute),
    ("flash_attn_3.flash_attn_interface", _Hopper),
    ("flash_attn_interface", _Hopper),
    ("flash_attn.flash_attn_interface", _Ampere),
)
"""The module of each version, newest first. PyTorch's own copy comes last."""


def _sources() -> Iterator[tuple[str, Source | str]]:
    """Yield by name the kernels, or the reason why they do not load."""
    for name, adapter in MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                yield name, adapter(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            yield name, f"does not load: {error}"
    yield "torch", Torch()


def reason_against() -> str:
    """Return why no such kernel can run here, or an empty string."""
    return "" if torch.cuda.is_available() else "needs a GPU"


def _band(text: str) -> Band | None:
    return band_of(parse(text)) if text else None


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return the reasons why FlashAttention does not support this call."""
    if not call.backend:
        return ["runs only if you name it"]
    reasons = []
    # A traced call does not parse the pattern. The operator checks again.
    band = Band(None, None) if torch.compiler.is_compiling() else _band(call.pattern)
    if band is None:
        reasons.append(f"supports all pairs, causal and windows, got {call.pattern or 'a block index'}")
    elif band != (None, None) and (call.start != k.shape[2] - q.shape[2] or call.start < 0):
        reasons.append(f"aligns the last query with the last key, got {q.shape=}, {k.shape=}, {call.start=}")
    return reasons + reasons_against(q, k, v, call, DEVICE, _WIDEST)


def _rows(x: Tensor, width: int) -> Tensor:
    """``[B, H, N, D]`` to ``[B, N, H, width]``, padded with zeros."""
    return padded(x, width).transpose(1, 2)


def _width(*dims: int) -> int:
    return -(-max(dims) // _MULTIPLE) * _MULTIPLE


def _served(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Source, Band]:
    reasons, band = unsupported(q, k, v, call), _band(call.pattern)
    if reasons or band is None:
        raise ValueError(f"backend 'flash' does not support this call: {'; '.join(reasons)}")
    band = band.cut(k.shape[2])
    kind = band.left is None, band.right is None, band.right == 0
    return proven(str(q.device), q.dtype, _width(q.shape[-1], v.shape[-1]), q.shape[1] != k.shape[1], kind), band


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """Return the output ``[B, H, N, Dv]`` and the lse ``[B, H, N]``."""
    source, band = _served(call, q, k, v)
    width = _width(q.shape[-1], v.shape[-1])
    with span(KERNEL):
        out, lse = source.forward(_rows(q, width), _rows(k, width), _rows(v, width), band, call.scale)
    return as_new_out(out.transpose(1, 2)[..., : v.shape[-1]]), lse.contiguous()


def backward(rows: Rows, call: Call) -> Grads:
    """Return the gradients of q, k and v."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    source, band = _served(call, q, k, v)
    if lse_grad is not None:
        out_grad, out = with_lse_column(out_grad, lse_grad, out)
    width = _width(q.shape[-1], out.shape[-1])
    wide_grad, wide_q, wide_k, wide_v, wide_out = (_rows(x, width) for x in (out_grad, q, k, v, out))
    given = Rows(wide_grad, None, wide_q, wide_k, wide_v, wide_out, lse.contiguous())
    with span(KERNEL):
        grads = source.backward(given, band, call.scale)
    q_grad, k_grad, v_grad = (
        grad.transpose(1, 2)[..., : x.shape[-1]].contiguous() for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return q_grad, k_grad, v_grad


@functools.cache
def proven(device: str, dtype: torch.dtype, width: int, grouped: bool, kind: tuple[bool, bool, bool]) -> Source:
    """Return the first kernels that match float64 on a small problem of this kind."""
    # Invariant: packages and devices stay for the life of a process, so a verdict does, too. There are few kinds.
    against = []
    for name, source in _sources():
        wrong = source if isinstance(source, str) else _wrong(source, device, dtype, width, grouped, kind)
        if not wrong and not isinstance(source, str):
            return source
        against.append(f"{name} {wrong}")
    raise RuntimeError(f"FlashAttention does not support {dtype}, head_dim {width} on {device}: {'; '.join(against)}")


def _wrong(
    source: Source, device: str, dtype: torch.dtype, width: int, grouped: bool, kind: tuple[bool, bool, bool]
) -> str:
    """Return the errors in the results of a small problem, or an empty string."""
    no_left, no_right, causal = kind
    band = Band(None if no_left else 37, None if no_right else 0 if causal else 21)
    drawn = drawing(device, dtype)
    q, out_grad = (drawn(2, 141, 4, width) for _ in range(2))
    k, v = (drawn(2, 203, 2 if grouped else 4, width) for _ in range(2))
    try:
        out, lse = source.forward(q, k, v, band, 0.2)
        found = out, lse, *source.backward(Rows(out_grad, None, q, k, v, out, lse), band, 0.2)
        expected = _expected(q, k, v, out_grad, band, 0.2)
        return difference(("out", "lse", "q_grad", "k_grad", "v_grad"), found, expected, dtype)
    except ERRORS as error:
        return told(error)


def _expected(q: Tensor, k: Tensor, v: Tensor, out_grad: Tensor, band: Band, scale: float) -> tuple[Tensor, ...]:
    """Return the output, lse and gradients in float64, ``[B, N, H, D]`` like the inputs."""
    ahead = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device).unsqueeze(1)
    ahead = ahead - (k.shape[1] - q.shape[1])
    kept = torch.ones_like(ahead, dtype=torch.bool)
    if band.left is not None:
        kept &= ahead >= -band.left
    if band.right is not None:
        kept &= ahead <= band.right
    q, k, v, out_grad = (x.transpose(1, 2) for x in (q, k, v, out_grad))
    out, lse = attend(q, k, v, kept, scale)
    grads = gradients(out_grad, 0.0, q, k, v, out, lse, kept, scale)
    return out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in grads)
