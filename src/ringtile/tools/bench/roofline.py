"""The least time of a call: the work of its tiles over the rates of the processor, measured in the same run.

Matmuls and exponentials share the vector ports, so their times add up. Memory traffic overlaps with them, so the limit
of a pass is the longer of the two. Every tensor counts as read or written once, keys and values only in tiles that are
kept. A partial tile counts the parts that the kernel computes: the tokens that share its lanes, times the tokens of the
other side from the first to the last that any of them keeps.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ringtile.index import BlockIndex
from ringtile.kernels.native import backward_products, threads_of
from ringtile.kernels.native.instruction_sets import BFLOAT16_SETS
from ringtile.kernels.native.library import reason_against
from ringtile.kernels.native.precision import allows_less_than_float32, arithmetic_of
from ringtile.patterns import Causal
from ringtile.tools.bench.peers import Case, Peer, Ringtile, SdpaDense
from ringtile.tools.record import FORWARD


class Work(NamedTuple):
    """The work of one pass."""

    operations: float
    """Floating-point operations of the matmuls, those of all parts if numbers are multiplied in parts."""
    exponentials: float
    traffic: float
    """Bytes of tensors read and written."""
    products: str
    """The rate of the matmuls, one of `ringtile.kernels.native.instruction_sets.RATES`."""
    softmax: str
    """The rate of the exponentials."""

    def seconds(self, rates: Mapping[str, float]) -> float:
        computing = self.operations / rates[self.products] + self.exponentials / rates[self.softmax]
        return max(computing, self.traffic / rates["read"])


def passes_of(case: Case, direction: str, peer: Peer) -> list[Work]:
    """Return the work of each pass of a call, or an empty list if it is not known, as for bfloat16 of PyTorch."""
    if case.device.type != "cpu" or reason_against():
        return []
    if isinstance(peer, Ringtile) and peer.backend in (None, "native"):
        return _native(case, direction)
    # With less exact float32, PyTorch may multiply in bfloat16 or TF32, at a rate that was not measured.
    exact = case.dtype == torch.float64 or (case.dtype == torch.float32 and not allows_less_than_float32())
    if isinstance(peer, SdpaDense) and exact:
        causal = isinstance(case.dense_pattern, Causal) and case.queries > 1
        pairs = case.n_tokens * (case.n_tokens + 1) // 2 if causal else case.queries * case.n_tokens
        pairs *= case.batch * case.heads
        keys = case.batch * case.key_heads * case.n_tokens
        return _passes(case, direction, pairs, [(5, pairs)], (_products(case.dtype),) * 2, keys)
    return []


def _native(case: Case, direction: str) -> list[Work]:
    index = case.index.trimmed()
    by_rows, by_columns = (_reached(case, index, bits) for bits in (index.table.bits_t, index.table.bits))
    threads = threads_of(4.0 * case.index.tile_pairs(case.batch, case.heads) * case.head_dim)
    isa, _, tile_products = arithmetic_of(case.dtype)
    by_tiles = tile_products > 0
    # Odd head dims have no pairs of numbers. Tiles pad them with zeros.
    paired = by_tiles or (isa.name in BFLOAT16_SETS and case.dtype == torch.bfloat16 and case.head_dim % 2 == 0)
    if by_tiles:
        by_columns = by_rows  # queries are in the lanes there too
    products = backward_products(case.batch * case.key_heads, threads)
    graded = [(5, by_columns)] if products == 5 else [(4, by_columns), (3, by_rows)]
    forward, backward = ("dot_bfloat16" if dots else _products(case.dtype) for dots in (paired, by_tiles))
    passes = _passes(case, direction, by_rows, graded, (forward, backward), _keys_read(case, index))
    return [work._replace(operations=work.operations * max(1, tile_products)) for work in passes]


def _reached(case: Case, index: BlockIndex, bits: torch.Tensor) -> int:
    """Count the pairs that the kernel computes with the last dimension of ``bits`` [T, block, words] in its lanes."""
    # With AVX-512, 128 keys are 8 parts of 16 float32 lanes. The kernel computes a part for all queries from the first
    # to the last that keep a key of it: if these are 9 and 40, for 32 queries, which is 512 pairs.
    lanes = min(arithmetic_of(case.dtype).isa.lanes * 4 // max(4, case.dtype.itemsize), index.block)
    kept = (bits.view(torch.int8)[..., : index.block // 8].unflatten(2, (-1, lanes // 8)) != 0).any(3)
    first, beyond = kept.int().argmax(1), index.block - kept.flip(1).int().argmax(1)
    reached = lanes * ((beyond - first) * kept.any(1)).sum(1)
    full, part = index.rows.slots()
    # No more than lie inside the lengths, so the limit can be a little too low in ragged tiles.
    # Heads of one group share lists, so count each group once, and then each head by its group.
    of_groups = full.new_zeros(index.n_groups)
    of_groups.index_add_(0, full // index.n_rows, index.pairs_inside(full, index.rows.full))
    inside = index.pairs_inside(part, index.rows.partial)
    of_groups.index_add_(0, part // index.n_rows, torch.minimum(reached[index.rows.tile], inside))
    return int(of_groups[index.group.long()].expand(case.batch, case.heads).sum())


def _keys_read(case: Case, index: BlockIndex) -> int:
    """Count the keys in column tiles that some row keeps, over all key heads."""
    widths = index.keys_inside(torch.arange(index.n_cols, device="cpu"))
    kept = (index.cols.full_ptr + index.cols.partial_ptr).diff().view(index.n_groups, index.n_cols) > 0
    of_heads = kept[index.group.long()].expand(case.batch, case.heads, -1)
    return int((of_heads.unflatten(1, (case.key_heads, -1)).any(2) * widths).sum())


def _products(dtype: torch.dtype) -> str:
    return "fma_float64" if dtype == torch.float64 else "fma_float32"


def _passes(
    case: Case, direction: str, pairs: int, graded: Sequence[tuple[int, int]], rates: tuple[str, str], keys: int
) -> list[Work]:
    """Return a forward pass of two matmuls and, to train, a backward pass of these (matmuls, pairs), at these rates."""
    softmax = "exp_float64" if case.dtype == torch.float64 else "exp_float32"
    # A multiplication and an addition per element of the head.
    each, size = 2.0 * case.head_dim, case.head_dim * case.dtype.itemsize
    queries, keys = size * case.batch * case.heads * case.queries, size * keys
    forward = Work(2 * each * pairs, pairs, 2 * queries + 2 * keys, rates[0], softmax)
    if direction == FORWARD:
        return [forward]
    # It reads q, out, its gradient, k and v, and writes three gradients.
    operations, exponentials = sum(each * count * of for count, of in graded), sum(of for _, of in graded)
    return [forward, Work(operations, exponentials, 4 * queries + 4 * keys, rates[1], softmax)]


def limit_ms(passes: Sequence[Work], rates: Mapping[str, float]) -> float | None:
    """Return the least milliseconds of the passes, or None if there are none or a rate is missing."""
    needed = {name for work in passes for name in (work.products, work.softmax, "read")}
    if not passes or needed - set(rates):
        return None
    return 1e3 * sum(work.seconds(rates) for work in passes)
