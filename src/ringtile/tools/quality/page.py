"""The page of a record: tables and curves in one HTML file that loads nothing else."""

from __future__ import annotations

import html
import io
import re
from typing import Any

from ringtile.tools.plot import GREY, LIGHT_BLUE, ORANGE, RED, missing_matplotlib
from ringtile.tools.quality.cells import Record
from ringtile.tools.quality.claims import BELOW, CLAIMS, HOLDS, REFUTED, TaskTable, lines_of, tables
from ringtile.tools.quality.selectors import DEFAULT, ORACLE, RANDOM, WINDOW
from ringtile.tools.quality.trained import TASKS

_STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --soft: #5b636d; --paper: #fff; --line: #d8dce1; --band: #f4f6f8;
  --good: #1c7a3f; --bad: #b3362d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #a3abb5; --paper: #16191d; --line: #3a4149;
  --band: #20252b; --good: #62c98a; --bad: #f08a80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p.note, footer { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.claim td { background: var(--band); color: var(--soft); } tr.first td { font-weight: 600; }
.holds { color: var(--good); } .refuted { color: var(--bad); } .below { color: var(--soft); }
pre { background: var(--band); padding: 1rem; overflow-x: auto; font-size: .8rem; }
svg { max-width: 100%; height: auto; color: var(--ink); }
"""

_BLUE = "#2f80c9"
"""A blue that is clear on white and on black."""
_COLORS = {DEFAULT: _BLUE, ORACLE: "currentColor", WINDOW: ORANGE, RANDOM: GREY, "probe": LIGHT_BLUE, "blend": RED}
_CURVES = (ORACLE, DEFAULT, "probe", "blend", WINDOW, RANDOM)
_INK = "#010203"
"""Stands for the page's own text color, which light and dark themes choose."""


def page_of(record: Record, decoder: list[str] | None = None) -> str:
    """Return the HTML page of a record. ``decoder`` are the lines of the table of your own model, if there is one."""
    found = tables(record.cells)
    parts = [
        "<h1>Quality of sparse attention</h1>",
        "<p>Percent of the dense model's quality that attention over some tiles keeps: mean and standard deviation "
        "over seeds. Accuracy counts above chance. Bits per byte count as a ratio of perplexities. "
        "The claimed row is what is often claimed for a density; the word under the default says whether it holds.</p>",
    ]
    if record.interrupted:
        parts.append("<p><strong>This run was interrupted. Cells are missing.</strong></p>")
    if (picture := curves(found)) is not None:
        parts.append(picture)
    parts += [_section(table) for table in found]
    if decoder:
        parts.append(f"<h2>Your model</h2><pre>{html.escape(chr(10).join(decoder).strip())}</pre>")
    if record.notes:
        parts.append("<h2>Left out</h2>" + "".join(f"<p class=note>{html.escape(note)}</p>" for note in record.notes))
    machine = record.machine
    torch_version = record.versions.get("torch")
    parts.append(
        f"<footer><p>{html.escape(str(record.command))}. {html.escape(str(machine.get('cpu')))}, "
        f"{machine.get('threads')} threads, torch {html.escape(str(torch_version))}, ringtile commit "
        f"{html.escape(str(record.commit))}.</p></footer>"
    )
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>ringtile quality</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _section(table: TaskTable) -> str:
    title, *_ = lines_of(table)
    task = TASKS.get(table.task)
    parts = [f"<h2>{html.escape(table.task)}, {table.regime}</h2>"]
    summary = "" if task is None else f"{task.summary}. "
    parts.append(
        f"<p class=note>{html.escape(summary + title).replace('+-', '&plusmn;')}. The floor is {table.floor:.1%}.</p>"
    )
    if table.dropped:
        parts.append(f"<p class=refuted>Dropped: {html.escape(table.dropped)}</p>")
        return "".join(parts)
    densities = table.densities

    def row(name: str, cells: list[str], kind: str = "", head: bool = False) -> str:
        tag = "th" if head else "td"
        inner = "".join(f"<{tag}>{cell}</{tag}>" for cell in [html.escape(name), *cells])
        return f'<tr class="{kind}">{inner}</tr>'

    rows = [row("tile density asked", [f"{density:.0%}" for density in densities], head=True)]
    realised = table.realised
    rows.append(row("realised", [f"{realised[d]:.1%}" if d in realised else "" for d in densities], "claim"))
    rows.append(row("claimed", [CLAIMS[d][0] if d in CLAIMS else "" for d in densities], "claim"))
    for number, (name, entries) in enumerate(table.entries.items()):
        cells = [entries[d].text.replace("+-", "&plusmn;") if d in entries else "" for d in densities]
        rows.append(row(name, cells, "" if number else "first"))
        if number == 0:
            words = [table.verdict(name, d) for d in densities]
            kinds = {HOLDS: "holds", REFUTED: "refuted", BELOW: "below", "": ""}
            rows.append(row("", [f'<span class="{kinds[word]}">{word}</span>' for word in words]))
        if computed := table.computed(name):
            rows.append(row("its tiles", [f"{computed[d]:.1%}" if d in computed else "" for d in densities], "claim"))
    parts.append(f'<div class="scroll"><table>{"".join(rows)}</table></div>')
    return "".join(parts)


def curves(found: list[TaskTable]) -> str | None:
    """Return quality against realised density, a panel for each task, as SVG. None without matplotlib or cells.

    Text and axes have the color of the page around them.
    """
    shown = [table for table in found if not table.dropped and table.regime == "post-hoc" and table.entries]
    if not shown or missing_matplotlib() is not None:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10, "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK,
        "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "axes.titlesize": 11, "axes.titlelocation": "left", "svg.fonttype": "none", "font.family": "sans-serif",
        "svg.hashsalt": "ringtile",
    }  # fmt: skip
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.6 * columns, 2.9 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
        handles: dict[str, Any] = {}
        for number, axes in enumerate(panels.flat):
            if number >= len(shown):
                axes.set_visible(False)
                continue
            table = shown[number]
            for name in _CURVES:
                entries = {d: e for d, e in table.entries.get(name, {}).items() if e.kept and e.density is not None}
                if not entries:
                    continue
                x = [100 * (entry.density or 0) for entry in entries.values()]
                y = [entry.mean for entry in entries.values()]
                color = _INK if _COLORS[name] == "currentColor" else _COLORS[name]
                look = "--" if name == ORACLE else "-"
                (handles[name],) = axes.plot(x, y, look, color=color, marker="o", markersize=3.5, linewidth=1.6)
            places = {d: table.realised.get(d, d) for d in table.densities if d in CLAIMS and d >= table.floor}
            if places:
                x, y = [100 * value for value in places.values()], [CLAIMS[d][1] for d in places]
                handles["claimed, at least"] = axes.scatter(x, y, marker="_", s=120, color=_INK, linewidth=1, zorder=1)
            axes.set_title(table.task)
            axes.set_xscale("log")
            axes.set_xticks([5, 10, 25, 50], labels=["5%", "10%", "25%", "50%"])
            axes.minorticks_off()
            axes.set_ylim(-5, 105)
            axes.grid(axis="y", color=GREY, alpha=0.25)
            if number % columns == 0:
                axes.set_ylabel("quality kept (%)")
            if number + columns >= len(shown):
                axes.set_xlabel("tile density")
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue().replace(_INK, "currentColor")
    return re.sub(r"^.*?(?=<svg)", "", drawn, flags=re.DOTALL)
