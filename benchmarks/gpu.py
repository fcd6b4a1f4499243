"""Check the Triton kernels on a GPU, then time them. docs/gpu.md is the page of it.

    python benchmarks/gpu.py --prepare               compile all kernels in processes, without the GPU
    python benchmarks/gpu.py                         all sections, until --total is over
    python benchmarks/gpu.py                         again: it continues with the cells that the record lacks
    python benchmarks/gpu.py --sections gate,masks   some sections
    python benchmarks/gpu.py --before RECORD         continue a record of another machine, in --out
    python benchmarks/gpu.py --baseline PATH         time another checkout, too (section ab)
    python benchmarks/gpu.py --adopt RECORD          let the kernels use the configurations that were the fastest
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke --out FILE    small problems on a CPU, to see that it runs
    python benchmarks/gpu.py --mock --out FILE                        the same on a GPU that is not there

It runs from a source tree without an install. Times are medians of interleaved rounds by the GPU's events, apart from
the host's time per call. Sampled rows of each result are compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
SOURCE = sys.argv[sys.argv.index("--source") + 1] if "--source" in sys.argv else str(ROOT / "src")
sys.path[:0] = [SOURCE, str(ROOT / "tests"), str(ROOT / "benchmarks")]
if {"--mock", "--prepare"} & set(sys.argv):
    os.environ["RINGTILE_MOCK_GPU"] = "1"

import torch  # noqa: E402
import triton_cases  # noqa: E402
import triton_list_cases  # noqa: E402
from gpu_prepare import no_gpu, prepare  # noqa: E402
from gpu_sections import GROUPED, SECTIONS, TIMED, UNTIMED, Cell, Setup, first_line  # noqa: E402
from gpu_times import CLOCK, DEVICE  # noqa: E402
from mock_gpu import SHARED_BYTES  # noqa: E402
from triton import knobs  # noqa: E402

import ringtile  # noqa: E402
from ringtile.kernels.triton import launches, tuning  # noqa: E402
from ringtile.tools.machine import commit, machine_facts, versions  # noqa: E402
from ringtile.tools.record import write_whole  # noqa: E402

triton_cases.DEVICE = triton_list_cases.DEVICE = DEVICE
FORMAT = 2
SAME = ("format", "clock", "devices", "versions", "sources")
"""What two parts of a record share."""
GAIN = 1.02
"""A configuration replaces the first of the table only if it is so many times as fast."""
Found = dict[str, Any]


class Overtime(BaseException):
    """The time of a section is over."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `Overtime` in the block after some time."""

    def stop(number: int, frame: object) -> None:
        raise Overtime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def blank() -> Found:
    """Return a record without cells."""
    digest, machine, source = hashlib.sha256(), machine_facts(), Path(SOURCE)
    for path in sorted([*source.rglob("*.py"), *source.rglob("tuned.json")]):
        digest.update(path.read_bytes())
    about = {name: version for name, version in versions().items() if name in ("torch", "triton")}
    devices = [name for name in machine["devices"] if CLOCK == "events" or name == "cpu"]
    facts: Found = {"devices": devices, "versions": about, "sources": digest.hexdigest(), "commit": commit()}
    facts["architecture"] = launches.architecture(DEVICE) if torch.cuda.is_available() else 0
    empty = {"cells": {}, "left": {}, "compiled": {}, "running": None}
    return {"format": FORMAT, "clock": CLOCK, **facts, "machine": machine, **empty}


def opened(out: Path, before: Path | None) -> Found:
    """Return the record to continue: the cells of both files, or none."""
    found = blank()
    for path in (before, out):
        if path is None or (path == out and not path.exists()):
            continue
        old = json.loads(path.read_text(encoding="utf-8"))
        if other := [name for name in SAME if old.get(name) != found[name]]:
            raise SystemExit(f"{path} has other {', '.join(other)} than this run: give another --out, or no --before")
        if old["running"]:
            section, name = old["running"]
            error = "it began and did not end: a crash, or a time limit from outside"
            old["cells"].setdefault(section, {})[name] = {"error": error}
        for section, cells in old["cells"].items():
            found["cells"].setdefault(section, {}).update(cells)
    return found


def refusal(found: Found, cell: Cell) -> str:
    """Return why a cell is not timed, or an empty text."""
    wrong = {name for name, value in found["cells"].get("gate", {}).items() if "error" in value} - UNTIMED
    if all(problem.case.kv_heads is None for problem in cell.problems):
        wrong -= GROUPED
    return f"not timed, because the gate found wrong: {', '.join(sorted(wrong))}" if wrong else ""


def run_section(name: str, cells: Sequence[Cell], found: Found, seconds: float, save: Callable[[], None]) -> None:
    """Measure the cells that a record lacks, until the time is over. The record is saved after each."""
    done, ends = found["cells"].setdefault(name, {}), time.monotonic() + seconds
    todo = [cell for cell in cells if cell.name not in done]
    for cell in todo:
        if time.monotonic() >= ends:
            break
        found["running"] = name, cell.name
        save()
        try:
            if reason := refusal(found, cell) if name in TIMED else "":
                value: Found = {"refused": reason}
            else:
                with at_most(ends - time.monotonic()):
                    value = cell.run()
                    synchronize()
        except Overtime:
            break
        except Exception as error:
            value = {"error": first_line(error)}
        finally:
            found["running"] = None
        done[cell.name] = value
        found["left"][name].remove(cell.name)
        save()
        print(*told(name, cell.name, value), sep="\n", flush=True)
        try:
            synchronize()
        except RuntimeError as error:
            raise SystemExit(f"the GPU does not answer after this cell, run it again: {first_line(error)}") from None
    save()


def synchronize() -> None:
    """Wait for the GPU. After an illegal access, this and all that follows in the process raises."""
    if CLOCK == "events":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def told(section: str, name: str, value: Found) -> Iterator[str]:
    """Yield the lines about a cell."""
    yield f"{section}: {name}: {_brief(value)}"
    for row in value.get("rows", ()):
        time = row["reason"] or f"{row['median_ms']:.4g} ms, host {row['host_us']:.0f} us"
        yield f"  {row['peer']:16} {row['direction']:17} {time}"


def _brief(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if "ms" in value:
        return f"{value['ms']:.4g} ms, host {value['host_us']:.0f} us"
    return "; ".join(f"{key} {_brief(x)}" for key, x in value.items() if key not in ("rows", "text", "sources"))


def prepare_all(setup: Setup, args: argparse.Namespace) -> int:
    """Compile the kernels of the sections for the GPU of this machine, or for another one."""
    if args.architecture:
        target = args.architecture, SHARED_BYTES[args.architecture]
    else:
        code = "import triton; a = triton.runtime.driver.active; t = a.get_current_target(); assert t.backend == 'cuda'"
        code += "; print(t.arch, a.utils.get_device_properties(0)['max_shared_mem'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"found no NVIDIA GPU to prepare for, give --architecture: {done.stderr[-300:]}")
        target = tuple(map(int, done.stdout.split()))
    with patch.object(launches, "architecture", lambda device: target[0]):
        cells = [(name, cell) for name in args.sections for cell in SECTIONS[name](setup)]
    checks = [cell.run for name, cell in cells if name == "gate" or (name == "lists" and not cell.problems)]
    made = prepare(*target, checks, [problem for _, cell in cells for problem in cell.problems])
    print(f"{made['kernels']} kernels for sm_{target[0]} in {os.environ['TRITON_CACHE_DIR']}")
    print(*made["failed"], sep="\n", end="")
    # Both trees of a comparison run the section passes.
    for tree in (setup.baseline, ROOT) if setup.baseline and "ab" in args.sections else ():
        command = [sys.executable, __file__, "--prepare", "--sections", "passes", "--source", tree / "src"]
        subprocess.run([*command, "--architecture", str(target[0])], check=True)
    return 1 if made["failed"] else 0


def adopt(path: Path) -> int:
    """Write the fastest configurations of a record's sweep where the kernels look for them."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["clock"] != "events" or not found["architecture"]:
        raise SystemExit(f"{path}: expected a record of an NVIDIA GPU, got {found['clock']} of {found['devices']}")
    tables: dict[tuple[str, str], list[Found]] = {}
    for cell in found["cells"].get("sweep", {}).values():
        if "ms" in cell.get("backward", {}):
            tables.setdefault((cell["kernel"], str(cell["head_dim"])), []).append(cell)
    chosen = json.loads(tuning.TUNED.read_text(encoding="utf-8")) if tuning.TUNED.exists() else {}
    for (kernel, head_dim), cells in tables.items():
        part = "forward" if kernel == "forward" else "backward"
        best = min(cells, key=lambda cell: cell[part]["ms"])
        if best[part]["ms"] * GAIN <= cells[0][part]["ms"]:
            chosen.setdefault(f"sm_{found['architecture']}", {}).setdefault(kernel, {})[head_dim] = best["config"]
    write_whole(tuning.TUNED, json.dumps(chosen, indent=1) + "\n")
    print(f"{tuning.TUNED}:\n{json.dumps(chosen)}")
    return 0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prepare", action="store_true", help="compile the kernels of the sections, and measure nothing")
    add("--architecture", type=int, metavar="90", help="with --prepare: for another GPU than this machine's")
    default = ",".join(name for name in SECTIONS if name != "passes")
    add("--sections", default=default, metavar="A,B", help=f"some of {','.join(SECTIONS)}")
    add("--seconds", type=float, default=240.0, help="time of a section (default: 240)")
    add("--total", type=float, default=540.0, help="time of the run (default: 540)")
    add("--out", type=Path, default=ROOT / "benchmarks/records/gpu.json", help="the record to write or to continue")
    add("--before", type=Path, metavar="RECORD", help="a record whose cells are not measured again")
    add("--baseline", type=Path, metavar="PATH", help="another checkout, for the section ab")
    add("--source", metavar="SRC", help="another tree's src, for the section passes")
    add("--adopt", type=Path, metavar="RECORD", help="write the best configurations of a record, and measure nothing")
    add("--smoke", action="store_true", help="a few small problems, to see that everything runs")
    add("--mock", action="store_true", help="the same on a GPU that is not there")
    args = parser.parse_args(words)
    args.sections = args.sections.split(",")
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"--sections: expected some of {','.join(SECTIONS)}, got {','.join(unknown)}")
    if args.baseline and not (args.baseline / "src/ringtile").is_dir():
        parser.error(f"--baseline: expected a checkout with src/ringtile, got {args.baseline}")
    if args.before and not args.before.is_file():
        parser.error(f"--before: expected a record, got {args.before}")
    return args


def main() -> int:
    args, began = arguments(), time.monotonic()
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(name, str(ROOT / "build" / folder))
    setup = Setup(args.smoke or args.mock, args.baseline)
    if not Path(ringtile.__file__).is_relative_to(Path(SOURCE).resolve()):
        raise SystemExit(f"expected ringtile from {SOURCE}, got {ringtile.__file__}")
    if args.adopt:
        return adopt(args.adopt)
    if args.prepare:
        return prepare_all(setup, args)
    if CLOCK == "events" and not torch.cuda.is_available():
        raise SystemExit("expected a GPU, found none")
    found = opened(args.out, args.before)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # A time limit from outside ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with no_gpu() if CLOCK == "mock" else nullcontext():
            measure(setup, args, found, began)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    left = {name: len(names) for name, names in found["left"].items() if names}
    failed = [
        f"{section}: {name}: {value['error']}"
        for section, cells in found["cells"].items() for name, value in cells.items() if "error" in value
    ]  # fmt: skip
    print(f"left: {left or 'nothing'}; {len(failed)} wrong or failed", *failed, sep="\n  ")
    return 1 if failed else 3 if left else 0


def measure(setup: Setup, args: argparse.Namespace, found: Found, began: float) -> None:
    """Run the sections that were asked for, the gate first."""

    def save() -> None:
        write_whole(args.out, json.dumps(found, indent=1))

    def count(*, cache_hit: bool, **about: Any) -> None:
        section = (found["running"] or ("",))[0]
        found["compiled"][section] = found["compiled"].get(section, 0) + (not cache_hit)

    knobs.compilation.listener = count
    gate = {cell.name for cell in SECTIONS["gate"](setup)}
    sections = {name: list(SECTIONS[name](setup)) for name in SECTIONS if name in args.sections}
    for name, cells in sections.items():
        found["left"][name] = [cell.name for cell in cells if cell.name not in found["cells"].get(name, {})]
    try:
        for name, cells in sections.items():
            seconds = min(args.seconds, args.total - (time.monotonic() - began))
            if name in TIMED and gate - found["cells"].get("gate", {}).keys():
                print(f"{name}: left, because it needs all of the gate")
                seconds = 0.0
            run_section(name, cells, found, seconds, save)
    finally:
        save()


if __name__ == "__main__":
    sys.exit(main())
