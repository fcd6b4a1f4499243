"""Pages of tables and pictures: their parts are data, written as Markdown for docs/ or as one HTML file.

    parts = ["A paragraph with *emphasis* and `code`.", Heading("Times"), Table(["N", "ms"], [["16", "2.5"]])]
    markdown(parts)            a page of docs/
    html("My page", parts)     a file that loads nothing else

A paragraph and a cell are Markdown, of which HTML knows `code` and emphasis. Bars in a cell need no escape.
"""

from __future__ import annotations

import html as escapes
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --soft: #5b636d; --paper: #fff; --line: #d8dce1; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #a3abb5; --paper: #16191d; --line: #3a4149;
  --band: #20252b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.left, td.left { text-align: left; }
td em, p em { color: var(--soft); font-style: normal; }
pre { background: var(--band); padding: 1rem; overflow-x: auto; font-size: .8rem; }
svg { max-width: 100%; height: auto; color: var(--ink); }
"""


class Heading(NamedTuple):
    """A heading. The title of a page has level 1."""

    text: str
    level: int = 2


class Table(NamedTuple):
    """A table. The first ``left`` columns hold text, the others are aligned to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: int = 0


class Code(NamedTuple):
    """Lines that are shown as they are."""

    text: str
    language: str = "text"


class Picture(NamedTuple):
    """A picture: Markdown links to the file, HTML contains the SVG."""

    title: str
    file: str = ""
    svg: str = ""


Part = str | Heading | Table | Code | Picture
"""A part of a page. A text is a paragraph, or several."""


def filled(text: str) -> str:
    """Return a paragraph with lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def table_lines(table: Table) -> list[str]:
    """Return the lines of a table in Markdown.

    >>> table_lines(Table(["pattern", "N"], [["`a | b`", 16]], 1))
    ['| pattern | N |', '|---|---:|', '| <code>a &#124; b</code> | 16 |']
    """
    heads, rows, left = table
    lines = [f"| {' | '.join(heads)} |", f"{'|---' * left}{'|---:' * (len(heads) - left)}|"]
    return lines + [f"| {' | '.join(_cell(str(cell)) for cell in row)} |" for row in rows]


def _cell(text: str) -> str:
    """Return Markdown for a cell, which a bar would end. In backticks, the escape of a bar would be shown."""

    def written(found: re.Match[str]) -> str:
        if found[1] is None:
            return "\\|"
        inside = escapes.escape(found[1]).replace("|", "&#124;")
        return f"<code>{inside}</code>" if "|" in found[1] else found[0]

    return re.sub(r"`([^`]*)`|\|", written, text)


def markdown(parts: Iterable[Part]) -> str:
    """Return a page in Markdown."""
    return "\n\n".join(_markdown(part).strip("\n") for part in parts) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Table():
            return "\n".join(table_lines(part))
        case Code(text, language):
            stripped = text.strip("\n")
            return f"```{language}\n{stripped}\n```"
        case Picture(title, file):
            return f"![{title}]({file})"
        case _:
            return part


def html(title: str, parts: Iterable[Part]) -> str:
    """Return a page in HTML that loads nothing else, light or dark as its reader's system is."""
    body = "\n".join(map(_html, parts))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escapes.escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _html(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Table(heads, rows, left):
            lines = [_row("th", heads, left), *(_row("td", row, left) for row in rows)]
            return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
        case Code(text):
            stripped = text.strip("\n")
            return f"<pre>{escapes.escape(stripped)}</pre>"
        case Picture(title, _, svg):
            return svg or f"<p>{_inline(title)}</p>"
        case _:
            return "".join(f"<p>{_inline(text)}</p>" for text in part.split("\n\n"))


def _row(tag: str, cells: Sequence[object], left: int) -> str:
    sides = [' class="left"'] * left + [""] * (len(cells) - left)
    found = (f"<{tag}{side}>{_inline(str(cell))}</{tag}>" for side, cell in zip(sides, cells, strict=True))
    return f"<tr>{''.join(found)}</tr>"


def _inline(text: str) -> str:
    """Return the HTML of a line of Markdown."""
    # Entities such as &plusmn; are Markdown, too, so they stay.
    parts = [re.sub(r"&amp;(#?\w+;)", r"&\1", escapes.escape(part, quote=False)) for part in text.split("`")]
    for number, part in enumerate(parts):
        # Code comes between two backticks, and an asterisk in it is no emphasis.
        if number % 2:
            parts[number] = f"<code>{part}</code>"
        else:
            strong = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", part)
            parts[number] = re.sub(r"\*(.+?)\*", r"<em>\1</em>", strong)
    return "".join(parts)
