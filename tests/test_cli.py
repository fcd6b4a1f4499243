"""The command line: what parses, what each ending returns, and that a verb loads only its own room."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ringtile
from ringtile import cli
from ringtile.kernels.native.library import reason_against
from ringtile.tools import doctor


def ringtile_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ringtile", *words], capture_output=True, text=True)


class StandIn:
    """A room whose verb takes ``--size`` and ends as told."""

    def __init__(self, ending: Callable[[argparse.Namespace], int]) -> None:
        self.ending = ending

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=3)

    def run(self, args: argparse.Namespace) -> int:
        return self.ending(args)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Make every verb end as the given function does."""
    return lambda end: monkeypatch.setattr(cli, "import_module", lambda name: StandIn(end))


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_of_a_verb_is_the_status_of_the_command(ending: Callable[..., None], status: int) -> None:
    ending(lambda args: status)
    assert cli.main(["bench"]) == status


def test_arguments_reach_the_verb(ending: Callable[..., None]) -> None:
    ending(lambda args: args.size)
    assert cli.main(["show"]) == 3
    assert cli.main(["show", "--size", "70"]) == 70


@pytest.mark.parametrize(
    "error", [ValueError("window expects left >= 0, got left=-1"), FileNotFoundError(2, "No such file", "x.txt")]
)
def test_bad_input_is_one_line_and_status_2(
    ending: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    ending(raising(error))
    assert cli.main(["show"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"ringtile: error: {error}\n")


def test_an_interrupt_is_130(ending: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    ending(raising(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "ringtile: interrupted\n"


def test_a_mistake_of_ours_keeps_its_traceback(ending: Callable[..., None]) -> None:
    ending(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    "argv", [[], ["paint"], ["show", "--siz", "3"], ["show", "--size", "x"], ["show", "extra"], ["--quiet", "show"]]
)
def test_what_does_not_parse_is_one_line_and_status_2(
    ending: Callable[..., None], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    ending(lambda args: 0)
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"ringtile( show)?: error: .+ \(see ringtile( show)? --help\)\n", said), said


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, expected in ((["--version"], f"ringtile {ringtile.__version__}\n"), (["--help"], "doctor")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--help"])
    assert stopped.value.code == 0
    assert f"usage: ringtile {verb}" in capsys.readouterr().out


def test_the_page_counts_the_verbs_and_each_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "command-line.md").read_text()
    numbers = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert f"has {numbers[len(cli.VERBS) - 1]} verbs" in page
    for verb in cli.VERBS:
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        assert ("--json PATH" if verb == "bench" else "--json ") in capsys.readouterr().out


def test_a_verb_loads_only_its_own_room() -> None:
    program = "import sys; from ringtile import cli; cli.parse(['doctor']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ringtile.tools.doctor" in loaded
    assert loaded.isdisjoint({"ringtile.tools.demo", "ringtile.tools.show", "ringtile.tools.bench", "matplotlib"})


def test_doctor_prints_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name, fact in (
        ("ringtile", ringtile.__version__),
        ("torch", torch.__version__),
        ("backend reference", "available"),
    ):
        assert re.search(rf"^{name} +{re.escape(fact)}$", text, re.M), text


def test_doctor_says_which_dense_calls_torch_computes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtypes, told in (((), "available"), ((torch.bfloat16,), "available, before native for bfloat16 (AMX)")):
        monkeypatch.setattr(doctor, "before_native", lambda dtypes=dtypes: dtypes)
        assert cli.main(["doctor"]) == 0
        assert re.search(rf"^backend dense +{re.escape(told)}$", capsys.readouterr().out, re.M)


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["backends"]["blockwise"] == []
    assert facts["index_cache"]["limit"] > 0


def test_the_module_runs_as_the_command() -> None:
    done = ringtile_command("show", "window(-1)", "--tokens", "64")
    assert done.returncode == 2
    assert done.stderr.startswith("ringtile: error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(bool(reason_against()), reason="no native kernel here")
def test_an_unknown_instruction_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTILE_CPU", "sse9")
    done = ringtile_command("doctor")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"ringtile: error: RINGTILE_CPU: expected one of \[.*\], got 'sse9'\n", done.stderr)


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "ringtile", "doctor"], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["show", "causal", "--tokens", "99999999999999999999"], "ringtile show: error: argument --tokens: expected"),
        (["show", "causal", "--tokens", "9999999999999"], "ringtile show: error: argument --tokens: expected"),
        (["show", "causal", "--tokens", "1e12"], "ringtile: error: causal with 10+ queries .* over max_bytes"),
        (["profile", "causal", "--tokens", "1e12"], "ringtile: error: can't allocate memory: "),
        (["bench", "causal", "--tokens", "1e12"], "ringtile: error: can't allocate memory: "),
        (["show", "causal", "--tokens", "8", "--heads", "9" * 20], "ringtile show: error: argument --heads: expected"),
        (
            ["show", "causal", "--tokens", "8", "--heads", "1e12"],
            "ringtile: error: num_heads: expected an integer from",
        ),
        (["profile", "causal", "--tokens", "8", "--heads", "9" * 20], "ringtile profile: error: argument --heads: "),
        (["bench", "causal", "--tokens", "1e12", "--batch", "1e9"], "ringtile: error: Storage size calculation over"),
        (["demo", "--context", "0"], "ringtile demo: error: argument --context: expected"),
    ],
)
def test_sizes_that_cannot_be_are_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = cli.main(words)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert re.fullmatch(complaint + "[^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["show", "profile", "bench", "demo"])
def test_lengths_are_written_with_units(verb: str) -> None:
    option, pattern = ("--context", []) if verb == "demo" else ("--tokens", ["causal"])
    for text, number in (("16K", 16384), ("1M", 1 << 20), ("1e6", 10**6)):
        args = cli.parse([verb, *pattern, option, text])
        assert number in (args.tokens if verb == "bench" else [vars(args)[option[2:]]])


def test_a_drawing_that_the_stream_cannot_show_is_of_ascii() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "ringtile", "show", "causal", "--tokens", "1000", "--out", "ä.txt"]
    done = subprocess.run(command[:-2], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    done = subprocess.run(command, capture_output=True, env=environment)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
