"""DeepSpeed's sequence-parallel group with ring attention, under ZeRO."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor, nn

from ringtile.distributed import Layout, ring_attend
from ringtile.modules import SparseLanguageModel, SparseTransformer
from ringtile.patterns import Causal, Window

N = 300


def model_of(**options: Any) -> SparseLanguageModel:
    torch.manual_seed(0)
    rules = [Causal() & Window(40), Causal()]
    model = SparseLanguageModel(50, SparseTransformer(2, 32, 4, is_causal=True, pattern=rules, **options))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1)
    return model


def loss_of(model: Any, tokens: Tensor, labels: Tensor, n_labels: int, **positions: Tensor) -> Tensor:
    logits = model(tokens, **positions)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / n_labels


def _train(rank: int, n_ranks: int, stage: int) -> None:
    # As torchrun sets them.
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(n_ranks), LOCAL_WORLD_SIZE=str(n_ranks))
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    torch.manual_seed(1)
    rows = torch.randint(50, (2, N + 1))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    whole = model_of()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(2):
        loss_of(whole, tokens, labels, labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    parallel_state_sp.initialize_sequence_parallel(2)
    group, layout = parallel_state_sp.get_sequence_parallel_group(), Layout.zigzag(N, 2)
    model = model_of(attend=ring_attend(group, layout))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
        mpu=parallel_state_sp,
    )
    place, row = dist.get_rank(group), slice(rank // 2, rank // 2 + 1)
    mine_tokens, mine_labels = (layout.shard(x[row], place, dim=1) for x in (tokens, labels))
    for _ in range(2):
        # DeepSpeed divides the sum over all ranks by the number of rows that train in parallel.
        loss = loss_of(engine, mine_tokens, mine_labels, labels.numel(), positions=layout.positions(place))
        engine.backward(loss * (n_ranks // 2))
        engine.step()
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert float((found - wanted).detach().abs().max()) < 2e-6 * float(wanted.detach().abs().max())


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_trains_a_shared_sequence_as_one_process(stage: int) -> None:
    outcome = run_processes(4, _train, stage, limit=120)
    assert outcome.exit_codes == [0] * 4, "\n".join(outcome.texts)
