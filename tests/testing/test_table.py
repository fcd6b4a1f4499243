"""Every pair of a rule, an option, a shape, a dtype, a gradient, a form and a backend, against the oracle."""

from __future__ import annotations

import inspect
from itertools import islice

import pytest
import torch
from table import AXES, BACKENDS, OPTIONS, RULES, SHAPES, Case, covering, made, outcome, parsed, smallest

import ringtile.patterns
from ringtile import sparse_attention
from ringtile.kernels.select import NAMES
from ringtile.patterns import Pattern
from ringtile.patterns.base import Composed
from ringtile.testing import oracle

CASES = list(covering())
PARTS = 30
FAULTS = """
rule=window or chosen | option=is_causal | shape=no batch
rule=all | shape=ragged | gradients=all, lse | form=index | backend=blockwise in parts
rule=per head | option=dropout of a part | shape=from 7 | form=index | backend=blockwise in parts
rule=window | shape=block + 1 | form=index | backend=blockwise
rule=all | option=alibi | shape=from 7 | backend=blockwise
rule=window | option=key_lengths | shape=ragged | backend=blockwise
rule=causal | option=softcap | shape=from 0 | gradients=all, lse | form=index | backend=blockwise in parts
rule=causal window | option=dropout | shape=from 7 | form=index | backend=native
rule=chosen | option=key_mask | shape=ragged | backend=blockwise
rule=chosen | option=alibi | shape=from 7 | gradients=all, lse | backend=blockwise
rule=chosen | backend=reference
rule=causal | shape=ragged | form=index | backend=native
rule=chosen | option=dropout | backend=blockwise
""".strip()
"""Cases that once failed or that a fault of tests/mutants.txt breaks."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair(part: int) -> None:
    wrong = {str(smallest(case)): words for case in CASES[part::PARTS] if (words := outcome(case))}
    assert not wrong, "\n".join(
        f"{words}\n    python scripts/fuzz.py --replay '{case}'" for case, words in wrong.items()
    )


@pytest.mark.parametrize("line", FAULTS.splitlines())
def test_a_fault(line: str) -> None:
    assert outcome(parsed(line)) == ""


def test_the_cases_meet_every_pair_and_are_the_same_every_time() -> None:
    assert list(covering()) == CASES
    for first in AXES:
        for second in AXES:
            pairs = {(getattr(case, first), getattr(case, second)) for case in CASES}
            assert first == second or len(pairs) == len(AXES[first]) * len(AXES[second])


def test_every_pattern_option_and_backend_has_a_row() -> None:
    def kinds(pattern: Pattern) -> set[type]:
        parts = pattern.parts if isinstance(pattern, Composed) else ()
        return {type(pattern)}.union(*map(kinds, parts))

    made_by_rules = set().union(*(kinds(made(Case(rule=rule)).pattern) for rule in RULES))
    public = {x for x in vars(ringtile.patterns).values() if inspect.isclass(x) and issubclass(x, Pattern)}
    assert {x.__name__ for x in public - made_by_rules} == {"Pattern"}
    options = set().union(*(made(Case(option=option)).options for option in OPTIONS))
    of_call = {"query", "key", "value", "pattern", "start", "enable_gqa", "return_lse", "backend"}
    assert set(inspect.signature(sparse_attention).parameters) - of_call == options
    assert set(NAMES) - set(BACKENDS) == {"triton", "flash", "fa4"}


@pytest.mark.parametrize("change", ["scale", "pairs", "lse", "dropout", "softmax"])
def test_a_wrong_oracle_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(option="dropout" if change == "dropout" else "none", rule="window")
    assert outcome(case) == ""
    if change == "scale":
        monkeypatch.setattr(torch.Tensor, "double", lambda x: x.to(torch.float64) * 1.0001)
    elif change == "pairs":
        keeps = oracle._keeps
        monkeypatch.setattr(oracle, "_keeps", lambda rule, at: keeps(rule, at._replace(key=at.key + 1)))
    elif change == "lse":
        monkeypatch.setattr(torch, "logsumexp", lambda x, dim: x.amax(dim))
    elif change == "dropout":
        monkeypatch.setattr(oracle, "dropout_keeps", lambda p, *rest: (torch.tensor(True), 1 / (1 - p)))
    else:
        monkeypatch.setattr(torch, "logaddexp", torch.add)
        case = Case(option="sinks")
    assert outcome(case) != ""


def test_a_line_replays_a_case() -> None:
    for case in islice(covering(), 20):
        assert parsed(str(case)) == case
    assert smallest(Case()) == Case()
    assert all(name in SHAPES for name in ("no keys", "no queries", "no batch"))
