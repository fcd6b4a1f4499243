"""The linter and the type checker, as tests, so that one command runs every check."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import draw
import mutants

ROOT = mutants.ROOT
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def output_of(*command: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_ruff() -> None:
    status, output = output_of("-m", "ruff", "check", "src", "compat", "demo", "tests", "scripts", "benchmarks")
    assert status == 0, output


TYPED = """
import ringtile
from torch import Tensor

def attend(x: Tensor, flag: bool) -> None:
    y: Tensor = ringtile.sparse_attention(x, x, x, is_causal=True, scale=0.5)
    y = ringtile.dilated_attention(x, x, x, [8], [1], overlap="union")
    y, lse = ringtile.sparse_attention(x, x, x, return_lse=True)
    y, lse = ringtile.dilated_attention(x, x, x, [8], [1], return_lse=True)
    for either in (
        ringtile.sparse_attention(x, x, x, return_lse=flag),
        ringtile.dilated_attention(x, x, x, [8], [1], return_lse=flag),
    ):
        y = either if isinstance(either, Tensor) else either[0]
    ringtile.sparse_attention(x, x, x, softcap="much")
    ringtile.dilated_attention(x, x, x, [8], [1], sinks=x)
"""


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in re.findall(r"^torch==(\S+)$", CONSTRAINTS, re.M),
    reason="types are checked against the torch that constraints.txt pins, another one annotates other things",
)
def test_mypy_strict_passes_but_for_a_program_with_two_wrong_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    # One run, because mypy takes seconds to read the types of torch.
    _, output = output_of("-m", "mypy", "--strict", "src", "compat", "demo", str(program))
    wrong = [number for number, line in enumerate(TYPED.splitlines(), 1) if "much" in line or "sinks" in line]
    found = re.findall(r"^.*: error:", output, re.M)
    assert len(wrong) == 2
    assert {re.sub(r".*program\.py:(\d+): error:", r"\1", line) for line in found} == {str(n) for n in wrong}, output


@pytest.mark.skipif(version("transformers").startswith("5.5."), reason="mutants name tests of newer models")
def test_the_mutants_still_apply_and_their_tests_exist(request: pytest.FixtureRequest) -> None:
    assert mutants.complaints(mutants.MUTANTS) == []
    # This session has collected them if it runs the whole suite. Otherwise, a process does.
    names = mutants.names_of(f"{item.parent.nodeid}::{item.name}" for item in request.session.items)
    mutants.collect([mutant for mutant in mutants.MUTANTS if not names.issuperset(mutant.tests)])


def test_a_mutant_is_judged_by_its_own_sources() -> None:
    """An editable install must not shadow the mutated copy: this mutant dies in the first test that it meets."""
    status, output = output_of("scripts/mutants.py", "--only", "causal sees one key ahead", "--processes", "1")
    assert (status, "1 mutants judged, 0 of them native; 1 killed" in output) == (0, True), output


def test_drawn_faults_are_programs_and_the_same_every_time() -> None:
    faults = draw.draw(20, 3)
    assert faults == draw.draw(20, 3)
    for fault in faults:
        lines = (ROOT / fault.file).read_text(encoding="utf-8").split("\n")
        assert lines[fault.number - 1] == fault.old != fault.new
        ast.parse(fault.applied("\n".join(lines)))


def test_the_kernel_is_left_out_if_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def build(directory: str, settings: dict[str, str] | None, metadata: str | None) -> str:
        calls.append((directory, settings, metadata))
        if (settings or {}).get("wheel.cmake") != "false" or directory == "never":
            raise SystemExit(1)
        return "pure.whl"

    hooks = types.ModuleType("scikit_build_core.build")
    hooks.build_wheel = hooks.build_editable = build
    hooks.prepare_metadata_for_build_wheel = hooks.build_sdist = print
    package = types.ModuleType("scikit_build_core")
    package.build = hooks
    for module in (package, hooks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    system = settings["build-system"]
    (folder,) = system["backend-path"]
    spec = importlib.util.spec_from_file_location("backend", ROOT / folder / f"{system['build-backend']}.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    assert backend.prepare_metadata_for_build_wheel is print
    for hook in (backend.build_wheel, backend.build_editable):
        calls.clear()
        assert hook("dist", {"a": "b"}, "metadata") == "pure.whl"
        # A wheel without the kernel has another tag than its metadata.
        assert calls == [("dist", {"a": "b"}, "metadata"), ("dist", {"a": "b", "wheel.cmake": "false"}, None)]
        calls.clear()
        assert hook("dist", {"wheel.cmake": "false"}, "metadata") == "pure.whl"
        assert len(calls) == 1
        with pytest.raises(SystemExit):
            hook("never", {"wheel.cmake": "false"})


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M)) | {".venv/ready-dev"}
    assert {word for line in re.findall(r"make ((?:[a-z./-]+ ?)+)", commands) for word in line.split()} <= targets
    assert [name for name in re.findall(r"(?:scripts|tests)/\w+\.py", commands) if not (ROOT / name).exists()] == []
