"""Facts that identify a model, for files that are made for one."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

_SAMPLE = 1024
"""Values of each parameter that the hash covers."""


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return the class of a model of transformers, its sizes, and a hash of values from each of its weights.

    The facts do not depend on the dtype of the weights. `ringtile.adaptive.Calibration` keeps them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        >>> facts = model_facts(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)))
        >>> facts["name"], facts["layers"], facts["heads"], len(facts["weights_sha256"])
        ('LlamaForCausalLM', 2, 4, 64)
    """
    config: Any = model.config
    config = config.get_text_config()
    heads = config.num_attention_heads
    known = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _SAMPLE)].to(torch.bfloat16).cpu().view(torch.int16)
        known.update(f"{name}{tuple(parameter.shape)}{some.tolist()}".encode())
    return {
        "name": type(model).__name__,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "key_heads": getattr(config, "num_key_value_heads", None) or heads,
        "weights_sha256": known.hexdigest(),
    }
