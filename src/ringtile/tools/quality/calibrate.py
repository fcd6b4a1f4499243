"""`ringtile quality --calibrate`: a density for each head of a model, from one forward pass, in a JSON file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringtile.adaptive import Calibration, Choice, LossCurves, Scores, loss_curves
from ringtile.adaptive.choice import DEFAULT_SCORES
from ringtile.functional import sparse_attention
from ringtile.integrations.transformers import use_ringtile
from ringtile.tools.progress import Progress
from ringtile.tools.quality.decoder import Decoder, open_decoder
from ringtile.tools.quality.selectors import Watched
from ringtile.tools.quality.texts import FarCopy, Texts, far_repeat
from ringtile.tools.units import duration_text

ROWS = 192
"""Audited rows per layer: two thirds in the text, one third in the repeat."""


def calibrate(
    decoder: Decoder,
    text: FarCopy,
    scores: Sequence[Scores],
    *,
    block: int = 32,
    first: int = 1,
    local: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Calibration]:
    """Measure what the heads of a model lose at each density, with several scores in one forward pass.

    Half of the weight is on the repeat: heads that copy look idle in a text without one, and would be starved.

    Args:
        decoder: The model.
        text: Sequence to calibrate by.
        scores: The scores, each with a calibration of its own.
        block, first, local: See `select`.
        seed: Seed of the rows.
        progress: Where to show the layers.

    Raises:
        ValueError: If the sequence has no far repeat.
    """
    ids = text.ids[0]
    repeated = far_repeat(ids)
    if not repeated.any():
        raise ValueError(
            f"--text: expected a far repeat of at least {len(ids) // 16} of its {len(ids)} tokens, got none: heads "
            "that copy would be starved"
        )
    rows, weights = audited_rows(text, repeated, seed)
    found: list[list[LossCurves]] = [[] for _ in scores]

    def of_layer(layer: int) -> Any:
        def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            if progress is not None:
                progress.show(f"calibrate layer {layer + 1} of {decoder.layers}")
            call = {name: options[name] for name in ("is_causal", "key_mask", "scale")}
            view = Choice(block=block).view(query, key, options["pattern"], **call)
            # All scores learn from the same rows of the same forward pass, which stays dense.
            audit: dict[str, Any] = {"weights": weights, "output": decoder.output_weight(layer)}
            for each, curves in zip(scores, found, strict=True):
                curves.append(loss_curves(view, value, each, rows, first=first, local=local, **audit))
            out: Tensor = sparse_attention(query, key, value, **options)
            return out

        return attend

    use_ringtile(decoder.model, attend=[of_layer(layer) for layer in range(decoder.layers)])
    decoder.run(text.ids)
    facts = {
        "tokens": len(ids),
        "repeat": int(repeated.sum()),
        "rows": len(rows),
        "seed": seed,
        "text": list(text.kinds),
        "text_sha256": text.sha256,
    }
    return [
        Calibration(decoder.facts, each, block, first, local, tuple(curves), facts)
        for each, curves in zip(scores, found, strict=True)
    ]


def audited_rows(text: FarCopy, repeated: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the audited rows, ascending, and their weights: each half of the weight for the text and the repeat."""
    drawn = torch.Generator().manual_seed(seed)
    inside = ~repeated
    # Attention among random tokens is no text's.
    inside[: text.repeat] = False
    parts = []
    for which, share in ((inside, ROWS - ROWS // 3), (repeated, ROWS // 3)):
        places = which.nonzero().flatten()
        parts.append(places[torch.randperm(len(places), generator=drawn)[:share]])
    # A head that copies has its misses in the repeat only, and would look idle if all rows counted the same.
    weights = torch.cat([torch.full((len(part),), 0.5 / len(part), dtype=torch.float64) for part in parts])
    rows, order = torch.cat(parts).sort()
    return rows, weights[order]


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Write the budgets of ``--calibrate MODEL`` to ``--out``, and report them on a second sequence.

    Raises ValueError if the model or the text is missing, or the density is not between 0 and 1.
    """
    if not 0 < args.density <= 1:
        raise ValueError(f"--density: expected a number above 0 and at most 1, got {args.density}")
    out = Path("budgets.json") if args.out is None else args.out
    progress.show("load the model")
    decoder = open_decoder(args.calibrate, args)
    text = decoder.texts.calibration(0, decoder.n_tokens, decoder.vocab_size)
    began = time.monotonic()
    (found,) = calibrate(decoder, text, [DEFAULT_SCORES], block=args.block, progress=progress)
    found.save(out)
    spent = duration_text(time.monotonic() - began)
    progress.say(f"{decoder.name}: {decoder.layers} layers of {decoder.heads} heads, {decoder.dtype}, {spent}")
    progress.say(f"{decoder.n_tokens:,} tokens: {text.kinds[0]}, {text.kinds[1]}, and the {text.kinds[0]} again")
    progress.show("audit the budgets on a second sequence")
    # A text of yours has calibrated, so it must not judge, too.
    other = Texts(decoder.encode).far_copy(0, decoder.n_tokens)
    layers = found.attention(args.density)
    watched = [Watched(attend, 64) for attend in layers]
    use_ringtile(decoder.model, attend=watched)
    decoder.run(other.ids)
    recall = torch.stack([each.recall[0] for each in watched])
    density = sum(each.density[0] for each in watched) / len(watched)
    progress.say(
        f"{other.kinds[0]} around {other.kinds[1]}: tile density {density:.3f} for {args.density}, recall "
        f"{float(recall.mean()):.3f}, worst head {float(recall.min()):.3f}"
    )
    progress.say(f"budgets: {out}")
    return 0
