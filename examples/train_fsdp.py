"""Train with two kinds of ranks at once: some share each sequence, and all share or copy the weights.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --cp 2 --shard hsdp --checkpoint --accumulate 2 --clip 1

Without torchrun, it is a single process.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringtile import SparseLanguageModel, SparseTransformer
from ringtile.distributed import Layout, ring_attend
from ringtile.patterns import GlobalTokens, Window

OPERATORS = torch.ops.ringtile
SAVED = OPERATORS.cast_start.default, OPERATORS.cast_bits.default


def save_received(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Recompute all but the keys and values of other ranks, so that they travel once."""
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def prepare(
    model: SparseLanguageModel, mesh: DeviceMesh, shard: str, checkpoints: str = "", backend: str = ""
) -> nn.Module:
    """Checkpoint and compile the layers, then give the ranks of a mesh (dp, cp) one set of weights."""
    for layer in model.transformer.layers:
        if checkpoints:
            policy = partial(create_selective_checkpoint_contexts, save_received)
            chosen = {"context_fn": policy} if checkpoints == "selective" else {}
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **chosen)
        if backend:
            layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    if shard == "ddp":
        return DistributedDataParallel(model)
    # HSDP cuts the weights over the ranks of a sequence, and copies them along dp. FSDP cuts them over all ranks.
    over = mesh if shard == "hsdp" else mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.transformer.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums over the ranks, not means. gloo cannot scale while it sums, so the second call.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def backward(
    model: nn.Module, batches: Sequence[Tensor], mesh: DeviceMesh, layout: Layout, dtype: torch.dtype | None = None
) -> Tensor:
    """Add up the gradients of micro-batches ``[B, N + 1]``, and return the loss of all of them in bits per byte.

    Each rank computes its rows of a batch, and of these its tokens.
    """
    (dp, cp), is_ddp = mesh.get_coordinate(), isinstance(model, DistributedDataParallel)
    positions = layout.positions(cp)
    # A mean over all tokens of all ranks and micro-batches. A mean per rank would depend on how tokens are dealt out.
    n_tokens = sum(rows[:, 1:].numel() for rows in batches)
    # DDP divides by the number of ranks.
    scale = mesh.size() if is_ddp else 1
    total = torch.zeros(())
    for number, rows in enumerate(batches, 1):
        if is_ddp:
            model.require_backward_grad_sync = number == len(batches)
        else:
            model.set_requires_gradient_sync(number == len(batches))
        mine = rows[dp :: mesh.size(0)]
        inputs, targets = (layout.shard(x, cp, dim=1) for x in (mine[:, :-1], mine[:, 1:]))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(inputs, positions=positions)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / n_tokens / math.log(2)
        (loss * scale).backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return total


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the bits per byte of the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="sequences per micro-batch (default: 2)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cp", type=int, help="ranks that share a sequence (default: all)")
    parser.add_argument("--shard", choices=("fsdp", "hsdp", "ddp"), default="fsdp")
    parser.add_argument("--checkpoint", choices=("plain", "selective"), nargs="?", const="selective", default="")
    parser.add_argument("--compile", nargs="?", const="inductor", default="", metavar="BACKEND")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (default: 1)")
    parser.add_argument("--clip", type=float, default=math.inf, help="largest norm of all gradients")
    options = parser.parse_args(argv)

    alone = "RANK" not in os.environ
    dist.init_process_group("gloo", **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}))
    cp = options.cp or dist.get_world_size()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)

    layout = Layout.contiguous(options.context, cp)
    attend = ring_attend(mesh["cp"], layout)
    pattern = Window(options.window) | GlobalTokens(4)
    layers = SparseTransformer(2, 128, 4, is_causal=True, pattern=pattern, attend=attend)
    model = prepare(SparseLanguageModel(256, layers), mesh, options.shard, options.checkpoint, options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    # Every rank draws the same rows, and takes its own.
    draws, within = torch.Generator().manual_seed(0), torch.arange(options.context + 1)
    dtype, loss = torch.bfloat16 if options.bf16 else None, torch.zeros(())
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        first = torch.randint(len(text) - options.context, (options.accumulate, options.batch, 1), generator=draws)
        optimizer.zero_grad()
        loss = backward(model, list(text[first + within]), mesh, layout, dtype)
        # The norm is over all ranks: sharded parameters know their mesh.
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        norm = getattr(norm, "full_tensor", lambda norm=norm: norm)()
        optimizer.step()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            print(f"step {step}: {loss:.3f} bits per byte, gradient norm {norm:.2f}, {seconds:.1f} s", flush=True)
    # DDP must not be the last to hold the group: it would wait for a thread that can wait for Python.
    del model, optimizer
    dist.destroy_process_group()
    return float(loss)


if __name__ == "__main__":
    main()
