"""Ring attention between real gloo processes: compilers, checkpoints, modules, derivatives, failures."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from oracle import make_inputs, relative_error
from ranks import counted_traffic
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringtile.distributed import Layout, ring_attend, ring_attention, ring_dilated_attention
from ringtile.distributed.faults import PlanMismatch, RankLost, handshakes
from ringtile.functional import dilated_attention, sparse_attention
from ringtile.modules import SparseTransformer
from ringtile.patterns import Causal, GlobalTokens, Window

N_TOKENS = 700
PATTERN = Causal() & (Window(150) | GlobalTokens(20))


def gradients(function: Callable[..., Tensor], problem: Any, layout: Layout | None = None) -> list[Tensor]:
    """The output and gradients of a rank's tokens, or of all."""
    parts = [x if layout is None else layout.shard(x, dist.get_rank()) for x in problem]
    leaves = [x.clone().requires_grad_() for x in parts[:3]]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, parts[3])]


def check_equal(found: list[Tensor], whole: list[Tensor], layout: Layout) -> None:
    for x, expected in zip(found, whole, strict=True):
        assert relative_error(x, layout.shard(expected, dist.get_rank())) < 1e-13


def check_checkpoints(attend: Callable[..., Tensor], problem: Any, whole: list[Tensor], layout: Layout) -> None:
    """The documented policy repeats no exchange."""
    saved = torch.ops.ringtile.cast_start.default, torch.ops.ringtile.group_cast.default

    def policy(ctx: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    for options, calls in (({}, 3), ({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 2)):
        with counted_traffic() as local:
            found = gradients(lambda *x, o=options: checkpoint(attend, *x, use_reentrant=False, **o), problem, layout)
            assert local.traffic.calls == ["all_to_all_single"] * calls
        check_equal(found, whole, layout)


def check_second_derivatives(
    attend: Callable[..., Tensor], alone: Callable[..., Tensor], problem: Any, layout: Layout
) -> None:
    shards = [layout.shard(x, dist.get_rank()).clone().requires_grad_() for x in problem]
    seconds = []
    for tensors, function in ((shards, attend), ([x.clone().requires_grad_() for x in problem], alone)):
        first = torch.autograd.grad(function(*tensors[:3]), tensors[:3], tensors[3], create_graph=True)
        seconds.append(list(torch.autograd.grad(sum(x.square().sum() for x in first), tensors[:3])))
    check_equal(*seconds, layout)


def longnet(size: int) -> None:
    """LongNet: compiled, with checkpoints, differentiated twice and in a module, against one process."""
    problem, branches = make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=2), ([64, 512], [1, 4])
    # No other rank has tokens of the last one's segments: it receives none, and takes part all the same.
    uneven = Layout(N_TOKENS, (((0, 200),), ((200, 512),), ((512, N_TOKENS),)))
    for layout, is_causal in ((uneven, False), (Layout.zigzag(N_TOKENS, size), True)):
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True, "dropout_p": 0.2, "seed": 3}
        mask = torch.rand(1, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.8
        mine = layout.shard(mask, dist.get_rank(), 1)

        def alone(*x: Tensor, o: Any = options, m: Tensor | None = mask) -> Tensor:
            return dilated_attention(*x, *branches, key_mask=m, **o)

        def attend(*x: Tensor, o: Any = options, m: Tensor | None = mine, at: Layout = layout) -> Tensor:
            return ring_dilated_attention(*x, *branches, key_mask=m, layout=at, **o)

        whole = gradients(alone, problem)
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(attend, fullgraph=True, backend=counter)
        for _ in range(2):
            check_equal(gradients(compiled, problem, layout), whole, layout)
        assert counter.frame_count == 1
        check_second_derivatives(attend, alone, problem, layout)
        # A key mask travels by a collective of its own.
        check_checkpoints(partial(attend, m=None), problem, gradients(partial(alone, m=None), problem), layout)
    how = {"segment_lengths": branches[0], "dilation_rates": branches[1]}
    torch.manual_seed(0)
    models = [
        SparseTransformer(2, 32, 4, is_causal=True, attend=partial(function, **how, **more)).double()
        for function, more in ((dilated_attention, {}), (ring_dilated_attention, {"layout": layout}))
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(1, N_TOKENS, 32, dtype=torch.float64)
    out = models[1](layout.shard(x, dist.get_rank(), 1), positions=layout.positions(dist.get_rank()))
    assert (out - layout.shard(models[0](x), dist.get_rank(), 1)).abs().max() < 1e-12


def results(size: int) -> None:
    """Every transport, compiled and not, with checkpoints, against one process."""
    problem = make_inputs(1, 2, N_TOKENS, head_dim=8)
    layout = Layout.zigzag(N_TOKENS, size)
    for pattern, transport in ((PATTERN, "exchange"), (PATTERN, "gather"), (Causal(), "ring")):
        whole = gradients(lambda *x, p=pattern: sparse_attention(*x, p, start=0), problem)

        def attend(q: Tensor, k: Tensor, v: Tensor, p: Any = pattern, t: Any = transport) -> Tensor:
            return ring_attention(q, k, v, p, layout=layout, transport=t)

        before = handshakes()
        for _ in range(2):
            check_equal(gradients(attend, problem, layout), whole, layout)
        assert handshakes() - before == (size > 1)

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    found = gradients(lambda *x: ring_attention(*x, Causal(), layout=layout, group=mesh["cp"]), problem, layout)
    check_equal(found, whole, layout)

    window = Causal() & Window(150)
    contiguous = Layout.contiguous(N_TOKENS, size)
    whole = gradients(lambda *x: sparse_attention(*x, window, start=0), problem)

    def by_window(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return ring_attention(q, k, v, window, layout=contiguous, key_mask=key_mask)

    # No call of this plan before: tracing makes its exchange.
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(by_window, fullgraph=True, backend=counter)
    for _ in range(2):
        check_equal(gradients(compiled, problem, contiguous), whole, contiguous)
    assert counter.frame_count == 1
    # A rank that reads no other rank's keys takes part in the collective of key masks, too.
    mask = torch.rand(1, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.8
    masked = partial(by_window, key_mask=contiguous.shard(mask, dist.get_rank(), 1))
    with counted_traffic() as local:
        found = gradients(torch.compile(masked, fullgraph=True, backend="aot_eager"), problem, contiguous)
        assert local.traffic.calls == ["all_to_all_single"] * 3
    whole_masked = gradients(partial(sparse_attention, pattern=window, start=0, key_mask=mask), problem)
    check_equal(found, whole_masked, contiguous)

    check_equal(gradients(by_window, problem, contiguous), whole, contiguous)
    check_checkpoints(by_window, problem, whole, contiguous)
    # The derivative of the exchange is an exchange, and so is the derivative of that.
    check_second_derivatives(by_window, lambda *x: sparse_attention(*x, window), problem, contiguous)

    torch.manual_seed(0)
    model = SparseTransformer(2, 32, 4, pattern=window, attend=ring_attend(None, contiguous)).double()
    alone = SparseTransformer(2, 32, 4, pattern=window).double()
    alone.load_state_dict(model.state_dict())
    for parameters in zip(model.parameters(), alone.parameters(), strict=True):
        with torch.no_grad():
            parameters[0].copy_(torch.randn(parameters[0].shape) * 0.1)
            parameters[1].copy_(parameters[0])
    x = torch.randn(1, N_TOKENS, 32, dtype=torch.float64)
    mine = contiguous.shard(x, dist.get_rank(), 1)
    out = model(mine, positions=contiguous.positions(dist.get_rank()))
    expected = alone(x)
    assert (out - contiguous.shard(expected, dist.get_rank(), 1)).abs().max() < 1e-12
    out.sum().backward()
    expected.sum().backward()
    for parameters in zip(model.parameters(), alone.parameters(), strict=True):
        total = parameters[0].grad.clone()
        dist.all_reduce(total)
        assert (total - parameters[1].grad).abs().max() < 1e-10 * (1 + parameters[1].grad.abs().max())


def differs(size: int, what: str) -> None:
    """One rank calls with other facts: no data moves, and all raise the same line."""
    rank = dist.get_rank()
    odd = rank == 1
    n_tokens = 600 if odd and what == "tokens" else N_TOKENS
    layout = (Layout.zigzag if odd and what == "layout" else Layout.contiguous)(n_tokens, size)
    pattern = Causal() & Window(99 if odd and what == "pattern" else 150)
    x = torch.randn(2 if odd and what == "batch" else 1, 4 if odd and what == "heads" else 2, layout.size(rank), 8)
    x = x.double() if odd and what == "dtype" else x
    with (
        counted_traffic() as local,
        pytest.raises(PlanMismatch, match=rf"rank 1 has .*{what}=.*, the others") as raised,
    ):
        ring_attention(x, x, x, pattern, layout=layout)
    assert not hasattr(local, "traffic")
    lines: list[Any] = [None] * size
    dist.all_gather_object(lines, str(raised.value))
    assert len(set(lines)) == 1


def dies(size: int, how: str) -> None:
    """A rank is killed, or fails, between two layers: the others raise a line that names it."""
    layout = Layout.contiguous(N_TOKENS, size)
    x = torch.randn(1, 2, layout.size(dist.get_rank()), 8)
    ring_attention(x, x, x, PATTERN, layout=layout)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise KeyError("a bug of the user's")
        x[0, 1, 130, 3] = torch.nan
    with pytest.raises(RankLost, match="rank 1") as raised:
        ring_attention(x, x, x, PATTERN, layout=layout, check_finite="layer 7" if how == "nan" else False)
    if how == "nan":
        assert "NaN or infinity at rank 1 of layer 7, batch element 0, head 1" in str(raised.value)
    sys.exit(3)


def enter(function: Callable[..., None], arguments: tuple[Any, ...], rank: int, size: int, folder: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sys.stderr = Path(folder, f"errors of {rank}").open("w")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=20),
    )
    function(size, *arguments)
    dist.destroy_process_group()


def run_processes(size: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run a function in a process per rank. Return their exit codes."""
    context = multiprocessing.get_context("forkserver")
    # Processes forked from one that has imported torch start in milliseconds.
    context.set_forkserver_preload(["pytest", "torch._dynamo.testing", "ringtile.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=enter, args=(function, arguments, rank, size, folder)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(240)
            codes = [process.exitcode for process in processes]
            if codes != [0] * size:
                print(*(path.read_text() for path in Path(folder).glob("errors*")), sep="\n")
            return codes
        finally:
            for process in processes:
                process.kill()


def test_processes_compute_what_one_does() -> None:
    assert run_processes(2, results) == [0, 0]


def test_processes_compute_the_longnet_of_one() -> None:
    assert run_processes(3, longnet) == [0, 0, 0]


@pytest.mark.parametrize("what", ["tokens", "batch", "heads", "dtype", "pattern", "layout"])
def test_ranks_that_differ_are_told_before_data_moves(what: str) -> None:
    assert run_processes(3, differs, what) == [0, 0, 0]


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("raises", 1), ("nan", 1)])
def test_a_rank_that_fails_is_named(how: str, code: int) -> None:
    assert run_processes(3, dies, how) == [3, code, 3]
