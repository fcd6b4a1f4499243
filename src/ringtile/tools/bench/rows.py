"""The record of `ringtile bench`: one row per peer, problem and direction, and comparisons of rows."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ringtile.tools import record
from ringtile.tools.record import OURS


@dataclass(frozen=True)
class Row:
    """One peer on one problem in one direction: its figures, or the reason why it was left out."""

    asked: str
    """The pattern as requested. `pattern` is the result of it, if a density was requested."""
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
    """Kept pairs over the pairs that the causal and document rules allow."""
    tile_density: float
    ideal: float | None
    """1 / density: the speedup over dense if time followed the kept pairs, or None if no pairs are kept."""
    median_ms: float | None = None
    low_ms: float | None = None
    """The 20th percentile."""
    high_ms: float | None = None
    """The 80th percentile."""
    rounds: int = 0
    error: float | None = None
    """Worst relative L2 error against float64 over output and gradients of sampled rows, or None if not finite."""
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
    """The number of queries, which are the last tokens. None: all tokens."""
    threads: int | None = None
    """None: as many as the run has."""
    operations: float | None = None
    """Floating-point operations of the matmuls over this peer's tiles, or None if they are not known."""
    limit_ms: float | None = None
    """The time of these operations, the exponentials and the memory traffic at the rates of the run and this clock."""
    clock: float | None = None
    """The rate of float32 multiply-adds between these rounds over the rate of the run. Below 1, other processes used
    the processor, too. None if it is not known."""

    @property
    def problem(self) -> tuple[Any, ...]:
        """All that two rows must share to be compared, peer and direction included."""
        # A record says None for what a run does by default, so a default and its value are one problem.
        sizes = (self.n_tokens, self.batch, self.heads, self.head_dim, self.block)
        parts = (self.kv_heads or self.heads, self.n_queries or self.n_tokens, self.threads)
        return (self.pattern, *sizes, *parts, self.dtype, self.device, self.direction, self.peer)

    @property
    def of_limit(self) -> float | None:
        """The limit over the time: 1 is as fast as this processor can be. None if either is not known."""
        return None if self.limit_ms is None or self.median_ms is None else self.limit_ms / self.median_ms

    @property
    def doubts(self) -> list[str]:
        """Reasons to measure again, as on a machine that other processes use."""
        found = []
        # The rates of a run are known to a few percent.
        if self.of_limit is not None and self.of_limit > 1.05:
            found.append("faster than the limit, whose rates were measured too low")
        if self.low_ms and self.high_ms and self.high_ms > 1.5 * self.low_ms:
            found.append(f"times vary {self.high_ms / self.low_ms:.1f}x")
        if self.clock is not None and self.clock < 0.8:
            found.append(f"had {self.clock:.0%} of the processor")
        return found

    @property
    def sizes(self) -> str:
        """Heads, head dim, dtype, and whatever is not the default: "H8:2 D64 float32 block 64 1 query"."""
        parts = [f"H{self.heads}" if self.kv_heads is None else f"H{self.heads}:{self.kv_heads}"]
        parts += [f"D{self.head_dim}", self.dtype]
        parts += [f"block {self.block}"] if self.block != 128 else []
        for number, one, many in ((self.n_queries, "query", "queries"), (self.threads, "thread", "threads")):
            parts += [] if number is None else [f"{number} {one if number == 1 else many}"]
        return " ".join(parts)

    @property
    def memory(self) -> str:
        """Peak bytes of the passes: "0.1 + 0.2 MiB", empty if they were not measured."""
        peaks = [peak for peak in (self.peak_forward_bytes, self.peak_backward_bytes) if peak is not None]
        return f"{' + '.join(f'{peak / 2**20:.1f}' for peak in peaks)} MiB" if peaks else ""


@dataclass(frozen=True, kw_only=True)
class Record(record.Record):
    """All rows of one run, and all that is needed to repeat it."""

    seed: int
    seconds: float
    """The least time that the rounds of a case and direction took."""
    rows: tuple[Row, ...] = ()
    peaks: dict[str, dict[str, float]] | None = None
    """The processor's rates by number of threads, measured in this run (`peak_rates`), or None in older records."""
    warning: str | None = None
    """What the run said about other processes when it began, if they used the machine."""

    OF: ClassVar[str] = "ringtile bench"

    row_of = staticmethod(lambda found: Row(**found))


class BreakEven(NamedTuple):
    """The length from which sparse attention is not slower than dense."""

    asked: str
    dtype: str
    direction: str
    n_tokens: int | None
    """None if it was slower at the longest length."""
    measured: tuple[int, ...]


def break_even(rows: tuple[Row, ...]) -> list[BreakEven]:
    """Return, by pattern, dtype and direction, the smallest length from which ringtile is never slower than dense.

    Not slower means that its median is at most dense's median. Lengths without both times do not count.
    """
    found: dict[tuple[str, str, str], dict[int, bool]] = {}
    for row in rows:
        if row.peer == OURS and row.speedup is not None:
            found.setdefault((row.asked, row.dtype, row.direction), {})[row.n_tokens] = row.speedup >= 1
    result = []
    for (asked, dtype, direction), lengths in found.items():
        # A length that is slower hides the shorter ones, whatever they did.
        slower = max((n_tokens for n_tokens, is_fast in lengths.items() if not is_fast), default=0)
        first = min((n_tokens for n_tokens in lengths if n_tokens > slower), default=None)
        result.append(BreakEven(asked, dtype, direction, first, tuple(sorted(lengths))))
    return result


def slower_rows(now: Record, before: Record, max_slowdown: float) -> list[str]:
    """Return a line for each row of ringtile that lost its time, or more than ``max_slowdown`` of its ratio to dense.

    Ratios of the same run are compared, so the two machines need not be equally fast. Raises ValueError if no row of
    ``before`` was measured now.
    """
    # Baselines belong to PyTorch, and a change of theirs is no fault of ringtile.
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
