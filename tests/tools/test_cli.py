"""The command line: what parses, what each ending returns, and that a verb loads only its own room."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import ringtile
from ringtile import cli
from ringtile.kernels.native.library import reason_against
from ringtile.patterns.tested import TESTED
from ringtile.tools import doctor


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Make every verb take ``--size`` and end as the given function does."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=3)

    return lambda end: monkeypatch.setattr(
        cli, "import_module", lambda name: SimpleNamespace(add_arguments=add_arguments, run=end)
    )


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_arguments_reach_the_verb_and_its_status_is_that_of_the_command(ending: Callable[..., None]) -> None:
    ending(lambda args: args.size)
    assert cli.main(["show"]) == 3
    assert cli.main(["show", "--size", "70"]) == 70
    assert cli.main(["bench", "--size", "0"]) == 0


def test_each_end_has_its_status(ending: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    for error, status, said in (
        (ValueError("window expects left >= 0, got left=-1"), 2, "error: window expects left >= 0, got left=-1"),
        (FileNotFoundError(2, "No such file", "x.txt"), 2, "error: [Errno 2] No such file: 'x.txt'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        ending(raising(error))
        assert cli.main(["show"]) == status
        assert capsys.readouterr() == ("", f"ringtile: {said}\n")
    # A mistake of ours keeps its traceback.
    ending(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["bench"])


def test_what_does_not_parse_is_one_line_and_status_2(
    ending: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    ending(lambda args: 0)
    for line in ("", "paint", "show --siz 3", "show --size x", "show extra", "--quiet show"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(line.split())
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert re.fullmatch(r"ringtile( show)?: error: .+ \(see ringtile( show)? --help\)\n", said), said


def said_before_the_end(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_version_and_help_of_each_verb_and_each_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_before_the_end(capsys, "--version") == f"ringtile {ringtile.__version__}\n"
    assert "doctor" in said_before_the_end(capsys, "--help")
    for verb in cli.VERBS:
        said = said_before_the_end(capsys, verb, "--help")
        assert f"usage: ringtile {verb}" in said
        assert ("--json PATH" if verb == "bench" else "--json ") in said


def test_doctor_prints_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dense = (((), "available"), ((torch.bfloat16,), "available, before native for bfloat16 (AMX)"))
    monkeypatch.setattr(doctor, "TESTED", {})
    for dtypes, told in dense:
        monkeypatch.setattr(doctor, "before_native", lambda dtypes=dtypes: dtypes)
        assert cli.main(["doctor"]) == 0
        text = capsys.readouterr().out
        facts = {"ringtile": ringtile.__version__, "torch": torch.__version__, "backend reference": "available"}
        for name, fact in {**facts, "backend dense": told}.items():
            assert re.search(rf"^{name} +{re.escape(fact)}$", text, re.M), text


def test_doctor_names_what_is_newer_than_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = {
        "python": ("3.11", "3.12"),
        "torch": ("2.9.1", "2.10.0"),
        "triton": ("3.8.0",),
        "transformers": ("5.24.0",),
    }
    monkeypatch.setattr(doctor, "TESTED", tested)
    newer = {"python": "3.13.0", "torch": "2.11.0a0+cpu", "triton": "3.8.1", "transformers": "5.25.0"}
    same = {"python": "3.12.9", "torch": "2.10.0+cpu", "triton": None, "transformers": "5.9.0"}
    for installed in (newer, same):
        monkeypatch.setattr(doctor, "versions", lambda installed=installed: {"ringtile": "1"} | installed)
        assert cli.main(["doctor"]) == 0
        text = capsys.readouterr().out
        for name, versions in tested.items():
            told = installed[name] or "not installed"
            if installed is newer:
                told += f", newer than tested ({versions[-1]})"
            assert re.search(rf"^{name} +{re.escape(told)}$", text, re.M), text


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["tested"] == {name: list(versions) for name, versions in TESTED.items()}
    assert set(facts["newer_than_tested"]) <= set(TESTED) <= set(facts["versions"])
    assert facts["backends"]["blockwise"] == []
    assert facts["index_cache"]["limit"] > 0


@pytest.mark.skipif(bool(reason_against()), reason="no native kernel here")
def test_the_module_runs_as_the_command_and_an_unknown_instruction_set_is_one_line() -> None:
    environment = {**os.environ, "RINGTILE_CPU": "sse9"}
    done = subprocess.run([sys.executable, "-m", "ringtile", "doctor"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"ringtile: error: RINGTILE_CPU: expected one of \[.*\], got 'sse9'\n", done.stderr)


def test_a_closed_pipe_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["doctor"]) == 141
        # The interpreter flushes once more while it exits.
        closed.flush()
    assert capsys.readouterr().err == ""


def test_sizes_that_cannot_be_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line, complaint in (
        ("show causal --tokens 99999999999999999999", "ringtile show: error: argument --tokens: expected"),
        ("show causal --tokens 1e12", "ringtile: error: causal with 10+ queries .* over max_bytes"),
        ("bench causal --tokens 1e12", "ringtile: error: can't allocate memory: "),
        ("show causal --tokens 8 --heads 1e12", "ringtile: error: num_heads: expected an integer from"),
        ("bench causal --tokens 1e12 --batch 1e9", "ringtile: error: Storage size calculation over"),
    ):
        try:
            status: object = cli.main(line.split())
        except SystemExit as stopped:
            status = stopped.code
        assert status == 2
        assert re.fullmatch(complaint + "[^\n]*\n", capsys.readouterr().err), line


def test_an_error_that_the_stream_cannot_show_is_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="ascii"))
    assert cli.main(["show", "causal", "--tokens", "1000", "--out", "ä.txt"]) == 2
    sys.stderr.flush()
    assert err.getvalue().count(b"\n") == 1
