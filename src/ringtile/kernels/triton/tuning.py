"""Tile sizes, warps and pipeline stages: a short list per kernel. The first that fits on the device is used.

We chose them by the compiler's output: no register is spilled inside a loop.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

VARIABLE = "RINGTILE_TRITON"
"""Environment variable: ``tma`` loads the keys and values of full tiles by tensor descriptors, in the forward pass and
for dQ, on sm_90 and up. It is off until a GPU benchmark shows that it is faster."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton computes on the CPU. Triton reads the variable once, too, when it is first imported."""


def wants_descriptors() -> bool:
    """Return True if `VARIABLE` requests tensor descriptors. Raise ValueError if it has another value."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "tma"):
        raise ValueError(f"{VARIABLE}: expected 'tma' or nothing, got {wanted!r}")
    return wanted == "tma"


class Config(NamedTuple):
    """The launch options of one kernel, with the number of queries and keys per tile."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Return the compiler's options. It fuses no product with a sum: `tiles.weights` needs its rounding."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


TUNED = Path(__file__).with_name("tuned.json")
"""Configurations that a GPU chose, by architecture, kernel and head dim: see `benchmarks/gpu.py --adopt`. They come
before those of the tables. Without the file, the tables are all."""
_TUNED: dict[str, dict[str, dict[str, dict[str, int]]]]
_TUNED = json.loads(TUNED.read_text(encoding="utf-8")) if TUNED.exists() else {}

INTERPRETED_CONFIG = Config(64, 64, 4, 1)
"""The interpreter has no registers: large tiles take fewer steps. A block of 128 has sub-tiles of these."""

_HOPPER = {
    "forward": {
        64: [Config(64, 64, 4, 4), Config(64, 64, 4, 2)],
        128: [Config(128, 64, 8, 3), Config(64, 64, 4, 3)],
        256: [Config(128, 32, 8, 3), Config(64, 32, 4, 3), Config(64, 32, 4, 1)],
    },
    "dq": {
        64: [Config(128, 64, 8, 3), Config(64, 64, 4, 2)],
        128: [Config(128, 64, 8, 3), Config(64, 64, 4, 2)],
        256: [Config(64, 32, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
    },
    "dkdv": {
        64: [Config(64, 128, 8, 3), Config(32, 64, 8, 3)],
        128: [Config(64, 128, 8, 3), Config(64, 64, 8, 3), Config(32, 64, 8, 3)],
        256: [Config(32, 32, 8, 2), Config(32, 32, 4, 1)],
    },
}
"""For sm_90 to sm_110: the matrix units read shared memory, and registers contain only sums. Three forward programs of
head dim 64 share a multiprocessor, so that one computes products while another computes exponentials."""
_BLACKWELL = {**_HOPPER, "forward": {**_HOPPER["forward"], 64: [Config(128, 128, 8, 3), *_HOPPER["forward"][64]]}}
"""For sm_100 to sm_110, whose matrix units want 128 rows."""
_OTHERS = {
    "forward": {
        64: [Config(128, 128, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 1)],
        128: [Config(128, 64, 8, 3), Config(64, 64, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
        256: [Config(64, 32, 8, 2), Config(64, 32, 4, 1), Config(32, 32, 4, 1)],
    },
    "dq": {
        64: [Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 1)],
        128: [Config(64, 64, 8, 3), Config(64, 32, 4, 2), Config(32, 32, 4, 1)],
        256: [Config(64, 32, 8, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    },
    "dkdv": {
        64: [Config(64, 128, 8, 3), Config(32, 64, 8, 2), Config(32, 32, 4, 1)],
        128: [Config(64, 64, 8, 3), Config(32, 64, 8, 2), Config(32, 64, 4, 1), Config(32, 32, 4, 1)],
        256: [Config(32, 32, 8, 2), Config(32, 32, 8, 1), Config(32, 32, 4, 1)],
    },
}
_FLOAT32 = {
    "forward": [Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    "dq": [Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    "dkdv": [Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
}
_DROPOUT_AREA = {"forward": 128 * 64, "dq": 128 * 64, "dkdv": 32 * 64}
"""Largest number of pairs per tile: random words take as many registers as scores."""


def configs(kernel: str, architecture: int, dtype: torch.dtype, width: int, block: int, drops: bool) -> list[Config]:
    """Return the configurations to try, best first. ``width`` is the larger head dim, padded to a power of two."""
    # Consumer Blackwell, sm_120, has the matrix units of sm_80 and the shared memory of sm_89.
    table = _HOPPER if 90 <= architecture < 100 else _BLACKWELL if 100 <= architecture < 120 else _OTHERS
    found = _FLOAT32[kernel] if dtype == torch.float32 else table[kernel][max(width, 64)]
    if 0 < architecture < 80:
        # These GPUs do not copy ahead, and compiling a large tile takes minutes.
        found = found[-1:]
    elif best := _TUNED.get(f"sm_{architecture}", {}).get(kernel, {}).get(str(max(width, 64))):
        if dtype != torch.float32 and not drops:
            found = [Config(**best), *found]
    if drops:
        found = [config for config in found if config.queries * config.keys <= _DROPOUT_AREA[kernel]]
    return [config._replace(queries=min(config.queries, block), keys=min(config.keys, block)) for config in found]


_LISTS = {
    "forward": {
        64: [Config(64, 64, 4, 5), Config(16, 32, 4, 1)],
        128: [Config(64, 64, 4, 5), Config(64, 32, 4, 5), Config(16, 32, 4, 1)],
        256: [Config(64, 32, 4, 5), Config(16, 32, 4, 5), Config(16, 16, 4, 1)],
        512: [Config(64, 16, 8, 5), Config(32, 16, 4, 5), Config(16, 16, 4, 1)],
    },
    "dq": {
        64: [Config(64, 32, 4, 5), Config(16, 32, 4, 1)],
        128: [Config(64, 32, 4, 5), Config(32, 32, 4, 3), Config(16, 32, 4, 1)],
        256: [Config(32, 32, 4, 3), Config(16, 16, 4, 1)],
        512: [Config(32, 32, 8, 3), Config(16, 16, 4, 1), Config(8, 16, 4, 1)],
    },
    "dkdv": {
        64: [Config(64, 64, 8, 3), Config(32, 32, 4, 1)],
        128: [Config(64, 32, 8, 3), Config(32, 16, 8, 1)],
        256: [Config(32, 32, 8, 1), Config(16, 16, 4, 1)],
        512: [Config(32, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 8, 4, 1)],
    },
}
"""For lists of keys per query, by the larger head dim, with heads in place of queries. An entry is loaded a step before
its key, so 5 stages have 3 buffers."""


def list_configs(kernel: str, dtype: torch.dtype, width: int) -> list[Config]:
    """Return the configurations to try for lists, best first. ``width`` is the larger head dim."""
    table = _LISTS[kernel]
    found = table[min(size for size in table if size >= width)]
    return found[-1:] if INTERPRETED or dtype == torch.float32 else found
