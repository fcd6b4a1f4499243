"""Act three: train a small byte-level language model at a long context, sparse and dense, on real text."""

from __future__ import annotations

import math
import platform
import sysconfig
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.analysis.units import duration_text
from ringtile.functional import sparse_attention
from ringtile.layout import build_index
from ringtile.measure.progress import Progress, threads_text
from ringtile.modules.language_model import SparseLanguageModel
from ringtile.modules.transformer import SparseTransformer
from ringtile.patterns import Causal, GlobalTokens, Pattern, Window

DEFAULT_PATTERN = Causal() & (Window(256) | GlobalTokens(64))
DENSE_SHARE = 1 / 3
"""Seconds of dense training per second of sparse training."""
HELD_OUT_WINDOWS = 4
WARMUP_STEPS = 4
LEARNING_RATE = 0.004


class ModelSize(NamedTuple):
    """The shape of the model."""

    width: int = 64
    layers: int = 2
    heads: int = 1


class Corpus(NamedTuple):
    """Bytes to train on and bytes to test on."""

    source: str
    train: Tensor
    held_out: Tensor

    def byte_entropy(self) -> float:
        """Return the bits per held-out byte of a model that knows only the byte counts of the training text."""
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        return float(-(counts / counts.sum()).log2()[self.held_out.long()].mean())


def load_corpus(path: Path | None) -> Corpus:
    """Read the bytes of a file and hold out its last tenth. Default: Python's own library, every tenth file held out.

    Raises:
        ValueError: If there is no text to read.
    """
    if path is not None:
        if not path.is_file():
            raise ValueError(f"--text: expected a file, got {str(path)!r}")
        source, data = path.name, path.read_bytes()
        cut = len(data) - len(data) // 10
        train, held_out = data[:cut], data[cut:]
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [*sorted(library.glob("*.py")), *sorted(library.glob("pydoc_data/topics.py"))]
        train = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10 != 9)
        held_out = b"".join(file.read_bytes() for file in files[9::10])
        source = f"{len(files)} sources and manual pages of Python {platform.python_version()}"
    if not train or not held_out:
        raise ValueError(f"--text: expected at least ten bytes of text, got {len(train)} from {path or library}")
    return Corpus(source, *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)))


class HeldOut(NamedTuple):
    """Bits per byte on text that the model was not trained on."""

    steps: int
    seconds: float
    bits: float


def _dense(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, dropout_p: float, **_: object) -> Tensor:
    """Torch's own attention, which has no pattern, for ``attend=``."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, dropout_p=dropout_p)


class Run:
    """One model in training, with its optimizer and its figures."""

    def __init__(
        self,
        label: str,
        pattern: Pattern,
        attend: Callable[..., Any],
        corpus: Corpus,
        context: int,
        seed: int,
        size: ModelSize,
    ) -> None:
        self.label, self._corpus, self._context, self._seed = label, corpus, context, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = SparseTransformer(
                size.layers, size.width, size.heads, qk_norm=True, is_causal=True, pattern=pattern, attend=attend
            )
            self.model = SparseLanguageModel(256, layers)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.seconds: list[float] = []
        """Training time at the end of each step."""
        self.bits: list[float] = []
        """Bits per byte of each step's text, before the step."""
        self.held_out: list[HeldOut] = []

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return len(self.bits)

    @property
    def trained_seconds(self) -> float:
        """The time of all steps so far."""
        return self.seconds[-1] if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.trained_seconds if self.seconds else 0.0

    def _loss(self, text: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, of the bytes ``text[1:]`` (uint8) given the bytes before each."""
        tokens = text.long()
        return F.cross_entropy(self.model(tokens[None, :-1])[0], tokens[1:])

    def step(self) -> None:
        """Train on one window of text, which depends on the seed and the number of the step."""
        began = time.perf_counter()
        generator = torch.Generator().manual_seed((self._seed << 32) + self.steps)
        first = int(torch.randint(len(self._corpus.train) - self._context, (), generator=generator))
        self._optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (self.steps + 1) / WARMUP_STEPS)
        loss = self._loss(self._corpus.train[first : first + self._context + 1])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.bits.append(loss.item() / math.log(2))
        self.seconds.append(self.trained_seconds + time.perf_counter() - began)

    def evaluate(self) -> None:
        """Measure bits per byte on the first windows of the held-out text."""
        text, length = self._corpus.held_out, min(self._context, len(self._corpus.held_out) - 1)
        firsts = range(0, len(text) - length, length)[:HELD_OUT_WINDOWS]
        with torch.no_grad():
            losses = [float(self._loss(text[first : first + length + 1])) for first in firsts]
        self.held_out.append(HeldOut(self.steps, self.trained_seconds, sum(losses) / len(losses) / math.log(2)))


def flex_attention_error() -> str | None:
    """Return the error of FlexAttention's backward pass on a CPU, or None if there is none."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (torch.randn(1, 1, 128, 16, requires_grad=True) for _ in range(3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flex_attention(query, key, value).sum().backward()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


@dataclass
class Trains:
    """Trains one model twice, with sparse and with dense attention."""

    seed: int = 0
    context: int = 16384
    seconds: float = 60.0
    pattern: Pattern | None = None
    text: Path | None = None
    size: ModelSize = field(default_factory=ModelSize)
    runs: list[Run] = field(default_factory=list)
    flex_error: str | None = None

    name = "trains"

    @property
    def lengths(self) -> list[int]:
        """The one length."""
        return [self.context]

    def prepare(self) -> None:
        """Read the text and build the models.

        Raises:
            ValueError: If the text is too short or the heads of the pattern do not divide the width.
        """
        self.corpus = load_corpus(self.text)
        for part, needed in (("train", self.context + 1), ("held_out", 2)):
            if len(getattr(self.corpus, part)) < needed:
                raise ValueError(
                    f"--text, --context: expected at least {needed:,} bytes in the {part} part for a context of "
                    f"{self.context:,}, got {len(getattr(self.corpus, part)):,}"
                )
        self.rule = DEFAULT_PATTERN if self.pattern is None else Causal() & self.pattern
        if self.rule.n_heads is not None:
            self.size = self.size._replace(heads=self.rule.n_heads)
        if self.size.width % (2 * self.size.heads):
            raise ValueError(
                f"--pattern: expected a number of heads that divides {self.size.width // 2}, got {self.size.heads}"
            )
        self.runs = [
            Run(label, self.rule, attend, self.corpus, self.context, self.seed, self.size)
            for label, attend in (("sparse", sparse_attention), ("dense", _dense))
        ]

    def run(self, progress: Progress) -> None:
        """Train sparse, then dense, and print both; then try the same with FlexAttention."""
        sparse, dense = self.runs
        parameters = sum(weight.numel() for weight in sparse.model.parameters())
        density = build_index(self.rule, self.context, heads=self.size.heads).tile_density
        progress.say(
            f"Trains: a byte model of {parameters:,} parameters, {self.size.layers} layers, width {self.size.width}, "
            f"H{self.size.heads} D{self.size.width // self.size.heads}, context {self.context:,}, float32"
        )
        progress.say(
            f"  text: {self.corpus.source}, {len(self.corpus.train) / 1e6:.1f} MB and "
            f"{len(self.corpus.held_out) / 1e6:.1f} MB held out "
            f"(byte counts alone: {self.corpus.byte_entropy():.2f} bits/byte)"
        )
        progress.say(f"  sparse attention: {self.rule!r}, {density:.1%} of the causal tiles")
        # The longer run is also tested after the time of the shorter one.
        self._train(sparse, self.seconds, progress, test_after=self.seconds * DENSE_SHARE)
        self._train(dense, self.seconds * DENSE_SHARE, progress)
        self.flex_error = flex_attention_error()
        progress.say(f"  FlexAttention on a CPU: {self.flex_error or 'it can train with this torch'}")

    def _train(self, run: Run, seconds: float, progress: Progress, test_after: float = math.inf) -> None:
        while run.trained_seconds < seconds:
            run.step()
            told = f"trains: {run.label}, step {run.steps}, {run.bits[-1]:.2f} bits/byte"
            progress.show(told, seconds - run.trained_seconds)
            if run.trained_seconds >= test_after:
                run.evaluate()
                test_after = math.inf
        run.evaluate()
        tested = ", ".join(f"{bits:.2f} after {duration_text(after)}" for _, after, bits in run.held_out)
        progress.say(
            f"  {run.label:<7}{run.steps:>5} steps in {duration_text(run.trained_seconds)}, {run.rate:.2f} steps/s, "
            f"first {run.bits[0]:.2f} bits/byte; held out {tested}"
        )

    def summary(self) -> list[str]:
        """Return the figures so far in one or two lines."""
        trained = [run for run in self.runs if run.steps]
        if not trained:
            return []
        parts = []
        for run in trained:
            last = f"{run.bits[-1]:.2f} in the last step"
            bits = f"{run.held_out[-1].bits:.2f} bits/byte held out" if run.held_out else last
            parts.append(f"{run.label} {run.steps} steps in {duration_text(run.trained_seconds)}, {bits}")
        lines = [f"Trains  context {self.context:,}: {'; '.join(parts)}"]
        if len(trained) == 2 and trained[1].held_out:
            sparse, dense = trained
            early, late = sparse.held_out[0], dense.held_out[-1]
            lines.append(
                f"        {sparse.rate / dense.rate:.1f}x the steps per second; held out after "
                f"{duration_text(early.seconds)} sparse {early.bits:.2f}, after {duration_text(late.seconds)} dense "
                f"{late.bits:.2f} bits/byte"
            )
        return lines

    @property
    def passed(self) -> bool:
        """True if every loss is finite: how far training gets depends on the time."""
        return all(math.isfinite(bits) for run in self.runs for bits in run.bits)

    def record(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "pattern": repr(self.rule),
            "context": self.context,
            "size": self.size._asdict(),
            "source": self.corpus.source,
            "train_bytes": len(self.corpus.train),
            "held_out_bytes": len(self.corpus.held_out),
            "byte_entropy": self.corpus.byte_entropy(),
            "runs": {
                run.label: {
                    "steps": run.steps,
                    "steps_per_second": run.rate,
                    "held_out": [measured._asdict() for measured in run.held_out],
                    "seconds": run.seconds,
                    "bits_per_byte": run.bits,
                }
                for run in self.runs
            },
            "flex_attention_error": self.flex_error,
        }

    def draw(self, path: Path) -> None:
        """Draw bits per byte against seconds and against steps."""
        from ringtile.analysis.plot import BLUE, GREY, ORANGE, Curve, picture, plot_curves

        trained = [(run, color) for run, color in zip(self.runs, (BLUE, ORANGE), strict=True) if run.steps]
        entropy = self.corpus.byte_entropy()
        with picture(path, 11, 4.4) as figure:
            axes = figure.subplots(1, 2, width_ratios=[1.5, 1], sharey=True)
            for by_steps, (ax, label) in enumerate(zip(axes, ("seconds of training", "steps"), strict=True)):
                curves = []
                for run, color in trained:
                    x = list(range(1, run.steps + 1)) if by_steps else run.seconds
                    name = "" if by_steps else f"{run.label} attention, {run.rate:.2f} steps/s"
                    curves.append(Curve(name, x, run.bits, color, marker="." if run.steps < 50 else ""))
                    for measured in run.held_out:
                        at = measured.steps if by_steps else measured.seconds
                        ax.plot(at, measured.bits, "D", color=color, markeredgecolor="white", markersize=8, zorder=4)
                        place: Any = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8}
                        ax.annotate(f"{measured.bits:.2f}", (at, measured.bits), **place)
                plot_curves(curves, ax, x_label=label, legend="upper right")
                ax.axhline(entropy, color=GREY, linestyle=":", linewidth=1.2)
                ax.set_xlim(left=0)
            where: Any = {"xycoords": axes[0].get_yaxis_transform(), "xytext": (0, 3), "textcoords": "offset points"}
            axes[0].annotate("byte counts alone", (0.995, entropy), ha="right", color="#4a5059", fontsize=8, **where)
            axes[0].set_ylabel("bits per byte of the text of each step")
            axes[0].set_title(f"Context {self.context:,}, float32, {threads_text()}; diamonds: held out")
            axes[1].set_title("The same, by steps")
            figure.supxlabel(f"sparse: {self.rule!r};  text: {self.corpus.source}", fontsize=8, color="#4a5059")
