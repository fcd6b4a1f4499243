"""Counts, times, sizes and errors as text."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

_UNITS = {"K": 1 << 10, "M": 1 << 20}
MOST_TOKENS = 1 << 40


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's name if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def count(text: str) -> int:
    """Read a positive whole number, for ``type=`` of argparse: ``16384``, ``16K``, ``1M`` or ``1e6``.

    Raises argparse.ArgumentTypeError: If it is something else, or above 2^40.

    >>> count("16K"), count("1M"), count("1e6"), count("1.5k"), count("131,072")
    (16384, 1048576, 1000000, 1536, 131072)
    """
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        number = Decimal((text if unit == 1 else text[:-1]).replace(",", "")) * unit
        # A Decimal keeps 1e6 whole and 1.5K exact, and reports "nan" and "1e999999999" as errors of arithmetic.
        if 1 <= number <= MOST_TOKENS and number == int(number):
            return int(number)
    except ArithmeticError:
        pass
    raise argparse.ArgumentTypeError(
        f"expected a whole number from 1 to {MOST_TOKENS:,} such as 16384, 16K, 1M or 1e6, got {text!r}"
    )


def count_text(number: float) -> str:
    """Write a token count.

    >>> count_text(1048576), count_text(16384), count_text(1000)
    ('1M', '16K', '1,000')
    """
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        # Quarters have two decimals at most: 1.25K, but 1,000 is no round number of K.
        if number >= size and number % (size // 4) == 0:
            return f"{number / size:g}{unit}"
    return f"{number:,.0f}"


def aligned(rows: Sequence[Mapping[str, str]], words: int) -> Iterator[str]:
    """Yield a header and the rows, as columns of which the first are words.

    >>> list(aligned([{"peer": "flex", "ms": "12.5"}, {"peer": "sdpa", "ms": "7.1"}], 1))
    ['peer    ms', 'flex  12.5', 'sdpa   7.1']
    """
    cells = [list(row) for row in rows[:1]] + [list(row.values()) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        sides = "<" * words + ">" * (len(line) - words)
        yield "  ".join(f"{x:{side}{n}}" for x, side, n in zip(line, sides, widths, strict=True)).rstrip()


def duration_text(seconds: float) -> str:
    """Write a duration.

    >>> [duration_text(s) for s in (0.0042, 0.5, 12.3, 95, 7300, 200000)]
    ['4.2 ms', '500 ms', '12 s', '1 min 35 s', '2.0 h', '2.3 days']
    """
    # Limits lie where rounding would show the next unit: 0.9996 s is "1.0 s", not "1000 ms".
    if seconds < 0.9995:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def bytes_text(number: float) -> str:
    """Write a size in binary units.

    >>> bytes_text(512), bytes_text(3 << 20), bytes_text(1 << 40)
    ('512 B', '3.0 MiB', '1.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def percent_text(share: float) -> str:
    """Write a fraction in percent, to three digits.

    >>> percent_text(0.05), percent_text(0.0012345), percent_text(0.0)
    ('5%', '0.123%', '0%')
    """
    return f"{100 * share:.3g}%"
