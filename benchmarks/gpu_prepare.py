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
from gpu_times import DEVICE
from lists import Cell as LayerOfLists, draw_lists
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from triton.backends.compiler import GPUTarget

from ringtile import sparse_attention
from ringtile.index import clear_cache, schedule
from ringtile.kernels.triton import launches
from ringtile.kernels.triton.tuning import VARIABLE, Config, configs
from ringtile.patterns import Causal, Chosen
from ringtile.tools.bench.exact import relative_error
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


class ListProblem(NamedTuple):
    """One of our calls over lists of keys, of a layer of `lists`, and what it is compared with."""

    layer: LayerOfLists
    n_keys: int
    dtype: torch.dtype
    trains: bool = True

    @property
    def n_queries(self) -> int:
        return self.n_keys if self.trains else 1

    def smaller(self) -> ListProblem:
        """Return a problem for the interpreter."""
        layer = self.layer._replace(heads=2, key_heads=1, groups=1, head_dim=16, length=2, block=1)
        return ListProblem(layer._replace(value_dim=min(layer.value_dim, 16)), 8, torch.float32, self.trains)

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        """Return q, k and v, or q and k if the values are the first dims of the keys, and the lists."""
        drawn = torch.Generator(DEVICE).manual_seed(0)
        layer, like = self.layer, {"generator": drawn, "device": DEVICE, "dtype": self.dtype}
        leaves = [torch.randn(1, layer.heads, self.n_queries, layer.head_dim, **like)]
        for width in (layer.head_dim, layer.value_dim):
            leaves += [torch.randn(1, layer.key_heads, self.n_keys, width, **like)] if width else []
        return leaves, draw_lists(layer, self.n_queries, self.n_keys, False).to(DEVICE)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, backend: str = "triton") -> Tensor:
        """Return the attention of the last queries, of which there are lists."""
        scale = self.layer.head_dim**-0.5
        pattern = Causal() & Chosen(chosen, self.layer.block)
        return sparse_attention(q, k, v, pattern, enable_gqa=True, scale=scale, backend=backend)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        """Return PyTorch's dense causal attention."""
        return scaled_dot_product_attention(q, k, v, is_causal=self.n_queries > 1, enable_gqa=True)

    def off(self, rows: int = 0) -> float:
        """Return the error of the last rows, or of all and their gradients, against float64."""
        leaves, chosen = self.inputs()
        if rows:
            leaves[0], chosen = leaves[0][:, :, -rows:], chosen[:, :, -rows:]
        results = []
        for dtype, backend in ((self.dtype, "triton"), (torch.float64, "blockwise")):
            mine = [x.to(dtype).requires_grad_(not rows) for x in leaves]
            out = self.attend(*_with_values(mine), chosen, backend)
            grads = torch.autograd.grad(out, mine, torch.ones_like(out)) if not rows else ()
            results.append([out.detach(), *grads])
        return max(relative_error(x, y) for x, y in zip(*results, strict=True))

    def call(self, *, trains: bool, attend: Callable[..., Tensor] | None = None) -> Callable[[], object]:
        """Return a call to time."""
        leaves, chosen = self.inputs()
        leaves = [x.requires_grad_(trains) for x in leaves]

        def run() -> object:
            out = (attend or self.attend)(*_with_values(leaves), chosen)
            return torch.autograd.grad(out, leaves, out.detach()) if trains else out

        return run

    def launch(self) -> None:
        """Call it, to name its kernels."""
        # Kernels do not depend on lengths.
        few = self._replace(n_keys=min(self.n_keys, 64 + 2 * self.layer.block))
        few.call(trains=self.trains)()


def _with_values(leaves: list[Tensor]) -> list[Tensor]:
    return leaves if len(leaves) == 3 else [*leaves, leaves[1][..., :512]]


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
    architecture: int, shared: int, checks: Sequence[Callable[[], object]], problems: Sequence[Problem | ListProblem]
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
