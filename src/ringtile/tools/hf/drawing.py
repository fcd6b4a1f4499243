"""The picture of `ringtile hf`: time and peak memory of each pass."""

from __future__ import annotations

from pathlib import Path

from ringtile.tools.hf.check import RINGTILE
from ringtile.tools.hf.study import Study
from ringtile.tools.plot import BLUE, GREY, picture


def draw(study: Study, path: Path) -> None:
    """Draw a panel of times and a panel of peak memory for each pass, with a bar for each entrant that was timed."""
    with picture(path, 10, 2 * len(study.passes) + 0.6) as figure:
        panels = figure.subplots(len(study.passes), 2, squeeze=False)
        for name, (times, memory) in zip(study.passes, panels, strict=True):
            timed = [entrant for entrant in reversed(study.entrants) if entrant.passes[name].seconds]
            labels = [entrant.name for entrant in timed]
            colors = [BLUE if entrant.peer == RINGTILE else GREY for entrant in timed]
            seconds = [entrant.passes[name].median or 0.0 for entrant in timed]
            peaks = [(entrant.passes[name].peak_bytes or 0) / 2**20 for entrant in timed]
            times.bar_label(times.barh(labels, seconds, color=colors), fmt="%.3g", fontsize=8, padding=2)
            memory.bar_label(memory.barh(labels, peaks, color=colors), fmt="%.3g", fontsize=8, padding=2)
            times.set_title(f"{name.capitalize()}: seconds")
            memory.set_title(f"{name.capitalize()}: peak MiB beyond weights")
            memory.set_yticks([])
            for axes in (times, memory):
                axes.margins(x=0.15)
        dtype = str(study.dtype).removeprefix("torch.")
        note = f"{study.title}, {study.loaded.ids.shape[1]:,} tokens, {dtype}"
        note += "" if study.pattern is None else f"\n--pattern: {study.pattern!r}"
        figure.supxlabel(note, fontsize=8, color="#4a5059", x=0.99, ha="right")
