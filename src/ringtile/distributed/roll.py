"""`torch.roll` over a sequence that ranks share: only the tokens that change their rank travel."""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.layout import Copies, Layout, Places, Run, check_layout, copies, joined, with_starts
from ringtile.distributed.lockstep import Lockstep, compare
from ringtile.distributed.process_groups import real_group
from ringtile.distributed.stages import Stage, copy
from ringtile.distributed.transports import group_of


class _Moves(NamedTuple):
    """A rank's tokens that stay, and the places of those that it sends to and receives from each rank."""

    kept: Copies
    sent: list[Places]
    received: list[Places]


def roll(
    x: Tensor,
    shifts: int,
    layout: Layout,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    dim: int = 1,
    fill: float | None = None,
) -> Tensor:
    """Return this rank's part of ``torch.roll`` of all tokens, differentiable in ``x``.

    ``roll(labels, -1, layout, fill=-100)`` gives each token the label of the next one, and
    ``roll(hidden, -2, layout)`` the hidden state of the one after that, for example for multi-token prediction. Only
    tokens that change their rank travel, by one all-to-all, and a rank needs memory for its own tokens and theirs.

    Args:
        x: This rank's tokens in dimension ``dim``, of any dtype, such as ``[B, n]`` or ``[B, n, E]``.
        shifts: Tokens move to positions higher by this number.
        layout: Which tokens each rank holds.
        group: The ranks, as in `ring_attention`.
        dim: Dimension of the tokens.
        fill: Value of the tokens to which none moves. Default: tokens that leave at one end come in at the other.

    Raises:
        ValueError: If an argument is invalid.
        PlanMismatch: At every rank, if ranks call with other arguments. They compare them once.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layout = Layout.contiguous(5, 1)
    >>> roll(torch.arange(5)[None], -1, layout, fill=-100)
    tensor([[   1,    2,    3,    4, -100]])
    >>> dist.destroy_process_group()
    """
    ranks = real_group(group_of(group))
    if type(shifts) is not int:
        raise ValueError(f"shifts: expected an integer, got {shifts!r}")
    check_layout(layout, ranks.size())
    n_tokens, size = layout.n_tokens, layout.size(ranks.rank())
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != size:
        raise ValueError(f"x: expected the {size} tokens of rank {ranks.rank()} in dimension {dim}, got {x.shape=}")
    others = [count for place, count in enumerate(x.shape) if place != dim % x.dim()]
    facts: dict[str, str | float] = {"shape": str(others), "shifts": shifts, "dim": dim % x.dim(), "fill": str(fill)}
    gradient = torch.is_grad_enabled() and x.requires_grad
    agreed = compare(ranks, "roll", layout, (), str(x.dtype), **facts, gradient=gradient)
    shifts = shifts % n_tokens if fill is None else max(-n_tokens, min(shifts, n_tokens))
    rolled: Tensor = _Roll.apply(x, shifts, layout, ranks, dim, fill, agreed)  # type: ignore[no-untyped-call]
    return rolled


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *call: Any) -> Tensor:
        ctx.call = shifts, layout, group, dim, fill, facts = call
        dim %= x.dim()
        steps = Lockstep(group, facts)
        steps.begin()
        moves = _moves_of(layout, group.rank(), shifts, fill is None)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if fill is not None:
            out.fill_(fill)
        # Not every backend sends bool. Tensors of a stage are [.., .., tokens, dim].
        shape = 1, prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :])
        target, source = ((y.view(torch.uint8) if y.dtype == torch.bool else y).reshape(shape) for y in (out, x))
        stage = Stage(moves.sent, moves.received, ref(group), is_idle=group.size() == 1)
        sent, received = stage.pack([source]), stage.room([source])
        works: list[Any] = []
        if not stage.is_idle:
            steps.check(f"tokens rolled by {shifts}", x.device)
            works = stage.start(received, sent, [[source]], [[source]])
        copy([target], [source], moves.kept)
        steps.wait(works, "rolled tokens")
        stage.unpack(received, [target])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shifts, layout, group, dim, fill, facts = ctx.call
        fill = None if fill is None else 0.0
        # Each token moves to at most one place.
        back = _Roll.apply(grad, -shifts, layout, group, dim, fill, facts)  # type: ignore[no-untyped-call]
        return back, *(None,) * 6


@lru_cache(maxsize=64)
def _moves_of(layout: Layout, rank: int, shifts: int, wraps: bool) -> _Moves:
    n_tokens = layout.n_tokens
    # If tokens wrap around, a shift by 3 of 10 tokens also shifts by -7: tokens 7 to 9 become 0 to 2.
    steps = {shifts % n_tokens, shifts % n_tokens - n_tokens} if wraps else {shifts}
    held = [with_starts(runs) for runs in layout.runs]

    def between(source: int, target: int) -> Copies:
        return joined([copies(_moved(held[source], step, n_tokens), held[target]) for step in sorted(steps)])

    every = range(layout.n_ranks)
    return _Moves(
        between(rank, rank),
        [between(rank, other).source if other != rank else () for other in every],
        [between(other, rank).target if other != rank else () for other in every],
    )


def _moved(held: list[tuple[Run, int]], step: int, n_tokens: int) -> list[tuple[Run, int]]:
    """Return the runs at higher positions, as far as these exist, each with its place."""
    found = []
    for (begin, end), place in held:
        low, high = max(begin + step, 0), min(end + step, n_tokens)
        if low < high:
            # Tokens that would leave at the lower end are skipped, so the run begins at a later place.
            found.append(((low, high), place + low - begin - step))
    return found
