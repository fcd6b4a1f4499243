"""One cell of the quality table, the folder that keeps finished cells, and the record of a whole run."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ringtile.tools import record
from ringtile.tools.machine import commit
from ringtile.tools.progress import Progress
from ringtile.tools.record import fields_of, write_whole

POST_HOC = "post-hoc"
"""The regime of a model that is trained dense and then made sparse."""

DENSE = "dense"
"""The scores of the cell that keeps all tiles: the model that retention is measured against."""


@dataclass(frozen=True)
class Setting:
    """All that decides the figures of a cell. Two settings that differ in a field are two cells."""

    leg: str
    """``"decoder"`` for a model that you bring, ``"trained"`` for those of `benchmarks/small_tasks`."""
    task: str
    """The task, or the text: ``"mqar"``, ``"far copy"``."""
    regime: str
    """How the model met sparse attention: `POST_HOC`, or during its training."""
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
        """A file name, the same for equal settings only."""
        # The words make a name that people can read. The hash of all fields makes it unique.
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
        """Return the cell of ``asdict``. Raises KeyError or TypeError if fields are missing or unknown."""
        return cls(Setting(**found["setting"]), Measured(**found["measured"]), found["seconds"], found.get("commit"))


@dataclass(frozen=True)
class Job:
    """A cell that is still to be measured."""

    setting: Setting
    cost: float
    """Expected seconds. The time left is scaled by the jobs that have ended."""
    measure: Callable[[], Measured]

    @property
    def text(self) -> str:
        """The cell in words: "mqar, post-hoc, window at 0.25, seed 1"."""
        at = self.setting
        asked = "" if at.asked is None else f" at {at.asked:g}"
        return f"{at.task}, {at.regime}, {at.scores}{asked}, seed {at.seed}"


class Folder:
    """The folder of ``--out``: one JSON file per finished cell, each written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells = path / "cells"
        self._cells.mkdir(parents=True, exist_ok=True)

    def read(self, setting: Setting) -> Cell | None:
        """Return the finished cell of a setting, or None."""
        file = self._cells / f"{setting.name}.json"
        if not file.exists():
            return None
        try:
            with fields_of(file.read_text(encoding="utf-8"), "a cell of ringtile quality") as found:
                return Cell.of(found)
        except ValueError as error:
            raise ValueError(f"{file}: {error}; delete the file to measure its cell again") from None

    def of(self, jobs: Iterable[Job]) -> list[Cell]:
        """Return the finished cells of jobs."""
        return [cell for job in jobs if (cell := self.read(job.setting)) is not None]

    def write(self, cell: Cell) -> None:
        """Keep a finished cell."""
        text = json.dumps({"format": record.FORMAT, **asdict(cell)}, indent=1)
        write_whole(self._cells / f"{cell.setting.name}.json", text)


def measure_all(jobs: Iterable[Job], folder: Folder, progress: Progress) -> list[Cell]:
    """Measure the jobs whose cells the folder does not have, and return the cells of all."""
    jobs, version = list(jobs), commit()
    # Settings have dicts and cannot be keys, but their names can.
    cells = {cell.setting.name: cell for cell in folder.of(jobs)}
    waiting = [job for job in jobs if job.setting.name not in cells]
    for job in progress.through(waiting, lambda job: job.text, lambda job: job.cost, done=len(cells)):
        start = time.monotonic()
        # Seconds are the cell's own, so a model that is trained for its first cell counts there.
        measured = job.measure()
        cell = Cell(job.setting, measured, time.monotonic() - start, version)
        folder.write(cell)
        cells[job.setting.name] = cell
    return [cells[job.setting.name] for job in jobs]


@dataclass(frozen=True, kw_only=True)
class Record(record.Record):
    """All cells of a run, and all that is needed to repeat it."""

    cells: tuple[Cell, ...]

    OF: ClassVar[str] = "ringtile quality"
    ROWS: ClassVar[str] = "cells"
    row_of = Cell.of
