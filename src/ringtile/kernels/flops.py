"""FLOP counts of the operators, for PyTorch's flop counter.

A counter copies the known formulas when you create it. Its module imports triton if that is installed, which `import
ringtile` must not. So we register the formulas when that module is imported.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from ringtile.kernels.chosen import BACKWARD_LISTS, FORWARD_LISTS
from ringtile.kernels.contracts import Call, index_of
from ringtile.kernels.operators import BACKWARD, FORWARD

_COUNTER = "torch.utils.flop_counter"


def _kept_area(call: Call, q: Tensor, k: Tensor) -> int:
    """Count the (query, key) pairs in the kept tiles, over batch elements and heads. Kernels compute this many."""
    return index_of(call, q, k).tile_pairs(q.shape[0], q.shape[1])


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *call: Any, out_val: Any = None, **_: Any) -> int:
    return 2 * _kept_area(Call(*call), q, k) * int(q.shape[-1] + v.shape[-1])


def _backward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    q, k, v = arguments[2:5]
    return 2 * _kept_area(Call(*arguments[7:]), q, k) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def _listed_pairs(q: Tensor, k: Tensor, indices: Tensor, call: Call) -> int:
    """Count the pairs that lists can hold. What is left empty or cut away in them counts too."""
    return int(q.shape[0] * q.shape[1] * q.shape[2] * min(indices.shape[3] * call.block, k.shape[2]))


def _lists_forward_flops(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, limits: Tensor, *call: Any, out_val: Any = None, **_: Any
) -> int:
    return 2 * _listed_pairs(q, k, indices, Call(*call)) * int(q.shape[-1] + v.shape[-1])


def _lists_backward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    q, k, v = arguments[2:5]
    return 2 * _listed_pairs(q, k, arguments[7], Call(*arguments[9:])) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(FORWARD, get_raw=True)(_forward_flops)
    counter.register_flop_formula(BACKWARD, get_raw=True)(_backward_flops)
    counter.register_flop_formula(FORWARD_LISTS, get_raw=True)(_lists_forward_flops)
    counter.register_flop_formula(BACKWARD_LISTS, get_raw=True)(_lists_backward_flops)


class _Finder:
    """Import hook that finds the flop counter, once."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(cls)
        spec: Any = find_spec(name)
        # The module's own loader executes it, then the formulas join those of PyTorch.
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module
        return spec


def tell_flop_counter() -> None:
    """Register the formulas now if PyTorch's flop counter is loaded, otherwise when it will be."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _Finder)
