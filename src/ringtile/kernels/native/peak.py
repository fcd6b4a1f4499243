"""The processor's peak rates, measured with the native kernel's own vectors."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ringtile.kernels.native.instruction_sets import RATES, best_rates
from ringtile.kernels.native.library import library, reason_against


def peak_rates(
    *, threads: int | None = None, seconds: float = 0.02, samples: int = 5, names: Collection[str] = RATES
) -> dict[str, float]:
    """Measure each rate in ``names``, per second, and return the best of ``samples``, summed over ``threads``.

    ``threads`` defaults to torch's. ``seconds`` is the length of a sample. The result omits the rates that the newest
    instruction set here lacks. It is empty without the library. Raises ValueError if a count or a time is not positive.

    >>> all(rate > 0 for rate in peak_rates(seconds=1e-4, samples=1).values())
    True
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1 or samples < 1 or not seconds > 0:
        raise ValueError(f"threads, seconds, samples: expected more than none, got {threads=}, {seconds=}, {samples=}")
    if reason_against():
        return {}
    wanted = [(library().sets[-1], name) for name in names]
    found = best_rates(library().handle, wanted, threads=threads, seconds=seconds, samples=samples)
    return {name: rate for name, rate in zip(names, found, strict=True) if rate}
