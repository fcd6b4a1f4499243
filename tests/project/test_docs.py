"""What the documentation shows works: doctests, README snippets, commands, notebooks."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from test_release import script
from tiny import DECODER, ENCODER, hf

import dilated_attention_pytorch
import ringtile
from ringtile import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = [
    name
    for package in (ringtile, dilated_attention_pytorch)
    for name in (
        package.__name__,
        *(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
]
MODULES.remove("ringtile.__main__")
SPELLED = (".md", ".ipynb", ".py", ".cpp", ".h", ".toml", ".yml")
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]


def snippets(text: str, *languages: str) -> list[str]:
    """The contents of the fenced code blocks in some languages."""
    return [body for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S) if language in languages]


def commands(text: str) -> list[str]:
    """The shell commands of a page, without prompts, continued lines joined."""
    lines = "\n".join(snippets(text, "sh", "bash", "shell", "console")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.startswith("#")]


def ringtile_arguments(text: str) -> list[list[str]]:
    """The words after ``ringtile`` of each of a page's commands that calls it."""
    words = [shlex.split(line, comments=True) for line in commands(text)]
    return [line[1:] for line in words if line and Path(line[0]).name == "ringtile"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", [name for name, thing in vars(ringtile).items() if callable(thing) and name[0] != "_"])
def test_every_name_on_the_face_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(ringtile, name).__doc__ or "")


def test_readme_snippets_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # What a reader has on disk.
    hf.MistralForCausalLM(hf.MistralConfig(**DECODER)).save_pretrained("path/to/model")
    hf.ModernBertModel(hf.ModernBertConfig(**ENCODER, local_attention=16)).save_pretrained("path/to/encoder")
    found = snippets(README, "python")
    assert len(found) == 4
    names: dict[str, object] = {"__name__": "readme"}
    for number, snippet in enumerate(found):
        exec(compile(snippet, f"README snippet {number}", "exec"), names)


def test_readme_names_both_make_commands_and_each_make_target_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    used = {line.split()[1] for line in commands(README) if line.startswith("make ")}
    assert {"demo", "test"} <= used <= targets


def test_links_of_every_page_in_the_root_lead_to_files() -> None:
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
        assert [link for link in links if not link.startswith("https:") and not (ROOT / link).is_file()] == [], page


def test_spelling(tmp_path: Path) -> None:
    pytest.importorskip("codespell_lib", reason="codespell is not installed: the dev extra has it")
    folders = ("docs", "src", "compat", "demo", "scripts", "examples", "benchmarks", "native", ".github")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SPELLED]
    texts += [path for path in ROOT.iterdir() if path.suffix in (".md", ".cff", ".toml", ".yml")]
    wrong = tmp_path / "wrong.md"
    wrong.write_text("A sentance.\n")
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml"), *map(str, texts)]
    done = subprocess.run([*command, str(wrong)], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{wrong}:1: sentance ==> sentence\n", done.stdout + done.stderr
    assert len(texts) > 300


def parsing_status(arguments: list[str]) -> object:
    try:
        cli.parse(arguments)
    except SystemExit as stopped:
        return stopped.code
    return 0


@pytest.mark.parametrize("page", PAGES)
def test_every_ringtile_command_on_a_page_parses(page: str) -> None:
    for arguments in ringtile_arguments((ROOT / page).read_text(encoding="utf-8")):
        assert parsing_status(arguments) == 0, f"ringtile {shlex.join(arguments)} does not parse"


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ringtile.__version__ == project["version"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d,]*\.?\d*")
notebooks = script("scripts/notebooks.py")


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
