"""How keys can travel between ranks: the groups and calls that a transport supports, and plans ahead of a call."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.layout import Layout
from ringtile.distributed.plan import RingPlan, fits_ring, make_plan
from ringtile.distributed.process_groups import Ranks
from ringtile.distributed.relays import Relays, make_relays
from ringtile.kernels.contracts import Call, lacking
from ringtile.patterns import Pattern
from ringtile.patterns.chosen import split

T = TypeVar("T")


class Mode(NamedTuple):
    """A transport, as data."""

    name: str
    dims: tuple[int, ...] = (1,)
    """Numbers of dimensions that a mesh of its ranks can have."""
    gather: bool | None = False
    """As in `make_plan`."""
    is_planned: bool = True
    """True if a `RingPlan` says which keys travel."""


MODES = {
    mode.name: mode
    for mode in (
        Mode("auto", gather=None),
        Mode("exchange"),
        Mode("gather", gather=True),
        Mode("ring", is_planned=False),
        Mode("hierarchy", dims=(2,)),
        Mode("ulysses", dims=(1, 2), is_planned=False),
    )
}


def mode_of(transport: str) -> Mode:
    """Return the mode with a name, or raise ValueError."""
    if transport not in MODES:
        raise ValueError(f"transport: expected one of {tuple(MODES)}, got {transport!r}")
    return MODES[transport]


def chosen(mode: Mode, pattern: Pattern, call: Call, n_ranks: int) -> Mode:
    """Return the mode of a call: instead of "auto" a ring if that supports it, or a gather for lists."""
    if split(pattern) is not None:
        if mode.gather is False:
            raise ValueError(
                f"transport {mode.name!r} does not support Chosen: its lists can name any key, so use 'gather'"
            )
        return MODES["gather"]
    against, ring = lacking(call, "alibi_slopes", "dropout_p"), MODES["ring"]
    if not fits_ring(pattern):
        against.append(f"supports the patterns dense and causal, got {pattern!r}")
    if call.backend == "reference":
        against.append("does not support backend='reference'")
    if torch.compiler.is_compiling():
        against.append("does not support torch.compile")
    if mode is ring and against:
        raise ValueError(f"transport 'ring' does not support this call: {'; '.join(against)}")
    return ring if mode.gather is None and not against and n_ranks > 1 else mode


def plan_of(
    mode: Mode, pattern: Pattern | None, layout: Layout, rank: int, ranks_per_node: int | None, **sizes: int
) -> RingPlan | Relays:
    """Return the plan of a mode that is planned, from its cache if it was made before. None is for lists."""
    # A hierarchy moves the tokens of the same plan, on other paths.
    plan = make_plan(pattern, layout, rank, gather=mode.gather, **sizes)
    if 1 in mode.dims:
        return plan
    if ranks_per_node is None:
        raise ValueError(f"ranks_per_node: expected the number of ranks per node for the transport {mode.name!r}")
    return make_relays(plan, ranks_per_node)


def group_of(group: dist.ProcessGroup | DeviceMesh | None, mode: Mode | None = None) -> Ranks:
    """Return the ranks that share a sequence: the default group if None, the group of a mesh with one dimension."""
    dims = (1,) if mode is None else mode.dims
    if 1 not in dims and not (isinstance(group, DeviceMesh) and group.ndim in dims):
        raise ValueError(
            f"group: expected a mesh of nodes and their ranks for the transport {mode and mode.name!r}, for example "
            f"init_device_mesh('cuda', (nodes, ranks_per_node)), got {group!r}"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim > 1 and group.ndim in dims:
            return group
        if group.ndim != 1:
            two = tuple(other.name for other in MODES.values() if 2 in other.dims)
            more = f", or with two for the transports {two}" if mode else ""
            raise ValueError(f"group: expected a mesh with one dimension, mesh['cp'] for example{more}, got {group!r}")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialized, call init_process_group first")
    found = group or dist.group.WORLD
    assert found is not None
    return found


def prepare(
    pattern: Pattern,
    layout: Layout,
    rank: int,
    *,
    num_heads: int,
    batch: int = 1,
    transport: Literal["auto", "exchange", "gather", "hierarchy"] = "auto",
    ranks_per_node: int | None = None,
) -> None:
    """Plan a call of `ring_attention` before it, without communication, so that any thread can.

    The call finds the plan in a cache, by the content of the pattern: documents with equal lengths are equal. It still
    compares it with the other ranks, once. All pairs and causal go around a ring by default, which has no plan.

    Args:
        pattern: Which pairs to keep. If the call has ``is_causal=True``, ``Causal() & pattern``.
        layout: Which tokens each rank holds.
        rank: The rank, counted in the layout.
        num_heads: Number of query heads.
        batch: Number of batch elements.
        transport: The call's.
        ranks_per_node: Ranks per node, for a hierarchy.

    Raises ValueError if an argument is invalid, as in `make_plan`.

    >>> from ringtile.patterns import Causal, Documents
    >>> prepare(Causal() & Documents([300, 200, 524]), Layout.contiguous(1024, 2), 0, num_heads=4)
    """
    mode = MODES.get(transport)
    if mode is None or not mode.is_planned:
        raise ValueError(f"transport: expected auto, exchange, gather or hierarchy, got {transport!r}")
    if mode.gather is None and fits_ring(pattern) and layout.n_ranks > 1:
        return
    plan = plan_of(mode, pattern, layout, rank, ranks_per_node, num_heads=num_heads, batch=batch)
    # The comparison needs it, and it takes as long as the plan.
    assert plan.fingerprint


def prefetched(batches: Iterable[T], prepare_batch: Callable[[T], object]) -> Iterator[T]:
    """Yield batches. While you use one, a thread gets the next one and calls ``prepare_batch`` with it.

    An exception of either is raised where its batch would be.

    >>> from ringtile.patterns import Causal, Documents
    >>> layout = Layout.contiguous(1024, 2)
    >>> loader = ([1000, 24], [512, 512])
    >>> for lengths in prefetched(loader, lambda x: prepare(Causal() & Documents(x), layout, 0, num_heads=4)):
    ...     print(max(lengths))
    1000
    512
    """
    remaining = iter(batches)

    def fetch() -> list[T]:
        for batch in remaining:
            prepare_batch(batch)
            return [batch]
        return []

    with ThreadPoolExecutor(1, "ringtile prefetch") as thread:
        fetched = thread.submit(fetch)
        while found := fetched.result():
            fetched = thread.submit(fetch)
            yield found[0]
