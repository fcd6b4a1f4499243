"""Attention over ranks as the ``attend=`` of the modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.attention import ring_attention
from ringtile.distributed.cache import RingCache
from ringtile.distributed.layout import Layout
from ringtile.patterns import Pattern


@dataclass(frozen=True, eq=False)
class RingAttend:
    """`ring_attention` in a group with a layout; `ring_attend` creates it."""

    group: dist.ProcessGroup | DeviceMesh | None
    layout: Layout
    options: Mapping[str, Any]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute attention."""
        return ring_attention(query, key, value, layout=self.layout, group=self.group, **self.options, **options)

    def new_cache(self, pattern: Pattern) -> RingCache:
        """Return an empty cache whose prompt has the layout."""
        return RingCache(pattern, layout=self.layout, group=self.group, **self.options)


def ring_attend(group: dist.ProcessGroup | DeviceMesh | None, layout: Layout, **options: Any) -> RingAttend:
    """Return `ring_attention` in a group with a layout, as the ``attend=`` of the modules.

    ``options`` are more arguments of `ring_attention`, for example ``transport``. Give the module the rank's tokens and
    their positions, ``layout.positions(rank)``. To generate, give `SparseLanguageModel.generate` the rank's tokens of
    the prompt: the cached keys stay at their ranks.

    >>> from ringtile.modules import SparseTransformer
    >>> from ringtile.patterns import Causal, Window
    >>> layout = Layout.zigzag(1024, 2)
    >>> model = SparseTransformer(64, 4, 2, pattern=Causal() & Window(256), attend=ring_attend(None, layout))
    """
    return RingAttend(group, layout, options)
