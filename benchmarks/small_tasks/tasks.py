"""Tasks made from a seed: tokens, and the exact answer at each position that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ringtile.tools.hf.models import python_manual

NO_ANSWER = -100
"""The answer of a position that has none, which `F.cross_entropy` ignores."""


class Stage(NamedTuple):
    """A part of the training: ``steps`` batches at most, fewer once the model answers nearly all."""

    tokens: int
    batch: int
    steps: int
    size: int
    """Number of things to remember, see the task."""


@dataclass(frozen=True)
class Task:
    """A problem, and the model and training that solve it."""

    name: str
    summary: str
    draw: Callable[[int, int, int, Generator], tuple[Tensor, Tensor]]
    """``draw(batch, tokens, size, generator)``: int64 tokens ``[B, N]``, and answers ``[B, N]`` or `NO_ANSWER`."""
    vocabulary: int
    chance: float
    """Accuracy of answers drawn evenly from all that occur."""
    layers: int
    size: int
    """Size at the full length."""
    rows: int
    """Number of sequences to judge with."""
    stages: tuple[Stage, ...]
    start: Literal["mixed", "split"] = "split"
    """How the model starts, see `Reader`."""
    rotary: bool = False
    width: int = 64
    rate: float = 3e-3
    """Learning rate."""
    language: bool = False
    """True: judged by bits per byte, not by answers."""


def _distinct(batch: int, count: int, of: int, generator: Generator) -> Tensor:
    """Return ``count`` different numbers below ``of`` for each batch element."""
    # The order of random numbers is a random permutation of each row, and its beginning a draw without repetition.
    return torch.rand(batch, of, generator=generator).argsort(1)[:, :count]


_KEYS = 128
"""Tokens below this one are names, which are looked up. Values and filler are above it."""
_MARK = 128
_FIRST_VALUE = 129
_FIRST_FILLER = 240
_END = 256


def _blank(batch: int, tokens: int, low: int, high: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return filler, and no answers."""
    return torch.randint(low, high, (batch, tokens), generator=generator), torch.full((batch, tokens), NO_ANSWER)


def recall_pairs(batch: int, tokens: int, pairs: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall (MQAR, Arora et al., arXiv:2312.04927).

    Pairs of a name and a value are in the first half. Each name occurs once more in the second half, and the answer
    there is its value. All other tokens are values, too.
    """
    x, y = _blank(batch, tokens, _KEYS, _END, generator)
    half = tokens // 2
    name = _distinct(batch, pairs, _KEYS, generator)
    value = torch.randint(_KEYS, _END, (batch, pairs), generator=generator)
    # Pairs begin at even positions, so that no two overlap: with 8 tokens, the first half has the positions 0 and 2.
    place = 2 * _distinct(batch, pairs, half // 2, generator)
    x.scatter_(1, place, name).scatter_(1, place + 1, value)
    query = half + 2 * _distinct(batch, pairs, (tokens - half) // 2, generator)
    x.scatter_(1, query, name).scatter_(1, query + 1, value)
    return x, y.scatter_(1, query, value)


PASSKEY = 8
"""Number of tokens of a needle."""


def needles(batch: int, tokens: int, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Needle in a haystack: ``count`` passkeys of 8 names among filler, repeated in the second half.

    The answers are the second to the last token of each repeated passkey.
    """
    x, y = _blank(batch, tokens, _FIRST_FILLER, _END, generator)
    # A slot is one token longer than a passkey, so that filler parts any two.
    half, slot = tokens // 2, PASSKEY + 1
    names = _distinct(batch, count * PASSKEY, _KEYS, generator).unflatten(1, (count, PASSKEY))
    first = slot * _distinct(batch, count, half // slot, generator)
    second = half + slot * _distinct(batch, count, (tokens - half) // slot, generator)
    for number in range(PASSKEY):
        name = names[..., number]
        x.scatter_(1, first + number, name).scatter_(1, second + number, name)
        # The first token of a repeated passkey is a surprise. The others follow from the token before.
        if number:
            y.scatter_(1, second + number - 1, name)
    return x, y


def copied_span(batch: int, tokens: int, span: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Copy: a span of different tokens at a random place of the first half, and again in the second half.

    The answers are the second to the last token of the copy.
    """
    x, y = _blank(batch, tokens, _END, _END + 32, generator)
    half = tokens // 2
    # All tokens of the span differ, so each has one place to be found at.
    text = _distinct(batch, span, _END, generator)
    inside = torch.arange(span)
    first = torch.randint(0, half - span + 1, (batch, 1), generator=generator) + inside
    second = half + torch.randint(0, tokens - half - span + 1, (batch, 1), generator=generator) + inside
    x.scatter_(1, first, text).scatter_(1, second, text)
    return x, y.scatter_(1, second[:, :-1], text[:, 1:])


def assignments(batch: int, tokens: int, chains: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Variable tracking with two hops (the form of RULER, Hsieh et al., arXiv:2404.06654).

    The first quarter assigns values to names, ``a = 7``. The second quarter assigns names to names, ``b = a``. The
    second half asks for both: the answer to ``b`` is 7.
    """
    x, y = _blank(batch, tokens, _FIRST_FILLER, _END, generator)
    half = tokens // 2
    quarter = half // 2
    a, b = _distinct(batch, 2 * chains, _KEYS, generator).chunk(2, 1)
    value = torch.randint(_FIRST_VALUE, _FIRST_FILLER, (batch, chains), generator=generator)
    for begin, end, name, content in ((0, quarter, a, value), (quarter, half, b, a)):
        # An assignment is a name, its content and a mark that ends it, as in `b a ;`.
        place = begin + 3 * _distinct(batch, chains, (end - begin) // 3, generator)
        x.scatter_(1, place, name).scatter_(1, place + 1, content)
        x.scatter_(1, place + 2, torch.full_like(place, _MARK))
    query = half + 2 * _distinct(batch, 2 * chains, (tokens - half) // 2, generator)
    both = torch.cat([value, value], 1)
    x.scatter_(1, query, torch.cat([a, b], 1)).scatter_(1, query + 1, both)
    return x, y.scatter_(1, query, both)


_DIGITS = 10
LIST_TOKENS = 26
"""By depth 0 and 1: ten digits, MIN, MAX and the bracket that ends a list."""


def lists(batch: int, tokens: int, most: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Short ListOps (Nangia and Bowman, arXiv:1804.06028): nested MIN and MAX of digits, one list after another.

    Each list has two to ``most`` elements, and an element of an outer list is an inner list in one case of four. The
    answer at each closing bracket is the value of its list. Tokens name their depth.
    """

    def write(found: list[tuple[int, int]], draws: Iterator[float], depth: int) -> int:
        base, largest = depth * (LIST_TOKENS // 2), next(draws) < 0.5
        found.append((base + _DIGITS + largest, NO_ANSWER))
        values = []
        for _ in range(2 + int(next(draws) * (most - 1))):
            if depth == 0 and next(draws) < 0.25:
                values.append(write(found, draws, 1))
            else:
                values.append(int(next(draws) * _DIGITS))
                found.append((base + values[-1], NO_ANSWER))
        value = max(values) if largest else min(values)
        found.append((base + _DIGITS + 2, value))
        return value

    rows = []
    # A token takes at most two random numbers, and the last list can reach beyond the end.
    for drawn in torch.rand(batch, 4 * tokens, generator=generator).tolist():
        found: list[tuple[int, int]] = []
        draws = iter(drawn)
        while len(found) < tokens:
            write(found, draws, 0)
        rows.append(found[:tokens])
    x, y = torch.tensor(rows).unbind(2)
    return x.contiguous(), y.contiguous()


class _Manual:
    """Language modeling of the bytes of Python's manual: the answer is the next byte."""

    @cached_property
    def text(self) -> Tensor:
        """All bytes, int64."""
        return torch.frombuffer(bytearray(python_manual().encode()), dtype=torch.uint8).long()

    def __call__(self, batch: int, tokens: int, held_out: int, generator: Generator) -> tuple[Tensor, Tensor]:
        # The last tenth is held out. Models are judged on it, and never trained.
        end = len(self.text) * 9 // 10
        text = self.text[end:] if held_out else self.text[:end]
        begin = torch.randint(0, len(text) - tokens, (batch, 1), generator=generator)
        found = text[begin + torch.arange(tokens + 1)]
        return found[:, :-1], found[:, 1:]


manual_windows = _Manual()
