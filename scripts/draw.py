"""Draw faults of one line at random, seed them one at a time, and count those that the tests notice.

    python scripts/draw.py --count 100 --seed 7    hours; goes on where it stopped, and writes the record at each fault
    python scripts/draw.py --fresh                 from the beginning
    python scripts/draw.py --list                  print the faults, seed none

A fault changes one node of a syntax tree in ROOMS. A copy of the project has one fault at a time: the table in
tests/testing judges it, then the tests of its room, then all others. A fault may change nothing that anyone can see,
such as the size of a cache. A person reads those that survive.
"""

from __future__ import annotations

import argparse
import ast
import json
import queue
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mutants import LEAST_KILLED, ROOT, Copy

from ringtile.tools.machine import commit

ROOMS = ("kernels", "functional", "adaptive", "integrations", "distributed")
"""The folders of the package that faults are drawn from."""
RECORD = ROOT / "benchmarks/records/drawn.json"
TABLE = "testing"

_SWAPS: dict[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.And: "or",
    ast.Or: "and",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "floor": "ceil"}


class _Sites(ast.NodeVisitor):
    """Collect what can change: the range of lines and columns of a node, and its new text."""

    def __init__(self, text: str) -> None:
        self.lines = text.encode().split(b"\n")
        self.sites: list[tuple[ast.expr | ast.stmt, str]] = []

    def source(self, node: ast.expr | ast.keyword) -> str:
        """Return the text of a node of one line. Nodes of more lines do not change."""
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    def change(self, node: ast.expr | ast.stmt, new: str) -> None:
        if node.lineno == node.end_lineno and new:
            self.sites.append((node, new))

    def visit(self, node: ast.AST) -> None:
        # Annotations and messages change no result.
        if isinstance(node, ast.Raise | ast.JoinedStr):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value:
                self.visit(node.value)
            return
        if isinstance(node, ast.FunctionDef):
            for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
                self.visit(child)
            return
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                self.visit(child)
            return
        super().visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self.source(node.left), self.source(node.comparators[0])
            self.change(node, f"{left} {_SWAPS[type(node.ops[0])]} {right}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _SWAPS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self.change(node, f"{self.source(node.left)} {_SWAPS[type(node.op)]} {self.source(node.right)}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = f" {_SWAPS[type(node.op)]} "
        self.change(node, word.join(self.source(value) for value in node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self.change(node, self.source(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.change(node, str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        self.change(node.test, f"not ({self.source(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.change(node, self.source(node.body))
        self.change(node, self.source(node.orelse))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.change(node, _NAMES.get(node.id, ""))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _NAMES:
            self.change(node, f"{self.source(node.value)}.{_NAMES[node.attr]}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, words = self.source(node.func), [self.source(x) for x in (*node.args, *node.keywords)]
        for left_out in node.keywords:
            rest = [word for word in words if word != self.source(left_out)]
            self.change(node, f"{name}({', '.join(rest)})")
        for number in range(1, len(node.args)):
            swapped = [*words[: number - 1], words[number], words[number - 1], *words[number + 1 :]]
            self.change(node, f"{name}({', '.join(swapped)})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.change(node, "pass")
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Call) and node.value.args:
            self.change(node, f"return {self.source(node.value.args[0])}")
        self.generic_visit(node)


def changes(text: str) -> Iterator[tuple[int, str, str]]:
    """Return each change of a file as a line's number, the line, and the line changed."""
    sites = _Sites(text)
    sites.visit(ast.parse(text))
    lines = text.split("\n")
    for node, new in sites.sites:
        line = lines[node.lineno - 1].encode()
        changed = (line[: node.col_offset] + new.encode() + line[node.end_col_offset :]).decode()
        if changed.split() != line.decode().split():
            yield node.lineno, line.decode(), changed


class Fault(NamedTuple):
    """A changed line of a file in the package."""

    file: str
    number: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.old.strip()} -> {self.new.strip()}"

    def applied(self, text: str) -> str:
        """The text of the file with the changed line."""
        lines = text.split("\n")
        lines[self.number - 1] = self.new
        return "\n".join(lines)

    @property
    def room(self) -> str:
        return Path(self.file).parts[2]


def draw(count: int, seed: int) -> list[Fault]:
    """Draw faults. Each line of the rooms is as probable as another, and so is each change of a line."""
    every: dict[tuple[str, int, str], list[str]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / "src/ringtile" / room).rglob("*.py")):
        for number, line, changed in changes(path.read_text(encoding="utf-8")):
            every.setdefault((str(path.relative_to(ROOT)), number, line), []).append(changed)
    drawn = random.Random(seed)
    return [Fault(*line, drawn.choice(every[line])) for line in drawn.sample(sorted(every), count)]


def stages(room: str) -> dict[str, list[str]]:
    """The names of the stages that judge a fault of a room, and their folders of tests."""
    folders = [path.name for path in sorted((ROOT / "tests").iterdir()) if any(path.glob("test_*.py"))]
    others = [name for name in folders if name not in (TABLE, room)]
    return {
        name: [f"tests/{part}" for part in parts]
        for name, parts in (("table", [TABLE]), ("room", [room]), ("others", others))
    }


def killer(copy: Copy, fault: Fault, seconds: int) -> str:
    """The stage that notices a fault, empty if none does."""
    with copy.changed(fault.file, fault.applied):
        noticed = (name for name, tests in stages(fault.room).items() if copy.failure_of(tests, seconds))
        return next(noticed, "")


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=100, help="how many faults (default: 100)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the draw (default: 7)")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time (default: 2)")
    parser.add_argument("--limit", type=int, default=1800, metavar="SECONDS", help="time of a stage (default: 1800)")
    parser.add_argument("--fresh", action="store_true", help="judge again what the record has")
    parser.add_argument("--list", action="store_true", help="print the faults, seed none")
    args = parser.parse_args()
    faults = draw(args.count, args.seed)
    if args.list:
        print(*faults, sep="\n")
        return 0
    known: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["faults"] if RECORD.exists() else []
    outcomes = {} if args.fresh else {entry["fault"]: entry for entry in known}
    outcomes = {str(fault): outcomes[str(fault)] for fault in faults if str(fault) in outcomes}
    about = {"command": f"python scripts/draw.py --count {args.count} --seed {args.seed}", "commit": commit()}
    copies: queue.Queue[Copy] = queue.Queue()

    def judge(fault: Fault) -> None:
        copy, start = copies.get(), time.perf_counter()
        try:
            noticed = killer(copy, fault, args.limit)
        finally:
            copies.put(copy)
        outcomes[str(fault)] = {"fault": str(fault), "killed by": noticed}
        told = f"killed by {noticed}" if noticed else "SURVIVED"
        print(f"{told:16} {time.perf_counter() - start:5.0f} s  {fault}", flush=True)
        record = about | {"faults": [outcomes[key] for key in sorted(outcomes)]}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        for copy in pool.map(lambda number: Copy(Path(folder, str(number)), False), range(args.processes)):
            copies.put(copy)
        list(pool.map(judge, [fault for fault in faults if str(fault) not in outcomes]))
    by = [entry["killed by"] for entry in outcomes.values()]
    killed = ", ".join(f"{by.count(name)} killed by the {name}" for name in stages(ROOMS[0]))
    print(f"{len(by)} faults: {killed}, {by.count('')} survived")
    return 0 if by.count("") <= (1 - LEAST_KILLED) * len(by) else 1


if __name__ == "__main__":
    raise SystemExit(main())
