"""Train on one long sequence that several processes share. Each holds a part of the tokens.

    torchrun --nproc-per-node 4 examples/train_ranks.py --context 65536 --window 1024

Without torchrun, it is a single process.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringtile import SparseLanguageModel, SparseTransformer
from ringtile.distributed import Layout, ring_attend
from ringtile.patterns import GlobalTokens, Window


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the bits per byte of the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(argv)

    alone = "RANK" not in os.environ
    dist.init_process_group("gloo", **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    # Every rank makes the same model and the same layout, and takes its own tokens.
    layout = Layout.contiguous(options.context, ranks)
    pattern = Window(options.window) | GlobalTokens(4)
    layers = SparseTransformer(2, 128, 4, is_causal=True, pattern=pattern, attend=ring_attend(None, layout))
    model = SparseLanguageModel(256, layers)
    positions = layout.positions(rank)
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()

    def shared_loss(tokens: Tensor) -> Tensor:
        inputs, targets = (layout.shard(x, rank, dim=0) for x in (tokens[:-1], tokens[1:]))
        logits = model(inputs[None], positions=positions)[0]
        # A sum over the rank's tokens, divided by all tokens: gradients then add up over the ranks.
        return F.cross_entropy(logits, targets, reduction="sum") / options.context / math.log(2)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = torch.zeros(())
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        first = int(torch.randint(len(text) - options.context, ()))
        loss = shared_loss(text[first : first + options.context + 1])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: {total:.3f} bits per byte, {time.perf_counter() - began:.1f} s", flush=True)
    dist.destroy_process_group()
    return float(total)


if __name__ == "__main__":
    main()
