"""The measurement of one model: the check, the losses, and interleaved times with peak memory."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ringtile.patterns import Pattern
from ringtile.tools.hf import check
from ringtile.tools.hf.check import EAGER, FLOAT32_BOUND, LOW_PRECISION, RINGTILE, gradients, switch, training_loss
from ringtile.tools.hf.models import Loaded, attention_config
from ringtile.tools.memory import peak_memory
from ringtile.tools.plot import BLUE, GREY, NOTE, picture
from ringtile.tools.progress import Progress
from ringtile.tools.timing import interleaved, seconds_of
from ringtile.tools.units import bytes_text, duration_text, first_line

PREFILL, TRAINING = "prefill", "training"


@dataclass
class Check:
    """A comparison with eager attention in float32."""

    what: str
    tokens: int
    dtype: str
    error: float
    """Relative L2 error: the largest of the logits of one token, or of all gradients together."""
    bound: float


@dataclass
class Timing:
    """The times of one pass."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """Beyond weights and results."""
    reason: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass
class Entrant:
    """An attention implementation in the model, and its results."""

    peer: str
    pattern: str | None = None
    checks: list[Check] = field(default_factory=list)
    loss: float | None = None
    same_tokens: int | None = None
    """How many tokens of greedy decoding come before the first that differs from eager attention's."""
    greedy_tokens: int | None = None
    reason: str = ""
    passes: dict[str, Timing] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.peer if self.pattern is None else f"{self.peer}, --pattern"


@dataclass
class Study:
    """Measures a model with its own mask, and with ``pattern`` if there is one."""

    loaded: Loaded
    pattern: Pattern | None
    dtype: torch.dtype
    peers: Sequence[str]
    passes: Sequence[str]
    rounds: int

    def __post_init__(self) -> None:
        self.model = self.loaded.model
        config = attention_config(self.model)
        self.is_causal = check.is_causal(self.model)
        self.vocab_size: int = config.vocab_size if self.is_causal else 1
        self.heads: int = config.num_attention_heads
        self.layers: int = config.num_hidden_layers
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.title = (
            f"{self.loaded.name}: {type(self.model).__name__}, {parameters / 1e6:,.1f}M parameters, "
            f"{self.layers} layers, {self.heads} heads"
        )
        # Eager attention has scores of all pairs, so long texts are checked by their beginning.
        self.checked_tokens = check.tokens_for_eager(self.loaded.ids.shape[1], self.heads)
        self.entrants = [Entrant(peer) for peer in self.peers] + [Entrant(RINGTILE)]
        if self.pattern is not None:
            self.entrants.append(Entrant(RINGTILE, repr(self.pattern)))

    @property
    def ours(self) -> list[Entrant]:
        """Ringtile with the model's own mask, and with the pattern."""
        return [entrant for entrant in self.entrants if entrant.peer == RINGTILE]

    @property
    def complaints(self) -> list[str]:
        return [f"{entrant.name}: {entrant.reason}" for entrant in self.ours if entrant.reason]

    def _pattern(self, entrant: Entrant) -> Pattern | None:
        return None if entrant.pattern is None else self.pattern

    def _switch(self, entrant: Entrant) -> None:
        switch(self.model, entrant.peer, self._pattern(entrant))

    @contextmanager
    def _refusals(self, entrant: Entrant, into: Entrant | Timing) -> Iterator[None]:
        """Keep the reason of a baseline that fails. Ringtile's own errors are raised."""
        try:
            yield
        except (RuntimeError, ValueError, ImportError, TypeError, AttributeError) as error:
            if entrant.peer == RINGTILE:
                raise
            into.reason = first_line(error)

    def run(self, progress: Progress) -> None:
        """Check, then measure. If ringtile is wrong, nothing is timed."""
        self.progress = progress
        self._check()
        if self.complaints:
            return
        for entrant in self.entrants if self.is_causal else ():
            self.progress.show(f"loss with {entrant.name}")
            with self._refusals(entrant, entrant):
                self._switch(entrant)
                entrant.loss, n_last = check.loss(self.model, self.loaded.ids, self.vocab_size)
                self.progress.say(f"{entrant.name}: loss {entrant.loss:.6f}, mean of {n_last:,} tokens")
        if self.loaded.reads_text and self.model.can_generate():
            self._greedy()
        inputs = self.loaded.inputs(self.loaded.ids.shape[1])
        if PREFILL in self.passes:
            self._measure(PREFILL, partial(check.prefill, self.model, inputs), None)
        if TRAINING in self.passes:
            forward, backward = partial(training_loss, self.model, inputs), partial(gradients, self.model)
            self._measure(TRAINING, forward, backward)

    def _check(self) -> None:
        # The reference has the rounded weights, so that only the arithmetic differs.
        self.model.to(self.dtype)
        for entrant in self.ours:
            for found in self._checks(entrant):
                entrant.checks.append(found)
                self.progress.say(
                    f"{entrant.name}: {found.what} of {found.tokens:,} of {self.loaded.ids.shape[1]:,} tokens against "
                    f"eager attention: error {found.error:.1e}, bound {found.bound:.1e}, {found.dtype}"
                )
                # NaN is not above a bound, and not right.
                if not found.error <= found.bound:
                    entrant.reason = f"wrong: error {found.error:.1e} of the {found.what}, over {found.bound:.1e}"
                    break

    def _checks(self, entrant: Entrant) -> Iterator[Check]:
        n, inputs = self.checked_tokens, self.loaded.inputs
        # For its backward pass, eager attention keeps the scores of all layers.
        few = check.tokens_for_eager(n, self.heads * self.layers)
        at, what = check.checked_positions(n, self.vocab_size), "logits" if self.is_causal else "outputs"
        computed: list[tuple[str, int, Callable[[], list[Tensor]], Callable[[list[Tensor], list[Tensor]], float]]] = [
            (what, len(at), lambda: [check.logits(self.model, inputs(n), at)], check.worst_error)
        ]
        if TRAINING in self.passes:
            computed.append((
                "gradients", few, lambda: gradients(self.model, training_loss(self.model, inputs(few))),
                check.gradient_error,
            ))  # fmt: skip
        expected: dict[str, list[Tensor]] = {}
        # A wrong mask that the rounding of the dtype hides shows in float32.
        for dtype in dict.fromkeys((torch.float32, self.dtype)):
            self.model.to(dtype)
            for what, tokens, compute, error_of in computed:
                self.progress.show(f"check the {what} of {entrant.name}")
                with check.eager_masks(self._pattern(entrant), self.heads):
                    switch(self.model, EAGER)
                    try:
                        eager = compute()
                    except (IndexError, RuntimeError, TypeError) as refusal:
                        raise ValueError(f"MODEL: refused {tokens} tokens: {first_line(refusal)}") from None
                # The first dtype is float32, so its eager results are the reference of all.
                reference = expected.setdefault(what, eager)
                self._switch(entrant)
                error = error_of(compute(), reference)
                bound = max(FLOAT32_BOUND, LOW_PRECISION * error_of(eager, reference))
                yield Check(what, tokens, str(dtype).removeprefix("torch."), error, bound)

    def _greedy(self) -> None:
        for entrant in self.ours:
            self.progress.show(f"greedy decoding with {entrant.name}")
            with check.eager_masks(self._pattern(entrant), self.heads):
                switch(self.model, EAGER)
                expected = check.greedy(self.model, self.loaded.ids)
            self._switch(entrant)
            equal = (check.greedy(self.model, self.loaded.ids) == expected).cumprod(0)
            entrant.same_tokens, entrant.greedy_tokens = int(equal.sum()), len(expected)
            same = f"{entrant.same_tokens} of {entrant.greedy_tokens}"
            self.progress.say(f"{entrant.name}: greedy decoding: the first {same} tokens are those of eager attention")

    def _measure(
        self, name: str, forward: Callable[[], Tensor], backward: Callable[[Tensor], list[Tensor]] | None
    ) -> None:
        def call() -> object:
            return forward() if backward is None else backward(forward())

        ready: dict[int, Callable[[], object]] = {}
        for number, entrant in enumerate(self.entrants):
            # A baseline that failed before is not tried again.
            timing = entrant.passes.setdefault(name, Timing(reason=entrant.reason))
            if timing.reason:
                continue
            self.progress.show(f"{name} with {entrant.name}: memory")
            with self._refusals(entrant, timing):
                self._switch(entrant)
                peaks = peak_memory(forward, backward, self.loaded.ids.device)
                timing.peak_bytes = max(peaks.forward, peaks.backward or 0)
                ready[number] = partial(self._time, entrant, name, call)
        interleaved(ready, self.rounds)
        self._say(name, self.progress)

    def _time(self, entrant: Entrant, name: str, call: Callable[[], object]) -> None:
        seconds = entrant.passes[name].seconds
        self.progress.show(f"{name} with {entrant.name}: round {len(seconds) + 1} of {self.rounds}")
        # The switch is not in the time.
        self._switch(entrant)
        seconds.append(seconds_of(call, 1, self.loaded.ids.device))

    def _say(self, name: str, progress: Progress) -> None:
        progress.say(f"{name}: median of {self.rounds} interleaved rounds [least, most]; peak beyond weights")
        base = next((e.passes[name].median for e in self.entrants if e.peer == "sdpa"), None)
        for entrant in self.entrants:
            timing = entrant.passes[name]
            if timing.median is None:
                progress.say(f"  {entrant.name:<20}{timing.reason}")
                continue
            assert timing.peak_bytes is not None
            ratio = "" if base is None else f"{base / timing.median:.2f}x"
            span = f"[{duration_text(min(timing.seconds))}, {duration_text(max(timing.seconds))}]"
            progress.say(
                f"  {entrant.name:<20}{duration_text(timing.median):>9}  {span:<20}{ratio:>7}"
                f"{bytes_text(timing.peak_bytes):>12}"
            )


def draw(study: Study, path: Path) -> None:
    """Draw a panel of times and a panel of peak memory for each pass, with a bar for each entrant that was timed."""
    with picture(path, 10, 2 * len(study.passes) + 0.6) as figure:
        panels = figure.subplots(len(study.passes), 2, squeeze=False)
        for name, (times, memory) in zip(study.passes, panels, strict=True):
            timed = [entrant for entrant in reversed(study.entrants) if entrant.passes[name].seconds]
            labels = [entrant.name for entrant in timed]
            colors = [BLUE if entrant.peer == RINGTILE else GREY for entrant in timed]
            seconds = [entrant.passes[name].median or 0.0 for entrant in timed]
            peaks = [(entrant.passes[name].peak_bytes or 0) / 2**20 for entrant in timed]
            times.bar_label(times.barh(labels, seconds, color=colors), fmt="%.3g", fontsize=8, padding=2)
            memory.bar_label(memory.barh(labels, peaks, color=colors), fmt="%.3g", fontsize=8, padding=2)
            times.set_title(f"{name.capitalize()}: seconds")
            memory.set_title(f"{name.capitalize()}: peak MiB beyond weights")
            memory.set_yticks([])
            for axes in (times, memory):
                axes.margins(x=0.15)
        dtype = str(study.dtype).removeprefix("torch.")
        note = f"{study.title}, {study.loaded.ids.shape[1]:,} tokens, {dtype}"
        note += "" if study.pattern is None else f"\n--pattern: {study.pattern!r}"
        figure.supxlabel(note, x=0.99, ha="right", **NOTE)
