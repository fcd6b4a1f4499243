"""Private names of PyTorch, and what happens without them: a slower way, or one line when a call needs the name.

A name that one room needs is in a file there: Dynamo's in `traced`, PyTorch's kernels in `kernels/cpu_flash` and
`kernels/flash`, for example. ``tests/project/test_torch_names.py`` lists them all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from inspect import isgetsetdescriptor
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringtile.patterns.tested import TESTED

_T = TypeVar("_T")


def refuse(name: str, need: str, *_: object) -> NoReturn:
    """Raise NotImplementedError with torch's version, the name and the need."""
    text = f"torch {torch.__version__} has no {name.replace(':', '.')} as ringtile needs it for {need}"
    raise NotImplementedError(f"{text}; tested with torch {', '.join(TESTED['torch'])}")


def private(name: str, otherwise: str | Callable[..., _T], works: Callable[[Any], object]) -> Callable[..., _T]:
    """Return ``module:name`` of PyTorch, or ``otherwise`` if it is gone or does not work: ``works`` may raise.

    If ``otherwise`` is the need for the name, calls are refused.
    """
    with suppress(ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        value: Callable[..., _T] = resolve_name(name)
        if works(value):
            return value
    return partial(refuse, name, otherwise) if isinstance(otherwise, str) else otherwise


def state(name: str, otherwise: _T, *arguments: object) -> Callable[..., _T]:
    """Return a function of PyTorch that returns a value like ``otherwise``, or one that always returns that."""
    return private(name, lambda *_: otherwise, lambda function: type(function(*arguments)) is type(otherwise))


def call(name: str, need: str, kind: type, *arguments: object) -> Any:
    """Return the result of a private function. Refuse if it is gone, takes other arguments or returns another type."""
    with suppress(ImportError, AttributeError, TypeError):
        result = resolve_name(name)(*arguments)
        if isinstance(result, kind):
            return result
    refuse(name, need)


is_traced: Callable[[], bool] = resolve_name("torch:jit.is_tracing")
# Without these, each call goes through PyTorch's dispatcher, as if something were there to see it, and makes its spans.
is_transformed = state("torch:_C._are_functorch_transforms_active", True)
"""Returns True inside transforms of torch.func."""
n_dispatch_modes = state("torch:_C._len_torch_dispatch_stack", 1)
n_function_modes = state("torch:_C._len_torch_function_stack", 1)
is_profiled = state("torch:_C._autograd._profiler_enabled", True)


def in_forward_mode() -> bool:
    """Return True inside `forward_ad.dual_level`, or if its level has no name here: results are then copied."""
    return getattr(forward_ad, "_current_level", 0) != -1


def _outside(name: str, is_inside: Callable[[], object]) -> Callable[[], AbstractContextManager[object]]:
    """Return a private context manager, or without it one that does nothing, and refuses where it is needed."""

    def otherwise() -> AbstractContextManager[object]:
        return refuse(name, "indices made inside") if is_inside() else nullcontext()

    return private(name, otherwise, lambda context: context().__exit__)


outside_transforms = _outside("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", is_transformed)
outside_modes = _outside("torch.utils._python_dispatch:_disable_current_modes", n_dispatch_modes)

version_of: Callable[[Tensor], int] = private("torch:Tensor._version", "tensors that change", isgetsetdescriptor)
"""Returns how often a tensor was written to. Raises RuntimeError for tensors that do not count it."""
if isgetsetdescriptor(version_of):
    version_of = attrgetter("_version")

_EMPTY = torch.empty(0, dtype=torch.bool, device="cpu")
is_zero = state("torch:Tensor._is_zerotensor", False, _EMPTY)
"""Returns True for a tensor of zeros without memory. Without the name, they are refused as freed memory."""


assert_async: Callable[[Tensor, str], None] = private(
    "torch:_assert_async", "checks on the device", lambda function: function(_EMPTY.all(), "") is None
)
"""Raises RuntimeError if a tensor is False, later on a GPU."""

tree_leaves = partial(call, "torch.utils._pytree:tree_leaves", "functions of yours", list)
tree_map: Callable[..., Any] = private("torch.utils._pytree:tree_map", "torch.func", lambda f: f(len, [""]) == [0])

_BATCHED = "is_grads_batched=True"
is_batched_gradient = partial(call, "torch:_C._functorch.is_legacy_batchedtensor", _BATCHED, bool)
remove_batch = partial(call, "torch:_remove_batch_dim", _BATCHED, Tensor)
add_batch = partial(call, "torch:_add_batch_dim", _BATCHED, Tensor)


def outside_vmap_mode() -> AbstractContextManager[object]:
    """Return a context in which PyTorch draws numbers, by which an index finds equal tiles: not so in this mode."""
    key = call("torch:_C._dispatch_key_parse", _BATCHED, object, "VmapMode")
    keys = call("torch:_C.DispatchKeySet", _BATCHED, object, key)
    context: AbstractContextManager[object] = call(
        "torch:_C._ExcludeDispatchKeyGuard", _BATCHED, AbstractContextManager, keys
    )
    return context
