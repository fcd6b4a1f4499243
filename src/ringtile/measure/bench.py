"""`ringtile bench`: sparse attention and its peers on the same problems, correctness first, then time, interleaved."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.analysis.units import count
from ringtile.kernels.native.peak import peak_rates
from ringtile.kernels.reference import attention_rows
from ringtile.kernels.select import NAMES
from ringtile.layout.density import with_density
from ringtile.measure.machine import commit, machine_facts, versions
from ringtile.measure.memory import Peaks, peak_memory
from ringtile.measure.peers import Attention, Case, Peer, all_peers
from ringtile.measure.progress import Progress
from ringtile.measure.record import (
    BOTH,
    DENSE,
    DIRECTIONS,
    FORWARD,
    OURS,
    Record,
    Row,
    break_even,
    slower_rows,
    write_whole,
)
from ringtile.measure.roofline import limit_ms, passes_of
from ringtile.measure.suites import SUITES, Cell, suite
from ringtile.patterns import Pattern, parse

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATTERNS = ("causal & window(256, 0)", "longformer(128, 16)", "bigbird")
TOKENS = (26, 64, 128, 200, 256, 512, 1024, 4096)

CHECKED_ROWS = 32
ERROR_FACTOR = 3.0
"""A result is wrong where its error is so many times torch's own in the same dtype, rows and mask."""
ERROR_FLOOR, ERROR_FLOORS = 1e-6, {torch.float64: 1e-12}
"""An error below this is right whatever torch's own is; by dtype where it differs."""

CLOCK, CLOCK_SECONDS = "fma_float32", 0.004
"""What is measured between rounds, and for how long: how much of the processor was free."""
MIN_ROUNDS, MAX_ROUNDS = 3, 200
SAMPLE_SECONDS = 1e-3
"""Shorter calls are repeated until a sample takes this long."""
SLOW_SECONDS = 3.0
"""A peer other than dense whose call takes longer is left out."""
MEMORY_SECONDS = 1.0
"""The memory of others is measured where a call takes no longer, for it costs one more."""


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Relative L2 error; absolute where ``exact`` is zero, infinite where ``actual`` is not finite."""
    difference = (actual.double() - exact).norm().item()
    error = difference / (exact.norm().item() or 1.0)
    return math.inf if math.isnan(error) else error


class _Exact:
    """The inputs of a case, and float64 results to compare with.

    Outputs are compared in sampled rows. The output's gradient is zero in all other rows, so that the gradients of
    q, k and v, compared everywhere, are those of the sampled rows alone and cost no more.
    """

    def __init__(self, case: Case, seed: int, *, trains: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        query_shape = (case.batch, case.heads, case.queries, case.head_dim)
        key_shape = (case.batch, case.key_heads, case.n_tokens, case.head_dim)
        self.case, self.trains = case, trains
        q, k, v = (
            torch.randn(shape, generator=generator).to(case.device, case.dtype)
            for shape in (query_shape, key_shape, key_shape)
        )
        self.inputs = q, k, v
        rows = torch.randperm(case.queries, generator=generator)[: CHECKED_ROWS - 2]
        self.rows = torch.cat([rows, torch.tensor([0, case.queries - 1])]).unique().to(case.device)
        self.grad = self.rows_grad = torch.empty(0)
        if trains:
            self.grad = torch.randn(query_shape, generator=generator).to(case.device, case.dtype)
            self.rows_grad = torch.zeros_like(self.grad)
            self.rows_grad[:, :, self.rows] = self.grad[:, :, self.rows]
        self._results: dict[Pattern, tuple[list[Tensor], tuple[float, float]]] = {}

    def errors(self, pattern: Pattern, out: Tensor, grads: Sequence[Tensor]) -> tuple[float, float]:
        """The worst relative error of an output and, where given, its gradients; and the bound that it must keep."""
        if pattern not in self._results:
            self._results[pattern] = self._compute(pattern)
        exact, bounds = self._results[pattern]
        got = [out[:, :, self.rows], *grads]
        worst = max(relative_error(mine, theirs) for mine, theirs in zip(got, exact[: len(got)], strict=True))
        return worst, bounds[len(got) > 1]

    def _compute(self, pattern: Pattern) -> tuple[list[Tensor], tuple[float, float]]:
        q, k, v = (x.detach().double().requires_grad_(self.trains) for x in self.inputs)
        out, lse = attention_rows(q, k, v, pattern, self.rows)
        exact = self._results_of(out, (q, k, v), torch.ones_like(lse, dtype=torch.bool))
        # Torch's own error in the same dtype; its rows that keep nothing are not what is measured.
        q, k, v = (x.detach().requires_grad_(self.trains) for x in self.inputs)
        mask, gqa = self.kept(pattern, self.rows), self.case.key_heads != self.case.heads
        out = F.scaled_dot_product_attention(q[:, :, self.rows], k, v, attn_mask=mask, enable_gqa=gqa)
        got = self._results_of(out, (q, k, v), lse > -torch.inf)
        theirs = [relative_error(mine, right) for mine, right in zip(got, exact, strict=True)]
        # An infinite one would let everything pass.
        theirs = [ERROR_FACTOR * error if math.isfinite(error) else 0.0 for error in theirs]
        floor = ERROR_FLOORS.get(self.case.dtype, ERROR_FLOOR)
        return exact, (max(floor, theirs[0]), max(floor, *theirs))

    def _results_of(self, out: Tensor, leaves: Sequence[Tensor], some: Tensor) -> list[Tensor]:
        """The sampled rows of an output, zero where they are not among ``some``; and where it trains the gradients."""
        out = torch.where(some.unsqueeze(-1), out, 0)
        if not self.trains:
            return [out]
        grad = torch.where(some.unsqueeze(-1), self.rows_grad[:, :, self.rows], 0).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def kept(self, pattern: Pattern, rows: Tensor) -> Tensor:
        """Which keys some queries keep, bool ``[B or 1, H, R, N]``."""
        heads, keys = (torch.arange(size, device=self.case.device) for size in (self.case.heads, self.case.n_tokens))
        query = rows[:, None] + self.case.n_tokens - self.case.queries
        batch = range(pattern.batch_size or 1)
        each = [pattern if pattern.batch_size is None else pattern.batch_row(b) for b in batch]
        kept = [one.allowed(heads[:, None, None], query, keys) for one in each]
        return torch.stack(kept).expand(-1, len(heads), len(rows), len(keys))

    def holes(self, out: Tensor) -> str:
        """What is wrong with a whole output of ours, empty where nothing is: numbers that are none, zeros too many."""
        if not out.isfinite().all():
            return "wrong: its output is not finite"
        zero = (out == 0).all(-1)
        rows = zero.flatten(0, 1).any(0).nonzero().squeeze(1)[:CHECKED_ROWS]
        if (zero[:, :, rows] & self.kept(self.case.pattern, rows).any(-1)).any():
            return "wrong: zeros in rows that keep keys"
        return ""

    def run(self, attention: Attention, direction: str, grad: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """One call: the output, and the gradients where the direction asks for them."""
        if direction == FORWARD:
            return attention(*self.inputs), ()
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out = attention(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves, grad)

    def peaks(self, attention: Attention, direction: str) -> Peaks:
        """Peak memory of one call."""
        if direction == FORWARD:
            return peak_memory(lambda: attention(*self.inputs), None, self.case.device)
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        return peak_memory(
            lambda: attention(*leaves), lambda out: torch.autograd.grad(out, leaves, self.grad), self.case.device
        )


@dataclass
class _Entrant:
    """A peer in one case and direction: what became of it."""

    peer: Peer
    attention: Attention | None = None
    error: float | None = None
    bound: float | None = None
    peaks: Peaks | None = None
    reason: str = ""
    seconds: list[float] = field(default_factory=list)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _admit(entrant: _Entrant, exact: _Exact, direction: str, prepared: dict[str, Attention | str]) -> None:
    """Prepare a peer and compare its result; what keeps it from being timed goes into its reason."""
    case, peer = exact.case, entrant.peer
    if reasons := peer.unsupported(case):
        entrant.reason = "; ".join(reasons)
        return
    if peer.name not in prepared:
        try:
            prepared[peer.name] = peer.prepare(case)
        except RuntimeError as error:
            prepared[peer.name] = f"cannot be prepared: {_first_line(error)}"
    attention = prepared[peer.name]
    if isinstance(attention, str):
        entrant.reason = attention
        return
    try:
        out, grads = exact.run(attention, direction, exact.rows_grad)
        entrant.error, entrant.bound = exact.errors(peer.computes(case), out, grads)
        if entrant.error > entrant.bound:
            entrant.reason = f"wrong: error {entrant.error:.1e}, over {entrant.bound:.1e}"
        elif peer.name == OURS:
            entrant.reason = exact.holes(out)
        if entrant.reason:
            return
    except RuntimeError as error:
        what = "run" if direction == FORWARD else "train"
        where = "a CPU" if case.device.type == "cpu" else f"{case.device}"
        entrant.reason = f"cannot {what} on {where}: {_first_line(error)}"
        return
    entrant.attention = attention


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats


def _time(
    entrants: list[_Entrant], exact: _Exact, direction: str, seconds: float, rates: Mapping[str, float]
) -> float | None:
    """Call the admitted in turn, round after round, each round starting with another one. The clock of these rounds
    (`Row.clock`), where the rates of the run are known."""
    device, calls, repeats, ticks = exact.case.device, [], [], []
    for entrant in entrants:
        if entrant.attention is None:
            continue
        call = partial(exact.run, entrant.attention, direction, exact.grad)
        took = _seconds(call, 1, device)
        if took > SLOW_SECONDS and entrant.peer.name not in (OURS, DENSE):
            entrant.reason = f"one call took {took:.1f} s, timed up to {SLOW_SECONDS:.0f} s"
            continue
        if took <= MEMORY_SECONDS or entrant.peer.name == OURS:
            entrant.peaks = exact.peaks(entrant.attention, direction)
        calls.append((entrant, call))
        repeats.append(max(1, min(1000, round(SAMPLE_SECONDS / max(took, 1e-9)))))
    began, rounds = time.perf_counter(), 0
    while calls and (rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - began < seconds)):
        for place in range(len(calls)):
            number = (place + rounds) % len(calls)
            entrant, call = calls[number]
            entrant.seconds.append(_seconds(call, repeats[number], device))
        if CLOCK in rates:
            ticks.append(peak_rates(seconds=CLOCK_SECONDS, samples=1, names=[CLOCK])[CLOCK])
        rounds += 1
    return statistics.median(ticks) / rates[CLOCK] if ticks else None


def _blank(case: Case, direction: str, peer: str) -> Row:
    """A row of which nothing is known but what was asked for."""
    return Row(
        asked=case.asked,
        pattern=repr(case.pattern),
        n_tokens=case.n_tokens,
        batch=case.batch,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=str(case.dtype).removeprefix("torch."),
        device=str(case.device),
        block=case.block,
        direction=direction,
        peer=peer,
        density=0.0,
        tile_density=0.0,
        ideal=None,
        kv_heads=case.kv_heads,
        n_queries=case.n_queries,
        threads=case.threads,
    )


def _row(case: Case, direction: str, entrant: _Entrant, rates: Mapping[str, float], clock: float | None) -> Row:
    index, passes = case.index, passes_of(case, direction, entrant.peer)
    # What others take of the processor, they take of its vector units.
    paced = {name: rate if name == "read" or clock is None else rate * clock for name, rate in rates.items()}
    row = replace(
        _blank(case, direction, entrant.peer.name),
        density=index.density,
        tile_density=index.tile_density,
        ideal=1 / index.density if index.density else None,
        error=entrant.error if entrant.error is not None and math.isfinite(entrant.error) else None,
        error_bound=entrant.bound,
        peak_forward_bytes=None if entrant.peaks is None else entrant.peaks.forward,
        peak_backward_bytes=None if entrant.peaks is None else entrant.peaks.backward,
        reason=entrant.reason,
        operations=sum(work.operations for work in passes) if passes else None,
        limit_ms=limit_ms(passes, paced),
        clock=clock,
    )
    if not entrant.seconds:
        return row
    fifths = statistics.quantiles(entrant.seconds, n=5, method="inclusive")
    return replace(
        row,
        median_ms=1e3 * statistics.median(entrant.seconds),
        low_ms=1e3 * fifths[0],
        high_ms=1e3 * fifths[-1],
        rounds=len(entrant.seconds),
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads for a while."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def measure(
    case: Case,
    peers: Sequence[Peer],
    *,
    directions: Sequence[str] = DIRECTIONS,
    seconds: float = 1.0,
    seed: int = 0,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[list[Row]]:
    """The rows of one case, one list a direction: every peer's, with times or with the reason why it has none.

    Nobody is timed where ours is wrong. ``seconds`` is the time that the rounds of a direction take, three at least;
    ``rates`` are the processor's (`peak_rates`), for the limits.
    """
    exact = _Exact(case, seed, trains=BOTH in directions)
    prepared: dict[str, Attention | str] = {}
    for direction in directions:
        entrants, clock = [_Entrant(peer) for peer in peers], None
        with _threads(case.threads):
            for entrant in entrants:
                _admit(entrant, exact, direction, prepared)
            red = [entrant.reason for entrant in entrants if entrant.peer.name == OURS and entrant.attention is None]
            if red:
                for entrant in entrants:
                    entrant.reason = entrant.reason or f"not timed, since {OURS} is not right here: {red[0]}"
            else:
                clock = _time(entrants, exact, direction, seconds, rates)
            rows = [_row(case, direction, entrant, rates, clock) for entrant in entrants]
        dense = next((row.median_ms for row in rows if row.peer == DENSE), None)
        yield [
            replace(row, speedup=dense / row.median_ms) if dense is not None and row.median_ms is not None else row
            for row in rows
        ]


@dataclass(frozen=True)
class Task:
    """One case, who is measured on it, and in which directions."""

    case: Case
    peers: tuple[Peer, ...]
    directions: tuple[str, ...] = DIRECTIONS

    def rows_in(self, rows: Sequence[Row]) -> list[Row]:
        """Its rows among others, in order; none where one is missing."""
        found = {(row.asked, row.problem): row for row in rows}
        blanks = [_blank(self.case, direction, peer.name) for direction in self.directions for peer in self.peers]
        mine = [found.get((blank.asked, blank.problem)) for blank in blanks]
        return [row for row in mine if row is not None] if None not in mine else []


def run_bench(
    tasks: Sequence[Task],
    *,
    seconds: float = 1.0,
    seed: int = 0,
    before: Sequence[Row] = (),
    report: Callable[[list[Row]], None] = lambda rows: None,
    save: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Measure all cases; an interrupt ends it with what was measured. ``report`` sees the rows of each case, and
    ``save`` the record so far, marked as interrupted.

    ``seconds`` is how long the rounds of one case and direction take. Cases that are whole ``before`` are not
    measured again.
    """
    rows: list[Row] = []
    facts = (seed, seconds, commit(), versions(), machine_facts())
    counts = {task.case.threads or torch.get_num_threads() for task in tasks}
    peaks = {str(count): peak_rates(threads=count) for count in sorted(counts)}
    known = [task.rows_in(before) for task in tasks]
    # A call's work grows with the square of the length, and every case has work of its own.
    works = [0.0 if old else 1.0 + (task.case.queries / 2048) ** 2 for task, old in zip(tasks, known, strict=True)]
    progress, began, interrupted = Progress(), time.monotonic(), False
    progress.begin("bench", len(tasks), "cases")
    try:
        for done, (task, old) in enumerate(zip(tasks, known, strict=True)):
            if old:
                rows += old
                continue
            case, so_far = task.case, sum(works[:done])
            rest = sum(works[done:]) / so_far * (time.monotonic() - began) if so_far else None
            progress.update(done, f"{case.asked}, N {case.n_tokens}", seconds_left=rest)
            rates = peaks[str(case.threads or torch.get_num_threads())]
            found: list[Row] = []
            try:
                options: dict[str, Any] = {"seconds": seconds, "seed": seed, "rates": rates}
                for some in measure(case, task.peers, directions=task.directions, **options):
                    found += some
            finally:
                progress.clear()
                rows += found
                if found:
                    report(found)
            save(Record(*facts, tuple(rows), True, peaks))
    except KeyboardInterrupt:
        interrupted = True
    return Record(*facts, tuple(rows), interrupted, peaks)


def wrong_rows(record: Record) -> list[Row]:
    """Our rows that were not timed: results over their bound, or none at all."""
    return [row for row in record.rows if row.peer == OURS and row.median_ms is None]


def _table(rows: list[Row]) -> Iterator[str]:
    """The rows of one case as text."""
    first = rows[0]
    heads = f"{first.heads}" if first.kv_heads is None else f"{first.heads}:{first.kv_heads}"
    parts = {"queries": first.n_queries, "threads": first.threads, "block": None if first.block == 128 else first.block}
    special = "".join(f"{name} {value}  " for name, value in parts.items() if value is not None)
    yield (
        f"{first.pattern}  N {first.n_tokens:,}  B{first.batch} H{heads} D{first.head_dim} {first.dtype}  {special}"
        f"density {first.density:.1%}, of tiles {first.tile_density:.1%}"
        + ("" if first.ideal is None else f", ideal {first.ideal:.1f}x")
    )
    for row in rows:
        if row.median_ms is None:
            yield f"  {row.peer:<13}{row.direction:<17}{row.reason}"
            continue
        ratio = "" if row.speedup is None else f"{row.speedup:.2f}x"
        peaks = [peak for peak in (row.peak_forward_bytes, row.peak_backward_bytes) if peak is not None]
        memory = f"  {' + '.join(f'{peak / 2**20:.1f}' for peak in peaks)} MiB" if peaks else ""
        limit = "" if row.of_limit is None else f"  {row.of_limit:.0%} of the limit"
        yield (
            f"  {row.peer:<13}{row.direction:<17}{row.median_ms:>10.3f} ms  [{row.low_ms:.3f}, {row.high_ms:.3f}]"
            f"{ratio:>9}  error {row.error:.1e}{memory}{limit}"
        )


def _break_even_lines(record: Record) -> Iterator[str]:
    found = break_even(record.rows)
    if found:
        yield "Break-even (smallest N from which ringtile is not slower than dense):"
    for row in found:
        at = f"N {row.n_tokens:,}" if row.n_tokens is not None else f"not up to N {row.measured[-1]:,}"
        yield f"  {row.asked:<40} {row.dtype:<9} {row.direction:<17} {at}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ringtile bench``."""
    others = [peer.name for peer in all_peers() if peer.name not in (OURS, DENSE)]
    add = parser.add_argument
    add("patterns", nargs="*", metavar="PATTERN", default=PATTERNS, help=f"default: {'; '.join(PATTERNS)}")
    add("--tokens", type=count, nargs="+", default=TOKENS, metavar="N", help=f"default: {' '.join(map(str, TOKENS))}")
    add("--density", type=float, nargs="+", metavar="P", help="set each pattern's free parameter to reach these")
    add("--batch", type=int, default=1, metavar="B")
    add("--heads", type=int, default=4, metavar="H", help="default 4")
    add("--head-dim", type=int, default=64, metavar="D")
    add("--dtype", nargs="+", default=["float32"], choices=DTYPES)
    add("--direction", nargs="+", default=DIRECTIONS, choices=DIRECTIONS)
    add("--peers", nargs="*", default=others, choices=others, metavar="NAME", help=f"beside dense: {', '.join(others)}")
    add("--backend", choices=NAMES, help="of ringtile; default: the one it takes by itself")
    add("--device", default="cpu", metavar="DEVICE")
    add("--seconds", type=float, default=0.3, metavar="S", help="of rounds for each case and direction; default 0.3")
    add("--seed", type=int, default=0)
    add("--suite", choices=SUITES, help="the cases of a record of docs/benchmarks.md, instead of the arguments above")
    add("--json", metavar="PATH", help="write the record, - for standard output instead of the table")
    add("--resume", action="store_true", help="with --json PATH: keep the cases that the file has, measure the others")
    add("--csv", type=Path, metavar="PATH", help="write the rows")
    add("--against", type=Path, metavar="RECORD", help="fail where ours became slower, as a ratio to dense")
    add("--max-slowdown", type=float, default=1.15, metavar="X", help="with --against; default 1.15")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device: {_first_line(error)}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a device that is here, got {name!r}")
    return device


def _cases(args: argparse.Namespace) -> list[Case]:
    for name in ("batch", "heads", "head_dim"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected a positive number, got {value}")
    if args.seconds < 0 or args.max_slowdown < 1:
        raise ValueError(f"expected --seconds >= 0 and --max-slowdown >= 1, got {args.seconds}, {args.max_slowdown}")
    device = _device(args.device)
    cases = []
    for text in args.patterns:
        asked = parse(text)
        heads = asked.n_heads or args.heads
        for density in args.density or [None]:
            for dtype in args.dtype:
                for n_tokens in sorted(args.tokens):
                    name, pattern = text, asked
                    if density is not None:
                        name = f"{text} at {density:g}"
                        pattern = with_density(asked, density, n_tokens, heads=heads).pattern
                    cases.append(Case(name, pattern, n_tokens, args.batch, heads, args.head_dim, DTYPES[dtype], device))
    return cases


def _tasks(args: argparse.Namespace) -> list[Task]:
    if args.suite is None:
        peers = tuple(peer for peer in all_peers(args.backend) if peer.name in (OURS, DENSE, *args.peers))
        return [Task(case, peers, tuple(args.direction)) for case in _cases(args)]
    if args.patterns != PATTERNS:
        raise ValueError(f"--suite {args.suite} has patterns of its own, got {args.patterns}")
    cells: list[Cell] = suite(args.suite)
    every = all_peers(args.backend)
    return [
        Task(cell.case, tuple(peer for peer in every if peer.name in (OURS, *cell.peers)), cell.directions)
        for cell in cells
    ]


def _read(option: str, path: Path) -> Record:
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{option}: {str(path)!r}: {error}") from None


def _rows_to_keep(path: Path | None, args: argparse.Namespace) -> tuple[Row, ...]:
    """What `--resume` finds; ValueError where it was measured otherwise."""
    if not args.resume:
        return ()
    if path is None:
        raise ValueError("--resume: expected --json PATH beside it")
    if not path.exists():
        return ()
    record = _read("--resume", path)
    here = {"seed": args.seed, "seconds": args.seconds, "commit": commit(), "versions": versions()}
    here["machine"] = machine_facts()
    for name, fact in here.items():
        if getattr(record, name) != fact:
            raise ValueError(f"--resume: {str(path)!r} has {name} {getattr(record, name)}, here it is {fact}")
    return record.rows


def run(args: argparse.Namespace) -> int:
    """Measure, print and write: 0; 1 where ours is wrong or slower than ``--against`` allows; 130 if interrupted.

    Raises ValueError for arguments that cannot be, before anything is measured.
    """
    tasks = _tasks(args)
    before = None if args.against is None else _read("--against", args.against)
    json_path = None if args.json in (None, "-") else Path(args.json)
    for path in (args.csv, json_path):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"expected a file in an existing folder, got {str(path)!r}")
    kept = _rows_to_keep(json_path, args)

    def report(rows: list[Row]) -> None:
        if args.json != "-":
            print(*_table(rows), sep="\n", flush=True)

    def save(record: Record) -> None:
        if json_path is not None:
            write_whole(json_path, record.to_json())

    record = run_bench(tasks, seconds=args.seconds, seed=args.seed, before=kept, report=report, save=save)
    if args.json == "-":
        print(record.to_json())
    else:
        print(*_break_even_lines(record), sep="\n")
        save(record)
    if args.csv is not None:
        write_whole(args.csv, record.to_csv())
    complaints = [f"{row.pattern}, N {row.n_tokens}, {row.direction}: {row.reason}" for row in wrong_rows(record)]
    if before is not None:
        complaints += slower_rows(record, before, args.max_slowdown)
    for complaint in complaints:
        print(f"ringtile bench: {complaint}", file=sys.stderr)
    if record.interrupted:
        return 130
    return 1 if complaints else 0
