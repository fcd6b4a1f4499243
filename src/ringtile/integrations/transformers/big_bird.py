"""BigBird on ringtile: its attention over blocks is written by hand, so it is replaced, with the same weights."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.functional import merge_attention, sparse_attention
from ringtile.patterns import Blocks


def _attend(
    self: Any,
    hidden_states: Tensor,
    band_mask: Tensor | None = None,
    from_mask: Tensor | None = None,
    to_mask: Tensor | None = None,
    from_blocked_mask: Tensor | None = None,
    to_blocked_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a ``BigBirdBlockSparseAttention``, ``self`` (arXiv:2007.14062).

    Returns the output ``[B, N, E]``, and None in place of the weights. Raises ValueError if the weights are asked for,
    the length is not a multiple of the block size, or the padding is missing.
    """
    if options.get("output_attentions"):
        raise ValueError("output_attentions: ringtile does not support attention weights as an output")
    batch, tokens, _ = hidden_states.shape
    if tokens % self.block_size or to_mask is None or from_mask is None:
        raise ValueError(
            f"hidden_states: expected a multiple of {self.block_size} tokens with masks, got {hidden_states.shape=}"
        )
    heads = self.num_attention_heads
    q, k, v = (
        project(hidden_states).view(batch, tokens, heads, -1).transpose(1, 2)
        for project in (self.query, self.key, self.value)
    )
    key_mask = to_mask.view(batch, tokens) != 0
    block = torch.arange(tokens // self.block_size)
    edge = (block == 0) | (block == block[-1])
    kept = ((block[:, None] - block).abs() <= 1) | edge[:, None] | edge
    parts = [sparse_attention(q, k, v, Blocks(kept, block=self.block_size), key_mask=key_mask, return_lse=True)]
    # A key that is chosen twice counts twice, as in transformers: in eval mode, every choice is block 0.
    choices, times = torch.unique(_choices(self, tokens), dim=0, return_counts=True)
    for choice, count in zip(choices, times.tolist(), strict=True):
        chosen = torch.zeros(heads, len(block), len(block), dtype=torch.bool)
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
        drawn = [
            attention._bigbird_block_rand_mask(
                attention.max_seqlen, attention.max_seqlen, block, block, count, last_idx=1024
            )[: tokens // block - 2]
            for _ in range(heads)
        ]
    else:
        lengths, counts = attention._get_rand_attn_plan(tokens, block, count)
        drawn = attention._bigbird_block_rand_mask_with_head(
            from_seq_length=tokens,
            to_seq_length=tokens,
            from_block_size=block,
            to_block_size=block,
            num_heads=heads,
            plan_from_length=lengths,
            plan_num_rand_blocks=counts,
        )
    return torch.from_numpy(np.stack(drawn)).long().movedim(2, 0)


def convert_big_bird(model: nn.Module) -> None:
    """Replace the attention of each layer of a BigBird in place.

    transformers computes sequences of a few blocks with full attention, and layers that it has switched to that stay.
    """
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    for module in model.modules():
        if isinstance(module, BigBirdBlockSparseAttention):
            module.forward = MethodType(_attend, module)
