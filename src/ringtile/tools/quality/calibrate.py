"""`ringtile quality --calibrate`: one threshold for a model's heads, from one forward pass, in a JSON file."""

import argparse
import time
from pathlib import Path

import torch

from ringtile.integrations.transformers import calibrate, use_ringtile
from ringtile.tools.progress import Progress
from ringtile.tools.quality.decoder import open_decoder
from ringtile.tools.quality.texts import Texts
from ringtile.tools.quality.watched import Watched
from ringtile.tools.units import duration_text


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Write the budgets of ``--calibrate MODEL`` to ``--out``, and report them on a second sequence."""
    if not 0 < args.density <= 1:
        raise ValueError(f"--density: expected a number above 0 and at most 1, got {args.density}")
    out = Path("budgets.json") if args.out is None else args.out
    progress.show("load the model")
    decoder = open_decoder(args.calibrate, args)
    text = decoder.texts.calibration(0, decoder.n_tokens, decoder.vocab_size)
    began = time.monotonic()
    found = calibrate(
        decoder.model, text.ids, block=args.block,
        progress=lambda layer: progress.show(f"calibrate layer {layer + 1} of {decoder.layers}"),
    )  # fmt: skip
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
