"""What is claimed for sparse attention, and whether the cells of a task hold it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ringtile.tools.quality.cells import DENSE, FROM_SCRATCH, REGIMES, Cell

CLAIMS = {0.5: ("99+", 99.0), 0.25: ("98-99", 98.0), 0.1: ("95-98", 95.0), 0.05: ("93-97", 93.0), 0.02: ("90-95", 90.0)}
"""By density: the quality, in percent, that is often claimed for it, and the least that holds the claim."""

HOLDS = "holds"
REFUTED = "refuted"
BELOW = "below the floor"


def verdict(density: float, kept: float, floor: float) -> str:
    """Return whether a claim holds for the percentage that was kept, or cannot be judged.

    >>> verdict(0.25, 98.2, 0.03), verdict(0.25, 97.9, 0.03), verdict(0.02, 95.0, 0.03)
    ('holds', 'refuted', 'below the floor')

    Raises ValueError if nothing is claimed for the density.
    """
    if density not in CLAIMS:
        raise ValueError(f"density: expected one of {', '.join(map(str, CLAIMS))}, got {density}")
    if floor > density:
        return BELOW
    return HOLDS if kept >= CLAIMS[density][1] else REFUTED


def kept(cell: Cell, dense: Cell) -> float | None:
    """Return the quality that a cell keeps of the dense model's, in percent, or None without figures.

    Of accuracy it is the part above chance. Of bits per byte it is the ratio of the perplexities per byte.
    """
    accuracy, whole, chance = cell.figure("accuracy"), dense.figure("accuracy"), dense.figure("chance")
    if accuracy is not None and whole is not None and chance is not None:
        return 100 * (accuracy - chance) / (whole - chance)
    bits, least = cell.figure("bits"), dense.figure("bits")
    return None if bits is None or least is None else 100.0 * 2.0 ** (least - bits)


@dataclass(frozen=True)
class Entry:
    """A place in the table: the same setting over all seeds."""

    kept: tuple[float, ...]
    """Of each seed, in percent of dense."""
    density: float | None
    """Realised, mean of the seeds."""
    recall: float | None
    reason: str = ""

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
        if at.leg != "trained":
            continue
        if at.scores == DENSE:
            dense[at.task, at.seed, at.regime == FROM_SCRATCH] = cell
        else:
            groups.setdefault((at.task, at.regime, str(sorted(at.sizes.items()))), []).append(cell)
    found = []
    for (task, regime, _), group in groups.items():
        scratch = regime == FROM_SCRATCH
        seeds = sorted({cell.setting.seed for cell in group})
        wholes = [dense[task, seed, scratch] for seed in seeds if (task, seed, scratch) in dense]
        if not wholes:
            continue
        bits = wholes[0].figure("bits") is not None
        figures = [value for cell in wholes if (value := cell.figure("bits" if bits else "accuracy")) is not None]
        reasons = [f"seed {cell.setting.seed}: {cell.measured.reason}" for cell in group if cell.measured.reason]
        entries: dict[str, dict[float, Entry]] = {}
        for cell in group:
            at = cell.setting
            if at.asked is None or at.asked in entries.get(at.scores, {}):
                continue
            same = [
                other
                for other in group
                if (other.setting.scores, other.setting.asked) == (at.scores, at.asked)
                and (task, other.setting.seed, scratch) in dense
            ]
            shares = [kept(other, dense[task, other.setting.seed, scratch]) for other in same]
            densities = [other.measured.realised for other in same if other.measured.realised is not None]
            recalls = [recall for other in same if (recall := other.figure("recall")) is not None]
            entries.setdefault(at.scores, {})[at.asked] = Entry(
                tuple(share for share in shares if share is not None),
                statistics.mean(densities) if densities else None,
                statistics.mean(recalls) if recalls else None,
            )
        found.append(
            TaskTable(
                task, regime, dict(group[0].setting.sizes), tuple(figures), wholes[0].figure("chance") or 0.0, bits,
                entries, reasons[0] if reasons else "",
            )
        )  # fmt: skip
    order = {task: number for number, task in enumerate(dict.fromkeys(table.task for table in found))}
    return sorted(found, key=lambda table: (order[table.task], REGIMES.index(table.regime)))


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
    densities = table.densities
    found = [title]

    def line(name: str, words: Iterable[str]) -> None:
        found.append(f"  {name:<18}" + "".join(f"{word:>16}" for word in words))

    line("tile density", (f"{density:.0%}" for density in densities))
    line("realised", (f"{table.realised[density]:.3f}" if density in table.realised else "-" for density in densities))
    line("claimed", (CLAIMS[density][0] if density in CLAIMS else "" for density in densities))
    for number, (row, entries) in enumerate(table.entries.items()):
        line(row, (entries[density].text if density in entries else "" for density in densities))
        if number == 0:
            line("", (table.verdict(row, density) for density in densities))
        if computed := table.computed(row):
            line("  its tiles", (f"{computed[density]:.3f}" if density in computed else "" for density in densities))
    return found
