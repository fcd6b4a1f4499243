"""Draw the pictures of docs/patterns: `python scripts/pictures.py` (all) or `python scripts/pictures.py window`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch

from ringtile.analysis.plot import picture, plot_pattern
from ringtile.layout import build_index
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Segments,
    Strided,
    Window,
    bigbird,
    longformer,
    longnet_union,
    per_head,
    streaming,
)

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "patterns"
TOKENS = 2048
STAIRS = torch.tensor([[(row - col) % 5 == 0 or col == 0 for col in range(16)] for row in range(16)])


def log_sparse(head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Keys at distance 0 and the powers of two before the query."""
    distance = query - key
    return (distance >= 0) & (distance & (distance - 1) == 0)


Panel = tuple[str, Pattern, int]
"""Title, pattern, and the head that is drawn."""

PICTURES: dict[str, list[Panel]] = {
    "dense-causal": [("dense", Dense(), 0), ("causal", Causal(), 0)],
    "window": [("window(256)", Window(256), 0), ("causal & window(256)", Causal() & Window(256), 0)],
    "dilated": [("dilated([1, 8], 64)", Dilated([1, 8], 64), 0), ("dilated([64], 8)", Dilated([64], 8), 0)],
    "block-dilated": [
        ("block_dilated([1, 4], 1)", BlockDilated([1, 4], 1), 0),
        ("causal & block_dilated([1, 4], 2)", Causal() & BlockDilated([1, 4], 2), 0),
    ],
    "strided": [("strided(256)", Strided(256), 0), ("causal & strided(256)", Causal() & Strided(256), 0)],
    "global-tokens": [
        ("global_tokens(64)", GlobalTokens(64), 0),
        ("causal & (window(256) | global_tokens(64))", Causal() & (Window(256) | GlobalTokens(64)), 0),
    ],
    "random-blocks": [
        ("random_blocks(2)", RandomBlocks(2), 0),
        ("causal & random_blocks(2), head 1", Causal() & RandomBlocks(2), 1),
    ],
    "segments": [("segments(512, 4), head 0", Segments(512, 4), 0), ("segments(512)", Segments(512), 0)],
    "documents": [
        ("documents([700, 300, 1048])", Documents([700, 300, 1048]), 0),
        ("causal & the same", Causal() & Documents([700, 300, 1048]), 0),
    ],
    "blocks": [("Blocks(matrix)", Blocks(STAIRS), 0), ("causal & Blocks(matrix)", Causal() & Blocks(STAIRS), 0)],
    "elements": [
        ("Elements(log_sparse)", Elements(log_sparse), 0),
        ("Elements(log_sparse) | window(64, 0)", Elements(log_sparse) | Window(64, 0), 0),
    ],
    "presets": [
        ("longformer(128, 64)", longformer(128, 64), 0),
        ("bigbird(1)", bigbird(1), 0),
        ("streaming(64, 256)", streaming(64, 256), 0),
        ("longnet_union([256, 2048], [1, 4])", longnet_union([256, 2048], [1, 4]), 0),
    ],
    "algebra": [
        ("causal & ~window(255) | window(64)", Causal() & ~Window(255) | Window(64), 0),
        ("per_head: head 0", Causal() & per_head([Window(128), Strided(512)]), 0),
        ("per_head: head 1", Causal() & per_head([Window(128), Strided(512)]), 1),
    ],
}


def draw(name: str, path: Path) -> None:
    """Draw one picture into a PNG."""
    panels = PICTURES[name]
    with picture(path, 2.6 * len(panels), 2.8) as figure:
        matplotlib.rcParams["savefig.dpi"] = 115
        for number, (title, pattern, head) in enumerate(panels):
            index = build_index(pattern, TOKENS, heads=2)
            axes = plot_pattern(index, figure.add_subplot(1, len(panels), number + 1), head=head, pixels=256)
            axes.set_title(title, fontsize=8)
            axes.tick_params(labelsize=7)
            axes.set_xlabel("key position", fontsize=8)
            axes.set_ylabel("query position" if number == 0 else "", fontsize=8)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        draw(name, FOLDER / f"{name}.png")
