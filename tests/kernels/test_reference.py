"""The oracle against the definition in plain numbers, against torch, and against its own derivatives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from oracle import (
    SDPA_BUDGET,
    filled_memory,
    kept_pairs,
    make_inputs,
    oracle,
    relative_error,
    sdpa_low_precision_error,
)

from ringtile import sparse_attention
from ringtile.index import build_index
from ringtile.kernels.contracts import settle_exponentials
from ringtile.kernels.philox import dropout_keep
from ringtile.kernels.reference import attention_reference, attention_rows
from ringtile.patterns import Causal, Dense, Documents, Elements, GlobalTokens, Segments, Window, per_head

HOLES = Causal() & Window(3) & ~Window(0)
"""Query 0 keeps nothing, nor does the last key serve anybody."""

MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "start": {"start": 2},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 0.9])},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, -math.inf])},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([-7])},
    "key_mask": {"key_mask": torch.tensor([[True, False, True, True, True, True, False, True], [False] * 8])},
    "key_lengths": {"key_lengths": torch.tensor([5, 0])},
}
MODIFIERS["everything"] = {name: value for given in MODIFIERS.values() for name, value in given.items()}


def by_definition(q, k, v, pattern, b, h, a, *, start=None, **given):
    """Out and lse of one query, with Python floats and loops."""
    head = torch.tensor(h)
    ratio, n_keys = q.shape[1] // k.shape[1], k.shape[2]
    i = a + (n_keys - q.shape[2] if start is None else start)
    pattern = pattern if pattern.batch_size is None else pattern.batch_row(b)
    logits: dict[int, float] = {}
    for j in range(n_keys):
        if not pattern.allowed(head, torch.tensor(i), torch.tensor(j)).item():
            continue
        if "key_mask" in given and not given["key_mask"][b, j]:
            continue
        if "key_lengths" in given and j >= given["key_lengths"][b]:
            continue
        products = zip(q[b, h, a].tolist(), k[b, h // ratio, j].tolist(), strict=True)
        score = given.get("scale", q.shape[3] ** -0.5) * sum(x * y for x, y in products)
        if "softcap" in given:
            score = given["softcap"] * math.tanh(score / given["softcap"])
        if "alibi_slopes" in given:
            score -= given["alibi_slopes"][h].item() * abs(i - j)
        logits[j] = score
    if not logits:
        return [0.0] * v.shape[3], -math.inf
    keys_total = math.fsum(math.exp(x) for x in logits.values())
    total = keys_total + (math.exp(given["sinks"][h].item()) if "sinks" in given else 0.0)
    out = [0.0] * v.shape[3]
    for j, score in logits.items():
        weight = math.exp(score) / total
        if "dropout_p" in given:
            p = given["dropout_p"]
            keep = dropout_keep(given["seed"], *(torch.tensor(x) for x in (b, h, i, j)), p)
            weight *= keep.item() * 65536 / (65536 - round(65536 * p))
        out = [o + weight * x for o, x in zip(out, v[b, h // ratio, j].tolist(), strict=True)]
    return out, math.log(keys_total)


@pytest.mark.parametrize("modifiers", MODIFIERS.values(), ids=MODIFIERS)
def test_it_is_the_definition(modifiers):
    q, k, v, _ = make_inputs(2, 4, 6, 8, 3, kv_heads=2, value_dim=5)
    pattern = per_head([HOLES, Dense(), Segments(4, 2, 0) & Causal(), GlobalTokens(1) | Window(1)])
    out, lse = attention_reference(q, k, v, pattern, **modifiers)
    for b, h, a in itertools.product(range(2), range(4), range(6)):
        expected, expected_lse = by_definition(q, k, v, pattern, b, h, a, **modifiers)
        assert out[b, h, a].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert lse[b, h, a].item() == pytest.approx(expected_lse, rel=1e-12, abs=1e-14)


DERIVED = ("plain", "key_lengths", "everything")


@pytest.mark.parametrize("modifiers", [MODIFIERS[name] for name in DERIVED], ids=DERIVED)
def test_derivatives(modifiers):
    q, k, v, _ = make_inputs(2, 4, 3, 8, 2, kv_heads=2, value_dim=1)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if "sinks" in modifiers:
        modifiers = modifiers | {"sinks": torch.randn(4, dtype=torch.float64)}
        inputs.append(modifiers["sinks"].requires_grad_())
    if "alibi_slopes" in modifiers:
        modifiers = modifiers | {"alibi_slopes": modifiers["alibi_slopes"].double().requires_grad_()}
        inputs.append(modifiers["alibi_slopes"])

    def function(*_):
        # lse is -inf where nothing is kept; finite differences cannot take that, so it enters as its exponential.
        out, lse = attention_reference(q, k, v, HOLES, **modifiers)
        return out, lse.exp()

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    n_queries=st.integers(1, 40),
    n_keys=st.integers(1, 40),
    pattern=st.sampled_from(
        [Dense(), Causal() | GlobalTokens(1), Window(5) | GlobalTokens(2), ~Window(3) | GlobalTokens(1)]
    ),
)
def test_it_agrees_with_torch(heads, n_queries, n_keys, pattern):
    q, k, v, grad_out = make_inputs(2, heads[0], n_queries, n_keys, kv_heads=heads[1])
    expected = oracle(q, k, v, pattern, grad_out=grad_out)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = kept_pairs(pattern, q, k)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, grad_out)
    assert relative_error(out, expected.out) < 1e-14
    assert max(relative_error(g, expected.grads[name]) for name, g in zip("qkv", grads, strict=True)) < 2e-14


def test_more_queries_than_keys_start_before_the_first_key():
    q, k, v, _ = make_inputs(1, 1, 9, 4)
    out, lse = attention_reference(q, k, v, Causal())
    assert (lse[..., :5] == -math.inf).all()
    assert torch.allclose(out[..., 5:, :], attention_reference(q[:, :, 5:], k, v, Causal())[0])


def test_batch_rows_have_their_own_documents():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
    q, k, v, _ = make_inputs(2, 1, 6)
    out, _ = attention_reference(q, k, v, Documents(ids=ids))
    for b, (first, last) in enumerate([(3, 6), (1, 5)]):
        alone = [x[b : b + 1, :, first:last] for x in (q, k, v)]
        assert torch.allclose(out[b : b + 1, :, first:last], attention_reference(*alone, Dense())[0])


@pytest.mark.parametrize(
    ("modifiers", "poison"),
    [(given, (math.nan, math.inf, -math.inf)[row % 3]) for row, given in enumerate(MODIFIERS.values())],
    ids=MODIFIERS,
)
def test_what_nobody_keeps_changes_nothing(modifiers, poison):
    q, k, v, grad_out = make_inputs(2, 4, 6, 8, kv_heads=2)
    grad_lse = torch.randn(2, 4, 6, dtype=torch.float64)
    pattern = HOLES & ~Elements(lambda head, query, key: (key == 4) | (query == 5))
    masks = {name: modifiers[name] for name in ("start", "key_mask", "key_lengths") if name in modifiers}
    kept = kept_pairs(pattern, q, k, **masks)
    idle_rows, idle_keys = ~kept.any(-1), ~kept.unflatten(1, (2, 2)).any((2, 3))
    assert idle_rows.any()
    assert idle_keys.any()

    def results(value):
        dirty = [x.clone() for x in (q, k, v, grad_out)]
        for x, idle in zip(dirty, (idle_rows, idle_keys, idle_keys, idle_rows), strict=True):
            x[idle] = value
        dirty_lse = grad_lse.masked_fill(idle_rows, value)
        return oracle(*dirty[:3], pattern, grad_out=dirty[3], grad_lse=dirty_lse, **modifiers)

    clean, poisoned = results(0.5), results(poison)
    assert torch.equal(clean.out, poisoned.out)
    assert torch.equal(clean.lse, poisoned.lse)
    for name, grad in clean.grads.items():
        assert torch.equal(grad, poisoned.grads[name]), name
        assert grad.isfinite().all()
    assert (poisoned.out[idle_rows] == 0).all()
    assert (poisoned.lse[idle_rows] == -math.inf).all()
    assert (poisoned.grads["q"][idle_rows] == 0).all()
    assert (poisoned.grads["k"][idle_keys] == 0).all()
    assert (poisoned.grads["v"][idle_keys] == 0).all()


def test_a_problem_that_keeps_nothing():
    q, k, v, grad_out = make_inputs(1, 2, 5)
    result = oracle(q, k, v, ~Dense(), grad_out=grad_out, grad_lse=torch.ones(1, 2, 5), sinks=torch.ones(2))
    assert not result.out.any()
    assert (result.lse == -math.inf).all()
    assert not any(grad.any() for grad in result.grads.values())


@pytest.mark.parametrize(("batch", "n_queries", "n_keys"), [(1, 0, 4), (1, 4, 0), (0, 3, 3), (1, 0, 0)])
def test_empty_problems(batch, n_queries, n_keys):
    q, k, v, grad_out = make_inputs(batch, 2, n_queries, n_keys)
    result = oracle(q, k, v, Causal(), grad_out=grad_out)
    assert result.out.shape == q.shape
    assert not result.out.any()
    assert result.grads["k"].shape == k.shape


@pytest.mark.parametrize(
    ("modifiers", "through_index"),
    [*((given, row % 2 == 0) for row, given in enumerate(MODIFIERS.values())), (MODIFIERS["everything"], True)],
    ids=[*MODIFIERS, "everything through an index"],
)
def test_rows_are_rows_of_the_whole(modifiers, through_index, monkeypatch):
    monkeypatch.setattr("ringtile.kernels.reference._CHUNK_PAIRS", 200)
    q, k, v, grad_out = make_inputs(2, 4, 70, 90, kv_heads=2, value_dim=5)
    modifiers = modifiers | {
        "key_mask": torch.rand(2, 90) < 0.8 if "key_mask" in modifiers else None,
        "key_lengths": torch.tensor([60, 0]) if "key_lengths" in modifiers else None,
        "start": 11 if "start" in modifiers else None,
    }
    pattern = per_head([Causal() & Window(20) & ~Window(0), Dense(), Window(4), GlobalTokens(3)])
    rows = torch.tensor([0, 69, 33, 33, 12])
    whole = oracle(q, k, v, pattern, **modifiers)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    served = build_index(pattern, 70, 90, start=modifiers["start"], num_heads=4, block=16) if through_index else pattern
    out, lse = attention_rows(*leaves, served, rows, **modifiers)
    assert relative_error(out, whole.out[:, :, rows]) < 1e-14
    assert relative_error(lse, whole.lse[:, :, rows]) < 1e-14

    grads = torch.autograd.grad(out, leaves, grad_out[:, :, rows])
    scattered = torch.zeros_like(grad_out).index_add(2, rows, grad_out[:, :, rows])
    expected = oracle(q, k, v, pattern, grad_out=scattered, **modifiers).grads
    assert max(relative_error(g, expected[name]) for name, g in zip("qkv", grads, strict=True)) < 1e-14


def test_an_index_gives_what_its_pattern_gives():
    q, k, v, _ = make_inputs(2, 4, 70, 90)
    pattern = per_head([HOLES, Dense(), HOLES, Window(30)])
    index = build_index(pattern, 70, 90, num_heads=4, block=32)
    for a, b in zip(attention_reference(q, k, v, index), attention_reference(q, k, v, pattern), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_promoted_before_anything_is_computed(dtype):
    q, k, v, _ = make_inputs(1, 2, 20, dtype=dtype)
    out, lse = attention_reference(q, k, v, Causal())
    expected = attention_reference(q.double(), k.double(), v.double(), Causal())
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_uninitialised_memory_is_never_read():
    q, k, v, grad_out = make_inputs(1, 2, 20)
    given = {"grad_out": grad_out, "dropout_p": 0.2, "seed": 3}
    expected = oracle(q, k, v, HOLES, **given)
    with filled_memory():
        again = oracle(q, k, v, HOLES, **given)
    assert torch.equal(expected.out, again.out)
    assert all(torch.equal(expected.grads[name], grad) for name, grad in again.grads.items())


@pytest.mark.parametrize(("dtype", "score_scale"), [*zip(SDPA_BUDGET, (1, 4, 16), strict=True)])
def test_torch_own_error_is_that_of_its_dtype(dtype, score_scale):
    q, k, v, grad_out = make_inputs(1, 4, 130, 150, 64, kv_heads=2, dtype=dtype, score_scale=score_scale)
    error = sdpa_low_precision_error(q, k, v, HOLES, grad_out)
    assert error.operator == "_scaled_dot_product_flash_attention_for_cpu"
    for value in (error.out, *error.grads.values()):
        assert torch.finfo(dtype).eps / 20 < value < 40 * torch.finfo(dtype).eps


def test_relative_error_tells_wrong_results_apart():
    x = torch.tensor([1.0, 2.0, -math.inf])
    assert relative_error(x, x) == 0
    assert relative_error(torch.tensor([1.0, 2.0, 0.0]), x) == math.inf
    assert relative_error(torch.tensor([1.0, -math.inf, -math.inf]), x) == math.inf
    assert relative_error(torch.tensor([1.0, math.nan, -math.inf]), x) == math.inf
    assert relative_error(torch.tensor([1.0, 2.5, -math.inf]), x) == pytest.approx(0.5 / math.sqrt(5))
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 6, 3)}, r"q, k, v: expected \[B, H, Nq, D\]"),
        ({"k": torch.zeros(2, 2, 8, 4)}, r"q, k, v: expected .* k.shape=torch.Size\(\[2, 2, 8, 4\]\)"),
        ({"v": torch.zeros(2, 2, 7, 3)}, r"v: expected the batch, heads and length of k"),
        ({"q": torch.zeros(2, 3, 6, 3)}, r"k: expected a divisor of the heads of q"),
        ({"key_mask": torch.ones(2, 6, dtype=torch.bool)}, r"key_mask: expected shape \(2, 8\)"),
        ({"key_mask": torch.ones(2, 8)}, r"key_mask: expected bool.*float32"),
        ({"key_lengths": torch.ones(3)}, r"key_lengths: expected shape \(2,\)"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes: expected shape \(4,\)"),
        ({"sinks": torch.ones(4, 1)}, r"sinks: expected shape \(4,\)"),
        ({"softcap": -1.0}, r"softcap: expected a finite number >= 0.*-1"),
        ({"dropout_p": 0.5}, r"seed: expected an int .*None"),
        ({"dropout_p": 1.0, "seed": 0}, r"dropout_p: expected a probability .*1\.0"),
        ({"pattern": 3}, r"pattern: expected a Pattern or a BlockIndex, got int"),
        ({"pattern": per_head([Dense(), Dense()])}, r"num_heads: .*written for 2, got num_heads=4"),
        ({"pattern": Documents(ids=torch.zeros(3, 8, dtype=torch.int64))}, r"batch: .*written for 3, got batch=2"),
        ({"pattern": build_index(Dense(), 6, 9)}, r"pattern: .*does not match"),
        ({"pattern": build_index(Dense(), 6, 8), "start": 0}, r"pattern: .*does not match"),
        ({"pattern": build_index(per_head([Dense(), Causal()]), 6, 8, num_heads=2)}, r"pattern: .*does not match"),
        ({"rows": torch.tensor([6])}, r"rows: expected int64 \[R\] in \[0, 6\)"),
        ({"rows": torch.tensor([-1])}, r"rows: expected"),
        ({"rows": torch.tensor([[1]])}, r"rows: expected"),
        ({"rows": torch.tensor([1.0])}, r"rows: expected .*float32"),
    ],
)
def test_bad_input_is_named(change, message):
    q, k, v, _ = make_inputs(2, 4, 6, 8, 3, kv_heads=2)
    arguments = {"q": q, "k": k, "v": v, "pattern": Dense(), "rows": torch.tensor([0])} | change
    with pytest.raises(ValueError, match=message):
        attention_rows(**arguments)
    if "rows" not in change:
        del arguments["rows"]
        with pytest.raises(ValueError, match=message):
            attention_reference(**arguments)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_the_first_exponential_of_a_process_is_computed_by_one_thread(backend: str) -> None:
    """Two threads at once give wrong digits only sometimes, so this looks at the remedy."""
    settle_exponentials.cache_clear()
    q = torch.randn(1, 1, 40, 8)
    sparse_attention(q, q, q, Causal(), softcap=3.0, backend=backend)
    assert settle_exponentials.cache_info().currsize == 1
