"""Read PyTorch's attention masks, in which True or -inf means that a pair is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringtile.patterns import Pattern, from_mask
from ringtile.patterns.mask import one_of_equals

_SMALL = 1 << 24
"""Bytes of a mask that is read on every call: a few milliseconds, if attention takes tens."""


class AttnMask(NamedTuple):
    """The pairs that an ``attn_mask`` keeps: the causal ones (lower right), or those of a pattern."""

    is_causal: bool
    pattern: Pattern | None = None


T = TypeVar("T")

_readings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The last reading of each mask, with its state: all layers of a model get the same mask."""


def read_once(mask: Tensor, read: Callable[..., T], *arguments: Hashable) -> T:
    """Return ``read(mask, *arguments)``, made once until the values of the mask change.

    Inference tensors do not count their changes, so they are always read.
    """
    if mask.is_inference():
        return read(mask, *arguments)
    state = (read, mask._version, mask.data_ptr(), mask.shape, arguments, _fingerprint(mask))
    reading = _readings.get(mask)
    if reading is None or reading[0] != state:
        reading = _readings[mask] = state, read(mask, *arguments)
    found: T = reading[1]
    return found


def read_attn_mask(mask: Tensor, batch: int, heads: int, is_causal: bool) -> AttnMask:
    """Read which pairs a mask of `torch.nn.MultiheadAttention` keeps.

    Args:
        mask: ``[Nq, Nk]`` or ``[B * H, Nq, Nk]``, bool, True for pairs to drop, or floating point with 0 and -inf.
        batch: B.
        heads: H.
        is_causal: Hint that the mask is the causal one. Only used in a traced graph, which cannot read its values.

    Raises:
        ValueError: If a floating-point mask has other values, or a traced graph has no hint.
    """
    if torch.compiler.is_compiling():
        if is_causal and mask.shape[-1] == mask.shape[-2]:
            return AttnMask(is_causal=True)
        raise ValueError(
            "attn_mask: a traced graph cannot look at its values: expected is_causal=True with the square causal mask, "
            f"or pattern= for the kept pairs, got {is_causal=}"
        )
    return read_once(mask, _read, batch, heads)


@cache
def _multipliers() -> Tensor:
    """Return odd random numbers for three rounds of `_fingerprint`: enough for 4096**3 words."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(-(2**62), 2**62, (3, 4096), generator=generator, device="cpu").mul_(2).add_(1)


def _fingerprint(mask: Tensor) -> int | None:
    """Return a hash of the values, or None if `_version` has to tell.

    Writes through numpy, another process or ``.data`` do not change the version. Memory that PyTorch did not allocate,
    or has shared with numpy, is not resizable.
    """
    with torch.no_grad():
        for dim, stride in enumerate(mask.stride()):
            mask = mask if stride else mask[(slice(None),) * dim + (slice(1),)]
        if mask.device.type != "cpu" or (mask.nbytes > _SMALL and mask.untyped_storage().resizable()):
            return None
        data = mask.contiguous().flatten().view(torch.uint8)
        if len(data) % 8 or data.storage_offset() % 8:
            data = F.pad(data, (0, -len(data) % 8))
        words = data.view(torch.int64)
        for multipliers in _multipliers():
            if missing := -len(words) % len(multipliers):
                words = F.pad(words, (0, missing))
            words = words.unflatten(0, (-1, len(multipliers))).mv(multipliers)
        return int(words.sum())


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
    """Read a ``key_padding_mask`` ``[B, Nk]`` of `torch.nn.MultiheadAttention`, bool or floating point.

    A traced graph cannot check for values other than 0 and -inf, so it assumes that there are some.
    """
    if not mask.is_floating_point():
        return Padding(~mask, None)
    key_mask = mask != -math.inf
    bias = mask.masked_fill(~key_mask, 0)
    if torch.compiler.is_compiling() or mask.requires_grad or bool(bias.any()):
        return Padding(key_mask, bias)
    return Padding(key_mask, None)
