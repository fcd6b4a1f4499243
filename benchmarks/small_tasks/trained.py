"""Models that are trained, kept and judged: each task, regime, selector, density and seed is a cell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from small_tasks import tasks
from small_tasks.claims import CLAIMS
from small_tasks.models import Reader, judge, restore, save, train
from small_tasks.rows import DEFAULT, ORACLE, QUICK_ROWS, RANDOM, ROWS, WINDOW, attention_of
from small_tasks.tasks import Stage, Task
from torch import Tensor

from ringtile import sparse_attention
from ringtile.adaptive import AdaptiveAttention
from ringtile.tools.quality.cells import DENSE, POST_HOC, Job, Measured, Setting
from ringtile.tools.quality.leg import floor_of
from ringtile.tools.quality.watched import Watched

LEG = "trained"
FINE_TUNED = "fine-tuned"
FROM_SCRATCH = "from scratch"
REGIMES = (POST_HOC, FINE_TUNED, FROM_SCRATCH)
"""Trained dense and then made sparse; trained on with sparse attention; trained with it from the start."""
TOKENS = 1024
BLOCK = 16
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
            "mqar", "multi-query associative recall: 64 pairs, 64 questions", tasks.recall_pairs, 256, 1 / 128, 2, 64,
            8, (Stage(128, 16, 200, 32), Stage(TOKENS, 4, 40, 64)), start="mixed", width=128, rate=2e-3,
        ),
        Task(
            "needle", f"one passkey of {tasks.PASSKEY} tokens in filler", tasks.needles, 256, 1 / 128, 2, 1, 32,
            (Stage(128, 32, 300, 6), Stage(TOKENS, 8, 30, 1)),
        ),
        Task(
            "copy", "a span of 128 tokens again, far away", tasks.copied_span, 288, 1 / 256, 2, 128, 8,
            (Stage(128, 32, 400, 56), Stage(TOKENS, 4, 40, 128)),
        ),
        Task(
            "variables", "variable tracking in two hops, 32 chains", tasks.assignments, 256, 1 / 111, 2, 32, 8,
            (Stage(256, 16, 150, 12), Stage(TOKENS, 4, 60, 32)),
        ),
        Task(
            "listops", "MIN and MAX of nested lists", tasks.lists, tasks.LIST_TOKENS, 0.1, 4, 4, 8,
            (Stage(128, 16, 200, 4), Stage(TOKENS, 4, 50, 4)), rotary=True, rate=5e-3,
        ),
        Task(
            "bytes", "next byte of Python's manual", tasks.manual_windows, 256, 1 / 256, 2, 0, 8,
            (Stage(128, 12, 160, 0), Stage(TOKENS, 2, 30, 0)), rotary=True, start="mixed", width=96, language=True,
        ),
    )
}  # fmt: skip
"""The tasks by name."""


@dataclass(frozen=True)
class Sweep:
    """Tasks, seeds, rows and densities to measure."""

    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    rows: tuple[str, ...] = ROWS
    densities: tuple[float, ...] = tuple(CLAIMS)
    regimes: bool = True
    """True to train with sparse attention, too."""
    tokens: int = TOKENS
    block: int = BLOCK

    @classmethod
    def of(cls, names: Sequence[str], seeds: Sequence[int], quick: bool) -> Sweep:
        """Return the sweep of the command."""
        chosen = tuple(TASKS[name] for name in names)
        if not quick:
            return cls(chosen, tuple(seeds))
        few = tuple(replace(task, rows=max(4, task.rows // 4)) for task in chosen)
        return cls(few, tuple(seeds), QUICK_ROWS, regimes=False)

    def floor(self, tokens: int) -> float:
        """Return the least tile density at a length."""
        return round(floor_of(tokens, self.block), 4)


def recipe_of(task: Task) -> str:
    """Return a hash of all of a task that decides its models."""
    whole = repr((task.name, task.layers, task.width, task.start, task.rotary, task.rate, task.stages))
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


class Lab:
    """The models of one task and seed: trained once, kept in a folder, and judged under any attention."""

    def __init__(self, task: Task, seed: int, sweep: Sweep, folder: Path) -> None:
        self.task, self.seed, self.sweep, self.folder = task, seed, sweep, folder

    def _trained(self, name: str, make: Callable[[Reader], None]) -> Reader:
        """Return the model of a name, which ``make`` trains if the folder does not have it."""
        # Weights start from the seed, whatever was drawn before.
        torch.manual_seed(self.seed)
        model = Reader(self.task)
        path = self.folder / f"{self.task.name}-{name}-s{self.seed}-{recipe_of(self.task)}.pt"
        if not restore(model, path):
            make(model)
            save(model, path)
        return model

    def batches(
        self, rows: int, salt: int, tokens: int | None = None, size: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return sequences that no training saw: their generator is of another seed."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + salt)
        # A language is judged on text that is held out, which its size of 1 asks for.
        size = 1 if self.task.language else size or self.task.size
        tokens = tokens or self.sweep.tokens
        counts = [min(_JUDGED, rows - begin) for begin in range(0, rows, _JUDGED)]
        return [self.task.draw(count, tokens, size, generator) for count in counts]

    @cached_property
    def dense(self) -> Reader:
        """The model that is trained with dense attention."""

        def make(model: Reader) -> None:
            stages = self.task.stages
            train(model, self.task, stages, self.seed)
            for repeat in range(_REPEATS):
                # Some seeds learn late. The page compares selectors, not training, so these train on.
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

    def attends(self, row: str, density: float) -> list[AdaptiveAttention]:
        """Return the attention of each layer, with a selector."""
        return [
            attention_of(row, density, self.sweep.block, seed=self.seed, layer=layer)
            for layer in range(self.task.layers)
        ]

    def measure_dense(self) -> Measured:
        """Train if needed, and judge with dense attention."""
        return Measured(self.dense_figures, 1.0)

    def measure(self, row: str, density: float) -> Measured:
        """Judge the dense model with a selector's attention."""
        dense = self.dense_figures
        # Below that, a selector's loss could not be told from the model's own errors.
        if not self.task.language and dense["accuracy"] < ENOUGH:
            return Measured({}, None, f"the dense model answers {dense['accuracy']:.1%}, and needs {ENOUGH:.0%}")
        return self._judged(self.dense, row, density, self.batches(self.task.rows, 2))

    def _judged(self, model: Reader, row: str, density: float, batches: list[tuple[Tensor, Tensor]]) -> Measured:
        if row == DENSE:
            model.attend_with([sparse_attention] * self.task.layers)
            return Measured({**judge(model, self.task, batches), "chance": self.task.chance}, 1.0)
        watched = [Watched(attend, _AUDITED) for attend in self.attends(row, density)]
        model.attend_with(list(watched))
        figures = judge(model, self.task, batches)
        # Batches have equally many sequences, so each layer and batch counts the same.
        densities = [x for each in watched for x in each.density]
        recall = torch.stack([x for each in watched for x in each.recall]).mean()
        return Measured({**figures, "recall": float(recall)}, sum(densities) / len(densities))

    def measure_trained(self, regime: str, row: str, density: float, stage: Stage) -> Measured:
        """Train with a selector's attention, from scratch or the dense model on, and judge with the same."""
        is_new = regime == FROM_SCRATCH

        def make(model: Reader) -> None:
            if not is_new:
                model.load_state_dict(self.dense.state_dict())
            if row != DENSE:
                model.attend_with(list(self.attends(row, density)))
            # Batches of the training of the dense model would be no new ones.
            train(model, self.task, (stage,), self.seed + (0 if is_new else 77))

        model = self._trained(f"{regime.replace(' ', '-')}-{row.replace(' ', '-')}-{density:g}", make)
        if is_new:
            # These sequences are shorter, so four times as many have as many tokens.
            return self._judged(model, row, density, self.batches(4 * self.task.rows, 2, stage.tokens, stage.size))
        return self._judged(model, row, density, self.batches(self.task.rows, 2))


FINE_TUNE = Stage(TOKENS, 4, 60, 64)
SCRATCH = Stage(256, 16, 300, 32)
TRAINED_ROWS = (DEFAULT, "first row", WINDOW, RANDOM, ORACLE)
"""Rows that models are trained with. The default and the oracle choose by later tokens, which the page says."""


Sizes = dict[str, int | float | str]


def sizes_of(task: Task, sweep: Sweep) -> Sizes:
    """Return the sizes of a cell's setting."""
    return {
        "tokens": sweep.tokens,
        "block": sweep.block,
        "size": task.size,
        "sequences": task.rows,
        "layers": task.layers,
        "width": task.width,
        "recipe": recipe_of(task),
        "floor": sweep.floor(sweep.tokens),
    }


def jobs(sweep: Sweep, folder: Path) -> Iterator[Job]:
    """Return a job for each cell, those of one model after another."""
    for task in sweep.tasks:
        for seed in sweep.seeds:
            lab = Lab(task, seed, sweep, folder)
            yield from _post_hoc(lab)
            # Training takes most of the time of a run, so one task shows it for all.
            if sweep.regimes and task.name == "mqar":
                yield from _with_training(lab)


def _setting(lab: Lab, regime: str, row: str, density: float | None, more: Sizes) -> Setting:
    sizes = {**sizes_of(lab.task, lab.sweep), **more}
    return Setting(LEG, lab.task.name, regime, row, "" if density is None else "density", density, lab.seed, sizes)


def _post_hoc(lab: Lab) -> Iterator[Job]:
    """Return the cells of models that are trained dense."""
    task, sweep = lab.task, lab.sweep
    steps = sum(stage.steps * stage.tokens * stage.batch for stage in task.stages) / 4096
    yield Job(_setting(lab, POST_HOC, DENSE, None, {}), 0.03 * steps * task.layers, lab.measure_dense)
    for row in sweep.rows:
        # The oracle computes dense attention to choose.
        cost = task.layers * task.rows / 8 * (0.5 if row.startswith(ORACLE) else 0.1)
        for density in sweep.densities:
            yield Job(_setting(lab, POST_HOC, row, density, {}), cost, partial(lab.measure, row, density))


def _with_training(lab: Lab) -> Iterator[Job]:
    """Return the cells of models that are trained with sparse attention."""
    tuned: Sizes = {"steps": FINE_TUNE.steps}
    scratch: Sizes = {
        "steps": SCRATCH.steps,
        "tokens": SCRATCH.tokens,
        "size": SCRATCH.size,
        "floor": lab.sweep.floor(SCRATCH.tokens),
    }
    for regime, stage, sizes in ((FINE_TUNED, FINE_TUNE, tuned), (FROM_SCRATCH, SCRATCH, scratch)):
        if regime == FROM_SCRATCH:
            dense = partial(lab.measure_trained, regime, DENSE, 1.0, stage)
            yield Job(_setting(lab, regime, DENSE, None, sizes), 0.1 * stage.steps, dense)
        for row in TRAINED_ROWS:
            measure = partial(lab.measure_trained, regime, row, REGIME_DENSITY, stage)
            yield Job(_setting(lab, regime, row, REGIME_DENSITY, sizes), 0.3 * stage.steps, measure)
