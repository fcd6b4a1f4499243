"""Choose the backend of a call, and report why the others do not support it."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ringtile.kernels import blockwise, dense, flash, native, triton
from ringtile.kernels.contracts import Backend, Call, backends
from ringtile.kernels.flops import tell_flop_counter
from ringtile.kernels.native.library import reason_against

_logger = logging.getLogger("ringtile")

_BACKENDS: dict[str, Backend] = {
    "native": native,
    "triton": triton,
    "flash": flash,
    "dense": dense,
    "blockwise": blockwise,
}

backends.update(_BACKENDS)
tell_flop_counter()

_DENSE_FIRST = ("dense", *(name for name in _BACKENDS if name != "dense"))

NAMES = (*_BACKENDS, "reference")
"""Names for ``backend=``. By default, the first that supports the call runs."""


def load(name: str) -> Backend:
    """Return the module of a backend."""
    return _BACKENDS[name]


def select(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Return the backend of a call: the one it names, or the first without a reason against it.

    Raises ValueError with all reasons if the named backend does not support the call.
    """
    if call.backend:
        reasons = load(call.backend).unsupported(q, k, v, call)
        if reasons:
            raise ValueError(f"backend {call.backend!r} does not support this call: {'; '.join(reasons)}")
        return call.backend
    for name in _DENSE_FIRST if dense.is_fastest(q) else _BACKENDS:
        reasons = _BACKENDS[name].unsupported(q, k, v, call)
        if not torch.compiler.is_compiling():
            _logger.debug("backend %s: %s", name, reasons or "taken")
        if not reasons:
            return name
    raise AssertionError("blockwise serves every call")


def backend_report() -> list[tuple[str, list[str]]]:
    """Return all backends with the reasons why they are not available, or no reasons if they are."""
    against = {"native": reason_against(), "triton": triton.reason_against(), "flash": flash.reason_against()}
    return [(name, [reason] if (reason := against.get(name, "")) else []) for name in NAMES]
