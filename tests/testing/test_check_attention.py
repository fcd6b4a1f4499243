"""A right function passes, and each seeded fault is named with a line that replays it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile import sparse_attention
from ringtile.patterns import Pattern
from ringtile.testing import Case, Shape, check_attention, check_case
from ringtile.testing.cases import RULES, SHAPES

FLOAT32 = (torch.float32,)


def attention(fault: str = "") -> Callable[..., Tensor]:
    """Dense attention with the signature of PyTorch's, right or with one fault."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        groups, n = query.shape[1] // key.shape[1], key.shape[2]
        pairs = torch.ones(query.shape[2], n, dtype=torch.bool) if attn_mask is None else attn_mask
        if is_causal:
            pairs = pairs.tril(1 if fault == "causal" else 0)
        if fault == "last tile" and n > 64:
            pairs = pairs & (torch.arange(n) < n // 64 * 64)
        pairs = pairs.expand(*query.shape[:3], n)
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        if fault == "gradient":
            k.register_hook(lambda g: 1.03 * g)
        if fault == "gradient of value" and v.shape[1] > 1:
            v.register_hook(lambda g: g.roll(1, 1))
        if fault == "heads":
            k, v = (x.repeat(1, groups, 1, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        if fault != "nan":
            k, v = (torch.where(pairs.any(2).unsqueeze(3), x, 0) for x in (k, v))
        used = query.shape[3] ** -0.5 if scale is None or fault == "ignores scale" else scale
        scores = q @ k.mT * used * (1.02 if fault == "scale" else 1.0)
        some = pairs.any(3, keepdim=True)
        if fault == "future":
            scores = scores - 40.0 * (~pairs & some)
        else:
            scores = scores.masked_fill(~pairs & some, -math.inf)
        if fault == "maximum":
            weights = scores.to(query.dtype).exp().to(v.dtype)
            weights = weights / weights.sum(3, keepdim=True)
        else:
            weights = torch.softmax(scores, 3)
        out = (weights if fault == "empty" else torch.where(some, weights, 0)) @ v
        if fault == "64" and query.shape[2] % 64:
            out = torch.cat([out[:, :, :-1], out[:, :, -1:] * 1.1], 2)
        out = out.to(query.dtype)
        return out.detach() if fault == "detached" else out.float() if fault == "dtype" else out

    return attend


def test_right_functions_pass() -> None:
    report = check_attention(attention(), cases=100)
    assert (report.checked, report.failures, report.refusals, report.unchecked) == (100, [], {}, [])
    check_attention(F.scaled_dot_product_attention, " ".join(word for word in RULES if word != "nan"), cases=60)
    report = check_attention(sparse_attention, cases=60)
    assert all("non-empty bool mask" in error for error in report.refusals)


@pytest.mark.parametrize(
    ("fault", "rule", "result"),
    [
        ("scale", "all", "output"),
        ("ignores scale", "scale", "output"),
        ("causal", "causal", "output"),
        ("last tile", "padding", "output"),
        ("heads", "random", "output"),
        ("nan", "nan", "output"),
        ("gradient", "window", "gradient of key"),
        ("gradient of value", "documents", "gradient of value"),
        ("detached", "all", "gradient of query"),
        ("64", "causal", "output"),
        ("future", "causal", "output, if later keys change,"),
        ("empty", "empty", "output"),
        ("dtype", "all", "call raises TypeError: expected torch.float16 .*, got torch.float32"),
        ("maximum", "large", "output"),
    ],
)
def test_a_fault_is_named_and_replayed(fault: str, rule: str, result: str) -> None:
    attend, dtype = attention(fault), torch.float16 if fault in ("dtype", "maximum") else torch.float32
    report = check_attention(attend, rule, dtypes=(dtype,), cases=8, raises=False)
    assert re.match(result, report.failures[0].result)
    line = str(report).splitlines()[2].strip()
    with pytest.raises(AssertionError, match=rf"WRONG {rule} \(cases: 1\): {result}"):
        exec(line, {"attend": attend})
    exec(line, {"attend": attention()})


def test_a_failure_is_the_smallest_case_of_its_kind() -> None:
    report = check_attention(attention("last tile"), "all causal", dtypes=FLOAT32, raises=False)
    assert [failure.case.rule for failure in report.failures] == ["all", "causal"]
    shape = report.failures[0].case.shape
    assert (shape.batch, shape.heads, shape.key_heads, shape.keys, shape.memory) == (1, 1, 1, 65, "contiguous")
    assert report.failures[0].cases == sum(shape.keys > 64 for shape in SHAPES.values() if shape.keys % 64)
    assert report.failures[0].error > 3 * report.failures[0].bound


def test_every_word_has_a_case_in_which_only_it_is_wrong() -> None:
    assert list(RULES) == inspect.signature(check_attention).parameters["rules"].default.split()
    for fault, word in (("nan", "nan"), ("empty", "empty"), ("ignores scale", "scale"), ("maximum", "large")):
        dtypes = (torch.float16,) if fault == "maximum" else FLOAT32
        report = check_attention(attention(fault), dtypes=dtypes, cases=len(RULES), raises=False)
        assert {failure.case.rule for failure in report.failures} == {word}


def test_a_refusal_is_no_failure_but_each_word_needs_a_result() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if query.shape[2] > 100 or query.dtype == torch.float16:
            raise NotImplementedError(f"no kernel for {query.shape[2]} queries\nof {query.dtype}")
        # Without enable_gqa, all heads have keys of their own.
        assert query.shape[1] == key.shape[1]
        return attention()(query, key, value, attn_mask)

    report = check_attention(attend, "all causal", dtypes=FLOAT32)
    long = sum(shape.queries > 100 for shape in SHAPES.values())
    assert {error: len(cases) for error, cases in report.refusals.items()} == {
        "NotImplementedError: no kernel for N queries": 2 * long
    }
    assert report.checked == 2 * (len(SHAPES) - 1 - long) > 20
    with pytest.raises(AssertionError, match=r"no parameter scale\n.*\nNOT CHECKED: scale, torch\.float16"):
        check_attention(attend, "all scale", dtypes=(torch.float32, torch.float16), cases=8)
    with pytest.raises(NotImplementedError, match="no parameter enable_gqa"):
        check_case(attend, Case())


def test_the_same_seed_makes_the_same_report() -> None:
    reports = [str(check_attention(attention("scale"), "all", cases=12, seed=s, raises=False)) for s in (3, 3, 4)]
    assert reports[0] == reports[1] != reports[2]


def test_shared_memory_and_strides_are_those_of_the_case() -> None:
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
        seen.append((query.stride(3), key.stride(1), query.requires_grad))
        return sparse_attention(query, key, value, pattern)

    for memory in ("contiguous", "strided", "expanded"):
        shape = Shape(heads=2, queries=9, keys=9, memory=memory)
        check_case(attend, Case(shape=shape, gradients=memory != "strided"))
    assert seen == [(1, 72, True), (9, 72, False), (1, 0, True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rules": "causal diagonal"}, r"rules: expected words of all causal .* nan, got 'diagonal'"),
        ({"rules": ""}, r"rules: expected words of .*, got ''"),
        ({"dtypes": (torch.int64,)}, r"dtypes: expected floating point, got torch.int64"),
        ({"attention": lambda query, key, value: value}, r"attention: expected a parameter of .*, got .*'key'"),
    ],
)
def test_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_attention(**{"attention": attention(), **arguments})
    with pytest.raises(ValueError, match=r"shape\.heads: expected a multiple of key_heads"):
        Case(shape=Shape(heads=3))
