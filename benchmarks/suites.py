"""Measure the cases of a record behind docs/benchmarks.md:

    python benchmarks/suites.py --suite density --json benchmarks/records/bench-density.json

The full product of lengths, densities, head dims, dtypes and baselines would take days. A suite is a set of slices: it
varies one of them and keeps the others.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ringtile.patterns import Blocks, Causal, Pattern
from ringtile.tools import bench
from ringtile.tools.bench import PATTERNS, TOKENS
from ringtile.tools.bench.peers import MASK_PAIRS, Attention, Case, Peer, Task, all_peers
from ringtile.tools.record import BOTH, DENSE, DIRECTIONS, FORWARD, OURS

PEERS = (DENSE, "sdpa-mask", "flex", "torch.sparse")
"""All baselines."""

CLAIMED = {0.5: 2.0, 0.25: 4.0, 0.1: 10.0, 0.05: 20.0, 0.02: 50.0}
"""The speedups that the block-sparse guide claims, by tile density."""
CLAIMED_TOKENS, CLAIMED_HEADS = 16384, 4
"""The length and heads of README, docs/benchmarks.md and docs/promises.md for these claims."""

SHORT = "causal & window(256)"
SHORT_TOKENS = (26, 64, 128, 256, 512, 1024, 2048)
"""The pattern and lengths that tell from which length README says that sparse attention is faster."""

CURVE = "causal & (window(1024) | global_tokens(64))"
CURVE_TOKENS = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
"""The pattern and lengths of the table of time and memory against the length."""

SLICES = ("dense", *(f"window(1) at {density:g}" for density in (0.5, 0.25, 0.1, 0.05, 0.02)))
BAND = "causal & window(255, 0)"
HEAD_DIMS = (64, 80, 96, 128)
LENGTHS = (26, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

HALF = "dilated([2], 4096)"
"""Every other key: each tile is a bitmask of which half is kept."""
LONG = "window(512) | global_tokens(64)"
LONG_RANDOM = "random_blocks(1) at 0.01"
"""About as many tiles per row as `LONG`, without its long rows and columns."""
RANDOM = tuple(f"random_blocks(1) at {density:g}" for density in (0.1, 0.05, 0.02))
WINDOWS = ("window(768)", "window(384)", "window(128)")
"""About 10, 5 and 2% of the tiles at 16,384 tokens."""
SPARSE = (("window(1) at 0.1", 128), ("window(1) at 0.05", 128), ("window(1) at 0.02", 64))
"""90, 95 and 98% sparse in pairs at 4,096 tokens, with the block."""

TILES = "random tiles at "


def random_tiles(n_tiles: int, density: float, seed: int = 0) -> Tensor:
    """Draw a causal tile matrix, bool ``[n_tiles, n_tiles]``: the diagonal and random tiles below it."""
    kept = torch.eye(n_tiles, dtype=torch.bool)
    below = torch.tril_indices(n_tiles, n_tiles, -1)
    wanted = max(0, round(density * n_tiles * (n_tiles + 1) / 2) - n_tiles)
    chosen = torch.randperm(below.shape[1], generator=torch.Generator().manual_seed(seed))[:wanted]
    kept[below[0, chosen], below[1, chosen]] = True
    return kept


def claimed_pattern(density: float, n_tokens: int, *, seed: int = 0, block: int = 128) -> Pattern:
    """Return random causal tiles of a tile density, as `CLAIMED` speaks of them."""
    return Causal() & Blocks(random_tiles(-(-n_tokens // block), density, seed), block=block)


def case_of(text: str, n_tokens: int, *, heads: int, **sizes: Any) -> Case:
    """Build a case from a pattern's text, or from ``random tiles at P``, which is `claimed_pattern`."""
    if not text.startswith(TILES):
        return bench.case_of(text, n_tokens, heads=heads, **sizes)
    return Case(text, claimed_pattern(float(text.removeprefix(TILES)), n_tokens), n_tokens, heads=heads, **sizes)


def _cells(
    texts: str | Sequence[str],
    tokens: int | Sequence[int],
    peers: tuple[str, ...] = (DENSE,),
    directions: tuple[str, ...] = DIRECTIONS,
    **sizes: Any,
) -> Callable[[Mapping[str, Peer]], Iterator[Task]]:
    """Return a builder of cells: lengths within patterns within sizes, of which each can have several values."""

    def tasks(known: Mapping[str, Peer]) -> Iterator[Task]:
        choices = [each if isinstance(each, (list, tuple)) else (each,) for each in (*sizes.values(), texts, tokens)]
        for *values, text, n_tokens in product(*choices):
            case = case_of(text, n_tokens, **dict(zip(sizes, values, strict=True)))
            yield Task(case, tuple(known[name] for name in (OURS, *peers)), directions)

    return tasks


_ONE, _BOTH = (FORWARD,), (BOTH,)
_HALVES = torch.bfloat16

_SUITES = {
    "default": [_cells(PATTERNS, TOKENS, PEERS, heads=4)],
    "density": [_cells([f"{TILES}{density:g}" for density in CLAIMED], CLAIMED_TOKENS, heads=CLAIMED_HEADS)],
    "long": [_cells(CURVE, CURVE_TOKENS, directions=_BOTH, heads=1)],
    "short": [_cells(SHORT, SHORT_TOKENS, heads=4)],
    "acceptance": [
        # With nothing to skip, the rate is that of the kernel itself.
        _cells("dense", 4096, (DENSE, "flex"), heads=8, dtype=(torch.float32, _HALVES)),
        _cells("dense", 4096, heads=8, head_dim=HEAD_DIMS[1:]),
        _cells("dense", 4096, directions=_ONE, heads=8, head_dim=128, dtype=_HALVES),
        _cells(HALF, 4096, directions=_ONE, heads=8),
        _cells("dense", 4097, directions=_ONE, heads=8),
        _cells("dense", 4096, directions=_ONE, heads=8, kv_heads=2),
        # Time follows the tiles, whether they lie apart or side by side.
        _cells((RANDOM[0], WINDOWS[0]), 16384, (DENSE, "flex"), heads=2),
        _cells((RANDOM[0], WINDOWS[0]), 16384, ("flex",), _ONE, heads=2, dtype=_HALVES),
        _cells((RANDOM[1], WINDOWS[1]), 16384, heads=2),
        _cells((RANDOM[2], WINDOWS[2]), 16384, directions=_ONE, heads=2),
        *(_cells(text, 4096, directions=_ONE, heads=8, block=block) for text, block in SPARSE),
        # Long rows and columns are split between threads, and memory must not grow with them.
        _cells(LONG, 131072, (), heads=2, threads=(None, 1)),
        _cells(LONG_RANDOM, 131072, (), heads=2),
        _cells(LONG, (131072, 262144), (), _ONE, heads=8),
        # In small problems, and with one query at a time, a call costs more than its work.
        _cells("dense", (26, 128), heads=4),
        _cells("dense", (4096, 32768), (DENSE, "sdpa-mask"), _ONE, heads=8, n_queries=1),
        _cells(CURVE, 32768, (DENSE, "sdpa-mask"), _ONE, heads=8, n_queries=1),
    ],
    "grid": [
        # torch.sparse can keep this many pairs at the shorter length only.
        _cells(SLICES, 4096, PEERS, heads=2),
        _cells(SLICES, 1024, PEERS, heads=1),
        _cells(BAND, [n_tokens for n_tokens in LENGTHS if n_tokens <= 32768], PEERS, heads=1),
        _cells(BAND, [n_tokens for n_tokens in LENGTHS if n_tokens > 32768], PEERS, _ONE, heads=1),
        _cells("window(1) at 0.1", 4096, PEERS, heads=2, head_dim=HEAD_DIMS[1:]),
        _cells("window(1) at 0.1", 4096, PEERS, heads=2, dtype=_HALVES, head_dim=HEAD_DIMS),
    ],
    # Every kind of cell in seconds shows that the suites run.
    "smoke": [
        _cells("window(1) at 0.5", 256, PEERS, heads=2),
        _cells(HALF, 200, directions=_BOTH, heads=4, kv_heads=2, head_dim=80, dtype=_HALVES),
        _cells("random tiles at 0.5", 500, (), heads=1, threads=1),
        _cells("window(20) | global_tokens(4)", 500, (), heads=1, threads=1, block=64),
        _cells("causal & window(30)", 300, (DENSE, "sdpa-mask"), _ONE, heads=4, kv_heads=2, n_queries=1),
    ],
}
SUITES = tuple(_SUITES)


SPARSE_PAIRS = 1 << 20
"""The most pairs for `torch.sparse`, which takes about 3 microseconds per kept pair, forward and backward."""


class TorchSparse(Peer):
    """`torch.sparse` in CSR form, one head at a time: sampled matmul, softmax over the entries of a row, matmul."""

    name = "torch.sparse"

    def unsupported(self, case: Case) -> list[str]:
        reasons = []
        kept = case.index.kept_pairs * (case.batch * case.heads // case.index.group.numel())
        if kept > SPARSE_PAIRS:
            reasons.append(f"keeps {kept:,} pairs over all heads, timed up to {SPARSE_PAIRS:,}")
        if case.index.n_groups * case.queries * case.n_tokens > MASK_PAIRS:
            reasons.append(f"reads its entries from a dense mask of up to {MASK_PAIRS:,} pairs")
        if case.dtype not in (torch.float32, torch.float64):
            reasons.append(f"its sampled matmul supports float32 and float64, got {case.dtype}")
        return reasons

    def prepare(self, case: Case) -> Attention:
        kept = case.index.to_dense().expand(case.batch, case.heads, -1, -1).flatten(0, 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            entries = [mask.to(case.dtype).to_sparse_csr() for mask in kept]
        rows = [mask.nonzero()[:, 0] for mask in kept]
        groups = case.heads // case.key_heads

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
            heads = zip(entries, rows, *(x.flatten(0, 1) for x in (q, k, v)), strict=True)
            with torch.sparse.check_sparse_tensor_invariants(False):
                return torch.stack([_csr_attention(*head) for head in heads]).view_as(q)

        return run


def _csr_attention(csr: Tensor, row: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sampled = torch.sparse.sampled_addmm(csr, q, k.mT, beta=0.0, alpha=q.shape[-1] ** -0.5)
    scores = sampled.values()
    # A softmax of each row's entries: they are a flat list, so rows are reduced by their numbers.
    highest = scores.new_full((len(q),), -torch.inf).scatter_reduce(0, row, scores.detach(), "amax")
    weights = (scores - highest[row]).exp()
    total = weights.new_zeros(len(q)).index_add(0, row, weights)
    share = torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), weights / total[row], csr.shape)
    return share @ v


def suite(name: str, backend: str | None = None) -> list[Task]:
    """Return the tasks of one of `SUITES`, in the order in which they are measured."""
    peers = {peer.name: peer for peer in (*all_peers(backend), TorchSparse())}
    return [task for cells in _SUITES[name] for task in cells(peers)]


def main(argv: Sequence[str]) -> int:
    """Measure a suite as `ringtile bench` measures its patterns, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True, choices=SUITES, help="the cases")
    bench.add_record_arguments(parser)
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "benchmarks/suites.py", *argv])
    try:
        return bench.measure_tasks(suite(args.suite, args.backend), args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
