"""Every pair of a rule, an option, a shape, a dtype, a gradient, a form and a backend, against the oracle.

Properties of the numbers, which the oracle cannot tell by its tolerance, hold for a sample of the same cases.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from table import (
    AXES,
    BACKENDS,
    CAUSAL,
    LISTS,
    OPTIONS,
    REFUSALS,
    RULES,
    SHAPES,
    Call,
    Case,
    Refusal,
    actual,
    attempt,
    covering,
    has_results,
    made,
    makes_sense,
    outcome,
    parsed,
    refusal,
    runs_here,
    smallest,
)
from torch import Tensor

import ringtile.patterns
from ringtile import sparse_attention
from ringtile.kernels.select import NAMES
from ringtile.patterns import Pattern
from ringtile.patterns.base import Composed
from ringtile.testing import oracle

CASES = list(covering())
PARTS = 30
FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz.py"
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
rule=elements | option=is_causal | shape=block + 1 | gradients=none | form=cache
rule=mask_mod | shape=no queries | backend=reference
rule=chosen blocks | shape=one token | form=two ranks
option=key_mask | shape=no keys | form=multihead
option=by query, by key | shape=no queries | gradients=bias | form=left padded | backend=reference
""".strip()
"""Cases that once failed or that a fault of tests/mutants.txt breaks."""


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
    for first, second in combinations(AXES, 2):
        met = {(getattr(case, first), getattr(case, second)) for case in CASES}
        for x, y in set(product(AXES[first], AXES[second])) - met:
            assert not makes_sense(Case(**{"gradients": "none", first: x, second: y}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", REFUSALS, ids=lambda entry: entry.words)
def test_a_refusal_occurs(entry: Refusal) -> None:
    cases = [case for case in [*CASES, Case("window", "is_causal", "ragged", form="multihead")] if entry.cases(case)]
    # One whose only reason it is, if there is one.
    cases.sort(key=lambda case: len(refusal(case)))
    assert any(re.search(entry.words, str(attempt(case)[1])) for case in cases[:20])


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
    assert set(NAMES) - set(BACKENDS) == {"flash", "fa4"}


def sample(keep: Callable[[Case], object], size: int = 40) -> list[Case]:
    """Plain calls with the other values of the cases, spread over all."""
    cases = [replace(case, form="plain") for case in CASES]
    chosen = [case for case in dict.fromkeys(cases) if runs_here(case) and has_results(case) and keep(case)]
    return chosen[:: -(-len(chosen) // size)]


def bits(case: Case, change: Callable[[Call], Call] = lambda call: call) -> dict[str, Tensor]:
    return actual(change(made(case)))


def unequal(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name, x in first.items() if not torch.equal(x.nan_to_num(1e9), second[name].nan_to_num(1e9))]


@pytest.mark.filterwarnings("ignore")
def test_the_future_changes_no_bit_of_the_past() -> None:
    def changed(call: Call) -> Call:
        cut = call.shape.queries // 2
        first = max(call.shape.first + cut, 0)
        later = [
            torch.cat([x[:, :, :n], x[:, :, n:] * 3 + 1], 2)
            for x, n in zip(call[2:5], (cut, first, first), strict=True)
        ]
        return call._replace(query=later[0], key=later[1], value=later[2])

    for case in sample(lambda c: c.rule in CAUSAL or c.option == "is_causal"):
        case = replace(case, gradients="none")
        before, after = (
            {n: x[:, :, : x.shape[2] // 2] for n, x in bits(case, f).items()} for f in (lambda call: call, changed)
        )
        assert not unequal(before, after), case


OF_ANY_HEAD = {"mask", "causal chosen", "chosen blocks", "neighborhood", "neighborhood of a grid"}
OF_ANY_HEAD |= {"all", "causal", "window", "causal window", "strided", "global tokens", "global list", "dilated"}
OF_ANY_HEAD |= {"block dilated", "sampled blocks", "complement", "documents", "per document"}


@pytest.mark.filterwarnings("ignore")
def test_heads_and_batch_elements_change_places() -> None:
    def turned(call: Call) -> Call:
        options: dict[str, Any] = {n: x.flip(0) if isinstance(x, Tensor) else x for n, x in call.options.items()}
        query, key, value = (x.flip(0, 1) for x in call[2:5])
        return call._replace(query=query, key=key, value=value, options=options)

    for case in sample(
        lambda c: (
            c.backend != "reference"
            and c.rule in OF_ANY_HEAD
            and c.option != "dropout"
            and "bias" not in made(c).options
        )
    ):
        case = replace(case, gradients="none")
        after = {name: x.flip(0, 1) for name, x in bits(case, turned).items()}
        assert not unequal(bits(case), after), case


@pytest.mark.filterwarnings("ignore")
def test_two_threads_have_the_bits_of_one() -> None:
    for case in sample(lambda c: SHAPES[c.shape].queries > 1):
        one = bits(case)
        torch.set_num_threads(2)
        two = bits(case)
        torch.set_num_threads(1)
        assert not unequal(one, two), case


@pytest.mark.filterwarnings("ignore")
def test_slices_have_the_bits_of_the_whole() -> None:
    # The chunks of blockwise depend on the size of a call, and the gradient of sinks is a sum over slices.
    def keep(case: Case) -> bool:
        is_native = case.backend.startswith("native") or (case.backend == "default" and case.rule not in LISTS)
        return is_native and case.gradients != "sinks" and has_results(replace(case, form="slices"))

    for case in sample(keep):
        assert not unequal(
            bits(case), bits(case, lambda call: call._replace(case=replace(call.case, form="slices")))
        ), case


INTERPRETED = [
    Case(*line.strip().split(" / "), backend="triton")
    for line in """
        causal window / none / square / float32 / all, lse
        mask_mod / key_lengths / one query / float32 / none
        random blocks / dropout of a part / head_dim 1 / float16 / none
        per head / sinks / from 7 / float32 / none
        window or chosen / key_mask / square / float32 / none
        chosen blocks / none / one query / float32 / key
    """.strip().splitlines()
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_in_its_interpreter() -> None:
    command = [sys.executable, FUZZ, "--replay", *map(str, INTERPRETED)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["right"] * len(INTERPRETED) + [""], done.stdout + done.stderr


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
