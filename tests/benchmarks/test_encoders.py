"""benchmarks/encoders.py: cells, checks and the page, with an encoder of a few values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import registered
from test_site import assert_same_picture, script
from tiny import ENCODER, hf


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with a tiny encoder, and cells that run in this process."""
    module = script("encoders", "benchmarks")

    def encoder(layers: int, longest: int) -> Any:
        torch.manual_seed(0)
        config = hf.ModernBertConfig(**dict(ENCODER, num_hidden_layers=layers, vocab_size=50000), cls_token_id=1)
        config._attn_implementation = "sdpa"
        return hf.ModernBertModel(config).eval()

    def in_process(args: Any, task: dict[str, Any]) -> Any:
        threads = torch.get_num_threads()
        try:
            return module.measure(module.Cell(**task["cell"]), args)
        finally:
            torch.set_num_threads(threads)

    monkeypatch.setattr(module, "encoder", encoder)
    monkeypatch.setattr(module, "in_process", in_process)
    monkeypatch.setattr(module, "SHORTEST", 16)
    monkeypatch.setattr(module, "LONGEST", 200)
    return module


def run(made: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["encoders.py", "--layers", "2", "--threads", "1", "--rounds", "2", *words])
    with registered():
        made.main()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
def test_a_run_measures_each_engine_and_records_it(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tokens", "150", "--documents", "5", "--engines", "sdpa", "ringtile", "ringtile, int8 linears"]
    run(made, monkeypatch, *words, "--skip", "150.*bfloat16", "--out", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    found = [(made.input_of(row), row["dtype"], made.engine_and_way(row)) for row in record["rows"]]
    ragged = ["sdpa, one by one", "sdpa, padded, 2 rows measured", "ringtile, packed"]
    assert found == [
        *(("150 tokens", "float32", engine) for engine in ("sdpa", "ringtile", "ringtile, int8 linears")),
        *(("5 documents", dtype, engine) for dtype in ("float32", "bfloat16") for engine in ragged),
    ]
    for row in record["rows"]:
        assert len(row["seconds"]) == 2
        assert row["peak_bytes"] >= row["held_bytes"] > 0
        assert (row["of"] is None) == (
            row["engine"] == "sdpa" and row["dtype"] == "float32" and row["way"] == made.ALONE
        )
        assert row["error"] is None or row["error"] <= made.BOUNDS["int8"]
    # Two of the five rows are measured.
    padded = record["rows"][4]
    assert (padded["rows"], padded["lengths"]) == ([0, 4], [200, 106, 57, 30, 16])
    assert made.seconds_of(padded) == pytest.approx(2.5 * sum(padded["seconds"]) / 2)
    lines = made.table_lines(made.table(record["rows"]))
    assert capsys.readouterr().out.endswith("\n".join(lines) + "\n")
    assert " | 1.00x | " in lines[3]


def test_a_wrong_result_ends_the_run(made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = made.computed

    def wrong(call: Any, cell: Any, documents: Any) -> Any:
        return compute(call, cell, documents) * (1 + 1e-3 * (cell.engine == "ringtile"))

    monkeypatch.setattr(made, "computed", wrong)
    with pytest.raises(
        RuntimeError, match=r"^150 tokens, float32, ringtile, one by one: relative error 1\.0e-03 against"
    ):
        run(made, monkeypatch, "--tokens", "150", "--documents", "0", "--engines", "sdpa", "ringtile")


def test_the_page_is_that_of_the_record(tmp_path: Path) -> None:
    module = script("encoders", "benchmarks")
    record = json.loads(module.RECORD.read_text(encoding="utf-8"))
    assert module.PAGE.read_text(encoding="utf-8") == module.page(record), "run python benchmarks/encoders.py --page"
    assert record["layers"] == 22
    pytest.importorskip("matplotlib")
    module.draw(record, tmp_path / "drawn.png")
    assert_same_picture(tmp_path / "drawn.png", module.PICTURE)
