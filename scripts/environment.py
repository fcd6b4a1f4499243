"""Make .venv ready to run ringtile: `python3 scripts/environment.py demo`, `dev` or `native`.

It reuses a recent enough torch of the running interpreter. Otherwise it lists the downloads and installs the version
that constraints.txt pins. `native` builds the CPU kernel into src/ringtile/lib, in .venv/native.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

TOOLS = {
    "demo": "matplotlib with numpy and pillow, and transformers, about 90 MB",
    "dev": "pytest, hypothesis, ruff, mypy, mkdocs with material, pytorch-lightning, transformers, diffusers,\n"
    "sentence-transformers with scipy, matplotlib, about 190 MB, and triton, about 190 MB",
}

PROBE = """
import sys
try:
    import torch
except ImportError:
    raise SystemExit
print(torch.__version__)
print(*(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))), sep="\\n")
"""


def pinned_torch() -> str:
    return re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE).group(1)


def lowest_torch() -> str:
    return re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()).group(1)


def release(version: str) -> tuple[int, ...]:
    """Return a version as numbers to compare. A pre-release sorts just below its release."""
    digits, pre = re.match(r"([\d.]*\d)(a|b|rc|\.dev)?", version).groups()
    return (*[int(part) for part in f"{digits}.0.0".split(".")][:3], -1 if pre else 0)


def torch_seen_by(python: str) -> tuple[str, list[str]] | None:
    """Return the torch version that an interpreter imports and its package folders, or None."""
    probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    lines = probe.stdout.split("\n")[:-1]
    return (lines[0], lines[1:]) if probe.returncode == 0 and lines else None


def run(*command: object, **variables: str) -> None:
    print("$", *command, flush=True)
    if code := subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **variables}).returncode:
        raise SystemExit(code)


def install_torch() -> None:
    version = pinned_torch()
    # For Linux, PyPI's build brings several GB of CUDA libraries, which neither the demo nor the tests need.
    linux = platform.system() == "Linux"
    wanted = f"torch=={version}+cpu" if linux else f"torch=={version}"
    source = ["--extra-index-url", CPU_WHEELS, "--retries", "1"] if linux else []
    print(
        f"\nNo torch >= {lowest_torch()} in {sys.executable}, so this downloads {wanted} (about 200 MB) and its\n"
        "dependencies (sympy, networkx, jinja2 and a few small ones, about 15 MB), about 1 GB on disk, into .venv.\n"
        "To use another build, CUDA for one, stop here, install it for that interpreter and run the command again.\n",
        flush=True,
    )
    run(PYTHON, "-m", "pip", "install", "--no-deps", *source, wanted)


def make_venv() -> None:
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", VENV)


def install(extra: str) -> None:
    make_venv()
    present = torch_seen_by(str(PYTHON))
    if present is None:
        present = torch_seen_by(sys.executable)
        if present is None or release(present[0]) < release(lowest_torch()):
            present = None
            install_torch()
        else:
            # A path file also reaches the torch of a virtual environment, which --system-site-packages does not.
            where = "import sysconfig; print(sysconfig.get_path('purelib'))"
            folder = subprocess.check_output([str(PYTHON), "-c", where], text=True).strip()
            Path(folder, "reused_torch.pth").write_text("\n".join(present[1]) + "\n")
            print(f"using torch {present[0]} of {sys.executable}; no torch is downloaded", flush=True)
    # pip must leave a torch that is already there alone, whatever version is pinned for a fresh install.
    constraints = VENV / "constraints.txt"
    torch_version = pinned_torch() if present is None else present[0]
    constraints.write_text(CONSTRAINTS.read_text().replace(f"torch=={pinned_torch()}", f"torch=={torch_version}"))
    print(f"\nDownloading what is not here yet: {TOOLS[extra]}\n", flush=True)
    # A plain path file leads to the sources, so PYTHONPATH still comes first and moved modules are found. The second
    # distribution lends ringtile the import path that older programs use.
    packages = ("-e", f".[{extra}]", "-e", "./compat")
    plain = ("--config-settings=editable.mode=inplace", "--config-settings=wheel.cmake=false")
    # The builds' own environments read no -c, only these variables: older pips the first, newer ones the second.
    pins = {"PIP_CONSTRAINT": str(constraints), "PIP_BUILD_CONSTRAINT": str(constraints)}
    run(PYTHON, "-m", "pip", "install", "--quiet", "-c", constraints, *plain, *packages, **pins)


def build_native() -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        make_venv()
        run(PYTHON, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "cmake")
        cmake = str(PYTHON.with_name("cmake"))
    folder = VENV / "native"
    try:
        run(cmake, "--log-level=NOTICE", "-S", ".", "-B", folder, "-DRINGTILE_EMULATE_AMX=ON")
        # Neither the job server of the make that runs this nor the folders that its makes enter.
        run(cmake, "--build", folder, "--parallel", MAKEFLAGS="--no-print-directory")
    except SystemExit:
        shutil.rmtree(ROOT / "src/ringtile/lib", ignore_errors=True)
        print("\nThe native CPU kernel was not built (see above). ringtile works without it, only slower.", flush=True)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is runs this file
        raise SystemExit(f"ringtile needs Python 3.11 or newer, {sys.executable} is {platform.python_version()}")
    if sys.argv[1] == "native":
        build_native()
    else:
        install(sys.argv[1])
