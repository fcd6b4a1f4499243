"""Peak memory of one forward and backward pass, beyond inputs, outputs and gradients."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_BACKWARD = "ringtile::backward"


class Peaks(NamedTuple):
    """Peak bytes beyond inputs, outputs and gradients. Tensors saved for the backward pass count."""

    forward: int
    backward: int | None
    """None if there was no backward pass."""


def peak_memory(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], Sequence[Tensor]] | None, device: torch.device
) -> Peaks:
    """Measure one call of ``forward`` and, on its output, of ``backward``, which returns the gradients.

    All memory from torch's allocator counts, inside operators, too: on a CPU from a trace of the profiler, on a CUDA
    device from the allocator's own peaks. Memory that a library allocates itself does not. Create the inputs before.
    """
    if device.type == "cuda":
        return _peaks_cuda(forward, backward, device)
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = forward()
        with record_function(_BACKWARD):
            grads = () if backward is None else tuple(backward(out))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    peaks = _peaks_of_trace(events, (out, *grads))
    return peaks if backward is not None else Peaks(peaks.forward, None)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Silence the start message of the profiler's library, and a warning of torch 2.11."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]
        if before is not None:
            os.environ["KINETO_LOG_LEVEL"] = before


def _peaks_of_trace(events: list[dict[str, Any]], results: Sequence[Tensor]) -> Peaks:
    # The profiler writes one event per allocation and free, in order of time, with the address and the size.
    boundary = next(event["ts"] for event in events if event.get("name") == _BACKWARD)
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    result_bytes: dict[int, int] = {}
    for result in results:
        address = result.untyped_storage().data_ptr()
        # Results can share a storage, which is allocated once.
        result_bytes[address] = result_bytes.get(address, 0) + result.nbytes
    # An address is used again after a free. The last event at a result's address is its allocation.
    last_event = {event["args"]["Addr"]: number for number, event in enumerate(memory)}
    live: dict[int, int] = {}
    level, peaks = 0, []
    split = sum(event["ts"] < boundary for event in memory)
    for phase in (range(split), range(split, len(memory))):
        # Memory that the forward pass keeps is there when the backward pass begins.
        peak = level
        for number in phase:
            address, size = memory[number]["args"]["Addr"], memory[number]["args"]["Bytes"]
            # Memory from before the trace can be freed in it.
            if size < 0:
                level -= live.pop(address, 0)
                continue
            if address in result_bytes and last_event[address] == number:
                size = max(0, size - result_bytes[address])
            live[address] = size
            level += size
            peak = max(peak, level)
        peaks.append(peak)
    return Peaks(*peaks)


def _peaks_cuda(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], Sequence[Tensor]] | None, device: torch.device
) -> Peaks:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = forward()
    torch.cuda.synchronize(device)
    # The output is a result, and so it counts as memory that was there before.
    before += out.nbytes
    forward_peak = torch.cuda.max_memory_allocated(device) - before
    if backward is None:
        return Peaks(max(0, forward_peak), None)
    torch.cuda.reset_peak_memory_stats(device)
    grads = backward(out)
    torch.cuda.synchronize(device)
    before += sum(grad.nbytes for grad in grads)
    return Peaks(max(0, forward_peak), max(0, torch.cuda.max_memory_allocated(device) - before))
