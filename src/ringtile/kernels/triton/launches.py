"""The launches of a call: kernels, grids and arguments."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from ringtile.index.schedule import Order, schedule_of
from ringtile.kernels.contracts import Call, index_of, is_remapped
from ringtile.kernels.philox import dropout_scale, dropout_threshold
from ringtile.kernels.spans import INDEX, span
from ringtile.kernels.triton import backward_kernels, forward_kernels
from ringtile.kernels.triton.schedule import in_blocks
from ringtile.kernels.triton.tuning import INTERPRETED, INTERPRETED_CONFIG, Config, configs, wants_descriptors

_FEW_PROGRAMS = 132
"""With fewer columns than a large GPU has processors, the query heads of a key head are computed separately."""
_PACKED_QUERIES = 32
"""Up to this many queries, the query heads of a key head share one tile."""
_STATS_ROWS = 64
_LOG2_E = math.log2(math.e)
_NUMBERS = ("row_at", "col_at", "head_at", "batch_at")


class Choice(NamedTuple):
    """One configuration of a launch."""

    config: Config
    constants: dict[str, Any]
    """Compile-time arguments."""
    programs: int
    tiles: dict[str, Any] = {}  # noqa: RUF012
    """Arguments that depend on the configuration: keys and values, or descriptors of their tiles."""


class Launch(NamedTuple):
    """One kernel and its arguments, in each configuration to try, best first."""

    kernel: Any
    arguments: dict[str, Any]
    choices: list[Choice]

    def run(self, device: torch.device) -> tuple[Choice, Any]:
        """Launch the first configuration that fits into the device's shared memory. Return it and its kernel."""
        key = (self.kernel.__name__, device, *self.choices[0].constants.values())
        for number in range(_fitting.get(key, 0), len(self.choices)):
            choice = self.choices[number]
            config, constants, programs, tiles = choice
            try:
                kernel = self.kernel[(programs,)](**self.arguments, **tiles, **constants, **config.options())
            except triton.runtime.errors.OutOfResources:
                if number + 1 == len(self.choices):
                    raise
            else:
                _fitting[key] = number
                return choice, kernel
        raise AssertionError("the last configuration runs or raises")


_fitting: dict[Any, int] = {}
"""Number of the choice that fit before."""


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one: Triton launches kernels there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def architecture(device: torch.device) -> int:
    """Return the compute capability as in sm_90, or 0 if it is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def allows_tf32(x: Tensor) -> bool:
    """Return True if products of float32 may round their factors: torch.set_float32_matmul_precision allows it."""
    # The getter of that function raises if a program has used both settings.
    matmul: Any = torch.backends.cuda.matmul
    return x.dtype == torch.float32 and x.is_cuda and bool(matmul.fp32_precision == "tf32")


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{dim}": stride for dim, stride in zip("bhn", x.stride(), strict=False)}


class Job:
    """The values that the launches of one call share. The tensors have contiguous rows."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        index = index_of(call, q, k)
        with span(INDEX):
            self.index = in_blocks(index)
            self.schedule = schedule_of(self.index)
        self.q, self.k, self.v, self.call = q, k, v, call
        self.scratch: list[Tensor] = []
        self.batch, self.heads, self.n_queries, self.head_dim = q.shape
        self.kv_heads, self.n_keys, self.value_dim = v.shape[1:]
        self.ratio = self.heads // self.kv_heads
        group, scale = self.index.group, call.scale
        self.group = group.contiguous()
        self.groups = {
            "group": self.group,
            "group_b": group.shape[1] if group.shape[0] > 1 else 0,
            "group_h": 1 if group.shape[1] > 1 else 0,
        }
        placed = call.dropout_p > 0 and (is_remapped(call) or call.head_at is not None or call.batch_at is not None)
        self.shared: dict[str, Any] = {
            "Q": self.q,
            "K": self.k,
            "V": self.v,
            **self.groups,
            "key_bits": self.group if call.key_bits is None else call.key_bits.contiguous(),
            "key_words": 0 if call.key_bits is None else call.key_bits.shape[1],
            "key_lengths": self.group if call.key_lengths is None else call.key_lengths.contiguous(),
            "seed": self.group if call.seed is None else call.seed,
            **(self._numbers() if placed else dict.fromkeys(_NUMBERS, self.group)),
            "natural": abs(scale) or 1.0,
            "dropout_scale": dropout_scale(call.dropout_p),
            "threshold": dropout_threshold(call.dropout_p),
            "heads": self.heads,
            "ratio": self.ratio,
            "n_queries": self.n_queries,
            "n_keys": self.n_keys,
            "start": self.index.start,
            "first_row": self.index.first_row,
            **_strides("q", self.q),
            **_strides("k", self.k),
            **_strides("v", self.v),
        }
        self.widths = {
            "D": self.head_dim,
            "E": self.value_dim,
            "DP": _padded(self.head_dim),
            "EP": _padded(self.value_dim),
            "BLOCK": self.index.block,
        }
        self.constants: dict[str, Any] = {
            **self.widths,
            "SIGN": (scale > 0) - (scale < 0),
            "PRECISION": "tf32" if allows_tf32(q) else "ieee",
            # Within a tile, 32 bits suffice unless its rows are millions of elements apart.
            "FAR": max(x.stride(2) for x in (self.q, self.k, self.v)) >= 1 << 24,
            "RAGGED_ROWS": any(end % self.index.block for end in (self.index.start, self.index.start + self.n_queries)),
            "RAGGED_KEYS": self.n_keys % self.index.block != 0,
            "HAS_BITS": call.key_bits is not None,
            "HAS_LENGTHS": call.key_lengths is not None,
            "DROPOUT": call.dropout_p > 0,
            "PLACED": placed,
        }
        # Descriptors need addresses and strides of 16 bytes, and no stride of 0.
        self.by_descriptor = (
            wants_descriptors()
            and (INTERPRETED or architecture(q.device) >= 90)
            and all(
                x.data_ptr() % 16 == 0 and all(stride and stride * x.itemsize % 16 == 0 for stride in x.stride()[:3])
                for x in (self.k, self.v)
            )
        )

    def _numbers(self) -> dict[str, Tensor]:
        """Return the numbers of tiles, heads and batch elements in the whole problem."""
        index, call = self.index, self.call
        tiles, cols, heads, batch = (
            torch.arange(count, device=self.q.device) for count in (index.n_rows, index.n_cols, self.heads, self.batch)
        )
        found = (
            index.row_positions(tiles).int(),
            index.col_positions(cols).int(),
            # A packed tile can have rows beyond the heads.
            pad(heads if call.head_at is None else call.head_at, (0, self.ratio)),
            batch if call.batch_at is None else call.batch_at.contiguous(),
        )
        return dict(zip(_NUMBERS, found, strict=True))

    def key_tiles(self, config: Config) -> dict[str, Any]:
        """Return keys and values as tiles of a configuration."""
        if not self.by_descriptor:
            return {"K_TILES": self.k, "V_TILES": self.v}
        sides = (("K_TILES", self.k, "DP"), ("V_TILES", self.v, "EP"))
        return {
            name: TensorDescriptor.from_tensor(x, [1, 1, config.keys, self.widths[width]]) for name, x, width in sides
        }

    def configs(self, kernel: str) -> list[Config]:
        width = max(self.widths["DP"], self.widths["EP"])
        if INTERPRETED:
            return [INTERPRETED_CONFIG]
        drops = self.call.dropout_p > 0
        return configs(kernel, architecture(self.q.device), self.q.dtype, width, self.index.block, drops)

    def rows(self) -> dict[str, Any]:
        """The lists along rows."""
        index, order = self.index, self.schedule.rows
        return {
            "work": order.work,
            "begin": order.begin,
            "longest": order.longest,
            "full_ptr": index.rows.full_ptr,
            "full_col": index.rows.full,
            "part_ptr": index.rows.partial_ptr,
            "part_col": index.rows.partial,
            "part_tile": index.rows.tile,
            "bits": index.table.bits,
            "cols_any": index.table.cols_any,
            "n_rows": index.n_rows,
        }

    def cols(self) -> dict[str, Any]:
        """The lists along columns."""
        index, order = self.index, self.schedule.cols
        return {
            "work": order.work,
            "begin": order.begin,
            "longest": order.longest,
            "full_ptr": index.cols.full_ptr,
            "full_row": index.cols.full,
            "part_ptr": index.cols.partial_ptr,
            "part_row": index.cols.partial,
            "part_tile": index.cols.tile,
            "bits": index.table.bits_t,
            "rows_any": index.table.rows_any,
            "n_cols": index.n_cols,
        }

    def row_constants(self, config: Config, tiles: dict[str, int]) -> dict[str, Any]:
        """Return the compile-time arguments of a kernel that goes along rows."""
        return {
            **self.constants,
            **tiles,
            "BN": config.keys,
            "SPLIT": self.schedule.rows.n_scratch > 0,
            "STAGES": config.stages,
            "TMA": self.by_descriptor,
        }

    def sub_rows(self, config: Config, pack: int) -> dict[str, int]:
        """Return the rows of a sub-tile and the number of sub-tiles of a row tile."""
        rows = min(self.n_queries, self.index.block) * pack
        height = max(16, pack, min(config.queries, _padded(rows)))
        return {"BM": height, "SUBS": -(-rows // height)}


def _scratch_slots(job: Job, order: Order, owners: int) -> tuple[int, int]:
    """Return the number of scratch slots, and how many each owner of lists has."""
    # If each owner has its own group, it has its own numbers, too.
    own = job.group.numel() == job.index.n_groups == owners
    return (order.n_scratch, 0) if own else (order.n_scratch * owners, order.n_scratch)


def _scratch(job: Job, *size: int) -> Tensor:
    job.scratch.append(torch.empty(size, dtype=torch.float32, device=job.q.device))
    return job.scratch[-1]


def _split(job: Job, order: Order, owners: int, numbers: int, room: int) -> dict[str, Any]:
    """Return the scratch of split rows: slots of ``room`` rows."""
    slots, stride = _scratch_slots(job, order, owners)
    return {"SCRATCH": _scratch(job, slots * room * numbers), "scratch_stride": stride, "room": room}


def forward_launches(job: Job, out: Tensor, lse: Tensor) -> list[Launch]:
    """Yield the launches that fill output and lse."""
    order = job.schedule.rows
    packs = 1 < job.ratio <= 128 and job.group.shape[1] == 1 and job.n_queries <= _PACKED_QUERIES
    pack = 1 << (job.ratio - 1).bit_length() if packs else 1
    owners = job.batch * (job.kv_heads if packs else job.heads)
    split = _split(job, order, owners, job.widths["EP"] + 1, job.index.block * pack)
    results = {"OUT": out, "LSE": lse, **_strides("o", out)}
    scale = {"c": job.shared["natural"] * _LOG2_E}
    # Compiled in, the distance of two tokens takes no registers. It changes with heads and head dim, not with lengths.
    rows = {"k_n": job.k.stride(2), "v_n": job.v.stride(2)}
    shared = {name: value for name, value in job.shared.items() if name not in rows}
    choices, merges = [], []
    for config in job.configs("forward"):
        tiles = {**job.sub_rows(config, pack), "PACK": pack}
        programs = owners * order.longest * tiles["SUBS"]
        choices.append(Choice(config, {**job.row_constants(config, tiles), **rows}, programs, job.key_tiles(config)))
        widths = {name: job.widths[name] for name in ("E", "EP", "BLOCK")}
        merges.append(Choice(config, {**widths, **tiles}, owners * job.index.n_rows * tiles["SUBS"]))
    launches = [Launch(forward_kernels.forward_kernel, {**shared, **scale, **job.rows(), **results, **split}, choices)]
    if order.n_scratch:
        names = ("heads", "ratio", "n_queries", "start", "first_row")
        facts = {name: job.shared[name] for name in names} | job.groups
        merged = {**facts, **results, **split, "splits": order.splits, "n_rows": job.index.n_rows}
        launches.append(Launch(forward_kernels.merge_kernel, merged, merges))
    return launches


def backward_launches(
    job: Job, out_grad: Tensor, lse_grad: Tensor | None, out: Tensor, lse: Tensor, grads: tuple[Tensor, Tensor, Tensor]
) -> list[Launch]:
    """Yield the launches that fill the gradients of q, k and v. ``lse`` and ``lse_grad`` are contiguous float32."""
    stats = _scratch(job, 2, *lse.shape)
    widths = {name: job.widths[name] for name in ("E", "EP")}
    preparation = {
        "OUT": out,
        "OUT_GRAD": out_grad,
        "LSE": lse,
        "LSE_GRAD": lse if lse_grad is None else lse_grad,
        "STATS": stats,
        "heads": job.heads,
        "n_queries": job.n_queries,
        "size": lse.numel(),
        "dropout_scale": job.shared["dropout_scale"],
        **_strides("o", out),
        **_strides("g", out_grad),
    }
    programs = job.batch * job.heads * -(-job.n_queries // _STATS_ROWS)
    constants = {**widths, "BM": _STATS_ROWS, "HAS_LSE_GRAD": lse_grad is not None}
    choice = Choice(Config(_STATS_ROWS, 0, 4, 1), constants, programs)
    if out_grad.stride(2) >= 1 << 24:
        job.constants["FAR"] = True
    shared = {
        **job.shared,
        "OUT_GRAD": out_grad,
        "STATS": stats,
        "size": lse.numel(),
        "scale": job.call.scale * job.shared["dropout_scale"],
        **_strides("g", out_grad),
    }
    return [
        Launch(backward_kernels.stats_kernel, preparation, [choice]),
        *_dq_launches(job, shared, grads[0]),
        *_dkdv_launches(job, shared, grads[1], grads[2]),
    ]


def _dq_launches(job: Job, shared: dict[str, Any], q_grad: Tensor) -> list[Launch]:
    order, owners = job.schedule.rows, job.batch * job.heads
    split = _split(job, order, owners, job.widths["DP"], job.index.block)
    choices, sums = [], []
    for config in job.configs("dq"):
        tiles = job.sub_rows(config, 1)
        programs = owners * order.longest * tiles["SUBS"]
        choices.append(Choice(config, job.row_constants(config, tiles), programs, job.key_tiles(config)))
        widths = {name: job.widths[name] for name in ("D", "DP", "BLOCK")}
        sums.append(Choice(config, {**widths, **tiles}, owners * job.index.n_rows * tiles["SUBS"]))
    launches = [Launch(backward_kernels.dq_kernel, {**shared, **job.rows(), **split, "Q_GRAD": q_grad}, choices)]
    if order.n_scratch:
        facts = {name: shared[name] for name in ("heads", "n_queries", "start", "first_row")} | job.groups
        summed = {**facts, **split, "Q_GRAD": q_grad, "splits": order.splits, "n_rows": job.index.n_rows}
        launches.append(Launch(backward_kernels.sum_dq_kernel, summed, sums))
    return launches


def _dkdv_launches(job: Job, shared: dict[str, Any], k_grad: Tensor, v_grad: Tensor) -> list[Launch]:
    order, index = job.schedule.cols, job.index
    columns = job.batch * job.kv_heads * index.n_cols
    looped = job.ratio if job.group.shape[1] == 1 and columns >= _FEW_PROGRAMS else 1
    owners = job.batch * job.heads // looped
    # If heads are computed separately, each has a slot for every column without splits, after the slots of splits.
    whole_base, stride = _scratch_slots(job, order, owners)
    slots = whole_base + (owners * index.n_cols if looped < job.ratio else 0)
    cut = order.n_scratch > 0 or looped < job.ratio
    split = {
        "SCRATCH": _scratch(job, slots * index.block * (job.widths["DP"] + job.widths["EP"])),
        "scratch_stride": stride,
        "whole_base": whole_base,
        "K_GRAD": k_grad,
        "V_GRAD": v_grad,
    }
    choices, sums = [], []
    for config in job.configs("dkdv"):
        subs = index.block // config.keys
        constants = {
            **job.constants,
            "BM": config.queries,
            "BN": config.keys,
            "SUBS": subs,
            "LOOPED": looped,
            "SPLIT": cut,
            "STAGES": config.stages,
        }
        choices.append(Choice(config, constants, owners * order.longest * subs))
        sums.append(Choice(config, {**job.widths, "BN": config.keys, "LOOPED": looped}, columns * subs))
    launches = [Launch(backward_kernels.dkdv_kernel, {**shared, **job.cols(), **split}, choices)]
    if cut:
        facts = {name: shared[name] for name in ("heads", "ratio", "n_keys")} | job.groups
        summed = {**facts, **split, "splits": order.splits, "n_cols": index.n_cols}
        launches.append(Launch(backward_kernels.sum_dkdv_kernel, summed, sums))
    return launches
