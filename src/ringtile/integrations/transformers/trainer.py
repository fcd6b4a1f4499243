"""`CPTrainer`: the Trainer of transformers over rows that ranks share.

All that is private or version-bound about Trainer and Accelerate is in this file.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from ringtile.integrations.transformers.parallel import ContextParallel
from ringtile.patterns.checks import refuse_unknown


class CPTrainer(Trainer):  # type: ignore[misc]
    """The Trainer of transformers, for a model that `context_parallel` has shared.

    Ranks of one group get the same rows, and each computes its part of them. Loss, gradient norm, clipping,
    accumulation and evaluation loss are those of one process per group.

    Args:
        cp: The result of `context_parallel` for the model.
        arguments: As for Trainer.

    Raises:
        ValueError: If the Trainer would compute a loss or a metric of a shard: label smoothing,
            ``compute_metrics``, a loss function of your own, or no ``average_tokens_across_devices``.

    Example, under ``torchrun``::

        cp = context_parallel(model)
        CPTrainer(model, TrainingArguments("run"), train_dataset=rows, cp=cp).train()
    """

    def __init__(self, *arguments: Any, cp: ContextParallel, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.cp = cp
        args: Any = self.args
        smoothing, averages = args.label_smoothing_factor, args.average_tokens_across_devices
        balances = getattr(args, "train_sampling_strategy", None) == "batch_rebalance"
        config = getattr(args, "parallelism_config", None)
        of_shard = "None, because it would see the logits and labels of a shard"
        # Settings of which the Trainer would compute a loss or a metric of a shard.
        for name, wrong, wanted in (
            ("model", self.model is not cp.model, "the one that context_parallel got"),
            ("label_smoothing_factor", smoothing != 0, "0, because Trainer would shift the labels of a shard again"),
            ("average_tokens_across_devices", not averages, "True, because each rank has a part of the tokens"),
            ("dispatch_batches", self.accelerator.dispatch_batches, "None or False, because each rank reads its rows"),
            ("eval_use_gather_object", args.eval_use_gather_object, "False, because losses are tensors"),
            ("compute_loss_func", self.compute_loss_func is not None, of_shard),
            ("compute_metrics", self.compute_metrics is not None, of_shard),
            ("train_sampling_strategy", balances, "one that does not balance batches between ranks"),
            ("parallelism_config", config is not None, "None, because Accelerate would refuse windows and strip masks"),
        ):
            if wrong:
                raise ValueError(f"{name}: expected {wanted}")
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                "model: expected one that divides its loss by num_items_in_batch, got "
                f"{type(self.model).__name__}, whose forward has no **kwargs"
            )
        self._deal_rows_to_groups()

    def _deal_rows_to_groups(self) -> None:
        """Make Accelerate count groups of ranks, not ranks, when it deals out rows."""
        from accelerate.data_loader import prepare_data_loader

        accelerator = self.accelerator
        firsts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(firsts, min(dist.get_process_group_ranks(self.cp.group)))
        groups = sorted(set(firsts))
        number = groups.index(firsts[dist.get_rank()])

        def prepare(loader: Any, device_placement: bool | None = None, **options: object) -> Any:
            refuse_unknown(options, type(accelerator).prepare_data_loader, "CPTrainer")
            return prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=len(groups),
                process_index=number,
                split_batches=accelerator.split_batches,
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                rng_types=accelerator.rng_types.copy(),
                # The first rank would deal out slices to all ranks.
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )

        # Trainer looks for this argument in the signature.
        def gather(x: Any, use_gather_object: bool = False, **options: object) -> Any:
            """Return the losses of one rank per group, without the rows that fill up the last batch."""
            options |= {"use_gather_object": use_gather_object}
            refuse_unknown(options, type(accelerator).gather_for_metrics, "CPTrainer")
            every = accelerator.gather(x).unflatten(0, (len(firsts), -1))[groups].flatten(0, 1)
            state = accelerator.gradient_state
            return every[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else every

        accelerator.prepare_data_loader = prepare
        accelerator.gather_for_metrics = self.gather_function = gather

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *arguments: Any, **named: Any) -> Any:
        # Not in the dataloader: Accelerate makes another one to resume in the middle of an epoch.
        return super().get_batch_samples(map(self.cp.shard_batch, epoch_iterator), *arguments, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: object = None, **options: object
    ) -> Any:
        refuse_unknown(options, Trainer.prediction_step, "CPTrainer")
        if not prediction_loss_only:
            raise ValueError("prediction_loss_only: expected True, got False; logits are those of a shard")
        batch = self._prepare_inputs(self.cp.shard_batch(inputs))
        if "labels" not in batch:
            raise ValueError(f"labels: expected them in the rows of an evaluation, got {sorted(inputs)}")
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**batch).loss
        return self.cp.loss(loss), None, None
