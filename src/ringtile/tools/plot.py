"""Pictures of patterns and curves, by matplotlib, which is imported on use and needs no display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringtile.index import BlockIndex
from ringtile.index.tiles import unpack_words
from ringtile.tools.record import whole
from ringtile.tools.units import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

BLUE, LIGHT_BLUE, ORANGE, GREY, RED = "#1f5f99", "#7fb0d8", "#d9772b", "#9aa1a9", "#b3362d"
_INK = "#22272e"
NOTE: Any = {"fontsize": 8, "color": "#4a5059"}
"""Small text beside a curve or below a picture."""

_STYLE: Any = {
    **{"axes.edgecolor": "#b8bdc4", "axes.labelcolor": _INK, "text.color": _INK, "grid.color": "#e6e8eb"},
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "white"),
    **dict.fromkeys(("xtick.color", "ytick.color"), "#4a5059"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.grid", "legend.frameon"), False),
    **{"axes.axisbelow": True, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"font.size": 10, "font.family": "DejaVu Sans", "lines.linewidth": 1.8, "savefig.dpi": 150},
}
"""matplotlib's settings."""

PATTERN_COLORS = ("#f3f4f6", "#cfe0f0", "#7fb0d8", "#2f73ad", "#123f6d")
_CHUNK_TILES = 64


def missing_matplotlib() -> str | None:
    """Return the reason why no picture can be drawn, or None."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install matplotlib"
    return None


def check_out(path: Path | None) -> None:
    """Raise ValueError if the option ``--out`` of a command names a picture that cannot be drawn."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"--out: expected a file name ending in {', '.join(FORMATS)}, got {str(path)!r}")
    if reason := missing_matplotlib():
        raise ValueError(f"--out: {reason}")


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of `width` by `height` inches, and write it whole to `path` at the end of the block."""
    import matplotlib
    from matplotlib.figure import Figure

    if path.suffix not in FORMATS:
        raise ValueError(f"path: expected a file name ending in {', '.join(FORMATS)}, got {str(path)!r}")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as draft:
            figure.savefig(draft, format=path.suffix[1:], bbox_inches="tight", pad_inches=0.15)


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the axes, or the axes of a new figure, which needs no display. Raises ImportError without matplotlib."""
    if ax is not None:
        return ax
    if reason := missing_matplotlib():
        raise ImportError(reason)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        return Figure(layout="constrained").add_subplot()


def occupancy(index: BlockIndex, *, head: int = 0, pixels: int = 512) -> tuple[Tensor, int]:
    """Return the share of kept pairs in square cells of the query-key plane, at most `pixels` cells per side.

    Returns float32 ``[rows, columns]`` of batch element 0, and the positions per side of a cell, a divisor or a
    multiple of the block. Cells begin at tile boundaries. The first row contains the first query, the last row and
    column contain the last query and key, and a cell that the lengths cut counts only the pairs that exist.

    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal, Window
    >>> shares, side = occupancy(build_index(Causal() & Window(4096), 1 << 20), pixels=256)
    >>> tuple(shares.shape), side
    ((256, 256), 4096)
    """
    groups = index.group.cpu()
    group = int(groups[0, head if groups.shape[1] > 1 else 0])
    rows, columns, block = index.n_rows, index.n_cols, index.block
    number, state = (part.cpu() for part in index.entries())
    slot = number // max(columns, 1)
    here = slot // max(rows, 1) == group
    row, column, state = (slot % max(rows, 1))[here], (number % max(columns, 1))[here], state[here]

    # A cell is a part of a tile if tiles are few, and several tiles if they are many. For 64 pixels, 10 tiles of 128
    # are cut by 4 into cells of 32, and 1,000 tiles are merged by 16 into cells of 2,048.
    cuts = 1
    while cuts < block and max(rows, columns) * cuts * 2 <= pixels:
        cuts *= 2
    merged = -(-max(rows, columns, 1) // pixels)
    side, high, wide = block // cuts * merged, -(-rows * cuts // merged), -(-columns * cuts // merged)
    # The first tile can begin before the first query, and the last ones can end after the last query and key. Tiles of
    # a kind have the same positions inside the lengths, and so the same counts.
    skipped = index.start - index.first_row * block
    query = torch.arange(rows * block, device="cpu").view(rows, block)
    inside = (query >= skipped) & (query < skipped + index.n_queries)
    query_kinds, query_kind = torch.unique(inside, dim=0, return_inverse=True)
    inside = torch.arange(columns * block, device="cpu").view(columns, block) < index.n_keys
    key_kinds, key_kind = torch.unique(inside, dim=0, return_inverse=True)

    kept, part = torch.zeros(high * wide, dtype=torch.float32, device="cpu"), torch.arange(cuts, device="cpu")
    for i, queries in enumerate(query_kinds):
        for j, keys in enumerate(key_kinds):
            mine = (query_kind[row] == i) & (key_kind[column] == j)
            down = (row[mine].unsqueeze(1) * cuts + part) // merged
            across = (column[mine].unsqueeze(1) * cuts + part) // merged
            cell = down.unsqueeze(2) * wide + across.unsqueeze(1)
            pairs = _pooled(index.table.bits.cpu(), queries.unsqueeze(1) & keys, cuts)[state[mine]]
            kept.index_add_(0, cell.flatten(), pairs.flatten())
    tall = torch.bincount(torch.arange(skipped, skipped + index.n_queries, device="cpu") // side, minlength=high)
    pairs = tall.unsqueeze(1) * torch.bincount(torch.arange(index.n_keys, device="cpu") // side, minlength=wide)
    shares = (kept.view(high, wide) / pairs)[skipped // side :]
    return shares[: int((tall > 0).sum()), : -(-index.n_keys // side)].contiguous(), side


def _pooled(bits: Tensor, inside: Tensor, cuts: int) -> Tensor:
    """Count the kept pairs inside, in ``cuts x cuts`` parts of each tile of the table and, last, of a full tile."""
    block = len(inside)
    tables = [unpack_words(some, block) & inside for some in bits.split(_CHUNK_TILES)]
    # The state of a full tile is -1: it finds the last entry.
    return torch.cat(
        [table.view(-1, cuts, block // cuts, cuts, block // cuts).float().sum((2, 4)) for table in [*tables, inside]]
    )


def shade(
    ax: Axes, values: Tensor, colors: Sequence[str], extent: tuple[float, float, float, float], most: float = 1.0
) -> Axes:
    """Draw a matrix as cells without a frame, from 0 to ``most``, over left, right, bottom and top positions."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    ax.imshow(
        values.cpu().numpy(),
        cmap=LinearSegmentedColormap.from_list("ringtile", colors),
        # The square root makes a window of a thousand tokens visible in a million, and small masses beside large ones.
        norm=PowerNorm(0.5, vmin=0.0, vmax=most, clip=True),
        extent=extent,
        interpolation="nearest",
    )
    # A few global tokens among a million are one cell wide: a frame would hide them.
    ax.spines[:].set_visible(False)
    return ax


def plot_pattern(index: BlockIndex, ax: Axes | None = None, *, head: int = 0, pixels: int = 512) -> Axes:
    """Draw the kept pairs of a pattern: queries down, keys across.

    The picture has at most `pixels` cells per side for any length. The color of a cell is its share of kept pairs.
    ``ax.images[0]`` is the image, for a color bar.
    """
    ax = axes_or_new(ax)
    shares, side = occupancy(index, head=head, pixels=pixels)
    first = index.first_row * index.block
    # Cells begin at tile boundaries. With start 30, block 64 and cells of 8, the first one begins at 24.
    top = first + (index.start - first) // side * side
    shade(ax, shares, PATTERN_COLORS, (0, shares.shape[1] * side, top + shares.shape[0] * side, top))
    return mark_positions(ax, index)


def mark_positions(ax: Axes, index: BlockIndex) -> Axes:
    """Label the queries of an index down, and its keys across."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    longest = max(index.n_queries, index.n_keys, 1)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MultipleLocator(_doubling(longest)) if longest >= 1024 else MaxNLocator(4, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    bottom = index.start + max(index.n_queries, 1)
    ax.set(xlim=(0, max(index.n_keys, 1)), ylim=(bottom, index.start), xlabel="key position", ylabel="query position")
    return ax


def _doubling(length: int) -> int:
    """Return the largest power of two that is at most a third of a length, or 1: three to six labels on an axis."""
    return 1 << max(0, (length // 3).bit_length() - 1)


def plot_traffic(traffic: Tensor, ax: Axes | None = None) -> Axes:
    """Draw who sends how much to whom: senders down, receivers across, from bytes int64 ``[P, P]``.

    The picture has at most 256 cells per side. The color of a cell is the most MiB of its pairs of ranks.
    ``ax.images[0]`` is the image, for a color bar.
    """
    ax = axes_or_new(ax)
    from matplotlib.ticker import MultipleLocator

    n_ranks = len(traffic)
    merged = -(-n_ranks // 256)
    cells = torch.nn.functional.pad(traffic, (0, -n_ranks % merged) * 2)
    most = cells.unflatten(1, (-1, merged)).unflatten(0, (-1, merged)).amax((1, 3)) / 2**20
    shade(ax, most, PATTERN_COLORS, (0, len(cells), len(cells), 0), float(most.max()) or 1.0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MultipleLocator(_doubling(n_ranks)))
    ax.set(xlim=(0, n_ranks), ylim=(n_ranks, 0), xlabel="receiving rank", ylabel="sending rank")
    return ax
