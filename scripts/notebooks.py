"""Run the notebooks of docs/notebooks and write what their cells print: python scripts/notebooks.py

A cell shows what it prints, so they need no Jupyter to run. Numbers may differ a little between machines.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def text(notebook: dict[str, Any]) -> str:
    """The file of a notebook."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def shown(cell: dict[str, Any]) -> str:
    """What a notebook says that a cell prints."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """Run the cells of a notebook in order, in one namespace, and return what each prints."""
    names: dict[str, object] = {"__name__": "__main__"}
    told = []
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        told.append(printed.getvalue())
    return told


def filled(notebook: dict[str, Any], told: list[str]) -> dict[str, Any]:
    """The notebook with what its cells print."""
    prints = iter(told)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = next(prints).splitlines(keepends=True)
            cell["execution_count"] = None
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = read(path)
        path.write_text(text(filled(notebook, run(notebook, path.name))), encoding="utf-8")
        print(f"ran {path}")
