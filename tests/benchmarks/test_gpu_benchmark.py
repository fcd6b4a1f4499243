"""benchmarks/gpu.py: whole on a GPU that is not there and in the interpreter, and each of its promises."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pages import markdown

from ringtile.kernels.triton import tuning
from ringtile.patterns import Causal, Window, parse
from ringtile.tools.bench.peers import Case

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
KNOWN = "an index with unused room"
"""A case that reads what only a GPU computes, so that it fails on the mock."""


def ran(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/gpu.py", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import gpu

    monkeypatch.setattr(gpu, "synchronize", lambda: None)
    return gpu


def page_of(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from benchmark_page import gpu_section

    return markdown(gpu_section(record)).splitlines()


def test_all_sections_run_on_a_gpu_that_is_not_there(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "elsewhere" / "record.json"
    done = ran("--mock", "--out", path, "--baseline", ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(path.read_text())
    cells = found["cells"]
    assert set(cells) == set(gpu.SECTIONS) - {"passes"}
    assert not any(found["left"].values())
    errors = {name: value for section in cells.values() for name, value in section.items() if "error" in value}
    assert list(errors) == [KNOWN]
    assert f"gate: {KNOWN}: ValueError" in done.stdout.splitlines()[-1]
    assert all(cells[name] for name in set(cells) - {"claims"})
    assert {value["kernel"] for value in cells["sweep"].values()} == {"forward", "dq", "dkdv"}
    timed = [cell for name in ("masks", "flex", "lengths", "million") for cell in cells[name].values()]
    ours = [row for cell in timed for row in cell["rows"] if row["peer"] == "ringtile"]
    assert len(ours) == 2 * 4 + 1
    assert all(row["median_ms"] and row["error"] <= row["error_bound"] and row["host_us"] for row in ours)
    # As if it were one of a GPU.
    lines = page_of({**found, "clock": "events"}, monkeypatch)
    gate = len(cells["gate"])
    assert f"{gate - 1} of {gate} cases of outputs and gradients are right against float64." in lines
    # Such a record is no measurement.
    with pytest.raises(ValueError, match=r"expected times by a GPU's events .*, got clock='mock'"):
        page_of(found, monkeypatch)
    with pytest.raises(SystemExit, match="expected a record of an NVIDIA GPU, got mock"):
        gpu.adopt(path)
    with pytest.raises(SystemExit, match=r"has other clock.* than this run"):
        gpu.opened(tmp_path / "other.json", path)


def cells_of(gpu: Any, **runs: Callable[[], dict[str, Any]]) -> list[Any]:
    return [gpu.Cell(name, run) for name, run in runs.items()]


def blank() -> dict[str, Any]:
    return {"cells": {}, "left": {}, "running": None}


def test_a_section_stops_in_time_and_says_what_is_left(gpu: Any) -> None:
    found, saved = {**blank(), "left": {"masks": ["first", "slow", "last"]}}, []
    began = time.monotonic()
    cells = cells_of(gpu, first=lambda: {"x": 1}, slow=lambda: time.sleep(20), last=lambda: {"x": 3})
    gpu.run_section("masks", cells, found, 0.2, lambda: saved.append(json.loads(json.dumps(found))))
    assert time.monotonic() - began < 10
    assert found == {"cells": {"masks": {"first": {"x": 1}}}, "left": {"masks": ["slow", "last"]}, "running": None}
    assert saved[-1] == found
    # Then the others, and none twice.
    cells = cells_of(gpu, first=lambda: 1 / 0, slow=lambda: {"x": 2}, last=lambda: 1 / 0)
    gpu.run_section("masks", cells, found, 60.0, lambda: None)
    assert found["cells"]["masks"]["slow"] == {"x": 2}
    assert "ZeroDivisionError" in found["cells"]["masks"]["last"]["error"]
    assert found["left"]["masks"] == []


def test_an_interruption_keeps_the_record(gpu: Any, tmp_path: Path) -> None:
    found, path = {**gpu.blank(), "left": {"masks": ["first", "second"]}}, tmp_path / "record.json"

    def save() -> None:
        gpu.write_whole(path, json.dumps(found))

    def interrupt() -> dict[str, Any]:
        assert json.loads(path.read_text())["running"] == ["masks", "second"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu.run_section("masks", cells_of(gpu, first=lambda: {"x": 1}, second=interrupt), found, 60.0, save)
    save()
    again = gpu.opened(path, None)
    assert again["cells"] == {"masks": {"first": {"x": 1}}}
    # After a crash the cell is not tried again.
    path.write_text(json.dumps({**found, "running": ["masks", "second"]}))
    again = gpu.opened(path, None)
    assert "began and did not end" in again["cells"]["masks"]["second"]["error"]
    assert list(tmp_path.iterdir()) == [path]


def test_before_continues_elsewhere_and_refuses_what_differs(gpu: Any, tmp_path: Path) -> None:
    before, out = tmp_path / "before.json", tmp_path / "out.json"
    old = {**gpu.blank(), "machine": {"cpu": "another"}, "cells": {"gate": {"a": {"share": 0.5}}, "masks": {"b": {}}}}
    before.write_text(json.dumps(old))
    out.write_text(json.dumps({**gpu.blank(), "cells": {"masks": {"c": {}}}}))
    assert gpu.opened(out, before)["cells"] == {"gate": {"a": {"share": 0.5}}, "masks": {"b": {}, "c": {}}}
    for name in ("devices", "versions", "sources", "format"):
        before.write_text(json.dumps({**old, name: "other"}))
        with pytest.raises(SystemExit, match=f"has other {name} than this run"):
            gpu.opened(out, before)


def test_what_the_gate_found_wrong_is_not_timed(gpu: Any) -> None:
    import gpu_prepare
    import gpu_sections
    from triton_cases import CASES

    assert set(CASES) >= gpu_sections.UNTIMED | gpu_sections.GROUPED
    case = Case("causal", Causal(), 64)
    grouped = gpu_prepare.Problem(Case("causal", Causal(), 64, heads=4, kv_heads=2))
    for wrong, refused in (
        ("dropout", (False, False)),
        ("one query decodes", (False, True)),
        ("causal over sub tiles", (True, True)),
    ):
        found = {
            **blank(),
            "left": {"masks": ["0", "1"]},
            "cells": {"gate": {wrong: {"error": "2 of the error"}, "scales": {"share": 0.5}}},
        }
        cells = [
            gpu.Cell(f"{n}", lambda: {"x": 1}, (problem,))
            for n, problem in enumerate((gpu_prepare.Problem(case), grouped))
        ]
        gpu.run_section("masks", cells, found, 60.0, lambda: None)
        assert tuple("refused" in value for value in found["cells"]["masks"].values()) == refused
        if all(refused):
            assert found["cells"]["masks"]["0"] == {"refused": f"not timed, because the gate found wrong: {wrong}"}


def test_wrong_arguments(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--sections", "gate,mask"], "--sections: expected some of gate,machine"),
        (["--baseline", "nowhere"], "--baseline: expected a checkout with src/ringtile, got nowhere"),
    ):
        with pytest.raises(SystemExit):
            gpu.arguments(words)
        assert said in capsys.readouterr().err


def test_time_of_a_gpu_that_waited_for_the_host_is_left_out(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_times

    log: list[str] = []
    waited = iter([False, True, False, True, False])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def query(self) -> bool:
            self.waited = next(waited)
            return self.waited

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 100.0 if self.waited else 2.0

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: None, _sleep=lambda cycles: log.append("sleep"))
    monkeypatch.setattr(gpu_times, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu_times, "CLOCK", "events")
    monkeypatch.setattr(gpu_times, "MOST_ROUNDS", 4)
    times = gpu_times.times_of({"call": lambda: log.append("call")}, 60.0)["call"]
    assert (times["ms"], times["rounds"], times["apart"]) == (2.0, 2, True)
    # The GPU sleeps while the host sends.
    assert log == ["call"] + 5 * ["sleep", "record", "call", "record"]


def test_the_rules_for_flex_attention_are_the_patterns(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_sections

    monkeypatch.setattr(gpu_sections, "DEVICE", torch.device("cpu"))
    n = 1500
    i, j = torch.arange(n)[:, None], torch.arange(n)
    zero = torch.tensor(0)
    for name in gpu_sections.FLEX:
        pattern = parse(gpu_sections.masks(n)[name])
        kept = gpu_sections.flex_rule(name, n)(zero, zero, i, j).expand(n, n)
        assert torch.equal(kept, pattern.allowed(zero, i, j).expand(n, n)), name


def test_a_configuration_of_the_sweep_is_what_is_launched(gpu: Any) -> None:
    import gpu_prepare
    import gpu_sections
    import mock_gpu

    case = Case("window", Causal() & Window(40, 0), 300, heads=2, head_dim=64, dtype=torch.bfloat16)
    for kernel in gpu_sections.TILES:
        for head_dim in (64, 128):
            found = gpu_sections.candidates(kernel, 90, head_dim)
            assert found[0] == tuning.configs(kernel, 90, torch.bfloat16, head_dim, 128, False)[0]
            assert len(found) == len(set(found)) <= 8
        config = found[0]._replace(queries=64, keys=32, warps=4)
        with mock_gpu.mock_gpu(90) as device:
            gpu_prepare.Problem(case).launch()
            before = len(device.kernels)
            gpu_prepare.Problem(case, forced=(kernel, config)).launch()
        # The other kernels are the same as before.
        (launched,) = device.kernels[before:]
        assert launched.function.__name__ == f"{kernel}_kernel"
        constants = launched.constants[(launched.function.arg_names.index("C"),)]
        assert (constants.BM, constants.BN, launched.options.num_warps) == (64, 32, 4)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_kernels_are_compiled_beforehand_also_those_that_fit_instead(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_prepare
    import mock_gpu

    def compile_(kernel: Any, target: Any) -> Any:
        warps, stages = kernel.options.num_warps, kernel.options.num_stages
        (tmp_path / f"{kernel.function.__name__} {target.arch} {warps} {stages}").touch()
        if kernel.function.__name__ == "stats_kernel":
            raise RuntimeError("no registers")
        shared = 100_000 if kernel.function.__name__ == "forward_kernel" and stages == 3 else 10
        return SimpleNamespace(metadata=SimpleNamespace(shared=shared), src=None)

    monkeypatch.setattr(mock_gpu.Kernel, "compile", compile_)
    case = Case("window", Causal() & Window(40, 0), 300, heads=2, head_dim=64, dtype=torch.bfloat16)
    checked: list[int] = []

    def check() -> None:
        checked.append(1)
        raise ValueError("read what only a GPU computes")

    made = gpu_prepare.prepare(80, 99_000, [check], [gpu_prepare.Problem(case)])
    assert made["failed"] == ["stats_kernel: RuntimeError: no registers"]
    table = tuning.configs("forward", 80, torch.bfloat16, 64, 128, False)
    assert [config.stages for config in table[:3]] == [3, 3, 2]
    compiled = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("forward"))
    assert compiled == sorted(f"forward_kernel 80 {config.warps} {config.stages}" for config in table[:3])
    # Once for each configuration that did not fit, and once more.
    assert len(checked) == 3
    assert made["kernels"] == 3 + 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_finds_the_kernels_that_were_compiled_beforehand(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_prepare
    import mock_gpu
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = gpu_prepare.Problem(Case("causal", Causal(), 64, heads=1, head_dim=16, dtype=torch.float16), trains=False)
    made = gpu_prepare.prepare(80, 163 * 1024, [], [problem])
    assert made == {"kernels": 1, "failed": []}
    hits: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **about: hits.append(about["cache_hit"]))
    with mock_gpu.mock_gpu(80, compiled=True):
        problem.launch()
    assert hits == [True]


def test_tuned_configurations_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tuning.Config(64, 64, 4, 5)
    arguments = ("forward", 90, torch.bfloat16, 128, 128, False)
    table = tuning.configs(*arguments)
    monkeypatch.setattr(tuning, "_TUNED", {"sm_90": {"forward": {"128": config._asdict()}}})
    assert tuning.configs(*arguments) == [config, *table]
    assert tuning.configs("forward", 90, torch.float16, 128, 32, False)[0] == config._replace(queries=32, keys=32)
    # Another kernel, architecture, dtype or head dim, and dropout.
    for place, other in enumerate(("dq", 80, torch.float32, 64, None, True)):
        if other is not None:
            assert config not in tuning.configs(*arguments[:place], other, *arguments[place + 1 :])


def test_a_record_is_adopted_if_its_configuration_is_faster(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"sm_80": {"dq": {"64": {"queries": 1}}}}))
    monkeypatch.setattr(tuning, "TUNED", path)

    def cell(kernel: str, stages: int, forward: float, backward: float) -> dict[str, Any]:
        times = {"forward": {"ms": forward}, "backward": {"ms": backward}}
        return {"kernel": kernel, "head_dim": 128, "config": tuning.Config(64, 64, 4, stages)._asdict(), **times}

    sweep = {
        "a": cell("forward", 1, 2.0, 9.0),
        "b": cell("forward", 2, 1.9, 9.0),
        "c": cell("dq", 1, 2.0, 9.0),
        "d": cell("dq", 2, 1.0, 8.9),
        "e": cell("dkdv", 1, 2.0, 9.0),
        "f": {"error": "OutOfResources"},
    }
    record = {**gpu.blank(), "clock": "events", "architecture": 90, "cells": {"sweep": sweep}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    gpu.adopt(tmp_path / "record.json")
    chosen = {"queries": 64, "keys": 64, "warps": 4, "stages": 2}
    assert json.loads(path.read_text()) == {
        "sm_80": {"dq": {"64": {"queries": 1}}},
        "sm_90": {"forward": {"128": chosen}},
    }
