"""A language model that generates with a cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.functional.attention import check_plain
from ringtile.modules.transformer import KVCache, SparseTransformer
from ringtile.patterns.checks import check_number, check_positive
from ringtile.patterns.facts import pattern_reach


class SparseLanguageModel(nn.Module):
    """An embedding, a causal `SparseTransformer` and a head without bias, initialized to zero.

    Args:
        vocab_size: Number of tokens; 256 for bytes.
        transformer: The layers, built with ``is_causal=True``. The model uses their device and dtype.

    Raises ValueError if the size is not positive or a layer is not causal.

    >>> from ringtile.patterns import streaming
    >>> model = SparseLanguageModel(256, SparseTransformer(2, 64, 4, is_causal=True, pattern=streaming(4, 64)))
    >>> prompt = torch.tensor([list(b"sparse attention")])
    >>> model(prompt).shape, model.eval().generate(prompt, 8).shape
    (torch.Size([1, 16, 256]), torch.Size([1, 24]))
    """

    def __init__(self, vocab_size: int, transformer: SparseTransformer) -> None:
        super().__init__()
        check_positive(vocab_size=vocab_size)
        layers: list[Any] = list(transformer.layers)
        if any(pattern_reach(layer.rule).ahead for layer in layers):
            raise ValueError(f"transformer: expected causal layers, is_causal=True, got {transformer!r}")
        # The output matrix starts at zero: a new model predicts every token alike.
        like = transformer.norm.weight
        self.embedding = nn.Embedding(vocab_size, len(like), device=like.device, dtype=like.dtype)
        self.transformer = transformer
        self.head = nn.Linear(len(like), vocab_size, bias=False, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return logits ``[B, N, vocab_size]`` of the next token for ``tokens`` ``[B, N]``, see `SparseTransformer`."""
        logits: Tensor = self.head(self.transformer(self.embedding(tokens), key_mask, cache, positions))
        return logits

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        n_new: int,
        *,
        key_mask: Tensor | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row by ``n_new`` tokens, one by one, with a cache of the keys that the patterns can still keep.

        Args:
            tokens: ``[B, N]`` integers, at least one per row. With ``attend=ring_attend(...)``, the rank's own tokens
                of the prompt.
            n_new: Number of tokens to add.
            key_mask: ``[B, N]`` bool, False for the padding of shorter prompts (on the left).
            temperature: Divides the logits before a token is drawn. Default: 0, the most likely token.
            generator: Random generator of the draws. Default: PyTorch's.

        Returns ``[B, N + n_new]``, the prompt included. Raises ValueError if there is no prompt, a value is out of
        range, or the model is in training mode.
        """
        if type(n_new) is not int or n_new < 0:
            raise ValueError(f"n_new: expected an integer >= 0, got {n_new!r}")
        check_plain("tokens", tokens)
        check_number("temperature", temperature, "a finite number >= 0", 0)
        if self.training:
            raise ValueError("generate: expected a model in eval mode, got model.training=True")
        cache = self.transformer.new_cache()
        # A rank can have no token of a prompt that ranks share.
        if tokens.dim() != 2 or not (tokens.shape[1] or cache.positions is not None):
            raise ValueError(f"tokens: expected [B, N] of at least one token, got {tokens.shape=}")
        new = tokens
        for _ in range(n_new):
            logits = self(new, key_mask, cache)
            new = cache.drawn(partial(_draw, logits, temperature, generator), tokens)
            # The mask is of the prompt: later tokens are all real, and the cache keeps it.
            tokens, key_mask = torch.cat([tokens, new], 1), None
        return tokens


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Return the tokens ``[B, 1]`` that follow the last."""
    last = logits[:, -1]
    if temperature:
        return torch.multinomial((last.float() / temperature).softmax(-1), 1, generator=generator)
    return last.argmax(-1, keepdim=True)
