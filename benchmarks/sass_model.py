"""Read machine code of NVIDIA GPUs, and model how many cycles a loop takes on one multiprocessor of an H100.

The model issues one instruction per cycle and quarter of a multiprocessor, with the stall counts and scoreboards that
the compiler wrote into each instruction. Its units: matrix products of 2,048 multiply-adds per cycle, shared by all
warps, 16 exponentials, 64 integer and 128 float operations per cycle. Copies arrive at 40 bytes per cycle, after a
latency. It knows neither the clock nor other multiprocessors. Believe its ratios of two kernels of the same shape, to
about 20%, and none of its times.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton

_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* (0x[0-9a-f]{16}) \*/")
_SECOND_HALF = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")
_JUMP = re.compile(r"\bBRA(?:\.\w+)*\s+.*?(0x[0-9a-f]+)")
_PRODUCT = re.compile(r"(HGMMA|UTCHMMA|HMMA)")
_WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")


class Instruction(NamedTuple):
    """One instruction, with what the compiler says about its timing."""

    at: int
    text: str
    stall: int
    """Cycles until the warp's next instruction."""
    sets: int
    """Scoreboard that its result releases, 7 for none."""
    reads: int
    """Scoreboard that reading its operands releases."""
    waits: int
    """Scoreboards that it waits for, as bits."""

    @property
    def name(self) -> str:
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]


class Machine(NamedTuple):
    """The machine code of a kernel."""

    registers: int
    stack: int
    instructions: list[Instruction]

    def loops(self) -> list[list[Instruction]]:
        """The loops with matrix products, in order. Blocks behind the end that jump back are none."""
        found = []
        for last in self.instructions:
            jump = _JUMP.search(last.text)
            if jump and int(jump[1], 16) < last.at:
                body = [one for one in self.instructions if int(jump[1], 16) <= one.at <= last.at]
                if any(_PRODUCT.match(one.name) for one in body) and not any(one.text == "EXIT" for one in body):
                    found.append(body)
        return found


def machine_code(cubin: bytes) -> Machine:
    """Disassemble a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        code, usage = (
            subprocess.run([str(_TOOL), flag, str(path)], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    lines, found = code.splitlines(), []
    for number, line in enumerate(lines):
        if (first := _LINE.search(line)) and (second := _SECOND_HALF.search(lines[number + 1])):
            bits = int(second[1], 16)
            text = re.sub(r"\s*\?.*$", "", first[2])
            control = (bits >> 41 & 15, bits >> 46 & 7, bits >> 49 & 7, bits >> 52 & 63)
            found.append(Instruction(int(first[1], 16), text, *control))
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return Machine(registers, stack, found)


class Facts(NamedTuple):
    """Counts of a loop."""

    instructions: int
    products: int
    copies: int
    spills: int
    masks: int
    """Instructions that choose by a predicate or test bits."""
    flying: int | None
    """Groups of copies that may be on their way when a step begins: the least of the loop's waits."""


def facts(loop: list[Instruction]) -> Facts:
    names = Counter(one.name.partition(".")[0] for one in loop)
    waits = [int(wait[1], 16) for one in loop if (wait := _WAIT.search(one.text))]
    count = lambda *kinds: sum(names[kind] for kind in kinds)  # noqa: E731
    return Facts(
        len(loop),
        count("HGMMA", "UTCHMMA", "HMMA"),
        count("LDGSTS", "UTMALDG"),
        count("LDL", "STL"),
        count("FSEL", "LOP3", "SHF", "ISETP", "SEL", "R2P", "PRMT", "PLOP3"),
        min(waits) if waits else None,
    )


_KINDS = (
    ("wait for products", r"WARPGROUP\.DEPBAR"),
    ("wait for copies", r"DEPBAR\.LE"),
    ("commit", r"LDGDEPBAR"),
    ("copy", r"LDGSTS"),
    ("barrier", r"BAR\.SYNC"),
    ("product", r"HGMMA"),
    ("matrix", r"HMMA"),
    ("load", r"LDG"),
    ("shared", r"LDS|SHFL"),
    ("special", r"MUFU|F2F\b|F2I|I2F|POPC|FLO"),
    ("store", r"STS|STG|LDL|STL|ATOM|RED|LD\.|ST\.|LDC"),
    ("control", r"WARPGROUP|BRA|NOP|BSYNC|BSSY|WARPSYNC|EXIT|MEMBAR|FENCE|YIELD|CALL|RET|SYNCS|ELECT|UTMALDG"),
    ("uniform", r"U[A-Z]|R2UR|S2UR|VOTEU"),
    ("float", r"FFMA|FMUL|FADD|IMAD|HFMA2|IDP"),
)
_UNITS = {
    "float": ("float", 1, 4),
    "integer": ("integer", 2, 5),
    "special": ("special", 8, 24),
    "uniform": ("uniform", 2, 12),
    "shared": ("memory", 4, 30),
    "store": ("memory", 4, 10),
    "load": ("memory", 4, 300),
    "copy": ("memory", 4, 10),
    "matrix": ("matrix", 8, 33),
}
"""By kind: the unit, the cycles that an instruction keeps it, and those until its result is there."""
_SMALL_LATENCY = 300
_BYTES_PER_CYCLE = 10.0
"""Of a quarter of a multiprocessor."""


def _kind(name: str) -> str:
    return next((kind for kind, words in _KINDS if re.match(words, name)), "integer")


class _Warp:
    """The state of one warp."""

    def __init__(self, number: int) -> None:
        self.place, self.steps, self.ready = 0, 0, 3 * number
        self.boards = [0.0] * 6
        self.groups: list[float] = []
        """When each committed group of copies has arrived."""
        self.copying = 0.0
        self.products: list[float] = []
        """Cycles that are left of each committed group of products."""
        self.open = False
        self.arrived = False


class _Quarter:
    """A quarter of a multiprocessor, and the warps that it runs."""

    def __init__(self, loop: list[Instruction], warps: int, programs: int, latency: int) -> None:
        self.code = [(one, _kind(one.name)) for one in loop]
        self.warps = [_Warp(number) for number in range(warps * programs)]
        self.mates = warps
        self.latency = latency
        self.free = dict.fromkeys(("float", "integer", "special", "uniform", "memory", "matrix"), 0.0)
        self.memory = self.clock = 0.0

    def multiply_until(self, now: float) -> None:
        """Let the warps that have products share the matrix units."""
        while self.clock < now:
            active = [warp for warp in self.warps if warp.products]
            if not active:
                self.clock = now
                return
            step = max(min(now - self.clock, min(warp.products[0] for warp in active) * len(active)), 1e-6)
            for warp in active:
                warp.products[0] -= step / len(active)
                if warp.products[0] <= 1e-6:
                    warp.products.pop(0)
            self.clock += step

    def blocked_until(self, warp: _Warp, one: Instruction, kind: str, now: float) -> float:
        until = max([0.0, *(warp.boards[n] for n in range(6) if one.waits >> n & 1 and warp.boards[n] > now)])
        if kind == "wait for products" and len(warp.products) > int(one.text.split(",")[-1], 16):
            until = max(until, now + 4)
        if kind == "wait for copies":
            late = len(warp.groups) - int(one.text.split(",")[-1], 16)
            until = max([until, *warp.groups[: max(late, 0)]])
        if kind in _UNITS:
            until = max(until, self.free[_UNITS[kind][0]])
        return until

    def issue(self, warp: _Warp, one: Instruction, kind: str, now: float) -> None:
        warp.ready = now + max(1, one.stall)
        end = now + 2.0
        if kind in _UNITS:
            unit, cycles, delay = _UNITS[kind]
            self.free[unit] = now + cycles
            end = now + delay
        if kind == "product":
            cycles = int(re.search(r"64x(\d+)x", one.name)[1]) / 2  # type: ignore[index]
            if warp.open and warp.products:
                warp.products[-1] += cycles
            else:
                warp.products.append(cycles)
            warp.open = "gsb0" not in one.text
            end = now + 4
        elif kind == "copy":
            wide = ".128" in one.name
            self.memory = max(self.memory, now) + (512 if wide else 32) / _BYTES_PER_CYCLE
            warp.copying = max(warp.copying, self.memory + (self.latency if wide else _SMALL_LATENCY))
        elif kind == "commit":
            warp.groups.append(warp.copying)
            warp.copying = 0.0
        elif kind == "wait for copies":
            left = int(one.text.split(",")[-1], 16)
            warp.groups = warp.groups[-left:] if left else []
        if one.sets < 6:
            warp.boards[one.sets] = max(end, now + 1)
        if one.reads < 6:
            warp.boards[one.reads] = max(warp.boards[one.reads], end if kind == "product" else now + 8)

    def meet(self, number: int, now: float, steps: int) -> None:
        """A warp is at a barrier of its program."""
        first = number // self.mates * self.mates
        mates = self.warps[first : first + self.mates]
        self.warps[number].arrived = True
        self.warps[number].ready = 1 << 60
        if all(mate.arrived for mate in mates if mate.steps < steps):
            for mate in mates:
                mate.arrived, mate.ready = False, now + 15


def cycles(loop: list[Instruction], warps: int, programs: int, latency: int, steps: int = 14) -> float:
    """Return the cycles of one step of a loop, of ``programs`` that share a multiprocessor, each of 4 x ``warps``."""
    quarter = _Quarter(loop, warps, programs, latency)
    starts: list[float] = []
    now, turn = 0.0, 0
    while min(warp.steps for warp in quarter.warps) < steps:
        quarter.multiply_until(now)
        later, issued = now + 100_000, False
        for number in range(len(quarter.warps)):
            number = (turn + number) % len(quarter.warps)
            warp = quarter.warps[number]
            if warp.steps >= steps:
                continue
            one, kind = quarter.code[warp.place]
            until = warp.ready if warp.ready > now else quarter.blocked_until(warp, one, kind, now)
            if until > now:
                later = min(later, until)
                continue
            if kind == "barrier":
                quarter.meet(number, now, steps)
            else:
                quarter.issue(warp, one, kind, now)
            issued, turn = True, number + (kind == "barrier")
            warp.place += 1
            if warp.place == len(quarter.code):
                warp.place, warp.steps = 0, warp.steps + 1
                if number == 0:
                    starts.append(now)
            break
        now = now + 1 if issued else max(now + 1, float(int(later)))
    first = len(starts) // 3
    return (starts[-1] - starts[first]) / (len(starts) - 1 - first) / programs
