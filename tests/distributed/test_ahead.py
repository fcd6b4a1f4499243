"""Plans that are made on another thread, before the call that needs them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from ringtile.distributed import Layout, make_plan, plan as plan_module, prefetched, prepare, ring_attention
from ringtile.functional import sparse_attention
from ringtile.patterns import Causal, Documents, Pattern


def documents(numbers: list[int]) -> Pattern:
    """A pattern without a text, as a loader makes it from the numbers of the documents."""
    return Causal() & Documents(ids=torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(numbers)))


@pytest.mark.parametrize("transport", ["auto", "hierarchy"])
def test_batches_are_planned_while_the_one_before_runs(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [[700, 324], [100, 800, 124], [1000, 24], [700, 324]]
    layout = Layout.contiguous(1024, 4)
    made: list[tuple[int, threading.Thread]] = []

    def counted(make: Callable[..., Any], place: int) -> Callable[..., Any]:
        def counting(*arguments: Any, **sizes: int) -> Any:
            made.append((arguments[place], threading.current_thread()))
            return make(*arguments, **sizes)

        return counting

    make = plan_module._make_plan.__wrapped__
    monkeypatch.setattr(plan_module, "_make_plan", lru_cache(64)(counted(make, 4)))
    q, k, v = torch.randn(3, 1, 2, 1024, 8, dtype=torch.float64).unbind()

    def run(rank: int) -> threading.Thread:
        mesh = init_device_mesh("cpu", (2, 2)) if transport == "hierarchy" else None
        how: dict[str, Any] = {"transport": transport, "ranks_per_node": 2 if mesh else None}
        batches = prefetched(lengths, lambda batch: prepare(documents(batch), layout, rank, num_heads=2, **how))
        for batch in batches:
            mine = (layout.shard(x, rank) for x in (q, k, v))
            out = ring_attention(*mine, documents(batch), layout=layout, group=mesh, transport=transport)
            assert torch.equal(out, layout.shard(sparse_attention(q, k, v, documents(batch)), rank))
        return threading.current_thread()

    threads = on_ranks(4, run)
    # The fourth batch has the documents of the first, so it has the same plan.
    assert Counter(rank for rank, _ in made) == dict.fromkeys(range(4), 3)
    assert not {thread for _, thread in made} & set(threads)


def test_a_failure_comes_where_its_batch_would_be() -> None:
    def loader() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    batches = prefetched(loader(), lambda batch: None)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)

    def bad(batch: int) -> None:
        if batch == 2:
            raise ValueError("batch 2")

    batches = prefetched([1, 2, 3], bad)
    assert next(batches) == 1
    with pytest.raises(ValueError, match="batch 2"):
        next(batches)


def test_wrong_calls_are_named() -> None:
    layout = Layout.contiguous(256, 2)
    for change, words in (
        ({"transport": "ring"}, "transport: expected auto, exchange, gather or hierarchy, got 'ring'"),
        ({"transport": "hierarchy"}, "ranks_per_node: expected the number of ranks per node"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(Documents([256]), layout, 0, num_heads=1, **change)  # type: ignore[arg-type]
    plan = make_plan(Causal() & Documents([256]), layout, 0, num_heads=2, gather=None)
    prepare(Causal() & Documents([256]), layout, 0, num_heads=2)
    assert make_plan(Causal() & Documents([256]), layout, 0, num_heads=2, gather=None) is plan
