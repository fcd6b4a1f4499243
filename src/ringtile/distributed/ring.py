"""Dense and causal attention with the keys passed around a ring: each rank holds the keys of two ranks at a time.

Parts are merged by lse in float32 or better. The gradients of the keys travel with them and are summed on the way, in
float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.distributed import lockstep
from ringtile.distributed.failures.faults import wait
from ringtile.distributed.layout import Layout, starts_of
from ringtile.distributed.lockstep import Facts
from ringtile.functional.parts import Compute, Part, Parts, Slice, attend_parts
from ringtile.index.tiles import unpack_words
from ringtile.kernels.contracts import Call, accumulator, pack_keys
from ringtile.patterns import Causal, Dense

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

    def parts(self, owner: int, call: Call) -> Iterator[Part]:
        """Yield a part for each pair of own and owner's runs that keeps pairs of tokens.

        With zigzag runs, rank 0 of 2 holds chunks 0 and 3, and rank 1 holds 1 and 2. Under a causal rule rank 0 then
        yields (3, 1) and (3, 2) for owner 1, both dense.
        """
        for rows, (begin, end) in zip(_slices(self.layout, self.rank), self.layout.runs[self.rank], strict=True):
            for cols, (low, high) in zip(_slices(self.layout, owner), self.layout.runs[owner], strict=True):
                # Runs of a layout are equal or have no token in common.
                if not self.is_causal or high <= begin:
                    yield Part(rows, cols, Dense(), call, merges=True)
                elif (low, high) == (begin, end):
                    yield Part(rows, cols, Causal(), call, merges=True)


def _slices(layout: Layout, rank: int) -> list[Slice]:
    """Return the places of a rank's runs in its own tokens."""
    runs = layout.runs[rank]
    return [Slice(at, at + end - begin) for (begin, end), at in zip(runs, starts_of(runs), strict=True)]


@dataclass(frozen=True, eq=False)
class _PassedKeys(Parts):
    """A source per rank: its keys and values, which come one hop after the other."""

    ring: Ring
    # Gradients travel by themselves, and autograd does not see how.
    composes = False

    def _wires(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return keys and values ``[B, Hkv, longest, D + Dv]``, and the bits of the key mask."""
        padding = self.ring.longest - k.shape[2]
        # Ranks can hold different numbers of tokens, but all pass on the same tensors.
        wires = [torch.nn.functional.pad(torch.cat([k, v], -1), (0, 0, 0, padding)).contiguous()]
        if self.own_mask is not None:
            wires.append(pack_keys(torch.nn.functional.pad(self.own_mask, (0, padding))))
        return wires

    def _arrived(self, hop: int, wires: list[Tensor], k: Tensor) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """Return the rank whose keys are here after some hops, its keys and values and its key mask."""
        keys, values = wires[0].split([k.shape[3], wires[0].shape[3] - k.shape[3]], 3)
        mask = unpack_words(wires[1], self.ring.longest) if len(wires) > 1 else None
        return (self.ring.rank - hop) % self.ring.layout.n_ranks, keys, values, mask

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute with the keys that are here while the next ones travel."""
        ring, n_ranks = self.ring, self.ring.layout.n_ranks
        lockstep.begin(ring.group)
        wires = self._wires(k, v)
        lockstep.check(ring.group, ring.facts, FORWARD, k.device)
        for hop in range(n_ranks):
            coming, works = ring.pass_on(*wires) if hop < n_ranks - 1 else ([], [])
            compute(*self._arrived(hop, wires, k))
            ring.finish(works, FORWARD)
            wires = coming
        return ()

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Let the keys pass once more, and their gradients one hop behind them."""
        ring, n_ranks = self.ring, self.ring.layout.n_ranks
        lockstep.begin(ring.group)
        wires = self._wires(k, v)
        grads = torch.zeros_like(wires[0], dtype=accumulator(k))
        works: list[Any] = []
        lockstep.check(ring.group, ring.facts, BACKWARD, k.device)
        for hop in range(n_ranks):
            coming, key_works = ring.pass_on(*wires) if hop < n_ranks - 1 else ([], [])
            mine = torch.cat(compute(*self._arrived(hop, wires, k)), -1)
            ring.finish(works, BACKWARD)
            # The gradients of these keys come from the rank before, and the last hop brings them home.
            grads.add_(mine)
            if n_ranks > 1:
                (grads,), works = ring.pass_on(grads)
            ring.finish(key_works, "keys and values, backward")
            wires = coming
        ring.finish(works, BACKWARD)
        k_grad, v_grad = grads[:, :, : k.shape[2]].split([k.shape[3], v.shape[3]], 3)
        return k_grad, v_grad


def ring(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, place: Ring, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of the rank's tokens."""
    keys = _PassedKeys(lambda owner: place.parts(owner, call), key_mask, place)
    return attend_parts(q, k, v, keys, call.backend)
