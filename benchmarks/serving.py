"""Time many requests in transformers' continuous batching on a CPU: ringtile, sdpa, and static batches.

    python benchmarks/serving.py                              16 requests of equal lengths, and 16 ragged ones
    python benchmarks/serving.py --cells ragged --dtype bfloat16 --out benchmarks/records/serving.json

The model has the sizes of SmolLM2-135M and random weights. Each request gets as many new tokens. First, all ways must
give the same tokens in float64 with two layers. Then whole calls take turns in one process. Ratios are medians of the
ratios of rounds.

* static: `generate` of all prompts, padded on the left, with sdpa.
* sdpa: `generate_batch`, which makes one mask over all requests.
* ringtile: `generate_batch` inside `continuous_batching`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from pages import Table, table_lines
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from ringtile.integrations.transformers import continuous_batching
from ringtile.tools.machine import origin
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved

SIZES = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
CELLS = {"equal": [512] * 16, "ragged": [round(64 * 2 ** (n / 3)) for n in range(16)]}
NAMES = ("static", "sdpa", "ringtile")
PAGE = 256


def prompts(lengths: list[int]) -> list[list[int]]:
    """Return random prompts, with the longest in the middle."""
    drawn = torch.Generator().manual_seed(0)
    mixed = lengths[::2] + lengths[1::2][::-1]
    return [torch.randint(3, 49152, (n,), generator=drawn).tolist() for n in mixed]


def static(model: Any, given: list[list[int]], new: int) -> list[list[int]]:
    """Return the new tokens of each prompt, from one padded batch."""
    longest = max(map(len, given))
    tokens = torch.tensor([[0] * (longest - len(each)) + each for each in given])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in given])
    how = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found: list[list[int]] = model.generate(tokens, attention_mask=mask, **how)[:, longest:].tolist()
    return found


def continuous(model: Any, given: list[list[int]], new: int) -> list[list[int]]:
    """Return the new tokens of each prompt, from requests that share a paged cache."""
    how = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    n_pages = sum(-(-(len(each) + new) // PAGE) for each in given)
    memory = ContinuousBatchingConfig(page_size=PAGE, num_blocks=n_pages + 2, max_batch_tokens=sum(map(len, given)))
    found = model.generate_batch(given, generation_config=how, continuous_batching_config=memory)
    return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


def tokens_of(name: str, model: Any, given: list[list[int]], new: int) -> list[list[int]]:
    """Return the new tokens of each prompt by a row of the table."""
    if name == "static":
        return static(model, given, new)
    if name == "sdpa":
        return continuous(model, given, new)
    with continuous_batching(model):
        return continuous(model, given, new)


def check(cell: str, new: int) -> None:
    """Raise RuntimeError unless all ways give the same tokens in float64."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=8192)).double().eval()
    given = prompts([-(-n // 8) for n in CELLS[cell]])
    found = [tokens_of(name, model, given, new) for name in NAMES]
    if any(each != found[0] for each in found):
        raise RuntimeError(f"{cell}: tokens differ")


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: seconds, and medians of the ratios to ringtile."""
    found = []
    for row in rows:
        times = row["seconds"]
        seconds = [f"{statistics.median(times[name]):.1f} s" for name in NAMES]
        pairs = (zip(times[name], times["ringtile"], strict=True) for name in NAMES[:-1])
        ratios = [f"{statistics.median(a / b for a, b in each):.2f}" for each in pairs]
        tokens = row["new"] * row["requests"] / statistics.median(times["ringtile"])
        found.append([row["cell"], f"{row['tokens']:,}", row["dtype"], *seconds, *ratios, f"{tokens:.0f}"])
    ratio = (f"{name} / ringtile" for name in NAMES[:-1])
    return table_lines(Table(["requests", "prompt tokens", "dtype", *NAMES, *ratio, "new tokens/s"], found))


@torch.no_grad()
def main() -> None:
    """Print the table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    add("--new", type=int, default=32, help="new tokens of each request (%(default)s)")
    add("--layers", type=int, default=30)
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    progress, rows = Progress(), []
    config = LlamaConfig(**SIZES, num_hidden_layers=args.layers, max_position_embeddings=8192)
    for cell in args.cells:
        progress.show(f"{cell}: tokens")
        check(cell, 8)
        for dtype in args.dtype:
            model, given = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval(), prompts(CELLS[cell])

            def timed(name: str, model: Any = model, given: Any = given) -> float:
                began = time.perf_counter()
                tokens_of(name, model, given, args.new)
                return time.perf_counter() - began

            progress.show(f"{cell}, {dtype}")
            times = interleaved({name: lambda name=name: timed(name) for name in NAMES}, args.rounds)
            facts = {"cell": cell, "dtype": dtype, "requests": len(given), "tokens": sum(map(len, given))}
            rows.append({**facts, "new": args.new, "seconds": times})
    progress.clear()
    print("\n".join(lines_of(rows)))
    if args.out is not None:
        facts = {"layers": args.layers, "threads": args.threads}
        record = {**origin("python benchmarks/serving.py"), **facts, "rows": rows}
        write_whole(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
