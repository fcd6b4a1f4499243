"""The instruction set of each dtype: chosen by rates, whatever this processor is."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtile import sparse_attention
from ringtile.cli import main
from ringtile.kernels import native
from ringtile.kernels.native.instruction_sets import (
    PART_PRODUCTS,
    RATES,
    TILE_SETS,
    WORTHWHILE,
    InstructionSet,
    Wanted,
    best_rates,
    choose,
)
from ringtile.kernels.native.library import VARIABLE, library
from ringtile.kernels.native.precision import arithmetic_of

module = importlib.import_module("ringtile.kernels.native.library")
X86 = ("avx2", "avx512", "avx512_bf16")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def sets_named(*names: str) -> list[InstructionSet]:
    return [InstructionSet(number, name, 16 << min(number, 2)) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("ratio", "chosen"),
    [(0.5, "avx512"), (1.19, "avx512"), (1.21, "avx512_bf16")],
)
def test_bfloat16_takes_dot_products_only_if_they_are_faster(ratio: float, chosen: str) -> None:
    asked: list[tuple[str, str]] = []

    def measure(wanted: Wanted) -> list[float]:
        asked.extend((isa.name, name) for isa, name in wanted)
        return [ratio * 3e11, 3e11]

    choice = choose(sets_named(*X86), measure)
    assert {dtype: isa.name for dtype, isa in choice.by_dtype.items()} == {
        **dict.fromkeys(DTYPES, "avx512"),
        torch.bfloat16: chosen,
    }
    assert choice.reason == f"avx512_bf16 runs at {ratio:.2f} times the float32 rate"
    assert asked == [("avx512_bf16", "dot_bfloat16"), ("avx512", "fma_float32")]
    assert WORTHWHILE == 1.2


def test_of_two_sets_for_bfloat16_the_faster_one_serves() -> None:
    choice = choose(sets_named(*X86, "amx"), lambda wanted: [1e11, 3e12, 2e11])
    assert choice.by_dtype[torch.bfloat16].name == choice.by_dtype[torch.float16].name == "amx"
    assert {choice.by_dtype[dtype].name for dtype in DTYPES[:2]} == {"avx512"}
    assert choice.reason == "amx runs at 15.00 times the float32 rate"


@pytest.mark.parametrize(
    ("ratio", "pairs_ratio", "half", "parts"),
    [
        (3.5, 0.5, "avx512", None),
        (3.7, 0.5, "amx", "amx"),
        # Dot products of vectors are not products of tiles.
        (1.0, 9.0, "avx512", None),
        (3.7, 9.0, "amx", "amx"),
    ],
)
def test_numbers_in_parts_take_tiles_that_beat_multiply_adds_three_times(
    ratio: float, pairs_ratio: float, half: str, parts: str | None
) -> None:
    choice = choose(sets_named(*X86, "amx"), lambda wanted: [pairs_ratio * 2e11, ratio * 2e11, 2e11])
    assert choice.by_dtype[torch.float16].name == half
    assert (choice.parts.name if choice.parts else None) == parts
    assert {choice.by_dtype[dtype].name for dtype in DTYPES[:2]} == {"avx512"}
    assert choice.by_dtype[torch.bfloat16].name == ("avx512_bf16" if pairs_ratio > ratio else "amx")


@pytest.mark.parametrize("names", [X86[:1], X86[:2], X86[2:], ("neon",), ("amx",), ("amx_emulated",)], ids=str)
def test_without_a_choice_nothing_is_measured(names: Sequence[str]) -> None:
    def measure(wanted: Wanted) -> list[float]:
        raise AssertionError(wanted)

    choice = choose(sets_named(*names), measure)
    assert {isa.name for isa in choice.by_dtype.values()} == {names[-1]}
    assert choice.reason == ""
    assert (choice.parts is not None) == (names[-1] in TILE_SETS)


FIELDS = library().handle.ringtile_call_field


class Processor:
    """Stands in for the library on another processor: what it can, and how fast."""

    def __init__(self, rates: dict[tuple[int, str], float], names: Sequence[str] = X86) -> None:
        self.rates, self.asked, self.names = rates, [], names
        self.reasons: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        answers = {"isa_count": lambda: len(self.names), "isa_name": lambda isa: self.names[isa].encode()}
        answers |= {"isa_reason": lambda isa: self.reasons.get(isa, b"")}
        answers |= {"lanes": lambda isa: (16, 64, 64, 16)[isa], "use_runtime": lambda *entries: None}
        answers["call_field"] = FIELDS
        return answers[name.removeprefix("ringtile_")]

    def ringtile_peak(self, isa: int, kind: int, threads: int, seconds: float) -> float:
        self.asked.append((isa, RATES[kind], threads, seconds))
        # Every other sample is disturbed.
        count = len(self.rates)
        return self.rates[isa, RATES[kind]] * (1 if len(self.asked) % (2 * count) < count else 0.1)


def test_rates_are_the_best_of_samples_taken_in_turn() -> None:
    isa = sets_named(*X86)
    processor = Processor({(2, "dot_bfloat16"): 5.0, (1, "fma_float32"): 7.0})
    wanted = [(isa[2], "dot_bfloat16"), (isa[1], "fma_float32")]
    assert best_rates(processor, wanted, threads=3, seconds=0.5, samples=4) == [5.0, 7.0]
    assert processor.asked == [(2, "dot_bfloat16", 3, 0.5), (1, "fma_float32", 3, 0.5)] * 4


def found_on(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, wanted: str = ""
) -> tuple[dict[torch.dtype, str], Any]:
    def opened(path: Path) -> Processor:
        return processor

    monkeypatch.setenv(VARIABLE, wanted)
    monkeypatch.setattr(module, "_open", opened)
    found = module._find()
    assert found.library is not None
    return {dtype: isa.name for dtype, isa in found.library.choice.by_dtype.items()}, found


INTEL = {(2, "dot_bfloat16"): 1.18e11, (1, "fma_float32"): 2.30e11}
TILES = {**INTEL, (3, "dot_bfloat16"): 3.3e12}
AMD = {(2, "dot_bfloat16"): 2.2e11, (1, "fma_float32"): 1.1e11}


def test_doctor_says_which_dtypes_tiles_compute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = Processor(TILES, (*X86, "amx"))
    by_dtype, found = found_on(processor, monkeypatch)
    assert {threads for _, _, threads, _ in processor.asked} == {1}
    assert sum(seconds for *_, seconds in processor.asked) < 1e-3
    assert by_dtype == {**dict.fromkeys(DTYPES[:2], "avx512"), **dict.fromkeys(DTYPES[2:], "amx")}
    monkeypatch.setattr(module, "_FOUND", found)
    main(["doctor"])
    told = (
        "avx512 for float32, float64; amx for float16, bfloat16; amx for float32 in parts if "
        "torch.set_float32_matmul_precision allows it (amx runs at 14.35 times the float32 rate)"
    )
    assert told in capsys.readouterr().out
    main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["native_isa"] == {"avx512": ["float32", "float64"], "amx": ["float16", "bfloat16"]}
    assert facts["native_isa_parts"] == "amx"


def test_a_set_that_cannot_serve_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    processor = Processor({})
    processor.reasons = {2: b"Linux gives no tiles"}
    _, found = found_on(processor, monkeypatch)
    monkeypatch.setattr(module, "_FOUND", found)
    main(["doctor"])
    assert re.search(r"instruction set avx512_bf16 +not used: Linux gives no tiles\n", capsys.readouterr().out)
    # A named set is the only one that is asked: asking can change what the process may do.
    processor.reasons = {0: b"old", 1: b"old"}
    monkeypatch.setenv(VARIABLE, "avx512")
    assert module._find().reason == "no instruction set serves here: avx512: old"


def test_an_emulated_set_serves_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor({}, ("avx2", "avx512", "amx_emulated"))
    by_dtype, found = found_on(processor, monkeypatch)
    assert by_dtype == dict.fromkeys(DTYPES, "avx512")
    assert not processor.asked
    assert not found.library.missing
    assert found.library.choice.parts is None
    by_dtype, found = found_on(processor, monkeypatch, "amx_emulated")
    assert by_dtype == dict.fromkeys(DTYPES, "amx_emulated")
    assert found.library.choice.parts.name == "amx_emulated"


@pytest.mark.parametrize("wanted", X86)
def test_the_environment_names_one_set_for_all_dtypes(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor({})
    by_dtype, found = found_on(processor, monkeypatch, wanted)
    assert by_dtype == dict.fromkeys(DTYPES, wanted)
    assert found.library.choice.reason == f"set by {VARIABLE}"
    assert not processor.asked


@pytest.mark.skipif(bool(module.reason_against()), reason="no native kernel here")
@pytest.mark.parametrize(
    ("rates", "setting", "expected"),
    [
        (AMD, "ieee", [(1, 0), (1, 1), (1, 3), (2, 2)]),
        (AMD, "tf32", [(1, 0), (1, 1), (1, 3), (2, 2)]),
        (TILES, "none", [(1, 0), (1, 1), (3, 3), (3, 2)]),
        (TILES, "ieee", [(1, 0), (1, 1), (3, 3), (3, 2)]),
        (TILES, "tf32", [(3, 4), (1, 1), (3, 3), (3, 2)]),
        (TILES, "bf16", [(3, 4), (1, 1), (3, 3), (3, 2)]),
    ],
)
def test_a_call_names_the_set_of_its_dtype(
    rates: dict[tuple[int, str], float],
    setting: str,
    expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its number in native/ringtile.h."""
    _, found = found_on(Processor(rates, (*X86, "amx") if rates is TILES else X86), monkeypatch)
    monkeypatch.setattr(module, "_FOUND", found._replace(library=found.library._replace(runtime="GOMP_parallel")))
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(native._Job, "_call", lambda job, function: used.append((job.c.isa, job.c.dtype)))
    monkeypatch.setattr(Processor, "ringtile_forward", None, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn.matmul, "fp32_precision", setting)
    for dtype in DTYPES:
        q = torch.zeros(1, 1, 64, 8, dtype=dtype)
        sparse_attention(q, q, q, backend="native")
    assert used == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("amx", [3, 1, 3, 0]), ("avx512", [0, 0, 0, 0]), ("avx512_bf16", [0, 0, 0, 0])],
)
def test_products_of_tiles_for_each_product(name: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = found_on(Processor({}, (*X86, "amx")), monkeypatch, name)
    monkeypatch.setattr(module, "_FOUND", found)
    monkeypatch.setattr(torch.backends.mkldnn.matmul, "fp32_precision", "tf32")
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert [arithmetic_of(dtype).tile_products for dtype in dtypes] == expected
    assert PART_PRODUCTS == 3
