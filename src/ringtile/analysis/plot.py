"""Pictures of patterns and curves: matplotlib is imported on use, drawn without a display, and never shown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringtile.layout import BlockIndex
from ringtile.layout.tiles import unpack_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

BLUE, LIGHT_BLUE, ORANGE, GREY, RED = "#1f5f99", "#7fb0d8", "#d9772b", "#9aa1a9", "#b3362d"
_INK = "#22272e"

_STYLE: Any = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#b8bdc4",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#e6e8eb",
    "text.color": _INK,
    "xtick.color": "#4a5059",
    "ytick.color": "#4a5059",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 150,
}

_PATTERN_COLORS = ("#f3f4f6", "#cfe0f0", "#7fb0d8", "#2f73ad", "#123f6d")
_CHUNK_TILES = 64


def missing_matplotlib() -> str | None:
    """Why no picture can be drawn here, or None."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install 'ringtile[plot]' brings it"
    return None


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure in the house style, `width` by `height` inches, written whole to `path` on leaving the block."""
    import matplotlib
    from matplotlib.figure import Figure

    if path.suffix not in FORMATS:
        raise ValueError(f"path: expected a file name ending in {', '.join(FORMATS)}, got {str(path)!r}")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        # A picture that is interrupted half-written must not replace a whole one.
        part = path.with_name(f".{path.name}.part")
        try:
            figure.savefig(part, format=path.suffix[1:], bbox_inches="tight", pad_inches=0.15)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        return Figure(layout="constrained").add_subplot()


def count_text(number: float) -> str:
    """A token count as people write it.

    >>> count_text(1048576), count_text(16384), count_text(1000)
    ('1M', '16K', '1,000')
    """
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if number >= size and number % (size // 4) == 0:
            return f"{number / size:g}{unit}"
    return f"{number:,.0f}"


def occupancy(index: BlockIndex, *, head: int = 0, batch: int = 0, pixels: int = 512) -> tuple[Tensor, int]:
    """The share of kept pairs in square cells of the query-key plane, as a picture of at most `pixels` a side.

    Returns float32 ``[rows, columns]`` (row 0 begins at the first row tile, column 0 at key 0) and the number of
    positions along a cell's side: a whole fraction or multiple of the block.

    >>> from ringtile.layout import build_index
    >>> from ringtile.patterns import Causal, Window
    >>> shares, side = occupancy(build_index(Causal() & Window(4096), 1 << 20), pixels=256)
    >>> tuple(shares.shape), side
    ((256, 256), 4096)
    """
    groups = index.group.cpu()
    group = int(groups[batch if len(groups) > 1 else 0, head if groups.shape[1] > 1 else 0])
    rows, columns, block = index.n_rows, index.n_cols, index.block
    number, state = (part.cpu() for part in index.entries())
    slot = number // max(columns, 1)
    here = slot // max(rows, 1) == group
    row, column, state = (slot % max(rows, 1))[here], (number % max(columns, 1))[here], state[here]
    bits = index.bits.cpu()

    cuts = 1
    while cuts < block and max(rows, columns) * cuts * 2 <= pixels:
        cuts *= 2
    if cuts > 1:
        shares = torch.zeros(rows, columns, cuts, cuts)
        shares[row, column] = _pooled(bits, block, cuts)[state]
        return shares.transpose(1, 2).reshape(rows * cuts, columns * cuts), block // cuts

    merged = -(-max(rows, columns, 1) // pixels)
    high, wide = -(-rows // merged), -(-columns // merged)
    shares = torch.zeros(high * wide)
    shares.index_add_(0, row // merged * wide + column // merged, _pooled(bits, block, 1)[state].flatten())
    tiles_down = torch.bincount(torch.arange(rows) // merged, minlength=high)
    tiles_across = torch.bincount(torch.arange(columns) // merged, minlength=wide)
    return shares.view(high, wide) / (tiles_down[:, None] * tiles_across), block * merged


def _pooled(bits: Tensor, block: int, cuts: int) -> Tensor:
    """The share of kept pairs in ``cuts x cuts`` parts of each tile of the table, and at the end of a full tile."""
    side = block // cuts
    pooled = []
    for some in bits.split(_CHUNK_TILES):
        pooled.append(unpack_words(some, block).view(-1, cuts, side, cuts, side).float().mean((2, 4)))
    # The state of a full tile is -1: it finds the last entry.
    return torch.cat([*pooled, torch.ones(1, cuts, cuts)])


def plot_pattern(
    index: BlockIndex, ax: Axes | None = None, *, head: int = 0, batch: int = 0, pixels: int = 512
) -> Axes:
    """Draw which pairs a pattern keeps: queries down, keys across, one cell a pixel or more.

    The picture has at most `pixels` cells a side however long the sequence is; a cell's colour is the share of its
    pairs that are kept. ``ax.images[0]`` is the image, for a colour bar.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    ax = _axes(ax)
    shares, side = occupancy(index, head=head, batch=batch, pixels=pixels)
    top = index.first_row * index.block
    ax.imshow(
        shares.numpy(),
        cmap=LinearSegmentedColormap.from_list("ringtile", _PATTERN_COLORS),
        # The square root lets a window of a thousand tokens be seen in a million.
        norm=PowerNorm(0.5, vmin=0.0, vmax=1.0, clip=True),
        extent=(0, shares.shape[1] * side, top + shares.shape[0] * side, top),
        interpolation="nearest",
    )
    ax.set_xlim(0, max(index.n_keys, 1))
    ax.set_ylim(index.start + max(index.n_queries, 1), index.start)
    longest = max(index.n_queries, index.n_keys, 1)
    for axis in (ax.xaxis, ax.yaxis):
        doubling = 2 ** max(0, (longest // 3).bit_length() - 1)
        axis.set_major_locator(MultipleLocator(doubling) if longest >= 1024 else MaxNLocator(4, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    ax.set_xlabel("key position")
    ax.set_ylabel("query position")
    # A few global tokens among a million are one cell wide and would lie under a frame.
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax


class Curve(NamedTuple):
    """One line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str = BLUE
    style: str = "-"
    """A matplotlib line style; dashed for what was not measured."""
    marker: str = ""


def plot_curves(curves: Sequence[Curve], ax: Axes | None = None, *, x_label: str = "", y_label: str = "") -> Axes:
    """Draw curves over one pair of axes, with a legend of those that have a label."""
    ax = _axes(ax)
    for curve in curves:
        ax.plot(
            curve.x,
            curve.y,
            color=curve.color,
            linestyle=curve.style,
            marker=curve.marker,
            markersize=5,
            label=curve.label or "_unlabelled",
        )
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.grid(True)
    if any(curve.label for curve in curves):
        ax.legend()
    return ax
