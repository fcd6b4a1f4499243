"""The compiled library: loading and checking it, the structure of a call, its instruction set and its threads."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.kernels.native.instruction_sets import EMULATED_SETS, Choice, InstructionSet, Wanted, best_rates, choose

VARIABLE = "RINGTILE_CPU"
"""Environment variable that names the instruction set (``avx2``, ``avx512``, ``avx512_bf16``, ``amx``, ``neon``) or
``none``. Builds for tests have ``amx_emulated`` too."""

ABI_VERSION = 6
"""``RINGTILE_ABI`` of native/ringtile.h."""

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

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
        *((name, _POINTER) for name in ("bits", "bits_t", "rows_any", "cols_any", "row_at", "col_at")),
        *((name, _POINTER) for name in ("work", "work_begin", "item_begin")),
        ("n_splits", _LONG),
        ("key_bits", _POINTER),
        ("key_words", _LONG),
        ("key_lengths", _POINTER),
        ("scale", ctypes.c_double),
        *((name, _POINTER) for name in ("head_at", "batch_at")),
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
        *((name, _LONG) for name in ("segment", "n_pooled", "pooled_step")),
        *((name, _POINTER) for name in ("seen", "pool_begin", "bias")),
        ("bias_stride", _LONG * 2),
        *((name, _INT) for name in ("pool_max", "by_sign")),
    )

    def place(self, name: str, x: Tensor) -> None:
        """Point a field at a tensor [B, H, N, D], with its strides."""
        setattr(self, name, x.data_ptr())
        setattr(self, f"{name}_stride", x.stride()[:3])


class Library(NamedTuple):
    """The loaded library, its instruction sets and its threads."""

    handle: ctypes.CDLL
    sets: tuple[InstructionSet, ...]
    """The instruction sets that this processor runs, or the one that `VARIABLE` names."""
    missing: dict[str, str]
    """The reason against each other instruction set, of those that could have served."""
    choice: Choice
    runtime: str
    """Entry point of the OpenMP runtime in use, empty if there is none, so one thread computes."""


class _Found(NamedTuple):
    library: Library | None
    reason: str
    mistake: str = ""
    """In the variable. `import ringtile` must not raise it, or the command could not print it as its own error."""


class _Unusable(Exception):
    """The reason why a library file cannot be used."""


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "abi_version": (ctypes.c_int, ()),
    "call_size": (_LONG, ()),
    "call_field": (ctypes.c_char_p, (ctypes.c_int, ctypes.POINTER(_LONG))),
    "use_runtime": (None, (_POINTER,) * 4),
    "isa_count": (ctypes.c_int, ()),
    "isa_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "isa_reason": (ctypes.c_char_p, (ctypes.c_int,)),
    "lanes": (ctypes.c_int, (ctypes.c_int,)),
    "forward": (ctypes.c_int, (ctypes.POINTER(CallStructure),)),
    "backward": (ctypes.c_int, (ctypes.POINTER(CallStructure),)),
    "masses": (ctypes.c_int, (ctypes.POINTER(CallStructure),)),
    "kept": (_LONG, (*(_LONG,) * 3, *(_POINTER,) * 5, ctypes.POINTER(_LONG), _LONG, *(_POINTER,) * 3)),
    "multiply_tiles": (ctypes.c_int, (ctypes.c_int, _POINTER, _POINTER, _POINTER, _LONG)),
    "peak": (ctypes.c_double, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_double)),
}
"""Result and arguments of each function, named ``ringtile_...``."""


def _check_complete(path: Path) -> None:
    """Raise _Unusable if an ELF file is truncated. dlopen would map it, and SIGBUS would end the process."""
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return
        # Byte 32 has the place of the table of segments, byte 54 the size of an entry and their number.
        (begin,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        file.seek(begin)
        segments = file.read(size * count)
    needed = max([begin + size * count] + [offset + length for offset, length in _loaded(segments, size)])
    if path.stat().st_size < needed:
        raise _Unusable(f"{path.name} is truncated, install ringtile again: {path.stat().st_size} bytes of {needed}")


def _loaded(segments: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and length in the file of each loaded segment."""
    for at in range(0, len(segments) - size + 1, size):
        # An entry: kind, flags, offset in the file, two addresses, length in the file. Kind 1 is loaded.
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", segments, at)
        if kind == 1:
            yield offset, length


def _open(path: Path) -> ctypes.CDLL:
    """Load the library and set the types of its functions. Raise _Unusable if its file or interface is not ours."""
    if not path.exists():
        raise _Unusable(f"{path.name} was not built: install a wheel for this platform, or build with gcc or clang")
    try:
        _check_complete(path)
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise _Unusable(f"{path.name} does not load: {error}") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(handle, f"ringtile_{name}", None)
        if function is None:
            raise _Unusable(f"{path.name} is not this version's library, install ringtile again: no ringtile_{name}")
        function.restype, function.argtypes = result, arguments
    if difference := _difference(handle):
        raise _Unusable(f"{path.name} is from another version, install ringtile again: {difference}")
    return handle


def _difference(handle: ctypes.CDLL) -> str:
    """Return the first difference between the library's interface and this module's, or an empty string."""
    if handle.ringtile_abi_version() != ABI_VERSION:
        return f"ABI {handle.ringtile_abi_version()}, expected {ABI_VERSION}"
    if handle.ringtile_call_size() != ctypes.sizeof(CallStructure):
        return f"a call has {handle.ringtile_call_size()} bytes, expected {ctypes.sizeof(CallStructure)}"
    # Equal sizes do not suffice: two fields that change places would hand over a number as an address.
    offset = _LONG()
    for number, (name, *_) in enumerate(CallStructure._fields_):
        found = handle.ringtile_call_field(number, ctypes.byref(offset))
        if found != name.encode() or offset.value != getattr(CallStructure, name).offset:
            return f"field {number} of a call is {found!r} at byte {offset.value}, expected {name!r}"
    return ""


_GNU = ("GOMP_parallel",)
_LLVM = ("__kmpc_global_thread_num", "__kmpc_push_num_threads", "__kmpc_fork_call")


def _runtimes() -> Iterator[ctypes.CDLL]:
    """Yield the OpenMP runtimes that this process has loaded, PyTorch's first."""
    own = Path(torch.__file__).parent / "lib"
    if sys.platform == "win32":
        yield from _loaded_libraries(own / "libiomp5md.dll", "libiomp5md.dll")
    elif sys.platform == "darwin":
        yield from _loaded_libraries(*sorted(own.glob("libomp*.dylib")), None)
    else:
        # The process comes first: its symbols are the ones that torch uses, even if LD_PRELOAD replaces the runtime.
        yield from _loaded_libraries(None, *sorted(own.glob("lib*omp*.so*")))


def _loaded_libraries(*places: Path | str | None) -> Iterator[ctypes.CDLL]:
    """Yield handles of loaded libraries, None for the whole process. We load none: a second runtime would compete."""
    for place in places:
        try:
            yield ctypes.CDLL(None if place is None else str(place), mode=getattr(os, "RTLD_NOLOAD", 0))
        except OSError:
            continue


def _use_runtime(handle: ctypes.CDLL) -> str:
    """Give the library the entry points of torch's OpenMP runtime. Return the name of the main one, empty if none."""
    for runtime in _runtimes():
        # macOS compilers call LLVM's entry points, the compilers of torch's Linux wheels GNU's.
        for names in (_LLVM, _GNU) if sys.platform == "darwin" else (_GNU, _LLVM):
            if all(hasattr(runtime, name) for name in names):
                found = [ctypes.cast(getattr(runtime, name), _POINTER) for name in names]
                handle.ringtile_use_runtime(*(found + [None] * 3 if names is _GNU else [None, *found]))
                return names[-1]
    return ""


def _find() -> _Found:
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "none":
        return _Found(None, f"switched off by {VARIABLE}=none")
    try:
        handle = _open(Path(__file__).parents[2] / "lib" / f"libringtile{SUFFIX}")
    except _Unusable as reason:
        return _Found(None, str(reason))
    names = [handle.ringtile_isa_name(isa).decode() for isa in range(handle.ringtile_isa_count())]
    if wanted and wanted not in names:
        return _Found(None, "", f"{VARIABLE}: expected one of {[*names, 'none']}, got {wanted!r}")
    # A set that cannot serve is not asked: the question lets the process use the registers of some.
    candidates = [wanted] if wanted else [name for name in names if name not in EMULATED_SETS]
    against = {name: handle.ringtile_isa_reason(names.index(name)).decode() for name in candidates}
    sets = tuple(
        InstructionSet(isa, name, handle.ringtile_lanes(isa))
        for isa, name in enumerate(names)
        if against.get(name) == ""
    )
    missing = {name: reason for name, reason in against.items() if reason}
    if not sets:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        return _Found(None, f"no instruction set serves here: {reasons}")

    def measure(wanted: Wanted) -> list[float]:
        """Take about a millisecond."""
        return best_rates(handle, wanted, threads=1, seconds=2e-5, samples=5)

    choice = choose(sets, measure)
    if wanted:
        choice = choice._replace(reason=f"set by {VARIABLE}")
    return _Found(Library(handle, sets, missing, choice, _use_runtime(handle)), "")


_FOUND = _find()


def reason_against() -> str:
    """Return why the library cannot be used here, empty if it can. Raise ValueError if the variable is wrong."""
    if _FOUND.mistake:
        raise ValueError(_FOUND.mistake)
    return _FOUND.reason


def library() -> Library:
    """Return the library. `reason_against` must be empty."""
    assert _FOUND.library is not None
    return _FOUND.library
