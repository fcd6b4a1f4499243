"""Time a whole encoder on a CPU: ringtile beside PyTorch's sdpa, OpenVINO and ONNX Runtime, with peak memory.

    pip install ".[encoders]"       or the same packages by --target DIR, and --peers DIR below
    python benchmarks/encoders.py --tokens 2K --documents 0
    python benchmarks/encoders.py --tokens --documents 32 --engines sdpa ringtile --dtype bfloat16
    python benchmarks/encoders.py --skip "32,768.*(sdpa|openvino)" "8,192.*onnx" --out benchmarks/records/encoders.json
    python benchmarks/encoders.py --page

The model has the shape of ModernBERT-base: 22 layers of width 768, every third over all pairs, the others with windows
of 128. Its weights are random, so outputs mean nothing, and times and memory are those of a trained one. A cell is one
engine, dtype and input, in a process of its own. Its outputs are compared with those of the first engine that computed
the same input, at 16 tokens of each document, and a wrong result ends the run before its time is told.

A ragged batch has documents of 256 to 8,192 tokens, evenly spaced in their logarithms. It is computed

* one by one: a call for each document, which wastes nothing on padding, and has small batches;
* packed: in one call, by use_ringtile(model, pack=True);
* padded: in one call, by PyTorch. All rows take the same time, so some are measured, and their time is multiplied.

Memory is the peak of the process while it computes, beyond what it held before: the weights, and what a short call
leaves. A cell that needs more than --memory is recorded as such. The record is written after each cell. Its other cells
stay, if an earlier run on this machine measured them, so cells can be measured apart: each run computes the first one
of its inputs again, which the others are compared with. --page writes docs/encoders.md and its picture from the record.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from merged import before, merged
from pages import Code, Part, Picture, Table, filled, markdown, table_lines
from torch import Tensor, nn

from ringtile.integrations.transformers import use_ringtile
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import busy_warning, origin
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.units import bytes_text, count, duration_text

ENGINES = ("sdpa", "openvino", "onnxruntime", "ringtile", "ringtile, int8 linears")
ALONE, PACKED, PADDED = "one by one", "packed", "padded"
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "int8": 0.2}
"""Largest relative errors. Those of bfloat16 and int8 are against float32, and grow over 22 layers."""
SAMPLED, SHORTEST, LONGEST = 16, 256, 8192
ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks/records/encoders.json", ROOT / "docs/encoders.md"
PICTURE = ROOT / "docs/assets/encoders.png"


class Cell(NamedTuple):
    """One measurement. A batch of one document has no padding, so all engines compute it one by one."""

    engine: str
    way: str
    dtype: str
    lengths: list[int]
    rows: list[int]
    """The documents that are computed."""

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{input_of(self._asdict())}, {self.dtype}, {self.engine}, {self.way}"

    @property
    def cost(self) -> float:
        """About the seconds of 2 cores."""
        padded = [max(self.lengths)] * len(self.rows)
        lengths = padded if self.way == PADDED else [self.lengths[row] for row in self.rows]
        return sum(1.3e-3 * n + (3e-7 if self.engine.startswith("ringtile") else 7e-7) * n * n for n in lengths) + 10


def spaced_lengths(documents: int) -> list[int]:
    """Return the lengths of the documents of a ragged batch, the longest first."""
    steps = max(1, documents - 1)
    return [round(LONGEST * (SHORTEST / LONGEST) ** (number / steps)) for number in range(documents)]


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells that were asked for. The first of an input is the one that others are compared with."""
    ragged = [spaced_lengths(args.documents)] if args.documents else []
    for lengths in [*([n] for n in args.tokens), *ragged]:
        every, several = list(range(len(lengths))), len(lengths) > 1
        some = sorted({round(float(x)) for x in torch.linspace(0, len(lengths) - 1, min(args.padded, len(lengths)))})
        for dtype in sorted(args.dtype, reverse=True):
            for engine in (engine for engine in ENGINES if engine in args.engines):
                if engine == "onnxruntime" and dtype != "float32":
                    # It has no bfloat16 on a CPU.
                    continue
                if "int8" in engine:
                    if dtype == "float32" and not several:
                        yield Cell(engine, ALONE, dtype, lengths, every)
                    continue
                yield Cell(engine, PACKED if several and engine == "ringtile" else ALONE, dtype, lengths, every)
                if several and engine == "sdpa":
                    yield Cell(engine, PADDED, dtype, lengths, some)


# What follows runs in the process of a cell.


class LastHidden(nn.Module):
    """A model of token ids alone, as the exporters want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).last_hidden_state


def encoder(layers: int, longest: int) -> Any:
    """Return a model with the shape of ModernBERT-base and random weights."""
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    config = ModernBertConfig(num_hidden_layers=layers, max_position_embeddings=max(LONGEST, longest))
    config._attn_implementation = "sdpa"
    return ModernBertModel(config).eval()


def export(engine: str, layers: int, folder: Path) -> None:
    """Write the model for another engine."""
    model, ids = LastHidden(encoder(layers, LONGEST)).eval(), torch.randint(5, 50000, (1, 512))
    if engine == "openvino":
        openvino = importlib.import_module("openvino")
        openvino.save_model(openvino.convert_model(model, example_input=ids), folder / "model.xml", False)
    else:
        tokens = torch.export.Dim("tokens", min=8, max=1 << 20)
        options = {"input_names": ["input_ids"], "dynamic_shapes": {"input_ids": {1: tokens}}, "dynamo": True}
        torch.onnx.export(model, (ids,), folder / "model.onnx", **options)


def engine_of(cell: Cell, args: argparse.Namespace) -> Callable[..., Tensor]:
    """Return a function of token ids ``[B, N]``, and a mask of padding or None, that returns the hidden states."""
    if cell.engine == "openvino":
        openvino = importlib.import_module("openvino")
        precision = {"float32": "f32", "bfloat16": "bf16"}[cell.dtype]
        options = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": precision}
        compiled = openvino.Core().compile_model(args.work / "model.xml", "CPU", options)
        return lambda ids, mask: torch.from_numpy(compiled([ids.numpy()])[0])
    if cell.engine == "onnxruntime":
        onnxruntime = importlib.import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        session = onnxruntime.InferenceSession(args.work / "model.onnx", options, providers=["CPUExecutionProvider"])
        return lambda ids, mask: torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
    model = encoder(args.layers, max(cell.lengths)).to(getattr(torch, cell.dtype))
    if cell.engine != "sdpa":
        use_ringtile(model, pack=cell.way == PACKED)
    if "int8" in cell.engine:
        with warnings.catch_warnings():
            # It is to move to torchao, whose kernels for a CPU take longer.
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    return lambda ids, mask: model(input_ids=ids, attention_mask=mask).last_hidden_state


def sampled(hidden: Tensor, length: int) -> Tensor:
    """Return the hidden states of some tokens of a document."""
    return hidden[torch.linspace(0, length - 1, SAMPLED).long()].float()


def computed(call: Callable[..., Tensor], cell: Cell, documents: list[Tensor]) -> Tensor:
    """Compute the documents of a cell, and return the hidden states of some tokens ``[rows, 16, E]``."""
    if cell.way == ALONE:
        return torch.stack([sampled(call(ids[None], None)[0], len(ids)) for ids in documents])
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(each)] for each in documents])
    return torch.stack([sampled(row, len(each)) for row, each in zip(call(ids, mask), documents, strict=True)])


def status(field: str) -> int:
    """Return bytes of this process: VmRSS, held now, or VmHWM, their peak."""
    return int(re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) << 10


@torch.inference_mode()
def measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Compute a cell, save what it returns for some tokens, and return its times and its memory."""
    torch.set_num_threads(args.threads)
    call = engine_of(cell, args)
    drawn = [torch.randint(5, 50000, (n,), generator=torch.Generator().manual_seed(n)) for n in cell.lengths]
    documents, times = [drawn[row] for row in cell.rows], []
    computed(call, cell, [ids[: 128 - 9 * row] for row, ids in enumerate(documents[:2])])
    # From here on, the peak counts from what is held now.
    Path("/proc/self/clear_refs").write_text("5")
    held = status("VmRSS")
    while len(times) < args.rounds and sum(times) < args.seconds:
        began = time.perf_counter()
        found = computed(call, cell, documents)
        times.append(time.perf_counter() - began)
    torch.save(found, args.work / "found.pt")
    return {"seconds": times, "held_bytes": held, "peak_bytes": status("VmHWM")}


# What follows runs in the first process.


def in_process(args: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any] | str:
    """Run a task in a process of its own. Return what it prints, or "out of memory"."""
    wanted = [str(Path(__file__).resolve()), "--task", json.dumps(task)]
    shared = ["--peers", str(args.peers)] if args.peers else []
    for name in ("layers", "threads", "rounds", "seconds", "memory", "work"):
        shared += [f"--{name}", str(getattr(args, name))]
    found = subprocess.run([sys.executable, *wanted, *shared], capture_output=True, text=True)
    if found.returncode == 0:
        told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        return told
    if found.returncode == -9 or re.search("alloc|MemoryError", found.stderr):
        return "out of memory"
    raise RuntimeError(f"{task}: exit {found.returncode}\n{found.stderr[-3000:]}")


def checked(cell: Cell, found: Tensor, known: dict[tuple[int, ...], tuple[Cell, Tensor]]) -> dict[str, Any]:
    """Return the error against the first cell of the same input. Raise RuntimeError if it is too large."""
    of, exact = known.setdefault(tuple(cell.lengths), (cell, found))
    if of == cell:
        return {"error": None, "of": None}
    rows = [row for row in cell.rows if row in of.rows]
    error = relative_error(
        *(x[[of_cell.rows.index(row) for row in rows]] for of_cell, x in ((cell, found), (of, exact)))
    )
    bound = BOUNDS["int8" if "int8" in cell.engine else max(cell.dtype, of.dtype, key=BOUNDS.__getitem__)]
    if not error <= bound:
        raise RuntimeError(f"{cell.name}: relative error {error:.1e} against {of.name}, bound {bound:.0e}")
    return {"error": error, "of": f"{of.engine}, {of.dtype}"}


def seconds_of(row: dict[str, Any]) -> float:
    """Return the seconds of all documents of a row of the record, NaN if it needed too much memory."""
    if not row["seconds"]:
        return math.nan
    return statistics.median(row["seconds"]) * len(row["lengths"]) / len(row["rows"])


def beyond(row: dict[str, Any]) -> int:
    """Return the peak bytes of a row of the record, beyond what its process held before."""
    return int(row["peak_bytes"] - row["held_bytes"])


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of a record's rows: one input and dtype after another."""
    lines = []
    ours = {(str(r["lengths"]), r["dtype"]): seconds_of(r) for r in rows if r["engine"] == "ringtile"}
    for row in rows:
        seconds = seconds_of(row)
        what = [input_of(row), row["dtype"], engine_and_way(row)]
        if math.isnan(seconds):
            lines.append([*what, row["status"], "-", "-", "-", "-"])
            continue
        ratio = seconds / ours.get((str(row["lengths"]), row["dtype"]), math.nan)
        told = [duration_text(seconds), "-" if math.isnan(ratio) else f"{ratio:.2f}x", bytes_text(beyond(row))]
        error = "-" if row["error"] is None else f"{row['error']:.0e}"
        lines.append([*what, *told, bytes_text(row["peak_bytes"]), error])
    heads = ["input", "dtype", "engine", "time", "over ringtile", "memory", "of the process", "error"]
    return Table(heads, lines, 3)


def input_of(row: dict[str, Any]) -> str:
    """Return the input of a row in words."""
    lengths = row["lengths"]
    return f"{lengths[0]:,} tokens" if len(lengths) == 1 else f"{len(lengths)} documents"


def engine_and_way(row: dict[str, Any]) -> str:
    """Return the engine of a row, and for a ragged batch how it was computed."""
    if len(row["lengths"]) == 1:
        return str(row["engine"])
    measured = f", {len(row['rows'])} rows measured" if len(row["rows"]) < len(row["lengths"]) else ""
    return f"{row['engine']}, {row['way']}{measured}"


def page(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    machine, versions = record["machine"], {**record["versions"], **record["engines"]}
    named = [
        f"{name} {versions[name]}" for name in ("torch", "transformers", "openvino", "onnxruntime") if versions[name]
    ]
    threads = f"{record['threads']} thread{'s' * (record['threads'] != 1)}"
    where = f"{threads} of {machine['cores']} cores, {machine['cpu']}, {machine['instruction_set']}"
    layers = record["layers"]
    parts: list[Part] = [
        TITLE,
        filled(INTRODUCTION.format(layers=layers, windows=layers - len(range(0, layers, 3)))),
        Code(f'pip install ".[encoders]"\n{record["command"]}', "sh"),
        filled(f"On {where}, with {', '.join(named)}. {record['warning'] or ''}"),
        table(record["rows"]),
        Picture("Time and memory of each engine over those of ringtile", "assets/encoders.png"),
        READ,
    ]
    return markdown(parts)


TITLE = """\
# Encoders

<!-- Generated by benchmarks/encoders.py from benchmarks/records: run it again, do not edit. -->"""

INTRODUCTION = """\
A whole encoder with the shape of ModernBERT-base: {layers} layers of width 768, {windows} of them with windows of 128
tokens, the others over all pairs. Its weights are random, so its outputs mean nothing, and its times and memory are
those of a trained one. Every engine gets the same weights and tokens. Its outputs are compared with those of the first
row of the same input before its time is told."""

READ = """\
* **time** is the median of the rounds of a cell, in a process of its own. **over ringtile** is the time over ringtile's
  for the same input and dtype: above 1, ringtile is faster.
* **memory** is the peak while it computes, beyond what the process held before: weights, libraries, and what a short
  call leaves. The next column is the peak of the whole process.
* **error** is relative, in the L2 norm, at 16 tokens of each document, against the first row of the same input.
* **A ragged batch** has documents of 256 to 8,192 tokens, evenly spaced in their logarithms. *Packed* is
  `use_ringtile(model, pack=True)`, see [Embed and rank long documents](how-to/embeddings.md). *One by one* is a call
  for each document: no padding, and nothing for a batch to share. *Padded* is one call with an attention mask. Some of
  its rows are measured, and their time is multiplied: padded rows take as long as each other. Their memory is as
  measured, for these rows alone.
* OpenVINO and ONNX Runtime get the model without a mask, by `convert_model` and `torch.onnx.export`. ONNX Runtime holds
  the scores of all pairs. It has no bfloat16 on a CPU.
* **int8 linears** are PyTorch's `quantize_dynamic` of all linear maps, with attention in float32."""


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the time and the memory of each engine over ringtile's, input by input."""
    import matplotlib

    from ringtile.tools.plot import picture

    ink, colors = "#768390", dict(zip(ENGINES, ("#768390", "#d9822b", "#b0559a", "#3f8ccc", "#7fb8e6"), strict=True))
    rows = [row for row in record["rows"] if row["seconds"]]
    inputs = [f"{input_of(row)}, {row['dtype']}" for row in rows]
    ours = {name: row for name, row in zip(inputs, rows, strict=True) if row["engine"] == "ringtile"}
    with picture(path, 9.2, 1.2 + 0.21 * len(rows)) as figure:
        named = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        matplotlib.rcParams.update({"savefig.dpi": 110, "savefig.transparent": True, **dict.fromkeys(named, ink)})
        both = figure.subplots(1, 2, sharey=True)
        for axes, of, text, title in (
            (both[0], seconds_of, duration_text, "time, ringtile = 1"),
            (both[1], beyond, bytes_text, "memory beyond weights, ringtile = 1"),
        ):
            for place, (name, row) in enumerate(zip(inputs, rows, strict=True)):
                ratio = of(row) / (of(ours.get(name, rows[inputs.index(name)])) or 1)
                axes.barh(place, ratio, color=colors[row["engine"]], height=0.75)
                axes.annotate(
                    text(of(row)), (ratio, place), (4, 0), textcoords="offset points", va="center", fontsize=8
                )
            axes.axvline(1, color=ink, lw=0.8, ls=":")
            axes.margins(x=0.2)
            axes.tick_params(labelsize=8)
            axes.set_title(title, fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        firsts = [name != before for name, before in zip(inputs, ["", *inputs], strict=False)]
        labels = zip(inputs, rows, firsts, strict=True)
        named_rows = [
            f"{name}   {engine_and_way(row)}" if first else engine_and_way(row) for name, row, first in labels
        ]
        both[0].set_yticks(range(len(rows)), named_rows, fontsize=8)
        both[0].invert_yaxis()


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return a record without rows."""
    versions = {}
    for name in ("transformers", "openvino", "onnxruntime"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    facts = {"engines": versions, "threads": args.threads, "layers": args.layers, "warning": busy_warning(), "rows": []}
    # Where the other engines are is no part of the command.
    left_out = {"--peers", str(args.peers)}
    return {**origin(shlex.join(["python", *(word for word in sys.argv if word not in left_out)])), **facts}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells the cell of a row from others, in the order of `cells_of`."""
    lengths, dtype, engine = row["lengths"], row["dtype"], row["engine"]
    return len(lengths) > 1, lengths, dtype != "float32", ENGINES.index(engine), row["way"] == PADDED


def check_firsts(jobs: list[Cell], rows: list[dict[str, Any]]) -> None:
    """Raise SystemExit if a run compares its cells with another one than the record does, and leaves that as it is."""
    keys, inputs = [key_of(cell._asdict()) for cell in jobs], [cell.lengths for cell in jobs]
    for row in rows:
        if row["seconds"] and row["of"] is None and row["lengths"] in inputs and key_of(row) not in keys:
            name = f"{input_of(row)}, {row['dtype']}, {engine_and_way(row)}"
            raise SystemExit(f"--out: expected a run that computes {name}, which the record compares others with")


def main() -> None:
    """Measure the cells, print a table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--tokens",
        type=count,
        nargs="*",
        default=[2048, 8192, 32768],
        help="batches of one document (default: 2K 8K 32K)",
    )
    add("--documents", type=int, default=32, help="of the ragged batch (default: 32), 0 for none")
    add("--padded", type=int, default=2, help="documents of a padded batch that are measured (default: 2)")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    add("--peers", type=Path, metavar="DIR", help="a folder with openvino and onnxruntime, after those of Python")
    add("--layers", type=int, default=22, help="fewer for a quick look (default: 22)")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rounds", type=int, default=3, help="at most (default: 3)")
    add("--seconds", type=float, default=30.0, help="begin no further round of a cell after as many (default: 30)")
    add("--memory", type=float, default=16.0, metavar="GIB", help="of a process (default: 16)")
    add("--out", type=Path, help="file of the record")
    add("--skip", nargs="+", default=[], metavar="REGEX", help='cells to leave out, such as "8,192.*bfloat16.*sdpa"')
    add("--page", action="store_true", help="write the page of the record in benchmarks/records, and measure nothing")
    add("--task", type=json.loads, help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peers is not None:
        # At the end, so that packages that both have are those of this environment.
        sys.path.append(str(args.peers))
    if args.page:
        found = json.loads(RECORD.read_text(encoding="utf-8"))
        write_whole(PAGE, page(found))
        draw(found, PICTURE)
        return
    if args.task is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(args.memory * 2**30),) * 2)
        if "cell" in args.task:
            told = measure(Cell(**args.task["cell"]), args)
        else:
            told = export(args.task["export"], args.layers, args.work)
        print(json.dumps(told))
        return
    record, known, progress = facts_of(args), {}, Progress()
    if record["warning"]:
        progress.say(record["warning"])
    jobs = [cell for cell in cells_of(args) if not any(re.search(each, cell.name) for each in args.skip)]
    old = before(args.out, record)
    check_firsts(jobs, old["rows"])
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder)
        for engine in sorted({cell.engine for cell in jobs} & {"openvino", "onnxruntime"}):
            progress.show(f"export the model for {engine}")
            in_process(args, {"export": engine})
        for cell in progress.through(jobs, lambda cell: cell.name, lambda cell: cell.cost):
            found = in_process(args, {"cell": cell._asdict()})
            row: dict[str, Any] = {**cell._asdict(), "seconds": [], "status": found}
            if not isinstance(found, str):
                compared = checked(cell, torch.load(args.work / "found.pt"), known)
                row = {**cell._asdict(), **found, **compared, "status": "measured"}
            record["rows"].append(row)
            told = "out of memory" if isinstance(found, str) else duration_text(seconds_of(row))
            progress.say(f"{cell.name}: {told}")
            if args.out is not None:
                whole = merged(old, record, key_of)
                whole["rows"].sort(key=key_of)
                whole["warning"] = record["warning"] or old["warning"]
                write_whole(args.out, json.dumps(whole, indent=1) + "\n")
    print("\n".join(table_lines(table(record["rows"]))))


if __name__ == "__main__":
    main()
