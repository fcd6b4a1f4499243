"""Compare predicted and measured times of ring attention between processes, and measure what ranks cost.

    python benchmarks/ranks.py                              all sections, about ten minutes
    python benchmarks/ranks.py --sections predict           some sections
    python benchmarks/ranks.py --rate 0                     links that are not shaped

It runs from a source tree without an install, on Linux. The sections:

* ``predict``: processes of one thread over gloo. Each has a network namespace of its own, and a token bucket (tbf)
  limits its link to --rate in each direction. No delay is added. If namespaces are not allowed, it says so and uses the
  loopback device unchanged. It measures the figures of `ringtile plan --measure` over these links, then predicts cases
  that the fit has not seen: other patterns, layouts, lengths and transports. It prints the error of each, the median
  error, and how many pairs of transports it orders right.
* ``ratios``: CPU seconds and time of 4 processes of one thread against one process, 65,536 tokens, window 1,024.
* ``memory``: peak memory of a rank of 4 against one process, 262,144 tokens, window 4,096.
* ``nccl``: the cases of ``predict`` over NCCL, if there are several GPUs.

Each case is first compared with one process in float64. Times are medians of interleaved rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ringtile import sparse_attention  # noqa: E402
from ringtile.distributed import Layout, ring_attention  # noqa: E402
from ringtile.distributed.layout import LAYOUTS  # noqa: E402
from ringtile.patterns import Causal, Documents, Pattern, Window, parse  # noqa: E402
from ringtile.tools.machine import cores  # noqa: E402
from ringtile.tools.predict import Hardware, Sizes  # noqa: E402
from ringtile.tools.predict.cluster import measure_figures, processors_of  # noqa: E402
from ringtile.tools.predict.cost import estimate  # noqa: E402
from ringtile.tools.predict.work import MAX_RANKS, survey  # noqa: E402
from ringtile.tools.timing import interleaved, seconds_of  # noqa: E402

SECTIONS = ("predict", "ratios", "memory", "nccl")
HEADS, HEAD_DIM = 2, 64
_CLEAR = 1.2
"""Smaller ratios of predicted times are no prediction of the order."""

GATE = 1500
"""Tokens of the comparison with float64."""


class Case(NamedTuple):
    """A problem and the transports to compare on it."""

    name: str
    pattern: Callable[[int], Pattern]
    layout: str
    n_tokens: int
    transports: tuple[str, ...]


def _rule(text: str) -> Callable[[int], Pattern]:
    return lambda n: parse(text)


def _documents(n: int) -> Pattern:
    return Causal() & Documents([n // 3, n // 8, n - n // 3 - n // 8])


CASES = (
    Case("window 400", _rule("causal & window(400)"), "contiguous", 4096, ("exchange", "gather")),
    Case("window 400", _rule("causal & window(400)"), "zigzag", 4096, ("exchange", "gather")),
    Case("window 1500", _rule("causal & window(1500)"), "contiguous", 6144, ("exchange", "gather")),
    Case(
        "window and globals",
        _rule("causal & (window(400) | global_tokens(128))"),
        "zigzag",
        8192,
        ("exchange", "gather"),
    ),
    Case("documents", _documents, "contiguous", 5120, ("exchange", "gather")),
    Case("random blocks", _rule("causal & random_blocks(2)"), "contiguous", 4096, ("exchange", "gather")),
    Case("strided", _rule("causal & block_dilated([4], 20)"), "striped", 4096, ("exchange", "gather")),
    Case("causal", _rule("causal"), "contiguous", 4096, ("exchange", "gather", "ring")),
    Case("causal", _rule("causal"), "zigzag", 4096, ("exchange", "gather", "ring")),
    Case("dense", _rule("dense"), "contiguous", 3072, ("exchange", "gather", "ring")),
)


def _train(attend: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output and the three gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, tensors[3])]


def _gate(case: Case, device: torch.device) -> float:
    """Return the largest relative error of a small problem against one process in float64."""
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, GATE, 16, dtype=torch.float64).to(device) for _ in range(4)]
    layout, pattern, worst = LAYOUTS[case.layout](GATE, dist.get_world_size()), case.pattern(GATE), 0.0
    expected = _train(lambda q, k, v: sparse_attention(q, k, v, pattern), whole)
    parts = [layout.shard(x, dist.get_rank()).clone() for x in whole]
    for transport in case.transports:
        found = _train(_attend(pattern, layout, transport), parts)
        for x, y in zip(found, expected, strict=True):
            mine = layout.shard(y.detach(), dist.get_rank())
            worst = max(worst, float((x.detach() - mine).norm() / mine.norm().clamp(min=1e-300)))
    worst_of_all = torch.tensor([worst], dtype=torch.float64, device=device)
    dist.all_reduce(worst_of_all, dist.ReduceOp.MAX)
    return float(worst_of_all)


def _attend(pattern: Pattern, layout: Layout, transport: str) -> Callable[..., Any]:
    return lambda q, k, v: ring_attention(q, k, v, pattern, layout=layout, transport=transport)  # type: ignore[arg-type]


def _sample(case: Case, transport: str, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass on this rank, after all ranks have come here."""
    rank = dist.get_rank()
    layout, pattern = LAYOUTS[case.layout](case.n_tokens, dist.get_world_size()), case.pattern(case.n_tokens)
    shape = 1, HEADS, layout.size(rank), HEAD_DIM
    leaves = [torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    attend, grad = _attend(pattern, layout, transport), torch.zeros(shape, dtype=dtype, device=device)
    outs: list[torch.Tensor] = []
    dist.barrier()
    forward = seconds_of(lambda: outs.append(attend(*leaves)), 1, device)
    return forward, seconds_of(lambda: torch.autograd.grad(outs[0], leaves, grad), 1, device)


def predicting(options: dict[str, Any]) -> dict[str, Any]:
    """Fit, gate and time, on every rank. Rank 0's result counts."""
    device = torch.device(options["device"])
    figures = measure_figures(device=device)
    gate = max(_gate(case, device) for case in CASES)
    runs = [(number, transport) for number, case in enumerate(CASES) for transport in case.transports]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    samples = {place: partial(_sample, CASES[number], way, dtype, device) for place, (number, way) in enumerate(runs)}
    # The first round plans, agrees and connects. All ranks take the same turns.
    found = interleaved(samples, options["rounds"], warm_up=True)
    of_all = torch.tensor(list(zip(*found.values(), strict=True)), dtype=torch.float64, device=device)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    facts = {"figures": figures, "processors": processors_of(device)}
    return {**facts, "gate": gate, "runs": runs, "seconds": of_all.tolist()}


def _peak() -> float:
    """Return the largest resident size since the last reset, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def counting(options: dict[str, Any]) -> dict[str, Any]:
    """Measure CPU seconds, time and peak memory of forward and backward passes, on each rank or in one process."""
    n_tokens, pattern = options["tokens"], Causal() & Window(options["window"])
    is_ring = options["size"] > 1
    layout = Layout.contiguous(n_tokens, options["size"])
    attend = _attend(pattern, layout, "auto") if is_ring else lambda q, k, v: sparse_attention(q, k, v, pattern)

    def once() -> tuple[float, float, float]:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak()
        tensors = [torch.randn(1, HEADS, layout.size(options["rank"]), HEAD_DIM) for _ in range(4)]
        if is_ring:
            dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        _train(attend, tensors)
        return time.process_time() - cpu, time.perf_counter() - wall, _peak() - before

    found = [once() for _ in range(options["rounds"] + 1)]
    return {"rounds": found[1:]}


def work(options: dict[str, Any]) -> None:
    """Run a task in this process, which is one rank."""
    rank, size, folder = options["rank"], options["size"], options["folder"]
    torch.set_num_threads(options["threads"])
    if options["rate"]:
        _enter_network(rank, options["rate"])
        os.environ["GLOO_SOCKET_IFNAME"] = f"rank{rank}"
    if options["device"] == "cuda":
        options["device"] = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    if size > 1:
        kind = "nccl" if options["device"].startswith("cuda") else "gloo"
        dist.init_process_group(kind, f"file://{folder}/store", timedelta(seconds=120), size, rank)
    found = {"predicting": predicting, "counting": counting}[options["task"]](options)
    Path(folder, f"result{rank}").write_text(json.dumps(found))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


def _shape(device: str, rate: int) -> None:
    _call(
        "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "400ms"
    )


def _enter_network(rank: int, rate: int) -> None:
    """Wait for this process's end of its link, and limit what it sends."""
    device, deadline = f"rank{rank}", time.monotonic() + 60
    while subprocess.run(["ip", "link", "show", device], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no device {device}")
        time.sleep(0.05)
    _call("ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", device)
    for name in ("lo", device):
        _call("ip", "link", "set", name, "up")
    _shape(device, rate)


def reason_against_shaping() -> str:
    """Return why links cannot be shaped, or an empty text."""
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    script = (
        "ip link add name a type bridge && ip link add name b type veth peer name c && "
        "tc qdisc add dev b root tbf rate 1mbit burst 64kb latency 400ms"
    )
    done = subprocess.run([*_NAMESPACE, "sh", "-c", script], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no permission"])[-1]


_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


def run_ranks(task: str, size: int, **options: Any) -> list[dict[str, Any]]:
    """Run a task in a process per rank. Return their results."""
    settings = {"task": task, "size": size, "threads": 1, "rate": 0, "device": "cpu", **options}
    with tempfile.TemporaryDirectory() as folder:
        prefix = ("unshare", "--net") if settings["rate"] else ()
        processes = []
        try:
            if settings["rate"]:
                _call("ip", "link", "add", "name", "switch", "type", "bridge")
                _call("ip", "link", "set", "switch", "up")
            for rank in range(size):
                words = json.dumps({**settings, "rank": rank, "folder": folder})
                processes.append(subprocess.Popen([*prefix, sys.executable, __file__, "--worker", words]))
            for rank, process in enumerate(processes):
                if settings["rate"]:
                    _connect(rank, process.pid, settings["rate"])
            for process in processes:
                if process.wait(1800):
                    raise SystemExit(f"a rank of {task} ended with exit code {process.returncode}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [json.loads(Path(folder, f"result{rank}").read_text()) for rank in range(size)]


def _connect(rank: int, pid: int, rate: int) -> None:
    """Connect the switch with a rank's namespace, and limit what the rank receives."""
    port = f"port{rank}"
    _call("ip", "link", "add", "name", port, "type", "veth", "peer", "name", f"rank{rank}")
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        time.sleep(0.02)
    _call("ip", "link", "set", f"rank{rank}", "netns", pid)
    _call("ip", "link", "set", port, "master", "switch")
    _call("ip", "link", "set", port, "up")
    _shape(port, rate)


def predictions(result: dict[str, Any], size: int, hardware: Hardware, dtype: torch.dtype) -> Iterator[str]:
    """Yield a line per case, then the median error and the order of the transports."""
    seconds = torch.tensor(result["seconds"], dtype=torch.float64)
    totals: dict[int, list[tuple[float, float, str]]] = {}
    errors = []
    columns = f"{'predicted':>10}{'measured':>10}  20/80 percentile   error"
    yield f"{'case':20}{'tokens':>7}  {'layout':11}{'transport':10}{columns}"
    for place, (number, transport) in enumerate(result["runs"]):
        case = CASES[number]
        layout = LAYOUTS[case.layout](case.n_tokens, size)
        surveyed = survey(case.pattern(case.n_tokens), layout, Sizes(HEADS, HEADS, HEAD_DIM, dtype=dtype))
        predicted = estimate(surveyed, transport, hardware).seconds
        both = seconds[:, place].sum(1)
        low, measured, high = both.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
        errors.append(predicted / measured - 1)
        totals.setdefault(number, []).append((predicted, measured, transport))
        yield (
            f"{case.name:20}{case.n_tokens:7}  {case.layout:11}{transport:10}{predicted:8.2f} s{measured:8.2f} s"
            f"{low:8.2f} to {high:.2f} s{errors[-1]:+8.0%}"
        )
    yield f"median error {statistics.median(map(abs, errors)):.0%}, largest {max(map(abs, errors)):.0%}"
    pairs = [(a, b) for each in totals.values() for a, b in combinations(each, 2)]
    for least, title in (
        (1.0, "pairs"),
        (_CLEAR, f"pairs that the prediction sets apart by more than {_CLEAR - 1:.0%}"),
    ):
        clear = [(a, b) for a, b in pairs if max(a[0], b[0]) >= least * min(a[0], b[0])]
        wrong = [f"{a[2]} and {b[2]}" for a, b in clear if (a[0] < b[0]) != (a[1] < b[1])]
        names = f", wrong: {', '.join(wrong)}" if wrong else ""
        yield f"order of two transports right in {len(clear) - len(wrong)} of {len(clear)} {title}{names}"


def predict(args: argparse.Namespace, device: str = "cpu", size: int = 4) -> None:
    """Print predicted and measured times."""
    rate = args.rate if device == "cpu" else 0
    (result, *_) = run_ranks("predicting", size, rate=rate, rounds=args.rounds, device=device)
    processors = result["processors"]
    shape = {"processors_per_node": processors, "has_trees": device == "cpu"}
    hardware = Hardware("these links", "measured", MAX_RANKS, **shape, **result["figures"])
    print(
        f"{size} ranks share {processors} processors. Links: {'not shaped' if not rate else f'{rate} Mbit/s'}; fitted "
        f"{1e3 * hardware.net_alpha:.2f} ms per message, {hardware.net_beta / 1e6:.1f} MB/s. Attention: "
        f"{hardware.flops / 1e9:.0f} GFLOP/s per rank."
    )
    print(f"largest error against one process in float64: {result['gate']:.1e}")
    if not result["gate"] < 1e-12:
        raise SystemExit("the results are wrong, so no time counts")
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    print("\n".join(predictions(result, size, hardware, torch.float32 if device == "cpu" else torch.bfloat16)))


def ratios(args: argparse.Namespace) -> None:
    """Print CPU seconds and time of four processes against one."""
    problem = {"tokens": 65536, "window": 1024, "rounds": 3}
    kinds = {"one": (1, 1), "threads": (1, cores()), "four": (4, 1)}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    wall: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, (size, threads) in kinds.items():
            found = run_ranks("counting", size, threads=threads, **problem)
            rounds = list(zip(*(rank["rounds"] for rank in found), strict=True))
            cpu[name].append(statistics.median(sum(rank[0] for rank in each) for each in rounds))
            wall[name].append(statistics.median(max(rank[1] for rank in each) for each in rounds))
    for title, values, base in (("CPU seconds", cpu, "one"), ("time", wall, "threads")):
        threads = kinds[base][1]
        each = sorted(four / other for four, other in zip(values["four"], values[base], strict=True))
        print(
            f"{title} of 4 processes over one of {threads} thread{'s' * (threads > 1)}: {statistics.median(each):.2f} "
            f"({each[0]:.2f} to {each[-1]:.2f}), {statistics.median(values['four']):.2f} s",
            flush=True,
        )


def memory(args: argparse.Namespace) -> None:
    """Print the peak memory of a rank over a quarter of that of one process."""
    problem = {"tokens": 262144, "window": 4096, "rounds": 1}
    one, four = (
        max(rank["rounds"][0][2] for rank in run_ranks("counting", size, threads=threads, **problem))
        for size, threads in ((1, cores()), (4, 1))
    )
    print(
        f"peak of a rank of 4: {four:.0f} MiB, of one process: {one:.0f} MiB, {4 * four / one:.2f} times a quarter",
        flush=True,
    )


def nccl(args: argparse.Namespace) -> None:
    """Print the cases over NCCL, or why not."""
    count = torch.cuda.device_count()
    if count < 2:
        print(f"NCCL is not measured: expected several GPUs, found {count}")
        return
    predict(args, "cuda", min(count, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rate", type=int, default=50, help="limit of each link in Mbit/s (default: 50, 0: none)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the times of `predict` into this file")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    if args.rate and "predict" in args.sections and not args.inside:
        reason = reason_against_shaping()
        if not reason:
            words = ["--sections", "predict", "--rate", str(args.rate), "--rounds", str(args.rounds), "--inside"]
            words += ["--json", str(args.json)] if args.json else []
            subprocess.run([*_NAMESPACE, sys.executable, __file__, *words], check=True)
            args.sections.remove("predict")
        else:
            print(f"links are not shaped: {reason}")
            args.rate = 0
    for name in args.sections:
        {"predict": predict, "ratios": ratios, "memory": memory, "nccl": nccl}[name](args)


if __name__ == "__main__":
    main()
