"""Draw the pictures of docs/patterns: `python scripts/pictures.py` (all) or `python scripts/pictures.py window`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import matplotlib
import torch
from matplotlib.colors import LinearSegmentedColormap

from ringtile.index import build_index
from ringtile.patterns import (
    Blocks,
    Causal,
    Chosen,
    Documents,
    Elements,
    Pattern,
    Strided,
    Window,
    from_mask,
    parse,
    per_head,
)
from ringtile.tools.plot import picture, plot_pattern

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "patterns"
TOKENS = 2048
STAIRS = torch.tensor([[(row - col) % 5 == 0 or col == 0 for col in range(16)] for row in range(16)])


def log_sparse(head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Keys at distance 0 and the powers of two before the query."""
    distance = query - key
    return (distance >= 0) & (distance & (distance - 1) == 0)


def chosen(n: int, block: int) -> Pattern:
    """The pairs of lists of the n keys or blocks with the best of smooth scores, as a mask: lists have no tiles."""
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    scores = torch.sin(key / 53) * torch.cos(query / 211) + torch.sin(key / 17 + query / 97) - 2.0 * (key > query)
    indices = scores.double().unflatten(1, (-1, block)).amax(2).topk(n).indices
    lists = Causal() & Chosen(indices[None, None], block)
    return from_mask(lists.allowed(torch.tensor(0), query, key))


# Pages are white or dark, so the ink has the same contrast on both, and cells are translucent.
INK = "#768390"
SHADES = LinearSegmentedColormap.from_list("pages", [(0, "#76839022"), (0.01, "#3f8ccc90"), (1, "#3f8cccff")])
TEXT = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)

Panel = str | tuple[str, Pattern, int]
"""The text of a pattern, or a title, a pattern and the head to draw."""

PICTURES: dict[str, list[Panel]] = {
    "index": [
        "causal & window(256)",
        "causal & global_tokens(16)",
        "causal & random_blocks(2)",
        ("all three, joined with |", parse("causal & (window(256) | global_tokens(16) | random_blocks(2))"), 0),
    ],
    "dense-causal": ["dense", "causal"],
    "window": ["window(256)", "causal & window(256)"],
    "dilated": ["dilated([1, 8], 64)", "dilated([64], 8)"],
    "block-dilated": ["block_dilated([1, 4], 1)", "causal & block_dilated([1, 4], 2)"],
    "strided": ["strided(256)", "causal & strided(256)"],
    "global-tokens": ["global_tokens(64)", "causal & (window(256) | global_tokens(64))"],
    "random-blocks": [
        "random_blocks(2)",
        ("causal & random_blocks(2), head 1", parse("causal & random_blocks(2)"), 1),
    ],
    "sampled-blocks": ["sampled_blocks(1, 4, 512, block=64)", "sampled_blocks(1, 4, 256, 1024, block=64)"],
    "segments": [("segments(512, 4), head 0", parse("segments(512, 4)"), 0), "segments(512)"],
    "documents": [
        "documents([700, 300, 1048])",
        ("causal & the same", Causal() & Documents([700, 300, 1048]), 0),
    ],
    "blocks": [("Blocks(matrix)", Blocks(STAIRS), 0), ("causal & Blocks(matrix)", Causal() & Blocks(STAIRS), 0)],
    "chosen": [
        ("causal & Chosen(indices)", chosen(200, 1), 0),
        ("causal & Chosen(indices, block=64)", chosen(5, 64), 0),
    ],
    "neighborhood": [
        "neighborhood([16, 128], 9)",
        ("the same, in the order of tiles", parse("neighborhood([16, 128], 9)").in_tiles, 0),  # type: ignore[attr-defined]
        "neighborhood([32, 64], 5, dilation=4)",
        ("the same, in the order of tiles", parse("neighborhood([32, 64], 5, dilation=4)").in_tiles, 0),  # type: ignore[attr-defined]
    ],
    "elements": [
        ("Elements(log_sparse)", Elements(log_sparse), 0),
        ("Elements(log_sparse) | window(64, 0)", Elements(log_sparse) | Window(64, 0), 0),
    ],
    "presets": ["longformer(128, 64)", "bigbird(1)", "streaming(64, 256)", "longnet_union([256, 2048], [1, 4])"],
    "hierarchical": [
        ("hierarchical(256, 1024, block=32)", parse("hierarchical(256, 1024, block=32)"), 0),
        ("causal & the same", parse("causal & hierarchical(256, 1024, block=32)"), 0),
    ],
    "algebra": [
        "causal & ~window(255) | window(64)",
        ("per_head: head 0", Causal() & per_head([Window(128), Strided(512)]), 0),
        ("per_head: head 1", Causal() & per_head([Window(128), Strided(512)]), 1),
    ],
}


def draw(name: str, path: Path) -> None:
    """Draw one picture into a PNG."""
    panels = PICTURES[name]
    many = len(panels) > 2
    with picture(path, (1.9 if many else 2.6) * len(panels), 2.2 if many else 2.8) as figure:
        matplotlib.rcParams.update({"savefig.dpi": 115, "savefig.transparent": True, **TEXT})
        for number, panel in enumerate(panels):
            title, pattern, head = (panel, parse(panel), 0) if isinstance(panel, str) else panel
            index = build_index(pattern, TOKENS, num_heads=2)
            axes = plot_pattern(index, figure.add_subplot(1, len(panels), number + 1), head=head, pixels=256)
            axes.images[0].set_cmap(SHADES)
            axes.set_title(textwrap.fill(title, 24) if many else title, fontsize=8)
            if many:
                axes.set_xticks([0, 1024, 2048])
            axes.tick_params(labelsize=8)
            axes.set_xlabel("key position", fontsize=8.5)
            axes.set_ylabel("query position" if number == 0 else "", fontsize=8.5)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        draw(name, FOLDER / f"{name}.png")
