"""The compiled library: a file that is not ours breaks nothing, and threads come from torch's OpenMP runtime."""

from __future__ import annotations

import _ctypes
import ctypes
import importlib
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import assert_same_bits, bits_of, draw, find_library, make, printed, reason_without

from ringtile import build_index
from ringtile.kernels import native
from ringtile.kernels.contracts import Call, Lists, Masses, Rows
from ringtile.kernels.native import chosen, lists, masses, ranks, steps
from ringtile.kernels.native.library import library, reason_against
from ringtile.patterns import Causal
from ringtile.tools.doctor import diagnosis

module = importlib.import_module("ringtile.kernels.native.library")

pytestmark = pytest.mark.skipif(
    bool(reason_against()), reason=f"the native kernel cannot be used here: {reason_against()}"
)


# The element types of what the library reads and writes.


HEADER = Path(__file__).parents[2] / "native/ringtile.h"
CALLS = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32, torch.int8
"""The numbers of ``ringtile_dtype``."""
NUMBERS = {"int32_t": torch.int32, "int64_t": torch.int64, "float": torch.float32, "double": torch.float64}
NUMBERS |= {"uint16_t": torch.int16}


def declared() -> dict[str, str]:
    """The element type of each pointer of ``ringtile_call``, as its header says."""
    text = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8")).split("typedef struct ringtile_call {")[1]
    lines = re.findall(r"(?:const )?(\w+) ([^;{}]*\*[^;]*);", text)
    return {name: of for of, names in lines for name in re.findall(r"\*(\w+)", names)}


def test_each_field_has_the_element_type_of_its_pointer() -> None:
    fields = declared()
    assert len(fields) > 50
    assert fields.keys() == library().structure.elements.keys()
    for number, dtype in enumerate(CALLS):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        elements = NUMBERS | {"ringtile_number": dtype, "ringtile_sum": wide}
        tensors = {x: torch.zeros(2, dtype=x) for x in {*CALLS, *NUMBERS.values(), torch.bool}}
        c = library().structure()
        c.dtype = number
        for name, of in fields.items():
            wanted, right = elements[of], tensors[elements[of]]
            c.point(**{name: right})
            for wrong in (*tensors.values(), right.to("meta")):
                if wrong is not right:
                    said = f"^{name}: expected {wanted} on the CPU, got {wrong.dtype} on {wrong.device}"
                    with pytest.raises(ValueError, match=said):
                        c.point(**{name: wrong})
            # It points at no tensor that it refuses.
            assert getattr(c, name) == right.data_ptr()


Q = torch.ones(1, 2, 20, 8)
INDEX = build_index(Causal(), 20, block=16)
WIDE = replace(INDEX, group=INDEX.group.long())
LISTS = Lists(torch.zeros(1, 1, 20, 1, dtype=torch.int32), 1, torch.ones(1, 20, 2, dtype=torch.int32))
ROWS = Rows(Q, None, Q, Q, Q, Q, Q[..., 0])
KEEP = torch.ones(1, 2, INDEX.n_rows, INDEX.n_cols, dtype=torch.bool)
MASSES = Masses(Q, Q, torch.arange(20), torch.tensor([0, 20], dtype=torch.int32), None, 4, "mean", False, 1.0)
CALL = Call(0, 128, 1.0, pattern="causal")
BYTES = Q[0].to(torch.int8).transpose(0, 1), Q[0, :, :, 0].T, Q[0, 0].to(torch.int8), Q[0, 0, :, 0]
SUMS = torch.zeros(20, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("q, k, v", lambda: native.forward(Q, Q.double(), Q, CALL, native.prepare(Q, Q, Q, INDEX))),
        ("q, k, v", lambda: native.forward(Q, Q, Q.bfloat16(), CALL)),
        ("out", lambda: native.backward(ROWS._replace(out=Q.double()), CALL)),
        ("lse", lambda: native.backward(ROWS._replace(lse=Q[..., 0].double()), CALL)),
        ("group", lambda: native.prepare(Q, Q, Q, WIDE)),
        ("indices", lambda: chosen.forward(Q, Q, Q, LISTS._replace(indices=LISTS.indices.long()), 1.0)),
        ("out_grad", lambda: chosen.backward(ROWS._replace(out_grad=Q.half()), LISTS, 1.0)),
        ("seen", lambda: masses.native_masses(MASSES._replace(seen=MASSES.seen.int()))),
        ("pool_begin", lambda: masses.native_masses(MASSES._replace(groups=MASSES.groups.long()))),
        ("bias", lambda: masses.native_masses(MASSES._replace(bias=Q[:, :1, :, 0].double()))),
        ("scores", lambda: ranks.best(Q[0, 0].double(), 2)),
        ("q", lambda: ranks.rounded_scores(BYTES[0].short(), *BYTES[1:], SUMS, False)),
        ("query_scale", lambda: ranks.rounded_scores(BYTES[0], BYTES[1].double(), *BYTES[2:], SUMS, False)),
        ("key_sum", lambda: ranks.rounded_scores(*BYTES, SUMS.long(), False)),
        ("keep", lambda: lists.kept_lists(INDEX, KEEP[:, :1].byte(), None, None)),
        ("lists", lambda: lists.kept_lists(WIDE, KEEP, KEEP.shape[:2], None)),
        ("k", lambda: steps.step(Q[:, :, -1:], Q[..., ::1].to("meta"), Q, KEEP[:, :, :1], 16, None, None)),
    ],
)
def test_a_wrong_dtype_is_refused_before_the_library_reads_it(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call()


# Files that are not ours.


CUTS = """
import importlib
from pathlib import Path
module = importlib.import_module("ringtile.kernels.native.library")
whole = Path(WHOLE).read_bytes()
for size in (*range(0, len(whole), len(whole) // 40), 63, 64, 100, 2000, 5000):
    # A name of its own: dlopen returns a library that it has loaded by this name, whatever is in the file by now.
    path = Path(FOLDER, f"{size}{module.SUFFIX}")
    path.write_bytes(whole[:size])
    try:
        module._open(path)
    except module._Unusable as error:
        assert "truncated" in str(error) or "does not load" in str(error), error
        print(size)
    else:  # only the symbol table is missing
        assert size > len(whole) // 2, size
"""


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], str]:
    """What doctor says of a file in place of the library, after another backend has served."""

    def reason(content: bytes) -> str:
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / f"libringtile{module.SUFFIX}").write_bytes(content)
        find_library(monkeypatch, tmp_path)
        return reason_without()

    return reason


def test_a_truncated_library_breaks_nothing(replaced: Callable[[bytes], str]) -> None:
    whole = Path(library().handle._name).read_bytes()
    for share in (0.9, 0.4, 0.01):
        said = replaced(whole[: int(len(whole) * share)])
        assert f"libringtile{module.SUFFIX} is truncated, install ringtile again: " in said


def test_no_cut_of_the_library_ends_the_process(tmp_path: Path) -> None:
    code = f"FOLDER, WHOLE = {str(tmp_path)!r}, {library().handle._name!r}"
    assert len(printed(code + CUTS)) >= 20


def test_a_foreign_library_breaks_nothing(replaced: Callable[[bytes], str]) -> None:
    said = replaced(Path(_ctypes.__file__).read_bytes())
    assert said.endswith("is not this version's library, install ringtile again: no ringtile_abi_version")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABI_VERSION", 99)
    with pytest.raises(module._Unusable, match=r"from another version, install ringtile again: ABI \d+, expected 99"):
        module._open(Path(library().handle._name))
    assert module._find().reason


def test_a_field_that_the_library_does_not_list_is_an_error() -> None:
    call = library().structure()
    call.phase = 3
    assert call.phase == 3
    with pytest.raises(AttributeError):
        call.phases = 3


# Threads. Stand-ins count what the library asks of a runtime; a runtime can bring fewer threads than it is asked for.


@pytest.fixture
def _runtime_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "_OPERATIONS_A_THREAD", 1)
    yield
    assert module._use_runtime(library().handle) == library().runtime


def test_the_runtime_is_torchs() -> None:
    assert library().runtime in ("GOMP_parallel", "__kmpc_fork_call")
    assert diagnosis()["native_runtime"] == library().runtime


@pytest.mark.usefixtures("_runtime_restored")
@pytest.mark.parametrize("number", range(101, 103))
def test_any_number_of_threads_of_a_gnu_runtime_gives_the_same_bits(number: int) -> None:
    problem = make(draw(number))
    expected = bits_of(problem, 1)
    asked: list[int] = []
    provided = [1]

    @ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(body, data, threads, flags):
        asked.append(threads)
        for _ in range(provided[0]):
            body(data)

    library().handle.ringtile_use_runtime(ctypes.cast(parallel, ctypes.c_void_p), None, None, None)
    for provided[0] in (1, 2, 3):
        asked.clear()
        assert_same_bits(bits_of(problem, 3), expected)
        assert set(asked) == {3}


@pytest.mark.skipif(
    sys.platform == "darwin" and platform.machine() == "arm64", reason="variable arguments are passed in another way"
)
@pytest.mark.usefixtures("_runtime_restored")
def test_an_llvm_runtime_is_asked_as_a_compiler_would() -> None:
    problem = make(draw(101))
    expected = bits_of(problem, 1)
    asked: list[tuple[int, int]] = []
    number_pointer = ctypes.POINTER(ctypes.c_int32)
    microtask = ctypes.CFUNCTYPE(None, number_pointer, number_pointer, ctypes.c_void_p, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
    def thread_number(location):
        return 7

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    def push_threads(location, number, threads):
        asked.append((number, threads))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, microtask, ctypes.c_void_p, ctypes.c_void_p)
    def fork_call(location, count, body, own, data):
        assert count == 2
        for number in range(2):
            body(ctypes.c_int32(number), ctypes.c_int32(number), own, data)

    entries = [ctypes.cast(x, ctypes.c_void_p) for x in (thread_number, push_threads, fork_call)]
    library().handle.ringtile_use_runtime(None, *entries)
    assert_same_bits(bits_of(problem, 3), expected)
    assert set(asked) == {(7, 3)}


@pytest.mark.usefixtures("_runtime_restored")
def test_without_a_runtime_one_thread_computes_the_same_and_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = make(draw(100))
    expected = bits_of(problem, 2)
    monkeypatch.setattr(module, "_runtimes", lambda: iter(()))
    alone = module._find()
    assert alone.library is not None
    assert alone.library.runtime == ""
    library().handle.ringtile_use_runtime(None, None, None, None)
    assert_same_bits(bits_of(problem, 2), expected)
    monkeypatch.setattr(module, "_FOUND", alone)
    torch.set_num_threads(2)
    assert native.threads_of(1e12) == 1
    from ringtile.cli import main

    main(["doctor"])
    assert "one thread: torch has loaded no OpenMP runtime" in capsys.readouterr().out
    monkeypatch.undo()
    assert native.threads_of(1e12) == 2
