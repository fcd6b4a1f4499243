"""One cell of the quality table, the folder that keeps finished cells, and the record of a whole run."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringtile.tools.machine import commit, machine_facts, versions
from ringtile.tools.progress import Progress
from ringtile.tools.record import fields_of, write_whole

_FORMAT = 1

POST_HOC = "post-hoc"
FINE_TUNED = "fine-tuned"
FROM_SCRATCH = "from scratch"
REGIMES = (POST_HOC, FINE_TUNED, FROM_SCRATCH)
"""Trained dense and then made sparse; trained on with sparse attention; trained with it from the start."""

DENSE = "dense"
"""The scores of the cell that keeps all tiles: the model that retention is measured against."""


@dataclass(frozen=True)
class Setting:
    """All that decides the figures of a cell. Two settings that differ in a field are two cells."""

    leg: str
    """``"trained"`` for models that ringtile trains, ``"decoder"`` for a model that you bring."""
    task: str
    """The task, or the text: ``"mqar"``, ``"far copy"``."""
    regime: str
    """One of `REGIMES`."""
    scores: str
    """The selector, as its row is called: ``"default"``, ``"window"``, ``"oracle"``, or `DENSE`."""
    budget: str
    """The kind of budget: ``"density"``, ``"calibrated"``, ``"quality"``, or ``""`` for dense."""
    asked: float | None
    """The density or the quality that the budget asks for, None for dense."""
    seed: int
    """Seed of the model, its data and every draw."""
    sizes: Mapping[str, int | float | str] = field(default_factory=dict)
    """Lengths, blocks, steps, dtypes, model names: numbers and words that decide the figures."""

    @property
    def name(self) -> str:
        """A file name, the same for equal settings only.

        >>> Setting("trained", "mqar", "post-hoc", "oracle", "density", 0.25, 1, {"block": 16}).name
        'mqar-post-hoc-oracle-density-0.25-s1-ae985371'
        """
        whole = json.dumps(asdict(self), sort_keys=True)
        words = [self.task, self.regime, self.scores, self.budget, "" if self.asked is None else f"{self.asked:g}"]
        text = re.sub(r"[^a-z0-9.]+", "-", "-".join(word for word in words if word).lower())
        return f"{text}-s{self.seed}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Measured:
    """The result of a measurement."""

    figures: Mapping[str, float | list[float]]
    """By name: ``accuracy``, ``chance``, ``bits``, ``text``, ``copy``, ``recall``, ``seconds``."""
    realised: float | None = None
    """The tile density that the budget led to, over the tiles that the base keeps. Mean of layers and heads."""
    reason: str = ""
    """Why there are no figures, if there are none."""


@dataclass(frozen=True)
class Cell:
    """A setting, its figures, and what they cost."""

    setting: Setting
    measured: Measured
    seconds: float
    """Wall time of the measurement."""
    commit: str | None = None
    """The commit of ringtile that measured it."""

    def figure(self, name: str) -> float | None:
        """Return a figure, or None if the cell does not have it."""
        found = self.measured.figures.get(name)
        return float(found) if isinstance(found, (int, float)) else None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Cell:
        """Return the cell of ``asdict``.

        Raises ValueError if fields are missing or unknown.
        """
        try:
            return cls(
                Setting(**found["setting"]), Measured(**found["measured"]), found["seconds"], found.get("commit")
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"expected a cell of ringtile quality, got other fields: {error}") from None


@dataclass(frozen=True)
class Job:
    """A cell that is still to be measured."""

    setting: Setting
    cost: float
    """Expected seconds. The time left is scaled by the jobs that have ended."""
    measure: Callable[[], Measured]


class Folder:
    """The folder of ``--out``: one JSON file per finished cell, each written whole.

    A second run reads the cells of equal settings instead of measuring them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells = path / "cells"
        self._cells.mkdir(parents=True, exist_ok=True)

    def _file(self, setting: Setting) -> Path:
        return self._cells / f"{setting.name}.json"

    def read(self, setting: Setting) -> Cell | None:
        """Return the finished cell of a setting, or None.

        Raises ValueError if its file holds something else.
        """
        file = self._file(setting)
        return self._cell(file) if file.exists() else None

    def write(self, cell: Cell) -> None:
        """Keep a finished cell."""
        write_whole(self._file(cell.setting), json.dumps({"format": _FORMAT, **asdict(cell)}, indent=1))

    def cells(self) -> list[Cell]:
        """Return all finished cells, those of other runs included."""
        return [self._cell(file) for file in sorted(self._cells.glob("*.json"))]

    @staticmethod
    def _cell(file: Path) -> Cell:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("format") != _FORMAT:
                raise ValueError(f"expected format {_FORMAT}")
            return Cell.of(found)
        except ValueError as error:
            raise ValueError(f"{file}: {error}; delete the file to measure its cell again") from None


def measure_all(jobs: Iterable[Job], folder: Folder, progress: Progress) -> list[Cell]:
    """Measure the jobs whose cells the folder does not have, and return the cells of all.

    Each cell is written when it is finished, so an interrupted run goes on where it ended.
    """
    jobs = list(jobs)
    cells = {job.setting.name: cell for job in jobs if (cell := folder.read(job.setting)) is not None}
    waiting = [job for job in jobs if job.setting.name not in cells]
    expected, left, begin, version = 0.0, sum(job.cost for job in waiting), time.monotonic(), commit()
    for number, job in enumerate(waiting, 1):
        passed = time.monotonic() - begin
        setting = job.setting
        what = f"{setting.task}, {setting.regime}, {setting.scores}"
        what += f" at {setting.asked:g}" if setting.asked is not None else ""
        rate = f", {(number - 1) / passed * 60:.0f} cells per minute" if number > 1 else ""
        progress.show(
            f"{len(cells) + 1}/{len(jobs)} {what}, seed {setting.seed}{rate}",
            left * (passed / expected if expected else 1.0),
        )
        start = time.monotonic()
        measured = job.measure()
        cell = Cell(setting, measured, time.monotonic() - start, version)
        folder.write(cell)
        cells[setting.name] = cell
        expected, left = expected + job.cost, left - job.cost
    progress.clear()
    return [cells[job.setting.name] for job in jobs]


@dataclass(frozen=True)
class Record:
    """All cells of a run, and all that is needed to repeat it."""

    command: str | None
    commit: str | None
    versions: dict[str, str | None]
    machine: dict[str, Any]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    """Legs and tasks that were left out, each with its reason."""
    interrupted: bool = False

    @classmethod
    def here(cls, cells: Iterable[Cell], command: str | None, **fields: Any) -> Record:
        """Return the record of cells that this machine measured."""
        return cls(command, commit(), versions(), machine_facts(), tuple(cells), **fields)

    def to_json(self) -> str:
        """Return one JSON object, for `from_json`."""
        found = {"format": _FORMAT, **asdict(self)}
        cells = ",\n".join(json.dumps(cell) for cell in found.pop("cells"))
        return f'{json.dumps(found)[:-1]}, "cells": [\n{cells}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Read the text of `to_json`.

        Raises:
            ValueError: If the text is something else.
        """
        with fields_of(text, "ringtile quality") as found:
            cells = tuple(map(Cell.of, found["cells"]))
            return cls(**{**found, "cells": cells, "notes": tuple(found["notes"])})
