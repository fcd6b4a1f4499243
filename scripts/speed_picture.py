"""Draw README's picture, docs/assets/speed.png, from benchmarks/records: `python scripts/speed_picture.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from benchmark_page import records
from matplotlib.axes import Axes
from pictures import INK, TEXT
from suites import WINDOWS

from ringtile.tools.bench.rows import Record, Row
from ringtile.tools.plot import picture
from ringtile.tools.record import BOTH, DENSE, OURS
from ringtile.tools.units import count_text, duration_text

PATH = Path(__file__).resolve().parents[1] / "docs" / "assets" / "speed.png"
BLUE, ORANGE = "#3f8ccc", "#d9822b"


def times(record: Record, peer: str, direction: str = BOTH) -> dict[int, Row]:
    """The timed rows of a peer by their length."""
    rows = (row for row in record.rows if (row.peer, row.direction) == (peer, direction) and row.median_ms)
    return {row.n_tokens: row for row in rows}


def draw_density(axes: Axes, density: Record, acceptance: Record) -> None:
    """Draw how many times as fast as dense attention training is, against the tile density."""

    def of(rows: tuple[Row, ...], asked: tuple[str, ...] | None) -> list[tuple[float, float]]:
        return sorted(
            (row.tile_density, row.speedup or 0.0)
            for row in rows
            if (row.peer, row.direction, row.dtype) == (OURS, BOTH, "float32") and (asked is None or row.asked in asked)
        )

    tiles, windows = of(density.rows, None), of(acceptance.rows, WINDOWS[:2])
    shares = [tiles[0][0], 1.0]
    axes.loglog(shares, [1 / share for share in shares], color=INK, lw=1, ls=":", label="1 / tile density")
    axes.loglog(*zip(*tiles, strict=True), color=BLUE, marker="o", ms=5, label="random tiles")
    axes.loglog(
        *zip(*windows, strict=True), color=ORANGE, marker="s", ms=5, ls="none", label=" and ".join(WINDOWS[1::-1])
    )
    axes.axhline(1, color=INK, lw=1, label="PyTorch's dense attention")
    for share, speedup in tiles:
        axes.annotate(f"{speedup:.1f}x", (share, speedup), (8, 5), textcoords="offset points", fontsize=8.5)
    marks = [0.02, 0.05, 0.1, 0.25, 0.5, 1]
    axes.set_xticks(marks, [f"{mark:.0%}" for mark in marks])
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1x", "2x", "5x", "10x", "20x", "50x"])
    axes.set_title("Training is faster as you keep less", fontsize=10)
    axes.set_xlabel("tiles that the pattern keeps", fontsize=9)
    axes.set_ylabel("times as fast as dense", fontsize=9)


def draw_length(axes: Axes, record: Record) -> None:
    """Draw the time of attention with a fixed window, and of dense attention, against the length."""
    ours, dense = times(record, OURS), times(record, DENSE)
    longest = dense[max(dense)]
    further = [max(dense), max(ours)]
    axes.loglog(
        further,
        [(longest.median_ms or 0.0) / 1e3 * (length / longest.n_tokens) ** 2 for length in further],
        color=INK,
        lw=1,
        ls=":",
    )
    for rows, color, name in ((dense, INK, "dense, dotted: extrapolated"), (ours, BLUE, "ringtile")):
        seconds = [(row.median_ms or 0.0) / 1e3 for row in rows.values()]
        axes.loglog(list(rows), seconds, color=color, marker="o", ms=5, label=name)
        for length, second in zip(rows, seconds, strict=True):
            place = {"xytext": (4, -14) if rows is ours else (-8, 8), "textcoords": "offset points"}
            axes.annotate(duration_text(second), (length, second), fontsize=8.5, ha="center", **place)
    axes.set_xticks(list(ours), [count_text(length) for length in ours])
    axes.set_yticks([0.1, 1, 10, 60, 600, 3600], ["100 ms", "1 s", "10 s", "1 min", "10 min", "1 h"])
    axes.set_ylim(0.02, 6000)
    axes.set_xlim(min(ours) / 1.6, max(ours) * 1.6)
    axes.set_title("A window of 1,024 is linear in the length", fontsize=10)
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_ylabel("forward and backward, one head", fontsize=9)


def draw(path: Path) -> None:
    found = records()
    with picture(path, 9.2, 3.7) as figure:
        matplotlib.rcParams.update({"savefig.dpi": 110, "savefig.transparent": True, "axes.edgecolor": INK, **TEXT})
        axes = figure.subplots(1, 2)
        draw_density(axes[0], found["density"], found["acceptance"])
        draw_length(axes[1], found["long"])
        for one in axes:
            one.minorticks_off()
            one.tick_params(labelsize=8.5)
            one.spines[["top", "right"]].set_visible(False)
            one.legend(fontsize=8.5, frameon=False, loc="upper right" if one is axes[0] else "upper left")
        machine = found["density"].machine
        figure.supxlabel(
            f"{machine['cores']} cores, {machine['cpu']}, {machine['instruction_set']}, float32", fontsize=8, color=INK
        )


if __name__ == "__main__":
    draw(PATH)
    print(f"wrote {PATH}")
