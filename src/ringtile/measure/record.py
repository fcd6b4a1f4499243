"""What a benchmark leaves behind: rows and the machine they ran on, as JSON, as CSV, and compared with an older one."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

OURS = "ringtile"
DENSE = "dense"
"""Names of the two peers that ratios are made of."""

FORWARD = "forward"
BOTH = "forward+backward"
DIRECTIONS = (FORWARD, BOTH)

_FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One peer on one problem in one direction: figures, or the reason why it was left out."""

    asked: str
    """The pattern in the words of the request; `pattern` is what it came to, where a density was asked for."""
    pattern: str
    n_tokens: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    device: str
    block: int
    direction: str
    peer: str
    density: float
    """Kept pairs over the pairs that the causal and document rules in force allow."""
    tile_density: float
    ideal: float | None
    """1 / density: the speed-up over dense if time followed the kept pairs; None where nothing is kept."""
    median_ms: float | None = None
    low_ms: float | None = None
    """The 20th percentile."""
    high_ms: float | None = None
    """The 80th percentile."""
    rounds: int = 0
    error: float | None = None
    """Worst relative L2 error against float64 over the output (and gradients) of sampled rows; None if not finite."""
    error_bound: float | None = None
    peak_forward_bytes: int | None = None
    """Beyond inputs, outputs and gradients."""
    peak_backward_bytes: int | None = None
    speedup: float | None = None
    """Median time of dense attention over this one's, same problem and direction."""
    reason: str = ""
    """Why there is no time."""
    kv_heads: int | None = None
    """None: as many as heads."""
    n_queries: int | None = None
    """The last so many tokens; None: all."""
    threads: int | None = None
    """None: as many as the run has."""
    operations: float | None = None
    """Floating-point operations of the products over this peer's tiles; None where they are not known."""
    limit_ms: float | None = None
    """What these operations, the exponentials and the memory traffic take at the rates of the run and this clock."""
    clock: float | None = None
    """The rate of float32 multiply-adds between these rounds over that of the run: below 1, something else used the
    processor too. None where it is not known."""

    @property
    def problem(self) -> tuple[Any, ...]:
        """What two rows must share to be compared, peer and direction included."""
        sizes = (self.n_tokens, self.batch, self.heads, self.head_dim, self.block)
        parts = (self.kv_heads or self.heads, self.n_queries or self.n_tokens, self.threads)
        return (self.pattern, *sizes, *parts, self.dtype, self.device, self.direction, self.peer)

    @property
    def settled_ms(self) -> float | None:
        """The median at the clock of the run, to be compared with rows of other rounds."""
        return None if self.median_ms is None else self.median_ms * (self.clock or 1.0)

    @property
    def of_limit(self) -> float | None:
        """The limit over the time: 1 is as fast as this processor can be; None where either is not known."""
        return None if self.limit_ms is None or self.median_ms is None else self.limit_ms / self.median_ms


@dataclass(frozen=True)
class Record:
    """All rows of one run, with what is needed to repeat it."""

    seed: int
    seconds: float
    """How long the rounds of a case and direction took at least."""
    commit: str | None
    versions: dict[str, str | None]
    machine: dict[str, Any]
    rows: tuple[Row, ...]
    interrupted: bool = False
    peaks: dict[str, dict[str, float]] | None = None
    """The processor's rates by number of threads, measured in this run (`peak_rates`); None in older records."""

    def to_json(self) -> str:
        """One JSON object, as `from_json` reads it."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The inverse of `to_json`; ValueError where the text is something else."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a JSON record of ringtile bench, got no JSON: {error}") from None
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise ValueError(f"expected a JSON record of ringtile bench with format {_FORMAT}, got {text[:60]!r}")
        try:
            return cls(**{**found, "rows": tuple(Row(**row) for row in found["rows"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"expected a JSON record of ringtile bench, got other fields: {error}") from None

    def to_csv(self) -> str:
        """One line a row, with the machine's facts repeated in each, so that files can be appended."""
        facts = {
            "commit": self.commit,
            **self.versions,
            **{name: "; ".join(fact) if isinstance(fact, list) else fact for name, fact in self.machine.items()},
            **{
                f"{name} at {threads}": rate
                for threads, rates in (self.peaks or {}).items()
                for name, rate in rates.items()
            },
        }
        names = [f.name for f in fields(Row)]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*names, *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(row), **facts} for row in self.rows)
        return text.getvalue()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or an interruption, finds the old one or all of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class BreakEven:
    """From which length on sparse attention is not slower than dense."""

    asked: str
    dtype: str
    direction: str
    n_tokens: int | None
    """None where it was slower at the longest length."""
    measured: tuple[int, ...]


def break_even(rows: tuple[Row, ...]) -> list[BreakEven]:
    """For each pattern, dtype and direction the smallest length from which ours is never slower than dense.

    Not slower: our median is at most dense's 80th percentile. Lengths without both times do not count.
    """
    found: dict[tuple[str, str, str], dict[int, bool]] = {}
    dense = {row.problem[:-1]: row for row in rows if row.peer == DENSE}
    for row in rows:
        other = dense.get(row.problem[:-1])
        if row.peer == OURS and other is not None and row.median_ms is not None and other.high_ms is not None:
            lengths = found.setdefault((row.asked, row.dtype, row.direction), {})
            lengths[row.n_tokens] = row.median_ms <= other.high_ms
    result = []
    for (asked, dtype, direction), lengths in found.items():
        first = None
        for n_tokens in sorted(lengths, reverse=True):
            if not lengths[n_tokens]:
                break
            first = n_tokens
        result.append(BreakEven(asked, dtype, direction, first, tuple(sorted(lengths))))
    return result


def slower_rows(now: Record, before: Record, max_slowdown: float) -> list[str]:
    """One line for each of our rows whose time over dense grew by more than ``max_slowdown``, or that has none now.

    Ratios to dense of the same run are compared, so the two machines need not be equally fast. Raises ValueError
    where no row of ``before`` was measured now.
    """
    today = {row.problem: row for row in now.rows if row.peer == OURS}
    shared = [row for row in before.rows if row.problem in today and row.speedup is not None]
    if not shared:
        raise ValueError("the record to compare with shares no timed row with this run")
    lines = []
    for row in shared:
        assert row.speedup is not None
        mine = today[row.problem]
        what = f"{row.pattern}, N {row.n_tokens}, {row.dtype}, {row.direction}"
        if mine.speedup is None:
            lines.append(f"{what}: was {row.speedup:.2f}x dense, now left out: {mine.reason}")
        elif row.speedup > mine.speedup * max_slowdown:
            lines.append(
                f"{what}: {row.speedup / mine.speedup:.2f} times slower against dense, "
                f"{row.speedup:.2f}x before and {mine.speedup:.2f}x now"
            )
    return lines
