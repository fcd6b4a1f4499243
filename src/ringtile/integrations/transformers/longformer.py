"""Longformer on ringtile: its attention is written by hand, so it is replaced, with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringtile.functional import merge_attention, sparse_attention
from ringtile.patterns import Window


class LongformerWindow(nn.Module):
    """Longformer's attention: a window, and global tokens with projections of their own (arXiv:2004.05150).

    It has the parameters of the module that it replaces, under the same names.

    Args:
        replaced: A ``LongformerSelfAttention`` of transformers.
    """

    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_global: nn.Module
    key_global: nn.Module
    value_global: nn.Module

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
            setattr(self, name, getattr(replaced, name))
        self.num_heads, self.head_dim = replaced.num_heads, replaced.head_dim
        self.window = Window(replaced.one_sided_attn_window_size)
        self.dropout = replaced.dropout
        self.train(replaced.training)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        """Return the output ``[B, N, E]`` for hidden states ``[B, N, E]``, in a tuple.

        Raises:
            ValueError: If the weights are asked for, or the masks of padding and global tokens are missing.
        """
        if output_attentions:
            raise ValueError("output_attentions: ringtile does not support attention weights as an output")
        if is_index_masked is None or is_index_global_attn is None:
            raise ValueError("is_index_masked, is_index_global_attn: expected bool [B, N], got None")
        dropout = self.dropout if self.training else 0.0
        q, k, v = (self._heads(project(hidden_states)) for project in (self.query, self.key, self.value))
        real = ~is_index_masked
        near = sparse_attention(
            q, k, v, self.window, key_mask=real & ~is_index_global_attn, dropout_p=dropout, return_lse=True
        )
        out = near[0]
        if is_global_attn:
            # The global tokens of each batch element come first, and their number differs.
            count = int(is_index_global_attn.sum(1).max())
            at = is_index_global_attn.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
            chosen = is_index_global_attn.gather(1, at)
            of_token = at[:, None, :, None].expand(-1, self.num_heads, -1, self.head_dim)
            far = sparse_attention(
                q, k.gather(2, of_token), v.gather(2, of_token), key_mask=chosen, dropout_p=dropout, return_lse=True
            )
            out = merge_attention(*zip(near, far, strict=True))[0]
            rows = hidden_states.gather(1, at[:, :, None].expand(-1, -1, hidden_states.shape[2]))
            all_keys = sparse_attention(
                self._heads(self.query_global(rows)),
                self._heads(self.key_global(hidden_states)),
                self._heads(self.value_global(hidden_states)),
                key_mask=real,
                dropout_p=dropout,
            )
            kept = torch.where(chosen[:, None, :, None], all_keys, out.gather(2, of_token))
            out = out.scatter(2, of_token, kept)
        out = out.masked_fill(is_index_masked[:, None, :, None], 0)
        return (out.transpose(1, 2).flatten(2),)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)


def convert_longformer(model: nn.Module) -> None:
    """Replace the attention of each layer of a Longformer in place. Layers that are converted stay as they are."""
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    for module in list(model.modules()):
        if isinstance(attention := getattr(module, "self", None), LongformerSelfAttention):
            module.self = LongformerWindow(attention)
