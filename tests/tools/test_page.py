"""The parts that all commands share: a page as Markdown and as HTML, calls in turn, a live line with the time left."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pages import Code, Heading, Picture, Table, html, markdown

from ringtile.tools.progress import Progress
from ringtile.tools.timing import interleaved

PARTS = [
    Heading("Times", 1),
    "Two *words* and `a * b | c`.\n\nAnother & **bold**.",
    Table(["pattern", "N"], [["`a | b`, x | y", "holds"], ["*5 &plusmn; 1*", 16]], 1),
    Code("<b>\n"),
    Picture("A picture", "one.svg", "<svg/>"),
]


def test_a_page_is_markdown() -> None:
    assert markdown(PARTS) == (
        "# Times\n\nTwo *words* and `a * b | c`.\n\nAnother & **bold**.\n\n"
        "| pattern | N |\n|---|---:|\n| <code>a &#124; b</code>, x \\| y | holds |\n| *5 &plusmn; 1* | 16 |\n\n"
        "```text\n<b>\n```\n\n![A picture](one.svg)\n"
    )


def test_a_page_is_html() -> None:
    text = html("a < b", PARTS)
    assert "<title>a &lt; b</title>" in text
    assert "<h1>Times</h1>\n<p>Two <em>words</em> and <code>a * b | c</code>.</p>" in text
    assert '<tr><td class="left"><code>a | b</code>, x | y</td><td>holds</td></tr>' in text
    assert "<pre>&lt;b&gt;</pre>\n<svg/>\n</body>" in text


def test_samples_take_turns_and_a_warm_up_does_not_count() -> None:
    order: list[str] = []
    rounds: list[int] = []

    def sample(name: str) -> int:
        order.append(name)
        return len(order)

    calls = {name: lambda name=name: sample(name) for name in "abc"}
    found = interleaved(calls, 2, warm_up=True, after_round=lambda: rounds.append(len(order)))
    assert "".join(order) == "abc" + "abc" + "bca"
    assert (found, rounds) == ({"a": [4, 9], "b": [5, 7], "c": [6, 8]}, [6, 9])


@pytest.mark.parametrize(("options", "rounds"), [({}, 2), ({"seconds": 5.5}, 6), ({"seconds": 99.0, "most": 4}, 4)])
def test_rounds_go_on_for_some_seconds(options: dict[str, float], rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def sample() -> None:
        now[0] += 1.0

    assert len(interleaved({"one": sample}, 2, **options)["one"]) == rounds
    assert interleaved({}, 2, **options) == {}


def test_the_time_left_follows_the_jobs_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now, terminal = [0.0], io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in Progress().through([10, 20, 30], "job {}".format, float, done=2):
        # Each takes twice as long as expected.
        now[0] += 20.0 if not now[0] else 40.0
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown[1:] == ["3/5 job 10  1 min 0 s left", "4/5 job 20  1 min 40 s left", "5/5 job 30  1 min 0 s left", ""]
