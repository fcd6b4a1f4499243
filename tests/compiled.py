"""Compiles launches for GPUs that are not here, and reads what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ringtile.kernels.triton.launches import Choice, Launch

TARGETS = {
    "sm_70": GPUTarget("cuda", 70, 32),
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {
    "sm_70": 96 * 1024,
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
"""What one program may have of shared memory."""

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


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
    """Compile a launch as the just-in-time compiler would: divisible by 16 and 1 are told, the rest is open."""
    signature, constants, attributes = {}, dict(choice.constants), {}
    for number, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = {**launch.arguments, **choice.tiles}[name]
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype][1:]}{value.block_shape}>"
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            divisible = True
        elif isinstance(value, float):
            signature[name], divisible = "fp32", False
        elif launch.kernel.params[number].do_not_specialize:
            signature[name], divisible = "i32" if abs(value) < 2**31 else "i64", False
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
            continue
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            divisible = value % 16 == 0
        if divisible:
            attributes[(number,)] = [["tt.divisibility", 16]]
    constexprs = {(launch.kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    kernel = triton.compile(source, target=TARGETS[target], options=choice.config.options())
    return Compiled(kernel.metadata.shared, kernel.asm)
