"""The programs in examples/ run, at small sizes, and each has a how-to page that shows it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_window_is_trained_and_its_model_continues_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, model = tmp_path / "text.txt", str(tmp_path / "model.pt")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    small = ["--context", "256", "--window", "32"]
    # An untrained model needs 8 bits per byte.
    assert example("train_window").main([str(text), *small, "--steps", "5", "--save", model]) < 7
    made = example("generate").main([model, "--bytes", "30", "--prompt", "the quick brown fox"])
    assert len(made) == 30
    # The window keeps 32 keys before the query and the query's own; 4 tokens are global.
    assert "48 tokens seen, 37 keys per layer kept" in capsys.readouterr().out


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(SystemExit, match="the text has 5 bytes: too few for --context 256"):
        example("train_window").main([str(tmp_path / "text.txt"), "--context", "256"])


def test_longnet_trains_on_the_manual() -> None:
    assert example("longnet").main(["--context", "256", "--steps", "5"]) < 7


def test_a_custom_rule_equals_a_dense_mask() -> None:
    assert example("custom_rule").main(["--side", "20", "--radius", "2"]) < 1e-5


def test_packed_documents_equal_separate_ones() -> None:
    assert example("pack_documents").main(["--tokens", "600", "--steps", "5"]) < 1e-4


def test_ranks_share_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "512", "--window", "64", "--steps", "5"]
    assert example("train_ranks").main(words) < 7
    alone = re.findall(r"^(step \d: .*) bits", capsys.readouterr().out, re.M)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "train_ranks.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(alone) == 5
    assert re.findall(r"^(step \d: .*) bits", done.stdout, re.M) == alone


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_shown_on_a_page_and_run_here(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "how-to").glob("*.md")]
    assert any(f'--8<-- "examples/{name}.py"' in page for page in pages)
    assert f'example("{name}").main(' in Path(__file__).read_text(encoding="utf-8")
