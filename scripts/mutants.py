"""Count the faults that the test suite notices: seed them one at a time and see the tests fail.

    python scripts/mutants.py                  every mutant; exits with 1 if fewer than 95 % are killed
    python scripts/mutants.py --only window    the mutants with "window" in their name or file
    python scripts/mutants.py --list           check that each applies and that its tests exist, print them, run none

tests/mutants.txt lists the mutants. Each replaces a snippet that occurs exactly once in its file (`-` lines) by another
(`+` lines) and names the tests that should fail. `==` lines name the tests of the mutants below them.

Mutants run in copies of the project. Each copy has its own interpreter, which knows no other ringtile. A mutant of
native/ is compiled for one instruction set, the one that most processors run.
"""

from __future__ import annotations

import argparse
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST_KILLED = 0.95
ISA = "neon" if platform.machine().lower() in ("aarch64", "arm64") else "avx2"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "__pycache__")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")


def read_mutants(text: str) -> list[Mutant]:
    found: list[Mutant] = []
    tests: tuple[str, ...] = ()
    file = name = ""
    snippets: dict[str, list[str]] = {}
    previous = ""
    for line in [*text.splitlines(), "@@ "]:
        if name and line.startswith(("@@ ", "== ", "--- ")):
            found.append(Mutant(name, file, "\n".join(snippets["-"]), "\n".join(snippets["+"]), tests))
            name = ""
        if line.startswith("== "):
            tests = (*(tests if previous.startswith("== ") else ()), line[3:])
        elif line.startswith("--- "):
            file = line[4:]
        elif line.startswith("@@ "):
            name, snippets = line[3:], {"-": [], "+": []}
        elif line:
            snippets[line[0]].append(line[1:])
        previous = line
    return found


MUTANTS = read_mutants((ROOT / "tests/mutants.txt").read_text(encoding="utf-8"))


def pytest(python: str | Path, project: Path, *words: str, timeout: float | None = None) -> tuple[int, str]:
    """Pytest's status and output for the sources in a project."""
    variables = {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1", "RINGTILE_HYPOTHESIS": "unshrunk"}
    if (project / "native-build").exists():
        variables["RINGTILE_CPU"] = ISA
    command, env = [python, "-m", "pytest", "-q", *words], {**os.environ, **variables}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=timeout)
    # 1: tests failed; 2: collecting them failed, for example because the mutant does not import; negative: a crash.
    # Anything else, such as 4 for a test that does not exist, says nothing about the mutant.
    if done.returncode > 2:
        raise SystemExit(f"pytest stopped with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode, done.stdout


def complaints(mutants: list[Mutant]) -> list[str]:
    """Why mutants do not apply, one line each."""
    found = []
    for mutant in mutants:
        source = ROOT / mutant.file
        times = source.read_text(encoding="utf-8").count(mutant.old) if mutant.old and source.exists() else 0
        if times != 1:
            found.append(f"{mutant.name}: its snippet occurs {times} times in {mutant.file}, expected once")
        if mutant.old == mutant.new:
            found.append(f"{mutant.name}: changes nothing")
    names = [mutant.name for mutant in MUTANTS]
    return found + [f"{name}: named twice" for name in sorted(set(names)) if names.count(name) > 1]


def collect(mutants: list[Mutant]) -> None:
    """Stop if a test that a mutant names does not exist."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    status, output = pytest(sys.executable, ROOT, "--collect-only", *tests)
    if status:
        raise SystemExit(f"the tests of the mutants cannot be collected:\n{output}")


def compile_native(project: Path, *targets: str) -> None:
    for target in targets:
        command = ["cmake", "--build", str(project / "native-build"), "--parallel", "2", "--target", target]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{target} does not compile:\n{done.stdout}{done.stderr}")


def prepare(project: Path, native: bool) -> None:
    """Copy the project and make an interpreter for it."""
    shutil.copytree(ROOT, project, ignore=NOT_COPIED)
    venv.create(project / ".venv", symlinks=True)
    (packages,) = (project / ".venv").glob("lib/*/site-packages")
    # Path files in these folders are not read, so an editable install of ringtile among them does not count.
    paths = [project / "src", project / "compat", *(path for path in sys.path if path.endswith("-packages"))]
    packages.joinpath("project.pth").write_text("".join(f"{path}\n" for path in paths))
    if native:
        configure = ["cmake", "-S", project, "-B", project / "native-build", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        compile_native(project, "ringtile")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python_of(project), "-c", "import ringtile; print(ringtile.__file__)"]
    found = subprocess.run(command, cwd="/", env=variables, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_relative_to(project):
        raise SystemExit(f"the tests would see {found}, expected a file in {project}")


def python_of(project: Path) -> Path:
    return project / ".venv/bin/python"


def failure_of(project: Path, tests: tuple[str, ...], timeout: float | None) -> str | None:
    """What pytest says of some tests against the sources in a copy of the project, None if they pass."""
    try:
        status, output = pytest(python_of(project), project, "-x", *tests, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"no end after {timeout:.0f} s"
    if not status and " passed" not in output:
        raise SystemExit(f"no test of {' '.join(tests)} runs here:\n{output}")
    return output if status else None


def baseline(project: Path, tests: tuple[str, ...]) -> float:
    """The seconds that some tests take on the unchanged sources, which they must pass."""
    start = time.perf_counter()
    failure = failure_of(project, tests, timeout=None)
    if failure is not None:
        raise SystemExit(f"{failure}\nthe unchanged sources fail {' '.join(tests)}: no mutant can be judged")
    return time.perf_counter() - start


def is_killed(project: Path, mutant: Mutant, timeout: float) -> bool:
    source, library = project / mutant.file, project / "src/ringtile/lib"
    original, before = source.read_text(encoding="utf-8"), project / "native-build/unchanged"
    source.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if mutant.is_native:
            shutil.copytree(library, before, dirs_exist_ok=True)
            compile_native(project, f"kernels_{ISA}")
            # The other instruction sets keep the unchanged source: their objects are made to look new.
            for unused in project.glob("native-build/CMakeFiles/kernels_*/**/*.o"):
                unused.touch()
            compile_native(project, "ringtile")
        return failure_of(project, mutant.tests, timeout) is not None
    finally:
        source.write_text(original, encoding="utf-8")
        if mutant.is_native:
            shutil.copytree(before, library, dirs_exist_ok=True)


def judge(mutants: list[Mutant], processes: int) -> dict[str, bool]:
    """Map the name of each mutant to True if it is killed."""
    copies: queue.Queue[Path] = queue.Queue()

    @contextmanager
    def a_copy() -> Iterator[Path]:
        project = copies.get()
        try:
            yield project
        finally:
            copies.put(project)

    def seconds_of(tests: tuple[str, ...]) -> float:
        with a_copy() as project:
            return baseline(project, tests)

    def verdict(mutant: Mutant) -> bool:
        start = time.perf_counter()
        with a_copy() as project:
            killed = is_killed(project, mutant, timeout=60 + 4 * seconds[mutant.tests])
        seconds_taken = time.perf_counter() - start
        print(f"{'killed  ' if killed else 'SURVIVED'} {seconds_taken:5.0f} s  {mutant.name}", flush=True)
        return killed

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for number in range(processes):
            prepare(Path(folder, str(number)), any(mutant.is_native for mutant in mutants))
            copies.put(Path(folder, str(number)))
        selections = sorted({mutant.tests for mutant in mutants})
        seconds = dict(zip(selections, pool.map(seconds_of, selections), strict=True))
        return dict(zip([mutant.name for mutant in mutants], pool.map(verdict, mutants), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Seed faults and see the tests fail.", allow_abbrev=False)
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants with TEXT in their name or file")
    parser.add_argument("--list", action="store_true", help="check mutants and tests, print the mutants, run none")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time (default: 2)")
    args = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name or args.only in mutant.file]
    if not mutants:
        print(f"no mutant has {args.only!r} in its name or file", file=sys.stderr)
        return 2
    if broken := complaints(mutants):
        print("\n".join(broken), file=sys.stderr)
        return 2
    if args.list:
        collect(mutants)
        for mutant in mutants:
            print(f"{mutant.file:44} {mutant.name}")
        return 0
    killed = judge(mutants, args.processes)
    survivors = [name for name, dead in killed.items() if not dead]
    rate = 1 - len(survivors) / len(killed)
    native = sum(mutant.is_native for mutant in mutants)
    print(f"\n{len(killed)} mutants judged, {native} of them native; {len(killed) - len(survivors)} killed, {rate:.1%}")
    for name in survivors:
        print(f"survived: {name}")
    return 0 if rate >= LEAST_KILLED else 1


if __name__ == "__main__":
    raise SystemExit(main())
