"""Dense and causal attention with the keys passed around a ring: each rank holds the keys of two ranks at a time.

Parts are merged by lse in float32 or better. The gradients of the keys travel with them and are summed on the way, in
float32 or better.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ringtile.distributed.layout import Layout, counts_of, with_starts
from ringtile.distributed.lockstep import BACKWARD, FORWARD, Lockstep
from ringtile.functional.parts import Compute, Part, Parts, Slice
from ringtile.index.tiles import unpack_words
from ringtile.kernels.contracts import Call, accumulator, pack_keys
from ringtile.patterns import Causal, Dense


def ring_parts(layout: Layout, rank: int, is_causal: bool, call: Call, owner: int) -> Iterator[Part]:
    """Yield a part for each pair of own and owner's runs that keeps pairs of tokens.

    With zigzag runs, rank 0 of 2 holds chunks 0 and 3, and rank 1 holds 1 and 2. Under a causal rule rank 0 then
    yields (3, 1) and (3, 2) for owner 1, both dense.
    """
    for (begin, end), at in with_starts(layout.runs[rank]):
        for (low, high), place in with_starts(layout.runs[owner]):
            rows, cols = Slice(at, at + end - begin), Slice(place, place + high - low)
            # Runs of a layout are equal or have no token in common.
            if not is_causal or high <= begin:
                yield Part(rows, cols, Dense(), call, merges=True)
            elif (low, high) == (begin, end):
                yield Part(rows, cols, Causal(), call, merges=True)


@dataclass(frozen=True, eq=False)
class PassedKeys(Parts):
    """A source per rank: its keys and values, which come one hop after the other."""

    layout: Layout
    rank: int
    steps: Lockstep
    # Gradients travel by themselves, and autograd does not see how.
    composes = False

    def _pass_on(self, *wires: Tensor) -> tuple[list[Tensor], list[Any]]:
        """Send tensors to the next rank, and begin to receive those of the rank before."""
        group, n_ranks = self.steps.group, self.layout.n_ranks
        ahead, behind = (dist.get_global_rank(group, (self.rank + step) % n_ranks) for step in (1, -1))
        received = [torch.empty_like(wire) for wire in wires]
        operations = [dist.P2POp(dist.isend, wire, ahead, group) for wire in wires]
        operations += [dist.P2POp(dist.irecv, wire, behind, group) for wire in received]
        return received, dist.batch_isend_irecv(operations)

    def _begin(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return keys and values ``[B, Hkv, longest, D + Dv]``, and the bits of the key mask."""
        self.steps.begin()
        # Ranks can hold different numbers of tokens, but all pass on the same tensors.
        padding = max(counts_of(self.layout.runs)) - k.shape[2]
        wires = [pad(torch.cat([k, v], -1), (0, 0, 0, padding)).contiguous()]
        if self.own_mask is not None:
            wires.append(pack_keys(pad(self.own_mask, (0, padding))))
        return wires

    def _arrived(self, hop: int, wires: list[Tensor], k: Tensor) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """Return the rank whose keys are here after some hops, its keys and values and its key mask."""
        keys, values = wires[0].split([k.shape[3], wires[0].shape[3] - k.shape[3]], 3)
        mask = unpack_words(wires[1], keys.shape[2]) if len(wires) > 1 else None
        return (self.rank - hop) % self.layout.n_ranks, keys, values, mask

    def forward(self, k: Tensor, v: Tensor, compute: Compute) -> Sequence[Tensor]:
        """Compute with the keys that are here while the next ones travel."""
        steps, n_ranks = self.steps, self.layout.n_ranks
        wires = self._begin(k, v)
        steps.check(FORWARD, k.device)
        for hop in range(n_ranks):
            coming, works = self._pass_on(*wires) if hop < n_ranks - 1 else ([], [])
            compute(*self._arrived(hop, wires, k))
            steps.wait(works, FORWARD)
            wires = coming
        return ()

    def backward(self, k: Tensor, v: Tensor, saved: Sequence[Tensor], compute: Compute) -> Iterable[Tensor]:
        """Let the keys pass once more, and their gradients one hop behind them."""
        steps, n_ranks = self.steps, self.layout.n_ranks
        wires = self._begin(k, v)
        grads = torch.zeros_like(wires[0], dtype=accumulator(k))
        works: list[Any] = []
        steps.check(BACKWARD, k.device)
        for hop in range(n_ranks):
            coming, key_works = self._pass_on(*wires) if hop < n_ranks - 1 else ([], [])
            mine = torch.cat(compute(*self._arrived(hop, wires, k)), -1)
            steps.wait(works, BACKWARD)
            # The gradients of these keys come from the rank before, and the last hop brings them home.
            grads.add_(mine)
            if n_ranks > 1:
                (grads,), works = self._pass_on(grads)
            steps.wait(key_works, "keys and values, backward")
            wires = coming
        steps.wait(works, BACKWARD)
        k_grad, v_grad = grads[:, :, : k.shape[2]].split([k.shape[3], v.shape[3]], 3)
        return k_grad, v_grad
