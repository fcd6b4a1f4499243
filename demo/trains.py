"""Act three: a small byte-level language model at a long context, sparse and dense, on real text."""

from __future__ import annotations

import math
import platform
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional import sparse_attention
from ringtile.index import build_index
from ringtile.modules.language_model import SparseLanguageModel
from ringtile.modules.transformer import SparseTransformer
from ringtile.patterns import Causal, GlobalTokens, Pattern, Window
from ringtile.tools.plot import BLUE, GREY, NOTE, ORANGE, picture
from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.timing import seconds_of
from ringtile.tools.units import duration_text, first_line

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
        # One more of each byte, so that a byte that the training text lacks costs bits and not infinity.
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        return float(-(counts / counts.sum()).log2()[self.held_out.long()].mean())


def load_corpus(path: Path | None) -> Corpus:
    """Read the bytes of a file and hold out its last tenth. Default: Python's library, every tenth file held out."""
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

    def __init__(self, label: str, act: Trains, attend: Callable[..., Any]) -> None:
        self.label, self.corpus, self.context, self.seed = label, act.corpus, act.context, act.seed
        options: dict[str, Any] = {"qk_norm": True, "is_causal": True, "pattern": act.rule, "attend": attend}
        # Both runs begin with equal weights, and leave the caller's generator alone.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(act.seed)
            transformer = SparseTransformer(act.size.layers, act.size.width, act.size.heads, **options)
            self.model = SparseLanguageModel(256, transformer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.seconds: list[float] = []
        """Training time at the end of each step."""
        self.bits: list[float] = []
        """Bits per byte of each step's text, before the step."""
        self.held_out: list[HeldOut] = []

    @property
    def steps(self) -> int:
        return len(self.bits)

    @property
    def trained_seconds(self) -> float:
        return self.seconds[-1] if self.seconds else 0.0

    @property
    def rate(self) -> float:
        return self.steps / self.trained_seconds if self.seconds else 0.0

    def record(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "steps_per_second": self.rate,
            "held_out": [measured._asdict() for measured in self.held_out],
            "seconds": self.seconds,
            "bits_per_byte": self.bits,
        }

    def _loss(self, text: Tensor, first: int, length: int) -> Tensor:
        """Return the mean cross entropy, in nats, of the ``length`` bytes after ``first`` given the bytes before."""
        tokens = text[first : first + length + 1].long()
        return F.cross_entropy(self.model(tokens[None, :-1])[0], tokens[1:])

    def _step(self) -> None:
        # The window depends on the seed and the number of the step, so both models read the same text. A CPU generator
        # knows only the lower 32 bits of a seed, so the seeds of two runs must differ in these.
        generator = torch.Generator().manual_seed((1_000_003 * self.seed + self.steps) % 2**32)
        first = int(torch.randint(len(self.corpus.train) - self.context, (), generator=generator))
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (self.steps + 1) / WARMUP_STEPS)
        loss = self._loss(self.corpus.train, first, self.context)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.bits.append(loss.item() / math.log(2))

    def step(self) -> None:
        """Train on one window of text."""
        self.seconds.append(self.trained_seconds + seconds_of(self._step))

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure bits per byte on the first windows of the held-out text."""
        text, length = self.corpus.held_out, min(self.context, len(self.corpus.held_out) - 1)
        # Windows side by side, and always the same, so that figures of both runs can be compared.
        firsts = range(0, len(text) - length, length)[:HELD_OUT_WINDOWS]
        bits = sum(float(self._loss(text, first, length)) for first in firsts) / len(firsts) / math.log(2)
        self.held_out.append(HeldOut(self.steps, self.trained_seconds, bits))


def flex_attention_error() -> str | None:
    """Return the error of FlexAttention's backward pass on a CPU, or None if there is none."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (torch.randn(1, 1, 128, 16, requires_grad=True) for _ in range(3))
    try:
        # Uncompiled, it warns that it is slow. Only its answer matters here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flex_attention(query, key, value).sum().backward()
    except RuntimeError as error:
        return first_line(error)
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
    flex_error: str | None = None

    name = "trains"

    def __post_init__(self) -> None:
        self.corpus, self.lengths = load_corpus(self.text), [self.context]
        for part, needed in (("train", self.context + 1), ("held_out", 2)):
            if (n_bytes := len(getattr(self.corpus, part))) < needed:
                what = f"{needed:,} bytes in the {part} part for a context of {self.context:,}"
                raise ValueError(f"--text, --context: expected at least {what}, got {n_bytes:,}")
        self.rule = DEFAULT_PATTERN if self.pattern is None else Causal() & self.pattern
        self.size = self.size._replace(heads=self.rule.num_heads or self.size.heads)
        half, heads = self.size.width // 2, self.size.heads
        if half % heads:
            raise ValueError(f"--pattern: expected a number of heads that divides {half}, got {heads}")
        self.runs = [Run("sparse", self, sparse_attention), Run("dense", self, _dense)]

    def run(self, progress: Progress) -> None:
        """Train sparse, then dense, and print both; then try the same with FlexAttention."""
        sparse, dense = self.runs
        parameters = sum(weight.numel() for weight in sparse.model.parameters())
        density = build_index(self.rule, self.context, num_heads=self.size.heads).tile_density
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
        progress.say(f"  sparse makes {sparse.rate / dense.rate:.1f}x the steps per second")
        self.flex_error = flex_attention_error()
        progress.say(f"  FlexAttention on a CPU: {self.flex_error or 'it can train with this torch'}")

    def _train(self, run: Run, seconds: float, progress: Progress, test_after: float = math.inf) -> None:
        try:
            while run.trained_seconds < seconds:
                run.step()
                told = f"trains: {run.label}, step {run.steps}, {run.bits[-1]:.2f} bits/byte"
                progress.show(told, seconds - run.trained_seconds)
                if run.trained_seconds >= test_after:
                    run.evaluate()
                    test_after = math.inf
            run.evaluate()
        finally:
            tested = [f"{bits:.2f} after {duration_text(after)}" for _, after, bits in run.held_out]
            if run.steps:
                progress.say(
                    f"  {run.label:<7}{run.steps:>5} steps in {duration_text(run.trained_seconds)}, {run.rate:.2f} "
                    f"steps/s; bits/byte: first {run.bits[0]:.2f}; held out {', '.join(tested) or 'not tested'}"
                )

    @property
    def has_figures(self) -> bool:
        return any(run.steps for run in self.runs)

    @property
    def passed(self) -> bool:
        """True if every loss is finite: how far training gets depends on the time."""
        return all(math.isfinite(bits) for run in self.runs for bits in run.bits)

    def record(self) -> dict[str, Any]:
        return {
            "pattern": repr(self.rule),
            "context": self.context,
            "size": self.size._asdict(),
            "source": self.corpus.source,
            "train_bytes": len(self.corpus.train),
            "held_out_bytes": len(self.corpus.held_out),
            "byte_entropy": self.corpus.byte_entropy(),
            "runs": {run.label: run.record() for run in self.runs},
            "flex_attention_error": self.flex_error,
        }

    def draw(self, path: Path) -> None:
        """Draw bits per byte against seconds and against steps."""
        entropy = self.corpus.byte_entropy()
        with picture(path, 11, 4.4) as figure:
            by_time, by_steps = figure.subplots(1, 2, width_ratios=[1.5, 1], sharey=True)
            for run, color in zip(self.runs, (BLUE, ORANGE), strict=True):
                if not run.steps:
                    continue
                label, marker = f"{run.label} attention, {run.rate:.2f} steps/s", "." if run.steps < 50 else ""
                for axes, x in ((by_time, run.seconds), (by_steps, range(1, run.steps + 1))):
                    axes.plot(x, run.bits, color=color, marker=marker, label=label)
                    for at in run.held_out:
                        place = (at.seconds if axes is by_time else at.steps, at.bits)
                        axes.plot(*place, "D", color=color, markeredgecolor="white", markersize=8, zorder=4)
                        # Above and to the right, where a falling curve is not.
                        axes.annotate(f"{at.bits:.2f}", place, (5, 5), textcoords="offset points", fontsize=8)
            for axes, label in ((by_time, "seconds of training"), (by_steps, "steps")):
                axes.axhline(entropy, color=GREY, linestyle=":", linewidth=1.2)
                axes.set(xlim=(0, None), xlabel=label)
                axes.grid(True)
            where: dict[str, Any] = {"textcoords": "offset points", "ha": "right", **NOTE}
            at_right = by_time.get_yaxis_transform()
            by_time.annotate("byte counts alone", (0.995, entropy), (0, 3), xycoords=at_right, **where)
            by_time.legend(loc="best")
            title = f"Context {self.context:,}, float32, {threads_text()}; diamonds: held out"
            by_time.set(ylabel="bits per byte of the text of each step", title=title)
            by_steps.set_title("The same, by steps")
            figure.supxlabel(f"sparse: {self.rule!r};  text: {self.corpus.source}", **NOTE)
