"""Train on if a rank is lost: a checkpoint continues on another number of ranks, with another layout.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/train_elastic.py run/ --fail-at 6

The same command continues what is saved in run/. Without torchrun, it is a single process.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from train_fsdp import backward, prepare

from ringtile import SparseLanguageModel, SparseTransformer
from ringtile.distributed import Layout, ring_attention, watch
from ringtile.patterns import parse

LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
Fact = int | str


def newest(folder: Path) -> Path | None:
    """Return the last complete checkpoint. The file .metadata is written last."""
    return max((path.parent for path in folder.glob("*/.metadata")), key=lambda path: int(path.name), default=None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, layout: Layout, run: dict[str, Fact], number: int, **options: Any
) -> Any:
    """Drop attention weights by step, layer and positions, so that ranks and layouts do not matter."""
    seed = int(run["seed"]) + 1000 * int(run["step"]) + number
    return ring_attention(query, key, value, layout=layout, seed=seed, **{**options, "dropout_p": 0.1})


def train(options: argparse.Namespace) -> dict[int, float]:
    """Continue the newest checkpoint to the last step. Return the bits per byte of each step from there on."""
    ranks, folder = dist.get_world_size(), options.folder
    is_first, saved = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0, newest(folder)
    # All that a run is, besides its weights. Ranks and layout are not: each start plans for the ranks that it has.
    run: dict[str, Fact] = {"step": 0, "position": 0, "seed": options.seed, "pattern": options.pattern}
    if saved:
        facts = {"run": run}
        dcp.load(facts, checkpoint_id=saved)
        run = facts["run"]
    torch.manual_seed(int(run["seed"]))
    layout = LAYOUTS[options.layout](options.context, ranks)
    layers = SparseTransformer(2, 64, 4, is_causal=True, pattern=parse(str(run["pattern"])))
    for number, layer in enumerate(layers.layers):
        layer.attend = partial(attend, layout=layout, run=run, number=number)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
    model = prepare(SparseLanguageModel(256, layers).to(options.dtype), mesh, "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        state = {"weights": weights, "moments": moments}
        dcp.load(state, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    losses: dict[int, float] = {}
    while int(run["step"]) < options.steps:
        run["step"] = step = int(run["step"]) + 1
        if is_first and step == options.fail_at and dist.get_rank() == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        first = int(run["position"])
        run["position"] = (first + options.context) % (len(text) - options.context)
        optimizer.zero_grad()
        losses[step] = float(backward(model, [text[None, first : first + options.context + 1]], mesh, layout))
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} on {ranks} ranks: {losses[step]:.6f} bits per byte", flush=True)
        if step % options.every == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"run": run, "weights": weights, "moments": moments}, checkpoint_id=folder / str(step))
    return losses


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train, and return the bits per byte of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the checkpoints, which all ranks can read")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--pattern", default="window(1024) | global_tokens(4)", help="of a new run")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of a new run")
    parser.add_argument("--fail-at", type=int, default=0, metavar="STEP", help="kill the last rank, once")
    parser.add_argument("--silence", type=float, default=5.0, help="seconds until a rank is lost (default: 5)")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default="float32")
    options = parser.parse_args(argv)

    alone = "RANK" not in os.environ
    dist.init_process_group("gloo", **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}))
    watch(silence=options.silence, exit_at_once=True)
    if not alone:
        # torchrun ends the others as soon as a rank dies. The watcher ends them as well, but says first which died.
        signal.signal(signal.SIGTERM, lambda *_: threading.Timer(2 * options.silence, os._exit, [1]).start())
    losses = train(options)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
