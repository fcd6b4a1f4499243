"""The compiled library: where it lies, which instruction set it runs with, and the structure that it takes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

VARIABLE = "RINGTILE_CPU"
"""Environment variable that names the instruction set (``avx2``, ``avx512``, ``avx512_bf16``, ``neon``) or ``none``."""

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_STRIDES = _LONG * 3


class CallStructure(ctypes.Structure):
    """``ringtile_call`` of native/ringtile.h."""

    _fields_ = (
        *((name, _INT) for name in ("dtype", "isa", "threads", "block")),
        *((name, _LONG) for name in ("batch", "heads", "kv_heads", "n_queries", "n_keys", "head_dim", "value_dim")),
        *((name, _POINTER) for name in ("q", "k", "v")),
        *((name, _STRIDES) for name in ("q_stride", "k_stride", "v_stride")),
        ("out", _POINTER),
        ("out_stride", _STRIDES),
        ("lse", _POINTER),
        *((name, _LONG) for name in ("start", "n_rows", "n_cols", "n_groups")),
        ("group_stride", _LONG * 2),
        ("group", _POINTER),
        *((name, _POINTER) for name in ("full_row_ptr", "full_col", "part_row_ptr", "part_col", "part_tile")),
        *((name, _POINTER) for name in ("full_col_ptr", "full_row", "part_col_ptr", "part_row", "part_tile_t")),
        *((name, _POINTER) for name in ("bits", "bits_t", "rows_any", "cols_any")),
        *((name, _POINTER) for name in ("work", "work_begin", "item_begin")),
        ("n_splits", _LONG),
        ("key_bits", _POINTER),
        ("key_words", _LONG),
        ("key_lengths", _POINTER),
        ("scale", ctypes.c_double),
        ("seed", _LONG),
        ("dropout_threshold", _INT),
        ("phase", _INT),
        ("out_grad", _POINTER),
        ("out_grad_stride", _STRIDES),
        *((name, _POINTER) for name in ("lse_grad", "delta", "q_grad", "k_grad", "v_grad")),
        *((name, _LONG) for name in ("first_item", "last_item", "first_col", "last_col")),
        ("scratch", _POINTER),
        *((name, _POINTER) for name in ("row_splits", "col_splits", "row_buffer")),
        ("n_row_buffers", _LONG),
        *((name, _POINTER) for name in ("row_buffers", "shared_splits")),
        ("n_shared_splits", _LONG),
        ("times", _POINTER),
    )

    def place(self, name: str, x: Tensor) -> None:
        """Point a field at a tensor [B, H, N, D], with its strides."""
        setattr(self, name, x.data_ptr())
        strides = getattr(self, f"{name}_stride")
        strides[0], strides[1], strides[2] = x.stride()[:3]


class Library(NamedTuple):
    """The loaded library and the instruction set that it runs with."""

    handle: ctypes.CDLL
    isa: int
    name: str
    lanes: int
    """How many tokens of a tile, in float32, the kernels take together; of float64, half as many."""


class _Found(NamedTuple):
    library: Library | None
    reason: str


def _find() -> _Found:
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "none":
        return _Found(None, f"switched off by {VARIABLE}=none")
    path = Path(__file__).parents[2] / "lib" / "libringtile.so"
    if not path.exists():
        return _Found(None, "its library was not built: installing ringtile with a C++ compiler at hand builds it")
    try:
        # Its OpenMP symbols resolve from the runtime that torch has loaded: a second one would compete with it.
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return _Found(None, f"its library does not load: {error}")
    handle.ringtile_call_size.restype = ctypes.c_int64
    if handle.ringtile_call_size() != ctypes.sizeof(CallStructure):
        return _Found(None, f"{path.name} was built from another version of ringtile: install it again")
    handle.ringtile_isa_name.restype = ctypes.c_char_p
    for function in (handle.ringtile_forward, handle.ringtile_backward):
        function.argtypes = (ctypes.POINTER(CallStructure),)
    names = [handle.ringtile_isa_name(isa).decode() for isa in range(handle.ringtile_isa_count())]
    runs = [isa for isa in range(len(names)) if handle.ringtile_isa_runs(isa)]
    if wanted and wanted not in names:
        raise ValueError(f"{VARIABLE}: expected one of {[*names, 'none']}, got {wanted!r}")
    if wanted:
        runs = [isa for isa in runs if names[isa] == wanted]
    if not runs:
        return _Found(None, f"this processor runs none of {[wanted] if wanted else names}")
    return _Found(Library(handle, runs[-1], names[runs[-1]], handle.ringtile_lanes(runs[-1])), "")


_FOUND = _find()


def reason_against() -> str:
    """Why the library cannot be used here; empty where it can."""
    return _FOUND.reason


def library() -> Library:
    """The library; an invariant is that `reason_against` gave none."""
    assert _FOUND.library is not None
    return _FOUND.library
