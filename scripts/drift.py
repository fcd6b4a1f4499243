"""Change one thing of the installed transformers at a time: ringtile computes what eager attention does, or refuses.

    python scripts/drift.py                    at least 300 changes; writes benchmarks/records/drift.json
    python scripts/drift.py --only "drop"      the changes with "drop" in their text; writes no record
    python scripts/drift.py --change TEXT      one change, by its text, with the traceback

Nothing on the disk changes: a loader rewrites the source of modules of transformers while a child process imports them.
What to change is what ringtile touches, found by running the models of `drift_cases.py` once and looking at the calls
between ringtile and transformers, and at the names that ringtile reads. The judge is eager attention of the same
changed transformers. If that fails, the change is void, and another is drawn.

Left out are changes of eager attention itself and of masks of all pairs: the arguments of attention and the rules of
masks say what they compute, and other implementations would not change either.

A run that is stopped goes on where it was, unless transformers or the sources of ringtile have changed. With other
sources of ringtile alone, the draw is the same, so that runs can be compared: see --fresh.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import pickle
import platform
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from drift_edits import FACTOR, FOLDER, MASK, NEW, ROOT, USERS, Change, edited, functions_of
from drift_trace import Recorder, drawn

RECORD = ROOT / "benchmarks/records/drift.json"
DONE, TRACES = ROOT / ".venv/drift.jsonl", ROOT / ".venv/drift.traces"
OURS = str(ROOT / "src/ringtile") + os.sep
SEED, LEAST, SECONDS = 5, 300, 120
"""Of the draw; changes that are not void; for one change."""
FAILURES = ("silent", "crash")
"""Outcomes that must not be. A vague one is a refusal in one line that names something else than what changed."""
TOOL = [ROOT / "tests/tiny.py", *(ROOT / f"scripts/drift_{part}.py" for part in ("cases", "edits", "trace"))]
DEAD = [{"outcome": "crash", "said": "the process died"}]


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its changed source."""

    def get_code(self, fullname: str) -> CodeType:
        # No bytecode of another source.
        return self.source_to_code(self.get_data(self.path), self.path)


class Finder:
    """Finds modules, and writes those that change into a folder, since ringtile reads some of their files."""

    def __init__(self, change: Change, folder: str) -> None:
        self.change, self.folder = change, folder
        self.defined: set[str] = set()
        """Classes and functions of files of transformers that have changed, and names in the function that has."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("transformers", "tiny", "drift_cases"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        origin = "" if spec is None else spec.origin or ""
        if spec is not None and origin.endswith(".py") and not origin.endswith("__init__.py"):
            before = Path(origin).read_text(encoding="utf-8")
            after = edited(self.change, origin, before)
            if after != before:
                if origin not in USERS:
                    self.defined |= set(re.findall(r"^ *(?:class|def) (\w{8,})", before, re.MULTILINE))
                    if changed := functions_of(before).get(self.change.function):
                        self.defined |= set(re.findall(r"\w{3,}", ast.unparse(changed)))
                spec.origin = os.path.join(self.folder, *name.split(".")) + ".py"
                os.makedirs(os.path.dirname(spec.origin), exist_ok=True)
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.symlink(FOLDER + "__init__.py", os.path.join(self.folder, "transformers/__init__.py"))
                Path(spec.origin).write_text(after, encoding="utf-8")
                spec.loader = Loader(name, spec.origin)
        return spec


@contextlib.contextmanager
def doors(name: str, model: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Hand a model to ringtile. Yields what shares its batches, and tensors that only ringtile computes."""
    import torch
    from drift_cases import tokens

    from ringtile.adaptive import Blend, Choice, Density
    from ringtile.integrations import transformers as ours

    more: list[Any] = []
    if name == "use_ringtile":
        yield ours.use_ringtile(model), more
    elif name == "register":
        ours.register()
        model.set_attn_implementation("ringtile")
        yield model, more
    elif name == "pack":
        yield ours.use_ringtile(model, pack=True), more
    elif name == "decode":
        yield ours.use_ringtile(model, decode=Choice(Blend(None), Density(1.0))), more
    elif name.startswith("serving"):
        with ours.continuous_batching(model, cache="int8" if "int8" in name else None):
            yield model, more
    elif name == "context parallel":
        dist = torch.distributed
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield ours.context_parallel(model), more
    elif name == "calibrate":
        some = tokens(1, 192)
        found = ours.calibrate(model, torch.cat((some, some[:, :64]), 1))
        more += [torch.tensor(found.weights)]
        yield ours.use_ringtile(model, attend=found.attention(1.0)), more
    else:
        model = ours.use_ringtile(model)
        with ours.index_losses(model) as losses:
            yield model, losses


def outcome_of(error: BaseException, finder: Finder, phase: str) -> dict[str, str]:
    """What an error is: a refusal in one line of ringtile that names what changed, or not."""
    said, frames = str(error).strip(), traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(OURS)]
    raised = bool(ours) and frames[-1] is ours[-1] and (ours[-1].line or "").startswith("raise")
    # The thing, or a function or class around it.
    words = {word.removesuffix(NEW) for word in re.findall(r"\w{3,}", said)}
    detail = finder.change.detail.partition(" models/")[0]
    changed = re.findall(r"[A-Za-z_]\w{2,}", f"{finder.change.function} {detail}")
    names = words & {*changed, FACTOR, MASK, *finder.defined}
    refused = raised and isinstance(error, ValueError | ImportError) and "\n" not in said
    return {
        "outcome": "crash" if not refused else "refused" if names else "vague",
        "phase": phase,
        "where": f"{ours[-1].filename.removeprefix(OURS)}:{ours[-1].lineno} {ours[-1].name}" if ours else "",
        "said": f"{type(error).__name__}: {said[:300]}",
    }


def differ(first: list[Any], second: list[Any], tolerance: float) -> str:
    """How two lists of tensors differ, or an empty text."""
    if [x.shape for x in first] != [x.shape for x in second]:
        return f"shapes {[tuple(x.shape) for x in first]} and {[tuple(x.shape) for x in second]}"
    for a, b in zip(first, second, strict=True):
        # Equal NaN and infinities do not differ.
        off = (a.double() - b.double()).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
        largest = max([1.0, *a[a.isfinite()].double().abs().flatten().tolist()])
        if not bool((off <= tolerance * largest).all()):
            return f"off by {float(off.amax()):.3g} where the largest is {largest:.3g}"
    return ""


class Raised(logging.Handler):
    """Collects errors of continuous batching, which runs in a thread, logs them, and tells the text only."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []
        logging.getLogger("ContinuousBatchingLogger").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


def run_case(name: str, finder: Finder, before: Any = None) -> tuple[dict[str, Any], BaseException | None]:
    """Run a case with eager attention and with ringtile. ``before`` is what both had without the change."""
    import torch
    from drift_cases import CASES, built
    from tiny import Doubled

    case, raised = CASES[name], Raised()
    # These change eager attention, and no other implementation.
    only_eager = finder.change.kind in ("move mask", "new argument")
    try:
        eager, model = built(case), built(case)
        with torch.no_grad(), Doubled():
            expected = case.run(eager, None)
        if any(x.isnan().any() for x in expected):
            return {"outcome": "void", "said": "eager attention is NaN"}, None
    except Exception as error:
        return {"outcome": "void", "said": f"{type(error).__name__}: {error}"[:200]}, error
    phase = "handed over"
    try:
        with Doubled(), doors(case.door, model) as (door, more):
            phase = "step"
            with torch.set_grad_enabled(case.door == "losses"):
                found = [x.detach() for x in case.run(model, door)]
        more = [x.detach() for x in more]
    except Exception as error:
        known = (*raised.errors, error)[0]
        return outcome_of(known, finder, phase), known
    result: dict[str, Any] = {"outcome": "right", "values": (expected, more)}
    if said := differ(expected, found, case.tolerance):
        result |= {"outcome": "silent", "said": said}
        with contextlib.suppress(Exception):
            other = built(case, "sdpa")
            with torch.no_grad(), Doubled():
                # Without a mask, eager attention attends to all keys, and others do not.
                if not only_eager and not differ(case.run(other, None), found, case.tolerance):
                    result |= {"outcome": "right", "said": "as sdpa"}
    elif before is not None and not differ(before[0], expected, case.tolerance):
        # The meaning is the same, and so is what has no judge.
        if said := differ(before[1], more, 1e-5):
            result |= {"outcome": "silent", "said": f"what ringtile alone computes: {said}"}
    return result, None


def judge(change: Change, before: dict[str, Any], verbose: bool) -> list[dict[str, Any]]:
    """Run the cases of a change, in a process that has not imported transformers yet."""

    def too_late(*_: Any) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        sys.meta_path.insert(0, finder := Finder(change, folder))  # type: ignore[arg-type]
        try:
            import drift_cases  # noqa: F401
            import transformers

            transformers.logging.set_verbosity(logging.CRITICAL)
        except Exception as error:
            return [{"outcome": "void", "said": f"{type(error).__name__}: {error}"[:200]}]
        found = []
        for name in change.cases:
            result, error = run_case(name, finder, before.get(name))
            if error is not None and verbose:
                traceback.print_exception(error)
            result.pop("values", None)
            if not finder.defined:
                result |= {"outcome": "void", "said": "the file that changes was not loaded"}
            found.append({"case": name} | result)
        return found


def forked(work: Callable[[], Any], seconds: float, quiet: bool = True) -> Any:
    """Return what a function returns in a forked process, or None if it dies or takes too long."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        if quiet:
            void = os.open(os.devnull, os.O_WRONLY)
            os.dup2(void, 1)
            os.dup2(void, 2)
        status = 1
        try:
            data = pickle.dumps(work())
            with os.fdopen(write, "wb") as pipe:
                pipe.write(data)
            status = 0
        except BaseException:
            if not quiet:
                traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    chunks, end = [], time.monotonic() + seconds
    try:
        while select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (chunk := os.read(read, 1 << 20)):
                return pickle.loads(b"".join(chunks)) if chunks else None
            chunks.append(chunk)
        return None
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        os.waitpid(child, 0)


def trace(name: str) -> tuple[str, dict[str, Any], Any]:
    """Run a case as it is. Return its door, what ringtile touches, and what both computed."""
    import torch
    import transformers
    from drift_cases import CASES, built
    from tiny import Doubled

    transformers.logging.set_verbosity(logging.CRITICAL)
    case, seen = CASES[name], Recorder()
    model, eager = built(case), built(case)
    with torch.no_grad(), Doubled(), seen.recording(False):
        case.run(eager, None)
    with Doubled(), seen.recording(True), doors(case.door, model) as (door, _):
        with torch.set_grad_enabled(case.door == "losses"):
            case.run(model, door)
    return case.door, seen.found(), computed(name)


def computed(name: str) -> Any:
    """What eager attention and ringtile compute without a change."""
    result, error = run_case(name, Finder(Change("", "", "", "", ()), ""))
    if result["outcome"] != "right":
        raise SystemExit(f"{name}, without a change: {result['outcome']}, {result['said']}") from error
    return result["values"]


def names_of_cases() -> tuple[list[str], list[str]]:
    """The cases, and the modules that are loaded with transformers and are not part of it."""
    import drift_cases
    import transformers.generation.continuous_batching

    assert transformers
    theirs = ("transformers", "tiny", "drift_cases", "__main__")
    return list(drift_cases.CASES), [name for name in sys.modules if name.partition(".")[0] not in theirs]


def preload() -> list[str]:
    """Import what each child needs but transformers, and return the names of the cases."""
    if not hasattr(os, "fork"):
        raise SystemExit("expected a system with fork, as Linux")
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "compat")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    import ringtile.adaptive
    import ringtile.integrations.transformers

    assert ringtile
    torch.set_num_threads(1)
    found = forked(names_of_cases, SECONDS, quiet=False)
    if found is None:
        raise SystemExit("the cases cannot be imported")
    cases, modules = found
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "transformers" in sys.modules:
        raise SystemExit("expected a process without transformers: another package imports it")
    return list(cases)


def worst(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a change from those of its cases."""
    order = ("silent", "crash", "vague", "refused", "right", "void")
    return min(results, key=lambda result: order.index(result["outcome"]))


def key_of(files: Iterable[Path]) -> str:
    """A text that changes with transformers and the files."""
    content = b"".join(file.read_bytes() for file in sorted(files))
    return f"{importlib.metadata.version('transformers')} {hashlib.sha256(content).hexdigest()[:16]}"


def resumed(key: str) -> dict[str, dict[str, Any]]:
    """The results of an earlier run with the same sources, by the texts of their changes."""
    if not DONE.exists():
        return {}
    lines = [json.loads(line) for line in DONE.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {line["change"]: line for line in lines if line["key"] == key}


def traced(cases: Iterable[str], say: Callable[[str], None]) -> dict[str, tuple[str, dict[str, Any], Any]]:
    """What ringtile touches in each case, and what it computes. Those of earlier runs are in a file."""
    key = key_of(TOOL)
    known = pickle.loads(TRACES.read_bytes()) if TRACES.exists() else {}
    all_known = known.get(key, {})
    found = {name: all_known[name] for name in cases if name in all_known}
    for name in cases:
        if name in found:
            continue
        say(f"looks at {name}")
        found[name] = forked(partial(trace, name), SECONDS, quiet=False)
        if found[name] is None:
            print(f"{name}: fails without a change", file=sys.stderr)
            del found[name]
        TRACES.parent.mkdir(exist_ok=True)
        TRACES.write_bytes(pickle.dumps({key: all_known | found}))
    return found


def results_of(
    changes: list[Change], before: dict[str, Any], least: int, key: str, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Judge changes until so many are not void. Each result is a line of a file at once."""
    known, found, start, new = resumed(key), [], time.monotonic(), 0
    DONE.parent.mkdir(exist_ok=True)
    if not known:
        DONE.write_text("", encoding="utf-8")
    with DONE.open("a", encoding="utf-8") as lines:
        for change in changes:
            if sum(result["outcome"] != "void" for result in found) >= least:
                break
            result = known.get(str(change))
            if result is None:
                judged = forked(partial(judge, change, before, False), 2 * SECONDS)
                result = {"key": key, "change": str(change), **worst(judged or DEAD)}
                lines.write(json.dumps(result) + "\n")
                lines.flush()
                new += 1
            found.append(result)
            count = Counter(result["outcome"] for result in found)
            rate = (time.monotonic() - start) / max(new, 1)
            valid = len(found) - count["void"]
            left = (least - valid) * len(found) / max(valid, 1) * rate / 60
            tally = ", ".join(f"{count[name]} {name}" for name in sorted(count))
            say(f"{valid} of {least}: {tally}; {rate:.1f} s each, {left:.0f} min left")
    return found


def recorded(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a run."""
    tables: dict[str, Counter[str]] = {}
    for result in results:
        tables.setdefault(result["change"].partition(" | ")[0], Counter())[result["outcome"]] += 1
    late = sum(result["outcome"] == "refused" and result.get("phase") == "step" for result in results)
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    count = Counter(result["outcome"] for result in results)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "seed": SEED,
        "changes": sum(count.values()) - count["void"],
        "outcomes": dict(sorted(count.items())),
        "refused in a step": late,
        "kinds": {kind: dict(sorted(table.items())) for kind, table in sorted(tables.items())},
        "not right": [
            {name: result[name] for name in ("change", "case", "outcome", "phase", "where", "said") if result.get(name)}
            for result in results
            if result["outcome"] not in ("right", "void")
        ],
    }


def run_changes(changes: list[Change]) -> int:
    """Run changes, and print a line for each of their cases."""
    alone = {name for change in changes for name in change.cases if name.startswith(("losses", "calibrate"))}
    before = {name: forked(partial(computed, name), SECONDS, quiet=False) for name in sorted(alone)}
    outcomes = []
    for change in changes:
        verbose = len(changes) == 1
        found = forked(partial(judge, change, before, verbose), 2 * SECONDS, quiet=not verbose) or DEAD
        outcomes.append(worst(found)["outcome"])
        for result in found:
            print(json.dumps({"change": str(change)} | result), flush=True)
    return int(any(outcome in FAILURES for outcome in outcomes))


def main() -> int:
    assert __doc__
    about, *more = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog="\n\n".join(more), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=LEAST, help=f"how many are not void (default: {LEAST})")
    parser.add_argument("--only", metavar="TEXT", default="", help="changes with TEXT in their text")
    parser.add_argument("--change", metavar="TEXT", action="append", help="this change, by its text; can be repeated")
    parser.add_argument("--list", action="store_true", help="print all changes that can be drawn")
    parser.add_argument("--fresh", action="store_true", help="look again at what ringtile touches, and forget results")
    args = parser.parse_args()
    if args.fresh:
        DONE.unlink(missing_ok=True)
        TRACES.unlink(missing_ok=True)
    on_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        if on_terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    cases, key = preload(), key_of([*TOOL, Path(__file__), *(ROOT / "src").rglob("*.py")])
    if args.change:
        return run_changes([Change.read(text) for text in args.change])
    try:
        traces = traced(cases, say)
        changes = drawn({name: it[:2] for name, it in traces.items()}, SEED)
        changes = [change for change in changes if args.only in str(change)]
        if args.list:
            print(*changes, sep="\n")
            return 0
        results = results_of(changes, {name: it[2] for name, it in traces.items()}, args.changes, key, say)
    except KeyboardInterrupt:
        print(f"\nstopped: the next run goes on from {DONE.relative_to(ROOT)}", file=sys.stderr)
        return 130
    record = recorded(results)
    say("")
    if not args.only and record["changes"] >= LEAST:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for line in record["not right"]:
        if line["outcome"] != "refused":
            print(f"{line['outcome']}: {line['change']}\n    {line.get('where', '')} {line['said']}")
    print(f"{record['changes']} changes of transformers {record['versions']['transformers']}: {record['outcomes']}")
    return int(any(record["outcomes"].get(name) for name in FAILURES) or record["changes"] < args.changes)


if __name__ == "__main__":
    raise SystemExit(main())
