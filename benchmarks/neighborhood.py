"""Time neighborhood attention on a grid against dense attention and FlexAttention.

    python benchmarks/neighborhood.py --threads 2 --out benchmarks/records/neighborhood.json
    python benchmarks/neighborhood.py --size 64 64 --window 7 --no-flex

Outputs and gradients of sampled rows are compared with float64 first, and a wrong result ends the run. Then calls take
turns in one process; times are medians. FlexAttention is compiled with the same rule; on a CPU it has no gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.index.block_lists import to_block_mask
from ringtile.patterns import Neighborhood
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved, seconds_of

BOUND = 1e-5


def compiled_flex(pattern: Neighborhood) -> Callable[..., Tensor]:
    """Return FlexAttention over the same pairs, compiled, of tokens in the order of the pattern."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = to_block_mask(build_index(pattern, prod(pattern.size)))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def check(pattern: Neighborhood, tensors: list[Tensor]) -> float:
    """Return the largest relative error of the output and gradients of some rows. Raise RuntimeError beyond a bound."""
    n_tokens = prod(pattern.size)
    rows = torch.arange(3, n_tokens, max(1, n_tokens // 64))
    cotangent = torch.zeros_like(tensors[2])
    cotangent[:, :, rows] = torch.randn(tensors[2][:, :, rows].shape)
    out = sparse_attention(*tensors, pattern)
    mine = [out[:, :, rows], *torch.autograd.grad(out, tensors, cotangent)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    kept = pattern.allowed(torch.tensor(0), rows[:, None], torch.arange(n_tokens))
    scores = (wide[0][:, :, rows] @ wide[1].mT * wide[0].shape[3] ** -0.5).masked_fill(~kept, -torch.inf)
    exact = scores.softmax(3) @ wide[2]
    theirs = [exact, *torch.autograd.grad(exact, wide, cotangent[:, :, rows].double())]
    error = max(relative_error(*pair) for pair in zip(mine, theirs, strict=True))
    if not error <= BOUND:
        raise RuntimeError(f"{pattern}: relative error {error:.1e}")
    return error


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each call, with its median milliseconds and the ratio of dense attention to it."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pattern = Neighborhood(args.size, args.window, args.dilation)
    n_tokens, tiles = prod(args.size), pattern.in_tiles
    tensors = [torch.randn(1, args.heads, n_tokens, args.head_dim, requires_grad=True) for _ in range(3)]
    error = check(pattern, tensors)
    calls: dict[str, Callable[..., Tensor]] = {
        "ringtile": lambda *x: sparse_attention(*x, pattern),
        "dense": F.scaled_dot_product_attention,
    }
    if args.flex:
        calls["flex, tokens in tiles"] = compiled_flex(tiles)
    plain = [x.detach() for x in tensors]

    def both(call: Callable[..., Tensor]) -> None:
        call(*tensors).sum().backward()

    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for name, call in calls.items():
        runs[name, "forward"] = partial(seconds_of, partial(call, *plain))
        if not name.startswith("flex"):
            runs[name, "forward+backward"] = partial(seconds_of, partial(both, call))
    times = {key: statistics.median(found) for key, found in interleaved(runs, args.rounds, warm_up=True).items()}
    facts = {"pattern": str(pattern), "heads": args.heads, "head_dim": args.head_dim, "threads": args.threads}
    facts |= {"density": tiles.density(n_tokens), "tile_density": tiles.tile_density(n_tokens), "error": error}
    return [
        facts | {"call": name, "direction": way, "ms": 1e3 * ours, "dense_over": times["dense", way] / ours}
        for (name, way), ours in times.items()
    ]


def main() -> None:
    """Measure and print a table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--size", type=int, nargs="+", default=[128, 128], help="tokens of each axis (default: 128 128)")
    add("--window", type=int, nargs="+", default=[13, 13], help="neighbors of each axis (default: 13 13)")
    add("--dilation", type=int, default=1)
    add("--heads", type=int, default=4)
    add("--head-dim", type=int, default=32)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rounds", type=int, default=5)
    add("--flex", action=argparse.BooleanOptionalAction, default=True, help="also time FlexAttention")
    add("--out", type=Path, help="file of the record")
    args = parser.parse_args()
    rows = measure(args)
    for row in rows:
        print(f"{row['call']:<24}{row['direction']:<18}{row['ms']:>10.1f} ms{row['dense_over']:>8.1f}x")
    if args.out is not None:
        command = f"python benchmarks/neighborhood.py --threads {args.threads}"
        write_whole(args.out, json.dumps(origin(command) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
