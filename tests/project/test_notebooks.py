"""The notebooks of the documentation run, and print what they show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d,]*\.?\d*")
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
assert spec is not None
assert spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)


def difference(told: str, shown: str) -> str:
    """Where what a cell prints is not what the notebook shows; numbers may differ as between machines."""
    if NUMBER.sub("#", told) != NUMBER.sub("#", shown):
        return f"printed {told!r}, shown {shown!r}"
    for found, expected in zip(NUMBER.findall(told), NUMBER.findall(shown), strict=True):
        exact = "." not in expected
        if found != expected and (exact or abs(float(found) - float(expected)) > 0.1):
            return f"printed {found}, shown {expected}"
    return ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_prints_what_it_shows(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = notebooks.read(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    threads = torch.get_num_threads()
    told = notebooks.run(notebook, path.name)
    assert torch.get_num_threads() == threads
    assert [difference(*pair) for pair in zip(told, map(notebooks.shown, cells), strict=True)] == [""] * len(cells)
    assert sum(map(bool, told)) > 5


def test_notebooks_are_in_their_own_format() -> None:

    for path in NOTEBOOKS:
        notebook = notebooks.read(path)
        assert path.read_text(encoding="utf-8") == notebooks.text(notebook), "run python scripts/notebooks.py"
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            for link in re.findall(r"\]\(([^)#]+)\)", source if cell["cell_type"] == "markdown" else ""):
                assert (path.parent / link).is_file(), link
