"""Does the test suite notice when the library is wrong? Seed faults, one at a time, and see the tests fail.

    python scripts/mutants.py                  every mutant; exit status 1 where fewer than 95 % are killed
    python scripts/mutants.py --only window    those with "window" in their name or file
    python scripts/mutants.py --list           check that each still applies, and print them

A mutant is one small change of the source, as a snippet that occurs exactly once and its replacement, with the
tests that should notice. It runs in a copy of the project, so the working tree is never touched.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST_KILLED = 0.95


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PATTERNS = ("tests/test_patterns.py",)
LAYOUT = ("tests/test_layout.py",)
PHILOX = ("tests/test_philox.py",)
REFERENCE = ("tests/test_reference.py",)
KERNELS = ("tests/test_attention.py",)
DERIVATIVES = ("tests/test_operators.py::test_second_derivatives_over_many_tiles",)
COUNTS = ("tests/test_counts.py",)
SELECT = ("tests/test_select.py",)


def triton(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/test_triton.py::test_a_case_is_right_in_the_interpreter[{case}]" for case in cases)


DILATED = ("tests/test_dilated.py",)
BENCH = ("tests/test_bench.py",)
PROFILE = ("tests/test_profile.py",)
NATIVE = ("tests/test_native.py",)

MUTANTS = [
    Mutant(
        "causal sees one key ahead",
        "patterns/local.py",
        "return (Term(1, ANY, 0),)",
        "return (Term(1, ANY, 1),)",
        PATTERNS,
    ),
    Mutant(
        "window swaps its sides",
        "patterns/local.py",
        "return (Term(1, self.left, self.right),)",
        "return (Term(1, self.right, self.left),)",
        PATTERNS,
    ),
    Mutant(
        "strided forgets the multiples ahead",
        "patterns/local.py",
        "Term(self.stride, ANY, ANY))",
        "Term(self.stride, ANY, 0))",
        PATTERNS,
    ),
    Mutant(
        "global tokens cover drops the last, ragged row tile",
        "patterns/local.py",
        "torch.where(rows * grid.block < self.tokens,",
        "torch.where((rows + 1) * grid.block <= self.tokens,",
        PATTERNS,
    ),
    Mutant(
        "offset cover drops the last tile of a row",
        "patterns/offsets.py",
        "hi = ((last + right + 1) * self.unit - 1) // grid.block + 1",
        "hi = ((last + right + 1) * self.unit - 1) // grid.block",
        PATTERNS,
    ),
    Mutant(
        "tiles off the multiples of the rate count as full",
        "patterns/offsets.py",
        "full |= inside & (offset % rate == 0) & ((most == least) | (rate == 1))",
        "full |= inside & ((most == least) | (rate == 1))",
        PATTERNS,
    ),
    Mutant(
        "dilated reach does not grow with the rate",
        "patterns/dilated.py",
        "Term(rate, min(window * rate, ANY), min(window * rate, ANY))",
        "Term(rate, min(window, ANY), min(window, ANY))",
        PATTERNS,
    ),
    Mutant(
        "segments give every head the same tokens",
        "patterns/dilated.py",
        "phase = (self.shift + head) % self.dilation\n        chosen_query",
        "phase = self.shift % self.dilation\n        chosen_query",
        PATTERNS,
    ),
    Mutant(
        "a document's first token belongs to the one before",
        "patterns/documents.py",
        "position.contiguous(), right=True)",
        "position.contiguous(), right=False)",
        PATTERNS,
    ),
    Mutant(
        "and calls a tile full where one side is",
        "patterns/base.py",
        "both[(a == 1) & (b == 1)] = 1",
        "both[(a == 1) | (b == 1)] = 1",
        PATTERNS,
    ),
    Mutant(
        "or spans only what both sides span",
        "patterns/base.py",
        "return torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])",
        "return torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])",
        PATTERNS,
    ),
    Mutant(
        "not keeps empty tiles empty",
        "patterns/base.py",
        "return torch.where(inner <= 1, 1 - inner, inner)",
        "return torch.where(inner == 1, 0, inner)",
        PATTERNS,
    ),
    Mutant(
        "per_head gives later heads the rules of earlier ones",
        "patterns/base.py",
        "kept |= (head == number) & pattern",
        "kept |= (head >= number) & pattern",
        PATTERNS,
    ),
    Mutant(
        "a class number is shared by two rows",
        "patterns/base.py",
        "return 2 + (row - grid.first_row) * grid.n_cols + col",
        "return 2 + (row - grid.first_row) // 2 * grid.n_cols + col",
        PATTERNS,
    ),
    Mutant(
        "the first query sits at position 0",
        "layout/build.py",
        "    if start is None:\n        start = n_keys - n_queries",
        "    if start is None:\n        start = 0",
        LAYOUT,
    ),
    Mutant(
        "the cache forgets where queries start",
        "layout/build.py",
        "key = (pattern, n_queries, n_keys, start, heads,",
        "key = (pattern, n_queries, n_keys, heads,",
        LAYOUT,
    ),
    Mutant(
        "the cache evicts what came last",
        "layout/build.py",
        "popitem(last=False)",
        "popitem(last=True)",
        LAYOUT,
    ),
    Mutant(
        "all heads share the first head's tiles",
        "layout/build.py",
        "seen.setdefault((of_row, of_row.head_class(head)), len(members))",
        "seen.setdefault((of_row, None), len(members))",
        LAYOUT,
    ),
    Mutant(
        "the transposed tile table is not transposed",
        "layout/tiles.py",
        "pack_words(mask.transpose(1, 2))",
        "pack_words(mask)",
        LAYOUT,
    ),
    Mutant(
        "row and column sets are swapped",
        "layout/tiles.py",
        "pack_words((bits != 0).any(-1)), pack_words((transposed != 0).any(-1))",
        "pack_words((transposed != 0).any(-1)), pack_words((bits != 0).any(-1))",
        LAYOUT,
    ),
    Mutant(
        "a quarter tile is full too early",
        "layout/tiles.py",
        "(quarters == half * half)",
        "(quarters >= half)",
        LAYOUT,
    ),
    Mutant(
        "the transpose lists rows in the order of the rows",
        "layout/index.py",
        'lists[f"{name}_row"] = row[order]',
        'lists[f"{name}_row"] = row',
        LAYOUT,
    ),
    Mutant(
        "to_dense ignores a ragged first row tile",
        "layout/index.py",
        "skipped = self.start - self.first_row * block",
        "skipped = 0",
        LAYOUT,
    ),
    Mutant(
        "the pieces of a long row leave out a tile",
        "layout/lists.py",
        "first, last = length * piece // pieces, length * (piece + 1) // pieces",
        "first, last = length * piece // pieces, length * (piece + 1) // pieces - 1",
        LAYOUT,
    ),
    Mutant(
        "coarsen transposes small tiles",
        "layout/index.py",
        "cell = row % factor * factor + col % factor",
        "cell = col % factor * factor + row % factor",
        LAYOUT,
    ),
    Mutant(
        "causal pairs are counted without the diagonal",
        "layout/allowed.py",
        "(query + 1).clamp(0, n_keys)",
        "query.clamp(0, n_keys)",
        LAYOUT,
    ),
    Mutant(
        "dropout draws with six rounds",
        "kernels/philox.py",
        "_ROUNDS = 7",
        "_ROUNDS = 6",
        PHILOX,
    ),
    Mutant(
        "dropout keeps one value too many",
        "kernels/philox.py",
        "& 0xFFFF >= dropout_threshold(p)",
        "& 0xFFFF >= dropout_threshold(p) - 1",
        PHILOX,
    ),
    Mutant(
        "dropout tiles look at one half of the words",
        "kernels/philox.py",
        "odd = (first_key // 16 % 2 == 1)",
        "odd = (first_key // 32 % 2 == 1)",
        PHILOX,
    ),
    Mutant(
        "reference adds ALiBi instead of taking it off",
        "kernels/reference.py",
        "scores = scores - self.alibi_slopes",
        "scores = scores + self.alibi_slopes",
        REFERENCE,
    ),
    Mutant(
        "reference gives each query head the key head after its own",
        "kernels/reference.py",
        "k.repeat_interleave(problem.heads_per_key_head, 1)",
        "k.repeat_interleave(problem.heads_per_key_head, 1).roll(1, 1)",
        REFERENCE,
    ),
    Mutant(
        "scores are not scaled",
        "kernels/blockwise/scores.py",
        "scores = matmul(q, k.mT) * options.scale",
        "scores = matmul(q, k.mT)",
        KERNELS,
    ),
    Mutant(
        "a softmax per part instead of one per row",
        "kernels/blockwise/forward.py",
        "total = torch.logaddexp(lse, more_lse)",
        "total = torch.maximum(lse, more_lse)",
        KERNELS,
    ),
    Mutant(
        "a row tile's last part is forgotten backward",
        "kernels/blockwise/backward.py",
        "total = found[0] if total is None else total + found[0]",
        "total = found[0] if total is None else total",
        KERNELS,
    ),
    Mutant(
        "the gradient of lse has the wrong sign in torch operations",
        "kernels/blockwise/backward.py",
        "delta = delta - lse_grad",
        "delta = delta + lse_grad",
        KERNELS,
    ),
    Mutant(
        "the gradient of lse has the wrong sign in torch's kernel",
        "kernels/cpu_flash.py",
        "torch.cat([out, -lse_grad",
        "torch.cat([out, lse_grad",
        KERNELS,
    ),
    Mutant(
        "keys that no row keeps are loaded where a key mask is given",
        "kernels/blockwise/chunks.py",
        "dead = masked if dead is None else dead | masked",
        "dead = masked",
        KERNELS,
    ),
    Mutant(
        "every part reads the keys of the first",
        "kernels/blockwise/chunks.py",
        "at = (first + (0 if launch.tall else begin * step) + part.begin) * block",
        "at = (first + (0 if launch.tall else begin * step)) * block",
        KERNELS,
    ),
    Mutant(
        "query heads read the key head before their own",
        "kernels/blockwise/chunks.py",
        "kv_first = first // ratio",
        "kv_first = max(first // ratio - 1, 0)",
        KERNELS,
    ),
    Mutant(
        "all rows add to the columns of the first",
        "kernels/blockwise/chunks.py",
        "cols = first + rows.unsqueeze(1) * step",
        "cols = first + rows.unsqueeze(1) * 0",
        KERNELS,
    ),
    Mutant(
        "rows that a key mask empties keep their NaN",
        "kernels/blockwise/backward.py",
        "if work.plan.empty_rows or work.options.key_keep is not None:",
        "if work.plan.empty_rows:",
        KERNELS,
    ),
    Mutant(
        "the padding behind the last key is attended to",
        "kernels/blockwise/plan.py",
        "inside = torch.arange(index.block) < tail",
        "inside = torch.arange(index.block) <= tail",
        KERNELS,
    ),
    Mutant(
        "ALiBi favours later keys",
        "kernels/blockwise/chunks.py",
        "(query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)",
        "(query.unsqueeze(-1) - key.unsqueeze(-2)).unsqueeze(1)",
        KERNELS,
    ),
    Mutant(
        "the dropout of later heads repeats that of the first ones",
        "kernels/blockwise/chunks.py",
        "heads = torch.tensor(self.heads, device=self.device)",
        "heads = torch.arange(len(self.heads), device=self.device)",
        KERNELS,
    ),
    Mutant(
        "a second derivative lacks a term",
        "kernels/blockwise/double_backward.py",
        "self.cot * beyond + self.value_cot - cot_sum",
        "self.cot * beyond - cot_sum",
        DERIVATIVES,
    ),
    Mutant(
        "row tiles are computed one at a time",
        "kernels/blockwise/chunks.py",
        "            budget = rows\n",
        "            budget = 1\n",
        COUNTS,
    ),
    Mutant(
        "torch's causal kernel serves queries that start later",
        "kernels/dense.py",
        "(call.start != 0 or q.shape[2] != k.shape[2])",
        "q.shape[2] != k.shape[2]",
        SELECT,
    ),
    Mutant(
        "one key beyond a batch row's length is seen",
        "kernels/contracts.py",
        "device=call.key_lengths.device) < call.key_lengths.unsqueeze(1)",
        "device=call.key_lengths.device) <= call.key_lengths.unsqueeze(1)",
        KERNELS,
    ),
    Mutant(
        "sinks grow with what they should shrink",
        "functional/attention.py",
        "torch.sigmoid(lse.masked_fill(empty, 0) - sinks.unsqueeze(-1))",
        "torch.sigmoid(sinks.unsqueeze(-1) - lse.masked_fill(empty, 0))",
        KERNELS,
    ),
    Mutant(
        "merging two parts ignores the larger lse",
        "functional/merge.py",
        "weights = (stacked - highest).exp()",
        "weights = (stacked - stacked).exp()",
        KERNELS,
    ),
    Mutant(
        "dilated heads of every offset keep the tokens of the first",
        "layout/permute.py",
        "first = begin + offset\n",
        "first = begin\n",
        DILATED,
    ),
    Mutant(
        "queries that begin inside a segment count from its begin",
        "layout/permute.py",
        "                skipped,\n            )",
        "                0,\n            )",
        DILATED,
    ),
    Mutant(
        "the ragged last segment is as long as the first offset's",
        "layout/permute.py",
        "or counts[end] != counts[begin]:",
        "or counts[end][0] != counts[begin][0]:",
        DILATED,
    ),
    Mutant(
        "a shared key head gets the gradient of one query head",
        "layout/permute.py",
        "place.index_add_(1,",
        "place.index_copy_(1,",
        DILATED,
    ),
    Mutant(
        "places inside a segment forget the head's offset",
        "layout/compacted.py",
        "key * self.dilation + offset)",
        "key * self.dilation)",
        DILATED,
    ),
    Mutant(
        "a call with some heads has the tiles of the first ones",
        "layout/compacted.py",
        "return self.pattern.tile_class(self.heads[head], row, col, grid)",
        "return self.pattern.tile_class(head, row, col, grid)",
        DILATED,
    ),
    Mutant(
        "branches are merged without their denominators",
        "functional/dilated.py",
        "(more_lse - safe).exp_()",
        "(more_lse - more_lse).exp_()",
        DILATED,
    ),
    Mutant(
        "the branches of the union keep what the last shorter one leaves",
        "functional/dilated.py",
        "fresh = ~reduce(or_, taken)",
        "fresh = ~taken[0]",
        DILATED,
    ),
    Mutant(
        "the gradient of the merged lse is lost",
        "functional/dilated.py",
        "for x in (out_grad, lse_grad, out, lse)]",
        "for x in (out_grad, None, out, lse)]",
        DILATED,
    ),
    Mutant(
        "the mixing weights of branches have no second derivative",
        "functional/dilated.py",
        "results = _composed(*inputs, options)",
        "results = _composed(inputs[0].detach(), *inputs[1:], options)",
        DILATED,
    ),
    Mutant(
        "all branches draw the same dropout",
        "functional/dilated.py",
        "_signed(number * _NEXT_SEED)",
        "_signed(0 * _NEXT_SEED)",
        DILATED,
    ),
    Mutant(
        "every offset has the key mask of the first",
        "functional/dilated.py",
        "kept_rows(mask.unsqueeze(1), piece, piece.offsets.start, keys=True)",
        "kept_rows(mask.unsqueeze(1), piece, 0, keys=True)",
        DILATED,
    ),
    Mutant(
        "the limit forgets the exponentials",
        "measure/roofline.py",
        "computing = self.operations / rates[self.products] + self.exponentials / rates[self.softmax]",
        "computing = self.operations / rates[self.products]",
        BENCH,
    ),
    Mutant(
        "the limit takes five products where rows and columns are apart",
        "measure/roofline.py",
        "products = backward_products(case.batch * case.key_heads, threads)",
        "products = 5",
        BENCH,
    ),
    Mutant(
        "a row of zeros passes where its keys are kept",
        "measure/bench.py",
        "if (zero[:, :, rows] & self.kept(self.case.pattern, rows).any(-1)).any():",
        "if (zero[:, :, rows] & ~self.kept(self.case.pattern, rows).any(-1)).all():",
        BENCH,
    ),
    Mutant(
        "a resumed run keeps cases that are not whole",
        "measure/bench.py",
        "return [row for row in mine if row is not None] if None not in mine else []",
        "return [row for row in mine if row is not None]",
        BENCH,
    ),
    Mutant(
        "the parts of a long column are those of its first head alone",
        "kernels/native/__init__.py",
        "entries.append((item * slots + slot, item * ratio + head, *span))",
        "entries.append((item * slots + slot, item * ratio, *span))",
        NATIVE,
    ),
    Mutant(
        "packing is counted as kernel too",
        "measure/profile.py",
        'phases[f"kernel {direction}"] *= 1 - share',
        'phases[f"kernel {direction}"] *= 1',
        PROFILE,
    ),
    Mutant(
        "triton: the running sum is rescaled in another base",
        "kernels/triton/forward_kernels.py",
        "s, 1))\n        p = tl.exp2(s * c - (new_top * c)[:, None])\n        alpha = tl.exp2((top - new_top) * c)",
        "s, 1))\n        p = tl.exp2(s * c - (new_top * c)[:, None])\n        alpha = tl.exp2(top - new_top)",
        triton("dense and ragged"),
    ),
    Mutant(
        "triton: pairs outside the pattern count as zero scores",
        "kernels/triton/forward_kernels.py",
        's = tl.where(stay, s, float("-inf"))',
        "s = tl.where(stay, s, 0.0)",
        triton("causal over sub tiles"),
    ),
    Mutant(
        "triton: the last piece of a row is not merged",
        "kernels/triton/forward_kernels.py",
        "range(count)",
        "range(count - 1)",
        triton("long rows and columns in pieces"),
    ),
    Mutant(
        "triton: kept weights are not scaled by dropout",
        "kernels/triton/forward_kernels.py",
        "acc = acc * dropout_scale",
        "acc = acc * 1.0",
        triton("dropout"),
    ),
    Mutant(
        "triton: rows that a key mask emptied are read",
        "kernels/triton/backward_kernels.py",
        'there = there & (lse != float("inf"))',
        "there = there & (lse == lse)",
        triton("masked keys are not read"),
    ),
    Mutant(
        "triton: the gradient of lse has the wrong sign",
        "kernels/triton/backward_kernels.py",
        "delta -= tl.load(LSE_GRAD",
        "delta += tl.load(LSE_GRAD",
        triton("causal over sub tiles"),
    ),
    Mutant(
        "triton: only the first piece of a column counts",
        "kernels/triton/backward_kernels.py",
        "range(tl.where(count == 0, (parts > 1).to(tl.int32), count))",
        "range(tl.where(count == 0, (parts > 1).to(tl.int32), 1))",
        triton("long rows and columns in pieces"),
    ),
    Mutant(
        "triton: random words are swapped",
        "kernels/triton/tiles.py",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        triton("dropout"),
    ),
    Mutant(
        "triton: offsets within a tile have 32 bits",
        "kernels/triton/launches.py",
        "(self.q, self.k, self.v)) >= 1 << 24",
        "(self.q, self.k, self.v)) >= 1 << 60",
        triton("offsets beyond 32 bits"),
    ),
    Mutant(
        "triton: heads share scratch slots",
        "kernels/triton/launches.py",
        "(order.n_scratch, 0) if own else (order.n_scratch * owners, order.n_scratch)",
        "(order.n_scratch * owners, 0)",
        triton("long rows and columns in pieces"),
    ),
    Mutant(
        "triton: unused pieces belong to the first group",
        "kernels/triton/schedule.py",
        "torch.where(unused, n_groups, slot",
        "torch.where(unused, 0, slot",
        triton("an index with unused room"),
    ),
]


def complaints() -> list[str]:
    """Why a mutant does not apply, one line for each that does not."""
    found = []
    for mutant in MUTANTS:
        times = (ROOT / "src/ringtile" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if times != 1:
            found.append(f"{mutant.name}: its snippet occurs {times} times in {mutant.file}, expected once")
        if mutant.old == mutant.new:
            found.append(f"{mutant.name}: changes nothing")
        found += [f"{mutant.name}: no {test}" for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()]
    names = [mutant.name for mutant in MUTANTS]
    return found + [f"{name}: named twice" for name in sorted(set(names)) if names.count(name) > 1]


def failure_of(project: Path, tests: tuple[str, ...], timeout: float | None) -> str | None:
    """What pytest says of some tests against the sources in a copy of the project, None where they pass."""
    settings = {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1", "RINGTILE_HYPOTHESIS": "unshrunk"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=project, env={**os.environ, **settings}, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"no end after {timeout:.0f} s"
    # 1: tests failed; 2: they could not be collected, as where the mutant does not import; negative: a crash.
    if done.returncode > 2:
        raise SystemExit(f"pytest stopped with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout if done.returncode else None


def baseline(project: Path, tests: tuple[str, ...]) -> float:
    """The seconds that some tests take on the unchanged sources, which they must pass."""
    start = time.perf_counter()
    failure = failure_of(project, tests, timeout=None)
    if failure is not None:
        raise SystemExit(f"{failure}\nthe unchanged sources fail {' '.join(tests)}: no mutant can be judged")
    return time.perf_counter() - start


def is_killed(project: Path, mutant: Mutant, timeout: float) -> bool:
    source = project / "src/ringtile" / mutant.file
    original = source.read_text(encoding="utf-8")
    source.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return failure_of(project, mutant.tests, timeout) is not None
    finally:
        source.write_text(original, encoding="utf-8")


@contextmanager
def copies_of_the_project(count: int) -> Iterator[queue.Queue[Path]]:
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            project = Path(folder, str(number))
            for part in ("src", "tests", "scripts", "docs"):
                shutil.copytree(ROOT / part, project / part, ignore=shutil.ignore_patterns("__pycache__"))
            for page in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "CITATION.cff", ROOT / "Makefile"):
                shutil.copy(page, project)
            copies.put(project)
        yield copies


def judge(mutants: list[Mutant], processes: int) -> dict[str, bool]:
    """Whether each mutant is killed."""
    with copies_of_the_project(processes) as copies, ThreadPoolExecutor(processes) as pool:

        @contextmanager
        def a_copy() -> Iterator[Path]:
            project = copies.get()
            try:
                yield project
            finally:
                copies.put(project)

        def seconds_of(tests: tuple[str, ...]) -> float:
            with a_copy() as project:
                return baseline(project, tests)

        def verdict(mutant: Mutant) -> bool:
            start = time.perf_counter()
            with a_copy() as project:
                killed = is_killed(project, mutant, timeout=60 + 4 * seconds[mutant.tests])
            seconds_taken = time.perf_counter() - start
            print(f"{'killed  ' if killed else 'SURVIVED'} {seconds_taken:5.0f} s  {mutant.name}", flush=True)
            return killed

        selections = sorted({mutant.tests for mutant in mutants})
        seconds = dict(zip(selections, pool.map(seconds_of, selections), strict=True))
        return dict(zip([mutant.name for mutant in mutants], pool.map(verdict, mutants), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Seed faults and see the tests fail.", allow_abbrev=False)
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants with TEXT in their name or file")
    parser.add_argument("--list", action="store_true", help="check that each mutant applies, print them, run none")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time (default 2)")
    args = parser.parse_args()
    if broken := complaints():
        print("\n".join(broken), file=sys.stderr)
        return 2
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name or args.only in mutant.file]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.file:28} {mutant.name}")
        return 0
    if not mutants:
        print(f"no mutant has {args.only!r} in its name or file", file=sys.stderr)
        return 2
    killed = judge(mutants, args.processes)
    survivors = [name for name, dead in killed.items() if not dead]
    rate = 1 - len(survivors) / len(killed)
    print(f"\n{len(killed) - len(survivors)} of {len(killed)} mutants killed ({rate:.0%})")
    for name in survivors:
        print(f"survived: {name}")
    return 0 if rate >= LEAST_KILLED else 1


if __name__ == "__main__":
    raise SystemExit(main())
