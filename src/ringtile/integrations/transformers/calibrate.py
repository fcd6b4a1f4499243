"""Calibrate adaptive attention for a model of transformers, from one forward pass over one text."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.adaptive import Calibration, Choice, HeadFacts, Scores, head_facts
from ringtile.adaptive.choice import DEFAULT_SCORES
from ringtile.functional import sparse_attention
from ringtile.integrations.transformers.registry import model_facts, use_ringtile

_GRAM = 16
"""Equal tokens in a row that count as a repeat."""


def calibrate(
    model: nn.Module,
    ids: Tensor,
    *,
    scores: Scores = DEFAULT_SCORES,
    block: int = 16,
    first: int = 1,
    local: int = 1,
    rows: int = 192,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Return the calibration of a causal language model, for `ringtile.adaptive.AdaptiveAttention` in each layer.

    One pass of the model measures the scores.

    Half of the weight is on tokens that repeat others far before: heads that copy look idle in a text without a repeat,
    and would be starved. The model computes dense attention afterwards.

    Args:
        model: A model of transformers whose attention ``use_ringtile`` can replace.
        ids: int64 ``[1, N]``, the tokens of the text. At least one in 16 repeats others, N / 4 tokens before.
        scores: Which tiles are best.
        block: See `Choice`.
        first: See `Choice`.
        local: See `Choice`.
        rows: Number of audited rows per layer.
        seed: Seed of the rows.
        progress: Called with the number of each layer.

    Raises:
        ValueError: If the text has no far repeat, or ids are not ``[1, N]``.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ringtile.integrations.transformers import use_ringtile
        >>> sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
        >>> text = torch.randint(99, (1, 256), generator=torch.Generator().manual_seed(0))
        >>> found = calibrate(model, torch.cat((text, text), 1))
        >>> use_ringtile(model, attend=found.attention(0.25)) is model
        True
    """
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"ids: expected [1, N], got {ids.shape=}")
    repeated = far_repeat(ids[0])
    if not repeated.any():
        raise ValueError(
            f"ids: expected a far repeat of at least {ids.shape[1] // 16} of its {ids.shape[1]} tokens, got none: "
            "heads that copy would be starved"
        )
    audited, weights = audited_rows(repeated, rows, seed)
    layers: dict[int, HeadFacts] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if progress is not None:
            progress(layer)
        call = {name: options[name] for name in ("is_causal", "key_mask", "scale")}
        view = Choice(block=block).view(query, key, options["pattern"], **call)
        output = output_weight(model, layer)
        layers[layer] = head_facts(
            view, value, scores, audited, weights=weights, first=first, local=local, output=output
        )
        out: Tensor = sparse_attention(query, key, value, **options)
        return out

    facts = model_facts(model)
    text = {
        "tokens": ids.shape[1],
        "repeat": int(repeated.sum()),
        "rows": len(audited),
        "seed": seed,
        "sha256": hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest(),
    }
    use_ringtile(model, attend=[partial(attend, layer) for layer in range(facts["layers"])])
    try:
        with torch.no_grad():
            model(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
    finally:
        use_ringtile(model)
    of_layers = [layers[layer] for layer in sorted(layers)]
    return Calibration.of(of_layers, facts, scores, block=block, first=first, local=local, text=text)


def audited_rows(repeated: Tensor, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw audited rows, ascending, and their weights: a third in the repeat, with half of the weight."""
    drawn = torch.Generator().manual_seed(seed)
    parts = []
    for which, share in ((~repeated, rows - rows // 3), (repeated, rows // 3)):
        places = which.nonzero().flatten()
        parts.append(places[torch.randperm(len(places), generator=drawn, device="cpu")[:share]])
    # A head that copies has its misses in the repeat only, and would look idle if all rows counted the same.
    weights = torch.cat([torch.full_like(part, 0.5 / len(part), dtype=torch.float64) for part in parts])
    found, order = torch.cat(parts).sort()
    return found, weights[order]


def far_repeat(ids: Tensor) -> Tensor:
    """Return which tokens of ``[N]`` repeat others whose last copy is at least a quarter of N before, bool ``[N]``.

    All are False if fewer than one in 16 do: attention that copies would hardly be seen.

    >>> ids = torch.arange(400) % 300
    >>> far_repeat(ids).sum(), far_repeat(torch.arange(400)).sum()
    (tensor(100), tensor(0))
    """
    n_tokens = len(ids)
    repeated = torch.zeros(n_tokens, dtype=torch.bool, device="cpu")
    if n_tokens < 2 * _GRAM:
        return repeated
    # Give equal runs of 16 tokens one number, then look at the place where that number came before.
    grams = ids.unfold(0, _GRAM, 1)
    _, kind = grams.unique(dim=0, return_inverse=True)
    order = kind.argsort(stable=True)
    # A run that never came before gets a place after all others, so its distance is negative.
    before = torch.full_like(kind, n_tokens)
    before[order[1:]] = torch.where(kind[order[1:]] == kind[order[:-1]], order[:-1], n_tokens)
    for begin in (torch.arange(len(grams), device="cpu") - before >= n_tokens // 4).nonzero().flatten().tolist():
        repeated[begin : begin + _GRAM] = True
    return repeated if repeated.sum() >= n_tokens // 16 else torch.zeros_like(repeated)


def output_weight(model: nn.Module, layer: int) -> Tensor | None:
    """Return the output projection of a layer, float32 ``[E, H * Dv]``, or None if its name is not known."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer:
            for name in ("o_proj", "out_proj", "dense", "wo", "c_proj"):
                found = getattr(module, name, None)
                if found is not None:
                    weight: Tensor = found.weight.detach().float()
                    # GPT-2 stores its projections transposed.
                    return weight.T if type(found).__name__ == "Conv1D" else weight
    return None
