"""The tables and curves of a run, as parts of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from pages import Heading, Part, Picture, Table, html
from small_tasks.claims import CLAIMS
from small_tasks.rows import DEFAULT, ORACLE, RANDOM, WINDOW
from small_tasks.tables import ITS_TILES, TaskTable, lines_of, rows_of
from small_tasks.trained import TASKS

from ringtile.tools.plot import GREY, LIGHT_BLUE, ORANGE, RED, missing_matplotlib
from ringtile.tools.quality.cells import Record

_INK = "#010203"
"""Stands for the page's own text color, which light and dark themes choose. Matplotlib knows no currentColor."""
_BLUE = "#2f80c9"
"""A blue that is clear on white and on black."""
_COLORS = {DEFAULT: _BLUE, ORACLE: _INK, WINDOW: ORANGE, RANDOM: GREY, "probe": LIGHT_BLUE, "blend": RED}
_CURVES = (ORACLE, DEFAULT, "probe", "blend", WINDOW, RANDOM)

_INTRODUCTION = (
    "Percent of the dense model's quality that attention over some tiles keeps: mean and standard deviation over "
    "seeds. Accuracy counts above chance. Bits per byte count as a ratio of perplexities. The claimed row is what is "
    "often claimed for a density; the word under the default says whether it holds."
)


def parts_of(found: list[TaskTable]) -> list[Part]:
    """Return the parts of the page of a run: curves and tables."""
    parts: list[Part] = [_INTRODUCTION]
    if (picture := curves(found)) is not None:
        parts.append(Picture("Quality kept against tile density", svg=picture))
    for table in found:
        parts += _section(table)
    return parts


def _section(table: TaskTable) -> list[Part]:
    title, *_ = lines_of(table)
    summary = f"{TASKS[table.task].summary}. " if table.task in TASKS else ""
    text = f"{summary}{title}. The floor is {table.floor:.1%}.".replace("+-", "&plusmn;")
    body = f"**Dropped: {table.dropped}**" if table.dropped else table_of(table)
    return [Heading(f"{table.task}, {table.regime}"), text, body]


def table_of(table: TaskTable) -> Table:
    """Return the part of a page that shows a table, with the claims and the computed tiles in italics."""
    rows = []
    for name, words in rows_of(table):
        line = [name.replace("realised", "realised density"), *(word.replace("+-", "&plusmn; ") for word in words)]
        rows.append([f"*{word}*" if word else "" for word in line] if name in ("claimed", ITS_TILES) else line)
    return Table(["kept, %", *(f"{density:.0%}" for density in table.densities)], rows, 1)


_LOOK: Any = {
    "font.size": 10, "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "axes.titlesize": 11, "axes.titlelocation": "left", "svg.fonttype": "none", "font.family": "sans-serif",
    "svg.hashsalt": "ringtile",
}  # fmt: skip


def curves(found: list[TaskTable]) -> str | None:
    """Return quality against realised density, a panel for each task, as SVG. None without matplotlib or cells.

    Text and axes have the color of the page around them.
    """
    shown = [table for table in found if not table.dropped and table.regime == "post-hoc" and table.entries]
    if not shown or missing_matplotlib() is not None:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(3.6 * columns, 2.9 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
        handles: dict[str, Any] = {}
        for axes in panels.flat[len(shown) :]:
            axes.set_visible(False)
        for number, (axes, table) in enumerate(zip(panels.flat, shown, strict=False)):
            handles |= _draw(axes, table)
            # Inner panels share the words of those at the edges.
            if number % columns == 0:
                axes.set_ylabel("quality kept (%)")
            if number + columns >= len(shown):
                axes.set_xlabel("tile density")
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue().replace(_INK, "currentColor")
    return re.sub(r"^.*?(?=<svg)", "", drawn, flags=re.DOTALL)


def _draw(axes: Any, table: TaskTable) -> dict[str, Any]:
    """Draw the curves of a task and what is claimed, and return what a legend shows, by name."""
    handles: dict[str, Any] = {}
    for name in _CURVES:
        entries = [each for each in table.entries.get(name, {}).values() if each.kept and each.density is not None]
        if entries:
            x, y = [100 * (each.density or 0) for each in entries], [each.mean for each in entries]
            look: Any = {"color": _COLORS[name], "marker": "o", "markersize": 3.5, "linewidth": 1.6}
            (handles[name],) = axes.plot(x, y, "--" if name == ORACLE else "-", **look)
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
    return handles


def page_of(record: Record, parts: Sequence[Part]) -> str:
    """Return the HTML page of a record, whose tables are ``parts``."""
    title = "Quality of sparse attention"
    before: list[Part] = [Heading(title, 1)]
    if record.interrupted:
        before.append("**This run was interrupted. Cells are missing.**")
    machine = f"{record.machine.get('cpu')}, {record.machine.get('threads')} threads"
    made = f"{machine}, torch {record.versions.get('torch')}, ringtile commit {record.commit}"
    return html(title, [*before, *parts, f"{record.command}. {made}."])
