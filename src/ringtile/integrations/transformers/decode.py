"""Sparse decoding from a cache of transformers: layers with room for keys, which prove that earlier keys are the same.

A step chooses by boxes of the tiles of earlier keys. They are right only as long as these keys stay: transformers
reorders a cache for beams, crops it, and picks batch elements, by giving a layer other tensors. So a layer looks if its
tensors are still those that it returned last, and begins anew if not.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ringtile.functional.cache import with_room
from ringtile.integrations.transformers.attention import KEPT, PAGES, for_layer
from ringtile.integrations.transformers.door import cache_of
from ringtile.patterns.private import version_of
from ringtile.patterns.traced import outside_graphs


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a ``DynamicCache`` with room for further tokens, so that a step copies its own key and value only.

    The keys that `update` returns have an attribute: a dict for `ringtile.adaptive.steps.Pages` of these keys. It is
    the same dict as long as keys are added behind those of the last call, and an empty one otherwise.
    """

    _last: tuple[Any, ...] | None = None
    """The keys, values, rooms, and versions of the rooms that the last call left."""

    @outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, Hkv, N, D]``, and return all of them."""
        before, new = self.get_seq_length(), (key_states, value_states)
        held, pages = self._held(before, new)
        if held is None:
            # Other shapes and dtypes, or gradients, are transformers' business.
            self.keys, self.values = super().update(key_states, value_states, *args, **kwargs)
            self._last = None
        else:
            end = before + key_states.shape[2]
            rooms = [with_room(x, before, end) for x in held]
            for room, x in zip(rooms, new, strict=True):
                room[:, :, before:end] = x
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (room[:, :, :end] for room in rooms)
            self._last = self.keys, self.values, rooms, [*map(version_of, rooms)]
        setattr(self.keys, PAGES, pages)
        return self.keys, self.values

    def _held(self, before: int, new: tuple[Tensor, Tensor]) -> tuple[list[Tensor] | None, dict[Any, Any]]:
        """Return the rooms that hold earlier keys and values, or None, and the pages of these keys."""
        keys, values, rooms, versions = self._last or (None, None, [], [])
        if before == 0:
            held, pages = [x[:, :, :0] for x in new], {}
        # A copy of this layer may share the rooms, and the versions show the tokens that it adds there.
        elif keys is self.keys and values is self.values and [*map(version_of, rooms)] == versions:
            held, pages = rooms, getattr(self.keys, PAGES)
        else:
            held, pages = [self.keys, self.values], {}
        forms = [[(x.shape[:2], x.shape[3], x.dtype, x.device) for x in each] for each in (held, new)]
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*held, *new))
        return (None, {}) if forms[0] != forms[1] or recorded else (held, pages)


def make_room(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the layer of a dynamic cache a `RoomyLayer`, before an attention module that decodes sparsely adds keys."""
    chosen, cache = getattr(module, KEPT, None), cache_of(kwargs)
    layers, number = getattr(cache, "layers", None), getattr(module, "layer_idx", None)
    if chosen is None or layers is None or number is None or for_layer("decode", chosen.decode, module) is None:
        return
    replicated: Any = cache.layer_class_to_replicate
    while replicated is not None and len(layers) <= number:
        # As `Cache.update` does.
        layers.append(replicated())
    if number < len(layers) and type(layers[number]) is DynamicLayer and not cache.offloading:
        layers[number].__class__ = RoomyLayer
