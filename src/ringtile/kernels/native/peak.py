"""The processor's peak rates, measured with the native kernel's own vectors."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ringtile.kernels.native.library import library, reason_against

RATES = ("fma_float32", "fma_float64", "dot_bfloat16", "exp_float32", "exp_float64", "read")
"""Rates per second, in the order of ``ringtile_rate`` in native/ringtile.h: floating-point operations of multiply-adds,
of dot products of bfloat16 pairs, exponentials as the softmax computes them, bytes read from memory."""


def peak_rates(
    *, threads: int | None = None, seconds: float = 0.02, samples: int = 5, names: Collection[str] = RATES
) -> dict[str, float]:
    """Measure each rate in ``names``, per second, and return the best of ``samples``, summed over ``threads``.

    ``threads`` defaults to torch's. ``seconds`` is the length of a sample. The result omits the rates that the
    instruction set in use lacks; it is empty without the library. Raises ValueError if a count or time is not positive.

    >>> all(rate > 0 for rate in peak_rates(seconds=1e-4, samples=1).values())
    True
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1 or samples < 1 or not seconds > 0:
        raise ValueError(f"threads, seconds, samples: expected more than none, got {threads=}, {seconds=}, {samples=}")
    if reason_against():
        return {}
    function = library().handle.ringtile_peak
    found = dict.fromkeys(names, 0.0)
    # We interleave the samples, so that a disturbance does not hit all samples of one rate.
    for _ in range(samples):
        for name in found:
            found[name] = max(found[name], function(library().isa, RATES.index(name), threads, seconds))
    return {name: rate for name, rate in found.items() if rate}
