"""Tile sizes, warps and pipeline stages of the kernels: a short list each, the first that a device has room for serves."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """How one kernel is launched: BM queries and BN keys of a tile."""

    queries: int
    keys: int
    warps: int
    stages: int


INTERPRETED = [Config(64, 64, 4, 1)]
"""The interpreter has no registers: large tiles are fewer steps. A block of 128 has sub-tiles of these."""

_FORWARD = {
    64: [Config(128, 128, 8, 3), Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 1)],
    128: [Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 1)],
    256: [Config(128, 32, 8, 3), Config(64, 32, 4, 3), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
}
_DQ = {
    64: [Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 1)],
    128: [Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
    256: [Config(64, 32, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
}
_DKDV = {
    64: [Config(64, 128, 8, 3), Config(64, 64, 8, 3), Config(64, 64, 8, 2), Config(32, 64, 4, 1)],
    128: [Config(64, 128, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(32, 64, 4, 1)],
    256: [Config(32, 64, 8, 2), Config(32, 64, 8, 1), Config(32, 32, 4, 1)],
}
_TABLES = {"forward": _FORWARD, "dq": _DQ, "dkdv": _DKDV}
_FLOAT32 = {
    "forward": [Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    "dq": [Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
    "dkdv": [Config(32, 32, 4, 2), Config(32, 32, 4, 1)],
}


def configs(kernel: str, dtype: torch.dtype, head_dim: int, block: int, dropout: bool, interpreted: bool) -> list[Config]:
    """What to try, best first; ``head_dim`` is the larger of both, padded to a power of two."""
    if interpreted:
        return INTERPRETED
    found = _FLOAT32[kernel] if dtype == torch.float32 else _TABLES[kernel][max(head_dim, 64)]
    if dropout:
        # The random words of a tile take as many registers as its scores.
        most = 64 * 64 if kernel == "dkdv" else 128 * 64
        found = [config for config in found if config.queries * config.keys <= most]
    return [config._replace(queries=min(config.queries, block), keys=min(config.keys, block)) for config in found]
