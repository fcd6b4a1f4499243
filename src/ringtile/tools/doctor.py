"""`ringtile doctor`: versions, devices, and for each backend the reasons against it."""

import argparse
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringtile.index import cache_info
from ringtile.kernels import fa4
from ringtile.kernels.native.library import library, reason_against
from ringtile.kernels.native.self_test import TileReport, check_tiles
from ringtile.kernels.select import backend_report, before_native
from ringtile.kernels.triton import MEASURED_ON
from ringtile.patterns.tested import TESTED
from ringtile.tools.machine import machine_facts, versions

OLD_IMPORT_PATH = "dilated_attention_pytorch"


def old_import_path() -> str:
    """Return which distribution ``import dilated_attention_pytorch`` would load, without importing it."""
    found = importlib.util.find_spec(OLD_IMPORT_PATH)
    if found is None or found.origin is None:
        return "not installed"
    # Both distributions install a package of this name, and the file tells whose it is.
    if b"ringtile" in Path(found.origin).read_bytes():
        return "provided by ringtile"
    return f"taken by another project, {found.origin}: uninstall that project, and install ./compat of ringtile"


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def newer_than_tested(installed: dict[str, str | None]) -> dict[str, str]:
    """Return the newest tested version by package name, for packages that are newer than that."""
    return {
        name: tested[-1]
        for name, tested in TESTED.items()
        # A tested 3.13 covers 3.13.5.
        if tested and _release(installed[name] or "")[: len(newest := _release(tested[-1]))] > newest
    }


def diagnosis() -> dict[str, Any]:
    """Return everything that ``ringtile doctor`` prints. The native entries are None without the library."""
    found = None if reason_against() else library()
    dtypes: dict[str, list[str]] = {}
    for dtype, isa in found.choice.by_dtype.items() if found else ():
        dtypes.setdefault(isa.name, []).append(str(dtype).removeprefix("torch."))
    return {
        "versions": versions(),
        "tested": TESTED,
        "newer_than_tested": newer_than_tested(versions()),
        "machine": machine_facts(),
        "backends": dict(backend_report()),
        "triton_measured_on": MEASURED_ON or None,
        "dense_before_native": [str(dtype).removeprefix("torch.") for dtype in before_native()],
        "native_isa": dtypes if found else None,
        "native_isa_parts": found.choice.parts.name if found and found.choice.parts else None,
        "native_isa_reason": found.choice.reason if found else None,
        "native_isa_missing": found.missing if found else None,
        "native_runtime": found.runtime if found else None,
        "index_cache": cache_info()._asdict(),
        OLD_IMPORT_PATH: old_import_path(),
    }


def _detail(name: str, found: dict[str, Any]) -> str:
    """Return the text after "available" of a backend."""
    if name == "native":
        sets = "; ".join(f"{isa} for {', '.join(dtypes)}" for isa, dtypes in (found["native_isa"] or {}).items())
        if isa := found["native_isa_parts"]:
            sets += f"; {isa} for float32 in parts if torch.set_float32_matmul_precision allows it"
        why = f" ({found['native_isa_reason']})" if found["native_isa_reason"] else ""
        runtime = found["native_runtime"]
        threads = f"threads by {runtime}" if runtime else "one thread: torch has loaded no OpenMP runtime"
        return f", {sets}{why}, {threads}"
    if name == "dense" and found["dense_before_native"]:
        return f", before native for {' and '.join(found['dense_before_native'])} (AMX)"
    if name == "triton":
        measured = found["triton_measured_on"]
        return f", measured on {measured}" if measured else ", not measured on a GPU yet"
    return ", only if you name it" if name in ("flash", "fa4") else ""


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line. A name that would repeat is empty."""
    for name, version in found["versions"].items():
        newest = found["newer_than_tested"].get(name)
        yield name, f"{version}, newer than tested ({newest})" if newest else version or "not installed"
    for number, (name, tested) in enumerate(found["tested"].items()):
        yield "" if number else "tested with", f"{name} {', '.join(tested)}"
    for name, fact in found["machine"].items():
        for number, text in enumerate(fact if isinstance(fact, list) else [fact]):
            yield name.replace("_", " ") if number == 0 else "", str(text)
    for name, reasons in found["backends"].items():
        told = f"not available: {'; '.join(reasons)}" if reasons else f"available{_detail(name, found)}"
        yield f"backend {name}", told
    for isa, reason in (found["native_isa_missing"] or {}).items():
        yield f"instruction set {isa}", f"not used: {reason}"
    yield OLD_IMPORT_PATH, found[OLD_IMPORT_PATH]
    yield "index cache", f"up to {found['index_cache']['limit'] / 2**20:.0f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    tests = "also test the processor's tiles (AMX) for a second, and compile and test FlashAttention 4 for minutes"
    parser.add_argument("--self-test", action="store_true", help=tests)


def _told(report: TileReport) -> str:
    if report.reason:
        return f"nothing to test: {report.reason}"
    told = f"{report.wrong} of {report.sums} sums in tiles are wrong, in {report.threads} threads"
    return told + (": this machine loses tiles, set RINGTILE_CPU=avx512" if report.wrong else "")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; return 0, or 1 if the self-test finds something wrong."""
    found, tests, status = diagnosis(), list[tuple[str, str]](), 0
    if args.self_test:
        report, against = check_tiles(), fa4.reason_against()
        wrong = "" if against else fa4.self_test()
        of_fa4 = f"nothing to test: {against}" if against else wrong or "matches float64"
        found |= {"self_test": report._asdict(), "self_test_fa4": of_fa4}
        tests = [("self-test", _told(report)), ("self-test fa4", of_fa4)]
        status = 1 if report.wrong or wrong else 0
    if args.json:
        print(json.dumps(found, indent=2))
        return status
    lines = [*_lines(found), *tests]
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:{width}}  {text}")
    return status
