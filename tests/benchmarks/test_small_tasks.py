"""benchmarks/small_tasks: tasks, selectors, verdicts, the page, and the program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from small_tasks import __main__ as program, trained
from small_tasks.claims import CLAIMS, verdict, verdicts
from small_tasks.page import page_of, parts_of
from small_tasks.rows import Oracle
from small_tasks.tables import kept, lines_of, tables
from small_tasks.tasks import NO_ANSWER, Stage, manual_windows
from small_tasks.trained import TASKS, Lab, Sweep, jobs

from ringtile.adaptive import View
from ringtile.index import build_index
from ringtile.patterns import Causal
from ringtile.tools.progress import Progress
from ringtile.tools.quality.cells import Cell, Folder, Measured, Record, Setting, measure_all

TINY = {
    "mqar": (128, 16),
    "needle": (128, 2),
    "copy": (128, 40),
    "variables": (128, 6),
    "listops": (128, 4),
    "bytes": (64, 0),
}


# Programs that know a task's rules and read only the tokens up to the question.
def answer_mqar(seen: list[int]) -> int:
    return seen[seen[:-1].index(seen[-1]) + 1]


def answer_span(seen: list[int]) -> int:
    return seen[seen.index(seen[-1]) + 1]


def answer_variables(seen: list[int]) -> int:
    content = {seen[i - 2]: seen[i - 1] for i in range(2, len(seen)) if seen[i] == 128}
    found = content[seen[-1]]
    return content.get(found, found)


def answer_lists(seen: list[int]) -> int:
    """Evaluate the list that ends here, by a stack."""
    stack: list[list[int]] = []
    value = -1
    for token in seen:
        symbol = token % 13
        if symbol < 10:
            stack[-1].append(symbol)
        elif symbol < 12:
            stack.append([symbol])
        else:
            operator, *values = stack.pop()
            value = max(values) if operator == 11 else min(values)
            if stack:
                stack[-1].append(value)
    return value


SOLVERS: dict[str, Callable[[list[int]], int]] = {
    "mqar": answer_mqar,
    "needle": answer_span,
    "copy": answer_span,
    "variables": answer_variables,
    "listops": answer_lists,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_program_answers_every_question(name: str) -> None:
    tokens, size = TINY[name]
    for length, many in ((tokens, size), (1024, TASKS[name].size)):
        x, y = TASKS[name].draw(3, length, many, torch.Generator().manual_seed(5))
        assert x.shape == y.shape == (3, length)
        assert 0 <= int(x.min()) <= int(x.max()) < TASKS[name].vocabulary
        places = (y != NO_ANSWER).nonzero().tolist()
        assert len(places) >= 7 * 3
        for row, place in places:
            assert SOLVERS[name](x[row, : place + 1].tolist()) == y[row, place]


def test_held_out_bytes_are_of_another_part() -> None:
    whole = bytes(manual_windows.text.tolist())
    parts = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
    for held_out in (0, 1):
        x, y = manual_windows(4, 64, held_out, torch.Generator().manual_seed(0))
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert all(bytes(row) in parts[held_out] and bytes(row) not in parts[1 - held_out] for row in x.tolist())


def small_sweep(name: str, **changes: object) -> Sweep:
    tokens, size = TINY[name]
    task = replace(TASKS[name], size=size, rows=2, stages=(Stage(tokens, 4, 3, size),), width=32, layers=2)
    fields = {"tasks": (task,), "seeds": (0,), "rows": ("default", "window"), "densities": (0.5,), "regimes": False}
    return Sweep(**{**fields, "tokens": tokens, "block": 16, **changes})  # type: ignore[arg-type]


def tensors(seed: int = 0) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 2, 4, 150, 16, generator=torch.Generator().manual_seed(seed)).unbind()
    return 3 * q, k[:, :2]


def test_the_oracle_knows_exact_attention() -> None:
    q, k = tensors()
    base = build_index(Causal(), 150, num_heads=4, batch=2, block=16)
    for pool in ("max", "mean"):
        found = Oracle(pool)(View(q, k, base))  # type: ignore[arg-type]
        logits = (q.double() @ k.double().repeat_interleave(2, 1).mT) / 4
        weights = logits.masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf).softmax(-1)
        masses = torch.nn.functional.pad(weights, (0, 10, 0, 10)).view(2, 4, 10, 16, 10, 16).sum(5)
        pooled = masses.amax(3) if pool == "max" else masses.sum(3)
        torch.testing.assert_close(found, (pooled / pooled.sum(3, keepdim=True)).float())


def test_a_full_budget_is_the_dense_model(tmp_path: Path) -> None:
    sweep = small_sweep("mqar")
    lab = Lab(sweep.tasks[0], 0, sweep, tmp_path)
    batches = lab.batches(2, 2)
    at = batches[0][1] != NO_ANSWER
    with torch.no_grad():
        dense = lab.dense(batches[0][0], at)
        for row in ("default", "random"):
            lab.dense.attend_with(list(lab.attends(row, 1.0)))
            torch.testing.assert_close(lab.dense(batches[0][0], at), dense, rtol=1e-4, atol=1e-5)
            lab.dense.attend_with(list(lab.attends(row, 0.1)))
            assert not torch.allclose(lab.dense(batches[0][0], at), dense, rtol=1e-2)


def measured(sweep: Sweep, folder: Path, *regimes: str) -> dict[tuple[str, str], Cell]:
    """The cells of a sweep in some regimes, by regime and scores."""
    work = [job for job in jobs(sweep, folder / "models") if job.setting.regime in (regimes or ("post-hoc",))]
    cells = measure_all(work, Folder(folder), Progress(quiet=True))
    return {(cell.setting.regime, cell.setting.scores): cell for cell in cells}


def test_training_with_sparse_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FINE_TUNE", "SCRATCH"):
        monkeypatch.setattr(trained, name, Stage(128, 2, 2, 16))
    monkeypatch.setattr(trained, "TRAINED_ROWS", ("default", "first row"))
    cells = measured(small_sweep("mqar", regimes=True), tmp_path, "fine-tuned", "from scratch")
    assert set(cells) == {
        *((regime, row) for regime in ("fine-tuned", "from scratch") for row in ("default", "first row")),
        ("from scratch", "dense"),
    }
    for (_, row), cell in cells.items():
        assert cell.figure("accuracy") is not None
        assert cell.measured.realised == (1 if row == "dense" else pytest.approx(0.25, abs=0.12))
    weights = {path.name[5:-15]: torch.load(path) for path in (tmp_path / "models").iterdir()}
    assert set(weights) == {
        "dense", "fine-tuned-default-0.25", "fine-tuned-first-row-0.25", "from-scratch-default-0.25",
        "from-scratch-dense-1", "from-scratch-first-row-0.25",
    }  # fmt: skip
    # All are other models.
    assert len({float(each["head.weight"].sum()) for each in weights.values()}) == len(weights)


def cell(scores: str, asked: float | None, seed: int, accuracy: float, **sizes: float) -> Cell:
    figures = {"accuracy": accuracy} | ({"chance": 0.0} if scores == "dense" else {})
    known = Setting(
        "trained", "mqar", "post-hoc", scores, "" if asked is None else "density", asked, seed,
        {"tokens": 1024, "block": 16, "floor": 0.03, **sizes},
    )  # fmt: skip
    return Cell(known, Measured(figures, asked), 1.0)


def claimed_cells() -> list[Cell]:
    found = [cell("dense", None, seed, 1.0) for seed in range(3)]
    share = {0.5: 0.995, 0.25: 0.97, 0.1: 0.951, 0.05: 0.5, 0.02: 0.99}
    for seed in range(3):
        found += [cell("default", asked, seed, value + (seed - 1) / 1000) for asked, value in share.items()]
        found += [cell("window", asked, seed, 0.1) for asked in share]
    return found


def html(cells: tuple[Cell, ...]) -> str:
    """The page of a run with these cells."""
    record = Record.here(None, cells=cells)
    return page_of(record, parts_of(tables(record.cells)))


def test_the_claimed_row_is_judged_in_words() -> None:
    (table,) = tables(claimed_cells())
    words = [table.verdict("default", density) for density in CLAIMS]
    assert words == ["holds", "refuted", "holds", "refuted", "below the floor"]
    assert "95.1 +-0.1" in "\n".join(lines_of(table))
    with pytest.raises(ValueError, match="density: expected one of"):
        verdict(0.3, 99.0, 0.0)


def test_claims_are_judged_on_the_calibrated_default() -> None:
    def judged(scores: str, budget: str, asked: float, text: float, copy: float) -> Cell:
        sizes = {"model": "mine", "tokens": 4096, "block": 32}
        at = Setting("decoder", "far copy", "post-hoc", scores, budget, asked, 0, sizes)
        return Cell(at, Measured({"text": text, "copy": copy}, asked), 1.0)

    cells = [judged("default", "calibrated", asked, 0.985, 0.94) for asked in (0.5, 0.25, 0.05, 0.02)]
    cells += [judged("window", "density", 0.25, 0.1, 0.1), judged("default", "density", 0.25, 0.1, 0.1)]
    assert verdicts(cells) == {
        "mine, perplexity of text": {0.5: "refuted", 0.25: "holds", 0.05: "holds", 0.02: "below the floor"},
        "mine, benefit of a far copy": {0.5: "refuted", 0.25: "refuted", 0.05: "holds", 0.02: "below the floor"},
    }


def test_a_row_that_computes_more_tiles_says_so() -> None:
    wide = [cell("token blend", 0.25, seed, 0.99) for seed in range(3)]
    wide = [replace(each, measured=replace(each.measured, realised=0.83)) for each in wide]
    (table,) = tables([*claimed_cells(), *wide])
    assert table.realised[0.25] == pytest.approx(0.25)
    assert table.computed("token blend") == {0.25: pytest.approx(0.83)}
    assert table.computed("window") == {}
    assert lines_of(table)[-1].split() == ["its", "tiles", "0.830"]
    assert "<em>83.0%</em>" in html((*claimed_cells(), *wide))


def test_quality_counts_above_chance() -> None:
    dense, half = cell("dense", None, 0, 0.9), cell("window", 0.5, 0, 0.5)
    dense = replace(dense, measured=Measured({"accuracy": 0.9, "chance": 0.1}))
    assert kept(half, dense) == pytest.approx(50.0)
    assert kept(replace(half, measured=Measured({"accuracy": 0.1})), dense) == pytest.approx(0.0)
    bits = [replace(half, measured=Measured({"bits": value})) for value in (2.0, 3.0)]
    assert kept(bits[1], bits[0]) == pytest.approx(50.0)
    assert kept(replace(half, measured=Measured({}, None, "why")), dense) is None


def test_the_program_resumes_and_writes_a_record_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = small_sweep("mqar", rows=("default", "window", "oracle"), densities=(0.5, 0.25))
    monkeypatch.setattr(trained, "ENOUGH", 0.0)
    monkeypatch.setattr(trained, "_GOAL", 0.0)
    monkeypatch.setattr(Sweep, "of", lambda names, seeds, quick: replace(sweep, seeds=tuple(seeds)))
    words = ["--quick", "--tasks", "mqar", "--seeds", "0", "1", "--out", str(tmp_path)]
    whole, calls = Lab.measure, list[str]()

    def stop(self: Lab, row: str, density: float) -> Measured:
        calls.append(row)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, row, density)

    with monkeypatch.context() as patch:
        patch.setattr(Lab, "measure", stop)
        with pytest.raises(KeyboardInterrupt):
            program.main(words)
    record = Record.from_json((tmp_path / "small_tasks.json").read_text())
    assert (record.interrupted, len(record.cells)) == (True, 3)
    capsys.readouterr()
    program.main([*words, "--json"])
    first, record = record, Record.from_json(capsys.readouterr().out)
    assert (record.interrupted, len(record.cells), record.cells[:3]) == (False, 14, first.cells)
    assert record.command == f"python benchmarks/small_tasks {' '.join(words)} --json"
    assert (tmp_path / "small_tasks.html").read_text().startswith("<!doctype html>")
