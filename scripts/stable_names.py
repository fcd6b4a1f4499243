"""Write docs/reference/stable-names.txt, the names that ringtile promises to keep: `python scripts/stable_names.py`.

It adds new names and refuses to drop one. To drop one, give it a DeprecationWarning for one minor version first, and
then delete its line by hand.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

from torch import nn

from ringtile import cli
from ringtile.patterns import grammar

LIST = Path(__file__).resolve().parents[1] / "docs" / "reference" / "stable-names.txt"
FACES = (
    "ringtile",
    "ringtile.adaptive",
    "ringtile.distributed",
    "ringtile.index",
    "ringtile.integrations.diffusers",
    "ringtile.integrations.torch_shards",
    "ringtile.integrations.transformers",
    "ringtile.modules",
    "ringtile.patterns",
    "dilated_attention_pytorch",
)
NOT_PROMISED = {"ringtile.index": {"build_rows", "candidates", "needed"}}
"""What other rooms import from a face, and its page does not show."""
NOT_MADE_BY_USERS = {
    *("BlockIndex", "CPTrainer", "CacheInfo", "ControlReport", "ContextParallel", "HeadFacts", "LayerCache"),
    *("Pattern", "PatternMetrics", "PlanMismatch", "QualityReport", "RankLost", "RingPlan", "Solution", "TileGrid"),
    *("DistributedSparsePattern", "GradientCompression", "PatternType", "View"),
}
"""Classes whose objects ringtile makes, and the one that you derive from: their names are promised, no constructor."""
MEMBERS = {
    "ringtile.Pattern": ("allowed", "density", "tile_density", "plot"),
    "ringtile.BlockIndex": (
        *("density", "tile_density", "to", "at", "restricted", "restricted_rows", "remapped", "coarsen", "trimmed"),
        *("keys_of", "draw", "to_dense", "validate"),
    ),
    "ringtile.distributed.Layout": ("contiguous", "zigzag", "striped", "size"),
    "ringtile.patterns.Elements": ("from_mask_mod",),
    "ringtile.patterns.Neighborhood": ("order",),
}
"""The methods and properties that are promised, beside `forward` of modules."""

Names = dict[str, str]
"""The signature of each name, such as ``(q, k, v, pattern=, *, scale=)``; empty where there is none."""


def signature(thing: Callable[..., object], skip: int = 0) -> str:
    """The names of the parameters, with ``=`` where there is a default. ``skip``: without the first ones."""
    try:
        parameters = list(inspect.signature(thing).parameters.values())[skip:]
    except ValueError:
        return ""
    words, starred = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not starred:
            words.append("*")
        starred |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        by_place = "/" if each.kind is each.POSITIONAL_ONLY else ""
        words.append(f"{star}{each.name}{by_place}{'' if each.default is each.empty else '='}")
    return f"({', '.join(words)})"


def names_of(module: ModuleType) -> Iterable[str]:
    """The public names of a face: `__all__`, or what it exports itself."""
    own = getattr(module, "__all__", None)
    is_package = hasattr(module, "__path__")
    for name in own or vars(module):
        thing = getattr(module, name)
        ours = own or is_package or getattr(thing, "__module__", "") == module.__name__
        if name[0] != "_" and callable(thing) and ours and name not in NOT_PROMISED.get(module.__name__, ()):
            yield name


def members(full: str, kind: type) -> Iterable[tuple[str, str]]:
    """The promised methods and properties of a class."""
    forward = ("forward",) if issubclass(kind, nn.Module) and "forward" in dir(kind) else ()
    for name in (*MEMBERS.get(full, ()), *forward):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, staticmethod | classmethod):
            yield name, signature(getattr(kind, name))
        else:
            yield name, signature(value, skip=1) if inspect.isfunction(value) else ""


def found() -> Names:
    """The names of today."""
    names: Names = {}
    for face in FACES:
        module = importlib.import_module(face)
        for name in names_of(module):
            thing = getattr(module, name)
            full = f"{face}.{name}"
            names[full] = "" if name in NOT_MADE_BY_USERS else signature(thing)
            if isinstance(thing, type):
                names |= {f"{full}.{member}": told for member, told in members(full, thing)}
    names |= {f'parse("{word}")': "" for word in grammar._WORDS}
    return names | {f"$ ringtile {verb}": "" for verb in cli.VERBS}


def text(names: Mapping[str, str]) -> str:
    return "".join(f"{name}{told}\n" for name, told in sorted(names.items()))


def listed(lines: str) -> Names:
    """The names of the file."""
    names: Names = {}
    for line in lines.splitlines():
        is_call = line.endswith(")") and not line.startswith("parse(")
        name, bar, rest = line.partition("(") if is_call else (line, "", "")
        names[name] = bar + rest
    return names


def broken(promised: Mapping[str, str], today: Mapping[str, str]) -> list[str]:
    """What a program that uses the promised names would notice."""
    told = []
    for name, before in promised.items():
        if name not in today:
            told.append(f"{name} is gone")
        elif before and (reason := _broken_call(before, today[name])):
            told.append(f"{name}: {reason}")
    return told


def _split(signature: str) -> tuple[dict[str, bool], dict[str, bool], set[str]]:
    """The parameters by place, those by name alone, each with whether it has a default, and the open ones."""
    placed: dict[str, bool] = {}
    named: dict[str, bool] = {}
    opened: set[str] = set()
    into = placed
    for word in filter(None, signature.strip("()").split(", ")):
        if word.startswith("*"):
            into = into if word.startswith("**") else named
            opened |= {word} - {"*"}
        else:
            into[word.rstrip("=")] = word.endswith("=")
    return placed, named, opened


def _broken_call(before: str, today: str) -> str:
    (placed, named, opened), (placed_now, named_now, opened_now) = _split(before), _split(today)
    if list(placed_now)[: len(placed)] != list(placed):
        return f"parameters by place were {', '.join(placed)}, are {', '.join(placed_now)}"
    accepted = placed_now | named_now
    if missing := [name for name in named if name not in accepted]:
        return f"without {', '.join(missing)}"
    needed = [name for name, optional in accepted.items() if not optional and (placed | named).get(name, True)]
    if needed:
        return f"needs {', '.join(needed)}"
    return f"without {', '.join(sorted(opened - opened_now))}" if opened - opened_now else ""


if __name__ == "__main__":
    today = found()
    if wrong := broken(listed(LIST.read_text(encoding="utf-8")) if LIST.exists() else {}, today):
        raise SystemExit("\n".join(["promised names that programs use, see docs/reference/stable-names.md:", *wrong]))
    LIST.write_text(text(today), encoding="utf-8")
    print(f"wrote {len(today)} names into {LIST}")
