"""What a measurement ran on: versions, processor, threads, devices."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import ringtile

COMPANIONS = ("numpy", "matplotlib", "triton")
"""Packages that some part of ringtile uses where they are installed."""


_SOURCES = ("--", ":/", ":(exclude,top)benchmarks/records", ":(exclude,top)docs", ":(exclude,top)README.md")
"""Measuring one record after another must not count as a change."""


def versions() -> dict[str, str | None]:
    """Versions by package name, None where one is not installed; imports none of them.

    >>> versions()["torch"] == torch.__version__
    True
    """
    found: dict[str, str | None] = {
        "ringtile": ringtile.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in COMPANIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> list[str]:
    cuda = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        "cpu",
        *(
            f"cuda:{number} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
            for number, gpu in enumerate(cuda)
        ),
    ]


def machine_facts() -> dict[str, str | int | list[str]]:
    """Operating system, processor, cores that this process may use, torch's threads and instruction set, devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "devices": _devices(),
    }


def commit() -> str | None:
    """The git commit of ringtile's own files, with ``+changes`` where they differ from it; None outside a checkout."""
    here = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed below some other project's checkout, the files are not tracked there.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", *_SOURCES)
    return head if head is None or not changes else f"{head}+changes"
