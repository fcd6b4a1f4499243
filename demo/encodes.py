"""Act four: a whole encoder of transformers with random weights, with PyTorch's sdpa and with ringtile."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo.bars import grouped_bars
from ringtile.integrations.transformers import register
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.memory import peak_memory
from ringtile.tools.plot import BLUE, picture
from ringtile.tools.progress import Progress, threads_text
from ringtile.tools.timing import interleaved, seconds_of
from ringtile.tools.units import bytes_text, duration_text

SDPA, RINGTILE = "sdpa", "ringtile"
BOUND = 1e-6
"""The largest relative error of ringtile's outputs against those of sdpa, which differ by a few roundings."""


def missing_transformers() -> str | None:
    """Register ringtile with transformers. Return the reason why it cannot be, or None."""
    try:
        register()
    except ImportError as error:
        return f'transformers cannot be used ({error}); pip install "transformers>=5.5,<6"'
    return None


@dataclass
class Encodes:
    """Compares and times the outputs of one model and text with two attentions."""

    seed: int = 0
    n_tokens: int = 4096
    sizes: dict[str, int] = field(default_factory=lambda: {"num_hidden_layers": 3})
    """What differs from ModernBERT-base, beside the vocabulary, whose random table takes longer than the outputs."""
    left_out: str | None = None
    error: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The peaks beyond weights and output by attention."""
    seconds: dict[str, float] = field(default_factory=dict)

    name = "encodes"
    lengths = ()

    def run(self, progress: Progress) -> None:
        """Compare the outputs, then time both, and print one line."""
        progress.show("encodes: loading transformers")
        self.left_out = missing_transformers()
        if self.left_out is not None:
            progress.say(f"Encodes: left out, {self.left_out}")
            return
        model, tokens = self._model_and_tokens()
        model.set_attn_implementation(RINGTILE)
        if model.config._attn_implementation != RINGTILE:
            # It only logs that it stays as it was.
            self.left_out = "this transformers writes the attention of ModernBERT by hand"
            progress.say(f"Encodes: left out, {self.left_out}")
            return
        layers, dense = model.config.num_hidden_layers, model.config.layer_types.count("full_attention")
        progress.say(
            f"Encodes: a ModernBERT with random weights, {layers} layers of width {model.config.hidden_size}, {dense} "
            f"over all pairs and {layers - dense} with windows of {model.config.local_attention}; "
            f"N {self.n_tokens:,}, float32, {threads_text()}"
        )
        found: dict[str, Tensor] = {}

        @torch.no_grad()
        def encode(attention: str) -> Tensor:
            found[attention] = model(tokens).last_hidden_state
            return found[attention]

        def timed(attention: str) -> float:
            model.set_attn_implementation(attention)
            return seconds_of(partial(encode, attention))

        for attention in (SDPA, RINGTILE):
            progress.show(f"encodes: comparing {attention}")
            model.set_attn_implementation(attention)
            self.peak_bytes[attention] = peak_memory(partial(encode, attention), None, tokens.device).forward
        self.error = relative_error(found[RINGTILE], found[SDPA])
        if not self.passed:
            progress.say(f"  WRONG: ringtile's outputs differ from sdpa's by {self.error:.1e}, bound {BOUND:.0e}")
            return
        progress.show("encodes: timing both")
        samples = {attention: partial(timed, attention) for attention in (SDPA, RINGTILE)}
        self.seconds = {attention: times[0] for attention, times in interleaved(samples, 1).items()}
        told = [f"{name} {duration_text(self.seconds[name])}, {bytes_text(self.peak_bytes[name])}" for name in samples]
        ratio = self.seconds[SDPA] / self.seconds[RINGTILE]
        progress.say(f"  {'; '.join(told)} (beyond weights): {ratio:.1f}x the speed, error {self.error:.1e}")

    def _model_and_tokens(self) -> tuple[Any, Tensor]:
        from transformers import ModernBertConfig, ModernBertModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
            config = ModernBertConfig(**self.sizes, **special, vocab_size=1000)
            return ModernBertModel(config).eval(), torch.randint(1, config.vocab_size, (1, self.n_tokens))

    @property
    def has_figures(self) -> bool:
        return bool(self.seconds)

    @property
    def passed(self) -> bool:
        """True if the outputs agree, or if nothing was compared."""
        return self.error is None or self.error <= BOUND

    def record(self) -> dict[str, Any]:
        return {
            "n_tokens": self.n_tokens,
            "sizes": self.sizes,
            "left_out": self.left_out,
            "error": self.error,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }

    def draw(self, path: Path) -> None:
        """Draw the time and the memory of both."""
        mebibytes = {name: peak / 2**20 for name, peak in self.peak_bytes.items()}
        with picture(path, 6, 3.4) as figure:
            both = figure.subplots(1, 2)
            for axes, what, heights in zip(both, ("seconds", "MiB"), (self.seconds, mebibytes), strict=True):
                grouped_bars(axes, list(heights), {what: list(heights.values())}, (BLUE,), {what: "{:.3g}"})
                axes.set_title(what)
            figure.suptitle(f"An encoder of {self.n_tokens:,} tokens, {threads_text()}")
