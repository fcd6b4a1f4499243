"""Time attention over lists of keys, as models that were trained sparse choose them, beside PyTorch's dense attention.

    python benchmarks/lists.py                                    4K tokens, float32, one thread
    python benchmarks/lists.py --tokens 8K --threads 2 --cells latent m3 --dtype bfloat16
    python benchmarks/lists.py --tokens 32K --queries 2K --threads 2 --rounds 2 --cells dsa latent "m3 half"
    python benchmarks/lists.py --out benchmarks/records/lists.json

* dsa: DeepSeek-V3.2 as transformers computes it, 16 heads of 192 and 128, one list of 2,048 keys for all heads.
* dsa indexer: the same with the indexer, whose seconds count. It has 8 heads of 128: DeepSeek-V3.2 has 64 beside 128
  attention heads.
* dsa indexer, 8 bits: the same with ``rounded=True``.
* latent: dsa, absorbed: 16 heads over one key head of 576 dims, whose first 512 are the values.
* m3, m3 half: MiniMax-M3, 64 heads over 4 key heads of 128, each with 16 or 8 blocks of 128 keys.
* decode: one token over 32 times as many latents, 2,048 of them in its list.

Lists are random, or coherent: those of 64 neighbours differ in a tenth of the scores, or of the indexer's vectors, that
they come from. Calls are public
ones, which sort and check their lists. The last queries are first compared with float64, and a wrong result ends the
run. Then calls take turns in one process. Ratios are medians of the ratios of rounds. Dense attention is causal, by
PyTorch's flash kernel, which needs values as wide as the keys.

--queries measures a part of long problems: half of these queries around a quarter of the tokens, and half around three
quarters, each with the keys before them. They stand for all: a query sees as many keys on average. Dense attention gets
as many keys as its queries see on average, and no mask, so it computes as many pairs as a causal call. The gradients of
all keys are cleared for each part, which counts more beside fewer queries, most of all for lists.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pages import Table, table_lines
from torch import Tensor

from ringtile import sparse_attention
from ringtile.adaptive import index_topk
from ringtile.kernels.contracts import in_bytes
from ringtile.patterns import Causal, Chosen
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved
from ringtile.tools.units import count

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CHECKED, NEIGHBOURS = 4, 64


class Cell(NamedTuple):
    """The shapes of a layer. No ``value_dim``: the values are the first 512 dims of the keys."""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    groups: int
    block: int
    length: int
    index_heads: int = 0
    """The heads of an indexer, of 128 dims. 0 for lists that are there."""
    rounded: bool = False


CELLS = {
    "dsa": Cell(16, 16, 192, 128, 1, 1, 2048),
    "dsa indexer": Cell(16, 16, 192, 128, 1, 1, 2048, 8),
    "dsa indexer, 8 bits": Cell(16, 16, 192, 128, 1, 1, 2048, 8, True),
    "latent": Cell(16, 1, 576, 0, 1, 1, 2048),
    "m3": Cell(64, 4, 128, 128, 4, 128, 16),
    "m3 half": Cell(64, 4, 128, 128, 4, 128, 8),
    "decode": Cell(16, 1, 576, 0, 1, 1, 2048),
}


def draw_lists(cell: Cell, n_queries: int, n_keys: int, coherent: bool) -> Tensor:
    """Return lists of the best entries by random scores, the own block always among them."""
    drawn, blocks = torch.Generator().manual_seed(0), -(-n_keys // cell.block)
    lists = torch.empty(1, cell.groups, n_queries, min(cell.length, blocks), dtype=torch.int32)
    for first in range(0, n_queries, NEIGHBOURS):
        rows = torch.arange(first, min(first + NEIGHBOURS, n_queries))
        scores = torch.rand(cell.groups, len(rows), blocks, generator=drawn)
        if coherent:
            scores = torch.rand(cell.groups, 1, blocks, generator=drawn) + 0.1 * scores
        own = (rows + n_keys - n_queries) // cell.block
        scores.scatter_(2, own.expand(cell.groups, -1).unsqueeze(2), 2.0)
        scores.masked_fill_(torch.arange(blocks) > own[:, None], -math.inf)
        best = scores.topk(lists.shape[3], 2)
        lists[0, :, rows] = best.indices.where(best.values > -math.inf, -1).int()
    return lists


def chooser(cell: Cell, n_queries: int, n_keys: int, coherent: bool, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what makes the lists of a call: an indexer, or nothing but their memory."""
    if not cell.index_heads:
        lists = draw_lists(cell, n_queries, n_keys, coherent)
        return lambda: lists
    drawn, shape = torch.Generator().manual_seed(2), (1, cell.index_heads, n_queries)
    query, key = (torch.randn(*size, 128, generator=drawn) for size in (shape, (1, 1, n_keys)))
    weights = torch.randn(shape, generator=drawn)
    if coherent:
        first = torch.arange(n_queries) // NEIGHBOURS * NEIGHBOURS
        query, weights = (x[:, :, first] + 0.1 * x for x in (query, weights))
    query, key, weights = query.to(dtype), key.to(dtype), weights.to(dtype)
    how = {"weights": weights, "relu": True, "rounded": cell.rounded, "pattern": Causal()}
    choose = partial(index_topk, query, key, min(cell.length, n_keys), **how)
    # The last query sees all keys: none that it leaves out has a larger score.
    (numbers, of_query), (keys, of_key) = in_bytes(query[0, :, -1]), in_bytes(key[0, 0])
    last, keys = (numbers * of_query.double(), keys * of_key.double()) if cell.rounded else (query[0, :, -1], key[0, 0])
    products = (last.double() @ keys.double().T).relu() * weights[0, :, -1:].double()
    best, scores = choose()[0, 0, -1].long(), products.sum(0)
    if not scores[best].min() >= scores.topk(len(best)).values[-1] - 1e-4 * scores.abs().max():
        raise RuntimeError(f"{tuple(query.shape)}: the indexer leaves better keys out")
    return choose


def check(q: Tensor, k: Tensor, v: Tensor, lists: Tensor, block: int, out: Tensor) -> float:
    """Return the error of the last queries against float64. Raise RuntimeError if it is too large."""
    (heads, n_queries), (key_heads, n_keys) = q.shape[1:3], k.shape[1:3]
    rows = slice(max(n_queries - CHECKED, 0), None)
    kept = torch.zeros(lists.shape[1], q[:, :, rows].shape[2], -(-n_keys // block) + 1, dtype=torch.bool)
    kept = kept.scatter_(2, lists[0, :, rows].long() % kept.shape[2], True)[..., :-1].repeat_interleave(block, 2)[
        ..., :n_keys
    ]
    kept &= torch.arange(n_keys) <= (torch.arange(n_queries)[rows] + n_keys - n_queries)[:, None]
    # Keys have no copy for each head that shares them: 128K latents would fill the memory.
    few = q[:, :, rows].double().unflatten(1, (key_heads, -1))
    scores = (few @ k.double().unsqueeze(2).mT * q.shape[3] ** -0.5).flatten(1, 2)
    scores.masked_fill_(~kept.repeat_interleave(heads // lists.shape[1], 0), -math.inf)
    found = scores.softmax(3).unflatten(1, (key_heads, -1)) @ v.double().unsqueeze(2)
    error = relative_error(out[:, :, rows], found.flatten(1, 2))
    if not error <= BOUNDS[q.dtype]:
        raise RuntimeError(f"{tuple(q.shape)}: relative error {error:.1e}")
    return error


class Part(NamedTuple):
    """Calls by name, the tensors whose gradients they return if there is one of the output, and the largest error."""

    calls: dict[str, Callable[[], Tensor]]
    leaves: list[Tensor]
    grad: Tensor | None
    error: float


def timed(parts: list[Part], name: str) -> float:
    """Return the seconds of the calls of a name."""
    began = time.perf_counter()
    for part in parts:
        out = part.calls[name]()
        if part.grad is not None:
            torch.autograd.grad(out, part.leaves, part.grad)
    return time.perf_counter() - began


def part_of(cell: Cell, n_queries: int, n_keys: int, dtype: torch.dtype, gradients: bool) -> Part:
    """Return the calls of the last queries of a problem."""
    drawn, whole = torch.Generator().manual_seed(1), n_queries == n_keys
    q = torch.randn(1, cell.heads, n_queries, cell.head_dim, generator=drawn).to(dtype).requires_grad_(gradients)
    k = torch.randn(1, cell.key_heads, n_keys, cell.head_dim, generator=drawn).to(dtype).requires_grad_(gradients)
    leaves, value = [q, k], k[..., :512]
    if cell.value_dim:
        value = (
            torch.randn(1, cell.key_heads, n_keys, cell.value_dim, generator=drawn).to(dtype).requires_grad_(gradients)
        )
        leaves.append(value)

    def dense() -> Tensor:
        # As many keys as the queries of a part see on average.
        seen = n_keys - (0 if whole or n_queries == 1 else n_queries // 2)
        # PyTorch's flash kernel needs one width. Its gradients go to as many heads as it gets.
        ratio, width = cell.heads // cell.key_heads, cell.head_dim
        keys, values = (x[:, :, :seen] for x in (k, value if cell.value_dim else k))
        values = F.pad(values, (0, width - values.shape[3])) if cell.value_dim else values
        keys, values = (
            x.repeat_interleave(ratio, 1) if n_queries > 1 else x.expand(-1, cell.heads, -1, -1) for x in (keys, values)
        )
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=whole and n_queries > 1)
        return out[..., : value.shape[3]]

    calls, error = {"dense": dense}, 0.0
    for coherent in (False, True) if n_queries > 1 else (False,):
        choose = chooser(cell, n_queries, n_keys, coherent, dtype)
        call = calls["coherent" if coherent else "random"] = lambda choose=choose: sparse_attention(
            q, k, value, Causal() & Chosen(choose(), cell.block), enable_gqa=True
        )
        with torch.no_grad():
            error = max(error, check(q, k, value, choose(), cell.block, call()))
    grad = torch.randn(1, cell.heads, n_queries, value.shape[3], generator=drawn).to(dtype) if gradients else None
    return Part(calls, leaves, grad, error)


def measure(
    name: str, n_tokens: int, queries: int, dtype: torch.dtype, gradients: bool, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Return the seconds of each round: of dense attention, of random and of coherent lists."""
    n_keys = 32 * n_tokens if name == "decode" else n_tokens
    sizes = [(1 if name == "decode" else n_tokens, n_keys)]
    if queries < n_tokens and name != "decode":
        sizes = [(queries // 2, quarter * n_tokens // 4 + queries // 4) for quarter in (1, 3)]
    progress.show(f"{name}, {n_keys:,} keys, {dtype}")
    parts = [part_of(CELLS[name], *size, dtype, gradients) for size in sizes]
    # Two rounds are for calls that take many seconds, which need none.
    times = interleaved({x: lambda x=x: timed(parts, x) for x in parts[0].calls}, rounds, warm_up=rounds > 2)
    what = {"cell": name, "keys": n_keys, "queries": sum(x for x, _ in sizes), "dtype": str(dtype)}
    return {**what, "gradients": gradients, "error": max(x.error for x in parts), "seconds": times}


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: milliseconds, and how many times as long dense attention takes."""
    found = []
    for row in rows:
        times = row["seconds"]
        cells = [f"{1e3 * statistics.median(times['dense']):.1f} ms"]
        for name in ("random", "coherent"):
            ratios = [a / b for a, b in zip(times["dense"], times.get(name, ()), strict=False)]
            milliseconds = 1e3 * statistics.median(times[name]) if ratios else 0
            cells += [f"{milliseconds:.1f} ms", f"{statistics.median(ratios):.2f}"] if ratios else ["", ""]
        what = row["cell"] + (" with gradients" if row["gradients"] else "")
        found.append([what, f"{row['keys']:,}", f"{row['queries']:,}", row["dtype"].removeprefix("torch."), *cells])
    return table_lines(
        Table(["layer", "keys", "queries", "dtype", "dense", "random", "times", "coherent", "times"], found)
    )


def main() -> None:
    """Print the table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=count, default=4096, metavar="N")
    add("--queries", type=count, default=1 << 62, metavar="N", help="measure a part of the queries, see above")
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    add("--no-gradients", action="store_true", help="forward passes only")
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    progress, rows = Progress(), []
    for dtype in args.dtype:
        for name in args.cells:
            for gradients in (False, True):
                if not gradients or not (args.no_gradients or name == "decode"):
                    dtyped = getattr(torch, dtype)
                    rows.append(measure(name, args.tokens, args.queries, dtyped, gradients, args.rounds, progress))
    progress.clear()
    print("\n".join(lines_of(rows)))
    if args.out is not None:
        record = {**origin("python benchmarks/lists.py"), "threads": args.threads, "rows": rows}
        write_whole(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
