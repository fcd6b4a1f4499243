"""What ringtile touches of transformers in a run: calls between them, names that it reads, functions it stands for."""

from __future__ import annotations

import ast
import os
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from drift_edits import (
    FOLDER,
    ROOT,
    Change,
    calls_of,
    constants_of,
    defaults_of,
    functions_of,
    other_constant,
    span,
    steps_of,
)

OURS = str(ROOT / "src/ringtile/integrations/transformers") + os.sep
_UTILITIES = os.path.join(FOLDER, "utils") + os.sep
"""Decorators and loggers, between a call and what it calls."""
_INTERFACE = {"eager_attention_forward", "repeat_kv", "eager_mask", "sdpa_mask"}
"""Functions of eager attention, whose arguments say what they compute: only their calls change."""
_THEIRS, _OWN = 1, 2
MOST = 2
"""Cases of a change."""

Function = tuple[str, str]
"""The file and the qualified name of a function of transformers."""


class Site(NamedTuple):
    """An expression of transformers that calls something."""

    file: str
    function: str
    span: tuple[int, ...]


class Recorder:
    """Sees the calls of a case. All members are sets and dicts of texts, so that a process can return them."""

    def __init__(self) -> None:
        self.with_ringtile = False
        self.ran: dict[bool, set[Function]] = {False: set(), True: set()}
        self.eager: dict[Site, set[Function]] = defaultdict(set)
        self.sites: dict[Site, set[str]] = defaultdict(set)
        """The names of the arguments that reach ringtile."""
        self.attention: set[Site] = set()
        self.watched: set[Function] = set()
        self.called: set[Function] = set()
        self.rules: set[Function] = set()
        self.reads: set[tuple[str, str, str, str]] = set()
        """A kind of rename, a name, and the file and class that have it."""
        self._kinds: dict[CodeType, int] = {}
        self._positions: dict[CodeType, list[Any]] = {}

    def kind(self, code: CodeType) -> int:
        if code not in self._kinds:
            file = code.co_filename
            theirs = file.startswith(FOLDER) and not file.startswith(_UTILITIES)
            self._kinds[code] = _THEIRS if theirs else _OWN if file.startswith(OURS) else 0
        return self._kinds[code]

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not (kind := self.kind(frame.f_code)):
            return
        if event == "return":
            if kind == _OWN:
                self._read(frame)
            return
        caller = frame.f_back
        while caller is not None and not self.kind(caller.f_code):
            caller = caller.f_back
        if kind == _THEIRS:
            self.ran[self.with_ringtile].add(function_of(frame.f_code))
        if caller is None:
            return
        of_caller = self.kind(caller.f_code)
        if kind == _THEIRS and of_caller == _OWN:
            self.called.add(function_of(frame.f_code))
        elif of_caller == _THEIRS and kind == _OWN and frame.f_code.co_name == "__torch_function__":
            if "indexers" in frame.f_code.co_filename:
                self.watched.add(function_of(caller.f_code))
        elif of_caller == _THEIRS:
            code = caller.f_code
            positions = self._positions.setdefault(code, list(code.co_positions()))
            first, last, begin, end = positions[caller.f_lasti // 2]
            site = Site(*function_of(code), (first, last, begin, end))
            if kind == _THEIRS and not self.with_ringtile:
                self.eager[site].add(function_of(frame.f_code))
            elif kind == _OWN:
                self.sites[site] |= {
                    name for x in frame.f_locals.values() if isinstance(x, dict) for name in x if isinstance(name, str)
                }
                if "query" in frame.f_locals and "attention_mask" in frame.f_locals:
                    self.attention.add(site)

    def _read(self, frame: FrameType) -> None:
        code = frame.f_code
        names = {*code.co_names, *(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())}
        for name in names & frame.f_globals.keys():
            self._see_global(name, frame.f_globals[name])
        seen: set[int] = set()
        for name, value in frame.f_locals.items():
            self._see_global(name, value)
            self._see(value, names, seen, 2)

    def _see_global(self, name: str, value: Any) -> None:
        if isinstance(value, FunctionType | type) and value.__module__.startswith("transformers."):
            if isinstance(value, FunctionType):
                self._see_rule(value)
            if value.__name__ == name:
                self.reads.add(("rename name", name, "", ""))

    def _see_rule(self, function: FunctionType) -> None:
        if function.__code__.co_filename.endswith(("masking_utils.py", "modeling_gemma3.py")):
            self.rules.add(function_of(function.__code__))

    def _see(self, value: Any, names: set[str], seen: set[int], depth: int) -> None:
        kind = value if isinstance(value, type) else type(value)
        if isinstance(value, ModuleType):
            if value.__name__.startswith("transformers."):
                own = {
                    name
                    for name in names & vars(value).keys()
                    if getattr(vars(value)[name], "__module__", "") == value.__name__
                }
                self.reads |= {("rename name", name, "", "") for name in own}
            return
        owners = [base for base in kind.__mro__ if base.__module__.startswith("transformers.")]
        if not owners or id(value) in seen:
            return
        seen.add(id(value))
        of_object = vars(value) if hasattr(value, "__dict__") else {}
        hooks = {name for name in of_object if name.startswith("_") and ("hooks" in name or name == "_modules")}
        parts = {name: x for name, x in (of_object | of_object.get("_modules", {})).items() if name not in hooks}
        known = {name: base for base in reversed(kind.__mro__) for name in vars(base)}
        what = "rename field" if any(base.__name__.endswith("Config") for base in owners) else "rename attribute"
        for name in names:
            if name.startswith("__") or (name in known and known[name] not in owners):
                continue
            if name in known or name in parts:
                owner = known.get(name, owners[0])
                file = sys.modules[owner.__module__].__file__ or ""
                self.reads.add((what, name, file.removeprefix(FOLDER), owner.__qualname__))
                if depth and name in parts:
                    self._see(parts[name], names, seen, depth - 1)

    @contextmanager
    def recording(self, with_ringtile: bool) -> Iterator[None]:
        self.with_ringtile = with_ringtile
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def found(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if not name.startswith("_") and name != "with_ringtile"
        }


@cache
def _file_of(path: str) -> str:
    return path.removeprefix(FOLDER)


def function_of(code: CodeType) -> Function:
    return _file_of(code.co_filename), code.co_qualname


@cache
def _functions(file: str) -> dict[str, ast.FunctionDef]:
    return functions_of(Path(FOLDER, file).read_text(encoding="utf-8"))


def _known(functions: Iterable[Function]) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    for file, name in sorted(functions):
        if (function := _functions(file).get(name)) is not None:
            yield file, name, function


def changes_of(door: str, found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The changes of what a case touches."""
    for kind, name, file, owner in found["reads"]:
        yield kind, "", "", name
        if file:
            yield "drop attribute", file, owner, name
    replaced: set[Function] = set()
    for site, arguments in found["sites"].items():
        eager = {each for each in found["eager"].get(site, ()) if not each[1].endswith("__init__")}
        replaced |= eager
        yield from _changes_of_call(site, arguments, sorted(eager), site in found["attention"])
    if door in ("use_ringtile", "register"):
        # Others do something else than eager attention, such as serving.
        replaced |= found["ran"][False] - found["ran"][True]
    replaced, called, rules = (
        {each for each in functions if not _INTERFACE & set(each[1].split("."))}
        for functions in (replaced, found["called"], found["rules"])
    )
    for file, name, function in _known(replaced | called | rules | found["watched"]):
        yield from (("change constant", file, name, str(n)) for n in range(len(constants_of(function))))
        yield from (("swap steps", file, name, str(n)) for n in range(len(steps_of(function))))
    for file, name, function in _known(replaced | called):
        yield from (("rename argument", "", "", x) for x in arguments_of(function) - {"self"})
        for argument, default in defaults_of(function).items():
            yield "drop parameter", "", name, argument
            if (other := other_constant(default)) is not None:
                yield "new default", file, name, f"{argument} {other}"
    for file, name, function in _known(rules):
        outer = name.partition(".")[0]
        yield "rename name", "", "", outer
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | {name.rpartition(".")[2]}
        yield from (("rename local", file, outer, each) for each in names - {outer, "int", "bool", "torch"})


def arguments_of(function: ast.FunctionDef) -> set[str]:
    return {x.arg for x in (*function.args.args, *function.args.kwonlyargs)}


def _changes_of_call(
    site: Site, arguments: set[str], eager: list[Function], is_attention: bool
) -> Iterator[tuple[str, str, str, str]]:
    """The changes of a call of ringtile, and of the functions that are called there with eager attention."""
    function = _functions(site.file).get(site.function)
    calls = [] if function is None else calls_of(function)
    at = next((n for n, call in enumerate(calls) if span(call) == site.span), None)
    if at is None:
        return
    keywords = {keyword.arg for keyword in calls[at].keywords if keyword.arg is not None}
    yield from (("rename argument", "", "", name) for name in keywords | arguments)
    yield from (("drop keyword", site.file, site.function, f"{at} {name}") for name in keywords)
    known = list(_known(eager))
    for _, name, _ in known:
        owner, _, method = name.rpartition(".")
        yield "rename attribute" if owner else "rename name", "", "", method
        if owner and "<" not in owner:
            yield "rename name", "", "", owner
    if known:
        words = " ".join(f"{file}::{name}" for file, name, _ in known)
        yield "new argument", site.file, site.function, f"{at} {words}"
    with_mask = [f"{file}::{name}" for file, name, each in known if "attention_mask" in arguments_of(each)]
    if with_mask and ("attention_mask" in keywords or (is_attention and len(calls[at].args) > 4)):
        yield "move mask", site.file, site.function, f"{at} attention_mask {' '.join(with_mask)}"


def drawn(traces: dict[str, tuple[str, dict[str, Any]]], seed: int) -> list[Change]:
    """All changes in the order in which they are tried: the kinds take turns."""
    touching: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)
    for case, (door, found) in traces.items():
        for change in changes_of(door, found):
            touching[change].add(case)
    lot = random.Random(seed)
    by_kind: dict[str, list[Change]] = defaultdict(list)
    for change, cases in sorted(touching.items()):
        by_kind[change[0]].append(Change(*change, tuple(sorted(lot.sample(sorted(cases), min(MOST, len(cases)))))))
    for changes in by_kind.values():
        lot.shuffle(changes)
    longest = max(map(len, by_kind.values()), default=0)
    return [changes[n] for n in range(longest) for _, changes in sorted(by_kind.items()) if n < len(changes)]
