"""What PyTorch knows of a process group, some of it by private names: its store, its timeout, the kind of a work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

STORES: Any = dist
"""Where PyTorch documents its stores; its annotations leave them out."""

_POINT_TO_POINT = (12, 13, 14)
"""`OpType` of send, receive and receive from any rank."""

_wholes: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)
"""The group of all ranks of a mesh, by the groups of its dimensions: a mesh is made anew whenever it is sliced."""


class Axes(NamedTuple):
    """The groups of a mesh with two dimensions that this rank is in. `every` has all ranks, row by row."""

    every: dist.ProcessGroup
    outer: dist.ProcessGroup
    """The ranks along the first dimension."""
    inner: dist.ProcessGroup
    """The ranks along the second dimension, usually neighbors with fast links."""


def axes_of(mesh: DeviceMesh) -> Axes:
    """Return the groups of a mesh with two dimensions. The first call makes the group of all ranks.

    All ranks of the mesh make this first call at the same place in their program. Raises ValueError if the mesh's ranks
    do not ascend row by row.
    """
    outer, inner = mesh.get_group(0), mesh.get_group(1)
    found = _wholes.setdefault(outer, WeakKeyDictionary())
    if inner not in found:
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(f"group: expected a mesh whose ranks ascend row by row, got {mesh!r}")
        is_world = ranks == list(range(dist.get_world_size()))
        # The group that PyTorch makes of a mesh is private, and every rank of the program would have to make it.
        whole = dist.group.WORLD if is_world else dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(whole, dist.ProcessGroup)
        found[inner] = whole
    return Axes(found[inner], outer, inner)


def is_alone(group: dist.ProcessGroup) -> bool:
    """Return True for a group of one rank and for PyTorch's fake backend."""
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


def carries_cpu(group: dist.ProcessGroup) -> bool:
    """Return True if a group moves tensors of the CPU, as gloo and threads do and NCCL does not."""
    return "cpu:" in dist.get_backend_config(group)


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """Return True until a group is destroyed."""
    if group is None:
        return False
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def is_point_to_point(work: Any) -> bool:
    """Return True if a work is a send or a receive, or if this version of PyTorch does not tell."""
    kind = getattr(work, "_get_op_type", None)
    return kind is None or kind() in _POINT_TO_POINT


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a group: the same for every backend and for threads, unlike `ProcessGroup.get_group_store`.

    Raises RuntimeError if this version of PyTorch does not tell.
    """
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if find is None:
        raise RuntimeError(f"group: PyTorch {torch.__version__} does not tell the store of a process group")
    return find(group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the seconds after which the collectives of a group time out."""
    try:
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        limit = store_of(group).timeout
    return limit.total_seconds()


def base_of(store: Any) -> Any:
    """Return the store behind the prefixes."""
    while isinstance(store, STORES.PrefixStore):
        store = store.underlying_store
    return store
