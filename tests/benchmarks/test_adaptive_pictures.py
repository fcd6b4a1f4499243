"""Pictures of adaptive attention: what they draw is what was measured, and they can be read on light and on dark."""

from __future__ import annotations

import doctest
import math
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import adaptive_pictures
from adaptive_pictures import (
    _outlines,
    densities,
    plot_attention,
    plot_density,
    plot_recall,
    tile_masses,
)

from ringtile.adaptive import (
    ControlReport,
    audit,
    select,
)
from ringtile.index import build_index
from ringtile.patterns import Causal, Documents, Pattern, Window, per_head
from ringtile.tools.plot import picture

mcolors = pytest.importorskip("matplotlib.colors")


def test_the_examples_print_what_they_say() -> None:
    found = doctest.testmod(adaptive_pictures)
    assert (found.failed, found.attempted > 10) == (0, True)


def report_of(density: Tensor) -> ControlReport:
    return ControlReport(density, torch.ones_like(density), density == 1)


def test_the_density_of_a_head_is_its_tiles_over_those_of_dense_attention() -> None:
    q, k = torch.randn(2, 2, 3, 200, 8).unbind()
    index = select(q, k, base=Causal() & Window(120), block=32)
    found = densities([index, index])
    assert found.shape == (2, 3)
    padded = torch.nn.functional.pad(index.to_dense(), (0, 24, 0, 24)).unflatten(3, (7, 32)).unflatten(2, (7, 32))
    tiles = padded.any(5).any(3).sum((2, 3)).double()
    assert torch.allclose(found[0], tiles.mean(0) / (7 * 8 / 2), atol=1e-12)
    assert found[0].mean().item() == pytest.approx(index.tile_density)


def exact_masses(q: Tensor, k: Tensor, allowed: Tensor, block: int, start: int, scale: float) -> Tensor:
    """Masses of tiles from the whole matrix of weights, in float64."""
    weights = (q.double() @ k.double().T * scale).masked_fill(~allowed, -math.inf).softmax(1).nan_to_num(0)
    row, col = (start + torch.arange(len(q))) // block, torch.arange(len(k)) // block
    row = row - row[0]
    found = torch.zeros(int(row[-1]) + 1, int(col[-1]) + 1, dtype=torch.float64)
    for at, of_query in zip(row.tolist(), weights, strict=True):
        found[at].index_add_(0, col, of_query)
    return found / row.bincount().unsqueeze(1)


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "reference", "masked", "rows"),
    [
        (200, 200, None, False, 64),
        (77, 150, None, True, 1),
        (150, 150, Causal() & Documents([70, 80]), False, 1),
        (150, 150, per_head([Causal(), Window(20), Causal(), Causal() & Window(9)]), True, 64),
    ],
)
def test_masses_are_those_of_dense_attention(
    n_queries: int, n_keys: int, reference: Pattern | None, masked: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_pictures, "_ROWS", rows)
    q, k = torch.randn(2, 4, n_queries, 16), torch.randn(2, 2, n_keys, 16)
    mask = torch.rand(2, n_keys) < 0.6 if masked else None
    index = build_index(Causal() & Window(40), n_queries, n_keys, num_heads=4, block=32)
    for head in (1, 3):
        found = tile_masses(q, k, index, head=head, batch=1, reference=reference, key_mask=mask, scale=0.5)
        position = torch.arange(n_keys - n_queries, n_keys).unsqueeze(1)
        rule = Causal() if reference is None else reference
        allowed = rule.allowed(torch.tensor(head), position, torch.arange(n_keys)).expand(n_queries, n_keys)
        allowed = allowed if mask is None else allowed & mask[1]
        expected = exact_masses(q[1, head], k[1, head // 2], allowed, 32, n_keys - n_queries, 0.5)
        assert torch.allclose(found.double(), expected, atol=1e-6)


def test_outlines_are_the_sides_between_kept_tiles_and_others() -> None:
    for _ in range(20):
        kept = torch.rand(5, 7) < 0.5
        sides = set()
        for (x0, y0), (x1, y1) in _outlines(kept, 10, 30):
            assert (x0 == x1) != (y0 == y1)
            # A line of several sides is cut at the corners of tiles.
            steps = max(x1 - x0, y1 - y0) // 10
            ends = [(x0 + (x1 - x0) * step // steps, y0 - 30 + (y1 - y0) * step // steps) for step in range(steps + 1)]
            sides |= set(pairwise(ends))
        framed = torch.nn.functional.pad(kept, (1, 1, 1, 1))
        expected = set()
        for row, col in product(range(6), range(8)):
            here, x, y = framed[row + 1, col + 1], 10 * col, 10 * row
            if here != framed[row + 1, col]:
                expected.add(((x, y), (x, y + 10)))
            if here != framed[row, col + 1]:
                expected.add(((x, y), (x + 10, y)))
        assert sides == expected


@cache
def _draws() -> dict[str, Callable[..., object]]:
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.bfloat16).unbind()
    index = select(q, k, is_causal=True, block=32)
    report = audit(q, k, v, index)
    return {
        "density": lambda ax: plot_density(index, ax),
        "densities": lambda ax: plot_density([report_of(torch.linspace(0, 1, 4)[None])] * 6, ax),
        "recall": lambda ax: plot_recall(report, ax, target=0.9),
        "attention": lambda ax: plot_attention(q, k, index, ax, head=1),
    }


def luminance(color: object) -> float:
    parts = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in mcolors.to_rgb(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: object, other: object) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


DARK = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#1b1e24"),
    **{"axes.edgecolor": "#5b626c", "axes.labelcolor": "#d5d9df", "text.color": "#d5d9df", "grid.color": "#333942"},
    **dict.fromkeys(("xtick.color", "ytick.color"), "#aab1bb"),
}
"""A style of a reader's own: pictures are drawn on axes that are given, too."""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["density", "densities", "recall", "attention"])
def test_text_and_lines_stand_out(name: str, dark: bool, tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.text import Text

    path = tmp_path / "picture.png"
    with picture(path, 6, 4) as figure, matplotlib.rc_context(DARK if dark else {}):
        figure.set_facecolor(matplotlib.rcParams["figure.facecolor"])
        ax = figure.add_subplot()
        _draws()[name](ax)
        ax.set_title("A title")
        background = figure.get_facecolor()
        assert (luminance(background) < 0.05) == dark
        on_cells = set(ax.texts)
        texts = [text for text in figure.findobj(Text) if text.get_text() and text not in on_cells]
        assert "A title" in {text.get_text() for text in texts}
        assert min(contrast(text.get_color(), background) for text in texts) >= 4.5
        lines = [line for axes in figure.axes for line in axes.lines]
        assert all(contrast(line.get_color(), background) >= 3 for line in lines)
        for text in on_cells:
            column, row = text.get_position()
            image = ax.images[0]
            cell = image.cmap(image.norm(float(image.get_array()[int(row), int(column)])))
            assert contrast(text.get_color(), cell) >= 3
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        _draws()["density"](None)
