"""`ringtile profile`: the phases of a call, told apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from torch.autograd.profiler_util import FunctionEvent

from ringtile import cli
from ringtile.index import cache_info
from ringtile.kernels.native.library import reason_against
from ringtile.kernels.spans import KernelTime
from ringtile.patterns import Causal, GlobalTokens, Window, parse
from ringtile.tools import profile
from ringtile.tools.profile import PHASES, profile_attention

PATTERN = Causal() & (Window(100) | GlobalTokens(10))


def run(*argv: str) -> int:
    return cli.main(["profile", *argv])


needs_native = pytest.mark.skipif(bool(reason_against()), reason=f"no native kernel here: {reason_against()}")


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "blockwise"])
def test_the_phases_are_told_apart_and_add_up(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: Counter[tuple[str, str]] = Counter()
    phase_of = profile._phase

    def counting(event: FunctionEvent) -> str:
        events[profile._ancestors(event)[-1].name, phase_of(event)] += 1
        return phase_of(event)

    monkeypatch.setattr(profile, "_phase", counting)
    first, second = profile_attention(PATTERN, 700, num_heads=2, head_dim=16, backend=backend)
    for call in (first, second):
        assert call.total == pytest.approx(sum(call.phases.values()))
        assert set(call.phases) == set(PHASES)
        for phase in ("kernel forward", "kernel backward", "allocation", "other"):
            assert call.phases[phase] > 0, phase
        assert call.phases["copies"] > 0 or backend == "native"
        assert (call.phases["packing"] > 0) == (backend == "native")
        assert call.phases["gaps"] >= 0
    # The plan of the first call has the index of the second, and the fallback prepares nothing.
    assert first.phases["index"] > 0
    assert (second.phases["index"] > 0) == (events["call 2", "index"] > 0) == (backend == "blockwise")
    # Built once and then looked up: a build runs some hundred operators.
    assert events["call 1", "index"] > 100 > 20 * events["call 2", "index"]
    assert cache_info().misses == 1


def test_the_command_prints_a_table_and_writes_a_trace(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert run("window(50)", "--causal", "--tokens", "300", "--heads", "1", "--trace", str(trace)) == 0
    printed, complaints = capfd.readouterr()
    assert complaints == ""
    assert "causal & window(50), 300 tokens" in printed
    assert all(phase in printed for phase in PHASES)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"ringtile::forward", "ringtile::backward", "ringtile::index", "call 2"} <= names


def test_packing_is_the_share_of_what_the_threads_did() -> None:
    times = [KernelTime(False, 1, 5), KernelTime(False, 2, 5)]
    assert profile._packing_share(times) == pytest.approx(0.3)
    assert profile._packing_share([]) == 0


@needs_native
def test_the_clocks_are_split_from_the_kernels_of_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = profile_attention(PATTERN, 300, num_heads=1, head_dim=16, calls=1)[0]
    assert plain.phases["kernel forward"] > 0
    assert plain.phases["kernel backward"] > 0
    monkeypatch.setattr(profile, "_packing_share", lambda times: 1.0 if times and times[0].backward else 0.0)
    split = profile_attention(PATTERN, 300, num_heads=1, head_dim=16, calls=1)[0]
    assert split.phases["kernel backward"] == 0
    assert split.phases["packing"] > 0
    assert split.phases["kernel forward"] > 0
    assert split.total == pytest.approx(sum(split.phases.values()))


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("window(50)", "--tokens", "300", "--heads", "1", "--dtype", "bfloat16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (parse(found["pattern"]), found["tokens"], len(found["calls"])) == (Window(50), 300, 2)
    assert found["calls"][1]["total"] > 0


def test_no_calls_are_refused() -> None:
    for tokens, calls in ((10, 0), (0, 2)):
        with pytest.raises(ValueError, match=f"{calls=}, {tokens=}"):
            profile_attention(PATTERN, tokens, calls=calls)
