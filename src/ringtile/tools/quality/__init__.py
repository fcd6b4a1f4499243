"""`ringtile quality`: how much of a model's quality sparse attention keeps, text by text."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from ringtile.tools import page
from ringtile.tools.page import Code, Heading, Part
from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.quality import calibrate, leg
from ringtile.tools.quality.cells import Folder, Job, Record, measure_all
from ringtile.tools.record import write_whole

NAME = "quality"
"""The name of the record and its page."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ringtile quality``."""
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer selectors and sequences")
    add("--out", type=Path, help="folder of cells, budgets, record and page (default: ringtile-quality)")
    add("--json", action="store_true", help="print the record as one JSON object instead")
    leg.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure all cells that the folder does not have, and write the record and the page; return 0."""
    progress = Progress(quiet=args.json)
    if args.calibrate is not None:
        return calibrate.run(args, progress)
    out = Path("ringtile-quality") if args.out is None else args.out

    def shown(record: Record) -> tuple[list[str], list[Part]]:
        lines = leg.table(record.cells)
        return lines, [Heading("Your model"), Code("\n".join(lines))]

    work = leg.open_leg(args, out, progress)
    measure(work, Folder(out), NAME, shown, args, progress)
    return 0


def measure(
    work: list[Job],
    folder: Folder,
    name: str,
    shown: Callable[[Record], tuple[list[str], list[Part]]],
    args: argparse.Namespace,
    progress: Progress,
) -> None:
    """Measure the cells that a folder does not have, and write the record of all and its page, also if interrupted."""
    progress.say(f"{len(work)} cells, {len(folder.of(work))} of them in {folder.path}; {threads_text()}")
    interrupted = False
    try:
        measure_all(work, folder, progress)
    except KeyboardInterrupt:
        interrupted = True
    record = Record.here(args.command, cells=tuple(folder.of(work)), interrupted=interrupted)
    lines, parts = shown(record)
    for line in lines:
        progress.say(line)
    paths = [folder.path / f"{name}.{suffix}" for suffix in ("json", "html")]
    for path, text in zip(paths, (record.to_json(), page_of(record, parts)), strict=True):
        write_whole(path, text)
    progress.say(f"\nrecord: {paths[0]}, page: {paths[1]}")
    if interrupted:
        raise KeyboardInterrupt
    if args.json:
        print(record.to_json())


def page_of(record: Record, parts: Sequence[Part]) -> str:
    """Return the HTML page of a record, whose tables are ``parts``."""
    title = "Quality of sparse attention"
    before: list[Part] = [Heading(title, 1)]
    if record.interrupted:
        before.append("**This run was interrupted. Cells are missing.**")
    machine = f"{record.machine.get('cpu')}, {record.machine.get('threads')} threads"
    made = f"{machine}, torch {record.versions.get('torch')}, ringtile commit {record.commit}"
    return page.html(title, [*before, *parts, f"{record.command}. {made}."])
