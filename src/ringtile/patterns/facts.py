"""Facts that follow from a pattern's rule alone, for every combinator: how far it reaches, and what it never keeps."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.patterns.base import And, Dense, Not, Or, Pattern
from ringtile.patterns.documents import Documents
from ringtile.patterns.local import Causal, GlobalTokens, Segments, Window
from ringtile.patterns.offsets import ANY, OffsetPattern
from ringtile.patterns.wrapped import InSegments, PerDocument, PerHead


class Reach(NamedTuple):
    """The keys that a pattern can keep: keys j < ``first``, and keys at most ``left`` tokens before the query."""

    first: int
    left: float
    """Tokens, or infinite if the pattern sets no bound."""
    ahead: bool
    """True if a query can keep keys after its own position."""

    @property
    def size(self) -> float:
        """Number of keys to hold for the next query, including its own."""
        return self.first + self.left + 1


def pattern_reach(pattern: Pattern) -> Reach:
    """Return which keys a cache has to hold for a pattern, at any length.

    The bound follows only from the words of the pattern, not from a length. Random blocks, strides, complements,
    documents and your own rules can reach any key.

    >>> from ringtile.patterns import Causal, Strided, streaming
    >>> pattern_reach(streaming(sinks=4, window=256))
    Reach(first=4, left=256, ahead=False)
    >>> pattern_reach(Causal() & Strided(64)).left
    inf
    """
    match pattern:
        case And(first=a, second=b):
            one, other = pattern_reach(a), pattern_reach(b)
            both = Reach(max(one.first, other.first), min(one.left, other.left), one.ahead and other.ahead)
            # Each side bounds the intersection.
            return min(one, other, both, key=lambda reach: reach.size)._replace(ahead=both.ahead)
        case Or(parts=parts) | PerHead(parts=parts):
            firsts, lefts, aheads = zip(*map(pattern_reach, parts), strict=True)
            return Reach(max(firsts), max(lefts), any(aheads))
        case OffsetPattern(terms=terms, unit=unit):
            left = max(term.left for term in terms)
            ahead = unit > 1 or any(term.right > 0 for term in terms)
            return Reach(0, math.inf if left >= ANY else (left + 1) * unit - 1, ahead)
        case GlobalTokens(tokens=tokens):
            return Reach(tokens if isinstance(tokens, int) else tokens[-1] + 1, 0, ahead=True)
        case Segments(length=length) | InSegments(length=length):
            return Reach(0, length - 1, ahead=length > 1)
        case PerDocument(inner=inner) if pattern_reach(inner).first == 0:
            return pattern_reach(inner)
    return Reach(0, math.inf, ahead=True)


class Band(NamedTuple):
    """The keys ``i - left <= j <= i + right`` of query i, aligned to the lower right. None means no limit."""

    left: int | None
    right: int | None

    @property
    def is_causal(self) -> bool:
        """True for plain causal attention, which has its own flag in the kernels."""
        return self.left is None and self.right == 0

    def cut(self, n_keys: int) -> "Band":
        """Return the band for ``n_keys`` keys: a side that reaches past all of them has no limit."""
        left, right = (None if side is not None and side >= n_keys else side for side in self)
        return Band(left, right)


def band_of(pattern: Pattern) -> Band | None:
    """Return the band of a pattern, such as ``Band(9, 0)`` of ``Causal() & Window(9)``, or None if it is not one."""
    match pattern:
        case Dense():
            return Band(None, None)
        case Causal():
            return Band(None, 0)
        case Window(left=left, right=right):
            return Band(left, right)
        case And(first=first, second=second):
            one, other = band_of(first), band_of(second)
            if one and other:
                sides = ([x for x in pair if x is not None] for pair in zip(one, other, strict=True))
                return Band(*(min(side, default=None) for side in sides))
    return None


def sees_no_future(pattern: Pattern) -> bool:
    """Return True if it is certain that a pattern keeps no key after its query."""
    bounds = pattern.envelope()
    if isinstance(bounds, And):
        return sees_no_future(bounds.first) or sees_no_future(bounds.second)
    return isinstance(bounds, Causal)


def keeps_self(pattern: Pattern) -> bool:
    """Return True if it is certain that each token attends to itself."""
    match pattern:
        case And(first=first, second=second):
            return keeps_self(first) and keeps_self(second)
        case Or(first=first, second=second):
            return keeps_self(first) or keeps_self(second)
        case Segments(dilation=dilation):
            return dilation == 1
        case PerDocument(inner=inner):
            return keeps_self(inner)
    return isinstance(pattern, Causal | Dense | Documents | Window)


def moves_along(pattern: Pattern) -> bool:
    """Return True if a pattern keeps the same pairs after all positions move by the same number."""
    match pattern:
        case And(parts=parts) | Or(parts=parts) | Not(parts=parts) | PerHead(parts=parts):
            return all(map(moves_along, parts))
        case OffsetPattern(unit=unit):
            return unit == 1
    return isinstance(pattern, Dense)


def key_bounds(rule: Pattern, query: Tensor, n_keys: int) -> tuple[Tensor, Tensor] | None:
    """Return the interval ``[lo, hi)`` of keys that each query position keeps, or None if a rule keeps other sets."""
    if isinstance(rule, Documents):
        bounds = rule.bounds.tensor[0].to(query.device)
        document = torch.searchsorted(bounds[1:-1], query, right=True)
        return bounds[document], bounds[document + 1]
    if (band := band_of(rule)) is not None:
        lo = torch.zeros_like(query) if band.left is None else (query - band.left).clamp(0, n_keys)
        hi = torch.full_like(query, n_keys) if band.right is None else (query + band.right + 1).clamp(0, n_keys)
        return lo, hi
    if not isinstance(rule, And):
        return None
    first, second = (key_bounds(side, query, n_keys) for side in rule.parts)
    if first is None or second is None:
        return None
    return torch.maximum(first[0], second[0]), torch.minimum(first[1], second[1])
