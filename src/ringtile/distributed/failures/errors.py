"""`PlanMismatch` and `RankLost`, and their lines: which ranks, and what differs between them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class PlanMismatch(RuntimeError):
    """Ranks came to a handshake with different facts. The message is one line, the same at every rank."""


class RankLost(RuntimeError):
    """A rank failed, died or did not come. The message is one line that names it."""


def difference(given: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return one line on the fields that differ between ranks; None if none does."""
    lines = []
    for field in dict.fromkeys(field for facts in given.values() for field in facts):
        sides: dict[str | None, list[int]] = {}
        for rank, facts in given.items():
            sides.setdefault(repr(facts[field]) if field in facts else None, []).append(rank)
        if len(sides) > 1:
            lines.append(_sides(field, sides))
    more = f"; {len(lines) - 3} more fields differ" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more if lines else None


def _sides(field: str, sides: Mapping[str | None, list[int]]) -> str:
    """Return "rank 1 has n=2, the others n=1". A side without the field is None."""
    values = [value for value in sides if value is not None]
    texts = dict(zip(values, _shortened(values), strict=True))
    label = {side: f"no {field}" if side is None else f"{field}={texts[side]}" for side in sides}
    # sorted keeps sides of one size in the order of their ranks.
    ordered = sorted(sides, key=lambda side: -len(sides[side]))
    largest = ordered[0]
    last = []
    if len(sides[largest]) > len(sides[ordered[1]]):
        ordered.remove(largest)
        last = [f"the others {label[largest]}"]
    if len(ordered) > 3:
        last.insert(0, f"{len(ordered) - 3} more values at other ranks")
    verbs = {side: "has" if len(sides[side]) == 1 else "have" for side in ordered}
    return ", ".join([f"{named(sides[side])} {verbs[side]} {label[side]}" for side in ordered[:3]] + last)


def _shortened(texts: Sequence[str]) -> list[str]:
    """Cut long texts to the part at which they begin to differ."""
    if all(len(text) <= 80 for text in texts):
        return list(texts)
    differ = (place for place, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    begin = max(0, next(differ, 0) - 20)
    dots = "..." if begin else ""
    return [dots + text[begin : begin + 60] + ("..." if len(text) > begin + 60 else "") for text in texts]


def named(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 1, 2" or, for many, the first eight and their number."""
    found = list(ranks)
    names = ", ".join(map(str, found[:8])) + (f", ... ({len(found)} in all)" if len(found) > 8 else "")
    return f"rank{'s' if len(found) > 1 else ''} {names}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception, at most 200 letters."""
    return str(error).strip().partition("\n")[0][:200]
