"""Dense masks: their pattern, stored as the bits of distinct tiles, and what they were read as."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringtile.patterns.base import Pattern, TileGrid
from ringtile.patterns.checks import as_tensor
from ringtile.patterns.content import Content, digest_of, memory_of
from ringtile.patterns.private import is_transformed, version_of
from ringtile.patterns.traced import REASON, outside_graphs

T = TypeVar("T")

_SIDE = 128
_EMPTY, _FULL, _PARTIAL = 0, 1, 2
"""The state of a tile. Distinct partial tiles are numbered from 2."""


def pack_words(mask: Tensor) -> Tensor:
    """Pack bool ``[..., 8 * n]`` into int32 ``[..., ceil(n / 4)]``, bit ``i % 32`` of word ``i // 32``."""
    *shape, size = mask.shape
    if not torch.compiler.is_compiling() and is_transformed():
        # Before torch 2.13, vmap does not view bytes as another dtype.
        bits = F.pad(mask.int(), (0, -size % 32)).unflatten(-1, (-1, 32))
        shifted: Tensor = bits << torch.arange(32, dtype=torch.int32, device=mask.device)
        return shifted.sum(-1, dtype=torch.int32)
    # Eight bools read as one little-endian int64: the product gathers their low bits, in order, in the top byte.
    eights = mask.reshape(-1).view(torch.int64).view(*shape, size // 8)
    octets = ((eights * 0x0102040810204080) >> 56).to(torch.uint8)
    if size % 32:
        octets = F.pad(octets, (0, 4 - size // 8 % 4))
    return octets.reshape(-1).view(torch.int32).view(*shape, -(-size // 32))


def unpack_words(words: Tensor, size: int) -> Tensor:
    """Unpack int32 words ``[..., w]`` into bool ``[..., size]``."""
    # Flat, because a last dimension of one word may have any stride.
    octets = words.reshape(-1).contiguous().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=words.device)
    return ((octets[..., None] & places) != 0).flatten(-2)[..., :size]


def odd_numbers(*shape: int) -> Tensor:
    """Return odd random numbers, by which words are summed to a hash."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(-(2**62), 2**62, shape, generator=generator, device="cpu").mul_(2).add_(1)


@dataclass(frozen=True, eq=False, repr=False)
class OfMask(Pattern, rule=("allowed",)):
    """The pairs of a mask, which has its own numbers of queries, keys, heads and batch rows."""

    states: Content
    """``[B or 1, H or 1, rows, columns]``: empty, full or partial tiles."""
    lengths: tuple[int, int, int]
    """The number of queries and of keys, and the position of the first query."""
    name: ClassVar[str]

    @property
    def num_heads(self) -> int | None:
        return self.states.tensor.shape[1] if self.states.tensor.shape[1] > 1 else None

    @property
    def batch_size(self) -> int | None:
        return len(self.states.tensor) if len(self.states.tensor) > 1 else None

    def validate(self, grid: TileGrid) -> None:
        n_queries, n_keys, start = self.lengths
        if (grid.n_queries, grid.n_keys, grid.start) != self.lengths:
            raise ValueError(
                f"{self.name} of {n_queries} queries from position {start} and {n_keys} keys: "
                f"got {grid.n_queries=}, {grid.start=}, {grid.n_keys=}"
            )


@dataclass(frozen=True, repr=False)
class Mask(OfMask):
    """The pairs that a dense mask keeps; `from_mask` makes it. Equal masks make equal patterns.

    Tiles are cut at multiples of 128 in positions, and the last query is at the last key.
    """

    bits: Content
    """int32 ``[T, 128, 4]``, the distinct partial tiles."""
    name = "mask"

    def _state(self, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if self.batch_size is not None:
            raise ValueError(f"mask of {self.batch_size} batch rows: ask batch_row(b), the pattern of one row")
        head = torch.zeros_like(head) if self.num_heads is None else head
        return self.states.tensor[0].to(row.device)[head, row - self.lengths[2] // _SIDE, col]

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        state = self._state(head, query // _SIDE, key // _SIDE)
        # Two rows before the table, for empty and full tiles, so that a state is a row of it.
        bits = F.pad(self.bits.tensor, (0, 0, 0, 0, _PARTIAL, 0)).to(query.device)
        word = bits[state, query % _SIDE, key % _SIDE // 32]
        return (state == _FULL) | ((word >> (key % 32)) & 1 == 1)

    def tile_class(self, head: int, row: Tensor, col: Tensor, grid: TileGrid) -> Tensor:
        parts = _SIDE // grid.block
        state = self._state(row.new_tensor(head), row // parts, col // parts)
        # A tile of 32 is one of 4 x 4 parts of a stored tile: its class is the stored tile and its place there.
        place = row % parts * parts + col % parts
        return torch.where(state < _PARTIAL, state, _PARTIAL + (state - _PARTIAL) * parts**2 + place)

    def head_class(self, head: int) -> Hashable:
        return None if self.num_heads is None else digest_of(self.states.tensor[:, head])

    def batch_row(self, batch: int) -> Pattern:
        return self if self.batch_size is None else replace(self, states=Content(self.states.tensor[batch : batch + 1]))


def one_of_equals(mask: Tensor) -> Tensor:
    """Return a mask ``[B, H, Nq, Nk]`` with a B or H of 1 if all are equal."""
    for dim in (0, 1):
        first = mask.narrow(dim, 0, 1)
        if mask.stride(dim) == 0 or torch.equal(mask, first.expand_as(mask)):
            mask = first
    return mask


@outside_graphs
def from_mask(mask: Tensor) -> Pattern:
    """Return the pattern of the pairs that a dense mask keeps.

    The mask is copied, as bits of its distinct tiles of 128 x 128, so later changes do not count. The last query sits
    at the last key. A pattern made of rules works at every length and needs no N x N mask. This one has the lengths of
    the mask and no text form.

    Args:
        mask: bool ``[Nq, Nk]``, ``[H, Nq, Nk]`` or ``[B, H, Nq, Nk]``, True for pairs to keep. H and B can be 1, for
            any number.

    Raises ValueError if the mask is not bool, is empty, or has another number of dimensions.

    >>> mask = torch.tensor([[True, False, True], [True, True, False]])
    >>> print(from_mask(mask).draw(2, 3))
    █·█
    ██·
    """
    mask = as_tensor("from_mask", "mask", mask)
    if mask.layout is not torch.strided:
        raise ValueError(f"from_mask expects torch.strided, got {mask.layout=}")
    if mask.dtype != torch.bool or mask.dim() not in (2, 3, 4) or mask.numel() == 0:
        raise ValueError(
            "from_mask expects a non-empty bool mask [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], "
            f"got {mask.dtype=}, {mask.shape=}"
        )
    mask = one_of_equals(mask[(None,) * (4 - mask.dim())]).cpu()
    n_queries, n_keys = mask.shape[2:]
    ragged = (n_keys - n_queries) % _SIDE
    columns = -(-n_keys // _SIDE)
    known: dict[bytes, int] = {}
    bits, states = [torch.empty(0, _SIDE, _SIDE // 32, dtype=torch.int32, device="cpu")], []
    for of_head in mask.flatten(0, 1):
        for first_row in range(-ragged, n_queries, _SIDE):
            strip = of_head[max(first_row, 0) : first_row + _SIDE]
            above = max(-first_row, 0)
            padding = (0, columns * _SIDE - n_keys, above, _SIDE - len(strip) - above)
            words, inside = (
                pack_words(F.pad(kept, padding).unflatten(1, (columns, _SIDE)).transpose(0, 1))
                for kept in (strip, torch.ones_like(strip))
            )
            full, partial = (words == inside).flatten(1).all(1), (words != 0).flatten(1).any(1)
            state = torch.where(full, _FULL, _EMPTY)
            memory, size = memory_of(words), words.nbytes // columns
            for col in (partial & ~full).nonzero().flatten().tolist():
                content = bytes(memory[col * size : (col + 1) * size])
                if content not in known:
                    known[content] = len(known)
                    bits.append(words[col : col + 1])
                state[col] = _PARTIAL + known[content]
            states.append(state)
    shape = (*mask.shape[:2], -1, columns)
    lengths = (n_queries, n_keys, n_keys - n_queries)
    return Mask(Content(torch.stack(states).view(shape)), lengths, Content(torch.cat(bits)))


_SMALL = 1 << 24
"""Bytes of a mask that is read on every call: a few milliseconds, if attention takes tens."""

# Cache of readings. Key: the mask, and its version, address, shape and hash of values must be those of the reading.
# Bound: one reading per mask. Owner: the mask, by a weak reference. All layers of a model get the same mask.
_readings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@outside_graphs
def read_once(mask: Tensor, read: Callable[..., T], *arguments: Hashable) -> T:
    """Return ``read(mask, *arguments)``, made once until the values of the mask change.

    Raises ValueError in a graph that `torch.export` makes.
    """
    if torch.compiler.is_compiling():
        raise ValueError(f"attn_mask, attention_mask: {REASON}, got {mask.shape=}")
    state = read, arguments, state_of(mask)
    reading = _readings.get(mask)
    if reading is None or reading[0] != state:
        reading = _readings[mask] = state, read(mask, *arguments)
    found: T = reading[1]
    return found


_MULTIPLIERS = odd_numbers(3, 4096)
"""For three rounds of `_fingerprint`: enough for 4096**3 words."""


def state_of(x: Tensor) -> Hashable:
    """Return a value that differs if the memory or the values of a tensor have changed."""
    version: Hashable
    try:
        version = version_of(x)
    except RuntimeError:
        # Inference tensors do not count their changes.
        version = digest_of(x)
    return version, x.data_ptr(), x.shape, _fingerprint(x)


def _fingerprint(mask: Tensor) -> int | None:
    """Return a hash of the values, or None if `_version` has to tell."""
    # Writes through numpy, another process or ``.data`` do not change the version. Memory that PyTorch did not
    # allocate, or has shared with numpy, is not resizable.
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
