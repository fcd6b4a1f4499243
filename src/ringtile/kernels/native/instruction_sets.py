"""Instruction sets: their rates, and the set that computes each dtype. The newest is not always the fastest."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class InstructionSet(NamedTuple):
    """One compiled copy of the kernels."""

    number: int
    name: str
    lanes: int
    """Tokens of a tile, in float32, that the kernels compute together, half as many in float64."""

    @property
    def has_tiles(self) -> bool:
        """True if it multiplies in tiles: bfloat16, and other numbers in parts."""
        return self.name in TILE_SETS


class Choice(NamedTuple):
    """The instruction set of each dtype, and why."""

    by_dtype: dict[torch.dtype, InstructionSet]
    reason: str
    """Empty if there was nothing to choose."""
    parts: InstructionSet | None
    """The set that computes float32 by products of two bfloat16 parts, for callers that allow it."""


RATES = ("fma_float32", "fma_float64", "dot_bfloat16", "exp_float32", "exp_float64", "read")
"""Rates per second, in the order of ``ringtile_rate`` in native/ringtile.h: floating-point operations of multiply-adds,
of dot products of bfloat16 pairs, exponentials as the softmax computes them, bytes read from memory."""

Wanted = Sequence[tuple[InstructionSet, str]]
"""Instruction sets, each with one of `RATES`."""

BFLOAT16_SETS = ("avx512_bf16", "amx")
"""Sets that add instructions for bfloat16 only."""

TILE_SETS = ("amx", "amx_emulated")
"""Sets that multiply in tiles. They compute float16, and float32 if they may, as sums of two bfloat16 numbers."""

PART_PRODUCTS = 3
"""Products of bfloat16 for one of numbers in two parts: that of the low parts is left out."""

EMULATED_SETS = ("amx_emulated",)
"""Sets that compute the bits of another one, slowly, for tests. They serve only if they are named."""

WORTHWHILE = 1.2
"""We use dot products of bfloat16 if they do this many times the operations of float32 multiply-adds. Intel's Sapphire
Rapids does half as many with AVX512-BF16, where widening to float32 makes the kernel 1.6 times as fast, and 14 times as
many with AMX. AMD's Zen 4 does twice as many by its documented timings."""


def best_rates(handle: ctypes.CDLL, wanted: Wanted, *, threads: int, seconds: float, samples: int) -> list[float]:
    """Measure rates of a loaded library: the best of some samples, summed over threads, or 0 if a set lacks one."""
    found = [0.0] * len(wanted)
    # We interleave the samples, so that a disturbance does not hit all samples of one rate.
    for _ in range(samples):
        for at, (isa, name) in enumerate(wanted):
            found[at] = max(found[at], handle.ringtile_peak(isa.number, RATES.index(name), threads, seconds))
    return found


def choose(sets: Sequence[InstructionSet], measure: Callable[[Wanted], Sequence[float]]) -> Choice:
    """Choose among the instruction sets that this processor runs, slowest first. ``measure`` returns rates."""
    general = [isa for isa in sets if isa.name not in BFLOAT16_SETS]
    best = (general or sets)[-1]
    by_dtype = dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), best)
    if not general or len(general) == len(sets):
        return Choice(by_dtype, "", best if best.has_tiles else None)
    candidates = [isa for isa in sets if isa.name in BFLOAT16_SETS]
    *dots, multiply_adds = measure([*((isa, "dot_bfloat16") for isa in candidates), (best, "fma_float32")])
    rate, candidate = max(zip(dots, candidates, strict=True), key=lambda pair: pair[0])
    if rate >= WORTHWHILE * multiply_adds:
        by_dtype[torch.bfloat16] = candidate
    reason = f"{candidate.name} runs at {rate / multiply_adds:.2f} times the float32 rate"
    least = PART_PRODUCTS * WORTHWHILE * multiply_adds
    parts = next((isa for isa, dot in zip(candidates, dots, strict=True) if isa.has_tiles and dot >= least), None)
    if parts:
        by_dtype[torch.float16] = parts
    return Choice(by_dtype, reason, parts)
