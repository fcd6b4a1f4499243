"""The machine of a measurement: versions, processor, threads, devices."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import ringtile

_SOURCES = (
    *("--", ":/", ":(exclude,top)benchmarks/records", ":(exclude,top)docs", ":(exclude,top)README.md"),
    ":(exclude,top)src/ringtile/patterns/tested.py",
)
"""The files whose changes count. Records, and the files made from them, do not."""


def versions() -> dict[str, str | None]:
    """Return versions by package name, None if a package is not installed. It imports no package."""
    found: dict[str, str | None] = {"ringtile": ringtile.__version__, "python": platform.python_version()}
    found["torch"] = torch.__version__
    # ringtile uses these if they are installed.
    for name in ("numpy", "matplotlib", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu_model() -> str:
    # platform.processor() is empty, or only the architecture, on many Linux systems.
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name.*?:(.*)", listing.read_text() if listing.exists() else "", re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cores() -> int:
    """Return how many cores this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_facts() -> dict[str, str | int | list[str]]:
    """Return the system, the processor, its cores, torch's threads and instruction set, and the devices."""
    devices = ["cpu"]
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        devices.append(f"cuda:{number} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "devices": devices,
    }


def busy_warning() -> str | None:
    """Return a warning if other processes compute on this machine: one thread that waits makes all others wait."""
    # This process has just begun, so the load of the last minute is that of others.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= 0.5 * cores():
        return None
    return f"This machine is busy (load {load:.1f} on {cores()} cores): times are longer, and speedups can be far off."


def commit() -> str | None:
    """Return the git commit of ringtile's files, with ``+changes`` if they differ from it; None outside a checkout."""
    here = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Another project's checkout around an installed ringtile does not track its files.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", *_SOURCES)
    return head if head is None or not changes else f"{head}+changes"


def origin(command: str | None = None) -> dict[str, Any]:
    """Return all that tells where figures come from: the command line, the commit, the versions and the machine."""
    return {"command": command, "commit": commit(), "versions": versions(), "machine": machine_facts()}
