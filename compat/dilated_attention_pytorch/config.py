"""The configuration of a sparse pattern, in the words of the system that ringtile succeeds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ringtile.patterns.checks import checked_int, checked_ints

BLOCK_SIZES = (64, 128, 256)
TILE = 128
"""Tokens per side of the tiles that attention over a pattern computes."""

_SHAPING = {
    "local_window": ("local_window_size",),
    "dilated_sparse": ("dilation_rates",),
    "global_local": ("local_window_size", "global_tokens"),
    "adaptive": (),
}
"""Each pattern type and the fields that shape it."""

_ELSEWHERE = {"strided": "Strided", "random": "RandomBlocks", "hierarchical": "hierarchical"}
"""Pattern types that are patterns of `ringtile.patterns`, without a density to solve for."""


class PatternType(StrEnum):
    """The pattern types by name. `SparsePatternConfig` refuses the last four, and names the pattern to use instead."""

    LOCAL_WINDOW = "local_window"
    DILATED_SPARSE = "dilated_sparse"
    GLOBAL_LOCAL = "global_local"
    CONTENT_ADAPTIVE = "adaptive"
    STRIDED = "strided"
    RANDOM = "random"
    HIERARCHICAL = "hierarchical"
    LEARNED = "learned"


@dataclass
class SparsePatternConfig:
    """The shape and the density of a pattern; a changed field takes effect at the next call.

    ``sparsity_ratio`` is a density: the fraction of tiles computed, of the 128 x 128 tiles that dense attention under
    the same causal rule computes. 0.1 means a tenth of the work. A ratio sets the width of the window, or the reach of
    the dilated blocks, and rounds the global tokens up, so that all pairs of a computed tile are kept. Tiles come in
    diagonals, and each token keeps its own block: if the nearest density is more than 10% of the ratio away, a
    UserWarning names it. So does a field that another one overrides: the warning says which one decides.

    Args:
        pattern_type: A `PatternType` or its text: ``"local_window"``; ``"dilated_sparse"``, blocks at multiples of the
            rates; ``"global_local"``, a window and global tokens; ``"adaptive"``, the tiles that matter most to queries
            and keys, in each call.
        sparsity_ratio: Density in (0, 1]. Default: None, which leaves the geometry as the other fields set it, and is
            0.25 for ``"adaptive"``.
        block_size: 64, 128 or 256 tokens per side of a block. A ratio needs whole tiles: 64 counts as 128 there. A
            window without a ratio is exact in tokens.
        local_window_size: Tokens, half on each side. Default: 512. A ``sparsity_ratio`` decides instead.
        global_tokens: Number of first tokens that attend to all and that all attend to. Default: 64. With a ratio, they
            are whole blocks.
        dilation_rates: Distances in blocks. Default: (1, 2, 4, 8, 16).
        min_sparsity: Lowest density, in (0, 1].
        max_sparsity: Highest density, in (0, 1].
        enable_caching: True to remember the pattern of each length.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> config = SparsePatternConfig("global_local", global_tokens=16)
        >>> config.sparsity_ratio = 0.1
        >>> config
        SparsePatternConfig(pattern_type='global_local', sparsity_ratio=0.1, block_size=128, ..., global_tokens=16, ...)
    """

    pattern_type: str = "dilated_sparse"
    sparsity_ratio: float | None = None
    block_size: int = 128
    local_window_size: int | None = None
    global_tokens: int | None = None
    dilation_rates: Sequence[int] | None = None
    min_sparsity: float | None = None
    max_sparsity: float | None = None
    enable_caching: bool = True

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError if a field is out of range, and warn once of one that another overrides."""
        if isinstance(self.pattern_type, PatternType):
            self.pattern_type = self.pattern_type.value
        if self.pattern_type not in _SHAPING:
            pattern = _ELSEWHERE.get(self.pattern_type)
            instead = f"; use ringtile.patterns.{pattern}" if pattern else ""
            raise ValueError(f"pattern_type: expected one of {tuple(_SHAPING)}, got {self.pattern_type!r}{instead}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {BLOCK_SIZES}, got {self.block_size!r}")
        densities = {name: getattr(self, name) for name in ("sparsity_ratio", "min_sparsity", "max_sparsity")}
        for name, value in densities.items():
            # True is a number to Python, and would be a density of 1.
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= 1):
                raise ValueError(f"{name}: expected a density in (0, 1], the fraction of tiles computed, got {value!r}")
        if (self.min_sparsity or 0) > (self.max_sparsity or 1):
            raise ValueError(
                f"min_sparsity: expected at most max_sparsity={self.max_sparsity}, got {self.min_sparsity} (both are "
                "densities)"
            )
        for name in ("local_window_size", "global_tokens", "dilation_rates"):
            value = getattr(self, name)
            if value is not None:
                check = checked_ints if name == "dilation_rates" else checked_int
                setattr(self, name, check(self.pattern_type, name, value, 1))
        if self.pattern_type == "adaptive" and self.block_size > 128:
            raise ValueError(f"block_size: tiles that follow the content have at most 128, got {self.block_size}")
        # Every call checks again, because fields may have changed, and must not warn again. The set is no field, so
        # `repr`, `==` and the key of the solver leave it out.
        said = self.__dict__.setdefault("_said", set())
        for message in self._overridden():
            if message not in said:
                said.add(message)
                # Four frames up is your line: warn, check, __post_init__ and the __init__ that dataclass writes.
                warnings.warn(message, stacklevel=4)

    def _overridden(self) -> Iterator[str]:
        """Yield a sentence for each field that another one overrides: which one decides."""
        shaping = _SHAPING[self.pattern_type]
        for name in ("local_window_size", "global_tokens", "dilation_rates"):
            value = getattr(self, name)
            if value is not None and name not in shaping:
                yield (
                    f"{name}={value!r} changes nothing: pattern_type={self.pattern_type!r} decides, which is shaped by "
                    f"{' and '.join(shaping) or 'the contents'}"
                )
        if self.pattern_type == "adaptive":
            return
        # A ratio sets the width of the window and counts tiles. Without one, the window is exact in tokens, and only
        # bounds count tiles.
        if self.sparsity_ratio is not None:
            if self.local_window_size is not None and "local_window_size" in shaping:
                yield (
                    f"local_window_size={self.local_window_size} changes nothing: sparsity_ratio={self.sparsity_ratio} "
                    "decides, and sets the width of the window; None lets the window decide"
                )
            if self.block_size < TILE:
                yield (
                    f"block_size={self.block_size} shapes no pattern: sparsity_ratio={self.sparsity_ratio} decides, "
                    f"and keeps whole computed tiles of {TILE} x {TILE} tokens"
                )
        elif self.block_size < TILE or (self.block_size > TILE and not (self.min_sparsity or self.max_sparsity)):
            if "dilation_rates" in shaping:
                return
            yield (
                f"block_size={self.block_size} changes nothing: local_window_size={self.local_window_size or 512} "
                "decides, which is exact in tokens"
            )

    def bounded(self, density: float) -> float:
        """Return a density inside the bounds. A UserWarning names a ``sparsity_ratio`` that is outside."""
        low, high = self.min_sparsity, self.max_sparsity
        target = min(max(density, low or 0.0), high or 1.0)
        if target != density and self.sparsity_ratio is not None:
            warnings.warn(
                f"sparsity_ratio={density:g} is outside of min_sparsity={low} and max_sparsity={high} (all are "
                f"densities): {target:g} is used",
                stacklevel=3,
            )
        return target


PatternConfig = SparsePatternConfig
"""`SparsePatternConfig` under the name that the pattern tools used."""
