"""The launches of a call: kernels, grids and arguments."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from ringtile.index.derive import merged
from ringtile.index.lists import TileLists
from ringtile.index.schedule import Order, derived, schedule_of
from ringtile.kernels.contracts import Call, index_of, is_remapped
from ringtile.kernels.philox import dropout_scale, dropout_threshold
from ringtile.kernels.spans import INDEX, span
from ringtile.kernels.triton import backward_kernels, forward_kernels
from ringtile.kernels.triton.tiles import Constants, Lists, Numbers, Stride, Strides
from ringtile.kernels.triton.tuning import INTERPRETED, INTERPRETED_CONFIG, Config, configs, wants_descriptors

_FEW_PROGRAMS = 132
"""With fewer columns than a large GPU has processors, the query heads of a key head are computed separately."""
_PACKED_QUERIES = 32
"""Up to this many queries, the query heads of a key head share one tile."""
_STATS_ROWS = 64
LOG2_E = math.log2(math.e)
_BLOCKS = (64, 128)
"""The sides of tiles that the kernels take. Smaller ones are merged into tiles of 128."""


class Choice(NamedTuple):
    """One configuration of a launch."""

    config: Config
    constants: Any
    """What is compiled in, as `Constants`."""
    programs: int
    tiles: dict[str, Any] = {}  # noqa: RUF012
    """Arguments that depend on the configuration: keys and values, or descriptors of their tiles."""


class Launch(NamedTuple):
    """One kernel and its arguments, in each configuration to try, best first."""

    kernel: Any
    arguments: dict[str, Any]
    choices: list[Choice]

    def run(self) -> tuple[Choice, Any]:
        """Launch the first configuration that fits into the device's shared memory. Return it and its kernel."""
        for choice in self.choices:
            config, constants, programs, tiles = choice
            try:
                return choice, self.kernel[(programs,)](**self.arguments, **tiles, C=constants, **config.options())
            except triton.runtime.errors.OutOfResources:
                if choice is self.choices[-1]:
                    raise
        raise AssertionError("the last configuration runs or raises")


def launch_of(kernel: Any, values: dict[str, Any], choices: list[Choice]) -> Launch:
    """Return the launch of a kernel, which takes the values that it names."""
    return Launch(kernel, {name: values[name] for name in kernel.arg_names if name in values}, choices)


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


def padded(size: int) -> int:
    """Return the power of two that a side of a product is padded to."""
    return max(16, 1 << (size - 1).bit_length())


def stride_of(x: Tensor, *, compiled: bool = False) -> Stride:
    """Return the strides of a tensor, that between tokens compiled in if ``compiled``."""
    b, h, n, _ = x.stride()
    return Stride(b, h, tl.constexpr(n) if compiled else n)


class Problem:
    """What the launches of a call share, over tiles or over lists. The tensors have contiguous rows."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.q, self.k, self.v = q, k, v
        self.batch, self.heads, self.n_queries, self.head_dim = q.shape
        self.kv_heads, self.n_keys, self.value_dim = v.shape[1:]
        self.ratio = self.heads // self.kv_heads
        self.strides = Strides(*map(stride_of, (q, k, v)))
        names = ("heads", "ratio", "n_queries", "n_keys")
        self.values: dict[str, Any] = {"Q": q, "K": k, "V": v, **{name: getattr(self, name) for name in names}}
        """Arguments of several kernels, by name."""
        self.values |= {"scale": scale, "natural": abs(scale) or 1.0, "c": (abs(scale) or 1.0) * LOG2_E}
        self.compiled: dict[str, Any] = {"D": self.head_dim, "E": self.value_dim, "EP": padded(self.value_dim)}
        """Constants of all kernels, by name."""
        self.compiled |= {"SIGN": (scale > 0) - (scale < 0), "PRECISION": "tf32" if allows_tf32(q) else "ieee"}


class Job(Problem):
    """What the launches of a call over tiles share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        super().__init__(q, k, v, call.scale)
        index = index_of(call, q, k)
        with span(INDEX):
            self.index = index
            if index.block not in _BLOCKS:
                # Only dropout depends on positions (`unsupported`).
                large = derived(index, merged)
                self.index = large.at(replace(index.grid, block=large.block))
            self.schedule = schedule_of(self.index)
        self.call = call
        self.scratch: list[Tensor] = []
        self.group = self.index.group.contiguous()
        placed = call.dropout_p > 0 and (is_remapped(call) or call.head_at is not None or call.batch_at is not None)
        self.constants = self._constants(placed)
        self.values |= self._values(placed)
        # Descriptors need addresses and strides of 16 bytes, and no stride of 0.
        self.by_descriptor = (
            wants_descriptors()
            and (INTERPRETED or architecture(q.device) >= 90)
            and all(
                x.data_ptr() % 16 == 0 and all(stride and stride * x.itemsize % 16 == 0 for stride in x.stride()[:3])
                for x in (self.k, self.v)
            )
        )

    def _constants(self, placed: bool) -> Constants:
        index, call = self.index, self.call
        return Constants(
            **self.compiled,
            DP=padded(self.head_dim),
            BLOCK=index.block,
            # Within a tile, 32 bits suffice unless its rows are millions of elements apart.
            FAR=max(x.stride(2) for x in (self.q, self.k, self.v)) >= 1 << 24,
            RAGGED_ROWS=any(end % index.block for end in (index.start, index.start + self.n_queries)),
            RAGGED_KEYS=self.n_keys % index.block != 0,
            HAS_BITS=call.key_bits is not None,
            HAS_LENGTHS=call.key_lengths is not None,
            DROPOUT=call.dropout_p > 0,
            PLACED=placed,
        )

    def _values(self, placed: bool) -> dict[str, Any]:
        call, index, absent = self.call, self.index, self.group
        return {
            "key_bits": absent if call.key_bits is None else call.key_bits.contiguous(),
            "key_lengths": absent if call.key_lengths is None else call.key_lengths.contiguous(),
            "seed": absent if call.seed is None else call.seed,
            "at": self._numbers() if placed else Numbers(*[absent] * 4),
            "dropout_scale": dropout_scale(call.dropout_p),
            "scale": call.scale * dropout_scale(call.dropout_p),
            "threshold": dropout_threshold(call.dropout_p),
            "start": index.start,
            "first_row": index.first_row,
            "n_rows": index.n_rows,
            "n_cols": index.n_cols,
            "key_words": 0 if call.key_bits is None else call.key_bits.shape[1],
            "group": self.group,
            # If all batch elements or all heads have one group, the stride of that dimension is 0.
            "group_b": index.group.shape[1] if index.group.shape[0] > 1 else 0,
            "group_h": 1 if index.group.shape[1] > 1 else 0,
        }

    def _numbers(self) -> Numbers:
        index, call = self.index, self.call
        tiles, cols, heads, batch = (
            torch.arange(count, device=self.q.device) for count in (index.n_rows, index.n_cols, self.heads, self.batch)
        )
        return Numbers(
            index.row_positions(tiles).int(),
            index.col_positions(cols).int(),
            # A packed tile can have rows beyond the heads.
            pad(heads if call.head_at is None else call.head_at, (0, self.ratio)),
            batch if call.batch_at is None else call.batch_at.contiguous(),
        )

    def key_tiles(self, config: Config) -> dict[str, Any]:
        """Return keys and values as tiles of a configuration."""
        if not self.by_descriptor:
            return {"K_TILES": self.k, "V_TILES": self.v}
        sides = (("K_TILES", self.k, self.constants.DP), ("V_TILES", self.v, self.constants.EP))
        return {name: TensorDescriptor.from_tensor(x, [1, 1, config.keys, width]) for name, x, width in sides}

    def configs(self, kernel: str) -> list[Config]:
        width = max(self.constants.DP, self.constants.EP)
        if INTERPRETED:
            return [INTERPRETED_CONFIG]
        drops = self.call.dropout_p > 0
        return configs(kernel, architecture(self.q.device), self.q.dtype, width, self.index.block, drops)

    def rows(self) -> dict[str, Any]:
        """Return the lists along rows."""
        return self._lists(self.index.rows, self.schedule.rows, self.index.table.bits, self.index.table.cols_any)

    def cols(self) -> dict[str, Any]:
        """Return the lists along columns."""
        return self._lists(self.index.cols, self.schedule.cols, self.index.table.bits_t, self.index.table.rows_any)

    def _lists(self, side: TileLists, order: Order, bits: Tensor, any_kept: Tensor) -> dict[str, Any]:
        full, partial = (side.full_ptr, side.full), (side.partial_ptr, side.partial, side.tile)
        lists = Lists(self.group, order.work, order.begin, *full, *partial, bits, any_kept)
        return {"lists": lists, "longest": order.longest, "splits": order.splits}

    def of_rows(self, config: Config, pack: int) -> Constants:
        """Return the constants of a kernel that goes along rows, in a configuration."""
        # 3 queries of 4 packed heads fill 12 rows of a sub-tile of 16, the fewest that a product takes.
        rows = min(self.n_queries, self.index.block) * pack
        height = max(16, pack, min(config.queries, padded(rows)))
        return self.constants._replace(
            BM=height, BN=config.keys, SUBS=-(-rows // height), PACK=pack, SPLIT=self.schedule.rows.n_scratch > 0,
            STAGES=config.stages, TMA=self.by_descriptor,
        )  # fmt: skip

    def slots(self, order: Order, owners: int) -> tuple[int, int]:
        """Return the number of scratch slots, and how many each owner of lists has."""
        # If each owner has its own group, it has its own numbers, too.
        own = self.group.numel() == self.index.n_groups == owners
        return (order.n_scratch, 0) if own else (order.n_scratch * owners, order.n_scratch)

    def floats(self, *size: int) -> Tensor:
        """Return new scratch, which a launch plan finds in ``scratch``."""
        self.scratch.append(torch.empty(size, dtype=torch.float32, device=self.q.device))
        return self.scratch[-1]

    def row_scratch(self, owners: int, numbers: int, room: int) -> dict[str, Any]:
        """Return the scratch of split rows: slots of ``room`` rows of some numbers."""
        slots, stride = self.slots(self.schedule.rows, owners)
        return {"SCRATCH": self.floats(slots * room * numbers), "scratch_stride": stride, "room": room}


def _merging(constants: Constants) -> Constants:
    """Return the constants of a kernel that merges the splits of another one."""
    names = ("D", "E", "DP", "EP", "BLOCK", "BM", "BN", "SUBS", "PACK", "LOOPED")
    return Constants(**{name: getattr(constants, name) for name in names})


def forward_launches(job: Job, out: Tensor, lse: Tensor) -> list[Launch]:
    """Return the launches that fill output and lse."""
    # With 3 queries and 8 heads to a key head, row 8 * query + head of a tile is one of 24: keys are read once for all.
    packs = 1 < job.ratio <= 128 and job.group.shape[1] == 1 and job.n_queries <= _PACKED_QUERIES
    pack = 1 << (job.ratio - 1).bit_length() if packs else 1
    owners = job.batch * (job.kv_heads if packs else job.heads)
    # Compiled in, the distance of two tokens takes no registers. It changes with heads and head dim, not with lengths.
    near = {"k": stride_of(job.k, compiled=True), "v": stride_of(job.v, compiled=True)}
    strides = job.strides._replace(o=stride_of(out), **near)
    split = job.row_scratch(owners, job.constants.EP + 1, job.index.block * pack)
    values = {**job.values, **job.rows(), **split, "OUT": out, "LSE": lse, "strides": strides}
    merged = {**values, "strides": Strides(o=strides.o)}
    kernels = forward_kernels.forward_kernel, forward_kernels.merge_kernel
    return _along_rows(job, "forward", kernels, (values, merged), owners, pack)


def _along_rows(
    job: Job, name: str, kernels: tuple[Any, Any], values: tuple[dict[str, Any], dict[str, Any]], owners: int, pack: int
) -> list[Launch]:
    """Return the launches of a kernel over the splits of rows, and of the one that merges splits, if there are any."""
    order, choices, merges = job.schedule.rows, [], []
    for config in job.configs(name):
        constants = job.of_rows(config, pack)
        choices.append(Choice(config, constants, owners * order.longest * constants.SUBS, job.key_tiles(config)))
        merges.append(Choice(config, _merging(constants), owners * job.index.n_rows * constants.SUBS))
    launches = zip(kernels, values, (choices, merges), strict=True)
    return [launch_of(*launch) for launch in launches][: 2 if order.n_scratch else 1]


def backward_launches(
    job: Job, out_grad: Tensor, lse_grad: Tensor | None, out: Tensor, lse: Tensor, *grads: Tensor
) -> list[Launch]:
    """Return the launches that fill the gradients of q, k and v. ``lse`` and ``lse_grad`` are contiguous float32."""
    if out_grad.stride(2) >= 1 << 24:
        job.constants = job.constants._replace(FAR=True)
    shared = {
        **job.values,
        "OUT_GRAD": out_grad,
        "STATS": job.floats(2, *lse.shape),
        "size": lse.numel(),
        "strides": job.strides._replace(g=stride_of(out_grad)),
        **dict(zip(("Q_GRAD", "K_GRAD", "V_GRAD"), grads, strict=True)),
    }
    owners = job.batch * job.heads
    of_rows = {**shared, **job.rows(), **job.row_scratch(owners, job.constants.DP, job.index.block)}
    kernels = backward_kernels.dq_kernel, backward_kernels.sum_dq_kernel
    dq = _along_rows(job, "dq", kernels, (of_rows, of_rows), owners, 1)
    return [stats_launch(shared, lse_grad, out, lse), *dq, *_dkdv_launches(job, shared)]


def stats_launch(shared: dict[str, Any], lse_grad: Tensor | None, out: Tensor, lse: Tensor) -> Launch:
    """Return the launch that fills STATS."""
    batch, heads, n_queries, value_dim = out.shape
    strides = Strides(o=stride_of(out), g=shared["strides"].g)
    given = {"OUT": out, "LSE": lse, "LSE_GRAD": lse if lse_grad is None else lse_grad, "strides": strides}
    rows = _STATS_ROWS if value_dim <= 256 else _STATS_ROWS // 4
    constants = Constants(E=value_dim, EP=padded(value_dim), BM=rows)
    values = {**shared, **given, "HAS_LSE_GRAD": lse_grad is not None}
    programs = batch * heads * -(-n_queries // rows)
    return launch_of(backward_kernels.stats_kernel, values, [Choice(Config(rows, 0, 4, 1), constants, programs)])


def _dkdv_launches(job: Job, shared: dict[str, Any]) -> list[Launch]:
    order, index = job.schedule.cols, job.index
    columns = job.batch * job.kv_heads * index.n_cols
    looped = job.ratio if job.group.shape[1] == 1 and columns >= _FEW_PROGRAMS else 1
    owners = job.batch * job.heads // looped
    # If heads are computed separately, each has a slot for every column without splits, after the slots of splits.
    whole_base, stride = job.slots(order, owners)
    slots = whole_base + (owners * index.n_cols if looped < job.ratio else 0)
    cut = order.n_scratch > 0 or looped < job.ratio
    scratch = job.floats(slots * index.block * (job.constants.DP + job.constants.EP))
    split = {"SCRATCH": scratch, "scratch_stride": stride, "whole_base": whole_base}
    values = {**shared, **job.cols(), **split}
    choices, sums = [], []
    for config in job.configs("dkdv"):
        subs = index.block // config.keys
        constants = job.constants._replace(
            BM=config.queries, BN=config.keys, SUBS=subs, LOOPED=looped, SPLIT=cut, STAGES=config.stages
        )
        choices.append(Choice(config, constants, owners * order.longest * subs))
        sums.append(Choice(config, _merging(constants), columns * subs))
    launches = [launch_of(backward_kernels.dkdv_kernel, values, choices)]
    if cut:
        launches.append(launch_of(backward_kernels.sum_dkdv_kernel, values, sums))
    return launches
