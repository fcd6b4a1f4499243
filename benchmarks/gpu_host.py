"""Time what a call of the Triton backend takes of the host, through a GPU that is not there (see mock_gpu.py).

    python benchmarks/gpu_host.py                      this tree
    python benchmarks/gpu_host.py --before REVISION    another revision of it first, for example main

Times are medians in microseconds on this machine, without the CUDA driver and without Triton's launcher in C. The last
column divides by the time of PyTorch's own attention over 16 tokens on the CPU, in the same process: mostly overhead of
calls, so ratios compare machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
YARDSTICK = "PyTorch's attention, 16 tokens"
ROUNDS, CALLS = 20, 50


def times() -> dict[str, float]:
    """Return the median microseconds of each kind of call."""
    import torch
    from mock_gpu import mock_gpu
    from torch.nn.functional import scaled_dot_product_attention

    from ringtile import build_index, sparse_attention
    from ringtile.kernels import triton
    from ringtile.kernels.contracts import Call, Rows
    from ringtile.patterns import Causal, Window

    torch.set_num_threads(1)
    pattern = Causal() & Window(1023, 0)
    index = build_index(pattern, 4096, num_heads=8)
    call = Call(index.start, index.block, 0.088, tiles=index.tensors(), backend="triton")
    q, k, v, out_grad = (torch.zeros(1, 8, 4096, 128, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with mock_gpu(recording=False):
        out, lse = triton.forward(q, k, v, call)
        tracked = sparse_attention(*leaves, index, backend="triton")
        calls: dict[str, Callable[[], object]] = {
            YARDSTICK: lambda: scaled_dot_product_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16]),
            "sparse_attention, index": lambda: sparse_attention(q, k, v, index, backend="triton"),
            "sparse_attention, pattern": lambda: sparse_attention(q, k, v, pattern, backend="triton"),
            "forward of the backend": lambda: triton.forward(q, k, v, call),
            "backward of the backend": lambda: triton.backward(Rows(out_grad, None, q, k, v, out, lse), call),
            "forward that records": lambda: sparse_attention(*leaves, index, backend="triton"),
            "backward of autograd": lambda: torch.autograd.grad(tracked, leaves, out_grad, retain_graph=True),
        }
        found: dict[str, list[float]] = {name: [] for name in calls}
        # In turns, so that a slow second on a shared machine is one for all.
        for _ in range(ROUNDS):
            for name, run in calls.items():
                for _ in range(CALLS):
                    began = time.perf_counter()
                    run()
                    found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in found.items()}


def times_of(tree: Path) -> dict[str, float]:
    """Return the times of a source tree, measured in a process of its own."""
    path = os.pathsep.join([str(tree / "src"), str(ROOT / "benchmarks")])
    command = [sys.executable, __file__, "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REVISION", help="a git revision to measure in the same run")
    parser.add_argument("--json", action="store_true", help="print the times of the ringtile that Python imports")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(times()))
        return
    trees = {"this tree": times_of(ROOT)}
    if args.before:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", args.before, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            trees = {args.before: times_of(Path(folder)), **trees}
    for tree, found in trees.items():
        print(f"{tree}:")
        for name, microseconds in found.items():
            print(f"  {name:32} {microseconds:7.1f} us {microseconds / found[YARDSTICK]:6.2f}")


if __name__ == "__main__":
    main()
