"""The guide's transformer at its full size: 12 layers, 100,000 tokens, a tenth of the pairs.

    python benchmarks/guide_transformer.py forward              batch 4, without gradients
    python benchmarks/guide_transformer.py train                batch 1, one step, layers checkpointed

Each prints one JSON object: seconds, peak memory of the process (of the device on a GPU), and what it ran on. Sampled
rows of one attention call are compared with float64 first; where they are off, nothing is timed. ``--tokens``,
``--layers`` and ``--batch`` make it smaller.
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

from ringtile.compat import BlockSparseRingMultiheadDilatedAttention, create_block_sparse_multihead_attention
from ringtile.kernels.reference import attention_rows
from ringtile.measure.machine import commit, machine_facts, versions

WIDTH, HEADS = 512, 8
CHECKED_ROWS, WORST_ERROR = 32, 1e-5


class Layer(nn.Module):
    """The guide's block: attention and a GELU layer, each added to the stream and normalised after."""

    def __init__(self, density: float) -> None:
        super().__init__()
        self.attention = create_block_sparse_multihead_attention(
            embed_dim=WIDTH, num_heads=HEADS, sparsity_ratio=density, pattern_type="dilated_sparse", dropout=0.1
        )
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x)[0])
        out: Tensor = self.norm2(x + self.ffn(x))
        return out


def error_of(module: BlockSparseRingMultiheadDilatedAttention, n_tokens: int, device: torch.device) -> float:
    """Relative error of sampled rows of one call on random inputs, against float64."""
    q, k, v = torch.randn(3, 1, 1, n_tokens, WIDTH // HEADS, device=device).unbind()
    rows = torch.randperm(n_tokens, device=device)[:CHECKED_ROWS]
    with torch.no_grad():
        out = module.attention.attend(q, k, v)[:, :, rows].double()
    exact, _ = attention_rows(q, k, v, module.pattern_generator.rule(n_tokens), rows)
    return ((out - exact).norm() / exact.norm()).item()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forward", "train"))
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, help="default 4 forward, 1 in training")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    trains = args.what == "train"
    batch = args.batch or (1 if trains else 4)

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = nn.Sequential(*[Layer(args.density) for _ in range(args.layers)]).to(args.device).train(trains)
        error = error_of(model[0].attention, args.tokens, args.device)
    if not error < WORST_ERROR:
        raise SystemExit(f"attention is wrong: relative error {error:.2g} over {CHECKED_ROWS} rows")
    x = torch.randn(batch, args.tokens, WIDTH, device=args.device)

    began = time.perf_counter()
    if trains:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        out = x
        for layer in model:
            out = checkpoint(layer, out, use_reentrant=False)
        out.square().mean().backward()
        optimizer.step()
    else:
        with torch.no_grad():
            out = model(x)
    if args.device.type == "cuda":
        torch.cuda.synchronize(args.device)
    seconds = time.perf_counter() - began

    memory = model[0].attention.get_memory_info()
    record = {
        "what": args.what,
        "tokens": args.tokens,
        "layers": args.layers,
        "batch": batch,
        "seconds": seconds,
        "peak_bytes": peak_bytes(args.device),
        "asked_density": args.density,
        "tile_density": 1 - memory["memory_reduction"],
        "rows_error": error,
        "finite": bool(out.isfinite().all()),
        "warnings": [str(warning.message) for warning in said],
        "versions": versions(),
        "machine": machine_facts(),
        "commit": commit(),
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
