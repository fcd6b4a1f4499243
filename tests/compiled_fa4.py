"""Compile both passes of `fa4` for a GPU that is not present, and print the size of the machine code of each.

python tests/compiled_fa4.py sm_90
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ARCHITECTURE = sys.argv[1]
GENERATION = {"sm_90": 9, "sm_100": 10}[ARCHITECTURE]
TEMPORARY = tempfile.TemporaryDirectory()
PLACE = Path(TEMPORARY.name)
os.environ |= {
    "FLASH_ATTENTION_ARCH": ARCHITECTURE,
    "CUTE_DSL_ARCH": f"{ARCHITECTURE}a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "CUTE_DSL_KEEP_CUBIN": "1",
    "CUTE_DSL_DUMP_DIR": str(PLACE),
}

import cutlass  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from ringtile.index import build_index  # noqa: E402
from ringtile.kernels import fa4  # noqa: E402
from ringtile.patterns import Causal, Dense, Window  # noqa: E402


class HardwareInfo:
    """Of a GPU that no driver knows."""

    def get_device_multiprocessor_count(self) -> int:
        return 132


def on_gpu(x: Any) -> Any:
    if isinstance(x, fa4.Lists):
        return fa4.Lists(*map(on_gpu, x))
    return torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x


def main() -> None:
    cutlass.utils.HardwareInfo = HardwareInfo
    fa4._generation = lambda device: GENERATION
    torch.cuda.device_of = lambda x: nullcontext()
    for name, pattern in (("full tiles", Dense()), ("bits", Causal() & Window(100))):
        tiles = fa4.tiles_of(build_index(pattern, 600, num_heads=4))
        with FakeTensorMode(allow_non_fake_inputs=True):
            held = fa4.Tiles(*map(on_gpu, tiles))
            q, out = torch.empty(2, 2, 4, 600, 128, dtype=torch.bfloat16, device="cuda")
            k, v = torch.empty(2, 2, 2, 600, 128, dtype=torch.bfloat16, device="cuda")
            lse = torch.empty(2, 4, 600, device="cuda")
            timed(f"forward of {name}", fa4.run_forward, q, k, v, held, 0.2)
            timed(f"backward of {name}", fa4.run_backward, out, None, q, k, v, out, lse, held, 0.2)


def timed(name: str, run: Any, *arguments: Any) -> None:
    begin = time.perf_counter()
    run(*arguments)
    took = time.perf_counter() - begin
    code = [path.stat().st_size for path in PLACE.iterdir()]
    # The next kernel has the same name, whatever its mask.
    for path in PLACE.iterdir():
        path.unlink()
    print(f"{name}: {took:.1f} s, {max(code):,} bytes")


with TEMPORARY:
    main()
