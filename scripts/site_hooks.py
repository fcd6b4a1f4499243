"""Hooks of mkdocs: the help texts of the commands, notebooks as pages, and what search finds first or not at all.

A line ``<!-- ringtile VERB --help -->`` becomes the help text of that command.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ringtile import cli

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

HELP = re.compile(r"^<!-- ringtile (\w+) --help -->$", re.M)
SEARCH = {"questions.md": {"boost": 3}, "promises.md": {"exclude": True}}
"""Settings of the search plugin by page. In front matter, they would show where the pages are read as they are."""
NOT_FOUND = {"benchmarks.md": "## The tables of the five documents"}
"""The heading of a page from which search does not find its sections: figures of other code."""


def help_text(verb: str) -> str:
    printed = io.StringIO()
    with mock.patch.dict("os.environ", {"COLUMNS": "82", "NO_COLOR": "1"}), contextlib.redirect_stdout(printed):
        with contextlib.suppress(SystemExit):
            cli.parse([verb, "--help"])
    return printed.getvalue()


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook and what they print, as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        if told := "".join("".join(output["text"]) for output in cell.get("outputs", ())):
            parts.append(f"```text\n{told}```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = notebook_page(json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8")))
        files.remove(file)
        files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    name = page.file.src_uri if page else ""
    if name in SEARCH:
        page.meta["search"] = SEARCH[name]
    if name in NOT_FOUND:
        found, heading, left_out = markdown.partition(NOT_FOUND[name])
        markdown = found + re.sub(r"^(##+ .+)$", r"\1 { data-search-exclude }", heading + left_out, flags=re.M)
    markdown = re.sub(r"\]\(([^)\s]+)\.ipynb\)", r"](\1.md)", markdown)
    return HELP.sub(lambda found: f"```text\n{help_text(found[1])}```", markdown)
