"""Groups of bars with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def grouped_bars(
    ax: Axes,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colors: Sequence[str],
    texts: Mapping[str, str],
) -> None:
    """Draw one group of bars per label, with a bar per series and its number by a format, unless that is empty."""
    # Groups are one unit apart, and 0.18 of it stays free between them.
    width = 0.82 / len(series)
    for number, ((name, heights), color) in enumerate(zip(series.items(), colors, strict=True)):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        bars = ax.bar(places, heights, width=0.93 * width, color=color, label=name)
        if texts[name]:
            ax.bar_label(bars, [texts[name].format(height) for height in heights], fontsize=7, padding=2)
    ax.set_xticks(range(len(labels)), labels)
    ax.tick_params(axis="x", length=0)
    ax.grid(True, axis="y")
