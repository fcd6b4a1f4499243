"""Compare every class of the installed transformers with eager attention, and write a line for each.

    python scripts/sweep.py                         the classes that the record lacks
    python scripts/sweep.py --only llama mamba      kinds of models whose name has a word, again
    python scripts/sweep.py --kinds CausalLM        the classes of a kind
    python scripts/sweep.py --again refused         those with an outcome in the record, again

Each class is built from its own configuration with small sizes and random weights, and computed in a process with a
limit of memory and time: texts with padding on each side, gradients, groups of tokens, generation through a dynamic and
a static cache, and beams. A model whose results follow its padding is compared with its own eager attention, with the
same padding. The record has one line per version of transformers and class:

    right       within the bound of eager attention, wherever eager attention can do it
    refused     a ValueError that names what ringtile does not support
    as sdpa     other than eager attention where padding is read, and equal to transformers' sdpa
    different   silently other numbers or tokens: a defect
    crash       any other error, where eager attention has none: a defect
    without     no attention that ringtile computes: it has none, or its own
    not built   transformers or the small configuration did not get this far with eager attention

A check in parentheses is one that eager attention cannot do.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from sweep_models import CONFIG_MAPPING, TOKENS, Outputs, build, config_of, forward, generated, in_chunks, inputs
from transformers.models.auto import modeling_auto

from ringtile.integrations.transformers import register, use_ringtile

RECORD = Path(__file__).resolve().parent.parent / "benchmarks/records/sweep.json"
AUTO = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "CTC": "MODEL_FOR_CTC_MAPPING_NAMES",
    "Base": "MODEL_MAPPING_NAMES",
}
SECONDS, GIBIBYTES = 150, 8
"""The limits of a class: time of a processor, and memory beyond the parent's."""
LARGEST = 60_000_000
BOUND = 2e-4
"""Of the largest number, in float32. In float64, eager attention returns NaN for queries that keep no keys."""
Check = Callable[[Any], Outputs]


class Refused(Exception):
    """ringtile raised ValueError by itself."""


def error(wanted: Outputs, got: Outputs) -> tuple[float, str]:
    """The largest difference, of the largest number in its tensor or a hundredth of that in all, and its name."""
    top = max((float(x.nan_to_num().abs().max()) for x in wanted.values() if x.numel()), default=0.0)
    worst = (0.0, "")
    for name, x in wanted.items():
        y, off = got.get(name), 0.0
        if y is None or x.shape != y.shape or not torch.equal(x.isfinite(), y.isfinite()):
            off = float("inf")
        elif x.numel():
            x, y = (each.nan_to_num(0, 0, 0) for each in (x, y))
            off = float((x - y).abs().max()) / max(float(x.abs().max()), top * 1e-2, 1e-30)
        worst = max(worst, (off, name))
    return worst


def checks_of(model: Any) -> dict[str, Check]:
    """What is compared, by name."""
    failures = []
    for mode in ("main", "all", "channel"):
        given = partial(inputs, mode=mode)
        try:
            forward(model, given(model, None))
            break
        except Exception as failure:
            failures.append(failure)
    else:
        raise failures[0]
    found: dict[str, Check] = {"plain": lambda m: forward(m, given(m, None))}
    if "attention_mask" in given(model, "left"):
        found["right"] = lambda m: forward(m, given(m, "right"))
        found["left"] = lambda m: forward(m, given(m, "left"))
    side = "left" if "left" in found else None
    found["gradients"] = lambda m: forward(m, given(m, side), gradients=True)
    # The tokens of a picture, which see one another in some models.
    picture = torch.zeros(2, TOKENS, dtype=torch.long).index_fill_(1, torch.arange(10, 16), 1)
    for types in {"token_type_ids", "mm_token_type_ids"} & set(inspect.signature(model.forward).parameters):
        found["groups"] = lambda m, types=types: forward(m, given(m, side) | {types: picture})
    if model.can_generate():
        found["greedy"] = lambda m: generated(m, given(m, side))
        found["beams"] = lambda m: generated(m, given(m, side), num_beams=3)
        found["static"] = lambda m: generated(m, given(m, side), cache_implementation="static", disable_compile=True)
        if not model.config.is_encoder_decoder and side:
            found["chunks"] = lambda m: in_chunks(m, given(m, side))
    return found


def says(failure: BaseException) -> str:
    """One line about an exception, and where it was raised."""
    frames = traceback.extract_tb(failure.__traceback__)
    where = " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in frames[-1:-3:-1])
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]} ({where})"


def is_ours(failure: BaseException) -> bool:
    """Whether an exception was raised in ringtile."""
    return "/ringtile/" in traceback.extract_tb(failure.__traceback__)[-1].filename


def attempt(check: Check, model: Any) -> Outputs:
    """Compute a check. Raise Refused for a ValueError of ringtile."""
    try:
        return check(model)
    except ValueError as failure:
        if is_ours(failure):
            raise Refused(" ".join(str(failure).split())) from None
        raise


def by_name(made: Any, config: Any, model: Any, check: Check) -> str | None:
    """The line of a model with ``attn_implementation="ringtile"`` that neither refuses nor is right, or None."""
    try:
        wanted = check(model)
    except Exception:
        return None
    try:
        named = made._from_config(copy.deepcopy(config), attn_implementation="ringtile").float().eval()
        named.load_state_dict(model.state_dict())
        off, where = error(wanted, check(named))
    except ValueError:
        return None
    except Exception as failure:
        # transformers raises KeyError for a part that looks a class up.
        is_theirs = isinstance(failure, KeyError) and not is_ours(failure)
        return None if is_theirs else f"crash: by name: {says(failure)}"
    return f"different: by name: {off:.1e} of {where}" if off > BOUND else None


def outcome(auto: str, kind: str, made: Any, begin: Callable[[], Any] = bool) -> str:
    """Compare a class with eager attention, and return its line. Call ``begin`` when eager attention has run once."""
    try:
        config = config_of(kind, made, auto == "CausalLM")
        model = build(made, copy.deepcopy(config))
        if (size := sum(x.numel() for x in model.parameters())) > LARGEST:
            return f"not built: {size / 1e6:.0f}M parameters with a small configuration"
        checks = checks_of(model)
        first, last = checks["plain"], checks.get("right", checks["plain"])
        if error(first(model), first(model))[0] > BOUND:
            return "not built: eager attention returns other numbers each time"
    except Exception as failure:
        return f"not built: {says(failure)}"
    begin()
    ours = copy.deepcopy(model)
    try:
        attempt(lambda m: use_ringtile(m), ours)
    except Refused as failure:
        return by_name(made, config, model, last) or f"refused: {failure}"
    except Exception as failure:
        return f"crash: use_ringtile {says(failure)}"
    if (named := by_name(made, config, model, last)) is not None:
        return named
    calls = count_calls()
    sdpa, done, other = None, [], []
    for name, check in checks.items():
        # The gradients of scales nearly vanish, so their rounding shows.
        bound = BOUND if name != "gradients" else 10 * BOUND
        try:
            wanted = check(model)
        except Exception:
            wanted = {}
        if not any(x.isfinite().any() for x in wanted.values()):
            done.append(f"({name})")
            continue
        try:
            got = attempt(check, ours)
        except Refused as failure:
            return f"refused: {name}: {failure}"
        except Exception as failure:
            return f"crash: {name}: {says(failure)}"
        off, where = error(wanted, got)
        if off > bound:
            try:
                if sdpa is None:
                    sdpa = copy.deepcopy(model)
                    sdpa.set_attn_implementation("sdpa")
                same = error(check(sdpa), got)[0] <= bound
            except Exception:
                same = False
            if not same:
                return f"different: {name}: {off:.1e} of {where}"
            other.append(name)
        done.append(name)
    if not calls:
        return f"without: {' '.join(done)}"
    return f"as sdpa: {' '.join(other)}; right: {' '.join(done)}" if other else f"right: {' '.join(done)}"


def count_calls() -> list[None]:
    """A list that grows with each call of an attention function by the integration."""
    calls: list[None] = []

    def counted(own: Callable[..., Any], *given: Any, **options: Any) -> Any:
        calls.append(None)
        return own(*given, **options)

    for name, module in list(sys.modules.items()):
        for function in {"sparse_attention", "merge_attention"} & set(vars(module)):
            if name.startswith("ringtile.integrations.transformers."):
                setattr(module, function, partial(counted, getattr(module, function)))
    return calls


def in_child(auto: str, kind: str, made: Any) -> str:
    """The line of a class, computed in a process with limits."""
    # A parent that computed with several threads has none of them in its child.
    torch.set_num_threads(1)
    reads, writes = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reads)
        parents = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (parents + (GIBIBYTES << 30),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        # A process that waits uses no processor, and a busy machine gives a process less of it.
        signal.alarm(4 * SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            line = outcome(auto, kind, made, lambda: os.write(writes, b"\n"))
            os.write(writes, line.encode())
        finally:
            os._exit(0)
    os.close(writes)
    parts = []
    while select.select([reads], [], [], 4 * SECONDS + 10)[0] and (part := os.read(reads, 65536)):
        parts.append(part)
    os.close(reads)
    _, status = os.waitpid(child, 0)
    said = b"".join(parts).decode()
    what = "crash" if said else "not built"
    return said.strip() or f"{what}: the process ended with {os.waitstatus_to_exitcode(status)}"


def classes(autos: list[str]) -> Iterator[tuple[str, str, str]]:
    """The auto class, the kind and the class of each entry of the auto classes, once each, by name."""
    seen = set()
    for auto in autos:
        for kind, names in sorted(getattr(modeling_auto, AUTO[auto]).items()):
            for name in (names,) if isinstance(names, str) else names:
                if kind in CONFIG_MAPPING and (name, CONFIG_MAPPING[kind]) not in seen:
                    seen.add((name, CONFIG_MAPPING[kind]))
                    yield auto, kind, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kinds of models whose name has a word")
    parser.add_argument("--kinds", nargs="+", default=list(AUTO), choices=AUTO)
    parser.add_argument("--again", nargs="+", default=[], metavar="OUTCOME", help="outcomes in the record to replace")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    lines = record.setdefault(transformers.__version__, {})
    for auto, kind, called in classes(options.kinds):
        name = f"{auto} {kind} {called}"
        if options.only and not any(word in kind for word in options.only):
            continue
        if not options.only and name in lines and lines[name].partition(":")[0] not in options.again:
            continue
        if (made := getattr(transformers, called, None)) is None:
            continue
        begun = time.monotonic()
        lines[name] = in_child(auto, kind, made)
        print(f"{name}: {lines[name]} [{time.monotonic() - begun:.0f} s]", flush=True)
        record[transformers.__version__] = dict(sorted(lines.items()))
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    counts = Counter(line.partition(":")[0] for line in lines.values())
    print(f"transformers {transformers.__version__}:", ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    sys.exit(bool(counts["different"] or counts["crash"]))


if __name__ == "__main__":
    main()
