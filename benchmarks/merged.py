"""Cells that are measured apart, on one machine, in one record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAME = ("versions", "machine", "engines", "threads", "layers")
"""Facts in which all rows of a record agree."""

Row = dict[str, Any]


def before(out: Path | None, record: Row) -> Row:
    """Return the record that a run adds its rows to, without rows if there is none.

    Raises SystemExit if the file has other facts than ``record``.
    """
    if out is None or not out.exists():
        return {**record, "rows": []}
    old: Row = json.loads(out.read_text(encoding="utf-8"))
    if other := [name for name in SAME if old.get(name) != record.get(name)]:
        raise SystemExit(f"--out: expected a record with the {', '.join(other)} of this run, got {out}")
    return old


def merged(old: Row, new: Row, key: Callable[[Row], object]) -> Row:
    """Return a record with the rows of both, and those of ``new`` where both have a row of a key.

    Each row keeps its commit, and the record all commands.
    """
    fresh = [{**row, "commit": new["commit"]} for row in new["rows"]]
    keys = [key(row) for row in fresh]
    kept = [{"commit": old["commit"], **row} for row in old["rows"] if key(row) not in keys]
    commands = dict.fromkeys((*(str(old["command"]).splitlines() if kept else ()), new["command"]))
    return {**new, "command": "\n".join(commands), "rows": [*kept, *fresh]}
