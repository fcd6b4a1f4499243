"""Hugging Face transformers: ``attn_implementation="ringtile"`` for the models that use its attention interface."""

from typing import TYPE_CHECKING, Any

from ringtile.integrations.transformers.registry import register, use_ringtile

if TYPE_CHECKING:
    from ringtile.integrations.transformers.parallel import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel", "register", "use_ringtile"]


def __getattr__(name: str) -> Any:
    # A model on one process does not need torch.distributed.
    if name in ("ContextParallel", "context_parallel"):
        from ringtile.integrations.transformers import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
