"""The fixture that fills uninitialised memory does so, where ringtile asks for it and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def made_in(module: str, expression: str) -> Tensor:
    """What an expression gives when a module of that name evaluates it."""
    names = {"__name__": module, "torch": torch, "x": torch.ones(3)}
    exec(f"made = {expression}", names)
    return names["made"]


@pytest.mark.parametrize(
    "expression",
    [
        "torch.empty(3)",
        "torch.empty_like(x)",
        "torch.empty_strided((3,), (1,))",
        "x.new_empty(3)",
        "x.new_empty((3,))",
        "x.new_empty(size=(3,))",
        "x.new_empty(3, dtype=torch.bfloat16)",
    ],
)
def test_floats_are_nan(expression: str) -> None:
    assert made_in("ringtile.kernels.planted", expression).isnan().all()


def test_integers_are_the_largest() -> None:
    for expression in ("torch.empty(3, dtype=torch.int32)", "x.new_empty(3, dtype=torch.int32)"):
        made = made_in("ringtile.kernels.planted", expression)
        assert made.dtype == torch.int32
        assert made.tolist() == [2**31 - 1] * 3


def test_torch_itself_is_left_alone() -> None:
    class Filled(Exception):
        pass

    def refuse(*_: object) -> Tensor:
        raise Filled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "fill_", refuse)
        made_in("torch.nn.init", "torch.empty(3)")
        with pytest.raises(Filled):
            made_in("ringtile.kernels.planted", "torch.empty(3)")


@pytest.mark.unpoisoned
def test_a_test_can_opt_out() -> None:
    assert torch.empty.__name__ == "empty"
    assert "new_empty" not in Tensor.__dict__
