"""Check the promise of `Controller`, mode "call", on settings that are made to break it.

    python benchmarks/controller.py                                 1,000 settings, some minutes on one core
    python benchmarks/controller.py --models small_tasks/models     and heads of the models of benchmarks/small_tasks

The promise is about each head of a call: the rows that were not audited keep a mean part of their attention that is
expected to be at least ``quality``, over the draw of the audited rows. So exact attention in float64 judges these rows,
averaged over draws. A head whose average is below the target is judged again by more draws, which no earlier result
chose. It falls below if these miss the target by more than three standard errors. The share of single draws below the
target is printed, too: the promise allows them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from small_tasks.rows import Oracle
from small_tasks.tasks import Task
from small_tasks.trained import TASKS, Lab, Sweep
from torch import Generator, Tensor

from ringtile.adaptive import Blend, Controller, Means, Probe, Scores, Shuffled, Sum, View
from ringtile.adaptive.choice import forced_tiles
from ringtile.adaptive.view import base_index
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Pattern, Window

DRAWS, AGAIN = 8, 400
HELD_OUT_TASKS = ("mqar", "variables", "listops", "bytes")


class Reversed(Scores):
    """The best tiles last: the scores of an adversary."""

    def __call__(self, view: View) -> Tensor:
        found = Probe(8)(view)
        return view.normalized(found.amax(-1, keepdim=True) - found)


class Setting(NamedTuple):
    """A call, and what its controller must hold."""

    kind: str
    query: Tensor
    key: Tensor
    base: BlockIndex
    scores: Scores
    quality: float
    rows: int
    key_mask: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """The heads of a setting."""

    kind: str
    quality: float
    mean: Tensor
    """``[B, H]``: the part of the attention that rows keep if they are not audited, over draws."""
    error: Tensor
    """``[B, H]``: its standard error."""
    single: Tensor
    """Bool ``[draws, B, H]``: draws below the target."""
    density: float

    @property
    def below(self) -> Tensor:
        """Heads below the target, by more than the draws can explain."""
        return self.mean + 3 * self.error < self.quality - 1e-6


KINDS = ("noise", "heavy", "needles", "blocks", "sinks", "local", "rare", "unaudited", "idle", "mixed")


def head_of(kind: str, queries: int, keys: int, width: int, g: Generator) -> tuple[Tensor, Tensor]:
    """Return the queries and keys of a head, of a kind that scores or draws find hard."""
    q, k = (torch.randn(n, width, generator=g) for n in (queries, keys))
    at = torch.arange(queries) + max(keys - queries, 0)
    if kind == "heavy":
        k = k / torch.rand(keys, 1, generator=g).clamp(min=1e-3).sqrt()
    if kind == "needles":
        # A few rows want one key each, and the others are diffuse.
        some, places = torch.randint(queries, (queries // 20 + 1,), generator=g), torch.randint(keys, (1,), generator=g)
        q[some] = 4 * k[places] + 0.1 * q[some]
    if kind == "blocks":
        topic = torch.randn(8, width, generator=g)
        q, k = q + 3 * topic[at // 16 % 8], k + 2 * topic[torch.arange(keys) // 16 % 8]
    if kind == "sinks":
        q, k[:4] = q + 2, k[:4] + 2
    if kind in ("local", "rare", "unaudited"):
        wave = [
            f(torch.arange(max(queries, keys) + keys) * s)
            for s in (0.3, 0.1, 0.03, 0.01)
            for f in (torch.sin, torch.cos)
        ]
        place = 3 * torch.stack(wave, 1)[:, :width]
        q, k = 0.1 * q, 0.1 * k
        q[:, : place.shape[1]] += place[at]
        k[:, : place.shape[1]] += place[:keys]
    if kind == "rare":
        # Rows that see everything alike, between a share that the draw nearly never finds and one that it must.
        share = 10 ** (-2.5 * float(torch.rand(1, generator=g)))
        q = q * (torch.rand(queries, 1, generator=g) >= share)
    if kind == "unaudited":
        # An adversary who knows the rows of seed 0: the others are diffuse in a tenth of the cases.
        audited = torch.zeros(queries, 1)
        audited[torch.randperm(queries, generator=Generator().manual_seed(0))[:64]] = 1
        q = q * audited.maximum((torch.rand(queries, 1, generator=g) > 0.1).float())
    return (q * 0 if kind == "idle" else q), k


def drawn(number: int) -> Setting:
    """Return a setting of a number: lengths, heads, dtype, pairs, scores and target are drawn, too."""
    r, g = random.Random(number), Generator().manual_seed(number)
    kind = KINDS[number % len(KINDS)]
    keys = r.choice((65, 127, 200, 256, 333, 511))
    queries = r.choice((keys, keys, keys, keys // 2 + 1))
    width, kv_heads, each, batch = r.choice((8, 16, 32)), r.choice((1, 2)), r.choice((1, 2)), r.choice((1, 1, 2))
    heads, scale = kv_heads * each, r.choice((0.3, 1.0, 1.0, 3.0))
    q, k = torch.empty(batch, heads, queries, width), torch.empty(batch, kv_heads, keys, width)
    for b in range(batch):
        for h in range(heads):
            of = r.choice(KINDS) if kind == "mixed" else kind
            q[b, h], k[b, h // each] = head_of(of, queries, keys, width, g)
    dtype = r.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64))
    rule: Pattern | None = r.choice((Causal(), Causal(), None, Causal() & Window(90)))
    base = base_index(q, k, rule, False, 16)
    choices = [Sum(Probe(4), Blend()), Probe(2), Blend("mean"), Means(), Shuffled(number), Reversed()]
    key_mask = None
    if r.random() < 0.2:
        key_mask = (torch.arange(keys) >= torch.randint(keys // 3, (batch, 1), generator=g)).expand(batch, -1)
    elif base.leading is not None:
        choices.append(Oracle())
    quality, rows = r.choice(((0.95, 64), (0.95, 64), (0.95, 19), (0.9, 32), (0.8, 64), (0.99, 99)))
    return Setting(kind, (scale * q).to(dtype), k.to(dtype), base, r.choice(choices), quality, rows, key_mask)


class _Seen:
    """Attention that keeps the queries and keys of its calls."""

    def __init__(self, attend: object, calls: list[tuple[Tensor, Tensor]]) -> None:
        self.attend, self.calls = attend, calls

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *inputs: object, **options: object) -> Tensor:
        self.calls.append((query, key))
        return self.attend(query, key, value, *inputs, **options)  # type: ignore[operator,no-any-return]


def held_out(task: Task, folder: Path) -> Iterator[Setting]:
    """Return settings of the heads of a trained model, on sequences that it was not trained on."""
    from ringtile import sparse_attention

    lab = Lab(task, 0, Sweep((task,), (0,)), folder)
    calls: list[tuple[Tensor, Tensor]] = []
    lab.dense.attend_with([_Seen(sparse_attention, calls)] * task.layers)
    for x, y in lab.batches(8, 9):
        lab.dense(x, y != -100)
    lab.dense.attend_with([sparse_attention] * task.layers)
    base = build_index(Causal(), 1024, num_heads=2, block=16)
    for number, (query, key) in enumerate((q[i : i + 1], k[i : i + 1]) for q, k in calls for i in range(len(q))):
        scores = (Sum(Probe(4), Blend()), Blend(), Means(), Shuffled(number))[number % 4]
        yield Setting(f"held out: {task.name}", query, key, base, scores, 0.95, 64)


def exact_masses(setting: Setting) -> Tensor:
    """Return the attention of each row to each tile, float64 ``[B, H, Nq, C]``, 0 in rows without keys."""
    q, k, base = setting.query.double(), setting.key.double(), setting.base
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[3] ** -0.5
    pairs = base.to_dense()
    if setting.key_mask is not None:
        pairs = pairs & setting.key_mask[:, None, None]
    weights = logits.masked_fill(~pairs, -math.inf).softmax(-1).nan_to_num(0)
    return torch.nn.functional.pad(weights, (0, -weights.shape[3] % 16)).unflatten(3, (-1, 16)).sum(4)


def verdict(setting: Setting, seeds: range) -> Verdict:
    """Judge a setting by the draws of some seeds."""
    view = View(setting.query, setting.key, setting.base, setting.key_mask)
    scores, masses = setting.scores(view), exact_masses(setting)
    seen = (masses.sum(3) > 0.5).double()
    forced, row = forced_tiles(setting.base, 1, 1), setting.base.row_of(torch.arange(masses.shape[2]))
    found, density = [], 0.0
    for seed in seeds:
        controller = Controller(setting.quality, rows=setting.rows, seed=seed)
        tiles = controller.keep(view, scores, setting.base.tiles, forced)
        kept = (masses * tiles[:, :, row]).sum(3)
        audited = torch.randperm(masses.shape[2], generator=Generator().manual_seed(seed))[: setting.rows]
        rest = seen.index_fill(2, audited, 0)
        # If all rows were audited there is nothing to promise: they are judged themselves.
        rest = torch.where(rest.sum(2, keepdim=True) > 0, rest, seen)
        found.append(torch.where(rest.sum(2) > 0, (kept * rest).sum(2) / rest.sum(2).clamp(min=1), 1.0))
        assert controller.report is not None
        density += float(controller.report.density.mean()) / len(seeds)
    recall = torch.stack(found)
    single = recall < setting.quality - 1e-6
    error = recall.std(0) / len(seeds) ** 0.5
    return Verdict(setting.kind, setting.quality, recall.mean(0), error, single, density)


def judged(setting: Setting, draws: int = DRAWS, again: int = AGAIN) -> Verdict:
    """Judge a setting, and again by more draws if an average is below the target."""
    found = verdict(setting, range(draws))
    return verdict(setting, range(draws, draws + again)) if bool((found.mean < setting.quality).any()) else found


def main() -> None:
    """Print how many heads fall below their target, by kind, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=1000)
    parser.add_argument("--models", type=Path, help="folder of models of benchmarks/small_tasks, trained if missing")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    began = time.monotonic()
    theirs = [x for name in HELD_OUT_TASKS for x in held_out(TASKS[name], args.models)] if args.models else []
    found: dict[str, list[Verdict]] = {}
    for number in range(args.settings):
        setting = theirs[number] if number < len(theirs) else drawn(number)
        found.setdefault(setting.kind, []).append(judged(setting))
        if number % 50 == 49:
            print(f"{number + 1} of {args.settings} settings, {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"{'kind':<22}{'settings':>9}{'heads':>7}{'below':>7}{'worst margin':>14}{'draws below':>13}{'density':>9}")
    for kind, some in found.items():
        margin = min(float((each.mean - each.quality).min()) for each in some)
        below, heads = sum(int(each.below.any()) for each in some), sum(each.mean.numel() for each in some)
        single = sum(float(each.single.double().mean()) for each in some) / len(some)
        density = sum(each.density for each in some) / len(some)
        print(f"{kind:<22}{len(some):>9}{heads:>7}{below:>7}{margin:>+14.4f}{single:>13.1%}{density:>9.2f}")
    everything = [each for some in found.values() for each in some]
    print(
        f"{sum(bool(each.below.any()) for each in everything)} of {len(everything)} settings below their target, "
        f"worst margin {min(float((each.mean - each.quality).min()) for each in everything):+.4f}, "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
