"""The key and value caches of a stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ringtile.functional.cache import LayerCache


class KVCache:
    """The caches of a stack of layers, in order. `SparseTransformer.new_cache` creates one.

    >>> from ringtile.patterns import Causal, streaming
    >>> cache = KVCache([LayerCache(streaming(4, 60)), LayerCache(Causal())])
    >>> cache.length, cache.bounded
    (0, False)
    """

    def __init__(self, layers: Iterable[LayerCache]) -> None:
        self.layers = tuple(layers)
        if not self.layers:
            raise ValueError(f"layers: expected at least one LayerCache, got {self.layers}")

    @property
    def length(self) -> int:
        """Number of tokens seen so far. Raises ValueError if the layers differ, after an interrupted call."""
        # A call that an error interrupts has reached some layers only.
        lengths = [layer.length for layer in self.layers]
        if min(lengths) < max(lengths):
            raise ValueError(f"cache: expected layers that have seen the same tokens, got {lengths}")
        return lengths[0]

    @property
    def positions(self) -> Tensor | None:
        """Positions of the next tokens if they do not follow `length`, see `LayerCache`."""
        return self.layers[0].positions

    def drawn(self, draw: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return the next tokens, see `LayerCache`."""
        return self.layers[0].drawn(draw, like)

    @property
    def bounded(self) -> bool:
        """True if the patterns of all layers bound the memory."""
        return all(layer.bounded for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)
