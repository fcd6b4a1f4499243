"""The record of a run as JSON: its rows, the machine they were measured on, and all that is needed to repeat it.

Each command has a `Record` with fields and rows of its own. All are made, written and read here:

    record = Record.here(args.command, seed=0, rows=rows)
    write_whole(path, record.to_json())
    record = Record.from_json(path.read_text())
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ringtile.tools.machine import origin

OURS = "ringtile"
DENSE = "dense"
"""The names of the two peers in a ratio."""

FORWARD = "forward"
BOTH = "forward+backward"
DIRECTIONS = (FORWARD, BOTH)
DTYPES = ("float32", "float64", "bfloat16", "float16")

FORMAT = 1
"""The format of all records. Another number refuses older files."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """All rows of one run, and all that is needed to repeat it. A command adds its fields, and one of them for rows."""

    commit: str | None
    versions: dict[str, str | None]
    machine: dict[str, Any]
    command: str | None = None
    """The command line that made the record."""
    interrupted: bool = False

    OF: ClassVar[str] = "a command"
    """The command, for error messages."""
    ROWS: ClassVar[str] = "rows"
    """The name of the field of rows."""

    @classmethod
    def here(cls, command: str | None = None, **fields: Any) -> Self:
        """Return a record with the facts about this machine."""
        return cls(**origin(command), **fields)

    row_of: ClassVar[Any]
    """A function that returns a row from its JSON. Raises KeyError or TypeError for other fields."""

    def to_json(self) -> str:
        """Return one JSON object, for `from_json`, with a line per row."""
        found = {"format": FORMAT, **asdict(self)}
        rows = ",\n".join(json.dumps(row) for row in found.pop(self.ROWS))
        return f'{json.dumps(found)[:-1]}, "{self.ROWS}": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of `to_json`. Raises ValueError if the text is something else."""
        with fields_of(text, cls.OF) as found:
            # JSON has no tuples, and every sequence of a record is one.
            fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
            return cls(**{**fields, cls.ROWS: tuple(map(cls.row_of, found[cls.ROWS]))})


@contextmanager
def fields_of(text: str, command: str) -> Iterator[dict[str, Any]]:
    """Give the fields of a command's JSON. Raises ValueError if it is something else, or if the block misses fields."""
    what = f"expected a JSON record of {command}"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}, got no JSON: {error}") from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"{what} with format {FORMAT}, got {text[:60]!r}")
    try:
        yield found
    except (KeyError, TypeError) as error:
        raise ValueError(f"{what}, got other fields: {error}") from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a path to write, which replaces ``path`` in the end: a reader finds all of the old file or of the new."""
    # A rename replaces a file at once, but only within one file system, so the draft lies beside it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file, see `whole`."""
    with whole(path) as draft:
        draft.write_text(text, encoding="utf-8")
