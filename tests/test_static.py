"""The linter and the type checker, as tests, so that one command runs every check."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def output_of(*command: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_ruff() -> None:
    status, output = output_of("-m", "ruff", "check", "src", "tests", "scripts", "benchmarks")
    assert status == 0, output


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in re.findall(r"^torch==(\S+)$", CONSTRAINTS, re.M),
    reason="types are checked against the torch that constraints.txt pins, another one annotates other things",
)
def test_mypy_strict() -> None:
    status, output = output_of("-m", "mypy", "--strict", "src")
    assert status == 0, output


def test_the_mutants_still_apply() -> None:
    status, output = output_of("scripts/mutants.py", "--list")
    assert status == 0, output
