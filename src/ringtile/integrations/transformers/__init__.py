"""Hugging Face transformers: ``attn_implementation="ringtile"`` for the models that use its attention interface."""

from ringtile.integrations.transformers.registry import register, use_ringtile

__all__ = ["register", "use_ringtile"]
