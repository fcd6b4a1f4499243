"""FlashAttention, if it is installed, or PyTorch's copy of it. It runs only if you name it.

It supports all pairs, causal and sliding windows. Before a version runs, its outputs, lse and gradients of a small
problem of the same kind must match float64, once per process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringtile.kernels.contracts import Call, Rows, as_new_out, lacking
from ringtile.kernels.cpu_flash import padded, with_lse_column
from ringtile.kernels.proof import ERRORS, attend, difference, gradients, told
from ringtile.kernels.spans import KERNEL, span
from ringtile.patterns import parse
from ringtile.patterns.facts import Band, band_of

DEVICE = "cuda"

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _MULTIPLE = 256, 8


class Source(Protocol):
    """Kernels from one package. Tensors are ``[B, N, H, D]``, the lse is ``[B, H, N]``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output and the lse."""

    def backward(
        self, out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""


def _sides(band: Band) -> dict[str, int]:
    return {f"window_size_{side}": -1 if size is None else size for side, size in band._asdict().items()}


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class _Package:
    """An installed version, with the module of its functions."""

    module: Any


class _Cute(_Package):
    """FlashAttention 4, written in CuTe: ``flash_attn.cute``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module._flash_attn_fwd(q, k, v, return_lse=True, **self._options(band, scale))
        return out, lse

    def backward(
        self, out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = self._options(band, scale)
        dq, dk, dv, *_ = self.module._flash_attn_bwd(
            q, k, v, out, out_grad, lse, deterministic=_deterministic(), **options
        )
        return dq, dk, dv

    @staticmethod
    def _options(band: Band, scale: float) -> dict[str, Any]:
        left, right = (None, None) if band.is_causal else band
        return {"softmax_scale": scale, "causal": band.is_causal, "window_size_left": left, "window_size_right": right}


class _Hopper(_Package):
    """FlashAttention 3."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module._flash_attn_forward(
            q, k, v, softmax_scale=scale, causal=band.is_causal, **_sides(band)
        )
        return out, lse

    def backward(
        self, out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        self.module._flash_attn_backward(
            out_grad, q, k, v, out, lse,
            dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=band.is_causal, deterministic=_deterministic(),
            **_sides(band),
        )  # fmt: skip
        return dq, dk, dv


class _Ampere(_Package):
    """FlashAttention 2."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module._flash_attn_forward(q, k, v, return_softmax=False, **self._options(band, scale))
        return out, lse

    def backward(
        self, out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        self.module._flash_attn_backward(
            out_grad, q, k, v, out, lse, dq, dk, dv, deterministic=_deterministic(), **self._options(band, scale)
        )
        return dq, dk, dv

    @staticmethod
    def _options(band: Band, scale: float) -> dict[str, Any]:
        return {
            "dropout_p": 0.0, "softmax_scale": scale, "causal": band.is_causal, "softcap": 0.0, "alibi_slopes": None,
            **_sides(band),
        }  # fmt: skip


class Torch:
    """PyTorch's copy of FlashAttention 2."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output and the lse."""
        lengths = q.shape[1], k.shape[1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, band.is_causal, False, scale=scale, **_sides(band)
        )
        return out, lse

    def backward(
        self, out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        lengths = q.shape[1], k.shape[1]
        # The state of the dropout generator, unused without dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            out_grad, q, k, v, out, lse, None, None, *lengths, 0.0, band.is_causal, *state, scale=scale,
            **_sides(band),
        )  # fmt: skip
        return dq, dk, dv


MODULES: tuple[tuple[str, Any], ...] = (
    ("flash_attn.cute.interface", _Cute),
    ("flash_attn_3.flash_attn_interface", _Hopper),
    ("flash_attn_interface", _Hopper),
    ("flash_attn.flash_attn_interface", _Ampere),
)
"""The module of each version, newest first. PyTorch's own copy comes last."""


@functools.cache
def _sources() -> tuple[tuple[str, Source | str], ...]:
    """Return by name the kernels, or the reason why they do not load."""
    found: list[tuple[str, Source | str]] = []
    for name, adapter in MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                found.append((name, adapter(importlib.import_module(name))))
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            found.append((name, f"does not load: {error}"))
    return (*found, ("torch", Torch()))


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
    if q.device.type != DEVICE:
        reasons.append(f"needs a GPU, got {q.device}")
    if q.dtype not in _DTYPES:
        reasons.append(f"supports {', '.join(map(str, _DTYPES))}, got {q.dtype=}")
    # A gradient of the lse needs one more column.
    if max(q.shape[-1], v.shape[-1]) >= _WIDEST:
        reasons.append(f"supports head dims below {_WIDEST}, got {q.shape=}, {v.shape=}")
    if not call.scale > 0:
        reasons.append(f"supports a scale > 0, got {call.scale=}")
    reasons += lacking(call, "key_bits", "key_lengths", "alibi_slopes", "dropout_p", "softcap")
    if 0 in (*q.shape, *k.shape, v.shape[-1]):
        reasons.append(f"needs queries and keys, got {q.shape=}, {k.shape=}, {v.shape=}")
    return reasons


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


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, N, Dv]`` and the lse ``[B, H, N]``."""
    source, band = _served(call, q, k, v)
    width = _width(q.shape[-1], v.shape[-1])
    with span(KERNEL):
        out, lse = source.forward(_rows(q, width), _rows(k, width), _rows(v, width), band, call.scale)
    return as_new_out(out.transpose(1, 2)[..., : v.shape[-1]]), lse.contiguous()


def backward(rows: Rows, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    out_grad, lse_grad, q, k, v, out, lse = rows
    source, band = _served(call, q, k, v)
    if lse_grad is not None:
        out_grad, out = with_lse_column(out_grad, lse_grad, out)
    width = _width(q.shape[-1], out.shape[-1])
    wide_grad, wide_q, wide_k, wide_v, wide_out = (_rows(x, width) for x in (out_grad, q, k, v, out))
    with span(KERNEL):
        grads = source.backward(wide_grad, wide_q, wide_k, wide_v, wide_out, lse.contiguous(), band, call.scale)
    q_grad, k_grad, v_grad = (
        grad.transpose(1, 2)[..., : x.shape[-1]].contiguous() for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return q_grad, k_grad, v_grad


@functools.cache
def proven(device: str, dtype: torch.dtype, width: int, grouped: bool, kind: tuple[bool, bool, bool]) -> Source:
    """Return the first kernels that match float64 on a small problem of this kind.

    Raises RuntimeError with the reasons against each of them if there are none.
    """
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
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int, heads: int) -> Tensor:
        return torch.randn(2, length, heads, width, generator=generator).to(device, dtype)

    q, out_grad = drawn(141, 4), drawn(141, 4)
    k, v = (drawn(203, 2 if grouped else 4) for _ in range(2))
    try:
        out, lse = source.forward(q, k, v, band, 0.2)
        found = out, lse, *source.backward(out_grad, q, k, v, out, lse, band, 0.2)
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
