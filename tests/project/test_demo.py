"""`make demo`: what each act claims is measured and checked, and an interrupted or resumed run keeps its word."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))

import demo
from demo import encodes, fast, right, trains
from demo.encodes import Encodes
from demo.fast import Fast, LengthRow
from demo.right import PER_TILE, RINGTILE, TORCH, Right
from demo.trains import ModelSize, Trains, load_corpus
from ringtile.functional import sparse_attention
from ringtile.integrations.transformers import register
from ringtile.patterns import Causal, GlobalTokens, Window, per_head
from ringtile.tools.bench import blank_row
from ringtile.tools.bench.peers import Attention, Case, Ringtile
from ringtile.tools.progress import Progress
from ringtile.tools.record import DIRECTIONS, FORWARD

SMALL = ModelSize(width=32, layers=2, heads=1)
ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "local_attention": 32,
}
SMALL_ENCODER = partial(Encodes, n_tokens=300, sizes=ENCODER)


def run(*argv: str) -> int:
    return demo.main(argv)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_bytes(b"".join(b"line %d says that %d is a number\n" % (n, n * n) for n in range(600)))
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "Right", partial(Right, n_tokens=100))
    monkeypatch.setattr(demo, "Trains", partial(Trains, size=SMALL))
    monkeypatch.setattr(demo, "Encodes", SMALL_ENCODER)
    monkeypatch.setattr(fast, "TABLE_SECONDS", 0.0)
    monkeypatch.setattr(Fast, "lengths", property(lambda act: [act.context, 4 * act.context]))
    monkeypatch.setattr(fast, "DENSE_SECONDS", 0.0)


def one_thousandth_off(peer: Ringtile, case: Case) -> Attention:
    return lambda query, key, value: 1.001 * sparse_attention(query, key, value, case.pattern)


@cache
def trained(text: Path, steps: int, **settings: Any) -> Trains:
    """An act after some steps of both models, trained once for all tests that look at it."""
    act = Trains(context=64, text=text, size=SMALL, **settings)
    for run_ in act.runs:
        for _ in range(steps - run_.steps):
            run_.step()
    return act


def test_right_measures_small_errors_beside_large_ones(monkeypatch, capsys):
    act = Right(n_tokens=200, pattern=per_head([Causal(), Window(3), GlobalTokens(2)]))
    act.run(Progress())
    assert [(row.name, row.causal) for row in act.rows] == [
        (name, causal)
        for name in ("window", "dilated", "longformer", "bigbird", "--pattern")
        for causal in (False, True)
    ]
    for row in act.rows:
        assert all(0 < error < 1e-6 for error in row.errors[RINGTILE])
        assert all(0 < error < 1e-6 for error in row.errors[TORCH])
        assert all(error > 0.5 for error in row.errors[PER_TILE]) or row.name == "--pattern"
    assert act.passed
    monkeypatch.setattr(Ringtile, "prepare", one_thousandth_off)
    act = Right(n_tokens=100)
    act.run(Progress(quiet=True))
    assert not act.passed


@pytest.mark.usefixtures("small")
def test_fast_times_what_it_has_checked(monkeypatch, capsys):
    monkeypatch.setattr(fast, "BLOCK", 16)
    monkeypatch.setattr(Fast, "lengths", [512, 2048])
    act = Fast(context=2048)
    act.run(Progress())
    assert list(act.table) == [0.5, 0.25, 0.1, 0.05, 0.02]
    for density, pair in act.table.items():
        for direction in DIRECTIONS:
            row, dense = pair[direction], act.dense[direction]
            assert row.tile_density == pytest.approx(density, rel=0.01)
            assert row.error <= row.error_bound
            assert row.speedup == dense.median_ms / row.median_ms
    assert [row.n_tokens for row in act.curve] == [512, 2048]
    assert all(0 < row.error < 1e-6 for row in act.curve)
    assert [row.dense_measured for row in act.curve] == [True, False]
    assert act.curve[1].dense_seconds == 16 * act.curve[0].dense_seconds
    assert ["extrapolated" in row.dense_text for row in act.curve] == [False, True]
    assert act.passed


@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(Ringtile, "prepare", one_thousandth_off)
    act = Fast(context=1024)
    act.run(Progress())
    assert not act.passed
    # The others are out of reach.
    assert list(act.table) == [0.5, 0.25]
    rows = [row for pair in act.table.values() for row in pair.values()]
    assert all(row.median_ms is None and row.reason.startswith("wrong") for row in rows)
    assert all(not row.exact for row in act.curve)
    printed = capsys.readouterr().out
    assert "left out 10%, 5%, 2%: out of reach with 8 x 8 tiles" in printed
    assert printed.count("WRONG") == len(rows) + len(act.curve)


def test_the_model_learns_more_than_byte_counts_and_sees_no_later_byte(text, tmp_path):
    act = trained(text, 60)
    tokens = act.corpus.train[None, :64].long()
    changed = tokens.clone()
    changed[0, 40:] = 0
    for run_ in act.runs:
        run_.evaluate()
        assert run_.bits[0] == pytest.approx(8.0, abs=1e-4)
        assert max(run_.bits[-5:]) < act.corpus.byte_entropy() - 0.3
        assert run_.held_out[0][:2] == (60, run_.trained_seconds)
        assert run_.held_out[0].bits < act.corpus.byte_entropy() - 0.3
        before, after = run_.model(tokens), run_.model(changed)
        torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-5)
        assert not torch.allclose(before[:, 40:], after[:, 40:])
    path = tmp_path / "ab"
    path.write_bytes(b"ab" * 50_000)
    assert load_corpus(path).byte_entropy() == pytest.approx(1.0, abs=0.01)


def test_sparse_and_dense_begin_alike_and_full_sparse_is_dense(text):
    act, narrow = trained(text, 4, pattern=Causal()), trained(text, 4, pattern=Window(2))
    assert act.runs[0].bits == pytest.approx(act.runs[1].bits, abs=1e-3)
    assert narrow.runs[0].bits[0] == act.runs[0].bits[0]
    assert narrow.runs[0].bits[3] != pytest.approx(act.runs[0].bits[3], abs=1e-3)


def test_heads_follow_the_pattern(text):
    act = trained(text, 1, pattern=per_head([Window(3), Window(9)]))
    assert act.size.heads == 2
    with pytest.raises(ValueError, match=r"--pattern: .*got 3"):
        trained(text, 1, pattern=per_head([Window(3), Window(9), Window(1)]))


def test_encoders_are_compared_and_then_timed(capsys):
    act = SMALL_ENCODER()
    act.run(Progress())
    assert act.passed
    assert 0 < act.error < 1e-7
    assert list(act.seconds) == list(act.peak_bytes) == ["sdpa", "ringtile"]


@pytest.mark.parametrize(
    "wrong",
    [
        # One key less on each side of a window, and outputs that are off by a thousandth.
        {"pattern": lambda layer: Window(15) if layer.config.layer_types[layer.layer_idx][0] == "s" else None},
        {"attend": lambda query, key, value, **options: 1.001 * sparse_attention(query, key, value, **options)},
    ],
)
def test_an_encoder_with_wrong_outputs_is_not_timed(wrong, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "Encodes", SMALL_ENCODER)
    monkeypatch.setattr(encodes, "register", partial(register, **wrong))
    try:
        assert run("--only", "encodes", "--out", str(tmp_path)) == 1
    finally:
        register()
    printed = capsys.readouterr().out
    assert "\n  WRONG: ringtile's outputs differ from sdpa's by " in printed
    assert "A CHECK FAILED" in printed
    assert "the speed" not in printed
    assert list(tmp_path.iterdir()) == []


def test_without_transformers_the_encoder_is_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("--only", "encodes", "--json", "--out", str(tmp_path)) == 0
    found = json.loads(capsys.readouterr().out)["encodes"]
    assert "transformers cannot be used (" in found["left_out"]
    assert found["seconds"] == {}


@pytest.mark.usefixtures("small")
def test_the_whole_demo(text, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert run("--seconds", "0.3", "--context", "256", "--text", str(text), "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert {path.name for path in out.iterdir()} == {f"{name}.png" for name in demo.ACTS}
    titles = [line.split(":")[0] for line in captured.out.splitlines() if line[:1] not in ("", " ")]
    acts = ["Right", "Fast", "Trains", "Encodes"]
    assert [title for title in titles if title in acts] == acts


def test_json_has_no_nan(monkeypatch, capsys, tmp_path):
    def breaks(act: Fast, _: Progress) -> None:
        act.table[0.5] = {FORWARD: replace(blank_row(Case("", Causal(), 256), FORWARD, "0.5"), error=math.nan)}
        act.curve.append(LengthRow(256, False, math.inf, 1.0, 0, 1.0, True))

    monkeypatch.setattr(Fast, "run", breaks)
    assert run("--only", "fast", "--json", "--out", str(tmp_path)) == 1
    record = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert record["fast"]["table"][0]["error"] is None
    assert record["fast"]["curve"][0]["error"] is None
    assert record["passed"] is False


@pytest.mark.usefixtures("small")
def test_ctrl_c_while_training_keeps_the_steps(monkeypatch, text, tmp_path, capsys):
    step = trains.Run.step
    monkeypatch.setattr(trains.Run, "step", lambda run_: interrupt() if run_.steps == 3 else step(run_))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["--only", "trains", "--seconds", "1000", "--context", "64", "--text", str(text), "--out", str(tmp_path)]
    assert run(*argv) == 130
    printed = capsys.readouterr().out
    assert "  sparse     3 steps in " in printed
    assert "\nInterrupted after " in printed
    assert "dense " not in printed
    assert "pictures left out: matplotlib cannot be imported" in printed


def interrupt() -> None:
    raise KeyboardInterrupt


def test_bad_arguments_are_named_before_any_work(capsys):
    for argv, complaint in (
        (["--context", "0"], "argument --context: expected"),
        (["--context", "10"], "--context: .*got 10"),
        (["--seconds", "0"], r"--seconds: .*got 0\.0"),
        (["--seconds", "nan"], "--seconds: .*got nan"),
        (["--pattern", "windo(3)"], "window"),
        (["--only", "right", "--text", "some.txt"], "--text: .*training"),
        (["--text", "no/such/file"], "--text: .*no/such/file"),
        (["--only", "trains", "--context", "100000000"], "--context: .*100,000,000"),
        (["--out", __file__], "--out: .*test_demo"),
        (["--only", "encodes", "--pattern", "window(3)"], "--pattern: .*encoder"),
        (["--only", "right", "--pattern", "documents([3, 4])"], "documents"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(*argv)
        said = capsys.readouterr()
        assert (said.out, said.err.startswith("usage: python -m demo ")) == ("", True)
        assert re.search(f"\npython -m demo: error: .*{complaint}", said.err), said.err


@pytest.mark.usefixtures("small")
def test_ctrl_c_keeps_what_was_measured(monkeypatch, capsys, tmp_path):
    measure = Right._measure

    def interrupted(act: Right, case: Case, causal: bool) -> right.PatternErrors:
        if len(act.rows) == 3:
            raise KeyboardInterrupt
        return measure(act, case, causal)

    monkeypatch.setattr(Right, "_measure", interrupted)
    monkeypatch.setattr(Fast, "run", lambda *_: pytest.fail("ran on after Ctrl-C"))
    assert run("--only", "right", "--only", "fast", "--out", str(tmp_path), "--json") == 130
    record = json.loads(capsys.readouterr().out)
    assert record["interrupted"] is True
    assert len(record["right"]["rows"]) == 3
    assert "fast" not in record
    assert (list(record["pictures"]), record["no_pictures_because"]) == (["right"], None)
    assert [path.name for path in tmp_path.iterdir()] == ["right.png"]
    assert (tmp_path / "right.png").read_bytes().startswith(b"\x89PNG")
