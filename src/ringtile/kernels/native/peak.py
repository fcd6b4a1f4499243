"""How fast this processor is at most, measured with the vectors that the native kernel computes with."""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from ringtile.kernels.native.library import library, reason_against

RATES = ("fma_float32", "fma_float64", "dot_bfloat16", "exp_float32", "exp_float64", "read")
"""What is measured, in the order of ``ringtile_rate`` in native/ringtile.h: floating-point operations a second of
multiply-adds (of products of bfloat16 pairs), exponentials as the softmax takes them, bytes read from memory."""


def peak_rates(
    *, threads: int | None = None, seconds: float = 0.02, samples: int = 5, names: Collection[str] = RATES
) -> dict[str, float]:
    """The best of some samples of each of ``names`` a second, all ``threads`` (default: torch's) together.

    A rate that the processor, or the instruction set in use, does not have is left out; so are all without the
    library. ``seconds`` is how long a sample takes. Raises ValueError where no time or thread is given.

    >>> all(rate > 0 for rate in peak_rates(seconds=1e-4, samples=1).values())
    True
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1 or samples < 1 or not seconds > 0:
        raise ValueError(f"threads, seconds, samples: expected more than none, got {threads=}, {seconds=}, {samples=}")
    if reason_against():
        return {}
    function = library().handle.ringtile_peak
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_double), ctypes.c_double
    found = dict.fromkeys(names, 0.0)
    # In turn, so that a disturbance does not meet all samples of one.
    for _ in range(samples):
        for name in found:
            found[name] = max(found[name], function(library().isa, RATES.index(name), threads, seconds))
    return {name: rate for name, rate in found.items() if rate}
