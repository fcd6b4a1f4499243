"""The section of docs/benchmarks.md on a GPU, from what benchmarks/gpu.py wrote."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

SPARSE = ("window", "causal window", "documents", "sink and window", "prefix", "global and local", "dilated")
FLEX = ("flex", "flex, tuned")


def _figure(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["median_ms"] is None else f"{row['median_ms']:.3g} ms"


def _best(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    timed = [row for row in rows if row["median_ms"] is not None]
    return min(timed, key=lambda row: row["median_ms"]) if timed else None


def _problem(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["asked"], row["n_tokens"], row["heads"], row["head_dim"], row["dtype"], row["direction"]


def _problems(record: dict[str, Any]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(_problem(row), []).append(row)
    return found


def _ratios(problems: dict[tuple[Any, ...], list[dict[str, Any]]], direction: str) -> list[float]:
    """FlexAttention's best time over ours, for each sparse mask of at least 32K tokens with D128."""
    ratios = []
    for (asked, n_tokens, _, head_dim, _, way), rows in problems.items():
        ours = _best([row for row in rows if row["peer"] == "ringtile"])
        theirs = _best([row for row in rows if row["peer"] in FLEX])
        if asked in SPARSE and n_tokens >= 32_768 and head_dim == 128 and way == direction and ours and theirs:
            ratios.append(theirs["median_ms"] / ours["median_ms"])
    return ratios


def gpu_section(record: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    device = next((name for name in record["machine"]["devices"] if name.startswith("cuda")), "no GPU")
    version = record["versions"]
    yield from ("", "## On a GPU", "", "```sh", "python benchmarks/gpu.py", "```", "")
    yield f"{device}; torch {version['torch']}, triton {version['triton']}, commit `{str(record['commit'])[:12]}`."
    yield f"{len(record['gate'])} cases of outputs and gradients are right against float64; the worst has"
    yield f"{max(record['gate'].values()):.0%} of the error that is allowed. compute-sanitizer: {record['sanitizer']}."
    problems = _problems(record)
    for direction in ("forward", "forward+backward"):
        if ratios := _ratios(problems, direction):
            mean = statistics.geometric_mean(ratios)
            yield f"Over FlexAttention's best, sparse masks, {direction}: {mean:.2f}x in the geometric mean,"
            yield f"{min(ratios):.2f}x at least."
    yield from ("", "| mask | N | H | D | dtype | direction | ringtile | FlexAttention | dense | error |")
    yield "|---|---:|---:|---:|---|---|---:|---:|---:|---:|"
    for (asked, n_tokens, heads, head_dim, dtype, direction), rows in problems.items():
        ours = next(row for row in rows if row["peer"] == "ringtile")
        flex = _best([row for row in rows if row["peer"] in FLEX])
        dense = _best([row for row in rows if row["peer"] in ("dense", "SDPA cuDNN")])
        error = "-" if ours["error"] is None else f"{ours['error']:.1e}"
        cells = (
            asked,
            f"{n_tokens:,}",
            heads,
            head_dim,
            dtype,
            direction,
            _figure(ours),
            _figure(flex),
            _figure(dense),
        )
        yield f"| {' | '.join(map(str, cells))} | {error} |"
    if record["model"]:
        yield from ("", "| tokens | layers | width | forward | index |", "|---:|---:|---:|---:|---:|")
        for row in record["model"]:
            sizes = f"{row['tokens']:,} | {row['layers']} | {row['width']}"
            yield f"| {sizes} | {row['seconds']:.3g} s | {1e3 * row['index_seconds']:.3g} ms |"
