"""The instruction sets of the native library, one by one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ringtile.kernels import native
from ringtile.kernels.native.instruction_sets import InstructionSet, choose
from ringtile.kernels.native.library import library, reason_against

INSTRUCTION_SETS = ("avx2", "avx512", "avx512_bf16", "amx", "amx_emulated", "neon")


def set_number(name: str) -> int:
    """The number of an instruction set that runs here; skip the test if it does not."""
    handle = library().handle
    names = [handle.ringtile_isa_name(number).decode() for number in range(handle.ringtile_isa_count())]
    if name not in names:
        pytest.skip(f"{name} is not among the sets of this library: {names}")
    if reason := handle.ringtile_isa_reason(names.index(name)).decode():
        pytest.skip(f"{name}: {reason}")
    return names.index(name)


def native_or_composed(request: pytest.FixtureRequest) -> str:
    """The parameter of a fixture, ``"native"`` or ``"composed"``; skip the test if there is no native kernel."""
    name: str = request.param
    if name == "native" and (reason := reason_against()):
        pytest.skip(f"the native kernel cannot be used here: {reason}")
    return name


def use_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to an instruction set, as if the environment named it; skip the test if it does not run here."""
    module, found, number = importlib.import_module("ringtile.kernels.native.library"), library(), set_number(name)
    choice = choose([InstructionSet(number, name, found.handle.ringtile_lanes(number))], lambda wanted: [])
    monkeypatch.setattr(module, "_FOUND", module._Found(found._replace(choice=choice), ""))


@contextmanager
def precision_of(name: str) -> Iterator[None]:
    """PyTorch's precision of products of float32: highest, high or medium."""
    settings = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = [x.fp32_precision for x in settings]
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for x, value in zip(settings, before, strict=True):
            x.fp32_precision = value


def use_products(products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward passes take five products per tile, column by column, or seven, by rows and by columns."""
    monkeypatch.setattr(native, "backward_products", lambda *_: products)
