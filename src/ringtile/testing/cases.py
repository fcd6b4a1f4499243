"""The calls that a check makes: sizes at the boundaries of kernels, rules and tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ringtile.patterns import Causal, Dense, Documents, Window
from ringtile.testing.oracle import Rule, kept_pairs


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, and the first query's position: by default, both sides end together."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 40
    keys: int = 40
    head_dim: int = 8
    value_dim: int = 8
    start: int | None = None
    memory: str = "contiguous"
    """``strided``: the last dimension is not contiguous. ``expanded``: key heads share memory."""

    @property
    def first(self) -> int:
        return self.keys - self.queries if self.start is None else self.start

    @property
    def documents(self) -> list[int]:
        """Lengths of two documents, a third of the keys and the rest."""
        return [self.keys // 3, self.keys - self.keys // 3]

    def laid_out(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the tensors in the memory of this shape."""
        if self.memory == "strided":
            return [x.mT.contiguous().mT for x in (query, key, value)]
        if self.memory == "expanded":
            return [query, *(x[:, :1].expand_as(x) for x in (key, value))]
        return [query, key, value]


SHAPES = {
    "square": Shape(),
    "one token": Shape(queries=1, keys=1),
    "one query": Shape(queries=1, keys=130, head_dim=64, value_dim=64),
    "block - 1": Shape(queries=127, keys=127),
    "block": Shape(queries=128, keys=128, heads=2, key_heads=1),
    "block + 1": Shape(batch=1, queries=129, keys=129, head_dim=33),
    "ragged": Shape(queries=70, keys=203, heads=3, key_heads=3),
    "more queries": Shape(queries=150, keys=61),
    "from 0": Shape(queries=50, keys=120, start=0),
    "from 7": Shape(queries=33, keys=90, start=7, batch=3),
    "no keys": Shape(queries=5, keys=0),
    "no queries": Shape(queries=0, keys=20),
    "no batch": Shape(batch=0),
    "head_dim 1": Shape(head_dim=1, value_dim=1),
    "Dv != D": Shape(head_dim=16, value_dim=40),
    "wide": Shape(batch=1, heads=2, key_heads=1, head_dim=576, value_dim=512, queries=20, keys=60),
    "strided": Shape(memory="strided"),
    "expanded": Shape(memory="expanded"),
}

_count = partial(torch.arange, device="cpu")

RULES: dict[str, Callable[[Shape, torch.Generator], Rule]] = {
    "all": lambda shape, g: Dense(),
    "causal": lambda shape, g: Causal(),
    "window": lambda shape, g: Window(9, 3),
    "documents": lambda shape, g: Causal() & Documents(shape.documents),
    "padding": lambda shape, g: _padding(shape, g),
    "random": lambda shape, g: _random(shape, g),
    "scale": lambda shape, g: Dense(),
    "large": lambda shape, g: Dense(),
    "empty": lambda shape, g: _random(shape, g) & (_count(shape.queries)[:, None] % 2 == 1),
    "nan": lambda shape, g: _padding(shape, g),
}


def _padding(shape: Shape, g: torch.Generator) -> Tensor:
    """Return a mask ``[B, 1, 1, Nk]`` that leaves out the last keys."""
    size = shape.batch, 1, 1, 1
    lengths = torch.randint(1, max(shape.keys, 2), size, generator=g, device="cpu")
    return _count(shape.keys) < lengths


def _random(shape: Shape, g: torch.Generator) -> Tensor:
    """Return a mask ``[B, H, Nq, Nk]`` that keeps the first key."""
    size = shape.batch, shape.heads, shape.queries, shape.keys
    return (torch.randint(0, 2, size, generator=g, device="cpu") == 1) | (_count(shape.keys) == 0)


@dataclass(frozen=True)
class Case:
    """One call to check: a word of the rules, the dtype, the sizes and the seed.

    Raises ValueError for an unknown word, and for a dtype or heads that attention cannot have.
    """

    rule: str = "all"
    dtype: torch.dtype = torch.float32
    shape: Shape = Shape()
    seed: int = 0
    gradients: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rules: expected words of {' '.join(RULES)}, got {self.rule!r}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtypes: expected floating point, got {self.dtype}")
        if self.shape.heads % self.shape.key_heads:
            raise ValueError(f"shape.heads: expected a multiple of key_heads, got {self.shape}")

    @property
    def amplitude(self) -> float:
        """Standard deviation of queries and keys."""
        return 100.0 if self.rule == "large" else 1.0

    @property
    def scale(self) -> float:
        """Half the default in the rule ``scale``."""
        return (0.5 if self.rule == "scale" else 1.0) / math.sqrt(self.shape.head_dim)


def draw(case: Case, start: int) -> tuple[list[Tensor], Tensor, Rule, Tensor]:
    """Return the inputs, the output's gradient, the rule and its pairs, on the CPU.

    Rows without keys get all keys, except in the rule ``empty``.
    """
    s, g = case.shape, torch.Generator().manual_seed(case.seed)
    rule = RULES[case.rule](s, g)
    pairs = kept_pairs(rule, s.batch, s.heads, s.queries, s.keys, start=start)
    full = pairs | ~pairs.any(3, keepdim=True)
    if case.rule != "empty" and not full.equal(pairs):
        rule = pairs = full
    query, key, value, grad = (
        torch.randn(s.batch, *size, generator=g, dtype=torch.float64, device="cpu")
        for size in (
            (s.heads, s.queries, s.head_dim),
            (s.key_heads, s.keys, s.head_dim),
            (s.key_heads, s.keys, s.value_dim),
            (s.heads, s.queries, s.value_dim),
        )
    )
    inputs = [x.to(case.dtype) for x in (case.amplitude * query, case.amplitude * key, value)]
    if case.rule == "nan":
        unread = ~pairs[:, : s.key_heads].any(2).unsqueeze(3)
        inputs[1:] = [x.masked_fill(unread, torch.nan) for x in inputs[1:]]
    return s.laid_out(*inputs), grad.to(case.dtype), rule, pairs
