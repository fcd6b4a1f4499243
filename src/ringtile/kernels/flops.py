"""FLOP counts of the operators, for PyTorch's flop counter.

A counter copies the known formulas when you create it. Its module imports triton if that is installed, which `import
ringtile` must not. So we register the formulas when that module is imported.
"""

import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ringtile.kernels.chosen import BACKWARD_LISTS, FORWARD_LISTS
from ringtile.kernels.contracts import Call, index_of
from ringtile.kernels.operators import BACKWARD, FORWARD

_COUNTER = "torch.utils.flop_counter"


def _flops(n_lists: int, backward: bool, *arguments: Any, **_: Any) -> int:
    """Count the work on the pairs that kernels compute: in kept tiles, or in lists, what is left empty there too."""
    (q, k, v), rest = (arguments[2:5], arguments[7:]) if backward else (arguments[:3], arguments[3:])
    call = Call(*rest[n_lists:])
    if n_lists:
        pairs = int(q.shape[0] * q.shape[1] * q.shape[2] * min(rest[0].shape[3] * call.block, k.shape[2]))
    else:
        pairs = index_of(call, q, k).tile_pairs(q.shape[0], q.shape[1])
    return 2 * pairs * int(3 * q.shape[-1] + 2 * v.shape[-1] if backward else q.shape[-1] + v.shape[-1])


def _register(counter: ModuleType) -> None:
    for n_lists, forward, backward in ((0, FORWARD, BACKWARD), (2, FORWARD_LISTS, BACKWARD_LISTS)):
        counter.register_flop_formula(forward, get_raw=True)(partial(_flops, n_lists, False))
        counter.register_flop_formula(backward, get_raw=True)(partial(_flops, n_lists, True))


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
