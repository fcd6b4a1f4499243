"""Compile beforehand what benchmarks/gpu.py will launch: calls on a mock name the kernels, processes compile them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import mock_gpu
import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.backends.compiler import GPUTarget

from ringtile.index import clear_cache, schedule
from ringtile.kernels.triton import launches
from ringtile.kernels.triton.tuning import VARIABLE, Config, configs
from ringtile.tools.bench.peers import Case, Ringtile
from ringtile.tools.machine import cores


@contextmanager
def forced(kernel: str, config: Config) -> Iterator[None]:
    """Let one kernel have no other configuration."""

    def only(name: str, *about: Any) -> list[Config]:
        return [config] if name == kernel else configs(name, *about)

    clear_cache()
    # An index keeps the plans of its launches.
    plans = patch.object(schedule, "_table", WeakTensorKeyDictionary())
    with plans, patch.object(launches, "configs", only):
        yield
    clear_cache()


class Problem(NamedTuple):
    """One of our calls."""

    case: Case
    trains: bool = True
    by_descriptor: bool = False
    forced: tuple[str, Config] | None = None

    def launch(self) -> None:
        """Call it with tensors that have no values, and so take no memory."""
        # A case keeps its index, and an index the kernels that were launched over it.
        case = replace(self.case)
        shapes = [(case.heads, case.queries), (case.key_heads, case.n_tokens), (case.key_heads, case.n_tokens)]
        leaves = [
            torch.empty(case.batch, *shape, case.head_dim, dtype=case.dtype, requires_grad=self.trains)
            for shape in shapes
        ]
        with patch.dict(os.environ, {VARIABLE: "tma" if self.by_descriptor else ""}):
            with forced(*self.forced) if self.forced else nullcontext():
                out = Ringtile("triton").prepare(case)(*leaves)
                if self.trains:
                    torch.autograd.grad(out, leaves, torch.empty_like(out))


_asked: list[mock_gpu.Kernel] = []


def _compiled(number: int, target: GPUTarget) -> tuple[int, int, str]:
    """Compile one of the kernels that the parent process has found, with the launcher that Triton builds for it."""
    try:
        made = _asked[number].compile(target)
    except Exception as error:
        return number, 0, f"{_asked[number].function.__name__}: {type(error).__name__}: {error}"[:300]
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(made.src, made.metadata)
    except Exception:
        # Without a driver of NVIDIA there is none to link it with: the run builds it.
        return number, made.metadata.shared, ""
    return number, made.metadata.shared, ""


def prepare(
    architecture: int, shared: int, checks: Sequence[Callable[[], object]], problems: Sequence[Problem]
) -> dict[str, Any]:
    """Compile the kernels of all calls for an architecture with so many bytes of shared memory per program.

    If a kernel does not fit, the calls are made again, to find out what takes its place.
    """
    mock_gpu.SHARED_BYTES[architecture] = shared
    target, began = GPUTarget("cuda", architecture, 32), time.monotonic()
    sizes: dict[str, int] = {}
    failed: list[str] = []

    def size_of(kernel: mock_gpu.Kernel) -> int:
        return sizes.get(_key(kernel), 0)

    while True:
        clear_cache()
        with mock_gpu.mock_gpu(architecture, shared_of=size_of, results=True, recording=False) as gpu:
            for check in checks:
                try:
                    check()
                except (ValueError, AssertionError):
                    # Some cases read what only a GPU computes. By then they have named their kernels.
                    continue
            named = gpu.kernels
        with mock_gpu.mock_gpu(architecture, shared_of=size_of, recording=False) as gpu:
            for problem in problems:
                problem.launch()
            named += gpu.kernels
        _asked[:] = {_key(kernel): kernel for kernel in named if _key(kernel) not in sizes}.values()
        print(f"{len(_asked)} kernels to compile, named in {time.monotonic() - began:.0f} s", flush=True)
        with multiprocessing.get_context("fork").Pool(cores()) as pool:
            work = pool.imap_unordered(partial(_compiled, target=target), range(len(_asked)))
            for done, (number, size, error) in enumerate(work, 1):
                sizes[_key(_asked[number])] = size
                failed += [error] if error else []
                if done % 10 == 0 or done == len(_asked):
                    print(f"  {done} of {len(_asked)} compiled, {time.monotonic() - began:.0f} s", flush=True)
        if all(sizes[_key(kernel)] <= shared for kernel in _asked):
            return {"kernels": len(sizes), "failed": failed}


def _key(kernel: mock_gpu.Kernel) -> str:
    return f"{kernel.function.__name__} {kernel[1:]}"


class _Event(SimpleNamespace):
    """An event of a GPU that computes at once."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


@contextmanager
def no_gpu() -> Iterator[None]:
    """Run on a GPU that is not there: kernels are named, "blockwise" computes, and events have the host's time."""
    with ExitStack() as stack:
        stack.enter_context(mock_gpu.mock_gpu(results=True, recording=False))
        names = ("synchronize", "_sleep", "graph", "CUDAGraph")
        for name, value in {"Event": _Event, **{name: MagicMock() for name in names}}.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield
