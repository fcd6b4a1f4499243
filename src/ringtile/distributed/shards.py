"""Checks of a rank's tokens before they travel."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ringtile.distributed.layout import Layout
from ringtile.distributed.process_groups import Ranks, place_of


def check_layout(layout: Layout, n_ranks: int) -> None:
    """Raise ValueError if the layout does not fit the number of ranks."""
    if not isinstance(layout, Layout) or layout.n_ranks != n_ranks:
        raise ValueError(f"layout: expected a Layout for {n_ranks} ranks, got {layout!r}")


def check_shard(query: Tensor, key: Tensor, layout: Layout, ranks: Ranks) -> tuple[int, int]:
    """Return the number of this rank and the number of ranks.

    Raises ValueError if the layout does not fit the ranks, or the tensors do not have the rank's tokens.
    """
    rank, n_ranks = place_of(ranks)
    check_layout(layout, n_ranks)
    for name, x in (("query", query), ("key", key)):
        if x.shape[2] != layout.size(rank):
            raise ValueError(f"{name}: expected the {layout.size(rank)} tokens of rank {rank}, got {x.shape=}")
    return rank, n_ranks


def check_keys_finite(key: Tensor, value: Tensor, layout: Layout, rank: int, layer: bool | str) -> None:
    """Raise ValueError with the place of the first NaN or infinity."""
    for name, x in (("key", key), ("value", value)):
        found = first_nonfinite(x, 128)
        if found is not None:
            batch, head, tile = found
            position = int(layout.positions(rank)[tile * 128])
            where = f" of {layer}" if isinstance(layer, str) else ""
            raise ValueError(
                f"{name}: expected finite numbers, got NaN or infinity at rank {dist.get_rank()}{where}, batch element "
                f"{batch}, head {head}, in the 128 tokens from position {position}"
            )


def first_nonfinite(x: Tensor, tile: int) -> tuple[int, int, int] | None:
    """Return (batch element, head, tile) of the first tile of ``x`` ``[B, H, N, D]`` with a NaN or infinity, or None.

    "First" is the lowest tile, then batch element, then head. ``tile`` is the number of tokens per tile. The call reads
    ``x`` once, allocates nothing of its size, and synchronizes with a GPU.

    >>> import torch
    >>> x = torch.zeros(2, 4, 300, 16)
    >>> x[1, 2, 150, 3] = torch.nan
    >>> first_nonfinite(x, 64)
    (1, 2, 2)
    """
    if x.dim() != 4 or tile < 1:
        raise ValueError(f"x, tile: expected [B, H, N, D] and a positive number of tokens, got {x.shape=}, {tile=}")
    if not x.numel():
        return None
    low, high = x.detach().aminmax()
    if bool(low.isfinite() & high.isfinite()):
        return None
    low, high = x.detach().aminmax(dim=-1)
    bad = ~(low.isfinite() & high.isfinite())
    first = int(bad.any(0).any(0).nonzero()[0, 0]) // tile
    element, head = bad[:, :, first * tile : (first + 1) * tile].any(-1).nonzero()[0].tolist()
    return element, head, first
