"""The compiled library: loading and checking it, the structure of a call, its instruction set and its threads."""

import ctypes
import os
import struct
import sys
from collections.abc import Collection, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ringtile.kernels.native.checks import DTYPES
from ringtile.kernels.native.instruction_sets import (
    EMULATED_SETS,
    RATES,
    Choice,
    InstructionSet,
    Wanted,
    best_rates,
    choose,
)
from ringtile.kernels.spans import KERNEL, span

VARIABLE = "RINGTILE_CPU"
"""Environment variable that names the instruction set (``avx2``, ``avx512``, ``avx512_bf16``, ``amx``, ``neon``) or
``none``. Builds for tests have ``amx_emulated`` too."""

ABI_VERSION = 18
"""``RINGTILE_ABI`` of native/ringtile.h."""

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_KINDS: dict[str, Any] = {"i": ctypes.c_int32, "l": _LONG, "d": ctypes.c_double}
_ELEMENTS = {"I": torch.int32, "L": torch.int64, "D": torch.float64, "H": torch.int16, "F": torch.float32}
_CALLS = [
    _ELEMENTS | {"N": dtype, "S": torch.promote_types(dtype, torch.float32)}
    for dtype in (*DTYPES, torch.float32, torch.int8)
]
"""The dtype of each kind of pointer, for each ``ringtile_dtype`` of native/ringtile.h."""
INT8 = 5
"""``RINGTILE_INT8``."""


class ForwardPhase(IntEnum):
    """``ringtile_forward_phase`` of native/ringtile.h: what the items of a call are."""

    ATTEND = 0
    COMBINE = 1


class BackwardPhase(IntEnum):
    """``ringtile_backward_phase`` of native/ringtile.h."""

    DELTA = 0
    HEADS = 1
    ROWS = 2
    COLUMNS = 3
    FOLD_ROWS = 4
    FOLD_COLUMNS = 5


class ListsPhase(IntEnum):
    """``ringtile_lists_phase`` of native/ringtile.h."""

    UNIONS = 0
    FORWARD = 1
    QUERY_GRADS = 2
    KEY_GRADS = 3


def address(name: str, x: Tensor, dtype: torch.dtype) -> int:
    """Return where the numbers of a tensor are. Raise ValueError if the library would read others there."""
    if x.dtype is not dtype or not x.is_cpu:
        raise ValueError(f"{name}: expected {dtype} on the CPU, got {x.dtype} on {x.device}")
    return x.data_ptr()


class CallStructure(ctypes.Structure):
    """``ringtile_call`` of native/ringtile.h, without nesting. The library lists the fields: see `_structure`."""

    # Without a dictionary of their own, calls raise AttributeError if a field's name is wrong.
    __slots__ = ("tensors",)
    elements: ClassVar[dict[str, tuple[torch.dtype, ...]]]
    """The dtypes of each pointer, see `_CALLS`."""
    tensors: list[Tensor]
    """They live as long as the call."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = []

    def copy(self) -> Self:
        """Return the same call, which keeps no tensors."""
        found = type(self).from_buffer_copy(self)
        found.tensors = []
        return found

    def point(self, **fields: Tensor) -> None:
        """Point fields at tensors, and keep these."""
        self.borrow(fields)
        self.tensors += fields.values()

    def borrow(self, fields: dict[str, Tensor]) -> None:
        """Point fields at tensors that live elsewhere. Raise ValueError if a dtype does not match its field."""
        elements, code = self.elements, self.dtype
        for name, x in fields.items():
            setattr(self, name, address(name, x, elements[name][code]))

    def place(self, **fields: Tensor) -> None:
        """Point fields at tensors ``[B, H, N, D]``, with their strides, and keep these."""
        self.point(**fields)
        for name, x in fields.items():
            setattr(self, f"{name}_stride", x.stride()[:3])


class Library(NamedTuple):
    """The loaded library, its instruction sets and its threads."""

    handle: ctypes.CDLL
    structure: type[CallStructure]
    sets: tuple[InstructionSet, ...]
    """The instruction sets that this processor runs, or the one that `VARIABLE` names."""
    missing: dict[str, str]
    """The reason against each other instruction set, of those that could have served."""
    choice: Choice
    runtime: str
    """Entry point of the OpenMP runtime in use, empty if there is none, so one thread computes."""

    def run(self, function: Any, c: CallStructure) -> None:
        """Call one of the library's functions. Raise MemoryError if its threads have no room."""
        with span(KERNEL):
            failed = function(ctypes.byref(c))
        if failed:
            raise MemoryError("the native kernel could not allocate memory for its threads")


class _Found(NamedTuple):
    library: Library | None
    reason: str
    mistake: str = ""
    """In the variable. `import ringtile` must not raise it, or the command could not print it as its own error."""


class _Unusable(Exception):
    """The reason why a library file cannot be used."""


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "abi_version": (ctypes.c_int, ()),
    "call_field": (ctypes.c_char_p, (ctypes.c_int, ctypes.POINTER(_LONG), ctypes.POINTER(_LONG))),
    "use_runtime": (None, (_POINTER,) * 4),
    "isa_count": (ctypes.c_int, ()),
    "isa_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "isa_reason": (ctypes.c_char_p, (ctypes.c_int,)),
    "lanes": (ctypes.c_int, (ctypes.c_int,)),
    "forward": (ctypes.c_int, (_POINTER,)),
    "backward": (ctypes.c_int, (_POINTER,)),
    "masses": (ctypes.c_int, (_POINTER,)),
    "lists": (ctypes.c_int, (_POINTER,)),
    "scores": (ctypes.c_int, (_POINTER,)),
    "kept": (_LONG, (*(_LONG,) * 3, *(_POINTER,) * 5, ctypes.POINTER(_LONG), _LONG, *(_POINTER,) * 3)),
    "ascending": (None, (*(_LONG,) * 3, *(_POINTER,) * 3)),
    "best": (ctypes.c_int, (*(ctypes.c_int,) * 2, *(_LONG,) * 4, *(_POINTER,) * 3)),
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
    needed = begin + size * count
    for at in range(0, len(segments) - size + 1, size):
        # An entry: kind, flags, offset in the file, two addresses, length in the file. Kind 1 is loaded.
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", segments, at)
        needed = max(needed, offset + length if kind == 1 else 0)
    if path.stat().st_size < needed:
        raise _Unusable(f"{path.name} is truncated, install ringtile again: {path.stat().st_size} bytes of {needed}")


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
    if (abi := handle.ringtile_abi_version()) != ABI_VERSION:
        raise _Unusable(
            f"{path.name} is from another version, install ringtile again: ABI {abi}, expected {ABI_VERSION}"
        )
    return handle


def _structure(handle: ctypes.CDLL) -> type[CallStructure]:
    """Return the class of a call, with the fields that the library lists, in their order and without gaps."""
    fields: list[tuple[str, Any]] = []
    elements = {}
    size, kind = _LONG(), _LONG()
    while name := handle.ringtile_call_field(len(fields), ctypes.byref(size), ctypes.byref(kind)):
        number = _KINDS.get(chr(kind.value), _POINTER)
        if number is _POINTER:
            elements[name.decode()] = tuple(dtypes[chr(kind.value)] for dtypes in _CALLS)
        count = size.value // ctypes.sizeof(number)
        fields.append((name.decode(), number if count == 1 else number * count))
    return type("Call", (CallStructure,), {"__slots__": (), "_fields_": fields, "elements": elements})


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
    return _Found(Library(handle, _structure(handle), sets, missing, choice, _use_runtime(handle)), "")


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


def peak_rates(
    *, threads: int | None = None, seconds: float = 0.02, samples: int = 5, names: Collection[str] = RATES
) -> dict[str, float]:
    """Return the best of ``samples`` of each rate, per second, summed over ``threads``, without missing ones."""
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1 or samples < 1 or not seconds > 0:
        raise ValueError(f"threads, seconds, samples: expected more than none, got {threads=}, {seconds=}, {samples=}")
    if reason_against():
        return {}
    wanted = [(library().sets[-1], name) for name in names]
    found = best_rates(library().handle, wanted, threads=threads, seconds=seconds, samples=samples)
    return {name: rate for name, rate in zip(names, found, strict=True) if rate}
