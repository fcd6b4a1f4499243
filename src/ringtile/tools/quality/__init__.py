"""`ringtile quality`: how much of a model's quality sparse attention keeps."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.quality import calibrate, leg
from ringtile.tools.quality.cells import Folder, Job, Record, measure_all
from ringtile.tools.record import write_whole

NAME = "quality"
"""The name of the record and its table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ringtile quality``."""
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer selectors and sequences")
    add("--out", type=Path, help="folder of cells, budgets, record and table (default: ringtile-quality)")
    add("--json", action="store_true", help="print the record as one JSON object instead")
    leg.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure all cells that the folder does not have, and write the record and the table; return 0."""
    progress = Progress(quiet=args.json)
    if args.calibrate is not None:
        return calibrate.run(args, progress)
    out = Path("ringtile-quality") if args.out is None else args.out

    def shown(record: Record) -> tuple[list[str], dict[str, str]]:
        lines = leg.table(record.cells)
        lines += ["", "This run was interrupted. Cells are missing."] * record.interrupted
        return lines, {"txt": "\n".join([*lines, ""])}

    work = leg.open_leg(args, out, progress)
    measure(work, Folder(out), NAME, shown, args, progress)
    return 0


def measure(
    work: list[Job],
    folder: Folder,
    name: str,
    shown: Callable[[Record], tuple[list[str], Mapping[str, str]]],
    args: argparse.Namespace,
    progress: Progress,
) -> None:
    """Measure the missing cells, and write the record and what ``shown`` returns: lines, and texts by file ending."""
    progress.say(f"{len(work)} cells, {len(folder.of(work))} of them in {folder.path}; {threads_text()}")
    interrupted = False
    try:
        measure_all(work, folder, progress)
    except KeyboardInterrupt:
        interrupted = True
    record = Record.here(args.command, cells=tuple(folder.of(work)), interrupted=interrupted)
    lines, texts = shown(record)
    for line in lines:
        progress.say(line)
    progress.say()
    for ending, text in {"json": record.to_json(), **texts}.items():
        write_whole(path := folder.path / f"{name}.{ending}", text)
        progress.say(f"wrote {path}")
    if interrupted:
        raise KeyboardInterrupt
    if args.json:
        print(record.to_json())
