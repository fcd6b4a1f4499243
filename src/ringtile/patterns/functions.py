"""Functions as rules: FlexAttention rules, and the data that functions read besides positions."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringtile.patterns.mask import state_of
from ringtile.patterns.private import tree_leaves
from ringtile.patterns.traced import items_as_indices

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A FlexAttention rule: batch row, head, query and key numbers to a bool."""

_TO_PYTHON = {"__bool__", "__float__", "__index__", "__int__", "equal", "item", "numpy", "tolist"}


@dataclass(frozen=True)
class FlexRule:
    """A rule of FlexAttention for ``batch`` elements, for one of them, or, without a row, for any."""

    mask_mod: MaskMod
    batch: int | None = None
    row: int | None = None

    def __call__(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.batch is not None:
            raise ValueError(f"mask_mod of {self.batch} batch elements: ask batch_row(b), the pattern of one")
        if self.row is None:
            Reads(self, head.device)
        return one_by_one(self.mask_mod, self.row or 0, head, query, key)


def one_by_one(mask_mod: MaskMod, row: int, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Evaluate a FlexAttention rule as FlexAttention does: on one pair at a time, as far as the function can tell."""
    numbers = torch.broadcast_tensors(head, query, key)
    if not numbers[0].numel():
        # PyTorch maps no function over 0 pairs.
        return torch.empty_like(numbers[0], dtype=torch.bool)
    with items_as_indices():
        of_row = partial(mask_mod, query.new_full((), row))
        kept: Tensor = torch.vmap(of_row)(*(number.flatten() for number in numbers))
    return kept.view(numbers[0].shape)


class Reads(TorchFunctionMode):
    """The operations of a function and their data. Equal to another as long as both functions would read the same.

    A function whose Python code reads the values of its arguments equals no other. Raises ValueError if a `FlexRule`
    for any batch element reads which one it is.
    """

    def __init__(self, fn: Callable[..., Tensor], device: torch.device | None) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}
        self.data: dict[int, Tensor] = {}
        self.unread: Tensor | None = None
        # It stays if the function, or the state of its data, has no value here.
        self.steps: list[object] = [object()]
        positions = torch.zeros(3, 1, dtype=torch.int64, device=device).unbind()
        with suppress(Exception):
            if isinstance(fn, FlexRule):
                one_by_one(partial(self._call, fn.mask_mod, fn.batch is fn.row is None), 0, *positions)
            else:
                self._call(fn, False, *positions)
            self.steps += map(state_of, self.data.values())
            del self.steps[0]
        if id(self.unread) in self.data:
            raise ValueError("mask_mod: it reads b, so expected from_mask_mod(mask_mod, batch=B), got no batch")
        self.refs = list(map(ref, self.data.values()))
        del self.made, self.data

    def _call(self, fn: Callable[..., Tensor], is_free: bool, *args: Tensor) -> Tensor:
        self.unread = args[0] if is_free else None
        self.made |= {id(x): x for x in args[is_free:]}
        with self:
            return fn(*args)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result, name = func(*args, **(kwargs or {})), func.__name__
        if args and args[0] is self.unread and name.startswith(("new_", "__get__")):
            # FlexAttention's `and_masks` begins with b.new_ones(), which reads no value.
            args = args[1:]
        for x in tree_leaves((name, args, kwargs)):
            if not isinstance(x, Tensor):
                # An array's text leaves numbers out.
                self.steps.append(object() if hasattr(x, "__array__") else repr(x))
            elif id(x) in self.made:
                self.steps.append(object() if name in _TO_PYTHON else None)
            else:
                self.data[id(x)] = x
                self.steps.append(id(x))
        self.made |= {id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reads) or self.steps != other.steps:
            return False
        # A new tensor can have a dead tensor's address.
        return None not in [x() for x in (*self.refs, *other.refs)]

    def __hash__(self) -> int:
        return hash(tuple(self.steps))
