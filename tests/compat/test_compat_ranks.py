"""`dilated_attention_pytorch` over ranks: Example 3 of the guide under torchrun, and compressed gradients."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from oracle import relative_error
from processes import on_ranks, run_processes
from test_compat import TOO_SHORT, with_grads
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch import (
    BlockSparseRingAdvancedDistributedDilatedAttention,
    BlockSparseRingDilatedAttention,
    DistributedSparseConfig,
    DistributedSparsePattern,
    RingAttentionConfig,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    SparsePatternConfig,
    compress_gradients,
    create_block_sparse_multihead_attention,
)
from ringtile.distributed import Layout
from ringtile.patterns import hierarchical, longnet_union

ROOT = Path(__file__).parents[2]

BEFORE = """
import torch, torch.distributed as dist
from ringtile import sparse_attention
whole = torch.randn(3, 1, 4096, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
class Names(dict):
    # The block makes the group and the attention before it reads its inputs.
    def __missing__(self, name):
        if name not in ("q_local", "k_local", "v_local"):
            raise KeyError(name)
        part = whole["qkv".index(name[0])]
        return self["attention"].layout(4096).shard(part, dist.get_rank(), 1)
names = Names()
exec(compile(BLOCK, "block_10.py", "exec"), names)
q, k, v = (x.transpose(1, 2) for x in whole)
expected = sparse_attention(q, k, v, names["attention"].pattern).transpose(1, 2)
mine = names["attention"].layout(4096).shard(expected, dist.get_rank(), 1)
found = names["output"]
is_equal = bool((found - mine).abs().max() < 1e-12)
print("rank", dist.get_rank(), "of", dist.get_world_size(), tuple(found.shape), is_equal)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_example_3_of_the_guide_runs_under_torchrun(n_ranks: int, tmp_path: Path) -> None:
    block = (ROOT / "tests" / "guide" / "block_10.py").read_text(encoding="utf-8")
    assert block.count("backend='nccl'") == 1
    program = tmp_path / "example.py"
    program.write_text(f"BLOCK = {block.replace('nccl', 'gloo')!r}\n" + BEFORE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    paths = os.pathsep.join([str(ROOT / "compat"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([*command, str(program)], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    lines = [f"rank {rank} of {n_ranks} (1, {4096 // n_ranks}, 2, 8) True" for rank in range(n_ranks)]
    assert sorted(re.findall("rank .* (?:True|False)", done.stdout)) == lines


def test_the_pattern_joins_the_hierarchy_and_the_branches() -> None:
    config = DistributedSparseConfig(DistributedSparsePattern.HIERARCHICAL, 0.5, 0.2, 0.05, enable_load_balancing=True)
    attention = BlockSparseRingAdvancedDistributedDilatedAttention([2048, 8192], [1, 4], config)
    assert attention.pattern == hierarchical(2048, 8192, 0.5, 0.2, 0.05) | longnet_union([2048, 8192], [1, 4])
    plain = DistributedSparseConfig(local_sparsity=0.5, global_sparsity=0.2)
    # Load balancing chooses tokens, and never the pairs.
    assert BlockSparseRingAdvancedDistributedDilatedAttention([2048, 8192], [1, 4], plain).pattern == attention.pattern


def balanced(rank: int, size: int) -> None:
    for enabled in (False, True):
        # Causal alone is balanced by another layout than the contiguous one.
        densities = dict.fromkeys(("local_sparsity", "global_sparsity", "inter_node_sparsity"), 1.0)
        config = DistributedSparseConfig(**densities, enable_load_balancing=enabled)
        attention = BlockSparseRingAdvancedDistributedDilatedAttention([128], [1], config)
        layouts = Layout.contiguous(2048, size, unit=1), attention.layout(2048, is_causal=True)
        assert (layouts[0] == layouts[1]) == (not enabled)
        # Equal parts of a length that has no whole tiles.
        assert {attention.layout(2 * 333, is_causal=True).size(r) for r in range(size)} == {333}


def compressed(rank: int, size: int) -> None:
    """Train with and without, and print what the hook counted."""
    losses, target = {}, nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.2)
    held_out = torch.randn(2000, 64, generator=torch.Generator().manual_seed(9))
    for config in (
        None,
        DistributedSparseConfig(enable_gradient_compression=True),
        DistributedSparseConfig(enable_gradient_compression=True, compression_ratio=0.1),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
        shared = DistributedDataParallel(model)
        found = None if config is None else compress_gradients(shared, config)
        optimizer = torch.optim.SGD(shared.parameters(), 0.05, momentum=0.9)
        draws = torch.Generator().manual_seed(rank)
        for _ in range(200):
            x = torch.randn(64, 64, generator=draws)
            optimizer.zero_grad()
            (shared(x) - target(x).detach()).square().mean().backward()
            optimizer.step()
        name = "none" if found is None else found.kind
        losses[name] = float((model(held_out) - target(held_out)).detach().square().mean())
        print(f"{found}: loss {losses[name]:.5f}", file=sys.stderr, flush=True)
        if found is not None and found.rank is not None:
            assert found._state.use_error_feedback
            assert found._state.error_dict
            assert found._state.start_powerSGD_iter >= 2
            assert found.savings.before == 198 * sum(x.numel() for x in model.parameters())
            assert found.savings.ratio == pytest.approx(0.1, rel=0.2)
    assert losses["PowerSGD"] == pytest.approx(losses["none"], rel=0.02)
    assert losses["float16"] == pytest.approx(losses["none"], rel=0.02)
    start = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    assert losses["none"] < 0.5 * float((start(held_out) - target(held_out)).detach().square().mean())


def compressed_between_replicas(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (size, 1), mesh_dim_names=("replica", "shard"))
    config = DistributedSparseConfig(enable_gradient_compression=True)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    for sums in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        expected = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for other in range(size):
            rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(other))
            grads = torch.autograd.grad(model(rows).square().sum(), list(model.parameters()))
            for total, grad in zip(expected, grads, strict=True):
                total += grad if sums else grad / size
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh["shard"])
        compress_gradients(model, config, replicas=mesh.get_group("replica"), sums=sums)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            model(x).square().sum().backward()
        sent = sum(call.args[0].nbytes for call in all_reduce.call_args_list)
        assert sent == 2 * sum(wanted.numel() for wanted in expected)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            error = parameter.grad.full_tensor() - wanted
            # float16 has 11 bits. Without the hook, the replicas' gradients would differ.
            assert 0 < float(error.abs().max()) < 2**-10 * float(wanted.abs().max())


def measured(rank: int, size: int) -> None:
    """The dense attention that a ring is compared with is that over all ranks."""
    x = torch.randn(1, 512, 1, 8, generator=torch.Generator().manual_seed(0))
    attention = BlockSparseRingDilatedAttention(sparse_config=SparsePatternConfig(sparsity_ratio=1.0), ring_size=size)
    attention.performance_monitor.enable()
    out = attention(Layout.contiguous(512, size, unit=1).shard(x, rank, 1))
    stats = attention.get_performance_stats()
    assert stats["quality_score"] == pytest.approx(1)
    assert stats["avg_sparsity"] == 1
    assert out.shape == (1, 512 // size, 1, 8)


def run_checks(rank: int, size: int) -> None:
    measured(rank, size)
    balanced(rank, size)
    compressed_between_replicas(rank, size)
    compressed(rank, size)
    dist.destroy_process_group()


def test_ranks_balance_and_compress() -> None:
    outcome = run_processes(2, run_checks)
    assert outcome.exit_codes == [0, 0], outcome.texts
    assert re.search(r"of rank \d+ with error feedback, sends 0\.\d+ of the elements\): loss", outcome.texts[0])


def test_one_ratio_serves_all_levels_that_have_no_density() -> None:
    config = DistributedSparseConfig("hierarchical", sparsity_ratio=0.05, global_sparsity=0.1)
    assert config.pattern_type is DistributedSparsePattern.HIERARCHICAL
    made = BlockSparseRingAdvancedDistributedDilatedAttention([128, 256], [1, 2], config)
    assert made.pattern == hierarchical(128, 256, 0.05, 0.1, 0.05) | longnet_union([128, 256], [1, 2])
    assert dataclasses.replace(config, enable_load_balancing=True).sparsity_ratio == 0.05
    levels = {"local_sparsity": 0.4, "global_sparsity": 0.1, "inter_node_sparsity": 0.05}
    assert DistributedSparseConfig() == DistributedSparseConfig(**levels)
    with pytest.warns(UserWarning, match=r"sparsity_ratio=0\.25 changes nothing: local_sparsity, .* decide$") as said:
        assert DistributedSparseConfig(**levels, sparsity_ratio=0.25).local_sparsity == 0.4
    assert said[0].filename == __file__
    with pytest.raises(ValueError, match=r"sparsity_ratio: expected a density in \[0, 1\], got 2"):
        DistributedSparseConfig(sparsity_ratio=2)


def test_load_balancing_waits_for_its_threshold() -> None:
    """The last of two ranks has 3/4 of causal work in contiguous parts, 1.5 of the mean."""
    levels = dict.fromkeys(("local_sparsity", "global_sparsity", "inter_node_sparsity"), 1.0)

    def layout(threshold: float | None) -> Layout:
        config = DistributedSparseConfig(**levels, enable_load_balancing=True, load_balance_threshold=threshold)
        attention = BlockSparseRingAdvancedDistributedDilatedAttention([128], [1], config)
        return on_ranks(2, lambda rank: attention.layout(4096, is_causal=True))[0]

    contiguous = Layout.contiguous(4096, 2, unit=1)
    assert [layout(threshold) == contiguous for threshold in (None, 0.4, 0.6)] == [False, False, True]
    with pytest.warns(UserWarning, match=r"load_balance_threshold=0\.15 changes nothing: enable_load_balancing=False"):
        DistributedSparseConfig(load_balance_threshold=0.15)
    with pytest.raises(ValueError, match="load_balance_threshold: expected at least 0, got -1"):
        DistributedSparseConfig(enable_load_balancing=True, load_balance_threshold=-1)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compression_ratio: expected a number between 0 and 1, got 1\.0"):
        DistributedSparseConfig(enable_gradient_compression=True, compression_ratio=1.0)
    with pytest.warns(UserWarning, match=r"compression_ratio=0\.1 changes nothing: enable_gradient_compression=False"):
        DistributedSparseConfig(compression_ratio=0.1)
    with pytest.raises(ValueError, match=r"local_sparsity: expected a density in \[0, 1\], got 2"):
        DistributedSparseConfig(local_sparsity=2)
    with pytest.raises(ValueError, match="pattern_type: expected a DistributedSparsePattern, got 'ring'"):
        DistributedSparseConfig("ring")
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got Linear"):
        compress_gradients(nn.Linear(2, 2), DistributedSparseConfig(enable_gradient_compression=True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config: expected enable_gradient_compression=True"):
        compress_gradients(nn.Linear(2, 2), DistributedSparseConfig())  # type: ignore[arg-type]


def test_deepspeeds_group_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    group = object()
    groups = SimpleNamespace(_get_sequence_parallel_group=lambda: group)
    made = {
        enabled: BlockSparseRingAdvancedDistributedDilatedAttention([128], [1], enable_deepspeed_integration=enabled)
        for enabled in (False, True)
    }
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert made[True].group is None
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=SimpleNamespace(groups=groups)))
    assert made[True].group is group
    assert made[False].group is None


# A ring of all ranks.

RINGS: dict[str, dict[str, Any]] = {
    "window": {"sparse_config": SparsePatternConfig("local_window", local_window_size=300)},
    "density": {"sparse_config": SparsePatternConfig("global_local", 0.6, global_tokens=5)},
    "segments": {
        "sparse_config": SparsePatternConfig("dilated_sparse"),
        "segment_lengths": [256, 500],
        "dilation_rates": [1, 2],
    },
    "checkpointed": {
        "sparse_config": SparsePatternConfig("dilated_sparse", 0.5, dilation_rates=[1, 2]),
        "use_gradient_checkpointing": True,
    },
    "all pairs": {"sparse_config": SparsePatternConfig(sparsity_ratio=1.0), "attention_scale": 0.2},
}


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("name", RINGS)
@TOO_SHORT
def test_a_ring_is_one_process_forward_and_backward(name: str, n_ranks: int) -> None:
    x = torch.randn(4, 2, 999 // n_ranks * n_ranks, 2, 8, dtype=torch.float64)
    layout = Layout.contiguous(x.shape[2], n_ranks, unit=1)
    mask = torch.rand(2, x.shape[2]) < 0.7
    alone = BlockSparseRingDilatedAttention(**RINGS[name])

    def on_rank(rank: int) -> list[list[Tensor]]:
        attention = BlockSparseRingDilatedAttention(**copy.deepcopy(RINGS[name]), ring_size=n_ranks)
        *mine, grad_out = layout.shard(x, rank)
        options = ({"is_causal": True}, {"key_mask": layout.shard(mask, rank, 1)})
        found = [with_grads(partial(attention, **how), tuple(mine), grad_out) for how in options]
        assert attention.get_memory_info()["memory_reduction"] == reductions[1]
        return found

    reductions, expected = [], []
    for how in ({"is_causal": True}, {"key_mask": mask}):
        expected.append(with_grads(partial(alone, **how), tuple(x[:3]), x[3]))
        reductions.append(alone.get_memory_info()["memory_reduction"])
    assert name == "all pairs" or min(reductions) > 0.1
    found = on_ranks(n_ranks, on_rank)
    for number, whole in enumerate(expected):
        for ours, theirs in zip(zip(*(each[number] for each in found), strict=True), whole, strict=True):
            assert relative_error(layout.unshard(ours, 1), theirs) < 1e-12


def _longnet(**arguments: Any) -> RingDilatedAttentionV2:
    return RingDilatedAttentionV2([128, 300], [1, 2], **arguments)


def _production(**arguments: Any) -> RingDilatedAttentionProduction:
    return RingDilatedAttentionProduction(RingAttentionConfig([128, 300], [1, 2], **arguments))


def _multihead(**arguments: Any) -> Any:
    torch.manual_seed(0)
    return create_block_sparse_multihead_attention(32, 4, 0.5, "local_window", dtype=torch.float64, **arguments)


@TOO_SHORT
@pytest.mark.parametrize("make", [_longnet, _production, _multihead])
def test_a_ring_serves_every_class_with_a_ring_size(make: Callable[..., Any]) -> None:
    layout = Layout.contiguous(600, 2, unit=1)
    x = torch.randn(1, 600, 32, dtype=torch.float64)
    x = x if make is _multihead else x.unflatten(-1, (4, 8))

    def output(module: Any, x: Tensor) -> Tensor:
        out = module(x, is_causal=True)
        return (out[0] if make is _multihead else out).detach()

    alone, modules = make(), []
    # One module for both threads, which share the generator that draws its weights.
    on_ranks(2, lambda rank: modules.append(make(ring_size=2)) if rank == 0 else None)
    found = on_ranks(2, lambda rank: output(modules[0], layout.shard(x, rank, 1)))
    assert relative_error(layout.unshard(found, 1), output(alone, x)) < 1e-12


def test_a_rank_of_a_ring_saves_its_part_and_the_keys_that_its_rows_need() -> None:
    def saved(attention: BlockSparseRingDilatedAttention, x: Tensor) -> int:
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda y: found.append(y) or y, lambda y: y):
            attention(x.requires_grad_(), is_causal=True)
        return sum(y.numel() for y in found)

    def on_rank(rank: int) -> int:
        attention = BlockSparseRingDilatedAttention(sparse_config=config, ring_size=4)
        return saved(attention, torch.randn(1, 1024, 2, 8))

    config = SparsePatternConfig("local_window", local_window_size=256)
    whole = saved(BlockSparseRingDilatedAttention(sparse_config=config), torch.randn(1, 4096, 2, 8))
    # Keys and values of the tile of 128 tokens before its own, of two heads.
    beside = 2 * 128 * 2 * 8
    assert whole == 4 * 1024 * 2 * (4 * 8 + 1)
    assert on_ranks(4, on_rank) == [whole // 4] + [whole // 4 + beside] * 3


def test_a_ring_drops_weights_in_training() -> None:
    value = torch.ones(1, 512, 1, 8)
    layout = Layout.contiguous(512, 2, unit=1)

    def on_rank(rank: int) -> list[Tensor]:
        config = SparsePatternConfig(sparsity_ratio=1.0)
        attention = BlockSparseRingDilatedAttention(sparse_config=config, ring_size=2, dropout=0.5)
        x = torch.randn(1, 256, 1, 8)
        return [each(x, x, layout.shard(value, rank, 1)) for each in (attention, copy.deepcopy(attention).eval())]

    for trained, evaluated in on_ranks(2, on_rank):
        assert trained.std() > 0.05
        assert trained.mean() == pytest.approx(1, abs=0.1)
        assert evaluated.allclose(torch.ones(()))


@TOO_SHORT
def test_a_ring_refuses_what_needs_the_tokens_of_all_ranks() -> None:
    def on_rank(rank: int) -> None:
        x = torch.randn(1, 100, 32)
        module = create_block_sparse_multihead_attention(32, 4, 0.8, ring_size=2)
        distributed = BlockSparseRingAdvancedDistributedDilatedAttention([128], [1])
        heads, adaptive = x.unflatten(2, (4, 8)), "ring_size: expected 1, because tiles that follow the contents"
        for call, words in (
            (lambda: module(x, need_weights=True), "need_weights: expected False with ring_size=2"),
            (lambda: module.attention(heads, return_attention_weights=True), "return_attention_weights: .* 2 ranks"),
            (lambda: distributed(heads, return_attention_weights=True), "return_attention_weights: .* 2 ranks"),
            (lambda: module(x, attn_mask=torch.rand(100, 100) < 0.5), "pattern: expected none with ring_size=2"),
            (module.enable_adaptive_sparsity, adaptive),
            (lambda: BlockSparseRingDilatedAttention(use_adaptive_sparsity=True, ring_size=2), adaptive),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        module.sparse_config = SparsePatternConfig("adaptive")
        with pytest.raises(ValueError, match=adaptive):
            module(x)

    on_ranks(2, on_rank)
