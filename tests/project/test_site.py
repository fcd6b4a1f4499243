"""The documentation: examples run, pages are what their tables, records and scripts make, and the site builds."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import output_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from suites import PEERS, suite

import dilated_attention_pytorch
import ringtile
from ringtile import cli, index as layout, patterns
from ringtile.patterns import Pattern
from ringtile.tools import bench
from ringtile.tools.bench.rows import Record, break_even

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = ROOT / "benchmarks" / "records"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(read(page)) if found == language]


@cache
def script(name: str, folder: str = "scripts") -> ModuleType:
    """A file of scripts/ or benchmarks/ as a module; those of scripts/ import one another."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _cache_limit_restored() -> Iterator[None]:
    limit = layout.cache_info().limit
    yield
    layout.set_cache_limit(limit)


@pytest.mark.usefixtures("_cache_limit_restored")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "pycon")])
def test_examples_on_a_page_print_what_it_says(page: str) -> None:
    names: dict[str, object] = {}
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), names, page, page, 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.append, clear_globs=False)
    # What was compiled refers to the names above until then.
    torch.compiler.reset()
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


HEAVY = ("deepspeed", "torchtitan")
"""Libraries that the development tools do not include. `tests/test_NAME.py` has their tests."""
WITH_MODELS = ["how-to/embeddings.md"]
"""Programs that load saved models. `tests/integrations/test_sentence_transformers.py` runs them."""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in WITH_MODELS])
def test_programs_on_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    skipped = []
    for body in blocks(page, "python"):
        missing = [name for name in HEAVY if f"from {name}" in body and importlib.util.find_spec(name) is None]
        skipped += missing
        if not missing:
            exec(compile(body, page, "exec"), names)
    if skipped:
        pytest.skip(f"{', '.join(dict.fromkeys(skipped))}: not installed, the other programs ran")


QUESTIONS = [
    "My model runs out of memory at 64K tokens: what do I write?",
    "Which pattern keeps quality?",
    "How do I split a sequence over 4 GPUs?",
    "Why is it slower than sdpa here?",
    "Does it run on my GPU?",
]


def test_the_questions_have_code_and_the_figures_of_the_quality_page() -> None:
    questions = re.split(r"^## ", read("questions.md"), flags=re.M)[1:]
    assert [text.partition("\n")[0] for text in questions] == QUESTIONS
    assert all(re.search(r"^```(python|pycon)$", text, re.M) for text in questions)
    (table,) = blocks("questions.md", "text")
    assert len(table.splitlines()) == 4
    assert [line for line in table.splitlines() if line not in read("quality.md").splitlines()] == []
    # The choice keeps 98% of each task at 25%, and loses more than a third of one at 5%, as the page says.
    rows = re.findall(r"^\| default \|(.*\|.*)$", read("quality.md"), re.M)
    kept = torch.tensor([[float(word.split()[0]) for word in row.split("|")[:5]] for row in rows if row.count("|") > 1])
    assert len(kept) == 6
    assert kept[:, 1].min() >= 98
    assert (kept[:, 3] < 66).sum() == 1
    recipes = dict(text.split("\n", 1) for text in read("troubleshooting.md").split("\n## ")[1:])
    titles = "Out of memory, Slower than dense, Wrong or leaking results, Compile, recompile, export, A rank fails"
    assert ", ".join(recipes) == titles
    assert all("```pycon" in text for text in recipes.values())


def test_the_program_for_four_gpus_has_one_loss_on_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "four.py"
    (text,) = (body for body in blocks("questions.md", "python") if "init_process_group" in body)
    # It uses the GPU and NCCL if there is one, and the tests compare gloo.
    program.write_text(text.replace("torch.cuda.is_available()", "False"))
    runpy.run_path(str(program))
    losses = [float(said.removeprefix("loss ")) for said in (capsys.readouterr().out, output_of(2, program))]
    # Without the exchange of keys, the loss of two ranks is off by 5e-4.
    assert losses[0] == pytest.approx(losses[1], abs=5e-5)


PATTERN_PAGES = [page for page in PAGES if page.startswith("patterns/") and page != "patterns/index.md"]


def test_every_pattern_has_a_whole_page_with_a_picture() -> None:
    words = set(re.findall(r"\w+", " ".join("".join(blocks(page, "text")) for page in PATTERN_PAGES)))
    rules = [thing for thing in vars(patterns).values() if inspect.isclass(thing) and issubclass(thing, Pattern)]
    presets = [name for name in patterns.__all__ if inspect.isfunction(getattr(patterns, name)) and name != "parse"]
    assert {rule.__name__ for rule in rules if rule is not Pattern} | set(presets) <= words
    for page in PATTERN_PAGES:
        text = read(page)
        assert re.findall(r"^## (.*)$", text, re.M) == ["Rule", "Cost", "When to use it", "Example"], page
        assert re.findall(r"!\[.+\]\((.*)\)", text) == [f"{Path(page).stem}.png"]
        assert f"({Path(page).name})" in read("patterns/index.md")
    pictures = {path.stem: path.stat().st_size for path in (DOCS / "patterns").glob("*.png")}
    names = {"index", *(Path(page).stem for page in PATTERN_PAGES)}
    assert set(script("pictures").PICTURES) == names == set(pictures)
    assert max(pictures.values()) < 40 * 1024


@pytest.mark.parametrize("page", [*PATTERN_PAGES, "patterns/index.md"])
def test_a_picture_is_what_its_pattern_draws(page: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib, the plot extra")
    script("pictures").draw(Path(page).stem, tmp_path / "drawn.png")
    assert_same_picture(tmp_path / "drawn.png", DOCS / f"{page[:-3]}.png")


def test_the_picture_of_readme_is_that_of_the_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib, the plot extra")
    made = script("speed_picture")
    made.draw(tmp_path / "drawn.png")
    assert_same_picture(tmp_path / "drawn.png", made.PATH)
    assert made.PATH.stat().st_size < 80 * 1024


def assert_same_picture(drawn: Path, kept: Path) -> None:
    """Compare two PNGs without a background."""
    from matplotlib import image

    drawn, kept = (torch.from_numpy(image.imread(path)) for path in (drawn, kept))
    # Pages are white or dark: a picture brings no background of its own.
    assert drawn[0, 0, 3] == kept[0, 0, 3] == 0
    # Another version of matplotlib sets letters a little differently.
    assert all(abs(a - b) <= 8 for a, b in zip(drawn.shape, kept.shape, strict=True))
    high, wide = (min(sizes) for sizes in zip(drawn.shape[:2], kept.shape[:2], strict=True))
    assert (drawn[:high, :wide] - kept[:high, :wide]).abs().mean() < 0.02


def test_the_promises_are_those_of_the_table() -> None:
    assert read("promises.md") == script("promises").page(), "run python scripts/promises.py"
    assert [page for page in PAGES if "promises.md" in read(page)] == ["from-dilated-attention-pytorch.md"]
    assert "promises" not in README


def test_what_is_behind_a_promise_exists() -> None:
    promises = script("promises")
    entries = [entry for _, entry in promises.entries()]
    known = {"promise", "in", "status", "waits", "now", "before", "here", "proof", "sums", "cells"}
    for entry in entries:
        assert {"promise", "in", "status", "now"} <= set(entry) <= known, entry
        assert entry["status"] in promises.STATUSES, entry
        assert set(entry["in"]) <= set(promises.DOCUMENTS), entry
        assert ("waits" in entry) == (entry["status"] == "pending"), entry
        if entry["status"].startswith("true"):
            assert entry.get("proof") or any({"least", "most"} & set(cell) for cell in entry["cells"]), entry
        assert all(pkgutil.resolve_name(name) is not None for name in entry.get("here", ())), entry
        assert all(proof_exists(proof) for proof in entry.get("proof", ())), entry
        assert all(eval(text) is True for text in entry.get("sums", ())), entry
        assert all(promises.told(cell).startswith("*") for cell in entry.get("cells", ())), entry
    told = [entry["promise"] for entry in entries]
    assert len(told) == len(set(told))


def test_a_target_that_the_record_misses_is_pending() -> None:
    promises = script("promises")
    cell = {"record": "bench-acceptance", "asked": "window(768)", "n_tokens": 16384}
    ratio, _ = promises.measured(cell)
    assert f"*{ratio:.2f}x* (target: at least 10.00x): `window(768)`" in promises.told(cell | {"least": 10})
    for bound, factor, met in (("least", 1, True), ("least", 1.01, False), ("most", 1, True), ("most", 0.99, False)):
        entry = {"status": "true now", "cells": [cell, cell | {bound: factor * ratio}]}
        assert promises.status_of(entry) == (("true now", "") if met else ("pending", "speed"))
    with pytest.raises(ValueError, match=r"no time of ringtile for .*'n_tokens': 7"):
        promises.told(cell | {"n_tokens": 7})


def test_bigbird_and_torch_sparse_are_what_the_promises_say() -> None:
    index = layout.build_index(patterns.bigbird(), 16384)
    assert (round(index.density, 3), round(index.tile_density, 3)) == (0.049, 0.119)
    rows = Record.from_json((RECORDS / "bench-grid.json").read_text()).rows
    times = {(row.peer, row.problem[:-1]): row.median_ms for row in rows if row.median_ms is not None}
    pairs = [(time, times["ringtile", problem]) for (peer, problem), time in times.items() if peer == "torch.sparse"]
    assert len(pairs) > 20
    assert all(theirs > ours for theirs, ours in pairs)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def proof_exists(proof: str) -> bool:
    """Whether a record, or a test ``file::name``, is there."""
    file, _, name = proof.partition("::")
    if not (ROOT / file).is_file() or file.startswith("tests/") != bool(name):
        return False
    return not name or name in functions_of(file)


def test_what_does_not_exist_is_no_proof() -> None:
    here = "tests/project/test_site.py"
    assert proof_exists(f"{here}::test_what_does_not_exist_is_no_proof")
    for proof in (f"{here}::test_x", "tests/test_no.py::test_x", here, "benchmarks/no.json"):
        assert not proof_exists(proof)
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("ringtile.patterns.Windows")


def test_the_benchmark_page_is_that_of_the_records() -> None:
    made = script("benchmark_page")
    assert read("benchmarks.md") == made.page(made.records()), "run python scripts/benchmark_page.py"


def test_every_record_is_on_the_page_with_its_command() -> None:
    made = script("benchmark_page")
    found = made.records()
    assert {f"bench-{name}" for name in found} == {path.stem for path in RECORDS.glob("bench-*.json")}
    for name, record in found.items():
        words = made.words_of(name)
        # Records that are older than this program are of `ringtile bench`, with the same arguments.
        assert shlex.split(record.command)[2:] == words
        assert words[-1] == f"benchmarks/records/bench-{name}.json"
        assert not record.interrupted
        assert f"```sh\npython benchmarks/suites.py {shlex.join(words)}\n```" in read("benchmarks.md")
        assert all(row.median_ms is not None for row in record.rows if row.peer == "ringtile")
        cells = {(task.case.asked, task.case.n_tokens) for task in suite(suite_of(name))}
        assert {(row.asked, row.n_tokens) for row in record.rows} == cells


def test_every_record_is_of_a_quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = script("benchmark_page")
    assert [name for name, record in made.records().items() if made.free(record) < made.LEAST_FREE] == []
    monkeypatch.setattr(made, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    made.FOLDER.mkdir()

    def measured(clock: float) -> None:
        record = invented("short")
        record = replace(record, rows=tuple(replace(row, clock=clock) for row in record.rows))

        def bench(words: list[str]) -> int:
            (tmp_path / words[words.index("--json") + 1]).write_text(record.to_json())
            return 0

        monkeypatch.setattr(made, "measure_suite", bench)
        made.measure(["short"])

    measured(0.95)
    with pytest.raises(SystemExit, match=r"bench-short.json: other processes left 50% of the processor"):
        measured(0.5)


def suite_of(name: str) -> str:
    """The suite of a record."""
    return script("benchmark_page").words_of(name)[1]


def test_the_figures_of_readme_are_those_of_the_records() -> None:
    made = script("benchmark_page")
    found = made.records()
    assert README == made.readme(README, found), "run python scripts/benchmark_page.py"
    start = read("getting-started.md")
    assert start == made.start_page(start, made._trains()), "run python scripts/benchmark_page.py"
    # README names one machine for its picture and both tables.
    assert found["density"].machine == found["acceptance"].machine == found["long"].machine
    mutants = script("mutants").MUTANTS
    figures = len(mutants) // 100 * 100, sum(mutant.is_native for mutant in mutants) // 10 * 10
    told = "injects over {} faults into the sources, over {} of them into the C++ kernel".format(*figures)
    assert told in " ".join(read("correctness.md").split())
    assert "faster than dense attention from a few hundred tokens up" in " ".join(README.split())
    starts = [row.n_tokens for row in break_even(found["default"].rows)]
    assert starts
    assert all(start is not None and start < 1000 for start in starts)


def test_the_page_of_pattern_quality_is_that_of_its_record() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "patterns.py"))
    record = json.loads((RECORDS / "patterns.json").read_text(encoding="utf-8"))
    assert read("pattern-quality.md") == made["page"](record), "run python benchmarks/patterns.py --page"
    for name in ("window", "longformer", "bigbird", "LongNet"):
        found = made["averages"](record["rows"], pattern=name, asked=0.25, lora=0)
        assert made["_words"](found) in read("patterns/index.md")
    sinks = made["averages"](record["rows"], pattern="window and 4 sinks", asked=0.25, lora=0)
    assert f"keeps {sinks['text']:.0%} of a text" in " ".join(README.split())
    assert f"On {record['machine']['cores']} cores ({record['machine']['cpu']}), with a window and sinks" in README
    assert sinks["copy"] < 0.03


def test_the_quality_page_is_that_of_its_record() -> None:
    made = script("quality_page")
    small, theirs = made.record_of("small_tasks"), made.record_of("quality")
    assert read("quality.md") == made.page(small, theirs), "run python scripts/quality_page.py"
    assert (small.command, theirs.command) == (made.SMALL, made.THEIRS)
    assert not small.interrupted
    assert not theirs.interrupted
    assert {cell.setting.seed for cell in small.cells} == {0, 1, 2}
    assert {table.task for table in made.tables(small.cells)} == set(made.TASKS)
    assert made.leg.table(theirs.cells)


def test_the_section_of_another_engine_has_means_and_worst_texts() -> None:
    made = script("quality_page")
    row = {"tokens": 4096, "name": "ringtile", "seconds": 2.5, "speedup": 1.6, "times": [2.5] * 3, "texts": ["a", "b"]}
    ours = {**row, "density": [0.25, 0.27], "text": [1.0, 0.9], "copy": [1.0, 0.8], "needles": [0.5, 0.7]}
    theirs = {**ours, "name": "OpenVINO", "density": [None, None], "tokens": 8192, "texts": ["a"]}
    facts = {
        "machine": {"cpu": "C", "threads": 2},
        "versions": {"torch": "2"},
        "openvino_genai": "1",
        "dtype": "bfloat16",
    }
    record = {**facts, "command": "python x", "xattention": {"block": 64}, "rows": [ours, theirs]}
    _, text, command, short, long = made._peer(record)
    assert "tiles of 64 tokens" in text
    assert "The texts: a, b. Measured on C, 2 threads, torch 2." in " ".join(text.split())
    assert command.text.endswith("python x")
    assert short.rows == [["ringtile", "26.0%", "2.50", "1.60x", "95.0", "90.0", "90.0", "80.0", "60.0", "50.0"]]
    assert (long.heads[0], long.rows[0][:2]) == ("8,192 tokens", ["OpenVINO", "-"])


def test_a_wrong_figure_in_readme_is_put_right() -> None:
    made = script("benchmark_page")
    found = {name: invented(name) for name in ("short", "fallback", "density", "long", "acceptance", "grid")}
    found["short"] = slower({26: (0.041, 0.151), 64: (0.05, 0.2), 128: (-0.009, 0.02)}, 256, found["short"])
    found["fallback"] = slower({}, 1024, found["fallback"])
    short = [row for row in found["long"].rows if row.peer == "ringtile" or row.n_tokens <= 65536]
    found["long"] = replace(found["long"], rows=tuple(short))
    held = [{"seconds": 20.4, "bits": 3.5}, {"seconds": 60.0, "bits": 3.25}]
    runs = {"sparse": {"steps": 99, "held_out": held}, "dense": {"steps": 7, "held_out": [{"seconds": 21, "bits": 5}]}}
    text = made.readme(README, found)
    flat = " ".join(text.split())
    # In the invented records a row takes as long as its tiles, dense attention as long as all pairs: twice the causal.
    rows = [row for row in found["density"].rows if row.peer == "ringtile" and row.direction == "forward"]
    for row, share in zip(rows, ("50%", "25%", "10%", "5%", "2%"), strict=True):
        assert f"| {share} | {row.speedup:.1f}x | {row.speedup:.1f}x |" in text
    assert "Measured on 2 cores (a processor, AVX512) with torch 2.1: float32" in flat
    assert "| 1M | " in text
    assert text.count("(extrapolated)") == 2
    assert "| `window(384)` | 5.4% | " in text
    assert "On 2 cores (a processor), a call of `causal & window(256)` with 4 heads costs 41, 50 and -9 µs more" in flat
    assert "at 26, 64 and 128 tokens, and 151, 200 and 20 µs more with its backward pass. It is faster from 256" in flat
    assert "256 tokens up, and without the compiled kernel it is faster from 1,024 tokens up. If" in flat
    assert "1.0 to 1.0 times as fast as PyTorch's in float32 from 4,096 tokens up, but 1.00 times at 1,024" in flat
    assert max(map(len, text.splitlines())) <= 120
    again = text.replace(f"| 50% | {rows[0].speedup:.1f}x", "| 50% | 99.0x")
    assert again != text
    assert made.readme(again, found) == text
    trains = {"machine": {"cores": 2, "cpu": "a processor"}, "trains": {"runs": runs}}
    start = made.start_page(read("getting-started.md"), trains)
    flat = " ".join(start.split())
    assert "On 2 cores (a processor), sparse attention makes 99 steps in a minute and reaches 3.25 bits" in flat
    assert "makes 7 steps in 21 s and reaches 5.00. After 20 s, sparse attention is at 3.50." in flat
    again = start.replace("3.25 bits", "1.0 bits")
    assert again != start
    assert made.start_page(again, trains) == start
    for missing in ("When dense is", "| tile density |"):
        with pytest.raises(ValueError, match="README: expected"):
            made.readme(text.replace(missing, "no"), found)
    # Until the short suite is measured, the sentence is of the first pattern of the default one.
    early = {name: invented(name) for name in ("default", "acceptance")}
    early["default"] = slower({26: (0.01, 0.02), 64: (0.03, 0.04), 128: (0.05, 0.06)}, 10_000, early["default"])
    told = " ".join(made.readme(text, early).split())
    assert "`causal & window(256, 0)` with 4 heads costs 10, 30 and 50 µs more" in told
    assert "20, 40 and 60 µs more with its backward pass. It is not faster up to 4,096 tokens. If" in told


def slower(costs: dict[int, tuple[float, float]], even: int, record: Record) -> Record:
    """A record in which calls of ringtile cost these ms more than dense attention, forward and with the backward pass,
    at some lengths, are slower up to a length, and faster from there."""
    dense = {(row.asked, row.n_tokens, row.direction): row.median_ms for row in record.rows if row.peer == "dense"}
    rows = []
    for row in record.rows:
        if row.peer == "ringtile":
            theirs = dense[row.asked, row.n_tokens, row.direction]
            forward, both = costs.get(row.n_tokens, (1.0, 1.0) if row.n_tokens < even else (-theirs / 2,) * 2)
            time = theirs + (forward if row.direction == "forward" else both)
            row = replace(row, median_ms=time, speedup=theirs / time if time > 0 else 0.5)
        rows.append(row)
    return replace(record, rows=tuple(rows))


def invented(name: str) -> Record:
    """A record of a suite in which dense attention takes 1 ms for each 2^24 pairs and a head, ours as its tiles, others
    five times as much, and the limit is half of that."""
    rows = []
    for cell in suite(suite_of(name)):
        case = cell.case
        whole = case.queries * case.n_tokens * case.heads / 2**24
        tiles = case.index.tile_pairs(1, case.heads)
        for direction in cell.directions:
            work = tiles * case.head_dim * (4.0 if direction == "forward" else 14.0)
            for peer in (peer.name for peer in cell.peers):
                ours = tiles / 2**24 * (2 if case.threads == 1 else 1)
                time = {"ringtile": ours, "dense": whole}.get(peer, 5 * tiles / 2**24)
                row = bench.blank_row(case, direction, peer)
                known = {"operations": work, "limit_ms": time / 2} if peer == "ringtile" else {}
                figures = {"density": case.index.density, "tile_density": case.index.tile_density, **known}
                figures.update(median_ms=time, low_ms=time, high_ms=time, speedup=whole / time, error=1e-7, rounds=3)
                rows.append(replace(row, peak_forward_bytes=100 << 20, **figures))
    rates = {"2": {"fma_float32": 1e13, "exp_float32": 1e10, "read": 1e10, "dot_bfloat16": 2e13}}
    versions: Any = {"torch": "2.1+cpu", "python": "3", "ringtile": "0"}
    machine = {"cpu": "a processor", "cores": 2, "threads": 2, "instruction_set": "AVX512"}
    facts: Any = {"commit": "abc+changes", "versions": versions, "machine": machine, "seed": 0, "seconds": 0.3}
    return Record(**facts, rows=tuple(rows), peaks=rates, command=f"python benchmarks/suites.py --suite {name}")


def test_the_page_of_the_suites_states_what_was_asked_for_and_what_is() -> None:
    made = script("benchmark_page")
    found = {name: invented(name) for name in made.RECORDS}
    text = made.page(found)
    lines = text.splitlines()
    # Every cell of a table, none of them broken by a bar in its text.
    for start, line in enumerate(lines):
        if line.startswith("|---"):
            width = line.count("|")
            for row in lines[start - 1 :]:
                if not row.startswith("|"):
                    break
                assert row.replace("\\|", "").count("|") == width, row
    assert "Rates at 2 threads: float32 1e+04 GFLOP/s, bfloat16 pairs 2e+04 GFLOP/s, exponentials 10 G/s" in text
    assert text.count("not recorded yet") == 0
    for name in found:
        assert f"python benchmarks/suites.py --suite {suite_of(name)} " in text
        for task in suite(suite_of(name)):
            assert f"| {task.case.n_tokens:,} |" in text or name == "density"
    bars = {bar.what: bar for bar in script("acceptance").bars(found["acceptance"])}
    dense = bars["dense, N 4,096, D64, forward: over torch's dense attention"]
    assert (dense.wanted, dense.measured, dense.met) == (">= 2.00x", "1.00x", False)
    over = "| dense, N 4,096, D64, forward: over torch's dense attention | >= 2.00x | 1.00x |"
    assert f"{over} 2.00x | **missed** |" in lines
    # 2^24 pairs a millisecond and head are 4 * 64 * 2^24 operations a millisecond.
    share = bars["dense, N 4,096, D64, forward: of the FMA peak of the same run"]
    assert (share.wanted, share.measured, share.met) == (">= 75%", "43%", False)
    assert bars["tiles half full, forward: operations per second over D64, N 4,096"].measured == "100%"
    assert bars["over compiled FlexAttention, float32, forward; the worst: `dense`, N 4,096"].measured == "5.00x"
    long = "`window(512) | global_tokens(64)`, N 131,072"
    assert bars[f"{long}, forward: efficiency on 2 threads"].measured == "100%"
    assert bars[f"{long}, forward+backward: time per tile over random blocks"].measured == "1x"
    memory = bars[f"{long}, H8: memory beyond inputs and output; finite and non-zero everywhere"]
    assert (memory.wanted, memory.measured, memory.met) == ("<= 144 MiB", "100 MiB", True)
    assert sum(bar.met is None for bar in bars.values()) == 4
    assert len(bars) == 40
    # Where the limit is slower than the bar too, nobody could have met it.
    rows = found["acceptance"].rows
    slow = tuple(replace(row, limit_ms=None if row.limit_ms is None else row.median_ms) for row in rows)
    text = made.page({"acceptance": replace(found["acceptance"], rows=slow)})
    assert f"{over} 1.00x | out of reach |" in text


def test_a_record_without_a_row_says_which() -> None:
    record = invented("acceptance")
    with pytest.raises(ValueError, match=r"no time of ringtile for .*'asked': 'dense', 'n_tokens': 4096"):
        script("acceptance").bars(replace(record, rows=record.rows[6:]))


CLAIMED_TABLES = script("benchmark_page").claims()
CLAIMED_ROWS = [row for table in CLAIMED_TABLES for row in table["rows"]]


def test_what_is_beside_a_claim_is_a_row_of_a_suite() -> None:
    assert {table["document"] for table in CLAIMED_TABLES} <= set(script("promises").DOCUMENTS)
    assert all(len(row["cells"]) == len(table["columns"]) for table in CLAIMED_TABLES for row in table["rows"])
    cells = {name: suite(name) for name in {row["here"][0] for row in CLAIMED_ROWS if "here" in row}}
    for row in CLAIMED_ROWS:
        if "here" in row:
            name, direction, figure, facts = row["here"]
            assert figure in ("ms", "dense ms", "speedup", "ms and MiB", "break-even")
            at = f" at {facts['at']:g}" if "at" in facts else ""
            wanted = {fact: value for fact, value in facts.items() if fact != "at"}
            assert any(
                direction in cell.directions
                and cell.case.asked.endswith(at)
                and all(getattr(cell.case, fact) == value for fact, value in wanted.items())
                for cell in cells[name]
            ), row


def test_home_lists_every_page_but_those_of_patterns_and_the_reference() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = set(re.findall(r"^ +- (?:[^:]+: )?(\S+\.md)$", nav, re.M))
    assert {"how-to/finetune.md", "adaptive.md", "questions.md", "quality.md", "who-should-not.md"} <= pages
    linked = re.findall(r"\]\(([^)#]+)\)", read("index.md"))
    single = {page for page in pages if not page.startswith(("patterns/", "reference/"))}
    assert sorted(single - {"index.md", *(link.replace(".ipynb", ".md") for link in linked)}) == []
    assert "context_parallel(model" in read("index.md")
    assert len(PEERS) - 1 == 3
    assert "against dense attention and three other implementations" in " ".join(read("index.md").split())
    assert "(docs/quality.md)" in README
    assert "(docs/questions.md)" in README


def test_every_old_name_has_a_new_one() -> None:
    names = face(dilated_attention_pytorch)
    assert len(names) > 15
    text = read("from-dilated-attention-pytorch.md")
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: the docs extra has it")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    # With --quiet it would not see the warnings that it fails for.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "site" / "reference").glob("*.html")}
    told = {
        anchor.rpartition(".")[2]
        for anchor in re.findall(r'id="((?:ringtile|dilated_attention_pytorch)\.[\w.]+)"', "".join(pages.values()))
    }
    assert face(ringtile) | face(dilated_attention_pytorch) | face(patterns) <= told
    page = (tmp_path / "site" / "notebooks" / "first-pattern.html").read_text(encoding="utf-8")
    assert "token 1000 sees 145 keys" in page
    assert 'href="sparse-decoder.html"' in page
    # One signature per function, without its overloads.
    of_kind = [pages["attention"].count(f'class="doc doc-object doc-{kind}"') for kind in ("function", "class")]
    assert pages["attention"].count("doc-signature") == sum(of_kind)
    assert "--max-slowdown" in pages["command-line"]
    # Search works from disk: index and shim are in the site, and no page loads a script from a server.
    assert (tmp_path / "site" / "search" / "search_index.js").is_file()
    assert 'src="../assets/iframe-worker.js"' in pages["attention"]
    assert not re.search(r'<script[^>]+src="https?:', "".join(pages.values()))
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    first = [entry["title"] for entry in entries if entry.get("boost", 1) > 1]
    assert [title for title in first if title in QUESTIONS] == QUESTIONS
    assert {entry["location"].partition("#")[0] for entry in entries if "boost" in entry} == {"questions.html"}
    titles = [entry["title"] for entry in entries if entry["location"].startswith("benchmarks.html")]
    assert "Targets" in titles
    tables = {f"{table['document']}: {table['title']}" for table in script("benchmark_page").claims()}
    assert {*tables, "The tables of the five documents"} & set(titles) == set()
    assert not any(entry["location"].startswith("promises.html") for entry in entries)


def face(module: ModuleType) -> set[str]:
    return {name for name, thing in vars(module).items() if callable(thing) and name[0] != "_"}


def test_the_page_of_the_command_line_has_the_help_of_every_verb() -> None:
    page = read("reference/command-line.md")
    assert re.findall(r"^## (\w+)$", page, re.M) == list(cli.VERBS)
    shown = script("site_hooks").on_page_markdown(page)
    for verb in cli.VERBS:
        assert f"usage: ringtile {verb}" in shown
        assert f"<!-- ringtile {verb} --help -->" in page


def test_every_environment_variable_is_on_its_page() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    variables = set(re.findall(r'"(RINGTILE_[A-Z_]+)"', sources))
    assert "RINGTILE_CPU" in variables
    page = set(re.findall(r"`(RINGTILE_[A-Z_]+)\b", read("reference/environment.md")))
    assert variables <= page
    assert page - variables <= set(re.findall(r"\bRINGTILE_[A-Z_]+\b", tests))
