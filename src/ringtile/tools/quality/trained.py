"""The leg of models that are trained here: each task, regime, selector, density and seed is a cell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from ringtile import sparse_attention
from ringtile.tools.progress import Progress
from ringtile.tools.quality.cells import DENSE, FINE_TUNED, FROM_SCRATCH, POST_HOC, Job, Measured, Setting
from ringtile.tools.quality.models import Reader, judge, restore, save, train
from ringtile.tools.quality.selectors import (
    DEFAULT,
    ORACLE,
    QUICK_ROWS,
    RANDOM,
    ROWS,
    WINDOW,
    Selected,
    floor_of,
    scores_of,
)
from ringtile.tools.quality.tasks import (
    LIST_TOKENS,
    PASSKEY,
    Stage,
    Task,
    assignments,
    copied_span,
    lists,
    manual_windows,
    needles,
    recall_pairs,
)

LEG = "trained"
TOKENS = 1024
BLOCK = 16
DENSITIES = (0.5, 0.25, 0.1, 0.05, 0.02)
REGIME_DENSITY = 0.25
ENOUGH = 0.99
"""Dense accuracy that a task needs to stay in the table."""
_REPEATS = 4
"""Times that the last stage is repeated if validation misses `_GOAL`."""
_GOAL = 0.995
_AUDITED = 16
_JUDGED = 4
"""Sequences per batch when a model is judged."""

TASKS = {
    task.name: task
    for task in (
        Task(
            "mqar", "multi-query associative recall: 64 pairs, 64 questions", recall_pairs, 256, 1 / 128, 2, 64, 8,
            (Stage(128, 16, 200, 32), Stage(TOKENS, 4, 40, 64)), start="mixed", width=128, rate=2e-3,
        ),
        Task(
            "needle", f"one passkey of {PASSKEY} tokens in filler", needles, 256, 1 / 128, 2, 1, 32,
            (Stage(128, 32, 300, 6), Stage(TOKENS, 8, 30, 1)),
        ),
        Task(
            "copy", "a span of 128 tokens again, far away", copied_span, 288, 1 / 256, 2, 128, 8,
            (Stage(128, 32, 400, 56), Stage(TOKENS, 4, 40, 128)),
        ),
        Task(
            "variables", "variable tracking in two hops, 32 chains", assignments, 256, 1 / 111, 2, 32, 8,
            (Stage(256, 16, 150, 12), Stage(TOKENS, 4, 60, 32)),
        ),
        Task(
            "listops", "MIN and MAX of nested lists", lists, LIST_TOKENS, 0.1, 4, 4, 8,
            (Stage(128, 16, 200, 4), Stage(TOKENS, 4, 50, 4)), rotary=True, rate=5e-3,
        ),
        Task(
            "bytes", "next byte of Python's manual", manual_windows, 256, 1 / 256, 2, 0, 8,
            (Stage(128, 12, 160, 0), Stage(TOKENS, 2, 30, 0)), rotary=True, start="mixed", width=96, language=True,
        ),
    )
}  # fmt: skip
"""The tasks by name."""


@dataclass(frozen=True)
class Plan:
    """What to measure: tasks, seeds, rows and densities."""

    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    rows: tuple[str, ...]
    densities: tuple[float, ...]
    regimes: bool
    """True to train with sparse attention, too."""
    tokens: int = TOKENS
    block: int = BLOCK

    @classmethod
    def of(cls, names: Sequence[str], seeds: Sequence[int], quick: bool) -> Plan:
        """Return the plan of the command."""
        rows = QUICK_ROWS if quick else ROWS
        tasks = tuple(TASKS[name] for name in names)
        if quick:
            tasks = tuple(replace(task, rows=max(4, task.rows // 4)) for task in tasks)
        return cls(tasks, tuple(seeds), rows, DENSITIES, not quick)


class Lab:
    """The models of one task and seed: trained once, kept in a folder, and judged under any attention."""

    def __init__(self, task: Task, seed: int, plan: Plan, folder: Path, progress: Progress) -> None:
        self.task, self.seed, self.plan, self.folder, self.progress = task, seed, plan, folder, progress

    def _trained(self, name: str, make: Callable[[Reader], None]) -> Reader:
        """Return the model of a name, which ``make`` trains if the folder does not have it."""
        torch.manual_seed(self.seed)
        model = Reader(self.task)
        recipe = hashlib.sha256(recipe_of(self.task).encode()).hexdigest()[:8]
        path = self.folder / f"{self.task.name}-{name}-s{self.seed}-{recipe}.pt"
        if not restore(model, path):
            make(model)
            save(model, path)
        return model

    def batches(
        self, rows: int, salt: int, tokens: int | None = None, size: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return sequences that no training saw: their generator is of another seed."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + salt)
        size = self.task.size if size is None else size
        # A language is judged on text that is held out.
        size = 1 if self.task.language else size
        tokens = self.plan.tokens if tokens is None else tokens
        counts = [min(_JUDGED, rows - begin) for begin in range(0, rows, _JUDGED)]
        return [self.task.draw(count, tokens, size, generator) for count in counts]

    @cached_property
    def dense(self) -> Reader:
        """The model that is trained with dense attention."""

        def make(model: Reader) -> None:
            stages = self.task.stages
            train(model, self.task, stages, self.seed)
            for repeat in range(_REPEATS):
                if self.task.language or judge(model, self.task, self.batches(8, 1))["accuracy"] >= _GOAL:
                    break
                train(model, self.task, stages[-1:], self.seed + 1000 * (repeat + 1))

        return self._trained("dense", make)

    @cached_property
    def dense_figures(self) -> dict[str, float]:
        """The figures of the dense model."""
        self.dense.attend_with([sparse_attention] * self.task.layers)
        found = judge(self.dense, self.task, self.batches(self.task.rows, 2))
        return {**found, "chance": self.task.chance}

    def _selected(self, row: str, density: float, audited: int = 0) -> list[Selected]:
        return [
            Selected(scores_of(row, self.seed, layer), density, self.plan.block, audited)
            for layer in range(self.task.layers)
        ]

    def measure_dense(self) -> Measured:
        """Train if needed, and judge with dense attention."""
        return Measured(self.dense_figures, 1.0)

    def measure(self, row: str, density: float) -> Measured:
        """Judge the dense model with a selector's attention."""
        dense = self.dense_figures
        if not self.task.language and dense["accuracy"] < ENOUGH:
            return Measured({}, None, f"the dense model answers {dense['accuracy']:.1%}, and needs {ENOUGH:.0%}")
        return self._judged(self.dense, row, density, self.batches(self.task.rows, 2))

    def _judged(self, model: Reader, row: str, density: float, batches: list[tuple[Tensor, Tensor]]) -> Measured:
        attends = self._selected(row, density, _AUDITED)
        model.attend_with(list(attends))
        figures = judge(model, self.task, batches)
        densities = [x for attend in attends for x in attend.densities]
        recalls = [x for attend in attends for x in attend.recalls]
        return Measured({**figures, "recall": sum(recalls) / len(recalls)}, sum(densities) / len(densities))

    def measure_fine_tuned(self, row: str, density: float, stage: Stage) -> Measured:
        """Train the dense model on with a selector's attention, and judge it with the same."""

        def make(model: Reader) -> None:
            model.load_state_dict(self.dense.state_dict())
            model.attend_with(list(self._selected(row, density)))
            train(model, self.task, (stage,), self.seed + 77)

        model = self._trained(f"fine-tuned-{row.replace(' ', '-')}-{density:g}", make)
        return self._judged(model, row, density, self.batches(self.task.rows, 2))

    def measure_from_scratch(self, row: str, density: float, stage: Stage) -> Measured:
        """Train with a selector's attention from the start, and judge it with the same."""

        def make(model: Reader) -> None:
            if row != DENSE:
                model.attend_with(list(self._selected(row, density)))
            train(model, self.task, (stage,), self.seed)

        model = self._trained(f"from-scratch-{row.replace(' ', '-')}-{density:g}", make)
        batches = self.batches(4 * self.task.rows, 2, stage.tokens, stage.size)
        if row == DENSE:
            model.attend_with([sparse_attention] * self.task.layers)
            return Measured({**judge(model, self.task, batches), "chance": self.task.chance}, 1.0)
        return self._judged(model, row, density, batches)


FINE_TUNE = Stage(TOKENS, 4, 60, 64)
SCRATCH = Stage(256, 16, 300, 32)
TRAINED_ROWS = (DEFAULT, "first row", WINDOW, RANDOM, ORACLE)
"""Rows that models are trained with. The default and the oracle choose by later tokens, which the page says."""


def recipe_of(task: Task) -> str:
    """Return all of a task that decides its models."""
    return repr((task.name, task.layers, task.width, task.start, task.rotary, task.rate, task.stages))


Sizes = dict[str, int | float | str]


def sizes_of(task: Task, plan: Plan) -> Sizes:
    """Return the sizes of a cell's setting."""
    return {
        "tokens": plan.tokens,
        "block": plan.block,
        "size": task.size,
        "sequences": task.rows,
        "layers": task.layers,
        "width": task.width,
        "recipe": hashlib.sha256(recipe_of(task).encode()).hexdigest()[:8],
        "floor": round(floor_of(plan.tokens, plan.block), 4),
    }


def _setting(
    task: Task, seed: int, sizes: Sizes, regime: str, row: str, density: float | None, more: Sizes | None = None
) -> Setting:
    budget = "" if density is None else "density"
    return Setting(LEG, task.name, regime, row, budget, density, seed, {**sizes, **(more or {})})


def jobs(plan: Plan, folder: Path, progress: Progress) -> Iterator[Job]:
    """Return a job for each cell, those of one model after another."""
    for task in plan.tasks:
        for seed in plan.seeds:
            lab = Lab(task, seed, plan, folder, progress)
            sizes = sizes_of(task, plan)
            layers = task.layers * task.rows / 8

            setting = partial(_setting, task, seed, sizes)
            steps = sum(stage.steps * stage.tokens * stage.batch for stage in task.stages) / 4096
            yield Job(setting(POST_HOC, DENSE, None), 0.03 * steps * task.layers, lab.measure_dense)
            for row in plan.rows:
                cost = layers * (0.5 if row.startswith(ORACLE) else 0.1)
                for density in plan.densities:
                    yield Job(setting(POST_HOC, row, density), cost, partial(lab.measure, row, density))
            if not plan.regimes or task.name != "mqar":
                continue
            for row in TRAINED_ROWS:
                yield Job(
                    setting(FINE_TUNED, row, REGIME_DENSITY, {"steps": FINE_TUNE.steps}),
                    0.3 * FINE_TUNE.steps,
                    partial(lab.measure_fine_tuned, row, REGIME_DENSITY, FINE_TUNE),
                )
            scratch: Sizes = {
                "steps": SCRATCH.steps,
                "tokens": SCRATCH.tokens,
                "size": SCRATCH.size,
                "floor": round(floor_of(SCRATCH.tokens, plan.block), 4),
            }
            yield Job(
                setting(FROM_SCRATCH, DENSE, None, scratch),
                0.1 * SCRATCH.steps,
                partial(lab.measure_from_scratch, DENSE, 1.0, SCRATCH),
            )
            for row in TRAINED_ROWS:
                yield Job(
                    setting(FROM_SCRATCH, row, REGIME_DENSITY, scratch),
                    0.3 * SCRATCH.steps,
                    partial(lab.measure_from_scratch, row, REGIME_DENSITY, SCRATCH),
                )
