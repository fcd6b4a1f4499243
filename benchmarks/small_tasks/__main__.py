"""Measure how much quality each selector of tiles keeps, on small models that are trained here in minutes.

    python benchmarks/small_tasks                                   all tasks, three seeds: hours on two cores
    python benchmarks/small_tasks --quick --tasks mqar --seeds 0    one task with some selectors, in minutes

Tasks are made from a seed. Each row keeps the same number of tiles, and only a query's own tile is always kept. A task
whose dense model answers less than 99% is dropped by name. Cells and models that the folder has are read, not measured,
so an interrupted run goes on where it ended. A record and a page are written there, too.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from small_tasks.page import page_of, parts_of
from small_tasks.tables import lines_of, tables
from small_tasks.trained import TASKS, Sweep, jobs

from ringtile.tools.progress import Progress
from ringtile.tools.quality import measure
from ringtile.tools.quality.cells import Folder, Record

NAME = "small_tasks"


def shown(record: Record) -> tuple[list[str], dict[str, str]]:
    """Return the lines and the page of a record."""
    found = tables(record.cells)
    return [line for table in found for line in ["", *lines_of(table)]], {"html": page_of(record, parts_of(found))}


def main(argv: Sequence[str]) -> None:
    """Measure all cells that the folder does not have, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer selectors and sequences, and no training with sparse attention")
    add("--tasks", nargs="+", default=tuple(TASKS), choices=tuple(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}")
    add("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="S", help="of models and data (default: 0 1 2)")
    add("--out", type=Path, default=Path(NAME), help=f"folder of cells, models, record and page (default: {NAME})")
    add("--json", action="store_true", help="print the record as one JSON object instead")
    args = parser.parse_args(argv)
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        parser.error(f"--seeds: expected different numbers of at least 0, got {args.seeds}")
    args.command = shlex.join(["python", "benchmarks/small_tasks", *argv])
    work = list(jobs(Sweep.of(args.tasks, args.seeds, args.quick), args.out / "models"))
    measure(work, Folder(args.out), NAME, shown, args, Progress(quiet=args.json))


if __name__ == "__main__":
    main(sys.argv[1:])
