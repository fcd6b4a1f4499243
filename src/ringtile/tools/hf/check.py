"""The correctness check of a model: its logits and its loss against eager attention."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.integrations.transformers import use_ringtile
from ringtile.integrations.transformers.biases import is_replaced
from ringtile.integrations.transformers.masks import pairs
from ringtile.integrations.transformers.registry import parts_of
from ringtile.patterns import Pattern

RINGTILE, EAGER = "ringtile", "eager"
NAMES = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention"}
"""Baselines, and their names in transformers."""
FLOAT32_BOUND = 2e-5
"""The largest error of float32 logits that counts as rounding."""
LOW_PRECISION = 2.0
"""In low precision, the bound is the error of eager attention in the same dtype, times this."""
PROMPT_TOKENS, NEW_TOKENS = 256, 64
"""The most tokens of greedy decoding."""
_MOST_BYTES = 8 << 30


def switch(model: Any, peer: str, pattern: Pattern | None = None) -> None:
    """Switch a model to ringtile, or to a baseline. Raises ValueError if the model does not support it."""
    if peer == RINGTILE:
        use_ringtile(model, pattern)
        return
    for part in parts_of(model):
        if peer == EAGER and is_replaced(type(part)):
            # transformers changes no name of a model whose attention is written by hand.
            part.config._attn_implementation_internal = EAGER
    model.set_attn_implementation(NAMES[peer])
    if model.config._attn_implementation != NAMES[peer]:
        raise ValueError(f"the model does not support {NAMES[peer]}")


def _budget() -> int:
    """Return the bytes that the check can use: half of what is free."""
    # Some systems do not tell what is free, and 2 GiB fit nearly everywhere.
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return _MOST_BYTES // 4
    return min(_MOST_BYTES, int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2)


def tokens_for_eager(n_tokens: int, heads: int) -> int:
    """Return how many of the tokens eager attention has memory for."""
    # Scores, their softmax and copies of both for each head, and the mask, in float32.
    return max(1, min(n_tokens, math.isqrt(_budget() // (4 * (4 * heads + 2)))))


def checked_positions(n_tokens: int, vocab_size: int) -> Tensor:
    """Return the positions whose logits fit into memory: all, or evenly spaced ones that include both ends."""
    # In float32, the logits exist twice to be compared, and the comparison takes as much again.
    fitting = max(2, min(n_tokens, _budget() // (4 * 4 * vocab_size)))
    return torch.linspace(0, n_tokens - 1, fitting, dtype=torch.float32, device="cpu").long()


@contextmanager
def eager_masks(pattern: Pattern | None, heads: int) -> Iterator[None]:
    """Make eager attention keep only the pairs of a pattern, too: an independent reference, with N x N masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

    if pattern is None:
        yield
        return
    asked = []

    def sparse_mask(*args: Any, **options: Any) -> Tensor:
        asked.append(options)
        options["allow_is_bidirectional_skip"] = False
        mask: Tensor = eager_mask(*args, **options)
        # A sliding cache has dropped the keys before kv_offset.
        first, n_keys = options.get("kv_offset", 0), mask.shape[3]
        start = int(options.get("q_offset", 0))
        kept = pairs(pattern, start, mask.shape[2], first + n_keys, mask.device, pattern.num_heads or 1)[..., first:]
        mask = torch.where(kept, mask, torch.finfo(mask.dtype).min)
        if empty := int((mask < 0).all(-1).sum()):
            raise ValueError(f"--pattern: expected a key for every query, got {empty} queries without keys")
        return mask

    # transformers looks masks up in this mapping at each call, and an entry hides its own function until it is deleted.
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = sparse_mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    if not asked:
        raise ValueError("--pattern: expected a model that asks transformers for its masks, got one that makes its own")


def is_causal(model: Any) -> bool:
    """Return True for a language model whose logits are those of the next token, without an encoder."""
    return "logits_to_keep" in signature(model.forward).parameters and not model.config.is_encoder_decoder


def _outputs(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Return the first output. The options are those of a causal model."""
    found: Tensor = model(**inputs, **(options if is_causal(model) else {}))[0]
    return found


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Tensor], positions: Tensor) -> Tensor:
    """Return the logits ``[positions, V]`` in float32, or all outputs ``[N, D]`` of a model that is not causal."""
    return _outputs(model, inputs, use_cache=False, logits_to_keep=positions).float().flatten(0, -2)


@torch.no_grad()
def prefill(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of the last token, as the beginning of generation does, or all outputs."""
    return _outputs(model, inputs, logits_to_keep=1)


def training_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss on all tokens, for a backward pass, or the mean square of the outputs."""
    found = _outputs(model, inputs, use_cache=False, labels=inputs.get("input_ids"))
    return found if is_causal(model) else found.float().square().mean()


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    """Return the gradients of all parameters, zero if the loss does not depend on one."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, parameters, materialize_grads=True))


def gradient_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the relative L2 error over all parameters."""
    wrong = sum(float((a.double() - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return math.sqrt(wrong / sum(float(b.double().square().sum()) for b in expected))


def worst_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative L2 error of a row of one tensor."""
    return float(((found[0] - expected[0]).norm(dim=1) / expected[0].norm(dim=1)).max())


@torch.no_grad()
def loss(model: Any, ids: Tensor, vocab_size: int) -> tuple[float, int]:
    """Return the mean cross entropy of the last tokens whose logits fit into memory, and how many they are."""
    n_last = max(1, min(ids.shape[1] - 1, _budget() // (4 * 4 * vocab_size)))
    options = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    scores = model(ids, logits_to_keep=n_last + 1, **options).logits[0, :-1].float()
    return float(F.cross_entropy(scores, ids[0, -n_last:])), n_last


@torch.no_grad()
def greedy(model: Any, ids: Tensor) -> Tensor:
    """Return the tokens that greedy decoding appends to the beginning of the text: 64, or as many as fit into it."""
    prompt = ids[:, : min(PROMPT_TOKENS, max(1, ids.shape[1] // 2))]
    n_new = min(NEW_TOKENS, ids.shape[1] - prompt.shape[1])
    options = {"do_sample": False, "min_new_tokens": n_new, "max_new_tokens": n_new}
    found: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    # A decoder with an encoder begins anew.
    return found[0, -n_new:]
