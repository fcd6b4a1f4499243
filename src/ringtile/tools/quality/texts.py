"""Token sequences with a far copy and far needles, made of texts that every Python has, or of yours."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor

from ringtile.integrations.transformers.calibrate import far_repeat
from ringtile.tools.hf.models import python_manual, read_text

_CODE = ("typing", "tarfile", "inspect", "subprocess", "ast", "argparse", "zipfile", "configparser", "ssl", "mailbox")
_DOCUMENTED = ("_pydecimal", "unittest.mock", "logging", "pathlib", "shutil", "collections", "functools")
_CALIBRATION = ("doctest", "difflib", "statistics", "turtle", "optparse", "heapq", "random", "fractions")
"""Modules of Python. None of the files that calibrate is among the files that judge."""
_DESCRIBED = ("torch", "transformers")
_SOURCES = ("code", "manual", "readme", "docstrings")
"""The texts to judge by, if there are none of yours."""
_NAMES = (
    "amber", "birch", "cobalt", "dahlia", "ember", "falcon", "garnet", "hazel", "indigo", "jasper", "kestrel", "lotus",
    "maple", "nickel", "opal", "poppy", "quartz", "raven", "saffron", "topaz",
)  # fmt: skip
"""The names of the needles."""
_SETTLED = 8
"""Tokens of the second copy before the model can know that it is one."""
_FIRST, _BETWEEN, _NEEDLE, _SECOND, _QUESTION, _ANSWER = range(6)
"""The parts of a sequence."""


@dataclass(frozen=True, eq=False)
class FarCopy:
    """A sequence: some tokens, others with needles in them, the first ones again, and questions about the needles."""

    ids: Tensor
    """int64 ``[1, N]``."""
    repeat: int
    """Number of tokens of each copy."""
    kinds: tuple[str, str]
    """The names of the copied text and of the text between the copies."""
    parts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    """The part of each token ``[N]``, if the sequence is to judge by."""

    def _inside(self, part: int) -> Tensor:
        here = self.parts == part
        return (here[:-1] & here[1:]).nonzero().flatten()

    @property
    def first(self) -> Tensor:
        """Positions of the first copy whose next token is judged, int64."""
        return self._inside(_FIRST)

    @property
    def between(self) -> Tensor:
        """Positions of the text between the copies, without the needles."""
        return self._inside(_BETWEEN)

    @property
    def second(self) -> Tensor:
        """Positions of the second copy. The model cannot know its first tokens."""
        return self._inside(_SECOND)[_SETTLED:]

    @property
    def answers(self) -> Tensor:
        """Positions whose next token is a digit of an answer."""
        return (self.parts[1:] == _ANSWER).nonzero().flatten()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


class Texts:
    """Texts as tokens, and sequences drawn from them. ``files`` are texts, or folders of them, to judge by."""

    def __init__(self, encode: Callable[[str], list[int]], files: Sequence[Path] = ()) -> None:
        every = [each for file in files for each in (sorted(file.iterdir()) if file.is_dir() else [file])]
        self._encode, self._files = encode, {file.stem: read_text(file) for file in every}
        if len(self._files) < len(every):
            raise ValueError(f"--text: expected files of different names, got {', '.join(map(str, every))}")
        self.sources = tuple(self._files) or _SOURCES
        """The names of the texts to judge by."""
        self._known: dict[str, Tensor] = {}

    def tokens(self, kind: str) -> Tensor:
        """Return all tokens of one of the `sources` or of "calibration", int64. Any other name means all your files."""
        if kind not in self._known:
            joined = "\n\n".join(self._files.values()) if self._files else _words(kind)
            # Tokenizing takes seconds, and a run draws from each text several times.
            self._known[kind] = torch.tensor(
                self._encode(self._files.get(kind, joined)), dtype=torch.int64, device="cpu"
            )
        return self._known[kind]

    def far_copy(self, seed: int, n_tokens: int) -> FarCopy:
        """Draw a sequence to judge by, from the source that the seed counts to.

        A fifth of it is a copy of the first fifth. Up to 20 needles lie in the text between, and the questions at the
        end come a quarter to four fifths of the sequence later. Raises ValueError if the text is too short.
        """
        drawn = random.Random(seed)
        source, repeat = self.sources[seed % len(self.sources)], n_tokens // 5
        needles, questions = self._needles(drawn, n_tokens // 8)
        sizes = [sum(len(ids) for ids, _ in each) for each in (needles, questions)]
        text = n_tokens - 2 * repeat - sum(sizes)
        copied, between = self._some(source, repeat + text, drawn).split((repeat, text))
        # The last needle is a quarter of the sequence before the first question.
        last = text - (n_tokens // 4 - repeat)
        cuts = [0, *sorted(drawn.randrange(last + 1) for _ in needles), text]
        texts = [(between[begin:end], between.new_full((end - begin,), _BETWEEN)) for begin, end in pairwise(cuts)]
        parts = [(copied, torch.full_like(copied, _FIRST)), texts[0]]
        parts += chain.from_iterable(zip(needles, texts[1:], strict=True))
        parts += [(copied, torch.full_like(copied, _SECOND)), *drawn.sample(questions, len(questions))]
        ids, of = (torch.cat(each) for each in zip(*parts, strict=True))
        return FarCopy(ids[None], repeat, (source, f"{source} with needles"), of)

    def _needles(self, drawn: random.Random, most: int) -> tuple[list[tuple[Tensor, Tensor]], ...]:
        """Return needles and the questions about them, each as tokens and their parts, of at most so many tokens."""
        needles: list[tuple[Tensor, Tensor]] = []
        questions: list[tuple[Tensor, Tensor]] = []
        for name in drawn.sample(_NAMES, len(_NAMES)):
            digits = str(drawn.randrange(10_000, 100_000))
            sentence = f"\nThe secret number of {name} is {{}}."
            ids = torch.tensor(self._encode(sentence.format(digits)), dtype=torch.int64, device="cpu")
            most -= len(ids)
            if most < 0:
                break
            # A tokenizer can join digits with each other, or with their neighbors. Tokens of the answer are those that
            # change with it: all digits are others here, so its first and last token differ.
            other = self._encode(sentence.format("".join(str((int(digit) + 5) % 10) for digit in digits)))
            begin, end = _common(ids.tolist(), other), _common(ids.tolist()[::-1], other[::-1])
            of = torch.full_like(ids, _QUESTION)
            of[begin : len(of) - end] = _ANSWER
            needles.append((ids, torch.full_like(ids, _NEEDLE)))
            questions.append((ids, of))
        return needles, questions

    def calibration(self, seed: int, n_tokens: int, vocab_size: int) -> FarCopy:
        """Draw a sequence to calibrate by: random tokens, a text, and the same random tokens."""
        drawn = random.Random(seed)
        kind = " and ".join(self._files) or "calibration"
        whole = self.tokens(kind)[:n_tokens]
        if self._files and len(whole) == n_tokens and far_repeat(whole).any():
            return FarCopy(whole[None], 0, (kind, kind))
        repeat = n_tokens // 4
        # Random tokens can be known only by attention to their first copy. A text could be guessed.
        copied = whole.new_tensor([drawn.randrange(vocab_size) for _ in range(repeat)])
        between = self._some(kind, n_tokens - 2 * repeat, drawn)
        return FarCopy(torch.cat([copied, between, copied])[None], repeat, ("random tokens", kind))

    def _some(self, kind: str, size: int, drawn: random.Random) -> Tensor:
        whole = self.tokens(kind)
        if len(whole) < size:
            raise ValueError(f"--text: expected at least {size} tokens of {kind}, got {len(whole)}")
        offset = drawn.randrange(len(whole) - size + 1)
        return whole[offset : offset + size]


def _common(some: list[int], others: list[int]) -> int:
    """Return how many first tokens are equal."""
    return next(number for number, (a, b) in enumerate(zip(some, others, strict=False)) if a != b)


def _words(kind: str) -> str:
    match kind:
        case "manual":
            return python_manual()
        case "readme":
            return "\n\n".join(str(importlib.metadata.metadata(name)["Description"]) for name in _DESCRIBED)
        case "code":
            return "\n\n".join(map(_source, _CODE))
        case "docstrings":
            return "\n\n".join(_docstrings(_source(module)) for module in _DOCUMENTED)
    # Half of it is code, and half is English.
    return "\n\n".join(f"{_docstrings(source)}\n\n{source}" for source in map(_source, _CALIBRATION))


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    found: str = spec.loader.get_source(module)  # type: ignore[union-attr]
    return found


def _docstrings(source: str) -> str:
    parts = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, parts))
    return "\n\n".join(text for text in found if text and len(text) > 200)
