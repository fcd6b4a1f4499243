"""Which backend serves a call: the first without a reason against it, or the one that is named and no other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from ringtile import sparse_attention
from ringtile.kernels import native
from ringtile.kernels.select import NAMES, backend_report
from ringtile.patterns import Causal, Dense, Pattern, Window

CALLS: dict[str, tuple[Pattern, dict[str, Any], str | None]] = {
    "everything": (Dense(), {}, None),
    "causal": (Causal(), {}, None),
    "a window": (Window(9), {}, "serves the patterns dense and causal, got window(9)"),
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
    plain = "softcap" not in options and "alibi_slopes" not in options
    wanted = "native" if built and plain else "dense" if reason is None else "blockwise"
    assert taken == f"backend {wanted}: taken"


@pytest.mark.parametrize(("pattern", "options", "reason"), CALLS.values(), ids=CALLS)
def test_a_named_backend_serves_or_says_why_not(
    tensors: tuple[Tensor, ...], pattern: Pattern, options: dict[str, Any], reason: str | None
) -> None:
    if reason is None:
        named = sparse_attention(*tensors, pattern, backend="dense", **options)
        expected = sparse_attention(*tensors, pattern, backend="reference", **options)
        torch.testing.assert_close(named, expected, rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(ValueError, match="backend 'dense' cannot serve this call") as refused:
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
