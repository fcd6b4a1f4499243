"""What is here and what is not: versions, devices, and for each backend the reasons against it."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringtile.kernels.dense import MATRIX_DTYPES
from ringtile.kernels.native.library import library, reason_against
from ringtile.kernels.select import backend_report
from ringtile.kernels.triton import MEASURED_ON
from ringtile.layout import cache_info
from ringtile.measure.machine import machine_facts, versions

OLD_IMPORT_PATH = "dilated_attention_pytorch"


def old_import_path() -> str:
    """Who serves ``import dilated_attention_pytorch``: nobody, ringtile's second distribution, or another project.

    The package is found, not imported.
    """
    found = importlib.util.find_spec(OLD_IMPORT_PATH)
    if found is None or found.origin is None:
        return "not installed"
    if b"ringtile.compat" in Path(found.origin).read_bytes():
        return "served by ringtile.compat"
    return f"taken by another project, {found.origin}: import ringtile.compat instead, or uninstall that project"


def diagnosis() -> dict[str, Any]:
    """Everything that ``ringtile doctor`` tells: versions, machine, backends (reasons against each), index cache, and
    who serves the old import path.

    >>> diagnosis()["backends"]["reference"]
    []
    """
    return {
        "versions": versions(),
        "machine": machine_facts(),
        "backends": dict(backend_report()),
        "triton_measured_on": MEASURED_ON or None,
        "dense_before_native": [str(dtype).removeprefix("torch.") for dtype in MATRIX_DTYPES],
        **_native(),
        "index_cache": cache_info()._asdict(),
        OLD_IMPORT_PATH: old_import_path(),
    }


def _native() -> dict[str, Any]:
    """The dtypes that each instruction set computes, why, and the runtime of the threads; None without the library."""
    if reason_against():
        return dict.fromkeys(("native_isa", "native_isa_reason", "native_runtime"))
    dtypes: dict[str, list[str]] = {}
    for dtype, isa in library().choice.by_dtype.items():
        dtypes.setdefault(isa.name, []).append(str(dtype).removeprefix("torch."))
    return {
        "native_isa": dtypes,
        "native_isa_reason": library().choice.reason,
        "native_runtime": library().runtime,
    }


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of each line; a name is empty where it would repeat."""
    for name, version in found["versions"].items():
        yield name, version or "not installed"
    for name, fact in found["machine"].items():
        facts = fact if isinstance(fact, list) else [fact]
        for number, text in enumerate(facts):
            yield name.replace("_", " ") if number == 0 else "", str(text)
    for name, reasons in found["backends"].items():
        detail = ""
        if name == "native":
            runtime, why = found["native_runtime"], found["native_isa_reason"]
            threads = f"threads by {runtime}" if runtime else "one thread: torch has loaded no OpenMP runtime"
            sets = "; ".join(f"{isa} for {', '.join(dtypes)}" for isa, dtypes in (found["native_isa"] or {}).items())
            detail = f", {sets}{f' ({why})' if why else ''}, {threads}"
        if name == "dense" and found["dense_before_native"]:
            detail = f", before native for {' and '.join(found['dense_before_native'])} (AMX)"
        if name == "triton":
            measured = found["triton_measured_on"]
            detail = f", measured on {measured}" if measured else ", unmeasured: there is no record of a GPU yet"
        if name == "flash":
            detail = ", served where it is named"
        yield f"backend {name}", f"not available: {'; '.join(reasons)}" if reasons else f"available{detail}"
    yield OLD_IMPORT_PATH, found[OLD_IMPORT_PATH]
    yield "index cache", f"up to {found['index_cache']['limit'] / 2**20:.0f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ringtile doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; the status is 0."""
    found = diagnosis()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        lines = list(_lines(found))
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"{name:{width}}  {text}")
    return 0
