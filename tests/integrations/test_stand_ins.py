"""Functions in place of those of other libraries: they have the arguments and defaults of the installed version.

Whatever comes with a later version is refused, unless it is None or the default.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import refused
from torch import Tensor, nn

from ringtile.integrations import diffusers, torch_shards, torchtitan
from ringtile.modules import SparseMultiheadAttention, replace_attention
from ringtile.patterns import Window
from ringtile.patterns.checks import refuse_unknown
from ringtile.patterns.private import resolve_name

MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind not in MORE and x.name != "self"}


def documented(function: Callable[..., Any]) -> dict[str, Any]:
    """The same of a function that is not written in Python, from its documentation."""
    line = re.match(r"\w+\((.*?)\) ->", str(function.__doc__).strip(), re.S)
    assert line is not None
    scope: dict[str, Any] = {}
    exec(f"def function({line[1]}): ...", scope)
    return defaults(scope["function"])


def scaled_dot_product_attention() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ours = defaults(diffusers._attend)
    del ours["pattern"]
    return ours, documented(F.scaled_dot_product_attention)


def multihead_attention() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return defaults(SparseMultiheadAttention.forward), defaults(nn.MultiheadAttention.forward)


def new_multihead_attention() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ours = defaults(SparseMultiheadAttention.__init__)
    del ours["pattern"], ours["attend"]
    return ours, defaults(nn.MultiheadAttention.__init__)


def load_balancer() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    from ringtile.distributed import Layout

    theirs = resolve_name(f"{torch_shards._BALANCERS}:_LoadBalancer")._generate_indices
    return defaults(torch_shards.balancer_of(Layout.contiguous(8, 2))._generate_indices), defaults(theirs)


def prediction_step() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    transformers = pytest.importorskip("transformers")
    from ringtile.integrations.transformers.trainer import CPTrainer

    return defaults(CPTrainer.prediction_step), defaults(transformers.Trainer.prediction_step)


@pytest.mark.parametrize(
    "pair",
    [scaled_dot_product_attention, multihead_attention, new_multihead_attention, load_balancer, prediction_step],
)
def test_the_installed_function_has_the_same_arguments(pair: Callable[[], Any]) -> None:
    ours, theirs = pair()
    assert ours == theirs


def test_arguments_of_later_versions_are_refused_unless_they_ask_for_nothing() -> None:
    def theirs(query: Tensor, window: int = 5, mode: str = "exact", tensor: Any = None) -> None: ...

    refuse_unknown({"window": 5, "mode": "exact", "tensor": None, "other": None}, theirs, "ringtile")
    for options, name in (
        ({"window": 6}, "window"),
        ({"mode": "fast"}, "mode"),
        ({"tensor": torch.zeros(2)}, "tensor"),
        # False is neither None nor a default that is known.
        ({"other": False}, "other"),
        ({"window": 5, "other": 1}, "other"),
    ):
        with refused(rf"^{name}: expected None, or its default, which ringtile may drop, got"):
            refuse_unknown(options, theirs, "ringtile")


def test_diffusers_attention_gets_no_unknown_argument() -> None:
    q, rule = torch.randn(1, 4, 40, 8), Window(9)
    assert torch.equal(diffusers._attend(rule, q, q, q, new=None), diffusers._attend(rule, q, q, q))
    with refused("new: expected None, or its default, which a pattern may drop, got True"):
        diffusers._attend(rule, q, q, q, new=True)


def test_multihead_attention_gets_no_unknown_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    x, module = torch.randn(1, 20, 16), nn.MultiheadAttention(16, 2, batch_first=True)
    ours = replace_attention(module, pattern="causal")
    assert torch.equal(ours(x, x, x, new=None)[0], ours(x, x, x)[0])
    with refused("new: expected None, or its default, which SparseMultiheadAttention may drop"):
        ours(x, x, x, new=0.5)

    def newer(self: Any, embed_dim: int, num_heads: int, softcap: float = 0.0) -> None: ...

    monkeypatch.setattr(nn.MultiheadAttention, "__init__", newer)
    for softcap in (0.0, 3.0):
        module.__class__, module.softcap = nn.MultiheadAttention, softcap
        if softcap:
            with refused("softcap: expected None"):
                replace_attention(module, pattern="causal")
            assert type(module) is nn.MultiheadAttention
        else:
            replace_attention(module, pattern="causal")


def test_torchtitans_attention_gets_no_unknown_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(nn.Module):
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self, q: Any, k: Any, v: Any, *, scale: Any = None, fast: bool = True, new: int = 7) -> None: ...

    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common", "torchtitan.models.common.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "ScaledDotProductAttention", Theirs, raising=False)
    kind = torchtitan._attention_class.__wrapped__()
    attention = kind(kind.Config(pattern="window(20)"))
    q = torch.randn(1, 60, 4, 16)
    assert torch.equal(attention(q, q, q, fast=True, new=7, other=None), attention(q, q, q))
    # False is not the default of all that a later version has.
    for options in ({"fast": False}, {"new": 8}, {"other": True}):
        with refused(f"{next(iter(options))}: expected None, or its default"):
            attention(q, q, q, **options)
