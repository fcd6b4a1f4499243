"""Read PyTorch's attention masks, in which True or -inf means that a pair is dropped."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.patterns import Pattern, from_mask
from ringtile.patterns.mask import one_of_equals, read_once


class AttnMask(NamedTuple):
    """The pairs that an ``attn_mask`` keeps: the causal ones (lower right), or those of a pattern."""

    is_causal: bool
    pattern: Pattern | None = None


def read_attn_mask(mask: Tensor, batch: int, heads: int, is_causal: bool) -> AttnMask:
    """Read which pairs a mask of `torch.nn.MultiheadAttention` keeps, ``[Nq, Nk]`` or ``[B * H, Nq, Nk]``.

    True or -inf drops a pair. A traced graph cannot read values: there, ``is_causal`` says that the mask is the causal
    one. Raises ValueError if a floating-point mask has other values than 0 and -inf, or a traced graph has no hint.
    """
    if torch.compiler.is_compiling():
        if is_causal and mask.shape[-1] == mask.shape[-2]:
            return AttnMask(is_causal=True)
        raise ValueError(
            "attn_mask: a traced graph cannot look at its values: expected is_causal=True with the square causal mask, "
            f"or pattern= for the kept pairs, got {is_causal=}"
        )
    # Remembered until the mask changes: to read it takes a pass over all pairs, and waits for a GPU.
    return read_once(mask, _read, batch, heads)


def _read(mask: Tensor, batch: int, heads: int) -> AttnMask:
    with torch.no_grad():
        if mask.is_floating_point():
            kept = mask == 0
            if mask.requires_grad or not bool((kept | (mask == -math.inf)).all()):
                raise ValueError(
                    "attn_mask: no kernel adds a floating mask to the scores of a sparse pattern: expected bool, or 0 "
                    f"and -inf alone without a gradient, got {mask.shape=}, {mask.dtype=}, {mask.requires_grad=} with "
                    "other values; ALiBi is attend=functools.partial(sparse_attention, alibi_slopes=...)"
                )
        else:
            kept = ~mask
        n_queries, n_keys = mask.shape[-2:]
        kept = kept.view(batch, heads, n_queries, n_keys) if mask.dim() == 3 else kept.view(1, 1, n_queries, n_keys)
        # PyTorch's layers repeat a mask for each head, and one pattern serves all of them.
        kept = one_of_equals(kept)
        if torch.equal(kept, torch.ones_like(kept).tril(n_keys - n_queries)):
            return AttnMask(is_causal=True)
        return AttnMask(is_causal=False, pattern=from_mask(kept))


class Padding(NamedTuple):
    """The content of a ``key_padding_mask``, per key ``[B, Nk]``."""

    key_mask: Tensor
    """bool, True for keys to attend to."""
    bias: Tensor | None
    """Values to add to the scores of the keys, or None."""


def read_key_padding_mask(mask: Tensor) -> Padding:
    """Read a ``key_padding_mask`` ``[B, Nk]`` of `torch.nn.MultiheadAttention`, bool or floating point."""
    if not mask.is_floating_point():
        return Padding(~mask, None)
    # Scores of -inf are better dropped than added: their keys may hold NaN.
    key_mask = mask != -math.inf
    bias = mask.masked_fill(~key_mask, 0)
    if torch.compiler.is_compiling() or mask.requires_grad or bool(bias.any()):
        return Padding(key_mask, bias)
    return Padding(key_mask, None)
