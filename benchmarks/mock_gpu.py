"""A CUDA GPU that is not there: Triton's kernels are compiled for it, or only named, and their launches written down.

    with mock_gpu(90) as gpu:
        sparse_attention(q, k, v, index, backend="triton")  # tensors on the CPU
    gpu.launches    # what a GPU would have been told to run
    gpu.kernels     # what it would have had to compile first

Nothing is computed, so results are uninitialized memory. With ``results=True``, "blockwise" computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ringtile.index import schedule
from ringtile.kernels import blockwise, triton as backend
from ringtile.kernels.blockwise import lists as blockwise_lists
from ringtile.kernels.triton import backward_kernels, chosen, forward_kernels, launches, list_kernels

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""What one program may have of shared memory."""


class Kernel(NamedTuple):
    """What `triton.compile` is asked for."""

    function: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any

    def compile(self, target: GPUTarget) -> CompiledKernel:
        source = ASTSource(self.function, self.signature, self.constants, self.attributes)
        return self.function.compile(source, target=target, options=self.options.__dict__)


class Launched(NamedTuple):
    """A launch."""

    source: ASTSource
    grid: tuple[int, int, int]
    stream: int
    values: list[Any]

    @property
    def name(self) -> str:
        return str(self.source.fn.__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, those of `Lists` and `Constants` too, with addresses in place of tensors."""
        named = dict(zip(self.source.fn.arg_names, self.values, strict=True))
        for name in ("lists", "at", "C"):
            named |= named.pop(name)._asdict() if name in named else {}
        return {name: x.data_ptr() if isinstance(x, torch.Tensor) else x for name, x in named.items()}


class Stream(NamedTuple):
    """The current stream, as `torch.cuda.current_stream` returns it."""

    cuda_stream: int
    waits: list[tuple[int, int]]

    def record_event(self) -> int:
        """Return an event: it is known by its stream."""
        return self.cuda_stream

    def wait_event(self, event: int) -> None:
        self.waits.append((self.cuda_stream, event))


@dataclass
class MockGpu:
    """A driver as Triton 3.6 to 3.8 call it, which runs nothing."""

    architecture: int
    shared_of: Callable[[Kernel], int] | None
    """Bytes of shared memory of a kernel that is not compiled. None compiles kernels."""
    recording: bool = True
    stream: int = 0
    """The current stream."""
    capturing: bool = False
    """Whether a CUDA graph captures it."""
    launches: list[Launched] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    """Streams that waited, and the streams of the events that they waited for."""

    binary_ext = "cubin"

    @property
    def utils(self) -> Any:
        shared = SHARED_BYTES[self.architecture]
        return SimpleNamespace(
            load_binary=lambda *args: (1, 1, 128, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": shared, "warpSize": 32},
        )

    def launcher_cls(self, source: ASTSource, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, about: Any, *args: Any) -> None:
            enter, leave, *values = args
            if enter is not None:
                enter(about)
            if self.recording:
                self.launches.append(Launched(source, (x, y, z), stream, values))
            if leave is not None:
                leave(about)

        return launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream

    def make(self, function: Any, key: str, *what: Any) -> Any:
        """Stand in for `JITFunction._do_compile`."""
        signature, device, constants, options, attributes, _ = what
        kernel = Kernel(function, signature, constants, attributes, options)
        self.kernels.append(kernel)
        if self.shared_of is None:
            made = kernel.compile(self.get_current_target())
        else:
            made = object.__new__(CompiledKernel)
            made.src = ASTSource(function, signature, constants, attributes)
            made.name, made.hash, made.metadata_group = function.__name__, key, {}
            made.metadata = SimpleNamespace(
                shared=self.shared_of(kernel), num_warps=options.num_warps, tmem_size=None, name=made.name
            )
            made.packed_metadata = options.num_warps, 1, made.metadata.shared
            made.kernel, made.module, made.function, made._run = b"", None, None, None
        function.device_caches[device][0][key] = made
        return made


@contextmanager
def mock_gpu(
    architecture: int = 90,
    *,
    compiled: bool = False,
    shared_of: Callable[[Kernel], int] = lambda kernel: 0,
    results: bool = False,
    recording: bool = True,
) -> Iterator[MockGpu]:
    """Let ringtile's Triton backend take tensors on the CPU for those of a GPU that runs nothing.

    ``compiled`` compiles every kernel, in seconds each. Otherwise a kernel takes the shared memory that ``shared_of``
    says. ``recording=False`` counts no launches, for timings.
    """
    gpu = MockGpu(architecture, None if compiled else shared_of, recording)
    device_reasons = backend.device_reasons

    def reasons(q: Any) -> list[str]:
        return [reason for reason in device_reasons(q) if not reason.startswith("needs a GPU")]

    def both(launch: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (launch(*arguments), compute(*arguments))[1]

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(driver, "_active", gpu))
        enter(patch.object(JITFunction, "_do_compile", lambda function, *args: gpu.make(function, *args)))
        for module in (forward_kernels, backward_kernels, list_kernels):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    # What another driver compiled is none of this one's.
                    caches = type(function.device_caches)(function.create_binder)
                    enter(patch.object(function, "device_caches", caches))
        # Triton reads it once per process.
        enter(patch.object(compiler, "max_shared_mem", lambda device: SHARED_BYTES[architecture]))
        enter(patch.object(launches, "architecture", lambda device: architecture))
        # Plans contain kernels of a driver.
        enter(patch.object(schedule, "_table", WeakTensorKeyDictionary()))
        enter(patch.object(schedule, "is_capturing", lambda device: gpu.capturing, create=True))
        enter(patch.object(torch.cuda, "current_stream", lambda device=None: Stream(gpu.stream, gpu.waits)))
        enter(patch.object(backend, "device_reasons", reasons))
        enter(patch.object(backend, "reason_against", lambda: ""))
        if results:
            for module, computes in ((backend, blockwise), (chosen, blockwise_lists)):
                for name in ("forward", "backward"):
                    enter(patch.object(module, name, both(getattr(module, name), getattr(computes, name))))
        yield gpu
