"""The options of a softmax, the call of an operator, and what every backend implements.

Shapes: ``B`` batch, ``H`` query heads, ``Hkv`` key heads, ``Nq`` queries, ``Nk`` keys, ``D`` and ``Dv`` head dims. The
kept pairs come either as the tensors of a `BlockIndex` or as pattern text, which means the same in another process.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypedDict, get_type_hints

import torch
from torch import Tensor

from ringtile.index import BlockIndex, build_index
from ringtile.index.tiles import pack_words, unpack_words
from ringtile.kernels.spans import INDEX, span
from ringtile.patterns import TileGrid, parse
from ringtile.patterns.checks import check_number
from ringtile.patterns.private import is_batched_gradient

_TILES_AT_MOST = 1 << 22
"""A dense pattern with more tiles than this goes to a kernel without an index."""


class SoftmaxOptions(TypedDict, total=False):
    """Options of every attention function, for type checkers. All other lists of options derive from these two."""

    key_mask: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    scale: float | None


class RowOptions(SoftmaxOptions, total=False):
    """Options of attention in one softmax per row, too."""

    key_lengths: Tensor | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    head_at: Tensor | None
    batch_at: Tensor | None


class Call(NamedTuple):
    """The arguments that the three operators share, after their own tensors, in schema order."""

    start: int
    block: int
    scale: float
    tiles: Sequence[Tensor] = ()
    """The tensors of a `BlockIndex`, or none if ``pattern`` defines the kept pairs."""
    pattern: str = ""
    key_bits: Tensor | None = None
    """``[B, ceil(Nk / 32)]`` int32 bitmask of the keys to attend to."""
    key_lengths: Tensor | None = None
    """``[B]`` integers: keys from this position on do not exist."""
    seed: Tensor | None = None
    """One int64 element."""
    alibi_slopes: Tensor | None = None
    """``[H]``."""
    head_at: Tensor | None = None
    """``[H]`` int64: the number of each head in the whole problem, for dropout."""
    batch_at: Tensor | None = None
    """``[B]`` int64: the number of each batch element in the whole problem, for dropout."""
    dropout_p: float = 0.0
    softcap: float = 0.0
    backend: str = ""


class Rows(NamedTuple):
    """The tensors of a backward pass. ``out`` and ``lse`` can be those of a softmax over more keys."""

    out_grad: Tensor
    lse_grad: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


Attended = tuple[Tensor, Tensor]
"""The output and the lse."""

Grads = tuple[Tensor, Tensor, Tensor]
"""The gradients of q, k and v."""


class Lists(NamedTuple):
    """The kept pairs of a call as lists of keys per query."""

    indices: Tensor
    """int32 ``[1 or B, G, Nq, n]``, contiguous: each row ascends strictly, then -1. G is 1 or Hkv: query head h reads
    list ``h * G // H``."""
    block: int
    """A power of two: entry e stands for the keys ``e * block`` to ``e * block + block - 1`` that exist."""
    limits: Tensor
    """int32 ``[1 or B, Nq, 2]``, contiguous: key j counts only if ``limits[b, i, 0] <= j < limits[b, i, 1]``."""


class Added(NamedTuple):
    """Numbers that are added to the scores of query i and key j: ``values[b, h, i or 0, d]``, where d is the difference
    ``key_at[j] - query_at[i]``, or the nearest place that exists."""

    values: Tensor
    """``[B, H, Nq or 1, R]`` in the dtype of the lse, with any strides and a contiguous last dimension."""
    query_at: Tensor
    """int32 ``[Nq]``."""
    key_at: Tensor
    """int32 ``[Nk]``."""
    grad: Tensor | None = None
    """The same for the gradients of the values: a backward pass adds them to it, in a fixed order."""


class Masses(NamedTuple):
    """The arguments of `ringtile.kernels.masses.pooled_masses`, with queries and keys that record no gradient."""

    query: Tensor
    key: Tensor
    seen: Tensor
    groups: Tensor
    bias: Tensor | None
    segment: int
    pool: str
    by_sign: bool
    scale: float


OPTIONAL = tuple(name for name, kind in get_type_hints(Call).items() if kind == Tensor | None)
"""The fields of a call that are tensors or None."""

# They follow one another, so that a slice of the call finds them without six look-ups by name.
_PLACES = slice(Call._fields.index(OPTIONAL[0]), Call._fields.index(OPTIONAL[-1]) + 1)


def options_of(call: Call) -> tuple[Any, ...]:
    """Return the fields of a call that are tensors or None."""
    fields: tuple[Any, ...] = call
    return fields[_PLACES]


class Backend(Protocol):
    """The functions of a backend module."""

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
        """Return the reasons why this backend does not support a call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
        """Return the output ``[B, H, Nq, Dv]``, laid out as `new_out`, and a contiguous lse, float32 or better."""

    def backward(self, rows: Rows, call: Call) -> Grads:
        """Return the gradients of q, k and v, contiguous, in their dtypes."""


BACKENDS: dict[str, Any] = {}
"""The modules of all backends by name, see `Backend`. They import this module, so only `select` knows and sets them."""
OF_LISTS: dict[str, Any] = {}
"""Those of attention over `Lists`: they take lists and a scale, or in ``unsupported`` dropout_p, in place of a call.
The first that supports a call runs."""


def pack_keys(keep: Tensor) -> Tensor:
    """Pack ``[B, Nk]`` bool into ``[B, ceil(Nk / 32)]`` int32 words, key j in bit ``j % 32`` of word ``j // 32``."""
    # As a number of words, so that a graph with any number of keys can tell that the bits fill them.
    words = (keep.shape[1] + 31) // 32
    return pack_words(torch.nn.functional.pad(keep, (0, 32 * words - keep.shape[1])))


def key_keep(call: Call, n_keys: int) -> Tensor | None:
    """Return ``[B, Nk]`` bool, the keys that the call's own mask and lengths keep, or None if it has neither."""
    keep = None
    if call.key_bits is not None:
        keep = unpack_words(call.key_bits, n_keys)
    if call.key_lengths is not None:
        inside = torch.arange(n_keys, device=call.key_lengths.device) < call.key_lengths.unsqueeze(1)
        keep = inside if keep is None else keep & inside
    return keep


def index_of(call: Call, q: Tensor, k: Tensor) -> BlockIndex:
    """Return the block index of a call, from its own tensors or from its pattern text."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if call.pattern:
        with span(INDEX):
            rule = parse(call.pattern)
            return build_index(
                rule, n_queries, n_keys, start=call.start, num_heads=q.shape[1], block=call.block, device=q.device
            )
    return BlockIndex.from_tensors(call.tiles, TileGrid(call.block, call.start, n_queries, n_keys))


def is_remapped(call: Call) -> bool:
    """Return True if the tiles of a call lie at other positions than their numbers say."""
    # The positions of row and column tiles are the last two of `BlockIndex.tensors`.
    return any(at.numel() > 0 for at in call.tiles[-2:])


def dense_tiles_reason(q: Tensor, k: Tensor, call: Call) -> list[str]:
    """Return the reason why a dense or causal call is too large for an index, or no reasons."""
    if call.pattern in ("dense", "causal"):
        tiles = (q.shape[2] // call.block + 1) * (k.shape[2] // call.block + 1)
        if tiles > _TILES_AT_MOST:
            return [f"would need an index of {tiles} tiles, got {q.shape=}, {k.shape=}"]
    return []


def lacking(call: Call, *names: str) -> list[str]:
    """Return a reason for each of these arguments that a call has, because the kernel does not support them."""
    values = [(name, getattr(call, name)) for name in names]
    given = [(name, x) for name, x in values if isinstance(x, Tensor) or x]
    return [f"does not support {name}" + ("" if isinstance(x, Tensor) else f", got {x}") for name, x in given]


def merge_into(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge attention over more keys into ``out`` and ``lse``, in place. Parts can be empty (lse -inf)."""
    # Each output is the mean of its keys, so its share is exp(lse - total): two parts of equal lse count a half each.
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -math.inf, 0)
    out.mul_((lse - safe).exp_().unsqueeze(-1)).addcmul_(more.to(out.dtype), (more_lse - safe).exp_().unsqueeze(-1))
    lse.copy_(total)


@cache
def settle_exponentials() -> None:
    """Compute an exponential with one thread before several do.

    If two threads at once compute the first exponentials of a process, MKL can give one of them too few digits (torch
    2.13 with AVX-512: an lse with a relative error of 4e-6 in float32 and 1e-9 in float64, in one process of ten).
    """
    for dtype in (torch.float32, torch.float64):
        torch.zeros(8, dtype=dtype, device="cpu").exp()


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension. Compiled kernels read any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def has_memory(x: Tensor) -> bool:
    """Return False if the storage of a tensor was freed."""
    # The address of a freed storage is 0. No tensor begins a tebibyte into it, so most calls look no further.
    at = x.data_ptr()
    return at >> 40 != 0 or x.numel() == 0 or at != x.storage_offset() * x.element_size()


def is_batched(x: object) -> bool:
    """Return True for a tensor of ``is_grads_batched=True``, all gradients at once, without memory."""
    return isinstance(x, Tensor) and is_batched_gradient(x)


def check_memory(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise ValueError if a tensor has no strides, or if its storage was freed: kernels would read address 0."""
    for name, x in zip(names, tensors, strict=True):
        if x is None:
            continue
        try:
            held = has_memory(x)
        except RuntimeError:
            # To ask each tensor for its layout would take longer.
            if is_batched(x):
                raise ValueError(f"{name}: expected one gradient, got is_grads_batched=True with {x.shape=}") from None
            if x.layout is torch.strided:
                raise
            raise ValueError(f"{name}: expected torch.strided, got {x.layout=}") from None
        if not held:
            raise ValueError(f"{name}: expected a tensor with memory, got a freed storage with {x.shape=}")


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the factor for scores, by default ``D ** -0.5``. Raise ValueError if it is not a finite number."""
    if scale is None:
        scale = query.shape[-1] ** -0.5
    else:
        check_number("scale", scale, "a finite number")
    return scale


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and of the lse: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


ROW_NAMES = ("out_grad", "lse_grad", "query", "key", "value", "out", "lse")
"""The tensors of `Rows`, as errors name them."""


def new_out(q: Tensor, head_dim: int) -> Tensor:
    """Return uninitialized ``[B, H, Nq, head_dim]``, laid out ``[B, Nq, H, head_dim]``: joining heads is free."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], head_dim)).transpose(1, 2)


def as_new_out(out: Tensor) -> Tensor:
    """Return an output in the layout of `new_out`, without a copy if it has that layout."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def in_bytes(x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return int8 numbers ``[..., D]`` and float32 units ``[..., 1]``, whose product is x times a scale, rounded."""
    x = x.float()
    unit = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).div_(127)
    unit.clamp_(min=torch.finfo(torch.float32).tiny)
    # A NaN or an infinity becomes some number, and its unit tells.
    numbers = (x / unit).nan_to_num_(0).round_()
    return (numbers if scale >= 0 else numbers.neg_()).to(torch.int8), unit.mul_(abs(scale))
