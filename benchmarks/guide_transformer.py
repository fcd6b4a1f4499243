"""The guide's transformer at its full size: 12 layers, 100,000 tokens, a tenth of the tiles.

    python benchmarks/guide_transformer.py forward              batch 4, without gradients
    python benchmarks/guide_transformer.py train                batch 1, one step, layers checkpointed

Each prints one JSON object: seconds, peak memory of the process, and the machine. First it compares sampled rows of one
attention call with float64. If they are wrong, it times nothing. ``--tokens``, ``--layers`` and ``--batch`` make it
smaller.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import BlockSparseRingMultiheadDilatedAttention, create_block_sparse_multihead_attention
from ringtile.kernels.reference import attention_rows
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin

WIDTH, HEADS, DENSITY = 512, 8, 0.1
CHECKED_ROWS, WORST_ERROR = 32, 1e-5


class Layer(nn.Module):
    """The guide's block: attention and a GELU layer, each added to the stream and then normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = create_block_sparse_multihead_attention(WIDTH, HEADS, DENSITY, "dilated_sparse", dropout=0.1)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x)[0])
        out: Tensor = self.norm2(x + self.ffn(x))
        return out


@torch.no_grad()
def error_of(module: BlockSparseRingMultiheadDilatedAttention, n_tokens: int) -> float:
    """Return the relative error of sampled rows of one call on random inputs, against float64."""
    q, k, v = torch.randn(3, 1, 1, n_tokens, WIDTH // HEADS).unbind()
    rows = torch.randperm(n_tokens)[:CHECKED_ROWS]
    exact, _ = attention_rows(q, k, v, module.pattern_generator.rule(n_tokens), rows)
    return relative_error(module.attention.attend(q, k, v)[:, :, rows], exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forward", "train"))
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, help="default 4 forward, 1 in training")
    args = parser.parse_args()
    trains = args.what == "train"
    batch = args.batch or (1 if trains else 4)

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = nn.Sequential(*[Layer() for _ in range(args.layers)]).train(trains)
        error = error_of(model[0].attention, args.tokens)
    if not error < WORST_ERROR:
        raise SystemExit(f"attention is wrong: relative error {error:.2g} over {CHECKED_ROWS} rows")
    x = torch.randn(batch, args.tokens, WIDTH)

    began = time.perf_counter()
    with torch.set_grad_enabled(trains):
        out = x
        for layer in model:
            out = checkpoint(layer, out, use_reentrant=False) if trains else layer(out)
    if trains:
        out.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    seconds = time.perf_counter() - began

    record = {
        "what": args.what,
        "tokens": args.tokens,
        "layers": args.layers,
        "batch": batch,
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "asked_density": DENSITY,
        "tile_density": 1 - model[0].attention.get_memory_info()["memory_reduction"],
        "rows_error": error,
        "finite": bool(out.isfinite().all()),
        "warnings": [str(warning.message) for warning in said],
        **origin(f"python benchmarks/guide_transformer.py {args.what}"),
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
