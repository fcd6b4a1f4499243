"""What a release needs: stable names, README on an index, metadata without a compiler, versions of the site."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringtile.patterns.tested import TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@cache
def script(path: str) -> ModuleType:
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_promised_name_is_gone() -> None:
    made = script("scripts/stable_names.py")
    promised = made.listed(made.LIST.read_text(encoding="utf-8"))
    assert made.broken(promised, made.found()) == []
    assert {"ringtile.sparse_attention", "ringtile.patterns.Window", "$ ringtile show"} <= set(promised)
    assert made.text(promised) == made.LIST.read_text(encoding="utf-8")


def test_the_list_has_every_name_of_the_faces() -> None:
    made = script("scripts/stable_names.py")
    names = made.found()
    for face in ("ringtile", "ringtile.patterns", "ringtile.adaptive", "ringtile.distributed", "ringtile.modules"):
        module = importlib.import_module(face)
        public = {name for name, thing in vars(module).items() if callable(thing) and name[0] != "_"}
        assert {f"{face}.{name}" for name in public} <= set(names)
    assert names["ringtile.patterns.Window"] == "(left, right=)"
    assert names["ringtile.merge_attention"] == "(outs, lses)"
    assert names["ringtile.sparse_attention"].startswith("(query, key, value, pattern=, *, is_causal=, ")


@pytest.mark.parametrize(
    ("today", "told"),
    [
        ({}, "f is gone"),
        ({"g": "(a, b=, *, c=)"}, "f is gone"),
        ({"f": "(a, c=, *, b=)"}, "f: parameters by place were a, b, are a, c"),
        ({"f": "(a, *, b=, c=)"}, "f: parameters by place were a, b, are a"),
        ({"f": "(a/, b=, *, c=)"}, "f: parameters by place were a, b, are a/, b"),
        ({"f": "(a, b=, *, d=)"}, "f: without c"),
        ({"f": "(a, b=, *, c)"}, "f: needs c"),
        ({"f": "(a, b=, *, c=, d)"}, "f: needs d"),
    ],
)
def test_what_breaks_a_program_is_named(today: dict[str, str], told: str) -> None:
    assert script("scripts/stable_names.py").broken({"f": "(a, b=, *, c=)"}, today) == [told]


def test_adding_is_free_and_open_parameters_stay() -> None:
    broken = script("scripts/stable_names.py").broken
    promised = {"f": "(a, b=, *, c=)", "g": ""}
    assert broken(promised, {"f": "(a, b=, d=, *, c=, e=, **more)", "g": "(x)", "h": ""}) == []
    assert broken(promised, {"f": "(a, b=, c=)", "g": ""}) == []
    assert broken({"f": "(a, **options)"}, {"f": "(a)"}) == ["f: without **options"]


def test_the_address_of_the_repository_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("native/index_readme.py").dynamic_metadata
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nversion = "1.2.3"\nurls.Repository = "https://example.org/o/r"\n')
    found = made("readme", {})
    assert found["content-type"] == "text/markdown"
    assert re.findall(r"\]\((?!https:|#)", found["text"]) == []
    assert "(https://example.org/o/r/blob/v1.2.3/CITATION.cff)" in found["text"]
    assert "(https://example.org/o/r/raw/v1.2.3/docs/assets/speed.png)" in found["text"]
    project.write_text('[project]\nversion = "1.2.3"\n')
    text = made("readme", {})["text"]
    assert "](docs/" not in text
    assert "![" not in text
    assert "CITATION.cff" in text
    with pytest.raises(ValueError, match="expected the field 'readme'"):
        made("version", {})


METADATA = """
import sys
sys.path.insert(0, "native")
import build_backend
print(build_backend.prepare_metadata_for_build_wheel(sys.argv[1]))
"""


def test_metadata_is_read_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="the build backend: the dev extra has it")
    # Programs that a build would call. Each leaves a trace, unless it is asked for its version.
    answer = 'case "$*" in *version*) echo cmake version 3.31.0; exit 0;; *capabilities*) exit 1;; esac'
    for name in ("cmake", "c++", "g++", "gcc", "cc", "clang", "ninja", "make"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\n{answer}\necho {name} "$@" >> {tmp_path}/called\nexit 1\n')
        program.chmod(0o755)
    command = [sys.executable, "-c", METADATA, str(tmp_path / "made")]
    environment = {**os.environ, "PATH": str(tmp_path / "bin")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (about,) = (tmp_path / "made").glob("*.dist-info/METADATA")
    text = about.read_text(encoding="utf-8")
    assert f"Version: {PROJECT['version']}\n" in text
    assert "Requires-Dist: torch>=2.11\n" in text
    assert "# ringtile\n" in text
    assert not (tmp_path / "called").exists(), (tmp_path / "called").read_text()


def test_every_text_names_the_pythons_that_the_tests_run_on() -> None:
    told = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)
    assert told[0] == PROJECT["requires-python"].removeprefix(">=")
    suite, _, newest = (ROOT / ".github/workflows/tests.yml").read_text().partition("  newest:\n")
    assert set(re.findall(r'python: "(3\.\d+)"', suite)) == set(told)
    assert {python for python, _, _ in script("scripts/matrix.py").RUNS} == set(told)
    assert set(TESTED["python"]) <= set(told)
    named = re.compile(r"(?<![\d.])3\.1\d(?!\.?\d)")
    assert set(named.findall((ROOT / "README.md").read_text(encoding="utf-8"))) == set(told)
    # What no page promises may fail.
    job = newest.partition("\n\n")[0]
    assert "continue-on-error: true" in job
    assert re.findall(r'"(3[\d.t]+)"', job) == [told[-1], "3.14", "3.14t"]
    untested = script("scripts/release.py").untested
    assert untested([f"Python :: {name}" for name in (*TESTED["python"], "3.99")]) == ["3.99"]


def test_the_runs_have_the_ends_of_what_is_installed() -> None:
    matrix = script("scripts/matrix.py")
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert matrix.PINNED == ("3.11", pins["torch"], pins["transformers"])
    oldest = [re.search(r">=([\d.]+)", text) for text in (PROJECT["dependencies"][0], *EXTRAS["transformers"])]
    _, *columns = zip(*matrix.RUNS, strict=True)
    for column, lowest in zip(columns, oldest, strict=True):
        assert lowest is not None
        assert min(column, key=matrix.numbers) == lowest[1]


def test_what_was_tested_is_told_alike() -> None:
    matrix = script("scripts/matrix.py")
    entries = json.loads(matrix.RECORD.read_text(encoding="utf-8"))
    assert matrix.package(entries) == matrix.PACKAGE.read_text(encoding="utf-8"), "run python scripts/matrix.py"
    assert matrix.page(entries) == matrix.PAGE.read_text(encoding="utf-8"), "run python scripts/matrix.py"


def test_a_release_has_one_version_and_its_date() -> None:
    problems = script("scripts/release.py").problems
    changes = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n\n- x\n"
    citation = "version: 1.2.0\ndate-released: 2026-01-31\n"
    assert problems("1.2.0", changes, citation) == []
    (told,) = problems("1.2.0", changes.replace("[Unreleased]\n", "[Unreleased]\n\n- y\n"), citation)
    assert "move the lines of Unreleased" in told
    for wrong in (changes.replace("2026-01-31", "unreleased"), changes.replace("1.2.0", "1.1.0")):
        (told,) = problems("1.2.0", wrong, citation)
        assert told.startswith("CHANGELOG.md: expected a section [1.2.0]")
    assert problems("1.2.0", changes, "version: 1.2.0\ndate-released: 2026-02-01\n") == [
        "CITATION.cff: expected date-released: 2026-01-31"
    ]
    assert problems("1.2.0", changes, citation.replace("1.2.0", "1.1.0")) == ["CITATION.cff: expected version: 1.2.0"]
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    assert [told for told in problems(PROJECT["version"], *texts) if "Unreleased into" not in told] == []


def test_torch_alone_has_what_torch_needs_and_no_numpy() -> None:
    pytest.importorskip("packaging")
    found = script("scripts/release.py").torch_alone()
    assert {"torch", "sympy", "filelock"} <= found
    assert "numpy" not in found


def test_every_action_is_pinned_and_only_two_jobs_can_write() -> None:
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert set(workflows) == {"docs.yml", "publish.yml", "tests.yml", "wheels.yml"}
    for name, text in workflows.items():
        used = re.findall(r"uses: (\S+)", text)
        assert used
        assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []
        assert "\npermissions:\n  contents: read\n" in text
        writes = re.findall(r"^ +([\w-]+): write$", text, re.M)
        assert writes == {"docs.yml": ["contents"], "publish.yml": ["id-token"]}.get(name, [])
        assert "secrets." not in text
    assert "make release" in workflows["publish.yml"]
    assert "attestations: true" in workflows["publish.yml"]


def test_a_run_is_told_unless_it_failed() -> None:
    matrix = script("scripts/matrix.py")
    run = {"python": "3.11.7", "torch": "2.9.1+cpu", "triton": None, "transformers": "5.24.0", "date": "2026-11-28"}
    run |= {"passed": 4321, "failed": 0, "skipped": 5, "commit": "abc"}
    newer = run | {"torch": "2.14.0", "triton": "3.8.0"}
    entries = matrix.added(matrix.added([], newer), run)
    assert entries == [run, newer]
    again = newer | {"python": "3.11.9", "failed": 1}
    assert matrix.added(entries, again) == [run, again]
    names: dict[str, Any] = {}
    exec(matrix.package(entries), names)
    tested = {"python": ("3.11",), "torch": ("2.9.1", "2.14.0"), "triton": ("3.8.0",), "transformers": ("5.24.0",)}
    assert names["TESTED"] == tested
    exec(matrix.package([run, again]), names)
    assert names["TESTED"] == tested | {"torch": ("2.9.1",), "triton": ()}
    assert "| 3.11 | 2.9.1 | - | 5.24.0 | 4,321 | 0 | 5 | 2026-11-28 |\n" in matrix.page([run, again])


@pytest.mark.parametrize(
    ("said", "status", "counts"),
    [
        ("== 9 passed, 2 skipped, 3 deselected in 1.0s ==", 0, (9, 0, 2)),
        ("== 1 failed, 8 passed, 4 errors in 1.0s ==", 1, (8, 5, 0)),
        # An end without counts is no success.
        ("no tests ran in 0.1s", 5, (0, 1, 0)),
    ],
)
def test_a_run_counts_what_pytest_says(tmp_path: Path, said: str, status: int, counts: tuple[int, ...]) -> None:
    python = tmp_path / "python"
    versions = '{"python": "3.11.7", "torch": "2.9.1", "triton": null, "transformers": "5.24.0", "commit": "abc"}'
    pytest_says = f"printf 'FAILED tests/test_x.py\\n{said}\\n'; exit {status}"
    python.write_text(f"#!/bin/sh\ncase \"$1\" in -c) echo '{versions}';; *) {pytest_says};; esac\n")
    python.chmod(0o755)
    entry, told = script("scripts/matrix.py").tested(python, (), ())
    assert (entry["passed"], entry["failed"], entry["skipped"]) == counts
    assert (entry["torch"], entry["triton"], entry["commit"]) == ("2.9.1", None, "abc")
    assert told == f"{said.strip('= ')}\nFAILED tests/test_x.py"
