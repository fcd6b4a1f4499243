"""Drawings of a rule as text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DRAW_LIMIT = 4096
_EMPTY, _MIXED, _FULL = "·▒█"


def draw_rule(kept: Callable[[Tensor, Tensor], Tensor], n_queries: int, n_keys: int, *, start: int, width: int) -> str:
    """Draw ``kept(query, key)``, evaluated one line of cells at a time. Raises ValueError above 4096 tokens."""
    if max(n_queries, n_keys) > DRAW_LIMIT:
        raise ValueError(
            f"draw expects at most {DRAW_LIMIT} tokens, got {n_queries=}, {n_keys=}: "
            "build_index(...).draw() draws longer sequences tile by tile"
        )
    if min(n_queries, n_keys, width) < 1:
        raise ValueError(f"draw expects positive n_queries, n_keys and width, got {n_queries=}, {n_keys=}, {width=}")
    cell = -(-max(n_queries, n_keys) // width)
    key = torch.arange(n_keys)
    keys_per_cell = torch.bincount(key // cell)
    lines = []
    for query in torch.arange(start, start + n_queries).split(cell):
        pairs = kept(query.unsqueeze(1), key.unsqueeze(0)).sum(0)
        counts = torch.zeros_like(keys_per_cell).index_add_(0, key // cell, pairs)
        full = counts == keys_per_cell * len(query)
        lines.append("".join(_FULL if f else _MIXED if c else _EMPTY for c, f in zip(counts, full, strict=True)))
    return "\n".join(lines)
