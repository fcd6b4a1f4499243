"""The house rules that a reader of the import lines relies on, checked on the syntax trees of src/ringtile."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtile.kernels.select import NAMES

PACKAGE = Path(__file__).parents[2] / "src" / "ringtile"

ROOMS_BELOW = {
    "patterns": set(),
    "index": {"patterns"},
    "kernels": {"index", "patterns"},
    "functional": {"kernels", "index", "patterns"},
}
_GROUND = set(ROOMS_BELOW) | {"functional"}
FACE = "__init__"
ROOMS_BELOW |= {"modules": _GROUND, FACE: _GROUND | {"modules"}}
ROOMS_BELOW |= {room: _GROUND | {FACE} for room in ("distributed", "adaptive")}
ROOMS_BELOW["integrations"] = _GROUND | {FACE, "adaptive", "distributed"}
_WINGS = _GROUND | {FACE, "modules", "distributed", "adaptive"}
ROOMS_BELOW["tools"] = _WINGS | {"integrations"}
ROOMS_BELOW["testing"] = {"patterns", "functional"}
ROOMS_BELOW |= {"cli": _WINGS | {"tools"}, "__main__": {"cli"}}
"""Each room and the rooms it may import; the face is `ringtile/__init__.py`."""

BACKENDS = set(NAMES)
"""What implements the contract in `kernels`; nothing else in the room but `select` may import one of them."""

BANNED_FILES = {"utils", "helpers", "common", "core", "manager"}
BANNED_CLASS = re.compile(r"V\d+$|Improved|Optimized|Production|Enhanced|Advanced")


def module_name(root: Path, path: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, name: str, is_package: bool, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module of the package that a syntax tree imports, at any depth."""
    root = name.split(".")[0]
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found = [full if (full := f"{source}.{alias.name}") in modules else source for alias in node.names]
        else:
            continue
        yield from ((node.lineno, module) for module in found if module.split(".")[0] == root)


def room_of(module: str) -> str:
    """The room of a full module name: `ringtile.index.build` -> `index`, `ringtile` -> the face."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


BY_NAME = "import_module(PLOTTER)"
"""`Pattern.plot` finds its drawing by a name when called: it is above, and `import ringtile` does not load it."""


def import_complaints(name: str, target: str) -> Iterator[str]:
    here, there = room_of(name), room_of(target)
    if here != there and there not in ROOMS_BELOW[here]:
        yield f"{name} imports {target}: {here} may not import {there}"
    elif here == there == "kernels" and name.count(".") >= 2 and target.count(".") >= 2:
        own, other = name.split(".")[2], target.split(".")[2]
        if other in BACKENDS and own not in {other, "select"}:
            yield f"{name} imports {target}: only select may import a backend"


INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
"""Makers of tensors whose dtype follows no default, but whose device does."""
MAKERS = {"Tensor", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"}
MAKERS |= {"logspace", "normal", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"} | INTEGERS


def default_complaints(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """New tensors that follow the defaults for dtype and device, which belong to the caller's program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (
                (node.lineno, f"imports {x.name}: say torch.{x.name}")
                for x in node.names
                if x.name in MAKERS - {"Tensor"}
            )
        if not isinstance(node, ast.Call):
            continue
        of, _, name = ast.unparse(node.func).rpartition(".")
        if of != "torch":
            continue
        missing = {"device"} if name in INTEGERS else {"dtype", "device"}
        missing -= {keyword.arg for keyword in node.keywords}
        if name in MAKERS and missing:
            yield node.lineno, f"torch.{name} without {' and '.join(sorted(missing))} follows the default"
        numbers = [x for x in node.args[1:] if isinstance(x, ast.Constant) and isinstance(x.value, int | float)]
        if name == "where" and len(numbers) == 2 and any(isinstance(x.value, float) for x in numbers):
            yield node.lineno, "torch.where of two numbers has the default dtype"


def syntax_complaints(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and BANNED_CLASS.search(node.name):
            yield node.lineno, f"class {node.name} is named after its history"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            yield node.lineno, f"calls {node.func.id}"
        elif isinstance(node, ast.Call) and re.search(r"import_module\((.ringtile|[A-Z])", text := ast.unparse(node)):
            if text != BY_NAME:
                yield node.lineno, f"imports by name: {text}"
        elif isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"all"}
            last = node.body[-1]
            raises_again = isinstance(last, ast.Raise) and last.exc is None
            if caught & {"Exception", "BaseException", "all"} and not raises_again:
                yield node.lineno, "swallows every exception"


def circles(root: Path) -> list[set[str]]:
    """Groups of files that import each other, in functions and for types too."""
    paths = {module_name(root, path): path for path in sorted(root.rglob("*.py"))}
    targets: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = imported_modules(tree, name, path.name == "__init__.py", set(paths))
        targets[name] = {target for _, target in found if target in paths and target != name}
    reached = {name: set(direct) for name, direct in targets.items()}
    for middle in paths:
        for name in paths:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    rings = {frozenset(other for other in paths if other in reached[name] and name in reached[other]) for name in paths}
    return [set(ring) for ring in rings if ring]


def complaints(root: Path) -> list[str]:
    """Everything under the package folder `root` that breaks a house rule, one line each."""
    paths = sorted(root.rglob("*.py"))
    modules = {module_name(root, path) for path in paths}
    found = []
    for path in paths:
        where = path.relative_to(root)
        name = module_name(root, path)
        if room_of(name) not in ROOMS_BELOW:
            found.append(f"{where}: in no known room")
            continue
        if banned := {part.removesuffix(".py").strip("_") for part in where.parts} & BANNED_FILES:
            found.append(f"{where}: a file named {banned.pop()} holds no one idea")
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, target in imported_modules(tree, name, path.name == "__init__.py", modules):
            found += [f"{where}:{line}: {text}" for text in import_complaints(name, target)]
        found += [f"{where}:{line}: {text}" for line, text in (*syntax_complaints(tree), *default_complaints(tree))]
    return found


def test_the_package_keeps_the_house_rules() -> None:
    assert complaints(PACKAGE) == []


def test_the_old_names_follow_no_default_either() -> None:
    paths = (PACKAGE.parents[1] / "compat").rglob("*.py")
    assert [(path, *found) for path in paths for found in default_complaints(ast.parse(path.read_text("utf-8")))] == []


def test_no_files_import_each_other() -> None:
    assert circles(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("patterns/local.py", "from ..index import build", "patterns may not import index"),
        ("patterns/local.py", "def f():\n    import ringtile.index.build", "patterns may not import index"),
        ("index/build.py", "import ringtile", "index may not import __init__"),
        ("kernels/native.py", "from .reference import attention_reference", "only select may"),
        ("kernels/contracts.py", "def f():\n    from ringtile.kernels.blockwise import forward", "only select may"),
        ("adaptive/losses.py", "from ringtile.distributed import plan", "adaptive may not import distributed"),
        ("modules/multihead.py", "from ringtile.distributed import faults", "modules may not import distributed"),
        ("stray.py", "import ringtile.patterns", "in no known room"),
        ("index/utils.py", "", "a file named utils"),
        ("index/build.py", "class IndexV2: ...", "named after its history"),
        ("patterns/grammar.py", "importlib.import_module('ringtile.index')", "imports by name"),
        ("patterns/grammar.py", "eval('1')", "calls eval"),
        ("cli.py", "try:\n    pass\nexcept (OSError, BaseException) as e:\n    pass", "swallows every exception"),
        ("cli.py", "try:\n    pass\nexcept:\n    pass", "swallows every exception"),
        ("index/build.py", "x = 1\ny = torch.empty(2, device='cpu')", "build.py:2: torch.empty without dtype follows"),
        ("index/build.py", "torch.tensor([1.0], dtype=torch.int64)", "torch.tensor without device"),
        ("index/build.py", "torch.zeros(3)", "torch.zeros without device and dtype"),
        ("index/build.py", "from torch import Tensor, zeros", "imports zeros"),
        ("index/build.py", "torch.where(x, 1.0, 0)", "torch.where of two numbers"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    root = tmp_path / "ringtile"
    rooms = ("index", "kernels", "kernels/blockwise", "adaptive", "patterns", "modules", "tools")
    for folder in ("", *rooms):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "__init__.py").touch()
    for module in ("index/build", "index/tiles", "kernels/blockwise/plan", "kernels/reference", "adaptive/losses"):
        (root / f"{module}.py").touch()
    assert complaints(root) == []
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text(source)
    found = complaints(root)
    assert len(found) == 1
    assert complaint in found[0]
