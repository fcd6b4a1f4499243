"""What a sparse pattern is, in the words of the system that ringtile succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtile.patterns.base import whole, wholes

BLOCK_SIZES = (64, 128, 256)

_GEOMETRY = {
    "local_window": ("local_window_size",),
    "dilated_sparse": ("dilation_rates",),
    "global_local": ("local_window_size", "global_tokens"),
}
"""Each pattern type and the arguments that shape it."""


@dataclass
class SparsePatternConfig:
    """The shape and the density of a pattern; changing a field takes effect at the next call.

    ``sparsity_ratio`` is a density: the fraction of pairs kept among those that causality allows, so 0.1 means a tenth
    of the work. Given, it sets the measured density, by the width of the window or the reach of the dilated blocks;
    None leaves the geometry as it is. Where the nearest density that can be reached is more than 2 % away, a warning
    names it once.

    Args:
        pattern_type: ``"local_window"``, a window exact in tokens; ``"dilated_sparse"``, blocks at multiples of the
            rates; ``"global_local"``, a window and global tokens, exact in tokens.
        sparsity_ratio: Density in (0, 1], or None.
        block_size: 64, 128 or 256 tokens a side: of the blocks of ``dilated_sparse`` and of patterns given as matrices,
            and of the matrices that `SparsePatternGenerator` returns.
        local_window_size: Tokens, half on each side; 512 where a type with a window leaves it out.
        global_tokens: How many of the first tokens see all and are seen by all; 64 where left out.
        dilation_rates: Distances in blocks, (1, 2, 4, 8, 16) where left out.
        min_sparsity: Least density, in (0, 1].
        max_sparsity: Greatest density, in (0, 1].
        enable_caching: Keep what was solved for a length; False solves it at every call.

    Raises:
        ValueError: Where a value is out of range, or an argument does not shape this ``pattern_type``.

    Example:
        >>> config = SparsePatternConfig("local_window", local_window_size=512)
        >>> config.sparsity_ratio = 0.1
        >>> config
        SparsePatternConfig(pattern_type='local_window', sparsity_ratio=0.1, block_size=128, local_window_size=512, ...)
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
        """Raise ValueError where a field is out of range or shapes nothing; fields may have changed since."""
        if self.pattern_type not in _GEOMETRY:
            raise ValueError(f"pattern_type: expected one of {tuple(_GEOMETRY)}, got {self.pattern_type!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {BLOCK_SIZES}, got {self.block_size!r}")
        for name in ("sparsity_ratio", "min_sparsity", "max_sparsity"):
            check_density(name, getattr(self, name))
        if None not in (self.min_sparsity, self.max_sparsity) and self.min_sparsity > self.max_sparsity:  # type: ignore[operator]
            raise ValueError(
                f"min_sparsity: expected at most {self.max_sparsity=}, got {self.min_sparsity=} (both are densities)"
            )
        for name in ("local_window_size", "global_tokens", "dilation_rates"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in _GEOMETRY[self.pattern_type]:
                raise ValueError(
                    f"{name}: changes nothing for pattern_type={self.pattern_type!r}, which is shaped by "
                    f"{' and '.join(_GEOMETRY[self.pattern_type])}; got {name}={value!r}"
                )
            if name == "dilation_rates":
                wholes("dilated_sparse", name, value, 1)
            else:
                whole(self.pattern_type, name, value, 1)


class PatternConfig(SparsePatternConfig):
    """`SparsePatternConfig` under the name that the pattern tools used: the same fields and defaults.

    >>> PatternConfig(pattern_type="global_local", sparsity_ratio=0.2).block_size
    128
    """


def check_density(name: str, value: float | None) -> None:
    """Raise ValueError unless ``value`` is None or in (0, 1]."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1):
        raise ValueError(f"{name}: expected a density in (0, 1], the fraction of pairs kept, got {value!r}")
