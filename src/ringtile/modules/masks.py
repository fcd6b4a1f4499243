"""Read PyTorch's attention masks, in which True or -inf means that a pair is dropped."""

import math

import torch
from torch import Tensor

from ringtile.patterns import Causal, Pattern, from_mask
from ringtile.patterns.mask import one_of_equals, read_once


def read_attn_mask(mask: Tensor, batch: int, heads: int, is_causal: bool) -> Pattern:
    """Return the pairs that a mask of `torch.nn.MultiheadAttention` keeps, ``[Nq, Nk]`` or ``[B * H, Nq, Nk]``.

    True or -inf drops a pair, and so do numbers of at most -1e9, or half of the lowest of the dtype if that is more,
    in rows with a 0. A traced graph cannot read values: there, ``is_causal`` says that the mask is the causal
    one, and without it the graph breaks. Raises ValueError if a floating-point mask has other values than 0 and -inf,
    or if an exported graph has no hint.
    """
    if is_causal and torch.compiler.is_compiling() and mask.shape[-1] == mask.shape[-2]:
        return Causal()
    # Remembered until the mask changes: to read it takes a pass over all pairs, and waits for a GPU.
    return read_once(mask, _read, batch, heads)


def _read(mask: Tensor, batch: int, heads: int) -> Pattern:
    with torch.no_grad():
        if mask.is_floating_point():
            kept = mask == 0
            # In PyTorch, a row with equal numbers and no 0 attends to all its keys.
            low = max(-1e9, torch.finfo(mask.dtype).min / 2)
            dropped = (mask == -math.inf) | (mask <= low) & kept.any(-1, keepdim=True)
            if mask.requires_grad or not bool((kept | dropped).all()):
                raise ValueError(
                    "attn_mask: no kernel adds a floating mask to the scores of a sparse pattern: expected bool, or 0 "
                    f"and -inf alone without a gradient ({low:.0f} and less count as -inf in rows with a 0), got "
                    f"{mask.shape=}, {mask.dtype=}, {mask.requires_grad=} with other values; ALiBi is "
                    "attend=functools.partial(sparse_attention, alibi_slopes=...)"
                )
        else:
            kept = ~mask
        n_queries, n_keys = mask.shape[-2:]
        kept = kept.view(batch, heads, n_queries, n_keys) if mask.dim() == 3 else kept.view(1, 1, n_queries, n_keys)
        # PyTorch's layers repeat a mask for each head, and one pattern serves all of them.
        kept = one_of_equals(kept)
        if torch.equal(kept, torch.ones_like(kept).tril(n_keys - n_queries)):
            return Causal()
        return from_mask(kept)


def read_key_padding_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the keys that a ``key_padding_mask`` ``[B, Nk]`` keeps, bool, and what to add to their scores, if any."""
    if not mask.is_floating_point():
        return ~mask, None
    # Scores of -inf are better dropped than added: their keys may hold NaN.
    key_mask = mask != -math.inf
    bias = mask.masked_fill(~key_mask, 0)
    if torch.compiler.is_compiling() or mask.requires_grad or bool(bias.any()):
        return key_mask, bias
    return key_mask, None
