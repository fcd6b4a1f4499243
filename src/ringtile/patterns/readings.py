"""What masks were read as, until their values change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_SMALL = 1 << 24
"""Bytes of a mask that is read on every call: a few milliseconds, if attention takes tens."""

# Cache of readings. Key: the mask, and its version, address, shape and hash of values must be those of the reading.
# Bound: one reading per mask. Owner: the mask, by a weak reference. All layers of a model get the same mask.
_readings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


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


_MULTIPLIERS = (
    torch.randint(-(2**62), 2**62, (3, 4096), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    .mul_(2)
    .add_(1)
)
"""Odd random numbers for three rounds of `_fingerprint`: enough for 4096**3 words."""


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
        for multipliers in _MULTIPLIERS:
            if missing := -len(words) % len(multipliers):
                words = F.pad(words, (0, missing))
            words = words.unflatten(0, (-1, len(multipliers))).mv(multipliers)
        return int(words.sum())
