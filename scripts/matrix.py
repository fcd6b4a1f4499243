"""Run the tests on the Pythons and torch versions that this machine can get, and print a table.

    python scripts/matrix.py                                   the pairs of PAIRS
    python scripts/matrix.py --python 3.11 --torch 2.8 2.10    other pairs, every combination
    python scripts/matrix.py --transformers 5.5 -- tests/test_transformers.py
    python scripts/matrix.py --wheel -- tests/test_native.py   the wheel of dist/, not the sources
    python scripts/matrix.py --without-numpy                   this interpreter and its torch, without numpy
    python scripts/matrix.py -- tests/test_index.py -x        pytest gets the arguments after --

Each environment is made in a temporary folder and removed. It imports the sources of this checkout, with the native
kernel if it is built (`make native`), or the wheel of `make wheels`. The script exits with 1 if a test fails. A missing
Python or torch is no failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from environment import CONSTRAINTS, CPU_WHEELS, ROOT

PAIRS = (
    *(("3.11", torch) for torch in ("2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13")),
    *((python, torch) for python in ("3.12", "3.13", "3.14") for torch in ("2.11", "2.13")),
)
LOWEST_TRITON = (3, 6)
WITHOUT_NUMPY = ("tests/test_without_numpy.py", "tests/test_patterns.py", "tests/test_index.py", "tests/test_show.py")


def interpreter(version: str) -> str | None:
    """A Python of a version, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python"))
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in filter(None, found):
        if subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return str(python)
    return None


def packages_of(folder: Path) -> Path:
    (packages,) = folder.glob("lib/*/site-packages")
    return packages


def fill(folder: Path, torch: str, transformers: str) -> str:
    """Install a torch, the tools of the tests and a transformers, if named. Return the reason if pip does not."""

    def pip(verb: str, *words: object) -> bool:
        command = [folder / "bin/python", "-m", "pip", verb, "--quiet", *words]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not pip("install", "--retries", "1", "--extra-index-url", CPU_WHEELS, f"torch=={torch}.*"):
        return f"pip finds no torch {torch}"
    # ringtile needs a newer Triton. On a CPU, torch works without one, and the tests of Triton are skipped.
    triton = re.search(r"triton-(\d+)\.(\d+)", " ".join(path.name for path in packages_of(folder).iterdir()))
    if triton and tuple(map(int, triton.groups())) < LOWEST_TRITON:
        pip("uninstall", "--yes", "triton")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["fa4"]  # for GPUs
    wanted = [word for extra in extras.values() for word in extra if not word.startswith(("ringtile", "triton"))]
    pins, free = folder / "constraints.txt", "torch|triton"
    if transformers:
        free += "|transformers|huggingface-hub|safetensors|tokenizers"
        wanted.append(f"transformers=={transformers}.*")
    pins.write_text(re.sub(rf"^({free})==.*\n", "", CONSTRAINTS.read_text(), flags=re.MULTILINE))
    return "" if pip("install", "-c", pins, *wanted) else "pip does not find all tools of the tests"


def share_all_but_numpy(folder: Path) -> str:
    """Link the packages of this interpreter, except numpy and those that need it."""
    left_out = ("numpy", "matplotlib", "lightning", "pytorch_lightning", "triton")
    for shared in (Path(path) for path in sys.path if path.endswith("-packages")):
        for path in shared.iterdir():
            to = packages_of(folder) / path.name
            if not (path.name.startswith(left_out) or path.suffix == ".pth" or to.exists()):
                to.symlink_to(path)
    return ""


def tested(
    folder: Path, python: str, torch: str, transformers: str, wheel: bool, arguments: list[str]
) -> tuple[bool, str]:
    """Make an environment in a folder and run the tests in it. Return True if none failed, and the result to print."""
    subprocess.run([python, "-m", "venv", *(() if torch else ("--without-pip",)), folder], check=True)
    if reason := fill(folder, torch, transformers) if torch else share_all_but_numpy(folder):
        return True, reason
    sources = [ROOT / "compat", *(() if wheel else (ROOT / "src",))]
    (packages_of(folder) / "ringtile.pth").write_text("".join(f"{path}\n" for path in sources))
    if wheel:
        install = ("install", "--quiet", "--no-index", "--no-deps", "--find-links", ROOT / "dist", "ringtile")
        subprocess.run([folder / "bin/python", "-m", "pip", *install], check=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    version = [folder / "bin/python", "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(version, env=variables, capture_output=True, text=True).stdout.strip()
    if not version:
        return True, "its torch cannot be imported here"
    command = [folder / "bin/python", "-m", "pytest", "-q", "--numprocesses=auto", "--color=no", *arguments]
    if not torch:
        command += ["-W", "ignore:Failed to initialize NumPy"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    lines = (done.stdout.strip() or f"pytest ended with status {done.returncode}").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, "\n".join([f"{version}: {lines[-1].strip('= ')}", *failed])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests on other Pythons and torch versions.")
    parser.add_argument("--python", nargs="+", metavar="X.Y", help="Pythons (default: see PAIRS)")
    parser.add_argument("--torch", nargs="+", metavar="X.Y", help="torch versions (default: see PAIRS)")
    parser.add_argument("--transformers", default="", metavar="X.Y", help="a transformers (default: that of make test)")
    parser.add_argument("--wheel", action="store_true", help="the wheel of dist/ that pip chooses, not the sources")
    parser.add_argument("--without-numpy", action="store_true", help="this interpreter and its torch, without numpy")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments for pytest")
    args = parser.parse_args()
    if args.wheel and args.without_numpy:
        parser.error("--wheel and --without-numpy: an environment without numpy has no pip to install a wheel")
    pairs = [
        (python, torch)
        for python in args.python or dict(PAIRS)
        for torch in args.torch or dict.fromkeys(torch for _, torch in PAIRS)
        if args.python or args.torch or (python, torch) in PAIRS
    ]
    if args.without_numpy:
        pairs = [(f"{sys.version_info[0]}.{sys.version_info[1]}", "")]
    all_passed = True
    print("| Python | torch | tests |\n|---|---|---|", flush=True)
    for version, torch in pairs:
        passed, found = True, f"no Python {version} here"
        if python := sys.executable if args.without_numpy else interpreter(version):
            with tempfile.TemporaryDirectory() as folder:
                default = WITHOUT_NUMPY if args.without_numpy else ()
                passed, found = tested(
                    *(Path(folder, "environment"), python, torch, args.transformers, args.wheel),
                    args.arguments or list(default),
                )
        result, *failed = found.split("\n")
        print(f"| {version} | {torch or 'shared, without numpy'} | {result} |", *failed, sep="\n", flush=True)
        all_passed &= passed
    return 0 if all_passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
