"""A hook of mkdocs: a line ``<!-- ringtile VERB --help -->`` becomes the help text of that command."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any
from unittest import mock

from ringtile import cli

HELP = re.compile(r"^<!-- ringtile (\w+) --help -->$", re.M)


def help_text(verb: str) -> str:
    printed = io.StringIO()
    with mock.patch.dict("os.environ", {"COLUMNS": "82", "NO_COLOR": "1"}), contextlib.redirect_stdout(printed):
        with contextlib.suppress(SystemExit):
            cli.parse([verb, "--help"])
    return printed.getvalue()


def on_page_markdown(markdown: str, **_: Any) -> str:
    return HELP.sub(lambda found: f"```text\n{help_text(found[1])}```", markdown)
