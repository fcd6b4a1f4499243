"""Build what a release publishes, and try it; publish nothing: python scripts/release.py

dist/ then contains the source distribution and all wheels, made and checked by scripts/wheels.py: exports, needed
libraries, glibc, and the version of the interface between Python and C++. This script adds what only a release needs:
the version is the same everywhere and has its section of CHANGELOG.md, docs/reference/stable-names.txt lists every
name, an index can render README, and both wheels for this machine run with torch and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import tomllib
import venv
from pathlib import Path

import stable_names
import wheels
from environment import CONSTRAINTS, ROOT, run

from ringtile.patterns.tested import TESTED

TOOLS = ("twine", "readme-renderer[md]", "packaging")
USE = """
import sys, torch, ringtile
q, k, v = torch.randn(3, 1, 2, 300, 64).unbind()
found, exact = (ringtile.sparse_attention(q, k, v, ringtile.patterns.Causal(), backend=b) for b in (None, "reference"))
torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
assert not {"numpy", "triton", "transformers", "matplotlib"} & set(sys.modules), "more than torch"
"""


def problems(version: str, changelog: str, citation: str) -> list[str]:
    """Return what is wrong with the texts of a release."""
    unreleased, _, rest = changelog.partition("## [Unreleased]\n")[2].partition("\n## ")
    found = []
    if unreleased.strip():
        found.append("CHANGELOG.md: move the lines of Unreleased into the section of the version")
    newest = re.match(r"\[(.+?)\] - (\d{4}-\d\d-\d\d)\n", rest)
    if newest is None or newest[1] != version:
        found.append(f"CHANGELOG.md: expected a section [{version}] with its date below Unreleased")
    elif f"date-released: {newest[2]}\n" not in citation:
        found.append(f"CITATION.cff: expected date-released: {newest[2]}")
    if f"version: {version}\n" not in citation:
        found.append(f"CITATION.cff: expected version: {version}")
    return found


def untested(classifiers: list[str]) -> list[str]:
    """Return the Pythons of the classifiers with which no run of all tests passed."""
    return [
        name
        for name in re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.M)
        if name not in TESTED["python"]
    ]


def torch_alone() -> set[str]:
    """Return the distributions that torch needs, and torch."""
    from packaging.requirements import Requirement

    found, waiting = set(), ["torch"]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or ())
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def use_alone(*wheel: object) -> None:
    """Run a wheel, as pip names it, in a fresh environment that has torch and what torch needs."""
    folder = wheels.WORK / "alone"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheel)
    (own,) = folder.glob("lib/*/site-packages")
    for name in sorted(torch_alone()):
        package = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in package.files or () if path.parts[0] not in ("..", "__pycache__")}:
            if not (own / top).exists():
                (own / top).symlink_to(Path(str(package.locate_file(top))).resolve())
    # Without numpy, torch warns when it is imported.
    run(folder / "bin/python", "-I", "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", USE)


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    wrong = problems(version, *texts)
    if stable_names.LIST.read_text(encoding="utf-8") != stable_names.text(stable_names.found()):
        wrong.append("docs/reference/stable-names.txt: run python scripts/stable_names.py")
    if pythons := untested(project["classifiers"]):
        wrong.append(
            f"benchmarks/records/tested.json: no run passed with Python {', '.join(pythons)}: run scripts/matrix.py"
        )
    if wrong:
        raise SystemExit("\n".join(wrong))
    wheels.main()
    run(sys.executable, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *TOOLS)
    files = sorted(wheels.DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    use_alone("--find-links", wheels.DIST, "ringtile")
    use_alone(next(wheels.DIST.glob("*-py3-none-any.whl")))
    print(f"\nringtile {version} is ready in dist/:", *(path.name for path in files), sep="\n")


if __name__ == "__main__":
    main()
