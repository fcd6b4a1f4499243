"""Write the models of transformers whose attention is written by hand into docs/huggingface.md, as `make docs` does.

The list is of the installed transformers, for `use_ringtile` refuses these models.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path

import transformers

from ringtile.integrations.transformers.biases import is_replaced
from ringtile.integrations.transformers.by_hand import CONVERTED
from ringtile.integrations.transformers.registry import _is_by_hand

PAGE = Path(__file__).parents[1] / "docs/huggingface.md"
SECTION = re.compile(r"^### Written by hand in transformers .*?(?=^#)", re.M | re.S)


def folders() -> list[str]:
    """Return the folders of transformers with a model whose attention is written by hand and not replaced."""
    names = set()
    for file in Path(str(transformers.__file__)).parent.glob("models/*/modeling_*.py"):
        # Importing all of them takes ten seconds, and half of them have no attention.
        if file.parent.name in CONVERTED or "Attention" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        classes = [
            kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
        ]
        # transformers caches its answer in a class, and what it says of a base holds for classes of other files.
        models = [x for x in classes if issubclass(x, transformers.PreTrainedModel) and "PreTrained" not in x.__name__]
        if any(_is_by_hand(kind) and not is_replaced(kind) for kind in models):
            names.add(file.parent.name)
    return sorted(names)


def section(names: list[str]) -> str:
    version = ".".join(transformers.__version__.split(".")[:2])
    told = "`use_ringtile` raises for these folders of `transformers/models`, or for a part of a model that is in one: "
    listed = textwrap.fill(told + ", ".join(f"`{name}`" for name in names) + ".", 120, break_on_hyphens=False)
    return f"### Written by hand in transformers {version}\n\n{listed}\n\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SECTION.sub(section(folders()), text), encoding="utf-8")
    print(f"wrote {PAGE}")
