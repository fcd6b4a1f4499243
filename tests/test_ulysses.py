"""Meshes of ranks with two dimensions: their groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringtile.distributed import Layout, ring_attention
from ringtile.distributed.attention import group_of, place_of, real_group
from ringtile.distributed.process_groups import axes_of


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 2)])
def test_a_mesh_counts_its_ranks_row_by_row(shape: tuple[int, ...]) -> None:
    def run(rank: int) -> list[list[int]]:
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "rows", "columns")[-len(shape) :])
        # Slices are made anew, and have one group.
        axes = [axes_of(whole["rows", "columns"]) for _ in range(2)]
        assert axes[0] == axes[1]
        mesh = whole["rows", "columns"]
        assert group_of(mesh, "ulysses") is mesh
        assert place_of(mesh) == (axes[0].every.rank(), axes[0].every.size())
        assert real_group(mesh) is axes[0].every
        assert (axes[0].every is dist.group.WORLD) == (len(shape) == 2)
        return [dist.get_process_group_ranks(group) for group in axes[0]]

    n_ranks, (rows, columns) = torch.Size(shape).numel(), shape[-2:]
    for rank, (every, outer, inner) in enumerate(on_ranks(n_ranks, run)):
        row, column = divmod(rank % (rows * columns), columns)
        first = rank - rank % (rows * columns)
        assert every == list(range(first, first + rows * columns))
        assert outer == every[column::columns]
        assert inner == every[row * columns :][:columns]


def test_other_meshes_are_refused() -> None:
    def run(rank: int) -> None:
        x, layout = torch.zeros(1, 2, 64, 8), Layout.contiguous(256, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        with pytest.raises(ValueError, match=r"with two for the transports \('ulysses', 'hierarchy'\)"):
            ring_attention(x, x, x, layout=layout, group=mesh, transport="exchange")
        turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
        with pytest.raises(ValueError, match="expected a mesh whose ranks ascend row by row"):
            axes_of(turned)

    on_ranks(4, run)
