"""A test of the processor's tiles: some virtual machines lose them when a thread is interrupted."""

import os
import threading
import time
from typing import NamedTuple

import torch

from ringtile.kernels.native.library import library, reason_against

_PRODUCTS = 50_000
"""Products added in registers before a sum is looked at: about a quarter of a millisecond. The sums are exact."""


class TileReport(NamedTuple):
    """The outcome of a test of tiles."""

    reason: str
    """Why there was nothing to test, empty if there was."""
    threads: int
    sums: int
    """Sums of many products in tiles."""
    wrong: int
    """Number of sums that differ from the exact result."""


def check_tiles(*, seconds: float = 1.0, products: int = _PRODUCTS) -> TileReport:
    """Add up products in tiles for so many seconds, in twice as many threads as there are cores."""
    if reason_against():
        return TileReport(reason_against(), 0, 0, 0)
    numbers = [isa.number for isa in library().sets if isa.has_tiles]
    if not numbers:
        return TileReport(f"amx: {library().missing.get('amx', 'another instruction set is named')}", 0, 0, 0)
    found: list[bool] = []
    deadline = time.monotonic() + seconds

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randint(1, 3, (16, 16, 2), generator=generator, device="cpu").bfloat16() for _ in range(2))
        expected = products * torch.einsum("mkp,knp->mn", a.float(), b.float())
        while True:
            c = torch.zeros_like(expected)
            library().handle.ringtile_multiply_tiles(numbers[-1], a.data_ptr(), b.data_ptr(), c.data_ptr(), products)
            found.append(torch.equal(c, expected))
            # Asked last: on a busy machine a thread can begin after the deadline, and no sums would say nothing.
            if time.monotonic() >= deadline:
                return

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(2 * (os.cpu_count() or 1))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return TileReport("", len(workers), len(found), found.count(False))
