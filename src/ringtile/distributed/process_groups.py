"""What PyTorch knows of a process group, some of it by private names: its store, its timeout, the kind of a work."""

from datetime import timedelta
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringtile.patterns.private import call
from ringtile.patterns.traced import constant

STORES: Any = dist
"""Where PyTorch documents its stores; its annotations leave them out."""

_POINT_TO_POINT = (12, 13, 14)
"""`OpType` of send, receive and receive from any rank."""

T = TypeVar("T")

# Cache. Key: a process group and a class. Bound: one object of each class per group that lives. Owner: the module of
# the class, whose objects must not refer to the group, or it and its connections would stay.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[type, Any]] = WeakKeyDictionary()
_lock = Lock()


def of_group(group: dist.ProcessGroup, kind: type[T], *arguments: Any) -> T:
    """Return the one object of a class that this process keeps for a group. The first call makes it."""
    with _lock:
        known = _known.setdefault(group, {})
        if kind not in known:
            known[kind] = kind(*arguments)
        found: T = known[kind]
        return found


def known(kind: type[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of a class that were made for a group, none or one, or for all groups."""
    with _lock:
        of = list(_known.values()) if group is None else [_known.get(group, {})]
        return [found[kind] for found in of if kind in found]


Ranks = dist.ProcessGroup | DeviceMesh
"""Process group, or a mesh with two dimensions, whose ranks count row by row."""


def place_of(ranks: Ranks) -> tuple[int, int]:
    """Return the number of this rank and the number of ranks."""
    found: tuple[int, int] = _place_in_mesh(ranks) if isinstance(ranks, DeviceMesh) else (ranks.rank(), ranks.size())
    return found


@constant
def _place_in_mesh(mesh: DeviceMesh) -> tuple[int, int]:
    group = real_group(mesh)
    return group.rank(), group.size()


def real_mesh(ranks: Any) -> Any:
    """Return the group or mesh that Dynamo has a stand-in for."""
    return getattr(ranks, "real_obj", ranks)


def real_group(ranks: Any) -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    found: Ranks = real_mesh(ranks)
    return axes_of(found).every if isinstance(found, DeviceMesh) else found


class _Wholes(WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]):
    """The group of all ranks of a mesh, by the group of its second dimension: slicing makes a mesh anew each time."""


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
    found = of_group(outer, _Wholes)
    if inner not in found:
        # A layout counts the ranks of a mesh row by row, and a group of them counts in ascending order.
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(f"group: expected a mesh whose ranks ascend row by row, got {mesh!r}")
        is_world = ranks == list(range(dist.get_world_size()))
        # The group that PyTorch makes of a mesh is private, and every rank of the program would have to make it.
        whole = dist.group.WORLD if is_world else dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(whole, dist.ProcessGroup)
        found[inner] = whole
    return Axes(found[inner], outer, inner)


def alive(group: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return a process group, or raise RuntimeError if it was destroyed."""
    found = group()
    if found is None:
        raise RuntimeError("the process group of this attention was destroyed")
    return found


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
    try:
        kind = work._get_op_type()
    except (AttributeError, TypeError):
        return True
    return not isinstance(kind, int) or kind in _POINT_TO_POINT


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a group: the same for all backends and threads, unlike `ProcessGroup.get_group_store`."""
    name = "torch.distributed.distributed_c10d:_get_process_group_store"
    return call(name, "the store of a process group", STORES.Store, group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the seconds after which the collectives of a group time out, or its store, if only that has a limit."""
    try:
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return limit.total_seconds()
    except (RuntimeError, AttributeError, TypeError):
        limit = store_of(group).timeout
    return limit.total_seconds()


def base_of(store: Any) -> Any:
    """Return the store behind the prefixes."""
    while isinstance(store, STORES.PrefixStore):
        store = store.underlying_store
    return store
