"""Try calls of the table in tests/table.py until the time is over: every triple of values first, and then at random.

    python scripts/fuzz.py --seconds 600 --seed 7
    python scripts/fuzz.py --replay 'rule=window | option=none | shape=square | ...'

It goes on where it stopped: with the same seed, the triples that were right are left out. A case that is wrong prints
the line that replays it, shrunk to its simplest form.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from itertools import chain, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from table import at_random, covering, outcome, parsed, smallest  # noqa: E402

from ringtile.tools.progress import Progress  # noqa: E402

STATE = ROOT / ".venv" / "cache" / "fuzz.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare calls of the table with the oracle until the time is over.")
    parser.add_argument("--seconds", type=float, default=600, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="the order of the triples, and the numbers after them")
    parser.add_argument("--replay", metavar="LINE", nargs="+", help="cases, as failures print them")
    parser.add_argument("--again", action="store_true", help="begin with the first triple")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.replay:
        wrong = 0
        for line in args.replay:
            words = outcome(parsed(line))
            wrong += bool(words)
            print(words or "right", flush=True)
        return 1 if wrong else 0
    known = json.loads(STATE.read_text()) if STATE.exists() and not args.again else {}
    first, end, wrong = known.get(str(args.seed), 0), time.monotonic() + args.seconds, 0
    begin, tried, progress = time.monotonic(), 0, Progress()
    every = chain(covering(3, args.seed), at_random(args.seed))
    for number, case in enumerate(islice(every, first, None), first):
        if time.monotonic() > end:
            break
        tried += 1
        if words := outcome(case):
            wrong += 1
            progress.say(f"{words}\n    python scripts/fuzz.py --replay '{smallest(case)}'")
        if not wrong:
            known[str(args.seed)] = number + 1
        rate = tried / (time.monotonic() - begin)
        progress.show(f"{tried} cases, {rate:.1f} a second", end - time.monotonic())
    STATE.parent.mkdir(parents=True, exist_ok=True)
    STATE.write_text(json.dumps(known))
    progress.say(f"{tried} cases from number {first}, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
