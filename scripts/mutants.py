"""Count the faults that the test suite notices: seed them one at a time and see the tests fail.

    python scripts/mutants.py                  every mutant; exits with 1 if fewer than 95% are killed
    python scripts/mutants.py --only window    the mutants with "window" in their name or file
    python scripts/mutants.py --list           check that each applies and that its tests exist, print them, run none

tests/mutants.txt lists the mutants. Each replaces a snippet that occurs exactly once in its file (`-` lines) by another
(`+` lines) and names the tests that should fail. `==` lines name the tests of the mutants below them.

Mutants run in copies of the project. Each copy has its own interpreter, which cannot import another ringtile. Mutants
of native/ need cmake and a compiler. Their copies compile one instruction set, avx2, or neon on ARM, and the emulation
of AMX. Mutants of its files need a processor with AVX-512, and are left out elsewhere.
"""

from __future__ import annotations

import argparse
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST_KILLED = 0.95
ARM = platform.machine().lower() in ("aarch64", "arm64")
PROCESSOR = Path("/proc/cpuinfo")
EMULATES_AMX = PROCESSOR.exists() and " avx512vl " in PROCESSOR.read_text(encoding="utf-8")
# The emulation calls avx512, which is linked but not listed: it would come before avx2.
SETS, TABLE = ("neon", "{ENTRY(neon)};") if ARM else ("avx2 avx512", "{ENTRY(avx2) EMULATED};")
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

    @property
    def runs_here(self) -> bool:
        return EMULATES_AMX or not (self.is_native and "amx" in self.file)


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
    names, changes = [mutant.name for mutant in MUTANTS], [mutant[1:4] for mutant in MUTANTS]
    found += [f"{name}: named twice" for name in sorted(set(names)) if names.count(name) > 1]
    return found + [f"{mutant.name}: listed twice" for mutant in mutants if changes.count(mutant[1:4]) > 1]


def tests_of(mutants: list[Mutant]) -> list[str]:
    return sorted({test for mutant in mutants for test in mutant.tests})


def names_of(tests: Iterable[str]) -> set[str]:
    """The names of tests, and those of their functions and files."""
    return {name for test in tests for name in (test, test.partition("[")[0], test.partition("::")[0])}


def collect(mutants: list[Mutant]) -> None:
    """Stop if a test that a mutant names does not exist, or is slow: those that judge a mutant leave it out."""
    if tests := tests_of(mutants):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *tests]
        variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'compat'}"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if lacking := sorted({*tests} - names_of(done.stdout.splitlines())):
            told = f"not in the quick suite: {', '.join(lacking)}\n{done.stdout}{done.stderr}"
            raise SystemExit(f"tests of the mutants are {told}")


# Importing torch takes longer than most of the tests, so one process imports it and forks a child for each mutant. A
# mutant writes no bytecode: Python would mistake it for the original if both are written within the same second.
SERVER = """
import os, signal, sys
import pytest, torch
for line in sys.stdin:
    seconds, *words = line.rstrip().split("\\t")
    child = os.fork()
    if not child:
        signal.alarm(int(seconds))
        sys.dont_write_bytecode = seconds != "0"
        output = os.open("output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        status = pytest.main(["-q", "-x", *words])
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Copy:
    """A copy of the project with its own interpreter, and its own native library if mutants need one."""

    def __init__(self, folder: Path, native: bool) -> None:
        self.folder, self.library = folder, folder / "src/ringtile/lib"
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        venv.create(folder / ".venv", symlinks=True)
        self.python = folder / ".venv/bin/python"
        (packages,) = (folder / ".venv").glob("lib/*/site-packages")
        # Path files in these folders are not read, so an editable install of ringtile among them does not count.
        paths = [folder / "src", folder / "compat", *(path for path in sys.path if path.endswith("-packages"))]
        packages.joinpath("project.pth").write_text("".join(f"{path}\n" for path in paths))
        if native:
            # Few instruction sets, which takes seconds instead of minutes.
            self.edit("CMakeLists.txt", r"(set\(instruction_sets) .*", rf"\1 {SETS})")
            self.edit("CMakeLists.txt", r"(set\(tile_sets) .*", r"\1)")
            self.edit("native/dispatch.cpp", r"(all\[\] =) .*", rf"\1 {TABLE}")
            fast = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0", f"-DRINGTILE_EMULATE_AMX={EMULATES_AMX}")
            self.run("cmake", "-S", folder, "-B", folder / "native-build", *fast)
            self.build()
        found = Path(self.run(self.python, "-c", "import ringtile; print(ringtile.__file__)").strip())
        if not found.is_relative_to(folder):
            raise SystemExit(f"the tests would see {found}, expected a file in {folder}")
        sources = f"{folder / 'src'}{os.pathsep}{folder / 'compat'}"
        variables = {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "RINGTILE_HYPOTHESIS": "unshrunk"}
        self.server = subprocess.Popen(
            [self.python, "-c", SERVER],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def edit(self, file: str, pattern: str, replacement: str) -> None:
        path = self.folder / file
        text, count = re.subn(pattern, replacement, path.read_text(encoding="utf-8"))
        if not count:
            raise SystemExit(f"{file}: expected {pattern}")
        path.write_text(text, encoding="utf-8")

    def run(self, *command: object) -> str:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([str(word) for word in command], cwd="/", env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.args} stopped with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def build(self) -> None:
        self.run("cmake", "--build", self.folder / "native-build", "--target", "ringtile")

    def failure_of(self, tests: Iterable[str], seconds: int = 0) -> str:
        """Return pytest's output if a test fails or does not end in so many seconds, an empty string if all pass."""
        asked, answers = self.server.stdin, self.server.stdout
        print(seconds, *tests, sep="\t", file=asked, flush=True)
        status = int(answers.readline())
        output = (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        # 1: tests failed; 2: collecting them failed, for example because the mutant does not import; negative: a crash
        # or no end. Anything else, such as 4 for a test that does not exist, says nothing about the mutant.
        if status > 2 or (status == 0 and " passed" not in output):
            raise SystemExit(f"pytest stopped with status {status}, expected tests that run:\n{output}")
        return f"status {status}\n{output}" if status else ""

    @contextmanager
    def changed(self, file: str, change: Callable[[str], str]) -> Iterator[None]:
        """A context in which a file of the copy has another text."""
        source = self.folder / file
        original = source.read_text(encoding="utf-8")
        source.write_text(change(original), encoding="utf-8")
        try:
            yield
        finally:
            source.write_text(original, encoding="utf-8")

    def kills(self, mutant: Mutant, seconds: int) -> bool:
        before = self.folder / "native-build/unchanged"
        with self.changed(mutant.file, lambda text: text.replace(mutant.old, mutant.new)):
            try:
                if mutant.is_native:
                    shutil.copytree(self.library, before, dirs_exist_ok=True)
                    self.build()
                return bool(self.failure_of(mutant.tests, seconds))
            finally:
                if mutant.is_native:
                    shutil.copytree(before, self.library, dirs_exist_ok=True)


def judge(mutants: list[Mutant], processes: int) -> list[str]:
    """Return the names of the survivors."""
    copies: queue.Queue[Copy] = queue.Queue()
    native = any(mutant.is_native for mutant in mutants)

    def survives(mutant: Mutant) -> bool:
        copy, start = copies.get(), time.perf_counter()
        try:
            killed = copy.kills(mutant, limit)
        finally:
            copies.put(copy)
        print(f"{'killed  ' if killed else 'SURVIVED'} {time.perf_counter() - start:5.0f} s  {mutant.name}", flush=True)
        return not killed

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        made = list(pool.map(lambda number: Copy(Path(folder, str(number)), native), range(processes)))
        for copy in made:
            copies.put(copy)
        start, tests = time.perf_counter(), tests_of(mutants)
        shares = [tests[number::processes] for number in range(min(processes, len(tests)))]
        for failure in pool.map(Copy.failure_of, made, shares):
            if failure:
                raise SystemExit(f"{failure}\nthe unchanged sources fail a test: no mutant can be judged")
        limit = 60 + round(time.perf_counter() - start)
        print(f"the unchanged sources pass all tests in {limit - 60} s", flush=True)
        survivors = [mutant.name for mutant, lives in zip(mutants, pool.map(survives, mutants), strict=True) if lives]
        for copy in made:
            copy.server.terminate()
    return survivors


def main() -> int:
    assert __doc__
    about, *more = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=more[-1], allow_abbrev=False)
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
    if left_out := [mutant for mutant in mutants if not mutant.runs_here]:
        print(f"{len(left_out)} mutants of the emulation of AMX are left out: this processor lacks AVX-512", flush=True)
        mutants = [mutant for mutant in mutants if mutant.runs_here]
    survivors = judge(mutants, args.processes)
    killed, native = len(mutants) - len(survivors), sum(mutant.is_native for mutant in mutants)
    rate = killed / len(mutants)
    print(f"\n{len(mutants)} mutants judged, {native} of them native; {killed} killed, {rate:.1%}")
    for name in survivors:
        print(f"survived: {name}")
    return 0 if rate >= LEAST_KILLED else 1


if __name__ == "__main__":
    raise SystemExit(main())
