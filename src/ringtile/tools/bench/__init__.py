"""`ringtile bench`: sparse attention and its baselines on the same problems, correctness first, then time."""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ringtile.index.density import with_density
from ringtile.kernels.native.library import peak_rates
from ringtile.kernels.select import NAMES
from ringtile.patterns import parse
from ringtile.tools.bench.exact import Exact
from ringtile.tools.bench.peers import Attention, Case, Peer, Task, all_peers
from ringtile.tools.bench.roofline import limit_ms, passes_of
from ringtile.tools.bench.rows import Record, Row, break_even, slower_rows
from ringtile.tools.machine import busy_warning, origin
from ringtile.tools.progress import Progress
from ringtile.tools.record import BOTH, DENSE, DIRECTIONS, DTYPES, FORWARD, OURS, write_whole
from ringtile.tools.timing import interleaved, seconds_of
from ringtile.tools.units import count, first_line

PATTERNS = ("causal & window(256, 0)", "longformer(128, 16)", "bigbird")
TOKENS = (26, 64, 128, 200, 256, 512, 1024, 4096)
"""What ``ringtile bench`` measures by default."""
CLOCK, CLOCK_SECONDS = "fma_float32", 0.004
"""The rate measured between rounds, and for how long: it tells how much of the processor was free."""
MIN_ROUNDS = 3
SAMPLE_SECONDS = 1e-3
"""Shorter calls are repeated until a sample takes this long."""
SLOW_SECONDS = 3.0
"""A baseline other than dense is left out if its call takes longer."""
MEMORY_SECONDS = 1.0
"""The memory of a baseline, which costs one more call, is measured if a call takes no longer."""


def blank_row(case: Case, direction: str, peer: str) -> Row:
    """Return a row without results. It builds no index."""
    shared = {f.name for f in fields(Row)} & {f.name for f in fields(Case)}
    sizes = {name: getattr(case, name) for name in shared}
    sizes |= {"pattern": case.pattern.text or case.asked, "device": str(case.device)}
    sizes["dtype"] = str(case.dtype).removeprefix("torch.")
    return Row(**sizes, direction=direction, peer=peer, density=0.0, tile_density=0.0, ideal=None)


def _admit(peer: Peer, exact: Exact, direction: str, prepared: dict[str, Attention | str]) -> Row:
    """Prepare a peer and check its result. A row with a reason must not be timed."""
    case, density = exact.case, exact.case.index.density
    row = blank_row(case, direction, peer.name)
    row = replace(row, density=density, tile_density=case.index.tile_density, ideal=1 / density if density else None)
    # Both directions use what a peer prepares, because a compilation can take a minute.
    if peer.name not in prepared:
        try:
            prepared[peer.name] = "; ".join(peer.unsupported(case)) or peer.prepare(case)
        except RuntimeError as failure:
            prepared[peer.name] = f"cannot be prepared: {first_line(failure)}"
    attention = prepared[peer.name]
    if isinstance(attention, str):
        return replace(row, reason=attention)
    try:
        out, grads = exact.run(attention, direction, exact.rows_grad)
    except RuntimeError as failure:
        device = "a CPU" if case.device.type == "cpu" else f"{case.device}"
        does = "run" if direction == FORWARD else "train"
        return replace(row, reason=f"cannot {does} on {device}: {first_line(failure)}")
    error, bound = max(exact.errors(peer.computes(case), out, grads)), exact.bound(peer.computes(case), direction)
    reason = f"wrong: error {error:.1e}, over {bound:.1e}" if error > bound else ""
    if not reason and peer.name == OURS:
        reason = exact.holes(out)
    return replace(row, error=error if math.isfinite(error) else None, error_bound=bound, reason=reason)


def _calls_of(
    rows: list[Row], exact: Exact, prepared: Mapping[str, Any], slow_seconds: float
) -> dict[str, Callable[[], float]]:
    """Return a sample of each row's time, by peer, and put the peak memory or the reason of a slow baseline into it."""
    device, samples = exact.case.device, dict[str, Callable[[], float]]()
    for number, row in enumerate(rows):
        if row.reason:
            continue
        attention = prepared[row.peer]
        call = partial(exact.run, attention, row.direction, exact.grad)
        took = seconds_of(call, 1, device)
        if took > slow_seconds and row.peer not in (OURS, DENSE):
            rows[number] = replace(row, reason=f"one call took {took:.1f} s, timed up to {slow_seconds:.0f} s")
            continue
        if took <= MEMORY_SECONDS or row.peer == OURS:
            peaks = exact.peaks(attention, row.direction)
            rows[number] = replace(row, peak_forward_bytes=peaks.forward, peak_backward_bytes=peaks.backward)
        repeats = max(1, min(1000, round(SAMPLE_SECONDS / max(took, 1e-9))))
        samples[row.peer] = partial(seconds_of, call, repeats, device)
    return samples


def _figures(case: Case, peer: Peer, row: Row, seconds: Sequence[float], rates: Mapping[str, float]) -> Row:
    """Return the row with the work of the call, its limit at these rates and, if it was timed, its times."""
    passes = passes_of(case, row.direction, peer)
    operations = sum(work.operations for work in passes) if passes else None
    row = replace(row, operations=operations, limit_ms=limit_ms(passes, rates))
    if not (times := [1e3 * each for each in seconds]):
        return row
    # Quantiles need two values, and those of a value twice are the value.
    low, *_, high = statistics.quantiles(times * 2 if len(times) == 1 else times, n=5, method="inclusive")
    return replace(row, median_ms=statistics.median(times), low_ms=low, high_ms=high, rounds=len(times))


def measure(
    case: Case,
    peers: Sequence[Peer],
    *,
    directions: Sequence[str] = DIRECTIONS,
    seconds: float = 1.0,
    rounds: int = MIN_ROUNDS,
    slow_seconds: float = SLOW_SECONDS,
    seed: int = 0,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[list[Row]]:
    """Measure one case, and yield the rows of all peers for each direction. None is timed if ringtile is wrong."""
    exact = Exact(case, seed, trains=BOTH in directions)
    prepared: dict[str, Attention | str] = {}
    for direction in directions:
        ticks: list[float] = []

        def tick(into: list[float] = ticks) -> None:
            if CLOCK in rates:
                into.append(peak_rates(seconds=CLOCK_SECONDS, samples=1, names=[CLOCK])[CLOCK])

        threads = torch.get_num_threads()
        torch.set_num_threads(case.threads or threads)
        try:
            rows = [_admit(peer, exact, direction, prepared) for peer in peers]
            if wrong := [row.reason for row in rows if row.peer == OURS and row.reason]:
                told = f"not timed, because {OURS} is not right here: {wrong[0]}"
                rows = [replace(row, reason=row.reason or told) for row in rows]
            samples = _calls_of(rows, exact, prepared, slow_seconds)
            found = interleaved(samples, rounds, seconds=seconds, after_round=tick)
            clock = statistics.median(ticks) / rates[CLOCK] if ticks else None
            # Other processes take a share of the vector units, but not of the memory bandwidth.
            paced = {name: rate if name == "read" else rate * (clock or 1.0) for name, rate in rates.items()}
            rows = [
                replace(_figures(case, peer, row, found.get(row.peer, ()), paced), clock=clock)
                for peer, row in zip(peers, rows, strict=True)
            ]
        finally:
            torch.set_num_threads(threads)
        dense = next((row.median_ms for row in rows if row.peer == DENSE), None)
        yield [replace(row, speedup=dense / row.median_ms) if dense and row.median_ms else row for row in rows]


def rows_in(task: Task, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a task among others, in order, or none if one is missing."""
    found = {(row.asked, row.problem): row for row in rows}
    blanks = [blank_row(task.case, direction, peer.name) for direction in task.directions for peer in task.peers]
    mine = [found.get((blank.asked, blank.problem)) for blank in blanks]
    return [row for row in mine if row is not None] if None not in mine else []


def run_bench(
    tasks: Sequence[Task],
    *,
    seconds: float = 1.0,
    seed: int = 0,
    command: str | None = None,
    before: Sequence[Row] = (),
    report: Callable[[list[Row]], None] = lambda rows: None,
    save: Callable[[Record], None] = lambda record: None,
    progress: Progress | None = None,
) -> Record:
    """Measure all tasks but those that are whole in ``before``. Ctrl-C ends it with the rows so far."""
    counts = {task.case.threads or torch.get_num_threads() for task in tasks}
    # The warning is about other processes, so look at the load before this one computes.
    record = Record.here(command, interrupted=True, seed=seed, seconds=seconds, warning=busy_warning())
    peaks = {str(number): peak_rates(threads=number) for number in sorted(counts)}
    known = [rows_in(task, before) for task in tasks]
    waiting = [number for number, old in enumerate(known) if not old]
    record = replace(record, peaks=peaks, rows=tuple(chain(*known)))

    def name(number: int) -> str:
        return f"{tasks[number].case.asked}, N {tasks[number].case.n_tokens:,}"

    def cost(number: int) -> float:
        # The work of a call grows with the square of the length, and every case has a constant cost.
        return len(tasks[number].directions) * (0.1 + seconds) * (1.0 + (tasks[number].case.queries / 2048) ** 2)

    try:
        for number in (progress or Progress()).through(waiting, name, cost, done=len(tasks) - len(waiting)):
            task = tasks[number]
            rates = peaks[str(task.case.threads or torch.get_num_threads())]
            measured = measure(
                task.case, task.peers, directions=task.directions, seconds=seconds, seed=seed, rates=rates
            )
            try:
                for rows in measured:
                    known[number] += rows
            finally:
                record = replace(record, rows=tuple(chain(*known)))
                if known[number]:
                    report(known[number])
            save(record)
    except KeyboardInterrupt:
        return record
    return replace(record, interrupted=False)


def _table(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        f"{first.pattern}  N {first.n_tokens:,}  B{first.batch} {first.sizes}  "
        f"density {first.density:.1%}, of tiles {first.tile_density:.1%}"
        + ("" if first.ideal is None else f", ideal {first.ideal:.1f}x")
    ]
    for row in rows:
        if row.median_ms is None:
            lines.append(f"  {row.peer:<13}{row.direction:<17}{row.reason}")
            continue
        ratio = "" if row.speedup is None else f"{row.speedup:.2f}x"
        memory = f"  {row.memory}" if row.memory else ""
        limit = "" if row.of_limit is None else f"  {row.of_limit:.0%} of the limit"
        lines.append(
            f"  {row.peer:<13}{row.direction:<17}{row.median_ms:>10.3f} ms  [{row.low_ms:.3f}, {row.high_ms:.3f}]"
            f"{ratio:>9}  error {row.error:.1e}{memory}{limit}" + "".join(f"  ! {doubt}" for doubt in row.doubts)
        )
    return "\n".join(lines)


def _break_even_lines(record: Record) -> Iterator[str]:
    found = break_even(record.rows)
    if found:
        yield "Break-even (the smallest N from which ringtile is not slower than dense):"
    for row in found:
        at = f"N {row.n_tokens:,}" if row.n_tokens is not None else f"not up to N {row.measured[-1]:,}"
        yield f"  {row.asked:<40} {row.dtype:<9} {row.direction:<17} {at}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    others = [peer.name for peer in all_peers() if peer.name not in (OURS, DENSE)]
    add = parser.add_argument
    add("patterns", nargs="*", metavar="PATTERN", default=PATTERNS, help=f"patterns (default: {'; '.join(PATTERNS)})")
    lengths = " ".join(map(str, TOKENS))
    add("--tokens", type=count, nargs="+", default=TOKENS, metavar="N", help=f"sequence lengths (default: {lengths})")
    add("--density", type=float, nargs="+", metavar="P", help="set each pattern's free parameter to reach these")
    add("--batch", type=count, default=1, metavar="B", help="batch size (default: 1)")
    add("--heads", type=count, default=4, metavar="H", help="number of heads (default: 4)")
    add("--head-dim", type=count, default=64, metavar="D", help="head dim (default: 64)")
    add("--dtype", nargs="+", default=["float32"], choices=DTYPES, help="dtypes (default: float32)")
    add("--direction", nargs="+", default=DIRECTIONS, choices=DIRECTIONS, help="directions (default: both)")
    names = f"besides dense: {', '.join(others)}"
    add("--peers", nargs="*", default=others, choices=others, metavar="NAME", help=names)
    add("--device", default="cpu", metavar="DEVICE", help="device (default: cpu)")
    add_record_arguments(parser)


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that do not choose cases."""
    add = parser.add_argument
    add("--backend", choices=NAMES, help="backend of ringtile (default: automatic)")
    rounds = "time to measure each case and direction (default: 0.3)"
    add("--seconds", type=float, default=0.3, metavar="S", help=rounds)
    add("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    add("--json", metavar="PATH", help="write the record; - prints it to standard output instead of the table")
    add("--resume", action="store_true", help="with --json PATH: keep the cases that the file has, measure the others")
    add("--against", type=Path, metavar="RECORD", help="fail if ringtile became slower, as a ratio to dense")
    add("--max-slowdown", type=float, default=1.15, metavar="X", help="with --against (default: 1.15)")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device: {first_line(error)}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected an available device, got {name!r}")
    return device


def case_of(text: str, n_tokens: int, *, heads: int, **sizes: Any) -> Case:
    """Build a case from a pattern's text. " at P" at its end solves the free parameter for a density of pairs."""
    asked, _, density = text.partition(" at ")
    pattern = parse(asked)
    if density:
        block = sizes.get("block", 128)
        pattern = with_density(pattern, float(density), n_tokens, num_heads=heads, block=block).pattern
    return Case(text, pattern, n_tokens, heads=heads, **sizes)


def _tasks(args: argparse.Namespace) -> Iterator[Task]:
    peers = tuple(peer for peer in all_peers(args.backend) if peer.name in (OURS, DENSE, *args.peers))
    sizes = {"batch": args.batch, "head_dim": args.head_dim, "device": _device(args.device)}
    for text in args.patterns:
        # A pattern per head decides the number of heads.
        heads = parse(text).num_heads or args.heads
        names = [f"{text} at {density:g}" for density in args.density or []] or [text]
        for name, dtype, n_tokens in product(names, args.dtype, sorted(args.tokens)):
            case = case_of(name, n_tokens, heads=heads, dtype=getattr(torch, dtype), **sizes)
            yield Task(case, peers, tuple(args.direction))


def _read(option: str, path: Path) -> Record:
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{option}: {str(path)!r}: {error}") from None


def _rows_to_keep(path: Path | None, args: argparse.Namespace) -> tuple[Row, ...]:
    """Return the rows that `--resume` finds. Raises ValueError if they were measured in another way."""
    if args.resume and path is None:
        raise ValueError("--resume: expected --json PATH, too")
    if not args.resume or path is None or not path.exists():
        return ()
    record = _read("--resume", path)
    here = {"seed": args.seed, "seconds": args.seconds, **origin()}
    # Rows of another commit or machine in one record would be compared as if they were of one run.
    for name in ("seed", "seconds", "commit", "versions", "machine"):
        if (was := getattr(record, name)) != here[name]:
            raise ValueError(f"--resume: {str(path)!r} has {name} {was}, here it is {here[name]}")
    return record.rows


def run(args: argparse.Namespace) -> int:
    return measure_tasks(list(_tasks(args)), args)


def measure_tasks(tasks: Sequence[Task], args: argparse.Namespace) -> int:
    """Measure, print and write. Return 0, 1 if ringtile is wrong or slower than ``--against`` allows, 130 on Ctrl-C."""
    if args.seconds < 0 or args.max_slowdown < 1:
        raise ValueError(f"expected --seconds >= 0 and --max-slowdown >= 1, got {args.seconds}, {args.max_slowdown}")
    before = None if args.against is None else _read("--against", args.against)
    json_path = None if args.json in (None, "-") else Path(args.json)
    if json_path is not None and not json_path.parent.is_dir():
        raise ValueError(f"--json: expected a file in an existing folder, got {args.json!r}")
    kept = _rows_to_keep(json_path, args)

    progress = Progress(quiet=args.json == "-")

    def save(record: Record) -> None:
        if json_path is not None:
            write_whole(json_path, record.to_json())

    if (warning := busy_warning()) is not None:
        print(warning, file=sys.stderr if args.json == "-" else sys.stdout, flush=True)
    record = run_bench(
        tasks,
        seconds=args.seconds,
        seed=args.seed,
        command=args.command,
        before=kept,
        report=lambda rows: progress.say(_table(rows)),
        save=save,
        progress=progress,
    )
    if args.json == "-":
        print(record.to_json())
    else:
        print(*_break_even_lines(record), sep="\n")
        if doubtful := sum(bool(row.doubts) for row in record.rows):
            print(f"{doubtful} of {len(record.rows)} rows are doubtful (!). Measure again on a machine that is idle.")
        save(record)
    wrong = [row for row in record.rows if row.peer == OURS and row.median_ms is None]
    complaints = [f"{row.pattern}, N {row.n_tokens}, {row.direction}: {row.reason}" for row in wrong]
    if before is not None:
        complaints += slower_rows(record, before, args.max_slowdown)
    for complaint in complaints:
        print(f"ringtile bench: {complaint}", file=sys.stderr)
    if record.interrupted:
        return 130
    return 1 if complaints else 0
