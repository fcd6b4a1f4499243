"""Plans that are ready before the call that needs them: for documents that differ from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from ringtile.distributed.layout import Layout
from ringtile.distributed.plan import fits_ring
from ringtile.distributed.transports import MODES, plan_of
from ringtile.patterns import Pattern

T = TypeVar("T")


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

    Raises:
        ValueError: If an argument is invalid, as in `make_plan`.

    >>> from ringtile.patterns import Causal, Documents
    >>> prepare(Causal() & Documents([300, 200, 524]), Layout.contiguous(1024, 2), 0, num_heads=4)
    """
    mode = MODES.get(transport)
    if mode is None or not mode.is_planned:
        raise ValueError(f"transport: expected auto, exchange, gather or hierarchy, got {transport!r}")
    if mode.gather is None and fits_ring(pattern) and layout.n_ranks > 1:
        return
    plan = plan_of(mode, pattern, layout, rank, num_heads, batch, ranks_per_node)
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
