"""Tile sizes, warps and pipeline stages of the kernels: a short list each, the first that a device has room for serves.

Chosen by what the compiler makes of them: no register spilled inside a loop.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

VARIABLE = "RINGTILE_TRITON"
"""Environment variable: ``tma`` lets the keys and values of full tiles come by tensor descriptors, in the forward pass
and for dQ, from sm_90 on. Not the default before it is shown to win."""


def wants_descriptors() -> bool:
    """Whether `VARIABLE` asks for tensor descriptors; ValueError where it asks for something else."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "tma"):
        raise ValueError(f"{VARIABLE}: expected 'tma' or nothing, got {wanted!r}")
    return wanted == "tma"


class Config(NamedTuple):
    """How one kernel is launched: tiles of so many queries and keys."""

    queries: int
    keys: int
    warps: int
    stages: int


INTERPRETED_CONFIG = Config(64, 64, 4, 1)
"""The interpreter has no registers: large tiles are fewer steps. A block of 128 has sub-tiles of these."""

_HOPPER = {
    "forward": {
        64: [Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 2)],
        128: [Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2)],
        256: [Config(128, 32, 8, 3), Config(64, 32, 4, 3), Config(64, 32, 4, 1)],
    },
    "dq": {
        64: [Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2)],
        128: [Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2)],
        256: [Config(64, 32, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
    },
    "dkdv": {
        64: [Config(64, 128, 8, 3), Config(64, 64, 8, 2), Config(32, 64, 8, 2)],
        128: [Config(64, 128, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 2)],
        256: [Config(32, 32, 8, 2), Config(32, 32, 4, 1)],
    },
}
"""From sm_90 on, where the matrix units read shared memory and registers hold sums alone."""
_OTHERS = {
    "forward": {
        64: [Config(128, 128, 8, 3), Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 1)],
        128: [Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
        256: [Config(64, 32, 8, 2), Config(64, 32, 4, 1), Config(32, 32, 4, 1)],
    },
    "dq": {
        64: [Config(128, 64, 8, 3), Config(64, 64, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 1)],
        128: [Config(64, 64, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 1)],
        256: [Config(64, 32, 8, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    },
    "dkdv": {
        64: [Config(32, 128, 8, 2), Config(32, 64, 8, 2), Config(32, 32, 4, 1)],
        128: [Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(32, 64, 4, 1), Config(32, 32, 4, 1)],
        256: [Config(32, 32, 8, 2), Config(32, 32, 8, 1), Config(32, 32, 4, 1)],
    },
}
_FLOAT32 = {
    "forward": [Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    "dq": [Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    "dkdv": [Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
}
_DROPOUT_AREA = {"forward": 128 * 64, "dq": 128 * 64, "dkdv": 32 * 64}
"""The random words of a tile take as many registers as its scores: so many pairs at most."""


def configs(kernel: str, architecture: int, dtype: torch.dtype, width: int, block: int, drops: bool) -> list[Config]:
    """What to try, best first; ``width`` is the larger head dim, padded to a power of two."""
    table = _HOPPER if architecture >= 90 else _OTHERS
    found = _FLOAT32[kernel] if dtype == torch.float32 else table[kernel][max(width, 64)]
    if 0 < architecture < 80:
        # Nothing is copied ahead, and compiling a large tile takes minutes.
        found = found[-1:]
    if drops:
        found = [config for config in found if config.queries * config.keys <= _DROPOUT_AREA[kernel]]
    return [config._replace(queries=min(config.queries, block), keys=min(config.keys, block)) for config in found]
