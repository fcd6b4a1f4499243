"""Time many requests in transformers' continuous batching on a CPU: ringtile, sdpa, and static batches.

    python benchmarks/serving.py                              16 requests of equal lengths, and two cells of ragged ones
    python benchmarks/serving.py --cells long --names ringtile int8 --dtype bfloat16

The model has the sizes of SmolLM2-135M and random weights. Each request gets as many new tokens. First, the exact ways
must give the same tokens in float64 with two layers. The rounded ones must give log-probabilities close to these, up to
the first token that differs. Then whole calls take turns in one process. Ratios are medians of the ratios of rounds.

* static: `generate` of all prompts, padded on the left, with sdpa.
* sdpa: `generate_batch`, which makes one mask over all requests.
* ringtile: `generate_batch` inside `continuous_batching`.
* bfloat16, int8: the same, with pages that hold rounded keys and values.

The record is written after each cell. Its other cells stay, if an earlier run on this machine measured them.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from merged import before, merged
from pages import Table, table_lines
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from ringtile.integrations.transformers import continuous_batching
from ringtile.tools.machine import origin
from ringtile.tools.progress import Progress
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved

SIZES = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
RAGGED = [round(64 * 2 ** (n / 3)) for n in range(16)]
CELLS = {"equal": [512] * 16, "ragged": RAGGED, "long": [2 * n for n in RAGGED]}
EXACT, ROUNDED = ("static", "sdpa", "ringtile"), ("bfloat16", "int8")
LARGEST_ERROR = {"bfloat16": 0.1, "int8": 0.1}
"""Of the log-probability of a token, from rounded keys and values."""
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


def continuous(model: Any, given: list[list[int]], new: int, logs: bool) -> list[Any]:
    """Return the result of each prompt, from requests that share a paged cache."""
    how = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    n_pages = sum(-(-(len(each) + new) // PAGE) for each in given)
    memory = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=n_pages + 2, max_batch_tokens=sum(map(len, given)), return_logprobs=logs
    )
    found = model.generate_batch(given, generation_config=how, continuous_batching_config=memory)
    if failed := [each.error for each in found.values() if each.error]:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return [found[name] for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


def results_of(name: str, model: Any, given: list[list[int]], new: int, logs: bool = False) -> list[Any]:
    """Return the results of a row of the table: those of transformers, or tokens of static batches."""
    if name == "static":
        return static(model, given, new)
    if name == "sdpa":
        return continuous(model, given, new, logs)
    with continuous_batching(model, cache=name if name in ROUNDED else None):
        return continuous(model, given, new, logs)


def check(cell: str, new: int, names: list[str]) -> None:
    """Raise RuntimeError unless exact ways give the same tokens in float64, and rounded ones are close."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=8192)).double().eval()
    given = prompts([-(-n // 8) for n in CELLS[cell]])
    expected = results_of("ringtile", model, given, new, True)
    tokens = [each.generated_tokens for each in expected]
    for name in names:
        found = expected if name == "ringtile" else results_of(name, model, given, new, True)
        if name in EXACT:
            if [each if name == "static" else each.generated_tokens for each in found] != tokens:
                raise RuntimeError(f"{cell}: tokens of {name} differ")
            continue
        for mine, exact in zip(found, expected, strict=True):
            pairs = zip(mine.generated_tokens, exact.generated_tokens, strict=True)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), new)
            logs = zip(mine.logprobs[:same], exact.logprobs[:same], strict=True)
            if max((abs(a - b) for a, b in logs), default=0) > LARGEST_ERROR[name]:
                raise RuntimeError(f"{cell}: log-probabilities of {name} are too far off")


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: seconds, new tokens per second, and medians of the ratios to ringtile."""
    found = []
    for row in rows:
        times = row["seconds"]
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            pairs = zip(seconds, times.get("ringtile", seconds), strict=True)
            ratio = f"{statistics.median(a / b for a, b in pairs):.2f}" if "ringtile" in times else "-"
            tokens = row["new"] * row["requests"] / middle
            facts = [row["cell"], f"{row['tokens']:,}", row["dtype"], name]
            found.append([*facts, f"{middle:.1f} s", f"{tokens:.1f}", ratio])
    names = ["requests", "prompt tokens", "model", "way", "time", "new tokens/s", "time / ringtile"]
    return table_lines(Table(names, found))


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells the cell of a row from others. Ways are compared with those of the same run alone."""
    return row["cell"], row["dtype"], row["new"], sorted(row["seconds"])


@torch.no_grad()
def main() -> None:
    """Print the table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    add("--names", nargs="+", choices=[*EXACT, *ROUNDED], default=[*EXACT, *ROUNDED])
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    add("--new", type=int, default=32, help="new tokens of each request (%(default)s)")
    add("--layers", type=int, default=30)
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    facts = {"layers": args.layers, "threads": args.threads, "rows": []}
    progress, record = Progress(), {**origin(shlex.join(["python", *sys.argv])), **facts}
    old = before(args.out, record)
    config = LlamaConfig(**SIZES, num_hidden_layers=args.layers, max_position_embeddings=8192)
    for cell in args.cells:
        progress.show(f"{cell}: tokens")
        check(cell, 8, args.names)
        for dtype in args.dtype:
            model, given = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval(), prompts(CELLS[cell])

            def timed(name: str, model: Any = model, given: Any = given) -> float:
                began = time.perf_counter()
                results_of(name, model, given, args.new)
                return time.perf_counter() - began

            progress.show(f"{cell}, {dtype}")
            times = interleaved({name: lambda name=name: timed(name) for name in args.names}, args.rounds)
            facts = {"cell": cell, "dtype": dtype, "requests": len(given), "tokens": sum(map(len, given))}
            record["rows"].append({**facts, "new": args.new, "seconds": times})
            if args.out is not None:
                write_whole(args.out, json.dumps(merged(old, record, key_of), indent=1) + "\n")
    progress.clear()
    print("\n".join(lines_of(record["rows"])))


if __name__ == "__main__":
    main()
