"""A causal language model of Hugging Face transformers, its texts, and its losses."""

import argparse
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.integrations.transformers import model_facts
from ringtile.tools.hf.models import load_model
from ringtile.tools.quality.texts import Texts
from ringtile.tools.timing import seconds_of


class Decoder:
    """A model, its texts and its losses, on sequences of ``n_tokens``. The sources are those of `load_model`."""

    def __init__(
        self, source: str, n_tokens: int, files: Sequence[Path] = (), dtype: torch.dtype | None = None
    ) -> None:
        self.name, self.model, encode = load_model(source, None, n_tokens)
        self.model.to(dtype or faster_dtype())
        self.n_tokens = n_tokens
        config = self.model.config.get_text_config()
        self.longest: int = getattr(config, "max_position_embeddings", None) or n_tokens
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        # Without a tokenizer, a token is a byte.
        self.encode = encode or (lambda words: [byte % self.vocab_size for byte in words.encode()])
        self.texts = Texts(self.encode, files)

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that identify the weights, whatever their dtype and the name of their file."""
        return model_facts(self.model)

    @torch.no_grad()
    def losses(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross entropy of the tokens after some positions, float32, and whether they are the likeliest."""
        found = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=positions).logits
        # In pieces, because float32 logits of all positions take 4 bytes times the vocabulary each.
        parts = list(zip(found[0].split(512), ids[0, positions + 1].split(512), strict=True))
        nats = [F.cross_entropy(x.float(), wanted, reduction="none") for x, wanted in parts]
        return torch.cat(nats), torch.cat([x.argmax(1) == wanted for x, wanted in parts])

    @torch.no_grad()
    def run(self, ids: Tensor) -> None:
        """Run the model for the calls of its attention: a prefill, with the logits of the last token."""
        self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)


def faster_dtype() -> torch.dtype:
    """Return bfloat16 if a product of matrices is faster in it than in float32 on this machine, or float32."""
    side = torch.ones(512, 2048, dtype=torch.float32, device="cpu")
    sides = side, side.view(2048, 512)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (side.to(dtype) for side in sides)
        # The first product sets the library up.
        times = [seconds_of(partial(torch.mm, a, b)) for _ in range(4)]
        seconds[dtype] = min(times[1:])
    return min(seconds, key=lambda dtype: seconds[dtype])


def open_decoder(source: str, args: argparse.Namespace) -> Decoder:
    """Return the model of the arguments. Raises ValueError if it cannot be loaded."""
    return Decoder(source, args.tokens, args.text, None if args.dtype is None else getattr(torch, args.dtype))
