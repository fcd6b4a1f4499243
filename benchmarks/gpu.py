"""Check the Triton kernels on a GPU, then time them against FlexAttention, PyTorch's own kernels and flash-attention.

    python benchmarks/gpu.py                         all sections, for at most --seconds
    python benchmarks/gpu.py                         again: it continues with the cases that the record lacks
    python benchmarks/gpu.py --sections gate masks   some sections
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke --out FILE    a few small problems on a CPU, to see that it runs

It runs from a source tree without an install. The sections, in this order:

* ``gate``: every case of tests/triton_cases.py against float64. After a wrong one, nothing is timed.
* ``sanitizer``: a small case under compute-sanitizer, if that is installed.
* ``masks``: 131,072 tokens, H4 D128 bfloat16: the eight masks of cudnn-frontend's benchmark, dilated, LongNet, BigBird.
* ``lengths``: 128 to 1,048,576 tokens, to find the break-even length.
* ``claims``: the figures of the documents, row by row.
* ``model``: the forward pass of a model of 125 million parameters.

FlexAttention is compiled for each mask from a rule written for it, and its block mask is built before the timed call.
Times are medians of interleaved rounds. Sampled rows of each result are compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from ringtile import SparseTransformer, sparse_attention  # noqa: E402
from ringtile.kernels.triton.tuning import VARIABLE  # noqa: E402
from ringtile.layout import build_index, clear_cache  # noqa: E402
from ringtile.layout.density import with_density  # noqa: E402
from ringtile.measure.bench import run_bench, seconds_of  # noqa: E402
from ringtile.measure.machine import commit, machine_facts, versions  # noqa: E402
from ringtile.measure.peers import (  # noqa: E402
    Attention,
    Case,
    FlexAttention,
    Ringtile,
    SdpaDense,
    compiled_flex,
)
from ringtile.measure.record import FORWARD, OURS, Record, Row, write_whole  # noqa: E402
from ringtile.measure.suites import Task  # noqa: E402
from ringtile.patterns import Causal, GlobalTokens, Pattern, RandomBlocks, Window, parse  # noqa: E402
from ringtile.patterns.facts import band_of  # noqa: E402

LONG = 131_072
DOCUMENTS = [7_000, 20_072, 1_000, 31_000, 5_000, 12_000, 25_000, 3_000, 15_000, 12_000]
DENSE_PAIRS = 1 << 37
SECTIONS = ("gate", "sanitizer", "masks", "lengths", "claims", "model")
MODEL = {"layers": 12, "width": 768, "heads": 12}
MODEL_RULE = "causal & (window(4095, 0) | global_tokens(64))"

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mask:
    """A pattern, and the same rule for FlexAttention."""

    name: str
    pattern: Pattern
    rule: Rule | None


def masks(n: int) -> list[Mask]:
    """Return the masks of the comparison, for n tokens."""
    scale = n / LONG
    lengths = [max(1, round(length * scale)) for length in DOCUMENTS[:-1]]
    lengths.append(n - sum(lengths))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device())
    prefix = n // 4
    rules: dict[str, tuple[str, Rule | None]] = {
        "full": ("dense", lambda b, h, i, j: i >= 0),
        "causal": ("causal", lambda b, h, i, j: j <= i),
        "window": ("window(512)", lambda b, h, i, j: (i - j).abs() <= 512),
        "causal window": ("causal & window(1023, 0)", lambda b, h, i, j: (j <= i) & (i - j < 1024)),
        "documents": (
            f"causal & documents({lengths})",
            lambda b, h, i, j: (j <= i) & (document[i] == document[j]),
        ),
        "sink and window": ("streaming(4, 512)", lambda b, h, i, j: (j <= i) & ((i - j < 512) | (j < 4))),
        "prefix": (
            f"causal | documents([{prefix}, {n - prefix}]) & global_tokens({prefix})",
            lambda b, h, i, j: (j <= i) | ((i < prefix) & (j < prefix)),
        ),
        "global and local": (
            "window(256) | global_tokens(8)",
            lambda b, h, i, j: ((i - j).abs() <= 256) | (i < 8) | (j < 8),
        ),
        "dilated": (
            "causal & dilated([1, 4], 256)",
            lambda b, h, i, j: (j <= i) & ((i - j <= 256) | ((i - j) % 4 == 0) & (i - j <= 1024)),
        ),
        "block dilated": ("block_dilated([1, 4, 16], 4)", None),
        "LongNet": ("longnet_union([2048, 8192], [1, 4])", None),
        "BigBird": ("bigbird(3, 384, 128)", None),
    }
    found = [Mask(name, parse(text), rule) for name, (text, rule) in rules.items()]
    return [*found, Mask("random blocks, 5%", _at(RandomBlocks(1), 0.05, n, heads=1), None)]


def _at(pattern: Pattern, density: float, n: int, heads: int, block: int = 128) -> Pattern:
    return with_density(pattern, density, n, num_heads=heads, block=block).pattern


def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@dataclass(frozen=True)
class LongDense(SdpaDense):
    """PyTorch's own choice among its kernels, or one kernel by name, at any length that a GPU computes in seconds."""

    kernel: str = ""

    def unsupported(self, case: Case) -> list[str]:
        pairs = case.batch * case.heads * case.queries * case.n_tokens
        return [] if pairs <= DENSE_PAIRS else [f"computes {pairs:,} pairs, timed up to {DENSE_PAIRS:,}"]

    def prepare(self, case: Case) -> Attention:
        run = super().prepare(case)
        if not self.kernel:
            return run
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, self.kernel)):
                return run(q, k, v)

        return chosen


@dataclass(frozen=True)
class FlexRule(FlexAttention):
    """FlexAttention from its own rule if there is one, otherwise from our tiles."""

    rule: Rule | None = None
    options: tuple[tuple[str, int], ...] = ()

    def unsupported(self, case: Case) -> list[str]:
        if case.device.type == "cpu":
            return ["is measured on a GPU here"]
        too_long = case.n_tokens > 1 << 18
        return super().unsupported(case) + (["its block mask takes a GiB per head at 1M tokens"] if too_long else [])

    def prepare(self, case: Case) -> Attention:
        if self.rule is None:
            return super().prepare(case)
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(self.rule, None, None, case.n_tokens, case.n_tokens, device=case.device, _compile=True)
        return compiled_flex(case, mask, dict(self.options) or None)


@dataclass(frozen=True)
class Flash(Ringtile):
    """FlashAttention through our backend of that name: the newest installed version that is right."""

    backend: str | None = "flash"
    name: str = "flash-attention"

    def unsupported(self, case: Case) -> list[str]:
        if case.device.type != "cuda":
            return ["needs a GPU"]
        return [] if band_of(case.pattern) else ["supports all pairs, causal and windows"]


@dataclass(frozen=True)
class ByDescriptor(Ringtile):
    """Our kernels with tensor descriptors in the forward pass."""

    backend: str | None = "triton"
    name: str = "ringtile, tma"

    def unsupported(self, case: Case) -> list[str]:
        return [] if case.device.type == "cuda" else ["needs a GPU"]

    def prepare(self, case: Case) -> Attention:
        run = super().prepare(case)

        def switched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with patch.dict(os.environ, {VARIABLE: "tma"}):
                return run(q, k, v)

        return switched


def peers(rule: Rule | None = None, *, everyone: bool = True) -> tuple[Any, ...]:
    ours = Ringtile("triton")
    if not everyone:
        return ours, LongDense()
    named = LongDense("SDPA cuDNN", "CUDNN_ATTENTION")
    wide = FlexRule("flex, tuned", rule, (("BLOCK_M", 128), ("BLOCK_N", 64), ("num_warps", 8), ("num_stages", 3)))
    return ours, ByDescriptor(), LongDense(), named, FlexRule("flex", rule), wide, Flash()


def case_of(
    asked: str, pattern: Pattern, n: int, smoke: bool, dtype: torch.dtype = torch.bfloat16, **sizes: Any
) -> Case:
    sizes = {"heads": 8, "head_dim": 64, **sizes}
    return Case(asked, pattern, n, dtype=torch.float32 if smoke else dtype, device=device(), **sizes)


def mask_tasks(smoke: bool) -> Iterator[Task]:
    # The narrower head only for the masks that long contexts use.
    narrow = ("causal", "causal window", "global and local", "documents")
    for head_dim in (16,) if smoke else (128, 64):
        for mask in masks(256 if smoke else LONG):
            if mask.name in {16: ("causal", "global and local"), 64: narrow}.get(head_dim, (mask.name,)):
                sizes = {"heads": 1 if smoke else 4, "head_dim": head_dim}
                yield Task(case_of(mask.name, mask.pattern, 256 if smoke else LONG, smoke, **sizes), peers(mask.rule))


def length_tasks(smoke: bool) -> Iterator[Task]:
    pair, heads = peers(everyone=False), 1 if smoke else 8
    for n in (64,) if smoke else (128, 256, 512, 1024, 2048, 4096, 16384, 65536, 1 << 20):
        yield Task(case_of("causal window 4096", Causal() & Window(4095, 0), n, smoke, heads=heads), pair)
        if 2048 <= n <= 65536:
            yield Task(case_of("a tenth in random blocks", _at(RandomBlocks(1), 0.1, n, heads=1), n, smoke), pair)
    sizes = {"heads": 32, "kv_heads": 8, "n_queries": 1, "head_dim": 128}
    yield Task(case_of("decoding, GQA 32:8", Causal(), 64 if smoke else 32768, smoke, **sizes), pair, (FORWARD,))


def claim_tasks(smoke: bool) -> Iterator[Task]:
    """131,072 tokens in 6.95 ms; 4,096 tokens at 90, 95 and 98% sparse; each with dense attention."""
    n, density, pair = (256, 0.7, peers(everyone=False)) if smoke else (LONG, 0.05, peers(everyone=False))
    random = _at(RandomBlocks(1), density, n, heads=1)
    yield Task(case_of("131,072 tokens at 5%", random, n, smoke, torch.float16, heads=1 if smoke else 8), pair)
    if smoke:
        return
    window = Causal() & (Window(511, 0) | GlobalTokens(64))
    for n in (LONG, 2 * LONG):
        yield Task(case_of("window and global tokens", window, n, smoke, torch.float16), pair)
    for density, block in ((0.1, 128), (0.05, 128), (0.02, 64)):
        pattern = _at(Window(1), density, 4096, heads=8, block=block)
        yield Task(case_of(f"4,096 tokens at {density:g}", pattern, 4096, smoke, torch.float16, block=block), pair)


def model_rows(smoke: bool) -> Iterator[dict[str, Any]]:
    """Time the forward pass of a decoder of the size of GPT-2 small, and the build of its index."""

    def timed(call: Callable[[], object]) -> float:
        call()
        return statistics.median(seconds_of(call, 1, device()) for _ in range(3))

    sizes = {"layers": 1, "width": 32, "heads": 2} if smoke else MODEL
    dtype = torch.float32 if smoke else torch.bfloat16
    model = SparseTransformer(
        sizes["layers"], sizes["width"], sizes["heads"], is_causal=True, pattern=parse(MODEL_RULE),
        attend=partial(sparse_attention, backend="triton"), device=device(), dtype=dtype,
    ).eval()  # fmt: skip
    for n in (96,) if smoke else (32_768, 131_072, 524_288, 1_048_576):
        x = torch.randn(1, n, sizes["width"], device=device(), dtype=dtype)
        building = timed(lambda n=n: (clear_cache(), build_index(parse(MODEL_RULE), n, device=device())))
        with torch.inference_mode():
            out = model(x)
            if not out.isfinite().all() or (out == 0).all(-1).any():
                raise SystemExit(f"the output of the model at {n:,} tokens is not finite, or zero")
            seconds = timed(lambda x=x: model(x))
        yield {"tokens": n, "seconds": seconds, "index_seconds": building, **sizes, "pattern": MODEL_RULE}


def sanitized() -> str:
    """Return the verdict of compute-sanitizer on a small case."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "not run: compute-sanitizer is not installed"
    script = str(ROOT / "tests/triton_cases.py")
    command = [tool, "--error-exitcode", "9", sys.executable, script, "causal over sub tiles"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    return "clean" if done.returncode == 0 else f"status {done.returncode}: {done.stdout[-2000:]}"


def opened(path: Path) -> dict[str, Any]:
    """Return the results of a file, or an empty record if there is none."""
    here = {"commit": commit(), "versions": versions(), "machine": machine_facts()}
    if not path.exists():
        return {**here, "gate": {}, "sanitizer": "", "rows": [], "model": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in ("versions", "machine") if found[name] != here[name]]
    if changed:
        raise SystemExit(f"{path} was measured with other {', '.join(changed)}: move it away to start again")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    add("--seconds", type=float, default=540.0, help="start no new case after this time (default: 540)")
    add("--out", type=Path, default=ROOT / "benchmarks/records/gpu.json")
    add("--smoke", action="store_true", help="a few small problems, to see that everything runs")
    args = parser.parse_args()
    began = time.monotonic()

    def is_late() -> bool:
        return time.monotonic() - began >= args.seconds

    if device().type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a GPU, found none")
    found = opened(args.out)

    def keep(name: str, value: Any) -> None:
        found[name] = value
        write_whole(args.out, json.dumps(found, indent=1))

    if "gate" in args.sections:
        import triton_cases

        for name in ["causal over sub tiles", "key lengths"] if args.smoke else triton_cases.CASES:
            if name in found["gate"]:
                continue
            if is_late():
                raise SystemExit("the time is over before the end of the gate: run it again")
            torch.manual_seed(0)
            share = triton_cases.CASES[name]()
            print(f"gate: {name}: {share:.3f} of the error that is allowed", flush=True)
            if not share <= 1:
                raise SystemExit(f"{name} is wrong; nothing is timed")
            keep("gate", {**found["gate"], name: share})
    if "sanitizer" in args.sections and not found["sanitizer"] and not args.smoke:
        keep("sanitizer", sanitized())

    makers = {"masks": mask_tasks, "lengths": length_tasks, "claims": claim_tasks}
    tasks = [task for name, make in makers.items() if name in args.sections for task in make(args.smoke)]
    before = [Row(**row) for row in found["rows"]]

    def save(record: Record) -> None:
        rows = {(row.asked, row.problem): row for row in (*before, *record.rows)}
        keep("rows", [asdict(row) for row in rows.values()])

    def report(rows: list[Row]) -> None:
        for row in rows:
            figure = f"{row.median_ms:10.3f} ms" if row.median_ms is not None else row.reason
            print(f"{row.asked}, N {row.n_tokens}, D {row.head_dim}, {row.direction}, {row.peer}: {figure}", flush=True)
        torch.cuda.empty_cache()
        if is_late():
            # It ends the run as Ctrl-C does, with the rows so far.
            raise KeyboardInterrupt

    late = "the time is over: run it again for the other cases"
    if tasks and is_late():
        raise SystemExit(late)
    record = run_bench(tasks, seconds=0.3, before=before, report=report, save=save)
    if record.interrupted:
        save(record)
        raise SystemExit(late)
    if "model" in args.sections and not found["model"] and not is_late():
        keep("model", list(model_rows(args.smoke)))
    wrong = [row for row in record.rows if row.peer == OURS and row.median_ms is None]
    for row in wrong:
        print(f"{row.asked}, N {row.n_tokens}: {row.reason}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
