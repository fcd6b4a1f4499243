"""`ringtile plan`: predict what attention over many ranks costs, per layout and transport."""

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringtile.distributed.layout import LAYOUTS
from ringtile.distributed.plan import TRANSPORTS, Transport
from ringtile.patterns import Pattern, parse
from ringtile.tools.plot import FORMATS, check_out, picture, plot_traffic
from ringtile.tools.predict.cheapest import ModelCost, cost_of_model
from ringtile.tools.predict.cluster import measure_machine
from ringtile.tools.predict.cost import Cost, estimate, ranks_per_row
from ringtile.tools.predict.hardware import HARDWARE, Hardware, Sizes
from ringtile.tools.predict.work import MAX_RANKS, Tiles, survey
from ringtile.tools.progress import Progress
from ringtile.tools.record import DTYPES, write_whole
from ringtile.tools.units import aligned, bytes_text, count, count_text, duration_text

_MAX_TOKENS = 1 << 28
"""A striped layout of more tokens has millions of runs."""

_WIDTH = 118
_TIMES = ("forward", "backward")
_COLUMNS = ("received", "sent", "between", "messages", "peers", "balance", "buffer", *_TIMES)
_SUMMED = ("received", "sent", "between")
_MOST = (
    "sent", "received", "sent_backward", "received_backward", "inside", "between", "messages", "peers", "buffer",
    "copied",
)  # fmt: skip


class Row(NamedTuple):
    """One layout and transport: its cost, or why it is not possible."""

    layout: str
    transport: str
    cost: Cost | str


class Table(NamedTuple):
    """All rows for one number of ranks."""

    n_ranks: int
    rows: list[Row]
    automatic: dict[str, Transport]
    """The transport that `ring_attention` takes by default, per layout."""

    @property
    def possible(self) -> list[tuple[Row, Cost]]:
        return [(row, row.cost) for row in self.rows if isinstance(row.cost, Cost)]

    @property
    def best(self) -> tuple[Row, Cost]:
        """The row with the least predicted time. Raises ValueError if there is none."""
        if not self.possible:
            raise ValueError(f"--ranks {self.n_ranks}: {self.rows[0].cost}")
        return min(self.possible, key=lambda each: each[1].seconds)

    @property
    def default(self) -> Row | None:
        """The row with the least predicted time by these transports, with the layout of `cheapest_layout`."""
        taken = [each for each in self.possible if each[0].transport == self.automatic[each[0].layout]]
        return min(taken, key=lambda each: each[1].seconds)[0] if taken else None

    def grouped(self, places: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, str]]:
        """Yield each second of pairs once, with the names of its layouts, the firsts, if they are not all."""
        found: dict[Any, list[str]] = {}
        for layout, each in places:
            found.setdefault(each, []).append(layout)
        for each, layouts in found.items():
            yield each, "" if len(layouts) == len(self.automatic) else f" ({', '.join(layouts)})"

    def lines(self) -> Iterator[str]:
        (best, _), default, rows = self.best, self.default, self.possible
        told = "* least time with transport='auto'" + ("" if best is default else ", + with any")
        yield f"{_ranks(self.n_ranks)} ({told}, by the model)"
        texts = []
        for row, cost in rows:
            mark = "*" if row is default else "+" if row is best else " "
            transport = row.transport + (" {}x{}".format(*cost.mesh) if cost.mesh else "")
            texts.append({"  layout": f"{mark} {row.layout}", "transport": transport, **_texts(_figures(cost))})
        yield from aligned(texts, 2)
        for mesh in sorted({cost.mesh for _, cost in rows if cost.mesh}):
            yield f"  {'{}x{}'.format(*mesh)}: with group=init_device_mesh(device, {mesh})"
        if own := [f"{bytes_text(n)} ({row.layout}, {row.transport})" for row, cost in rows if (n := _copied(cost))]:
            yield _wrapped(f"buffer: copies of the rank's own keys, for rows that also read others': {', '.join(own)}")
        refused = [(row.layout, (row.transport, row.cost)) for row in self.rows if isinstance(row.cost, str)]
        for (transport, reason), layouts in self.grouped(refused):
            yield _wrapped(f"no {transport}{layouts}: {reason}")
        taken = ", ".join(map("".join, self.grouped(self.automatic.items())))
        cheapest = "" if default is None else f"; cheapest_layout: {default.layout}"
        yield f"  ring_attention with transport='auto': {taken}{cheapest}"
        if best is not default:
            yield f"  less time: {best.layout} with transport={best.transport!r}"

    def record(self) -> dict[str, object]:
        rows = []
        for row in self.rows:
            found: dict[str, object] = {"reason": row.cost}
            if not isinstance(cost := row.cost, str):
                found = {f"most_{name}": int(getattr(cost, name).max()) for name in _MOST}
                found |= {"total_between": int(cost.between.sum()), "balance": cost.balance, "mesh": cost.mesh}
                found["model_seconds"] = {name: float(getattr(cost, name).max()) for name in _TIMES}
            rows.append({"layout": row.layout, "transport": row.transport, "best": row is self.best[0], **found})
        layout = None if self.default is None else self.default.layout
        return {"ranks": self.n_ranks, "auto": self.automatic, "cheapest_layout": layout, "rows": rows}


class ModelTable(NamedTuple):
    """All layouts for one number of ranks, with the cheapest transport of each pattern of a model."""

    n_ranks: int
    layers: dict[Pattern, int]
    found: dict[str, ModelCost | str]
    """By layout: its cost, or why it is not possible."""

    @property
    def costs(self) -> dict[str, ModelCost]:
        return {name: cost for name, cost in self.found.items() if not isinstance(cost, str)}

    @property
    def best(self) -> str:
        """The layout with the least predicted time. Raises ValueError if there is none."""
        if not self.costs:
            raise ValueError(f"--ranks {self.n_ranks}: {next(iter(self.found.values()))}")
        return min(self.costs, key=lambda name: self.costs[name].seconds)

    def summed(self, cost: ModelCost) -> dict[str, int]:
        """Return the most bytes of a rank, summed over all layers."""
        layers = self.layers.items()
        return {name: int(sum(n * getattr(cost.costs[rule], name) for rule, n in layers).max()) for name in _SUMMED}

    def lines(self) -> Iterator[str]:
        costs, texts = self.costs, []
        for name, cost in costs.items():
            of_layers = [(n, _figures(cost.costs[rule])) for rule, n in self.layers.items()]
            # Layers run one after another, so their times add up, and the largest buffer serves all of them.
            times = {way: sum(n * each[way] for n, each in of_layers) for way in _TIMES}
            figures = {**self.summed(cost), "buffer": max(each["buffer"] for _, each in of_layers), **times}
            words = {
                "  layout": f"{'*' if name == self.best else ' '} {name}",
                "transports": ", ".join(cost.transports.values()),
            }
            texts.append(words | _texts(figures))
        yield f"{_ranks(self.n_ranks)}, sums over all layers (* least time, by the model)"
        yield from aligned(texts, 2)

    def record(self) -> dict[str, object]:
        rows = []
        for name, cost in self.found.items():
            row: dict[str, object] = {"reason": cost}
            if not isinstance(cost, str):
                most = {f"most_{figure}": most for figure, most in self.summed(cost).items()}
                row = {"transports": list(cost.transports.values()), **most, "model_seconds": cost.seconds}
            rows.append({"layout": name, "best": name == self.best, **row})
        return {"ranks": self.n_ranks, "rows": rows}


def _figures(cost: Cost) -> dict[str, float]:
    """Return the largest figure of any rank, by column."""
    return {name: cost.balance if name == "balance" else float(getattr(cost, name).max()) for name in _COLUMNS}


_SHAPES: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(_TIMES, duration_text),
    **dict.fromkeys(("messages", "peers"), "{:,.0f}".format),
    "balance": "{:.2f}".format,
}
"""The texts of figures that are no bytes."""


def _texts(figures: Mapping[str, float]) -> dict[str, str]:
    return {name: _SHAPES.get(name, bytes_text)(figure) for name, figure in figures.items()}


def _ranks(n_ranks: int) -> str:
    return f"{n_ranks:,} rank{'' if n_ranks == 1 else 's'}"


_wrapped = partial(textwrap.fill, width=_WIDTH, initial_indent="  ", subsequent_indent="    ")


def _copied(cost: Cost) -> int:
    """Return the bytes of own keys in the largest buffer if they are most of it, otherwise 0."""
    most = int(cost.copied[cost.buffer.argmax()])
    return most if 2 * most > int(cost.buffer.max()) else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


@dataclass
class _Planned:
    """The arguments of a run, and the tiles that its tables share."""

    layers: dict[Pattern, int]
    args: argparse.Namespace
    sizes: Sizes
    hardware: Hardware
    progress: Progress
    listed: dict[Pattern, Tiles] = field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        return len(self.layers) > 1 or bool(self.args.layers)

    def table(self, n_ranks: int) -> Table | ModelTable:
        """Return the table for a number of ranks. Raises ValueError if no row is possible."""
        try:
            table = self._of_model(n_ranks) if self.is_model else self._of_pattern(n_ranks)
        finally:
            self.progress.clear()
        assert table.best
        return table

    def _of_pattern(self, n_ranks: int) -> Table:
        (rule,) = self.layers
        if rule not in self.listed:
            self.progress.show(f"listing the tiles of {rule!r}")
            self.listed[rule] = Tiles(rule, self.args.tokens, self.sizes)
        courses: list[tuple[Transport, int | None]] = [(transport, None) for transport in TRANSPORTS]
        if n_ranks <= self.hardware.ranks_per_node:
            courses.remove(("hierarchy", None))
        if (size := ranks_per_row(n_ranks, self.sizes.heads, self.hardware)) is not None:
            courses.append(("ulysses", size))
        table = Table(n_ranks, [], {})
        for name in self.args.layout:
            self.progress.show(f"{n_ranks:,} ranks: {name}")
            layout = LAYOUTS[name](self.args.tokens, n_ranks)
            work = survey(rule, layout, self.sizes, listed=self.listed[rule])
            table.automatic[name] = work.automatic
            for transport, size in courses:
                try:
                    table.rows.append(Row(name, transport, estimate(work, transport, self.hardware, size)))
                except ValueError as error:
                    shown = transport if size is None else f"{transport} {n_ranks // size}x{size}"
                    table.rows.append(Row(name, shown, str(error)))
        return table

    def _of_model(self, n_ranks: int) -> ModelTable:
        found: dict[str, ModelCost | str] = {}
        for name in self.args.layout:
            self.progress.show(f"{n_ranks:,} ranks: {name}")
            try:
                layout = LAYOUTS[name](self.args.tokens, n_ranks)
                found[name] = cost_of_model(self.layers, layout, self.sizes, self.hardware, listed=self.listed)
            except ValueError as error:
                found[name] = str(error)
        return ModelTable(n_ranks, self.layers, found)


def run(args: argparse.Namespace) -> int:
    """Print a table for each number of ranks, and return 0."""
    rules, sizes, hardware = _checked(args)
    layers = dict(zip(rules, args.layers or [1] * len(rules), strict=True))
    planned = _Planned(layers, args, sizes, hardware, Progress(quiet=True))
    what = ", ".join(f"{n} x {rule!r}" for rule, n in layers.items()) if planned.is_model else repr(rules[0])
    tables: list[Table | ModelTable] = []
    for n_ranks in args.ranks:
        table = planned.table(n_ranks)
        if not args.json:
            # Table by table: many ranks take seconds.
            lines = [] if tables else list(_header(what, args.tokens, sizes, args.dtype, hardware))
            print("\n".join([*lines, "", *table.lines()]), flush=True)
        tables.append(table)
    if args.out is not None:
        drawn = [each for each in tables if isinstance(each, Table)]
        _draw(drawn, f"{what}, {count_text(args.tokens)} tokens", args.out)
    if args.json:
        record: dict[str, object] = {"pattern": what}
        if planned.is_model:
            record = {"layers": {repr(rule): n for rule, n in layers.items()}}
        record |= {"tokens": args.tokens, "sizes": {**asdict(sizes), "dtype": args.dtype}, "hardware": asdict(hardware)}
        record["tables"] = [each.record() for each in tables]
        if not planned.is_model:
            record["picture"] = None if args.out is None else str(args.out)
        print(json.dumps(record, indent=2))
    elif args.out is not None:
        print(f"\npicture: {args.out}")
    return 0


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
    if args.layers and args.out is not None:
        raise ValueError("--out: expected no --layers beside it, which print a table of layouts without a picture")
    if args.tokens > _MAX_TOKENS:
        raise ValueError(f"--tokens: expected at most {_MAX_TOKENS:,}, got {args.tokens:,}")
    if max(args.ranks) > MAX_RANKS:
        raise ValueError(f"--ranks: expected at most {MAX_RANKS:,}, got {max(args.ranks):,}")
    if args.measure is not None and args.hardware is not None:
        raise ValueError(f"--measure: expected no --hardware beside it, got {args.hardware!r}")
    if args.measure is not None and not args.measure.absolute().parent.is_dir():
        raise ValueError(f"--measure: expected a file in a folder that exists, got {str(args.measure)!r}")
    check_out(args.out)
    # A pattern of its own for each head fixes the number of heads.
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


def _header(what: str, n_tokens: int, sizes: Sizes, dtype: str, hardware: Hardware) -> Iterator[str]:
    shapes = f"{sizes.heads} query heads, {sizes.kv_heads} key heads, head_dim {sizes.head_dim}, {dtype}"
    for text in (
        what,
        f"{n_tokens:,} tokens, {shapes}. The tables list the largest figures of any rank. Bytes are exact, times are a "
        "model.",
        f"model of {hardware.name}: {hardware.assumption}",
    ):
        yield textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _draw(tables: list[Table], title: str, path: Path) -> None:
    across = min(3, len(tables))
    down = -(-len(tables) // across)
    with picture(path, 5.4 * across, 5.2 * down + 0.5) as figure:
        figure.suptitle("\n".join(textwrap.wrap(f"Forward traffic of {title}", 48 * across)[:3]), fontsize=11)
        for number, table in enumerate(tables):
            best, cost = table.best
            axes = plot_traffic(cost.traffic, figure.add_subplot(down, across, number + 1))
            most = f"at most {bytes_text(int(cost.received.max()))} received"
            axes.set_title(f"{table.n_ranks:,} ranks: {best.layout}, {cost.transport}\n{most}", fontsize=9.5)
            bar = figure.colorbar(axes.images[0], cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
            bar.set_label("MiB from rank to rank")
            bar.outline.set_visible(False)
