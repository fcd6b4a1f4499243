"""Measure what fixed patterns keep of a decoder's quality, as they are and after some steps of LoRA.

    python benchmarks/patterns.py --model MODEL.gguf --text texts           each pattern at 25%, 10% and 5%
    python benchmarks/patterns.py --model MODEL.gguf --text texts --lora 100 --densities 0.1
    python benchmarks/patterns.py --page                                    docs/pattern-quality.md and its picture

The sequences and figures are those of ``ringtile quality``: a text, a far copy and far needles, as parts of what dense
attention keeps. The width of a pattern is the largest whose density at ``--tokens`` is at most the one that is asked
for. LoRA trains on texts of your Python, which are none of those that judge. A run adds to the file of ``--out``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pages import Code, Part, Picture, Table, filled, markdown
from torch import Tensor

from ringtile.integrations.transformers import use_ringtile
from ringtile.patterns import (
    Causal,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Window,
    bigbird,
    longformer,
    longnet_union,
    streaming as sinks_and_window,
)
from ringtile.tools.machine import origin
from ringtile.tools.progress import Progress
from ringtile.tools.quality.cells import DENSE, Record as QualityRecord
from ringtile.tools.quality.decoder import Decoder
from ringtile.tools.quality.leg import Leg
from ringtile.tools.quality.texts import Texts
from ringtile.tools.record import write_whole
from ringtile.tools.timing import interleaved, seconds_of
from ringtile.tools.units import count

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "benchmarks" / "records" / "patterns.json"
ADAPTIVE = ROOT / "benchmarks" / "records" / "quality.json"
PAGE = ROOT / "docs" / "pattern-quality.md"
PICTURE = ROOT / "docs" / "assets" / "pattern-quality.png"
DENSITIES = (0.25, 0.1, 0.05)
KEPT = ("text", "copy", "needles")


def readme(width: int) -> Pattern:
    """Return the first pattern of README, with its two random blocks half as long as its window, as they are there."""
    blocks = RandomBlocks(2, block=max(16, 1 << width.bit_length() - 1 >> 1))
    return Causal() & (Window(width) | GlobalTokens(16) | blocks)


def longnet(width: int, n_tokens: int) -> Pattern:
    """Return LongNet's branches from segments of ``width`` tokens on, twice as long and as thin each, up to all."""
    branches = max(1, (n_tokens // width).bit_length())
    return Causal() & longnet_union([width << i for i in range(branches)], [1 << i for i in range(branches)])


FAMILIES: dict[str, Callable[[int, int], Pattern]] = {
    "window": lambda width, _: Causal() & Window(width),
    "window and 4 sinks": lambda width, _: sinks_and_window(4, width),
    "longformer": lambda width, _: Causal() & longformer(width, 64),
    "bigbird": lambda width, _: Causal() & bigbird(max(1, width // 64), width, 16),
    "README's union": lambda width, _: readme(width),
    "LongNet": longnet,
}


def at_density(family: str, density: float, n_tokens: int) -> Pattern:
    """Return the widest pattern of a family whose density is at most the one that is asked for.

    Raises ValueError if the narrowest one keeps more.
    """
    low, high = 1, n_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if FAMILIES[family](middle, n_tokens).density(n_tokens) <= density else (low, middle - 1)
        )
    found = FAMILIES[family](low, n_tokens)
    if found.density(n_tokens) > density:
        raise ValueError(f"density: expected at least {found.density(n_tokens):.3f} of {family}, got {density}")
    return found


def train(model: Any, rows: list[Tensor], steps: int, show: Callable[[int, float], None]) -> Any:
    """Return the model with adapters that have learned the next token of rows ``[1, N]``, one per step."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=projections))
    optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], 5e-4)
    adapted.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            # The rate falls to 0, so that the figures do not depend on the last rows.
            group["lr"] = 5e-4 * min(1 - step / steps, (step + 1) / 10)
        ids = rows[step % len(rows)]
        loss = adapted(ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, float(loss.detach()))
    return adapted.eval()


def rows_to_learn(decoder: Decoder, context: int, steps: int) -> list[Tensor]:
    """Return rows ``[1, context]`` of Python's own texts, in a drawn order."""
    own = Texts(decoder.encode)
    whole = torch.cat([own.tokens(kind) for kind in own.sources])
    rows = whole[: len(whole) // context * context].view(-1, 1, context)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return list(rows[order[:steps]])


def measure(args: argparse.Namespace, progress: Progress) -> None:
    """Measure all cells that the record does not have."""
    names = [*([DENSE] if args.lora else ()), *args.families]
    decoder = Decoder(args.model, args.tokens, args.text, getattr(torch, args.dtype))
    leg, made = Leg(decoder, args.out.parent), origin(args.command)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    for name in names:
        for density in (1.0,) if name == DENSE else args.densities:
            key = {"pattern": name, "asked": density, "lora": args.lora, "tokens": args.tokens}
            row = next((row for row in rows if key.items() <= row.items()), key)
            pattern = Causal() if name == DENSE else at_density(name, density, args.tokens)
            if "texts" not in row:
                row |= row_of(leg, pattern, args, partial(progress.show, f"{name} at {density:.0%}:"))
                rows.append(row)
            if args.rounds and not args.lora and "dense" not in row:
                row |= seconds(decoder, pattern, args.rounds)
            write_whole(
                args.out, json.dumps(made | {"model": decoder.name, "dtype": args.dtype, "rows": rows}, indent=1)
            )
            kept = " / ".join(f"{100 * statistics.mean(each[x] for each in row['texts']):.1f}" for x in KEPT)
            progress.say(f"{name:<20}{density:>5.0%}  density {row['density']:.3f}  {kept}")


def row_of(leg: Leg, pattern: Pattern, args: argparse.Namespace, show: Callable[..., None]) -> dict[str, Any]:
    """Return the figures of a pattern."""
    decoder, model, texts = leg.decoder, leg.decoder.model, leg.decoder.texts
    found: dict[str, Any] = {"rule": str(pattern), "density": pattern.density(args.tokens)}
    for seed in range(len(texts.sources)):
        leg.dense(seed)
    if args.lora:
        use_ringtile(model, pattern)
        losses: list[float] = []

        def note(step: int, loss: float) -> None:
            losses.append(round(loss, 4))
            show(f"step {step + 1} of {args.lora}, loss {loss:.3f}")

        adapted = train(model, rows_to_learn(decoder, args.context, args.lora), args.lora, note)
        found |= {"losses": losses, "context": args.context}
    use_ringtile(model, pattern)
    found["texts"] = [
        {"text": texts.far_copy(seed, args.tokens).kinds[0], **leg.kept(seed)} for seed in range(len(texts.sources))
    ]
    if args.lora:
        adapted.unload()
    return found


def seconds(decoder: Decoder, pattern: Pattern, rounds: int) -> dict[str, float]:
    """Return the seconds of a prefill in turn with PyTorch's own attention, medians."""
    ids, model = decoder.texts.far_copy(0, decoder.n_tokens).ids, decoder.model

    def sparse() -> float:
        use_ringtile(model, pattern)
        return seconds_of(partial(decoder.run, ids))

    def dense() -> float:
        model.set_attn_implementation("sdpa")
        return seconds_of(partial(decoder.run, ids))

    times = interleaved({"sparse": sparse, "dense": dense}, rounds, warm_up=True)
    return {name: statistics.median(found) for name, found in times.items()}


def averages(rows: list[dict[str, Any]], **key: Any) -> dict[str, float] | None:
    """Return the mean figures of a row over the texts, and its worst text, or None if it was not measured."""
    for row in rows:
        if key.items() <= row.items():
            means = {name: statistics.mean(each[name] for each in row["texts"]) for name in KEPT}
            worst = min(each["text"] for each in row["texts"])
            ratio = row["sparse"] / row["dense"] if "dense" in row else 0.0
            return means | {"worst": worst, "density": row["density"], "ratio": ratio}
    return None


def adaptive(asked: float) -> dict[str, float] | None:
    """Return the same of the calibrated default, from the record of ``ringtile quality``."""
    cells = QualityRecord.from_json(ADAPTIVE.read_text(encoding="utf-8")).cells
    named = [each for each in cells if (each.setting.scores, each.setting.budget) == ("default", "calibrated")]
    judged = [each for each in named if each.setting.task == "far copy" and each.setting.asked == asked]
    timed = [
        each.figure("ratio") or 0.0
        for each in named
        if (each.setting.task, each.setting.sizes["tokens"], each.setting.asked) == ("prefill", 4096, asked)
    ]
    if not judged:
        return None
    found = {name: statistics.mean(each.figure(name) or 0.0 for each in judged) for name in KEPT}
    worst = min(each.figure("text") or 0.0 for each in judged)
    density = statistics.mean(each.measured.realised or 0.0 for each in judged)
    return found | {"worst": worst, "density": density, "ratio": timed[0] if timed else 0.0}


TITLE = """\
# Which pattern keeps quality?

<!-- Generated by benchmarks/patterns.py from benchmarks/records: run it again, do not edit. -->
"""

INTRODUCTION = """\
A model that was trained dense loses quality under a pattern. This page says how much, for {model} at {tokens:,} tokens:
what is kept of the perplexity of a text, of the benefit of a far copy, and of the digits of far needles, in percent of
dense attention. Each is the mean of {texts} texts that chose nothing, as in [Quality](quality.md). The width of each
pattern is the largest whose density is at most that of the column: of pairs, and of tiles in the adaptive row.
"""

READ = """\
* **Keep the first tokens.** Heads put the attention that they do not need there, so a window without them loses most of
  a text. With them, it keeps most of it.
* **Copies and needles are far.** A fixed pattern drops them, whatever its shape. A choice by content finds them at the
  same density, see [Adaptive attention](adaptive.md).
* **Random and dilated pairs do not replace it.** They take pairs from the window, and hit a needle as rarely.
* **A short training gives back a part of a text, and nothing far.** After 100 steps of LoRA, patterns with the first
  tokens keep 8 to 12 points more of it at each density, and those without 14 to 17. 200 steps more
  give a window with sinks 2 points at 10%. [Train with a window](how-to/train-with-a-window.md) and
  [Finetune](how-to/finetune.md) say how.
"""

TRAINED = """\
## After LoRA

Rank 8 on the projections of queries, keys, values and outputs, one row of {context:,} tokens of Python's sources,
manual, READMEs and docstrings per step, with the pattern. No text that judges was trained on. **dense** is the same
training with dense attention, so a text that it loses is the price of the training, not of the pattern.
"""


def page(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    rows, machine = record["rows"], record["machine"]
    where = f"{machine['cpu']}, {machine['threads']} threads, torch {record['versions']['torch']}"
    first = rows[0]
    facts = {"model": record["model"].removesuffix(".gguf"), "tokens": first["tokens"], "texts": len(first["texts"])}
    heads = ["text / copy / needles kept, %", *(f"{x:.0%}" for x in DENSITIES), "worst text at 10%", "time at 10%"]
    lines = [_line(f"`{name}`", partial(averages, rows, pattern=name, lora=0)) for name in FAMILIES]
    lines.append(_line("[adaptive, calibrated](adaptive.md)", adaptive))
    clock = f"""* **Time** is the prefill over that of PyTorch's own attention, in turn in one run ({where},
    {record["dtype"]}). The choice of the adaptive row counts."""
    parts: list[Part] = [
        TITLE,
        filled(INTRODUCTION.format(**facts)),
        Code(str(record["command"]), "sh"),
        Table(heads, lines, 1),
        Picture(
            "Text kept against the time of a prefill, and copies kept against density", "assets/pattern-quality.png"
        ),
        READ + textwrap.indent(filled(clock), "  ")[2:],
    ]
    if learned := [row for row in rows if row["lora"]]:
        names = [name for name in (DENSE, *FAMILIES) if any(row["pattern"] == name for row in learned)]
        steps_at = {x: sorted({row["lora"] for row in learned if row["asked"] == x}) for x in DENSITIES}
        columns = [(x, steps) for x in DENSITIES for steps in (0, *steps_at[x])]
        table = []
        for name in names:
            cells = [(1.0 if name == DENSE and steps else x, steps) for x, steps in columns]
            found = [averages(rows, pattern=name, lora=steps, asked=x) for x, steps in cells]
            table.append([f"`{name}`", *map(_words, found)])
        heads = ["", *(f"{x:.0%}, {f'{steps} steps' if steps else 'as it is'}" for x, steps in columns)]
        parts += [TRAINED.format(context=learned[0]["context"]), Table(heads, table, 1)]
    rules = [[f"`{row['pattern']}`", f"{row['density']:.3f}", f"`{row['rule']}`"] for row in rows if not row["lora"]]
    parts += ["## The rules", Table(["", "density", "rule"], rules, 1)]
    return markdown(parts)


def _words(found: dict[str, float] | None) -> str:
    return "" if found is None else " / ".join(f"{100 * found[name]:.1f}" for name in KEPT)


def _line(name: str, figures: Callable[..., dict[str, float] | None]) -> list[str]:
    found = {x: figures(asked=x) for x in DENSITIES}
    tenth = found[0.1]
    more = ["", ""] if tenth is None else [f"{100 * tenth['worst']:.1f}", f"{tenth['ratio']:.2f}"]
    return [name, *(_words(found[x]) for x in DENSITIES), *more]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw text kept against seconds, and copies kept against density."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    sources = {name: partial(averages, record["rows"], pattern=name, lora=0) for name in FAMILIES}
    for name, figures in (sources | {"adaptive, calibrated": adaptive}).items():
        found = [each for x in DENSITIES if (each := figures(asked=x)) is not None]
        style = {"marker": "o", "linewidth": 2.5 if name.startswith("adaptive") else 1.2, "label": name}
        left.plot(
            [each["ratio"] for each in found if each["ratio"]],
            [100 * each["text"] for each in found if each["ratio"]],
            **style,
        )
        right.plot([100 * each["density"] for each in found], [100 * each["copy"] for each in found], **style)
    left.set(xlabel="time of a prefill, dense = 1", ylabel="text kept, %", title="A text")
    right.set(xlabel="density, %", ylabel="benefit kept, %", title="A far copy")
    figure.legend(*right.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    for each in (left, right):
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder of save_pretrained, a GGUF file, or a name on the hub")
    add("--text", type=Path, nargs="+", default=(), metavar="FILE", help="texts, or folders of them, to judge by")
    add("--tokens", type=count, default=4096, metavar="N", help="length of the sequences (default: 4096)")
    add("--dtype", default="bfloat16", help="dtype of the model (default: bfloat16)")
    add("--densities", type=float, nargs="+", default=DENSITIES, metavar="D", help="default: 0.25 0.1 0.05")
    add("--families", nargs="+", default=tuple(FAMILIES), choices=tuple(FAMILIES), help="default: all")
    add("--lora", type=int, default=0, metavar="STEPS", help="steps of LoRA before the quality (default: 0)")
    add("--context", type=count, default=1024, metavar="N", help="length of the rows to learn (default: 1024)")
    add("--rounds", type=int, default=3, help="timed prefills of each, 0 for none (default: 3)")
    add("--out", type=Path, default=SOURCE, help="the record, which a second run adds to")
    add("--page", action="store_true", help="write the page of the record, and its picture")
    args = parser.parse_args()
    args.command = "python benchmarks/patterns.py --model MODEL.gguf --text texts"
    if args.model is None and not args.page:
        parser.error("expected --model, --page or both")
    if args.model is not None:
        measure(args, Progress())
    if args.page:
        record = json.loads(args.out.read_text(encoding="utf-8"))
        write_whole(PAGE, page(record))
        draw(record, PICTURE)


if __name__ == "__main__":
    main()
