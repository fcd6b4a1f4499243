"""The changes that `scripts/drift.py` makes, as edits of the source of a file."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.find_spec("transformers")
FOLDER = os.path.dirname((_SPEC and _SPEC.origin) or "") + os.sep
USERS = [str(ROOT / "tests/tiny.py"), str(ROOT / "scripts/drift_cases.py")]
"""Files that use transformers, in which a rename is made too."""
NEW, MASK, FACTOR = "_anew", "mask_of_pairs", "drift_factor"
"""The end of new names; the names of new arguments."""


class Change(NamedTuple):
    kind: str
    file: str
    """The file that changes, "" for all of them."""
    function: str
    detail: str
    """A name, or the number of a node in the function, with what more the kind needs."""
    cases: tuple[str, ...]

    def __str__(self) -> str:
        return " | ".join((*self[:4], ", ".join(self.cases)))

    @classmethod
    def read(cls, text: str) -> Change:
        kind, file, function, detail, cases = text.split(" | ")
        return cls(kind, file, function, detail, tuple(cases.split(", ")))


def functions_of(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file by their qualified names."""
    found: dict[str, ast.FunctionDef] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.<locals>.")
            else:
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    visit(ast.parse(source), "")
    return found


def span(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def body_of(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def calls_of(function: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Call)]


def defaults_of(function: ast.FunctionDef) -> dict[str, ast.expr]:
    arguments, defaults = function.args.args, function.args.defaults
    return dict(zip([x.arg for x in arguments[len(arguments) - len(defaults) :]], defaults, strict=True))


class Text:
    """The text of a file, in which nodes are replaced."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.starts = [0, *(i + 1 for i, byte in enumerate(self.source) if byte == 10)]
        self.edits: list[tuple[int, int, str]] = []

    def at(self, node: Any) -> tuple[int, int]:
        first, last, begin, end = span(node)
        return self.starts[first - 1] + begin, self.starts[last - 1] + end

    def of(self, node: Any) -> str:
        begin, end = self.at(node)
        return self.source[begin:end].decode()

    def replace(self, node: Any, text: str) -> None:
        self.edits.append((*self.at(node), text))

    def drop(self, first: Any, last: Any) -> None:
        """Remove an argument, from its first node to the end of its last, and the comma after it."""
        end = self.at(last)[1]
        comma = re.match(rb"\s*,?", self.source[end:])
        self.edits.append((self.at(first)[0], end + (comma.end() if comma else 0), ""))

    def begin(self, function: ast.FunctionDef, line: str) -> None:
        """Put a line before the first statement of a function."""
        first = (body_of(function) or function.body)[0]
        start = self.at(first)[0]
        self.edits.append((start, start, f"{line}\n{' ' * first.col_offset}"))

    def add_keyword(self, call: ast.Call, keyword: str) -> None:
        end = self.at(call)[1] - 1
        comma = "" if self.source[:end].rstrip().endswith((b",", b"(")) else ", "
        self.edits.append((end, end, comma + keyword))

    def accept(self, function: ast.FunctionDef, name: str, default: str) -> str:
        """Give a function a keyword argument, and return the expression that reads it."""
        of = function.args
        if of.kwarg is not None:
            return f"{of.kwarg.arg}.pop({name!r}, {default})"
        last = (of.kwonlyargs or of.args)[-1]
        value = (of.kw_defaults or of.defaults or [None])[-1]
        end = self.at(value or last)[1]
        self.edits.append((end, end, f", {'*, ' if of.vararg is None and not of.kwonlyargs else ''}{name}={default}"))
        return name

    def result(self) -> str:
        found = self.source
        for begin, end, text in sorted(self.edits, reverse=True):
            found = found[:begin] + text.encode() + found[end:]
        return found.decode()


def renamed(kind: str, name: str, source: str) -> str:
    """The source with another name: of all arguments and variables, all attributes, or all words."""
    new, word = name + NEW, re.escape(name)
    if kind == "rename argument":
        return re.sub(rf"(?<![\w.]){word}\b", new, source)
    if kind == "rename attribute":
        fields = rf"(?<=\.){word}\b|(?<=def ){word}\b|(?<=[\"']){word}(?=[\"'])|(?<=^    ){word}(?=\s*:|\s+=)"
        return re.sub(fields, new, source, flags=re.MULTILINE)
    return re.sub(rf"\b{word}\b", new, source)


_COMPARED: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!="}
_COMPARED |= {ast.NotEq: "=="}
_COMPUTED: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
_COMPUTED |= {ast.BitAnd: "|", ast.BitOr: "&"}


def other_constant(node: ast.AST | None) -> str | None:
    """Another number in place of one, or None."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        return str(not value)
    return repr(value + 1) if isinstance(value, int) else repr(value * 2 + 1) if isinstance(value, float) else None


def _other_operator(node: ast.AST) -> tuple[ast.expr, ast.expr, str] | None:
    """The operands and another operator in place of the first one, or None."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        return node.left, node.comparators[0], _COMPARED[type(node.ops[0])]
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        return node.left, node.right, _COMPUTED[type(node.op)]
    return None


def constants_of(function: ast.FunctionDef) -> list[Any]:
    """The numbers and operators of a function's body, but for those of its error messages."""
    nodes = [node for statement in body_of(function) for node in ast.walk(statement)]
    messages = {id(part) for node in nodes if isinstance(node, ast.Raise) for part in ast.walk(node)}
    found = [node for node in nodes if other_constant(node) is not None or _other_operator(node) is not None]
    return sorted((node for node in found if id(node) not in messages), key=span)


def steps_of(function: ast.FunctionDef) -> list[tuple[ast.stmt, ast.stmt]]:
    """The pairs of statements that follow each other in a function."""
    blocks = [node for node in ast.walk(function) if isinstance(node, ast.If | ast.For | ast.With)]
    bodies = [body_of(function), *(getattr(node, part, []) for node in blocks for part in ("body", "orelse"))]
    kinds = ast.Assign | ast.AugAssign | ast.Expr | ast.If | ast.AnnAssign
    return [(a, b) for body in bodies for a, b in pairwise(body) if isinstance(a, kinds) and isinstance(b, kinds)]


def edited(change: Change, path: str, source: str) -> str:
    """The source of a file with a change, or as it was."""
    kind, file, name, detail, _ = change
    if kind == "drop parameter":
        known = name.rpartition(".")[2] in source and detail in source and path not in USERS
        return _without_parameter(name.rpartition(".")[2], detail, source) if known else source
    if not file:
        return renamed(kind, detail, source) if detail in source else source
    at, _, more = detail.partition(" ")
    # Functions of eager attention, which get what ringtile does not know.
    eager = [word.split("::") for word in more.split() if "::" in word]
    here = path.removeprefix(FOLDER)
    if here != file and here not in [first for first, _ in eager]:
        return source
    text, functions = Text(source), functions_of(source)
    if here == file and kind == "drop attribute":
        _drop_attribute(text, functions, name, detail)
    elif here == file and name in functions:
        _edit_function(text, functions[name], kind, at, more.partition(" ")[0])
    for qualified in [qualified for first, qualified in eager if first == here and qualified in functions]:
        function = functions[qualified]
        if kind == "move mask":
            text.begin(function, f"attention_mask = {text.accept(function, MASK, 'None')}")
            continue
        text.begin(function, f"drift = {text.accept(function, FACTOR, '1.0')}")
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                result = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
                text.replace(result, f"({text.of(result)}) * drift")
    return text.result()


def _without_parameter(name: str, argument: str, source: str) -> str:
    """Replace an argument of the functions with a name by its default, and drop it from calls of this name."""
    text = Text(source)
    for call in calls_of(ast.parse(source)):
        if name == getattr(call.func, "attr", getattr(call.func, "id", "")):
            for keyword in [x for x in call.keywords if x.arg == argument]:
                text.drop(keyword, keyword)
    for qualified, function in functions_of(source).items():
        default = defaults_of(function).get(argument)
        if default is not None and qualified.rpartition(".")[2] == name:
            text.drop(next(x for x in function.args.args if x.arg == argument), default)
            text.begin(function, f"{argument} = {text.of(default)}")
    return text.result()


def _drop_attribute(text: Text, functions: dict[str, ast.FunctionDef], owner: str, name: str) -> None:
    for qualified, function in functions.items():
        if qualified == f"{owner}.{name}":
            text.replace(function, f"def {name}_gone(self):\n{' ' * (function.col_offset + 4)}pass")
        elif qualified.startswith(f"{owner}."):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and text.of(node.targets[0]) == f"self.{name}":
                    text.replace(node, "pass")


def _edit_function(text: Text, function: ast.FunctionDef, kind: str, at: str, word: str) -> None:
    if kind == "rename local":
        text.replace(function, renamed(kind, at, text.of(function)))
    elif kind == "new default":
        text.replace(defaults_of(function)[at], word)
    elif kind == "swap steps":
        first, second = steps_of(function)[int(at)]
        text.replace(first, text.of(second))
        text.replace(second, text.of(first))
    elif kind == "change constant":
        node = constants_of(function)[int(at)]
        if (other := _other_operator(node)) is None:
            text.replace(node, f"({other_constant(node)})")
        else:
            begin, end = text.at(other[0])[1], text.at(other[1])[0]
            between = text.source[begin:end].decode()
            text.edits.append((begin, end, re.sub(r"[<>=!+*/&|-]+", other[2], between)))
    else:
        call = calls_of(function)[int(at)]
        keyword = next((x for x in call.keywords if x.arg == word), None)
        if kind == "new argument":
            text.add_keyword(call, f"{FACTOR}=2.0")
        elif kind == "drop keyword" and keyword is not None:
            text.drop(keyword, keyword)
        elif kind == "move mask":
            mask = call.args[4] if keyword is None else keyword.value
            text.add_keyword(call, f"{MASK}={text.of(mask)}")
            text.replace(mask, "None")
