"""Choose the backend of a call, and report why the others do not support it."""

import logging
import warnings
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from ringtile.index import restrict
from ringtile.kernels import blockwise, dense, fa4, flash, native, triton
from ringtile.kernels.blockwise import lists as blockwise_lists
from ringtile.kernels.contracts import BACKENDS, OF_LISTS, Backend, Call, Lists, lacking
from ringtile.kernels.flops import tell_flop_counter
from ringtile.kernels.native import chosen as native_lists
from ringtile.kernels.native.library import library, reason_against
from ringtile.kernels.native.lists import kept_lists
from ringtile.kernels.native.masses import native_masses as native_masses
from ringtile.kernels.native.steps import step
from ringtile.kernels.operators import is_differentiated, is_unseen
from ringtile.kernels.triton import chosen as triton_lists

_logger = logging.getLogger("ringtile")

_BACKENDS: dict[str, Backend] = {
    "native": native,
    "triton": triton,
    "flash": flash,
    "fa4": fa4,
    "dense": dense,
    "blockwise": blockwise,
}

BIASED = ("native", "blockwise")
"""Backends that add a bias to scores. The first that supports a call runs."""

BACKENDS.update(_BACKENDS)
OF_LISTS.update({"native": native_lists, "triton": triton_lists, "blockwise": blockwise_lists})
tell_flop_counter()
# `BlockIndex.restricted` is below the backends, so it has a hook for the library's way to copy lists.
restrict.list_copier = kept_lists

_LARGE = 1 << 22
"""Pairs of queries and keys from which a call without the CPU kernel warns."""

_DENSE_FIRST = ("dense", *(name for name in _BACKENDS if name != "dense"))

NAMES = (*_BACKENDS, "reference")
"""Names for ``backend=``. By default, the first that supports the call runs."""


def before_native() -> tuple[torch.dtype, ...]:
    """Return the dtypes of which PyTorch's dense kernel comes before `native`, because it multiplies them in AMX tiles.

    Where `native` uses tiles too, bfloat16 is not among them. Of float16 it needs three products for PyTorch's one.
    """
    if not dense.MATRIX_DTYPES or reason_against():
        return dense.MATRIX_DTYPES
    own = {torch.bfloat16} if library().choice.by_dtype[torch.bfloat16].has_tiles else set()
    return tuple(dtype for dtype in dense.MATRIX_DTYPES if dtype not in own)


def is_logged() -> bool:
    """Return True if `select` reports which backend runs a call, so that it must see every call."""
    return _logger.isEnabledFor(logging.DEBUG)


def native_step(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor, block: int, key_mask: Tensor | None, scale: float | None
) -> Tensor | None:
    """Return the attention of the last query over tiles by the native kernel, None if it does not support it."""
    if reason_against() or is_logged() or not is_unseen(query, key, value, keep, key_mask):
        return None
    plain = query.dtype == key.dtype == value.dtype and query.is_cpu and not is_differentiated(query, key, value)
    return step(query, key, value, keep, block, key_mask, scale) if plain else None


def select(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Return the backend of a call: the one it names, or the first without a reason against it."""
    dense_first = q.dtype in before_native() and q.shape[2] >= dense.MATRIX_ROWS
    order = _DENSE_FIRST if dense_first else _BACKENDS
    name = _first("backend", call, order, lambda name: _BACKENDS[name].unsupported(q, k, v, call))
    large = q.is_cpu and q.shape[2] * k.shape[2] > _LARGE
    if name == "blockwise" and not call.backend and not torch.compiler.is_compiling() and large:
        _warn_of(reason_against())
    return name


# Once per process.
@cache
def _warn_of(reason: str) -> None:
    if reason and "switched off" not in reason:
        text = f"the CPU kernel is missing ({reason}), and PyTorch's operations are slower: see `ringtile doctor`"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def _first(what: str, call: Call, names: Iterable[str], reasons_of: Callable[[str], list[str]]) -> str:
    """Return the backend that a call names, or the first without a reason against it. Log a choice."""
    for name in (call.backend,) if call.backend else names:
        reasons = reasons_of(name)
        # Dynamo does not trace loggers.
        if not call.backend and not torch.compiler.is_compiling():
            _logger.debug("%s %s: %s", what, name, reasons or "taken")
        if not reasons:
            return name
    raise ValueError(f"backend {call.backend!r} does not support this call: {'; '.join(reasons)}")


def select_biased(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Return the backend of a call with a bias: the one it names, or the first without a reason against it."""

    def reasons_of(name: str) -> list[str]:
        return _BACKENDS[name].unsupported(q, k, v, call) if name in BIASED else ["does not support bias"]

    return _first("bias by", call, BIASED, reasons_of)


def select_lists(q: Tensor, k: Tensor, v: Tensor, lists: Lists, call: Call) -> str:
    """Return the backend of a call over lists: the one it names, or the first without a reason against it."""
    if call.backend and call.backend not in OF_LISTS:
        raise ValueError(f"backend: expected one of {(*OF_LISTS, 'reference')} for Chosen lists, got {call.backend!r}")

    def reasons_of(name: str) -> list[str]:
        reasons: list[str] = OF_LISTS[name].unsupported(q, k, v, lists, call.dropout_p)
        lacks = [] if name == "blockwise" else lacking(call, "softcap", "alibi_slopes")
        return reasons + lacks + (triton.only_by_name(call) if name == "triton" else [])

    return _first("lists by", call, OF_LISTS, reasons_of)


def backend_report() -> list[tuple[str, list[str]]]:
    """Return all backends with the reasons why they are not available, or no reasons if they are."""
    against = {"native": reason_against()}
    against |= {name: each.reason_against() for name, each in (("triton", triton), ("flash", flash), ("fa4", fa4))}
    return [(name, [reason] if (reason := against.get(name, "")) else []) for name in NAMES]
