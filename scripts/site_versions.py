"""Build the documentation of one version beside those of others: python scripts/site_versions.py FOLDER VERSION

FOLDER/VERSION is the site, and FOLDER/versions.json lists all versions, the newest first, for the menu in the header.
FOLDER/index.html leads to the newest release. `dev` is what is not released yet.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+|dev")


def newest_first(versions: list[str]) -> list[str]:
    """The releases, the newest first, then `dev`."""
    return sorted(versions, key=lambda name: [-1] if name == "dev" else [int(part) for part in name.split(".")])[::-1]


def build(folder: Path) -> None:
    """Build the site with the menu of versions. Raises CalledProcessError if mkdocs warns."""
    with tempfile.TemporaryDirectory() as made:
        settings = Path(made, "mkdocs.yml")
        hooks, docs = ROOT / "scripts" / "site_hooks.py", ROOT / "docs"
        text = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {docs}\nhooks: [{hooks}]\n"
        # mike's format of versions.json is the one that the theme reads.
        settings.write_text(text + "extra:\n  version: {provider: mike}\n", encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", settings, "-d", folder.resolve()]
        subprocess.run(command, cwd=ROOT, check=True)


def list_versions(folder: Path) -> None:
    """Write the list and the first page of a folder of versions."""
    names = newest_first([path.name for path in folder.iterdir() if path.is_dir() and VERSION.fullmatch(path.name)])
    first = [{"version": name, "title": name, "aliases": ["latest"] if name == names[0] else []} for name in names]
    (folder / "versions.json").write_text(json.dumps(first, indent=2) + "\n", encoding="utf-8")
    to = f'<meta http-equiv="refresh" content="0; url={names[0]}/index.html">'
    (folder / "index.html").write_text(f"<!doctype html>\n<title>ringtile</title>\n{to}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation of one version beside those of others.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("version", help="such as 0.1.0, or dev")
    args = parser.parse_args()
    if not VERSION.fullmatch(args.version):
        parser.error(f"version: expected numbers like 0.1.0, or dev, got {args.version!r}")
    shutil.rmtree(args.folder / args.version, ignore_errors=True)
    build(args.folder / args.version)
    list_versions(args.folder)


if __name__ == "__main__":
    main()
