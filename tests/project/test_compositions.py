"""examples/train_fsdp.py, in processes: what ranks share by weights and by sequences trains as one process does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Outcome, counted_traffic, run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringtile import SparseLanguageModel, SparseTransformer, sparse_attention
from ringtile.distributed import Layout, ring_attend
from ringtile.patterns import GlobalTokens, Window

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_fsdp

RANKS, N_TOKENS, STEPS = 4, 520, 3
# One worker starts the processes that several tests read.
pytestmark = pytest.mark.xdist_group("compositions")

PATTERN = Window(150) | GlobalTokens(20)
LIMIT = 1e-12


class Case(NamedTuple):
    """Options of the example."""

    shard: str
    cp: int
    layout: Callable[[int, int], Layout] = Layout.contiguous
    checkpoints: str = ""
    backend: str = ""
    accumulate: int = 1
    clip: float = float("inf")

    @property
    def layers(self) -> int:
        """Compilers take seconds per layer."""
        return 1 if self.backend else 2

    @property
    def name(self) -> str:
        given = (self.checkpoints, self.backend and "compiled", self.accumulate > 1 and "accumulated")
        return " ".join([self.shard, f"cp {self.cp}", self.layout.__name__, *(str(x) for x in given if x)])


CASES = [
    Case("fsdp", 2),
    Case("hsdp", 2, Layout.zigzag, "selective", accumulate=2, clip=0.5),
    Case("ddp", 2, Layout.zigzag, "plain", accumulate=2, clip=0.5),
    # Rank 2 has no tokens. Compilers must not move or drop its part of a collective.
    Case("fsdp", 4, Layout.zigzag, "plain", "aot_eager"),
]


def new_model(
    n_layers: int = 2, attend: Callable[..., Any] = sparse_attention, dtype: torch.dtype = torch.float64
) -> SparseLanguageModel:
    """A model none of whose gradients is zero."""
    layers = SparseTransformer(
        n_layers, 32, 4, num_kv_heads=2, is_causal=True, pattern=PATTERN, attend=attend, dtype=torch.float64
    )
    model, draws = SparseLanguageModel(32, layers), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) * 0.2 + 0.1)
    return model.to(dtype)


def batches(accumulate: int) -> Iterator[list[Tensor]]:
    """The micro-batches of each step."""
    draws = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        yield [torch.randint(8, (2, N_TOKENS + 1), generator=draws) for _ in range(accumulate)]


def alone(model: nn.Module, rows: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """One process, with all rows at once."""
    every = torch.cat(rows)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(every[:, :-1]).flatten(0, 1), every[:, 1:].flatten())
    loss = loss / torch.log(torch.tensor(2.0, dtype=torch.float64))
    loss.backward()
    return loss.detach()


def trained(
    model: nn.Module, clip: float, accumulate: int, backward: Callable[..., Tensor]
) -> tuple[dict[str, Tensor], list[float]]:
    """The gradients of the first step before they are clipped, and the losses and norms of steps of SGD and AdamW."""
    first: dict[str, Tensor] = {}
    found = []
    for optimizer in (torch.optim.SGD(model.parameters(), 0.5), torch.optim.AdamW(model.parameters(), 1e-2)):
        for rows in batches(accumulate):
            optimizer.zero_grad()
            loss = backward(model, rows)
            first = first or {name.removeprefix("module."): full(x.grad) for name, x in model.named_parameters()}
            norm = full(nn.utils.clip_grad_norm_(model.parameters(), clip))
            assert clip > 1 or norm > clip
            optimizer.step()
            found += [float(loss), float(norm)]
    return first, found


@cache
def trained_alone(n_layers: int, clip: float, accumulate: int) -> tuple[dict[str, Tensor], list[float]]:
    """Rank 0 tells the others, which would compute the same."""
    told = [trained(new_model(n_layers), clip, accumulate, alone) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return told[0]


def full(x: Any) -> Tensor:
    """A copy of a whole tensor, whatever its shards."""
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach().clone()


def over_ranks(case: Case, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Layout]:
    layout = case.layout(N_TOKENS, case.cp)
    model = new_model(case.layers, ring_attend(mesh["cp"], layout), dtype)
    return train_fsdp.prepare(model, mesh, case.shard, case.checkpoints, case.backend), layout


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each parameter's gradient, over its largest entry."""
    assert found.keys() == expected.keys()
    return {k: float((found[k] - x).abs().max() / x.abs().max()) for k, x in expected.items()}


def trains_as_one_process(case: Case, mesh: DeviceMesh) -> None:
    model, layout = over_ranks(case, mesh)
    with counted_traffic() as local:
        gradients, losses = trained(
            model, case.clip, case.accumulate, lambda model, rows: train_fsdp.backward(model, rows, mesh, layout)
        )
    expected, alone_losses = trained_alone(case.layers, case.clip, case.accumulate)
    assert max(differences(gradients, expected).values()) < LIMIT, differences(gradients, expected)
    assert losses == pytest.approx(alone_losses, rel=LIMIT, abs=0)
    assert losses[-2] < 0.9 * losses[0]
    # Of a layer, forward and backward. Plain checkpoints let the keys travel again.
    exchanges = (3 if case.checkpoints == "plain" else 2) * case.layers * case.accumulate * 2 * STEPS
    assert local.traffic.calls.count("all_to_all_single") == exchanges


def autocast_is_as_exact_as_in_one_process(meshes: dict[int, DeviceMesh]) -> None:
    rows = next(batches(1))
    exact, one = new_model(), new_model(dtype=torch.float32)
    alone(exact, rows)
    alone(one, rows, torch.bfloat16)
    truth, sent = {name: x.grad for name, x in exact.named_parameters()}, []
    for dtype in (None, torch.bfloat16):
        model, layout = over_ranks(Case("fsdp", 2), meshes[2], torch.float32)
        with counted_traffic() as local:
            train_fsdp.backward(model, rows, meshes[2], layout, dtype)
        sent.append(local.traffic.sent)
    found = {name: full(x.grad) for name, x in model.named_parameters()}
    assert all(x.dtype == torch.float32 for x in found.values())
    # Keys, values and their gradients travel in the dtype of the attention.
    assert sent[0] == 2 * sent[1] > 0
    limits = differences({name: x.grad for name, x in one.named_parameters()}, truth)
    for name, error in differences(found, truth).items():
        assert error < 1.2 * limits[name], (name, error, limits[name])


MORE = (autocast_is_as_exact_as_in_one_process,)


def run_checks(rank: int, size: int, names: list[str]) -> None:
    meshes = {cp: init_device_mesh("cpu", (size // cp, cp), mesh_dim_names=("dp", "cp")) for cp in (2, 4)}
    checks: dict[str, Callable[[], None]] = {
        **{case.name: lambda case=case: trains_as_one_process(case, meshes[case.cp]) for case in CASES},
        **{check.__name__: lambda check=check: check(meshes) for check in MORE},
    }
    for name in names:
        checks[name]()
        print(f"passed: {name}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


NAMES = [*(case.name for case in CASES), *(check.__name__ for check in MORE)]


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Outcome:
    """The outcome of the checks of all chosen tests."""
    chosen = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    return run_processes(RANKS, run_checks, [name for name in NAMES if name in chosen], timeout=90)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_train_as_one_process(checked: Outcome, name: str) -> None:
    for text in checked.texts:
        assert f"passed: {name}\n" in text, text
