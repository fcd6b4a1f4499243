"""`ringtile show`: one pattern at one length, drawn and counted."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ringtile.analysis.plot import FORMATS, count_text, missing_matplotlib, occupancy, picture, plot_pattern
from ringtile.analysis.statistics import LongestList, PatternStatistics, pattern_statistics
from ringtile.layout import BlockIndex, build_index
from ringtile.layout.build import BLOCKS
from ringtile.patterns import Causal, Pattern, parse

_DRAWING_WIDTH = 48
_PAIRWISE_TOKENS = 4 * _DRAWING_WIDTH
"""Up to this length the drawing is of pairs, above it of tiles."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` needs."""
    parser.add_argument("pattern", metavar="PATTERN", help='such as "window(1024) | global_tokens(64)" or longformer')
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="number of queries")
    parser.add_argument(
        "--keys", type=int, metavar="M", help="number of keys, default N; the last query is at the last"
    )
    parser.add_argument("--causal", action="store_true", help="keep only keys at or before each query")
    parser.add_argument("--heads", type=int, metavar="H", help="default 1, or as the pattern is written")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="for the operation counts; default 64")
    parser.add_argument("--block", type=int, default=128, choices=BLOCKS, help="tokens along a tile; default 128")
    parser.add_argument("--out", type=Path, metavar="PNG", help=f"draw a picture into this file ({', '.join(FORMATS)})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print what a pattern keeps and costs; 0. Raises ValueError for a pattern, length or file that cannot be."""
    rule = parse(args.pattern)
    if args.causal:
        rule = Causal() & rule
    if args.out is not None:
        if args.out.suffix not in FORMATS:
            raise ValueError(f"--out: expected a file name ending in {', '.join(FORMATS)}, got {str(args.out)!r}")
        if (reason := missing_matplotlib()) is not None:
            raise ValueError(f"--out: {reason}")
    if args.tokens < 1 or (args.keys is not None and args.keys < 1):
        raise ValueError(f"--tokens, --keys: expected positive numbers, got {args.tokens} and {args.keys}")
    heads = args.heads if args.heads is not None else rule.n_heads or 1
    began = time.perf_counter()
    index = build_index(rule, args.tokens, args.keys, heads=heads, block=args.block)
    seconds = time.perf_counter() - began
    statistics = pattern_statistics(index, heads=heads, head_dim=args.head_dim)
    if args.out is not None:
        _draw_picture(index, rule, args.out)
    if args.json:
        record = {"pattern": repr(rule), **asdict(statistics), "build_seconds": seconds}
        for name in ("longest_row", "longest_column"):
            record[name] = record[name]._asdict()
        record["picture"] = None if args.out is None else str(args.out)
        print(json.dumps(record, indent=2))
        return 0
    print(repr(rule))
    print(_drawing(index, rule))
    for label, text in _lines(statistics, seconds):
        print(f"{label:<16}{text}")
    if args.out is not None:
        print(f"{'picture':<16}{args.out}")
    return 0


def _drawing(index: BlockIndex, rule: Pattern) -> str:
    of_head = "" if index.n_groups == 1 else "; head 0"
    longest = max(index.n_queries, index.n_keys)
    if longest <= _PAIRWISE_TOKENS:
        side = -(-longest // _DRAWING_WIDTH)
        drawn, legend = rule.draw(index.n_queries, index.n_keys, width=_DRAWING_WIDTH), "· none, ▒ some, █ all"
    else:
        shares, side = occupancy(index, pixels=_DRAWING_WIDTH)
        drawn, legend = _shaded(shares), "· none, ░ up to 1 %, ▒ up to 25 %, ▓ more, █ all"
    return f"{drawn}\n(queries down, keys across, {count_text(side)} tokens a character: {legend}{of_head})"


def _shaded(shares: Tensor) -> str:
    """One character a share; a window of a thousand tokens still stands out in a million."""
    shade = torch.bucketize(shares, torch.tensor([0.0, 0.01, 0.25]))
    shade[shares >= 0.9999] = 4
    return "\n".join("".join("·░▒▓█"[number] for number in line) for line in shade.tolist())


def _lines(s: PatternStatistics, seconds: float) -> list[tuple[str, str]]:
    heads = "" if s.heads == 1 else f", {s.heads} heads"
    per_head = "" if s.heads == 1 else " over all heads"
    kept = f"{s.kept_pairs:,} of {s.allowed_pairs:,} pairs{per_head}"
    tiles = f"{s.full_tiles + s.partial_tiles:,} tiles computed{per_head}, {s.partial_tiles:,} of them partial"
    tiles += f" with {s.distinct_partial_tiles:,} distinct masks"
    return [
        ("tokens", f"{s.n_queries:,} queries x {s.n_keys:,} keys, block {s.block}{heads}"),
        ("density", f"{_percent(s.density)}  ({kept} that the causal and document rules allow)"),
        ("tile density", f"{_percent(s.tile_density)}  ({tiles}); time follows this"),
        ("rows", _longest(s.longest_row, "row")),
        ("columns", _longest(s.longest_column, "column")),
        ("index", f"{_bytes(s.index_bytes)} with its transpose, built in {seconds:.2f} s"),
        ("dense bool mask", f"{_bytes(s.dense_mask_bytes)} (not made)"),
        ("forward", _operations(s.forward_flops, s.dense_forward_flops, s.head_dim)),
        ("backward", _operations(s.backward_flops, s.dense_backward_flops, s.head_dim)),
    ]


def _percent(share: float) -> str:
    return f"{share:.3g}".rstrip("0") if share == 0 else f"{100 * share:.3g} %"


def _longest(longest: LongestList, name: str) -> str:
    return f"longest {longest.tiles:,} tiles ({name} tile {longest.tile:,}), mean {longest.mean:,.1f}"


def _operations(flops: int, dense: int, head_dim: int) -> str:
    share = f"{dense / flops:,.1f}x fewer than" if flops and dense > 1.05 * flops else "no fewer than"
    return f"{_si(flops)}FLOP at head_dim {head_dim}, {share} dense attention under the same rules ({_si(dense)}FLOP)"


def _si(number: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:g} "


def _bytes(number: int) -> str:
    """Bytes in binary units.

    >>> _bytes(512), _bytes(3 << 20), _bytes(1 << 40)
    ('512 B', '3.0 MiB', '1.0 TiB')
    """
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _draw_picture(index: BlockIndex, rule: Pattern, path: Path) -> None:
    with picture(path, 6.6, 6.2) as figure:
        axes = plot_pattern(index, figure.add_subplot())
        of_head = "" if index.n_groups == 1 else ", head 0"
        figures = (
            f"{count_text(index.n_queries)} queries x {count_text(index.n_keys)} keys, block {index.block}: "
            f"density {_percent(index.density)}, tile density {_percent(index.tile_density)}"
        )
        axes.set_title("\n".join([*textwrap.wrap(f"{rule!r}{of_head}", 64)[:4], figures]), fontsize=9.5)
        bar = figure.colorbar(axes.images[0], cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
        bar.set_label("share of pairs kept (colours on a square root scale)")
        bar.outline.set_visible(False)
