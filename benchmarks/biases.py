"""Time and memory of biases of scores: T5's and a Conformer's, against dense biases and FlexAttention.

    python benchmarks/biases.py --threads 2 --out benchmarks/records/biases.json
    python benchmarks/biases.py --cells t5-4096 --no-flex

Each cell first compares outputs and all gradients, those of the bias too, with float64 on sampled rows, and a wrong
result ends the run. Then calls take turns in one process; times are medians. Memory is the peak that torch allocates
beyond inputs, outputs and gradients, of a forward and a backward pass. Without a second call, a cell has ringtile's
alone, because a dense bias would not fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile import ByQuery, Relative, sparse_attention
from ringtile.patterns import Dense, Pattern, Window
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin
from ringtile.tools.memory import peak_memory
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved, seconds_of

BOUND = 2e-5
HEADS, HEAD_DIM = 8, 64


class Cell(NamedTuple):
    """A call with a bias, and its peers."""

    leaves: list[Tensor]
    ringtile: Callable[..., Tensor]
    exact: Callable[[Tensor, Sequence[Tensor]], Tensor]
    """Returns the output of some rows from leaves in float64."""
    peers: dict[str, Callable[..., Tensor]]
    no_gradients: tuple[str, ...] = ()


def exact_rows(rows: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, pattern: Pattern) -> Tensor:
    """Return dense attention of some rows, whose biases are ``[1, H, R, N]``."""
    kept = pattern.allowed(torch.tensor(0), rows[:, None], torch.arange(k.shape[2]))
    scores = (q[:, :, rows] @ k.mT * scale + bias).masked_fill(~kept, -torch.inf)
    return scores.softmax(3) @ v


def places(rows: Tensor, n_tokens: int, offset: int, count: int) -> Tensor:
    """Return the place in a table of each pair of some rows."""
    return (torch.arange(n_tokens) - rows[:, None] + offset).clamp(0, count - 1)


def t5(n_tokens: int, dense: bool, flex: bool) -> Cell:
    """T5's bias, without a scale: 32 buckets, of which each head has its numbers."""
    weight = torch.randn(32, HEADS, requires_grad=True)
    leaves = [torch.randn(1, HEADS, n_tokens, HEAD_DIM) / 4 for _ in range(2)]
    leaves = [
        *(x.requires_grad_() for x in leaves),
        torch.randn(1, HEADS, n_tokens, HEAD_DIM, requires_grad=True),
        weight,
    ]

    def table_of(weight: Tensor) -> Relative:
        return Relative.t5(weight, n_tokens, n_tokens, bidirectional=True)

    def ours(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return sparse_attention(q, k, v, scale=1.0, bias=table_of(weight))

    def numbers(rows: Tensor, weight: Tensor) -> Tensor:
        bias = table_of(weight)
        return F.embedding(places(rows, n_tokens, bias.offset, bias.table.shape[1]), bias.table.mT).permute(2, 0, 1)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, numbers(torch.arange(n_tokens), weight)[None], scale=1.0)

    def exact(rows: Tensor, wide: Sequence[Tensor]) -> Tensor:
        return exact_rows(rows, *wide[:3], numbers(rows, wide[3]), 1.0, Dense())

    peers: dict[str, Callable[..., Tensor]] = {"sdpa, dense bias": sdpa} if dense else {}
    if flex:
        peers["flex"] = compiled_flex(table_of)
    return Cell(leaves, ours, exact, peers, ("flex",))


def compiled_flex(table_of: Callable[[Tensor], Relative]) -> Callable[..., Tensor]:
    """Return FlexAttention with the same numbers, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        bias = table_of(weight)
        table, offset = bias.table.contiguous(), bias.offset

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, j - i + offset]

        found: Tensor = compiled(q, k, v, score_mod=score_mod, scale=1.0)
        return found

    return call


def conformer(n_frames: int, window: int | None, peer: bool) -> Cell:
    """A Conformer's layer: vectors of all distances that a window leaves, for queries with biases of their own."""
    reach = n_frames - 1 if window is None else window
    pattern: Pattern = Dense() if window is None else Window(window)
    from transformers import ParakeetEncoderConfig
    from transformers.models.parakeet.modeling_parakeet import (
        ParakeetEncoderAttention,
        ParakeetEncoderRelPositionalEncoding,
    )

    width = HEADS * HEAD_DIM
    sizes = {"hidden_size": width, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    # The gradient of a bias of keys is zero, so that no error is small beside it.
    config = ParakeetEncoderConfig(**sizes, attention_bias=False)
    config._attn_implementation = "sdpa"
    layer = ParakeetEncoderAttention(config, 0).eval()
    torch.nn.init.normal_(layer.bias_u, std=0.1), torch.nn.init.normal_(layer.bias_v, std=0.1)
    x = torch.randn(1, n_frames, width, requires_grad=True)
    short = x[:, : reach + 1].detach()
    positions = ParakeetEncoderRelPositionalEncoding(config)(short)
    weights = list(layer.parameters())

    names = [name for name, _ in layer.named_parameters()]

    def projected(x: Tensor, weights: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
        """Return the queries, keys, values, queries of distances and vectors of distances, and the last projection."""
        by_name = dict(zip(names, weights, strict=True))

        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, by_name[f"{name}.weight"], by_name.get(f"{name}.bias"))

        heads = (1, -1, HEADS, HEAD_DIM)
        q, k, v = (linear(f"{name}_proj", x).view(heads).transpose(1, 2) for name in "qkv")
        vectors = linear("relative_k_proj", positions.to(x.dtype)).view(heads)[0].transpose(0, 1)
        u, w = (by_name[name].view(1, HEADS, 1, HEAD_DIM) for name in ("bias_u", "bias_v"))
        return [q + u, k, v, q + w, vectors], lambda out: linear("o_proj", out.transpose(1, 2).flatten(2))

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        (q, k, v, of, vectors), last = projected(x, weights)
        return last(sparse_attention(q, k, v, pattern, bias=ByQuery(of, vectors, reach)))

    def exact(rows: Tensor, wide: Sequence[Tensor]) -> Tensor:
        (q, k, v, of, vectors), last = projected(wide[0], wide[1:])
        products = of[:, :, rows] @ vectors.mT * HEAD_DIM**-0.5
        at = places(rows, n_frames, reach, 2 * reach + 1)
        bias = products.gather(3, at.expand(1, HEADS, -1, -1))
        return last(exact_rows(rows, q, k, v, bias, HEAD_DIM**-0.5, pattern))

    peers: dict[str, Callable[..., Tensor]] = {}
    if peer:
        peers["transformers"] = lambda x, *_: layer(x, positions)[0]
    return Cell([x, *weights], ours, exact, peers)


CELLS: dict[str, Callable[[bool], Cell]] = {
    "t5-4096": lambda flex: t5(4096, True, flex),
    "t5-16384": lambda flex: t5(16384, False, False),
    "conformer-4096": lambda flex: conformer(4096, None, True),
    "conformer-45001-window-512": lambda flex: conformer(45001, 512, False),
}


def check(cell: Cell) -> float:
    """Return the largest relative error of the output and gradients of some rows. Raise RuntimeError beyond a bound."""
    out = cell.ringtile(*cell.leaves)
    # The output is [B, H, N, D] or [B, N, width].
    dim = out.dim() - 2
    n_tokens = out.shape[dim]
    rows = torch.arange(3, n_tokens, max(1, n_tokens // 16))
    cotangent, some = torch.zeros_like(out), (*(slice(None),) * dim, rows)
    cotangent[some] = torch.randn(out[some].shape)
    mine = [out[some].detach(), *torch.autograd.grad(out, cell.leaves, cotangent)]
    wide = [x.detach().double().requires_grad_() for x in cell.leaves]
    exact = cell.exact(rows, wide)
    theirs = [exact, *torch.autograd.grad(exact, wide, cotangent[some].double())]
    error = max(relative_error(*pair) for pair in zip(mine, theirs, strict=True))
    if not error <= BOUND:
        raise RuntimeError(f"relative error {error:.1e}")
    return error


def measure(name: str, args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Return a row for each call of a cell, with its median milliseconds and its memory."""
    torch.manual_seed(0)
    cell = CELLS[name](args.flex)
    progress.show(f"{name}: check")
    error = check(cell)
    calls = {"ringtile": cell.ringtile, **cell.peers}

    def forward(call: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            call(*cell.leaves)

    def both(call: Callable[..., Tensor]) -> None:
        out = call(*cell.leaves)
        torch.autograd.grad(out, cell.leaves, torch.ones_like(out))

    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for peer, call in calls.items():
        runs[peer, "forward"] = partial(seconds_of, partial(forward, call))
        if peer not in cell.no_gradients:
            runs[peer, "forward+backward"] = partial(seconds_of, partial(both, call))
    progress.show(f"{name}: times")
    times = {key: statistics.median(found) for key, found in interleaved(runs, args.rounds, warm_up=True).items()}
    rows = []
    for (peer, way), seconds in times.items():
        row = {"cell": name, "call": peer, "direction": way, "ms": 1e3 * seconds, "threads": args.threads}
        row |= {"ringtile_is": seconds / times["ringtile", way], "error": error}
        if way == "forward+backward":
            progress.show(f"{name}: memory of {peer}")
            found = peak_memory(
                partial(calls[peer], *cell.leaves),
                lambda out: torch.autograd.grad(out, cell.leaves, torch.ones_like(out)),
                torch.device("cpu"),
            )
            row["peak_bytes"] = max(found.forward, found.backward or 0)
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print a table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL", help=f"default: {' '.join(CELLS)}")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rounds", type=int, default=3)
    add("--flex", action=argparse.BooleanOptionalAction, default=True, help="also time FlexAttention")
    add("--out", type=Path, help="file of the record")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    progress, rows = Progress(), []
    for name in args.cells:
        found = measure(name, args, progress)
        progress.clear()
        for row in found:
            memory = f"{row['peak_bytes'] / 2**20:>10.1f} MiB" if "peak_bytes" in row else ""
            ratio = f"{row['ringtile_is']:>8.2f}x"
            print(f"{name:<28}{row['call']:<18}{row['direction']:<18}{row['ms']:>10.1f} ms{ratio}{memory}")
        rows += found
    if args.out is not None:
        command = f"python benchmarks/biases.py --threads {args.threads}"
        write_whole(args.out, json.dumps(origin(command) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
