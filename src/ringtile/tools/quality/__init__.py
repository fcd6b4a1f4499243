"""`ringtile quality`: how much of a model's quality sparse attention keeps, task by task."""

from __future__ import annotations

import argparse
from pathlib import Path

from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.quality import calibrate, leg
from ringtile.tools.quality.cells import Folder, Record, measure_all
from ringtile.tools.quality.claims import lines_of, tables
from ringtile.tools.quality.page import page_of
from ringtile.tools.quality.trained import TASKS, Sweep, jobs
from ringtile.tools.record import write_whole

RECORD, PAGE = "quality.json", "quality.html"
SEEDS = (0, 1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ringtile quality``."""
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer selectors and sequences, and no training with sparse attention")
    add(
        "--tasks", nargs="*", default=None, choices=tuple(TASKS), metavar="TASK",
        help=f"tasks to train for, among {', '.join(TASKS)} (default: all, or none with --model)",
    )  # fmt: skip
    add("--seeds", nargs="+", type=int, default=SEEDS, metavar="S", help="seeds of models and data (default: 0 1 2)")
    add("--out", type=Path, help="folder of cells, weights, record and page (default: ringtile-quality)")
    add("--json", action="store_true", help="print the record as one JSON object instead")
    leg.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure all cells that the folder does not have, and write the record and the page; return 0.

    Raises:
        ValueError: If an argument is invalid, a file of the folder holds something else, or a model cannot be loaded.
    """
    progress = Progress(quiet=args.json)
    if args.calibrate is not None:
        return calibrate.run(args, progress)
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        raise ValueError(f"--seeds: expected different numbers of at least 0, got {args.seeds}")
    out = Path("ringtile-quality") if args.out is None else args.out
    folder = Folder(out)
    # A model of yours is judged alone, unless you name tasks as well.
    tasks = (() if args.model else tuple(TASKS)) if args.tasks is None else args.tasks
    work = list(jobs(Sweep.of(tasks, args.seeds, args.quick), out / "models"))
    more, notes = leg.open_leg(args, out, progress)
    work += more
    progress.say(f"{len(work)} cells, {len(folder.of(work))} of them in {folder.path}; {threads_text()}")
    try:
        measure_all(work, folder, progress)
    except KeyboardInterrupt:
        _finish(Record.here(args.command, cells=tuple(folder.of(work)), notes=notes, interrupted=True), out, progress)
        raise
    record = Record.here(args.command, cells=tuple(folder.of(work)), notes=notes)
    _finish(record, out, progress)
    if args.json:
        print(record.to_json())
    return 0


def _finish(record: Record, out: Path, progress: Progress) -> None:
    """Print the tables, and write the record and the page."""
    theirs = leg.table(record.cells)
    for line in [line for table in tables(record.cells) for line in ["", *lines_of(table)]]:
        progress.say(line)
    for line in [*theirs, *record.notes]:
        progress.say(line)
    write_whole(out / RECORD, record.to_json())
    write_whole(out / PAGE, page_of(record, theirs))
    progress.say(f"\nrecord: {out / RECORD}, page: {out / PAGE}")
