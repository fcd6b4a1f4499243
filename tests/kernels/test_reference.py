"""The reference by the independent oracle, its rows, its second derivatives and its errors; memory that is poisoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import make_inputs, oracle, relative_error
from table import OPTIONS, Case, outcome

from ringtile import sparse_attention
from ringtile.index import build_index
from ringtile.kernels.contracts import settle_exponentials
from ringtile.kernels.reference import attention_reference, attention_rows
from ringtile.patterns import Causal, Dense, Documents, GlobalTokens, Window, per_head

PATTERN = per_head([Causal() & Window(20) & ~Window(0), Dense(), Window(4), GlobalTokens(3)])
"""Query 0 of the first head keeps nothing."""


@pytest.mark.parametrize("option", OPTIONS)
def test_it_is_the_definition(option: str) -> None:
    assert outcome(Case("per head", option, gradients="all, lse", backend="reference")) == ""


def everything(n_keys: int) -> dict[str, Any]:
    return {
        "start": 2,
        "softcap": 0.8,
        "sinks": torch.randn(4, dtype=torch.float64),
        "alibi_slopes": torch.rand(4, dtype=torch.float64),
        "dropout_p": 0.4,
        "seed": -7,
        "key_mask": torch.arange(n_keys).expand(2, -1) % 5 != 1,
        "key_lengths": torch.tensor([n_keys - 2, 0]),
    }


def test_derivatives_of_both_orders() -> None:
    q, k, v, _ = make_inputs(2, 4, 3, 8, 2, kv_heads=2, value_dim=1)
    options = everything(8)
    leaves = [x.requires_grad_() for x in (q, k, v, options["sinks"], options["alibi_slopes"])]

    def function(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # lse is -inf where nothing is kept; finite differences cannot take that, so it enters as its exponential.
        out, lse = attention_reference(q, k, v, PATTERN, **options)
        return out, lse.exp()

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("has_options", [False, True])
@pytest.mark.parametrize("through_index", [False, True])
def test_rows_are_rows_of_the_whole(has_options: bool, through_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtile.kernels.reference._CHUNK_PAIRS", 200)
    q, k, v, grad_out = make_inputs(2, 4, 70, 90, kv_heads=2, value_dim=5)
    options = everything(90) if has_options else {}
    served = build_index(PATTERN, 70, 90, start=options.get("start"), num_heads=4, block=16)
    rows = torch.tensor([0, 69, 33, 33, 12])
    scattered = torch.zeros_like(grad_out).index_add(2, rows, grad_out[:, :, rows])
    whole = oracle(q, k, v, PATTERN, grad_out=scattered, **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention_rows(*leaves, served if through_index else PATTERN, rows, **options)
    assert relative_error(out, whole.out[:, :, rows]) < 1e-14
    assert relative_error(lse, whole.lse[:, :, rows]) < 1e-14
    for name, grad in zip("qkv", torch.autograd.grad(out, leaves, grad_out[:, :, rows]), strict=True):
        assert relative_error(grad, whole.grads[name]) < 1e-14, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 2, 8, 4)}, r"q, k, v: expected .* k.shape=torch.Size\(\[2, 2, 8, 4\]\)"),
        ({"v": torch.zeros(2, 2, 7, 3)}, r"v: expected the batch, heads and length of k"),
        ({"q": torch.zeros(2, 3, 6, 3)}, r"k: expected a divisor of the heads of q"),
        ({"key_mask": torch.ones(2, 6, dtype=torch.bool)}, r"key_mask: expected shape \(2, 8\)"),
        ({"key_mask": torch.ones(2, 8)}, r"key_mask: expected bool.*float32"),
        ({"sinks": torch.ones(4, 1)}, r"sinks: expected shape \(4,\)"),
        ({"softcap": -1.0}, r"softcap: expected a finite number >= 0.*-1"),
        ({"dropout_p": 0.5}, r"seed: expected an int .*None"),
        ({"dropout_p": 1.0, "seed": 0}, r"dropout_p: expected a probability .*1\.0"),
        ({"pattern": 3}, r"pattern: expected a Pattern or a BlockIndex, got int"),
        ({"pattern": per_head([Dense(), Dense()])}, r"num_heads: .*written for 2, got num_heads=4"),
        ({"pattern": Documents(ids=torch.zeros(3, 8, dtype=torch.int64))}, r"batch: .*written for 3, got batch=2"),
        ({"pattern": build_index(Dense(), 6, 8), "start": 0}, r"pattern: .*does not match"),
        ({"pattern": build_index(per_head([Dense(), Causal()]), 6, 8, num_heads=2)}, r"pattern: .*does not match"),
        ({"rows": torch.tensor([6])}, r"rows: expected int64 \[R\] in \[0, 6\)"),
        ({"rows": torch.tensor([[1]])}, r"rows: expected"),
        ({"rows": torch.tensor([1.0])}, r"rows: expected .*float32"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    q, k, v, _ = make_inputs(2, 4, 6, 8, 3, kv_heads=2)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "pattern": Dense(), "rows": torch.tensor([0])} | change
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


@pytest.mark.parametrize(
    "made",
    [
        "torch.empty(3)",
        "torch.empty_like(x)",
        "torch.empty_strided((3,), (1,))",
        "x.new_empty(3)",
        "x.new_empty((3,))",
        "x.new_empty(size=(3,))",
        "x.new_empty(3, dtype=torch.bfloat16)",
        "torch.empty(3, dtype=torch.int32)",
        "x.new_empty(3, dtype=torch.int32)",
    ],
)
def test_memory_that_ringtile_asks_for_is_poisoned(made: str) -> None:
    found = eval(made, {"__name__": "ringtile.kernels.planted", "torch": torch, "x": torch.ones(3)})
    assert (found.isnan() if found.is_floating_point() else found == 2**31 - 1).all()
