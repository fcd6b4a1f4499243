"""How tokens lie on the wire: for each rank a part, in it the tokens of each tensor after those of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.distributed.layout import Run
from ringtile.distributed.runs import Copy

Tensors = Sequence[Tensor]
"""Tensors of one dtype, ``[.., .., tokens, dim]``, that travel together."""

Places = Sequence[Run] | Tensor
"""Runs of tokens, or the number of each token, int64."""


class Picks(NamedTuple):
    """Tokens that are copied one by one."""

    source: Tensor
    target: Tensor


Copies = Sequence[Copy] | Picks


def all_to_all(
    received: Tensor,
    sent: Tensor,
    received_tokens: Sequence[int],
    sent_tokens: Sequence[int],
    width: int,
    group: dist.ProcessGroup,
) -> Any:
    """Begin to exchange vectors of tokens, and return the work to wait for."""
    received_sizes, sent_sizes = ([n * width for n in tokens] for tokens in (received_tokens, sent_tokens))
    return dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group, async_op=True)


def gathered(xs: Tensors, places: Sequence[Places], tokens: Sequence[int]) -> Tensor:
    """Return the vector on the wire that has the tokens for each rank, whose numbers are ``tokens``."""
    sent = xs[0].new_empty(sum(tokens) * width_of(xs))
    for rank, wire in of_ranks(sent, width_of(xs), tokens):
        gather(cut(wire, xs), xs, places[rank])
    return sent


def width_of(xs: Tensors) -> int:
    """Return the elements per token on the wire."""
    return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in xs)


def of_ranks(wire: Tensor, width: int, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank that has elements in a vector on the wire, and its part. Without a batch no rank has."""
    at = 0
    for rank, count in enumerate(tokens):
        if count * width:
            yield rank, wire[at : at + count * width]
            at += count * width


def cut(wire: Tensor, xs: Tensors) -> list[Tensor]:
    """Return views ``[.., .., tokens, dim]`` of a rank's part."""
    shapes = [(*x.shape[:2], len(wire) // width_of(xs), x.shape[3]) for x in xs]
    return [part.view(shape) for part, shape in zip(wire.split([prod(s) for s in shapes]), shapes, strict=True)]


def back(copies: Copies) -> Copies:
    """Return the copies from the targets to the sources."""
    if isinstance(copies, Picks):
        return Picks(copies.target, copies.source)
    return [Copy(target, source, length) for source, target, length in copies]


def copy(targets: Tensors, sources: Tensors, copies: Copies, *, add: bool = False) -> None:
    """Copy tokens to other places, or add them."""
    if isinstance(copies, Picks):
        for there, here in zip(targets, sources, strict=True):
            _put_at(there, copies.target, here.index_select(2, copies.source), add)
        return
    for source, target, length in copies:
        for there, here in zip(targets, sources, strict=True):
            _put(there[:, :, target : target + length], here[:, :, source : source + length], add)


def _put(target: Tensor, source: Tensor, add: bool) -> None:
    if add:
        target += source
    else:
        target.copy_(source)


def _put_at(target: Tensor, places: Tensor, source: Tensor, add: bool) -> None:
    # No place occurs twice, so the sums do not depend on the order of threads.
    (target.index_add_ if add else target.index_copy_)(2, places, source.to(target.dtype))


def gather(targets: Tensors, sources: Tensors, places: Places) -> None:
    """Copy tokens one after another into ``targets``."""
    if isinstance(places, Tensor):
        for target, source in zip(targets, sources, strict=True):
            torch.index_select(source, 2, places, out=target)
        return
    at = 0
    for begin, end in places:
        for target, source in zip(targets, sources, strict=True):
            target[:, :, at : at + end - begin] = source[:, :, begin:end]
        at += end - begin


def scatter(targets: Tensors, sources: Tensors, places: Places, *, add: bool = False) -> None:
    """Copy tokens that lie one after another in ``sources`` to their places in ``targets``, or add them."""
    if isinstance(places, Tensor):
        for target, source in zip(targets, sources, strict=True):
            _put_at(target, places, source, add)
        return
    at = 0
    for begin, end in places:
        for target, source in zip(targets, sources, strict=True):
            _put(target[:, :, begin:end], source[:, :, at : at + end - begin], add)
        at += end - begin


def to_octets(keep: Tensor) -> Tensor:
    """Return bool ``[B, n]`` as bytes ``[1, 1, n, ceil(B / 8)]``, eight batch elements to each."""
    octets: Tensor = torch.nn.functional.pad(keep.T, (0, -len(keep) % 8)).unflatten(1, (-1, 8))
    return (octets * _places(keep)).sum(2).to(torch.uint8)[None, None]


def from_octets(octets: Tensor, batch: int) -> Tensor:
    """Return what `to_octets` was given."""
    bits = octets[0, 0].unsqueeze(2).long() // _places(octets) % 2
    return bits.flatten(1)[:, :batch].T.bool()


def _places(x: Tensor) -> Tensor:
    return torch.pow(2, torch.arange(8, device=x.device))
