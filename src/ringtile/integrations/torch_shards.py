"""PyTorch's own context parallelism: its shards as a `Layout`, and a `Layout` as its load balancer.

All that PyTorch keeps private is used here and nowhere else: its load balancers.
"""

from contextlib import suppress
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.layout import Layout
from ringtile.patterns.private import call, refuse

_BALANCERS = "torch.distributed.tensor.experimental._context_parallel._load_balancer"


def _base() -> Any:
    """Return PyTorch's class of load balancers. Refuse if it has not the method of `balancer_of`."""
    with suppress(ImportError, AttributeError, TypeError):
        kind = resolve_name(f"{_BALANCERS}:_LoadBalancer")
        if [*signature(kind._generate_indices).parameters] == ["self", "restore"]:
            return kind
    refuse(f"{_BALANCERS}:_LoadBalancer._generate_indices", "context parallelism")


def shards_of(n_tokens: int, mesh: DeviceMesh, balancer: Any = "default") -> Layout:
    """Return the tokens that each rank of a mesh gets from PyTorch's context parallelism.

    Give it to `ring_attention` or `ring_attend`, which are exact inside ``context_parallel``, for any pattern and on a
    CPU. `sparse_attention` raises there: a rank has only its own tokens.

    Args:
        n_tokens: Number of tokens of all ranks.
        mesh: Mesh with one dimension, as for ``context_parallel``.
        balancer: PyTorch's load balancer, or None for equal runs. Default: the load balancer of ``context_parallel``.

    Raises ValueError if the tokens cannot be dealt out equally, a batch element has shards of its own, or the tokens of
    a rank do not ascend.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shards_of(1024, dist.init_device_mesh("cpu", (1,)))
    Layout(n_tokens=1024, runs=(((0, 1024),),))
    >>> dist.destroy_process_group()
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, mesh['cp'] for example, got {mesh!r}")
    n_ranks = mesh.size()
    base = _base()
    if balancer == "default":
        name = f"{_BALANCERS}:_create_default_load_balancer"
        balancer = call(name, "context parallelism", base | None, n_tokens, n_ranks, "cpu")
    if n_tokens % n_ranks:
        raise ValueError(f"n_tokens: expected a multiple of {n_ranks} for PyTorch's shards, got {n_tokens}")
    if not isinstance(balancer, base | None):
        raise ValueError(f"balancer: expected a load balancer of PyTorch or None, got {balancer!r}")
    indices = torch.arange(n_tokens, device="cpu").unsqueeze(0) if balancer is None else balancer._generate_indices()
    shape = getattr(indices, "shape", type(indices))
    if shape != (1, n_tokens):
        raise ValueError(
            f"balancer: expected one that shards {n_tokens} tokens of all batch elements alike, got {shape}"
        )
    return Layout(n_tokens, tuple(_runs(each) for each in indices[0].cpu().long().chunk(n_ranks)))


def _runs(tokens: Tensor) -> tuple[tuple[int, int], ...]:
    # Tokens (0, 1, 2, 9, 10) have steps (1, 1, 7, 1): a run ends at 2, and the runs are (0, 3) and (9, 11).
    steps = tokens.diff()
    if bool((steps <= 0).any()):
        raise ValueError(f"balancer: expected the tokens of a rank in ascending order, got {tokens}")
    ends = (steps != 1).nonzero().flatten()
    begins = tokens[torch.cat([ends.new_zeros(1), ends + 1])].tolist()
    return tuple(zip(begins, [*(tokens[ends] + 1).tolist(), int(tokens[-1]) + 1], strict=True))


def balancer_of(layout: Layout, device: torch.device | str = "cpu") -> Any:
    """Return a load balancer that makes PyTorch deal out the tokens of a layout.

    Give it to PyTorch's ``_context_parallel_shard`` and ``context_parallel_unshard``. ``device`` holds the buffers that
    it shards. Raises ValueError if ranks have different numbers of tokens: PyTorch's shards are equal.

    >>> layout = Layout.striped(16, 2, unit=2)
    >>> balancer_of(layout)._generate_indices()[0, :8].tolist()
    [0, 1, 4, 5, 8, 9, 12, 13]
    """
    sizes = {layout.size(rank) for rank in range(layout.n_ranks)}
    if len(sizes) > 1:
        raise ValueError(f"layout: expected equally many tokens at each rank, got {sorted(sizes)}")

    def indices(self: object, restore: bool = False) -> Tensor:
        tokens = torch.cat([layout.positions(rank, device) for rank in range(layout.n_ranks)])
        return (tokens.argsort() if restore else tokens).unsqueeze(0)

    return type("LayoutBalancer", (_base(),), {"_generate_indices": indices})()
