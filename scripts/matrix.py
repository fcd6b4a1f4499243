"""Run the tests with the versions that users have, and print a table.

    python scripts/matrix.py                                   the environments of RUNS
    python scripts/matrix.py --python 3.11 --torch 2.11 2.12   every combination, with PINNED for what you leave out
    python scripts/matrix.py --python 3.14t --torch newest --transformers newest
    python scripts/matrix.py --transformers 5.5 -- tests/integrations/test_transformers.py
    python scripts/matrix.py --wheel -- tests/kernels/test_native.py   the wheel of dist/, not sources
    python scripts/matrix.py --here                            this interpreter, and the packages that it imports
    python scripts/matrix.py --without-numpy                   this interpreter and its torch, without numpy
    python scripts/matrix.py -- tests/index/test_index.py -x   pytest gets the arguments after --
    python scripts/matrix.py --record                          and write the results down

Each environment is made in a temporary folder and removed, unless it is here. It imports the sources of this checkout,
with the native kernel if it is built (`make native`), or the wheel of `make wheels`. The script exits with 1 if a test
fails. A missing Python or torch is no failure.

`--record` runs all tests, so pytest gets no arguments. It puts each result into benchmarks/records/tested.json, and
writes the versions that passed into the package, for `ringtile doctor`, and into the site.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from environment import CONSTRAINTS, CPU_WHEELS, ROOT

NEWEST = "newest"
PINNED = ("3.11", "2.13", "5.24")
"""Python, and the torch and transformers of constraints.txt."""
RUNS = (
    PINNED,
    ("3.11", "2.11", "5.5"),
    ("3.11", "2.14", "5.24"),
    ("3.12", "2.13", "5.23"),
    ("3.13", "2.13", "5.24"),
)
"""All Pythons, and the ends of torch and transformers: the oldest with the oldest."""
WITHOUT_NUMPY = (
    "tests/project/test_without_numpy.py",
    "tests/patterns/test_patterns.py",
    "tests/index/test_index.py",
    "tests/tools/test_show.py",
)
RECORD = ROOT / "benchmarks/records/tested.json"
PACKAGE = ROOT / "src/ringtile/patterns/tested.py"
PAGE = ROOT / "docs/reference/tested.md"
NAMES = {"python": "Python", "torch": "torch", "triton": "Triton", "transformers": "transformers"}
FACTS = """
import json
from ringtile.tools.machine import commit, versions
print(json.dumps({**versions(), "commit": commit()}))
"""


def interpreter(version: str) -> str | None:
    """A Python of a version, from PATH or pyenv. A version like 3.14t has no global lock."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python"), sys.executable)
    code = (
        "import sys, sysconfig; free = sysconfig.get_config_var('Py_GIL_DISABLED'); "
        "print('%d.%d' % sys.version_info[:2] + 't' * bool(free))"
    )
    for python in filter(None, found):
        if subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return str(python)
    return None


def packages_of(folder: Path) -> Path:
    (packages,) = folder.glob("lib/*/site-packages")
    return packages


def wanted(name: str, version: str) -> str:
    return name if version == NEWEST else f"{name}=={version}.*"


def fill(folder: Path, torch: str, transformers: str) -> str:
    """Install a torch, the tools of the tests and a transformers, if named. Return the reason if pip does not."""

    def pip(verb: str, *words: object) -> bool:
        command = [folder / "bin/python", "-m", "pip", verb, "--quiet", *words]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not pip("install", "--retries", "1", "--extra-index-url", CPU_WHEELS, wanted("torch", torch)):
        return f"pip finds no torch {torch}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["fa4"]  # for GPUs
    tools = [word for extra in extras.values() for word in extra if not word.startswith("ringtile")]
    # A torch for CUDA brings its own Triton. The newest torch may need a newer one than the pinned.
    free = "torch"
    if torch == NEWEST or list(packages_of(folder).glob("triton-*")):
        free += "|triton"
    if transformers:
        free += "|transformers|huggingface-hub|safetensors|tokenizers"
        tools.append(wanted("transformers", transformers))
    pins = folder / "constraints.txt"
    pins.write_text(re.sub(rf"^({free})==.*\n", "", CONSTRAINTS.read_text(), flags=re.MULTILINE))
    return "" if pip("install", "-c", pins, *tools) else "pip does not find all tools of the tests"


def share_all_but_numpy(folder: Path) -> str:
    """Link the packages of this interpreter, except numpy and those that need it."""
    left_out = ("numpy", "matplotlib", "lightning", "pytorch_lightning", "triton")
    for shared in (Path(path) for path in sys.path if path.endswith("-packages")):
        for path in shared.iterdir():
            to = packages_of(folder) / path.name
            if not (path.name.startswith(left_out) or path.suffix == ".pth" or to.exists()):
                to.symlink_to(path)
    return ""


def make(folder: Path, python: str, torch: str, transformers: str, wheel: bool) -> str:
    """Make an environment in a folder. Return the reason if that fails."""
    subprocess.run([python, "-m", "venv", *(() if torch else ("--without-pip",)), folder], check=True)
    if reason := fill(folder, torch, transformers) if torch else share_all_but_numpy(folder):
        return reason
    sources = [ROOT / "compat", *(() if wheel else (ROOT / "src",))]
    (packages_of(folder) / "ringtile.pth").write_text("".join(f"{path}\n" for path in sources))
    if wheel:
        install = ("install", "--quiet", "--no-index", "--no-deps", "--find-links", ROOT / "dist", "ringtile")
        subprocess.run([folder / "bin/python", "-m", "pip", *install], check=True)
    return ""


def tested(python: object, path: Sequence[Path | str], arguments: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Run the tests. Return an entry of the record, empty if nothing ran, and the result to print."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    facts = subprocess.run([python, "-c", FACTS], cwd=ROOT, env=variables, capture_output=True, text=True).stdout
    if not facts:
        return {}, "its torch cannot be imported here"
    command = [python, "-m", "pytest", "-q", "--numprocesses=auto", "--dist=loadgroup", "--color=no", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    lines = (done.stdout.strip() or f"pytest ended with status {done.returncode}").splitlines()
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    known = json.loads(facts)
    entry: dict[str, Any] = {name: known[name] for name in (*NAMES, "commit")}
    entry |= {"date": f"{datetime.date.today()}", "passed": counts.get("passed", 0)}
    # A run that ended early failed, whatever it counted.
    entry["failed"] = counts.get("failed", 0) + counts.get("error", 0) or int(done.returncode != 0)
    entry["skipped"] = counts.get("skipped", 0)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return entry, "\n".join([lines[-1].strip("= "), *failed])


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def key(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the versions of an entry: Python without its patch, torch without its build, - for a missing package."""
    python, *others = ((entry[name] or "-").partition("+")[0] for name in NAMES)
    return python.rpartition(".")[0], *others


def added(entries: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries with one more, in place of an older run with the same versions."""
    others = [other for other in entries if key(other) != key(entry)]
    return sorted([*others, entry], key=lambda entry: [numbers(version) for version in key(entry)])


def package(entries: list[dict[str, Any]]) -> str:
    """Return the file of the package that names the versions with which all tests passed."""
    passed = [key(entry) for entry in entries if not entry["failed"]]
    text = PACKAGE.read_text(encoding="utf-8").partition("TESTED")[0] + "TESTED: dict[str, tuple[str, ...]] = {\n"
    for column, name in enumerate(NAMES):
        versions = sorted({versions[column] for versions in passed} - {"-"}, key=numbers)
        listed = ", ".join(f'"{version}"' for version in versions)
        text += f'    "{name}": ({listed}{"," * (len(versions) == 1)}),\n'
    return text + "}\n"


def page(entries: list[dict[str, Any]]) -> str:
    """Return the page of the site."""
    rows = [
        " | ".join((*key(entry), *(f"{entry[what]:,}" for what in ("passed", "failed", "skipped")), entry["date"]))
        for entry in entries
    ]
    return f"""\
# Tested with

All tests ran with these versions, on Linux and a CPU. If yours are newer, `ringtile doctor` says so. ringtile does not
refuse a newer torch. Once a week, the tests run with the newest versions that pip finds, and with Python 3.14, with and
without its global lock.

| {" | ".join(NAMES.values())} | passed | failed | skipped | date |
|{"---|" * len(NAMES)}---:|---:|---:|---|
{"".join(f"| {row} |{chr(10)}" for row in rows)}
A skipped test needs a GPU, an instruction set or a package that the machine lacks. In a clone, run the tests with your
versions: `python scripts/matrix.py --here`.
"""


def write(entries: list[dict[str, Any]]) -> None:
    RECORD.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    PACKAGE.write_text(package(entries), encoding="utf-8")
    PAGE.write_text(page(entries), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests with other versions of Python and other libraries.")
    parser.add_argument("--python", nargs="+", metavar="X.Y", help="Pythons")
    parser.add_argument("--torch", nargs="+", metavar="X.Y", help=f"torch versions, or {NEWEST}")
    parser.add_argument("--transformers", nargs="+", metavar="X.Y", help=f"transformers versions, or {NEWEST}")
    parser.add_argument("--wheel", action="store_true", help="the wheel of dist/ that pip chooses, not the sources")
    parser.add_argument("--here", action="store_true", help="this interpreter, and the packages that it imports")
    parser.add_argument("--without-numpy", action="store_true", help="this interpreter and its torch, without numpy")
    parser.add_argument("--record", action="store_true", help="write the results into the record, package and site")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments for pytest")
    args = parser.parse_args()
    chosen = args.python, args.torch, args.transformers
    own = args.here or args.without_numpy
    if own and (any(chosen) or args.wheel or (args.here and args.without_numpy)):
        parser.error("--here and --without-numpy: expected neither versions nor --wheel, nor both of them")
    if args.record and (args.arguments or args.wheel or args.without_numpy):
        parser.error("--record: expected all tests of the sources, without arguments, --wheel and --without-numpy")
    runs = list(product(*(words or (pinned,) for words, pinned in zip(chosen, PINNED, strict=True))))
    runs = [("here", "", "")] if own else runs if any(chosen) else list(RUNS)
    all_passed = True
    print("| Python | torch | Triton | transformers | tests |\n|---|---|---|---|---|", flush=True)
    for version, torch, transformers in runs:
        python = sys.executable if own else interpreter(version)
        entry, told = {}, f"no Python {version} here"
        if args.here:
            path = [ROOT / "src", ROOT / "compat", os.environ.get("PYTHONPATH", "")]
            entry, told = tested(sys.executable, path, args.arguments)
        elif python:
            arguments = args.arguments
            if args.without_numpy:
                arguments = [*(arguments or WITHOUT_NUMPY), "-W", "ignore:Failed to initialize NumPy"]
            with tempfile.TemporaryDirectory() as folder:
                environment = Path(folder, "environment")
                told = make(environment, python, torch, transformers, args.wheel)
                if not told:
                    entry, told = tested(environment / "bin/python", (), arguments)
        if args.record and entry:
            write(added(json.loads(RECORD.read_text(encoding="utf-8")), entry))
        all_passed &= not (entry and entry["failed"])
        result, *failed = told.split("\n")
        versions = key(entry) if entry else (version, torch, "-", transformers)
        print(f"| {' | '.join((*versions, result))} |", *failed, sep="\n", flush=True)
    return 0 if all_passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
