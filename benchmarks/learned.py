"""Compare learned scores of tiles with the scores that they start as, on text and tasks that they never saw.

    python benchmarks/learned.py heads MODEL                gates distilled on the heads of a decoder, at 25% density
    python benchmarks/learned.py mqar --seeds 0 1 2         gates that learn with their model, from scratch

MODEL is a folder of transformers or a GGUF file. Gates train on the calibration texts of `ringtile quality`, other
modules' sources decide when they stop, and both are judged on texts that neither saw.

The task of ``mqar`` is multi-query associative recall (Arora et al., arXiv:2312.04927): 256 tokens, 32 pairs, tiles of
16 tokens, 25% of the tiles of each row. All rows train for the same steps, from the same start: embeddings whose halves
are equal, keys that read the token before, and query maps equal to key maps, with noise of the same size.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringtile import SparseTransformer, sparse_attention
from ringtile.adaptive import (
    AdaptiveAttention,
    Blend,
    Density,
    Gate,
    Probe,
    RoutedAttention,
    Scores,
    Shuffled,
    Sum,
    audit,
    distill,
    select,
)
from ringtile.patterns import Causal

VOCABULARY, TOKENS, PAIRS, BLOCK, WIDTH, HEADS, LAYERS = 256, 256, 32, 16, 64, 2, 2
BUDGET = Density(0.25)
Sample = tuple[Tensor, Tensor]


def distinct(batch: int, count: int, of: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, of, generator=generator).argsort(1)[:, :count]


def mqar(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens, and the value after each query of the second half, -1 elsewhere."""
    half = TOKENS // 2
    x = torch.randint(128, VOCABULARY, (batch, TOKENS), generator=generator)
    keys = distinct(batch, PAIRS, 128, generator)
    values = torch.randint(128, VOCABULARY, (batch, PAIRS), generator=generator)
    at = distinct(batch, PAIRS, half // 2, generator) * 2
    x.scatter_(1, at, keys).scatter_(1, at + 1, values)
    asked = half + distinct(batch, PAIRS, half // 2, generator) * 2
    x.scatter_(1, asked, keys).scatter_(1, asked + 1, values)
    return x, torch.full_like(x, -1).scatter_(1, asked, values)


class Recaller(nn.Module):
    """A small decoder that starts near an induction head, with chance accuracy."""

    def __init__(self, attend: list[Callable[..., Any]]) -> None:
        super().__init__()
        half, head_dim = WIDTH // 2, WIDTH // HEADS
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = SparseTransformer(
            LAYERS, WIDTH, HEADS, hidden_dim=WIDTH, rotary=False, is_causal=True, attend=attend
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            self.embedding.weight[:, half:] = self.embedding.weight[:, :half]
            nn.init.normal_(self.head.weight, std=0.125)
            for layer in self.layers.layers:
                q, k, v = layer.qkv.weight.split(WIDTH)
                for weight in (q, k, v, layer.output.weight):
                    nn.init.normal_(weight, std=WIDTH**-0.5)
                nn.init.normal_(layer.down.weight, std=0.02)
                for rows in torch.arange(WIDTH).split(head_dim):
                    same, moved = (torch.linalg.qr(torch.randn(half, half))[0][:head_dim] for _ in range(2))
                    q[rows, :half] += same
                    k[rows, half:] += same
                    v[rows, :half] += moved
                    layer.output.weight[:half, rows] += 2 / HEADS * moved.T

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        now, before = x.chunk(2, 2)
        # The second half of the width is that of the token before.
        out: Tensor = self.head(self.layers(torch.cat((now, F.pad(before, (0, 0, 1, 0))[:, :-1]), 2)))
        return out


def attention(name: str) -> Callable[..., Any]:
    def adaptive(scores: Scores) -> AdaptiveAttention:
        return AdaptiveAttention(scores, BUDGET, block=BLOCK, first=0, local=0, allow_future=True)

    match name:
        case "dense":
            return sparse_attention
        case "random":
            return adaptive(Shuffled())
        case "blend, tiles":
            return adaptive(Blend())
        case "blend, queries":
            return adaptive(Blend(None))
    gate = Gate(HEADS, WIDTH // HEADS, pool="max" if name == "gate, tiles" else None)
    straight = "straight-through" in name
    return RoutedAttention(
        gate, BUDGET, rows=32, straight_through=straight, block=BLOCK, first=0, local=0, allow_future=True
    )


def recall_of(name: str, seed: int, steps: int, rate: float = 3e-3) -> tuple[float, float]:
    """Train from scratch, and return the accuracy on 1,024 new answers and the tile density of the attention."""
    torch.manual_seed(seed)
    attend = [attention(name) for _ in range(LAYERS)]
    torch.manual_seed(seed)
    model = Recaller(attend)
    learned = [each for each in attend if isinstance(each, RoutedAttention)]
    gates = [x for each in learned for x in each.parameters()]
    numbers = {id(x) for x in gates}
    others = [x for x in model.parameters() if id(x) not in numbers]
    optimizer = torch.optim.AdamW([{"params": others}], rate, betas=(0.9, 0.98), weight_decay=0.0)
    if gates:
        optimizer.add_param_group({"params": gates, "lr": 1e-2})
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        for group, full in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = full * min(1, (step + 1) / 20)
        x, y = mqar(16, generator)
        loss = F.cross_entropy(model(x)[y >= 0], y[y >= 0])
        if name != "gate, straight-through alone":
            loss = loss + sum(each.loss for each in learned)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        optimizer.step()
    x, y = mqar(32, torch.Generator().manual_seed(77))
    densities = []

    def watch(module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        densities.append(module.index(*inputs[:2], options["pattern"], is_causal=options["is_causal"]).tile_density)

    for each in attend:
        if isinstance(each, AdaptiveAttention):
            each.register_forward_pre_hook(watch, with_kwargs=True)
    with torch.no_grad():
        accuracy = (model.eval()(x).argmax(2) == y)[y >= 0].float().mean()
    return float(accuracy), statistics.mean(densities or [1.0])


NAMES = (
    "dense",
    "random",
    "blend, tiles",
    "blend, queries",
    "gate, tiles",
    "gate, queries",
    "gate, straight-through too",
    "gate, straight-through alone",
)


def train(args: argparse.Namespace) -> None:
    print("accuracy of each seed, tile density of the attention, seconds of CPU per seed")
    for name in args.only or NAMES:
        begin = time.process_time()
        found, densities = zip(*(recall_of(name, seed, args.steps) for seed in args.seeds), strict=True)
        seconds = (time.process_time() - begin) / len(found)
        spread = statistics.stdev(found) if len(found) > 1 else math.nan
        each = " ".join(f"{x:.3f}" for x in found)
        figures = f"{statistics.mean(found):.3f} +- {spread:.3f}   {each}   {statistics.mean(densities):.2f}"
        print(f"{name:30} {figures}   {seconds:.0f}", flush=True)


def captured(decoder: Any, ids: Tensor, layers: list[int]) -> list[Sample]:
    from ringtile.integrations.transformers import use_ringtile

    found: list[Sample] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        found.append((query.float(), key.float()))
        out: Tensor = sparse_attention(query, key, value, **options)
        return out

    use_ringtile(decoder.model, attend=[attend if layer in layers else None for layer in range(decoder.layers)])
    decoder.run(ids[None])
    return found


def pieces(decoder: Any, kind: str, count: int) -> Iterator[Tensor]:
    drawn, ids = random.Random(kind), decoder.texts.tokens(kind)
    for _ in range(count):
        at = drawn.randrange(len(ids) - decoder.n_tokens + 1)
        yield ids[at : at + decoder.n_tokens]


def kept(scores: Scores, samples: list[Sample]) -> float:
    """Mean recall of some rows."""
    found = []
    for query, key in samples:
        index = select(query, key, scores, BUDGET, base=Causal(), block=32)
        found.append(audit(query, key, key, index, rows=256).mean)
    return statistics.mean(found)


def judge(args: argparse.Namespace) -> None:
    from ringtile.tools.quality.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(args.model, args.tokens)
    parts = {"samples": [("calibration", 8)], "held out": [("code", 3)], "unseen": [("manual", 2), ("readme", 2)]}
    texts = {
        name: [captured(decoder, ids, args.layers) for kind, count in part for ids in pieces(decoder, kind, count)]
        for name, part in parts.items()
    }
    print("mean recall at 25% on texts that nothing was trained on or stopped by")
    print("layer  rows     untrained   gate   default, first row   steps")
    for place, layer in enumerate(args.layers):
        samples, held_out, unseen = ([text[place] for text in texts[name]] for name in parts)
        for pool in ("max", None):
            gate = Gate(decoder.heads, samples[0][0].shape[3], num_kv_heads=decoder.key_heads, pool=pool)
            found = distill(gate, samples, held_out, base=Causal(), block=32)
            others = [kept(scores, unseen) for scores in (Blend(pool), gate, Sum(Probe(), Blend()), Probe("first"))]
            rows = "tiles" if pool else "queries"
            print(f"{layer:5}  {rows:8}", " ".join(f"{x:9.4f}" for x in others), f"{found.step:6}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default: 1)")
    commands = parser.add_subparsers(required=True)
    heads = commands.add_parser("heads", help="distill gates on the heads of a decoder")
    heads.add_argument("model", help="a folder of transformers, or a GGUF file")
    heads.add_argument("--tokens", type=int, default=2048, help="per text (default: 2048)")
    heads.add_argument("--layers", type=int, nargs="+", default=[2, 9, 16], help="(default: 2 9 16)")
    heads.set_defaults(run=judge)
    task = commands.add_parser("mqar", help="train from scratch on multi-query associative recall")
    task.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    task.add_argument("--steps", type=int, default=300, help="(default: 300)")
    task.add_argument("--only", nargs="+", choices=NAMES, help="rows to run (default: all)")
    task.set_defaults(run=train)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()
