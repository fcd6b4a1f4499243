"""Dense and causal attention with the keys passed around a ring: each rank holds the keys of two ranks at a time.

Parts are merged by lse in float32 or better. The gradients of the keys travel with them and are summed on the way, in
float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringtile.distributed import lockstep
from ringtile.distributed.failures.faults import wait
from ringtile.distributed.layout import Layout, starts_of
from ringtile.distributed.lockstep import Facts
from ringtile.index.tiles import unpack_words
from ringtile.kernels.contracts import Call, accumulator, merge_into, pack_keys
from ringtile.kernels.select import select

FORWARD, BACKWARD = "keys and values, forward", "gradients of keys and values, backward"


@dataclass(frozen=True, eq=False)
class Ring:
    """One rank's place in a ring."""

    layout: Layout
    rank: int
    group: dist.ProcessGroup
    is_causal: bool
    facts: Facts

    @property
    def longest(self) -> int:
        """Number of tokens on the wire: the most that a rank holds."""
        return max(self.layout.size(rank) for rank in range(self.layout.n_ranks))

    def pass_on(self, *wires: Tensor) -> tuple[list[Tensor], list[Any]]:
        """Send tensors to the next rank, and begin to receive those of the rank before."""
        n_ranks = self.layout.n_ranks
        ahead, behind = (dist.get_global_rank(self.group, (self.rank + step) % n_ranks) for step in (1, -1))
        received = [torch.empty_like(wire) for wire in wires]
        operations = [dist.P2POp(dist.isend, wire, ahead, self.group) for wire in wires]
        operations += [dist.P2POp(dist.irecv, wire, behind, self.group) for wire in received]
        return received, dist.batch_isend_irecv(operations)

    def finish(self, works: list[Any], what: str) -> None:
        """Wait for what `pass_on` began."""
        for work in works:
            wait(work, self.group, what)

    def parts(self, owner: int) -> Iterator[tuple[slice, slice, str]]:
        """Yield the own tokens, the owner's tokens and the pattern of each pair of runs that keeps pairs."""
        for rows, (begin, end) in zip(_slices(self.layout, self.rank), self.layout.runs[self.rank], strict=True):
            for cols, (low, high) in zip(_slices(self.layout, owner), self.layout.runs[owner], strict=True):
                if not self.is_causal or high <= begin:
                    yield rows, cols, "dense"
                elif (low, high) == (begin, end):
                    yield rows, cols, "causal"


def _slices(layout: Layout, rank: int) -> list[slice]:
    """Return the places of a rank's runs in its own tokens."""
    runs = layout.runs[rank]
    return [slice(at, at + end - begin) for (begin, end), at in zip(runs, starts_of(runs), strict=True)]


def _wires(ring: Ring, k: Tensor, v: Tensor, key_mask: Tensor | None) -> list[Tensor]:
    """Return keys and values ``[B, Hkv, longest, D + Dv]``, and the bits of the key mask."""
    padding = ring.longest - k.shape[2]
    wires = [torch.nn.functional.pad(torch.cat([k, v], -1), (0, 0, 0, padding)).contiguous()]
    if key_mask is not None:
        wires.append(pack_keys(torch.nn.functional.pad(key_mask, (0, padding))))
    return wires


def _calls(
    ring: Ring, q: Tensor, wires: list[Tensor], head_dim: int, owner: int, call: Call
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Call]]:
    keys, values = wires[0].split([head_dim, wires[0].shape[3] - head_dim], 3)
    mask = unpack_words(wires[1], ring.longest) if len(wires) > 1 else None
    for rows, cols, pattern in ring.parts(owner):
        part, k, v = q[:, :, rows], keys[:, :, cols], values[:, :, cols]
        bits = None if mask is None else pack_keys(mask[:, cols].contiguous())
        mine = call._replace(pattern=pattern, key_bits=bits)
        yield rows, cols, part, k, v, mine._replace(backend=select(part, k, v, mine))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, ring: Ring, call: Call
    ) -> tuple[Tensor, Tensor]:
        lockstep.begin(ring.group)
        n_ranks, wide = ring.layout.n_ranks, accumulator(q)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        wires = _wires(ring, k, v, key_mask)
        lockstep.check(ring.group, ring.facts, FORWARD, q.device)
        for hop in range(n_ranks):
            coming, works = ring.pass_on(*wires) if hop < n_ranks - 1 else ([], [])
            for rows, _, *tensors, mine in _calls(ring, q, wires, k.shape[3], (ring.rank - hop) % n_ranks, call):
                found, found_lse = torch.ops.ringtile.forward(*tensors, *mine)
                merge_into(out[:, :, rows], lse[:, :, rows], found, found_lse)
            ring.finish(works, FORWARD)
            wires = coming
        out = out.to(q.dtype)
        ctx.ring, ctx.call = ring, call
        ctx.save_for_backward(q, k, v, key_mask, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, out, lse = ctx.saved_tensors
        ring, n_ranks, wide = ctx.ring, ctx.ring.layout.n_ranks, accumulator(q)
        lockstep.begin(ring.group)
        q_grad = torch.zeros_like(q, dtype=wide)
        wires = _wires(ring, k, v, key_mask)
        grads = torch.zeros_like(wires[0], dtype=wide)
        works: list[Any] = []
        lockstep.check(ring.group, ring.facts, BACKWARD, q.device)
        for hop in range(n_ranks):
            coming, key_works = ring.pass_on(*wires) if hop < n_ranks - 1 else ([], [])
            mine = torch.zeros_like(grads)
            owner = (ring.rank - hop) % n_ranks
            for rows, cols, *tensors, call in _calls(ring, q, wires, k.shape[3], owner, ctx.call):
                row_tensors = out_grad[:, :, rows], lse_grad[:, :, rows]
                results = out[:, :, rows], lse[:, :, rows].contiguous()
                found = torch.ops.ringtile.backward(*row_tensors, *tensors, *results, *call)
                q_grad[:, :, rows] += found[0]
                mine[:, :, cols] += torch.cat(found[1:], -1)
            ring.finish(works, BACKWARD)
            # The gradients of these keys come from the rank before, and the last hop brings them home.
            grads.add_(mine)
            if n_ranks > 1:
                (grads,), works = ring.pass_on(grads)
            ring.finish(key_works, "keys and values, backward")
            wires = coming
        ring.finish(works, BACKWARD)
        k_grad, v_grad = grads[:, :, : k.shape[2]].to(q.dtype).split([k.shape[3], v.shape[3]], 3)
        return q_grad.to(q.dtype), k_grad, v_grad, None, None, None


def ring(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, place: Ring, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of the rank's tokens."""
    out, lse = _RingAttention.apply(q, k, v, key_mask, place, call)  # type: ignore[no-untyped-call]
    return out, lse
