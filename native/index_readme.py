"""README as a package index shows it, where relative links lead nowhere: a provider of metadata for scikit-build-core.

The address of the repository comes from one place, `Repository` in `[project.urls]` of pyproject.toml. Without it,
links into the repository become their text, and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.M | re.S)


def index_text(text: str, repository: str | None, version: str) -> str:
    """Return README with links that work anywhere: to the tag of its version, or none into the repository."""

    def linked(found: re.Match[str]) -> str:
        picture, told, path = found.groups()
        if repository is None:
            return "" if picture else told
        return f"{picture}[{told}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{path})"

    parts = FENCE.split(text)
    parts[::2] = [re.sub(r"\n{3,}", "\n\n", LINK.sub(linked, part)) for part in parts[::2]]
    return "".join(parts)


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the field `readme`, as scikit-build-core asks for it. Its older versions do not hand the project over."""
    if field != "readme" or settings:
        raise ValueError(f"expected the field 'readme' without settings, got {field=}, {settings=}")
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    text = Path("README.md").read_text(encoding="utf-8")
    return {"content-type": "text/markdown", "text": index_text(text, repository, project["version"])}
