"""Bytes, work and time of ranks that exchange heads in the rows of a mesh, and keys between its rows."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from ringtile.distributed.heads import HeadPlan
from ringtile.tools.predict.cost import Cost, all_to_all_time, estimate, nodes_of, shared_time
from ringtile.tools.predict.hardware import Hardware, Sizes
from ringtile.tools.predict.work import Tiles, Work, survey


def ranks_per_row(n_ranks: int, heads: int, hardware: Hardware) -> int | None:
    """Return the longest row, with fast links, whose ranks can share the heads. None if one node has all ranks."""
    longest = gcd(n_ranks, heads, hardware.ranks_per_node)
    return longest if longest > 1 and n_ranks > hardware.ranks_per_node else None


def estimate_mesh(work: Work, per_row: int, hardware: Hardware) -> Cost:
    """Return the cost of the transport "ulysses" on a mesh whose rows have ``per_row`` ranks and lie inside a node.

    Raises ValueError if these ranks cannot share the heads, or ranks cannot build their indices.

    >>> from ringtile.tools.predict.hardware import HARDWARE
    >>> from ringtile.distributed.layout import Layout
    >>> from ringtile.patterns import Causal, Window
    >>> work = survey(Causal() & Window(4096), Layout.contiguous(1 << 20, 64), Sizes())
    >>> estimate_mesh(work, 8, HARDWARE["h100"]).mesh
    (8, 8)
    """
    layout, sizes = work.layout, work.sizes
    value_dim, n_rows = sizes.value_dim, layout.n_ranks // per_row
    assert value_dim is not None
    plan = HeadPlan(work.pattern, layout, 0, per_row, sizes.batch, sizes.heads, sizes.kv_heads)
    heads, key_heads = (torch.tensor([end - begin for begin, end in plan.heads[kind]]) for kind in "qk")
    into = (heads * sizes.head_dim + key_heads * (sizes.head_dim + value_dim)) * sizes.batch * sizes.dtype.itemsize
    home = heads * value_dim * sizes.batch * sizes.dtype.itemsize
    tokens = torch.tensor([layout.size(rank) for rank in range(layout.n_ranks)]).view(n_rows, per_row)
    # From rank to rank of each row.
    inputs, outputs = tokens.unsqueeze(2) * into, tokens.unsqueeze(1) * home.unsqueeze(1)
    for x in (inputs, outputs):
        x.diagonal(dim1=1, dim2=2).zero_()
    wires, back = (x.sum(2) + x.sum(1) for x in (inputs, outputs))
    gathered = tokens.sum(1, keepdim=True) * into
    moved = wires + gathered + back + tokens * home.sum()
    there, here = _of_rows(inputs), _of_rows(outputs)
    traffic = there + here
    node = nodes_of(layout.n_ranks, hardware)
    is_inside = node.unsqueeze(1) == node
    columns = _columns(work, plan, hardware)

    def each(name: str) -> Tensor:
        """Return a figure of the exchange between rows, for each rank."""
        return torch.stack([getattr(cost, name) for cost in columns], 1).flatten()

    for number, cost in enumerate(columns):
        traffic[number::per_row, number::per_row] += cost.traffic
    of_heads = there + here
    sent, received = of_heads.sum(1), of_heads.sum(0)
    around = shared_time(2 * moved.flatten() / hardware.memory + hardware.call, hardware)
    around += all_to_all_time(there, hardware) + all_to_all_time(here, hardware)
    return Cost(
        "ulysses",
        sent + each("sent"),
        received + each("received"),
        received + each("sent_backward"),
        sent + each("received_backward"),
        (of_heads * is_inside).sum(1) + each("inside"),
        (of_heads * ~is_inside).sum(1) + each("between"),
        (there > 0).sum(1) + (here > 0).sum(1) + each("messages"),
        ((of_heads > 0) | (of_heads.T > 0)).sum(1) + each("peers"),
        each("tiles"),
        each("flops"),
        gathered.flatten() + torch.maximum(wires.flatten(), each("buffer")),
        around + each("forward"),
        around + each("backward"),
        traffic,
        each("copied"),
        (n_rows, per_row),
    )


def _of_rows(x: Tensor) -> Tensor:
    """Return bytes ``[R, G, G]`` inside rows as ``[P, P]``, from rank to rank."""
    n_rows, per_row, _ = x.shape
    found = x.new_zeros(n_rows, per_row, n_rows, per_row)
    found.diagonal(dim1=0, dim2=2).copy_(x.permute(1, 2, 0))
    return found.view(n_rows * per_row, n_rows * per_row)


def _columns(work: Work, plan: HeadPlan, hardware: Hardware) -> list[Cost]:
    """Return the cost of the exchange between rows, for the ranks with each number in their row."""
    sizes, found = work.sizes, dict[tuple[object, ...], Cost]()
    # The ranks with one number share a node with fewer of each other.
    beside = {
        name: max(1, getattr(hardware, name) // plan.n_ranks) for name in ("ranks_per_node", "processors_per_node")
    }
    costs = []
    for number in range(plan.n_ranks):
        mine = replace(plan, rank=number)
        begin, end = mine.heads["k"][number]
        kv_heads = end - begin if mine.key_at is None else len(mine.key_at)
        rule, heads = mine.rule, sizes.heads // plan.n_ranks
        if (rule, kv_heads) not in found:
            own = Sizes(heads, kv_heads, sizes.head_dim, sizes.value_dim, sizes.batch, sizes.dtype)
            listed = work.listed.parts.get((rule, own))
            if listed is None:
                of = work.listed, mine.heads["q"][number][0]
                listed = Tiles(rule, plan.layout.n_tokens, own, block=work.grid.block, of=of)
                work.listed.parts[rule, own] = listed
            surveyed = survey(rule, plan.rows, own, listed=listed)
            found[rule, kv_heads] = estimate(surveyed, "exchange", replace(hardware, **beside))
        costs.append(found[rule, kv_heads])
    return costs
