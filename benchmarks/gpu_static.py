"""Compile our kernels and FlexAttention's for GPUs that are not here, and count what their loops do.

    python benchmarks/gpu_static.py            write benchmarks/records/gpu-static.json and docs/gpu-static.md
    python benchmarks/gpu_static.py --page     write the page from the record

It needs no GPU and takes minutes on one core. FlexAttention's templates are rendered as inductor does for static
shapes, with its default tiles. Nothing is timed: cycles are those of the model in `sass_model`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from compiled import SHARED_BYTES, Compiled, compile_choice  # noqa: E402
from flex_static import BLOCK, HEADS, MASKS, TOKENS, compiled  # noqa: E402
from sass_model import Machine, cycles, facts, machine_code  # noqa: E402

from ringtile import build_index  # noqa: E402
from ringtile.kernels.contracts import Call, Lists, Rows  # noqa: E402
from ringtile.kernels.triton import launches, list_launches  # noqa: E402
from ringtile.patterns import parse  # noqa: E402
from ringtile.tools.machine import commit, versions  # noqa: E402

RECORD = ROOT / "benchmarks" / "records" / "gpu-static.json"
PAGE = ROOT / "docs" / "gpu-static.md"
ARCHITECTURES = {90: 228, 80: 164, 100: 228, 120: 100}
"""KiB of shared memory of a multiprocessor."""
MODELED = 90
KERNELS = {"forward_kernel": "forward", "dq_kernel": "dQ", "dkdv_kernel": "dK, dV"}
LATENCIES = (400, 800)
LENGTHS = [7_000, 20_072, 1_000, 31_000, 5_000, 12_000, 25_000, 3_000, 15_000, 12_000]
PATTERNS = {
    "full": "dense",
    "causal window": "causal & window(1023, 0)",
    "documents": f"causal & documents({LENGTHS})",
    "LongNet": "longnet_union([2048, 8192], [1, 4])",
}
"""The patterns of 131,072 tokens whose tiles we count. FlexAttention's rules for them are in `flex_static.MASKS`."""

LAYERS = {
    "DeepSeek-V3.2, absorbed: 128 heads on one of 576 and 512, keys": (128, 1, 576, 512, 1, 1, 2048),
    "DeepSeek-V3.2: 128 key heads of 192 and 128, keys": (128, 128, 192, 128, 1, 1, 2048),
    "MiniMax-M3: 64 heads on 4 of 128, blocks of 128 keys": (64, 4, 128, 128, 4, 128, 16),
}
"""Heads, key heads, head dim, value dim, groups, block and length of the lists of layers."""
LIST_TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")

Loops = tuple[list[Any], list[Any]]


def ours(architecture: int, head_dim: int) -> Iterator[dict[str, Any]]:
    """Compile our launches of a causal window."""
    index = build_index(parse(PATTERNS["causal window"]), TOKENS, num_heads=HEADS)
    call = Call(index.start, index.block, head_dim**-0.5, tiles=index.tensors(), backend="triton")
    q, k, v = (torch.empty(1, HEADS, TOKENS, head_dim, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    with patch.object(launches, "architecture", lambda device: architecture):
        job = launches.Job(q, k, v, call)
        found = launches.forward_launches(job, out, lse)
        found += launches.backward_launches(job, out, None, out, lse, q, k, v)
        for launch in found:
            if name := KERNELS.get(launch.kernel.__name__):
                config = launch.choices[0].config
                made = compile_choice(launch, launch.choices[0], f"sm_{architecture}")
                machine = machine_code(made.texts["cubin"])
                tile = (config.queries, config.keys)
                full, partial = machine.loops()
                yield row("ringtile", architecture, head_dim, name, tile, config.warps, config.stages, made.shared,
                          machine, (full, partial))  # fmt: skip


def flex(architecture: int, head_dim: int, mask: str) -> Iterator[dict[str, Any]]:
    """Compile FlexAttention's templates for a mask."""
    for template in ("flex_attention", "flex_backwards"):
        made, choice = compiled(template, architecture, head_dim, mask)
        machine = machine_code(made.asm["cubin"])
        loops = machine.loops()
        if template == "flex_attention":
            kernels = {"forward": ((choice["BLOCK_M"], choice["BLOCK_N"]), loops)}
        else:
            kernels = {
                "dQ": ((choice["BLOCK_M2"], choice["BLOCK_N2"]), loops[:2]),
                "dK, dV": ((choice["BLOCK_M1"], choice["BLOCK_N1"]), loops[2:]),
            }
        for name, (tile, (partial, full)) in kernels.items():
            yield row("FlexAttention", architecture, head_dim, name, tile, choice["num_warps"], choice["num_stages"],
                      made.metadata.shared, machine, (full, partial), mask=mask)  # fmt: skip


def row(
    who: str, architecture: int, head_dim: int, kernel: str, tile: tuple[int, int], warps: int, stages: int,
    shared: int, machine: Machine, loops: Loops, mask: str = "causal window",
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of one kernel."""
    by_registers = 65_536 // (-(-machine.registers // 8) * 8 * warps * 32)
    programs = min(by_registers, ARCHITECTURES[architecture] * 1024 // (shared + 1024))
    named = dict(zip(("full", "partial"), loops, strict=True))
    print(who, f"sm_{architecture}", head_dim, kernel, mask, flush=True)
    return {
        "who": who,
        "architecture": architecture,
        "head_dim": head_dim,
        "kernel": kernel,
        "mask": mask,
        "tile": tile,
        "warps": warps,
        "stages": stages,
        "registers": machine.registers,
        "stack": machine.stack,
        "shared": shared,
        "programs": programs,
        **{name: facts(loop)._asdict() for name, loop in named.items()},
        "cycles": {
            name: [
                round(cycles(loop, warps // 4, programs, latency) * BLOCK * BLOCK / (tile[0] * tile[1]))
                for latency in LATENCIES
            ]
            for name, loop in named.items()
        }
        if architecture == MODELED
        else None,
    }


def lists(layer: str, target: str) -> Iterator[dict[str, Any]]:
    """Compile our launches over lists of keys in bfloat16: of each kernel the first choice that fits."""
    heads, key_heads, head_dim, value_dim, groups, block, length = LAYERS[layer]
    queries, keys = 64, 8192
    q, k, v, out = (
        torch.empty(1, n, tokens, width, dtype=torch.bfloat16)
        for n, tokens, width in ((heads, queries, head_dim), (key_heads, keys, head_dim), (key_heads, keys, value_dim),
                                 (heads, queries, value_dim))
    )  # fmt: skip
    indices = torch.randint(keys // block, (1, groups, queries, length), dtype=torch.int32)
    limits = torch.tensor([0, keys], dtype=torch.int32).expand(1, queries, 2).contiguous()
    job = list_launches.ListJob(q, k, v, Lists(indices, block, limits), 0.1)
    lse, total = torch.empty(1, heads, queries), torch.empty(1, key_heads, keys, head_dim + value_dim)
    found = [*list_launches.forward_launches(job, out, lse)]
    found += list_launches.backward_launches(job, Rows(out, None, q, k, v, out, lse), q, total)
    # Gradients of keys are those of a part of the queries after another, by the same launch.
    for function, launch in {launch.kernel.__name__: launch for launch in found}.items():
        if name := KERNELS.get(function):
            for choice in launch.choices:
                made = compile_choice(launch, choice, target)
                if made.shared <= SHARED_BYTES[target]:
                    break
            registers, spills, flying = usage(made)
            print("lists", target, layer, name, flush=True)
            yield {
                "target": target, "layer": layer, "kernel": name, "tile": (choice.constants.BM, choice.constants.BN),
                "warps": choice.config.warps, "stages": choice.config.stages, "registers": registers, "spills": spills,
                "shared": made.shared, "flying": flying,
            }  # fmt: skip


def usage(made: Compiled) -> tuple[int, int, int | None]:
    """Return the registers of a thread, the accesses to local memory in loops, and the groups of copies that fly."""
    if "cubin" in made.texts:
        machine = machine_code(made.texts["cubin"])
        loops = [facts(loop) for loop in machine.loops()]
        return machine.registers, sum(loop.spills for loop in loops), loops[-1].flying
    # AMD's compiler counts the registers that it spills, in loops or not.
    registers, spills = (
        int(re.search(rf"\.{word}:\s+(\d+)", made.texts["amdgcn"])[1])  # type: ignore[index]
        for word in ("vgpr_count", "vgpr_spill_count")
    )
    return registers, spills, None


def collect() -> dict[str, Any]:
    """Compile everything."""
    rows = []
    for architecture in ARCHITECTURES:
        for head_dim in (64, 128):
            rows += ours(architecture, head_dim)
            for mask in MASKS if architecture == MODELED else ("causal window",):
                rows += flex(architecture, head_dim, mask)
    of_lists = [one for layer in LAYERS for target in LIST_TARGETS for one in lists(layer, target)]
    tiles = {}
    for name, text in PATTERNS.items():
        index = build_index(parse(text), 131_072, block=BLOCK)
        tiles[name] = {"full": len(index.rows.full), "partial": len(index.rows.partial)}
    return {"commit": commit(), "versions": versions(), "tiles": tiles, "rows": rows, "lists": of_lists}


def _mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


def speeds(record: dict[str, Any]) -> Iterator[tuple[str, int, float, float]]:
    """Yield pattern, head dim, and our speed over FlexAttention's in the model, forward and backward."""
    for name, tiles in record["tiles"].items():
        for head_dim in (64, 128):
            total: dict[tuple[str, str], float] = {}
            for one in record["rows"]:
                mine = one["who"] == "ringtile"
                if one["cycles"] and one["head_dim"] == head_dim and (mine or one["mask"] == name):
                    part = "forward" if one["kernel"] == "forward" else "backward"
                    spent = sum(tiles[loop] * _mean(one["cycles"][loop]) for loop in ("full", "partial"))
                    total[part, one["who"]] = total.get((part, one["who"]), 0.0) + spent
            ratios = [total[part, "FlexAttention"] / total[part, "ringtile"] for part in ("forward", "backward")]
            yield name, head_dim, ratios[0], ratios[1]


_INTRO = """\
<!-- Generated by benchmarks/gpu_static.py from benchmarks/records/gpu-static.json: run it again, do not edit. -->
# Static figures

The compiler builds the Triton kernels for GPUs that are not present. This page counts the instructions of their loops,
next to the loops of FlexAttention's own templates, compiled in the same way with PyTorch's default tiles. Nothing here
is a time: no GPU was used. `python benchmarks/gpu_static.py` writes this page.

A kernel has one loop over full tiles and one over partial tiles. Columns with a slash give both. *Instructions* are
those of 128 x 128 pairs on one warp per quarter of a multiprocessor. *Flying* is the number of groups of copies that
may still be on their way when a step begins. At 0, each step waits for the memory that it has just asked for. *Masks*
are instructions that test bits or choose, and *spills* those that access local memory, per step.
"""

_MODEL = """
## A model's cycles

The model runs the loops on one multiprocessor of an H100, with the stall counts and scoreboards that the compiler wrote
into the instructions (`benchmarks/sass_model.py`). It assumes 40 bytes per cycle from the L2 cache, after 400 to 800
cycles. If fewer arrive, tiles of 64 queries lose first: the forward pass at head dim 64 needs about 30. Ratios of two
kernels of the same shape are good to about 20%. No GPU has confirmed them yet.
"""

_PATTERNS = """
By pattern, at 131,072 tokens and tiles of 128: the speed of our kernels over FlexAttention's, in the model. Above 1,
ours take fewer cycles. The counts of tiles are exact.
"""


_LISTS = """
## Lists of keys

The kernels of [`Chosen`](patterns/chosen.md) in bfloat16, as they are compiled for layers that were trained sparse: of
each kernel, the first of its configurations whose shared memory the GPU has. A tile is heads of a query x keys of its
list. For gfx942 the last column is the number of registers that AMD's compiler spills: dK, dV need smaller tiles there.
"""


def _both(one: dict[str, Any], key: str) -> str:
    return " / ".join("-" if one[name][key] is None else str(one[name][key]) for name in ("full", "partial"))


def page(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    lines = [_INTRO]
    modeled = []
    for architecture in ARCHITECTURES:
        lines += [
            f"## sm_{architecture}\n",
            "| kernel | D | who | tile, warps, stages | registers | shared | programs per SM | instructions | flying "
            "| masks | spills |",
            "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for one in record["rows"]:
            if one["architecture"] == architecture and one["mask"] == "causal window":
                share = BLOCK * BLOCK / (one["tile"][0] * one["tile"][1]) * one["warps"] / 4
                counts = " / ".join(f"{one[name]['instructions'] * share:,.0f}" for name in ("full", "partial"))
                tile = f"{one['tile'][0]} x {one['tile'][1]}, {one['warps']}, {one['stages']}"
                head = f"| {one['kernel']} | {one['head_dim']} | {one['who']} |"
                lines.append(
                    f"{head} {tile} | {one['registers']} | {one['shared']:,} | {one['programs']} | {counts} "
                    f"| {_both(one, 'flying')} | {_both(one, 'masks')} | {_both(one, 'spills')} |"
                )
                if one["cycles"]:
                    full, partial = (f"{_mean(one['cycles'][loop]):,.0f}" for loop in ("full", "partial"))
                    modeled.append(f"{head} {full} | {partial} |")
        lines.append("")
    lines += [_MODEL.lstrip("\n"), "| kernel | D | who | cycles per full tile | per partial tile |"]
    lines += ["|---|---:|---|---:|---:|", *modeled, _PATTERNS]
    lines += ["| pattern | full tiles | partial tiles | D | forward | backward |", "|---|---:|---:|---:|---:|---:|"]
    for name, head_dim, forward, backward in speeds(record):
        tiles = record["tiles"][name]
        counts = f"{tiles['full']:,} | {tiles['partial']:,}"
        lines.append(f"| {name} | {counts} | {head_dim} | {forward:.2f} | {backward:.2f} |")
    lines.append(_LISTS.rstrip("\n"))
    for layer in LAYERS:
        lines += [f"\n{layer}:\n", "| GPU | kernel | tile, warps, stages | registers | shared | flying | spills |"]
        lines.append("|---|---|---|---:|---:|---:|---:|")
        for one in record["lists"]:
            if one["layer"] == layer:
                tile = f"{one['tile'][0]} x {one['tile'][1]}, {one['warps']}, {one['stages']}"
                flying = "-" if one["flying"] is None else one["flying"]
                lines.append(
                    f"| {one['target']} | {one['kernel']} | {tile} | {one['registers']} | {one['shared']:,} | {flying} "
                    f"| {one['spills']} |"
                )
    made = record["versions"]
    lines += ["", f"Compiled with Triton {made['triton']}, FlexAttention of PyTorch {made['torch']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page, from the record")
    if not parser.parse_args().page:
        RECORD.write_text(json.dumps(collect(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
