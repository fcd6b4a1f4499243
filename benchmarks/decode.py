"""Time a step of `generate` over a long cache: chosen tiles, all keys, and transformers' own attention.

    python benchmarks/decode.py                                   16K tokens, a density of .10, float32, one thread
    python benchmarks/decode.py --tokens 4K 16K --dtype bfloat16 --threads 2
    python benchmarks/decode.py --out benchmarks/records/decode.json

The model has the sizes of SmolLM2-135M (30 layers, 9 heads of 64 over 3 key heads) and random weights, and its caches
have random keys: a density keeps as many tiles of any content. The attention of a step is first compared with float64
over the chosen tiles, and steps that keep all tiles with PyTorch's attention. A wrong result ends the run. Then whole
steps of the model take turns in one process. Ratios are medians of the ratios of rounds.

* sdpa: transformers' default, whose cache copies all keys and values in each step.
* sdpa, room: the same attention over a cache with room, as sparse steps have.
* ringtile: all keys by ringtile's kernel, with transformers' cache.
* sparse: `use_ringtile(model, decode=Choice(Blend(None), Density(...)))`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from pages import Table, table_lines
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ringtile.adaptive import Blend, Choice, Density
from ringtile.adaptive.steps import Pages, attend_step, kept_tiles
from ringtile.integrations.transformers import use_ringtile
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved
from ringtile.tools.units import count

HEADS, KEY_HEADS, HEAD_DIM = 9, 3, 64
SIZES = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS
)
NAMES = ("sdpa", "sdpa, room", "ringtile", "sparse")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(n_tokens: int, choice: Choice, dtype: torch.dtype) -> float:
    """Return the error of a step's attention against float64. Raise RuntimeError if it is too large."""
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, 1, HEAD_DIM, generator=drawn).to(dtype)
    k, v = torch.randn(2, 1, KEY_HEADS, n_tokens, HEAD_DIM, generator=drawn).to(dtype)
    keep = kept_tiles(choice, Pages(choice), q, k, None, None)
    pairs = keep.repeat_interleave(choice.block, 3)[..., :n_tokens]
    keys, values = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = (q.double() @ keys.mT * HEAD_DIM**-0.5).masked_fill(~pairs, -torch.inf)
    error = relative_error(attend_step(choice, Pages(choice), q, k, v), scores.softmax(3) @ values)
    if not error <= BOUNDS[dtype]:
        raise RuntimeError(f"{n_tokens} tokens: relative error {error:.1e}")
    return error


def filled(model: Any, n_tokens: int, dtype: torch.dtype) -> DynamicCache:
    """Return a cache of random keys and values."""
    cache, drawn = DynamicCache(config=model.config), torch.Generator().manual_seed(1)
    for layer in range(model.config.num_hidden_layers):
        keys, values = torch.randn(2, 1, KEY_HEADS, n_tokens, HEAD_DIM, generator=drawn).to(dtype)
        cache.update(keys, values, layer)
    return cache


def switched(model: Any, name: str, choice: Choice) -> Any:
    """Return the model with the attention of a row of the table."""
    if name.startswith("sdpa"):
        use_ringtile(model)
        model.set_attn_implementation("sdpa")
        return model
    return use_ringtile(model, decode=choice if name == "sparse" else None)


def measure(model: Any, n_tokens: int, choice: Choice, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the seconds of each round, for each row of the table."""
    dtype = model.dtype
    row: dict[str, Any] = {"tokens": n_tokens, "dtype": str(dtype), "error": check(n_tokens, choice, dtype)}
    token = torch.tensor([[7]])
    caches = {name: filled(model, n_tokens, dtype) for name in NAMES}

    def step(name: str, of: Choice = choice) -> tuple[float, Tensor]:
        switched(model, name, of)
        began = time.perf_counter()
        logits = model(token, past_key_values=caches[name]).logits
        return time.perf_counter() - began, logits

    # The first sparse step gives a cache its room. All tiles are all keys.
    switched(model, "sparse", choice)
    model(token, past_key_values=caches["sdpa, room"])
    caches["sdpa, room"].crop(-1)
    error = relative_error(step("sparse", Choice(choice.scores, Density(1.0)))[1], step("sdpa")[1].double())
    if not error <= 10 * BOUNDS[dtype]:
        raise RuntimeError(f"{n_tokens} tokens: logits of all tiles are off by {error:.1e}")
    progress.show(f"{n_tokens:,} tokens, {dtype}")
    times = interleaved({name: lambda name=name: step(name)[0] for name in NAMES}, rounds, warm_up=True)
    return {**row, "seconds": times}


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: milliseconds, and medians of the ratios of sparse steps to the others."""
    found = []
    for row in rows:
        times = row["seconds"]
        cells = [f"{1e3 * statistics.median(times[name]):.0f} ms" for name in NAMES]
        ratios = [
            f"{statistics.median(a / b for a, b in zip(times['sparse'], times[name], strict=True)):.2f}"
            for name in NAMES[:-1]
        ]
        found.append([f"{row['tokens']:,}", row["dtype"].removeprefix("torch."), *cells, *ratios])
    return table_lines(Table(["tokens", "dtype", *NAMES, *(f"sparse / {name}" for name in NAMES[:-1])], found))


@torch.no_grad()
def main() -> None:
    """Print the table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", nargs="+", type=count, default=[16384], metavar="N")
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    add("--density", type=float, default=0.1)
    add("--layers", type=int, default=30)
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=9)
    add("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    choice, progress, rows = Choice(Blend(None), Density(args.density)), Progress(), []
    config = LlamaConfig(**SIZES, num_hidden_layers=args.layers, max_position_embeddings=1 << 20)
    for dtype in args.dtype:
        model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        rows += [measure(model, n_tokens, choice, args.rounds, progress) for n_tokens in args.tokens]
    progress.clear()
    print("\n".join(lines_of(rows)))
    if args.out is not None:
        facts = {"density": args.density, "layers": args.layers, "threads": args.threads}
        record = {**origin("python benchmarks/decode.py"), **facts, "rows": rows}
        write_whole(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
