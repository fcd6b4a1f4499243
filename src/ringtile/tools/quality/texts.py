"""Token sequences with a far copy, made of texts that every Python has."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ringtile.integrations.transformers.calibrate import far_repeat
from ringtile.tools.hf.models import python_manual, read_text

_JUDGED = ("typing", "tarfile", "inspect", "subprocess", "ast", "argparse", "zipfile", "configparser", "ssl", "mailbox")
_CALIBRATION = ("doctest", "difflib", "statistics", "turtle", "optparse", "heapq", "random", "fractions")
"""Modules of Python. None of the files that calibrate is among the files that judge."""
_DESCRIBED = ("torch", "transformers")
KINDS = (("code", "prose"), ("markdown", "code"), ("prose", "code"), ("code", "markdown"))
"""The copied text and the text between the copies, by seed."""
_SETTLED = 8
"""Tokens of the second copy before the model can know that it is one."""


@dataclass(frozen=True, eq=False)
class FarCopy:
    """A sequence: some tokens, others, and the first ones again."""

    ids: Tensor
    """int64 ``[1, N]``."""
    repeat: int
    """Number of tokens of each copy."""
    kinds: tuple[str, str]
    """The names of the copied text and of the text between the copies."""
    offsets: tuple[int, int]
    """Where both begin in their texts, in tokens."""

    @property
    def first(self) -> Tensor:
        """Positions of the first copy whose next token is judged, int64."""
        return torch.arange(self.repeat - 1)

    @property
    def between(self) -> Tensor:
        """Positions of the text between the copies."""
        return torch.arange(self.repeat, self.ids.shape[1] - self.repeat - 1)

    @property
    def second(self) -> Tensor:
        """Positions of the second copy. The model cannot know its first tokens."""
        return torch.arange(self.ids.shape[1] - self.repeat + _SETTLED, self.ids.shape[1] - 1)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


class Texts:
    """Texts as tokens, and sequences drawn from them.

    Args:
        encode: The tokenizer: a text to its token ids.
        text: A text file in UTF-8 to judge by, in place of Python's own texts.

    Raises:
        ValueError: If the file is no text.

    >>> texts = Texts(lambda text: list(text[:20_000].encode()))
    >>> drawn = texts.far_copy(3, 256)
    >>> drawn.kinds, drawn.ids.shape, bool((drawn.ids[:, :64] == drawn.ids[:, -64:]).all())
    (('code', 'markdown'), torch.Size([1, 256]), True)
    """

    def __init__(self, encode: Callable[[str], list[int]], text: Path | None = None) -> None:
        self._encode, self._text = encode, text
        self._known: dict[str, Tensor] = {}

    def tokens(self, kind: str) -> Tensor:
        """Return all tokens of "code", "prose", "markdown", "calibration" or your "text", int64 ``[any]``."""
        if kind not in self._known:
            words = read_text(self._text) if kind == "text" and self._text is not None else _words(kind)
            # Tokenizing takes seconds, and a run draws from each text several times.
            self._known[kind] = torch.tensor(self._encode(words))
        return self._known[kind]

    def far_copy(self, seed: int, n_tokens: int) -> FarCopy:
        """Draw a sequence to judge by: a quarter of it is a copy of the first quarter.

        Raises ValueError if a text is too short.
        """
        drawn = random.Random(seed)
        # A text of yours has no kinds, so it is both the copy and what is between.
        kinds = ("text", "text") if self._text is not None else KINDS[seed % len(KINDS)]
        repeat = n_tokens // 4
        copied, between = (
            self._some(kind, size, drawn) for kind, size in zip(kinds, (repeat, n_tokens - 2 * repeat), strict=True)
        )
        return FarCopy(torch.cat([copied[0], between[0], copied[0]])[None], repeat, kinds, (copied[1], between[1]))

    def calibration(self, seed: int, n_tokens: int, vocab_size: int) -> FarCopy:
        """Draw a sequence to calibrate by: random tokens, a text, and the same random tokens.

        A text that has a far repeat by itself is taken as it is. Raises ValueError if a text is too short.
        """
        drawn = random.Random(seed)
        kind = "calibration" if self._text is None else "text"
        whole = self.tokens(kind)[:n_tokens]
        if self._text is not None and len(whole) == n_tokens and far_repeat(whole).any():
            return FarCopy(whole[None], 0, (kind, kind), (0, 0))
        repeat = n_tokens // 4
        # Random tokens can be known only by attention to their first copy. A text could be guessed.
        copied = torch.tensor([drawn.randrange(vocab_size) for _ in range(repeat)])
        between, offset = self._some(kind, n_tokens - 2 * repeat, drawn)
        return FarCopy(torch.cat([copied, between, copied])[None], repeat, ("random tokens", kind), (0, offset))

    def _some(self, kind: str, size: int, drawn: random.Random) -> tuple[Tensor, int]:
        whole = self.tokens(kind)
        if len(whole) < size:
            raise ValueError(f"--text: expected at least {size} tokens of {kind}, got {len(whole)}")
        offset = drawn.randrange(len(whole) - size + 1)
        return whole[offset : offset + size], offset


def _words(kind: str) -> str:
    match kind:
        case "prose":
            return python_manual()
        case "markdown":
            return "\n\n".join(str(importlib.metadata.metadata(name)["Description"]) for name in _DESCRIBED)
        case "code":
            return "\n\n".join(map(_source, _JUDGED))
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
