"""FLOP counts of the operators, told to torch's flop counter as soon as somebody imports it.

That module imports triton where it is installed, which `import ringtile` should not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringtile.kernels.contracts import Call, index_of

_COUNTER = "torch.utils.flop_counter"


def _kept_area(call: Call, q: Tensor, k: Tensor) -> int:
    """(query, key) pairs inside the kept tiles, summed over batch rows and heads: what the kernels compute."""
    return index_of(call, q, k).tile_pairs(q.shape[0], q.shape[1])


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *call: Any, out_val: Any = None, **_: Any) -> int:
    return 2 * _kept_area(Call(*call), q, k) * int(q.shape[-1] + v.shape[-1])


def _backward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    q, k, v = arguments[2:5]
    return 2 * _kept_area(Call(*arguments[7:]), q, k) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.ringtile.forward, get_raw=True)(_forward_flops)
    counter.register_flop_formula(torch.ops.ringtile.backward, get_raw=True)(_backward_flops)


class _Registering(Loader):
    """Loads the flop counter as its own loader does, and registers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register(module)


class _Finder(MetaPathFinder):
    """Finds the flop counter, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


def tell_flop_counter() -> None:
    """Register the formulas now where torch's flop counter is loaded, else when it will be."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _Finder())
