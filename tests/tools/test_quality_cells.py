"""The cells of `ringtile quality`: names, files, resuming, records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringtile.tools.progress import Progress
from ringtile.tools.quality.cells import Cell, Folder, Job, Measured, Record, Setting, measure_all


def setting(**fields: object) -> Setting:
    known = {"leg": "trained", "task": "mqar", "regime": "post-hoc", "scores": "default", "budget": "density"}
    return Setting(**{**known, "asked": 0.25, "seed": 1, "sizes": {"block": 16}, **fields})  # type: ignore[arg-type]


def job(mine: Setting, calls: list[Setting], accuracy: float = 0.5) -> Job:
    def measure() -> Measured:
        calls.append(mine)
        return Measured({"accuracy": accuracy}, 0.26)

    return Job(mine, 1.0, measure)


def test_every_field_of_a_setting_makes_another_cell() -> None:
    changes = [{}, {"leg": "decoder"}, {"task": "copy"}, {"regime": "from scratch"}, {"scores": "window"}]
    changes += [{"budget": "quality"}, {"asked": 0.1}, {"seed": 2}, {"sizes": {"block": 32}}, {"sizes": {"tile": 16}}]
    names = [setting(**change).name for change in changes]
    assert len(set(names)) == len(changes)
    assert setting(sizes={"a": 1, "b": 2}).name == setting(sizes={"b": 2, "a": 1}).name
    assert all(name == Path(name).name and "/" not in name for name in names)


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    calls: list[Setting] = []
    first, second, third = (setting(seed=seed) for seed in (1, 2, 3))
    progress = Progress(quiet=True)

    def stop() -> Measured:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_all([job(first, calls), Job(second, 1.0, stop), job(third, calls)], Folder(tmp_path), progress)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert json.loads(file.read_text())["measured"]["figures"] == {"accuracy": 0.5}
    # A finished cell is not measured again.
    jobs = [job(first, calls, 0.9), job(second, calls, 0.9), job(third, calls)]
    cells = measure_all(jobs, Folder(tmp_path), progress)
    assert calls == [first, second, third]
    assert [cell.figure("accuracy") for cell in cells] == [0.5, 0.9, 0.5]
    assert Folder(tmp_path).of(jobs) == cells
    # A changed setting is another cell, and the old ones stay.
    measure_all([job(setting(sizes={"block": 32}), calls)], Folder(tmp_path), progress)
    assert (len(calls), len(list(tmp_path.rglob("*.json")))) == (4, 4)


def test_a_record_is_read_as_it_was_written() -> None:
    cell = Cell(setting(), Measured({"accuracy": 0.5, "recall": [0.1, 0.2]}, None, "why"), 1.5, "abc")
    record = Record.here("ringtile quality", cells=(cell,), interrupted=True)
    again = Record.from_json(record.to_json())
    assert again == record
    assert again.cells[0].figure("recall") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "cells": [{}]}'])
def test_other_texts_are_no_record(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        Record.from_json(text)


def test_a_broken_cell_is_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    measure_all([job(setting(), [])], folder, Progress(quiet=True))
    file = next(path for path in tmp_path.rglob("*.json"))
    file.write_text("{")
    with pytest.raises(ValueError, match=f"{file.name}.*delete the file"):
        folder.read(setting())
