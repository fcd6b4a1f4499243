"""The Triton kernels on a GPU: right first, then timed beside FlexAttention, torch's own kernels and flash-attention.

    python benchmarks/gpu.py                         everything, at most --seconds of it
    python benchmarks/gpu.py                         again: what the record has already is not done again
    python benchmarks/gpu.py --sections gate masks   some of it
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke --out FILE    a few small problems on a CPU: that it runs

Works from a source tree, uninstalled. Sections, in this order:

* ``gate``: every case of tests/triton_cases.py against float64; after a wrong one nothing is timed.
* ``sanitizer``: a small case under compute-sanitizer, where that is installed.
* ``masks``: 131,072 tokens, H4 D128 bfloat16: the eight masks of cudnn-frontend's benchmark, dilated, LongNet, BigBird.
* ``lengths``: 128 to 1,048,576 tokens; where sparse attention begins to pay.
* ``claims``: the figures of the documents, row by row.
* ``model``: the forward pass of a model of 125 million parameters.

FlexAttention is compiled for each mask from a rule written for it, its block mask built apart from the time of a call.
Times are medians of interleaved rounds; every result is compared with float64 in sampled rows before it is timed.
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
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from ringtile import SparseTransformer, sparse_attention  # noqa: E402
from ringtile.kernels.flash import band_of  # noqa: E402
from ringtile.kernels.triton.tuning import VARIABLE  # noqa: E402
from ringtile.layout import build_index, clear_cache  # noqa: E402
from ringtile.layout.density import with_density  # noqa: E402
from ringtile.measure.bench import measure, rows_in  # noqa: E402
from ringtile.measure.machine import commit, machine_facts, versions  # noqa: E402
from ringtile.measure.peers import Attention, Case, FlexAttention, Ringtile, SdpaDense  # noqa: E402
from ringtile.measure.progress import Progress  # noqa: E402
from ringtile.measure.record import FORWARD, Row, write_whole  # noqa: E402
from ringtile.measure.suites import Task  # noqa: E402
from ringtile.patterns import (  # noqa: E402
    BlockDilated,
    Causal,
    Dense,
    Dilated,
    Documents,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Window,
    bigbird,
    longnet_union,
    streaming,
)

LONG = 131_072
DOCUMENTS = [7_000, 20_072, 1_000, 31_000, 5_000, 12_000, 25_000, 3_000, 15_000, 12_000]
DENSE_PAIRS = 1 << 37
SECTIONS = ("gate", "sanitizer", "masks", "lengths", "claims", "model")
MODEL = {"layers": 12, "width": 768, "heads": 12}
MODEL_RULE = "causal & (window(4095, 0) | global_tokens(64))"

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mask:
    """A pattern and the same rule in FlexAttention's words."""

    name: str
    pattern: Pattern
    rule: Rule | None


def masks(n: int) -> list[Mask]:
    """The masks of the comparison, for n tokens."""
    scale = n / LONG
    lengths = [max(1, round(length * scale)) for length in DOCUMENTS[:-1]]
    lengths.append(n - sum(lengths))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device())
    prefix = n // 4
    return [
        Mask("full", Dense(), lambda b, h, i, j: i >= 0),
        Mask("causal", Causal(), lambda b, h, i, j: j <= i),
        Mask("window", Window(512), lambda b, h, i, j: (i - j).abs() <= 512),
        Mask("causal window", Causal() & Window(1023, 0), lambda b, h, i, j: (j <= i) & (i - j < 1024)),
        Mask(
            "documents",
            Causal() & Documents(lengths),
            lambda b, h, i, j: (j <= i) & (document[i] == document[j]),
        ),
        Mask("sink and window", streaming(4, 512), lambda b, h, i, j: (j <= i) & ((i - j < 512) | (j < 4))),
        Mask(
            "prefix",
            Causal() | (Documents([prefix, n - prefix]) & GlobalTokens(prefix)),
            lambda b, h, i, j: (j <= i) | ((i < prefix) & (j < prefix)),
        ),
        Mask(
            "global and local",
            Window(256) | GlobalTokens(8),
            lambda b, h, i, j: ((i - j).abs() <= 256) | (i < 8) | (j < 8),
        ),
        Mask(
            "dilated",
            Causal() & Dilated([1, 4], 256),
            lambda b, h, i, j: (j <= i) & ((i - j <= 256) | ((i - j) % 4 == 0) & (i - j <= 1024)),
        ),
        Mask("block dilated", BlockDilated([1, 4, 16], 4), None),
        Mask("LongNet", longnet_union((2048, 8192), (1, 4)), None),
        Mask("BigBird", bigbird(3, 384, 128), None),
        Mask("random blocks, 5 %", _at(RandomBlocks(1), 0.05, n, heads=1), None),
    ]


def _at(pattern: Pattern, density: float, n: int, heads: int, block: int = 128) -> Pattern:
    return with_density(pattern, density, n, heads=heads, block=block).pattern


def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@dataclass(frozen=True)
class LongDense(SdpaDense):
    """Torch's own choice among its kernels, at any length that a GPU computes in seconds; or one by name."""

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
    """FlexAttention from a rule of its own where there is one, else from our tiles."""

    rule: Rule | None = None
    options: tuple[tuple[str, int], ...] = ()

    def unsupported(self, case: Case) -> list[str]:
        if case.device.type == "cpu":
            return ["is measured on a GPU here"]
        too_long = case.n_tokens > 1 << 18
        return super().unsupported(case) + (["its block mask takes a GiB a head at 1M tokens"] if too_long else [])

    def prepare(self, case: Case) -> Attention:
        if self.rule is None:
            return super().prepare(case)
        from torch._dynamo import config, reset
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        reset()
        config.fail_on_recompile_limit_hit = True
        mask = create_block_mask(self.rule, None, None, case.n_tokens, case.n_tokens, device=case.device, _compile=True)
        compiled = torch.compile(flex_attention, dynamic=False)
        options = dict(self.options) or None
        gqa = case.key_heads != case.heads
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=options)


@dataclass(frozen=True)
class Flash(Ringtile):
    """FlashAttention through our own backend of that name: the newest version here that is right."""

    backend: str | None = "flash"
    name: str = "flash-attention"

    def unsupported(self, case: Case) -> list[str]:
        if case.device.type != "cuda":
            return ["needs a GPU"]
        return [] if band_of(case.pattern) else ["serves all pairs, causal and windows"]


@dataclass(frozen=True)
class ByDescriptor(Ringtile):
    """Our kernels, the forward pass by tensor descriptors, to see whether they win."""

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


def mask_tasks(smoke: bool) -> Iterator[Task]:
    n, heads, dims = (256, 1, (16,)) if smoke else (LONG, 4, (128, 64))
    dtype = torch.float32 if smoke else torch.bfloat16
    for head_dim in dims:
        for mask in masks(n):
            if smoke and mask.name not in ("causal", "global and local"):
                continue
            # The narrower head once again for the masks that long contexts use.
            if head_dim == 64 and mask.name not in ("causal", "causal window", "global and local", "documents"):
                continue
            case = Case(mask.name, mask.pattern, n, heads=heads, head_dim=head_dim, dtype=dtype, device=device())
            yield Task(case, peers(mask.rule))


def length_tasks(smoke: bool) -> Iterator[Task]:
    dtype = torch.float32 if smoke else torch.bfloat16
    lengths = (64,) if smoke else (128, 256, 512, 1024, 2048, 4096, 16384, 65536, 1 << 20)
    for n in lengths:
        for text, pattern in (
            ("causal window 4096", Causal() & Window(4095, 0)),
            ("a tenth in random blocks", None),
        ):
            if pattern is None:
                if n < 2048 or n > 65536:
                    continue
                pattern = _at(RandomBlocks(1), 0.1, n, heads=1)
            case = Case(text, pattern, n, heads=1 if smoke else 8, head_dim=64, dtype=dtype, device=device())
            yield Task(case, peers(everyone=False))
    case = Case("decoding, GQA 32:8", Causal(), 64 if smoke else 32768, heads=32, kv_heads=8, n_queries=1, head_dim=128,
                dtype=dtype, device=device())  # fmt: skip
    yield Task(case, peers(everyone=False), (FORWARD,))


def claim_tasks(smoke: bool) -> Iterator[Task]:
    """131,072 tokens in 6.95 ms; 4,096 tokens at 90, 95 and 98 % sparse; dense attention beside them."""
    dtype = torch.float32 if smoke else torch.float16
    n = 256 if smoke else LONG
    case = Case("131,072 tokens at 5 %", _at(RandomBlocks(1), 0.7 if smoke else 0.05, n, heads=1), n,
                heads=1 if smoke else 8,
                head_dim=64, dtype=dtype, device=device())  # fmt: skip
    yield Task(case, peers(everyone=False))
    if smoke:
        return
    narrow = Causal() & (Window(511, 0) | GlobalTokens(64))
    for n in (LONG, 2 * LONG):
        case = Case("window and global tokens", narrow, n, heads=8, head_dim=64, dtype=dtype, device=device())
        yield Task(case, peers(everyone=False))
    for density, block in ((0.1, 128), (0.05, 128), (0.02, 64)):
        pattern = _at(Window(1), density, 4096, heads=8, block=block)
        case = Case(f"4,096 tokens at {density:g}", pattern, 4096, heads=8, head_dim=64, dtype=dtype, device=device(),
                    block=block)  # fmt: skip
        yield Task(case, peers(everyone=False))


def timed(call: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    call()
    found = []
    for _ in range(rounds):
        if device().type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device().type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def model_rows(smoke: bool) -> Iterator[dict[str, Any]]:
    """The forward pass of a decoder of the size of GPT-2 small, and the time that its index takes to build."""
    from ringtile.patterns import parse

    sizes = {"layers": 1, "width": 32, "heads": 2} if smoke else MODEL
    dtype = torch.float32 if smoke else torch.bfloat16
    model = SparseTransformer(
        sizes["layers"], sizes["width"], sizes["heads"], is_causal=True, pattern=parse(MODEL_RULE),
        attend=partial(sparse_attention, backend="triton"), device=device(), dtype=dtype,
    ).eval()  # fmt: skip
    for n in (96,) if smoke else (32_768, 131_072, 524_288, 1_048_576):
        x = torch.randn(1, n, sizes["width"], device=device(), dtype=dtype)
        clear_cache()
        building = timed(lambda n=n: (clear_cache(), build_index(parse(MODEL_RULE), n, device=device())), 3)
        with torch.inference_mode():
            out = model(x)
            if not out.isfinite().all() or (out == 0).all(-1).any():
                raise SystemExit(f"the model's output at {n:,} tokens is not finite, or zero")
            seconds = timed(lambda x=x: model(x), 3)
        yield {"tokens": n, "seconds": seconds, "index_seconds": building, **sizes, "pattern": MODEL_RULE}


def sanitized() -> str:
    """What compute-sanitizer says of a small case."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "not run: compute-sanitizer is not installed"
    script = str(ROOT / "tests/triton_cases.py")
    command = [tool, "--error-exitcode", "9", sys.executable, script, "causal over sub tiles"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    return "clean" if done.returncode == 0 else f"status {done.returncode}: {done.stdout[-2000:]}"


class Record:
    """The file that results are kept in: written whole after each, read at the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        here = {"commit": commit(), "versions": versions(), "machine": machine_facts()}
        self.found: dict[str, Any] = {**here, "gate": {}, "sanitizer": "", "rows": [], "model": []}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in ("versions", "machine") if before[name] != here[name]]
            if changed:
                raise SystemExit(f"{path} was measured with other {', '.join(changed)}: move it away to begin anew")
            self.found = before

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        write_whole(self.path, json.dumps(self.found, indent=1))

    def rows(self) -> list[Row]:
        names = {field.name for field in fields(Row)}
        return [Row(**{key: value for key, value in row.items() if key in names}) for row in self.found["rows"]]


def passes_gate(record: Record, smoke: bool, left: Callable[[], float]) -> bool:
    """Run the cases that have not passed yet; True where all have."""
    import triton_cases

    names = ["causal over sub tiles", "key lengths"] if smoke else list(triton_cases.CASES)
    for name in names:
        if name in record.found["gate"]:
            continue
        if left() <= 0:
            return False
        torch.manual_seed(0)
        share = triton_cases.CASES[name]()
        print(f"gate: {name}: {share:.3f} of the error that is allowed", flush=True)
        if not share <= 1:
            raise SystemExit(f"{name} is wrong; nothing is timed")
        record.keep("gate", {**record.found["gate"], name: share})
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing new after so many; default 540")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/records/gpu.json")
    parser.add_argument("--smoke", action="store_true", help="a few small problems, to see that everything runs")
    args = parser.parse_args()
    began = time.monotonic()

    def left() -> float:
        return args.seconds - (time.monotonic() - began)

    if device().type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here")
    record = Record(args.out)
    if "gate" in args.sections and not passes_gate(record, args.smoke, left):
        raise SystemExit("time is up within the gate: run it again")
    if "sanitizer" in args.sections and not record.found["sanitizer"] and not args.smoke:
        record.keep("sanitizer", sanitized())
    tasks = [
        task
        for name, make in (("masks", mask_tasks), ("lengths", length_tasks), ("claims", claim_tasks))
        if name in args.sections
        for task in make(args.smoke)
    ]
    progress = Progress()
    for done, task in enumerate(tasks):
        if rows_in(task, record.rows()):
            continue
        if left() <= 0:
            raise SystemExit(f"time is up with {len(tasks) - done} cases to go: run it again")
        progress.show(f"case {done + 1} of {len(tasks)}: {task.case.asked}, N {task.case.n_tokens:,}")
        rows = [row for some in measure(task.case, task.peers, directions=task.directions, seconds=0.3) for row in some]
        progress.clear()
        for row in rows:
            figure = f"{row.median_ms:10.3f} ms" if row.median_ms is not None else row.reason
            print(f"{row.asked}, N {row.n_tokens}, D {row.head_dim}, {row.direction}, {row.peer}: {figure}", flush=True)
        record.keep("rows", record.found["rows"] + [asdict(row) for row in rows])
        torch.cuda.empty_cache()
    if "model" in args.sections and not record.found["model"] and left() > 0:
        record.keep("model", list(model_rows(args.smoke)))
    wrong = [row for row in record.rows() if row.peer == "ringtile" and row.median_ms is None]
    for row in wrong:
        print(f"{row.asked}, N {row.n_tokens}: {row.reason}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
