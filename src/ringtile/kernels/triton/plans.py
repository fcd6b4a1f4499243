"""Launch plans: compiled kernels, their grids and arguments. A call like one before only fills in addresses.

Triton binds some 75 values a kernel and looks at each. That takes longer than a kernel over a few thousand tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.language import constexpr
from triton.runtime import driver

from ringtile.index import BlockIndex, schedule
from ringtile.kernels.contracts import Call, index_of
from ringtile.kernels.spans import KERNEL, span
from ringtile.kernels.triton.launches import (
    Choice,
    Job,
    Launch,
    allows_tf32,
    backward_launches,
    forward_launches,
    on_device,
)
from ringtile.kernels.triton.tiles import Constants
from ringtile.kernels.triton.tuning import INTERPRETED, wants_descriptors

_PLANS = 32
"""Largest number of plans per index, for example one per length."""
_APART = 64
"""Scratch tensors begin at multiples of this many floats, 256 bytes."""
_NEAR = 2**31 - 1
"""In storages of at most this many bytes, Triton's compiler for AMD uses 32-bit offsets."""

Make = Callable[..., list[Launch]]


class _Step(NamedTuple):
    """One kernel of a plan."""

    launch: Callable[..., None]
    """Triton's own launch of a compiled kernel, which calls the hooks of profilers."""
    arguments: list[Any]
    """Those that change from call to call are 0."""
    changing: list[tuple[int, int]]
    """The numbers of these arguments and of their addresses."""


class Plan(NamedTuple):
    """The launches of calls that differ only in the addresses of their tensors."""

    steps: list[_Step]
    scratch: list[int]
    """The first float of each scratch tensor, then the number of floats."""
    kept: tuple[Tensor, ...]
    """Tensors made of the index whose addresses are among the arguments."""

    def run(self, addresses: list[int], stream: int, device: torch.device) -> None:
        """Launch the kernels. Scratch is free once they are queued: what uses its memory next is queued behind them."""
        if self.scratch[-1]:
            base = (scratch := torch.empty(self.scratch[-1], dtype=torch.float32, device=device)).data_ptr()
            addresses = [*addresses, *[base + scratch.itemsize * first for first in self.scratch]]
        for launch, arguments, changing in self.steps:
            filled = arguments.copy()
            for number, place in changing:
                filled[number] = addresses[place]
            launch(*filled, stream=stream)


def run_forward(call: Call, *tensors: Tensor) -> None:
    """Fill output and lse. The tensors are q, k, v, out and lse."""
    _run(forward_launches, tensors, call)


def run_backward(call: Call, *tensors: Tensor | None) -> None:
    """Fill the gradients. The tensors are q, k, v, out_grad, lse_grad, out and lse, then the gradients."""
    _run(backward_launches, tensors, call)


def _run(make: Make, tensors: tuple[Any, ...], call: Call) -> None:
    with span(KERNEL), on_device(tensors[0]):
        _launch(make, tensors, call)


def _launch(make: Make, tensors: tuple[Any, ...], call: Call) -> None:
    q, k, v = tensors[:3]
    if INTERPRETED or wants_descriptors() or schedule.is_capturing(q.device):
        # Descriptors contain addresses. What a graph reads must stay alive with it, which `derived` sees to.
        for launch in make(Job(q, k, v, call), *tensors[3:]):
            launch.run()
        return
    index = index_of(call, q, k)
    plans = schedule.derived(index, _plans)
    stream = driver.active.get_current_stream(q.device.index)
    options = call.key_bits, call.key_lengths, call.seed
    given = (*tensors, *options)
    present = [x for x in given if x is not None]
    addresses = [x.data_ptr() for x in present]
    key = make, stream, call.start, call.scale, call.dropout_p, *_specialized(given, present, addresses)
    plan = plans.get(key)
    if plan is not None:
        plan.run(addresses, stream, q.device)
        return
    # A tensor can come twice, so each place gets a tensor of its own by which it is known among the arguments.
    apart: list[Any] = [None if x is None else x.detach() for x in given]
    (q, k, v, *others), (key_bits, key_lengths, seed) = apart[:-3], apart[-3:]
    job = Job(q, k, v, call._replace(key_bits=key_bits, key_lengths=key_lengths, seed=seed))
    launches = make(job, *others)
    ran = [launch.run() for launch in launches]
    made = _planned(job, launches, ran, [x for x in apart if x is not None], index)
    if made is not None:
        plans[key] = made
        if len(plans) > _PLANS:
            plans.popitem(last=False)


def _plans(index: BlockIndex) -> OrderedDict[Hashable, Plan]:
    """Return the plans of an index: none yet."""
    return OrderedDict()


def _specialized(given: Sequence[Tensor | None], present: list[Tensor], addresses: list[int]) -> tuple[Hashable, ...]:
    """Return what else arguments and compiled kernels depend on: layouts, addresses modulo 16, and switches."""
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype) for x in given]
    bits = 0
    for address in addresses:
        bits |= address
    unaligned = tuple([address % 16 for address in addresses]) if bits % 16 else ()
    far = tuple([x.untyped_storage().nbytes() > _NEAR for x in present]) if torch.version.hip else ()
    debugging = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    return present[0].device, allows_tf32(present[0]), *debugging, *layouts, unaligned, far


def _planned(
    job: Job, launches: list[Launch], ran: list[tuple[Choice, Any]], tensors: list[Tensor], index: BlockIndex
) -> Plan | None:
    """Return the plan of launches that ran, or None if an argument is none that the next call has, too."""
    places = {id(x): place for place, x in enumerate(tensors)}
    scratch = [0]
    for x in job.scratch:
        if x.numel():
            places[id(x)] = len(tensors) + len(scratch) - 1
            # 100 floats take 128, as the next tensor begins at a multiple of 64.
            scratch.append(scratch[-1] - -x.numel() // _APART * _APART)
    made = (*job.index.tensors(), job.group, *job.schedule.rows, *job.schedule.cols)
    lasting = {id(x): x for x in made if isinstance(x, Tensor)}
    steps = []
    for launch, (choice, kernel) in zip(launches, ran, strict=True):
        if not hasattr(kernel, "__getitem__"):  # a hook of Triton's compiler took it, or another Triton made it
            return None
        values = {**launch.arguments, **choice.tiles, "C": choice.constants}
        arguments, changing = [values[name] for name in launch.kernel.arg_names], []
        for number, x in enumerate(arguments):
            if id(x) in places:
                arguments[number] = 0
                changing.append((number, places[id(x)]))
            else:
                try:
                    arguments[number] = _filled(x, lasting)
                except LookupError:
                    return None
        steps.append(_Step(kernel[(choice.programs, 1, 1)], arguments, changing))
    kept = tuple(x for x in lasting.values() if x is not index.rows.full_ptr)
    return Plan(steps, scratch, kept)


def _filled(x: Any, lasting: dict[int, Tensor]) -> Any:
    """Return an argument with addresses in place of tensors. Raises LookupError if one is gone before the next call."""
    if isinstance(x, Constants):
        return x
    if isinstance(x, tuple):
        return type(x)(*[_filled(each, lasting) for each in x])
    if id(x) in lasting or (isinstance(x, Tensor) and not x.numel()):
        return x.data_ptr()
    if x is None or isinstance(x, int | float | constexpr):
        return x
    raise LookupError
