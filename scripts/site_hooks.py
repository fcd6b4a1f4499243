"""A hook of mkdocs: the help texts of the commands, and what search finds first or not at all.

A line ``<!-- ringtile VERB --help -->`` becomes the help text of that command.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any
from unittest import mock

from ringtile import cli

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


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    name = page.file.src_uri if page else ""
    if name in SEARCH:
        page.meta["search"] = SEARCH[name]
    if name in NOT_FOUND:
        found, heading, left_out = markdown.partition(NOT_FOUND[name])
        markdown = found + re.sub(r"^(##+ .+)$", r"\1 { data-search-exclude }", heading + left_out, flags=re.M)
    return HELP.sub(lambda found: f"```text\n{help_text(found[1])}```", markdown)
