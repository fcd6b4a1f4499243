"""Ring attention between real gloo processes: compilers, checkpoints, modules, derivatives, failures."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from oracle import make_inputs, relative_error
from processes import Outcome, counted_traffic, run_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringtile.distributed import (
    Layout,
    ring_attention,
    ring_dilated_attention,
    roll,
    stages,
)
from ringtile.distributed.failures.faults import PlanMismatch, RankLost, handshakes
from ringtile.functional import dilated_attention, sparse_attention
from ringtile.modules import SparseTransformer
from ringtile.patterns import Causal, GlobalTokens, Window

# One worker runs the checks of all tests at once.
pytestmark = pytest.mark.xdist_group("ring processes")

N_TOKENS = 700
WINDOW = Causal() & Window(150)
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


def check_checkpoints(
    attend: Callable[..., Tensor],
    problem: Any,
    whole: list[Tensor],
    layout: Layout,
    forward: int = 1,
    backward: int = 1,
) -> None:
    """The documented policy repeats none of the collectives of the forward pass."""
    operators = torch.ops.ringtile
    names = ("cast_start", "cast_bits", "to_heads", "to_tokens")
    saved = [getattr(operators, name).default for name in names]

    def policy(ctx: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    for options, calls in (({}, 2 * forward + backward), (selective, forward + backward)):
        with counted_traffic() as local:
            found = gradients(lambda *x, o=options: checkpoint(attend, *x, use_reentrant=False, **o), problem, layout)
            assert local.traffic.calls == ["all_to_all_single"] * calls
        check_equal(found, whole, layout)


def check_compiled(
    attend: Callable[..., Tensor], problem: Any, whole: list[Tensor], layout: Layout, backend: str = "aot_eager"
) -> None:
    """One graph of the compiler has the same gradients, twice."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = torch.compile(attend, fullgraph=True, backend=counter)
    for _ in range(2):
        check_equal(gradients(function, problem, layout), whole, layout)
    assert counter.frame_count == 1


def check_second_derivatives(
    attend: Callable[..., Tensor], alone: Callable[..., Tensor], problem: Any, layout: Layout
) -> None:
    shards = [layout.shard(x, dist.get_rank()).clone().requires_grad_() for x in problem]
    seconds = []
    for tensors, function in ((shards, attend), ([x.clone().requires_grad_() for x in problem], alone)):
        first = torch.autograd.grad(function(*tensors[:3]), tensors[:3], tensors[3], create_graph=True)
        seconds.append(list(torch.autograd.grad(sum(x.square().sum() for x in first), tensors[:3])))
    check_equal(*seconds, layout)


def longnet(rank: int, size: int) -> None:
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
        if layout is uneven:
            check_compiled(attend, problem, whole, layout)
        check_second_derivatives(attend, alone, problem, layout)
        # A key mask travels by a collective of its own.
        check_checkpoints(attend, problem, whole, layout, 2)
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


def window_of(size: int) -> tuple[Any, Layout, Callable[..., Tensor]]:
    """A problem, a contiguous layout, and the function of a rank's tokens by a window."""
    contiguous = Layout.contiguous(N_TOKENS, size)

    def by_window(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return ring_attention(q, k, v, WINDOW, layout=contiguous, key_mask=key_mask)

    return make_inputs(1, 2, N_TOKENS, head_dim=8), contiguous, by_window


def every_transport(size: int) -> None:
    """Every transport is one process, and compares its facts once."""
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


def bits(size: int) -> None:
    """Threads, overlap and repetition change no bit."""
    problem = make_inputs(1, 4, N_TOKENS, head_dim=8, kv_heads=2, dtype=torch.float32)
    layout = Layout.zigzag(N_TOKENS, size)
    for pattern, transport in ((PATTERN, "exchange"), (PATTERN, "gather"), (Causal(), "ring")):
        found = []
        for n_threads, overlap in itertools.product((1, 2), (True, False)):
            torch.set_num_threads(n_threads)
            how: dict[str, Any] = {"transport": transport, "overlap": overlap, "enable_gqa": True}
            for _ in range(2):
                found.append(
                    gradients(lambda *x, p=pattern, h=how: ring_attention(*x, p, layout=layout, **h), problem, layout)
                )
        torch.set_num_threads(1)
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True)), transport


def compiled(size: int, backend: str = "aot_eager") -> None:
    """One graph of the compiler, with the same gradients."""
    problem, contiguous, by_window = window_of(size)
    whole = gradients(lambda *x: sparse_attention(*x, WINDOW, start=0), problem)
    # No call of this plan before: tracing makes its exchange.
    check_compiled(by_window, problem, whole, contiguous, backend)
    # A rank that reads no other rank's keys takes part in the collective of key masks, too.
    mask = torch.rand(1, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.8
    own_mask = contiguous.shard(mask, dist.get_rank(), 1)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Any:
        # Dynamo makes the pattern.
        return ring_attention(q, k, v, Causal() & Window(150), layout=contiguous, key_mask=own_mask)

    with counted_traffic() as local:
        found = gradients(torch.compile(masked, fullgraph=True, backend="aot_eager"), problem, contiguous)
        assert local.traffic.calls == ["all_to_all_single"] * 3
    whole_masked = gradients(partial(sparse_attention, pattern=WINDOW, start=0, key_mask=mask), problem)
    check_equal(found, whole_masked, contiguous)


def inductor(size: int) -> None:
    compiled(size, "inductor")


def uncompiled(size: int) -> None:
    """A window alone, with checkpoints, and differentiated twice."""
    problem, contiguous, by_window = window_of(size)
    whole = gradients(lambda *x: sparse_attention(*x, WINDOW, start=0), problem)
    check_equal(gradients(by_window, problem, contiguous), whole, contiguous)
    check_checkpoints(by_window, problem, whole, contiguous)
    # The derivative of the exchange is an exchange, and so is the derivative of that.
    check_second_derivatives(by_window, lambda *x: sparse_attention(*x, WINDOW), problem, contiguous)


WAYS = ("exchange", "gather", "ring", "ulysses", "hierarchy", "longnet", "roll")
LATER = {
    **{f"tokens by {way}": "tokens=512" for way in WAYS},
    "new tokens": "tokens=640",
    "pattern": r"pattern='causal & window\(99\)'",
    "dtype": "dtype='torch.float64'",
    **{f"scale by {way}": r"scale=0\.3" for way in ("exchange", "ring", "ulysses", "longnet")},
    "transport": "transport='gather'",
    "no backward": "data='keys and values, forward'",
    "failed": "exchanges=",
}


def disagrees_later(rank: int, size: int) -> None:
    """One rank leaves the others after they have compared all of these calls: all raise the same line, and go on."""
    mesh = init_device_mesh("cpu", (2, 2))

    def attend(
        tokens: int = 1024,
        dtype: torch.dtype = torch.float32,
        window: int = 150,
        way: str = "exchange",
        scale: float | None = None,
    ) -> Tensor:
        layout = Layout.contiguous(tokens, size, unit=1)
        x = torch.ones(1, 4, layout.size(rank), 8, dtype=dtype, requires_grad=True)
        if way == "longnet":
            return ring_dilated_attention(x, x, x, [512], [1], layout=layout, scale=scale)
        if way == "roll":
            return roll(x, -1, layout, dim=2)
        pattern = Causal() if way == "ring" else Causal() & Window(window)
        group = mesh if way == "hierarchy" else None
        return ring_attention(x, x, x, pattern, layout=layout, group=group, transport=way, scale=scale)

    def differs_at_rank_1(what: str, mine: dict[str, Any], others: dict[str, Any]) -> None:
        with pytest.raises(PlanMismatch) as raised:
            attend(**(mine if rank == 1 else others)).sum().backward()
        print(f"{what}: {raised.value}", file=sys.stderr, flush=True)
        # The ranks are together again.
        assert (attend() - 1).abs().max() < 1e-6

    for way in WAYS:
        for tokens in (512, 1024):
            attend(tokens, way=way)
    scales = [{"scale": 0.3, "way": way} for way in ("exchange", "ring", "ulysses", "longnet")]
    for how in ({"dtype": torch.float64}, {"window": 99}, *scales):
        attend(**how)
    before = handshakes()
    for way in WAYS:
        differs_at_rank_1(f"tokens by {way}", {"tokens": 512, "way": way}, {"way": way})
    differs_at_rank_1("new tokens", {"tokens": 640}, {})
    differs_at_rank_1("pattern", {"window": 99}, {})
    differs_at_rank_1("dtype", {"dtype": torch.float64}, {})
    for how in scales:
        differs_at_rank_1(f"scale by {how['way']}", how, {**how, "scale": 0.4})
    differs_at_rank_1("transport", {"way": "gather"}, {})
    out = attend()
    with pytest.raises(PlanMismatch) as raised:
        attend() if rank == 1 else out.sum().backward()
    print(f"no backward: {raised.value}", file=sys.stderr, flush=True)
    # As many as there are mismatches, and no more.
    assert handshakes() - before <= 3 * len(LATER)
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages.Stage, "pack", raise_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                attend()
    for _ in range(2):
        # For good: nobody knows which of its own data a rank has left out.
        with pytest.raises(PlanMismatch, match=r"^a rank is a step ahead: rank 1 has ") as raised:
            attend()
    print(f"failed: {raised.value}", file=sys.stderr, flush=True)


def raise_out_of_memory(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def dies(rank: int, size: int, how: str) -> None:
    """A rank is killed, or fails, between two layers: the others raise a line that names it."""
    layout = Layout.contiguous(N_TOKENS, size)
    x = torch.randn(1, 2, layout.size(rank), 8)
    ring_attention(x, x, x, PATTERN, layout=layout)
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        x[0, 1, 130, 3] = torch.nan
    with pytest.raises(RankLost, match="rank 1") as raised:
        ring_attention(x, x, x, PATTERN, layout=layout, check_finite="layer 7" if how == "nan" else False)
    if how == "nan":
        assert "NaN or infinity at rank 1 of layer 7, batch element 0, head 1" in str(raised.value)
    sys.exit(3)


CHECKS = (compiled, uncompiled, every_transport, bits, inductor)


def run_checks(rank: int, size: int, names: list[str]) -> None:
    """Run some checks one after another, and print the name of each that passed."""
    for check in CHECKS:
        if check.__name__ in names:
            torch.manual_seed(0)
            check(size)
            print(f"passed: {check.__name__}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Outcome:
    """The outcome of the checks of all chosen tests."""
    chosen = [item.callspec.params.get("check") for item in request.session.items if hasattr(item, "callspec")]
    # A rank compiles while the other waits, and machines can be busy.
    return run_processes(2, run_checks, [check.__name__ for check in CHECKS if check in chosen], timeout=90.0)


@pytest.mark.parametrize(
    "check", [*CHECKS[:-1], pytest.param(inductor, marks=pytest.mark.slow)], ids=lambda check: check.__name__
)
def test_processes_compute_what_one_does(checked: Outcome, check: Callable[[int], None]) -> None:
    for text in checked.texts:
        assert f"passed: {check.__name__}\n" in text, text


def test_processes_compute_the_longnet_of_one() -> None:
    outcome = run_processes(3, longnet, timeout=90.0)
    assert outcome.exit_codes == [0, 0, 0], outcome.texts


@pytest.fixture(scope="module")
def disagreeing() -> Outcome:
    return run_processes(4, disagrees_later, timeout=60.0)


@pytest.mark.parametrize("what", LATER)
def test_ranks_that_disagree_later_are_told_before_data_moves(disagreeing: Outcome, what: str) -> None:
    lines = {tuple(re.findall(rf"^{what}: (.*)$", text, re.M)) for text in disagreeing.texts}
    assert len(lines) == 1, disagreeing.texts
    ((line,),) = lines
    assert re.search(rf"rank 1 has {LATER[what]}.*, the others ", line), line
    assert disagreeing.exit_codes == [0] * 4, disagreeing.texts


@pytest.mark.parametrize(
    ("how", "code"),
    [("killed", -signal.SIGKILL), ("nan", 1)],
)
def test_a_rank_that_fails_is_named(how: str, code: int) -> None:
    outcome = run_processes(3, dies, how)
    assert outcome.exit_codes == [3, code, 3], outcome.texts
