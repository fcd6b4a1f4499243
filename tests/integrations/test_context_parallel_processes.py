"""Shared rows of transformers models in processes: FSDP2, checkpoints, Trainer, Accelerate and Lightning."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import refused
from processes import on_ranks, run_processes
from test_context_parallel import Step, batch_of, error_of, expected, grads_of, in_float64, new_model
from tiny import hf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ringtile.integrations.transformers as integration
from ringtile.integrations.transformers import context_parallel


def sum_over(x: Tensor, group: Any = None) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def step_in_another_thread(rank: int, n_ranks: int) -> None:
    """Activation checkpoints that are recomputed in a thread which knows nothing of the forward pass."""
    with in_float64():
        model = new_model("Mistral", torch.float64)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        cp = context_parallel(model)
        out = model(**cp.shard_batch(batch_of("left")))
        thread = threading.Thread(target=lambda: out.loss.backward())
        thread.start()
        thread.join()
        grads = {name: sum_over(x) for name, x in grads_of(model).items()}
        found = Step(cp.unshard(out.logits), cp.loss(out.loss), grads)
        if rank == 0:
            assert max(error_of(found, expected("Mistral", torch.float64, "left"), "left")) < 1e-11


def step_by_fsdp(rank: int, n_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rows = {name: x[mesh["dp"].get_local_rank()][None] for name, x in batch_of("packed").items()}
    with in_float64():
        model = new_model("Gemma3", torch.float64)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        cp = context_parallel(model, mesh["cp"])
        every = mesh["dp", "cp"]._flatten()
        for layer in model.model.layers:
            fully_shard(layer, mesh=every)
        fully_shard(model, mesh=every)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
        batch = cp.shard_batch(rows)
        # All micro-batches and all ranks divide by one number of labels.
        batch["num_items_in_batch"] = sum_over(batch["num_items_in_batch"], mesh["dp"].get_group())
        loss = model(**batch).loss
        loss.backward()
        total = sum_over(loss.detach())
        grads = {name: x.full_tensor() for name, x in grads_of(model).items() if isinstance(x, DTensor)}
        if rank == 0:
            wanted = expected("Gemma3", torch.float64, "packed")
            assert max(error_of(Step(wanted.logits, total, grads), wanted, "packed")) < 1e-11
            assert abs(total - wanted.loss) < 1e-12


def step_by_accelerate(rank: int, n_ranks: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    batch = batch_of("packed")
    model = new_model("Gemma3")
    cp = context_parallel(model)
    shared = accelerator.prepare(model)
    loader = torch.utils.data.DataLoader([{name: x[row] for name, x in batch.items()} for row in range(2)], 2)
    for local in cp.loader(loader):
        loss = shared(**local).loss
        # DDP divides gradients by the number of ranks.
        accelerator.backward(loss * accelerator.num_processes)
    total = cp.loss(loss)
    if rank == 0:
        wanted = expected("Gemma3", torch.float32, "packed")
        assert error_of(Step(wanted.logits, total, grads_of(model)), wanted, "packed")[1] < 1e-5
        assert abs(total - wanted.loss) < 1e-6
    rows = torch.utils.data.DataLoader([{name: x[row % 2] for name, x in batch.items()} for row in range(8)], 1)
    with refused("a dataloader that deals different rows to each rank, as Accelerate's does"):
        next(iter(cp.loader(accelerator.prepare(rows))))


def uneven_rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, 97, (count, 520), generator=generator)
    labels = ids.clone()
    for row in range(count):
        # The Trainer of transformers 5.5 counts the first label of a row, which no token predicts.
        labels[row, : 40 * row + 1] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def trained(folder: str, steps: int, accumulation: int, **options: Any) -> Any:
    args = hf.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options.pop("args", {}),
    )
    rows = uneven_rows(12)
    kind = integration.CPTrainer if "cp" in options else hf.Trainer
    return kind(args=args, train_dataset=rows, eval_dataset=rows[:5], **options)


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


PRECISION = {"loss": 2e-7, "eval_loss": 2e-7, "grad_norm": 1e-12}
"""Trainer adds up losses in float32."""


def train(rank: int, n_ranks: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (n_ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    with in_float64():
        model = new_model("gpt-oss", torch.float64)
        cp = context_parallel(model, mesh["cp"])
        trainer = trained(folder, 3, 4 // (n_ranks // 2), model=model, cp=cp)
        trainer.train()
        wanted = json.loads(Path(folder, "wanted.json").read_text())
        for name, found in wanted.items():
            assert logged(trainer, name) == pytest.approx(found, rel=PRECISION[name])
        # From the middle of an epoch, by another dataloader of Accelerate's.
        model = new_model("gpt-oss", torch.float64)
        cp = context_parallel(model, mesh["cp"])
        again = trained(folder, 3, 4 // (n_ranks // 2), model=model, cp=cp)
        again.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))
        for name, found in wanted.items():
            assert logged(again, name)[-1] == pytest.approx(found[-1], rel=PRECISION[name])
        with refused("prediction_loss_only: expected True, got False"):
            again.predict(uneven_rows(2))


def in_torchrun(rank: int, n_ranks: int) -> None:
    """Variables that Accelerate and Lightning read. The group exists already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(n_ranks),
        LOCAL_WORLD_SIZE=str(n_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        HF_HUB_OFFLINE="1",
    )


def fit_by_lightning(rank: int, n_ranks: int, folder: str) -> None:
    import pytorch_lightning as pl

    in_torchrun(rank, n_ranks)

    class Shared(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model("Gemma3")

        def setup(self, stage: str) -> None:
            self.cp = context_parallel(self.model)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = self.model(**self.cp.shard_batch(batch)).loss
            self.total = self.cp.loss(loss)
            return loss * self.trainer.world_size

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def fit(**options: Any) -> Shared:
        trainer = pl.Trainer(
            **dict(max_steps=1, accelerator="cpu", strategy="ddp", devices=n_ranks, logger=False, **options),
            **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        rows = [{name: x[row] for name, x in batch_of("packed").items()} for row in range(2)]
        module = Shared()
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
        return module

    found, wanted = fit(use_distributed_sampler=False), expected("Gemma3", torch.float32, "packed")
    assert abs(found.total - wanted.loss) < 1e-6
    before = dict(new_model("Gemma3").named_parameters())
    for name, p in found.model.named_parameters():
        step = (before[name] - p).detach() / 0.5
        assert (step - wanted.grads[name]).abs().max() < 1e-4 * wanted.grads[name].abs().max() + 1e-6, name
    with refused("a dataloader that deals different rows to each rank"):
        fit()


@pytest.mark.slow
def test_lightning_computes_the_step_of_one_process(tmp_path: Path) -> None:
    outcome = run_processes(2, fit_by_lightning, str(tmp_path), timeout=60, limit=200)
    assert outcome.exit_codes == [0] * 2, "\n".join(text[-3000:] for text in outcome.texts)


def test_a_trainer_that_would_see_a_shard_is_refused(tmp_path: Path) -> None:
    model, other = (new_model("Mistral") for _ in range(2))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"args": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor: expected 0"),
        ({"args": {"average_tokens_across_devices": False}}, "average_tokens_across_devices: expected True"),
        ({"compute_loss_func": lambda *arguments, **named: 0}, "compute_loss_func: expected None"),
        ({"compute_metrics": lambda predictions: {}}, "compute_metrics: expected None"),
        ({"model": other}, "model: expected the one that context_parallel got"),
        ({"args": {"accelerator_config": {"dispatch_batches": True}}}, "dispatch_batches: expected None or False"),
        ({"args": {"eval_use_gather_object": True}}, "eval_use_gather_object: expected False"),
    ]

    def run(rank: int) -> None:
        for change, words in changes:
            with refused(words):
                trained(str(tmp_path), 1, 1, **{"model": model, "cp": context_parallel(model), **change})
        accelerator = trained(str(tmp_path), 1, 1, model=model, cp=context_parallel(model)).accelerator
        with refused("slice_fn_for_dispatch: expected None"):
            accelerator.prepare_data_loader([], slice_fn_for_dispatch=len)
        with refused("use_gather_object: expected None, or its default"):
            accelerator.gather_for_metrics(torch.ones(1), use_gather_object=True)

    on_ranks(1, run)


def all_of_them(rank: int, n_ranks: int, folder: str) -> None:
    in_torchrun(rank, n_ranks)
    torch.manual_seed(0)
    step_in_another_thread(rank, n_ranks)
    step_by_fsdp(rank, n_ranks)
    step_by_accelerate(rank, n_ranks)
    train(rank, n_ranks, folder)


def test_stacks_compute_the_step_of_one_process(tmp_path: Path) -> None:
    with in_float64():
        alone = trained(str(tmp_path / "alone"), 3, 4, model=new_model("gpt-oss", torch.float64))
        alone.train()
    wanted = {name: logged(alone, name) for name in PRECISION}
    assert [len(found) for found in wanted.values()] == [3, 2, 3]
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    outcome = run_processes(4, all_of_them, str(tmp_path), timeout=60, limit=300)
    assert outcome.exit_codes == [0] * 4, "\n".join(text[-3000:] for text in outcome.texts)
