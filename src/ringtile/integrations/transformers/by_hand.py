"""Models whose attention is written by hand, Longformer and BigBird: it is replaced, with the same weights."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.functional import merge_attention, sparse_attention
from ringtile.integrations.transformers.door import check_method, part_of, refuse_arguments, refuse_other
from ringtile.integrations.transformers.masks import is_streamed
from ringtile.patterns import Blocks, Window


def heads_of(x: Tensor, head_dim: int, *projections: nn.Module) -> list[Tensor]:
    """Return the heads ``[..., H, N, D]`` of projections of hidden states ``[..., N, E]``."""
    return [project(x).unflatten(-1, (-1, head_dim)).transpose(-2, -3) for project in projections]


def replace_methods(model: nn.Module, methods: Mapping[str, Mapping[str, Callable[..., Any]]]) -> None:
    """Replace methods of a model's modules, by the names of their classes, in place. The modules keep their weights."""
    # Some parts copy the config of their layer, which a switch does not reach.
    owners = [owner for owner in model.modules() if hasattr(owner, "set_attn_implementation")]
    configs: dict[nn.Module, Any] = {part: owner.config for owner in owners for part in owner.modules()}
    for module in model.modules():
        for name, compute in methods.get(type(module).__name__, {}).items():
            check_method(type(module), name)
            module.__dict__.setdefault("config", configs[module])
            # A partial function is copied and pickled with its module, which a method that is no member is not.
            module.__dict__[name] = partial(_as_written, name, compute, configs[module], module)


def _as_written(
    name: str, compute: Callable[..., Any], config: Any, module: nn.Module, *given: Any, **named: Any
) -> Any:
    """Call a method of a module that `replace_methods` replaced, or its own after a switch to another attention."""
    if is_streamed(config):
        try:
            return compute(module, *given, **named)
        except AttributeError as error:
            refuse_other(error, module)
            raise
    if name == "compute_bias" and not hasattr(module, "relative_attention_bias"):
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return getattr(type(module), name)(module, *given, **named)


def _attend_longformer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Return the output ``[B, N, E]`` of a ``LongformerSelfAttention``, in a tuple (arXiv:2004.05150)."""
    if output_attentions:
        raise ValueError("output_attentions: expected False for longformer in use_ringtile, got True")
    if is_index_masked is None or is_index_global_attn is None:
        raise ValueError("is_index_masked, is_index_global_attn: expected bool [B, N], got None")
    dropout = self.dropout if self.training else 0.0
    q, k, v = heads_of(hidden_states, self.head_dim, self.query, self.key, self.value)
    real, window = ~is_index_masked, Window(self.one_sided_attn_window_size)
    keep = real & ~is_index_global_attn
    near = sparse_attention(q, k, v, window, key_mask=keep, return_lse=True, dropout_p=dropout)
    out = near[0]
    if is_global_attn:
        # The global tokens of each batch element come first, and their number differs.
        count = int(is_index_global_attn.sum(1).max())
        at = is_index_global_attn.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
        chosen = is_index_global_attn.gather(1, at)
        of_token = at[:, None, :, None].expand(-1, self.num_heads, -1, self.head_dim)
        keys, values = k.gather(2, of_token), v.gather(2, of_token)
        far = sparse_attention(q, keys, values, key_mask=chosen, return_lse=True, dropout_p=dropout)
        out = merge_attention(*zip(near, far, strict=True))[0]
        rows = hidden_states.gather(1, at[:, :, None].expand(-1, -1, hidden_states.shape[2]))
        (query,) = heads_of(rows, self.head_dim, self.query_global)
        keys, values = heads_of(hidden_states, self.head_dim, self.key_global, self.value_global)
        all_keys = sparse_attention(query, keys, values, key_mask=real, dropout_p=dropout)
        kept = torch.where(chosen[:, None, :, None], all_keys, out.gather(2, of_token))
        out = out.scatter(2, of_token, kept)
    out = out.masked_fill(is_index_masked[:, None, :, None], 0)
    return (out.transpose(1, 2).flatten(2),)


def _attend_big_bird(
    self: Any,
    hidden_states: Tensor,
    band_mask: Tensor | None = None,
    from_mask: Tensor | None = None,
    to_mask: Tensor | None = None,
    from_blocked_mask: Tensor | None = None,
    to_blocked_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output ``[B, N, E]`` of a ``BigBirdBlockSparseAttention``, and None (arXiv:2007.14062)."""
    refuse_arguments(options)
    batch, tokens, _ = hidden_states.shape
    if tokens % self.block_size or to_mask is None or from_mask is None:
        raise ValueError(
            f"hidden_states: expected a multiple of {self.block_size} tokens with masks, got {hidden_states.shape=}"
        )
    heads = self.num_attention_heads
    q, k, v = heads_of(hidden_states, self.attention_head_size, self.query, self.key, self.value)
    key_mask = to_mask.view(batch, tokens) != 0
    block = torch.arange(tokens // self.block_size, device="cpu")
    edge = (block == 0) | (block == block[-1])
    kept = ((block[:, None] - block).abs() <= 1) | edge[:, None] | edge
    parts = [sparse_attention(q, k, v, Blocks(kept, block=self.block_size), key_mask=key_mask, return_lse=True)]
    # A key that is chosen twice counts twice, as in transformers: in eval mode, every choice is block 0.
    choices, times = torch.unique(_choices(self, tokens), dim=0, return_counts=True)
    for choice, count in zip(choices, times.tolist(), strict=True):
        chosen = kept.new_zeros(heads, len(block), len(block))
        chosen[:, 1:-1].scatter_(2, choice.unsqueeze(2), True)
        out, lse = sparse_attention(q, k, v, Blocks(chosen, block=self.block_size), key_mask=key_mask, return_lse=True)
        parts.append((out, lse + math.log(count)))
    out = merge_attention(*zip(*parts, strict=True))[0] * from_mask
    return out.to(hidden_states.dtype).transpose(1, 2).flatten(2), None


def _choices(attention: Any, tokens: int) -> Tensor:
    """Return the random blocks of transformers as int64 ``[choices, H, blocks - 2]``."""
    import numpy as np

    block, count, heads = attention.block_size, attention.num_random_blocks, attention.num_attention_heads
    if attention.training:
        np.random.seed(attention.seed)
    if tokens in (1024, 3072, 4096):
        # The lengths of the paper have plans of their own.
        sizes, kept = (attention.max_seqlen, attention.max_seqlen, block, block), tokens // block - 2
        drawn = [attention._bigbird_block_rand_mask(*sizes, count, last_idx=1024)[:kept] for _ in range(heads)]
    else:
        plan = attention._get_rand_attn_plan(tokens, block, count)
        drawn = attention._bigbird_block_rand_mask_with_head(tokens, tokens, block, block, heads, *plan)
    return torch.from_numpy(np.stack(drawn)).long().movedim(2, 0)


CONVERTED: dict[str, tuple[str, Callable[..., Any]]] = {
    "longformer": ("LongformerSelfAttention", _attend_longformer),
    # transformers computes sequences of a few blocks with full attention, and layers that it has switched stay so.
    "big_bird": ("BigBirdBlockSparseAttention", _attend_big_bird),
}
"""The attention modules of kinds of models that do not look up an attention function, and what replaces theirs."""


def convert(model: nn.Module, kind: str) -> None:
    """Replace the attention of each layer of a model in place."""
    name, attend = CONVERTED[kind]
    replaced = part_of(f"models.{kind}.modeling_{kind}:{name}", kind)
    for module in model.modules():
        if isinstance(module, replaced):
            check_method(replaced, "forward")
            module.forward = MethodType(attend, module)
