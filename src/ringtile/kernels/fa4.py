"""FlashAttention 4's block-sparse kernels, if the package flash-attn-4 is installed. They run only if you name them.

Full tiles run without a mask, and a mask function reads the bits of partial ones. Before the first call of a kind, a
small problem of this kind must match float64, once per process.
"""

import functools
import importlib
import importlib.metadata
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringtile.index import BlockIndex, build_index
from ringtile.index.block_lists import BLOCK, Lists, Tiles, make_tiles
from ringtile.index.schedule import derived
from ringtile.kernels.contracts import Attended, Call, Grads, Rows, as_new_out, dense_tiles_reason, index_of
from ringtile.kernels.cpu_flash import padded
from ringtile.kernels.proof import ERRORS, attend, difference, drawing, gradients, reasons_against, told
from ringtile.kernels.spans import INDEX, KERNEL, span
from ringtile.patterns import BlockDilated, Dense, Segments
from ringtile.patterns.private import is_transformed, n_dispatch_modes

DEVICE = "cuda"
VERSIONS = ("4.0.0b34", "4.0.0b35", "4.0.0b36")
"""Versions of flash-attn-4 whose kernels for sm_90 are the same. They wait for what the backward pass prepares."""

_WIDEST, _MULTIPLE = 128, 8
_PLACES_AT_MOST = 1 << 28
"""Lists and tables have a place for each pair of a row and a column tile. The mask function counts in 32 bits."""


def reason_against() -> str:
    """Return why the kernels cannot run here, or an empty string."""
    return _package_reason() or ("" if torch.cuda.is_available() else "needs a GPU")


@functools.cache
def _package_reason() -> str:
    try:
        found = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "needs the package flash-attn-4"
    return "" if found in VERSIONS else f"knows flash-attn-4 {VERSIONS[0]} to {VERSIONS[-1]}, found {found}"


def _generation(device: torch.device) -> int:
    """Return 9 for sm_90, 10 for sm_100 and sm_103."""
    return torch.cuda.get_device_capability(device)[0]


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return the reasons why the kernels do not support this call."""
    if not call.backend:
        return ["runs only if you name it"]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return _reasons(q, k, v, call, (False, True) if differentiated else (False,))


def _reasons(q: Tensor, k: Tensor, v: Tensor, call: Call, passes: tuple[bool, ...]) -> list[str]:
    """Return the reasons against these passes: False is forward, True is backward."""
    reasons = [reason] if (reason := _package_reason()) else []
    reasons += reasons_against(q, k, v, call, DEVICE, _WIDEST)
    if q.device.type == DEVICE and (generation := _generation(q.device)) not in (9, 10):
        reasons.append(f"needs compute capability 9 or 10, got {generation}")
    if call.start % BLOCK:
        reasons.append(f"needs a start at a multiple of {BLOCK}, got {call.start=}")
    reasons += dense_tiles_reason(q, k, call)
    if True in passes and torch.are_deterministic_algorithms_enabled():
        reasons.append("adds up gradients in any order, and torch.use_deterministic_algorithms is set")
    traced = torch.compiler.is_compiling() or n_dispatch_modes() > 0
    if reasons or traced or is_transformed():
        # The operator asks again, with values.
        return reasons
    index = index_of(call, q, k)
    places = index.group.numel() * (q.shape[2] // BLOCK + 1) * (k.shape[2] // BLOCK + 1)
    if max(places, index.table.bits.numel()) > _PLACES_AT_MOST:
        got = f"{places} and {index.table.bits.numel()}: {q.shape=}, {k.shape=}"
        return [f"supports {_PLACES_AT_MOST} pairs of tiles and words of bits, got {got}"]
    shared = index.group.shape[0] == 1, index.group.shape[1] == 1
    kind = str(q.device), q.dtype, (q.shape[-1], v.shape[-1]), q.shape[1] // k.shape[1], shared
    has_partial = tiles_of(index).has_partial
    return [reason for each in passes if (reason := proof(*kind, has_partial, each))]


def tiles_of(index: BlockIndex) -> Tiles:
    """Return an index as the kernels read it, made at its first use. That synchronizes with the device."""
    with span(INDEX):
        return derived(index, make_tiles, _row_tiles(index.device), lengths=True)


def _row_tiles(device: torch.device) -> int:
    """Return how many row tiles share a list."""
    return 2 if _generation(device) == 10 else 1


def keeps(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
    """Return whether a pair is kept. CuTe compiles this for each element of a partial tile."""
    # One-dimensional tensors, shifts and masks: others take twice as many instructions.
    first, n_cols, tile_at, bits = tensors
    i, j = query[0], key[0]
    tile = tile_at[first[batch[0], head[0]] + (i >> 7) * n_cols[0] + (j >> 7)]
    word = bits[tile * 512 + (i & 127) * 4 + (j >> 5 & 3)]
    return ((word >> (j & 31) & 1) != 0,)


@functools.cache
def kernels() -> tuple[Any, Callable[..., Any]]:
    """Return the module of the kernels, and the mask function as they take it."""
    return importlib.import_module("flash_attn.cute.interface"), importlib.import_module("cutlass.cute").jit(keeps)


def _options(tiles: Tiles, lists: Lists, q: Tensor, scale: float) -> dict[str, Any]:
    module, mask = kernels()
    block = _row_tiles(q.device) * BLOCK, BLOCK
    sparse = module.BlockSparseTensorsTorch(**lists._asdict(), block_size=block)
    options = {"softmax_scale": scale, "block_sparse_tensors": sparse}
    if tiles.has_partial:
        flat = tiles.n_cols, tiles.tile_at, tiles.bits
        for x in flat:
            x.__leading_dim__ = 0  # type: ignore[attr-defined]
        options |= {"mask_mod": mask, "aux_tensors": [tiles.first.expand(*q.shape[:2]), *flat]}
    return options


def _rows(x: Tensor, kept: Tensor | None) -> Tensor:
    """Return ``[B, N, H, D]``, the head dim padded to a multiple of 8, with zeros where nothing is kept."""
    if kept is not None:
        if kept.shape[1] > x.shape[1]:
            kept = kept.unflatten(1, (x.shape[1], -1)).any(2)
        x = torch.where(kept.unsqueeze(-1), x, 0)
    return padded(x, -(-x.shape[-1] // _MULTIPLE) * _MULTIPLE).transpose(1, 2)


def run_forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Attended:
    """Return the output and the lse, whether or not they have been compared."""
    rows = _rows(q, tiles.queries), _rows(k, tiles.keys), _rows(v, tiles.keys)
    options = _options(tiles, tiles.rows, q, scale)
    with span(KERNEL), torch.cuda.device_of(q):
        out, lse, *_ = kernels()[0]._flash_attn_fwd(*rows, return_lse=True, pack_gqa=False, **options)
    return as_new_out(out.transpose(1, 2).narrow(-1, 0, v.shape[-1])), lse


def run_backward(
    out_grad: Tensor, lse_grad: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tiles: Tiles, scale: float,
) -> Grads:  # fmt: skip
    """Return the gradients, whether or not they have been compared."""
    # Always with a gradient of the lse: without one, another kernel would run than the one that was compared.
    lse_grad = torch.zeros_like(lse) if lse_grad is None else lse_grad.float()
    if tiles.queries is not None:
        lse_grad = torch.where(tiles.queries, lse_grad, 0)
    rows = _rows(q, tiles.queries), _rows(k, tiles.keys), _rows(v, tiles.keys)
    outs = _rows(out, tiles.queries), _rows(out_grad, tiles.queries), lse.contiguous()
    options = _options(tiles, tiles.cols, q, scale)
    with span(KERNEL), torch.cuda.device_of(q):
        grads = kernels()[0]._flash_attn_bwd(*rows, *outs, dlse=lse_grad.contiguous(), **options)
    q_grad, k_grad, v_grad = (
        grad.transpose(1, 2).narrow(-1, 0, x.shape[-1]).contiguous() for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return q_grad, k_grad, v_grad


def _served(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> Tiles:
    if reasons := _reasons(q, k, v, call, (backward,)):
        raise ValueError(f"backend 'fa4' does not support this call: {'; '.join(reasons)}")
    return tiles_of(index_of(call, q, k))


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """Return the output ``[B, H, Nq, Dv]`` and the lse ``[B, H, Nq]``."""
    return run_forward(q, k, v, _served(q, k, v, call, False), call.scale)


def backward(rows: Rows, call: Call) -> Grads:
    """Return the gradients of q, k and v. Their last bits differ from run to run."""
    return run_backward(*rows, _served(rows.q, rows.k, rows.v, call, True), call.scale)


@functools.cache
def proof(
    device: str, dtype: torch.dtype, dims: tuple[int, int], ratio: int, shared: tuple[bool, bool], has_partial: bool,
    is_backward: bool,
) -> str:  # fmt: skip
    """Return what is wrong with the kernels on a small problem, or an empty string."""
    drawn = drawing(device, dtype)
    batch, heads, n_queries, n_keys, scale = 2, 2 * ratio, 600, 520, 0.2
    q, out_grad = (drawn(batch, heads, n_queries, dim) for dim in dims)
    k, v = (drawn(batch, 2, n_keys, dim) for dim in dims)
    lse_grad = drawn(batch, heads, n_queries).float()
    # Some queries and keys are in no pair, even in tiles that are kept.
    pattern = Segments(384, 3) | BlockDilated((2,), 1) if has_partial else Dense()
    groups = 1 if shared[0] else batch, 1 if shared[1] else heads
    base = build_index(pattern, n_queries, n_keys, start=0, num_heads=groups[1], device=device)
    keep = drawn(*groups, base.n_rows, base.n_cols) < 0.5
    keep[0, 0, 0], keep[0, 0, :, 1] = False, False
    if not has_partial:
        # Row tiles that share a list keep the same.
        keep[:, :, 1::2] = keep[:, :, :-1:2]
    index = base.restricted(keep)
    kept, tiles = index.to_dense(), tiles_of(index)
    out, lse = attend(q, k, v, kept, scale)
    try:
        if not is_backward:
            return difference(("out", "lse"), run_forward(q, k, v, tiles, scale), (out, lse), dtype)
        # As in a softmax over more keys.
        out, lse = (0.7 * out + 0.1).to(dtype), (lse + 0.3).float()
        found = run_backward(out_grad, lse_grad, q, k, v, out, lse, tiles, scale)
        expected = gradients(out_grad, lse_grad, q, k, v, out, lse, kept, scale)
        return difference(("q_grad", "k_grad", "v_grad"), found, expected, dtype)
    except torch.OutOfMemoryError:
        raise  # The next call compares again.
    except Exception as error:
        # The compiler's own errors are none of the built-in ones.
        if isinstance(error, ERRORS) or type(error).__module__.startswith("cutlass."):
            return told(error)
        raise


def self_test() -> str:
    """Return what is wrong with the kernels for bfloat16 and a head dim of 128, or an empty string."""
    kinds = itertools.product((False, True), repeat=2)
    wrong = (proof(DEVICE, torch.bfloat16, (128, 128), 1, (True, True), *kind) for kind in kinds)
    return next(filter(None, wrong), "")
