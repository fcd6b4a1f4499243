"""Attention over the patches of an image: each patch attends to its neighborhood in two dimensions.

    python examples/custom_rule.py --side 96 --radius 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile import build_index, sparse_attention
from ringtile.patterns import Elements, Pattern, Window


def neighborhood(side: int, radius: int) -> Pattern:
    """Keep the patches within a radius, in rows and in columns, of an image of side x side patches."""

    def close(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rows_apart = (query // side - key // side).abs()
        columns_apart = (query % side - key % side).abs()
        return (rows_apart <= radius) & (columns_apart <= radius)

    # Elements alone evaluates the rule on every pair. The window bounds the pairs to evaluate.
    return Window(radius * side + radius) & Elements(close)


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--radius", type=int, default=4)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    tokens = args.side**2

    # Build the pattern once: the index cache compares rules by identity.
    pattern = neighborhood(args.side, args.radius)
    index = build_index(pattern, tokens)
    print(f"{tokens:,} patches: {index.density:.1%} of the pairs, {index.tile_density:.1%} of the tiles")

    q, k, v = (torch.randn(1, 2, tokens, 64, requires_grad=True) for _ in range(3))
    out = sparse_attention(q, k, v, pattern)
    out.square().mean().backward()

    # Compare with a dense mask, which takes tokens x tokens bytes.
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=index.to_dense())
    difference = (out - expected).abs().max().item()
    print(f"largest difference to a dense mask: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
