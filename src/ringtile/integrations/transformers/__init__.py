"""Hugging Face transformers: ``attn_implementation="ringtile"`` for the models that use its attention interface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringtile.integrations.transformers.calibrate import calibrate
from ringtile.integrations.transformers.indexers import index_losses
from ringtile.integrations.transformers.registry import model_facts, register, use_ringtile

if TYPE_CHECKING:
    from ringtile.integrations.transformers.parallel import (
        ContextParallel as ContextParallel,
        context_parallel as context_parallel,
    )
    from ringtile.integrations.transformers.serving import continuous_batching as continuous_batching

    CPTrainer: Any

# A model on one process does not need torch.distributed, and a loop of your own no Trainer.
_LATER = {
    "continuous_batching": "serving",
    "ContextParallel": "parallel",
    "context_parallel": "parallel",
    "CPTrainer": "trainer",
}
__all__ = ["calibrate", "index_losses", "model_facts", "register", "use_ringtile", *_LATER]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
