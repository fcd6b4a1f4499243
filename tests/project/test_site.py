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
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from programs import output_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from suites import suite

import dilated_attention_pytorch
import ringtile
from ringtile import cli, index as layout, patterns
from ringtile.patterns import Pattern
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


def test_the_questions_have_the_figures_of_the_quality_page() -> None:
    (table,) = blocks("questions.md", "text")
    assert [line for line in table.splitlines() if line not in read("quality.md").splitlines()] == []
    # The choice keeps 98% of each task at 25%, and loses more than a third of one at 5%, as the page says.
    rows = re.findall(r"^\| default \|(.*\|.*)$", read("quality.md"), re.M)
    kept = torch.tensor([[float(word.split()[0]) for word in row.split("|")[:5]] for row in rows if row.count("|") > 1])
    assert len(kept) == 6
    assert kept[:, 1].min() >= 98
    assert (kept[:, 3] < 66).sum() == 1


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
        assert re.findall(r"!\[.+\]\((.*)\)", read(page)) == [f"{Path(page).stem}.png"]
        assert f"({Path(page).name})" in read("patterns/index.md")
    names = {"index", *(Path(page).stem for page in PATTERN_PAGES)}
    assert set(script("pictures").PICTURES) == names


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


def assert_same_picture(drawn: Path, kept: Path) -> None:
    """Compare two PNGs without a background."""
    from matplotlib import image

    drawn, kept = (torch.from_numpy(image.imread(path)) for path in (drawn, kept))

    # Another version of matplotlib sets letters a little differently.
    assert all(abs(a - b) <= 8 for a, b in zip(drawn.shape, kept.shape, strict=True))
    high, wide = (min(sizes) for sizes in zip(drawn.shape[:2], kept.shape[:2], strict=True))
    assert (drawn[:high, :wide] - kept[:high, :wide]).abs().mean() < 0.02


def test_the_promises_are_those_of_the_table() -> None:
    assert read("promises.md") == script("promises").page(), "run python scripts/promises.py"


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
        cells = {(task.case.asked, task.case.n_tokens) for task in suite(words[1])}
        assert {(row.asked, row.n_tokens) for row in record.rows} == cells


def test_every_record_is_of_a_quiet_machine() -> None:
    made = script("benchmark_page")
    assert [name for name, record in made.records().items() if made.free(record) < made.LEAST_FREE] == []


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


def test_home_lists_every_page_but_those_of_patterns_and_the_reference() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = set(re.findall(r"^ +- (?:[^:]+: )?(\S+\.md)$", nav, re.M))

    linked = re.findall(r"\]\(([^)#]+)\)", read("index.md"))
    single = {page for page in pages if not page.startswith(("patterns/", "reference/"))}
    assert sorted(single - {"index.md", *(link.replace(".ipynb", ".md") for link in linked)}) == []


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
    # One signature per function, without its overloads.
    of_kind = [pages["attention"].count(f'class="doc doc-object doc-{kind}"') for kind in ("function", "class")]
    assert pages["attention"].count("doc-signature") == sum(of_kind)
    # Search works from disk: index and shim are in the site, and no page loads a script from a server.
    assert (tmp_path / "site" / "search" / "search_index.js").is_file()
    assert 'src="../assets/iframe-worker.js"' in pages["attention"]
    assert not re.search(r'<script[^>]+src="https?:', "".join(pages.values()))
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {entry["location"].partition("#")[0] for entry in entries if "boost" in entry} == {"questions.html"}
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
