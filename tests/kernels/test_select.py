"""Which backend serves a call: the first without a reason against it, or the one that is named and no other."""

from __future__ import annotations

import importlib
import logging
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringtile import dilated_attention, sparse_attention
from ringtile.kernels import dense, native, select as select_module
from ringtile.kernels.native.library import library
from ringtile.kernels.select import NAMES, backend_report, before_native
from ringtile.patterns import Causal, Dense, Pattern, Window

module = importlib.import_module("ringtile.kernels.native.library")

CALLS: dict[str, tuple[Pattern, dict[str, Any], str | None]] = {
    "everything": (Dense(), {}, None),
    "causal": (Causal(), {}, None),
    "a window": (Window(9), {}, "supports the patterns dense and causal, got window(9)"),
    "causal from a later position": (Causal(), {"start": 3}, "from position 0"),
    "causal from an earlier position": (Causal(), {"start": -3}, "from position 0"),
    "everything from a later position": (Dense(), {"start": 3}, None),
    "causal with a negative scale": (Causal(), {"scale": -0.5}, "scale > 0"),
    "everything with a negative scale": (Dense(), {"scale": -0.5}, None),
    "a key mask": (Dense(), {"key_mask": torch.arange(50).expand(2, 50) % 3 > 0}, "key_bits"),
    "key lengths": (Causal(), {"key_lengths": torch.tensor([50, 7])}, "key_lengths"),
    "ALiBi": (Causal(), {"alibi_slopes": torch.tensor([0.5, 0.25])}, "alibi_slopes"),
    "a softcap": (Dense(), {"softcap": 2.0}, "softcap"),
    "dropout": (Dense(), {"dropout_p": 0.25, "seed": 3}, "dropout_p"),
    "sinks": (Causal(), {"sinks": torch.tensor([0.5, -1.0])}, None),
}
"""A pattern, options, and what torch's dense kernel has against them."""


@pytest.fixture
def tensors() -> tuple[Tensor, ...]:
    return torch.randn(3, 2, 2, 50, 8, dtype=torch.float64).unbind()


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize(("pattern", "options", "reason"), CALLS.values(), ids=CALLS)
def test_the_first_backend_that_fits_serves(
    tensors: tuple[Tensor, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pattern: Pattern,
    options: dict[str, Any],
    reason: str | None,
    built: bool,
) -> None:
    if not built:
        monkeypatch.setattr(native, "reason_against", lambda: "not built")
    with caplog.at_level(logging.DEBUG, "ringtile"):
        out = sparse_attention(*tensors, pattern, **options)
    expected = sparse_attention(*tensors, pattern, backend="reference", **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    taken = [record.getMessage() for record in caplog.records if record.name == "ringtile"][-1]
    wanted = "native" if built else "dense" if reason is None else "blockwise"
    assert taken == f"backend {wanted}: taken"


def taken_by(caplog: pytest.LogCaptureFixture, call: Callable[[], object]) -> list[str]:
    """The backends that served a call, in order."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "ringtile"):
        call()
    messages = [record.getMessage() for record in caplog.records if record.name == "ringtile"]
    return [message.split()[1].rstrip(":") for message in messages if message.endswith(": taken")]


def compute_bfloat16_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's set for bfloat16 has a name, whatever set computes."""
    isa, choice = library().sets[0]._replace(name=name), library().choice
    choice = choice._replace(by_dtype={**choice.by_dtype, torch.bfloat16: isa})
    monkeypatch.setattr(module, "_FOUND", module._Found(library()._replace(choice=choice), ""))


@pytest.mark.skipif(bool(native.reason_against()), reason="the native kernel is not built")
def test_dense_calls_go_to_torch_if_it_has_a_matrix_unit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(3, 1, 2, 50, 8).bfloat16().unbind()
    window = Causal() & Window(9)
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "all pairs": (lambda: sparse_attention(q, k, v), "dense"),
        "causal": (lambda: sparse_attention(q, k, v, is_causal=True), "dense"),
        "segments": (lambda: dilated_attention(q, k, v, [25], [1], is_causal=True), "dense"),
        "causal from elsewhere": (lambda: sparse_attention(q[:, :, 9:], k, v, is_causal=True), "native"),
        "a window": (lambda: sparse_attention(q, k, v, window), "native"),
        "few queries": (lambda: sparse_attention(q[:, :, :15], k, v), "native"),
        "float16": (lambda: sparse_attention(q.half(), k.half(), v.half()), "dense"),
        "float32": (lambda: sparse_attention(q.float(), k.float(), v.float()), "native"),
        "named": (lambda: sparse_attention(q, k, v, backend="native"), ""),
    }
    compute_bfloat16_by("avx512", monkeypatch)
    monkeypatch.setattr(dense, "MATRIX_DTYPES", (torch.bfloat16, torch.float16))
    assert {name: taken_by(caplog, call) for name, (call, _) in calls.items()} == {
        name: [backend] if backend else [] for name, (_, backend) in calls.items()
    }
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(sparse_attention(*leaves, is_causal=True).sum(), leaves)
    named = torch.autograd.grad(sparse_attention(*leaves, is_causal=True, backend="dense").sum(), leaves)
    assert all(map(torch.equal, grads, named))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "MATRIX_DTYPES", (torch.bfloat16,))
        assert taken_by(caplog, calls["all pairs"][0]) == ["dense"]
        assert taken_by(caplog, calls["float16"][0]) == ["native"]
    # Without the library, PyTorch's kernel is the only one with tiles.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FOUND", module._Found(None, "not built"))
        assert before_native() == (torch.bfloat16, torch.float16)
    # Our tiles multiply bfloat16, too. Of float16 they need three products.
    with pytest.MonkeyPatch.context() as patch:
        compute_bfloat16_by("amx", patch)
        assert before_native() == (torch.float16,)
        assert taken_by(caplog, calls["all pairs"][0]) == taken_by(caplog, calls["causal"][0]) == ["native"]
        assert taken_by(caplog, calls["float16"][0]) == ["dense"]
    monkeypatch.setattr(dense, "MATRIX_DTYPES", ())
    assert {name: taken_by(caplog, call) for name, (call, _) in calls.items()} == {
        name: ["native"] if backend else [] for name, (_, backend) in calls.items()
    }


def test_the_matrix_unit_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_tiles, has_fp16 in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_tiles: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda has=has_fp16: has)
        probed = runpy.run_path(str(dense.__file__))["MATRIX_DTYPES"]
        assert probed == (torch.bfloat16,) * has_tiles + (torch.float16,) * has_fp16


@pytest.mark.parametrize(("pattern", "options", "reason"), CALLS.values(), ids=CALLS)
def test_a_named_backend_serves_or_says_why_not(
    tensors: tuple[Tensor, ...], pattern: Pattern, options: dict[str, Any], reason: str | None
) -> None:
    if reason is None:
        named = sparse_attention(*tensors, pattern, backend="dense", **options)
        expected = sparse_attention(*tensors, pattern, backend="reference", **options)
        torch.testing.assert_close(named, expected, rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(ValueError, match="backend 'dense' does not support this call") as refused:
            sparse_attention(*tensors, pattern, backend="dense", **options)
        assert reason in str(refused.value)


def test_all_reasons_are_listed(tensors: tuple[Tensor, ...]) -> None:
    with pytest.raises(ValueError, match=r"window\(2\).*; .*softcap.*2\.0"):
        sparse_attention(*tensors, Window(2), softcap=2.0, backend="dense")


def test_an_unknown_backend_is_refused(tensors: tuple[Tensor, ...]) -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of .*'blockwise'.* got 'cudnn'"):
        sparse_attention(*tensors, backend="cudnn")


def test_the_report_names_every_backend() -> None:
    assert tuple(name for name, _ in backend_report()) == NAMES
    assert dict(backend_report())["blockwise"] == []


def test_a_large_call_without_the_library_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "reason_against", lambda: "not built")
    monkeypatch.setattr(select_module, "reason_against", lambda: "not built")
    monkeypatch.setattr(select_module, "_LARGE", 100 * 100)
    select_module._warn_of.cache_clear()
    small, large = (torch.zeros(1, 1, n, 4) for n in (100, 101))
    sparse_attention(small, small, small, Window(9))
    with pytest.warns(RuntimeWarning, match=r"the CPU kernel is missing \(not built\), .* `ringtile doctor`"):
        sparse_attention(large, large, large, Window(9))
    sparse_attention(large, large, large, Window(8))
    monkeypatch.setattr(select_module, "reason_against", lambda: "switched off by RINGTILE_CPU=none")
    sparse_attention(large, large, large, Window(7))
    select_module._warn_of.cache_clear()
