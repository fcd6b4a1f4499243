"""Time the kernels of one source tree: python benchmarks/gpu_ab.py SRC reads questions, a line each, and answers them.

`benchmarks/gpu.py --baseline` starts one process for each of two trees. ``{"prepare": [90, 232448], "cases": [...]}``
compiles the tree's kernels.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

sys.path.insert(0, sys.argv[1])

import torch
from gpu_prepare import Problem, no_gpu, prepare
from gpu_times import CLOCK, DEVICE, passes_of

from ringtile.layout import clear_cache
from ringtile.measure.exact import Exact
from ringtile.measure.peers import Case, Ringtile
from ringtile.patterns import parse


def case_of(pattern: str, dtype: str, **sizes: int) -> Case:
    return Case(pattern, parse(pattern), dtype=getattr(torch, dtype), device=DEVICE, **sizes)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if target := question.get("prepare"):
        return prepare(*target, [], [Problem(case_of(**case)) for case in question["cases"]])
    seconds = question.pop("seconds")
    clear_cache()
    try:
        with no_gpu() if CLOCK == "mock" else nullcontext():
            case = case_of(**question)
            return passes_of(Exact(case, 0), Ringtile("triton").prepare(case), seconds)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            reply = answer(json.loads(line))
        print(json.dumps(reply), flush=True)
