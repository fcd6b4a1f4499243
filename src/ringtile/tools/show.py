"""`ringtile show`: draw a pattern at one length and print its density, memory and work."""

import argparse
import json
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import torch

from ringtile.index import BlockIndex, build_index
from ringtile.index.build import BLOCKS
from ringtile.patterns import Causal, Pattern, parse
from ringtile.tools.plot import FORMATS, check_out, occupancy, picture, plot_pattern
from ringtile.tools.statistics import LongestList, PatternStatistics, pattern_statistics
from ringtile.tools.units import bytes_text, count, count_text, percent_text

_DRAWING_WIDTH = 48
_PAIRWISE_TOKENS = 4 * _DRAWING_WIDTH
"""The drawing shows pairs up to this length, tiles above it."""

_IN_ASCII = str.maketrans("·░▒▓█", ".:+x#")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help='such as "window(1024) | global_tokens(64)" or longformer')
    add("--tokens", type=count, required=True, metavar="N", help="number of queries, such as 16384, 16K or 1M")
    add("--keys", type=count, metavar="M", help="number of keys (default: N); the last query aligns with the last key")
    add("--causal", action="store_true", help="keep only keys at or before each query")
    add("--heads", type=count, metavar="H", help="number of heads (default: 1, or the heads of the pattern)")
    add("--head-dim", type=count, default=64, metavar="D", help="head dim for the operation counts (default: 64)")
    add("--block", type=int, default=128, choices=BLOCKS, help="tile side in tokens (default: 128)")
    add("--out", type=Path, metavar="FILE", help=f"also draw a picture into this file ({', '.join(FORMATS)})")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print a pattern and its statistics, and return 0."""
    rule = parse(args.pattern)
    if args.causal:
        rule = Causal() & rule
    check_out(args.out)
    heads = args.heads or rule.num_heads or 1
    began = time.perf_counter()
    index = build_index(rule, args.tokens, args.keys, num_heads=heads, block=args.block)
    seconds = time.perf_counter() - began
    statistics = pattern_statistics(index, num_heads=heads, head_dim=args.head_dim)
    if args.out is not None:
        _draw_picture(index, rule, args.out)
    if args.json:
        lists = {name: getattr(statistics, name)._asdict() for name in ("longest_row", "longest_column")}
        record = {"pattern": repr(rule), **asdict(statistics), **lists, "build_seconds": seconds}
        print(json.dumps({**record, "picture": args.out and str(args.out)}, indent=2))
        return 0
    print(repr(rule))
    drawing = _drawing(index, rule)
    try:
        drawing.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # Standard output cannot show the blocks.
        drawing = drawing.translate(_IN_ASCII)
    print(drawing)
    for label, text in _lines(statistics, seconds):
        print(f"{label:<16}{text}")
    if args.out is not None:
        print(f"{'picture':<16}{args.out}")
    return 0


def _drawing(index: BlockIndex, rule: Pattern) -> str:
    longest = max(index.n_queries, index.n_keys)
    # 48 characters show 192 tokens in cells of 4 x 4 pairs. Beyond that, a cell is a tile or several.
    if longest <= _PAIRWISE_TOKENS:
        side = -(-longest // _DRAWING_WIDTH)
        drawn, legend = rule.draw(index.n_queries, index.n_keys, width=_DRAWING_WIDTH), "· none, ▒ some, █ all"
    else:
        shares, side = occupancy(index, pixels=_DRAWING_WIDTH)
        # A window of a thousand tokens must stand out in a million.
        shade = torch.bucketize(shares, shares.new_tensor([0.0, 0.01, 0.25, 0.9999]))
        drawn = "\n".join("".join("·░▒▓█"[number] for number in line) for line in shade.tolist())
        legend = "· none, ░ up to 1%, ▒ up to 25%, ▓ more, █ all"
    of_head = "" if index.n_groups == 1 else "; head 0"
    per = "1 token" if side == 1 else f"{count_text(side)} tokens"
    return f"{drawn}\n(queries down, keys across, {per} per character: {legend}{of_head})"


def _lines(s: PatternStatistics, seconds: float) -> list[tuple[str, str]]:
    heads, over_heads = ("", "") if s.num_heads == 1 else (f", {s.num_heads} heads", " over all heads")
    kept = f"{s.kept_pairs:,} of {s.allowed_pairs:,} pairs{over_heads}"
    tiles = f"{s.full_tiles + s.partial_tiles:,} tiles computed{over_heads}, {s.partial_tiles:,} of them partial"
    tiles += f" with {s.distinct_partial_tiles:,} distinct masks"
    return [
        ("tokens", f"{s.n_queries:,} queries x {s.n_keys:,} keys, block {s.block}{heads}"),
        ("density", f"{percent_text(s.density)}  ({kept} that the causal and document rules allow)"),
        ("tile density", f"{percent_text(s.tile_density)}  ({tiles}); time follows this"),
        ("rows", _longest(s.longest_row, "row")),
        ("columns", _longest(s.longest_column, "column")),
        ("index", f"{bytes_text(s.index_bytes)} with its transpose, built in {seconds:.2f} s"),
        ("dense bool mask", f"{bytes_text(s.dense_mask_bytes)} (not built)"),
        ("forward", _operations(s.forward_flops, s.dense_forward_flops, s.head_dim)),
        ("backward", _operations(s.backward_flops, s.dense_backward_flops, s.head_dim)),
    ]


def _longest(longest: LongestList, name: str) -> str:
    return f"longest {longest.tiles:,} tiles ({name} tile {longest.tile:,}), mean {longest.mean:,.1f}"


def _operations(flops: int, dense: int, head_dim: int) -> str:
    # Computed tiles hold masked pairs, too, so a pattern that keeps nearly all can cost more than dense attention.
    share = f"{dense / flops:,.1f}x fewer than" if flops and dense > 1.05 * flops else "no fewer than"
    return f"{_si(flops)}FLOP at head_dim {head_dim}, {share} dense attention under the same rules ({_si(dense)}FLOP)"


def _si(number: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:g} "


def _draw_picture(index: BlockIndex, rule: Pattern, path: Path) -> None:
    with picture(path, 6.6, 6.2) as figure:
        axes = plot_pattern(index, figure.add_subplot())
        of_head = "" if index.n_groups == 1 else ", head 0"
        figures = (
            f"{count_text(index.n_queries)} queries x {count_text(index.n_keys)} keys, block {index.block}: "
            f"density {percent_text(index.density)}, tile density {percent_text(index.tile_density)}"
        )
        axes.set_title("\n".join([*textwrap.wrap(f"{rule!r}{of_head}", 64)[:4], figures]), fontsize=9.5)
        bar = figure.colorbar(axes.images[0], cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
        bar.set_label("share of pairs kept (colors on a square root scale)")
        bar.outline.set_visible(False)
