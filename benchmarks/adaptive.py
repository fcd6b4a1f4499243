"""Time the choice of tiles beside the attention over them, and both beside dense attention.

    python benchmarks/adaptive.py                                  16K, 32K and 64K tokens, with one and two threads
    python benchmarks/adaptive.py --tokens 16K --threads 2
    python benchmarks/adaptive.py --out benchmarks/records/adaptive.json

8 heads of 64, causal, tiles of 16, the default scores, a density of .10, random tensors. Rows of the output are first
compared with float64 over the chosen pairs, and a wrong result ends the run. Then calls take turns in one process;
times are medians of wall time. Dense attention is PyTorch's own. It is timed up to ``--dense-tokens``, and scaled by
the square of the lengths beyond. The audit of 64 rows, which you call yourself, is extra.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pages import Table, table_lines

from ringtile import build_index, sparse_attention
from ringtile.adaptive import Density, audit, select
from ringtile.patterns import Causal
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin
from ringtile.tools.memory import peak_memory
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved, seconds_of
from ringtile.tools.units import count

HEADS, HEAD_DIM, BLOCK, DENSITY = 8, 64, 16, 0.1
BOUND = 1e-5


def measure(n_tokens: int, threads: int, rounds: int, dense: bool) -> dict[str, Any]:
    """Return the medians of a length, in milliseconds, and the peak memory of the choice.

    Raises RuntimeError if the attention over the chosen tiles is wrong.
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n_tokens, HEAD_DIM, generator=generator) for _ in range(3))
    base = build_index(Causal(), n_tokens, num_heads=HEADS, block=BLOCK)
    choose = partial(select, q, k, budget=Density(DENSITY), is_causal=True, block=BLOCK)
    index = choose()
    rows = torch.arange(7, n_tokens, n_tokens // 16)
    kept = index.keys_of(rows)
    scores = (q[:, :, rows].double() @ k.double().mT * HEAD_DIM**-0.5).masked_fill(~kept, -torch.inf)
    error = relative_error(sparse_attention(q, k, v, index)[:, :, rows], scores.softmax(3) @ v.double())
    if not error <= BOUND:
        raise RuntimeError(f"{n_tokens} tokens: relative error {error:.1e}")
    del scores, kept
    tiles = index.tiles
    calls: dict[str, Callable[[], object]] = {
        "attention": partial(sparse_attention, q, k, v, index),
        "select": choose,
        "index": partial(base.restricted, tiles, int(tiles.sum())),
        "audit": partial(audit, q, k, v, index),
    }
    if dense:
        calls["dense"] = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    times = interleaved({name: partial(seconds_of, call) for name, call in calls.items()}, rounds, warm_up=True)
    peak = peak_memory(lambda: choose().rows.full, None, q.device).forward
    return {
        "tokens": n_tokens,
        "threads": threads,
        "tile_density": index.tile_density,
        "error": error,
        "select_bytes": peak,
        **{f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()},
    }


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table. Ratios to dense beyond its longest length are estimates, in italics."""
    found = []
    for row in rows:
        same = [each for each in rows if each["threads"] == row["threads"] and "dense_ms" in each]
        attention = row["attention_ms"]
        ratio = ""
        if same:
            longest = max(same, key=lambda each: each["tokens"])
            dense = row.get("dense_ms", longest["dense_ms"] * (row["tokens"] / longest["tokens"]) ** 2)
            ratio = f"{dense / (attention + row['select_ms']):.1f}x"
            ratio = ratio if "dense_ms" in row else f"*{ratio}*"
        shares = [f"{row[f'{name}_ms'] / attention:.1%}" for name in ("select", "index", "audit")]
        sizes = [f"{row['tokens']:,}", row["threads"], f"{attention:,.0f} ms"]
        found.append([*sizes, *shares, ratio, f"{row['select_bytes'] / 2**20:.0f} MiB"])
    heads = ["tokens", "threads", "attention", "choice", "index", "audit", "both against dense", "memory"]
    return table_lines(Table(heads, found))


def main() -> None:
    """Print the table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", nargs="+", type=count, default=[16384, 32768, 65536], metavar="N")
    add("--threads", nargs="+", type=int, default=[1, 2], metavar="T")
    add("--rounds", type=int, default=5)
    add("--dense-tokens", type=count, default=16384, metavar="N", help="longest length at which dense is timed")
    add("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    progress, rows = Progress(), []
    for threads in args.threads:
        for n_tokens in args.tokens:
            progress.show(f"{n_tokens:,} tokens, threads: {threads}")
            rows.append(measure(n_tokens, threads, args.rounds, n_tokens <= args.dense_tokens))
    progress.clear()
    print("\n".join(lines_of(rows)))
    if args.out is not None:
        record = {**origin("python benchmarks/adaptive.py"), "rows": rows}
        write_whole(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
