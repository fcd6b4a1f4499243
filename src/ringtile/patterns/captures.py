"""The data that the functions of `Elements` read, so that caches notice its changes."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from weakref import ref

import torch
from torch import Tensor, nn

from ringtile.patterns.base import Composed, Pattern
from ringtile.patterns.blocks import Elements, FlexRule
from ringtile.patterns.mask import state_of

_PLAIN = (int, float, complex, str, bytes, NoneType, CodeType, torch.dtype, torch.device)
_STATELESS = ("builtins", "math", "operator", "torch")
_UNREADABLE = {"__dict__", "eval", "exec", "getattr", "globals", "locals", "vars"}


class Reads:
    """The data that a function reads. It equals another as long as both functions would read the same.

    Names in the code tell which globals, and which attributes of the objects that a function holds. A function that
    can read anything equals no other.
    """

    def __init__(self, fn: object) -> None:
        self._names: set[str] = set()
        self._called: dict[int, object] = {id(fn): fn}
        size = -1
        # Code that is found late can name attributes of objects that were visited before.
        while size < len(self._names):
            size = len(self._names)
            self._states: list[object] = []
            self._tensors: list[Tensor] = []
            self._seen: dict[int, object] = {}
            self._visit(fn)
        self._states += [(id(x), state_of(x)) for x in self._tensors]
        self._refs = list(map(ref, self._tensors))
        del self._called, self._seen, self._tensors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reads) or self._states != other._states:
            return False
        # A new tensor can have the address of a dead one.
        return None not in [tensor() for tensor in (*self._refs, *other._refs)]

    def __hash__(self) -> int:
        return hash(tuple(self._states))

    def _visit(self, x: object) -> None:
        plain = type(x) in (Tensor, nn.Parameter)
        if isinstance(x, Tensor) and plain and x.layout is torch.strided and not x.is_meta:
            self._tensors.append(x)
        elif isinstance(x, _PLAIN):
            self._states.append((type(x), x))
        elif id(x) not in self._seen:
            # Held, so that no other object gets its address.
            self._seen[id(x)] = x
            self._states.append(type(x))
            for part in self._parts(x):
                self._visit(part)

    def _parts(self, x: object) -> Iterator[object]:
        """Yield the objects that code with the names so far can reach through another."""
        match x:
            case tuple() | list() | set() | frozenset():
                yield from (len(x), *x)
            case dict():
                yield from (*x, *x.values())
            case partial():
                yield from (x.func, x.args, x.keywords)
            case MethodType() | BuiltinFunctionType():
                yield from (x.__self__, getattr(x, "__func__", None))
            case FunctionType():
                names = set(_names_in(x.__code__))
                self._names |= names
                if names & _UNREADABLE:
                    self._states.append(object())
                scope = {} if _is_stateless(x) else x.__globals__
                yield from (x.__code__, x.__defaults__, x.__kwdefaults__, vars(x))
                yield from [scope[name] for name in sorted(names & scope.keys())]
                for cell in x.__closure__ or ():
                    # An empty cell has no contents yet.
                    with suppress(ValueError):
                        yield cell.cell_contents
            case ModuleType() | type():
                yield from [] if _is_stateless(x) else self._attributes(x)
            case _:
                if id(x) in self._called or (callable(x) and not self._attributes(x)):
                    self._called[id(x)] = x
                    yield type(x).forward if isinstance(x, nn.Module) else type(x).__call__
                if isinstance(x, Tensor) or not (hasattr(x, "__dict__") or hasattr(x, "__slots__")):
                    self._states.append(object())
                yield from self._attributes(x) or [getattr(x, "__dict__", None)]

    def _attributes(self, x: object) -> list[object]:
        base = nn.Module if isinstance(x, nn.Module) else object
        names = [name for name in sorted(self._names) if hasattr(x, name) and not hasattr(base, name)]
        return [getattr(x, name) for name in names]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_stateless(x: FunctionType | ModuleType | type) -> bool:
    module = x.__name__ if isinstance(x, ModuleType) else x.__module__
    return str(module).partition(".")[0] in _STATELESS


def with_reads(pattern: Pattern) -> Pattern:
    """Return a pattern that is equal to another as long as the functions in both read the same data."""
    if isinstance(pattern, Elements):
        fn, copy = pattern.fn, Elements(pattern.fn)
        object.__setattr__(copy, "reads", Reads(fn.mask_mod if isinstance(fn, FlexRule) else fn))
        return copy
    if isinstance(pattern, Composed) and pattern.text is None:
        return pattern.rebuilt([with_reads(part) for part in pattern.parts])
    return pattern
