"""Compiles launches for GPUs that are not here, and reads what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ringtile.kernels.triton.launches import Choice, Launch

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
TARGETS = {f"sm_{n}": GPUTarget("cuda", n, 32) for n in (70, 75, 80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
SHARED_BYTES = dict(zip(TARGETS, (size * 1024 for size in (96, 64, 163, 99, 99, 227, 227, 99, 64)), strict=True))
"""What one program may have of shared memory."""


class Compiled(NamedTuple):
    """What was made of one kernel."""

    shared: int
    texts: dict[str, Any]

    @property
    def sass(self) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(self.texts["cubin"])
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            done = subprocess.run([str(tool), "-sass", str(path)], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def loops(self) -> list[list[str]]:
        """The instructions of each loop: what lies between a label and a jump back to it. Blocks behind the end, where
        sm_100 waits for its matrix units, jump back too, but are no loops."""
        place = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
        found = [(int(m[1], 16), m[2]) for line in self.sass if (m := place.search(line))]
        loops = []
        for at, text in found:
            if (jump := re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)", text)) and int(jump[1], 16) < at:
                loops.append([other for where, other in found if int(jump[1], 16) <= where <= at])
        return [loop for loop in loops if "EXIT" not in [instruction.strip() for instruction in loop]]


def compile_choice(launch: Launch, choice: Choice, target: str) -> Compiled:
    """Compile a launch as the just-in-time compiler would."""
    function, backend = launch.kernel, make_backend(TARGETS[target])
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialized, given = bind(**launch.arguments, **choice.tiles, C=choice.constants, **choice.config.options())
    options, *rest = function._pack_args(backend, given, bound, specialized, given)
    kernel = triton.compile(ASTSource(function, *rest), target=TARGETS[target], options=options.__dict__)
    return Compiled(kernel.metadata.shared, kernel.asm)
