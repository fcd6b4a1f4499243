"""The page of a record: one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from ringtile.tools import page
from ringtile.tools.page import Heading, Part
from ringtile.tools.quality.cells import Record
from ringtile.tools.quality.claims import BELOW, HOLDS, REFUTED


def page_of(record: Record, parts: Sequence[Part]) -> str:
    """Return the HTML page of a record, whose tables are ``parts``."""
    before: list[Part] = [Heading("Quality of sparse attention", 1)]
    if record.interrupted:
        before.append("**This run was interrupted. Cells are missing.**")
    machine, torch_version = record.machine, record.versions.get("torch")
    where = (
        f"{record.command}. {machine.get('cpu')}, {machine.get('threads')} threads, torch {torch_version}, ringtile "
        f"commit {record.commit}."
    )
    colors = {HOLDS: "good", REFUTED: "bad", BELOW: "soft"}
    return page.html("Quality of sparse attention", [*before, *parts, where], colors)
