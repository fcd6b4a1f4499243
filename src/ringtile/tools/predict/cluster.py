"""Figures of a machine for predictions of `ringtile plan`, measured on processes with one thread each.

Links: messages of several sizes, from each process to the next at the same time, fitted by alpha + bytes / beta
(Hockney, 1994). Attention, copies and calls: all processes at once, because cores that share a cache slow each other.
"""

import datetime
import multiprocessing
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ringtile.functional import sparse_attention
from ringtile.index import build_index
from ringtile.patterns import Causal, Window
from ringtile.tools.machine import cores, machine_facts
from ringtile.tools.predict.hardware import Hardware, Sizes, flops_per_pair
from ringtile.tools.predict.work import MAX_RANKS
from ringtile.tools.timing import interleaved, seconds_of

_SIZES = [1 << bits for bits in range(10, 23, 2)]
"""Bytes of a message, from 1 KiB to 4 MiB."""

_SECONDS = 120


def fit_link(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit (bytes, seconds) by alpha + bytes / beta, with the least squared relative errors and alpha at least 1 ns."""
    size, seconds = torch.tensor(samples, dtype=torch.float64, device="cpu").T
    terms = torch.stack([1 / seconds, size / seconds], 1)
    alpha, per_byte = torch.linalg.lstsq(terms, torch.ones_like(seconds)[:, None]).solution.flatten().tolist()
    if per_byte <= 0:
        raise ValueError(f"samples: expected larger messages to take longer, got {list(samples)}")
    return max(alpha, 1e-9), 1 / per_byte


def _median(call: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Return the median time of a call, after one that is not counted."""
    samples = {"call": partial(seconds_of, call, 1, device)}
    return statistics.median(interleaved(samples, rounds, warm_up=True)["call"])


def measure_figures(rounds: int = 7, device: torch.device | None = None) -> dict[str, float]:
    """Measure with the default process group, on a device: fields of `Hardware`, the same in every process."""
    device = device or torch.device("cpu")
    rank, size, samples = dist.get_rank(), dist.get_world_size(), []
    for count in _SIZES:
        sent, received = torch.zeros(2, count, dtype=torch.uint8, device=device).unbind()
        to, of = ([count * (other == (rank + step) % size) for other in range(size)] for step in (1, -1))
        samples.append(_median(partial(dist.all_to_all_single, received, sent, of, to), rounds, device))
    slowest = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    alpha, beta = fit_link(list(zip(_SIZES, slowest.tolist(), strict=True)))
    rates = torch.tensor(_rates(rounds, device), dtype=torch.float64, device=device)
    dist.all_reduce(rates)
    flops, memory, call = (rates / size).tolist()
    # Processes that share a processor take turns.
    turns = max(1.0, size / processors_of(device))
    links = {"node_alpha": alpha, "node_beta": beta, "net_alpha": alpha, "net_beta": beta}
    return {**links, "flops": flops * turns, "memory": memory * turns, "call": call / turns}


def processors_of(device: torch.device) -> int:
    """Return how many processors of a kind this machine has."""
    return torch.cuda.device_count() if device.type == "cuda" else cores()


def _rates(rounds: int, device: torch.device) -> tuple[float, float, float]:
    """Return the rates of attention and copies and the time of a small call, of this process among the others."""
    pattern, sizes = Causal() & Window(1024), Sizes(2, 2, 64)
    n_tokens, dtype = 8192, torch.float32 if device.type == "cpu" else torch.bfloat16

    def train(n: int) -> None:
        q, k, v = (torch.zeros(1, 2, n, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        sparse_attention(q, k, v, pattern).sum().backward()

    source = torch.zeros(1 << 25, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for call in (partial(train, 1), partial(target.copy_, source), partial(train, n_tokens)):
        # All processes begin each together, because cores that share a cache slow each other.
        dist.barrier()
        seconds.append(_median(call, rounds, device))
    small, copied, trained = seconds
    flops = build_index(pattern, n_tokens).tile_pairs(1, 2) * sum(flops_per_pair(sizes))
    return flops / trained, 2 * source.nbytes / copied, small / 2


def measure_machine(rounds: int = 7) -> Hardware:
    """Measure this machine with up to 8 processes that exchange over gloo. All ranks of a plan then share its cores."""
    n_cores = processors_of(torch.device("cpu"))
    # A link needs two ranks. More than eight measure nothing new.
    n_ranks = max(2, min(n_cores, 8))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        # Ctrl-C ends this process, which ends the others.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pool = context.Pool(n_ranks)
        finally:
            signal.signal(signal.SIGINT, handler)
        with pool:
            ranks = [(rank, n_ranks, folder, rounds) for rank in range(n_ranks)]
            # Each rank waits for the others, so no process runs two of them.
            figures = pool.starmap_async(_measuring, ranks, chunksize=1).get(_SECONDS)[0]
    source = f"{n_ranks} processes of one thread over gloo on {machine_facts()['cpu']}"
    assumption = f"{source}; all ranks share its {n_cores} cores (measured)"
    return Hardware("this machine", assumption, MAX_RANKS, processors_per_node=n_cores, has_trees=True, **figures)


def _measuring(rank: int, size: int, folder: str, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, size, rank)
    figures = measure_figures(rounds)
    dist.destroy_process_group()
    return figures
