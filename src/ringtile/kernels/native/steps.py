"""One query per head over tiles of keys, by the library: a step of generation, whose tiles nobody asks for again.

An index has lists of columns, splits and checks, which serve many calls. To make them takes longer than a step.
"""

import torch
from torch import Tensor

from ringtile.kernels.contracts import accumulator, pack_keys, with_contiguous_rows
from ringtile.kernels.native.checks import check_tensors
from ringtile.kernels.native.library import ForwardPhase, library
from ringtile.kernels.native.precision import arithmetic_of


class Step:
    """The last query of each head ``[B, H, 1, D]``, over the tiles that ``keep`` names, bool ``[B, H, 1, C]``."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor, block: int) -> None:
        check_tensors(query, key, value)
        self.tensors = [with_contiguous_rows(x) for x in (query, key, value)]
        (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, value_dim) = query.shape, value.shape
        cols = -(-n_keys // block)
        if n_queries != 1 or keep.shape != (batch, heads, 1, cols) or keep.dtype != torch.bool:
            raise ValueError(
                f"keep: expected bool [{batch}, {heads}, 1, {cols}] for one query, got {keep.dtype} "
                f"{tuple(keep.shape)} for {query.shape=}"
            )
        c = self.c = library().structure()
        c.batch, c.heads, c.n_queries, c.head_dim = batch, heads, 1, head_dim
        c.kv_heads, c.n_keys, c.value_dim = kv_heads, n_keys, value_dim
        c.block, c.start = block, n_keys - 1
        self._set_tiles(keep.reshape(batch * heads, cols))

    def _set_tiles(self, keep: Tensor) -> None:
        """Set the lists of an index in which each head is a group with one row."""
        groups, cols = keep.shape
        # No key follows the query, so that all tiles are full.
        columns, counts, number = keep.nonzero()[:, 1].int(), keep.sum(1, dtype=torch.int32), torch.arange(groups + 1)
        begins, none = torch.zeros(2, groups + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=begins[1:])
        work = torch.zeros(groups, 5, dtype=torch.int32)
        work[:, 0], work[:, 2], work[:, 3], work[:, 4] = number[:-1], counts, -1, 1
        c = self.c
        c.n_rows, c.n_cols, c.n_groups = 1, cols, groups
        c.group_stride[0], c.group_stride[1] = c.heads, 1
        self._place(group=number.int(), full_row_ptr=begins, full_col=columns)
        self._place(part_row_ptr=none, part_col=none, part_tile=none)
        self._place(work=work, work_begin=number, item_begin=number)
        self.kept = len(columns)

    def _place(self, **tensors: Tensor) -> None:
        """Point fields at tensors, and keep these alive."""
        self.tensors += tensors.values()
        for name, x in tensors.items():
            setattr(self.c, name, x.data_ptr())

    def attend(self, key_mask: Tensor | None, scale: float, threads: int) -> Tensor:
        """Return the output ``[B, H, 1, Dv]``."""
        c, (query, key, value) = self.c, self.tensors[:3]
        out = query.new_empty(*query.shape[:3], value.shape[3])
        for name, x in (("q", query), ("k", key), ("v", value), ("out", out)):
            c.place(name, x)
        self._place(lse=query.new_empty(query.shape[:3], dtype=accumulator(query)))
        if key_mask is not None:
            bits = pack_keys(key_mask).contiguous()
            self._place(key_bits=bits)
            c.key_words = bits.shape[1]
        arithmetic = arithmetic_of(query.dtype)
        c.dtype, c.isa, c.threads, c.scale = arithmetic.code, arithmetic.isa.number, threads, scale
        c.phase, c.first_item, c.last_item = ForwardPhase.ATTEND, 0, c.n_groups
        library().run(library().handle.ringtile_forward, c)
        return out
