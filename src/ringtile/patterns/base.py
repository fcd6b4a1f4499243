"""Patterns: the element rule, the algebra, and the two questions that an index asks: which tiles, and which are equal.

All numbers are positions. Key ``b`` is at position ``b``, query ``a`` at ``start + a``. Tile ``t`` covers the positions
``[t * block, (t + 1) * block)``. Row tiles are numbered by position too, so their numbers can be negative if there are
more queries than keys, and rules use floor division.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ringtile.patterns.checks import LARGEST, checked_int
from ringtile.patterns.grid import Cover as Cover, TileGrid as TileGrid, number_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


index_builder: Callable[..., Any] | None = None
"""A hook that the room above fills: `ringtile.index.build` sets it to `build_index`. `Pattern.density`,
`Pattern.tile_density` and `Pattern.plot` need an index, and indices are above patterns."""

PLOTTER = "ringtile.tools.plot"
"""The module with `plot_pattern`, which is above too. `import ringtile` does not load it: `Pattern.plot` finds it by
name."""

_FEW = 1 << 12
"""Covers of so many tiles are listed, although another has fewer."""

_RULE = ("allowed", "terms", "kept", "draws", "unit")
"""Members that define which pairs a pattern keeps."""

_DERIVED = ("unbounded", "cover", "cover_size", "col_range", "tile_class", "head_class", "envelope", "resized")
"""Members that follow from the rule."""

_TOLD = (*_DERIVED, "num_heads", "batch_size", "batch_row", "validate")
"""Members that a text tells, for the classes of the grammar."""


@dataclass(frozen=True, eq=False, repr=False)
class Pattern:
    """An immutable, hashable description of the (query, key) pairs that attention keeps.

    Patterns combine with ``&``, ``|`` and ``~``. Subclasses are frozen dataclasses. They define the element rule
    `allowed`, the one source of truth. They can also define a `cover` and a `tile_class`, so that building an index
    does not evaluate every pair.

    >>> from ringtile.patterns import Causal, Window
    >>> Causal() & ~Window(3)
    causal & ~window(3)
    """

    text: str | None = field(init=False, default=None, compare=False)
    """The pattern in the words of the command line, or None if it has no text form."""

    _rule: ClassVar[tuple[str, ...]] = _RULE
    """The members of the rule that subclasses may define."""
    _has_text: ClassVar[bool] = True
    _size: ClassVar[tuple[str, int] | None] = None
    """The field that `resized` sets, and the `free_rank` of the pattern."""

    def __init_subclass__(cls, rule: tuple[str, ...] | None = None, **keywords: object) -> None:
        """Raise TypeError if a class overrides a rule from which its base derives a text, a cover or tile classes."""
        super().__init_subclass__(**keywords)
        bases = [base for base in cls.__mro__[1:] if issubclass(base, Pattern)]
        for base in bases:
            for name in _RULE:
                if name not in base._rule and getattr(cls, name, None) is not getattr(base, name, None):
                    raise TypeError(
                        f"{cls.__name__} overrides {name} of {base.__name__}, whose text, cover and tile classes would "
                        f"still mean {base.__name__}: derive from Pattern and define allowed, or combine patterns, for "
                        f"example {base.__name__}(...) & Elements(fn)"
                    )

        def differs(base: type[Pattern], names: tuple[str, ...]) -> bool:
            return any(getattr(cls, name) is not getattr(base, name) for name in names)

        # A class with its rule alone has nothing that a subclass could contradict.
        cls._rule = rule or (() if differs(Pattern, _DERIVED) else _RULE)
        cls._has_text = not any(differs(base, _TOLD) for base in bases if not base._rule)

    @property
    def unbounded(self) -> bool:
        """True if `allowed` is defined for all positions, not only within the lengths of a call. Default: False.

        The index of such a pattern is made of whole tiles, and serves all lengths that touch the same tiles.
        """
        return False

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return which pairs of query and key positions are kept: int64 in, bool of the broadcast shape out."""
        raise NotImplementedError

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        """Return candidate column tiles of each row tile in ``rows`` (int64). Default: those of `col_range`."""
        return Cover(rows, *self.col_range(head, rows, grid))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        """Return an upper bound of ``cover(...).size()`` in O(rows), without listing tiles."""
        return Cover(rows, *self.col_range(head, rows, grid)).size()

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        """Return one interval ``[lo, hi)`` of column tiles per row tile (int64, clipped) with all its kept pairs.

        Default: all column tiles.
        """
        return torch.zeros_like(rows), torch.full_like(rows, grid.n_cols)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        """Return a class per tile (int64 vectors in and out): 0 empty, 1 full, otherwise equal classes mean equal bits.

        Classes are comparable only within one call.
        """
        return 2 + (row - grid.first_row) * grid.n_cols + col

    def head_class(self, head: int) -> Hashable:
        """Return the class of a head. Heads of equal class have the same rule. Default: each its own."""
        return head

    @property
    def num_heads(self) -> int | None:
        """Number of heads that the pattern is defined for, or None for any."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Number of batch rows that the pattern is defined for, or None for any."""
        return None

    def batch_row(self, batch: int) -> Pattern:
        """Return the pattern of one batch row."""
        return self

    def envelope(self) -> Pattern:
        """Return the causal and document rules of the pattern. Density is measured against their pairs."""
        return Dense()

    def validate(self, grid: TileGrid) -> None:
        """Raise ValueError if the pattern does not support these lengths."""

    @property
    def free_rank(self) -> int | None:
        """Kind of the parameter that `resized` sets: 0 window or similar, 1 random blocks, 2 global tokens, or None."""
        return None if self._size is None else self._size[1]

    def resized(self, size: int) -> Pattern | None:
        """Return the pattern with its free parameter set to ``size``, or None if it has no free parameter.

        A larger size keeps the same pairs and more, except that larger segments begin at other tokens. A composition
        resizes the first of its sides with the smallest `free_rank`. Raises ValueError if the pattern does not allow
        the size.
        """
        return None if self._size is None else replace(self, **{self._size[0]: size})  # type: ignore[arg-type]

    def draw(
        self, n_queries: int, n_keys: int | None = None, *, head: int = 0, start: int | None = None, width: int = 64
    ) -> str:
        """Draw the kept pairs as text, at most ``width`` columns wide: ``█`` full, ``▒`` mixed, ``·`` empty.

        A cell is a square of ``ceil(max(n_queries, n_keys) / width)`` tokens. ``start`` is ``n_keys - n_queries`` by
        default. Raises ValueError above 4096 tokens.

        >>> print((~Dense() | Dense()).draw(2, 4))
        ████
        ████
        """
        n_keys = n_queries if n_keys is None else n_keys
        start = n_keys - n_queries if start is None else start
        if head < 0 or (self.num_heads is not None and head >= self.num_heads):
            raise ValueError(
                f"draw expects the number of one of {self.num_heads or 'any number of'} heads, got {head=}"
            )
        if self.batch_size is not None:
            raise ValueError(f"draw expects one batch row, batch_row(b).draw(...), got {self.batch_size=}")
        if max(n_queries, n_keys) > 4096:
            raise ValueError(
                f"draw expects at most 4096 tokens, got {n_queries=}, {n_keys=}: "
                "build_index(...).draw() draws longer sequences tile by tile"
            )
        if min(n_queries, n_keys, width) < 1:
            raise ValueError(
                f"draw expects positive n_queries, n_keys and width, got {n_queries=}, {n_keys=}, {width=}"
            )
        self.validate(TileGrid(block=1, start=start, n_queries=n_queries, n_keys=n_keys))
        cell, key = -(-max(n_queries, n_keys) // width), torch.arange(n_keys, device="cpu")
        keys_per_cell = torch.bincount(key // cell)
        lines = []
        for query in torch.arange(start, start + n_queries, device="cpu").split(cell):
            pairs = self.allowed(query.new_tensor(head), query.unsqueeze(1), key.unsqueeze(0)).sum(0)
            counts = torch.zeros_like(keys_per_cell).index_add_(0, key // cell, pairs)
            shade = (counts > 0).int() + (counts == keys_per_cell * len(query)).int()
            lines.append("".join("·▒█"[number] for number in shade.tolist()))
        return "\n".join(lines)

    def density(self, n_queries: int, n_keys: int | None = None, *, num_heads: int | None = None) -> float:
        """Return the fraction of pairs that the pattern keeps, of those that its causal and document rules allow.

        ``n_keys`` defaults to ``n_queries``. The result is the mean over ``num_heads`` heads, by default the number
        that the pattern is defined for, or one. It builds the index, or finds it in the cache. Raises ValueError as
        `build_index` does.

        >>> from ringtile.patterns import Causal, Window
        >>> round((Causal() & Window(1024)).density(16384), 3)
        0.121
        """
        return float(self._index(n_queries, n_keys, num_heads).density)

    def tile_density(self, n_queries: int, n_keys: int | None = None, *, num_heads: int | None = None) -> float:
        """Return the fraction of 128 x 128 tiles that attention computes. Run time follows this. See `density`.

        >>> from ringtile.patterns import Causal, Window
        >>> round((Causal() & Window(1024)).tile_density(16384), 3)
        0.135
        """
        return float(self._index(n_queries, n_keys, num_heads).tile_density)

    def plot(self, n_queries: int, n_keys: int | None = None, ax: Axes | None = None, *, head: int = 0) -> Axes:
        """Draw the kept pairs with matplotlib: queries down, keys across, at most 512 cells per side.

        Returns the axes, by default of a new figure: ``pattern.plot(4096).figure.savefig("pattern.png")``.
        Raises ImportError if matplotlib is missing, and ValueError as `build_index` does.
        """
        plotter = import_module(PLOTTER)
        if reason := plotter.missing_matplotlib():
            raise ImportError(reason)
        axes: Axes = plotter.plot_pattern(self._index(n_queries, n_keys, self.num_heads or head + 1), ax, head=head)
        return axes

    def _index(self, n_queries: int, n_keys: int | None, num_heads: int | None) -> Any:
        assert index_builder is not None, "ringtile.index fills it"
        heads = (self.num_heads or 1) if num_heads is None else num_heads
        return index_builder(self, n_queries, n_keys, num_heads=heads, batch=self.batch_size or 1)

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a pattern has no truth value: combine patterns with &, | and ~, not with and, or and not")

    def __repr__(self) -> str:
        return self.text if self.text is not None else f"<{type(self).__name__} without a text form>"

    def _set_int(self, owner: str, name: str, minimum: int = 0, maximum: int = LARGEST) -> None:
        """Make a field an int in ``[minimum, maximum]``. Raise ValueError that names it as an argument of ``owner``."""
        object.__setattr__(self, name, checked_int(owner, name, getattr(self, name), minimum, maximum))

    def _set_text(self, text: str | None) -> None:
        object.__setattr__(self, "text", text if self._has_text else None)


def same_for_heads(self: Pattern, head: int) -> Hashable:
    """Return one class for all heads: the `head_class` of rules that ignore the head."""
    return None


def sized(pattern: Pattern, size: int) -> Pattern:
    """Return a pattern with its free parameter set to ``size``, if it has one."""
    resized = pattern.resized(size)
    return pattern if resized is None else resized


def full_shape(kept: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand the result of a rule that ignores the head to the broadcast shape."""
    return kept.expand(torch.broadcast_tensors(head, query, key)[0].shape)


@dataclass(frozen=True, repr=False)
class Dense(Pattern):
    """Every query attends to every key.

    >>> Dense()
    dense
    """

    unbounded = True
    head_class = same_for_heads

    def __post_init__(self) -> None:
        self._set_text("dense")

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return full_shape(torch.ones((), dtype=torch.bool, device=query.device), head, query, key)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        return torch.ones_like(row)


class Composed(Pattern, rule=("allowed",)):
    """A pattern made of others, its `parts`: for the heads, batch elements and lengths for which all are defined."""

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns that it is made of."""
        raise NotImplementedError

    def rebuilt(self, parts: Sequence[Pattern]) -> Pattern:
        """Return the same composition of other parts."""
        raise NotImplementedError

    @property
    def unbounded(self) -> bool:
        return all(part.unbounded for part in self.parts)

    def head_class(self, head: int) -> Hashable:
        return tuple(part.head_class(head) for part in self.parts)

    @property
    def num_heads(self) -> int | None:
        return next(filter(None, (part.num_heads for part in self.parts)), None)

    @property
    def batch_size(self) -> int | None:
        return next(filter(None, (part.batch_size for part in self.parts)), None)

    def batch_row(self, batch: int) -> Pattern:
        return self.rebuilt([part.batch_row(batch) for part in self.parts])

    def validate(self, grid: TileGrid) -> None:
        for part in self.parts:
            part.validate(grid)

    @property
    def free_rank(self) -> int | None:
        return min((part.free_rank for part in self.parts if part.free_rank is not None), default=None)


@dataclass(frozen=True, repr=False)
class _Pair(Composed, rule=("allowed",)):
    """Base of `And` and `Or`: both sides must be defined for the same heads and batch rows."""

    first: Pattern
    second: Pattern
    sign: ClassVar[str]
    wins: ClassVar[int]
    """Whether a pair is kept if one side says so: 0 if both must keep it."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "batch_size"):
            sizes = (getattr(self.first, name), getattr(self.second, name))
            if None not in sizes and sizes[0] != sizes[1]:
                raise ValueError(f"both sides of a composition need the same {name}, got {sizes[0]} and {sizes[1]}")
        self._set_text(_joined(self.sign, self.first, self.second))

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.first, self.second

    def rebuilt(self, parts: Sequence[Pattern]) -> Pattern:
        return type(self)(*parts)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first, second = (part.allowed(head, query, key) for part in self.parts)
        return first | second if self.wins else first & second

    def col_range(self, head: int, rows: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
        (lo, hi), (low, high) = (part.col_range(head, rows, grid) for part in self.parts)
        if self.wins:
            return torch.minimum(lo, low), torch.maximum(hi, high)
        return torch.maximum(lo, low), torch.minimum(hi, high)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        a, b = (part.tile_class(head, row, col, grid) for part in self.parts)
        # A full side of `And` leaves the bits of the other, which its number tells. Only 0 and 1 have a meaning.
        number, wins = number_pairs(a, b), self.wins
        number[(a == 1 - wins) & (b == 1 - wins)] = 1 - wins
        number[(a == wins) | (b == wins)] = wins
        return number

    def resized(self, size: int) -> Pattern | None:
        if self.free_rank is None:
            return None
        if self.first.free_rank == self.free_rank:
            return type(self)(sized(self.first, size), self.second)
        return type(self)(self.first, sized(self.second, size))


def _joined(sign: str, first: Pattern, second: Pattern) -> str | None:
    """Return the text of a composition. Brackets around the right operand preserve the tree in a round trip."""
    if first.text is None or second.text is None:
        return None
    left = f"({first.text})" if sign == "&" and isinstance(first, Or) else first.text
    binds_tighter = sign == "|" and isinstance(second, And)
    right = f"({second.text})" if isinstance(second, _Pair) and not binds_tighter else second.text
    return f"{left} {sign} {right}"


@dataclass(frozen=True, repr=False)
class And(_Pair):
    """Keep the pairs that both patterns keep, written ``a & b``."""

    sign = "&"
    wins = 0

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        small, other = sorted(self.parts, key=lambda part: part.cover_size(head, rows, grid))
        least, most = (part.cover_size(head, rows, grid) for part in (small, other))
        cover = small.cover(head, rows, grid)
        if min(most, len(rows) * grid.n_cols) <= max(2 * least, _FEW):
            return cover.meet(other.cover(head, rows, grid), grid.n_cols)
        # To list a cover of many more tiles takes more time than the tiles that it leaves out: cut to its range alone.
        lo, hi = other.col_range(head, cover.row, grid)
        return Cover(cover.row, torch.maximum(cover.lo, lo), torch.minimum(cover.hi, hi))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return min(self.first.cover_size(head, rows, grid), self.second.cover_size(head, rows, grid))

    def envelope(self) -> Pattern:
        a, b = self.first.envelope(), self.second.envelope()
        if isinstance(a, Dense) or a == b:
            return b
        return a if isinstance(b, Dense) else And(a, b)


@dataclass(frozen=True, repr=False)
class Or(_Pair):
    """Keep the pairs that either pattern keeps, written ``a | b``."""

    sign = "|"
    wins = 1

    def cover(self, head: int, rows: Tensor, grid: TileGrid) -> Cover:
        covers = (part.cover(head, rows, grid) for part in self.parts)
        return Cover(*map(torch.cat, zip(*covers, strict=True)))

    def cover_size(self, head: int, rows: Tensor, grid: TileGrid) -> int:
        return self.first.cover_size(head, rows, grid) + self.second.cover_size(head, rows, grid)

    def envelope(self) -> Pattern:
        a, b = self.first.envelope(), self.second.envelope()
        return a if a == b else Dense()


class Wrapper(Composed, rule=("allowed",)):
    """A pattern of one other, `inner`. It has no free parameter."""

    inner: Pattern
    free_rank = None

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return (self.inner,)

    def rebuilt(self, parts: Sequence[Pattern]) -> Pattern:
        found: Pattern = replace(self, inner=parts[0])  # type: ignore[call-arg]
        return found


@dataclass(frozen=True, repr=False)
class Not(Wrapper):
    """Keep the pairs that a pattern does not keep, written ``~a``."""

    inner: Pattern

    def __post_init__(self) -> None:
        inner = self.inner.text
        brackets = isinstance(self.inner, _Pair)
        self._set_text(None if inner is None else f"~({inner})" if brackets else f"~{inner}")

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ~self.inner.allowed(head, query, key)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        inner = self.inner.tile_class(head, row, col, grid)
        return torch.where(inner <= 1, 1 - inner, inner)
