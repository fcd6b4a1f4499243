"""The tables: what cells keep of the dense model's quality, by task, regime, row and density."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from small_tasks.claims import CLAIMS, verdict
from small_tasks.trained import FROM_SCRATCH, REGIMES

from ringtile.tools.quality.cells import DENSE, Cell

ITS_TILES = "its tiles"
"""The name of the row of the tiles that a row computes."""


def kept(cell: Cell, dense: Cell) -> float | None:
    """Return the quality that a cell keeps of the dense model's, in percent, or None without figures.

    Of accuracy it is the part above chance. Of bits per byte it is the ratio of the perplexities per byte.
    """
    accuracy, whole, chance = cell.figure("accuracy"), dense.figure("accuracy"), dense.figure("chance")
    if accuracy is not None and whole is not None and chance is not None:
        # With a chance of 10%, a model that falls from 90% to 50% has kept half.
        return 100 * (accuracy - chance) / (whole - chance)
    bits, least = cell.figure("bits"), dense.figure("bits")
    # A perplexity per byte is 2 to the bits, so a ratio of perplexities is 2 to a difference of bits.
    return None if bits is None or least is None else 100.0 * 2.0 ** (least - bits)


@dataclass(frozen=True)
class Entry:
    """A place in the table: the same setting over all seeds."""

    kept: tuple[float, ...]
    """Of each seed, in percent of dense."""
    density: float | None
    """Realised, mean of the seeds."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.kept)

    @property
    def text(self) -> str:
        """Mean and standard deviation, "94.1 +-0.8", or "-"."""
        if not self.kept:
            return "-"
        spread = f" +-{statistics.stdev(self.kept):.1f}" if len(self.kept) > 1 else ""
        return f"{self.mean:.1f}{spread}"


@dataclass(frozen=True)
class TaskTable:
    """All entries of a task in one regime."""

    task: str
    regime: str
    sizes: dict[str, int | float | str]
    dense: tuple[float, ...]
    """Accuracy or bits per byte of the dense model of each seed."""
    chance: float
    bits: bool
    entries: dict[str, dict[float, Entry]]
    """By row and by density."""
    dropped: str = ""
    """Why the task is not judged."""

    @property
    def floor(self) -> float:
        return float(self.sizes.get("floor", 0))

    @property
    def densities(self) -> list[float]:
        return sorted({density for row in self.entries.values() for density in row}, reverse=True)

    def verdict(self, row: str, density: float) -> str:
        """Return the word on the claim for a density, "" if there is none."""
        entry = self.entries.get(row, {}).get(density)
        if density not in CLAIMS or entry is None or not entry.kept:
            return ""
        return verdict(density, entry.mean, self.floor)

    @property
    def realised(self) -> dict[float, float]:
        """Realised density of the first row, by the density that was asked for. Others that choose by tile share it."""
        first = next(iter(self.entries.values()), {})
        return {density: entry.density for density, entry in first.items() if entry.density is not None}

    def computed(self, row: str) -> dict[float, float]:
        """Return the realised densities of a row that computes more tiles, because each query chooses its own."""
        found = {density: entry.density for density, entry in self.entries[row].items() if entry.density is not None}
        return found if any(value > 1.05 * self.realised.get(density, 1) for density, value in found.items()) else {}


def tables(cells: Iterable[Cell]) -> list[TaskTable]:
    """Return the tables of the models that were trained here, each task and regime by itself."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    dense: dict[tuple[str, int, bool], Cell] = {}
    for cell in cells:
        at = cell.setting
        if at.leg == "trained" and at.scores == DENSE:
            # Models that train on share the dense model of those that do not.
            dense[at.task, at.seed, at.regime == FROM_SCRATCH] = cell
        elif at.leg == "trained":
            groups.setdefault((at.task, at.regime, str(sorted(at.sizes.items()))), []).append(cell)
    found = []
    for (task, regime, _), group in groups.items():
        seeds = sorted({cell.setting.seed for cell in group})
        wholes = {seed: whole for seed in seeds if (whole := dense.get((task, seed, regime == FROM_SCRATCH)))}
        if wholes:
            found.append(_table(group, wholes))
    order = list(dict.fromkeys(table.task for table in found))
    return sorted(found, key=lambda table: (order.index(table.task), REGIMES.index(table.regime)))


def _table(group: list[Cell], wholes: dict[int, Cell]) -> TaskTable:
    """Return the table of cells of one task, regime and size, beside the dense cells by seed."""
    at, (first, *_) = group[0].setting, wholes.values()
    # A task has either figure in all of its cells, so the first dense cell tells.
    bits = first.figure("bits") is not None
    figures = [value for cell in wholes.values() if (value := cell.figure("bits" if bits else "accuracy")) is not None]
    reasons = [f"seed {cell.setting.seed}: {cell.measured.reason}" for cell in group if cell.measured.reason]
    places: dict[str, dict[float, list[Cell]]] = {}
    for cell in group:
        if cell.setting.asked is not None:
            places.setdefault(cell.setting.scores, {}).setdefault(cell.setting.asked, []).append(cell)
    entries = {row: {asked: _entry(same, wholes) for asked, same in by.items()} for row, by in places.items()}
    chance, dropped = first.figure("chance") or 0.0, reasons[0] if reasons else ""
    return TaskTable(at.task, at.regime, dict(at.sizes), tuple(figures), chance, bits, entries, dropped)


def _entry(cells: list[Cell], wholes: dict[int, Cell]) -> Entry:
    cells = [cell for cell in cells if cell.setting.seed in wholes]
    shares = [kept(cell, wholes[cell.setting.seed]) for cell in cells]
    densities = [cell.measured.realised for cell in cells if cell.measured.realised is not None]
    return Entry(
        tuple(share for share in shares if share is not None), statistics.mean(densities) if densities else None
    )


def rows_of(table: TaskTable, share: str = "{:.1%}") -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a table as words, with densities written as ``share``: what is claimed, then each selector.

    Below the first selector are the verdicts. A row that computes more tiles than it keeps has them below it.
    """

    def row(name: str, words: Mapping[float, str]) -> tuple[str, list[str]]:
        return name, [words.get(density, "") for density in table.densities]

    yield row("realised", dict.fromkeys(table.densities, "-") | _written(table.realised, share))
    yield row("claimed", {density: words for density, (words, _) in CLAIMS.items()})
    for number, (name, entries) in enumerate(table.entries.items()):
        yield row(name, {density: entry.text for density, entry in entries.items()})
        if number == 0:
            yield row("", {density: table.verdict(name, density) for density in table.densities})
        if computed := table.computed(name):
            yield row(ITS_TILES, _written(computed, share))


def _written(densities: Mapping[float, float], share: str) -> dict[float, str]:
    return {density: share.format(realised) for density, realised in densities.items()}


def lines_of(table: TaskTable) -> list[str]:
    """Return a table as text."""
    sizes = table.sizes
    unit = "bits per byte" if table.bits else "accuracy"
    dense = statistics.mean(table.dense)
    spread = f" +-{statistics.stdev(table.dense):.3f}" if len(table.dense) > 1 else ""
    title = f"{table.task}, {table.regime}: {sizes.get('tokens', 0):,} tokens, block {sizes.get('block')}, "
    title += f"{len(table.dense)} seed{'s' if len(table.dense) > 1 else ''}; dense {unit} {dense:.3f}{spread}"
    title += "" if table.bits else f", chance {table.chance:.3f}"
    if table.dropped:
        return [title, f"  dropped: {table.dropped}"]
    asked = ("tile density", [f"{density:.0%}" for density in table.densities])
    rows = [asked, *(("  " + name if name == ITS_TILES else name, words) for name, words in rows_of(table, "{:.3f}"))]
    return [title, *(f"  {name:<18}" + "".join(f"{word:>16}" for word in words) for name, words in rows)]
