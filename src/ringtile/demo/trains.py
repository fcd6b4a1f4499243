"""Act three: a small byte-level language model at a long context, sparse and dense, on real text."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import platform
import signal
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""Seconds of dense training for each second of sparse training."""
HELD_OUT_WINDOWS = 4
SAVE_SECONDS = 60.0
WARMUP_STEPS = 4
HIDDEN_RATE, OUTER_RATE = 0.02, 0.01
"""Learning rates of the matrices inside the layers (Muon) and of embedding, norms and head (AdamW)."""


class ModelSize(NamedTuple):
    """The shape of the model."""

    width: int = 64
    layers: int = 2
    heads: int = 1


def _dense(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, dropout_p: float, **_: object) -> Tensor:
    """Torch's own attention, which knows no pattern, for ``attend=``."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, dropout_p=dropout_p)


def _byte_model(size: ModelSize, pattern: Pattern, attend: Callable[..., Any]) -> SparseLanguageModel:
    layers = SparseTransformer(
        size.layers, size.width, size.heads, qk_norm=True, is_causal=True, pattern=pattern, attend=attend
    )
    return SparseLanguageModel(256, layers)


def _loss(model: SparseLanguageModel, text: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of the bytes ``text[1:]`` (uint8) given those before each."""
    tokens = text.long()
    return F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])


class Corpus(NamedTuple):
    """Bytes to learn from and bytes to be tested on."""

    source: str
    train: Tensor
    held_out: Tensor
    digest: str

    def byte_entropy(self) -> float:
        """Bits per byte of a model that knows only how often each byte occurs in the training text, on the other."""
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        return float(-(counts / counts.sum()).log2()[self.held_out.long()].mean())


def load_corpus(path: Path | None) -> Corpus:
    """The bytes of a file, the last tenth held out; without one, Python's own library, every tenth file held out.

    Raises ValueError where there is nothing to read.
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
    digest = hashlib.sha256(train + held_out).hexdigest()
    learned, tested = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    return Corpus(source, learned, tested, digest)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: parameters and optimizer change together or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(held[0])


class HeldOut(NamedTuple):
    """Bits per byte on text that no step has seen."""

    steps: int
    seconds: float
    bits: float


class Run:
    """One model in training: parameters, optimizers, and what it measured."""

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
            self.model = _byte_model(size, pattern, attend)
        inner = [weight for weight in self.model.transformer.layers.parameters() if weight.ndim == 2]
        ids = {id(weight) for weight in inner}
        outer = [weight for weight in self.model.parameters() if id(weight) not in ids]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inner, lr=HIDDEN_RATE, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(outer, lr=OUTER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.seconds: list[float] = []
        """Training seconds at the end of each step."""
        self.bits: list[float] = []
        """Bits per byte of each step's text, before the step."""
        self.held_out: list[HeldOut] = []
        """What `evaluate` measured."""

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.bits)

    @property
    def trained_seconds(self) -> float:
        """Seconds of all steps so far."""
        return self.seconds[-1] if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.trained_seconds if self.seconds else 0.0

    def step(self) -> None:
        """One step on one window of text, which follows from the seed and the number of the step."""
        began = time.perf_counter()
        generator = torch.Generator().manual_seed((self._seed << 32) + self.steps)
        first = int(torch.randint(len(self._corpus.train) - self._context, (), generator=generator))
        loss = _loss(self.model, self._corpus.train[first : first + self._context + 1])
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        warmth = min(1.0, (self.steps + 1) / WARMUP_STEPS)
        with _interrupt_deferred():
            for optimizer, rate in zip(self._optimizers, (HIDDEN_RATE, OUTER_RATE), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate * warmth
                optimizer.step()
            self.bits.append(loss.item() / math.log(2))
            self.seconds.append(self.trained_seconds + time.perf_counter() - began)

    def evaluate(self) -> None:
        """Measure bits per byte on the first windows of the held-out text."""
        text, length = self._corpus.held_out, min(self._context, len(self._corpus.held_out) - 1)
        firsts = range(0, len(text) - length, length)[:HELD_OUT_WINDOWS]
        with torch.no_grad():
            losses = [float(_loss(self.model, text[first : first + length + 1])) for first in firsts]
        self.held_out.append(HeldOut(self.steps, self.trained_seconds, sum(losses) / len(losses) / math.log(2)))

    def state(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly; nothing is random but the weights at the start and the texts."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "seconds": list(self.seconds),
            "bits": list(self.bits),
            "held_out": [tuple(measured) for measured in self.held_out],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.seconds, self.bits = list(state["seconds"]), list(state["bits"])
        self.held_out = [HeldOut(*measured) for measured in state["held_out"]]


def flex_attention_error() -> str | None:
    """What FlexAttention says when it is asked for gradients on a CPU, or None where it gave them."""
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
    """Trains one model twice, with sparse and with dense attention; `resume` goes on from what `save` wrote."""

    seed: int = 0
    context: int = 16384
    seconds: float = 60.0
    pattern: Pattern | None = None
    text: Path | None = None
    save: Path | None = None
    resume: Path | None = None
    size: ModelSize = field(default_factory=ModelSize)
    runs: list[Run] = field(default_factory=list)
    flex_error: str | None = None
    flex_tried: bool = False

    name = "trains"

    @property
    def lengths(self) -> list[int]:
        """The one length."""
        return [self.context]

    def prepare(self) -> None:
        """Read the text and the checkpoint and build the models: raises ValueError before any work is done."""
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
        if self.resume is not None:
            self.read_state(self.resume)

    def _settings(self) -> dict[str, Any]:
        return {
            "pattern": repr(self.rule),
            "context": self.context,
            "seed": self.seed,
            "text": self.corpus.digest,
            "size": list(self.size),
        }

    def read_state(self, path: Path) -> None:
        """Go on from a file; ValueError where it was written for another pattern, context, seed, text or size."""
        if not path.is_file():
            raise ValueError(f"--resume: expected a file that --save wrote, got {str(path)!r}")
        try:
            saved = torch.load(path, weights_only=True)
            settings, runs = saved["settings"], saved["runs"]
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"--resume: {str(path)!r} is not a file that --save wrote") from error
        for name, value in self._settings().items():
            if settings[name] != value:
                raise ValueError(f"--resume: {name} was {settings[name]!r} when saved, got {value!r}")
        for run in self.runs:
            run.load(runs[run.label])

    def write_state(self) -> None:
        """Write models, optimizers and curves to `save`, whole or not at all."""
        if self.save is None:
            return
        self.save.parent.mkdir(parents=True, exist_ok=True)
        part = self.save.with_name(f".{self.save.name}.part")
        try:
            torch.save({"settings": self._settings(), "runs": {run.label: run.state() for run in self.runs}}, part)
            os.replace(part, self.save)
        finally:
            part.unlink(missing_ok=True)

    def run(self, progress: Progress) -> None:
        """Train sparse, then dense, printing both; then ask FlexAttention to train."""
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
        try:
            for run, seconds in ((sparse, self.seconds), (dense, self.seconds * DENSE_SHARE)):
                self._train(run, seconds, progress)
        finally:
            self.write_state()
        if self.save is not None:
            progress.say(f"  state written to {self.save}: --resume goes on from there")
        self.flex_error, self.flex_tried = flex_attention_error(), True
        if self.flex_error is None:
            progress.say(
                "  FlexAttention gave gradients on this CPU: a newer torch than the ones this was written with."
            )
        else:
            progress.say(f"  FlexAttention cannot train on a CPU: {self.flex_error}")

    def _train(self, run: Run, seconds: float, progress: Progress) -> None:
        progress.begin(f"trains · {run.label}", 0, "steps")
        first, began, saved = run.steps, run.trained_seconds, run.trained_seconds
        # The longer run is also tested when it has had the time of the shorter one.
        tests = [began + seconds * DENSE_SHARE, math.inf] if run is self.runs[0] else [math.inf]
        while (trained := run.trained_seconds - began) < seconds:
            run.step()
            progress.update(run.steps - first, f"{run.bits[-1]:.2f} bits/byte", seconds_left=seconds - trained)
            if run.trained_seconds >= tests[0]:
                run.evaluate()
                tests.pop(0)
            if run.trained_seconds - saved > SAVE_SECONDS:
                self.write_state()
                saved = run.trained_seconds
        run.evaluate()
        tested = ", ".join(f"{bits:.2f} after {duration_text(after)}" for _, after, bits in run.held_out)
        progress.say(
            f"  {run.label:<7}{run.steps:>5} steps in {duration_text(run.trained_seconds)}, {run.rate:.2f} steps/s, "
            f"first {run.bits[0]:.2f} bits/byte; held out {tested}"
        )

    def summary(self) -> list[str]:
        """What was measured so far, in one or two lines."""
        trained = [run for run in self.runs if run.steps]
        if not trained:
            return []
        parts = []
        for run in trained:
            bits = (
                f"{run.held_out[-1].bits:.2f} bits/byte held out"
                if run.held_out
                else f"{run.bits[-1]:.2f} in the last step"
            )
            parts.append(f"{run.label} {run.steps} steps in {duration_text(run.trained_seconds)}, {bits}")
        lines = [f"Trains  context {self.context:,}: {'; '.join(parts)}"]
        if len(trained) == 2:
            sparse, dense = trained
            line = f"        {sparse.rate / dense.rate:.1f}x the steps a second"
            if dense.held_out and (
                early := [m for m in sparse.held_out if m.seconds < 1.5 * dense.held_out[-1].seconds]
            ):
                line += (
                    f"; held out after {duration_text(early[-1].seconds)} sparse {early[-1].bits:.2f}, "
                    f"after {duration_text(dense.held_out[-1].seconds)} dense {dense.held_out[-1].bits:.2f} bits/byte"
                )
            lines.append(line)
        return lines

    @property
    def passed(self) -> bool:
        """Whether training ran at all: how far it gets depends on the seconds."""
        return all(math.isfinite(bits) for run in self.runs for bits in run.bits)

    def record(self) -> dict[str, Any]:
        """The figures as plain data."""
        if not self.runs:
            return {}
        return {
            **self._settings(),
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
            "flex_attention_error": self.flex_error if self.flex_tried else None,
        }

    def draw(self, path: Path) -> None:
        """Bits per byte against seconds and against steps."""
        from ringtile.analysis.plot import BLUE, GREY, ORANGE, Curve, picture, plot_curves

        colors = {"sparse": BLUE, "dense": ORANGE}
        trained = [run for run in self.runs if run.steps]
        with picture(path, 11, 4.4) as figure:
            by_seconds, by_steps = figure.subplots(1, 2, width_ratios=[1.5, 1], sharey=True)
            for axes, label in ((by_seconds, "seconds of training"), (by_steps, "steps")):
                curves = []
                for run in trained:
                    steps = range(1, run.steps + 1)
                    name = f"{run.label} attention, {run.rate:.2f} steps/s"
                    curves.append(
                        Curve(
                            name if axes is by_seconds else "",
                            run.seconds if axes is by_seconds else steps,
                            run.bits,
                            colors[run.label],
                            marker="." if run.steps < 50 else "",
                        )
                    )
                plot_curves(curves, axes, x_label=label)
                for run in trained:
                    for steps_done, seconds, bits in run.held_out:
                        x = seconds if axes is by_seconds else steps_done
                        axes.plot(
                            x, bits, "D", color=colors[run.label], markeredgecolor="white", markersize=8, zorder=4
                        )
                        axes.annotate(
                            f"{bits:.2f}", (x, bits), (0, 8), textcoords="offset points", ha="center", fontsize=8
                        )
                axes.axhline(self.corpus.byte_entropy(), color=GREY, linestyle=":", linewidth=1.2)
                axes.set_xlim(left=0)
            by_seconds.annotate(
                "byte counts alone",
                (0.995, self.corpus.byte_entropy()),
                xycoords=by_seconds.get_yaxis_transform(),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color="#4a5059",
                fontsize=8,
            )
            by_seconds.set_ylabel("bits per byte of the text of each step")
            by_seconds.set_title(f"Context {self.context:,}, float32, {threads_text()}; diamonds: held out")
            by_steps.set_title("The same, by steps")
            figure.supxlabel(f"sparse: {self.rule!r};  text: {self.corpus.source}", fontsize=8, color="#4a5059")
