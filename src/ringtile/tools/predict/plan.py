"""`ringtile plan`: predict what attention over many ranks costs, per layout and transport."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.distributed.layout import LAYOUTS
from ringtile.distributed.plan import TRANSPORTS, Transport
from ringtile.patterns import Pattern, parse
from ringtile.tools.plot import FORMATS, missing_matplotlib, picture, plot_traffic
from ringtile.tools.predict.cluster import measure_machine
from ringtile.tools.predict.cost import Cost, ModelCost, cost_of_model, estimate
from ringtile.tools.predict.hardware import HARDWARE, Hardware, Sizes
from ringtile.tools.predict.mesh_cost import estimate_mesh, ranks_per_row
from ringtile.tools.predict.work import MAX_RANKS, Tiles, survey
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.units import bytes_text, count, count_text, duration_text

DTYPES = ("bfloat16", "float16", "float32", "float64")

_MAX_TOKENS = 1 << 28
"""A striped layout of more tokens has millions of runs."""

_WIDTH = 118
_COLUMNS = (
    "layout",
    "transport",
    "received",
    "sent",
    "between",
    "messages",
    "peers",
    "balance",
    "buffer",
    "forward",
    "backward",
)

_MOST = (
    "sent",
    "received",
    "sent_backward",
    "received_backward",
    "inside",
    "between",
    "messages",
    "peers",
    "buffer",
    "copied",
)


class Row(NamedTuple):
    """One layout and transport: its cost, or why it is not possible."""

    layout: str
    cost: Cost | None
    transport: str
    reason: str


class Table(NamedTuple):
    """All rows for one number of ranks."""

    n_ranks: int
    rows: list[Row]
    automatic: dict[str, Transport]
    """The transport that `ring_attention` takes by default, per layout."""

    @property
    def best(self) -> Row:
        """The row with the least predicted time. Raises ValueError if there is none."""
        possible = [(row.cost.seconds, number) for number, row in enumerate(self.rows) if row.cost is not None]
        if not possible:
            raise ValueError(f"--ranks {self.n_ranks}: {self.rows[0].reason}")
        return self.rows[min(possible)[1]]

    @property
    def default(self) -> Row | None:
        """The row with the least predicted time by these transports, with the layout of `cheapest_layout`."""
        taken = [row for row in self.rows if row.cost is not None and row.transport == self.automatic[row.layout]]
        return min(taken, key=lambda row: row.cost.seconds if row.cost else 0, default=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ringtile plan``."""
    add = parser.add_argument
    patterns = 'such as "causal & window(4096)" or longformer. Several: those of a model\'s layers'
    add("patterns", nargs="+", metavar="PATTERN", help=patterns)
    add("--layers", type=count, nargs="+", metavar="N", help="number of layers of each pattern (default: 1)")
    add("--tokens", type=count, required=True, metavar="N", help="number of tokens of all ranks, such as 1M")
    add("--ranks", type=count, nargs="+", required=True, metavar="P", help="numbers of ranks, a table for each")
    add("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts (default: all)")
    add("--causal", action="store_true", help="keep only keys at or before each query")
    add("--heads", type=count, default=None, metavar="H", help="query heads (default: 32, or those of the pattern)")
    add("--kv-heads", type=count, metavar="K", help="key heads (default: 8, or as many as query heads)")
    add("--head-dim", type=count, default=128, metavar="D", help="head dim (default: 128)")
    add("--value-dim", type=count, metavar="D", help="width of the values (default: the head dim)")
    add("--batch", type=count, default=1, metavar="B", help="batch elements (default: 1)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype on the wire (default: bfloat16)")
    names = ", ".join(HARDWARE)
    add("--hardware", metavar="NAME", help=f"{names}, or a JSON file with figures (default: h100)")
    measured = "measure this machine first, with processes over gloo, and write its figures into this file"
    add("--measure", type=Path, metavar="FILE", help=measured)
    add("--out", type=Path, metavar="FILE", help=f"also draw who sends to whom into this file ({', '.join(FORMATS)})")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print a table for each number of ranks, and return 0.

    Raises:
        ValueError: If an argument is invalid, no layout and transport supports the pattern, or a plan would be too
            large.
    """
    rules, sizes, hardware = _checked(args)
    if len(rules) > 1 or args.layers:
        return _run_model(dict(zip(rules, args.layers or [1] * len(rules), strict=True)), args, sizes, hardware)
    rule = rules[0]
    tables: list[Table] = []
    progress = Progress(quiet=True)
    progress.show(f"listing the tiles of {rule!r}")
    listed = Tiles(rule, args.tokens, sizes)
    for n_ranks in args.ranks:
        try:
            table = _table(listed, n_ranks, args.layout, hardware, progress)
        finally:
            progress.clear()
        if not args.json:
            # Table by table: many ranks take seconds.
            lines = [] if tables else list(_header(repr(rule), args.tokens, sizes, args.dtype, hardware))
            print("\n".join([*lines, "", *_lines(table)]), flush=True)
        tables.append(table)
    if args.out is not None:
        _draw(tables, f"{rule!r}, {count_text(args.tokens)} tokens", args.out)
    if args.json:
        record = {
            "pattern": repr(rule),
            "tokens": args.tokens,
            "sizes": {**asdict(sizes), "dtype": args.dtype},
            "hardware": asdict(hardware),
            "tables": [_record(table) for table in tables],
            "picture": None if args.out is None else str(args.out),
        }
        print(json.dumps(record, indent=2))
    elif args.out is not None:
        print(f"\npicture: {args.out}")
    return 0


def _run_model(layers: dict[Pattern, int], args: argparse.Namespace, sizes: Sizes, hardware: Hardware) -> int:
    """Print a table of layouts for each number of ranks, with the cheapest transport of each pattern."""
    records = []
    progress, listed = Progress(quiet=True), dict[Pattern, Tiles]()
    for n_ranks in args.ranks:
        found: dict[str, ModelCost | str] = {}
        for name in args.layout:
            progress.show(f"{n_ranks:,} ranks: {name}")
            try:
                layout = LAYOUTS[name](args.tokens, n_ranks)
                found[name] = cost_of_model(layers, layout, sizes, hardware, listed=listed)
            except ValueError as error:
                found[name] = str(error)
            finally:
                progress.clear()
        costs = {name: cost for name, cost in found.items() if isinstance(cost, ModelCost)}
        if not costs:
            raise ValueError(f"--ranks {n_ranks}: {next(iter(found.values()))}")
        best = min(costs, key=lambda name: costs[name].seconds)
        records.append(_model_record(n_ranks, layers, found, best))
        if not args.json:
            lines = []
            if n_ranks == args.ranks[0]:
                texts = ", ".join(f"{n} x {rule!r}" for rule, n in layers.items())
                lines = list(_header(texts, args.tokens, sizes, args.dtype, hardware))
            print("\n".join([*lines, "", *_model_lines(n_ranks, layers, costs, best)]), flush=True)
    if args.json:
        shared = {"tokens": args.tokens, "sizes": {**asdict(sizes), "dtype": args.dtype}, "hardware": asdict(hardware)}
        patterns = {repr(rule): n for rule, n in layers.items()}
        print(json.dumps({"layers": patterns, **shared, "tables": records}, indent=2))
    return 0


def _of_layers(layers: dict[Pattern, int], cost: ModelCost, name: str) -> Tensor:
    """Return a figure of each rank, summed over all layers."""
    return torch.stack([n * getattr(cost.costs[rule], name) for rule, n in layers.items()]).sum(0)


_SUMMED = ("received", "sent", "between")


def _model_lines(n_ranks: int, layers: dict[Pattern, int], costs: dict[str, ModelCost], best: str) -> Iterator[str]:
    cells: list[Sequence[str]] = [
        ("layout", "transports", "received", "sent", "between", "buffer", "forward", "backward")
    ]
    for name, cost in costs.items():
        sums = [bytes_text(int(_of_layers(layers, cost, figure).max())) for figure in _SUMMED]
        buffer = bytes_text(max(int(each.buffer.max()) for each in cost.costs.values()))
        times = [
            duration_text(sum(n * float(getattr(cost.costs[rule], name).max()) for rule, n in layers.items()))
            for name in ("forward", "backward")
        ]
        cells.append((name, ", ".join(cost.transports.values()), *sums, buffer, *times))
    yield f"{n_ranks:,} {'rank' if n_ranks == 1 else 'ranks'}, sums over all layers (* least time, by the model)"
    yield from _aligned(cells, [" ", *("*" if name == best else " " for name in costs)])


def _model_record(
    n_ranks: int, layers: dict[Pattern, int], found: dict[str, ModelCost | str], best: str
) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for name, cost in found.items():
        row: dict[str, object] = {"layout": name, "best": name == best}
        if isinstance(cost, str):
            row["reason"] = cost
        else:
            row["transports"] = list(cost.transports.values())
            row |= {f"most_{figure}": int(_of_layers(layers, cost, figure).max()) for figure in _SUMMED}
            row["model_seconds"] = cost.seconds
        rows.append(row)
    return {"ranks": n_ranks, "rows": rows}


def _checked(args: argparse.Namespace) -> tuple[list[Pattern], Sizes, Hardware]:
    rules = [parse(text) for text in args.patterns]
    if args.causal:
        rules = [parse("causal") & rule for rule in rules]
    if len(set(rules)) < len(rules):
        raise ValueError(f"PATTERN: expected different patterns, got {rules}. Give their numbers by --layers")
    if args.layers and (len(args.layers) != len(rules) or min(args.layers) < 1):
        raise ValueError(f"--layers: expected a positive number for each of {len(rules)} patterns, got {args.layers}")
    if len(rules) > 1 and args.out is not None:
        raise ValueError(f"--out: expected one pattern, got {len(rules)}")
    if args.tokens > _MAX_TOKENS:
        raise ValueError(f"--tokens: expected at most {_MAX_TOKENS:,}, got {args.tokens:,}")
    if max(args.ranks) > MAX_RANKS:
        raise ValueError(f"--ranks: expected at most {MAX_RANKS:,}, got {max(args.ranks):,}")
    if args.measure is not None:
        if args.hardware is not None:
            raise ValueError(f"--measure: expected no --hardware beside it, got {args.hardware!r}")
        if not args.measure.absolute().parent.is_dir():
            raise ValueError(f"--measure: expected a file in a folder that exists, got {str(args.measure)!r}")
    if args.out is not None:
        if args.out.suffix not in FORMATS:
            raise ValueError(f"--out: expected a file name ending in {', '.join(FORMATS)}, got {str(args.out)!r}")
        if (reason := missing_matplotlib()) is not None:
            raise ValueError(f"--out: {reason}")
    heads = args.heads or next((rule.num_heads for rule in rules if rule.num_heads), 32)
    kv_heads = args.kv_heads or (8 if heads % 8 == 0 else heads)
    dtype = getattr(torch, args.dtype)
    sizes = Sizes(heads, kv_heads, args.head_dim, args.value_dim, args.batch, dtype)
    return rules, sizes, _hardware(args)


def _hardware(args: argparse.Namespace) -> Hardware:
    if args.measure is None:
        name = args.hardware or "h100"
        return HARDWARE.get(name) or Hardware.read(Path(name))
    progress = Progress(quiet=True)
    progress.show("measuring links, attention and copies of this machine")
    try:
        found = measure_machine()
    finally:
        progress.clear()
    write_whole(args.measure, json.dumps(asdict(found), indent=2) + "\n")
    return found


def _table(listed: Tiles, n_ranks: int, layouts: list[str], hardware: Hardware, progress: Progress) -> Table:
    rows: list[Row] = []
    automatic: dict[str, Transport] = {}
    for name in layouts:
        progress.show(f"{n_ranks:,} ranks: {name}")
        work = survey(listed.pattern, LAYOUTS[name](listed.grid.n_keys, n_ranks), listed.sizes, listed=listed)
        automatic[name] = work.automatic
        for transport in TRANSPORTS:
            if transport == "hierarchy" and n_ranks <= hardware.ranks_per_node:
                continue
            try:
                rows.append(Row(name, estimate(work, transport, hardware), transport, ""))
            except ValueError as error:
                rows.append(Row(name, None, transport, str(error)))
        per_row = ranks_per_row(n_ranks, listed.sizes.heads, hardware)
        if per_row is not None:
            try:
                rows.append(Row(name, estimate_mesh(work, per_row, hardware), "ulysses", ""))
            except ValueError as error:
                rows.append(Row(name, None, f"ulysses {n_ranks // per_row}x{per_row}", str(error)))
    table = Table(n_ranks, rows, automatic)
    assert table.best
    return table


def _header(what: str, n_tokens: int, sizes: Sizes, dtype: str, hardware: Hardware) -> Iterator[str]:
    shapes = f"{sizes.heads} query heads, {sizes.kv_heads} key heads, head_dim {sizes.head_dim}, {dtype}"
    for text in (
        what,
        f"{n_tokens:,} tokens, {shapes}. The tables list the largest figures of any rank. Bytes are exact, times are a "
        "model.",
        f"model of {hardware.name}: {hardware.assumption}",
    ):
        yield textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _cells(row: Row) -> Iterator[str]:
    cost = row.cost
    assert cost is not None
    yield from (row.layout, row.transport + (f" {cost.mesh[0]}x{cost.mesh[1]}" if cost.mesh else ""))
    yield from (bytes_text(int(x.max())) for x in (cost.received, cost.sent, cost.between))
    yield from (f"{int(x.max()):,}" for x in (cost.messages, cost.peers))
    yield f"{cost.balance:.2f}"
    yield bytes_text(int(cost.buffer.max()))
    yield from (duration_text(float(x.max())) for x in (cost.forward, cost.backward))


def _lines(table: Table) -> Iterator[str]:
    best, default = table.best, table.default
    rows = [row for row in table.rows if row.cost is not None]
    cells = [_COLUMNS, *(tuple(_cells(row)) for row in rows)]
    marks = [" ", *("*" if row is default else "+" if row is best else " " for row in rows)]
    told = "* least time with transport='auto'" + ("" if best is default else ", + with any")
    yield f"{table.n_ranks:,} {'rank' if table.n_ranks == 1 else 'ranks'} ({told}, by the model)"
    yield from _aligned(cells, marks)
    meshes = sorted({row.cost.mesh for row in rows if row.cost is not None and row.cost.mesh})
    for n_rows, per_row in meshes:
        yield f"  {n_rows}x{per_row}: with group=init_device_mesh(device, ({n_rows}, {per_row}))"
    if own := [f"{bytes_text(most)} ({row.layout}, {row.transport})" for row in rows if (most := _copied(row))]:
        text = f"buffer: copies of the rank's own keys, for rows that also read others': {', '.join(own)}"
        yield textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in table.rows:
        if row.reason:
            reasons.setdefault((row.transport, row.reason), []).append(row.layout)
    for (transport, reason), layouts in reasons.items():
        text = f"no {transport}{_named(layouts, table)}: {reason}"
        yield textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    taken: dict[str, list[str]] = {}
    for layout, transport in table.automatic.items():
        taken.setdefault(transport, []).append(layout)
    texts = [f"{transport}{_named(layouts, table)}" for transport, layouts in taken.items()]
    cheapest = "" if default is None else f"; cheapest_layout: {default.layout}"
    yield f"  ring_attention with transport='auto': {', '.join(texts)}{cheapest}"
    if best is not default:
        yield f"  less time: {best.layout} with transport={best.transport!r}"


def _copied(row: Row) -> int:
    """Return the bytes of own keys in the largest buffer if they are most of it, otherwise 0."""
    assert row.cost is not None
    largest = int(row.cost.buffer.argmax())
    most = int(row.cost.copied[largest])
    return most if 2 * most > int(row.cost.buffer[largest]) else 0


def _aligned(cells: Sequence[Sequence[str]], marks: Sequence[str]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for mark, line in zip(marks, cells, strict=True):
        texts = [
            f"{text:<{width}}" if n < 2 else f"{text:>{width}}"
            for n, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield f"{mark} {'  '.join(texts)}"


def _named(layouts: list[str], table: Table) -> str:
    """Return the names of the layouts, if they are not all."""
    return "" if len(layouts) == len(table.automatic) else f" ({', '.join(layouts)})"


def _record(table: Table) -> dict[str, object]:
    rows = []
    for row in table.rows:
        found: dict[str, object] = {"layout": row.layout, "transport": row.transport, "best": row is table.best}
        if row.cost is None:
            found["reason"] = row.reason
        else:
            for name in _MOST:
                found[f"most_{name}"] = int(getattr(row.cost, name).max())
            found["total_between"] = int(row.cost.between.sum())
            found["balance"] = row.cost.balance
            found["mesh"] = row.cost.mesh
            found["model_seconds"] = {name: float(getattr(row.cost, name).max()) for name in ("forward", "backward")}
        rows.append(found)
    layout = None if table.default is None else table.default.layout
    return {"ranks": table.n_ranks, "auto": table.automatic, "cheapest_layout": layout, "rows": rows}


def _draw(tables: list[Table], title: str, path: Path) -> None:
    across = min(3, len(tables))
    down = -(-len(tables) // across)
    with picture(path, 5.4 * across, 5.2 * down + 0.5) as figure:
        figure.suptitle("\n".join(textwrap.wrap(f"Forward traffic of {title}", 48 * across)[:3]), fontsize=11)
        for number, table in enumerate(tables):
            cost = table.best.cost
            assert cost is not None
            axes = plot_traffic(cost.traffic, figure.add_subplot(down, across, number + 1))
            most = f"at most {bytes_text(int(cost.received.max()))} received"
            axes.set_title(f"{table.n_ranks:,} ranks: {table.best.layout}, {cost.transport}\n{most}", fontsize=9.5)
            bar = figure.colorbar(axes.images[0], cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
            bar.set_label("MiB from rank to rank")
            bar.outline.set_visible(False)
