"""Pictures of adaptive attention: its densities, its recall, and the tiles that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringtile.adaptive import ControlReport, QualityReport, View
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Pattern
from ringtile.patterns.wrapped import for_heads
from ringtile.tools.plot import BLUE, ORANGE, PATTERN_COLORS, RED, axes_or_new, mark_positions, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 64
"""Row tiles whose masses exist at once."""
_MOST_NUMBERS = 400
"""Most cells of a picture that numbers are written into."""

_LABEL_INCHES = 0.5
"""Height of the numbers and the label below an axis."""


class Colors(NamedTuple):
    """Colors that can be read on the background of some axes."""

    ink: str
    faint: str
    series: tuple[str, ...]
    """Lines and bars, the most important first."""
    shades: tuple[str, ...]
    """A scale that begins near the background."""


_LIGHT = Colors("#22272e", "#e6e8eb", (BLUE, ORANGE, "#3b8a5a", "#8a5aa8", RED, "#6b7280"), PATTERN_COLORS)
_DARK = Colors(
    "#d5d9df",
    "#333942",
    ("#6cb0ea", "#f0954a", "#6cc492", "#bd93d8", "#ef7d76", "#9aa1a9"),
    ("#262b33", "#1f4468", "#2f73ad", "#6cb0ea", "#d3e8fb"),
)


def is_dark(color: Any) -> bool:
    """Return True for a color on which white text can be read."""
    from matplotlib.colors import to_rgb

    # The eye sees green as brighter than red, and red as brighter than blue.
    red, green, blue = to_rgb(color)
    return 0.3 * red + 0.59 * green + 0.11 * blue <= 0.5


def colors_on(ax: Axes) -> Colors:
    """Return the colors for axes on a light or a dark background."""
    return _DARK if is_dark(ax.get_facecolor()) else _LIGHT


def densities(shown: BlockIndex | ControlReport | Sequence[BlockIndex | ControlReport]) -> Tensor:
    """Return the density of each head, float64 ``[layers, heads]``: a mean over batch elements.

    It is the tile density of a `BlockIndex`, or that of a `ControlReport`. A sequence has one entry per layer.

    >>> from ringtile.patterns import Causal, Dense, per_head
    >>> densities(build_index(per_head([Dense(), Causal()]), 256, num_heads=2)).tolist()
    [[1.0, 0.75]]
    """
    layers = shown if isinstance(shown, Sequence) else [shown]
    return torch.stack([_of_heads(layer) for layer in layers])


def _of_heads(shown: BlockIndex | ControlReport) -> Tensor:
    if isinstance(shown, ControlReport):
        return shown.density.mean(0).double().cpu()
    kept = shown.trimmed().tiles.sum((0, 2, 3)).double().cpu()
    return kept * len(kept) / max(shown.allowed_tiles, 1)


def plot_density(
    shown: BlockIndex | ControlReport | Sequence[BlockIndex | ControlReport], ax: Axes | None = None
) -> Axes:
    """Draw the density of each head: bars for one layer, an image of layers and heads for several.

    ``shown`` is that of `densities`. Small images have numbers in percent.
    ``ax.images[0]`` is the image, for a color bar.

    >>> from ringtile.patterns import Causal
    >>> plot_density(build_index(Causal(), 256, num_heads=2)).get_ylabel()
    'tile density'
    """
    found = densities(shown)
    ax = axes_or_new(ax)
    from matplotlib.ticker import FixedLocator, MaxNLocator

    heads = found.shape[1]
    ax.xaxis.set_major_locator(MaxNLocator(16, integer=True) if heads > 16 else FixedLocator(range(heads)))
    ax.set_xlabel("head")
    return _density_bars(ax, found[0]) if len(found) == 1 else _density_image(ax, found)


def _density_bars(ax: Axes, found: Tensor) -> Axes:
    from matplotlib.ticker import PercentFormatter

    colors, mean = colors_on(ax), float(found.mean())
    of_bars = [colors.series[4] if value >= 1 else colors.series[0] for value in found.tolist()]
    bars = ax.bar(range(len(found)), found.tolist(), width=0.8, color=of_bars)
    line = ax.axhline(mean, color=colors.series[1], linewidth=1.4, linestyle="--")
    ax.set(ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1], ylabel="tile density")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dense = [bar for bar, value in zip(bars, found.tolist(), strict=True) if value >= 1]
    _legend(ax, [line, *dense[:1]], [f"mean {mean:.1%}", "all tiles"][: 1 + len(dense)])
    return ax


def _density_image(ax: Axes, found: Tensor) -> Axes:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    layers = len(found)
    scale = LinearSegmentedColormap.from_list("ringtile", colors_on(ax).shades)
    ax.imshow(found.numpy(), cmap=scale, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    ax.yaxis.set_major_locator(MaxNLocator(min(layers, 16), integer=True))
    ax.set_ylabel("layer")
    ax.spines[:].set_visible(False)
    if found.numel() <= _MOST_NUMBERS:
        size = max(4.5, min(9.0, 180 / layers))
        for layer, row in enumerate(found.tolist()):
            for head, value in enumerate(row):
                ink = "white" if is_dark(scale(value)) else "#22272e"
                ax.text(head, layer, f"{100 * value:.0f}", ha="center", va="center", color=ink, fontsize=size)
    return ax


def plot_recall(report: QualityReport, ax: Axes | None = None, *, target: float | None = None) -> Axes:
    """Draw a histogram of the recall of audited rows, of all heads together.

    Lines mark the mean, the recall that 5% of the rows do not reach, the worst head, and the ``target``, if given.
    Raises ValueError if no row has a recall, because the reference keeps no keys.

    >>> from ringtile.adaptive import audit
    >>> from ringtile.patterns import Causal, Window
    >>> q, k, v = torch.randn(3, 1, 2, 500, 16).unbind()
    >>> plot_recall(audit(q, k, v, build_index(Causal() & Window(100), 500, num_heads=2))).get_xlabel()
    'recall: part of the attention that is kept'
    """
    recall = report.recall[report.recall.isfinite()].flatten().cpu()
    if not recall.numel():
        raise ValueError(f"report: expected rows whose reference keeps keys, got {report.recall.shape=}, all NaN")
    ax = axes_or_new(ax)
    from matplotlib.ticker import PercentFormatter

    colors = colors_on(ax)
    # Most rows keep nearly all attention, so the axis begins just below the lowest mark.
    lowest = min(float(recall.min()), report.worst_head, 1.0 if target is None else target)
    low = max(0.0, min(0.9, int(lowest * 20) / 20))
    ax.hist(recall.numpy(), bins=40, range=(low, 1), weights=[1 / len(recall)] * len(recall), color=colors.series[0])
    marks = [
        (report.mean, f"mean {report.mean:.1%}", colors.ink, "-"),
        (report.p5, f"5% of the rows are below {report.p5:.1%}", colors.ink, ":"),
        (report.worst_head, f"worst head {report.worst_head:.1%}", colors.series[1], "--"),
    ]
    if target is not None:
        marks.append((target, f"target {target:.1%}", colors.series[4], "-."))
    for place, label, color, style in marks:
        ax.axvline(place, color=color, linestyle=style, linewidth=1.4, label=label)
    ax.set(xlim=(low, 1 + (1 - low) / 50), xlabel="recall: part of the attention that is kept", ylabel="rows")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=None))
    _legend(ax, columns=2)
    return ax


def plot_attention(
    query: Tensor,
    key: Tensor,
    index: BlockIndex,
    ax: Axes | None = None,
    *,
    head: int = 0,
    batch: int = 0,
    reference: Pattern | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Axes:
    """Draw the exact attention of a head, tile by tile, and the outline of the tiles that an index keeps.

    The color of a tile is the part of its rows' attention that its keys get, by dense attention of all queries.

    Args:
        query, key: ``[B, H, Nq, D]`` and ``[B, Hkv, Nk, D]``. Hkv must divide H.
        index: The kept pairs.
        ax: Where to draw. Default: a new figure.
        head, batch: Head and batch element to draw.
        reference: The pairs of exact attention. Default: the causal and document rules of the index.
        key_mask: ``[B, Nk]`` bool, True for keys that queries may attend to.
        scale: Factor for the scores. Default: ``D ** -0.5``.

    Returns the axes. ``ax.images[0]`` is the image, for a color bar. Raises ValueError if the shapes do not match, or
    if ``head`` or ``batch`` is out of range.

    >>> from ringtile.adaptive import select
    >>> q, k = torch.randn(2, 1, 4, 512, 16).unbind()
    >>> plot_attention(q, k, select(q, k, is_causal=True, block=32), head=3).get_ylabel()
    'query position'
    """
    masses = tile_masses(query, key, index, head=head, batch=batch, reference=reference, key_mask=key_mask, scale=scale)
    groups = index.group.shape
    kept = index.trimmed().tiles[batch if groups[0] > 1 else 0, head if groups[1] > 1 else 0].cpu()
    ax = axes_or_new(ax)
    from matplotlib.collections import LineCollection

    colors, top = colors_on(ax), index.first_row * index.block
    shade(ax, masses, colors.shades, (0, index.n_cols * index.block, top + index.n_rows * index.block, top))
    width = max(0.4, min(1.4, 60 / max(kept.shape)))
    lines = _outlines(kept, index.block, top)
    ax.add_collection(LineCollection(lines, colors=colors.series[1], linewidths=width, clip_on=False))
    return mark_positions(ax, index)


def tile_masses(
    query: Tensor,
    key: Tensor,
    index: BlockIndex,
    *,
    head: int = 0,
    batch: int = 0,
    reference: Pattern | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the exact attention of a head by tile, float32 ``[R, C]``, for the arguments of `plot_attention`.

    A row sums to 1, or less if some of its queries see no keys.

    >>> q, k = torch.randn(2, 1, 1, 256, 16).unbind()
    >>> from ringtile.patterns import Dense
    >>> tile_masses(q, k, build_index(Dense(), 256)).sum(1).allclose(torch.ones(2))
    True
    """
    shapes = (query.shape, key.shape, index.n_queries, index.n_keys)
    if query.dim() != 4 or key.dim() != 4 or shapes[2:] != (query.shape[2], key.shape[2]):
        raise ValueError(f"index: {index!r} does not match {query.shape=}, {key.shape=}")
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3] or len(query) != len(key):
        raise ValueError(f"key: expected [B, Hkv, Nk, D] with Hkv that divides H, got {query.shape=}, {key.shape=}")
    for name, number, size in (("head", head, query.shape[1]), ("batch", batch, len(query))):
        if not 0 <= number < size:
            raise ValueError(f"{name}: expected one of {size}, got {number}")
    if reference is None:
        reference = index.envelopes[batch if len(index.envelopes) > 1 else 0]
    elif reference.batch_size is not None:
        reference = reference.batch_row(batch)
    rule = for_heads(reference, (head,), query.shape[1])
    base = build_index(
        rule, index.n_queries, index.n_keys, start=index.start, num_heads=1, block=index.block, device=query.device
    )
    key_head = head * key.shape[1] // query.shape[1]
    q, k = query[batch : batch + 1, head : head + 1], key[batch : batch + 1, key_head : key_head + 1]
    mask = None if key_mask is None else key_mask[batch : batch + 1]
    view, found = View(q, k, base, mask, scale), torch.zeros(index.n_rows, index.n_cols, device=query.device)
    tokens = torch.arange(index.n_queries, device=query.device)
    row = index.row_of(tokens)
    # The weights of a row of tiles are block x N numbers, so only some rows exist at once.
    for some in tokens.split(_ROWS * index.block):
        found.index_add_(0, row[some], view.exact_masses(some.unsqueeze(1))[0, 0])
    return found / row.bincount(minlength=index.n_rows).clamp(min=1).unsqueeze(1)


def _outlines(kept: Tensor, block: int, top: int) -> list[list[tuple[int, int]]]:
    """Return the sides between kept tiles and others, as lines in positions."""
    # With a frame of tiles that are not kept, sides at the border are changes like all others.
    inside = torch.nn.functional.pad(kept.int(), (1, 1, 1, 1))
    lines = []
    for is_down, changes in ((True, inside.diff(dim=1)[1:-1]), (False, inside.diff(dim=0)[:, 1:-1].T)):
        # One line for each run of sides.
        runs = torch.nn.functional.pad((changes != 0).int().T, (1, 1)).diff(dim=1)
        begins, ends = ((runs == sign).nonzero().tolist() for sign in (1, -1))
        for (at, first), (_, last) in zip(begins, ends, strict=True):
            ends_of = [(at * block, first * block), (at * block, last * block)]
            lines.append([(x, y + top) if is_down else (y, x + top) for x, y in ends_of])
    return lines


def _legend(ax: Axes, *what: Any, columns: int = 3) -> None:
    """Draw the legend below the axes and their label, where it hides nothing and leaves room for a title."""
    from matplotlib.transforms import ScaledTranslation

    below = ScaledTranslation(0, -_LABEL_INCHES, ax.figure.dpi_scale_trans)
    ax.legend(
        *what,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        bbox_transform=ax.transAxes + below,
        borderaxespad=0,
        ncols=columns,
        labelcolor=colors_on(ax).ink,
        frameon=False,
        fontsize=9,
    )
