"""The sweep over the classes of transformers: it finds a wrong one, and new families run or are refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_release import script
from tiny import hf
from torch import Tensor

from ringtile.integrations.transformers import registry

RECORD = Path(__file__).parents[2] / "benchmarks/records/sweep.json"


@pytest.fixture(scope="module")
def sweep() -> Any:
    found = script("scripts/sweep.py")
    found.register()
    return found


def line_of(sweep: Any, kind: str, auto: str = "CausalLM") -> str:
    """The line of a model, computed in a process as the sweep does."""
    names = [name for _, found, name in sweep.classes([auto]) if found == kind]
    if not names:
        pytest.skip(f"this transformers has no {kind}")
    line: str = sweep.in_child(auto, kind, getattr(hf, names[0]))
    return line


ALL = "right: plain right left gradients greedy beams static chunks"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("mistral", ALL),
        ("dory", ALL),
        ("inkling2_loop_text", "refused: model: expected parts that use transformers' attention interface, got "),
    ],
)
def test_a_class_runs_or_is_refused_by_name(sweep: Any, kind: str, line: str) -> None:
    assert line_of(sweep, kind).startswith(line)


def test_a_part_that_sees_pictures_may_hand_their_sizes_to_attention(sweep: Any) -> None:
    assert line_of(sweep, "lfm3_vl_vision", "Base").startswith("right: plain gradients")


def test_the_record_has_no_defect() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {version.rpartition(".")[0] for version in record} == {"5.5", "5.23", "5.24"}
    for version, lines in record.items():
        wrong = [f"{name}: {line}" for name, line in lines.items() if line.startswith(("different", "crash"))]
        assert (version, wrong) == (version, [])
        assert sum(line.startswith(("right", "refused", "as sdpa")) for line in lines.values()) > 250


def test_a_wrong_result_and_a_crash_are_told(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = registry._attend_chosen

    def attend(module: Any, query: Tensor, *given: Any, **options: Any) -> Any:
        # One query is a step of a cache.
        return own(module, query * (1.5 if query.shape[2] == 1 else 1.0), *given, **options)

    monkeypatch.setattr(registry, "_attend_chosen", attend)
    assert line_of(sweep, "opt").startswith("different: greedy: ")
    monkeypatch.setattr(registry, "_attend_chosen", lambda *given, **options: 1 // 0)
    assert line_of(sweep, "opt").startswith("crash: plain: ZeroDivisionError")
    monkeypatch.setattr(registry, "_attend_chosen", lambda *given, **options: sys.exit(3))
    assert line_of(sweep, "opt") == "crash: the process ended with 0"
