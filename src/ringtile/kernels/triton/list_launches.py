"""The launches of a call over lists, and the tables that lead from an entry to the queries that list it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.kernels.contracts import Lists, Rows
from ringtile.kernels.spans import KERNEL, span
from ringtile.kernels.triton import list_kernels
from ringtile.kernels.triton.launches import (
    Choice,
    Launch,
    Problem,
    launch_of,
    on_device,
    padded,
    stats_launch,
    stride_of,
)
from ringtile.kernels.triton.list_kernels import Constants
from ringtile.kernels.triton.tuning import Config, list_configs

_LEAST_BY_ENTRY = 16
"""From this many keys an entry, dK and dV are summed over the queries of an entry. Below, a product would be mostly
padding, and read each query once per key."""
_PART_BYTES = 1 << 29
"""The parts of dK and dV that wait for their sums."""
_ROWS = 64
"""Of a piece, at least: queries of an entry times heads."""
_SUMMED = Config(8, 128, 4, 1)
"""Parts and numbers that a step of a sum adds."""


def pieces_of(dim: int) -> tuple[int, int]:
    """Return the powers of two whose sum pads a head dim with the least: 512 and 64, or one and 0."""
    first = 1 << (max(dim, 1).bit_length() - 1)
    rest = padded(dim - first) if dim > first else 0
    return (first, rest) if first >= 16 and rest < first else (padded(dim), 0)


class ListJob(Problem):
    """What the launches of a call over lists share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float) -> None:
        super().__init__(q, k, v, scale)
        self.indices, block, limits = lists
        # The first entry of a longer block holds every key.
        self.block = min(block, 1 << max(self.n_keys - 1, 0).bit_length())
        self.entries = -(-self.n_keys // self.block)
        self.groups, _, self.length = self.indices.shape[1:]
        first, rest = pieces_of(self.head_dim)
        shared = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and self.value_dim == first
        self.constants = Constants(
            **self.compiled, DP=first, DR=rest, BLOCK=self.block, BM=0, BN=0, STAGES=1, SHARED=shared,
            BY_ENTRY=self.block >= _LEAST_BY_ENTRY,
        )  # fmt: skip
        self.values |= {
            "indices": self.indices,
            "limits": limits,
            "kv_heads": self.kv_heads,
            "length": self.length,
            "groups": self.groups,
            # If all batch elements have the same lists, the stride of that dimension is 0.
            "indices_b": self.groups * self.n_queries * self.length if len(self.indices) > 1 else 0,
            "limits_b": 2 * self.n_queries if len(limits) > 1 else 0,
            "entries": self.entries,
        }

    def choices(self, kernel: str, rows: int, parts: int, keys: int = 1 << 30) -> list[Choice]:
        """Return the configurations of a kernel for products of so many rows and keys, ``parts`` times."""
        found = []
        for config in list_configs(kernel, self.q.dtype, max(self.constants.DP, self.constants.EP)):
            height, width = min(config.queries, padded(rows)), min(config.keys, padded(keys))
            constants = self.constants._replace(BM=height, BN=width, STAGES=config.stages)
            tiles = -(-keys // width) if kernel == "dkdv" else -(-rows // height)
            found.append(Choice(config, constants, parts * tiles))
        return found

    def of_queries(self, kernel: str, function: Any, **more: Any) -> Launch:
        """Return the launch of a kernel that has the heads of a query as rows."""
        queries = self.batch * self.kv_heads * self.n_queries
        return launch_of(function, {**self.values, **more}, self.choices(kernel, self.ratio, queries))


def forward_launches(job: ListJob, out: Tensor, lse: Tensor) -> Iterator[Launch]:
    """Yield the launch that fills output and lse."""
    strides = job.strides._replace(o=stride_of(out))
    yield job.of_queries("forward", list_kernels.forward_kernel, OUT=out, LSE=lse, strides=strides)


def backward_launches(job: ListJob, rows: Rows, q_grad: Tensor, total: Tensor) -> Iterator[Launch]:
    """Yield the launches that fill the gradient of q and add those of k and v, side by side, to ``total``."""
    shared = {
        "OUT_GRAD": rows.out_grad,
        "STATS": torch.empty((2, *rows.lse.shape), dtype=torch.float32, device=total.device),
        "size": rows.lse.numel(),
        "strides": job.strides._replace(g=stride_of(rows.out_grad)),
    }
    yield stats_launch({**job.values, **shared, "dropout_scale": 1.0}, rows.lse_grad, rows.out, rows.lse)
    yield job.of_queries("dq", list_kernels.dq_kernel, **shared, Q_GRAD=q_grad)
    width, owners, places = total.shape[3], job.batch * job.kv_heads, job.length * job.block
    step = job.n_queries
    if not job.constants.BY_ENTRY:
        step = min(step, max(1, _PART_BYTES // (4 * width * owners * places)))
    for first in range(0, job.n_queries, step):
        last = min(first + step, job.n_queries)
        order, bounds = by_entry(job.indices[:, :, first:last], job.entries)
        items = order.shape[1]
        if job.constants.BY_ENTRY:
            # As long as the mean, so that there are at most twice as many pieces as entries.
            chunk = max(-(-items // job.entries), -(-_ROWS // job.ratio))
            pieces = job.entries + items // chunk
            starts, owner = split(bounds, chunk, pieces)
            choices = job.choices("dkdv", chunk * job.ratio, owners * pieces, job.block)
            slots = pieces * job.block
        else:
            chunk, pieces, starts, owner, slots = 0, 0, bounds, bounds, (last - first) * places
            choices = job.choices("dkdv", job.ratio, owners * (last - first), places)
        parts = torch.empty(owners * slots * width, dtype=torch.float32, device=total.device)
        values = {
            **job.values, **shared, "order": order, "bounds": bounds, "starts": starts, "owner": owner, "items": items,
            "first_query": first, "queries": last - first, "pieces": pieces, "chunk": chunk, "slots": slots,
            "PARTS": parts, "TOTAL": total,
        }  # fmt: skip
        yield launch_of(list_kernels.dkdv_kernel, values, choices)
        programs = owners * job.n_keys * -(-width // _SUMMED.keys)
        choice = Choice(_SUMMED, job.constants._replace(BM=_SUMMED.queries, BN=_SUMMED.keys), programs)
        yield launch_of(list_kernels.sum_kernel, {**values, "bounds": starts}, [choice])


def by_entry(indices: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Return the flat numbers of lists' items, by entry and then in order, and where those of each entry begin."""
    flat = indices.flatten(2).flatten(0, 1)
    found = flat.masked_fill((flat < 0) | (flat >= entries), entries).sort(dim=1, stable=True)
    numbers = torch.arange(entries + 1, dtype=flat.dtype, device=flat.device).expand(len(flat), -1).contiguous()
    return found.indices, torch.searchsorted(found.values, numbers)


def split(bounds: Tensor, chunk: int, pieces: int) -> tuple[Tensor, Tensor]:
    """Return the first piece of each entry, of at most ``chunk`` items, and the entry of each piece, or their number.

    Entries of 5, 0 and 2 items in pieces of 2 begin at pieces 0, 3, 3 and 4, and pieces belong to 0, 0, 0, 2, 3, 3, ...
    """
    ends = ((bounds.diff(dim=1) + chunk - 1) // chunk).cumsum(1)
    numbers = torch.arange(pieces, device=bounds.device).expand(len(bounds), -1).contiguous()
    return pad(ends, (1, 0)), torch.searchsorted(ends, numbers, right=True)


def run(launches: Iterator[Launch], q: Tensor) -> None:
    """Run launches one by one, so that scratch is free for the next."""
    with span(KERNEL), on_device(q):
        for launch in launches:
            launch.run()
