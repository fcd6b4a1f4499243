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
from ringtile.distributed.process_groups import real_group
from ringtile.distributed.transports import mode_of
from ringtile.functional.attention import rule_of
from ringtile.patterns import Pattern


@dataclass(frozen=True, eq=False)
class RingAttend:
    """`ring_attention` in a group with a layout; `ring_attend` creates it."""

    group: dist.ProcessGroup | DeviceMesh | None
    layout: Layout
    options: Mapping[str, Any]

    transports: Mapping[str | Pattern, str] | None = None
    """Transport of each pattern, by its text if it has one: in compiled code, Dynamo makes the patterns."""
    every: dist.ProcessGroup | DeviceMesh | None = None
    """Group for the transports that do not know nodes."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute attention."""
        rule = None
        if self.transports is not None:
            rule = rule_of(options.get("pattern"), options.get("is_causal", False), None)
        return ring_attention(query, key, value, layout=self.layout, **self._how(rule), **options)

    def new_cache(self, pattern: Pattern) -> RingCache:
        """Return an empty cache whose prompt has the layout."""
        return RingCache(pattern, layout=self.layout, **self._how(pattern))

    def _how(self, rule: Pattern | None) -> dict[str, Any]:
        """Return the group, the transport and the other options of a layer with this pattern."""
        if self.transports is None or rule is None:
            return {"group": self.group, **self.options}
        transport = self.transports.get(rule.text or rule)
        if transport is None:
            raise ValueError(f"transport: expected one for the pattern {rule!r}, got {list(self.transports)}")
        group = self.group if 1 not in mode_of(transport).dims else self.every
        return {"group": group, "transport": transport, **self.options}


def ring_attend(
    group: dist.ProcessGroup | DeviceMesh | None,
    layout: Layout,
    *,
    transport: str | Mapping[Pattern, str] = "auto",
    **options: Any,
) -> RingAttend:
    """Return `ring_attention` in a group with a layout, as the ``attend=`` of the modules.

    ``options`` are more arguments of `ring_attention`. Give the module the rank's tokens and their positions,
    ``layout.positions(rank)``. To generate, give `SparseLanguageModel.generate` the rank's tokens of the prompt: the
    cached keys stay at their ranks.

    ``transport`` can be a transport of each pattern of the model, as `cheapest_for_model` returns. On a mesh of nodes
    and their ranks, only the layers with "hierarchy" use the nodes. A layer with another pattern raises ValueError.

    >>> from ringtile.modules import SparseTransformer
    >>> from ringtile.patterns import Causal, Window
    >>> layout = Layout.zigzag(1024, 2)
    >>> model = SparseTransformer(64, 4, 2, pattern=Causal() & Window(256), attend=ring_attend(None, layout))
    """
    if isinstance(transport, str):
        return RingAttend(group, layout, {"transport": transport, **options})
    is_nodes = isinstance(group, DeviceMesh) and group.ndim == 2
    by_text = {rule.text or rule: name for rule, name in transport.items()}
    return RingAttend(group, layout, options, by_text, real_group(group) if is_nodes else group)
