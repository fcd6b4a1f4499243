"""The sections of benchmarks/gpu.py, as lists of cells. A cell is one entry of the record."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton_cases
import triton_list_cases
from gpu_prepare import ListProblem, Problem, forced
from gpu_times import CLOCK, DEVICE, passes_of, share_of, times_of
from lists import BOUNDS, CELLS
from torch import Tensor

from ringtile import SparseTransformer, sparse_attention
from ringtile.index import build_index, clear_cache
from ringtile.index.density import with_density
from ringtile.kernels.select import NAMES
from ringtile.kernels.triton import launches
from ringtile.kernels.triton.tuning import VARIABLE, Config, configs
from ringtile.patterns import Pattern, parse
from ringtile.tools.bench import blank_row
from ringtile.tools.bench.exact import Exact
from ringtile.tools.bench.peers import Attention, Case, FlexAttention, Peer, Ringtile, SdpaDense, compiled_flex
from ringtile.tools.record import BOTH, DENSE, DIRECTIONS, FORWARD, OURS

ROOT = Path(__file__).resolve().parents[1]
LONG, MILLION = 131_072, 1 << 20
DOCUMENTS = [7_000, 20_072, 1_000, 31_000, 5_000, 12_000, 25_000, 3_000, 15_000, 12_000]
NARROW = ("causal", "causal window", "global and local", "documents")
"""Masks of head dim 64, too."""
FLEX = ("full", "causal window", "documents", "global and local", "dilated")
"""Masks of FlexAttention, which compiles for most of a minute per mask."""
PASSES = ("full", "causal", "causal window", "dilated", "LongNet")
SANITIZED = ("causal over sub tiles", "grouped heads and another value dim", "long rows and columns in pieces")
SANITIZER_SECONDS = 100
CHECKED_TOKENS = 1024
"""Of a layer over lists, whose gradients are compared with float64."""
MODEL, MODEL_RULE = (12, 768, 12), "causal & (window(4095, 0) | global_tokens(64))"
TILES = {
    "forward": ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32)),
    "dq": ((128, 64), (64, 64), (128, 32), (64, 32)),
    "dkdv": ((64, 128), (128, 64), (64, 64), (32, 128), (32, 64)),
}
"""Queries and keys per tile of the sweep, besides those of the table."""
MOST_CONFIGS = 8

Value = dict[str, Any]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Cell(NamedTuple):
    """A name in its section, the measurement, and the calls whose kernels can be compiled beforehand."""

    name: str
    run: Callable[[], Value]
    problems: tuple[Problem | ListProblem, ...] = ()


class Setup(NamedTuple):
    """The choices of a run."""

    smoke: bool
    baseline: Path | None

    @property
    def seconds(self) -> float:
        """How long one call is timed."""
        return 0.0 if self.smoke else 0.2

    def some(self, things: Any, number: int = 1) -> Any:
        """Return all, or the first few in a smoke test."""
        return list(things)[:number] if self.smoke else things

    def case(self, asked: str, n: int, pattern: Pattern | None = None, **sizes: Any) -> Case:
        """Return the case of a mask by name, or of a pattern."""
        n, sizes = 64 if self.smoke else n, {"heads": 4, "head_dim": 128, "dtype": torch.bfloat16, **sizes}
        if self.smoke:
            sizes |= {"heads": sizes["heads"] // sizes.get("kv_heads", sizes["heads"]), "head_dim": 16}
            sizes |= {"dtype": torch.float32} | ({"kv_heads": 1} if "kv_heads" in sizes else {})
        return Case(asked, parse(masks(n)[asked]) if pattern is None else pattern, n, device=DEVICE, **sizes)


def documents(n: int) -> list[int]:
    """Return the lengths of the documents of n tokens."""
    lengths = [max(1, round(length * n / LONG)) for length in DOCUMENTS[:-1]]
    return [*lengths, n - sum(lengths)]


def masks(n: int) -> dict[str, str]:
    """Return patterns by name."""
    prefix = n // 4
    return {
        "full": "dense",
        "causal": "causal",
        "window": "window(512)",
        "causal window": "causal & window(1023, 0)",
        "documents": f"causal & documents({documents(n)})",
        "sink and window": "streaming(4, 512)",
        "prefix": f"causal | documents([{prefix}, {n - prefix}]) & global_tokens({prefix})",
        "global and local": "window(256) | global_tokens(8)",
        "dilated": "causal & dilated([1, 4], 256)",
        "block dilated": "block_dilated([1, 4, 16], 4)",
        "LongNet": "longnet_union([2048, 8192], [1, 4])",
        "BigBird": "bigbird(3, 384, 128)",
        "random blocks, 5%": random_blocks(0.05, n),
    }


def flex_rule(name: str, n: int) -> Rule:
    """Return the same mask for FlexAttention."""
    lengths = torch.tensor(documents(n))
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(DEVICE)
    rules: dict[str, Rule] = {
        "full": lambda b, h, i, j: i >= 0,
        "causal window": lambda b, h, i, j: (j <= i) & (i - j < 1024),
        "documents": lambda b, h, i, j: (j <= i) & (document[i] == document[j]),
        "global and local": lambda b, h, i, j: ((i - j).abs() <= 256) | (i < 8) | (j < 8),
        "dilated": lambda b, h, i, j: (j <= i) & ((i - j <= 256) | ((i - j) % 4 == 0) & (i - j <= 1024)),
    }
    return rules[name]


def random_blocks(share: float, n: int) -> str:
    """Return random blocks that keep about this share of the pairs of n tokens."""
    return f"random_blocks({max(1, round(share * n / 256))})"


@dataclass(frozen=True)
class Dense(SdpaDense):
    """PyTorch's own choice among its kernels, or one kernel by name, at any length that a GPU computes in seconds."""

    name: str = DENSE
    kernel: str = ""

    def unsupported(self, case: Case) -> list[str]:
        pairs = case.batch * case.heads * case.queries * case.n_tokens
        return [] if pairs <= 1 << 37 else [f"computes {pairs:,} pairs, timed up to {1 << 37:,}"]

    def prepare(self, case: Case) -> Attention:
        run = super().prepare(case)
        if not self.kernel:
            return run
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, self.kernel)):
                return run(q, k, v)

        return chosen


class Flex(FlexAttention):
    """FlexAttention, from its own rule for the mask."""

    def prepare(self, case: Case) -> Attention:
        from torch.nn.attention.flex_attention import create_block_mask

        rule, n = flex_rule(case.asked, case.n_tokens), case.n_tokens
        return compiled_flex(case, create_block_mask(rule, None, None, n, n, device=case.device, _compile=True))


TRITON = Ringtile("triton")
PAIR = (TRITON, Dense())
ALL = (*PAIR, Dense("SDPA cuDNN", "CUDNN_ATTENTION"), Ringtile("flash", "flash-attention"))
ALL += (Ringtile("fa4", "fa4"),) if "fa4" in NAMES else ()


def compare(case: Case, peers: tuple[Peer, ...], directions: tuple[str, ...], seconds: float) -> Value:
    """Return a row of each peer and direction, with times if its result is right, otherwise with the reason."""
    exact, rows, ready = Exact(case, 0, trains=BOTH in directions), [], {}
    for direction in directions:
        calls, admitted = {}, []
        for peer in peers:
            row = replace(blank_row(case, direction, peer.name), density=case.index.density)
            row, pairs = replace(row, tile_density=case.index.tile_density), peer.computes(case)
            try:
                if reasons := peer.unsupported(case):
                    raise ValueError("; ".join(reasons))
                if peer not in ready:
                    ready[peer] = peer.prepare(case)
                out, grads = exact.run(ready[peer], direction, exact.rows_grad)
                error, bound = max(exact.errors(pairs, out, grads)), exact.bound(pairs, direction)
                row = replace(row, error=error if math.isfinite(error) else None, error_bound=bound)
                if not error <= bound or (peer.name == OURS and exact.holes(out)):
                    raise ValueError(f"wrong: error {error:.1e}, allowed {bound:.1e}; {exact.holes(out)}")
                calls[peer.name] = partial(exact.run, ready[peer], direction, exact.grad)
            except Exception as error:
                row = replace(row, reason=first_line(error))
            admitted.append(row)
        times = times_of(calls, seconds) if calls else {}
        rows += [_timed(asdict(row), times.get(row.peer), times.get(DENSE)) for row in admitted]
    return {"rows": rows}


def _timed(row: Value, time: Value | None, dense: Value | None) -> Value:
    if time is None:
        return row
    speedup = dense["ms"] / time["ms"] if dense else None
    named = {"median_ms" if name == "ms" else name: value for name, value in time.items()}
    return {**row, **named, "speedup": speedup}


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


def checked(case: triton_cases.Check) -> Value:
    """Run a case of the tests."""
    torch.manual_seed(0)
    share = case()
    # JSON has no infinity.
    return {"share": share} if share <= 1 else {"error": f"{share:.3g} of the error that is allowed"}


def gate(setup: Setup) -> Iterator[Cell]:
    # The second reads what only a GPU computes, so that the mock lists a failure.
    few = ("causal over sub tiles", "an index with unused room")[: 1 if CLOCK == "wall" else 2]
    for name in few if setup.smoke else triton_cases.CASES:
        yield Cell(name, partial(checked, triton_cases.CASES[name]))


def machine(setup: Setup) -> Iterator[Cell]:
    def clocks() -> Value:
        command = ["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE"]
        command = command if shutil.which(command[0]) else ["rocm-smi", "--showclocks"]
        return {"text": subprocess.run(command, capture_output=True, text=True, timeout=30).stdout[-6000:]}

    def matmul(size: int) -> Value:
        a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        time = times_of({"matmul": lambda: a @ b}, setup.seconds)["matmul"]
        return {**time, "size": size, "tflops": 2 * size**3 / time["ms"] / 1e9}

    if CLOCK == "events":
        yield Cell("clocks", clocks)
    yield Cell("bfloat16 matmul", partial(matmul, 32 if setup.smoke else 8192))


def passes(setup: Setup) -> Iterator[Cell]:
    """Time both passes of one source tree: `ab` runs this section for two."""

    def timed(case: Case) -> Value:
        return passes_of(Exact(case, 0), TRITON.prepare(case), setup.seconds, by_kernel=True)

    for head_dim in setup.some((128, 64)):
        for name in setup.some(PASSES):
            case = setup.case(name, LONG // 2, head_dim=head_dim)
            yield Cell(f"{name}, D {head_dim}", partial(timed, case), (Problem(case),))


def ab(setup: Setup) -> Iterator[Cell]:
    def timed(source: Path) -> Value:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "record.json")
            command = [
                sys.executable,
                ROOT / "benchmarks/gpu.py",
                "--sections",
                "passes",
                "--source",
                source,
                "--out",
                out,
            ]
            command += {"mock": ["--mock"], "wall": ["--smoke"]}.get(CLOCK, [])
            done = subprocess.run(command, capture_output=True, text=True)
            if not out.exists():
                raise RuntimeError(f"status {done.returncode}: {done.stderr[-300:]}")
            found = json.loads(out.read_text(encoding="utf-8"))
        cells = found["cells"]["passes"]
        wrong = [f"{name}: {value['error']}" for name, value in cells.items() if "error" in value]
        return {"sources": found["sources"], **cells, **({"error": "; ".join(wrong)} if wrong else {})}

    # Each tree twice, in turn: what differs between its own times is noise.
    trees = {"before": setup.baseline, "now": ROOT} if setup.baseline else {}
    for number in setup.some((1, 2)):
        for name, tree in trees.items():
            yield Cell(f"{name}, {number}", partial(timed, tree / "src"))


def candidates(kernel: str, number: int, head_dim: int) -> list[Config]:
    """Return at most `MOST_CONFIGS` configurations: the table's, then other tiles, warps and stages."""
    table = configs(kernel, number, torch.bfloat16, head_dim, 128, False)
    first = table[0]
    found = [first, first._replace(warps=12 - first.warps), first._replace(stages=first.stages + 1), *table[1:3]]
    found += [first._replace(queries=queries, keys=keys) for queries, keys in TILES[kernel]]
    return list(dict.fromkeys(found))[:MOST_CONFIGS]


def sweep(setup: Setup) -> Iterator[Cell]:
    @cache
    def exact(case: Case) -> Exact:
        return Exact(case, 0)

    def timed(case: Case, kernel: str, config: Config) -> Value:
        about = {"kernel": kernel, "head_dim": case.head_dim, "config": config._asdict()}
        try:
            with forced(kernel, config):
                return {**about, **passes_of(exact(case), TRITON.prepare(case), setup.seconds)}
        except ValueError:
            raise
        except Exception as reason:
            # It does not fit, or does not compile: others do.
            return {**about, "verdict": first_line(reason)}

    # The interpreter has a configuration of its own.
    for head_dim in setup.some((64, 128)) if CLOCK != "wall" else ():
        case = setup.case("causal window", 32_768, heads=8, head_dim=head_dim)
        for kernel in TILES:
            for config in setup.some(candidates(kernel, launches.architecture(DEVICE), head_dim)):
                problem = Problem(case, kernel != "forward", forced=(kernel, config))
                name = f"{kernel}, D {head_dim}, {'-'.join(map(str, config))}"
                yield Cell(name, partial(timed, case, kernel, config), (problem,))


def comparisons(section: str, setup: Setup) -> Iterator[tuple[tuple[Peer, ...], Case]]:
    """Yield the peers and cases of a section that compares."""
    half, eight = {"heads": 8, "head_dim": 64, "dtype": torch.float16}, {"heads": 8, "head_dim": 64}
    if section == "masks":
        yield from ((ALL, setup.case(name, LONG)) for name in setup.some(masks(LONG)))
        yield from ((ALL, setup.case(name, LONG, head_dim=64)) for name in setup.some(NARROW, 0))
    elif section == "flex":
        yield from (((TRITON, Flex()), setup.case(name, LONG)) for name in setup.some(FLEX))
    elif section == "million":
        for name in setup.some(("causal window", "LongNet")):
            yield PAIR, setup.case(name, MILLION, heads=2, head_dim=64)
    elif section == "lengths":
        for n in setup.some((128, 256, 512, 1024, 2048, 4096, 16_384, 65_536)):
            yield PAIR, setup.case("causal window 4096", n, parse("causal & window(4095, 0)"), **eight)
        for n in setup.some((2048, 4096, 16_384, 65_536), 0):
            yield PAIR, setup.case("a tenth in random blocks", n, parse(random_blocks(0.1, n)), **eight)
        yield PAIR, decoding(setup)
    elif not setup.smoke:
        # Figures of the documents: 131,072 tokens in 6.95 ms; 4,096 tokens at 90, 95 and 98% sparse.
        yield PAIR, setup.case("131,072 tokens at 5%", LONG, parse(random_blocks(0.05, LONG)), **half)
        window = parse("causal & (window(511, 0) | global_tokens(64))")
        yield from ((PAIR, setup.case("window and global", n, window, **half)) for n in (LONG, 2 * LONG))
        for density, block in ((0.1, 128), (0.05, 128), (0.02, 64)):
            pattern = with_density(parse("window(1)"), density, 4096, num_heads=8, block=block).pattern
            yield PAIR, setup.case(f"4,096 tokens at {density:g}", 4096, pattern, block=block, **half)


def compared(section: str, setup: Setup) -> Iterator[Cell]:
    for peers, case in comparisons(section, setup):
        directions = (FORWARD,) if case.n_queries else DIRECTIONS
        run = partial(compare, case, peers, directions, setup.seconds)
        yield Cell(f"{case.asked}, N {case.n_tokens}, D {case.head_dim}", run, (Problem(case, BOTH in directions),))


def tma(setup: Setup) -> Iterator[Cell]:
    def both(case: Case) -> Value:
        found, exact = {}, Exact(case, 0)
        for name, value in (("pointers", ""), ("descriptors", "tma")):
            clear_cache()
            with patch.dict(os.environ, {VARIABLE: value}):
                found[name] = passes_of(exact, TRITON.prepare(case), setup.seconds)
        return found

    for head_dim in setup.some((128, 64)) if CLOCK == "wall" or launches.architecture(DEVICE) >= 90 else ():
        for name in setup.some(("full", "causal window")):
            case = setup.case(name, LONG, head_dim=head_dim)
            problems = (Problem(case), Problem(case, by_descriptor=True))
            yield Cell(f"{name}, D {head_dim}", partial(both, case), problems)


def decoding(setup: Setup) -> Case:
    sizes = {"heads": 32, "kv_heads": 8, "n_queries": 1}
    return setup.case("decoding, GQA 32:8", 32_768, parse("causal"), **sizes)


def graph(setup: Setup) -> Iterator[Cell]:
    def step(case: Case, trains: bool) -> Value:
        exact, attention = Exact(case, 0, trains=trains), TRITON.prepare(case)
        share = share_of(exact, attention, BOTH if trains else FORWARD)
        leaves = [x.detach().requires_grad_(trains) for x in exact.inputs]

        def call() -> list[Tensor]:
            out = attention(*leaves)
            return [out.detach(), *(torch.autograd.grad(out, leaves, exact.grad) if trains else ())]

        wanted, recorded = call(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(recorded):
            captured = call()
        for x in captured if CLOCK == "events" else []:
            x.zero_()
        recorded.replay()
        if not all(map(torch.equal, captured, wanted)):
            raise ValueError("wrong: a replay of the graph gives other bits")
        # A graph saves the host's time, so both are timed with it.
        return {"share": share, **times_of({"eager": call, "graph": recorded.replay}, setup.seconds, wall=True)}

    short = setup.case("causal window", 4096, heads=8, head_dim=64)
    for case, trains in ((short, True), (short, False), (decoding(setup), False)) if CLOCK != "wall" else ():
        name = f"{case.asked}, {BOTH if trains else FORWARD}"
        yield Cell(name, partial(step, case, trains), (Problem(case, trains),))


def model(setup: Setup) -> Iterator[Cell]:
    """Time the forward pass of a decoder of the size of GPT-2 small, and the build of its index."""
    (layers, width, heads), rule = (1, 32, 2) if setup.smoke else MODEL, parse(MODEL_RULE)
    options = {"device": DEVICE, "dtype": torch.float32 if setup.smoke else torch.bfloat16}

    @cache
    def decoder() -> SparseTransformer:
        attend = partial(sparse_attention, backend="triton")
        return SparseTransformer(layers, width, heads, is_causal=True, pattern=rule, attend=attend, **options).eval()

    def forward(n: int) -> Value:
        x = torch.randn(1, n, width, **options)
        build = {"build": lambda: (clear_cache(), build_index(rule, n, device=DEVICE))}
        building = times_of(build, setup.seconds, wall=True)["build"]["ms"] / 1e3
        with torch.inference_mode():
            out = decoder()(x)
            if not out.isfinite().all() or (out == 0).all(-1).any():
                raise ValueError("wrong: the output is not finite, or zero")
            seconds = times_of({"model": lambda: decoder()(x)}, setup.seconds)["model"]["ms"] / 1e3
        sizes = {"tokens": n, "layers": layers, "width": width, "heads": heads, "pattern": MODEL_RULE}
        return {**sizes, "seconds": seconds, "index_seconds": building}

    for n in (32,) if setup.smoke else (32_768, LONG, 524_288, MILLION):
        problem = Problem(setup.case("model", n, rule, heads=heads, head_dim=width // heads), trains=False)
        yield Cell(f"N {n}", partial(forward, n), (problem,))


def lists(setup: Setup) -> Iterator[Cell]:
    """Run the cases of lists, then time layers of models that were trained sparse, beside PyTorch's dense attention."""

    def timed(problem: ListProblem) -> Value:
        # All gradients of few tokens, then the last rows of all, against float64.
        off = problem._replace(n_keys=min(problem.n_keys, CHECKED_TOKENS), trains=True).off()
        off = max(off, problem.off(rows=4))
        if not off <= BOUNDS[problem.dtype]:
            raise ValueError(f"wrong: relative error {off:.1e}, allowed {BOUNDS[problem.dtype]:.0e}")
        found: Value = {"off": off}
        for trains in (False, True) if problem.trains else (False,):
            calls = {"lists": problem.call(trains=trains)}
            try:
                calls["dense"] = dense = problem.call(trains=trains, attend=problem.dense)
                dense()
            except Exception as error:
                found["dense"] = {"verdict": first_line(error)}
                del calls["dense"]
            for name, time in times_of(calls, setup.seconds).items():
                found[name + (" with gradients" if trains else "")] = time
        return found

    for name in setup.some(triton_list_cases.CASES):
        yield Cell(name, partial(checked, triton_list_cases.CASES[name]))
    for layer in setup.some(CELLS, 2):
        for n in setup.some((8192, 32_768)):
            problem = ListProblem(CELLS[layer], n, torch.bfloat16, trains=layer != "decode")
            if setup.smoke:
                problem = problem.smaller()
            yield Cell(f"{layer}, N {problem.n_keys}", partial(timed, problem), (problem,))


def sanitizer(setup: Setup) -> Iterator[Cell]:
    """Run small cases under compute-sanitizer, for accesses out of bounds and for races in shared memory."""

    def sanitized(check: str, name: str) -> Value:
        if (tool := shutil.which("compute-sanitizer")) is None:
            return {"verdict": "not run: compute-sanitizer is not installed"}
        command = [tool, f"--tool={check}", "--error-exitcode=9", sys.executable, ROOT / "tests/triton_cases.py"]
        # With an allocation per tensor, an access behind a tensor is out of bounds.
        paths = {"PYTHONPATH": str(ROOT / "src"), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        options: Any = {"capture_output": True, "text": True, "timeout": SANITIZER_SECONDS}
        try:
            done = subprocess.run([*command, name], env={**os.environ, **paths}, **options)
        except subprocess.TimeoutExpired:
            return {"verdict": f"not finished in {SANITIZER_SECONDS} s"}
        text = (done.stdout + done.stderr)[-3000:]
        return {"error": f"status {done.returncode}", "text": text} if done.returncode else {"verdict": "clean"}

    for check in ("memcheck", "racecheck"):
        for name in setup.some(SANITIZED):
            yield Cell(f"{check}, {name}", partial(sanitized, check, name))


SECTIONS: dict[str, Callable[[Setup], Iterator[Cell]]] = {
    "gate": gate, "machine": machine, "passes": passes, "ab": ab, "sweep": sweep, "masks": partial(compared, "masks"),
    "flex": partial(compared, "flex"), "tma": tma, "graph": graph, "lengths": partial(compared, "lengths"),
    "million": partial(compared, "million"), "claims": partial(compared, "claims"), "lists": lists,
    "model": model, "sanitizer": sanitizer,
}  # fmt: skip
UNTIMED = {
    "an index with unused room", "a fixed capacity changes no bit", "key mask", "key lengths", "dropout",
    "remapped tiles drop the weights of the whole", "heads and batch elements drop the weights of the whole",
    "small remapped tiles", "scales", "everything at once", "float32 within the budget", "masked keys are not read",
}  # fmt: skip
"""Cases of the gate whose subject no cell times. They are listed, and refuse nothing."""
GROUPED = {
    "grouped heads and another value dim", "three heads share a key head", "one query decodes",
    "the query heads of many columns in one program",
}  # fmt: skip
"""Cases that refuse only cells with grouped heads."""
TIMED = ("ab", "sweep", "masks", "flex", "tma", "graph", "lengths", "million", "claims", "model")
